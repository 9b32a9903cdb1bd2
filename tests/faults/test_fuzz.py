"""Made files for each reader: it reads them or raises a UserError of one printable line, never another exception."""

import contextlib
import io
import json
import math
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from conftest import REPO, TINY, run_here, write_data
from ground import is_of_a_run, verified, weights_content
from rich.console import Console

import prepare_dataset
from benchmarks.core_speed import TASKS, write_bundle
from convert_hf import write_folder
from model import GPT, GPTConfig
from optim import state_shapes
from steadygpt.base.options import OF_PATHS, UserError
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import as_checkpoint, check_tensors, named_tensors
from steadygpt.config import TrainConfig, parse_args
from steadygpt.convert.weights import load_model, read_weights
from steadygpt.data.shards import ShardSet, open_shard
from steadygpt.data.tasks import load_core, load_hellaswag
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer, record_named
from steadygpt.data.tokenizer_json import to_json
from steadygpt.log.metrics import read_records, read_run, read_status
from steadygpt.mirror.store import Mirror
from steadygpt.monitor.snapshot import watch
from steadygpt.monitor.table import checkpoint_table, details, mirror_table
from steadygpt.monitor.view import view
from steadygpt.prepare.manifest import Manifest
from steadygpt.run.repeats import Repeats
from steadygpt.run.step import judge
from steadygpt.start.find import with_stored_options

TASK = f"bundle/eval_data/{next(iter(TASKS.values()))[0]}/{next(iter(TASKS))}.jsonl"  # of CORE
MANY = 2000  # files for each reader in the fault storm


def mutate(content: bytes, rng: random.Random, header: int | None = None) -> bytes:
    """Make a few random changes, most of them within the first `header` bytes."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(1 + min(len(content), header if header and rng.random() < 0.8 else len(content)))
        length = rng.choice([1, 2, 4, 8, 100, 5000])
        match rng.choice("flip flip flip flip noise zeros digits cut insert truncate".split()):
            case "flip":
                content[at : at + 1] = bytes(byte ^ (1 << rng.randrange(8)) for byte in content[at : at + 1])
            case "noise":
                content[at : at + length] = rng.randbytes(length)
            case "zeros":
                content[at : at + length] = bytes(length)
            case "digits":
                content[at : at + length] = b"9" * length
            case "cut":
                del content[at : at + length]
            case "insert":
                content[at:at] = content[:length]
            case "truncate":
                del content[at:]
    return bytes(content)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(300, dtype=np.uint16))
    return file.getvalue()


def llmc() -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 300
    return header.tobytes() + np.arange(300, dtype="<u2").tobytes()


def rezipped(content: bytes, rng: random.Random) -> bytes:
    """Mutate one record and give it a valid checksum, so that torch.load reads the mutated record."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        names = old.namelist()
        victim = rng.choice([name for name in names if name.endswith("data.pkl")] * 5 + names)
        for name in names:
            new.writestr(name, mutate(old.read(name), rng) if name == victim else old.read(name))
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# made content: other types, keys, nesting and numbers

DEEP, HUGE = "@deep@", "@huge@"  # stand for what json.dumps refuses to write
ODD: list = [None, True, False, -1, 0, 1, 7, 2**63, -(2**70), 0.5, -1e308, 1e308, math.inf, -math.inf, math.nan]
ODD += ["", "\x1b[31m\n", "x" * 5000, "../../x", "/etc/passwd", "\ud800", [], {}, [[]], {"a": {}}, DEEP, HUGE]
TENSORS = [torch.zeros(0), torch.zeros(3, 3), torch.full((4,), math.nan), torch.zeros(2, dtype=torch.complex64)]
TENSORS += [torch.zeros((), dtype=torch.int8), torch.zeros(1).expand(2**40), torch.zeros(2, 2).to_sparse(), b"x", set()]


