"""Count the effects of rounding, in plain torch.

Three counts are added to `row`, which is int64: finite numbers that became infinite or NaN, finite numbers
beyond `bounds` that stayed finite, and finite numbers that became zero.
"""

from torch import Tensor

INFINITY = float("inf")


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Count for flat tensors x (before) and y (after); `bounds` is the range in which none is clipped."""
    finite, kept = x.abs() < INFINITY, y.abs() < INFINITY
    cut = ((x > bounds[1]) | (x < bounds[0])) & finite & kept
    row[0] += (finite > kept).count_nonzero()
    row[1] += cut.count_nonzero()
    row[2] += (finite & (x != 0) & (y == 0)).count_nonzero()
