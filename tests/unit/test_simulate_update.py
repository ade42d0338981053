"""Optimizers in few bits, what they count, and loss scales."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from thinwire import FormatError, InputError, Stream, formats
from thinwire.formats import Fixed, Float
from thinwire.simulate import update
from thinwire.simulate.counters import Counters
from thinwire.simulate.loss_scale import LossScale
from thinwire.simulate.precision import Precision
from thinwire.simulate.update import SGD, Adam, RMSprop

BFLOAT16, FLOAT16 = formats.get("bfloat16"), formats.get("float16")


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(make, steps=20, shapes=((33, 7), (5,))):
    """Parameters after some steps with gradients that depend on nothing but the step."""
    parameters = [nn.Parameter(some(*shape, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = make(parameters)
    go(parameters, optimizer, range(steps))
    return parameters, optimizer


def go(parameters, optimizer, steps):
    for step in steps:
        for i, each in enumerate(parameters):
            each.grad = some(*each.shape, seed=100 + 10 * step + i)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ],
)
def test_in_float32_it_is_torchs_sgd_bit_for_bit(options):
    ours, _ = run(lambda p: SGD(p, 0.1, keep="fp32", **options))
    theirs, _ = run(lambda p: torch.optim.SGD(p, 0.1, **options))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1, keep=None),
            lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, momentum=0.5, weight_decay=0.1),
        ),
        (
            lambda p: Adam(p, 0.01, weight_decay=0.1, keep=None),
            lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        ),
        (  # an eps that counts, so that it must stand where torch has it
            lambda p: RMSprop(p, 0.01, eps=0.3, keep=None),
            lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=0.3),
        ),
        (
            lambda p: Adam(p, 0.01, betas=(0.8, 0.95), eps=0.3, keep=None),
            lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), eps=0.3),
        ),
    ],
)
def test_in_float32_the_others_are_torchs_but_for_rounding(ours, theirs):
    for a, b in zip(run(ours)[0], run(theirs)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_weights_and_momentum_are_rounded_where_it_says():
    weight, velocity = BFLOAT16.round(some(50)), None
    parameter = nn.Parameter(some(50))
    optimizer = SGD([parameter], 0.1, 0.9, keep="bfloat16", state="float16")
    for step in range(10):
        parameter.grad = some(50, seed=1 + step)
        optimizer.step()
        moved = parameter.grad if velocity is None else velocity * 0.9 + parameter.grad
        velocity = FLOAT16.round(moved)
        weight = BFLOAT16.round(weight + velocity * -0.1)
        assert torch.equal(parameter, weight)
        assert torch.equal(optimizer.state[parameter]["momentum"], velocity)


def test_random_rounding_has_a_stream_for_each_parameter_and_step():
    first = BFLOAT16.round(some(50), "stochastic", Stream(7, step=0, tensor="fc.weight"))
    parameter = nn.Parameter(some(50))
    optimizer = SGD([("fc.weight", parameter)], 0.01, keep="bfloat16~sr", seed=7)
    parameter.grad = some(50, seed=1)
    optimizer.step()
    exact = first + parameter.grad * -0.01
    assert torch.equal(parameter, BFLOAT16.round(exact, "stochastic", Stream(7, step=1, tensor="fc.weight")))
    named = nn.Parameter(some(50))
    again = SGD([named], 0.01, keep="bfloat16~sr", seed=7, names=["fc.weight"])
    named.grad = some(50, seed=1)
    again.step()
    assert torch.equal(parameter, named)
    assert not torch.equal(first, BFLOAT16.round(some(50)))


@pytest.mark.parametrize("make", [SGD, RMSprop, Adam])
def test_no_two_roundings_draw_the_same_words(make, monkeypatch):
    """Of gradients, weights and the optimizer's own numbers, in any step: or their errors would be one."""
    drawn = []
    monkeypatch.setattr(
        update, "Stream", lambda *args, **named: drawn.append(Stream(*args, **named)) or drawn[-1]
    )
    momentum = {} if make is Adam else {"momentum": 0.9}
    short = dict.fromkeys(("keep", "state", "gradient"), "bfloat16~sr")
    run(lambda parameters: make(parameters, lr=0.1, **momentum, **short), steps=3)
    assert len(drawn) > 3 * 2 * 3
    assert len(set(drawn)) == len(drawn)


