"""Selection by the GPU's programs, and the wires of what is chosen: those of the definition, to the bit.

Without a GPU, Triton's interpreter runs the same programs on the CPU, with smaller samples and cells.
"""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import itertools
import math
import os

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import Stream, codecs
from thinwire.codecs import DctTopK, MSTopK, RandomK, Threshold, TopK
from thinwire.kernels import block_reference, select, select_cuda, select_long_triton

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
STREAM = Stream(seed=3, step=1, tensor="weights")
KINDS = ("gauss", "ties", "zeros", "constant", "subnormal", "huge", "heavy", "sparse", "nan", "sorted")
SPARSE = [
    TopK(0.05), TopK(0.05, "fp16"), TopK(0.3, "int8/256"), TopK(0.3, "int4/64~sr"), MSTopK(0.05),
    MSTopK(0.6, rounds=4), RandomK(0.05), RandomK(0.2, unbiased=True), Threshold(0.5, 0.1),
    Threshold(1.5, 0.5, "bf16"), DctTopK(64, 8), DctTopK(32, 32), DctTopK(10, 3, "fp16"),
]  # fmt: skip
every_sparse = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.spec)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        monkeypatch.setattr(select_cuda, "SAMPLE", 256)
        monkeypatch.setattr(select_cuda, "CELL", 1024)
        monkeypatch.setattr(select_cuda, "LARGE_CELL", 2048)
        monkeypatch.setattr(select_cuda, "LARGE", 9000)


@pytest.fixture
def programs(monkeypatch):
    """A function that runs another with the programs of a GPU, wherever tensors are."""

    def run(call):
        with monkeypatch.context() as patch:
            if not HAS_GPU:
                patch.setattr(select, "gpu", lambda _device, _numel: select_cuda)
            return call()

    return run


def data(kind, numel, seed=0):
    random = np.random.default_rng(seed)
    gauss = random.standard_normal(numel)
    made = {
        "gauss": gauss,
        "ties": np.round(gauss),
        "zeros": np.zeros(numel),
        "constant": np.full(numel, -0.3),
        "subnormal": gauss * 1e-42,
        "huge": np.clip(gauss * 1e38, -3e38, 3e38),
        "heavy": gauss * np.exp(4 * gauss[::-1]),
        "sparse": gauss * (random.random(numel) < 0.004),
        "nan": np.where(random.random(numel) < 0.02, np.nan, np.where(gauss > 2, -np.inf, gauss)),
        "sorted": np.sort(gauss),
    }[kind]
    return torch.from_numpy(made.astype(np.float32))


def assert_choices(x, k, threshold=0.3):
    """The largest, by bisection, by a threshold."""
    x = x.to(DEVICE)
    assert torch.equal(select_cuda.largest(x, k), select.largest_reference(x, k))
    for rounds in (30, 3) if HAS_GPU else (30,):
        chosen = select_cuda.bisected(x, k, rounds)
        assert torch.equal(chosen, select.bisected_reference(x, k, rounds))
    places, count = select_cuda.reaching(x, threshold, k)
    wanted, wanted_count = select.reaching_reference(x, threshold, k)
    assert torch.equal(places, wanted)
    assert torch.equal(count, wanted_count)


def some(numel):
    return sorted({1, 2 if numel > 1 else 1, math.ceil(numel / 100), math.ceil(numel / 3), numel})


SHORT = [(1, 1), (2, 1), (17, 3), (64, 40), (65, 1), (1000, 2), (4096, 1), (5000, 3), (8192, 1)]


@pytest.mark.parametrize(("numel", "rows"), SHORT if HAS_GPU else [(1, 1), (17, 3), (300, 1)])
def test_short_rows(numel, rows):
    for kind in KINDS:
        x = data(kind, rows * numel).view(rows, numel)
        for k in some(numel) if HAS_GPU else {1, math.ceil(numel / 3)}:
            assert_choices(x, k)


