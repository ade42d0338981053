"""Choose a recipe by measuring: the fastest whose error is inside a budget, or float32 if that is as fast.

    steps 1 - 8     plain float32, timed: how long a step takes, when each bucket is ready; more of them, up
                    to 29, as long as steps still get faster
    4 steps more    on a GPU: plain float32, sent when the backward pass is over, timed
    8 steps more    plain float32; on these gradients the error of each candidate is measured
    then            every candidate sends one step's buckets over this link, twice; the second counts
    6 steps each    the fastest predicted ones are tried, and the fastest measured one is kept;
                    on a GPU 9 steps, so that calls are recorded before they are timed

The choice is a generator, as schedules are: it asks for measurements, and the trainer answers (see
`auto_driver`). Every answer is a mean over ranks, so all ranks choose the same.

A prediction starts from the measured float32 step and replaces what depends on the codec: the time to send
buckets, and how much that slows the backward pass. On a CPU it costs processor time, if there is no core to
spare. On a GPU both share the processors in ways that differ from machine to machine: steps in which nothing
is sent before the backward pass ends show how much communication was hidden behind it.

A codec is judged by the error that reaches the weights. Without error feedback that is the error of one
round trip. With feedback, values that are not sent now are sent later: the error is the residual that is
left, relative to the sum of the gradients of `HORIZON` steps.
"""

import statistics
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from thinwire.errors import InputError

CANDIDATES = ("fp32", "fp16", "int8", "int4", "onebit", "powersgd")
BUDGET = 0.2  #: largest relative error that may reach the weights
FIRST, MOST = 8, 29  #: steps in float32, at least and at most
LOOK = 3  #: steps between checks whether they still get faster
STEADY = 0.96  #: steps got faster if they took at most this share of those before
AUDIT = 8  #: steps on whose gradients errors are measured
HORIZON = 32  #: steps over which a residual counts
TRIAL = 5  #: steps for which a recipe is timed, after one that is not
TRIES = 4  #: recipes that are tried, at most
HOPE = 1.05  #: a recipe is tried if predicted below this multiple of the fastest measured
GAIN = 0.97  #: a recipe must be faster than this share of a float32 step
NEAR = 1.02  #: up to this multiple of the fastest, the smallest error decides


# Questions and answers


@dataclass(frozen=True)
class Steps:
    """Train `count` more steps with the current recipe, and time them. Answered by a `Profile`."""

    count: int


@dataclass(frozen=True)
class Apart:
    """The same, with nothing sent before the backward pass ends."""

    count: int = 4


@dataclass(frozen=True)
class Audit:
    """Look at the gradients of `count` steps. Answered by every recipe's error."""

    recipes: tuple[str, ...]
    count: int = AUDIT


@dataclass(frozen=True)
class Probe:
    """Send the buckets of one step with every recipe. Answered by `Costs`."""

    recipes: tuple[str, ...]


@dataclass(frozen=True)
class Try:
    """Train `count` steps with a recipe, after some that do not count. Answered by a `Profile`."""

    recipe: str
    count: int = TRIAL


@dataclass(frozen=True)
class Keep:
    """Continue with a recipe. The answer is ignored."""

    recipe: str


Ask: TypeAlias = Steps | Apart | Audit | Probe | Try | Keep


@dataclass(frozen=True)
class Profile:
    """The length of a step, and when its buckets were ready, counted from the first one."""

    step_s: float
    ready_s: tuple[float, ...] = ()
    nbytes: tuple[int, ...] = ()
    faster: float = 1.0  #: its length relative to the steps before
    sent_s: float = 0.0  #: from when the last bucket was ready until all were reduced
    host_s: float = 0.0  #: from the first to the last bucket, by the host's clock


@dataclass(frozen=True)
class Cost:
    """The cost of sending all buckets with one recipe, while nothing else runs."""

    wall_s: float
    cpu_s: float  #: of this process, in all its threads
    sent_nbytes: int = 0
    host_s: float = 0.0  #: on a GPU: until all work was queued on streams

    def load(self, crowd: float) -> float:
        """The share of a core that communication takes."""
        return min(1.0, self.cpu_s * crowd / self.wall_s) if self.wall_s else 0.0


