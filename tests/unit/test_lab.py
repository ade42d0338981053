"""The lab, as far as it goes without root: words, names, environments, and ranks on loopback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire import machine
from thinwire.cli import lab as cli
from thinwire.lab import Gpus, Lab, LabError, clean, gpus, hosts, mps, namespaces, probe, tools
from thinwire.lab.topology import LabOptions, parse_burst, parse_link

SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
HANG = "import time; print('here', flush=True); time.sleep(60)"


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("text", "bits_per_s", "burst_nbytes", "queue_nbytes"),
    [
        ("800kbit", 800_000, 8192, 64 << 10),
        ("100mbit", 100_000_000, 8192, 1_250_000),
        ("1gbit", 1_000_000_000, 62_500, 12_500_000),
        ("2.5Gbit", 2_500_000_000, 156_250, 31_250_000),
        ("10gbit", 10_000_000_000, 625_000, 125_000_000),
    ],
)
def test_rates(text, bits_per_s, burst_nbytes, queue_nbytes):
    link = parse_link(text)
    assert (link.bits_per_s, link.burst_nbytes, link.name) == (bits_per_s, burst_nbytes, text.lower())
    assert link.queue_nbytes == queue_nbytes  # a tenth of a second, or 64 KiB
    assert parse_link(text, 1 << 30).queue_nbytes == 2 << 30  # and never less than two bursts


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
    assert Lab(hosts=4, link="loopback").topology == Lab(hosts=4, loopback=True).topology
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
    one = LabOptions(hosts=4).topology()
    told = one.environment(2, 29500)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"]) == ("2", "4", "10.77.0.1")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("0", "1", "2")
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == told["TP_SOCKET_IFNAME"] == "eth0"
    assert json.loads(told["THINWIRE_LAB"])["link"] == "1gbit"
    assert (told["ROLE_RANK"], told["ROLE_WORLD_SIZE"], told["NODE_RANK"]) == ("2", "4", "2")
    assert told["TORCHELASTIC_USE_AGENT_STORE"] == "False", "rank 0 holds the store"
    two = LabOptions(nodes=2, per_node=4).topology()
    told = two.environment(6, 29500)
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("2", "4", "1")
    assert len({two.address(rank) for rank in range(8)}) == 8
    assert [two.nominal(0, rank).name for rank in (1, 4)] == ["10gbit", "1gbit"]


@pytest.mark.parametrize("words", [{"hosts": 2}, {"nodes": 1, "per_node": 2}, {"hosts": 2, "loopback": True}])
def test_lightning_takes_the_labs_ranks_as_they_are(words, monkeypatch):
    """Whether a script says devices=2, or devices=1 and num_nodes=2; without it ranks were 0 and 2 of 2."""
    environments = pytest.importorskip("lightning.fabric.plugins.environments")
    topology = LabOptions(**words).topology()
    for name, value in topology.environment(1, 29500).items():
        monkeypatch.setenv(name, value)
    assert environments.TorchElasticEnvironment.detect()
    environment = environments.TorchElasticEnvironment()
    for devices, nodes in ((2, 1), (1, 2)):
        environment.validate_settings(devices, nodes)
    assert (environment.global_rank(), environment.world_size()) == (1, 2)
    assert (environment.node_rank(), environment.local_rank()) == divmod(1, topology.per_node)
    assert environments.LightningEnvironment().node_rank() == environment.node_rank()
    with pytest.raises(ValueError, match="does not match the world size"):
        environment.validate_settings(4, 1)


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


def test_only_what_is_left_over_needs_root(monkeypatch, tmp_path):
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools, "find", lambda program: Path(program))
    assert namespaces.clean() == []
    (tmp_path / f"tw-{os.getpid()}-1-0-r0").touch()
    with pytest.raises(LabError, match="needs root"):
        namespaces.clean()


def test_namespaces_are_removed_with_their_processes(monkeypatch, tmp_path):
    """One that cannot be removed does not keep the others; one that is gone already is no error."""
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path)
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).touch()
    inside, killed = {"a": [11, 12], "b": [], "c": [13], "d": []}, []

    def run(*words):
        name = words[-1]
        if words[:3] == ("ip", "netns", "pids"):
            found, inside[name] = inside[name], []
            return " ".join(map(str, found))
        assert words[:3] == ("ip", "netns", "delete")
        if name == "d":
            (tmp_path / name).unlink()
        if name in "bd":
            raise LabError(f"{name} is busy")
        (tmp_path / name).unlink()
        return ""

    def kill(pid, number):
        killed.append((pid, number))
        if pid == 12:
            raise ProcessLookupError

    monkeypatch.setattr(namespaces, "run", run)
    monkeypatch.setattr(namespaces.os, "kill", kill)
    with pytest.raises(LabError, match="b is busy"):
        namespaces.remove(["a", "b", "nowhere", "c", "d"])
    assert killed == [(pid, signal.SIGKILL) for pid in (11, 12, 13)]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    monkeypatch.setattr(
        namespaces, "run", lambda *words: "" if "pids" in words else (tmp_path / "b").unlink()
    )
    assert namespaces.remove(["b", "a"]) == ["b"]


def test_without_root_or_iproute2_it_says_what_still_works(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools, "find", lambda program: Path(program))
    with pytest.raises(LabError, match=r"needs root: run it with sudo. --link loopback"), Lab(hosts=2):
        pass
    monkeypatch.setattr(tools, "find", lambda program: None if program == "tc" else Path(program))
    with (
        pytest.raises(LabError, match=r"needs `tc`: install iproute2 .*THINWIRE_TC.*--link loopback"),
        Lab(hosts=2),
    ):
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
    report = json.loads(command_line("run", "--hosts", "1", "--loopback", "--json", *python(SAY)).stdout)
    assert (report["outputs"], report["throttled"], report["counters"]) == (["rank 0 of 1\n"], False, None)


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
    report = json.loads(command_line("check", "--loopback", "--seconds", "0.1", "--json").stdout)
    assert [link["nominal_mbit_per_s"] for link in report["links"]] == [None, None]


def test_check_needs_a_link():
    with Lab(hosts=1, loopback=True) as lab, pytest.raises(LabError, match="two hosts or more"):
        probe.check(lab)


def test_clean_prints_what_it_removed(monkeypatch):
    monkeypatch.setattr(namespaces, "FOLDER", Path("/nowhere"))
    assert json.loads(command_line("clean", "--json").stdout) == {"removed": []}
    assert "nothing to remove" in command_line("clean").stdout


# GPUs: programs that only talk like NVIDIA's

SMI = """#!/bin/sh
for number in $(seq COUNT); do echo "NVIDIA Fake, 570.1"; done
"""
#: Writes down how it was called. As a daemon it is a process of its own, until it is told to quit.
CONTROL = """#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:-USUAL}
if [ "$1" = --serve ]; then
    while [ ! -e "$pipe/quit" ]; do sleep 0.02; done
    rm -f "$pipe/control"
