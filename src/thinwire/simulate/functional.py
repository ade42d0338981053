"""Layers as functions whose numbers are rounded as `Stages` say, in the forward and the backward pass.

F, B, G and L round to `stages.forward`, `backward`, `gradient` and `loss`. `*` is a matrix product computed
as `stages.arithmetic` says, or `stages.backward_arithmetic` in the backward pass; S rounds to the format of
its sums. All other operations are computed in float32 and then rounded. The derivative of rounding counts as
one (straight-through). dy is the incoming gradient, e the error computed from it. With `stages.clipped`,
`linear` and `conv` first set dy to zero where y is an end of F's format.

| function | forward | backward |
|---|---|---|
| `linear` | y = F(S(F(x) * F(w)^T + F(b))) (1) | e = B(dy); dx = B(e * B(w)) |
| | | dw = G(e^T * F(x)); db = G(1 * e) |
| `conv1d`, `conv2d` | the same: see `thinwire.simulate.convolution` | |
| `batch_norm`, `layer_norm`, `group_norm` | see `thinwire.simulate.normalization` | |
| `embedding` | y = F(w[i]) | e = B(dy); dw[i] = G(sum of the e that hit i) |
| `attention` | s = F(c (F(q) * F(k)^T)) | e = B(dy); dv = B(p^T * e); dp = B(e * F(v)^T) |
| | p = F(softmax(s + mask)) | ds = B(p (dp - sum of p dp)) |
| | y = F(p * F(v)) | dq = B(c (ds * F(k))); dk = B(c (ds^T * F(q))) |
| `cross_entropy` | z = L(x); p = L(softmax(z)) | dx = L(dy (p - t) / n) |
| | loss = L(sum of -t log softmax(z) / n) | |
| `rounded` | y = F(x) | dx = B(dy) |

(1) `*` is rounded by S before F(b) is added; with `stages.fused`, F(b) is part of the exact sum.

The sum over a batch in db uses the arithmetic's order and format of sums, but multiplies nothing: the format
of products and `mogami` do not apply. Where F and B are the same and not random, B(w) is F(w).

A function takes a `Site`: stages, a name, a seed, and the number of the call. Roundings are counted, and draw
random words, under the site's name and one of: input, weight, bias, output, error (e), error_weight (B(w)),
input_error (dx), gradient (dw), bias_gradient (db); others are named in the code.

>>> from thinwire.simulate import Stages
>>> x, w = torch.tensor([[0.3]], requires_grad=True), torch.tensor([[0.7]])
>>> y = linear(x, w, site=Site(Stages(forward="e4m3", backward="e5m2")))
>>> y.backward()
>>> y.item(), x.grad.item()
(0.21875, 0.75)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.errors import InputError
from thinwire.simulate.convolution import conv1d, conv2d
from thinwire.simulate.normalization import batch_norm, group_norm, layer_norm
from thinwire.simulate.precision import Precision
from thinwire.simulate.site import Site, single, unshared

__all__ = [
    "attention",
    "batch_norm",
    "conv1d",
    "conv2d",
    "cross_entropy",
    "embedding",
    "group_norm",
    "layer_norm",
    "linear",
    "rounded",
]

PLAIN = Site()
REDUCTIONS = ("mean", "sum", "none")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, site: Site = PLAIN) -> Tensor:
    """Return [..., out] from [..., in] and weights [out, in].

    >>> linear(torch.ones(2, 3), torch.ones(1, 3))
    tensor([[3.],
            [3.]])
    """
    single(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, site)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        xq, wq = site.forward(x, "input"), site.forward(weight, "weight")
        bq = None if bias is None else site.forward(bias, "bias")
        ctx.site = site
        y = site.affine(_rows(xq), wq.t(), None if bq is None else bq[None])
        y = site.forward(y, "output", site.ahead)
        ctx.save_for_backward(xq, wq, weight, site.cut(y))
        return unshared(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        xq, wq, weight, cut = ctx.saved_tensors
        site, wanted = ctx.site, ctx.needs_input_grad
        e = site.error(_rows(dy), cut)
        dx = dw = db = None
        if wanted[0]:
            dx = site.product(e, site.again(weight, wq, "error_weight"), site.back, "input_error", "BB")
            dx = site.backward(dx, "input_error", site.back).view(xq.shape)
        if wanted[1]:
            dw = site.product(e.t(), _rows(xq), site.back, "gradient", "BF")
            dw = site.gradient(dw, "gradient", site.back)
        if wanted[2]:
            db = site.total(e, site.back, "bias_gradient", "B")
            db = site.gradient(db, "bias_gradient", site.back)
        return dx, dw, db, None


def _rows(x: Tensor) -> Tensor:
    """Return [..., N] as a matrix, also if it is empty."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def embedding(
    indices: Tensor, weight: Tensor, padding_idx: int | None = None, *, site: Site = PLAIN
) -> Tensor:
    """Return rows of a table. A scale, if the precision has one, is computed from these rows.

    Rows of gradients are added up in float32: one after the other on a CPU, in torch's order on a GPU.

    >>> embedding(torch.tensor([1, 1]), torch.tensor([[0.1], [0.2]]))
    tensor([[0.2000],
            [0.2000]])
    """
    single(weight)
    result: Tensor = _Embedding.apply(indices, weight, padding_idx, site)
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int | None, site: Site) -> Tensor:
        ctx.site, ctx.rows = site, weight.shape[0]
        ctx.padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
        ctx.save_for_backward(indices)
        return site.forward(torch.nn.functional.embedding(indices, weight), "output")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        e = ctx.site.backward(dy, "error")
        dw = torch.ops.aten.embedding_dense_backward(e, indices, ctx.rows, ctx.padding, False)
        return None, ctx.site.gradient(dw, "gradient"), None, None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    site: Site = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return scaled dot-product attention on [..., time, width], and its weights p without gradient.

    A boolean mask is True where a query may attend; other masks are added to the scores. `causal` hides later
    positions. Hidden scores are minus infinity, which F does not round; a row that is all hidden is NaN. With
    `dropout`, y uses F(p / (1 - dropout)) where p is not dropped.

    >>> x = torch.eye(2)
    >>> attention(x, x, x, causal=True)[1]
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """
    single(query, key, value)
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise InputError("query, key and value must have equal leading dimensions; use expand")
    if causal:
        shape = (query.shape[-2], key.shape[-2])
        seen = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        mask = seen if mask is None else _hidden(mask).masked_fill(~seen, -torch.inf)
    kept = None
    if dropout:
        kept = torch.rand(*query.shape[:-1], key.shape[-2], device=query.device) >= dropout
    result: tuple[Tensor, Tensor] = _Attention.apply(query, key, value, mask, kept, dropout, site)
    return result


def _hidden(mask: Tensor) -> Tensor:
    """Return a mask to add to scores; a boolean mask is False where scores are hidden."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kept: Tensor | None,
        dropout: float,
        site: Site,
    ) -> tuple[Tensor, Tensor]:
        ctx.site, ctx.scale, ctx.dropout = site, query.shape[-1] ** -0.5, dropout
        q, k, v = (site.forward(x, f"input_{part}") for x, part in ((query, "q"), (key, "k"), (value, "v")))
        s = site.product(q, k.mT, site.ahead, "scores") * ctx.scale
        s = site.forward(s, "scores")
        p = torch.softmax(s if mask is None else s + _hidden(mask), -1)
        p = site.forward(p, "weights")
        used = p if kept is None else site.forward(torch.where(kept, p / (1 - dropout), 0), "kept")
        ctx.save_for_backward(q, k, v, p, used, kept)
        ctx.mark_non_differentiable(p)
        y = site.product(used, v, site.ahead, "output")
        return site.forward(y, "output", site.ahead), p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, used, kept = ctx.saved_tensors
        site, scale = ctx.site, ctx.scale
        e = site.backward(dy, "error")
        dv = site.backward(site.product(used.mT, e, site.back, "error_v"), "error_v")
        dp = site.backward(site.product(e, v.mT, site.back, "error_weights"), "error_weights")
        if kept is not None:
            dp = torch.where(kept, dp / (1 - ctx.dropout), 0)
        ds = site.backward(p * (dp - (p * dp).sum(-1, keepdim=True)), "error_scores")
        dq = site.backward(site.product(ds, k, site.back, "error_q") * scale, "error_q")
        dk = site.backward(site.product(ds.mT, q, site.back, "error_k") * scale, "error_k")
        return dq, dk, dv, None, None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    site: Site = PLAIN,
) -> Tensor:
    """Return the cross-entropy of softmax(logits) and class numbers; classes are dimension 1.

    A target t is one at its class, or less with label smoothing. n is the sum of the targets' class weights,
    and 1 unless `reduction` is "mean". Loss scaling scales the error before it is rounded.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
    tensor(1.3863)
    """
    single(logits, weight)
    if reduction not in REDUCTIONS:
        raise InputError(f"unknown reduction '{reduction}'; use one of: {', '.join(REDUCTIONS)}")
    if target.is_floating_point():
        raise InputError("target must hold class numbers; probabilities of classes cannot be simulated")
    expected = (*logits.shape[:1], *logits.shape[2:]) if logits.ndim > 1 else ()
    if tuple(target.shape) != expected:
        given = f"not {tuple(target.shape)}"
        raise InputError(f"logits {tuple(logits.shape)} need a target of shape {expected}, {given}")
    flat = logits.movedim(1, -1).flatten(0, -2) if logits.ndim > 1 else logits[None]
    losses: Tensor = _CrossEntropy.apply(
        flat, target.reshape(-1), weight, (ignore_index, reduction, label_smoothing), site
    )
    return losses.view(target.shape) if reduction == "none" else losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        how: tuple[int, str, float],
        site: Site,
    ) -> Tensor:
        ctx.site, ctx.how = site, how
        ignore, reduction, smoothing = how
        z = site.loss(logits, "input")
        logs = torch.log_softmax(z, -1)
        counted = target != ignore
        wanted = _wanted(target.where(counted, 0), logits.shape[-1], weight, smoothing)
        wanted = wanted * counted[:, None]
        losses = -torch.where(wanted == 0, 0, wanted * logs).sum(-1)
        ones = counted.float() if weight is None else weight[target.where(counted, 0)] * counted
        ctx.save_for_backward(site.loss(logs.exp(), "probabilities"), wanted, ones.sum())
        if reduction == "none":
            return site.loss(losses, "output")
        total = losses.sum()
        return site.loss(total / ones.sum() if reduction == "mean" else total, "output")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        p, wanted, count = ctx.saved_tensors
        error = p * wanted.sum(-1, keepdim=True) - wanted
        error = error * (dy[:, None] if ctx.how[1] == "none" else dy)
        if ctx.how[1] == "mean":
            error = error / count
        return ctx.site.loss(error, "error"), None, None, None, None


def _wanted(target: Tensor, classes: int, weight: Tensor | None, smoothing: float) -> Tensor:
    """Return targets as weights of the log-probabilities of classes."""
    targets = torch.full((target.shape[0], classes), smoothing / classes, device=target.device)
    targets.scatter_(1, target[:, None], 1 - smoothing + smoothing / classes)
    return targets if weight is None else targets * weight


def rounded(x: Tensor, *, site: Site = PLAIN) -> Tensor:
    """Round x to `stages.forward`, and its error in the backward pass to `stages.backward`.

    >>> from thinwire.simulate import Stages
    >>> rounded(torch.tensor([0.3]), site=Site(Stages(forward="e5m2")))
    tensor([0.3125])
    """
    single(x)
    if site.stages.forward == site.stages.backward == Precision():
        return x
    result: Tensor = _Rounded.apply(x, site)
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: Site) -> Tensor:
        ctx.site = site
        result = site.forward(x, "output")
        return x.clone() if result is x else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.site.backward(dy, "error"), None
