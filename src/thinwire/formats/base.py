"""The base class of all formats.

A format is a finite set of real numbers, each with an integer code. Concrete formats are frozen
dataclasses that define the numbers (`_params`). All methods that users call are defined here.

Inputs may have any shape and need not be contiguous. Results are new tensors, or `out`. Returned values
are always float32, which holds every value of every format exactly.

Rounding has no useful derivative, so results are detached from autograd. For a straight-through
gradient write `x + (format.round(x) - x).detach()`.
"""

import abc
import dataclasses
import functools
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from thinwire import buffers, kernels
from thinwire.errors import FormatError, InputError
from thinwire.kernels import reference
from thinwire.kernels.params import Params
from thinwire.rounding import Rounding, Stream

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {mode: number for number, mode in enumerate(Rounding)}

Rng: TypeAlias = Stream | Tensor | None


class Format(abc.ABC):
    """A finite set of real numbers with codes.

    >>> import torch
    >>> from thinwire import formats
    >>> e4m3 = formats.get("float8_e4m3fn")
    >>> codes = e4m3.to_codes(torch.tensor([0.3, -1000.0]))
    >>> codes, e4m3.from_codes(codes)
    (tensor([ 42, 255], dtype=torch.uint8), tensor([0.3125,    nan]))
    >>> e4m3.round(torch.tensor([0.3]), rounding="up")
    tensor([0.3125])
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in listings; `get` accepts the names of registered formats and of members of families."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits in a code."""

    @abc.abstractmethod
    def _params(self, mode: int) -> Params:
        """Return the parameters of the kernels, for one rounding mode."""

    @property
    def rules(self) -> str:
        """How NaN, infinities and negative zero are rounded, in one sentence."""
        return "NaN becomes zero, infinities saturate, -0 becomes 0."

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """The rounding modes that the format supports."""
        return tuple(Rounding)

    @property
    def takes_scale(self) -> bool:
        """Whether input is meant to be scaled so that its largest magnitude becomes `max`."""
        return True

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return False

    @property
    def has_nan(self) -> bool:
        """Whether some code means NaN, so that NaN survives."""
        return False

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self._finite[-1])

    @property
    def min(self) -> float:
        """The smallest (most negative) finite value."""
        return float(self._finite[0])

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return float(self._positive[0])

    @property
    def min_normal(self) -> float:
        """The smallest positive value of full precision; `min_subnormal` where there are no subnormals."""
        return self.min_subnormal

    def to_codes(
        self,
        x: Tensor,
        rounding: Rounding | str = Rounding.NEAREST,
        rng: Rng = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the code of each element: uint8, uint16 or uint32, depending on `bits`.

        Stochastic rounding needs `rng`, and other modes refuse it: a `Stream`, or a tensor of random uint32
        words in the shape of `x`.
        """
        mode = _mode(rounding)
        target = _target(x, out, kernels.code_dtype(self.bits), INPUT_DTYPES)
        random = _random(mode, rng, x)
        if x.device.type != "meta":
            source, result = _flat(x), buffers.writable(target, x, rng)
            kernels.to_codes(self._prepared(mode), source, result.view(-1), mode, *random)
            buffers.deliver(result, target)
        return target

    def from_codes(self, codes: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the float32 value of each code; bits above the format's are ignored."""
        dtype = kernels.code_dtype(self.bits)
        target = _target(codes, out, torch.float32, (dtype,))
        if codes.device.type != "meta":
            result = buffers.writable(target, codes)
            kernels.from_codes(self._prepared(0), codes.contiguous().view(-1), result.view(-1))
            buffers.deliver(result, target)
        return target

    def round(
        self,
        x: Tensor,
        rounding: Rounding | str = Rounding.NEAREST,
        rng: Rng = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Round each element to the format, as float32: `from_codes(to_codes(x))` in one pass."""
        mode = _mode(rounding)
        if out is None and _is_ready(x) and not isinstance(rng, Tensor):
            key, _ = _random(mode, rng, x)
            rounded = torch.empty(x.shape, device=x.device)
            kernels.round(self._prepared(mode), x.detach().view(-1), rounded.view(-1), mode, key)
            return rounded
        target = _target(x, out, torch.float32, INPUT_DTYPES)
        random = _random(mode, rng, x)
        if x.device.type != "meta":
            source, result = _flat(x), buffers.writable(target, x, rng)
            kernels.round(self._prepared(mode), source, result.view(-1), mode, *random)
            buffers.deliver(result, target)
        return target

    def values(self) -> Tensor:
        """Return every finite value that rounding returns, ascending, as float32. Needs at most 16 bits."""
        return torch.from_numpy(self._finite.copy())

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only: pickles and copies do not carry the tables made from them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    @functools.cached_property
    def _table(self) -> np.ndarray:
        """The value of every code."""
        if self.bits > 16:
            raise FormatError(f"{self.name} has 2**{self.bits} codes; listing them stops at 16 bits")
        codes = torch.arange(1 << self.bits)
        return reference.from_codes(self._prepared(0), codes).numpy()

    @functools.cached_property
    def _finite(self) -> np.ndarray:
        values = np.unique(self._table[np.isfinite(self._table)] + np.float32(0))
        return values[values >= self._lowest]

    @property
    def _positive(self) -> np.ndarray:
        """The positive values, or the magnitudes of a format that has none."""
        positive = self._finite[self._finite > 0]
        return positive if positive.size else np.sort(-self._finite[self._finite < 0])

    @property
    def _lowest(self) -> float:
        """Below this, codes decode to numbers that rounding never returns."""
        return -np.inf

    @functools.cached_property
    def _cache(self) -> dict[int, Params]:
        return {}

    def _prepared(self, mode: int) -> Params:
        """Return `_params`, computed once for every mode."""
        if mode not in self._cache:
            self._cache[mode] = self._params(mode)
        return self._cache[mode]


def _mode(rounding: Rounding | str) -> int:
    try:
        return MODES[Rounding(rounding)]
    except ValueError:
        raise FormatError(f"unknown rounding '{rounding}'; use one of: {', '.join(Rounding)}") from None


def _random(mode: int, rng: Rng, x: Tensor) -> tuple[kernels.Key | None, Tensor | None]:
    if mode != MODES[Rounding.STOCHASTIC]:
        if rng is not None:
            raise FormatError("rng is for rounding='stochastic' only")
        return None, None
    if isinstance(rng, Stream):
        return rng.key, None
    if not isinstance(rng, Tensor):
        raise FormatError(
            "stochastic rounding needs rng=Stream(seed, step=..., tensor=..., rank=...) or a uint32 tensor"
        )
    if rng.dtype != torch.uint32 or rng.shape != x.shape or rng.device != x.device:
        raise InputError(
            f"random words must be uint32, {tuple(x.shape)} on {x.device}; "
            f"got {rng.dtype}, {tuple(rng.shape)} on {rng.device}"
        )
    return None, rng.contiguous().view(-1)


def _target(x: Tensor, out: Tensor | None, dtype: torch.dtype, accepted: tuple[torch.dtype, ...]) -> Tensor:
    if not isinstance(x, Tensor):
        raise InputError(f"expected a torch.Tensor, got {type(x).__name__}; use torch.as_tensor(...)")
    if x.dtype not in accepted:
        names = ", ".join(str(each).removeprefix("torch.") for each in accepted)
        hint = (
            "; x.float() would round once more: call it if that is acceptable"
            if x.dtype == torch.float64
            else ""
        )
        raise InputError(f"expected dtype {names}, got {str(x.dtype).removeprefix('torch.')}{hint}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise InputError(f"no kernel for device '{x.device}'; move the tensor to cpu, cuda or meta")
    if x.layout != torch.strided:
        raise InputError(f"expected a dense tensor, got {x.layout}; use x.to_dense()")
    return buffers.target(out, x.shape, dtype, x.device)


def _is_ready(x: Tensor) -> bool:
    """Whether kernels can read a tensor without conversion. This short path keeps small calls cheap."""
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.float32
        and x.layout == torch.strided
        and x.device.type in ("cpu", "cuda")
        and x.is_contiguous()
        and not x.is_neg()
    )


def _flat(x: Tensor) -> Tensor:
    """Return a flat, contiguous view or copy in a dtype that the device's kernels read."""
    x = x.detach().resolve_neg()
    if x.dtype not in kernels.reads(x.device):
        x = x.float()
    return x.contiguous().view(-1)
