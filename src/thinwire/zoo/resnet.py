"""Residual networks: each block adds a correction to its input, so that depth does not hurt.

They are the opposite of AlexNet: many small tensors (467 in ResNet-152), a single modest matrix at the
end, a lot of arithmetic per parameter. About half of the parameters of ResNet-50 and -152 are 1 x 1
convolutions. For those, a codec with scales for each kernel row sends more than float32 would.

- `resnet18`, `resnet50`, `resnet152` are the ImageNet networks of He et al. (2016), "Deep residual learning
  for image recognition", with the stride of a bottleneck in its 3 x 3 convolution.
- `resnet110` is the CIFAR-10 network of the same paper, with projections where the width doubles, as CNTK
  builds it and QSGD (Alistarh et al. 2017) trains it; the paper's own shortcut there has no parameters
  (option A) and would give 2752 fewer.
- `davidnet` is Page's nine-layer entry for CIFAR-10 in DAWNBench (2018); Han, Demmel and You train it with
  8-bit gradients in "Auto-precision scaling" (2021).
"""

import torch
from torch import Tensor, nn

from thinwire.zoo.layers import chain, conv_bn, he_init


class Residual(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Scale(nn.Module):
    """x times a fixed number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.factor)


def resnet18() -> nn.Sequential:
    """ResNet-18. Takes images (batch, 3, 224, 224)."""
    return _imagenet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> nn.Sequential:
    """ResNet-50. Takes images (batch, 3, 224, 224)."""
    return _imagenet((3, 4, 6, 3), bottleneck=True)


def resnet152() -> nn.Sequential:
    """ResNet-152. Takes images (batch, 3, 224, 224)."""
    return _imagenet((3, 8, 36, 3), bottleneck=True)


def resnet110() -> nn.Sequential:
    """ResNet-110 for CIFAR-10: 3 stages of 18 blocks. Takes images (batch, 3, 32, 32)."""
    depth = 18
    return he_init(
        chain(
            stem=conv_bn(3, 16, 3),
            stage1=_stage(16, 16, depth, stride=1, bottleneck=False),
            stage2=_stage(16, 32, depth, stride=2, bottleneck=False),
            stage3=_stage(32, 64, depth, stride=2, bottleneck=False),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(64, 10),
        )
    )


def davidnet() -> nn.Sequential:
    """DavidNet. Takes images (batch, 3, 32, 32)."""
    return chain(
        prep=conv_bn(3, 64, 3),
        layer1=chain(conv=conv_bn(64, 128, 3), pool=nn.MaxPool2d(2), residual=_david_residual(128)),
        layer2=chain(conv=conv_bn(128, 256, 3), pool=nn.MaxPool2d(2)),
        layer3=chain(conv=conv_bn(256, 512, 3), pool=nn.MaxPool2d(2), residual=_david_residual(512)),
        pool=nn.MaxPool2d(4),
        flatten=nn.Flatten(),
        fc=nn.Linear(512, 10, bias=False),
        scale=Scale(0.125),
    )


def _imagenet(depths: tuple[int, int, int, int], *, bottleneck: bool) -> nn.Sequential:
    """Return an ImageNet network: a 7 x 7 stem, four stages of `depths` blocks, one linear layer."""
    expansion = 4 if bottleneck else 1
    stages: dict[str, nn.Module] = {}
    inputs = 64
    for index, depth in enumerate(depths):
        outputs = 64 * 2**index * expansion
        stride = 1 if index == 0 else 2
        stages[f"stage{index + 1}"] = _stage(inputs, outputs, depth, stride=stride, bottleneck=bottleneck)
        inputs = outputs
    return he_init(
        chain(
            stem=conv_bn(3, 64, 7, stride=2),
            pool=nn.MaxPool2d(3, 2, padding=1),
            **stages,
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(inputs, 1000),
        )
    )


def _stage(inputs: int, outputs: int, depth: int, *, stride: int, bottleneck: bool) -> nn.Sequential:
    """Return `depth` blocks; the first has the stride and, if the shape changes, a projection (option B)."""
    body = _bottleneck if bottleneck else _basic
    stage = nn.Sequential()
    for index in range(depth):
        shortcut: nn.Module = nn.Identity()
        if index == 0 and (stride > 1 or inputs != outputs):
            shortcut = conv_bn(inputs, outputs, 1, stride=stride, relu=False)
        stage.append(Residual(body(inputs, outputs, stride), shortcut))
        stage.append(nn.ReLU())
        inputs, stride = outputs, 1
    return stage


def _basic(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return chain(
        conv1=conv_bn(inputs, outputs, 3, stride=stride),
        conv2=conv_bn(outputs, outputs, 3, relu=False),
    )


def _bottleneck(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    width = outputs // 4
    return chain(
        conv1=conv_bn(inputs, width, 1),
        conv2=conv_bn(width, width, 3, stride=stride),
        conv3=conv_bn(width, outputs, 1, relu=False),
    )


def _david_residual(width: int) -> Residual:
    return Residual(chain(conv1=conv_bn(width, width, 3), conv2=conv_bn(width, width, 3)), nn.Identity())
