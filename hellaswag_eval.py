"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

    python hellaswag_eval.py checkpoints/latest.pt --hellaswag_file hellaswag_val.jsonl

An ending's tokens are scored after its context. acc takes the ending with the lowest summed loss, acc_norm the one
with the lowest loss per token, as build-nanogpt and llm.c do. 10,042 validation examples; chance is 0.25.
"""

import argparse
import json
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
from errors import UserError, run_cli
from model import GPT, IGNORED_TARGET, evaluating
from sources import load_hub
from tokenizer import get_tokenizer

TOKENS_PER_BATCH = 16384  # padding included
ENDINGS = 4


@dataclass(frozen=True)
class Row:
    """One ending behind its context: token ids, of which the last num_ending are scored."""

    tokens: list[int]
    num_ending: int
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
    """The validation examples: {"ctx": str, "endings": [str] * 4, "label": int} each, from a .jsonl file or the Hub.

    Raises: UserError when they cannot be had, or a line is not such an example.
    """
    if not file:
        try:
            rows = load_hub("hf:Rowan/hellaswag", split="validation")
        except UserError as error:
            raise UserError(f"{error}; or give its file with --hellaswag_file") from error
        return [{"ctx": row["ctx"], "endings": row["endings"], "label": int(row["label"])} for row in rows]
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
        examples.append({"ctx": ctx, "endings": endings, "label": label})
    return examples


def tokenize(examples: Sequence[dict], tokenizer, context_length: int) -> list[Row]:
    """Four rows an example; a row longer than context_length + 1 tokens loses the start of its context."""
    rows = []
    for number, example in enumerate(examples):
        context = tokenizer.encode_ordinary(example["ctx"])
        for which, text in enumerate(example["endings"]):
            # A space before the ending: GPT-2's words begin with theirs.
            ending = tokenizer.encode_ordinary(" " + text)
            tokens = (context + ending)[-(context_length + 1) :]
            rows.append(Row(tokens, min(len(ending), len(tokens) - 1), number, which, example["label"]))
    return rows


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
        lengths[row.example, row.ending], labels[row.example] = row.num_ending, row.label
    return Scores(
        acc=float((losses.argmin(1) == labels).mean()),
        acc_norm=float(((losses / lengths).argmin(1) == labels).mean()),
        num_examples=num_examples,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint on HellaSwag.", allow_abbrev=False)
    parser.add_argument("checkpoint", nargs="?", default="latest", help="latest, best or a file (default: latest)")
    parser.add_argument(
        "--checkpoint_dir", default="checkpoints", help="where latest and best are (default: checkpoints)"
    )
    parser.add_argument("--hellaswag_file", default="", help="hellaswag_val.jsonl (default: from the Hub)")
    parser.add_argument("--limit", type=int, default=None, help="only the first LIMIT examples (default: all)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; expected at least 1")
    with joined(args.device) as me:
        path, checkpoint = open_checkpoint(args.checkpoint, Path(args.checkpoint_dir))
        model = GPT.from_checkpoint(checkpoint).to(me.device)
        examples = load_examples(args.hellaswag_file)[: args.limit]
        rows = tokenize(examples, get_tokenizer(checkpoint["tokenizer"]), model.config.context_length)
        with autocast(me.device, choose_precision(args.precision, me.device)):
            scores = evaluate(model, rows, me, progress=me.is_main)
        if me.is_main:
            print(f"{path} at step {checkpoint['step']:,}: {scores}")
    return 0


if __name__ == "__main__":
    run_cli(main)
