"""Policies: the first rule that matches takes a tensor, and nothing falls through."""

import copy
import pickle
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire import codecs, policy, schedules, zoo
from thinwire.codecs import Block
from thinwire.errors import PolicyError, ScheduleError
from thinwire.formats import Float, Table
from thinwire.policy import RECIPES, Ladder, Policy, Rule, TensorInfo

WEIGHT = TensorInfo("layers.0.weight", "weight", (300, 200))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_route_every_tensor_of_every_network(name):
    for network in zoo.MODELS:
        for row in RECIPES[name].explain(zoo.get(network)):
            codec = codecs.get(row["codec"])
            assert row["wire_nbytes"] == codec.for_shape(row["shape"]).nbytes(row["fp32_nbytes"] // 4)
            if row["schedule"] != "auto":
                assert not schedules.get(row["schedule"]).refuses(codec)


@pytest.mark.parametrize("name", RECIPES)
def test_a_policy_survives_its_file(name):
    assert policy.parse(tomllib.loads(RECIPES[name].to_toml())) == RECIPES[name]


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (Rule("fp32"), True),
        (Rule("fp32", name="layers.*.weight"), True),
        (Rule("fp32", name="*.bias"), False),
        (Rule("fp32", role="norm"), False),
        (Rule("fp32", min_numel=60_000), True),
        (Rule("fp32", min_numel=60_001), False),
        (Rule("fp32", max_numel=59_999), False),
        (Rule("fp32", min_ndim=3), False),
        (Rule("fp32", max_ndim=1), False),
        (Rule("fp32", first_step=5), False),
        (Rule("fp32", last_step=4), True),
    ],
)
def test_rules_look_at_name_role_size_and_step(rule, matches):
    assert rule.matches(WEIGHT, 4) == matches


def test_the_first_rule_wins():
    both = Policy("both", (Rule("int8/256", name="layers.*"), Rule("fp32")))
    assert both.route(WEIGHT).codec == "int8/256"
    assert both.route(TensorInfo("head.weight", "weight", (2, 2))).codec == "fp32"


def test_a_policy_shows_which_rule_takes_what(capsys):
    policy.get("int8").show(nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "weight" in line]
    assert "int8/256" in lines[0]
    assert "everything else" in lines[0]
    assert "fp32" in lines[1]
    assert "vectors are few bytes" in lines[1]


def test_a_tensor_that_no_rule_takes_is_an_error_that_names_it():
    with pytest.raises(PolicyError, match=r"layers\.0\.weight"):
        Policy("narrow", (Rule("int8/256", role="norm"),)).route(WEIGHT)


def test_steps_change_the_codec():
    hybrid = RECIPES["hybrid-steps"]
    assert [hybrid.route(WEIGHT, step).codec for step in (0, 499, 500)] == ["fp16", "fp16", "aps/e4m3"]


USUAL = [name for name, recipe in RECIPES.items() if recipe.rules[0].max_ndim == 1]


@pytest.mark.parametrize("name", USUAL)
def test_small_tensors_are_float32_up_to_just_under_the_limit(name):
    """Vectors whatever their size; matrices of 9,999 elements, but not of 10,000."""
    recipe = RECIPES[name]
    assert policy.SMALL == 10_000

    def codec(*shape):
        return recipe.route(TensorInfo("layers.0.weight", "weight", shape)).codec

    assert [codec(1_000_000), codec(99, 101), codec(9_999, 1)] == ["fp32"] * 3
    assert codec(100, 100) == codec(1000, 1000) != "fp32"


def test_hybrid_rules_are_asked_in_their_order():
    """Small tensors are float32 first of all; embeddings and the last layer are wide, the rest is not."""

    def route(name, role="weight", shape=(300, 200), step=0):
        return [
            RECIPES[recipe].route(TensorInfo(name, role, shape), step).codec
            for recipe in ("hybrid-layers", "hybrid-steps")
        ]

    assert route("layers.0.weight") == ["aps/e4m3", "fp16"]
    assert route("layers.0.weight", step=500) == ["aps/e4m3", "aps/e4m3"]
    for name in ("fc.weight", "net.fc.weight", "lm_head.weight", "classifier.1.weight"):
        assert route(name, step=500) == ["fp16", "aps/e4m3"], name
    assert route("tokens.weight", "embedding", step=500) == ["fp16", "aps/e4m3"]
    for step in (0, 500):
        assert route("fc.bias", "bias", (20_000,), step) == ["fp32", "fp32"]
        assert route("fc.weight", shape=(10, 99), step=step) == ["fp32", "fp32"]
        assert route("tokens.weight", "embedding", (99, 101), step) == ["fp32", "fp32"]


