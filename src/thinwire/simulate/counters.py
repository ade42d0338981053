"""Count how often numbers overflow, saturate or underflow, and how often an update is lost.

Counting never waits for a GPU: counts stay in one small table per device, and `step` copies that table on the
device. Only `read`, `table` and `rows` fetch it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import InputError
from thinwire.formats import Format
from thinwire.simulate.precision import Precision

KINDS = ("overflow", "saturation", "underflow")  #: of roundings
UPDATES = ("cancelled",)  #: of updates of weights
INFINITY = float("inf")


@dataclass
class Counters:
    """Counts by name: numbers seen, and numbers that a format could not represent.

    overflow: a finite number became infinite or NaN; saturation: it was beyond the range that rounds to the
    format's ends, and was cut to an end; underflow: it was not zero and became zero; cancelled: an update was
    not zero and its weight stayed the same. Numbers that were infinite or NaN before are not counted.

    >>> from thinwire import formats
    >>> counters, e4m3 = Counters(), formats.get("e4m3")
    >>> x = torch.tensor([1.0, 1e9, 1e-9, 0.0])
    >>> counters.note("fc", e4m3, x, e4m3.round(x))
    >>> counters.read()["fc"]
    {'numbers': 4, 'overflow': 1, 'saturation': 0, 'underflow': 1}

    With `history`, `step` ends a step, and `rows` lists counts by step:

    >>> counters = Counters(history=True)
    >>> for _ in range(2):
    ...     counters.note("fc", e4m3, x, e4m3.round(x))
    ...     counters.step()
    >>> [(row["step"], row["name"], row["overflow"]) for row in counters.rows()]
    [(0, 'fc', 1), (1, 'fc', 1)]
    """

    every: int = 1  #: one call of a name in so many is counted
    history: bool = False  #: whether counts of each step are kept, not only totals
    steps: int = field(default=0, init=False)  #: ended so far
    _tallies: dict[str, "_Tally"] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _past: list["_Snapshot"] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise InputError(f"every must be a number of calls, 1 or more, not {self.every}")

    def note(
        self, name: str, to: Precision | Format, before: Tensor, after: Tensor, unit: Tensor | float = 1.0
    ) -> None:
        """Count what rounding `before` to `after` did; `unit` is the scale of the rounding."""
        tally = self._wanted(name, KINDS)
        if tally is None or not before.numel():
            return
        x, y = _array(before), _array(after)
        if isinstance(x, np.ndarray):
            low, high = tally.range(to)
            short = after.dtype == torch.float16  # a format's numbers may exceed its range
            self._add(tally, before, _on_host(x, y, low * float(unit), high * float(unit), short))
            return
        tally.numbers += x.numel()
        bounds = tally.bounds(to, unit, x.device)
        kernels.tally(x.reshape(-1), y.reshape(-1), bounds, self._row(tally, x.device))

    def cancelled(self, name: str, update: Tensor, before: Tensor, after: Tensor) -> None:
        """Count updates that left a weight unchanged.

        >>> counters = Counters()
        >>> before, after = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])
        >>> counters.cancelled("fc/update", torch.tensor([0.1, 0.0, 1.0]), before, after)
        >>> counters.read()
        {'fc/update': {'numbers': 3, 'cancelled': 1}}
        """
        tally = self._wanted(name, UPDATES)
        if tally is not None:
            stayed = (_array(before) == _array(after)) & (_array(update) != 0)
            if isinstance(stayed, np.ndarray):
                self._add(tally, update, (int(np.count_nonzero(stayed)),))
            else:
                self._add(tally, update, stayed.count_nonzero()[None])

    def step(self) -> None:
        """End a step, without fetching counts."""
        if self.history:
            counts = {name: (each.numbers, tuple(each.counts)) for name, each in self._tallies.items()}
            tables = {device: table.clone() for device, table in self._tables.items()}
            self._past.append(_Snapshot(self.steps, counts, tables))
        self.steps += 1

    def read(self) -> dict[str, dict[str, int]]:
        """Return all counts so far."""
        counts = {name: (each.numbers, tuple(each.counts)) for name, each in self._tallies.items()}
        return self._fetched(_Snapshot(self.steps, counts, self._tables))

    def table(self) -> list[dict[str, Any]]:
        """Return all counts so far, as rows; a kind that was not counted is None.

        A name such as `conv1/weight` names a layer and a tensor.
        """
        return [_row(name, counts) for name, counts in self.read().items()]

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts of each ended step, as rows; a name that was not counted in a step has no row."""
        if not self.history:
            raise InputError("only totals were kept; use Counters(history=True), and end steps with step()")
        lines, last = [], dict[str, dict[str, int]]()
        for past in self._past:
            now = self._fetched(past)
            for name, counts in now.items():
                before = last.get(name, {})
                new = {kind: count - before.get(kind, 0) for kind, count in counts.items()}
                if new["numbers"]:
                    lines.append({"step": past.step, **_row(name, new)})
            last = now
        return lines

    def clear(self) -> None:
        """Remove all counts."""
        self.steps = 0
        for each in (self._tallies, self._tables, self._past):
            each.clear()

    def _wanted(self, name: str, kinds: tuple[str, ...]) -> "_Tally | None":
        """Return the tally of a name; None if `every` leaves this call out."""
        tally = self._tallies.get(name)
        if tally is None:
            tally = self._tallies[name] = _Tally(len(self._tallies), kinds)
        tally.calls += 1
        return None if (tally.calls - 1) % self.every else tally

    def _add(self, tally: "_Tally", of: Tensor, counts: "tuple[int, ...] | Tensor") -> None:
        tally.numbers += of.numel()
        if not isinstance(counts, Tensor):
            for i, count in enumerate(counts):
                tally.counts[i] += count
            return
        self._row(tally, of.device)[: len(tally.kinds)] += counts

    def _row(self, tally: "_Tally", device: torch.device) -> Tensor:
        """Return the row of a tally in a device's table."""
        table = self._tables.get(device)
        if table is None or tally.place >= len(table):
            wider = torch.zeros(max(64, 2 * tally.place), len(KINDS), dtype=torch.int64, device=device)
            if table is not None:
                wider[: len(table)] = table
            table = self._tables[device] = wider
        return table[tally.place]

    def _fetched(self, then: "_Snapshot") -> dict[str, dict[str, int]]:
        """Return the counts of a snapshot, added over the host and all devices."""
        tables = [table.tolist() for table in then.tables.values()]
        totals = {}
        for name, (numbers, counts) in then.counts.items():
            tally = self._tallies[name]
            rows = [table[tally.place] for table in tables if tally.place < len(table)]
            sums = [sum(column) for column in zip(counts, *rows, strict=False)]
            if numbers:
                totals[name] = {"numbers": numbers, **dict(zip(tally.kinds, sums, strict=True))}
        return totals


