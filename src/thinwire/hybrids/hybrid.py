"""`apply`: a model spread over ranks as a job plan says, and the handle of what was done."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import CommError, InputError
from thinwire.hybrids import data_parallel, norms, placing, splits, weights
from thinwire.hybrids.batches import activate, samples_of, sliced
from thinwire.hybrids.job_plan import JobPlan
from thinwire.hybrids.names import listed
from thinwire.hybrids.placing import Placed
from thinwire.hybrids.weights import Layout, local
from thinwire.integrations.handle import Handle
from thinwire.integrations.metrics_table import print_summary
from thinwire.integrations.sharded import ShardedHandle
from thinwire.integrations.tell import tell, telling
from thinwire.runtimes import process_group
from thinwire.runtimes.job import Call

SYNC_NBYTES = 250 * 2**20  #: weights that travel together when ranks start
NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(eq=False, repr=False)
class Hybrid:
    """A model and how it was spread over ranks: what `apply` returns."""

    model: nn.Module  #: the module that was passed to `apply`; call it as before
    plan: JobPlan
    mesh: DeviceMesh
    handles: dict[str, Handle | ShardedHandle] = field(default_factory=dict)  #: of gradients, by axis
    kind: str = ""  #: the name of the model's class, before FSDP changed it
    placed: Placed | None = None  #: with an axis `placed`, the network in parts
    _layouts: dict[int, Layout] = field(default_factory=dict)  #: of split parameters, by identity
    _before: dict[int, nn.Parameter] = field(default_factory=dict)  #: the parameters that the model had
    divided: bool = False  #: whether a batch was divided among ranks
    _saves_whole: bool = False
    _replaced: dict[int, nn.Parameter] = field(default_factory=dict)  #: by the identity of the one before

    def __repr__(self) -> str:
        return f"<thinwire.{type(self).__name__} {self.plan.shape()}: {self.kind}>"

    @property
    def parts(self) -> int:
        """The number of parts into which the samples of a batch are divided."""
        return self.plan.data_parts

    @property
    def part(self) -> int:
        """The number of this rank's part."""
        return self.place("replicate") * self.plan.size("shard") + self.place("shard")

    def place(self, axis: str) -> int:
        """Return this rank's place along an axis; 0 if the mesh does not have it."""
        return self.mesh.get_local_rank(axis) if axis in self.plan.mesh else 0

    def part_of(self, batch: Any) -> Any:
        """Return the samples of a batch that this rank trains on."""
        self.divided = True
        samples = samples_of(batch)
        if samples is None or self.parts == 1:
            return batch
        if samples % self.parts:
            raise InputError(
                f"a batch has {samples} samples, which {self.parts} parts ({self.plan.shape()}) cannot share "
                f"equally; use {samples - samples % self.parts or self.parts}, say"
            )
        size = samples // self.parts
        return sliced(batch, self.part * size, (self.part + 1) * size)

    def now(self, parameters: Iterable[Tensor]) -> dict[int, Tensor | None]:
        """Return what took the place of parameters of the model, by identity; None if another rank has it."""
        own = {id(each) for each in self.model.parameters()}
        renewed: dict[int, Tensor | None] = {}
        for each in parameters:
            if id(each) not in own and id(each) not in self._before:
                raise InputError(
                    f"a parameter of shape {tuple(each.shape)} does not belong to the {self.kind}, to which "
                    "the plan was applied: a plan is for one model; put both models into one module, or use "
                    "thinwire.hybrids.apply"
                )
            renewed[id(each)] = self._replaced.get(id(each), each if id(each) in own else None)
        return renewed

    def layout_of(self, parameter: Tensor) -> Layout | None:
        """Return how a parameter is split; None if every rank holds the whole of it."""
        return Layout.of(parameter) if isinstance(parameter, DTensor) else self._layouts.get(id(parameter))

    # Statistics

    def axes_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the axes along which other ranks hold other parts of a parameter, or other parameters."""
        layout = self.layout_of(parameter)
        names = () if layout is None else layout.mesh.mesh_dim_names or ()
        placements = () if layout is None else layout.placements
        split = tuple(name for name, each in zip(names, placements, strict=True) if not each.is_replicate())
        return split if self.placed is None else ("placed",)

    def stats(self) -> dict[str, Mapping[str, Any]]:
        """Return what this rank has sent, by axis; `tensor` counts nothing."""
        counted: dict[str, Mapping[str, Any]] = {axis: each.stats() for axis, each in self.handles.items()}
        return counted if self.placed is None else {**counted, "placed": self.placed.stats()}

    def summary(self) -> None:
        """Print the statistics of gradients as tables, on rank 0."""
        if dist.get_rank() == 0:
            for handle in self.handles.values():
                print_summary(handle.stats())

    # What needs all ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with whole tensors, as one device has it; call this on all ranks."""
        state = self.model.state_dict()
        return state if self._saves_whole else self._whole(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state with whole tensors: of `state_dict`, or of one device."""
        self.model.load_state_dict(state if self._saves_whole else self._part(state))

    def save_whole(self) -> None:
        """Let the model's own `state_dict` and `load_state_dict` have whole tensors, called on all ranks."""

        def save(_model: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
            whole = self._whole(state)
            state.clear()
            state.update(whole)

        def load(_model: nn.Module, state: dict[str, Any], *_more: Any) -> None:
            parts = self._part(state)
            state.clear()
            state.update(parts)

        self.model.register_state_dict_post_hook(save)
        self.model.register_load_state_dict_pre_hook(load)
        self._saves_whole = True

    def check_copies(self) -> None:
        """Raise an `InputError`, on all ranks, if copies of a gradient differ along `tensor`.

        Then a module that no style names computes with a part of the activations, and copies drift apart.
        """
        if self.plan.size("tensor") > 1:
            norms.check_copies(self)

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self.placed is not None:
            return self.placed.gathered_state_dict()
        return weights.whole_state(state, weights.named_layouts(self.model, self._layouts))

    def _part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self.placed is not None:
            return self.placed.own_part(state)
        return weights.part_state(state, weights.named_layouts(self.model, self._layouts), self.model)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all ranks' parts is at most `max_norm`; return the norm."""
        return norms.clip_grad_norm_(self, list(self.model.parameters()), max_norm, norm_type)


def apply(model: nn.Module, job_plan: JobPlan | str | Path, *, seed: int = 0) -> Hybrid:
    """Spread a model over the ranks of this job, in place, as a job plan says.

    Call it on all ranks, after `init_process_group` and once the model is on its device, and before the
    optimizer is made. The model is used as before; each rank passes it its part of a batch (`part_of_batch`).
    Weights start as those of rank 0.

    job_plan: a `JobPlan`, or the path of its file.
    seed: of codecs that round at random.
    """
    plan = job_plan if isinstance(job_plan, JobPlan) else JobPlan.read(job_plan)
    if not dist.is_initialized():
        raise CommError("there is no process group; call torch.distributed.init_process_group first")
    plan.check_world(dist.get_world_size())
    device = _device(model)
    chosen = splits.splits_of(model, plan.tensor, plan.size("tensor")) if plan.tensor else {}
    if plan.shard is not None:
        listed(model, plan.shard.modules, "shard.modules")  # raises before anything is sent
    _compare(model, plan, seed, device)
    sizes = tuple(plan.mesh.values())
    hybrid = Hybrid(model, plan, init_device_mesh(device.type, sizes, mesh_dim_names=tuple(plan.mesh)))
    hybrid.kind = type(model).__name__
    group = dist.group.WORLD
    assert group is not None
    _sync_module_states(model, group, SYNC_NBYTES, 0, (), True)
    hybrid._before = {id(each): each for each in model.parameters()}
    if plan.tensor is not None:
        mesh = hybrid.mesh["tensor"]
        keep = plan.shard is None
        hybrid._layouts |= splits.split(model, mesh, plan.tensor, chosen, keep=keep)
    if plan.placed is not None:
        hybrid.placed = placing.place(model, hybrid.mesh["placed"], plan.placed)
        for each in set(hybrid._before.values()) - set(model.parameters()):
            each.data = each.data.new_empty(0)  # another rank has it
    with telling(dist.get_rank() == 0):
        _spread_samples(hybrid, seed)
    activate(hybrid)
    if dist.get_rank() == 0:
        for line in _lines(hybrid, chosen):
            tell(line)
    return hybrid


def _spread_samples(hybrid: Hybrid, seed: int) -> None:
    model, plan = hybrid.model, hybrid.plan
    if plan.shard is not None:
        before = dict(model.named_parameters(remove_duplicate=False))
        mesh = hybrid.mesh["replicate", "shard"] if plan.replicate is not None else hybrid.mesh["shard"]
        axis = "replicate" if plan.replicate is not None else "shard"
        hybrid.handles[axis] = data_parallel.shard(model, mesh, plan, seed)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            hybrid._replaced[id(parameter)] = after[name]
            parameter.data = parameter.data.new_empty(0)  # lets go of the whole weight
    elif plan.replicate is not None and any(each.requires_grad for each in model.parameters()):
        mesh = hybrid.mesh["replicate"]
        hybrid.handles["replicate"] = data_parallel.replicate(model, mesh, plan.replicate.codec, seed)


def _device(model: nn.Module) -> torch.device:
    """Return the device of a model; refuse one that is parallel already."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a plan is applied to a module, not to {type(model).__name__}")
    parallel = (DistributedDataParallel, FSDPModule)
    if isinstance(model, parallel) or any(isinstance(each, DTensor) for each in model.parameters()):
        raise InputError("the model is parallel already; apply the plan to the plain model")
    devices = {each.device for each in model.parameters()}
    if len(devices) != 1:
        there = ", ".join(sorted(map(str, devices))) or "nowhere: it has no parameters"
        raise InputError(
            f"a plan is applied to a model on one device; the parameters of this one are on {there}"
        )
    device = devices.pop()
    if device.type == "meta":
        raise InputError(
            "the model has no storage (device 'meta'): make it on its device, then apply the plan"
        )
    return device


def _compare(model: nn.Module, plan: JobPlan, seed: int, device: torch.device) -> None:
    """Check that all ranks apply the same plan to the same model."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    detail = (
        f"job plan {zlib.crc32(plan.to_toml().encode()):08x}, seed {seed}, {type(model).__name__} with "
        f"{len(shapes)} parameters {zlib.crc32(repr(shapes).encode()):08x}"
    )
    if plan.ranks > 1:
        process_group.runtime_of(None, device).compare(Call("attach", plan.shape(), (), "", "", detail))


def _lines(hybrid: Hybrid, chosen: Mapping[str, Any]) -> Iterable[str]:
    plan, model = hybrid.plan, hybrid.model
    title = f"{plan.title}: " if plan.title else ""
    yield f"thinwire: {title}{hybrid.kind} on {plan.shape()}"
    if plan.tensor is not None:
        mine = sum(local(each).numel() for each in model.parameters())
        yield (
            f"thinwire: tensor: {len(chosen)} modules are split; {mine:,} parameters on each rank; "
            f"activations {plan.tensor.forward}, their gradients {plan.tensor.backward}"
        )
    if plan.placed is not None:
        mine = sum(each.numel() for each in model.parameters())
        yield (
            f"thinwire: placed: {mine:,} parameters on rank 0; {plan.placed.micro_batches} micro-batches; "
            f"activations {plan.placed.forward}, their gradients {plan.placed.backward}"
        )
    count = sum(isinstance(each, NORMS) for each in model.modules())
    if count and hybrid.parts > 1:
        yield (
            f"thinwire: {count} BatchNorm layers use the statistics of their own rank's samples, as with "
            "DDP; one device would use those of the whole batch"
        )
