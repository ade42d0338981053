"""A script under a plan, in one process: which module is meant, what torch's functions do, refusals."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.errors import CommError, Disagreement, InputError
from thinwire.hybrids import JobPlan, ReplicateAxis, TensorAxis, apply, notes, script
from thinwire.hybrids.script import Script, outermost

ONE = JobPlan(
    {"replicate": 1, "tensor": 1}, ReplicateAxis("fp32"), tensor=TensorAxis({"0": "column", "2": "row"})
)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def wrapped(monkeypatch):
    """What `Script.install` wraps is as before when the test ends."""
    for owner, name in (
        (torch.optim.Optimizer, "__init__"),
        (DataLoader, "__iter__"),
        (nn.utils, "clip_grad_norm_"),
        (nn.utils.clip_grad, "clip_grad_norm_"),
        (torch, "save"),
        (torch.amp.GradScaler, "_unscale_grads_"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_the_outermost_module_that_has_all_parameters_is_meant():
    inner = net()
    outer = nn.ModuleDict({"model": inner})
    assert outermost(inner.parameters()) is outer
    assert outermost(list(inner.parameters())[:1]) is outer
    with pytest.raises(InputError, match="belong to no single module"):
        outermost([*inner.parameters(), *nn.Linear(1, 1).parameters()])
    with pytest.raises(InputError, match="without parameters"):
        outermost([])
    beside = nn.Sequential(inner)
    with pytest.raises(InputError, match=r"several modules .*, none inside another"):
        outermost(inner.parameters())
    del beside
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    with pytest.raises(InputError, match=r"torch.compile does not go with --plan"):
        outermost(compiled.parameters())


@pytest.mark.usefixtures("group", "wrapped")
def test_training_is_that_of_the_script(tmp_path):
    x, y = torch.randn(6, 4), torch.randn(6, 2)

    def train(model):
        optimizer = torch.optim.AdamW(
            [{"params": [("first", model[0].weight), ("bias", model[0].bias)], "lr": 0.1},
             {"params": model[2].named_parameters()}], lr=0.01,
        )  # fmt: skip
        loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
        torch.manual_seed(7)
        for a, b in [*loader, *loader]:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        return norm, optimizer.state_dict(), torch.load(tmp_path / "model.pt")

    norm, optimizer, state = train(net())
    running = Script(ONE)
    running.install()
    model = net()
    mine, optimizer_of_mine, state_of_mine = train(model)
    assert running.hybrid.model is model
    assert running.steps == 4
    assert torch.allclose(mine, norm)
    for name, each in state.items():
        assert torch.allclose(state_of_mine[name], each, atol=1e-6), name
    assert [each["lr"] for each in optimizer_of_mine["param_groups"]] == [0.1, 0.01]
    for number, entries in optimizer["state"].items():
        for name, each in entries.items():
            assert torch.allclose(optimizer_of_mine["state"][number][name], each, atol=1e-6)
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]
    assert len(running.stats()) == 1


@pytest.mark.usefixtures("group", "wrapped")
def test_what_is_refused():
    with pytest.raises(InputError, match="a plan is applied to a module, not to str"):
        apply("model", ONE)
    with pytest.raises(InputError, match="has no storage"):
        apply(nn.Linear(1, 1, device="meta"), ONE)
    with pytest.raises(InputError, match="nowhere: it has no parameters"):
        apply(nn.ReLU(), ONE)
    plan = JobPlan({"replicate": 1}, ReplicateAxis("fp32"))
    running = Script(JobPlan({"tensor": 2}, tensor=ONE.tensor))
    running.install()
    with pytest.raises(InputError, match="GradScaler skips steps on ranks"):
        torch.amp.GradScaler("cpu")._unscale_grads_(None, None, None, False)
    running.plan = plan
    model = net()
    torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match="norm_type is inf"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf"))


def test_ranks_that_differ_are_told_apart(monkeypatch):
    monkeypatch.setattr(notes, "gathered", lambda _text: ["a", "a", "b"])
    with pytest.raises(Disagreement, match="batches: rank 0 has a, rank 2 has b"):
        notes.agree("a", "batches")
    with pytest.raises(CommError, match="there is no process group"):
        apply(net(), ONE)


@pytest.mark.usefixtures("group")
def test_a_file_is_complete_whatever_happens(tmp_path):
    """It is written beside its place first."""

    def save(thing, file):
        file.write_text("half")
        if thing is None:
            raise OSError

    path = tmp_path / "model.pt"
    script.saving(save)("one", path)
    assert path.read_text() == "half"
    path.write_text("whole")
    with pytest.raises(OSError):
        script.saving(save)(None, os.fspath(path))
    assert path.read_text() == "whole"
