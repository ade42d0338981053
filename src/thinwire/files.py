"""Checks of files: whether a path can be written, and whether values that were read have the right types.

`check_file`, `check_folder` and `check_picture` refuse a path before anything is computed for it. `writing`
explains errors of the system. `check_fields` compares the values of a JSON or TOML file with a dataclass.
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
    """Return the path if a file can be written there; its folders need not exist yet."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file")
    _check(path, path.absolute().parent)
    return path


def check_folder(path: Path) -> Path:
    """Return the path if files can be written into this folder; it need not exist yet."""
    _check(path, path.absolute())
    return path


def check_picture(path: Path) -> Path:
    """Return the path if a picture can be written there."""
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"cannot draw into '{path}'; use a name that ends in .png, .svg or .pdf")
    return check_file(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file written inside the `with`; turn OS errors into errors that say what works."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error


def safe_name(text: str) -> str:
    """Return a file name made from any text: no folders, no control characters.

    >>> safe_name("simulate/aps"), safe_name("../../escape")
    ('simulate-aps', 'escape')
    """
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-.") or "unnamed"


def _check(path: Path, folder: Path) -> None:
    existing = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not existing.is_dir():
        raise _refusal(path, f"{existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _refusal(path, f"the folder {existing} cannot be written to")


def _refusal(path: Path, why: str) -> InputError:
    return InputError(f"cannot write {path}: {why}; name a path in a folder that you can write to")


def check_fields(kind: type, data: Any, hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a file's values if they match the fields of a dataclass and their types; else a ValueError.

    Fields with a default may be absent; values without a field are ignored. `hints` replaces the types of
    fields that can hold values a file cannot.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.40} is no {kind.__name__.lower()}: expected a table of names and values")
    needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{kind.__name__.lower()} needs a value for '{missing[0]}'")
    for name, hint in (get_type_hints(kind) | dict(hints or {})).items():
        if name in data and not _fits(data[name], hint):
            type_name = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
            raise ValueError(f"{name} is {data[name]!r:.40}; it must be of type {type_name}")
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
