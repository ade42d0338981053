"""The thread on which calls go on: wherever one fails, whoever waits for it is told."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import CommError, InputError
from thinwire.runtimes.job import Call, Job
from thinwire.runtimes.reports import Doing, reports
from thinwire.runtimes.work import Work
from thinwire.runtimes.worker import Running, Worker

CPU = torch.device("cpu")
PLACES = "begin", "first post", "first wait", "later post", "later wait", "after"


class Sent:
    """An exchange under way."""

    def __init__(self, fails):
        self.fails = fails

    def wait(self):
        fail(self.fails)


def fail(now):
    if now:
        raise CommError("the other rank is gone")


def running(fails, number):
    """A call of two exchanges that fails at one place."""

    def post(request, piece, exchange):
        del request, piece
        when = "later" if exchange else "first"
        fail(fails == f"{when} post")
        return Sent(fails == f"{when} wait")

    job = Job(Call("all_reduce", "fp32", (9,), "float32"), lambda: iter([lambda _: iter(range(2))]))
    job.after = lambda: fail(fails == "after")
    begin = lambda: fail(fails == "begin")  # noqa: E731
    return Running(job, Work(None, CPU), post, begin, lambda: False, False, number)


def test_a_call_that_is_refused_before_it_sends_leaves_the_lane_usable():
    worker = Worker([], lambda error, _: pytest.fail(f"gave up: {error}"), lambda: None)
    calls = running("", 0), running("", 1), running("", 2)

    def refuse():
        raise InputError("of another size")

    calls[1].begin = refuse
    for each in calls:
        worker.put(each)
    with pytest.raises(InputError, match="of another size"):
        calls[1].work.wait(10)
    assert calls[2].work.wait(10)
    assert worker.idle


def test_a_call_that_has_sent_something_cannot_be_taken_back():
    call = running("", 0)
    assert call.spares(InputError("x"))
    assert not call.spares(CommError("x"))
    call.sent = True
    assert not call.spares(InputError("x"))


@pytest.mark.parametrize("fails", PLACES)
def test_a_call_that_fails_anywhere_ends_and_so_does_the_one_behind_it(fails):
    told = []
    worker = Worker([], lambda error, whose: told.append(whose) or error, lambda: None)
    calls = running("", 0), running(fails, 1), running("", 2)
    worker.put(calls[0])
    assert calls[0].work.wait(10)
    for each in calls[1:]:
        worker.put(each)
    for each in calls[1:]:
        with pytest.raises(CommError, match="the other rank is gone"):
            each.work.wait(10)
    assert told == [calls[1]]
    assert worker.idle


def test_ranks_of_a_group_hear_of_one_another_as_the_user_counts_them():
    store, ranks = dist.HashStore(), [5, 2, 7]
    doing = [Doing(f"call {rank}", 1.0) for rank in ranks]
    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(lambda place: reports(store, place, ranks, doing[place]), range(3)))
    for place, (rank, heard) in enumerate(zip(ranks, told, strict=True)):
        assert heard.rank == rank
        assert heard.reports == {other: doing[i] for i, other in enumerate(ranks) if i != place}
