"""The summary of a run at its end: time, tokens, speed, losses, memory, saves."""

import shlex
from collections.abc import Mapping

from steadygpt.base.text import bytes_text, counted, duration_text, labelled
from steadygpt.checkpoint.files import validation_of
from steadygpt.checkpoint.saves import Saves, pause_text
from steadygpt.config import TrainConfig
from steadygpt.machine.device import peak_memory_bytes
from steadygpt.machine.host import process_age_s
from steadygpt.machine.ranks import Ranks
from steadygpt.run.results import Results


def summarize(results: Results, saves: Saves, parameters: int, status: str, reason: str) -> list[str]:
    """Return how a run of a model of so many parameters has ended, and on rank 0 its summary."""
    if (writer := saves.writer) is None:
        return [""]
    config, state, totals = results.config, results.state, results.totals
    tokens, start_s = state.rows_consumed * config.context_length, process_age_s()
    here, elapsed_s = " since this start" * bool(state.elapsed_s), state.total_s()
    whole = f"{seconds_text(elapsed_s)} in total; since this start " * bool(here)
    of_steps = f"{seconds_text(totals.seconds)} of it training ({counted(totals.steps, 'step')})"
    lines = {"time": f"{whole}{seconds_text(start_s)}, {of_steps}"}
    lines["tokens"] = f"{tokens:,}, {tokens / parameters:,.2f} per parameter"
    if speed := totals.steps_per_second():
        tokens_per_second = speed * config.total_batch_size
        lines["speed"] = f"{tokens_per_second:,.0f} tokens/s{here}, {speed:.3g} steps/s, {config.precision}"
        if (mfu := results.mfu(tokens_per_second)) is not None:
            lines["speed"] += f", mfu {mfu:.1%}"
    lines["loss"] = "none" if state.loss is None else f"{state.loss:.4f}"
    if state.val_loss is not None:
        lines["loss"] += f", validation {state.val_loss:.4f}"
        found = validation_of(writer.evaluations, state.val_loss)
        if (bpb := found.get("val_bpb")) is not None:
            lines["loss"] += f" ({bpb:.4f} bits per byte)"
        by_name = {name.removeprefix("val_loss/"): loss for name, loss in found.items() if name.startswith("val_loss/")}
        if by_name:
            lines["validation"] = ", ".join(f"{name} {loss:.4f}" for name, loss in by_name.items() if loss is not None)
    if state.best_val_loss is not None:
        steps = [at for at, scores in writer.evaluations.items() if scores.get("val_loss") == state.best_val_loss]
        lines["loss"] += f", best {state.best_val_loss:.4f}{f' at step {steps[0]:,}' if steps else ''}"
    device = results.ranks.device
    of_all = "" if device.type == "cuda" else ", including Python and PyTorch"
    lines["memory"] = f"peak {bytes_text(peak_memory_bytes(device))} on rank 0{here}{of_all}"
    if (cost := results.cost(elapsed_s)) is not None:
        lines["cost"] = f"{cost:,.2f}"
    failed = f", {writer.failures:,} failed" if writer.failures else ""
    lines["saves"] = (
        f"{writer.saved:,}{here}{failed}; they paused training for {pause_text(saves.paused_s)}, "
        f"{saves.paused_s / start_s:.2%} of the time"
    )
    if totals.skipped or totals.spikes:
        lines["skipped"] = (
            f"{counted(totals.skipped, 'update')}{here}; {counted(totals.not_finite, 'step')} without a finite loss "
            f"and gradient, {counted(totals.spikes, 'loss spike')}"
        )
    lines["next"] = next_commands(config.checkpoint_dir, status, state.best_val_loss is not None, results.ranks)
    end = f"{status}{f' ({reason})' if reason else ''} after {counted(state.step, 'step')}"
    end += f"; checkpoints in {config.checkpoint_dir}"
    return [end, *(labelled(name, text) for name, text in lines.items() if text)]


def next_commands(folder: str, status: str, has_best: bool, ranks: Ranks) -> str:
    """Return what to type after a run that has finished or stopped."""
    where = f" --checkpoint_dir {shlex.quote(folder)}" * (folder != TrainConfig.checkpoint_dir)
    if status == "finished":
        which = "best" if has_best else "latest"
        return f"python generate.py {which}{where}, or python convert_hf.py {which} hf_model{where}"
    launcher = f"torchrun --nproc_per_node={ranks.world_size}" if ranks.world_size > 1 else "python"
    return f"{launcher} train.py --resume latest{where}" * (status == "stopped")


def validation_text(sets: Mapping[str, Mapping[str, float]], best: bool, epochs: Mapping[str, float]) -> str:
    """Return the result of a validation in words.

    Args:
        sets: name -> val_loss, and val_bpb if it is known.
        best: whether the first set's loss is the best so far.
        epochs: of each source of a mixture.
    """
    parts: list[str] = []
    for name, scores in sets.items():
        is_best = " (best so far)" * (best and not parts)
        bits = f", {scores['val_bpb']:.4f} bits per byte" if "val_bpb" in scores else ""
        parts.append(f"{f'{name}: ' * (len(sets) > 1)}val loss {scores['val_loss']:.4f}{is_best}{bits}")
    if epochs:
        parts.append("epochs: " + ", ".join(f"{name} {number:.2f}" for name, number in epochs.items()))
    return " | ".join(parts)


def seconds_text(seconds: float) -> str:
    """Return a duration, below a minute with a decimal."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration_text(seconds)
