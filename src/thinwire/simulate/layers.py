"""Layers of torch.nn whose numbers are rounded as `Stages` say.

Each is a subclass of the torch layer of the same name, with its parameters and buffers, and computes with the
functions of `thinwire.simulate.functional`. `simulated` converts an existing layer by changing the module's
class: object, parameters and hooks stay the same, so optimizers and DDP stay valid.

>>> from thinwire.simulate import Stages
>>> fc = nn.Linear(2, 1)
>>> weight = fc.weight
>>> simulated(fc, Stages.uniform("e4m3"), name="fc") is fc, fc.weight is weight
(True, True)
>>> fc, isinstance(fc, nn.Linear), fc.stages.forward
(Linear(in_features=2, out_features=1, bias=True), True, Precision(e4m3))

A simulated layer has `stages`, `seed`, `name`, `counters` and `calls`, which may be set. `calls` counts
forward passes and selects the random words of each: set it to resume a run, and give ranks different seeds. A
repeated forward pass, as in activation checkpointing, counts as a call and draws other words.

Layers that only select or move numbers (ReLU, max pooling, reshaping) are not changed. Average pooling and
smooth activations compute in float32; their output is rounded by F and the incoming error by B.
"""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from thinwire.errors import InputError
from thinwire.simulate import functional
from thinwire.simulate.counters import Counters
from thinwire.simulate.site import Site
from thinwire.simulate.stages import Stages

M = TypeVar("M", bound=nn.Module)
OURS = ("stages", "seed", "name", "counters", "calls")  #: attributes of simulated layers


class Simulated(nn.Module):
    """Attributes of all simulated layers."""

    stages: Stages = Stages()
    seed: int = 0
    name: str = "layer"
    counters: Counters | None = None
    calls: int = 0

    def _site(self) -> Site:
        """Count a call, and return its site."""
        self.calls += 1
        return Site(self.stages, self.seed, self.name, self.calls, self.counters)


class Linear(Simulated, nn.Linear):
    """A product with a matrix."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias, site=self._site())


class Conv1d(Simulated, nn.Conv1d):
    """A convolution of sequences."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = _padded(self, input)
        return functional.conv1d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, site=self._site()
        )


class Conv2d(Simulated, nn.Conv2d):
    """A convolution of images."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = _padded(self, input)
        return functional.conv2d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, site=self._site()
        )


def _padded(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[Tensor, str | tuple[int, ...]]:
    """Pad the input unless padding is with zeros; returns it and the padding that is left to do."""
    if conv.padding_mode == "zeros":
        return x, conv.padding
    pads = conv._reversed_padding_repeated_twice
    return nn.functional.pad(x, pads, mode=conv.padding_mode), "valid"


class _BatchNorm(Simulated, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        momentum = self.momentum or 0.0
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        kept = not self.training or self.track_running_stats
        return functional.batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            momentum,
            self.eps,
            site=self._site(),
        )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Normalisation over a batch."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Normalisation over a batch of images."""


class LayerNorm(Simulated, nn.LayerNorm):
    """Normalisation over features."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, site=self._site()
        )


class GroupNorm(Simulated, nn.GroupNorm):
    """Normalisation over groups of channels."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, site=self._site()
        )


class Embedding(Simulated, nn.Embedding):
    """Rows of a table."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight, self.padding_idx, site=self._site())


class CrossEntropyLoss(Simulated, nn.CrossEntropyLoss):
    """The loss of classification, in the numbers of the stage `loss`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            site=self._site(),
        )


