"""The commands of README.md and docs/: all are accepted, and those that need no GPU, network or object store run.

They run in this process, in the order of their page, with a tiny model and data.
"""

import gzip
import json
import random
import re
import shlex
import time
from importlib import util
from pathlib import Path

import monitor_training
import pytest
import upload_manager
from conftest import REPO, TINY, write_data

import convert_hf
import generate
import hellaswag_eval
import inspect_data
import prepare_dataset
import train
from steadygpt import config
from steadygpt.base.options import read_flags

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
OPTIONS = {
    "convert_hf.py": convert_hf.ConvertOptions,
    "generate.py": generate.GenerateOptions,
    "hellaswag_eval.py": hellaswag_eval.EvaluationOptions,
    "inspect_data.py": inspect_data.InspectOptions,
    "monitor_training.sh": monitor_training.MonitorOptions,
    "prepare_dataset.py": prepare_dataset.PrepareOptions,
    "scripts/upload_manager.py": upload_manager.ManagerOptions,
}
TRAINS = {"train.py", "list_checkpoints.sh", "resume_training.sh", "scripts/multinode.sh", "scripts/slurm.sh",
          "scripts/quickstart.sh", "start_training.sh"}  # whose options are those of train.py  # fmt: skip
PLACEHOLDERS = {r" N\b": " 1", r"\$lr": "1e-3", r"\bURL\b": "https://example.org/x", r" \.\.\.": ""}
CREATED = ("all_reduce.py",)  # by a command before
LAUNCHERS = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|accelerate|sbatch|\./|scripts/)"
TOML = re.compile(r"```toml\n(?:# (\S+\.toml)\n)?(.*?)```", re.DOTALL)


def page_text(page: str) -> str:
    return (REPO / page if page == "README.md" else REPO / "docs" / page).read_text()


def commands_of(page: Path) -> list[str]:
    """Return the commands in the blocks of a page, and those in its tables."""
    text = TOML.sub("", page.read_text())
    blocks = "\n".join(re.findall(r"^    (.*)$", text, re.M))
    blocks = re.sub(r"\\\n *", " ", blocks)
    lines = re.sub(r" +#.*$", "", blocks, flags=re.M).splitlines()
    # Not those of the first column, which has the commands of other trainers.
    cells = re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^\|[^|]*\|(.*)", text, re.M)))
    # One line may have several commands beside each other, or a command behind others.
    parts = [
        part.strip() for line in [*lines, *cells] for part in re.split(r"   +|&+(?: |$)|\|\|? | > |; (?:do )?", line)
    ]
    parts = [part.removesuffix("'") if part.count("'") % 2 else part for part in parts]  # ssh HOST 'cd PROJECT && ...'
    ours = [part for part in parts if "llama.cpp/" not in part]  # of another repository
    return [part for part in ours if re.match(LAUNCHERS, part) and re.search(r"\.(py|sh)\b| -m ", part)]


def parts_of(command: str) -> tuple[str, list[str]]:
    """Return the script and the flags of a command."""
    words = shlex.split(command)
    at = next(at for at, word in enumerate(words) if word.endswith((".py", ".sh")))
    return words[at].removeprefix("./"), words[at + 1 :]


COMMANDS = [(page.name, command) for page in PAGES for command in dict.fromkeys(commands_of(page))]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command_of_a_page_is_accepted(page, command, tmp_path):
    """The TOML files that a page shows exist."""
    (tmp_path / "mine.toml").touch()
    for name, values in TOML.findall(page_text(page)):
        (tmp_path / (name or "mine.toml")).write_text(values)
    for placeholder, value in PLACEHOLDERS.items():
        command = re.sub(placeholder, value, command)
    if " -m " in command:
        assert util.find_spec(re.search(r" -m (\S+)", command)[1])
        return
    script, argv = parts_of(command)
    if script in CREATED:
        return
    assert (REPO / script).is_file()
    if script in TRAINS:
        config.parse_args([word for word in argv if word != "--post_norm"])  # which the page on hacking adds
    elif script in OPTIONS:
        read_flags(OPTIONS[script], argv, "")


