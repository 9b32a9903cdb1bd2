"""Accuracy of a checkpoint on HellaSwag (Zellers et al. 2019) and on CORE (Li et al. 2024, DCLM).

    python hellaswag_eval.py best --hellaswag_file hellaswag_val.jsonl
    torchrun --nproc_per_node=4 hellaswag_eval.py best --tasks core --core_dir eval_bundle

HellaSwag has 10,042 validation examples; chance is 0.25. An ending's tokens are scored after its context. acc chooses
the ending with the lowest summed loss, acc_norm the one with the lowest loss per token, as in build-nanogpt and llm.c.

CORE is the mean of 22 accuracies, each centred so that chance is 0 and all right is 1. Prompts and choices are those of
nanochat's evaluation of base models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model import GPT
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import counted, printable
from steadygpt.checkpoint.files import open_checkpoint
from steadygpt.config import TrainConfig
from steadygpt.convert.weights import CheckpointOptions, load_model
from steadygpt.data.tasks import CORE, GREEDY, HELLASWAG, SCHEMA, Task, load_core, load_hellaswag
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.machine.device import any_length, autocast, choose_precision, evaluating
from steadygpt.machine.ranks import Ranks, joined

TOKENS_PER_BATCH = {"cpu": 2048, "gpu": 16384}  # padding included
# Bound on autocast's error in a sum of n losses, in nats per sqrt(n). In bf16, models of 1 to 124 M parameters have an
# rms error of 0.0045 to 0.0082.
ROUNDING = 0.02
ROUNDING_OF_LEAD = 0.1  # of a logit's lead over all others; rms errors of 0.004 to 0.005 with 3 and 16 M parameters


# ---------------------------------------------------------------------------------------------------------------------
# examples in tokens


class Question(NamedTuple):
    """An example in tokens."""

    answers: list[np.ndarray]  # (length,) int32 each, a context and a continuation
    scored: list[int]  # how many of the last tokens of each
    label: int | None  # index of the right answer; None for a single one that must be the most likely
    is_cut: bool = False  # to the context of the model

    @property
    def shared(self) -> int:
        """The number of first tokens that are computed once. Each answer is a branch after them."""
        unscored = (len(ids) - n for ids, n in zip(self.answers, self.scored, strict=True))
        return max(0, min(common_length(self.answers), *unscored) - 1)

    @property
    def width(self) -> int:
        """The number of input tokens. Each branch lacks its last token."""
        return self.shared + sum(len(ids) - self.shared - 1 for ids in self.answers)


def common_length(sequences: Sequence[np.ndarray]) -> int:
    """Return how many of the first tokens are the same in all sequences."""
    shortest = min(map(len, sequences))
    differs = np.any([ids[:shortest] != sequences[0][:shortest] for ids in sequences], axis=0)
    return int(differs.argmax()) if differs.any() else shortest


def tokenize(task: Task, number: int, tokenizer: Tokenizer, context_length: int) -> Question:
    """Tokenize an example of a task.

    HellaSwag's contexts and endings are tokenized alone, as in build-nanogpt. Where one is too long for the model, the
    context is cut at the start, the same for all endings.

    CORE's prompts are tokenized whole, as in nanochat, and each begins a document. Scored is what follows the tokens
    that all have in common; in a schema task, where the contexts differ, what all have in common at the end. A prompt
    that is too long is cut at the start, each on its own.
    """
    texts, label = task.rows[number]
    limit = context_length
    if task.kind == HELLASWAG:
        context = tokenizer.encode(texts[0][0]) or [tokenizer.document_id]  # as every document of the data begins
        # GPT-2's words begin with a space.
        answers = [np.array(context + tokenizer.encode(f" {ending}"), np.int32) for _, ending in texts]
        scored, limit = [len(ids) - len(context) for ids in answers], limit + 1  # the last token is no input
    else:
        before = task.shots_of(number)
        prompts = [before + task.delimiter.join(text) for text in texts]
        if task.kind == GREEDY:
            prompts.insert(0, f"{before}{texts[0][0]}{task.delimiter}".strip())
        answers = [np.array([tokenizer.document_id, *tokenizer.encode(prompt)], np.int32) for prompt in prompts]
        scored = [len(ids) - common_length(answers) for ids in answers]
        if task.kind == SCHEMA:
            scored = [common_length([ids[::-1] for ids in answers])] * len(answers)
        if task.kind == GREEDY:
            del answers[0], scored[0]
    surplus = max(0, *(len(ids) - limit for ids in answers)) if task.kind == HELLASWAG else 0
    kept = [ids[max(0, min(surplus, len(ids) - n - 1)) :][-limit:] for ids, n in zip(answers, scored, strict=True)]
    # The first token has no prediction; a continuation that begins with it is not scored, as in nanochat.
    most = [len(ids) - 1 if task.kind == HELLASWAG or n < len(ids) else 0 for ids, n in zip(kept, scored, strict=True)]
    scored = [*map(min, scored, most)]
    # Of equal answers rounding could prefer the later one, which is not scored.
    keys = [(ids.tobytes(), n) for ids, n in zip(kept, scored, strict=True)]
    scored = [n * (keys.index(key) == at) for at, (n, key) in enumerate(zip(scored, keys, strict=True))]
    is_cut = any(len(ids) < len(whole) for ids, whole in zip(kept, answers, strict=True))
    return Question(kept, scored, None if task.kind == GREEDY else label, is_cut)


def make_batches(widths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Group indices of similar width to save padding, the widest first, so that a lack of memory shows at once."""
    batches: list[list[int]] = []
    for number in sorted(range(len(widths)), key=lambda number: widths[number], reverse=True):
        if not batches or widths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(number)
    return batches


