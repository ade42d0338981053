"""The networks have the published shapes and counts, run forward, and use every parameter they have."""

import math

import pytest
import torch
from torch import nn

from thinwire import zoo
from thinwire.errors import InputError
from thinwire.zoo import MODELS, inception, recurrent, transformer

#: Counts that others print for the same network, in full or to the digits given.
PUBLISHED = {
    "mlp": (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10, 0, "the widths of Dettmers 2016"),
    "lenet": (156 + 2_416 + 48_120 + 10_164 + 850, 0, "LeCun et al. 1998: C1, C5, F6; C3 and output dense"),
    "alexnet": (62.00e6, -4, "CNTK's layers; 62M in Alistarh et al. 2017, table 1"),
    "vgg19": (143_667_240, 0, "torchvision's table of weights; 144M in Simonyan and Zisserman, table 2"),
    "bn_inception": (11_295_240 - 10_016, 0, "Cadene's port, less the bias of each of 10 016 channels"),
    "inception_v3": (27_161_264, 0, "torchvision's table of weights"),
    "resnet18": (11_689_512, 0, "torchvision's table of weights"),
    "resnet50": (25_557_032, 0, "torchvision's table of weights"),
    "resnet152": (60_192_808, 0, "torchvision's table of weights"),
    "resnet110": (1.73e6, -4, "CNTK's layers; 1.7M in He et al. 2016, table 6"),
    "davidnet": (6_573_120, 0, "torchsummary of Page's cifar10-fast"),
    "an4_lstm": (13.63e6, -4, "CNTK's layers; 13M in Alistarh et al. 2017, table 1"),
    "gnmt": (160_671_297, 0, "MLPerf's GNMT, as NVIDIA's apex states it"),
    "biglstm": (1.8e9, -8, "Jozefowicz et al. 2016, table 1"),
    "gpt2": (124_439_808, 0, "the released checkpoint; 124M in OpenAI's README"),
    "vit_b": (86_567_656, 0, "torchvision's table of weights; 86M in Dosovitskiy et al. 2021, table 1"),
}

SMALL = ("mlp", "lenet", "resnet110", "davidnet", "an4_lstm")


def image(channels, size):
    return lambda: (torch.zeros(2, channels, size, size),)


def tokens(*lengths):
    return lambda: tuple(torch.ones(2, length, dtype=torch.int64) for length in lengths)


#: For each network an input, and the shape of its output.
RUNS = {
    "mlp": (image(1, 28), (2, 10)),
    "lenet": (image(1, 28), (2, 10)),
    "alexnet": (image(3, 227), (2, 1000)),
    "vgg19": (image(3, 224), (2, 1000)),
    "bn_inception": (image(3, 224), (2, 1000)),
    "inception_v3": (image(3, 299), (2, 1000)),
    "resnet18": (image(3, 224), (2, 1000)),
    "resnet50": (image(3, 224), (2, 1000)),
    "resnet152": (image(3, 224), (2, 1000)),
    "resnet110": (image(3, 32), (2, 10)),
    "davidnet": (image(3, 32), (2, 10)),
    "an4_lstm": (lambda: (torch.zeros(2, 4, 363),), (2, 4, 132)),
    "gnmt": (tokens(5, 4), (2, 4, 32_320)),
    "biglstm": (tokens(3), (2, 3, 793_470)),
    "gpt2": (tokens(7), (2, 7, 50_257)),
    "vit_b": (image(3, 224), (2, 1000)),
}


def outputs(net, *inputs):
    """All outputs of a network as a tuple; Inception-V3 has two."""
    result = net(*inputs)
    return result if isinstance(result, tuple) else (result,)


def numel(shapes):
    return sum(shape.numel() for shape in shapes.values())


