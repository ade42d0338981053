"""Layers in low precision: their formulas, written out, and torch's layers where nothing is rounded."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as plain

from thinwire import FormatError, InputError, Stream, formats, simulate
from thinwire.simulate import (
    Arithmetic,
    Counters,
    Precision,
    Stages,
    convolution,
    functional,
    layers,
    normalization,
)
from thinwire.simulate.site import Site

MIXED = Stages("e4m3", "e5m2", "e3m4", optimizer="bfloat16", loss="e5m10")
ARITHMETICS = {
    "low": Arithmetic("e5m2", "e5m10"),
    "pairwise": Arithmetic(sum="bfloat16", order="pairwise"),
    "chunked": Arithmetic(sum="e5m10", order="chunked/5"),
    "quire": Arithmetic(sum="posit8_2", order="exact"),
    "mogami": Arithmetic(multiply="mogami/0.0625"),
}
FLOAT32 = {"torch": Stages(), "own": Stages(arithmetic=Arithmetic())}


def randn(*shape, seed=0, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def to(name, x):
    return formats.get(name).round(x)


def bits(x):
    return x.contiguous().view(torch.int32)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def plus(a, b, how):
    return a + b if how.sum is None else formats.get(how.sum).round(a + b)


def added_up(rows, how):
    return simulate.matmul(torch.ones(1, len(rows)), rows, replace(how, product=None, multiply="exact"))[0]


@pytest.mark.parametrize("how", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("backward", ["same", "pairwise"])
def test_linear_is_what_it_says(how, backward):
    back = how if backward == "same" else ARITHMETICS["pairwise"]
    stages = replace(MIXED, arithmetic=how, backward_arithmetic=back)
    x, w, b = randn(2, 5, 7, grad=True), randn(3, 7, seed=1, grad=True), randn(3, seed=2, grad=True)
    dy = randn(2, 5, 3, seed=3)
    y = functional.linear(x, w, b, site=Site(stages))
    y.backward(dy)
    xq, wq = to("e4m3", x).view(10, 7), to("e4m3", w)
    wanted = to("e4m3", plus(simulate.matmul(xq, wq.t(), how), to("e4m3", b), how))
    assert same(y.detach().view(10, 3), wanted)
    e = to("e5m2", dy).view(10, 3)
    assert same(x.grad.view(10, 7), to("e5m2", simulate.matmul(e, to("e5m2", w), back)))
    assert same(w.grad, to("e3m4", simulate.matmul(e.t(), xq, back)))
    assert same(b.grad, to("e3m4", added_up(e, back)))


def test_linear_by_torch_rounds_operands_and_results():
    x, w = randn(5, 7, grad=True), randn(3, 7, seed=1, grad=True)
    y = functional.linear(x, w, site=Site(MIXED))
    y.backward(torch.ones(5, 3) * 0.3)
    assert same(y.detach(), to("e4m3", to("e4m3", x) @ to("e4m3", w).t()))
    e = torch.full((5, 3), 0.3125)
    assert same(x.grad, to("e5m2", e @ to("e5m2", w)))
    assert same(w.grad, to("e3m4", e.t() @ to("e4m3", x)))


GEOMETRIES = {  # kernel, stride, padding, dilation, groups
    "plain": ((3, 2), 1, 0, 1, 1),
    "strided": ((3, 3), (2, 3), 1, 1, 1),
    "dilated": ((2, 3), (1, 2), (2, 3), (3, 2), 2),
    "depthwise": ((3, 3), 2, (0, 1), 1, 4),
    "same": ((2, 4), 1, "same", (1, 2), 2),
    "valid": ((2, 2), 2, "valid", 2, 1),
    "point": ((1, 1), 2, 1, 1, 1),
}


def around(kernel, padding, dilation):
    """Zeros before and after, of height and width."""
    gaps = (dilation,) * 2 if isinstance(dilation, int) else dilation
    if padding == "same":
        spans = [(k - 1) * d for k, d in zip(kernel, gaps, strict=True)]
        return [(n // 2, n - n // 2) for n in spans], gaps
    pads = {"valid": 0}.get(padding, padding)
    return [(n, n) for n in ((pads,) * 2 if isinstance(pads, int) else pads)], gaps


def unfolded(x, kernel, stride, padding, dilation, groups):
    """[groups, batch * places, channels * kernel] by torch's unfold."""
    (top, left), gaps = around(kernel, padding, dilation)
    columns = plain.unfold(plain.pad(x, (*left, *top)), kernel, dilation=gaps, stride=stride)
    split = columns.view(x.shape[0], groups, -1, columns.shape[-1])
    return split.permute(1, 0, 3, 2).flatten(1, 2)


