"""What the checks of `attach_program.py` share: a model whose gradients are known, and ways to compare."""

import bisect
import copy
import io

import torch
import torch.distributed as dist
from start_program import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import codecs
from thinwire.schedules.traits import is_sparse

LR = 0.1
SMALL_NBYTES = 1 << 16  # where `auto` goes over from one_shot to two_shot
#: Recipes in which no sum is left to the network, so that no bit depends on DDP's buckets.
OWN_SUMS = (
    "int8", "int4", "fp8", "aps8", "aps8-e4m3", "dettmers8", "qsgd4", "onebit", "mstopk", "dct-topk",
)  # fmt: skip


class Bag(nn.Module):
    """Parameters whose gradients are what it is called with (and a bit of themselves)."""

    def __init__(self, shapes, decay=0.0, dtype=torch.float32):
        super().__init__()
        self.decay = decay
        for number, shape in enumerate(shapes):
            setattr(self, f"w{number}", nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, *wanted):
        """Not in the order of parameters: DDP makes other buckets after the first step."""
        pairs = list(zip(self.parameters(), wanted, strict=True))
        loss = 0.0
        for parameter, gradient in pairs[1::2] + pairs[::2]:
            loss = loss + (parameter * gradient).sum()
            if self.decay:
                loss = loss + self.decay / 2 * (parameter * parameter).sum()
        return loss


def bag(shapes, decay=0.0, dtype=torch.float32, **options):
    return DistributedDataParallel(Bag(shapes, decay, dtype), **options)


def wanted(shapes, rank, step, dtype=torch.float32):
    """One rank's gradients at one step; magnitudes that differ from place to place."""
    made = torch.Generator().manual_seed(7919 * step + rank)
    means = []
    for shape in shapes:
        x = torch.randn(shape, generator=made)
        means.append((x * x.abs() * (1 + x.shape[0] % 7)).to(dtype))
    return means


def feed(net, gradients):
    """One backward pass; what DDP makes of these gradients."""
    net.zero_grad()
    net(*gradients).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def go(net, shapes, rank, steps, first=0, dtype=torch.float32):
    """Train a bag."""
    for step in range(first, first + steps):
        for parameter, gradient in zip(
            net.parameters(), feed(net, wanted(shapes, rank, step, dtype)), strict=True
        ):
            parameter.data.sub_(gradient, alpha=LR)
    return net


def near_threshold(spec, world):
    """Shapes on both sides of where `auto` changes from one_shot to two_shot, and small ones."""
    codec = codecs.get(spec)
    most = bisect.bisect_right(
        range(1 << 19), SMALL_NBYTES, key=lambda n: (max(world, 3) - 1) * codec.nbytes(n)
    )
    rows = (30_000 if is_sparse(codec) else most) // 24 - 1
    return [(rows, 24), (100,), (rows + 30, 24), (30, 40), (500, 21)]


def equal(one, other, what=""):
    """Bit for bit."""
    assert digest(params(one)) == digest(params(other)), f"{what}: not the same bits"


def params(net):
    return list(net.parameters()) if isinstance(net, nn.Module) else list(net)


def saved(state):
    """As a file would have it."""
    room = io.BytesIO()
    torch.save(state, room)
    room.seek(0)
    return torch.load(room, weights_only=True)


def everyone(thing, group=None):
    """What every rank has."""
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, copy.deepcopy(thing), group)
    return gathered


def alike(thing, group=None):
    """That all ranks have the same."""
    gathered = everyone(thing, group)
    assert all(each == gathered[0] for each in gathered), gathered
    return thing


def mean(tensors):
    return torch.stack([each.double() for each in tensors]).mean(0)
