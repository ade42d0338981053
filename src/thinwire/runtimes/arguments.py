"""Check the arguments of callers, and make jobs on flat vectors from them."""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import schedules
from thinwire.channel import Channel
from thinwire.codecs import AnySpec, Codec
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import CodecError, InputError, ScheduleError
from thinwire.formats import Format
from thinwire.rounding import Stream
from thinwire.runtimes.checks import check_name, check_written, listed
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.plan import Ranks, ReducePlan
from thinwire.schedules import Item, RankContext, Schedule
from thinwire.schedules.choose import choose
from thinwire.schedules.traits import laid_out

SUM, AVG = "sum", "avg"
USUAL_NAME = "tensor"  #: name of a call that passes none
AnyCodec: TypeAlias = AnySpec | Channel
After: TypeAlias = Callable[[], None] | None


class Endpoint(Protocol):
    """A rank of a group, and the number of calls it has made."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def together(self) -> int:
        """Bytes of wire up to which parts share an exchange; 0: the elements of one piece."""

    @property
    def plans(self) -> "PlanCache | None":
        """The plans of earlier calls."""

    def ranks_per_node(self) -> int:
        """Return the number of ranks per node."""


@dataclass(frozen=True)
class Reduction:
    """The plan of an all-reduce of tensors of certain shapes, and how tensors become vectors."""

    plan: ReducePlan
    turned: tuple[bool, ...]  #: which matrices are sent column by column, so that a column is contiguous
    direct: bool  #: whether codecs read the tensors' own dtype
    joined: bool  #: whether tensors are copied into one vector, so that one kernel encodes them all

    def in_place(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the vectors of a call that needs no copies of the tensors; None if it needs some."""
        if len(tensors) == 1 and self.direct and not self.turned[0] and tensors[0].is_contiguous():
            return [tensors[0].detach().view(-1)]
        return None

    def job(self, tensors: Sequence[Tensor], rng: Stream | None) -> Job:
        """Return the job of one call."""
        vectors = self.in_place(tensors)
        if vectors is not None:
            job = self.plan.job(vectors, rng)
            job.result = tensors
            return job
        outs = [x.detach().t() if turn else x.detach() for x, turn in zip(tensors, self.turned, strict=True)]
        if self.joined:
            joined = torch.cat([out.reshape(-1) for out in outs])
            vectors = [joined if self.direct else joined.float()]
            sources = list(vectors[0].split([out.numel() for out in outs]))
        else:
            vectors = [out.contiguous().view(-1) for out in outs]
            vectors = vectors if self.direct else [flat.float() for flat in vectors]
            sources = vectors
        job = self.plan.job(vectors, rng)
        pairs = zip(outs, sources, strict=True)
        moved = [(out, flat) for out, flat in pairs if flat.data_ptr() != out.data_ptr()]
        job.result, job.after = tensors, _homecoming(moved)
        return job


class PlanCache:
    """The most recently used reductions, by the caller's arguments."""

    MOST = 256

    def __init__(self) -> None:
        self._held: OrderedDict[Hashable, tuple[Reduction, object]] = OrderedDict()

    def find(self, key: Hashable, owner: object, make: Callable[[], Reduction]) -> Reduction:
        """Return the reduction of a key; make it if it is new.

        `owner` is kept alive with it, because a key may contain the owner's id.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][0]
        result = make()
        self._held[key] = result, owner
        if len(self._held) > self.MOST:
            self._held.popitem(last=False)
        return result


def all_reduce_job(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    endpoint: Endpoint,
    name: str | Sequence[str] = "tensor",
    rng: Stream | None = None,
) -> Job:
    """Return the job of an all-reduce on one rank, from a caller's arguments; it has called `check`."""
    planned = reduction_of(tensors, codec, op, schedule, endpoint, name)
    return planned.job(tensors, stream_for(planned, rng, endpoint))


def stream_for(reduction: Reduction, rng: Stream | None, endpoint: Endpoint) -> Stream | None:
    """Return the random stream of an all-reduce, where it needs one."""
    return stream_of(rng, endpoint) if reduction.plan.call.random or rng is not None else None


def reduction_of(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    endpoint: Endpoint,
    name: str | Sequence[str] = "tensor",
) -> Reduction:
    """Return the reduction for a caller's arguments: a new one, or that of an earlier call.

    The caller has called `check` for the tensors.
    """
    check_written(tensors)
    check_name(name)
    if not isinstance(codec, str | Codec | Channel | Format):
        get_codec(codec)  # raises an error that says what a codec is

    def make() -> Reduction:
        return reduction(tensors, codec, op, schedule, endpoint, name)

    if endpoint.plans is None or not isinstance(schedule, str):
        return make()
    codec_key = id(codec) if isinstance(codec, Channel) else codec
    names = name if isinstance(name, str) else tuple(name)
    shapes = tuple(x.shape for x in tensors)
    key = codec_key, shapes, tensors[0].dtype, tensors[0].device, is_mean(op), schedule, names
    return endpoint.plans.find(key, codec, make)


