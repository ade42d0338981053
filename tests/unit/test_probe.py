"""The program that measures links: what is counted between two sockets, and who sends to whom, when."""

import json
import sys
import threading

import pytest

from thinwire.lab import probe

HERE = "127.0.0.1"


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with probe.socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("streams", [1, 3])
def test_all_bytes_after_the_first_chunk_are_counted(port, streams, monkeypatch):
    sent, door = [], threading.Lock()
    create = probe.socket.create_connection

    def connection(address):
        made = create(address)
        with door:
            sent.append(0)
            number = len(sent) - 1

        class Counting:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                made.close()

            def sendall(self, chunk):
                assert len(chunk) == probe.CHUNK_NBYTES
                made.sendall(chunk)
                sent[number] += len(chunk)

            def shutdown(self, how):
                made.shutdown(how)

            def recv(self, count):
                return made.recv(count)

        return Counting()

    monkeypatch.setattr(probe.socket, "create_connection", connection)
    results = []
    receiver = threading.Thread(target=lambda: results.append(probe.receive(HERE, port, streams)))
    receiver.start()
    probe.send(HERE, port, 0.2, streams)
    receiver.join(60)
    ((nbytes, seconds),) = results
    assert len(sent) == streams
    assert all(sent), "every connection sends"
    assert sum(sent) - streams * probe.CHUNK_NBYTES <= nbytes < sum(sent), "less the first read of each"
    assert 0.1 < seconds < 30


def test_a_sender_waits_until_somebody_listens(port, monkeypatch):
    monkeypatch.setattr(probe, "PATIENCE_S", 0.1)
    with pytest.raises(ConnectionRefusedError):
        probe._connect(HERE, port)
    monkeypatch.setattr(probe, "PATIENCE_S", 60.0)
    servers = []
    later = threading.Timer(0.1, lambda: servers.append(probe.socket.create_server((HERE, port))))
    later.start()
    probe._connect(HERE, port).close()
    servers[0].close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_pairs_take_their_turns_on_ports_of_their_own(rank, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(probe, "send", lambda *words: done.append(("send", *words)))
    monkeypatch.setattr(probe, "receive", lambda *words: done.append(("receive", *words)) or (700, 0.5))
    plan = [[0, 1, "b", 1], [1, 0, "a", 1], [0, 2, "c", 4]]
    monkeypatch.setattr(sys, "argv", ["probe", json.dumps(plan), "1.5"])
    monkeypatch.setenv("RANK", str(rank))
    probe.main()
    first = probe.FIRST_PORT
    everything = [
        [("send", "b", first, 1.5, 1), ("receive", "a", first + 1, 1), ("send", "c", first + 2, 1.5, 4)],
        [("receive", "b", first, 1), ("send", "a", first + 1, 1.5, 1)],
        [("receive", "c", first + 2, 4)],
    ]
    assert done == everything[rank]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ways = [[(1, 0)], [(0, 1)], [(0, 2)]][rank]
    assert lines == [{"from": one, "to": other, "nbytes": 700, "seconds": 0.5} for one, other in ways]
