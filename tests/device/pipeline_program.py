"""What NCCL ranks that share a GPU do with pipelines: schedules and codecs, and compare with a CPU.

    python pipeline_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import sys

import torch
from nccl_program import digest
from ranks import join, run_all
from torch import nn
from torch.distributed import pipelining

from thinwire import codecs
from thinwire.errors import Disagreement
from thinwire.parallel import PipelineStage

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 120
WIDTH, ROWS = 128, 32
SCHEDULES = "GPipe", "1F1B", "Interleaved1F1B"


class Layer(nn.Module):
    def __init__(self, index, dtype=torch.float32):
        super().__init__()
        made = torch.Generator().manual_seed(index)
        weight = torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5
        self.weight = nn.Parameter(weight.to(dtype))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Run:
    """One pipeline on this rank, on the GPU."""

    def __init__(self, name, rank, world, make=PipelineStage, dtype=torch.float32, **options):
        self.rank, self.chunks, self.dtype = rank, 2 * world, dtype
        mine = [rank, rank + world] if name.startswith("Interleaved") else [rank]
        self.count = world * len(mine)
        self.modules = [Layer(index, dtype).to(DEVICE) for index in mine]
        self.stages = [
            make(module, index, self.count, DEVICE, **options)
            for module, index in zip(self.modules, mine, strict=True)
        ]
        self.has_last = self.count - 1 in mine
        made = pipelining.schedules.get_schedule_class(name)
        stages = self.stages if len(mine) > 1 else self.stages[0]
        self.schedule = made(stages, self.chunks, loss_fn=nn.functional.mse_loss)

    def data(self, seed):
        made = torch.Generator().manual_seed(100 + seed)
        return (torch.randn(ROWS * self.chunks, WIDTH, generator=made).to(self.dtype) for _ in range(2))

    def step(self, seed=0):
        x, y = (each.to(DEVICE) for each in self.data(seed))
        return self.feed(x, y)

    def feed(self, x, y):
        wanted = {"target": y} if self.has_last else {}
        return self.schedule.step(*((x,) if self.rank == 0 else ()), return_outputs=True, **wanted)

    def gradients(self):
        return [each.grad for module in self.modules for each in module.parameters()]

    def on_cpu(self, seed=0):
        """The gradients of this rank's stages, from one process on a CPU."""
        x, y = self.data(seed)
        layers = [Layer(index, self.dtype).float() for index in range(self.count)]
        out = x.float()
        for layer in layers:
            out = layer(out)
        nn.functional.mse_loss(out, y.float()).backward()
        return [layers[stage.stage_index].weight.grad for stage in self.stages]


def grown(found, expected):
    """The relative error of several tensors together, on the CPU."""
    pairs = [(one.detach().float().cpu(), other.detach().float().cpu()) for one, other in
             zip(found, expected, strict=True)]  # fmt: skip
    error = sum(float((one - other).square().sum()) for one, other in pairs)
    return (error / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def round_trip(spec):
    x, codec = torch.randn(ROWS * WIDTH, generator=torch.Generator().manual_seed(9)), codecs.get(spec)
    return float((codec.decode(codec.encode(x), x.numel()) - x).norm() / x.norm())


def schedules(rank, world):
    """In fp32 torch's own gradients; with codecs those of a CPU, up to the codec's error, at every run."""
    for name in SCHEDULES:
        exact, plain = Run(name, rank, world, pipelining.PipelineStage), Run(name, rank, world, codec=None)
        for run in (exact, plain):
            run.step()
        assert digest(plain.gradients()) == digest(exact.gradients()), name
        for spec, least in (("int8", 3.8), ("int4", 7.0)):
            runs = [Run(name, rank, world, codec=spec) for _ in range(2)]
            for run in runs:
                run.step()
            found, one = grown(runs[0].gradients(), runs[0].on_cpu()), round_trip(spec)
            assert 0.1 * one < found < 2 * runs[0].count * one + 0.01, (name, spec, found)  # TF32 products
            assert digest(runs[0].gradients()) == digest(runs[1].gradients()), (name, spec)
            stats = [stage.handle.stats() for stage in runs[0].stages]
            assert sum(each["plain_nbytes"] for each in stats) > least * sum(
                each["sent_nbytes"] for each in stats
            )


def sixteen_bits(rank, world):
    """bfloat16 activations."""
    run = Run("1F1B", rank, world, dtype=torch.bfloat16)
    run.step()
    assert grown(run.gradients(), run.on_cpu()) < 2 * world * (round_trip("int8") + 2.0**-7)
    assert 1.9 < run.stages[0].handle.stats()["ratio"] < 2.0


def many_steps(rank, world):
    """Wires that are used again carry what they should, step after step, without waits of the host."""
    exact, run = Run("1F1B", rank, world, pipelining.PipelineStage), Run("1F1B", rank, world)
    data = [[each.to(DEVICE) for each in run.data(seed)] for seed in range(12)]
    waits = {}
    for kind, one in (("torch", exact), ("ours", run)):
        for seed, (x, y) in enumerate(data):
            torch.cuda.set_sync_debug_mode("error" if seed > 3 else "default")
            try:
                one.feed(x, y)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                waits[kind] = str(error)
                break
            finally:
                torch.cuda.set_sync_debug_mode("default")
    if "torch" in waits:  # torch itself waits in this version, so a wait tells nothing
        return
    assert not waits, waits
    assert grown(run.gradients(), exact.gradients()) < 2 * world * round_trip("int8")


def delta(rank, world):
    """What arrives for samples that return comes as near as float32 is."""
    exact = Run("1F1B", rank, world, pipelining.PipelineStage)
    run = Run("1F1B", rank, world, forward="int4", backward=None, delta=True)
    wanted = exact.step()
    for _ in range(10):
        run.stages[0].handle.batch("a")
        found = run.step()
    if run.has_last:
        assert grown([found], [wanted]) < 1e-5
    both = (rank > 0) + (rank < world - 1)
    assert run.stages[0].handle.stats()["kept_nbytes"] == both * run.chunks * ROWS * WIDTH * 4


def disagree(rank, world):
    """A rank with another codec: all ranks are told, and go on."""
    run = Run("GPipe", rank, world, codec="int4" if rank == 1 else "int8")
    said = ""
    try:
        run.step()
    except Disagreement as error:
        said = str(error)
    assert "stage 1 on rank 1: forward int4/128" in said, said
    Run("GPipe", rank, world).step()


CHECKS = (schedules, sixteen_bits, many_steps, delta, disagree)


if __name__ == "__main__":
    run_all(CHECKS, sys.argv[1:], *join(TIMEOUT_S, device_id=DEVICE))
