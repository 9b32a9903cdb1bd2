"""Shared helpers: shards with 257 token ids, a model of a few thousand parameters, train.py as a user starts it."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

from standin import StandIn
from stores import gcs, s3, store  # noqa: F401 (fixtures)

HUB = StandIn()
os.environ["OMP_NUM_THREADS"] = "1"  # set before torch reads it: threads only slow down models this small

import hypothesis
import numpy as np
import pytest
import torch
from tensorboard.summary.writer import event_file_writer

from steadygpt.base import text
from steadygpt.base.durable import sha256_of
from steadygpt.base.options import UserError
from steadygpt.data.shards import _mapped

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# TensorBoard reads the files of one second in the order of their names, in which 10 comes before 9. Only tests start
# and resume a run in one process and second.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)
REPO = Path(__file__).resolve().parent.parent
# Environment variables, for processes that import this file again: --device, and the folder of count_once().
DEVICE, COUNTED = "STEADYGPT_TEST_DEVICE", "STEADYGPT_TEST_COUNTED"


def tiny_flags(device: str) -> list[str]:
    """Return the flags of a model of a few thousand parameters; on a GPU its runs repeat bit by bit."""
    flags = (
        "--num_layers 2 --num_heads 2 --embd_size 16 --context_length 16 --total_batch_size 64 --mini_batch_size 2 "
        f"--max_steps 8 --warmup_steps 2 --precision fp32 --device {device} --checkpoint_freq 0 --checkpoint_minutes 0 "
        "--eval_freq 0 --hellaswag_freq 0 --sample_freq 0"
    )
    return [*flags.split(), *(["--deterministic", "--compile", "off"] if device == "cuda" else [])]


TINY = tiny_flags(os.environ.get(DEVICE, "cpu"))
FSDP = ("--sharding", "fsdp")
SLOW = ("--max_lr", "1e-4", "--min_lr", "1e-4")  # so that each validation of a tiny run is the best


def tiny_without(*names: str) -> list[str]:
    """Return TINY without these flags and their values."""
    flags = list(TINY)
    for name in names:
        at = flags.index(f"--{name}")
        del flags[at : at + 2]
    return flags


MODERN = (
    "--norm rmsnorm --qk_norm --rotary_pct 1 --activation swiglu --bias off --tied_head off --num_kv_heads 1 "
    "--layer_pattern CA --attention_gate --optimizer muon --muon_beta2 0.9 --schedule wsd --min_lr 0"
).split()  # the recipe of --config modern, with grouped heads


# What holds the pages and benchmarks to the code: a job of its own, scripts/test.sh --pages.
PAGES = {"test_docs", "test_doc_commands", "test_walkthrough", "test_hacking", "test_benchmarks", "test_notebook"}


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.stem in PAGES:
            item.add_marker(pytest.mark.pages)
        if item.path.stem in PAGES or item.get_closest_marker("storm"):
            item.add_marker(pytest.mark.timeout(300))


def pytest_addoption(parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="device of the runs that tests start")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory: empty, and of this test alone. Commands are printed as in the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "ROOT", SimpleNamespace(samefile=lambda path: True))
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread():
    """Start each test with one thread: an earlier test, or a plugin that imports torch first, may have left more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_mapped():
    """Unmap the shards of a test: the process would keep their files open, as a run does until it ends."""
    yield
    _mapped.cache_clear()


