"""Tests of what people bring to convert_hf.py: adapters, chat models, unknown tokenizers, files of other programs."""

import json
import re
import shlex
import struct
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from conftest import reference_model, refusal, run_here, write_shard
from ground import verified
from prepared import ids_of, prepare, refused
from safetensors.torch import load_file, save_file
from test_convert_hf import SMALL, assert_same_weights, checkpoint_of
from test_tokenizer_json import byte_tokenizer

import convert_hf
from convert_hf import write_folder
from steadygpt.base.options import UserError
from steadygpt.convert.weights import read_weights
from steadygpt.data.shards import open_shard
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer, record_named

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

STEPS = "--context_length 16 --total_batch_size 64 --mini_batch_size 4 --max_steps 2 --warmup_steps 1 --eval_freq 0"


def llama(folder: str, vocab_size: int, **changes) -> None:
    reference_model("llama", vocab_size, 16, num_layers=2, num_heads=2, embd_size=16).save_pretrained(folder)
    stored = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(stored | changes))


def digits_tokenizer() -> str:
    """Return the tokenizer.json of a BPE whose pre-tokenizer is the library's own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.Metaspace()]
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["one two 12 34 three " * 20, "abcdefghij klmnop qrstuv wxyz"], trainer)
    return tokenizer.to_str()


# ---------------------------------------------------------------------------------------------------------------------
# what is beside weights


@pytest.mark.parametrize("with_model", [True, False])
def test_an_adapter_is_refused_with_the_way_to_merge_it(with_model):
    if with_model:
        llama("model", 257)
    else:
        Path("model").mkdir()
    Path("model/adapter_config.json").write_text("{}")
    merge = ".merge_and_unload().save_pretrained('merged')\" model; "
    with refusal("model: ", ": python -c", merge, ": convert_hf.py merged weights.pt --tokenizer"):
        read_weights("model")


STORED = {
    "generation_config.json": '{"eos_token_id": [257, 258], "temperature": 0.6}',
    "tokenizer_config.json": '{"chat_template": "{{ messages }}", "eos_token": "<|im_end|>"}',
    "added_tokens.json": '{"<|im_end|>": 257}',
    "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "chat_template.jinja": "{% for message in messages %}é{% endfor %}",
}


def test_what_came_with_a_chat_model_survives_fine_tuning_and_export():
    special = {"<|endoftext|>": 256, "<|im_end|>": 257, "<|im_start|>": 258}
    llama("chat", 320, bos_token_id=256, eos_token_id=[257, 258], pad_token_id=5000)
    Path("chat/tokenizer.json").write_text(byte_tokenizer(special))
    for name, text in STORED.items():
        Path("chat", name).write_text(text, encoding="utf-8")
    assert convert_hf.main(["chat", "chat.pt"]) == 0
    Path("text.txt").write_text("some text " * 200)
    prepare("text.txt", "data", "--tokenizer chat/tokenizer.json --val_share 0")
    assert run_here(*f"--init_from chat.pt --data_dir data --checkpoint_dir tuned {STEPS}".split()) == 0
    assert run_here(*"--checkpoint_dir tuned --resume latest --max_steps 3 --allow_changes".split()) == 0
    for source, target in (("chat.pt", "exported"), ("tuned", "tuned_exported"), ("exported", "again.pt")):
        assert convert_hf.main([source, target]) == 0
    assert convert_hf.main(["again.pt", "again"]) == 0
    for target in ("exported", "tuned_exported", "again"):
        assert {name: Path(target, name).read_text(encoding="utf-8") for name in STORED} == STORED
        stored = json.loads(Path(target, "config.json").read_text())
        assert (stored["bos_token_id"], stored["eos_token_id"]) == (256, [257, 258])
        assert stored["pad_token_id"] is None  # the id did not exist
        config = transformers.AutoModelForCausalLM.from_pretrained(target).generation_config
        assert config.eos_token_id == [257, 258]


@pytest.mark.parametrize("odd", [-1, "2", 2.0, True, [2, None], 10**30])
def test_special_ids_that_are_none_do_not_end_an_export(odd):
    llama("model", 257, pad_token_id=odd, eos_token_id=odd, bos_token_id=3)
    for source, target in (("model", "weights.pt"), ("weights.pt", "out")):
        assert convert_hf.main([source, target, "--tokenizer", "bytes"][: 2 if target == "out" else 4]) == 0
    stored = json.loads(Path("out/config.json").read_text())
    assert (stored["bos_token_id"], stored["eos_token_id"], stored["pad_token_id"]) == (3, None, None)


@pytest.mark.parametrize("text", ["{}", "{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_weights_beside_a_broken_tokenizer_are_read(text):
    llama("model", 257)
    Path("model/tokenizer.json").write_text(text)
    assert read_weights("model")["tokenizer"] == ""


@pytest.mark.parametrize("generation_config", ["{broken", "{}"])
def test_kept_files_are_the_same_bytes_and_broken_or_empty_ones_are_left_out(generation_config):
    llama("model", 257)
    Path("model/chat_template.jinja").write_bytes(b"a\r\nb\r\n")
    Path("model/generation_config.json").write_text(generation_config)
    assert convert_hf.main(["model", "weights.pt", "--tokenizer", "bytes"]) == 0
    assert convert_hf.main(["weights.pt", "out"]) == 0
    assert Path("out/chat_template.jinja").read_bytes() == b"a\r\nb\r\n"
    assert transformers.GenerationConfig.from_pretrained("out").eos_token_id == 2
    assert transformers.AutoModelForCausalLM.from_pretrained("out").generation_config.eos_token_id == 2


def test_an_export_says_how_a_text_ends():
    write_folder(checkpoint_of(SMALL), Path("out"))
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == 256
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert model.generation_config.eos_token_id == 256


def test_other_files_of_a_made_checkpoint_are_not_written():
    kept = json.dumps({"ids": {"eos_token_id": 3, "x": 1}, "files": {"../outside": "a", "sub/b": "c", **STORED}})
    write_folder(checkpoint_of(SMALL) | {"tokenizer_files": kept}, Path("out"))
    assert not Path("outside").exists()
    assert {path.name for path in Path("out").iterdir()} == {
        *STORED,
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert "x" not in json.loads(Path("out/config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_an_export_is_that_of_its_weights(dtype):
    torch.save(checkpoint_of(SMALL), "weights.pt")
    assert convert_hf.main(["weights.pt", "out", "--dtype", dtype]) == 0
    wanted = getattr(torch, dtype)
    assert {tensor.dtype for tensor in load_file("out/model.safetensors").values()} == {wanted}
    assert transformers.AutoModelForCausalLM.from_pretrained("out", dtype="auto").dtype == wanted
    expected = {name: tensor.to(wanted).float() for name, tensor in checkpoint_of(SMALL)["model"].items()}
    assert_same_weights(read_weights("out"), checkpoint_of(SMALL) | {"model": expected})


def test_numbers_that_float16_lacks_are_refused():
    checkpoint = checkpoint_of(SMALL)
    checkpoint["model"]["wpe.weight"][0, 0] = 1e6
    with pytest.raises(UserError, match=r"^out: wpe\.weight .*\bfloat16\b.*--dtype bfloat16\b"):
        write_folder(checkpoint, Path("out"), "float16")


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "default"}, {"type": "default"}, {"rope_type": "default", "rope_theta": 5e5}]
)
def test_a_scaling_of_rotary_positions_that_is_none_is_read(scaling):
    llama("model", 257)
    stored = json.loads(Path("model/config.json").read_text())
    base = stored.pop("rope_parameters")["rope_theta"]
    Path("model/config.json").write_text(json.dumps(stored | {"rope_theta": base, "rope_scaling": scaling}))
    assert read_weights("model")["model_config"]["rotary_base"] == scaling.get("rope_theta", base)


@pytest.mark.parametrize("which", ["llama tied, wide heads", "gpt2", "nanochat tied, without a soft-cap"])
def test_a_tied_head_may_have_the_name_of_either(which):
    reference_model(which).save_pretrained("model")
    expected = read_weights("model")
    stored = load_file("model/model.safetensors")
    [table] = [name for name in stored if name.endswith(("wte.weight", "embed_tokens.weight"))]
    save_file(
        {**{n: t for n, t in stored.items() if n != table}, "lm_head.weight": stored[table]}, "model/model.safetensors"
    )
    assert_same_weights(read_weights("model"), expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("model").get_input_embeddings().weight
    assert torch.equal(theirs, expected["model"]["wte.weight"][: len(theirs)])


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers that the library encodes


def test_a_model_whose_tokenizer_the_library_encodes_is_trained_on_ids_and_text_and_exported_with_it(capsys):
    text = digits_tokenizer()
    library = tokenizers.Tokenizer.from_str(text)
    llama("model", library.get_vocab_size())
    Path("model/tokenizer.json").write_text(text)
    assert convert_hf.main(["model", "weights.pt"]) == 0
    assert "warning" not in capsys.readouterr().err
    ids = library.encode("one 12 two three 345 </s> " * 300).ids
    Path("text.txt").write_text("one two " * 100)
    prepare("text.txt", "text", "--tokenizer model/tokenizer.json --val_share 0 --document_token </s>")
    assert ids_of("text")[1:] == library.encode("one two " * 100).ids
    for folder in ("data", "other"):
        Path(folder).mkdir()
        write_shard(Path(folder, "a_train_000000.npy"), np.array(ids, np.uint16))
    Path("data/tokenizer.json").write_text(text)
    run = f"--init_from weights.pt --data_dir data --checkpoint_dir tuned {STEPS} --sample_freq 1"
    assert run_here(*run.split()) == 0
    warning = r"no samples, HellaSwag or bits per byte in this run: .*'<\|endoftext\|>'.*--document_token\b"
    assert re.search(warning, capsys.readouterr().err)
    assert convert_hf.main(["tuned", "exported"]) == 0
    assert json.loads(Path("exported/tokenizer.json").read_text()) == json.loads(text)
    assert (
        transformers.AutoTokenizer.from_pretrained("exported").encode("one 12", add_special_tokens=False)
        == library.encode("one 12").ids
    )
    other = json.loads(text)
    names = list(other["model"]["vocab"])
    other["model"]["vocab"] |= {names[-1]: len(names) - 2, names[-2]: len(names) - 1}
    Path("other/tokenizer.json").write_text(json.dumps(other))
    with refusal("--init_from weights.pt: ", "model/tokenizer.json", "other/tokenizer.json"):
        run_here(*f"--init_from weights.pt --data_dir other --checkpoint_dir refused {STEPS}".split())


@pytest.mark.parametrize("tokenizer", ["", "model/tokenizer.json"])
def test_tokens_without_a_row_are_named_with_a_command_that_adds_rows(tokenizer, monkeypatch):
    llama("model", 258)
    Path("model/tokenizer.json").write_text(byte_tokenizer({"<|endoftext|>": 256, "<s>": 257, "<pad>": 258}))
    with refusal("model: ", "'model/tokenizer.json'", " 1 id ", " 258 '<pad>'; ", "258 rows") as raised:
        read_weights("model", tokenizer)
    _, _, command = str(raised.value).rpartition(": python -c ")
    code, folder = shlex.split(command)
    monkeypatch.setattr(sys, "argv", ["-c", folder])
    exec(code)
    resized = read_weights("resized")
    assert load_tokenizer(TokenizerRecord.of(resized)).n_vocab == resized["model_config"]["vocab_size"] == 259
    torch.save(checkpoint_of(SMALL, tokenizer=""), "weights.pt")
    with refusal("weights.pt: ", " 2 ids ", " 257 '<s>', 258 '<pad>'; ", " FOLDER"):
        read_weights("weights.pt", "model/tokenizer.json")
    content = json.loads(Path("model/tokenizer.json").read_text())
    assert content["added_tokens"].pop()["id"] == content["model"]["vocab"].pop("<pad>") == 258
    Path("model/tokenizer.json").write_text(json.dumps(content))
    assert read_weights("model", tokenizer)["model_config"]["vocab_size"] == 258


def test_ids_whose_number_is_known_take_the_tokenizer_of_the_weights():
    llama("model", 300, eos_token_id=[7, 8])
    Path("model/tokenizer.json").write_text(digits_tokenizer())
    assert convert_hf.main(["model", "weights.pt"]) == 0
    Path("data").mkdir()
    write_shard(Path("data/a_train_000000.npy"), np.arange(2000, dtype=np.uint16) % 290)
    run = f"--init_from weights.pt --data_dir data --tokenizer ids:300 --checkpoint_dir run {STEPS}"
    assert run_here(*run.split()) == 0
    assert run_here(*"--checkpoint_dir run --resume latest --max_steps 3 --allow_changes".split()) == 0
    assert convert_hf.main(["run", "out"]) == 0
    assert json.loads(Path("out/tokenizer.json").read_text()) == json.loads(digits_tokenizer())
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == [7, 8]
    assert "<|endoftext|>" not in Path("out/tokenizer_config.json").read_text()


def test_ids_of_an_unknown_tokenizer_need_only_their_number():
    Path("data").mkdir()
    write_shard(Path("data/a_train_000000.npy"), np.arange(3000, dtype=np.uint16) % 1500)
    run = f"--data_dir data --checkpoint_dir run --num_layers 1 --num_heads 1 --embd_size 16 {STEPS}"
    with refusal("data/a_train_000000.npy", " 1000", " 1,000"):
        run_here(*f"{run} --tokenizer ids:1000".split())
    assert run_here(*f"{run} --tokenizer ids:1500".split()) == 0
    assert verified("run/latest.pt")["model_config"]["vocab_size"] == 1500
    Path("text.txt").write_text("one two " * 100)
    refused("--source text.txt --tokenizer ids:1500", "ids:1500")


def test_shards_without_a_manifest_have_the_vocabulary_of_the_weights():
    llama("model", 300)
    Path("model/tokenizer.json").write_text(digits_tokenizer())
    assert convert_hf.main(["model", "weights.pt"]) == 0
    Path("plain").mkdir()
    write_shard(Path("plain/a_train_000000.npy"), np.arange(2000, dtype=np.uint16) % 290)
    assert run_here(*f"--init_from weights.pt --data_dir plain --checkpoint_dir run {STEPS}".split()) == 0
    assert run_here(*"--data_dir plain --checkpoint_dir run --resume latest --max_steps 3 --allow_changes".split()) == 0
    checkpoint = verified("run/latest.pt")
    assert checkpoint["model_config"]["vocab_size"] == 300
    assert checkpoint["tokenizer_sha256"] == verified("weights.pt")["tokenizer_sha256"] != ""


# ---------------------------------------------------------------------------------------------------------------------
# other formats


def torch_file(content: object):
    return lambda path: torch.save(content, path)


def magic(number: int):
    return lambda path: path.write_bytes(struct.pack("<i", number) + bytes(2000))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(("name", "write", "message"), [
    ("model.safetensors", empty, r"\bconfig\.json\b.*: in$"),
    ("model.gguf", lambda path: path.write_bytes(b"GGUF" + bytes(90)), r"\bllama\.cpp\b"),
    ("weights.pt", lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1"), ": git lfs pull$"),
    ("page.pt", lambda path: path.write_bytes(b"<!DOCTYPE html><html>"), r"\.txt\b"),
    ("consolidated.00.pth", torch_file({"tok_embeddings.weight": torch.ones(2)}), "convert_llama_.*--input_dir in "),
    ("gpt2_124M.bin", magic(20240326), r"\bllm\.c\b.*: python dev/eval/export_hf\.py --input in/gpt2"),
    ("state.bin", magic(20240527), r"\bllm\.c\b.*\bmodel_\*\.bin .*: python dev/eval/export_hf\.py$"),
    ("train_000000.bin", magic(20240520), r"\bllm\.c\b.*--data_dir in$"),
    ("pytorch_model.bin", torch_file({"transformer.wte.weight": torch.ones(2)}), "config.json|: python -c"),
    ("lit_model.pth", torch_file({"model": {"lm_head.weight": torch.ones(2)}}), "litgpt convert_from_litgpt in "),
    ("out.pt", torch_file({"model": {}, "model_args": {"dim": 288, "n": 6}}), r"\bllama2\.c\b.*: python export\.py "),
    ("model_000100.pt", torch_file({"transformer.h.0.attn.c_q.weight": torch.ones(2)}), "convert_nanochat_"),
    ("x.ckpt", torch_file({"state_dict": {}, "pytorch-lightning_version": "2"}), r"\bLightning\b.*\bconfig\.json\b"),
    ("optim.pt", torch_file({"state": {}, "param_groups": []}), r"(?i:\boptimizer\b)"),
    ("optimizer.pt", torch_file({"state": {}, "param_groups": []}), "Hugging Face .*: in$"),
    ("mp_rank_00_model_states.pt", torch_file({"module": {}}), ": python zero_to_fp32.py . NEW_FOLDER"),
    ("model_optim_rng.pt", torch_file({"model": {}}), r"\bMegatron-LM\b"),
    ("whole.pt", lambda path: torch.save(Random(0), path), r"(?i:\bpickle\b)"),
    ("final_model.pt", torch_file({"model_state_dict": {}, "config": {"num_eigenstates": 4}}), r"(?i:\beigenstate\b)"),
    ("checkpoint-5.pt", torch_file({"model_state_dict": {}, "optimizer_state_dict": {"param_groups": []}}),
     r"(?i:\btrainer\b)"),
])  # fmt: skip
def test_a_file_of_another_program_is_named_with_the_way_on(name, write, message):
    Path("in").mkdir()
    write(Path("in", name))
    with pytest.raises(UserError, match=rf"^in/{name}: .*({message})") as raised:
        convert_hf.main([f"in/{name}", "out"])
    assert "corrupt" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("files", "facts"), [
    ({"model_000100.pt": b"", "meta_000100.json": b"{}"}, ("convert_nanochat_checkpoints.py --input_dir in ",)),
    ({"lit_model.pth": b"", "model_config.yaml": b""}, ("lit_model.pth ", "litgpt convert_from_litgpt in ")),
    ({"model.gguf": b"GGUF"}, ("model.gguf ", "llama.cpp")),
    ({".metadata": b"", "__0_0.distcp": b""}, (".metadata ", "dcp_to_torch in ")),
    ({"consolidated.00.pth": b"", "params.json": b"{}"}, ("convert_llama_weights_to_hf.py --input_dir in ",)),
    ({"model.safetensors": b"", "optimizer.pt": b""}, ("model.safetensors ", "config.json")),
    ({"trainer_state.json": b"{}"}, ("trainer_state.json ", "config.json")),
    ({"notes": b""}, ("config.json",)),
])  # fmt: skip
def test_a_folder_of_another_program_is_named(files, facts):
    Path("in").mkdir()
    for name, content in files.items():
        Path("in", name).write_bytes(content)
    with refusal("in: ", *facts):
        read_weights("in")


def test_weights_are_no_shard():
    magic(20240326)(Path("a_train_000000.bin"))
    with pytest.raises(UserError, match=r"a_train_000000\.bin: .*\bllm\.c\b.*: python dev/eval/export_hf\.py"):
        open_shard(Path("a_train_000000.bin"))


def test_small_ids_without_a_name_are_not_taken_for_gpt2_in_silence(capsys):
    Path("plain").mkdir()
    write_shard(Path("plain/a_train_000000.npy"), np.arange(2000, dtype=np.uint16) % 1500)
    assert run_here(*f"--data_dir plain --checkpoint_dir run --dry_run {STEPS}".split()) == 0
    assert "GPT-2's, but the largest of the first ids is 1,499; name the tokenizer" in capsys.readouterr().out
    write_shard(Path("plain/a_train_000000.npy"), np.arange(2000, dtype=np.uint16) * 25)
    assert run_here(*f"--data_dir plain --checkpoint_dir run --dry_run {STEPS}".split()) == 0
    assert "largest of the first ids" not in capsys.readouterr().out


def test_an_adapter_of_the_hub_is_refused_too(standin):
    standin.put("models/some/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    with refusal("some/adapter: ", ": python -c", ".merge_and_unload()"):
        read_weights("some/adapter")


# ---------------------------------------------------------------------------------------------------------------------
# what is beside a tokenizer.json


def random_tokenizer_folder(random: Random, folder: Path) -> None:
    """Write a tokenizer.json, and beside it files that may add tokens, change them or name them."""
    names = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<pad>"]
    special = {name: 256 + i for i, name in enumerate(names[: random.randint(1, 4)])}
    (folder / "tokenizer.json").write_text(byte_tokenizer(special))
    config: dict = {}
    for key in ("eos_token", "bos_token", "unk_token", "pad_token"):
        if random.random() < 0.4:
            config[key] = random.choice([*special, *special, "<extra>", None])
    if random.random() < 0.3:
        config["additional_special_tokens"] = [random.choice([*special, "<add>"])]
    if random.random() < 0.3:
        config["add_prefix_space"] = random.choice([True, False])
    if random.random() < 0.5:
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        decoder = {i: {"content": name} | flags for name, i in special.items()}
        if random.random() < 0.5:
            decoder[256 + len(special)] = {"content": random.choice(["<new>", "word"])} | flags
        if random.random() < 0.5:
            decoder[256][random.choice(["special", "lstrip"])] ^= True
        config["added_tokens_decoder"] = decoder
    if random.random() < 0.2:
        (folder / "added_tokens.json").write_text(json.dumps({"<new>": 256 + len(special)}))
    if random.random() < 0.8:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_ids_are_those_of_transformers_or_a_warning_names_what_only_transformers_follows(tmp_path, capsys):
    """Property, for random folders and texts."""
    random = Random(0)
    seen = Counter()
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        random_tokenizer_folder(random, folder)
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        ours = load_tokenizer(record_named(str(folder)))
        warned = "only transformers follows them" in capsys.readouterr().err
        parts = ["<|endoftext|>", "<|im_end|>", "<pad>", "<new>", "word", "<extra>", "<add>", " ", "a", "\n", "\u00e9"]
        texts = ["".join(random.choices(parts, k=8)) for _ in range(10)]
        equal = all(theirs(text, add_special_tokens=False)["input_ids"] == ours.encode_prompt(text) for text in texts)
        assert equal or warned, folder
        seen[equal, warned] += 1
    assert seen[True, False] > 5 and seen[False, True] > 5 and seen[True, True] < 9
