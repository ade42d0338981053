"""Triton programs that write chosen elements to a wire and read them from it.

Places are packed as in `block_reference.pack`: every power of two in their number of bits separately. A
program packs BLOCK of a row's places, whole groups of 64. The thread that writes a byte reads all places that
share it: they are in the cache.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from thinwire.kernels.common_triton import _NAN
from thinwire.kernels.params import GROUP

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _part(places, wire, start, k, bits, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Pack one power of two of the bits of places from `start` on; the part begins at `wire`."""
    shift = bits - bits % (2 * PART)
    if PART >= 8:
        j = start + tl.arange(0, BLOCK)
        whole = (k + (32 // PART - 1)) // (32 // PART) * (32 // PART)  # up to a word
        piece = tl.load(places + j, mask=j < k, other=0) >> shift
        if PART == 16:
            tl.store(wire.to(tl.pointer_type(tl.uint16)) + j, piece.to(tl.uint16), mask=j < whole)
        else:
            tl.store(wire + j, piece.to(tl.uint8), mask=j < whole)
    else:
        WIDE: tl.constexpr = 8 // PART  # places that share a byte
        COLUMNS: tl.constexpr = 8 * PART  # bytes of a group
        i = tl.arange(0, BLOCK // WIDE)
        group = start + i // COLUMNS * _GROUP
        packed = tl.zeros([BLOCK // WIDE], tl.int32)
        for r in tl.static_range(WIDE):
            j = group + r * COLUMNS + i % COLUMNS
            piece = (tl.load(places + j, mask=j < k, other=0) >> shift) & ((1 << PART) - 1)
            packed |= piece.to(tl.int32) << (r * PART)
        tl.store(wire + start // WIDE + i, packed.to(tl.uint8), mask=group < k)


@triton.jit
def _pack(places, wire, start, k, bits, BLOCK: tl.constexpr):
    groups = (k + (_GROUP - 1)) // _GROUP
    if bits & 16 != 0:
        _part(places, wire, start, k, bits, 16, BLOCK)
        wire += (k + 1) // 2 * 4
    if bits & 8 != 0:
        _part(places, wire, start, k, bits, 8, BLOCK)
        wire += (k + 3) // 4 * 4
    if bits & 4 != 0:
        _part(places, wire, start, k, bits, 4, BLOCK)
        wire += groups * 32
    if bits & 2 != 0:
        _part(places, wire, start, k, bits, 2, BLOCK)
        wire += groups * 16
    if bits & 1 != 0:
        _part(places, wire, start, k, bits, 1, BLOCK)


@triton.jit
def _narrow(wire, j, mask, PART: tl.constexpr):
    """Read a part that shares bytes."""
    COLUMNS: tl.constexpr = 8 * PART
    byte = tl.load(wire + j // _GROUP * COLUMNS + j % COLUMNS, mask=mask, other=0).to(tl.int32)
    return (byte >> (j % _GROUP // COLUMNS * PART)) & ((1 << PART) - 1)


@triton.jit
def _place(wire, j, mask, k, bits):
    """Return the j-th place as int32, of 31 bits at most."""
    groups = (k + (_GROUP - 1)) // _GROUP
    index = tl.zeros(j.shape, tl.int32)
    if bits & 16 != 0:
        index = tl.load(wire.to(tl.pointer_type(tl.uint16)) + j, mask=mask, other=0).to(tl.int32)
        wire += (k + 1) // 2 * 4
    if bits & 8 != 0:
        index |= tl.load(wire + j, mask=mask, other=0).to(tl.int32) << (bits - bits % 16)
        wire += (k + 3) // 4 * 4
    if bits & 4 != 0:
        index |= _narrow(wire, j, mask, 4) << (bits - bits % 8)
        wire += groups * 32
    if bits & 2 != 0:
        index |= _narrow(wire, j, mask, 2) << (bits - bits % 4)
        wire += groups * 16
    if bits & 1 != 0:
        index |= _narrow(wire, j, mask, 1) << (bits - 1)
    return index


@triton.jit
def _word(wire, at):
    """Return a pointer to an int32 of a row's wire."""
    return (wire + at).to(tl.pointer_type(tl.int32))


# Into the wire


@triton.jit(do_not_specialize=["n", "k", "nbytes", "count_at", "indices_at", "values_at", "tag", "bits", "blocks"])
def send_kernel(
    u, places, count, wire, sent, n, k, nbytes, count_at, indices_at, values_at, tag, bits, blocks,
    COUNTED: tl.constexpr, PLAIN: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write places, tag, the count if COUNTED, and values: to the wire if PLAIN, otherwise to `sent`.

    NaN has one pattern. With KEEP, plain values are subtracted from u.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    wire += row * nbytes
    places += row * k
    j = start + tl.arange(0, BLOCK)
    there = j < k
    if COUNTED:
        there = j < tl.load(count + row)
    at = u + row * n + tl.load(places + j, mask=j < k, other=0)
    value = tl.load(at, mask=there, other=0.0)
    clean = tl.where(value == value, value.to(tl.int32, bitcast=True), _NAN)
    if PLAIN:
        tl.store(_word(wire, values_at) + j, clean, mask=j < k)
        if KEEP:
            tl.store(at, value - clean.to(tl.float32, bitcast=True), mask=there)
    else:
        tl.store(sent + row * k + j, clean.to(tl.float32, bitcast=True), mask=j < k)
    _pack(places, wire + indices_at, start, k, bits, BLOCK)
    if start == 0:
        tl.store(_word(wire, nbytes - 4), tag)
        if COUNTED:
            tl.store(_word(wire, count_at), tl.load(count + row).to(tl.int32))


@triton.jit(do_not_specialize=["n", "k", "blocks"])
def settle_kernel(u, places, count, arrived, n, k, blocks, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Subtract the decoded values from their places in u."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = j < k
    if COUNTED:
        there = j < tl.load(count + row)
    at = u + row * n + tl.load(places + row * k + j, mask=there, other=0)
    tl.store(at, tl.load(at, mask=there) - tl.load(arrived + row * k + j, mask=there), mask=there)


@triton.jit(do_not_specialize=["k", "nbytes", "bits", "blocks"])
def pack_kernel(places, wire, k, nbytes, bits, blocks, BLOCK: tl.constexpr):
    """Pack places [rows, k] at the start of wires."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    _pack(places + row * k, wire + row * nbytes, tl.program_id(0) % blocks * BLOCK, k, bits, BLOCK)


# Out of it


@triton.jit(do_not_specialize=["k", "nbytes", "bits", "blocks"])
def unpack_kernel(wire, places, k, nbytes, bits, blocks, BLOCK: tl.constexpr):
    """Unpack places as int64."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    index = _place(wire + row * nbytes, j, j < k, k, bits)
    tl.store(places + row * k + j, index.to(tl.int64), mask=j < k)


@triton.jit
def _count(wire, count_at, k, COUNTED: tl.constexpr):
    """Return how many places of a row are real, at most k, and whether the wire claims more than k."""
    if COUNTED:
        held = tl.load(_word(wire, count_at)).to(tl.int64) & 0xFFFFFFFF
        return tl.minimum(held, k).to(tl.int32), (held > k).to(tl.int32)
    else:
        return k, 0


@triton.jit(do_not_specialize=["n", "k", "nbytes", "count_at", "indices_at", "tag", "bits", "programs"])
def check_kernel(
    wire, flags, n, k, nbytes, count_at, indices_at, tag, bits, programs, COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write whether a row's wire is invalid, [rows, programs]: tag, count, places outside or out of order."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    wire += row * nbytes
    count, wrong = _count(wire, count_at, k, COUNTED)
    wrong |= (tl.load(_word(wire, nbytes - 4)) != tag).to(tl.int32)
    for start in range(program * BLOCK, count, programs * BLOCK):
        j = start + tl.arange(0, BLOCK)
        place = _place(wire + indices_at, j, j < count, k, bits)
        before = _place(wire + indices_at, tl.maximum(j - 1, 0), j < count, k, bits)
        bad = (j < count) & ((place >= n) | ((j > 0) & (place <= before)))
        wrong |= tl.max(bad.to(tl.int32), 0)
    tl.store(flags + row * programs + program, wrong)


@triton.jit
def _wrong(flags, row, programs, PROGRAMS: tl.constexpr):
    i = tl.arange(0, PROGRAMS)
    return tl.max(tl.load(flags + row * programs + i, mask=i < programs, other=0), 0)


@triton.jit(do_not_specialize=["n", "share", "programs"])
def fill_kernel(
    out, flags, n, stride, share, programs, ADD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Fill rows with zeros, or with NaN if the wire is invalid; with ADD only with NaN.

    Without a mask stores are wide.
    """
    row = (tl.program_id(0) // share).to(tl.int64)
    wrong = _wrong(flags, row, programs, PROGRAMS)
    out += row * stride
    needed = wrong != 0
    if not ADD:
        needed = wrong == wrong
    if needed:
        value = tl.where(wrong != 0, _NAN, 0) + tl.zeros([BLOCK], tl.int32)
        value = value.to(tl.float32, bitcast=True)
        zero = tl.full((), 0, tl.int64)
        for start in range(zero + tl.program_id(0) % share * BLOCK, n, share * BLOCK):
            j = start + tl.arange(0, BLOCK)
            if start + BLOCK <= n:
                tl.store(out + j, value)
            else:
                tl.store(out + j, value, mask=j < n)


@triton.jit(
    do_not_specialize=[
        "n",
        "k",
        "nbytes",
        "count_at",
        "indices_at",
        "values_at",
        "weight",
        "blocks",
        "programs",
    ]
)
def put_kernel(
    wire, flags, arrived, out, n, k, nbytes, count_at, indices_at, values_at, weight, bits, blocks, programs,
    COUNTED: tl.constexpr, PLAIN: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write values to their places: from the wire if PLAIN, times `weight` if SCALED; else from `arrived`."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    wire += row * nbytes
    if _wrong(flags, row, programs, PROGRAMS) == 0:
        count, _ = _count(wire, count_at, k, COUNTED)
        j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        there = j < count
        at = out + row * n + _place(wire + indices_at, j, there, k, bits)
        value = tl.zeros([BLOCK], tl.float32)
        if PLAIN:
            value = tl.load(_word(wire, values_at) + j, mask=there, other=0).to(tl.float32, bitcast=True)
            if SCALED:
                value = value * weight + 0.0
        else:
            value = tl.load(arrived + row * k + j, mask=there)
        if ADD:
            value = tl.load(at, mask=there) + value
        tl.store(at, value, mask=there)
