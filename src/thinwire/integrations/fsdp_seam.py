"""Where FSDP2 (`fully_shard`) lets another communication in. Torch's private names for it are only here.

FSDP2 keeps parameters in groups, one for each module that was passed to `fully_shard`. A group gathers its
parameters with an object `AllGather`, and reduces gradients with an object `ReduceScatter`. With a mesh of
two dimensions (HSDP) it then calls `dist.all_reduce` on the group of its replicas.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api as api
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as defaults
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from thinwire import policy
from thinwire.errors import InputError
from thinwire.policy import TensorInfo

#: Parts of names that wrappers add: of activation checkpointing and of torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

Reduce = Callable[["ShardedGroup", Tensor, Tensor, dist.ProcessGroup, Any], bool]
Gather = Callable[["ShardedGroup", Tensor, Tensor, dist.ProcessGroup], bool]
Average = Callable[["ShardedGroup", Tensor, bool], bool]


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which every rank holds an equal part, padded at the end."""

    info: TensorInfo
    numel: int  #: of one rank's part
    dim: int  #: the dimension that is split
    param: Any = field(repr=False)  #: torch's FSDPParam

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is split: with tensor parallelism, this rank's part of the parameter."""
        return tuple(self.param._orig_size)

    @property
    def has_gradient(self) -> bool:
        """Whether the backward pass that just ended left a gradient to reduce."""
        if self.param.unsharded_accumulated_grad is not None:
            return True
        return self.param.unsharded_param.grad is not None

    def counts(self, every: bool) -> bool:
        """Whether FSDP reduces it: if it has a gradient, or with `every`, if it could have one."""
        if not hasattr(self.param, "_unsharded_param"):
            return False
        return self.has_gradient or (every and bool(self.param.unsharded_param.requires_grad))

    def rows(self, whole: Tensor, world: int) -> Tensor:
        """Return a tensor of this shape as the parts of all ranks [world, numel]."""
        if self.dim:
            return torch.cat([each.reshape(1, -1) for each in whole.chunk(world, self.dim)])
        flat = whole.new_zeros(world * self.numel)
        flat[: whole.numel()] = whole.reshape(-1)
        return flat.view(world, -1)


