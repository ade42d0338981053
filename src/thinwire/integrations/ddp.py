"""DistributedDataParallel: gradients are encoded as they become ready.

model = DistributedDataParallel(net)
handle = thinwire.attach(model, "int8")          # one line
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
from thinwire.integrations.auto_driver import AutoDriver
from thinwire.integrations.handle import Handle
from thinwire.integrations.metrics import Board
from thinwire.integrations.metrics_report import wire_nbytes
from thinwire.integrations.run import plain
from thinwire.integrations.tell import tell
from thinwire.policy import LADDER, NOOP, Policy, TensorInfo
from thinwire.runtimes import process_group
from thinwire.runtimes.job import Call

COMPILING = 3  #: steps in which a GPU's kernels are compiled: DDP rebuilds its buckets after the first step
AUTO = "auto"


@dataclass
class HookState:
    """The state of a model's hook: DDP takes a hook only once, so a new handle is put here."""

    handle: Handle


_hook_states: "weakref.WeakKeyDictionary[nn.Module, HookState]" = weakref.WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    codec: AnySpec | Policy = "int8",
    *,
    seed: int = 0,
    double_buffer: bool = False,
    shadow: int = 0,
    tensorboard: Any = None,
    error_budget: float = BUDGET,
) -> Handle:
    """Send a model's gradients by a policy, a recipe or a codec, from the next backward pass on.

    Return a handle, which counts bytes and owns the residuals: save its `state_dict` beside the model's.
    Attaching again replaces the handle.

    codec: a recipe (`int8`), a codec's spec (`int8/256`), a `Codec` or `Format` of your own, a TOML file or a
        `Policy`; `auto` measures and chooses; `noop` sends nothing, to see how fast training would be without
        communication: replicas drift apart.
    seed: of random rounding.
    double_buffer: every step uses the gradients of the step before, so communication may take a whole step;
        the first step's gradients are zero.
    shadow: every `shadow` steps, gradients are also reduced in float32 and the true error is measured.
    tensorboard: a folder, or a SummaryWriter; rank 0 writes.
    error_budget: for `auto`: the largest error of a gradient, relative to its norm; with error feedback, the
        residual left after many steps.
    """
    model = _compiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise InputError(_refusal(model))
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    driver = AutoDriver(Choice(error_budget)) if codec == AUTO else None
    handle = Handle(policy.get("fp32" if driver else codec), group, seed, double_buffer, shadow, None, driver)
    know(handle, model.module)
    _compare(handle, model, error_budget if driver else None)
    first_line = _first_line(handle, handle.trained)  # on all ranks: it raises if no rule matches a tensor
    _prepare(handle, model)
    hook_state = _hook_states.get(model)
    if hook_state is None:
        hook_state = HookState(handle)
        model.register_comm_hook(hook_state, hook)
        _hook_states[model] = hook_state
    hook_state.handle = handle
    handle.joins = True  # DDP uses gradients only after the last bucket
    if handle.rank == 0:
        handle.board = None if tensorboard is None else Board(tensorboard)
        tell(first_line)
    return handle


def _prepare(handle: Handle, model: DistributedDataParallel) -> None:
    """Compile the loops of the first steps, so that none of them stalls silently.

    On a GPU kernels depend on the places of tensors in buckets, which are not known yet: there the first
    steps compile, and a line says so.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if handle.world == 1 or handle.policy.name == NOOP or device.type != "cpu":
        return
    recipes = handle.auto.choice.candidates if handle.auto is not None else ()
    policies = [policy.get(each) for each in recipes] or [handle.policy]
    say = tell if handle.rank == 0 else _silent
    warm.warm(warm.routes(policies, handle.trained, handle.world), device, say, audit=recipes)


def _silent(_line: str) -> None:
    """Print nothing, on ranks other than the first."""


def _refusal(model: object) -> str:
    """Say why `attach` refuses a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import: half a second

    accepted = "attach takes a DistributedDataParallel model, or one that fully_shard was applied to"
    if isinstance(model, FullyShardedDataParallel):
        return f"{accepted}; FullyShardedDataParallel (FSDP1) is not supported: use fully_shard (FSDP2)"
    if isinstance(model, nn.DataParallel):
        return f"{accepted}; DataParallel has one process: use one for each GPU, and DistributedDataParallel"
    if isinstance(model, nn.Module):
        return f"{accepted}, not {type(model).__name__}; wrap it: DistributedDataParallel(model)"
    return f"{accepted}, not {type(model).__name__}"


