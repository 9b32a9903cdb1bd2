"""Texts about a run: the result of a validation, and the summary at the end."""

from collections.abc import Mapping
from pathlib import Path

from steadygpt.base.durable import is_gone
from steadygpt.base.text import bytes_text, command, counted, duration_text, labelled, run_flags, some
from steadygpt.checkpoint.files import BEST, LATEST
from steadygpt.machine.device import peak_memory_bytes
from steadygpt.machine.host import process_age_s
from steadygpt.run.run import Run
from steadygpt.run.step import cost, mfu


def summarize(run: Run, status: str, reason: str) -> list[str]:
    """Return a line on how a run has ended, then its summary; ranks other than 0 return one empty line."""
    if run.writer is None:
        return [""]
    config = run.config
    state = run.state
    meter = run.meter
    age_s = process_age_s()
    elapsed_s = state.total_s()
    since = " since this launch" if state.elapsed_s else ""
    lines = {}

    time = f"{duration_text(age_s)}, {duration_text(meter.seconds)} of it training"
    time += f" ({counted(meter.steps, 'step')})"
    if state.elapsed_s:
        time = f"{duration_text(elapsed_s)} in total; since this launch {time}"
    lines["time"] = time

    tokens = state.rows_consumed * config.context_length
    lines["tokens"] = f"{tokens:,}, {tokens / run.model.num_parameters():,.2f} per parameter"

    if meter.steps > 1:
        seconds = meter.seconds - meter.first_s
        tokens_per_second = (meter.rows - meter.first_rows) * config.context_length / seconds
        steps_per_second = (meter.steps - 1) / seconds
        lines["speed"] = f"{tokens_per_second:,.0f} tokens/s{since}, {steps_per_second:.3g} steps/s, {config.precision}"
        share = mfu(run, tokens_per_second)
        if share is not None:
            lines["speed"] += f", mfu {share:.1%}"

    lines["loss"] = losses_text(run)
    set_losses = []
    for name, loss in run.last_scores.items():
        if name.startswith("val_loss/") and loss is not None:
            set_losses.append(f"{name.removeprefix('val_loss/')} {loss:.4f}")
    if set_losses:
        lines["validation"] = ", ".join(set_losses)

    lines["memory"] = f"peak {bytes_text(peak_memory_bytes(run.ranks.device))} on rank 0{since}"
    if run.ranks.device.type != "cuda":
        lines["memory"] += ", including Python and PyTorch"
    price = cost(run, elapsed_s)
    if price is not None:
        lines["cost"] = f"{price:,.2f}"
    lines["saves"] = f"paused training for {meter.paused_s:.1f} s{since}, {meter.paused_s / age_s:.2%} of the time"
    if meter.skipped:
        lines["skipped"] = f"{counted(meter.skipped, 'update')}{since}; a warning in log.txt tells why"

    folder = Path(config.checkpoint_dir)
    flag = run_flags(config.checkpoint_dir)
    if is_gone(folder):
        lines["next"] = f"nothing to resume in {folder}; if it was moved: --resume latest --checkpoint_dir NEW_FOLDER"
    elif is_gone(folder / LATEST):
        lines["next"] = f"nothing to resume: {folder / LATEST} does not exist"
    elif status == "finished":
        which = "latest" if is_gone(folder / BEST) else "best"
        lines["next"] = f"{command('generate.py')} {which}{flag}, or {command('convert_hf.py')} {which} hf_model{flag}"
    elif status == "stopped":
        processes = run.ranks.world_size
        count = f"NPROC={processes} " if processes > 1 and run.ranks.is_one_machine else ""
        lines["next"] = f"{count}{command('resume_training.sh')}{run_flags(config.checkpoint_dir, config.mirror)}"

    end = f"{status} ({reason})" if reason else status
    end += f" after {counted(state.step, 'step')}; checkpoints in {config.checkpoint_dir}"
    return [end, *(labelled(name, text) for name, text in lines.items())]


def losses_text(run: Run) -> str:
    """Return a text with the last training and validation losses and the best one, as far as they are known."""
    loss = run.state.loss
    text = "none" if loss is None else f"{loss:.4f}"
    val_loss = run.last_scores.get("val_loss")
    if val_loss is not None:
        text += f", validation {val_loss:.4f}"
        bits = run.last_scores.get("val_bpb")
        if bits is not None:
            text += f" ({bits:.4f} bits per byte)"
    best = run.writer.best if run.writer else None
    if best:
        text += f", best {best.val_loss:.4f} at step {best.step:,}"
    return text


def validation_text(sets: Mapping[str, Mapping[str, float]], best: bool, epochs: Mapping[str, float]) -> str:
    """Return the result of a validation as text.

    Args:
        sets: name -> val_loss, and val_bpb if it is known.
        best: whether the first set's loss is the best so far.
        epochs: by source, of a mixture.
    """
    texts: list[str] = []
    for name, scores in sets.items():
        text = f"val loss {scores['val_loss']:.4f}"
        if len(sets) > 1:
            text = f"{name}: {text}"
        if best and not texts:
            text += " (best so far)"
        if "val_bpb" in scores:
            text += f", {scores['val_bpb']:.4f} bits per byte"
        texts.append(text)
    parts = some(texts, "validation set")
    if epochs:
        seen = some([f"{name} {number:.2f}" for name, number in epochs.items()], "source")
        parts.append(f"epochs: {', '.join(seen)}")
    return " | ".join(parts)
