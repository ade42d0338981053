"""CPU kernels: choose a loop and its tables, and split the work over torch's threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import float_numba, grid_numba, steps_numba
from thinwire.kernels.params import (
    CELL_BITS,
    NEAREST,
    STOCHASTIC,
    Array,
    FloatParams,
    GridParams,
    Params,
    StepsParams,
)
from thinwire.kernels.reference import STREAM_BLOCK, Key

THREAD_NUMEL = 1 << 19  # elements that justify waking a thread


def to_codes(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the codes of a flat, contiguous float32 tensor to `out`."""
    _run(params, x, out, mode, _random(key, words), codes=True)


def round(
    params: Params, x: Tensor, out: Tensor, mode: int, key: Key | None = None, words: Tensor | None = None
) -> None:
    """Write the rounded values of a flat, contiguous float32 tensor to `out`."""
    _run(params, x, out, mode, _random(key, words), codes=False)


def from_codes(params: Params, codes: Tensor, out: Tensor) -> None:
    """Write the values of flat, contiguous codes to `out`."""
    source, target = codes.numpy(), out.numpy()
    if isinstance(params, GridParams):
        pad, back = np.int32(params.pad), np.float32(2.0**-params.frac_bits)
        _spread(out.numel(), lambda s, _: grid_numba.grid_values(source[s], target[s], pad, back))
    elif isinstance(params, FloatParams) and params.bits > 8:
        wide = source.view(np.int32) if params.bits > 16 else source
        pattern = target.view(np.int32)
        values = float_numba.float_values_wide if params.is_wide else float_numba.float_values
        _spread(out.numel(), lambda s, _: values(wide[s], pattern[s], params.scalars))
    else:
        table = params.decoded if isinstance(params, StepsParams) else _float_table(params)
        _spread(out.numel(), lambda s, _: steps_numba.table_values(source[s], table, target[s]))


@cache
def _float_table(params: FloatParams) -> Array:
    codes = np.arange(256, dtype=np.int32)  # bits above the format's are ignored
    table = np.empty(codes.size, np.float32)
    float_numba.float_values(codes, table.view(np.int32), params.scalars)
    return table


Random: TypeAlias = tuple[tuple[np.uint64, ...], Array]


def _random(key: Key | None, words: Tensor | None) -> Random:
    given = np.empty(0, np.uint32) if words is None else words.numpy().view(np.uint32)
    return tuple(np.uint64(word) for word in (key or (0, 0, 0, 0))), given


def _run(params: Params, x: Tensor, out: Tensor, mode: int, random: Random, *, codes: bool) -> None:
    source, target = x.numpy(), out.numpy()
    if isinstance(params, FloatParams):
        loop = _float_loop(params, source.view(np.int32), target, mode, random, codes=codes)
    elif isinstance(params, GridParams):
        loop = _grid_loop(params, source, target, mode, random, codes=codes)
    else:
        loop = _steps_loop(params, source, target, mode, random, codes=codes)
    _spread(out.numel(), loop)


Loop: TypeAlias = Callable[[slice, int], Any]


def _float_loop(
    params: FloatParams, bits: Array, target: Array, mode: int, random: Random, *, codes: bool
) -> Loop:
    p, specials = params.scalars, params.specials
    out = target if codes else target.view(np.int32)
    quick = params.is_quick(mode)
    if mode == STOCHASTIC:
        stochastic = float_numba.float_codes_stochastic if codes else float_numba.float_round_stochastic
        return lambda s, start: stochastic(bits[s], *_part(random, s, start), out[s], p, specials, quick)
    if params.is_wide and mode == NEAREST and codes:
        return lambda s, _: float_numba.float_codes_wide(bits[s], out[s], p)
    if quick:
        nearest = float_numba.float_codes_nearest if codes else float_numba.float_round_nearest
        return lambda s, _: nearest(bits[s], out[s], p, specials)
    directed = float_numba.float_codes_directed if codes else float_numba.float_round_directed
    return lambda s, _: directed(bits[s], out[s], p, np.int32(mode))


def _grid_loop(params: GridParams, x: Array, out: Array, mode: int, random: Random, *, codes: bool) -> Loop:
    p = (
        np.float32(2.0**params.frac_bits),
        np.float32(params.low),
        np.float32(params.high),
        np.float32(2.0**-params.frac_bits),
    )
    mask = (np.int32((1 << params.bits) - 1),) if codes else ()
    if mode == STOCHASTIC:
        stochastic = grid_numba.grid_codes_stochastic if codes else grid_numba.grid_round_stochastic
        return lambda s, start: stochastic(x[s], *_part(random, s, start), out[s], p, *mask)
    nearest: Any = grid_numba.grid_codes if codes else grid_numba.grid_round
    return lambda s, _: nearest(x[s], out[s], p, *mask, np.int32(mode))


