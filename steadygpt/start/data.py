"""The data of a run: its shards, its validation sets, and the one tokenizer that all of them share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dataloader import RowStream
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.data.order import BLOCK_ROWS, Phase, shares_of
from steadygpt.data.shards import MANIFEST, ShardSet, parse_folders, read_manifest, shard_files
from steadygpt.data.tokenizer import TOKENIZER_JSON, TokenizerRecord, record_named
from steadygpt.machine.ranks import Ranks
from steadygpt.start.find import Start


class DataSet(NamedTuple):
    """Shards that a run trains on or validates with."""

    shards: ShardSet
    rows: RowStream
    digest: str


@dataclass(frozen=True)
class Data:
    """The training and validation sets of a run, and the tokenizer and vocabulary that they share."""

    sources: tuple[DataSet, ...]  # empty in a plan for data that is not prepared yet
    val_sets: tuple[DataSet, ...]  # the loss of the first one decides which model is best
    phase: Phase  # the mixture from here on
    tokenizer_record: TokenizerRecord
    vocab_size: int

    @property
    def folder(self) -> str:
        """The folder to look in for a tokenizer.json."""
        return self.sources[0].shards.folder

    @property
    def sets(self) -> list[ShardSet]:
        return [source.shards for source in (*self.sources, *self.val_sets)]


def open_data(start: Start, asked: TrainConfig, ranks: Ranks) -> Data:
    """Find the shards of a run and map them into memory on each rank; check that all ranks have the same shards."""
    with ranks.sharing_errors():
        data = find_data(start, asked)
    digests = {(shards.folder, shards.split): digest for shards, _, digest in (*data.sources, *data.val_sets)}
    digests_of_main = ranks.broadcast(digests)
    with ranks.sharing_errors():
        check_digests(digests, digests_of_main)
    return data


def check_digests(digests: Mapping[tuple[str, str], str], of_main: Mapping[tuple[str, str], str]) -> None:
    """Check that the shards of this rank are the same as rank 0's, by folder and split."""
    for folder, split in sorted(digests.keys() | of_main.keys()):
        found = digests.get((folder, split), "none")
        expected = of_main.get((folder, split), "none")
        if found != expected:
            raise UserError(
                f"{folder}: its {split} shards differ from rank 0's; found SHA-256 {found:.12}..., expected "
                f"{expected:.12}... Every node needs the same shards: copy rank 0's folder"
            )


def find_data(start: Start, config: TrainConfig) -> Data:
    """Find the shards of a run and map them into memory. A plan of a new run needs no shards."""
    known = None
    content = start.checkpoint or start.weights
    if content:
        known = Known(TokenizerRecord.of(content), content["model_config"]["vocab_size"], bool(start.checkpoint))
    places = config.sources()  # name -> (folder, weight)
    recorded = start.data["sources"] if start.data else {}
    for folder, _ in places.values():
        if not Path(folder).is_dir() and folder in [known for known, _ in recorded.values()]:
            option = "--mix" if config.mix else "--data_dir"
            raise UserError(
                f"{folder}: no such folder, but the checkpoint was trained on its shards; put them back, or give their "
                f"new place with {option}"
            )
    if config.dry_run and not config.resume:
        folders = [Path(folder) for folder, _ in places.values()]
        if not any(read_manifest(folder) or shard_files(folder, "train") for folder in folders):
            name = config.tokenizer
            if name == "auto":
                name = "gpt2"
            record = TokenizerRecord(name) if name.startswith("bpe:") else record_named(name)
            return Data((), (), Phase(0, 0, {}, {}), record, record.vocab_size)
    train_sets = [ShardSet.find(name, folder, "train") for name, (folder, _) in places.items()]
    val_sets = find_val_sets(config, train_sets) if config.eval_freq else []
    record, vocab_size = tokenizer_of([*train_sets, *val_sets], config.tokenizer, known)
    order = config.order
    sources = []
    for shards in train_sets:
        shards = shards.for_vocab(vocab_size)
        rows = RowStream(shards.shards, config.context_length, order)
        sources.append(DataSet(shards, rows, shards.digest()))
    validated = []
    for shards in val_sets:
        shards = shards.for_vocab(vocab_size)
        validated.append(DataSet(shards, RowStream(shards.shards, config.context_length), shards.digest()))
    named = by_name(sources)
    shares = shares_of(named, {name: weight for name, (_, weight) in places.items()})
    phase = next_phase(start, config, named, shares)
    data = Data(tuple(sources), tuple(validated), phase, record, vocab_size)
    return replace(data, tokenizer_record=completed(record, known, data.folder) if known else record)


def by_name(sources: Iterable[DataSet]) -> dict[str, tuple[str, str]]:
    """Return name -> (folder, digest) of sources, as DataRecord has them."""
    return {source.shards.name: (source.shards.folder, source.digest) for source in sources}


