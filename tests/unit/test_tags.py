"""Tags of messages over gloo: two that may be under way at the same time are never the same."""

import itertools

from thinwire import codecs
from thinwire.runtimes.gloo_runtime import COMPARING
from thinwire.runtimes.gloo_transport import TAGS, tag
from thinwire.runtimes.job import AGREEMENT
from thinwire.runtimes.plan import PIECE, spans
from thinwire.schedules import get

DIGEST = 0x1234


def test_pieces_exchanges_and_calls_have_tags_of_their_own():
    numbers, pieces, exchanges = range(16), range(128), range(32)
    tags = {tag(DIGEST, *each) for each in itertools.product(numbers, pieces, exchanges)}
    assert len(tags) == 16 * 128 * 32


def test_a_tag_is_a_positive_int_of_32_bits_and_not_a_users():
    for digest in (0, DIGEST, 0xFFFFFFFF):
        for number, piece, exchange in ((0, 0, 0), (1 << 40, 127, 31), (15, AGREEMENT, 0)):
            assert TAGS <= tag(digest, number, piece, exchange) < 1 << 31


def test_other_calls_mostly_have_other_tags():
    assert len({tag(digest, 1, 0, 0) for digest in range(1 << 14)}) == 1 << 14


def test_no_piece_is_taken_for_another_or_for_talk():
    """A tensor makes few pieces, however large."""
    assert AGREEMENT != COMPARING
    pieces = list(spans([PIECE << 12], [codecs.get("int8/256")], get("two_shot")))
    assert len(pieces) < min(AGREEMENT, COMPARING)
