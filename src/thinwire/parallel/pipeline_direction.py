"""One direction of a stage: its messages are encoded before torch sends them, and decoded after it received.

torch makes a list of operations for every micro-batch, sends or receives their tensors, and waits. Here the
tensors of these operations are replaced by wires. Encoding and decoding run on the current stream. torch's
sends begin after what is on that stream, and its waits let that stream wait, so the host waits for nothing.

Every micro-batch has its own wires, which later steps use again: torch has waited for all messages of a step
before the next step begins.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import InputError
from thinwire.parallel.pipeline_agreement import Agreement, Shape, described
from thinwire.parallel.pipeline_delta import Kept, Place
from thinwire.parallel.pipeline_settings import FORWARD, Settings, fitting, warm
from thinwire.rounding import Stream

SENT, RECEIVED = "sent", "received"
LOOK = 100  #: steps between two measurements of the error


@dataclass
class Counts:
    """What one stage sent in one direction."""

    messages: int = 0
    sent_nbytes: int = 0
    plain_nbytes: int = 0  #: what torch would have sent
    as_is: Counter[str] = field(default_factory=Counter)  #: messages that were not encoded, by reason


@dataclass
class Arrival:
    """A wire that torch fills, and the tensor that torch wants filled."""

    codec: Codec
    wire: Tensor
    tensor: Tensor
    place: Place


class Direction:
    """What one stage sends and receives in one direction."""

    def __init__(self, stage: Any, name: str, settings: Settings) -> None:
        self.stage, self.name, self.settings = stage, name, settings
        self.codec = settings.codec(name)
        first = settings.first if name == FORWARD else None
        self.kept = None if first is None else Kept(first)
        self.agreement = Agreement(stage, name)
        self.counts = Counts()
        self.error: Tensor | None = None  #: of one round trip, relative
        self.sends: list[Shape] = []  #: what this stage has promised to send
        self._step = 0
        self._choices: dict[tuple[torch.Size, torch.dtype], tuple[Codec | None, str]] = {}
        self._wires: dict[Place, Tensor] = {}
        self._scratch: dict[int, Tensor] = {}
        self._arrivals: dict[int, list[Arrival]] = {}  #: by micro-batch

    @property
    def nbytes(self) -> int:
        """Memory of wires and temporaries."""
        return sum(each.nbytes for each in (*self._wires.values(), *self._scratch.values()))

    def warm(self) -> None:
        """Compile the loops of the codecs now, and not while another rank waits for the first message."""
        for codec in (self.codec, self.settings.first):
            warm(codec, torch.device(self.stage.device))

    def begin_step(self, step: int) -> None:
        """Count a step, and take the name of its samples."""
        self._step = step
        self._arrivals.clear()  # left by a step that was interrupted
        if self.kept is not None:
            self.kept.begin_step()

    def post(self, sends: list[Shape], expects: list[Shape]) -> None:
        """Tell the other stages what this one sends and expects."""
        self.sends = sends
        batch = "" if self.kept is None else f", batch {self.kept.batch!r}"
        self.agreement.post(self.settings.text + batch, sends, expects)

    # Messages

    def send(self, ops: list[dist.P2POp], chunk: int) -> list[dist.P2POp]:
        """Encode the tensors that torch is about to send."""
        self.agreement.settle()
        for i, op in enumerate(ops):
            x = op.tensor.detach()
            self._check_promise(x, i, len(ops))
            wire = self._encoded(x, (SENT, chunk, i))
            self.counts.messages += 1
            self.counts.plain_nbytes += x.nbytes
            self.counts.sent_nbytes += x.nbytes if wire is None else wire.nbytes
            if wire is not None:
                op.tensor = wire
        return ops

    def receive(self, ops: list[dist.P2POp], chunk: int) -> list[dist.P2POp]:
        """Let torch receive wires; `arrive` decodes them."""
        self.agreement.settle()
        arrivals = []
        for i, op in enumerate(ops):
            place = (RECEIVED, chunk, i)
            codec = self._codec_of(op.tensor, place)
            if codec is not None:
                wire = self._wire(place, codec, op.tensor)
                arrivals.append(Arrival(codec, wire, op.tensor, place))
                op.tensor = wire
        self._arrivals[chunk] = arrivals
        return ops

    def arrive(self, chunk: int) -> None:
        """Decode what was received for a micro-batch into torch's own tensors."""
        with torch.no_grad():
            for arrival in self._arrivals.pop(chunk, ()):
                tensor = arrival.tensor.detach()
                if self.kept is not None:
                    self.kept.decode(arrival.codec, arrival.wire, tensor, arrival.place)
                elif tensor.dtype == torch.float32 and tensor.is_contiguous():
                    arrival.codec.decode(arrival.wire, tensor.numel(), out=tensor.view(-1))
                else:
                    values = self._temporary(tensor)
                    arrival.codec.decode(arrival.wire, tensor.numel(), out=values)
                    tensor.copy_(values.view(tensor.shape))

    @torch.no_grad()
    def _encoded(self, x: Tensor, place: Place) -> Tensor | None:
        """Return the wire of a tensor; None if the tensor is sent as it is."""
        codec = self._codec_of(x, place)
        if codec is None:
            self.counts.as_is[self._choices[x.shape, x.dtype][1]] += 1
            return None
        wire, rng = self._wire(place, codec, x), self._stream(codec, place)
        if self.kept is not None:
            self.kept.encode(codec, x, wire, place, rng)
        else:
            codec.encode(x.reshape(-1), rng, out=wire)
        if self._step % LOOK == 1 and place[1:] == (0, 0):
            self._measure(codec, x, wire, place)
        return wire

    def _measure(self, codec: Codec, x: Tensor, wire: Tensor, place: Place) -> None:
        """Keep the relative error of a message, as a tensor: reading it would wait for a GPU."""
        known = None if self.kept is None else self.kept.find(place)
        arrives = codec.decode(wire, x.numel()).view(x.shape) if known is None else known.float()
        self.error = (arrives - x.float()).norm() / x.float().norm()

    def _codec_of(self, x: Tensor, place: Place) -> Codec | None:
        key = x.shape, x.dtype
        if key not in self._choices:
            self._choices[key] = fitting(self.codec, tuple(x.shape), x.dtype)
        codec = self._choices[key][0]
        if codec is None or self.kept is None:
            return codec
        self.kept.check_named()
        return self.kept.codec(codec, place, tuple(x.shape))

    def _stream(self, codec: Codec, place: Place) -> Stream | None:
        if not codec.needs_rng:
            return None
        _, chunk, i = place
        name = f"{self.stage.stage_index}/{chunk}/{self.name}/{i}"
        return Stream(self.settings.seed, self._step, name, self.stage.group_rank)

    def _wire(self, place: Place, codec: Codec, x: Tensor) -> Tensor:
        """Return the wire of a place; a new one only if its size changed."""
        nbytes, wire = codec.nbytes(x.numel()), self._wires.get(place)
        if wire is None or wire.numel() != nbytes or wire.device != x.device:
            wire = self._wires[place] = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        return wire

    def _temporary(self, x: Tensor) -> Tensor:
        numel = x.numel()
        if numel not in self._scratch or self._scratch[numel].device != x.device:
            self._scratch[numel] = torch.empty(numel, device=x.device)
        return self._scratch[numel]

    def _check_promise(self, x: Tensor, i: int, count: int) -> None:
        """Refuse a tensor that the receiver does not expect: it would wait for ever, or decode nonsense."""
        if not self.sends:
            return
        given = described(x.shape, x.dtype)
        if count != len(self.sends) or self.sends[i][1] != given:
            promised = " and ".join(what for _, what in self.sends)
            raise InputError(
                f"stage {self.stage.stage_index} sends {self.name} {promised}, but tensor {i} of {count} is "
                f"{given}; all micro-batches need the same shapes and dtypes"
            )
