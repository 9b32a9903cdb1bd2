"""The record of launches (files.Launch) in every checkpoint: what each launch of a run trained on, and how."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steadygpt import git_commit
from steadygpt.base.options import UserError, options_of
from steadygpt.checkpoint.files import Launch
from steadygpt.config import TrainConfig
from steadygpt.data.order import BLOCK_ROWS, Phase, shares_of
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks
from steadygpt.run.data import Data, DataSet
from steadygpt.run.history import History


def phase_of(launches: Sequence[Launch]) -> Phase:
    """Return the last phase of a record: a launch with another mixture than the one before begins a phase."""
    phase = None
    for entry in launches:
        if phase is None or entry["shares"] != phase.shares:
            phase = Phase(phase.number + 1 if phase else 0, entry["row"], entry["shares"], entry["given"])
    assert phase, "a record has an entry"
    return phase


def new_launch(history: History, data: Data, known: Mapping[str, list], ranks: Ranks) -> Launch:
    """Describe the launch that begins now, but for its options, which are not settled yet.

    Args:
        known: the fingerprint as far as it is known. A run that resumes reads shards that are neither in it nor in a
            manifest. Otherwise they are assumed to be those of the launch before, or their folder stands for them.
    """
    before, row, seed = history.launches, history.rows_consumed, history.config.seed
    assumed, reads = before[-1]["sources"] if before else {}, bool(before) and history.config.trains
    if len(assumed) == len(data.sources) == 1:
        assumed = {data.sources[0].shards.name: next(iter(assumed.values()))}

    def identified(of: Sequence[DataSet]) -> dict[str, tuple[str, str]]:
        found = {}
        for shards, *_ in of:
            identity = shards.identity(known, reads) or assumed.get(shards.name, ("", shards.folder))[1]
            found[shards.name] = shards.folder, identity
        return found

    sources = identified(data.sources)
    shares = shares_of(sources, {source.shards.name: source.weight for source in data.sources})
    given = phase_of(before).rows_used_at(row, seed) if before else {}
    entry: Launch = {
        "id": secrets.token_hex(8),
        "step": history.step,
        "row": row,
        "options": {},
        "decisions": {},
        "sources": sources,
        "val_sets": identified(data.val_sets),
        "shares": shares,
        "given": dict.fromkeys(shares, 0) | given,
        "ranks": ranks.world_size,
        "threads": torch.get_num_threads(),
        "device": device_name(ranks.device),
        "torch": str(torch.__version__),
        "commit": git_commit(),
    }
    if before and shares != before[-1]["shares"] and not history.config.allow_changes:
        raise UserError(
            f"the training data is {mixture_text(entry)}, but the checkpoint was trained on "
            f"{mixture_text(before[-1])}; name the same data, or add --allow_changes to switch to this"
        )
    return entry


def note_of_launch(config: TrainConfig, launches: Sequence[Launch]) -> dict[str, Any]:
    """Return "id", "parent" and "how" of the last launch, as its line in metrics.jsonl has them (LaunchLine)."""
    entry, commit = launches[-1], launches[-1]["commit"]
    groups, excepted = ("model", "optimization", "distributed"), ("max_hours", "timeout_minutes", "micro_steps")
    names = [n for n, f in options_of(config).items() if f.metadata["group"] in groups and n not in excepted]
    names += ["seed", "precision", "compile", "deterministic", "shuffle_shards", "shuffle_rows"]
    how = {
        "ranks": "any" if config.deterministic else entry["ranks"],
        **{name: entry[name] for name in ("device", "torch")},  # the device of a CPU names its threads
        "commit": f"{commit[:12]}{commit[40:]}",
        "data": ", ".join(f"{identity[:12]} {rows}" for identity, rows in sorted(entry["shares"].items())),
        **{name: getattr(config, name) for name in names},
    }
    return {"id": entry["id"], "parent": launches[-2]["id"] if launches[1:] else "", "how": how}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs between two launches, of all that determines a step, such as "ranks 2 -> 1", or ""."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def mixture_text(entry: Launch) -> str:
    """Return the sources of a launch with their shares."""
    return ", ".join(
        f"{name} {entry['shares'][identity] / BLOCK_ROWS:.1%} ({folder}, SHA-256 {identity[:12]}...)"
        for name, (folder, identity) in entry["sources"].items()
    )


def epochs_of_sources(data: Data, launches: Sequence[Launch], row: int) -> dict[str, float]:
    """Return by name how many epochs of each source of a mixture a run has seen once it has consumed `row` rows."""
    if len(data.sources) == 1:
        return {}
    places, given = launches[-1]["sources"], phase_of(launches).rows_used_at(row, launches[-1]["options"]["seed"])
    return {shards.name: given[places[shards.name][1]] / rows.rows_per_epoch for shards, rows, _ in data.sources}
