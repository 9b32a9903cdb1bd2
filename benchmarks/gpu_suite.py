"""Every figure that needs a GPU, as one command: right, fast, fits in memory, where the time goes.

    python -m benchmarks.gpu_suite --out FOLDER --parts right
    python -m benchmarks.gpu_suite --out FOLDER --parts fast --nanogpt nanoGPT --build_nanogpt build-nanogpt \\
        --hellaswag_file hellaswag_val.jsonl
    python -m benchmarks.gpu_suite --out FOLDER --parts fits,trace
    python -m benchmarks.gpu_suite --out FOLDER --quick --device cpu      # tiny shapes, to try the command

A part ends within --minutes, so that it fits into a short loan of a GPU. It adds its rows to FOLDER/gpu_suite.json and
rewrites FOLDER/gpu_suite.md, a section for RESULTS.md. A row is a process with a time limit: if it fails, hangs or runs
out of memory, the table gives the reason and the other rows run. The next call runs the rows without a figure only.
Nothing is downloaded; tokens are random.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import REPO, die_with_parent, exit_on_signals, figure, flags, reason_of
from benchmarks.suite_report import PARTS, Report, row_text
from steadygpt.runlog import git_commit

MOST_MINUTES = 9.5
LONGEST_KILL_S = 15  # for the driver to release the memory of killed processes
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
TINY = flags(
    num_layers=2, num_heads=2, embd_size=64, context_length=64, mini_batch_size=2, total_batch_size=256,
    precision="fp32", compile="off", tokenizer="bytes",
)  # fmt: skip
# The presets by how much their memory matters; others in configs/ follow. The first two are measured with --quick.
PRESETS = ["test", "quickstart"], ["gpt2", "gpt-neox-1.2b", "small_32k", "gpt2-medium", "gpt2-large"]
SLOW = "gpt2-xl"  # compiles 48 layers: it comes last, where a short visit has no time left

FACTS = """
import json, platform, torch
from steadygpt.device import device_name
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(json.dumps({
    "kind": device.type, "device": device_name(device), "count": torch.cuda.device_count(),
    "software": f"torch {torch.__version__}, Python {platform.python_version()}",
}))
"""


@dataclass(frozen=True)
class Row:
    """One row of the table: a Python command in its own process.

    Args:
        key: PART/NAME.
        limit_s: the process is killed after this; the row starts only if half of it is left to the part.
        missing: why the row cannot run.
        note: shown beside its figures.
        unless: key of a row whose ratio makes this row unnecessary.
    """

    key: str
    title: str
    command: list[str]
    limit_s: float
    missing: str = ""
    note: str = ""
    unless: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# the rows of each part, the worthiest first


def right_rows(args, device: str) -> Iterator[Row]:
    """Yield groups of tests; a hang costs one group."""
    pytest = ["-m", "pytest", "-q", "-p", "benchmarks.outcomes", "-p", "no:cacheprovider", "--device", device]
    if importlib.util.find_spec("xdist"):
        pytest += ["-n", str(max(2, min(8, (os.cpu_count() or 2) // 2))), "--dist", "worksteal"]
    own = "tests/test_on_device.py"
    groups = [
        ("model", "the model's numbers beside the CPU's", [own, "-k", "test_model"], 150),
        ("runs", "whole runs: kill, stop, bad steps, checkpoints", [own, "-k", "test_run"], 150),
        ("ranks", "ranks: DDP and FSDP", [own, "-k", "test_ranks"], 150),
    ]
    if not args.quick:
        faults, quick_stop = "tests/faults", "not torchrun and not hanging and not lost"
        groups += [
            ("resume", "tests of resuming", ["tests/test_resume.py"], 120),
            ("divergence", "tests of bad steps", [f"{faults}/test_divergence.py"], 120),
            ("stop", "tests of stops", [f"{faults}/test_stop.py", "-k", quick_stop], 120),
            ("kill", "kill -9 at each call of a save", [f"{faults}/test_kill.py", "-k", "each_call"], 120),
        ]
    missing = "" if importlib.util.find_spec("pytest") else "pytest is not installed"
    for name, title, arguments, limit_s in groups:
        yield Row(f"right/{name}", title, [*pytest, *arguments], limit_s, missing)


def fast_rows(args, device: str) -> Iterator[Row]:
    alone: tuple[list[str], str] = ([], "")
    nanogpt = ["--nanogpt", str(args.nanogpt)], ""
    if not args.nanogpt:
        nanogpt = [], "ours alone: --nanogpt is not given"
    build_nanogpt = ["--build_nanogpt", str(args.build_nanogpt)], ""
    if absent := [name for name in ("transformers", "requests", "safetensors") if not importlib.util.find_spec(name)]:
        build_nanogpt = [], f"ours alone: {', '.join(absent)} not installed"
    if not args.build_nanogpt:
        build_nanogpt = [], "ours alone: --build_nanogpt is not given"

    def row(name: str, title: str, limit_s: float, command: str, tiny: str = "", beside=alone, **options) -> Row:
        if args.quick:
            options |= {} if tiny else {"missing": "--quick leaves it out: another row runs the same code"}
            limit_s, command, title = 60, tiny or command, f"{title} (tiny)"
        module, *arguments = command.split()
        command = ["-m", f"benchmarks.{module}", *arguments, *beside[0], "--json", "{json}"]
        return Row(f"fast/{name}", title, command, limit_s, note=beside[1], **options)

    train, tiny_train = "train_speed --precision bf16 --rounds 3 --steps 2", "train_speed --eager --precision fp32"
    tiny_train += " --rounds 1 --steps 1"
    tiny = " ".join(TINY)
    # Alone first: beside nanoGPT, three models are compiled, which may take too long.
    yield row("124m", "124 M, 64 x 1,024", 180, train, f"{tiny_train} --shape tiny")
    if args.nanogpt:
        yield row("124m_nanogpt", "124 M, 64 x 1,024, beside nanoGPT", 300, train, beside=nanogpt)
        both = nanogpt[0], "the row with 64 rows has no ratio"
        title = "124 M, 32 x 1,024, beside nanoGPT"
        yield row("124m_half", title, 240, f"{train} --rows 32", beside=both, unless="fast/124m_nanogpt")
    yield row(
        "1.4b", "1.4 B, preset gpt-neox-1.2b", 200, f"{train} --config gpt-neox-1.2b --micro_steps 4",
        f"{tiny_train} --config test --micro_steps 1",
    )  # fmt: skip
    yield row(
        "checkpoint", "cost of a checkpoint, 124 M, 64 x 1,024 x 8", 200, "runs checkpoint",
        f"runs checkpoint --rounds 1 {tiny}",
    )  # fmt: skip
    yield row(
        "generation", "generation, 124 M, beside nanoGPT", 120, "generation_speed --precision bf16 --rounds 3",
        "generation_speed --precision fp32 --rounds 1 --layers 1 --tokens 4", nanogpt,
    )  # fmt: skip
    file = args.hellaswag_file
    yield row(
        "hellaswag", "HellaSwag, 124 M, beside build-nanogpt", 160, "hellaswag_speed --rounds 3 --examples 400",
        "hellaswag_speed --rounds 1 --examples 4 --layers 1 --precision fp32",
        ([*build_nanogpt[0], "--hellaswag_file", str(file)], build_nanogpt[1]),
        missing="" if file else "--hellaswag_file is not given",
    )  # fmt: skip
    modern = "train_speed --config modern --micro_steps 4 --rounds 3 --steps 2 --precision"
    yield row("modern", "162 M, preset modern", 200, f"{modern} bf16")
    yield row("modern_fp8", "162 M, preset modern in fp8, beside a GEMM in bf16", 200, f"{modern} fp8")
    yield row("muon", "Muon, the blocks of 124 M", 200, "optimizer_cost --shape 124m --tokens 524288",
              "optimizer_cost --shape 1m --tokens 4096 --rounds 1 --compile off")  # fmt: skip
    yield row("10m", "10 M, 64 x 256, beside nanoGPT", 160, f"{train} --shape 10m", beside=nanogpt)
    yield row("small_32k", "152 M, preset small_32k", 200, f"{train} --config small_32k --micro_steps 2")
    yield row(
        "start_up", "from the command to the first step, 124 M", 240, "runs start_up --rounds 2",
        f"runs start_up --rounds 1 {tiny}",
    )  # fmt: skip
    yield row(
        "loader", "loader, beside nanoGPT's get_batch", 90, "loader_speed --rows 32 --rounds 5 --micro_steps 8",
        "loader_speed --rows 2 --context 64 --rounds 1 --seconds 0.1", nanogpt,
    )  # fmt: skip


def fits_rows(args, device: str) -> Iterator[Row]:
    small, large = PRESETS
    others = sorted({path.stem for path in (REPO / "configs").glob("*.toml")} - {*small, *large, SLOW})
    for preset in small if args.quick else [*large, *others, *small, SLOW]:
        for rows, how in (("", "its rows"), ("auto", "--mini_batch_size auto")):
            if rows and args.quick and preset != small[0]:
                continue
            command = f"-m benchmarks.runs memory --config {preset} --json {{json}}".split()
            name = f"fits/{preset}{'-auto' * bool(rows)}"
            yield Row(
                name,
                f"peak memory of {preset}, {how}",
                [*command, *(["--rows", rows] if rows else [])],
                300 if rows or preset == SLOW else 180,
            )


def trace_rows(args, device: str) -> Iterator[Row]:
    command = ["-m", "benchmarks.runs", "trace", "--out", str(args.out.absolute()), "--json", "{json}"]
    yield Row(
        "trace/124m", "five steps of 124 M, 64 x 1,024 x 2" + " (tiny)" * args.quick, command + TINY * args.quick, 240
    )


ROWS = {"right": right_rows, "fast": fast_rows, "fits": fits_rows, "trace": trace_rows}

# ---------------------------------------------------------------------------------------------------------------------
# running a row


def run_row(row: Row, limit_s: float, out: Path, environment: dict[str, str]) -> dict:
    """Run a row's process in its own session, kill what is left of it, and return what goes into the JSON."""
    log = out / "logs" / f"{row.key.replace('/', '-')}.txt"
    log.parent.mkdir(exist_ok=True)
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="gpu_suite-", ignore_cleanup_errors=True) as temporary,
        open(log, "w") as opened,
    ):
        found = Path(temporary, "found.json")
        found.touch()
        mark = {"TMPDIR": temporary, "GPU_SUITE_OUTCOMES": str(found)}
        process = subprocess.Popen(
            [sys.executable, "-u", *(part.replace("{json}", str(found)) for part in row.command)],
            cwd=REPO, env=environment | mark, stdin=subprocess.DEVNULL, stdout=opened, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_all(process, f"TMPDIR={temporary}")
        result = {"seconds": round(time.monotonic() - start, 1), "notes": [row.note] if row.note else []}
        read = read_outcomes(found) if "pytest" in row.command else json.loads(found.read_text() or "{}")
        result |= read | {"notes": [*read.get("notes", []), *result["notes"]]}
    said = reason_of(log.read_text(errors="replace"))
    if status == 0 and "figures" in result:
        return result | {"status": "ok", "reason": ""}
    reason = result.get("reason") or said
    if status is None:
        reason = f"did not end in {limit_s:.0f} s; {reason}"
    elif status < 0:
        reason = f"killed by {signal.Signals(-status).name}; {reason}"
    return result | {"status": "failed", "reason": reason}


def kill_all(process: subprocess.Popen, mark: str) -> None:
    """Kill the row's process group and, on Linux, all processes with its environment; wait until they are gone.

    Until then they hold GPU memory, which the next row needs.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline_s, left = time.monotonic() + LONGEST_KILL_S, True
    while left and time.monotonic() < deadline_s:
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark.encode() in path.read_bytes().split(b"\0"):
                    left = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.1 if left else 0)


def read_outcomes(file: Path) -> dict:
    """Return the tests of a pytest process, which may have been killed, from the lines of benchmarks.outcomes."""
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    tests = {test["name"]: test for test in map(json.loads, lines)}  # the last line of a test counts
    if not tests:
        return {}
    kinds = [test["outcome"] for test in tests.values()]
    figures = {kind: figure([kinds.count(kind)], kind) for kind in dict.fromkeys(["passed", *kinds])}
    skips = {f"skipped: {test['reason']}": None for test in tests.values() if test["outcome"] == "skipped"}
    bad = [
        f"{test['name'].partition('::')[2]} {test['outcome']} {test.get('reason', '')}".strip()
        for test in tests.values() if test["outcome"] in ("failed", "did not end")
    ]  # fmt: skip
    reason = bad[0] + f", and {len(bad) - 1} more below" * (len(bad) > 1) if bad else ""
    report = {"notes": list(skips), "reason": reason, "text": "\n".join(bad)}
    return {"figures": figures, "tests": list(tests.values()), **report}


# ---------------------------------------------------------------------------------------------------------------------
# main


def describe_machine(args, environment: dict[str, str]) -> dict:
    """Return device, driver and software, found in another process: this one must not hold GPU memory."""
    ask = [sys.executable, "-c", FACTS]
    try:
        asked = subprocess.run(ask, cwd=REPO, env=environment, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        sys.exit("error: torch did not find the device in 180 s; is the driver working? Try nvidia-smi")
    if asked.returncode:
        sys.exit(f"error: {reason_of(asked.stderr)}")
    facts = json.loads(asked.stdout.splitlines()[-1])
    kind, count, driver = facts.pop("kind"), facts.pop("count"), "none"
    if args.device == "cuda" and kind != "cuda":
        sys.exit("error: --device cuda: this machine has no CUDA GPU that PyTorch can use; try nvidia-smi")
    if kind == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()[0]
        facts["device"] = f"{count} x {facts['device']}"
    return facts | {"driver": driver, "quick": args.quick, "kind": kind}


def run_part(part: str, deadline_s: float, args, report: Report, environment: dict[str, str]) -> None:
    rows = list(ROWS[part](args, report.content["machine"]["kind"]))
    commit = git_commit()
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": f"{commit[:12]}{commit[40:]}" or "unknown"}
    for number, row in enumerate(rows, start=1):
        left_s = deadline_s - time.monotonic()
        begin = f"[{part} {number}/{len(rows)}] {row.title}"
        if (row.unless and report.has(row.unless, "ratio")) or (report.has(row.key) and not args.again):
            print(f"{begin}: measured already", flush=True)
            continue
        if row.missing or left_s < row.limit_s / 2:
            result = {"status": "not run", "reason": row.missing or "no time left"}
            result = report.failed(row.key) or result  # the reason of an earlier call says more
        else:
            limit_s = min(row.limit_s, left_s)
            print(f"{begin}: begins, at most {limit_s:.0f} s", flush=True)
            interrupted = {"status": "not run", "reason": "interrupted", **stamp}
            report.add(row.key, row.title, interrupted)  # replaced when the row ends
            result = run_row(row, limit_s, args.out, environment) | stamp
        report.add(row.key, row.title, result)
        print(f"{begin}: {row_text(result)}; {deadline_s - time.monotonic():.0f} s left", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_suite.json, gpu_suite.md and the trace")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="for each part (default: 8)")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--build_nanogpt", type=Path, help="a checkout of build-nanogpt; without it, ours alone")
    parser.add_argument("--hellaswag_file", type=Path, help="hellaswag_val.jsonl")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes: tries this command, measures nothing")
    parser.add_argument("--again", action="store_true", help="also run rows that have a figure already")
    args = parser.parse_args(argv)
    start_s, parts = time.monotonic(), args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: expected some of {','.join(PARTS)}")
    if not 0 < args.minutes <= MOST_MINUTES:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0 and at most {MOST_MINUTES}")
    for name in ("nanogpt", "build_nanogpt", "hellaswag_file"):
        if path := getattr(args, name):
            if not path.exists():
                parser.error(f"--{name} {path}: does not exist")
            setattr(args, name, path.absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    # Rows share compiled kernels, although each has a temporary folder of its own.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), "gpu_suite-compile-cache"))}
    environment = cache | os.environ | OFFLINE | ({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})
    with exit_on_signals(), contextlib.suppress(KeyboardInterrupt):  # the row in progress stays "interrupted"
        report = Report(args.out, describe_machine(args, environment))
        for part in parts:
            run_part(part, start_s + 60 * args.minutes, args, report, environment)
            start_s = time.monotonic()
        print(f"{report.json}\n{report.markdown}")
        return 0
    print(f"interrupted; the same command runs the rest. So far: {args.out / 'gpu_suite.md'}")
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
