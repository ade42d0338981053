"""Plain DDP communication hooks, for frameworks that accept a state and a function.

    state, hook = thinwire.hooks.get("int8", net)            # rules see the names of the parameters
    model.register_comm_hook(state, hook)                    # DDP, and Accelerate after prepare
    DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)    # Lightning, on GPUs; else attach in a callback

The state is the handle that `thinwire.attach` returns: `state.stats()`, `state.state_dict()`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import policy
from thinwire.codecs import AnySpec
from thinwire.integrations.auto import BUDGET, Choice
from thinwire.integrations.auto_driver import AutoDriver
from thinwire.integrations.ddp import AUTO, hook, know
from thinwire.integrations.handle import Handle
from thinwire.policy import Policy

Hook = Callable[[object, Any], torch.futures.Future[torch.Tensor]]


def get(
    codec: AnySpec | Policy = "int8",
    model: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    seed: int = 0,
    double_buffer: bool = False,
    shadow: int = 0,
    error_budget: float = BUDGET,
) -> tuple[Handle, Hook]:
    """Return the state and the function of a hook; the arguments are those of `thinwire.attach`.

    Pass the network (before DDP wraps it) if rules look at names and roles. Without it tensors are numbered
    in the order in which DDP passes them. `group` is the DDP model's process group, if it has its own.

    >>> state, hook = get("int8/256")
    >>> state.policy.name
    'int8/256'
    """
    driver = AutoDriver(Choice(error_budget)) if codec == AUTO else None
    handle = Handle(policy.get("fp32" if driver else codec), group, seed, double_buffer, shadow, None, driver)
    if model is not None:
        know(handle, model)
    return handle, hook