def places(content, at=()):
    """Yield the place of each part of nested dictionaries and lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def made(content, rng: random.Random, odd: list):
    """Return a copy with one part replaced, removed or renamed."""
    part = copy = deepcopy(content)
    *way, last = rng.choice([*places(content)])
    for key in way:
        part = part[key]
    value, how = rng.choice(odd), rng.choice(["replace"] * 4 + ["remove", "rename"])
    if isinstance(part[last], torch.Tensor) and rng.random() < 0.2:
        value = torch.full_like(part[last], math.nan)
    if how == "replace":
        part[last] = value
    elif how == "rename" and isinstance(part, dict):
        part[value if isinstance(value, str) else "x"] = part.pop(last)
    else:
        del part[last]
    return copy


def written(content) -> bytes:
    """Return JSON, in which numbers may be infinite or of any length, and lists nested as deep as one likes."""
    text = json.dumps(content).replace(f'"{DEEP}"', "[" * 100_000).replace(f'"{HUGE}"', "9" * 10_000)
    return text.encode("utf-8", "surrogatepass")


def of_json(content: bytes, rng: random.Random) -> bytes:
    return written(made(json.loads(content), rng, ODD)) if rng.random() < 0.8 else mutate(content, rng)


def of_a_line(content: bytes, rng: random.Random) -> bytes:
    """Change one line of a log."""
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    return b"\n".join([*lines[:number], of_json(lines[number], rng), *lines[number + 1 :], b""])


def of_yaml(content: bytes, rng: random.Random) -> bytes:
    """Return another core.yaml: with odd values, tags that PyYAML cannot construct, and references to itself."""
    odd = [value for value in ODD if value not in (DEEP, HUGE)]
    text = yaml.dump(made(yaml.safe_load(content), rng, odd), allow_unicode=True)
    if rng.random() < 0.7:
        values = '!!int "" | !!bool x | !!timestamp x | !!float x | !!binary x | !!set {x} | "\\0" | &a [*a]'
        values += " | *unknown | !x y | ? [] | 9999-99-99 | 0x | 1e400 | .nan | ~ | [[[[[[" + " | " + "9" * 5000
        lines = text.splitlines()
        number = rng.randrange(len(lines))
        name, colon, _ = lines[number].partition(":")
        lines[number] = f"{name}{colon} {rng.choice(values.split(' | '))}"
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass") if rng.random() < 0.8 else mutate(content, rng)


def of_toml(content: bytes, rng: random.Random) -> bytes:
    """Return a new preset, whatever the old one holds."""
    values = '1 -1 12.5 1e400 inf nan 0x7f 1_000 true "" "x" "gelu" "../x" [1] {} 1979-05-27 "\\u001b[31m"'.split()
    values += ["9" * 5000, "[" * 5000, '"' + "x" * 70_000 + '"', "'''\n'''"]
    names = [*TrainConfig.__dataclass_fields__, "x", '"a b"', "a.b"]
    lines = (f"{rng.choice(names)} = {rng.choice(values)}" for _ in range(rng.randint(1, 3)))
    content = "\n".join(lines).encode()
    return content if rng.random() < 0.8 else mutate(content, rng)


def accepts(read: Callable[[], object], name: str = "") -> bool:
    """Return whether a reader accepts its file; a refusal must be one line with `name`, as run_cli() prints it."""
    try:
        read()
    except UserError as error:
        assert printable(str(error)).isprintable()
        assert not name or (name in str(error) and "\n" not in str(error))
        return False
    except OSError as error:  # of a path that cannot be, which run_cli() names in one line
        assert error.filename and error.errno in OF_PATHS
        return False
    return True


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A run with its mirror and its data, a Hugging Face folder, a tokenizer, a task and a preset, in a folder."""
    folder = tmp_path_factory.mktemp("made")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        Path("x_train_000000.npy").write_bytes(npy())
        Path("x_train_000000.bin").write_bytes(llmc())
        Path("train.bin").write_bytes(np.arange(300, dtype="<u2").tobytes())
        Path("made.toml").touch()
        flags = ("--max_steps", "4", "--num_layers", "1", "--eval_freq", "2", "--mirror", f"file://{folder}/mirror")
        assert run_here(*flags, "--checkpoint_freq", "2") == 0
        Path("alone").mkdir()
        shutil.copy("checkpoints/latest.pt", "alone")
        Path("text.txt").write_text("some words " * 1000)
        assert prepare_dataset.main([*PREPARED, "--out", "prepared", "--num_workers", "1"]) == 0
        config = GPTConfig(vocab_size=257, context_length=8, num_layers=1, num_heads=1, embd_size=8)
        write_folder(weights_content(GPT(config).state_dict(), config), Path("hf"))
        shutil.copytree("hf", "parts")
        Path("parts/model.safetensors").rename("parts/one.safetensors")
        index = {"metadata": {"total_size": 9}, "weight_map": {"transformer.wte.weight": "one.safetensors"}}
        Path("parts/model.safetensors.index.json").write_text(json.dumps(index))
        write_bundle(Path("bundle"), rows=11)
        row = {"ctx": "A man", "endings": ["sits", "runs", "eats", "sees"], "label": 1}
        Path("rows.jsonl").write_text(json.dumps(row))
        Path("tokenizer.json").write_text(to_json(load_tokenizer(TokenizerRecord("bytes")).encoding))
    return folder


