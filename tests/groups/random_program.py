"""A rank that runs programs: lines of JSON on standard input, each answered by one on standard output.

A program is a list of calls. Ranks nap at places of their own, so that they are not in step. The answer holds
a digest of every result; every result is also compared with what it should be, on one of the ranks.
"""

import json
import sys
import time
import traceback
import zlib

import torch
import torch.distributed as dist
from start_program import digest, join, report

import thinwire
from thinwire import codecs
from thinwire.channel import Channel
from thinwire.rounding import Stream
from thinwire.runtimes import local
from thinwire.schedules import get as get_schedule

TIMEOUT_S = 8


def made(world, seed, numel, dtype):
    """Every rank's tensor, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return [torch.randn(numel, generator=generator).to(getattr(torch, dtype)) for _ in range(world)]


def seen(x, codec, rng=None):
    """What others see of a tensor."""
    parsed = codecs.get(codec)
    if not x.numel():
        return x
    return parsed.decode(parsed.encode(x.float(), rng), x.numel()).to(x.dtype)


class Player:
    """One rank at work on a program."""

    def __init__(self, rank, world, seed):
        self.rank, self.world, self.seed = rank, world, seed

    def inputs(self, call, number):
        return [
            made(self.world, f"{self.seed} {number} {i}", numel, call["dtype"])
            for i, numel in enumerate(call["numels"])
        ]

    def begin(self, call, number):
        """Make a call; its results and its work."""
        rows, rank = self.inputs(call, number), self.rank
        mine = [row[rank].clone() for row in rows]
        options = {"async_op": call["async_op"], "rng": Stream(self.seed, step=number)}
        codec = call["codec"]
        if call["op"] == "all_reduce":
            how = {"op": call["reduction"], "schedule": call["schedule"]}
            return mine, thinwire.all_reduce(mine, Channel(codec), **how, **options)
        if call["op"] == "broadcast":
            return mine[:1], thinwire.broadcast(mine[0], call["src"], codec, **options)
        if call["op"] == "all_gather":
            outs = [torch.zeros_like(mine[0]) for _ in range(self.world)]
            return outs, thinwire.all_gather(outs, mine[0], codec, **options)
        if call["op"] == "reduce_scatter":
            out = torch.zeros_like(mine[0])
            return [out], thinwire.reduce_scatter(out, [mine[0]] * self.world, codec, **options)
        assert call["op"] == "all_to_all"
        outs = [torch.zeros_like(mine[0]) for _ in range(self.world)]
        return outs, thinwire.all_to_all(outs, [mine[0]] * self.world, codec, **options)

    def expected(self, call, number):
        """What should be there, and how near; None where sums were rounded at random."""
        rows, codec = self.inputs(call, number), call["codec"]
        if call["op"] == "all_reduce":
            buckets = [[row[rank] for row in rows] for rank in range(self.world)]
            channels = [Channel(codec) for _ in range(self.world)]
            rng = Stream(self.seed, step=number)
            how = {"schedule": call["schedule"], "ranks_per_node": self.world}  # all ranks are on one machine
            local.all_reduce(buckets, channels, call["reduction"], rng=rng, **how)
            return buckets[0]
        if codecs.get(codec).needs_rng:
            return None
        if call["op"] == "broadcast":
            return [seen(rows[0][call["src"]], codec)]
        views = [seen(x, codec) for x in rows[0]]
        if call["op"] != "reduce_scatter":
            return views
        return [sum(view.double() for view in views).to(views[0].dtype)]

    def play(self, calls, naps):
        """Run the calls and return their results, waiting where the program says."""
        under_way, results = {}, []
        for number, (call, nap_s) in enumerate(zip(calls, naps, strict=True)):
            time.sleep(nap_s)
            result, work = self.begin(call, number)
            results.append(result)
            if work is not None:
                under_way[number] = work
            for each in call["waits"]:
                if each in under_way:
                    under_way.pop(each).wait()
        for work in under_way.values():
            work.wait()
        return results

    def compare(self, calls, results):
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            if number % self.world != self.rank:
                continue
            expected = self.expected(call, number)
            if expected is None:
                continue
            adds = call["op"] == "all_reduce" and get_schedule(call["real_schedule"]).adds
            near = adds or call["op"] == "reduce_scatter"
            assert len(result) == len(expected)
            for x, good, row in zip(result, expected, self.inputs(call, number) * len(result), strict=False):
                if near:
                    kinds = [x.dtype] + [torch.bfloat16] * call["codec"].startswith("bf16")
                    limit = 8 * max(torch.finfo(each).eps for each in kinds)
                    scale = max(each.double().norm().item() for each in (good, *row)) or 1.0
                    error = (x.double() - good.double()).norm() / scale
                    assert error <= limit, f"call {number}: relative error {error:.3g}"
                else:
                    assert digest([x]) == digest([good]), f"call {number} differs from local ranks"


def answer(rank, world, program):
    player = Player(rank, world, program["seed"])
    wrong, digests = "", []
    try:
        results = player.play(program["calls"], program["naps"][rank])
        same = [call["op"] in ("all_reduce", "broadcast", "all_gather") for call in program["calls"]]
        digests = [digest(result) if alike else "" for result, alike in zip(results, same, strict=True)]
        player.compare(program["calls"], results)
    except BaseException:  # noqa: BLE001
        wrong = traceback.format_exc(limit=-4)[-2500:]
    report(wrong=wrong, digests=digests)


def main(rank, world, place):
    join(rank, world, place, TIMEOUT_S)
    report(ready=rank)
    for line in sys.stdin:
        answer(rank, world, json.loads(line))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
