"""Training with `thinwire.attach`, in real processes: replicas stay equal with every recipe, runs resume."""

import pytest

WALL_S = 300  # half a minute, unless kernels must be compiled first or other programs take the cores
pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize(
    ("program", "world"),
    [
        pytest.param("ddp_program.py", 2, marks=pytest.mark.rest),
        ("ddp_program.py", 3),
        ("attach_program.py", 4),
    ],
)
def test_every_check_holds_on_every_rank(program, world, said):
    lines, _ = said(program, world, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    for name in lines[0]["checks"]:
        matching = [each for each in reports if each["check"] == name]
        assert len(matching) == world
        assert len({each["digest"] for each in matching}) == 1, f"{name}: replicas differ"
