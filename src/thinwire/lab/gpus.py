"""The GPUs of this machine, and which rank of a lab uses which.

They are found without CUDA: a process that only starts others should hold no context of its own.
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
    """The GPUs of a lab's ranks, who take them in turn: rank 0 the first, and after the last the first again.

    A node sees the GPUs of its ranks. If there are fewer than these, every rank sees one only, and LOCAL_RANK
    is 0 for all of them: what torchrun does with --virtual-local-rank. So `set_device(LOCAL_RANK)` works.
    """

    found: tuple[Gpu, ...]
    per_node: int
    world: int
    chosen: bool = True  #: the ranks will use them; else they may
    mps: str = ""  #: whether MPS runs, in words for records; nothing, where it is not needed

    @property
    def shared(self) -> bool:
        """Whether a GPU has several ranks."""
        return self.world > len(self.found)

    def of(self, rank: int) -> int:
        """The place of a rank's GPU among those found."""
        return rank % len(self.found)

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank is told about them; nothing, where it sees what it should see anyway."""
        node, local = divmod(rank, self.per_node)
        if self.per_node > len(self.found):
            mine, told = [self.of(rank)], {"LOCAL_RANK": "0"}
        else:
            first = node * self.per_node
            mine, told = [self.of(first + each) for each in range(self.per_node)], {"LOCAL_RANK": str(local)}
        if mine != list(range(len(self.found))):
            told[VISIBLE] = ",".join(self.found[each].token for each in mine)
        return told

    def __str__(self) -> str:
        names = list(dict.fromkeys(each.name for each in self.found))
        what = f"{len(self.found) if len(self.found) > 1 else 'one'} {' and '.join(names)}"
        if not self.shared:
            return f"{what}, one for each rank" if self.world > 1 else what
        absent = self.mps.startswith(NONE)
        return f"{what} for all ranks, {'without MPS: small calls are slow' if absent else 'with MPS'}"

    def describe(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "device": "cuda" if self.chosen else "auto",
            "gpus": [each.name for each in self.found],
            "gpu_of_rank": [self.of(rank) for rank in range(self.world)],
            "gpu_shared": self.shared,
            "mps": self.mps or "not needed",
        }


def check(device: str) -> str:
    """A device's name, or a `LabError` that lists them."""
    if device not in DEVICES:
        raise LabError(f"a lab's device is one of {', '.join(DEVICES)}, not '{device}'")
    return device


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show to this process: those of the machine, less what the user hides.

    As CUDA does it, the list of CUDA_VISIBLE_DEVICES ends at the first entry that names none.
    """
    names, listed = [each for each, _ in installed()], os.environ.get(VISIBLE)
    if listed is None:
        return tuple(Gpu(name, str(number)) for number, name in enumerate(names))
    found: list[Gpu] = []
    for token in (each.strip() for each in listed.split(",")):
        number = int(token) if token.isdigit() else None
        known = number < len(names) if number is not None else token.startswith(("GPU-", "MIG-"))
        if not known or not names:
            break
        found.append(Gpu(names[number] if number is not None else names[0], token))
    return tuple(found)


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
