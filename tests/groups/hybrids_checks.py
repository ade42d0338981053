"""Checks of plans on 2, 3 and 4 ranks: the numbers of one device, bits of replicas, bytes, errors."""

import torch
from start_program import raises
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire import hybrids
from thinwire.errors import Disagreement, InputError
from thinwire.hybrids import JobPlan, PlacedAxis, ReplicateAxis, ShardAxis, TensorAxis

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32, 32, 4, 2, 8, 8
STEPS = 4
DEVICE = "cpu"  #: the program for GPUs replaces it
BOUND = 2e-5  #: float32 sums in another order, over a few steps of Adam
MEGATRON = {
    "blocks.*.attention.w[qkv]": "column",
    "blocks.*.attention.wo": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
SEQUENCE = {
    "words": {"style": "row", "output": "sequence"},
    "blocks.*.norm1": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.w[qkv]": "column",
    "blocks.*.attention.wo": {"style": "row", "output": "sequence"},
    "blocks.*.norm2": "sequence",
    "blocks.*.up": {"style": "column", "input": "sequence"},
    "blocks.*.down": {"style": "row", "output": "sequence"},
    "norm": "sequence",
    "head": {"style": "column", "input": "sequence", "output": "whole"},
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        parts = [
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        ]
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(seed=0, **options):
    torch.manual_seed(seed)
    return GPT(**options).to(DEVICE)


def batches(steps=STEPS):
    order = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (steps, BATCH, LENGTH + 1), generator=order).to(DEVICE)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(net, x, y):
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def train(net, part=lambda *xs: xs, clip=None, steps=STEPS):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(net, *part(x, y)).backward()
        if clip is not None:
            clip(0.5)
        optimizer.step()


def alone(clip=False, **options):
    """What one device gets."""
    net = made(**options)
    norm = (lambda most: nn.utils.clip_grad_norm_(net.parameters(), most)) if clip else None
    train(net, clip=norm)
    return net.state_dict()


def equal(state, wanted, bound=BOUND):
    assert state.keys() == wanted.keys()
    for name, each in wanted.items():
        error = (state[name] - each).abs().max().item()
        assert error <= bound, f"{name} differs by {error}"


def trained_by(plan, *, clip=False, seed=0, steps=STEPS, **options):
    """Train by a plan; the handle, and the whole weights."""
    net = made(seed=seed, **options)
    hybrid = hybrids.apply(net, plan)
    assert hybrid.model is net
    train(net, hybrids.part_of_batch, hybrid.clip_grad_norm_ if clip else None, steps)
    return hybrid, hybrid.state_dict()


def mesh_plan(codec="fp32", activations="fp32", modules=MEGATRON, **mesh):
    return JobPlan(
        mesh=mesh,
        replicate=ReplicateAxis(codec) if "replicate" in mesh else None,
        shard=ShardAxis(codec, modules=("blocks.*",)) if "shard" in mesh else None,
        tensor=TensorAxis(modules, activations, activations) if "tensor" in mesh else None,
    )


def replicas_and_tensor(rank):
    hybrid, state = trained_by(mesh_plan(replicate=2, tensor=2), clip=True, seed=rank)  # starts as rank 0
    assert (hybrid.part, hybrid.parts) == (rank // 2, 2)
    equal(state, alone(clip=True))
    assert all(type(each) is nn.Parameter for each in hybrid.model.parameters())
    return state.values()


def tensor_before_replicas(rank):
    """The order of the mesh decides who is whose neighbour, and no number."""
    hybrid, state = trained_by(mesh_plan(tensor=2, replicate=2))
    assert (hybrid.part, hybrid.place("tensor")) == (rank % 2, rank // 2)
    equal(state, alone())
    return state.values()


def sequences(rank):
    """Sequence parallelism: norms get the gradients of all ranks' parts of the sequence."""
    del rank
    _, state = trained_by(mesh_plan(modules=SEQUENCE, replicate=2, tensor=2))
    equal(state, alone())
    return state.values()


def tied_weights(rank):
    del rank
    plan = mesh_plan(
        modules={"words": "row", "head": {"style": "column", "output": "whole"}}, replicate=2, tensor=2
    )
    hybrid, state = trained_by(plan, tied=True)
    assert hybrid.model.head.weight is hybrid.model.words.weight
    equal(state, alone(tied=True))
    split_once = {"words": "row"}
    raises(
        InputError,
        "tensor.modules: words and head share a weight",
        hybrids.apply,
        made(tied=True),
        mesh_plan(modules=split_once, replicate=2, tensor=2),
    )
    return state.values()


def shards_of_replicas(rank):
    hybrid, state = trained_by(mesh_plan(replicate=2, shard=2), clip=True)
    assert (hybrid.part, hybrid.parts) == (rank, 4)
    assert all(isinstance(each, DTensor) for each in hybrid.model.parameters())
    equal(state, alone(clip=True))
    return state.values()


def shards_and_tensor(rank):
    del rank
    hybrid, state = trained_by(mesh_plan(shard=2, tensor=2), clip=True)
    assert hybrid.parts == 2
    equal(state, alone(clip=True))
    return state.values()


def shards_of_sequences(rank):
    del rank
    _, state = trained_by(mesh_plan(modules=SEQUENCE, shard=2, tensor=2))
    equal(state, alone())
    return state.values()


def two_places(**mesh):
    return JobPlan(
        mesh=mesh,
        replicate=ReplicateAxis("fp32") if "replicate" in mesh else None,
        placed=PlacedAxis({"words": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1, "head": 1}, micro_batches=2),
    )


def stages_of_replicas(rank):
    """Two stages with micro-batches, of which there are two replicas."""
    hybrid, state = trained_by(two_places(replicate=2, placed=2), clip=True)
    assert (hybrid.part, hybrid.place("placed")) == (rank // 2, rank % 2)
    own = {name.partition(".")[0] for name, _ in hybrid.model.named_parameters()}
    assert own == ({"norm", "head", "blocks"} if rank % 2 else {"words", "blocks"})
    assert hybrid.stats()["placed"]["messages"] > 0
    equal(state, alone(clip=True))
    hybrid.load_state_dict(made(seed=5).state_dict())
    equal(hybrid.state_dict(), made(seed=5).state_dict(), 0)
    return state.values()


def whole_states(rank):
    """A state of one device goes in and comes out as it was, and so does a state of this job."""
    del rank
    digests = []
    for mesh in ({"replicate": 2, "tensor": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}):
        hybrid = hybrids.apply(made(), mesh_plan(modules=SEQUENCE, **mesh))
        before = hybrid.state_dict()
        equal(before, made().state_dict(), 0)
        hybrid.load_state_dict(made(seed=5).state_dict())
        equal(hybrid.state_dict(), made(seed=5).state_dict(), 0)
        digests += hybrid.state_dict().values()
        raises(
            InputError,
            "has shape",
            hybrid.load_state_dict,
            {**before, "words.weight": torch.zeros(3, 3, device=DEVICE)},
        )
    return digests


def wide():
    """A network whose weights and activations are large enough to be encoded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(DEVICE)


def wide_losses(net, part=lambda x: x, steps=4):
    """Train; the losses."""
    losses, optimizer = [], torch.optim.SGD(net.parameters(), 0.5)
    data = torch.randn(steps, 256, 128, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    for x in data:
        optimizer.zero_grad()
        loss = (net(part(x)) - part(x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def codecs_on_all_axes(rank):
    """Every rank sends its half of the split weights by int8, and small ones in float32."""
    del rank
    modules, sent, weights = {"0": "column", "2": "row"}, {}, {}
    for codec in ("fp32", "int8/64"):
        net = wide()
        hybrid = hybrids.apply(net, mesh_plan(codec, codec, modules, replicate=2, tensor=2))
        wide_losses(net, hybrids.part_of_batch, 1)
        sent[codec] = hybrid.stats()["replicate"]["sent_nbytes"]
        wide_losses(net, hybrids.part_of_batch)
        weights[codec] = hybrid.state_dict()
    split = 2 * 128 * 512 // 2  # W / M elements: each of two ranks sends a half to the other, and a sum back
    small = 4 * (512 // 2 + 128)
    assert sent["fp32"] == 4 * split + small
    assert split < sent["int8/64"] - small < 1.08 * split  # a scale for 64 elements, and a tag
    net = wide()
    wide_losses(net, steps=1)
    wide_losses(net)
    exact, first = net.state_dict(), wide().state_dict()
    equal(weights["fp32"], exact)
    moved = torch.cat([(exact[name] - first[name]).flatten() for name in exact]).norm()
    far = torch.cat([(exact[name] - each).flatten() for name, each in weights["int8/64"].items()]).norm()
    assert 1e-4 < far / moved < 0.03, far / moved
    return weights["int8/64"].values()


def copies_stay_equal(rank):
    """What is not split has a copy on every rank along `tensor`, reduced in a group of its own."""
    del rank
    held = []
    for codec, activations in (
        ("qsgd4", "qsgd8/512"),
        ("int4", "int8"),
        ("onebit", "int4"),
        ("powersgd", "bf16"),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*wide(), nn.Linear(128, 128)).to(DEVICE)
        plan = mesh_plan(codec, activations, {"0": "column", "2": "row"}, replicate=2, tensor=2)
        hybrid = hybrids.apply(net, plan)
        wide_losses(net, hybrids.part_of_batch, 6)
        hybrid.check_copies()
        held += hybrid.state_dict().values()
    return held


def refusals(rank):
    """Errors come before anything is sent, or on all ranks."""
    net = made()
    before = [each.clone() for each in net.parameters()]

    def refused(text, plan, model=net, kind=InputError):
        raises(kind, text, hybrids.apply, model, plan)

    both = {"replicate": 2, "tensor": 2}
    refused("has 2 x 4 = 8 ranks, and this job has 4: start 8", mesh_plan(replicate=2, tensor=4))
    refused("did you mean 'blocks.*.up'?", mesh_plan(modules={"block.*.up": "column"}, **both))
    refused("there are: words, blocks", mesh_plan(modules={"nothing_like_it": "row"}, **both))
    refused(
        "name its layers, such as 'blocks.0.attention.wq'",
        mesh_plan(modules={"blocks.0.attention": "row"}, **both),
    )
    refused("'sequence' is for single layers", mesh_plan(modules={"blocks.0": "sequence"}, **both))
    refused(
        "with different values", mesh_plan(modules={"blocks.*.up": "column", "blocks.0.*": "row"}, **both)
    )
    uneven = nn.Sequential(nn.Linear(8, 7)).to(DEVICE)
    refused(
        "0 has 7 outputs, which 2 ranks cannot share equally",
        mesh_plan(modules={"0": "column"}, **both),
        uneven,
    )
    refused(
        "shard.modules: 'blokcs.*'",
        JobPlan(mesh={"shard": 4}, shard=ShardAxis("fp32", modules=("blokcs.*",))),
    )
    refused("is applied to a module, not to int", mesh_plan(**both), 3)
    mine = mesh_plan("int8" if rank == 1 else "int4", **both)
    refused("job plan", mine, kind=Disagreement)
    assert all(torch.equal(*each) for each in zip(before, net.parameters(), strict=True))
    hybrid, _ = trained_by(mesh_plan(**both), steps=1)
    raises(InputError, "a batch has 7 samples, which 2 parts", hybrid.part_of, torch.zeros(7, 2))
    refused(
        "parallel already",
        mesh_plan(shard=2, tensor=2),
        hybrids.apply(made(), mesh_plan(shard=2, tensor=2)).model,
    )
    return ()


def forgotten_norms(rank):
    """A layer between parts of a sequence without a style is found at the first step, on all ranks."""
    del rank
    modules = {name: style for name, style in SEQUENCE.items() if name != "blocks.*.norm1"}
    net = made()
    hybrid = hybrids.apply(net, mesh_plan(modules=modules, replicate=2, tensor=2))
    loss_of(net, *hybrids.part_of_batch(*batches()[0])).backward()
    raises(InputError, "the gradient of blocks.", hybrid.check_copies)
    good = hybrids.apply(made(), mesh_plan("int8", "int8/64", SEQUENCE, replicate=2, tensor=2))
    loss_of(good.model, *hybrids.part_of_batch(*batches()[0])).backward()
    good.check_copies()
    return ()


def three_axes(rank):
    """Replicas of shards of split layers."""
    hybrid, state = trained_by(mesh_plan(modules=SEQUENCE, replicate=2, shard=2, tensor=2), clip=True)
    assert (hybrid.part, hybrid.parts) == (rank // 2, 4)
    equal(state, alone(clip=True))
    return state.values()


def three_stages(rank):
    """Three ranks, one of which has hardly anything to do."""
    del rank
    plan = JobPlan(
        mesh={"placed": 3}, placed=PlacedAxis({"words": 0, "blocks": 1, "norm": 2, "head": 2}, "fp32", "fp32")
    )
    _, state = trained_by(plan, clip=True)
    equal(state, alone(clip=True))
    return state.values()


def three_replicas(rank):
    """The order of sums differs from one device's, and replicas hold the same bits."""
    del rank
    net = made()
    hybrids.apply(net, mesh_plan("int8/64", replicate=3))
    part = lambda *xs: hybrids.part_of_batch(*(each[:6] for each in xs))  # noqa: E731
    train(net, part)
    return net.state_dict().values()


CHECKS = {
    3: [three_stages, three_replicas],
    4: [replicas_and_tensor, shards_of_replicas, stages_of_replicas, codecs_on_all_axes, refusals],
    8: [three_axes],
}
MORE = {
    4: [
        tensor_before_replicas,
        sequences,
        tied_weights,
        shards_and_tensor,
        shards_of_sequences,
        whole_states,
        forgotten_norms,
        copies_stay_equal,
    ],
}
