"""The benchmarks: each at its smallest setting, the figures they compute, the suite for GPUs."""

import argparse
import ast
import gzip
import importlib.util
import io
import json
import math
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from random import Random

import pytest
from conftest import REPO

from benchmarks import gpu_suite, linux_text, modded_run, tokens_to_loss
from benchmarks.compare import pairs_of_equal_precision, report
from benchmarks.gpu_suite import Row
from benchmarks.tokens_to_loss import Run, expected_s, first_in_time
from steadygpt.base.options import UserError
from steadygpt.config import parse_args


def run_suite(monkeypatch, tmp_path, rows: list[Row], *further: str) -> dict:
    """Run the suite with other rows; return name -> text."""
    monkeypatch.setattr(gpu_suite, "ROWS", rows)
    if "{out}/data" not in rows[0].command:
        monkeypatch.setattr(gpu_suite, "write_tokens", lambda *_: None)
    gpu_suite.main(["--out", str(tmp_path), *further])
    return {row["name"]: row["text"] for row in json.loads((tmp_path / "gpu_suite.json").read_text())["rows"].values()}


SMALLEST = {  # of the benchmarks that are not in the suite for GPUs
    "core_speed": "--rows 11 --rounds 1 --size 1 1 8",
    "cast": "--data {tmp}/cast.json --plot {tmp}/cast.svg",
    "kill_curve": "--kills 1 --steps 4 --ranks 1 --plot {tmp}/steady.svg",
    "prepare_speed": "--megabytes 10 --rounds 1",
    "repeated_steps": "--precision fp32 --ranks 1 --models gpt2 --steps 20 24",
    "tokens_to_loss": "--scale tiny --out {tmp} --only 'sweep/gpt2 max_lr 0.008*'",
}
QUICK = [row for row in gpu_suite.ROWS if row.quick]
QUICK += [Row("fast", name, 300, f"-m benchmarks.{name} {flags}") for name, flags in SMALLEST.items()]
NOT_RUN = {"monitor_picture", "quickstart_curve"}  # train for longer
NOT_RUN |= {"nanochat_run", "modded_run"}  # need checkouts of other projects
NOT_RUN |= {"linux_text"}  # needs a tarball; tested below
NOT_RUN |= {"reference_run", "compare", "gpu_suite", "picture"}  # parts of benchmarks


@pytest.mark.parametrize("row", [
    pytest.param(row, marks=() if "checkpoint_cost" in row.command else pytest.mark.storm, id=row.name) for row in QUICK
])  # fmt: skip
def test_each_benchmark_runs_at_its_smallest_setting(row, monkeypatch, tmp_path):
    [text] = run_suite(monkeypatch, tmp_path, [row], *["--quick"] * bool(row.quick)).values()
    assert not re.match("failed|no time", text), text


def test_each_benchmark_can_be_imported_and_has_a_smallest_setting():
    names = {path.stem for path in (REPO / "benchmarks").glob("*.py")} - {"__init__"}
    for name in names:
        importlib.import_module(f"benchmarks.{name}")
    assert names - NOT_RUN == set(re.findall(r"-m benchmarks\.(\w+)", " ".join(row.command for row in QUICK)))


# ---------------------------------------------------------------------------------------------------------------------
# figures


def test_ratios_compare_equal_precision_and_the_defaults_on_a_cpu(capsys, tmp_path):
    figures = {"SteadyGPT, bf16": [8.0, 6.0], "nanoGPT, bf16": [4.0, 4.0]}
    figures |= {"SteadyGPT, fp32": [3.0, 3.0], "nanoGPT, fp32": [2.0, 2.0], "GEMM limit, fp32": [4.0, 4.0]}
    args = argparse.Namespace(json=tmp_path / "found.json", plot=None)
    report(figures, "tokens/s", args, pairs_of_equal_precision(figures))
    assert [line for line in capsys.readouterr().out.splitlines() if " / " in line] == [
        "SteadyGPT, bf16 / nanoGPT, bf16: 1.75 (1.50 to 2.00)",
        "SteadyGPT, fp32 / nanoGPT, fp32: 1.50 (1.50 to 1.50)",
        "SteadyGPT, fp32 / GEMM limit, fp32: 0.75 (0.75 to 0.75)",
        "SteadyGPT, bf16 / nanoGPT, fp32: 3.50 (3.00 to 4.00)",
    ]
    report({"waiting": [1.0, 2.0, 6.0]}, "%", args)  # is added
    found = json.loads(args.json.read_text())
    assert found["SteadyGPT, bf16 / nanoGPT, bf16"] == {"median": 1.75, "low": 1.5, "high": 2.0, "unit": ""}
    assert found["waiting"] == {"median": 2.0, "low": 1.0, "high": 6.0, "unit": "%"}


