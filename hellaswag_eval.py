"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

    python hellaswag_eval.py checkpoints/latest.pt --hellaswag_file hellaswag_val.jsonl

An ending's tokens are scored after its context. acc takes the ending with the lowest summed loss, acc_norm the one
with the lowest loss per token, as build-nanogpt and llm.c do. 10,042 validation examples; chance is 0.25.

--style lm_eval gives the numbers of EleutherAI's lm-evaluation-harness, which differs in this: the context begins with
the activity ("Canoeing: Two women ..."), its last sentence with a capital; "[title]" becomes ". " and other marks in
brackets go; context and ending are tokenized in one; acc_norm takes the lowest loss per character.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from model import GPT, IGNORED_TARGET, evaluating
from steadygpt.checkpoint import open_checkpoint
from steadygpt.cli import OneLineParser, UserError, run_cli
from steadygpt.device import autocast, choose_precision
from steadygpt.distributed import Ranks, joined
from steadygpt.sources import load_hub
from steadygpt.tokenizer import get_tokenizer

TOKENS_PER_BATCH = {"cpu": 2048, "gpu": 16384}  # padding included
# How far autocast moves a sum of n losses, in nats per sqrt(n); 0.0045 to 0.0082 (rms, bf16) in models of 1 to 124 M.
ROUNDING = 0.02
ENDINGS = 4
STYLES = ("build-nanogpt", "lm_eval")


@dataclass(frozen=True)
class Tree:
    """A context and the endings that go on from it: the context is computed once for all of them."""

    context: list[int]  # token ids, at least one
    endings: list[list[int]]  # token ids, all of them scored
    lengths: list[int]  # what acc_norm divides each ending's loss by
    first: int  # the number of its first ending among the example's
    example: int
    label: int

    @property
    def width(self) -> int:
        """Tokens that the model reads: each branch repeats the context's last and lacks the ending's."""
        return len(self.context) - 1 + sum(map(len, self.endings))


@dataclass(frozen=True)
class Scores:
    acc: float
    acc_norm: float
    num_examples: int

    def __str__(self) -> str:
        return f"HellaSwag acc {self.acc:.4f} acc_norm {self.acc_norm:.4f} ({self.num_examples:,} examples)"

    def metrics(self) -> dict[str, float]:
        return {"hellaswag_acc": self.acc, "hellaswag_acc_norm": self.acc_norm}


def load_examples(file: str) -> list[dict]:
    """The validation examples: {"ctx": str, "endings": [str] * 4, "label": int, ...}, from a .jsonl file or the Hub.

    Raises: UserError when they cannot be had, or a line is not such an example.
    """
    if not file:
        try:
            rows = load_hub("hf:Rowan/hellaswag", split="validation")
        except UserError as error:
            raise UserError(f"{error}; or give its file with --hellaswag_file") from error
        return [row | {"label": int(row["label"])} for row in rows]
    try:
        lines = Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hellaswag_file {file}: cannot be read ({error})") from error
    if lines == [""]:
        raise UserError(f"{file}: empty; expected one JSON object a line")
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
    """A tree an example; one an ending where that is more than context_length + 1 tokens: the context loses its start.

    Raises: UserError when an example lacks what the style needs.
    """
    encode, trees = tokenizer.encode_ordinary, []
    for number, example in enumerate(examples):
        # Each ending with a space before it, as GPT-2's words begin, and what acc_norm divides its loss by.
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
            split = max(1, len(tokens) - len(ending))  # the first token is read, never scored
            trees.append(Tree(tokens[:split], [tokens[split:]], [length], which, number, example["label"]))
    return trees


