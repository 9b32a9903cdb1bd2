"""Mistakes: each is one line that says what to do and exit status 2, and nothing is written."""

import importlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HUB, TINY, folders, load, refusal, run_here, write_shard
from harness import Run, error_line

from steadygpt.base import retry
from steadygpt.base.durable import lock_folder
from steadygpt.base.options import UserError, run_cli
from steadygpt.config import parse_args
from steadygpt.data.shards import read_manifest

# ---------------------------------------------------------------------------------------------------------------------
# what is wrong with the files of a working directory

SHARD, MANIFEST = Path("data/tiny_train_000001.npy"), Path("data/manifest.json")
VAL_SHARD = Path("data/tiny_val_000000.npy")
RUN = Path("reference")  # of a finished run of 8 steps


def nothing() -> None: ...


def file(name: str, content: bytes) -> Callable:
    return lambda: Path(name).write_bytes(content)


def toml(content: str) -> Callable:
    return file("bad.toml", content.encode())


def shard(change: Callable[[bytes], bytes]) -> Callable:
    """Return a change of one shard of the data."""
    return lambda: SHARD.write_bytes(change(SHARD.read_bytes()))


def manifest(**changes) -> Callable:
    return lambda: MANIFEST.write_text(json.dumps(read_manifest(Path("data")) | changes))


def empty() -> None:
    for path in Path("data").iterdir():
        path.unlink()


def foreign(name: str, content: bytes | np.ndarray) -> Callable:
    """Replace the data by a val shard and one file as other tools write them, without a manifest."""

    def replace() -> None:
        empty()
        np.zeros(200, "<u2").tofile("data/val.bin")
        if isinstance(content, bytes):
            Path("data", name).write_bytes(content)
        else:
            np.save(Path("data", name), content)

    return replace


def llmc(*header: int, tokens: int = 100) -> bytes:
    return np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes() + bytes(2 * tokens)


def changed(split: str) -> Callable:
    """Replace a shard by a valid one of the same size, of another tool."""

    def change() -> None:
        path = Path(f"data/tiny_{split}_00000{split == 'train':d}.npy")
        write_shard(path, np.roll(np.load(path), 1))
        MANIFEST.unlink()

    return change


def damaged() -> None:
    """Truncate all checkpoints of the run."""
    for path in RUN.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-9])


def unreadable() -> None:
    """Put a folder in the place of the newest checkpoint, which fails as a damaged disk does."""
    (RUN / "latest.pt").unlink()
    (RUN / "latest.pt").mkdir()


def links() -> None:
    """Make links to nothing and to themselves."""
    Path("gone").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("links").mkdir()
    Path("links/latest.pt").symlink_to("../nowhere/latest.pt")


def second() -> None:
    shutil.copytree(RUN, "second")


def no_data() -> None:
    Path("data").rename("elsewhere")


def hub_fails() -> None:
    HUB.fail(".*", times=-1, status=500)


# ---------------------------------------------------------------------------------------------------------------------
# The command, what its line says (...: any text), and what is wrong with the files. "train" has flags of a tiny model.

RESUME = f"train --resume {RUN} --max_steps 12"
OF_RUN = f"--checkpoint_dir {RUN}"
HUGE = "12345678901234567890123"

