"""Convert a model, so that its layers compute in the precisions of a recipe.

Layers are changed in place: modules, parameters and buffers stay the same objects and keep their names. A
model may be converted again, to other precisions or back to `fp32`: for a warm-up, or to climb a ladder.

>>> model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Bilinear(3, 3, 1))
>>> model = convert(model, "lu")
recipe lu: Lu et al. 2019, arXiv 1909.03831
layer  kind       numbers
0      Linear     forward posit8_1~zero~centre, backward posit8_2~zero~centre, ...
1      LayerNorm  forward posit16_1~zero, ... (normalisation has 16 bits)
LEFT IN FLOAT32, not simulated: 1 layer
2      Bilinear   no simulation of this kind of layer
>>> str(describe(model)[0].stages.forward)
'Precision(posit8_1~zero~centre)'

Only modules can be changed. Results of a model's own code (`x + y`, `torch.nn.functional.linear`, ...)
stay float32 until the next layer rounds them; `thinwire.simulate.functional` has functions for such code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules import padding

from thinwire.errors import InputError
from thinwire.simulate import layers, recipes
from thinwire.simulate.counters import Counters
from thinwire.simulate.gemm import Arithmetic
from thinwire.simulate.quantizer import Quantizer
from thinwire.simulate.recipes import Recipe, Rule
from thinwire.simulate.stages import Stages

__all__ = ["Recipe", "Row", "Rule", "convert", "describe"]

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)
#: Layers that compute no new numbers, or (dropout) only scale them.
QUIET = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Threshold, nn.Flatten, nn.Unflatten, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, padding._ConstantPadNd,
    padding._ReflectionPadNd, padding._ReplicationPadNd, padding._CircularPadNd, nn.UpsamplingNearest2d,
    nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Sequential, nn.ModuleList, nn.ModuleDict,
    nn.Fold, nn.Unfold,
)  # fmt: skip
ROOT = "model"  #: the name of a layer that is the whole model
COMPILED = "_orig_mod"  #: what torch.compile adds to names
LOSS = "loss"  #: the name of a loss that is the whole model


@dataclass(frozen=True)
class Row:
    """A layer and its stages; None: float32, as torch computes."""

    name: str
    kind: str
    stages: Stages | None
    note: str = ""  #: why it has these stages, or cannot be simulated
    left: bool = False  #: whether it cannot be simulated

    @property
    def numbers(self) -> str:
        """The stages in words."""
        words = "float32, as torch computes" if self.stages is None else _said(self.stages)
        return f"{words} ({self.note})" if self.note else words


def convert(
    model: nn.Module,
    recipe: Recipe | Stages | str,
    *,
    seed: int | None = None,
    counters: Counters | None = None,
    tell: Callable[[str], object] | None = print,
) -> nn.Module:
    """Change the layers of a model to a recipe's stages, and return it; `tell` gets a table of them.

    A seed or counters that are not given stay as they are, at first 0 and none. Give each rank its own seed
    if the rounding errors of ranks should average out.

    Stored weights are not rounded: give the recipe's `optimizer` to `simulate.SGD`.

    >>> from thinwire import simulate
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> recipe = simulate.recipes.get("bf16~sr")
    >>> net = simulate.convert(net, recipe)
    recipe bf16~sr: Zamirai et al. 2020, arXiv 2010.06192
    layer  kind    numbers
    ...
    >>> optimizer = simulate.SGD(net.parameters(), lr=0.1, keep=recipe.optimizer)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
    if counters is not None and not isinstance(counters, Counters):
        raise InputError(f"counters must be a simulate.Counters, not {type(counters).__name__}")
    chosen = recipes.get(recipe)
    named = list(_layers(model))
    for name, module in named:
        layers.check(module, name)  # before any layer is changed
    places = _places(named)
    rows, used = [], list[Rule | None]()
    for name, module in named:
        row = _row(name, module)
        used.append(chosen.route(row.name, row.kind, places.get(name, ())))
        if not row.left:
            row = _changed(row, module, chosen, places.get(name, ()), seed, counters)
        rows.append(row)
    for module in model.modules():
        _no_shortcut(module)
    if tell is not None:
        lists_unused = isinstance(recipe, Recipe) and not isinstance(model, nn.modules.loss._Loss)
        tell(_table(chosen, rows, [each for each in chosen.rules if lists_unused and each not in used]))
    return model


