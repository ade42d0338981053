"""What NCCL ranks that share a GPU do with tensor and expert parallelism; see `nccl_program.py`.

    python tensor_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from ranks import join, run_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from thinwire import codecs, functional, parallel
from thinwire.parallel.wires import Wires

TIMEOUT_S = 120
DEVICE = torch.device("cuda", 0)
BATCH, LENGTH, WIDTH = 4, 64, 96
EXACT = Wires("fp32", "fp32", 0)
NEAR = 1e-5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def style(library, name, how, **options):
    if library is theirs:
        return getattr(theirs, name)(**options)
    found = getattr(library, name)(**options, **({} if isinstance(how, Wires) else how))
    found.wires = how if isinstance(how, Wires) else found.wires
    return found


def split(library, how, world, sequence, dtype=torch.float32):
    """The net, split by tensor parallelism, or by sequence parallelism too."""
    torch.manual_seed(0)
    net, mesh = Net().to(DEVICE, dtype), init_device_mesh("cuda", (world,))
    plan = {"up": style(library, "ColwiseParallel", how), "down": style(library, "RowwiseParallel", how)}
    if sequence:
        scattered = {"output_layouts": Shard(1), "use_local_output": False}
        plan = {
            "norm": style(library, "SequenceParallel", how),
            "up": style(library, "ColwiseParallel", how, input_layouts=Shard(1)),
            "down": style(library, "RowwiseParallel", how, **scattered),
        }
    net = parallelize_module(net, mesh, plan)
    if not sequence:
        return net
    layouts = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
    return parallelize_module(net, mesh, style(library, "PrepareModuleInput", how, **layouts))


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(net, x):
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = full(net(x))
    (y * random(*y.shape, seed=2).to(y.dtype)).sum().backward()
    return [y.detach(), full(x.grad), *(full(p.grad).clone() for p in net.parameters())]


def away(found, expected):
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


def alike(tensors, what):
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found.hexdigest())
    assert len(set(everyone)) == 1, f"{what}: ranks hold different bits"


def styles(rank, world):
    """torch's numbers without a codec, nearly so in float32, and within the error of a codec else."""
    del rank
    for sequence in (False, True):
        x = random(BATCH, LENGTH, WIDTH)
        expected = step(split(theirs, None, world, sequence), x)
        plain = step(split(parallel, {"forward": None, "backward": None}, world, sequence), x)
        assert all(map(torch.equal, plain, expected)), away(plain, expected)
        assert away(step(split(parallel, EXACT, world, sequence), x), expected) < NEAR
        for spec, low, high in (("int8", 1e-4, 0.02), ("int4", 1e-3, 0.4), ("qsgd8/512", 1e-4, 0.1)):
            found = step(
                split(parallel, {"forward": spec, "backward": spec, "min_numel": 0}, world, sequence), x
            )
            assert low < away(found, expected) < high, (spec, away(found, expected))
            alike(found, f"{spec} sequence={sequence}")


def sixteen_bits(rank, world):
    del rank
    for sequence in (False, True):
        x = random(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
        expected = step(split(theirs, None, world, sequence, torch.bfloat16), x)
        found = step(split(parallel, {"min_numel": 0}, world, sequence, torch.bfloat16), x)
        assert {each.dtype for each in found} == {torch.bfloat16}
        assert away(found, expected) < 0.05, away(found, expected)
        alike(found, "bf16")


def the_host_waits_for_nothing(rank, world):
    """A step that was made before has no synchronisation of the host with the GPU."""
    del rank
    for sequence in (False, True):
        net, x = split(parallel, {"min_numel": 0}, world, sequence), random(BATCH, LENGTH, WIDTH)
        x.requires_grad_()

        def one(net=net, x=x):
            y = net(x)
            (y.to_local() if isinstance(y, DTensor) else y).sum().backward()

        for _ in range(4):
            one()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            one()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def streams(rank, world):
    """On a stream of the user's, results are ready for the next kernel there."""
    del rank
    x = random(BATCH, LENGTH, WIDTH)
    net = split(parallel, {"min_numel": 0}, world, False)
    expected = step(net, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            found = step(net, x)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected)), away(found, expected)


def compiled(rank, world):
    """In one graph: the same up to what fused kernels round otherwise.

    Replicas hold the same bits if all ranks run the same kernels, as with `aot_eager`. Inductor times kernels
    and keeps the fastest, so ranks may add in different orders: there only the numbers are compared.
    """
    del rank
    for backend in ("aot_eager", "inductor"):
        for sequence in (False, True):
            how, x = {"min_numel": 0}, random(BATCH, LENGTH, WIDTH)
            expected = step(split(parallel, how, world, sequence), x)
            torch._dynamo.reset()
            net = torch.compile(split(parallel, how, world, sequence), fullgraph=True, backend=backend)
            found = step(net, x)
            assert away(found, expected) < 0.02, (backend, away(found, expected))
            if backend == "aot_eager":
                alike(found, "compiled")


def rows(rank, world):
    """Uneven splits: every row has the bits that the codec gives it on a CPU; gradients take the way back."""
    sends = [[(3 * one + 5 * other) % 7 for other in range(world)] for one in range(world)]
    mine, coming = sends[rank], [each[rank] for each in sends]
    for spec in ("int8", "int4/32", "mxfp4", "fp32", None):
        for dtype in (torch.float32, torch.bfloat16):
            given = [random(sum(sends[r]), 72, seed=r, dtype=dtype) for r in range(world)]
            exact = torch.cat([given[r].split(sends[r])[rank] for r in range(world)])
            x = given[rank].clone().requires_grad_()
            found = parallel.all_to_all(x, coming, mine, spec, backward=None)
            codec = codecs.get(spec or "fp32")
            expected = codec.decode(codec.encode(exact.cpu()), 72).to(dtype)
            assert torch.equal(found.cpu(), expected), (spec, dtype)
            found.sum().backward()
            assert torch.equal(x.grad, torch.ones_like(x)), (spec, dtype)


def functional_gradients(rank, world):
    x = random(2 * world, 6, seed=rank).requires_grad_()
    weight = random(world, 2 * world, 6, seed=7)
    (functional.all_gather(x, "fp32") * weight).sum().backward()
    assert torch.allclose(x.grad, world * weight[rank], rtol=1e-5)
    x.grad = None
    part = functional.reduce_scatter(x, "fp32", backward="int8")
    assert torch.allclose(
        part, sum(random(2 * world, 6, seed=r) for r in range(world)).chunk(world)[rank], rtol=1e-4, atol=1e-5
    )
    part.sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(x), rtol=1e-5)


CHECKS = (
    styles, sixteen_bits, the_host_waits_for_nothing, streams, compiled, rows, functional_gradients,
)  # fmt: skip


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    run_all(CHECKS, sys.argv[1:], *join(TIMEOUT_S))
