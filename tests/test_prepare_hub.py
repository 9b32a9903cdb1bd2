"""Tests of prepare_dataset.py with data sets of the Hub, against the stand-in."""

import shutil
from pathlib import Path

import pytest
from standin import CARD, CORPUS, TEXTS, corpus, parquet
from test_prepare_dataset import files_of, ids_expected, ids_of, prepare, refused

import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.data import remote, sources

OPTIONS = ("--shard_size", "90000", "--val_tokens", "90000")


@pytest.fixture
def some_corpus(standin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_dataset, "SAMPLE_BYTES", 50_000)
    standin.put(CORPUS, corpus())
    return standin


def test_downloads_streams_and_a_full_cache_give_the_same_shards(some_corpus, tmp_path, monkeypatch):
    seen = []
    release = sources.Source.release

    def looking(source, before):
        seen.append(sum(path.lstat().st_size for path in Path("out/.download").rglob("*") if path.is_file()))
        release(source, before)

    monkeypatch.setattr(sources.Source, "release", looking)
    manifest = prepare("hf:some/corpus:part", "out", *OPTIONS)
    assert ids_of(tmp_path / "out") == ids_expected(TEXTS)
    assert manifest["commit"] == some_corpus.heads[CORPUS]
    assert not Path("out/.download").exists()
    size = len(corpus()["part/0.parquet"])
    assert 0 < max(seen) < 3.2 * size  # one behind, one being read, one ahead
    assert not some_corpus.sent("GET .*other/0.parquet")
    for out, more in (("streamed", ["--streaming"]), ("kept", ["--keep_download"])):
        some_corpus.log.clear()
        prepare("hf:some/corpus:part", out, *OPTIONS, *more)
        assert files_of(tmp_path / out) == files_of(tmp_path / "out")
    some_corpus.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    prepare("hf:some/corpus:part", "offline", *OPTIONS)
    assert files_of(tmp_path / "offline") == files_of(tmp_path / "out")
    assert not some_corpus.log
    prepare("hf:some/corpus:part", "again", *OPTIONS)  # what the user has kept is never removed
    refused("--source", "hf:some/other", match="not in the cache, and HF_HUB_OFFLINE is set")


def interrupt_after(shards: int, monkeypatch) -> None:
    """Press Ctrl-C when so many shards are written, once."""
    write_shard, written = prepare_dataset.write_shard, []

    def write_then_stop(path, *ids):
        written.append(path)
        if len(written) == shards:
            raise KeyboardInterrupt
        return write_shard(path, *ids)

    monkeypatch.setattr(prepare_dataset, "write_shard", write_then_stop)


def test_a_stream_goes_on_inside_the_file(some_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "READ_AHEAD", 1000)
    prepare("hf:some/corpus:part", "whole", *OPTIONS, "--streaming")
    of_whole = some_corpus.sent("GET .*parquet")
    interrupt_after(14, monkeypatch)  # the last shards, which begin inside the last file
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/corpus:part", "out", *OPTIONS, "--streaming")
    some_corpus.log.clear()
    prepare("hf:some/corpus:part", "out", *OPTIONS, "--streaming")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert some_corpus.sent("GET .*parquet") < 0.25 * of_whole


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("hf:", [], "'hf:' is incomplete; expected NAME or NAME@REVISION"),
        (
            "hf:some/corpus:part",
            ["--text_field", "txt"],
            "0.parquet: no field 'txt'; found id, text; set --text_field to",
        ),
        ("hf:some/corpus:nothing", [], "hf:some/corpus:nothing: .*BuilderConfig 'nothing' not found"),
        ("hf:some/tests", [], "hf:some/tests: no split 'train', found test"),
        ("hf:some/numbers", [], "the field 'text' holds no text .int, not a string.; set"),
        ("hf:some/gated", [], "gated; accept its conditions .* run `hf auth login` or set HF_TOKEN"),
    ],
)
@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_mistakes_are_told_before_any_large_download(source, more, message, streaming, some_corpus, monkeypatch):
    monkeypatch.setattr(remote, "READ_AHEAD", 1000)
    some_corpus.put("datasets/some/tests", {"data/test-0.parquet": parquet(TEXTS)})
    some_corpus.put("datasets/some/gated", {"data/train-0.parquet": parquet(TEXTS)})
    some_corpus.put("datasets/some/numbers", {"data/train-0.parquet": parquet(list(range(3000)))})
    some_corpus.gated.add("datasets/some/gated")
    refused("--source", source, "--out", "out", *more, *streaming, match=message)
    assert some_corpus.sent("GET .*parquet") <= 2**17  # where a Parquet file says what it holds
    assert not Path("out").exists()


