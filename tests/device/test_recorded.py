"""Steps replayed from a CUDA graph: the bits of steps that were run one by one."""

import pytest
import torch
from torch import nn

from thinwire import simulate
from thinwire.errors import InputError
from thinwire.policy import Policy, Rule
from thinwire.simulate import recipes
from thinwire.simulate.layers import simulated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CHAIN = "accumulate/sequential"
MIXED = Policy("mixed", (Rule("fp32", last_step=7), Rule("aps/e5m2", CHAIN)))


def network(kind):
    torch.manual_seed(0)
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def trained(kind, recorded, recipe="fp32", halves=False, **settings):
    net, loss = network(kind), nn.functional.cross_entropy
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(512, 1, 8, 8, generator=draw), torch.randint(10, (512,), generator=draw)
    optimizer = None
    if recipe != "fp32":
        simulate.convert(net, recipe, tell=None)
        loss = simulated(nn.CrossEntropyLoss(), recipes.get(recipe).stages, name="loss")
        keep = recipes.get(recipe).optimizer
        update = "kahan" if recipe == "bf16" else "round"
        optimizer = lambda each: simulate.SGD(each, 0.1, 0.5, keep=keep, update=update)  # noqa: E731
    plan = simulate.Plan(24, 8, 0.1, decay=(lambda done: 0.5 ** (done // 0.5)) if halves else lambda d: 1 - d)
    done = simulate.train(
        net, data, plan=plan, loss=loss, optimizer=optimizer, recorded=recorded, device="cuda", **settings
    )
    return done, torch.cat([each.detach().flatten() for each in net.parameters()])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mlp", {}),
        ("cnn", {"nodes": 4, "together": 4}),
        ("cnn", {"nodes": 16, "together": 16, "codec": "aps/e4m3", "schedule": CHAIN}),
        ("cnn", {"nodes": 16, "together": 4, "codec": "aps/e4m3", "schedule": "accumulate/4"}),
        ("cnn", {"nodes": 4, "codec": "aps/e4m3", "schedule": "accumulate/tree"}),
        ("cnn", {"nodes": 4, "codec": "e4m3~offset0", "schedule": f"{CHAIN}+kahan", "loss_scale": 0.25}),
        ("cnn", {"nodes": 4, "codec": "e4m3~offset0", "schedule": CHAIN, "loss_scale": "dynamic"}),
        ("cnn", {"nodes": 4, "codec": MIXED, "together": 4}),
        ("mlp", {"codec": "tree8", "pure": "activations"}),
        ("mlp", {"codec": "linear8", "pure": "gradients"}),
        ("cnn", {"recipe": "positnn/F8B8G8O12L12+quire", "halves": True}),
        ("cnn", {"recipe": "positnn/9", "halves": True}),
        ("cnn", {"recipe": "gupta/4.12+exact", "halves": True}),
        ("cnn", {"recipe": "bf16"}),
        ("cnn", {"recipe": "mogami"}),
    ],
    ids=str,
)
def test_a_replayed_run_has_the_bits_of_a_run(kind, settings):
    torch.backends.cudnn.deterministic = True
    (one, weights), (other, replayed) = (trained(kind, each, **settings) for each in (False, True))
    assert torch.equal(weights, replayed)
    assert one == other


def test_what_rounds_at_random_cannot_be_recorded():
    with pytest.raises(InputError, match="rounds at random"):
        trained("mlp", True, recipe="gupta/4.12~sr+exact")
    with pytest.raises(InputError, match="rounds at random"):
        trained("mlp", True, nodes=2, codec="qsgd4")


@pytest.mark.parametrize("name", ["posit8_2", "posit5_2", "fixed4.12", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(40, 30, 50), (3, 5000, 7)])
def test_exact_sums_of_a_known_format_need_no_look(name, shape):
    rows, steps, columns = shape
    format = simulate.Precision.of(name).format
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, steps, generator=draw), torch.randn(steps, columns, generator=draw)
    a[0, 3], b[5, 1] = 1e9, float("nan") if "fixed" not in name else 1e9
    a, b = format.round(a * torch.randn(rows, 1, generator=draw).exp2()).cuda(), format.round(b).cuda()
    for how in (simulate.Arithmetic(order="exact"), simulate.Arithmetic(sum=format, order="exact")):
        looked, known = (simulate.matmul(a, b, how, within=each) for each in (None, (format, format)))
        assert torch.equal(looked.view(torch.int32), known.view(torch.int32))


def test_a_precision_that_changes_is_recorded_anew():
    def changed(recorded):
        net = simulate.convert(network("cnn"), "e4m3", tell=None)
        draw = torch.Generator().manual_seed(1)
        data = torch.randn(512, 1, 8, 8, generator=draw), torch.randint(10, (512,), generator=draw)

        def each(step, net):
            if step == 9:
                simulate.convert(net, "e5m2", tell=None)

        simulate.train(net, data, steps=20, batch=8, recorded=recorded, device="cuda", each_step=each)
        return torch.cat([each.detach().flatten() for each in net.parameters()])

    torch.backends.cudnn.deterministic = True
    assert torch.equal(changed(False), changed(True))


def test_a_step_that_must_look_says_so_and_leaves_the_stream():
    here = torch.cuda.current_stream()
    with pytest.raises(InputError, match="cannot be recorded: exact sums must first scan operands"):
        trained("cnn", True, recipe="positnn/16+quire")
    assert torch.cuda.current_stream() == here
    assert torch.ones(3, device="cuda").sum().item() == 3
