"""What ranks of a pipeline do: every schedule of torch, with and without codecs, and compare.

    python pipeline_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong ("" if nothing), and a digest of what must be equal on all.
"""

import os
import sys
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from start_program import digest, join, raises, report, start
from torch import nn
from torch.distributed import pipelining

from thinwire import codecs
from thinwire.errors import Disagreement, InputError
from thinwire.integrations.pipeline import attach, is_stage
from thinwire.parallel import PipelineStage

TIMEOUT_S, SHORT_S = 60, 4
WIDTH, ROWS = 64, 32  # of a micro-batch: 2048 elements, two thirds of which are in the first blocks
CPU = torch.device("cpu")
SINGLE = "GPipe", "1F1B"
LOOPED = "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"
V_SHAPED = "ZBVZeroBubble", "DualPipeV"


class Layer(nn.Module):
    """A layer that keeps the size of what passes through it."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__()
        made = torch.Generator().manual_seed(index)
        weight = torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5
        self.weight = nn.Parameter(weight.to(dtype))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Elementwise(nn.Module):
    """A layer in which no element depends on another."""

    def __init__(self, index):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 + index / 8))

    def forward(self, x):
        return x * self.weight


class Several(nn.Module):
    """A layer with three inputs and outputs: hidden numbers, whole numbers and a few small numbers."""

    def __init__(self, index):
        super().__init__()
        self.layer, self.seen = Layer(index), []

    def forward(self, x, ids, small):
        self.seen.append((ids.clone(), small.detach().clone()))
        return self.layer(x) + ids.float().unsqueeze(1), ids + 1, small * 2


def indices(schedule, rank, world):
    """The stages of a rank."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * world - 1 - rank] if schedule in V_SHAPED else [rank, rank + world]


class Run:
    """One pipeline on this rank."""

    def __init__(
        self, schedule, rank, world, make=PipelineStage, layer=Layer, group=None, chunks=0, **options
    ):
        self.rank, self.world = rank, world
        self.chunks = chunks or 2 * world
        mine = indices(schedule, rank, world)
        self.last = world * len(mine) - 1
        self.modules = [layer(index) for index in mine]
        self.stages = [
            make(module, index, self.last + 1, CPU, group=group, **options)
            for module, index in zip(self.modules, mine, strict=True)
        ]
        self.has_last = self.last in mine
        self.schedule = self.scheduled(schedule)

    def scheduled(self, name, chunks=0, loss=nn.functional.mse_loss):
        made = pipelining.schedules.get_schedule_class(name)
        stages = self.stages[0] if name in SINGLE else self.stages
        return made(stages, chunks or self.chunks, loss_fn=loss)

    def step(self, seed=0, dtype=torch.float32, schedule=None):
        made = torch.Generator().manual_seed(100 + seed)
        x, y = (torch.randn(ROWS * self.chunks, WIDTH, generator=made).to(dtype) for _ in range(2))
        return self.feed((x,), y, schedule or self.schedule)

    def feed(self, inputs, target, schedule=None):
        schedule, losses = schedule or self.schedule, []
        given = inputs if self.rank == 0 else ()
        wanted = {"target": target, "losses": losses} if self.has_last else {}
        return schedule.step(*given, **wanted)

    def gradients(self):
        return [each.grad for module in self.modules for each in module.parameters()]

    def stats(self):
        return [stage.handle.stats() for stage in self.stages]


@torch.no_grad()
def grown(found, expected):
    """The relative error of all gradients of this rank together."""
    error = sum(
        float((one - other).double().square().sum()) for one, other in zip(found, expected, strict=True)
    )
    return (error / sum(float(each.double().square().sum()) for each in expected)) ** 0.5


def round_trip(spec):
    """The relative error of a codec on what looks like the activations here."""
    x = torch.randn(ROWS * WIDTH, generator=torch.Generator().manual_seed(9))
    codec = codecs.get(spec)
    return float((codec.decode(codec.encode(x), x.numel()) - x).norm() / x.norm())


