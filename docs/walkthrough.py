"""Follow a sentence from the tokenizer to a resume after kill -9, and print the values that walkthrough.md quotes.

    python docs/walkthrough.py

It takes seconds on a CPU, downloads nothing, and prints the same each time.
"""

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import steadygpt.preflight  # noqa: F401  # before all others

import numpy as np
import torch

import prepare_dataset
import train
from steadygpt.base.options import run_cli
from steadygpt.checkpoint import writer
from steadygpt.checkpoint.files import read_checkpoint
from steadygpt.config import parse_args
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.log.metrics import METRICS, read_records
from steadygpt.log.runlog import RunLog
from steadygpt.machine.ranks import Ranks
from steadygpt.run import saving
from steadygpt.run.run import Run
from steadygpt.start.build import build
from steadygpt.start.data import open_data
from steadygpt.start.find import find_start
from steadygpt.start.settle import settle

REPO = Path(train.__file__).parent
TEXTS = (
    "To be, or not to be, that is the question:",
    "Whether 'tis nobler in the mind to suffer",
    "The slings and arrows of outrageous fortune,",
    "Or to take arms against a sea of troubles,",
    "And by opposing end them: to die, to sleep",
    "No more, and by a sleep to say we end",
    "The heart-ache.",
)
FLAGS = (
    "--data_dir data --device cpu --precision fp32 --num_layers 1 --num_heads 2 --embd_size 16 --context_length 16 "
    "--total_batch_size 64 --mini_batch_size 2 --max_steps 12 --max_lr 0.01 --min_lr 0.001 --warmup_steps 2 --seed 22 "
    "--checkpoint_freq 4 --checkpoint_minutes 0 --eval_freq 0 --hellaswag_freq 0 --sample_freq 0"
)
# Hold train.py at the start of step 6, with the last save written, so that the kill always comes there.
HELD = """
import time, train
take_step = train.train_step
def hold(run, batches):
    if run.state.step == 6:
        run.writer.wait()
        print("held", flush=True)
        time.sleep(60)
    return take_step(run, batches)
train.train_step = hold
train.run_cli(train.main)
"""


def quietly(function, *args):
    """Call a function; return its result and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        return function(*args), output.getvalue()


def build_run() -> Run:
    """Build the run that train.py trains, as train.main does before it opens the folder."""
    command, set_by = parse_args(FLAGS.split())
    ranks = Ranks(torch.device("cpu"))
    start, asked, _ = find_start(command, set_by, ranks)
    data = open_data(start, asked, ranks)
    options = settle(start, asked, data, ranks)
    return build(start, options, data, ranks, RunLog(options.of_launch, ranks))


def show_data() -> None:
    tokenizer = load_tokenizer(TokenizerRecord("bytes"))
    ids = tokenizer.encode(TEXTS[0])
    print(f"text       {TEXTS[0]}\nids        {' '.join(map(str, ids[:5]))} ... ({len(ids)} in all)")
    Path("hamlet.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    argv = "--source hamlet.jsonl --tokenizer bytes --val_share 0 --num_workers 1 --out data"
    quietly(prepare_dataset.main, argv.split())

    run, _ = quietly(build_run)
    [(_, rows)] = run.sources.values()
    tokens = rows.shards[0].tokens()
    print(f"\nshard      {rows.shards[0].path}: {len(tokens)} tokens, {tokens.dtype}\nbegins     {tokens[:9]}")
    print(f"\nrows       ({len(tokens)} - 1) // 16 = {rows.rows_per_epoch}")
    firsts = rows.locate(np.arange(8))[1]
    offset = firsts[0] % 16
    for row in range(2):
        first = offset + 16 * row
        print(f"row {row}      {tokenizer.decode(tokens[first : first + 17].tolist())!r}")
    print(f"\nepoch 0    from token {offset} on: {firsts // 16} ...\n")
    with contextlib.closing(run.training_batches()) as batches:
        for name, tensor in zip(("inputs", "targets"), batches.next(), strict=True):
            print(f"{name:<11}{[tokenizer.decode(row) for row in tensor.tolist()]}")


def show_step() -> None:
    run, _ = quietly(build_run)
    rows = torch.from_numpy(run.rows.read(0, 4))  # of step 0
    loss = run.model(rows[:, :-1], rows[:, 1:])["loss"].mean()
    loss.backward()
    squares = sum(parameter.grad.square().sum().item() for parameter in run.model.parameters())
    print(f"\nby hand    loss {loss:.3f}, gradient norm {math.sqrt(squares):.3f}; ln 257 = {math.log(257):.3f}")
    with contextlib.closing(run.training_batches()) as batches:
        result = train.train_step(run, batches)
    print(f"step 0     loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")


def show_save() -> None:
    """Train to the end, and show what the save of step 8 does."""
    calls: list[str] = []

    def recorded(owner, name: str):
        function = getattr(owner, name)

        def call(*args, **options):
            files = [arg.name for arg in args if isinstance(arg, Path)]
            if owner is not os or files == [".latest.pt.tmp", "latest.pt"]:  # other files are replaced too
                calls.append(f"{name:<16} {' -> '.join(files)}".rstrip())
            return function(*args, **options)

        return mock.patch.object(owner, name, call)

    in_writer = ((writer, name) for name in ("write_temporary", "link_file", "fsync_folder"))
    with contextlib.ExitStack() as stack:
        for owner, name in ((saving, "content_of"), (RunLog, "flush"), *in_writer, (os, "replace")):
            stack.enter_context(recorded(owner, name))
        quietly(train.main, f"{FLAGS} --checkpoint_dir whole".split())
    starts = [i for i, call in enumerate(calls) if call == "content_of"]  # of steps 4, 8 and 12
    print("", *calls[starts[1] : starts[2]], sep="\n")


def records(run: str) -> dict[int, tuple[float, float]]:
    """Return step -> loss and gradient norm, as the log of a run has them."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_records(Path(run, METRICS), "loss")}


def show_kill_and_resume() -> None:
    flags = f"{FLAGS} --checkpoint_dir killed".split()
    command, environment = [sys.executable, "-c", HELD, *flags], os.environ | {"PYTHONPATH": str(REPO)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while process.stdout.readline() not in ("held\n", ""):  # "": it has ended
            pass
        process.send_signal(signal.SIGKILL)
    before, checkpoint = records("killed"), read_checkpoint(Path("killed/latest.pt"))
    print(f"\nexit       {process.returncode}, after steps {' '.join(map(str, before))}")
    print(f"files      {' '.join(sorted(path.name for path in Path('killed').glob('*.pt')))}")
    print(f"latest.pt  step {checkpoint['step']}, rows_consumed {checkpoint['rows_consumed']}\n")

    _, output = quietly(train.main, [*flags, "--resume", "latest"])
    print(*(line for line in output.splitlines() if line.startswith("resumed at")), sep="\n")
    after, whole = records("killed"), records("whole")
    print(f"step 4     loss {before[4][0]:.3f}, again {after[4][0]:.3f}")
    one, other = (read_checkpoint(Path(name, "latest.pt"))["model"] for name in ("killed", "whole"))
    print(f"equal      losses {after == whole}, weights {all(torch.equal(one[name], other[name]) for name in other)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        show_data()
        show_step()
        show_save()
        show_kill_and_resume()


if __name__ == "__main__":
    run_cli(main)
