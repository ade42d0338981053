"""The properties of a codec on which schedules depend."""

from dataclasses import replace

import torch

from thinwire.codecs import Cast, Codec, DctTopK, MSTopK, OneBitColumn, RandomK, Threshold, TopK

SPARSE = (TopK, MSTopK, RandomK, Threshold, DctTopK)


def is_sparse(codec: Codec) -> bool:
    """Whether a wire has only a few of the elements."""
    return isinstance(codec, SPARSE)


def is_cast(codec: Codec) -> bool:
    """Whether a network can add wires without decoding them."""
    return isinstance(codec, Cast)


def feeds_back(codec: Codec) -> bool:
    """Whether the codec has feedback and leaves residuals; fp32 leaves none."""
    return bool(codec.feedback) and not (isinstance(codec, Cast) and codec.torch_dtype == torch.float32)


def taken_early(codec: Codec, world: int, weight: float, *, shared: bool) -> float:
    """Return the part of `weight` by which a sum is multiplied before it is encoded again.

    That is the whole weight where the scale is computed from what is encoded. A scale that ranks agreed on
    (`shared`), or a fixed one, fits the values of each rank, and so their mean: then the mean is encoded,
    even if the result is a sum. Only an agreed scale with room for the sum allows encoding the sum itself.
    """
    if takes_means(codec, shared=shared):
        return 1.0 / world
    return 1.0 if shared else weight


def takes_means(codec: Codec, *, shared: bool) -> bool:
    """Whether the scale, agreed on or fixed, is sure to fit only the mean over ranks, not the sum."""
    return not codec.holds_sums if shared else codec.has_fixed_scale


def is_bound(codec: Codec) -> bool:
    """Whether the codec depends on the tensor's shape, so that the tensor cannot be split."""
    return codec.for_shape((1,)) != codec and codec.grain == 0


def laid_out(codec: Codec, shape: tuple[int, ...]) -> tuple[Codec, bool]:
    """Return the codec for a tensor of this shape, and whether the tensor is sent column by column."""
    shaped = codec.for_shape(shape)
    turned = isinstance(shaped, OneBitColumn) and shaped.strided
    return (replace(shaped, strided=False) if isinstance(shaped, OneBitColumn) else shaped), turned
