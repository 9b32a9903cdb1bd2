"""The time of a step with --deterministic beside DDP's, on several processes of one machine.

    python -m benchmarks.deterministic_cost                              # two processes on the CPU, two blocks of GPT-2
    python -m benchmarks.deterministic_cost --processes 4 --embd_size 256 --mini_batch_size 1     # options of train.py

Each measurement is a run of train.py under torchrun, without saves and evaluations; its figure is the median time of
its steps but the first two. A GPU was never measured.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import REPO, benchmark_parser, compare, flags

RUN = flags(
    precision="fp32", num_layers=2, num_heads=12, embd_size=768, context_length=256, total_batch_size=4096,
    mini_batch_size=2, max_steps=6, checkpoint_freq=0, checkpoint_minutes=0, eval_freq=0, hellaswag_freq=0,
    sample_freq=0,
)  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    args, of_training = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        data = f"{name}/data"
        prepare = ["prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out=data)]
        subprocess.run([sys.executable, *prepare], cwd=REPO, check=True, stdout=subprocess.DEVNULL)

        def step_ms(deterministic: str) -> float:
            with tempfile.TemporaryDirectory(dir=name) as folder:
                own = flags(data_dir=data, checkpoint_dir=f"{folder}/saved", logdir=folder, deterministic=deterministic)
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command = [*launch, f"--nproc_per_node={args.processes}", "train.py", *RUN, *own, *of_training]
                done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"train.py failed:\n{done.stderr[-2000:]}")
                records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
                return statistics.median([record["step_ms"] for record in records if "loss" in record][2:])

        compare({"--deterministic": lambda: step_ms("on"), "DDP": lambda: step_ms("off")}, "ms a step", args)


if __name__ == "__main__":
    main()