FLAGS: list[tuple] = [
    # Unknown flags, also those of other trainers.
    ("train --num_layer 3", "unknown argument '--num_layer'; did you mean --num_layers?"),
    ("train --maxlr 3", "did you mean --max_lr?"),
    ("train -max_steps", "did you mean --max_steps?"),
    ("train --MAX_STEPS", "did you mean --max_steps?"),
    ("train --save_steps 5", "unknown argument '--save_steps'; use --checkpoint_freq"),
    ("train --deepspeed x.json", "; use --sharding fsdp"),
    ("train --load_checkpoint=a.pt", "; use --resume"),
    ("train --n-layer 3", "; use --num_layers"),
    ("train --num_workers 4", "; batches are read ahead by one thread, for a GPU into pinned memory; drop the flag"),
    ("train --local-rank=0", "start with torchrun --nproc_per_node=N train.py"),
    ("train --patience 3", "best_model.pt has its best validation loss; drop the flag"),
    ("train --max_time 3", "use --max_hours, in hours"),
    ("train --wandb_project x", "WANDB_PROJECT=NAME"),
    ("train --devices 2", "unknown argument '--devices'; torchrun starts one process for each GPU: "),
    ("train --device-batch-size 3", "use --mini_batch_size"),
    ("train --lr=3 --n_layer 2 --max_lr 3 word", "unknown argument '--lr'; use --max_lr; unknown argument '--n_layer'; "
     "use --num_layers; unknown argument 'word'; a preset or TOML file is --config NAME"),
    ("train --frobnicate 3", "unknown argument '--frobnicate'; see --help"),
    ("train config/train_gpt2.py", "a preset or TOML file is --config NAME, a value --flag VALUE; see docs/from-"),
    ("train modern", "unknown argument 'modern'; a preset or TOML file is --config NAME, a value --flag VALUE"),
    ("train seed=3", "unknown argument 'seed'; a preset or TOML file is --config NAME, a value --flag VALUE"),
    ("generate --max_new_tokens 3", "unknown argument '--max_new_tokens'; use --max_tokens"),  # nanoGPT's
    ("generate --start=FILE:a.txt", "use --prompt TEXT or --prompt_file FILE"),
    ("hellaswag_eval --file none.jsonl", "unknown argument '--file'; see --help"),
    # Values that an option does not accept.
    ("train --max_steps 1e3", "argument --max_steps: is '1e3'; expected an integer"),
    ("train --max_steps 9**9999", "expected an integer; see"),
    ("train --num_layers two", "argument --num_layers: is 'two'; expected an integer"),
    ("train --max_lr x", "argument --max_lr: is 'x'; expected a number"),
    ("train --seed x", "argument --seed: is 'x'; expected an integer; see --help"),
    ("train --mini_batch_size all", "argument --mini_batch_size: is 'all'; expected an integer"),
    ("train --bias maybe", "is 'maybe'; expected on or off"),
    ("train --precision fp33", "--precision is 'fp33'; expected one of auto, fp32, bf16, fp16"),
    ("train --init_from https://me:pw@host/x", "--init_from is a URL with a password or a token, which files and"),
    ("train --mirror s3://me:pw@bucket/run", "--mirror is a URL with a password or a token, which files and"),
    ("train --device tpu", "--device tpu: not on this machine; expected auto, cpu, cuda or"),
    ("train --resume=", "--resume is empty; expected a value, or drop the flag"),
    ("train --init_from=", "--init_from is empty; expected a value, or drop the flag"),
    ("train --init_from=resume", "--init_from resume: expected weights; to resume a run, use --resume"),
    ("train --init_from=latest", "--init_from latest: expected weights; to resume a run, use --resume"),
    ("train --rotary_pct 1.5", "--rotary_pct is 1.5; expected 0 to 1"),
    ("train --norm_eps 0", "--norm_eps is 0.0; expected 1e-20 or more"),
    ("train --dropout 1", "--dropout is 1.0; expected 0 to 0.99"),
    *((f"train --max_lr={value}", f"--max_lr is {float(value)}; expected 0 or more") for value in ("nan", "inf", "-1")),
    *((f"train --{name} 0", f"--{name} is 0; expected 1 ") for name in (
        "num_layers", "num_heads", "embd_size", "context_length", "total_batch_size", "keep_checkpoints", "log_freq",
        "eval_tokens")),
    *((f"train --run_name '{name}'", "--run_name is ") for name in (
        "a\n", "\x1b[2J", "x" * 201)),
    (f"generate --seed {HUGE}", "expected 0 to"),
    (f"generate --num_seq {HUGE}", "expected 1 to 10,000"),
    ("generate --num_seq 0", "1 to 10,000"),
    ("generate --max_tokens 0", "1 or more"),
    ("generate --temperature -1", "0 or more"),
    ("generate --top_k -1", "0 or more"),
    ("generate --device abacus", "--device abacus"),
    ("hellaswag_eval --limit 0", "--limit is 0; expected 1 or more"),
    ("hellaswag_eval --tasks piqa", "--tasks is 'piqa'; expected one of hellaswag, core"),
    ("hellaswag_eval --max-per-task 5", "unknown argument '--max_per_task'; use --limit"),
    (f"inspect_data data --rows {HUGE}", "expected 0 to 1,000,000"),
    ("inspect_data data --rows -1", "--rows is -1; expected 0 to 1,000,000"),
    ("convert_hf latest", "the following arguments are required: target"),
    ("monitor_training --interval_s 0", "--interval_s is 0.0; expected "),
    # Options that do not fit each other.
    ("train --embd_size 101", "--num_heads is 2; expected a divisor of embd_size, 101"),
    ("train --embd_size 128 --rotary_pct 0.05", "3 of 64 dimensions per head; expected an even number"),
    ("train --embd_size 128 --rotary_pct 0.01", "0 of 64 dimensions per head; expected an even number"),
    ("train --min_lr 0.1", "--min_lr 0.1 is above --max_lr 0.001"),
    ("train --config small_32k --min_lr 1", "--min_lr 1.0 is above --max_lr 0.0006"),
    ("train --max_steps 0 --num_epochs 0", "--max_steps, --num_epochs and --tokens_per_parameter are all 0"),
    ("train --max_steps 8 --tokens_per_parameter 20", "--max_steps and --tokens_per_parameter cannot be combined"),
    ("train --warmup_steps 8", "--warmup_steps 8 is not shorter than the run of 8 steps"),
    ("train --shard_size 2", "--shard_size needs --sharding fsdp"),
    ("train --skip_spikes --spike_z 0", "--skip_spikes needs a --spike_z above 0"),
    ("train --optimizer muon --max_lr 0 --min_lr 0", "--optimizer muon needs a --max_lr above 0"),
    ("train --total_batch_size 72", "--total_batch_size is 72; expected a multiple of"),
    ("train --total_batch_size 65536 --micro_steps 8", "--total_batch_size and --micro_steps cannot be combined"),
    ("train --mini_batch_size auto --total_batch_size 63", "--total_batch_size is 63; expected a multiple of"),
    ("generate --prompt a --prompt_file b", "give one of them"),
    ("inspect_data", "expected a folder of token shards, or --step N"),
    ("inspect_data data --step 1", "--step cannot be combined with FOLDER; drop one of them"),
    ("inspect_data checkpoints --step 1", "--step cannot be combined with FOLDER"),
    ("inspect_data --step 1 --seed 3", "--seed cannot be combined with --step"),
    # Files and folders that are missing or hold something else.
    *((f"train --{flags}", f"cannot write to {flags[-4:]}: File exists; expected", links) for flags in (
        "checkpoint_dir gone", "checkpoint_dir loop")),
    ("train --config no-such-preset", "--config no-such-preset: no such file or preset; expected a .toml file (see "),
    (f"inspect_data {'x' * 300}",
     "cannot be read (File name too long); fix the disk or the permissions, or give another path"),
    ("train --config train.yaml", "expected a .toml file (see docs/from-other-trainers.md) or one of: gpt-neox-1.2b"),
    ("generate none.pt", "none.pt: no such"),
    ("generate --prompt_file none", "--prompt_file none: No such file or directory; expected a text file"),
    ("generate --prompt_file empty", "--prompt_file empty: empty", file("empty", b"")),
    ("generate --prompt_file line", "--prompt_file line: empty", file("line", b"\n")),
    ("generate --prompt_file latin-1", "--prompt_file latin-1: not UTF-8 at byte 2", file("latin-1", b"na\xefve")),
    ("generate runs/a/latest", "runs/a/latest: not a name on the ...; there is no such file or folder either"),
    ("generate checkpoint/best", "checkpoint/best: not found on the ...; there is no such file or folder either"),
    ("hellaswag_eval none.pt", "none.pt: no such"),
    (f"hellaswag_eval {OF_RUN} --hellaswag_file none.jsonl", "none.jsonl: cannot be read"),
    (f"hellaswag_eval {OF_RUN} --tasks core --core_dir nowhere", "nowhere/core.yaml: cannot be read"),
    ("convert_hf latest out.bin", "out.bin: expected the name of a new folder, or of a checkpoint file: NAME.pt"),
    ("convert_hf best best.gguf", "best.gguf: expected a new folder, such as exported, from which llama.cpp makes "
     "such a file: python llama.cpp/convert_hf_to_gguf.py exported --outfile best.gguf"),
    ("convert_hf best best.onnx", "best.onnx: expected a new folder, such as exported, from which optimum makes such "
     "a file: optimum-cli export onnx --model exported --task text-generation NEW_FOLDER"),
    ("convert_hf latest data", "data: already exists; expected the name of a new file or folder"),
    ("convert_hf none.pt out.pt", "none.pt"),
    ("convert_hf gpt2 out", "gpt2: no answer (", hub_fails),
    ("monitor_training none",
     "none: no run; found no status.json or metrics.jsonl there or below. Try the --checkpoint_dir of a run."),
    # TOML files.
    ("train --config bad.toml", "bad.toml: unknown argument '--num_layer'; did you mean", toml("num_layer = 4")),
    ("train --config bad.toml", "bad.toml: unknown argument '--n_layer'; use --num_layers", toml("n_layer = 4")),
    ("train --config bad.toml", "argument --num_layers: is 'four'; expected an integer", toml("num_layers = 'four'")),
    ("train --config bad.toml", "argument --num_layers: is 'True'; expected an integer", toml("num_layers = true")),
    ("train --config bad.toml", "argument --num_layers: is '2.5'; expected an integer", toml("num_layers = 2.5")),
    ("train --config bad.toml", "argument --bias: is '2'; expected on or off", toml("bias = 2")),
    ("train --config bad.toml", "bad.toml: --config another: no such file or preset", toml("config = 'another'")),
    ("train --config bad.toml", "bad.toml: --config : no such file or preset", toml("config = ''")),
    ("train --config bad.toml", "bad.toml: bad.toml: the file includes itself", toml("config = 'bad.toml'")),
    ("train --config bad.toml", "bad.toml: not TOML: ", toml("num_layers 2")),
    ("train --config bad.toml", "bad.toml: not TOML: ", toml("num_layers = ")),
    ("train --config bad.toml", "bad.toml: not TOML: ", file("bad.toml", b"\xff\xfe")),
    ("train --config bad.toml", "bad.toml: not TOML", toml("max_steps = " + "[" * 100_000)),
    ("train --config bad.toml", "bad.toml: not TOML", toml("max_steps = " + "9" * 5000)),
    ("train --config bad.toml", "--seed is 99,999,999,999,999,999,999", toml("seed = 99999999999999999999")),
    ("train --config bad.toml", "bad.toml: max_steps is {'a': 1}; expected NAME = VALUE", toml("[max_steps]\na = 1")),
    ("train --config bad.toml", "bad.toml: data_dir is ['a', 'b']; expected NAME", toml("data_dir = ['a', 'b']")),
    ("train --config bad.toml", "bad.toml: data_dir is datetime.date(2026, 11, 22)", toml("data_dir = 2026-11-22")),
    ("train --config bad.toml", "data_dir is 'a\\x00b'", toml('data_dir = "a\\u0000b"')),
    ("train --config bad.toml", "bad.toml: argument --max_steps: is ", toml('max_steps = "1\\n2"')),
    ("train --config bad.toml", "bad.toml: --total_batch_size and --micro_steps cannot be combined",
     toml("total_batch_size = 65536\nmicro_steps = 8")),
]  # fmt: skip

