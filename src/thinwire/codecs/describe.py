"""Facts about a codec, as data for listings and drawings."""

from typing import Any

from thinwire.codecs.base import Codec

LISTED_NUMEL = 1 << 20
WIDTH = 72


def describe(codec: Codec, numel: int = LISTED_NUMEL) -> dict[str, Any]:
    """Return the facts of a listing; bits per element are for `numel` elements, with scales and tag."""
    return {
        "spec": codec.spec,
        "bits_per_element": codec.bits_per_element(numel),
        "ratio": 32 / codec.bits_per_element(numel),
        "unbiased": codec.unbiased,
        "keeps_zeros": codec.keeps_zeros,
        "needs_rng": codec.needs_rng,
        "needs_agreement": codec.agreement(numel),
        "feedback": codec.feedback,
        "nonfinite": codec.nonfinite,
    }


def wire(codec: Codec, numel: int) -> list[dict[str, Any]]:
    """Return the sections of a wire with their offsets."""
    rows, at = [], 0
    for section in codec.sections(numel):
        share = section.nbytes / max(codec.nbytes(numel), 1)
        rows.append(
            {
                "section": section.name,
                "kind": section.kind,
                "bits": section.bits,
                "count": section.count,
                "offset": at,
                "nbytes": section.nbytes,
                "padding": section.nbytes - section.bits * section.count / 8,
                "share": share,
            }
        )
        at += section.nbytes
    return rows


def draw(codec: Codec, numel: int) -> list[str]:
    """Draw the wire as a row of boxes, each about as wide as its share of the bytes.

    >>> from thinwire import codecs
    >>> for line in draw(codecs.get("int4/128"), 1024):
    ...     print(line)
    +---------------------------------------------------+----------+-----+
    | codes                                             | scales   | tag |
    | 512 B                                             | 32 B     | 4 B |
    +---------------------------------------------------+----------+-----+
    """
    rows = wire(codec, numel)
    texts = [(row["section"], f"{row['nbytes']:,} B") for row in rows]
    widths = [max(map(len, text)) for text in texts]
    spare = max(WIDTH - sum(widths) - 3 * len(rows) - 1, 0)
    widths = [width + int(spare * row["share"]) for width, row in zip(widths, rows, strict=True)]
    edge = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [
        "|" + "|".join(f" {text[line]:<{width}} " for text, width in zip(texts, widths, strict=True)) + "|"
        for line in (0, 1)
    ]
    return [edge, *lines, edge]
