"""Shared by the families: a chain of named stages, and a convolution with batch norm.

Names matter here, because policies and reports identify a gradient by its parameter's name. `chain` is
`nn.Sequential` with the names given as keywords, so that a network reads like the table in its paper and its
parameters are called `conv1.weight`, `fc6.bias` and so on.

A convolution that is followed by batch norm has no bias: the norm would subtract it again.
"""

from collections import OrderedDict

from torch import nn

Kernel = int | tuple[int, int]


def chain(**stages: nn.Module) -> nn.Sequential:
    """Return the stages in sequence, under their keywords as names.

    >>> list(chain(fc=nn.Linear(2, 3), relu=nn.ReLU()).state_dict())
    ['fc.weight', 'fc.bias']
    """
    return nn.Sequential(OrderedDict(stages))


def conv_bn(
    inputs: int,
    outputs: int,
    kernel: Kernel,
    *,
    stride: int = 1,
    pad: bool = True,
    relu: bool = True,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Return a convolution without bias, batch norm and, unless `relu` is false, ReLU.

    `pad` keeps the size of the image at stride 1, for odd kernels.
    """
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if pad else 0
    conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
    layer = chain(conv=conv, norm=nn.BatchNorm2d(outputs, eps=eps))
    if relu:
        layer.add_module("relu", nn.ReLU())
    return layer


def he_init(net: nn.Sequential) -> nn.Sequential:
    """Draw the weights of convolutions as in He et al. (2015) and return the network."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
