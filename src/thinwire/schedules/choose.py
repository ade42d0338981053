"""The choice of a schedule for a codec, a size and a world, and the reason."""

from thinwire.codecs import Codec
from thinwire.schedules.traits import feeds_back, is_bound, is_cast, is_sparse

SMALL_NBYTES = 1 << 16  #: bytes that a rank may send in `one_shot` to save an exchange


def choose(codec: Codec, numel: int, world: int) -> tuple[str, str]:
    """Return the spec of a schedule and the reason for it.

    >>> from thinwire import codecs
    >>> choose(codecs.get("int8/256"), 25_000_000, 8)[0]
    'two_shot'
    """
    if is_cast(codec) and not feeds_back(codec):
        return "native", f"the network itself can add {codec.name} numbers"
    if is_sparse(codec):
        return "one_shot", "a few elements from every rank are gathered and added where they belong"
    if is_bound(codec):
        return "one_shot", f"{codec.spec} is for a whole tensor and cannot be cut into shards"
    if world <= 2:
        return (
            "one_shot",
            "between two ranks it sends no more than two_shot, rounds once and needs one exchange",
        )
    sent = (world - 1) * codec.nbytes(numel)
    if sent <= SMALL_NBYTES:
        return "one_shot", f"{sent:,} bytes to send are few, so one exchange is faster than two"
    return "two_shot", f"each rank sends 2 x {world - 1}/{world} of a wire, however many ranks there are"
