"""FSDP2 and HSDP (`fully_shard`): gradients are reduced, and weights gathered, as codes.

fully_shard(model)
handle = thinwire.attach(model, "int8", weights="int8")          # one line
"""

import zlib

from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire import policy
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import Disagreement, InputError
from thinwire.integrations.fsdp_seam import ShardedGroup, ShardedParameter, is_plain, owners, sharded_groups
from thinwire.integrations.sharded import ShardedHandle
from thinwire.integrations.sharded_auto import ShardedAuto
from thinwire.integrations.sharded_calls import Direction
from thinwire.integrations.tell import tell
from thinwire.policy import Policy
from thinwire.rounding import Stream
from thinwire.runtimes import process_group
from thinwire.runtimes.job import Call

AUTO = "auto"
MB = 1e6


def attach(
    model: nn.Module,
    codec: AnySpec | Policy = "int8",
    *,
    weights: AnySpec | Policy | None = None,
    inside: AnySpec | Policy | None = None,
    seed: int = 0,
) -> ShardedHandle:
    """Send the gradients, and if asked the weights, of a sharded model by policies.

    `model` is the outermost module that `fully_shard` was applied to. Return a handle, which counts bytes and
    owns the residuals. Attaching again replaces the handle.

    codec: of gradients: a recipe, a spec, a `Codec`, a `Format`, a TOML file or a `Policy`. With HSDP it is
        for the all-reduce between replicas, which is where the slow links usually are. `auto` tries codecs of
        gradients and weights in the first steps, and keeps the fastest, or what torch sends.
    weights: of the all-gather of weights; None sends them as torch does. All ranks compute with the decoded
        weights, in the forward and in the backward pass; the optimizer's own weights stay as they are.
    inside: with HSDP, of the reduce-scatter among the ranks that share a replica; None: as torch does.
    seed: of random rounding.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    groups = _checked(model)
    chooses = weights is None and groups[0].replicas is None
    auto = ShardedAuto(chooses_weights=chooses) if codec == AUTO else None
    gradients = policy.get("fp32" if auto is not None else codec)
    Stream(seed)  # refuses what is no seed
    if inside is not None and groups[0].replicas is None:
        raise InputError("inside= is for HSDP, a mesh of two dimensions; this model has one: leave it out")
    handle = ShardedHandle(
        gradients,
        groups,
        None if weights is None else policy.get(weights),
        None if inside is None else policy.get(inside),
        seed,
        auto=auto,
    )
    _compare(handle)
    lines = _first_lines(handle)  # on all ranks: it raises if no rule matches a tensor
    for before in owners(model):
        assert isinstance(before, ShardedHandle)
        before.detach()
    for group in groups:
        gather = handle.gather if handle.weights is not None or auto is not None else None
        average = handle.average if group.replicas is not None else None
        group.install(handle.reduce, gather, average)
    if handle.rank == 0:
        for line in lines:
            tell(line)
    return handle


def attached(model: nn.Module) -> ShardedHandle | None:
    """Return the handle attached to a sharded model, or None."""
    handles = owners(model)
    return handles[0] if handles and isinstance(handles[0], ShardedHandle) else None


def _checked(model: nn.Module) -> list[ShardedGroup]:
    """Return the model's groups, or say why thinwire cannot send them."""
    if not isinstance(model, FSDPModule):
        kind = type(model).__name__
        raise InputError(f"fully_shard was not applied to this {kind}: call it first, then attach")
    groups = [group for group in sharded_groups(model) if group.parameters]
    if not groups:
        raise InputError("this model has no sharded parameters")
    if not all(group.is_sharded for group in groups):
        raise InputError(
            "the model's parameters are replicated, not sharded: use fully_shard, or DistributedDataParallel"
        )
    if len({(id(group.shards), id(group.replicas)) for group in groups}) > 1:
        raise InputError("the model's modules have different meshes; shard all of them over one mesh")
    for group in groups:
        if not is_plain(group.inner._reduce_scatter_comm) or not is_plain(group.inner._all_gather_comm):
            raise InputError(
                "the model has a communication of its own (set_custom_reduce_scatter, set_custom_all_gather, "
                "symmetric memory or memory of the process group), which thinwire would replace"
            )
    return groups


