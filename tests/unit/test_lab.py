"""The lab, as far as it goes without root: words, names, environments, and ranks on loopback."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli import lab as cli
from thinwire.lab import Lab, LabError, namespaces, probe
from thinwire.lab.topology import Plan, parse_burst, parse_link

SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
HANG = "import time; print('here', flush=True); time.sleep(60)"


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("text", "bits_per_s", "burst_nbytes"),
    [
        ("800kbit", 800_000, 8192),
        ("100mbit", 100_000_000, 8192),
        ("1gbit", 1_000_000_000, 62_500),
        ("2.5Gbit", 2_500_000_000, 156_250),
        ("10gbit", 10_000_000_000, 625_000),
    ],
)
def test_rates(text, bits_per_s, burst_nbytes):
    link = parse_link(text)
    assert (link.bits_per_s, link.burst_nbytes, link.name) == (bits_per_s, burst_nbytes, text.lower())
    assert link.queue_nbytes >= 2 * link.burst_nbytes


@pytest.mark.parametrize(
    "text", ["", "1 gb", "1g", "fast", "-1gbit", "0gbit", "1e3mbit", "1gbit/s", "0.1kbit"]
)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(LabError, match=r"is no rate; write .* 100mbit"):
        parse_link(text)


def test_bursts():
    assert [parse_burst(each) for each in (65536, "65536", "64k", "64K", "1m")] == [65536] * 4 + [1 << 20]
    assert parse_link("1gbit", "32k").burst_nbytes == 32768
    for wrong, message in (
        ("big", "is no burst"),
        ("-4k", "is no burst"),
        ("1k", "3028 or more"),
        (0, "3028"),
    ):
        with pytest.raises(LabError, match=message):
            parse_burst(wrong)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "got nothing"),
        ({"hosts": 0}, "1 to 250 ranks"),
        ({"hosts": -2}, "1 to 250 ranks"),
        ({"hosts": 1000}, "1 to 250 ranks"),
        ({"nodes": 2}, "got nodes=2"),
        ({"nodes": -2, "per_node": -2}, "1 to 250 ranks"),
        ({"hosts": 2, "between": "1gbit"}, "got hosts=2, between=1gbit"),
        ({"nodes": 2, "per_node": 2, "link": "1gbit"}, "got link=1gbit, nodes=2"),
        ({"hosts": 2, "link": "1 gb"}, "'1 gb' is no rate"),
        ({"nodes": 2, "per_node": 2, "inside": "quick"}, "'quick' is no rate"),
    ],
)
def test_plans_that_make_no_lab(plan, message):
    with pytest.raises(LabError, match=message):
        Lab(**plan)


def test_topologies_describe_themselves():
    assert str(Lab(hosts=4).topology) == "4 hosts, 1gbit links"
    two = Lab(nodes=2, per_node=4).topology
    assert str(two) == "2 nodes of 4 ranks, 10gbit inside, 1gbit between nodes"
    assert two.describe()["between_bits_per_s"] == 10**9
    loopback = Lab(hosts=4, link="1gbit", loopback=True).topology
    assert str(loopback) == "4 ranks, loopback, not throttled"
    assert not loopback.describe()["throttled"]
    assert "link" not in loopback.describe()


def test_packets_fit_the_bucket_of_their_own_link():
    for link in ("800kbit", "100mbit", "1gbit", "10gbit"):
        topology = Lab(hosts=2, link=link).topology
        assert topology.packet_nbytes <= topology.link.burst_nbytes // 2
    assert Lab(nodes=2, per_node=2, inside="10gbit", between="100mbit").topology.packet_nbytes == 16384
    assert Lab(nodes=2, per_node=2, inside="10gbit", between="1gbit").topology.packet_nbytes == 31250


def test_environment_is_that_of_torchrun():
    one = Plan(hosts=4).topology()
    told = one.environment(2, 29500)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"]) == ("2", "4", "10.77.0.1")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("0", "1", "2")
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == told["TP_SOCKET_IFNAME"] == "eth0"
    assert json.loads(told["THINWIRE_LAB"])["link"] == "1gbit"
    two = Plan(nodes=2, per_node=4).topology()
    told = two.environment(6, 29500)
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("2", "4", "1")
    assert len({two.address(rank) for rank in range(8)}) == 8
    assert [two.nominal(0, rank).name for rank in (1, 4)] == ["10gbit", "1gbit"]


def test_names_say_who_owns_them(monkeypatch, tmp_path):
    made = namespaces.names(3, 2)
    assert all(namespaces.NAME.fullmatch(name) for name in made)
    assert len(set(made)) == 3
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path)
    dead = f"tw-{os.getpid()}-1-0-r0"  # this number, but another process: it started at another time
    for name in (*made, dead, "tw-1-x-0-r0", "mine", f"{dead}-mine"):
        (tmp_path / name).touch()
    assert namespaces.leftovers() == [dead]
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path / "nowhere")
    assert namespaces.clean() == []


def test_without_root_or_iproute2_it_says_what_still_works(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "_find", lambda program: program)
    with pytest.raises(LabError, match=r"needs root: run it with sudo. --loopback"), Lab(hosts=2):
        pass
    monkeypatch.setattr(namespaces, "_find", lambda program: None if program == "tc" else program)
    with pytest.raises(LabError, match=r"needs `tc`: install iproute2 .*--loopback"), Lab(hosts=2):
        pass


def test_loopback_runs_ranks_and_measures_nothing(capsys):
    with Lab(hosts=2, loopback=True) as lab:
        assert lab.counters() is None
        run = lab.run(python(SAY), timeout_s=30)
    assert run.ok
    assert run.returncodes == (0, 0)
    assert run.outputs == ("rank 0 of 2\n", "rank 1 of 2\n")
    assert run.counters is None
    assert run.node_counters is None
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


def test_the_users_environment_and_folder_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MINE'], os.getcwd())"
    with Lab(hosts=1, loopback=True) as lab:
        run = lab.run(python(code), env={"MINE": "yes"}, cwd=tmp_path, echo=False, timeout_s=30)
    assert run.outputs == (f"3 yes {tmp_path}\n",)


def test_a_rank_that_fails_ends_the_others():
    code = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit(7)\n{HANG}"
    with Lab(hosts=2, loopback=True) as lab:
        run = lab.run(python(code), timeout_s=30, echo=False)
    assert run.returncodes == (-signal.SIGTERM, 7)
    assert not run.ok
    assert not run.timed_out
    assert run.seconds < 20


def test_time_is_up_even_for_those_who_ignore_sigterm():
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANG}"
    with Lab(hosts=1, loopback=True) as lab:
        session = lab.start(python(code), echo=False)
        _wait_for(lambda: session.output(0) == "here\n")
        run = session.wait(0)
    assert run.timed_out
    assert run.returncodes == (-signal.SIGKILL,)


def test_a_rank_can_be_killed_while_the_others_go_on(tmp_path):
    gate = tmp_path / "gate"
    code = f"""
