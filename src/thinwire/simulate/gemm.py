"""Matrix products in which every product and every partial sum is rounded to a format.

`c[i, j]` is the sum over k of `a[i, k] * b[k, j]`. Operands are float32 and used as they are: round them
first if they should be in a format. P rounds to the format of products, S to the format of sums. Each
operation is computed in float32, rounded to nearest even, and then rounded again:

    p[k] = P(a[i, k] * b[k, j])
    s = S(s + p[k])

If a format and the operands have at most 11 significant bits (fp16, bfloat16 and all shorter formats),
rounding to float32 first changes nothing (24 >= 2 * 11 + 2), and the result is that of exact operations
rounded once. For longer formats the result includes float32's rounding. A format of None rounds to float32
only.

| order | how the products are added up |
|---|---|
| `sequential` | from s = +0, k ascending |
| `chunked/C`  | sequentially in chunks of C, each from +0; then the chunks' sums, sequentially |
| `pairwise`   | neighbours first, then neighbouring pairs ...; an odd one moves up (a product rounded by S) |
| `kahan`      | y = S(p - c); t = S(s + y); c = S(S(t - s) - y); s = t, from s = c = +0 |
| `fp32`       | sequentially in float32 |
| `exact`      | exact products, exact sum, one rounding by S at the end (None: to float32); zero is +0 |

`exact` needs a sum format of at most 22 significant bits. The thresholds between the numbers of a table are
float32, and stochastic rounding sees the leading 24 bits of the sum.

Multiplication is `exact` (float32's, as above) or `mogami`: bit patterns are added as integers, minus the
pattern of one (Mogami 2020, "Deep Neural Network Training without Multiplications"); `mogami/0.0625` also
adds 0.0625 * 2**23, which compensates the average error. Signs are right. An operand with exponent field 0
counts as zero, a result whose exponent fields sum to 127 or less is zero, one beyond float32's range is
infinite; infinities and NaN behave as in a float product.

Special values follow the formats' rules (`Format.rules`). A NaN is made positive before it is rounded, and a
NaN in the result is 0x7FC00000. Stochastic rounding draws from streams derived from `rng`, one for each k
and each rounding in that step. CPU and GPU return the same bits, whatever the format.
"""

import functools
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import buffers, formats, kernels
from thinwire.errors import FormatError, InputError
from thinwire.formats import Format
from thinwire.formats.base import MODES
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, SEQUENTIAL, GemmParams
from thinwire.kernels.gemm_quire import Extent, extent_of
from thinwire.kernels.params import FloatParams, GridParams, Params
from thinwire.rounding import Rounding, Stream

ORDERS = {"sequential": SEQUENTIAL, "fp32": SEQUENTIAL, "pairwise": PAIRWISE, "kahan": KAHAN}
Within = tuple[Format | None, Format | None]
LISTED_BITS = 16  # formats of at most so many bits have their numbers listed
EXACT_BITS = 22  # limit on significant bits of a sum format: sums are first rounded to odd in float32


