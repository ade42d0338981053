"""Rank processes of the programs in this folder: forked or spawned, waited for with a wall clock.

What a rank has to say is a line of JSON on standard output, written at once, so that lines of several ranks
do not mix. Only processes that were started here are ever ended, by their number.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

POLL_S = 0.02
START_S = 60


def report(**facts):
    """One line for the parent."""
    sys.stdout.flush()
    os.write(1, f"{json.dumps(facts)}\n".encode())


def meeting():
    """Where ranks find the port of their store: a file, so that no port is chosen before it is taken."""
    return str(Path(tempfile.mkdtemp(prefix="thinwire-")) / "port")


def join(rank, world, place, timeout_s, address="127.0.0.1", interface="lo"):
    """Make the process group, over loopback unless told otherwise, once all ranks are there.

    It returns when all have made it: a rank that is connected to all others may go on and end while these
    still connect to each other, and gloo then fails there. Ranks wait for each other by files, which outlive
    whoever wrote them.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    path, end = Path(place), time.monotonic() + START_S
    while rank and not path.exists() and time.monotonic() < end:
        time.sleep(POLL_S)
    port = int(path.read_text()) if rank else 0
    patience = timedelta(seconds=START_S)
    store = dist.TCPStore(address, port, world, not rank, patience, wait_for_workers=False)
    if not rank:
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    meet(store, "here", world)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    made = [path.with_name(f"made-{each}") for each in range(world)]
    made[rank].touch()
    while not all(each.exists() for each in made):
        assert time.monotonic() < end, f"rank {rank}: not all ranks made the group within {START_S} s"
        time.sleep(POLL_S)


def meet(store, name, world, *, last=False):
    """Until all ranks are here; the one that may take the store away with it goes on last."""
    end = time.monotonic() + START_S
    for stage in (name, f"after {name}") if last else (name,):
        store.add(stage, 1)
        while store.add(stage, 0) < world and time.monotonic() < end:
            time.sleep(POLL_S)
    if not last:
        store.add(f"after {name}", 1)


def start(method, world, target, *args):
    """Run `target(rank, world, place, *args)` on every rank, by "fork" or "spawn"."""
    place, context = meeting(), multiprocessing.get_context(method)
    ranks = [context.Process(target=target, args=(rank, world, place, *args)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    shutil.rmtree(Path(place).parent, ignore_errors=True)
    return [each.exitcode for each in ranks]


def fork(function, *args):
    """A child that runs a function and then ends as a program does, finalizers and all; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    raise SystemExit(0)


def statuses(pids, end):
    """The exit status of every child, negative for signals; None for one that had to be ended."""
    by_rank = {}
    while len(by_rank) < len(pids) and time.monotonic() < end:
        for pid in set(pids) - by_rank.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                by_rank[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    for pid in set(pids) - by_rank.keys():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [by_rank.get(pid) for pid in pids]


def raises(kind, texts, function, *args, **options):
    """What was said when it failed, as it should."""
    caught = None
    try:
        function(*args, **options)
    except kind as error:
        caught = error
    assert type(caught) is kind, f"{type(caught).__name__}, not {kind.__name__}: {caught}"
    said = str(caught)
    for text in [texts] if isinstance(texts, str) else texts:
        assert text in said, f"{text!r} is not in {said!r}"
    return said


def digest(tensors):
    """Of the bits of some tensors."""
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]