def test_kahan_is_the_recurrence():
    start, lr = some(40), 0.01
    parameter = nn.Parameter(start.clone())
    optimizer = SGD([parameter], lr, keep="float16", update="kahan")
    half, single = np.float16, np.float32
    weights = [half(x) for x in start.tolist()]
    lost = [half(0)] * 40
    for step in range(300):
        gradient = some(40, seed=1 + step) * 0.1
        parameter.grad = gradient
        optimizer.step()
        for i in range(40):
            update = single(gradient[i].item()) * single(-lr)
            y = half(update - single(lost[i]))
            s = half(weights[i] + y)
            lost[i] = half(half(s - weights[i]) - y)
            weights[i] = s
    assert parameter.tolist() == [float(x) for x in weights]
    assert optimizer.state[parameter]["compensation"].tolist() == [float(x) for x in lost]
    assert any(lost)


def test_to_nearest_stalls_and_at_random_or_with_compensation_does_not():
    def error(keep, update="round"):
        target, generator = some(512), torch.Generator().manual_seed(1)
        parameter = nn.Parameter(torch.zeros(512))
        optimizer = SGD([parameter], 1e-3, keep=keep, update=update)
        for _ in range(8000):
            noise = torch.randn(512, generator=generator) * 0.05
            parameter.grad = parameter.detach() - target + noise
            optimizer.step()
        return (parameter.detach() - target).square().mean().sqrt().item()

    nearest, random, kahan, single = (
        error("float16"), error("float16~sr"), error("float16", "kahan"), error("fp32")
    )  # fmt: skip
    assert nearest > 0.1
    assert random < 0.01
    assert kahan < 0.002
    assert single < 0.002
    assert 2 * kahan < random
    assert abs(kahan / single - 1) < 0.15


def test_cancelled_updates_are_those_that_change_nothing():
    counters = Counters(history=True)
    parameter = nn.Parameter(some(200))
    optimizer = SGD([("w", parameter)], 1e-3, keep="bfloat16", counters=counters)
    expected = []
    for step in range(5):
        gradient = some(200, seed=1 + step)
        gradient[:20] = 0
        before = BFLOAT16.round(parameter.detach())
        parameter.grad = gradient
        optimizer.step()
        counters.step()
        triples = zip(gradient.tolist(), before.tolist(), parameter.tolist(), strict=True)
        expected.append(sum(g != 0 and a == b for g, a, b in triples))
    assert 20 < expected[0] < 180
    assert [row["cancelled"] for row in counters.rows()] == expected
    assert [(row["step"], row["layer"], row["tensor"]) for row in counters.rows()] == [
        (step, "w", "update") for step in range(5)
    ]
    assert counters.read() == {"w/update": {"numbers": 1000, "cancelled": sum(expected)}}


def test_cancelled_updates_are_counted_alike_on_devices(monkeypatch):
    counts = []
    for _ in range(2):
        counters = Counters()
        run(lambda p, counters=counters: SGD(p, 1e-3, counters=counters), steps=3)
        counts.append(counters.read())
        monkeypatch.setattr("thinwire.simulate.counters._array", lambda x: x)  # as on a GPU
    assert counts[0] == counts[1]
    assert counts[0]["0/update"]["cancelled"] > 0


def test_no_update_is_cancelled_at_a_rate_of_zero():
    counters = Counters()
    run(lambda p: SGD(p, 0.0, counters=counters), steps=1)
    assert counters.read()["0/update"] == {"numbers": 231, "cancelled": 0}


def test_history_tells_steps_and_names_apart():
    e4m3, counters = formats.get("e4m3"), Counters(history=True)
    batches = {
        0: {"a": [1e9, 1.0], "b": [1e-9]},
        1: {"a": [1.0]},
        2: {"b": [1e9], **{f"c{i}": [1e9] for i in range(80)}},
    }
    for step in batches.values():
        for name, numbers in step.items():
            x = torch.tensor(numbers)
            counters.note(name, e4m3, x, e4m3.round(x))
        counters.step()
    rows = {(row["step"], row["name"]): row for row in counters.rows()}
    assert set(rows) == {(step, name) for step, names in batches.items() for name in names}
    assert (rows[0, "a"]["numbers"], rows[0, "a"]["overflow"], rows[0, "a"]["underflow"]) == (2, 1, 0)
    assert (rows[0, "b"]["overflow"], rows[0, "b"]["underflow"]) == (0, 1)
    assert (rows[1, "a"]["numbers"], rows[1, "a"]["overflow"]) == (1, 0)
    assert (rows[2, "b"]["overflow"], rows[2, "b"]["underflow"]) == (1, 0)
    assert all(rows[2, f"c{i}"]["overflow"] == 1 for i in range(80))
    assert rows[0, "a"]["cancelled"] is None
    assert counters.read()["a"] == {"numbers": 3, "overflow": 1, "saturation": 0, "underflow": 0}
    assert [row["numbers"] for row in counters.table()][:2] == [3, 2]
    with pytest.raises(InputError, match="history=True"):
        Counters().rows()


