"""Errors of codecs on gradients, measured every `EVERY` steps before they are sent."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.codecs import get as get_codec
from thinwire.integrations.metrics import round_trip_error
from thinwire.integrations.routes import BucketPlan
from thinwire.rounding import Stream
from thinwire.schedules.low_rank import LOW_RANK

EVERY = 100  #: steps between measurements of a tensor
AT_ONCE = 8  #: tensors of a bucket that are measured in one step, on a GPU


@dataclass
class Sampler:
    """Measures each tensor's round-trip error; a tensor whose codec changes is due at once."""

    seed: int
    errors: MutableMapping[str, Tensor | float]  #: relative, by tensor
    _measured: dict[str, tuple[str, int]] = field(default_factory=dict)  #: codec and step, by tensor

    def look(self, plan: BucketPlan, buffer: Tensor, step: int) -> None:
        """Measure the tensors of a bucket that are due, before it is sent."""
        if step < plan.due:
            return
        left = AT_ONCE if buffer.is_cuda else len(plan.sent)
        for sent, where in zip(plan.sent, plan.places, strict=True):
            name, spec = sent.tensor.name, sent.rule.codec
            if spec == "fp32" or sent.route.schedule.startswith(
                LOW_RANK
            ):  # only shadow mode measures their error
                self.errors.pop(name, None)
                self._measured.pop(name, None)
                continue
            known, at = self._measured.get(name, ("", 0))
            if not left or (known == spec and step < at + EVERY):
                continue
            codec, rng = get_codec(spec), Stream(self.seed, step=step, tensor=name)
            error = round_trip_error(codec.for_shape(sent.tensor.shape), where.of(buffer), rng)
            if buffer.is_cuda or bool(error.isfinite()):  # else measure again in the next step
                self.errors[name], self._measured[name] = error, (spec, step)
            left -= 1
        last = min(self._measured.get(sent.tensor.name, ("", step))[1] for sent in plan.sent)
        plan.due = last + EVERY if left else step + 1
