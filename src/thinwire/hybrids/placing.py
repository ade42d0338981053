"""The `placed` axis: modules on different ranks, by `thinwire.parallel.Placed`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire import parallel
from thinwire.hybrids.job_plan import EXACT, PlacedAxis


class Placed(parallel.Placed):
    """A network in parts that takes the place of the module it was made of."""

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank loads of a whole state."""
        mine = self.state_dict().keys()
        return {name: each for name, each in state.items() if name in mine}


def place(model: nn.Module, mesh: DeviceMesh, axis: PlacedAxis) -> Placed:
    """Put modules on the ranks of a mesh of one dimension; calling the model stays as it is."""
    placed = Placed(
        model,
        axis.modules,
        group=mesh.get_group(),
        forward=None if axis.forward == EXACT else axis.forward,
        backward=None if axis.backward == EXACT else axis.backward,
        micro_batches=axis.micro_batches,
    )
    model._parameters, model._buffers, model._modules = placed._parameters, placed._buffers, placed._modules

    own = torch.get_rng_state()

    def forward(*inputs: Any, **named: Any) -> Any:
        """Draw from a stream of its own: loaders shuffle with torch's, as on one device."""
        nonlocal own
        placed.training, outside = model.training, torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            return placed.forward(*inputs, **named)
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(outside)

    model.forward = forward
    return placed
