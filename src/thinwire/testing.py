"""Contracts of formats, codecs and schedules, as functions to call from your own tests.

    >>> from thinwire import codecs, formats, testing
    >>> testing.check_codec(codecs.get("int8/256"))

Each function raises an `AssertionError` that says which contract is broken.
"""

import copy
import itertools
import pickle
from typing import Any

import torch
from torch import Tensor

from thinwire import codecs, formats, schedules
from thinwire.channel import Channel
from thinwire.codecs import AnySpec, Codec
from thinwire.errors import WireError
from thinwire.formats import Format
from thinwire.rounding import Rounding, Stream
from thinwire.runtimes import local
from thinwire.runtimes.trace import trace
from thinwire.schedules import Schedule

NUMELS = (0, 1, 7, 64, 1000)
WORLDS = (2, 3, 4, 5, 8)
FEWER = 9  #: for most worlds and sizes, every ninth codec is enough
UNIT = 2.0**-23  #: relative spacing of float32


def check_format(format: str | Format) -> None:
    """Check that codes and values match, and that rounding goes to a neighbouring value."""
    resolved = formats.get(format)
    what = resolved.name
    _check_data(resolved, what)
    values = resolved.values()
    assert 1 < len(values) <= 1 << resolved.bits, f"{what} has {len(values)} values in {resolved.bits} bits"
    assert bool((values.diff() > 0).all()), f"{what}: values are not distinct and ascending"
    assert (resolved.min, resolved.max) == (values[0].item(), values[-1].item()), f"{what}: wrong min or max"
    codes = resolved.to_codes(values)
    assert torch.equal(resolved.from_codes(codes), values), f"{what}: a value's code does not lead back to it"
    low, high = (max(-1e30, min(values[i].item(), 1e30)) for i in (0, -1))
    x = (torch.linspace(0, 1, 2001, dtype=torch.float64) * (high - low) + low).float().clamp(low, high)
    x = torch.cat([x, values.clamp(-1e30, 1e30), torch.randn(500)]).sort().values.clamp(low, high)
    for mode in resolved.roundings:
        rng = Stream(1) if mode == Rounding.STOCHASTIC else None
        assert torch.equal(resolved.round(values, mode, rng), values), f"{what}, {mode}: a value is not kept"
        rounded = resolved.round(x, mode, rng)
        assert torch.equal(rounded, resolved.from_codes(resolved.to_codes(x, mode, rng))), (
            f"{what}, {mode}: round and to_codes differ"
        )
        place = torch.searchsorted(values, x).clamp(max=len(values) - 1)
        near = (rounded == values[place]) | (rounded == values[(place - 1).clamp(min=0)])
        assert bool(near.all()), f"{what}, {mode}: {x[~near][0]} does not go to a neighbour"
        if rng is None:
            assert bool((rounded.diff() >= 0).all()), f"{what}, {mode}: rounding is not monotonic"


def check_codec(codec: AnySpec) -> None:
    """Check wires (size, decoding, tag), residuals, values that are not finite, and sums over ranks."""
    resolved = codecs.get(codec)
    _check_data(resolved, resolved.spec)
    assert codecs.get(resolved.spec) == resolved, f"codecs.get('{resolved.spec}') returns another codec"
    for numel, rows in itertools.product(NUMELS, (1, 3)):
        _check_wire(resolved, numel, rows)
    _check_feedback(resolved)
    _check_numbers(resolved)
    _check_ranks(resolved)


def check_schedule(schedule: str | Schedule) -> None:
    """Check that replicas have equal bits, that float32 sums are right, and that bytes can be counted."""
    resolved = schedules.get(schedule)
    served = [each for each in codecs.CODECS.values() if not resolved.refuses(each)]
    assert served, f"{resolved.spec} serves no codec"
    for world, numel in itertools.product(WORLDS, (0, 3, 1003)):
        if world % (resolved.ranks_per_node or 1):
            continue
        ranks = [_numbers(numel, seed=rank) for rank in range(world)]
        for codec in served if (world, numel) == (4, 1003) else served[::FEWER]:
            results, _ = _reduced(ranks, codec, resolved)
            where = f"{resolved.spec}, {codec.spec}, {world} ranks, {numel} elements"
            assert all(_same(each, results[0]) for each in results), f"{where}: replicas differ"
            assert bool(results[0].isfinite().all()), f"{where}: not finite"
            if codec.spec == "fp32" and ":" not in resolved.spec:
                exact, size = sum(x.double() for x in ranks), sum(x.double().abs() for x in ranks)
                off = (results[0].double() - exact).abs()
                assert bool((off <= world * UNIT * size).all()), f"{where}: not the sum"
        if numel > 3 and world > 1:
            assert trace(numel, served[0], world, resolved).sent_nbytes > 0, f"{resolved.spec} sends nothing"


