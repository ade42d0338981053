"""Recipes: named policies, which suit most users."""

from thinwire.policy.rules import LADDER, Ladder, Policy, Rule

SMALL = 10_000  #: elements under which a tensor is not worth encoding


def usual(name: str, codec: str, schedule: str = "auto") -> Policy:
    return Policy(
        name,
        (
            Rule("fp32", "two_shot", max_ndim=1, why="vectors are few bytes and sensitive"),
            Rule("fp32", "two_shot", max_numel=SMALL - 1, why="too small to be worth it"),
            Rule(codec, schedule),
        ),
    )


def _ladder(name: str, *levels: str) -> Policy:
    """Precision that rises when the diversity of gradients falls."""
    return Policy(name, (*usual(name, levels[0]).rules[:2], Rule(LADDER)), Ladder(levels))


def _wide_ends(name: str, codec: str, wide: str) -> Policy:
    """Hybrid precision: a wider format for embeddings and for the last layer, known by its name."""
    small = usual(name, codec).rules[:2]
    ends = [Rule(wide, role="embedding", why="wider: embeddings")]
    ends += [
        Rule(wide, name=each, why="wider: the last layer")
        for each in ("fc.*", "*.fc.*", "*head*", "*classifier*")
    ]
    return Policy(name, (*small, *ends, Rule(codec)))


def _wide_start(name: str, codec: str, wide: str, steps: int) -> Policy:
    """Hybrid precision: a wider format for the first steps."""
    small = usual(name, codec).rules[:2]
    return Policy(name, (*small, Rule(wide, last_step=steps - 1, why="wider: the first steps"), Rule(codec)))


#: Policies by name. Each codec is set up as its authors do, except for small tensors.
RECIPES: dict[str, Policy] = {
    "fp32": Policy("fp32", (Rule("fp32"),)),
    "fp16": Policy("fp16", (Rule("fp16"),)),
    "bf16": Policy("bf16", (Rule("bf16"),)),
    "int8": usual("int8", "int8/256"),
    "int4": usual("int4", "int4/128+ef"),
    "fp8": usual("fp8", "e4m3fn/128"),
    "aps8": usual("aps8", "aps/e5m2"),
    "aps8-e4m3": usual("aps8-e4m3", "aps/e4m3"),
    "dettmers8": usual("dettmers8", "tree8"),
    "qsgd4": usual("qsgd4", "qsgd4/512"),
    "onebit": usual("onebit", "onebit/512+ef"),
    "mstopk": usual("mstopk", "mstopk/0.01+ef"),
    "dct-topk": usual("dct-topk", "dct/64:8+ef"),
    "powersgd": usual("powersgd", "fp32+ef", "low_rank/4"),
    "hybrid-layers": _wide_ends("hybrid-layers", "aps/e4m3", "fp16"),
    "ladder": _ladder("ladder", "int4/128+ef", "int8/256", "fp16", "fp32"),
    "hybrid-steps": _wide_start("hybrid-steps", "aps/e4m3", "fp16", 500),
}
