"""The parts of a reproduction: tables of arms, each trained with several seeds, and claims about them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from thinwire.errors import InputError
from thinwire.study.record import Trial

PREFIX = "reproduce/"  #: of the studies' names
SIMULATED = "simulated"  #: the link of their trials
FULL, QUICK = "full", "quick"
BASE = "fp32"
LATER = ("summed",)  #: added after records were made: part of a variant only if set
CHANGED = {"mogami": "sums in chunks"}  #: recipes whose meaning has changed, and how
#: Codecs and their names in old records: `static8` alone once meant a scale of 1.
BEFORE = {f"{name}~offset0": name for name in ("static8", "mantissa8")}
UNSAID = ("title", "arms", "seeds", "confidence", "base", "chance")  #: do not decide a trial's result


@dataclass(frozen=True)
class Arm:
    """A row of a table: how it trains, and the accuracy in the paper."""

    name: str
    wire: str = "fp32"  #: a codec's spec
    schedule: str = "auto"
    wide: str = ""  #: what is sent in float32: "ends" (first and last layer), "start" (a tenth of the steps)
    loss_scale: float | str | None = None  #: "1/N": losses are divided by the number of nodes
    pure: str | None = None  #: "gradients" or "activations": Dettmers' pure 8-bit mode
    recipe: str = "fp32"  #: of `thinwire.simulate.recipes`: the numbers in which layers compute
    update: str = "round"  #: of weights, in the recipe's precision of the optimizer; or "kahan"
    paper: float | None = None  #: accuracy in the paper, in per cent


@dataclass(frozen=True)
class Table:
    """Arms that share all settings here."""

    title: str
    data: str
    network: str
    arms: tuple[Arm, ...]
    nodes: int = 1
    steps: int = 100
    batch: int = 32  #: per node
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: str = "sgd"  #: or "rmsprop"
    halve_every: float = 0.0  #: the rate is halved after each such share of steps; 0: it falls to zero
    warm_up: int = 0  #: steps in which the rate grows
    augment: bool = False  #: random flips and shifts
    summed: bool = False  #: gradients are sums over a batch, then divided and rounded; not in float32
    unit: bool = False  #: pixels are from 0 to 1; else they have mean 0 and deviation 1
    together: int = 1
    seeds: int = 5
    confidence: float = 0.95
    base: str = BASE
    chance: float = 0.1  #: the accuracy of guessing

    def trials(self, paper: str, seeds: int | None = None) -> list[Trial]:
        """Return the trials, one seed after another, the base first."""
        return [
            Trial(
                PREFIX + paper, self.data, self.network, arm.name, seed, self.nodes, SIMULATED,
                self.steps, self.batch, self.lr, self._variant(arm),
            )
            for seed in range(self.seeds if seeds is None else seeds)
            for arm in self.arms
        ]  # fmt: skip

    def _variant(self, arm: Arm) -> str:
        """Return a digest of all settings, so that records of a table that has changed are not reused."""
        settings = [
            getattr(self, each.name)
            for each in fields(self)
            if each.name not in UNSAID and (each.name not in LATER or getattr(self, each.name))
        ]
        changed = [CHANGED[name] for name in CHANGED if arm.recipe.startswith(name)]
        known = replace(arm, paper=None, wire=BEFORE.get(arm.wire, arm.wire))
        return hashlib.sha256(repr((settings, known, *changed)).encode()).hexdigest()[:8]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Claim:
    """A statement that records can agree with or not.

    | kind | what must hold, for every arm named |
    |---|---|
    | `same` | its interval of differences to the base is less than half a point below zero |
    | `overlap` | the interval of its mean accuracy and that of the base overlap, however wide they are |
    | `lower` | its interval of differences is all below zero |
    | `trains` | every seed ends nearer to the base than to guessing |
    | `fails` | no seed does |
    | `better` | the first is better than the second: all of the interval of differences is above zero |
    | `order` | each arm is better than the next |

    Records disagree if all of an interval, or every seed, says the opposite. If it says neither, they do not
    decide. Fewer than three seeds, or differences that are all the same, have no interval and do not decide.
    """

    text: str
    table: str  #: its title
    kind: str
    arms: tuple[str, ...]
    by: str = "paper"  #: who says so: the paper, or us


@dataclass(frozen=True)
class Paper:
    """A reproduction: what was claimed, and the training that tests it."""

    name: str
    title: str
    source: str
    question: str
    tables: Mapping[str, tuple[Table, ...]]  #: by size: full or quick
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()  #: what differs from the paper, and why

    def sized(self, size: str) -> tuple[Table, ...]:
        """Return its tables of a size."""
        if size not in self.tables:
            raise InputError(f"{self.name} has no size '{size}'; use one of: {', '.join(self.tables)}")
        return self.tables[size]

    def find(self, trial: Trial) -> tuple[Table, Arm]:
        """Return the table and the arm that a trial belongs to."""
        for tables in self.tables.values():
            for table in tables:
                if replace(trial, seed=0) in table.trials(self.name, 1):
                    return table, table.arm(trial.codec)
        raise InputError(f"{self.name} has no such trial: {trial}")
