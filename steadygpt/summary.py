"""What a run has achieved and what it took, in a few lines at its end."""

from typing import TYPE_CHECKING

from steadygpt.device import peak_memory_bytes, process_age_s
from steadygpt.saves import pause_text
from steadygpt.units import duration_text

if TYPE_CHECKING:
    from train import Run


def summarize(run: "Run") -> list[str]:
    """Return the summary of a run that has ended, on rank 0."""
    t, state, saves, totals = run.training, run.state, run.saves, run.log.totals
    config = t.config
    tokens, N = state.rows_consumed * config.context_length, t.model.num_parameters()
    found = [f"{tokens:,}, {tokens / N:,.2f} per parameter"]
    if speed := totals.steps_per_second():
        found.append(f"{speed * config.total_batch_size:,.0f} tokens/s")
        if (mfu := run.log.mfu(speed * config.total_batch_size)) is not None:
            found.append(f"mfu {mfu:.1%}")
    losses = [f"training {state.loss:.4f}" if state.loss is not None else "training: none"]
    if state.val_loss is not None:
        losses.append(f"validation {state.val_loss:.4f}")
    if state.best_val_loss is not None:
        steps = [at for at, scores in saves.evaluations.items() if scores.get("val_loss") == state.best_val_loss]
        losses.append(f"best validation {state.best_val_loss:.4f}{f' at step {steps[0]:,}' if steps else ''}")
    skipped = [f"{totals.skipped:,} update{'s' * (totals.skipped != 1)}"]
    if totals.skipped or totals.spikes:
        skipped.append(f"{totals.not_finite:,} without a finite loss and gradient, {totals.spikes:,} loss spikes")
    wall_s = process_age_s()
    lines = {
        "time": f"{duration_text(run.elapsed_s())}; of this start's {duration_text(wall_s)}, "
        f"{duration_text(totals.seconds)} for {totals.steps:,} step{'s' * (totals.steps != 1)}",
        "tokens": ", ".join(found),
        "loss": ", ".join(losses),
        "memory": f"peak {peak_memory_bytes(t.ranks.device) / 1e9:.2f} GB on rank 0",
    }
    if (cost := run.log.cost(run.elapsed_s())) is not None:
        lines["cost"] = f"{cost:,.2f}"
    lines["saves"] = (
        f"{saves.count:,} in this start, which paused training for {pause_text(saves.paused_s)}, "
        f"{saves.paused_s / wall_s:.2%} of the time"
    )
    lines["skipped"] = "; ".join(skipped)
    return [f"{name:<13}{text}" for name, text in lines.items()]