@pytest.mark.parametrize("more", [[], ["--streaming"], ["--keep_download"]])
def test_too_small_a_disk_is_told_before_anything_is_written(more, some_corpus, monkeypatch):
    sizes = sum(len(data) for path, data in corpus().items() if path.startswith("part/"))
    tokens = len(ids_expected(TEXTS))
    needed = 2 * tokens + (0 if "--streaming" in more else sizes)
    for free, is_enough in ((0.8 * needed, False), (1.2 * needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: type("Usage", (), {"free": int(free)}))
        if is_enough:
            prepare("hf:some/corpus:part", "out", *OPTIONS, *more)
        else:
            refused("--source", "hf:some/corpus:part", "--out", "out", *more, match="free, .* needed")
            assert not Path("out").exists()


def test_a_cache_without_all_files_cannot_finish_a_preparation(some_corpus, monkeypatch, capsys):
    interrupt_after(2, monkeypatch)
    monkeypatch.setattr(sources, "AHEAD", 0)
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/corpus:part", "out", *OPTIONS, "--keep_download")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"out: prepared with 6 files, .* but now found [1-5] files"):
        prepare("hf:some/corpus:part", "out", *OPTIONS)
    assert "in the cache are known" in capsys.readouterr().err


def test_a_default_run_of_one_large_row_group_goes_on_as_a_stream(standin, tmp_path, monkeypatch):
    """The batches of a stream are smaller: what is skipped at the start spans several of them."""
    monkeypatch.chdir(tmp_path)
    standin.put("datasets/some/large", {"data/train.parquet": parquet(TEXTS, row_group_size=3000)})
    prepare("hf:some/large", "whole", *OPTIONS)
    interrupt_after(8, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/large", "out", *OPTIONS)
    shutil.rmtree("out/.download")
    prepare("hf:some/large", "out", *OPTIONS, "--streaming")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "line", "more"),
    [
        ("train.csv", '"{}",1\n', []),
        ("train.jsonl", '{{"text": "{}"}}\n', []),
        ("train.jsonl", '{{"text": "{}"}}\n', ["--streaming"]),
    ],
)
def test_other_formats_of_the_hub_are_read(name, line, more, standin, tmp_path, monkeypatch):
    """`datasets` streams CSV."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(line.format(text) for text in TEXTS[:900])
    standin.put(
        "datasets/some/rows", {f"data/{name}": f"{'text,number' * name.endswith('csv')}\n{rows}".lstrip().encode()}
    )
    prepare("hf:some/rows", "whole", *OPTIONS, *more)
    assert ids_of(tmp_path / "whole") == ids_expected(TEXTS[:900])
    interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/rows", "out", *OPTIONS, *more)
    prepare("hf:some/rows", "out", *OPTIONS, *more)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_fineweb_edu_is_the_default_and_replaces_a_preparation_without_shards(some_corpus, tmp_path, monkeypatch):
    card = CARD.replace("part/*", "sample/10BT/*").replace("part", "sample-10BT")
    files = {"README.md": card.encode(), "sample/10BT/000_00000.parquet": parquet(TEXTS)}
    some_corpus.put("datasets/HuggingFaceFW/fineweb-edu", files)
    interrupt_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare("hf:some/corpus:part", "data/edu_fineweb10B", *OPTIONS)
    assert prepare_dataset.main(["--tokenizer", "bytes", "--val_tokens", "9", "--num_workers", "1"]) == 0
    assert (tmp_path / "data/edu_fineweb10B/edufineweb_val_000000.npy").exists()
    assert ids_of(tmp_path / "data/edu_fineweb10B") == ids_expected(TEXTS)