PREPARED = ("--source", "text.txt", "--tokenizer", "bytes", "--val_share", "0.01")


def see_monitor() -> None:
    console = Console(file=io.StringIO())
    for _, snapshot in zip(range(2), watch("checkpoints"), strict=False):
        console.print(view(snapshot, console))


def see_prepared() -> None:
    Manifest.load(Path("prepared"), prepare_dataset.parse_args([*PREPARED, "--out", "prepared"]))
    ShardSet.find("prepared", "prepared", "train")


def see_shard(name: str) -> None:
    shard = open_shard(Path(name))
    ShardSet("", "", "train", [shard], None).check(vocab_size=300)
    assert shard.num_tokens == len(shard.tokens())


def see_checkpoint() -> None:
    assert len([*checkpoint_table(Path("alone"))]) == 3  # header, this file and the summary
    assert verified("alone/latest.pt")["model"]


def see_log() -> None:
    path = Path("checkpoints/metrics.jsonl")
    see_monitor()
    Repeats.read(path, 0, 2, {"id": "0" * 16, "parent": "", "settings": {}}, {}, is_exact=True)
    read_records(path)


class Reader(NamedTuple):
    """How a file is changed and read, and how often in the fast suite."""

    change: Callable[[bytes, random.Random], bytes]
    read: Callable[[], object]
    count: int = 15
    accepts: bool = False  # whether some changes must be accepted
    refuses: bool = True  # and some refused
    named: str = ""  # in each refusal


def shard(name: str, header: int | None) -> Reader:
    return Reader(partial(mutate, header=header), partial(see_shard, name), 100, accepts=True, named=name)


READERS = {
    "x_train_000000.npy": shard("x_train_000000.npy", 128),
    "x_train_000000.bin": shard("x_train_000000.bin", 16),
    "train.bin": shard("train.bin", None),  # some changes are other tokens, within the vocabulary
    "alone/latest.pt": Reader(mutate, see_checkpoint, 80, accepts=True, named="alone/latest.pt: "),
    "alone/latest.pt, rezipped": Reader(rezipped, see_checkpoint, 30, accepts=True, named="alone/latest.pt: "),
    "made.toml": Reader(of_toml, lambda: parse_args(["--config", "made.toml"]), 40, accepts=True),
    "checkpoints/metrics.jsonl": Reader(of_a_line, see_log, accepts=True, refuses=False),  # broken lines are skipped
    "checkpoints/status.json": Reader(of_json, lambda: (read_status(Path("checkpoints")), see_monitor())),
    "checkpoints/run.json": Reader(of_json, lambda: read_run(Path("checkpoints"))),
    "mirror/index.json": Reader(of_json, lambda: [*mirror_table(Mirror(f"file://{Path.cwd()}/mirror"))]),
    "prepared/manifest.json": Reader(of_json, see_prepared),
    "rows.jsonl": Reader(of_json, lambda: load_hellaswag("rows.jsonl")),
    "bundle/core.yaml": Reader(of_yaml, lambda: load_core("bundle"), 40, accepts=True),
    TASK: Reader(of_a_line, lambda: load_core("bundle")),
    "bundle/eval_meta_data.csv": Reader(mutate, lambda: load_core("bundle")),
    "tokenizer.json": Reader(of_json, lambda: load_tokenizer(record_named("tokenizer.json")).encode("some words")),
    "hf/config.json": Reader(of_json, lambda: read_weights("hf")),
    "parts/model.safetensors.index.json": Reader(of_json, lambda: read_weights("parts")),
}