@pytest.mark.parametrize(
    "format", ["e4m3", "float8_e4m3fn", "int8", "uniform8", "posit8_1", "sign", "float4_e2m1fn"]
)
@pytest.mark.parametrize("extra", [[], [float("inf")], [float("nan"), float("-inf")]])
@pytest.mark.parametrize("unit", [1.0, 0.25, float("nan")])
@pytest.mark.parametrize("host", [True, False])
def test_counts_are_what_their_definitions_say(format, extra, unit, host, monkeypatch):
    if not host:  # as on a GPU
        monkeypatch.setattr("thinwire.simulate.counters._array", lambda x: x)
    format = formats.get(format)
    x = torch.cat((some(300) * 10 ** some(300, seed=1), torch.zeros(9), torch.tensor(extra)))
    y = format.round(x / unit) * unit
    counters = Counters()
    counters.note("x", format, x, y, torch.tensor(unit))
    finite = x.isfinite()
    beyond = further(format).round(x / unit)
    cut = (beyond > format.max) | (beyond < format.min)
    assert counters.read()["x"] == {
        "numbers": len(x),
        "overflow": int((finite & ~y.isfinite()).sum()),
        "saturation": int((finite & y.isfinite() & cut).sum()),
        "underflow": int((finite & (y == 0) & (x != 0)).sum()),
    }


def further(format):
    """What goes on as a format ends, or anything that does not round."""
    if isinstance(format, Float):
        return Float(8, format.man)
    return formats.get("int16") if format.name == "int8" else Float(8, 23)


@pytest.mark.parametrize("mode", ["nearest", "zero", "up", "down", "stochastic"])
@pytest.mark.parametrize("format", ["int8", "fixed4.4", "float8_e4m3fn", "e3m0"])
def test_reach_ends_where_numbers_are_cut(format, mode):
    """On both sides of both ends, against the next number that a larger format has."""
    format = formats.get(format)
    how, wide = Precision(format, mode), further(format) if format.name != "fixed4.4" else Fixed(12, 4)
    for end, reach in zip((format.min, format.max), how.reach, strict=True):
        gap = abs(reach - end)
        inside, outside = reach - math.copysign(gap / 64, end), reach + math.copysign(abs(end) / 64, end)
        if mode == "stochastic":
            assert reach == end
        else:
            x = torch.tensor([inside, outside])
            beyond = wide.round(x, mode).abs() > abs(end)
            assert beyond.tolist() == [False, True], (x, reach)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, 0.01, 0.9, keep="float16", update="kahan"),
        lambda p: SGD(p, 0.01, 0.9, keep="bfloat16~sr", seed=3),
        lambda p: RMSprop(p, 0.01, momentum=0.9, keep="bfloat16~sr"),
        lambda p: Adam(p, 0.01, keep="bfloat16", update="kahan"),
    ],
)
def test_a_saved_run_goes_on_as_if_nothing_had_been(make):
    through, whole = run(make, steps=8)
    parameters, optimizer = run(make, steps=5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = [nn.Parameter(each.detach().clone()) for each in parameters]
    loaded = make(copies)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    go(copies, loaded, range(5, 8))
    for a, b in zip(through, copies, strict=True):
        assert torch.equal(a, b)
        mine, other = whole.state[a], loaded.state[b]
        assert mine.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key])) for key in mine)


def test_groups_may_have_precisions_of_their_own():
    first, second = nn.Parameter(some(50)), nn.Parameter(some(50))
    optimizer = SGD([{"params": [first]}, {"params": [second], "keep": "float16"}], 0.1, 0.9)
    optimizer = copy.deepcopy(optimizer)
    first, second = (group["params"][0] for group in optimizer.param_groups)
    first.grad = second.grad = some(50, seed=1)
    optimizer.step()
    assert torch.equal(first, BFLOAT16.round(BFLOAT16.round(some(50)) + BFLOAT16.round(first.grad) * -0.1))
    assert torch.equal(second, FLOAT16.round(FLOAT16.round(some(50)) + FLOAT16.round(second.grad) * -0.1))


