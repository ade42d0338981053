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
from thinwire.policy import Policy, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import is_mean
from thinwire.runtimes.runtime import Runtime, runtime_of


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
    _weights_step: int = 0  #: the step whose random numbers round weights, in forward and backward alike

    def __post_init__(self) -> None:
        hsdp = self.replicas is not None
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
    def tensors(self) -> dict[str, ShardedParameter]:
        """All parameters, by name."""
        return {each.info.name: each for group in self.groups for each in group.parameters}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        return {name: each.info.shape for name, each in self.tensors.items()}

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
        self._add_pending(group, given)
        call = None
        if direction.policy is not None:
            weight = _weight(op, runtime.world, group.divide_factor)
            call = self._call(direction, group, group.present, runtime, given, weight)
        if call is None:
            self._count(direction, plain, plain)
            return False
        call.run(runtime, given, output, self._rng())
        return self._count(direction, call.sent_nbytes, plain)

    def gather(self, group: ShardedGroup, output: Tensor, given: Tensor, shards: dist.ProcessGroup) -> bool:
        """Gather weights from all ranks; False: torch shall do it."""
        direction, runtime = self.parameters, runtime_of(shards, given.device)
        plain = (runtime.world - 1) * given.numel() * given.element_size()
        wanted = sum(each.numel for each in group.parameters)
        forward = torch._C._current_graph_task_id() == -1
        if forward and self._next_weights:
            direction.policy = self._next_weights.pop()
        # Inside a smaller group (reshard_after_forward=N) the weights are decoded ones already.
        decoded = shards is not group.shards or given.numel() != wanted
        if self.detached or decoded or direction.policy is None:
            self._count(direction, plain, plain)
            return False
        if direction.is_noop:
            output.view(runtime.world, -1).copy_(given.clone())
            return self._count(direction, 0, plain)
        if forward:  # the backward pass needs the same bits
            self._weights_step = self.step
        call = self._call(direction, group, group.parameters, runtime, given)
        if call is None:
            self._count(direction, plain, plain)
            return False
        call.run(runtime, given, output, Stream(self.seed, step=self._weights_step, rank=runtime.rank))
        return self._count(direction, call.sent_nbytes, plain)

    def average(self, group: ShardedGroup, values: Tensor) -> bool:
        """Average this rank's part of the gradients over replicas; False: torch shall do it."""
        direction, replicas = self.averages, group.replicas
        assert replicas is not None
        if self.detached or direction.policy is None:
            return False
        plan = self._bucket(direction, group, values, runtime_of(replicas, values.device))
        plain = plan.fp32_nbytes * values.element_size() // 4
        if direction.is_noop:
            return self._count(direction, 0, plain)
        self._count(direction, plan.sent_nbytes, plain)
        if plan.plain:
            return False
        rng = Stream(self.seed, step=self.step, rank=replicas.rank()) if plan.calls.random else None
        sending.run(plan.calls, [values], rng).wait()
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
        weight: float = 1.0,
    ) -> ShardCall | None:
        """Return the call for a group's parameters; planned again only if these or their rules change."""
        assert direction.policy is not None
        step = max(0, self.step - 1)
        phase = direction.policy.phase(step, self.epoch)
        names = direction.name, direction.policy.name
        key = names, tuple(map(id, parameters)), phase, weight, given.dtype, given.device
        if key not in group.plans:
            rules = [direction.rule(each.info, step, self.epoch) for each in parameters]
            group.plans[key] = calls.make(direction, parameters, rules, runtime, given, weight)
        if direction is self.gradients and group.phase != (names, phase):
            group.phase = names, phase
            self._switch(parameters, step, given, runtime.world)
        known: ShardCall | None = group.plans[key]
        return known

    def _switch(self, parameters: Sequence[ShardedParameter], step: int, given: Tensor, world: int) -> None:
        """If a parameter's codec has changed, add the residual of the old one to its gradient."""
        for parameter in parameters:
            name, codec = parameter.info.name, self.gradients.rule(parameter.info, step, self.epoch).codec
            before = self.gradients.codecs.get(name, codec)
            if before != codec and before in self.gradients.channels:
                channel = self.gradients.channels[before]
                rows = states.residual_rows(channel, name)
                channel.forget_name(name)
                if rows is not None:
                    self._add_rows(parameters, parameter, rows, given, world)
            self.gradients.codecs[name] = codec

    def _add_pending(self, group: ShardedGroup, given: Tensor) -> None:
        """Add the residuals of an earlier run to the gradients."""
        if not self.pending:
            return
        world = self.shards.size()
        for parameter in group.present:
            residual = self.pending.pop(parameter.info.name, None)
            if residual is not None:
                rows = parameter.rows(residual.to(given.device), world)
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
        self, direction: Direction, group: ShardedGroup, values: Tensor, runtime: Runtime
    ) -> BucketPlan:
        """Return the plan of an all-reduce between replicas."""
        assert direction.policy is not None
        step = max(0, self.step - 1)
        phase = direction.policy.phase(step, self.epoch)
        names = direction.name, direction.policy.name
        key = names, tuple(map(id, group.present)), phase, values.dtype, values.device
        if key not in group.plans:
            sent, places, at = [], [], 0
            for parameter in group.present:
                rule = direction.rule(parameter.info, step, self.epoch)
                shape = states.part_shape(parameter.info.shape, parameter.dim, self.shards.size())
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
