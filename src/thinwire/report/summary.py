"""Turn records into page data: dictionaries and lists, from which the page and the table are made."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.report import text
from thinwire.report.headline import headline
from thinwire.statistics import Estimate, differences, estimate, ratios
from thinwire.study import Record

BASE = "fp32"  #: what speed and accuracy are compared with
FIRST, LAST = (BASE, "plain"), "auto"
SETTING = ("study", "data", "network", "hosts", "link", "steps", "batch", "lr", "device")
SECONDS = ("compute", "wait", "encode", "wire", "decode")
CURVE = ("step", "seconds", "sent_nbytes", "loss", "accuracy")

Plain = dict[str, Any]


def summarize(records: Iterable[Record]) -> Plain:
    """Return all that the page shows. Runs that differ in more than codec and seed form separate settings."""
    unique = list({record.trial.key: record for record in records}.values())
    if not unique:
        raise ThinwireError("there are no records to report; train first, for instance with: thinwire demo")
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in unique:
        grouped.setdefault(tuple(getattr(record.trial, name) for name in SETTING), []).append(record)
    settings = [_setting(group) for group in grouped.values()]
    settings.sort(key=lambda setting: not setting["throttled"])  # throttled links say more about codecs
    return {
        "study": ", ".join(sorted({record.trial.study for record in unique})),
        "headline": settings[0]["headline"],
        "settings": settings,
        "environment": _environment(unique),
        "commands": list(dict.fromkeys(record.command for record in unique if record.command)),
    }


def _setting(records: Sequence[Record]) -> Plain:
    """Summarize runs that differ in codec and seed only."""
    trial = records[0].trial
    groups = {name: [each for each in records if each.trial.codec == name] for name in _codecs(records)}
    codecs = [_codec(name, runs, groups.get(BASE, [])) for name, runs in groups.items()]
    setting = {
        **{name: getattr(trial, name) for name in SETTING},
        "throttled": trial.link != text.LOOPBACK,
        "gpus": _gpus(records),
        "measure": text.measure(trial.data),
        "seeds": sorted({record.trial.seed for record in records}),
        "codecs": codecs,
        "choice": _choice(groups),
    }
    return {**setting, "headline": headline(setting), "notes": _notes(setting)}


def _gpus(records: Sequence[Record]) -> str | None:
    """Describe the GPUs of the hosts; None if they computed on CPUs."""
    if records[0].trial.device == "cpu":
        return None
    lab = records[0].environment.get("lab", {})
    names = lab.get("gpus") or ["GPU"]
    if not lab.get("gpu_shared"):
        return f"{text.listed(list(dict.fromkeys(names)))}, one for each host" if lab else "GPU"
    count = "one" if len(names) == 1 else str(len(names))
    mps = str(lab.get("mps", ""))
    served = "" if not mps else ", without MPS" if mps.startswith("none") else ", with MPS"
    return f"{count} {text.listed(list(dict.fromkeys(names)))} for all hosts{served}"


def _codecs(records: Sequence[Record]) -> list[str]:
    """Return names in the order of the page: the base, then from many bytes to few, then auto."""
    sent: dict[str, list[float]] = {}
    for record in records:
        sent.setdefault(record.trial.codec, []).append(record.sent_nbytes_per_step)

    def place(name: str) -> tuple[int, float, str]:
        group = FIRST.index(name) if name in FIRST else len(FIRST) + (name == LAST)
        return group, -fmean(sent[name]), name

    return sorted(sent, key=place)


def _codec(name: str, runs: Sequence[Record], base: Sequence[Record]) -> Plain:
    """Return a codec's row of the table and its curves."""
    runs = sorted(runs, key=lambda run: run.trial.seed)
    curves = [_curve(run) for run in runs]
    return {
        "codec": name,
        "seeds": [run.trial.seed for run in runs],
        "sent_nbytes_per_step": _mean(run.sent_nbytes_per_step for run in runs),
        "ratio": _mean(
            run.fp32_nbytes_per_step / run.sent_nbytes_per_step for run in runs if run.sent_nbytes_per_step
        ),
        "step_s": _mean(run.step_s for run in runs),
        "samples_per_s": _mean(run.samples_per_s for run in runs),
        "speedup": _plain(ratios(_seeds(base, _step_s), _seeds(runs, _step_s))),
        "run_s": _mean(map(_run_s, runs)),
        "run_speedup": _plain(ratios(_seeds(base, _run_s), _seeds(runs, _run_s))),
        "accuracy": _mean(run.accuracy for run in runs),
        "difference": None
        if name == BASE
        else _plain(differences(_seeds(runs, _accuracy), _seeds(base, _accuracy))),
        "replicas_equal": all(run.replicas_equal for run in runs),
        "seconds": {
            part: _mean(run.seconds[part] for run in runs if part in run.seconds) for part in SECONDS
        },
        "overlap": _mean(run.overlap for run in runs),
        "predicted_step_s": _mean(run.predicted_step_s for run in runs if run.predicted_step_s is not None),
        "runs": curves,
        "mean": _mean_curve(curves) if len(curves) > 1 else None,
        "layers": _layers(runs),
    }


def _step_s(record: Record) -> float:
    return record.step_s


def _run_s(record: Record) -> float:
    """Seconds of all steps, including those in which `auto` measured."""
    return record.points[-1].seconds


def _accuracy(record: Record) -> float:
    return record.accuracy


