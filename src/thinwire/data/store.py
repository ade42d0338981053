"""The cache: where sets are stored, whether they are complete, and how they are fetched."""

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.data.sets import SETS, DataSet, File, get
from thinwire.data.sources import Folder, Progress, Source, unpack
from thinwire.errors import DataError, ThinwireError

RECORD = "source.json"
SCRATCH = ".fetch-"
STALE_S = 24 * 3600
TIMEOUT_S = 20.0
#: What a source that does not work may raise.
FAILURES = (
    ThinwireError,
    OSError,
    HTTPException,
    tarfile.TarError,
    EOFError,
    zlib.error,
    ValueError,
    KeyError,
)


def where() -> Path:
    """Return the cache folder: $THINWIRE_DATA, else thinwire/data in $XDG_CACHE_HOME, else in ~/.cache.

    >>> where().is_absolute()
    True
    """
    if chosen := os.environ.get("THINWIRE_DATA"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "thinwire" / "data"


def present(name: str) -> bool:
    """Whether every file of a set is in the cache with its size; `check` reads them too."""
    folder = where() / get(name).name
    return all(_size(folder / file.name) == file.nbytes for file in get(name).files)


def check(name: str) -> dict[str, str]:
    """Return for each file of a set "ok", or what is wrong with it in the cache."""
    folder = where() / get(name).name
    return {file.name: fault(file, folder / file.name) or "ok" for file in get(name).files}


def fault(file: File, path: Path) -> str | None:
    """Say what is wrong with a file; None if it is right."""
    size = _size(path)
    if size is None:
        return "missing"
    if size != file.nbytes:
        return f"{size:,} bytes, not {file.nbytes:,}"
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return None if digest == file.sha256 else f"its sha256 is {digest[:12]}..., not {file.sha256[:12]}..."


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def fetch(
    name: str,
    progress: Progress | None = None,
    *,
    folder: str | Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Fetch a set into the cache and return its folder there. A set that is complete is left alone.

    Sources are tried in order until one has files with the right checksums. With `folder`, only that folder
    is searched, for any files that a source of the set would have fetched. `progress(what, done, total)` is
    called with counts of bytes. Several processes may fetch at once: each works in its own folder, and moves
    complete files into place.
    """
    wanted = get(name)
    if set(check(name).values()) == {"ok"}:
        return where() / name
    cache = _writable_cache()
    _sweep(cache)
    sources = wanted.sources if folder is None else _by_hand(wanted, Path(folder))
    failures: list[str] = []
    for source in sources:
        try:
            with _scratch(cache) as scratch:
                _install(wanted, source, scratch, progress or _silent, timeout_s)
            return where() / name
        except FAILURES as error:
            tried = str(source) if folder is None else _short(source.carries)
            failures.append(f"  {tried}: {_reason(error)}")
    reason = "no source of it works" if folder is None else f"{folder} has no files that work"
    raise DataError("\n".join((f"{name} cannot be fetched: {reason}", *failures, *_advice(wanted))))


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def _by_hand(wanted: DataSet, folder: Path) -> list[Source]:
    """Return sources that read a folder: one for the final files, and one in place of each source."""
    final = Folder(folder, tuple(file.name for file in wanted.files))
    others = (Folder(folder, each.carries, keep=each.keep, convert=each.convert) for each in wanted.sources)
    return list({source.carries: source for source in (final, *others)}.values())


def _writable_cache() -> Path:
    cache = where()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        raise DataError(
            f"cannot write to {cache} ({error.strerror}): set THINWIRE_DATA to another folder"
        ) from None
    return cache


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """Make a folder beside the sets, from which files can be moved at once, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove folders that killed fetches left behind."""
    for left in cache.glob(f"{SCRATCH}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)


def _install(wanted: DataSet, source: Source, scratch: Path, progress: Progress, timeout_s: float) -> None:
    raw, out = scratch / "raw", scratch / "out"
    raw.mkdir()
    out.mkdir()
    source.obtain(raw, progress, timeout_s)
    unpack(raw, source.keep)
    source.convert(raw, out)
    for file in wanted.files:
        if wrong := fault(file, out / file.name):
            raise DataError(f"{file.name}: {wrong}")
    record = {"source": str(source), "fetched": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    (out / RECORD).write_text(json.dumps(record) + "\n")
    home = where() / wanted.name
    home.mkdir(exist_ok=True)
    for name in (*(file.name for file in wanted.files), RECORD):
        (out / name).replace(home / name)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _advice(wanted: DataSet) -> tuple[str, ...]:
    carried = dict.fromkeys(_short(source.carries) for source in wanted.sources)
    return (
        f"by hand: put {' or '.join(carried)} into a folder and run",
        f"  thinwire data fetch {wanted.name} --from FOLDER",
        f"or put {', '.join(file.name for file in wanted.files)} into {where() / wanted.name}",
    )


def _short(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class Choice(NamedTuple):
    """A set's name, and a note on each set that was considered."""

    name: str
    notes: tuple[str, ...]


def best(*names: str, progress: Progress | None = None, timeout_s: float = TIMEOUT_S) -> Choice:
    """Return the first of these sets that is in the cache or can be fetched; the last, if none is.

    `name, notes = best("cifar10", "mnist", "digits")` is the choice and the reasons, to display.
    """
    if not names:
        raise DataError(f"best() needs names to choose from; there are {', '.join(SETS)}")
    for name in names:
        get(name)
    notes: list[str] = []
    for name in names:
        if present(name):
            return Choice(name, (*notes, f"{name} is in {where() / name}"))
        try:
            folder = fetch(name, progress, timeout_s=timeout_s)
        except DataError as error:
            notes.append(_reason(error))
        else:
            return Choice(name, (*notes, f"{name} was fetched from {came_from(name)} into {folder}"))
    return Choice(names[-1], tuple(notes))


def came_from(name: str) -> str | None:
    """Return the source of a set in the cache, if it was recorded."""
    try:
        source = json.loads((where() / name / RECORD).read_text())["source"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return source if isinstance(source, str) else None


def describe(name: str) -> dict[str, Any]:
    """Return the facts of a set and its state in the cache, as plain data."""
    wanted = get(name)
    return {
        "name": wanted.name,
        "title": wanted.title,
        "licence": wanted.licence,
        "train": wanted.train,
        "test": wanted.test,
        "shape": list(wanted.shape),
        "classes": wanted.classes,
        "labels": list(wanted.labels),
        "nbytes": wanted.nbytes,
        "present": present(name),
        "folder": str(where() / wanted.name),
        "came_from": came_from(name),
        "sources": [str(source) for source in wanted.sources],
    }
