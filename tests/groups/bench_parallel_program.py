"""Arms of the bench of parallelism on real ranks, against one device: `bench_parallel_program.py 2`."""

import copy
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from start_program import join, report, start
from torch.nn import functional

from thinwire.bench import parallel_kinds as kinds
from thinwire.bench import parallel_layers as layers
from thinwire.bench import parallel_worker as worker
from thinwire.bench.parallel_all import KINDS

CPU = torch.device("cpu")
SIZES = layers.Sizes(192, 64, 4)
LANGUAGE = kinds.Language(300, 6, 4, 96)
ERRORS = {
    "bf16": 0.03,
    "bf16:int8": 0.05,
    "bf16:int4": 0.4,
    "int8": 0.05,
    "int4": 0.4,
    "int8+int4": 0.4,
    "int8+int8+int4": 0.4,
}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def small():
    """Sizes that take no time."""
    layers.sizes = lambda _: SIZES
    kinds.language = lambda _: LANGUAGE


def alone(net, x, y=None):
    """The gradients of one device."""
    net.zero_grad()
    out = net(x)
    if y is None:
        out.square().mean().backward()
    else:
        functional.cross_entropy(out.flatten(0, -2), y.flatten()).backward()
    return {name: each.grad.clone() for name, each in net.named_parameters()}


def part(whole, rank, world, dim=0):
    return whole.chunk(world, dim)[rank]


def same(mine, wanted, what):
    assert len(mine) == len(wanted), (what, len(mine), len(wanted))
    for i, (one, other) in enumerate(zip(mine, wanted, strict=True)):
        assert one.shape == other.shape, (what, i, one.shape, other.shape)
        assert torch.allclose(one, other, **CLOSE), (what, i, (one - other).abs().max())


def tensor(rank, world):
    """Both kinds of tensor parallelism: the first layer is split by columns, the second by rows."""
    whole = alone(layers.stack(CPU, "fp32"), layers.rows(CPU, "fp32", 1))
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    wanted = []
    for name, each in whole.items():
        dim = dims.get(name.split(".", 1)[1])
        wanted.append(each if dim is None else part(each, rank, world, dim))
    same(layers.tensor("fp32", CPU).gradients(), wanted, "tensor")
    # torch's means are those of each rank's own rows: the sum over ranks is the world times larger
    mine = layers.sequence("fp32", CPU).gradients()
    same([each / world for each in mine], wanted, "sequence")


def pipeline(rank, world):
    nets = [layers.stack(CPU, "fp32", 2) for _ in range(world)]
    whole = alone(torch.nn.Sequential(*nets), layers.rows(CPU, "fp32", 1))
    wanted = [each for name, each in whole.items() if name.startswith(f"{rank}.")]
    same(layers.pipeline("fp32", CPU).gradients(), wanted, "pipeline")


def expert(rank, world):
    """Every rank's r-th part goes to rank r, which sums what they all lost."""
    wanted = None
    for other in range(world):
        net = layers.stack(CPU, "fp32", 1)
        one = alone(net, part(layers.rows(CPU, "fp32", 1 + other), rank, world)).values()
        wanted = [(each + more) for each, more in zip(wanted, one, strict=True)] if wanted else list(one)
    same(layers.expert("fp32", CPU).gradients(), [each / world for each in wanted], "expert")


