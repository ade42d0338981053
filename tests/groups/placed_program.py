"""What ranks of a placed network do: compute together what one device computes alone, and compare.

    python placed_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong, "" if nothing.
"""

import copy
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from placed_nets import Branches
from start_program import digest, join, raises, report, start
from torch import nn

from thinwire.errors import CommError, Disagreement, InputError
from thinwire.parallel import Placed

TIMEOUT_S, SHORT_S = 60, 4


def made(make, seed=0):
    """The same network on every rank."""
    torch.manual_seed(seed)
    return make()


def rows(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps(model, inputs, loss, count=3, rate=0.05):
    """Train for some steps; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
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


def same(rank, placed, plain, bound=2e-6):
    """Whether this rank's gradients are those of one device, and no other rank's are here."""
    wanted, found = gradients(plain), gradients(placed)
    assert found, f"rank {rank} has no parameters"
    for name, grad in found.items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is not None:
            near(grad, wanted[name], bound)


def spread(network, rank, world):
    """Numbers of ranks for a number of parts."""
    return [min(i * world // network, world - 1) for i in range(network)]


def halves(world):
    """A placement of `Branches`: each branch on its rank."""
    return {"*": 0, **{f"branches.{i}": i % world for i in range(4)}, "head": world - 1}


def branches(rank, world):
    """A shared prefix, branches on several ranks, a residual and a concatenation: three steps of training."""
    plain = made(Branches)
    placed = Placed(made(Branches), halves(world))
    x, y = rows(8, 3, 8, 8), rows(8, 10, seed=2)
    losses = [steps(each, (x,), lambda out: nn.functional.mse_loss(out, y)) for each in (plain, placed)]
    near(losses[1], losses[0])
    same(rank, placed, plain)
    for name, each in placed.named_parameters():
        near(each, dict(plain.named_parameters())[name])


CHECKS = {each.__name__: each for each in (branches,)}
SLOW = []


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, began = "", time.monotonic()
        try:
            CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2500:]
        report(check=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
