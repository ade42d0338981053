"""Outer loops in one process: arguments, fragments, a group of one, and what is refused."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire.outer
from thinwire import CommError, InputError, PolicyError
from thinwire.errors import NotFiniteError
from thinwire.outer import DiLoCo, LocalSGD, Outer, SparseLoCo, reshard
from thinwire.outer.fragment import Place, split
from thinwire.outer.joining import broadcast, gathered, packed, unpacked
from thinwire.outer.settings import settings
from thinwire.policy import Policy, Rule, TensorInfo

LR = 0.1
CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path):
    """A group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), LR, **options)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def made(*numels):
    """Places of parameters with so many elements."""
    return [Place(TensorInfo(f"w{i}", "weight", (n,)), torch.zeros(n)) for i, n in enumerate(numels)]


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("codec", ["fp32", "int8", "onebit"])
@pytest.mark.usefixtures("alone")
def test_one_rank_with_every_1_and_lr_1_is_plain_training(codec):
    """global - (global - local) has two roundings: the last bits may differ, and accumulate."""
    model, plain = network(), network()
    one, other = sgd(model), sgd(plain)
    DiLoCo(model, one, 1, codec, lr=1.0, momentum=0.0, nesterov=False)
    train(model, one, 20)
    train(plain, other, 20)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=20 * 2.0**-23)


@pytest.mark.usefixtures("alone")
def test_one_rank_of_diloco_is_torchs_optimizer_on_the_outer_gradient_bit_for_bit():
    model, twin = network(), network()
    one, other = sgd(model), sgd(twin)
    outer = DiLoCo(model, one, every=3, codec="int4")
    slow = [nn.Parameter(each) for each in weights(twin)]
    reference = torch.optim.SGD(slow, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(0, 12, 3):
        train(model, one, 3, step)
        train(twin, other, 3, step)
        for weight, local in zip(slow, twin.parameters(), strict=True):
            weight.grad = weight.detach() - local.detach()
        reference.step()
        for weight, local in zip(slow, twin.parameters(), strict=True):
            local.data.copy_(weight.detach())
        assert equal(model.parameters(), twin.parameters())
        assert equal(outer.global_weights().values(), slow)
    assert (outer.rounds, outer.step, outer.sent_nbytes) == (4, 12, 0)


@pytest.mark.usefixtures("alone")
def test_the_outer_optimizer_can_be_any_and_its_learning_rate_can_follow_a_schedule():
    model = network()
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 2, outer=lambda each: torch.optim.AdamW(each, lr=0.1))
    assert isinstance(outer.optimizer, torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.ExponentialLR(outer.optimizer, 0.5)
    train(model, optimizer, 2)
    schedule.step()
    state = outer.state_dict()
    after = weights(model)
    train(model, optimizer, 4, 2)
    wanted = outer.global_weights()
    outer.detach()
    twin = network()
    twin.load_state_dict(dict(zip(twin.state_dict(), after, strict=True)))
    again = sgd(twin)
    other = DiLoCo(twin, again, 2, outer=lambda each: torch.optim.AdamW(each, lr=0.1))
    other.load_state_dict(state)
    assert other.optimizer.param_groups[0]["lr"] == 0.05
    train(twin, again, 4, 2)
    assert equal(other.global_weights().values(), wanted.values())


@pytest.mark.usefixtures("alone")
def test_the_merge_rule_leaves_alpha_of_the_local_weights():
    model, twin = network(), network()
    one, other = sgd(model), sgd(twin)
    outer = LocalSGD(model, one, 4, delay=3, alpha=0.25)
    train(model, one, 7)
    train(twin, other, 7)
    merged = [
        0.25 * local + 0.75 * mean
        for local, mean in zip(weights(twin), outer.global_weights().values(), strict=True)
    ]
    for a, b in zip(model.parameters(), merged, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
    assert outer.stats()["fragments"][0]["in_flight"] is False
    train(model, one, 1, 7)
    assert outer.stats()["fragments"][0]["in_flight"] is True


@pytest.mark.parametrize(
    ("numels", "count"), [((5, 5, 5, 5), 2), ((100, 1, 1, 1), 3), ((1, 1, 1, 100), 3), ((7,), 1)]
)
def test_fragments_are_the_model_in_order_and_none_is_empty(numels, count):
    places = made(*numels)
    parts = list(split(places, count))
    assert [place for part in parts for place in part] == places
    assert len(parts) == count
    assert all(parts)


def test_fragments_have_about_equal_elements():
    places = [
        Place(TensorInfo(f"w{i}", "weight", (n,)), torch.zeros(n)) for i, n in enumerate([10, 20, 30, 40, 20])
    ]
    assert [[place.local.numel() for place in part] for part in split(places, 3)] == [
        [10, 20],
        [30],
        [40, 20],
    ]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"every": 0}, InputError, "every must be a whole number from 1 on, not 0"),
        ({"every": 2.5}, InputError, "not 2.5"),
        ({"every": 4, "fragments": 5}, InputError, r"fragments must be a whole number from 1 to 4 \(every\)"),
        ({"every": 4, "delay": 4}, InputError, "delay must be a whole number from 0 to 3"),
        ({"alpha": 1}, InputError, "alpha must be from 0 to below 1"),
        ({"buffers": "sum"}, InputError, "'mean' or 'local'"),
        ({"on_nan": "ignore"}, InputError, "'raise' or 'skip'"),
        ({"fragmets": 2}, InputError, "no option fragmets; there are: fragments, delay"),
        ({"codec": "auto"}, PolicyError, "gradients of every step"),
        ({"codec": "noop"}, PolicyError, "gradients of every step"),
        ({"codec": "ladder"}, PolicyError, "no ladder"),
        ({"codec": "itn8"}, PolicyError, "did you mean 'int8'"),
        ({"seed": -1}, InputError, "seed"),
    ],
)
def test_wrong_options_are_refused(options, kind, said):
    model = network()
    with pytest.raises(kind, match=said):
        DiLoCo(model, sgd(model), **options)


