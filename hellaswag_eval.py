"""Accuracy of a checkpoint on HellaSwag (Zellers et al. 2019) and other multiple-choice tasks.

    python hellaswag_eval.py checkpoints/latest.pt --task hellaswag=hellaswag_val.jsonl
    python hellaswag_eval.py latest --task arc_easy,arc_challenge,piqa=piqa_validation.jsonl

HellaSwag has 10,042 validation examples; chance is 0.25. --style lm_eval computes the numbers of EleutherAI's
lm-evaluation-harness, which the other tasks (ARC, Clark et al. 2018; PIQA, Bisk et al. 2020) always follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steadygpt.base.options import option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import open_checkpoint
from steadygpt.convert.weights import CheckpointOptions, load_model
from steadygpt.data.tasks import EXPECTED, STYLES, TASKS, load_examples, parse_tasks
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.evaluation.scores import score_examples, tokenize
from steadygpt.machine.device import autocast, choose_precision
from steadygpt.machine.ranks import joined


@dataclass(frozen=True)
class HellaSwagOptions(CheckpointOptions):
    task: str = option("hellaswag", EXPECTED, aliases=("eval_tasks",))
    limit: int | None = option(None, "number of examples, from the start (default: all)", at_least=1)
    style: str = option(STYLES[0], "definition of HellaSwag's acc and acc_norm", choices=STYLES)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(HellaSwagOptions, argv, "Evaluate a checkpoint on HellaSwag and other tasks.")
    tasks = parse_tasks(options.task)
    with joined(options.device) as ranks:
        path, checkpoint = open_checkpoint(options.checkpoint, Path(options.checkpoint_dir))
        model, tokenizer = load_model(checkpoint).to(ranks.device), load_tokenizer(TokenizerRecord.of(checkpoint))
        sizes = model.config.context_length, model.config.embd_size, model.config.mlp_size
        precision, _ = ranks.broadcast(choose_precision(options.precision, ranks.device, *sizes))
        for name, file in tasks.items():
            examples = load_examples(name, file, options.style)[: options.limit]
            trees = tokenize(examples, tokenizer, model.config.context_length)
            with autocast(ranks.device, precision):
                scores = score_examples(model, trees, ranks, progress=ranks.is_main)
            if ranks.is_main:
                print(printable(f"{path} at step {checkpoint['step']:,}: {TASKS[name].title} {scores}"))
    return 0


if __name__ == "__main__":
    run_cli(main)
