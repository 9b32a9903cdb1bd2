"""The summary of a run at its end: time, tokens, speed, losses, memory, saves."""

import shlex
from collections.abc import Mapping

from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.saves import Saves
from steadygpt.machine.device import peak_memory_bytes
from steadygpt.machine.host import process_age_s
from steadygpt.run.results import Results


def summarize(results: Results, saves: Saves, parameters: int, status: str, reason: str) -> list[str]:
    """Return how a run of a model of so many parameters has ended, and on rank 0 its summary."""
    if (writer := saves.writer) is None:
        return [""]
    config, state, device = results.config, results.state, results.ranks.device
    tokens, start_s, elapsed_s = state.rows_consumed * config.context_length, process_age_s(), state.total_s()
    here = " since this start" * bool(state.elapsed_s)
    whole = f"{duration_text(elapsed_s)} in total; since this start " * bool(here)
    of_steps = f"{duration_text(results.seconds)} of it training ({counted(results.steps, 'step')})"
    lines = {"time": f"{whole}{duration_text(start_s)}, {of_steps}"}
    lines["tokens"] = f"{tokens:,}, {tokens / parameters:,.2f} per parameter"
    if results.steps > 1:
        seconds = results.seconds - results.first_s
        speed = (results.rows - results.first_rows) * config.context_length / seconds
        mfu = results.mfu(speed)
        lines["speed"] = f"{speed:,.0f} tokens/s{here}, {(results.steps - 1) / seconds:.3g} steps/s, "
        lines["speed"] += config.precision if mfu is None else f"{config.precision}, mfu {mfu:.1%}"
    lines["loss"] = "none" if state.loss is None else f"{state.loss:.4f}"
    if state.val_loss is not None:
        scores = next((of for of in writer.evaluations.values() if of.get("val_loss") == state.val_loss), {})
        bits = "" if (bpb := scores.get("val_bpb")) is None else f" ({bpb:.4f} bits per byte)"
        lines["loss"] += f", validation {state.val_loss:.4f}{bits}"
        of_sets = [(name, loss) for name, loss in scores.items() if name.startswith("val_loss/") and loss is not None]
        lines["validation"] = ", ".join(f"{name.removeprefix('val_loss/')} {loss:.4f}" for name, loss in of_sets)
    if core := [scores["core"] for scores in writer.evaluations.values() if "core" in scores]:
        lines["CORE"] = f"{core[-1]:.4f}"
    if (best := state.best_val_loss) is not None:
        steps = [f" at step {at:,}" for at, scores in writer.evaluations.items() if scores.get("val_loss") == best]
        lines["loss"] += f", best {best:.4f}{''.join(steps[:1])}"
    of_all = "" if device.type == "cuda" else ", including Python and PyTorch"
    lines["memory"] = f"peak {bytes_text(peak_memory_bytes(device))} on rank 0{here}{of_all}"
    if (cost := results.cost(elapsed_s)) is not None:
        lines["cost"] = f"{cost:,.2f}"
    lines["saves"] = f"paused training for {saves.paused_s:.1f} s{here}, {saves.paused_s / start_s:.2%} of the time"
    if results.skipped:
        lines["skipped"] = f"{counted(results.skipped, 'update')}{here}; a warning in log.txt tells why"
    where = f" --checkpoint_dir {shlex.quote(config.checkpoint_dir)}" * (config.checkpoint_dir != "checkpoints")
    which = "latest" if state.best_val_loss is None else "best"
    generate = f"python generate.py {which}{where}, or python convert_hf.py {which} hf_model{where}"
    lines["next"] = {"finished": generate, "stopped": f"./resume_training.sh{where}"}.get(status, "")
    why = f" ({reason})" * bool(reason)
    end = f"{status}{why} after {counted(state.step, 'step')}; checkpoints in {config.checkpoint_dir}"
    return [end, *(labelled(name, text) for name, text in lines.items() if text)]


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
    seen = ", ".join(some([f"{name} {number:.2f}" for name, number in epochs.items()], "source"))
    return " | ".join([*some(parts, "validation set"), *[f"epochs: {seen}"] * bool(seen)])
