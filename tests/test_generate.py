"""KV cache, sampling, loading a model, and the command generate.py."""

import io
import json
import math
import re
import sys
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
from ground import weights_content
from test_files import damage
from test_model import NEOX, ids, small

from generate import main
from model import GPT, GPTConfig, KVCache
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import as_checkpoint
from steadygpt.convert.weights import load_model
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.inference.sampling import generate, prompt_ids, sample, sample_texts
from steadygpt.machine.device import evaluating

# ---------------------------------------------------------------------------------------------------------------------
# KV cache, sampling, loading


@pytest.mark.parametrize("norm", ["rmsnorm", "rmsnorm_no_weight"])
def test_cache_has_the_dtype_of_autocast(norm, monkeypatch):
    """On a GPU, autocast computes rms_norm in fp32 from torch 2.13 on; an fp32 cache would be cast for each token."""
    rms_norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *args: rms_norm(*args).float())
    model = small(norm=norm, qk_norm=True, rotary_pct=1.0)
    cache = KVCache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids(2, 12), cache=cache)
    assert cache.layers[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize("family", [{}, NEOX, {"layer_pattern": "CA"}], ids=["gpt2", "gpt_neox", "convolutions"])
@pytest.mark.parametrize("prompt_length", [1, 12, 20])
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_cache_does_not_change_generated_tokens(family, prompt_length, as_on_a_gpu, monkeypatch):
    if as_on_a_gpu:  # attention sees the whole cache, masked; test_on_device.py records a graph of it
        monkeypatch.setattr("steadygpt.inference.sampling.can_capture", lambda model: True)
    model, plain = small(**family), ids(3, prompt_length)
    random = [torch.Generator().manual_seed(7) for _ in range(2)]
    cached = generate(model, plain, 16, 0.9, top_k=20, generator=random[0])
    assert cached.shape == (3, prompt_length + 16)
    with evaluating(model):
        for _ in range(16):
            token = sample(model(plain[:, -12:])[:, -1], 0.9, top_k=20, generator=random[1])
            plain = torch.cat([plain, token], dim=1)
    assert torch.equal(cached, plain)


def test_cache_computes_each_token_once_until_the_context_is_full():
    model, seen = small(), []
    model.wte.register_forward_hook(lambda wte, arguments, output: seen.append(arguments[0].size(1)))
    generate(model, ids(2, 5), 10)
    assert seen == [5] + 7 * [1] + 2 * [12]


def frequencies(count=40000, **options) -> list[float]:
    """Return how often each of three tokens with the probabilities 0.6, 0.3 and 0.1 is sampled."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(count, 3).clone()
    defaults = {"temperature": 1.0, "top_k": None, "generator": torch.Generator().manual_seed(0)}
    drawn = sample(logits, **defaults | options)
    return (drawn[:, 0].bincount(minlength=3) / count).tolist()


def test_temperature_scales_the_logits_and_top_k_keeps_their_ratios():
    assert frequencies() == frequencies(top_k=0) == frequencies(top_k=50) == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    assert frequencies(temperature=0.5) == pytest.approx([0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46], abs=0.01)
    roots = [math.sqrt(p) for p in (0.6, 0.3, 0.1)]
    assert frequencies(temperature=2.0) == pytest.approx([root / sum(roots) for root in roots], abs=0.01)
    assert frequencies(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0], abs=0.01)


def test_top_p_keeps_the_fewest_ids_with_at_least_this_probability():
    for top_p, expected in {
        1e-6: [1, 0, 0], 0.59: [1, 0, 0], 0.61: [2 / 3, 1 / 3, 0], 0.89: [2 / 3, 1 / 3, 0], 0.91: [0.6, 0.3, 0.1],
    }.items():  # fmt: skip
        assert frequencies(top_p=top_p) == pytest.approx(expected, abs=0.01), top_p
    # It counts among those of top_k, where 2/3 and 1/3 are left.
    assert frequencies(top_k=2, top_p=0.65) == [1, 0, 0]
    # The order of the ids does not matter.
    logits = torch.tensor([[0.1, 0.6, 0.3]] * 40000).log()
    drawn = sample(logits, 1.0, top_p=0.7, generator=torch.Generator().manual_seed(0))
    assert (drawn[:, 0].bincount(minlength=3) / 40000).tolist() == pytest.approx([0, 2 / 3, 1 / 3], abs=0.01)


@pytest.mark.parametrize("logits", [
    [math.nan] * 4, [math.inf, 1.0, math.nan, 2.0], [math.inf] * 4, [-math.inf, math.nan, 0.0, 1.0],
    [1e38, -1e38, 0.0, 0.0],
])  # fmt: skip
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("top_p", [0.1, 1.0])
def test_a_model_that_diverged_is_sampled_too(logits, top_k, temperature, top_p):
    """On CUDA an exception there would also end the process."""
    drawn = sample(torch.tensor([logits] * 9), temperature, top_k, top_p, torch.Generator().manual_seed(0))
    assert drawn.shape == (9, 1) and ((drawn >= 0) & (drawn < 4)).all()


@pytest.mark.parametrize("training", [True, False])
def test_generate_keeps_the_mode_and_the_random_state(training):
    model, state = small(dropout=0.1).train(training), torch.get_rng_state()
    generate(model, ids(1, 1), 5, generator=torch.Generator().manual_seed(0))
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("change", "error"), [
    ({"model": {}}, r"h\.0\.attn\.c_attn\.bias [^(]*\(48,\) torch\.float32\b[^(]*$"),
    ({"model_config": {"embd_size": 2**20, "head_dim": 0}},
     r"h\.0\.attn\.c_attn\.bias [^(]*\(48,\) .*\(3145728,\) torch\.float32"),
    ({"model_config": {"rotary": True}}, "^latest.pt: .*'rotary'"),
])  # fmt: skip
def test_weights_that_do_not_fit_the_shape_are_refused(change, error):
    model = small()
    content = weights_content(model.state_dict(), model.config)
    content |= {name: value if name == "model" else content[name] | value for name, value in change.items()}
    with pytest.raises(UserError, match=error):
        load_model(as_checkpoint(content, Path("latest.pt")))


def test_ids_without_text_and_padding_are_never_sampled():
    """Some ids from 257 on have no text; from 310 on the vocabulary is padded."""
    model = GPT(GPTConfig(vocab_size=310, context_length=12, num_layers=1, num_heads=2, embd_size=16))
    with torch.no_grad():
        model.lm_head.weight[257:] = 100 * model.lm_head.weight[:63]  # likely, if they were not masked
    prompt, generator = torch.zeros(8, 1, dtype=torch.int64), torch.Generator().manual_seed(0)
    assert 257 <= generate(model, prompt, 8, temperature=5.0, generator=generator).max() < 310
    assert generate(model, prompt, 8, generator=generator, vocab_size=257).max() < 257
    assert len(sample_texts(model, load_tokenizer(TokenizerRecord("bytes")), [256], 8, generator, count=4)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# the command


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=257, context_length=32, num_layers=1, num_heads=1, embd_size=8))


@pytest.fixture
def saved(folder) -> None:
    """Checkpoints of one model in the working directory."""
    model = tiny()
    torch.nn.init.normal_(model.wte.weight[:128], std=1.0)  # ASCII, because all other bytes decode to one character
    checkpoint = weights_content(model.state_dict(), model.config, step=3)
    for name in ("latest.pt", "latest_backup.pt", "best_model.pt", "rolling_step_000003.pt"):
        torch.save(checkpoint, folder / name)


@pytest.fixture
def texts(folder, saved, monkeypatch, capsys):
    """Return a function that runs the command and returns its stdout; it must print this warning, or none."""

    def texts(*argv: str, warning: str = "") -> str:
        options = ["--checkpoint_dir", str(folder), "--device", "cpu", "--max_tokens", "20"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *options, *argv])
        assert main() == 0
        out, err = capsys.readouterr()
        assert re.fullmatch(warning, err)
        return out

    return texts


def test_each_text_starts_with_the_prompt(texts):
    out = texts("--prompt", "def ", "--num_seq", "3")
    parts = [part.split("\n", 1)[1] for part in out.split("--- ")[1:]]
    assert all(part.startswith("def ") for part in parts)
    assert len(set(parts)) == 3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_text_is_escaped_on_a_terminal_and_exact_in_a_pipe(texts, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    begun = "a\n\t\\x1b[2J\\r" if is_terminal else "a\n\t\x1b[2J\r"
    assert texts("--prompt", "a\n\t\x1b[2J\r").startswith(begun)


@pytest.mark.parametrize("end", ["", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_prompt_file_is_one_prompt_without_its_last_line_break(texts, folder, end, encoding, monkeypatch):
    content = f"two\nlines{end}".encode(encoding)
    (folder / "prompt.txt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    prompt = texts("--prompt", "two\nlines")
    assert texts("--prompt_file", str(folder / "prompt.txt")) == texts("--prompt_file", "-") == prompt


def test_prompt_longer_than_the_context_is_a_warning(texts):
    texts("--prompt", 31 * "a")
    long = "warning: the prompt has 33 tokens; the model sees the last 32\n"
    assert texts("--prompt", 32 * "a", warning=long).startswith(32 * "a")


def test_the_seed_decides_the_text_except_at_temperature_0(texts):
    assert texts("--seed", "1") == texts("--seed", "1") != texts("--seed", "2")
    greedy = texts("--temperature", "0", "--seed", "1")
    assert greedy == texts("--temperature", "0", "--seed", "2") == texts("--top_k", "1") != texts("--top_k", "2")


def test_text_ends_with_the_document_or_after_max_tokens(texts, folder):
    """This model generates "aaaaa<|endoftext|><|endoftext|>...", whatever the prompt."""
    model = tiny()
    for parameter in (model.wte.weight, model.wpe.weight, *model.h.parameters()):
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.wte.weight[ord("a"), 0] = model.wte.weight[256, 1] = 1
        model.wpe.weight[:5, 0] = model.wpe.weight[5:, 1] = 10
    torch.save(weights_content(model.state_dict(), model.config, step=3), folder / "latest.pt")
    assert texts("--temperature", "0") == "aaaaa\n"
    assert texts("--temperature", "0", "--max_tokens", "3") == "aaa\n"


def with_ends(folder: Path, generation: object = None, config: object = None) -> None:
    """Give the checkpoint the eos_token_id of a Hugging Face folder: of generation_config.json and of config.json."""
    content = torch.load(folder / "latest.pt")
    files = {} if generation is None else {"generation_config.json": json.dumps({"eos_token_id": generation})}
    ids = {} if config is None else {"eos_token_id": config}
    torch.save(content | {"tokenizer_files": json.dumps({"ids": ids, "files": files})}, folder / "latest.pt")


def test_every_eos_token_id_of_the_weights_ends_a_text(texts, folder):
    whole = texts("--max_tokens", "25", "--top_k", "0").removesuffix("\n")
    first, second = whole.encode()[5], whole.encode()[9]
    end = min(whole.encode().index(first), whole.encode().index(second))
    for generation, config in [([first, second], None), (None, [first, second]), ([first, second], 255)]:
        with_ends(folder, generation, config)
        assert texts("--max_tokens", "25", "--top_k", "0") == whole[:end] + "\n"
    with_ends(folder, 255, first)  # transformers reads generation_config.json first
    assert texts("--max_tokens", "25", "--top_k", "0") == whole + "\n"
    with_ends(folder, first)
    prompt = chr(first) * 3  # an end in the prompt ends nothing
    assert texts("--prompt", prompt).startswith(prompt)


def test_stop_ends_a_text_after_the_prompt(texts):
    whole = texts("--prompt", "abc", "--max_tokens", "25").removesuffix("\n")
    stop = whole[10:12]
    assert texts("--prompt", "abc", "--max_tokens", "25", "--stop", stop) == whole[: whole.index(stop, 3)] + "\n"
    assert texts("--prompt", "abc", "--max_tokens", "25", "--stop", "bc").startswith("abc")
    assert texts("--prompt", "abc", "--max_tokens", "25", "--stop", "never there") == whole + "\n"


def test_special_tokens_in_a_prompt():
    """Property, over random prompts: as special tokens the ids of transformers, raw those of ordinary text."""
    random = Random(0)
    for name in ("gpt2", "bytes"):
        tokenizer = load_tokenizer(TokenizerRecord(name))
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        for _ in range(100):
            parts = ["<|endoftext|>", "<|endoftext", "|>", " ", "a", "\n", "\u00e9", "don't"]
            prompt = "".join(random.choices(parts, k=random.randrange(8)))
            expected = library.encode(prompt, add_special_tokens=False).ids
            if expected[:1] != [tokenizer.document_id]:
                expected = [tokenizer.document_id, *expected]
            assert prompt_ids(tokenizer, prompt) == expected
            raw = prompt_ids(tokenizer, prompt, raw=True)
            assert raw.count(tokenizer.document_id) == 1 and tokenizer.decode(raw[1:]) == prompt


def test_every_kind_of_checkpoint_can_be_used_and_a_corrupt_one_is_skipped_with_a_warning(texts, folder):
    one = texts()
    assert texts("best") == texts(str(folder / "rolling_step_000003.pt")) == texts(str(folder)) == one
    damage(folder / "latest.pt", "truncated")
    assert texts("latest", warning=r"warning: skipped .*latest\.pt: corrupt .*\n") == one
