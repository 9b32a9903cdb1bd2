"""Several nodes: torchrun agents on two addresses of this machine, one worker each; and the scripts that start them."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, TINY, environment, folders, in_ranks, load, refusal, run_here, write_data
from ground import metrics, options_in
from harness import LaunchedRun, assert_equals_reference, free_port, run_to_end

import prepare_dataset
import train
from steadygpt.config import parse_args
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.data.tokenizer_json import to_json
from steadygpt.machine.ranks import joined
from steadygpt.start.data import check_digests, find_data, open_data
from steadygpt.start.find import Start

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have no 127.0.0.2, and no parent-death signal"
)
LONG_STEPS = ("--total_batch_size", "1024", "--max_steps", "150", "--checkpoint_freq", "5")


class Node(LaunchedRun):
    """A machine that runs scripts/multinode.sh. The first one to start hosts the rendezvous; the lowest has rank 0."""

    def __init__(self, address: str, nnodes: str, port: int, *flags: str):
        self.out = Path(f"out-{time.monotonic_ns()}.txt").resolve()
        variables = {
            "HEAD": "127.0.0.1",
            "NNODES": nnodes,
            "PORT": str(port),
            "NPROC": "1",
            "RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10",
            "PET_LOCAL_ADDR": address,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LAUNCHED": str(self.out),
        }
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [REPO / "scripts/multinode.sh", *TINY, "--data_dir", "data", *folders("run"), *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment() | variables,
                start_new_session=True,
            )


@pytest.fixture
def start_node(workdir):
    """A function that starts a Node; the test ends without its processes."""
    port, nodes = free_port(), []

    def start_node(address: str, nnodes: str, *flags: str) -> Node:
        nodes.append(Node(address, nnodes, port, *flags))
        return nodes[-1]

    yield start_node
    for node in nodes:
        node.kill()


def start_two(start_node, nnodes: str, *flags: str) -> tuple[Node, Node]:
    """Start two nodes, of which the first hosts the rendezvous and the second has rank 0; wait for their training."""
    host = start_node("127.0.0.2", nnodes, *flags)
    host.wait_for("^\\+ torchrun")
    time.sleep(1)
    other = start_node("127.0.0.1", nnodes, *flags)
    other.wait_for(r"^saved step \d+ as")
    return host, other


@linux
@pytest.mark.storm
def test_a_run_continues_when_a_lost_node_returns(start_node):
    """The lost node had rank 0, wrote the checkpoints and held the lock of their folder."""
    flags = ("--max_steps", "100", "--checkpoint_freq", "5", "--dropout", "0.1")
    host, lost = start_two(start_node, "2", *flags)
    lost.kill()
    returned = start_node("127.0.0.1", "2", *flags)
    assert "resumed      from run/latest.pt at step " in returned.wait_for("^finished after 100 steps")
    assert (host.wait(), returned.wait()) == ([0], [0])
    run_to_end(*flags, *folders("reference"), ranks=2)
    assert_equals_reference("run")


@linux
@pytest.mark.storm
def test_an_elastic_run_continues_on_the_nodes_that_are_there(start_node):
    host, lost = start_two(start_node, "1:2", *LONG_STEPS)
    lost.kill()
    assert "device       1 x cpu" in host.wait_for(r"^step +\d+/150")
    returned = start_node("127.0.0.1", "1:2", *LONG_STEPS)
    assert "device       2 x cpu" in returned.wait_for("^finished after 150 steps")
    assert "stopped (SIGTERM) after" in host.text()  # the agent stopped its rank, which saved, to start with two nodes
    assert (host.wait(), returned.wait()) == ([0], [0])
    run_to_end(*LONG_STEPS, *folders("reference"), ranks=2)
    one, other = load("reference/latest.pt"), load("run/latest.pt")
    assert one["rows_consumed"] == other["rows_consumed"]
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-5) for name in one["model"])
    assert metrics("reference", "loss") == pytest.approx(metrics("run", "loss"), abs=1e-5)


@linux
@pytest.mark.storm
def test_all_nodes_end_with_the_host_of_the_rendezvous_and_the_same_commands_resume(start_node):
    host, other = start_two(start_node, "2", *LONG_STEPS)
    host.kill()
    assert other.wait(60) == [1]
    assert "RendezvousConnectionError" in other.text()
    assert not other.group()
    both = [start_node(address, "2", *LONG_STEPS) for address in ("127.0.0.1", "127.0.0.2")]
    assert "resumed      from" in both[0].wait_for("^finished after 150 steps")
    assert [node.wait() for node in both] == [[0], [0]]


# ---------------------------------------------------------------------------------------------------------------------
# nodes with different folders: each rank is in a folder node0, node1


def enter_node() -> None:
    os.chdir(f"node{os.environ['RANK']}")


def train_on_node(*flags: str) -> int:
    enter_node()
    return train.main([*TINY, "--data_dir", "../data", *flags])


def refused(check, *facts: str) -> None:
    """Check that the ranks raise one UserError with these facts on every rank."""
    with joined("cpu") as ranks, refusal(*facts):
        check(ranks)


@pytest.fixture
def nodes(workdir):
    """Folders node0 and node1, and a checkpoint of step 4 in node0."""
    for node in ("node1", "node0"):
        Path(node).mkdir()
    with contextlib.chdir("node0"):
        assert run_here("--data_dir", "../data", "--max_steps", "4") == 0
    return workdir


@pytest.mark.parametrize("which", ["auto", "checkpoints/latest.pt"])
def test_only_node_0_needs_the_checkpoints(nodes, which):
    in_ranks(2, train_on_node, "--resume", which, "--max_steps", "6")
    assert load("node0/checkpoints/latest.pt")["step"] == 6
    assert os.listdir("node1") == []


def train_with_other_options() -> int:
    own = ["--data_dir", "elsewhere", "--seed", "7"] if os.environ["RANK"] == "1" else []
    return train_on_node("--resume", "auto", "--max_steps", "6", *own)


def test_options_of_other_nodes_are_named_and_ignored(nodes):
    in_ranks(2, train_with_other_options)
    options = options_in("node0/checkpoints/latest.pt")
    assert (options.seed, options.data_dir) == (1337, "../data")
    line = f"ignored      --data_dir 'elsewhere', --seed 7 on {socket.gethostname()}; the options of rank 0 count"
    log = Path("node0/checkpoints/log.txt").read_text().splitlines()
    assert log.count(line) == 1
    assert "resumed      from checkpoints/latest.pt at step 4" in log


def test_a_folder_that_only_node_0_has_is_no_other_option(nodes):
    in_ranks(2, train_on_node, "--resume", "checkpoints", "--max_steps", "6")
    log = Path("node0/checkpoints/log.txt").read_text()
    assert "resumed      from checkpoints/latest.pt at step 4" in log
    assert "ignored" not in log


def open_data_of_node(folder: str, *facts: str) -> None:
    enter_node()
    config = parse_args([*TINY, "--data_dir", folder])[0]
    refused(lambda ranks: open_data(Start(), config, ranks), *facts)


def test_all_ranks_end_with_the_error_of_the_node_that_has_no_data(workdir):
    write_data(workdir / "node0/data")
    (workdir / "node1").mkdir()
    in_ranks(2, open_data_of_node, "data", "rank 1 ", f" {socket.gethostname()}: ", " train ", " data ")


def identities(folder: Path, last: int | None = None, manifest: bool = True, **options) -> dict:
    """Write data, and return its identities, as if its folder were data; `last` replaces the last id of a shard."""
    write_data(folder, **options)
    if last is not None:
        np.load(folder / "tiny_train_000001.npy", mmap_mode="r+")[-1] = last
    if not manifest:
        (folder / "manifest.json").unlink()
    [source] = find_data(Start(), parse_args([*TINY, "--data_dir", str(folder), "--tokenizer", "bytes"])[0]).sources
    return {("data", "train"): source.digest}


@pytest.mark.parametrize("change", [
    {"num_tokens": (200, 700, 501)}, {"num_tokens": (200, 700)}, {"seed": 1}, {"last": 0, "manifest": False},
    {"num_tokens": (200, 700, 501), "manifest": False}, {"seed": 1, "manifest": False},
])  # fmt: skip
def test_shards_of_another_node_must_be_the_same(workdir, change):
    expected = identities(workdir / "node0", manifest=change.get("manifest", True))
    check_digests(expected, expected)
    found = identities(workdir / "node1", **change)
    with refusal("data: its train shards", *(digest[:12] for of in (found, expected) for digest in of.values())):
        check_digests(found, expected)


def test_a_node_without_a_set_of_rank_0_is_refused():
    sets = {("web", "train"): "1" * 64, ("web", "val"): "2" * 64}
    lacking = {("web", "train"): "1" * 64}
    for found, of_main in ((lacking, sets), (sets, lacking)):
        with refusal("web: its val shards", "none", "2" * 12):
            check_digests(found, of_main)


def train_on_other_data() -> int:
    enter_node()
    with refusal("rank 1 ", f" {socket.gethostname()}: data: its train shards differ from rank 0's"):
        train.main([*TINY, "--data_dir", "data"])
    return 0


def test_training_does_not_mix_the_data_of_two_nodes(workdir):
    for seed in (0, 1):
        write_data(workdir / f"node{seed}/data", seed=seed)
    in_ranks(2, train_on_other_data)
    assert not Path("node0/checkpoints/latest.pt").exists()


def test_the_tokenizer_of_node_0_counts_on_all_nodes(workdir):
    """Another tokenizer.json on node 1 changes nothing: its ranks get that of rank 0."""
    Path("text.txt").write_text("some words and more of them " * 400)
    for node in ("node0", "node1"):
        flags = ["--tokenizer", "bpe:270", "--out", f"{node}/data", "--num_workers", "1", "--val_share", "0.1"]
        assert prepare_dataset.main(["--source", "text.txt", *flags]) == 0
    for name in ("same", "other"):
        in_ranks(2, train_on_node, "--data_dir", "data", "--eval_freq", "4", *folders(name))
        Path("node1/data/tokenizer.json").write_text(to_json(load_tokenizer(TokenizerRecord("bytes")).encoding))
    same, other = (metrics(f"node0/{name}", "val_bpb") for name in ("same", "other"))
    assert same == other and len(same) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Slurm: tests/slurm/try_slurm.sh tries the script on a real one

STUBS = {
    "srun": 'echo $$ > step; echo "srun $HEAD $NNODES $*" >> calls; '
    '[ "$WAITS" ] && until [ -e signalled ]; do sleep; done; exit $STATUS',
    "sleep": "exec /bin/sleep 0.05",  # the script looks for its steps every 2 s
    # scancel returns when the step has ended. Otherwise the script would find the step and signal it again.
    "scancel": 'echo "scancel $*" >> calls; touch signalled; while kill -0 "$(cat step)"; do sleep; done 2>/dev/null',
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "scontrol $*" >> calls; fi',
}


@pytest.mark.parametrize(
    ("at_limit", "status", "requeued"),
    [(True, 0, True), (True, 1, False), (False, 0, False), (False, 1, False)],
    ids=["stopped at the limit", "failed at the limit", "finished", "failed"],
)
def test_a_slurm_job_requeues_itself_if_it_was_stopped_at_its_limit(tmp_path, at_limit, status, requeued):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]", "STATUS": str(status), "WAITS": "1" if at_limit else "",
    }  # fmt: skip
    script = subprocess.Popen([REPO / "scripts/slurm.sh", "--seed", "7"], cwd=tmp_path, env=os.environ | variables)
    if at_limit:
        while script.poll() is None and not (tmp_path / "calls").exists():
            time.sleep(0.05)
        script.send_signal(signal.SIGUSR1)
    assert script.wait(30) == status
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "srun node7 2 --kill-on-bad-exit=1 scripts/multinode.sh --seed 7"
    assert calls[1:] == ["scancel --signal=USR1 42"] * at_limit + ["scontrol requeue 42"] * requeued


def test_the_scripts_name_a_missing_variable():
    without = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HEAD", "NNODES"))}
    for script, missing in (("multinode.sh", "HEAD"), ("slurm.sh", "SLURM_JOB_ID")):
        ended = subprocess.run([REPO / "scripts" / script], capture_output=True, text=True, env=without)
        assert ended.returncode == 2
        assert re.fullmatch(rf"error: {missing} .*\n", ended.stderr)


@pytest.mark.parametrize(("end", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -signal.SIGKILL)])
def test_multinode_ignores_sigusr1_and_ends_as_its_agent_does(tmp_path, end, status):
    """torchrun would die of the signal, with which Slurm announces the end; its ranks save and stop."""
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")  # without a .venv, whose torchrun would come first
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!/usr/bin/env bash\nkill -USR1 $$\necho alive\n{end}\n")
    torchrun.chmod(0o755)
    env = os.environ | {
        "HEAD": "node1", "NNODES": "2", "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    }  # fmt: skip
    ended = subprocess.run([tmp_path / "scripts/multinode.sh"], capture_output=True, text=True, env=env)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (status, "alive"), ended.stderr


@pytest.mark.parametrize("nodes", ["", "two", "1-2"])
def test_a_number_of_nodes_that_is_none_gets_one_line(nodes):
    env = os.environ | {"HEAD": "node1", "NNODES": nodes}
    ended = subprocess.run([REPO / "scripts/multinode.sh"], capture_output=True, text=True, env=env)
    assert ended.returncode == 2
    assert re.fullmatch(rf"error: NNODES .*'{nodes}'.* 1:2\n", ended.stderr)
