"""How far the losses and gradient norms of repeated steps drift where bits are not promised.

    python -m benchmarks.repeated_steps                          # on a CPU, about half an hour on two cores
    python -m benchmarks.repeated_steps --device cuda --precision bf16 fp32 --ranks 1 8

Each case trains byte-level GPTs on Python's standard library, resumes the run from a checkpoint in the middle, and
compares the steps that both took. On a CPU the second run sums with another number of threads, so that one process
rounds differently too; on CUDA, and on three or more processes, equal launches do so by themselves. The figures are the
largest relative differences of all cases, by the number of steps after the checkpoint. steadygpt/run/repeats.py warns
above its bounds, which leave room over these.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.compare import REPO, benchmark_parser, flags
from steadygpt.log.metrics import METRICS, read_records

RUN = flags(
    compile="off", context_length=64, total_batch_size=1024, log_freq=1, warmup_steps=20, checkpoint_minutes=0,
    eval_freq=0, hellaswag_freq=0, sample_freq=0, keep_checkpoints=99,
)  # fmt: skip
MODELS = {
    "gpt2": flags(num_layers=4, num_heads=4, embd_size=128, max_lr=1e-3),
    "hot": flags(num_layers=4, num_heads=4, embd_size=128, max_lr=1e-2),
    "muon": flags(num_layers=4, num_heads=4, embd_size=128, optimizer="muon", max_lr=2e-2),
}
SPANS = (1, 10, 50, 10**9)  # steps after the checkpoint
NUMBERS = ("loss", "grad_norm")


def train(folder: Path, ranks: int, threads: int, further: list[str]) -> dict[int, dict]:
    """Train with these options; return the records of the steps."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, "train.py", *RUN, f"--checkpoint_dir={folder}", *further]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL)
    return {record["step"]: record for record in read_records(folder / METRICS, "loss")}


def differences(folder: Path, ranks: int, first: int, last: int, options: list[str]) -> dict[tuple[str, int], float]:
    """Return the largest relative difference of the steps from first to last, by number and span."""
    before = train(folder / "one", ranks, 1, [*options, f"--max_steps={last}", f"--checkpoint_freq={first}"])
    checkpoint = folder / f"one/rolling_step_{first:06d}.pt"
    after = train(folder / "two", ranks, 2, [f"--resume={checkpoint}"])
    largest: dict[tuple[str, int], float] = defaultdict(float)
    for step in range(first, last):
        span = next(span for span in SPANS if step - first < span)
        for name in NUMBERS:
            old = before[step][name]
            new = after[step][name]
            largest[name, span] = max(largest[name, span], abs(new - old) / max(new, old))
    return largest


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], help="default: fp32 bf16")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--steps", nargs=2, type=int, default=(50, 200), help="of the checkpoint and the end: 50 200")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = f"{temporary}/data"
        prepare = ["prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out=data)]
        subprocess.run([sys.executable, *prepare], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        cases = [*itertools.product(range(args.rounds), args.precision, args.ranks, args.models)]
        for number, (_, precision, ranks, model) in enumerate(cases, 1):
            options = [
                *flags(device=args.device, precision=precision, data_dir=data, mini_batch_size=16 // ranks),
                *MODELS[model],
            ]
            largest = differences(Path(temporary, str(number)), ranks, *args.steps, options)
            texts = [f"{name} " + ", ".join(f"{largest[name, span]:.1e}" for span in SPANS) for name in NUMBERS]
            print(f"{number} of {len(cases)}: {precision}, {ranks} ranks, {model}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
