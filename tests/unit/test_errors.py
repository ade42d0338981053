"""Bad input gets an error that names the problem and what would work."""

import pytest
import torch

import thinwire
from thinwire import FormatError, InputError, Stream, UnknownFormatError
from thinwire.formats import (
    Dettmers,
    Fixed,
    Float,
    Int,
    Posit,
    Table,
    Uniform,
    exponential,
    get,
    normal_quantiles,
)

E4M3 = get("float8_e4m3fn")


def test_an_unknown_name_begins_with_the_nearest():
    with pytest.raises(
        UnknownFormatError, match=r"^unknown format 'flaot8_e4m3fn'; did you mean 'float8_e4m3fn'"
    ):
        get("flaot8_e4m3fn")
    with pytest.raises(UnknownFormatError, match="thinwire formats"):
        get("?")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Float(9, 2), "exp 1..8"),
        (lambda: Float(4, 24), "man 0..23"),
        (lambda: Float(1, 0), "no number but zero"),
        (lambda: Float(4, 3, specials="odd"), "ieee, fn, fnuz, none"),
        (lambda: Float(8, 2, specials="none"), "beyond float32"),
        (lambda: Float(8, 2, specials="fnuz"), "at most 127"),
        (lambda: Float(4, 3, bias=128), "at most 127"),
        (lambda: Fixed(0, 8), "int_bits >= 1"),
        (lambda: Fixed(12, 13), "2 to 24 bits"),
        (lambda: Int(1), "2 to 24"),
        (lambda: Uniform(17), "16 bits"),
        (lambda: Posit(17, 1), r"n 2\.\.16"),
        (lambda: Posit(8, 4), r"es 0\.\.3"),
        (lambda: Dettmers("cubic"), "dynamic, static, mantissa, linear"),
        (lambda: Table((1.0,)), "2 to 65536"),
        (lambda: Table((1.0, 1.0)), "two different"),
        (lambda: Table((2.0, 1.0)), "sorted"),
        (lambda: Table((0.0, float("inf"))), "finite"),
        (lambda: exponential(8, base=0.4), "raise the base"),
        (lambda: normal_quantiles(1), "2 to 16"),
        (lambda: get("e9m2"), "exp 1..8"),
        (lambda: get("tf32").values(), "16 bits"),
        (lambda: Dettmers("linear", legacy=True).round(torch.ones(1), "up"), "nearest only"),
    ],
)  # fmt: skip
def test_impossible_formats_say_what_is_possible(build, message):
    with pytest.raises(FormatError, match=message):
        build()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, dtype=torch.float64), r"x\.float\(\) would round"),
        (torch.ones(3, dtype=torch.int64), "float32, bfloat16, float16"),
        ([1.0, 2.0], "torch.Tensor"),
        (torch.ones(3).to_sparse(), "to_dense"),
    ],
)
def test_wrong_inputs(x, message):
    with pytest.raises(InputError, match=message):
        E4M3.to_codes(x)


def test_wrong_codes_out_and_random_words():
    x = torch.ones(3)
    with pytest.raises(InputError, match="uint8"):
        E4M3.from_codes(torch.ones(3, dtype=torch.int32))
    with pytest.raises(InputError, match=r"out must be torch.uint8, \(3,\) on cpu"):
        E4M3.to_codes(x, out=torch.empty(4, dtype=torch.uint8))
    with pytest.raises(InputError, match="out must be"):
        E4M3.round(x, out=torch.empty(3, dtype=torch.float16))
    with pytest.raises(FormatError, match="needs rng=Stream"):
        E4M3.round(x, "stochastic")
    with pytest.raises(FormatError, match="stochastic' only"):
        E4M3.round(x, "nearest", Stream(1))
    with pytest.raises(InputError, match="must be uint32"):
        E4M3.round(x, "stochastic", torch.ones(3, dtype=torch.int64))
    with pytest.raises(FormatError, match="nearest, away, zero, up, down, stochastic"):
        E4M3.round(x, "sideways")


def test_streams_refuse_numbers_that_do_not_fit():
    with pytest.raises(ValueError, match="seed must be in"):
        Stream(-1)
    with pytest.raises(ValueError, match="rank must be in"):
        Stream(1, rank=1 << 32)


def test_everything_raised_on_purpose_is_a_thinwire_error():
    for name in ("FormatError", "InputError", "MissingDependencyError", "UnknownFormatError"):
        assert issubclass(getattr(thinwire, name), thinwire.ThinwireError)
