"""Triton programs that round to grids, that is, to multiples of a step."""

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _STREAM_BLOCK, _chance, _read, _stream, _write


@triton.jit
def _grid_round(value, word, scale, low, high, MODE: tl.constexpr):
    """Return the rounded number of steps as a float; NaN becomes zero."""
    steps = tl.minimum(tl.maximum(value * scale, low - 1.0), high + 1.0)
    size = tl.abs(steps)
    whole = tl.floor(size)
    rest = size - whole
    if MODE == 0:
        odd = (whole.to(tl.int32) & 1) == 1
        up = (rest > 0.5) | ((rest == 0.5) & odd)
    elif MODE == 1:
        up = rest >= 0.5
    elif MODE == 2:
        up = rest < 0.0
    elif MODE == 3:
        up = (rest > 0.0) & (steps > 0.0)
    elif MODE == 4:
        up = (rest > 0.0) & (steps < 0.0)
    else:
        up = _chance(word) < rest
    size = whole + up.to(tl.float32)
    signed = tl.minimum(tl.maximum(tl.where(steps < 0.0, -size, size), low), high)
    return tl.where(value == value, signed + 0.0, 0.0)


@triton.jit
def _grid_one(
    x, out, at, left, word, p, MODE: tl.constexpr, CODES: tl.constexpr, FULL: tl.constexpr
):
    scale, low, high, step, mask = p
    signed = _grid_round(_read(x, at, left, FULL).to(tl.float32), word, scale, low, high, MODE)
    if CODES:
        _write(out, at, left, signed.to(tl.int32) & mask, FULL)
    else:
        _write(out, at, left, signed * step, FULL)


@triton.jit
def _grid_block(
    x, out, words, left, p, k0, k1, k2, k3, MODE: tl.constexpr, CODES: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    if STREAM:
        w0, w1, w2, w3, offset = _stream(k0, k1, k2, k3, BLOCK)
        for q in tl.static_range(4):
            word = w0 if q == 0 else (w1 if q == 1 else (w2 if q == 2 else w3))
            _grid_one(x, out, offset + q * (_STREAM_BLOCK // 4), left, word, p, MODE, CODES, FULL)
    else:
        at = tl.arange(0, BLOCK)
        word = at.to(tl.uint32)
        if MODE == 5:
            word = _read(words, at, left, FULL)
        _grid_one(x, out, at, left, word, p, MODE, CODES, FULL)


@triton.jit(do_not_specialize=["n", "scale", "low", "high", "step", "mask", "k0", "k1", "k2", "k3"])
def grid_kernel(
    x, out, words, n, scale, low, high, step, mask, k0, k1, k2, k3, MODE: tl.constexpr, CODES: tl.constexpr,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = (scale, low, high, step, mask)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = n - start
    if left >= BLOCK:
        _grid_block(x + start, out + start, words + start, left, p, k0, k1, k2, k3, MODE, CODES, STREAM, BLOCK, True)
    else:
        _grid_block(x + start, out + start, words + start, left, p, k0, k1, k2, k3, MODE, CODES, STREAM, BLOCK, False)


@triton.jit(do_not_specialize=["n", "pad", "step"])
def grid_values_kernel(codes, out, n, pad, step, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = n - start
    if left >= BLOCK:
        code = _read(codes + start, at, left, True).to(tl.int32)
        _write(out + start, at, left, ((code << pad) >> pad).to(tl.float32) * step, True)
    else:
        code = _read(codes + start, at, left, False).to(tl.int32)
        _write(out + start, at, left, ((code << pad) >> pad).to(tl.float32) * step, False)
