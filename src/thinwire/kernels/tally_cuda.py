"""Count the effects of rounding on a CUDA GPU in one pass; see `tally_reference`."""

import torch
from torch import Tensor

from thinwire.kernels.tally_triton import tally_kernel

BLOCK = 2048
PROGRAMS = 1024  #: at most; each processes many blocks


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Add the counts for flat tensors x (before rounding) and y (after) to `row`."""
    grid = (min(-(-x.numel() // BLOCK), PROGRAMS),)
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        tally_kernel[grid](x, y, bounds, row, x.numel(), BLOCK=BLOCK)
    else:
        with torch.cuda.device(x.device):
            tally_kernel[grid](x, y, bounds, row, x.numel(), BLOCK=BLOCK)