@dataclass(frozen=True)
class Costs:
    """The cost of every recipe; `crowd` is ranks per core, 0 if there are cores to spare."""

    by_recipe: Mapping[str, Cost]
    crowd: float = 0.0


# Predictions


def slowdown(profile: Profile, cost: Cost, crowd: float) -> float:
    """The factor by which communication slows a backward pass on the same core."""
    last, whole = profile.ready_s[-1], sum(profile.nbytes) or 1
    beside = min(last, cost.wall_s * sum(profile.nbytes[:-1]) / whole)
    return 1 + cost.load(crowd) * beside / last if last else 1.0


def communication_end(profile: Profile, cost: Cost, crowd: float = 0.0) -> float:
    """Seconds from the first bucket's arrival until the last bucket is reduced.

    Buckets are sent one after another. Each takes its share of the whole time, and more during a backward
    pass that uses the same core. The profile is that of a backward pass while nothing is sent.
    """
    whole, at = sum(profile.nbytes) or 1, 0.0
    slower = slowdown(profile, cost, crowd)
    for ready, nbytes in zip(profile.ready_s, profile.nbytes, strict=True):
        begins, takes = max(at, ready * slower), cost.wall_s * nbytes / whole
        beside = min(takes, max(0.0, profile.ready_s[-1] * slower - begins))
        at = begins + takes + cost.load(crowd) * beside
    return at


def predict(profile: Profile, fp32: Cost, other: Cost, crowd: float = 0.0) -> float:
    """Predict the length of a step with another codec.

    >>> link = Profile(1.0, (0.0, 0.1), (4_000_000, 4_000_000))
    >>> round(predict(link, Cost(0.8, 0.0), Cost(0.2, 0.0)), 3)
    0.4
    """
    seen = slowdown(profile, fp32, crowd)
    pure = replace(profile, ready_s=tuple(each / seen for each in profile.ready_s))
    before, after = (communication_end(pure, cost, crowd) for cost in (fp32, other))
    return max(profile.step_s - before + after, 1e-6)


def predict_beside(profile: Profile, apart: Profile, fp32: Cost, other: Cost) -> float:
    """Predict the same from a step in which computing and communication did not overlap.

    Of the communication that can be hidden behind computing, another codec hides the same share as float32.
    If the host is no faster than the GPU, its time to send buckets makes the backward pass longer.

    >>> apart = Profile(1.2, (0.0, 0.2), (4_000_000, 4_000_000), sent_s=0.8)     # 0.2 s before and after
    >>> round(predict_beside(Profile(1.2), apart, Cost(0.8, 0.0), Cost(0.2, 0.0)), 3)     # nothing was hidden
    0.6
    >>> round(predict_beside(Profile(1.0), apart, Cost(0.8, 0.0), Cost(0.2, 0.0)), 3)     # all that could be
    0.5
    """
    fp32 = replace(fp32, wall_s=apart.sent_s or fp32.wall_s)
    around = max(0.0, apart.step_s - apart.ready_s[-1] - fp32.wall_s)
    before, own = _stretched(apart, fp32), _stretched(apart, other)
    serial, hidden = before.ready_s[-1] + fp32.wall_s, communication_end(before, fp32)
    share = (serial - (profile.step_s - around)) / (serial - hidden) if serial > hidden else 1.0
    share = min(1.0, max(0.0, share))
    return around + share * communication_end(own, other) + (1 - share) * (own.ready_s[-1] + other.wall_s)


def _stretched(profile: Profile, cost: Cost) -> Profile:
    """Add the host's time to send the buckets to the backward pass."""
    last = profile.ready_s[-1]
    slower = max(1.0, (profile.host_s + cost.host_s) / last) if last and profile.host_s else 1.0
    return replace(profile, ready_s=tuple(each * slower for each in profile.ready_s))


# The choice


@dataclass(frozen=True)
class Candidate:
    """One recipe in the table of `Choice.explain`."""

    codec: str
    predicted_step_s: float
    sent_nbytes: int
    error: float
    allowed: bool
    why: str
    wall_s: float = 0.0  #: of all buckets, while nothing else runs
    cpu_s: float = 0.0


