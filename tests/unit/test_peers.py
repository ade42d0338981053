"""What benchmarks time: the clock, and other libraries, of which some are made up here."""

from types import SimpleNamespace

import pytest
import torch

from thinwire import codecs, formats
from thinwire.bench import codec_peers, peers, qtorch_peer, timing
from thinwire.rounding import Rounding, Stream

CPU = torch.device("cpu")
X = torch.randn(5000, generator=torch.Generator().manual_seed(0))


class Watch:
    """A clock that only calls move on, and that counts them."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def taking(self, seconds):
        def call():
            self.now += seconds
            self.calls += 1

        return call


def test_a_call_is_timed_after_a_warm_up(monkeypatch):
    watch = Watch(monkeypatch)
    assert timing.seconds(watch.taking(0.01), CPU) == pytest.approx(0.01)
    assert watch.calls == 2 + 1 + 25  # the warm-up, the plan, the most rounds
    watch.calls = 0
    assert timing.seconds(watch.taking(1.0), CPU, budget_s=9.5) == pytest.approx(1.0)
    assert watch.calls == 2 + 1 + 9
    watch.calls = 0
    assert timing.seconds(watch.taking(1.0), CPU) == pytest.approx(1.0)
    assert watch.calls == 2 + 1 + 5


def test_short_calls_are_timed_many_at_a_time(monkeypatch):
    watch = Watch(monkeypatch)
    assert timing._repeats(watch.taking(2**-14), CPU, 0.001) == (3, 5)
    assert timing._repeats(watch.taking(2**-14), CPU, 0.0021) == (3, 11)
    assert timing._repeats(watch.taking(0.0), CPU, 0.4) == (2000, 25)
    assert timing._timed(watch.taking(0.5), CPU, 4) == 0.5


def test_a_gpu_measures_with_its_own_clock(monkeypatch):
    said = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            said.append("record")

        def synchronize(self):
            said.append("synchronize")

        def elapsed_time(self, _):
            return 3000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu = SimpleNamespace(type="cuda")
    assert timing._timed(lambda: said.append("call"), gpu, 3) == 1.0
    assert said == ["record", "call", "call", "call", "record", "synchronize"]
    assert timing._repeats(print, gpu, 0.4) == (10, 5)


def test_a_call_is_compared_with_a_copy(monkeypatch):
    watch, copied = Watch(monkeypatch), []
    inner = timing._timed

    def timed(call, device, repeats):
        if repeats == 1 and call.__name__ == "<lambda>":
            call()
            copied.append(repeats)
            return 0.5
        return inner(call, device, repeats)

    monkeypatch.setattr(timing, "_timed", timed)
    found = timing.against_copy(watch.taking(0.25), X, 6)
    assert found == {
        "seconds": 0.25, "elements_per_s": 20_000.0, "copy_s": 0.5, "speed_ratio": 2.0,
        "bandwidth_ratio": 1.5,
    }  # fmt: skip
    assert len(copied) == 5


# Other libraries' codecs


def run(cases, x=X):
    """What the cases make of numbers: by codec and operation."""
    return {(spec, operation): prepare(x)() for spec, operation, prepare in cases}


def near(spec, found, x=X):
    """Whether numbers that came back are about as near as those of a codec."""
    codec = codecs.get(spec)
    ours = codec.decode(codec.encode(x), x.numel())
    mine, theirs = (ours - x).norm(), (found.flatten()[: x.numel()].float() - x[: found.numel()]).norm()
    return 0.5 < theirs / mine < 2


def test_cases_of_a_library_encode_and_decode():
    def encode(x):
        return x * 2, torch.tensor(1.0)

    def decode(codes, more, out=None):
        return torch.add(codes, more, out=out)

    for takes_out in (False, True):
        found = run(codec_peers._there_and_back("int8/256", encode, decode, takes_out))
        assert list(found) == [("int8/256", "encode"), ("int8/256", "decode")]
        assert torch.equal(found["int8/256", "encode"][0], X * 2)
        assert torch.equal(found["int8/256", "decode"], X * 2 + 1)


@pytest.mark.parametrize(
    "cases", [codec_peers.bitsandbytes_blocks, codec_peers.torchao_mx, codec_peers.ddp_hooks]
)
@pytest.mark.filterwarnings("ignore")
def test_libraries_do_nearly_what_the_named_codecs_do(cases):
    x = X[: 4 * 1024]
    found = run(cases(x), x)
    specs = {spec for spec, _ in found}
    assert len(found) == 2 * len(specs)
    for spec in specs:
        decoded = found[spec, "decode"]
        if spec.startswith("int8/tensor"):  # unsigned, with a zero: twice as coarse at most
            assert (decoded - x).norm() / x.norm() < 0.02
        else:
            assert near(spec, decoded, x), spec


def test_hivemind_is_asked_for_its_bytes(monkeypatch):
    class Codec:
        def compress(self, x, info):
            assert info is x
            return x + 1

        def extract(self, sent):
            return sent - 1

    compression = SimpleNamespace(
        BlockwiseQuantization=Codec, Uniform8BitQuantization=Codec,
        CompressionInfo=SimpleNamespace(from_tensor=lambda x: x),
    )  # fmt: skip
    monkeypatch.setattr(
        codec_peers.importlib, "import_module", lambda name: {"hivemind.compression": compression}[name]
    )
    found = run(codec_peers.hivemind_codecs(X))
    assert set(found) == {
        (spec, each) for spec in ("tree8/4096", "int8/tensor") for each in ("encode", "decode")
    }
    assert all(torch.allclose(found[spec, "decode"], X, atol=1e-6) for spec in ("tree8/4096", "int8/tensor"))
    with pytest.raises(NotImplementedError, match="measured on the CPU only"):
        next(codec_peers.hivemind_codecs(torch.zeros(1, device="meta")))


def test_compiled_functions_are_called_unless_compiling_takes_too_long(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: lambda *given: ("compiled", function(*given)))
    clock = iter([0.0, 60.0, 0.0, 61.5])
    monkeypatch.setattr(codec_peers.time, "perf_counter", lambda: next(clock))
    assert codec_peers._compiled(max, 2, 3)() == ("compiled", 3)
    with pytest.raises(TimeoutError, match="compiling max took 62 s"):
        codec_peers._compiled(max, 2, 3)


def test_topk_finds_a_hundredth():
    ((spec, operation, prepare),) = codec_peers.torch_topk(X)
    values, places = prepare(X[:4901])()
    assert (spec, operation) == ("topk/0.01+ef", "encode")
    assert values.numel() == 50
    assert torch.equal(X[places].abs(), values)


def test_feedback_adds_what_was_lost():
    blocks, residual = X[:512].view(2, 256), torch.full((2, 256), 0.25)
    codes, scale = codec_peers.to_int8_with_feedback(blocks, residual)
    expected = codec_peers.to_int8(blocks + 0.25)
    assert torch.equal(codes, expected[0])
    assert torch.allclose(residual, blocks + 0.25 - codes * scale)
    assert torch.allclose(scale.flatten(), (blocks + 0.25).abs().amax(1) / 127)


# Other libraries' formats


def test_torch_and_the_reference_do_what_the_named_formats_do():
    x = X[:4096]
    for name, operation, call in peers.torch_casts(x):
        format = formats.get(name)
        expected = format.round(x) if operation == "from_codes" else None
        found = call()
        if expected is not None and "fnuz" not in name:
            assert torch.equal(found, expected), name
    calls = []
    peers._sixteen(lambda: calls.append(1))()
    assert len(calls) == 16
    cases = peers.eager_reference(x)
    assert {(name, operation) for name, operation, _ in cases} == {
        (name, operation) for name in peers.REFERENCE for operation in ("to_codes", "from_codes")
    }
    for library in (peers.ml_dtypes_casts, peers.bitsandbytes_maps):
        for name, operation, call in library(x):
            found = call()
            if library is peers.ml_dtypes_casts and operation == "from_codes":
                assert torch.equal(torch.from_numpy(found), formats.get(name).round(x)), name


def test_a_library_that_is_missing_is_named_and_rows_are_sorted(monkeypatch):
    def missing(_):
        raise ImportError("no module\nat all")

    def odd(_):
        raise NotImplementedError

    timed = []
    monkeypatch.setattr(
        timing, "against_copy", lambda call, _, nbytes: (timed.append(nbytes), {"seconds": call()})[1]
    )
    cases = [
        ("int8", "to_codes", lambda: 1),
        ("int8", "round", lambda: 2),
        ("bfloat16", "to_codes", lambda: 3),
    ]
    monkeypatch.setattr(peers, "PEERS", {"a": lambda _: cases, "b": missing, "c": odd})
    rows, absent = peers.measure(X)
    assert [(row["library"], row["format"], row["operation"], row["seconds"]) for row in rows] == [
        ("a", "bfloat16", "to_codes", 3), ("a", "int8", "round", 2), ("a", "int8", "to_codes", 1),
    ]  # fmt: skip
    assert timed == [5, 8, 6]
    assert absent == {"b": "no module", "c": "NotImplementedError"}


def test_qtorch_is_timed_beside_what_does_the_same(monkeypatch):
    """With a made-up library that does what thinwire does."""
    asked = []

    def rounded(name, x, rounding):
        asked.append((name, rounding))
        rng = Stream(seed=1) if rounding == "stochastic" else None
        return formats.get(name).round(x, Rounding(rounding), rng)

    class Quantizer(torch.nn.Module):
        def __init__(self, forward, backward, *roundings):
            super().__init__()
            assert (forward, backward) == ((4, 3), (5, 2))
            assert len(set(roundings)) == 1

        def forward(self, x):
            asked.append("module")
            return 2 * x

    quant = SimpleNamespace(
        float_quantize=lambda x, exp, man, rounding: rounded(f"e{exp}m{man}", x, rounding),
        fixed_point_quantize=lambda x, word, part, rounding: rounded(
            f"fixed{word - part}.{part}", x, rounding
        ),
        block_quantize=lambda _, word, rounding: asked.append(("block", word, rounding)),
        Quantizer=Quantizer,
    )  # fmt: skip
    module = SimpleNamespace(FloatingPoint=lambda exp, man: (exp, man))
    made = {"qtorch": module, "qtorch.quant": quant}
    inner = qtorch_peer.importlib.import_module
    monkeypatch.setattr(
        qtorch_peer.importlib, "import_module", lambda name: made[name] if name in made else inner(name)
    )
    assert qtorch_peer.load() is quant
    found = list(qtorch_peer.cases(quant, X))
    assert [(theirs, ours) for theirs, ours, _, _ in found[:6]] == [
        ("float_quantize(5, 2) nearest", "e5m2"), ("float_quantize(4, 3) nearest", "e4m3"),
        ("fixed_point_quantize(8, 6) nearest", "fixed2.6"), ("block_quantize(8) nearest", "int8~fit"),
        ("Quantizer forward nearest", "Quantizer(e4m3, e5m2)"),
        ("Quantizer forward and backward nearest", "Quantizer(e4m3, e5m2)"),
    ]  # fmt: skip
    assert [theirs.split()[-1] for theirs, *_ in found] == ["nearest"] * 6 + ["stochastic"] * 6
    for what, _, theirs, ours in found:
        before = len(asked)
        mine, other = ours(), theirs()
        assert len(asked) == before + 1
        if what.startswith(("float", "fixed")):
            assert torch.equal(mine, other), what
    block = found[9][3]()
    assert not torch.equal(block, found[3][3]())
    assert (block - X).abs().max() < X.abs().max() / 64


def test_forward_alone_makes_no_gradients():
    made = []

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            made.append("forward")
            return x * 1

        @staticmethod
        def backward(_, gradient):
            made.append(float(gradient.sum()))
            return gradient

    x = torch.ones(3, requires_grad=True)
    qtorch_peer._forward(Both.apply, x, torch.ones(3))
    assert made == ["forward"]
    qtorch_peer._both(Both.apply, x, torch.full((3,), 2.0))
    assert made == ["forward", "forward", 6.0]
