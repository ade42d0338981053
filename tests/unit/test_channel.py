"""Channels: residuals, slot by slot, and that over many steps everything arrives."""

import io
import math

import pytest
import torch

from thinwire import Channel, Stream, codecs
from thinwire.codecs import CODECS, RandomK
from thinwire.errors import CodecError, InputError
from thinwire.holding import Holding
from thinwire.runtimes import arguments, local

UNIT = 2.0**-24  # half a unit in the last place of float32, relative
OWING = [name for name, codec in CODECS.items() if codec.feedback]
#: How far a stored residual may be off, relative to the largest of its block of 256: half a unit in the last
#: place of bfloat16; half of 1/127 and the rounding of the scale.
STORED = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127 + 2.0**-22}
every_owing = pytest.mark.parametrize("spec", OWING)
every_store = pytest.mark.parametrize("feedback", STORED)


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dyadic(*shape, seed=0):
    """Multiples of 1/64 under 4, whose sums over many steps float32 holds exactly."""
    return torch.randint(-255, 256, shape, generator=torch.Generator().manual_seed(seed)) / 64


def stream(codec, step):
    return Stream(3, step=step) if codec.needs_rng else None


def run(channel, given, slot="w"):
    """Send one tensor after the other; everything that arrived, in float64."""
    sent = [
        channel.decode(channel.encode(x, slot, stream(channel.codec, step)), x.shape[-1]).double()
        for step, x in enumerate(given)
    ]
    return torch.stack(sent)


# Conservation


@pytest.mark.parametrize("spec", ["topk/0.01+ef", "mstopk/0.1+ef", "threshold/3~cap0.1+ef", "randomk/0.2+ef"])
def test_what_arrived_and_the_residual_are_exactly_what_was_given(spec):
    given = [dyadic(2, 300, seed=step) for step in range(60)]
    channel = Channel(spec)
    sent = run(channel, given).sum(0)
    residual = channel.residual("w", given[0]).double()
    total = torch.stack(given).double().sum(0)
    assert torch.equal(sent + residual, total)
    assert bool(residual.any())


@every_owing
@every_store
def test_nothing_is_lost_but_what_rounding_loses(spec, feedback):
    """One rounding of x + residual and one of the residual a step, and what the store loses."""
    codec = codecs.get(spec).with_feedback(feedback)
    channel = Channel(codec)
    lost = torch.zeros(400, dtype=torch.float64)
    balance, before = torch.zeros(400, dtype=torch.float64), torch.zeros(400)
    for step in range(30):
        x = gauss(400, seed=step) * 10.0 ** (step % 3)
        wire = channel.encode(x, "w", stream(codec, step))
        sent, after = channel.decode(wire, 400), channel.residual("w", x).clone()
        balance += x.double() - sent.double()
        total = x + before
        kept = total - sent
        block = kept.abs()
        if feedback == "int8":
            block = torch.cat([each.abs().max().expand_as(each) for each in kept.split(256)])
        lost += UNIT * (total.abs() + kept.abs()).double() + STORED[feedback] * block.double()
        assert bool(((balance - after.double()).abs() <= lost).all()), step
        before = after


@every_store
def test_residuals_are_kept_in_the_dtype_that_the_spec_says(feedback):
    codec, x = codecs.get("onebit/64").with_feedback(feedback), gauss(3, 1000)
    channel, plain = Channel(codec), torch.zeros(3, 1000)
    codec.encode(x, residual=plain)
    channel.encode(x, "w")
    held = channel.residuals["w"]
    assert held.numel() * held.element_size() == {"float32": 12000, "bfloat16": 6000, "int8": 3060}[feedback]
    off = (channel.residual("w", x) - plain).abs()
    top = torch.cat([each.abs().amax(-1, keepdim=True).expand_as(each) for each in plain.split(256, -1)], -1)
    assert bool((off <= STORED[feedback] * (top if feedback == "int8" else plain.abs())).all())
    assert bool(off.any()) == (feedback != "float32")


def test_batches_are_kept_row_by_row():
    x = [gauss(3, 200, seed=step) for step in range(4)]
    batch, rows = Channel("onebit/64+ef"), Channel("onebit/64+ef")
    together = run(batch, x)
    for row in range(3):
        alone = run(rows, [each[row] for each in x], slot=f"row {row}")
        assert torch.equal(together[:, row], alone)


def test_without_feedback_there_are_no_residuals():
    channel, x = Channel("onebit/64"), gauss(200)
    plain = codecs.get("onebit/64").encode(x)
    assert torch.equal(channel.encode(x, "w"), plain)
    assert torch.equal(channel.encode(x, "w"), plain)  # also the second time
    assert channel.residuals == {}
    assert not channel.residual("w", x).any()


