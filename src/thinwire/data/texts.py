"""Texts in memory, as windows of bytes: a network predicts the byte that follows each byte."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from thinwire.data.images import Images, images
from thinwire.data.read import load
from thinwire.data.sets import get

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTH = 64  #: bytes of a window
TESTS = 2048  #: windows of an evaluation, evenly spaced: 131 kB


@dataclass(frozen=True)
class Text:
    """Windows of a text and the byte that follows each byte; accuracy is how often that byte is predicted.

    >>> text = Text(torch.tensor([[72, 101]], dtype=torch.uint8), torch.tensor([[101, 121]]), 256)
    >>> text.batch(slice(0, 1))
    (tensor([[ 72, 101]]), tensor([[101, 121]]))
    """

    x: "Tensor"
    y: "Tensor"
    classes: int

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Bytes of a window."""
        return tuple(self.x.shape[1:])

    def batch(self, picked: "Tensor | slice") -> "tuple[Tensor, Tensor]":
        return self.x[picked].long(), self.y[picked].long()

    def to(self, device: "torch.device | str") -> "Text":
        return Text(self.x.to(device), self.y.to(device), self.classes)


def is_text(name: str) -> bool:
    """Whether a set is a text, whose examples are bytes."""
    return not get(name).shape


@cache
def texts(name: str) -> tuple[Text, Text]:
    """Return windows of a text to train on, and some of its test part."""
    train, test = (_windows(name, split) for split in ("train", "test"))
    apart = -(-len(test) // TESTS)
    return train, Text(test.x[::apart], test.y[::apart], test.classes)


def _windows(name: str, split: str) -> Text:
    import torch

    x, y = load(name, split)
    whole = len(x) // LENGTH * LENGTH
    return Text(x[:whole].view(-1, LENGTH), y[:whole].to(torch.uint8).view(-1, LENGTH), get(name).classes)


def examples(name: str) -> tuple[Images, Images] | tuple[Text, Text]:
    """Return training and test examples of a set, image or text."""
    return texts(name) if is_text(name) else images(name)