elif [ "$1" = -d ]; then
    echo "start $pipe ${CUDA_VISIBLE_DEVICES-unset}" >> LOG
    WRONG
    "$0" --serve > /dev/null 2>&1 &
    touch "$pipe/control"
else
    read words
    [ -e "$pipe/control" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
    if [ "$words" = quit ]; then
        echo "quit $pipe" >> LOG
        QUIT
    fi
fi
"""
TOLD = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NCCL_HOSTID"
TELL = f"import os; print(*(os.environ.get(name, 'unset') for name in {TOLD}))"


class Fakes:
    """A folder of programs on PATH, and what was asked of them."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.usual, self.log = folder / "bin", folder / "usual", folder / "log"
        self.folder.mkdir()
        self.usual.mkdir()
        monkeypatch.setenv("PATH", str(self.folder), prepend=":")
        monkeypatch.setattr(mps, "USUAL", str(self.usual))
        monkeypatch.setattr(mps, "PATIENCE_S", 2.0)
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"):
            monkeypatch.delenv(name, raising=False)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def gpus(self, count):
        self.write("nvidia-smi", SMI.replace("COUNT", str(count)))
        gpus.installed.cache_clear()

    def control(self, wrong="", quitting='touch "$pipe/quit"'):
        text = CONTROL.replace("USUAL", str(self.usual)).replace("LOG", str(self.log))
        self.write(mps.CONTROL, text.replace("WRONG", wrong).replace("QUIT", quitting))

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    made = Fakes(tmp_path, monkeypatch)
    made.gpus(1)
    made.control()
    yield made
    gpus.installed.cache_clear()


def told(hosts=2, **more):
    """What every rank of a lab was told, and the lab."""
    with Lab(hosts, loopback=True, **more) as lab:
        run = lab.run(python(TELL), timeout_s=30, echo=False)
    return [dict(zip(TOLD, each.split(), strict=True)) for each in run.outputs], lab


def daemons():
    """Processes of MPS, real or not, that a lab of this process started."""
    mark = f"tw-mps-{os.getpid()}-".encode()
    started = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text().strip() == mps.COMM and mark in (path / "environ").read_bytes():
                started.append(path.name)
        except OSError:
            continue
    return started


def test_the_gpus_that_are_seen_are_those_of_cuda(fakes, monkeypatch):
    fakes.gpus(4)

    def seen(listed):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        return [each.token for each in gpus.visible()]

    assert [each.token for each in gpus.visible()] == ["0", "1", "2", "3"]
    assert seen("2,0") == ["2", "0"]
    assert seen("1,7,0") == ["1"]  # as CUDA has it, nothing counts behind a wrong one
    assert seen("GPU-8a, GPU-9b") == ["GPU-8a", "GPU-9b"]
    assert seen("") == seen("-1") == seen("none") == []
    assert gpus.installed() == (("NVIDIA Fake", "570.1"),) * 4


def test_gpus_are_found_without_nvidia_smi(fakes, tmp_path, monkeypatch):
    (fakes.folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.setattr(gpus, "FOLDER", tmp_path / "driver")
    monkeypatch.setattr(gpus, "NODES", tmp_path / "dev")
    assert gpus.visible() == ()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    gpus.installed.cache_clear()
    assert [each.name for each in gpus.visible()] == ["NVIDIA GPU"] * 2
    (tmp_path / "driver" / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "driver" / "gpus" / "0000:01:00.0" / "information").write_text(
        "Model: \t NVIDIA H200\nIRQ: 3\n"
    )
    (tmp_path / "driver" / "version").write_text("NVRM version: NVIDIA UNIX Module  570.86.15  Release\n")
    gpus.installed.cache_clear()
    assert gpus.installed() == (("NVIDIA H200", "570.86.15"),)


@pytest.mark.parametrize(
    ("count", "nodes", "per_node", "expected"),
    [
        (1, 3, 1, [("0", None)] * 3),
        (2, 3, 1, [("0", "a"), ("0", "b"), ("0", "a")]),
        (1, 2, 2, [("0", None)] * 4),
        (2, 2, 2, [("0", None), ("1", None)] * 2),
        (2, 1, 3, [("0", "a"), ("0", "b"), ("0", "a")]),
        (4, 2, 2, [("0", "a,b"), ("1", "a,b"), ("0", "c,d"), ("1", "c,d")]),
        (3, 2, 2, [("0", "a,b"), ("1", "a,b"), ("0", "c,a"), ("1", "c,a")]),
    ],
)
def test_ranks_take_gpus_in_turn(count, nodes, per_node, expected):
    """`set_device(LOCAL_RANK)` works everywhere, and no node sees a GPU twice."""
    devices = tuple(gpus.Gpu("NVIDIA Fake", "abcd"[each]) for each in range(count))
    used = Gpus(devices, per_node, nodes * per_node)
    given = [used.environment(rank) for rank in range(nodes * per_node)]
    assert [(each["LOCAL_RANK"], each.get("CUDA_VISIBLE_DEVICES")) for each in given] == expected
    assert used.shared == (nodes * per_node > count)
    for rank, (local, listed) in enumerate(expected):
        seen = listed.split(",") if listed else [each.token for each in devices]
        assert seen[int(local)] == devices[used.of(rank)].token


def test_every_rank_is_a_host_to_nccl_and_stays_on_its_link():
    for plan in (LabOptions(hosts=2), LabOptions(nodes=2, per_node=2)):
        topology = plan.topology()
        given = [topology.environment(rank, 29500) for rank in range(topology.world)]
        assert len({each["NCCL_HOSTID"] for each in given}) == topology.world
        assert {(each["NCCL_NET"], each["NCCL_IB_DISABLE"]) for each in given} == {("Socket", "1")}
    assert "NCCL_NET" not in LabOptions(hosts=2, loopback=True).topology().environment(0, 29500)
    assert LabOptions(hosts=2, link="10gbit").topology().defaults(64) == {}
    assert LabOptions(hosts=2, link="40gbit").topology().defaults(16)["NCCL_NSOCKS_PERTHREAD"] == "2"
    assert LabOptions(hosts=4, link="40gbit").topology().defaults(16) == {}
    assert LabOptions(hosts=2, loopback=True).topology().defaults(16) == {}


def test_the_users_word_on_sockets_counts(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "1")
    monkeypatch.setattr(Lab(hosts=1).topology.__class__, "defaults", lambda *_: {"NCCL_SOCKET_NTHREADS": "4"})
    with Lab(hosts=1, loopback=True, device="cpu") as lab:
        code = "import os; print(os.environ['NCCL_SOCKET_NTHREADS'])"
        assert lab.run(python(code), timeout_s=30, echo=False).outputs == ("1\n",)


def test_hosts_that_share_a_gpu_have_a_daemon_while_the_lab_is_open(fakes):
    ranks, lab = told(device="cuda")
    (folder,) = {Path(each["CUDA_MPS_PIPE_DIRECTORY"]).parent for each in ranks}
    assert [each["NCCL_HOSTID"] for each in ranks] == ["rank0", "rank1"]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in ranks} == {"unset"}
    assert fakes.calls() == [f"start {folder}/pipe unset", f"quit {folder}/pipe"]
    assert not folder.exists()
    assert daemons() == []
    assert str(lab) == "2 ranks, loopback, not throttled, one NVIDIA Fake for all ranks, with MPS"
    described = json.loads(lab.topology.environment(0, 29500)["THINWIRE_LAB"])
    assert (described["gpus"], described["gpu_of_rank"], described["gpu_shared"]) == (
        ["NVIDIA Fake"],
        [0, 0],
        True,
    )
    assert (described["mps"], described["device"]) == ("started by the lab", "cuda")
    assert described in machine.record({})["labs"]
    _, auto = told()
    assert auto.topology.describe()["device"] == "auto"


def test_without_a_shared_gpu_there_is_no_daemon(fakes, monkeypatch):
    for more in ({"device": "cpu"}, {"hosts": 1}):
        ranks, lab = told(**more)
        assert ranks[0]["CUDA_MPS_PIPE_DIRECTORY"] == "unset"
        assert lab.topology.describe().get("mps") in (None, "not needed")
    fakes.gpus(2)
    ranks, lab = told()
    assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks] == ["0", "1"]
    assert str(lab).endswith("2 NVIDIA Fake, one for each rank")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    _, lab = told()
    assert lab.topology.describe()["device"] == "cpu"
    with pytest.raises(LabError, match="no GPU is seen here"), Lab(hosts=2, loopback=True, device="cuda"):
        pass
    with pytest.raises(LabError, match="one of auto, cuda, cpu, not 'tpu'"):
        Lab(hosts=2, device="tpu")
    assert fakes.calls() == []