# Slots


def test_slots_do_not_mix():
    one, other = [gauss(100, seed=s) for s in range(5)], [gauss(2, 30, seed=9 + s) for s in range(5)]
    together, first, second = (Channel("topk/0.1+ef") for _ in range(3))
    sent = [(run(together, [a], "a"), run(together, [b], "b")) for a, b in zip(one, other, strict=True)]
    assert torch.equal(torch.cat([a for a, _ in sent]), run(first, one, "a"))
    assert torch.equal(torch.cat([b for _, b in sent]), run(second, other, "b"))
    assert set(together.residuals) == {"a", "b"}
    together.forget("a")
    assert set(together.residuals) == {"b"}
    assert not together.residual("a", one[0]).any()
    together.forget("a")  # a residual that does not exist can be forgotten again
    together.forget()
    assert together.residuals == {}


def test_names_that_begin_alike_have_residuals_of_their_own():
    channel = Channel("onebit/64+ef")
    mine = ["fc1", "fc1/sent", "fc1/sent/tail", "fc1[0]/sent", "fc1[1024]/reduced"]
    slots = [*mine, "fc10", "fc10/sent", "fc10[0]/sent", "fc1.bias/sent", "fc/sent", "net.fc1/sent"]
    for number, slot in enumerate(slots, 1):
        channel.encode(gauss(100) * 10.0**number, slot)
    assert list(channel.residuals_of("fc1")) == mine
    assert list(channel.residuals_of("fc10")) == slots[5:8]
    for slot, held in channel.residuals_of("fc1").items():
        assert torch.equal(held, channel.residuals[slot])
    most = max(channel.residuals[slot].abs().max() for slot in mine)
    assert channel.largest_residual("fc1") == most
    assert most < channel.largest_residual("fc10")
    assert channel.residuals_of("nobody") == {}
    assert channel.largest_residual("nobody") is None
    channel.forget_name("fc1")
    assert list(channel.residuals) == slots[5:]


def test_two_channels_of_one_codec_have_residuals_of_their_own():
    one, other = Channel("onebit/64+ef"), Channel("onebit/64+ef")
    one.encode(gauss(100), "w")
    assert other.residuals == {}


@every_store
@pytest.mark.parametrize("shape", [(5,), (7,), (6, 1), (1, 6), (2, 6), (3, 2), (600,), (0,)])
def test_another_shape_in_the_same_slot_is_refused_with_advice(feedback, shape):
    channel = Channel(codecs.get("onebit/64").with_feedback(feedback))
    channel.encode(gauss(6), "layer.weight")
    kept = channel.residuals["layer.weight"].clone()
    message = (
        r"slot 'layer.weight' has a residual of shape \(6,\), but the tensor has .*; give tensors of another"
    )
    with pytest.raises(InputError, match=message):
        channel.encode(torch.ones(shape), "layer.weight")
    assert torch.equal(channel.residuals["layer.weight"], kept)
    channel.forget("layer.weight")
    channel.encode(torch.ones(shape), "layer.weight")


def test_a_call_that_fails_changes_nothing():
    channel = Channel("onebit/64+ef")
    channel.encode(gauss(100), "w")
    kept = channel.residuals["w"].clone()
    with pytest.raises(CodecError, match="rng must be None"):
        channel.encode(gauss(100), "w", Stream(1))
    with pytest.raises(InputError, match="out must be"):
        channel.encode(gauss(100), "w", out=torch.empty(3, dtype=torch.uint8))
    with pytest.raises(InputError):
        channel.encode(gauss(100).double(), "w")
    with pytest.raises(InputError, match="cpu"):
        channel.encode(torch.empty(100, device="meta"), "w")
    assert torch.equal(channel.residuals["w"], kept)
    with pytest.raises(InputError):
        channel.encode(gauss(100).long(), "new")
    assert set(channel.residuals) == {"w"}


def test_the_meta_device_has_no_residuals():
    channel = Channel("topk/0.1+ef")
    wire = channel.encode(torch.empty(3, 50, device="meta"), "w")
    assert wire.shape == (3, codecs.get("topk/0.1").nbytes(50))
    assert channel.residuals == {}


# Steps that go wrong


