"""Codecs: a float32 vector to exact bytes and back.

`get` makes a codec from a spec, a short string explained in `thinwire.codecs.spec`.

    >>> from thinwire import codecs
    >>> codec = codecs.get("int4/128")
    >>> codec.bits_per_element(1 << 20)
    4.250030517578125
    >>> codec.nbytes(1000), [each.name for each in codec.sections(1000)]
    (548, ['codes', 'scales', 'tag'])
"""

import functools
from typing import TypeAlias

from thinwire.codecs import accuracy, describe, footprint, own, picture
from thinwire.codecs.base import Codec, Section
from thinwire.codecs.block import Block
from thinwire.codecs.cast import Cast
from thinwire.codecs.dct import DctTopK
from thinwire.codecs.maxmin import MaxMin
from thinwire.codecs.onebit import OneBit, OneBitColumn
from thinwire.codecs.sparse import MSTopK, RandomK, Threshold, TopK
from thinwire.codecs.spec import parse
from thinwire.errors import UnknownCodecError
from thinwire.formats import Format

__all__ = [
    "CODECS",
    "Block",
    "Cast",
    "Codec",
    "DctTopK",
    "MSTopK",
    "MaxMin",
    "OneBit",
    "OneBitColumn",
    "RandomK",
    "Section",
    "Threshold",
    "TopK",
    "accuracy",
    "describe",
    "footprint",
    "get",
    "picture",
]


#: What is accepted as a codec: a spec, a codec, or a format, which means a codec with one scale.
AnySpec: TypeAlias = str | Codec | Format


@functools.cache
def _parsed(spec: str) -> Codec:
    return parse(spec)


def get(spec: AnySpec) -> Codec:
    """Return the codec of a spec.

    A codec is returned unchanged; a format means one scale for the whole vector.

    >>> get("qsgd4/512").unbiased, get("topk/0.01+ef").feedback
    (True, 'float32')
    >>> from thinwire.formats import Table
    >>> get(Table((-1.0, -0.2, 0.0, 0.2, 1.0), label="mine")).spec
    'mine#26b81325'

    From then on, this process also knows your own codecs and formats by their specs.
    """
    if isinstance(spec, Format):
        spec = Block(spec)
    if isinstance(spec, Codec):
        _know(spec)
        return spec
    if not isinstance(spec, str):
        raise UnknownCodecError(
            f"a codec must be a spec such as 'int8/256', a Codec or a Format, not {type(spec).__name__}"
        )
    return _parsed(spec.strip())


def spell(codec: AnySpec) -> str:
    """Return the spec of a codec or a format; a string is returned unchanged."""
    return codec if isinstance(codec, str) else get(codec).spec


def carry(spec: str) -> str | Codec:
    """Return what a pickle must store for a spec: the codec itself if only this process knows its name.

    >>> carry("int8/256")
    'int8/256'
    """
    return get(spec) if "#" in spec or spec.partition("+")[0] in own.CODECS else spec


def _know(codec: Codec) -> None:
    """Register the codec under its name; refuse one that has another codec's name."""
    if codec.__dict__.get("_is_known") or own.CODECS.get(codec.name) == codec.with_feedback(""):
        return
    try:
        other = parse(codec.name)
    except UnknownCodecError:
        other = None
    if other is None or other.name in own.CODECS:
        own.remember(codec)
        _parsed.cache_clear()
    elif other != codec.with_feedback(""):
        raise own.taken(codec, other)
    codec.__dict__["_is_known"] = True


#: One codec of each kind, with the specs that the literature uses; for listings, tests and benchmarks.
#: A codec that no spec can describe is listed as an object; `get` then knows it by its name.
CODECS: dict[str, Codec] = {
    each.spec: each
    for each in map(get, (
        "fp32", "fp16", "bf16",
        "int8/tensor", "int8/256", "int4/128", "int4/128~sr", "int2/64~sr", "int8/256~bf16", "int8/256~pow2",
        "int8/256~p99.9",
        "e4m3fn/128", "e5m2/128", "e5m2/128~sr", "e4m3/128~pow2~e8m0", "posit8_1",
        "mxfp8", "mxfp8e5", "mxfp6", "mxfp6e3", "mxfp4", "mxint8", "nvfp4", "nf4/64",
        "tree8", "tree8/4096", "linear8", "linear8/4096", "static8~offset-1", "mantissa8~offset-1",
        "aps/e5m2", "aps/e4m3", "aps/e3m0", "fp8lm",
        "qsgd16/8192", "qsgd8/512", "qsgd4/512", "qsgd2/128", "qsgd4/512~l2", "qsgd8~shared",
        "nuqsgd4/8192", "terngrad", "terngrad~rms2.5", "cntk4/512", "maxmin4/1024", "maxmin4/128~sr",
        "onebit/64+ef", "onebit/64~mean+ef", "onebit/column+ef", "sign/512+ef",
        "topk/0.01+ef", "topk/0.01~fp16+ef", "topk/0.01~int8/256+ef", "mstopk/0.01+ef",
        "randomk/0.01~unbiased",
        "threshold/0.001~cap0.1+ef", "dct/64:8+ef",
    ))
}  # fmt: skip