def pytest_configure(config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
    cache = tempfile.TemporaryDirectory(prefix="hub-cache-")
    config.add_cleanup(cache.cleanup)
    # Set before huggingface_hub reads them.
    os.environ |= {"HF_ENDPOINT": HUB.start(), "HF_HOME": cache.name, "HF_HUB_DISABLE_XET": "1"}
    os.environ[COUNTED] = cache.name
    os.environ["WANDB_MODE"] = "offline"
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        os.environ.pop(name, None)
    device = config.getoption("--device")
    if device == "cuda":
        # Forked processes can use CUDA only if this check has not initialized it in the process they come from.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: this machine has no CUDA GPU that PyTorch can use")
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # products of fp32 numbers are exact enough to compare with a CPU's
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # runs kernels for GPUs here; read when Triton is imported
    os.environ[DEVICE] = device
    TINY[:] = tiny_flags(device)  # before the tests import it


def pytest_sessionstart() -> None:
    import ground  # noqa: F401 (which imports what reads the environment, and changes how runs count their memory)


@contextlib.contextmanager
def refusal(*facts: str, kind: type[Exception] = UserError):
    """Expect an error of one line that has these facts, in any order: an option, a file, a value, what to type.

    Whole sentences stand in test_refused.py alone, so that a better one changes one row.
    """
    with pytest.raises(kind) as raised:
        yield raised
    line = str(raised.value)
    assert "\n" not in line
    missing = [fact for fact in facts if fact not in line]
    assert not missing, f"{missing} not in: {line}"


def need_gpus(count: int) -> None:
    """Skip a test that needs more GPUs than there are; processes on a CPU can share it."""
    if os.environ[DEVICE] == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"{count} ranks need {count} GPUs")


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write a shard, and return its SHA-256."""
    np.save(path, tokens)
    return sha256_of(path)


def write_data(folder: Path, num_tokens=(200, 700, 500), tokenizer="bytes", vocab_size=257, seed=0) -> Path:
    """Write shards as prepare_dataset.py does, the first as val; their tokens repeat, so that a model can learn."""
    folder.mkdir(parents=True, exist_ok=True)
    random, entries = np.random.default_rng(seed), []
    for number, count in enumerate(num_tokens):
        split = "train" if number else "val"
        tokens = np.resize(random.integers(0, vocab_size, 50), count).astype(np.uint16)
        name = f"tiny_{split}_{number:06d}.npy"
        entries.append({"file": name, "split": split, "tokens": count, "sha256": write_shard(folder / name, tokens)})
    manifest = {"complete": True, "tokenizer": tokenizer, "vocab_size": vocab_size, "shards": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def inject():
    """The module ground, whose faults act on the runs of this process up to the end of the test."""
    import ground

    with ground.acting_here():
        yield ground


@pytest.fixture
def workdir(folder) -> Path:
    """The working directory, with data/ in it."""
    write_data(folder / "data")
    return folder


@pytest.fixture
def url(workdir, monkeypatch) -> str:
    """An empty mirror, which stories call $URL."""
    monkeypatch.setenv("PWD", str(workdir))
    monkeypatch.setenv("URL", f"file://{workdir}/there")
    return os.environ["URL"]


def write_examples(folder: Path) -> None:
    """Write two questions of HellaSwag to hs.jsonl, equal but for their answers, so that at most one is right."""
    example = {"ctx": "A man", "endings": ["sits.", "flies away.", "is a.", "of."], "label": 0}
    (folder / "hs.jsonl").write_text(f"{json.dumps(example)}\n{json.dumps(example | {'label': 3})}\n")


REFERENCES_MADE: dict[str, Path] = {}


@pytest.fixture
def reference(tmp_path_factory, monkeypatch) -> Callable[..., Path]:
    """reference(*flags, **options) enters a folder with data, hs.jsonl and an uninterrupted run in "reference".

    Tests that ask for the same run share the folder.
    """
    from harness import run_to_end

    def enter(*flags: str, **options) -> Path:
        if (key := repr((flags, options))) not in REFERENCES_MADE:
            folder = tmp_path_factory.mktemp("runs")
            write_data(folder / "data")
            write_examples(folder)
            monkeypatch.chdir(folder)
            run_to_end(*flags, *folders("reference"), **options)
            REFERENCES_MADE[key] = folder
        monkeypatch.chdir(REFERENCES_MADE[key])
        return REFERENCES_MADE[key]

    return enter


@pytest.fixture
def standin(monkeypatch, tmp_path) -> StandIn:
    """The stand-in of the Hub, without repositories; and an empty cache."""
    import huggingface_hub.constants

    from steadygpt.network import hub

    HUB.clear()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(hub.HUB, "answered", False)
    return HUB


def command(*flags: str, processes: int = 1, tiny=TINY, agent: Sequence[str] = ()) -> list[str]:
    """Return the command line that a user types."""
    need_gpus(processes)
    script = [str(REPO / "train.py"), *tiny, "--data_dir", "data", *flags]
    if processes == 1:
        return [sys.executable, *script]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *agent]
    return [sys.executable, *torchrun, *script]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))}


def folders(name: str) -> tuple[str, ...]:
    """Return the flags that name the folder of a run."""
    return "--checkpoint_dir", name


def run_here(*flags: str) -> int:
    """Run train.main in this process, which has already imported torch; return the exit status."""
    import ground  # noqa: F401

    import train

    return train.main([*TINY, "--data_dir", "data", *flags])


def fork(function: Callable, *args) -> multiprocessing.process.BaseProcess:
    """Start function(*args), of a module, in a process that begins with the imports of preloaded.py."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["preloaded"])
    with contextlib.chdir(REPO / "tests"):  # Python 3.11 finds modules to preload only in the working directory
        forkserver.ensure_running()
    process = forks.Process(target=function, args=args)
    process.start()
    return process


