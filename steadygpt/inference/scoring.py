"""Scores of a model on HellaSwag and CORE; hellaswag_eval.py defines them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from model import GPT
from steadygpt.base.options import UserError
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import counted, printable
from steadygpt.config import TrainConfig
from steadygpt.data.tasks import CORE, GREEDY, HELLASWAG, SCHEMA, Task, load_core, load_hellaswag
from steadygpt.data.tokenizer import Tokenizer
from steadygpt.machine.device import any_length, evaluating
from steadygpt.machine.ranks import Ranks

TOKENS_PER_BATCH = {"cpu": 2048, "gpu": 16384}  # padding included


# ---------------------------------------------------------------------------------------------------------------------
# examples in tokens


class Question(NamedTuple):
    """An example in tokens."""

    answers: list[np.ndarray]  # (length,) int32 each, a context and a continuation
    scored: list[int]  # how many of each answer's last tokens are scored
    label: int | None  # index of the right answer; None: a single answer, which must be the most likely
    is_cut: bool = False  # truncated to the context of the model

    @property
    def shared(self) -> int:
        """The number of leading tokens that are computed once. Each answer is a branch after them."""
        length = common_length(self.answers)
        for ids, count in zip(self.answers, self.scored, strict=True):
            length = min(length, len(ids) - count)
        return max(0, length - 1)

    @property
    def width(self) -> int:
        """The number of input tokens. Each branch lacks its last token."""
        return self.shared + sum(len(ids) - self.shared - 1 for ids in self.answers)


def common_length(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the common prefix of all sequences."""
    shortest = min(map(len, sequences))
    differs = np.any([ids[:shortest] != sequences[0][:shortest] for ids in sequences], axis=0)
    if not differs.any():
        return shortest
    return int(differs.argmax())


def tokenize(task: Task, number: int, tokenizer: Tokenizer, context_length: int) -> Question:
    """Tokenize an example of a task.

    HellaSwag's contexts and endings are tokenized separately, as in build-nanogpt. If an ending is too long for the
    model, the context is cut at the start, equally for all endings.

    CORE's prompts are tokenized whole, as in nanochat, and each begins a document. The tokens after the common prefix
    are scored; in a schema task, where the contexts differ, the common suffix. Each prompt that is too long is cut at
    the start.
    """
    texts, right = task.rows[number]
    if task.kind == HELLASWAG:
        whole, scored = _hellaswag_answers(texts, tokenizer)
        limit = context_length + 1  # the last token is no input
        surplus = max(0, max(map(len, whole)) - limit)  # of the longest ending
    else:
        whole, scored = _core_answers(task, number, tokenizer)
        limit = context_length
        surplus = 0
    answers: list[np.ndarray] = []
    counts: list[int] = []
    for ids, count in zip(whole, scored, strict=True):
        cut_at = max(0, min(surplus, len(ids) - count - 1))
        answer = ids[cut_at:][-limit:]
        # The first token has no prediction. In CORE, a continuation that begins with it is not scored, as in nanochat.
        if task.kind == HELLASWAG:
            count = min(count, len(answer) - 1)
        elif count >= len(answer):
            count = 0
        # Equal answers are scored once, because rounding could prefer the copy.
        for earlier, earlier_count in zip(answers, counts, strict=True):
            if count == earlier_count and np.array_equal(answer, earlier):
                count = 0
        answers.append(answer)
        counts.append(count)
    is_cut = any(len(answer) < len(ids) for answer, ids in zip(answers, whole, strict=True))
    label = None if task.kind == GREEDY else right
    return Question(answers, counts, label, is_cut)