LONG = [(8193, 1), (20_000, 3), (77_881, 1), ((1 << 22) + 5, 2)]


@pytest.mark.parametrize(("numel", "rows"), LONG if HAS_GPU else [(5500, 1)])
@pytest.mark.parametrize("kind", KINDS if HAS_GPU else ("gauss", "sparse", "nan"))
def test_long_rows(kind, numel, rows, monkeypatch):
    """One element, one in a hundred, more than are worth slots, and nearly all."""
    if not HAS_GPU:
        monkeypatch.setattr(select_cuda, "SHORT", 1000)
    x = data(kind, rows * numel).view(rows, numel)
    for k in (1, numel // 100, numel // 20, numel // 3, numel - 1) if HAS_GPU else (numel // 100,):
        assert_choices(x, k)


def test_a_good_sample_leaves_little_to_read(monkeypatch):
    """What is above its edge fits into the slots, and three counts of those find the pattern."""
    made = []
    room = select_cuda._room
    monkeypatch.setattr(select_cuda, "_room", lambda *sizes: made.append(room(*sizes)) or made[-1])
    monkeypatch.setattr(select_cuda, "SHORT", 1000)
    numel = 1 << 22 if HAS_GPU else 8192
    select_cuda.largest(data("gauss", numel).view(1, -1).to(DEVICE), numel // 100)
    slots, counts, info, *_ = made[0]
    assert int(counts.max()) <= slots.numel() // counts.numel() <= numel // counts.numel() // 8
    assert numel // 100 <= int(counts.sum()) <= numel // 10
    last = select_long_triton.STATE + 4 * (select_long_triton.PASSES - 1)
    assert int(info[0, last]) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_cells_with_more_than_they_have_slots_for(rows, monkeypatch):
    """All large elements side by side."""
    monkeypatch.setattr(select_cuda, "SHORT", 1000)
    numel = (1 << 20) + 77 if HAS_GPU else 5500
    x = data("gauss", rows * numel).view(rows, numel)
    x[:, numel // 3 : numel // 3 + numel // 16] *= 1000
    assert_choices(x, numel // 50, 3.0)


@pytest.mark.parametrize("where", ["sampled", "elsewhere"])
def test_a_misleading_sample_changes_nothing(where, monkeypatch):
    """All large elements where the sample looks, and then none of them there."""
    monkeypatch.setattr(select_cuda, "SHORT", 1000)
    numel, sample = (1 << 20 if HAS_GPU else 5500), select_cuda.SAMPLE
    j = np.arange(sample, dtype=np.uint64)
    hashed = j * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
    inside = hashed * np.uint64(numel // sample) >> np.uint64(32)
    looked_at = torch.zeros(numel, dtype=torch.bool)
    looked_at[torch.from_numpy((j * np.uint64(numel) // np.uint64(sample) + inside).astype(np.int64))] = True
    assert int(looked_at.sum()) == sample
    x = data("gauss", numel) * torch.where(looked_at == (where == "sampled"), 1e4, 1.0)
    assert_choices(x.view(1, -1), numel // 200)


@pytest.mark.parametrize("bits", range(1, 32))
def test_places_are_packed_as_elsewhere(bits):
    for k in (1, 64, 65, 1100) if HAS_GPU else (65,):
        places = torch.randint(1 << bits, (2, k))
        wanted = block_reference.pack(places, bits)
        wire = torch.full((2, wanted.shape[1] + 4), 7, dtype=torch.uint8, device=DEVICE)
        select_cuda.pack(places.to(DEVICE), bits, wire)
        assert torch.equal(wire[:, :-4].cpu(), wanted)
        assert bool((wire[:, -4:] == 7).all())
        assert torch.equal(select_cuda.unpack(wire, k, bits).cpu(), places)


@every_sparse
def test_wires_are_those_of_the_cpu(codec, programs):
    """Also residuals, what arrives, and sums; but for NaN, which torch rounds differently on each device."""
    rng = STREAM if codec.needs_rng else None
    sizes = (1, 1000, 77_881) if HAS_GPU else (300,)
    for kind, numel in itertools.product(KINDS if HAS_GPU else ("gauss", "nan"), sizes):
        x, residual = data(kind, 2 * numel).view(2, -1), data("gauss", 2 * numel, 5).view(2, -1)
        total = torch.ones(2, numel)
        held, sums = residual.to(DEVICE, copy=True), total.to(DEVICE, copy=True)
        there = x.to(DEVICE)
        wire = programs(lambda: codec.encode(there, rng, residual=held))  # noqa: B023
        wanted = codec.encode(x, rng, residual=residual)
        decoded = codec.decode(wanted, numel)
        arrived = programs(lambda: codec.decode(wire, numel))  # noqa: B023
        if not decoded.isnan().any():
            assert torch.equal(wire.cpu(), wanted), (kind, numel)
            assert torch.equal(arrived.cpu().view(torch.int32), decoded.view(torch.int32))
        programs(lambda: codec.decode_add(wire, sums, 0.3))  # noqa: B023
        codec.decode_add(wanted, total, 0.3)
        for one, other in ((held, residual), (arrived, decoded), (sums, total)):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", [TopK(0.05), Threshold(0.5, 0.1), TopK(0.3, "int8/256")])
@pytest.mark.parametrize("add", [False, True])
def test_a_row_that_is_no_wire_becomes_nan(codec, add, programs):
    """Another tag, a place outside, places out of order, more of them than there is room for."""
    wire = codec.encode(data("gauss", 2000).view(2, 1000))
    parts = codec._parts(1000)
    first = parts["indices"].start
    broken = {"tag": slice(-1, None), "outside": slice(first, first + 4), "order": slice(first, first + 8)}
    if "count" in parts:
        broken["count"] = slice(1, 2)
    for kind, where in broken.items():
        bad = wire.clone().to(DEVICE)
        bad[0, where] = 0 if kind == "order" else bad[0, where] ^ 255 if kind == "tag" else 255
        out = torch.ones(2, 1000, device=DEVICE)
        programs(lambda: codec._decode(bad, out, 1.0, add=add))  # noqa: B023
        assert bool(out[0].isnan().all()), kind
        assert bool(out[1].isfinite().all()), kind


@needs_gpu
@pytest.mark.parametrize("codec", [DctTopK(48, 8)])
def test_tiles_with_places_that_are_none_become_nan(codec):
    wire = codec.encode(data("gauss", 2000).view(2, 1000).cuda())
    wire[0, :4] = 255
    for decoded in (codec.decode(wire, 1000), codec.decode_add(wire, torch.zeros(2, 1000, device="cuda"))):
        assert bool(decoded[0].isnan().all())
        assert bool(decoded[1].isfinite().all())


@needs_gpu
@pytest.mark.parametrize("spec", ["topk/0.01", "mstopk/0.01", "threshold/2~cap0.1", "topk/0.01~int8/256"])
@pytest.mark.parametrize("numel", [3000, 1_000_003])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait(spec, numel):
    codec = codecs.get(spec)
    x, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    for mode in ("default", "error"):  # the first time programs are compiled and tables are made
        torch.cuda.set_sync_debug_mode(mode)
        try:
            wire = codec.encode(x, residual=residual)
            out = codec.decode(wire, numel)
            codec.decode_add(wire, out, 0.5)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_very_long_row():
    numel = (1 << 24) + 3
    x = torch.randn(1, numel, device="cuda")
    for k in (numel // 1000, numel // 100, numel // 10):
        assert torch.equal(select_cuda.largest(x, k), select.largest_reference(x, k))
    for k in (numel // 100,):
        assert torch.equal(select_cuda.bisected(x, k, 30), select.bisected_reference(x, k, 30))
