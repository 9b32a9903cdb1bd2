"""What a run starts from: the options of a resumed run, and what the command changes."""

import dataclasses
import shlex
from pathlib import Path

import pytest
from ground import options_of, run_content

from steadygpt.base.options import UserError, read_flags
from steadygpt.base.text import labelled
from steadygpt.checkpoint.files import as_checkpoint
from steadygpt.config import FIELDS, STORED, TrainConfig, parse_args
from steadygpt.start.find import with_stored_options


def parse(*argv: str) -> TrainConfig:
    return parse_args(list(argv))[0]


def stored(config: TrainConfig, **changes) -> dict:
    """Return the options that a checkpoint of a run with this configuration has."""
    return {name: getattr(config, name) for name in STORED} | changes


def test_changed_options_are_reported():
    before = stored(TrainConfig(dropout=0.1, mini_batch_size=8, data_dir="old", embd_size=96))
    flags = ["--dropout=0.2", "--mini_batch_size=4", "--data_dir=new", "--max_lr=1e-3", "--allow_changes"]
    config, notes = with_stored_options(*parse_args(flags), before)
    assert (config.dropout, config.mini_batch_size, config.data_dir, config.embd_size) == (0.2, 4, "new", 96)
    changes = ["dropout: 0.1 -> 0.2", "mini_batch_size: 8 -> 4", "data_dir: 'old' -> 'new'"]
    assert notes == [labelled("changed", change) for change in changes]


def other_value(name: str) -> object:
    """Return a value of an option that is not its default."""
    default = FIELDS[name].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        choices = FIELDS[name].metadata["choices"] or ("other",)
        return next(choice for choice in choices if choice not in (default, "auto"))
    return default / 2 or 0.5 if isinstance(default, float) else abs(2 * default) or 1


@pytest.mark.parametrize("name", STORED)
def test_a_resume_treats_each_option_as_its_declaration_says(name):
    """--help shows what each declares."""
    rule = FIELDS[name].metadata["on_resume"]
    old = FIELDS[name].default
    new = other_value(name)
    before = stored(TrainConfig())
    command = dataclasses.replace(TrainConfig(), **{name: new})
    assert with_stored_options(TrainConfig(), {}, before | {name: new}) == (command, [])
    if rule != "free":
        advice = "--allow_changes" if rule == "ask" else "--checkpoint_dir"
        with pytest.raises(UserError, match=f"^--{name} .*{new!r}, .*{old!r}; .*{advice}"):
            with_stored_options(command, {name: "flag"}, before)
        command = dataclasses.replace(command, allow_changes=True)
    if rule == "never":
        with pytest.raises(UserError, match=f"^--{name} .*{new!r}, .*{old!r}; .*--checkpoint_dir"):
            with_stored_options(command, {name: "flag"}, before)
    else:
        notes = [labelled("changed", f"{name}: {old!r} -> {new!r}")]
        assert with_stored_options(command, {name: "flag"}, before) == (command, notes)
    kept, [note] = with_stored_options(command, {name: "preset"}, before)
    assert getattr(kept, name) == old
    flags = note.partition("type ")[2]
    assert read_flags(TrainConfig, shlex.split(flags)) == {name: new}


def test_the_command_of_the_first_start_also_resumes():
    """What was settled for the whole run holds, whether the command repeats what was asked or what was settled."""
    argv = ["--config", "quickstart", "--max_steps", "50", "--precision", "auto", "--tokenizer", "auto"]
    before = stored(parse(*argv), precision="bf16", tokenizer="gpt2")
    for repeated in ([], ["--precision", "bf16", "--tokenizer", "gpt2"]):
        config, changes = with_stored_options(*parse_args([*argv, *repeated, "--resume"]), before)
        assert (config.precision, config.tokenizer, changes) == ("bf16", "gpt2", [])


def test_an_option_that_is_settled_at_each_launch_is_stored_as_it_was_asked():
    argv = ["--mini_batch_size", "auto", "--warmup_steps", "-1", "--max_steps", "0", "--compile", "auto"]
    config, changes = with_stored_options(*parse_args(["--resume"]), stored(parse(*argv)))
    assert (config.mini_batch_size, config.warmup_steps, config.max_steps, config.compile) == (0, -1, 0, "auto")
    assert changes == []


def test_a_preset_does_not_change_a_run_that_resumes():
    """The preset names one folder of data and 20 steps; the first command mixed two and took 40."""
    Path("mine.toml").write_text('data_dir = "one"\nmax_steps = 20\nshuffle_rows = false\nuse_wandb = true\n')
    before = stored(parse("--config", "mine.toml", "--mix", "one,two", "--max_steps", "40", "--shuffle_rows", "on"))
    config, [note] = with_stored_options(*parse_args(["--config", "mine.toml", "--resume"]), before)
    assert (config.mix, config.max_steps, config.shuffle_rows) == ("one,two", 40, True)
    assert config.use_wandb  # an option of a launch
    assert note.startswith(labelled("preset", "mine.toml: ignored"))
    assert note.endswith("type --max_steps 20 --data_dir one --shuffle_rows off")
    flags = ["--config", "mine.toml", "--resume", "--data_dir", "three"]
    config, _ = with_stored_options(*parse_args(flags), before)
    assert (config.mix, config.data_dir, config.max_steps) == ("", "three", 40)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in STORED])
def test_an_option_of_a_launch_is_not_taken_from_the_checkpoint(name):
    launch = dataclasses.replace(TrainConfig(), **{name: "https://a.b/c" if name == "alert_url" else other_value(name)})
    assert with_stored_options(TrainConfig(), {}, stored(launch)) == (TrainConfig(), [])
    assert with_stored_options(launch, {name: "flag"}, stored(TrainConfig())) == (launch, [])


@pytest.mark.parametrize(("before", "flags"), [
    (["--min_lr=1e-6"], ["--max_lr=5e-5", "--allow_changes"]),
    (["--sharding=fsdp"], ["--shard_size=2"]),
])  # fmt: skip
def test_flags_that_need_other_options_accept_them_from_the_checkpoint(before, flags):
    with_stored_options(*parse_args(["--resume", *flags]), stored(parse(*before)))


def test_options_missing_from_the_checkpoint_keep_their_defaults():
    content = run_content(3)
    del options_of(content)["sharding"]
    found = options_of(as_checkpoint(content, Path("latest.pt")))
    defaults = {name: f.default for name, f in FIELDS.items() if name in STORED}
    assert found == defaults | {"total_batch_size": 4 * TrainConfig.context_length}
