"""The axes along which ranks train on other samples: `replicate` by DDP, `shard` by FSDP2."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from thinwire.hybrids.job_plan import EXACT, JobPlan
from thinwire.hybrids.names import listed
from thinwire.integrations import ddp, fsdp
from thinwire.integrations.handle import Handle
from thinwire.integrations.sharded import ShardedHandle


class Inside(nn.Module):
    """A model as DDP sees it: the same parameters and names, and the forward pass from before DDP.

    The model itself stays what a script holds; its forward pass goes through DDP, which calls this one.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._forward = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._forward(*inputs, **named)


def replicate(
    model: nn.Module, mesh: DeviceMesh, codec: str, seed: int, ignored: frozenset[str] = frozenset()
) -> Handle:
    """Let a model average its gradients over replicas; calling the model stays as it is."""
    inside = Inside(model, model.forward)
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inside, ignored)
    parallel = DistributedDataParallel(inside, process_group=mesh.get_group())
    handle = ddp.attach(parallel, codec, seed=seed)
    model.forward = parallel.forward
    return handle


def shard(model: nn.Module, mesh: DeviceMesh, plan: JobPlan, seed: int) -> ShardedHandle:
    """Shard a model in place over a mesh of one dimension, or of two with replicas."""
    assert plan.shard is not None
    for name in listed(model, plan.shard.modules, "shard.modules"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    inside = plan.shard.codec if plan.replicate is not None else None
    codec = plan.replicate.codec if plan.replicate is not None else plan.shard.codec
    weights = None if plan.shard.weights == EXACT else plan.shard.weights
    return fsdp.attach(model, codec, weights=weights, inside=inside, seed=seed)
