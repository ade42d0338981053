"""The error of a format on given numbers.

Input of a format that takes a scale is scaled so that its largest magnitude becomes the format's largest.
Other formats get the input unscaled. The error is ||x - y|| / ||x||, as for codecs. `relative` is another
measure: the mean relative error of the elements that are not zero.
"""

import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import FormatError, InputError
from thinwire.formats.base import Format
from thinwire.rounding import Rounding, Stream

#: The four distributions of Dettmers 2016, and one with the heavy tail of gradients.
DISTRIBUTIONS = {
    "U(0,1)": lambda n, g: torch.rand(n, generator=g),
    "N(0,1)": lambda n, g: torch.randn(n, generator=g),
    "N(0,10^2)": lambda n, g: torch.randn(n, generator=g) * 10,
    "N(0,0.2^2)": lambda n, g: torch.randn(n, generator=g) * 0.2,
    "lognormal": lambda n, g: torch.randn(n, generator=g) * torch.exp(2 * torch.randn(n, generator=g)),
}


def sample(name: str, numel: int, seed: int = 0) -> Tensor:
    """Return numbers from one of DISTRIBUTIONS; the same for the same seed."""
    if name not in DISTRIBUTIONS:
        raise InputError(f"no distribution is called '{name}'; use one of: {', '.join(DISTRIBUTIONS)}")
    return DISTRIBUTIONS[name](numel, torch.Generator().manual_seed(seed))


def load(path: Path) -> Tensor:
    """Return the numbers in a .npy file, or in the tensor (or tensors) of a .pt file, as flat float32."""
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if path.suffix not in (".npy", ".pt", ".pth"):
        raise InputError(f"{path} is neither .npy nor .pt; write it with numpy.save or torch.save")
    tensors = list(_tensors(_read(path)))
    if not tensors or not sum(tensor.numel() for tensor in tensors):
        raise InputError(f"{path} holds no floating-point numbers; save a float tensor, or a dict of them")
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def _read(path: Path) -> Any:
    """Load a file without executing any code in it."""
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (
            str(error).strip().splitlines()[0] if str(error).strip() else "the file is empty or cut short"
        )
        raise InputError(
            f"cannot read {path}: {reason}; it must hold plain tensors or arrays of floats"
        ) from None


def _tensors(nested: Any) -> Iterable[Tensor]:
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, dict):
        for each in nested.values():
            yield from _tensors(each)
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from _tensors(each)


def errors(
    format: Format,
    x: Tensor,
    rounding: Rounding | str = Rounding.NEAREST,
    seed: int = 0,
    scale: float | None = None,
) -> dict[str, float]:
    """Return the relative error ||x - y|| / ||x|| and other measures.

    The others are the elements' mean relative, absolute and squared errors, the signal-to-noise ratio in dB,
    and the share that became zero. The format rounds x / scale; the default is the scale that it takes.
    """
    if not x.numel():
        raise InputError("there are no numbers to measure the error on")
    if scale is None:
        scale = float(x.abs().max()) / format.max if format.takes_scale else 1.0
    scale = scale or 1.0
    rng = Stream(seed) if rounding == Rounding.STOCHASTIC else None
    exact = x.double()
    rounded = format.round((exact / scale).float(), rounding, rng).double() * scale
    error = (rounded - exact).abs()
    nonzero = exact != 0
    count = max(1, int(nonzero.sum()))
    power, noise = float(exact.square().mean()), float(error.square().mean())
    return {
        "error": math.sqrt(noise / power) if power else (math.inf if noise else 0.0),
        "relative": float((error[nonzero] / exact[nonzero].abs()).sum()) / count,
        "absolute": float(error.mean()),
        "squared": noise,
        "snr_db": float(10 * np.log10(power / noise)) if power and noise else float("inf"),
        "zeroed": float((rounded[nonzero] == 0).sum()) / count,
    }


def error_table(
    chosen: Iterable[Format],
    samples: dict[str, Tensor],
    rounding: Rounding | str = Rounding.NEAREST,
    seed: int = 0,
    progress: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return a row for each format and each set of numbers; unsigned formats skip sets with negative numbers.

    `progress` is called with each format's name before it is used.
    """
    if rounding not in tuple(Rounding):
        raise FormatError(f"unknown rounding '{rounding}'; use one of: {', '.join(Rounding)}")
    rows = []
    for format in (each for each in chosen if rounding in each.roundings):
        progress(format.name)
        rows += [
            {"format": format.name, "bits": format.bits, "data": name, **errors(format, x, rounding, seed)}
            for name, x in samples.items()
            if format.min < 0 or float(x.min()) >= 0
        ]
    return rows