def _steps_loop(params: StepsParams, x: Array, out: Array, mode: int, random: Random, *, codes: bool) -> Loop:
    layout = _steps_layout(params)
    table, pairs = (layout.codes, layout.code_pairs) if codes else (layout.values, layout.value_pairs)
    bits = x.view(np.uint32)
    if mode == STOCHASTIC:
        tables = (*layout.index, layout.gaps, pairs)
        return lambda s, start: steps_numba.steps_stochastic(
            bits[s], *_part(random, s, start), out[s], *tables
        )
    cells, shift, firsts, starts = layout.index
    if cells.size == 0:
        return lambda s, _: steps_numba.steps_search(bits[s], firsts, starts, table, out[s])
    if codes and params.bits <= 8 and shift == CELL_BITS:
        return lambda s, _: _packed(bits[s], cells, layout, out[s])
    return lambda s, _: steps_numba.steps_lookup(bits[s], cells, shift, table, out[s])


def _packed(bits: Array, cells: Array, layout: "_StepsLayout", out: Array) -> None:
    whole = bits.size // 4 * 4
    steps_numba.steps_codes_packed(bits[:whole], cells, *layout.packed, out[:whole].view(np.uint32))
    steps_numba.steps_lookup(bits[whole:], cells, np.uint32(CELL_BITS), layout.codes, out[whole:])


@dataclass(frozen=True, eq=False)
class _StepsLayout:
    """Tables indexed by segment, in the dtypes that the loops write."""

    index: tuple[Array, np.uint32, Array, Array]  # cells (empty for a search), shift, firsts, starts
    codes: Array
    values: Array
    packed: tuple[Array, Array, Array, Array]
    gaps: Array  # for stochastic rounding: value below and 1 / gap, alternating
    code_pairs: Array  # codes below and above, alternating
    value_pairs: Array


_LAYOUTS: WeakKeyDictionary[StepsParams, _StepsLayout] = WeakKeyDictionary()  # kept as long as the format


def _steps_layout(params: StepsParams) -> _StepsLayout:
    if params not in _LAYOUTS:
        _LAYOUTS[params] = _make_layout(params)
    return _LAYOUTS[params]


def _make_layout(params: StepsParams) -> _StepsLayout:
    shift = min(params.cell_shift, CELL_BITS)
    empty = np.empty(0, np.uint32)
    dtype = np.uint8 if params.bits <= 8 else np.uint16
    up = params.codes if params.codes_up is None else params.codes_up
    inverse = np.zeros(up.size) if params.inverse is None else params.inverse
    wide = params.codes.astype(np.uint32)
    return _StepsLayout(
        index=(
            params.cells(shift) if shift else empty,
            np.uint32(shift),
            empty if shift else params.firsts,
            empty if shift else params.starts,
        ),
        codes=params.codes.astype(dtype),
        values=params.values[params.codes],
        packed=(wide, wide << np.uint32(8), wide << np.uint32(16), wide << np.uint32(24)),
        gaps=np.stack([params.values[params.codes], inverse], axis=1).astype(np.float32).ravel(),
        code_pairs=np.stack([params.codes, up], axis=1).astype(dtype).ravel(),
        value_pairs=params.values[np.stack([params.codes, up], axis=1)].ravel(),
    )


def _part(random: Random, s: slice, start: int) -> tuple[Array, tuple[np.uint64, ...]]:
    """Return the words and the stream position of the elements from `start`, a multiple of STREAM_BLOCK."""
    key, given = random
    return given[s] if given.size else given, (*key, np.uint64(start // 4))


def _spread(numel: int, loop: Loop) -> None:
    """Run a loop over all elements, on several threads (at most torch's number) if there is enough work."""
    count = threads(numel)
    if count <= 1:
        loop(slice(0, numel), 0)
        return
    step = -(-numel // (count * STREAM_BLOCK)) * STREAM_BLOCK
    run_all([partial(loop, slice(i, min(i + step, numel)), i) for i in range(0, numel, step)])


def threads(numel: int) -> int:
    """Return how many threads to use, at most torch's number; 0 and 1 mean the calling thread."""
    return min(torch.get_num_threads(), numel // THREAD_NUMEL)


def run_all(calls: Sequence[Callable[[], Any]]) -> None:
    """Run calls concurrently, each on its own thread."""
    pool = _pool(len(calls), os.getpid())
    for future in [pool.submit(call) for call in calls]:
        future.result()


@cache
def _pool(threads: int, _process: int) -> ThreadPoolExecutor:
    """Return a pool for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="thinwire")
