"""The result in one sentence."""

from typing import Any

from thinwire.report import text
from thinwire.statistics import Estimate

TOLERANCE = 0.01  #: accuracies this near are called the same: one point
BASES = ("fp32", "plain")


def headline(setting: dict[str, Any]) -> str:
    """Name the fastest codec known to keep the accuracy; else the fastest that may; else the fastest."""
    gain = "run_speedup" if setting["throttled"] else "ratio"
    others = [each for each in setting["codecs"] if each["codec"] not in BASES]
    rivals = [each for each in others if each[gain] and each["difference"]]
    if not rivals:
        return _alone(setting)
    pairs = [(each, Estimate(**each["difference"])) for each in rivals]
    same = [each for each, difference in pairs if _is_same(difference)]
    good = same or [each for each, difference in pairs if _keeps(difference)] or rivals
    best = max(good, key=lambda each: each[gain]["mean"])
    ending = _measured(_ending(Estimate(**best["difference"])), setting["measure"])
    sentence = f"{_name(best, setting)} {_gain(best, setting)} and {ending}."
    return sentence[0].upper() + sentence[1:] if best["codec"] == "auto" else sentence


def _is_same(difference: Estimate) -> bool:
    """Whether the interval contains zero and lies within the tolerance."""
    if difference.interval is None:
        return False
    low, high = difference.interval
    return -TOLERANCE <= low <= 0 <= high <= TOLERANCE


def _keeps(difference: Estimate) -> bool:
    """Whether it is not lower by more than the tolerance, and not certainly lower."""
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
    speedup = best["run_speedup"]["mean"]  # of the whole run, including the steps in which auto measures
    faster = f"{text.short(speedup, 2)}{text.TIMES} faster" if speedup >= 1 else _slower(speedup)
    return f"trains {faster} than fp32 over {text.link(setting['link'])}"


def _slower(speedup: float) -> str:
    return f"{text.short(1 / speedup, 2)}{text.TIMES} slower"


def _ending(difference: Estimate) -> str:
    """Describe the accuracy, claiming no more than the interval shows."""
    points = text.points(difference)
    if difference.interval is None:
        return f"ends {_beside(difference.mean)} (one seed, so no spread)"
    low, high = difference.interval
    if _is_same(difference):
        return f"ends at the same accuracy (difference {points} points)"
    if low <= 0 <= high:
        return f"ends at an accuracy that these seeds cannot tell from it (difference {points} points)"
    return f"ends at {'a higher' if low > 0 else 'a lower'} accuracy (difference {points} points)"


def _beside(difference: float) -> str:
    size = f"{abs(100 * difference):.2f}"
    if size == "0.00":
        return "at the same accuracy"
    return f"{size} points {'higher' if difference > 0 else 'lower'} in accuracy"


def _alone(setting: dict[str, Any]) -> str:
    """Describe the best accuracy; without fp32, or with nothing else, there is no comparison."""
    best = max(setting["codecs"], key=lambda each: each["accuracy"]["mean"])
    sentence = f"{best['codec']} ends at an accuracy of {text.percent(Estimate(**best['accuracy']))}."
    return _measured(sentence, setting["measure"])


def _measured(said: str, measure: str) -> str:
    """Replace "accuracy" by the measure's name."""
    named = said.replace(f"an {text.ACCURACY}", f"a {measure}")
    return (
        said if measure == text.ACCURACY else named if named != said else said.replace(text.ACCURACY, measure)
    )
