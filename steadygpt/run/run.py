"""A run: one flat object that all functions of the loop take."""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dataloader import BatchLoader, Mixture, Rows, RowStream
from model import GPT
from steadygpt.checkpoint.files import Scores, TrainState
from steadygpt.checkpoint.writer import CheckpointWriter
from steadygpt.config import TrainConfig
from steadygpt.data.tokenizer import Tokenizer
from steadygpt.inference.scoring import Suite
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import autocast
from steadygpt.machine.parallel import HostCopy
from steadygpt.machine.ranks import Ranks, Requests
from steadygpt.mirror.uploads import Uploads
from steadygpt.run.repeats import Repeats

ETA_STEPS = 100  # last steps whose times give the ETA


@dataclass
class Meter:
    """Step counts and timings of this launch."""

    steps: int = 0
    skipped: int = 0  # updates
    rows: int = 0
    seconds: float = 0.0  # of the steps, without evaluations
    first_rows: int = 0  # of the first step, which compiles and warms up, so its speed is not typical
    first_s: float = 0.0  # seconds of the first step
    row_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))  # per row, in the last steps
    between_steps_s: float = 0.0  # spent between steps, such as in evaluations
    paused_s: float = 0.0  # by saves
    step_start_s: float = field(default_factory=time.perf_counter)  # clock at the start of the current step


@dataclass(kw_only=True)
class Run:
    """The objects and the state of a run."""

    config: TrainConfig  # settled: values that follow from data, machine and length are filled in
    ranks: Ranks
    log: RunLog
    # The model and its training state:
    model: GPT  # with the weights: not compiled, not wrapped
    forward: nn.Module  # the same model after compile and DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of the loss, enabled with fp16 only
    state: TrainState
    # Data for training and evaluation:
    rows: Mixture
    sources: dict[str, tuple[str, RowStream]]  # name -> digest, rows
    rows_per_epoch: int  # 0 for a mixture, whose sources have epochs of their own
    val_sets: dict[str, RowStream]  # by name; the loss of the first one decides which model is best
    validated_on: str  # see TrainState
    tokenizer: Tokenizer | None  # for samples, tasks and bits per byte
    hellaswag: Suite | None
    # Around a step:
    requests: Requests  # to stop and to save
    fixed_content: dict[str, Any]  # of all checkpoints of this launch: all but tensors and state
    host_copy: HostCopy  # host memory for a copy of weights and optimizer state
    meter: Meter = field(default_factory=Meter)
    last_scores: Scores = field(default_factory=dict)  # of the last evaluations, perhaps of an earlier step
    saved: tuple[int, dict] | None = None  # step and scores of the newest save, perhaps still in flight
    # On rank 0 of a run that trains:
    writer: CheckpointWriter | None = None
    uploads: Uploads | None = None
    repeats: Repeats | None = None  # of a run that resumes

    def autocast(self):
        """Return a context in which operations have the precision of the run."""
        return autocast(self.ranks.device, self.config.precision)

    def batches(self, rows: Rows, steps: Iterable[range]) -> BatchLoader:
        """Return a loader of this rank's micro-batches, for steps given by their rows."""
        ranks = self.ranks
        return BatchLoader(rows, steps, self.config.mini_batch_size, ranks.device, ranks.rank, ranks.world_size)

    def training_batches(self) -> BatchLoader:
        """Return this rank's batches from the next step on."""
        size = self.config.rows_per_step
        steps = (range(row, row + size) for row in itertools.count(self.state.rows_consumed, size))
        return self.batches(self.rows, steps)

    def epochs_of_sources(self) -> dict[str, float]:
        """Return the epochs that each source of a mixture has had, by name; {} if there is only one source."""
        if len(self.sources) == 1:
            return {}
        used = self.rows.phase.rows_used_at(self.state.rows_consumed, self.config.seed)  # digest -> rows
        return {name: used[digest] / rows.rows_per_epoch for name, (digest, rows) in self.sources.items()}
