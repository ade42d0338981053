"""Collectives over gloo, in real processes: for every schedule the bits of ranks in one process.

Ranks are started once for each number of them, by fork or by spawn; the checks are in `gloo_program.py`.

    THINWIRE_FULL=1 python -m pytest tests/groups/test_gloo.py

checks every schedule with every codec on 1, 2, 3, 4, 5 and 8 ranks instead, which takes some minutes.
"""

import os

import pytest

FULL = os.environ.get("THINWIRE_FULL", "0") not in ("", "0")
WALL_S = 900 if FULL else 300  # two minutes, unless other programs take the cores
WORLDS = {"fork": [1, 2, 4, 5, 8], "spawn": [3]} if FULL else {"fork": [1, 2, 4], "spawn": [3]}
QUICK = (1, 3)

pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.parametrize(
    ("method", "world"),
    [
        pytest.param(method, world, marks=[] if world in QUICK else pytest.mark.rest)
        for method, worlds in WORLDS.items()
        for world in worlds
    ],
)
def test_every_check_holds_on_every_rank(method, world, said):
    lines, _ = said("gloo_program.py", method, world, *(["full"] if FULL else []), wall_s=WALL_S)
    names = lines[0]["checks"]
    reports = [each for each in lines if "check" in each]
    assert {(each["check"], each["rank"]): each["wrong"] for each in reports if each["wrong"]} == {}
    assert {each: sum(report["check"] == each for report in reports) for each in names} == dict.fromkeys(
        names, world
    )
    digests = {name: {each["digest"] for each in reports if each["check"] == name} for name in names}
    assert [name for name, each in digests.items() if len(each) > 1] == [], "ranks hold different bits"
