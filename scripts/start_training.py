#!/usr/bin/env python
"""Ask for model and data, print the command and its plan, train in the background, and show the monitor.

Enter accepts the answer in brackets; a flag of train.py skips its question. Training continues when you leave the
monitor. One process runs per GPU; NPROC=2 sets the number of processes.
"""

import argparse
import io
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt.base.options import UserError, run_cli
from steadygpt.base.text import printable
from steadygpt.config import PRESETS, TrainConfig, parse_args
from steadygpt.data.shards import MANIFEST, ShardSet
from steadygpt.log.metrics import read_status
from steadygpt.run.identity import read_run

REPO = Path(__file__).resolve().parent.parent
MONITOR = REPO / "scripts/monitor_training.py"
GPUS = int(os.environ.get("GPUS", "0"))  # that scripts/nproc.sh has found


def ask(question: str, default: str, accepted: Collection[str], expected: str) -> str:
    """Ask until the answer is one of `accepted`."""
    while True:
        answer = input(f"{question} [{default}]: ").strip() or default
        if not sys.stdin.isatty():
            print(answer)
        if answer in accepted:
            return answer
        print(f"  found {answer!r}; expected {expected}")


def confirm(question: str) -> bool:
    return ask(question, "Y", ("Y", "y", "yes", "N", "n", "no"), "y or n").startswith(("Y", "y"))


