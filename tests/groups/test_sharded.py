"""Sharded models (FSDP2, HSDP) on real ranks over gloo: see `sharded_checks.py` for what they do."""

import pytest

WALL_S = 150
pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.rest), 4])
def test_every_check_holds_on_every_rank(said, world):
    lines, complaints = said("sharded_program.py", world, wall_s=WALL_S)
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    checks = {line["check"] for line in lines}
    assert len(lines) == world * len(checks), complaints
    assert len(checks) == (13 if world == 4 else 11)
