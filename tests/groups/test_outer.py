"""Outer loops in real processes: every method, streaming, overlapped, resumed, and ranks that come and go."""

import pytest

WALL_S = 300  # a quarter of a minute, unless kernels must be compiled first or other programs take the cores
pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize(
    "world",
    [2, pytest.param(3, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.rest)],
)
def test_every_check_holds_on_every_rank(world, said):
    lines, _ = said("outer_program.py", world, wall_s=WALL_S)
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    done = {(each["check"], each["rank"]) for each in reports}
    assert done == {(name, rank) for name in lines[0]["checks"] for rank in range(world)}
    assert len(lines[0]["checks"]) == 33


@pytest.mark.rest
def test_survivors_of_a_rank_are_told_and_go_on(said):
    lines, complaints = said("outer_faults_program.py", wall_s=200)
    scenarios = lines.pop(0)["scenarios"]
    ranks = {(name, rank): rank in dead for name, (world, dead) in scenarios.items() for rank in range(world)}
    reports = {(each["scenario"], each["rank"]): each["wrong"] for each in lines if "wrong" in each}
    assert {who: wrong for who, wrong in reports.items() if wrong} == {}
    assert reports.keys() == {who for who, is_dead in ranks.items() if not is_dead}, complaints[-2000:]
    ended = {(each["scenario"], each["rank"]): each["status"] for each in lines if "status" in each}
    assert ended == {who: -9 if is_dead else 0 for who, is_dead in ranks.items()}, complaints[-2000:]
