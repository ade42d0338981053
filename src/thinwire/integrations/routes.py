"""Plans: how the tensors of a bucket are sent, computed once from a policy.

A bucket is a flat buffer with several gradients, which a framework hands over at once. Its `BucketPlan` says
which tensors are sent together, with which codecs, in which calls. A plan is valid until the bucket has other
tensors, or until the policy, its phase or the level of a ladder changes. Buckets with small wires share a
call (see `loads`), which `Router.calls` computes from their plans.
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
from thinwire.integrations.futures import done
from thinwire.integrations.ladder import LadderState
from thinwire.policy import Policy, Rule, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import arguments
from thinwire.runtimes import plan as plans
from thinwire.runtimes.arguments import named, ranks_per_node_of
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.plan import Ranks
from thinwire.runtimes.runtime import Runtime, runtime_of
from thinwire.runtimes.trace import count, trace
from thinwire.runtimes.work import Work
from thinwire.schedules import Item, Schedule
from thinwire.schedules.choose import choose
from thinwire.schedules.traits import is_cast, laid_out


class Route(NamedTuple):
    """How a tensor is sent."""

    codec: str
    schedule: str


class RoutedTensor(NamedTuple):
    """A tensor, the rule that matched it, and its route."""

    tensor: TensorInfo
    rule: Rule
    route: Route


@dataclass(frozen=True)
class GradientPlace:
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
        """Return the gradient as a view of the buffer."""
        return buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)


def place(gradient: Tensor, buffer: Tensor) -> GradientPlace:
    """Return where a gradient lies in a buffer."""
    offset = int(gradient.storage_offset() - buffer.storage_offset())
    return GradientPlace(offset, tuple(gradient.shape), tuple(gradient.stride()))


@dataclass(frozen=True)
class Copied:
    """A gradient that is copied before it is encoded."""

    bucket: int  #: which buffer of the call it lies in
    place: GradientPlace
    turned: bool  #: whether a matrix is sent column by column

    def of(self, buffers: Sequence[Tensor]) -> Tensor:
        gradient = self.place.of(buffers[self.bucket])
        return gradient.t() if self.turned else gradient


@dataclass
class CallPart:
    """Tensors of one or several buckets that are sent in one call.

    Most are read and written in place. Those that are not contiguous, or whose dtype the codec does not read,
    are copied into an extra vector before the call and back after it.
    """

    plan: plans.ReducePlan
    copied: tuple[Copied, ...]
    dtype: torch.dtype  #: of the vector of copies

    def start(self, runtime: Runtime, buffers: Sequence[Tensor], rng: Stream | None) -> Work:
        """Start the call for one step."""
        if not self.copied:
            work = runtime.replay(self.plan, buffers, buffers[-1], rng)
            if work is not None:
                return work
        return runtime.submit(self.job(buffers, rng))

    def job(self, buffers: Sequence[Tensor], rng: Stream | None) -> Job:
        """Return the job of one step."""
        vectors = [buffer.detach().view(-1) for buffer in buffers]
        if not self.copied:
            job = self.plan.job(vectors, rng)
            job.result = buffers[-1]
            return job
        homes = [copied.of(buffers) for copied in self.copied]
        more = torch.empty(sum(home.numel() for home in homes), dtype=self.dtype, device=buffers[0].device)
        rows = more.split([home.numel() for home in homes])
        copies = [row.view(home.shape) for row, home in zip(rows, homes, strict=True)]
        torch._foreach_copy_(copies, homes)
        job = self.plan.job([*vectors, more], rng)
        job.result, job.after = buffers[-1], lambda: torch._foreach_copy_(homes, copies)
        return job


@dataclass(frozen=True, eq=False)
class BucketCalls:
    """The calls for one bucket, or for several together."""

    parts: tuple[CallPart, ...]
    runtime: Runtime

    @property
    def random(self) -> bool:
        """Whether a codec rounds at random."""
        return any(part.plan.call.random for part in self.parts)


@dataclass
class BucketPlan:
    """How a bucket is sent."""

    sent: tuple[RoutedTensor, ...]
    places: tuple[GradientPlace, ...]
    calls: BucketCalls
    sent_nbytes: int  #: by this rank in one step
    fp32_nbytes: int  #: that plain DDP would send
    wire_nbytes: int = 0  #: that a rank encodes, the same on all ranks
    plain: bool = False  #: whether the buffer is all-reduced as it is, as in plain DDP
    due: int = 0  #: the step at which errors are measured again
    fresh: list[Tensor] = field(default_factory=list)  #: with double buffering: copies of the buffer
    _given: "tuple[int, torch.futures.Future[Tensor]] | None" = None

    def given(self, buffer: Tensor) -> "torch.futures.Future[Tensor]":
        """Return a completed future of the buffer, without streams; the same one in every step."""
        if self._given is None or self._given[0] != buffer.data_ptr():
            self._given = buffer.data_ptr(), done(buffer)
        return self._given[1]

    def gradients(self, buffer: Tensor) -> list[tuple[RoutedTensor, Tensor]]:
        """Return every tensor of the bucket with its gradient."""
        return [(sent, where.of(buffer)) for sent, where in zip(self.sent, self.places, strict=True)]


@dataclass
class Router:
    """Computes and keeps the plans of buckets."""

    policy: Policy
    group: dist.ProcessGroup | None
    channel: Callable[[str], Channel]  #: returns the channel of a codec
    ladder_state: LadderState | None = None
    _plans: dict[object, BucketPlan] = field(default_factory=dict)
    _shared: dict[tuple[int, ...], tuple[tuple[BucketPlan, ...], BucketCalls]] = field(default_factory=dict)

    def follow(self, policy: Policy) -> None:
        """Use another policy from the next bucket on."""
        self.policy = policy
        self.ladder_state = LadderState(ladder=policy.ladder) if policy.ladder else None
        self.forget()

    def forget(self) -> None:
        """Drop all plans, so that they are computed again."""
        self._plans.clear()
        self._shared.clear()

    def find(self, key: object, step: int, epoch: int) -> BucketPlan | None:
        """Return the plan kept for a bucket, or None."""
        return self._plans.get((key, self.policy.phase(step, epoch), self.level))

    def keep(self, key: object, plan: BucketPlan, step: int, epoch: int) -> None:
        """Keep a bucket's plan, and drop other plans of the same tensors."""
        now = key, self.policy.phase(step, epoch), self.level
        names = {sent.tensor.name for sent in plan.sent}
        for other, other_plan in list(self._plans.items()):
            if names & {sent.tensor.name for sent in other_plan.sent}:
                del self._plans[other]
        self._plans[now] = plan
        known = {id(each) for each in self._plans.values()}
        self._shared = {key: each for key, each in self._shared.items() if known.issuperset(key)}

    def calls(self, plans: Sequence[BucketPlan], buffers: Sequence[Tensor]) -> BucketCalls:
        """Return the calls for buckets that are sent together; computed once."""
        if len(plans) == 1:
            return plans[0].calls
        key = tuple(map(id, plans))
        entry = self._shared.get(key)
        if entry is None:
            entry = self._shared[key] = tuple(plans), shared_calls(plans, buffers, self.channel)
        return entry[1]

    @property
    def level(self) -> int:
        return self.ladder_state.level if self.ladder_state else 0

    def route(self, tensor: TensorInfo, step: int, epoch: int, world: int) -> RoutedTensor:
        """Return a tensor with its rule and its route."""
        rule = self.policy.route(tensor, step, epoch, self.level)
        return RoutedTensor(tensor, rule, Route(rule.codec, schedule_of(rule, tensor.numel, world)))

    def plan(
        self, sent: Sequence[RoutedTensor], places: Sequence[GradientPlace], buffer: Tensor
    ) -> BucketPlan:
        """Compute the plan of a bucket."""
        return make(sent, places, buffer, runtime_of(self.group, buffer.device), self.channel)