def reduction(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    endpoint: Endpoint,
    name: str | Sequence[str],
) -> Reduction:
    """Make the plan of an all-reduce of tensors of these shapes."""
    channel, dtype, device = channel_of(codec), tensors[0].dtype, tensors[0].device
    channels, turned = zip(*(for_shape(channel, tuple(x.shape)) for x in tensors), strict=True)
    chosen = schedule_of(schedule, channels[0].codec, sum(x.numel() for x in tensors), endpoint.world)
    for each in channels:
        schedules.get(chosen, each.codec)
    ranks_per_node = ranks_per_node_of(chosen, endpoint.world, endpoint.ranks_per_node)
    direct = dtype == torch.float32 or (
        chosen.batched and all(each.codec.reads(dtype, device) for each in channels)
    )
    joined = device.type == "cuda" and len(tensors) > 1
    items, at = [], 0
    for i, (x, each, slot) in enumerate(zip(tensors, channels, names_of(name, len(tensors)), strict=True)):
        place = (0, at) if joined else (i, 0)
        items.append(Item(x.numel(), each, slot, *place, tensor=i, shape=tuple(x.shape)))
        at += x.numel()
    detail = (
        f"{'mean' if is_mean(op) else 'sum'}{f', nodes of {ranks_per_node}' if ranks_per_node > 1 else ''}"
    )
    if chosen.whole or any(each is not channel for each in channels):
        detail += f", shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"
    call = call_of("all_reduce", tensors, channel, chosen.spec, detail + named(name))
    call = replace(call, random=any(each.codec.needs_rng for each in channels))
    ranks = Ranks(endpoint.rank, endpoint.world, ranks_per_node)
    weight = 1.0 / endpoint.world if is_mean(op) else 1.0
    plan = ReducePlan(items, chosen, ranks, call, weight=weight, together=endpoint.together)
    return Reduction(plan, turned, direct, joined)


def for_shape(channel: Channel, shape: tuple[int, ...]) -> tuple[Channel, bool]:
    """Return the channel for a tensor of this shape, and whether the tensor is sent column by column."""
    codec, turned = laid_out(channel.codec, shape)
    return channel.with_codec(codec), turned


def is_mean(op: object) -> bool:
    """Whether `op` is a mean, not a sum.

    >>> is_mean("avg"), is_mean("sum")
    (True, False)
    """
    if op == AVG or op == dist.ReduceOp.AVG:
        return True
    if op == SUM or op == dist.ReduceOp.SUM:
        return False
    raise InputError(f"op must be 'sum' or 'avg' (or torch's ReduceOp.SUM or AVG), not {op!r}")


def channel_of(codec: AnyCodec) -> Channel:
    """Return a channel unchanged, or a new one for a codec without feedback."""
    if isinstance(codec, Channel):
        return codec
    resolved = get_codec(codec)
    if resolved.feedback:
        raise CodecError(
            f"{resolved.spec} keeps residuals: pass thinwire.Channel('{resolved.spec}'), the same one at "
            f"every step, or leave out '+ef'"
        )
    return Channel(resolved)


def stream_of(rng: Stream | None, endpoint: Endpoint) -> Stream:
    """Return this rank's random stream; by default, one for the number of the call.

    Schedules set the tensor's name of a stream; the name in the caller's stream becomes part of the seed.
    """
    if rng is not None and not isinstance(rng, Stream):
        raise CodecError(f"rng must be a thinwire.Stream, not {type(rng).__name__}")
    if rng is None:
        return Stream(0, step=endpoint.number, rank=endpoint.rank)
    return replace(rng.apart(), rank=endpoint.rank)


def schedule_of(schedule: str | Schedule, codec: Codec, numel: int, world: int) -> Schedule:
    """Return the requested schedule, or the one that `auto` chooses."""
    if not isinstance(schedule, str | Schedule):
        raise ScheduleError(f"a schedule is a string such as 'two_shot', not {type(schedule).__name__}")
    chosen = choose(codec, numel, world)[0] if schedule == "auto" else schedule
    return schedules.get(chosen, codec)


