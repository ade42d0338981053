"""Loops of the CPU that round to grids, that is, to multiples of a step. `p` is (scale, low, high, step)."""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import I0, I1, F, I, _block_words, _chance, inline, jit
from thinwire.kernels.reference import STREAM_BLOCK


@inline
def _grid_clamp(x: Any, p: Any) -> Any:
    """Return the input in steps, clamped to one beyond the range so that it converts to an integer."""
    scale, low, high, _ = p
    return F(min(max(F(x * scale), F(low - F(1))), F(high + F(1))))


@inline
def _grid_finish(size: Any, steps: Any, x: Any, p: Any) -> Any:
    """Apply the sign to a rounded magnitude and saturate it; NaN becomes zero."""
    _, low, high, _ = p
    signed = F(min(max(F(-size) if steps < F(0) else size, low), high))
    return F(signed + F(0)) if x == x else F(0)


@inline
def _grid_steps(x: Any, p: Any, mode: Any) -> Any:
    steps = _grid_clamp(x, p)
    size = F(abs(steps))
    whole = F(np.floor(size))
    rest = F(size - whole)
    if mode == I0:
        size = F(np.rint(size))
    elif mode == I1:
        size = F(whole + (F(1) if rest >= F(0.5) else F(0)))
    elif mode == I(2):
        size = whole
    else:
        size = F(whole + (F(1) if rest > F(0) and (steps > F(0)) == (mode == I(3)) else F(0)))
    return _grid_finish(size, steps, x, p)


@inline
def _grid_stochastic(x: Any, p: Any, word: Any) -> Any:
    steps = _grid_clamp(x, p)
    size = F(abs(steps))
    whole = F(np.floor(size))
    size = F(whole + (F(1) if _chance(word) < F(size - whole) else F(0)))
    return _grid_finish(size, steps, x, p)


@jit
def grid_codes(x: Any, out: Any, p: Any, mask: Any, mode: Any) -> None:
    for i in range(x.size):
        out[i] = I(I(_grid_steps(x[i], p, mode)) & mask)


@jit
def grid_round(x: Any, out: Any, p: Any, mode: Any) -> None:
    for i in range(x.size):
        out[i] = F(_grid_steps(x[i], p, mode) * p[3])


@jit
def grid_codes_stochastic(x: Any, given: Any, key: Any, out: Any, p: Any, mask: Any) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = x[start:stop], out[start:stop]
        for i in range(result.size):
            result[i] = I(I(_grid_stochastic(block[i], p, words[i])) & mask)


@jit
def grid_round_stochastic(x: Any, given: Any, key: Any, out: Any, p: Any) -> None:
    buffer = np.empty(STREAM_BLOCK, np.uint32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words = _block_words(key, given, start, stop, buffer)
        block, result = x[start:stop], out[start:stop]
        for i in range(result.size):
            result[i] = F(_grid_stochastic(block[i], p, words[i]) * p[3])


@jit
def grid_values(codes: Any, out: Any, pad: Any, back: Any) -> None:
    for i in range(codes.size):
        out[i] = F(F(I(I(I(codes[i]) << pad) >> pad)) * back)
