"""Strict reading of tables from files into frozen dataclasses, and the JSON schema of such a dataclass.

The type hints of a dataclass decide what a file may hold: text, numbers, `Literal` words, lists of text,
mappings and other dataclasses. `Annotated[int, 1]` is a number of at least 1. A dataclass with a class
variable `SHORT` may be written as the value of that field alone. A field's metadata may have another `hint`
for files. The reader and the schema follow the same hints.
"""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from thinwire.errors import InputError, ThinwireError, unknown

T = TypeVar("T")
V = TypeVar("V")
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
SCHEMA_TYPES = {str: "string", int: "integer", float: "number"}


class Table(Mapping[str, V]):
    """A mapping that cannot be changed. Two are equal if they have the same entries in the same order.

    >>> Table({"replicate": 2, "tensor": 4})
    Table({'replicate': 2, 'tensor': 4})
    >>> Table({"a": 1, "b": 2}) == Table({"b": 2, "a": 1})
    False
    """

    def __init__(self, entries: Mapping[str, V]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return f"Table({self._entries})"


def read(kind: type[T], data: Any, file: str, inside: str = "") -> T:
    """Make a dataclass from a file's table; an `InputError` names the file, the table and the key.

    `inside` is the table's place in the file, such as `tensor.modules`.
    """
    where = f"{file}, [{inside}]" if inside else file
    short = getattr(kind, "SHORT", None)
    if short is not None and not isinstance(data, Mapping):
        data = {short: data}
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: {data!r:.40} is no table of keys and values")
    known = {each.name: each for each in _fields(kind)}
    for key in data:
        if key not in known:
            raise InputError(f"{where}: {unknown('key', key, known)}")
    for name, each in known.items():
        if name not in data and _is_needed(each):
            raise InputError(f"{where}: the key '{name}' is missing; it is {told(_hints(kind)[name])}")
    values = {
        name: _value(_hints(kind)[name], given, file, _join(inside, name), f"{where}: {name}")
        for name, given in data.items()
    }
    try:
        return kind(**values)
    except ThinwireError as error:
        raise InputError(f"{where}: {error}") from None


def told(hint: Any) -> str:
    """Say what a hint accepts.

    >>> told(str | None), told(Annotated[int, 1]), told(Literal["row", "column"])
    ('text', 'a whole number of 1 or more', "one of 'row', 'column'")
    """
    hint = _required(hint)
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return f"{told(inner[0])} of {inner[1]} or more"
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        return f"a list of {told(inner[0])}"
    if origin is Table:
        return f"a table whose values are {told(inner[0])}"
    if is_dataclass(hint):
        short = getattr(hint, "SHORT", None)
        text = f"{told(_hints(hint)[short])}, or " if short else ""
        return f"{text}a table of {', '.join(each.name for each in _fields(hint))}"
    return WORDS[hint]


def schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of what a hint accepts."""
    hint = _required(hint)
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return {**schema(inner[0]), "minimum": inner[1]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": schema(inner[0])}
    if origin is Table:
        return {"type": "object", "additionalProperties": schema(inner[0])}
    if is_dataclass(hint):
        return _object(typing.cast(type, hint))
    return {"type": SCHEMA_TYPES[hint]}


def spelled(value: Any) -> str:
    """Return a value as TOML.

    >>> spelled(("a", "b")), spelled(Table({"x y": 2}))
    ('["a", "b"]', '{ "x y" = 2 }')
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key(name)} = {spelled(each)}" for name, each in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def key(name: str) -> str:
    """Return a key as TOML: quoted, unless it needs no quotes.

    >>> key("replicate"), key("blocks.*")
    ('replicate', '"blocks.*"')
    """
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else spelled(name)


def _object(kind: type) -> dict[str, Any]:
    described = {
        "type": "object",
        "properties": {
            each.name: {**schema(_hints(kind)[each.name]), **_description(each)} for each in _fields(kind)
        },
        "required": [each.name for each in _fields(kind) if _is_needed(each)],
        "additionalProperties": False,
    }
    short = getattr(kind, "SHORT", None)
    return described if short is None else {"anyOf": [schema(_hints(kind)[short]), described]}


def _description(each: "Field[Any]") -> dict[str, str]:
    said = each.metadata.get("help")
    return {"description": said} if said else {}


def _fields(kind: Any) -> tuple["Field[Any]", ...]:
    return fields(kind)


def _is_needed(each: "Field[Any]") -> bool:
    absent = each.default is each.default_factory is MISSING
    return absent or bool(each.metadata.get("needed_in_files"))


def _hints(kind: Any) -> dict[str, Any]:
    replaced = {each.name: each.metadata["hint"] for each in _fields(kind) if "hint" in each.metadata}
    return {**get_type_hints(kind, include_extras=True), **replaced}


def _required(hint: Any) -> Any:
    """Return a hint without None."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    return hint


def _join(inside: str, name: str) -> str:
    return f"{inside}.{key(name)}" if inside else key(name)


def _value(hint: Any, given: Any, file: str, inside: str, where: str) -> Any:
    hint = _required(hint)
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if is_dataclass(hint):
        return read(typing.cast(type[Any], hint), given, file, inside)
    if origin is Table and isinstance(given, Mapping):
        return Table(
            {name: _value(inner[0], each, file, _join(inside, name), f"{file}, [{inside}]: {key(name)}")
             for name, each in given.items()}
        )  # fmt: skip
    if origin is tuple and isinstance(given, list | tuple):
        return tuple(_value(inner[0], each, file, inside, where) for each in given)
    if not _fits(hint, given):
        raise InputError(f"{where} is {given!r:.60}; it must be {told(hint)}")
    return float(given) if hint is float else given


def _fits(hint: Any, given: Any) -> bool:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _fits(inner[0], given) and given >= inner[1]
    if origin is Literal:
        return isinstance(given, str) and given in inner
    if isinstance(given, bool) or origin in (tuple, Table):
        return False
    return isinstance(given, int | float if hint is float else hint)