def test_a_daemon_that_runs_is_used_and_left(fakes):
    (fakes.usual / "control").touch()
    ranks, lab = told()
    assert ranks[0]["CUDA_MPS_PIPE_DIRECTORY"] == "unset"
    assert lab.topology.describe()["mps"] == "was running"
    assert fakes.calls() == []
    assert (fakes.usual / "control").exists()


def test_a_daemon_that_does_not_start_is_reported(fakes):
    fakes.control(wrong="echo 'no such luck' >&2; exit 1")
    with pytest.warns(RuntimeWarning, match=r"no such luck.*a small call takes 40 ms"):
        ranks, lab = told(device="cuda")
    assert ranks[0]["CUDA_MPS_PIPE_DIRECTORY"] == "unset"
    assert "without MPS: small calls are slow" in str(lab)
    assert "no such luck" in lab.topology.describe()["mps"]
    shutil.rmtree(fakes.usual)
    (fakes.folder / mps.CONTROL).unlink()
    if shutil.which(mps.CONTROL) is None:
        with pytest.warns(RuntimeWarning, match=f"there is no {mps.CONTROL}"):
            told(device="cuda")


def test_a_daemon_that_does_not_quit_is_killed_and_only_that(fakes):
    fakes.control(quitting=":")
    other = fakes.folder.parent / "other"
    other.mkdir()
    words = [str(fakes.folder / mps.CONTROL), "--serve"]
    with subprocess.Popen(words, env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(other)}) as somebody:
        try:
            told(device="cuda")
            assert daemons() == []
            assert somebody.poll() is None
        finally:
            (other / "quit").touch()


