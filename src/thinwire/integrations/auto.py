"""Choosing a recipe by measuring: the fastest whose error is inside a budget, and float32 if that is as fast.

    steps 1 - 8    plain float32, timed: how long a step takes, when each bucket is ready; more of them, up
                   to 29, as long as steps still get faster
    then           every candidate sends these very buckets over this very link, twice; the second time counts
    steps 9 - 14   the fastest predicted one, timed; if it is slower than float32 was, the next one

A prediction starts from the measured float32 step and replaces what depends on the codec: how long buckets
are on their way, and the processor time which that takes from the backward pass where there is no core to
spare. Every number is a mean over ranks, so all ranks choose alike.
"""

import logging
import os
import platform
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire import policy as policies
from thinwire.codecs import get as get_codec
from thinwire.integrations.meter import Meter, round_trip_error
from thinwire.policy import Policy, Tensorlike
from thinwire.rounding import Stream

log = logging.getLogger(__name__)
CANDIDATES = ("fp32", "fp16", "int8", "int4", "onebit")
BUDGET = 0.2  #: relative error of a gradient after one round trip
FIRST, MOST = 8, 29  #: steps in float32, at least and at most
LOOK = 3  #: steps between looks at whether they still get faster
STEADY = 0.96  #: of the time of the steps before: then they do not
TRIAL = 5  #: steps that a choice is timed, after one that is not
SLOWER = 1.02  #: than float32: then the choice was wrong
GAIN = 0.97  #: of a float32 step: a gain that is worth an error
NEAR = 1.02  #: of the fastest: then the finest one is taken

Bucket = tuple[list[tuple[Tensorlike, Tensor]], Tensor]


