"""Random programs of two to four gloo ranks, one of which is faulty; what became of the others, as a table.

    python tests/groups/random_faults.py --programs 500 --seed 0 --jobs 2

Program i has seed + i; one that went wrong is run again by `--seed N --programs 1`. This process imports
torch and forks every rank, so that a program takes little more than the time-out that most of them wait for.
It owns a wall clock and ends its own children. Partitions need root and `ip`; without them they are left out.
"""

import argparse
import gc
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import faulty_program
import torch
from faulty_program import CUT, GONE, KINDS, LAST, OTHER, REFUSED, SLOW, Fault, Program, Step
from start_program import fork, meeting

import thinwire
from thinwire import codecs, policy
from thinwire.errors import LabError
from thinwire.lab import namespaces
from thinwire.lab.topology import INTERFACE, LabOptions
from thinwire.runtimes import local
from thinwire.schedules import get as get_schedule

CODECS = (
    "fp32", "bf16", "int8/256", "int4/128", "aps/e5m2", "qsgd4/512", "topk/0.01+ef", "onebit/64+ef",
    "int8/tensor~shared",
)  # fmt: skip
SCHEDULES = (
    "auto", "native", "one_shot", "two_shot", "ring", "tree", "hierarchical", "hierarchical/1",
    "accumulate/sequential", "low_rank/2",
)  # fmt: skip
MOVES = "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"
RECIPES = (
    "", "fp32", "fp16", "int8", "onebit", "powersgd", "auto", "hook", "int8 double_buffer", "int4 shadow",
)  # fmt: skip
NUMELS = 1, 77, 1000, 30_000, 300_000
MORE_S = 3.0  #: than the time-out, until a rank is told
EXIT_S = 25.0  #: from there until its process has ended, on a busy machine
START_S = 40.0
PARENT = os.getpid()
OFTEN = (*GONE, *GONE, *CUT, *CUT, *SLOW, *OTHER, *REFUSED)


def here():
    """Whether this is the parent: forked ranks leave by its stack when they end."""
    return os.getpid() == PARENT


def drawn(seed, kinds):
    """The program of a seed."""
    rng = random.Random(seed)
    world, kind = rng.choice((2, 3, 3, 4)), rng.choice([each for each in OFTEN if each in kinds])
    everyone = world == 2 or rng.random() < 0.7
    members = range(world) if everyone else sorted(rng.sample(range(world), rng.randint(2, world - 1)))
    recipe = rng.choice(RECIPES)
    pool = [step(rng, len(members)) for _ in range(rng.randint(1, 4))]
    steps = [rng.choice(pool) for _ in range(rng.randint(2, 8))]
    if recipe:
        for _ in range(rng.randint(1, 4)):
            steps.insert(rng.randint(0, len(steps)), Step("train"))
    at, after_s = rng.randrange(len(steps)), None
    if kind in (*CUT, "kill", "stop", "pause") and rng.random() < 0.6:
        after_s = rng.choice((0.0, 0.002, 0.01, 0.05))
    if kind in OTHER:  # a call of all ranks, which can differ in whatever it is to differ in
        blocks = rng.choice(("", "soon", "end"))
        steps[at] = Step("all_reduce", "int8/256", "two_shot", rng.choice((77, 1000)), waits=blocks)
        if kind == "other order":
            steps.insert(at + 1, Step("all_gather", "fp32", numel=99, waits=blocks))
    fault, smaller = Fault(kind, rng.choice(members), at, after_s), () if everyone else tuple(members)
    return Program(seed, world, rng.choice((3, 4)), tuple(steps), fault, recipe, kind in CUT, smaller)


