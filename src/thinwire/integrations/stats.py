"""What a wire did, as plain numbers."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thinwire.codecs import get as get_codec
from thinwire.integrations.meter import snr_db, total
from thinwire.policy import Tensorlike

if TYPE_CHECKING:
    from thinwire.integrations.wire import Wire


def describe(wire: "Wire") -> dict[str, Any]:
    """One rank's counts.

    `seconds` are totals: encode, wire and decode of the thread that communicates, wait of training itself.
    `error` is what one round trip through the codec loses, measured every 100 steps; `true_error` that of
    the reduced gradient against float32, in shadow mode. `auto` is what it weighed and chose.
    """
    meter, climber = wire.meter, wire.climber
    layers = {tensor.name: _layer(wire, tensor) for _, tensor in list(wire.tensors.values())}
    return {
        "policy": wire.policy.name,
        "world": wire.world,
        "steps": wire.step,
        "sent_nbytes": meter.sent_nbytes,
        "fp32_nbytes": meter.fp32_nbytes,
        "ratio": meter.fp32_nbytes / meter.sent_nbytes if meter.sent_nbytes else 1.0,
        "step_s": meter.step_s(),
        "seconds": meter.seconds(),
        "overlap": meter.overlap(),
        "layers": layers,
        "uncompressed": _uncompressed(layers),
        "level": climber.ladder.levels[climber.level] if climber else None,
        "auto": wire.pilot.describe() if wire.pilot is not None else None,
    }


def _layer(wire: "Wire", tensor: Tensorlike) -> dict[str, Any]:
    level = wire.climber.level if wire.climber else 0
    rule = wire.policy.route(tensor, max(0, wire.step - 1), wire.epoch, level)
    codec, error = get_codec(rule.codec).for_shape(tensor.shape), wire.meter.errors.get(tensor.name)
    channel = wire.channels.get(rule.codec)
    return {
        "codec": rule.codec,
        "schedule": wire.schedule(rule, tensor.numel),
        "numel": tensor.numel,
        "wire_nbytes": codec.nbytes(tensor.numel),
        "error": error,
        "snr_db": snr_db(error),
        "true_error": wire.meter.true_errors.get(tensor.name),
        "residual_norm": total(channel.owed(tensor.name).values()) if channel else None,
        "why": rule.why,
    }


def _uncompressed(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    left = [each for each in layers.values() if each["codec"] == "fp32"]
    numel = sum(each["numel"] for each in layers.values())
    return {
        "tensors": len(left),
        "share_of_tensors": len(left) / len(layers) if layers else 0.0,
        "share_of_bytes": sum(each["numel"] for each in left) / numel if numel else 0.0,
        "why": dict(Counter(each["why"] or "the policy says fp32" for each in left)),
    }
