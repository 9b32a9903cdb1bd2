"""Tests of replay.py: equal steps across kills and changes of a run, differences that are named, and its errors."""

import json
import os
import re
import shutil
import tempfile
import weakref
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
import torch
from conftest import MODERN, TINY, in_ranks, load, metrics, need_gpus, run_here, write_data

import replay
import train
from replay import AS_RECORDED, main
from steadygpt.base.options import UserError
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
        origin, *lines = capsys.readouterr().out.splitlines()
        assert origin.startswith("from ")
        return status, lines

    return replayed


def killed_before(step: int, *flags: str) -> None:
    """Train until just before a step, without a last save."""
    take_step = train.train_step

    def train_step(run, batches):
        if run.state.step == step:
            raise ArithmeticError
        return take_step(run, batches)

    train.train_step = train_step
    try:
        with suppress(ArithmeticError):
            run_here(*flags)
    finally:
        train.train_step = take_step


def rewrite(path: str, change) -> None:
    """Change the content of a checkpoint file, which no other name has afterwards."""
    checkpoint = load(path)
    change(checkpoint)
    os.unlink(path)
    torch.save(checkpoint, path)


# ---------------------------------------------------------------------------------------------------------------------
# equal


def test_a_killed_run_is_replayed_from_its_seed_or_a_checkpoint(replayed):
    killed_before(5, "--dropout", "0.1", *EVERY_2)
    assert run_here("--resume", "--dropout", "0.1", *EVERY_2) == 0
    assert replayed("--steps", "0:8") == (
        0,
        [
            f"steps 0 to 3: {AS_RECORDED}",
            f"steps 4 to 7: {AS_RECORDED}",
            "8 steps: losses, norms and 4 checkpoints up to step 8 equal, bit for bit",
        ],
    )
    assert replayed("--steps", "2:3")[1][-1] == (
        "2 steps: losses, norms and the checkpoint of step 4 equal, bit for bit"
    )
    assert replayed("--step", "3")[1] == [  # from the checkpoint before it
        f"steps 2 to 3: {AS_RECORDED}",
        "2 steps: losses, norms and the checkpoint of step 4 equal, bit for bit",
    ]
    assert replayed("--step", "6")[1][-1] == "1 step: losses and norms equal, bit for bit"


def test_a_replay_holds_one_model_at_a_time(replayed, monkeypatch):
    killed_before(5, *EVERY_2)
    assert run_here("--resume", *EVERY_2) == 0
    models, build = [], replay.build

    def build_one(*args):
        assert not any(model() for model in models)
        run = build(*args)
        models.append(weakref.ref(run.model))
        return run

    monkeypatch.setattr(replay, "build", build_one)
    assert replayed("--steps", "0:8")[0] == 0
    assert len(models) == 2


def test_a_run_whose_options_batch_and_mixture_changed_is_replayed_across_the_changes(replayed, workdir):
    write_data(workdir / "more", seed=1)
    assert run_here("--max_steps", "3", *EVERY_2) == 0
    resume = ("--resume", "--allow_changes", "--max_steps", "8")
    batch = ("--total_batch_size", "96", "--mini_batch_size", "3")
    killed_before(6, *resume, *batch, "--dropout", "0.1", *EVERY_2)
    mix = ("--mix", "data:1,m=more:2", "--total_batch_size", "64", "--max_lr", "1e-2", "--dropout", "0.1")
    assert train.main([*TINY, *resume, *mix, *EVERY_2]) == 0
    assert replayed("--steps", "0:8")[1] == [
        *(f"steps {span}: {AS_RECORDED}" for span in ("0 to 2", "3 to 5", "6 to 7")),
        "8 steps: losses, norms and 4 checkpoints up to step 8 equal, bit for bit",
    ]


@pytest.mark.parametrize(
    "flags", [[*MODERN, "--precision", "bf16", "--dropout", "0.1", "--schedule", "cosine"], ["--precision", "fp16"]]
)
def test_other_models_and_precisions_are_replayed(replayed, flags):
    assert run_here(*flags, *EVERY_2) == 0
    status, lines = replayed("--steps", "2:7")
    assert (status, lines[-1]) == (
        0,
        "6 steps: losses, norms and 3 checkpoints up to step 8 equal, bit for bit",
    )


