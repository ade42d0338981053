"""Placed networks that compute what one device computes."""

import gc
import weakref

import torch
import torch.distributed as dist
from placed_nets import Branches, Chain, Odd, Translator, TwoOutputs, tiny_gpt
from placed_tools import (
    both,
    equal_everywhere,
    gradients,
    halves,
    loss_of,
    made,
    near,
    rows,
    same,
    stages,
    steps,
)
from start_program import digest, raises
from torch import nn

from thinwire.errors import InputError
from thinwire.parallel import Placed, placed_run
from thinwire.parallel.placed_post import Post
from thinwire.parallel.placed_walk import Walker


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


def in_one_order(_, world):
    """As over NCCL, and stricter: every message holds up both of its ends until it has arrived."""

    class InTurn(Post):
        def send(self, *args, **options):
            super().send(*args, **options)
            self.settle()

        def receive(self, *args, **options):
            arrival = super().receive(*args, **options)
            arrival.wait()
            return arrival

    def walker(*args):
        args[3].__class__ = InTurn
        return Walker(*args[:5], False, *args[6:])

    placed_run.Walker = walker
    try:
        branches(_, world)
        first_and_last(_, world)
        both(Chain, stages(world), (rows(8, 16),), loss_of(rows(8, 16, seed=2)), micro_batches=4)
        input_gradients(_, world)
    finally:
        placed_run.Walker = Walker


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
