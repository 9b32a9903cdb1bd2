"""Tests of replay.py: equal steps across kills and changes of a run, differences that are named, and its errors."""

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import chdir, redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from conftest import MODERN, TINY, in_ranks, load, metrics, need_gpus, run_here, write_data
from injected import acting_here, do_in_step

import replay
import train
from replay import AS_RECORDED, main
from steadygpt.base.options import UserError
from steadygpt.base.text import counted
from steadygpt.checkpoint import files
from steadygpt.machine.ranks import Ranks
from steadygpt.run import starts

EVERY_2 = ("--checkpoint_freq", "2")


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """Let runs and replays find a commit without changed files, which promises bits."""
    for module in (starts, replay):
        monkeypatch.setattr(module, "git_commit", lambda: "c0ffee")


def contents(folder: Path) -> dict[str, tuple]:
    """Return time and bytes of each file and folder, by path."""
    found = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    return {str(path): (time, path.read_bytes() if path.is_file() else None) for path, time in found.items()}


@pytest.fixture
def replayed(workdir, monkeypatch, capsys):
    """Return a function that runs the command and returns its status and its lines; it must leave all files alone."""
    (workdir / "tmp").mkdir()

    def replayed(*flags: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        before = contents(workdir)
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "tempdir", str(workdir / "tmp"))
            status = main([*flags])
        after = contents(workdir)
        before.pop(str(workdir / "tmp")), after.pop(str(workdir / "tmp"))  # downloads come and go
        assert after == before
        said = capsys.readouterr()
        origin, *lines = said.out.splitlines()
        lines += [line for line in said.err.splitlines() if line.startswith("warning: ")]
        assert origin.startswith("from ")
        return status, lines

    return replayed


PAST: dict[tuple, Path] = {}


@pytest.fixture
def past(workdir, tmp_path_factory) -> Callable:
    """past(*flags, killed=step) puts a run into the working directory, killed before that step; each trains once."""

    def past(*flags: str, killed: int = 0) -> None:
        if (key := (flags, killed)) not in PAST:
            PAST[key] = tmp_path_factory.mktemp("past")
            write_data(PAST[key] / "data")
            with chdir(PAST[key]):
                if killed:
                    killed_before(killed, *flags)
                assert run_here(*flags, *["--resume"] * bool(killed)) == 0
        shutil.copytree(PAST[key], workdir, dirs_exist_ok=True)

    return past


def repeated(first: int, count: int) -> str:
    """Return the line about the records of a part that begins at a step."""
    same = "bit for bit the same losses, gradient norms and learning rates"
    return f"resumed at step {first}: repeated {counted(count, 'step')}, {same}"


def saved(count: int, last: int) -> str:
    """Return the line about checkpoints."""
    return f"{counted(count, 'checkpoint')} up to step {last}: equal, bit for bit"


class Killed(Exception): ...


def kill(rank: int, step: int) -> None:
    def killing() -> None:
        raise Killed

    do_in_step(step, killing, rank)


def killed_before(step: int, *flags: str) -> None:
    """Train until just before a step, without a last save."""
    with acting_here(partial(kill, step=step)), suppress(Killed):
        run_here(*flags)


def rewrite(path: str, change) -> None:
    """Change the content of a checkpoint file, which no other name has afterwards."""
    checkpoint = load(path)
    change(checkpoint)
    os.unlink(path)
    torch.save(checkpoint, path)


# ---------------------------------------------------------------------------------------------------------------------
# equal


def test_a_killed_run_is_replayed_from_its_seed_or_a_checkpoint_with_one_model_at_a_time(replayed, past, monkeypatch):
    past("--dropout", "0.1", *EVERY_2, killed=5)
    models, build = [], replay.build

    def build_one(*args):
        assert not any(model() for model in models)
        run = build(*args)
        models.append(weakref.ref(run.model))
        return run

    with monkeypatch.context() as patched:
        patched.setattr(replay, "build", build_one)
        assert replayed("--steps", "0:8") == (0, [
            f"steps 0 to 3: {AS_RECORDED}", repeated(0, 4), f"steps 4 to 7: {AS_RECORDED}", repeated(4, 4), saved(4, 8)
        ])  # fmt: skip
    assert len(models) == 2
    # From the checkpoint before the step.
    assert replayed("--step", "3")[1] == [f"steps 2 to 3: {AS_RECORDED}", repeated(2, 2), saved(1, 4)]
    assert replayed("--step", "6")[1][-1] == repeated(6, 1)


