"""The data of a run: its shards, its validation sets, and the one tokenizer that all of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from dataloader import RowStream
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.data.shards import MANIFEST, Recorded, ShardSet, parse_folders, read_manifest, shard_files
from steadygpt.data.tokenizer import TOKENIZER_JSON, TokenizerRecord, record_named, vocab_size_of


class DataSet(NamedTuple):
    """Shards that a run trains on or validates with."""

    shards: ShardSet
    rows: RowStream
    weight: Fraction = Fraction(1)


@dataclass(frozen=True)
class Data:
    """What a run trains on and validates with, and the tokenizer and vocabulary that all of it shares."""

    sources: tuple[DataSet, ...]  # empty in a plan for data that is not prepared yet
    val_sets: tuple[DataSet, ...]  # the loss of the first one decides which model is best
    tokenizer_record: TokenizerRecord
    vocab_size: int

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_record.tokenizer

    @property
    def folder(self) -> str:
        """The folder to look in for a tokenizer.json."""
        return self.sources[0].shards.folder

    @property
    def sets(self) -> list[ShardSet]:
        return [source.shards for source in (*self.sources, *self.val_sets)]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the only source; 0 for a mixture, because each of its sources has epochs of its own."""
        if len(self.sources) != 1:
            return 0
        return self.sources[0].rows.rows_per_epoch


def find_data(
    config: TrainConfig,
    saved: TokenizerRecord | None = None,
    first_set: Recorded | None = None,
    fingerprint: Mapping[str, Sequence[list]] = {},
    initial: tuple[TokenizerRecord, int] | None = None,
) -> Data:
    """Find the shards of a run and map them into memory. A plan of a new run does without shards.

    Args:
        saved: the tokenizer of the checkpoint that the run resumes from.
        first_set: the first validation set of that run, if it has one.
        fingerprint: of the shards of that run, see ShardSet.check.
        initial: the tokenizer and the vocabulary size of --init_from, for shards without a manifest.
    """
    places = config.sources()  # name -> (folder, weight)
    for folder, _ in places.values():
        if f"{folder}:train" in fingerprint and not Path(folder).is_dir():
            option = "--mix" if config.mix else "--data_dir"
            raise UserError(
                f"{folder}: no such folder, but the checkpoint was trained on its shards; put them back, or give their "
                f"new place with {option}"
            )
    is_new_plan = config.dry_run and not config.resume
    if is_new_plan:
        folders = [Path(folder) for folder, _ in places.values()]
        if not any(read_manifest(folder) or shard_files(folder, "train") for folder in folders):
            name = config.tokenizer
            if name == "auto":
                name = "gpt2"
            record = TokenizerRecord(name) if name.startswith("bpe:") else record_named(name)
            return Data((), (), record, vocab_size_of(record))
    train_sets = [ShardSet.find(name, folder, "train") for name, (folder, _) in places.items()]
    val_sets = []
    if config.eval_freq:
        val_sets = find_val_sets(config, train_sets, first_set, fingerprint)
    record, vocab_size = tokenizer_of([*train_sets, *val_sets], config.tokenizer, saved, initial)
    train_sets = [shards.for_vocab(vocab_size) for shards in train_sets]
    val_sets = [shards.for_vocab(vocab_size) for shards in val_sets]
    sources = []
    for shards in train_sets:
        _, weight = places[shards.name]
        sources.append(DataSet(shards, RowStream(shards.shards, config.context_length, config), weight))
    validated = [DataSet(shards, RowStream(shards.shards, config.context_length)) for shards in val_sets]
    return Data(tuple(sources), tuple(validated), record, vocab_size)


