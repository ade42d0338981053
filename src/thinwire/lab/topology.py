"""The layout of a lab as frozen data: links, ranks, addresses, and the environment of each rank.

Nothing here touches the machine.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from thinwire.errors import LabError
from thinwire.lab.gpus import Gpus

INTERFACE = "eth0"
MOST_RANKS = 250
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20}

BURST_S = 0.0005
LEAST_BURST_NBYTES = 8 << 10
TWO_PACKETS_NBYTES = 2 * 1514
QUEUE_S = 0.1
LEAST_QUEUE_NBYTES = 64 << 10
MOST_PACKET_NBYTES = 64 << 10
CUT_PACKET_NBYTES = 16 << 10
LOOPBACK = "loopback"

#: NCCL on a throttled link: sockets only. InfiniBand, plugins and NVLink between hosts would bypass it.
SOCKETS_ONLY = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
#: One socket carries about 10 Gbit/s, several 37 of 40, between two hosts with 8 cores each. With fewer cores
#: their threads keep each other waiting: four hosts on 16 cores send half as much with 4 threads as with one.
FAST_BITS_PER_S = 10 * 10**9
SEVERAL_SOCKETS = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}
CORES_FOR_SEVERAL = 8  # per rank


@dataclass(frozen=True)
class Link:
    """A cable with a token bucket at both ends; the rate counts whole Ethernet frames, headers included.

    Burst: what the link carries in half a millisecond, at least 8 KiB. A link that has been idle lets this
    much through at once, so a message after a pause arrives at most that half millisecond early (0.7 ms at
    100mbit). A smaller bucket overflows whenever the kernel's timer wakes late, and the rate is not reached.

    Packets: the kernel hands TCP to an interface in packets of up to 64 KiB, which a real card would cut. A
    packet larger than the bucket would be cut by `tbf` itself, and at 1gbit some of the pieces are lost. So
    the largest packet is half the bucket. TCP then reaches 95.6 % of the rate with its payload: the rest is
    the 66 bytes of headers in every 1514.

    Queue: 100 ms, at least 64 KiB. It fills only when several hosts send to one, or into one link between
    nodes; when it is full, packets are dropped and counted.
    """

    name: str
    bits_per_s: int
    burst_nbytes: int

    @property
    def queue_nbytes(self) -> int:
        """Bytes that may wait at one end before packets are dropped."""
        return max(int(self.bits_per_s / 8 * QUEUE_S), LEAST_QUEUE_NBYTES, 2 * self.burst_nbytes)


def parse_link(rate: str, burst: str | int | None = None) -> Link:
    """Return the link of a rate such as "1gbit", with the burst given or the one that `Link` explains."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate.strip().lower())
    bits_per_s = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if match is None or bits_per_s < 1000:
        raise LabError(
            f"'{rate}' is no rate; write a number and kbit, mbit or gbit: 800kbit, 100mbit, 2.5gbit"
        )
    default = max(int(bits_per_s / 8 * BURST_S), LEAST_BURST_NBYTES)
    return Link(match[0], bits_per_s, default if burst is None else parse_burst(burst))


def parse_burst(burst: str | int) -> int:
    """Return the bytes of a burst such as 65536, "64k" or "1m"."""
    match = re.fullmatch(r"(\d+)([km]?)", str(burst).strip().lower())
    if match is None:
        raise LabError(f"'{burst}' is no burst; write bytes, KiB or MiB: 65536, 64k, 1m")
    nbytes = int(match[1]) * SIZES[match[2]]
    if nbytes < TWO_PACKETS_NBYTES:
        raise LabError(f"a burst of {nbytes} bytes lets no packet through; use {TWO_PACKETS_NBYTES} or more")
    return nbytes


