"""What stands in the way of recording steps; that they have the same bits is tested on a GPU."""

import re

import pytest
import torch
from torch import nn

from thinwire import simulate
from thinwire.errors import InputError
from thinwire.policy import Policy, Rule
from thinwire.simulate.layers import simulated
from thinwire.simulate.recorded import obstacle

GPU = torch.device("cuda")


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
        (nn.Linear(4, 4), None, "qsgd4", "qsgd4 rounds at random"),
        (nn.Linear(4, 4), None, "onebit+ef", "onebit\\+ef .*remembers"),
        (nn.Linear(4, 4), None, Policy("two", (Rule("fp32", last_step=3), Rule("qsgd4"))), "qsgd4"),
    ],
)
def test_obstacles_are_named(model, loss, wire, what):
    found = obstacle(GPU, model, loss, wire)
    assert found
    assert re.search(what, found)


def test_there_must_be_a_gpu():
    x = torch.randn(16, 4)
    with pytest.raises(InputError, match="on a GPU, not on cpu; leave out recorded=True"):
        simulate.train(nn.Linear(4, 2), (x, (x[:, 0] > 0).long()), steps=2, batch=4, recorded=True)
