"""Plain feed-forward networks for images: layers in sequence, no branches.

Communication slows these networks down most. A convolution shares its few weights over the whole image; a
fully connected layer uses each weight once per image. So nearly all parameters of AlexNet (95 %) and VGG-19
(86 %) are in three matrices that cost almost no arithmetic: many bytes to send, and little computation to
overlap them with.

- `mlp` is the network of Dettmers (2016), "8-bit approximations for parallelism in deep learning".
- `lenet` is LeNet-5 of LeCun et al. (1998), as it is built today: every C3 map sees every S2 map (the paper
  connects them by a table, with 900 fewer weights), subsampling is max pooling, the output is a linear layer.
- `alexnet` is the network that CNTK trains under that name and that QSGD (Alistarh et al. 2017) counts as
  62 M parameters: Krizhevsky et al. (2012) on one GPU, hence without groups, and with 192 instead of 256
  kernels in the second layer.
- `vgg19` is configuration E of Simonyan and Zisserman (2015).
"""

from torch import nn

from thinwire.zoo.layers import chain, he_init

#: Width and number of the convolutions between two poolings of VGG-19.
VGG19_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def mlp() -> nn.Sequential:
    """784-1024-1024-10 with dropout. Takes images (batch, 1, 28, 28) or flat ones (batch, 784)."""
    return chain(
        flatten=nn.Flatten(),
        drop1=nn.Dropout(0.2),
        fc1=nn.Linear(784, 1024),
        relu1=nn.ReLU(),
        drop2=nn.Dropout(0.3),
        fc2=nn.Linear(1024, 1024),
        relu2=nn.ReLU(),
        drop3=nn.Dropout(0.3),
        fc3=nn.Linear(1024, 10),
    )


def lenet() -> nn.Sequential:
    """LeNet-5. Takes images (batch, 1, 28, 28), which the first layer pads to the paper's 32 x 32."""
    return chain(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(16, 120, 5),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc2=nn.Linear(84, 10),
    )


def alexnet() -> nn.Sequential:
    """AlexNet as in CNTK. Takes images (batch, 3, 227, 227)."""
    return chain(
        conv1=nn.Conv2d(3, 96, 11, stride=4),
        relu1=nn.ReLU(),
        norm1=nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0),
        pool1=nn.MaxPool2d(3, 2),
        conv2=nn.Conv2d(96, 192, 5, padding=2),
        relu2=nn.ReLU(),
        norm2=nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0),
        pool2=nn.MaxPool2d(3, 2),
        conv3=nn.Conv2d(192, 384, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 384, 3, padding=1),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(384, 256, 3, padding=1),
        relu5=nn.ReLU(),
        pool5=nn.MaxPool2d(3, 2),
        **_classifier(256 * 6 * 6),
    )


def vgg19() -> nn.Sequential:
    """VGG-19. Takes images (batch, 3, 224, 224)."""
    stages: dict[str, nn.Module] = {}
    inputs = 3
    for stage, (width, depth) in enumerate(VGG19_STAGES, start=1):
        for layer in range(1, depth + 1):
            stages[f"conv{stage}_{layer}"] = nn.Conv2d(inputs, width, 3, padding=1)
            stages[f"relu{stage}_{layer}"] = nn.ReLU()
            inputs = width
        stages[f"pool{stage}"] = nn.MaxPool2d(2)
    return he_init(chain(**stages, **_classifier(inputs * 7 * 7)))


def _classifier(features: int) -> dict[str, nn.Module]:
    """Return the three fully connected layers that end both AlexNet and VGG."""
    return {
        "flatten": nn.Flatten(),
        "fc6": nn.Linear(features, 4096),
        "relu6": nn.ReLU(),
        "drop6": nn.Dropout(0.5),
        "fc7": nn.Linear(4096, 4096),
        "relu7": nn.ReLU(),
        "drop7": nn.Dropout(0.5),
        "fc8": nn.Linear(4096, 1000),
    }
