"""Checks of the all-to-all of experts, and of the gradients of functional collectives."""

import torch
import torch.distributed as dist
from start_program import raises
from torch import nn

import thinwire
from thinwire import codecs, functional, parallel
from thinwire.errors import CodecError, Disagreement, InputError

HIDDEN = 72  # no multiple of a block
ULPS = 2.0**-20


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def splits(rank, world, step=0):
    """Rows that a rank sends to every rank: uneven ones, some none; the last rank receives nothing."""
    return [0 if to == world - 1 else (3 * rank + 5 * to + step) % 7 for to in range(world)]


def routed(rank, world, step=0):
    """This rank's rows for the other ranks, and how many come from each."""
    mine = splits(rank, world, step)
    return mine, [splits(other, world, step)[rank] for other in range(world)]


def away(found, expected):
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


def rows_of(other, world, step=0, dtype=torch.float32):
    return random(sum(splits(other, world, step)), HIDDEN, seed=10 * step + other, dtype=dtype)


def arrived(rank, world, step=0, dtype=torch.float32):
    """The rows for this rank, taken from those of all ranks, which every rank knows here."""
    parts = [
        rows_of(other, world, step, dtype).split(splits(other, world, step))[rank] for other in range(world)
    ]
    return torch.cat(parts)


def rows_arrive_as_their_codec_rounds_them(rank, world):
    """Uneven splits, rows that are no multiple of a block, every dtype; each row as if it travelled alone."""
    for step, spec in enumerate(("int8/256", "int4/32", "e4m3fn/128", "mxfp4", "topk/0.1", "fp32", None)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            mine, coming = routed(rank, world, step)
            rows = rows_of(rank, world, step, dtype)
            found = parallel.all_to_all(rows, coming, mine, spec)
            exact = arrived(rank, world, step, dtype)
            assert found.dtype == dtype
            assert found.shape == exact.shape
            if spec in ("fp32", None):
                assert torch.equal(found, exact)
                continue
            codec = codecs.get(spec)
            alone = [codec.decode(codec.encode(row), HIDDEN) for row in exact]
            if alone:
                assert torch.equal(found, torch.stack(alone).to(dtype)), spec
                assert not torch.equal(found, exact)


def gradients_take_the_way_back(rank, world):
    """Against one process that holds all rows: exact in float32, and within the codec's error else."""
    everyone = [rows_of(other, world).requires_grad_() for other in range(world)]
    results = [
        torch.cat([everyone[other].split(splits(other, world))[to] for other in range(world)])
        for to in range(world)
    ]
    weights = [random(HIDDEN, HIDDEN, seed=100 + to) / HIDDEN**0.5 for to in range(world)]
    sum((torch.tanh(each @ w).square().sum() for each, w in zip(results, weights, strict=True))).backward()
    mine, coming = routed(rank, world)
    for there, back, bound in (
        ("fp32", "same", ULPS),
        (None, None, ULPS),
        ("int8", "same", 0.05),
        ("fp32", "int8", 0.01),
    ):
        rows = rows_of(rank, world).requires_grad_()
        result = parallel.all_to_all(rows, coming, mine, there, backward=back)
        torch.tanh(result @ weights[rank]).square().sum().backward()
        assert rows.grad.shape == rows.shape
        if len(rows):
            error = away([rows.grad], [everyone[rank].grad])
            assert error < bound, (there, back, error)
            assert bound == ULPS or error > 1e-4
    again = rows_of(rank, world).requires_grad_()
    parallel.all_to_all(again, coming, mine, "int8", backward=None).sum().backward()
    assert torch.equal(again.grad, torch.ones_like(again)), "the way back is exact"


def experts(rank, world):
    """A mixture of experts, one per rank: there and back again, as in one process, with its gradients."""
    tokens = random(16 * world, HIDDEN)
    chosen = torch.randint(0, world, (16 * world,), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(world)]
    whole = tokens.clone().requires_grad_()
    alone = torch.zeros_like(whole)
    for expert, layer in enumerate(layers):
        at = (chosen == expert).nonzero().flatten()
        alone = alone.index_add(0, at, torch.tanh(layer(whole[at])))
    (alone * random(*alone.shape, seed=6)).sum().backward()
    expected = [alone.detach(), whole.grad, layers[rank].weight.grad]
    for spec, bound in (("fp32", 64 * ULPS), ("int8", 0.03), ("int4", 0.5)):
        layers[rank].zero_grad()
        part = slice(16 * rank, 16 * rank + 16)
        x = tokens[part].clone().requires_grad_()
        order = chosen[part].argsort(stable=True)
        mine = torch.bincount(chosen[part], minlength=world)
        counts = torch.empty_like(mine)
        dist.all_to_all_single(counts, mine)
        there = parallel.all_to_all(x[order], counts.tolist(), mine.tolist(), spec)
        done = torch.tanh(layers[rank](there))
        back = parallel.all_to_all(done, mine.tolist(), counts.tolist(), spec)
        y = torch.zeros_like(x).index_add(0, order, back)
        (y * random(*alone.shape, seed=6)[part]).sum().backward()
        found = [y, x.grad, layers[rank].weight.grad]
        error = away(found, [expected[0][part], expected[1][part], expected[2]])
        assert error < bound, (spec, error)
        assert spec == "fp32" or error > bound / 30


def rows_are_compared(rank, world):
    """Splits that do not fit, and what is no list of rows, are named before anything is sent."""
    x = random(2 * world, 8)
    even = [2] * world
    said = raises(
        Disagreement,
        ["all_to_all", "has room for"],
        parallel.all_to_all,
        x,
        [2 + (rank == 0), *even[1:]],
        even,
        "int8",
    )
    assert "elements to rank 0" in said
    raises(
        InputError,
        f"{world} numbers of rows that add up to {2 * world}",
        parallel.all_to_all,
        x,
        even,
        [1] * world,
        "int8",
    )
    raises(InputError, "output_splits", parallel.all_to_all, x, [2] * (world + 1), even, "int8")
    raises(InputError, "output_splits", parallel.all_to_all, x, [-2] * world, even, "int8")
    raises(InputError, "share 1 rows evenly", parallel.all_to_all, x[:1], None, None, "int8")
    raises(InputError, "[n, hidden]", parallel.all_to_all, x[0], None, None, "int8")
    raises(CodecError, "other samples", parallel.all_to_all, x, None, None, "int4/128+ef")
    raises(CodecError, "agree", parallel.all_to_all, x, None, None, "aps/e5m2")
    wide = random(2 * world, 20 + (rank == 0))
    raises(Disagreement, ["rows of 20", "rows of 21"], parallel.all_to_all, wide, None, None, "int8")
    return [parallel.all_to_all(torch.ones(world, 4), None, None, "int8")]


def random_rows(rank, world):
    """Every call draws its own numbers, and the mean of many is right."""
    x, total = random(2 * world, HIDDEN, seed=rank), 0
    calls = [parallel.all_to_all(x, None, None, "qsgd4/512") for _ in range(64)]
    total = torch.stack(calls)
    exact = parallel.all_to_all(x, None, None, None)
    assert not torch.equal(calls[0], calls[1])
    assert away([total.mean(0)], [exact]) < away([calls[0]], [exact]) / 4


def compiled_rows(rank, world):
    """In a graph of their own, and with the bits of a call outside."""
    mine, coming = routed(rank, world)

    def layer(x):
        y = parallel.all_to_all(x * 2, coming, mine, "int8")
        return parallel.all_to_all(torch.tanh(y), mine, coming, "int8") + x

    x = rows_of(rank, world)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = x.clone().requires_grad_()
        out = function(y)
        out.square().sum().backward()
        results += [out.detach(), y.grad]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def functional_gradients(rank, world):
    """Those of the sum of all ranks' losses, as one process computes them."""
    shape = (2 * world, 6)
    inputs = [random(*shape, seed=other).requires_grad_() for other in range(world)]
    weights = [random(world, *shape, seed=50 + other) for other in range(world)]
    whole = {
        "all_gather": (lambda _: torch.stack(inputs), lambda x, **o: functional.all_gather(x, **o)),
        "all_reduce": (lambda _: sum(inputs), lambda x, **o: functional.all_reduce(x, **o)),
        "mean": (lambda _: sum(inputs) / world, lambda x, **o: functional.all_reduce(x, op="avg", **o)),
        "reduce_scatter": (
            lambda to: sum(inputs).chunk(world)[to], lambda x, **o: functional.reduce_scatter(x, **o),
        ),
        "mean_scatter": (
            lambda to: sum(inputs).chunk(world)[to] / world,
            lambda x, **o: functional.reduce_scatter(list(x.chunk(world)), op="avg", **o),
        ),
    }  # fmt: skip
    for name, (alone, call) in whole.items():
        loss = sum(
            (torch.sin(alone(to)) * weights[to].flatten()[: alone(to).numel()].view_as(alone(to))).sum()
            for to in range(world)
        )
        expected = torch.autograd.grad(loss, inputs)[rank]
        for spec, back, bound in (
            ("fp32", "same", ULPS),
            ("fp32", "int8", 0.03),
            ("fp32", None, ULPS),
            ("int8", "int8", 0.1),
        ):
            x = inputs[rank].detach().clone().requires_grad_()
            y = call(x, codec=spec, backward=back)
            (torch.sin(y) * weights[rank].flatten()[: y.numel()].view_as(y)).sum().backward()
            error = away([x.grad], [expected])
            assert error < bound, (name, spec, back, error)
            assert bound == ULPS or error > 1e-4, (name, spec, back, error)


def functional_without_gradients(rank, world):
    """As before: no graph where none is wanted, and none through error feedback."""
    x = random(2 * world, 6, seed=rank)
    channel = thinwire.Channel("int4/128+ef")
    found = [functional.all_gather(x, "int8"), functional.all_reduce(x, channel, name="a")]
    assert not any(each.requires_grad for each in found)
    x.requires_grad_()
    with torch.no_grad():
        found.append(functional.all_gather(x, "int8"))
        assert torch.equal(found[0], found[2])
        found.append(functional.all_reduce(x, channel, name="a"))
    said = raises(
        CodecError,
        ["keeps residuals", "x.detach()", "'int4/128'"],
        functional.all_reduce,
        x,
        channel,
        name="a",
    )
    assert "int4/128+ef" in said
    raises(CodecError, "keeps residuals", functional.all_gather, x, "int8", backward="int4/128+ef")
    assert functional.all_gather(x, "int8").requires_grad
    assert not functional.broadcast(x, 0, "int8").requires_grad
    return found


CHECKS = (
    rows_arrive_as_their_codec_rounds_them, gradients_take_the_way_back, experts, rows_are_compared,
    random_rows, functional_gradients, functional_without_gradients,
)  # fmt: skip
