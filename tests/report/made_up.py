"""Made-up records: plausible numbers that nobody measured, for tests of the store and the page only."""

import math
import random
from dataclasses import replace

from thinwire.study import Layer, Point, Record, Trial

CODECS = ("fp32", "fp16", "int8", "int4", "onebit", "auto")
BITS = {"plain": 32, "fp32": 32, "fp16": 16, "int8": 8.1, "int4": 4.2, "onebit": 1.3, "auto": 4.2}
SNR = {"fp16": 68.0, "int8": 39.0, "int4": 15.0, "onebit": 1.9, "auto": 15.0}
LOST = {"int4": 0.001, "onebit": 0.021, "auto": 0.001}  #: accuracy a codec costs
LAYERS = (
    ("conv1.weight", 432), ("conv1.bias", 16), ("conv2.weight", 4608), ("conv2.bias", 32),
    ("conv3.weight", 18432), ("conv3.bias", 64), ("fc1.weight", 131072), ("fc1.bias", 128),
    ("fc2.weight", 1280), ("fc2.bias", 10),
)  # fmt: skip
NUMEL = sum(numel for _, numel in LAYERS)
COMPUTE_S = 0.021
RATES = {"100mbit": 100e6, "1gbit": 1e9, "loopback": 40e9}
ENVIRONMENT = {
    "date": "2000-01-01T00:00:00+00:00",
    "commit": "made up",
    "machine": {"system": "made up", "processor": "made up <& sons>", "gpu": "none"},
    "package": {"python": "3.11", "torch": "2.11"},
}


def trial(codec="int8", seed=0, link="100mbit", study="demo"):
    return Trial(study, "digits", "small_cnn", codec, seed, 4, link, 400, 32, 0.05)


def record(codec="int8", seed=0, link="100mbit", study="demo"):
    """One run; the same numbers for the same arguments."""
    asked = trial(codec, seed, link, study)
    rng = random.Random(f"{codec} {seed} {link}")
    sent = NUMEL * BITS[codec] / 8 * 1.5
    wire_s = sent * 8 / RATES[link] * rng.uniform(1.04, 1.09)
    encode_s, decode_s = (0.0, 0.0) if codec in ("plain", "fp32") else (0.0009, 0.0006)
    communication_s = wire_s + encode_s + decode_s
    wait_s = max(0.12 * communication_s, communication_s - 0.6 * COMPUTE_S)
    compute_s = COMPUTE_S * rng.uniform(0.98, 1.03)
    step_s = compute_s + wait_s
    final = 0.962 - LOST.get(codec, 0) + random.Random(seed).gauss(0, 0.004) + rng.gauss(0, 0.0008)
    predicted_s = step_s * rng.uniform(0.9, 1.06) if codec == "auto" else None
    return Record(
        trial=asked,
        points=tuple(_points(asked, step_s, sent, final, rng)),
        accuracy=final,
        step_s=step_s,
        samples_per_s=asked.hosts * asked.batch / step_s,
        sent_nbytes_per_step=sent,
        fp32_nbytes_per_step=NUMEL * 4 * 1.5,
        seconds={
            "compute": compute_s, "encode": encode_s, "wire": wire_s, "decode": decode_s, "wait": wait_s,
        },
        overlap=1 - wait_s / communication_s,
        layers=tuple(_layers(codec, rng)),
        replicas_equal=True,
        predicted_step_s=predicted_s,
        choice=_choice(predicted_s, step_s) if codec == "auto" else None,
        environment=ENVIRONMENT,
        command=f"thinwire study run --codec {codec} --seed {seed} --link {link}",
    )  # fmt: skip


def records(codecs=CODECS, seeds=(0, 1, 2), link="100mbit", study="demo"):
    return [record(codec, seed, link, study) for codec in codecs for seed in seeds]


def unequal(several):
    """The same run, but the replicas drifted apart."""
    return replace(several, replicas_equal=False)


def _points(asked, step_s, sent, final, rng):
    for number in range(1, 21):
        step = asked.steps * number // 20
        fell = math.exp(-step / 90)
        loss = 2.25 * fell + (0.12 + 2.2 * (0.97 - final)) * (1 - fell) + rng.gauss(0, 0.02)
        accuracy = None if number % 5 else final if number == 20 else final - 0.8 * math.exp(-step / 70)
        yield Point(step, step * step_s, round(step * sent), max(loss, 0.01), accuracy)


def _layers(codec, rng):
    if codec == "plain":
        return
    for name, numel in LAYERS:
        snr_db = SNR[codec] + rng.gauss(0, 1.5) + math.log10(numel) * 0.4 if codec in SNR else None
        error = 0.0 if snr_db is None else 10 ** (-snr_db / 20)
        used = "int4" if codec == "auto" else codec
        yield Layer(name, used, numel, round(numel * BITS[codec] / 8), error, snr_db, None)


def _choice(predicted_s, measured_s):
    def candidate(codec, factor, error, why=""):
        nbytes = round(NUMEL * BITS[codec] / 8 * 1.5)
        return {
            "codec": codec, "predicted_step_s": predicted_s * factor, "sent_nbytes": nbytes,
            "error": error, "allowed": not why, "why": why,
        }  # fmt: skip

    return {
        "chosen": "int4",
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "candidates": [
            candidate("fp32", 3.5, 0.0),
            candidate("fp16", 2.05, 0.0004),
            candidate("int8", 1.22, 0.011),
            candidate("int4", 1.0, 0.18),
            candidate("onebit", 0.93, 0.8, "error 0.80 is above the limit of 0.30"),
        ],
    }
