"""`ip` and `tc`: find them, call them, and copy them for another machine.

Images made for GPUs often lack both. THINWIRE_IP and THINWIRE_TC name copies of them, such as `pack` makes; a
folder `lib` beside a copy holds its libraries. The system's loader then starts the copy with that folder as
its library path. No environment variable is set, so programs that a rank runs do not load those libraries.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from thinwire.errors import LabError

PROGRAMS = ("ip", "tc")
VARIABLES = {"ip": "THINWIRE_IP", "tc": "THINWIRE_TC"}
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
LIBRARIES = "lib"
LOADER = re.compile(rb"/[\w./-]*/ld-[\w.-]+\.so\.\d+")
HEAD_NBYTES = 4096  #: of a program, which contain the name of its loader
#: Parts of the C library, which must be those of the machine that runs the copies.
OF_THE_SYSTEM = re.compile(r"(linux-vdso|linux-gate|ld-linux|ld64|lib(c|m|dl|rt|pthread|resolv))\b")


def find(program: str) -> Path | None:
    """Return the path that a program's variable names, else its path on PATH; None if there is none."""
    variable = VARIABLES[program]
    if chosen := os.environ.get(variable):
        path = Path(chosen).expanduser().absolute()
        if not path.is_file():
            raise LabError(
                f"{variable} names {chosen}, which is no file: it must be the path of `{program}` itself; "
                f"unset it to use the one on PATH"
            )
        return path
    on_path = shutil.which(program) or shutil.which(program, path=SYSTEM_PATH)
    return Path(on_path) if on_path else None


def need(program: str) -> Path:
    """Return the path of a program, or raise a `LabError` that names both ways to get it."""
    path = find(program)
    if path is None:
        raise LabError(
            f"the lab needs `{program}`: install iproute2 (apt install iproute2), or set "
            f"{VARIABLES[program]} to a copy of it (`thinwire lab pack-tools FOLDER`, where it is installed)"
        )
    return path


def command(program: str) -> list[str]:
    """Return the words that start a program."""
    path = need(program)
    libraries = path.parent / LIBRARIES
    if not os.environ.get(VARIABLES[program]) or not libraries.is_dir():
        return [str(path)]
    with path.open("rb") as opened:
        loader = LOADER.search(opened.read(HEAD_NBYTES))
    return [loader[0].decode(), "--library-path", str(libraries), str(path)] if loader else [str(path)]


def pack(folder: str | Path) -> list[Path]:
    """Copy `ip`, `tc` and their libraries, less those of the C library, into a folder; return the copies.

    The machine that uses them needs the same processor and a C library at least as new.
    """
    home = Path(folder).expanduser()
    try:
        (home / LIBRARIES).mkdir(parents=True, exist_ok=True)
        copied = []
        for program in PROGRAMS:
            path = need(program)
            copied.append(Path(shutil.copy2(path, home / program)))
            copied += [Path(shutil.copy2(each, home / LIBRARIES / each.name)) for each in _libraries(path)]
    except OSError as error:
        raise LabError(
            f"cannot pack into {home}: {error.strerror or error}; name a folder that you can write to"
        ) from error
    return list(dict.fromkeys(copied))


def _libraries(path: Path) -> list[Path]:
    """Return the libraries that a program loads, by the names it asks for."""
    try:
        done = subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise LabError("packing needs `ldd`, which comes with the C library: it is not on PATH") from None
    libraries = []
    for line in done.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow or OF_THE_SYSTEM.match(name):
            continue
        if rest.startswith("not found"):
            raise LabError(
                f"{path} does not find its library {name}; pack the programs of iproute2 as it is installed: "
                f"unset {' and '.join(VARIABLES.values())}"
            )
        libraries.append(Path(rest.split(" (")[0]))
    return libraries
