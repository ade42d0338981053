"""Blocks of 8-bit codes on the CPU, converted directly between numbers and the wire, compiled by Numba.

Without a buffer in between, memory is busy all the time. `block_numba` handles all other cases.
`p` is `FloatParams.scalars`.
"""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import I0, INFINITY, MAGNITUDE, F, I, Q, _as_float, _as_int, inline
from thinwire.kernels.pack_numba import jit
from thinwire.kernels.scale_numba import QUIET

FLOAT_SCALED, FLOAT_NEAREST, FLOAT_DIRECTED, FLOAT_STOCHASTIC = range(4)
GRID_NEAREST, GRID_DIRECTED, GRID_STOCHASTIC = range(4, 7)
STEPS_PACKED, STEPS_LOOKUP, STEPS_SEARCH, STEPS_STOCHASTIC = range(7, 11)
BY_GRID, BY_TABLE, BY_BYTE, BY_FLOAT = range(4)
TINY, HUGE = F(2.0**-64), F(2.0**64)


@inline
def _scaled_code(pattern: Any, p: Any, largest: Any) -> Any:
    """Return the nearest code of a short format; no input is NaN, patterns beyond `largest` saturate.

    Adding the power of two whose last place is the element's last kept bit rounds the element, normal or
    subnormal. The difference of the patterns is then the significand in units of that bit.
    """
    low, drop = I(p[1] << I(23)), I(I(23) - p[0])
    size = I(min(I(pattern & MAGNITUDE), largest))
    binade = I(max(I(size & INFINITY), low))
    unit = I(binade + I(drop << I(23)))
    kept = I(_as_int(F(_as_float(size) + _as_float(unit))) - unit)
    return I(I(kept + I(I(binade - low) >> drop)) | I(I(pattern >> I(31)) & p[3]))


@jit
def float_scaled(bits: Any, codes: Any, p: Any, largest: Any) -> None:
    for i in range(bits.size):
        codes[i] = _scaled_code(bits[i], p, largest)


@jit
def are_plain(scales: Any, count: Any) -> Any:
    """Whether no inverse of a scale overflows or underflows."""
    plain = True
    for b in range(count):
        plain = plain and scales[b] >= TINY and scales[b] <= HUGE
    return plain


@jit
def encode_bytes(
    u: Any, scales: Any, width: Any, kind: Any, pf: Any, pg: Any, mask: Any, w8: Any, at: Any
) -> None:
    """Write 8-bit codes directly to the wire; all scales are plain (`are_plain`)."""
    step, low, high, _ = pg
    for b in range(-(-u.size // width)):
        start, size = Q(b * width), min(width, u.size - b * width)
        place, inverse = Q(at) + start, F(F(1) / scales[b])
        if kind == GRID_NEAREST:
            for i in range(size):
                y = F(F(u[start + Q(i)] * inverse) * step)
                w8[place + Q(i)] = I(I(np.rint(F(min(max(y, low), high)))) & mask)
        else:
            for i in range(size):
                w8[place + Q(i)] = _scaled_code(_as_int(F(u[start + Q(i)] * inverse)), pf, mask)


@inline
def _byte_value(code: Any, p: Any, unit: Any) -> Any:
    """Return the pattern of an 8-bit float; `unit` is the smallest subnormal, NaN has no sign."""
    magnitude = I(code & I(p[3] - I(1)))
    normal = I(I(magnitude << I(I(23) - p[0])) + I(I(p[1] - I(1)) << I(23)))
    value = _as_int(F(F(magnitude) * unit)) if magnitude < I(I(1) << p[0]) else normal
    value = QUIET if magnitude > p[2] else value
    value = INFINITY if magnitude == p[12] else value
    return I(value | (I(I(code & p[3]) << I(24)) if value != QUIET else I0))


@jit
def float_bytes(codes: Any, size: Any, p: Any, unit: Any, bits: Any) -> None:
    for i in range(size):
        bits[i] = _byte_value(I(codes[i]), p, unit)


@jit
def decode_bytes(
    w8: Any, at: Any, scales: Any, width: Any, how: Any, table: Any, pf: Any, add: Any, out: Any
) -> None:
    """Decode 8-bit codes directly from the wire: memory is busy all the time."""
    kind, half, back = how
    for b in range(-(-out.size // width)):
        start, size, scale = Q(b * width), min(width, out.size - b * width), scales[b]
        place = Q(at) + start
        if kind == BY_GRID and add:
            for i in range(size):
                value = F(F(I(I(I(w8[place + Q(i)]) ^ half) - half)) * back)
                out[start + Q(i)] = F(out[start + Q(i)] + F(value * scale))
        elif kind == BY_GRID:
            for i in range(size):
                out[start + Q(i)] = F(F(F(I(I(I(w8[place + Q(i)]) ^ half) - half)) * back) * scale)
        elif kind == BY_BYTE and add:
            for i in range(size):
                value = _as_float(_byte_value(I(w8[place + Q(i)]), pf, back))
                out[start + Q(i)] = F(out[start + Q(i)] + F(value * scale))
        elif kind == BY_BYTE:
            for i in range(size):
                value = _as_float(_byte_value(I(w8[place + Q(i)]), pf, back))
                out[start + Q(i)] = F(value * scale)
        elif add:
            for i in range(size):
                out[start + Q(i)] = F(out[start + Q(i)] + F(table[w8[place + Q(i)]] * scale))
        else:
            for i in range(size):
                out[start + Q(i)] = F(table[w8[place + Q(i)]] * scale)
