"""What a run measures beside its training: validation loss, HellaSwag, a sample. Every rank calls each of them.

Each leaves the model, its mode and training's randomness as they were, and gives up where a stop is agreed upon.
"""

from collections.abc import Callable
from contextlib import closing
from functools import cached_property

import torch
from torch import nn

import hellaswag_eval
from config import TrainConfig
from dataloader import BatchLoader
from generate import sample_texts
from model import GPT, IGNORED_TARGET, evaluating
from plan import Data, validation_rows
from steadygpt.cli import UserError
from steadygpt.device import autocast
from steadygpt.distributed import Ranks, StopSignal
from steadygpt.tokenizer import get_tokenizer

SAMPLE_TOKENS = 100


class Evaluation:
    """The evaluations of a run in progress.

    Args:
        model: the bare GPT; `forward` is it as compiled and wrapped for its ranks.
        warn: says, on rank 0, what cannot be evaluated and why.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        ranks: Ranks,
        model: GPT,
        forward: nn.Module,
        precision: str,
        warn: Callable[[str], None],
    ):
        self.config, self.data, self.ranks, self.warn = config, data, ranks, warn
        self.model, self.forward, self.precision = model, forward, precision

    def validate(self, stop: StopSignal) -> float | None:
        """Mean loss of the first eval_tokens of the val shards, the same on any number of ranks; None: stopped."""
        config, ranks, val = self.config, self.ranks, self.data.val
        rows, B = validation_rows(config, val), config.mini_batch_size
        loader = BatchLoader(val, B, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device)
        losses = []
        with closing(loader), evaluating(self.forward):
            for first_row in range(
                ranks.rank * B, ranks.rank * B + rows + -rows % (B * ranks.world_size), B * ranks.world_size
            ):
                if stop.agreed():
                    return None
                inputs, targets = loader.next()
                targets = targets.clone()  # the targets overlap the inputs
                targets[max(0, rows - first_row) :] = IGNORED_TARGET  # batches of one shape, so one compiled graph
                with autocast(ranks.device, self.precision):
                    losses.append(self.forward(inputs, targets, reduction="sum"))
        return ranks.sum(torch.stack(losses).cpu().double().sum()).item() / (rows * config.context_length)

    def hellaswag(self, stop: StopSignal) -> hellaswag_eval.Scores | None:
        """HellaSwag's scores; None: stopped. To be asked only where there are examples."""
        with autocast(self.ranks.device, self.precision):
            return hellaswag_eval.evaluate(self.model, self.examples, self.ranks, stop.agreed)

    def sample(self, step: int) -> str:
        """What the model of this step writes after the prompt. To be asked only where there is a tokenizer."""
        generator = torch.Generator(self.ranks.device).manual_seed(self.config.seed + step)
        with autocast(self.ranks.device, self.precision):
            prompt = self.config.sample_prompt
            (text,) = sample_texts(self.model, self.tokenizer, prompt, SAMPLE_TOKENS, generator, top_k=50)
        return text

    @cached_property
    def tokenizer(self):
        """The data's tokenizer; None, with a warning, where a rank cannot have it: training needs only its numbers."""
        tokenizer, error = None, "another rank cannot have the tokenizer"
        try:
            self.ranks.on_main(lambda: get_tokenizer(self.data.tokenizer))  # then the others find it in a cache
            tokenizer = get_tokenizer(self.data.tokenizer)
        except UserError as raised:
            error = raised
        if self.ranks.any(tokenizer is None):
            self.warn(f"no samples and no HellaSwag in this run: {error}")
            return None
        return tokenizer

    @cached_property
    def examples(self) -> list:
        """HellaSwag's examples as token rows; none, with a warning, where they cannot be had."""
        if self.tokenizer is None:
            return []
        try:
            examples = self.ranks.on_main(lambda: hellaswag_eval.load_examples(self.config.hellaswag_file))
        except UserError as error:
            self.warn(f"no HellaSwag in this run: {error}")
            return []
        return hellaswag_eval.tokenize(self.ranks.broadcast(examples), self.tokenizer, self.config.context_length)
