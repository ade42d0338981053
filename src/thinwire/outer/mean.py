"""The mean over ranks of all tensors of an optimizer, encoded, in one call.

A policy says how each tensor is sent, as for gradients of DDP: large matrices by the codec, vectors and small
tensors in float32. Tensors keep their scales and residuals, but travel together. All ranks receive the
same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from thinwire.channel import Channel
from thinwire.codecs import AnySpec, Cast
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.integrations.routes import BucketPlan, GradientPlace, Route, RoutedTensor, make
from thinwire.outer.flat import Flat, Layout
from thinwire.policy import SMALL, Policy, Rule, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import arguments
from thinwire.runtimes.runtime import runtime_of
from thinwire.slots import SENT, slot

EXACT = Rule("fp32", why="exact")


@dataclass(frozen=True)
class Sending:
    """How an optimizer communicates: the options that all of them have."""

    codec: AnySpec | Policy
    schedule: str  #: of all tensors
    group: dist.ProcessGroup | None = None
    min_numel: int = SMALL  #: elements under which a tensor is sent in float32, as are vectors; 0: none is
    check_start: bool = True

    def policy(self, feedback: str = "float32") -> Policy:
        """Return the policy; a lossy codec without feedback gets `feedback`.

        >>> [rule.codec for rule in Sending("dct/64:8", "one_shot").policy().rules]
        ['fp32', 'fp32', 'dct/64:8+ef']
        """
        if isinstance(self.codec, Policy):
            _refuse_phases(self.codec)
            rules = [
                Rule(**{**vars(rule), "codec": _with_feedback(rule.codec, feedback)})
                for rule in self.codec.rules
            ]
            return Policy(self.codec.name, tuple(rules))
        if type(self.min_numel) is not int or self.min_numel < 0:
            raise InputError(f"min_numel must be a number of elements, 0 or more, not {self.min_numel!r}")
        spec = _with_feedback(self.codec, feedback)
        exact = (Rule("fp32", max_ndim=1), Rule("fp32", max_numel=self.min_numel - 1))
        return Policy(spec, (*(exact if self.min_numel else ()), Rule(spec)))


def _with_feedback(codec: AnySpec, feedback: str) -> str:
    resolved = get_codec(codec)
    lossless = isinstance(resolved, Cast) and resolved.dtype == "fp32"
    return resolved.spec if lossless or resolved.feedback else resolved.with_feedback(feedback).spec


def _refuse_phases(policy: Policy) -> None:
    if policy.ladder is not None or policy.phase(1 << 60, 1 << 60) != (0, 0):
        raise InputError(f"policy '{policy.name}' changes with steps, which only gradients of DDP support")


@dataclass
class Mean:
    """Replaces tensors by their means over ranks, and keeps residuals by the tensors' names."""

    sending: Sending
    policy: Policy
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    sent_nbytes: int = 0  #: by this rank, so far
    _plans: dict[tuple[int, bool], tuple[Flat, BucketPlan]] = field(default_factory=dict)

    def channel(self, codec: str) -> Channel:
        """Return the channel of a codec, which keeps the residuals of all tensors sent with it."""
        if codec not in self.channels:
            self.channels[codec] = Channel(codec)
        return self.channels[codec]

    def rule(self, tensor: TensorInfo, *, exact: bool = False) -> Rule:
        """Return the rule of a tensor."""
        return EXACT if exact else self.policy.route(tensor)

    def routes(self, tensors: Sequence[TensorInfo], *, exact: bool = False) -> dict[str, Route]:
        """Return the codec and the schedule of every tensor, by name."""
        return {
            tensor.name: Route(self.rule(tensor, exact=exact).codec, self.sending.schedule)
            for tensor in tensors
        }

    def reduce(self, flat: Flat, layout: Layout, step: int, *, exact: bool = False) -> None:
        """Replace a vector by its mean over ranks: encoded, or in float32 (`exact`)."""
        plan = self._plan(flat, layout, exact=exact)
        runtime = plan.calls.runtime
        if runtime.world == 1:
            return
        rng = Stream(0, step=step, rank=runtime.rank) if plan.calls.random else None
        works = [part.start(runtime, [flat.vector], rng) for part in plan.calls.parts]
        for work in works:
            work.wait()
        self.sent_nbytes += plan.sent_nbytes

    def round_trip(self, flat: Flat, layout: Layout) -> None:
        """Encode and decode a vector on this rank, as `one_shot` does in a world of one."""
        for info, tensor in zip(layout.infos, flat.tensors, strict=True):
            channel, _ = arguments.for_shape(self.channel(self.rule(info).codec), info.shape)
            row = tensor.view(-1)
            row.copy_(channel.decode(channel.encode(row, slot(info.name, SENT)), row.numel()))

    def forget(self) -> None:
        """Drop the plans: tensors have other places from now on."""
        self._plans.clear()

    def _plan(self, flat: Flat, layout: Layout, *, exact: bool) -> BucketPlan:
        key = id(flat), exact
        if key not in self._plans:
            routes = self.routes(layout.infos, exact=exact)
            sent = [
                RoutedTensor(info, self.rule(info, exact=exact), routes[info.name]) for info in layout.infos
            ]
            places = [_place(info, start) for info, start in zip(layout.infos, layout.starts, strict=False)]
            runtime = runtime_of(self.sending.group, layout.device)
            self._plans[key] = flat, make(sent, places, flat.vector, runtime, self.channel)
        return self._plans[key][1]

    def residuals(self) -> list[tuple[str, Tensor]]:
        """Return all residuals with their slots."""
        return [pair for channel in self.channels.values() for pair in channel.residuals.items()]


def _place(info: TensorInfo, start: int) -> GradientPlace:
    strides, width = [], 1
    for side in reversed(info.shape):
        strides.append(width)
        width *= side
    return GradientPlace(start, info.shape, tuple(reversed(strides)))
