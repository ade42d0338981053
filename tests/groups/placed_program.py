"""What ranks of a placed network do: compute together what one device computes alone, and compare.

    python placed_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong, "" if nothing.
"""

import gc
import itertools
import os
import sys
import time
import traceback
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from placed_nets import Branches, Chain, Odd, Translator, TwoOutputs, tiny_gpt
from start_program import digest, join, raises, report, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import codecs
from thinwire.errors import CodecError, CommError, Disagreement, InputError
from thinwire.parallel import Placed

TIMEOUT_S, SHORT_S = 60, 8
UNUSED = torch.zeros(1)  # an optimizer needs something, and a rank may have no parameters
NAP_S, BUSY_S = 0.15, 8.0  #: of a slow part; what a busy machine may add


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


# Equal to one device


def branches(_, world):
    """A shared prefix, branches on several ranks, a residual and a concatenation: three steps of training."""
    _, placed = both(Branches, halves(world), (rows(8, 3, 8, 8),), loss_of(rows(8, 10, seed=2)), 3)
    stats = placed.stats()
    assert stats["calls"] == 3
    assert stats["messages"] % 3 == 0 < stats["messages"]
    assert stats["sent_nbytes"] == stats["plain_nbytes"] > 0


def outputs(_, world):
    """Inputs by keyword, a default, outputs in a dictionary and a tuple, whole numbers, an unused output."""
    plain = made(TwoOutputs)
    placed = Placed(made(TwoOutputs), {"left": 0, "right": world - 1, "both": world // 2, "extra": 0})
    x, y = rows(5, 6), rows(5, 4, seed=2)
    found = []
    for each in (plain, placed):
        out = each(x, scale=2.0)
        assert out["pair"][1] == 6
        assert out["kinds"].dtype == torch.int64
        nn.functional.mse_loss(out["out"], y).backward()
        found.append(out)
    assert torch.equal(found[0]["kinds"], found[1]["kinds"])
    near(found[1]["pair"][0], found[0]["pair"][0])
    same(placed, plain)
    again = placed(scale=2.0, x=x, shift=0.25)  # other constants: another plan
    near(again["out"], plain(x, scale=2.0, shift=0.25)["out"])


def odd_parts(_, world):
    """Parameters, buffers and tensors at the top, an input as an output, activations computed again."""
    plain, whole, last = made(Odd), made(Odd), world - 1
    kept = weakref.ref(whole.token)
    placed = Placed(whole, {"*": 0, "two": last, "gains.two": last, "token": last})
    gc.collect()
    assert (kept() is not None) == ("token" in dict(placed.named_parameters()))
    assert list(placed.gathered_state_dict()) == list(plain.state_dict())
    x = rows(4, 8)
    for each in (plain, placed):
        out, same_x, shape = each(x)
        assert torch.equal(same_x, x)
        assert shape == (4, 8)
        out.square().mean().backward()
    same(placed, plain)
    near(placed(x)[0], plain(x)[0])


def pipeline(_, world):
    """Stages and micro-batches, of rows that they cannot share evenly, and fewer rows than micro-batches."""
    for parts, batch in ((1, 8), (4, 8), (4, 10), (4, 3)):
        both(
            Chain,
            stages(world),
            (rows(batch, 16),),
            loss_of(rows(batch, 16, seed=2)),
            micro_batches=parts,
        )


def first_and_last(_, world):
    """A rank with the first and the last layers, in micro-batches."""
    placement = {"*": 0, "layers.1": world - 1, "layers.2": world - 1}
    both(Chain, placement, (rows(8, 16),), loss_of(rows(8, 16, seed=2)), micro_batches=4)


def translator(_, world):
    """LSTM layers in stages, whole numbers as inputs."""
    placement = {"embedding": 0, "classifier": world - 1, **stages(world)}
    tokens = torch.randint(0, 32, (6, 5), generator=torch.Generator().manual_seed(3))

    def loss(out):
        return nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())

    for parts in (1, 3):
        both(Translator, placement, (tokens,), loss, micro_batches=parts)


def gpt(_, world):
    """A GPT whose head is its embedding: on the rank of the embedding, or sent to where the last block is."""
    placement = {"tokens": 0, "positions": 0, "norm": world - 1, **stages(world, name="blocks")}
    tokens = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(3))

    def loss(out):
        return nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())

    for parts in (1, 2):
        for extra in ({}, {"linear": world - 1}):
            _, placed = both(tiny_gpt, placement | extra, (tokens,), loss, bound=2e-5, micro_batches=parts)
    assert placed.operations()["linear"] == (world - 1,)


class WithLoss(nn.Module):
    """A network that returns its loss: a number, of which micro-batches give the mean."""

    def __init__(self):
        super().__init__()
        self.net = Chain()

    def forward(self, x, y):
        return (self.net(x) - y).square().mean()


def returned_loss(_, world):
    """The mean over uneven micro-batches is that of the batch; next to nothing is sent for the output."""
    plain, placed = made(WithLoss), Placed(made(WithLoss), stages(world, name="net.layers"), micro_batches=3)
    x, y = rows(7, 16), rows(7, 16, seed=2)
    values = [each(x, y) for each in (plain, placed)]
    near(values[1], values[0])
    for value in values:
        (3 * value).backward()
    same(placed, plain)


def batch_norm(_, world):
    """Running statistics live where their module is; evaluation uses them; writing in place is no harm."""

    def make():
        return Branches(norm=True, inplace=True)

    x, y = rows(8, 3, 8, 8), rows(8, 10, seed=2)
    plain, placed = both(make, halves(world), (x,), loss_of(y), 2, bound=2e-5)
    for each in (plain, placed):
        each.eval()
    with torch.no_grad():
        near(placed(x), plain(x), 2e-5)
    wanted = dict(plain.named_buffers())
    for name, each in placed.named_buffers():
        near(each.float(), wanted[name].float(), 2e-5)
    whole = placed.gathered_state_dict()
    assert list(whole) == list(plain.state_dict())
    assert int(whole["stem.norm.num_batches_tracked"]) == 2


