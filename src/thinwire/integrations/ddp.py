"""DistributedDataParallel: gradients are encoded as they become ready.

model = DistributedDataParallel(net)
wire = thinwire.attach(model, "int8")          # one line
"""

import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import policy
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import InputError
from thinwire.integrations import warm
from thinwire.integrations.auto import BUDGET, Choice
from thinwire.integrations.meter import Board
from thinwire.integrations.pilot import Pilot
from thinwire.integrations.run import plain
from thinwire.integrations.stats import wire_nbytes
from thinwire.integrations.tell import tell
from thinwire.integrations.wire import Wire
from thinwire.policy import LADDER, NOOP, Policy, Tensorlike
from thinwire.runtimes import process_group
from thinwire.runtimes.job import Call

COMPILING = 3  #: steps in which a GPU's kernels are compiled: DDP makes its buckets anew after the first
AUTO = "auto"


@dataclass
class Slot:
    """What a model's hook looks at, as a hook can be registered once only."""

    wire: Wire


_slots: "weakref.WeakKeyDictionary[nn.Module, Slot]" = weakref.WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    codec: AnySpec | Policy = "int8",
    *,
    seed: int = 0,
    double_buffer: bool = False,
    shadow: int = 0,
    tensorboard: Any = None,
    error_budget: float = BUDGET,
) -> Wire:
    """Send a model's gradients as a policy, a recipe or a codec says, from the next backward pass on.

    The handle that is returned counts bytes and owns the residuals: save its `state_dict` beside the model's.
    Attaching again replaces what was attached.

    codec: a recipe (`int8`), a codec's spec (`int8/256`), a `Codec` or `Format` of your own, a TOML file or a
        `Policy`; `auto` measures and chooses; `noop` sends nothing, to see how fast training would be without
        a wire: replicas drift apart.
    seed: of random rounding.
    double_buffer: every step uses the gradients of the step before, so that communication has a whole step's
        time; the first step's gradients are zero.
    shadow: every so many steps, gradients are also reduced in float32 and the true error is measured.
    tensorboard: a folder, or a SummaryWriter; rank 0 writes.
    error_budget: for `auto`: what may be lost of a gradient, relative to its norm; with error feedback, what
        is left of it after many steps.
    """
    model = _compiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise InputError(_refusal(model))
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    pilot = Pilot(Choice(error_budget)) if codec == AUTO else None
    wire = Wire(policy.get("fp32" if pilot else codec), group, seed, double_buffer, shadow, None, pilot)
    know(wire, model.module)
    _compare(wire, model, error_budget if pilot else None)
    said = _first_line(wire, wire.trained)  # by all ranks, as it finds tensors that no rule takes
    _prepare(wire, model)
    slot = _slots.get(model)
    if slot is None:
        slot = Slot(wire)
        model.register_comm_hook(slot, hook)
        _slots[model] = slot
    slot.wire = wire
    wire.joins = True  # DDP uses gradients when all buckets are there
    if wire.rank == 0:
        wire.board = None if tensorboard is None else Board(tensorboard)
        tell(said)
    return wire


def _prepare(wire: Wire, model: DistributedDataParallel) -> None:
    """Compile what the first steps will need, so that none of them stands still without a word.

    On a GPU kernels are made for the places of tensors in buckets, which nobody knows yet: there the first
    steps compile, and a line says so.
    """
    where = next((each.device for each in model.parameters()), torch.device("cpu"))
    if wire.world == 1 or wire.policy.name == NOOP or where.type != "cpu":
        return
    recipes = wire.pilot.choice.candidates if wire.pilot is not None else ()
    policies = [policy.get(each) for each in recipes] or [wire.policy]
    say = tell if wire.rank == 0 else _silent
    warm.warm(warm.routes(policies, wire.trained, wire.world), where, say, audit=recipes)


def _silent(_line: str) -> None:
    """Ranks other than the first."""