def sharded(rank, world):
    """The mean over the data of all ranks, which are different, of which each rank holds a part."""
    sums = None
    for other in range(world):
        one = alone(LANGUAGE.net(CPU), *LANGUAGE.data(CPU, 1 + other))
        sums = {name: (sums[name] if sums else 0) + each for name, each in one.items()}
    for kind, shards in (("fsdp", world), ("hsdp", world // 2)):
        if shards < 2:
            continue
        wanted = [part(each / world, rank % shards, shards) for each in sums.values()]
        same(KINDS[kind].build("fp32", CPU).gradients(), wanted, kind)


def methods(_, world):
    """What each method computes in, what it loses, what it says that it sends, and that a step is one."""
    for name, kind in KINDS.items():
        if world % kind.world or kind.alone or name == "sub-batches":  # see `spread`
            continue
        wanted = kind.build("fp32", CPU).gradients()
        for method in kind.methods:
            arm = kind.build(method, CPU)
            assert arm.method == method
            mine = arm.gradients()
            assert [each.data_ptr() for each in mine] != [each.data_ptr() for each in arm.gradients()]
            if method == kinds.COMPUTE:
                arm.step()
                continue
            error = kinds.relative_error(mine, wanted)
            coded = method not in ("fp32", "bf16")
            assert error <= ERRORS.get(method, 0.0), (name, method, error)
            assert error > 0 or method == "fp32", (name, method)
            sharded_ = name in ("fsdp", "hsdp")
            dtype = torch.bfloat16 if method.startswith("bf16") and not sharded_ else torch.float32
            assert {each.dtype for each in mine} == {dtype}, (name, method)
            says = coded and (sharded_ or name == "pipeline")
            assert (arm.sent_nbytes is not None) == says, (name, method)
            before = arm.sent_nbytes() if says else 0
            arm.step()
            assert not says or arm.sent_nbytes() > before, (name, method)
            if dtype == torch.float32:  # in bfloat16 such small steps leave most weights as they are
                pairs = zip(mine, arm.gradients(), strict=True)
                assert any(not torch.equal(one, other) for one, other in pairs), (name, method)


def spread(rank, world):
    """Networks that are split over ranks: in float32 they lose nothing, with codecs a little."""
    for name in ("stages" if world == 2 else "hybrid-stages", "sub-batches"):
        kind = KINDS[name]
        mine = kind.build("fp32", CPU).gradients()
        if kind.alone:  # two ranks have half of the layers each
            whole = kind.build(kinds.COMPUTE, CPU).gradients()
            same(mine, whole[-len(mine) :] if rank % 2 else whole[: len(mine)], name)
        error = kinds.relative_error(kind.build("int8", CPU).gradients(), mine)
        assert 0 < error < 0.2, (name, error)


def bytes_of_codecs(rank, world):
    """Weights are sent twice, gradients once, which take half as much in four bits."""
    sent = {}
    for method in ("int8+int8", "int8+int4"):
        arm = KINDS["fsdp"].build(method, CPU)
        arm.gradients()
        sent[method] = arm.sent_nbytes()
    assert 0.8 < sent["int8+int4"] / sent["int8+int8"] < 0.95, sent
    assert rank < world


def updates(rank, world):
    """A step of SGD goes along the gradient of this step alone."""
    net = layers.stack(CPU, "fp32", 1)
    before = copy.deepcopy(net)
    x = layers.rows(CPU, "fp32", 3, 5)
    assert x.shape == (5, 64)
    arm = layers.arm_of("fp32", net, lambda: net(x).square().mean().backward())
    wanted = alone(before, x)
    for times in (1, 2):
        arm.step()
        if times == 1:
            for name, each in net.named_parameters():
                start_at = dict(before.named_parameters())[name]
                assert torch.allclose(each, start_at - 1e-4 * wanted[name], rtol=0, atol=1e-9), name
    assert torch.equal(arm.gradients()[0], arm.gradients()[0]), "gradients of several passes are not added up"
    assert rank < world


def measured(rank, world):
    """Rows of all methods, with those of torch and of computing alone first, once."""
    cell = worker.measure("tensor", ["fp32", "compute only", "int8", "bf16"], 0.0, CPU)
    rows = cell.pop("rows")
    assert cell == {"kind": "tensor", "hosts": world, "alone": False}
    assert [each["method"] for each in rows] == ["fp32", "compute only", "int8", "bf16"]
    for each in rows:
        assert len(each["times_s"]) == worker.FEWEST_ROUNDS
        assert each["plain_times_s"] == rows[0]["times_s"]
        assert min(each["times_s"]) > 0
        assert each["sent_nbytes"] is None
    assert rows[1]["gradient_error"] is None
    assert rows[0]["gradient_error"] == 0.0
    assert 0 < rows[2]["gradient_error"] < 0.05, rows[2]
    worker.MOST_ARMS = {"cpu": 3 * world}  # room for one method beside torch and computing alone
    again = worker.measure("pipeline", ["int8", "int4"], 0.0, CPU)["rows"]
    assert [each["method"] for each in again] == ["fp32", "compute only", "int8", "int4"]
    assert all((each["sent_nbytes"] is not None) == each["method"].startswith("int") for each in again)
    assert again[2]["sent_nbytes"] > 1.5 * again[3]["sent_nbytes"] > 0
    assert again[2]["plain_times_s"] == again[0]["times_s"] != again[3]["plain_times_s"]
    assert rank < world


CHECKS = (tensor, pipeline, expert, sharded, methods, spread, bytes_of_codecs, updates, measured)


def main(rank, world, place):
    join(rank, world, place, 60)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    small()
    for check in CHECKS:
        wrong = ""
        try:
            check(rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=check.__name__, rank=rank, wrong=wrong)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main)))
