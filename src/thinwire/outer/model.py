"""What an outer loop sends of a model, and which models it takes."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire import policy
from thinwire.errors import InputError
from thinwire.outer.fragment import Place
from thinwire.outer.settings import MEAN, Settings
from thinwire.policy import TensorInfo
from thinwire.runtimes import process_group
from thinwire.runtimes.checks import DTYPES


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor, or this rank's part of a sharded one, as a tensor that shares its memory."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def places(model: nn.Module, settings: Settings) -> list[Place]:
    """Return the trained parameters of a model."""
    trained = []
    for tensor, (_, parameter) in zip(policy.describe(model), model.named_parameters(), strict=True):
        local = local_part(parameter)
        if not parameter.requires_grad or not local.numel():
            continue
        if local.dtype not in DTYPES or local.is_meta:
            what = "on the meta device" if local.is_meta else str(local.dtype).removeprefix("torch.")
            raise InputError(
                f"{tensor.name} is {what}; outer steps take float32, bfloat16 and float16 weights"
            )
        trained.append(Place(TensorInfo(tensor.name, tensor.role, tuple(local.shape)), local))
    if len(trained) < settings.fragments:
        raise InputError(
            f"the model has {len(trained)} trained parameters, too few for {settings.fragments} "
            f"fragment{'s' * (settings.fragments > 1)}"
        )
    return trained


def averaged_buffers(model: nn.Module, settings: Settings) -> list[Tensor]:
    """Return the buffers that ranks average."""
    if settings.buffers != MEAN:
        return []
    return [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """Return frozen parameters and all buffers, by name: a rank that joins receives them."""
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    return {_plain(name): local_part(each) for name, each in (*frozen, *model.named_buffers())}


def _plain(name: str) -> str:
    """Return a name without what torch.compile and DistributedDataParallel add to it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def described(model: nn.Module) -> str:
    """Return names, shapes and dtypes of all that a model has, which ranks compare."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return "; ".join(
        f"{_plain(name)} {tuple(local_part(each).shape)} {each.dtype} {each.requires_grad}"
        for name, each in tensors.items()
    )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that trains tensors which the outer loop would not send."""
    known = {id(each) for each in model.parameters()}
    groups = optimizer.param_groups
    strange = sum(id(each) not in known for group in groups for each in group["params"])
    if strange:
        raise InputError(
            f"the optimizer trains {strange} tensors that are not parameters of the model, and would differ "
            "between ranks; pass the whole model"
        )


def check_group(model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuse a model that already averages every step over ranks of the group."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    ranks = set(process_group.runtime_of(group, device).ranks) - {dist.get_rank()}
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise InputError("FullyShardedDataParallel (FSDP1) is not supported: use fully_shard (FSDP2)")
    for what, inner in _averaging(model):
        if shared := sorted(ranks & inner):
            raise InputError(
                f"{what} communicates in every step with ranks {shared}, which are in the group of "
                "the outer loop too: pass the plain module, or a model whose group is one host's ranks, "
                "and group= with one rank of every host"
            )


def _averaging(model: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """Yield what communicates in every step, and its ranks."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            assert isinstance(module.process_group, dist.ProcessGroup)
            yield "DistributedDataParallel", set(dist.get_process_group_ranks(module.process_group))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield f"the sharded parameter {name}", set(parameter.device_mesh.mesh.flatten().tolist())
