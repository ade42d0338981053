"""Named formats against ml_dtypes, and float16 against numpy.

Every code must decode to the same value, and nearest rounding must give the same code for every probe,
NaNs and infinities included.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from thinwire import formats

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # casts of NaN and of large values

ML_DTYPES = [
    "float8_e4m3fn",
    "float8_e4m3",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "bfloat16",
]


def dtype_of(name):
    return np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))


def code_type_of(name):
    return np.dtype(f"uint{8 * dtype_of(name).itemsize}")


def their_codes(name, x):
    return x.numpy().astype(dtype_of(name)).view(code_type_of(name))


def our_codes(name, x):
    return formats.get(name).to_codes(x).numpy()


@pytest.mark.parametrize("name", [*ML_DTYPES, "float16"])
def test_every_code_has_the_same_value(name):
    format = formats.get(name)
    codes = np.arange(1 << format.bits).astype(code_type_of(name))
    theirs = codes.view(dtype_of(name)).astype(np.float32)
    ours = format.from_codes(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(ours)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_nearest_gives_the_same_code(name, probes):
    x = probes(formats.get(name))
    np.testing.assert_array_equal(our_codes(name, x), their_codes(name, x))


def test_nearest_gives_the_same_code_as_numpys_float16(probes):
    """For NaN too, except that numpy keeps the payload; ours is the quiet NaN of the same sign."""
    x = probes(formats.get("float16"))
    number, nan = x[~x.isnan()], x[x.isnan()]
    np.testing.assert_array_equal(our_codes("float16", number), their_codes("float16", number))
    sign = their_codes("float16", nan) & 0x8000
    np.testing.assert_array_equal(our_codes("float16", nan), sign | 0x7E00)
