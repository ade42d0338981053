"""Statistics of a sharded model's handle, as plain numbers."""

from typing import TYPE_CHECKING, Any

from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.integrations.metrics import total
from thinwire.integrations.metrics_report import brief, uncompressed
from thinwire.integrations.sharded_calls import Direction

if TYPE_CHECKING:
    from thinwire.integrations.sharded import ShardedHandle


def describe(handle: "ShardedHandle") -> dict[str, Any]:
    """Return one rank's counts.

    `sent_nbytes` counts all directions, `fp32_nbytes` what torch would have sent: 2 bytes per element where
    FSDP reduces in 16 bits. `directions` counts gradients, weights and the all-reduce of replicas apart.
    `layers` are about the gradients.
    """
    sends = handle.averages if handle.replicas is not None else handle.gradients
    layers = {each.name: _layer(handle, sends, each.name) for each in handle.trained}
    channels: list[Channel] = [
        channel for direction in handle.directions for channel in direction.channels.values()
    ]
    return {
        **brief(handle),
        "world": handle.world,
        "step": handle.step,
        "directions": {each.name: each.describe() for each in handle.directions if each.plain_nbytes},
        "residuals_nbytes": sum(each.nbytes for channel in channels for each in channel.residuals.values()),
        "layers": layers,
        "uncompressed": uncompressed(layers),
        "level": None,
        "auto": handle.auto.describe() if handle.auto is not None else None,
    }


def _layer(handle: "ShardedHandle", direction: Direction, name: str) -> dict[str, Any]:
    parameter = handle.tensors[name]
    step = max(0, handle.step - 1)
    rule = direction.rule(parameter.info, step, handle.epoch) if direction.policy is not None else None
    codec = rule.codec if rule is not None else "fp32"
    channel = direction.channels.get(codec)
    return {
        "codec": codec,
        "schedule": "all_reduce" if direction is handle.averages else "reduce_scatter",
        "numel": parameter.info.numel,
        "wire_nbytes": handle.shards.size() * get_codec(codec).nbytes(parameter.numel),
        "error": None,
        "snr_db": None,
        "true_error": None,
        "residual_norm": total(channel.residuals_of(name).values()) if channel else None,
        "why": rule.why if rule is not None else "as torch sends it",
    }
