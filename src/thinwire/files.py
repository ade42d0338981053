"""Files: those to be written are checked before the work begins; what was read has the types it should have.

`check_file` and its kin refuse a path before anything is computed for it, `writing` explains what the system
refuses all the same, and `check_fields` compares what a JSON or TOML file holds with a dataclass.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from thinwire.errors import InputError

PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path) -> Path:
    """The path, if a file can be written there; folders that are not there yet can be made."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file")
    _check(path, path.absolute().parent)
    return path


def check_folder(path: Path) -> Path:
    """The path, if files can be written into this folder; it need not be there yet."""
    _check(path, path.absolute())
    return path


def check_picture(path: Path) -> Path:
    """The path, if a picture can be drawn there."""
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"cannot draw into '{path}'; use a name that ends in .png, .svg or .pdf")
    return check_file(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file that is written inside; errors of the system say what would work."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error


def safe_name(text: str) -> str:
    """A file name, from a name that may hold anything: no folders, no control characters.

    >>> safe_name("simulate/aps"), safe_name("../../escape")
    ('simulate-aps', 'escape')
    """
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-.") or "unnamed"


def _check(path: Path, folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not there.is_dir():
        raise _refusal(path, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _refusal(path, f"the folder {there} cannot be written to")


def _refusal(path: Path, why: str) -> InputError:
    return InputError(f"cannot write {path}: {why}; name a path in a folder that you can write to")


def check_fields(kind: type, data: Any, hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a file holds, if it has the values of a dataclass in the types of its fields; else a ValueError.

    Fields with a default may be absent; further values are left alone. `hints` are types of fields that
    may hold more than a file can.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.40} is no {kind.__name__.lower()}: it must be names with values")
    needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{kind.__name__.lower()} needs a {missing[0]}")
    for name, hint in (get_type_hints(kind) | dict(hints or {})).items():
        if name in data and not _fits(data[name], hint):
            said = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
            raise ValueError(f"{name} is {data[name]!r:.40}; it must be of type {said}")
    return dict(data)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    return isinstance(value, Mapping) if is_dataclass(kind) else isinstance(value, kind)
