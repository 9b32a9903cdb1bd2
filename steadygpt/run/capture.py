"""The state of a run in a checkpoint: its capture for a save, and its restoration."""

from dataclasses import asdict, dataclass

import torch

from model import GPT
from steadygpt.checkpoint.files import FORMAT_VERSION, TrainState, config_of
from steadygpt.checkpoint.host_copy import HostCopy, fill, restore_optimizer
from steadygpt.machine.parallel import compare_replicas
from steadygpt.run.history import WITHOUT_TENSORS
from steadygpt.run.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Captures the content of checkpoints."""

    plan: Plan
    model: GPT  # with the weights
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    state: TrainState
    host_copy: HostCopy  # the host memory for a copy of weights and optimizer state

    def content(self) -> dict:
        """Copy a checkpoint's content to rank 0's host memory; the copy is valid until the next call.

        All ranks call this.

        Raises: Corrupted.
        """
        ranks = self.plan.ranks
        compare_replicas(self.model, ranks, self.plan.config.shards(ranks.world_size))
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self.state),
            **self.host_copy.copy(self.model, self.optimizer),
            "elapsed_s": self.state.total_s(),
            "scaler": self.scaler.state_dict(),
            "model_config": asdict(self.model.config),
            "lr": self.optimizer.param_groups[0]["lr"],
            "epoch": self.plan.schedule.epochs(self.state.rows_consumed),
            "data_fingerprint": self.plan.fingerprint,
            "launches": self.plan.launches,
            **self.plan.data.tokenizer_record._asdict(),
        }


def restore(plan: Plan, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> TrainState:
    """Load the state of the checkpoint, or only the weights of --init_from, or draw new weights."""
    config = plan.config
    history = plan.history
    ranks = plan.ranks
    checkpoint = history.checkpoint
    saved = checkpoint or history.weights
    if saved:
        fill(model, saved["model"].__getitem__, ranks)
    else:
        torch.manual_seed(config.seed)
        fill(model, model.initial_weight, ranks)
    if checkpoint and not config.eval_only:
        restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
        if checkpoint["scaler"]:
            scaler.load_state_dict(scaler.state_dict() | checkpoint["scaler"])
    state = TrainState()
    if checkpoint:
        state = TrainState(**{name: checkpoint[name] for name in TrainState.__annotations__})
        before = history.launches[-1]
        is_other_mixture = before["shares"] != plan.launches[-1]["shares"]
        if config_of(before).rows_per_step != config.rows_per_step or is_other_mixture:
            state.bad_steps = 0  # it counts only steps of one batch size and mixture
    if saved:  # unmap the file, so that its disk space is free once later saves replace it
        saved |= WITHOUT_TENSORS
    return state
