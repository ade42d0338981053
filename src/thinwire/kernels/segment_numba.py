"""Positions of rows for the CPU loops: contiguous rows of equal length, or segments of different lengths.

Elements, residuals and wires are flat. A line of `places` locates a row: (start, held, wire, numel, nbytes,
scales_at, extra_at, tag, tensor, row of the random stream). For segments, `places` has a line for each
segment, and `work` has the segment and the first element of every span. For contiguous rows of equal length,
`work` is empty, and `places` has only the first row's line.
"""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import I0, INFINITY, LOW32, MAGNITUDE, F, I, Q, _as_int, inline
from thinwire.kernels.pack_numba import jit
from thinwire.kernels.reference import ROUNDS
from thinwire.kernels.scale_numba import largest


@inline
def stream_key(draw: Any, tensor: Any) -> Any:
    """Return the generator's key for a tensor: one call of Philox, as in `reference.philox`."""
    k0, k1, rank, low, high = draw
    a, b, c, d = low, high, tensor, rank
    for _ in range(ROUNDS):
        p, q = Q(a * Q(0xD2511F53)), Q(c * Q(0xCD9E8D57))
        a, b, c, d = Q(Q(q >> Q(32)) ^ b ^ k0), Q(q & LOW32), Q(Q(p >> Q(32)) ^ d ^ k1), Q(p & LOW32)
        k0, k1 = Q(Q(k0 + Q(0x9E3779B9)) & LOW32), Q(Q(k1 + Q(0xBB67AE85)) & LOW32)
    return a, b, c, d


@inline
def place_of(unit: Any, span: Any, work: Any, places: Any) -> Any:
    """Return the line of a unit's row, the rows to skip from that line, and where the span begins."""
    if work.size:
        return work[unit, 0], 0, work[unit, 1]
    spans = -(-places[0, 3] // span)
    return 0, unit // spans, unit % spans * span


@inline
def wire_of(w8: Any, w16: Any, w32: Any, at: Any, nbytes: Any) -> Any:
    """Return one wire in all three views."""
    end = at + nbytes
    return w8[at:end], w16[at >> 1 : end >> 1], w32[at >> 2 : end >> 2]


@jit
def drop_infinite(bits: Any) -> None:
    """Replace numbers that are not finite by zero, in place."""
    for i in range(bits.size):
        bits[i] = bits[i] if I(bits[i] & MAGNITUDE) < INFINITY else I0


@jit
def magnitudes(x: Any, residual: Any, units: Any, work: Any, places: Any, out: Any) -> None:
    """Write the largest pattern of each span of x, plus the residual unless that is empty."""
    first, last, span = units
    for unit in range(first, last):
        line, _, start = place_of(unit, span, work, places)
        size, at = min(span, places[line, 3] - start), places[line, 0] + start
        if residual.size:
            held, maximum = places[line, 1] + start, I0
            for i in range(size):
                maximum = max(maximum, I(_as_int(F(x[at + i] + residual[held + i])) & MAGNITUDE))
            out[unit] = maximum
        else:
            out[unit] = largest(x[at : at + size].view(np.int32), Q(0), size)
