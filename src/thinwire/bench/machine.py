"""What a measurement must say about where it was made, and how it is saved."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from thinwire import __version__, kernels
from thinwire.errors import InputError

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
        },
        "package": {
            "python": platform.python_version(),
            "thinwire": __version__,
            **{name: _version(name) for name in PACKAGES},
        },
        "kernels": kernels.available(),
    }


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


def record(data: dict[str, Any]) -> dict[str, Any]:
    """A measurement with its circumstances."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": now.isoformat(timespec="seconds"), "commit": commit(), **describe(), **data}


def save(result: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a record as JSON; the path it went to."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
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
