"""Sharded models (FSDP2, HSDP) on real ranks over gloo: see `sharded_checks.py` for what they do."""

import pytest

WALL_S = 240
pytestmark = pytest.mark.timeout(WALL_S + 30)
SQUARE = ("replicas", "resharded", "gathered", "counts")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ()),
        (4, SQUARE),
        pytest.param(3, (), marks=pytest.mark.rest),
        pytest.param(4, (), marks=pytest.mark.rest),
    ],
)
def test_every_check_holds_on_every_rank(said, world, names):
    lines, complaints = said("sharded_program.py", world, *names, wall_s=WALL_S)
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    checks = {line["check"] for line in lines}
    assert len(lines) == world * len(checks), complaints
    assert checks == set(names) if names else len(checks) == (21 if world == 4 else 15)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_in_a_step_is_an_error_on_all_others(said, kind, when):
    lines, _ = said("sharded_fault_program.py", 4, kind, when, wall_s=60)
    assert {line["rank"]: line["said"] for line in lines} == dict.fromkeys((0, 2, 3), "CommError")
    assert max(line["seconds"] for line in lines) < 10 + 3
