# ruff: noqa: T201
"""What codecs cost a pipeline in loss: a small GPT in four stages on two ranks, with each setting from zero.

    python benchmarks/pipeline_loss.py [STEPS] > losses.md

The text is this project's own documents, byte by byte. The same 16 batches return in every epoch, so that
`delta=True` can be compared. docs/parallel/pipeline.md has the table.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

from thinwire.codecs.hadamard import Hadamard
from thinwire.parallel import PipelineStage
from thinwire.zoo.transformer import Block

RANKS, STAGES, CHUNKS = 2, 4, 4
WIDTH, HEADS, TIME, ROWS, VOCABULARY, BATCHES = 64, 4, 32, 16, 256, 16
SETTINGS = {
    "fp32": {"codec": None},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "int8 forward": {"codec": None, "forward": "int8"},
    "int8 backward": {"codec": None, "backward": "int8"},
    "int4": {"codec": "int4"},
    "int4 forward": {"codec": None, "forward": "int4"},
    "int4 backward": {"codec": None, "backward": "int4"},
    "int4 forward, rotated": {"codec": None, "forward": Hadamard("int4/128")},
    "int4 forward, delta": {"codec": None, "forward": "int4", "delta": True},
    "int4 forward with delta, int8 backward": {"codec": "int8", "forward": "int4", "delta": True},
    "int2 forward": {"codec": None, "forward": "int2/64"},
    "int2 forward, delta": {"codec": None, "forward": "int2/64", "delta": True},
}


class Stage(nn.Module):
    """One block; the first stage also embeds, the last also predicts."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.place = nn.Parameter(torch.randn(TIME, WIDTH) * 0.02) if index == 0 else None
        self.block = Block(WIDTH, HEADS, causal=True, gelu=nn.GELU(), eps=1e-5)
        self.block.dropout.p = 0.0
        last = index == STAGES - 1
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)) if last else None

    def forward(self, x):
        x = x if self.embed is None else self.embed(x) + self.place
        x = self.block(x)
        return x if self.head is None else self.head(x)


def batches():
    """Rows of text, and of the text one byte later."""
    folder = Path(__file__).parents[1]
    text = b"".join(path.read_bytes() for path in sorted((folder / "docs").glob("*.md")))
    data = torch.tensor(list(text))
    made = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - TIME - 1, (BATCHES, ROWS), generator=made)
    rows = data[starts.unsqueeze(2) + torch.arange(TIME + 1)]
    return [(each[:, :-1], each[:, 1:]) for each in rows]


def loss_of(logits, wanted):
    return cross_entropy(logits.flatten(0, 1), wanted.flatten())


def train(rank, setting, steps):
    """The loss of the last epoch, and the counts of this rank."""
    stages = [
        PipelineStage(Stage(index), index, STAGES, torch.device("cpu"), **setting)
        for index in (rank, rank + RANKS)
    ]
    schedule = ScheduleInterleaved1F1B(stages, CHUNKS, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), 1e-3) for stage in stages]
    data, losses = batches(), []
    for step in range(steps):
        losses.append(
            run(schedule, stages, data[step % BATCHES], step % BATCHES if setting.get("delta") else None)
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stats = [stage.handle.stats() for stage in stages]
    return mean(losses[-BATCHES:]), stats


def run(schedule, stages, batch, name):
    """One step; the loss on the last rank."""
    found = []
    if name is not None:
        for stage in stages:
            stage.handle.batch(name)
    given = () if stages[0].stage_index else batch[:1]
    schedule.step(*given, **({"target": batch[1], "losses": found} if stages[-1].is_last else {}))
    return mean([float(each.detach()) for each in found])


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else 0.0


def main(rank, port, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    if rank == RANKS - 1:
        print("| setting | loss | bytes forward | bytes backward | kept MB |")
        print("|---|---|---|---|---|")
    for name, setting in SETTINGS.items():
        trained, stats = train(rank, setting, steps)
        shares = [share(stats, direction) for direction in ("forward", "backward")]
        kept = sum(each["kept_nbytes"] for each in stats) / 1e6
        if rank == RANKS - 1:
            print(
                f"| {name} | {trained:.3f} | {shares[0]} | {shares[1]} | {kept:.1f} |",
                flush=True,
            )
    dist.destroy_process_group()


def share(stats, direction):
    """Bytes sent, as a share of what torch sends."""
    counts = [each[direction] for stage in stats for each in stage["stages"].values()]
    return f"{sum(each['sent_nbytes'] for each in counts) / sum(each['plain_nbytes'] for each in counts):.1%}"


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        free = found.getsockname()[1]
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 480
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(rank, free, count)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
