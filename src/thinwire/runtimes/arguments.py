"""What callers pass, checked and laid out flat."""

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
from thinwire.codecs import AnySpec, Codec, OneBitColumn
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import CodecError, InputError, ScheduleError
from thinwire.formats import Format
from thinwire.rounding import Stream
from thinwire.runtimes.checks import check, check_name, check_written, listed
from thinwire.runtimes.job import Call, Job, Plan, Ranks
from thinwire.schedules import Item, Schedule, Seat
from thinwire.schedules.choose import choose

SUM, AVG = "sum", "avg"
USUAL_NAME = "tensor"  #: of a call that gives none
AnyCodec: TypeAlias = AnySpec | Channel
After: TypeAlias = Callable[[], None] | None


class Place(Protocol):
    """Where a call is made: a rank of a group, which has made so many calls before."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def together(self) -> int:
        """How many elements travel together where that is more than a piece; 0: a piece."""

    @property
    def plans(self) -> "Plans | None":
        """Calls that were worked out before."""

    def inside(self) -> int:
        """How many ranks a node has."""


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of tensors of certain shapes, worked out once."""

    plan: Plan
    turned: tuple[bool, ...]  #: which matrices are sent column by column, so that a column is in one place
    direct: bool  #: whether codecs read the tensors' own dtype
    joined: bool  #: whether tensors are copied into one vector, so that one kernel serves them all

    def in_place(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The vectors of a call that reads and writes the tensors where they are; None if it cannot."""
        if len(tensors) == 1 and self.direct and not self.turned[0] and tensors[0].is_contiguous():
            return [tensors[0].detach().view(-1)]
        return None

    def job(self, tensors: Sequence[Tensor], rng: Stream | None) -> Job:
        """The job of one call."""
        vectors = self.in_place(tensors)
        if vectors is not None:
            job = self.plan.job(vectors, rng)
            job.result = tensors
            return job
        homes = [x.detach().t() if turn else x.detach() for x, turn in zip(tensors, self.turned, strict=True)]
        if self.joined:
            joined = torch.cat([home.reshape(-1) for home in homes])
            vectors = [joined if self.direct else joined.float()]
            sources = list(vectors[0].split([home.numel() for home in homes]))
        else:
            vectors = [home.contiguous().view(-1) for home in homes]
            vectors = vectors if self.direct else [flat.float() for flat in vectors]
            sources = vectors
        job = self.plan.job(vectors, rng)
        pairs = zip(homes, sources, strict=True)
        moved = [(home, flat) for home, flat in pairs if flat.data_ptr() != home.data_ptr()]
        job.result, job.after = tensors, _homecoming(moved)
        return job


class Plans:
    """Reductions that were used last, by what the caller passed."""

    MOST = 256

    def __init__(self) -> None:
        self._held: OrderedDict[Hashable, tuple[Reduction, object]] = OrderedDict()

    def find(self, key: Hashable, owner: object, make: Callable[[], Reduction]) -> Reduction:
        """The reduction of a key, made if need be. `owner` is kept with it: a key may have its address."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][0]
        made = make()
        self._held[key] = made, owner
        if len(self._held) > self.MOST:
            self._held.popitem(last=False)
        return made


def all_reduce_job(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    here: Place,
    name: str | Sequence[str] = "tensor",
    rng: Stream | None = None,
) -> Job:
    """The job of an all-reduce on one rank, from what a caller passes."""
    found = reduction_of(tensors, codec, op, schedule, here, name)
    return found.job(tensors, stream_for(found, rng, here))


def stream_for(found: Reduction, rng: Stream | None, here: Place) -> Stream | None:
    """Random numbers of an all-reduce, where it needs any."""
    return stream_of(rng, here) if found.plan.call.random or rng is not None else None


def reduction_of(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    here: Place,
    name: str | Sequence[str] = "tensor",
) -> Reduction:
    """An all-reduce from what a caller passes: worked out, or known from an earlier call."""
    device = check(tensors)
    check_written(tensors)
    check_name(name)
    if not isinstance(codec, str | Codec | Channel | Format):
        get_codec(codec)  # which says what a codec is

    def make() -> Reduction:
        return reduction(tensors, codec, op, schedule, here, name)

    if here.plans is None or not isinstance(schedule, str):
        return make()
    who = id(codec) if isinstance(codec, Channel) else codec
    names = name if isinstance(name, str) else tuple(name)
    shapes = tuple(x.shape for x in tensors)
    key = who, shapes, tensors[0].dtype, device, is_mean(op), schedule, names
    return here.plans.find(key, codec, make)


def reduction(
    tensors: Sequence[Tensor],
    codec: AnyCodec,
    op: object,
    schedule: str | Schedule,
    here: Place,
    name: str | Sequence[str],
) -> Reduction:
    """Work out an all-reduce of tensors of these shapes."""
    channel, dtype, device = channel_of(codec), tensors[0].dtype, tensors[0].device
    channels, turned = zip(*(for_shape(channel, tuple(x.shape)) for x in tensors), strict=True)
    chosen = schedule_of(schedule, codec_of(channels[0]), sum(x.numel() for x in tensors), here.world)
    for each in channels:
        schedules.get(chosen, codec_of(each))
    inside = inside_of(chosen, here.world, here.inside)
    direct = dtype == torch.float32 or (
        chosen.batched and all(codec_of(each).reads(dtype, device) for each in channels)
    )
    joined = device.type == "cuda" and len(tensors) > 1
    items, at = [], 0
    for i, (x, each, slot) in enumerate(zip(tensors, channels, names_of(name, len(tensors)), strict=True)):
        place = (0, at) if joined else (i, 0)
        items.append(Item(x.numel(), each, slot, *place, tensor=i, shape=tuple(x.shape)))
        at += x.numel()
    detail = f"{'mean' if is_mean(op) else 'sum'}{f', nodes of {inside}' if inside > 1 else ''}"
    if chosen.whole or any(each is not channel for each in channels):
        detail += f", shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"
    call = call_of("all_reduce", tensors, channel, chosen.spec, detail + named(name))
    call = replace(call, random=any(codec_of(each).needs_rng for each in channels))
    ranks, weight = Ranks(here.rank, here.world, inside), 1.0 / here.world if is_mean(op) else 1.0
    plan = Plan(items, chosen, ranks, call, weight=weight, together=here.together)
    return Reduction(plan, turned, direct, joined)


def for_shape(channel: Channel, shape: tuple[int, ...]) -> tuple[Channel, bool]:
    """The channel for a tensor of this shape, and whether it is sent column by column."""
    codec, turned = laid_out(codec_of(channel), shape)
    return shaped(channel, codec), turned


def laid_out(codec: Codec, shape: tuple[int, ...]) -> tuple[Codec, bool]:
    """The codec for a tensor of this shape, and whether it is sent column by column."""
    found = codec.for_shape(shape)
    turned = isinstance(found, OneBitColumn) and found.strided
    return (replace(found, strided=False) if isinstance(found, OneBitColumn) else found), turned


def is_mean(op: object) -> bool:
    """Whether a mean is asked for, and not a sum.

    >>> is_mean("avg"), is_mean("sum")
    (True, False)
    """
    if op == AVG or op == dist.ReduceOp.AVG:
        return True
    if op == SUM or op == dist.ReduceOp.SUM:
        return False
    raise InputError(f"op must be 'sum' or 'avg' (or torch's ReduceOp.SUM or AVG), not {op!r}")


def channel_of(codec: AnyCodec) -> Channel:
    """A channel as it is; one for a codec that owes nothing."""
    if isinstance(codec, Channel):
        return codec
    found = get_codec(codec)
    if found.feedback:
        raise CodecError(
            f"{found.spec} remembers what it owes: pass thinwire.Channel('{found.spec}'), the same one at "
            f"every step, or leave out '+ef'"
        )
    return Channel(found)


def codec_of(channel: Channel) -> Codec:
    codec = channel.codec
    assert isinstance(codec, Codec)
    return codec


def shaped(channel: Channel, codec: Codec) -> Channel:
    """The same memory, with the codec for one tensor's shape."""
    return channel.with_codec(codec)


def stream_of(rng: Stream | None, here: Place) -> Stream:
    """This rank's random numbers; by default those of the number of the call.

    Schedules name the tensors; what the caller's stream calls its tensor stays in the seed.
    """
    if rng is not None and not isinstance(rng, Stream):
        raise CodecError(f"rng must be a thinwire.Stream, not {type(rng).__name__}")
    if rng is None:
        return Stream(0, step=here.number, rank=here.rank)
    return replace(rng.apart(), rank=here.rank)


def schedule_of(schedule: str | Schedule, codec: Codec, numel: int, world: int) -> Schedule:
    """The schedule that was asked for, or the one that `auto` chooses."""
    if not isinstance(schedule, str | Schedule):
        raise ScheduleError(f"a schedule is a string such as 'two_shot', not {type(schedule).__name__}")
    chosen = choose(codec, numel, world)[0] if schedule == "auto" else schedule
    return schedules.get(chosen, codec)


def inside_of(schedule: Schedule, world: int, find: Callable[[], int]) -> int:
    """How many ranks a node has, for schedules of two levels."""
    inside = schedule.inside or find()
    if world % inside:
        fit = [each for each in range(1, world + 1) if world % each == 0]
        raise ScheduleError(
            f"{schedule.spec}: {world} ranks do not make nodes of {inside}; "
            f"these numbers would do: {', '.join(map(str, fit))}"
        )
    return inside


def plain_seat(here: Place, codec: AnyCodec, name: str, rng: Stream | None, weight: float = 1.0) -> Seat:
    """A seat for a collective that does not agree on scales first."""
    channel = channel_of(codec)
    if codec_of(channel).agreement(1):
        raise CodecError(
            f"{codec_of(channel).spec} agrees on a scale between ranks, which only all_reduce does; use a "
            "codec whose scales are its own, such as e5m2/128"
        )
    return Seat(here.rank, here.world, channel, name, weight, stream_of(rng, here))


def call_of(op: str, tensors: Sequence[Tensor], channel: Channel, schedule: str, detail: str) -> Call:
    """What all ranks must call alike."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Call(op, identity(codec_of(channel)), tuple(x.numel() for x in tensors), dtype, schedule, detail)


def named(name: str | Sequence[str]) -> str:
    """What a call's name adds to its text: ranks that call by different names mean different tensors.

    >>> named("tensor"), named("fc1.weight")
    ('', ", named 'fc1.weight'")
    """
    check_name(name)
    if isinstance(name, str):
        return "" if name == USUAL_NAME else f", named '{name}'"
    return f", named '{name[0]}' and {len(name) - 1} more ({zlib.crc32(repr(list(name)).encode()):08x})"


def vector(x: Tensor) -> Tensor:
    """All elements in a row, float32."""
    return x.detach().reshape(-1).float()


def rooms(tensors: Sequence[Tensor], *, filled: bool) -> tuple[list[Tensor], After]:
    """Flat float32 vectors in which results arrive, and what brings those home that are not there yet."""
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
    """One tensor for each rank: a list as it is, a tensor cut along its first dimension."""
    if not isinstance(tensors, Tensor):
        tensors = listed(tensors)
        if len(tensors) != world:
            raise InputError(f"{what} must have one tensor for each of {world} ranks, not {len(tensors)}")
        return list(tensors)
    if sizes is not None:
        each = list(sizes) if isinstance(sizes, list | tuple) else []
        if len(each) != world or any(type(n) is not int or n < 0 for n in each) or sum(each) != len(tensors):
            raise InputError(
                f"{what}_split_sizes must be {world} whole numbers that add up to {tensors.shape[0]}, "
                f"not {sizes!r}"
            )
        return list(tensors.split(each))
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
    """A name for every tensor of a bucket; made up from one if need be."""
    if isinstance(name, str):
        return [name, *(f"{name}.{i}" for i in range(1, count))]
    if len(name) != count or len(set(name)) != count:
        raise InputError(f"{count} tensors need as many different names, not {list(name)}")
    return list(name)
