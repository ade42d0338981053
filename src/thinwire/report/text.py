"""Numbers as readable text."""

import math
import re

from thinwire.data import SETS, is_text
from thinwire.statistics import Estimate

NOTHING = "–"  # noqa: RUF001
MINUS = "−"  # noqa: RUF001
TIMES = "×"  # noqa: RUF001
LOOPBACK = "loopback"
ACCURACY = "accuracy"
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}


def short(value: float, digits: int = 3) -> str:
    """A number to some significant digits, without an exponent.

    >>> short(1234.5), short(41.26), short(0.01234), short(7.0)
    ('1,234', '41.3', '0.0123', '7.00')
    """
    if not math.isfinite(value):
        return "not finite"
    if not value:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, places)  # 9.996 becomes 10.00: count again, with one place less
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{places}f}".replace("-", MINUS)


def nbytes(value: float) -> str:
    """
    >>> nbytes(640), nbytes(12_345), nbytes(3_200_000)
    ('640 B', '12.3 kB', '3.20 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5 or unit == "GB":
            break
        value /= 1000
    return f"{short(value) if unit != 'B' else f'{value:.0f}'} {unit}"


def seconds(value: float) -> str:
    """
    >>> seconds(12.34), seconds(0.0412), seconds(0.00003)
    ('12.3 s', '41.2 ms', '30.0 µs')
    """
    if abs(value) >= 0.9995:
        return f"{short(value)} s"
    if abs(value) >= 0.0009995 or not value:
        return f"{short(value * 1e3)} ms"
    return f"{short(value * 1e6)} µs"


def times(value: float) -> str:
    """
    >>> times(3.98)
    '3.98×'
    """  # noqa: RUF002
    return f"{short(value)}{TIMES}"


def percent(value: Estimate) -> str:
    """A share and, over several seeds, its standard deviation.

    >>> percent(Estimate(3, 0.9123, 0.0041)), percent(Estimate(1, 0.9123))
    ('91.2 ± 0.4 %', '91.2 %')
    """
    if not math.isfinite(value.mean):
        return "not finite"
    spread = "" if value.deviation is None else f" ± {100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{spread} %"


def points(value: Estimate) -> str:
    """A difference of two shares and, over several seeds, its 95 % interval.

    >>> points(Estimate(3, -0.0012, 0.001, 0.0031)), points(Estimate(1, 0.0))
    ('−0.12 ± 0.31', '0.00')
    """  # noqa: RUF002
    if not math.isfinite(value.mean):
        return "not finite"
    margin = "" if value.margin is None else f" ± {100 * value.margin:.2f}"
    return f"{signed(100 * value.mean)}{margin}"


def signed(value: float) -> str:
    """
    >>> signed(0.26), signed(-1.31), signed(-0.01)
    ('+0.26', '−1.31', '−0.01')
    """  # noqa: RUF002
    text = f"{value:+.2f}"
    return "0.00" if text[1:] == "0.00" else text.replace("-", MINUS)


def minus(words: str) -> str:
    """Replace hyphens before numbers by minus signs, and remove the sign of zero.

    >>> minus("-0.50 to +0.25") == f"{MINUS}0.50 to +0.25", minus("-0.00"), minus("<8, -8>, a-1")[-3:]
    (True, '0.00', 'a-1')
    """
    without_zero_signs = re.sub(r"(?<!\w)[-+](?=0\.0+(?![0-9]))", "", words)
    return re.sub(r"(?<!\w)-(?=[0-9])", MINUS, without_zero_signs)


def link(name: str) -> str:
    """
    >>> link("100mbit"), link("2.5gbit"), link("loopback")
    ('100 Mbit/s', '2.5 Gbit/s', 'loopback')
    """
    match = re.fullmatch(r"([0-9.]+)([kmg]bit)", name)
    return f"{match[1]} {UNITS[match[2]]}" if match else name


def measure(data: str) -> str:
    """Return what the accuracy of a set is called.

    >>> measure("mnist"), measure("sotu")
    ('accuracy', 'next-byte accuracy')
    """
    return f"next-byte {ACCURACY}" if data in SETS and is_text(data) else ACCURACY


def listed(names: list[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
