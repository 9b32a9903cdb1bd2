"""The record of launches (files.Launch) in every checkpoint: what each launch of a run trained on, and how."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steadygpt import git_commit
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import Launch
from steadygpt.config import FIELDS, STORED, TrainConfig
from steadygpt.data.order import BLOCK_ROWS, Phase, shares_of
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks
from steadygpt.run.data import Data, DataSet
from steadygpt.run.history import History

# Options of these groups determine a step, except for the time limit and for what stands in the record in another form.
STEP_GROUPS = ("run", "model", "data", "optimization", "distributed")
NOT_OF_A_STEP = ("max_hours", "micro_steps", "device", "data_dir", "mix", "val", "tokenizer")


def phase_of(launches: Sequence[Launch]) -> Phase:
    """Return the current phase of a run. A launch begins a new phase if its mixture differs from the one before."""
    phase = None
    for entry in launches:
        if phase is None or entry["shares"] != phase.shares:
            number = phase.number + 1 if phase else 0
            phase = Phase(number, entry["row"], entry["shares"], entry["given"])
    assert phase, "a run has a launch"
    return phase


def new_launch(history: History, data: Data, fingerprint: Mapping[str, list], ranks: Ranks) -> Launch:
    """Return the record of the launch that begins now, without its options, which are not settled yet.

    Args:
        fingerprint: of the shards that are checked so far. The content of other shards without a manifest is read in a
            run that resumes and trains. Otherwise they are assumed to be those of the launch before, by their name; a
            new set is identified by its folder.
    """
    before = history.launches
    row = history.rows_consumed
    reads = bool(before) and history.config.trains
    assumed = before[-1]["sources"] if before else {}
    if len(assumed) == len(data.sources) == 1:  # the only source may have another name now
        assumed = {data.sources[0].shards.name: next(iter(assumed.values()))}

    def identify(data_sets: Sequence[DataSet]) -> dict[str, tuple[str, str]]:
        """Return name -> (folder, identity)."""
        identified = {}
        for shards, _, _ in data_sets:
            identity = shards.identity(fingerprint, reads)
            if not identity:
                _, identity = assumed.get(shards.name, ("", shards.folder))
            identified[shards.name] = (shards.folder, identity)
        return identified

    sources = identify(data.sources)
    shares = shares_of(sources, {source.shards.name: source.weight for source in data.sources})
    rows_before = phase_of(before).rows_used_at(row, history.config.seed) if before else {}
    entry: Launch = {
        "id": secrets.token_hex(8),
        "step": history.step,
        "row": row,
        "options": {},
        "decisions": {},
        "sources": sources,
        "val_sets": identify(data.val_sets),
        "shares": shares,
        "given": dict.fromkeys(shares, 0) | rows_before,
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
    entry = launches[-1]
    parent = launches[-2]["id"] if len(launches) > 1 else ""
    settings: dict[str, Any] = {  # all that determines a step
        "ranks": entry["ranks"],
        "device": entry["device"],  # with the number of threads of a CPU
        "torch": entry["torch"],
        "commit": f"{entry['commit'][:12]}{entry['commit'][40:]}",  # after the 40 digits, whether files are changed
        "data": ", ".join(f"{identity[:12]} {rows}" for identity, rows in sorted(entry["shares"].items())),
    }
    for name in STORED:
        if FIELDS[name].metadata["group"] in STEP_GROUPS and name not in NOT_OF_A_STEP:
            settings[name] = getattr(config, name)
    return {"id": entry["id"], "parent": parent, "how": settings}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which settings differ between two launches, such as "ranks 2 -> 1"; "" if none does."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def mixture_text(entry: Launch) -> str:
    """Return the sources of a launch with their shares, in words."""
    texts = []
    for name, (folder, identity) in entry["sources"].items():
        share = entry["shares"][identity] / BLOCK_ROWS
        texts.append(f"{name} {share:.1%} ({folder}, SHA-256 {identity[:12]}...)")
    return ", ".join(texts)


def epochs_of_sources(data: Data, launches: Sequence[Launch], row: int) -> dict[str, float]:
    """Return the epochs of each source of a mixture once the run has consumed `row` rows, by name; {} if no mixture."""
    if len(data.sources) == 1:
        return {}
    entry = launches[-1]
    consumed = phase_of(launches).rows_used_at(row, entry["options"]["seed"])  # identity -> rows
    epochs = {}
    for shards, rows, _ in data.sources:
        _, identity = entry["sources"][shards.name]
        epochs[shards.name] = consumed[identity] / rows.rows_per_epoch
    return epochs
