"""From a policy to plans: what happens to the tensors of a bucket, worked out once.

A `Bucket` is what a framework hands over at a time: a flat buffer in which several gradients lie. Its `Plan`
says which tensors travel together, with which codecs, in which calls. A plan holds until the bucket has other
tensors, or until the policy, its phase or the level of a ladder changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import schedules
from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.integrations.ladder import Climber
from thinwire.policy import Policy, Rule, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes import arguments
from thinwire.runtimes import job as jobs
from thinwire.runtimes.arguments import codec_of, inside_of, laid_out, named
from thinwire.runtimes.job import Call, Job, Ranks
from thinwire.runtimes.lines import Line, line
from thinwire.runtimes.trace import count, trace
from thinwire.runtimes.work import Work
from thinwire.schedules import Item, Schedule
from thinwire.schedules.choose import choose
from thinwire.schedules.traits import is_cast


class Route(NamedTuple):
    """How a tensor travels."""

    codec: str
    schedule: str


class Sent(NamedTuple):
    """A tensor, the rule that took it, and its route."""

    tensor: Tensorlike
    rule: Rule
    route: Route


@dataclass(frozen=True)
class Place:
    """Where a gradient lies in its bucket's buffer."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def is_contiguous(self) -> bool:
        wanted = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != wanted:
                return False
            wanted *= size
        return True

    def of(self, buffer: Tensor) -> Tensor:
        """The gradient itself."""
        return buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)


def place(gradient: Tensor, buffer: Tensor) -> Place:
    """Where a gradient lies in a buffer."""
    offset = int(gradient.storage_offset() - buffer.storage_offset())
    return Place(offset, tuple(gradient.shape), tuple(gradient.stride()))


@dataclass
class Part:
    """Tensors of a bucket that travel in one call.

    Most are read and written where they lie. Those that are not contiguous there, or of a dtype that a codec
    does not read, are copied into a second vector before and back after.
    """

    plan: jobs.Plan
    copied: tuple[tuple[Place, bool], ...]  #: and whether a matrix is turned around
    dtype: torch.dtype  #: of the second vector

    def start(self, line: Line, buffer: Tensor, rng: Stream | None) -> Work:
        """Begin one step."""
        if not self.copied:
            work = line.replay(self.plan, (buffer,), buffer, rng)
            if work is not None:
                return work
        return line.submit(self.job(buffer, rng))

    def job(self, buffer: Tensor, rng: Stream | None) -> Job:
        """The job of one step."""
        flat = buffer.detach().view(-1)
        if not self.copied:
            job = self.plan.job([flat], rng)
            job.result = buffer
            return job
        homes = [where.of(buffer).t() if turned else where.of(buffer) for where, turned in self.copied]
        second = torch.empty(sum(home.numel() for home in homes), dtype=self.dtype, device=buffer.device)
        rows = second.split([home.numel() for home in homes])
        copies = [row.view(home.shape) for row, home in zip(rows, homes, strict=True)]
        torch._foreach_copy_(copies, homes)
        job = self.plan.job([flat, second], rng)
        job.result, job.after = buffer, lambda: torch._foreach_copy_(homes, copies)
        return job


@dataclass
class Plan:
    """What becomes of a bucket."""

    sent: tuple[Sent, ...]
    places: tuple[Place, ...]
    parts: tuple[Part, ...]
    line: Line
    sent_nbytes: int  #: by this rank in one step
    fp32_nbytes: int  #: that plain DDP would send
    plain: bool = False  #: whether the network adds the buffer as it is, as DDP does by itself
    random: bool = False  #: whether a codec rounds at random
    due: int = 0  #: the step at which errors are measured again
    fresh: list[Tensor] = field(default_factory=list)  #: with double buffering: copies of the buffer
    _given: "tuple[int, torch.futures.Future[Tensor]] | None" = None

    def given(self, buffer: Tensor) -> "torch.futures.Future[Tensor]":
        """A future of the buffer that is done and knows no streams; the same one in every step."""
        if self._given is None or self._given[0] != buffer.data_ptr():
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            self._given = buffer.data_ptr(), done
        return self._given[1]

    def gradients(self, buffer: Tensor) -> list[tuple[Sent, Tensor]]:
        """Every tensor of the bucket."""
        return [(sent, where.of(buffer)) for sent, where in zip(self.sent, self.places, strict=True)]


@dataclass
class Router:
    """Which plan a bucket has now."""

    policy: Policy
    group: dist.ProcessGroup | None
    channel: Callable[[str], Channel]  #: of a codec
    climber: Climber | None = None
    _plans: dict[object, Plan] = field(default_factory=dict)

    def follow(self, policy: Policy) -> None:
        """Use another policy from the next bucket on."""
        self.policy = policy
        self.climber = Climber(policy.ladder) if policy.ladder else None
        self.forget()

    def forget(self) -> None:
        """Work all plans out anew."""
        self._plans.clear()

    def find(self, key: object, step: int, epoch: int) -> Plan | None:
        """A bucket's plan, if it was worked out before."""
        return self._plans.get((key, self.policy.phase(step, epoch), self.level))

    def keep(self, key: object, plan: Plan, step: int, epoch: int) -> None:
        """Remember a bucket's plan, and forget others of the same tensors."""
        now = key, self.policy.phase(step, epoch), self.level
        names = {sent.tensor.name for sent in plan.sent}
        for other, held in list(self._plans.items()):
            if names & {sent.tensor.name for sent in held.sent}:
                del self._plans[other]
        self._plans[now] = plan

    @property
    def level(self) -> int:
        return self.climber.level if self.climber else 0

    def route(self, tensor: Tensorlike, step: int, epoch: int, world: int) -> Sent:
        """What the policy says of a tensor."""
        rule = self.policy.route(tensor, step, epoch, self.level)
        return Sent(tensor, rule, Route(rule.codec, schedule_of(rule, tensor.numel, world)))

    def plan(self, sent: Sequence[Sent], places: Sequence[Place], buffer: Tensor) -> Plan:
        """Work out what becomes of a bucket."""
        return make(sent, places, buffer, line(self.group, buffer.device), self.channel)


