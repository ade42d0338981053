"""The thread that looks after calls on a GPU, with events and a store of this test's own."""

import time
from datetime import timedelta

import pytest

from thinwire.errors import CommError
from thinwire.runtimes import side_channel, watchdog
from thinwire.runtimes.job import Call
from thinwire.runtimes.watchdog import MANY, Watchdog

CALL = Call("all_reduce", "int8/256", (1000,), "float32", "two_shot")
TIMEOUT_S = 0.2


class Event:
    def __init__(self, *, done):
        self.done, self.asked = done, 0

    def query(self):
        self.asked += 1
        return self.done


class SideChannel:
    timeout, rank, doing = timedelta(seconds=TIMEOUT_S), 1, "nothing yet"

    def __init__(self):
        self.alarms = []

    def alarm(self):
        self.alarms.append(self.rank)

    def alarmed(self):
        return self.alarms[0] if self.alarms else None

    def reports(self, mine):
        return f"; rank 0: was {mine}"


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.02)
    said, aborted, talk = [], [], SideChannel()
    made = Watchdog(talk, said.append, lambda: aborted.append(True))
    yield made, said, aborted, talk
    made.stop()


def wait_for(thing, most_s=5.0):
    end = time.monotonic() + most_s
    while not thing() and time.monotonic() < end:
        time.sleep(0.01)
    return thing()


def test_a_call_that_does_not_end_is_named_once_and_the_group_aborted(made):
    looks, said, aborted, talk = made
    looks.add(3, CALL, Event(done=True))
    looks.add(4, CALL, Event(done=False))
    looks.add(5, CALL, Event(done=False))
    assert wait_for(lambda: aborted)
    assert len(said) == 1
    assert said[0].startswith(
        f"call 4, {CALL} failed on rank 1: not done within the group's time-out of 0.2 s"
    )
    assert "rank 0: was call 4" in said[0]
    assert talk.alarms == [1]
    assert looks.fail("call 9", "NCCL says so") == said[0]  # what failed first counts


def test_what_another_rank_gave_up_is_given_up_here(made):
    looks, said, _, talk = made
    looks.add(7, CALL, Event(done=False))
    talk.alarms.append(0)
    assert wait_for(lambda: said)
    assert "call 7" in said[0]
    assert "rank 0 gave up" in said[0]


def test_events_are_asked_when_the_time_is_up_and_not_before(made):
    looks, said, _, _ = made
    event = Event(done=True)
    looks.add(1, CALL, event)
    time.sleep(TIMEOUT_S / 3)
    assert event.asked == 0
    assert wait_for(lambda: event.asked)
    time.sleep(0.1)
    assert event.asked == 1  # then it is let go of
    assert not said


def test_a_call_that_is_made_again_keeps_its_entry_and_gets_new_time(made):
    looks, said, _, _ = made
    event = Event(done=False)
    entry = looks.add(1, CALL, event)
    for number in range(2, 12):
        time.sleep(TIMEOUT_S / 5)
        assert looks.add(number, CALL, event, entry) is entry
    assert not said
    assert (entry.number, len(looks._entries)) == (11, 1)
    assert wait_for(lambda: said)
    assert said[0].startswith("call 11, ")


def test_many_calls_that_are_done_are_let_go_of_before_their_time(made):
    looks, said, _, _ = made
    looks._side.timeout = timedelta(seconds=60)
    waits = Event(done=False)
    looks.add(0, CALL, waits)
    for number in range(1, 5 * MANY):
        looks.add(number, CALL, Event(done=True))
    assert len(looks._entries) <= MANY + 1
    assert any(entry.event is waits for entry in looks._entries.values())
    assert not said


class Store:
    """A store in this process; `silent` ones answer nothing."""

    def __init__(self, *, silent=False):
        self.held, self.silent = {}, silent

    def add(self, key, amount):
        self.held[key] = self.held.get(key, 0) + amount
        return self.held[key]

    def set(self, key, value):
        self._answer()
        self.held[key] = value

    def get(self, key):
        return self.held[key]

    def check(self, keys):
        self._answer()
        return all(key in self.held for key in keys)

    def _answer(self):
        if self.silent:
            raise RuntimeError("connection lost")


@pytest.mark.parametrize(
    ("silent", "said"),
    [(False, "rank 1, 2 did not make this call in time"), (True, "the group's store does not answer")],
)
def test_ranks_are_blamed_only_if_the_store_says_that_they_are_missing(monkeypatch, silent, said):
    store = Store(silent=silent)
    monkeypatch.setattr(side_channel, "PrefixStore", lambda _prefix, inner: inner)
    monkeypatch.setattr(side_channel, "reports", lambda *_: "")
    side = side_channel.SideChannel(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(CommError, match=said):
        side.everyone(b"digest", 1, 31, lambda: "")
