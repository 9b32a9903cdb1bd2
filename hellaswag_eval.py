"""Accuracy of a checkpoint on HellaSwag (Zellers et al. 2019) and other multiple-choice tasks.

    python hellaswag_eval.py checkpoints/latest.pt --task hellaswag=hellaswag_val.jsonl
    python hellaswag_eval.py latest --task arc_easy,arc_challenge,piqa=piqa_validation.jsonl

HellaSwag has 10,042 validation examples; chance is 0.25. An ending's tokens are scored after its context. acc chooses
the ending with the lowest summed loss, acc_norm the one with the lowest loss per token, as in build-nanogpt and llm.c.
The other tasks (ARC, Clark et al. 2018; PIQA, Bisk et al. 2020), and HellaSwag with --style lm_eval, follow
EleutherAI's lm-evaluation-harness, whose acc_norm is per character.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from model import GPT
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import open_checkpoint
from steadygpt.config import TrainConfig
from steadygpt.convert.weights import CheckpointOptions, load_model
from steadygpt.data.tasks import EXPECTED, STYLES, TASKS, Example, load_examples, parse_tasks
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.machine.device import any_length, autocast, choose_precision, evaluating
from steadygpt.machine.loss import IGNORED_TARGET
from steadygpt.machine.ranks import Ranks, joined

TOKENS_PER_BATCH = {"cpu": 2048, "gpu": 16384}  # padding included
# Bound on autocast's error in a sum of n losses, in nats per sqrt(n). In bf16, models of 1 to 124 M parameters have an
# rms error of 0.0045 to 0.0082.
ROUNDING = 0.02


@dataclass(frozen=True)
class Tree:
    """A context with endings that follow it, so that the context is computed only once."""

    context: list[int]  # token ids, at least one
    endings: list[list[int]]  # token ids, all of them scored
    lengths: list[int]  # acc_norm divides the ending's loss by this
    example: int
    label: int
    is_cut: bool = False  # to the context of the model

    @property
    def width(self) -> int:
        """Number of input tokens. Each branch begins with the context's last token and lacks the ending's last."""
        return len(self.context) - 1 + sum(map(len, self.endings))


def tokenize(examples: Sequence[Example], tokenizer: Tokenizer, context_length: int) -> list[Tree]:
    """Tokenize each example as one tree; a context that is too long beside its longest ending is cut at the start."""
    encode, trees = tokenizer.encode, []
    for number, (text, texts, label, style) in enumerate(examples):
        # Endings are tokenized with a space before them, because GPT-2's words begin with one.
        if style == "lm_eval":
            context = encode(text.rstrip())
            whole = [encode(f"{text} {ending}")[len(context) :] for ending in texts]
        else:
            context, whole = encode(text), [encode(f" {ending}") for ending in texts]
        context = context or [tokenizer.document_id]  # as every document of the data begins
        endings = [ending[-context_length:] for ending in whole]
        lengths = [len(ending) for ending in endings]
        if style == "lm_eval":  # the characters of what is left of them
            lengths = [max(1, len(t) * n // max(1, len(w))) for t, n, w in zip(texts, lengths, whole, strict=True)]
        kept = context[-(context_length + 1 - max(map(len, endings))) :]
        trees.append(Tree(kept, endings, lengths, number, label, (kept, endings) != (context, whole)))
    return trees


def load_tasks(
    config: TrainConfig, tokenizer: Tokenizer, ranks: Ranks, warn: Callable[[str], object]
) -> dict[str, list[Tree]]:
    """Return the trees of each task of a run; a task whose examples are unavailable is left out, with a warning."""
    tasks = {}
    for name, file in parse_tasks(config.eval_tasks).items():
        try:
            examples = ranks.from_main(partial(load_examples, name, file))
        except UserError as error:
            warn(f"no {TASKS[name].title} in this run: {error}")
            continue
        tasks[name] = tokenize(examples, tokenizer, config.context_length)
    return tasks


def make_batches(trees: Sequence[Tree], tokens_per_batch: int) -> list[list[Tree]]:
    """Group trees of similar width to save padding, the widest first, so that a lack of memory shows at once."""
    batches: list[list[Tree]] = []
    for tree in sorted(trees, key=lambda tree: tree.width, reverse=True):
        if not batches or batches[-1][0].width * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(tree)
    return batches


def score_batch(model: nn.Module, batch: Sequence[Tree], device: torch.device) -> list[list[float]]:
    """Return the summed loss of each ending of each tree in nats; logits are computed for ending tokens only."""
    width = max(tree.width for tree in batch)
    inputs, positions = torch.zeros(2, len(batch), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED_TARGET)
    branches = torch.zeros_like(inputs)  # 0: context, visible to all; 1, 2, ...: endings, each visible to itself
    for i, tree in enumerate(batch):
        shared = begin = len(tree.context) - 1
        inputs[i, :shared], positions[i, :shared] = torch.tensor(tree.context[:-1]), torch.arange(shared)
        for number, ending in enumerate(tree.endings, start=1):
            branch = slice(begin, begin + len(ending))
            inputs[i, branch] = torch.tensor([tree.context[-1], *ending][:-1])
            targets[i, branch] = torch.tensor(ending)
            positions[i, branch] = torch.arange(shared, shared + len(ending))
            branches[i, branch] = number
            begin = branch.stop
    inputs, targets, positions, branches = (x.to(device) for x in (inputs, targets, positions, branches))
    same = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    mask = same.tril()[:, None]  # (B, 1, width, width)
    losses = model(inputs, targets, reduction="scored", positions=positions, mask=mask).float().cpu()
    parts = iter(losses.split([len(ending) for tree in batch for ending in tree.endings]))
    return [[next(parts).sum().item() for _ in tree.endings] for tree in batch]


def ending_losses(
    model: GPT, trees: Sequence[Tree], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> np.ndarray:
    """Compute the summed loss of each ending in nats, (examples, most endings), on all ranks together.

    An ending that an example lacks has +inf. Under autocast, examples that its rounding may decide are scored again
    without it, so the choices are those of fp32 (except for layers in fp8, and for FSDP in bf16, which rounds the
    weights).

    Args:
        check: is called before each batch, and may raise to end the evaluation.

    Returns: the same array on every rank.
    """
    absent = per_ending([[0.0] * len(tree.endings) for tree in trees], absent=np.inf)
    losses = absent.copy()

    def score(trees: Sequence[Tree], what: str) -> None:
        """Set `losses` of these trees."""
        batches = make_batches(trees, TOKENS_PER_BATCH["cpu" if ranks.device.type == "cpu" else "gpu"])
        found = torch.zeros(losses.shape, dtype=torch.float64)
        for turn in tqdm(range(0, len(batches), ranks.world_size), desc=what, unit="batch", disable=not progress):
            check()
            # FSDP needs all ranks in every forward: a rank without a batch recomputes the last one and discards it.
            mine = turn + ranks.rank
            batch = batches[min(mine, len(batches) - 1)]
            for tree, sums in zip(batch, score_batch(model, batch, ranks.device), strict=True):
                if mine < len(batches):
                    found[tree.example, : len(sums)] = torch.tensor(sums)
        scored = [tree.example for tree in trees]
        losses[scored] = (ranks.sum(found).numpy() + absent)[scored]

    with evaluating(model), any_length():
        score(trees, "endings")
        if torch.is_autocast_enabled(ranks.device.type):
            close = close_calls(trees, losses)
            with torch.autocast(ranks.device.type, enabled=False):
                score([tree for tree in trees if close[tree.example]], "close calls")
    return losses


def close_calls(trees: Sequence[Tree], losses: np.ndarray) -> np.ndarray:
    """Find the examples in which rounding may decide the best ending, by sum or by length; (examples,) bool."""
    errors = ROUNDING * np.sqrt(per_ending([[len(ending) for ending in tree.endings] for tree in trees]))
    close = np.zeros(len(losses), bool)
    for length in (1, per_ending([tree.lengths for tree in trees])):
        bound = ((losses + errors) / length).min(1, keepdims=True)  # the best ending is at most this
        close |= ((losses - errors) / length < bound).sum(1) > 1
    return close


def per_ending(numbers: Sequence[Sequence[float]], absent: float = 1.0) -> np.ndarray:
    """Arrange the numbers of each example's endings in an array, (examples, most endings)."""
    most = max(map(len, numbers))
    return np.array([[*of_example, *[absent] * (most - len(of_example))] for of_example in numbers])


class Scores(NamedTuple):
    """Accuracies in [0, 1]."""

    acc: float
    acc_norm: float
    num_examples: int
    num_cut: int  # of them, because the model's context is too short

    def __str__(self) -> str:
        cut = f", {self.num_cut:,} of them cut to the model's context" * bool(self.num_cut)
        return f"acc {self.acc:.4f} acc_norm {self.acc_norm:.4f} ({self.num_examples:,} examples{cut})"

    def metrics(self, task: str) -> dict[str, float]:
        return {f"{task}_acc": self.acc, f"{task}_acc_norm": self.acc_norm}


def score_examples(
    model: GPT, trees: Sequence[Tree], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> Scores:
    """Compute the scores of the trees' examples; arguments as in ending_losses."""
    losses = ending_losses(model, trees, ranks, check, progress)
    labels, lengths = [tree.label for tree in trees], per_ending([tree.lengths for tree in trees])
    acc, acc_norm = (float((found.argmin(1) == labels).mean()) for found in (losses, losses / lengths))
    return Scores(acc, acc_norm, len(trees), sum(tree.is_cut for tree in trees))


# ---------------------------------------------------------------------------------------------------------------------
# the command


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
