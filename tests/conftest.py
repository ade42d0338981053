"""Inputs on which rounding is most likely to go wrong, shared by all tests.

A test takes the fixture `probes`, a function from a format to a float32 tensor.
"""

import functools
import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# How long it takes to draw inputs says nothing on a busy machine.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

RANDOM_PATTERNS = 20_000
SAMPLED_CODES = 30_000
INFINITY = np.float32(np.inf)
SPECIAL_PATTERNS = np.array(
    [
        0x00000000, 0x00000001, 0x00000002, 0x00400000, 0x007FFFFF,  # zero and subnormals
        0x00800000, 0x00800001, 0x3F800000, 0x7F7FFFFE, 0x7F7FFFFF,  # smallest normals, one, largest
        0x7F800000, 0x7F800001, 0x7FA00000, 0x7FBFFFFF,  # infinity, signalling NaNs
        0x7FC00000, 0x7FC00001, 0x7FD55555, 0x7FFFFFFF,  # quiet NaNs
    ],
    dtype=np.uint32,
)  # fmt: skip


DEVICE = Path(__file__).parent / "device"
KERNELS = Path(__file__).parents[1] / "src" / "thinwire" / "kernels"


def pytest_configure():
    """Drop compiled loops that are older than any of their sources: Numba looks at a loop's own file only.

    And one thread for each of several workers: theirs keep each other waiting.
    """
    os.environ.pop("COLUMNS", None)  # pytest tells its workers how wide the terminal is
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    changed = max(path.stat().st_mtime for path in KERNELS.glob("*numba.py"))
    for path in KERNELS.glob("__pycache__/*.nb[ic]"):
        if path.stat().st_mtime < changed:
            path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items):
    """Triton's programs in its interpreter are of the rest: they change with kernels, and take a while."""
    for item in items:
        if DEVICE in item.path.parents:
            item.add_marker(pytest.mark.rest)


@pytest.fixture(scope="session")
def probes():
    return make_probes


@functools.cache
@np.errstate(over="ignore")
def make_probes(format):
    """Every value and midpoint of a format, the region where it overflows, special and random patterns.

    Each place comes with both signs and its two float32 neighbours. Formats of more than 16 bits have
    too many values: there it is a sample.
    """
    low, high = neighbours(format)
    middle = ((low.astype(np.float64) + high.astype(np.float64)) / 2).astype(np.float32)
    places = np.concatenate((low, high, middle, overflow_region(format)))
    places = np.concatenate((places, -places))
    places = np.concatenate((places, np.nextafter(places, -INFINITY), np.nextafter(places, INFINITY)))
    special = np.concatenate((SPECIAL_PATTERNS, SPECIAL_PATTERNS | np.uint32(1 << 31)))
    random = np.random.default_rng(2024).integers(0, 1 << 32, RANDOM_PATTERNS, dtype=np.uint32)
    patterns = np.unique(np.concatenate((places.view(np.uint32), special, random)))
    return torch.from_numpy(patterns.view(np.float32))


def neighbours(format):
    """Pairs of neighbouring finite values, as two arrays."""
    if format.bits <= 16:
        values = format.values().numpy()
        return values[:-1], values[1:]
    codes = np.random.default_rng(7).integers(0, (1 << format.bits) - 1, SAMPLED_CODES, dtype=np.uint32)
    first = format.from_codes(torch.from_numpy(codes)).numpy()
    second = format.from_codes(torch.from_numpy(codes + np.uint32(1))).numpy()
    finite = np.isfinite(first) & np.isfinite(second)
    return first[finite], second[finite]


def overflow_region(format):
    """From the largest value to four steps above it, and multiples of it."""
    largest = np.float32(format.max)
    low, high = neighbours(format)
    below = low[np.argmax(high)].item()
    step = float(largest) - below
    beyond = float(largest) + step * np.array([0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0])
    beyond = np.concatenate((beyond, float(largest) * np.array([1.25, 1.5, 2.0, 4.0])))
    return beyond.astype(np.float32)
