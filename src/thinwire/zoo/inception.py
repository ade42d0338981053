"""Inception networks: every block applies kernels of several sizes to its input.

Branches of different kernel sizes run in parallel, and their outputs are concatenated as channels. The graph
has parallelism inside one step, which suits model parallelism. Its tensors are small and many, with 1 x 7
and 7 x 1 kernels among them. A network here is a literal list of branches: read it next to the table of its
paper.

- `bn_inception` is Inception with batch norm of Ioffe and Szegedy (2015), the 11 M parameter network of QSGD
  (Alistarh et al. 2017), with convolutions without bias as in CNTK.
- `inception_v3` is the network of Szegedy et al. (2016), "Rethinking the Inception architecture", which Pal
  et al. (2019) split over two devices. Its 27.2 M parameters include the auxiliary classifier, whose
  gradients are all-reduced like all others; without it there are 23.8 M.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thinwire.zoo.layers import Kernel, chain, conv_bn, he_init

#: Batch norm's epsilon in Inception-V3.
V3_EPS = 1e-3


class Branches(nn.ModuleList):
    """Every branch sees the same input; their outputs are concatenated as channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class InceptionV3(nn.Module):
    """Trunk, tail and the auxiliary classifier that branches off between them.

    Takes images (batch, 3, 299, 299) and returns the logits of the network and of the auxiliary classifier.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _v3_trunk()
        self.auxiliary = chain(
            pool=nn.AvgPool2d(5, 3),
            conv1=_unit(768, 128, 1),
            conv2=_unit(128, 768, 5, pad=False),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(768, 1000),
        )
        self.tail = chain(
            mixed_7a=_v3_reduce_to_8(),
            mixed_7b=_v3_block_8(1280),
            mixed_7c=_v3_block_8(2048),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.2),
            fc=nn.Linear(2048, 1000),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = self.trunk(x)
        return self.tail(middle), self.auxiliary(middle)


def inception_v3() -> InceptionV3:
    """Inception-V3 with its auxiliary classifier."""
    return InceptionV3()


def bn_inception() -> nn.Sequential:
    """BN-Inception. Takes images (batch, 3, 224, 224)."""
    return he_init(
        chain(
            conv1=conv_bn(3, 64, 7, stride=2),
            pool1=nn.MaxPool2d(3, 2, padding=1),
            conv2a=conv_bn(64, 64, 1),
            conv2b=conv_bn(64, 192, 3),
            pool2=nn.MaxPool2d(3, 2, padding=1),
            inception_3a=_block(192, 64, (64, 64), (64, 96), 32),
            inception_3b=_block(256, 64, (64, 96), (64, 96), 64),
            inception_3c=_reduction(320, (128, 160), (64, 96)),
            inception_4a=_block(576, 224, (64, 96), (96, 128), 128),
            inception_4b=_block(576, 192, (96, 128), (96, 128), 128),
            inception_4c=_block(576, 160, (128, 160), (128, 160), 128),
            inception_4d=_block(608, 96, (128, 192), (160, 192), 128),
            inception_4e=_reduction(608, (128, 192), (192, 256)),
            inception_5a=_block(1056, 352, (192, 320), (160, 224), 128),
            inception_5b=_block(1024, 352, (192, 320), (192, 224), 128, pool=nn.MaxPool2d(3, 1, padding=1)),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(1024, 1000),
        )
    )


def _block(
    inputs: int,
    one: int,
    three: tuple[int, int],
    double: tuple[int, int],
    projected: int,
    pool: nn.Module | None = None,
) -> Branches:
    """A BN-Inception block: 1 x 1; 3 x 3; two 3 x 3; pooling and 1 x 1. Pairs are (reduced, full) widths."""
    return Branches(
        (
            conv_bn(inputs, one, 1),
            nn.Sequential(conv_bn(inputs, three[0], 1), conv_bn(three[0], three[1], 3)),
            nn.Sequential(
                conv_bn(inputs, double[0], 1),
                conv_bn(double[0], double[1], 3),
                conv_bn(double[1], double[1], 3),
            ),
            nn.Sequential(pool or nn.AvgPool2d(3, 1, padding=1), conv_bn(inputs, projected, 1)),
        )
    )


def _reduction(inputs: int, three: tuple[int, int], double: tuple[int, int]) -> Branches:
    """A BN-Inception block that halves the image and passes its input through a pooling."""
    return Branches(
        (
            nn.Sequential(conv_bn(inputs, three[0], 1), conv_bn(three[0], three[1], 3, stride=2)),
            nn.Sequential(
                conv_bn(inputs, double[0], 1),
                conv_bn(double[0], double[1], 3),
                conv_bn(double[1], double[1], 3, stride=2),
            ),
            nn.MaxPool2d(3, 2, padding=1),
        )
    )


def _unit(inputs: int, outputs: int, kernel: Kernel, *, stride: int = 1, pad: bool = True) -> nn.Sequential:
    return conv_bn(inputs, outputs, kernel, stride=stride, pad=pad, eps=V3_EPS)


def _units(inputs: int, layers: Iterable[tuple[int, Kernel]]) -> nn.Sequential:
    """Return convolutions in sequence, each given as (width, kernel)."""
    branch = nn.Sequential()
    for outputs, kernel in layers:
        branch.append(_unit(inputs, outputs, kernel))
        inputs = outputs
    return branch


def _v3_trunk() -> nn.Sequential:
    return chain(
        conv_1a=_unit(3, 32, 3, stride=2, pad=False),
        conv_2a=_unit(32, 32, 3, pad=False),
        conv_2b=_unit(32, 64, 3),
        pool1=nn.MaxPool2d(3, 2),
        conv_3b=_unit(64, 80, 1),
        conv_4a=_unit(80, 192, 3, pad=False),
        pool2=nn.MaxPool2d(3, 2),
        mixed_5b=_v3_block_35(192, 32),
        mixed_5c=_v3_block_35(256, 64),
        mixed_5d=_v3_block_35(288, 64),
        mixed_6a=_v3_reduce_to_17(),
        mixed_6b=_v3_block_17(128),
        mixed_6c=_v3_block_17(160),
        mixed_6d=_v3_block_17(160),
        mixed_6e=_v3_block_17(192),
    )


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), _unit(inputs, outputs, 1))


def _v3_block_35(inputs: int, projected: int) -> Branches:
    """Blocks on 35 x 35 pixels."""
    return Branches(
        (
            _unit(inputs, 64, 1),
            _units(inputs, [(48, 1), (64, 5)]),
            _units(inputs, [(64, 1), (96, 3), (96, 3)]),
            _pooled(inputs, projected),
        )
    )


def _v3_reduce_to_17() -> Branches:
    return Branches(
        (
            _unit(288, 384, 3, stride=2, pad=False),
            _units(288, [(64, 1), (96, 3)]).append(_unit(96, 96, 3, stride=2, pad=False)),
            nn.MaxPool2d(3, 2),
        )
    )


def _v3_block_17(width: int) -> Branches:
    """Blocks on 17 x 17 pixels: 7 x 7 convolutions, each cut into a row and a column."""
    row, column = (1, 7), (7, 1)
    return Branches(
        (
            _unit(768, 192, 1),
            _units(768, [(width, 1), (width, row), (192, column)]),
            _units(768, [(width, 1), (width, column), (width, row), (width, column), (192, row)]),
            _pooled(768, 192),
        )
    )


def _v3_reduce_to_8() -> Branches:
    return Branches(
        (
            _units(768, [(192, 1)]).append(_unit(192, 320, 3, stride=2, pad=False)),
            _units(768, [(192, 1), (192, (1, 7)), (192, (7, 1))]).append(
                _unit(192, 192, 3, stride=2, pad=False)
            ),
            nn.MaxPool2d(3, 2),
        )
    )


def _v3_block_8(inputs: int) -> Branches:
    """Blocks on 8 x 8 pixels: two branches split again into a row and a column."""
    return Branches(
        (
            _unit(inputs, 320, 1),
            _units(inputs, [(384, 1)]).append(_v3_fan()),
            _units(inputs, [(448, 1), (384, 3)]).append(_v3_fan()),
            _pooled(inputs, 192),
        )
    )


def _v3_fan() -> Branches:
    return Branches((_unit(384, 384, (1, 3)), _unit(384, 384, (3, 1))))
