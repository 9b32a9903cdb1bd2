"""How well --dry_run measure predicts the speed of the run that follows.

    python -m benchmarks.forecast_accuracy [--steps 400] [--rounds 5] [further flags of train.py]

The quickstart model on random tokens is measured and trained in turn. The run's speed is that of its summary, which
includes logging and saves but no evaluations.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import REPO, flags, in_turn, report
from benchmarks.train_speed import write_tokens


def tokens_per_second(command: list[str]) -> float:
    """Return the speed that train.py prints last."""
    out = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return float(re.findall(r"([\d,]+) tokens/s", out)[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=5)
    args, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tokens(folder, 257)

        def command(*last: str) -> list[str]:
            common = flags(
                config="quickstart", data_dir=folder, tokenizer="bytes", logdir=folder / "logs",
                checkpoint_dir=folder / "run", tensorboard_dir=folder / "runs", max_steps=args.steps, eval_freq=0,
                sample_freq=0, checkpoint_freq=0,
            )  # fmt: skip
            return [sys.executable, "train.py", *common, *further, *last]

        def trained() -> float:
            for file in (folder / "run").glob("*.pt"):
                file.unlink()  # of the last round
            return tokens_per_second(command())

        sides = {"measured before": lambda: tokens_per_second(command("--dry_run", "measure")), "trained": trained}
        figures = in_turn(sides, args.rounds, "tokens/s")
    report(figures, "tokens/s")


if __name__ == "__main__":
    main()