def schedule_of(rule: Rule, numel: int, world: int) -> str:
    """Return the rule's schedule; for `auto`, the one that suits the tensor."""
    codec = get_codec(rule.codec)
    return choose(codec, numel, world)[0] if rule.schedule == "auto" else rule.schedule


def make(
    sent: Sequence[RoutedTensor],
    places: Sequence[GradientPlace],
    buffer: Tensor,
    runtime: Runtime,
    channel: Callable[[str], Channel],
) -> BucketPlan:
    """Compute the plan of a bucket on a runtime."""
    plain = all(each.route == ("fp32", "native") for each in sent)
    numel = sum(where.numel for where in places)
    fp32 = trace(numel, "fp32", runtime.world, "native").sent_nbytes
    if plain:
        own, whole = fp32 * buffer.element_size() // 4, numel * buffer.element_size()
        return BucketPlan(tuple(sent), tuple(places), BucketCalls((), runtime), own, fp32, whole, plain=True)
    parts = _parts(
        [_PlacedTensor(each, 0, where) for each, where in zip(sent, places, strict=True)],
        [buffer],
        runtime,
        channel,
    )
    nbytes = sum(_sent_nbytes(part.plan, runtime) for part in parts)
    return BucketPlan(
        tuple(sent), tuple(places), BucketCalls(parts, runtime), nbytes, fp32, sum(map(_wire_nbytes, parts))
    )


def shared_calls(
    plans: Sequence[BucketPlan], buffers: Sequence[Tensor], channel: Callable[[str], Channel]
) -> BucketCalls:
    """Return the calls for several buckets together; every tensor keeps its rule and its route."""
    tensors = [
        _PlacedTensor(sent, bucket, where)
        for bucket, plan in enumerate(plans)
        for sent, where in zip(plan.sent, plan.places, strict=True)
    ]
    runtime = plans[0].calls.runtime
    return BucketCalls(_parts(tensors, buffers, runtime, channel), runtime)


class _PlacedTensor(NamedTuple):
    """A tensor, its bucket, and its gradient's place in the bucket's buffer."""

    sent: RoutedTensor
    bucket: int
    place: GradientPlace


