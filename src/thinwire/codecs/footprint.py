"""The bytes of a network's gradient on the wire, tensor by tensor, computed without any data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Cast
from thinwire.codecs.onebit import OneBitColumn

#: QSGD and the communication study of Grubic et al. (2018) leave smaller tensors in float32.
MIN_NUMEL = 10_000
#: The codecs that the study compares, by its names for them.
STUDY = {
    "32bit": "fp32",
    "1bit": "onebit/column+ef",
    "1bit*": "onebit/64+ef",
    "QSGD 16bit": "qsgd16/8192",
    "QSGD 8bit": "qsgd8/512",
    "QSGD 4bit": "qsgd4/512",
    "QSGD 2bit": "qsgd2/128",
}


def least_numel(codec: Codec) -> int:
    """Return the study's limit for small tensors; CNTK's column-wise 1-bit and plain casts have none."""
    return 0 if isinstance(codec, Cast | OneBitColumn) else MIN_NUMEL


def footprint(
    shapes: Mapping[str, Sequence[int]], codec: Codec, min_numel: int | None = None
) -> dict[str, Any]:
    """Return the bytes of one gradient, with every tensor encoded separately.

    Tensors of fewer than `min_numel` elements stay float32; by default as in the study (`least_numel`).

    >>> from thinwire import codecs
    >>> footprint({"fc.weight": (1000, 512), "fc.bias": (1000,)}, codecs.get("int8/256"))["ratio"]
    3.91...
    """
    min_numel = least_numel(codec) if min_numel is None else min_numel
    params = fp32 = wire = quantised = 0
    for shape in shapes.values():
        numel = math.prod(shape)
        small = numel < min_numel
        chosen = Cast("fp32") if small else codec.for_shape(shape)
        params += numel
        fp32 += 4 * numel
        wire += chosen.nbytes(numel)
        quantised += 0 if small else numel
    return {
        "params": params,
        "fp32_nbytes": fp32,
        "wire_nbytes": wire,
        "ratio": fp32 / wire if wire else 1.0,
        "quantised_fraction": quantised / params if params else 0.0,
    }
