"""The demo: one network, one link, several codecs, the same seeds and hyper-parameters for all.

Real data is trained on emulated hosts, whose link is so slow that float32 gradients take most of a step. The
learning rate was chosen for float32 and is the same for every codec.

On a GPU, which the hosts share, it is a GPT of 30 M parameters that learns to predict the bytes of a text
over 10 Gbit/s. In a step of float32 a host sends 120 MB, which takes 100 ms: several times what it computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import data
from thinwire.data import Progress as Fetching
from thinwire.errors import InputError, LabError
from thinwire.lab import Lab
from thinwire.study.record import Trial
from thinwire.study.run import LOOPBACK

STUDY = "demo"
SETS = ("fashion-mnist", "mnist", "cifar10", "digits")  #: the first that is available is used
CODECS = ("fp32", "fp16", "int8", "int4", "onebit", "auto")
HOSTS, LINK, SEEDS = 2, "100mbit", 3
STEPS, QUICK_STEPS = 96, 30
BATCH, LR = 64, 0.05
NETWORKS = {"digits": "mlp-wide"}  #: images of 8 x 8 are too small for the convolutions of the others
NETWORK = "cnn"
#: Seconds of a trial relative to fp32, for a first estimate of how long it takes.
SHARES = {"fp16": 0.55, "int8": 0.35, "int4": 0.28, "onebit": 0.25, "auto": 0.4}
#: The same on a GPU: data sets with their network, batch and learning rate.
CUDA_SETS = {
    "sotu": ("gpt", 64, 5e-4),
    "cifar10": ("resnet18", 64, LR),
    "fashion-mnist": ("mlp-wide", BATCH, LR),
    "mnist": ("mlp-wide", BATCH, LR),
    "digits": ("mlp-wide", BATCH, LR),
}
CUDA_CODECS = ("fp32", "fp16", "int8", "int4", "onebit", "powersgd", "auto")
CUDA_LINK = "10gbit"
CUDA_STEPS, CUDA_QUICK_STEPS = 120, 32
CUDA_SHARES = {"fp16": 0.6, "int8": 0.4, "int4": 0.3, "onebit": 0.25, "powersgd": 0.25, "auto": 0.45}


@dataclass(frozen=True)
class DemoOptions:
    """Trials to run, and notes for the reader."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


def plan(
    hosts: int = HOSTS,
    link: str | None = None,
    seeds: int = SEEDS,
    *,
    device: str = "cpu",
    quick: bool = False,
    codecs: Sequence[str] | None = None,
    fetching: Fetching | None = None,
) -> DemoOptions:
    """Choose data and link; trials go seed by seed, so that an interrupted demo has whole seeds."""
    on_cpu = check(device) == "cpu"
    sets = tuple(SETS if on_cpu else CUDA_SETS)
    chosen, notes = data.best(*sets, progress=fetching)
    data.fetch(chosen)  # does nothing if it is there, else fails and says what to do
    if chosen == sets[-1]:
        notes = (*notes, f"the demo trains on {chosen}, which are small and few")
    if not on_cpu and chosen != sets[0]:
        notes = (*notes, f"with {sets[0]} it would train a larger network: thinwire data fetch {sets[0]}")
    place, remarks = find_place(hosts, link or (LINK if on_cpu else CUDA_LINK))
    if on_cpu:
        network, batch, lr = NETWORKS.get(chosen, NETWORK), BATCH, LR
        steps = QUICK_STEPS if quick else STEPS
    else:
        network, batch, lr = CUDA_SETS[chosen]
        steps = CUDA_QUICK_STEPS if quick else CUDA_STEPS
    trials = [
        Trial(STUDY, chosen, network, codec, seed, hosts, place, steps, batch, lr, device=device)
        for seed in range(1 if quick else seeds)
        for codec in codecs or (CODECS if on_cpu else CUDA_CODECS)
    ]
    return DemoOptions(tuple(trials), (*notes, *remarks))


def check(device: str) -> str:
    """Return the device; raises InputError if it is unknown or missing."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"cannot train on '{device}'; use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu")
    return device


def find_place(hosts: int, link: str) -> tuple[str, tuple[str, ...]]:
    """Return the link, or loopback and why no lab can be made."""
    if link == LOOPBACK:
        return LOOPBACK, ("loopback: nothing is throttled, so only bytes and accuracy tell codecs apart",)
    lab = Lab(hosts=hosts, link=link, device="cpu")
    try:
        with lab:
            return link, ()
    except LabError as error:
        return LOOPBACK, (f"not throttled, on loopback: {error}",)