SHARDS: list[tuple] = [
    ("train", "no train shards in data", no_data),
    ("train --dry_run --resume auto", "no train shards in data", no_data),
    ("train", "tiny_train_000001.npy: missing, though manifest.json lists it", SHARD.unlink),
    ("train", "tiny_train_000001.npy: not a .npy file", shard(lambda _: b"")),
    ("train", "1,521 bytes, but its header says 700 tokens (1,528", shard(lambda old: old[:-7])),
    ("train", "data: its preparation was interrupted", manifest(complete=False)),
    ("train", "not a manifest", file("data/manifest.json", b"{")),
    ("train", "vocab_size is 257, but the tokenizer 'gpt2' has", manifest(tokenizer="gpt2")),
    ("train --tokenizer gpt2", "--tokenizer is 'gpt2'; data was prepared with 'bytes'; drop the flag"),
    ("train", "999 bytes without a header are not ids in uint16", foreign("train.bin", bytes(999))),
    ("train", "no header of llm.c; expected", foreign("a_train_0.bin", llmc(5, 1, 100))),
    ("train", "header says 101 tokens", foreign("a_train_0.bin", llmc(20240520, 1, 101))),
    ("train", "header says -1 tokens", foreign("a_train_0.bin", llmc(20240520, 1, -1))),
    ("train", "holds float64 of shape (100,)", foreign("a_train_0.npy", np.zeros(100))),
    ("train", "of shape (9, 9)", foreign("a_train_0.npy", np.zeros((9, 9), "u2"))),
    ("train", "train.bin: the longest shard of its split; found 16 tokens, ... 17", foreign("train.bin", bytes(32))),
    ("train --eval_freq 9", "the longest shard of its split; found 0 tokens", foreign("train.bin", b"")),
    ("train --tokenizer gpt7", "unknown tokenizer 'gpt7'; did you mean gpt2? expected bpe:N, ..., or one of bytes, ",
     MANIFEST.unlink),
    ("inspect_data none",
     "no train shards in none (...); prepare some with 'python prepare_dataset.py ... --out none'"),
    ("inspect_data a.txt",
     "no train shards in a.txt (...); prepare some with 'python prepare_dataset.py --source a.txt'",
     file("a.txt", b"text")),
    ("inspect_data data", "no train shards in data (...); prepare some with 'python prepare_dataset.py --source data'",
     lambda: (empty(), Path("data/a.jsonl").write_text("{}"))),
    ("inspect_data data", "no train shards in data", empty),
    ("inspect_data data", "tiny_train_000001.npy: 1,527 bytes, but its header says 700 tokens",
     shard(lambda old: old[:-1])),
    ("inspect_data data", "but manifest.json says", shard(lambda old: old[:-2] + b"ab")),
    ("inspect_data data", "data: its preparation was interrupted", manifest(complete=False)),
    ("inspect_data data --tokenizer gpt2", "data was prepared with 'bytes'; drop the flag"),
    ("inspect_data data --tokenizer bytes", "id 300 at position 2, outside the vocabulary of 257; name",
     foreign("train.bin", np.array([1, 2, 300], "<u2").tobytes())),
]  # fmt: skip

