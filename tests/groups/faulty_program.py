"""One rank of a random program in which one rank is faulty: what it calls, and what it tells the parent.

The faulty rank is killed, frozen, cut off, late, leaves, or calls something else than the others. Every other
rank goes on until thinwire raises, says what was raised and when, makes a few more calls, and ends as a
program does.
"""

import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from start_program import join, meet

import thinwire
from thinwire.errors import CommError, Disagreement, ThinwireError
from thinwire.lab.topology import INTERFACE

GONE = ("kill", "stop", "raise", "leave", "destroy")  #: the faulty rank reports nothing
CUT = ("host link", "switch link")  #: a partition; the faulty rank lives
SLOW = ("late", "pause")  #: so does one that sleeps, or is stopped and goes on, when it is too late
OTHER = (
    "other size", "other codec", "other schedule", "other name", "other op", "other order", "call left out",
    "call too many", "refused here",
)  # fmt: skip
REFUSED = ("refused", "refused codec", "refused size", "refused rank", "refused name")  #: on all ranks alike
KINDS = (*GONE, *CUT, *SLOW, *OTHER, *REFUSED)
EXACT = ("fp32", "bf16", "int8/256")  #: codecs that a constant vector survives
UNFINISHED = "!unmarked_param_indices.empty()", "Expected to have finished reduction"
LATE_S = 1.5  #: beyond the time-out
UNSHARE_NET = 0x40000000
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1


@dataclass(frozen=True)
class Step:
    """A call that all ranks make."""

    op: str
    codec: str = "int8/256"
    schedule: str = "auto"
    numel: int = 1000
    name: str = "tensor"
    source: int = 0  #: of a broadcast or a message: a place in the group
    target: int = 1  #: of a message
    waits: str = ""  #: "": it blocks; "soon": `wait` right behind it; "end": when the program ends


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int  #: one of the group's
    at: int  #: the number of the step
    after_s: float | None = None  #: since the step began; None: before it begins


@dataclass(frozen=True)
class Program:
    seed: int
    world: int
    timeout_s: int
    steps: tuple[Step, ...]
    fault: Fault
    recipe: str = ""  #: of the model that is trained, if one is
    apart: bool = False  #: whether every rank is a host of its own
    members: tuple[int, ...] = ()  #: of a smaller group that makes the calls, if it is not all ranks


class LeftError(Exception):
    """What a user's program might raise."""


#: The step after all others, in which every rank needs every other one.
LAST = Step("all_reduce", "fp32", "two_shot", 77, "last")