def error_windows(e, shape, kernel, stride, padding, dilation, groups):
    """Rows of errors for every place of the input, one number at a time: [groups, places, out * kernel]."""
    pads, gaps = around(kernel, padding, dilation)
    steps = (stride,) * 2 if isinstance(stride, int) else stride
    batch, out, heights, widths = e.shape
    rows = torch.zeros(groups, batch, shape[2], shape[3], out // groups, *kernel)
    for *at, u, v in torch.cartesian_prod(*(torch.arange(n) for n in (shape[2], shape[3], *kernel))).tolist():
        turned = (kernel[0] - 1 - u, kernel[1] - 1 - v)
        place = [at[n] + pads[n][0] - turned[n] * gaps[n] for n in (0, 1)]
        if any(place[n] % steps[n] for n in (0, 1)):
            continue
        row, column = (place[n] // steps[n] for n in (0, 1))
        if 0 <= row < heights and 0 <= column < widths:
            windows = e[:, :, row, column].view(batch, groups, -1).transpose(0, 1)
            rows[:, :, at[0], at[1], :, u, v] = windows
    return rows.flatten(4).flatten(1, 3)


@pytest.mark.parametrize("how", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_convolution_is_unfolding_and_a_product(how, geometry):
    kernel, stride, padding, dilation, groups = geometry
    stages = replace(MIXED, arithmetic=how, backward_arithmetic=how)
    x, w = randn(2, 4, 7, 6, grad=True), randn(8, 4 // groups, *kernel, seed=1, grad=True)
    b = randn(8, seed=2, grad=True)
    y = functional.conv2d(x, w, b, stride, padding, dilation, groups, site=Site(stages))
    dy = randn(*y.shape, seed=3)
    y.backward(dy)
    rows = unfolded(to("e4m3", x), *geometry)
    per_group = (groups, 8 // groups, -1)
    products = simulate.matmul(rows, to("e4m3", w).view(per_group).mT, how)
    images = products.view(groups, 2, *y.shape[2:], -1).permute(1, 0, 4, 2, 3).reshape(y.shape)
    assert same(y.detach(), to("e4m3", plus(images, to("e4m3", b).view(-1, 1, 1), how)))
    e = to("e5m2", dy)
    errors = e.view(2, groups, -1, y.shape[2:].numel()).permute(1, 2, 0, 3).flatten(2)
    assert same(w.grad, to("e3m4", simulate.matmul(errors, rows, how).view(w.shape)))
    back = error_windows(e, x.shape, *geometry)
    turned = to("e5m2", w).flip(2, 3).view(groups, 8 // groups, 4 // groups, -1).transpose(2, 3)
    dx = simulate.matmul(back, turned.flatten(1, 2), how)
    dx = dx.view(groups, 2, 7, 6, -1).permute(1, 0, 4, 2, 3).reshape(x.shape)
    assert same(x.grad, to("e5m2", dx))
    assert same(b.grad, to("e3m4", added_up(e.permute(0, 2, 3, 1).reshape(-1, 8), how)))


def test_a_sequence_is_an_image_of_height_one():
    how = Site(replace(MIXED, arithmetic=ARITHMETICS["low"], backward_arithmetic=ARITHMETICS["low"]))
    x, w = randn(2, 4, 9), randn(6, 2, 3, seed=1)
    one = [each.clone().requires_grad_() for each in (x, w)]
    two = [each.clone().unsqueeze(2).requires_grad_() for each in (x, w)]
    y = functional.conv1d(*one, None, 2, 1, 2, 2, site=how)
    z = functional.conv2d(*two, None, (1, 2), (0, 1), (1, 2), 2, site=how)
    assert same(y.detach(), z.detach().squeeze(2))
    y.square().sum().backward()
    z.square().sum().backward()
    assert all(same(a.grad, b.grad.squeeze(2)) for a, b in zip(one, two, strict=True))


def made(kind, *args, **kwargs):
    torch.manual_seed(0)
    layer = kind(*args, **kwargs)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


LIKE_TORCH = {
    "linear": (made(nn.Linear, 7, 3), (2, 5, 7)),
    "no bias": (made(nn.Linear, 7, 3, bias=False), (7,)),
    "conv1d": (made(nn.Conv1d, 4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9)),
    "conv same": (made(nn.Conv2d, 4, 6, (2, 3), padding="same", dilation=(3, 1)), (2, 4, 5, 6)),
    "conv": (made(nn.Conv2d, 4, 8, 3, stride=(2, 3), padding=(3, 0), groups=4), (2, 4, 7, 9)),
    "circular": (made(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
    "unbatched": (made(nn.Conv2d, 4, 6, 3), (4, 5, 5)),
    "batch norm": (made(nn.BatchNorm2d, 3), (4, 3, 2, 5)),
    "cumulative": (made(nn.BatchNorm1d, 3, momentum=None), (8, 3)),
    "no statistics": (made(nn.BatchNorm1d, 3, affine=False, track_running_stats=False), (8, 3, 2)),
    "layer norm": (made(nn.LayerNorm, (3, 4)), (2, 3, 4)),
    "layer norm without bias": (made(nn.LayerNorm, 4, bias=False), (2, 3, 4)),
    "plain layer norm": (made(nn.LayerNorm, 4, elementwise_affine=False), (2, 3, 4)),
    "group norm": (made(nn.GroupNorm, 2, 6), (3, 6, 2, 2)),
    "average": (nn.AvgPool2d(2), (2, 3, 4, 4)),
    "gelu": (nn.GELU(approximate="tanh"), (2, 3)),
    "softmax": (nn.Softmax(-1), (2, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("stages", FLOAT32.values(), ids=FLOAT32)
@pytest.mark.parametrize("case", LIKE_TORCH.values(), ids=LIKE_TORCH)
def test_without_rounding_layers_are_torchs(case, stages, training):
    theirs, shape = copy.deepcopy(case[0]).train(training), case[1]
    ours = layers.simulated(copy.deepcopy(theirs), stages)
    for seed in (0, 1):
        x, z = (randn(*shape, seed=seed, grad=True) for _ in range(2))
        y, wanted = ours(x), theirs(z)
        dy = randn(*y.shape, seed=2)
        y.backward(dy)
        wanted.backward(dy)
        torch.testing.assert_close(y, wanted, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(x.grad, z.grad, atol=2e-5, rtol=1e-4)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_batch_norm_is_what_it_says():
    x, w, b = randn(6, 3, grad=True), randn(3, seed=1, grad=True), randn(3, seed=2, grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    y = functional.batch_norm(x, mean, var, w, b, True, 0.25, 1e-3, site=Site(MIXED))
    dy = randn(6, 3, seed=3)
    y.backward(dy)
    xq = to("e4m3", x)
    m, v = to("e4m3", xq.mean(0)), to("e4m3", xq.var(0, correction=0))
    n = to("e4m3", (xq - m) * torch.rsqrt(v + 1e-3))
    assert same(y.detach(), to("e4m3", n * to("e4m3", w) + to("e4m3", b)))
    torch.testing.assert_close(mean, to("bfloat16", 0.25 * m))
    torch.testing.assert_close(var, to("bfloat16", 0.75 + 0.25 * v * 6 / 5))
    e = to("e5m2", dy)
    g = e * to("e5m2", w)
    dx = (g - g.mean(0) - n * (g * n).mean(0)) * torch.rsqrt(v + 1e-3)
    assert same(x.grad, to("e5m2", dx))
    assert same(w.grad, to("e3m4", (e * n).sum(0)))
    assert same(b.grad, to("e3m4", e.sum(0)))
    x.grad = None
    before = mean.clone(), var.clone()
    functional.batch_norm(x, mean, var, w, b, False, site=Site(MIXED)).backward(dy)
    assert same(x.grad, to("e5m2", g * torch.rsqrt(to("e4m3", var) + 1e-5)))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


def test_embeddings_round_rows_and_sums():
    w, indices = randn(5, 3, grad=True), torch.tensor([[4, 1], [4, 2]])
    dy = randn(2, 2, 3, seed=1)
    y = functional.embedding(indices, w, 2, site=Site(MIXED))
    y.backward(dy)
    assert same(y.detach(), to("e4m3", w[indices]))
    e = to("e5m2", dy)
    wanted = torch.zeros(5, 3)
    wanted[1], wanted[4] = to("e3m4", e[0, 1]), to("e3m4", e[0, 0] + e[1, 0])
    assert torch.equal(w.grad, wanted)


@pytest.mark.parametrize("how", [None, ARITHMETICS["low"]], ids=["torch", "low"])
def test_attention_is_what_it_says(how):
    stages = replace(MIXED, arithmetic=how, backward_arithmetic=how)
    product = torch.matmul if how is None else lambda a, b: simulate.matmul(a, b, how)
    q, k, v = (randn(2, 5, 4, seed=seed, grad=True) for seed in range(3))
    dy = randn(2, 5, 4, seed=3)
    y, p = functional.attention(q, k, v, causal=True, site=Site(stages))
    y.backward(dy)
    f, b = (lambda x: to("e4m3", x)), (lambda x: to("e5m2", x))
    hidden = torch.ones(5, 5).triu(1).bool()
    wanted = f(f(product(f(q), f(k).mT) * 0.5).masked_fill(hidden, -torch.inf).softmax(-1))
    assert same(p, wanted)
    assert same(y.detach(), f(product(p, f(v))))
    e = b(dy)
    dp = b(product(e, f(v).mT))
    ds = b(p * (dp - (p * dp).sum(-1, keepdim=True)))
    assert same(v.grad, b(product(p.mT, e)))
    assert same(q.grad, b(product(ds, f(k)) * 0.5))
    assert same(k.grad, b(product(ds.mT, f(q)) * 0.5))


def masks(batch, heads, time):
    random = torch.rand(time, time, generator=torch.Generator().manual_seed(3)) < 0.3
    random.fill_diagonal_(False)
    padding = torch.zeros(batch, time, dtype=torch.bool)
    padding[0, -1] = True
    random[:, 0] = False
    return {
        "none": {},
        "bool": {"attn_mask": random},
        "float": {"attn_mask": randn(time, time)},
        "each": {"attn_mask": randn(batch * heads, time, time)},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": random},
    }


@pytest.mark.parametrize("mask", masks(2, 2, 5).values(), ids=masks(2, 2, 5))
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"kdim": 6, "vdim": 3}, {"bias": False}], ids=str
)
def test_multihead_attention_is_torchs_without_rounding(mask, options):
    theirs = made(nn.MultiheadAttention, 8, 2, **options)
    ours = layers.simulated(copy.deepcopy(theirs), Stages())
    first = options.get("batch_first", False)
    same_inputs = "kdim" not in options
    results = []
    for layer in (ours, theirs):
        shapes = [(2, 5, width) if first else (5, 2, width) for width in (8, theirs.kdim, theirs.vdim)]
        inputs = [randn(*shape, seed=n, grad=True) for n, shape in enumerate(shapes)]
        q, k, v = [inputs[0]] * 3 if same_inputs else inputs
        y, weights = layer(q, k, v, average_attn_weights=first, **mask)
        y.backward(randn(*y.shape, seed=9))
        used = [x.grad for x in inputs if x.grad is not None]
        results.append([y, weights, *used, *(each.grad for each in layer.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_dropout_in_attention_scales_what_it_keeps():
    ours, theirs = ([randn(2, 9, 4, seed=seed, grad=True) for seed in range(3)] for _ in range(2))
    torch.manual_seed(5)
    y, p = functional.attention(*ours, dropout=0.25)
    torch.manual_seed(5)
    kept = torch.rand(2, 9, 9) >= 0.25
    assert 0.6 < kept.float().mean() < 0.9
    weights = (theirs[0] @ theirs[1].mT * 0.5).softmax(-1)
    wanted = (weights * kept / 0.75) @ theirs[2]
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(p, weights)
    for each in (y, wanted):
        each.square().sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_attention_drops_in_training_alone():
    attention = layers.simulated(made(nn.MultiheadAttention, 8, 2, dropout=0.5), Stages())
    x = randn(5, 2, 8)
    evaluated = attention.eval()(x, x, x)[0]
    assert torch.equal(evaluated, attention(x, x, x)[0])
    assert not torch.allclose(evaluated, attention.train()(x, x, x)[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.1, "weight": True}], ids=str)
def test_cross_entropy_is_torchs_without_rounding(reduction, options):
    options = {**options, "weight": torch.rand(5) if options.get("weight") else None}
    target = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(0))
    target[0, 0] = 1
    x, z = (randn(3, 5, 4, grad=True) for _ in range(2))
    ours = functional.cross_entropy(x, target, reduction=reduction, ignore_index=1, **options)
    theirs = plain.cross_entropy(z, target, reduction=reduction, ignore_index=1, **options)
    torch.testing.assert_close(ours, theirs)
    (ours * randn(*ours.shape)).sum().backward()
    (theirs * randn(*ours.shape)).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_cross_entropy_of_pixels_is_torchs_at_each_of_them():
    x, target = randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    ours = functional.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(ours, plain.cross_entropy(x, target, reduction="none"))


def test_cross_entropy_is_what_it_says():
    x, target = randn(4, 6, grad=True), torch.tensor([0, 5, 2, 2])
    stages = Stages(loss="e4m3")
    y = functional.cross_entropy(x, target, site=Site(stages))
    (y * 1024).backward()
    z = to("e4m3", x)
    p = to("e4m3", torch.softmax(z, -1))
    picked = torch.log_softmax(z, -1)[torch.arange(4), target]
    assert y.item() == to("e4m3", -picked.mean()[None]).item()
    wanted = to("e4m3", 1024 * (p - plain.one_hot(target, 6)) / 4)
    torch.testing.assert_close(x.grad, wanted)  # a logarithm's last bit may differ
    single = functional.cross_entropy(x[0].detach(), target[0], site=Site(stages))
    assert single.item() == to("e4m3", -picked[:1]).item()


RANDOM = Stages.uniform("e4m3~sr", Arithmetic(sum="e5m10", rounding="stochastic"))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(6, 5), (3, 6)), (nn.Conv2d(2, 3, 2), (2, 2, 4, 4)), (nn.LayerNorm(6), (3, 6))],
    ids=["linear", "conv", "norm"],
)
def test_random_rounding_is_named_by_seed_name_and_call(layer, shape):
    def run(seed=1, name="a", calls=1):
        here = layers.simulated(copy.deepcopy(layer), RANDOM, seed=seed, name=name)
        x = randn(*shape, grad=True)
        for _ in range(calls):
            here.zero_grad()
            y = here(x)
        y.square().sum().backward()
        return torch.cat([each.flatten() for each in (y.detach(), here.weight.grad, here.bias.grad, x.grad)])

    once = run()
    assert torch.equal(once, run())
    for other in ({"seed": 2}, {"name": "b"}, {"calls": 2}):
        assert not torch.equal(once, run(**other))


def test_each_rounding_draws_from_a_stream_of_its_own():
    site = Site(Stages("e4m3~sr", "e4m3~sr", "e4m3~sr"), seed=4, name="fc", call=3)
    x, w = randn(8, 8, grad=True), randn(8, 8, seed=1, grad=True)
    y = functional.linear(x, w, site=site)
    y.backward(randn(8, 8, seed=2))
    e4m3 = formats.get("e4m3")

    def drawn(value, what):
        return e4m3.round(value, "stochastic", Stream(4, step=3, tensor=f"fc/{what}"))

    xq, wq, e = drawn(x, "input"), drawn(w, "weight"), drawn(randn(8, 8, seed=2), "error")
    assert torch.equal(y, drawn(xq @ wq.t(), "output"))
    assert torch.equal(x.grad, drawn(e @ drawn(w, "error_weight"), "input_error"))
    assert torch.equal(w.grad, drawn(e.t() @ xq, "gradient"))


def test_counters_hear_of_every_rounding():
    counters = Counters()
    stages = Stages("e4m3", "int4~fit", None)
    fc = layers.simulated(nn.Linear(4, 3), stages, name="fc", counters=counters)
    x = torch.tensor([[1e9, 1e-9, 1.0, 0.0]], requires_grad=True)
    fc(x).backward(torch.tensor([[7.0, 0.1, 0.0]]))
    counts = counters.read()
    named = ("input", "weight", "bias", "output", "error", "error_weight", "input_error")
    assert set(counts) == {f"fc/{what}" for what in named}
    assert counts["fc/input"] == {"numbers": 4, "overflow": 1, "saturation": 0, "underflow": 1}
    assert counts["fc/error"] == {"numbers": 3, "overflow": 0, "saturation": 0, "underflow": 1}


def test_nothing_is_computed_that_nobody_wants():
    counters = Counters()
    site = Site(MIXED, counters=counters)
    x, w = randn(2, 4), randn(3, 4, seed=1, grad=True)
    functional.linear(x, w, site=site).sum().backward()
    functional.conv1d(randn(2, 2, 5), randn(3, 2, 2, grad=True), site=site).sum().backward()
    assert {"layer/gradient", "layer/error"} <= set(counters.read())
    assert not {"layer/input_error", "layer/error_weight"} & set(counters.read())


def test_the_same_precision_both_ways_rounds_a_weight_once():
    counters = Counters()
    x = randn(2, 4, grad=True)
    functional.linear(x, randn(3, 4), site=Site(Stages.uniform("e4m3"), counters=counters)).sum().backward()
    assert "layer/input_error" in counters.read()
    assert "layer/error_weight" not in counters.read()


def test_autocast_changes_nothing():
    x, w = randn(4, 4, grad=True), randn(4, 4, seed=1)
    k = randn(4, 1, 2, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = functional.linear(x, w), functional.conv1d(x[:, None], k)
        y.sum().backward()
    assert same(y.detach(), x.detach() @ w.t())
    assert same(z.detach(), plain.conv1d(x.detach()[:, None], k))


def test_operands_longer_than_tf32_are_not_shortened():
    conv, gpu = torch.backends.cudnn.conv, torch.device("cuda")
    before = conv.fp32_precision
    for stages, allowed in (
        (Stages("e4m3", "bfloat16"), True),
        (Stages("posit8_2", "float16"), True),
        (Stages("fixed2.14", "e4m3"), False),
        (Stages("e4m3", None), False),
    ):
        with convolution._unshortened(gpu, stages.forward, stages.backward):
            assert (conv.fp32_precision == before) == allowed
        assert conv.fp32_precision == before


def test_shapes_are_known_without_numbers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 2))
    for layer in model:
        if type(layer) in layers.KINDS:
            layers.simulated(layer, RANDOM)
    assert model.to("meta")(torch.ones(2, 3, 5, 5, device="meta")).shape == (2, 2)
    assert functional.linear(*torch.ones(2, 3, 3, device="meta")).shape == (3, 3)


def test_scales_belong_to_tensors():
    x, w = randn(3, 4) * 1000, randn(2, 4, seed=1) / 1000
    y = functional.linear(x, w, site=Site(Stages("int8~fit")))
    fit = Precision.of("int8~fit")
    assert same(y, fit.round(fit.round(x) @ fit.round(w).t()))
    assert y.abs().max() > 0


def test_inputs_that_cannot_be_say_why():
    x, w = randn(2, 4, 5), randn(3, 4, 2, seed=1)
    for wrong, words in (
        (lambda: functional.linear(x.double(), w), "float32, not float64"),
        (lambda: functional.conv2d(x, w), "weight must have 4 dimensions, not 3"),
        (lambda: functional.conv1d(x[0, 0], w), "input must have 3 dimensions"),
        (lambda: functional.conv1d(x, w, groups=2), "input has 4 channels; these kernels take 8"),
        (lambda: functional.conv1d(x, w, stride=2, padding="same"), "needs stride 1"),
        (lambda: functional.conv1d(x, w, padding="most"), "unknown padding 'most'; use same, valid"),
        (lambda: functional.conv1d(x, w, stride=(1, 2)), "stride must be a number or 1 of them"),
        (lambda: functional.batch_norm(x, None, None), "needs running statistics"),
        (lambda: functional.batch_norm(x[:1, :, 0], None, None, training=True), "more than one value"),
        (lambda: functional.layer_norm(x, (4,)), "input must end with the dimensions"),
        (lambda: functional.group_norm(x, 3), "4 channels cannot be split into 3"),
        (lambda: functional.attention(x, x[0], x), "equal leading dimensions"),
        (lambda: functional.cross_entropy(x, x), "class numbers"),
        (lambda: functional.cross_entropy(x, x.long(), reduction="max"), "unknown reduction 'max'"),
        (lambda: layers.simulated(nn.LSTM(1, 1), Stages()), "LSTM cannot be simulated: no simulation"),
        (lambda: layers.simulated(nn.Embedding(2, 2, sparse=True), Stages()), "sparse are not simulated"),
        (lambda: layers.simulated(nn.MultiheadAttention(2, 1), Stages())(x, x, x, is_causal=True), "mask"),
    ):
        with pytest.raises(InputError, match=words):
            wrong()


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)])
def test_what_follows_a_layer_may_change_its_result_in_place(layer):
    x = torch.randn(5, 6)
    net = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Linear(6, 1))
    simulate.convert(net, "bf16", tell=None)
    net(x).sum().backward()
    assert torch.equal(net[:2](x), net[0](x).relu())


@pytest.mark.parametrize("how", [None, Arithmetic(order="exact"), Arithmetic(sum="bfloat16")])
def test_batches_of_nothing_pass_through_convolutions(how):
    x, weight = torch.randn(0, 4, 9, requires_grad=True), torch.randn(6, 2, 3, requires_grad=True)
    y = functional.conv1d(x, weight, None, 2, 1, 1, 2, site=Site(Stages(arithmetic=how)))
    y.sum().backward()
    assert y.shape == (0, 6, 5)
    assert x.grad.shape == x.shape
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("logits", "target"),
    [((4, 3), (1,)), ((1, 3), (4,)), ((2, 3, 4), (4, 2)), ((4, 3), (4, 1)), ((3,), (1,))],
)
def test_a_target_of_another_shape_is_refused(logits, target):
    with pytest.raises(InputError, match=r"logits .* need a target of shape"):
        functional.cross_entropy(torch.zeros(logits), torch.zeros(target, dtype=torch.int64))


@pytest.mark.parametrize("how", [None, Arithmetic(sum="fixed3.5", order="exact")], ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_errors_stop_where_results_were_cut_off_if_asked(kind, how):
    stages = Stages("fixed3.5", None, None, arithmetic=how, clipped=True)
    torch.manual_seed(0)
    made = nn.Linear(6, 5) if kind == "linear" else nn.Conv2d(2, 5, 3)
    x = (torch.randn(9, 6) if kind == "linear" else torch.randn(2, 2, 6, 6)) * 5
    x.requires_grad_()
    made.weight.data.mul_(3)
    layer = layers.simulated(made, stages)
    y = layer(x)
    dy = torch.randn(y.shape)
    cut = (y >= 3.96875) | (y <= -4)
    assert 0 < cut.sum() < cut.numel()
    y.backward(dy)
    gradients = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    layer.stages = replace(stages, clipped=False)
    layer(x).backward(torch.where(cut, 0.0, dy))
    for one, other in zip(gradients, [x.grad, layer.weight.grad, layer.bias.grad], strict=True):
        assert torch.equal(one, other)


def test_only_formats_with_ends_can_be_clipped():
    for forward in (None, "int8~fit"):
        with pytest.raises(FormatError, match="no fixed range"):
            Stages(forward, clipped=True)


def test_an_empty_batch_leaves_running_statistics():
    for norm in (nn.BatchNorm1d(3), simulate.convert(nn.BatchNorm1d(3), "e4m3", tell=None)):
        assert norm(torch.empty(0, 3)).shape == (0, 3)
        assert norm.running_mean.tolist() == [0.0] * 3
        assert norm.running_var.tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("arithmetic", [None, simulate.Arithmetic(sum="e5m10")])
def test_layers_without_inputs_or_outputs(arithmetic):
    for inputs, outputs in ((0, 3), (3, 0)):
        plain = nn.Linear(inputs, outputs)
        x = torch.ones(2, inputs, requires_grad=True)
        wanted = plain(x).detach()
        y = simulate.convert(plain, simulate.Stages(arithmetic=arithmetic), tell=None)(x)
        assert torch.equal(y, wanted)
        y.sum().backward()
        assert x.grad.shape == x.shape


def test_kernels_larger_than_images_are_refused():
    conv = simulate.convert(
        nn.Conv2d(1, 1, 3), Stages(arithmetic=simulate.Arithmetic(sum="e5m10")), tell=None
    )
    with pytest.raises(InputError, match="a kernel 3 long is larger than the padded input, 2 long"):
        conv(torch.ones(1, 1, 2, 2))


def test_a_sum_that_is_no_number_has_no_sign():
    """In e3m0, which has no NaN, its sign would say which infinity it becomes; devices differ in it."""
    site = Site(Stages())
    how = simulate.Arithmetic(sum="e3m0")
    infinity = torch.tensor([torch.inf])
    for a, b in ((infinity, -infinity), (-infinity, infinity)):
        assert site.plus(a, b, how, "output").tolist() == [torch.inf]


def test_a_bias_is_added_with_the_rounding_of_sums():
    x, w, b = torch.zeros(1, 1), torch.zeros(999, 1), torch.full((999,), 1.2)

    def found(rounding):
        stages = Stages(arithmetic=Arithmetic(sum="e5m2", rounding=rounding))
        return functional.linear(x, w, b, site=Site(stages))

    assert set(found("nearest").flatten().tolist()) == {1.25}
    assert set(found("zero").flatten().tolist()) == {1.0}
    assert set(found("stochastic").flatten().tolist()) == {1.0, 1.25}
    assert abs(found("stochastic").mean().item() - 1.2) < 0.02


@pytest.mark.parametrize("spec", ["posit8_1", "e5m2", "fixed1.7", None])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_a_bias_in_an_exact_sum_is_rounded_with_it(spec, groups):
    """Once, of the sum that float64 holds; 1 need not be a number of the format."""
    kept = formats.get(spec).round if spec else lambda x: x
    stages = Stages(spec, arithmetic=Arithmetic(sum="e4m3", order="exact"), fused=True)
    draw = torch.manual_seed(3)
    if groups:
        layer, x = nn.Conv2d(4, 6, 3, padding=1, groups=groups), torch.randn(2, 4, 5, 5, generator=draw)
    else:
        layer, x = nn.Linear(7, 5), torch.randn(99, 7, generator=draw)
    x, weight, bias = (each.mul(16).round() / 32 for each in (x, layer.weight, layer.bias))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    wide = [kept(each).double() for each in (x, weight, bias)]
    exact = plain.conv2d(*wide, padding=1, groups=groups) if groups else plain.linear(*wide)
    wanted = kept(formats.get("e4m3").round(exact.float()))  # small numbers: float32 holds the sums
    assert torch.equal(exact.float().double(), exact)
    result = simulate.convert(layer, stages, tell=None)(x)
    assert torch.equal(result, wanted)
    twice = simulate.convert(layer, replace(stages, fused=False), tell=None)(x)
    assert not torch.equal(result, twice)


def test_only_exact_sums_take_a_bias_in():
    for arithmetic in (None, Arithmetic(sum="e4m3")):
        with pytest.raises(FormatError, match="fused=True needs exact sums"):
            Stages(arithmetic=arithmetic, fused=True)
    assert simulate.recipes.get("positnn/8+quire+fused").stages.fused
    assert not simulate.recipes.get("positnn/8+quire").stages.fused
    assert str(simulate.recipes.get("positnn/8+quire+fused").stages) == "posit8_2, fused"


def test_batch_norm_of_a_vector_is_refused_in_words():
    with pytest.raises(InputError, match=r"takes \[samples, channels, ...\], not \(4,\)"):
        normalization.batch_norm(torch.randn(4), None, None, training=True)
