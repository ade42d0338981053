"""Data parallelism over N nodes, on one device: real gradients through real codecs and schedules.

Every node has its own micro-batch. Its gradients are kept until all nodes have theirs, then they are reduced
by the schedule that would run on a network, in `thinwire.runtimes.local`: the bits are those of N processes.
What is emulated is the network and its time, nothing else. (Layers that round at random draw by the number
of the call, where processes would draw by the rank.)

Memory: a sum that a network makes in float32 needs one number to a parameter, whatever N. Other schedules see
the gradients of all nodes (APS must know the largest before it can send any), so N numbers to a parameter,
and the wires.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire import codecs
from thinwire.channel import Channel
from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.integrations.state import debt
from thinwire.policy import LADDER, NOOP, Policy, Rule, Tensorlike, describe
from thinwire.rounding import Stream
from thinwire.runtimes import local
from thinwire.runtimes.trace import trace
from thinwire.schedules.choose import choose
from thinwire.simulate import state_checks
from thinwire.simulate.layers import Simulated
from thinwire.simulate.quantizer import Quantizer

Loss = Callable[..., Tensor]  #: of a model and one node's part of the batch
Route = tuple[str, str]  # codec and schedule


@dataclass(frozen=True)
class _Pile:
    """Gradients of tensors that take one route: of every node, or only their sum."""

    route: Route
    tensors: tuple[Tensorlike, ...]
    places: tuple[int, ...]  #: among all tensors
    held: tuple[Tensor, ...]  #: [nodes, ...] of each, or [...]

    @property
    def sums(self) -> bool:
        return self.route == ("fp32", "native")


class Nodes:
    """Many nodes that train one model together.

    >>> model = nn.Linear(4, 1)
    >>> nodes = Nodes(model, 8, codec="aps/e4m3", schedule="accumulate/4")
    >>> def loss(model, x, y):
    ...     return (model(x) - y).square().mean()
    >>> _ = nodes.backward(loss, torch.randn(32, 4), torch.randn(32, 1))     # 4 samples to a node
    >>> model.weight.grad.shape
    torch.Size([1, 4])

    In a loop of your own call `take()` after every node's `loss.backward()`, and `reduce()` after the last.
    It leaves the mean in `.grad`, in place of what was there, where any optimizer finds it. A parameter that
    no node used has a gradient of zeros then, as in DDP. One node alone sends nothing: its gradients are
    float32, whatever the wire.

    `codec` is a codec for all tensors (a spec, a `Codec`, a `Format`), or a `thinwire.Policy`
    (`thinwire.policy.get("int8")` for a recipe), in which case tensors go as its rules say and `schedule` is
    not used. A codec with memory has one for every node.
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: int,
        codec: AnySpec | Policy = "fp32",
        schedule: str = "auto",
        *,
        seed: int = 0,
        inside: int = 1,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(nodes, int):
            found = f"{type(model).__name__} and {type(nodes).__name__}"
            raise InputError(f"Nodes takes a torch.nn.Module and a number of nodes, not {found}")
        if nodes < 1:
            raise InputError(f"there must be at least one node, not {nodes}")
        if not isinstance(codec, Policy):
            codec = Policy("simulated", (Rule(codec, schedule),))
        if any(rule.codec == LADDER for rule in codec.rules):
            raise InputError(f"nodes do not climb the ladder of policy '{codec.name}'; use rules with steps")
        if codec.name == NOOP:
            raise InputError(
                "with the policy 'noop' replicas drift apart, and nodes share one model; use fp32"
            )
        self.model, self.count, self.policy, self.seed, self.inside = model, nodes, codec, seed, inside
        self.step, self.epoch = 0, 0
        self.channels: dict[str, list[Channel]] = {}  #: of codecs with memory, one for each node
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        wanted = {name for name, each in model.named_parameters() if each.requires_grad}
        names = [name for name, _ in model.named_parameters()]
        self._names = [name for name in names if name in wanted]
        self._tensors = [each for name, each in zip(names, describe(model), strict=True) if name in wanted]
        self._piles: list[_Pile] = []
        self._taken = 0
        self._before: dict[str, Route] = {}  # of the last step, by tensor

    # What a loop calls

    def backward(self, loss: Loss, *batch: Tensor, together: int = 1, scale: float = 1.0) -> Tensor:
        """Gradients of all nodes, reduced, in `.grad`; gives the mean loss.

        Every tensor of `batch` is cut into equal parts along its first dimension, one for each node, and
        `loss(model, *parts)` is called. `together` nodes are computed at a time, by `torch.func.vmap`: faster
        for small networks, but a layer may then add in another order than a node by itself, so bits differ.
        With `scale` the loss is multiplied by it first, and gradients arrive scaled.
        """
        self._check(batch)
        if together < 1:
            raise InputError(f"together is how many nodes are computed at a time, 1 or more, not {together}")
        parts = [each.unflatten(0, (self.count, -1)) for each in batch]
        if min(together, self.count) > 1:
            self._check_vmap()
        try:
            if min(together, self.count) > 1:
                starts = range(0, self.count, together)
                some = ([each[first : first + together] for each in parts] for first in starts)
                losses = [self._compute(loss, each, scale) for each in some]
            else:
                losses = self._one_by_one(loss, parts, scale)
        except BaseException:
            self._taken = 0  # the next call begins anew
            raise
        self.reduce()
        return torch.cat([each.reshape(-1) for each in losses]).mean()

    def take(self) -> None:
        """The gradients in `.grad` are those of the next node; they are taken away."""
        if self._taken == self.count:
            raise InputError(
                f"all {self.count} nodes have given gradients; call reduce() before the next step"
            )
        if self._parameters and all(each.grad is None for each in self._parameters):
            raise InputError("no parameter has a gradient; call loss.backward() before take()")
        found = [
            torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in self._parameters
        ]
        if any(each.layout != torch.strided for each in found):
            raise InputError("a gradient is sparse; use nn.Embedding(sparse=False)")
        self._keep([each[None] for each in found])
        for each in self._parameters:
            each.grad = None

    def reduce(self) -> None:
        """The mean over all nodes, as the wire brings it, to `.grad`."""
        if self._taken < self.count:
            raise InputError(
                f"{self._taken} of {self.count} nodes have given gradients; call take() once for each node"
            )
        for pile in self._piles:
            self._repay(pile)
            for place, mean in zip(pile.places, self._reduced(pile), strict=True):
                parameter = self._parameters[place]
                parameter.grad = mean.view_as(parameter).to(parameter.dtype)
        self._taken = 0
        self.step += 1

    def set_epoch(self, epoch: int) -> None:
        """For rules that name epochs."""
        self.epoch = epoch

    @property
    def routes(self) -> dict[str, Route]:
        """What becomes of every tensor at the next step: codec and schedule, by name."""
        found = {}
        for tensor in self._tensors:
            rule = self.policy.route(tensor, self.step, self.epoch)
            schedule = rule.schedule
            if schedule == "auto":
                schedule = choose(codecs.get(rule.codec), tensor.numel, self.count)[0]
            found[tensor.name] = rule.codec, schedule
        return found

    @property
    def sent_nbytes(self) -> int:
        """What the first node would send for one step."""
        return sum(
            trace(
                [tensor.numel for tensor in some], codec, self.count, schedule, inside=self.inside,
                shapes=[tensor.shape for tensor in some],
            ).sent_nbytes
            for (codec, schedule), some in self._by_route().items()
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The step, and what every node's codecs owe."""
        owed = {spec: [each.state_dict() for each in nodes] for spec, nodes in self.channels.items()}
        routes = {name: list(route) for name, route in self._before.items()}
        return {"step": self.step, "epoch": self.epoch, "channels": owed, "routes": routes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; nothing is changed if it does not fit."""
        shapes = {tensor.name: tensor.shape for tensor in self._tensors}
        channels, before = state_checks.check_nodes(state, self.count, shapes)
        self.step, self.epoch, self.channels, self._before = state["step"], state["epoch"], channels, before

    # How it is done

    def _by_route(self) -> dict[Route, list[Tensorlike]]:
        found: dict[Route, list[Tensorlike]] = {}
        for tensor, route in zip(self._tensors, self.routes.values(), strict=True):
            found.setdefault(route, []).append(tensor)
        return found

    def _begin(self) -> None:
        """Room for a step's gradients; that of the step before where routes are the same."""
        by_route = self._by_route()
        if [(pile.route, list(pile.tensors)) for pile in self._piles] == list(by_route.items()):
            return
        place = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._piles = []
        for route, tensors in by_route.items():
            places = tuple(place[each.name] for each in tensors)
            mine = [self._parameters[i] for i in places]
            if route == ("fp32", "native"):
                held = [torch.empty_like(each, dtype=_wide(each.dtype)) for each in mine]
            else:
                held = [each.new_empty((self.count, *each.shape)) for each in mine]
            self._piles.append(_Pile(route, tuple(tensors), places, tuple(held)))

    def _keep(self, gradients: Sequence[Tensor]) -> None:
        """Gradients [some nodes, ...] of all tensors."""
        if self._taken == 0:
            self._begin()
        count = len(gradients[0])
        for pile in self._piles:
            mine = [gradients[place] for place in pile.places]
            if not pile.sums:
                rows = [each[self._taken : self._taken + count] for each in pile.held]
                torch._foreach_copy_(rows, mine)
                continue
            for node in range(count):
                each = [gradient[node] for gradient in mine]
                add = torch._foreach_add_ if self._taken + node else torch._foreach_copy_
                add(pile.held, each)
        self._taken += count

    def _repay(self, pile: _Pile) -> None:
        """Where a tensor takes another route than before, what it owes there is added, as in DDP."""
        for tensor, held in zip(pile.tensors, pile.held, strict=True):
            before = self._before.get(tensor.name, pile.route)
            self._before[tensor.name] = pile.route
            if before == pile.route:
                continue
            for node, channel in enumerate(self.channels.get(before[0], ())):
                owed = debt(channel, tensor.name, tensor.shape, node, self.count)
                if owed is not None:
                    (held if pile.sums else held[node]).add_(owed)
                channel.forget_name(tensor.name)

    def _reduced(self, pile: _Pile) -> Sequence[Tensor]:
        codec, schedule = pile.route
        if self.count == 1:
            return [
                each.view(tensor.shape).clone() for each, tensor in zip(pile.held, pile.tensors, strict=True)
            ]
        if pile.sums:
            return [each * (1.0 / self.count) for each in pile.held]
        sending: str | list[Channel] = codec
        if codecs.get(codec).feedback:
            sending = self.channels.setdefault(codec, [Channel(codec) for _ in range(self.count)])
        return local.all_reduce_rows(
            pile.held,
            sending,
            "avg",
            schedule,
            names=[each.name for each in pile.tensors],
            rng=Stream(self.seed, step=self.step + 1),
            inside=self.inside,
        )

    def _one_by_one(self, loss: Loss, parts: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Gradients of all nodes; running statistics end as those of node 0, as in DDP."""
        begun, kept, losses = self._buffers(), list[Tensor](), list[Tensor]()
        try:
            for node in range(self.count):
                self._put_back(begun if node else ())  # every node begins with the same
                self.model.zero_grad()
                found = loss(self.model, *(each[node] for each in parts))
                (found if scale == 1 else found * scale).backward()
                losses.append(found.detach())
                self.take()
                kept = kept or self._buffers()
        finally:
            self._put_back(kept if len(losses) == self.count else begun)
        return losses

    def _compute(self, loss: Loss, parts: Sequence[Tensor], scale: float) -> Tensor:
        """Gradients of some nodes at once."""
        whole = _Whole(self.model, loss)
        values = {f"model.{name}": each.detach() for name, each in self._named()}

        def scaled(parameters: dict[str, Tensor], *part: Tensor) -> tuple[Tensor, Tensor]:
            found = functional_call(whole, parameters, part)
            return found * scale, found.detach()

        each = vmap(grad_and_value(scaled, has_aux=True), (None, *[0] * len(parts)), randomness="different")
        gradients, (_, losses) = each(values, *parts)
        self._keep([gradients[f"model.{name}"] for name, _ in self._named()])
        return losses

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._parameters, strict=True))

    def _buffers(self) -> list[Tensor]:
        return [each.clone() for each in self.model.buffers()]

    def _put_back(self, kept: Sequence[Tensor]) -> None:
        for each, before in zip(self.model.buffers(), kept, strict=False):
            each.copy_(before)

    # Bad input

    def _check(self, batch: Sequence[Tensor]) -> None:
        if self._taken:
            raise InputError(f"{self._taken} nodes have given gradients by take(); call reduce() first")
        if not batch:
            raise InputError("backward(loss, x, y, ...) needs the tensors of a batch")
        for each in batch:
            if not len(each) or len(each) % self.count:
                raise InputError(
                    f"a batch of {len(each)} samples cannot be shared evenly by {self.count} nodes; "
                    f"use a multiple of {self.count}"
                )
        sizes = [len(each) for each in batch]
        if len(set(sizes)) > 1:
            found = ", ".join(map(str, sizes))
            raise InputError(f"the tensors of a batch have {found} samples; give as many of each")

    def _check_vmap(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, (Simulated, Quantizer)):
                raise InputError(
                    f"{name or 'the model'} computes in other numbers, which nodes that are computed "
                    "together cannot; use together=1"
                )
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
                raise InputError(
                    f"{name} is a batch normalisation that tracks statistics, which nodes that are computed "
                    "together cannot; use together=1, or group normalisation"
                )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of sums: float32 for short floats."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Whole(nn.Module):
    """A loss as a module, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *part: Tensor) -> Tensor:
        return self.loss(self.model, *part)
