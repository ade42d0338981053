"""Dettmers' pure 8-bit mode: what would travel between devices goes through a codec, on one device.

In data parallelism gradients travel (`gradients_`); in model parallelism activations and errors (`attach`).
Dettmers (2016, "8-Bit Approximations for Parallelism in Deep Learning") trained like this to see whether
accuracy suffers: every number is encoded and decoded, none stays in float32 because it happens to be local.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire import codecs
from thinwire.codecs import AnySpec, Codec
from thinwire.errors import CodecError, InputError
from thinwire.rounding import Stream

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def round_trip(x: Tensor, codec: AnySpec, rng: Stream | None = None) -> Tensor:
    """What arrives of a tensor that is sent with a codec.

    >>> round_trip(torch.tensor([0.1, 1.0]), "int4")
    tensor([0.1429, 1.0000])
    """
    found = codecs.get(codec).for_shape(x.shape)
    if found.feedback or found.agreement(1):
        raise CodecError(
            f"{found.spec} cannot be used for a round trip; use one without +ef or shared scales"
        )
    flat = x.detach().reshape(-1).float()
    wire = found.encode(flat, rng if found.needs_rng else None)
    return found.decode(wire, flat.numel()).view(x.shape).to(x.dtype)


def gradients_(parameters: Iterable[nn.Parameter], codec: AnySpec, *, seed: int = 0, step: int = 0) -> None:
    """Replace gradients by what arrives of them: data parallelism with every gradient sent."""
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            rng = Stream(seed, step=step, tensor=f"gradient/{place}")
            parameter.grad.copy_(round_trip(parameter.grad, codec, rng))


@dataclass
class Through:
    """Activations and errors of a model through a codec: model parallelism. `remove()` ends it."""

    codec: Codec
    seed: int = 0
    layers: list[str] = field(default_factory=list)  #: whose input travels
    calls: int = 0
    _hooks: list[RemovableHandle] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def sent(self, x: Tensor, what: str, call: int) -> Tensor:
        return round_trip(x, self.codec, Stream(self.seed, step=call, tensor=what))


def attach(model: nn.Module, codec: AnySpec, *, seed: int = 0) -> Through:
    """Let what comes into every linear or convolutional layer but the first pass through a codec.

    On the way back the error with respect to it does, too. So the output layer's own results stay as they
    are, as in Dettmers' experiments.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> attach(net, "tree8").layers
    ['2']
    """
    apart = [each.out_proj for each in model.modules() if isinstance(each, nn.MultiheadAttention)]
    names = [  # attention multiplies by the weight of its last layer without calling it
        name
        for name, each in model.named_modules()
        if isinstance(each, LAYERS) and not any(each is other for other in apart)
    ]
    if len(names) < 2:
        raise InputError("the model has fewer than two linear or convolutional layers: nothing would travel")
    found = Through(codecs.get(codec), seed, names[1:])
    round_trip(torch.zeros(1), found.codec, Stream(0))
    for name in found.layers:

        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name) -> Any:
            found.calls += 1
            x = given[0] if given else named["input"]
            sent = _Sent.apply(x, found, name, "activation", found.calls)
            return ((sent, *given[1:]), named) if given else ((), {**named, "input": sent})

        found._hooks.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
    return found


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, through: Through, name: str, what: str, call: int) -> Tensor:
        ctx.through, ctx.name, ctx.call = through, name, call
        return through.sent(x, f"{name}/{what}", call)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None, None, None, None]:
        found: Tensor = _Sent.apply(error, ctx.through, ctx.name, "error", ctx.call)
        return found, None, None, None, None
