"""Normalisation: statistics, normalised values and results, each rounded.

With the letters of `thinwire.simulate.functional`, and m and v over a batch, a row, or a group:

    xq = F(x); m = F(mean of xq); v = F(variance of xq)
    n = F((xq - m) r) with r = 1 / sqrt(v + eps)
    y = F(n F(w) + F(b))
    e = B(dy); g = e B(w)
    dx = B(r (g - mean of g - n mean of g n)); dw = G(sum of e n); db = G(sum of e)

The variance divides by the count, without correction. In evaluation, `batch_norm` takes m and v from the
running statistics, rounded by F, and dx = B(r g). Running statistics are kept from step to step like weights,
so they are rounded to `stages.optimizer`: rounded by F, an average that moves by a tenth of a difference
would often not move at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.errors import InputError
from thinwire.simulate.site import Site, single, unshared

PLAIN = Site()


@dataclass(frozen=True)
class Layout:
    """The shape of the input, the dimensions that statistics are over, and the shape of weights."""

    shape: tuple[int, ...]
    over: tuple[int, ...]
    affine: tuple[int, ...]


def batch_norm(  # noqa: PLR0913
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    site: Site = PLAIN,
) -> Tensor:
    """Normalise over all dimensions but the second; training updates running statistics.

    >>> batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
    tensor([[-1.0000],
            [ 1.0000]])
    """
    if x.ndim < 2:
        raise InputError(f"batch_norm takes [samples, channels, ...], not {tuple(x.shape)}")
    over = tuple(n for n in range(x.ndim) if n != 1)
    layout = Layout(tuple(x.shape), over, (x.shape[1], *[1] * (x.ndim - 2)))
    if not training and (running_mean is None or running_var is None):
        raise InputError("batch_norm needs running statistics in evaluation; use training=True")
    if training and x.numel() == x.shape[1]:
        raise InputError(
            f"batch_norm needs more than one value per channel in training, not {tuple(x.shape)}"
        )
    given = None if training else (running_mean, running_var)
    if not x.numel():  # an empty batch has no statistics
        given = (x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]))
    y, mean, var = _normalized(x, weight, bias, layout, eps, given, site)
    if training and x.numel() and running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        for running, new, name in (
            (running_mean, mean, "running_mean"),
            (running_var, var * (count / (count - 1)), "running_var"),
        ):
            moved = running.lerp(new.view(-1), momentum)
            running.copy_(site.stored(moved, name))
    return y


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    site: Site = PLAIN,
) -> Tensor:
    """Normalise over the last dimensions.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,))
    tensor([[-1.0000,  1.0000]])
    """
    shape = tuple(normalized_shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise InputError(f"input must end with the dimensions {shape}, not {tuple(x.shape)}")
    over = tuple(range(x.ndim - len(shape), x.ndim))
    return _normalized(x, weight, bias, Layout(tuple(x.shape), over, shape), eps, None, site)[0]


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    site: Site = PLAIN,
) -> Tensor:
    """Normalise over all dimensions but the first, with channels (the second) in groups.

    >>> group_norm(torch.tensor([[1.0, 3.0, 2.0, 6.0]]), 2)
    tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    if x.shape[1] % num_groups:
        raise InputError(f"{x.shape[1]} channels cannot be split into {num_groups} groups")
    split = (num_groups, x.shape[1] // num_groups)
    layout = Layout(
        (x.shape[0], *split, *x.shape[2:]), tuple(range(2, x.ndim + 1)), (*split, *[1] * (x.ndim - 2))
    )
    return _normalized(x, weight, bias, layout, eps, None, site)[0]


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    eps: float,
    given: tuple[Tensor | None, Tensor | None] | None,
    site: Site,
) -> tuple[Tensor, Tensor, Tensor]:
    single(x, weight, bias)
    result: tuple[Tensor, Tensor, Tensor] = _Normalization.apply(x, weight, bias, layout, eps, given, site)
    return result


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layout: Layout,
        eps: float,
        given: tuple[Tensor, Tensor] | None,
        site: Site,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.site, ctx.layout, ctx.shapes = (
            site,
            layout,
            [None if w is None else w.shape for w in (weight, bias)],
        )
        ctx.given = given is not None
        xq = site.forward(x, "input").reshape(layout.shape)
        if given is None:
            var, mean = torch.var_mean(xq, layout.over, correction=0, keepdim=True)
        else:
            mean, var = (each.view(layout.affine) for each in given)
        mean, var = site.forward(mean, "mean"), site.forward(var, "variance")
        r = torch.rsqrt(var + eps)
        n = site.forward((xq - mean) * r, "normalized")
        wq = None if weight is None else site.forward(weight, "weight")
        ctx.save_for_backward(n, r, weight, wq)
        y = n if wq is None else n * wq.view(layout.affine)
        if bias is not None:
            y = y + site.forward(bias, "bias").view(layout.affine)
        ctx.mark_non_differentiable(mean, var)
        y = y.clone() if y is n else site.forward(y, "output")
        return unshared(y, x.shape), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        n, r, weight, wq = ctx.saved_tensors
        site, layout, wanted = ctx.site, ctx.layout, ctx.needs_input_grad
        e = site.backward(dy, "error").reshape(layout.shape)
        dx = dw = db = None
        if wanted[0]:
            g = e if weight is None else e * site.again(weight, wq, "error_weight").view(layout.affine)
            if not ctx.given:
                mean = g.mean(layout.over, keepdim=True)
                g = g - mean - n * (g * n).mean(layout.over, keepdim=True)
            dx = site.backward(g * r, "input_error").view(dy.shape)
        if wanted[1]:
            dw = (e * n).sum_to_size(layout.affine).reshape(ctx.shapes[0])
            dw = site.gradient(dw, "gradient")
        if wanted[2]:
            db = e.sum_to_size(layout.affine).reshape(ctx.shapes[1])
            db = site.gradient(db, "bias_gradient")
        return dx, dw, db, None, None, None, None