def dropout(rank, world):
    """Draws depend on torch's seed, the operation and the micro-batch, not on the rank."""
    alone = [dist.new_group([each]) for each in range(world)][rank]
    x, y = rows(8, 3, 8, 8), rows(8, 10, seed=2)

    def make():
        return Branches(drop=0.3)

    one = Placed(made(make), dict.fromkeys(halves(world), 0), group=alone, micro_batches=2)
    placed = Placed(made(make), halves(world), micro_batches=2)
    found = []
    for each in (one, placed, placed):
        torch.manual_seed(7)
        found.append(steps(each, (x,), loss_of(y), 1, 0.0))
    near(found[1], found[0])
    assert torch.equal(found[1], found[2])
    same(placed, one)
    assert not torch.equal(steps(placed, (x,), loss_of(y), 1, 0.0), found[1]), "another step draws anew"
    plain = made(make)
    near(placed.eval()(x), plain.eval()(x))
    dist.destroy_process_group(alone)


def input_gradients(_, world):
    """The gradient of an input arrives on all ranks, with equal bits, and reaches what made the input."""
    plain, placed = made(Branches), Placed(made(Branches), {"*": 0, "branches": world - 1}, micro_batches=2)
    y, found = rows(4, 10, seed=2), []
    for each in (plain, placed):
        x = rows(4, 3, 8, 8).requires_grad_()
        nn.functional.mse_loss(each(x * 2.0), y).backward()
        found.append(x.grad)
    near(found[1], found[0])
    equal_everywhere(digest([found[1]]), world)


def no_gradients(_, world):
    """A frozen part, a rank with nothing to train, and evaluation."""

    def make():
        net = Chain()
        for each in net.layers[:2]:
            each.requires_grad_(False)
        return net

    both_ways = {"layers.0": 0, "layers.1": 0, "layers.2": world - 1, "layers.3": world - 1}
    plain, placed = made(make), Placed(made(make), both_ways, micro_batches=2)
    x = rows(4, 16)
    for each in (plain, placed):
        each(x).square().mean().backward()
    wanted = gradients(plain)
    for name, grad in gradients(placed).items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is not None:
            near(grad, wanted[name])
    with torch.no_grad():
        out = placed(x)
    assert not out.requires_grad
    near(out, plain(x))
    assert placed.stats()["backward"]["messages"] == 0, "nothing trains before the cut"


def several_calls(_, world):
    """Two calls and one loss of both; then what went backward cannot do so again."""
    plain, placed = made(Chain), Placed(made(Chain), stages(world))
    one, two = rows(4, 16), rows(6, 16, seed=5)
    values = []
    for each in (plain, placed):
        value = each(one).square().mean() + each(two).abs().mean() * each(one).mean()
        value.backward()
        values.append(value)
    near(values[1], values[0])
    same(placed, plain)
    value = placed(one).sum()
    value.backward(retain_graph=True)
    raises(InputError, "went backward before", value.backward)


def sixteen_bits(_, world):
    """bfloat16 parameters, and autocast: messages have the dtypes that one device computes with."""
    x, y = rows(8, 16, dtype=torch.bfloat16), rows(8, 16, seed=2, dtype=torch.bfloat16)

    def make():
        return Chain().to(torch.bfloat16)

    _, placed = both(make, stages(world), (x,), loss_of(y), 1, bound=1e-2)
    assert placed.stats()["sent_nbytes"] > 0
    plain, placed = made(Chain), Placed(made(Chain), stages(world))
    found = []
    for each in (plain, placed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = each(x.float())
        out.float().square().mean().backward()
        found.append(out)
    assert found[0].dtype == found[1].dtype
    assert torch.equal(found[0], found[1])
    same(placed, plain, 1e-2)


def not_finite(_, world):
    """NaN and infinities arrive."""
    for options in ({}, {"forward": "int8", "backward": "int8"}):
        placed = Placed(made(lambda: Chain(width=64)), stages(world), **options)
        x = rows(32, 64)
        x[3, 5] = float("nan")
        out = placed(x)
        assert out[3].isnan().any()
        assert out[31].isfinite().all()
        out.sum().backward()
        assert all(each.grad.isnan().any() for each in placed.parameters() if each.dim() == 2)


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
    from thinwire.runtimes.gloo_transport import GlooTransport

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
        ["cannot be traced", "placed_program.py", "if x.sum() > 0"],
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


def equal_everywhere(what, world):
    everyone = [None] * world
    dist.all_gather_object(everyone, what)
    assert len(set(everyone)) == 1, everyone


@torch.no_grad()
def grown(found, wanted):
    """The relative error of this rank's gradients together."""
    error = sum(float((found[name] - wanted[name]).double().square().sum()) for name in found)
    return (error / sum(float(wanted[name].double().square().sum()) for name in found)) ** 0.5


QUICK = (
    branches, outputs, odd_parts, pipeline, first_and_last, translator, gpt, returned_loss, batch_norm,
    dropout,
    input_gradients, no_gradients, several_calls, sixteen_bits, not_finite, lossy, random_rounding, claimed,
    state, data_parallel, at_the_same_time, refusals, disagreements,
)  # fmt: skip
CHECKS = {each.__name__: each for each in (*QUICK, other_rows, own_error, dies)}
SLOW = ["other_rows", "own_error", "dies"]


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
        if name == "dies":  # the last check: no group is whole any more
            os._exit(0)
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