class Line(Protocol):
    """What a pilot needs of a wire."""

    step: int
    meter: Meter

    @property
    def world(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def follow(self, policy: Policy) -> None: ...
    def agree(self, numbers: Tensor) -> Tensor: ...
    def probe(self, policy: Policy, buckets: Sequence[Bucket]) -> int:
        """Send copies of buckets as a policy says, and wait; the bytes sent."""


@dataclass(frozen=True)
class Profile:
    """A float32 step: its length, and when its buckets were ready, from the first one on."""

    step_s: float
    ready_s: tuple[float, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """All buckets with one codec, with nothing else going on."""

    wall_s: float
    cpu_s: float  #: of this process, in all its threads

    def load(self, crowd: float) -> float:
        """The share of a core that it takes."""
        return min(1.0, self.cpu_s * crowd / self.wall_s) if self.wall_s else 0.0


@dataclass(frozen=True)
class Candidate:
    """One row of the table that says why."""

    codec: str
    predicted_step_s: float
    sent_nbytes: int
    error: float
    allowed: bool
    why: str
    wall_s: float = 0.0  #: of all buckets, with nothing else going on
    cpu_s: float = 0.0


def slowdown(profile: Profile, cost: Cost, crowd: float) -> float:
    """By how much communication stretches a backward pass that it shares a core with.

    A crowd is ranks to a core; 0: there are cores to spare.
    """
    last, whole = profile.ready_s[-1], sum(profile.nbytes) or 1
    beside = min(last, cost.wall_s * sum(profile.nbytes[:-1]) / whole)
    return 1 + cost.load(crowd) * beside / last if last else 1.0


def communication_end(profile: Profile, cost: Cost, crowd: float = 0.0) -> float:
    """When the last bucket is back, counted from the first one's arrival.

    Buckets are on their way one after another, each for its share of the whole time, and for longer beside a
    backward pass that wants the same core. The profile is that of a backward pass with nothing beside it.
    """
    whole, at = sum(profile.nbytes) or 1, 0.0
    slower = slowdown(profile, cost, crowd)
    for ready, nbytes in zip(profile.ready_s, profile.nbytes, strict=True):
        begins, takes = max(at, ready * slower), cost.wall_s * nbytes / whole
        beside = min(takes, max(0.0, profile.ready_s[-1] * slower - begins))
        at = begins + takes + cost.load(crowd) * beside
    return at


def predict(profile: Profile, fp32: Cost, other: Cost, crowd: float = 0.0) -> float:
    """The length of a step with another codec.

    >>> link = Profile(1.0, (0.0, 0.1), (4_000_000, 4_000_000))
    >>> round(predict(link, Cost(0.8, 0.0), Cost(0.2, 0.0)), 3)
    0.4
    """
    seen = slowdown(profile, fp32, crowd)
    pure = replace(profile, ready_s=tuple(each / seen for each in profile.ready_s))
    before, after = (communication_end(pure, cost, crowd) for cost in (fp32, other))
    return max(profile.step_s - before + after, 1e-6)


@dataclass
class Pilot:
    """Finds a policy for a wire, in its first steps."""

    budget: float = BUDGET
    candidates: tuple[str, ...] = CANDIDATES
    chosen: str = "fp32"
    rows: list[Candidate] = field(default_factory=list)
    settled: bool = False
    fp32_step_s: float | None = None
    measured_step_s: float | None = None
    tried: dict[str, float] = field(default_factory=dict)  #: measured steps, by codec
    profile: Profile | None = None
    _kept: int = 0  #: the step whose buckets are kept
    _since: int = 0  #: the step at which the choice began
    _buckets: list[Bucket] = field(default_factory=list)
    _ready: list[list[float]] = field(default_factory=list)

    def see(self, line: Line, tensors: list[tuple[Tensorlike, Tensor]], buffer: Tensor) -> None:
        """A bucket before it is sent; one step's are kept, to be sent again."""
        if line.step != self._kept:
            return
        copy, first = buffer.detach().clone(), buffer.storage_offset()
        parts = [(t, copy.as_strided(g.size(), g.stride(), g.storage_offset() - first)) for t, g in tensors]
        self._buckets.append((parts, copy))

    def begin_step(self, line: Line) -> None:
        """At the first bucket of a step, after the one before has been counted."""
        if self.settled:
            return
        last = line.meter.last
        if last is not None and last.arrivals and not self.rows:
            self._ready.append([each - last.arrivals[0] for each in last.arrivals])
        if self.rows:
            if line.step == self._since + TRIAL + 1:
                self._judge(line)
        elif self._kept:
            self._choose(line)
        elif line.step >= FIRST and line.step % LOOK == FIRST % LOOK and self._is_steady(line):
            self._kept = line.step  # whose buckets are kept, to be sent again

    def _is_steady(self, line: Line) -> bool:
        """Whether steps have stopped getting faster, as they do at first; the same answer on all ranks."""
        times = list(line.meter.steps_s)
        now, before = (statistics.median(each) for each in (times[-LOOK:], times[-2 * LOOK : -LOOK]))
        return line.agree(torch.tensor([now / before])).item() > STEADY or line.step >= MOST

    def _choose(self, line: Line) -> None:
        profile = self._profile(line)
        if line.world == 1 or not self._buckets:
            self.settled = True
            return
        self.fp32_step_s = profile.step_s
        crowd = _crowd(line)
        errors = {name: self._error(name) for name in self.candidates}
        costs, sent = {}, {}
        for name in self.candidates:
            costs[name], sent[name] = self._cost(line, policies.get(name))
        numbers = [profile.step_s, *profile.ready_s, *errors.values()]
        numbers += [each for cost in costs.values() for each in (cost.wall_s, cost.cpu_s)]
        agreed = iter(line.agree(torch.tensor(numbers, dtype=torch.float32)).tolist())
        profile = Profile(next(agreed), tuple(next(agreed) for _ in profile.ready_s), profile.nbytes)
        self.profile, errors = profile, {name: next(agreed) for name in errors}
        costs = {name: Cost(next(agreed), next(agreed)) for name in costs}
        for name in self.candidates:
            cost = costs[name]
            step_s = predict(profile, costs["fp32"], cost, crowd)
            allowed = errors[name] <= self.budget
            why = (
                f"error {errors[name]:.2g} is {'inside' if allowed else 'over'} the budget of {self.budget:g}"
            )
            row = Candidate(name, step_s, sent[name], errors[name], allowed, why, cost.wall_s, cost.cpu_s)
            self.rows.append(row)
        self._buckets.clear()
        self._take(line, self._next())
        if line.rank == 0:
            log.info("%s", self.explain())

    def _profile(self, line: Line) -> Profile:
        buckets = len(self._buckets)
        recent = self._ready[-LOOK - 1 :]
        ready = [each for each in recent if len(each) == buckets] or [[0.0] * buckets]
        steps_s = list(line.meter.steps_s)[-LOOK - 1 :]
        means = tuple(statistics.median(each) for each in zip(*ready, strict=True))
        nbytes = tuple(buffer.nbytes for _, buffer in self._buckets)
        return Profile(statistics.median(steps_s) if steps_s else 0.0, means, nbytes)

    def _cost(self, line: Line, policy: Policy) -> tuple[Cost, int]:
        sent = line.probe(policy, self._buckets)  # compiles, compares calls, makes buffers
        line.agree(torch.zeros(1))  # all begin together
        began, began_cpu = time.perf_counter(), time.process_time()
        line.probe(policy, self._buckets)
        return Cost(time.perf_counter() - began, time.process_time() - began_cpu), sent

    def _error(self, name: str) -> float:
        """Of the whole gradient, from samples of its tensors."""
        lost = whole = 0.0
        for tensors, _ in self._buckets:
            for tensor, gradient in tensors:
                rule, size = policies.get(name).route(tensor), gradient.float().norm().item() ** 2
                codec, whole = get_codec(rule.codec).for_shape(tensor.shape), whole + size
                if codec.name != "fp32" and size:
                    rng = Stream(0, tensor=f"{tensor.name}/auto")
                    lost += size * round_trip_error(codec, gradient, rng) ** 2
        return (lost / whole) ** 0.5 if whole else 0.0

    def _next(self) -> str:
        """The fastest that is allowed and was not tried in vain."""
        fp32 = self.rows[0]
        left = [row for row in self.rows if row.allowed and row.codec not in self.tried] or [fp32]
        fastest = min(row.predicted_step_s for row in left)
        near = [row for row in left if row.predicted_step_s <= NEAR * fastest]
        best = min(near, key=lambda row: row.error)
        return best.codec if best.predicted_step_s < GAIN * fp32.predicted_step_s else fp32.codec

    def _take(self, line: Line, name: str) -> None:
        self.chosen, self._since = name, line.step
        line.follow(policies.get(name))

    def _judge(self, line: Line) -> None:
        measured = statistics.median(list(line.meter.steps_s)[-TRIAL:])
        self.measured_step_s = line.agree(torch.tensor([measured], dtype=torch.float32)).item()
        self.tried[self.chosen] = self.measured_step_s
        assert self.fp32_step_s is not None
        if (
            self.chosen == "fp32"
            or self.measured_step_s <= SLOWER * self.rows_by_name["fp32"].predicted_step_s
        ):
            self.settled = True
            if line.rank == 0:
                log.info("thinwire: auto keeps %s: %s", self.chosen, self._compared())
            return
        if line.rank == 0:
            log.info("thinwire: auto drops %s: %s", self.chosen, self._compared())
        self._take(line, self._next())

    def _compared(self) -> str:
        row = self.rows_by_name[self.chosen]
        predicted, measured = row.predicted_step_s * 1e3, self.tried[self.chosen] * 1e3
        return f"predicted {predicted:.1f} ms a step, measured {measured:.1f}"

    @property
    def rows_by_name(self) -> dict[str, Candidate]:
        return {row.codec: row for row in self.rows}

    def explain(self) -> str:
        """The table that says why."""
        lines = ["thinwire: auto", f"{'codec':10}{'ms a step':>10}{'MB sent':>10}{'error':>10}  "]
        for row in self.rows:
            mark = "  <- chosen" if row.codec == self.chosen else "" if row.allowed else f"  {row.why}"
            numbers = f"{row.predicted_step_s * 1e3:10.1f}{row.sent_nbytes / 1e6:10.2f}{row.error:10.2g}"
            lines.append(f"{row.codec:10}{numbers}{mark}")
        return "\n".join(lines)

    def describe(self) -> dict[str, Any]:
        """For `stats`."""
        row = self.rows_by_name.get(self.chosen)
        return {
            "chosen": self.chosen,
            "settled": self.settled,
            "budget": self.budget,
            "fp32_step_s": self.fp32_step_s,
            "profile": asdict(self.profile) if self.profile else None,
            "predicted_step_s": row.predicted_step_s if row else None,
            "measured_step_s": self.measured_step_s,
            "tried": dict(self.tried),
            "candidates": [asdict(each) for each in self.rows],
        }

    def state_dict(self) -> dict[str, Any]:
        """What was chosen, if anything."""
        return {**self.describe(), "rows": [asdict(each) for each in self.rows]} if self.settled else {}

    def load_state_dict(self, line: Line, state: Mapping[str, Any]) -> None:
        """Keep the choice of the run before."""
        self.rows = [Candidate(**each) for each in state["rows"]]
        self.chosen, self.settled, self.tried = state["chosen"], True, dict(state["tried"])
        self.fp32_step_s, self.measured_step_s = state["fp32_step_s"], state["measured_step_s"]
        line.follow(policies.get(self.chosen))


def _crowd(line: Line) -> float:
    """Ranks to a core of this machine, if none is to spare for communication; else 0."""
    numbers = torch.zeros(line.world)
    numbers[line.rank] = _machine() * line.world
    everyone = line.agree(numbers).round().tolist()
    here = everyone.count(everyone[line.rank])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lacks = cores / here < torch.get_num_threads() + 1
    return line.agree(torch.tensor([max(1.0, here / cores) if lacks else 0.0])).item()


def _machine() -> int:
    """A number for this machine that a float32 holds."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return zlib.crc32(text.encode()) & 0xFFFF
