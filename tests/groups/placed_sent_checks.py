"""Placed networks: what is sent, what is kept, data parallelism, and what happens at the same time."""

import gc
import itertools
import time
import weakref

import torch
import torch.distributed as dist
from placed_nets import Branches, Chain
from placed_tools import (
    equal_everywhere,
    gradients,
    grown,
    halves,
    loss_of,
    made,
    near,
    rows,
    same,
    stages,
    steps,
)  # fmt: skip
from start_program import digest, raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import codecs
from thinwire.parallel import Placed
from thinwire.runtimes.gloo_transport import GlooTransport

NAP_S = 0.15  #: of a slow part


# Codecs


def round_trip(spec):
    x = rows(64, 256)
    codec = codecs.get(spec)
    return float((codec.decode(codec.encode(x.flatten()), x.numel()) - x.flatten()).norm() / x.norm())


def lossy(rank, world):
    """The error of gradients is what the codec explains; the outputs are equal everywhere."""

    def make():
        return Chain(width=64)

    plain, x, y = made(make), rows(64, 64), rows(64, 64, seed=2)
    steps(plain, (x,), loss_of(y), 1, 0.0)
    for spec, least in (("int8", 3.5), ("int4", 6.0)):
        placed = [Placed(made(make), stages(world), forward=spec, backward=spec) for _ in range(2)]
        for each in placed:
            steps(each, (x,), loss_of(y), 1, 0.0)
        error = grown(gradients(placed[0]), gradients(plain))
        assert 0 < error < 4 * (2 * world - 1) * round_trip(spec), (spec, error)
        assert digest(gradients(placed[0]).values()) == digest(gradients(placed[1]).values())
        there, back = (placed[0].stats()[each] for each in ("forward", "backward"))
        if rank < world - 1:  # its output is no message
            assert there["plain_nbytes"] > least * there["sent_nbytes"], there
        if rank:
            assert back["plain_nbytes"] > least * back["sent_nbytes"], back
        equal_everywhere(digest([placed[0](x)]), world)
    one_way = Placed(made(make), stages(world), forward="int8")
    steps(one_way, (x,), loss_of(y), 1, 0.0)
    assert one_way.stats()["backward"]["encoded"] == 0


