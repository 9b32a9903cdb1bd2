"""What a run starts from: the options of a resumed run, and what the command changes."""

import dataclasses
from pathlib import Path

import pytest
from ground import options_of, run_content

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import as_checkpoint
from steadygpt.config import FIELDS, STORED, TrainConfig, parse_args
from steadygpt.start.find import resumed


def parse(*argv: str) -> TrainConfig:
    return parse_args(list(argv))[0]


def stored(config: TrainConfig, **changes) -> dict:
    """Return the options that a checkpoint of a run with this configuration has."""
    return {name: getattr(config, name) for name in STORED} | changes


@pytest.mark.parametrize(
    "name",
    "seed tokenizer shuffle_shards shuffle_rows num_layers num_heads embd_size context_length bias".split(),
)
def test_model_and_data_order_cannot_change(name):
    config = TrainConfig(tokenizer="bytes")
    value = getattr(config, name)
    other = not value if type(value) is bool else 2 * value
    before = stored(config, **{name: other})
    with pytest.raises(UserError, match=f"--{name} is {value!r}, but the checkpoint was trained with {other!r}"):
        resumed(before, config, {name: "flag"})
    assert getattr(resumed(before, config, {})[0], name) == other


def test_changed_options_are_reported():
    before = stored(TrainConfig(dropout=0.1, mini_batch_size=8, data_dir="old", embd_size=96))
    flags = ["--dropout=0.2", "--mini_batch_size=4", "--data_dir=new", "--max_lr=1e-3", "--allow_changes"]
    config, changes = resumed(before, *parse_args(flags))
    assert (config.dropout, config.mini_batch_size, config.data_dir, config.embd_size) == (0.2, 4, "new", 96)
    assert changes == ["dropout: 0.1 -> 0.2", "data_dir: 'old' -> 'new'", "mini_batch_size: 8 -> 4"]


OTHER_WORDS = {"schedule": "constant"}  # values that are no defaults


@pytest.mark.parametrize("name", [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "ask"])
def test_optimization_option_needs_allow_changes(name):
    config = TrainConfig()
    value = getattr(config, name)
    assert name in OTHER_WORDS or isinstance(value, int | float), f"add a value of --{name} to OTHER_WORDS"
    other = OTHER_WORDS.get(name) or value / 2 or 0.5
    before = stored(config, **{name: other})
    with pytest.raises(UserError, match=f"--{name} is .*trained with {other!r}; .*--allow_changes"):
        resumed(before, config, {name: "flag"})
    assert getattr(resumed(before, config, {})[0], name) == other
    allowed = dataclasses.replace(config, allow_changes=True)
    _, [change] = resumed(before, allowed, {name: "flag"})
    assert change == f"{name}: {other!r} -> {value!r}"


def test_the_command_of_the_first_start_also_resumes():
    """What was settled for the whole run holds, whether the command repeats what was asked or what was settled."""
    argv = ["--config", "quickstart", "--max_steps", "50", "--precision", "auto", "--tokenizer", "auto"]
    before = stored(parse(*argv), precision="bf16", tokenizer="gpt2")
    for repeated in ([], ["--precision", "bf16", "--tokenizer", "gpt2"]):
        config, changes = resumed(before, *parse_args([*argv, *repeated, "--resume"]))
        assert (config.precision, config.tokenizer, changes) == ("bf16", "gpt2", [])


def test_an_option_that_is_settled_at_each_launch_is_stored_as_it_was_asked():
    argv = ["--mini_batch_size", "auto", "--warmup_steps", "-1", "--max_steps", "0", "--compile", "auto"]
    config, changes = resumed(stored(parse(*argv)), *parse_args(["--resume"]))
    assert (config.mini_batch_size, config.warmup_steps, config.max_steps, config.compile) == (0, -1, 0, "auto")
    assert changes == []


def test_a_flag_of_the_first_start_still_overrides_the_preset(tmp_path, monkeypatch):
    """The preset names one folder of data; the first command mixed two."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('data_dir = "one"\n')
    before = stored(parse_args(["--config", "mine.toml", "--mix", "one,two"])[0])
    config, changes = resumed(before, *parse_args(["--config", "mine.toml", "--resume"]))
    assert (config.mix, changes) == ("one,two", [])
    config, changes = resumed(before, *parse_args(["--config", "mine.toml", "--resume", "--data_dir", "three"]))
    assert (config.mix, config.data_dir) == ("", "three")


def test_launch_options_are_not_taken_from_the_checkpoint():
    launch = TrainConfig(config="quickstart", dry_run=True, checkpoint_dir="there", resume="best", run_name="a")
    assert resumed(stored(launch), TrainConfig(), {}) == (TrainConfig(), [])


@pytest.mark.parametrize(("before", "flags"), [
    (["--min_lr=1e-6"], ["--max_lr=5e-5", "--allow_changes"]),
    (["--sharding=fsdp"], ["--shard_size=2"]),
])  # fmt: skip
def test_flags_that_need_other_options_accept_them_from_the_checkpoint(before, flags):
    resumed(stored(parse(*before)), *parse_args(["--resume", *flags]))


def test_options_missing_from_the_checkpoint_keep_their_defaults():
    content = run_content(3)
    del options_of(content)["sharding"]
    found = options_of(as_checkpoint(content, Path("latest.pt")))
    defaults = {name: f.default for name, f in FIELDS.items() if name in STORED}
    assert found == defaults | {"total_batch_size": 4 * TrainConfig.context_length}