@every_owing
@every_store
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_shows_and_does_not_spoil_later_ones(spec, feedback, bad):
    codec = codecs.get(spec).with_feedback(feedback)
    channel = Channel(codec)
    broken = gauss(300)
    broken[7] = bad
    run(channel, [gauss(300, seed=1)])
    assert not bool(run(channel, [broken]).isfinite().all())
    assert bool(channel.residual("w", broken).isfinite().all())
    later = run(channel, [gauss(300, seed=seed) for seed in range(2, 6)])
    assert bool(later.isfinite().all())
    assert bool(channel.residual("w", broken).isfinite().all())


def test_only_what_the_bad_element_touched_is_dropped():
    channel, clean, x = Channel("onebit/64+ef"), Channel("onebit/64+ef"), gauss(256)
    for each in (channel, clean):
        each.encode(x, "w")
    broken = gauss(256, seed=1)
    clean.encode(broken, "w")
    broken[70] = math.nan
    channel.encode(broken, "w")
    kept, expected = channel.residual("w", x), clean.residual("w", x)
    assert not kept[64:128].any()
    assert torch.equal(kept[:64], expected[:64])
    assert torch.equal(kept[128:], expected[128:])


def test_a_wire_of_nothing_but_zeros_pays_the_debt_off():
    """A vector that is followed by zeros arrives in full, since residuals are sent."""
    channel, x = Channel("topk/0.25+ef"), dyadic(100, seed=4)
    sent = run(channel, [x, *[torch.zeros(100)] * 3]).sum(0)
    assert torch.equal(sent, x.double())
    assert not channel.residual("w", x).any()


# Agreement


def test_summaries_are_of_what_will_be_sent():
    channel, codec = Channel("aps/e5m2+ef"), codecs.get("aps/e5m2")
    x = gauss(300) * 1e-3
    assert torch.equal(channel.summary(x, "w", 4), codec.summary(x, 4))
    channel.encode(gauss(300, seed=1) * 100, "w")
    total = x + channel.residual("w", x)
    shared = channel.summary(x, "w", 4)
    assert torch.equal(shared, codec.summary(total, 4))
    assert not torch.equal(shared, codec.summary(x, 4))
    wire = channel.encode(x, "w", shared=shared)
    assert torch.equal(wire, codec.encode(total, shared=shared))
    assert torch.equal(channel.residual("w", x), total - codec.decode(wire, 300))


# State


@every_owing
@every_store
def test_a_state_survives_a_file_bit_for_bit(spec, feedback):
    codec = codecs.get(spec).with_feedback(feedback)
    channel, given = Channel(codec), [gauss(2, 300, seed=seed) for seed in range(8)]
    run(channel, given[:4], "a")
    run(channel, [gauss(50)], "b")
    file = io.BytesIO()
    torch.save(channel.state_dict(), file)
    file.seek(0)
    again = Channel(codec)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.residuals.keys() == channel.residuals.keys() == {"a", "b"}
    for slot, held in channel.residuals.items():
        assert torch.equal(again.residuals[slot], held)
        assert again.residuals[slot].dtype == held.dtype
    assert torch.equal(run(again, given[4:], "a"), run(channel, given[4:], "a"))
    with pytest.raises(InputError, match="has a residual of shape"):
        again.encode(gauss(300), "a")


def test_a_loaded_state_shares_no_memory():
    channel, again = Channel("onebit/64+ef"), Channel("onebit/64+ef")
    channel.encode(gauss(100), "w")
    again.load_state_dict(channel.state_dict())
    kept = again.residuals["w"].clone()
    channel.encode(gauss(100, seed=1), "w")
    assert torch.equal(again.residuals["w"], kept)


def test_a_loaded_or_forgotten_state_is_used_by_calls_that_were_worked_out_before():
    """A plan holds the channel's memory with the codec for a shape."""
    given = [[gauss(8, 12, seed=2 * step + rank) for rank in range(2)] for step in range(5)]
    plans = [arguments.PlanCache() for _ in range(2)]

    def send(step, channels):
        tensors = [x.clone() for x in given[step]]
        local.run(
            [
                arguments.all_reduce_job(
                    [x], channel, "sum", "one_shot", local.Rank(rank, 2, plans=plans[rank])
                )
                for rank, (x, channel) in enumerate(zip(tensors, channels, strict=True))
            ]
        )
        return tensors[0]

    channels = [Channel("onebit/column+ef") for _ in range(2)]
    send(0, channels)
    states = [channel.state_dict() for channel in channels]
    through = [send(step, channels) for step in (1, 2)]
    for channel, state in zip(channels, states, strict=True):
        channel.load_state_dict(state)
    assert all(torch.equal(send(step, channels), mean) for step, mean in zip((1, 2), through, strict=True))
    for channel in channels:
        for slot in list(channel.residuals):
            channel.forget(slot)
    assert torch.equal(send(3, channels), send(3, [Channel("onebit/column+ef") for _ in range(2)]))