@dataclass
class Choice:
    """The measurements and the choice so far."""

    budget: float = BUDGET
    candidates: tuple[str, ...] = CANDIDATES
    chosen: str = "fp32"
    settled: bool = False
    rows: list[Candidate] = field(default_factory=list)
    tried: dict[str, float] = field(default_factory=dict)  #: seconds of a step, by recipe
    fp32_step_s: float | None = None
    profile: Profile | None = None
    apart: Profile | None = None  #: on a GPU
    gpu: bool = False

    @property
    def rows_by_name(self) -> dict[str, Candidate]:
        return {row.codec: row for row in self.rows}

    @property
    def measured_step_s(self) -> float | None:
        """Measured seconds of a step with the chosen recipe."""
        return self.tried.get(self.chosen, self.fp32_step_s if self.settled else None)

    def next(self) -> str | None:
        """Return the recipe to try next; None if no other is predicted to be fast enough."""
        fastest = min([*self.tried.values(), self.fp32_step_s or 0.0])
        hope = HOPE * fastest if self.tried else GAIN * fastest
        left = [
            row
            for row in self.rows[1:]
            if row.allowed and row.codec not in self.tried and row.predicted_step_s < hope
        ]
        if not left or len(self.tried) >= TRIES:
            return None
        soonest = min(row.predicted_step_s for row in left)
        near = [row for row in left if row.predicted_step_s <= NEAR * soonest]
        return min(near, key=lambda row: row.error).codec

    def best(self) -> str:
        """Return the most accurate of the fastest recipes measured, if it gains enough; else float32."""
        assert self.fp32_step_s is not None
        if not self.tried or min(self.tried.values()) >= GAIN * self.fp32_step_s:
            return "fp32"
        fastest = min(self.tried.values())
        near = [name for name, step_s in self.tried.items() if step_s <= NEAR * fastest]
        return min(near, key=lambda name: self.rows_by_name[name].error)

    def verdict(self) -> str:
        """Return one line: the choice, its comparison with float32, and the reason."""
        if self.fp32_step_s is None:
            return "auto -> fp32: there is one rank, which sends nothing"
        fp32 = f"{self.fp32_step_s * 1e3:,.1f} ms"
        if self.chosen == "fp32":
            return f"auto -> fp32: a step takes {fp32}; {self._next_best()}"
        row, measured = self.rows_by_name[self.chosen], self.tried[self.chosen]
        faster = f"{self.fp32_step_s / measured:.2f}x faster"
        lossy = [each for each in self.rows if not each.allowed and each.predicted_step_s < measured]
        over = ", ".join(f"{each.codec} ({each.error:.2g})" for each in lossy)
        budget = f"budget {self.budget:g}{f', exceeded by {over}' if over else ''}"
        times = f"a step takes {self._times(row)} against {fp32} in fp32, {faster}"
        return f"auto -> {self.chosen}: {times}; error {row.error:.2g}, {budget}"

    def _next_best(self) -> str:
        """Say why no other recipe was chosen."""
        others = [row for row in self.rows if row.allowed and row.codec != "fp32"]
        if not others:
            return f"every other recipe loses more than the error budget of {self.budget:g}"
        best = min(others, key=lambda row: self.tried.get(row.codec, row.predicted_step_s))
        return f"the next best, {best.codec}, {self._times(best)}, is not faster by {1 - GAIN:.0%}"

    def _times(self, row: Candidate) -> str:
        predicted, measured = f"{row.predicted_step_s * 1e3:,.1f}", self.tried.get(row.codec)
        return (
            f"{predicted} ms predicted"
            if measured is None
            else f"{measured * 1e3:,.1f} ms ({predicted} predicted)"
        )

    def explain(self) -> str:
        """Return the table of all candidates."""
        lines = [
            "thinwire: auto",
            f"{'codec':10}{'ms a step':>10}{'measured':>10}{'MB sent':>10}{'error':>10}  ",
        ]
        for row in self.rows:
            mark = "  <- chosen" if row.codec == self.chosen else "" if row.allowed else f"  {row.why}"
            measured = self.fp32_step_s if row.codec == "fp32" else self.tried.get(row.codec)
            cell = f"{measured * 1e3:10.1f}" if measured is not None else " " * 10
            numbers = (
                f"{row.predicted_step_s * 1e3:10.1f}{cell}{row.sent_nbytes / 1e6:10.2f}{row.error:10.2g}"
            )
            lines.append(f"{row.codec:10}{numbers}{mark}")
        return "\n".join(lines)

    def describe(self) -> dict[str, Any]:
        """Return plain data, for `stats`."""
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
        """Return the choice; empty before it is made."""
        return self.describe() if self.settled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice of an earlier run; change nothing if the state is not valid."""
        rows, tried, step_s = state.get("candidates"), state.get("tried"), state.get("fp32_step_s")
        if not isinstance(rows, list | tuple) or not all(map(_is_row, rows)):
            raise InputError("the state is damaged: 'auto' has no valid list of candidates")
        candidates = [Candidate(**each) for each in rows]
        chosen = state.get("chosen")
        if not isinstance(chosen, str) or chosen not in ["fp32", *(row.codec for row in candidates)]:
            raise InputError(f"the state is damaged: 'auto' chose {chosen!r}, which is no candidate")
        times = [*tried.values(), 0.0 if step_s is None else step_s] if isinstance(tried, Mapping) else [None]
        if not all(map(_is_number, times)) or not all(isinstance(name, str) for name in tried or ()):
            raise InputError("the state is damaged: 'auto' does not say how long steps took")
        self.rows, self.chosen, self.settled, self.tried = candidates, chosen, True, dict(tried or {})
        self.fp32_step_s = step_s


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_row(row: object) -> bool:
    """Whether these are the fields of a `Candidate`."""
    if not isinstance(row, Mapping):
        return False
    texts, flag, every = ("codec", "why"), "allowed", {each.name for each in fields(Candidate)}
    return (
        {"codec", "predicted_step_s", "sent_nbytes", "error", "allowed", "why"} <= row.keys() <= every
        and all(isinstance(row[name], str) for name in texts)
        and isinstance(row[flag], bool)
        and all(_is_number(row[name]) for name in row if name not in (*texts, flag))
    )


def choose(choice: Choice) -> Generator[Ask, Any, None]:
    """Ask for measurements until a recipe is chosen."""
    profile: Profile = yield Steps(FIRST)
    steps = FIRST
    while profile.faster <= STEADY and steps < MOST:
        profile = yield Steps(LOOK)
        steps += LOOK
    choice.apart = (yield Apart()) if choice.gpu else None
    errors: Mapping[str, float] = yield Audit(choice.candidates)
    costs: Costs = yield Probe(choice.candidates)
    choice.profile, choice.fp32_step_s = profile, profile.step_s
    choice.rows = [_row(name, choice, errors[name], costs) for name in choice.candidates]
    while (name := choice.next()) is not None:
        choice.chosen = name
        tried: Profile = yield Try(name)
        choice.tried[name] = tried.step_s
    choice.chosen = choice.best()
    yield Keep(choice.chosen)
    choice.settled = True


def _row(name: str, choice: Choice, error: float, costs: Costs) -> Candidate:
    cost, fp32 = costs.by_recipe[name], costs.by_recipe["fp32"]
    assert choice.profile is not None
    if choice.apart is None:
        step_s = predict(choice.profile, fp32, cost, costs.crowd)
    else:
        step_s = predict_beside(choice.profile, choice.apart, fp32, cost)
    allowed = error <= choice.budget
    why = f"error {error:.2g} is {'inside' if allowed else 'over'} the budget of {choice.budget:g}"
    return Candidate(name, step_s, cost.sent_nbytes, error, allowed, why, cost.wall_s, cost.cpu_s)


def faster(steps_s: list[float]) -> float:
    """The time of the last few steps, relative to those before."""
    if len(steps_s) < 2 * LOOK:
        return 0.0  # too few to tell
    return statistics.median(steps_s[-LOOK:]) / statistics.median(steps_s[-2 * LOOK : -LOOK])