def test_sparse_loco_needs_residuals_that_can_decay():
    model = network()
    with pytest.raises(PolicyError, match=r"error feedback.*\+ef"):
        SparseLoCo(model, sgd(model), codec="topk/0.02")
    with pytest.raises(PolicyError, match=r"multiplies residuals by 0.95.*use \+ef"):
        SparseLoCo(model, sgd(model), codec="int4+ef:bf16")
    with pytest.raises(InputError, match="decay must be from 0 to 1"):
        SparseLoCo(model, sgd(model), decay=1.5)


def test_what_must_be_equal_on_all_ranks_is_in_the_text():
    def text(**options):
        chosen = settings("DiLoCo", options.pop("every", 9), options.pop("codec", "int8"), make, options)
        return chosen.text(chosen.make_optimizer([nn.Parameter(torch.zeros(1))]))

    def make(parameters):
        return torch.optim.SGD(parameters, 0.7, momentum=0.9)

    def other(parameters):
        return torch.optim.SGD(parameters, 0.7, momentum=0.8)

    policy = Policy("int8", (Rule("int8/128"),))
    changed = [
        {"every": 8}, {"codec": "int4"}, {"codec": policy}, {"fragments": 2}, {"delay": 1}, {"alpha": 0.1},
        {"buffers": "local"}, {"on_nan": "skip"}, {"seed": 1}, {"outer": other},
    ]  # fmt: skip
    assert len({text(**each) for each in [{}, *changed]}) == len(changed) + 1
    assert text() == text()


def test_without_a_group_an_error_says_what_to_call():
    model = network()
    with pytest.raises(CommError, match="init_process_group"):
        DiLoCo(model, sgd(model))


@pytest.mark.usefixtures("alone")
def test_models_that_do_not_fit_are_refused():
    model = network().double()
    with pytest.raises(InputError, match=r"0\.weight is float64"):
        DiLoCo(model, sgd(model))
    with torch.device("meta"):
        model = network()
    with pytest.raises(InputError, match=r"0\.weight is on the meta device"):
        DiLoCo(model, sgd(model))
    model = network().requires_grad_(False)
    with pytest.raises(InputError, match="0 trained parameters"):
        DiLoCo(model, sgd(model))
    model = network()
    with pytest.raises(InputError, match="6 trained parameters, too few for 7 fragments"):
        DiLoCo(model, sgd(model), fragments=7)
    with pytest.raises(InputError, match="6 tensors that are not parameters"):
        DiLoCo(model, sgd(network()))


