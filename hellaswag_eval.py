"""Accuracy of a checkpoint on HellaSwag (Zellers et al. 2019) and on CORE (Li et al. 2024, DCLM).

    python hellaswag_eval.py best --hellaswag_file hellaswag_val.jsonl
    torchrun --nproc_per_node=4 hellaswag_eval.py best --tasks core --core_dir eval_bundle

HellaSwag has 10,042 validation examples; chance is 0.25. Only the tokens of the endings are scored. acc chooses the
ending with the lowest summed loss, acc_norm the one with the lowest loss per token, as in build-nanogpt and llm.c.

CORE is the mean of 22 accuracies, each centred so that chance is 0 and a perfect score is 1. Prompts and choices are
the same as in nanochat's evaluation of base models.
"""

import steadygpt.preflight  # noqa: F401  # before all others

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.convert.weights import CheckpointOptions, load_model, open_weights
from steadygpt.data.tasks import CORE, HELLASWAG
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.inference.scoring import Suite
from steadygpt.machine.device import autocast, choose_precision
from steadygpt.machine.ranks import joined


@dataclass(frozen=True)
class EvaluationOptions(CheckpointOptions):
    tasks: str = option(HELLASWAG, "hellaswag, or core", choices=(HELLASWAG, CORE))
    hellaswag_file: str = option("", "examples of HellaSwag, a .jsonl file (default: from the Hub)")
    core_dir: str = option("", "folder of the tasks of CORE, the evaluation bundle of DCLM or nanochat")
    limit: int | None = option(None, "examples of each task (default: all)", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(EvaluationOptions, argv, "Evaluate a checkpoint on HellaSwag or CORE.")
    if (options.tasks == CORE) != bool(options.core_dir):
        raise UserError("--tasks core and --core_dir, the folder of the evaluation bundle, need each other; give both")
    with joined(options.device) as ranks:
        name, checkpoint = open_weights(options.checkpoint, Path(options.checkpoint_dir))
        model = load_model(checkpoint).to(ranks.device)
        tokenizer = load_tokenizer(TokenizerRecord.of(checkpoint))
        precision = ranks.broadcast(choose_precision(options.precision, ranks.device))
        place = options.core_dir if options.tasks == CORE else options.hellaswag_file
        suite = Suite.load(options.tasks, place, options.limit, tokenizer, model.config.context_length, ranks)
        with autocast(ranks.device, precision):
            _, text = suite.scored(model, ranks, progress=ranks.is_main)
        if ranks.is_main:
            print(printable(f"{name} at step {checkpoint['step']:,}: {text}", keep="\n"))
    return 0


if __name__ == "__main__":
    run_cli(main)
