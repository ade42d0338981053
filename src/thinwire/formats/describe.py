"""Facts about a format, as plain data for tables and for machines."""

import math
from typing import Any

import torch

from thinwire.formats.base import Format
from thinwire.rounding import Rounding, Stream


def describe(format: Format) -> dict[str, Any]:
    """Return the facts that a listing shows."""
    return {
        "name": format.name,
        "bits": format.bits,
        "levels": len(format.values()) if format.bits <= 16 else None,
        "max": format.max,
        "min": format.min,
        "min_normal": format.min_normal,
        "smallest": format.min_subnormal,
        "levels_per_decade": levels_per_decade(format),
        "has_inf": format.has_inf,
        "has_nan": format.has_nan,
        "roundings": [str(rounding) for rounding in format.roundings],
        "rules": format.rules,
    }


def levels_per_decade(format: Format) -> int:
    """Return the largest number of positive values between any v and 10 v."""
    if format.bits <= 16:
        values = torch.from_numpy(format._positive).double()
        ends = torch.searchsorted(values, 10 * values)
        return int((ends - torch.arange(len(values))).max())
    edges = format.to_codes(torch.tensor([format.max / 10, format.max]), Rounding.DOWN).long()
    return int(edges[1] - edges[0])


def code_table(format: Format) -> list[dict[str, Any]]:
    """Return every code with its value, in the order of the codes; of wide formats, the first 65,536."""
    codes = torch.arange(1 << min(format.bits, 16)).to(format.to_codes(torch.zeros(1)).dtype)
    values = format.from_codes(codes).tolist()
    return [_entry(format, code, value) for code, value in enumerate(values)]


def round_report(
    format: Format, numbers: list[float], rounding: Rounding | str = Rounding.NEAREST, seed: int = 0
) -> list[dict[str, Any]]:
    """Return for each number: its float32 value, the code, the rounded value and the error."""
    x = torch.tensor(numbers, dtype=torch.float32)
    rng = Stream(seed) if rounding == Rounding.STOCHASTIC else None
    codes = format.to_codes(x, rounding, rng)
    values = format.from_codes(codes)
    return [
        {
            "input": given,
            **_entry(format, code, value),
            "error": value - given,
            "relative_error": (value - given) / given if given and math.isfinite(given) else None,
        }
        for given, code, value in zip(x.tolist(), codes.long().tolist(), values.tolist(), strict=True)
    ]


def _entry(format: Format, code: int, value: float) -> dict[str, Any]:
    return {
        "code": code,
        "hex": f"0x{code:0{-(-format.bits // 4)}x}",
        "binary": f"{code:0{format.bits}b}",
        "value": value,
    }
