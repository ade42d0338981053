"""Measure the real rates of a lab's links with plain TCP sockets.

This file runs as a program on every rank, with the standard library only. It measures pairs of ranks one
after the other; the receiver of each pair prints one line of JSON.
"""

import json
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.lab.hosts import Lab

FIRST_PORT = 29000
CHUNK_NBYTES = 1 << 18
PATIENCE_S = 60.0
STREAMS, FAST_MBIT_PER_S = 4, 10_000  #: connections of a pair on a faster link, which one does not fill


def pairs(world: int, per_node: int, two_levels: bool) -> list[tuple[int, int]]:
    """Pair rank 0 and every other host, both ways; on two levels, its neighbour and a rank of other nodes."""
    others = list(range(1, world))
    if two_levels:
        others = [1] * (per_node > 1) + list(range(per_node, world, per_node))
    return [pair for other in others for pair in ((0, other), (other, 0))]


def check(lab: "Lab", seconds: float = 1.0) -> list[dict[str, Any]]:
    """Measure every pair for `seconds`; return payload in Mbit/s and the nominal rate (None on loopback).

    Links of more than 10gbit are measured with four connections at once, all others with one.
    """
    topology = lab.topology
    chosen = pairs(topology.world, topology.per_node, topology.between is not None)
    if not chosen:
        raise _error("a lab of one rank has no link to measure; use two hosts or more")
    plan = [[*pair, topology.address(pair[1]), _streams(topology.nominal(*pair))] for pair in chosen]
    command = [sys.executable, __file__, json.dumps(plan), str(seconds)]
    run = lab.run(command, timeout_s=PATIENCE_S + 2 * seconds * len(plan), echo=False)
    if not run.ok:
        raise _error(f"the links could not be measured: {' '.join(''.join(run.outputs).split())}")
    measured = {(each["from"], each["to"]): each for text in run.outputs for each in _lines(text)}
    return [_compare(measured[pair], topology.nominal(*pair)) for pair in chosen]


def _streams(link: Any) -> int:
    return STREAMS if link and link.bits_per_s / 1e6 > FAST_MBIT_PER_S else 1


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _error(message: str) -> Exception:
    from thinwire.errors import LabError  # not at the top: ranks run this file alone

    return LabError(message)


def _compare(measured: dict[str, Any], link: Any) -> dict[str, Any]:
    nominal = link.bits_per_s / 1e6 if link else None
    rate = measured["nbytes"] * 8 / measured["seconds"] / 1e6
    return {
        "from": measured["from"],
        "to": measured["to"],
        "nominal_mbit_per_s": nominal,
        "measured_mbit_per_s": rate,
        "share": rate / nominal if nominal else None,
        "connections": _streams(link),
    }


def send(address: str, port: int, seconds: float, streams: int = 1) -> None:
    """Send for `seconds`, once the receiver listens, and wait until all has arrived."""
    senders = [threading.Thread(target=_send, args=(address, port, seconds)) for _ in range(streams)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def _send(address: str, port: int, seconds: float) -> None:
    with _connect(address, port) as connection:
        chunk, end = bytes(CHUNK_NBYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def _connect(address: str, port: int) -> socket.socket:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def receive(address: str, port: int, streams: int = 1) -> tuple[int, float]:
    """Return bytes after the first chunk of each connection, and seconds from the first to the last."""
    with socket.create_server((address, port)) as server:
        server.settimeout(PATIENCE_S)
        connections = [server.accept()[0] for _ in range(streams)]
    results: list[tuple[int, float, float]] = []
    receivers = [threading.Thread(target=_receive, args=(each, results)) for each in connections]
    for each in receivers:
        each.start()
    for each in receivers:
        each.join()
    counts, starts, ends = zip(*results, strict=True)
    return sum(counts), max(ends) - min(starts)


def _receive(connection: socket.socket, received: list[tuple[int, float, float]]) -> None:
    with connection:
        buffer, nbytes = bytearray(CHUNK_NBYTES), 0
        connection.recv_into(buffer)
        start = time.monotonic()
        while got := connection.recv_into(buffer):
            nbytes += got
        received.append((nbytes, start, time.monotonic()))


def main() -> None:
    """Measure the pairs of this rank."""
    rank, seconds = int(os.environ["RANK"]), float(sys.argv[2])
    for number, (source, target, address, streams) in enumerate(json.loads(sys.argv[1])):
        if rank == source:
            send(address, FIRST_PORT + number, seconds, streams)
        if rank == target:
            nbytes, took = receive(address, FIRST_PORT + number, streams)
            line = {"from": source, "to": target, "nbytes": nbytes, "seconds": took}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
