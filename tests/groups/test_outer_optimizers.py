"""Optimizers that communicate, in real processes: what the published algorithms say, on every rank."""

import pytest

WALL_S = 280
pytestmark = pytest.mark.timeout(WALL_S + 20)


@pytest.mark.parametrize(
    ("world", "parts"),
    [
        (2, ("demo", "adam", "loco")),
        pytest.param(2, ("learning",), marks=pytest.mark.rest),
        pytest.param(3, ("demo",), marks=pytest.mark.rest),
        pytest.param(3, ("adam", "loco"), marks=pytest.mark.rest),
        pytest.param(4, ("demo", "adam", "loco"), marks=pytest.mark.rest),
    ],
)
def test_every_check_holds_on_every_rank(world, parts, said):
    lines, _ = said("outer_optimizer_program.py", world, *parts, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    for name in lines[0]["checks"]:
        mine = [each for each in reports if each["check"] == name]
        assert len(mine) == world
        assert len({each["digest"] for each in mine}) == 1, f"{name}: ranks hold different bits"


@pytest.mark.rest
@pytest.mark.parametrize(
    "kinds",
    [("demo",), ("one_bit_adam", "zero_one_adam", "loco")],
    ids=" ".join,
)
def test_survivors_of_a_dead_rank_raise(kinds, said):
    lines, _ = said("outer_optimizer_fault_program.py", *kinds, wall_s=WALL_S)
    cases = {(each["kind"], each["when"], each["rank"]): each["said"] for each in lines}
    assert len(cases) == len(kinds) * 2 * 2
    assert set(map(tuple, cases.values())) == {("CommError", "CommError")}, cases
