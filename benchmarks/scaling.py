"""Training speed on 1 to N processes or GPUs of one machine, in tokens per second.

    python -m benchmarks.scaling --processes 1 2 4 8 --config gpt2           # GPUs; further flags of train.py
    python -m benchmarks.scaling --processes 1 2                             # CPU: two blocks of GPT-2

Each process has --micro_steps micro-steps a step, whatever their number. Each measurement is a run of train.py under
torchrun on random tokens, without saves and evaluations; its figure follows from the median time of its steps but the
first two.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.compare import REPO, benchmark_parser, compare, flags
from benchmarks.train_speed import write_tokens
from model import GPTConfig
from steadygpt.config import parse_args

RUN = flags(
    max_steps=8, warmup_steps=2, log_freq=1, checkpoint_freq=0, checkpoint_minutes=0, eval_freq=0, hellaswag_freq=0,
    sample_freq=0, tokenizer="gpt2",
)  # fmt: skip
SMALL = flags(precision="fp32", num_layers=2, num_heads=12, embd_size=768, context_length=256, mini_batch_size=2)


def tokens_per_second(data: str, processes: int, tokens: int, options: list[str]) -> float:
    """Train some steps of `tokens` tokens; return the speed."""
    with tempfile.TemporaryDirectory(dir=data) as folder:
        own = flags(data_dir=data, checkpoint_dir=folder, total_batch_size=tokens)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launch, "train.py", *options, *RUN, *own]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"train.py failed:\n{done.stderr[-2000:]}")
        records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        step_ms = [record["step_ms"] for record in records if "loss" in record]
        return 1000 * tokens / statistics.median(step_ms[2:])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[2], help="default: 2")
    parser.add_argument("--micro_steps", type=int, default=4, help="of a step, on each process (default: 4)")
    args, further = parser.parse_known_args()
    options = further if any(flag.startswith("--config") for flag in further) else [*SMALL, *further]
    config, _ = parse_args(options)
    tokens = config.mini_batch_size * config.context_length * args.micro_steps
    with tempfile.TemporaryDirectory() as data:
        write_tokens(Path(data), GPTConfig.vocab_size)
        sides = {}
        for processes in args.processes:
            name = "1 process" if processes == 1 else f"{processes} processes"
            sides[name] = partial(tokens_per_second, data, processes, tokens * processes, options)
        compare(sides, "tokens/s", args)


if __name__ == "__main__":
    main()