def ranks_per_node_of(schedule: Schedule, world: int, find: Callable[[], int]) -> int:
    """Return the number of ranks per node, for schedules of two levels."""
    ranks_per_node = schedule.ranks_per_node or find()
    if world % ranks_per_node:
        divisors = [each for each in range(1, world + 1) if world % each == 0]
        raise ScheduleError(
            f"{schedule.spec}: {world} ranks do not make nodes of {ranks_per_node}; "
            f"these numbers would do: {', '.join(map(str, divisors))}"
        )
    return ranks_per_node


def plain_context(
    endpoint: Endpoint, codec: AnyCodec, name: str, rng: Stream | None, weight: float = 1.0
) -> RankContext:
    """Return the context of a collective in which ranks do not agree on scales first."""
    channel = channel_of(codec)
    if channel.codec.agreement(1):
        raise CodecError(
            f"{channel.codec.spec} needs a scale that all ranks agree on, which only all_reduce supports; "
            "use a codec without one, such as e5m2/128"
        )
    return RankContext(endpoint.rank, endpoint.world, channel, name, weight, stream_of(rng, endpoint))


def call_of(op: str, tensors: Sequence[Tensor], channel: Channel, schedule: str, detail: str) -> Call:
    """Return the part of a call that must be equal on all ranks."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Call(op, identity(channel.codec), tuple(x.numel() for x in tensors), dtype, schedule, detail)


def named(name: str | Sequence[str]) -> str:
    """Return the name's part in a call's text: ranks that pass different names mean different tensors.

    >>> named("tensor"), named("fc1.weight")
    ('', ", named 'fc1.weight'")
    """
    check_name(name)
    if isinstance(name, str):
        return "" if name == USUAL_NAME else f", named '{name}'"
    return f", named '{name[0]}' and {len(name) - 1} more ({zlib.crc32(repr(list(name)).encode()):08x})"


def vector(x: Tensor) -> Tensor:
    """Return all elements as a flat float32 vector."""
    return x.detach().reshape(-1).float()


def rooms(tensors: Sequence[Tensor], *, filled: bool) -> tuple[list[Tensor], After]:
    """Return flat float32 vectors for results, and a function that copies them into `tensors`.

    Vectors that share memory with their tensors need no copy; if all do, the function is None.
    """
    flats, homes = [], []
    for x in tensors:
        if x.dtype == torch.float32 and x.is_contiguous():
            flats.append(x.detach().view(-1))
            continue
        flats.append(vector(x).clone() if filled else torch.empty(x.numel(), device=x.device))
        homes.append((x.detach(), flats[-1]))
    return flats, _homecoming(homes)


def _homecoming(homes: list[tuple[Tensor, Tensor]]) -> After:
    if not homes:
        return None

    def after() -> None:
        torch._foreach_copy_([home for home, _ in homes], [flat.view(home.shape) for home, flat in homes])

    return after


def parts(
    tensors: Tensor | Sequence[Tensor], world: int, what: str, sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """Return one tensor per rank: a list unchanged, or a tensor split along its first dimension."""
    if not isinstance(tensors, Tensor):
        tensors = listed(tensors)
        if len(tensors) != world:
            raise InputError(f"{what} must have one tensor for each of {world} ranks, not {len(tensors)}")
        return list(tensors)
    if sizes is not None:
        cuts = list(sizes) if isinstance(sizes, list | tuple) else []
        if len(cuts) != world or any(type(n) is not int or n < 0 for n in cuts) or sum(cuts) != len(tensors):
            raise InputError(
                f"{what}_split_sizes must be {world} whole numbers that add up to {tensors.shape[0]}, "
                f"not {sizes!r}"
            )
        return list(tensors.split(cuts))
    flat = tensors if tensors.dim() and tensors.shape[0] % world == 0 else _flat(tensors, what)
    if flat.numel() % world or flat.shape[0] % world:
        raise InputError(
            f"{what} has {tensors.numel()} elements, which {world} ranks cannot share evenly; "
            "pass a list of tensors"
        )
    return list(flat.chunk(world)) if flat.shape[0] else [flat] * world


def _flat(x: Tensor, what: str) -> Tensor:
    if not x.is_contiguous():
        raise InputError(f"{what} is not contiguous, so that it has no even parts; pass a list of tensors")
    return x.view(-1)


def names_of(name: str | Sequence[str], count: int) -> list[str]:
    """Return a name for every tensor of a bucket; one name is extended with numbers."""
    if isinstance(name, str):
        return [name, *(f"{name}.{i}" for i in range(1, count))]
    if len(name) != count or len(set(name)) != count:
        raise InputError(f"{count} tensors need as many different names, not {list(name)}")
    return list(name)
