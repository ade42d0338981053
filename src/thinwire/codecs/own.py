"""Codecs that no spec describes: classes of users, known by name once they were used.

The name of a codec must say what it does, since policies, calls and checkpoints keep nothing else. Ranks also
compare `identity`, which has the class and all fields of such a codec.
"""

from dataclasses import fields

from thinwire.codecs.base import Codec
from thinwire.codecs.names import digest
from thinwire.errors import CodecError

CODECS: dict[str, Codec] = {}  #: without feedback, by name


def remember(codec: Codec) -> None:
    """From now on its spec leads to it; a class that was defined anew takes the place of the old one."""
    before = CODECS.get(codec.name)
    plain = codec.with_feedback("")
    if before is not None and before != plain and _place(before) != _place(plain):
        raise taken(codec, before)
    CODECS[codec.name] = plain


def taken(codec: Codec, other: Codec) -> CodecError:
    """That a codec calls itself as another one does."""
    return CodecError(
        f"this {type(codec).__name__} calls itself '{codec.name}', the name of another codec, a "
        f"{type(other).__name__}; a name says all that a codec does, so give it one of its own"
    )


def identity(codec: Codec) -> str:
    """What ranks compare: the spec and, for classes of users, a check sum of their fields."""
    return f"{codec.spec} ({digest(codec)})" if codec.name in CODECS else codec.spec


def _place(codec: Codec) -> tuple[object, ...]:
    """Where a class is defined, and the fields of an object."""
    values = [getattr(codec, each.name) for each in fields(codec)]
    return type(codec).__module__, type(codec).__qualname__, values
