"""The commands of README.md and docs/: each names a program that exists and options that it accepts."""

import re
import shlex
from importlib import util
from pathlib import Path

import monitor_training
import pytest
import upload_manager
from conftest import REPO

import convert_hf
import generate
import hellaswag_eval
import look
import prepare_dataset
import replay
from steadygpt import config
from steadygpt.base.options import read_flags

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
OPTIONS = {
    "convert_hf.py": convert_hf.ConvertOptions,
    "generate.py": generate.Options,
    "hellaswag_eval.py": hellaswag_eval.HellaSwagOptions,
    "look.py": look.LookOptions,
    "monitor_training.sh": monitor_training.MonitorOptions,
    "prepare_dataset.py": prepare_dataset.PrepareOptions,
    "replay.py": replay.ReplayOptions,
    "scripts/upload_manager.py": upload_manager.ManagerOptions,
}
TRAINS = {"train.py", "list_checkpoints.sh", "resume_training.sh", "scripts/multinode.sh", "scripts/slurm.sh",
          "scripts/quickstart.sh", "start_training.sh"}  # whose options are those of train.py  # fmt: skip
PLACEHOLDERS = {r" (N|A:B)\b": " 1", r"\$lr": "1e-3", r"\bURL\b": "https://example.org/x", r" \.\.\.": ""}
CREATED = ("all_reduce.py",)  # by a command before
LAUNCHERS = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|accelerate|sbatch|\./|scripts/)"
TOML = re.compile(r"```toml\n(?:# (\S+\.toml)\n)?(.*?)```", re.DOTALL)


def commands_of(page: Path) -> list[str]:
    """Return the commands in the blocks of a page, and those in its tables."""
    text = TOML.sub("", page.read_text())
    blocks = "\n".join(re.findall(r"^    (.*)$", text, re.M)).replace("\\\n", " ")
    lines = re.sub(r" +#.*$", "", blocks, flags=re.M).splitlines()
    # Not those of the first column, which has the commands of other trainers.
    cells = re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^\|[^|]*\|(.*)", text, re.M)))
    # One line may have several commands beside each other, or a command behind others.
    parts = [
        part.strip() for line in [*lines, *cells] for part in re.split(r"   +|&+(?: |$)|\|\|? | > |; (?:do )?", line)
    ]
    parts = [part.removesuffix("'") if part.count("'") % 2 else part for part in parts]  # ssh HOST 'cd PROJECT && ...'
    return [part for part in parts if re.match(LAUNCHERS, part) and re.search(r"\.(py|sh)\b| -m ", part)]


COMMANDS = [(page.name, command) for page in PAGES for command in dict.fromkeys(commands_of(page))]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command_of_a_page_is_accepted(page, command, tmp_path, monkeypatch):
    """The TOML files that a page shows exist."""
    (tmp_path / "mine.toml").touch()
    for name, values in TOML.findall((REPO / page if page == "README.md" else REPO / "docs" / page).read_text()):
        (tmp_path / (name or "mine.toml")).write_text(values)
    monkeypatch.chdir(tmp_path)
    for placeholder, value in PLACEHOLDERS.items():
        command = re.sub(placeholder, value, command)
    words = shlex.split(command)
    if "-m" in words:
        assert util.find_spec(words[words.index("-m") + 1])
        return
    at = next(at for at, word in enumerate(words) if word.endswith((".py", ".sh")))
    script, argv = words[at].removeprefix("./"), words[at + 1 :]
    if script in CREATED:
        return
    assert (REPO / script).is_file()
    if script in TRAINS:
        not_ours = ("--yes", "--post_norm")  # of start_training.sh alone; added by the page on hacking
        config.parse_args([word for word in argv if word not in not_ours])
    elif script in OPTIONS:
        read_flags(OPTIONS[script], argv, "")


def test_every_page_that_shows_the_trainer_is_read():
    found = {page for page, command in COMMANDS if "train" in command}
    assert found >= {"README.md", "gpt2.md", "from-other-trainers.md"}
