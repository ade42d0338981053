"""Posits in five stages of training: 8 bits everywhere fail, 8 bits where they suffice train (PositNN)."""

from thinwire.study.reproduce.paper import FULL, QUICK, Arm, Claim, Paper, Table


def _arm(name: str, recipe: str, paper: float | None = None) -> Arm:
    return Arm(name, recipe=f"positnn/{recipe}", paper=paper)


def _mixed(low: int, weights: int, loss: int, paper: float, underflow: str = "") -> Arm:
    name = f"FBG {low}, O {weights}, L {loss}, quire{', underflow' if underflow else ''}"
    return _arm(name, f"F{low}B{low}G{low}O{weights}L{loss}+quire{underflow}", paper)


ARMS = (
    Arm("fp32", paper=90.28),
    _arm("all 16", "16", 90.55),
    _arm("all 12", "12", 90.26),
    _arm("all 10", "10", 88.52),
    _arm("all 9", "9", 82.50),
    _arm("all 8", "8", 12.55),
    _arm("all 8, quire", "8+quire", 19.39),
    _mixed(8, 16, 8, 88.14),
    _mixed(8, 12, 8, 88.06),
    _mixed(8, 12, 12, 90.07),
    _mixed(7, 12, 12, 89.69),
    _mixed(6, 12, 12, 88.47),
    _mixed(5, 12, 12, 54.19),
    _mixed(5, 12, 12, 80.20, "+underflow"),
    _mixed(8, 16, 16, 90.46),
    _arm("FBG 5, O 12, L 12, fused", "F5B5G5O12L12+quire+fused", 54.19),
    _arm("FBG 5, O 12, L 12, fused, underflow", "F5B5G5O12L12+quire+fused+underflow", 80.20),
)
FASHION = Table(
    "Fashion-MNIST, LeNet-5",
    "fashion-mnist",
    "lenet5",
    ARMS,
    1,
    9370,
    64,
    1 / 16,
    0.5,
    halve_every=0.4,
    summed=True,
)
DIGITS = Table(
    "digits, 64-256-128-10",
    "digits",
    "mlp",
    (ARMS[0], ARMS[6], ARMS[9]),
    1,
    60,
    64,
    1 / 16,
    0.5,
    summed=True,
    seeds=2,
)
PAPER = Paper(
    "positnn",
    "Mixed low-precision posits",
    "Raposo, Tomas and Roma: PositNN: Training Deep Neural Networks with Mixed Low-Precision Posit, ICASSP "
    "2021, arXiv 2105.00053",
    "Which stages of training can do with 8-bit posits?",
    {FULL: (FASHION,), QUICK: (DIGITS,)},
    (
        Claim("16 and 12 bits everywhere train like float32", FASHION.title, "same", ("all 16", "all 12")),
        Claim("8 bits everywhere fail", FASHION.title, "fails", ("all 8", "all 8, quire")),
        Claim(
            "8 bits train like float32 if weights and loss have 12 or 16", FASHION.title, "same",
            ("FBG 8, O 12, L 12, quire", "FBG 8, O 16, L 16, quire"),
        ),
        Claim(
            "of 12, 10, 9 and 8 bits everywhere, fewer are worse", FASHION.title, "order",
            ("all 12", "all 10", "all 9", "all 8"),
        ),
        Claim(
            "5 bits learn", FASHION.title, "trains",
            ("FBG 5, O 12, L 12, fused", "FBG 5, O 12, L 12, fused, underflow"),
        ),
        Claim(
            "5 bits are better if small numbers may become zero", FASHION.title, "better",
            ("FBG 5, O 12, L 12, fused, underflow", "FBG 5, O 12, L 12, fused"),
        ),
        Claim(
            "12 bits for weights and loss train in quick runs", DIGITS.title, "trains",
            ("FBG 8, O 12, L 12, quire",), by="us",
        ),
    ),
    (
        "Stages: O optimizer, L loss, F forward, B backward, G gradient; all posits have 2 exponent bits. "
        "The paper's accuracies are those of one run each.",
        "Network, batch, rate and its halving are those of the authors' code; first weights are torch's. As "
        "there, gradients are sums over a batch, which are then divided by it and rounded again.",
        "Quire: a product is summed exactly and rounded, then a bias is added and the sum rounded again. "
        "Fused: the bias is added in the quire, before the one rounding, as in the authors' code. These "
        "lines were trained on a CPU.",
    ),
)  # fmt: skip
