"""Mistakes in shards, flags and TOML files: one line that says what to do, status 2, before training."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import load
from harness import Life, folders, refused, whole_life
from injected import stop_after

from steadygpt.shards import read_manifest, write_shard

SHARD = Path("data/tiny_train_000001.npy")


def rewrite(change) -> None:
    SHARD.write_bytes(change(SHARD.read_bytes()))


def without_manifest(name: str, content: bytes) -> None:
    """Shards of another tool: the file alone, beside a val shard."""
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
    "a missing folder": (lambda: Path("data").rename("elsewhere"), "no train shards in data"),
    "a missing shard": (SHARD.unlink, "tiny_train_000001.npy: missing, though manifest.json lists it"),
    "an empty shard": (lambda: rewrite(lambda _: b""), "tiny_train_000001.npy: not a .npy file"),
    "a shard cut short": (lambda: rewrite(lambda old: old[:-7]), "1,521 bytes, but its header says 700 tokens (1,528"),
    "one bit of a shard": (lambda: rewrite(lambda old: old[:-9] + b"\1" + old[-8:]), "but manifest.json says"),
    "an unfinished preparation": (lambda: manifest(complete=False), "its preparation was interrupted"),
    "a manifest that is none": (lambda: Path("data/manifest.json").write_text("{"), "not a manifest"),
    "another's vocabulary": (lambda: manifest(tokenizer="gpt2"), "vocab_size is 257, but the tokenizer 'gpt2' has"),
    "an odd size": (lambda: without_manifest("train.bin", bytes(999)), "999 bytes is not a whole number of uint16"),
    "a wrong magic": (lambda: without_manifest("a_train_0.bin", llmc(5, 1, 100)), "begins with 5; expected llm.c's"),
    "a wrong count": (lambda: without_manifest("a_train_0.bin", llmc(20240520, 1, 101)), "its header says 101 tokens"),
    "a negative count": (lambda: without_manifest("a_train_0.bin", llmc(20240520, 1, -1)), "its header says -1 tokens"),
    "a wrong dtype": (lambda: without_manifest("a_train_0.npy", npy(np.zeros(100))), "holds float64 of shape (100,)"),
    "a wrong shape": (lambda: without_manifest("a_train_0.npy", npy(np.zeros((9, 9), "u2"))), "of shape (9, 9)"),
    "shards shorter than a row": (lambda: without_manifest("train.bin", bytes(32)), "no shard has 17 tokens"),
    "no shard of a row": (lambda: without_manifest("train.bin", b""), "the longest has 0"),
    "a token outside the vocabulary": (
        lambda: without_manifest("train.bin", np.array([1] * 150 + [50257], "<u2").tobytes()),
        "train.bin: token 150 is 50257, outside the vocabulary of 50,257",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARDS)
def test_shards(workdir, what):
    spoil, words = SHARDS[what]
    spoil()
    assert words in refused(*folders("run"), "--eval_freq", "100")
    assert not list(Path().glob("run/ckpt/*.pt")) and not Path("run/logs/metrics.jsonl").exists()


@pytest.mark.parametrize(("split", "ranks"), [("train", 1), ("val", 1), ("train", 2)])
def test_shards_that_have_changed_since_the_checkpoint(workdir, split, ranks):
    flags = ("--max_steps", "4", "--eval_freq", "2", *folders("run"))
    whole_life(*flags)
    before = Path("run/ckpt/latest.pt").read_bytes()
    path = Path(f"data/tiny_{split}_00000{split == 'train':d}.npy")
    write_shard(path, np.roll(np.load(path), 1))  # of the same size, and in order by itself
    Path("data/manifest.json").unlink()
    message = refused(*flags, "--resume", "--max_steps", "9", "--tokenizer", "bytes", ranks=ranks)
    assert f"the {split} shards in data are not those that the checkpoint was trained on: found {path.name}" in message
    assert Path("run/ckpt/latest.pt").read_bytes() == before


FLAGS = {
    "an unknown flag": (["--num_layer", "3"], "unknown argument '--num_layer'; did you mean --num_layers?"),
    "a wrong type": (["--num_layers", "two"], "'two'"),
    "a fraction": (["--max_steps", "1.5"], "'1.5'"),
    "not a number": (["--max_lr", "nan"], "--max_lr is nan; expected 0 or more"),
    "a bad combination": (["--num_heads", "3"], "--embd_size 16 is not divisible by --num_heads 3"),
    "another one": (["--cpu_offload"], "--cpu_offload needs --sharding fsdp"),
    "a batch that cannot be split": (
        ["--total_batch_size", "80"],
        "--total_batch_size 64 or 96 would work, or --mini_batch_size 1",
    ),
    "too long a warm-up": (["--warmup_steps", "8"], "--warmup_steps 8 is not shorter than the run of 8 steps"),
    "an unknown device": (["--device", "tpu"], "--device tpu: not on this machine"),
    "an unknown preset": (["--config", "gpt5"], "expected a .toml file or one of: "),
    "an unknown key in TOML": (["--config", "a.toml"], "a.toml: unknown option 'num_layer'; did you mean num_layers?"),
    "a wrong type in TOML": (["--config", "b.toml"], "b.toml: num_layers is 'two' (str); expected int"),
    "no TOML": (["--config", "c.toml"], "c.toml: not TOML"),
    "weights of another model": (["--init_from", "whole/ckpt/latest.pt", "--embd_size", "32"], "embd_size is 16"),
    "spikes of any size": (["--skip_spikes", "--spike_z", "0"], "--skip_spikes needs a --spike_z above 0"),
    "nothing to resume": (["--resume"], "no checkpoints in checkpoints"),
    "an empty --resume": (["--resume="], "--resume is empty"),
    "a resume that is no file": (["--resume", "lates"], "--resume lates: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("what", FLAGS)
def test_flags(workdir, what):
    Path("a.toml").write_text("num_layer = 2")
    Path("b.toml").write_text("num_layers = 'two'")
    Path("c.toml").write_text("num_layers 2")
    if what == "weights of another model":
        whole_life(*folders("whole"))
    before = sorted(Path().rglob("*"))
    argv, words = FLAGS[what]
    assert words in refused(*argv)
    assert {path.name for path in {*Path().rglob("*")} - {*before}} <= {"checkpoints", ".lock"} | {
        path.name for path in Path().glob("out-*")
    }


RESUMED = {
    "another model": (["--num_layers", "3"], "--num_layers is 3, but the checkpoint was trained with 2; drop the flag"),
    "another seed": (["--seed", "3"], "--seed is 3, but the checkpoint was trained with 1337"),
    "another tokenizer": (["--tokenizer", "gpt2"], "'gpt2'"),
    "another batch": (
        ["--total_batch_size", "128"],
        "128, but the checkpoint was trained with 64; drop the flag, or go",
    ),
    "another learning rate": (["--max_lr", "2e-3"], "or go on with the new value by adding --allow_changes"),
    "a warm-up longer than the run": (["--warmup_steps", "99", "--allow_changes"], "--warmup_steps 99 is not shorter"),
}


@pytest.mark.parametrize("what", RESUMED)
def test_changes_on_resume(workdir, what):
    whole_life(*folders("run"))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    argv, words = RESUMED[what]
    assert words in refused(*folders("run"), "--resume", "--max_steps", "12", *argv)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before | {
        Path("run/ckpt/.lock"): Path("run/ckpt/.lock").read_bytes()
    }


def test_on_purpose_batch_and_learning_rate_change_and_it_is_told(workdir):
    whole_life(*folders("run"))
    changes = ("--total_batch_size", "128", "--max_lr", "2e-3", "--allow_changes")
    text = whole_life(*folders("run"), "--resume", "--max_steps", "12", *changes)
    assert "changed total_batch_size: 64 -> 128\nchanged max_lr: 0.001 -> 0.002\n" in text
    assert "finished after 12 steps" in text


def test_in_steps_of_another_size_an_epoch_is_still_all_of_its_rows(workdir):
    """74 of them: 10 steps of 4 rows, and the rest in 5 of 8."""
    flags = ("--max_steps", "0", "--num_epochs", "1", *folders("run"))
    whole_life(*flags, faults=[partial(stop_after, 10)])
    text = whole_life(*folders("run"), "--resume", "--total_batch_size", "128", "--allow_changes", tiny=())
    assert "finished after 15 steps" in text and load("run/ckpt/latest.pt")["rows_consumed"] == 80


def test_a_run_that_is_further_than_its_end_is_refused(workdir):
    whole_life(*folders("run"))
    message = refused(*folders("run"), "--resume", "--max_steps", "5")
    assert "the checkpoint is at step 8, past the run's 5; give a larger --max_steps" in message


def test_a_second_trainer_on_the_same_folder_is_refused(workdir):
    first = Life("--max_steps", "100000", *folders("run"))
    first.wait_for(r"^step +3/")
    pid = first.ranks[0].pid
    assert f"run/ckpt is in use by process {pid}; wait for it" in refused(*folders("run"), "--resume")
    logs = ("--checkpoint_dir", "other", "--logdir", "run/logs")
    assert f"run/logs is in use by process {pid}; give this run another --logdir" in refused(*logs)
    first.kill()
    second = Life("--max_steps", "100000", *folders("run"), "--resume", "auto")  # the lock went with its owner
    second.wait_for(r"^step +\d+/")
    second.kill()