def schedule_of(rule: Rule, numel: int, world: int) -> str:
    """As the rule says, or as suits the tensor."""
    codec = get_codec(rule.codec)
    return choose(codec, numel, world)[0] if rule.schedule == "auto" else rule.schedule


def make(
    sent: Sequence[Sent],
    places: Sequence[Place],
    buffer: Tensor,
    here: Line,
    channel: Callable[[str], Channel],
) -> Plan:
    """The plan of a bucket: tensors of one schedule travel together, whatever their codecs."""
    plain = all(each.route == ("fp32", "native") for each in sent)
    numel = sum(where.numel for where in places)
    fp32 = trace(numel, "fp32", here.world, "native").sent_nbytes
    if plain:
        own = fp32 * buffer.element_size() // 4
        return Plan(tuple(sent), tuple(places), (), here, own, fp32, plain=True)
    groups: dict[object, list[int]] = {}
    plans = [_schedule(each, here.world) for each in sent]
    for i, schedule in enumerate(plans):
        key: object = schedule.steps if schedule.batched else (schedule.spec, sent[i].route.codec)
        groups.setdefault(key, []).append(i)
    parts, nbytes = [], 0
    for group in groups.values():
        schedule = max((plans[i] for i in group), key=lambda each: len(each.spec))
        part = _part([(sent[i], places[i]) for i in group], schedule, buffer, here, channel)
        parts.append(part)
        nbytes += _sent_nbytes(part.plan, here)
    random = any(part.plan.call.random for part in parts)
    return Plan(tuple(sent), tuple(places), tuple(parts), here, nbytes, fp32, random=random)


def _schedule(sent: Sent, world: int) -> Schedule:
    """The schedule of a tensor. Float32 is sent without loss: between two ranks one exchange does for it."""
    codec, name = get_codec(sent.route.codec), sent.route.schedule
    if codec.spec == "fp32" and name == "two_shot" and world == 2:
        name = "one_shot"
    return schedules.get(name, laid_out(codec, sent.tensor.shape)[0])


def _part(
    tensors: Sequence[tuple[Sent, Place]],
    schedule: Schedule,
    buffer: Tensor,
    here: Line,
    channel: Callable[[str], Channel],
) -> Part:
    items: list[Item] = []
    copied: list[tuple[Place, bool]] = []
    second, direct = 0, True
    for i, (sent, where) in enumerate(tensors):
        own, turned = arguments.for_shape(channel(sent.route.codec), where.size)
        reads = buffer.dtype == torch.float32 or (
            schedule.batched and codec_of(own).reads(buffer.dtype, buffer.device)
        )
        start, vector = where.offset, 0
        if turned or not reads or not where.is_contiguous:
            start, vector, direct = second, 1, direct and reads
            copied.append((where, turned))
            second += where.numel
        items.append(Item(where.numel, own, sent.tensor.name, vector, start, i, shape=where.size))
    if schedule.spec == "native":
        items = _joined(items)
    inside = inside_of(schedule, here.world, here.inside)
    call = _call([sent for sent, _ in tensors], schedule, buffer, inside)
    ranks = Ranks(here.rank, here.world, inside)
    plan = jobs.Plan(items, schedule, ranks, call, weight=1.0 / here.world, together=here.together)
    return Part(plan, tuple(copied), buffer.dtype if direct else torch.float32)


def _joined(items: Sequence[Item]) -> list[Item]:
    """Neighbours that the network adds element by element are one tensor to it."""
    found: list[Item] = []
    for item in items:
        last = found[-1] if found else None
        simple = is_cast(item.codec) and not item.codec.feedback
        if last and simple and last.vector == item.vector and last.start + last.numel == item.start:
            found[-1] = replace(last, numel=last.numel + item.numel, shape=())
        else:
            found.append(item)
    return found


def _call(sent: Sequence[Sent], schedule: Schedule, buffer: Tensor, inside: int) -> Call:
    """What all ranks must call alike: every tensor's shape and codec among it."""
    codecs = list(dict.fromkeys(each.route.codec for each in sent))
    which = "".join(f"{codecs.index(each.route.codec)}" for each in sent) if len(codecs) > 1 else ""
    detail = f"mean{f', nodes of {inside}' if inside > 1 else ''}"
    detail += f", codecs by tensor {which}" if which else ""
    if schedule.whole or not schedule.batched:
        detail += f", shapes {', '.join(str(each.tensor.shape) for each in sent)}"
    dtype = str(buffer.dtype).removeprefix("torch.")
    detail += named([each.tensor.name for each in sent])
    numels = tuple(each.tensor.numel for each in sent)
    random = any(get_codec(each).needs_rng for each in codecs)
    said = ", ".join(identity(get_codec(each)) for each in codecs)
    return Call("all_reduce", said, numels, dtype, schedule.spec, detail, random)


def _sent_nbytes(plan: jobs.Plan, here: Line) -> int:
    """What this rank sends in one call."""
    if here.world == 1:
        return 0
    blank = copy_without_residuals(plan)
    return count(blank, here.rank, here.world).sent_nbytes


def copy_without_residuals(plan: jobs.Plan) -> jobs.Plan:
    """The same call with channels that owe nothing."""
    fresh = {id(item.channel): Channel(item.codec) for item in plan.items}
    items = [replace(item, channel=fresh[id(item.channel)]) for item in plan.items]
    return plan.like(items)