def test_the_tables_of_this_file_cover_the_registry():
    assert set(PUBLISHED) == set(RUNS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_the_registered_and_the_published_ones(name):
    published, digits, _ = PUBLISHED[name]
    assert numel(zoo.shapes(name)) == MODELS[name].params
    assert round(MODELS[name].params, digits) == published


def test_entries_say_what_they_are():
    for name, entry in MODELS.items():
        assert entry.name == name
        assert "\n" not in entry.source
        assert any(year in entry.source for year in map(str, range(1998, 2025)))
    assert len({entry.build for entry in MODELS.values()}) == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_networks_take_no_memory_on_the_meta_device(name):
    net = zoo.get(name)
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert all(each.requires_grad and each.dtype == torch.float32 for each in net.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_used(name):
    make, shape = RUNS[name]
    net = zoo.get(name)
    results = outputs(net, *(each.to("meta") for each in make()))
    assert {result.shape for result in results} == {shape}
    sum(result.sum() for result in results).backward()
    assert [key for key, parameter in net.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_learn_on_the_cpu(name):
    torch.manual_seed(1)
    make, shape = RUNS[name]
    net = zoo.get(name, "cpu")
    (x,) = make()
    x = torch.randn_like(x)
    labels = torch.arange(math.prod(shape[:-1])) % shape[-1]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(net(x).flatten(0, -2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < 3 * math.log(shape[-1])


def test_devices_are_taken_by_name_or_as_they_are():
    assert next(zoo.get("lenet", torch.device("cpu")).parameters()).device.type == "cpu"
    torch.manual_seed(3)
    first = zoo.get("lenet", "cpu").state_dict()
    second = zoo.get("lenet", "cpu").state_dict()
    assert not torch.equal(first["conv1.weight"], second["conv1.weight"])


def test_normal_weights_are_drawn_off_the_meta_device():
    torch.manual_seed(4)
    weight = zoo.get("resnet18", "cpu").get_parameter("stage1.0.body.conv1.conv.weight")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)


def test_an_unknown_name_lists_near_ones_and_all():
    with pytest.raises(
        InputError,
        match=r"unknown network 'resnet51'; did you mean 'resnet50'\? \(there are: mlp, lenet, .*vit_b\)",
    ):
        zoo.get("resnet51")
    with pytest.raises(InputError, match="unknown network '\\?'; there are: mlp"):
        zoo.shapes("?")
    with pytest.raises(InputError, match="there are: mlp"):
        zoo.get([])


def test_shapes_are_those_of_the_papers():
    assert zoo.shapes("alexnet")["conv2.weight"] == (192, 96, 5, 5)
    assert zoo.shapes("resnet50")["stage4.0.body.conv2.conv.weight"] == (512, 512, 3, 3)
    assert zoo.shapes("inception_v3")["trunk.mixed_6b.1.1.conv.weight"] == (128, 128, 1, 7)
    assert zoo.shapes("an4_lstm")["lstm1.recurrent.weight"] == (4 * 1024, 512)
    assert zoo.shapes("biglstm")["layers.1.projection.weight"] == (1024, 8192)
    assert zoo.shapes("vit_b")["positions"] == (1, 197, 768)
    assert len(zoo.shapes("resnet152")) == 467


def test_alexnet_normalises_twice_with_the_same_constants():
    net = zoo.get("alexnet", "meta")
    norms = [each for each in net.modules() if isinstance(each, nn.LocalResponseNorm)]
    assert [(each.size, each.alpha, each.beta, each.k) for each in norms] == [(5, 1e-4, 0.75, 1.0)] * 2


def test_inception_v3_without_its_auxiliary_classifier():
    trunk = {key: each for key, each in zoo.shapes("inception_v3").items() if not key.startswith("auxiliary")}
    assert numel(trunk) == 23_834_568


def test_the_head_of_gpt2_is_its_embedding():
    shapes = zoo.shapes("gpt2")
    assert [key for key, shape in shapes.items() if 50_257 in shape] == ["tokens.weight"]


def column_nbytes(shape):
    """What stock 1-bit SGD sends: per column two float32 and one bit per row, in words of 32.

    A column is as high as CNTK's first axis: the width of a kernel, the outputs of a matrix, a whole vector.
    """
    rows = {1: shape[0], 2: shape[0], 4: shape[-1]}[len(shape)]
    return shape.numel() // rows * (8 + 4 * math.ceil(rows / 32))


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("alexnet", 20.1),
        ("vgg19", 95.8),
        ("resnet50", 191.1),
        ("resnet152", 459.3),
        ("resnet110", 6.9),
        ("an4_lstm", 1.76),
    ],
)
def test_one_bit_columns_shrink_matrices_and_swell_small_kernels(name, megabytes):
    shapes = zoo.shapes(name)
    assert sum(map(column_nbytes, shapes.values())) / 1e6 == pytest.approx(megabytes, abs=0.05)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_layers_agree_with_torch():
    torch.manual_seed(5)
    ours = recurrent.Projected(5, 8, 3, peepholes=False)
    theirs = nn.LSTM(5, 8, proj_size=3, batch_first=True)
    swapped = torch.arange(32).view(4, 8)[[0, 1, 3, 2]].flatten()  # torch has the candidate before the output
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input.weight[swapped])
        theirs.weight_hh_l0.copy_(ours.recurrent.weight[swapped])
        theirs.bias_ih_l0.copy_(ours.input.bias[swapped])
        theirs.bias_hh_l0.zero_()
        theirs.weight_hr_l0.copy_(ours.projection.weight)
    x = torch.randn(2, 6, 5)
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_peepholes_let_the_gates_see_the_cell():
    torch.manual_seed(6)
    layer = recurrent.Projected(1, 1, 1, peepholes=True).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-2, 2)
    weight, again = layer.input.weight.flatten().tolist(), layer.recurrent.weight.flatten().tolist()
    bias, project = layer.input.bias.tolist(), layer.projection.weight.item()
    peep = {key: each.item() for key, each in layer.peepholes.items()}
    cell = output = 0.0
    expected = []
    for x in (0.7, -1.1, 0.4):
        drive = [w * x + a * output + b for w, a, b in zip(weight, again, bias, strict=True)]
        opened, kept = sigmoid(drive[0] + peep["input"] * cell), sigmoid(drive[1] + peep["forget"] * cell)
        cell = kept * cell + opened * math.tanh(drive[3])
        output = project * sigmoid(drive[2] + peep["output"] * cell) * math.tanh(cell)
        expected.append(output)
    got = layer(torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64).view(1, 3, 1))
    assert got.flatten().tolist() == pytest.approx(expected)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_gnmt_does_not_attend_to_padding():
    torch.manual_seed(7)
    attention = recurrent.GNMT(vocabulary=11, width=6).attention
    query, memory = torch.randn(1, 2, 6), torch.randn(1, 4, 6)
    padding = torch.tensor([[False, False, False, True]])
    other = memory.clone()
    other[0, 3] = 9.0
    assert torch.equal(attention(query, memory, padding), attention(query, other, padding))
    assert not torch.equal(attention(query, memory, ~padding), attention(query, other, ~padding))


