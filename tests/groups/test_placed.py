"""Placed networks in real processes: equal to one device, in branches, stages and with data parallelism."""

import pytest

WALL_S = 240
pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize(
    ("world", "checks"),
    [
        (2, "quick"),
        pytest.param(2, "slow", marks=pytest.mark.rest),
        pytest.param(4, "quick", marks=pytest.mark.rest),
        pytest.param(4, "slow", marks=pytest.mark.rest),
    ],
)
def test_every_check_holds_on_every_rank(world, checks, said):
    lines, _ = said("placed_program.py", world, checks, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    seen = {(each["check"], each["rank"]) for each in reports}
    wanted = {(name, rank) for name in lines[0]["checks"] for rank in range(world)}
    assert seen == wanted - {("dies", world - 1)}
    assert len(lines[0]["checks"]) == {"quick": 24, "slow": 3}[checks]