def schedule_check(name):
    def check(rank, world):
        """In fp32 the bits of torch; with codecs an error that the codec explains, the same at every run."""
        torch_run = Run(name, rank, world, pipelining.PipelineStage)
        plain = Run(name, rank, world, codec=None)
        for run in (torch_run, plain):
            run.step(0)
            run.step(1)
        assert digest(plain.gradients()) == digest(torch_run.gradients()), "fp32"
        assert all(each["ratio"] == 1.0 for each in plain.stats())
        hops = 2 * (torch_run.last + 1)  # of activations and of gradients, each with an error of its own
        for spec, least in (("int8", 3.8), ("int4", 7.0)):
            runs = [Run(name, rank, world, codec=spec) for _ in range(2)]
            for run in runs:
                run.step(0)
                run.step(1)
            found = grown(runs[0].gradients(), torch_run.gradients())
            one = round_trip(spec)
            assert 0.1 * one < found < hops * one, (spec, found, one)
            assert digest(runs[0].gradients()) == digest(runs[1].gradients()), "not reproducible"
            check_counts(runs[0], least)

    return check


def check_counts(run, least):
    """Every hop between ranks was sent by a codec, and those inside a rank were not sent."""
    for stage, stats in zip(run.stages, run.stats(), strict=True):
        index, where = stage.stage_index, stage.stage_index_to_group_rank
        for name, to in (("forward", index + 1), ("backward", index - 1)):
            counts = stats["stages"][index][name]
            sent = 0 <= to <= run.last and where[to] != run.rank
            assert counts["messages"] == 2 * run.chunks * sent, (index, name, counts)
            assert not counts["as_is"], counts
            assert counts["plain_nbytes"] == counts["messages"] * 4 * ROWS * WIDTH
            assert not sent or counts["plain_nbytes"] > least * counts["sent_nbytes"], counts
            assert (counts["error"] is not None) == sent, counts


def one_direction(rank, world):
    """Only activations, or only gradients."""
    exact = Run("1F1B", rank, world, pipelining.PipelineStage)
    exact.step()
    for options, name in (({"backward": None}, "forward"), ({"forward": "fp32"}, "backward")):
        run = Run("1F1B", rank, world, codec="int4", **options)
        run.step()
        counts = run.stats()[0]["stages"][rank]
        other = "backward" if name == "forward" else "forward"
        assert counts[other]["sent_nbytes"] == counts[other]["plain_nbytes"], counts
        assert counts[name]["sent_nbytes"] < counts[name]["plain_nbytes"] / 7 or not counts[name]["messages"]
        if name == "backward" and rank == world - 1:  # nothing before the last gradient was rounded
            assert digest(run.gradients()) == digest(exact.gradients())


def sixteen_bits(rank, world):
    """bfloat16 and float16 activations: int8 halves their bytes, bf16 would not."""
    for dtype in (torch.bfloat16, torch.float16):

        def layer(index, dtype=dtype):
            return Layer(index, dtype)

        exact = Run("GPipe", rank, world, pipelining.PipelineStage, layer)
        run, same = (Run("GPipe", rank, world, layer=layer, codec=codec) for codec in ("int8", "bf16"))
        for each in (exact, run, same):
            each.step(0, dtype)
        found = grown(run.gradients(), exact.gradients())
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert 0 < found < 2 * world * (round_trip("int8") + unit), found
        counts = run.stats()[0]
        assert 1.9 < counts["ratio"] < 2.0, counts["ratio"]
        if dtype == torch.bfloat16:
            assert digest(same.gradients()) == digest(exact.gradients())
        assert same.stats()[0]["ratio"] == 1.0


def several_tensors(rank, world):
    """Whole numbers and small tensors arrive as they are; only the hidden numbers are encoded."""
    run = Run("1F1B", rank, world, layer=Several)
    rows = ROWS * run.chunks
    ids, small = torch.arange(rows), torch.full((rows, 2), 0.3)
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    run.schedule = run.scheduled("1F1B", loss=lambda out, y: nn.functional.mse_loss(out[0], y) + out[2].sum())
    run.feed((x, ids, small), torch.zeros(rows, WIDTH))
    seen = run.modules[0].seen[-run.chunks :]  # torch looks at shapes first
    assert torch.equal(torch.cat([each for each, _ in seen]), ids + rank)
    assert torch.equal(torch.cat([each for _, each in seen]), small * 2**rank)
    counts = run.stats()[0]["stages"][rank]["forward"]
    if rank < world - 1:
        assert counts["messages"] == 3 * run.chunks
        assert counts["as_is"] == {
            "not float32, bfloat16 or float16": run.chunks, "fewer than 1024 elements": run.chunks,
        }  # fmt: skip


