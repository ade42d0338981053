"""The store: records come back as they went in, and a file that is none is named."""

import hashlib
import json
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.errors import ThinwireError
from thinwire.study import Point, Record
from thinwire.study.store import APPLICATION, DEFAULT_PATH, Store

MADE_UP = Path(__file__).parents[1] / "report" / "made_up.py"
made_up = runpy.run_path(str(MADE_UP))
record, records, trial = made_up["record"], made_up["records"], made_up["trial"]
WRITER = """
import runpy, sys
from thinwire.study.store import Store
make = runpy.run_path(sys.argv[1])["record"]
first, count = map(int, sys.argv[3:])
with Store(sys.argv[2]) as store:
    for seed in range(first, first + count):
        store.put(make("int8", seed))
        print(seed, flush=True)
"""

OPENERS = """
import os, sys, time
from thinwire.study.store import Store
start = time.monotonic() + 0.1
children = []
for _ in range(4):
    if not (child := os.fork()):
        for turn in range(100):
            while time.monotonic() < start + turn * 0.005:
                pass
            Store(f"{sys.argv[1]}/{turn}").close()
        os._exit(0)
    children.append(child)
for child in children:
    if os.waitpid(child, 0)[1]:
        print("failed")
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.sqlite"


def test_records_come_back_as_they_went_in(path):
    put = records()
    with Store(path) as store:
        for each in put:
            store.put(each)
        assert store.get(trial("int8", 1)) == record("int8", 1)
        assert store.get(trial("int8", 99)) is None
    with Store(path) as store:
        assert sorted(store.records(), key=repr) == sorted(put, key=repr)


def test_a_trial_is_kept_once(path):
    with Store(path) as store:
        store.put(record())
        store.put(replace(record(), accuracy=0.5))
        assert [each.accuracy for each in store.records()] == [0.5]


def test_the_order_does_not_depend_on_who_came_first(tmp_path):
    orders = []
    for name, put in (("a", records()), ("b", records()[::-1])):
        with Store(tmp_path / name) as store:
            for each in put:
                store.put(each)
            orders.append(store.records())
    assert orders[0] == orders[1]


def test_studies_are_told_apart(path):
    with Store(path) as store:
        store.put(record())
        store.put(record(study="convergence"))
        assert store.studies() == ["convergence", "demo"]
        assert store.records("demo") == [record()]
        assert store.records("none") == []
        assert len(store.records()) == 2


def test_a_loss_that_is_not_a_number_is_kept(path):
    points = (Point(1, 0.1, 10, float("nan")), Point(2, 0.2, 20, float("inf")))
    with Store(path) as store:
        store.put(replace(record(), points=points))
        kept = store.get(trial()).points
    assert kept[0].loss != kept[0].loss
    assert kept[1].loss == float("inf")


def test_the_default_is_a_file_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        store.put(record())
    assert (tmp_path / DEFAULT_PATH).exists()
    assert os.listdir(tmp_path) == [str(DEFAULT_PATH)]  # noqa: PTH208


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    with Store(path) as store:
        assert store.records() == []


@pytest.mark.parametrize(
    "text", ["not a database, and longer than a header of one hundred bytes " * 4, "short"]
)
def test_a_file_that_is_no_store_is_left_alone(path, text):
    path.write_text(text)
    with pytest.raises(
        ThinwireError, match=r"records.sqlite is damaged or not a store .*move it away"
    ) as raised:
        Store(path)
    assert "\n" not in str(raised.value)
    assert path.read_text() == text


def test_a_database_of_another_program_is_left_alone(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (name)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ThinwireError, match=r"another program; name another file"):
        Store(path)
    assert path.read_bytes() == before


def test_a_newer_store_is_left_alone(path):
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION,)
    connection.close()
    with pytest.raises(ThinwireError, match=r"version 2, this thinwire reads version 1"):
        Store(path)


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_a_truncated_store_says_what_to_do(path, kept):
    with Store(path) as store:
        for each in records():
            store.put(each)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(ThinwireError, match=r"damaged .*move it away"), Store(path) as store:
        store.records()


def test_a_store_with_holes_in_it_never_gives_a_wrong_answer_quietly(path):
    with Store(path) as store:
        for each in records(seeds=(0,)):
            store.put(each)
        before = store.records()
    data, noticed = path.read_bytes(), 0
    starts = range(0, len(data), 1000)
    for start in starts:
        path.write_bytes(data[:start] + bytes(300) + data[start + 300 :])
        try:
            with Store(path) as store:
                assert store.records() == before  # the hole fell into free space
        except ThinwireError:
            noticed += 1
    assert noticed > 0.7 * len(starts)


def test_a_record_of_another_schema_is_named(path):
    with Store(path) as store:
        store.put(record())
    written = '{"trial": {}}'
    with sqlite3.connect(path) as connection:
        digest = hashlib.sha256(written.encode()).hexdigest()
        connection.execute("UPDATE records SET record = ?, digest = ?", (written, digest))
    connection.close()
    with (
        Store(path) as store,
        pytest.raises(ThinwireError, match=rf"record {trial().key} in .* cannot be read"),
    ):
        store.records()


def test_a_record_from_before_there_were_environments_is_read():
    old = json.loads(record().to_json())
    for name in ("environment", "command", "choice", "predicted_step_s"):
        del old[name]
    assert Record.from_json(json.dumps(old)) == replace(record(), environment={}, command="")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ThinwireError, match=r"cannot use the store .*missing.*folder exists"):
        Store(tmp_path / "missing" / "records.sqlite")
    with pytest.raises(ThinwireError, match="cannot use the store"):
        Store(tmp_path)


def start_writer(path, first, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, MADE_UP, path, str(first), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_loses_nothing_that_was_put(path):
    for _ in range(3):
        writer = start_writer(path, 0, 10**6)
        for _ in range(20):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
        with Store(path) as store:
            by_seed = {each.trial.seed: each for each in store.records()}
        assert set(range(last + 1)) <= by_seed.keys()
        assert all(each == record("int8", seed) for seed, each in by_seed.items())


def test_writers_at_the_same_time_do_not_disturb_each_other(path):
    writers = [start_writer(path, first, 10) for first in (0, 10, 20)]
    for each in writers:
        each.communicate(timeout=60)
    assert [each.returncode for each in writers] == [0, 0, 0]
    with Store(path) as store:
        assert [each.trial.seed for each in store.records()] == list(range(30))


def test_stores_opened_at_the_same_time_are_one(tmp_path):
    """A file may be seen before it was made a store, or after, never half-way."""
    opened = subprocess.run(
        [sys.executable, "-c", OPENERS, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert (opened.stdout, opened.stderr) == ("", "")


def test_only_the_trials_that_are_named_are_forgotten(path):
    first, second, third = record("int8"), record("int4"), record("fp32")
    with Store(path) as store:
        for each in (first, second):
            store.put(each)
        store.forget([first.trial, third.trial])
        assert store.records() == [second]
        assert store.get(first.trial) is None
