"""Trials of GPU programs: sound programs pass and each fault is found. Programs here are the reference."""

from types import SimpleNamespace

import pytest
import torch

from thinwire import kernels
from thinwire.codecs import Block
from thinwire.kernels import block_reference, onebit_reference, segment_reference, segment_selftest, selftest

CPU = torch.device("cpu")
CODECS = {"int8": Block("int8", 256), "int4": Block("int4", 64), "e4m3fn": Block("float8_e4m3fn", 128)}
SIGNS = [selftest.sample_signs(64, 100, scaled=scaled) for scaled in (False, True)]
DTYPES = (torch.float32, torch.bfloat16)


def is_aligned(x):
    return x.data_ptr() % 16 == 0


def spoiled(fault, wire, left):
    """Put a fault into what a program wrote."""
    if fault == "wire":
        wire[..., wire.shape[-1] // 2] ^= 1
    if fault == "beyond":
        wire[..., -1] ^= 1
    if fault == "residual" and left is not None:
        left.view(-1)[left.numel() // 2] += 0.5


class Programs:
    """What `segment_cuda` would offer, on a CPU, with a fault."""

    def __init__(self, fault=""):
        self.fault = fault

    def encoder(self, p, kind, segments):
        return p, segments, kind

    def signer(self, kind, segments):
        return None, segments, kind

    def decoder(self, p, kind, segments):
        return lambda *given: segment_reference.decode(p, *given), segments, kind

    def unsigner(self, kind, segments):
        return segment_reference.onebit_decode, segments, kind

    def reducer(self, p, kind, segments):
        def reduce(wires, actual, numbers, left):
            stride, count, limit, weight, draw = numbers
            assert limit == p.limit
            segment_reference.reduce(p, wires, actual, segments, weight, count, 4 * stride, draw, left)

        return reduce, kind

    def resigner(self, kind, segments):
        def reduce(wires, actual, numbers, left):
            stride, count, weight = numbers
            threshold = threshold_of(segments)
            segment_reference.onebit_reduce(
                wires, actual, segments, threshold, weight, count, 4 * stride, left
            )

        return reduce, kind

    def run_encode(self, ready, p, moved, actual, segments, draw, left):
        codec, _, (dtype, aligned, held, _) = ready
        assert (codec, moved.dtype, is_aligned(moved)) == (p, dtype, aligned)
        assert left is None if held is None else is_aligned(left) == held
        segment_reference.encode(p, moved.float(), actual, segments, draw, left)
        spoiled(self.fault, actual, left)

    def run_signs(self, ready, moved, actual, left):
        _, segments, (dtype, aligned, held, _) = ready
        assert (moved.dtype, is_aligned(moved), left is None) == (dtype, aligned, held is None)
        segment_reference.onebit_encode(moved.float(), actual, segments, threshold_of(segments), left)
        spoiled(self.fault, actual, left)

    def run_decode(self, ready, wires, out, weight, count, stride):
        decode, segments, (dtype, aligned, asked, _) = ready
        assert (out.dtype, is_aligned(out), count) == (dtype, aligned, asked)
        assert weight != 1
        assert count * stride == wires.numel()
        decode(wires, out, segments, weight, count, stride)
        if self.fault:
            out[0 if self.fault == "beyond" else out.numel() // 2] += 1

    def run_reduce(self, ready, wires, actual, left, numbers):
        reduce, (held, count, _) = ready
        assert (numbers[1], left is None) == (count, held is None)
        assert 4 * numbers[0] * count == wires.numel()
        reduce(wires, actual, numbers, left)
        spoiled(self.fault, actual, left)

    def _drawn(self, draw, actual):
        assert actual.dtype == torch.uint8
        return draw


def threshold_of(segments):
    return "sign" if segments.layouts[0].low_at < 0 else "zero"


def trials():
    """Every trial of segments with some kinds of vectors, and the faults that it must find."""
    p, other = (CODECS[each]._params for each in ("int8", "e4m3fn"))
    for held in (None, True, False):
        faults = ("wire", "beyond") if held is None else ("wire", "beyond", "residual")
        yield segment_selftest._try_encode, p, (torch.float32, held is None, held, CPU), faults
        yield segment_selftest._try_reduce, p, (held, 3, CPU), faults
        yield segment_selftest._try_signs, SIGNS[held is None], (torch.bfloat16, not held, held, CPU), faults
        yield segment_selftest._try_resigned, SIGNS[bool(held)], (held, 2, CPU), faults
    yield segment_selftest._try_encode, other, (torch.bfloat16, True, True, CPU), ("residual",)
    for aligned in (True, False):
        kind = (DTYPES[aligned], aligned, 2, CPU)
        yield segment_selftest._try_decode, p, kind, ("numbers", "beyond")
        yield segment_selftest._try_unsigned, SIGNS[aligned], kind, ("numbers", "beyond")


def test_trials_of_segments_find_every_fault(monkeypatch):
    for trial, codec, kind, faults in trials():
        monkeypatch.setattr(kernels, "segment_cuda", Programs(), raising=False)
        assert trial(codec, kind, 4), (trial, kind)
        for fault in faults:
            monkeypatch.setattr(kernels, "segment_cuda", Programs(fault))
            assert not trial(codec, kind, 4), (trial, kind, fault)


def test_segments_of_a_sample_have_gaps_and_start_at_odd_multiples():
    for step in (1, 4, 8):
        segments, x, wire = segment_selftest._sample(CODECS["int8"]._params, step)
        ends = [at + layout.numel for at, layout in zip(segments.starts, segments.layouts, strict=True)]
        assert all(at % step == 0 and at // step % 2 for at in segments.starts)
        assert all(ends[i] < segments.starts[i + 1] for i in range(len(ends) - 1))
        assert x.numel() > ends[-1]
        reached = [at + layout.nbytes for at, layout in zip(segments.wires, segments.layouts, strict=True)]
        assert segments.wires[0] > 0
        assert all(reached[i] < segments.wires[i + 1] for i in range(len(reached) - 1))
        assert wire.numel() > reached[-1]
        inside = torch.zeros(x.numel(), dtype=torch.bool)
        for start, end in zip(segments.starts, ends, strict=True):
            inside[start:end] = True
        assert not x[~inside].any()
        assert (x[inside] != 0).float().mean() > 0.99
        assert [layout.numel for layout in segments.layouts] == [3 * 1024 + 200, 70, 1, 1024]


def test_numbers_of_a_sample_have_another_scale_in_every_block():
    x = selftest.numbers(2, 3272, 256)
    assert x.shape == (2, 3272)
    tops = [float(part.abs().max()) for part in x[0].split(256)]
    for block, top in enumerate(tops[:-1]):
        assert 0.9 < top / 2.0 ** (block % 11) <= 1
    assert not torch.equal(x[0], x[1])
    assert x.unique().numel() > 3000


def test_layouts_of_samples_are_those_of_the_codec():
    for codec in CODECS.values():
        layout, own = selftest.sample_layout(codec._params, 1000), codec.layout(1000)
        assert (layout.numel, layout.scales_at, layout.extra_at) == (own.numel, own.scales_at, own.extra_at)
        assert layout.nbytes == layout.extra_at + 8  # one more number, and the tag
    plain, scaled = (selftest.sample_signs(64, 1000, each) for each in (False, True))
    assert (plain.low_at, plain.high_at, plain.nbytes) == (128, 128 + 64, 128 + 128 + 4)
    assert (scaled.low_at, scaled.high_at, scaled.nbytes) == (-1, 128, 128 + 64 + 4)


def block_programs(fault=""):
    """What `block_cuda` would offer, on a CPU."""

    def encode(p, x, wire, plan, key, residual):
        block_reference.encode(p, x.float(), wire, plan, key, residual)
        spoiled(fault, wire, residual)

    def reduce(p, wires, wire, plan, weight, key):
        block_reference.reduce(p, wires, wire, plan, weight, key)
        spoiled(fault, wire, None)

    def signs(x, wire, plan, residual):
        onebit_reference.encode(x.float(), wire, plan, "sign" if plan.low_at < 0 else "zero", residual)
        spoiled(fault, wire, residual)

    return SimpleNamespace(_encode=encode, _reduce=reduce, _onebit_encode=signs)


@pytest.mark.parametrize(("held", "rows_aligned"), [(None, True), (True, False), (False, True)])
def test_trials_of_blocks_find_every_fault(held, rows_aligned, monkeypatch):
    for dtype, codec in zip(DTYPES, CODECS.values(), strict=False):
        variant = selftest.Variant(CPU, dtype, rows_aligned, aligned=False, residual_aligned=held)
        for fault in ("", "wire", "beyond", "residual") if held is not None else ("", "wire", "beyond"):
            monkeypatch.setattr(kernels, "block_cuda", block_programs(fault), raising=False)
            assert selftest._try_encode(codec._params, variant) == (not fault)
            for threshold in ("sign", "zero"):
                assert selftest._try_signs(64, threshold, variant) == (not fault)
            if fault != "residual":
                assert selftest._try_reduce(codec._params, 3, CPU) == (not fault)


def test_a_variant_is_what_the_compiler_knows():
    room = torch.zeros(4, 40)
    held = torch.zeros(41)[1:]
    found = selftest._variant(room[:, :32], held)
    assert (found.rows_aligned, found.aligned, found.residual_aligned) == (True, True, False)
    found = selftest._variant(torch.zeros(4, 33).to(torch.bfloat16), None)
    assert (found.rows_aligned, found.residual_aligned, found.dtype) == (False, None, torch.bfloat16)
    assert selftest._variant(torch.zeros(34)[1:].view(1, 33), torch.zeros(33)).rows_aligned
    assert not selftest._variant(torch.zeros(34)[1:].view(1, 33), torch.zeros(33)).aligned
    assert selftest._variant(torch.zeros(1, 33), torch.zeros(33)).residual_aligned
    values = torch.randn(2, 17)
    for aligned in (True, False):
        there = selftest.placed(values, aligned, CPU)
        assert torch.equal(there, values)
        assert is_aligned(there) == aligned
    variant = selftest.Variant(CPU, torch.bfloat16, True, False, None)
    assert variant.rows(values).dtype == torch.bfloat16
    assert variant.residual(values) is None


@pytest.mark.parametrize("passes", [True, False])
def test_a_trial_runs_once_and_is_remembered(passes, monkeypatch, caplog):
    monkeypatch.setattr(selftest, "_KNOWN", {})
    monkeypatch.setattr(selftest, "_SIGNS", {})
    gpu, ran = SimpleNamespace(type="cuda"), []

    def trial():
        ran.append(1)
        return passes

    p, other = CODECS["int8"]._params, CODECS["int4"]._params
    for codec, key in ((p, "a"), (p, "a"), (p, "b"), (other, "a"), (None, "a"), (None, "a")):
        assert selftest.remembered(codec, key, "adding", trial, gpu) is passes
    assert len(ran) == 4
    assert len(caplog.records) == (0 if passes else 4)
    assert selftest.remembered(p, "c", "adding", trial, CPU)  # the interpreter needs none
    assert len(ran) == 4


def test_trials_of_segments_are_told_apart(monkeypatch):
    asked = []

    def remembered(p, key, what, trial, device):
        asked.append((p, key, what, trial.func, device))
        return True

    monkeypatch.setattr(selftest, "remembered", remembered)
    p, kind = CODECS["int8"]._params, (torch.float32, True, None, CPU)
    assert segment_selftest.encoding_holds(p, kind, 4)
    assert segment_selftest.decoding_holds(p, kind, 4)
    assert segment_selftest.reduction_holds(p, kind, 4)
    for signs in SIGNS:
        assert segment_selftest.signs_hold(signs, kind, 8)
        assert segment_selftest.unsigned_hold(signs, kind, 8)
        assert segment_selftest.signs_reduce(signs, kind, 8)
    assert len({(each[0], each[1]) for each in asked}) == 9
    assert {each[4] for each in asked} == {CPU}
    assert [each[3].__name__ for each in asked[:6]] == [
        "_try_encode", "_try_decode", "_try_reduce", "_try_signs", "_try_unsigned", "_try_resigned",
    ]  # fmt: skip
    assert asked[0][2] == "encoding segments of 8-bit codes in blocks of 256"
    assert asked[3][2] == "encoding segments of one bit"
