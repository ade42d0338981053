"""Read the files in the cache as tensors."""

import hashlib
from typing import TYPE_CHECKING, Any

from thinwire.data import store
from thinwire.data.sets import DataSet, get
from thinwire.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "test")


def load(name: str, split: str = "train", *, fetch: bool = False) -> "tuple[Tensor, Tensor]":
    """Return the examples of a set and their labels: uint8 and int64.

    Images are N x C x H x W with pixels from 0 to 255 (`images / 255` are floats from 0 to 1). Of the text
    `sotu`, the examples are its bytes, and the label of each is the byte that follows; train is the first
    90 % of it. The files are checked while they are read. A set that is not in the cache is an error,
    unless `fetch` is true.
    """
    wanted = get(name)
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; use train or test")
    if not store.present(name):
        if not fetch:
            raise DataError(
                f"{name} is not in {store.where()}: run `thinwire data fetch {name}`, or pass fetch=True"
            )
        store.fetch(name)
    examples, labels = _READERS[name](wanted, split)
    expected = wanted.train if split == "train" else wanted.test
    if tuple(examples.shape) != (expected, *wanted.shape) or len(labels) != expected:
        raise DataError(f"{name} has shape {tuple(examples.shape)}, not {(expected, *wanted.shape)}")
    return examples, labels


def _bytes(wanted: DataSet, number: int) -> Any:
    """Return a file of a set as a NumPy array of bytes, after checking its checksum."""
    import numpy as np

    file = wanted.files[number]
    path = store.where() / wanted.name / file.name
    content = np.fromfile(path, np.uint8)
    if hashlib.sha256(content.data).hexdigest() != file.sha256:
        raise DataError(f"{path} is damaged: run `thinwire data fetch {wanted.name}`, which replaces it")
    return content


def _idx(wanted: DataSet, number: int) -> Any:
    """Read an IDX file: the fourth byte is the number of dimensions, then four bytes hold each size."""
    content = _bytes(wanted, number)
    dimensions = int(content[3])
    start = 4 + 4 * dimensions
    return content[start:].reshape(content[4:start].view(">u4").astype(int))


def _images(wanted: DataSet, split: str) -> "tuple[Tensor, Tensor]":
    import torch

    first = 0 if split == "train" else 2
    images, labels = (torch.from_numpy(_idx(wanted, first + number)) for number in range(2))
    return images[:, None], labels.long()


def _digits(wanted: DataSet, split: str) -> "tuple[Tensor, Tensor]":
    """Scale pixels from 0 to 16 to 0 to 255. The set has no split of its own: the last fifth is the test."""
    import torch

    images, labels = (torch.from_numpy(_idx(wanted, number)) for number in range(2))
    stretched = ((images.int() * 255 + 8) // 16).to(torch.uint8)[:, None]
    part = slice(None, wanted.train) if split == "train" else slice(wanted.train, None)
    return stretched[part], labels[part].long()


def _cifar(wanted: DataSet, split: str) -> "tuple[Tensor, Tensor]":
    import torch

    batches = range(5) if split == "train" else range(5, 6)
    records = torch.cat([torch.from_numpy(_bytes(wanted, number)).view(-1, 3073) for number in batches])
    return records[:, 1:].contiguous().view(-1, *wanted.shape), records[:, 0].long()


def _text(wanted: DataSet, split: str) -> "tuple[Tensor, Tensor]":
    import torch

    text = torch.from_numpy(_bytes(wanted, 0))
    middle = len(text) * 9 // 10
    part = text[:middle] if split == "train" else text[middle:]
    return part[:-1], part[1:].long()


_READERS = {"mnist": _images, "fashion-mnist": _images, "cifar10": _cifar, "digits": _digits, "sotu": _text}
