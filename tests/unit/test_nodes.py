"""Many nodes on one device: the bits of a network's schedules, whatever the route, and no more memory."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import Channel, InputError, Stream, codecs, policy
from thinwire.codecs import CODECS, Block
from thinwire.formats import FORMATS, Table
from thinwire.policy import Policy, Rule
from thinwire.runtimes import arguments, local, plan
from thinwire.schedules import SCHEDULES, get
from thinwire.schedules.choose import choose
from thinwire.simulate import Nodes, convert

WORLD = 6


def serves(schedule, spec, shape):
    """Whether a schedule takes a tensor of this shape."""
    return not get(schedule).refuses(arguments.laid_out(codecs.get(spec), shape)[0])


SPECS = (
    "bf16", "int8/256", "aps/e4m3", "aps/e3m0", "e4m3~offset0", "tree8", "qsgd4/512", "int4/128~sr",
    "onebit/64+ef", "onebit/column+ef", "topk/0.1+ef", "onebit/column", "dct/64:8", "dct/16:4+ef",
)  # fmt: skip
ROUTES = [
    (spec, schedule)
    for spec in SPECS
    for schedule in (
        "auto",
        "one_shot",
        "two_shot",
        "ring",
        "accumulate/4",
        "accumulate/tree",
        "hierarchical/2",
    )
    if schedule == "auto" or serves(schedule, spec, (40, 30))
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))


def batch(size=4 * WORLD, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 30, generator=generator)
    return x, x[:, :5].argmax(1)


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def gradients(model, x, y):
    return torch.autograd.grad(loss(model, x, y), list(model.parameters()))


@pytest.mark.parametrize(("spec", "schedule"), ROUTES)
def test_gradients_are_those_that_ranks_would_have(spec, schedule):
    """Two steps, so that residuals are sent."""
    model = net()
    nodes = Nodes(model, WORLD, spec, schedule, seed=5)
    names = [name for name, _ in model.named_parameters()]
    channels = [Channel(spec) for _ in range(WORLD)]
    for step in (1, 2):
        x, y = batch(seed=step)
        nodes.backward(loss, x, y)
        each = [gradients(model, *part) for part in zip(x.chunk(WORLD), y.chunk(WORLD), strict=True)]
        for place, (name, parameter) in enumerate(zip(names, model.parameters(), strict=True)):
            ranks = [rank[place].clone() for rank in each]
            how = choose(Channel(spec).codec, parameter.numel(), WORLD)[0] if schedule == "auto" else schedule
            local.all_reduce(ranks, channels, "avg", how, name=name, rng=Stream(5, step=step))
            assert all(torch.equal(rank, ranks[0]) for rank in ranks)
            assert torch.equal(parameter.grad, ranks[0]), name


@pytest.mark.parametrize("spec", ["aps/e4m3", "fp8lm", "qsgd8~shared", "e4m3~offset0"])
@pytest.mark.parametrize("odd", [0.0, 1e-42, 3e38, float("inf"), float("nan")])
def test_odd_numbers_of_one_node_are_seen_by_all(spec, odd):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(WORLD, 40, generator=generator), torch.zeros(WORLD, 7), torch.randn(WORLD, 3)]
    rows[0][2] *= 0
    rows[0][2, 5] = rows[1][1, 0] = odd
    expected = []
    for place, each in enumerate(rows):
        ranks = list(each.clone())
        local.all_reduce(ranks, spec, "avg", "one_shot", name=str(place), rng=Stream(1))
        expected.append(ranks[0])
    means = local.all_reduce_rows(rows, spec, "avg", "one_shot", names=["0", "1", "2"], rng=Stream(1))
    for one, other in zip(expected, means, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


SERVED = [spec for spec, codec in CODECS.items() if not SCHEDULES["two_shot"].refuses(codec)]


@pytest.mark.parametrize(
    "spec",
    [
        *SERVED, "aps/e4m3", "fp8lm", "e4m3~offset0", "int8/tensor", "int8/64+ef", "qsgd4",
        "int8/tensor~shared", "int8/256~shared", "int8/tensor~shared~world",
    ],
)  # fmt: skip
def test_shards_of_all_nodes_at_once_have_the_bits_of_two_shot(spec, monkeypatch):
    """Whole tensors and cut ones, shards that are short or empty, numbers that are not finite."""
    monkeypatch.setattr(plan, "PIECE", 1500)
    generator = torch.Generator().manual_seed(0)
    for world, numel, dtype in ((2, 5000, torch.float32), (5, 3333, torch.bfloat16), (7, 3, torch.float32)):
        rows = torch.randn(world, numel, generator=generator).to(dtype)
        rows[1, :2] = torch.tensor([3e38, -0.0])
        if numel > 4000:
            rows[0, 4000], rows[1, 4500] = float("nan"), float("inf")
        ranks = list(rows.clone())
        channels = [Channel(spec) for _ in range(2 * world)]
        feedback = codecs.get(spec).feedback
        mine, theirs = (channels[:world], channels[world:]) if feedback else (spec, spec)
        local.all_reduce(ranks, mine, "avg", "two_shot", name="w", rng=Stream(1))
        (mean,) = local.all_reduce_rows([rows], theirs, "avg", "two_shot", names=["w"], rng=Stream(1))
        assert all(torch.equal(ranks[0].nan_to_num(7.0), each.nan_to_num(7.0)) for each in ranks)
        assert torch.equal(ranks[0].nan_to_num(7.0), mean.nan_to_num(7.0))
        assert torch.equal(ranks[0].signbit(), mean.signbit())


SHAPED = [
    (spec, schedule)
    for spec in (
        "dct/64:8",
        "onebit/column",
        "onebit/column~mean",
        "nvfp4",
        "int8/256",
        "qsgd8/64~shared",
        "fp32",
    )
    for schedule in ("auto", "one_shot", "two_shot", "ring", "tree")
    if schedule == "auto" or serves(schedule, spec, (24, 40))
]
SHAPED += [(codec.with_feedback("").spec, "auto") for codec in CODECS.values()]


@pytest.mark.parametrize("piece", [1 << 20, 512])
@pytest.mark.parametrize(("spec", "schedule"), SHAPED)
def test_rows_of_any_shape_have_the_bits_of_all_reduce(spec, schedule, piece, monkeypatch):
    """Codecs that see a matrix in a tensor, and tensors that travel in pieces."""
    monkeypatch.setattr(plan, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (70,), (6, 5, 4, 3), (1, 30), (2500,), (0, 3)]
    if schedule != "auto":
        shapes = [each for each in shapes if serves(schedule, spec, each)]
    for dtype in (torch.float32, torch.bfloat16):
        rows = [torch.randn(WORLD, *shape, generator=generator).to(dtype) for shape in shapes]
        names = [f"w{i}" for i in range(len(rows))]
        expected = []
        for each, name in zip(rows, names, strict=True):
            ranks = list(each.clone())
            local.all_reduce(ranks, spec, "avg", schedule, name=name, rng=Stream(1))
            expected.append(ranks[0])
        apart = [
            local.all_reduce_rows([each.clone()], spec, "avg", schedule, names=[name], rng=Stream(1))[0]
            for each, name in zip(rows, names, strict=True)
        ]
        together = local.all_reduce_rows(rows, spec, "avg", schedule, names=names, rng=Stream(1))
        for one, other, third in zip(expected, apart, together, strict=True):
            assert torch.equal(one, other), one.shape
            assert torch.equal(one, third), one.shape
            assert other.is_contiguous()


def test_small_and_large_tensors_travel_together_each_on_the_schedule_that_auto_chooses_for_it():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(WORLD, numel, generator=generator) for numel in (70, 60_000)]
    expected = []
    for each in rows:
        ranks = list(each.clone())
        local.all_reduce(ranks, "int8/256", "avg")
        expected.append(ranks[0])
    means = local.all_reduce_rows(rows, "int8/256", "avg", names=["small", "large"])
    for one, other in zip(expected, means, strict=True):
        assert torch.equal(one, other)


def test_float32_is_the_sum_in_the_order_of_nodes():
    model = net()
    Nodes(model, WORLD).backward(loss, *batch())
    x, y = batch()
    each = [gradients(model, *part) for part in zip(x.chunk(WORLD), y.chunk(WORLD), strict=True)]
    for place, parameter in enumerate(model.parameters()):
        total = each[0][place].clone()
        for rank in each[1:]:
            total += rank[place]
        assert torch.equal(parameter.grad, total * (1 / WORLD))


def test_a_loop_of_your_own_gives_the_same():
    one, two = net(), net()
    Nodes(one, WORLD, "aps/e4m3", "accumulate/2").backward(loss, *batch())
    nodes = Nodes(two, WORLD, "aps/e4m3", "accumulate/2")
    x, y = batch()
    for part in zip(x.chunk(WORLD), y.chunk(WORLD), strict=True):
        loss(two, *part).backward()
        nodes.take()
    nodes.reduce()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("together", [2, 4, WORLD])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_nodes_that_are_computed_together_give_nearly_the_same(together, wire):
    one, two = net(), net()
    schedule = "auto" if wire == "fp32" else "accumulate/sequential"
    first = Nodes(one, WORLD, wire, schedule).backward(loss, *batch())
    second = Nodes(two, WORLD, wire, schedule).backward(loss, *batch(), together=together)
    torch.testing.assert_close(first, second)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-3)


def test_a_scale_is_in_the_gradients():
    one, two = net(), net()
    plain = Nodes(one, 2).backward(loss, *batch())
    scaled = Nodes(two, 2).backward(loss, *batch(), scale=1024.0)
    assert torch.equal(plain, scaled)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a.grad * 1024, b.grad)


def test_running_statistics_are_those_of_the_first_node():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 5))
    alone = nn.BatchNorm1d(30)
    x, y = batch()
    Nodes(model, WORLD).backward(loss, x, y)
    alone(x[:4])
    assert torch.equal(model[0].running_mean, alone.running_mean)
    assert model[0].num_batches_tracked == 1
    with pytest.raises(InputError, match="use together=1"):
        Nodes(model, WORLD).backward(loss, x, y, together=2)


def test_policies_route_tensors_by_name_and_step():
    model = net()
    rules = (Rule("fp32", name="2.*"), Rule("bf16", "one_shot", last_step=0), Rule("int8/256", "one_shot"))
    nodes = Nodes(model, WORLD, Policy("mine", rules))
    assert nodes.routes["2.weight"] == ("fp32", "native")
    assert nodes.routes["0.weight"] == ("bf16", "one_shot")
    nodes.backward(loss, *batch())
    assert nodes.routes["0.weight"] == ("int8/256", "one_shot")
    nodes.backward(loss, *batch())
    assert nodes.step == 2


def test_bytes_are_those_a_rank_would_send():
    model = net()
    numels = [each.numel() for each in model.parameters()]
    codec = Channel("int8/256").codec
    expected = (WORLD - 1) * sum(codec.nbytes(numel) for numel in numels)
    assert Nodes(model, WORLD, "int8/256", "one_shot").sent_nbytes == expected


def test_a_state_goes_on_where_it_was_taken():
    one, two = net(), net()
    first, second = (Nodes(each, WORLD, "onebit/64+ef") for each in (one, two))
    first.backward(loss, *batch(seed=1))
    second.load_state_dict(first.state_dict())
    for nodes in (first, second):
        nodes.backward(loss, *batch(seed=2))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with pytest.raises(InputError, match="the state is of 6 nodes, this Nodes has 2"):
        Nodes(one, 2, "onebit/64+ef").load_state_dict(first.state_dict())


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at a time."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key, nbytes):
        self.seen.discard(key)
        self.now -= nbytes


def peak(world, spec, schedule):
    model = nn.Linear(200, 200)
    x = torch.randn(world, 200)
    nodes = Nodes(model, world, spec, schedule)
    with Peak() as mode:
        nodes.backward(lambda net, x: net(x).square().mean(), x)
    return mode.most


@pytest.mark.parametrize(
    ("spec", "schedule", "growth"),
    [
        ("fp32", "auto", 1.2),
        ("aps/e4m3", "accumulate/sequential", 2.2),
        ("int8/256", "one_shot", 2.2),
        ("qsgd4/512", "one_shot", 2.2),
        ("int8/256", "two_shot", 2.2),
    ],
)
def test_memory_grows_as_the_schedule_needs(spec, schedule, growth):
    """Of twice as many nodes: not at all for a sum, twice for gradients and wires, never four times."""
    assert peak(32, spec, schedule) < growth * peak(16, spec, schedule)


def test_bad_calls_say_what_would_work():
    model = net()
    nodes = Nodes(model, WORLD)
    with pytest.raises(InputError, match="a batch of 7 samples cannot be shared evenly by 6 nodes"):
        nodes.backward(loss, *batch(7))
    with pytest.raises(InputError, match="0 of 6 nodes have given gradients"):
        nodes.reduce()
    loss(model, *batch()).backward()
    nodes.take()
    with pytest.raises(InputError, match=r"call reduce\(\) first"):
        nodes.backward(loss, *batch())
    with pytest.raises(InputError, match="at least one node, not 0"):
        Nodes(model, 0)
    with pytest.raises(InputError, match=r"call loss.backward\(\) before take\(\)"):
        nodes.take()
    for _ in range(WORLD - 1):
        loss(model, *batch()).backward()
        nodes.take()
    with pytest.raises(InputError, match="all 6 nodes have given"):
        nodes.take()
    with pytest.raises(InputError, match="and a number of nodes, not int and Sequential"):
        Nodes(6, model)
    x, y = batch()
    with pytest.raises(InputError, match="give the same number of each"):
        Nodes(model, WORLD).backward(loss, x, y[:WORLD])
    with pytest.raises(InputError, match="1 or more, not 0"):
        Nodes(model, WORLD).backward(loss, x, y, together=0)
    with pytest.raises(InputError, match=r"0 is simulated, .* use together=1"):
        Nodes(convert(model, "e4m3", tell=None), WORLD).backward(loss, x, y, together=2)


def test_one_node_sends_nothing():
    model = net()
    Nodes(model, 1, "onebit/64").backward(loss, *batch(4))
    for parameter, gradient in zip(model.parameters(), gradients(model, *batch(4)), strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_every_schedule_is_said_to_gather_or_not():
    gathers = {spec for spec, each in SCHEDULES.items() if each.combine}
    assert gathers == {each for each in SCHEDULES if each.startswith(("accumulate", "one_shot"))}


def test_recipes_are_policies():
    assert Nodes(net(), 4, policy.get("int8")).routes["0.bias"] == ("fp32", "two_shot")


def test_residuals_go_along_to_another_route():
    """As DDP's hook does: nothing that the first codec lost is lost for good."""
    changing = Policy("changing", (Rule("int2+ef", "one_shot", last_step=0), Rule("int8", "one_shot")))
    model, other = net(), net()
    nodes, again = Nodes(model, WORLD, changing), Nodes(other, WORLD, changing)
    nodes.backward(loss, *batch())
    residuals = {name: 0.0 for name, _ in model.named_parameters()}
    for channel in nodes.channels["int2+ef"]:
        for name in residuals:
            residuals[name] += sum(each for each in channel.residuals_of(name).values()) / WORLD
    again.load_state_dict(nodes.state_dict())
    for each in (nodes, again):
        each.backward(loss, *batch(seed=1))
    for (name, parameter), same in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)
        parts = [
            gradients(net(), *(each[4 * node : 4 * node + 4] for each in batch(seed=1)))
            for node in range(WORLD)
        ]
        place = [each for each, _ in model.named_parameters()].index(name)
        plain = sum(part[place] for part in parts) / WORLD
        assert torch.allclose(parameter.grad, plain + residuals[name].view_as(plain), atol=2e-3)
        assert (parameter.grad - plain).abs().max() > 0.01
    assert not any(channel.residuals_of(name) for channel in nodes.channels["int2+ef"] for name in residuals)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(30, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls.item())
        return self.fc(x)


