"""What a schedule needs to know of a codec."""

from thinwire.codecs import Cast, Codec, DctTopK, MSTopK, RandomK, Threshold, TopK

SPARSE = (TopK, MSTopK, RandomK, Threshold, DctTopK)


def is_sparse(codec: Codec) -> bool:
    """Whether a wire names a few elements."""
    return isinstance(codec, SPARSE)


def is_cast(codec: Codec) -> bool:
    """Whether a network can add wires as they are."""
    return isinstance(codec, Cast)


def is_bound(codec: Codec) -> bool:
    """Whether the codec is for one shape, so that a part of the tensor means nothing to it."""
    return codec.for_shape((1,)) != codec and codec.grain == 0