def next_phase(
    start: Start, config: TrainConfig, named: Mapping[str, tuple[str, str]], shares: dict[str, int]
) -> Phase:
    """Return the phase of a run from here on: its checkpoint's, or a new one if the mixture has changed.

    Args:
        named: name of a source -> folder, digest.
        shares: digest -> rows of BLOCK_ROWS.
    """
    if not start.data:
        return Phase(0, 0, shares, dict.fromkeys(shares, 0))
    before: Phase = start.data["phase"]
    if shares == before.shares:
        return before
    if not config.allow_changes:
        raise UserError(
            f"the training data is {mixture_text(named, shares)}, but the checkpoint was trained on "
            f"{mixture_text(start.data['sources'], before.shares)}; name the same data, or add --allow_changes to "
            "switch to this"
        )
    row = start.state.rows_consumed
    rows_before = before.rows_used_at(row, config.seed)
    return Phase(before.number + 1, row, shares, dict.fromkeys(shares, 0) | rows_before)


def mixture_text(sources: Mapping[str, tuple[str, str]], shares: Mapping[str, int]) -> str:
    """Return a text that lists sources, name -> (folder, digest), with their shares."""
    texts = []
    for name, (folder, digest) in sources.items():
        texts.append(f"{name} {shares[digest] / BLOCK_ROWS:.1%} ({folder}, SHA-256 {digest[:12]}...)")
    return ", ".join(texts)


def find_val_sets(config: TrainConfig, sources: Sequence[ShardSet]) -> list[ShardSet]:
    """Find the validation sets that --val names, or else the val shards of the sources."""
    places = {name: folder for name, (folder, _) in parse_folders("val", config.val).items()}
    if not places:
        with_val = sources
        if len(sources) > 1:
            with_val = [source for source in sources if shard_files(Path(source.folder), "val")] or sources
        places = {source.name: source.folder for source in with_val}
    return [ShardSet.find(name, folder, "val") for name, folder in places.items()]


# ---------------------------------------------------------------------------------------------------------------------
# the tokenizer of the data


class Known(NamedTuple):
    """The tokenizer that the checkpoint of a resume, or the weights of --init_from, record."""

    record: TokenizerRecord  # its name is "" if unknown
    vocab_size: int  # of the model
    is_checkpoint: bool


def tokenizer_of(sets: Sequence[ShardSet], name: str, known: Known | None = None) -> tuple[TokenizerRecord, int]:
    """Return the tokenizer that all sets share, and the size of its vocabulary.

    Args:
        name: --tokenizer, for shards of other tools.
    """
    record: TokenizerRecord | None = None
    sizes = []
    for shards in sets:
        if shards.manifest is None:
            continue
        folder = Path(shards.folder)
        own_record = TokenizerRecord.of(shards.manifest, folder / MANIFEST).with_json(folder)
        own_name = own_record.tokenizer
        if not (known and known.is_checkpoint) and name not in ("auto", own_name):
            raise UserError(f"--tokenizer is {name!r}; {folder} was prepared with {own_name!r}; drop the flag")
        if record and not (record.fits(own_record) and own_record.fits(record)):
            raise UserError(
                f"{folder}: prepared with the tokenizer {own_record}, but {sets[0].folder} with {record}; expected the "
                "same one. Prepare one of them again"
            )
        # Other tokenizers are not checked, because loading them may require a network.
        if own_name in ("gpt2", "bytes") and shards.manifest["vocab_size"] < own_record.vocab_size:
            raise UserError(
                f"{folder / MANIFEST}: vocab_size is {shards.manifest['vocab_size']:,}, but the tokenizer "
                f"{own_name!r} has {own_record.vocab_size:,}; prepare the data again"
            )
        record = record or own_record
        sizes.append(shards.manifest["vocab_size"])
    if record is None:
        return tokenizer_of_other_tools(Path(sets[0].folder), name, known)
    return record, max(sizes)


def tokenizer_of_other_tools(folder: Path, name: str, known: Known | None) -> tuple[TokenizerRecord, int]:
    """Return the tokenizer of a folder without a manifest, and the size of its vocabulary."""
    tokenizer_json = folder / TOKENIZER_JSON
    is_free = name == "auto" and not tokenizer_json.exists()
    if known and (known.is_checkpoint or is_free):
        record = known.record if known.record.tokenizer else TokenizerRecord(f"ids:{known.vocab_size}")
        return record, known.vocab_size
    characters = folder / "meta.pkl"
    if is_free and characters.exists():
        raise UserError(
            f"{characters}: the ids are of nanoGPT's own vocabulary of characters, expected a known tokenizer; "
            "prepare the text again: python prepare_dataset.py --source input.txt --tokenizer bytes"
        )
    if is_free:
        name = "gpt2"
    record = record_named(str(tokenizer_json) if name == "auto" else name)
    return record, record.vocab_size


def completed(record: TokenizerRecord, known: Known, folder: str) -> TokenizerRecord:
    """Return the tokenizer record of a folder's data, completed from a checkpoint or weights with this tokenizer."""
    if known.is_checkpoint and not known.record.fits(record):
        raise UserError(
            f"{folder}: prepared with the tokenizer {record}, but the checkpoint was trained with {known.record}; name "
            "the right folder with --data_dir"
        )
    if record.is_number and known.record.tokenizer:
        return known.record
    if known.is_checkpoint or record.tokenizer_sha256 == known.record.tokenizer_sha256:
        return record.completed(known.record)
    return record