def describe(model: nn.Module) -> list[Row]:
    """Return a row for each layer that computes numbers, as it is now.

    >>> [(row.name, row.numbers) for row in describe(nn.Linear(1, 1))]
    [('model', 'float32, as torch computes')]
    """
    return [_row(name, module) for name, module in _layers(model)]


def _row(name: str, module: nn.Module) -> Row:
    stages = module.stages if isinstance(module, layers.Simulated) else None
    why = layers.refusal(module)
    return Row(name, type(module).__name__, stages, why, left=bool(why))


def _changed(
    row: Row,
    module: nn.Module,
    recipe: Recipe,
    places: tuple[str, ...],
    seed: int | None,
    counters: Counters | None,
) -> Row:
    rule = recipe.route(row.name, row.kind, places)
    stages = recipe.stages if rule is None else rule.stages
    if stages is None:
        layers.restored(module)
    else:
        before = module if isinstance(module, layers.Simulated) else None
        layers.simulated(
            module,
            stages,
            seed=seed if seed is not None else before.seed if before else 0,
            name=row.name,
            counters=counters if counters is not None else before.counters if before else None,
        )
    return replace(row, stages=stages, note=rule.why if rule else "")


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute numbers, each once, with the names that rules match."""
    inside: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(id(child) for child in module.modules() if child is not module)
        if id(module) in inside or not _makes_numbers(module):
            continue
        parts = [part for part in path.split(".") if part != COMPILED]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            parts = parts[1:]
        yield ".".join(parts) or (LOSS if isinstance(module, nn.modules.loss._Loss) else ROOT), module


def _makes_numbers(module: nn.Module) -> bool:
    if type(module) in layers.KINDS or isinstance(module, layers.Simulated):
        return True
    if isinstance(module, Quantizer):
        return False
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    leaf = next(module.children(), None) is None
    return leaf and type(module).__module__.startswith("torch.nn.") and not isinstance(module, QUIET)


def _places(modules: list[tuple[str, nn.Module]]) -> dict[str, tuple[str, ...]]:
    """Return which layers with products are first and last; one may be both."""
    names = [name for name, module in modules if isinstance(module, PRODUCTS) and not layers.refusal(module)]
    ends = {"first": names[:1], "last": names[-1:]}
    return {name: tuple(end for end, at in ends.items() if name in at) for name in names}


def _no_shortcut(module: nn.Module) -> None:
    """Disable the fast path of torch's transformers, which bypasses their layers in evaluation."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _said(stages: Stages) -> str:
    forward, backward = stages.arithmetic, stages.backward_arithmetic
    assert not isinstance(backward, str)
    text = str(stages)
    if forward == backward:
        return text if forward is None else f"{text}; {_products(forward)}"
    return f"{text}; forward {_products(forward)}; backward {_products(backward)}"


def _products(how: Arithmetic | None) -> str:
    if how is None:
        return "products float32"
    multiply = "" if how.multiply == "exact" else f" {how.multiply}"
    kept = [getattr(each, "name", "fp32") for each in (how.product, how.sum)]
    random = "" if how.rounding == "nearest" else f" {how.rounding}"
    if how.order == "exact":
        return f"products and sums exact, then {kept[1]}{random}"
    return f"products{multiply} {kept[0]}, sums {kept[1]} {how.order}{random}"


def _table(recipe: Recipe, rows: list[Row], unused: list[Rule]) -> str:
    done = [(row.name, row.kind, row.numbers) for row in rows if not row.left]
    left = [(row.name, row.kind, row.note) for row in rows if row.left]
    head = ("layer", "kind", "numbers")
    widths = [max(len(line[at]) for line in (head, *done, *left)) for at in (0, 1)]
    text = [f"recipe {recipe.name}" + (f": {recipe.source}" if recipe.source else "")]
    for line in (head, *done):
        text.append(_line(line, widths))
    if left:
        text.append(f"LEFT IN FLOAT32, not simulated: {len(left)} layer{'s' * (len(left) > 1)}")
        text += [_line(line, widths) for line in left]
    for rule in unused:
        fields = {"name": rule.name, "kind": rule.kind, "place": rule.place}
        conditions = ", ".join(f"{key} {value}" for key, value in fields.items() if value != "*")
        text.append(f"NO LAYER for the rule: {conditions or 'all others'}")
    return "\n".join(text)


def _line(cells: tuple[str, str, str], widths: list[int]) -> str:
    return f"{cells[0]:<{widths[0]}}  {cells[1]:<{widths[1]}}  {cells[2]}"