def test_what_has_no_gradient_stays():
    moving, resting = nn.Parameter(some(3)), nn.Parameter(some(3))
    moving.grad = torch.ones(3)
    SGD([moving, resting], 0.1).step()
    assert torch.equal(resting, some(3))
    assert not torch.equal(moving, some(3))


def test_mistakes_are_named():
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match="unknown update 'khan'; use one of: round, kahan"):
        SGD([parameter], 0.1, update="khan")
    with pytest.raises(InputError, match=r"SGD has no argument keeps; it has: lr, .*, keep, state, update"):
        SGD([parameter], 0.1, keeps="float16")
    with pytest.raises(FormatError, match="bfloat16~sr without '~sr'"):
        SGD([parameter], 0.1, keep="bfloat16~sr", update="kahan")
    with pytest.raises(InputError, match="nesterov needs momentum"):
        SGD([parameter], 0.1, nesterov=True)
    with pytest.raises(InputError, match="lr must be 0 or more, not -1"):
        SGD([parameter], -1)
    with pytest.raises(InputError, match=r"must be float32, .* not float64"):
        SGD([nn.Parameter(torch.ones(3).double())], 0.1)
    with pytest.raises(InputError, match="2 names for 1 params"):
        SGD([parameter], 0.1, names=["a", "b"])
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="gradient of 'weight' is sparse; use sparse=False"):
        SGD(embedding.named_parameters(), 0.1).step()
    saved = SGD([parameter], 0.1, keep="float16").state_dict()
    with pytest.raises(InputError, match="saved with keep='float16'"):
        SGD([parameter], 0.1, keep="bfloat16").load_state_dict(saved)


