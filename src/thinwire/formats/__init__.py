"""Number formats: the real values that codes of a few bits stand for, and rounding of float32 to them.

`get` returns a format by name. Names of ml_dtypes mean the same as there. `eXmY` is IEEE-style with X
exponent and Y mantissa bits; `fixedI.F`, `intB`, `uniformB`, `uniformBs` and `positN_E` are built on demand.

    >>> from thinwire import formats
    >>> formats.get("e4m3").max, formats.get("posit8_1").max
    (240.0, 4096.0)
"""

import functools
import re
from collections.abc import Callable

import torch

from thinwire.errors import UnknownFormatError, unknown
from thinwire.formats import accuracy, describe, picture
from thinwire.formats.base import Format
from thinwire.formats.dettmers import Dettmers
from thinwire.formats.exponent import E8M0
from thinwire.formats.fixed import Fixed, Int, Uniform
from thinwire.formats.floating import Float
from thinwire.formats.posit import Posit
from thinwire.formats.table import NF4, Table, bnb_dynamic, bnb_linear, exponential, normal_quantiles

__all__ = [
    "E8M0",
    "FORMATS",
    "Dettmers",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "Posit",
    "Table",
    "Uniform",
    "accuracy",
    "describe",
    "exponential",
    "get",
    "normal_quantiles",
    "picture",
]

_ALL: tuple[Format, ...] = (
    Float(5, 10, label="float16"),
    Float(8, 7, label="bfloat16"),
    Float(8, 10, label="tf32"),
    Float(4, 3, specials="fn", label="float8_e4m3fn"),
    Float(4, 3, label="float8_e4m3"),
    Float(4, 3, specials="fnuz", label="float8_e4m3fnuz"),
    Float(4, 3, specials="fnuz", bias=11, label="float8_e4m3b11fnuz"),
    Float(5, 2, label="float8_e5m2"),
    Float(5, 2, specials="fnuz", label="float8_e5m2fnuz"),
    Float(3, 4, label="float8_e3m4"),
    E8M0(),
    Float(2, 3, specials="none", label="float6_e2m3fn"),
    Float(3, 2, specials="none", label="float6_e3m2fn"),
    Float(2, 1, specials="none", label="float4_e2m1fn"),
    Float(6, 9),
    Float(5, 2),
    Float(4, 3),
    Float(3, 4),
    Float(3, 0),
    Float(2, 1),
    Int(8),
    Int(4),
    Int(2),
    Fixed(8, 8),
    Fixed(2, 14),
    Fixed(2, 6),
    Uniform(8),
    Uniform(8, signed=True),
    Uniform(4, signed=True),
    Table((-1.0, 0.0, 1.0), label="ternary"),
    Table((-1.0, 1.0), label="sign"),
    Posit(8, 0),
    Posit(8, 1),
    Posit(8, 2),
    Posit(8, 2, underflow=True),
    Posit(16, 1),
    Posit(16, 2),
    Dettmers("dynamic"),
    Dettmers("static"),
    Dettmers("mantissa"),
    Dettmers("linear"),
    Dettmers("dynamic", legacy=True),
    Dettmers("static", legacy=True),
    Dettmers("mantissa", legacy=True),
    Dettmers("linear", legacy=True),
    Table(bnb_dynamic(), label="bnb_dynamic"),
    Table(bnb_dynamic(signed=False), label="bnb_dynamic_unsigned"),
    Table(bnb_linear(), label="bnb_linear"),
    Table(NF4, label="nf4"),
    Table(normal_quantiles(8), label="normal8"),
    Table(exponential(4), label="nuqsgd4"),
    Table(exponential(8, base=0.75), label="exponential8"),
)

#: Every named format, in the order in which listings show them.
FORMATS: dict[str, Format] = {each.name: each for each in _ALL}

#: Families whose members are named by their parameters.
PATTERNS: dict[str, tuple[str, Callable[..., Format]]] = {
    "eXmY": (r"e(\d)m(\d\d?)", lambda exp, man: Float(int(exp), int(man))),
    "intB": (r"int(\d\d?)", lambda width: Int(int(width))),
    "fixedI.F": (r"fixed(\d\d?)\.(\d\d?)", lambda whole, frac: Fixed(int(whole), int(frac))),
    "uniformB": (r"uniform(\d\d?)", lambda width: Uniform(int(width))),
    "uniformBs": (r"uniform(\d\d?)s", lambda width: Uniform(int(width), signed=True)),
    "positN_E": (r"posit(\d\d?)_(\d)", lambda n, es: Posit(int(n), int(es))),
    "positN_E_underflow": (
        r"posit(\d\d?)_(\d)_underflow",
        lambda n, es: Posit(int(n), int(es), underflow=True),
    ),
}


@functools.cache
def _member(name: str) -> Format | None:
    """Return the member of a family with this name, built once; None if there is none."""
    for pattern, build in PATTERNS.values():
        match = re.fullmatch(pattern, name)
        if match:
            return build(*match.groups())
    return None


def get(name: str | Format | torch.dtype) -> Format:
    """Return the format of a name or of a torch dtype. A format is returned unchanged."""
    if isinstance(name, Format):
        return name
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if not isinstance(name, str):
        raise UnknownFormatError(
            f"a format must be a name, a torch.dtype or a Format, not {type(name).__name__}"
        )
    if name in FORMATS:
        return FORMATS[name]
    member = _member(name)
    if member is not None:
        return member
    raise UnknownFormatError(unknown("format", name, FORMATS, "`thinwire formats` lists all"))