@dataclass(frozen=True)
class Arithmetic:
    """How a matrix product is computed: formats, order of the sum, multiplication, rounding mode.

    >>> Arithmetic(product="e5m2", sum="bfloat16", order="kahan").sum.name
    'bfloat16'
    """

    product: Format | str | None = None  #: of products, or its name; None: float32
    sum: Format | str | None = None  #: of sums
    order: str = "sequential"
    multiply: str = "exact"
    rounding: Rounding | str = "nearest"  #: of products and sums alike

    def __post_init__(self) -> None:
        for name in ("product", "sum"):
            given = getattr(self, name)
            if isinstance(given, str) and "~" in given:
                raise FormatError(
                    f"{name} is a format without options, not '{given}'; "
                    f"use {name}='{given.partition('~')[0]}', and rounding='stochastic' for products and sums"
                )
            object.__setattr__(self, name, None if given is None else formats.get(given))
        try:
            object.__setattr__(self, "rounding", Rounding(self.rounding))
        except ValueError:
            raise FormatError(
                f"unknown rounding '{self.rounding}'; use one of: {', '.join(Rounding)}"
            ) from None
        _order(self.order)
        _offset(self.multiply)
        self._check()

    def _check(self) -> None:
        for format in _given(self):
            if self.rounding not in format.roundings:
                raise FormatError(
                    f"{format.name} has no rounding '{self.rounding}'; it has: {', '.join(format.roundings)}"
                )
        if self.order == "fp32" and self.sum is not None:
            raise FormatError("order 'fp32' sums in float32; leave out sum, or use order='sequential'")
        if self.order != "exact":
            return
        if self.product is not None or self.multiply != "exact":
            raise FormatError(
                "order 'exact' rounds once, at the end; leave out product and multiply, "
                "or round the operands before"
            )
        if self.sum is not None and _significant(self._params(self.sum)) > EXACT_BITS:
            raise FormatError(
                f"order 'exact' rounds to at most {EXACT_BITS} significant bits, which {_name(self.sum)} "
                "exceeds; use a shorter sum format, or sum=None for float32"
            )

    def _params(self, format: Format | str | None) -> Params | None:
        """Return the kernels' parameters of a format, in this rounding mode."""
        return None if format is None else formats.get(format)._prepared(MODES[Rounding(self.rounding)])


def matmul(
    a: Tensor,
    b: Tensor,
    arithmetic: Arithmetic,
    *,
    rng: Stream | None = None,
    out: Tensor | None = None,
    within: Within | None = None,
) -> Tensor:
    """Return the product of two matrices, or of batches of them, computed as `arithmetic` says.

    Shapes are [..., M, K] and [..., K, N]; leading dimensions are equal or broadcast. Stochastic rounding
    needs `rng`; other roundings refuse it. Nothing is recorded for autograd. `within` names the formats of
    the numbers in a and b, None where unknown: exact sums then need not wait for a GPU to find the range of
    the numbers. Numbers that are not in these formats give wrong sums.

    >>> ones = torch.ones(1, 5000)
    >>> matmul(ones, ones.t(), Arithmetic(sum="e5m10"))
    tensor([[2048.]])
    >>> matmul(ones, ones.t(), Arithmetic(sum="e5m10", order="kahan"))
    tensor([[5000.]])
    """
    if not isinstance(arithmetic, Arithmetic):
        raise InputError(
            f"matmul takes Arithmetic(sum='e5m10'), for example, not {type(arithmetic).__name__}"
        )
    key = _key(arithmetic, rng)
    shape = _shape(a, b)
    target = buffers.target(out, shape, torch.float32, a.device)
    if a.device.type == "meta":
        return target
    result = buffers.writable(target, a, b)
    if a.shape[-1] == 0:
        result.zero_()
    elif result.numel():
        left, right = _batched(_plain(a), _plain(b), shape[:-2])
        matrices = result.view(left.shape[0], left.shape[1], shape[-1])
        _compute(arithmetic, left, right, matrices, key, within)
    return buffers.deliver(result, target)


def _compute(
    how: Arithmetic, a: Tensor, b: Tensor, out: Tensor, key: kernels.Key | None, within: Within | None
) -> None:
    mode = MODES[Rounding(how.rounding)]
    total = how._params(how.sum)
    if how.order == "exact":
        extents = _extents(within) if within else None
        kernels.exact_gemm(a, b, out, odd=total is not None, extents=extents)
        if total is not None:
            kernels.round(total, out.view(-1), out.view(-1), mode, key)  # in place: element by element
    else:
        order, chunk = _order(how.order)
        product, offset = how._params(how.product), _offset(how.multiply)
        kernels.gemm(GemmParams(product, total, mode, order, chunk, offset), a, b, out, key)


def _extents(within: Within) -> tuple[Extent, Extent] | None:
    first, second = (None if each is None else known_extent(each) for each in within)
    return None if first is None or second is None else (first, second)


