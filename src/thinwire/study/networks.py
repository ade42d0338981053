"""Networks of studies: small enough for one core a rank, with most parameters in matrices worth encoding.

| name | what | parameters on 28 x 28 grey images |
|---|---|---|
| `cnn` | two convolutions of stride 2, two linear layers, 400 wide | 0.64 M |
| `cnn-small` | three convolutions of stride 2, two linear layers, 64 wide | 90 k |
| `mlp` | three linear layers, 256 and 128 wide | 235 k |
| `mlp-wide` | three linear layers, 1024 wide | 1.9 M |

Convolutions are followed by group normalisation. None has batch normalisation, so that replicas hold nothing
but parameters.
"""

import math
from collections.abc import Callable

from torch import nn

from thinwire.errors import InputError

Shape = tuple[int, ...]  #: channels, height, width
GROUPS = 8


def get(name: str, shape: Shape, classes: int) -> nn.Module:
    """A network by its name, for images of this shape; its weights come from torch's global generator."""
    if name not in NETWORKS:
        raise InputError(f"there is no network '{name}'; use one of: {', '.join(NETWORKS)}")
    return NETWORKS[name](shape, classes)


def _cnn(shape: Shape, classes: int, channels: tuple[int, ...], width: int) -> nn.Module:
    layers: list[nn.Module] = []
    depth, *sides = shape
    for each in channels:
        layers += [nn.Conv2d(depth, each, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, each), nn.ReLU()]
        depth, sides = each, [(side + 1) // 2 for side in sides]
    layers += [nn.Flatten(), nn.Linear(depth * math.prod(sides), width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)


def _mlp(shape: Shape, classes: int, widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    before = math.prod(shape)
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, classes))


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": lambda shape, classes: _cnn(shape, classes, (16, 32), 400),
    "cnn-small": lambda shape, classes: _cnn(shape, classes, (16, 32, 64), 64),
    "mlp": lambda shape, classes: _mlp(shape, classes, (256, 128)),
    "mlp-wide": lambda shape, classes: _mlp(shape, classes, (1024, 1024)),
}
