"""Low-precision matrix products: quick rounding, threads, batches, randomness, errors.

What they compute is compared with a scalar oracle in `tests/oracles/test_gemm_oracle.py`.
"""

import threading

import pytest
import torch

from thinwire import FormatError, InputError, Stream, formats, simulate
from thinwire.kernels import cpu, gemm_cpu, gemm_params, gemm_reference
from thinwire.simulate import Arithmetic

ORDERS = ("sequential", "chunked/3", "pairwise", "kahan")


def quick_formats():
    more = [
        formats.Float(*each) for each in ((1, 4), (2, 3), (5, 21), (6, 12), (7, 8), (8, 3), (8, 22), (8, 23))
    ]
    more += [formats.Float(5, 2, saturate=True), formats.Float(4, 3, bias=2), formats.Float(3, 4, bias=120)]
    more += [formats.Fixed(1, 22), formats.Int(23), formats.Float(2, 3, specials="fn", bias=-110)]
    return [each for each in (*formats.FORMATS.values(), *more) if gemm_params.quick(each._prepared(0), 0)]


@pytest.mark.parametrize("format", quick_formats(), ids=lambda each: each.name)
def test_quick_rounding_is_the_formats_own(format, probes):
    """A pairwise sum of one product is that product, rounded, -0 included."""
    x = probes(format)[None]
    rounded = simulate.matmul(torch.ones(1, 1), x, Arithmetic(sum=format, order="pairwise"))
    assert torch.equal(rounded.view(torch.int32), format.round(x).view(torch.int32))


def test_which_formats_are_quick():
    names = {each.name for each in quick_formats()}
    assert {"float16", "bfloat16", "tf32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"} <= names
    assert {"posit8_1", "posit16_2", "nf4"} <= names  # by table
    assert not {"e3m0", "float4_e2m1fn"} & names
    saturating = formats.Float(4, 3, specials="fnuz", saturate=True)
    for each in (saturating, formats.Float(5, 2, subnormals=False), formats.Fixed(1, 23)):
        assert gemm_params.quick(each._prepared(0), 0) is None
    assert gemm_params.quick(formats.get("e5m2")._prepared(2), 2) is None
    assert gemm_params.quick(formats.get("nf4")._prepared(5), 5) is None


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize(
    ("product", "total"), [("posit8_2", "posit8_2"), ("posit16_1", "nf4"), ("uniform8s", "e5m2")]
)
def test_tables_equal_the_reference(product, total, order):
    """Zeros of both signs, infinities and NaN, too."""
    random = torch.Generator().manual_seed(order)
    a, b = torch.randn(2, 5, 40, generator=random), torch.randn(2, 40, 7, generator=random)
    a[0, 0, 0], a[0, 1, 1], a[0, 2, 2], b[1, 3, 3] = torch.tensor([float("inf"), -float("nan"), -0.0, -1e-40])
    for mode in range(5):
        try:
            params = [formats.get(name)._prepared(mode) for name in (product, total)]
        except FormatError:
            continue
        p = gemm_params.GemmParams(*params, mode, order, 7 * (order == gemm_params.CHUNKED))
        actual, wanted = torch.empty(2, 5, 7), torch.empty(2, 5, 7)
        gemm_cpu.gemm(p, a, b, actual)
        gemm_reference.gemm(p, a, b, wanted)
        assert torch.equal(actual.view(torch.int32), wanted.view(torch.int32))


