"""Memory of results: which ranges overlap, as NumPy says, and when a temporary is needed."""

import random

import numpy as np
import pytest
import torch

from thinwire.buffers import deliver, overlap, writable


def views(memory, rng):
    """A view of some memory, with any start, step and shape."""
    start, step = rng.randrange(20), rng.randrange(1, 5)
    part = memory[start : start + rng.randrange(1, 40) : step]
    if part.numel() % 2 == 0 and rng.random() < 0.5:
        part = part.view(2, -1).T
    return part


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_ranges_overlap_where_numpy_says_so(dtype):
    rng, memory = random.Random(0), torch.zeros(64, dtype=dtype)
    found = []
    for _ in range(400):
        one, other = views(memory, rng), views(memory, rng)
        expected = np.may_share_memory(one.numpy(), other.numpy())
        assert overlap(one, other) == expected, (one.stride(), other.stride())
        found.append(expected)
    assert 50 < sum(found) < 350


def test_tensors_of_another_place_or_without_elements_overlap_nothing():
    x = torch.zeros(8)
    assert overlap(x, x)
    assert not overlap(x, x[:0])
    assert not overlap(x[:0], x)
    assert not overlap(x, torch.zeros(8, device="meta"))
    assert not overlap(x[:4], x[4:])
    assert overlap(x.view(torch.uint8)[3:5], x[:1])


def test_a_temporary_is_made_only_where_one_is_needed():
    x, other = torch.zeros(16, requires_grad=True), torch.zeros(16)
    kept = writable(x, other, None, "words")
    assert kept.data_ptr() == x.data_ptr()
    assert not kept.requires_grad
    for result, inputs, align in ((x[::2], (), 1), (other, (other,), 1), (other[1:], (), 16)):
        made = writable(result.detach(), *inputs, align=align)
        assert made.data_ptr() != result.data_ptr()
        assert made.is_contiguous()
        assert made.shape == result.shape
    assert writable(other[1:], align=4).data_ptr() == other[1:].data_ptr()


def test_what_was_written_is_delivered_and_autograd_knows():
    wanted, made = torch.zeros(2, 3), torch.arange(6.0)
    before = wanted._version
    assert deliver(made, wanted) is wanted
    assert wanted.flatten().tolist() == made.tolist()
    assert wanted._version > before
    before = wanted._version
    deliver(wanted.detach(), wanted)
    assert wanted._version > before
