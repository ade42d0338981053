"""LoCo (Xie et al. 2024, arXiv 2407.04480): gradients of 4 bits, repaired by an average of earlier errors.

LoCo is no optimizer: it changes how gradients are averaged, and leaves the update to another one. So here it
wraps any torch optimizer. A step

    h     = gradient + e                       on each rank
    mean  = mean over ranks of h, encoded in 4 bits
    e     = (1 - beta) * e + beta * (h - decoded h)
    every `reset_every` steps: e = 0
    the wrapped optimizer's step, with the mean as gradient

Error feedback adds all of the last error. Here a moving average of errors is added, which is steadier; it is
kept in 8 bits. With beta = 1 it is error feedback.

As published: gradients of 4 bits, their compensation before encoding by a moving average of earlier errors,
and 8 bits for it; its use with any optimizer. Ours: the form of the average, beta = 0.5, the reset every 512
steps, blocks of 128 elements, the same average for the part of the mean that a rank owns, an error that is
rounded to 8 bits before it enters the average, and vectors and small tensors in float32.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import codecs
from thinwire.channel import STORES, Channel
from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.outer.communicating import Communicating, check_number
from thinwire.outer.flat import Layout
from thinwire.outer.mean import Sending
from thinwire.outer.one_bit_adam import check_count
from thinwire.policy import SMALL, Policy

MEAN = "mean"
STORE = codecs.get(STORES["int8"])  #: of errors


class LoCo(Communicating):
    """Averages gradients by a few bits, then steps a torch optimizer, whose parameter groups it shares.

    optimizer: any optimizer of torch; schedulers may hold either of the two.
    codec: of gradients; "fp32" averages them exactly. Also a `thinwire.Policy`, for a codec by tensor.
    beta: the weight of the newest error in the average of errors.
    reset_every: steps after which the average begins again from zero.
    min_numel: elements under which a tensor is sent in float32, as are vectors; 0 encodes all.
    check_start: compare weights and gradients between ranks before the first step.

    After a step `p.grad` is the mean over ranks.
    """

    feedback = "int8"
    kept = None  # the state of parameters is that of the wrapped optimizer

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        codec: AnySpec | Policy = "int4/128",
        beta: float = 0.5,
        reset_every: int = 512,
        min_numel: int = SMALL,
        group: dist.ProcessGroup | None = None,
        check_start: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Communicating):
            raise InputError(
                "LoCo wraps an optimizer of torch's, such as torch.optim.AdamW(model.parameters()), not "
                f"{type(optimizer).__name__}"
            )
        check_number("beta", beta, low=0.0)
        if not 0 < beta <= 1:
            raise InputError(f"beta must be over 0 and at most 1, not {beta}")
        check_count("reset_every", reset_every)
        self.optimizer, self.beta, self.reset_every = optimizer, beta, reset_every
        sending = Sending(codec, "two_shot", group, min_numel, check_start)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults), sending)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def _check_options(self, group: Mapping[str, Any]) -> None:
        """The wrapped optimizer has checked its options."""

    def _options(self) -> str:
        return f"beta {self.beta}, reset_every {self.reset_every}, of {type(self.optimizer).__name__}"

    def _advance(self, layout: Layout) -> None:
        mean = self._flat(MEAN, layout)
        mean.write(self._gradients(layout))
        before = {codec: _copies(channel) for codec, channel in self.mean.channels.items()}
        self.mean.reduce(mean, layout, self.steps)
        for codec, channel in self.mean.channels.items():
            self._average(channel, before.get(codec, {}))
        if self.steps % self.reset_every == 0:
            for channel in self.mean.channels.values():
                channel.forget()
        for parameter, gradient in zip(layout.params, mean.tensors, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)
        self.optimizer.step()

    def _average(self, channel: Channel, errors: dict[str, Tensor]) -> None:
        """Replace the newest errors by the average of errors."""
        for slot, held in channel.residuals.items():
            newest = _decoded(held, channel.shapes[slot][-1])
            before = _decoded(errors[slot], newest.shape[-1]) if slot in errors else torch.zeros_like(newest)
            average = before.lerp_(newest, self.beta)
            if held.dtype == torch.float32:
                held.copy_(average)
            else:
                STORE.encode(average, out=held)

    def _load_torch_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state))  # torch would keep the caller's tensors
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def _copies(channel: Channel) -> dict[str, Tensor]:
    return {slot: held.clone() for slot, held in channel.residuals.items()}


def _decoded(held: Tensor, width: int) -> Tensor:
    return held if held.dtype == torch.float32 else STORE.decode(held, width)