def test_gnmt_adds_what_goes_into_a_layer_from_the_third_on():
    """Layers of zeros give zeros: what comes out is what was added to it."""
    torch.manual_seed(9)
    net = recurrent.GNMT(vocabulary=11, width=6).eval()
    source, target = torch.randint(1, 11, (2, 5)), torch.randint(1, 11, (2, 4))
    for layers in (net.encoder, net.decoder):
        for layer in layers[2:]:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    x, _ = net.encoder[0](net.embedding(source))
    x, _ = net.encoder[1](x)
    assert torch.equal(net._encode(source), x)
    y, _ = net.decoder[0](net.embedding(target))
    context = net.attention(y, x, source == 0)
    y, _ = net.decoder[1](torch.cat((y, context), dim=-1))
    assert torch.equal(net(source, target), net.classifier(y))


def test_gpt2_does_not_look_ahead():
    torch.manual_seed(8)
    net = transformer.GPT2(vocabulary=20, positions=8, width=16, depth=2, heads=4).eval()
    text = torch.randint(20, (1, 8))
    changed = text.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 20
    before, after = net(text), net(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_attention_agrees_with_torch():
    torch.manual_seed(9)
    ours = transformer.Attention(12, 3, causal=False)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_branches_are_laid_side_by_side():
    branches = inception.Branches((nn.Identity(), nn.ReLU()))
    x = torch.tensor([[[[-1.0]], [[2.0]]]])
    assert branches(x).flatten().tolist() == [-1.0, 2.0, 0.0, 2.0]
