"""Which layers get few bits, which get them back, and when a whole network goes on to more."""

import math

import pytest
import torch
from torch import nn

from thinwire import FormatError, InputError
from thinwire.policy import Ladder as CodecLadder
from thinwire.simulate import Quantizer, Stages
from thinwire.simulate.assignment import (
    HIGH,
    LOW,
    SHIFTED,
    Promotion,
    bits,
    demote,
    groups,
    promote,
    recipe,
)
from thinwire.simulate.conversion import convert, describe
from thinwire.simulate.counters import Counters
from thinwire.simulate.ladder import PrecisionLadder, PrecisionLadderState, diversity, muppet


class Net(nn.Module):
    """Groups: stem (nothing before), conv1 with bn and relu, conv2 with pool, fc, and attention."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Tanh()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.MaxPool2d(2)
        )
        self.flat = nn.Flatten()
        self.fc = nn.Linear(8, 6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.fc(self.flat(self.features(self.stem(x))))[:, None]
        return self.mix(x, x, x)[0]


EXAMPLE = torch.zeros(2, 1, 8, 8)
SIZES = {
    "": 2 * 64,
    "features.0": (2 * 4 * 36 + 40) + (2 * 4 * 36 + 8),
    "features.3": (2 * 2 * 16 + 74) + 2 * 2 * 4,
    "fc": 2 * 6 + 54,
    "mix": 2 * 6 + 2 + 4 * (36 + 6),  # what it puts out are values and weights
}


def test_groups_begin_at_layers_with_products():
    net = Net().train()
    mean = net.features[1].running_mean.clone()
    parts = groups(net, EXAMPLE)
    assert {each.name: each.size for each in parts} == SIZES
    assert {each.name: [member.name for member in each.members] for each in parts} == {
        "": ["stem"],
        "features.0": ["features.0", "features.1", "features.2"],
        "features.3": ["features.3", "features.4", "flat"],
        "fc": ["fc"],
        "mix": ["mix"],
    }
    assert parts[1].members[2].size == parts[2].members[2].size == 0  # in place, and a view
    assert net.training
    assert net.features[1].training
    assert torch.equal(net.features[1].running_mean, mean)
    assert not any(module._forward_hooks for module in net.modules())


def demoted(share):
    return [name for name, stages in demote(Net(), EXAMPLE, share).items() if stages == LOW and name in SIZES]


def test_the_largest_groups_are_demoted_first():
    total, order = sum(SIZES.values()), ["features.0", "mix", "features.3", "fc"]
    assert sorted(order, key=lambda name: -SIZES[name]) == order
    held = 0
    assert demoted(0) == []
    for i, name in enumerate(order):
        before, held = held, held + SIZES[name]
        assert set(demoted(held / total)) == set(demoted((before + 1) / total)) == set(order[: i + 1])
    assert set(demoted(1)) == set(order)
    assigned = demote(Net(), EXAMPLE, 0.1)
    assert assigned["features.1"] == assigned["features.2"] == LOW
    assert assigned["features.4"] == assigned["stem"] == HIGH


def test_demotion_says_what_is_wrong():
    with pytest.raises(InputError, match="share must be from 0 to 1, not 2"):
        demote(Net(), EXAMPLE, 2)
    with pytest.raises(InputError, match="no linear, convolutional or attention layer"):
        demote(nn.Sequential(nn.ReLU()), EXAMPLE, 0.5)


def test_mean_bits():
    net, low, high = Net(), Stages.uniform("e4m3"), Stages.uniform("e6m9")
    assert bits(net, {}, EXAMPLE) == 16
    assert bits(net, demote(net, EXAMPLE, 0, low, high), EXAMPLE) == 16
    part = SIZES["features.0"] / sum(SIZES.values())
    mean = bits(net, demote(net, EXAMPLE, 0.1, low, high), EXAMPLE)
    assert math.isclose(mean, 16 - 8 * part)
    # of a layer in LOW, outputs, errors and parameters have 8 bits, gradients of parameters 16
    layer = nn.Sequential(nn.Linear(3, 5))
    assert bits(layer, {"0": LOW}, torch.zeros(2, 3)) == (10 * 16 + 20 * 24) / 60


def test_layers_that_an_assignment_leaves_out_have_the_bits_of_the_rest():
    layer, x = nn.Sequential(nn.Linear(3, 5)), torch.zeros(2, 3)
    assert bits(layer, {}, x, high=Stages()) == 32
    assert bits(layer, {"0": LOW}, x, high=Stages()) == bits(layer, {"0": LOW}, x)


def test_default_formats():
    assert SHIFTED.max == 448 / 16
    assert SHIFTED.min_subnormal == 2.0**-13
    assert SHIFTED.round(torch.tensor([1e9, -1e9])).tolist() == [28, -28]
    assert [LOW.forward.bits, LOW.backward.bits, LOW.gradient.bits, HIGH.forward.bits] == [8, 8, 16, 16]


def count(counters, name, share):
    x = torch.ones(1000)
    x[: int(share * 1000)] = 100
    counters.note(name, SHIFTED, x, SHIFTED.round(x))


def test_layers_that_overflow_are_promoted_once():
    counters, promotion = Counters(), Promotion(threshold=0.01)
    count(counters, "a/input", 0.01)
    count(counters, "a/error", 0.5)
    count(counters, "b/weight", 0.011)
    count(counters, "c/heads/input_q", 0.2)
    assert promotion.look(counters) == ["b", "c"]
    for _ in range(3):
        count(counters, "a/input", 0.0)
    count(counters, "b/weight", 0.5)
    assert promotion.look(counters) == []
    assert promotion.look(counters) == []
    count(counters, "a/input", 0.02)  # of all 5000 that is little; since the last look it is not
    assert promotion.look(counters) == ["a"]
    assert promotion.promoted == {"a", "b", "c"}


def test_promotion_goes_on_after_counters_were_cleared():
    counters, promotion = Counters(), Promotion()
    for _ in range(3):
        count(counters, "a/output", 0.0)
    assert promotion.look(counters) == []
    counters.clear()
    count(counters, "a/output", 0.1)
    assert promotion.look(counters) == ["a"]


def test_ranks_promote_the_same_layers():
    shares = ({"a": 0.5, "b": 0.0, "c": 0.0}, {"c": 0.0, "b": 0.5, "a": 0.0})
    seen = []
    for rank in shares:
        counters = Counters()
        for layer, share in rank.items():
            count(counters, f"{layer}/input", share)
        Promotion().look(counters, lambda x: seen.append(x) or x)
    largest = torch.stack(seen).amax(0)
    for rank in shares:
        counters = Counters()
        for layer, share in rank.items():
            count(counters, f"{layer}/input", share)
        assert Promotion().look(counters, lambda x: largest) == ["a", "b"]  # noqa: ARG005


def test_a_promoted_layer_overflows_no_more():
    assignment, counters = {"fc": LOW}, Counters()
    x = torch.full((10,), 100.0)
    for expected in (["fc"], []):
        Quantizer(assignment["fc"].forward, name="fc", counters=counters)(x)
        counters.note("fc/output", assignment["fc"].forward.format, x, assignment["fc"].forward.round(x))
        promoted = Promotion().look(counters)
        assert promoted == expected
        assignment = promote(assignment, promoted)
        counters.clear()


def test_an_assignment_is_a_recipe():
    made = recipe({"fc": LOW, "features.0": HIGH}, name="mine")
    assert (made.name, made.stages) == ("mine", HIGH)
    assert [(rule.name, rule.stages) for rule in made.rules] == [("fc", LOW), ("features.0", HIGH)]


def test_a_layer_may_be_the_whole_model_and_a_module_may_be_there_twice():
    assert [each.name for each in groups(nn.Linear(2, 3), torch.zeros(1, 2))] == ["model"]
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [each.size for each in groups(net, torch.zeros(5, 2))] == [6 + 3 * 10, 6 + 10]


def test_training_from_low_to_high():
    torch.manual_seed(0)
    net, counters, promotion = Net(), Counters(), Promotion()
    x = torch.randn(2, 1, 8, 8)
    assignment = demote(net, x, 1.0)
    convert(net, recipe(assignment), counters=counters, tell=None)
    with torch.no_grad():
        net.fc.weight[0] = 50.0
    net(x).sum().backward()
    promoted = promotion.look(counters)
    assert promoted == ["fc", "mix"]  # what fc puts out is what attention takes in
    convert(net, recipe(promote(assignment, promoted)), tell=None)
    counters.clear()
    net(x)
    assert promotion.look(counters) == []
    assert {row.name: row.stages for row in describe(net)}["fc"] == HIGH
    assert net.features[0].stages == LOW
    overflow = {name: each["overflow"] + each["saturation"] for name, each in counters.read().items()}
    assert overflow["fc/weight"] == overflow["fc/output"] == 0


def test_muppet_rounds_operands_alone():
    for level, spec in zip(muppet(("int8", "fp32")), ("int8", None), strict=True):
        assert level == Stages(forward=spec, backward=spec)


def test_thresholds_are_those_of_muppet():
    thresholds = [PrecisionLadder().threshold(epoch) for epoch in (0, 10, 20, 30)]
    assert thresholds == [1 + 1.5 * math.exp(-x) for x in (0, 1, 2, 3)]
    assert [round(each, 2) for each in thresholds] == [2.5, 1.55, 1.2, 1.07]
    ladder = CodecLadder(("int8", "fp32"))
    assert thresholds == [ladder.threshold(epoch) for epoch in (0, 10, 20, 30)]


def test_diversity_of_equal_and_of_orthogonal_gradients():
    state = PrecisionLadderState()
    for i in range(3):
        state.look({"same": torch.ones(5), "apart": torch.eye(3)[i], "rests": torch.zeros(2)}, epoch=i)
    assert math.isclose(state.last, (3 * 5 / 45 + 3 / 3) / 2, rel_tol=1e-6)
    assert diversity(torch.tensor([4.0]), [torch.tensor([1.0, 1.0])]).item() == 2


def test_diversity_of_half_precision_gradients_is_computed_in_single():
    """The squares of 300 numbers of 100 are beyond float16."""
    state = PrecisionLadderState()
    for i in range(3):
        state.look({"fc": torch.full((300,), 100.0, dtype=torch.float16)}, epoch=i)
    assert math.isclose(state.last, 1 / 3, rel_tol=1e-6)


def gradients_of(wanted):
    """Three gradients with a given diversity from 1/3 up: of length 1, turned by -a, 0 and a in a plane."""
    # |sum|**2 = (1 + 2 cos a)**2 = 3 / wanted
    angle = math.acos((math.sqrt(3 / wanted) - 1) / 2)
    return [torch.tensor([math.cos(x), math.sin(x)]) for x in (-angle, 0.0, angle)]


def feed(state, wanted, epoch):
    """One epoch with a given diversity of the last three gradients."""
    state._seen = [{"fc": each} for each in gradients_of(wanted)[:2]]
    return state.look([("fc", gradients_of(wanted)[2]), ("frozen", None)], epoch)


def test_two_violations_make_a_level():
    state = PrecisionLadderState()
    # at epoch 10 a fall by 1.55 is allowed
    assert not feed(state, 1.0, 9)
    assert not feed(state, 1 / 1.54, 10)
    assert (state.level, state.violations) == (0, 0)
    assert not feed(state, 1 / 1.56, 10)
    assert state.violations == 1
    assert not feed(state, 0.99, 10)
    assert state.violations == 1
    assert feed(state, 1 / 1.56, 10)
    assert (state.level, state.violations, state.largest) == (1, 0, 0.0)
    assert state.stages == muppet()[1]
    # the maximum is that of this level: what was a violation is none
    assert not feed(state, 1 / 1.56, 11)
    assert state.violations == 0


def test_the_last_level_is_the_last():
    levels = muppet(("int8~fit", "fp32"))
    state = PrecisionLadderState(ladder=PrecisionLadder(levels, patience=1))
    feed(state, 2.0, 50)
    assert feed(state, 1.0, 50)
    assert str(state.stages) == "fp32"
    feed(state, 2.0, 50)
    assert not feed(state, 1.0, 50)
    assert state.level == 1


def test_bad_gradients_decide_nothing():
    state = PrecisionLadderState(ladder=PrecisionLadder(patience=1))
    feed(state, 2.0, 50)
    for bad in (float("nan"), float("inf")):
        assert not state.look({"fc": torch.tensor([bad, 1.0])}, 50)
    assert (state.level, state.violations) == (0, 0)


def test_nothing_is_said_before_the_window_is_full():
    state, gradient = PrecisionLadderState(), torch.ones(2)
    for epoch in range(2):
        state.look({"fc": gradient}, epoch)
        assert math.isnan(state.last)
    gradient.zero_()  # what was seen is a copy
    state.look({"fc": torch.ones(2)}, 2)
    assert math.isclose(state.last, 1 / 3, rel_tol=1e-6)


def test_all_ranks_decide_on_one_number():
    state = PrecisionLadderState(ladder=PrecisionLadder(patience=1))
    feed(state, 2.0, 50)
    agreed = state.look({"fc": torch.ones(2)}, 50, agree=lambda x: torch.full_like(x, 0.5))
    assert agreed
    assert state.last == 0.5


def test_a_saved_climb_goes_on():
    state, other = PrecisionLadderState(), PrecisionLadderState()
    feed(state, 1.0, 10)
    feed(state, 0.5, 10)
    other.load_state_dict(state.state_dict())
    assert (other.level, other.largest, other.violations) == (0, state.largest, 1)
    assert torch.equal(other._seen[2]["fc"], state._seen[2]["fc"])
    assert feed(other, 0.5, 10)


def test_a_ladder_says_what_is_wrong():
    with pytest.raises(FormatError, match="window >= 2"):
        PrecisionLadder(window=1)
    state = PrecisionLadderState()
    for name in "ab":
        state.look({name: torch.ones(1)}, 0)
    with pytest.raises(InputError, match="no layer has had a gradient in every epoch"):
        state.look({"c": torch.ones(1)}, 0)


@pytest.mark.parametrize("name", ["0", "a[0]", "a*"])
def test_layers_are_found_by_name_whatever_it_is(name):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 8))
    model.add_module("ab", nn.Linear(8, 2))
    convert(model, recipe(promote(demote(model, torch.zeros(1, 4), 1.0), ["ab"])), tell=None)
    assert [each.stages for each in describe(model)] == [LOW, HIGH]


class Compiled(nn.Module):
    """As torch.compile makes them."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, x):
        return self._orig_mod(x)


def test_compiled_models_have_the_names_of_plain_ones():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assigned = demote(Compiled(model), torch.zeros(1, 4), 0.5)
    assert assigned == demote(model, torch.zeros(1, 4), 0.5) == {"0": LOW, "1": HIGH}


class Tagged(nn.Module):
    """A layer that returns a text beside its result."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return {"result": self.fc(x), "unit": "metres", "raw": b"bytes"}


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.tagged, self.head = Tagged(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.tagged(x)["result"])


def test_layers_may_return_texts_beside_tensors():
    assert [each.name for each in groups(Reads(), torch.ones(1, 4))] == ["tagged.fc", "head"]


def test_the_least_ladder_of_precisions_is_one_level_two_epochs_and_one_violation():
    level = PrecisionLadder().levels[:1]
    PrecisionLadder(level, window=2, patience=1)
    for wrong in ({"levels": ()}, {"window": 1}, {"patience": 0}, {"window": 2.0}, {"patience": True}):
        with pytest.raises(FormatError, match="a level or more, and whole numbers window >= 2"):
            PrecisionLadder(**{"levels": level, **wrong})