def in_ranks(processes: int, function: Callable, *args) -> None:
    """Call function(*args), of a module, in each of `processes` ranks; check that all of them return 0 or None."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork(_rank, Path(folder, f"rank{rank}.txt"), group | {"RANK": rank, "LOCAL_RANK": rank}, function, args)
            for rank in map(str, range(processes))
        ]
        for process in ranks:
            process.join(50)
            process.kill()
        output = "".join(path.read_text() for path in sorted(Path(folder).iterdir()))
        assert [process.exitcode for process in ranks] == [0] * processes, output


def _rank(output: Path, group: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(group)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(function(*args))


# Hugging Face models: class and changes to its default configuration. configs/small_32k.toml is like the last one.
REFERENCES = {
    "gpt2": ("GPT2", {}),
    "gpt2 untied, exact GELU, narrow MLP": (
        "GPT2",
        {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 100, "layer_norm_epsilon": 1e-3},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox sequential, tied, all dimensions rotate": (
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rotary_pct": 1.0,
            "rotary_emb_base": 500000.0,
            "hidden_act": "gelu_new",
        },
    ),
    "llama": ("Llama", {"num_key_value_heads": 1}),
    "llama tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 20, "rms_norm_eps": 1e-3}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}),
    # Its default padding token is an id whose embedding is not trained.
    "nanochat": ("NanoChat", {"num_key_value_heads": 1, "pad_token_id": None}),
    "nanochat tied, without a soft-cap": (
        "NanoChat",
        {"tie_word_embeddings": True, "final_logit_softcapping": None, "pad_token_id": None},
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention"],
        },
    ),
    "lfm2, its first fields": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "full_attn_idxs": [0, 2],
            "block_ff_dim": 300,
            "block_multiple_of": 16,
            "tie_embedding": True,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "use_sandwich_norm": False,
            "conv_L_cache": 3,
            "pad_token_id": None,
            "layer_types": ["conv", "full_attention", "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5000.0} for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
}


def reference_model(which: str, vocab_size=1000, context_length=64, num_layers=3, num_heads=4, embd_size=64):
    """Return a Hugging Face model with random weights and biases; a new model would have zero biases."""
    transformers = pytest.importorskip("transformers")
    kind, changes = REFERENCES[which]
    if kind == "GPT2":
        shape = {"n_positions": context_length, "n_layer": num_layers, "n_head": num_heads, "n_embd": embd_size}
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        shape = {"max_position_embeddings": context_length, "num_hidden_layers": num_layers, "hidden_size": embd_size}
        shape |= {"num_attention_heads": num_heads, "intermediate_size": 4 * embd_size}
    if "layer_types" in changes:
        changes = changes | {"layer_types": changes["layer_types"][-num_layers:]}
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocab_size, **shape | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def load(path) -> dict:
    return torch.load(path, weights_only=True)


def scalars(folder) -> dict[str, dict[int, float]]:
    """Return tag -> step -> value of the curves in a folder of TensorBoard; fail if steps are repeated or unordered."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload(), {}
    for tag in events.Tags()["scalars"]:
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
        if not tag.startswith("system/"):  # the machine is measured at any time, also twice in a step
            assert [event.step for event in events.Scalars(tag)] == sorted(found[tag]), tag
    return found
