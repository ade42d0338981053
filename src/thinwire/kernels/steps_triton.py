"""Triton programs that round by a step function: posits, tables, and other lists of numbers."""

import triton
import triton.language as tl

from thinwire.kernels.common_triton import (
    _CELL_BITS,
    _STREAM_BLOCK,
    _chance,
    _pattern,
    _read,
    _stream,
    _write,
)


@triton.jit
def _segment(b, index, starts, shift, SEARCH: tl.constexpr):
    """Find the segment by one look-up in the cells, or by SEARCH bisection steps inside the cell."""
    if SEARCH == 0:
        return ((tl.load(index + (b >> shift)) + b) >> shift).to(tl.int32)
    low = tl.load(index + (b >> _CELL_BITS)).to(tl.int32)
    high = tl.load(index + (b >> _CELL_BITS) + 1).to(tl.int32)
    for _ in tl.static_range(SEARCH):
        middle = (low + high + 1) >> 1
        reached = tl.load(starts + middle) <= b
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _steps_result(b, word, tables, shift, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr, CODES: tl.constexpr):
    """Return codes or values of patterns; `table` holds them by segment.

    If STOCHASTIC, `pairs` holds the value below and the inverse gap. `table` then holds the value above, or
    both codes, with the one above in the upper half.
    """
    index, starts, table, pairs = tables
    value = b.to(tl.float32, bitcast=True)
    segment = _segment(b.to(tl.uint32, bitcast=True), index, starts, shift, SEARCH)
    result = tl.load(table + segment)
    if STOCHASTIC:
        pair = tl.load(pairs + segment)
        lower = pair.to(tl.uint32).to(tl.float32, bitcast=True)
        inverse = (pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        up = _chance(word) < (value - lower) * inverse
        if CODES:
            half: tl.constexpr = table.dtype.element_ty.primitive_bitwidth // 2
            result = tl.where(up, result >> half, result & ((1 << half) - 1))
        else:
            result = tl.where(up, result, lower)
    return result


@triton.jit
def _steps_one(
    x, out, at, left, word, tables, shift, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr, CODES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    result = _steps_result(_pattern(x, at, left, FULL), word, tables, shift, SEARCH, STOCHASTIC, CODES)
    _write(out, at, left, result, FULL)


@triton.jit
def _steps_block(
    x, out, words, left, tables, shift, k0, k1, k2, k3, SEARCH: tl.constexpr, STOCHASTIC: tl.constexpr,
    CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    if STREAM:
        w0, w1, w2, w3, offset = _stream(k0, k1, k2, k3, BLOCK)
        for q in tl.static_range(4):
            word = w0 if q == 0 else (w1 if q == 1 else (w2 if q == 2 else w3))
            _steps_one(x, out, offset + q * (_STREAM_BLOCK // 4), left, word, tables, shift, SEARCH, STOCHASTIC, CODES, FULL)
    else:
        at = tl.arange(0, BLOCK)
        word = at.to(tl.uint32)
        if STOCHASTIC:
            word = _read(words, at, left, FULL)
        _steps_one(x, out, at, left, word, tables, shift, SEARCH, STOCHASTIC, CODES, FULL)


@triton.jit(do_not_specialize=["n", "shift", "k0", "k1", "k2", "k3"])
def steps_kernel(
    x, out, words, n, index, starts, table, pairs, shift, k0, k1, k2, k3, SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr, CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tables = (index, starts, table, pairs)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = n - start
    if left >= BLOCK:
        _steps_block(x + start, out + start, words + start, left, tables, shift, k0, k1, k2, k3, SEARCH, STOCHASTIC, CODES, STREAM, BLOCK, True)
    else:
        _steps_block(x + start, out + start, words + start, left, tables, shift, k0, k1, k2, k3, SEARCH, STOCHASTIC, CODES, STREAM, BLOCK, False)


@triton.jit(do_not_specialize=["n"])
def table_kernel(codes, out, table, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = n - start
    if left >= BLOCK:
        code = _read(codes + start, at, left, True).to(tl.int32)
        _write(out + start, at, left, tl.load(table + code), True)
    else:
        code = _read(codes + start, at, left, False).to(tl.int32)
        _write(out + start, at, left, tl.load(table + code), False)
