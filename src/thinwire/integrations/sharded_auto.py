"""`auto` for sharded models: it trains a few steps with each candidate, and keeps the fastest.

A candidate is a codec of gradients and, if the weights are to be chosen too, one of weights. Times are from
the first reduction of one backward pass to that of the next, averaged over ranks, so all ranks choose the
same. A candidate with fewer bits must be faster by more than `GAIN`: otherwise the one with more bits stays.
"""

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire import policy as policies
from thinwire.integrations.tell import tell

if TYPE_CHECKING:
    from thinwire.integrations.sharded import ShardedHandle


class Candidate(NamedTuple):
    """Codecs of gradients and of weights."""

    gradients: str
    weights: str | None

    def __str__(self) -> str:
        return self.gradients if self.weights is None else f"{self.gradients}, weights {self.weights}"


#: From many bits to few.
CANDIDATES = (Candidate("fp32", None), Candidate("int8", "int8"), Candidate("int4", "int8"))
TRIAL = 5  #: steps that are timed
SETTLE = {"cpu": 2, "cuda": 8}  #: steps before them: a GPU compiles and records its calls
GAIN = 0.97  #: a candidate must take less than this share of the time of the one before


@dataclass
class ShardedAuto:
    """The choice of one handle: which candidate it tries, and how long their steps took."""

    chooses_weights: bool = True
    seconds: list[float] = field(default_factory=list)  #: of a step, by candidate
    chosen: Candidate | None = None
    _since: int = -1  #: the step at which the current candidate began

    @property
    def settled(self) -> bool:
        return self.chosen is not None

    def begin_step(self, handle: "ShardedHandle") -> None:
        """Look at the steps so far, when a new one begins; go on to the next candidate, or choose."""
        if self.settled:
            return
        if self._since < 0:
            self._try(handle)
            return
        if handle.step - self._since < SETTLE[handle.device.type] + TRIAL:
            return
        own = statistics.median(handle.metrics.steps_s(TRIAL, waits=True))
        self.seconds.append(handle.agree(own))
        if len(self.seconds) < len(CANDIDATES):
            self._try(handle)
            return
        self.chosen = best(self.seconds)
        handle.follow(*self._policies(self.chosen))
        handle.metrics.mark()
        if handle.rank == 0:
            pairs = zip(CANDIDATES, self.seconds, strict=True)
            times = "; ".join(f"{each}: {seconds * 1e3:,.1f}" for each, seconds in pairs)
            tell(f"thinwire: auto: {self.chosen} from step {handle.step} on; ms of a step: {times}")

    def _try(self, handle: "ShardedHandle") -> None:
        self._since = handle.step
        handle.follow(*self._policies(CANDIDATES[len(self.seconds)]))

    def _policies(self, candidate: Candidate) -> tuple[Any, Any]:
        weights = candidate.weights if self.chooses_weights else None
        return policies.get(candidate.gradients), None if weights is None else policies.get(weights)

    def settle(self, handle: "ShardedHandle", name: str) -> bool:
        """Continue with the choice of another run, by its name; False if it made none."""
        for candidate in CANDIDATES:
            if str(candidate) == name:
                self.chosen = candidate
                handle.follow(*self._policies(candidate))
                return True
        return False

    def describe(self) -> dict[str, Any]:
        """Return the times and the choice as plain data."""
        measured = dict(zip(map(str, CANDIDATES), self.seconds, strict=False))
        fastest = None if self.chosen is None else measured.get(str(self.chosen))
        return {
            "chosen": None if self.chosen is None else str(self.chosen),
            "candidates": measured,
            "fp32_step_s": self.seconds[0] if self.seconds else None,
            "predicted_step_s": None,
            "measured_step_s": fastest,
        }


def best(seconds: list[float]) -> Candidate:
    """Return the candidate to keep, given the seconds of a step with each.

    >>> str(best([1.0, 0.98, 0.5])), str(best([1.0, 0.5, 0.49])), str(best([1.0, 1.2, 0.99]))
    ('int4, weights int8', 'int8, weights int8', 'fp32')
    """
    chosen = 0
    for i in range(1, len(seconds)):
        if seconds[i] < GAIN * seconds[chosen]:
            chosen = i
    return CANDIDATES[chosen]
