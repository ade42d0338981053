"""`thinwire.attach`: the one call for every kind of model that communicates."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import AnySpec
from thinwire.integrations import ddp, pipeline
from thinwire.integrations.handle import Handle
from thinwire.parallel.pipeline_handle import PipelineHandle
from thinwire.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from thinwire.integrations.sharded import ShardedHandle

AnyHandle = Union[Handle, PipelineHandle, "ShardedHandle"]


@overload
def attach(model: DistributedDataParallel, codec: AnySpec | Policy = ..., **options: Any) -> Handle: ...
@overload
def attach(
    model: "_PipelineStageBase | Sequence[_PipelineStageBase]", codec: AnySpec | None = ..., **options: Any
) -> PipelineHandle: ...
@overload
def attach(model: nn.Module, codec: AnySpec | Policy = ..., **options: Any) -> "ShardedHandle": ...
def attach(model: Any, codec: Any = "int8", **options: Any) -> AnyHandle:
    """Send what a model communicates by a policy, a recipe or a codec, from the next step on.

    The kind of the model decides what is sent, which options there are, and what is returned:

    - `DistributedDataParallel`: gradients; see `thinwire.integrations.ddp.attach`.
    - a module that `fully_shard` was applied to (FSDP2, HSDP): gradients, and weights if asked; see
      `thinwire.integrations.fsdp.attach`.
    - a stage of torch.distributed.pipelining, or a list of stages: activations and their gradients; see
      `thinwire.integrations.pipeline.attach`.
    """
    if _is_sharded(model):
        from thinwire.integrations import fsdp

        return fsdp.attach(model, codec, **options)
    if pipeline.is_stage(model):
        return pipeline.attach(model, codec, **options)
    return ddp.attach(model, codec, **options)


def attached(model: nn.Module) -> "Handle | ShardedHandle | None":
    """Return the handle attached to a model, or None."""
    if _is_sharded(model):
        from thinwire.integrations import fsdp

        return fsdp.attached(model)
    return ddp.attached(model)


def detach(model: Any) -> None:
    """Let the model communicate as torch does, from the next step on."""
    handle = attached(model)
    if handle is None:
        ddp.detach(model)  # raises: nothing is attached
    else:
        handle.detach()


def _is_sharded(model: object) -> bool:
    """Whether `fully_shard` was applied to a model; FSDP takes half a second to import, so look first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(getattr(model, "_orig_mod", model), fsdp.FSDPModule)
