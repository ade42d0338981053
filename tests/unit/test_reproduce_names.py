"""Rows of reproductions: named after what they do, and the same as when records of them were made."""

import hashlib
import re

import pytest

from thinwire.study.reproduce import PAPERS, positnn

#: Of all rows of a paper: settings, and accuracies in the paper. Records that were made before a row changed
#: are not found any more, so change these only with rows that are meant to be others.
ROWS = {
    "aps": "5da8f53708f64901",
    "dettmers": "3f122695815ea9dd",
    "gupta": "c9a33a6f9f53ee22",
    "positnn": "2260c9019c297a5f",
    "bfloat16": "2be4bf66206e6da8",
    "mogami": "38fdae683a5ba17c",
}


def rows(paper):
    """What decides a trial, and what it is compared with."""
    for size, tables in sorted(paper.tables.items()):
        for table in tables:
            for trial, arm in zip(table.trials(paper.name, 1), table.arms, strict=True):
                yield (
                    size,
                    table.title,
                    table.seeds,
                    table.confidence,
                    table.base,
                    table.chance,
                    trial,
                    arm.paper,
                )


@pytest.mark.parametrize("name", PAPERS)
def test_rows_are_those_of_which_records_were_made(name):
    digest = hashlib.sha256(repr(list(rows(PAPERS[name]))).encode()).hexdigest()[:16]
    assert digest == ROWS[name]


@pytest.mark.parametrize("name", PAPERS)
def test_claims_are_about_rows_that_there_are(name):
    paper = PAPERS[name]
    sized = [table for tables in paper.tables.values() for table in tables]
    tables = {table.title: {arm.name for arm in table.arms} for table in sized}
    assert all(len(tables[table.title]) == len(table.arms) > 1 for table in sized), "names tell rows apart"
    for claim in paper.claims:
        assert set(claim.arms) <= tables[claim.table], claim.text
        assert claim.arms, claim.text
        assert len(claim.arms) == 2 or claim.kind != "better", claim.text


def test_names_of_posits_say_their_bits_and_how_they_add():
    for arm in positnn.ARMS[1:]:
        recipe = arm.recipe.removeprefix("positnn/")
        for word in ("quire", "fused", "underflow"):
            named = word in arm.name or (word == "quire" and "fused" in arm.name)
            assert named == (word in recipe), (arm.name, recipe)
        widths = {part: bits for parts, bits in re.findall(r"([A-Z]+) (\d+)", arm.name) for part in parts}
        mixed = dict(re.findall(r"([A-Z])(\d+)", recipe))
        assert widths == mixed, (arm.name, recipe)
        if not mixed:
            assert recipe.partition("+")[0] == re.search(r"all (\d+)", arm.name)[1]
