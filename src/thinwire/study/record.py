"""The settings of a training run, and its result: plain frozen data."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.files import check_fields

PLAIN = "plain"  #: a codec's name for DDP without thinwire


@dataclass(frozen=True)
class Trial:
    """One training run: everything that decides its result, and nothing else."""

    study: str  #: which question it belongs to: demo, convergence
    data: str  #: a name of `thinwire.data.SETS`
    network: str
    codec: str  #: a recipe, a codec's spec, auto, or plain (DDP without thinwire)
    seed: int
    hosts: int
    link: str  #: a rate such as 100mbit, or loopback
    steps: int
    batch: int  #: samples per rank and step
    lr: float
    variant: str = ""  #: a digest of all other settings that decide its result
    device: str = "cpu"  #: or cuda: on GPUs that the hosts share, over NCCL

    @property
    def key(self) -> str:
        """A short name under which its record is stored."""
        settings = asdict(self)
        if not self.variant:
            del settings["variant"]  # trials without one keep the key they had before there were variants
        if self.device == "cpu":
            del settings["device"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Point:
    """One point of a training curve."""

    step: int
    seconds: float  #: of training so far, evaluation not counted
    sent_nbytes: int  #: by rank 0 so far
    loss: float  #: of the training batches since the last point, mean over ranks
    accuracy: float | None = None  #: on the test set, where it was measured; for a text, of next bytes


@dataclass(frozen=True)
class Layer:
    """What a codec did to one parameter's gradient."""

    name: str
    codec: str
    numel: int
    wire_nbytes: int
    error: float | None  #: of one round trip, relative to the gradient
    snr_db: float | None
    residual_norm: float | None


@dataclass(frozen=True)
class Candidate:
    """A recipe that `auto` considered."""

    codec: str
    predicted_step_s: float
    sent_nbytes: float
    error: float | None
    allowed: bool
    why: str


@dataclass(frozen=True)
class Choice:
    """The part of `Record.choice` that pages show."""

    chosen: str
    predicted_step_s: float | None
    candidates: tuple[Candidate, ...]
    measured_step_s: float | None = None


@dataclass(frozen=True)
class Environment:
    """The parts of `Record.environment` that are dicts."""

    machine: dict[str, Any] = field(default_factory=dict)
    package: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    lab: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """The result of a trial, as rank 0 measured it."""

    trial: Trial
    points: tuple[Point, ...]
    accuracy: float  #: on the test set, at the end; 0 to 1
    step_s: float  #: median
    samples_per_s: float  #: of all ranks
    sent_nbytes_per_step: float
    fp32_nbytes_per_step: float
    seconds: dict[str, float]  #: of a step, mean: compute, encode, wire, decode, wait
    overlap: float  #: share of communication hidden behind computing
    layers: tuple[Layer, ...]
    replicas_equal: bool  #: all ranks had the same parameter hashes, at every point (GPU: with an accuracy)
    predicted_step_s: float | None = None  #: by auto, before training
    choice: dict[str, Any] | None = None  #: what auto considered: `handle.stats()["auto"]`
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""  #: a command that repeats the trial

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Read a record; ValueError or TypeError if it is no record, or a value has another type."""
        data = check_fields(cls, json.loads(text))
        data["trial"] = Trial(**check_fields(Trial, data["trial"]))
        data["points"] = tuple(Point(**check_fields(Point, each)) for each in data["points"])
        data["layers"] = tuple(Layer(**check_fields(Layer, each)) for each in data["layers"])
        if not data["points"]:
            raise ValueError("it has no points")
        if data.get("choice"):
            for each in check_fields(Choice, data["choice"])["candidates"]:
                check_fields(Candidate, each)
        check_fields(Environment, data.get("environment", {}))
        return cls(**data)