def step(rng, world):
    op, codec = rng.choice(("all_reduce", "all_reduce", "all_reduce", *MOVES)), rng.choice(CODECS)
    parsed = codecs.get(codec)
    if op != "all_reduce" and (parsed.feedback or parsed.agreement(1)):
        codec, parsed = "int8/256", codecs.get("int8/256")
    fitting = [each for each in SCHEDULES if each == "auto" or not get_schedule(each).refuses(parsed)]
    source, target = rng.sample(range(world), 2)
    schedule, numel = rng.choice(fitting), rng.choice(NUMELS)
    if numel == NUMELS[-1] and codec in ("fp32", "int8/256"):
        numel *= 10
    name = f"{op} {codec} {numel} {schedule}" if op == "all_reduce" else "tensor"
    return Step(op, codec, schedule, numel, name, source, target, rng.choice(("", "", "soon", "end")))


@dataclass
class Play:
    """A program under way, or done."""

    program: Program
    pids: dict[int, int]  #: by rank
    pipe: int
    complaints: Path
    place: str
    slot: int
    began: float
    lines: list = field(default_factory=list)
    statuses: dict[int, int | None] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    rest: bytes = b""

    def find(self, key, rank=None):
        return [each for each in self.lines if key in each and rank in (None, each["rank"])]

    @property
    def struck(self):
        """When the fault happened, if it did."""
        return next((each["fault"] for each in self.find("fault")), None)

    @property
    def survivors(self):
        fault, members = self.program.fault, self.program.members or self.pids
        return [rank for rank in members if rank != fault.rank or fault.kind not in GONE]

    @property
    def due(self):
        """When the wall clock strikes."""
        ready = [each["ready"] for each in self.find("ready")]
        if len(ready) < self.program.world:
            return self.began + START_S
        waits = sum(each.waits != "" for each in self.program.steps) + 2
        return max(ready) + min(50 + waits, 60)

    def read(self):
        with suppress(BlockingIOError):
            while said := os.read(self.pipe, 1 << 16):
                self.rest += said
        *whole, self.rest = self.rest.split(b"\n")
        self.lines += [json.loads(each) for each in whole]

    def reap(self):
        """Note who has ended; True once all have that ever will."""
        self.read()
        for rank, pid in self.pids.items():
            if rank in self.statuses:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
                self.ended[rank] = time.monotonic()
        fault, now = self.program.fault, time.monotonic()
        paused = fault.kind == "pause" and self.struck is not None and fault.rank not in self.statuses
        if paused and now > self.back:
            os.kill(self.pids[fault.rank], signal.SIGCONT)
        waits_for = set(self.survivors) | ({fault.rank} if fault.kind != "stop" else set())
        if now > self.due or waits_for <= self.statuses.keys():
            self.stop()
        self.read()
        return len(self.statuses) == len(self.pids)

    @property
    def back(self):
        """When a rank that pauses goes on."""
        return self.struck + self.program.timeout_s + faulty_program.LATE_S

    def stop(self):
        """End what is left; it first says where it is."""
        left = [rank for rank in self.pids if rank not in self.statuses]
        for rank in left:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3 if any(rank in self.survivors for rank in left) else 0)
        for rank in left:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            self.statuses[rank] = None

    # Was it as promised?

    def wrongs(self):
        """What is not as it should be."""
        if len(self.find("ready")) < self.program.world:
            return ["did not start"]
        faults = [f"rank {rank}: {each}" for rank in self.survivors for each in self.wrongs_of(rank)]
        if self.struck is None and self.program.fault.kind not in (*OTHER, *REFUSED):
            faults.append("the fault never happened")
        if self.program.fault.kind in ("leave", "destroy") and self.statuses[self.program.fault.rank] != 0:
            faults.append(f"the rank that left ended with {self.statuses[self.program.fault.rank]}")
        return faults

    def wrongs_of(self, rank):
        errors, refused = self.find("error", rank), self.program.fault.kind in REFUSED
        for each in errors:
            yield from self.wrongs_of_error(rank, each)
        for each in self.find("after", rank):
            yield f"after the failure {each['after']} {each['kind']} {each['seconds']:.1f} s: {each['text']}"
        if refused and (errors or not self.find("refused", rank)):
            yield f"a call was refused, and then {errors}"
        if not refused and not errors and self.find("done", rank):
            yield "was not told"
        yield from self.wrongs_of_end(rank)

    def wrongs_of_end(self, rank):
        status, done = self.statuses[rank], self.find("done", rank)
        if status is None:
            yield "hangs at its end" if done else "hangs"
        elif status != 0:
            yield f"ended with {status}"
        elif self.ended[rank] - done[0]["done"] > EXIT_S:
            yield f"took {self.ended[rank] - done[0]['done']:.1f} s to end"

    def wrongs_of_error(self, rank, each):
        if each["error"] not in ("CommError", "Disagreement"):
            yield f"{each['error']} in {each['step']}: {each['text']}"
        if (late_s := self.seconds(each) - self.program.timeout_s - MORE_S) > 0:
            yield f"{late_s:.1f} s late in {each['step']}: {each['text'][:300]}"
        yield from self.unnamed(rank, each)

    def seconds(self, error):
        """To the error, from the fault or the call that failed, or from the end of the rank's pause."""
        fault = self.program.fault
        paused = fault.kind == "pause" and fault.rank == error["rank"]
        return error["at"] - max(error["began"], self.back if paused else self.struck or 0.0)

    def unnamed(self, rank, error):
        """An error names the call and the faulty rank, and blames nobody else."""
        text, fault = error["text"], self.program.fault
        calls = {f"{each.op} of {each.numel:,}" for each in (*self.program.steps, LAST)}
        calls |= {"all_reduce of", "all_to_all of"} | ({"ranks disagree"} if fault.kind in OTHER else set())
        if not any(each in text for each in calls):
            yield f"no call is named: {text}"
        if fault.kind in OTHER or fault.kind in REFUSED:
            return
        if rank == fault.rank:
            if not re.search(rf"rank [^{rank}]", text):
                yield f"no rank is named: {text}"
            return
        told = re.sub(r"failed on rank \d|rank \d was at|from rank \d to rank \d", "", text)
        named = {int(each) for some in re.findall(r"rank (\d(?:, \d)*)", told) for each in some.split(", ")}
        tells = fault.kind != "pause" or "from another rank" not in text  # it may be back before it is asked
        if fault.rank not in named and tells:
            yield f"rank {fault.rank} is not named: {text}"
        blamed = {int(each) for each in re.findall(r"rank (\d) is gone", text)} - {fault.rank}
        if blamed:
            yield f"blames {blamed}: {text}"


