"""The relative error of codecs: ||x - y|| / ||x||, where y = decode(encode(x)).

The distributions are those of the reference table for QSGD: Gaussian, Laplace, and Student-t with three
degrees of freedom, whose heavy tails punish long blocks.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream

DISTRIBUTIONS = ("gaussian", "laplace", "student3")


def sample(name: str, numel: int, seed: int = 0) -> Tensor:
    """Return numbers of a distribution; a seed gives the same ones on every machine.

    >>> sample("laplace", 3).shape
    torch.Size([3])
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "gaussian":
        return torch.randn(numel, generator=generator)
    if name == "laplace":
        uniform = torch.rand(numel, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12) - 0.5
        return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()
    if name == "student3":
        normal = torch.randn((4, numel), generator=generator, dtype=torch.float64)
        return (normal[0] / (normal[1:].square().sum(0) / 3).sqrt()).float()
    raise InputError(f"no distribution is called '{name}'; use one of: {', '.join(DISTRIBUTIONS)}")


def error(codec: Codec, x: Tensor, seed: int = 0) -> float:
    """Return the relative error ||x - y|| / ||x||, where y = decode(encode(x))."""
    return math.sqrt(distortion(codec, x, seed))


def distortion(codec: Codec, x: Tensor, seed: int = 0) -> float:
    """Return the square of `error`, which papers give bounds for."""
    rng = Stream(seed) if codec.needs_rng else None
    decoded = codec.decode(codec.encode(x, rng), x.shape[-1])
    lost, whole = (decoded.double() - x.double()).square().sum(), x.double().square().sum()
    return float(lost / whole) if whole else (math.inf if lost else 0.0)


def error_table(
    chosen: Iterable[Codec],
    data: dict[str, Tensor],
    seed: int = 0,
    progress: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return a row for every codec and data set; `progress` gets each codec's spec before its use."""
    rows = []
    for codec in chosen:
        progress(codec.spec)
        rows += [
            {
                "spec": codec.spec,
                "data": name,
                "bits_per_element": codec.bits_per_element(x.shape[-1]),
                "error": error(codec, x, seed),
            }
            for name, x in data.items()
        ]
    return rows
