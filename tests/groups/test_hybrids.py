"""Models spread by a plan over real processes: the numbers of one device, on every rank."""

import pytest

WALL_S = 280
pytestmark = pytest.mark.timeout(WALL_S + 20)


@pytest.mark.parametrize(
    ("world", "part"),
    [
        (4, "quick"),
        pytest.param(4, "more", marks=pytest.mark.rest),
        pytest.param(3, "quick", marks=pytest.mark.rest),
        pytest.param(8, "quick", marks=pytest.mark.rest),
    ],
)
def test_every_check_holds_on_every_rank(world, part, said):
    lines, err = said("hybrids_program.py", world, part, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    for name in lines[0]["checks"]:
        of_ranks = [each for each in reports if each["check"] == name]
        assert len(of_ranks) == world
        assert len({each["digest"] for each in of_ranks}) == 1, f"{name}: ranks hold different bits"
    assert len(set(err.splitlines())) < 40, "one rank tells what was done"