# ---------------------------------------------------------------------------------------------------------------------
# tokens and time until a loss


FILES = {
    "mm/slab.c": b"int slab;\n",
    "mm/odd name,\n\xc3\xa9.h": b"int odd;\n",
    "Documentation/caf\xc3\xa9.rst": "café\n".encode(),
    "fs/ubifs/tnc.c": b"int held_out;\n",
    "fs/ubifs.c": b"int beside;\n",
}
LEFT_OUT = {
    "mm/latin.c": b"\xe9t\xe9\n",
    "mm/zero.c": b"a\0b",
    "mm/empty.c": b"",
    "mm/table.c": b"0," * 200_000,
    "mm/Makefile": b"all:\n",
    "drivers/gpu/gpu.c": b"int gpu;\n",
    "README.rst": b"Linux\n",
}


def pack(tarball: Path, root: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(tarball, "w:xz" if tarball.suffix == ".xz" else "w", errors="surrogateescape") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{root}/{name.encode('latin-1').decode(errors='surrogateescape')}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for kind, name in ((tarfile.SYMTYPE, "mm/soft.c"), (tarfile.LNKTYPE, "mm/hard.c"), (tarfile.DIRTYPE, "mm/d.c")):
            member = tarfile.TarInfo(f"{root}/{name}")
            member.type = kind
            member.linkname = f"{root}/mm/slab.c"
            archive.addfile(member)
    return tarball


def test_the_text_of_linux_depends_on_names_and_contents_alone(tmp_path, capsys):
    files = FILES | LEFT_OUT | {"mm/name\xe9.c": b"a name that is not UTF-8\n"}
    in_turn = pack(tmp_path / "linux-6.12.tar.xz", "linux-6.12", files)
    reverse = pack(tmp_path / "linux-source.tar", "linux-source-6.1", dict(reversed(files.items())))
    outs = []
    for tarball in (in_turn, reverse):
        outs.append(tmp_path / f"{tarball.name}.jsonl.gz")
        linux_text.main([str(tarball), str(outs[-1]), "--compare"])
    assert outs[0].read_bytes() == outs[1].read_bytes()
    [digest] = set(re.findall(r"SHA-256 of the uncompressed text: (\w{64})$", capsys.readouterr().out, re.MULTILINE))
    documents = [json.loads(line) for line in gzip.open(outs[0])]
    assert {d["name"].encode().decode("latin-1"): d["text"].encode() for d in documents} == FILES
    assert [d["name"] for d in documents if d["split"] == "val"] == ["fs/ubifs/tnc.c"]
    linux_text.main([str(in_turn), str(outs[0]), "--megabytes", "0.00004"])  # the first documents of the same order
    assert [json.loads(line) for line in gzip.open(outs[0])] == documents[:3]
    assert digest not in capsys.readouterr().out


def test_the_text_needs_sources_of_linux(tmp_path):
    (tmp_path / "notes.tar").write_text("not a tarball")
    pack(tmp_path / "other.tar", "other", {"README.rst": b"other\n"})
    packed = bytearray(pack(tmp_path / "whole.tar.xz", "linux", FILES).read_bytes())
    (tmp_path / "cut.tar").write_bytes(packed[: len(packed) // 2])
    packed[len(packed) // 2] ^= 255
    (tmp_path / "damaged.tar").write_bytes(packed)
    messages = dict.fromkeys(("notes", "missing", "cut", "damaged"), "cannot be read")
    for name, message in (messages | {"other": "found no files of"}).items():
        with pytest.raises(UserError, match=rf"/{name}.tar: {message}.*$"):
            linux_text.main([str(tmp_path / f"{name}.tar"), str(tmp_path / "out.gz")])
    assert not (tmp_path / "out.gz").exists()


@pytest.mark.storm
def test_a_text_is_split_tokenized_and_trained_on(tmp_path):
    """The scale 124m in small. Results that were copied to another machine do not mix with those of another text."""
    letters = Random(0)
    text = {f"mm/{i}.c": "".join(letters.choices("int main(); \n", k=2000)).encode() for i in range(30)}
    tarball = pack(tmp_path / "linux.tar", "linux", text | {"net/sctp/input.c": b"int sctp; " * 100})
    linux_text.main([str(tarball), str(tmp_path / "linux.jsonl.gz")])
    options = ["--scale", "tiny-text", "--text", str(tmp_path / "linux.jsonl.gz"), "--out", str(tmp_path / "out")]
    assert tokens_to_loss.main([*options, "--only", "sweep/gpt2 max_lr 0.001*"]) == 0
    [file] = (tmp_path / "out" / "tiny-text").glob("*/losses.json")
    assert "20" in json.loads(file.read_text())
    assert not list(file.parent.glob("*.pt"))
    (tmp_path / "out" / "tiny-text" / "tokens.sha256").write_text("those of another text")
    assert tokens_to_loss.main([*options, "--only", "sweep/gpt2 max_lr 0.001*"]) == 0  # has finished
    with pytest.raises(UserError, match="tokens that differ"):
        tokens_to_loss.main([*options, "--only", "sweep/gpt2 max_lr 0.002*"])


def test_no_run_is_started_that_would_not_end_in_time():
    random = Random(0)
    for _ in range(300):
        all_runs = [
            Run("sweep", random.choice(["gpt2", "modern", "modded"]), (), random.choice([10, 30, 100]), seed)
            for seed in range(10)
        ]
        finished = all_runs[: random.randrange(8)]
        waiting = all_runs[len(finished) :]
        durations = {run: random.uniform(1, 100) for run in finished}
        left_s = random.choice([-1.0, random.uniform(0, 200), float("inf")])
        chosen = first_in_time(waiting, durations, left_s)
        fits = [left_s > 0 and (expected_s(run, durations) or 0) <= left_s for run in waiting]
        assert chosen == (waiting[fits.index(True)] if any(fits) else None)
        if left_s > 0 and not finished:
            assert chosen == waiting[0]


def test_the_time_of_a_run_follows_from_similar_ones():
    durations = {Run("sweep", "gpt2", (), 100, 1): 60.0, Run("sweep", "gpt2", (), 100, 2): 50.0}
    durations[Run("final", "modern", (), 30)] = 40.0
    expected = {("gpt2", 100): 60, ("gpt2", 200): 120, ("gpt2", 20): 60, ("modern", 60): 80, ("modded", 100): 60}
    assert {(side, n): expected_s(Run("final", side, (), n), durations) for side, n in expected} == expected


BASELINE = """
import math
print("training")
class GPT: pass
@decorated
def muon_update(): pass
for _ in range(3): pass
for _ in range(num_trials):
    train_steps = 3250
    optimizers = [math.pi]
    def set_hparams(step): return optimizers, train_steps
    raise SystemExit("training")
"""


def test_the_setup_of_the_baseline_is_read_without_training(tmp_path, capsys):
    (tmp_path / "train_gpt_simple.py").write_text(BASELINE)
    definitions, setup = modded_run.definitions_and_setup(tmp_path / "train_gpt_simple.py")
    definitions[-1].decorator_list = []
    names = {"train_steps": 460}
    for statements in (definitions, setup):
        exec(compile(ast.Module(statements, []), "baseline", "exec"), names)
    assert names.keys() >= {"GPT", "muon_update"}
    assert names["set_hparams"](0) == ([math.pi], 460)
    assert not capsys.readouterr().out


def test_the_scale_of_124m_needs_a_text_unless_nothing_is_trained(tmp_path, capsys):
    options = ["--scale", "124m", "--out", str(tmp_path)]
    with pytest.raises(UserError, match=r"^--scale 124m: found no --text FILE, expected one. Try .*linux_text$"):
        tokens_to_loss.main(options)
    with pytest.raises(UserError, match="found no file"):
        tokens_to_loss.main([*options, "--text", str(tmp_path / "missing")])
    assert tokens_to_loss.main([*options, "--list"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "124m sweep/modern, 460 steps, seed 1337: not finished"
    assert tokens_to_loss.main([*options, "--minutes", "0"]) == 0
    assert "no time for" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# the suite for GPUs


def is_running(pid: str) -> bool:
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    return not state.startswith("Z") and bool(state)


MEASURES = "import json, sys; json.dump({'speed': FIGURE}, open(sys.argv[1], 'w'))".replace(
    "FIGURE", "dict(median=1234.5, low=1200, high=1300, unit='tokens/s')"
)
LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("CHILD", "w").write(str(child.pid))
print("compiling", flush=True)
time.sleep(600)
"""


def fake(name: str, program: str, limit_s: float = 20) -> Row:
    command = shlex.join(["-c", program.replace("{", "{{").replace("}", "}}"), "{json}"])
    return Row("fast", name, limit_s, command, target="fast enough")


def test_a_row_that_fails_or_hangs_costs_only_itself(monkeypatch, tmp_path):
    child = tmp_path / "child"
    rows = [
        fake("first", MEASURES),
        fake("memory", "print('step 1'); raise MemoryError('CUDA out of memory')"),
        fake("hangs", LEAVES_A_CHILD.replace("CHILD", str(child)), limit_s=3),
        fake("killed", "import os; os.kill(os.getpid(), 9)"),
        fake("tests", "print('=== 3 passed in 2 s ===')"),
        fake("long", MEASURES, limit_s=1000),
    ]
    first = "speed 1,234 tokens/s (1,200 to 1,300)"
    assert run_suite(monkeypatch, tmp_path, rows, "--minutes", "2") == {
        "first": first,
        "memory": "failed: MemoryError: CUDA out of memory",
        "hangs": "failed: did not end in 3 s; compiling",
        "killed": "failed: killed by SIGKILL; no output",
        "tests": "3 passed in 2 s",
        "long": "no time left",
    }
    assert not is_running(child.read_text())  # also a process in a session of its own
    assert f"| fast | first | {first} | fast enough |" in (tmp_path / "gpu_suite.md").read_text()


def test_another_call_runs_only_what_has_no_result(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # GPU images often lack git
    monkeypatch.setattr(gpu_suite, "git_commit", gpu_suite.git_commit.__wrapped__)  # without its cache
    first = run_suite(monkeypatch, tmp_path, [fake("a", MEASURES), fake("b", "raise ValueError('once')")])
    assert first["b"] == "failed: ValueError: once"
    rows = [fake("a", "raise ValueError('again')"), fake("b", MEASURES)]
    assert run_suite(monkeypatch, tmp_path, rows) == {"a": first["a"], "b": first["a"]}
    with pytest.raises(SystemExit, match="has figures with quick False"):
        run_suite(monkeypatch, tmp_path, rows, "--quick")


@pytest.mark.parametrize("row", gpu_suite.ROWS, ids=lambda row: row.name)
def test_the_command_of_each_row_exists(row):
    """A visit to a GPU is short: a row that cannot run would be lost."""
    words = shlex.split(row.command)
    module = words[1] if words[0] == "-m" else words[0]
    assert (REPO / module).exists() or importlib.util.find_spec(module)
    assert all(Path(REPO, word).exists() for word in words if word.startswith("tests/"))
    if "--config" in words:
        assert (REPO / "configs" / f"{words[words.index('--config') + 1]}.toml").exists()
    if module == "train.py":
        assert parse_args(words[1:])[0].profile == 5


@pytest.mark.storm
@pytest.mark.parametrize("row", [row for row in gpu_suite.ROWS if row.part == "right"], ids=lambda row: row.name)
def test_the_rows_of_tests_find_tests_in_each_file(row):
    words = [word.format(device="cpu") for word in shlex.split(row.command)]
    words = [word for word in words if word not in ("-v", "-n", "auto", "--dist", "worksteal")]
    collect = [sys.executable, *words, "--collect-only", "-q"]
    done = subprocess.run(collect, cwd=REPO, capture_output=True, text=True, check=True)
    for path in words:
        assert not path.startswith("tests/") or f"\n{path}::" in f"\n{done.stdout}"
