"""What ranks compare before an optimizer's first step.

All of it is decided on what every rank has heard, so either all ranks go on or all raise the same error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import Disagreement, InputError
from thinwire.runtimes import process_group
from thinwire.runtimes.arguments import named
from thinwire.runtimes.job import Call

WORD_BITS, WORDS = 16, 4  #: a checksum travels as float32 numbers, each of them exact
NOT_OPTIONS = ("params", "param_names")


def described(options: Mapping[str, Any]) -> str:
    """Return a parameter group's options in words.

    >>> described({"params": [1, 2], "lr": 0.1, "betas": (0.9, 0.999)})
    'betas (0.9, 0.999), lr 0.1'
    """
    told = {key: value for key, value in options.items() if key not in NOT_OPTIONS}
    return ", ".join(f"{key} {told[key]}" for key in sorted(told))


def compare_options(
    what: str,
    codecs: Sequence[str],
    numels: tuple[int, ...],
    names: Sequence[str],
    text: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compare what a user passed; raise a `Disagreement` on all ranks if one differs."""
    runtime = process_group.runtime_of(group, device)
    if runtime.world == 1:
        return
    used = list(dict.fromkeys(codecs))
    detail = f"{text}{named(list(names))}"
    if len(used) > 1:
        detail += f", codecs by tensor {''.join(str(used.index(each)) for each in codecs)}"
    spelt = ", ".join(identity(get_codec(each)) for each in used)
    runtime.compare(Call(what, spelt, numels, "float32", "", detail))


def compare_tensors(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Refuse weights that differ between ranks, and gradients that do not."""
    device = weights[0].device
    world = dist.get_world_size(group)
    if world == 1:
        return
    mine = torch.cat([checksum(weights), checksum(gradients)])
    gathered = torch.empty(world, 2 * WORDS, device=device)
    collectives.all_gather(list(gathered), mine, "fp32", group)
    rows = gathered.tolist()
    if len({tuple(row[:WORDS]) for row in rows}) > 1:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        differ = [rank for rank, row in zip(ranks, rows, strict=True) if row[:WORDS] != rows[0][:WORDS]]
        raise Disagreement(
            f"weights of rank {ranks[0]} and of {'rank' if len(differ) == 1 else 'ranks'} "
            f"{', '.join(map(str, differ))} differ before the first step; call torch.manual_seed with one "
            "seed on all ranks before the model is made, or thinwire.broadcast(p.data, 0, 'fp32') for each "
            "parameter p"
        )
    if len({tuple(row[WORDS:]) for row in rows}) == 1 and any(rows[0][WORDS:]):
        raise InputError(
            "all ranks have the same gradients: has DistributedDataParallel averaged them already? Train the "
            "plain module, or run the backward pass under model.no_sync(); if ranks do train on equal data, "
            "pass check_start=False"
        )


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of the tensors' bits, as exact float32 numbers; zeros give zeros."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for i, x in enumerate(tensors):
        bits = x.detach().reshape(-1).view(torch.int16 if x.element_size() == 2 else torch.int32)
        odd = 2 * torch.arange(bits.numel(), device=x.device) + 2 * i + 1
        total = total * 31 + (bits * odd).sum()
    words = [(total >> (WORD_BITS * i)) & ((1 << WORD_BITS) - 1) for i in range(WORDS)]
    return torch.stack(words).float()