class Player:
    """One rank at work on a program."""

    def __init__(self, rank, program, tell, places):
        self.program, self.tell, self.places = program, tell, places
        self.members = program.members or range(program.world)
        timeout = timedelta(seconds=program.timeout_s)  # a new group does not take that of all ranks over
        self.group = dist.new_group(program.members, timeout) if program.members else None
        self.rank, self.world, self.mine = rank, len(self.members), program.fault.rank == rank
        self.place = self.members.index(rank) if rank in self.members else None
        self.model, self.under_way, self.channels = None, [], {}
        self.striking = None

    # Before the program

    def warm(self):
        """Train a model until DDP has its last buckets, as errors of what torch sends itself are torch's."""
        if not self.program.recipe:
            return
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
        self.model = torch.nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=0.1, process_group=self.group
        )
        if self.program.recipe == "hook":
            self.model.register_comm_hook(*thinwire.hooks.get("int8", net, self.group))
        else:
            recipe, *option = self.program.recipe.split()
            thinwire.attach(self.model, recipe, **dict.fromkeys(option, 1))
        for _ in range(3):
            self.train()

    # Calls

    def train(self):
        self.model.zero_grad()
        self.model(torch.ones(4, 64)).square().sum().backward()

    def call(self, step):
        """Make a call; a function that waits for it and looks at the result, or None if that was done."""
        options = {"async_op": bool(step.waits), "name": step.name, "group": self.group}
        codec = self.channel(step.codec) if thinwire.codecs.get(step.codec).feedback else step.codec
        x = torch.full((step.numel,), 1.0 + self.place)
        many = [x.clone() for _ in range(self.world)]
        outs = [torch.zeros(step.numel) for _ in range(self.world)]
        if step.op == "train":
            self.train()
            return None
        if step.op == "send":
            return self.message(step, x, codec)
        if step.op == "all_reduce":
            work = thinwire.all_reduce(x, codec, schedule=step.schedule, **options)
            wanted = [(x, self.world * (self.world + 1) / 2)]
        elif step.op == "reduce_scatter":
            work = thinwire.reduce_scatter(x, many, codec, **options)
            wanted = [(x, self.world * (self.world + 1) / 2)]
        elif step.op == "all_gather":
            work = thinwire.all_gather(outs, x, codec, **options)
            wanted = [(each, 1.0 + place) for place, each in enumerate(outs)]
        elif step.op == "all_to_all":
            work = thinwire.all_to_all(outs, many, codec, **options)
            wanted = [(each, 1.0 + place) for place, each in enumerate(outs)]
        else:
            work = thinwire.broadcast(x, self.members[step.source], codec, **options)
            wanted = [(x, 1.0 + step.source)]

        def wait():
            if work is not None:
                work.wait()
            self.look(step, wanted)

        return wait

    def message(self, step, x, codec):
        """From one rank to another; the rest have nothing to do."""
        source, target = self.members[step.source], self.members[step.target]
        if self.rank == source:
            if not step.waits:
                return thinwire.send(x, target, codec, self.group)
            return thinwire.isend(x, target, codec, self.group).wait
        if self.rank == target:
            if not step.waits:
                return thinwire.recv(x, source, codec, self.group)
            return thinwire.irecv(x, source, codec, self.group).wait
        return None

    def channel(self, codec):
        return self.channels.setdefault(codec, thinwire.Channel(codec))

    def look(self, step, wanted):
        """That a call which raises nothing has the right result."""
        if step.codec not in EXACT:
            return
        for x, value in wanted:
            near = (x - value).abs().max().item() if x.numel() else 0.0
            assert near < 0.05 * value, f"a wrong result of {step}: {x[:4]} is not {value}"

    # The fault

    def strike(self):
        """Be faulty, now."""
        kind = self.program.fault.kind
        self.tell(fault=time.monotonic())
        if kind in ("kill", "stop", "pause"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "raise":
            raise LeftError
        elif kind in ("leave", "destroy"):
            if kind == "destroy":
                dist.destroy_process_group()
            raise LeftError
        elif kind in CUT:
            inside, port = self.places[kind]
            _set_down(inside, port)
        elif kind == "late":
            time.sleep(self.program.timeout_s + LATE_S)

    def steps(self):
        """What this rank calls: the program, or something else where it is the faulty one."""
        steps, fault = [*self.program.steps, LAST], self.program.fault
        if not self.mine or fault.kind not in OTHER:
            return steps
        here, at = steps[fault.at], fault.at
        if fault.kind == "other order":
            steps[at], steps[at + 1] = steps[at + 1], here
        elif fault.kind == "call left out":
            steps.pop(at)
        elif fault.kind == "call too many":
            steps.insert(at, Step("all_reduce", "int8/256", "two_shot", 555, "extra"))
        elif fault.kind != "refused here":
            steps[at] = other(fault.kind, here)
        return steps

    def play(self):
        """Until an error, or the end; whatever is still under way is waited for."""
        fault = self.program.fault
        for number, step in enumerate(self.steps()):
            if number == fault.at:
                if self.mine and fault.after_s is None:
                    self.strike()
                elif self.mine:
                    self.striking = threading.Thread(target=self.strike_later, daemon=True)
                    self.striking.start()
                if fault.kind in REFUSED or (self.mine and fault.kind == "refused here"):
                    self.refused()
                if self.mine and fault.kind == "refused here":
                    continue
            self.attempt(step)
            if number == fault.at and self.striking is not None:
                self.striking.join()
        for step, began, wait in self.under_way:
            self.attempt_wait(step, began, wait)

    def strike_later(self):
        time.sleep(self.program.fault.after_s)
        self.strike()

    def attempt(self, step):
        began = time.monotonic()
        with self.told(step, began):
            wait = self.call(step)
            if step.waits == "end" and wait is not None:
                self.under_way.append((step, began, wait))
            elif wait is not None:
                wait()

    def attempt_wait(self, step, began, wait):
        with self.told(step, began):
            wait()

    def told(self, step, began):
        return Telling(self, step, began)

    def refused(self):
        """A call that cannot be: thinwire says so at once, and nothing is sent."""
        x, kind, began = torch.ones(10), self.program.fault.kind, time.monotonic()
        channel = self.channel("onebit/64+ef")
        group = {"group": self.group}
        wrong = lambda: thinwire.all_reduce(torch.ones(3, dtype=torch.int32), "int8/256", **group)  # noqa: E731
        calls = {
            "refused": wrong,
            "refused here": wrong,
            "refused codec": lambda: thinwire.all_reduce(x, "itn8/256", **group),
            "refused size": lambda: thinwire.reduce_scatter(
                x, torch.ones(10 * self.world + 1), "fp32", **group
            ),
            "refused rank": lambda: thinwire.broadcast(x, self.program.world, "fp32", **group),
            "refused name": lambda: thinwire.all_reduce(torch.ones(60), channel, name="twice", **group),
        }
        if kind == "refused name":
            thinwire.all_reduce(torch.ones(50), channel, name="twice", **group)
        try:
            calls[kind]()
        except CommError as error:
            raise AssertionError(kind) from error
        except ThinwireError as error:
            self.tell(refused=type(error).__name__, seconds=time.monotonic() - began)
        else:
            raise AssertionError(f"{kind}: not refused")

    def after(self):
        """A failure has been told of: the next calls fail too, and wait for nobody."""
        x, peer, group = torch.ones(9), self.members[self.place - 1], {"group": self.group}
        ways = {
            "all_reduce": lambda: thinwire.all_reduce(x, "int8/256", **group),
            "native": lambda: thinwire.all_reduce(x, "fp32", schedule="native", **group),
            "hierarchical": lambda: thinwire.all_reduce(x, "fp32", schedule="hierarchical", **group),
            "async": lambda: thinwire.all_reduce(x, "int8/256", async_op=True, **group).wait(),
            "send": lambda: thinwire.send(x, peer, "fp32", **group),
            "irecv": lambda: thinwire.irecv(x, peer, "fp32", **group).wait(),
        }
        if self.model is not None:
            ways["train"] = self.train
        for way, call in ways.items():
            began = time.monotonic()
            try:
                call()
                kind, text = "", "it succeeded"
            except BaseException as error:  # noqa: BLE001
                kind, text = _kind(error), str(error)
            seconds = time.monotonic() - began
            if way == "train" and any(
                each in text for each in UNFINISHED
            ):  # which DDP says: its last backward pass was cut off
                kind = "CommError"
            if kind != "CommError" or seconds > 1:
                self.tell(after=way, kind=kind, text=text[-300:], seconds=seconds)


class Telling:
    """What was raised by a call goes to the parent; ranks that disagree go on, others end their program."""

    def __init__(self, player, step, began):
        self.player, self.step, self.began = player, step, began

    def __enter__(self):
        return self

    def __exit__(self, _kind_of, error, trace):
        if error is None or not isinstance(error, Exception) or isinstance(error, LeftError | Failed):
            return False
        facts = {"step": str(self.step), "op": self.step.op, "numel": self.step.numel, "began": self.began}
        self.player.tell(error=_kind(error), text=str(error)[:1500], at=time.monotonic(), **facts)
        if isinstance(error, Disagreement):
            return True
        raise Failed from error


class Failed(Exception):  # noqa: N818
    """This rank's program is over."""


def _kind(error):
    return type(error).__name__ if isinstance(error, ThinwireError) else f"raw {type(error).__name__}"


def other(kind, step):
    """A call that is not the others'."""
    if kind == "other size":
        return replace(step, numel=step.numel + 3)
    if kind == "other codec":
        return replace(step, codec="int4/128" if step.codec != "int4/128" else "int8/256")
    if kind == "other schedule":
        return replace(step, schedule="ring" if step.schedule != "ring" else "two_shot")
    if kind == "other name":
        return replace(step, name="another")
    return replace(step, op="all_gather" if step.op != "all_gather" else "broadcast")


def _enter(namespace):
    """Move this thread into a network namespace; Python 3.11 has no os.setns."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), UNSHARE_NET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _set_down(namespace, port):
    """Pull a cable, from a thread of its own, as namespaces belong to threads."""

    def run():
        _enter(namespace)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sh14x", port.encode(), 0)
            flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, GET_FLAGS, request))[1]
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", port.encode(), flags & ~UP))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def run_rank(rank, program, place, pipe, complaints, hosts):
    """All that the process of a rank does; `hosts` has the namespaces of a program whose ranks are apart."""

    def tell(**facts):
        os.write(pipe, f"{json.dumps({'rank': rank, **facts})}\n".encode())

    os.dup2(complaints, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a rank hangs, if it does
    address, interface, places = "127.0.0.1", "lo", {}
    if program.apart:
        names, topology = hosts
        _enter(names.host(rank))
        address, interface = topology.address(0), INTERFACE
        places = {"host link": (names.host(rank), INTERFACE), "switch link": (names.switch, f"p{rank}")}
    join(rank, program.world, place, program.timeout_s, address, interface)
    player = Player(rank, program, tell, places)
    if player.place is None:
        tell(ready=time.monotonic())
        while True:  # until the parent ends it; it asks where ranks are before, which wakes them
            signal.pause()
    player.warm()
    meet(dist.distributed_c10d._get_default_store(), "warm", player.world, last=player.mine)
    tell(ready=time.monotonic())
    try:
        player.play()
    except LeftError:
        if program.fault.kind == "raise":
            raise
    except Failed:
        player.after()
    tell(done=time.monotonic())
    with suppress(Exception):
        os.close(pipe)
