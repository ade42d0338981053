"""What a wire did, as plain numbers."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thinwire.codecs import Cast
from thinwire.codecs import get as get_codec
from thinwire.integrations.meter import snr_db, total
from thinwire.policy import Rule, Tensorlike
from thinwire.schedules.low_rank import LOW_RANK, matrix, shrinks

if TYPE_CHECKING:
    from thinwire.integrations.wire import Wire


def describe(wire: "Wire") -> dict[str, Any]:
    """One rank's counts.

    `steps` are those that bytes and seconds were counted in, since attaching; `step` is that of the run.
    `seconds` are totals: encode, wire and decode of the thread (on a GPU: the streams) that communicates,
    wait of training itself; `usual_s` are those of a step, without the first two. `buffers_nbytes` are kept
    for wires, `residuals_nbytes` for error feedback.
    `error` is what one round trip through the codec loses, measured every 100 steps; `true_error` that of
    the reduced gradient against float32, in shadow mode. `auto` is what it weighed and chose; `label`
    then says so, and `since` has steps and bytes since the choice.
    """
    climber = wire.climber
    layers = {tensor.name: _layer(wire, tensor) for tensor in wire.trained}
    return {
        **brief(wire),
        "world": wire.world,
        "step": wire.step,
        "buffers_nbytes": wire.buffers_nbytes,
        "residuals_nbytes": sum(
            held.nbytes for channel in wire.channels.values() for held in channel.residuals.values()
        ),
        "layers": layers,
        "uncompressed": _uncompressed(layers),
        "level": climber.ladder.levels[climber.level] if climber else None,
        "auto": wire.pilot.describe() if wire.pilot is not None else None,
    }


def brief(wire: "Wire") -> dict[str, Any]:
    """The part that looks at no tensor, so that training is not disturbed, whichever thread asks."""
    meter = wire.meter
    return {
        "policy": wire.policy.name,
        "label": _label(wire),
        "since": meter.since(),
        "steps": meter.steps,
        "sent_nbytes": meter.sent_nbytes,
        "fp32_nbytes": meter.fp32_nbytes,
        "ratio": meter.fp32_nbytes / meter.sent_nbytes if meter.sent_nbytes else 1.0,
        "step_s": meter.step_s(),
        "seconds": meter.seconds(),
        "usual_s": meter.usual_s(),
        "overlap": meter.overlap(),
    }


def _label(wire: "Wire") -> str:
    """The policy, and whether it was chosen."""
    if wire.pilot is None:
        return wire.policy.name
    return f"auto -> {wire.policy.name}" if wire.pilot.settled else f"auto (measuring, {wire.policy.name})"


def _layer(wire: "Wire", tensor: Tensorlike) -> dict[str, Any]:
    level = wire.climber.level if wire.climber else 0
    rule = wire.policy.route(tensor, max(0, wire.step - 1), wire.epoch, level)
    error, true_error = (
        None if tensor.name not in held else float(held[tensor.name])
        for held in (wire.meter.errors, wire.meter.true_errors)
    )
    channel = wire.channels.get(rule.codec)
    return {
        "codec": rule.codec,
        "schedule": wire.schedule(rule, tensor.numel),
        "numel": tensor.numel,
        "wire_nbytes": wire_nbytes(rule, tensor.shape),
        "error": error,
        "snr_db": snr_db(error),
        "true_error": true_error,
        "residual_norm": total(channel.owed(tensor.name).values()) if channel else None,
        "why": rule.why,
    }


def wire_nbytes(rule: Rule, shape: tuple[int, ...]) -> int:
    """Of one tensor; with PowerSGD, of its two matrices."""
    codec = get_codec(rule.codec).for_shape(shape)
    name, _, rank = rule.schedule.partition("/")
    rows, columns = matrix(shape)
    if name == LOW_RANK and isinstance(codec, Cast) and shrinks(rows, columns, int(rank or 1)):
        return (rows + columns) * int(rank or 1) * codec.torch_dtype.itemsize
    return codec.nbytes(math.prod(shape))


def _uncompressed(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    left = [each for each in layers.values() if each["codec"] == "fp32"]
    numel = sum(each["numel"] for each in layers.values())
    return {
        "tensors": len(left),
        "share_of_tensors": len(left) / len(layers) if layers else 0.0,
        "share_of_bytes": sum(each["numel"] for each in left) / numel if numel else 0.0,
        "why": dict(Counter(each["why"] or "the policy says fp32" for each in left)),
    }
