"""Convolutions as matrix products: windows of the input times the kernels.

With the letters of `thinwire.simulate.functional`, and one product for each group of channels:

    y  = F(S(windows(F(x)) * F(w)^T + F(b)))
    e  = B(dy)
    dw = G(e^T * windows(F(x)))
    dx = B(windows(spread(e)) * flipped(B(w)))
    db = G(1 * e)

Sums in y run over (channel, position in the kernel), as in `torch.nn.functional.unfold`; sums in dw run over
(image, position in the image). dx is a convolution of the errors with the flipped kernels; errors are
`stride` apart, with zeros between and around them. Its sums run over (output channel, position in the flipped
kernel). So the arithmetic does every addition, but strides above 1 cost products with zeros.

With arithmetic None, torch's own convolutions compute the same sums in another order. On a GPU, cuDNN may
read operands as TF32 (if torch is set to that, as it is by default) where TF32 can represent all of them: up
to 11 significant bits. Longer operands, float32 above all, are multiplied as they are.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as plain

from thinwire import formats
from thinwire.errors import InputError
from thinwire.formats import Format
from thinwire.simulate.precision import Precision
from thinwire.simulate.site import Site, single, unautocast

PLAIN = Site()


@dataclass(frozen=True)
class Geometry:
    """Stride, dilation and padding before and after, per dimension of an image; and groups of channels."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    groups: int

    @property
    def pads(self) -> list[int]:
        """As `torch.nn.functional.pad` wants them: the last dimension first."""
        return [n for pair in zip(self.before[::-1], self.after[::-1], strict=True) for n in pair]


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    site: Site = PLAIN,
) -> Tensor:
    """Convolve [batch, channels, length], or one sample.

    >>> conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 3), padding="same")
    tensor([[[2., 3., 3., 2.]]])
    """
    return _convolved(x, weight, bias, _geometry(weight, 1, stride, padding, dilation, groups), site)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    site: Site = PLAIN,
) -> Tensor:
    """Convolve [batch, channels, height, width], or one image.

    >>> conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2), stride=(1, 2))
    tensor([[[[4.],
              [4.]]]])
    """
    return _convolved(x, weight, bias, _geometry(weight, 2, stride, padding, dilation, groups), site)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, site: Site) -> Tensor:
    single(x, weight, bias)
    if x.ndim not in (weight.ndim, weight.ndim - 1):
        raise InputError(f"input must have {weight.ndim} dimensions (or one less), not {x.ndim}")
    batch = x if x.ndim == weight.ndim else x[None]
    if batch.shape[1] != weight.shape[1] * geometry.groups:
        expected = weight.shape[1] * geometry.groups
        raise InputError(f"input has {batch.shape[1]} channels; these kernels take {expected}")
    result: Tensor = _Convolution.apply(batch, weight, bias, geometry, site)
    return result if x.ndim == weight.ndim else result[0]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, site: Site
    ) -> Tensor:
        xq, wq = site.forward(x, "input"), site.forward(weight, "weight")
        bq = None if bias is None else site.forward(bias, "bias")
        ctx.site, ctx.geometry = site, geometry
        y = site.forward(_forward(site, geometry, xq, wq, bq), "output", site.ahead)
        ctx.save_for_backward(xq, wq, weight, site.cut(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        xq, wq, weight, cut = ctx.saved_tensors
        site, wanted = ctx.site, ctx.needs_input_grad
        e = site.error(dy, cut)
        dx = dw = db = None
        if wanted[0]:
            dx = _input_error(site, ctx.geometry, e, site.again(weight, wq, "error_weight"), xq.shape)
            dx = site.backward(dx, "input_error", site.back)
        if wanted[1]:
            dw = _gradient(site, ctx.geometry, e, xq, wq)
            dw = site.gradient(dw, "gradient", site.back)
        if wanted[2]:
            rows = e.transpose(0, 1).flatten(1).t()
            db = site.total(rows, site.back, "bias_gradient", "B")
            db = site.gradient(db, "bias_gradient", site.back)
        return dx, dw, db, None, None


def _forward(site: Site, geometry: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if site.ahead is None:
        padded, padding = _even(geometry, x)
        with _unshortened(x.device, site.stages.forward):
            y = torch.convolution(
                padded,
                weight,
                None,
                geometry.stride,
                padding,
                geometry.dilation,
                False,
                [0] * len(padding),
                geometry.groups,
            )
        return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))
    windows = _windows(plain.pad(x, geometry.pads), weight.shape[2:], geometry.stride, geometry.dilation)
    added = None if bias is None else bias.view(geometry.groups, 1, -1)
    y = site.affine(_rows(windows, geometry.groups), _kernels(weight, geometry), added)
    return _images(y, x.shape[0], windows.shape[2 : weight.ndim])


def _gradient(site: Site, geometry: Geometry, e: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if site.back is None:
        with _unshortened(e.device, site.stages.backward, site.stages.forward):
            return _torch_backward(geometry, e, x, weight, 1)
    windows = _windows(plain.pad(x, geometry.pads), weight.shape[2:], geometry.stride, geometry.dilation)
    left = e.unflatten(1, (geometry.groups, -1)).movedim(0, 2).flatten(2)  # [groups, out, batch * places]
    rows = _rows(windows, geometry.groups)
    return site.product(left, rows, site.back, "gradient", "BF").view(weight.shape)


def _input_error(site: Site, geometry: Geometry, e: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    if site.back is None:
        with _unshortened(e.device, site.stages.backward):
            return _torch_backward(geometry, e, e.new_empty(shape), weight, 0)
    spread = _spread(geometry, e, weight.shape[2:], shape[2:])
    windows = _windows(spread, weight.shape[2:], (1,) * (weight.ndim - 2), geometry.dilation)
    flipped = weight.flip(tuple(range(2, weight.ndim))).unflatten(0, (geometry.groups, -1))
    kernels = flipped.transpose(1, 2).flatten(3).flatten(0, 1)  # [groups * in, out, places]
    kernels = kernels.unflatten(0, (geometry.groups, -1)).flatten(2).mT  # [groups, out * places, in]
    dx = site.product(_rows(windows, geometry.groups), kernels, site.back, "input_error", "BB")
    return _images(dx, shape[0], shape[2:])


def _torch_backward(geometry: Geometry, e: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    """Return the gradient of the input (0) or of the kernels (1), computed by torch."""
    padded, padding = _even(geometry, x)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        e,
        padded,
        weight,
        None,
        geometry.stride,
        padding,
        geometry.dilation,
        False,
        [0] * len(padding),
        geometry.groups,
        [which == 0, which == 1, False],
    )[which]
    if which == 0 and padded is not x:
        return plain.pad(gradient, [-n for n in geometry.pads])
    return gradient


@contextlib.contextmanager
def _unshortened(device: torch.device, *operands: object) -> Iterator[None]:
    """Turn off autocast, and TF32 unless it can represent these precisions, in this context."""
    with unautocast(device):
        if device.type != "cuda" or all(_is_short(Precision.of(each).format) for each in operands):  # type: ignore[arg-type]
            yield
            return
        conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        before = conv.fp32_precision
        conv.fp32_precision = "ieee"
        try:
            yield
        finally:
            conv.fp32_precision = before


@functools.cache
def _is_short(format: Format | None) -> bool:
    """Whether TF32 can represent all numbers of a format."""
    if format is None or format.bits > 16:
        return False
    values = format.values()
    return torch.equal(formats.get("tf32").round(values), values)


def _even(geometry: Geometry, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input, and the padding left to torch, which pads both sides equally."""
    if geometry.before == geometry.after:
        return x, geometry.before
    return plain.pad(x, geometry.pads), (0,) * len(geometry.before)


def _windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """[batch, channels, places ..., kernel ...], a view."""
    for at, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        wide = (size - 1) * gap + 1
        if wide > x.shape[2 + at]:
            raise InputError(f"a kernel {wide} long is larger than the padded input, {x.shape[2 + at]} long")
        x = x.unfold(2 + at, wide, step)[..., ::gap]
    return x


def _rows(windows: Tensor, groups: int) -> Tensor:
    """[groups, batch * places, channels * kernel]"""
    places = (windows.ndim - 2) // 2
    split = windows.unflatten(1, (groups, -1))  # [batch, groups, channels, places ..., kernel ...]
    split = split.movedim(0, 1).movedim(2, 2 + places)
    return split.reshape(groups, -1, split.shape[2 + places :].numel())


def _kernels(weight: Tensor, geometry: Geometry) -> Tensor:
    """[groups, channels * kernel, out]"""
    return weight.flatten(1).unflatten(0, (geometry.groups, -1)).mT


def _images(rows: Tensor, batch: int, places: tuple[int, ...]) -> Tensor:
    """[groups, batch * places, out] as [batch, groups * out, places ...]"""
    split = rows.unflatten(1, (batch, math.prod(places))).permute(1, 0, 3, 2)  # [batch, groups, out, places]
    return split.reshape(batch, split.shape[1] * split.shape[2], *places)


def _spread(geometry: Geometry, e: Tensor, kernel: tuple[int, ...], image: tuple[int, ...]) -> Tensor:
    """Return errors `stride` apart, with zeros between and around them."""
    sizes = [(n - 1) * step + 1 for n, step in zip(e.shape[2:], geometry.stride, strict=True)]
    spread = e.new_zeros(*e.shape[:2], *sizes)
    places = tuple(slice(None, None, step) for step in geometry.stride)
    spread[(slice(None), slice(None), *places)] = e
    pads: list[int] = []
    for at in reversed(range(len(kernel))):
        span = (kernel[at] - 1) * geometry.dilation[at]
        before = span - geometry.before[at]
        pads += [before, image[at] + span - before - sizes[at]]
    return plain.pad(spread, pads)


def _geometry(
    weight: Tensor,
    dimensions: int,
    stride: int | tuple[int, ...],
    padding: int | str | tuple[int, ...],
    dilation: int | tuple[int, ...],
    groups: int,
) -> Geometry:
    if weight.ndim != dimensions + 2:
        raise InputError(f"weight must have {dimensions + 2} dimensions, not {weight.ndim}")
    steps, gaps = _each(stride, dimensions, "stride"), _each(dilation, dimensions, "dilation")
    if padding == "same":
        if set(steps) != {1}:
            raise InputError("padding='same' needs stride 1; give padding as numbers")
        spans = [(size - 1) * gap for size, gap in zip(weight.shape[2:], gaps, strict=True)]
        return Geometry(steps, gaps, tuple(n // 2 for n in spans), tuple(n - n // 2 for n in spans), groups)
    if isinstance(padding, str) and padding != "valid":
        raise InputError(f"unknown padding '{padding}'; use same, valid, or numbers")
    around = _each(0 if isinstance(padding, str) else padding, dimensions, "padding")
    return Geometry(steps, gaps, around, around, groups)


def _each(given: int | tuple[int, ...], dimensions: int, what: str) -> tuple[int, ...]:
    values = (given,) * dimensions if isinstance(given, int) else tuple(given)
    if len(values) != dimensions:
        raise InputError(f"{what} must be a number or {dimensions} of them, not {given}")
    return values
