"""Validation, tasks and samples of a run, on every rank.

An evaluation restores the model's mode. It may use random numbers, because each step seeds its own.
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from dataloader import EvenlySpaced, RowStream
from generate import sample_texts
from hellaswag_eval import Suite
from model import GPT
from steadygpt.checkpoint.files import TrainState
from steadygpt.checkpoint.saves import Saves
from steadygpt.data.tokenizer import Tokenizer
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import evaluating
from steadygpt.machine.ranks import StopSignal
from steadygpt.run.launches import epochs_of_sources
from steadygpt.run.plan import Plan, validation_rows
from steadygpt.run.summary import validation_text

SAMPLE_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluations of a run."""

    plan: Plan
    model: GPT  # with the weights
    forward: nn.Module  # the same model after compile and DDP
    tokenizer: Tokenizer | None  # for samples, tasks and bits per byte
    suites: list[tuple[int, Suite]]  # of tasks to score, each with the steps between two evaluations
    stop: StopSignal
    log: RunLog
    saves: Saves

    def run(self, state: TrainState, everything: bool, save: Callable[[], object]) -> bool:
        """Run the evaluations that are due after a step: validation, tasks, a sample; or all of them.

        Returns: whether any was due.

        Args:
            save: saves the run, for a model that is the best so far.

        Raises: Stopped.
        """
        config = self.plan.config

        def due(freq: int) -> bool:
            if not freq:
                return False
            return everything or (state.step > 0 and state.step % freq == 0)

        freqs = (config.eval_freq, config.hellaswag_freq, config.sample_freq)
        if not any(due(freq) for freq in freqs):
            return False
        self.log.note(doing="evaluating")
        if due(config.eval_freq) and self.plan.data.val_sets:
            self._validate_all(state, save)
        for freq, suite in self.suites:
            if due(freq):
                with self.plan.autocast():
                    scores, text = suite.scored(self.model, self.plan.ranks, self.stop.check)
                self.log.evaluation(state.step, text, **scores)
                self.saves.record_evaluation(state, scores, save)
        if due(config.sample_freq) and self.tokenizer:
            generator = torch.Generator(self.plan.ranks.device).manual_seed(config.seed + state.step)
            prompt = config.sample_prompt
            with self.plan.autocast():
                [text] = sample_texts(self.model, self.tokenizer, prompt, SAMPLE_TOKENS, generator, top_k=50)
            self.log.text(state.step, text)
        return True

    def _validate_all(self, state: TrainState, save: Callable[[], object]) -> None:
        val_sets = self.plan.data.val_sets
        sets = {val_set.shards.name: self.validate(val_set.rows) for val_set in val_sets}
        scores = dict(sets[val_sets[0].shards.name])  # the first set decides which model is the best
        if len(sets) > 1:
            for name, scores_of_set in sets.items():
                for key, score in scores_of_set.items():
                    scores[f"{key}/{name}"] = score
        epochs = epochs_of_sources(self.plan.data, self.plan.launches, state.rows_consumed)
        best = self.saves.record_evaluation(state, scores, save)
        text = validation_text(sets, best, epochs)
        epoch_scores = {f"epoch/{name}": epoch for name, epoch in epochs.items()}
        self.log.evaluation(state.step, text, **scores, **epoch_scores)
        self.log.tell("histograms", state.step, self.model)

    def validate(self, val: RowStream) -> dict[str, float]:
        """Return the mean loss (val_loss) and the bits per byte (val_bpb) of a validation set, of rows spread over it.

        They do not depend on the number of ranks. Special tokens count in the loss, but not in the bits per byte, which
        are left out if no bytes are known. Any other term of the loss is returned as val_NAME.

        Raises: Stopped.
        """
        config = self.plan.config
        ranks = self.plan.ranks
        B = config.mini_batch_size
        rows = validation_rows(config, val, len(self.plan.data.val_sets))
        rows_per_rank = math.ceil(rows / (B * ranks.world_size)) * B
        bytes_of_token = self._bytes_of_token()
        one_step = [range(rows_per_rank * ranks.world_size)]
        sums = []
        batches = self.plan.batches(EvenlySpaced(val, rows), one_step)
        with closing(batches), evaluating(self.forward), self.plan.autocast():
            for first in range(ranks.rank * rows_per_rank, (ranks.rank + 1) * rows_per_rank, B):
                self.stop.check()
                inputs, targets = batches.next()
                loss_terms = self.forward(inputs, targets)
                sizes = bytes_of_token[targets]  # (B, T)
                # The last rows are set to zero, not cut off: a new shape of the inputs would recompile the model.
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

    def _bytes_of_token(self) -> torch.Tensor:
        """Return how many bytes each id stands for, 0 for special tokens and padding, (padded_vocab_size,) int64."""
        num_bytes = torch.zeros(0, dtype=torch.int64)
        if self.tokenizer:
            num_bytes = torch.from_numpy(self.tokenizer.num_bytes)
        padding = self.model.config.padded_vocab_size - len(num_bytes)
        return nn.functional.pad(num_bytes, (0, padding)).to(self.plan.ranks.device)
