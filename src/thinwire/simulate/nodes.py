"""Data parallelism over N simulated nodes on one device, with real gradients, codecs and schedules.

Every node has its own micro-batch. When all nodes have gradients, `thinwire.runtimes.local` reduces them with
the schedule that would run on a network: the bits are those of N processes. Only the network and its time are
emulated. (Layers that round at random draw by the number of the call; in N processes they draw by rank.)

Memory: a native float32 sum needs one number per parameter, whatever N. Other schedules need the gradients of
all nodes (APS must know the largest before it can send any), so N numbers per parameter, and the wires.
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
from thinwire.policy import LADDER, NOOP, Policy, Rule, TensorInfo, describe
from thinwire.rounding import Stream
from thinwire.runtimes import local
from thinwire.runtimes.trace import trace
from thinwire.schedules.choose import choose
from thinwire.schedules.residuals import gradient_residual
from thinwire.simulate import state_checks
from thinwire.simulate.layers import Simulated
from thinwire.simulate.quantizer import Quantizer

Loss = Callable[..., Tensor]  #: of a model and one node's part of the batch
Route = tuple[str, str]  # codec and schedule


@dataclass(frozen=True)
class _Pile:
    """Gradients of the tensors of one route: of every node, or only their sum."""

    route: Route
    tensors: tuple[TensorInfo, ...]
    places: tuple[int, ...]  #: indices among all tensors
    held: tuple[Tensor, ...]  #: for each tensor [nodes, ...], or its sum [...]

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

    In your own loop call `take()` after every node's `loss.backward()`, and `reduce()` after the last.
    `reduce()` replaces `.grad` by the mean over nodes, so that any optimizer works. A parameter that no node
    used then has a gradient of zeros, as in DDP. A single node sends nothing: its gradients are float32,
    whatever the codec.

    `codec` is a codec for all tensors (a spec, a `Codec`, a `Format`), or a `thinwire.Policy`
    (`thinwire.policy.get("int8")` for a recipe). The rules of a policy choose codec and schedule; `schedule`
    is then not used. A codec with error feedback has residuals for every node.
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: int,
        codec: AnySpec | Policy = "fp32",
        schedule: str = "auto",
        *,
        seed: int = 0,
        ranks_per_node: int = 1,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(nodes, int):
            types = f"{type(model).__name__} and {type(nodes).__name__}"
            raise InputError(f"Nodes takes a torch.nn.Module and a number of nodes, not {types}")
        if nodes < 1:
            raise InputError(f"there must be at least one node, not {nodes}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError("the model has no parameter with requires_grad=True, so nodes have no gradients")
        if not isinstance(codec, Policy):
            codec = Policy("simulated", (Rule(codec, schedule),))
        if any(rule.codec == LADDER for rule in codec.rules):
            raise InputError(
                f"Nodes cannot run the ladder of policy '{codec.name}'; use a policy whose rules name steps"
            )
        if codec.name == NOOP:
            raise InputError(
                "the policy 'noop' lets replicas diverge, but simulated nodes share one model; use fp32"
            )
        self.model, self.count, self.policy, self.seed, self.ranks_per_node = (
            model,
            nodes,
            codec,
            seed,
            ranks_per_node,
        )
        self.step, self.epoch = 0, 0
        self.channels: dict[str, list[Channel]] = {}  #: of codecs with error feedback, one for each node
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        wanted = {name for name, each in model.named_parameters() if each.requires_grad}
        names = [name for name, _ in model.named_parameters()]
        self._names = [name for name in names if name in wanted]
        self._tensors = [each for name, each in zip(names, describe(model), strict=True) if name in wanted]
        self._piles: list[_Pile] = []
        self._taken = 0
        self._before: dict[str, Route] = {}  # routes of the last step, by tensor

    # Called by the training loop

    def backward(self, loss: Loss, *batch: Tensor, together: int = 1, scale: float = 1.0) -> Tensor:
        """Compute the gradients of all nodes and reduce them into `.grad`; returns the mean loss.

        Every tensor of `batch` is cut into equal parts along its first dimension, one for each node, and
        `loss(model, *parts)` is called. `torch.func.vmap` computes `together` nodes at a time: faster for
        small networks, but layers may then add in another order, so bits differ. The loss is multiplied by
        `scale` before the backward pass, so gradients are scaled.
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
            self._taken = 0  # the next call starts with node 0
            raise
        self.reduce()
        return torch.cat([each.reshape(-1) for each in losses]).mean()

    def take(self) -> None:
        """Take the gradients in `.grad` as those of the next node, and set `.grad` to None."""
        if self._taken == self.count:
            raise InputError(
                f"all {self.count} nodes have given gradients; call reduce() before the next step"
            )
        if self._parameters and all(each.grad is None for each in self._parameters):
            raise InputError("no parameter has a gradient; call loss.backward() before take()")
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad.detach() for each in self._parameters
        ]
        if any(each.layout != torch.strided for each in gradients):
            raise InputError("a gradient is sparse; use nn.Embedding(sparse=False)")
        self._keep([each[None] for each in gradients])
        for each in self._parameters:
            each.grad = None

    def reduce(self) -> None:
        """Reduce the gradients of all nodes, and put the mean into `.grad`."""
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
        """Set the epoch, for rules that name epochs."""
        self.epoch = epoch

    @property
    def routes(self) -> dict[str, Route]:
        """Codec and schedule of every tensor at the next step, by name."""
        by_name = {}
        for tensor in self._tensors:
            rule = self.policy.route(tensor, self.step, self.epoch)
            schedule = rule.schedule
            if schedule == "auto":
                schedule = choose(codecs.get(rule.codec), tensor.numel, self.count)[0]
            by_name[tensor.name] = rule.codec, schedule
        return by_name

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the first node would send in one step."""
        return sum(
            trace(
                [tensor.numel for tensor in some], codec, self.count, schedule,
                ranks_per_node=self.ranks_per_node, shapes=[tensor.shape for tensor in some],
            ).sent_nbytes
            for (codec, schedule), some in self._by_route().items()
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the epoch, every node's residuals, and the last routes."""
        channels = {spec: [each.state_dict() for each in nodes] for spec, nodes in self.channels.items()}
        routes = {name: list(route) for name, route in self._before.items()}
        return {"step": self.step, "epoch": self.epoch, "channels": channels, "routes": routes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; nothing changes if it does not fit."""
        shapes = {tensor.name: tensor.shape for tensor in self._tensors}
        channels, before = state_checks.check_nodes(state, self.count, shapes)
        self.step, self.epoch, self.channels, self._before = state["step"], state["epoch"], channels, before

    # Implementation

    def _by_route(self) -> dict[Route, list[TensorInfo]]:
        by_route: dict[Route, list[TensorInfo]] = {}
        for tensor, route in zip(self._tensors, self.routes.values(), strict=True):
            by_route.setdefault(route, []).append(tensor)
        return by_route

    def _begin(self) -> None:
        """Allocate memory for a step's gradients; reuses the last step's if routes are the same."""
        by_route = self._by_route()
        if [(pile.route, list(pile.tensors)) for pile in self._piles] == list(by_route.items()):
            return
        place = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._piles = []
        for route, tensors in by_route.items():
            places = tuple(place[each.name] for each in tensors)
            parameters = [self._parameters[i] for i in places]
            if route == ("fp32", "native"):
                held = [torch.empty_like(each, dtype=_wide(each.dtype)) for each in parameters]
            else:
                held = [each.new_empty((self.count, *each.shape)) for each in parameters]
            self._piles.append(_Pile(route, tuple(tensors), places, tuple(held)))

    def _keep(self, gradients: Sequence[Tensor]) -> None:
        """Store gradients [some nodes, ...] of all tensors."""
        if self._taken == 0:
            self._begin()
        count = len(gradients[0])
        for pile in self._piles:
            own = [gradients[place] for place in pile.places]
            if not pile.sums:
                rows = [each[self._taken : self._taken + count] for each in pile.held]
                torch._foreach_copy_(rows, own)
                continue
            for node in range(count):
                each = [gradient[node] for gradient in own]
                add = torch._foreach_add_ if self._taken + node else torch._foreach_copy_
                add(pile.held, each)
        self._taken += count

    def _repay(self, pile: _Pile) -> None:
        """Add a tensor's residual to its gradient if its route has changed, as in DDP."""
        for tensor, held in zip(pile.tensors, pile.held, strict=True):
            before = self._before.get(tensor.name, pile.route)
            self._before[tensor.name] = pile.route
            if before == pile.route:
                continue
            for node, channel in enumerate(self.channels.get(before[0], ())):
                residual = gradient_residual(channel, tensor.name, tensor.shape, node, self.count)
                if residual is not None:
                    (held if pile.sums else held[node]).add_(residual)
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
            ranks_per_node=self.ranks_per_node,
        )

    def _one_by_one(self, loss: Loss, parts: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Compute the gradients of all nodes; running statistics end as those of node 0, as in DDP."""
        initial, first, losses = self._buffers(), list[Tensor](), list[Tensor]()
        try:
            for node in range(self.count):
                self._put_back(initial if node else ())  # every node starts with the same buffers
                self.model.zero_grad()
                value = loss(self.model, *(each[node] for each in parts))
                (value if scale == 1 else value * scale).backward()
                losses.append(value.detach())
                self.take()
                first = first or self._buffers()
        finally:
            self._put_back(first if len(losses) == self.count else initial)
        return losses

    def _compute(self, loss: Loss, parts: Sequence[Tensor], scale: float) -> Tensor:
        """Compute the gradients of some nodes at once; returns their losses."""
        whole = _Whole(self.model, loss)
        values = {f"model.{name}": each.detach() for name, each in self._named()}

        def scaled(parameters: dict[str, Tensor], *part: Tensor) -> tuple[Tensor, Tensor]:
            unscaled = functional_call(whole, parameters, part)
            return unscaled * scale, unscaled.detach()

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

    # Checks of input

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
            counts = ", ".join(map(str, sizes))
            raise InputError(f"the tensors of a batch have {counts} samples; give the same number of each")

    def _check_vmap(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, (Simulated, Quantizer)):
                raise InputError(
                    f"{name or 'the model'} is simulated, which does not work for several nodes at a time; "
                    "use together=1"
                )
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
                raise InputError(
                    f"{name} is a batch normalisation that tracks statistics, which does not work for "
                    "several nodes at a time; use together=1, or group normalisation"
                )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Whole(nn.Module):
    """A model and its loss as one module, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *part: Tensor) -> Tensor:
        return self.loss(self.model, *part)
