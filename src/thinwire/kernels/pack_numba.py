"""Pack codes of a few bits into bytes on the CPU, compiled by Numba; `block_reference.pack` defines it."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from thinwire.kernels.common_numba import Q, U
from thinwire.kernels.params import GROUP

NIBBLES, PAIRS, BITS = U(0x0F0F0F0F), U(0x03030303), U(0x01010101)

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit(loop: Loop) -> Loop:
    """As `common_numba.jit`, but dividing by zero gives infinity."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(loop)


@jit
def copy(source: Any, at: Any, target: Any, to: Any, size: Any) -> None:
    """Copy elements in a loop: assigning slices is slower in Numba."""
    for i in range(size):
        target[Q(to) + Q(i)] = source[Q(at) + Q(i)]


@jit
def pack(codes: Any, narrow: Any, size: Any, start: Any, bits: Any, numel: Any, w8: Any, w16: Any) -> None:
    """Pack a span's codes, with zeros up to a whole group, into the row's code sections.

    `narrow` is a buffer for the upper bytes of codes between one and two bytes.
    """
    at, shift = 0, 0
    if bits >= 16:
        copy(codes, 0, w16, start, size)
        if start + size == numel:
            w16[numel : (numel + 1) // 2 * 2] = 0
        return
    groups = -(-size // GROUP)
    if bits >= 8:
        for i in range(size):
            w8[Q(start) + Q(i)] = U(codes[i]) & U(255)
        if start + size == numel:
            w8[numel : (numel + 3) // 4 * 4] = 0
        if bits == 8:
            return
        for i in range(size):
            narrow[i] = U(codes[i]) >> U(8)
        narrow[size : groups * GROUP] = 0
        at = (numel + 3) // 4 * 4
    else:
        codes[size : groups * GROUP] = 0
    for part in (4, 2, 1):
        if bits & part:
            first = at + start * part // 8
            out = w8[first : first + groups * 8 * part]
            if bits > 8:
                pack_part(narrow, shift, part, out)
            else:
                pack_part(codes, shift, part, out)
            at += -(-numel // GROUP) * 8 * part
            shift += part


@jit
def pack_part(codes: Any, shift: Any, part: Any, out: Any) -> None:
    """Pack four codes at a time in a 32-bit word; a group is 8 / part rows of 2 * part words."""
    c, o, s = codes.view(np.uint32), out.view(np.uint32), U(shift)
    if part == 4:
        for g in range(out.size // 32):
            for j in range(8):
                low, high = U(c[Q(16 * g + j)] >> s), U(c[Q(16 * g + 8 + j)] >> s)
                o[Q(8 * g + j)] = U(low & NIBBLES) | U(U(high & NIBBLES) << U(4))
    elif part == 2:
        for g in range(out.size // 16):
            for j in range(4):
                word = U(U(c[Q(16 * g + j)] >> s) & PAIRS)
                word |= U(U(U(c[Q(16 * g + 4 + j)] >> s) & PAIRS) << U(2))
                word |= U(U(U(c[Q(16 * g + 8 + j)] >> s) & PAIRS) << U(4))
                o[Q(4 * g + j)] = word | U(U(U(c[Q(16 * g + 12 + j)] >> s) & PAIRS) << U(6))
    else:
        for g in range(out.size // 8):
            for j in range(2):
                word = U(0)
                for q in range(8):
                    word |= U(U(U(c[Q(16 * g + 2 * q + j)] >> s) & BITS) << U(q))
                o[Q(2 * g + j)] = word


@jit
def unpack(codes: Any, narrow: Any, size: Any, start: Any, bits: Any, numel: Any, w8: Any, w16: Any) -> None:
    """Unpack a span's codes from its row; `codes` has room for whole groups."""
    at, shift = 0, 0
    if bits >= 16:
        copy(w16, start, codes, 0, size)
        return
    if bits == 8:
        copy(w8, start, codes, 0, size)
        return
    groups = -(-size // GROUP)
    at = (numel + 3) // 4 * 4 if bits > 8 else 0
    for part in (4, 2, 1):
        if bits & part:
            first = at + start * part // 8
            held = w8[first : first + groups * 8 * part]
            if bits > 8:
                unpack_part(held, shift, part, narrow)
            else:
                unpack_part(held, shift, part, codes)
            at += -(-numel // GROUP) * 8 * part
            shift += part
    for i in range(size if bits > 8 else 0):
        codes[i] = U(U(narrow[i]) << U(8)) | U(w8[Q(start) + Q(i)])


@jit
def unpack_part(held: Any, shift: Any, part: Any, codes: Any) -> None:
    c, h = codes.view(np.uint32), held.view(np.uint32)
    s, width = U(shift), 2 * part
    mask = NIBBLES if part == 4 else (PAIRS if part == 2 else BITS)
    for g in range(held.size // (8 * part)):
        for q in range(8 // part):
            for j in range(width):
                word = U(U(U(h[Q(width * g + j)] >> U(part * q)) & mask) << s)
                place = Q(16 * g + width * q + j)
                c[place] = word if s == U(0) else U(c[place] | word)
