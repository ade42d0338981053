"""What a schedule needs to know of a codec."""

import torch

from thinwire.codecs import Cast, Codec, DctTopK, MSTopK, RandomK, Threshold, TopK

SPARSE = (TopK, MSTopK, RandomK, Threshold, DctTopK)


def is_sparse(codec: Codec) -> bool:
    """Whether a wire names a few elements."""
    return isinstance(codec, SPARSE)


def is_cast(codec: Codec) -> bool:
    """Whether a network can add wires as they are."""
    return isinstance(codec, Cast)


def feeds_back(codec: Codec) -> bool:
    """Whether what its rounding leaves over has to be sent later; fp32 leaves nothing."""
    return bool(codec.feedback) and not (isinstance(codec, Cast) and codec.torch_dtype == torch.float32)


def taken_early(codec: Codec, world: int, weight: float, *, shared: bool) -> float:
    """By what a sum is multiplied before it is encoded again, out of a `weight` that it is multiplied by.

    By all of it, where a scale follows from what is encoded. A scale that ranks agreed on (`shared`), or that
    is fixed, fits what every rank has, and so their mean: that is what is encoded then, also on the way to a
    sum. Only an agreed scale with room for the sum takes it as it is.
    """
    if takes_means(codec, shared=shared):
        return 1.0 / world
    return 1.0 if shared else weight


def takes_means(codec: Codec, *, shared: bool) -> bool:
    """Whether a mean of what ranks have is all that is sure to fit under a scale, agreed on or fixed."""
    return not codec.holds_sums if shared else codec.has_fixed_scale


def is_bound(codec: Codec) -> bool:
    """Whether the codec is for one shape, so that a part of the tensor means nothing to it."""
    return codec.for_shape((1,)) != codec and codec.grain == 0
