"""Codecs that no spec describes: classes that users define, known by name after their first use.

The name of a codec must identify it, because policies, collectives and checkpoints store nothing else. Ranks
also compare `identity`, which includes the class and all fields of such a codec.
"""

from dataclasses import fields

from thinwire.codecs.base import Codec
from thinwire.codecs.names import digest
from thinwire.errors import CodecError

CODECS: dict[str, Codec] = {}  #: codecs that users define, without feedback, by name


def remember(codec: Codec) -> None:
    """Register a codec by its name; a class that was defined again replaces the old one."""
    before = CODECS.get(codec.name)
    plain = codec.with_feedback("")
    if before is not None and before != plain and _place(before) != _place(plain):
        raise taken(codec, before)
    CODECS[codec.name] = plain


def taken(codec: Codec, other: Codec) -> CodecError:
    """Return the error for a codec that has another codec's name."""
    return CodecError(
        f"this {type(codec).__name__} is named '{codec.name}', the name of another codec, a "
        f"{type(other).__name__}; a name must identify a codec, so choose another one"
    )


def identity(codec: Codec) -> str:
    """Return what ranks compare: the spec and, for classes that users define, a checksum of their fields."""
    return f"{codec.spec} ({digest(codec)})" if codec.name in CODECS else codec.spec


def _place(codec: Codec) -> tuple[object, ...]:
    """Return where the codec's class is defined, and the values of the codec's fields."""
    values = [getattr(codec, each.name) for each in fields(codec)]
    return type(codec).__module__, type(codec).__qualname__, values
