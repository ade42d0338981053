"""The simulator on a GPU: the bits of the CPU wherever an arithmetic is named."""

import pytest
import torch
from torch import nn

from thinwire import Stream, simulate
from thinwire.runtimes import local
from thinwire.simulate import Arithmetic, Counters, Nodes, Precision, Stages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STAGES = {
    "e4m3": Stages("e4m3", "e5m2", "e5m2", arithmetic=Arithmetic("e5m2", "e5m10")),
    "kahan": Stages.uniform("bfloat16", Arithmetic(sum="bfloat16", order="kahan")),
    "quire": Stages.uniform("posit8_2", Arithmetic(sum="posit8_2", order="exact")),
    "fused": Stages("posit8_2", arithmetic=Arithmetic(sum="posit8_2", order="exact"), fused=True),
    "posit": Stages.uniform("posit8_2", Arithmetic("posit8_2", "posit8_2")),
    "random": Stages.uniform(
        "fixed4.12~sr", Arithmetic(sum="fixed4.12", order="exact", rounding="stochastic")
    ),
    "mogami": Stages(arithmetic=Arithmetic(multiply="mogami")),
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind):
    torch.manual_seed(0)
    return {"linear": lambda: nn.Linear(40, 30), "conv": lambda: nn.Conv2d(3, 8, 3, 2, 1)}[kind]()


def ran(kind, stages, device):
    made = simulate.convert(layer(kind), stages, seed=3, tell=None).to(device)
    x = (randn(16, 40) if kind == "linear" else randn(4, 3, 9, 9)).to(device).requires_grad_()
    y = made(x)
    y.backward(randn(*y.shape, seed=1).to(device))
    return [each.detach().cpu() for each in (y, x.grad, made.weight.grad, made.bias.grad)]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_layers_have_the_same_bits(kind, name):
    for one, other in zip(ran(kind, STAGES[name], "cpu"), ran(kind, STAGES[name], "cuda"), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("spec", ["int8~fit", "int8~fit~sr", "posit8_1~zero~centre", "e5m2~sr"])
def test_precisions_have_the_same_bits(spec):
    precision, x = Precision.of(spec), randn(4097) * 3e-3
    rng = simulate.precision.Stream(1) if precision.needs_rng else None
    assert torch.equal(precision.round(x, rng), precision.round(x.cuda(), rng).cpu())


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [
        ("aps/e4m3", "accumulate/sequential"),
        ("aps/e4m3", "accumulate/16"),
        ("aps/e5m2", "accumulate/tree"),
        ("aps/e5m2", "accumulate/ring"),
        ("aps/e3m0", "accumulate/sequential+kahan"),
        ("e4m3~offset0", "accumulate/sequential"),
        ("int8/256", "one_shot"),
        ("int8/256", "two_shot"),
        ("qsgd4/512", "one_shot"),
        ("fp32", "one_shot"),
    ],
)
def test_reductions_have_the_same_bits(spec, schedule):
    rows = [randn(40, 50, 30), randn(40, 7, seed=1)]
    sums = []
    for device in ("cpu", "cuda"):
        mine = [each.clone().to(device) for each in rows]
        means = local.all_reduce_rows(mine, spec, "avg", schedule, names=["a", "b"], rng=Stream(1))
        sums.append([each.cpu() for each in means])
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))


@pytest.mark.parametrize(
    ("keep", "update"), [("bfloat16", "round"), ("bfloat16~sr", "round"), ("bfloat16", "kahan")]
)
def test_updates_have_the_same_bits_and_counts(keep, update):
    results = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(randn(1000).to(device))
        counters = Counters()
        optimizer = simulate.SGD([weight], 1e-3, 0.9, keep=keep, update=update, seed=5, counters=counters)
        for step in range(5):
            weight.grad = randn(1000, seed=step).to(device)
            optimizer.step()
        results.append((weight.detach().cpu(), counters.read()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("together", [1, 16])
def test_many_nodes_train(together):
    x = randn(512, 1, 8, 8)
    y = x.flatten(1)[:, :4].argmax(1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    options = {"nodes": 16, "codec": "aps/e4m3", "schedule": "accumulate/4", "steps": 60, "batch": 8}
    done = simulate.train(net, (x, y), device="cuda", together=together, **options)
    assert done.accuracy > 0.8
    assert next(net.parameters()).is_cuda


def test_memory_is_that_of_the_rows_and_wires():
    net = nn.Linear(1000, 1000, bias=False).cuda()
    nodes = Nodes(net, 64, "aps/e4m3", "accumulate/16")
    x = torch.randn(64, 1000, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nodes.backward(lambda net, x: net(x).square().mean(), x)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 64 * 1_000_000 * (4 + 1 + 4 + 1)  # gradients, wires, decoded numbers and a little