def test_steps_without_a_finite_loss_are_replayed(replayed):
    assert run_here("--max_lr", "1e30", "--grad_clip", "0", "--max_bad_steps", "0", *EVERY_2) == 0
    assert None in metrics("logs", "loss").values()
    assert replayed("--steps", "0:8")[1][-1].startswith("8 steps: losses, norms and ")


def test_steps_that_a_run_has_undone_are_not_compared(replayed):
    assert run_here(*EVERY_2) == 0
    again = ("--resume", "checkpoints/rolling_step_000004.pt", "--allow_changes", "--max_lr", "1e-2")
    killed_before(7, *again, *EVERY_2)
    assert load("checkpoints/rolling_step_000008.pt")["step"] == 8  # of the first start
    assert replayed("--steps", "2:5")[1][-1] == (
        "4 steps: losses, norms and 2 checkpoints up to step 6 equal, bit for bit"
    )


def test_the_mirror_has_what_the_folder_lacks(replayed, workdir, capsys):
    url = f"file://{workdir}/there"
    assert run_here("--mirror", url, "--keep_checkpoints", "1", "--background_upload", "off", *EVERY_2) == 0
    assert sorted(path.name for path in Path("checkpoints").glob("rolling*")) == ["rolling_step_000008.pt"]
    equal = "losses, norms and the checkpoint of step 8 equal, bit for bit"
    assert replayed("--steps", "3:8")[1] == [
        f"steps 2 to 7: {AS_RECORDED}",
        "6 steps: losses, norms and 2 checkpoints up to step 8 equal, bit for bit",
    ]
    for folder in ("checkpoints", "logs"):
        Path(folder).rename(f"old_{folder}")
    assert replayed("--steps", "4:8", "--mirror", url)[1][-1] == f"4 steps: {equal}"
    for file in Path("there").glob("step_000004*"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="step_000004"):
        main(["--steps", "4:8", "--mirror", url])


# ---------------------------------------------------------------------------------------------------------------------
# different


