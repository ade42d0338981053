"""Layout of a tile of elements in a Triton program: its order, its random words, its packed codes.

A program holds TILE elements of a row as a tensor [COLUMNS, PARTS * SPLIT]. A column has an element of each
of SPLIT runs of WIDTH neighbours, which are rows of the packed layout. A column belongs to one thread, so
codes become bytes without communication between threads. A thread has many elements of the same block, so
few threads compute the same scale. With random words there are four PARTS, one for each word of a
generator's call. In any order, `_by_block` is a view [blocks, block] of the same registers. Columns are the
first dimension because of the compiler: among equal choices it lays threads along the first dimension, and
gathers from tables must not choose another order.

Formats are compile-time constants here: the packing depends on their bits anyway. The compiler must not
contract a product and a sum (enable_fp_fusion=False), and division is `div_rn`, so that the result equals
the reference's bit for bit.

Two tuples hold the constants. C is (family, format, mode, rule, store, affine, block, bits, fits). L is
(SPLIT, WIDTH, PARTS, TILE, EACH, FOLD), where EACH is the block, or 0 if the tile lies in a single block.
The compiler gives a thread four neighbouring columns, and then four of each later FOLDth of the tensor. With
FOLD, columns are numbered so that these are neighbours as well, and a thread has fewer blocks.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _NAN, _ROUNDS, _STREAM_BLOCK
from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    E4M3,
    E8M0,
    FILLED,
    GROUP,
    MINMAX,
    NEAREST,
    POW2_CEIL,
    POW2_FLOOR,
    SCALE_NBYTES,
    STOCHASTIC,
)

FLOAT, GRID, STEPS = range(3)  # families of formats

_ABSMAX, _POW2_CEIL, _POW2_FLOOR = tl.constexpr(ABSMAX), tl.constexpr(POW2_CEIL), tl.constexpr(POW2_FLOOR)
_FILLED, _MINMAX = tl.constexpr(FILLED), tl.constexpr(MINMAX)
_BFLOAT16, _E8M0, _E4M3 = tl.constexpr(BFLOAT16), tl.constexpr(E8M0), tl.constexpr(E4M3)
_NEAREST, _STOCHASTIC = tl.constexpr(NEAREST), tl.constexpr(STOCHASTIC)
_FLOAT, _GRID, _STEPS = tl.constexpr(FLOAT), tl.constexpr(GRID), tl.constexpr(STEPS)
_GROUP = tl.constexpr(GROUP)
_QUARTER = tl.constexpr(2 * GROUP)  # of the random words' block: neighbours that use the same word of a call
_SCALE_NBYTES = tl.constexpr(SCALE_NBYTES)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to whole numbers, ties to even
_TINY, _HUGE = tl.constexpr(2.0**-64), tl.constexpr(2.0**64)


# The order of elements


@triton.jit
def _columns(L: tl.constexpr):
    """Return the columns' numbers."""
    COLUMNS: tl.constexpr = L[3] // (L[2] * L[0])
    FOLD: tl.constexpr = L[5]
    j = tl.arange(0, COLUMNS)
    if L[2] * L[0] >= 8:  # a thread has 32 elements: with more columns than these, Triton 3.6 mixes some up
        j = tl.max_contiguous(j, 32 // (L[2] * L[0]))
    if FOLD > 1:
        j = j % (COLUMNS // FOLD) // 4 * (4 * FOLD) + j // (COLUMNS // FOLD) * 4 + j % 4
        j = tl.max_contiguous(tl.multiple_of(j, 4), 4)  # the compiler does not see this
    return j


@triton.jit
def _offsets(L: tl.constexpr):
    """Return the offset in the tile of each element of the tensor: [COLUMNS, PARTS * SPLIT]."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    j = _columns(L)
    r = tl.arange(0, PARTS * SPLIT)[None, :]
    if PARTS * SPLIT == 1:
        return j[:, None] + r
    else:
        skipped = (j // (_QUARTER // SPLIT)) * (_QUARTER * (PARTS - 1))
        return (skipped + (j // WIDTH) * (SPLIT * WIDTH) + j % WIDTH)[:, None] + ((r // SPLIT) * _QUARTER + (r % SPLIT) * WIDTH)


@triton.jit
def _by_block(t, L: tl.constexpr):
    """Return [COLUMNS, PARTS * SPLIT] as [blocks, block]."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    FOLD: tl.constexpr = L[5]
    if FOLD > 1:
        t = tl.reshape(t, (FOLD, TILE // (4 * FOLD * PARTS * SPLIT), 4, PARTS * SPLIT))
        t = tl.reshape(tl.permute(t, (1, 0, 2, 3)), (TILE // (PARTS * SPLIT), PARTS * SPLIT))
    if PARTS * SPLIT > 1:
        RUNS: tl.constexpr = _QUARTER // (SPLIT * WIDTH) if PARTS > 1 else 1
        t = tl.reshape(t, (TILE // (RUNS * WIDTH * PARTS * SPLIT), RUNS, WIDTH, PARTS, SPLIT))
        t = tl.permute(t, (0, 3, 1, 4, 2))
    return tl.reshape(t, (TILE // EACH, EACH))


@triton.jit
def _spread(t, L: tl.constexpr):
    """Repeat one number per block to one per element; a single number stays as it is."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    EACH: tl.constexpr = L[4]
    FOLD: tl.constexpr = L[5]
    if EACH == 0:
        return t
    else:
        t = tl.broadcast_to(t[:, None], (TILE // EACH, EACH))
        if PARTS * SPLIT > 1:
            RUNS: tl.constexpr = _QUARTER // (SPLIT * WIDTH) if PARTS > 1 else 1
            t = tl.reshape(t, (TILE // (RUNS * WIDTH * PARTS * SPLIT), PARTS, RUNS, SPLIT, WIDTH))
            t = tl.permute(t, (0, 2, 4, 1, 3))
        t = tl.reshape(t, (TILE // (PARTS * SPLIT), PARTS * SPLIT))
        if FOLD > 1:
            t = tl.permute(tl.reshape(t, (TILE // (4 * FOLD * PARTS * SPLIT), FOLD, 4, PARTS * SPLIT)), (1, 0, 2, 3))
            t = tl.reshape(t, (TILE // (PARTS * SPLIT), PARTS * SPLIT))
        return t


@triton.jit
def _load(pointers, mask, FULL: tl.constexpr):
    """Without a mask the compiler loads 16 bytes at a time; only a row's last program needs one."""
    if FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_floats(pointers, mask, FULL: tl.constexpr):
    """Load as float32. A bfloat16 is shifted: Triton's interpreter converts subnormals wrongly."""
    value = _load(pointers, mask, FULL)
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _store(pointers, value, mask, FULL: tl.constexpr):
    if _INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:  # the interpreter would not round
        b = value.to(tl.int32, bitcast=True)
        rounded = (b + (0x7FFF + ((b >> 16) & 1))) >> 16
        value = tl.where(value == value, rounded, _NAN >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if FULL:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


# Random words


@triton.jit
def _philox_wide(low, high, k0, k1, k2, k3):
    """As `common_triton._philox`, with 64-bit products."""
    a, b, c, d = low, high, tl.zeros_like(low) + k2, tl.zeros_like(low) + k3
    for _ in tl.static_range(_ROUNDS):
        p, q = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (q >> 32).to(tl.uint32) ^ b ^ k0, (p >> 32).to(tl.uint32) ^ d ^ k1
        b, d = q.to(tl.uint32), p.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _words(u, start, numel, key, C: tl.constexpr, L: tl.constexpr):
    """Return random words of the tile's elements; every row starts at a whole block of the stream."""
    MODE: tl.constexpr = C[2]
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    TILE: tl.constexpr = L[3]
    if MODE == _STOCHASTIC:
        row, k0, k1, k2, k3 = key
        j = tl.arange(0, TILE // (4 * SPLIT))[:, None]
        s = tl.arange(0, SPLIT)[None, :]
        call = row * ((numel + (_STREAM_BLOCK - 1)) // _STREAM_BLOCK * (_STREAM_BLOCK // 4)) + start // 4
        first = call.to(tl.uint32)
        low = first + ((j // WIDTH) * (SPLIT * WIDTH) + s * WIDTH + j % WIDTH).to(tl.uint32)
        # zeros that only the machine's compiler recognises: so the threads that hold u generate the words
        zero = (u.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32) >> 31
        low += tl.max(tl.reshape(zero, (TILE // (4 * SPLIT), 4, SPLIT)), axis=1)
        high = (call >> 32).to(tl.uint32) + (low < first).to(tl.uint32)
        w0, w1, w2, w3 = _philox_wide(low, high, k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
        words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
        return tl.reshape(words, (TILE // (4 * SPLIT), 4 * SPLIT))
    else:
        return tl.zeros((TILE // SPLIT, SPLIT), tl.uint32)


# Packed codes


@triton.jit
def _byte_offsets(WIDE: tl.constexpr, L: tl.constexpr):
    """Return offsets of the bytes of a part of 8 // WIDE bits, [COLUMNS, PARTS, SPLIT // WIDE].

    Also return the first elements of their groups.
    """
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    COUNT: tl.constexpr = SPLIT // WIDE
    j = _columns(L)
    part = tl.arange(0, PARTS)[None, :, None]
    r = tl.arange(0, COUNT)[None, None, :]
    skipped = (j // (_QUARTER // SPLIT)) * (_QUARTER * (PARTS - 1))
    element = (skipped + (j // WIDTH) * (SPLIT * WIDTH))[:, None, None] + (part * _QUARTER + (r * (WIDTH * WIDE)) // _GROUP * _GROUP)
    if PARTS * COUNT == 1:
        return j[:, None, None] + part + r, element
    else:
        column = skipped // WIDE + (j // WIDTH) * (COUNT * WIDTH) + j % WIDTH
        return column[:, None, None] + (part * (_QUARTER // WIDE) + r * WIDTH), element


@triton.jit
def _put_part(codes, section, left, PART: tl.constexpr, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    """Write one power of two of every code's bits to `section`, where the tile's begin."""
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    piece = codes >> (BITS - BITS % (2 * PART))
    if PART < 8:
        WIDE: tl.constexpr = 8 // PART
        ROWS: tl.constexpr = _GROUP // (WIDE * WIDTH)  # runs in a row of a group
        if BITS % PART:
            piece = piece & ((1 << PART) - 1)
        piece = tl.reshape(piece, (TILE // (PARTS * SPLIT), PARTS, SPLIT // (WIDE * ROWS), WIDE, ROWS))
        places = (tl.arange(0, WIDE) * PART)[None, None, None, :, None]
        packed = tl.reshape(tl.sum(piece << places, axis=3).to(tl.uint8), (TILE // (PARTS * SPLIT), PARTS, SPLIT // WIDE))
        at, element = _byte_offsets(WIDE, L)
        _store(section + at, packed, element < left, FULL)
    else:
        at = _offsets(L)
        mask = at < (left + (32 // PART - 1)) // (32 // PART) * (32 // PART)  # up to a whole word
        pointers = section + at
        if PART == 16:
            pointers = section.to(tl.pointer_type(tl.uint16)) + at
        piece = piece.to(pointers.dtype.element_ty)
        _store(pointers, piece, mask, FULL)


@triton.jit
def _put_codes(codes, wire, numel, start, left, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    groups = (numel + (_GROUP - 1)) // _GROUP
    if BITS == 16:
        _put_part(codes, wire + start * 2, left, 16, BITS, L, FULL)
    if BITS & 8:
        _put_part(codes, wire + start, left, 8, BITS, L, FULL)
        wire += (numel + 3) // 4 * 4
    if BITS & 4:
        _put_part(codes, wire + start // 2, left, 4, BITS, L, FULL)
        wire += groups * 32
    if BITS & 2:
        _put_part(codes, wire + start // 4, left, 2, BITS, L, FULL)
        wire += groups * 16
    if BITS & 1:
        _put_part(codes, wire + start // 8, left, 1, BITS, L, FULL)


@triton.jit
def _get_part(section, left, PART: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    SPLIT: tl.constexpr = L[0]
    WIDTH: tl.constexpr = L[1]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    COLUMNS: tl.constexpr = TILE // (PARTS * SPLIT)
    if PART < 8:
        WIDE: tl.constexpr = 8 // PART
        ROWS: tl.constexpr = _GROUP // (WIDE * WIDTH)
        at, element = _byte_offsets(WIDE, L)
        packed = _load(section + at, element < left, FULL)
        packed = tl.reshape(packed, (COLUMNS, PARTS, SPLIT // (WIDE * ROWS), 1, ROWS)).to(tl.int32)
        places = (tl.arange(0, WIDE) * PART)[None, None, None, :, None]
        return tl.reshape((packed >> places) & ((1 << PART) - 1), (COLUMNS, PARTS * SPLIT))
    else:
        at = _offsets(L)
        mask = at < left
        pointers = section + at
        if PART == 16:
            pointers = section.to(tl.pointer_type(tl.uint16)) + at
        return _load(pointers, mask, FULL).to(tl.int32)


@triton.jit
def _get_codes(wire, numel, start, left, BITS: tl.constexpr, L: tl.constexpr, FULL: tl.constexpr):
    SPLIT: tl.constexpr = L[0]
    PARTS: tl.constexpr = L[2]
    TILE: tl.constexpr = L[3]
    groups = (numel + (_GROUP - 1)) // _GROUP
    codes = tl.zeros((TILE // (PARTS * SPLIT), PARTS * SPLIT), tl.int32)
    if BITS == 16:
        codes = _get_part(wire + start * 2, left, 16, L, FULL)
    if BITS & 8:
        codes = _get_part(wire + start, left, 8, L, FULL)
        wire += (numel + 3) // 4 * 4
    if BITS & 4:
        codes |= _get_part(wire + start // 2, left, 4, L, FULL) << (BITS - BITS % 8)
        wire += groups * 32
    if BITS & 2:
        codes |= _get_part(wire + start // 4, left, 2, L, FULL) << (BITS - BITS % 4)
        wire += groups * 16
    if BITS & 1:
        codes |= _get_part(wire + start // 8, left, 1, L, FULL) << (BITS - 1)
    return codes
