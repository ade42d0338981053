"""What codecs lose: the squared error of a vector after encode and decode, relative to the vector's own.

The distributions are those of the reference table for QSGD: Gaussian, Laplace, and Student-t with three
degrees of freedom, whose heavy tails punish long blocks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import InputError
from thinwire.rounding import Stream

DISTRIBUTIONS = ("gaussian", "laplace", "student3")


def sample(name: str, numel: int, seed: int = 0) -> Tensor:
    """Numbers of a distribution, the same on every machine for a seed.

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


def distortion(codec: Codec, x: Tensor, seed: int = 0) -> float:
    """|decode(encode(x)) - x|**2 / |x|**2."""
    rng = Stream(seed) if codec.needs_rng else None
    decoded = codec.decode(codec.encode(x, rng), x.shape[-1])
    error = (decoded.double() - x.double()).square().sum()
    return float(error / x.double().square().sum())


def error_table(chosen: Iterable[Codec], data: dict[str, Tensor], seed: int = 0) -> list[dict[str, Any]]:
    """A row for every codec and data set."""
    return [
        {
            "spec": codec.spec,
            "data": name,
            "bits_per_element": codec.bits_per_element(x.shape[-1]),
            "distortion": distortion(codec, x, seed),
        }
        for codec in chosen
        for name, x in data.items()
    ]
