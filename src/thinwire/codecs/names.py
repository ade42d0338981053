"""Names of formats and block codecs in specs, and of formats that users define.

A spec must describe a codec completely: policies, collectives and checkpoints store nothing else. A format
that is in no listing is named by its label and a checksum of its fields, such as `mine#8a3f01c2`. This
process remembers the format, so that it can parse specs with that name.
"""

import re
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from thinwire.errors import FormatError, UnknownFormatError
from thinwire.formats import FORMATS, Format
from thinwire.formats import get as get_format
from thinwire.rounding import Rounding
from thinwire.scaling import Scaling

#: Short names for formats; a format's canonical spec uses the first that stands for it.
ALIASES = {
    "e4m3fn": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "e2m3fn": "float6_e2m3fn",
    "e3m2fn": "float6_e3m2fn",
    "e2m1fn": "float4_e2m1fn",
    "fp4": "float4_e2m1fn",
    "e5m2": "float8_e5m2",
    "tree8": "dynamic_tree",
    "linear8": "linear",
    "static8": "static_tree",
    "mantissa8": "mantissa",
}
STORES = {"f32": "float32", "bf16": "bfloat16", "e8m0": "e8m0"}
WHOLE = "tensor"  #: in place of a block length: one scale for the whole vector
#: Block lengths of specs that are only a name; other formats have one scale for the whole vector.
BLOCKS = {"int8": 256, "int4": 128, "fp8": 128}
TAKEN = ("sign", "nuqsgd4")  #: names of formats that mean another codec in a spec
OWN: dict[str, Format] = {}  #: formats that users define, by their names in specs


def digest(thing: Any) -> str:
    """Return a checksum of a format or a codec: of its class and of the fields that it is compared by."""
    return f"{zlib.crc32(repr(_said(thing)).encode()):08x}"


def _said(thing: Any) -> Any:
    if isinstance(thing, tuple | list):
        return [_said(each) for each in thing]
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    return type(thing).__qualname__, [
        (each.name, _said(getattr(thing, each.name))) for each in fields(thing) if each.compare
    ]


def format_of(name: str) -> Format:
    """Return the format that a name means in a spec."""
    if name in OWN:
        return OWN[name]
    if "#" in name:
        raise UnknownFormatError(
            f"'{name}' is a user's own format, which this process does not know; pass the Format itself "
            "once, to codecs.get or wherever a codec is accepted"
        )
    return get_format(ALIASES.get(name, name))


def name_of(format: Format) -> str:
    """Return the name of a format in specs."""
    for alias, name in ALIASES.items():
        if FORMATS[name] == format:
            return alias
    if format.name not in TAKEN and _is_known(format):
        return format.name
    name = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', format.name.partition('(')[0])}#{digest(format)}"
    OWN[name] = format
    return name


def _is_known(format: Format) -> bool:
    try:
        return get_format(format.name) == format
    except FormatError:
        return False


def block_spec(format: Format, block: int | None, rounding: Rounding | str, scaling: Scaling) -> str:
    """Return the canonical spec of a block codec that has no label."""
    options = ""
    if scaling.choose in ("percentile", "rms", "cells", "fixed"):
        word = {"percentile": "p", "fixed": "offset"}.get(scaling.choose, scaling.choose)
        options += f"~{word}{shortest(scaling.value)}"
    elif scaling.choose != "absmax":
        options += f"~{scaling.choose}"
    if scaling.store != "float32":
        options += "~" + next((s for s, name in STORES.items() if name == scaling.store), scaling.store)
    options += "~shared" * scaling.shared
    options += f"~{scaling.margin}" if scaling.margin else ""
    if rounding != Rounding.NEAREST:
        options += "~sr" if rounding == Rounding.STOCHASTIC else f"~{rounding}"
    name = name_of(format)
    return f"{name}{f'/{block or WHOLE}' if block or name in BLOCKS else ''}{options}"


def shortest(value: float) -> str:
    """Return a number as options spell it."""
    return str(int(value)) if value == int(value) else repr(float(value))


def spell(number: float) -> str:
    """Return a number as specs spell it: short, exact, and without a plus sign, which starts the feedback.

    >>> spell(0.01), spell(1.0), spell(1e20), spell(1 / 3)
    ('0.01', '1', '1e20', '0.3333333333333333')
    """
    short = f"{number:g}"
    return (short if float(short) == number else repr(number)).replace("e+", "e")
