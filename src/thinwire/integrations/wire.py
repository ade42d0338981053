"""What is attached to a model: it takes buckets of gradients and gives back their mean.

Three parts do the work: `routes` turns the policy into plans, `run` runs a plan, and `meter`, `pilot`,
`ladder` and `state` look at what was done. The handle joins them and keeps what outlives a step. Nothing
depends on how DDP makes its buckets: residuals are kept by parameter name, and each tensor's route follows
from the tensor alone.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import collectives
from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.integrations import run
from thinwire.integrations import state as states
from thinwire.integrations.futures import Future, pass_on, pending, raise_when_waited_for, ready
from thinwire.integrations.ladder import Climber
from thinwire.integrations.meter import Board, Meter, Step, relative_error, round_trip_error
from thinwire.integrations.pilot import Bucket, Pilot
from thinwire.integrations.routes import Place, Plan, Route, Router, Sent, place, schedule_of
from thinwire.integrations.stats import describe
from thinwire.integrations.summary import print_summary
from thinwire.policy import NOOP, Policy, Rule, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes.lines import line
from thinwire.runtimes.work import StreamWork
from thinwire.schedules.low_rank import LOW_RANK

log = logging.getLogger(__name__)
SAMPLE_EVERY = 100  #: steps between measurements of what codecs lose
SAMPLES = 8  #: tensors of a bucket that are measured in one step, on a GPU
BOARD_EVERY = 10  #: steps between lines for TensorBoard


@dataclass(repr=False)
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
    joins: bool = False  #: on a GPU, whether nobody uses a result before the last bucket's hook returns
    device: torch.device = torch.device("cpu")  #: of the gradients
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    meter: Meter = field(default_factory=Meter)
    tensors: dict[int, tuple[nn.Parameter, Tensorlike]] = field(default_factory=dict)  #: by identity
    debts: dict[str, Tensor] = field(default_factory=dict)  #: to be added to the next gradient, by name
    routes: dict[str, Route] = field(default_factory=dict)  #: that tensors took last, by name
    _sampled: dict[str, tuple[str, int]] = field(default_factory=dict)  #: codec and step of an error, by name
    _stale: dict[str, "tuple[Future[Tensor], Tensor]"] = field(default_factory=dict)
    _waiting: list[tuple[Plan, Tensor, "Future[Tensor]"]] = field(default_factory=list)  #: to be sent later
    _under_way: list[StreamWork] = field(default_factory=list)  #: that the last bucket's stream waits for
    _promised: list["Future[Tensor]"] = field(default_factory=list)  #: of this step, on a CPU

    def __post_init__(self) -> None:
        if self.shadow < 0:
            raise InputError(f"shadow counts steps: 0 for never, or 10 for every tenth; not {self.shadow}")
        self.router.follow(self.policy)

    def __repr__(self) -> str:
        sent = f"{self.meter.sent_nbytes / 1e6:,.1f} MB sent"
        return f"<thinwire.{type(self).__name__} {self.policy.name}: {self.step} steps, {sent}>"

    def follow(self, policy: Policy) -> None:
        """Use another policy from the next bucket on; residuals move with their tensors."""
        self.policy = policy
        self.router.follow(policy)

    @cached_property
    def router(self) -> Router:
        return Router(self.policy, self.group, self.channel)

    @property
    def climber(self) -> Climber | None:
        return self.router.climber

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

    def channel(self, codec: str) -> Channel:
        """The channel of a codec, with the residuals of all tensors that it sends."""
        if codec not in self.channels:
            self.channels[codec] = Channel(codec, clock=self.meter.clock)
        return self.channels[codec]

    def schedule(self, rule: Rule, numel: int) -> str:
        """As the rule says, or as suits the tensor."""
        return schedule_of(rule, numel, self.world)

    # The work of the hook

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start sending a bucket, and give a future of its mean."""
        buffer: Tensor = bucket.buffer()
        self.device = buffer.device
        if bucket.index() == 0:
            self._begin_step()
        self.meter.arrive(self.device)
        plan = self._plan(bucket, buffer)
        if self.pilot is not None and not self.pilot.settled:
            found = plan.gradients(buffer)
            self.pilot.see(self, [(sent.tensor, gradient) for sent, gradient in found], buffer)
        if self.policy.name == NOOP:
            return ready(buffer)
        self._pay(plan, buffer)
        self._sample(plan, buffer)
        self.meter.sent_nbytes += plan.sent_nbytes
        self.meter.fp32_nbytes += plan.fp32_nbytes
        if self.pilot is not None and self.pilot.defers and not self.double_buffer:
            return self.promised(self._deferred(plan, buffer, last=bucket.is_last()), bucket)
        if self.double_buffer:
            return self._exchanged(plan, buffer)
        return self.promised(self._reduced(plan, buffer, self._under_way if self.joins else None), bucket)

    def promised(self, future: "Future[Tensor]", bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """A future that the hook returns; what goes wrong is raised as it is when the backward pass ends."""
        self.device = bucket.buffer().device
        self._join(future, last=bucket.is_last())
        return future

    def _join(self, future: "Future[Tensor]", *, last: bool) -> None:
        """What DDP waits for in the end: on a GPU its stream does, on a CPU errors are raised as they are."""
        if self.device.type == "cpu":
            self._promised.append(future)
        if last:
            if self._under_way:
                run.join(self._under_way)
            if self._promised:
                raise_when_waited_for(self._promised)
                self._promised = []

    def _deferred(self, plan: Plan, buffer: Tensor, *, last: bool) -> "Future[Tensor]":
        """Send all buckets of a step with the last one."""
        future = pending(buffer)
        self._waiting.append((plan, buffer, future))
        if last:
            for each, held, promised in self._waiting:
                self._reduced(each, held).add_done_callback(partial(pass_on, promised))
            self._waiting.clear()
        return future

    def _begin_step(self) -> None:
        climber = self.climber
        if climber is not None and self.step and climber.wants(self.step):
            self.stale()  # all that was sent must have been looked at, on all ranks
            if climber.end_look(self.agree):
                level = climber.ladder.levels[climber.level]
                log.info("thinwire: step %d: the ladder goes to %s", self.step, level)
        if self.board is not None and self.step and self.step % BOARD_EVERY == 0:
            self.board.write(self.stats(), self.step)
        self._under_way.clear()  # of a backward pass that was broken off
        self._promised.clear()
        self.meter.begin_step(self.device)
        self.step += 1
        if self.pilot is not None:
            self.pilot.begin_step(self)

    def agree(self, numbers: Tensor) -> Tensor:
        """The mean over ranks, the same bits on all of them; sent from where gradients are."""
        if self.world == 1:
            return numbers
        found = numbers.to(self.device, copy=True)
        collectives.all_reduce(found, "fp32", "avg", self.group, "two_shot")
        return found.to(numbers.device)

    def _plan(self, bucket: "dist.GradBucket", buffer: Tensor) -> Plan:  # type: ignore[name-defined]
        """What becomes of a bucket; worked out when its tensors, or what the policy says of them, change."""
        parameters = bucket.parameters()
        key = (buffer.dtype, *map(id, parameters))
        step = self.step - 1
        plan = self.router.find(key, step, self.epoch)
        if plan is None:
            if buffer.layout != torch.strided:
                raise InputError(
                    "a gradient is sparse; thinwire sends dense ones: use nn.Embedding(sparse=False)"
                )
            tensors = [self._known(parameter) for parameter in parameters]
            sent = [self.router.route(tensor, step, self.epoch, self.world) for tensor in tensors]
            places = [place(gradient, buffer) for gradient in bucket.gradients()]
            self._switch(sent, places, buffer)
            plan = self.router.plan(sent, places, buffer)
            self.router.keep(key, plan, step, self.epoch)
        return plan

    def _known(self, parameter: nn.Parameter) -> Tensorlike:
        if id(parameter) not in self.tensors:
            role = "weight" if parameter.dim() > 1 else "bias"
            known = Tensorlike(f"tensor{len(self.tensors)}", role, tuple(parameter.shape))
            self.tensors[id(parameter)] = parameter, known
        return self.tensors[id(parameter)][1]

    def _switch(self, sent: Sequence[Sent], places: Sequence[Place], buffer: Tensor) -> None:
        """Where a tensor takes another route than before, its residual there is added to its gradient."""
        for each, where in zip(sent, places, strict=True):
            name, before = each.tensor.name, self.routes.get(each.tensor.name)
            if before is not None and before != each.route and before[0] in self.channels:
                channel = self.channels[before[0]]
                owed = states.debt(channel, name, each.tensor.shape, self.rank, self.world)
                channel.forget_name(name)
                if owed is not None:
                    gradient = where.of(buffer)
                    gradient.add_(owed.view_as(gradient))
            self.routes[name] = each.route

    def _pay(self, plan: Plan, buffer: Tensor) -> None:
        """Add what a run before this one left to be sent."""
        if not self.debts:
            return
        for sent, gradient in plan.gradients(buffer):
            owed = self.debts.pop(sent.tensor.name, None)
            if owed is not None:
                gradient.add_(owed.to(gradient.device).view_as(gradient))

    def _reduced(
        self, plan: Plan, buffer: Tensor, under_way: list[StreamWork] | None = None
    ) -> "Future[Tensor]":
        """Everything sent, and what is to be done when it is back."""
        step, climber, truth, more = self.meter.step, self.climber, None, []
        assert step is not None
        if self.shadow and self.step % self.shadow == 0 and not plan.plain:
            truth = buffer.float().clone()
            work = collectives.all_reduce(truth, "fp32", "avg", self.group, async_op=True)
            assert work is not None
            more.append(work.get_future())
        looks = climber is not None and climber.wants(self.step)
        finish = None
        if truth is not None or looks or self.meter.looks_at(self.device):
            finish = partial(self._finish, plan, buffer, step, truth, climber if looks else None)
        rng = Stream(self.seed, step=self.step, rank=self.rank) if plan.random else None
        return run.run(plan, buffer, rng, finish, self.group, self.meter.clock, more, under_way)

    def _finish(
        self, plan: Plan, buffer: Tensor, step: Step, truth: Tensor | None, climber: Climber | None
    ) -> None:
        """A bucket is reduced."""
        if not self.double_buffer:
            self.meter.done(step, buffer.device)
        if truth is None and climber is None:
            return
        for sent, gradient in plan.gradients(buffer):
            name = sent.tensor.name
            if truth is not None:
                place_of = place(gradient, buffer)
                self.meter.true_errors[name] = relative_error(gradient, place_of.of(truth))
            if climber is not None and sent.rule.codec in climber.ladder.levels:
                climber.see(name, gradient)

    def _exchanged(self, plan: Plan, buffer: Tensor) -> "Future[Tensor]":
        """Double buffering: the mean of the last step's gradients, while this step's are on their way."""
        if not plan.fresh:
            plan.fresh = [torch.empty_like(buffer) for _ in range(2)]
        fresh = plan.fresh[self.step % 2]
        fresh.copy_(buffer)
        future = self._reduced(plan, fresh)
        step = self.meter.step
        for (sent, gradient), (_, own) in zip(plan.gradients(buffer), plan.gradients(fresh), strict=True):
            before = self._stale.pop(sent.tensor.name, None)
            if before is None:
                gradient.zero_()  # the first step has none
            else:
                before[0].wait()
                gradient.copy_(before[1])
            self._stale[sent.tensor.name] = future, own
        assert step is not None
        self.meter.done(step, buffer.device)
        return ready(buffer)

    def prober(self, policy: Policy, buckets: Sequence[Bucket]) -> tuple[Callable[[], float], int]:
        """A call that sends copies of buckets as a policy says, and waits; and the bytes that it sends.

        The call says how long it took to start them all.
        """
        return run.prober(policy, buckets, self.group, Stream(self.seed, step=self.step, rank=self.rank))

    # What it did

    def _sample(self, plan: Plan, buffer: Tensor) -> None:
        """Measure what codecs lose, now and then."""
        if self.step < plan.due:
            return
        left = SAMPLES if self.device.type == "cuda" else len(plan.sent)
        for sent, where in zip(plan.sent, plan.places, strict=True):
            name, spec = sent.tensor.name, sent.rule.codec
            if spec == "fp32" or sent.route.schedule.startswith(LOW_RANK):  # whose error only a shadow tells
                self.meter.errors.pop(name, None)
                self._sampled.pop(name, None)
                continue
            known, at = self._sampled.get(name, ("", 0))
            if not left or (known == spec and self.step < at + SAMPLE_EVERY):
                continue
            codec, rng = get_codec(spec), Stream(self.seed, step=self.step, tensor=name)
            error = round_trip_error(codec.for_shape(sent.tensor.shape), where.of(buffer), rng)
            if self.device.type == "cuda" or bool(error.isfinite()):  # else the next step is measured
                self.meter.errors[name], self._sampled[name] = error, (spec, self.step)
            left -= 1
        last = min(self._sampled.get(sent.tensor.name, ("", self.step))[1] for sent in plan.sent)
        plan.due = last + SAMPLE_EVERY if left else self.step + 1

    def stats(self) -> dict[str, Any]:
        """What this rank sent and what it took: plain numbers, for a log or a page (see `stats.describe`)."""
        return describe(self)

    def summary(self, *, everywhere: bool = False) -> None:
        """Print `stats` as a table: on rank 0, or on every rank."""
        if everywhere or self.rank == 0:
            print_summary(self.stats())

    @property
    def sent_nbytes(self) -> int:
        """By this rank, so far."""
        return self.meter.sent_nbytes

    @property
    def buffers_nbytes(self) -> int:
        """Memory that communication keeps besides residuals: of the group, for all models that use it."""
        return getattr(line(self.group, self.device), "nbytes", 0)

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
        order of additions follows DDP's buckets, and DDP rebuilds its buckets early in training.
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
        self.router.forget()
