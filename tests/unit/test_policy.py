"""Policies: the first rule that matches takes a tensor, and nothing falls through."""

import tomllib

import pytest
from torch import nn

from thinwire import codecs, policy, schedules, zoo
from thinwire.errors import PolicyError, ScheduleError
from thinwire.policy import RECIPES, Policy, Rule, Tensorlike

WEIGHT = Tensorlike("layers.0.weight", "weight", (300, 200))


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
    assert both.route(Tensorlike("head.weight", "weight", (2, 2))).codec == "fp32"


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


def test_roles_come_from_modules():
    net = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    assert [each.role for each in policy.describe(net)] == [
        "embedding", "weight", "bias", "norm", "norm", "norm", "norm",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"rule": []}, "has no rules"),
        ({"rules": []}, "unknown key rules"),
        ({"rule": [{"codec": "fp32", "size": 3}]}, "unknown key size"),
        ({"rule": [{"name": "*"}]}, "needs a codec"),
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
    with pytest.raises(PolicyError, match="no recipe"):
        policy.get("int99999")
