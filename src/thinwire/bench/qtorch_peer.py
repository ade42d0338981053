"""Speed of QPyTorch (`qtorch`, Zhang et al. 2019) beside `simulate`.

Both allocate their results and run on one thread.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.timing import Call
from thinwire.formats import get
from thinwire.rounding import Rounding, Stream
from thinwire.simulate.precision import Precision
from thinwire.simulate.quantizer import Quantizer

FAILURES = (ImportError, OSError, RuntimeError)  #: of its import, which compiles its loops the first time
STREAM = Stream(seed=1)
KINDS = ((5, 2), (4, 3))  #: exponent and mantissa bits that are measured
WORD, FRACTION = 8, 6  #: bits of its fixed point, which is our fixed2.6

Case = tuple[str, str, Call, Call]  # their operation, our equivalent, their call, our call


def load() -> Any:
    """Return its functions; raise one of `FAILURES` if it is not installed or does not compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("qtorch.quant")


def cases(quant: Any, x: Tensor) -> Iterator[Case]:
    """Yield the operations that both have, on a CPU."""
    for rounding in ("nearest", "stochastic"):
        rng = STREAM if rounding == "stochastic" else None
        for exp, man in KINDS:
            name = f"e{exp}m{man}"
            theirs = partial(quant.float_quantize, x, exp, man, rounding=rounding)
            yield f"float_quantize({exp}, {man}) {rounding}", name, theirs, _round(name, rounding, x, rng)
        theirs = partial(quant.fixed_point_quantize, x, WORD, FRACTION, rounding=rounding)
        operation = f"fixed_point_quantize({WORD}, {FRACTION}) {rounding}"
        yield operation, "fixed2.6", theirs, _round("fixed2.6", rounding, x, rng)
        block = Precision.of("int8~fit" if rng is None else "int8~fit~sr")
        theirs = partial(quant.block_quantize, x, WORD, rounding=rounding)
        yield f"block_quantize({WORD}) {rounding}", block.spec, theirs, partial(block.round, x, rng)
        yield from _modules(quant, x, rounding)


def _modules(quant: Any, x: Tensor, rounding: str) -> Iterator[Case]:
    number: Any = importlib.import_module("qtorch").FloatingPoint
    theirs = quant.Quantizer(number(4, 3), number(5, 2), rounding, rounding)
    ours = Quantizer("e4m3", "e5m2", rounding=rounding)
    leaf, gradient = x.clone().requires_grad_(), torch.ones_like(x)
    for what, call in (("forward", _forward), ("forward and backward", _both)):
        their_call, our_call = (partial(call, each, leaf, gradient) for each in (theirs, ours))
        yield f"Quantizer {what} {rounding}", "Quantizer(e4m3, e5m2)", their_call, our_call


def _round(name: str, rounding: str, x: Tensor, rng: Stream | None) -> Call:
    return partial(get(name).round, x, Rounding(rounding), rng)


def _forward(module: Callable[[Tensor], Tensor], x: Tensor, _gradient: Tensor) -> None:
    module(x)


def _both(module: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(module(x), x, gradient)
