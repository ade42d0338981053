"""8-bit gradients, or activations and errors, in a network for MNIST (Dettmers 2016)."""

from thinwire.study.reproduce.paper import FULL, QUICK, Arm, Claim, Paper, Table

TYPES = {"dynamic tree": "tree8", "static tree": "static8", "mantissa": "mantissa8", "linear": "linear8"}
#: Types with a fixed scale: small for gradients, larger for activations.
FIXED = ("static8", "mantissa8")


def _arm(title: str, spec: str, pure: str) -> Arm:
    offset = ("~offset-1" if pure == "gradients" else "~offset0") if spec in FIXED else ""
    way = "data" if pure == "gradients" else "model"
    return Arm(f"{title}, {way} parallel", spec + offset, pure=pure)


ARMS = (
    Arm("fp32"),
    *(_arm(title, spec, pure) for pure in ("gradients", "activations") for title, spec in TYPES.items()),
)
MNIST = Table(
    "MNIST, 784-1024-1024-10", "mnist", "mlp-dropout", ARMS, 1, 4680, 128, 0.0003, 0.0,
    optimizer="rmsprop", confidence=0.99,
)  # fmt: skip
DIGITS = Table(
    "digits, 64-256-128-10", "digits", "mlp", (ARMS[0], ARMS[1], ARMS[5]), 1, 80, 64, 0.0003, 0.0,
    optimizer="rmsprop", confidence=0.99, seeds=2,
)  # fmt: skip
NAMES = tuple(arm.name for arm in ARMS[1:])
PAPER = Paper(
    "dettmers",
    "8-bit approximations for parallelism",
    "Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, arXiv 1511.04561",
    "Does training suffer if all gradients, or all activations and errors, are sent in 8 bits?",
    {FULL: (MNIST,), QUICK: (DIGITS,)},
    (
        *(
            Claim(
                f"{way} parallelism: intervals of all four types overlap that of 32 bits",
                MNIST.title,
                "overlap",
                names,
            )
            for way, names in (("data", NAMES[:4]), ("model", NAMES[4:]))
        ),
        Claim("all four types train like 32 bits, both ways", MNIST.title, "same", NAMES, by="us"),
        Claim("8 bits train in quick runs", DIGITS.title, "trains", (ARMS[1].name, ARMS[5].name), by="us"),
    ),
    (
        "Intervals are those of 99 %, as in the paper. It trained with RMSProp at a rate of 0.003, on sums "
        "of gradients with a rule of its own; here they are means, and the rate is 0.0003.",
        "The paper trains CIFAR-10 and ImageNet as well, here it is MNIST. There is one node: whatever would "
        "travel is rounded to 8 bits in place.",
        "Static tree and mantissa have a fixed scale: a tenth for gradients, one for activations.",
    ),
)
