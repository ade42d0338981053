"""What the values of a network look like, found without computing them.

Every rank runs the whole network once on tensors without storage, and so knows the shapes and dtypes of what
it will receive. Nothing is said about them at run time.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from thinwire.errors import InputError


@dataclass(frozen=True)
class Form:
    """A tensor's shape, dtype and device, and whether gradients flow to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad)

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Value:
    """What an operation returns: a tree of tensors, of which only the forms are kept, and of other things."""

    leaves: tuple[Any, ...]  #: `Form` in place of each tensor
    tree: pytree.TreeSpec
    flops: float = 0.0
    random: bool = False  #: whether the operation draws random numbers
    writes: bool = False  #: whether the operation changes its inputs in place

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(each for each in self.leaves if isinstance(each, Form))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.forms)

    @property
    def grad(self) -> bool:
        return any(each.grad for each in self.forms)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with tensors in place of their forms."""
        rest = iter(tensors)
        return pytree.tree_unflatten(
            [next(rest) if isinstance(each, Form) else each for each in self.leaves], self.tree
        )


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


class _Notes(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class Skeleton:
    """A copy of the network without storage."""

    def __init__(self, module: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.module = self._copied(module, lambda x: x)

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Do what `Module.to` and its kin do."""
        self.module = self._copied(self.module, function)

    def _copied(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
        memo: dict[int, Any] = {}
        with self.mode:
            for x in (*module.parameters(), *module.buffers()):
                fake = function(_like(x.detach()))
                is_parameter = isinstance(x, nn.Parameter)
                memo[id(x)] = nn.Parameter(fake, requires_grad=x.requires_grad) if is_parameter else fake
        return copy.deepcopy(module, memo)

    def values(self, graph: fx.Graph, inputs: Mapping[str, Any], training: bool) -> dict[str, Value]:
        """Return the value of every operation for some inputs, by placeholder."""
        self.module.train(training)
        found: dict[str, Value] = {}
        with self.mode, torch.enable_grad():
            fakes = {name: pytree.tree_map_only(Tensor, _like, value) for name, value in inputs.items()}
            _Run(self.module, graph, fakes, found).run()
        return found


def _like(x: Tensor) -> Tensor:
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return fake.requires_grad_(x.requires_grad)


class _Run(fx.Interpreter):
    """Runs a graph on tensors without storage, and notes values."""

    def __init__(
        self, module: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], found: dict[str, Value]
    ) -> None:
        super().__init__(module, graph=graph)
        self.inputs, self.found = inputs, found

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            out = self.inputs[n.name]
            self.found[n.name] = described(out)
            return out
        if n.op == "output":
            return None
        before = {each: _versions(value) for each, value in self.env.items()}
        try:
            with FlopCounterMode(display=False) as flops, _Notes() as notes:
                out = super().run_node(n)
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise InputError(
                f"the shape of '{n.name}' ({n.target}) does not follow from the shapes of the inputs: {first}"
            ) from error
        changed = {each for each, versions in before.items() if versions != _versions(self.env[each])}
        _check_written(n, changed)
        flow = float(flops.get_total_flops())
        self.found[n.name] = replace(described(out), flops=flow, random=notes.random, writes=bool(changed))
        return out


def _versions(value: Any) -> list[int]:
    return [x._version for x in tensors_of(value)]


def _check_written(node: fx.Node, changed: set[fx.Node]) -> None:
    """Refuse to change in place what others use too: the graph does not say who comes first."""
    for each in changed:
        others = [user.name for user in each.users if user is not node and user not in changed]
        if others:
            raise InputError(
                f"'{node.name}' changes '{each.name}' in place, but '{others[0]}' uses that too; let it "
                "return a new tensor, for example with inplace=False"
            )


def described(value: Any) -> Value:
    """Return what is kept of a value."""
    leaves, tree = pytree.tree_flatten(value)
    return Value(tuple(Form.of(each) if isinstance(each, Tensor) else each for each in leaves), tree)
