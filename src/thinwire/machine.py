"""Describe the machine on which a measurement was made, and save the measurement."""

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
    """Return the machine, the packages and the kernels."""
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
    """Return `describe` and whether a lab can be made here: its requirements, or why it cannot."""
    description = describe()
    programs = {program: _program(program) for program in tools.PROGRAMS}
    visible = [each.name for each in gpus.visible()]
    return {
        "machine": {**description["machine"], **({} if torch.cuda.is_available() else {"nccl": _nccl()})},
        "lab": {
            "possible": _possible(),
            **programs,
            "gpus": ", ".join(visible) or "none",
            "driver": gpus.installed()[0][1] if gpus.installed() else "none",
            "mps": mps.state() if visible or shutil.which(mps.CONTROL) else "absent",
        },
        **{name: entries for name, entries in description.items() if name != "machine"},
    }


def _cuda() -> dict[str, str]:
    """Return what decides the speed of GPUs besides their name."""
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
    """Return the program's path, and the environment variable that sets it, if one does."""
    try:
        path = tools.find(program)
    except LabError as error:
        return str(error)
    if path is None:
        return f"none: install iproute2, or set {tools.VARIABLES[program]}"
    return f"{path} ({tools.VARIABLES[program]})" if tools.VARIABLES[program] in os.environ else str(path)


def _possible() -> str:
    """Return whether a lab can be made, by making one."""
    try:
        with Lab(hosts=1, device="cpu"):
            return "yes"
    except LabError as error:
        return f"no: {error}"


def processor() -> str:
    """Return the processor's name, or the architecture where the system does not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the commit of the source tree, marked if it has changes; "unknown" for an installed package."""
    root = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def now() -> str:
    """Return the date and time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record(data: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement with date, commit, machine, and this process's labs whose ranks had GPUs."""
    labs = {"labs": with_gpus()} if with_gpus() else {}
    return {"date": now(), "commit": commit(), **describe(), **labs, **data}


def save(result: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a record as JSON and return its path."""
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
    """Return how many values a benchmark uses on a device: 16M on a CPU, 256M on a GPU."""
    on_gpu = device.startswith("cuda")
    if device != "cpu" and not on_gpu:
        raise InputError(f"cannot measure on '{device}'; use cpu or cuda")
    if on_gpu and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu")
    return 256 << 20 if on_gpu else 16 << 20
