"""What a rank keeps of a network: its own parameters and buffers; everything else is let go."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs import get as get_codec
from thinwire.collectives import broadcast, irecv, isend
from thinwire.errors import InputError
from thinwire.parallel.placed_post import as_words, words
from thinwire.parallel.placed_values import Form


class Elsewhere(nn.Module):
    """Stands for a module that another rank has."""

    def __init__(self, rank: int | None, kind: str) -> None:
        super().__init__()
        self.rank, self.kind = rank, kind

    def extra_repr(self) -> str:
        return f"{self.kind} on rank {self.rank}"


def forms_of(module: nn.Module) -> dict[str, Form]:
    """Return the shape of everything in a network's state, by name, in its order."""
    forms = {}
    for name, x in module.state_dict().items():
        if not isinstance(x, Tensor):
            raise InputError(f"'{name}' in the state of this network is no tensor; Placed keeps tensors only")
        forms[name] = Form.of(x)
    return forms


def prune(module: nn.Module, owners: Mapping[str, int], rank: int) -> None:
    """Take out of a network what other ranks have, in place."""
    for name, owner in owners.items():
        if owner == rank:
            continue
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        part._parameters.pop(last, None)
        part._buffers.pop(last, None)
    _replace(module, "", owners, rank)


def _replace(module: nn.Module, prefix: str, owners: Mapping[str, int], rank: int) -> None:
    """Replace modules of which another rank has everything."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        path = f"{prefix}{name}."
        ranks = {owner for each, owner in owners.items() if each.startswith(path)}
        if ranks and rank not in ranks:
            where = ranks.pop() if len(ranks) == 1 else None
            module._modules[name] = Elsewhere(where, type(child).__name__)
        else:
            _replace(child, path, owners, rank)


def gathered(
    local: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    owners: Mapping[str, int],
    group: dist.ProcessGroup,
    to: int | None,
) -> dict[str, Tensor]:
    """Return the whole state on all ranks, or on rank `to` of the group; elsewhere nothing."""
    rank, ranks, exact = group.rank(), dist.get_process_group_ranks(group), get_codec("fp32")
    state: dict[str, Tensor] = {}
    device = next((x.device for x in local.values()), None)
    for name, form in forms.items():
        owner, mine = owners[name], local.get(name)
        here = mine.device if mine is not None else device or form.device
        room, x = words(Form(form.shape, form.dtype, here, False))
        if mine is not None:
            room = as_words(mine.detach()).clone()
            x = mine.detach()
        if to is None and group.size() > 1:
            broadcast(room, ranks[owner], exact, group, name=name)
        elif owner != to and rank == owner:
            isend(room, ranks[to or 0], exact, group, name=name).wait()
        elif owner != to and rank == to:
            irecv(room, ranks[owner], exact, group, name=name).wait()
        if to is None or rank == to:
            state[name] = x.clone()
    return state


def keep_local(owners: Mapping[str, int], rank: int) -> Any:
    """Return a hook that takes from a state what other ranks load."""
    elsewhere = [name for name, owner in owners.items() if owner != rank]

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        del module, rest
        for name in elsewhere:
            state.pop(f"{prefix}{name}", None)

    return hook


@torch.no_grad()
def resemble(skeleton: nn.Module, local: nn.Module) -> None:
    """Let the copy without storage require the gradients that this rank's parameters require."""
    own = dict(local.named_parameters(remove_duplicate=False))
    for name, each in skeleton.named_parameters(remove_duplicate=False):
        if name in own:
            each.requires_grad_(own[name].requires_grad)
