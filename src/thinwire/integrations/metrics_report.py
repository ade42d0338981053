"""Statistics of a handle, as plain numbers."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from thinwire.codecs import Cast
from thinwire.codecs import get as get_codec
from thinwire.integrations.metrics import Metrics, snr_db, total
from thinwire.integrations.routes import schedule_of
from thinwire.policy import Policy, Rule, TensorInfo
from thinwire.schedules.low_rank import LOW_RANK, matrix, shrinks

if TYPE_CHECKING:
    from thinwire.integrations.handle import Handle


def describe(handle: "Handle") -> dict[str, Any]:
    """Return one rank's counts.

    `steps` counts steps since attaching, as bytes and seconds do; `step` is the step of the run.
    `seconds` are totals: encode, wire and decode of the thread (on a GPU: the streams) that communicates,
    and the wait of training itself. `usual_s` are seconds per step, without the first two steps.
    `buffers_nbytes` is memory for wires, `residuals_nbytes` memory for error feedback.
    `error` is the error of one round trip through the codec, measured every 100 steps. `true_error` is the
    error of the reduced gradient against float32, in shadow mode. `auto` holds its candidates and choice;
    then `label` names the choice, and `since` has steps and bytes since the choice.
    """
    ladder_state = handle.ladder_state
    layers = {tensor.name: _layer(handle, tensor) for tensor in handle.trained}
    return {
        **brief(handle),
        "world": handle.world,
        "step": handle.step,
        "buffers_nbytes": handle.buffers_nbytes,
        "residuals_nbytes": sum(
            residual.nbytes for channel in handle.channels.values() for residual in channel.residuals.values()
        ),
        "layers": layers,
        "uncompressed": uncompressed(layers),
        "level": ladder_state.ladder.levels[ladder_state.level] if ladder_state else None,
        "auto": handle.auto.describe() if handle.auto is not None else None,
    }


class Chooses(Protocol):
    """What `brief` reads of `auto`."""

    @property
    def settled(self) -> bool: ...


class Counted(Protocol):
    """What `brief` reads of a handle."""

    tells_wait: ClassVar[bool]  #: whether metrics know how long training waited

    @property
    def policy(self) -> Policy: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def auto(self) -> Chooses | None: ...


def brief(handle: Counted) -> dict[str, Any]:
    """Return the part that reads no tensor, so that any thread may ask without disturbing training."""
    metrics = handle.metrics
    return {
        "policy": handle.policy.name,
        "label": _label(handle),
        "since": metrics.since(),
        "steps": metrics.steps,
        "sent_nbytes": metrics.sent_nbytes,
        "fp32_nbytes": metrics.fp32_nbytes,
        "ratio": metrics.fp32_nbytes / metrics.sent_nbytes if metrics.sent_nbytes else 1.0,
        "step_s": metrics.step_s(),
        "seconds": metrics.seconds(),
        "usual_s": metrics.usual_s(),
        "overlap": metrics.overlap() if handle.tells_wait else None,
    }


def _label(handle: Counted) -> str:
    """Return the policy's name, and whether `auto` chose it or still measures."""
    if handle.auto is None:
        return handle.policy.name
    return (
        f"auto -> {handle.policy.name}" if handle.auto.settled else f"auto (measuring, {handle.policy.name})"
    )


def _layer(handle: "Handle", tensor: TensorInfo) -> dict[str, Any]:
    level = handle.ladder_state.level if handle.ladder_state else 0
    rule = handle.policy.route(tensor, max(0, handle.step - 1), handle.epoch, level)
    error, true_error = (
        None if tensor.name not in errors else float(errors[tensor.name])
        for errors in (handle.metrics.errors, handle.metrics.true_errors)
    )
    channel = handle.channels.get(rule.codec)
    return {
        "codec": rule.codec,
        "schedule": schedule_of(rule, tensor.numel, handle.world),
        "numel": tensor.numel,
        "wire_nbytes": wire_nbytes(rule, tensor.shape),
        "error": error,
        "snr_db": snr_db(error),
        "true_error": true_error,
        "residual_norm": total(channel.residuals_of(tensor.name).values()) if channel else None,
        "why": rule.why,
    }


def wire_nbytes(rule: Rule, shape: tuple[int, ...]) -> int:
    """Bytes of one tensor's wire; with PowerSGD, of its two matrices."""
    codec = get_codec(rule.codec).for_shape(shape)
    name, _, rank = rule.schedule.partition("/")
    rows, columns = matrix(shape)
    if name == LOW_RANK and isinstance(codec, Cast) and shrinks(rows, columns, int(rank or 1)):
        return (rows + columns) * int(rank or 1) * codec.torch_dtype.itemsize
    return codec.nbytes(math.prod(shape))


def uncompressed(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Count the tensors that stay in float32, and say why."""
    left = [layer for layer in layers.values() if layer["codec"] == "fp32"]
    numel = sum(layer["numel"] for layer in layers.values())
    return {
        "tensors": len(left),
        "share_of_tensors": len(left) / len(layers) if layers else 0.0,
        "share_of_bytes": sum(layer["numel"] for layer in left) / numel if numel else 0.0,
        "why": dict(Counter(layer["why"] or "the policy says fp32" for layer in left)),
    }
