"""The families of steadygpt/convert/families.py compared with transformers, and reports of what does not fit."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import REFERENCES, REPO, reference_model, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_convert_hf import assert_same_weights, checkpoint_of

from convert_hf import write_folder
from model import TABLES, GPTConfig
from steadygpt.config import parse_args
from steadygpt.convert.families import FAMILIES, find_family, read_config, to_foreign
from steadygpt.convert.weights import load_model, read_weights

transformers = pytest.importorskip("transformers")

SMALL = GPTConfig(vocab_size=257, context_length=12, num_layers=2, num_heads=4, embd_size=16)
MODERN = {"rotary_pct": 1.0, "bias": False, "tied_head": False, "norm_eps": 1e-6, "intermediate_size": 24}
LLAMA = {**MODERN, "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}
QWEN3 = {**LLAMA, "qk_norm": True, "head_dim": 6}
NANOCHAT = {**MODERN, "norm": "rmsnorm_no_weight", "qk_norm": True, "activation": "relu2", "logit_softcap": 15.0}
LFM2 = {**LLAMA, "qk_norm": True, "layer_pattern": "CA"}
LFM3 = {**LFM2, "attention_gate": True}
SHAPES = {"llama": LLAMA, "qwen3": QWEN3, "nanochat": NANOCHAT, "lfm2": LFM2, "lfm3": LFM3}
OTHERS = {"gpt2", "gpt_neox"}  # which gpt2_and_gpt_neox() draws
assert {*SHAPES} | OTHERS == {*FAMILIES}, "a family without a shape here is not compared with transformers"
assert {*FAMILIES} <= {*REFERENCES}, "a family without a reference in conftest.py is not compared with transformers"


SIZES = {
    "context_length": st.integers(4, 20),
    "num_layers": st.integers(1, 3),
    "intermediate_size": st.sampled_from([0, 10]),
    "dropout": st.sampled_from([0.0, 0.1]),
    "norm_eps": st.sampled_from([1e-6, 1e-3]),
    "tied_head": st.booleans(),
}
BASES = st.sampled_from([10000.0, 500000.0])


@st.composite
def gpt2_and_gpt_neox(draw) -> GPTConfig:
    heads, head_dim = draw(st.sampled_from([(1, 8), (2, 4), (3, 8)]))
    activation = draw(st.sampled_from(["gelu_tanh", "gelu", "relu2"]))
    shape = {"vocab_size": 257, "num_heads": heads, "embd_size": heads * head_dim, "activation": activation}
    shape |= {name: draw(values) for name, values in SIZES.items()} | {"bias": draw(st.booleans())}
    if rotary_pct := draw(st.sampled_from([0.0, 0.5, 1.0])):
        shape |= {"rotary_base": draw(BASES), "parallel_residual": draw(st.booleans())}
    return GPTConfig(**shape, rotary_pct=rotary_pct)


@st.composite
def llama_and_its_kin(draw) -> GPTConfig:
    kind, kv_heads, group = draw(st.sampled_from(list(SHAPES))), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, width = draw(st.sampled_from([0, 6, 10])), kv_heads * group * draw(st.sampled_from([4, 8]))
    if kind == "lfm2":
        head_dim = 0
    width += head_dim > 0 and kind != "llama"  # heads need not divide it
    shape = SHAPES[kind] | {name: draw(values) for name, values in SIZES.items()} | {"rotary_base": draw(BASES)}
    shape |= {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim, "embd_size": width}
    if kind == "nanochat":
        shape["logit_softcap"] = draw(st.sampled_from([0.0, 2.0, 15.0]))
        shape["activation"] = draw(st.sampled_from(["relu2", "gelu", "gelu_tanh"]))
    if kind in ("lfm2", "lfm3"):  # transformers cannot run a model of convolutions alone
        pattern = draw(st.text("AC", min_size=shape["num_layers"] - 1, max_size=shape["num_layers"] - 1)) + "A"
        shape["layer_pattern"] = pattern
    return GPTConfig(vocab_size=257, **shape)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=gpt2_and_gpt_neox() | llama_and_its_kin(), seed=st.integers(0, 2**32))
def test_export_and_import_are_exact_and_transformers_computes_the_same(tmp_path, config, seed):
    for folder in ("out", "theirs"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    checkpoint = checkpoint_of(config, seed=seed)
    assert write_folder(checkpoint, tmp_path / "out") == []
    assert_same_weights(checkpoint, read_weights(str(tmp_path / "out")))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    exported.save_pretrained(tmp_path / "theirs")  # with the config.json of transformers
    assert_same_weights(checkpoint, read_weights(str(tmp_path / "theirs")))
    assert exported.config.vocab_size == 257  # without padding
    family = FAMILIES[find_family(config)]
    assert type(exported).__name__ == family.architecture

    torch.manual_seed(seed)
    model, tokens = load_model(checkpoint).eval(), torch.randint(0, 257, (2, config.context_length))
    expected, found = exported(tokens).logits, model(tokens)
    assert torch.allclose(expected, found[..., :257], atol=1e-5)
    assert (found[..., 257:] == -torch.inf).all()  # the padding of the vocabulary
    targets = torch.randint(0, 257, tokens.shape)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss = model(tokens, targets)["loss"].mean()
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    expected_loss.backward()
    loss.backward()
    theirs = dict(exported.named_parameters())
    theirs["embed_out.weight"] = exported.lm_head.weight  # GPT-NeoX's head in files
    theirs |= {name.replace(".g_proj.", ".gate_proj."): parameter for name, parameter in theirs.items()}  # LFM3's
    for name, parameter in model.named_parameters():
        gradient = parameter.grad[:257] if name in TABLES else parameter.grad
        assert gradient.any() and (name not in TABLES or not parameter.grad[257:].any()), name
        for foreign, part in to_foreign(name, gradient, config, family).items():
            assert torch.allclose(theirs[foreign].grad, part, rtol=1e-4, atol=1e-5), foreign  # sums in another order


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """saved(which) is a folder with a reference model that a test copies."""

    @cache
    def save(which: str) -> Path:
        reference_model(which).save_pretrained(folder := tmp_path_factory.mktemp("saved"))
        return folder

    return save


@pytest.mark.parametrize("which", REFERENCES)
def test_a_model_of_transformers_has_the_same_logits_when_imported(which, saved):
    exported = transformers.AutoModelForCausalLM.from_pretrained(saved(which))
    tokens = torch.randint(0, 1000, (3, 64))
    with torch.no_grad():
        logits = load_model(read_weights(str(saved(which)))).eval()(tokens)
        assert torch.allclose(logits[..., :1000], exported(tokens).logits, atol=1e-5)


# By default, LFM3 has sliding windows, norms after each part, and two bases of rotary positions.
PLAIN = {"lfm3": {
    "conv_L_cache": 3, "layer_types": 24 * ["conv"], "use_sandwich_norm": False,
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
}}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_that_config_json_omits_have_the_defaults_of_transformers(kind):
    plain = PLAIN.get(kind, {})
    configuration = transformers.AutoConfig.for_model(kind, **plain).to_dict()
    expected = GPTConfig(**read_config(configuration, "")[1]).resolved()
    assert GPTConfig(**read_config({"model_type": kind, **plain}, "")[1]).resolved() == expected


NEOX_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 500000.0}
NORM, GPT2_NORM = "gpt_neox.final_layer_norm.weight", "transformer.h.1.ln_1.bias"


def weights(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Return a function that adds change(weights) to the weights in a folder."""

    def edit(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        save_file(stored | change(stored), folder / "model.safetensors")

    return edit


def content(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(("which", "changes", "facts"), [
    ("gpt2", {"model_type": "mistral"},
     ("model_type", '"mistral"', "gpt2, gpt_neox, llama, qwen3, nanochat, lfm2, lfm3")),
    ("gpt2", {"activation_function": ["gelu"]}, ("activation_function", '["gelu"]', "gelu_new")),
    ("gpt2", {"n_layer": 0}, ("n_layer", "4,096")),
    ("gpt2", {"n_layer": 2}, ("transformer.h.2.", "29")),
    ("gpt2", {"n_layer": 4}, ("transformer.h.3.ln_1.weight", "(64,)")),
    ("gpt2", {"n_embd": 10**30}, ("n_embd", f"{10**30:,}", "16,777,216")),
    ("gpt2", {"n_embd": None}, ("n_embd", "null", "768")),
    ("llama", {"rope_parameters": {"rope_theta": 10**400}}, ("rope_theta", "1,000,000,000,000,000.0")),
    ("gpt2", {"n_embd": 62}, ("n_head", "embd_size", "62")),
    ("gpt2", {"n_embd": 32}, ("transformer.wte.weight", "(1000, 64)", "(1000, 32)")),
    ("gpt2", {"n_head": 2.0}, ("n_head", "2.0", "12")),
    ("gpt2", {"vocab_size": 999}, ("transformer.wte.weight", "(1000, 64)", "(999, 64)")),
    ("gpt2", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings", '"yes"', "true", "false")),
    ("gpt2", {"layer_norm_epsilon": float("inf")}, ("config.json: ", "JSON", "malformed")),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx", "true", "false")),
    ("gpt_neox", {"rope_parameters": NEOX_ROPE | {"rope_type": "linear"}}, ("rope_type", '"linear"', '"default"')),
    ("gpt_neox", {"rope_parameters": NEOX_ROPE | {"partial_rotary_factor": 0.2}}, ("rotary_pct", "0.2", "16")),
    ("llama", {"attention_bias": True}, ("attention_bias", "config.json", "true", "false")),
    ("llama", {"rope_parameters": LLAMA3_ROPE}, ("rope_type", "config.json", '"llama3"', '"default"')),
    ("llama", {"rope_scaling": {"factor": 2.0}}, ("rope_scaling", "config.json", '{"factor": 2.0}', "null")),
    ("llama", {"hidden_act": "mish"}, ("hidden_act", '"mish"', "silu")),
    ("llama", {"num_key_value_heads": 3}, ("num_key_value_heads", "3", "num_heads", "4")),
    ("llama", {"num_key_value_heads": 2}, ("self_attn.k_proj.weight", "(16, 64)", "(32, 64)")),
    ("llama", {"model_type": "qwen3", "head_dim": 16}, ("self_attn.q_norm.weight", "(16,)")),
    ("qwen3", {"use_sliding_window": True}, ("use_sliding_window", "config.json", "true", "false")),
    ("qwen3", {"model_type": "llama"}, ("model.layers.0.self_attn.k_norm.weight", "21")),
    ("nanochat", {"hidden_act": "none of ours"}, ("hidden_act", '"none of ours"', "gelu_new")),
    ("nanochat", {"final_logit_softcapping": -1.0}, ("final_logit_softcapping", "-1.0")),
    ("lfm2", {"layer_types": ["conv", "sliding_attention", "full_attention"]}, ("layer_types", "sliding_attention")),
    ("lfm2", {"layer_types": ["full_attention"] * 3}, ("model.layers.0.self_attn.q_proj.weight", "missing")),
    ("lfm2", {"conv_L_cache": 4}, ("conv_L_cache", "4", "3")),
    ("lfm2", {"conv_bias": True}, ("conv_bias", "true", "false")),
    ("lfm3", {"use_sandwich_norm": True}, ("use_sandwich_norm", "true", "false")),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, ("rope_type", "proportional")),
    ("gpt2", {"steadygpt": {"tokenizer": ["bytes"], "vocab_size": 1000}},
     ("steadygpt", "config.json", "`str`", "`array`")),
    ("gpt2", content("config.json", b"{"), ("config.json: ", "JSON", "truncated")),
    ("gpt2", content("config.json", b'{"a": ' + b"[" * 100_000), ("config.json: ", "JSON", "recursion")),
    ("gpt2", content("config.json", b"[]"), ("config.json: ", "`object`", "`array`")),
    ("gpt2", content("model.safetensors", bytes(100)), ("model.safetensors: ",)),
    ("gpt2", weights(lambda stored: {"lm_head.weight": stored["transformer.wte.weight"] + 1}),
     ("lm_head.weight", "transformer.wte.weight")),
    ("gpt2", weights(lambda stored: {GPT2_NORM: stored[GPT2_NORM] / 0}), (GPT2_NORM, "NaN")),
    *[("gpt_neox", weights(lambda stored, dtype=dtype: {NORM: stored[NORM].to(dtype)}),
       (NORM, str(dtype), "fp64", "fp32", "fp16", "bf16"))
      for dtype in (torch.float8_e4m3fn, torch.int8, torch.int64, torch.complex64)],
])  # fmt: skip
def test_folders_that_do_not_fit_are_reported_with_the_field(which, changes, facts, saved, tmp_path):
    folder = shutil.copytree(saved(which), tmp_path / "model")
    if isinstance(changes, dict):
        stored = json.loads((folder / "config.json").read_text())
        changes = content("config.json", json.dumps(stored | changes).encode())
    changes(folder)
    with refusal(*facts) as raised:
        read_weights(str(folder))
    assert str(raised.value).startswith((f"{folder}: ", f"{folder}/"))


@pytest.mark.parametrize("which", ["llama", "qwen3"])
def test_swish_is_another_name_of_silu_and_exported_as_silu(which, saved, tmp_path):
    folder = shutil.copytree(saved(which), tmp_path / "model")
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"hidden_act": "swish"}))
    found = read_weights(str(folder))
    assert_same_weights(found, read_weights(str(saved(which))))
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(folder), torch.randint(0, 1000, (1, 8))
    with torch.no_grad():
        assert torch.allclose(load_model(found).eval()(tokens)[..., :1000], theirs(tokens).logits, atol=1e-5)
    write_folder(found, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["hidden_act"] == "silu"


def test_lfm2_with_the_names_of_its_first_files_is_read(saved, tmp_path):
    folder = shutil.copytree(saved("lfm2, its first fields"), tmp_path / "model")
    stored = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters"):
        del stored[name]
    stored |= {"full_attn_idxs": [0, 2], "block_ff_dim": 300, "tie_embedding": True, "rope_theta": 1000000.0}
    (folder / "config.json").write_text(json.dumps(stored))
    found = read_weights(str(folder))
    assert_same_weights(found, read_weights(str(saved("lfm2, its first fields"))))
    shape = found["model_config"]
    assert (shape["layer_pattern"], shape["intermediate_size"], shape["tied_head"]) == ("ACA", 208, True)
    (folder / "config.json").write_text(json.dumps(stored | {"full_attn_idxs": []}))
    with refusal("model.layers.0.conv.conv.weight", "missing"):
        read_weights(str(folder))


def test_a_config_json_of_transformers_4_is_read_and_a_missing_matrix_of_a_stack_reported(tmp_path):
    reference_model("llama").save_pretrained(tmp_path)
    stored, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    del stored["rope_parameters"], weights["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text(json.dumps(stored | {"rope_theta": 500000, "rope_scaling": None}))
    assert read_weights(str(tmp_path))["model_config"]["rotary_base"] == 500000
    save_file(weights, tmp_path / "model.safetensors")
    with refusal("model.layers.1.mlp.up_proj.weight", "(256, 64)"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize(("changes", "facts"), [
    ({"parallel_residual": True}, ("GPT2LMHeadModel", "parallel_residual", "True", "False")),
    ({"head_dim": 6}, ("head_dim", "6", "4")),
    ({"num_kv_heads": 2, "rotary_pct": 0.5}, ("GPTNeoXForCausalLM", "num_kv_heads", "2", "4")),
    ({"norm": "rmsnorm"}, ("GPT2LMHeadModel", "norm", "rmsnorm", "layernorm")),
    (LLAMA | {"bias": True}, ("LlamaForCausalLM", "bias", "True", "False")),
    (LLAMA | {"activation": "relu2"}, ("activation", "relu2", "swiglu")),
    (LLAMA | {"embd_size": 18, "head_dim": 4}, ("num_heads", "4", "embd_size", "18")),
    (QWEN3 | {"logit_softcap": 15.0}, ("Qwen3ForCausalLM", "logit_softcap", "15.0", "0.0")),
    (NANOCHAT | {"qk_norm": False}, ("NanoChatForCausalLM", "qk_norm", "False", "True")),
    (LFM2 | {"qk_norm": False}, ("LlamaForCausalLM", "layer_pattern", "CA", "AA")),
    (LFM3 | {"norm": "rmsnorm_no_weight"}, ("Lfm3ForCausalLM", "norm", "rmsnorm_no_weight", "rmsnorm")),
])  # fmt: skip
def test_models_without_a_class_of_transformers_are_refused_with_the_fields(changes, facts, tmp_path):
    with refusal(*facts):
        write_folder(checkpoint_of(dataclasses.replace(SMALL, **changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_in_several_files_is_read_without_its_padding(standin, tmp_path):
    reference_model("nanochat", vocab_size=320).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    standin.put("models/some/nanochat", {path.name: path.read_bytes() for path in tmp_path.iterdir()})
    checkpoint = read_weights("some/nanochat", "bytes")
    assert_same_weights(checkpoint, read_weights(str(tmp_path), "bytes"))
    assert checkpoint["model_config"]["vocab_size"] == 257
    assert checkpoint["model"]["lm_head.weight"][256].any()
    assert not checkpoint["model"]["lm_head.weight"][257:].any()


# ---------------------------------------------------------------------------------------------------------------------
# docs/models.md

LINES = re.findall(r"^- \*\*(.*):\*\* `([^`]*)`", (REPO / "docs/models.md").read_text(), re.MULTILINE)
FLAGS = {re.sub(r"\W", "", name).lower(): flags for name, flags in LINES} | {"gpt2": ""}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_flags_of_a_family_are_those_of_the_page(kind):
    words = FLAGS[kind.replace("_", "")].split()
    config = parse_args(words)[0].shape(50257)
    assert find_family(config) == kind, f"exported as {find_family(config)}; expected other flags in docs/models.md"
    defaults = read_config({"model_type": kind, **PLAIN.get(kind, {})}, "")[1]
    names = {word.removeprefix("--") for word in words if word.startswith("--")} & {*defaults} - {"layer_pattern"}
    assert all(getattr(config, name) == defaults[name] for name in names)
    is_grouped = kind not in ("gpt2", "gpt_neox")
    assert ("num_kv_heads" in FAMILIES[kind].fields) == is_grouped
    assert ("head_dim" in FAMILIES[kind].fields) == (is_grouped and kind != "lfm2")
