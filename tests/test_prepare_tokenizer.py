"""Tests of prepare_dataset.py --tokenizer with files, and of the runs that train on what it writes."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPO, load, reference_model, refusal, run_here
from ground import metrics
from hypothesis import given
from hypothesis import strategies as st
from prepared import (
    files_of,
    ids_of,
    prepare,
    prepare_stopped,
    refused,
    small_units,  # noqa: F401
    write_rows,
)
from standin import CARD, CORPUS, parquet
from test_tokenizer_json import LLAMA3, added_token, byte_tokenizer, pattern_tokenizer, sentence_piece
from tokenizers import Tokenizer

import convert_hf
import generate
import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer, record_named
from steadygpt.network import stores
from steadygpt.prepare import documents
from steadygpt.prepare.documents import Wanted
from steadygpt.prepare.sources import find_source
from steadygpt.prepare.train_tokenizer import LONGEST_WORD, choose_texts, cut_words

WORDS = ["the", "cat", "sat", "on", "a", "mat", "with", "another", "cat's", "naïve", "hat", "12345", "\n"]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=60)) for number in range(300)]
PATTERN, NFC = pattern_tokenizer(LLAMA3), pattern_tokenizer(LLAMA3, nfc=True)
OWN = "--tokenizer own.json"
SHORT = ("--max_steps", "1", "--warmup_steps", "0")


@pytest.fixture(autouse=True)
def docs(folder) -> None:
    write_rows("docs.jsonl", TEXTS)


def chosen_texts(source, limit: int) -> list[str]:
    return list(choose_texts(source, Wanted(), limit))


# ---------------------------------------------------------------------------------------------------------------------
# training one


def test_a_trained_tokenizer_encodes_the_source_in_fewer_tokens(folder):
    manifest = prepare("docs.jsonl", flags="--tokenizer bpe:290 --tokenizer_bytes 20000 --val_share 0")
    tokenizer = load_tokenizer(TokenizerRecord.of(manifest), folder / "out")
    assert (manifest["vocab_size"], manifest["tokenizer"], manifest["dtype"]) == (290, "bpe:290", "uint16")
    assert manifest["tokenizer_sha256"] == tokenizer.sha256
    ids = ids_of()
    assert tokenizer.decode(ids) == "".join(END_OF_TEXT + text for text in TEXTS)
    assert len(ids) < 0.5 * sum(map(len, TEXTS))
    refused("--source docs.jsonl --tokenizer bpe:290 --tokenizer_bytes 9", "tokenizer_bytes 20000", " 9;", "--out")


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_the_beginning_of_each_file_is_chosen_up_to_the_limit(kind):
    Path("in").mkdir()
    for part in range(3):
        texts = [f"{part}{n:03d} words" for n in range(200)]
        rows = {"jsonl": [json.dumps({"text": text}) for text in texts], "txt": texts}[kind]
        Path(f"in/{part}.{kind}").write_text("\n".join(rows) + "\n")
    source = find_source("in")
    chosen = "".join(chosen_texts(source, 600))
    assert len(chosen) == 600
    assert all(f"{part}000" in chosen for part in range(3))
    assert "".join(chosen_texts(source, 10**9)).count("words") == 600


def test_of_files_on_the_hub_the_beginning_of_each_is_read_and_the_rest_is_not_requested(standin, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK_BYTES", 20_000)
    files = {f"part/{n}.parquet": parquet([f"{n}: {t}" for t in TEXTS * 20], row_group_size=50) for n in range(3)}
    standin.put(CORPUS, {"README.md": CARD.encode()} | files)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 20_000)
    texts = chosen_texts(find_source("hf:some/corpus:part"), 30000)
    assert [sum(text.startswith(f"{n}:") for text in texts) > 30 for n in range(3)] == [True] * 3
    assert abs(sum(len(text.encode()) for text in texts) - 30000) < 3
    assert standin.sent("GET .*parquet") < 0.5 * sum(map(len, files.values()))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_ctrl_c_and_sigterm_end_the_training_at_once_and_leave_nothing(number, status):
    """The library ignores signals, so a daemon thread trains."""
    words = random.Random(0)
    Path("long.txt").write_text(" ".join(words.randbytes(words.randint(3, 12)).hex() for _ in range(200_000)))
    flags = "--source long.txt --tokenizer bpe:100000 --out out".split()
    process = subprocess.Popen(
        [sys.executable, str(REPO / "prepare_dataset.py"), *flags], stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("training the tokenizer"):
            break
    time.sleep(0.2)
    process.send_signal(number)
    start_s = time.monotonic()
    errors = process.communicate(timeout=20)[1]
    assert time.monotonic() - start_s < 5
    assert (process.returncode, errors.splitlines()[-1]) == (status, "stopped; run the same command again to resume")
    assert not [path for path in Path("out").glob("*") if path.name != ".lock"]


# ---------------------------------------------------------------------------------------------------------------------
# a file


def test_a_file_from_the_hub_and_from_a_path_give_the_same_shards(standin):
    Path("own.json").write_text(NFC)
    first = standin.put("models/some/model", {"tokenizer.json": NFC.encode()})
    path, hub = prepare("docs.jsonl", "path", OWN), prepare("docs.jsonl", "hub", "--tokenizer hf:some/model")
    standin.put("models/some/model", {"tokenizer.json": byte_tokenizer({END_OF_TEXT: 256}).encode()})
    prepare("docs.jsonl", "commit", f"--tokenizer hf:some/model@{first}")
    assert ids_of("path") == ids_of("hub") == ids_of("commit")
    assert Path("hub/tokenizer.json").read_text() == NFC
    assert (path["tokenizer"], hub["tokenizer"]) == ("own.json", "hf:some/model")
    assert path["tokenizer_sha256"] == hub["tokenizer_sha256"]


@given(st.lists(st.sampled_from(["a", "字", " ", "\n", "ab" * 700, " " * 1500, "é" * 3000]), max_size=30).map("".join))
def test_words_that_take_too_long_to_train_on_are_cut(text):
    pieces = [*cut_words(text)]
    assert "".join(pieces) == text
    assert all(len(word) <= 2 * LONGEST_WORD for piece in pieces for word in re.findall(r"\S+|\s+", piece))
    assert len(pieces) == 1 or re.search(r"\S{1000}|\s{1000}", text)


def test_a_preparation_continues_with_the_file_it_has_begun_with(small_units):  # noqa: F811
    ours, different = (byte_tokenizer({END_OF_TEXT: number}) for number in (256, 300))
    own, kept = Path("own.json"), Path("out/tokenizer.json")
    own.write_text(ours)
    prepare("docs.jsonl", "whole", f"--shard_size 9000 {OWN}")
    prepare_stopped("docs.jsonl", "out", f"--shard_size 9000 {OWN}", before=2)  # a shard of each split
    own.write_text(different)
    same = "--source docs.jsonl --shard_size 9000 --tokenizer"
    refused(f"{same} own.json", "out: ", "'own.json'", "--out")
    Path("copy.json").write_text(ours)  # the same tokenizer by another name
    for damage, fact in ((different, "SHA-256"), ("{", "EOF while parsing")):
        kept.write_text(damage)
        prepare_dataset.load_tokenizer.cache_clear()
        refused(f"{same} copy.json", "out/tokenizer.json", fact)
    kept.write_text(ours)
    own.unlink()  # the folder has a copy
    prepare("docs.jsonl", "out", f"--shard_size 9000 {OWN}")
    assert files_of("out") == files_of("whole")


def test_a_file_that_tiktoken_cannot_encode_is_encoded_by_the_library(capsys):
    """From the source to bits per byte and samples."""
    Path("own.json").write_text(sentence_piece())
    manifest = prepare("docs.jsonl", "data", f"--document_token '<s>' {OWN}")
    assert "own.json: the library tokenizers encodes, about 6 times slower" in capsys.readouterr().err
    library = Tokenizer.from_str(sentence_piece())
    documents = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    found: list[list[int]] = []
    for i in ids_of("data"):
        if i == library.token_to_id("<s>"):
            found.append([])
        else:
            found[-1].append(i)
    assert manifest["vocab_size"] == library.get_vocab_size()
    assert sorted(documents) == sorted(found)
    assert run_here("--eval_freq", "1", "--sample_freq", "1", *SHORT) == 0
    assert "warning" not in capsys.readouterr().err
    assert len(metrics("checkpoints", "val_bpb")) == 1
    assert generate.main(["latest", "--prompt", "the cat", "--max_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_without_bytes_of_tokens_only_the_bits_per_byte_are_left_out(capsys):
    content = json.loads(PATTERN)
    Path("own.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    prepare("docs.jsonl", "data", OWN)
    capsys.readouterr()
    assert run_here("--eval_freq", "1", "--sample_freq", "1", *SHORT) == 0
    assert "no bits per byte in this run: the tokens of own.json do not show" in capsys.readouterr().err
    assert not metrics("checkpoints", "val_bpb") and metrics("checkpoints", "val_loss")


def test_a_file_needs_the_library_only_to_prepare(folder, monkeypatch):
    Path("own.json").write_text(PATTERN)
    manifest = prepare("docs.jsonl", "data", OWN)
    load_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(f"--source docs.jsonl {OWN}", "own.json", "pip install tokenizers")
    assert load_tokenizer(TokenizerRecord.of(manifest), folder / "data").sha256 == manifest["tokenizer_sha256"]
    assert run_here(*SHORT) == 0


def test_a_folder_names_its_tokenizer_and_what_its_other_files_add_is_said(capsys):
    transformers = pytest.importorskip("transformers")
    own = Path("model")
    own.mkdir()
    (own / "tokenizer.json").write_text(PATTERN)
    token = {key: value for key, value in added_token("<x>", 702).items() if key != "id"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {"702": token}}))
    record = record_named("model")
    assert record.tokenizer == "model/tokenizer.json"
    warning = capsys.readouterr().err
    assert "warning: model/tokenizer.json: other files of its folder add or change the token '<x>'" in warning
    [command] = re.findall('python -c "(.*)"', warning)
    theirs = transformers.AutoTokenizer.from_pretrained("model").encode("the <x> cat")
    assert load_tokenizer(record).encode("the <x> cat") != theirs
    exec(command)
    assert load_tokenizer(record_named("converted")).encode("the <x> cat") == theirs
    assert not capsys.readouterr().err


def test_what_is_no_tokenizer_json_is_named():
    Path("model").mkdir()
    Path("model/tokenizer.model").write_bytes(b"sentences")
    for name in ("model", "model/tokenizer.model"):
        refused(f"--source docs.jsonl --tokenizer {name}", "model/tokenizer.model", "SentencePiece")
    Path("model/tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    refused("--source docs.jsonl --tokenizer model", "model/tokenizer.model", "tiktoken", "hf:OWNER/MODEL")
    Path("model/tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused("--source docs.jsonl --tokenizer model", "model/tokenizer.json", "Git LFS")


def test_a_document_token_that_is_not_end_of_text_can_be_named():
    Path("own.json").write_text(byte_tokenizer({"<|begin_of_text|>": 256, "<|end|>": 400}))
    manifest = prepare("docs.jsonl", flags=f"--document_token '<|end|>' {OWN}")
    assert (manifest["document_token"], manifest["vocab_size"]) == ("<|end|>", 401)
    assert ids_of()[:4] == [400, *TEXTS[0].encode()[:3]]


# ---------------------------------------------------------------------------------------------------------------------
# a run, and what comes out of it


@pytest.fixture
def prepared() -> Path:
    """The tokenizer.json in data/ of a preparation with own.json."""
    Path("own.json").write_text(NFC)
    prepare("docs.jsonl", "data", f"--document_token '<|im_start|>' {OWN}")
    return Path("data/tokenizer.json")


def test_a_run_needs_the_tokenizer_only_once(prepared, capsys):
    """It is in the checkpoints, so samples, a resume, an export and an import need nothing else."""
    transformers = pytest.importorskip("transformers")
    Path("own.json").unlink()
    assert run_here("--max_steps", "2", "--warmup_steps", "0", "--sample_freq", "2") == 0
    prepared.unlink()
    capsys.readouterr()
    assert run_here("--resume", "latest", "--max_steps", "4", "--allow_changes", "--sample_freq", "4") == 0
    assert "no samples" not in capsys.readouterr().out
    assert load("checkpoints/latest.pt")["tokenizer_json"] == NFC
    shutil.rmtree("data")

    assert generate.main(["latest", "--prompt", "the cat", "--max_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert convert_hf.main(["latest", "exported"]) == 0
    assert Path("exported/tokenizer.json").read_text() == NFC
    exported = transformers.AutoTokenizer.from_pretrained("exported")
    record = TokenizerRecord.of(load("checkpoints/latest.pt"))
    ours, sentence = load_tokenizer(record), "the nai\u0308ve cat's 12345 hats"
    assert exported(sentence)["input_ids"] == ours.encode(sentence)
    assert exported.bos_token_id == ours.document_id
    assert convert_hf.main(["exported", "back.pt"]) == 0
    assert replace(TokenizerRecord.of(load("back.pt")), tokenizer_files="") == record
    assert generate.main(["back.pt", "--prompt", "the cat", "--max_tokens", "3", "--device", "cpu"]) == 0


def test_a_path_names_the_tokenizer_of_shards_and_weights_that_lack_it(prepared, capsys):
    Path("data/manifest.json").unlink()
    prepared.unlink()
    assert run_here(*SHORT, "--tokenizer", "own.json") == 0
    assert load("checkpoints/latest.pt")["tokenizer_json"] == NFC

    assert convert_hf.main(["latest", "exported"]) == 0
    Path("exported/tokenizer.json").unlink()
    assert convert_hf.main(["exported", "without.pt"]) == 0
    assert "without.pt: the tokenizer.json of own.json is missing" in capsys.readouterr().err
    assert convert_hf.main(["exported", "with.pt", "--tokenizer", "own.json"]) == 0
    assert load("with.pt")["tokenizer_json"] == NFC
    with refusal("--tokenizer bpe:702", "tokenizer.json"):
        convert_hf.main(["exported", "bpe.pt", "--tokenizer", "bpe:702"])

    assert run_here(*SHORT, "--tokenizer", "own.json", "--init_from", "without.pt", "--checkpoint_dir", "b") == 0
    prepared.write_text(NFC)  # found without a flag
    assert run_here(*SHORT, "--init_from", "with.pt", "--checkpoint_dir", "c") == 0
    assert load("c/latest.pt")["tokenizer_sha256"] == load("with.pt")["tokenizer_sha256"]


def test_a_run_does_not_start_without_its_tokenizer(prepared):
    for damage, fact in (("{", "EOF while parsing"), (None, " own.json")):
        prepared.write_text(damage) if damage else prepared.unlink()
        load_tokenizer.cache_clear()  # of the preparation
        with refusal("data/tokenizer.json", fact):
            run_here()
    assert [path.name for path in Path("checkpoints").iterdir()] == [".lock"]


def test_another_tokenizer_of_the_same_name_and_size_is_refused(prepared):
    """On a resume and for weights."""
    Path("own.json").write_text(PATTERN)
    prepare("docs.jsonl", "other", f"--document_token '<|im_start|>' {OWN}")
    assert run_here(*SHORT) == 0
    both = r"own\.json \(SHA-256 .*own\.json \(SHA-256 "
    for flags, what in (
        (["--resume", "latest"], rf"^other: .*{both}.* --data_dir"),
        (["--init_from", "checkpoints/latest.pt", "--checkpoint_dir", "b"], rf"^--init_from \S+: .*{both}"),
    ):
        with pytest.raises(UserError, match=what):
            run_here("--data_dir", "other", "--max_steps", "20", "--warmup_steps", "0", *flags)


def test_weights_of_the_hub_are_compared_by_identity_tuned_without_their_padding_and_exported(standin, capsys):
    transformers = pytest.importorskip("transformers")
    Path("own.json").write_text(NFC)
    shape = {"context_length": 16, "num_layers": 2, "num_heads": 2, "embd_size": 16}
    reference_model("qwen3", vocab_size=1000, **shape).save_pretrained("model")
    files = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    standin.put("models/some/gpt", files | {"tokenizer.json": NFC.encode()})
    prepare("docs.jsonl", "same", OWN)
    assert (
        run_here("--data_dir", "same", "--init_from", "some/gpt", "--eval_freq", "1", "--sample_freq", "1", *SHORT) == 0
    )
    assert "warning" not in capsys.readouterr().err
    assert len(metrics("checkpoints", "val_bpb")) == 1
    start = load("checkpoints/latest.pt")
    assert start["model_config"]["vocab_size"] == 702
    assert not start["model"]["wte.weight"][702:].any()
    assert convert_hf.main(["latest", "tuned"]) == 0
    assert Path("tuned/tokenizer.json").read_text() == NFC
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert (type(tuned).__name__, tuned.config.vocab_size) == ("Qwen3ForCausalLM", 702)

    Path("own.json").write_text(PATTERN)
    prepare("docs.jsonl", "different", OWN)
    with pytest.raises(UserError, match=r"some/gpt: vocab_size .*\b1000\b.*\b702\b"):
        run_here("--data_dir", "different", "--init_from", "some/gpt", "--checkpoint_dir", "b")