@pytest.mark.usefixtures("alone")
def test_a_refused_loop_leaves_no_hook_and_a_detached_one_stops():
    model = network()
    optimizer = sgd(model)
    with pytest.raises(InputError):
        DiLoCo(model, optimizer, fragments=7)
    outer = DiLoCo(model, optimizer, 2)
    with pytest.raises(InputError, match=r"outer\.detach\(\)"):
        LocalSGD(model, optimizer)
    train(model, optimizer, 3)
    outer.detach()
    train(model, optimizer, 3)
    assert (outer.step, outer.rounds) == (3, 1)
    assert "3 steps, 1 outer steps" in repr(outer)
    LocalSGD(model, optimizer).detach()


@pytest.mark.usefixtures("alone")
def test_not_finite_weights_raise_or_are_skipped_with_the_inner_state_that_has_them():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    outer = LocalSGD(model, optimizer, 2, on_nan="skip")
    train(model, optimizer, 3)
    before = weights(model), len(optimizer.state)
    good = outer.global_weights()
    next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.nan)
    train(model, optimizer, 1, 3)
    assert equal(model.parameters(), good.values())
    assert len(optimizer.state) == before[1] - 1  # begins again; the others stay
    assert outer.stats()["skipped"] == 1
    train(model, optimizer, 2, 4)
    assert (outer.rounds, all(bool(each.isfinite().all()) for each in model.parameters())) == (2, True)
    outer.detach()
    LocalSGD(model, optimizer, 1)
    model[0].weight.data[0, 0] = torch.inf
    with pytest.raises(
        NotFiniteError, match=r"outer step 1: the mean outer gradient of 0\.weight.* is not finite"
    ):
        train(model, optimizer, 1)


@pytest.mark.usefixtures("alone")
def test_any_bytes_survive_a_broadcast():
    """Patterns of signalling NaNs and subnormals too, for bytes travel as float32."""
    patterns = torch.tensor([0x7F800001, 0x7FA00000, 0x00000001, -0x80000000, -1], dtype=torch.int32)
    content = {
        "ints": torch.arange(3),
        "odd": patterns,
        "bool": torch.tensor([True]),
        "name": "ö",
        "number": 2.5,
    }
    raw = packed(content)
    assert broadcast(raw, 0, None, CPU) == raw
    again = unpacked(raw)
    assert torch.equal(again["odd"], patterns)
    assert (again["name"], again["number"]) == ("ö", 2.5)
    assert gathered([2**40 + 3, -1, 0], None, CPU) == [(2**40 + 3, -1, 0)]


@pytest.mark.usefixtures("alone")
def test_a_summary_says_what_was_sent(capsys):
    model = network().to(torch.bfloat16)
    outer = DiLoCo(model, sgd(model), 2)
    outer.summary()
    said = capsys.readouterr().out
    assert "thinwire: DiLoCo int8: 0 outer steps in 0 steps, 0.0 MB sent instead of 0.0 MB" in said
    assert "6 parameters have 16 bits; their global weights are kept in float32" in said


@pytest.mark.usefixtures("alone")
def test_states_of_one_run_only_are_merged():
    model = network()
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 2)
    state = outer.state_dict()
    merged = reshard([state])
    assert (merged["rank"], merged["world"]) == (-1, 0)
    outer.load_state_dict(merged)
    other = copy.deepcopy(state)
    other["step"] = 3
    with pytest.raises(InputError, match="not of one run"):
        reshard([state, other])
    with pytest.raises(InputError, match="no state of an outer loop"):
        reshard([{}])


def test_names_are_loaded_when_they_are_used():
    assert set(dir(thinwire.outer)) == set(thinwire.outer.__all__)
    assert all(issubclass(each, Outer) for each in (DiLoCo, LocalSGD, SparseLoCo))
    with pytest.raises(AttributeError, match="DiLoco"):
        thinwire.outer.DiLoco  # noqa: B018
    loads = "import sys, thinwire.outer; print('thinwire.outer.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
