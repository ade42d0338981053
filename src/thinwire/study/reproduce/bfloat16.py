"""Pure bfloat16, and how small updates are rounded (Zamirai et al. 2020)."""

from thinwire.study.reproduce.paper import FULL, QUICK, Arm, Claim, Paper, Table

ARMS = (
    Arm("fp32"),
    Arm("bf16, fp32 weights", recipe="bf16~fp32"),
    Arm("bf16, to nearest", recipe="bf16"),
    Arm("bf16, at random", recipe="bf16~sr"),
    Arm("bf16, Kahan", recipe="bf16", update="kahan"),
)
FASHION = Table("Fashion-MNIST, small rate", "fashion-mnist", "cnn-small", ARMS, 1, 4680, 64, 0.002, 0.9)
DIGITS = Table("digits, small rate", "digits", "mlp", ARMS, 1, 120, 64, 0.01, 0.9, seeds=2)
PAPER = Paper(
    "bfloat16",
    "Revisiting bfloat16 training",
    "Zamirai, Zhang, Aberger and De Sa: Revisiting BFloat16 Training, arXiv 2010.06192",
    "Is a 16-bit unit enough, if weights are updated with care?",
    {FULL: (FASHION,), QUICK: (DIGITS,)},
    (
        Claim(
            "bfloat16 trains like float32 if weights are float32", FASHION.title, "same",
            ("bf16, fp32 weights",),
        ),
        Claim("updates rounded to nearest cost accuracy", FASHION.title, "lower", ("bf16, to nearest",)),
        Claim(
            "with updates rounded at random, or with Kahan, bfloat16 trains like float32", FASHION.title,
            "same", ("bf16, at random", "bf16, Kahan"),
        ),
        Claim(
            "updates rounded at random are better than to nearest", FASHION.title, "better",
            ("bf16, at random", "bf16, to nearest"),
        ),
        Claim(
            "updates with Kahan are better than to nearest", FASHION.title, "better",
            ("bf16, Kahan", "bf16, to nearest"),
        ),
        Claim("Kahan trains in quick runs", DIGITS.title, "trains", ("bf16, Kahan",), by="us"),
    ),
    (
        "The paper trains larger networks on larger data; here the rate is small, so that updates are small "
        "beside weights, as late in a long training.",
    ),
)  # fmt: skip
