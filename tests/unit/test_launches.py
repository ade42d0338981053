"""Where kernels are launched: on the device of their tensors, which need not be the current one.

The device is made up, and so are the kernels; what they compute is tested in `tests/device`.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from thinwire.kernels import block_cuda, cuda, gemm_cuda, segment_tables, select_cuda, tally_cuda


class Kernel:
    """Notes its grid, what it got, and the device that was current."""

    def __init__(self, here):
        self.here, self.launches = here, []

    def __getitem__(self, grid):
        def run(*args, **named):
            self.launches.append((self.here.index, grid, args, named))
            return self

        return run


@pytest.fixture
def here(monkeypatch):
    """The current device: the first."""
    held = SimpleNamespace(index=0)

    @contextmanager
    def entered(device):
        before, held.index = held.index, torch.device(device).index
        yield
        held.index = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: held.index)
    monkeypatch.setattr(torch.cuda, "device", entered)
    return held


def tensor(index, numel=5000):
    made = SimpleNamespace(device=torch.device("cuda", index), is_cuda=True, numel=lambda: numel)
    made.contiguous = lambda: made
    return made


def by_program(here, x, kernel, _):
    block_cuda.Program(kernel, {"L": (1, 2, 3, 512)}).launch((1, 1, 1), (), x.device)
    assert here.index == 0


def by_tally(_, x, kernel, monkeypatch):
    monkeypatch.setattr(tally_cuda, "tally_kernel", kernel)
    tally_cuda.tally(x, x, None, None)
    assert kernel.launches[0][1] == (3,)


def by_select(_, x, kernel, __):
    with select_cuda._on(x):
        kernel[(1,)]()


def by_cast(_, x, kernel, __):
    cuda._launch(kernel, x, 1, BLOCK=1024)
    assert kernel.launches[0][1:] == ((5,), (1,), {"BLOCK": 1024, "num_warps": 4})


def by_gemm(_, x, kernel, monkeypatch):
    monkeypatch.setattr(gemm_cuda, "_gemm", kernel[(1,)])
    gemm_cuda.gemm("p", x, x, x, "key")
    assert kernel.launches[0][2] == ("p", x, x, x, "key")


def by_exact(_, x, kernel, monkeypatch):
    monkeypatch.setattr(gemm_cuda, "_exact", kernel[(1,)])
    gemm_cuda.exact(x, x, x, odd=True)
    assert kernel.launches[0][2] == (x, x, x, True, None)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("launch", [by_program, by_tally, by_select, by_cast, by_gemm, by_exact])
def test_kernels_run_on_the_device_of_their_tensors(launch, index, here, monkeypatch):
    kernel = Kernel(here)
    launch(here, tensor(index), kernel, monkeypatch)
    assert [current for current, *_ in kernel.launches] == [index]
    assert here.index == 0


def test_tensors_of_the_interpreter_have_no_device_to_enter(here):
    with select_cuda._on(torch.ones(3)):
        assert here.index == 0
    kernel = Kernel(here)
    here.index = 2
    block_cuda.Program(kernel, {"L": (1, 2, 3, 512)}).launch((1, 1, 1), (), torch.device("cuda"))
    assert kernel.launches[0][0] == 2, "a device without an index is the current one"


def test_a_program_is_compiled_once_and_then_gets_addresses(here, monkeypatch):
    asked = []
    active = SimpleNamespace(get_current_stream=lambda index: asked.append(index) or f"stream {index}")
    monkeypatch.setattr(block_cuda, "driver", SimpleNamespace(active=active), raising=False)
    kernel, x = Kernel(here), torch.ones(4)
    program = block_cuda.Program(kernel, {"WIDE": True, "L": (1, 2, 3, 4096)})
    for _ in range(2):
        program.launch((7, 1, 1), (x, 3), torch.device("cuda", 1))
    first, second = kernel.launches
    assert first[:2] == second[:2] == (1, (7, 1, 1))
    assert first[2] == (x, 3)
    assert first[3]["L"] == (1, 2, 3, 4096)
    assert first[3]["num_warps"] == 4096 // block_cuda.WARP_NUMEL
    assert not first[3]["enable_fp_fusion"], "sums must have the bits of a CPU"
    assert second[2:] == ((x.data_ptr(), 3, True, (1, 2, 3, 4096)), {"stream": "stream 1"})
    assert asked == [1]


def test_programs_are_kept_by_what_the_compiler_knows():
    kernel, shape = object(), {"L": (1,)}
    first = block_cuda.program(kernel, shape, ("here", True))
    assert block_cuda.program(kernel, shape, ("here", True)) is first
    others = [
        block_cuda.program(kernel, shape, ("there", True)),
        block_cuda.program(kernel, {"L": (2,)}, ("here", True)),
        block_cuda.program(object(), shape, ("here", True)),
    ]
    assert len({id(each) for each in (first, *others)}) == 4


def test_nothing_is_launched_for_no_segments(here):
    kernel, x = Kernel(here), torch.ones(2)
    for blocks in (0, 3):
        program = block_cuda.Program(kernel, {"L": (1, 2, 3, 512)})
        ready = segment_tables.Ready(program, (blocks, 1, 1), (x,), torch.device("cuda", 0))
        assert ready.tables == (x,)
        ready.launch(x, *ready.tables)
        assert len(kernel.launches) == (blocks > 0)
    assert ready.tables == (x.data_ptr(),), "addresses once it is compiled"
