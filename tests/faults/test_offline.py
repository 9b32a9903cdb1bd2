"""A network that fails during a download: training continues, other commands stop with one line of advice."""

import os
import re
from functools import partial
from pathlib import Path

import pytest
from conftest import HUB, TINY, folders, load, write_data
from harness import error_line, run_to_end
from injected import no_tokenizer


@pytest.fixture
def failing_network(workdir):
    """A fault for Run: every download breaks off after the headers; the network has no proxy to other servers."""
    HUB.clear()
    for name in ("datasets/Rowan/hellaswag", "datasets/some/corpus", "models/gpt2"):
        HUB.put(name, {"README.md": b""})
    HUB.fail("", times=-1, drop_after=0)
    address = os.environ["HF_ENDPOINT"]
    caches = {name: str(workdir / "cache") for name in ("HF_HOME", "TIKTOKEN_CACHE_DIR", "XDG_CACHE_HOME")}
    return partial(set_environment, {"HTTPS_PROXY": address, "NO_PROXY": "127.0.0.1", **caches})


def set_environment(changes: dict, rank: int) -> None:
    from huggingface_hub import constants

    from steadygpt.base import retry

    retry.FIRST_PATIENCE_S = 0.5
    constants.HF_HUB_CACHE = f"{changes['HF_HOME']}/hub"
    for name in ("http_proxy", "https_proxy", "no_proxy", "HF_HUB_OFFLINE"):
        os.environ.pop(name, None)
    os.environ.update(changes)


def test_training_continues_without_samples_and_hellaswag(failing_network):
    write_data(Path("data"), tokenizer="r50k_base", vocab_size=50257)
    flags = ("--eval_freq", "4", "--hellaswag_freq", "4", "--sample_freq", "4", *folders("run"))
    text = run_to_end(*flags, faults=[failing_network])
    assert text.count("warning: ") == 1
    assert re.search("^warning: no samples, HellaSwag or bits per byte in this run: .*'r50k_base'", text, re.M)
    assert re.search(r"^step 8/8 \| val loss \d+\.\d{4}( \(best so far\))?$", text, re.M)
    assert "finished after 8 steps" in text
    assert load("run/latest.pt")["step"] == 8


@pytest.mark.storm
def test_training_continues_without_hellaswag(failing_network):
    flags = ("--hellaswag_freq", "4", "--sample_freq", "4", *folders("run"))
    text = run_to_end(*flags, ranks=2, faults=[failing_network])
    assert text.count("warning: ") == 1  # not at each step
    assert text.count("sample:") == 2
    assert re.search(r"^warning: .*HellaSwag.*: hf:Rowan/hellaswag: .*\(.*--hellaswag_file FILE\b", text, re.M)
    assert "finished after 8 steps" in text


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.storm), 1])
def test_all_ranks_continue_if_one_has_no_tokenizer(workdir, rank):
    flags = ("--sample_freq", "4", "--hellaswag_freq", "4", "--timeout_minutes", "1")
    text = run_to_end(*flags, *folders("run"), ranks=2, faults=[partial(no_tokenizer, rank)])
    assert text.count("warning: no samples, HellaSwag or bits per byte in this run: ") == 1
    assert "finished after 8 steps" in text


@pytest.mark.parametrize(("program", "flags", "words"), [
    pytest.param("prepare_dataset", "--source text.txt --tokenizer r50k_base",
                 r"'r50k_base' .*(?i:--tokenizer bytes)", marks=pytest.mark.storm),
    ("prepare_dataset", "--source hf:some/corpus --tokenizer bytes", r"hf:some/corpus: .*\(\w+Error: "),
    pytest.param("train", "--init_from gpt2 --data_dir data", r"\bgpt2\b.*\(\w+Error\b", marks=pytest.mark.storm),
])  # fmt: skip
def test_commands_that_need_a_download_are_refused(program, flags, words, failing_network):
    Path("text.txt").write_text("some text")
    tiny = TINY if program == "train" else ()
    assert re.search(words, error_line(*flags.split(), program=program, tiny=tiny, faults=[failing_network]))
