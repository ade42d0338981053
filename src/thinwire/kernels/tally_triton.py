"""Triton program that counts the effects of rounding; see `tally_reference`."""

import triton
import triton.language as tl


@triton.jit
def tally_kernel(x_ptr, y_ptr, bounds_ptr, row_ptr, numel, BLOCK: tl.constexpr):
    low = tl.load(bounds_ptr)
    high = tl.load(bounds_ptr + 1)
    lost = tl.zeros([BLOCK], tl.int32)
    cut = tl.zeros([BLOCK], tl.int32)
    small = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, numel, step):
        at = start + tl.arange(0, BLOCK)
        valid = at < numel
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=valid, other=0.0).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        kept = tl.abs(y) < float("inf")
        lost += (finite & (kept == 0)).to(tl.int32)
        cut += (finite & kept & ((x > high) | (x < low))).to(tl.int32)
        small += (finite & (x != 0) & (y == 0)).to(tl.int32)
    tl.atomic_add(row_ptr, tl.sum(lost, 0).to(tl.int64))
    tl.atomic_add(row_ptr + 1, tl.sum(cut, 0).to(tl.int64))
    tl.atomic_add(row_ptr + 2, tl.sum(small, 0).to(tl.int64))
