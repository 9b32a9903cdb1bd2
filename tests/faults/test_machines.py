"""Machines as network and host-name namespaces with a bridge between them, their own /etc/hosts and their own disks.

They run scripts/multinode.sh with gloo, in the loop of docs/multi-node.md. That needs root, and `ip`.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import REPO, TINY, environment, folders, load, write_data
from ground import metrics
from harness import LaunchedRun, assert_equals_reference, free_port, run_to_end

pytestmark = [
    pytest.mark.storm,
    pytest.mark.skipif(
        not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")),
        reason="namespaces need root, ip and unshare",
    ),
]
FLAGS = ("--max_steps", "150", "--checkpoint_freq", "5", "--dropout", "0.1", "--total_batch_size", "384")
ONCE = {"MAX_RESTARTS": "0"}
RDZV = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
LOOP = """
hostname {name}
until {repo}/scripts/multinode.sh "$@"; do echo "again"; sleep 1; done; echo "the loop has ended"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """A bridge in a namespace of its own, and machines m1, m2, ... with addresses 10.77.0.1, 2, ... on it."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.names, self.port = folder, [f"m{n + 1}" for n in range(count)], free_port()
        self.machines: list[Machine] = []
        self.hosts = "".join(f"10.77.0.{n + 1} m{n + 1}\n" for n in range(count))
        ip("netns", "add", "switch")
        ip("-n", "switch", "link", "add", "bridge", "type", "bridge")
        ip("-n", "switch", "link", "set", "bridge", "up")
        for number, name in enumerate(self.names, start=1):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", "switch")
            ip("-n", "switch", "link", "set", name, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            self.write_hosts(name, self.hosts)
            write_data(folder / name / "data")

    def write_hosts(self, name: str, text: str) -> None:
        """Write the /etc/hosts of a machine, which `ip netns exec` mounts."""
        place = Path("/etc/netns", name)
        place.mkdir(parents=True, exist_ok=True)
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{text}")

    def link(self, name: str, state: str) -> None:
        """Set the link of a machine up or down, as if its cable was pulled."""
        ip("-n", "switch", "link", "set", name, state)

    def start(self, name: str, *flags: str, nnodes: str, head: str = "m1", folder: str = "", **variables: str):
        """Start the loop on a machine, in its own folder or, as of a shared one, in another one's."""
        self.machines.append(Machine(self, name, (*FLAGS, *flags), folder or name, nnodes, head, variables))
        return self.machines[-1]

    def remove(self) -> None:
        for machine in self.machines:
            machine.kill()
        for name in (*self.names, "switch"):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


class Machine(LaunchedRun):
    """A machine that runs the loop."""

    def __init__(self, network: Network, name: str, flags, folder: str, nnodes: str, head: str, variables):
        self.name, self.out = name, network.folder / f"out-{name}-{time.monotonic_ns()}.txt"
        about = {"HEAD": head, "NNODES": nnodes, "PORT": str(network.port), "NPROC": "1", "RDZV_CONF": RDZV}
        loop = LOOP.format(name=name, repo=variables.pop("REPO", REPO))
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", loop, "loop", *TINY, "--data_dir",
                 "data", *folders("run"), *flags],
                cwd=network.folder / folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment() | about | {"LAUNCHED": str(self.out)} | variables,
            )  # fmt: skip

    def agent(self) -> int:
        """Return the process id of torchrun."""
        for pid in self.group():
            with contextlib.suppress(OSError):
                if b"/torchrun\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError(f"no agent on {self.name}:\n{self.text()}")

    def kill(self) -> None:
        self.process.kill()  # the loop first, which would start another agent
        super().kill()

    def notice(self) -> None:
        """Tell torchrun to end, as a spot instance does, and take the machine away when it has ended."""
        pid = self.agent()
        os.kill(pid, 15)
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()


@pytest.fixture
def network(workdir):
    """Three machines, of which m2 and m3 see m1's folder under the name of a shared disk, or have their own."""
    network = Network(workdir, 3)
    yield network
    network.remove()


