"""Tensor, sequence and expert parallelism in real processes: the numbers of torch's styles."""

import pytest

WALL_S = 280
pytestmark = pytest.mark.timeout(WALL_S + 20)


@pytest.mark.parametrize(
    ("world", "part"),
    [
        (2, "styles"),
        pytest.param(3, "styles", marks=pytest.mark.rest),
        pytest.param(4, "styles", marks=pytest.mark.rest),
        pytest.param(2, "compiled", marks=pytest.mark.rest),
        pytest.param(2, "rows", marks=pytest.mark.rest),
        (3, "rows"),
    ],
)
def test_every_check_holds_on_every_rank(world, part, said):
    lines, _ = said("tensor_program.py", world, part, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    for name in lines[0]["checks"]:
        found = [each for each in reports if each["check"] == name]
        assert len(found) == world
        assert len({each["digest"] for each in found}) == 1, f"{name}: ranks hold different bits"
