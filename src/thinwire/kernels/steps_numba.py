"""Loops of the CPU that round by a step function: posits, tables, and other lists of numbers."""

from typing import Any

import numpy as np

from thinwire.kernels.common_numba import HALF, F, I, U, _as_float, _block_words, _chance, inline, jit
from thinwire.kernels.reference import STREAM_BLOCK


@jit
def steps_codes_packed(bits: Any, cells: Any, s0: Any, s1: Any, s2: Any, s3: Any, out: Any) -> None:
    """Write four 8-bit codes per store; the tables hold the codes already shifted into place."""
    for i in range(out.size):
        b0, b1, b2, b3 = bits[4 * i], bits[4 * i + 1], bits[4 * i + 2], bits[4 * i + 3]
        out[i] = (
            s0[U(cells[b0 >> HALF] + b0) >> HALF]
            | s1[U(cells[b1 >> HALF] + b1) >> HALF]
            | s2[U(cells[b2 >> HALF] + b2) >> HALF]
            | s3[U(cells[b3 >> HALF] + b3) >> HALF]
        )


@jit
def steps_lookup(bits: Any, cells: Any, shift: Any, table: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = table[U(cells[bits[i] >> shift] + bits[i]) >> shift]


@inline
def _search(b: Any, firsts: Any, starts: Any) -> Any:
    low = firsts[b >> HALF]
    high = firsts[U(b >> HALF) + U(1)]
    while low < high:
        middle = U(U(low + high) + U(1)) >> U(1)
        if starts[middle] <= b:
            low = middle
        else:
            high = U(middle - U(1))
    return low


@jit
def steps_search(bits: Any, firsts: Any, starts: Any, table: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = table[_search(bits[i], firsts, starts)]


@inline
def _fill_chances(words: Any, chances: Any) -> None:
    for i in range(words.size):
        chances[i] = _chance(words[i])


@jit
def steps_stochastic(
    bits: Any,
    given: Any,
    key: Any,
    out: Any,
    cells: Any,
    shift: Any,
    firsts: Any,
    starts: Any,
    gaps: Any,
    pairs: Any,
) -> None:
    """Round stochastically. `gaps` and `pairs` alternate two entries for each segment.

    `gaps` holds the value below and 1 / gap, `pairs` the results below and above. An index replaces a branch.
    """
    buffer, chances = np.empty(STREAM_BLOCK, np.uint32), np.empty(STREAM_BLOCK, np.float32)
    for start in range(0, out.size, STREAM_BLOCK):
        stop = min(start + STREAM_BLOCK, out.size)
        words, chance = _block_words(key, given, start, stop, buffer), chances[: stop - start]
        _fill_chances(words, chance)
        block, result = bits[start:stop], out[start:stop]
        if cells.size > 0:
            for i in range(result.size):
                b = block[i]
                s = U(U(U(cells[b >> shift] + b) >> shift) << U(1))
                position = F(F(_as_float(I(b)) - gaps[s]) * gaps[s + U(1)])
                result[i] = pairs[U(s + U(chance[i] < position))]
        else:
            for i in range(result.size):
                s = U(_search(block[i], firsts, starts) << U(1))
                position = F(F(_as_float(I(block[i])) - gaps[s]) * gaps[s + U(1)])
                result[i] = pairs[U(s + U(chance[i] < position))]


@jit
def table_values(codes: Any, table: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = table[codes[i]]