def _compare(handle: ShardedHandle) -> None:
    """Check that all ranks attach the same."""
    detail = f"seed {handle.seed}"
    for direction in handle.directions:
        if direction.policy is not None:
            own = [identity(get_codec(rule.codec)) for rule in direction.policy.rules]
            rules = zlib.crc32(f"{direction.policy.to_toml()}{own}".encode())
            detail += f", {direction.name} {direction.policy.name} with rules {rules:08x}"
    name = AUTO if handle.auto is not None else handle.policy.name
    wrong: Disagreement | None = None
    for group in (handle.shards, handle.replicas):
        if group is not None and group.size() > 1:
            if wrong is not None:  # other replicas wait in this call, and learn of it here
                detail += "; but the ranks of this rank's replica disagree"
            call = Call("attach", name, (), "", "", detail)
            try:
                process_group.runtime_of(group, handle.device).compare(call)
            except Disagreement as error:
                wrong = wrong or error
    if wrong is not None:
        raise wrong


def _first_lines(handle: ShardedHandle) -> list[str]:
    """Say what is compressed, and how much memory residuals need."""
    if handle.auto is not None:
        return ["thinwire: auto: measuring during the first steps, beginning with what torch sends"]
    lines = [
        f"thinwire: {direction.name}: {_share(handle, direction)}"
        for direction in handle.directions
        if direction.policy is not None
    ]
    residuals = _residuals(handle)
    if residuals:
        lines.append(
            f"thinwire: error feedback keeps residuals of {residuals / MB:,.1f} MB on every rank; "
            "'+ef:bf16' halves that, '+ef:8bit' takes a quarter"
        )
    return lines


def _share(handle: ShardedHandle, direction: Direction) -> str:
    assert direction.policy is not None
    if direction.is_noop:
        return "noop: nothing is sent, and ranks drift apart; for measuring only"
    if direction is handle.averages and handle.replicas is not None and handle.replicas.size() == 1:
        return "there is one replica, so nothing is sent between replicas; inside= is for its own ranks"
    rules = [(each, direction.rule(each.info, 0, 0)) for each in _sent(handle, direction)]
    encoded = [(each, rule) for each, rule in rules if rule.codec != "fp32"]
    elements = sum(each.numel for each, _ in rules)
    part = sum(each.numel for each, _ in encoded) / max(1, elements)
    bits = 8 * sum(get_codec(rule.codec).nbytes(each.numel) for each, rule in encoded)
    width = bits / max(1, sum(each.numel for each, _ in encoded))
    what = f"{direction.policy.name} on {len(encoded)} of {len(rules)} tensors, {part:.1%} of elements"
    return f"{what}, {width:.2f} bits each" if encoded else f"{direction.policy.name}: nothing is compressed"


def _sent(handle: ShardedHandle, direction: Direction) -> list[ShardedParameter]:
    """The parameters that a direction sends: frozen ones have weights, but no gradients."""
    trained = {info.name for info in handle.trained}
    every = direction is handle.parameters
    return [each for name, each in handle.tensors.items() if every or name in trained]


def _residuals(handle: ShardedHandle) -> int:
    """Bytes of residuals that will be kept on this rank."""
    nbytes = {"": 0.0, "float32": 4.0, "bfloat16": 2.0, "int8": 260 / 256}
    total = 0.0
    for direction, copies in ((handle.gradients, handle.shards.size()), (handle.averages, 1)):
        for each in _sent(handle, direction) if direction.policy is not None else ():
            feedback = get_codec(direction.rule(each.info, 0, 0).codec).feedback
            total += copies * each.numel * nbytes.get(feedback, 4.0)
    return round(total)
