"""What the checks of placed networks share: networks, data, and what it means to be equal to one device."""

import torch
import torch.distributed as dist
from torch import nn

from thinwire.parallel import Placed

UNUSED = torch.zeros(1)  # an optimizer needs something, and a rank may have no parameters


def made(make, seed=0):
    """The same network on every rank."""
    torch.manual_seed(seed)
    return make()


def rows(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps(model, inputs, loss, count=3, rate=0.05):
    """Train for some steps; return the losses."""
    optimizer = torch.optim.SGD([*model.parameters(), UNUSED], lr=rate, momentum=0.9)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss(model(*inputs))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters()}


def near(one, other, bound=2e-6):
    """Whether two tensors are as near as float32 sums in another order are."""
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), 1e-3)
    assert torch.allclose(one, other, rtol=0, atol=bound * scale * 10), float(
        (one - other).abs().max() / scale
    )


def same(placed, plain, bound=2e-6):
    """Whether this rank's gradients are those of one device, and no other rank's are here."""
    wanted, found = gradients(plain), gradients(placed)
    for name, grad in found.items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is not None:
            near(grad, wanted[name], bound)


def halves(world):
    """A placement of `Branches`: each branch on its rank."""
    return {"*": 0, **{f"branches.{i}": i % world for i in range(4)}, "head": world - 1}


def stages(world, depth=4, name="layers"):
    """A placement of layers in equal stages."""
    return {f"{name}.{i}": i * world // depth for i in range(depth)}


def loss_of(y):
    return lambda out: nn.functional.mse_loss(out, y)


def both(make, placement, inputs, loss, count=2, bound=2e-6, **options):
    """Train on one device and placed: losses, gradients and parameters are equal; return both."""
    plain = made(make)
    placed = Placed(made(make), placement, **options)
    losses = [steps(each, inputs, loss, count) for each in (plain, placed)]
    near(losses[1], losses[0], bound)
    same(placed, plain, bound)
    wanted = dict(plain.named_parameters())
    for name, each in placed.named_parameters():
        near(each, wanted[name], bound)
    return plain, placed


def equal_everywhere(what, world):
    everyone = [None] * world
    dist.all_gather_object(everyone, what)
    assert len(set(everyone)) == 1, everyone


@torch.no_grad()
def grown(found, wanted):
    """The relative error of this rank's gradients together."""
    error = sum(float((found[name] - wanted[name]).double().square().sum()) for name in found)
    return (error / sum(float(wanted[name].double().square().sum()) for name in found)) ** 0.5
