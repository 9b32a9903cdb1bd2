"""HellaSwag (Zellers et al. 2019): accuracy of choosing the right one of four endings.

    python hellaswag_eval.py checkpoints/latest.pt --hellaswag_file hellaswag_val.jsonl

An ending's tokens are scored after its context. acc chooses the ending with the lowest summed loss, acc_norm the one
with the lowest loss per token, as in build-nanogpt and llm.c. There are 10,042 validation examples; chance is 0.25.

--style lm_eval computes the numbers of EleutherAI's lm-evaluation-harness, which differs in these points: the context
begins with the activity ("Canoeing: Two women ..."), and its last sentence with a capital; "[title]" becomes ". ", and
other tags in brackets are removed; context and ending are tokenized together; acc_norm takes the loss per character.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from generate import load_model
from model import GPT, IGNORED_TARGET
from steadygpt.checkpoint import open_checkpoint
from steadygpt.cli import CheckpointOptions, UserError, option, parse_options, run_cli
from steadygpt.device import any_length, autocast, choose_precision, evaluating
from steadygpt.distributed import Ranks, joined
from steadygpt.sources import read_split
from steadygpt.tokenizer import get_tokenizer

if TYPE_CHECKING:
    from config import TrainConfig

TOKENS_PER_BATCH = {"cpu": 2048, "gpu": 16384}  # padding included
# Bound on autocast's error in a sum of n losses, in nats per sqrt(n). In bf16, models of 1 to 124 M parameters have an
# rms error of 0.0045 to 0.0082.
ROUNDING = 0.02
ENDINGS = 4
STYLES = ("build-nanogpt", "lm_eval")


@dataclass(frozen=True)
class HellaSwagOptions(CheckpointOptions):
    """The options of hellaswag_eval.py."""

    hellaswag_file: str = option("", "hellaswag_val.jsonl (default: from the Hub)")
    limit: int | None = option(None, "number of examples, from the start (default: all)", at_least=1)
    style: str = option(STYLES[0], "definition of acc and acc_norm", choices=STYLES)


@dataclass(frozen=True)
class Tree:
    """A context with endings that follow it, so that the context is computed only once."""

    context: list[int]  # token ids, at least one
    endings: list[list[int]]  # token ids, all of them scored
    lengths: list[int]  # acc_norm divides the ending's loss by this
    first: int  # number of the first ending in the example
    example: int
    label: int

    @property
    def width(self) -> int:
        """Number of input tokens. Each branch begins with the context's last token and lacks the ending's last."""
        return len(self.context) - 1 + sum(map(len, self.endings))


@dataclass(frozen=True)
class Scores:
    """Accuracies in [0, 1]."""

    acc: float
    acc_norm: float
    num_examples: int

    def __str__(self) -> str:
        return f"HellaSwag acc {self.acc:.4f} acc_norm {self.acc_norm:.4f} ({self.num_examples:,} examples)"

    def metrics(self) -> dict[str, float]:
        return {"hellaswag_acc": self.acc, "hellaswag_acc_norm": self.acc_norm}


def load_examples(file: str) -> list[dict]:
    """Load the validation examples, {"ctx": str, "endings": [str] * 4, "label": int, ...}, from .jsonl or the Hub.

    Raises: UserError when they cannot be loaded, or a line is not an example.
    """
    if not file:
        try:
            rows = read_split("Rowan/hellaswag", "validation")
        except (UserError, OSError) as error:
            raise UserError(f"{error}; or give its file with --hellaswag_file") from error
        return [row | {"label": int(row["label"])} for row in rows]
    try:
        lines = Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hellaswag_file {file}: cannot be read ({error})") from error
    if lines == [""]:
        raise UserError(f"{file}: empty; expected one JSON object per line")
    examples = []
    for number, line in enumerate(lines, start=1):
        try:
            example = json.loads(line)
            ctx, endings, label = example["ctx"], example["endings"], int(example["label"])
            texts = [ctx, *endings] if isinstance(endings, list) else []
            if len(texts) != 1 + ENDINGS or not all(isinstance(t, str) for t in texts) or not 0 <= label < ENDINGS:
                raise ValueError(f"{len(endings)} endings, label {label}")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file}:{number}: not a HellaSwag example ({error!r}); expected ctx, endings, label"
            ) from error
        examples.append(example | {"label": label})
    return examples


def tokenize(examples: Sequence[dict], tokenizer, context_length: int, style: str = STYLES[0]) -> list[Tree]:
    """Tokenize each example as one tree; one too long for the context becomes a tree per ending, cut at the start.

    Raises: UserError when an example lacks a field that the style needs.
    """
    encode, trees = tokenizer.encode_ordinary, []
    for number, example in enumerate(examples):
        # Endings are tokenized with a space before them, because GPT-2's words begin with one.
        if style == "lm_eval":
            text, texts = lm_eval_texts(example)
            context = encode(text.rstrip())
            endings = [encode(f"{text} {ending}")[len(context) :] for ending in texts]
            lengths = [max(1, len(ending)) for ending in texts]
        else:
            context, endings = encode(example["ctx"]), [encode(f" {ending}") for ending in example["endings"]]
            lengths = [len(ending) for ending in endings]
        if context and len(context) + max(map(len, endings)) <= context_length + 1:
            trees.append(Tree(context, endings, lengths, 0, number, example["label"]))
            continue
        for which, (ending, length) in enumerate(zip(endings, lengths, strict=True)):
            tokens = (context + ending)[-(context_length + 1) :]
            split = max(1, len(tokens) - len(ending))  # the first token cannot be scored
            trees.append(Tree(tokens[:split], [tokens[split:]], [length], which, number, example["label"]))
    return trees


def load(config: "TrainConfig", tokenizer: Any, ranks: Ranks, log: Any) -> list[Tree]:
    """Return the examples for a run in training, the same on every rank; none, with a warning, if unavailable."""
    try:
        examples = ranks.on_main(lambda: load_examples(config.hellaswag_file)) or []
    except UserError as error:
        log.warn(f"no HellaSwag in this run: {error}")
        return []
    return tokenize(ranks.broadcast(examples), tokenizer, config.context_length)


def lm_eval_texts(example: dict) -> tuple[str, list[str]]:
    """Return context and endings as in lm-evaluation-harness (task hellaswag, version 1).

    Files without ctx_a and ctx_b have ctx instead, and their last sentence keeps its lower-case letter.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    if "activity_label" not in example:
        raise UserError("an example of HellaSwag has no activity_label, which --style lm_eval needs")
    context = f"{example.get('ctx_a', example['ctx'])} {example.get('ctx_b', '').capitalize()}"
    return clean(f"{example['activity_label']}: {context}"), [clean(ending) for ending in example["endings"]]


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
    losses = model(inputs, targets, reduction="none", positions=positions, mask=mask).float().cpu()
    parts = iter(losses.split([len(ending) for tree in batch for ending in tree.endings]))
    return [[next(parts).sum().item() for _ in tree.endings] for tree in batch]


