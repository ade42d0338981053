"""Do compressed gradients reach the accuracy of float32? Many seeds, paired, with intervals.

Every codec trains the same network from the same initial weights on the same batches, with the same learning
rate and number of steps. These were chosen in trial runs: float32 trains well with them, and one bit without
error feedback differs from one bit with it. The measure is the difference to float32 at equal seeds: its mean
over seeds and Student's 95 % interval of it.

| verdict | meaning |
|---|---|
| same | the whole interval is less than one point below float32, and not all of it is below |
| near | the whole interval is less than one point below float32, but all of it is below: lower for certain |
| lower | all of the interval is below float32, some of it by more than one point |
| unknown | some of the interval is above float32, some of it more than a point below: more seeds are needed |

The margin of one point is fixed, whatever the spread over seeds. Any codec that is noisy enough would pass a
test that only asks whether zero lies inside an interval.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire import machine
from thinwire.errors import InputError, unknown
from thinwire.statistics import Estimate, differences, estimate
from thinwire.study.record import Record, Trial
from thinwire.study.run import LOOPBACK

STUDY = "convergence"
BASE = "fp32"
CODECS = ("int8", "fp8", "aps8", "dettmers8", "qsgd4", "int4", "onebit")
#: One bit without error feedback, in blocks of 512 elements, and of nearly a whole tensor.
WITHOUT_FEEDBACK = ("onebit/512", "onebit/65536")
MARGIN = 0.01  #: accuracy that may be lost: one point
REACHES = ("same", "near")
HOSTS, SEEDS = 2, 5


@dataclass(frozen=True)
class Setting:
    """How a data set is trained, with every codec."""

    network: str
    steps: int
    batch: int
    lr: float


SETTINGS = {
    "fashion-mnist": Setting("mlp", 800, 32, 0.05),
    "mnist": Setting("mlp", 800, 32, 0.05),
    "digits": Setting("mlp", 120, 64, 0.03),
}


@dataclass(frozen=True)
class Verdict:
    """A codec compared with float32."""

    codec: str
    accuracy: Estimate
    difference: Estimate  #: to float32, at equal seeds
    verdict: str  #: of `difference`, in a word
    replicas_equal: bool
    sent_share: float  #: of float32's bytes

    @property
    def reaches(self) -> bool:
        """Whether it loses less accuracy than the margin."""
        return self.verdict in REACHES


def trials(
    data: str = "fashion-mnist",
    seeds: int = SEEDS,
    codecs: Sequence[str] = (*CODECS, *WITHOUT_FEEDBACK),
    hosts: int = HOSTS,
) -> list[Trial]:
    """Return the trials, one seed after another, float32 first."""
    if data not in SETTINGS:
        raise InputError(unknown("data set of this study", data, SETTINGS))
    if seeds < 2:
        raise InputError("one seed has no spread; use two or more, better five")
    how = SETTINGS[data]
    return [
        Trial(STUDY, data, how.network, codec, seed, hosts, LOOPBACK, how.steps, how.batch, how.lr)
        for seed in range(seeds)
        for codec in (BASE, *codecs)
    ]


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Return a verdict for each codec, in the order of the records, float32 first."""
    names = dict.fromkeys(record.trial.codec for record in records)
    runs = {name: [record for record in records if record.trial.codec == name] for name in names}
    base = _accuracies(runs[BASE])
    return [_judge(name, runs[name], base) for name in names]


def _judge(codec: str, runs: Sequence[Record], base: dict[int, float]) -> Verdict:
    own = _accuracies(runs)
    accuracy, difference = estimate(own.values()), differences(own, base)
    assert accuracy is not None
    assert difference is not None
    sent = sum(run.sent_nbytes_per_step for run in runs) / sum(run.fp32_nbytes_per_step for run in runs)
    equal = all(run.replicas_equal for run in runs)
    word = BASE if codec == BASE else decide(difference)
    return Verdict(codec, accuracy, difference, word, equal, sent)


def _accuracies(runs: Sequence[Record]) -> dict[int, float]:
    return {run.trial.seed: run.accuracy for run in runs}


def decide(difference: Estimate, margin: float = MARGIN) -> str:
    """Return a word for where the interval lies.

    >>> decide(Estimate(5, 0.001, 0.001, 0.002)), decide(Estimate(5, -0.004, 0.001, 0.002))
    ('same', 'near')
    >>> decide(Estimate(5, -0.02, 0.001, 0.002)), decide(Estimate(5, -0.01, 0.01, 0.02))
    ('lower', 'unknown')
    """
    if difference.interval is None:
        return "unknown"
    low, high = difference.interval
    if low > -margin:
        return "same" if high >= 0 else "near"
    return "lower" if high < 0 else "unknown"


def result(records: Sequence[Record]) -> dict[str, Any]:
    """Return what is saved: verdicts, and the numbers behind them."""
    trial = records[0].trial
    rows = []
    for each in judge(records):
        accuracies = _accuracies([record for record in records if record.trial.codec == each.codec])
        rows.append(
            {
                "link": trial.link,
                **asdict(each),
                "interval": each.difference.interval,
                "accuracies": list(accuracies.values()),
            }
        )
    setting = {key: value for key, value in asdict(trial).items() if key not in ("codec", "seed")}
    seeds = sorted({record.trial.seed for record in records})
    return machine.record({"setting": setting, "seeds": seeds, "margin": MARGIN, "rows": rows})


HEADER = (
    "codec",
    "bytes",
    "accuracy %",
    "points from fp32",
    "95 % interval",
    "verdict",
    "replicas identical",
)


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return rows under `HEADER`, from what `result` returned."""
    rows = []
    for row in result["rows"]:
        accuracy, difference = Estimate(**row["accuracy"]), Estimate(**row["difference"])
        low, high = row["interval"] or (float("nan"), float("nan"))
        compared = (
            ("", "", "")
            if row["codec"] == BASE
            else (f"{100 * difference.mean:+.2f}", f"{100 * low:+.2f} to {100 * high:+.2f}", row["verdict"])
        )
        rows.append(
            (
                row["codec"],
                f"{100 * row['sent_share']:.1f} %",
                f"{100 * accuracy.mean:.2f} ± {100 * (accuracy.deviation or 0):.2f}",
                *compared,
                "yes" if row["replicas_equal"] else "NO",
            )
        )
    return rows


def title(result: dict[str, Any]) -> str:
    """Return what was trained, in one line."""
    how = result["setting"]
    return (
        f"{how['network']} on {how['data']}, {how['hosts']} ranks, {how['steps']} steps of "
        f"{how['hosts'] * how['batch']} samples, {len(result['seeds'])} seeds"
    )


NOTE = (
    "Accuracy: mean ± standard deviation over seeds. Points from fp32: mean over equal seeds. Verdicts, with "
    "95 % confidence: same: less than a point below fp32. near: below fp32, but by less than a point. lower: "
    "below fp32, perhaps by more than a point."
)
