"""What all Numba loops share: types, decorators, bit casts and random words.

Every operation spells out its type: otherwise Numba widens int32 arithmetic to int64, which halves the
vector width.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from thinwire.kernels.params import CANONICAL_NAN, CELL_BITS
from thinwire.kernels.reference import ROUNDS, STREAM_BLOCK

I, U, Q, F = np.int32, np.uint32, np.uint64, np.float32
CALLS = STREAM_BLOCK // 4
I0, I1, I7, I23, I25, I31 = (I(n) for n in (0, 1, 7, 23, 25, 31))
MAGNITUDE, INFINITY, HIDDEN, FRACTION = I(0x7FFFFFFF), I(0x7F800000), I(0x800000), I(0x7FFFFF)
SIGN = I(-0x80000000)
NAN = I(CANONICAL_NAN)
HALF = U(CELL_BITS)
LOW32 = Q(0xFFFFFFFF)
SHIFT32 = Q(32)

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit(loop: Loop) -> Loop:
    """Compile on first use, cache the result on disk, and let other threads run meanwhile."""
    return numba.njit(nogil=True, cache=True)(loop)


def inline(loop: Loop) -> Loop:
    """As `jit`, but expanded into its callers so that they can be vectorised."""
    return numba.njit(nogil=True, cache=True, inline="always")(loop)


@intrinsic  # type: ignore[untyped-decorator]
def _as_int(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


# Random words


@jit
def _fill_words(k0: Any, k1: Any, c2: Any, c3: Any, first_call: Any, words: Any) -> None:
    """Philox4x32-7 for CALLS consecutive calls, in 64-bit lanes whose upper halves may hold garbage."""
    for j in range(CALLS):
        call = first_call + Q(j)
        a, b, c, d, x0, x1 = call, call >> SHIFT32, c2, c3, k0, k1
        for _ in range(ROUNDS):
            p = Q(0xD2511F53) * (a & LOW32)
            q = Q(0xCD9E8D57) * (c & LOW32)
            a, b = (q >> SHIFT32) ^ b ^ x0, q
            c, d = (p >> SHIFT32) ^ d ^ x1, p
            x0 = (x0 + Q(0x9E3779B9)) & LOW32
            x1 = (x1 + Q(0xBB67AE85)) & LOW32
        words[j] = U(a)
        words[j + CALLS] = U(b)
        words[j + 2 * CALLS] = U(c)
        words[j + 3 * CALLS] = U(d)


@inline
def _block_words(key: Any, given: Any, start: Any, stop: Any, words: Any) -> Any:
    """Return the words of one block: those given, or the next of the stream."""
    if given.size > 0:
        return given[start:stop]
    _fill_words(key[0], key[1], key[2], key[3], key[4] + Q(start // 4), words)
    return words[: stop - start]


@inline
def _chance(word: Any) -> Any:
    """Return 23 complemented random bits as a float in [0, 1)."""
    return F(_as_float(I(I(U(~word) >> U(9)) | I(0x3F800000))) - F(1))
