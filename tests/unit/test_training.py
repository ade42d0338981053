"""Training on many nodes, pure 8-bit mode, and what runs of a seed have in common."""

import math

import pytest
import torch
from torch import nn

from thinwire import CodecError, InputError, Stream, codecs, simulate
from thinwire.simulate import LossScale, Nodes, Plan, pure_mode


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def points(count=240, seed=0):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def test_it_is_the_loop_it_says():
    """Written out: shuffled batches, nodes in order, the rate that falls."""
    model, other = net(), net()
    data = points()
    done = simulate.train(
        model, data, nodes=4, codec="aps/e4m3", schedule="accumulate/2", steps=10, batch=5, lr=0.2, seed=7
    )
    nodes = Nodes(other, 4, "aps/e4m3", "accumulate/2", seed=7)
    optimizer = torch.optim.SGD(other.parameters(), 0.2, 0.9)
    draw = torch.Generator().manual_seed(7)
    order = torch.cat([torch.randperm(240, generator=draw) for _ in range(1)])
    for step in range(10):
        picked = order[20 * step : 20 * step + 20]
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 10)
        nodes.backward(
            lambda net, x, y: nn.functional.cross_entropy(net(x), y), data[0][picked], data[1][picked]
        )
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert done.steps == 10
    assert done.accuracy == simulate.evaluate(other, simulate.training.Images(*data, 0.0, 1.0))
    assert [point.step for point in done.points][-1] == 10
    assert done.sent_nbytes == nodes.sent_nbytes


def test_a_loss_scale_leaves_out_steps_that_overflow():
    model, data = net(), points()
    before = [each.clone() for each in model.parameters()]
    scaling = LossScale("dynamic", init=2.0**40)
    options = {"nodes": 4, "codec": "e4m3~offset0", "schedule": "accumulate/sequential", "batch": 5}
    done = simulate.train(model, data, steps=3, loss_scale=scaling, **options)
    assert done.skipped == 3
    assert scaling.scale == 2.0**37
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    done = simulate.train(model, data, steps=60, loss_scale=64.0, **options)
    assert not done.failed
    assert done.accuracy > 0.8


def test_a_run_that_breaks_off_says_so():
    model = net()
    done = simulate.train(model, points(), steps=100, batch=8, lr=1e30)
    assert done.failed
    assert done.steps < 100


def test_without_scaling_a_narrow_format_loses_what_scaling_keeps():
    losses = {}
    for codec in ("e3m2~offset0", "aps/e3m2"):
        model = net()
        how = {"schedule": "accumulate/sequential", "nodes": 8, "steps": 40, "batch": 4}
        losses[codec] = simulate.train(model, points(), codec=codec, loss_scale=1 / 64, **how).accuracy
    assert losses["aps/e3m2"] > losses["e3m2~offset0"] + 0.1


# Pure 8-bit mode


@pytest.mark.parametrize(
    "codec", ["tree8", "static8~offset-1", "mantissa8~offset-1", "linear8", "int4/128~sr"]
)
def test_pure_gradients_are_what_a_codec_lets_through(codec):
    model = net()
    loss = nn.functional.cross_entropy(model(points()[0]), points()[1])
    loss.backward()
    before = [each.grad.clone() for each in model.parameters()]
    pure_mode.gradients_(model.parameters(), codec, seed=3, step=4)
    parsed = codecs.get(codec)
    for place, (sent, parameter) in enumerate(zip(before, model.parameters(), strict=True)):
        rng = Stream(3, step=4, tensor=f"gradient/{place}") if parsed.needs_rng else None
        wire = parsed.encode(sent.reshape(-1), rng)
        assert torch.equal(parameter.grad, parsed.decode(wire, sent.numel()).view(sent.shape))


def test_pure_activations_pass_between_layers_both_ways():
    model, data = net(), points(20)
    pipe = pure_mode.attach(model, "tree8")
    assert pipe.layers == ["2", "4"]
    loss = nn.functional.cross_entropy(model(data[0]), data[1])
    loss.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    pipe.remove()
    sent = codecs.get("tree8")

    def trip(x):
        return sent.decode(sent.encode(x.reshape(-1)), x.numel()).view(x.shape)

    with torch.no_grad():
        one, two, three = model[0], model[2], model[4]
        a = one(data[0])
        b = trip(a.relu())
        c = two(b)
        d = trip(c.relu())
        y = three(d)
        e = (y.softmax(1) - nn.functional.one_hot(data[1], 3)) / 20
        ed = trip(e @ three.weight) * (c > 0)
        ea = trip(ed @ two.weight) * (a > 0)
        expected = (ea.t() @ data[0], ea.sum(0), ed.t() @ b, ed.sum(0), e.t() @ d, e.sum(0))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)
    model.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    assert not torch.equal(model[0].weight.grad, gradients[0])


