"""Recipes: which layer computes in which precision, as papers propose.

A recipe has stages, and rules for layers that are exceptions; the first rule that matches a layer applies.
`get` returns a recipe by its spec:

| spec | numbers | after |
|---|---|---|
| `fp32` | float32 | |
| `bf16` | bfloat16 everywhere, sums inside products float32 | Zamirai et al. 2020, arXiv 2010.06192 |
| `bf16~sr`, `bf16~fp32` | the same; weights are updated at random, or are float32 | |
| `gupta/2.14` | fixed point IL.FL everywhere, rounded once per sum | Gupta et al. 2015, arXiv 1502.02551 |
| `gupta/2.14~sr` | the same, rounded at random | |
| `gupta/2.14~sr+exact` | products summed exactly, as in a wide accumulator; else in float32 | |
| `gupta/2.14~sr+exact+clip` | the same; the error is zero where a result saturated | |
| `gupta/2.14/4.12~sr+clip` | forward results and the loss have their own fixed point | |
| `mellempudi` | e5m2 at random, stored weights float16 | Mellempudi et al. 2019, arXiv 1905.12334 |
| `positnn/8` | posits of 8 bits and es 2, rounded at every addition | Raposo et al. 2021, arXiv 2105.00053 |
| `positnn/O12L12` | the same, but 12 bits for the stages O(ptimizer) and L(oss); likewise F, B, G | |
| `positnn/8+quire` | products summed exactly and rounded once; the bias is added after that | |
| `positnn/8+quire+fused` | the bias is part of the exact sum, as in the authors' code | |
| `positnn/8+quire+underflow` | the same; the smallest numbers become zero | |
| `mogami`, `mogami/forward` | float32, multiplied by adding integers, or only forward | Mogami 2020 |
| `mogami/0.0625`, `mogami/forward/0.0625` | the same, with that offset | |
| `lu` | posit(8,1) forward, (8,2) backward, 16 bits in norms and updates | Lu et al. 2019, arXiv 1909.03831 |
| `e5m2`, `posit8_1~sr`, ... | any precision, for every stage | |

>>> get("positnn/O12L12").stages.optimizer
Precision(posit12_2)
>>> get("gupta/2.14~sr").stages.forward
Precision(fixed2.14~sr)
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinwire.errors import FormatError, unknown
from thinwire.formats import Format
from thinwire.simulate.gemm import Arithmetic
from thinwire.simulate.precision import Precision
from thinwire.simulate.stages import Stages

PLACES = ("*", "first", "last")
CHAINS = "chunked/512"  #: order of posit sums without a quire, and of Mogami's; the papers do not say


@dataclass(frozen=True)
class Rule:
    """Stages of the layers that match; None: they stay plain float32 layers of torch."""

    stages: Stages | None
    name: str = "*"  #: a glob for the layer's name in the model
    kind: str = "*"  #: a glob for the name of the layer's class
    place: str = "*"  #: "first" or "last" of the layers with products, in the order of definition
    why: str = ""  #: in a few words, for listings

    def __post_init__(self) -> None:
        if self.stages is not None and not isinstance(self.stages, Stages):
            raise FormatError(f"a rule needs Stages, or None for a plain layer, not {self.stages!r}")
        if self.place not in PLACES:
            raise FormatError(f"unknown place '{self.place}'; use one of: {', '.join(PLACES)}")

    def matches(self, name: str, kind: str, places: tuple[str, ...] = ()) -> bool:
        return (
            fnmatch.fnmatchcase(name, self.name)
            and fnmatch.fnmatchcase(kind, self.kind)
            and self.place in ("*", *places)
        )


@dataclass(frozen=True)
class Recipe:
    """Stages, and rules for the layers that are exceptions.

    >>> wide = Rule(Stages.uniform("bfloat16"), kind="*Norm*", why="sensitive")
    >>> recipe = Recipe("mine", Stages.uniform("e4m3"), (wide,))
    >>> str(recipe.route("norm1", "LayerNorm").stages), recipe.route("fc", "Linear")
    ('bfloat16', None)
    >>> recipe.optimizer
    Precision(e4m3)
    """

    name: str
    stages: Stages
    rules: tuple[Rule, ...] = ()
    source: str = ""  #: paper or explanation

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Stages):
            raise FormatError(f"a recipe needs Stages, such as Stages.uniform('e4m3'), not {self.stages!r}")
        rules = self.rules if isinstance(self.rules, tuple | list) else None
        if rules is None or not all(isinstance(rule, Rule) for rule in rules):
            raise FormatError(f"a recipe's rules are a tuple of Rule, not {self.rules!r}")
        object.__setattr__(self, "rules", tuple(rules))

    def route(self, name: str, kind: str, places: tuple[str, ...] = ()) -> Rule | None:
        """Return the first rule that matches a layer, or None."""
        return next((rule for rule in self.rules if rule.matches(name, kind, places)), None)

    @property
    def optimizer(self) -> Precision:
        """The precision in which weights are stored and updated."""
        return Precision.of(self.stages.optimizer)


def get(spec: "str | Recipe | Stages") -> Recipe:
    """Return a recipe as it is, of stages for all layers, or of a spec.

    >>> get("bf17")
    Traceback (most recent call last):
    thinwire.errors.FormatError: unknown recipe 'bf17'; did you mean 'bf16'? (...)
    """
    if isinstance(spec, Recipe):
        return spec
    if isinstance(spec, Stages):
        return Recipe("stages", spec)
    if not isinstance(spec, str):
        hint = "; use Stages.uniform(...)" if isinstance(spec, Format | Precision) else ""
        raise FormatError(f"a recipe is a name, Stages or a Recipe, not {type(spec).__name__}{hint}")
    if spec in RECIPES:
        return RECIPES[spec]
    for pattern, make in FAMILIES.values():
        match = re.fullmatch(pattern, spec)
        if match:
            return make(spec, *match.groups())
    try:
        return Recipe(spec, Stages.uniform(spec))
    except FormatError as error:
        listing = f"recipes: {', '.join((*RECIPES, *FAMILIES))}; and it is no precision: {error}"
        raise FormatError(unknown("recipe", spec, (*RECIPES, *EXAMPLES), listing)) from None


def _gupta(
    spec: str, number: str, results: str | None, random: str | None, exact: str | None, clip: str | None
) -> Recipe:
    kept, ahead = (Precision.of(f"fixed{each}{random or ''}") for each in (number, results or number))
    how, back = (
        Arithmetic(sum=each.format, order="exact", rounding=each.rounding) if exact else None
        for each in (ahead, kept)
    )
    stages = Stages(ahead, kept, kept, kept, ahead, how, back, clipped=bool(clip))
    return Recipe(spec, stages, source="Gupta et al. 2015, arXiv 1502.02551")


def _positnn(
    spec: str, bits: str | None, parts: str | None, quire: str | None, fused: str | None, low: str | None
) -> Recipe:
    letters = dict.fromkeys("FBGOL", bits or "8")
    given = re.findall(r"([FBGOL])(\d+)", parts or "")
    if len({letter for letter, _ in given}) < len(given):
        raise FormatError(f"'{spec}' names a stage twice; the stages are F, B, G, O and L")
    letters.update(given)
    kept = {letter: Precision.of(f"posit{n}_2{'_underflow' if low else ''}") for letter, n in letters.items()}
    forward, backward = (kept[letter].format for letter in "FB")
    if quire:
        same = kept["B"] == kept["G"]
        ahead = Arithmetic(sum=forward, order="exact")
        back = Arithmetic(sum=backward if same else None, order="exact")
    else:
        ahead, back = (Arithmetic(each, each, order=CHAINS) for each in (forward, backward))
    stages = Stages(kept["F"], kept["B"], kept["G"], kept["O"], kept["L"], ahead, back, fused=bool(fused))
    return Recipe(spec, stages, source="Raposo, Tomas and Roma 2021, arXiv 2105.00053")


def _mogami(spec: str, forward: str | None, offset: str | None) -> Recipe:
    how = Arithmetic(multiply=f"mogami{offset or ''}", order=CHAINS)
    stages = Stages(arithmetic=how, backward_arithmetic=None if forward else how)
    return Recipe(spec, stages, source="Mogami 2020, Deep Neural Network Training without Multiplications")


def _mellempudi() -> Recipe:
    """E5M2 for operands of every product, and float16 for stored numbers.

    A stage has one rounding for activations and weights, so weights are rounded at random too.
    """
    stages = Stages("e5m2~sr", "e5m2~sr", "e5m2~sr", optimizer="float16", loss="float16")
    half = Stages.uniform("float16")
    why = "float16 at both ends is our reading of the paper"
    return Recipe(
        "mellempudi",
        stages,
        (Rule(half, place="first", why=why), Rule(half, place="last", why=why)),
        source="Mellempudi et al. 2019, arXiv 1905.12334",
    )


def _lu() -> Recipe:
    """Round toward zero, with one scale per tensor. The caller does the warm-up: convert to `fp32` first.

    The scale of errors and gradients, and 16 bits for the loss, are our reading of the paper.
    """
    back, wide, wide_back = "posit8_2~zero~centre", "posit16_1~zero", "posit16_2~zero"
    norms = Stages(wide, wide_back, wide_back, optimizer=wide, loss=wide_back)
    return Recipe(
        "lu",
        Stages("posit8_1~zero~centre", back, back, optimizer=wide, loss=wide_back),
        (Rule(norms, kind="*Norm*", why="normalisation has 16 bits"),),
        source="Lu et al. 2019, arXiv 1909.03831",
    )


_BF16 = Recipe("bf16", Stages.uniform("bfloat16"), source="Zamirai et al. 2020, arXiv 2010.06192")

#: Recipes by name.
RECIPES: dict[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("fp32", Stages(), source="float32; products are torch's, a bias is added to them"),
        _BF16,
        replace(_BF16, name="bf16~sr", stages=replace(_BF16.stages, optimizer="bfloat16~sr")),
        replace(_BF16, name="bf16~fp32", stages=replace(_BF16.stages, optimizer="fp32")),
        _mellempudi(),
        _lu(),
    )
}

#: Recipes with parameters: the pattern of a spec, and the function that makes the recipe.
FAMILIES: dict[str, tuple[str, Callable[..., Recipe]]] = {
    "gupta/IL.FL": (r"gupta/(\d+\.\d+)(?:/(\d+\.\d+))?(~sr)?(\+exact)?(\+clip)?", _gupta),
    "positnn/N": (r"positnn/(?:(\d+)|((?:[FBGOL]\d+)+))(\+quire(\+fused)?)?(\+underflow)?", _positnn),
    "mogami": (r"mogami(/forward)?(/0(?:\.\d+)?)?", _mogami),
}
EXAMPLES = ("gupta/2.14", "gupta/2.14~sr", "positnn/8", "positnn/O12L12", "mogami", "mogami/forward")
