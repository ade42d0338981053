"""A codec and a format as a user may write them, for the checks of programs."""

from dataclasses import dataclass

import torch

from thinwire.codecs import Block, Codec
from thinwire.codecs.base import section
from thinwire.formats import FORMATS, Table


@dataclass(frozen=True)
class Steps(Codec):
    """Numbers as whole steps of a fixed size, in 16 bits, with a name that does not say the size."""

    step: float = 2.0**-8

    @property
    def name(self):
        return "steps"

    @property
    def nonfinite(self):
        return "NaN and infinities become anything."

    @property
    def grain(self):
        return 1

    def _sections(self, numel):
        return (section("codes", "int16", 16, numel),)

    def _encode(self, x, wire, rng, residual, shared):
        del rng, shared
        u = x.float() if residual is None else residual.add_(x)
        codes = (u / self.step).round().clamp(-32767, 32767).short()
        self._codes(wire, x.shape[1]).copy_(codes)
        if residual is not None:
            residual.sub_(codes.float() * self.step)

    def _decode(self, wire, out, weight, *, add):
        values = self._codes(wire, out.shape[1]).float() * self.step * weight
        out.add_(values) if add else out.copy_(values)

    def _codes(self, wire, numel):
        return wire.view(torch.int16)[:, :numel]


def mine(spread=1.0):
    """The numbers of nf4, or others, under a label of one's own."""
    return Table([spread * each for each in FORMATS["nf4"].numbers], label="mine")


def block(spread=1.0, feedback=""):
    return Block(mine(spread), 64, feedback=feedback)