def test_the_daemon_ends_after_an_exception(fakes):
    def fail():
        with Lab(hosts=2, loopback=True, device="cuda"):
            assert len(daemons()) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert daemons() == []
    assert len(fakes.calls()) == 2


LAB_THAT_HANGS = f"""
import sys
from thinwire.lab import Lab
with Lab(hosts=2, loopback=True, device="cuda") as lab:
    lab.run([sys.executable, "-c", {HANG!r}])
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_daemon_ends_with_a_signal_and_after_a_kill_clean_ends_it(fakes, signum):
    words = [sys.executable, "-u", "-c", LAB_THAT_HANGS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.send_signal(signum)
        process.wait(30)
    folder = Path(fakes.calls()[0].split()[1]).parent
    if signum == signal.SIGKILL:
        assert folder.exists()
        assert folder.name in clean()
    assert fakes.calls()[1:] == [f"quit {folder}/pipe"]
    assert not folder.exists()


def test_doctor_says_what_a_lab_has(fakes, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("THINWIRE_IP", str(tmp_path / "nowhere"))
    report = machine.doctor()["lab"]
    assert (report["gpus"], report["driver"], report["mps"]) == ("NVIDIA Fake", "570.1", "can be started")
    assert "THINWIRE_IP names" in report["ip"]
    assert report["possible"].startswith("no: ")
    (fakes.usual / "control").touch()
    assert machine.doctor()["lab"]["mps"] == "running"


# ip and tc


def test_tools_are_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_IP", str(tmp_path / "ip"))
    with pytest.raises(LabError, match=r"THINWIRE_IP names .*/ip, which is no file"):
        tools.need("ip")
    (tmp_path / "ip").write_bytes(b"\x7fELF" + bytes(100) + b"/lib64/ld-linux-x86-64.so.2\0" + bytes(100))
    assert tools.command("ip") == [str(tmp_path / "ip")]
    (tmp_path / "lib").mkdir()
    loader = ["/lib64/ld-linux-x86-64.so.2", "--library-path", str(tmp_path / "lib")]
    assert tools.command("ip") == [*loader, str(tmp_path / "ip")]
    (tmp_path / "ip").write_text("#!/bin/sh\n")
    assert tools.command("ip") == [str(tmp_path / "ip")]
    monkeypatch.delenv("THINWIRE_IP")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ip").chmod(0o755)
    assert tools.command("ip") == [str(tmp_path / "ip")]


@pytest.mark.skipif(not all(map(tools.find, tools.PROGRAMS)), reason="needs iproute2")
def test_packed_tools_run_by_themselves(tmp_path, monkeypatch):
    shown = command_line("pack-tools", str(tmp_path / "kit"))
    assert shown.exit_code == 0, shown.output
    assert "THINWIRE_IP=/path/to/kit/ip THINWIRE_TC=/path/to/kit/tc" in shown.stdout
    kept = [path.name for path in (tmp_path / "kit" / "lib").iterdir()]
    assert not [name for name in kept if name.startswith(("libc.", "libm.", "ld-"))]
    for name in tools.PROGRAMS:
        monkeypatch.setenv(tools.VARIABLES[name], str(tmp_path / "kit" / name))
        done = subprocess.run([*tools.command(name), "-V"], capture_output=True, text=True)
        assert "iproute2" in done.stdout, done.stderr


def test_ranks_on_loopback_meet_at_a_port_that_no_connection_gets_by_itself(monkeypatch):
    """A port of the kernel's own choice may be a connection's before the ranks' store listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", hosts._free_port()))
        other = hosts._free_port()
        monkeypatch.setattr(hosts, "PORTS", range(taken.getsockname()[1], taken.getsockname()[1] + 1))
        port = taken.getsockname()[1]
        with pytest.raises(LabError, match=f"no port from {port} to {port} is free"):
            hosts._free_port()
        monkeypatch.setattr(hosts.random, "sample", lambda *_: [taken.getsockname()[1], other])
        assert hosts._free_port() == other
    assert other < 32_768  # where the kernel's own begin


