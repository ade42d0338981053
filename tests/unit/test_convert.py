"""Whole models in other numbers: what is converted and what is not, recipes, and training."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from thinwire import FormatError, InputError, formats
from thinwire.simulate import Arithmetic, Counters, Precision, Quantizer, Stages, layers, recipes
from thinwire.simulate.conversion import Recipe, Rule, _places, convert, describe

E4M3 = Stages.uniform("e4m3")
BF16 = Stages.uniform("bfloat16")


def cnn(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens, padding=None):
        return self.head(self.blocks(self.tokens(tokens) + self.place, src_key_padding_mask=padding))


def images():
    x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    target = torch.arange(12) % 3
    return x + target.view(-1, 1, 1, 1), target


def silently(model, recipe, **options):
    return convert(model, recipe, tell=None, **options)


def stages_of(model):
    return {row.name: row.stages for row in describe(model)}


def test_parameters_names_and_hooks_stay():
    model = cnn()
    theirs = copy.deepcopy(model)
    before = dict(model.named_parameters())
    modules = list(model.modules())
    heard = []
    hook = model[0].register_forward_hook(lambda *_: heard.append(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert silently(model, "e4m3") is model
    assert all(one is two for one, two in zip(model.modules(), modules, strict=True))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == theirs.state_dict().keys()
    assert repr(model) == repr(theirs)
    assert isinstance(model[0], nn.Conv2d)
    assert isinstance(model[0], layers.Conv2d)
    x, target = images()
    nn.functional.cross_entropy(model(x), target).backward()
    weight = model[8].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[8].weight, weight)
    assert heard == [1]
    hook.remove()
    theirs.load_state_dict(model.state_dict())
    copied, packed = copy.deepcopy(model).eval(), pickle.loads(pickle.dumps(model)).eval()
    assert torch.equal(copied(x), model.eval()(x))
    assert torch.equal(packed(x), model(x))
    assert stages_of(packed) == stages_of(model)


def test_a_converted_model_computes_in_its_numbers():
    model, (x, _) = silently(cnn(), E4M3), images()
    for module in model[:2]:
        x = module(x)
        assert torch.equal(x, Precision.of("e4m3").round(x))
    assert not torch.equal(x, cnn()[:2](images()[0]))


def test_converting_again_changes_stages_and_keeps_the_rest():
    counters = Counters()
    model, (x, _) = silently(cnn(), E4M3, seed=5, counters=counters), images()
    model(x)
    silently(model, BF16)
    assert set(stages_of(model).values()) == {BF16}
    assert model[8].seed == 5
    assert model[8].counters is counters
    assert model[8].calls == 1
    silently(model, "fp32", seed=6)
    assert model[8].seed == 6
    torch.testing.assert_close(model.eval()(x), cnn().eval()(x), atol=0.2, rtol=0.2)
    silently(model, Recipe("off", E4M3, (Rule(None),)))
    assert all(type(one) is type(two) for one, two in zip(model, cnn(), strict=True))
    assert set(stages_of(model).values()) == {None}
    assert "stages" not in vars(model[8])


def test_the_first_rule_that_matches_takes_a_layer():
    rules = (
        Rule(None, name="3", why="left alone"),
        Rule(BF16, kind="*Norm*"),
        Rule(Stages.uniform("e5m2"), place="first"),
        Rule(Stages.uniform("e5m10"), kind="Linear", place="last"),
        Rule(Stages.uniform("e3m4"), kind="Linear"),
    )
    by_layer = stages_of(silently(cnn(), Recipe("mine", E4M3, rules)))
    said = {name: "none" if stages is None else str(stages) for name, stages in by_layer.items()}
    assert said == {"0": "e5m2", "1": "bfloat16", "3": "none", "4": "bfloat16", "6": "e4m3", "8": "e5m10"}


def test_a_layer_may_be_the_whole_model_and_first_and_last():
    fc = silently(nn.Linear(2, 2), "mellempudi")
    assert type(fc) is layers.Linear
    assert str(fc.stages) == "float16"
    assert fc.name == "model"
    assert silently(nn.CrossEntropyLoss(), "bf16").name == "loss"
    silently(nn.ReLU(), "fp32")


def test_shared_modules_are_converted_once():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    told = []
    convert(model, "e4m3", tell=told.append)
    assert [row.name for row in describe(model)] == ["0"]
    assert shared.name == "0"
    model(torch.ones(1, 4))
    assert shared.calls == 2


def test_the_table_says_what_became_of_every_layer(capsys):
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Conv1d(2, 2, 1), nn.ReLU(), nn.LSTM(2, 2), nn.ConvTranspose1d(2, 2, 1), Mine(2, 2)
    )
    model.append(nn.Embedding(3, 2, max_norm=1.0)).append(nn.ELU()).append(Quantizer("e4m3"))
    model.append(nn.Linear(2, 2))
    how = Stages("e4m3", "e5m2", arithmetic=Arithmetic("e4m3", "e5m10", "kahan"), backward_arithmetic=None)
    convert(model, Recipe("mine", how, (Rule(None, name="8", why="too small"),), source="nowhere"))
    assert capsys.readouterr().out == (
        "recipe mine: nowhere\n"
        "layer  kind             numbers\n"
        "0      Conv1d           forward e4m3, backward e5m2, gradient fp32, optimizer fp32, loss fp32; "
        "forward products e4m3, sums e5m10 kahan; backward products float32\n"
        "8      Linear           float32, as torch computes (too small)\n"
        "LEFT IN FLOAT32, not simulated: 5 layers\n"
        "2      LSTM             no simulation of this kind of layer\n"
        "3      ConvTranspose1d  no simulation of this kind of layer\n"
        "4      Mine             no simulation of this kind of layer\n"
        "5      Embedding        max_norm, scale_grad_by_freq and sparse are not simulated\n"
        "6      ELU              no simulation of this kind of layer\n"
    )
    for how, words in (
        (Arithmetic(sum="e4m3", order="exact"), "e4m3; products and sums exact, then e4m3"),
        (Arithmetic(multiply="mogami"), "e4m3; products mogami fp32, sums fp32 sequential"),
        (Arithmetic(sum="e5m10", rounding="zero"), "e4m3; products fp32, sums e5m10 sequential zero"),
    ):
        assert describe(silently(nn.Linear(1, 1), Stages.uniform("e4m3", how)))[0].numbers == words
    left = [row.name for row in describe(model) if row.left]
    assert left == ["2", "3", "4", "5", "6"]


def test_parameters_outside_of_layers_are_named():
    rows = describe(silently(Transformer(), "bf16"))
    assert [row.name for row in rows if row.left] == ["model"]
    assert "blocks.layers.0.self_attn" in {row.name for row in rows}
    assert not any("out_proj" in row.name for row in rows)


def test_transformers_do_not_go_past_their_layers():
    """In evaluation, torch has a kernel for a whole block."""
    tokens = torch.arange(10).view(2, 5) % 7
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, -1] = True
    for model in (Transformer(), nn.Sequential(Transformer())):
        silently(model, "e4m3").eval()
        inner = model if isinstance(model, Transformer) else model[0]
        with_graph = inner(tokens, padding)
        with torch.no_grad():
            without = inner(tokens, padding)
        assert torch.equal(with_graph, without)
        assert inner.blocks.layers[1].self_attn.calls == 2


def losses_of(model, recipe, steps=12, lr=0.05):
    x, target = images() if isinstance(model, nn.Sequential) else tokens()
    loss = nn.CrossEntropyLoss()
    counters = Counters()
    silently(model, recipe, counters=counters)
    silently(loss, recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x).flatten(0, -2), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, counters


def tokens():
    x = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(0))
    return x, x.flip(1).flatten()


@pytest.mark.parametrize("make", [cnn, Transformer])
@pytest.mark.parametrize(
    "recipe",
    ["fp32", "bf16", "e4m3", Stages.uniform("e4m3~sr", Arithmetic(sum="e6m9", order="chunked/8"))],
    ids=str,
)
def test_converted_models_learn(make, recipe):
    losses, counters = losses_of(make(), recipe, steps=25)
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])
    assert bool(counters.read()) == (recipe != "fp32")


SPECS = (
    *recipes.RECIPES, "gupta/4.12", "gupta/4.12~sr", "gupta/4.12~sr+exact", "gupta/2.14/4.12", "positnn/8",
    "positnn/O12L12", "positnn/F8B10G8O12L12+quire", "positnn/12+quire", "mogami", "mogami/forward",
    "mogami/0.0625", "mogami/forward/0.0625", "e5m2~sr",
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("make", [cnn, Transformer])
def test_every_recipe_takes_a_step(spec, make):
    model = make()
    weight = model.head.weight if make is Transformer else model[8].weight
    before = weight.detach().clone()
    (first, second), _ = losses_of(model, spec, steps=2, lr=0.01)
    assert math.isfinite(second)
    assert abs(first - second) < 1
    assert not torch.equal(weight, before)


def test_recipes_are_what_papers_say():
    gupta = recipes.get("gupta/2.14~sr+exact").stages
    fixed = gupta.forward.format
    assert (fixed.min, fixed.max) == (-2.0, 2 - 2**-14)
    assert fixed.round(torch.tensor([9.0, -9.0])).tolist() == [2 - 2**-14, -2.0]
    assert gupta.arithmetic == Arithmetic(sum="fixed2.14", order="exact", rounding="stochastic")
    assert recipes.get("gupta/2.14").stages == Stages.uniform("fixed2.14")
    wider = recipes.get("gupta/2.14/4.12~sr+exact+clip").stages
    results, kept = Precision.of("fixed4.12~sr"), Precision.of("fixed2.14~sr")
    ahead, back = (
        Arithmetic(sum=each.format, order="exact", rounding="stochastic") for each in (results, kept)
    )
    assert wider == Stages(results, kept, kept, kept, results, ahead, back, clipped=True)
    mixed = recipes.get("positnn/F8B8G8O12L12")
    assert mixed.stages == recipes.get("positnn/O12L12").stages
    assert mixed.optimizer == Precision.of("posit12_2")
    assert recipes.get("positnn/G10+quire").stages.backward_arithmetic == Arithmetic(order="exact")
    quire = recipes.get("positnn/8+quire").stages
    assert quire.backward_arithmetic == Arithmetic(sum="posit8_2", order="exact")
    assert recipes.get("positnn/8").stages.arithmetic == Arithmetic("posit8_2", "posit8_2", "chunked/512")
    assert str(recipes.get("positnn/8+quire+underflow").stages) == "posit8_2_underflow"
    forward = recipes.get("mogami/forward/0.0625").stages
    assert forward.arithmetic.multiply == "mogami/0.0625"
    assert forward.backward_arithmetic is None
    assert recipes.get("bf16~sr").optimizer == Precision.of("bfloat16~sr")
    assert recipes.get("bf16~fp32").stages.forward == Precision.of("bfloat16")
    ends = stages_of(silently(cnn(), "mellempudi"))
    assert [str(ends[name]) for name in ("0", "8")] == ["float16"] * 2
    assert ends["3"].forward == Precision.of("e5m2~sr")
    norms = stages_of(silently(cnn(), "lu"))
    assert norms["1"].forward == Precision.of("posit16_1~zero")
    assert norms["3"].backward == Precision.of("posit8_2~zero~centre")


def test_a_warm_up_goes_from_float32_to_lu():
    model = cnn()
    early, _ = losses_of(model, "fp32", steps=6)
    late, _ = losses_of(model, "lu", steps=6)
    assert max(late) < early[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bf17", "unknown recipe 'bf17'; did you mean 'bf16'"),
        ("gupta/2.40", "2 to 24 bits"),
        ("gupta", "did you mean 'gupta/2.14"),
        ("positnn/F8F9", "names a stage twice"),
        ("positnn/40", "Posit needs n 2..16"),
        ("mellempundi", "did you mean 'mellempudi"),
        (3, "not int"),
        (formats.get("e4m3"), "not Float; use Stages.uniform"),
    ],
)
def test_unknown_recipes_name_near_ones(spec, words):
    with pytest.raises(FormatError, match=words):
        recipes.get(spec)


def test_rules_and_models_that_cannot_be_say_why():
    with pytest.raises(FormatError, match="unknown place 'middle'; use one of"):
        Rule(E4M3, place="middle")
    with pytest.raises(FormatError, match="a rule needs Stages"):
        Rule("e4m3")
    with pytest.raises(InputError, match=r"takes a torch.nn.Module, not str"):
        convert("e4m3", "e4m3")


def test_rules_without_a_layer_are_named(capsys):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    rules = (
        Rule(None, name="fc9"),
        Rule(None, kind="linear"),
        Rule(None, name="2"),
    )
    convert(model, Recipe("mine", Stages.uniform("e4m3"), rules))
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["NO LAYER for the rule: name fc9", "NO LAYER for the rule: kind linear"]
    convert(model, "lu")  # has a rule for norms, which nobody wrote for this model
    assert "NO LAYER" not in capsys.readouterr().out


def test_recipes_are_made_of_stages_and_rules():
    with pytest.raises(
        FormatError, match=r"a recipe needs Stages, such as Stages.uniform\('e4m3'\), not 'e4m3'"
    ):
        Recipe("x", "e4m3")
    with pytest.raises(FormatError, match="a tuple of Rule"):
        Recipe("x", Stages(), Rule(None))
    with pytest.raises(InputError, match=r"counters must be a simulate.Counters, not bool"):
        convert(nn.Linear(1, 1), "e4m3", counters=True)


def test_attributes_of_the_users_own_are_not_overwritten():
    first, layer = nn.Linear(1, 1), nn.Linear(1, 1)
    layer.name = "mine"
    with pytest.raises(InputError, match="1 already has name"):
        convert(nn.Sequential(first, layer), "e4m3", tell=None)
    assert layer.name == "mine"
    assert type(layer) is type(first) is nn.Linear


def test_layers_that_only_move_numbers_are_not_left():
    pads = [nn.ReflectionPad2d(1), nn.ConstantPad1d(1, 0.5), nn.ReplicationPad3d(1), nn.CircularPad2d(1)]
    assert describe(nn.Sequential(*pads, nn.UpsamplingNearest2d(2))) == []


def test_first_and_last_are_layers_with_products_that_are_simulated():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
    assert _places([*net.named_modules()][1:]) == {"1": ("first",), "3": ("last",)}
    assert _places([("only", net[1])]) == {"only": ("first", "last")}
    refused = nn.Bilinear(2, 2, 2)
    assert _places([("x", refused), ("y", net[1]), ("z", refused)]).keys() == {"y"}