def test_a_call_that_is_refused_moves_no_residual():
    """Of a bucket whose last tensor does not fit; and a name may be used anew once it was forgotten."""
    channels = [Channel("onebit/64+ef") for _ in range(2)]

    def send(*numels):
        tensors = [[gauss(n, seed=rank) for n in numels] for rank in range(2)]
        local.all_reduce(tensors, channels, schedule="two_shot", name=["a", "b"])

    send(100, 200)
    kept = channels[0].state_dict()
    for channel in channels:
        channel.load_state_dict(channel.state_dict())  # which does not say how large tensors were
    for _ in range(2):
        with pytest.raises(InputError, match="forget the slot first"):
            send(100, 300)
    for slot, held in kept["residuals"].items():
        assert torch.equal(channels[0].residuals[slot], held)
    send(100, 200)
    with pytest.raises(InputError, match="'b' has a residual of 200 elements, but 300 are sent"):
        send(100, 300)
    for channel in channels:
        for slot in [slot for slot in channel.residuals if slot.startswith("b/")]:
            channel.forget(slot)
    send(100, 300)


def test_a_slot_sent_in_another_bucket_takes_its_residual_along():
    channel, cpu = Channel("topk/0.1+ef"), torch.device("cpu")
    both, one = Holding((("a", (2,)), ("b", (2,)))), Holding((("a", (2,)),))
    both.open(channel, cpu).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    one.open(channel, cpu).mul_(10)
    assert both.open(channel, cpu).tolist() == [10.0, 20.0, 3.0, 4.0]
    assert one.open(channel, cpu).tolist() == [10.0, 20.0]


@every_store
def test_a_slot_of_an_empty_tensor_is_saved_and_loaded(feedback):
    codec = codecs.get("onebit/64").with_feedback(feedback)
    channel, again = Channel(codec), Channel(codec)
    channel.encode(torch.zeros(0), "nothing")
    again.load_state_dict(channel.state_dict())
    assert again.shapes == {"nothing": (0,)}


@pytest.mark.parametrize("change", [{"version": 2}, {"residuals": None}, {"codec": "onebit/128+ef"}])
def test_states_of_something_else_are_refused(change):
    channel = Channel("onebit/64+ef")
    channel.encode(gauss(100), "w")
    kept = channel.residuals["w"].clone()
    state = {**channel.state_dict(), **change}
    with pytest.raises(InputError, match=r"onebit/128|no state of a thinwire\.Channel"):
        channel.load_state_dict(state)
    with pytest.raises(InputError):
        channel.load_state_dict({})
    with pytest.raises(InputError):
        channel.load_state_dict({key: value for key, value in state.items() if key != "codec"})
    assert torch.equal(channel.residuals["w"], kept)


def test_a_channel_takes_specs_and_codecs():
    assert Channel("topk/0.1+ef").codec == codecs.get("topk/0.1+ef")
    assert Channel(codecs.get("int8/256")).codec is codecs.get("int8/256")


# What it is for


def descend(spec, steps, rate):
    """Gradient descent on an ill-conditioned quadratic in 200 unknowns, gradients through a channel."""
    channel = Channel(spec)
    curvature = torch.logspace(-1, 0, 200)
    goal = gauss(200)
    x = torch.zeros(200)
    for step in range(steps):
        gradient = curvature * (x - goal)
        wire = channel.encode(gradient, "x", stream(channel.codec, step))
        x = x - rate * channel.decode(wire, 200)
    return float((curvature * (x - goal).square()).sum() / (curvature * goal.square()).sum())


@pytest.mark.parametrize("body", ["onebit/64", "onebit/64~mean", "sign/64", "topk/0.02"])
def test_feedback_beats_no_feedback_on_a_quadratic(body):
    """One-bit stalls at a distance set by the block's mean; top-k forgets the small curvatures."""
    exact = descend("fp32", 300, 0.1)
    with_feedback, without = descend(f"{body}+ef", 300, 0.1), descend(body, 300, 0.1)
    assert with_feedback < 0.01 * without
    assert with_feedback < 2 * exact


def test_random_places_with_feedback_send_everything_in_the_end():
    channel = Channel(RandomK(0.1, feedback="float32"))
    given = [gauss(100)] + [torch.zeros(100)] * 200
    sent = run(channel, given).sum(0)
    assert torch.allclose(sent, given[0].double(), atol=1e-6)
