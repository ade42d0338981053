"""`thinwire.attach`: the one call for every kind of model that communicates."""

import sys
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import AnySpec
from thinwire.integrations import ddp
from thinwire.integrations.handle import Handle
from thinwire.policy import Policy

if TYPE_CHECKING:
    from thinwire.integrations.sharded import ShardedHandle


@overload
def attach(model: DistributedDataParallel, codec: AnySpec | Policy = ..., **options: Any) -> Handle: ...
@overload
def attach(model: nn.Module, codec: AnySpec | Policy = ..., **options: Any) -> "ShardedHandle": ...
def attach(model: Any, codec: AnySpec | Policy = "int8", **options: Any) -> "Handle | ShardedHandle":
    """Send what a model communicates by a policy, a recipe or a codec, from the next pass on.

    The kind of the model decides what is sent, which options there are, and what is returned:

    - `DistributedDataParallel`: gradients; see `thinwire.integrations.ddp.attach`.
    - a module that `fully_shard` was applied to (FSDP2, HSDP): gradients, and weights if asked; see
      `thinwire.integrations.fsdp.attach`.
    """
    if _is_sharded(model):
        from thinwire.integrations import fsdp

        return fsdp.attach(model, codec, **options)
    return ddp.attach(model, codec, **options)


def attached(model: nn.Module) -> "Handle | ShardedHandle | None":
    """Return the handle attached to a model, or None."""
    if _is_sharded(model):
        from thinwire.integrations import fsdp

        return fsdp.attached(model)
    return ddp.attached(model)


def detach(model: Any) -> None:
    """Let the model communicate as torch does, from the next pass on."""
    handle = attached(model)
    if handle is None:
        ddp.detach(model)  # raises: nothing is attached
    else:
        handle.detach()


def _is_sharded(model: object) -> bool:
    """Whether `fully_shard` was applied to a model; FSDP takes half a second to import, so look first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(getattr(model, "_orig_mod", model), fsdp.FSDPModule)