def _compare(handle: Handle, model: DistributedDataParallel, budget: float | None) -> None:
    """Check that all ranks attach the same; else they would send different bytes, or at different times."""
    if handle.world == 1:
        return
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    policy_of = handle.policy
    ladder = policy_of.ladder.levels if policy_of.ladder else ()
    used = [rule.codec for rule in policy_of.rules if rule.codec != LADDER]
    own = [identity(get_codec(each)) for each in (*used, *ladder)]
    rules = zlib.crc32(f"{policy_of.to_toml()}{own}".encode())
    detail = (
        f"rules {rules:08x}, seed {handle.seed}, double_buffer {handle.double_buffer}, shadow {handle.shadow}"
    )
    detail += f", error_budget {budget}" if budget is not None else ""
    name = AUTO if handle.auto is not None else policy_of.name
    process_group.runtime_of(handle.group, device).compare(Call("attach", name, (), "", "", detail))


def detach(model: DistributedDataParallel) -> None:
    """Let the model communicate as plain DDP, from the next backward pass on."""
    handle = attached(model)
    if handle is None:
        raise InputError("nothing is attached to this model")
    handle.detach()


def attached(model: nn.Module) -> Handle | None:
    """Return the handle attached to a model, or None."""
    hook_state = _hook_states.get(_compiled(model))
    return None if hook_state is None or hook_state.handle.detached else hook_state.handle


def _compiled(model: Any) -> Any:
    """Return the model that torch.compile wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def know(handle: Handle, net: nn.Module) -> None:
    """Give a handle the names of a network's parameters."""
    for tensor, parameter in zip(policy.describe(net), net.parameters(), strict=True):
        handle.tensors[id(parameter)] = parameter, tensor


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """A DDP communication hook; its state is a `Handle`, or a `HookState`."""
    handle = state.handle if isinstance(state, HookState) else state
    assert isinstance(handle, Handle)
    if handle.detached:
        return handle.promised(plain(bucket.buffer(), handle.group), bucket)
    if handle.step > COMPILING or handle.rank or not bucket.buffer().is_cuda:
        return handle.reduce(bucket)
    with warm.patience(tell, bucket.buffer().device):
        return handle.reduce(bucket)


def _first_line(handle: Handle, tensors: list[TensorInfo]) -> str:
    chosen = handle.policy
    if handle.auto is not None:
        return f"thinwire: auto: {len(tensors)} tensors; measuring during the first steps, in fp32"
    if chosen.name == NOOP:
        return "thinwire: noop: nothing is sent and replicas drift apart; for measuring only"
    rules = [chosen.route(tensor) for tensor in tensors]
    encoded = sum(rule.codec != "fp32" for rule in rules)
    sent = sum(wire_nbytes(rule, tensor.shape) for rule, tensor in zip(rules, tensors, strict=True))
    share = sent / max(1, sum(4 * tensor.numel for tensor in tensors))
    if not encoded and any(rule.codec != "fp32" for rule in chosen.rules):
        why = "; ".join(sorted({rule.why for rule in rules if rule.why})) or "their rules say fp32"
        return (
            f"thinwire: {chosen.name}: all {len(tensors)} tensors stay in fp32 ({why}): nothing is compressed"
        )
    return f"thinwire: {chosen.name}: compressing {encoded} of {len(tensors)} tensors, {share:.1%} of bytes"
