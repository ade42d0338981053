"""Sub-batches in real processes: the numbers of one device, and what happens when a rank is gone."""

import pytest

WALL_S = 150
pytestmark = pytest.mark.timeout(WALL_S + 20)


@pytest.mark.parametrize("world", [2, *(pytest.param(each, marks=pytest.mark.rest) for each in (1, 3, 4))])
def test_every_check_holds_on_every_rank(world, said):
    lines, _ = said("sub_batch_program.py", world, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    for name in lines[0]["checks"]:
        found = [each for each in reports if each["check"] == name]
        assert len(found) == world
        assert len({each["digest"] for each in found}) == 1, f"{name}: ranks hold different bits"


@pytest.mark.rest
def test_survivors_are_told_when_a_rank_is_gone_or_passes_other_sub_batches(said):
    lines, _ = said("sub_batch_program.py", 3, "faults", wall_s=WALL_S)
    reports = [each for each in lines if "rank" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    said_by = {(each["check"], each["rank"]) for each in reports}
    assert said_by == {("killed", 0), ("killed", 2), *(("forgotten", rank) for rank in range(3))}
    assert [each["statuses"] for each in lines if "statuses" in each] == [[0, -9, 0], [0, 0, 0]]