def score_batch(model: GPT, batch: Sequence[Question], device: torch.device) -> list[list[tuple[float, float]]]:
    """Return of each answer of each question the summed loss in nats, and the least lead of a token's logit.

    Logits are computed for scored tokens only. Without any, both are 0.
    """
    width = max(1, *(question.width for question in batch))
    inputs, positions = torch.zeros(2, len(batch), width, dtype=torch.int64)
    targets = torch.zeros_like(inputs)
    is_target = torch.zeros_like(inputs, dtype=torch.bool)
    branches = torch.zeros_like(inputs)  # 0: shared, visible to all; 1, 2, ...: branches, each visible to itself
    for i, question in enumerate(batch):
        shared = begin = question.shared
        inputs[i, :shared], positions[i, :shared] = torch.from_numpy(question.answers[0][:shared]), torch.arange(shared)
        for number, (answer, count) in enumerate(zip(question.answers, question.scored, strict=True), start=1):
            ids, end = torch.from_numpy(answer), begin + len(answer) - shared - 1
            inputs[i, begin:end] = ids[shared:-1]
            targets[i, end - count : end] = ids[len(ids) - count :]
            is_target[i, end - count : end] = True
            positions[i, begin:end] = torch.arange(shared, len(ids) - 1)
            branches[i, begin:end] = number
            begin = end
    branches = branches.to(device)
    same = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    mask = same.tril()[:, None]  # (B, 1, width, width)
    scores = model.answer_scores(
        inputs.to(device), targets.to(device), is_target.to(device), positions.to(device), mask
    )
    losses, leads = scores.cpu().T.contiguous()
    counts = [*chain.from_iterable(question.scored for question in batch)]
    sums = [part.sum().item() for part in losses.split(counts)]
    least = [min(part.tolist(), default=0.0) for part in leads.split(counts)]
    found = zip(sums, least, strict=True)
    return [[next(found) for _ in question.answers] for question in batch]


