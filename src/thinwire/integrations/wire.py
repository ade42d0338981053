"""What is attached to a model: it takes gradients as DDP hands them over and gives back their mean.

Every gradient is sent as its policy says, those with the same codec and schedule together. Nothing depends on
how DDP makes its buckets: residuals are kept by parameter name, and each tensor's schedule follows from the
tensor alone.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import collectives, schedules
from thinwire.channel import Channel
from thinwire.clock import WIRE
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.integrations import state as states
from thinwire.integrations.auto import Bucket, Pilot
from thinwire.integrations.futures import Future, followed, gathered, ready
from thinwire.integrations.ladder import Climber
from thinwire.integrations.meter import Board, Meter, Step, relative_error, round_trip_error
from thinwire.integrations.stats import LOW_RANK, describe
from thinwire.integrations.summary import print_summary
from thinwire.policy import NOOP, Policy, Rule, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes.lines import line
from thinwire.runtimes.trace import trace
from thinwire.schedules.choose import choose
from thinwire.schedules.traits import is_cast

log = logging.getLogger(__name__)
Route = tuple[str, str]  # codec and schedule
Shapes = tuple[tuple[int, ...], ...]
SAMPLE_EVERY = 100  #: steps between measurements of what codecs lose
BOARD_EVERY = 10  #: steps between lines for TensorBoard


class Sent(NamedTuple):
    """A gradient, what it is of, and what becomes of it."""

    tensor: Tensorlike
    gradient: Tensor
    rule: Rule
    schedule: str


@dataclass
class Wire:
    """The handle that `attach` returns: counts, residuals, and the work of the hook."""

    policy: Policy
    group: dist.ProcessGroup | None = None
    seed: int = 0
    double_buffer: bool = False
    shadow: int = 0
    board: Board | None = None
    pilot: Pilot | None = None  #: that chooses the policy, with "auto"
    step: int = 0  #: of the optimizer, counted by the first bucket of each backward pass that communicates
    epoch: int = 0
    detached: bool = False
    device: torch.device = torch.device("cpu")  #: of the gradients
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    meter: Meter = field(default_factory=Meter)
    tensors: dict[int, tuple[nn.Parameter, Tensorlike]] = field(default_factory=dict)  #: by identity
    debts: dict[str, Tensor] = field(default_factory=dict)  #: to be added to the next gradient, by name
    routes: dict[str, Route] = field(default_factory=dict)  #: that tensors took last, by name
    climber: Climber | None = None
    _costs: dict[tuple[Route, Shapes], tuple[int, int]] = field(default_factory=dict)
    _sampled: dict[str, str] = field(default_factory=dict)  #: the codec that an error was measured of
    _stale: dict[str, "tuple[Future[Tensor], Tensor]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shadow < 0:
            raise InputError(f"shadow counts steps: 0 for never, or 10 for every tenth; not {self.shadow}")
        self.follow(self.policy)

    def follow(self, policy: Policy) -> None:
        """Use another policy from the next bucket on; what tensors owe goes with them."""
        self.policy = policy
        self.climber = Climber(policy.ladder) if policy.ladder else None

    @cached_property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def trained(self) -> list[Tensorlike]:
        """The parameters known that have gradients."""
        return [tensor for parameter, tensor in list(self.tensors.values()) if parameter.requires_grad]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters known, by name."""
        return {tensor.name: tensor.shape for _, tensor in self.tensors.values()}

    # The work of the hook

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start sending a bucket, and give a future of its mean."""
        buffer: Tensor = bucket.buffer()
        self.device = buffer.device
        if bucket.index() == 0:
            self._begin_step()
        self.meter.arrive()
        if buffer.layout != torch.strided:
            raise InputError(
                "a gradient is sparse; thinwire sends dense ones: use nn.Embedding(sparse=False)"
            )
        found = [
            self._found(parameter, gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if self.pilot is not None:
            self.pilot.see(self, [(each.tensor, each.gradient) for each in found], buffer)
        if self.policy.name == NOOP:
            return ready(buffer)
        self._repay(found)
        self._sample(found)
        return self._exchanged(found, buffer) if self.double_buffer else self._reduced(found, buffer)

    def _begin_step(self) -> None:
        climber = self.climber
        if climber is not None and self.step and climber.wants(self.step):
            self.stale()  # all that was sent must have been looked at, on all ranks
            if climber.end_look(self.agree):
                level = climber.ladder.levels[climber.level]
                log.info("thinwire: step %d: the ladder goes to %s", self.step, level)
        if self.board is not None and self.step and self.step % BOARD_EVERY == 0:
            self.board.write(self.stats(), self.step)
        self.meter.begin_step()
        self.step += 1
        if self.pilot is not None:
            self.pilot.begin_step(self)

    def agree(self, numbers: Tensor) -> Tensor:
        """The mean of everyone's numbers, the same bits on all ranks; sent from where gradients are."""
        if self.world == 1:
            return numbers
        found = numbers.to(self.device, copy=True)
        collectives.all_reduce(found, "fp32", "avg", self.group, "two_shot")
        return found.to(numbers.device)

    def _found(self, parameter: nn.Parameter, gradient: Tensor) -> Sent:
        if id(parameter) not in self.tensors:
            role = "weight" if parameter.dim() > 1 else "bias"
            known = Tensorlike(f"tensor{len(self.tensors)}", role, tuple(parameter.shape))
            self.tensors[id(parameter)] = parameter, known
        tensor = self.tensors[id(parameter)][1]
        level = self.climber.level if self.climber else 0
        rule = self.policy.route(tensor, self.step - 1, self.epoch, level)
        return Sent(tensor, gradient, rule, self.schedule(rule, tensor.numel))

    def schedule(self, rule: Rule, numel: int) -> str:
        """As the rule says, or as suits the tensor."""
        return (
            choose(get_codec(rule.codec), numel, self.world)[0] if rule.schedule == "auto" else rule.schedule
        )

    def _repay(self, found: Sequence[Sent]) -> None:
        """Where a tensor takes another route than before, what it owes there is added to its gradient."""
        for each in found:
            name, route = each.tensor.name, (each.rule.codec, each.schedule)
            before = self.routes.get(name)
            if before is not None and before != route and before[0] in self.channels:
                channel = self.channels[before[0]]
                owed = states.debt(channel, name, each.tensor.shape, self.rank, self.world)
                for slot in [slot for slot in channel.residuals if slot.startswith((f"{name}/", f"{name}["))]:
                    channel.forget(slot)
                if owed is not None:
                    each.gradient.add_(owed.view_as(each.gradient))
            self.routes[name] = route
            if name in self.debts:
                each.gradient.add_(self.debts.pop(name).to(each.gradient.device).view_as(each.gradient))

    def _reduced(self, found: Sequence[Sent], buffer: Tensor) -> "Future[Tensor]":
        """Everything sent, and what is to be done when it is back."""
        step, truth = self.meter.step, None
        assert step is not None
        if self._is_plain(found):
            futures = [self._send_plain(found, buffer)]
        else:
            if self.shadow and self.step % self.shadow == 0:
                truth = buffer.float().clone()
            futures = [self._send(route, each, buffer) for route, each in _by_route(found).items()]
        if truth is not None:
            work = collectives.all_reduce(truth, "fp32", "avg", self.group, async_op=True)
            assert work is not None
            futures.append(work.get_future())
        climber = self.climber if self.climber and self.climber.wants(self.step) else None

        def finish() -> Tensor:
            if not self.double_buffer:
                self.meter.done(step)
            if truth is not None:
                self._compare(found, buffer, truth)
            if climber is not None:
                _look(climber, found)
            return buffer

        return gathered(futures, finish, buffer.device)

    def _is_plain(self, found: Sequence[Sent]) -> bool:
        return all(each.rule.codec == "fp32" and each.schedule == "native" for each in found)

    def _send_plain(self, found: Sequence[Sent], buffer: Tensor) -> "Future[Any]":
        """What DDP itself does, bit for bit."""
        began, step = time.perf_counter(), self.meter.step
        shapes = tuple(tuple(each.gradient.shape) for each in found)
        self._count(("fp32", "native"), shapes, buffer, plain=True)
        buffer.div_(self.world)
        future = dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        return followed(future, lambda: self._clock_plain(began, step), buffer)

    def _clock_plain(self, began: float, step: Step | None) -> None:
        assert step is not None
        self.meter.clock.stop(WIRE, max(began, step.done_at))

    def _send(self, route: Route, found: Sequence[Sent], buffer: Tensor) -> "Future[Any]":
        codec, schedule = route
        channel = self.channels.setdefault(codec, Channel(codec, clock=self.meter.clock))
        gradients, names = [each.gradient for each in found], [each.tensor.name for each in found]
        sent = gradients
        if len(found) > 1 and _is_elementwise(codec, schedule):  # no need to know where tensors end
            whole = sum(map(Tensor.numel, gradients)) == buffer.numel()
            sent = [buffer if whole else torch.cat([each.reshape(-1) for each in gradients])]
        rng = Stream(self.seed, step=self.step)
        work = collectives.all_reduce(
            sent, channel, "avg", self.group, schedule, async_op=True, name=names[: len(sent)], rng=rng
        )
        assert work is not None
        self._count(route, tuple(tuple(x.shape) for x in sent), buffer)
        if sent is gradients or sent[0] is buffer:
            return work.get_future()
        return followed(work.get_future(), lambda: _put_back(sent[0], gradients), buffer)

    def probe(self, policy: Policy, buckets: Sequence[Bucket]) -> int:
        """Send copies of buckets as a policy says, and wait; the bytes sent. Nothing is remembered."""
        other = Wire(policy, self.group, self.seed, tensors=self.tensors)
        other.step = self.step
        other.meter.begin_step()
        futures = []
        for parts, buffer in buckets:
            rules = [(tensor, gradient, policy.route(tensor)) for tensor, gradient in parts]
            found = [Sent(t, g, rule, self.schedule(rule, t.numel)) for t, g, rule in rules]
            futures.append(other._reduced(found, buffer))
        for future in futures:
            future.wait()
        return other.meter.sent_nbytes

    def _count(self, route: Route, shapes: Shapes, buffer: Tensor, *, plain: bool = False) -> None:
        """Bytes of a call; in a plain one the network adds the buffer as it is, of whatever dtype."""
        if (route, shapes) not in self._costs:
            numels = [math.prod(shape) for shape in shapes]
            inside = schedules.get(route[1]).inside or line(self.group, buffer.device).inside()
            ours = trace(numels, route[0], self.world, route[1], rank=self.rank, inside=inside, shapes=shapes)
            fp32 = trace(sum(numels), "fp32", self.world, "native")
            self._costs[route, shapes] = ours.sent_nbytes, fp32.sent_nbytes
        sent, theirs = self._costs[route, shapes]
        self.meter.sent_nbytes += sent * buffer.element_size() // 4 if plain else sent
        self.meter.fp32_nbytes += theirs

    def _exchanged(self, found: Sequence[Sent], buffer: Tensor) -> "Future[Tensor]":
        """Double buffering: the mean of the last step's gradients, while this step's are on their way."""
        fresh, first = buffer.clone(), buffer.storage_offset()
        own = [
            each._replace(gradient=fresh.as_strided(g.size(), g.stride(), g.storage_offset() - first))
            for each in found
            for g in (each.gradient,)
        ]
        future = self._reduced(own, fresh)
        began = time.perf_counter()
        for each, sent in zip(found, own, strict=True):
            before = self._stale.pop(each.tensor.name, None)
            if before is None:
                each.gradient.zero_()  # the first step has none
            else:
                before[0].wait()
                each.gradient.copy_(before[1])
            self._stale[each.tensor.name] = future, sent.gradient
        self.meter.wait_s += time.perf_counter() - began
        return ready(buffer)

    # What it did

    def _sample(self, found: Sequence[Sent]) -> None:
        for each in found:
            name, spec = each.tensor.name, each.rule.codec
            if spec == "fp32" or each.schedule.startswith(LOW_RANK):  # whose error only a shadow can tell
                self.meter.errors.pop(name, None)
                self._sampled.pop(name, None)
                continue
            if self.step % SAMPLE_EVERY and self._sampled.get(name) == spec:
                continue
            codec, rng = get_codec(spec), Stream(self.seed, step=self.step, tensor=name)
            error = round_trip_error(codec.for_shape(each.tensor.shape), each.gradient, rng)
            if math.isfinite(error):  # else the next step is measured
                self.meter.errors[name], self._sampled[name] = error, spec

    def _compare(self, found: Sequence[Sent], buffer: Tensor, truth: Tensor) -> None:
        for each in found:
            g, first = each.gradient, buffer.storage_offset()
            wanted = truth.as_strided(g.size(), g.stride(), g.storage_offset() - first)
            self.meter.true_errors[each.tensor.name] = relative_error(g, wanted)

    def stats(self) -> dict[str, Any]:
        """What this rank sent and what it took: plain numbers, for a log or a page (see `stats.describe`)."""
        return describe(self)

    def summary(self) -> None:
        """Print `stats` as a table."""
        print_summary(self.stats())

    @property
    def sent_nbytes(self) -> int:
        """By this rank, so far."""
        return self.meter.sent_nbytes

    def detach(self) -> None:
        """From the next backward pass on the model communicates as DDP does by itself."""
        self.detached = True

    def set_epoch(self, epoch: int) -> None:
        """For rules that name epochs."""
        self.epoch = epoch

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings; each rank saves its own."""
        return states.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run of the same policy left off: with as many ranks, bit for bit.

        Where torch's own all-reduce adds up (the `native` schedule), sums differ in their last bit: its
        order of additions follows DDP's buckets, and a model's first buckets are others than its later ones.
        For another number of ranks first make one state of all of theirs, by `thinwire.integrations.reshard`.
        """
        states.load(self, state)

    def stale(self) -> dict[str, Tensor]:
        """With double buffering: gradients that the next step will use, by name."""
        for future, _ in self._stale.values():
            future.wait()
        return {name: gradient for name, (_, gradient) in self._stale.items()}

    def restore(
        self,
        channels: dict[str, Channel],
        debts: dict[str, Tensor],
        stale: dict[str, Tensor],
        routes: dict[str, Route],
    ) -> None:
        """Take over what another run left."""
        for channel in channels.values():
            channel.clock = self.meter.clock
        self.channels, self.debts, self.routes = channels, debts, routes
        self._stale = {name: (ready(held), held) for name, held in stale.items()}


def _look(climber: Climber, found: Sequence[Sent]) -> None:
    for each in found:
        if each.rule.codec in climber.ladder.levels:
            climber.see(each.tensor.name, each.gradient)


def _is_elementwise(codec: str, schedule: str) -> bool:
    """Whether every element is added up by itself, so that tensors may travel as one."""
    found = get_codec(codec)
    return is_cast(found) and not found.feedback and schedule in ("native", "one_shot", "two_shot")


def _put_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    if flat.is_cuda:  # its memory is not reused before this stream has read it
        flat.record_stream(torch.cuda.current_stream(flat.device))
    for part, gradient in zip(flat.split([each.numel() for each in gradients]), gradients, strict=True):
        gradient.copy_(part.view(gradient.shape))


def _by_route(found: Sequence[Sent]) -> dict[Route, list[Sent]]:
    by_route: dict[Route, list[Sent]] = {}
    for each in found:
        by_route.setdefault((each.rule.codec, each.schedule), []).append(each)
    return by_route