def test_a_dynamic_scale_moves_as_torchs():
    generator = torch.Generator().manual_seed(0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ours = LossScale("dynamic", init=2.0**10, interval=3)
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], 0.0)
    scales = set()
    for _ in range(100):
        good = torch.rand((), generator=generator).item() > 0.2
        theirs.scale(parameter.sum() * (1 if good else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        gradient = torch.full((4,), ours.scale if good else float("inf"))
        finite = ours.unscale_([None, gradient, torch.empty(0)])
        assert ours.update(finite) == finite == good
        assert gradient.tolist() == [1.0 if good else float("inf")] * 4
        assert ours.scale == theirs.get_scale()
        optimizer.zero_grad()
        scales.add(ours.scale)
    assert len(scales) > 5


def test_a_scale_by_hand():
    scaling = LossScale("dynamic", init=8.0, interval=2, min_scale=2.0, floor={4: 16.0, 6: 64.0})
    trace = []
    for finite in (True, True, False, False, False, True, True, True):
        assert scaling.update(finite) == finite
        trace.append(scaling.scale)
    assert trace == [8.0, 16.0, 8.0, 16.0, 16.0, 64.0, 128.0, 128.0]
    assert (scaling.steps, scaling.skipped, scaling.good) == (8, 3, 1)
    scaling = LossScale("dynamic", init=4.0, min_scale=2.0)
    scaling.update(False)
    scaling.update(False)
    assert scaling.scale == 2.0


def test_a_scale_stays_within_float32():
    scaling = LossScale("dynamic", init=2.0**126, interval=1)
    for _ in range(3):
        scaling.update(True)
    assert scaling.scale == 2.0**127


def test_static_scales_and_none():
    static, none = LossScale(128), LossScale("none")
    loss, bad = torch.tensor(3.0), torch.tensor([float("nan")])
    assert static.scaled(loss) == 384
    assert none.scaled(loss) is loss
    assert [static.unscale_([bad]), static.update(False), static.scale] == [False, False, 128.0]
    assert [none.unscale_([bad]), none.update(False), none.scale] == [False, True, 1.0]
    gradient = some(100)
    static.unscale_([gradient])
    assert torch.equal(gradient * 128, some(100))


def test_a_saved_scale_goes_on():
    scaling, other = LossScale(interval=3), LossScale(interval=3)
    for finite in (True, False, True, True):
        scaling.update(finite)
    other.load_state_dict(scaling.state_dict())
    assert [scaling.update(True), scaling.scale] == [other.update(True), other.scale] == [True, 2.0**16]
    with pytest.raises(InputError, match="of kind dynamic needs a LossScale of that kind, not static"):
        LossScale(8).load_state_dict(scaling.state_dict())
    with pytest.raises(InputError, match="unknown loss scale 'auto'; use one of: none, dynamic, or a number"):
        LossScale("auto")
    with pytest.raises(InputError, match="above 0"):
        LossScale(0)
    with pytest.raises(InputError, match="backoff <= 1"):
        LossScale(backoff=2)


def test_a_loss_scale_loaded_with_a_shorter_interval_still_grows():
    saved, scaling = LossScale("dynamic", init=8.0, interval=10), LossScale("dynamic", init=8.0, interval=2)
    for _ in range(5):
        saved.update(True)
    scaling.load_state_dict(saved.state_dict())
    scaling.update(True)
    assert scaling.scale == 16


def test_gradients_may_be_sums_that_are_divided_and_rounded():
    posit = formats.get("posit8_2")
    weight, given = some(40), some(40, seed=1) * 30
    parameter = nn.Parameter(weight.clone())
    optimizer = SGD([parameter], 0.25, keep="posit16_2", gradient="posit8_2", sum_of=64)
    parameter.grad = given.clone()
    optimizer.step()
    long = formats.get("posit16_2")
    expected = long.round(long.round(weight) + posit.round(given / 64) * -0.25)
    assert torch.equal(parameter.detach(), expected)
    assert torch.equal(parameter.grad, given)
    assert optimizer.state_dict()["param_groups"][0]["gradient"] == "posit8_2"
    for bad in (-1, 0, 0.5):
        with pytest.raises(InputError, match="sum_of"):
            SGD([{"params": [parameter], "sum_of": bad}], 0.1)


def test_checkpoints_without_the_newer_options_are_loaded():
    parameters, optimizer = run(lambda p: SGD(p, 0.1, 0.9), steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["gradient"], group["sum_of"]
    optimizer.load_state_dict(saved)
    go(parameters, optimizer, range(2, 4))
    expected, _ = run(lambda p: SGD(p, 0.1, 0.9), steps=4)
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_not_the_gradient_that_it_began_with(nesterov):
    """Gradients are set to zero in place, and added to."""
    weights = []
    for kind, more in ((SGD, {"keep": None}), (torch.optim.SGD, {})):
        weight = nn.Parameter(some(7))
        optimizer = kind([weight], 0.1, 0.9, nesterov=nesterov, **more)
        for step in range(3):
            (weight * some(7, seed=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        weights.append(weight)
    assert torch.equal(*weights)


def test_numbers_of_an_optimizer_stay_where_they_are():
    parameters, optimizer = run(lambda p: SGD(p, 0.1, 0.9, keep="bfloat16", update="kahan"), steps=1)
    places = [
        each.data_ptr()
        for state in optimizer.state.values()
        for each in (state["momentum"], state["compensation"])
    ]
    go(parameters, optimizer, range(1, 3))
    assert places == [
        each.data_ptr()
        for state in optimizer.state.values()
        for each in (state["momentum"], state["compensation"])
    ]


def test_what_repeats_can_be_recorded():
    parameter = nn.Parameter(some(3))
    assert SGD([parameter], 0.1, 0.9).repeats
    assert RMSprop([parameter], 0.1).repeats
    assert not Adam([parameter]).repeats
    assert not SGD([parameter], 0.1, keep="bfloat16~sr").repeats
    assert not SGD([parameter], 0.1, counters=Counters()).repeats


def test_tables_of_other_numbers_have_other_names():
    one, other = (formats.Table((-1.0, 0.0, each)) for each in (1.0, 2.0))
    assert one.name != other.name
    assert one.name == formats.Table((-1, 0, 1)).name
    made = [SGD([nn.Parameter(torch.zeros(2))], 0.1, keep=each) for each in (one, other)]
    with pytest.raises(InputError, match="Table"):
        made[1].load_state_dict(made[0].state_dict())


def test_a_copy_of_an_optimizer_counts_too():
    duplicate = copy.deepcopy(SGD([nn.Parameter(torch.ones(2))], 1e-6, keep="e4m3", counters=Counters()))
    (parameter,) = duplicate.param_groups[0]["params"]
    parameter.grad = torch.ones(2)
    duplicate.step()
    assert duplicate.counters.read()["0/update"]["cancelled"] == 2
