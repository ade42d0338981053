"""What stands in the way of recording steps; that they have the same bits is tested on a GPU."""

import copy
import re

import pytest
import torch
from torch import nn

from thinwire import simulate
from thinwire.errors import InputError
from thinwire.policy import Policy, Rule
from thinwire.simulate.cuda_graph import Backward, Update, obstacle
from thinwire.simulate.layers import simulated

GPU = torch.device("cuda")


EXACT = {
    spec: simulate.Stages.uniform(spec, simulate.Arithmetic(order="exact")) for spec in ("e4m3", "int8~fit")
}


def converted(recipe, **options):
    return simulate.convert(nn.Sequential(nn.Linear(4, 4)), recipe, tell=None, **options)


@pytest.mark.parametrize(
    "wire", ["fp32", "aps/e4m3", Policy("two", (Rule("int8", last_step=3), Rule("bf16")))]
)
def test_what_repeats_has_no_obstacle(wire):
    assert obstacle(GPU, converted("e4m3"), nn.functional.cross_entropy, wire) is None


@pytest.mark.parametrize(
    ("model", "loss", "wire", "what"),
    [
        (converted("e4m3~sr"), None, "fp32", "0 rounds at random"),
        (converted("e4m3", counters=simulate.Counters()), None, "fp32", "has counters"),
        (nn.Sequential(simulate.Quantizer("e5m2~sr")), None, "fp32", "0 rounds at random"),
        (
            nn.Linear(4, 4),
            simulated(nn.CrossEntropyLoss(), simulate.Stages(loss="e5m2~sr")),
            "fp32",
            "the model rounds at random",
        ),
        (
            converted("positnn/8+quire"),
            None,
            Policy("one", (Rule("fp32", "low_rank/4"),)),
            "low_rank/4 starts",
        ),
        (nn.BatchNorm1d(4, momentum=None), None, "fp32", "the model has a momentum"),
        (converted(EXACT["e4m3"]), None, "fp32", "0 has exact sums"),
        (converted(EXACT["int8~fit"]), None, "fp32", "0 has exact sums"),
        (nn.Linear(4, 4), None, "qsgd4", "qsgd4 rounds at random"),
        (nn.Linear(4, 4), None, "onebit+ef", "onebit\\+ef .*keeps residuals"),
        (nn.Linear(4, 4), None, Policy("two", (Rule("fp32", last_step=3), Rule("qsgd4"))), "qsgd4"),
    ],
)
def test_obstacles_are_named(model, loss, wire, what):
    reason = obstacle(GPU, model, loss, wire)
    assert reason
    assert re.search(what, reason)


def test_exact_sums_of_known_numbers_are_no_obstacle():
    assert obstacle(GPU, converted("positnn/8+quire")) is None
    assert obstacle(GPU, converted("gupta/4.12+exact+clip")) is None
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    reason = obstacle(GPU, simulate.convert(attention, "positnn/8+quire", tell=None))
    assert reason
    assert "exact sums" in reason


def test_what_decides_a_step_is_part_of_its_key(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    net = converted("e4m3")
    x, y = torch.randn(8, 4), torch.arange(8) % 4
    backward = Backward(simulate.Nodes(net, 2), None, 1)

    def key():
        return tuple(backward._state((x, y)))

    keys = [key()]
    assert keys[0] == key()
    simulate.convert(net, "e5m2", tell=None)
    keys.append(key())
    net.eval()
    keys.append(key())
    net[0].weight.data = net[0].weight.data.clone()
    keys.append(key())
    backward._scale = 2.0
    keys.append(key())
    assert len(set(keys)) == 5


def test_what_decides_an_update_is_part_of_its_key(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = simulate.SGD([parameter], 0.1, 0.9)
    update = Update(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    keys = [tuple(update._state())]
    optimizer.step()
    assert keys == [tuple(update._state())]
    for name, value in (("lr", 0.2), ("momentum", 0.5), ("sum_of", 4)):
        optimizer.param_groups[0][name] = value
        keys.append(tuple(update._state()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    keys.append(tuple(update._state()))
    parameter.grad = torch.ones(3)
    keys.append(tuple(update._state()))
    assert len(set(keys)) == 6


def test_there_must_be_a_gpu():
    x = torch.randn(16, 4)
    with pytest.raises(InputError, match="on a GPU, not on cpu; leave out recorded=True"):
        simulate.train(nn.Linear(4, 2), (x, (x[:, 0] > 0).long()), steps=2, batch=4, recorded=True)
