"""Fully connected layers, each split over ranks by its columns, that is, by its outputs.

A block is one `nn.Linear` and the elementwise modules next to it. Every rank has a slice of the block's
outputs, so elementwise modules need nothing from other ranks. A dropout mask is drawn for all columns from
numbers that all ranks share, and every rank uses its own columns of it. So masks depend neither on the rank
nor on the number of ranks.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.errors import InputError
from thinwire.rounding import Stream
from thinwire.runtimes.checks import DTYPES

#: Modules that compute every element by itself.
ELEMENTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Tanh,
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """What the random numbers of a pass are named by: the seed, the step and the sub-batch."""

    seed: int
    step: int
    sub_batch: int

    def stream(self, what: str) -> Stream:
        """Return the stream of one use in this pass."""
        return Stream(self.seed, step=self.step, tensor=f"{what}, sub-batch {self.sub_batch}")


@dataclass(frozen=True)
class Block:
    """A linear layer's slice on this rank, and the elementwise modules around it."""

    name: str  #: of the linear layer in its `nn.Sequential`
    linear: nn.Linear
    before: tuple[nn.Module, ...]  #: the modules before the first linear layer
    after: tuple[nn.Module, ...]
    sizes: tuple[int, ...]  #: outputs on every rank
    rank: int

    @property
    def width(self) -> int:
        """The outputs on all ranks together."""
        return sum(self.sizes)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The slices of weight and bias that are trained."""
        return [each for each in self.linear.parameters() if each.requires_grad]

    def enter(self, x: Tensor, draw: Draw) -> Tensor:
        """Return the input of the linear layer: all columns."""
        for i, module in enumerate(self.before):
            x = _through(module, x, x.shape[1], 0, draw.stream(f"dropout {i} before {self.name}"))
        return x

    def leave(self, z: Tensor, draw: Draw) -> Tensor:
        """Return what this rank sends, from its columns of the linear layer's output."""
        first = sum(self.sizes[: self.rank])
        for i, module in enumerate(self.after):
            z = _through(module, z, self.width, first, draw.stream(f"dropout {i} after {self.name}"))
        return z

    def gradients(self, x: Tensor, errors: Tensor) -> dict[int, Tensor]:
        """Return the gradients of the trained slices, from the layer's input and its output's errors."""
        by_name = {"weight": lambda: errors.t() @ x.to(errors.dtype), "bias": lambda: errors.sum(0)}
        return {
            id(each): by_name[name]().to(each.dtype)
            for name, each in self.linear.named_parameters()
            if each.requires_grad
        }


def _through(module: nn.Module, x: Tensor, width: int, first: int, stream: Stream) -> Tensor:
    if not isinstance(module, nn.Dropout):
        return module(x)
    if not module.training or module.p == 0:
        return x
    return x * mask(stream, x.shape[0], width, module.p, x)[:, first : first + x.shape[1]]


def mask(stream: Stream, rows: int, width: int, p: float, like: Tensor) -> Tensor:
    """Return the mask of a dropout layer: 0 with probability p, else 1 / (1 - p).

    >>> mask(Stream(1), 20, 8, 0.5, torch.zeros(())).unique()
    tensor([0., 2.])
    """
    low, high, *_ = stream.key
    generator = torch.Generator(like.device).manual_seed(low | high << 32)
    drawn = torch.empty((rows, width), dtype=like.dtype, device=like.device)
    drawn.bernoulli_(1 - p, generator=generator)
    return drawn.div_(1 - p) if p < 1 else drawn


def split(classifier: nn.Module, rank: int, world: int) -> tuple[nn.Sequential, list[Block]]:
    """Return this rank's slices, in a module with the same names, and its blocks."""
    _check(classifier, world)
    modules: list[nn.Module] = []
    blocks: list[Block] = []
    names = [name for name, _ in classifier.named_children()]
    for module in classifier.children():
        modules.append(_cut(module, rank, world) if isinstance(module, nn.Linear) else _copied(module))
    at = [i for i, each in enumerate(modules) if isinstance(each, nn.Linear)]
    for i, end in zip(at, [*at[1:], len(modules)], strict=True):
        linear, whole = modules[i], list(classifier.children())[i]
        assert isinstance(linear, nn.Linear)
        assert isinstance(whole, nn.Linear)
        before = tuple(modules[: at[0]]) if i == at[0] else ()
        sizes = tuple(even(whole.out_features, world))
        blocks.append(Block(names[i], linear, before, tuple(modules[i + 1 : end]), sizes, rank))
    net = nn.Sequential()
    for name, module in zip(names, modules, strict=True):
        net.add_module(name, module)
    return net, blocks


def joined(local: nn.Sequential, weights: Sequence[dict[str, Tensor]]) -> nn.Sequential:
    """Return the whole layers on one device, from the weights of all of them."""
    net = nn.Sequential()
    linears = iter(weights)
    for name, module in local.named_children():
        if isinstance(module, nn.Linear):
            state = next(linears)
            whole = nn.utils.skip_init(
                nn.Linear, module.in_features, len(state["weight"]), bias=module.bias is not None
            )
            whole.to(state["weight"].dtype).load_state_dict(state)
            net.add_module(name, whole)
        else:
            net.add_module(name, copy.deepcopy(module))
    return net


def even(size: int, count: int) -> list[int]:
    """Split a size into parts that differ by one at most.

    >>> even(10, 4)
    [3, 3, 2, 2]
    """
    return [size // count + (i < size % count) for i in range(count)]


def _cut(linear: nn.Linear, rank: int, world: int) -> nn.Linear:
    """Return a layer with this rank's outputs."""
    sizes = even(linear.out_features, world)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    bias = linear.bias is not None
    part = nn.utils.skip_init(
        nn.Linear, linear.in_features, sizes[rank], bias=bias, device=linear.weight.device
    )
    part = part.to(linear.weight.dtype).train(linear.training)
    with torch.no_grad():
        for name, each in part.named_parameters():
            whole = linear.get_parameter(name)
            each.copy_(whole[rows])
            each.requires_grad_(whole.requires_grad)
    return part


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that keeps its input: what was gathered is needed again for gradients."""
    copied = copy.deepcopy(module)
    if getattr(copied, "inplace", False):
        copied.inplace = False  # type: ignore[assignment]
    return copied


def _check(classifier: nn.Module, world: int) -> None:
    if not isinstance(classifier, nn.Sequential):
        raise InputError(
            f"the fully connected part must be an nn.Sequential of nn.Linear and elementwise modules, not "
            f"{type(classifier).__name__}"
        )
    for name, module in classifier.named_children():
        if type(module) is not nn.Linear and type(module) not in ELEMENTWISE:
            raise InputError(
                f"module {name} of the fully connected part is a {type(module).__name__}; every rank has a "
                "slice of the columns, so only nn.Linear and elementwise modules such as nn.ReLU and "
                "nn.Dropout can stand there. Put others before it, or apply them to the result"
            )
    linears = [each for each in classifier.children() if isinstance(each, nn.Linear)]
    if not linears:
        raise InputError("the fully connected part has no nn.Linear")
    for each in linears:
        if each.out_features < world:
            raise InputError(f"{world} ranks cannot share the {each.out_features} outputs of {each}")
        if each.weight.dtype not in DTYPES:
            raise InputError(f"weights must be float32, bfloat16 or float16, not {each.weight.dtype}")
    for one, other in itertools.pairwise(linears):
        if one.out_features != other.in_features:
            raise InputError(f"{one} is followed by {other}, which has other inputs")