@functools.cache
def known_extent(format: Format) -> Extent | None:
    """Return the range of bits of a format's numbers; None if there are too many numbers, or infinities."""
    return None if format.bits > LISTED_BITS or format.has_inf else extent_of(format.values())


def _order(order: str) -> tuple[int, int]:
    """Return the kernels' code of an order, and the length of chunks."""
    if order in ORDERS:
        return ORDERS[order], 0
    if order == "exact":
        return -1, 0
    match = re.fullmatch(r"chunked/([1-9]\d{0,8})", order) if isinstance(order, str) else None
    if not match:
        names = "sequential, chunked/C with C from 1, pairwise, kahan, fp32, exact"
        raise FormatError(f"unknown order '{order}'; use one of: {names}")
    return CHUNKED, int(match[1])


def _offset(multiply: str) -> int | None:
    """Return what Mogami's product adds to the sum of two patterns; None: exact multiplication."""
    if multiply == "exact":
        return None
    match = re.fullmatch(r"mogami(?:/(0\.\d+|0))?", multiply) if isinstance(multiply, str) else None
    if not match:
        raise FormatError(
            f"unknown multiply '{multiply}'; use one of: exact, mogami, mogami/0.0625 (or another part of 1)"
        )
    return round(float(match[1] or 0) * 2**23)


def _given(how: Arithmetic) -> list[Format]:
    return [formats.get(format) for format in (how.product, how.sum) if format is not None]


def _name(format: Format | str) -> str:
    return formats.get(format).name


def _significant(params: Params | None) -> int:
    """Significant bits of floats and grids; 0 for tables, which are step functions of float32 numbers."""
    if isinstance(params, FloatParams):
        return params.man + 1
    return params.bits if isinstance(params, GridParams) else 0


def _key(how: Arithmetic, rng: Stream | None) -> kernels.Key | None:
    if how.rounding != Rounding.STOCHASTIC:
        if rng is not None:
            raise FormatError("rng is for rounding='stochastic' only")
        return None
    if not _given(how):
        return None
    if not isinstance(rng, Stream):
        raise FormatError("stochastic rounding needs rng=Stream(seed, step=..., tensor=..., rank=...)")
    return rng.key


def _shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the shape of the result; raises InputError if operands do not match."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise InputError(
                f"{name} must be a torch.Tensor, not {type(x).__name__}; use torch.as_tensor(...)"
            )
        if x.dtype != torch.float32:
            raise InputError(
                f"{name} must be float32, not {str(x.dtype).removeprefix('torch.')}; use .float()"
            )
        if x.ndim < 2:
            raise InputError(f"{name} must have 2 or more dimensions, not {x.ndim}; use unsqueeze")
        if x.layout != torch.strided:
            raise InputError(f"{name} must be dense, not {x.layout}; use .to_dense()")
    if a.device != b.device:
        raise InputError(f"a is on {a.device} and b on {b.device}; move one of them")
    if a.shape[-1] != b.shape[-2]:
        raise InputError(
            f"a has {a.shape[-1]} columns and b {b.shape[-2]} rows; shapes are [..., M, K] and [..., K, N]"
        )
    if b.ndim == 2 or a.shape[:-2] == b.shape[:-2]:
        return (*a.shape[:-1], b.shape[-1])
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        shapes = f"{tuple(a.shape[:-2])} and {tuple(b.shape[:-2])}"
        raise InputError(f"leading dimensions {shapes} do not match; make them equal") from None
    return (*batch, a.shape[-2], b.shape[-1])


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_neg()


def _batched(a: Tensor, b: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return operands with one leading dimension. One matrix for a whole batch is not copied."""
    if b.ndim == 2:
        return a.reshape(1, -1, a.shape[-1]), b[None]
    left, right = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    return left.reshape(-1, *a.shape[-2:]), right.reshape(-1, *b.shape[-2:])