READ_LAST: list[tuple] = [  # the content of shards, which takes long to read: after the plan
    ("train", "but manifest.json says", shard(lambda old: old[:-9] + b"\1" + old[-8:])),
    ("train", "train.bin: holds token id 50257 at position 150, outside the vocabulary of 50,257",
     foreign("train.bin", np.array([1] * 150 + [50257], "<u2").tobytes())),
    (f"train {OF_RUN} --eval_only --eval_freq 4", "tiny_val_000000.npy: SHA-256 ...; the file is damaged",
     lambda: write_shard(VAL_SHARD, np.roll(np.load(VAL_SHARD), 1))),
]  # fmt: skip

CHECKPOINTS: list[tuple] = [
    ("train --resume", "no checkpoints in checkpoints"),
    ("train --resume lates", "--resume lates: no such file"),
    ("train --resume s3://bucket/run", "to resume from a store, use --resume latest --mirror s3://bucket/run"),
    ("generate bset", "bset: no such file or folder; did you mean best?"),
    ("generate lates", "lates: no such file or folder; did you mean latest?"),
    ("generate s3://bucket/run", "with python scripts/upload_manager.py download latest --mirror s3://bucket/run"),
    ("train --resume hf", "hf: a Hugging Face folder, not one of a run; start a run with --init_from hf",
     lambda: (Path("hf").mkdir(), Path("hf/config.json").write_text("{}"))),
    ("train --resume data", "no checkpoints in data; give another folder"),
    ("train --resume weights.pt", "not a checkpoint of SteadyGPT", lambda: torch.save({"weight": 0}, "weights.pt")),
    ("upload_manager list", "--mirror is missing; expected a URL"),
    ("upload_manager upload-all best", "upload-all best: expected no name"),
    ("train --list_checkpoints", "no checkpoints in checkpoints; give another"),
    ("inspect_data --step 1", "no checkpoints in checkpoints; give another folder"),
    (f"train {OF_RUN}",
     f"{RUN} already holds checkpoints; resume from them with --resume latest, or use another --checkpoint_dir"),
    (f"train {OF_RUN} --resume", f"{RUN}: in use by process ... on ...; wait for it", lambda: lock_folder(RUN, "")),
    (f"train {OF_RUN} --resume", f"{RUN}: all checkpoints are corrupt: {RUN}/latest.pt: corrupt (", damaged),
    (f"train {OF_RUN} --resume", f"{RUN}/latest.pt: cannot be read (", unreadable),
    (f"train --init_from {RUN}/latest.pt --embd_size 32", "embd_size is 16"),
    (f"train --init_from {RUN}/latest.pt --num_heads 4", "num_heads is 2, but this run has 4"),
    (f"train {OF_RUN} --resume second/latest.pt", f"{RUN} already holds checkpoints", second),
    *((f"train --checkpoint_dir links --resume {which}",
       "links: all checkpoints are corrupt: links/latest.pt: no such file", links)
      for which in ("latest", "auto")),
    (f"train {OF_RUN} --resume loop", "/loop: no such file; expected latest, auto", links),
    # Changes that a resume does not accept.
    (f"{RESUME} --optimizer muon", "--optimizer is 'muon', but the checkpoint was trained with 'adamw'"),
    (f"{RESUME} --seed 5", "--seed is 5, but the checkpoint was trained with 1337; drop the option, or start a new run "
     "in another --checkpoint_dir"),
    (f"{RESUME} --allow_changes --min_lr 5e-3", "--min_lr 0.005 is above --max_lr 0.001"),
    (f"{RESUME} --num_layers 3", "--num_layers is 3, but the checkpoint was trained with 2; drop"),
    (f"{RESUME} --tokenizer gpt2", "--tokenizer is 'gpt2', but the checkpoint was trained with 'bytes'; drop"),
    (f"{RESUME} --total_batch_size 128",
     "128, but the checkpoint was trained with 64; drop the option, or add --allow_changes"),
    (f"{RESUME} --max_lr 2e-3", "drop the option, or add --allow_changes to resume with the new value"),
    (f"{RESUME} --warmup_steps 99 --allow_changes", "--warmup_steps 99 is not shorter"),
    (f"{RESUME} --max_steps 5", "the checkpoint is at step 8, past the run's 5; give a larger --max_steps"),
    (f"{RESUME} --tokenizer bytes", "the training data is ..., but the checkpoint was trained on", changed("train")),
    # The rows of a step that inspect_data.py reads again.
    (f"inspect_data {OF_RUN} --step 8",
     f"--step is 8; expected less than 8, because the run of {RUN}/latest.pt ends there"),
    (f"inspect_data {OF_RUN} --step 1", "the file is damaged", shard(lambda old: old[:-2] + b"ab")),
    (f"inspect_data {OF_RUN} --step 1",
     "data: not the shards that step 1 trained on; found SHA-256 ..., expected ...; copy those back", changed("train")),
    (f"inspect_data {OF_RUN} --step 1",
     "data: no such folder here, but step 1 trained on its shards; start in the folder where training did", no_data),
]  # fmt: skip