def lm_eval_texts(example: dict) -> tuple[str, list[str]]:
    """Context and endings as lm-evaluation-harness writes them (its task hellaswag, version 1).

    In files that have no ctx_a and ctx_b, ctx stands for the first: the last sentence then keeps its small letter.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    if "activity_label" not in example:
        raise UserError("an example of HellaSwag has no activity_label; --style lm_eval needs it")
    context = f"{example.get('ctx_a', example['ctx'])} {example.get('ctx_b', '').capitalize()}"
    return clean(f"{example['activity_label']}: {context}"), [clean(ending) for ending in example["endings"]]


def make_batches(trees: Sequence[Tree], tokens_per_batch: int) -> list[list[Tree]]:
    """Trees of like width together, the widest first, so that little is padded and too little memory shows at once."""
    batches: list[list[Tree]] = []
    for tree in sorted(trees, key=lambda tree: tree.width, reverse=True):
        if not batches or batches[-1][0].width * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(tree)
    return batches


def score_batch(model: nn.Module, batch: Sequence[Tree], device: torch.device) -> list[list[float]]:
    """The summed loss of each ending of each tree, in nats; logits are computed at ending tokens alone."""
    width = max(tree.width for tree in batch)
    inputs, positions = torch.zeros(2, len(batch), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED_TARGET)
    branches = torch.zeros_like(inputs)  # 0: the context, which all see; 1, 2, ...: seen by its own tokens alone
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
    model: GPT, trees: Sequence[Tree], ranks: Ranks, should_stop: Callable[[], object] = bool, progress: bool = False
) -> np.ndarray | None:
    """The summed loss of each ending in nats, (examples, 4), found by all ranks; None where should_stop() said so.

    In an autocast, examples that its rounding may decide are scored again outside it: the choices are those of fp32
    (but for what stays in fp8).
    """
    losses = np.zeros((trees[-1].example + 1, ENDINGS))

    def score(trees: Sequence[Tree], what: str) -> bool:
        """Fill `losses` with those of the trees; False: stopped."""
        batches = make_batches(trees, TOKENS_PER_BATCH["cpu" if ranks.device.type == "cpu" else "gpu"])
        found = torch.zeros(losses.shape, dtype=torch.float64)
        for turn in tqdm(range(0, len(batches), ranks.world_size), desc=what, unit="batch", disable=not progress):
            if should_stop():
                return False
            # FSDP needs every rank in every forward: one with no batch left repeats the last for nothing.
            mine = turn + ranks.rank
            batch = batches[min(mine, len(batches) - 1)]
            for tree, sums in zip(batch, score_batch(model, batch, ranks.device), strict=True):
                if mine < len(batches):
                    found[tree.example, tree.first : tree.first + len(sums)] = torch.tensor(sums)
        scored = [tree.example for tree in trees]
        losses[scored] = ranks.sum(found).numpy()[scored]
        return True

    with evaluating(model):
        if not score(trees, "HellaSwag"):
            return None
        if torch.is_autocast_enabled(ranks.device.type):
            close = close_calls(trees, losses)
            with torch.autocast(ranks.device.type, enabled=False):
                if not score([tree for tree in trees if close[tree.example]], "close calls"):
                    return None
    return losses


def close_calls(trees: Sequence[Tree], losses: np.ndarray) -> np.ndarray:
    """Which examples' best ending, by sum or by length, could be another but for rounding; (examples,) bool."""
    tokens = per_ending(trees, [[len(ending) for ending in tree.endings] for tree in trees])
    errors = ROUNDING * np.sqrt(tokens)
    close = np.zeros(len(losses), bool)
    for length in (1, per_ending(trees, [tree.lengths for tree in trees])):
        surely = ((losses + errors) / length).min(1, keepdims=True)  # the best is this or lower
        close |= ((losses - errors) / length < surely).sum(1) > 1
    return close


def per_ending(trees: Sequence[Tree], numbers: Sequence[Sequence[int]]) -> np.ndarray:
    """Each tree's numbers in the places of its endings, (examples, 4)."""
    placed = np.ones((trees[-1].example + 1, ENDINGS))
    for tree, own in zip(trees, numbers, strict=True):
        placed[tree.example, tree.first : tree.first + len(own)] = own
    return placed


def evaluate(model: GPT, trees: Sequence[Tree], ranks: Ranks, *args, **kwargs) -> Scores | None:
    """The scores of the trees' examples, on every rank; the arguments are those of ending_losses."""
    losses = ending_losses(model, trees, ranks, *args, **kwargs)
    if losses is None:
        return None
    lengths, labels = per_ending(trees, [tree.lengths for tree in trees]), np.zeros(len(losses), int)
    for tree in trees:
        labels[tree.example] = tree.label
    return Scores(
        acc=float((losses.argmin(1) == labels).mean()),
        acc_norm=float(((losses / lengths).argmin(1) == labels).mean()),
        num_examples=len(losses),
    )


def main() -> int:
    parser = OneLineParser(description="Evaluate a checkpoint on HellaSwag.")
    parser.add_argument("checkpoint", nargs="?", default="latest", help="latest, best or a file (default: latest)")
    parser.add_argument(
        "--checkpoint_dir", default="checkpoints", help="where latest and best are (default: checkpoints)"
    )
    parser.add_argument("--hellaswag_file", default="", help="hellaswag_val.jsonl (default: from the Hub)")
    parser.add_argument("--limit", type=int, default=None, help="only the first LIMIT examples (default: all)")
    parser.add_argument(
        "--style",
        default=STYLES[0],
        choices=STYLES,
        help=f"whose definition of acc and acc_norm (default: {STYLES[0]})",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; expected at least 1")
    with joined(args.device) as ranks:
        path, checkpoint = open_checkpoint(args.checkpoint, Path(args.checkpoint_dir))
        model = GPT.from_checkpoint(checkpoint).to(ranks.device)
        examples = load_examples(args.hellaswag_file)[: args.limit]
        trees = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length, args.style)
        with autocast(ranks.device, choose_precision(args.precision, ranks.device)):
            scores = evaluate(model, trees, ranks, progress=ranks.is_main)
        if ranks.is_main:
            print(f"{path} at step {checkpoint['step']:,}: {scores}")
    return 0


if __name__ == "__main__":
    run_cli(main)
