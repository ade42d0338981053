"""Reduce-scatter and all-gather of many tensors at once, for models whose parameters are sharded.

Every rank owns an equal part of each tensor (see `ShardBatch`). One kernel call encodes all tensors of a
codec, and all codecs share one exchange. A value is rounded once.
"""

from thinwire.schedules.batch import ShardBatch
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.exchange import AllGather, AllToAll, Exchanges


def reduce_scatter(run: BatchRun) -> Exchanges:
    """Send row r of the first vector to rank r; write the sum of the rows received into the second."""
    batch = run.batch
    assert isinstance(batch, ShardBatch)
    layout = batch.scattered
    sizes, stride = layout.sizes, layout.stride
    wires, received = (run.buffer(name, batch.world * stride) for name in ("wires", "received"))
    if not run.is_meta:
        run.prepare(layout.sent)
        run.encode(layout.sent, wires)
    yield run.asked("exchange", lambda: AllToAll(wires, sizes, received, stride=stride))
    if not run.is_meta:
        run.add_up(layout.own, received, stride)


def all_gather(run: BatchRun) -> Exchanges:
    """Send the first vector to all ranks; write every rank's, decoded, into a row of the second.

    A rank decodes its own row too, so that all ranks hold equal bits. The first vector may be this rank's row
    of the second: it is encoded before anything is written.
    """
    batch = run.batch
    assert isinstance(batch, ShardBatch)
    layout, rank = batch.gathered, batch.rank
    wires = run.buffer("wires", batch.world * layout.stride)

    def encode() -> None:
        run.encode(layout.sent, wires[rank * layout.stride :])

    fill = None if run.is_meta else encode
    yield run.asked("gather", lambda: AllGather(wires, layout.sizes, fill=fill, stride=layout.stride))
    if not run.is_meta:
        run.unpack(layout.own, wires)
