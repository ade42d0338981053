"""What `thinwire bench parallel` trains, in real processes: the gradients of one device, in every method."""

import pytest

WALL_S = 240  # some seconds, unless kernels must be compiled first or other programs take the cores
pytestmark = pytest.mark.timeout(WALL_S + 30)


@pytest.mark.rest
@pytest.mark.parametrize("world", [2, 4])
def test_every_arm_trains_the_network_of_one_device(said, world):
    lines, _ = said("bench_parallel_program.py", world, wall_s=WALL_S)
    assert {(line["check"], line["rank"]): line["wrong"] for line in lines if line["wrong"]} == {}
    assert len(lines) == 9 * world