def _refusal(model: object) -> str:
    """Why a model cannot be attached to."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # which takes half a second

    taken = "attach takes a DistributedDataParallel model"
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        return f"{taken}; FSDP is not supported: what it sends stays as torch sends it, uncompressed"
    if isinstance(model, nn.DataParallel):
        return f"{taken}; DataParallel has one process: use one for each GPU, and DistributedDataParallel"
    if isinstance(model, nn.Module):
        return f"{taken}, not {type(model).__name__}; wrap it: DistributedDataParallel(model)"
    return f"{taken}, not {type(model).__name__}"


def _compare(wire: Wire, model: DistributedDataParallel, budget: float | None) -> None:
    """That all ranks attach the same; else they would send different bytes, or at different times."""
    if wire.world == 1:
        return
    where = next((each.device for each in model.parameters()), torch.device("cpu"))
    policy_of = wire.policy
    ladder = policy_of.ladder.levels if policy_of.ladder else ()
    used = [rule.codec for rule in policy_of.rules if rule.codec != LADDER]
    own = [identity(get_codec(each)) for each in (*used, *ladder)]
    rules = zlib.crc32(f"{policy_of.to_toml()}{own}".encode())
    detail = f"rules {rules:08x}, seed {wire.seed}, double_buffer {wire.double_buffer}, shadow {wire.shadow}"
    detail += f", error_budget {budget}" if budget is not None else ""
    name = AUTO if wire.pilot is not None else policy_of.name
    process_group.line(wire.group, where).compare(Call("attach", name, (), "", "", detail))


def detach(model: DistributedDataParallel) -> None:
    """From the next backward pass on the model communicates as DDP does by itself."""
    wire = attached(model)
    if wire is None:
        raise InputError("nothing is attached to this model")
    wire.detach()


def attached(model: nn.Module) -> Wire | None:
    """What is attached to a model."""
    slot = _slots.get(_compiled(model))
    return None if slot is None or slot.wire.detached else slot.wire


def _compiled(model: Any) -> Any:
    """What torch.compile wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def know(wire: Wire, net: nn.Module) -> None:
    """Tell a wire the names of a network's parameters."""
    for tensor, parameter in zip(policy.describe(net), net.parameters(), strict=True):
        wire.tensors[id(parameter)] = parameter, tensor


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A DDP communication hook; its state is a `Wire`, or the slot of one."""
    wire = state.wire if isinstance(state, Slot) else state
    assert isinstance(wire, Wire)
    if wire.detached:
        return wire.promised(plain(bucket.buffer(), wire.group), bucket)
    if wire.step > COMPILING or wire.rank or not bucket.buffer().is_cuda:
        return wire.reduce(bucket)
    with warm.patience(tell, bucket.buffer().device):
        return wire.reduce(bucket)


def _first_line(wire: Wire, tensors: list[Tensorlike]) -> str:
    chosen = wire.policy
    if wire.pilot is not None:
        return f"thinwire: auto: {len(tensors)} tensors; measuring during the first steps, in fp32"
    if chosen.name == NOOP:
        return "thinwire: noop: nothing is sent and replicas drift apart; for measuring only"
    rules = [chosen.route(tensor) for tensor in tensors]
    encoded = sum(rule.codec != "fp32" for rule in rules)
    sent = sum(wire_nbytes(rule, tensor.shape) for rule, tensor in zip(rules, tensors, strict=True))
    share = sent / max(1, sum(4 * tensor.numel for tensor in tensors))
    if not encoded and any(rule.codec != "fp32" for rule in chosen.rules):
        why = "; ".join(sorted({rule.why for rule in rules if rule.why})) or "no rule takes them"
        return (
            f"thinwire: {chosen.name}: all {len(tensors)} tensors stay in fp32 ({why}): nothing is compressed"
        )
    return f"thinwire: {chosen.name}: compressing {encoded} of {len(tensors)} tensors, {share:.1%} of bytes"
