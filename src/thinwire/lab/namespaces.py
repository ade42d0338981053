"""Build a topology out of network namespaces with `ip` and `tc`, read its counters, remove it.

Every rank has a namespace of its own, and the switches share one more, so nothing is made in the namespace
the machine itself uses. A namespace is called tw-PID-START-NUMBER-ROLE: PID and START (the process's start
time, since process numbers are used again) name the owner, NUMBER counts the owner's labs.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import LabError
from thinwire.lab import tools
from thinwire.lab.topology import INTERFACE, Link, Topology

FOLDER = Path("/run/netns")
NAME = re.compile(r"tw-(\d+)-(\d+)-(\d+)-(sw|r\d+)")
WITHOUT = "--link loopback (link='loopback') works without, unthrottled"
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"

# `ip netns exec` gives the command its own view of the file systems. In that view only, a longer /etc/hosts
# hides the machine's: no name server answers inside, and libraries warn about an address without a name. The
# file is in memory and ends with the last process that sees it. If this fails, the command runs without it.
ADD_HOSTS = """
hosts=$1; shift
{
    mount -t tmpfs lab /tmp && {
        { cat /etc/hosts; printf '%s' "$hosts"; } > /tmp/hosts
        mount --bind /tmp/hosts /etc/hosts
        umount /tmp
    }
} > /dev/null 2>&1
exec "$@"
"""


@dataclass(frozen=True)
class Counters:
    """What the interface of one host (or of one node, between nodes) has counted, headers included.

    The kernel passes TCP to the interface in packets of many segments, each counted with one header. A card
    would cut them into frames of 1514 bytes, each with a header. The throttle counts these frames (`framed`
    here), and they take the time on the link. Both are read from the kernel; neither is computed.
    """

    sent_nbytes: int
    received_nbytes: int
    sent_packets: int
    received_packets: int
    sent_framed_nbytes: int
    received_framed_nbytes: int
    sent_frames: int
    received_frames: int
    dropped_frames: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Names:
    """The namespaces of one lab."""

    prefix: str
    world: int

    @property
    def switch(self) -> str:
        """The namespace of all switches."""
        return f"{self.prefix}-sw"

    def host(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{self.prefix}-r{rank}"

    def __iter__(self) -> Iterator[str]:
        yield self.switch
        yield from (self.host(rank) for rank in range(self.world))


def names(number: int, world: int) -> Names:
    """Return names that name this process as the owner."""
    pid = os.getpid()
    return Names(f"tw-{pid}-{start_time(pid)}-{number}", world)


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])  # the program's name may hold spaces and brackets


def require() -> None:
    """Raise a `LabError` if this machine or user cannot build namespaces."""
    for program in tools.PROGRAMS:
        try:
            tools.need(program)
        except LabError as error:
            raise LabError(f"{error}. {WITHOUT}") from None
    if os.geteuid() != 0:
        raise LabError(f"the lab makes network namespaces, which needs root: run it with sudo. {WITHOUT}")


def run(program: str, *arguments: str, batch: list[str] | None = None) -> str:
    """Call `ip` or `tc`; `batch` holds lines for its -batch mode. Its error output becomes a `LabError`.

    It runs in its own session, so that Ctrl-C at the terminal does not stop it half way.
    """
    words = [*arguments, *(["-batch", "-"] if batch else [])]
    done = subprocess.run(
        [*tools.command(program), *words],
        input="\n".join(batch) + "\n" if batch else "",
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    if done.returncode:
        complaint = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LabError(f"`{' '.join([program, *words])}` failed: {complaint}. {WITHOUT}")
    return done.stdout


def build(topology: Topology, made: Names) -> None:
    """Make the namespaces, cables and throttles. If this fails, `remove` deletes what was made.

    Inside, TCP's congestion control is reno, which every kernel has: the same on every machine. It reaches
    the rate at 10gbit, where bbr, the default of some, was measured 15 % below.
    """
    run("ip", batch=[f"netns add {name}" for name in made])
    run("ip", "-n", made.switch, batch=_switch_lines(topology, made))
    run("tc", "-n", made.switch, batch=_switch_throttles(topology))
    for rank in range(topology.world):
        host = made.host(rank)
        run("ip", "-n", host, batch=_host_lines(topology, rank))
        run("tc", "-n", host, batch=[_throttle(INTERFACE, topology.link)])
        run("ip", "netns", "exec", host, "sh", "-c", f"echo reno > {CONGESTION}")


def _switch_lines(topology: Topology, made: Names) -> list[str]:
    """Return lines for the switches, the cables between them, and the hosts' cables."""
    lines = ["link set lo up", *_bridge("core")]
    for node in range(topology.nodes if topology.between else 0):
        lines += [
            *_bridge(f"node{node}"),
            f"link add up{node} type veth peer name down{node}",
            *_plug(f"up{node}", f"node{node}", topology.packet_nbytes),
            *_plug(f"down{node}", "core", topology.packet_nbytes),
        ]
    for rank in range(topology.world):
        switch = f"node{rank // topology.per_node}" if topology.between else "core"
        lines += [
            f"link add p{rank} type veth peer name {INTERFACE} netns {made.host(rank)}",
            *_plug(f"p{rank}", switch, topology.packet_nbytes),
        ]
    return lines


