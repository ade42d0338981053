"""Messages of a placed network: values that ranks send each other, and gradients on their way back.

A codec encodes float32, bfloat16 and float16 tensors. Everything else arrives with the bits that it left
with: its bytes travel as float32 elements, which the exact codec copies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs import get as get_codec
from thinwire.collectives import irecv, isend
from thinwire.parallel.pipeline_settings import BACKWARD, FORWARD, Settings, fitting
from thinwire.parallel.placed_values import Form
from thinwire.rounding import Stream

EXACT = get_codec("fp32")
WORD = 4  #: bytes of a float32 element


class Flight(Protocol):
    """A message on its way."""

    def wait(self) -> bool: ...


@dataclass
class Counts:
    """What this rank sent in one direction."""

    messages: int = 0
    encoded: int = 0  #: messages that a codec encoded
    sent_nbytes: int = 0
    plain_nbytes: int = 0  #: of the same tensors in their own dtypes


@dataclass
class Arrival:
    """Tensors that are on their way here."""

    flights: list[Flight]
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Return the tensors once they are here."""
        for flight in self.flights:
            flight.wait()
        self.flights = []
        return self.tensors


@dataclass
class Post:
    """Sends and receives for one rank of a group."""

    group: dist.ProcessGroup
    settings: Settings
    step: int = 0  #: a number of the call: streams of random rounding begin with it
    calls: int = 0
    counts: dict[str, Counts] = field(default_factory=lambda: {FORWARD: Counts(), BACKWARD: Counts()})
    leaving: list[Flight] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.ranks = dist.get_process_group_ranks(self.group)

    def send(self, tensors: Sequence[Tensor], to: int, direction: str, name: str, *, exact: bool) -> None:
        """Encode tensors and send them on their way."""
        counts = self.counts[direction]
        for i, x in enumerate(tensors):
            codec = self._codec(Form.of(x), direction, exact)
            what, full = x.detach(), f"{name}.{i}"
            if codec is None:
                what = as_words(what)
            rng = (
                Stream(self.settings.seed, self.step, full, self.rank) if codec and codec.needs_rng else None
            )
            self.leaving.append(isend(what, self.ranks[to], codec or EXACT, self.group, name=full, rng=rng))
            counts.messages += 1
            counts.encoded += codec is not None
            counts.plain_nbytes += x.nbytes
            counts.sent_nbytes += (codec or EXACT).nbytes(what.numel())

    def receive(
        self, forms: Sequence[Form], source: int, direction: str, name: str, *, exact: bool
    ) -> Arrival:
        """Make room for tensors and let them come."""
        arrival = Arrival([], [])
        for i, form in enumerate(forms):
            codec = self._codec(form, direction, exact)
            if codec is None:
                room, x = words(form)
            else:
                room = x = torch.empty(form.shape, dtype=form.dtype, device=form.device)
            flight = irecv(room, self.ranks[source], codec or EXACT, self.group, name=f"{name}.{i}")
            arrival.flights.append(flight)
            arrival.tensors.append(x)
        return arrival

    @property
    def draws(self) -> bool:
        """Whether a codec rounds at random."""
        return any(
            each is not None and each.needs_rng for each in (self.settings.forward, self.settings.backward)
        )

    def settle(self) -> None:
        """Wait until everything that was sent is on the wire."""
        leaving, self.leaving = self.leaving, []
        for flight in leaving:
            flight.wait()

    def _codec(self, form: Form, direction: str, exact: bool) -> Codec | None:
        return None if exact else fitting(self.settings.codec(direction), form.shape, form.dtype)[0]


def as_words(x: Tensor) -> Tensor:
    """Return a tensor's bytes as float32 elements; zeros fill the last one.

    >>> as_words(torch.tensor([True, False, True])).shape
    torch.Size([1])
    """
    if x.dtype == torch.float32:
        return x
    raw = x.contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.numel() % WORD)).view(torch.float32)


def words(form: Form) -> tuple[Tensor, Tensor]:
    """Return room for the bytes of a tensor, as float32 elements, and the tensor that they make."""
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    room = torch.empty(-(-nbytes // WORD), device=form.device)
    return room, room.view(torch.uint8)[:nbytes].view(form.dtype).view(form.shape)
