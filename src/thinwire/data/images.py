"""Image sets in memory, as bytes, with the mean and deviation that scale them for a network."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from thinwire.data.read import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAMPLE = 10_000  #: training images from which mean and deviation are computed


@dataclass(frozen=True)
class Images:
    """Images as bytes and their labels; a batch has mean 0 and deviation 1, over the training images.

    >>> images = Images(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.tensor([3]), 127.5, 127.5)
    >>> images.batch(slice(0, 1))
    (tensor([[[[-1.,  1.]]]]), tensor([3]))
    """

    x: "Tensor"
    y: "Tensor"
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.y)

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.x.shape[1:])

    def batch(self, picked: "Tensor | slice") -> "tuple[Tensor, Tensor]":
        return (self.x[picked].float() - self.mean) / self.deviation, self.y[picked]

    def to(self, device: "torch.device | str") -> "Images":
        return Images(self.x.to(device), self.y.to(device), self.mean, self.deviation)


@cache
def images(name: str) -> tuple[Images, Images]:
    """Return training and test images of a set, scaled by the training images."""
    x, y = load(name, "train")
    sample = x[:SAMPLE].float()
    mean, deviation = sample.mean().item(), sample.std().item()
    return Images(x, y, mean, deviation), Images(*load(name, "test"), mean, deviation)