@dataclass(frozen=True)
class Topology:
    """The ranks and how they are connected.

    One level (`between` is None): every rank is a host of its own, connected to one switch by `link`.
    Two levels: the `per_node` ranks of a node are connected to the node's switch by `link`. Each node's
    switch is connected to a core switch by one cable `between`, which the ranks of the node share.
    """

    nodes: int
    per_node: int
    link: Link
    between: Link | None = None
    loopback: bool = False
    gpus: Gpus | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def packet_nbytes(self) -> int:
        """The largest packet TCP may hand to an interface, which `Link` explains.

        For a slow link between nodes, packets need not be smaller than 16 KiB to fit its bucket: at such
        rates nothing is lost when it cuts them, and fast links inside nodes could not keep up with smaller
        ones.
        """
        largest = min(MOST_PACKET_NBYTES, self.link.burst_nbytes // 2)
        if self.between is None:
            return largest
        return min(largest, max(self.between.burst_nbytes // 2, CUT_PACKET_NBYTES))

    def __str__(self) -> str:
        return f"{self._joined()}, {self.gpus}" if self.gpus else self._joined()

    def _joined(self) -> str:
        if self.loopback:
            return f"{self.world} ranks, loopback, not throttled"
        if self.between is None:
            return f"{self.world} hosts, {self.link.name} links"
        return (
            f"{self.nodes} nodes of {self.per_node} ranks, "
            f"{self.link.name} inside, {self.between.name} between nodes"
        )

    def describe(self) -> dict[str, Any]:
        """Return plain data, which `THINWIRE_LAB` holds as JSON. Loopback has no links."""
        links = {} if self.loopback else {"link": self.link, "between": self.between}
        return {
            "topology": str(self),
            "world": self.world,
            "nodes": self.nodes,
            "per_node": self.per_node,
            "throttled": not self.loopback,
            **{name: link.name for name, link in links.items() if link},
            **{f"{name}_bits_per_s": link.bits_per_s for name, link in links.items() if link},
            **{f"{name}_burst_nbytes": link.burst_nbytes for name, link in links.items() if link},
            **(self.gpus.describe() if self.gpus else {"device": "cpu"}),
        }

    def address(self, rank: int) -> str:
        """Return a rank's address inside the lab: 10.77.NODE.1 and up; one level has a single node 0."""
        if self.loopback:
            return "127.0.0.1"
        node, local = (0, rank) if self.between is None else divmod(rank, self.per_node)
        return f"10.77.{node}.{local + 1}"

    def hosts_file(self) -> str:
        """Lines of /etc/hosts that name the addresses, rank0 and up, as IPv4 and IPv6 sockets write them."""
        names = {self.address(rank): f"rank{rank}" for rank in range(self.world)}
        return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in names.items())

    def nominal(self, source: int, target: int) -> Link | None:
        """Return the slowest link between two ranks; None on loopback."""
        if self.loopback:
            return None
        if self.between is None or source // self.per_node == target // self.per_node:
            return self.link
        return min(self.link, self.between, key=lambda link: link.bits_per_s)

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return a rank's environment: torchrun's variables, the interface to use, and the GPU.

        `TORCHELASTIC_RUN_ID` tells Lightning that the ranks are already started, so it uses RANK and
        WORLD_SIZE as they are. Rank 0 holds the store, so no agent's store is used.

        NCCL refuses two ranks of one host on one GPU. So every rank declares itself a host of its own, also
        the ranks of one node: they send to each other over their links, as they should in a lab.
        """
        interface = "lo" if self.loopback else INTERFACE
        node, local = divmod(rank, self.per_node)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "NODE_RANK": str(node),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world),
            "TORCHELASTIC_RUN_ID": "thinwire-lab",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "NCCL_HOSTID": f"rank{rank}",
            **({} if self.loopback else SOCKETS_ONLY),
            **(self.gpus.environment(rank) if self.gpus else {}),
            "THINWIRE_LAB": json.dumps(self.describe()),
        }

    def defaults(self, cores: int) -> dict[str, str]:
        """Return variables that the user's environment may override; `cores` are the machine's."""
        fast = not self.loopback and self.link.bits_per_s > FAST_BITS_PER_S
        return SEVERAL_SOCKETS if fast and cores >= CORES_FOR_SEVERAL * self.world else {}


@dataclass(frozen=True)
class LabOptions:
    """A topology as command-line options; `topology()` checks them and fills in defaults.

    Either `hosts` (and `link`), or `nodes` and `per_node` (and `inside` and `between`). `burst` is for all.
    The link "loopback" means no link: plain processes, not throttled.
    """

    hosts: int | None = None
    link: str | None = None
    nodes: int | None = None
    per_node: int | None = None
    inside: str | None = None
    between: str | None = None
    burst: str | int | None = None
    loopback: bool = False

    def topology(self) -> Topology:
        """Return the topology, or raise a `LabError` that says what would work."""
        one = {"hosts": self.hosts, "link": self.link}
        two = {"nodes": self.nodes, "per_node": self.per_node, "inside": self.inside, "between": self.between}
        mixed = _given(one) and _given(two)
        if mixed or (self.hosts is None and (self.nodes is None or self.per_node is None)):
            given = ", ".join(_given(one) + _given(two)) or "nothing"
            raise LabError(
                f"a lab is hosts and link (hosts=4, link=1gbit), or nodes, per_node, inside and between "
                f"(nodes=2, per_node=4, inside=10gbit, between=1gbit); got {given}"
            )
        nodes, per_node = self.hosts or self.nodes or 0, 1 if self.hosts is not None else self.per_node or 0
        if not 1 <= nodes * per_node <= MOST_RANKS or min(nodes, per_node) < 1:
            raise LabError(f"a lab has 1 to {MOST_RANKS} ranks; {nodes} x {per_node} is not possible")
        if self.hosts is not None:
            link = "1gbit" if self.link in (None, LOOPBACK) else self.link
            loopback = self.loopback or self.link == LOOPBACK
            return Topology(nodes, 1, parse_link(link, self.burst), None, loopback)
        inside = parse_link(self.inside or "10gbit", self.burst)
        between = parse_link(self.between or "1gbit", self.burst)
        return Topology(nodes, per_node, inside, between, self.loopback)


def _given(options: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items() if value is not None]
