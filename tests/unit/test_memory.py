"""What a call keeps in memory besides its tensor: bounded by what it sends and receives, and used again."""

import pytest
import torch

from thinwire.runtimes import local
from thinwire.runtimes.arguments import all_reduce_job
from thinwire.runtimes.job import WINDOW
from thinwire.runtimes.plan import PIECE
from thinwire.runtimes.trace import trace
from thinwire.schedules import Buffers

NUMEL = 100_000
LIMIT = 1.5


def run(schedule, codec, world, pool, numel=NUMEL):
    tensors = [torch.randn(numel) for _ in range(world)]
    jobs = [
        all_reduce_job([x], codec, "avg", schedule, local.Rank(rank, world)) for rank, x in enumerate(tensors)
    ]
    for starts in zip(*(job.starts() for job in jobs), strict=True):
        local.lockstep([start(buffers) for start, buffers in zip(starts, pool, strict=True)])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("codec", ["int8/256", "int4/128", "onebit/512"])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
def test_buffers_are_bounded_by_the_bytes_that_move_and_are_used_again(schedule, codec, world):
    pool = [Buffers() for _ in range(world)]
    run(schedule, codec, world, pool)
    held = [buffers.nbytes for buffers in pool]
    for rank, nbytes in enumerate(held):
        moved = trace(NUMEL, codec, world, schedule, rank=rank)
        assert nbytes <= LIMIT * (moved.sent_nbytes + moved.received_nbytes)
    run(schedule, codec, world, pool)
    assert [buffers.nbytes for buffers in pool] == held


def test_a_large_tensor_holds_only_the_pieces_in_flight():
    numel = 3 * PIECE
    pool = [Buffers() for _ in range(2)]
    run("two_shot", "int8/256", 2, pool, numel)
    one = max(buffers.nbytes for buffers in pool)
    assert WINDOW * one <= 1.5 * WINDOW / 3 * trace(numel, "int8/256", 2, "two_shot").sent_nbytes * 2
