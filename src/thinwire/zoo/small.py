"""Networks for studies, with most parameters in matrices worth encoding.

Except for `resnet18` and `gpt`, they are small enough for one core per rank.

| name | what | parameters on 28 x 28 grey images |
|---|---|---|
| `cnn` | two convolutions of stride 2, two linear layers, 400 wide | 0.64 M |
| `cnn-small` | three convolutions of stride 2, two linear layers, 64 wide | 90 k |
| `mlp` | three linear layers, 256 and 128 wide | 235 k |
| `mlp-wide` | three linear layers, 1024 wide | 1.9 M |
| `mlp-dropout` | the same with dropout of 0.2, 0.3 and 0.3 (Dettmers 2016) | 1.9 M |
| `mlp-1000` | three linear layers, 1000 wide (Gupta et al. 2015) | 1.8 M |
| `lenet5` | 6, 16 and 120 convolutions of 5 x 5, linear layers of 84 and 10 (as in PositNN) | 62 k |
| `resnet8` | a residual network of three blocks: 16, 32 and 64 channels | 78 k |
| `resnet18` | the usual one for small images: 64 to 512 channels | 11 M |
| `gpt` | for texts: 6 layers of attention, 640 wide, 10 heads, as GPT-2 | 30 M |
| `gpt-small` | the same with 2 layers, 64 wide, 2 heads | 137 k |

Image networks are trained with SGD and momentum, text networks with AdamW, whose learning rate rises in the
first steps.

Group normalisation follows convolutions, except in `lenet5`, which has none. No network has batch
normalisation, so replicas hold only parameters.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from thinwire.errors import InputError, unknown

Shape = tuple[int, ...]  #: channels, height, width; for a text, its bytes
GROUPS = 8
MOMENTUM = 0.9
BETAS, DECAY, RISE = (0.9, 0.95), 0.1, 0.1  #: of AdamW, and the share of steps in which its rate rises
DEVIATION = 0.02  #: standard deviation of the initial weights of GPT-2


def get(name: str, shape: Shape, classes: int) -> nn.Module:
    """Return a network for examples of this shape; torch's global generator draws its weights."""
    check(name, shape)
    return NETWORKS[name](shape, classes)


def check(name: str, shape: Shape) -> None:
    """Refuse an unknown network, or one that is not for examples of this shape."""
    if name not in NETWORKS:
        raise InputError(unknown("network", name, NETWORKS))
    is_text = len(shape) < 2
    if (name in TEXTS) != is_text:
        fit = [each for each in NETWORKS if (each in TEXTS) == is_text]
        kind = "texts" if name in TEXTS else "images"
        raise InputError(f"the network '{name}' is for {kind}; this data takes one of: {', '.join(fit)}")


def optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of a network: AdamW for texts, SGD with momentum for images."""
    if name in TEXTS:
        return torch.optim.AdamW(parameters, lr, BETAS, weight_decay=DECAY)
    return torch.optim.SGD(parameters, lr, MOMENTUM)


def rate(name: str, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1, as a share of the highest; it falls linearly to 0.

    >>> [round(rate("gpt", step, 40), 3) for step in (1, 2, 4, 5, 40)]
    [0.25, 0.5, 0.925, 0.9, 0.025]
    """
    falling = 1 - (step - 1) / steps
    return min(falling, step / max(1.0, RISE * steps)) if name in TEXTS else falling


def _cnn(shape: Shape, classes: int, channels: tuple[int, ...], width: int) -> nn.Module:
    layers: list[nn.Module] = []
    depth, *sides = shape
    for out in channels:
        layers += [nn.Conv2d(depth, out, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, out), nn.ReLU()]
        depth, sides = out, [(side + 1) // 2 for side in sides]
    layers += [nn.Flatten(), nn.Linear(depth * math.prod(sides), width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)


def _mlp(shape: Shape, classes: int, widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    before = math.prod(shape)
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


def _dropout(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(math.prod(shape), 1024),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(1024, classes),
    )


def _lenet5(shape: Shape, classes: int) -> nn.Module:
    """Return LeNet-5 for images of 28 x 28, which are padded to 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class _Block(nn.Module):
    """Two convolutions and a shortcut around them (He et al. 2015)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.last = nn.GroupNorm(GROUPS, width)
        around = nn.Conv2d(before, width, 1, stride, bias=False)
        self.around = nn.Identity() if stride == 1 and before == width else around

    def forward(self, x: Tensor) -> Tensor:
        inside = self.two(self.norm(self.one(x)).relu())
        result: Tensor = (self.last(inside) + self.around(x)).relu()
        return result


def _resnet(shape: Shape, classes: int, widths: tuple[int, ...], blocks: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], widths[0], 3, 1, 1, bias=False),
        nn.GroupNorm(GROUPS, widths[0]),
        nn.ReLU(),
    ]
    before, height, across = widths[0], *shape[1:]
    for place, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Block(before, width, 2 if place and not block else 1))
            before = width
        if place:
            height, across = (height + 1) // 2, (across + 1) // 2
    # Not AdaptiveAvgPool2d, which torch.func.vmap runs one by one.
    return nn.Sequential(*layers, nn.AvgPool2d((height, across)), nn.Flatten(), nn.Linear(before, classes))


class _Layer(nn.Module):
    """Causal attention, then two linear layers; each part has a shortcut (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.ask = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.ask(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = projected.unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))
        return result


class _Gpt(nn.Module):
    """Predicts the next byte from bytes and their positions."""

    def __init__(self, shape: Shape, classes: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(classes, width)
        self.places = nn.Parameter(torch.empty(shape[0], width).normal_(std=DEVIATION))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.last = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                inward = name.endswith(("join.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=DEVIATION / math.sqrt(2 * depth) if inward else DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.last(self.layers(self.symbols(x) + self.places)))
        return result


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": lambda shape, classes: _cnn(shape, classes, (16, 32), 400),
    "cnn-small": lambda shape, classes: _cnn(shape, classes, (16, 32, 64), 64),
    "mlp": lambda shape, classes: _mlp(shape, classes, (256, 128)),
    "mlp-wide": lambda shape, classes: _mlp(shape, classes, (1024, 1024)),
    "mlp-dropout": _dropout,
    "mlp-1000": lambda shape, classes: _mlp(shape, classes, (1000, 1000)),
    "lenet5": _lenet5,
    "resnet8": lambda shape, classes: _resnet(shape, classes, (16, 32, 64), 1),
    "resnet18": lambda shape, classes: _resnet(shape, classes, (64, 128, 256, 512), 2),
    "gpt": lambda shape, classes: _Gpt(shape, classes, 640, 6, 10),
    "gpt-small": lambda shape, classes: _Gpt(shape, classes, 64, 2, 2),
}
TEXTS = ("gpt", "gpt-small")
