"""Tests of convert_hf.py: exact conversion both ways, and reports of what does not fit."""

import dataclasses
import json
import random
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import reference_model, refusal, run_here, tiny_without
from ground import is_of_a_run, latest, metrics, options_of, weights_content
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import convert_hf
import generate
import train
from convert_hf import write_folder
from dataloader import RowStream
from model import GPT, TABLES, GPTConfig
from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.convert.families import FAMILIES
from steadygpt.convert.weights import check_fits, load_model, read_weights
from steadygpt.data.shards import ShardSet
from steadygpt.data.tokenizer import END_OF_TEXT, GPT2_TOKENIZER, TokenizerRecord, load_tokenizer
from steadygpt.data.tokenizer_json import to_json

transformers = pytest.importorskip("transformers")

SMALL = GPTConfig(vocab_size=257, context_length=12, num_layers=2, num_heads=2, embd_size=16)
TINY_SHAPE = {"vocab_size": 257, "context_length": 16, "num_layers": 2, "num_heads": 2, "embd_size": 16}


def checkpoint_of(config: GPTConfig, tokenizer="bytes", seed=0) -> dict:
    """Return random weights and biases, as read_weights does."""
    torch.manual_seed(seed)
    model = GPT(config)
    for name, parameter in model.named_parameters():
        rows = config.vocab_size if name in TABLES else len(parameter)
        torch.nn.init.normal_(parameter.data[:rows], std=0.3)
    return weights_content(model.state_dict(), config, tokenizer)