def _bridge(name: str) -> list[str]:
    """Return lines for a switch that learns addresses and sends nothing by itself."""
    return [
        f"link add {name} type bridge mcast_snooping 0",
        f"link set {name} addrgenmode none",
        f"link set {name} up",
    ]


def _plug(port: str, switch: str, packet_nbytes: int) -> list[str]:
    return [
        f"link set {port} addrgenmode none gso_max_size {packet_nbytes}",
        f"link set {port} master {switch} up",
    ]


def _host_lines(topology: Topology, rank: int) -> list[str]:
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none gso_max_size {topology.packet_nbytes}",
        f"address add {topology.address(rank)}/16 dev {INTERFACE}",
        f"link set {INTERFACE} up",
    ]


def _switch_throttles(topology: Topology) -> list[str]:
    lines = [_throttle(f"p{rank}", topology.link) for rank in range(topology.world)]
    if topology.between:
        ports = [f"{end}{node}" for node in range(topology.nodes) for end in ("up", "down")]
        lines += [_throttle(port, topology.between) for port in ports]
    return lines


def _throttle(port: str, link: Link) -> str:
    """Return the line for a token bucket, which throttles what leaves a port: one at each end of a cable."""
    return (
        f"qdisc add dev {port} root tbf rate {link.bits_per_s}bit "
        f"burst {link.burst_nbytes}b limit {link.queue_nbytes}b"
    )


def enter(made: Names, rank: int, hosts: str) -> list[str]:
    """Return the words before a command that run it on this rank; `hosts` is added to its /etc/hosts."""
    return [*tools.command("ip"), "netns", "exec", made.host(rank), "sh", "-c", ADD_HOSTS, "sh", hosts]


def counters(made: Names) -> tuple[Counters, ...]:
    """Return every host's counters: of its own interface, and of the throttles at both ends of its cable."""
    ports = _throttles(made.switch)
    rows = []
    for rank in range(made.world):
        host = made.host(rank)
        near = _throttles(host)[INTERFACE]
        rows.append(_counters(_interfaces(host)[INTERFACE], near, ports[f"p{rank}"]))
    return tuple(rows)


def node_counters(made: Names, nodes: int) -> tuple[Counters, ...]:
    """Return every node's counters: of the cable that joins it to the core switch."""
    links, ports = _interfaces(made.switch), _throttles(made.switch)
    return tuple(
        _counters(links[f"up{node}"], ports[f"up{node}"], ports[f"down{node}"]) for node in range(nodes)
    )


def _counters(interface: dict[str, Any], near: dict[str, int], far: dict[str, int]) -> Counters:
    """Return the counters of one cable: of interface and throttle at the near end, and the far throttle."""
    sent, received = interface["tx"], interface["rx"]
    return Counters(
        sent_nbytes=sent["bytes"],
        received_nbytes=received["bytes"],
        sent_packets=sent["packets"],
        received_packets=received["packets"],
        sent_framed_nbytes=near["bytes"],
        received_framed_nbytes=far["bytes"],
        sent_frames=near["packets"],
        received_frames=far["packets"],
        dropped_frames=near["drops"] + far["drops"] + sent["dropped"] + received["dropped"],
    )


def _interfaces(namespace: str) -> dict[str, Any]:
    links = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show"))
    return {each["ifname"]: each["stats64"] for each in links}


def _throttles(namespace: str) -> dict[str, Any]:
    disciplines = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show"))
    return {each["dev"]: each for each in disciplines if each["kind"] == "tbf"}


def remove(doomed: list[str], patience_s: float = 5.0) -> list[str]:
    """Kill the processes inside these namespaces and delete them; return the names deleted.

    If one cannot be deleted, the others still are; its error is raised at the end.
    """
    present = [name for name in doomed if (FOLDER / name).exists()]
    end = time.monotonic() + patience_s
    while time.monotonic() < end and max(map(_kill_inside, present), default=0):
        time.sleep(0.02)
    deleted, complaints = [], []
    for name in present:
        try:
            run("ip", "netns", "delete", name)
            deleted.append(name)
        except LabError as error:
            complaints += [error] if (FOLDER / name).exists() else []
    if complaints:
        raise complaints[0]
    return deleted


def _kill_inside(name: str) -> int:
    """Kill the processes of one namespace, and only those; return how many there were."""
    if not (FOLDER / name).exists():
        return 0
    pids = [int(pid) for pid in run("ip", "netns", "pids", name).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def leftovers() -> list[str]:
    """Return the namespaces of labs whose owner is dead, and no others."""
    if not FOLDER.is_dir():
        return []
    matches = [NAME.fullmatch(path.name) for path in sorted(FOLDER.iterdir())]
    return [match[0] for match in matches if match and start_time(int(match[1])) != int(match[2])]


def clean() -> list[str]:
    """Remove namespaces that killed labs left behind; return their names."""
    doomed = leftovers()
    if doomed:
        require()
    return remove(doomed)
