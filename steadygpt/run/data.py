"""The data of a run: its shards and validation sets, found and checked, and the tokenizer of them all."""

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
    """What a run trains on and validates with, and the tokenizer and vocabulary of it all."""

    sources: tuple[DataSet, ...]  # none in a plan of data that is not prepared yet
    val_sets: tuple[DataSet, ...]  # the first one tells which model is best
    tokenizer_record: TokenizerRecord
    vocab_size: int

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_record.tokenizer

    @property
    def folder(self) -> str:
        """The folder that may have the tokenizer.json."""
        return self.sources[0].shards.folder

    @property
    def sets(self) -> list[ShardSet]:
        return [source.shards for source in (*self.sources, *self.val_sets)]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the only source; 0 of a mixture, whose sources have epochs of their own."""
        return self.sources[0].rows.rows_per_epoch if len(self.sources) == 1 else 0


def find_data(
    config: TrainConfig,
    saved: TokenizerRecord | None = None,
    first_set: Recorded | None = None,
    known: Mapping[str, Sequence[list]] = {},
    of_weights: tuple[TokenizerRecord, int] | None = None,
) -> Data:
    """Find the shards of a run and map them into memory. A plan of a known number of steps does without them.

    Args:
        saved: the tokenizer of the checkpoint that the run resumes from.
        first_set: the first validation set of that run, if it has one.
        known: the fingerprint of that run.
        of_weights: the tokenizer and the vocabulary of --init_from, which shards without a manifest are taken to have.
    """
    places, T = config.sources(), config.context_length
    for folder, _ in places.values():
        if f"{folder}:train" in known and not Path(folder).is_dir():
            option = "--mix" if config.mix else "--data_dir"
            raise UserError(
                f"{folder}: no such folder, but the checkpoint was trained on its shards; put them back, or give their "
                f"new place with {option}"
            )
    folders = [Path(folder) for folder, _ in places.values()]
    is_new_plan = config.dry_run == "plan" and not config.resume
    if is_new_plan and not any(read_manifest(f) or shard_files(f, "train") for f in folders):
        name = config.tokenizer
        record = TokenizerRecord(name) if name.startswith("bpe:") else record_named("gpt2" if name == "auto" else name)
        return Data((), (), record, vocab_size_of(record))
    try:
        found = [ShardSet.find(name, folder, "train") for name, (folder, _) in places.items()]
    except UserError as error:
        if config.dry_run == "measure" and not config.resume:
            raise UserError(f"{error}. --dry_run without measure plans without data") from error
        raise
    val_sets = find_val_sets(config, found, first_set, known) if config.eval_freq else []
    record, vocab_size = tokenizer_of([*found, *val_sets], config.tokenizer, saved, of_weights)
    found = [s.for_vocab(vocab_size) for s in found]
    val_sets = [s.for_vocab(vocab_size) for s in val_sets]
    sources = tuple(DataSet(s, RowStream(s.shards, T, config), places[s.name][1]) for s in found)
    return Data(sources, tuple(DataSet(s, RowStream(s.shards, T)) for s in val_sets), record, vocab_size)


def recorded_sources(
    config: TrainConfig, recorded: Mapping[str, tuple[str, str]], step: int, known: Mapping[str, Sequence[list]]
) -> tuple[DataSet, ...]:
    """Find the shards that a step trained on, and check that they are the same.

    Args:
        recorded: name -> (folder, identity) of the launch of that step.
        known: the fingerprint of the run.
    """
    sources, any_id = [], 2**32  # the ids were checked before training
    for name, (folder, identity) in recorded.items():
        if not Path(folder).is_dir():
            raise UserError(
                f"{folder}: no such folder here, but step {step:,} trained on its shards; start in the folder where "
                "training did, or put a link to their new place there"
            )
        shards = ShardSet.find(name, folder, "train").for_vocab(config.vocab_size)
        if (found := shards.identity({shards.key: shards.check(any_id, known)}, reads=False)) != identity:
            raise UserError(
                f"{folder}: not the shards that step {step:,} trained on; found SHA-256 {found[:12]}..., expected "
                f"{identity[:12]}...; copy those back"
            )
        sources.append(DataSet(shards, RowStream(shards.shards, config.context_length, config)))
    return tuple(sources)


def find_val_sets(
    config: TrainConfig, sources: Sequence[ShardSet], first: Recorded | None, known: Mapping[str, Sequence[list]]
) -> list[ShardSet]:
    """Find the validation sets that --val names, or else the val shards of the sources; put the first one first."""
    places = {name: folder for name, (folder, _) in parse_folders("val", config.val).items()}
    if not places:
        with_val = [s for s in sources if len(sources) == 1 or shard_files(Path(s.folder), "val")] or sources
        places = {s.name: s.folder for s in with_val}
    sets = [ShardSet.find(name, folder, "val") for name, folder in places.items()]
    if first is None:
        return sets
    same = [s for s in sets if s.identity(known, reads=True) == first.identity]
    if not same:
        same = [ShardSet.find(first.name, first.folder, "val")]
        if (identity := same[0].identity(known, reads=True)) != first.identity:
            raise UserError(
                f"{first.folder}: not the val shards of the first launch, by which best_model.pt is chosen; found "
                f"SHA-256 {identity[:12]}..., expected {first.identity[:12]}...; copy them back, or train "
                "without validation: --eval_freq 0"
            )
    rest = [s for s in sets if s.key != same[0].key]
    if any(s.name == first.name for s in rest):
        raise UserError(
            f"--val: the name {first.name} belongs to the first validation set, of {first.folder}; give the other one "
            "another name: NAME=FOLDER"
        )
    return [replace(same[0], name=first.name), *rest]


def tokenizer_of(
    sets: Sequence[ShardSet],
    name: str,
    saved: TokenizerRecord | None,
    of_weights: tuple[TokenizerRecord, int] | None = None,
) -> tuple[TokenizerRecord, int]:
    """Return the tokenizer of shards, and the size of their vocabulary.

    Args:
        name: --tokenizer, for shards of other tools.
        saved: of the checkpoint that the run resumes from.
        of_weights: see find_data.
    """
    record, sizes = None, []
    for shards in sets:
        if shards.manifest is None:
            continue
        folder = Path(shards.folder)
        found = TokenizerRecord.of(shards.manifest, folder / MANIFEST).with_json(folder)
        if not saved and name not in ("auto", found.tokenizer):
            raise UserError(f"--tokenizer is {name!r}; {folder} was prepared with {found.tokenizer!r}; drop the flag")
        if record and not (record.fits(found) and found.fits(record)):
            raise UserError(
                f"{folder}: prepared with the tokenizer {found}, but {sets[0].folder} with {record}; expected the same "
                "one. Prepare one of them again"
            )
        # Other tokenizers are not checked, because loading them may require a network.
        if found.tokenizer in ("gpt2", "bytes") and shards.manifest["vocab_size"] < vocab_size_of(found):
            raise UserError(
                f"{folder / MANIFEST}: vocab_size is {shards.manifest['vocab_size']:,}, but the tokenizer "
                f"{found.tokenizer!r} has {vocab_size_of(found):,}; prepare the data again"
            )
        record = record or found
        sizes.append(shards.manifest["vocab_size"])
    if record is None:
        beside, characters = (Path(sets[0].folder, file) for file in (TOKENIZER_JSON, "meta.pkl"))
        if not saved and name == "auto" and characters.exists() and not beside.exists():
            raise UserError(
                f"{characters}: the ids are of nanoGPT's own vocabulary of characters, expected a known tokenizer; "
                "prepare the text again: python prepare_dataset.py --source input.txt --tokenizer bytes"
            )
        if of_weights and not saved and name == "auto" and not beside.exists():
            record, size = of_weights
            return (record if record.tokenizer else TokenizerRecord(f"ids:{size}")), size
        record = saved or record_named(name if name != "auto" else str(beside) if beside.exists() else "gpt2")
    return record, max(sizes, default=0) or vocab_size_of(record)
