"""What rounding did to numbers, counted: in plain torch.

Three counts are added to `row`, which is int64: of finite numbers that became infinite or NaN, of finite
numbers beyond `bounds` that stayed finite, and of finite numbers that became zero.
"""

from torch import Tensor

INFINITY = float("inf")


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Of flat tensors x, before, and y, after; `bounds` holds from where to where none is cut."""
    finite, kept = x.abs() < INFINITY, y.abs() < INFINITY
    cut = ((x > bounds[1]) | (x < bounds[0])) & finite & kept
    row[0] += (finite > kept).count_nonzero()
    row[1] += cut.count_nonzero()
    row[2] += (finite & (x != 0) & (y == 0)).count_nonzero()