import os, pathlib, time
print('here', flush=True)
while os.environ['RANK'] == '1' or not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.01)
"""
    with Lab(hosts=2, loopback=True) as lab:
        session = lab.start(python(code), echo=False)
        _wait_for(lambda: session.output(1) == "here\n")
        session.kill(1)
        session.processes[1].wait(10)
        gate.touch()
        run = session.wait(30, stop_on_failure=False)
    assert run.returncodes == (0, -signal.SIGKILL)


def _wait_for(happened, seconds=30):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_leaving_the_block_ends_what_still_runs():
    with Lab(hosts=2, loopback=True) as lab:
        session = lab.start(python(HANG), echo=False)
    assert [process.returncode for process in session.processes] == [-signal.SIGTERM] * 2
    with pytest.raises(LabError, match="not open"):
        lab.run(python(SAY))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_commands_that_cannot_start():
    with Lab(hosts=1, loopback=True) as lab:
        with pytest.raises(LabError, match="no program 'no-such-program'"):
            lab.run(["no-such-program"])
        with pytest.raises(LabError, match="no command"):
            lab.run([])


def test_what_is_measured_covers_every_link():
    assert probe.pairs(3, 1, two_levels=False) == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert probe.pairs(4, 2, two_levels=True) == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert probe.pairs(2, 1, two_levels=True) == [(0, 1), (1, 0)]
    assert probe.pairs(1, 1, two_levels=False) == []


def command_line(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def test_command_line_on_loopback():
    shown = command_line("run", "--hosts", "2", "--loopback", "--timeout", "30", "--", *python(SAY))
    assert shown.exit_code == 0, shown.output
    assert "[1] rank 1 of 2" in shown.stdout
    assert "loopback, not throttled" in shown.stdout
    found = json.loads(command_line("run", "--hosts", "1", "--loopback", "--json", *python(SAY)).stdout)
    assert (found["outputs"], found["throttled"], found["counters"]) == (["rank 0 of 1\n"], False, None)


def test_command_line_passes_on_the_exit_status():
    def status(code, *options):
        return command_line("run", "--hosts", "1", "--loopback", *options, "--", *python(code)).exit_code

    assert status("raise SystemExit(5)") == 5
    assert status("import os; os.kill(os.getpid(), 9)") == 128 + 9
    assert status(HANG, "--timeout", "0.3") == 124


def test_check_on_loopback_says_that_nothing_is_throttled():
    shown = command_line("check", "--loopback", "--seconds", "0.1")
    assert shown.exit_code == 0, shown.output
    assert "not throttled" in shown.stdout
    found = json.loads(command_line("check", "--loopback", "--seconds", "0.1", "--json").stdout)
    assert [link["nominal_mbit_per_s"] for link in found["links"]] == [None, None]


def test_check_needs_a_link():
    with Lab(hosts=1, loopback=True) as lab, pytest.raises(LabError, match="two hosts or more"):
        probe.check(lab)


def test_clean_prints_what_it_removed(monkeypatch):
    monkeypatch.setattr(namespaces, "FOLDER", Path("/nowhere"))
    assert json.loads(command_line("clean", "--json").stdout) == {"removed": []}
    assert "nothing to remove" in command_line("clean").stdout