def test_every_node_begins_with_the_same_buffers():
    model = Counting()
    nodes = Nodes(model, WORLD)
    for _ in range(2):
        nodes.backward(loss, *batch())
    assert model.seen == [1.0] * WORLD + [2.0] * WORLD
    assert model.calls == 2


@pytest.mark.parametrize("schedule", ["native", "two_shot"])
def test_short_gradients_are_summed_in_float32(schedule):
    model = nn.Linear(30, 5).bfloat16()
    x, y = batch()
    nodes = Nodes(model, WORLD, "fp32", schedule)
    per_node = [gradients(model, x[node::WORLD].bfloat16(), y[node::WORLD]) for node in range(WORLD)]
    for each in per_node:
        model.weight.grad, model.bias.grad = (part.clone() for part in each)
        nodes.take()
    nodes.reduce()
    rows = [part[0].clone() for part in per_node]
    local.all_reduce(rows, "fp32", "avg", schedule)
    assert torch.equal(model.weight.grad, rows[0])


def test_one_node_is_never_computed_together():
    model = convert(net(), "e5m2", tell=None)
    Nodes(model, 1).backward(loss, *batch(), together=8)
    assert model[0].weight.grad is not None


def test_policies_that_nodes_cannot_follow_are_refused():
    with pytest.raises(InputError, match="lets replicas diverge"):
        Nodes(net(), 2, policy.get("noop"))
    with pytest.raises(InputError, match="Nodes cannot run the ladder of policy 'ladder'"):
        Nodes(net(), 2, Policy("ladder", (Rule("ladder"),), policy.Ladder(("int4", "int8"))))


