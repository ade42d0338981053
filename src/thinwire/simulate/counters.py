"""How often a format was too small: counted on the device, read when somebody asks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.formats import Format

KINDS = ("overflow", "saturation", "underflow")


@dataclass
class Counters:
    """Counts by name: of numbers seen, and of those a format could not hold.

    overflow: a finite number became infinite or NaN; saturation: it was cut to the largest there is;
    underflow: it was not zero and became zero.

    >>> from thinwire import formats
    >>> counters, e4m3 = Counters(), formats.get("e4m3")
    >>> x = torch.tensor([1.0, 1e9, 1e-9, 0.0])
    >>> counters.note("fc", e4m3, x, e4m3.round(x))
    >>> counters.read()["fc"]
    {'numbers': 4, 'overflow': 1, 'saturation': 0, 'underflow': 1}
    """

    every: int = 1  #: only every so many calls of a name are counted
    _calls: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _counts: dict[str, Tensor] = field(default_factory=dict)

    def note(
        self, name: str, format: Format, before: Tensor, after: Tensor, unit: Tensor | float = 1.0
    ) -> None:
        """What rounding did; `unit` is the scale it was done with."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        if call % self.every:
            return
        finite = before.isfinite()
        high, low = format.max * unit, format.min * unit
        found = torch.stack(
            (
                (finite & ~after.isfinite()).sum(),
                (
                    finite & ((before > high) & (after == high)) | finite & ((before < low) & (after == low))
                ).sum(),
                ((after == 0) & (before != 0)).sum(),
            )
        )
        self._numbers[name] = self._numbers.get(name, 0) + before.numel()
        self._counts[name] = self._counts[name] + found if name in self._counts else found

    def read(self) -> dict[str, dict[str, int]]:
        """All counts so far."""
        return {
            name: {"numbers": self._numbers[name], **dict(zip(KINDS, counts.tolist(), strict=True))}
            for name, counts in self._counts.items()
        }

    def clear(self) -> None:
        """Begin anew."""
        self._calls.clear()
        self._numbers.clear()
        self._counts.clear()
