"""What a measurement must say about where it was made, and how it is saved."""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from thinwire import __version__, kernels
from thinwire.errors import InputError, LabError
from thinwire.files import safe_name, writing
from thinwire.lab import Lab, gpus, mps, tools
from thinwire.lab.hosts import with_gpus

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "triton",
    "ml_dtypes",
    "bitsandbytes",
    "torchao",
    "qtorch",
    "gfloat",
    "matplotlib",
)


def describe() -> dict[str, dict[str, str]]:
    """The machine, the packages and the kernels."""
    return {
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "threads": str(torch.get_num_threads()),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            **(_cuda() if torch.cuda.is_available() else {}),
        },
        "package": {
            "python": platform.python_version(),
            "thinwire": __version__,
            **{name: _version(name) for name in PACKAGES},
        },
        "kernels": kernels.available(),
    }


def doctor() -> dict[str, dict[str, str]]:
    """`describe`, and whether a lab can be made: what it needs is here, or why not."""
    found = describe()
    programs = {program: _program(program) for program in tools.PROGRAMS}
    seen = [each.name for each in gpus.visible()]
    return {
        "machine": {**found["machine"], **({} if torch.cuda.is_available() else {"nccl": _nccl()})},
        "lab": {
            "possible": _possible(),
            **programs,
            "gpus": ", ".join(seen) or "none",
            "driver": gpus.installed()[0][1] if gpus.installed() else "none",
            "mps": mps.state() if seen or shutil.which(mps.CONTROL) else "absent",
        },
        **{name: entries for name, entries in found.items() if name != "machine"},
    }


def _cuda() -> dict[str, str]:
    """What decides how fast GPUs are, beside their name."""
    installed = gpus.installed()
    return {
        "gpus": str(torch.cuda.device_count()),
        "driver": installed[0][1] if installed else "unknown",
        "nccl": _nccl(),
        "mps": mps.state(),
    }


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "not in this torch"
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _program(program: str) -> str:
    """Where it is, and who says so."""
    try:
        path = tools.find(program)
    except LabError as error:
        return str(error)
    if path is None:
        return f"none: install iproute2, or set {tools.VARIABLES[program]}"
    return f"{path} ({tools.VARIABLES[program]})" if tools.VARIABLES[program] in os.environ else str(path)


def _possible() -> str:
    """Whether a lab can be made: one is."""
    try:
        with Lab(hosts=1, device="cpu"):
            return "yes"
    except LabError as error:
        return f"no: {error}"


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of the source tree, marked if it has changes; "unknown" for an installed package."""
    root = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def now() -> str:
    """The date and time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record(data: dict[str, Any]) -> dict[str, Any]:
    """A measurement with its circumstances, and with the labs of this process whose ranks had GPUs."""
    labs = {"labs": with_gpus()} if with_gpus() else {}
    return {"date": now(), "commit": commit(), **describe(), **labs, **data}


def save(result: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a record as JSON; the path it went to."""
    path = folder / f"{safe_name(name)}.json"
    with writing(path):
        path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def default_numel(device: str) -> int:
    """How many values a benchmark takes on a device that is here: 16M on a CPU, 256M on a GPU."""
    on_gpu = device.startswith("cuda")
    if device != "cpu" and not on_gpu:
        raise InputError(f"cannot measure on '{device}'; use cpu or cuda")
    if on_gpu and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu")
    return 256 << 20 if on_gpu else 16 << 20