def test_results_do_not_depend_on_threads(monkeypatch):
    how = Arithmetic("e5m2", "e5m10")
    a, b = torch.randn(13, 21), torch.randn(21, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = simulate.matmul(a, b, how)
        few = simulate.matmul(a[:3], b, how)
        monkeypatch.setattr(gemm_cpu, "THREAD_STEPS", 1)
        torch.set_num_threads(3)
        assert len(gemm_cpu._spans(one[None], 21)) == 2
        assert len(gemm_cpu._spans(few[None], 21)) == 3
        assert torch.equal(simulate.matmul(a, b, how), one)
        assert torch.equal(simulate.matmul(a[:3], b, how), few)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("order", ["sequential", "exact"])
def test_batches_views_and_out(order):
    how = Arithmetic(None if order == "exact" else "e5m2", "e5m10", order)
    x, y = torch.randn(6, 5, 7), torch.randn(6, 7, 3)
    one_by_one = torch.stack([simulate.matmul(u, v, how) for u, v in zip(x, y, strict=True)])
    assert torch.equal(simulate.matmul(x, y, how), one_by_one)
    shaped = simulate.matmul(x.view(2, 3, 5, 7), y.view(2, 3, 7, 3), how)
    assert torch.equal(shaped.view(6, 5, 3), one_by_one)
    shared = torch.stack([simulate.matmul(u, y[0], how) for u in x])
    assert torch.equal(simulate.matmul(x, y[0], how), shared)
    other = torch.stack([simulate.matmul(x[0], v, how) for v in y])
    assert torch.equal(simulate.matmul(x[:1], y, how), other)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(simulate.matmul(strided, y, how), one_by_one)
    out = torch.empty(6, 3, 5).transpose(1, 2)
    assert simulate.matmul(x, y, how, out=out) is out
    assert torch.equal(out, one_by_one)
    square = torch.randn(4, 4)
    wanted = simulate.matmul(square, square, how)
    assert torch.equal(simulate.matmul(square, square, how, out=square), wanted)


@pytest.mark.parametrize("order", ["sequential", "chunked/2", "pairwise", "kahan", "fp32", "exact"])
def test_empty_products_are_zero(order):
    how = Arithmetic(order=order)
    result = simulate.matmul(torch.ones(2, 0), torch.ones(0, 3), how)
    assert torch.equal(result.view(torch.int32), torch.zeros(2, 3, dtype=torch.int32))
    assert simulate.matmul(torch.ones(0, 4), torch.ones(4, 3), how).shape == (0, 3)
    assert simulate.matmul(torch.ones(2, 4, device="meta"), torch.ones(4, 3, device="meta"), how).shape == (
        2,
        3,
    )


def test_stochastic_rounding_is_reproducible_and_right_on_average():
    rng = Stream(seed=5, step=2)
    a, b = torch.full((300, 8), 0.3), torch.ones(8, 40)
    for order in ORDERS:
        how = Arithmetic("e5m2", "e5m10", order, rounding="stochastic")
        result = simulate.matmul(a, b, how, rng=rng)
        assert torch.equal(result, simulate.matmul(a, b, how, rng=rng))
        assert not torch.equal(result, simulate.matmul(a, b, how, rng=Stream(seed=5, step=3)))
        assert abs(result.mean().item() - 2.4) < 0.005  # 12000 sums of 8 with a deviation of 0.07
        assert result.unique().numel() > 5  # every step draws words of its own


def test_stochastic_rounding_draws_from_a_stream_of_its_own_for_each_step():
    key = Stream(seed=1).key
    keys = {gemm_reference.derived(key, number) for number in range(3000)}
    assert len(keys) == 3000
    half = formats.get("e5m10")
    x = torch.rand(4, 1)
    result = simulate.matmul(
        x, torch.ones(1, 5), Arithmetic(half, None, "pairwise", rounding="stochastic"), rng=Stream(1)
    )
    words = gemm_reference.reference.stream_words(gemm_reference.derived(key, 0), 20).view(4, 5)
    assert torch.equal(result, half.round(x.expand(4, 5), "stochastic", words))


def test_arithmetic_is_data():
    one, two = Arithmetic("e5m2", "bfloat16"), Arithmetic(formats.get("e5m2"), formats.get("bfloat16"))
    assert one == two
    assert hash(one) == hash(two)
    assert one != Arithmetic("e5m2", "bfloat16", order="kahan")
    assert one.rounding == "nearest"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"order": "random"}, "unknown order 'random'; use one of: sequential, chunked/C"),
        ({"order": "chunked/0"}, "unknown order 'chunked/0'"),
        ({"order": 3}, "unknown order '3'"),
        ({"multiply": "karatsuba"}, "unknown multiply 'karatsuba'; use one of: exact, mogami"),
        ({"multiply": "mogami/1.5"}, "unknown multiply"),
        ({"rounding": "odd"}, "unknown rounding 'odd'; use one of: nearest"),
        ({"product": "e9m9"}, "Float needs exp 1..8"),
        ({"product": "float7"}, "unknown format 'float7'"),
        ({"sum": "e5m10~sr"}, "use sum='e5m10', and rounding='stochastic'"),
        ({"sum": "e5m2", "order": "fp32"}, "sums in float32; leave out sum"),
        ({"product": "e5m2", "order": "exact"}, "rounds once"),
        ({"multiply": "mogami", "order": "exact"}, "rounds once"),
        ({"sum": "e8m23", "order": "exact"}, "at most 22 significant bits"),
        ({"sum": "fixed1.23", "order": "exact"}, "at most 22 significant bits"),
    ],
)
def test_arithmetic_that_cannot_be_says_why(arguments, words):
    with pytest.raises(FormatError, match=words.replace("(", r"\(")):
        Arithmetic(**arguments)


def test_inputs_that_cannot_be_multiplied_say_why():
    x, how = torch.ones(2, 3), Arithmetic()
    for a, b, words in (
        (x.double(), x.t(), "a must be float32, not float64"),
        (x, x, "a has 3 columns and b 2 rows"),
        (x, torch.ones(3), "2 or more dimensions"),
        (x.numpy(), x, "a must be a torch.Tensor, not ndarray"),
        (x.expand(2, 2, 3), x.t().expand(3, 3, 2), "leading dimensions"),
        (x, x.t().to("meta"), "a is on cpu and b on meta"),
    ):
        with pytest.raises(InputError, match=words):
            simulate.matmul(a, b, how)
    with pytest.raises(InputError, match="out must be"):
        simulate.matmul(x, x.t(), how, out=torch.empty(3, 3))
    with pytest.raises(InputError, match="matmul takes Arithmetic"):
        simulate.matmul(x, x.t(), "e5m10")
    with pytest.raises(FormatError, match="stochastic rounding needs rng=Stream"):
        simulate.matmul(x, x.t(), Arithmetic("e5m2", rounding="stochastic"))
    with pytest.raises(FormatError, match="rng is for"):
        simulate.matmul(x, x.t(), how, rng=Stream(1))


def test_calls_that_run_at_once_have_threads_of_our_name():
    meeting, names = threading.Barrier(3, timeout=60), []

    def call():
        meeting.wait()  # all three run at once
        names.append(threading.current_thread().name)

    cpu.run_all([call] * 3)
    assert len(set(names)) == 3
    assert all(each.startswith("thinwire") for each in names)

    def fail():
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        cpu.run_all([fail, list])
