"""Mistakes in shards, flags and TOML files: one line that says what to do and exit status 2, before training."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import load
from harness import Run, folders, refusal, run_to_end
from injected import signal_at
from test_train import fails

from steadygpt.data.shards import read_manifest, write_shard

SHARD = Path("data/tiny_train_000001.npy")


def rewrite(change) -> None:
    SHARD.write_bytes(change(SHARD.read_bytes()))


def without_manifest(name: str, content: bytes) -> None:
    """Replace the data by a val shard and one file as other tools write them, without a manifest."""
    for path in Path("data").iterdir():
        path.unlink()
    np.zeros(200, "<u2").tofile("data/val.bin")
    Path("data", name).write_bytes(content)


def llmc(*header: int, tokens: int = 100) -> bytes:
    return np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes() + bytes(2 * tokens)


def npy(array: np.ndarray) -> bytes:
    np.save("array.npy", array)
    return Path("array.npy").read_bytes()


def manifest(**changes) -> None:
    Path("data/manifest.json").write_text(json.dumps(read_manifest(Path("data")) | changes))


SHARDS = {
    "missing folder": (lambda: Path("data").rename("elsewhere"), "no train shards in data"),
    "missing shard": (SHARD.unlink, "tiny_train_000001.npy: missing, though manifest.json lists it"),
    "empty shard": (lambda: rewrite(lambda _: b""), "tiny_train_000001.npy: not a .npy file"),
    "truncated shard": (lambda: rewrite(lambda old: old[:-7]), "1,521 bytes, but its header says 700 tokens (1,528"),
    "one bit of a shard flipped": (lambda: rewrite(lambda old: old[:-9] + b"\1" + old[-8:]), "but manifest.json says"),
    "interrupted preparation": (lambda: manifest(complete=False), "its preparation was interrupted"),
    "invalid manifest": (lambda: Path("data/manifest.json").write_text("{"), "not a manifest"),
    "different vocabulary": (lambda: manifest(tokenizer="gpt2"), "vocab_size is 257, but the tokenizer 'gpt2' has"),
    "odd size": (lambda: without_manifest("train.bin", bytes(999)), "999 bytes is not a whole number of uint16"),
    "wrong magic number": (lambda: without_manifest("a_train_0.bin", llmc(5, 1, 100)), "no header of llm.c; expected"),
    "wrong token count": (lambda: without_manifest("a_train_0.bin", llmc(20240520, 1, 101)), "header says 101 tokens"),
    "negative token count": (lambda: without_manifest("a_train_0.bin", llmc(20240520, 1, -1)), "header says -1 tokens"),
    "wrong dtype": (lambda: without_manifest("a_train_0.npy", npy(np.zeros(100))), "holds float64 of shape (100,)"),
    "wrong shape": (lambda: without_manifest("a_train_0.npy", npy(np.zeros((9, 9), "u2"))), "of shape (9, 9)"),
    "shards shorter than a row": (lambda: without_manifest("train.bin", bytes(32)), "no shard has 17 tokens"),
    "empty shard without a header": (lambda: without_manifest("train.bin", b""), "the longest has 0"),
    "token outside the vocabulary": (
        lambda: without_manifest("train.bin", np.array([1] * 150 + [50257], "<u2").tobytes()),
        "train.bin: holds token id 50257 at position 150, outside the vocabulary of 50,257",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARDS)
def test_bad_shards_are_refused(workdir, what):
    damage, words = SHARDS[what]
    damage()
    assert words in fails(*folders("run"), "--eval_freq", "100")
    assert not list(Path().glob("run/ckpt/*.pt"))
    assert not Path("run/logs/metrics.jsonl").exists()


@pytest.mark.parametrize(("split", "ranks"), [("train", 1), ("val", 1), ("train", 2)])
def test_shards_changed_since_the_checkpoint_are_refused(workdir, split, ranks):
    flags = ("--max_steps", "4", "--eval_freq", "2", *folders("run"))
    run_to_end(*flags)
    before = Path("run/ckpt/latest.pt").read_bytes()
    path = Path(f"data/tiny_{split}_00000{split == 'train':d}.npy")
    write_shard(path, np.roll(np.load(path), 1))  # a valid shard of the same size
    Path("data/manifest.json").unlink()
    message = refusal(*flags, "--resume", "--max_steps", "9", "--tokenizer", "bytes", ranks=ranks)
    if split == "val":
        assert "data: not the val shards of the first start, by which best_model.pt is chosen" in message
    else:
        assert re.search(r"the training data is data 100.0% \(data, SHA-256 \w+\.\.\.\), but the checkpoint", message)
    assert Path("run/ckpt/latest.pt").read_bytes() == before


FLAGS = {
    "unknown flag": (["--num_layer", "3"], "unknown argument '--num_layer'; did you mean --num_layers?"),
    "wrong type": (["--num_layers", "two"], "'two'"),
    "not TOML": (["--config", "a.toml"], "a.toml: not TOML"),
    "cpu_offload without fsdp": (["--cpu_offload"], "--cpu_offload needs --sharding fsdp"),
    "batch that cannot be split": (["--total_batch_size", "72"], "--total_batch_size is 72; expected a multiple of"),
    "skip_spikes without spike_z": (["--skip_spikes", "--spike_z", "0"], "--skip_spikes needs a --spike_z above 0"),
    "warm-up longer than the run": (["--warmup_steps", "8"], "--warmup_steps 8 is not shorter than the run of 8 steps"),
    "unknown device": (["--device", "tpu"], "--device tpu: not on this machine"),
    "weights of another shape": (["--init_from", "reference/ckpt/latest.pt", "--embd_size", "32"], "embd_size is 16"),
    "nothing to resume": (["--resume"], "no checkpoints in checkpoints"),
    "resume from a missing file": (["--resume", "lates"], "--resume lates: no such file"),
    "nothing to list": (["--list_checkpoints"], "no checkpoints in checkpoints; try another"),
}  # fmt: skip


@pytest.mark.parametrize("what", FLAGS)
def test_bad_flags_are_refused(reference, what):
    reference()
    Path("a.toml").write_text("num_layers 2")
    before = {*Path().rglob("*")}
    argv, words = FLAGS[what]
    assert words in refusal(*argv)
    new = {str(path) for path in {*Path().rglob("*")} - before if not path.name.startswith("out-")}
    assert new <= {"checkpoints", "checkpoints/.lock"}


RESUMED = {
    "different model": (["--num_layers", "3"], "--num_layers is 3, but the checkpoint was trained with 2; drop"),
    "different seed": (["--seed", "3"], "--seed is 3, but the checkpoint was trained with 1337"),
    "different tokenizer": (["--tokenizer", "gpt2"], "'gpt2'"),
    "different batch size": (
        ["--total_batch_size", "128"],
        "128, but the checkpoint was trained with 64; drop the option, or add --allow_changes",
    ),
    "different learning rate": (
        ["--max_lr", "2e-3"],
        "drop the option, or add --allow_changes to resume with the new value",
    ),
    "warm-up longer than the run": (["--warmup_steps", "99", "--allow_changes"], "--warmup_steps 99 is not shorter"),
    "end before the checkpoint": (
        ["--max_steps", "5"],
        "the checkpoint is at step 8, past the run's 5; give a larger --max_steps",
    ),
}


@pytest.mark.parametrize("what", RESUMED)
def test_changes_on_resume_are_refused(reference, what):
    reference()
    before = content(Path("reference"))
    argv, words = RESUMED[what]
    assert words in fails(*folders("reference"), "--resume", "--max_steps", "12", *argv)
    assert content(Path("reference")) == before


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_allow_changes_changes_batch_size_and_learning_rate(workdir):
    run_to_end(*folders("run"))
    changes = ("--total_batch_size", "128", "--max_lr", "2e-3", "--allow_changes")
    text = run_to_end(*folders("run"), "--resume", "--max_steps", "12", *changes)
    assert "changed      total_batch_size: 64 -> 128\nchanged      max_lr: 0.001 -> 0.002\n" in text
    assert "finished after 12 steps" in text


def test_an_epoch_has_all_rows_after_a_change_of_batch_size(workdir):
    """Read 74 rows in 10 steps of 4 rows and 5 steps of 8 rows."""
    flags = ("--max_steps", "0", "--num_epochs", "1", *folders("run"))
    run_to_end(*flags, faults=[partial(signal_at, 10)])
    text = run_to_end(*folders("run"), "--resume", "--total_batch_size", "128", "--allow_changes", tiny=())
    assert "finished after 15 steps" in text
    assert load("run/ckpt/latest.pt")["rows_consumed"] == 80


def test_a_second_trainer_in_the_same_folder_is_refused(workdir):
    first = Run("--max_steps", "100000", *folders("run"))
    first.wait_for(r"^step +3/")
    pid = first.ranks[0].pid
    assert f"run/ckpt: in use by process {pid}; wait for it" in refusal(*folders("run"), "--resume")
    other = run_to_end("--checkpoint_dir", "other", "--logdir", "run/logs", "--run_name", "other")
    assert (
        "name         other, with its logs in run/logs/other, because runs/other or run/logs belongs to another run"
        in other
    )
    first.kill()
    # The kernel releases the lock of a killed process.
    second = Run("--max_steps", "100000", *folders("run"), "--resume", "auto")
    second.wait_for(r"^step +\d+/")
    second.kill()