class MultiheadAttention(Simulated, nn.MultiheadAttention):
    """Input projections (`linear`), heads (`attention`), and the output projection (`linear`)."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch; the weights it returns carry no gradient."""
        if is_causal and attn_mask is None:
            raise InputError("is_causal=True only says that attn_mask is causal; give attn_mask too")
        site, batched = self._site(), query.ndim == 3
        q, k, v = self._projected(query, key, value, site)
        if not batched:
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        y, weights = functional.attention(q, k, v, mask, dropout=dropout, site=site.part("heads"))
        y = y.transpose(1, 2).flatten(2)
        y = functional.linear(y, self.out_proj.weight, self.out_proj.bias, site=site.part("out_proj"))
        weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            y, weights = y[0], weights[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y, weights if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, site: Site) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            packed = functional.linear(
                query, self.in_proj_weight, self.in_proj_bias, site=site.part("in_proj")
            )
            return packed.chunk(3, -1)
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = ("q_proj", "k_proj", "v_proj")
        return tuple(
            functional.linear(x, weight, bias, site=site.part(part))
            for x, weight, bias, part in zip((query, key, value), weights, biases, parts, strict=True)
        )

    @staticmethod
    def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return both masks as one, to add to scores [batch, heads, queries, keys]."""
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask)
            mask = mask.unflatten(0, (q.shape[0], -1)) if mask.ndim == 3 else mask
        if padding is not None:
            hidden = _added(padding).view(q.shape[0], 1, 1, -1)
            mask = hidden if mask is None else mask + hidden
        return mask


def _added(mask: Tensor) -> Tensor:
    """Return a mask to add to scores; a boolean mask is True where scores are hidden."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


class _After(Simulated):
    """Layers that compute in float32 and then round the result."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return functional.rounded(super().forward(*args, **kwargs), site=self._site())


class AvgPool1d(_After, nn.AvgPool1d):
    """Averages, rounded."""


class AvgPool2d(_After, nn.AvgPool2d):
    """Averages, rounded."""


class AdaptiveAvgPool1d(_After, nn.AdaptiveAvgPool1d):
    """Averages, rounded."""


class AdaptiveAvgPool2d(_After, nn.AdaptiveAvgPool2d):
    """Averages, rounded."""


class GELU(_After, nn.GELU):
    """An activation, rounded."""


class SiLU(_After, nn.SiLU):
    """An activation, rounded."""


class Sigmoid(_After, nn.Sigmoid):
    """An activation, rounded."""


class Tanh(_After, nn.Tanh):
    """An activation, rounded."""


class Softmax(_After, nn.Softmax):
    """Probabilities, rounded."""


#: The simulated class of each torch layer.
KINDS: dict[type[nn.Module], type[Simulated]] = {
    next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn.")): kind
    for kind in (
        Linear, Conv1d, Conv2d, BatchNorm1d, BatchNorm2d, LayerNorm, GroupNorm, Embedding,
        MultiheadAttention, CrossEntropyLoss, AvgPool1d, AvgPool2d, AdaptiveAvgPool1d, AdaptiveAvgPool2d,
        GELU, SiLU, Sigmoid, Tanh, Softmax,
    )
}  # fmt: skip
PLAIN: dict[type[nn.Module], type[nn.Module]] = {kind: base for base, kind in KINDS.items()}


def refusal(module: nn.Module) -> str:
    """Return why a layer of torch.nn cannot be simulated; empty if it can."""
    if type(module) not in KINDS and not isinstance(module, Simulated):
        return "no simulation of this kind of layer"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "max_norm, scale_grad_by_freq and sparse are not simulated"
    elif isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "add_bias_kv and add_zero_attn are not simulated"
    return ""


def check(module: nn.Module, name: str) -> None:
    """Raise InputError if simulation would overwrite attributes of the layer."""
    own = [each for each in OURS if each in module.__dict__ and not isinstance(module, Simulated)]
    if own:
        raise InputError(
            f"{name} already has {', '.join(own)}, which simulated layers use; rename it in your code"
        )


def simulated(
    module: M, stages: Stages, *, seed: int = 0, name: str = "layer", counters: Counters | None = None
) -> M:
    """Return the same module, which now computes with these stages."""
    why = refusal(module)
    if why:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise InputError(f"{type(module).__name__} cannot be simulated: {why}; kinds: {names}")
    check(module, name)
    module.__class__ = cast(type[M], KINDS.get(type(module), type(module)))
    assert isinstance(module, Simulated)
    module.stages, module.seed, module.name, module.counters = stages, seed, name, counters
    return module


def restored(module: M) -> M:
    """Return the same module as a plain layer of torch.nn, in float32."""
    plain = PLAIN.get(type(module))
    if plain is not None:
        module.__class__ = cast(type[M], plain)
        for attribute in OURS:
            module.__dict__.pop(attribute, None)
    return module
