"""This rank's part of a batch: ranks along `replicate` and `shard` train on other samples, the rest on the
same ones.

A part is a slice of neighbouring samples. All parts of a batch have the same size, so that the mean of the
parts' gradients is the gradient of the whole batch.
"""

import dataclasses
import weakref
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import InputError

if TYPE_CHECKING:
    from thinwire.hybrids.hybrid import Hybrid

LOOKS = 4096  #: numbers of each tensor that a checksum reads, about

_active: list["weakref.ref[Hybrid]"] = []


def activate(hybrid: "Hybrid") -> None:
    """Let `part_of_batch` divide batches as the last model that a plan was applied to needs it."""
    _active[:] = [weakref.ref(hybrid)]


def active() -> "Hybrid | None":
    return _active[0]() if _active else None


def part_of_batch(*tensors: Any) -> Any:
    """Return the samples of a batch that this rank trains on; the whole batch if no plan was applied.

    Takes tensors, and lists, tuples and mappings of them; samples lie along the first dimension. Returns one
    thing for one argument, else a tuple.

    >>> part_of_batch(torch.arange(4))  # no plan was applied here
    tensor([0, 1, 2, 3])
    """
    hybrid = active()
    parts = tensors if hybrid is None else tuple(hybrid.part_of(each) for each in tensors)
    return parts[0] if len(parts) == 1 else parts


def samples_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; None if it holds no tensor with samples.

    >>> samples_of({"x": torch.zeros(6, 3), "y": [torch.zeros(6)], "name": "train"})
    6
    """
    numbers = {len(x) for x in _tensors(batch) if x.dim()}
    if len(numbers) > 1:
        raise InputError(
            f"the tensors of a batch have {', '.join(map(str, sorted(numbers)))} rows, so it is not known "
            "how to divide it among ranks: give all of them one row for each sample"
        )
    return numbers.pop() if numbers else None


def digest(batch: Any) -> str:
    """Return a checksum of some of a batch's numbers, in words, to compare ranks."""
    value = 0
    for x in _tensors(batch):
        some = x.detach().flatten()[:: max(1, x.numel() // LOOKS)].cpu().contiguous()
        value = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), value)
    return f"{samples_of(batch)} samples with checksum {value:08x}"


def sliced(batch: Any, begin: int, end: int) -> Any:
    """Return some samples of a batch, in the same containers.

    >>> sliced([torch.arange(4), ("a", "b", "c", "d"), "train"], 2, 4)
    [tensor([2, 3]), ('c', 'd'), 'train']
    """
    numel = samples_of(batch)
    return _sliced(batch, begin, end, numel)


def _sliced(batch: Any, begin: int, end: int, numel: int | None) -> Any:
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        entries = {name: _sliced(each, begin, end, numel) for name, each in batch.items()}
        return entries if type(batch) is dict else type(batch)(entries)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        named = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        return dataclasses.replace(
            batch, **{name: _sliced(each, begin, end, numel) for name, each in named.items()}
        )
    if isinstance(batch, list | tuple):
        if len(batch) == numel and not any(True for _ in _tensors(batch)):
            return batch[begin:end]  # one entry for each sample, such as names
        parts = [_sliced(each, begin, end, numel) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _tensors(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, field.name))
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)