@dataclass(slots=True)
class _Tally:
    """Counts of one name: the host's here, a device's in row `place` of its table."""

    place: int
    kinds: tuple[str, ...]
    calls: int = 0
    numbers: int = 0
    counts: list[int] = field(default_factory=list)
    _to: Precision | Format | None = None
    _range: tuple[float, float] = (0.0, 0.0)
    _bounds: Tensor | None = None

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.kinds)

    def range(self, to: Precision | Format) -> tuple[float, float]:
        """Return the range in which numbers are not cut; cached for the last precision."""
        if to is not self._to:
            self._to, self._range, self._bounds = to, Precision.of(to).reach, None
        return self._range

    def bounds(self, to: Precision | Format, unit: Tensor | float, device: torch.device) -> Tensor:
        """Return that range times a unit, as a tensor on a device."""
        limits = self.range(to)
        if self._bounds is None or self._bounds.device != device:
            self._bounds = torch.tensor(limits, device=device)
        return self._bounds if isinstance(unit, float) and unit == 1 else self._bounds * unit


@dataclass(frozen=True)
class _Snapshot:
    """Totals at the end of a step."""

    step: int
    counts: dict[str, tuple[int, tuple[int, ...]]]  #: numbers, and counts of the host
    tables: dict[torch.device, Tensor]


def _array(x: Tensor) -> Any:
    """Return x as a NumPy array if it is on a CPU, where NumPy counts faster."""
    x = x.detach()
    if x.device.type != "cpu":
        return x
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()


def _on_host(x: np.ndarray, y: np.ndarray, low: float, high: float, short: bool) -> tuple[int, int, int]:
    """Return overflows, saturations and underflows; stops early if no number is out of range."""
    left = int(np.count_nonzero(y != 0))
    # Zero rounds to zero, unless the format has no zero: then nothing becomes zero.
    small = max(0, int(np.count_nonzero(x != 0)) - left) if left < y.size else 0
    inside = not short and low <= np.minimum.reduce(x, axis=None)
    if inside and np.maximum.reduce(x, axis=None) <= high:
        return 0, 0, small
    finite, kept = abs(x) < INFINITY, abs(y) < INFINITY
    cut = ((x > high) | (x < low)) & finite & kept
    small -= int(np.count_nonzero(~finite & (y == 0))) if small else 0
    return int(np.count_nonzero(finite > kept)), int(np.count_nonzero(cut)), small


def _row(name: str, counts: dict[str, int]) -> dict[str, Any]:
    layer, _, tensor = name.partition("/")
    kinds = {kind: counts.get(kind) for kind in (*KINDS, *UPDATES)}
    return {"name": name, "layer": layer, "tensor": tensor, "numbers": counts["numbers"], **kinds}
