"""Validation, tasks and samples of a run, on every rank.

An evaluation restores the model's mode. It may use random numbers, because each step seeds its own.
"""

import math
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from itertools import chain

import torch
from torch import nn

from dataloader import EvenlySpaced, RowStream
from steadygpt.config import TrainConfig
from steadygpt.inference.sampling import prompt_ids, sample_texts
from steadygpt.machine.device import evaluating
from steadygpt.run.run import Run
from steadygpt.run.saving import is_best
from steadygpt.run.summary import validation_text

SAMPLE_TOKENS = 100


def evaluate(run: Run, everything: bool) -> bool:
    """Run the evaluations due at the current step, or all that are enabled: validation, HellaSwag, a sample.

    Scores are recorded in the state as each evaluation ends, so the next save has them even after a stop.

    Returns: whether any was due.

    Raises: Stopped.
    """
    config = run.config
    step = run.state.step

    def due(freq: int) -> bool:
        if not freq:
            return False
        return everything or (step > 0 and step % freq == 0)

    if not any(due(freq) for freq in (config.eval_freq, config.hellaswag_freq, config.sample_freq)):
        return False
    run.log.note(doing="evaluating")
    run.log.beat(now=True)
    if due(config.eval_freq) and run.val_sets:
        validate_all(run)
    if due(config.hellaswag_freq) and run.hellaswag:
        with run.autocast():
            scores, text = run.hellaswag.scored(run.model, run.ranks, partial(run.requests.agree, now=True))
        run.log.evaluation(step, text, **scores)
        add_scores(run, scores)
    if due(config.sample_freq) and run.tokenizer:
        generator = torch.Generator(run.ranks.device).manual_seed(config.seed + step)
        with run.autocast():
            prompt = prompt_ids(run.tokenizer, config.sample_prompt)
            [text] = sample_texts(run.model, run.tokenizer, prompt, SAMPLE_TOKENS, generator, top_k=50)
        run.log.text(step, text)
    return True


def validate_all(run: Run) -> None:
    """Validate on all sets. The loss on the first set decides which model is best."""
    state = run.state
    sets = {name: validate(run, rows) for name, rows in run.val_sets.items()}
    first, *others = sets
    scores = dict(sets[first])
    if others:
        for name, scores_of_set in sets.items():
            for key, score in scores_of_set.items():
                scores[f"{key}/{name}"] = score
    add_scores(run, scores)
    state.validated_on = run.validated_on
    best = is_best(run)  # on rank 0, which alone logs it
    epochs = run.epochs_of_sources()
    epoch_scores = {f"epoch/{name}": epoch for name, epoch in epochs.items()}
    run.log.evaluation(state.step, validation_text(sets, best, epochs), **scores, **epoch_scores)
    if best:
        run.log.note(best_val_loss=scores["val_loss"])
    run.log.histograms(state.step, run.model)


def add_scores(run: Run, scores: Mapping[str, float]) -> None:
    """Record scores for the current weights."""
    finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
    run.state.scores |= finite
    run.last_scores = dict(run.state.scores)
    run.log.note(**finite)  # for the monitor, until the next evaluation


def validate(run: Run, val: RowStream) -> dict[str, float]:
    """Return the mean loss (val_loss) and the bits per byte (val_bpb) over evenly spaced rows of a validation set.

    Scores do not depend on the number of ranks. Special tokens count in the loss, but not in the bits per byte, which
    are omitted if the tokens' bytes are unknown. Other terms of the loss are returned as val_NAME.

    Raises: Stopped.
    """
    config = run.config
    ranks = run.ranks
    B = config.mini_batch_size
    rows = validation_rows(config, val, len(run.val_sets))
    rows_per_rank = math.ceil(rows / (B * ranks.world_size)) * B
    bytes_of_token = _bytes_of_token(run)
    one_step = [range(rows_per_rank * ranks.world_size)]
    sums = []
    batches = run.batches(EvenlySpaced(val, rows), one_step)
    with closing(batches), evaluating(run.forward), run.autocast():
        for first in range(ranks.rank * rows_per_rank, (ranks.rank + 1) * rows_per_rank, B):
            run.requests.agree(now=True)
            inputs, targets = batches.next()
            loss_terms = run.forward(inputs, targets)
            sizes = bytes_of_token[targets]  # (B, T)
            # Zero the surplus rows instead of cutting them off: a new input shape would recompile the model.
            end = max(0, rows - first)
            sizes[end:] = 0
            sums_of_batch = []
            for losses in loss_terms.values():
                losses[end * config.context_length :] = 0
                sums_of_batch.append(losses.sum())
            nats = loss_terms["loss"].where(sizes.flatten() > 0, 0).sum()
            sums.append(torch.stack([*sums_of_batch, nats, sizes.sum()]))
    sums_of_ranks = ranks.gather(torch.stack(sums).tolist())
    totals = [math.fsum(column) for column in zip(*chain.from_iterable(sums_of_ranks), strict=True)]  # rounded once
    *totals_of_terms, nats_total, bytes_total = totals
    scores = {}
    for name, total in zip(loss_terms, totals_of_terms, strict=True):
        scores[f"val_{name}"] = total / (rows * config.context_length)
    if bytes_total:
        scores["val_bpb"] = nats_total / (math.log(2) * bytes_total)
    return scores


def validation_rows(config: TrainConfig, val: RowStream, sets: int = 1) -> int:
    """Return how many rows of one of `sets` validation sets to use: its share of eval_tokens, at most all its rows."""
    return min(max(1, config.eval_tokens // (sets * config.context_length)), val.rows_per_epoch)


def _bytes_of_token(run: Run) -> torch.Tensor:
    """Return Tokenizer.num_bytes on the device, 0 for padding or without a tokenizer, (padded_vocab_size,) int64."""
    num_bytes = torch.zeros(0, dtype=torch.int64)
    if run.tokenizer:
        num_bytes = torch.from_numpy(run.tokenizer.num_bytes)
    padding = run.model.config.padded_vocab_size - len(num_bytes)
    return nn.functional.pad(num_bytes, (0, padding)).to(run.ranks.device)
