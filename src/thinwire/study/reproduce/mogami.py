"""Training without multiplications: float patterns added as integers (Mogami 2020)."""

from thinwire.study.reproduce.paper import FULL, QUICK, Arm, Claim, Paper, Table

ARMS = (
    Arm("fp32"),
    Arm("forward only", recipe="mogami/forward"),
    Arm("forward and backward", recipe="mogami"),
    Arm("forward only, offset 1/16", recipe="mogami/forward/0.0625"),
    Arm("forward and backward, offset 1/16", recipe="mogami/0.0625"),
)
FASHION = Table("Fashion-MNIST", "fashion-mnist", "cnn-small", ARMS, 1, 4680, 128, 0.1, 0.9)
DIGITS = Table("digits", "digits", "mlp", (ARMS[0], ARMS[2]), 1, 60, 64, 0.05, 0.9, seeds=2)
PAPER = Paper(
    "mogami",
    "No multiplications",
    "Mogami: Deep Neural Network Training without Multiplications, arXiv 2012.03458",
    "Can every product be replaced by an integer addition of float patterns?",
    {FULL: (FASHION,), QUICK: (DIGITS,)},
    (
        Claim(
            "layers without products train like float32, forward and backward", FASHION.title, "same",
            ("forward and backward",),
        ),
        Claim("layers without products forward train like float32", FASHION.title, "same", ("forward only",)),
        Claim("it trains in quick runs", DIGITS.title, "trains", ("forward and backward",), by="us"),
    ),
    (
        "The paper trains residual networks. Here only products of layers are replaced, not the optimizer's, "
        "and sums are made in chunks of 512.",
    ),
)  # fmt: skip
