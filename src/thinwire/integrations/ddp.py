"""DistributedDataParallel: gradients are encoded as they become ready.

    model = DistributedDataParallel(net)
    wire = thinwire.attach(model, "int8")          # one line

DDP hands over buckets of gradients while the backward pass goes on. Every gradient of a bucket is sent as its
policy says, those with the same codec together. Residuals are kept by parameter name, so they survive the
rebuilding of buckets, and a checkpoint.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire import collectives, policy
from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.policy import Policy, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes.trace import trace

log = logging.getLogger(__name__)
Route = tuple[str, str]  # codec and schedule
Shapes = tuple[tuple[int, ...], ...]
VERSION = 1


@dataclass
class Wire:
    """What is attached to a model: a policy, the residuals, and a count of what was sent."""

    policy: Policy
    group: dist.ProcessGroup | None = None
    seed: int = 0
    step: int = 0  #: of the optimizer, counted by the first bucket of each backward pass that communicates
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    sent_nbytes: int = 0  #: by this rank, so far
    fp32_nbytes: int = 0  #: that a float32 all-reduce would have sent
    tensors: dict[int, Tensorlike] = field(default_factory=dict)  #: by the identity of a parameter
    _costs: dict[tuple[Route, Shapes], tuple[int, int]] = field(default_factory=dict)

    def reduce(self, bucket: "dist.GradBucket") -> "torch.futures.Future[Tensor]":  # type: ignore[name-defined]
        """The hook's work: start sending a bucket, and give a future of its mean."""
        if bucket.index() == 0:
            self.step += 1
        by_route: dict[Route, list[tuple[Tensor, str]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            tensor = self.tensors[id(parameter)]
            rule = self.policy.route(tensor, self.step - 1)
            by_route.setdefault((rule.codec, rule.schedule), []).append((gradient, tensor.name))
        futures = [self._send(route, found) for route, found in by_route.items()]
        buffer = bucket.buffer()
        return torch.futures.collect_all(futures).then(lambda done: _checked(done, buffer))

    def _send(self, route: Route, found: list[tuple[Tensor, str]]) -> "torch.futures.Future[Any]":
        codec, schedule = route
        channel = self.channels.setdefault(codec, Channel(codec))
        tensors, names = [gradient for gradient, _ in found], [name for _, name in found]
        stream = Stream(self.seed, step=self.step)
        work = collectives.all_reduce(
            tensors, channel, "avg", self.group, schedule, async_op=True, name=names, rng=stream
        )
        assert work is not None
        self._count(route, tuple(tuple(x.shape) for x in tensors))
        return work.get_future()

    def _count(self, route: Route, shapes: Shapes) -> None:
        if (route, shapes) not in self._costs:
            world, numels = dist.get_world_size(self.group), [math.prod(shape) for shape in shapes]
            ours = trace(numels, route[0], world, route[1], shapes=shapes).sent_nbytes
            self._costs[route, shapes] = ours, trace(sum(numels), "fp32", world, "native").sent_nbytes
        ours, theirs = self._costs[route, shapes]
        self.sent_nbytes += ours
        self.fp32_nbytes += theirs

    # What it did

    def stats(self) -> dict[str, Any]:
        """Steps, bytes sent by this rank, and what float32 would have sent."""
        return {
            "policy": self.policy.name,
            "steps": self.step,
            "sent_nbytes": self.sent_nbytes,
            "fp32_nbytes": self.fp32_nbytes,
            "ratio": self.fp32_nbytes / self.sent_nbytes if self.sent_nbytes else 1.0,
            "residual_norms": {
                slot: held.float().norm().item()
                for channel in self.channels.values()
                for slot, held in channel.residuals.items()
                if held.is_floating_point()
            },
        }

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: residuals by codec and parameter name, and the step."""
        return {
            "version": VERSION,
            "policy": self.policy.to_toml(),
            "step": self.step,
            "world": dist.get_world_size(self.group),
            "channels": {codec: channel.state_dict() for codec, channel in self.channels.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run of the same policy and world left off, bit for bit."""
        if state.get("version") != VERSION or not isinstance(state.get("channels"), Mapping):
            raise InputError(f"this is no state of thinwire.attach: it needs version {VERSION} and channels")
        if state.get("policy") != self.policy.to_toml():
            raise InputError(
                "the state is of another policy; attach that one, or start without its residuals"
            )
        world = dist.get_world_size(self.group)
        if state.get("world") != world:
            raise InputError(f"the state is of {state.get('world')} ranks, here are {world}")
        for codec, held in state["channels"].items():
            self.channels.setdefault(codec, Channel(codec)).load_state_dict(held)
        self.step = int(state["step"])


def attach(model: DistributedDataParallel, codec: str | Policy = "int8", *, seed: int = 0) -> Wire:
    """Send a model's gradients as a policy, a recipe or a codec says, from the next backward pass on.

    The handle that is returned counts bytes and owns the residuals: save its `state_dict` beside the model's.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"attach takes a DistributedDataParallel model, not {type(model).__name__}; wrap it first"
        )
    wire = Wire(policy.get(codec), model.process_group, seed)
    described = policy.describe(model.module)
    for tensor, parameter in zip(described, model.module.parameters(), strict=True):
        wire.tensors[id(parameter)] = tensor
    model.register_comm_hook(wire, hook)
    if dist.get_rank(model.process_group) == 0:
        log.info(_summary(wire.policy, described))
    return wire


def hook(state: Wire, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A DDP communication hook; its state is a `Wire`."""
    return state.reduce(bucket)


def _summary(chosen: Policy, tensors: list[Tensorlike]) -> str:
    routes = [get_codec(chosen.route(tensor).codec).for_shape(tensor.shape) for tensor in tensors]
    encoded = sum(codec.name != "fp32" for codec in routes)
    sent = sum(codec.nbytes(tensor.numel) for codec, tensor in zip(routes, tensors, strict=True))
    share = sent / max(1, sum(4 * tensor.numel for tensor in tensors))
    return f"thinwire: {chosen.name}: compressing {encoded} of {len(tensors)} tensors, {share:.1%} of bytes"


def _checked(done: "torch.futures.Future[Any]", buffer: Tensor) -> Tensor:
    for each in done.value():
        each.value()  # raises what went wrong
    return buffer