def test_roles_come_from_modules():
    net = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    assert [each.role for each in policy.describe(net)] == [
        "embedding", "weight", "bias", "norm", "norm", "norm", "norm",
    ]  # fmt: skip


def test_names_are_those_of_a_model_of_which_parts_are_compiled():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names = [each.name for each in policy.describe(net)]
    net[1] = torch.compile(net[1], backend="eager")
    assert [each.name for each in policy.describe(net)] == names
    assert [each.name for each in policy.describe(torch.compile(net, backend="eager"))] == names


def test_phases_change_where_steps_or_epochs_of_a_rule_begin_or_end():
    rules = (Rule("fp16", last_epoch=4), Rule("bf16", first_step=10, first_epoch=7), Rule("fp32"))
    warm = Policy("warm", rules)
    assert [warm.phase(0, epoch) for epoch in (0, 4, 5, 6, 7)] == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2)]
    assert [warm.phase(step, 0) for step in (9, 10)] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"rule": []}, "has no rules"),
        ({"rules": []}, "unknown key rules"),
        ({"rule": [{"codec": "fp32", "size": 3}]}, "unknown key size"),
        ({"rule": [{"name": "*"}]}, "needs a value for 'codec'"),
        ({"rule": [{"codec": "fp32", "role": "conv"}]}, "role 'conv'"),
    ],
)
def test_bad_policies_say_what_is_wrong(data, said):
    with pytest.raises(PolicyError, match=said):
        policy.parse(data)


def test_a_schedule_that_cannot_serve_the_codec_is_refused():
    with pytest.raises(ScheduleError, match="cannot serve int8/256"):
        Rule("int8/256", "native")


def test_a_name_may_be_a_recipe_a_spec_or_a_file(tmp_path):
    assert policy.get("onebit") is RECIPES["onebit"]
    assert policy.get("int4/64").route(WEIGHT).codec == "int4/64"
    path = tmp_path / "mine.toml"
    path.write_text(RECIPES["fp8"].to_toml())
    assert policy.get(str(path)) == RECIPES["fp8"]
    with pytest.raises(PolicyError, match=r"^'int4/x': a block is a number of elements, not 'x'$"):
        policy.get("int4/x")
    with pytest.raises(PolicyError, match=r"^unknown recipe or codec 'itn8'; did you mean 'int8'"):
        policy.get("itn8")


# Codecs and formats of users

MINE = Table((-1.0, -0.2, 0.0, 0.2, 1.0), label="mine")


def test_rules_take_codecs_and_formats_and_keep_their_specs():
    given = Policy(
        "p", (Rule(MINE, min_ndim=2), Rule(Block(MINE, 64, feedback="float32")), Rule(Float(5, 2)))
    )
    first, second, third = (rule.codec for rule in given.rules)
    assert codecs.get(first) == Block(MINE)
    assert codecs.get(second) == Block(MINE, 64, feedback="float32")
    assert third == "e5m2"
    assert policy.get(MINE).rules[-1].codec == first
    assert policy.get(Block("int8", 256)) == policy.get("int8/256")
    assert policy.parse(tomllib.loads(given.to_toml())) == given
    assert replace(given.rules[0], name="*.weight").codec == first
    ladder = Ladder((MINE, "int8/256", Block("int16", 64)))
    assert ladder.levels == (first, "int8/256", "int16/64")
    with pytest.raises(PolicyError, match="a Codec or a Format, not int"):
        policy.get(8)


def test_policies_of_own_codecs_travel_to_other_processes():
    """There the spec alone would mean nothing."""
    given = Policy("p", (Rule("ladder"), Rule(Block(MINE, 64))), Ladder((MINE, "int8/256")))
    program = (
        "import pickle, sys; from thinwire import codecs; given = pickle.load(sys.stdin.buffer); "
        "specs = [*given.ladder.levels, given.rules[1].codec]; print(*specs); "
        "print(codecs.get(specs[0]).format.numbers)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(given), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    names, numbers = done.stdout.decode().splitlines()
    assert names.split() == [*given.ladder.levels, given.rules[1].codec]
    assert numbers == str(MINE.numbers)
    assert pickle.loads(pickle.dumps(given)) == given == copy.deepcopy(given)


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"patience": 0}, {"window": 1}, {"calm": -1}, {"levels": ("int8/256",)}]
)
def test_a_ladder_that_cannot_be_climbed_is_refused(wrong):
    right = {"levels": ("int4/128", "int8/256"), "every": 1, "patience": 1, "window": 2, "calm": 0}
    Ladder(**right)
    with pytest.raises(
        PolicyError, match="a ladder needs 2 levels or more, every and patience >= 1, window >= 2"
    ):
        Ladder(**{**right, **wrong})
