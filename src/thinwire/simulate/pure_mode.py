"""Dettmers' pure 8-bit mode on one device: tensors that devices would send pass through a codec.

Data parallelism sends gradients (`gradients_`), model parallelism activations and errors (`attach`).
Dettmers (2016, "8-Bit Approximations for Parallelism in Deep Learning") trained like this to see whether
accuracy suffers: every number is encoded and decoded, also those that a device would not need to send.
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
    """Encode and decode a tensor.

    >>> round_trip(torch.tensor([0.1, 1.0]), "int4")
    tensor([0.1429, 1.0000])
    """
    shaped = codecs.get(codec).for_shape(x.shape)
    if shaped.feedback or shaped.agreement(1):
        raise CodecError(
            f"{shaped.spec} cannot be used for a round trip; use one without +ef or shared scales"
        )
    flat = x.detach().reshape(-1).float()
    wire = shaped.encode(flat, rng if shaped.needs_rng else None)
    return shaped.decode(wire, flat.numel()).view(x.shape).to(x.dtype)


def gradients_(parameters: Iterable[nn.Parameter], codec: AnySpec, *, seed: int = 0, step: int = 0) -> None:
    """Encode and decode every gradient in place, as if data parallelism sent all of them."""
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            rng = Stream(seed, step=step, tensor=f"gradient/{place}")
            parameter.grad.copy_(round_trip(parameter.grad, codec, rng))


@dataclass
class PureMode:
    """The handle of `attach`: encodes a model's activations and errors until `remove()`."""

    codec: Codec
    seed: int = 0
    layers: list[str] = field(default_factory=list)  #: whose input is encoded
    calls: int = 0
    _hooks: list[RemovableHandle] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def sent(self, x: Tensor, what: str, call: int) -> Tensor:
        return round_trip(x, self.codec, Stream(self.seed, step=call, tensor=what))


def attach(model: nn.Module, codec: AnySpec, *, seed: int = 0) -> PureMode:
    """Encode and decode the input of every linear or convolutional layer but the first.

    In the backward pass the error with respect to that input is encoded and decoded too. The output layer's
    results stay as they are, as in Dettmers' experiments.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> attach(net, "tree8").layers
    ['2']
    """
    uncalled = [each.out_proj for each in model.modules() if isinstance(each, nn.MultiheadAttention)]
    names = [  # attention uses the weight of out_proj without calling that layer
        name
        for name, each in model.named_modules()
        if isinstance(each, LAYERS) and not any(each is other for other in uncalled)
    ]
    if len(names) < 2:
        raise InputError(
            "the model has fewer than two linear or convolutional layers, so nothing would be encoded"
        )
    mode = PureMode(codecs.get(codec), seed, names[1:])
    round_trip(torch.zeros(1), mode.codec, Stream(0))
    for name in mode.layers:

        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name) -> Any:
            mode.calls += 1
            x = given[0] if given else named["input"]
            sent = _Sent.apply(x, mode, name, "activation", mode.calls)
            return ((sent, *given[1:]), named) if given else ((), {**named, "input": sent})

        mode._hooks.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
    return mode


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: PureMode, name: str, what: str, call: int) -> Tensor:
        ctx.mode, ctx.name, ctx.call = mode, name, call
        return mode.sent(x, f"{name}/{what}", call)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent: Tensor = _Sent.apply(error, ctx.mode, ctx.name, "error", ctx.call)
        return sent, None, None, None, None
