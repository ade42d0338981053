"""The handle of a sharded model (FSDP2, HSDP): it sends gradients and weights by policies.

`fsdp_seam` is where torch calls the handle, `sharded_calls` plans its calls, `sharded_checkpoint` saves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from thinwire import collectives
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.integrations import run as sending
from thinwire.integrations import sharded_calls as calls
from thinwire.integrations import sharded_checkpoint as states
from thinwire.integrations.fsdp_seam import ShardedGroup, ShardedParameter
from thinwire.integrations.metrics import Metrics
from thinwire.integrations.metrics_table import print_summary
from thinwire.integrations.routes import BucketPlan, GradientPlace, Route, RoutedTensor, schedule_of
from thinwire.integrations.routes import make as make_bucket
from thinwire.integrations.sharded_auto import ShardedAuto
from thinwire.integrations.sharded_calls import GRADIENTS, REPLICAS, WEIGHTS, Direction, ShardCall
from thinwire.integrations.sharded_report import describe
from thinwire.integrations.tell import tell
from thinwire.policy import Policy, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import is_mean
from thinwire.runtimes.runtime import Runtime, runtime_of
from thinwire.schedules.residuals import gradient_residual


@dataclass(repr=False)
class ShardedHandle:
    """The handle that `attach` returns for a sharded model: counts, residuals, and its calls."""

    policy: Policy  #: of gradients: the reduce-scatter; with HSDP, the all-reduce between replicas
    groups: Sequence[ShardedGroup]
    weights: Policy | None = None
    inside: Policy | None = None  #: with HSDP: of the reduce-scatter
    seed: int = 0
    step: int = 0  #: backward passes that reduced gradients
    epoch: int = 0
    detached: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    pending: dict[str, Tensor] = field(default_factory=dict)  #: residuals for the next gradients, by name
    tells_wait: ClassVar[bool] = False  #: FSDP waits where it needs a tensor, which thinwire does not see
    auto: ShardedAuto | None = None  #: chooses the policies, with "auto"
    _pass: int = -2  #: the backward pass of the last reduction
    _next_weights: list[Policy | None] = field(default_factory=list)  #: from the next forward pass on
    _weights_step: int = 0  #: the step whose rules and random numbers weights use, forward and backward alike

    def __post_init__(self) -> None:
        hsdp = self.replicas is not None
        self.weight = 1.0 / self.shards.size()  #: of the last sum over shards
        clock = self.metrics.clock
        self.gradients = Direction(GRADIENTS, self.inside if hsdp else self.policy, clock)
        self.averages = Direction(REPLICAS, self.policy if hsdp else None, clock)
        self.parameters = Direction(WEIGHTS, self.weights, clock)
        for direction in self.directions:
            if direction.policy is not None:
                calls.check(direction.policy, direction.name)

    def __repr__(self) -> str:
        sent = f"{self.sent_nbytes / 1e6:,.1f} MB sent"
        return f"<thinwire.{type(self).__name__} {self.policy.name}: {self.step} steps, {sent}>"

    @property
    def directions(self) -> tuple[Direction, ...]:
        return self.gradients, self.averages, self.parameters

    @property
    def shards(self) -> dist.ProcessGroup:
        """The group of ranks among which parameters are split."""
        return self.groups[0].shards

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """With HSDP, the group of ranks that hold the same parts."""
        return self.groups[0].replicas

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def world(self) -> int:
        """All ranks that train the model."""
        return self.shards.size() * (self.replicas.size() if self.replicas is not None else 1)

    @property
    def rank(self) -> int:
        """This rank among those: replicas one after another."""
        outer = self.replicas.rank() * self.shards.size() if self.replicas is not None else 0
        return outer + self.shards.rank()

    @property
    def trained(self) -> list[TensorInfo]:
        """The parameters that have gradients."""
        return [
            each.info
            for group in self.groups
            for each in group.parameters
            if each.param.sharded_param.requires_grad
        ]

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether other ranks hold other parts of the same parameters, besides those of the mesh."""
        return any(each.param.is_dtensor for group in self.groups for each in group.parameters)

    @property
    def tensors(self) -> dict[str, ShardedParameter]:
        """All parameters, by name."""
        return {each.info.name: each for group in self.groups for each in group.parameters}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name; with tensor parallelism, of this rank's parts."""
        return {name: each.shape for name, each in self.tensors.items()}

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent so far, in all directions."""
        return self.metrics.sent_nbytes

    # What FSDP2 calls

    def reduce(
        self, group: ShardedGroup, output: Tensor, given: Tensor, shards: dist.ProcessGroup, op: Any
    ) -> bool:
        """Reduce gradients and keep this rank's part; False: torch shall do it."""
        if self.detached:
            return False
        self._begin_step()
        direction, runtime = self.gradients, runtime_of(shards, given.device)
        plain = (runtime.world - 1) * output.numel() * output.element_size()
        if direction.is_noop:
            output.copy_(given.view(runtime.world, -1)[runtime.rank])
            return self._count(direction, 0, plain)
        if direction.policy is not None or self.pending:
            self._check_layout(group, output)
        self._add_pending(group, given, runtime.world)
        self.weight = _weight(op, runtime.world, group.divide_factor)
        call = None
        if direction.policy is not None:
            step = max(0, self.step - 1)
            self._switch(direction, group, given, step, runtime.world)
            call = self._call(direction, group, group.present, runtime, given, step, self.weight)
        if call is None:
            self._count(direction, plain, plain)
            return False
        call.run(runtime, given, output, self._rng())
        return self._count(direction, call.sent_nbytes, plain)

    def gather(self, group: ShardedGroup, output: Tensor, given: Tensor, shards: dist.ProcessGroup) -> bool:
        """Gather weights from all ranks; False: torch shall do it."""
        direction, runtime = self.parameters, runtime_of(shards, given.device)
        plain = (runtime.world - 1) * given.numel() * given.element_size()
        forward = torch._C._current_graph_task_id() == -1
        if forward and self._next_weights:
            direction.policy = self._next_weights.pop()
        # Inside a smaller group (reshard_after_forward=N) the weights are decoded ones already.
        usual = given.numel() == sum(each.numel for each in group.parameters)
        if not usual and shards is group.shards and not self.detached:
            self._say_uncompressed(direction, given.dtype)
        if self.detached or shards is not group.shards or not usual or direction.policy is None:
            self._count(direction, plain, plain)
            return False
        if direction.is_noop:
            output.view(runtime.world, -1).copy_(given.clone())
            return self._count(direction, 0, plain)
        if forward:  # the backward pass needs the same bits
            self._weights_step = self.step
        call = self._call(direction, group, group.parameters, runtime, given, self._weights_step)
        if call is None:
            self._count(direction, plain, plain)
            return False
        call.run(runtime, given, output, Stream(self.seed, step=self._weights_step, rank=runtime.rank))
        return self._count(direction, call.sent_nbytes, plain)

    def average(self, group: ShardedGroup, values: Tensor, is_sum: bool) -> bool:
        """Average this rank's part of the gradients over replicas, or add it; False: torch shall do it."""
        direction, replicas = self.averages, group.replicas
        assert replicas is not None
        if self.detached or direction.policy is None:
            return False
        self._begin_step()
        if group.shards.size() == 1:  # FSDP did not call `reduce`
            self.weight = 1.0 / (group.divide_factor or 1.0)
            self._add_pending(group, values, 1, self.weight)
        step = max(0, self.step - 1)
        if not direction.is_noop:
            self._switch(direction, group, values, step, 1)
        plan = self._bucket(direction, group, values, runtime_of(replicas, values.device), step)
        plain = plan.fp32_nbytes * values.element_size() // 4
        if not direction.is_noop:
            self._count(direction, plan.sent_nbytes, plain)
            if plan.plain:
                return False
            rng = Stream(self.seed, step=self.step, rank=replicas.rank()) if plan.calls.random else None
            sending.run(plan.calls, [values], rng).wait()
        else:
            self._count(direction, 0, plain)
        if is_sum:
            values *= replicas.size()
        return True

    def _begin_step(self) -> None:
        """Count a step at the first reduction of a backward pass."""
        now = torch._C._current_graph_task_id()
        if now != self._pass and now != -1:
            self._pass = now
            self.metrics.begin_step(self.device)
            self.step += 1
            if self.auto is not None:
                self.auto.begin_step(self)

    def follow(self, policy: Policy, weights: Policy | None) -> None:
        """Use other policies: for gradients from now on, for weights from the next forward pass on."""
        self.policy = policy
        (self.averages if self.replicas is not None else self.gradients).policy = policy
        if self.auto is not None and self.auto.chooses_weights:
            self._next_weights = [weights]

    def agree(self, number: float) -> float:
        """Return the mean over all ranks."""
        mean = torch.tensor([number], dtype=torch.float32, device=self.device)
        for group in (self.shards, self.replicas):
            if group is not None and group.size() > 1:
                collectives.all_reduce(mean, "fp32", "avg", group, "two_shot")
        return mean.item()

    def _count(self, direction: Direction, sent: int, plain: int) -> bool:
        direction.sent_nbytes += sent
        direction.plain_nbytes += plain
        self.metrics.sent_nbytes += sent
        self.metrics.fp32_nbytes += plain
        return True

    def _rng(self) -> Stream:
        return Stream(self.seed, step=self.step, rank=self.shards.rank())

    def _say_uncompressed(self, direction: Direction, dtype: torch.dtype) -> None:
        """Say once that codecs cannot send tensors of a dtype; torch sends them."""
        if self.rank or direction.told:
            return
        direction.told = True
        what = "several dtypes in one group" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")
        tell(f"thinwire: {direction.name} of {what} are not compressed; float32, bfloat16 and float16 are")

    def _check_layout(self, group: ShardedGroup, output: Tensor) -> None:
        numel = sum(each.numel for each in group.present)
        if numel != output.numel():
            raise InputError(
                f"FSDP reduces {output.numel()} elements of a group whose gradients have {numel}; "
                "this version of torch lays out gradients in a way that thinwire does not know"
            )

    def _call(
        self,
        direction: Direction,
        group: ShardedGroup,
        parameters: Sequence[ShardedParameter],
        runtime: Runtime,
        given: Tensor,
        step: int,
        weight: float = 1.0,
    ) -> ShardCall | None:
        """Return the call for a group's parameters; planned again only if these or their rules change."""
        assert direction.policy is not None
        phase = direction.policy.phase(step, self.epoch)
        names = direction.name, direction.policy.name
        key = names, tuple(map(id, parameters)), phase, weight, given.dtype, given.device
        if key not in group.plans:
            if given.dtype not in calls.EXACT:
                self._say_uncompressed(direction, given.dtype)
            rules = [direction.rule(each.info, step, self.epoch) for each in parameters]
            group.plans[key] = calls.make(direction, parameters, rules, runtime, given, weight)
        known: ShardCall | None = group.plans[key]
        return known

    def _switch(
        self, direction: Direction, group: ShardedGroup, given: Tensor, step: int, world: int
    ) -> None:
        """If a parameter's codec has changed, add the residual of the old one to its gradient."""
        assert direction.policy is not None
        phase = direction.policy.phase(step, self.epoch)
        now = direction.policy.name, phase, tuple(map(id, group.present))
        if group.phases.get(direction.name) == now:
            return
        group.phases[direction.name] = now
        for parameter in group.present:
            name, codec = parameter.info.name, direction.rule(parameter.info, step, self.epoch).codec
            for before, channel in direction.channels.items():
                rows = self._residual(direction, channel, parameter) if before != codec else None
                if rows is not None:
                    channel.forget_name(name)
                    self._add_rows(group.present, parameter, rows, given, world)

    def _residual(self, direction: Direction, channel: Channel, parameter: ShardedParameter) -> Tensor | None:
        """Return what a channel owes to a parameter's next gradients, as rows."""
        if direction is self.gradients:
            return states.residual_rows(channel, parameter.info.name)
        assert self.replicas is not None
        shape = states.part_shape(parameter.shape, parameter.dim, self.shards.size())
        rank, world = self.replicas.rank(), self.replicas.size()
        part = gradient_residual(channel, parameter.info.name, shape, rank, world)
        return None if part is None else part.reshape(1, -1)

    def _add_pending(self, group: ShardedGroup, given: Tensor, world: int, weight: float = 1.0) -> None:
        """Add the residuals of an earlier run to the gradients."""
        if not self.pending:
            return
        for parameter in group.present:
            residual = self.pending.pop(parameter.info.name, None)
            if residual is not None:
                rows = parameter.rows(residual.to(given.device), world) * weight
                self._add_rows(group.present, parameter, rows, given, world)

    def _add_rows(
        self,
        parameters: Sequence[ShardedParameter],
        parameter: ShardedParameter,
        rows: Tensor,
        given: Tensor,
        world: int,
    ) -> None:
        at = sum(each.numel for each in parameters[: parameters.index(parameter)])
        given.view(world, -1)[:, at : at + parameter.numel] += rows.to(given.dtype)

    def _bucket(
        self, direction: Direction, group: ShardedGroup, values: Tensor, runtime: Runtime, step: int
    ) -> BucketPlan:
        """Return the plan of an all-reduce between replicas."""
        assert direction.policy is not None
        phase = direction.policy.phase(step, self.epoch)
        names = direction.name, direction.policy.name
        key = names, tuple(map(id, group.present)), phase, values.dtype, values.device
        if key not in group.plans:
            sent, places, at = [], [], 0
            for parameter in group.present:
                rule = direction.rule(parameter.info, step, self.epoch)
                shape = states.part_shape(parameter.shape, parameter.dim, self.shards.size())
                part = TensorInfo(parameter.info.name, parameter.info.role, shape)
                route = Route(rule.codec, schedule_of(rule, parameter.numel, runtime.world))
                sent.append(RoutedTensor(part, rule, route))
                places.append(GradientPlace(at, shape, make_contiguous_strides_for(shape)))
                at += parameter.numel
            group.plans[key] = make_bucket(sent, places, values, runtime, direction.channel)
        known: BucketPlan = group.plans[key]
        return known

    # For users

    def stats(self) -> dict[str, Any]:
        """Return this rank's bytes, times and layers as plain numbers."""
        return describe(self)

    def summary(self, *, everywhere: bool = False) -> None:
        """Print `stats` as a table: on rank 0, or on every rank."""
        if everywhere or self.rank == 0:
            print_summary(self.stats())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for rules that name epochs."""
        self.epoch = epoch

    def detach(self) -> None:
        """Let FSDP communicate as torch does, from the next pass on."""
        self.detached = True
        for group in self.groups:
            group.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors, numbers and strings; each rank saves its own."""
        return states.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another run of the same policies: bit for bit, with the same mesh."""
        states.load(self, state)


def _weight(op: Any, world: int, factor: float | None) -> float:
    """Return the factor of a sum. A divide factor arrives as an operation that only NCCL can read."""
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return 1.0 / world if is_mean(op) else 1.0
    if factor:
        return 1.0 / factor
    raise InputError(f"FSDP reduces with {op}; thinwire knows sums and means")