def _seeds(runs: Sequence[Record], value: Callable[[Record], float]) -> dict[int, float]:
    return {run.trial.seed: value(run) for run in runs}


def _plain(value: Estimate | None) -> Plain | None:
    return None if value is None else asdict(value)


def _mean(values: Iterable[float]) -> Plain | None:
    return _plain(estimate(values))


def _curve(run: Record) -> Plain:
    columns = {name: [getattr(point, name) for point in run.points] for name in CURVE}
    return {"seed": run.trial.seed, **columns}


def _mean_curve(curves: Sequence[Plain]) -> Plain:
    """Return the mean over seeds at every step that all of them have."""
    places = [{step: place for place, step in enumerate(curve["step"])} for curve in curves]
    shared = [step for step in curves[0]["step"] if all(step in each for each in places)]
    mean: Plain = {"step": shared}
    for name in CURVE[1:]:
        rows = [
            [curve[name][place[step]] for curve, place in zip(curves, places, strict=True)] for step in shared
        ]
        mean[name] = [None if None in row else fmean(row) for row in rows]
    return mean


def _layers(runs: Sequence[Record]) -> list[Plain]:
    """Return every layer's signal to noise, as mean over seeds of decibels, and the first seed's facts."""
    layers = []
    for number, layer in enumerate(runs[0].layers):
        same = [run.layers[number] for run in runs if len(run.layers) == len(runs[0].layers)]
        known = [each.snr_db for each in same if each.snr_db is not None]
        layers.append(
            {
                "name": layer.name,
                "codec": ", ".join(dict.fromkeys(each.codec for each in same)),
                "numel": layer.numel,
                "wire_nbytes": layer.wire_nbytes,
                "snr_db": fmean(known) if known else None,
                "exact": all(each.error == 0 for each in same),
            }
        )
    return layers


def _choice(groups: dict[str, list[Record]]) -> Plain | None:
    """Return auto's predictions for its candidates, beside the times of the candidates' and auto's runs."""
    runs = groups.get(LAST, [])  # a short run may end before anything is chosen
    choices = [run.choice for run in runs if run.choice and run.choice["predicted_step_s"] is not None]
    if not choices:
        return None
    names = list(dict.fromkeys(each["codec"] for choice in choices for each in choice["candidates"]))
    chosen = [choice["chosen"] for choice in choices]
    measured = [each["measured_step_s"] for each in choices if each.get("measured_step_s") is not None]
    return {
        "chosen": {name: chosen.count(name) for name in dict.fromkeys(chosen)},
        "predicted_step_s": _mean(choice["predicted_step_s"] for choice in choices),
        "measured_step_s": _mean(measured) or _mean(run.step_s for run in groups[LAST]),
        "candidates": sorted(
            (_candidate(name, choices, groups.get(name, [])) for name in names),
            key=lambda each: each["predicted_step_s"]["mean"],
        ),
    }


def _candidate(name: str, choices: Sequence[Plain], runs: Sequence[Record]) -> Plain:
    same = [each for choice in choices for each in choice["candidates"] if each["codec"] == name]
    return {
        "codec": name,
        "predicted_step_s": _mean(each["predicted_step_s"] for each in same),
        "measured_step_s": _mean(run.step_s for run in runs),
        "sent_nbytes": _mean(each["sent_nbytes"] for each in same),
        "error": _mean(each["error"] for each in same if each["error"] is not None),
        "allowed": all(each["allowed"] for each in same),
        "why": next((each["why"] for each in same if each["why"]), ""),
    }


def _notes(setting: Plain) -> list[str]:
    """Return what a reader must know before trusting the numbers."""
    notes = []
    if not setting["throttled"]:
        notes.append("The link is loopback: not throttled, so speed-ups here say nothing about a network.")
    if setting["gpus"] and "for all" in setting["gpus"]:
        notes.append(
            f"The hosts share a GPU ({setting['gpus']}): computing takes longer than with a GPU for each."
        )
    if setting["measure"] != text.ACCURACY:
        notes.append(
            "Accuracy is that of the next byte: how often the likeliest byte is the one that follows."
        )
    apart = [each["codec"] for each in setting["codecs"] if not each["replicas_equal"]]
    if apart:
        notes.append(f"Replicas did not stay identical with {text.listed(apart)}: do not trust these runs.")
    missing = [
        f"{each['codec']} ({', '.join(str(seed) for seed in setting['seeds'] if seed not in each['seeds'])})"
        for each in setting["codecs"]
        if each["seeds"] != setting["seeds"]
    ]
    if missing:
        notes.append(f"Seeds are missing for {text.listed(missing)}; comparisons use the seeds both have.")
    if len(setting["seeds"]) == 1:
        notes.append("One seed only: the numbers have no spread.")
    return notes


def _environment(records: Sequence[Record]) -> list[list[str]]:
    """Return the environment as names and values; several values where records differ."""
    environment: dict[str, list[str]] = {}
    for record in records:
        for name, value in _flat(record.environment):
            values = environment.setdefault(name, [])
            if value not in values:
                values.append(value)
    return [[name, _joined(sorted(values))] for name, values in environment.items()]


def _flat(entries: Plain, above: str = "") -> Iterable[tuple[str, str]]:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name} ")
        else:
            yield f"{above}{name}", str(value)


def _joined(values: list[str]) -> str:
    """Join a few values; of many, such as dates, only the first and the last."""
    return ", ".join(values) if len(values) <= 3 else f"{values[0]} to {values[-1]}"