@pytest.mark.parametrize("is_storm", [False, pytest.param(True, marks=pytest.mark.storm)], ids=["few", "many"])
@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused(files, monkeypatch, name, is_storm):
    monkeypatch.chdir(files)
    reader, path, rng, read = READERS[name], Path(name.split(",")[0]), random.Random(name), 0
    count = MANY if is_storm else reader.count
    original = path.read_bytes()
    try:
        for _ in range(count):
            path.write_bytes(reader.change(original, rng))
            read += accepts(reader.read, reader.named)
    finally:
        path.write_bytes(original)
    assert read or not reader.accepts
    assert read < count or not reader.refuses


@pytest.mark.parametrize("count", [100, pytest.param(2 * MANY, marks=pytest.mark.storm)])
def test_made_checkpoints_are_used_or_refused(files, monkeypatch, count):
    monkeypatch.chdir(files)
    original, rng, read = torch.load("checkpoints/latest.pt", weights_only=True), random.Random(3), 0
    config = TrainConfig(device="cpu")
    model = load_model(original)
    kept = state_shapes(model.config, config.optimizer)

    def use(content: dict) -> None:
        checkpoint = as_checkpoint(content, Path("latest.pt"))
        assert [*details(checkpoint)]
        if not is_of_a_run(checkpoint):
            raise UserError("converted weights")  # as find.py says it
        options, _ = with_stored_options(config, {}, checkpoint["options"])
        judge(options, checkpoint["recent_losses"], 0, 1.0, None, {"loss": 1.0, "grad_norm": 1.0})
        check_tensors(checkpoint, "latest.pt", model, kept)
        assert checkpoint["rows_consumed"] == original["rows_consumed"]
        assert all(math.isfinite(score or 0) for score in checkpoint["scores"].values())
        assert all(tensor.isfinite().all() for tensor in named_tensors(checkpoint).values())

    for _ in range(count):
        content = made(original, rng, ODD + TENSORS)
        read += accepts(partial(use, content))
        if rng.random() < 0.2:  # as a file
            with contextlib.suppress(Exception):  # torch.save refuses some
                torch.save(content, "made.pt")
            accepts(lambda: verified("made.pt"))
    assert 0 < read < count


# One of each kind as a user meets it: file, what it holds, command.
COMMANDS = {
    "status": ("checkpoints/status.json", b'{"step": "x"}', ["scripts/monitor_training.py", "--once"]),
    "run": ("checkpoints/run.json", b"[]", ["train.py", *TINY, "--data_dir", "data", "--resume"]),
    "index": ("mirror/index.json", b'{"run": 1}', ["scripts/upload_manager.py", "list", "--mirror", "mirror"]),
    "manifest": ("prepared/manifest.json", b"[" * 100_000, ["inspect_data.py", "prepared"]),
    "task": ("rows.jsonl", b"{}", ["hellaswag_eval.py", "--hellaswag_file", "rows.jsonl"]),
    "config": ("hf/config.json", b'{"model_type": []}', ["convert_hf.py", "hf", "out.pt"]),
    "preset": ("made.toml", b"max_lr = [1]", ["train.py", "--config", "made.toml"]),
    "checkpoint": ("checkpoints/latest.pt", b"PK\x03\x04", ["generate.py", "checkpoints/latest.pt"]),
}


@pytest.mark.storm
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_made_file_is_one_line_of_a_command(files, kind):
    name, content, (script, *argv) = COMMANDS[kind]
    copy = shutil.copytree(files, files.with_name(f"{files.name}-{kind}"))
    (copy / name).write_bytes(content)
    argv = [f"file://{copy}/mirror" if word == "mirror" else word for word in argv]
    ended = subprocess.run([sys.executable, REPO / script, *argv], cwd=copy, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    *_, line = ended.stderr.splitlines()
    assert line.startswith("error: ") and Path(name).name in line
    assert "Traceback" not in ended.stderr
