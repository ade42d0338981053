"""Small networks with the shapes of large ones: branches, chains, attention, several inputs and outputs."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thinwire.zoo.transformer import GPT2


class Unit(nn.Module):
    """A convolution and a nonlinearity; batch norm, dropout and writing in place if asked for."""

    def __init__(self, inputs, outputs, kernel=1, *, norm=False, drop=0.0, inplace=False):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(outputs) if norm else nn.Identity()
        self.relu = nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.relu(self.norm(self.conv(x))))


class Branches(nn.Module):
    """Inception in small: a stem, four branches of it, one with a residual, joined, then a head."""

    def __init__(self, **options):
        super().__init__()
        self.stem = Unit(3, 8, 3, **options)
        self.branches = nn.ModuleList(
            [Unit(8, 8, **options), Unit(8, 8, 3, **options), Unit(8, 8, 5, **options), Unit(8, 8, **options)]
        )
        self.join = Unit(32, 8, **options)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        one, two, three, four = (branch(x) for branch in self.branches)
        joined = self.join(torch.cat([one, two + x, three, four], dim=1)) + x
        return self.head(joined.mean((2, 3)))


class TwoOutputs(nn.Module):
    """Two inputs, one by keyword, and a dictionary of outputs; one of them counts nothing in the loss."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.both, self.extra = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, *, scale, shift=0.5):
        left, right = self.left(x).tanh(), self.right(x * scale).tanh()
        out = self.both(left + right + shift)
        return {"out": out, "pair": (self.extra(right), x.shape[1]), "kinds": out.argmax(1)}


class Chain(nn.Module):
    """Equal layers one after another."""

    def __init__(self, depth=4, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Translator(nn.Module):
    """GNMT in small: LSTM layers with residuals."""

    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            y, _ = layer(x)
            x = y if index < 1 else x + y
        return self.classifier(x)


class Odd(nn.Module):
    """What else a network may hold: a parameter, a buffer, a tensor and a dictionary at its top."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("unsaved", torch.full((8,), 0.25), persistent=False)
        self.factor = torch.tensor(1.5)
        self.gains = nn.ParameterDict({"one": torch.ones(8), "two": torch.full((8,), 2.0)})
        self.one, self.two = Again(), Again()

    def forward(self, x):
        y = self.one(x * self.token + self.shift) * self.gains["one"]
        z = self.two(y * self.factor) * self.gains["two"] + self.unsaved
        return z, x, y.shape


class Again(nn.Module):
    """Computes forward again on the way back."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda x: self.fc(x).tanh(), x, use_reentrant=False)


def tiny_gpt(drop=0.0):
    net = GPT2(vocabulary=40, positions=16, width=16, depth=4, heads=2)
    for each in net.modules():
        if isinstance(each, nn.Dropout):
            each.p = drop
    return net
