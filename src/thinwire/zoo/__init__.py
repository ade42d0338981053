"""The networks of the papers, with their published layer shapes; building one needs no memory.

The savings of low precision depend on the shapes of the tensors that are sent, so a size, a plan or a study
must use real networks. `get` builds one on the meta device: every parameter has its shape and no
storage, so the 1.8 billion parameters of BigLSTM take milliseconds. With `device="cpu"` the same network is
initialised and can be trained.

    >>> from thinwire import zoo
    >>> sum(shape.numel() for shape in zoo.shapes("resnet50").values())
    25557032
    >>> zoo.shapes("alexnet")["fc6.weight"]
    torch.Size([4096, 9216])
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from thinwire.errors import InputError, unknown
from thinwire.zoo import inception, recurrent, resnet, transformer, vision

__all__ = ["MODELS", "Entry", "get", "shapes"]


@dataclass(frozen=True)
class Entry:
    """A network: how to build it, its number of parameters, and the publication that states them."""

    name: str
    build: Callable[[], nn.Module]
    params: int
    source: str


_ALL = (
    Entry("mlp", vision.mlp, 1_863_690, "Dettmers 2016: 784-1024-1024-10 with biases"),
    Entry(
        "lenet", vision.lenet, 61_706, "LeCun et al. 1998: LeNet-5 with a fully joined C3 and linear output"
    ),
    Entry("alexnet", vision.alexnet, 62_003_496, "Alistarh et al. 2017: 62 M, the layers of CNTK's AlexNet"),
    Entry("vgg19", vision.vgg19, 143_667_240, "Simonyan and Zisserman 2015: 144 M, configuration E"),
    Entry(
        "bn_inception", inception.bn_inception, 11_285_224, "Ioffe and Szegedy 2015: figure 5, no conv bias"
    ),
    Entry(
        "inception_v3", inception.inception_v3, 27_161_264, "Szegedy et al. 2016: with auxiliary classifier"
    ),
    Entry("resnet18", resnet.resnet18, 11_689_512, "He et al. 2016: table 1, projection shortcuts"),
    Entry("resnet50", resnet.resnet50, 25_557_032, "He et al. 2016: table 1, projection shortcuts"),
    Entry("resnet152", resnet.resnet152, 60_192_808, "He et al. 2016: table 1, projection shortcuts"),
    Entry("resnet110", resnet.resnet110, 1_730_714, "He et al. 2016: table 6, 1.7 M, CIFAR-10, option B"),
    Entry("davidnet", resnet.davidnet, 6_573_120, "Page 2018: cifar10-fast, head without bias"),
    Entry("an4_lstm", recurrent.an4_lstm, 13_634_692, "Alistarh et al. 2017: 13 M, the layers of CNTK's AN4"),
    Entry("gnmt", recurrent.gnmt, 160_671_297, "Wu et al. 2016 in MLPerf's form: 4 layers, one embedding"),
    Entry("biglstm", recurrent.biglstm, 1_776_880_510, "Jozefowicz et al. 2016: 1.8 B, 2 x LSTM-8192-1024"),
    Entry("gpt2", transformer.gpt2, 124_439_808, "Radford et al. 2019: smallest, head tied to the embedding"),
    Entry(
        "vit_b", transformer.vit_b, 86_567_656, "Dosovitskiy et al. 2021: ViT-B/16, 224 pixels, 1000 classes"
    ),
)

#: Every network, in the order in which listings show them.
MODELS: dict[str, Entry] = {each.name: each for each in _ALL}


class _Undrawn(TorchFunctionMode):
    """Skips normal initialisation of tensors on the meta device.

    `normal_` has no effect there, but its first call takes a second to import code.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_):
            target: torch.Tensor = args[0] if args else named["tensor"]
            if target.is_meta:
                return target
        return func(*args, **named)


def get(name: str, device: str | torch.device = "meta") -> nn.Module:
    """Build the network of this name on this device. On the meta device it has shapes and no storage."""
    if not isinstance(name, str) or name not in MODELS:
        raise InputError(unknown("network", name, MODELS))
    with torch.device(device), _Undrawn():
        return MODELS[name].build()


def shapes(name: str) -> dict[str, torch.Size]:
    """Return the shape of every parameter of a network by its name; a tied parameter appears once."""
    return {key: parameter.shape for key, parameter in get(name).named_parameters()}
