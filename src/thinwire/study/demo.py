"""The demo: one network, one link, several codecs, the same seeds and hyper-parameters for all.

Real data is trained on emulated hosts, whose link is so slow that float32 gradients take most of a step. The
learning rate was chosen for float32 and is the same for every codec.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire import data
from thinwire.data import Progress as Fetching
from thinwire.errors import LabError
from thinwire.lab import Lab
from thinwire.study.record import Trial
from thinwire.study.run import LOOPBACK

STUDY = "demo"
SETS = ("fashion-mnist", "mnist", "cifar10", "digits")  #: the first that can be had
CODECS = ("fp32", "fp16", "int8", "int4", "onebit", "auto")
HOSTS, LINK, SEEDS = 2, "100mbit", 3
STEPS, QUICK_STEPS = 96, 30
BATCH, LR = 64, 0.05
NETWORKS = {"digits": "mlp-wide"}  #: images of 8 x 8 are too small for the convolutions of the others
NETWORK = "cnn"
#: Seconds of a trial beside those of fp32, for a first guess of how long it takes.
SHARES = {"fp16": 0.55, "int8": 0.35, "int4": 0.28, "onebit": 0.25, "auto": 0.4}


@dataclass(frozen=True)
class Plan:
    """What to train, and what a reader must know about it."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


def plan(
    hosts: int = HOSTS,
    link: str = LINK,
    seeds: int = SEEDS,
    *,
    quick: bool = False,
    codecs: Sequence[str] | None = None,
    fetching: Fetching | None = None,
) -> Plan:
    """Choose the data and the place; one seed after another, so that a demo cut short has whole seeds."""
    chosen, notes = data.best(*SETS, progress=fetching)
    data.fetch(chosen)  # nothing to do, or an error that says what to do
    if chosen == SETS[-1]:
        notes = (*notes, f"the demo trains on {chosen}, which are small and few")
    place, remarks = find_place(hosts, link)
    trials = [
        Trial(
            STUDY,
            chosen,
            NETWORKS.get(chosen, NETWORK),
            codec,
            seed,
            hosts,
            place,
            QUICK_STEPS if quick else STEPS,
            BATCH,
            LR,
        )
        for seed in range(1 if quick else seeds)
        for codec in codecs or CODECS
    ]
    return Plan(tuple(trials), (*notes, *remarks))


def find_place(hosts: int, link: str) -> tuple[str, tuple[str, ...]]:
    """The link, or loopback and why, where no lab can be made."""
    if link == LOOPBACK:
        return LOOPBACK, ("loopback: nothing is throttled, so only bytes and accuracy tell codecs apart",)
    lab = Lab(hosts=hosts, link=link)
    try:
        with lab:
            return link, ()
    except LabError as error:
        return LOOPBACK, (f"not throttled, on loopback: {error}",)
