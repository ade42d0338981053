"""Calls of a sharded model: which codec each parameter uses in a direction, planned once.

A direction is a kind of message: gradients that are reduced and scattered, weights that are gathered, or
gradients that replicas average.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.channel import Channel
from thinwire.clock import Clock
from thinwire.codecs import Codec
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import CodecError, PolicyError
from thinwire.policy import NOOP, Policy, Rule, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes.arguments import named
from thinwire.runtimes.job import Call
from thinwire.runtimes.plan import GATHER, SCATTER, Ranks, ShardPlan
from thinwire.runtimes.runtime import Runtime
from thinwire.schedules import Item, Schedule
from thinwire.schedules.low_rank import LOW_RANK
from thinwire.schedules.traits import is_bound

if TYPE_CHECKING:
    from thinwire.integrations.fsdp_seam import ShardedParameter

#: The codec that sends a dtype unchanged.
EXACT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
GRADIENTS, WEIGHTS, REPLICAS = "gradients", "weights", "replicas"


@dataclass
class Direction:
    """One kind of message: its policy, its channels and its bytes on this rank."""

    name: str
    policy: Policy | None  #: None: as torch sends it
    clock: Clock | None = None
    channels: dict[str, Channel] = field(default_factory=dict)  #: by codec
    sent_nbytes: int = 0
    plain_nbytes: int = 0  #: that torch would have sent
    told: bool = False  #: whether a line said that some tensors cannot be compressed

    @property
    def is_noop(self) -> bool:
        return self.policy is not None and self.policy.name == NOOP

    def channel(self, codec: str) -> Channel:
        """Return the channel of a codec, which keeps the residuals of all parameters sent with it."""
        if codec not in self.channels:
            self.channels[codec] = Channel(codec, clock=self.clock)
        return self.channels[codec]

    def rule(self, tensor: TensorInfo, step: int, epoch: int) -> Rule:
        """Return the rule of a parameter."""
        assert self.policy is not None
        return self.policy.route(tensor, step, epoch)

    def describe(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "policy": self.policy.name if self.policy is not None else "as torch sends it",
            "sent_nbytes": self.sent_nbytes,
            "plain_nbytes": self.plain_nbytes,
        }


def check(policy: Policy, direction: str) -> None:
    """Refuse a policy that sharded models cannot use, and say why."""
    if policy.ladder is not None:
        raise PolicyError(f"{policy.name} is a ladder, which only DDP supports; name one of its codecs")
    for rule in policy.rules:
        codec = get_codec(rule.codec)
        why = _refusal(codec, rule, direction)
        if why:
            raise CodecError(f"{rule.codec} cannot be used for the {direction} of a sharded model: {why}")


def _refusal(codec: Codec, rule: Rule, direction: str) -> str:
    if direction == WEIGHTS and codec.feedback:
        return "weights are sent as they are, not as changes, so there is nothing to feed back; drop '+ef'"
    if direction == REPLICAS:
        return ""
    if rule.schedule.startswith(LOW_RANK):
        return "a low-rank approximation needs whole matrices on every rank; use int8, int4 or onebit"
    if codec.agreement(1):
        return "ranks would have to agree on its scale first; use a codec without '~shared', such as fp8"
    if is_bound(codec):
        return "it needs whole tensors, and ranks send parts; use a codec in blocks, such as onebit"
    return ""


@dataclass(frozen=True, eq=False)
class ShardCall:
    """A reduce-scatter or an all-gather of a group's parameters."""

    plan: ShardPlan
    direct: bool  #: whether codecs read and write the tensors' own dtype
    sent_nbytes: int

    def run(self, runtime: Runtime, given: Tensor, result: Tensor, rng: Stream | None) -> None:
        """Run one call; on a GPU the current stream waits for it, and the host does not."""
        vectors = [given.detach().view(-1), result.detach().view(-1)]
        if not self.direct:
            vectors = [vectors[0].float(), torch.empty(result.numel(), device=result.device)]
        rng = rng if self.plan.call.random else None
        work = runtime.replay(self.plan, vectors, result, rng) if self.direct else None
        if work is not None:
            work.wait()
        else:
            runtime.run(self.plan.job(vectors, rng))
        if not self.direct:
            result.copy_(vectors[1].view_as(result))


def make(
    direction: Direction,
    parameters: "Sequence[ShardedParameter]",
    rules: Sequence[Rule],
    runtime: Runtime,
    like: Tensor,
    weight: float = 1.0,
) -> ShardCall | None:
    """Plan a call on tensors of the dtype of `like`; None if nothing would be compressed."""
    exact = EXACT.get(like.dtype)
    codecs = tuple(exact or "" if rule.codec == "fp32" else rule.codec for rule in rules)
    if exact is None or all(codec == exact for codec in codecs):
        return None
    items: list[Item] = []
    row = 0
    for i, (parameter, codec) in enumerate(zip(parameters, codecs, strict=True)):
        channel = direction.channel(codec)
        items.append(Item(parameter.numel, channel, parameter.info.name, 0, row, i))
        row += parameter.numel
    schedule = GATHER if direction.name == WEIGHTS else SCATTER
    call = _call(schedule, parameters, codecs, like.dtype, weight)
    plan = ShardPlan(
        items,
        schedule,
        Ranks(runtime.rank, runtime.world),
        call,
        row,
        weight=weight,
        together=runtime.together,
    )
    direct = all(item.codec.reads(like.dtype, like.device) for item in items)
    nbytes = sum(part.codec.nbytes(part.numel) for batch in plan.batches for part in batch.items)
    return ShardCall(plan, direct, (runtime.world - 1) * nbytes)


def _call(
    schedule: Schedule,
    parameters: "Sequence[ShardedParameter]",
    codecs: Sequence[str],
    dtype: torch.dtype,
    weight: float,
) -> Call:
    """Describe a call, which must be the same on all ranks."""
    kinds = list(dict.fromkeys(codecs))
    which = "".join(str(kinds.index(codec)) for codec in codecs) if len(kinds) > 1 else ""
    detail = f"weight {weight:g}{f', codecs by tensor {which}' if which else ''}"
    detail += named([each.info.name for each in parameters])
    return Call(
        f"sharded {schedule.spec}",
        ", ".join(identity(get_codec(codec)) for codec in kinds),
        tuple(each.numel for each in parameters),
        str(dtype).removeprefix("torch."),
        "",
        detail,
        any(get_codec(codec).needs_rng for codec in kinds),
    )
