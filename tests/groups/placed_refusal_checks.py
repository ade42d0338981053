"""Placed networks: what is refused, ranks that disagree, and ranks that fail."""

import os
import time
from datetime import timedelta

import torch.distributed as dist
from placed_nets import Branches, Chain, TwoOutputs
from placed_tools import equal_everywhere, made, near, rows, stages
from start_program import raises
from torch import nn

from thinwire.errors import CodecError, CommError, Disagreement, InputError
from thinwire.parallel import Placed

SHORT_S, BUSY_S = 8, 8.0  #: patience of a group; what a busy machine may add


# What is refused


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = self.one(x)
        return self.two(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) + nn.functional.relu(x, inplace=True)


def refusals(_, world):
    """Every rank hears what is wrong, when the network is placed."""
    raises(InputError, ["'layer.0'", "did you mean 'layers.0'"], Placed, Chain(), {"*": 0, "layer.0": 0})
    raises(InputError, ["'layers.1'", f"0 to {world - 1}"], Placed, Chain(), {"*": 0, "layers.1": world})
    raises(
        InputError,
        ["'layers.3' has no rank", "layers.3.weight"],
        Placed,
        Chain(),
        {f"layers.{i}": 0 for i in range(3)},
    )
    raises(
        InputError,
        ["cannot be traced", "placed_refusal_checks.py", "if x.sum() > 0"],
        Placed,
        Untraceable(),
        {"one": 0, "two": world - 1},
    )
    raises(
        InputError,
        ["'first.weight' on rank 0", "'last.weight'", "one tensor"],
        Placed,
        Tied(),
        {"first": 0, "last": world - 1},
    )
    raises(InputError, "equally well", Placed, Chain(), {"*": 0, "layers.?": 0, "layers.*": 1})
    raises(InputError, "micro_batches", Placed, Chain(), {"*": 0}, micro_batches=0)
    raises(InputError, "placement must map", Placed, Chain(), {})
    raises(CodecError, "residual", Placed, Chain(), {"*": 0}, forward="topk/0.01+ef")
    raises(
        InputError,
        "rows differ",
        Placed(TwoOutputs(), {"*": 0}, micro_batches=2),
        rows(4, 6),
        scale=rows(2, 6),
    )
    overwriting = Placed(Overwrites(), {"one": 0, "two": world - 1})
    raises(InputError, ["changes 'one' in place", "'two' uses that too"], overwriting, rows(2, 4))
    placed = Placed(made(Chain), stages(world), group=dist.new_group())
    raises(InputError, "rank must be", placed.gathered_state_dict, rank=world)
    next(placed.parameters()).register_hook(lambda grad: grad)
    raises(InputError, "register_post_accumulate_grad_hook", placed, rows(2, 16))


def told(world, texts, function, *args, **options):
    """All ranks raise the same."""
    said = raises(Disagreement, texts, function, *args, **options)
    equal_everywhere(said, world)


def disagreements(rank, world):
    """Ranks that were told different things hear of it, and the group stays usable."""
    odd = rank == 1
    told(world, ["rank 0", "rank 1", "placement"], Placed, made(Chain), {"*": int(odd), "layers.0": 0})
    told(
        world,
        ["forward int8/256", "forward int4/128"],
        Placed,
        made(Chain),
        {"*": 0},
        forward="int4" if odd else "int8",
    )
    told(world, ["micro_batches=1", "micro_batches=2"], Placed, made(Chain), {"*": 0}, micro_batches=1 + odd)
    told(world, ["network Chain", "network Branches"], Placed, made(Branches if odd else Chain), {"*": 0})
    told(
        world,
        ["which refuses: placement", "'layer'"],
        Placed,
        made(Chain),
        {"*": 0, "layer" if odd else "layers": 0},
    )
    placed = Placed(made(Chain), stages(world))
    told(world, ["(4, 16) float32", "(5, 16) float32"], placed, rows(5 if odd else 4, 16))
    told(world, ["(4, 16)", "(5, 16)"], Placed, made(Chain), {"*": 0}, example=(rows(5 if odd else 4, 16),))
    near(placed(rows(4, 16)), made(Chain)(rows(4, 16)))


# What fails


def fails(texts, function, *args):
    """An error on this rank within the time-out."""
    began = time.monotonic()
    said = ""
    try:
        function(*args)
    except CommError as error:
        said = str(error)
    assert said, "no error"
    for text in texts:
        assert text in said, said
    assert time.monotonic() - began < SHORT_S + 3.0 + BUSY_S


def short(world):
    """A group with little patience, once everything is loaded that takes time."""
    Placed(made(Chain), stages(world))(rows(4, 16)).sum().backward()
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    dist.barrier()
    return group


def other_rows(rank, world):
    """A rank with other rows than the rest, all of which were seen before or not: an error that says so."""
    placed = Placed(made(Chain), stages(world), group=short(world))
    for count in (4, 5):
        placed(rows(count, 16))
    fails(["(4, 16) float32", "(5, 16) float32"], placed, rows(5 if rank == 1 else 4, 16))
    placed = Placed(made(Chain), stages(world), group=short(world))
    placed(rows(4, 16))
    fails(["(6, 16) float32"], placed, rows(6 if rank == 1 else 4, 16))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.broken = nn.Linear(16, 16), False

    def forward(self, x):
        if self.broken:
            raise ValueError("out of luck")
        return self.fc(x)


def own_error(rank, world):
    """A part that raises an error: its rank raises that, the others hear of it before their time is up."""
    placed = Placed(
        made(lambda: nn.Sequential(Breaks(), nn.Linear(16, 16))), {"0": 1, "1": 0}, group=short(world)
    )
    placed(rows(4, 16))
    if rank == 1:
        placed.get_submodule("0").broken = True
        raises(ValueError, "out of luck", placed, rows(4, 16))
    else:
        fails([], placed, rows(4, 16))


def dies(rank, world):
    """A rank that is gone: an error on all others."""
    placed = Placed(made(Chain), stages(world), group=short(world))
    placed(rows(4, 16)).sum().backward()
    if rank == world - 1:
        os._exit(0)
    fails([], lambda: placed(rows(4, 16)).sum().backward())
