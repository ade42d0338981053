"""What ranks are told when one of them is gone, late or wrong, in real processes; and that nothing hangs.

Scenarios are in `faults_program.py`, each in a process group of its own whose time-out is seven seconds.
Those of a family run at the same time, since they mostly wait; the driver ends what is left after 50 s.
"""

import pytest

WALL_S = 75
SAMPLE = {"programs": 8, "seed": 500, "jobs": 4}

pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize("family", ["killed", "training", "disagree", "ends", "steps"])
def test_every_surviving_rank_is_told_and_ends_by_itself(family, said):
    lines, complaints = said("faults_program.py", family, wall_s=WALL_S)
    scenarios = lines.pop(0)["scenarios"]
    alive = {
        (name, rank) for name, (world, dead) in scenarios.items() for rank in range(world) if rank not in dead
    }
    reports = {(each["scenario"], each["rank"]): each["wrong"] for each in lines if "wrong" in each}
    ended = {(each["scenario"], each["rank"]): each["status"] for each in lines if "status" in each}
    assert {who: wrong for who, wrong in reports.items() if wrong} == {}
    assert alive - reports.keys() == set(), f"said nothing; {complaints[-2000:]}"
    assert {who: status for who, status in ended.items() if who in alive and status != 0} == {}, complaints
    assert all(status is not None for status in ended.values()), "had to be ended"


@pytest.mark.rest
def test_random_programs_with_random_faults_end_as_promised(said):
    """A few of what `random_faults.py` draws; run it with more programs when faults are worked on."""
    options = (word for name, value in SAMPLE.items() for word in (f"--{name}", value))
    said("random_faults.py", *options, wall_s=WALL_S)