def _hellaswag_answers(texts: Sequence[Sequence[str]], tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    """Return for each ending the tokens of context and ending, and how many of them are the ending's."""
    context = tokenizer.encode(texts[0][0])
    if not context:
        context = [tokenizer.document_id]  # as every document of the data begins
    space = "" if tokenizer.added_space else " "  # one space before the ending
    answers = []
    scored = []
    for _, ending in texts:
        ending_ids = tokenizer.encode(space + ending)
        answers.append(np.array(context + ending_ids, np.int32))
        scored.append(len(ending_ids))
    return answers, scored


def _core_answers(task: Task, number: int, tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    """Return the tokens of each prompt of an example, and how many of its last ones are scored."""
    texts, _ = task.rows[number]
    before = task.shots_of(number)
    prompts = [before + task.delimiter.join(text) for text in texts]
    if task.kind == GREEDY:  # the prompt alone, beside the one with its continuation
        prompts.insert(0, f"{before}{texts[0][0]}{task.delimiter}".strip())
    answers = [np.array([tokenizer.document_id, *tokenizer.encode(prompt)], np.int32) for prompt in prompts]
    if task.kind == SCHEMA:
        common_end = common_length([ids[::-1] for ids in answers])
        return answers, [common_end] * len(answers)
    common_start = common_length(answers)
    if task.kind == GREEDY:
        del answers[0]
    return answers, [len(ids) - common_start for ids in answers]


def make_batches(widths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Group indices of similar width to save padding, the widest first, so that a lack of memory shows at once."""
    batches: list[list[int]] = []
    for number in sorted(range(len(widths)), key=lambda number: widths[number], reverse=True):
        if not batches or widths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(number)
    return batches


def score_batch(model: GPT, batch: Sequence[Question], device: torch.device) -> list[list[tuple[float, float]]]:
    """Return for each answer of each question the summed loss in nats, and the smallest lead of a token's logit.

    Only scored tokens count; without any, both are 0.
    """
    width = max(1, *(question.width for question in batch))
    inputs = torch.zeros(len(batch), width, dtype=torch.int64)
    positions = torch.zeros_like(inputs)
    targets = torch.zeros_like(inputs)
    is_target = torch.zeros_like(inputs, dtype=torch.bool)
    branches = torch.zeros_like(inputs)  # 0: shared, visible to all; 1, 2, ...: branches, each visible to itself
    counts = []  # of the targets of each answer
    for i, question in enumerate(batch):
        shared = question.shared
        inputs[i, :shared] = torch.from_numpy(question.answers[0][:shared])
        positions[i, :shared] = torch.arange(shared)
        begin = shared
        for number, (answer, count) in enumerate(zip(question.answers, question.scored, strict=True), start=1):
            ids = torch.from_numpy(answer)
            end = begin + len(ids) - shared - 1
            inputs[i, begin:end] = ids[shared:-1]
            targets[i, end - count : end] = ids[len(ids) - count :]
            is_target[i, end - count : end] = True
            positions[i, begin:end] = torch.arange(shared, len(ids) - 1)
            branches[i, begin:end] = number
            begin = end
            counts.append(count)
    branches = branches.to(device)
    is_same = branches[:, None, :] == branches[:, :, None]
    is_visible = is_same | (branches[:, None, :] == 0)
    mask = is_visible.tril()[:, None]  # (B, 1, width, width)
    scores = model.answer_scores(
        inputs.to(device), targets.to(device), is_target.to(device), positions.to(device), mask
    )
    losses, leads = scores.cpu().T.contiguous()
    sums_and_leads = []
    for answer_losses, answer_leads in zip(losses.split(counts), leads.split(counts), strict=True):
        sums_and_leads.append((answer_losses.sum().item(), min(answer_leads.tolist(), default=0.0)))
    answers_left = iter(sums_and_leads)
    return [list(islice(answers_left, len(question.answers))) for question in batch]


def score(
    model: GPT, questions: Sequence[Question], ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
) -> np.ndarray:
    """Score the answers of questions on all ranks together, (questions, most answers, 2) float64, see score_batch().

    Args:
        check: called before each batch; may raise to end the evaluation.

    Returns: the same array on every rank; 0 for answers that a question lacks.
    """
    tokens_per_batch = TOKENS_PER_BATCH["cpu" if ranks.device.type == "cpu" else "gpu"]
    batches = make_batches([question.width for question in questions], tokens_per_batch)
    most_answers = max(len(question.answers) for question in questions)
    scores = torch.zeros(len(questions), most_answers, 2, dtype=torch.float64)
    turns = range(0, len(batches), ranks.world_size)
    with evaluating(model), any_length():
        for turn in ProgressBar(iterable=turns, total=len(turns), desc="examples", unit="batch", disable=not progress):
            check()
            # FSDP needs all ranks in every forward: a rank without a batch recomputes the last one and discards it.
            has_batch = turn + ranks.rank < len(batches)
            batch = batches[turn + ranks.rank] if has_batch else batches[-1]
            scores_of_batch = score_batch(model, [questions[number] for number in batch], ranks.device)
            if has_batch:
                for number, answers in zip(batch, scores_of_batch, strict=True):
                    scores[number, : len(answers)] = torch.tensor(answers)
    return ranks.sum(scores).numpy()


# ---------------------------------------------------------------------------------------------------------------------
# accuracies


def right_answers(questions: Sequence[Question], scores: np.ndarray) -> np.ndarray:
    """Return whether the best answer is the right one, by the summed loss and by the loss per token, (2, questions).

    An answer without scored tokens is never the best, except the first one by loss per token: in nanochat this loss is
    NaN, and Python's min() takes a NaN that comes first.
    """
    labels = np.array([-1 if question.label is None else question.label for question in questions])
    lengths = np.zeros(scores.shape[:2])
    for number, question in enumerate(questions):
        lengths[number, : len(question.scored)] = question.scored
    sums = np.where(lengths > 0, scores[..., 0], np.inf)
    per_token = sums / np.maximum(lengths, 1)
    per_token[lengths[:, 0] == 0, 0] = -np.inf
    is_right = [sums.argmin(1) == labels, per_token.argmin(1) == labels]
    is_most_likely = scores[:, 0, 1] > 0  # each token of a single answer leads over all others
    return np.where(labels < 0, is_most_likely, is_right)


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
            length: the context length of the model.
        """
        load = load_core if name == CORE else load_hellaswag
        tasks: list[Task] = []
        with ranks.sharing_errors():
            if ranks.is_main:
                tasks = load(place, limit)
        tasks = ranks.broadcast(tasks)
        examples = []
        for task in tasks:
            for number in range(len(task.rows)):
                examples.append((task, number))
        own_examples = examples[ranks.rank :: ranks.world_size]
        own_questions = []
        with ranks.sharing_errors():
            own_questions = [tokenize(task, number, tokenizer, length) for task, number in own_examples]
        questions_of_ranks = ranks.gather(own_questions)
        questions = []
        for index in range(len(examples)):
            place_on_rank, rank = divmod(index, ranks.world_size)
            questions.append(questions_of_ranks[rank][place_on_rank])
        return cls(name, tasks, questions)

    def scored(
        self, model: GPT, ranks: Ranks, check: Callable[[], object] = bool, progress: bool = False
    ) -> tuple[dict[str, float], str]:
        """Score a model, arguments as in score(); return numbers for the logs, and a text.

        HellaSwag has acc and acc_norm. CORE is the mean of its tasks' accuracies by loss per token, each centred.
        """
        by_sum, by_token = right_answers(self.questions, score(model, self.questions, ranks, check, progress))
        is_cut = np.array([question.is_cut for question in self.questions])
        examples = counted(len(self.questions), "example")
        if is_cut.any():
            examples += f", {is_cut.sum():,} of them cut to the context of the model"
        if self.name == HELLASWAG:
            acc = by_sum.mean().item()
            acc_norm = by_token.mean().item()
            text = f"HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} ({examples})"
            return {f"{HELLASWAG}_acc": acc, f"{HELLASWAG}_acc_norm": acc_norm}, text
        row = "  {:<36} {:>8} {:>8} {:>8} {:>9} {:>7}".format
        lines = [row("task", "accuracy", "chance", "centred", "examples", "cut")]
        centred: dict[str, float] = {}
        begin = 0
        for task in self.tasks:
            end = begin + len(task.rows)
            accuracy = by_token[begin:end].mean().item()
            centre = (accuracy - task.chance) / (1 - task.chance)
            centred[f"{CORE}/{task.label}"] = centre
            lines.append(
                row(
                    printable(task.label),
                    f"{accuracy:.4f}",
                    f"{task.chance:.4f}",
                    f"{centre:.4f}",
                    f"{len(task.rows):,}",
                    f"{is_cut[begin:end].sum():,}",
                )
            )
            begin = end
        core = sum(centred.values()) / len(centred)
        text = f"CORE {core:.4f}, the mean of {counted(len(centred), 'task')} ({examples})"
        return {CORE: core, **centred}, "\n".join([text, *lines])


def hellaswag_of_run(
    config: TrainConfig, tokenizer: Tokenizer, ranks: Ranks, warn: Callable[[str], object]
) -> Suite | None:
    """Return HellaSwag for a run; None, with a warning, if it is unavailable."""
    try:
        return Suite.load(HELLASWAG, config.hellaswag_file, None, tokenizer, config.context_length, ranks)
    except UserError as error:
        warn(f"no HellaSwag in this run: {error}")
        return None
