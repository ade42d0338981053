"""The codec benchmark measures everything it names, and says so in tables; how fast it is, is not tested."""

import itertools
import json
import math

import pytest
import torch

from thinwire import codecs, formats
from thinwire.bench import codec_peers
from thinwire.bench import codecs as bench
from thinwire.bench import formats as bench_formats
from thinwire.errors import InputError, UnknownCodecError
from thinwire.rounding import Stream

NUMEL = 1 << 14
SPECS = ["int4/128", "tree8/4096", "qsgd4/512", "onebit/64+ef", "topk/0.01+ef", "int8/tensor~shared", "bf16"]


@pytest.fixture(scope="module")
def record():
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # so that threads are compared on any machine
    try:
        result = bench.run("cpu", numel=NUMEL, names=SPECS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    return result


def test_every_operation_has_a_complete_row(record):
    rows = {(row["codec"], row["operation"]): row for row in record["rows"]}
    expected = {(spec, operation) for spec in SPECS for operation in bench.operations(codecs.get(spec))}
    assert rows.keys() == expected
    for (spec, operation), row in rows.items():
        assert row["numel"] == NUMEL
        assert row["bits"] == codecs.get(spec).bits_per_element(NUMEL)
        assert all(row[key] > 0 for key in ("seconds", "elements_per_s", "copy_s", "speed_ratio"))
        nbytes = bench.moved(codecs.get(spec), operation, NUMEL)
        assert math.isclose(row["bandwidth_ratio"], row["speed_ratio"] * nbytes / 8)


def test_formats_are_compared_with_a_copy_of_as_many_bytes():
    rows = bench_formats.measure(formats.get("float8_e4m3fn"), torch.randn(4096))
    assert {row["operation"] for row in rows} >= {"to_codes", "from_codes", "round"}
    for row in rows:
        nbytes = 8 if row["operation"].startswith("round") else 5  # a copy of a float32 moves 8
        assert math.isclose(row["bandwidth_ratio"], row["speed_ratio"] * nbytes / 8)


def test_feedback_is_measured_where_it_is_meant():
    for spec, wanted in (("int8/256", True), ("topk/0.01+ef", True), ("qsgd4/512", False)):
        assert (bench.FEEDBACK in bench.operations(codecs.get(spec))) == wanted


def test_bytes_moved_are_those_of_one_pass():
    codec = codecs.get("int8")
    wire = codec.nbytes(NUMEL) / NUMEL
    nbytes = [bench.moved(codec, each, NUMEL) for each in bench.OPERATIONS]
    assert nbytes == [4 + wire, 12 + wire, 4 + wire, 8 + wire, 9 * wire]


@pytest.mark.parametrize("operation", bench.OPERATIONS)
@pytest.mark.parametrize("spec", ["int8/256", "qsgd4/512"])
def test_what_is_timed_is_what_its_name_says(spec, operation):
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    codec = codecs.get(spec)
    rng = bench.STREAM if codec.needs_rng else None
    wire = codec.encode(x, rng)
    result = bench.prepare(codec, operation, x)()
    if operation in (bench.ENCODE, bench.FEEDBACK):  # the residual is zero at first
        assert torch.equal(result, wire)
    elif operation == bench.DECODE:
        assert torch.equal(result, codec.decode(wire, NUMEL))
    elif operation == bench.ADD:
        assert torch.equal(result, codec.decode_add(wire, torch.zeros(NUMEL), 0.5))
    else:
        assert torch.equal(result, codec.reduce_encode(torch.stack([wire] * 8), NUMEL, rng))


def test_steady_state_of_a_block_codec_allocates_nothing_that_grows(record):
    rows = {(row["codec"], row["operation"]): row for row in record["allocations"]}
    assert rows.keys() == {(row["codec"], row["operation"]) for row in record["rows"]}
    for operation in bench.operations(codecs.get("int4/128")):
        assert rows["int4/128", operation]["nbytes_per_element"] < 0.01
    assert rows["int4/128", bench.ENCODE]["tensors"] == 0
    assert rows["topk/0.01+ef", bench.ENCODE]["tensors"] > 0


def test_threads_and_selection_follow_the_choice(record):
    scaled = {(row["codec"], row["operation"]) for row in record["scaling"]}
    chosen = [spec for spec in bench.THREADED if spec in SPECS]
    pairs = itertools.product(chosen, (bench.ENCODE, bench.DECODE))
    assert scaled == {("float32 copy", "copy"), *pairs}
    assert [row["what"] for row in record["selection"]] == ["torch.topk(x.abs(), k)", "topk/0.01+ef encode"]
    assert record["sizes"] == []  # only with int8/256


def test_sizes_end_with_the_largest():
    sizes = bench.measure_sizes("cpu", 5000)
    assert [(row["numel"], row["operation"]) for row in sizes] == [
        (numel, operation) for numel in (1024, 5000) for operation in (bench.ENCODE, bench.DECODE)
    ]


def test_a_slow_operation_is_measured_on_fewer_elements(monkeypatch):
    monkeypatch.setattr(bench, "SMALLEST", 256)
    monkeypatch.setitem(bench.LONGEST_S, "cpu", 0.0)
    codec, x = codecs.get("int8/256"), torch.randn(NUMEL)
    row = bench.measure(codec, x)[0]
    assert row["numel"] == 256  # 16384, by quarters
    assert math.isclose(row["speed_ratio"], row["elements_per_s"] * row["copy_s"] / NUMEL)
    result = {"device": "cpu", "numel": NUMEL}
    assert bench._share(row, "speed_ratio", result).endswith("*")


def test_peers_are_measured_or_absent_for_a_reason(record):
    assert {row["library"] for row in record["peers"]} | set(record["absent"]) <= set(codec_peers.PEERS)
    assert all(record["absent"].values())
    for row in record["peers"]:
        assert row["codec"] in SPECS
        assert row["operation"] in bench.OPERATIONS
        assert row["seconds"] > 0
    assert {"torch.topk", "thinwire reference"} <= {row["library"] for row in record["peers"]}


def test_a_peer_that_fails_is_absent(monkeypatch):
    def broken(x):
        del x
        yield "int8", "encode", lambda x: lambda: x.no_such_method()

    monkeypatch.setattr(codec_peers, "PEERS", {"broken": broken})
    rows, absent = bench.measure_peers(torch.randn(NUMEL), ["int8"])
    assert rows == []
    assert "no_such_method" in absent["broken"]


def test_block_int8_in_plain_torch_is_near_the_codec():
    x = torch.randn(NUMEL)
    made = {operation: prepare(x)() for _, operation, prepare in codec_peers.eager_blocks(x)}
    assert {each.shape for each in (*made["encode"][:1], made["decode"])} == {(NUMEL // 256, 256)}
    decoded = codecs.get("int8/256").decode(codecs.get("int8/256").encode(x), NUMEL)
    assert torch.allclose(made["decode"].flatten(), decoded, atol=0.04)
    assert torch.allclose(made["decode_add"], made["decode"] / 2)
    assert all(torch.equal(*pair) for pair in zip(made["encode"], made["encode with feedback"], strict=True))


def test_what_the_reference_is_timed_at_is_what_its_name_says():
    x = torch.randn(NUMEL)
    for spec, operation, prepare in codec_peers.reference_blocks(x):
        codec, decoded = codecs.get(spec), prepare(x)()
        if operation == "decode":
            rng = Stream(seed=1) if codec.needs_rng else None
            assert torch.equal(decoded.flatten(), codec.decode(codec.encode(x, rng), NUMEL))
        else:
            assert decoded is None  # it writes into a wire


def test_peers_name_codecs_that_exist():
    for spec in codec_peers.NEAREST:
        assert spec not in codecs.CODECS
    known = {*codecs.CODECS, *codec_peers.NEAREST}
    x = torch.randn(NUMEL)
    for library in ("torch DDP hooks", "torch eager", "torch.compile", "torch.topk", "thinwire reference"):
        for spec, operation, _ in codec_peers.PEERS[library](x):
            assert spec in known
            assert operation in bench.OPERATIONS


def test_tables_are_text_and_hold_every_row(record):
    tables = bench.tables(json.loads(json.dumps(record)))  # as they are made from a saved record
    titles = [title for title, _, _ in tables]
    assert len(tables) == 5  # no sizes
    assert f"{NUMEL:,} elements" in titles[0]
    for _, header, rows in tables:
        assert rows
        assert all(len(row) == len(header) for row in rows)
        assert all(isinstance(cell, str) and cell for row in rows for cell in row)
    _, header, rows = tables[0]
    assert header == ("codec", "bits", *bench.OPERATIONS)
    assert [row[0] for row in rows] == SPECS
    numbers = [cell for row in rows for cell in row[1:] if cell != "-"]
    assert all(float(cell.rstrip("*")) > 0 for cell in numbers)


def test_a_gpu_record_is_shown_by_bandwidth(record):
    title, _, rows = bench.tables({**record, "device": "cuda"})[0]
    assert "of copy bandwidth" in title
    assert "GB/s" in title
    row = next(row for row in record["rows"] if row["codec"] == "bf16")
    shown = next(row for row in rows if row[0] == "bf16")
    assert shown[2] == bench._share(row, "bandwidth_ratio", record)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "gpu"}, InputError, "use cpu or cuda"),
        ({"names": ["int8/257"]}, UnknownCodecError, "power of two"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        bench.run(**arguments)


@pytest.mark.parametrize("module", [bench, bench_formats])
def test_sizes_grow_up_to_the_largest(module, monkeypatch):
    monkeypatch.setattr(
        module.timing, "seconds", lambda call, device: (call(), 1e-6 * (device.type == "cpu"))[1]
    )
    for largest, sizes in ((16_384, [1024, 16_384]), (20_000, [1024, 16_384, 20_000]), (500, [500])):
        rows = module.measure_sizes("cpu", largest)
        assert list(dict.fromkeys(row["numel"] for row in rows)) == sizes
        assert len(rows) == len(sizes) * (2 if module is bench else len(bench_formats.SIZE_FORMATS))
        assert {row["seconds"] for row in rows} == {1e-6}
