"""The summary of a run at its end: time, tokens, speed, losses, memory, saves."""

import shlex
from collections.abc import Mapping

from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.evaluations import Evaluations, Scores, every_score
from steadygpt.checkpoint.files import BEST, TrainState
from steadygpt.checkpoint.saves import Saves
from steadygpt.machine.device import peak_memory_bytes
from steadygpt.machine.host import process_age_s
from steadygpt.run.results import Results


def summarize(results: Results, saves: Saves, parameters: int, status: str, reason: str) -> list[str]:
    """Return lines that say how a run has ended, followed by its summary; other ranks than 0 return an empty line.

    Args:
        parameters: the number of the model's parameters.
    """
    if saves.writer is None:
        return [""]
    config = results.config
    state = results.state
    evaluations = saves.writer.evaluations
    age_s = process_age_s()
    elapsed_s = state.total_s()
    since = " since this launch" if state.elapsed_s else ""
    lines = {}

    time = f"{duration_text(age_s)}, {duration_text(results.seconds)} of it training"
    time += f" ({counted(results.steps, 'step')})"
    if state.elapsed_s:
        time = f"{duration_text(elapsed_s)} in total; since this launch {time}"
    lines["time"] = time

    tokens = state.rows_consumed * config.context_length
    lines["tokens"] = f"{tokens:,}, {tokens / parameters:,.2f} per parameter"

    if results.steps > 1:
        seconds = results.seconds - results.first_s
        tokens_per_second = (results.rows - results.first_rows) * config.context_length / seconds
        steps_per_second = (results.steps - 1) / seconds
        lines["speed"] = f"{tokens_per_second:,.0f} tokens/s{since}, {steps_per_second:.3g} steps/s, {config.precision}"
        mfu = results.mfu(tokens_per_second)
        if mfu is not None:
            lines["speed"] += f", mfu {mfu:.1%}"

    lines["loss"] = losses_text(state, evaluations)
    set_losses = []
    for name, loss in scores_of(evaluations, state.val_loss).items():
        if name.startswith("val_loss/") and loss is not None:
            set_losses.append(f"{name.removeprefix('val_loss/')} {loss:.4f}")
    if set_losses:
        lines["validation"] = ", ".join(set_losses)

    lines["memory"] = f"peak {bytes_text(peak_memory_bytes(results.ranks.device))} on rank 0{since}"
    if results.ranks.device.type != "cuda":
        lines["memory"] += ", including Python and PyTorch"
    cost = results.cost(elapsed_s)
    if cost is not None:
        lines["cost"] = f"{cost:,.2f}"
    lines["saves"] = f"paused training for {saves.paused_s:.1f} s{since}, {saves.paused_s / age_s:.2%} of the time"
    if results.skipped:
        lines["skipped"] = f"{counted(results.skipped, 'update')}{since}; a warning in log.txt tells why"

    folder = ""
    if config.checkpoint_dir != "checkpoints":
        folder = f" --checkpoint_dir {shlex.quote(config.checkpoint_dir)}"
    which = "best" if (saves.writer.folder / BEST).exists() else "latest"  # the best one may be in the mirror only
    if status == "finished":
        lines["next"] = f"python generate.py {which}{folder}, or python convert_hf.py {which} hf_model{folder}"
    elif status == "stopped":
        lines["next"] = f"./resume_training.sh{folder}"

    end = f"{status} ({reason})" if reason else status
    end += f" after {counted(state.step, 'step')}; checkpoints in {config.checkpoint_dir}"
    return [end, *(labelled(name, text) for name, text in lines.items())]


def scores_of(evaluations: Evaluations, val_loss: float | None) -> Scores:
    """Return the scores of the first evaluation with this validation loss; {} if there is none."""
    if val_loss is None:
        return {}
    for _, scores in every_score(evaluations):
        if scores.get("val_loss") == val_loss:
            return scores
    return {}


def losses_text(state: TrainState, evaluations: Evaluations) -> str:
    """Return in words the last losses of training and validation, and the best one, as far as they are known."""
    text = "none" if state.loss is None else f"{state.loss:.4f}"
    if state.val_loss is not None:
        text += f", validation {state.val_loss:.4f}"
        bits = scores_of(evaluations, state.val_loss).get("val_bpb")
        if bits is not None:
            text += f" ({bits:.4f} bits per byte)"
    if state.best_val_loss is not None:
        text += f", best {state.best_val_loss:.4f}"
        for step, scores in every_score(evaluations):
            if scores.get("val_loss") == state.best_val_loss:
                text += f" at step {step:,}"
                break
    return text


def validation_text(sets: Mapping[str, Mapping[str, float]], best: bool, epochs: Mapping[str, float]) -> str:
    """Return the result of a validation in words.

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
