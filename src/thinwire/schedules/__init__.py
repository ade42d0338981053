"""Collective algorithms, each written once, as a generator that asks for exchanges.

A schedule is named by a spec: its name and, for some, an option.

| spec | option |
|---|---|
| `native`, `one_shot`, `two_shot`, `ring`, `tree`, `sparse` | none |
| `hierarchical`, `hierarchical/8`, `hierarchical/8:bf16` | ranks of a node, the codec inside it |
| `sparse_levels/8` | the same for sparse codecs |
| `low_rank/4` | the rank of the approximation |
| `accumulate/sequential`, `/ring`, `/tree`, `/16`, each with `+kahan` | order of the additions |

    >>> from thinwire import schedules
    >>> schedules.get("hierarchical/8").inside
    8
    >>> schedules.get("native").refuses(codecs.get("int8/256"))
    'the network cannot add int8/256 wires'
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from thinwire import codecs
from thinwire.codecs import Block, Codec
from thinwire.errors import ScheduleError, unknown
from thinwire.schedules import accumulate as _accumulate
from thinwire.schedules.batch import Batch, Item
from thinwire.schedules.exchange import AllGather, AllReduce, AllToAll, Exchanges, Request, SendRecv
from thinwire.schedules.fuse import apart
from thinwire.schedules.gather import Combine, add_up, gathered
from thinwire.schedules.levels import hierarchical
from thinwire.schedules.low_rank import low_rank
from thinwire.schedules.reduce import native, one_shot, ring, tree, two_shot, two_shot_of_rows
from thinwire.schedules.seat import Buffers, Cut, Seat
from thinwire.schedules.traits import feeds_back, is_bound, is_cast, is_sparse
from thinwire.schedules.use import Use

__all__ = [
    "SCHEDULES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Batch",
    "Buffers",
    "Cut",
    "Exchanges",
    "Item",
    "Request",
    "Schedule",
    "Seat",
    "SendRecv",
    "Use",
    "get",
]


@dataclass(frozen=True)
class Schedule:
    """A way to all-reduce, ready to be run."""

    spec: str
    steps: Callable[[Use], Exchanges]
    refuses: Callable[[Codec], str]  #: why it cannot serve a codec; "" if it can
    inside: int = 1  #: ranks of a node; 0: as many as are found
    adds: bool = False  #: whether the network adds, so that results depend on its order
    whole: bool = False  #: whether it needs the tensor in one piece
    batched: bool = False  #: whether codecs see a batch's own vectors, which need not be float32 then
    steady: bool = False  #: whether a step launches the same kernels on the same memory as the one before
    combine: Combine | None = None  #: what every rank does with all wires, if gathering them is all there is
    #: The result from all ranks' vectors [world, numel] and any rank's seat, for wires that follow from them.
    of_rows: Callable[[Tensor, Seat], Tensor] | None = None


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
            f"sums that the network makes leave no residual, so the feedback of {codec.spec} would be ignored"
        )
    return _summed(codec)


def _sparse(codec: Codec) -> str:
    return "" if is_sparse(codec) else f"{codec.spec} is not sparse"


def _sparse_in_parts(codec: Codec) -> str:
    return _sparse(codec) or _in_parts(codec)


def _narrow(codec: Codec) -> str:
    if is_cast(codec):
        return ""
    if isinstance(codec, Block) and codec.block is None:
        scaling = codec.scaling
        if scaling.margin == "world" or (scaling.choose == "fixed" and not scaling.value):
            return ""
    return (
        f"{codec.spec} has no scale that leaves room for a sum over all ranks; aps/e5m2 has, and "
        "e5m2~offset0 does without any"
    )


def _levels(option: str, refuses: Callable[[Codec], str], name: str) -> Schedule:
    count, _, light = option.partition(":")
    inside = _number(count, name) if count else 0
    codec = codecs.get(light or "fp32")
    if codec.needs_rng or codec.feedback or codec.agreement(1) or codec.has_fixed_scale:
        raise ScheduleError(f"{name}: {codec.spec} cannot be used inside a node; use fp32, bf16 or int8/256")
    spec = name + (f"/{option}" if option else "")
    return Schedule(spec, apart(partial(hierarchical, light=codec)), refuses, inside)


def _make_low_rank(option: str) -> Schedule:
    rank = _number(option or "1", "low_rank")
    steps = partial(low_rank, rank=rank)
    return Schedule(f"low_rank/{rank}", steps, _summed, adds=True, whole=True, steady=True)


def _make_accumulate(option: str) -> Schedule:
    order, plus, how = option.partition("+")
    if plus and how != "kahan":
        raise ScheduleError(f"accumulate knows '+kahan', not '+{how}'")
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
        raise ScheduleError(f"{name}/{text}: expected a number from 1 on, such as {name}/4")
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
    "hierarchical": partial(_levels, refuses=_in_parts, name="hierarchical"),
    "sparse": _plain(Schedule("sparse", one_shot, _sparse, combine=add_up, batched=True, steady=True)),
    "sparse_levels": partial(_levels, refuses=_sparse_in_parts, name="sparse_levels"),
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
    """The schedule of a spec; with a codec, one that can serve it."""
    schedule = spec if isinstance(spec, Schedule) else _made(spec.strip())
    why = schedule.refuses(codec) if codec is not None else ""
    if why and codec is not None:
        can = [name for name, each in SCHEDULES.items() if not each.refuses(codec)]
        raise ScheduleError(f"{schedule.spec} cannot serve {codec.spec}: {why}. These can: {', '.join(can)}")
    return schedule


#: One of each kind: what listings, tests and benchmarks go over.
SCHEDULES: dict[str, Schedule] = {
    spec: _made(spec)
    for spec in (
        "native", "one_shot", "two_shot", "ring", "tree", "hierarchical/2", "hierarchical/2:bf16", "sparse",
        "sparse_levels/2", "low_rank/2", "accumulate/sequential", "accumulate/sequential+kahan",
        "accumulate/ring", "accumulate/tree", "accumulate/2",
    )
}  # fmt: skip