def test_a_number_changed_in_the_records_is_named(replayed):
    assert run_here(*EVERY_2) == 0
    path = Path("logs/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    [record] = [record for record in records if record["step"] == 5 and "loss" in record]
    true, record["loss"] = record["loss"], 5.25
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    expected = f"first difference: loss of step 5 is {true}, but 5.25 in metrics.jsonl"
    status, lines = replayed("--steps", "2:7")
    assert (status, lines[-1]) == (1, expected)
    assert replayed("--steps", "6:7")[0] == 0


@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
def test_a_flipped_bit_in_a_checkpoint_is_named(replayed, kind):
    assert run_here(*EVERY_2) == 0
    name, found = "h.1.mlp.c_fc.weight", []

    def flip(checkpoint: dict) -> None:
        tensor = checkpoint["model"][name] if kind == "weight" else checkpoint["optimizer"][name][kind]
        found.append(tensor[3, 7].item())
        tensor.view(torch.int32)[3, 7] ^= 1
        found.append(tensor[3, 7].item())

    rewrite("checkpoints/rolling_step_000006.pt", flip)
    tensor = name if kind == "weight" else f"{kind} of {name}"
    status, lines = replayed("--steps", "0:7")
    assert (status, lines[-1]) == (
        1,
        f"first difference: {tensor}[3, 7] of step 6 is {found[0]}, but {found[1]} in "
        "checkpoints/rolling_step_000006.pt",
    )
    assert replayed("--step", "7")[0] == 1  # because it starts from there


def test_a_bit_flipped_in_a_shard_is_named(replayed, workdir):
    assert run_here() == 0
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
    lines.append("4 steps: losses, norms and 2 checkpoints up to step 4 equal, bit for bit")
    assert out.getvalue().splitlines() == (lines if os.environ["RANK"] == "0" else [])


def test_a_run_on_two_ranks_is_replayed_equally_on_two_and_closely_on_one(replayed, workdir):
    need_gpus(2)
    in_ranks(2, train_on_ranks, workdir)
    in_ranks(2, replay_on_ranks, workdir)
    assert run_here("--resume", *BATCH, "--mini_batch_size", "4") == 0  # on one
    status, lines = replayed("--steps", "0:7")
    assert (status, lines[:2]) == (0, ["steps 0 to 3: ranks 2 -> 1", f"steps 4 to 7: {AS_RECORDED}"])
    found = re.fullmatch(
        r"8 steps: largest difference, as a share of the largest number: losses (\S+), norms (\S+), learning rates 0, "
        r"weights (\S+), optimizer (\S+); bits are not promised: ranks 2 -> 1",
        lines[-1],
    )
    losses, norms, weights, optimizer = map(float, found.groups())
    assert max(losses, norms) < 1e-4 and 0 < weights < 1e-4 and 0 < optimizer < 1e-4
    assert replayed("--steps", "4:7")[1][-1] == (  # an epoch ends with step 6
        "4 steps: losses, norms and 2 checkpoints up to step 8 equal, bit for bit"
    )


def test_what_differs_from_the_recorded_start_is_named(monkeypatch):
    here = {
        "ranks": 1,
        "device": "NVIDIA H100",
        "torch": torch.__version__,
        "commit": "c0ffee",
        "options": {"deterministic": False},
    }
    monkeypatch.setattr(replay, "device_name", lambda _: "NVIDIA H100")
    gpu = Ranks(torch.device("cuda"))
    assert [*replay.changes(here, gpu)] == ["CUDA without --deterministic"]
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
    equal = "losses, norms and 2 checkpoints up to step 8 equal, bit for bit"
    missing = "losses and norms of {} not compared: {}".format
    lacks = missing("1 step", "metrics.jsonl lacks them")  # the last step is always recorded
    assert replayed("--steps", "4:7")[1][-1] == f"4 steps: {equal}; {lacks}"
    assert run_here("--checkpoint_dir", "other", "--logdir", "logs-other") == 0
    shutil.copy("logs-other/metrics.jsonl", "logs/metrics.jsonl")
    saves = "4 steps: 2 checkpoints up to step 8 equal, bit for bit"
    other = missing("4 steps", "their records do not descend from this checkpoint")
    assert replayed("--steps", "4:7")[1][-1] == f"{saves}; {other}"
    Path("logs/metrics.jsonl").unlink()
    assert replayed("--steps", "4:7")[1][-1] == f"{saves}; {missing('4 steps', 'metrics.jsonl lacks them')}"
    with pytest.raises(
        UserError, match=r"nothing to compare steps 0 to 0 with: no checkpoint is left, and logs/metrics.* lacks"
    ):
        main(["--step", "0"])


def test_checkpoints_that_are_gone_or_vanish_meanwhile(replayed, monkeypatch, capsys):
    assert run_here("--keep_checkpoints", "2", *EVERY_2) == 0
    for flags in (["--step", "5"], ["--steps", "3:7"]):
        last = flags[1][-1]
        with pytest.raises(
            UserError,
            match=f"no checkpoint of step {flags[1][0]} or before it is left; steps that can be replayed: from 6 on, "
            f"or --steps 0:{last}$",
        ):
            main(flags)
    there = files.checkpoint_files(Path("checkpoints"))
    monkeypatch.setattr(files, "checkpoint_files", lambda folder: [*there, folder / "rolling_step_000004.pt"])
    assert replayed("--steps", "6:7")[0] == 0


@pytest.mark.parametrize(("flags", "words"), [
    ([], "no steps to replay; expected either --step N or --steps A:B"),
    (["--step", "1", "--steps", "1:2"], "either --step N or --steps A:B"),
    (["--steps", "2:1"], "--steps is '2:1'; expected A:B, such as 4000:4250"),
    (["--steps", "2"], "--steps is '2'; expected A:B"),
    (["--step", "8"], "no step 8 to replay: the newest checkpoint is of step 8; choose earlier steps"),
    (["--steps", "4:9"], "no step 9 to replay: the newest checkpoint is of step 8"),
    (["--step", "1", "--checkpoint_dir", "data"], "no checkpoints of a run in data; try another"),
])  # fmt: skip
def test_mistakes_are_reported_in_one_line(workdir, flags, words):
    assert "--checkpoint_dir" in flags or run_here() == 0
    with pytest.raises(UserError) as raised:
        main(flags)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
