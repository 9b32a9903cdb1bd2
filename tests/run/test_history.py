"""The options of a resumed run: what it was asked for, what its first launch decided, and what the command changes."""

import dataclasses
from pathlib import Path

import pytest
from ground import launch_of, options_of, run_content, with_options
from test_config import parse

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import Launch, as_checkpoint
from steadygpt.config import FIELDS, STORED, TrainConfig, parse_args
from steadygpt.run.history import resume_options


def start(config=None, **decisions) -> Launch:
    """Return a launch that was asked for these options, in the record of a checkpoint."""
    return launch_of(config or TrainConfig(), **decisions)


@pytest.mark.parametrize(
    "name",
    "seed tokenizer shuffle_shards shuffle_rows num_layers num_heads embd_size context_length bias".split(),
)
def test_model_and_data_order_cannot_change(name):
    config = TrainConfig()
    value = getattr(config, name)
    before = start()
    before["options"][name] = other = not value if type(value) is bool else 2 * value
    with pytest.raises(UserError, match=f"--{name} is {value!r}, but the checkpoint was trained with {other!r}"):
        resume_options(before, config, {name: "flag"})
    assert getattr(resume_options(before, config, {})[0], name) == other


def test_changed_options_are_reported():
    before = start(TrainConfig(dropout=0.1, mini_batch_size=8, data_dir="old", embd_size=96))
    flags = ["--dropout=0.2", "--mini_batch_size=4", "--data_dir=new", "--max_lr=1e-3", "--allow_changes"]
    config, _, changes = resume_options(before, *parse_args(flags))
    assert (config.dropout, config.mini_batch_size, config.data_dir, config.embd_size) == (0.2, 4, "new", 96)
    assert changes == ["dropout: 0.1 -> 0.2", "data_dir: 'old' -> 'new'", "mini_batch_size: 8 -> 4"]


OTHER_WORDS = {"schedule": "constant"}  # values that are no defaults


@pytest.mark.parametrize("name", [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "ask"])
def test_optimization_option_needs_allow_changes(name):
    config = TrainConfig()
    value, before = getattr(config, name), start()
    assert name in OTHER_WORDS or isinstance(value, int | float), f"add a value of --{name} to OTHER_WORDS"
    before["options"][name] = other = OTHER_WORDS.get(name) or value / 2 or 0.5
    with pytest.raises(UserError, match=f"--{name} is .*trained with {other!r}; .*--allow_changes"):
        resume_options(before, config, {name: "flag"})
    assert getattr(resume_options(before, config, {})[0], name) == other
    allowed = dataclasses.replace(config, allow_changes=True)
    _, _, [change] = resume_options(before, allowed, {name: "flag"})
    assert change == f"{name}: {other!r} -> {value!r}"


def test_the_command_of_the_first_start_also_resumes():
    """What the first launch decided holds, whether the command repeats what was asked or what was decided."""
    argv = ["--config", "quickstart", "--max_steps", "50", "--precision", "auto", "--micro_steps", "4"]
    asked, _ = parse_args(argv)
    decided = {"warmup_steps": 5, "precision": "bf16", "total_batch_size": 1024}
    before = start(asked, **decided)
    assert resume_options(before, *parse_args([*argv, "--resume"]))[1:] == (decided, [])
    repeated = ["--resume", "--warmup_steps", "5", "--precision", "bf16", "--total_batch_size", "1024"]
    assert resume_options(before, *parse_args(repeated))[1:] == (decided, [])


def test_a_changed_option_is_decided_anew():
    before = start(TrainConfig(micro_steps=4), precision="bf16", total_batch_size=1024)
    flags = ["--resume", "--precision", "fp32", "--total_batch_size", "2048", "--allow_changes"]
    config, decisions, changes = resume_options(before, *parse_args(flags))
    assert (config.precision, config.total_batch_size, config.micro_steps, decisions) == ("fp32", 2048, 0, {})
    assert changes == ["precision: 'bf16' -> 'fp32'", "total_batch_size: 1024 -> 2048"]


def test_a_flag_of_the_first_start_still_overrides_the_preset(tmp_path, monkeypatch):
    """The preset names one folder of data; the first command mixed two."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('data_dir = "one"\n')
    before = start(parse_args(["--config", "mine.toml", "--mix", "one,two"])[0])
    config, _, changes = resume_options(before, *parse_args(["--config", "mine.toml", "--resume"]))
    assert (config.mix, changes) == ("one,two", [])
    config, _, changes = resume_options(
        before, *parse_args(["--config", "mine.toml", "--resume", "--data_dir", "three"])
    )
    assert (config.mix, config.data_dir) == ("", "three")


def test_launch_options_are_not_taken_from_the_checkpoint():
    launch = TrainConfig(config="quickstart", dry_run=True, checkpoint_dir="there", resume="best", run_name="a")
    assert resume_options(start(launch), TrainConfig(), {}) == (TrainConfig(), {}, [])


@pytest.mark.parametrize(("before", "flags"), [
    (["--min_lr=1e-6"], ["--max_lr=5e-5", "--allow_changes"]),
    (["--sharding=fsdp"], ["--shard_size=2"]),
])  # fmt: skip
def test_flags_that_need_other_options_accept_them_from_the_checkpoint(before, flags):
    resume_options(start(parse(*before)), *parse_args(["--resume", *flags]))


def test_options_missing_from_the_checkpoint_keep_their_defaults():
    content = with_options(run_content(3), no_longer_there=1)
    del options_of(content)["sharding"]
    found = options_of(as_checkpoint(content, Path("latest.pt")))
    assert found == {name: f.default for name, f in FIELDS.items() if name in STORED}
