"""One sentence that says what came out."""

from typing import Any

from thinwire.report import text
from thinwire.study.statistics import Estimate

TOLERANCE = 0.01  #: accuracies this near are called the same: one point
BASES = ("fp32", "plain")


def headline(setting: dict[str, Any]) -> str:
    """The fastest codec that is known to keep the accuracy; else one that may; else the fastest at all."""
    gain = "run_speedup" if setting["throttled"] else "ratio"
    others = [each for each in setting["codecs"] if each["codec"] not in BASES]
    rivals = [each for each in others if each[gain] and each["difference"]]
    if not rivals:
        return _alone(setting)
    found = [(each, Estimate(**each["difference"])) for each in rivals]
    same = [each for each, difference in found if _is_same(difference)]
    good = same or [each for each, difference in found if _keeps(difference)] or rivals
    best = max(good, key=lambda each: each[gain]["mean"])
    ending = _measured(_ending(Estimate(**best["difference"])), setting["measure"])
    said = f"{_name(best, setting)} {_gain(best, setting)} and {ending}."
    return said[0].upper() + said[1:] if best["codec"] == "auto" else said


def _is_same(difference: Estimate) -> bool:
    """The interval holds zero, and nothing beyond the tolerance."""
    if difference.interval is None:
        return False
    low, high = difference.interval
    return -TOLERANCE <= low <= 0 <= high <= TOLERANCE


def _keeps(difference: Estimate) -> bool:
    """Not lower by more than the tolerance, nor lower for certain."""
    if not difference.mean >= -TOLERANCE:
        return False
    return difference.margin is None or difference.mean + difference.margin >= 0


def _name(best: dict[str, Any], setting: dict[str, Any]) -> str:
    if best["codec"] != "auto" or not setting["choice"]:
        return str(best["codec"])
    return f"auto, which chose {text.listed(list(setting['choice']['chosen']))},"


def _gain(best: dict[str, Any], setting: dict[str, Any]) -> str:
    if not setting["throttled"]:
        return f"sends {text.times(best['ratio']['mean'])} fewer bytes than fp32"
    speedup = best["run_speedup"]["mean"]  # of the whole run, with what choosing took
    faster = f"{text.short(speedup, 2)}{text.TIMES} faster" if speedup >= 1 else _slower(speedup)
    return f"trains {faster} than fp32 over {text.link(setting['link'])}"


def _slower(speedup: float) -> str:
    return f"{text.short(1 / speedup, 2)}{text.TIMES} slower"


def _ending(difference: Estimate) -> str:
    """What is known about the accuracy, in words no stronger than the interval."""
    found = text.points(difference)
    if difference.interval is None:
        return f"ends {_beside(difference.mean)} (one seed, so no spread)"
    low, high = difference.interval
    if _is_same(difference):
        return f"ends at the same accuracy (difference {found} points)"
    if low <= 0 <= high:
        return f"ends at an accuracy that these seeds cannot tell from it (difference {found} points)"
    return f"ends at {'a higher' if low > 0 else 'a lower'} accuracy (difference {found} points)"


def _beside(difference: float) -> str:
    size = f"{abs(100 * difference):.2f}"
    if size == "0.00":
        return "at the same accuracy"
    return f"{size} points {'higher' if difference > 0 else 'lower'} in accuracy"


def _alone(setting: dict[str, Any]) -> str:
    """Without fp32, or with nothing else, there is nothing to compare."""
    best = max(setting["codecs"], key=lambda each: each["accuracy"]["mean"])
    said = f"{best['codec']} ends at an accuracy of {text.percent(Estimate(**best['accuracy']))}."
    return _measured(said, setting["measure"])


def _measured(said: str, measure: str) -> str:
    """The same with the measure's own name."""
    named = said.replace(f"an {text.ACCURACY}", f"a {measure}")
    return (
        said if measure == text.ACCURACY else named if named != said else said.replace(text.ACCURACY, measure)
    )