def score(
    model: GPT, questions: Sequence[Question], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> np.ndarray:
    """Score the answers of questions on all ranks together, (questions, most answers, 2) float64, see score_batch().

    Under autocast, questions that its rounding may decide are scored again without it, so the choices are those of fp32
    (except for FSDP in bf16, which rounds the weights).

    Args:
        check: is called before each batch, and may raise to end the evaluation.

    Returns: the same array on every rank; 0 for answers that a question lacks.
    """
    widths = np.array([question.width for question in questions])

    def score_some(chosen: np.ndarray, what: str) -> np.ndarray:
        """Score the questions of these indices, all others are 0."""
        batches = make_batches(widths[chosen], TOKENS_PER_BATCH["cpu" if ranks.device.type == "cpu" else "gpu"])
        found = torch.zeros(len(questions), max(len(question.answers) for question in questions), 2).double()
        turns, hidden = range(0, len(batches), ranks.world_size), not (progress and batches)
        for turn in ProgressBar(iterable=turns, total=len(turns), desc=what, unit="batch", disable=hidden):
            check()
            # FSDP needs all ranks in every forward: a rank without a batch recomputes the last one and discards it.
            batch = chosen[batches[min(turn + ranks.rank, len(batches) - 1)]]
            scores = score_batch(model, [questions[number] for number in batch], ranks.device)
            for number, of_answers in zip(batch, scores, strict=True) if turn + ranks.rank < len(batches) else ():
                found[number, : len(of_answers)] = torch.tensor(of_answers)
        return ranks.sum(found).numpy()

    with evaluating(model), any_length():
        found = score_some(np.arange(len(questions)), "examples")
        if torch.is_autocast_enabled(ranks.device.type):
            close = close_calls(questions, found)
            with torch.autocast(ranks.device.type, enabled=False):
                found[close] = score_some(close.nonzero()[0], "close calls")[close]
    return found


def by_sum_and_length(questions: Sequence[Question], found: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the loss of each answer by its sum and per token, and its number of tokens, (questions, most answers).

    An answer without a token is never the best, unless it is the first one: in nanochat its loss per token is NaN, and
    Python's min() takes a NaN that comes first.
    """
    lengths = np.zeros(found.shape[:2])
    for number, question in enumerate(questions):
        lengths[number, : len(question.scored)] = question.scored
    sums = np.where(lengths > 0, found[..., 0], np.inf)
    per_token = sums / np.maximum(lengths, 1)
    per_token[lengths[:, 0] == 0, 0] = -np.inf
    return sums, per_token, lengths


def close_calls(questions: Sequence[Question], found: np.ndarray) -> np.ndarray:
    """Find the questions in which rounding may decide the answer, by sum or by length; (questions,) bool."""
    *losses, lengths = by_sum_and_length(questions, found)
    close = np.array([question.label is None for question in questions]) & (np.abs(found[:, 0, 1]) < ROUNDING_OF_LEAD)
    for loss, length in zip(losses, (1, np.maximum(lengths, 1)), strict=True):
        errors = ROUNDING * np.sqrt(lengths) / length
        bound = (loss + errors).min(1, keepdims=True)  # the best answer is at most this
        close |= (loss - errors < bound).sum(1) > 1
    return close


# ---------------------------------------------------------------------------------------------------------------------
# accuracies


def right_answers(questions: Sequence[Question], found: np.ndarray) -> np.ndarray:
    """Return whether the best answer is the right one, by the summed loss and by the loss per token, (2, questions)."""
    labels = np.array([-1 if question.label is None else question.label for question in questions])
    chosen = [losses.argmin(1) == labels for losses in by_sum_and_length(questions, found)[:2]]
    return np.where(labels < 0, found[:, 0, 1] > 0, chosen)


@dataclass(frozen=True)
class Suite:
    """Tasks that are scored together, with one result."""

    name: str  # HELLASWAG or CORE
    tasks: Sequence[Task]
    questions: list[Question]  # of all tasks

    @classmethod
    def load(cls, name: str, place: str, limit: int | None, tokenizer: Tokenizer, length: int, ranks: Ranks) -> "Suite":
        """Load and tokenize at most `limit` examples of each task, on all ranks together.

        Args:
            place: file of HellaSwag, or folder of CORE.
            length: of the context of the model.
        """
        tasks = ranks.from_main(partial(load_core if name == CORE else load_hellaswag, place, limit))
        asked = [(task, number) for task in tasks for number in range(len(task.rows))]
        mine = asked[ranks.rank :: ranks.world_size]
        parts = ranks.gather(ranks.on_each(lambda: [tokenize(*one, tokenizer, length) for one in mine]))
        return cls(name, tasks, [parts[n % len(parts)][n // len(parts)] for n in range(len(asked))])

    def scored(
        self, model: GPT, ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
    ) -> tuple[dict[str, float], str]:
        """Score a model, arguments as in score(); return numbers for the logs, and a text.

        HellaSwag has acc and acc_norm. CORE is the mean of its tasks' accuracies by loss per token, each centred.
        """
        losses, norms = right_answers(self.questions, score(model, self.questions, ranks, check, progress))
        cut, ends = [question.is_cut for question in self.questions], accumulate(len(task.rows) for task in self.tasks)
        examples = (
            f"({counted(len(cut), 'example')}{f', {sum(cut):,} of them cut to the context of the model' * any(cut)})"
        )
        if self.name == HELLASWAG:
            acc, acc_norm = losses.mean().item(), norms.mean().item()
            text = f"HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} {examples}"
            return {f"{HELLASWAG}_acc": acc, f"{HELLASWAG}_acc_norm": acc_norm}, text
        line, centred = "  {:<36} {:>8} {:>8} {:>8} {:>9} {:>7}".format, dict[str, float]()
        lines = [line("task", "accuracy", "chance", "centred", "examples", "cut")]
        for task, end in zip(self.tasks, ends, strict=True):
            of_task = slice(end - len(task.rows), end)
            accuracy = norms[of_task].mean().item()
            centred[f"{CORE}/{task.label}"] = centre = (accuracy - task.chance) / (1 - task.chance)
            numbers = (f"{number:.4f}" for number in (accuracy, task.chance, centre))
            lines.append(line(printable(task.label), *numbers, f"{len(task.rows):,}", f"{sum(cut[of_task]):,}"))
        core = sum(centred.values()) / len(centred)
        text = f"CORE {core:.4f}, the mean of {counted(len(centred), 'task')} {examples}"
        return {CORE: core, **centred}, "\n".join([text, *lines])


def load_suites(
    config: TrainConfig, tokenizer: Tokenizer, ranks: Ranks, warn: Callable[[str], object]
) -> list[tuple[int, Suite]]:
    """Return what a run scores, and how often. HellaSwag is left out, with a warning, if it is unavailable."""
    suites, how = list[tuple[int, Suite]](), (tokenizer, config.context_length, ranks)
    if config.hellaswag_freq:
        try:
            suites.append((config.hellaswag_freq, Suite.load(HELLASWAG, config.hellaswag_file, None, *how)))
        except UserError as error:
            warn(f"no HellaSwag in this run: {error}")
    if config.core_freq:
        suites.append((config.core_freq, Suite.load(CORE, config.core_dir, config.core_examples or None, *how)))
    return suites


# ---------------------------------------------------------------------------------------------------------------------
# the command


@dataclass(frozen=True)
class EvaluationOptions(CheckpointOptions):
    tasks: str = option(HELLASWAG, "hellaswag, or core", choices=(HELLASWAG, CORE))
    hellaswag_file: str = option("", "examples of HellaSwag, a .jsonl file (default: from the Hub)")
    core_dir: str = option("", "folder of the tasks of CORE, the evaluation bundle of DCLM or nanochat")
    limit: int | None = option(None, "examples of each task (default: all)", at_least=1, aliases=("core_examples",))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(EvaluationOptions, argv, "Evaluate a checkpoint on HellaSwag or CORE.")
    if (options.tasks == CORE) != bool(options.core_dir):
        raise UserError("--tasks core and --core_dir, the folder of the evaluation bundle, need each other; give both")
    with joined(options.device) as ranks:
        path, checkpoint = open_checkpoint(options.checkpoint, Path(options.checkpoint_dir))
        model, tokenizer = load_model(checkpoint).to(ranks.device), load_tokenizer(TokenizerRecord.of(checkpoint))
        precision = ranks.broadcast(choose_precision(options.precision, ranks.device))
        place = options.core_dir if options.tasks == CORE else options.hellaswag_file
        suite = Suite.load(options.tasks, place, options.limit, tokenizer, model.config.context_length, ranks)
        with autocast(ranks.device, precision):
            _, text = suite.scored(model, ranks, progress=ranks.is_main)
        if ranks.is_main:
            print(printable(f"{path} at step {checkpoint['step']:,}: {text}", keep="\n"))
    return 0


if __name__ == "__main__":
    run_cli(main)