def ending_losses(
    model: GPT, trees: Sequence[Tree], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> np.ndarray:
    """Compute the summed loss of each ending in nats, (examples, 4), on all ranks together.

    Under autocast, examples that its rounding may decide are scored again without it, so the choices are those of fp32
    (except for layers in fp8, and for FSDP in bf16, which rounds the weights).

    Args:
        check: is called before each batch, and may raise to end the evaluation.

    Returns: the same array on every rank.
    """
    losses = np.zeros((trees[-1].example + 1, ENDINGS))

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
                    found[tree.example, tree.first : tree.first + len(sums)] = torch.tensor(sums)
        scored = [tree.example for tree in trees]
        losses[scored] = ranks.sum(found).numpy()[scored]

    with evaluating(model), any_length():
        score(trees, "HellaSwag")
        if torch.is_autocast_enabled(ranks.device.type):
            close = close_calls(trees, losses)
            with torch.autocast(ranks.device.type, enabled=False):
                score([tree for tree in trees if close[tree.example]], "close calls")
    return losses


def close_calls(trees: Sequence[Tree], losses: np.ndarray) -> np.ndarray:
    """Find the examples in which rounding may decide the best ending, by sum or by length; (examples,) bool."""
    tokens = per_ending(trees, [[len(ending) for ending in tree.endings] for tree in trees])
    errors = ROUNDING * np.sqrt(tokens)
    close = np.zeros(len(losses), bool)
    for length in (1, per_ending(trees, [tree.lengths for tree in trees])):
        bound = ((losses + errors) / length).min(1, keepdims=True)  # the best ending is at most this
        close |= ((losses - errors) / length < bound).sum(1) > 1
    return close


def per_ending(trees: Sequence[Tree], numbers: Sequence[Sequence[int]]) -> np.ndarray:
    """Arrange each tree's numbers by example and ending, (examples, 4)."""
    placed = np.ones((trees[-1].example + 1, ENDINGS))
    for tree, own in zip(trees, numbers, strict=True):
        placed[tree.example, tree.first : tree.first + len(own)] = own
    return placed


def evaluate(
    model: GPT, trees: Sequence[Tree], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> Scores:
    """Compute the scores of the trees' examples; arguments as in ending_losses."""
    losses = ending_losses(model, trees, ranks, check, progress)
    lengths, labels = per_ending(trees, [tree.lengths for tree in trees]), np.zeros(len(losses), int)
    for tree in trees:
        labels[tree.example] = tree.label
    return Scores(
        acc=float((losses.argmin(1) == labels).mean()),
        acc_norm=float(((losses / lengths).argmin(1) == labels).mean()),
        num_examples=len(losses),
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(HellaSwagOptions, argv, "Evaluate a checkpoint on HellaSwag.")
    with joined(options.device) as ranks:
        path, checkpoint = open_checkpoint(options.checkpoint, Path(options.checkpoint_dir))
        model = load_model(checkpoint).to(ranks.device)
        examples = load_examples(options.hellaswag_file)[: options.limit]
        trees = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length, options.style)
        with autocast(ranks.device, choose_precision(options.precision, ranks.device)):
            scores = evaluate(model, trees, ranks, progress=ranks.is_main)
        if ranks.is_main:
            print(f"{path} at step {checkpoint['step']:,}: {scores}")
    return 0


if __name__ == "__main__":
    run_cli(main)