class Stage:
    """Where programs run: at most so many at once, each with hosts of its own if its ranks are apart."""

    def __init__(self, jobs, hosts, folder):
        self.free, self.hosts, self.folder = list(range(jobs)), hosts, folder

    def begin(self, program):
        slot, place = self.free.pop(), meeting()
        if program.apart:
            self.mend(slot)
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        complaints = self.folder / f"{program.seed}.txt"
        file = os.open(complaints, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        hosts = self.hosts[slot] if program.apart else None
        began = time.monotonic()
        pids = {
            rank: fork(faulty_program.run_rank, rank, program, place, writes, file, hosts)
            for rank in range(program.world)
        }
        os.close(writes)
        os.close(file)
        return Play(program, pids, reads, complaints, place, slot, began)

    def mend(self, slot):
        """Plug all cables in."""
        names, topology = self.hosts[slot]
        namespaces.run(
            "ip", "-n", names.switch, batch=[f"link set p{rank} up" for rank in range(topology.world)]
        )
        for rank in range(topology.world):
            namespaces.run("ip", "-n", names.host(rank), "link", "set", INTERFACE, "up")

    def end(self, play):
        os.close(play.pipe)
        shutil.rmtree(Path(play.place).parent, ignore_errors=True)
        self.free.append(play.slot)


def run(programs, stage, told):
    """Play all programs; `told` hears of each when it has ended."""
    waiting, under_way = list(reversed(programs)), []
    try:
        while waiting or under_way:
            while waiting and stage.free:
                under_way.append(stage.begin(waiting.pop()))
            select.select([each.pipe for each in under_way], [], [], 0.02)
            time.sleep(0.01)
            for play in [each for each in under_way if each.reap()]:
                under_way.remove(play)
                stage.end(play)
                told(play)
    finally:
        for play in under_way if here() else ():
            play.stop()


def warm_up():
    """Load compiled loops and what DDP imports, before ranks are forked; no thread may be started here."""
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    recipes = [
        policy.get(each.split()[0]) for each in RECIPES if each.split()[:1] not in ([], ["auto"], ["hook"])
    ]
    for codec in {*CODECS, *(rule.codec for recipe in recipes for rule in recipe.rules)} - {policy.LADDER}:
        for schedule in SCHEDULES[1:]:
            if not get_schedule(schedule).refuses(codecs.get(codec)):
                for shape in ((999,), (256, 257)):
                    channels = [thinwire.Channel(codec) for _ in range(2)]
                    local.all_reduce([torch.ones(shape) for _ in range(2)], channels, schedule=schedule)


def hosts_of(jobs, stack):
    """Four hosts for every job; none if this machine cannot make them."""
    topology = LabOptions(hosts=4, link="10gbit").topology()
    try:
        namespaces.require()
    except LabError:
        return None
    made = [namespaces.names(900 + number, topology.world) for number in range(jobs)]
    for names in made:
        stack.callback(lambda names=names: namespaces.remove(list(names)) if here() else None)
        namespaces.build(topology, names)
    return [(names, topology) for names in made]


def table(plays):
    """Rows: the fault, whether the faulty rank hosts the store, and how it went."""
    rows = defaultdict(list)
    for play in plays:
        fault = play.program.fault
        rows[fault.kind, fault.rank == 0].append(play)
    yield f"{'fault':<16}{'of':<8}{'programs':>9}{'as promised':>13}{'median s':>10}{'worst s':>9}"
    for kind in KINDS:
        for store in (True, False):
            outcomes = rows.get((kind, store), [])
            if not outcomes:
                continue
            seconds = [play.seconds(each) for play in outcomes for each in play.find("error")]
            good = sum(not play.wrongs() for play in outcomes)
            times = f"{statistics.median(seconds):>10.2f}{max(seconds):>9.2f}" if seconds else ""
            yield f"{kind:<16}{'store' if store else 'other':<8}{len(outcomes):>9}{good:>13}{times}"


def say(*lines):
    sys.stdout.write("".join(f"{each}\n" for each in lines))
    sys.stdout.flush()


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--programs", type=int, default=500)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    asked.add_argument("--failed", type=Path, help="a folder for all that failing programs said")
    asked.add_argument("--show", action="store_true", help="print all that programs said")
    asked = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="thinwire-faults-"))
    plays = []
    with ExitStack() as stack:
        stack.callback(lambda: shutil.rmtree(folder, ignore_errors=True) if here() else None)
        hosts = hosts_of(asked.jobs, stack)
        kinds = asked.kinds if hosts else [each for each in asked.kinds if each not in CUT]
        warm_up()
        gc.freeze()  # ranks that end do not look at, and so copy, all that was made here

        def told(play):
            plays.append(play)
            wrongs = play.wrongs()
            if wrongs:
                say(f"seed {play.program.seed}: {play.program.fault}", *[f"    {each}" for each in wrongs])
            if asked.show or (wrongs and asked.failed):
                heard = [
                    play.program,
                    *play.lines,
                    play.statuses,
                    play.complaints.read_text(errors="replace"),
                ]
                if asked.show:
                    say(*heard)
                else:
                    asked.failed.mkdir(exist_ok=True, parents=True)
                    (asked.failed / f"{play.program.seed}.txt").write_text("\n".join(map(str, heard)))
            play.complaints.unlink()

        seeds = range(asked.seed, asked.seed + asked.programs)
        run([drawn(seed, kinds) for seed in seeds], Stage(asked.jobs, hosts, folder), told)
    failing = sorted(play.program.seed for play in plays if play.wrongs())
    say(*table(plays))
    say(f"{len(plays) - len(failing)} of {len(plays)} as promised; failing seeds: {failing or 'none'}")
    sys.exit(bool(failing))


if __name__ == "__main__":
    main()
