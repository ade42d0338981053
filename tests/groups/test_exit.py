"""The end of a program: threads of a group that was destroyed are gone before Python is."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, pathlib, sys

def gloo():
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    return sum("gloo" in each.read_text() for each in tasks)

atexit.register(lambda: print(gloo()))  # the first to be registered is the last to be called
import torch, torch.distributed as dist
import thinwire

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1000)
thinwire.all_reduce(x, "int8")
thinwire.all_reduce(x, "fp32", async_op=sys.argv[1] == "async_op")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("how", ["blocking", "async_op"])
def test_threads_of_a_group_end_before_python(how):
    """One that drops a tensor later would take the process down."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