def _check_data(thing: Any, what: str) -> None:
    for again in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
        assert again == thing, f"{what} is not equal to itself after pickling or copying"
        assert hash(again) == hash(thing), f"{what} has another hash after pickling or copying"


def _check_wire(codec: Codec, numel: int, rows: int) -> None:
    what, x = f"{codec.spec} of {rows} x {numel}", _numbers(rows, numel)
    wire, sections = _encoded(codec, x), codec.sections(numel)
    assert wire.shape == (rows, codec.nbytes(numel)), (
        f"{what} has {wire.shape[-1]} bytes; nbytes says otherwise"
    )
    assert sum(section.nbytes for section in sections) == codec.nbytes(numel), (
        f"{what}: sections do not add up"
    )
    assert all(section.nbytes % 4 == 0 for section in sections), f"{what}: a section is not a multiple of 4"
    assert _encoded(codec, x.to("meta")).shape == wire.shape, f"{what}: another shape on meta"
    assert torch.equal(_encoded(codec, x), wire), f"{what}: two encodings differ"
    decoded = codec.decode(wire, numel)
    assert decoded.shape == x.shape, f"{what} decodes to {tuple(decoded.shape)}"
    assert bool(decoded.isfinite().all()), f"{what}: finite numbers do not stay finite"
    if not codec.needs_rng:
        alone = [_encoded(codec, row) for row in x]
        assert all(map(torch.equal, alone, wire)), f"{what}: a row's wire differs from that in a batch"
    total = x.clone()
    codec.decode_add(wire, total, 0.5)
    torch.testing.assert_close(total, x + 0.5 * decoded, rtol=1e-5, atol=1e-5, msg=f"{what}: decode_add")
    if not codec.tagged:
        return
    wire[:, -1] ^= 1
    for call in (lambda: codec.decode(wire, numel), lambda: codec.decode_add(wire, total)):
        try:
            call()
        except WireError:
            continue
        raise AssertionError(f"{what}: a wire with a wrong tag is not refused")


def _check_feedback(codec: Codec) -> None:
    x, before = _numbers(2, 1000), _numbers(2, 1000, seed=9) / 8
    residual = before.clone()
    wire = _encoded(codec, x, residual=residual)
    arrived = codec.decode(wire, 1000).double()
    size = arrived.abs().maximum(residual.double().abs())
    off = (arrived + residual.double() - x.double() - before.double()).abs()
    assert bool((off <= 4 * UNIT * size + UNIT).all()), f"{codec.spec}: the residual is not what was lost"


def _check_numbers(codec: Codec) -> None:
    zeros = codec.decode(_encoded(codec, torch.zeros(100)), 100)
    assert not codec.keeps_zeros or not bool(zeros.any()), f"{codec.spec}: zeros do not stay zero"
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = _numbers(100)
        x[7] = bad
        decoded = codec.decode(_encoded(codec, x), 100)
        hidden = bool(decoded.isfinite().all())
        assert not hidden, f"{codec.spec}: {bad} became a finite number"


def _check_ranks(codec: Codec) -> None:
    """Check that a sum of wires is the sum of decoded values, and that all schedules give equal replicas."""
    ranks = [_numbers(1003, seed=rank) for rank in range(3)]
    for schedule in schedules.SCHEDULES.values():
        if schedule.refuses(codec) or 3 % (schedule.ranks_per_node or 1):
            continue
        results, _ = _reduced(ranks, codec, schedule)
        what = f"{codec.spec} with {schedule.spec}"
        assert all(_same(each, results[0]) for each in results), f"{what}: replicas differ"
    if not codec.needs_rng and not codec.agreement(1):
        results, _ = _reduced(ranks, codec, schedules.get("one_shot"))
        shaped = codec.for_shape((1003,))
        exact = sum(shaped.decode(shaped.encode(x), 1003).double() for x in ranks)
        torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-5, msg=f"{codec.spec}: sum")


def _reduced(ranks: list[Tensor], codec: Codec, schedule: Schedule) -> tuple[list[Tensor], list[Channel]]:
    results, channels = [x.clone() for x in ranks], [Channel(codec) for _ in ranks]
    local.all_reduce(results, channels, "sum", schedule, rng=Stream(3))
    return results, channels


def _encoded(codec: Codec, x: Tensor, **options: Any) -> Tensor:
    return codec.encode(x, Stream(5) if codec.needs_rng else None, **options)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))