def random_rounding(_, world):
    """A codec that draws gives the same again from torch's state, and other draws in the next step."""
    placed, x, found = (
        Placed(made(lambda: Chain(width=64)), stages(world), forward="qsgd4/512"),
        rows(64, 64),
        [],
    )
    for _ in range(2):
        torch.manual_seed(7)
        with torch.no_grad():
            found += [placed(x), placed(x)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def claimed(_, world):
    """The bytes that `stats` claims are those that gloo is given."""
    placed = Placed(made(lambda: Chain(width=64)), stages(world), forward="int8", micro_batches=2)
    x = rows(64, 64)
    steps(placed, (x,), loss_of(x), 1)
    sent, before, plain = [], placed.stats()["sent_nbytes"], GlooTransport.post

    def post(self, request, tag):
        wire = getattr(request, "wire", None)
        sent.append(0 if wire is None else wire.nbytes)
        return plain(self, request, tag)

    GlooTransport.post = post
    try:
        steps(placed, (x,), loss_of(x), 1)
    finally:
        GlooTransport.post = plain
    assert sum(sent) == placed.stats()["sent_nbytes"] - before > 0


# State


def state(rank, world):
    """A rank has its own parameters only; the whole is gathered and loaded under its old names."""
    plain, whole = made(Branches), made(Branches)
    kept = [weakref.ref(each) for each in whole.parameters()]
    placed = Placed(whole, halves(world))
    gc.collect()
    own = dict(placed.named_parameters())
    assert sum(each() is not None for each in kept) == len(own)
    names = [None] * world
    dist.all_gather_object(names, list(own))
    assert sorted(itertools.chain(*names)) == sorted(name for name, _ in plain.named_parameters())
    assert set(placed.state_dict()) == set(own)
    everything = placed.gathered_state_dict()
    assert list(everything) == list(plain.state_dict())
    assert digest(everything.values()) == digest(plain.state_dict().values())
    last = placed.gathered_state_dict(rank=world - 1)
    assert len(last) == (len(everything) if rank == world - 1 else 0)
    other = made(Branches, seed=3).state_dict()
    placed.load_state_dict(other)
    assert digest(placed.gathered_state_dict().values()) == digest(other.values())
    raises(RuntimeError, "Unexpected key", placed.load_state_dict, other | {"tail.weight": torch.ones(1)})
    mine = next(iter(own))
    raises(RuntimeError, "Missing key", placed.load_state_dict, {k: v for k, v in other.items() if k != mine})
    assert "Elsewhere" in repr(placed)
    x = rows(2, 3, 8, 8)
    plain.load_state_dict(other)
    near(placed(x), plain(x))
    placed.to(torch.float64)
    near(placed(x.double()).float(), plain(x))


# With data parallelism


def data_parallel(_, world):
    """Half of the ranks hold a network, twice: equal to one device, and with int8 the replicas stay equal."""

    def wide():
        return Chain(width=128)

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "placed"))
    across, inside = mesh["replicate"].get_group(), mesh["placed"].get_group()
    x, y = rows(8, 128), rows(8, 128, seed=2)
    part = slice(4 * across.rank(), 4 * across.rank() + 4)
    plain = made(wide)
    wanted = steps(plain, (x,), loss_of(y), 3)
    for codec in (None, "fp32", "int8"):
        placed = Placed(made(wide), stages(world // 2), group=inside, micro_batches=2)
        ddp = DistributedDataParallel(placed, process_group=across)
        handle = thinwire.attach(ddp, codec) if codec else None
        losses = steps(ddp, (x[part],), loss_of(y[part]), 3)
        dist.all_reduce(losses, group=across)
        if codec != "int8":
            near(losses / 2, wanted)
            same(placed, plain)
        else:
            assert 0 < grown(gradients(placed), gradients(plain)) < 0.1
            assert handle.stats()["ratio"] > 2.0
        found = [None] * 2
        dist.all_gather_object(found, digest(placed.parameters()), group=across)
        assert found[0] == found[1], "replicas differ"


# What ranks do at the same time


class Nap(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(_, x):
        time.sleep(NAP_S)
        return x.clone()

    @staticmethod
    def backward(_, grad):
        time.sleep(NAP_S)
        return grad.clone()


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return Nap.apply(self.fc(x)) if type(x) is torch.Tensor else self.fc(x)  # shapes need no nap


class SlowBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(16, 16), Slow(), Slow()

    def forward(self, x):
        x = self.stem(x)
        return self.left(x) + self.right(x)


def spans(placed, world):
    """What all ranks did, by rank and kind."""
    everyone = [None] * world
    dist.all_gather_object(everyone, placed.timeline())
    return {
        (rank, kind): [(each["ts"], each["ts"] + each["dur"]) for each in events if each["cat"] == kind]
        for rank, events in enumerate(everyone)
        for kind in ("forward", "backward", "send", "wait")
    }


def overlap(ones, others):
    """The longest time at which something of both went on, in seconds."""
    return max(min(one[1], other[1]) - max(one[0], other[0]) for one in ones for other in others) / 1e6


def at_the_same_time(_, world):
    """Branches overlap, forward and backward; so do stages, on different micro-batches."""
    branched = Placed(made(SlowBranches), {"stem": 0, "left": 0, "right": 1}, record=True)
    staged = Placed(
        made(lambda: nn.Sequential(Slow(), Slow())), {"0": 0, "1": 1}, micro_batches=3, record=True
    )
    for placed in (branched, staged):
        placed(rows(6, 16)).square().mean().backward()
        placed.timeline()
        placed(rows(6, 16)).square().mean().backward()
        seen = spans(placed, world)
        for kind in ("forward", "backward"):
            assert overlap(seen[0, kind], seen[1, kind]) > NAP_S / 3, kind
        assert placed.timeline() == []