def test_a_run_whose_options_batch_and_mixture_changed_is_replayed_across_the_changes(replayed, workdir):
    write_data(workdir / "more", seed=1)
    assert run_here("--max_steps", "3", *EVERY_2) == 0
    resume = ("--resume", "--allow_changes", "--max_steps", "8")
    batch = ("--total_batch_size", "96", "--mini_batch_size", "3")
    killed_before(6, *resume, *batch, "--dropout", "0.1", *EVERY_2)
    mix = ("--mix", "data:1,m=more:2", "--total_batch_size", "64", "--max_lr", "1e-2", "--dropout", "0.1")
    assert train.main([*TINY, *resume, *mix, *EVERY_2]) == 0
    assert replayed("--steps", "0:8")[1] == [
        f"steps 0 to 2: {AS_RECORDED}", repeated(0, 3), f"steps 3 to 5: {AS_RECORDED}", repeated(3, 3),
        f"steps 6 to 7: {AS_RECORDED}", repeated(6, 2), saved(4, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("flags", [
    [*MODERN, "--precision", "bf16", "--dropout", "0.1", "--schedule", "cosine"], ["--precision", "fp16"],
    ["--max_lr", "1e30", "--grad_clip", "0", "--max_bad_steps", "0"],
], ids=["modern", "fp16", "infinite losses"])  # fmt: skip
def test_other_models_precisions_and_bad_steps_are_replayed(replayed, flags):
    assert run_here(*flags, *EVERY_2) == 0
    assert (None in metrics("logs", "loss").values()) == ("1e30" in flags)
    status, lines = replayed("--steps", "2:7")
    assert (status, lines[1:]) == (0, [repeated(2, 6), saved(3, 8)])


def test_steps_that_a_run_has_undone_are_not_compared(replayed):
    assert run_here(*EVERY_2) == 0
    again = ("--resume", "checkpoints/rolling_step_000004.pt", "--allow_changes", "--max_lr", "1e-2")
    killed_before(7, *again, *EVERY_2)
    assert load("checkpoints/rolling_step_000008.pt")["step"] == 8  # of the first start
    assert replayed("--steps", "2:5")[1][1::2] == [repeated(2, 2), repeated(4, 2)]


def test_the_mirror_has_what_the_folder_lacks(replayed, workdir, capsys):
    url = f"file://{workdir}/there"
    assert run_here("--mirror", url, "--keep_checkpoints", "1", "--background_upload", "off", *EVERY_2) == 0
    assert sorted(path.name for path in Path("checkpoints").glob("rolling*")) == ["rolling_step_000008.pt"]
    assert replayed("--steps", "3:8")[1] == [f"steps 2 to 7: {AS_RECORDED}", repeated(2, 6), saved(2, 8)]
    for folder in ("checkpoints", "logs"):
        Path(folder).rename(f"old_{folder}")
    assert replayed("--steps", "4:8", "--mirror", url)[1][1:] == [repeated(4, 4), saved(1, 8)]
    for file in Path("there").glob("step_000004*"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="step_000004"):
        main(["--steps", "4:8", "--mirror", url])


# ---------------------------------------------------------------------------------------------------------------------
# different


@pytest.mark.parametrize(("key", "step"), [("loss", 5), ("digest", 6)])
def test_a_number_changed_in_the_records_is_named(replayed, past, key, step):
    past(*EVERY_2)
    Path("checkpoints/rolling_step_000006.pt").unlink()  # the record has the digest of its weights
    path = Path("logs/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    [record] = [record for record in records if record["step"] == step and key in record]
    true, record[key] = record[key], 5.25
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    status, lines = replayed("--steps", "2:7")
    assert status == 1
    assert lines[-1].startswith(
        f"warning: resumed at step 2: repeated step {step} has {key} {true!r}, but had 5.25 before"
    )
    assert replayed("--steps", "2:4")[0] == 0


def test_another_position_in_the_data_is_named(replayed, monkeypatch):
    assert run_here(*EVERY_2, "--max_lr", "0", "--min_lr", "0") == 0  # so that no weight differs
    step = replay.train_step

    def one_row_more(run, batches):
        result = step(run, batches)
        run.state.rows_consumed += run.state.step == 3
        return result

    monkeypatch.setattr(replay, "train_step", one_row_more)
    status, lines = replayed("--steps", "2:3")
    assert status == 1
    assert re.search(r"warning: step 4, .*rolling_step_000004\.pt: \d+ rows consumed, but 16 before", lines[-1])


@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
def test_a_flipped_bit_in_a_checkpoint_is_named(replayed, past, kind):
    past(*EVERY_2)
    name = "h.1.mlp.c_fc.weight"

    def flip(checkpoint: dict) -> None:
        tensor = checkpoint["model"][name] if kind == "weight" else checkpoint["optimizer"][name][kind]
        tensor.view(torch.int32)[3, 7] ^= 1
        checkpoint["digests"] = {}  # else the file is taken for damaged

    rewrite("checkpoints/rolling_step_000006.pt", flip)
    tensor = name if kind == "weight" else f"{name}.{kind}"
    status, lines = replayed("--steps", "4:7")
    file = r"checkpoints/rolling_step_000006\.pt"
    assert status == 1
    assert re.fullmatch(rf"warning: step 6, {file}: 1 of \d+ tensors differ, {tensor} most: by .*", lines[-1])
    assert replayed("--step", "7")[0] == 1  # because it starts from there


def test_a_bit_flipped_in_a_shard_is_named(past, workdir):
    past(*EVERY_2)
    path = workdir / "data/tiny_train_000002.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"tiny_train_000002.npy: .*the file is damaged"):
        main(["--steps", "0:3"])


BATCH = ("--total_batch_size", "192")  # sums of six rounded losses depend on their order


def train_on_ranks(folder: Path) -> int:
    os.chdir(folder)
    starts.git_commit = lambda: "c0ffee"
    return run_here(*BATCH, "--max_steps", "4", *EVERY_2)


def replay_on_ranks(folder: Path) -> None:
    os.chdir(folder)
    replay.git_commit = lambda: "c0ffee"
    with redirect_stdout(StringIO()) as out:
        assert main(["--steps", "0:3"]) == 0
    lines = ["from the first weights, which the seed gives", f"steps 0 to 3: {AS_RECORDED}"]
    lines += [repeated(0, 4), saved(2, 4)]
    assert out.getvalue().splitlines() == (lines if os.environ["RANK"] == "0" else [])


def test_a_run_on_two_ranks_is_replayed_equally_on_two_and_closely_on_one(replayed, workdir):
    need_gpus(2)
    in_ranks(2, train_on_ranks, workdir)
    in_ranks(2, replay_on_ranks, workdir)
    assert run_here("--resume", *BATCH, "--mini_batch_size", "4") == 0  # on one
    status, lines = replayed("--steps", "0:7")
    assert (status, lines[0]) == (0, "steps 0 to 3: ranks 2 -> 1")
    assert f"steps 4 to 7: {AS_RECORDED}" in lines
    shares = [float(share) for line in lines for share in re.findall(r" by (\S+) of its largest number$", line)]
    assert shares and max(shares) < 1e-3
    assert all(float(re.search(r"within (\S+) of", line)[1]) < 1e-3 for line in lines if "within" in line)
    assert replayed("--steps", "4:7")[1][1:] == [repeated(4, 4), saved(2, 8)]  # an epoch ends with step 6


def test_what_differs_from_the_recorded_start_is_named(monkeypatch):
    here = {"ranks": 1, "device": "NVIDIA H100", "torch": torch.__version__, "commit": "c0ffee"}
    here |= {"options": {"deterministic": False}, "decisions": {}}
    monkeypatch.setattr(replay, "device_name", lambda _: "NVIDIA H100")
    gpu = Ranks(torch.device("cuda"))
    assert [*replay.changes(here, gpu)] == ["CUDA, or DDP on more than two processes, without --deterministic"]
    here["options"] = {"deterministic": True}
    assert not replay.changes(here | {"ranks": 4}, gpu)
    other = {"ranks": 4, "device": "NVIDIA A100", "torch": "2.9.0", "commit": "badcab"}
    assert replay.changes(here | other, gpu) == [
        f"device NVIDIA A100 -> NVIDIA H100, torch 2.9.0 -> {torch.__version__}, commit badcab -> c0ffee"
    ]
    monkeypatch.setattr(replay, "git_commit", lambda: "c0ffee+")
    assert [*replay.changes(here | {"commit": "c0ffee+"}, gpu)] == ["files have changed since the commit"]


# ---------------------------------------------------------------------------------------------------------------------
# what is missing


def test_what_is_not_compared_is_told(replayed):
    assert run_here("--log_freq", "2", *EVERY_2) == 0
    lines = replayed("--steps", "4:7")[1]
    assert re.fullmatch("resumed at step 4: repeated 3 (logged )?steps, bit for bit .*", lines[1])  # 4, 6 and the last
    assert run_here("--checkpoint_dir", "other", "--logdir", "logs-other") == 0
    shutil.copy("logs-other/metrics.jsonl", "logs/metrics.jsonl")
    other = "resumed at step 4: repeated steps are not compared: their records do not descend from this checkpoint"
    assert replayed("--steps", "4:7")[1][1:] == [other, saved(2, 8)]
    Path("logs/metrics.jsonl").unlink()
    assert replayed("--steps", "4:7")[1][1:] == [saved(2, 8)]
    nothing = r"nothing to compare steps 0 to 0 with: no checkpoint is left, and logs/metrics.* lacks"
    with pytest.raises(UserError, match=nothing):
        main(["--step", "0"])


@pytest.mark.parametrize(("flags", "last"), [(["--step", "5"], 5), (["--steps", "3:7"], 7)])
def test_checkpoints_that_are_gone_are_named(past, flags, last):
    past(*EVERY_2)
    for step in (2, 4):
        Path(f"checkpoints/rolling_step_00000{step}.pt").unlink()
    left = f"steps that can be replayed: from 6 on, or --steps 0:{last}$"
    with pytest.raises(UserError, match=f"no checkpoint of step {flags[1][0]} or before it is left; {left}"):
        main(flags)


def test_a_checkpoint_that_vanishes_meanwhile_is_not_needed(replayed, past, monkeypatch):
    past(*EVERY_2)
    there = files.checkpoint_files(Path("checkpoints"))
    monkeypatch.setattr(files, "checkpoint_files", lambda folder: there)
    Path("checkpoints/rolling_step_000004.pt").unlink()
    assert replayed("--steps", "6:7")[0] == 0