@pytest.mark.parametrize("together", [1, 2])
def test_an_interrupted_step_is_forgotten(together):
    """As if it had not been tried: gradients, and running statistics."""
    model = nn.Sequential(nn.Linear(2, 3), nn.GroupNorm(1, 3) if together > 1 else nn.BatchNorm1d(3))
    nodes, x = Nodes(model, 4, "int8"), torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    before = [each.clone() for each in model.buffers()]
    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return model(x).square().mean()

    with pytest.raises(KeyboardInterrupt):
        nodes.backward(loss, x, together=together)
    assert all(map(torch.equal, before, model.buffers()))
    nodes.backward(loss, x, together=together)
    after = [each.grad.clone() for each in model.parameters()]
    for each, was in zip(model.buffers(), before, strict=True):
        each.copy_(was)
    Nodes(model, 4, "int8").backward(loss, x, together=together)
    assert all(map(torch.equal, after, [each.grad for each in model.parameters()]))


def test_formats_and_codecs_of_ones_own_are_those_of_the_same_numbers_by_name():
    mine = Table(FORMATS["nf4"].numbers, label="mine")
    for given, named in ((mine, "nf4"), (Block(mine, 64, feedback="float32"), "nf4/64+ef")):
        digests = []
        for codec in (given, Policy("p", (Rule(given),)), named):
            model, x, y = net(), *batch()
            nodes = Nodes(model, WORLD, codec)
            for _ in range(2):
                nodes.backward(loss, x, y)
            again = Nodes(model, WORLD, codec)
            again.load_state_dict(nodes.state_dict())
            again.backward(loss, x, y)
            digests.append([each.grad for each in model.parameters()])
        for one, two, three in zip(*digests, strict=True):
            assert torch.equal(one, three)
            assert torch.equal(two, three)


def test_a_model_without_gradients_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for model in (nn.ReLU(), frozen):
        with pytest.raises(InputError, match="no parameter with requires_grad=True"):
            Nodes(model, 2)
