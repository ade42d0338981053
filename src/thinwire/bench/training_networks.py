"""Networks of `thinwire bench training`: small ones for two cores, published ones for a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire import zoo
from thinwire.zoo.layers import chain, conv_bn, he_init
from thinwire.zoo.resnet import Residual
from thinwire.zoo.transformer import GPT2


@dataclass(frozen=True)
class Network:
    """A network, the shape of its batches, and its optimizer."""

    build: Callable[[], nn.Module]
    batch: int
    classes: int
    tokens: int = 0  #: in a sequence; 0 means images
    pixels: int = 32  #: of an image's side
    adam: bool = False  #: AdamW instead of SGD with momentum

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.tokens) if self.tokens else (self.batch,)
        labels = torch.randint(self.classes, shape, generator=generator)
        if self.tokens:
            return torch.randint(self.classes, shape, generator=generator), labels
        return torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator), labels


def vgg() -> nn.Sequential:
    """Convolutions with few parameters, then fully connected layers with nearly all of them."""
    stages: dict[str, nn.Module] = {}
    inputs = 3
    for stage, width in enumerate((32, 64, 128), start=1):
        stages[f"conv{stage}"] = nn.Conv2d(inputs, width, 3, padding=1)
        stages[f"relu{stage}"] = nn.ReLU()
        stages[f"pool{stage}"] = nn.MaxPool2d(2)
        inputs = width
    return chain(
        **stages,
        flatten=nn.Flatten(),
        fc6=nn.Linear(inputs * 4 * 4, 1280),
        relu6=nn.ReLU(),
        fc7=nn.Linear(1280, 1024),
        relu7=nn.ReLU(),
        fc8=nn.Linear(1024, 10),
    )


def resnet() -> nn.Sequential:
    """ResNet-20 for images of 32 x 32: three stages of three blocks."""
    net = nn.Sequential(conv_bn(3, 16, 3))
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(3):
            net += nn.Sequential(_block(inputs, outputs), nn.ReLU())
            inputs = outputs
    return he_init(net + nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)))


def _block(inputs: int, outputs: int) -> Residual:
    stride = 1 if inputs == outputs else 2
    body = chain(
        conv1=conv_bn(inputs, outputs, 3, stride=stride), conv2=conv_bn(outputs, outputs, 3, relu=False)
    )
    short = nn.Identity() if stride == 1 else conv_bn(inputs, outputs, 1, stride=stride, relu=False)
    return Residual(body, short)


class LSTM(nn.Module):
    """A language model: an embedding, two layers and a decoder. Takes word numbers (batch, time)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.layers(self.embedding(words))[0])


WORDS = 4000

NETWORKS: dict[str, Network] = {
    "vgg": Network(vgg, batch=16, classes=10),
    "resnet": Network(resnet, batch=40, classes=10),
    "lstm": Network(lambda: LSTM(WORDS, 320), batch=8, classes=WORDS, tokens=16),
    "transformer": Network(lambda: GPT2(WORDS, 64, 256, 4, 4), batch=8, classes=WORDS, tokens=16),
}

#: Trained in bfloat16 (autocast). Batches are small, so that gradients are many beside the arithmetic.
GPU_NETWORKS: dict[str, Network] = {
    "gpt2": Network(lambda: zoo.get("gpt2", "cuda"), batch=4, classes=50_257, tokens=256, adam=True),
    "resnet50": Network(lambda: zoo.get("resnet50", "cuda"), batch=16, classes=1000, pixels=224),
    "vgg19": Network(lambda: zoo.get("vgg19", "cuda"), batch=4, classes=1000, pixels=224),
}


def networks(device: str) -> dict[str, Network]:
    """Networks that are measured on a device."""
    return GPU_NETWORKS if device == "cuda" else NETWORKS
