"""What rounding did to numbers, counted on a CUDA GPU in one pass: `tally_reference` says what."""

import torch
from torch import Tensor

from thinwire.kernels.tally_programs import tally_kernel

BLOCK = 2048
PROGRAMS = 1024  #: at most, each of which goes over many blocks


def tally(x: Tensor, y: Tensor, bounds: Tensor, row: Tensor) -> None:
    """Of flat tensors x, before, and y, after."""
    grid = (min(-(-x.numel() // BLOCK), PROGRAMS),)
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        tally_kernel[grid](x, y, bounds, row, x.numel(), BLOCK=BLOCK)
    else:
        with torch.cuda.device(x.device):
            tally_kernel[grid](x, y, bounds, row, x.numel(), BLOCK=BLOCK)
