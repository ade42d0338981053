"""Collective algorithms, each written once, as a generator that yields the exchanges it needs.

A spec names a schedule: its name and, for some, an option.

| spec | option |
|---|---|
| `native`, `one_shot`, `two_shot`, `ring`, `tree` | none |
| `hierarchical`, `hierarchical/8`, `hierarchical/8:bf16` | ranks per node, the codec inside a node |
| `low_rank/4` | the rank of the approximation |
| `accumulate/sequential`, `/ring`, `/tree`, `/16`, each with `+kahan` | order of the additions |

    >>> from thinwire import schedules
    >>> schedules.get("hierarchical/8").ranks_per_node
    8
    >>> schedules.get("native").refuses(codecs.get("int8/256"))
    'the network cannot add int8/256 wires'
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from thinwire import codecs
from thinwire.codecs import Block, Codec
from thinwire.errors import ScheduleError, unknown
from thinwire.schedules import accumulate as _accumulate
from thinwire.schedules.batch import Batch, Item
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import AllGather, AllReduce, AllToAll, Exchanges, Request, SendRecv
from thinwire.schedules.fuse import apart
from thinwire.schedules.gather import Combine, add_up, gathered
from thinwire.schedules.hierarchical import hierarchical
from thinwire.schedules.low_rank import low_rank, thin_nbytes
from thinwire.schedules.rank_context import Buffers, RankContext, Sharding
from thinwire.schedules.reduce import native, one_shot, ring, tree, two_shot, two_shot_of_rows
from thinwire.schedules.traits import feeds_back, is_bound, is_cast

__all__ = [
    "SCHEDULES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Batch",
    "BatchRun",
    "Buffers",
    "Exchanges",
    "Item",
    "RankContext",
    "Request",
    "Schedule",
    "SendRecv",
    "Sharding",
    "get",
]


class WireNbytes(Protocol):
    """Return the bytes of wire that one rank encodes from `numel` elements of a tensor."""

    def __call__(self, codec: Codec, numel: int, *, shape: tuple[int, ...]) -> int: ...


def codec_nbytes(codec: Codec, numel: int, *, shape: tuple[int, ...]) -> int:
    """Return the bytes of one wire of the codec."""
    del shape
    return codec.nbytes(numel)


@dataclass(frozen=True)
class Schedule:
    """An all-reduce algorithm, ready to run."""

    spec: str
    steps: Callable[[BatchRun], Exchanges]
    refuses: Callable[[Codec], str]  #: why it cannot serve a codec; "" if it can
    ranks_per_node: int = 1  #: 0: as many as the runtime detects
    adds: bool = False  #: whether the network adds, so that results depend on its order of additions
    whole: bool = False  #: whether it needs the tensor in one piece
    batched: bool = False  #: whether codecs read a batch's own vectors, which then need not be float32
    steady: bool = False  #: whether every step launches the same kernels on the same memory
    wire_nbytes: WireNbytes = codec_nbytes  #: bytes that one rank encodes
    combine: Combine | None = None  #: how each rank combines all wires, if the schedule only gathers them
    #: Computes the result from all ranks' vectors [world, numel] and any rank's context, if wires depend on
    #: nothing else.
    of_rows: Callable[[Tensor, RankContext], Tensor] | None = None


def _any(codec: Codec) -> str:
    del codec
    return ""


def _in_parts(codec: Codec) -> str:
    return f"{codec.spec} is for a whole tensor and cannot be cut into shards" if is_bound(codec) else ""


def _summed(codec: Codec) -> str:
    return "" if is_cast(codec) else f"the network cannot add {codec.name} wires"


def _summed_at_once(codec: Codec) -> str:
    if feeds_back(codec):
        return (
            f"a sum made by the network leaves no residual, so the feedback of {codec.spec} would be ignored"
        )
    return _summed(codec)


def _narrow(codec: Codec) -> str:
    if is_cast(codec):
        return ""
    if isinstance(codec, Block) and codec.block is None:
        scaling = codec.scaling
        if scaling.margin == "world" or (scaling.choose == "fixed" and not scaling.value):
            return ""
    return (
        f"{codec.spec} has no scale that leaves room for a sum over all ranks; use aps/e5m2, which has "
        "one, or e5m2~offset0, which needs none"
    )


def _make_hierarchical(option: str) -> Schedule:
    count, _, light = option.partition(":")
    ranks_per_node = _number(count, "hierarchical") if count else 0
    codec = codecs.get(light or "fp32")
    if codec.needs_rng or codec.feedback or codec.agreement(1) or codec.has_fixed_scale:
        raise ScheduleError(
            f"hierarchical: {codec.spec} cannot be used inside a node; use fp32, bf16 or int8/256"
        )
    spec = "hierarchical" + (f"/{option}" if option else "")
    return Schedule(spec, apart(partial(hierarchical, light=codec)), _in_parts, ranks_per_node)


def _make_low_rank(option: str) -> Schedule:
    rank = _number(option or "1", "low_rank")
    steps, nbytes = partial(low_rank, rank=rank), partial(thin_nbytes, rank=rank)
    return Schedule(
        f"low_rank/{rank}", steps, _summed, adds=True, whole=True, steady=True, wire_nbytes=nbytes
    )


def _make_accumulate(option: str) -> Schedule:
    order, plus, how = option.partition("+")
    if plus and how != "kahan":
        raise ScheduleError(f"accumulate accepts '+kahan', not '+{how}'")
    known = order in _accumulate.ORDERS
    if plus and order == "tree":
        raise ScheduleError("accumulate/tree+kahan: a tree adds pairs, which leaves nothing to compensate")
    if not known and not order.isdecimal():
        raise ScheduleError(
            f"accumulate/{order}: the order of additions is one of {', '.join(_accumulate.ORDERS)} "
            "or a number of ranks in a group, such as accumulate/16"
        )
    combine = partial(
        _accumulate.combine, order=order if known else _number(order, "accumulate"), kahan=bool(plus)
    )
    steps = apart(partial(gathered, combine=combine))
    return Schedule(f"accumulate/{option}", steps, _narrow, whole=order == "ring", combine=combine)


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ScheduleError(f"{name}/{text}: expected a whole number of 1 or more, such as {name}/4")
    return int(text)


def _plain(schedule: Schedule) -> Callable[[str], Schedule]:
    def make(option: str) -> Schedule:
        if option:
            raise ScheduleError(f"{schedule.spec} takes no option, not '/{option}'")
        return schedule

    return make


_MAKERS: dict[str, Callable[[str], Schedule]] = {
    "native": _plain(Schedule("native", apart(native), _summed_at_once, adds=True, steady=True)),
    "one_shot": _plain(Schedule("one_shot", one_shot, _any, combine=add_up, batched=True, steady=True)),
    "two_shot": _plain(
        Schedule("two_shot", two_shot, _in_parts, of_rows=two_shot_of_rows, batched=True, steady=True)
    ),
    "ring": _plain(Schedule("ring", apart(ring), _in_parts)),
    "tree": _plain(Schedule("tree", apart(tree), _any)),
    "hierarchical": _make_hierarchical,
    "low_rank": _make_low_rank,
    "accumulate": _make_accumulate,
}


@functools.cache
def _made(spec: str) -> Schedule:
    name, _, option = spec.partition("/")
    if name not in _MAKERS:
        raise ScheduleError(unknown("schedule", name, ("auto", *_MAKERS), "`thinwire schedules` lists all"))
    return _MAKERS[name](option)


def get(spec: str | Schedule, codec: Codec | None = None) -> Schedule:
    """Return the schedule of a spec; with a codec, refuse a schedule that cannot serve it."""
    schedule = spec if isinstance(spec, Schedule) else _made(spec.strip())
    why = schedule.refuses(codec) if codec is not None else ""
    if why and codec is not None:
        can = [name for name, each in SCHEDULES.items() if not each.refuses(codec)]
        raise ScheduleError(f"{schedule.spec} cannot serve {codec.spec}: {why}. These can: {', '.join(can)}")
    return schedule


#: One schedule of each kind, for listings, tests and benchmarks.
SCHEDULES: dict[str, Schedule] = {
    spec: _made(spec)
    for spec in (
        "native", "one_shot", "two_shot", "ring", "tree", "hierarchical/2", "hierarchical/2:bf16",
        "low_rank/2", "accumulate/sequential", "accumulate/sequential+kahan", "accumulate/ring",
        "accumulate/tree", "accumulate/2",
    )
}  # fmt: skip
