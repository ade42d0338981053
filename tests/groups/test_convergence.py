"""Do compressed gradients reach float32's accuracy? On scikit-learn's digits, five seeds, paired.

Seeds are fixed and everything is deterministic, so that a machine gives the same judged every time.
"""

import pytest

from thinwire import data
from thinwire.study import convergence
from thinwire.study.run import run
from thinwire.study.store import Store

SEEDS = 5
WITHOUT_FEEDBACK = "onebit/512"


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_codecs_reach_float32_and_one_bit_without_feedback_does_not(tmp_path):
    """One test, because all of it rests on the same runs."""
    data.fetch("digits")
    trials = convergence.trials("digits", SEEDS, (*convergence.CODECS, WITHOUT_FEEDBACK))
    with Store(tmp_path / "store.sqlite") as store:
        records = run(trials, store)
    assert all(record.replicas_equal for record in records)
    judged = {each.codec: each for each in convergence.judge(records)}
    assert all(each.difference.count == SEEDS for each in judged.values())
    assert judged["fp32"].accuracy.mean > 0.85  # else there is nothing to lose
    short = [judged[codec] for codec in convergence.CODECS if not judged[codec].reaches]
    assert not short
    without = judged[WITHOUT_FEEDBACK]
    assert without.verdict == "lower", without
    assert without.difference.mean < -convergence.MARGIN
    assert without.difference.interval[1] < judged["onebit"].difference.interval[0], "feedback does not help"
