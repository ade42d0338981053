"""The methods of the outer loop: what each sends, and what its outer optimizer does with it.

| method | outer gradient | outer optimizer |
|---|---|---|
| `LocalSGD` (Stich 2019) | by any codec | SGD with learning rate 1, which makes the mean of weights |
| `DiLoCo` (Douillard et al. 2023) | by any codec | SGD with Nesterov momentum |
| `SparseLoCo` (Sarfi et al. 2025) | its largest elements; the others are a residual that decays | SGD |
"""

from functools import partial
from typing import Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.errors import PolicyError
from thinwire.outer.engine import Outer
from thinwire.outer.settings import Options, settings
from thinwire.policy import Policy

SPARSE = "topk/0.02~int4/64+ef"


class LocalSGD(Outer):
    """Average the weights of all ranks every `every` steps.

        outer = LocalSGD(model, optimizer, every=10)

    The loop stays as it is: steps of the optimizer count, and every `every`-th communicates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int = 10,
        codec: AnySpec | Policy = "int8",
        **options: Unpack[Options],
    ) -> None:
        make = partial(torch.optim.SGD, lr=1.0)
        super().__init__(
            model, optimizer, settings("LocalSGD", every, codec, make, options), options.get("group")
        )


class DiLoCo(Outer):
    """Every `every` steps, apply the mean outer gradient with Nesterov momentum.

        outer = DiLoCo(model, optimizer, every=50, codec="int8")

    The paper's outer optimizer has learning rate 0.7 and momentum 0.9, its inner one is AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int = 50,
        codec: AnySpec | Policy = "int8",
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        make = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
        super().__init__(
            model, optimizer, settings("DiLoCo", every, codec, make, options), options.get("group")
        )


class SparseLoCo(Outer):
    """Send the largest elements of the outer gradient; the residual of the others acts as outer momentum.

        outer = SparseLoCo(model, optimizer, every=30, codec="topk/0.02~int4/64+ef")

    Before each outer step the residual is multiplied by `decay`. So an element that always points the same
    way grows until it is sent, as it would with momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int = 30,
        codec: AnySpec | Policy = SPARSE,
        lr: float = 1.0,
        decay: float = 0.95,
        **options: Unpack[Options],
    ) -> None:
        make = partial(torch.optim.SGD, lr=lr)
        chosen = settings("SparseLoCo", every, codec, make, options, decay)
        if not any(get_codec(rule.codec).feedback for rule in chosen.policy.rules):
            raise PolicyError(
                "SparseLoCo needs error feedback, because the residual is its momentum: "
                f"end the codec with +ef, such as {SPARSE}"
            )
        super().__init__(model, optimizer, chosen, options.get("group"))