def _parts(
    tensors: Sequence[_PlacedTensor],
    buffers: Sequence[Tensor],
    runtime: Runtime,
    channel: Callable[[str], Channel],
) -> tuple[CallPart, ...]:
    """Group tensors into calls: by schedule, and by codec too if the schedule is not batched."""
    groups: dict[tuple[str, str], tuple[Schedule, list[_PlacedTensor]]] = {}
    for placed in tensors:
        schedule = _schedule(placed.sent, runtime.world)
        key = schedule.spec, "" if schedule.batched else placed.sent.route.codec
        groups.setdefault(key, (schedule, []))[1].append(placed)
    return tuple(_part(group, schedule, buffers, runtime, channel) for schedule, group in groups.values())


def _schedule(sent: RoutedTensor, world: int) -> Schedule:
    """Return a tensor's schedule. Between two ranks lossless float32 uses `one_shot`, not `two_shot`."""
    codec, name = get_codec(sent.route.codec), sent.route.schedule
    if codec.spec == "fp32" and name == "two_shot" and world == 2:
        name = "one_shot"
    return schedules.get(name, laid_out(codec, sent.tensor.shape)[0])


def _part(
    tensors: Sequence[_PlacedTensor],
    schedule: Schedule,
    buffers: Sequence[Tensor],
    runtime: Runtime,
    channel: Callable[[str], Channel],
) -> CallPart:
    items: list[Item] = []
    copied: list[Copied] = []
    end, direct, dtype = 0, True, buffers[0].dtype
    for i, (sent, bucket, where) in enumerate(tensors):
        own, turned = arguments.for_shape(channel(sent.route.codec), where.size)
        reads = dtype == torch.float32 or (schedule.batched and own.codec.reads(dtype, buffers[0].device))
        start, vector = where.offset, bucket
        if turned or not reads or not where.is_contiguous:
            start, vector, direct = end, len(buffers), direct and reads
            copied.append(Copied(bucket, where, turned))
            end += where.numel
        items.append(Item(where.numel, own, sent.tensor.name, vector, start, i, shape=where.size))
    if schedule.spec == "native":
        items = _joined(items)
    ranks_per_node = ranks_per_node_of(schedule, runtime.world, runtime.ranks_per_node)
    call = _call([each.sent for each in tensors], schedule, buffers[0].dtype, ranks_per_node)
    ranks = Ranks(runtime.rank, runtime.world, ranks_per_node)
    weight = 1.0 / runtime.world
    plan = plans.ReducePlan(items, schedule, ranks, call, weight=weight, together=runtime.together)
    return CallPart(plan, tuple(copied), dtype if direct else torch.float32)


def _joined(items: Sequence[Item]) -> list[Item]:
    """Merge adjacent tensors that the all-reduce adds element by element."""
    merged: list[Item] = []
    for item in items:
        last = merged[-1] if merged else None
        simple = is_cast(item.codec) and not item.codec.feedback
        if last and simple and last.vector == item.vector and last.start + last.numel == item.start:
            merged[-1] = replace(last, numel=last.numel + item.numel, shape=())
        else:
            merged.append(item)
    return merged


def _call(sent: Sequence[RoutedTensor], schedule: Schedule, of: torch.dtype, ranks_per_node: int) -> Call:
    """Describe the call, which must be the same on all ranks: also every tensor's shape and codec."""
    codecs = list(dict.fromkeys(each.route.codec for each in sent))
    which = "".join(f"{codecs.index(each.route.codec)}" for each in sent) if len(codecs) > 1 else ""
    detail = f"mean{f', nodes of {ranks_per_node}' if ranks_per_node > 1 else ''}"
    detail += f", codecs by tensor {which}" if which else ""
    if schedule.whole or not schedule.batched:
        detail += f", shapes {', '.join(str(each.tensor.shape) for each in sent)}"
    dtype = str(of).removeprefix("torch.")
    detail += named([each.tensor.name for each in sent])
    numels = tuple(each.tensor.numel for each in sent)
    random = any(get_codec(each).needs_rng for each in codecs)
    identities = ", ".join(identity(get_codec(each)) for each in codecs)
    return Call("all_reduce", identities, numels, dtype, schedule.spec, detail, random)


def _wire_nbytes(part: CallPart) -> int:
    """Bytes that a rank encodes in one call, the same on all ranks."""
    nbytes = part.plan.schedule.wire_nbytes
    return sum(nbytes(item.codec, item.numel, shape=item.shape or (item.numel,)) for item in part.plan.items)


def _sent_nbytes(plan: plans.ReducePlan, runtime: Runtime) -> int:
    """Bytes that this rank sends in one call."""
    if runtime.world == 1:
        return 0
    blank = copy_without_residuals(plan)
    return count(blank, runtime.rank, runtime.world).sent_nbytes


def copy_without_residuals(plan: plans.ReducePlan) -> plans.ReducePlan:
    """Copy a plan, with channels that have no residuals."""
    fresh = {id(item.channel): Channel(item.codec) for item in plan.items}
    items = [replace(item, channel=fresh[id(item.channel)]) for item in plan.items]
    return plan.like(items)