def test_every_page_that_shows_the_trainer_is_read():
    found = {page for page, command in COMMANDS if "train" in command}
    assert found >= {"README.md", "gpt2.md", "from-other-trainers.md"}


# ---------------------------------------------------------------------------------------------------------------------
# running

MAINS = {
    "convert_hf.py": convert_hf.main, "generate.py": generate.main, "inspect_data.py": inspect_data.main,
    "prepare_dataset.py": prepare_dataset.main, "train.py": train.main,
    "list_checkpoints.sh": lambda argv: train.main(["--list_checkpoints", *argv]),
    "resume_training.sh": lambda argv: train.main(["--resume", "latest", *argv, *TRAINED]),
    "monitor_training.sh": lambda argv: monitor_training.main([*argv, "--once"]),
}  # fmt: skip
TRAINED = [*TINY, "--checkpoint_freq", "1", "--eval_freq", "4", "--eval_tokens", "64", "--log_freq", "4"]
NEEDS_MORE = re.compile(  # a network, an object store, a GPU, a preset that has to stay as large as it is
    r"hf:|[sg]s?3?://|https?:|gpt2\b|Qwen|distilbert|out/ckpt|--init_from exported|prepare_dataset.py$|mps|use_wandb|"
    r"use_tensorboard|eval_bundle|post_norm"
)
SMALLER = {
    r"bpe:8192": "bpe:280",
    r"--num_kv_heads 4": "--num_kv_heads 2",
    r"\b48213\b": "2",
    r"--step 1\b": "--step 2",
}


WORDS = "to be or not that is the question whether tis nobler in mind".split()


def runs(command: str) -> bool:
    return not NEEDS_MORE.search(command) and re.sub(r".*?(\w+\.(py|sh))\b.*", r"\1", command) in MAINS


def run(command: str) -> None:
    for pattern, smaller in (PLACEHOLDERS | SMALLER).items():
        command = re.sub(pattern, smaller, command)
    script, argv = parts_of(command)
    if script == "train.py":
        argv += TRAINED
        if not re.search("--(resume|eval_only|dry_run|checkpoint_dir)", command):  # a new run, which needs a folder
            argv += ["--checkpoint_dir", f"new-{time.monotonic_ns()}"]
    assert not MAINS[script](argv), command


def test_the_python_of_fine_tuning_samples_a_model(workdir, capsys):
    assert not train.main([*TINY, "--data_dir", "data"])
    (code,) = re.findall(r"```python\n(.*?)```", page_text("fine-tuning.md"), re.DOTALL)
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize("page", [
    page if page in ("your-own-text.md", "monitoring.md") else pytest.param(page, marks=pytest.mark.storm)
    for page in dict.fromkeys(page for page, command in COMMANDS if runs(command))
    if page != "from-other-trainers.md"  # tests/test_other_trainers.py runs its commands
])  # fmt: skip
def test_commands_of_a_page_run(page, workdir):
    for seed, folder in enumerate(("edu_fineweb10B", "web", "code", "wikipedia", "math")):
        write_data(Path("data", folder), (2000, 2000), seed=seed)
    for folder in ("corpus", "notes"):
        Path(folder).mkdir()
        Path(folder, "text.txt").write_text("To be, or not to be, that is the question.\n" * 3000)
    Path("prompt.txt").write_text("To be")
    words = random.Random(0)  # which gzip packs as it packs text: val is measured in bytes of the files
    texts = [" ".join(words.choices(WORDS, k=50)) for _ in range(1500)]
    lines = [json.dumps({"content": text, "text": text}) for text in texts]
    Path("corpus/more.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    names = {"checkpoints", *re.findall(r"--checkpoint_dir (\S+)", page_text(page)), "checkpoints/quickstart"}
    if page != "your-own-text.md":  # whose commands train
        for name in sorted(names):
            own = ["--schedule", "wsd", "--data_dir", "data/web", "--checkpoint_dir", name]
            assert not train.main([*TRAINED, *own])
    for of_page, command in COMMANDS:
        if of_page == page and runs(command):
            run(command)