def logits_of(checkpoint: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits without the padding of the vocabulary."""
    with torch.no_grad():
        model = load_model(checkpoint).eval()
        return model(tokens)[..., : model.config.vocab_size]


def assert_same_weights(one: dict, other: dict) -> None:
    assert GPTConfig(**one["model_config"]).resolved() == GPTConfig(**other["model_config"]).resolved()
    assert one["tokenizer"] == other["tokenizer"]
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


def test_a_model_saved_without_the_head_is_read_and_exported_without_a_tokenizer(tmp_path):
    """As gpt2 on the Hub: without "transformer." in the names, but with the causal mask; and the tied head twice."""
    reference_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "optimizer.pt").touch()  # as in the folders of transformers' Trainer
    expected = read_weights(str(tmp_path))
    stored = {n.removeprefix("transformer."): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    stored |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": stored["wte.weight"].clone()}
    save_file(stored, tmp_path / "model.safetensors")
    found = read_weights(str(tmp_path))
    assert_same_weights(expected, found)
    assert found["tokenizer"] == ""
    (note,) = write_folder(found, tmp_path / "out")
    assert "no tokenizer in" in note
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_weights_of_a_compiled_model_and_in_half_precision_are_read(tmp_path):
    reference_model("gpt_neox").half().save_pretrained(tmp_path)
    weights, expected = load_file(tmp_path / "model.safetensors"), read_weights(str(tmp_path))
    assert expected["model"]["wte.weight"].dtype == torch.float32
    assert torch.equal(expected["model"]["wte.weight"][:1000], weights["gpt_neox.embed_in.weight"].float())
    save_file({f"_orig_mod.{name}": t for name, t in weights.items()}, tmp_path / "model.safetensors")
    assert_same_weights(read_weights(str(tmp_path)), expected)


@pytest.mark.parametrize("missing", ["safetensors", "tokenizers"])
def test_the_error_names_the_packages_that_are_missing(missing, tmp_path, monkeypatch):
    write_folder(checkpoint_of(SMALL), tmp_path / "a")
    monkeypatch.setitem(sys.modules, missing, None)
    for use in (lambda: read_weights(str(tmp_path / "a")), lambda: write_folder(checkpoint_of(SMALL), tmp_path / "b")):
        with pytest.raises(UserError, match=r"(?i): .*\bpip install safetensors tokenizers\b"):
            use()


def test_zero_biases_of_an_export_are_removed_but_trained_ones_kept(tmp_path):
    write_folder(checkpoint_of(dataclasses.replace(SMALL, bias=False)), tmp_path / "a")
    assert not read_weights(str(tmp_path / "a"))["model_config"]["bias"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    model.transformer.h[1].mlp.c_fc.bias.data[3] = 1.0
    model.save_pretrained(tmp_path / "b")
    back = read_weights(str(tmp_path / "b"))
    assert back["model_config"]["bias"]
    assert back["model"]["h.1.mlp.c_fc.bias"][3] == 1


def test_a_model_of_the_size_of_gpt2_with_another_tokenizer_is_not_taken_for_gpt2(tmp_path, capsys):
    write_folder(checkpoint_of(dataclasses.replace(SMALL, vocab_size=50257), ""), tmp_path / "a")
    stored = json.loads((tmp_path / "a/config.json").read_text())
    del stored["steadygpt"]
    (tmp_path / "a/config.json").write_text(json.dumps(stored))
    assert read_weights(str(tmp_path / "a"))["tokenizer"] == "gpt2"
    assert "a: names no tokenizer; assumed gpt2, because it has 50,257 rows" in capsys.readouterr().err
    of_gpt2 = json.loads(to_json(load_tokenizer(TokenizerRecord("gpt2")).encoding))["model"]["vocab"]
    of_others = of_gpt2 | {"a": 65, "b": 64}
    for vocabulary, name, sha256 in ((of_gpt2, "gpt2", GPT2_TOKENIZER.tokenizer_sha256), (of_others, "", "")):
        (tmp_path / "a/vocab.json").write_text(json.dumps(vocabulary, indent=2, ensure_ascii=False))
        found = read_weights(str(tmp_path / "a"))
        assert (found["tokenizer"], found["tokenizer_sha256"]) == (name, sha256)
    assert capsys.readouterr().err == ""
    word_piece = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    (tmp_path / "a/tokenizer.json").write_text(word_piece.to_str())
    found = read_weights(str(tmp_path / "a"))
    assert found["tokenizer"].endswith("a/tokenizer.json") and len(found["tokenizer_sha256"]) == 64
    assert capsys.readouterr().err == ""
    (tmp_path / "a/tokenizer.json").write_text("{")
    assert read_weights(str(tmp_path / "a"))["tokenizer"] == ""
    assert "a: no tokenizer: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_the_exported_tokenizer_gives_the_same_ids(name, tmp_path):
    encoding = load_tokenizer(TokenizerRecord(name))
    write_folder(checkpoint_of(dataclasses.replace(SMALL, vocab_size=encoding.n_vocab), name), tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")

    @settings(max_examples=30)
    @given(st.text() | st.text(alphabet=" \n\t\r'sdtlvre1 2.!\u00a0\u2003é漢"))
    def check(text):
        text = text.replace(END_OF_TEXT, "")
        ids = exported(text)["input_ids"]
        assert ids == encoding.encode(text)
        assert exported.decode(ids) == text

    check()
    assert exported("a").keys() == {"input_ids", "attention_mask"}  # the arguments of generate()
    assert exported(END_OF_TEXT)["input_ids"] == [exported.eos_token_id] == [encoding.document_id]


def test_weights_come_from_the_files_that_the_index_names(tmp_path):
    reference_model("gpt2", **TINY_SHAPE).save_pretrained(tmp_path / "whole")
    reference_model("gpt2", **TINY_SHAPE).save_pretrained(tmp_path / "a", max_shard_size="20KB")
    index = tmp_path / "a/model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    stale = {name: torch.zeros_like(t) for name, t in load_file(tmp_path / "a" / files[0]).items()}
    save_file(stale, tmp_path / "a/model-of-another-run.safetensors")
    assert_same_weights(read_weights(str(tmp_path / "a")), read_weights(str(tmp_path / "whole")))
    (tmp_path / "a" / files[1]).unlink()
    with refusal(f"a/{files[1]}: "):
        read_weights(str(tmp_path / "a"))
    outside = [json.dumps({"weight_map": {"a": name}}) for name in ("/etc/passwd", "../b.safetensors", "..", "")]
    for text in ("{", "[]", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": 3}}', *outside):
        index.write_text(text)
        with refusal("a/model.safetensors.index.json: "):
            read_weights(str(tmp_path / "a"))
    index.unlink()
    with refusal(f"{tmp_path}/a: ", " model.safetensors ", " model.safetensors.index.json"):
        read_weights(str(tmp_path / "a"))
    with refusal("gpt2-huge: "):
        read_weights("gpt2-huge")
    with pytest.raises(UserError, match=r"(?i)\bsource\b"):
        read_weights("")


def on_the_hub(standin, folder, name="models/some/gpt", **changes) -> dict[str, bytes]:
    """Put a small model on the stand-in of the Hub; return its files."""
    reference_model("gpt2", **TINY_SHAPE | changes).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    standin.put(name, files | {"pytorch_model.bin": bytes(10**6), "onnx/model.safetensors": bytes(10**6)})
    return files


def test_weights_of_the_hub_are_downloaded_once_and_a_revision_is_read(standin, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    files = on_the_hub(standin, tmp_path / "model")
    commit = standin.heads["models/some/gpt"]
    standin.fail("GET .*model.safetensors", drop_after=2**14)
    expected = read_weights(str(tmp_path / "model"))
    for _ in range(2):
        assert_same_weights(read_weights("some/gpt"), expected)
    assert standin.sent("GET .*resolve") <= sum(map(len, files.values())) + 2**14
    on_the_hub(standin, tmp_path / "new", embd_size=32)
    assert_same_weights(read_weights(f"some/gpt@{commit}"), expected)
    assert read_weights("some/gpt")["model_config"]["embd_size"] == 32


def test_checks_come_before_the_download_of_weights(standin, workdir):
    on_the_hub(standin, workdir / "model")
    on_the_hub(standin, workdir / "other", "models/some/other", vocab_size=300)
    start = ("--max_steps", "3", "--warmup_steps", "1", "--init_from")
    for flags, facts in (
        (["some/other"], ("--init_from some/other: ", "vocab_size", "300", "257")),
        (["some/gpt", "--num_layers", "3"], ("--init_from some/gpt: ", "num_layers", "2", "3")),
        (["some/gpt", "--total_batch_size", "70"], ("total_batch_size", "70")),
    ):
        with refusal(*facts):
            run_here(*start, *flags)
    run_here(*start, "some/gpt", "--dry_run")
    assert not standin.sent("GET .*safetensors")
    assert not list(workdir.glob("checkpoints/*.pt"))
    assert run_here(*start, "some/gpt") == 0
    assert standin.sent("GET .*safetensors")


def test_a_downloaded_model_is_read_without_a_network(workdir, monkeypatch):
    snapshot = workdir / "models--gpt2/snapshots" / ("abcd" * 10)
    reference_model("gpt2", **TINY_SHAPE).save_pretrained(snapshot)
    (workdir / "models--gpt2/refs").mkdir()
    (workdir / "models--gpt2/refs/main").write_text("abcd" * 10)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workdir))
    monkeypatch.setattr(retry, "FIRST_PATIENCE_S", 0.0)
    assert_same_weights(read_weights("gpt2"), read_weights(str(snapshot)))
    assert run_here("--init_from", "gpt2", "--max_steps", "3") == 0


def test_a_path_that_may_be_a_name_on_the_hub_is_reported_as_no_file_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refusal("checkpoint/best: ", "HF_HUB_OFFLINE", "no such file or folder"):
        read_weights("checkpoint/best")


@pytest.mark.parametrize("file_bytes", [500, 5000])  # too few for config.json, for the weights
def test_an_interrupted_or_failed_export_leaves_no_files(tmp_path, monkeypatch, file_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        with pytest.raises(UserError, match=r"/out: .*\(.*File too large"):
            write_folder(checkpoint_of(SMALL), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(convert_hf, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_folder(checkpoint_of(SMALL), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# nanoGPT and its descendants


NANOGPT = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12}


def padded_state(checkpoint: dict, rows: int) -> dict:
    """Return weights with nanoGPT's names, and a vocabulary padded with random rows."""
    model = checkpoint["model"]
    table = torch.randn(rows, model["wte.weight"].size(1))
    vocab_size = checkpoint["model_config"]["vocab_size"]
    table[:vocab_size] = model["wte.weight"][:vocab_size]
    tables = {"transformer.wte.weight": table, "lm_head.weight": table}
    return {f"transformer.{name}": t for name, t in model.items() if name not in TABLES} | tables


ARGS = {"activation": "gelu", "dropout": 0.2}  # nanoGPT keeps a dictionary, its descendants pickle a GPTConfig
OURS = {"num_layers": 2, "num_heads": 2, "embd_size": 16, "context_length": 12}
OTHERS = {
    "nanoGPT": ("_orig_mod.", NANOGPT | {"bias": True}, ARGS, 50257, 50304),
    "nanoGPT without biases": ("_orig_mod.", NANOGPT | {"bias": False}, ARGS | {"bias": False}, 50257, 50304),
    "nanoGPT with characters": ("_orig_mod.", NANOGPT | {"bias": True}, ARGS, 65, 65),
    "build-nanogpt": ("", NANOGPT, {}, 50257, 50304),
    "build-nanogpt, compiled under DDP": ("module._orig_mod.", NANOGPT, {}, 50257, 50304),
    "gpt2-from-scratch": ("_orig_mod.module.", OURS, {}, 50257, 50304),
    "train_improved.py": ("_orig_mod.", OURS, {}, 50257, 50304),
}


def improved(shape: dict) -> dict:
    """Return the content of a checkpoint of train_improved.py without weights: flags, and states of generators."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    place = {"train_curr_shard": 2, "train_curr_pos": 5}
    return {"args": shape | {"max_lr": 1e-3, "resume": None}, "rng_state": states, "dataloader_state": place}


@pytest.mark.parametrize("command", ["train --resume latest", "generate latest"])
def test_a_folder_of_train_improved_is_no_corrupt_run_and_the_error_names_the_next_command(command, workdir):
    Path("checkpoints").mkdir()
    for name in ("latest.pt", "rolling_step_000250.pt"):
        torch.save(improved(OURS) | {"model": {}}, Path("checkpoints", name))
    main, *argv = command.split()
    with refusal("checkpoints/latest.pt: ", "convert_hf.py ", "nanoGPT"):
        {"train": train.main, "generate": generate.main}[main](argv)


@pytest.mark.parametrize("trainer", OTHERS)
def test_checkpoints_of_other_trainers_are_read_exactly(trainer, tmp_path, monkeypatch, capsys):
    prefix, shape, changes, vocab_size, rows = OTHERS[trainer]
    tokenizer = "gpt2" if rows == 50304 else ""
    expected = checkpoint_of(dataclasses.replace(SMALL, vocab_size=vocab_size, **changes), tokenizer)
    weights = {prefix + name: tensor for name, tensor in padded_state(expected, rows).items()}
    if "bias" in shape:
        weights[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12)  # the mask, without flash attention
        content = {"model_args": shape | {"vocab_size": rows, "dropout": 0.2}, "config": {"dataset": "openwebtext"}}
    elif trainer == "train_improved.py":
        content = improved(shape)
    else:
        kind = type("GPTConfig", (), {"__module__": "__main__"})
        monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", kind, raising=False)
        config = kind()
        config.__dict__ |= shape | {"vocab_size": rows}
        content = {"config": config}
    torch.save(content | {"model": weights, "iter_num": 5, "best_val_loss": torch.tensor(1.0)}, tmp_path / "ckpt.pt")
    assert_same_weights(expected, read_weights(str(tmp_path / "ckpt.pt")))
    assert ("assumed gpt2, because it has 50,304 rows" in capsys.readouterr().err) == (tokenizer == "gpt2")
    with refusal("ckpt.pt: vocab_size ", f" {rows:,}; ", " 257 ", "'bytes'", "--tokenizer"):
        read_weights(str(tmp_path / "ckpt.pt"), "bytes")


def test_mistakes_in_other_checkpoints_are_reported_with_the_field(tmp_path):
    shape = NANOGPT | {"vocab_size": 65}
    for content, facts in (
        ({"model_args": shape | {"block_size": "12"}}, ("block_size ", '"12"', "1024")),
        ({"model_args": shape | {"n_head": 3}}, ("n_head ", " 3; ", "embd_size", "16")),
        ({"model_args": shape}, ("GPT",)),
        ({"model_args": shape, "model": {}}, ("transformer.wte.weight", "(65, 16)")),
        ({"model_args": [1]}, ("convert_hf.py",)),
        ([1], ("convert_hf.py",)),
    ):
        torch.save(content, tmp_path / "ckpt.pt")
        with refusal("ckpt.pt: ", *facts):
            read_weights(str(tmp_path / "ckpt.pt"))


# ---------------------------------------------------------------------------------------------------------------------
# our own checkpoints


def test_tokenizer_fills_in_an_unknown_name_only(tmp_path):
    torch.save(checkpoint_of(SMALL, tokenizer=""), tmp_path / "unknown.pt")
    torch.save(checkpoint_of(SMALL), tmp_path / "known.pt")
    assert read_weights(str(tmp_path / "unknown.pt"), "bytes")["tokenizer"] == "bytes"
    assert read_weights(str(tmp_path / "known.pt"), "bytes")["tokenizer"] == "bytes"
    with refusal("unknown.pt: vocab_size ", " 257; ", "50,257", "'gpt2'"):
        read_weights(str(tmp_path / "unknown.pt"), "gpt2")
    with refusal("known.pt: ", "bytes", "gpt2"):
        read_weights(str(tmp_path / "known.pt"), "gpt2")


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"model": {}, "config": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(UserError, match=r"(?i)bomb\.pt: .*\bpickle\b"):
        read_weights(str(tmp_path / "bomb.pt"))
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------------------------------
# the command and training


def test_the_command_exports_and_imports(workdir, capsys, monkeypatch):
    assert run_here() == 0
    assert convert_hf.main(["latest", "exported"]) == 0
    assert capsys.readouterr().out.endswith("\nnext: AutoModelForCausalLM.from_pretrained('exported')\n")
    with monkeypatch.context() as patched:  # setup.sh does not install transformers
        patched.setattr("importlib.util.find_spec", lambda name: None)
        assert convert_hf.main(["latest", "again"]) == 0
    assert "\nnext: pip install transformers, then " in capsys.readouterr().out
    assert len({path.stat().st_mode for path in Path("exported").iterdir()}) == 1  # the weights too are for all to read
    assert convert_hf.main(["exported/", "in/a/new/folder/back.pt"]) == 0
    assert convert_hf.main(["exported", "back.pt"]) == 0
    out = capsys.readouterr().out
    assert "exported -> back.pt" in out
    assert "vocabulary 257 (bytes)" in out
    trained, back = latest("checkpoints"), read_weights("back.pt")
    assert_same_weights(trained, back)
    for source, target in (("exported", "back.pt"), ("back.pt", "exported")):
        with refusal(f"{target}: "):
            convert_hf.main([source, target])
    assert convert_hf.main(["latest", "latest.pt"]) == convert_hf.main(["checkpoints", "folder.pt"]) == 0
    assert_same_weights(read_weights("folder.pt"), back)
    weights = torch.load("latest.pt")
    assert weights["optimizer"] == {} and not is_of_a_run(weights)
    assert_same_weights(trained, weights)
    for converted in ("back.pt", "latest.pt"):
        with pytest.raises(UserError, match="--init_from"):
            run_here("--resume", converted)


@pytest.mark.parametrize("which", FAMILIES)
def test_ten_steps_equal_a_plain_loop_over_transformers(which, workdir):
    """Data order, micro-steps, clipping, AdamW and weight decay of train.py, from a Hugging Face folder."""
    model = reference_model(which, **TINY_SHAPE)
    model.save_pretrained("model")
    flags = "--init_from model --max_steps 10 --max_lr 1e-2 --min_lr 1e-2 --warmup_steps 0 --grad_clip 0.5".split()
    assert run_here(*flags) == 0

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    shards, losses = ShardSet.find("", "data", "train").shards, []
    rows = RowStream(shards, 16, TrainConfig(seed=1337))
    for step in range(10):
        batch = torch.from_numpy(rows.read(4 * step, 4))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    logged = metrics("checkpoints", "loss")
    assert losses[9] < losses[0] - 0.1
    assert all(abs(logged[step] - losses[step]) < 1e-5 for step in range(10))


def test_fine_tuning_takes_the_shape_of_the_weights_and_may_crop_the_context(workdir, capsys):
    shape = {"context_length": 24, "num_layers": 1}
    model = reference_model("gpt2 untied, exact GELU, narrow MLP", **TINY_SHAPE | shape)
    model.save_pretrained("model")
    flags = tiny_without("num_layers", "num_heads", "embd_size")
    fixed = ["--max_lr", "0", "--min_lr", "0", "--data_dir", "data", "--init_from", "model"]
    assert train.main([*flags, *fixed]) == 0
    assert "weights      from model" in capsys.readouterr().out
    tuned = latest("checkpoints")
    assert (tuned["model_config"]["num_layers"], tuned["model_config"]["intermediate_size"]) == (1, 100)
    options = options_of(tuned)
    assert (options["activation"], options["context_length"]) == ("gelu", 16)
    assert torch.equal(tuned["model"]["wpe.weight"], model.transformer.wpe.weight[:16])
    tokens = torch.randint(0, 257, (2, 16))
    with torch.no_grad():
        assert torch.allclose(logits_of(tuned, tokens), model.eval()(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(("changes", "tokenizer", "facts"), [
    ({"num_layers": 3}, "bytes", ("num_layers", "2", "3")),
    ({"context_length": 13}, "bytes", ("context_length", "12", "13")),
    ({"activation": "gelu"}, "bytes", ("activation", "gelu_tanh,", "gelu")),
    ({"intermediate_size": 32}, "bytes", ("intermediate_size", "64", "32")),
    ({"vocab_size": 50257}, "bytes", ("vocab_size", "257,", "50257")),
    ({}, "gpt2", ("bytes", "gpt2")),
    ({"context_length": 8, "intermediate_size": 64, "num_kv_heads": 2, "head_dim": 8, "dropout": 0.1}, "bytes", ()),
])  # fmt: skip
def test_weights_must_fit_the_run(changes, tokenizer, facts):
    with refusal("--init_from w.pt: ", *facts) if facts else nullcontext():
        check_fits(checkpoint_of(SMALL), "w.pt", dataclasses.replace(SMALL, **changes), TokenizerRecord(tokenizer))
    check_fits(checkpoint_of(SMALL, tokenizer=""), "w.pt", SMALL, TokenizerRecord("any"))
