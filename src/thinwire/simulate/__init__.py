"""Low-precision arithmetic as hardware might do it, bit for bit, on hardware that does not.

>>> import torch
>>> from thinwire import simulate
>>> fp8 = simulate.Arithmetic(product="float8_e4m3fn", sum="e5m10", order="chunked/64")
>>> simulate.matmul(torch.ones(2, 100), torch.full((100, 2), 0.3), fp8)
tensor([[31.2500, 31.2500],
        [31.2500, 31.2500]])
"""

from thinwire.simulate.counters import Counters
from thinwire.simulate.gemm import Arithmetic, matmul
from thinwire.simulate.precision import Precision
from thinwire.simulate.quantizer import Quantizer
from thinwire.simulate.stages import Stages

__all__ = ["Arithmetic", "Counters", "Precision", "Quantizer", "Stages", "matmul"]
