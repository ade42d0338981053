"""What `thinwire bench outer` compares: DDP, outer loops and optimizers that communicate, on one small GPT.

A method's name says what is sent and how: "ddp int4", "diloco-50 int8" (an outer step after 50 steps),
"sparseloco-50", "streaming-50 int4" (DiLoCo in two fragments whose all-reduce overlaps with 10 inner steps),
"demo", "onebit-adam".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import outer
from thinwire.errors import InputError
from thinwire.zoo import small
from thinwire.zoo.transformer import GPT2

WIDTH, DEPTH, HEADS = 128, 2, 4
LR = 2e-3
DEMO_LR = 4e-3  #: of steps by sign; as LR the best of a few powers of two, with a seed that is not used here
WARMUP = 0.15  #: share of the steps in which 1-bit Adam is Adam
INTERVALS, CODECS = (10, 50, 250), ("fp32", "int8", "int4")
OVERLAP = {"fragments": 2, "delay": 10}

METHODS = (
    *(f"ddp {codec}" for codec in ("fp32", "int4", "onebit")),
    *(f"diloco-{every} {codec}" for every in INTERVALS for codec in CODECS),
    "streaming-50 int4",
    "sparseloco-50",
    "demo",
    "onebit-adam",
)


@dataclass
class Trained:
    """A network in training by a method."""

    net: nn.Module  #: that is called
    optimizer: torch.optim.Optimizer
    sent_nbytes: Callable[[], int]
    weights: Callable[
        [], dict[str, Tensor]
    ]  #: the same on all ranks: after the last outer step, if there are any
    every: int = 1  #: steps from one outer step to the next
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, x: Tensor, y: Tensor, number: int, steps: int) -> float:
        """Train one step, number 1 to `steps`; return this rank's loss."""
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * small.rate("gpt", number, steps)
        self.optimizer.zero_grad()
        loss = loss_of(self.net, x, y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def network(seed: int, positions: int) -> GPT2:
    """Return a GPT for bytes, without dropout: 0.44 million parameters, a seed's on all ranks."""
    torch.manual_seed(seed)
    net = GPT2(256, positions, WIDTH, DEPTH, HEADS)
    nn.init.normal_(net.tokens.weight, std=0.1)  # with GPT-2's 0.02 the first hundreds of steps learn little
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten())


def check(method: str) -> None:
    """Refuse a name that is no method's."""
    _parts(method)


def _parts(method: str) -> tuple[str, int, str]:
    """Return a method's kind, its interval and its codec.

    >>> _parts("diloco-50 int8"), _parts("demo")
    (('diloco', 50, 'int8'), ('demo', 1, ''))
    """
    name, _, codec = method.partition(" ")
    kind, _, every = name.rpartition("-") if name.rpartition("-")[2].isdigit() else (name, "", "1")
    if kind not in BUILDERS or not every.isdigit() or int(every) < 1:
        raise InputError(
            f"there is no method '{method}'; there are: {', '.join(METHODS)}, and others of their kind"
        )
    return kind, int(every), codec


def interval(method: str) -> int:
    """Return the steps from one outer step to the next."""
    return _parts(method)[1]


def shown_with(method: str, every: int) -> str:
    """Return the name of a method with another interval.

    >>> shown_with("diloco-50 int8", 4)
    'diloco-4 int8'
    """
    kind, _, codec = _parts(method)
    return f"{kind}-{every} {codec}".strip()


def build(method: str, net: nn.Module, steps: int) -> Trained:
    """Return a network that is trained by a method for a number of steps."""
    kind, every, codec = _parts(method)
    return BUILDERS[kind](net, every, codec, steps)


def _ddp(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del every, steps
    model = DistributedDataParallel(net)
    handle = thinwire.attach(model, codec or "fp32")
    optimizer = small.optimizer("gpt", net.parameters(), LR)
    return Trained(model, optimizer, lambda: handle.sent_nbytes, lambda: own_weights(net))


def _outer(make: Any, net: nn.Module, every: int, codec: str, **options: Any) -> Trained:
    optimizer = small.optimizer("gpt", net.parameters(), LR)
    options |= {"codec": codec} if codec else {}
    loop = make(net, optimizer, every=every, **options)
    return Trained(net, optimizer, lambda: loop.sent_nbytes, loop.global_weights, every)


def _diloco(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del steps
    return _outer(outer.DiLoCo, net, every, codec)


def _streaming(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del steps
    return _outer(outer.DiLoCo, net, every, codec, **OVERLAP)


def _sparse(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del steps
    return _outer(outer.SparseLoCo, net, every, codec)


def _local(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del steps
    return _outer(outer.LocalSGD, net, every, codec)


def _demo(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del every, steps
    options: dict[str, Any] = {"codec": codec} if codec else {}
    optimizer = outer.DeMo(net.parameters(), DEMO_LR, weight_decay=small.DECAY, **options)
    return Trained(net, optimizer, lambda: optimizer.sent_nbytes, lambda: own_weights(net))


def _onebit(net: nn.Module, every: int, codec: str, steps: int) -> Trained:
    del every, codec
    warmup = max(1, round(WARMUP * steps))
    optimizer = outer.OneBitAdam(
        net.parameters(), LR, betas=small.BETAS, weight_decay=small.DECAY, warmup_steps=warmup
    )
    return Trained(net, optimizer, lambda: optimizer.sent_nbytes, lambda: own_weights(net))


BUILDERS: dict[str, Callable[[nn.Module, int, str, int], Trained]] = {
    "ddp": _ddp,
    "diloco": _diloco,
    "streaming": _streaming,
    "sparseloco": _sparse,
    "localsgd": _local,
    "demo": _demo,
    "onebit-adam": _onebit,
}


def own_weights(net: nn.Module) -> dict[str, Tensor]:
    """Return this rank's weights by name."""
    return {name: each.detach() for name, each in net.named_parameters()}
