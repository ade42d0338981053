"""The handle of a model: it receives buckets of gradients and returns their mean over ranks.

`routes` turns the policy into plans, `run` sends buckets, and `metrics`, `auto_driver`, `ladder` and
`checkpoint` measure, choose and save. The handle joins these parts and keeps the state that outlives a step.
Nothing depends on how DDP forms its buckets: residuals are kept by parameter name, and a tensor's route
depends on that tensor only.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import collectives
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations import checkpoint as states
from thinwire.integrations import run
from thinwire.integrations.auto_driver import AutoDriver, Bucket
from thinwire.integrations.double_buffer import DoubleBuffer
from thinwire.integrations.futures import Future, pass_on, pending, raise_when_waited_for, ready
from thinwire.integrations.ladder import LadderState
from thinwire.integrations.loads import Held, Loads
from thinwire.integrations.metrics import Board, Metrics, Step, relative_error
from thinwire.integrations.metrics_report import describe
from thinwire.integrations.metrics_table import print_summary
from thinwire.integrations.routes import BucketPlan, GradientPlace, Route, RoutedTensor, Router, place
from thinwire.integrations.samples import Sampler
from thinwire.policy import NOOP, Policy, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import streams
from thinwire.runtimes.runtime import runtime_of
from thinwire.runtimes.work import StreamWork
from thinwire.schedules.residuals import gradient_residual

log = logging.getLogger(__name__)
REBUILT = 4  #: steps after which DDP's buckets no longer change: DDP rebuilds them after the first step
BOARD_EVERY = 10  #: steps between lines for TensorBoard


@dataclass(repr=False)
class Handle:
    """The handle that `attach` returns: counts, residuals, and the work of the hook."""

    policy: Policy
    group: dist.ProcessGroup | None = None
    seed: int = 0
    double_buffer: bool = False
    shadow: int = 0
    board: Board | None = None
    auto: AutoDriver | None = None  #: chooses the policy, with "auto"
    step: int = 0  #: optimizer steps, counted at the first bucket of each backward pass that communicates
    epoch: int = 0
    detached: bool = False
    joins: bool = False  #: on a GPU: whether no result is used before the last bucket's hook returns
    device: torch.device = torch.device("cpu")  #: of the gradients
    tells_wait: ClassVar[bool] = True  #: whether metrics know how long training waited
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    metrics: Metrics = field(default_factory=Metrics)
    tensors: dict[int, tuple[nn.Parameter, TensorInfo]] = field(default_factory=dict)  #: by identity
    pending: dict[str, Tensor] = field(default_factory=dict)  #: residuals for the next gradients, by name
    routes: dict[str, Route] = field(default_factory=dict)  #: each tensor's last route, by name
    _buffers: DoubleBuffer = field(default_factory=DoubleBuffer)
    _keys: dict[tuple[Any, ...], object] = field(default_factory=dict)  #: of buckets, by index and buffer
    _loads: Loads = field(default_factory=Loads)  #: buckets that wait for later ones
    _under_way: list[StreamWork] = field(default_factory=list)  #: calls to wait for at the last bucket
    _promised: list["Future[Tensor]"] = field(default_factory=list)  #: futures of this step, on gloo

    def __post_init__(self) -> None:
        if self.shadow < 0:
            raise InputError(f"shadow must be a number of steps, 0 (never) or more, not {self.shadow}")
        self.router.follow(self.policy)

    def __repr__(self) -> str:
        sent = f"{self.metrics.sent_nbytes / 1e6:,.1f} MB sent"
        return f"<thinwire.{type(self).__name__} {self.policy.name}: {self.step} steps, {sent}>"

    def follow(self, policy: Policy) -> None:
        """Use another policy from the next bucket on; residuals move with their tensors."""
        self.policy = policy
        self.router.follow(policy)

    @cached_property
    def router(self) -> Router:
        return Router(self.policy, self.group, self.channel)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.seed, self.metrics.errors)

    @property
    def ladder_state(self) -> LadderState | None:
        return self.router.ladder_state

    @cached_property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def trained(self) -> list[TensorInfo]:
        """The known parameters that have gradients."""
        return [tensor for parameter, tensor in list(self.tensors.values()) if parameter.requires_grad]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the known parameters, by name."""
        return {tensor.name: tensor.shape for _, tensor in self.tensors.values()}

    def channel(self, codec: str) -> Channel:
        """Return the channel of a codec, which keeps the residuals of all tensors sent with it."""
        if codec not in self.channels:
            self.channels[codec] = Channel(codec, clock=self.metrics.clock)
        return self.channels[codec]

    # The work of the hook

    def reduce(self, bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Start sending a bucket; return a future of its mean."""
        buffer: Tensor = bucket.buffer()
        self.device = buffer.device
        if bucket.index() == 0:
            self._begin_step()
        self.metrics.arrive(self.device)
        plan = self._plan(bucket, buffer)
        if self.auto is not None and not self.auto.settled:
            routed = plan.gradients(buffer)
            self.auto.see(self, [(sent.tensor, gradient) for sent, gradient in routed], buffer)
        if self.policy.name == NOOP:
            return ready(buffer)
        self._add_pending(plan, buffer)
        self._sampler.look(plan, buffer, self.step)
        self.metrics.sent_nbytes += plan.sent_nbytes
        self.metrics.fp32_nbytes += plan.fp32_nbytes
        if self.double_buffer:
            return self._exchanged(plan, buffer)
        return self.promised(self._hold(plan, buffer, last=bucket.is_last()), bucket)

    def promised(self, future: "Future[Tensor]", bucket: "dist.GradBucket") -> "Future[Tensor]":  # type: ignore[name-defined]
        """Return the future for DDP; its error is raised unchanged when the backward pass ends."""
        self.device = bucket.buffer().device
        self._join(future, last=bucket.is_last())
        return future

    def _join(self, future: "Future[Tensor]", *, last: bool) -> None:
        """At the last bucket, wait on NCCL's streams; on gloo, have errors raised unchanged."""
        if not runtime_of(self.group, self.device).on_streams:
            self._promised.append(future)
        if last:
            if self._under_way:
                run.join(self._under_way)
            if self._promised:
                raise_when_waited_for(self._promised)
                self._promised = []

    def _hold(self, plan: BucketPlan, buffer: Tensor, *, last: bool) -> "Future[Tensor]":
        """Send a bucket now, or together with later ones; return a future of its mean."""
        defers = self.auto is not None and self.auto.defers
        runtime = plan.calls.runtime
        on_streams = self.joins and runtime.on_streams
        least_nbytes = runtime.load_nbytes if self.joins or not runtime.on_streams else 0
        if not on_streams and not least_nbytes and not defers:
            return self._send([Held(plan, buffer)])
        future = plan.given(buffer) if on_streams else pending(buffer)
        held = Held(plan, buffer, future, streams.current(buffer.device) if on_streams else None)
        for load in self._loads.add(held, least_nbytes, last=last, defers=defers):
            sent = self._send(load, self._under_way if on_streams else None)
            for bucket in load:
                if bucket.future is not None and not on_streams:
                    sent.add_done_callback(partial(pass_on, bucket.future, bucket.buffer))
        return future

    def _begin_step(self) -> None:
        ladder_state = self.ladder_state
        if ladder_state is not None and self.step and ladder_state.wants(self.step):
            self.stale()  # the ladder must have seen all that was sent, on all ranks
            if ladder_state.end_look(self.agree):
                level = ladder_state.ladder.levels[ladder_state.level]
                log.info("thinwire: step %d: the ladder goes to %s", self.step, level)
        if self.board is not None and self.step and self.step % BOARD_EVERY == 0:
            self.board.write(self.stats(), self.step)
        self._loads.clear()  # left by a backward pass that was interrupted
        self._under_way.clear()
        self._promised.clear()
        self.metrics.begin_step(self.device)
        self.step += 1
        if self.auto is not None:
            self.auto.begin_step(self)

    def agree(self, numbers: Tensor) -> Tensor:
        """Return the mean over ranks, the same bits on every rank; computed on the gradients' device."""
        if self.world == 1:
            return numbers
        mean = numbers.to(self.device, copy=True)
        collectives.all_reduce(mean, "fp32", "avg", self.group, "two_shot")
        return mean.to(numbers.device)

    def _plan(self, bucket: "dist.GradBucket", buffer: Tensor) -> BucketPlan:  # type: ignore[name-defined]
        """Return the plan of a bucket; computed again only if its tensors or their rules change."""
        if buffer.layout != torch.strided:
            raise InputError(
                "a gradient is sparse; thinwire sends dense ones: use nn.Embedding(sparse=False)"
            )
        step, key = self.step - 1, self._key(bucket, buffer)
        plan = self.router.find(key, step, self.epoch)
        if plan is None:
            tensors = [self._known(parameter) for parameter in bucket.parameters()]
            sent = [self.router.route(tensor, step, self.epoch, self.world) for tensor in tensors]
            places = [place(gradient, buffer) for gradient in bucket.gradients()]
            self._switch(sent, places, buffer)
            plan = self.router.plan(sent, places, buffer)
            self.router.keep(key, plan, step, self.epoch)
        return plan

    def _key(self, bucket: "dist.GradBucket", buffer: Tensor) -> object:  # type: ignore[name-defined]
        """Return a key for a bucket's tensors; after the first steps, the same buffer keeps its key."""
        where = bucket.index(), buffer.data_ptr(), buffer.numel(), buffer.dtype
        if not self.joins or self.metrics.steps <= REBUILT or where not in self._keys:
            self._keys[where] = (buffer.dtype, *map(id, bucket.parameters()))
        return self._keys[where]

    def _known(self, parameter: nn.Parameter) -> TensorInfo:
        if id(parameter) not in self.tensors:
            role = "weight" if parameter.dim() > 1 else "bias"
            known = TensorInfo(f"tensor{len(self.tensors)}", role, tuple(parameter.shape))
            self.tensors[id(parameter)] = parameter, known
        return self.tensors[id(parameter)][1]

    def _switch(self, sent: Sequence[RoutedTensor], places: Sequence[GradientPlace], buffer: Tensor) -> None:
        """If a tensor's route has changed, add the residual of the old route to its gradient."""
        for routed, where in zip(sent, places, strict=True):
            name, before = routed.tensor.name, self.routes.get(routed.tensor.name)
            if before is not None and before != routed.route and before[0] in self.channels:
                channel = self.channels[before[0]]
                residual = gradient_residual(channel, name, routed.tensor.shape, self.rank, self.world)
                channel.forget_name(name)
                if residual is not None:
                    gradient = where.of(buffer)
                    gradient.add_(residual.view_as(gradient))
            self.routes[name] = routed.route

    def _add_pending(self, plan: BucketPlan, buffer: Tensor) -> None:
        """Add the residuals of an earlier run to the gradients."""
        if not self.pending:
            return
        for sent, gradient in plan.gradients(buffer):
            residual = self.pending.pop(sent.tensor.name, None)
            if residual is not None:
                gradient.add_(residual.to(gradient.device).view_as(gradient))

    def _send(self, load: Sequence[Held], under_way: list[StreamWork] | None = None) -> "Future[Tensor]":
        """Send buckets in one call; `_finish` runs when their means are ready, where it has work."""
        ladder_state, more, finishes = self.ladder_state, [], []
        step, looks = self.metrics.step, ladder_state is not None and ladder_state.wants(self.step)
        assert step is not None
        self._await(load)
        for plan, buffer in ((held.plan, held.buffer) for held in load):
            truth = None
            if self.shadow and self.step % self.shadow == 0 and not plan.plain:
                truth = buffer.float().clone()
                work = collectives.all_reduce(truth, "fp32", "avg", self.group, async_op=True)
                assert work is not None
                more.append(work.get_future())
            if truth is not None or looks or self.metrics.looks_at(self.device):
                finishes.append(
                    partial(self._finish, plan, buffer, step, truth, ladder_state if looks else None)
                )
        finish = partial(_all_of, finishes) if finishes else None
        if load[0].plan.plain:
            return run.plain(load[0].buffer, self.group, finish, self.metrics.clock, under_way)
        buffers = [held.buffer for held in load]
        calls = self.router.calls([held.plan for held in load], buffers)
        rng = Stream(self.seed, step=self.step, rank=self.rank) if calls.random else None
        return run.run(calls, buffers, rng, finish, more, under_way)

    def _await(self, load: Sequence[Held]) -> None:
        """Let the current stream wait for gradients computed on other streams."""
        made_on = {held.stream for held in load if held.stream is not None}
        if made_on:
            current = streams.current(self.device)
            for stream in made_on - {current}:
                current.wait_stream(stream)

    def _finish(
        self,
        plan: BucketPlan,
        buffer: Tensor,
        step: Step,
        truth: Tensor | None,
        ladder_state: LadderState | None,
    ) -> None:
        """Record a reduced bucket: its time, its true error, its gradients for the ladder."""
        if not self.double_buffer:
            self.metrics.done(step, buffer.device)
        if truth is None and ladder_state is None:
            return
        for sent, gradient in plan.gradients(buffer):
            name = sent.tensor.name
            if truth is not None:
                place_of = place(gradient, buffer)
                self.metrics.true_errors[name] = relative_error(gradient, place_of.of(truth))
            if ladder_state is not None and sent.rule.codec in ladder_state.ladder.levels:
                ladder_state.see(name, gradient)

    def _exchanged(self, plan: BucketPlan, buffer: Tensor) -> "Future[Tensor]":
        """Return the mean of the last step's gradients, and start sending this step's."""
        step, fresh = self.metrics.step, self._buffers.copied(plan, buffer, self.step)
        assert step is not None
        self._buffers.exchange(plan, buffer, fresh, self._send([Held(plan, fresh)]))
        self.metrics.done(step, buffer.device)
        return ready(buffer)

    def prober(self, policy: Policy, buckets: Sequence[Bucket]) -> tuple[Callable[[], float], int]:
        """Return a call that sends copies of buckets by a policy and waits, and the bytes that it sends.

        The call returns the seconds it took to start all sends.
        """
        return run.prober(policy, buckets, self.group, Stream(self.seed, step=self.step, rank=self.rank))

    # Statistics

    def stats(self) -> dict[str, Any]:
        """Return this rank's bytes, times and errors as plain numbers (see `metrics_report.describe`)."""
        return describe(self)

    def summary(self, *, everywhere: bool = False) -> None:
        """Print `stats` as a table: on rank 0, or on every rank."""
        if everywhere or self.rank == 0:
            print_summary(self.stats())

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.metrics.sent_nbytes

    @property
    def buffers_nbytes(self) -> int:
        """Memory of the group's communication buffers, for all models that use it; without residuals."""
        return getattr(runtime_of(self.group, self.device), "nbytes", 0)

    def detach(self) -> None:
        """Let the model communicate as plain DDP, from the next backward pass on."""
        self.detached = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for rules that name epochs."""
        self.epoch = epoch

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors, numbers and strings; each rank saves its own."""
        return states.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another run of the same policy: bit for bit, with the same number of ranks.

        Sums by torch's own all-reduce (the `native` schedule) differ in their last bit: their order of
        additions depends on DDP's buckets, which DDP rebuilds early in training.
        For another number of ranks, first merge all ranks' states with `thinwire.integrations.reshard`.
        """
        states.load(self, state)

    def stale(self) -> dict[str, Tensor]:
        """With double buffering: return the gradients that the next step will use, by name."""
        return self._buffers.gradients()

    def restore(
        self,
        channels: dict[str, Channel],
        pending: dict[str, Tensor],
        stale: dict[str, Tensor],
        routes: dict[str, Route],
    ) -> None:
        """Replace residuals, gradients and routes by those of another run."""
        for channel in channels.values():
            channel.clock = self.metrics.clock
        self.channels, self.pending, self.routes = channels, pending, routes
        self._buffers.restore(stale)
        self.router.forget()


def _all_of(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
