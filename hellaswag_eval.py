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

from checkpoint import open_checkpoint
from device import autocast, choose_precision
from distributed import Distributed, joined
from errors import OneLineParser, UserError, run_cli
from model import GPT, IGNORED_TARGET, evaluating
from sources import load_hub
from tokenizer import get_tokenizer

TOKENS_PER_BATCH = 16384  # padding included
ENDINGS = 4
STYLES = ("build-nanogpt", "lm_eval")


@dataclass(frozen=True)
class Row:
    """One ending behind its context: token ids, of which the last num_ending are scored."""

    tokens: list[int]
    num_ending: int
    length: int  # what acc_norm divides by
    example: int
    ending: int
    label: int


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


def tokenize(examples: Sequence[dict], tokenizer, context_length: int, style: str = STYLES[0]) -> list[Row]:
    """Four rows an example; a row longer than context_length + 1 tokens loses the start of its context.

    Raises: UserError when an example lacks what the style needs.
    """
    encode, rows = tokenizer.encode_ordinary, []
    for number, example in enumerate(examples):
        # Each ending with a space before it, as GPT-2's words begin, and what acc_norm divides its loss by.
        if style == "lm_eval":
            text, endings = lm_eval_texts(example)
            context = encode(text.rstrip())
            pairs = [(encode(f"{text} {ending}")[len(context) :], max(1, len(ending))) for ending in endings]
        else:
            context = encode(example["ctx"])
            pairs = [(tokens, len(tokens)) for tokens in (encode(f" {ending}") for ending in example["endings"])]
        for which, (ending, length) in enumerate(pairs):
            tokens = (context + ending)[-(context_length + 1) :]
            rows.append(Row(tokens, min(len(ending), len(tokens) - 1), length, number, which, example["label"]))
    return rows


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


def make_batches(rows: Sequence[Row], tokens_per_batch: int) -> list[list[Row]]:
    """Rows of like length together, the longest first, so that little is padded and too little memory shows at once."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.tokens), reverse=True):
        if not batches or len(batches[-1][0].tokens) * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(row)
    return batches


def score_batch(model: nn.Module, batch: Sequence[Row], device: torch.device) -> list[float]:
    """The summed loss of each row's ending, in nats; logits are computed at ending tokens alone."""
    width = max(len(row.tokens) for row in batch) - 1
    inputs = torch.zeros(len(batch), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED_TARGET)
    for i, row in enumerate(batch):
        end = len(row.tokens) - 1
        inputs[i, :end] = torch.tensor(row.tokens[:-1])
        targets[i, end - row.num_ending : end] = torch.tensor(row.tokens[-row.num_ending :])
    losses = model(inputs.to(device), targets.to(device), reduction="none").float().cpu()
    return [part.sum().item() for part in losses.split([row.num_ending for row in batch])]


def evaluate(
    model: GPT, rows: Sequence[Row], me: Distributed, should_stop: Callable[[], object] = bool, progress: bool = False
) -> Scores | None:
    """Score the rows, shared among the ranks; every rank gets the result, or None where should_stop() said so."""
    batches = make_batches(rows, TOKENS_PER_BATCH)
    num_examples = rows[-1].example + 1
    losses = torch.zeros(num_examples, ENDINGS, dtype=torch.float64)
    turns = range(0, len(batches), me.world_size)
    with evaluating(model):
        for turn in tqdm(turns, desc="HellaSwag", unit="batch", disable=not progress):
            if should_stop():
                return None
            # FSDP needs every rank in every forward: one with no batch left repeats the last for nothing.
            mine = turn + me.rank
            batch = batches[min(mine, len(batches) - 1)]
            for row, loss in zip(batch, score_batch(model, batch, me.device), strict=True):
                if mine < len(batches):
                    losses[row.example, row.ending] = loss
    losses = me.sum(losses).numpy()
    lengths, labels = np.ones((num_examples, ENDINGS)), np.zeros(num_examples, int)
    for row in rows:
        lengths[row.example, row.ending], labels[row.example] = row.length, row.label
    return Scores(
        acc=float((losses.argmin(1) == labels).mean()),
        acc_norm=float(((losses / lengths).argmin(1) == labels).mean()),
        num_examples=num_examples,
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
    with joined(args.device) as me:
        path, checkpoint = open_checkpoint(args.checkpoint, Path(args.checkpoint_dir))
        model = GPT.from_checkpoint(checkpoint).to(me.device)
        examples = load_examples(args.hellaswag_file)[: args.limit]
        rows = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length, args.style)
        with autocast(me.device, choose_precision(args.precision, me.device)):
            scores = evaluate(model, rows, me, progress=me.is_main)
        if me.is_main:
            print(f"{path} at step {checkpoint['step']:,}: {scores}")
    return 0


if __name__ == "__main__":
    run_cli(main)
