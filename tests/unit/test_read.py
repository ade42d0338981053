"""Readers of data sets, with small files in place of the real ones."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from thinwire import data
from thinwire.data import convert, read, sets, store
from thinwire.data.texts import Text, is_text
from thinwire.errors import DataError

RNG = np.random.default_rng(0)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """A function that replaces the files of a set; the set is then as large as they are."""
    monkeypatch.setattr(store, "where", lambda: tmp_path)
    monkeypatch.setattr(store, "present", lambda _: True)

    def put(name, contents, **changes):
        folder = tmp_path / name
        folder.mkdir()
        files = []
        for file, content in zip(sets.SETS[name].files, contents, strict=False):
            (folder / file.name).write_bytes(content)
            files.append(replace(file, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
        monkeypatch.setitem(sets.SETS, name, replace(sets.SETS[name], files=tuple(files), **changes))
        return folder

    return put


def idx(folder, array):
    path = folder / "idx"
    convert.write_idx(path, array)
    return path.read_bytes()


def test_idx_files_of_images(put, tmp_path):
    arrays = [RNG.integers(0, 256, shape, np.uint8) for shape in ((5, 28, 28), (5,), (3, 28, 28), (3,))]
    put("mnist", [idx(tmp_path, each) for each in arrays], train=5, test=3)
    for split, first in (("train", 0), ("test", 2)):
        images, labels = read.load("mnist", split)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(images.numpy(), arrays[first][:, None])
        assert np.array_equal(labels.numpy(), arrays[first + 1])


def test_batches_of_cifar(put):
    records = RNG.integers(0, 256, (12, 3073), np.uint8)
    put("cifar10", [part.tobytes() for part in np.split(records, 6)], train=10, test=2)
    for split, part in (("train", slice(0, 10)), ("test", slice(10, 12))):
        images, labels = read.load("cifar10", split)
        assert images.shape[1:] == (3, 32, 32)
        assert np.array_equal(images.numpy().reshape(-1, 3072), records[part, 1:])
        assert np.array_equal(labels.numpy(), records[part, 0])


def test_digits_are_stretched_and_split(put, tmp_path):
    images, labels = RNG.integers(0, 17, (10, 8, 8), np.uint8), RNG.integers(0, 10, 10, np.uint8)
    put("digits", [idx(tmp_path, images), idx(tmp_path, labels)], train=8, test=2)
    both = [read.load("digits", split) for split in ("train", "test")]
    stretched = torch.cat([each[0] for each in both]).numpy()[:, 0]
    assert np.array_equal(stretched, np.floor(images.astype(float) * 255 / 16 + 0.5).astype(np.uint8))
    assert np.array_equal(torch.cat([each[1] for each in both]).numpy(), labels)
    assert [len(each[1]) for each in both] == [8, 2]


def test_a_text_is_followed_by_itself(put):
    text = bytes(RNG.integers(0, 256, 1000, np.uint8))
    put("sotu", [text], train=899, test=99)
    for split, part in (("train", text[:900]), ("test", text[900:])):
        x, y = read.load("sotu", split)
        assert bytes(x.numpy()) == part[:-1]
        assert bytes(y.to(torch.uint8).numpy()) == part[1:]
        assert y.dtype == torch.int64
    assert is_text("sotu")
    assert not is_text("digits")
    moved = Text(x, y, 256).to("meta")
    assert (moved.x.device.type, moved.y.device.type, moved.classes) == ("meta", "meta", 256)
    assert (moved.x.dtype, len(moved)) == (torch.uint8, 99)


def test_damage_and_wrong_sizes_are_named(put):
    text = bytes(RNG.integers(0, 256, 1000, np.uint8))
    folder = put("sotu", [text], train=900, test=99)
    with pytest.raises(DataError, match=r"sotu has shape \(899,\), not \(900,\)"):
        read.load("sotu")
    (path,) = folder.iterdir()
    path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(DataError, match="is damaged: run `thinwire data fetch sotu`, which replaces it"):
        read.load("sotu", "test")


def test_a_set_is_fetched_only_if_asked_for(put, monkeypatch):
    put("sotu", [bytes(1000)], train=899, test=99)
    monkeypatch.setattr(store, "present", lambda _: False)
    fetched = []
    monkeypatch.setattr(store, "fetch", fetched.append)
    with pytest.raises(
        DataError, match=r"sotu is not in .*: run `thinwire data fetch sotu`, or pass fetch=True"
    ):
        data.load("sotu")
    assert len(data.load("sotu", fetch=True)[0]) == 899
    assert fetched == ["sotu"]
    with pytest.raises(DataError, match="unknown split 'all'; use train or test"):
        data.load("sotu", "all")


def test_texts_are_joined_by_year(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    out.mkdir()
    for name, text in (("1801.txt", b" later\n"), ("1790.txt", b"first "), ("notes.md", b"not this")):
        (raw / name).write_bytes(text)
    convert.join_texts(raw, out)
    assert (out / "sotu.txt").read_bytes() == b"first\n\nlater\n"