def random_rounding(rank, world):
    """Draws depend on the seed, the step, the stage, the micro-batch and the direction only."""
    runs = [Run("Interleaved1F1B", rank, world, codec="qsgd4/512", seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        run.step()
    same, other = digest(runs[0].gradients()), digest(runs[2].gradients())
    assert digest(runs[1].gradients()) == same != other


def not_finite(rank, world):
    """NaN and infinities arrive, and spoil no more than their block."""
    run = Run("GPipe", rank, world, layer=Elementwise)
    x = torch.randn(ROWS * run.chunks, WIDTH, generator=torch.Generator().manual_seed(2))
    x[5, 3], x[ROWS + 1, 7] = float("nan"), float("inf")
    out = run.feed((x,), torch.zeros_like(x))
    if run.has_last:
        bad = ~out.isfinite()
        assert bad[5, 3]
        assert bad[ROWS + 1, 7]
        assert int(bad.sum()) == 2 * 256
        assert not bad.view(-1, 256)[::2].all(1).all()


def buffers_are_reused(rank, world):
    """After the first step nothing is allocated for messages."""
    run = Run("1F1B", rank, world)
    run.step()
    wire = run.stages[0]._thinwire
    before = {place: each.data_ptr() for part in wire.directions for place, each in part._wires.items()}
    nbytes = run.stats()[0]["buffers_nbytes"]
    assert 0 < nbytes <= 4 * run.chunks * codecs.get("int8").nbytes(ROWS * WIDTH)
    run.step(1)
    after = {place: each.data_ptr() for part in wire.directions for place, each in part._wires.items()}
    assert after == before
    assert run.stats()[0]["buffers_nbytes"] == nbytes


def evaluation(rank, world):
    """Evaluation between training steps, which makes torch prepare its stages again."""
    exact, run = Run("1F1B", rank, world, pipelining.PipelineStage), Run("1F1B", rank, world, codec="int8")
    plain = Run("1F1B", rank, world, codec=None)
    outs = []
    for each in (exact, run, plain):
        each.step()
        x = torch.randn(ROWS * each.chunks, WIDTH, generator=torch.Generator().manual_seed(4))
        wanted = {"target": torch.zeros_like(x)} if each.has_last else {}
        outs.append(each.schedule.eval(*((x,) if rank == 0 else ()), **wanted))
        each.step(1)
    if run.has_last:
        assert torch.equal(outs[0], outs[2])
        assert 0 < grown([outs[1]], [outs[0]]) < world * round_trip("int8")
    assert digest(plain.gradients()) == digest(exact.gradients())
    assert 0 < grown(run.gradients(), exact.gradients()) < 2 * world * round_trip("int8")


# What is attached to stages that exist


def attaching(rank, world):
    """`attach` gives the bits of `PipelineStage`; `detach` gives torch's; attaching again replaces."""
    name = "Interleaved1F1B"
    exact, ours = Run(name, rank, world, pipelining.PipelineStage), Run(name, rank, world)
    later = Run(name, rank, world, pipelining.PipelineStage)
    attach(later.stages, "int4")
    handle = attach(later.stages, "int8")
    assert is_stage(later.stages)
    assert is_stage(later.stages[0])
    assert not is_stage([])
    assert not is_stage(later.modules[0])
    for run in (exact, ours, later):
        run.step()
    assert digest(later.gradients()) == digest(ours.gradients()) != digest(exact.gradients())
    stats = handle.stats()
    assert stats["steps"] == 1
    assert list(stats["stages"]) == [rank, rank + world]
    assert stats["sent_nbytes"] == sum(each["sent_nbytes"] for each in ours.stats()) > 0
    handle.detach()
    handle.detach()
    for run in (exact, later):
        for module in run.modules:
            module.zero_grad()
        run.step(1)
    assert digest(later.gradients()) == digest(exact.gradients()), "detached"
    assert handle.stats() == stats, "a detached handle counts"
    attach(later.stages, "int8")  # torch has prepared these stages
    for run in (ours, later):
        for module in run.modules:
            module.zero_grad()
        run.step(2)
    assert digest(later.gradients()) == digest(ours.gradients()), "attached again"


def traced(rank, world):
    """Stages of a model that torch has cut."""
    points = {str(index): pipelining.SplitPoint.BEGINNING for index in range(1, world)}
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    found = {}
    for codec in (None, "int8"):
        whole = nn.Sequential(*(Elementwise(index) for index in range(world)))  # torch changes what it cuts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of itself
            pipe = pipelining.pipeline(whole, mb_args=(x[:16].repeat(2, 1),), split_spec=points)
        stage = pipe.build_stage(rank, CPU)
        handle = attach(stage, codec) if codec else None
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        given, wanted = ((x.repeat(2, 1),) if rank == 0 else ()), {"target": torch.zeros(2 * ROWS, WIDTH)}
        stage.submod.zero_grad()
        schedule.step(*given, **(wanted if rank == world - 1 else {}))
        found[codec] = [each.grad.clone() for each in stage.submod.parameters()]
    assert 0 < grown(found["int8"], found[None]) < 2 * world * round_trip("int8")
    assert handle.stats()["ratio"] > 3.8


def refusals(rank, world):
    del world
    stage = pipelining.PipelineStage(Layer(0), rank, dist.get_world_size(), CPU)
    raises(InputError, "attach takes a stage", attach, Layer(0), "int8")
    handle = attach(stage, "int8")
    raises(InputError, "delta=True", handle.batch, "a")
    raises(InputError, "delta=True", handle.forget)
    assert "int8/256" in repr(handle)


# Ranks that disagree


def told(run, *texts, kind=Disagreement):
    """All ranks raise the same error, before anything is sent."""
    said = raises(kind, texts, run.step)
    everyone = [None] * run.world
    dist.all_gather_object(everyone, said)
    assert len(set(everyone)) == 1, everyone


def other_codec(rank, world):
    """A rank with another codec, and one with another codec for gradients only."""
    run = Run("1F1B", rank, world, codec="int4" if rank == 1 else "int8")
    told(run, "stage 0 on rank 0", "stage 1 on rank 1: forward int4/128", "forward int8/256")
    run = Run("GPipe", rank, world, backward="bf16" if rank == 0 else "int8")
    told(run, "stage 0 on rank 0: forward int8/256, backward bf16", "backward int8/256")
    run = Run("GPipe", rank, world)
    run.step()  # the group stays usable


def other_shape(rank, world):
    """Shapes that users gave, and that do not fit together."""

    def example(width):
        return torch.zeros(ROWS, width, requires_grad=True)

    wide = {"input_args": example(WIDTH if rank != 1 else 2 * WIDTH), "output_args": example(WIDTH)}
    run = Run("1F1B", rank, world, **wide)
    told(
        run, "stage 0 on rank 0 sends (32, 64) float32", "stage 1 on rank 1, which expects (32, 128) float32"
    )


def half_attached(rank, world):
    """One stage of a rank is not attached: all ranks hear of it at once."""
    run = Run("Interleaved1F1B", rank, world, pipelining.PipelineStage)
    attach(run.stages[:1] if rank == 0 else run.stages, "int8")
    told(run, f"stage {world} on rank 0: nothing attached", "forward int8/256")


def not_attached(rank, world):
    """A rank without thinwire: all others say so when one has waited as long as the group does."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    run = Run("1F1B", rank, world, pipelining.PipelineStage, group=group)
    if rank:
        attach(run.stages, "int8")
    dist.barrier()  # the group's time is short
    if rank:
        raises(Disagreement, ["stage 0 on rank 0: nothing attached", "from the same step on"], run.step)
    else:
        raises(RuntimeError, "", run.step)


def broken_promise(rank, world):
    """A stage that computes another dtype than it said."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    example = {"input_args": torch.zeros(ROWS, WIDTH), "output_args": torch.zeros(ROWS, WIDTH)}
    run = Run("GPipe", rank, world, group=group, **example)
    kind, said = RuntimeError, ""
    if rank == 0:
        run.modules[0].to(torch.bfloat16)
        kind, said = InputError, ["stage 0 sends forward (32, 64) float32", "is (32, 64) bfloat16"]
    dist.barrier()  # the group's time is short
    raises(kind, said, run.step, 0, torch.bfloat16 if rank == 0 else torch.float32)


# Samples that return


def delta(rank, world):
    """What arrives for samples that return comes as near as float32 is; another batch does not disturb it."""
    exact = Run("1F1B", rank, world, pipelining.PipelineStage)
    wanted = [exact.step(seed) for seed in range(2)]
    run = Run("1F1B", rank, world, forward="int4", backward=None, delta=True)
    errors = []
    for _ in range(10):
        for seed in range(2):
            run.stages[0].handle.batch(f"batch {seed}")
            found = run.step(seed)
            if run.has_last:
                errors.append(grown([found], [wanted[seed]]))
    if run.has_last:
        assert errors[0] < world * 2.0**-8, errors  # the first visit is sent in bf16
        assert max(errors[-2:]) < 1e-6, errors
        assert errors[-1] < errors[-9] < errors[0], errors
    handle = run.stages[0].handle
    both = (rank > 0) + (rank < world - 1)
    assert handle.stats()["kept_nbytes"] == 2 * both * run.chunks * ROWS * WIDTH * 4
    counts = handle.stats()["stages"][rank]["forward"]
    assert counts["plain_nbytes"] > 5.5 * counts["sent_nbytes"] or rank == world - 1
    handle.forget("batch 0")
    assert handle.stats()["kept_nbytes"] == both * run.chunks * ROWS * WIDTH * 4
    check_delta_refusals(run, handle)


def check_delta_refusals(run, handle):
    raises(InputError, "handle.batch(name)", run.step)  # the name held for one step
    handle.batch(None)
    run.step(0)
    handle.batch("batch 1")
    longer = run.scheduled("1F1B", run.chunks // 2)
    raises(InputError, ["'batch 1'", "(32, 64)", "(64, 64)"], run.step, 1, torch.float32, longer)
    handle.forget()
    assert handle.stats()["kept_nbytes"] == 0


def delta_of_bad_numbers(rank, world):
    """A NaN arrives, and later visits of the same samples are finite again."""
    run = Run("GPipe", rank, world, layer=Elementwise, forward="int4", delta=True)
    x = torch.randn(ROWS * run.chunks, WIDTH, generator=torch.Generator().manual_seed(2))
    bad = x.clone()
    bad[40, 3] = float("nan")
    outs = []
    for given in (x, bad, *[x] * 8):
        run.stages[0].handle.batch(0)
        outs.append(run.feed((given,), torch.zeros_like(x)))
    if run.has_last:
        assert outs[1][40, 3].isnan()
        assert outs[1][50].isfinite().all()
        expected = x.clone()
        for index in range(world):
            expected *= 1.0 + index / 8
        assert outs[-1].isfinite().all()
        assert grown([outs[-1]], [expected]) < 1e-6


def delta_of_sixteen_bits(rank, world):
    """bfloat16 activations of samples that return arrive to the last bit or two."""

    def layer(index):
        return Layer(index, torch.bfloat16)

    exact = Run("1F1B", rank, world, pipelining.PipelineStage, layer)
    run = Run("1F1B", rank, world, layer=layer, forward="int4", backward=None, delta=True)
    wanted = exact.step(0, torch.bfloat16)
    for _ in range(4):
        run.stages[0].handle.batch(("epoch", 0))
        found = run.step(0, torch.bfloat16)
    if run.has_last:
        assert torch.equal(found, wanted)
    both = (rank > 0) + (rank < world - 1)
    assert run.stats()[0]["kept_nbytes"] == both * run.chunks * ROWS * WIDTH * 2


def other_batch(rank, world):
    """With THINWIRE_DEBUG=1, ranks that name different samples are told."""
    os.environ["THINWIRE_DEBUG"] = "1"
    run = Run("1F1B", rank, world, forward="int4", delta=True)
    run.stages[0].handle.batch("a")
    run.step()
    run.stages[0].handle.batch("b" if rank == 1 else "a")
    told(run, "stage 1 on rank 1", "batch 'a'", "batch 'b'")
    del os.environ["THINWIRE_DEBUG"]


CHECKS = {
    **{f"schedule {name}": schedule_check(name) for name in (*SINGLE, *LOOPED, *V_SHAPED)},
    **{each.__name__: each for each in (
        one_direction, sixteen_bits, several_tensors, random_rounding, not_finite, buffers_are_reused,
        evaluation, attaching, refusals, other_codec, other_shape, half_attached, delta,
        delta_of_bad_numbers, delta_of_sixteen_bits, other_batch, not_attached, broken_promise, traced,
    )},
}  # fmt: skip
SLOW = ["not_attached", "broken_promise", "traced"]


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, began = "", time.monotonic()
        try:
            CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