def find_val_sets(
    config: TrainConfig,
    sources: Sequence[ShardSet],
    first: Recorded | None,
    fingerprint: Mapping[str, Sequence[list]],
) -> list[ShardSet]:
    """Find the validation sets that --val names, or else the val shards of the sources.

    Args:
        first: the first validation set of the run; it comes first again, because its loss decides which model is best.
    """
    places = {name: folder for name, (folder, _) in parse_folders("val", config.val).items()}
    if not places:
        with_val = sources
        if len(sources) > 1:
            with_val = [source for source in sources if shard_files(Path(source.folder), "val")] or sources
        places = {source.name: source.folder for source in with_val}
    val_sets = [ShardSet.find(name, folder, "val") for name, folder in places.items()]
    if first is None:
        return val_sets
    matches = [shards for shards in val_sets if shards.identity(fingerprint, reads=True) == first.identity]
    if matches:
        first_set = matches[0]
    else:
        first_set = ShardSet.find(first.name, first.folder, "val")
        identity = first_set.identity(fingerprint, reads=True)
        if identity != first.identity:
            raise UserError(
                f"{first.folder}: not the val shards of the first launch, by which best_model.pt is chosen; found "
                f"SHA-256 {identity[:12]}..., expected {first.identity[:12]}...; copy them back, or train "
                "without validation: --eval_freq 0"
            )
    rest = [shards for shards in val_sets if shards.key != first_set.key]
    if any(shards.name == first.name for shards in rest):
        raise UserError(
            f"--val: the name {first.name} belongs to the first validation set, of {first.folder}; give the other one "
            "another name: NAME=FOLDER"
        )
    return [replace(first_set, name=first.name), *rest]


def tokenizer_of(
    sets: Sequence[ShardSet],
    name: str,
    saved: TokenizerRecord | None,
    initial: tuple[TokenizerRecord, int] | None = None,
) -> tuple[TokenizerRecord, int]:
    """Return the tokenizer that all sets share, and the size of its vocabulary.

    Args:
        name: --tokenizer, for shards of other tools.
        saved: the tokenizer of the checkpoint that the run resumes from.
        initial: see find_data.
    """
    record: TokenizerRecord | None = None
    sizes = []
    for shards in sets:
        if shards.manifest is None:
            continue
        folder = Path(shards.folder)
        own_record = TokenizerRecord.of(shards.manifest, folder / MANIFEST).with_json(folder)
        own_name = own_record.tokenizer
        if not saved and name not in ("auto", own_name):
            raise UserError(f"--tokenizer is {name!r}; {folder} was prepared with {own_name!r}; drop the flag")
        if record and not (record.fits(own_record) and own_record.fits(record)):
            raise UserError(
                f"{folder}: prepared with the tokenizer {own_record}, but {sets[0].folder} with {record}; expected the "
                "same one. Prepare one of them again"
            )
        # Other tokenizers are not checked, because loading them may require a network.
        if own_name in ("gpt2", "bytes") and shards.manifest["vocab_size"] < vocab_size_of(own_record):
            raise UserError(
                f"{folder / MANIFEST}: vocab_size is {shards.manifest['vocab_size']:,}, but the tokenizer "
                f"{own_name!r} has {vocab_size_of(own_record):,}; prepare the data again"
            )
        record = record or own_record
        sizes.append(shards.manifest["vocab_size"])
    if record is None:
        folder = Path(sets[0].folder)
        tokenizer_json = folder / TOKENIZER_JSON
        characters = folder / "meta.pkl"
        if not saved and name == "auto" and characters.exists() and not tokenizer_json.exists():
            raise UserError(
                f"{characters}: the ids are of nanoGPT's own vocabulary of characters, expected a known tokenizer; "
                "prepare the text again: python prepare_dataset.py --source input.txt --tokenizer bytes"
            )
        if initial and not saved and name == "auto" and not tokenizer_json.exists():
            record, size = initial
            if not record.tokenizer:
                record = TokenizerRecord(f"ids:{size}")
            return record, size
        if saved:
            record = saved
        elif name != "auto":
            record = record_named(name)
        elif tokenizer_json.exists():
            record = record_named(str(tokenizer_json))
        else:
            record = record_named("gpt2")
    return record, max(sizes, default=0) or vocab_size_of(record)