@dataclass(eq=False)
class ShardedGroup:
    """A group of parameters that FSDP2 gathers and reduces together."""

    index: int
    parameters: tuple[ShardedParameter, ...]
    inner: Any = field(repr=False)  #: torch's FSDPParamGroup
    present: tuple[ShardedParameter, ...] = ()  #: those with gradients, in the backward pass that just ended
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  #: kept by a handle
    phases: dict[str, Any] = field(default_factory=dict, repr=False)  #: of the last reduction, by direction
    _before: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.inner.device
        return device

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks among which parameters are split."""
        group: dist.ProcessGroup = self.inner.mesh_info.shard_process_group
        return group

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split at all; those of `replicate` are not."""
        return isinstance(self.inner.mesh_info, FSDPMeshInfo)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """With HSDP, the ranks that hold the same part."""
        info = self.inner.mesh_info
        group = getattr(info, "replicate_process_group", None)
        return group.inner if isinstance(group, ReplicaGroup) else group

    @property
    def owner(self) -> object:
        """The handle that FSDP2 calls now, whoever installed it; None if there is none."""
        return _owner(self.inner)

    @property
    def divide_factor(self) -> float | None:
        """The number by which the user wants sums to be divided, if it is not the number of ranks."""
        factor: float | None = self.inner.gradient_divide_factor
        return factor

    def install(self, reduce: Reduce, gather: Gather | None, average: Average | None) -> None:
        """Let FSDP2 call these functions. One that returns False has done nothing: torch then does it."""
        self.remove()
        inner = self.inner
        self._before = {name: getattr(inner, name) for name in ("_reduce_scatter_comm", "_all_gather_comm")}
        inner._reduce_scatter_comm = ThinReduceScatter(self, inner._reduce_scatter_comm, reduce)
        if gather is not None:
            inner._all_gather_comm = ThinAllGather(self, inner._all_gather_comm, gather)
        post_backward = inner.post_backward

        @functools.wraps(post_backward)
        def noting(*unused: Any) -> Any:
            every = getattr(inner, "reduce_scatter_unused_params", False)
            self.present = tuple(each for each in self.parameters if each.counts(every))
            return post_backward(*unused)

        inner.post_backward = noting
        if average is not None:
            assert self.replicas is not None
            self._before["replicas"] = self.replicas
            inner.mesh_info.replicate_process_group = ReplicaGroup(self.replicas, self, average)

    def remove(self) -> None:
        """Let FSDP2 communicate by itself again."""
        if not self._before:
            return
        for name in ("_reduce_scatter_comm", "_all_gather_comm"):
            setattr(self.inner, name, self._before[name])
        if "replicas" in self._before:
            self.inner.mesh_info.replicate_process_group = self._before["replicas"]
        del self.inner.post_backward  # the class has its own
        self._before = {}


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ThinReduceScatter(_Allocates, api.ReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce-scatter, by a handle."""

    def __init__(self, group: ShardedGroup, plain: api.ReduceScatter, reduce: Reduce) -> None:
        self.group, self.plain, self.reduce = group, plain, reduce

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.reduce(self.group, output_tensor, input_tensor, group, op):
            return None
        return self.plain(output_tensor, input_tensor, group, op, async_op)


class ThinAllGather(_Allocates, api.AllGather):  # type: ignore[misc]
    """FSDP2's all-gather, by a handle."""

    def __init__(self, group: ShardedGroup, plain: api.AllGather, gather: Gather) -> None:
        self.group, self.plain, self.gather = group, plain, gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self.gather(self.group, output_tensor, input_tensor, group):
            return None
        return self.plain(output_tensor, input_tensor, group, async_op)


class ReplicaGroup(dist.ProcessGroup):
    """The group of HSDP's replicas: its all-reduce is done by a handle, everything else by torch's group."""

    def __init__(self, inner: dist.ProcessGroup, group: ShardedGroup, average: Average) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._group, self._average = inner, group, average

    def __eq__(self, other: object) -> bool:
        """Equal to torch's group, under which torch knows its name and its backend, also to report errors."""
        return (other.inner if isinstance(other, ReplicaGroup) else other) is self.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place; called by `dist.all_reduce`. FSDP asks for sums if it divides by itself."""
        op = None if opts is None else opts.reduceOp
        is_mean, is_sum = op == dist.ReduceOp.AVG, op == dist.ReduceOp.SUM
        if (is_mean or is_sum) and self._average(self._group, tensors[0], is_sum):
            return None
        return self.inner.allreduce(tensors, opts)

    def getBackendName(self) -> str:  # noqa: N802
        return str(self.inner.name())

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Return the parameter groups of a model that `fully_shard` was applied to."""
    named = {
        id(parameter): replace(info, name=clean(info.name))
        for info, parameter in zip(policy.describe(model), model.parameters(), strict=True)
    }
    groups: list[ShardedGroup] = []
    for inner in _inner_groups(model):
        parameters = tuple(_parameter(param, named) for param in inner.fsdp_params)
        groups.append(ShardedGroup(len(groups), parameters, inner))
    return groups


def owners(model: nn.Module) -> list[object]:
    """Return the handles that a model's groups call, each once."""
    handles = [_owner(inner) for inner in _inner_groups(model)]
    return list({id(handle): handle for handle in handles if handle is not None}.values())


def _owner(inner: Any) -> object:
    comm = inner._reduce_scatter_comm
    return comm.reduce.__self__ if isinstance(comm, ThinReduceScatter) else None  # type: ignore[attr-defined]


def clean(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    >>> clean("layers.0._checkpoint_wrapped_module.fc.weight")
    'layers.0.fc.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _inner_groups(model: nn.Module) -> Iterator[Any]:
    """Yield every group once; `fully_shard([a, b])` makes one group of two modules."""
    known_groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            known = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if known is None and state._fsdp_param_group else known or ()
            known_groups.update((id(group), group) for group in groups)
    yield from known_groups.values()


def _parameter(param: Any, named: dict[int, TensorInfo]) -> ShardedParameter:
    where = param._module_info
    info = named.get(id(getattr(where.module, where.param_name)))
    if info is None:
        raise InputError(
            f"parameter {where.param_name} of {type(where.module).__name__} belongs to another model; "
            "attach to the outermost module that fully_shard was applied to"
        )
    return ShardedParameter(info, param.padded_sharded_param_size.numel(), param.fsdp_placement.dim, param)


def at_first_forward(take: Callable[[nn.Module], None]) -> None:
    """Call a function with every outermost sharded module, when its first forward pass begins."""
    initialize = FSDPState._lazy_init

    @functools.wraps(initialize)
    def lazy_init(state: Any) -> None:
        first = state._is_root is None
        initialize(state)
        if first and state._is_root:
            take(state._modules[0])

    FSDPState._lazy_init = lazy_init  # type: ignore[assignment, method-assign]


def is_plain(comm: object) -> bool:
    """Whether a communication object is torch's default, which thinwire may replace."""
    usual = (defaults.DefaultAllGather, defaults.DefaultReduceScatter, ThinAllGather, ThinReduceScatter)
    return isinstance(comm, usual)