@pytest.fixture
def shared_place(reference, standin, monkeypatch) -> Path:
    """A working directory with data/ and the finished run reference/, which other tests read."""
    monkeypatch.setattr(retry, "FIRST_PATIENCE_S", 0)
    monkeypatch.setattr(retry, "PATIENCE_S", 0)
    return reference("--eval_freq", "4")


@pytest.fixture
def place(shared_place, tmp_path, monkeypatch) -> Path:
    """A copy of it."""
    shutil.copytree(shared_place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_mistyped_folder_to_resume_from_is_not_created(workdir):
    for flags in (["--resume", "latest", "--checkpoint_dir", "typo"], ["--resume", "typo/latest.pt"]):
        with refusal("typo"):
            run_here(*flags)
    assert not Path("typo").exists()


def contents() -> dict[Path, bytes | None]:
    """Return path -> content of all files and folders, but locks, which stay, and folders with nothing else."""
    found: dict[Path, bytes | None] = {}
    for path in Path().rglob("*"):
        if path.is_file() and path.name != ".lock":
            found[path] = path.read_bytes()
        elif path.is_dir() and os.listdir(path) != [".lock"]:
            found[path] = None
    return found


@pytest.fixture
def refuses(request, monkeypatch, capsys) -> Callable:
    """refuses(command, said, wrong) runs a command after wrong(), and checks its line, its status and all files.

    A run may have printed its plan before, if `has_plan`.
    """

    def refuses(command: str, said: str, wrong: Callable = nothing, has_plan: bool = False) -> None:
        request.getfixturevalue("shared_place" if wrong is nothing else "place")
        held = wrong()  # noqa: F841 (a lock, until the test ends)
        before = contents()
        program, *argv = shlex.split(command)
        argv = [*TINY, "--data_dir", "data", *argv] if program == "train" else argv
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as ended:
            run_cli(partial(importlib.import_module(program).main, argv))
        out, err = capsys.readouterr()
        assert ended.value.code == 2, err
        assert out == "" or (has_plan and out.startswith("run  ") and "\nstep " not in out)
        assert err.startswith("error: ") and err.count("\n") == 1
        assert re.search(re.escape(said).replace(r"\.\.\.", ".*"), err)
        assert contents() == before

    return refuses


def each_of(rows: list[tuple]):
    return pytest.mark.parametrize("row", rows, ids=[f"{number} {row[0][:60]}" for number, row in enumerate(rows)])


@each_of(FLAGS)
def test_bad_flags_are_refused(refuses, row):
    refuses(*row)


@each_of(SHARDS)
def test_bad_shards_are_refused(refuses, row):
    refuses(*row)


@each_of(READ_LAST)
def test_the_content_of_shards_is_refused_before_the_first_step(refuses, row):
    refuses(*row, has_plan=True)


@each_of(CHECKPOINTS)
def test_checkpoints_that_do_not_fit_and_changes_on_resume_are_refused(refuses, row):
    refuses(*row)


@pytest.mark.parametrize(("flags", "said", "ranks"), [
    ("--sharding fsdp --shard_size 2 --total_batch_size 96",
     "--shard_size 2 is not a divisor of the number of processes, 3", 3),
    (f"--checkpoint_dir {'x' * 300}", "File name too long; expected", 1),
])  # fmt: skip
def test_a_process_ends_with_one_line_whatever_kind_of_error_it_is(place, flags, said, ranks):
    assert said in error_line(*flags.split(), ranks=ranks)


@pytest.mark.storm
def test_shards_changed_since_the_checkpoint_are_refused_on_all_ranks(place):
    changed("train")()
    before = contents()
    line = error_line(*shlex.split(f"{OF_RUN} --resume --max_steps 12 --tokenizer bytes"), ranks=2)
    assert re.search(r"the training data is data 100.0% \(data, SHA-256 \w+\.\.\.\), but the checkpoint", line)
    assert {path: content for path, content in contents().items() if path in before} == before


def test_a_long_value_is_refused_within_a_second():
    before_s = time.process_time()
    for value in ("x" * 200_000, "-" * 200_000):
        with pytest.raises(UserError, match="--precision"):
            parse_args(["--config", "test", f"--precision={value}"])
    assert time.process_time() - before_s < 1


def test_a_second_trainer_in_the_same_folder_is_refused(workdir):
    first = Run("--max_steps", "100000", *folders("run"))
    first.wait_for(r"^step +3/")
    with pytest.raises(UserError, match=f"run: in use by process {first.ranks[0].pid} on"):
        run_here(*folders("run"), "--resume")
    first.kill()
    # The kernel releases the lock of a killed process.
    assert run_here("--max_steps", "100000", "--max_hours", "1e-9", *folders("run"), "--resume", "auto") == 0


# ---------------------------------------------------------------------------------------------------------------------
# changes that --allow_changes permits


def test_allow_changes_changes_batch_size_and_learning_rate(place, capsys):
    changes = ("--total_batch_size", "128", "--max_lr", "2e-3", "--allow_changes")
    assert run_here("--resume", str(RUN), "--max_steps", "12", *changes) == 0
    text = capsys.readouterr().out
    assert "\nchanged      max_lr: 0.001 -> 0.002\n" in text
    assert "\nchanged      total_batch_size: 64 -> 128\n" in text
    assert "finished after 12 steps" in text


def test_an_epoch_has_all_rows_after_a_change_of_batch_size(workdir):
    """Read 74 rows in 10 steps of 4 rows and 5 steps of 8 rows."""
    assert run_here("--max_steps", "10") == 0
    epoch = ("--max_steps", "0", "--num_epochs", "1", "--total_batch_size", "128", "--allow_changes")
    assert run_here("--resume", *epoch) == 0
    found = load("checkpoints/latest.pt")
    assert (found["step"], found["rows_consumed"]) == (15, 80)
