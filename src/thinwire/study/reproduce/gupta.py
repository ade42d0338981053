"""16-bit fixed point, rounded to nearest and at random (Gupta et al. 2015)."""

from thinwire.study.reproduce.paper import FULL, QUICK, Arm, Claim, Paper, Table

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
    {FULL: (MNIST,), QUICK: (DIGITS,)},
    (
        Claim(
            "rounded at random, <8, 8>, <6, 10> and <4, 12> train like float32", MNIST.title, "same",
            ("<8, 8> at random", "<6, 10> at random", "<4, 12> at random"),
        ),
        Claim("rounded at random, <2, 14> trains like float32", MNIST.title, "same", ("<2, 14> at random",)),
        Claim(
            "rounded to nearest, 8 or 10 fractional bits fail", MNIST.title, "fails",
            ("<8, 8> to nearest", "<6, 10> to nearest"),
        ),
        Claim(
            "with 8 fractional bits, rounding at random is better than to nearest", MNIST.title, "better",
            ("<8, 8> at random", "<8, 8> to nearest"),
        ),
        Claim(
            "<4, 12> is better if errors stop where results are cut off", MNIST.title, "better",
            ("<4, 12> at random", "<4, 12> at random, errors pass ends"), by="us",
        ),
        Claim(
            "<2, 14> trains like float32 if results have <4, 12>", MNIST.title, "same", (WIDER.name,), by="us"
        ),
        Claim(
            "random rounding trains in quick runs", DIGITS.title, "trains",
            ("<6, 10> at random",), by="us",
        ),
    ),
    (
        "Weights, activations, errors, gradients and updates are all in fixed point <integer, fractional "
        "bits>, sums are exact and rounded once. Rates and first weights are ours.",
        "Numbers <2, 14> end at 2, and so do outputs and the loss. With results <4, 12>, weights, errors, "
        "gradients and updates stay in <2, 14>, and results on the way forward and the loss are in <4, 12>.",
        "The paper does not say what becomes of errors where a result was cut off at the ends of its range. "
        "Here they stop. If they pass, few integer bits are not enough: outputs are cut off, and errors push "
        "them further.",
        "The line with results <4, 12> was trained on a CPU, all others on a GPU.",
        "That <4, 12> is among the paper's formats is our reading; it varies the fractional bits of 16.",
    ),
)  # fmt: skip