def wait_for_step(folder: Path, step: int, timeout_s: float = 120) -> None:
    """Wait until the newest checkpoint in a folder is of this step or later."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(Exception):
            if load(folder / "run/latest.pt")["step"] >= step:
                return
        assert time.monotonic() < deadline, f"step {step} is not saved after {timeout_s} s"
        time.sleep(0.2)


@pytest.mark.parametrize("nnodes", ["3", "2:3"])
def test_a_run_survives_kills_of_any_machine(network, nnodes):
    """Of the rendezvous' too; a machine comes back after some seconds, with the same command."""
    victims = ["m2", "m1", "m3", "m1", "m2", "m3", "m3", "m2", "m1", "m2"]
    machines = {name: network.start(name, nnodes=nnodes, folder="m1") for name in network.names}
    for number, name in enumerate(victims):
        wait_for_step(network.folder / "m1", 10 * number + 5)
        machines[name].kill()
        time.sleep(2)
        machines[name] = network.start(name, nnodes=nnodes, folder="m1")
    for machine in machines.values():
        machine.wait_for("^the loop has ended", 240)
        assert machine.wait() == [0]
    run_to_end(*FLAGS, *folders("reference"), ranks=3)
    os.rename("m1/run", "run")
    one, other = load("reference/latest.pt"), load("run/latest.pt")
    assert one["rows_consumed"] == other["rows_consumed"]
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-4) for name in one["model"])
    assert metrics("reference", "loss") == pytest.approx(metrics("run", "loss"), abs=1e-4)


def refusal_of(machine: Machine, tries: int = 1) -> str:
    """Return the line of error that a machine's torchrun has printed once in each try, before it ended."""
    machine.wait_for("^again", 90)
    before, _, _ = machine.text().partition("\nagain\n")
    lines = [line for line in before.splitlines() if line.startswith("error: ")]
    assert lines == [lines[0]] * tries
    return lines[0]


def test_what_a_machine_lacks_ends_torchrun_on_all_after_its_restarts(network):
    shutil.rmtree("m2/data")
    both = [network.start(name, nnodes="2") for name in ("m1", "m2")]
    for machine in both:
        assert "rank 1 on m2: no train shards in data" in refusal_of(machine, tries=4)


def test_other_shards_on_one_machine_are_refused(network):
    write_data(Path("m2/data"), seed=1)
    both = [network.start(name, nnodes="2", **ONCE) for name in ("m1", "m2")]
    for machine in both:
        assert "differ from rank 0's" in refusal_of(machine)


def assert_ends_as_if_uninterrupted(both: list[Machine]) -> None:
    for machine in both:
        machine.wait_for("^the loop has ended", 240)
    run_to_end(*FLAGS, *folders("reference"), ranks=2)
    os.rename("m1/run", "run")
    assert_equals_reference("run")


@pytest.mark.parametrize("name", ["m1", "m2"])
def test_a_notice_to_one_machine_saves_and_stops_on_all_and_the_same_commands_resume(network, name):
    both = {name: network.start(name, nnodes="2", folder="m1") for name in ("m1", "m2")}
    wait_for_step(network.folder / "m1", 10)
    both.pop(name).notice()
    [other] = both.values()
    if name == "m1":  # the host of the rendezvous
        other.wait_for("^the loop has ended", 60)
        assert other.wait() == [0]
    other.kill()  # torchrun on m1 would wait five minutes for the one on m2
    assert json.loads(Path("m1/run/status.json").read_text())["status"] == "stopped"
    assert_ends_as_if_uninterrupted([network.start(name, nnodes="2", folder="m1") for name in ("m1", "m2")])


def test_a_link_that_is_cut_for_seconds_changes_nothing(network):
    both = [network.start(name, nnodes="2", folder="m1") for name in ("m1", "m2")]
    for number in range(3):
        wait_for_step(network.folder / "m1", 20 * number + 5)
        network.link("m2", "down")
        time.sleep(3)
        network.link("m2", "up")
    assert_ends_as_if_uninterrupted(both)


def test_a_link_that_is_cut_for_good_ends_both_sides_within_timeout_minutes(network):
    flags = "--timeout_minutes", "0.5"
    both = [network.start(name, *flags, nnodes="2", folder="m1") for name in ("m1", "m2")]
    wait_for_step(network.folder / "m1", 10)
    network.link("m2", "down")
    for machine in both:
        # Which of the two depends on what ends first, the wait or the connection. The kernel's own limit is 15 minutes.
        machine.wait_for("(no answer from|lost) another rank", 90)
    network.link("m2", "up")
    assert_ends_as_if_uninterrupted(both)