@pytest.mark.parametrize("pure", ["gradients", "activations"])
def test_pure_training_learns(pure):
    model = net()
    done = simulate.train(model, points(), codec="tree8", pure=pure, steps=80, batch=16)
    assert done.accuracy > 0.85
    assert not model[2]._forward_pre_hooks


def test_bad_arguments_say_what_would_work():
    model, data = net(), points(30)
    with pytest.raises(InputError, match="there are 30 samples, a step takes 64"):
        simulate.train(model, data, nodes=8, batch=8)
    with pytest.raises(InputError, match="train has no argument epochs; a plan has: steps"):
        simulate.train(model, data, epochs=3)
    with pytest.raises(InputError, match=r"no argument node; did you mean nodes\? A plan has: steps"):
        simulate.train(model, data, node=3)
    with pytest.raises(InputError, match="steps must be a whole number, 1 or more, not 0"):
        simulate.train(model, data, steps=0)
    with pytest.raises(InputError, match=r"train takes a torch.nn.Module, not str"):
        simulate.train("bf16", data)
    with pytest.raises(InputError, match="optimizer must be a function that makes an optimizer"):
        simulate.train(model, data, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(InputError, match=r"a pair \(x, y\) of tensors, not Tensor"):
        simulate.train(model, data[0])
    with pytest.raises(InputError, match="x has 30 samples and y 7"):
        simulate.train(model, (data[0], data[1][:7]))
    with pytest.raises(InputError, match="there is no device 'gpu'; use cpu or cuda"):
        simulate.train(model, data, device="gpu")
    with pytest.raises(InputError, match="give a plan, or lr, not both"):
        simulate.train(model, data, plan=Plan(), lr=0.1)
    with pytest.raises(InputError, match="pure must be 'gradients' or 'activations'"):
        simulate.train(model, data, pure="weights", batch=4)
    with pytest.raises(InputError, match="needs one node"):
        simulate.train(model, data, pure="gradients", nodes=2, batch=4)
    with pytest.raises(CodecError, match="cannot be used for a round trip"):
        simulate.round_trip(torch.ones(3), "onebit/64+ef")
    with pytest.raises(InputError, match="fewer than two"):
        pure_mode.attach(nn.Linear(2, 2), "tree8")


def test_a_run_that_fails_leaves_no_hooks():
    model = net()
    with pytest.raises(ZeroDivisionError):
        simulate.train(
            model,
            points(),
            pure="activations",
            codec="tree8",
            batch=4,
            together=4,
            each_step=lambda *_: 1 / 0,
        )
    assert not any(each._forward_pre_hooks for each in model.modules())


def test_layers_that_are_called_by_name_are_reached():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            x = self.last(input=self.first(x))
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = Named(), torch.randn(3, 8)
    plain = model(x)
    pipe = pure_mode.attach(model, "tree8")
    assert pipe.layers == ["last"]
    assert not torch.equal(model(x), plain)
    assert pipe.calls == 1
    pipe.remove()
    assert torch.equal(model(x), plain)


def test_evaluation_leaves_modes_as_they_were():
    model = net()
    model[2].eval()
    simulate.training.evaluate(model, simulate.training._images(points()))
    assert [each.training for each in model] == [True, True, False, True, True]


def test_given_tests_and_scales_are_used():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[1].bias[3] = 1e6
    blank = torch.zeros(5, 1, 8, 8), torch.full((5,), 3)
    assert simulate.train(model, "digits", tests=blank, steps=1, lr=0.0).accuracy == 1
    with pytest.raises(InputError, match="a loss scale must be above 0"):
        simulate.train(model, "digits", loss_scale=0.0, steps=1)


def test_a_seed_decides_everything_and_leaves_torch_alone():
    losses = []
    for mess in (1, 2):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        torch.manual_seed(mess)
        state = torch.get_rng_state()
        simulate.train(model, points(), steps=5, batch=16, seed=9)
        assert torch.equal(torch.get_rng_state(), state)
        losses.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_an_optimizer_keeps_its_own_rate():
    model = net()
    rates = []
    simulate.train(
        model,
        points(),
        steps=4,
        batch=16,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        each_step=lambda _, __: rates.append(model[0].weight.detach().clone()),
    )
    assert (rates[1] - rates[0]).abs().max() < 2e-3


def test_looking_more_often_changes_no_random_number():
    models = [simulate.convert(net(), "bf16", tell=None) for _ in range(2)]
    for often, model in enumerate(models):
        simulate.convert(model, simulate.Stages.uniform("e4m3~sr"), tell=None)
        data = points()

        def look(_, model, often=often, data=data):
            if often:
                simulate.evaluate(model, simulate.training.Images(*data, 0.0, 1.0))

        simulate.train(model, data, steps=6, batch=16, each_step=look)
    assert all(torch.equal(a, b) for a, b in zip(*(each.parameters() for each in models), strict=True))


def test_evaluation_is_not_counted():
    counters = simulate.Counters()
    model = simulate.convert(nn.Linear(8, 4), "e4m3", counters=counters, tell=None)
    x = torch.randn(64, 8)
    simulate.train(model, (x, torch.arange(64) % 4), steps=4, batch=4)
    assert counters.read()["model/input"]["numbers"] == 4 * 4 * 8
    assert model.counters is counters


def test_accuracy_is_a_share_of_targets():
    x = torch.randn(32, 4)
    several = nn.Sequential(nn.Linear(4, 30), nn.Unflatten(1, (3, 10)))  # ten targets to a sample
    done = simulate.train(several, (x, torch.zeros(32, 10).long()), batch=8, steps=60)
    assert done.accuracy == 1.0
    for out, y in ((1, torch.randn(32, 1)), (3, torch.rand(32, 3))):
        done = simulate.train(nn.Linear(4, out), (x, y), batch=8, steps=4, loss=nn.functional.mse_loss)
        assert math.isnan(done.accuracy)
        assert not done.failed


def test_tokens_and_long_floats_are_taken_as_they_are():
    tokens = torch.randint(0, 50, (64, 6), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(96, 2))
    assert simulate.train(model, (tokens, tokens[:, 0] % 2), batch=16, steps=40).accuracy > 0.9
    x = torch.randn(64, 8, dtype=torch.float64)
    model = nn.Linear(8, 2).double()
    assert simulate.train(model, (x, (x[:, 0] > 0).long()), batch=16, steps=40).accuracy > 0.9
    pixels = torch.randint(0, 256, (64, 8), dtype=torch.uint8)
    simulate.train(nn.Linear(8, 2), (pixels, torch.arange(64) % 2), batch=16, steps=2, lr=1e-4)


def test_a_model_that_fails_in_evaluation_goes_on_training():
    class Breaks(nn.Linear):
        def forward(self, x):
            if not self.training:
                raise RuntimeError("broken")
            return super().forward(x)

    model = Breaks(8, 4)
    with pytest.raises(RuntimeError, match="broken"):
        simulate.evaluate(model, points())
    assert model.training


def test_arguments_that_would_be_lost_or_cannot_be_are_refused():
    data = points()

    def refused(words, model=None, given=data, **how):
        with pytest.raises(InputError, match=words):
            simulate.train(model or net(), given, batch=16, **{"steps": 2, **how})

    made = {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1)}
    refused("lr, momentum would not be used: you gave an optimizer", lr=1.0, momentum=0.5, **made)
    refused("is, or returns, NoneType", optimizer=lambda _: None)
    refused("no parameter with requires_grad=True", model=nn.Flatten())
    refused("no parameter with requires_grad=True", model=net().requires_grad_(False))
    refused("x and y must be tensors, not ndarray", given=(data[0].numpy(), data[1]))
    refused("steps must be a whole number", steps=2.5)
    loss = simulate.convert(nn.CrossEntropyLoss(), "e4m3", tell=None)
    refused("the loss is simulated", nodes=4, together=4, loss=loss)
    with pytest.raises(InputError, match=r"plan must be a simulate.Plan, not dict"):
        simulate.train(net(), data, plan={"steps": 3})


def test_what_is_sent_can_be_differentiated_twice():
    """A gradient penalty, whose numbers the codec holds."""
    gradients = []
    for codec in (None, "fp16"):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        nn.init.constant_(model[0].weight, 2.0)
        nn.init.constant_(model[1].weight, 0.5)
        if codec:
            simulate.pure_mode.attach(model, codec)
        x = torch.tensor([[1.5]], requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        gradients.append([each.grad.item() for each in model.parameters()])
    assert gradients[0] == gradients[1] != [0.0, 0.0]
