"""What the checks of `outer_program.py` share: a model, its training, and the outer loop computed again."""

import torch
from attach_tools import alike, everyone
from start_program import digest
from torch import nn

from thinwire.outer import DiLoCo, LocalSGD, SparseLoCo

LR = 0.05
ROWS, WIDTH = 16, 104  # WIDTH squared is more than policies leave in fp32

TWO_BITS = "topk/0.02~int2/64~rms1+ef"
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
#: Every method, codec and way to begin outer steps: name, class, options.
KINDS = {
    "local": (LocalSGD, {"every": 3}),
    "local fp32": (LocalSGD, {"every": 3, "codec": "fp32"}),
    "diloco": (DiLoCo, {"every": 4}),
    "diloco int4+ef": (DiLoCo, {"every": 4, "codec": "int4"}),
    "diloco onebit": (DiLoCo, {"every": 4, "codec": "onebit"}),
    "diloco random": (DiLoCo, {"every": 4, "codec": "qsgd4", "seed": 3}),
    "diloco powersgd": (DiLoCo, {"every": 4, "codec": "powersgd"}),
    "diloco dct": (DiLoCo, {"every": 4, "codec": "dct-topk"}),
    "diloco streaming": (DiLoCo, {"every": 5, "codec": "int4", "fragments": 3}),
    "diloco overlapped": (DiLoCo, {"every": 4, "codec": "int4", "delay": 2}),
    "diloco all": (DiLoCo, {"every": 6, "codec": "int4", "fragments": 3, "delay": 5, "alpha": 0.25}),
    "sparse": (SparseLoCo, {"every": 3}),
    "sparse overlapped": (SparseLoCo, {"every": 3, "fragments": 2, "delay": 1, "codec": TWO_BITS}),
}  # fmt: skip


def network(seed=0, norm=True, dtype=torch.float32):
    """Two matrices that are encoded, and vectors that are not; batch norm has buffers."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, 4)).to(
        dtype
    )


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": LR, **options})


def batch(rank, step, dtype=torch.float32):
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=made)
    return x.to(dtype), (x[:, :4] * (1 + rank % 2)).to(dtype)


def train(model, optimizer, rank, steps, first=0):
    """Inner steps, each on this rank's own batch."""
    for step in range(first, first + steps):
        dtype = next(model.parameters()).dtype
        x, y = batch(rank, step, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def made(kind, seed=0, model=None, optimizer=None, **more):
    """A model, its optimizer and its outer loop."""
    method, options = KINDS[kind]
    model = network(seed) if model is None else model
    optimizer = sgd(model, momentum=0.9) if optimizer is None else optimizer
    return model, optimizer, method(model, optimizer, **{**options, **more})


def globals_alike(outer):
    """That all ranks have the same bits of all global weights, and of the outer optimizer."""
    weights = digest(outer.global_weights().values())
    momenta = digest(
        each
        for state in outer.optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    )
    alike((weights, momenta, outer.step, outer.rounds), outer.group)


class Reference:
    """The outer loop in float64, by torch's own optimizer and a gather of all ranks' weights."""

    def __init__(self, model, **options):
        self.weights = [nn.Parameter(each.detach().double().clone()) for each in model.parameters()]
        self.optimizer = torch.optim.SGD(self.weights, **options)

    @torch.no_grad()
    def outer_step(self, model):
        gathered = everyone([each.detach().double() for each in model.parameters()])
        for i, weight in enumerate(self.weights):
            weight.grad = weight - torch.stack([rank[i] for rank in gathered]).mean(0)
        self.optimizer.step()
        for weight, local in zip(self.weights, model.parameters(), strict=True):
            local.copy_(weight)


def far(one, other):
    """The largest difference of some tensors, relative to the largest number."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def emulated(models, options, every, delay, alpha, steps):
    """Global weights after overlapped outer steps of several models, one rank after another, in float64."""
    weights = [nn.Parameter(each.detach().double().clone()) for each in models[0].parameters()]
    optimizer = torch.optim.SGD(weights, **options)
    inner, means = [sgd(model) for model in models], {}

    def end(step):
        for weight, mean in zip(weights, means.pop(step, []), strict=True):
            weight.grad = mean
        optimizer.step()
        for model in models:
            for local, weight in zip(model.parameters(), weights, strict=True):
                local.data.copy_(alpha * local.data.double() + (1 - alpha) * weight.data)

    for step in range(1, steps + 1):
        for rank, (model, each) in enumerate(zip(models, inner, strict=True)):
            train(model, each, rank, 1, step - 1)
        if delay and step in means:
            end(step)
        if step % every == 0:
            locals = zip(*(model.parameters() for model in models), strict=True)
            means[step + delay] = [
                (weight - torch.stack([each.double() for each in ranks]).mean(0)).detach()
                for weight, ranks in zip(weights, locals, strict=True)
            ]
        if not delay and step in means:
            end(step)
    return weights
