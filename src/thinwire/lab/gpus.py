"""The GPUs of this machine, and which rank of a lab uses which.

They are found without CUDA: a process that only starts others should not hold a CUDA context.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from thinwire.errors import LabError

DEVICES = ("auto", "cuda", "cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
FOLDER = Path("/proc/driver/nvidia")
NODES = Path("/dev")
PATIENCE_S = 30.0
UNKNOWN = "NVIDIA GPU"
NONE = "none"


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, and what CUDA_VISIBLE_DEVICES calls it (a number, or a UUID if the user says so)."""

    name: str
    token: str


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a lab, assigned to ranks in turn: the first to rank 0, and after the last the first again.

    A node sees the GPUs of its ranks. If there are fewer than the node has ranks, every rank sees only one,
    and LOCAL_RANK is 0 on all, as with torchrun's --virtual-local-rank. So `set_device(LOCAL_RANK)` works.
    """

    gpus: tuple[Gpu, ...]
    per_node: int
    world: int
    chosen: bool = True  #: whether the ranks will use them; else they may
    mps: str = ""  #: whether MPS runs, as a text for records; empty if it is not needed

    @property
    def shared(self) -> bool:
        """Whether a GPU has several ranks."""
        return self.world > len(self.gpus)

    def of(self, rank: int) -> int:
        """Return the index of a rank's GPU in `gpus`."""
        return rank % len(self.gpus)

    def environment(self, rank: int) -> dict[str, str]:
        """Return a rank's variables: LOCAL_RANK, and its list of GPUs if that differs from all of them."""
        node, local = divmod(rank, self.per_node)
        if self.per_node > len(self.gpus):
            mine, variables = [self.of(rank)], {"LOCAL_RANK": "0"}
        else:
            first = node * self.per_node
            mine, variables = (
                [self.of(first + each) for each in range(self.per_node)],
                {"LOCAL_RANK": str(local)},
            )
        if mine != list(range(len(self.gpus))):
            variables[VISIBLE] = ",".join(self.gpus[each].token for each in mine)
        return variables

    def __str__(self) -> str:
        names = list(dict.fromkeys(each.name for each in self.gpus))
        what = f"{len(self.gpus) if len(self.gpus) > 1 else 'one'} {' and '.join(names)}"
        if not self.shared:
            return f"{what}, one for each rank" if self.world > 1 else what
        absent = self.mps.startswith(NONE)
        return f"{what} for all ranks, {'without MPS: small calls are slow' if absent else 'with MPS'}"

    def describe(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "device": "cuda" if self.chosen else "auto",
            "gpus": [each.name for each in self.gpus],
            "gpu_of_rank": [self.of(rank) for rank in range(self.world)],
            "gpu_shared": self.shared,
            "mps": self.mps or "not needed",
        }


def check(device: str) -> str:
    """Return a device's name, or raise a `LabError` that lists all."""
    if device not in DEVICES:
        raise LabError(f"a lab's device is one of {', '.join(DEVICES)}, not '{device}'")
    return device


def visible() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show to this process: the machine's, less those that the user hides.

    As in CUDA, the list of CUDA_VISIBLE_DEVICES ends at the first entry that names no GPU.
    """
    names, listed = [each for each, _ in installed()], os.environ.get(VISIBLE)
    if listed is None:
        return tuple(Gpu(name, str(number)) for number, name in enumerate(names))
    gpus: list[Gpu] = []
    for token in (each.strip() for each in listed.split(",")):
        number = int(token) if token.isdigit() else None
        known = number < len(names) if number is not None else token.startswith(("GPU-", "MIG-"))
        if not known or not names:
            break
        gpus.append(Gpu(names[number] if number is not None else names[0], token))
    return tuple(gpus)


@cache
def installed() -> tuple[tuple[str, str], ...]:
    """Name and driver of every GPU: from nvidia-smi, else from the driver's files, else from its devices."""
    return tuple(_asked() or _read() or [(UNKNOWN, "unknown") for _ in _nodes()])


def _asked() -> list[tuple[str, str]]:
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.rpartition(",") for line in done.stdout.splitlines()] if not done.returncode else []
    return [(name.strip(), driver.strip()) for name, comma, driver in lines if comma]


def _read() -> list[tuple[str, str]]:
    texts = [path.read_text() for path in sorted(FOLDER.glob("gpus/*/information"))]
    models = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    version = FOLDER / "version"
    driver = re.search(r"\s(\d+(?:\.\d+)+)\s", version.read_text()) if version.is_file() else None
    return [(model[1].strip() if model else UNKNOWN, driver[1] if driver else "unknown") for model in models]


def _nodes() -> list[Path]:
    return [path for path in NODES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
