"""The residuals of a tensor as one vector, however a schedule split the tensor.

The vector is what a rank would have to add to its next gradient so that nothing is lost. For the part that
the rank sent, that is the residual itself; for the part of the mean that it owns, it is the residual times
the number of ranks. So residuals can move to another codec, or to another number of ranks: the mean of these
vectors over ranks is what the averaged gradient still lacks.
"""

import math

import torch
from torch import Tensor

from thinwire import slots
from thinwire.channel import Channel
from thinwire.errors import InputError
from thinwire.schedules.rank_context import Sharding
from thinwire.schedules.traits import laid_out, taken_early

STAGES = (slots.SENT, slots.TAIL, slots.REDUCED, slots.ERROR)  #: whose residuals can be moved


def gradient_residual(
    channel: Channel, name: str, shape: tuple[int, ...], rank: int, world: int
) -> Tensor | None:
    """Return what a rank would add to its next gradient of a tensor; None if there is no residual."""
    residuals = channel.residuals_of(name)
    if not residuals:
        return None
    codec, turned = laid_out(channel.codec, shape)
    places = {slot: slots.stage_of(slot, name) for slot in residuals}
    for _, stage in places.values():
        if stage not in STAGES:
            raise InputError(
                f"the residual of {name} at '{stage}' cannot move to another schedule or world; "
                "use one_shot, two_shot or low_rank to move residuals"
            )
    numel = sum(residual.numel() for slot, residual in residuals.items() if places[slot][1] != slots.REDUCED)
    if numel != math.prod(shape):
        raise InputError(f"the residual of {name} has {numel} elements, but its shape is {shape}")
    whole = torch.zeros(numel, device=next(iter(residuals.values())).device)
    for slot, residual in residuals.items():
        start, stage = places[slot]
        sent = [residuals.get(slots.at_stage(slot, stage, part)) for part in (slots.SENT, slots.TAIL)]
        numels = [0 if each is None else each.numel() for each in sent]
        weight = 1.0
        if stage == slots.TAIL:
            start += numels[0]
        elif stage == slots.REDUCED:
            start += Sharding(codec, sum(numels), world).start(rank)
            shared = bool(codec.agreement(sum(numels)))
            weight = 1.0 / taken_early(codec, world, 1.0 / world, shared=shared)
        whole[start : start + residual.numel()] += weight * residual.reshape(-1)
    return whole.view(shape[::-1]).t().contiguous() if turned else whole.view(shape)
