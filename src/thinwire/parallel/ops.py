"""The collectives of the parallel styles, as operators that `torch.compile` puts into a graph.

An operator takes a codec's spec and a group's name, because graphs hold only tensors, numbers and strings. A
tensor is sharded as torch does it: into equal parts along one dimension, where the last ones may be shorter
or empty. Results are new, contiguous tensors.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from thinwire.collectives import calls, rows


def group_of(name: str) -> dist.ProcessGroup:
    """Return the group that has this name."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def shard_sizes(size: int, world: int) -> list[int]:
    """Return every rank's part of a dimension.

    >>> shard_sizes(7, 4), shard_sizes(5, 4)
    ([2, 2, 2, 1], [2, 2, 1, 0])
    """
    full = -(-size // world)
    return [max(0, min(full, size - full * rank)) for rank in range(world)]


def _shape(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


@torch.library.custom_op("thinwire::all_reduce", mutates_args=())
def all_reduce(x: Tensor, codec: str, group: str, op: str) -> Tensor:
    """Return the sum or mean over ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    calls.all_reduce(out, codec, op, group_of(group))
    return out


@all_reduce.register_fake
def _(x: Tensor, codec: str, group: str, op: str) -> Tensor:
    del codec, group, op
    return x.new_empty(x.shape)


@torch.library.custom_op("thinwire::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, size: int, codec: str, group: str) -> Tensor:
    """Return the parts of all ranks, put together along a dimension of `size` elements."""
    here = group_of(group)
    sizes = shard_sizes(size, here.size())
    if math.prod(x.shape[:dim]) == 1:  # every part of the result is contiguous
        out = x.new_empty(_shape(x, dim, size))
        calls.all_gather(out.split(sizes, dim), x, codec, here)
        return out
    parts = [x.new_empty(_shape(x, dim, each)) for each in sizes]
    calls.all_gather(parts, x, codec, here)
    return _join(parts, dim)


@all_gather.register_fake
def _(x: Tensor, dim: int, size: int, codec: str, group: str) -> Tensor:
    del codec, group
    return x.new_empty(_shape(x, dim, size))


@torch.library.custom_op("thinwire::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, codec: str, group: str, op: str) -> Tensor:
    """Return this rank's part, along a dimension, of the sum or mean over ranks."""
    here = group_of(group)
    parts = x.split(shard_sizes(x.shape[dim], here.size()), dim)
    out = x.new_empty(parts[here.rank()].shape)
    calls.reduce_scatter(out, parts, codec, op, here)
    return out


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, codec: str, group: str, op: str) -> Tensor:
    del codec, op
    here = group_of(group)
    return x.new_empty(_shape(x, dim, shard_sizes(x.shape[dim], here.size())[here.rank()]))


@torch.library.custom_op("thinwire::reshard", mutates_args=())
def reshard(x: Tensor, source: int, size: int, target: int, codec: str, group: str) -> Tensor:
    """Return this rank's part along dimension `target` of a tensor that is sharded along `source`.

    `size` is the whole size of dimension `source`.
    """
    here = group_of(group)
    world, rank = here.size(), here.rank()
    parts = x.split(shard_sizes(x.shape[target], world), target)
    mine = parts[rank]
    outs = [x.new_empty(_shape(mine, source, each)) for each in shard_sizes(size, world)]
    rows.exchange(outs, parts, (math.prod(_shape(x, source, size)),), codec, here)
    return _join(outs, source)


@reshard.register_fake
def _(x: Tensor, source: int, size: int, target: int, codec: str, group: str) -> Tensor:
    del codec
    here = group_of(group)
    mine = _shape(x, target, shard_sizes(x.shape[target], here.size())[here.rank()])
    return x.new_empty([size if dim == source else each for dim, each in enumerate(mine)])


@torch.library.custom_op("thinwire::all_to_all_rows", mutates_args=())
def all_to_all_rows(
    x: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    codec: str,
    backward: str,
    group: str,
    known: bool,
) -> Tensor:
    """Send rows to ranks. `backward` encodes gradients; with `known`, ranks do not compare splits first."""
    del backward
    out = x.new_empty((sum(output_splits), x.shape[1]))
    rows.all_to_all(out, x, list(output_splits), list(input_splits), codec, group_of(group), known=known)
    return out


@all_to_all_rows.register_fake
def _(
    x: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    codec: str,
    backward: str,
    group: str,
    known: bool,
) -> Tensor:
    del input_splits, codec, backward, group, known
    return x.new_empty((sum(output_splits), x.shape[1]))


def _way_there(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, *ctx.way, _ = inputs


def _way_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    output_splits, input_splits, _, backward, group = ctx.way  # ranks compared the splits on the way there
    back = all_to_all_rows(grad, input_splits, output_splits, backward, backward, group, True)
    return back, *(None,) * 6


all_to_all_rows.register_autograd(_way_back, setup_context=_way_there)
