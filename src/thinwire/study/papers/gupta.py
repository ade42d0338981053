"""16-bit fixed point, rounded to nearest and at random (Gupta et al. 2015)."""

from thinwire.study.papers.paper import FULL, QUICK, Arm, Claim, Paper, Table

FRACTIONS = (8, 10, 12, 14)


def _arm(fraction: int, random: str, clip: str = "+clip") -> Arm:
    number = f"{16 - fraction}.{fraction}"
    how = ("at random" if random else "to nearest") + ("" if clip else ", errors pass ends")
    return Arm(f"<{16 - fraction}, {fraction}> {how}", recipe=f"gupta/{number}{random}+exact{clip}")


WIDER = Arm("<2, 14> at random, results <4, 12>", recipe="gupta/2.14/4.12~sr+exact+clip")
ARMS = (
    Arm("fp32"),
    *(_arm(fraction, random) for random in ("", "~sr") for fraction in FRACTIONS),
    *(_arm(fraction, "~sr", "") for fraction in (12, 14)),
    WIDER,
)
MNIST = Table("MNIST, 784-1000-1000-10", "mnist", "mlp-1000", ARMS, 1, 6000, 100, 0.1, 0.0, unit=True)
RANGE = Table(
    "digits, 64-256-128-10, range",
    "digits",
    "mlp",
    (ARMS[0], ARMS[8], WIDER),
    1,
    1500,
    64,
    0.1,
    0.0,
    unit=True,
)
DIGITS = Table(
    "digits, 64-256-128-10",
    "digits",
    "mlp",
    (ARMS[0], ARMS[2], ARMS[6], ARMS[8]),
    1,
    100,
    64,
    0.1,
    0.0,
    unit=True,
    seeds=2,
)
PAPER = Paper(
    "gupta",
    "Limited numerical precision",
    "Gupta, Agrawal, Gopalakrishnan and Narayanan: Deep Learning with Limited Numerical Precision, ICML "
    "2015, arXiv 1502.02551",
    "Can a network be trained in 16-bit fixed point, and does it matter how numbers are rounded?",
    {FULL: (MNIST, RANGE), QUICK: (DIGITS,)},
    (
        Claim(
            "rounded at random, <8, 8> to <4, 12> train like float32", MNIST.title, "same",
            ("<8, 8> at random", "<6, 10> at random", "<4, 12> at random"), 0.5,
        ),
        Claim("so does <2, 14>", MNIST.title, "same", ("<2, 14> at random",), 0.5),
        Claim(
            "rounded to nearest, few fractional bits fail", MNIST.title, "lower",
            ("<8, 8> to nearest", "<6, 10> to nearest"), 1.0,
        ),
        Claim(
            "at 8 fractional bits, random rounding is better", MNIST.title, "better",
            ("<8, 8> at random", "<8, 8> to nearest"),
        ),
        Claim(
            "errors must stop where numbers are cut off", MNIST.title, "better",
            ("<4, 12> at random", "<4, 12> at random, errors pass ends"), by="us",
        ),
        Claim(
            "<2, 14> trains like float32 if results have <4, 12>", RANGE.title, "same", (WIDER.name,), by="us"
        ),
        Claim(
            "random rounding trains in quick runs", DIGITS.title, "trains",
            ("<6, 10> at random",), 50.0, by="us",
        ),
    ),
    (
        "Weights, activations, errors, gradients and updates are all in fixed point <integer, fractional "
        "bits>, sums are exact and rounded once. Rates and first weights are ours.",
        "Numbers <2, 14> end at 2, and so do outputs and the loss. The smaller table keeps weights, errors, "
        "gradients and updates in <2, 14>, and results on the way forward and the loss in <4, 12>.",
        "The paper does not say what becomes of errors where a result was cut off at the ends of its range. "
        "Here they stop. If they pass, few integer bits are not enough: outputs are cut off, and errors push "
        "them further.",
    ),
)  # fmt: skip
