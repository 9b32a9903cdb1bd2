"""Tests of prepare_dataset.py --tokenizer with files: trained on the source, downloaded, or given by a path."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import REPO, load, run_here
from standin import CARD, CORPUS, parquet
from test_prepare_dataset import files_of, ids_of, prepare, refused
from test_tokenizer_json import LLAMA3, byte_tokenizer, pattern_tokenizer

import convert_hf
import generate
import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.data import documents, remote, train_tokenizer
from steadygpt.data.sources import find_source
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer
from steadygpt.data.train_tokenizer import choose_texts

WORDS = ["the", "cat", "sat", "on", "a", "mat", "with", "another", "cat's", "naïve", "hat", "12345", "\n"]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=60)) for number in range(300)]


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A folder with docs.jsonl, as the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def tokenizer_of(folder: Path):
    return load_tokenizer(TokenizerRecord.of(json.loads((folder / "manifest.json").read_text())), folder.absolute())


def chosen_texts(source, limit: int) -> list[str]:
    return [text for texts in choose_texts(source, "text", limit, Mock(n=0)) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# training one


def test_a_trained_tokenizer_encodes_the_source_in_fewer_tokens(text):
    manifest = prepare("docs.jsonl", "out", tokens="bpe:290")
    tokenizer = tokenizer_of(text / "out")
    assert (manifest["vocab_size"], manifest["tokenizer"], manifest["dtype"]) == (290, "bpe:290", "uint16")
    assert manifest["tokenizer_sha256"] == tokenizer.sha256
    ids = ids_of(text / "out")
    assert tokenizer.decode(ids) == "".join(END_OF_TEXT + text for text in TEXTS)
    assert len(ids) < 0.5 * sum(map(len, TEXTS))


def test_the_same_text_gives_the_same_files_for_any_number_of_workers_and_after_interruptions(text, monkeypatch):
    options = ("--tokenizer_bytes", "20000", "--shard_size", "5000")
    prepare("docs.jsonl", "whole", *options, tokens="bpe:280")
    prepare("docs.jsonl", "two", *options, "--num_workers", "2", tokens="bpe:280")
    trained, times = prepare_dataset.train_tokenizer, []

    def count(*arguments):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return trained(*arguments)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_dataset, "train_tokenizer", count)
    for place in ("train_tokenizer", "print_forecast", "write_shard"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if place != "train_tokenizer":
                patch.setattr(prepare_dataset, place, interrupt)
            prepare("docs.jsonl", "stopped", *options, tokens="bpe:280")
    prepare("docs.jsonl", "stopped", *options, tokens="bpe:280")
    assert len(times) == 2  # the finished file is not trained again
    assert files_of(text / "whole") == files_of(text / "two") == files_of(text / "stopped")
    refused("--source", "docs.jsonl", "--out", "whole", "--tokenizer", "bpe:280", "--tokenizer_bytes", "9",
            "--shard_size", "5000", match="prepared with tokenizer_bytes 20000, but now it is 9")  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_documents_are_chosen_evenly_up_to_the_limit(kind, text, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 500)
    folder = text / "in"
    folder.mkdir()
    for part in range(3):
        lines = [f"{part}{n:03d} words" for n in range(200)]
        write = {"jsonl": [json.dumps({"text": line}) for line in lines], "txt": lines}[kind]
        (folder / f"{part}.{kind}").write_text("\n".join(write) + "\n")
    source = find_source(str(folder))
    chosen = "".join(chosen_texts(source, 600))
    assert len(chosen) == 600
    counts = [chosen.count(f"{part}{half}") for part in range(3) for half in range(2)]
    assert min(counts) > 0
    everything = "".join(chosen_texts(source, 10**9))
    assert everything.count("words") == 600


def test_of_files_on_the_hub_the_beginning_of_each_is_read_wherever_they_are(standin, text, monkeypatch):
    monkeypatch.setattr(remote, "READ_AHEAD", 20_000)
    lines = {f"part/{n}.parquet": parquet([f"{n}: {t}" for t in TEXTS * 20], row_group_size=50) for n in range(3)}
    standin.put(CORPUS, {"README.md": CARD.encode()} | lines)
    texts = chosen_texts(find_source("hf:some/corpus:part", folder=text / "none"), 30000)
    assert [sum(text.startswith(f"{n}:") for text in texts) > 30 for n in range(3)] == [True] * 3
    assert sum(len(text.encode()) for text in texts) == 30000
    assert standin.sent("GET .*parquet") < 0.5 * sum(map(len, lines.values()))
    streamed = find_source("hf:some/corpus:part", streaming=True, folder=text / "none")
    downloaded = find_source("hf:some/corpus:part")
    for file, path in zip(downloaded.remote, downloaded.paths, strict=True):
        file.download(path)
    assert texts == chosen_texts(streamed, 30000) == chosen_texts(downloaded, 30000)


def test_ctrl_c_ends_the_training_at_once(text):
    words = random.Random(0)
    with open("long.txt", "w") as file:
        for _ in range(250_000):
            file.write(words.randbytes(words.randint(3, 12)).hex() + " ")
    command = [sys.executable, str(REPO / "prepare_dataset.py"), "--source", "long.txt", "--tokenizer", "bpe:200000"]
    process = subprocess.Popen([*command, "--out", "out"], stderr=subprocess.PIPE, text=True)
    assert any("training a tokenizer" in line for line in process.stderr)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    assert process.wait(10) == 130
    assert time.monotonic() - start_s < 5
    assert "stopped; run the same command again to resume" in process.stderr.read()
    assert not (text / "out/tokenizer.json").exists()


def test_a_killed_training_process_is_reported(text, monkeypatch):
    monkeypatch.setattr(train_tokenizer, "_train_at", os._exit)  # fails, because it takes one argument
    same = ("--source", "docs.jsonl", "--out", "out", "--tokenizer")
    refused(*same, "bpe:300", match="the process that trains the tokenizer was killed, .* try less text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(*same, "bpe:300", match="needs tokenizers; pip install tokenizers")


# ---------------------------------------------------------------------------------------------------------------------
# a file


def test_a_file_from_the_hub_and_from_a_path_give_the_same_shards(standin, text):
    content = pattern_tokenizer(LLAMA3, nfc=True)
    (text / "own.json").write_text(content)
    first = standin.put("models/some/model", {"tokenizer.json": content.encode()})
    prepare("docs.jsonl", "path", tokens="own.json")
    prepare("docs.jsonl", "hub", tokens="hf:some/model")
    standin.put("models/some/model", {"tokenizer.json": byte_tokenizer({END_OF_TEXT: 256}).encode()})
    prepare("docs.jsonl", "commit", tokens=f"hf:some/model@{first}")
    assert ids_of(text / "path") == ids_of(text / "hub") == ids_of(text / "commit")
    assert (text / "hub/tokenizer.json").read_text() == content
    manifests = [json.loads((text / out / "manifest.json").read_text()) for out in ("path", "hub")]
    assert [m["tokenizer"] for m in manifests] == ["own.json", "hf:some/model"]
    assert manifests[0]["tokenizer_sha256"] == manifests[1]["tokenizer_sha256"]


def test_a_preparation_continues_with_the_file_it_has_begun_with(text, monkeypatch):
    (text / "own.json").write_text(byte_tokenizer({END_OF_TEXT: 256}))
    prepare("docs.jsonl", "whole", "--shard_size", "9000", tokens="own.json")
    write_shard, written = prepare_dataset.write_shard, []

    def write_then_stop(path, *ids):
        if written:
            raise KeyboardInterrupt
        written.append(path)
        return write_shard(path, *ids)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_dataset, "write_shard", write_then_stop)
        prepare("docs.jsonl", "out", "--shard_size", "9000", tokens="own.json")
    same = ("--source", "docs.jsonl", "--out", "out", "--shard_size", "9000", "--tokenizer", "own.json")
    kept = (text / "out/tokenizer.json").read_text()
    (text / "own.json").write_text(byte_tokenizer({END_OF_TEXT: 300}))
    refused(*same, match="prepared with tokenizer 'own.json', but now it is 'a different one in own.json'")
    (text / "copy.json").write_text(kept)  # by another name the same one
    same = (*same[:-1], "copy.json")
    for damage, problem in (
        (byte_tokenizer({END_OF_TEXT: 300}), "not the tokenizer that was recorded"),
        ("{", "not a"),
    ):
        (text / "out/tokenizer.json").write_text(damage)
        prepare_dataset.load_tokenizer.cache_clear()
        refused(*same, match=problem)
    (text / "out/tokenizer.json").write_text(kept)
    (text / "own.json").unlink()  # the folder has a copy
    prepare("docs.jsonl", "out", "--shard_size", "9000", tokens="own.json")
    assert files_of(text / "out") == files_of(text / "whole")


def test_the_document_token_is_asked_for_if_it_is_not_end_of_text(text):
    special = {"<|begin_of_text|>": 256, "<|end|>": 400}
    (text / "own.json").write_text(byte_tokenizer(special))
    same = ("--source", "docs.jsonl", "--out", "out", "--tokenizer", "own.json")
    asks = r"no special token '<\|endoftext\|>'; found <\|begin_of_text\|> <\|end\|>; name .* with --document_token"
    refused(*same, match=asks)
    refused(*same, "--document_token", "a", match="no special token 'a'; found")
    assert not (text / "out/tokenizer.json").exists()
    (text / "bare.json").write_text(byte_tokenizer({}))
    refused(*same[:-1], "bare.json", match="found none; add one to its added_tokens")
    manifest = prepare("docs.jsonl", "out", "--document_token", "<|end|>", tokens="own.json")
    assert (manifest["document_token"], manifest["vocab_size"]) == ("<|end|>", 401)
    assert ids_of(text / "out")[:4] == [400, *TEXTS[0].encode()[:3]]


def test_mistakes_are_reported_in_one_line(standin, text, monkeypatch):
    standin.put("models/some/model", {"config.json": b"{}"})
    standin.put("models/some/gated", {"tokenizer.json": b"{}"})
    standin.gated.add("models/some/gated")
    (text / "wordpiece.json").write_text('{"model": {"type": "WordPiece"}}')
    (text / "binary.json").write_bytes(b"\xff\xfe")
    np.save(text / "ids.npy", np.arange(9))
    (text / "empty.json").write_text("")
    for tokenizer, match in (
        ("hf:some/model", "some/model: has no file tokenizer.json"),
        ("hf:some/none", "some/none: not found on the Hugging Face Hub"),
        ("hf:some/gated", "gated; accept its conditions"),
        ("hf:some/model@", "'some/model@' is incomplete; expected NAME"),
        ("none.json", "none.json: cannot be read"),
        ("binary.json", "binary.json: cannot be read"),
        ("wordpiece.json", "wordpiece.json: found model WordPiece; expected byte-level BPE"),
        ("bpe:257", r"expected bpe:N, such as bpe:32768, with N from 258"),
        ("bpe:16777217", "to 16,777,216"),
        ("bpe:many", "expected bpe:N"),
        ("bpe:5000", r"docs.jsonl has text for \d+ tokens only; try bpe:\d+ or less"),
    ):
        refused("--source", "docs.jsonl", "--out", "bad", "--tokenizer", tokenizer, match=match)
    refused("--source", "docs.jsonl", "--out", "bad", "--tokenizer_bytes", "9", match="is for --tokenizer bpe:N")
    refused("--source", "ids.npy", "--out", "bad", "--tokenizer", "bpe:300", match="ids.npy: holds token ids")
    own = ("--source", "docs.jsonl", "--out", "own", "--tokenizer")
    refused(*own, "bpe:300", "--document_token", "<s>", match="but bpe:300 has only <.endoftext.>; drop it")
    refused(*own, "bpe:300", "--tokenizer_bytes", "9", match="or a larger --tokenizer_bytes")
    (text / "empty.txt").write_text("")
    refused("--source", "empty.txt", *own[2:], "bpe:300", match="empty.txt: no text")
    refused(*own, "empty.json", match="empty.json: empty; expected a tokenizer.json")
    (text / "own").mkdir(exist_ok=True)
    (text / "own/tokenizer.json").write_text("my own")
    refused(*own, "bpe:290", match="own/tokenizer.json: not the file of --tokenizer bpe:290")
    assert (text / "own/tokenizer.json").read_text() == "my own"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("--source", "docs.jsonl", "--out", "bad", "--tokenizer", "hf:some/new", match="HF_HUB_OFFLINE is set")
    prepare("docs.jsonl", "bad", tokens="bytes")  # failed commands leave the folder usable


# ---------------------------------------------------------------------------------------------------------------------
# a run, and what comes out of it


def test_a_run_needs_the_tokenizer_only_once(text, monkeypatch, capsys):
    """It is in the checkpoints, so samples, a resume, an export and an import need nothing else."""
    transformers = pytest.importorskip("transformers")
    (text / "own.json").write_text(pattern_tokenizer(LLAMA3, nfc=True))
    prepare("docs.jsonl", "data", "--document_token", "<|im_start|>", tokens="own.json")
    (text / "own.json").unlink()
    assert run_here("--max_steps", "4", "--sample_freq", "4") == 0
    kept = (text / "data/tokenizer.json").read_text()
    (text / "data/tokenizer.json").unlink()
    capsys.readouterr()
    assert run_here("--resume", "latest", "--max_steps", "8", "--allow_changes", "--sample_freq", "8") == 0
    assert "no samples" not in capsys.readouterr().out
    assert load("checkpoints/latest.pt")["tokenizer_json"] == kept
    shutil.rmtree("data")

    assert generate.main(["latest", "--prompt", "the cat", "--max_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert convert_hf.main(["latest", "exported"]) == 0
    assert (text / "exported/tokenizer.json").read_text() == kept
    exported, ours = (
        transformers.AutoTokenizer.from_pretrained("exported"),
        TokenizerRecord.of(load("checkpoints/latest.pt")),
    )
    sentence = "the nai\u0308ve cat's 12345 hats"
    ids = load_tokenizer(ours).encode(sentence)
    assert exported(sentence)["input_ids"] == ids
    assert exported.bos_token_id == load_tokenizer(ours).document_id
    assert convert_hf.main(["exported", "back.pt"]) == 0
    assert TokenizerRecord.of(load("back.pt")) == ours
    assert generate.main(["back.pt", "--prompt", "the cat", "--max_tokens", "3", "--device", "cpu"]) == 0


def test_a_path_names_the_tokenizer_of_shards_and_weights_that_lack_it(text, capsys):
    (text / "own.json").write_text(pattern_tokenizer(LLAMA3))
    prepare("docs.jsonl", "data", "--document_token", "<|im_start|>", tokens="own.json")
    for lost in ("manifest.json", "tokenizer.json"):
        (text / "data" / lost).unlink()
    short = ("--max_steps", "1", "--warmup_steps", "0", "--sample_freq", "0")
    assert run_here(*short, "--tokenizer", "own.json") == 0
    assert load("checkpoints/latest.pt")["tokenizer_json"] == (text / "own.json").read_text()

    assert convert_hf.main(["latest", "exported"]) == 0
    (text / "exported/tokenizer.json").unlink()
    assert convert_hf.main(["exported", "without.pt"]) == 0
    assert "without.pt: the tokenizer.json of own.json is missing" in capsys.readouterr().err
    assert convert_hf.main(["exported", "with.pt", "--tokenizer", "own.json"]) == 0
    assert load("with.pt")["tokenizer_json"] == (text / "own.json").read_text()
    with pytest.raises(UserError, match="--tokenizer bpe:702: expected the path"):
        convert_hf.main(["exported", "bpe.pt", "--tokenizer", "bpe:702"])

    assert run_here(*short, "--tokenizer", "own.json", "--init_from", "without.pt", "--checkpoint_dir", "b") == 0
    (text / "data/tokenizer.json").write_text((text / "own.json").read_text())  # found without a flag
    assert run_here(*short, "--init_from", "with.pt", "--checkpoint_dir", "c") == 0
    assert load("c/latest.pt")["tokenizer_sha256"] == load("with.pt")["tokenizer_sha256"]


def test_a_run_does_not_start_without_its_tokenizer(text):
    (text / "own.json").write_text(pattern_tokenizer(LLAMA3))
    prepare("docs.jsonl", "data", "--document_token", "<|im_start|>", tokens="own.json")
    stored = text / "data/tokenizer.json"
    for damage, problem in (("{", "not a tokenizer.json"), (None, "missing; expected the tokenizer own.json. Copy")):
        stored.write_text(damage) if damage else stored.unlink()
        load_tokenizer.cache_clear()  # of the preparation
        with pytest.raises(UserError, match=f"data/tokenizer.json: {problem}"):
            run_here()
    assert not (text / "checkpoints").exists()


def test_another_tokenizer_of_the_same_name_and_size_is_refused(text):
    """On a resume and for weights."""
    for out in ("data", "other"):
        (text / "own.json").write_text(pattern_tokenizer(LLAMA3, nfc=out == "other"))
        prepare("docs.jsonl", out, tokens="own.json")
    assert run_here() == 0
    for flags, what in (
        (["--resume", "latest"], r"other: prepared with the tokenizer own.json \(SHA-256 .* trained with own.json"),
        (["--init_from", "checkpoints/latest.pt", "--checkpoint_dir", "b"], "tokenizer is own.json .* the data has"),
    ):
        with pytest.raises(UserError, match=what):
            run_here("--data_dir", "other", "--max_steps", "20", *flags)


def test_weights_of_the_hub_are_compared_by_identity_and_lose_the_padding(standin, text):
    from conftest import reference_model

    content = pattern_tokenizer(LLAMA3)
    shape = {"context_length": 16, "num_layers": 2, "num_heads": 2, "embd_size": 16}
    reference_model("gpt2", vocab_size=1000, **shape).save_pretrained("model")
    files = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    standin.put("models/some/gpt", files | {"tokenizer.json": content.encode()})
    (text / "own.json").write_text(content)
    prepare("docs.jsonl", "data", tokens="own.json")
    assert run_here("--init_from", "some/gpt", "--max_steps", "2", "--warmup_steps", "0") == 0
    start = load("checkpoints/latest.pt")
    assert start["model_config"]["vocab_size"] == 702
    assert not start["model"]["wte.weight"][702:].any()

    (text / "own.json").write_text(pattern_tokenizer(LLAMA3, nfc=True))
    prepare("docs.jsonl", "nfc", tokens="own.json")
    with pytest.raises(UserError, match="vocab_size is 1000, but the data has 702"):
        run_here("--data_dir", "nfc", "--init_from", "some/gpt", "--checkpoint_dir", "b")
