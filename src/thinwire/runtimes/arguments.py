"""What callers pass, checked and laid out flat."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import schedules
from thinwire.channel import Channel
from thinwire.codecs import Codec, OneBitColumn
from thinwire.codecs import get as get_codec
from thinwire.errors import CodecError, InputError, ScheduleError
from thinwire.rounding import Stream
from thinwire.runtimes import job as jobs
from thinwire.runtimes.job import Call, Job
from thinwire.schedules import Schedule, Seat
from thinwire.schedules.choose import choose

SUM, AVG = "sum", "avg"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AnyCodec: TypeAlias = str | Codec | Channel
After: TypeAlias = Callable[[], None] | None


class Place(Protocol):
    """Where a call is made: a rank of a group, which has made so many calls before."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def number(self) -> int: ...
    def inside(self) -> int:
        """How many ranks a node has."""


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
    check(tensors)
    channel = channel_of(codec)
    vectors, channels, after = flats(tensors, channel)
    numel = sum(x.numel() for x in vectors)
    plan = schedule_of(schedule, codec_of(channels[0]), numel, here.world)
    for each in channels:
        schedules.get(plan, codec_of(each))
    inside = inside_of(plan, here.world, here.inside)
    weight, rng = 1.0 / here.world if is_mean(op) else 1.0, stream_of(rng, here)
    seats = [
        Seat(here.rank, here.world, each, slot, weight, rng, inside=inside, shape=tuple(x.shape))
        for each, slot, x in zip(channels, names_of(name, len(tensors)), tensors, strict=True)
    ]
    detail = f"{'mean' if is_mean(op) else 'sum'}{f', nodes of {inside}' if inside > 1 else ''}"
    if plan.whole or any(each is not channel for each in channels):
        detail += f", shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"
    call = call_of("all_reduce", tensors, channel, plan.spec, detail)
    job = jobs.all_reduce(vectors, plan, seats, call)
    job.result, job.after = tensors, after
    return job


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


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def check(tensors: Sequence[Tensor]) -> torch.device:
    """That all are of one dtype, on one device; which is returned."""
    if not tensors:
        raise InputError("expected a tensor, or several; got an empty list")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise InputError(f"expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise InputError(f"expected float32, bfloat16 or float16, got {x.dtype}")
        if x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
            raise InputError(f"expected a dense tensor on cpu or cuda, got {x.layout} on {x.device}")
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        found = sorted({f"{x.dtype} on {x.device}" for x in tensors})
        raise InputError(
            f"tensors of one call must be of one dtype and on one device, not {', '.join(found)}"
        )
    return tensors[0].device


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
    return (
        channel
        if codec == channel.codec
        else Channel(codec, channel.residuals, channel.shapes, channel.clock)
    )


def stream_of(rng: Stream | None, here: Place) -> Stream:
    """This rank's random numbers; by default those of the number of the call."""
    if rng is not None and not isinstance(rng, Stream):
        raise CodecError(f"rng must be a thinwire.Stream, not {type(rng).__name__}")
    return Stream(0, step=here.number, rank=here.rank) if rng is None else replace(rng, rank=here.rank)


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
    return Call(op, codec_of(channel).spec, tuple(x.numel() for x in tensors), dtype, schedule, detail)


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


def flats(tensors: Sequence[Tensor], channel: Channel) -> tuple[list[Tensor], list[Channel], After]:
    """Flat tensors in their own dtype, the channel of each, and what brings results home.

    A matrix whose columns share a scale is turned around, so that a column is in one place.
    """
    found, channels, homes = [], [], []
    for x in tensors:
        codec = codec_of(channel).for_shape(x.shape)
        home = x.detach()
        if isinstance(codec, OneBitColumn) and codec.strided:
            codec, home = replace(codec, strided=False), home.t()
        flat = home.view(-1) if home.is_contiguous() else home.contiguous().view(-1)
        if flat.data_ptr() != home.data_ptr():
            homes.append((home, flat))
        found.append(flat)
        channels.append(shaped(channel, codec))
    return found, channels, _homecoming(homes)


def _homecoming(homes: list[tuple[Tensor, Tensor]]) -> After:
    if not homes:
        return None

    def after() -> None:
        for home, flat in homes:
            home.copy_(flat.view(home.shape))

    return after


def parts(
    tensors: Tensor | Sequence[Tensor], world: int, what: str, sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """One tensor for each rank: a list as it is, a tensor cut along its first dimension."""
    if not isinstance(tensors, Tensor):
        if len(tensors) != world:
            raise InputError(f"{what} must have one tensor for each of {world} ranks, not {len(tensors)}")
        return list(tensors)
    if sizes is not None:
        if len(sizes) != world or sum(sizes) != tensors.shape[0]:
            raise InputError(
                f"{what}_split_sizes must be {world} numbers that add up to {tensors.shape[0]}, "
                f"not {list(sizes)}"
            )
        return list(tensors.split(list(sizes)))
    flat = tensors if tensors.dim() and tensors.shape[0] % world == 0 else tensors.view(-1)
    if flat.numel() % world or flat.shape[0] % world:
        raise InputError(
            f"{what} has {tensors.numel()} elements, which {world} ranks cannot share evenly; "
            "pass a list of tensors"
        )
    return list(flat.chunk(world)) if flat.shape[0] else [flat] * world


def names_of(name: str | Sequence[str], count: int) -> list[str]:
    """A name for every tensor of a bucket; made up from one if need be."""
    if isinstance(name, str):
        return [name, *(f"{name}.{i}" for i in range(1, count))]
    if len(name) != count or len(set(name)) != count:
        raise InputError(f"{count} tensors need as many different names, not {list(name)}")
    return list(name)