def shown(path: str | Path) -> str:
    """Return a path as short as the working directory allows."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)


def choose(title: str, choices: Mapping[str, str], default: str) -> str:
    """Ask for one of `choices`, name -> description, by number or name."""
    numbers = {str(number): name for number, name in enumerate(choices, 1)}
    print(f"\n{title}")
    for number, name in numbers.items():
        print(printable(f"  {number:>2}  {name:<{max(map(len, choices))}}  {choices[name]}"))
    expected = f"a number from 1 to {len(choices)}, or a name"
    answer = ask("number or name", default, {*numbers, *choices}, expected)
    return numbers.get(answer, answer)


def presets() -> dict[str, str]:
    """Return the presets and their descriptions, the smallest model first."""

    def size(path: Path) -> tuple[int, str]:
        config, _ = parse_args(["--config", path.stem])
        return config.num_layers * config.embd_size**2, path.stem

    found = sorted(PRESETS.glob("*.toml"), key=size)
    return {path.stem: tomllib.loads(path.read_text())["description"] for path in found}


def prepared_data(root: Path) -> dict[str, str]:
    """Return the folders of prepared data at and in `root`, with their tokens."""
    found = {}
    for folder in (root, *sorted(root.glob("*/"))):
        try:
            data = ShardSet.find("", str(folder), "train")
            about = data.manifest["tokenizer"] if data.manifest else "no manifest"
            found[str(folder)] = f"{data.num_tokens:,} training tokens ({about})"
        except UserError as error:
            if (folder / MANIFEST).exists():
                print(printable(f"skipped {error}"))
    return found


def flags_of_run(flags: list[str]) -> list[str]:
    """Return the flags of the run: the answers, then the given flags."""
    _, given = parse_args(flags)
    by_flag = {name for name, source in given.items() if source == "flag"}
    if "resume" in by_flag:
        return flags
    model = []
    if not by_flag & {"config", "init_from"}:
        model = ["--config", choose("Which model?", presets(), "gpt2" if GPUS else "quickstart")]
    config, _ = parse_args([*model, *flags])
    answers = {}
    if not {"data_dir", "mix"} & set(by_flag):
        answers["data_dir"] = choose_data(config.data_dir)
    if "checkpoint_dir" not in by_flag:
        answers["checkpoint_dir"] = unused_folder(Path(config.config or config.init_from).stem)
    folder = Path(answers.get("checkpoint_dir", config.checkpoint_dir))
    answers |= {"logdir": f"logs/{folder.name}", "use_tensorboard": "on"}
    return [*model, *(f"--{name}={answer}" for name, answer in answers.items() if name not in by_flag), *flags]


def unused_folder(name: str) -> str:
    """Return a new folder for checkpoints, without logs of the same name."""
    number, new = 1, name
    while Path("checkpoints", new).exists() or Path("logs", new).exists():
        number += 1
        new = f"{name}-{number}"
    return f"checkpoints/{new}"


def choose_data(default: str) -> str:
    """Return the folder of data to train on; offer to prepare a small data set if there is none."""
    if found := prepared_data(Path("data")):
        return choose("Which data?", found, default if default in found else next(iter(found)))
    prepare = [shown(sys.executable), shown(REPO / "prepare_dataset.py")]
    print(f"\nThere is no prepared data in data/. To prepare FineWeb-Edu 10B (24 GB of disk): {shlex.join(prepare)}")
    if not confirm("Prepare the Python standard library now (seconds, no download)?"):
        sys.exit("nothing was started")
    stdlib = ["--source", "stdlib", "--tokenizer", "bytes", "--out", "data/stdlib"]
    if status := subprocess.run([*prepare, *stdlib]).returncode:
        sys.exit(status)
    return "data/stdlib"


def command_of(config: TrainConfig, flags: list[str]) -> list[str]:
    """Return the command line, with one process for each GPU, or one on the CPU."""
    gpus = GPUS if config.device in ("auto", "cuda") else 0
    processes = int(os.environ.get("NPROC") or gpus)
    if processes <= 1:
        return [shown(sys.executable), shown(REPO / "train.py"), *flags]
    torchrun = shown(shutil.which("torchrun") or "torchrun")
    return [torchrun, "--standalone", f"--nproc_per_node={processes}", shown(REPO / "train.py"), *flags]


def train_and_watch(command: list[str], folder: Path, console: Path) -> int:
    """Start training in a session of its own, show its output and then the monitor, and return the exit status.

    The monitor opens when the first step is done. Ctrl-C and leaving the monitor do not stop training.
    """

    of_run_before = read_status(folder)  # "running" if that was killed

    def is_starting() -> bool:
        status = read_status(folder)
        return status == of_run_before or status.get("status") != "running" or status.get("doing") == "starting"

    def show_output() -> None:
        print(printed.read().decode(errors="replace"), end="", flush=True)

    console.parent.mkdir(parents=True, exist_ok=True)
    with open(console, "ab") as output:
        start = output.tell()
        training = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    with open(console, "rb") as printed, suppress(KeyboardInterrupt):
        printed.seek(start)
        while training.poll() is None and is_starting():
            show_output()
            time.sleep(0.2)
        show_output()
        if training.poll() is None:
            monitor = subprocess.Popen([sys.executable, MONITOR, folder])
            while monitor.poll() is None:
                with suppress(KeyboardInterrupt):  # the terminal sends it to the monitor too
                    monitor.wait()
    if training.poll() is not None:
        print(f"\ntraining has ended with status {training.returncode}; its output: {console}")
        return training.returncode
    print(f"\ntraining continues as process {training.pid}; its output: {console}")
    script = shown(REPO / "monitor_training.sh")
    script = script if script.startswith("/") else f"./{script}"
    print(f"  watch it again   {shlex.join([script, str(folder)])}")
    print(f"  stop and save    kill -INT {training.pid}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "./start_training.sh",
        usage="%(prog)s [--yes] [flags of train.py]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--yes", action="store_true", help="accept every default")
    own, flags = parser.parse_known_args(argv)
    if own.yes:
        sys.stdin = io.StringIO("\n" * 100)
    elif not sys.stdin.isatty():
        raise UserError("no terminal to ask questions on; add --yes to accept every default")
    try:
        flags = flags_of_run(flags)
        config, given = parse_args(flags)
        command = command_of(config, flags)
        print(f"\n{shlex.join(command)}\n", flush=True)
        dry_run = [] if "dry_run" in given else ["--dry_run"]
        plan = subprocess.run([*command, *dry_run], stderr=subprocess.PIPE, text=True)
        if plan.returncode:  # drop torchrun's own lines
            errors = [line for line in plan.stderr.splitlines() if line.startswith("error: ")]
            print("\n".join(errors) or plan.stderr, file=sys.stderr)
        if plan.returncode or not dry_run:
            return plan.returncode
        if not confirm("\nStart?"):
            sys.exit("nothing was started")
    except EOFError:  # Ctrl-D
        sys.exit("\nnothing was started")
    folder = Path(config.checkpoint_dir)
    run = read_run(folder) if config.resume else None
    logdir = config.logdir if run is None or run.other else run.places.get("logdir", config.logdir)
    return train_and_watch(command, folder, Path(logdir, "console.txt"))


if __name__ == "__main__":
    run_cli(main)
