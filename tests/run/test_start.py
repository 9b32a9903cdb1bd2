"""The options of a resumed run."""

import dataclasses
from pathlib import Path

import pytest
from conftest import run_content
from test_config import parse

from steadygpt.base.options import UserError, shown_options
from steadygpt.checkpoint.files import as_checkpoint
from steadygpt.config import FIELDS, TrainConfig, parse_args
from steadygpt.run.start import resume_config


@pytest.mark.parametrize(
    "name",
    "seed tokenizer shuffle_shards shuffle_rows num_layers num_heads embd_size context_length bias".split(),
)
def test_model_and_data_order_cannot_change(name):
    config = TrainConfig()
    value = getattr(config, name)
    saved = vars(config) | {name: not value if type(value) is bool else 2 * value}
    with pytest.raises(UserError, match=f"--{name} is {value!r}, but the checkpoint was trained with {saved[name]!r}"):
        resume_config(saved, config, {name: "flag"})
    assert getattr(resume_config(saved, config, {})[0], name) == saved[name]


def test_changed_options_are_reported():
    saved = dataclasses.asdict(TrainConfig()) | {"dropout": 0.1, "mini_batch_size": 8, "data_dir": "old"}
    saved |= {"embd_size": 96, "checkpoint_dir": "there", "dry_run": "plan"}
    flags = ["--dropout=0.2", "--mini_batch_size=4", "--data_dir=new", "--max_lr=1e-3", "--allow_changes"]
    config, given_options = parse_args(flags)
    config, changes = resume_config(saved, config, given_options)
    assert (config.dropout, config.mini_batch_size, config.data_dir, config.embd_size) == (0.2, 4, "new", 96)
    assert changes == ["dropout: 0.1 -> 0.2", "data_dir: 'old' -> 'new'", "mini_batch_size: 8 -> 4"]


@pytest.mark.parametrize("name", [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "ask"])
def test_optimization_option_needs_allow_changes(name):
    config = TrainConfig()
    value = getattr(config, name)
    saved = vars(config) | {name: "constant" if name == "schedule" else value / 2 or 0.5}
    with pytest.raises(UserError, match=f"--{name} is .*trained with {saved[name]!r}; .*--allow_changes"):
        resume_config(saved, config, {name: "flag"})
    assert getattr(resume_config(saved, config, {})[0], name) == saved[name]
    allowed = dataclasses.replace(config, allow_changes=True)
    _, [change] = resume_config(saved, allowed, {name: "flag"})
    assert change == f"{name}: {saved[name]!r} -> {value!r}"


def test_warmup_of_the_checkpoint_overrides_that_of_a_preset():
    """The warm-up was shortened to fit the run, and the command that started a run must also resume it."""
    config, given_options = parse_args(["--config", "quickstart", "--max_steps", "50", "--resume"])
    saved = dataclasses.asdict(config) | {"warmup_steps": 5}
    assert resume_config(saved, config, given_options) == (dataclasses.replace(config, warmup_steps=5), [])


def test_launch_options_are_not_taken_from_the_checkpoint():
    saved = dataclasses.asdict(TrainConfig()) | {
        "config": "quickstart", "dry_run": True, "checkpoint_dir": "there", "resume": "best", "list_checkpoints": True
    }  # fmt: skip
    assert resume_config(saved, TrainConfig(), {}) == (TrainConfig(), [])


@pytest.mark.parametrize(("saved", "flags"), [
    (["--min_lr=1e-6"], ["--max_lr=5e-5", "--allow_changes"]),
    (["--sharding=fsdp"], ["--cpu_offload"]),
])  # fmt: skip
def test_flags_that_need_other_options_accept_them_from_the_checkpoint(saved, flags):
    config, given_options = parse_args(["--resume", *flags])
    resume_config(dataclasses.asdict(parse(*saved)), config, given_options)


def test_options_missing_from_the_checkpoint_keep_their_defaults():
    content = run_content(3)
    del content["train_config"]["sharding"]
    content["train_config"]["no_longer_there"] = 1
    assert as_checkpoint(content, Path("latest.pt"))["train_config"] == shown_options(
        TrainConfig(total_batch_size=4096)
    )