def test_fast_links_are_measured_with_several_connections():
    one, ten, forty = (parse_link(each) for each in ("1gbit", "10gbit", "40gbit"))
    assert [probe._streams(each) for each in (None, one, ten, forty)] == [1, 1, 1, probe.STREAMS]
    measured = {"from": 0, "to": 1, "nbytes": 5_000_000_000, "seconds": 2.0}
    assert probe._compare(measured, forty) == {
        "from": 0, "to": 1, "nominal_mbit_per_s": 40_000.0, "measured_mbit_per_s": 20_000.0, "share": 0.5,
        "connections": probe.STREAMS,
    }  # fmt: skip
    free = probe._compare(measured, None)
    assert (free["nominal_mbit_per_s"], free["share"], free["connections"]) == (None, None, 1)


def test_the_start_of_a_process_is_that_of_ps():
    ticks = os.sysconf("SC_CLK_TCK")
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    said = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True)
    assert namespaces.start_time(os.getpid()) / ticks == pytest.approx(up_s - int(said.stdout), abs=3)
    assert namespaces.start_time(2**22 + 1) is None


def test_counters_of_a_cable_are_those_of_both_its_ends(monkeypatch):
    def link(name, sent, received):
        parts = [{"bytes": each, "packets": each + 1, "dropped": each + 2} for each in (sent, received)]
        return {"ifname": name, "stats64": dict(zip(("tx", "rx"), parts, strict=True))}

    def port(name, count, kind="tbf"):
        return {"dev": name, "kind": kind, "bytes": count, "packets": count + 1, "drops": count + 2}

    asked = []

    def run(*words):
        asked.append(words)
        if words[0] == "ip":
            return json.dumps([link("up0", 10, 20), link("up1", 30, 40)])
        return json.dumps([port("up0", 100), port("down0", 200), port("up1", 300), port("down1", 400),
                           port("down1", 9, "noqueue")])  # fmt: skip

    monkeypatch.setattr(namespaces, "run", run)
    first, second = namespaces.node_counters(namespaces.names(2, 4), 2)
    switch = namespaces.names(2, 4).switch
    assert asked == [
        ("ip", "-n", switch, "-s", "-j", "link", "show"), ("tc", "-n", switch, "-s", "-j", "qdisc", "show"),
    ]  # fmt: skip
    assert vars(first) == {
        "sent_nbytes": 10, "received_nbytes": 20, "sent_packets": 11, "received_packets": 21,
        "sent_framed_nbytes": 100, "received_framed_nbytes": 200, "sent_frames": 101, "received_frames": 201,
        "dropped_frames": 102 + 202 + 12 + 22,
    }  # fmt: skip
    assert vars(second - first) == {key: value - vars(first)[key] for key, value in vars(second).items()}
