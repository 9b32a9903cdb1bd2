"""Tests of prepare_dataset.py with data sets of the Hub, against the stand-in."""

import shutil
from pathlib import Path

import pytest
from prepared import files_of, ids_expected, ids_of, interrupt, prepare, refused
from standin import CARD, CORPUS, TEXTS, corpus, parquet

import prepare_dataset
from steadygpt.data import remote, sources

OPTIONS = "--shard_size 90000 --val_tokens 90000"
FILES = corpus()


@pytest.fixture
def hub(standin, tmp_path, monkeypatch):
    """The Hub with a data set, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_dataset, "SAMPLE_BYTES", 50_000)
    standin.put(CORPUS, FILES)
    return standin


def go_offline(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def prepare_stopped(source: str, out: str, flags: str, shards: int) -> None:
    """Press Ctrl-C after some shards."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt("write_shard", patch, before=shards)
        prepare(source, out, flags)


def test_downloads_streams_and_a_full_cache_give_the_same_shards(hub, monkeypatch):
    seen = []
    release = sources.Source.release

    def looking(source, before):
        seen.append(sum(path.lstat().st_size for path in Path("out/.download").rglob("*") if path.is_file()))
        release(source, before)

    monkeypatch.setattr(sources.Source, "release", looking)
    options = "--shard_size 90000"
    manifest = prepare("hf:some/corpus:part", "out", options)
    assert ids_of("out") == ids_expected(TEXTS)
    assert manifest["commit"] == hub.heads[CORPUS]
    assert not Path("out/.download").exists()
    assert 0 < max(seen) < 3.2 * len(FILES["part/0.parquet"])  # one behind, one being read, one ahead
    assert not hub.sent("GET .*other/0.parquet")
    for out, more in (("streamed", "--streaming"), ("kept", "--keep_download")):
        prepare("hf:some/corpus:part", out, f"{options} {more}")
        assert files_of(out) == files_of("out")
    hub.log.clear()
    go_offline(monkeypatch)
    prepare("hf:some/corpus:part", "offline", options)
    assert files_of("offline") == files_of("out")
    assert not hub.log
    prepare("hf:some/corpus:part", "again", options)  # what the user has kept is never removed


def test_a_stream_goes_on_inside_the_file(hub, monkeypatch):
    monkeypatch.setattr(remote, "READ_AHEAD", 1000)
    prepare("hf:some/corpus:part", "whole", f"{OPTIONS} --streaming")
    of_whole = hub.sent("GET .*parquet")
    prepare_stopped("hf:some/corpus:part", "out", f"{OPTIONS} --streaming", shards=13)  # within the last file
    hub.log.clear()
    prepare("hf:some/corpus:part", "out", f"{OPTIONS} --streaming")
    assert files_of("out") == files_of("whole")
    assert hub.sent("GET .*parquet") < 0.25 * of_whole


def test_a_download_of_one_large_row_group_goes_on_as_a_stream(hub):
    """The batches of a stream are smaller: what is skipped at the start spans several of them."""
    hub.put("datasets/some/large", {"data/train.parquet": parquet(TEXTS, row_group_size=3000)})
    prepare("hf:some/large", "whole", OPTIONS)
    prepare_stopped("hf:some/large", "out", OPTIONS, shards=7)
    shutil.rmtree("out/.download")
    prepare("hf:some/large", "out", f"{OPTIONS} --streaming")
    assert files_of("out") == files_of("whole")


@pytest.mark.parametrize("more", ["", "--streaming", "--keep_download"])
def test_too_small_a_disk_is_told_before_anything_is_written(more, hub, monkeypatch):
    sizes = sum(len(data) for path, data in FILES.items() if path.startswith("part/"))
    needed = 2 * len(ids_expected(TEXTS)) + (0 if more == "--streaming" else sizes)
    free = [0.8 * needed]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": int(free[0])}))
    refused(f"--source hf:some/corpus:part {more}", "free, .* needed")
    assert not Path("out").exists()
    free[0] = 1.2 * needed
    prepare("hf:some/corpus:part", "out", f"{OPTIONS} {more}")


def test_a_cache_without_all_files_cannot_finish_a_preparation(hub, monkeypatch, capsys):
    monkeypatch.setattr(sources, "AHEAD", 0)
    prepare_stopped("hf:some/corpus:part", "out", f"{OPTIONS} --keep_download", shards=1)
    go_offline(monkeypatch)
    refused(f"--source hf:some/corpus:part {OPTIONS}", r"out: prepared with 6 files, .* but now found [1-5] files")
    assert "in the cache are known" in capsys.readouterr().err


def test_fineweb_edu_is_the_default_and_replaces_a_preparation_without_shards(hub):
    card = CARD.replace("part/*", "sample/10BT/*").replace("part", "sample-10BT")
    files = {"README.md": card.encode(), "sample/10BT/000_00000.parquet": parquet(TEXTS)}
    hub.put("datasets/HuggingFaceFW/fineweb-edu", files)
    prepare_stopped("hf:some/corpus:part", "data/edu_fineweb10B", OPTIONS, shards=0)
    assert prepare_dataset.main(["--tokenizer", "bytes", "--val_tokens", "9", "--num_workers", "1"]) == 0
    assert Path("data/edu_fineweb10B/edufineweb_val_000000.npy").exists()
    assert ids_of("data/edu_fineweb10B") == ids_expected(TEXTS)
