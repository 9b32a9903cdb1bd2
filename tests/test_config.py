"""One list of options: flags, TOML and checkpoints agree, and mistakes are named."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from config import FIELDS, PRESETS, TrainConfig, parse_args, resume_config
from errors import UserError


def parse(*argv: str) -> TrainConfig:
    return parse_args(list(argv))[0]


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as raised:
        parse_args(list(argv))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_defaults_train_gpt2_on_fineweb_edu():
    config = parse()
    assert (config.num_layers, config.num_heads, config.embd_size, config.context_length) == (12, 12, 768, 1024)
    assert (config.total_batch_size, config.mini_batch_size, config.num_epochs) == (524288, 32, 5)
    assert (config.max_lr, config.min_lr, config.warmup_steps, config.weight_decay) == (1e-3, 1e-4, 715, 0.1)
    assert config.data_dir == "data/edu_fineweb10B" and config.shuffle_rows and config.shuffle_shards


def test_flags_are_written_with_dashes_or_underscores():
    assert parse("--num-layers", "3", "--max-lr=2e-3") == parse("--num_layers=3", "--max_lr", "2e-3")


def test_defaults_then_config_then_flags(tmp_path):
    (tmp_path / "mine.toml").write_text("num_layers = 4\nmax_lr = 1\nuse_tensorboard = true\n")
    config, given_options = parse_args(["--config", str(tmp_path / "mine.toml"), "--num_layers", "6"])
    assert (config.num_layers, config.max_lr, config.use_tensorboard, config.num_heads) == (6, 1.0, True, 12)
    assert given_options == {"config", "num_layers", "max_lr", "use_tensorboard"}


@pytest.mark.parametrize(("argv", "value"), [
    (["--bias"], True), (["--bias", "on"], True), (["--bias=off"], False), (["--bias", "false"], False), ([], True),
])  # fmt: skip
def test_switches(argv, value):
    assert parse(*argv).bias is value


def test_mixed_precision_says_the_same_as_precision():
    assert [parse("--mixed-precision", word).precision for word in ("no", "fp16", "bf16")] == ["fp32", "fp16", "bf16"]


def test_a_bare_resume_means_latest():
    assert parse("--resume", "--seed", "3").resume == "latest"
    assert parse("--resume", "best").resume == "best"


def test_mistakes_are_named(tmp_path):
    assert mistake("--num_layer", "3") == "unknown argument '--num_layer'; did you mean --num_layers?"
    assert "--seed" in mistake("--seed", "x") and "'x'" in mistake("--seed", "x")
    assert "on or off" in mistake("--bias", "maybe")
    assert "fp33" in mistake("--precision", "fp33") and "bf16" in mistake("--precision", "fp33")
    assert "--embd_size 100 is not divisible by --num_heads 12" in mistake("--embd_size", "100")
    assert "--max_lr is nan" in mistake("--max_lr", "nan")
    assert "--cpu_offload needs --sharding fsdp" in mistake("--cpu_offload")
    for flag in ("--mini_batch_size", "--context_length", "--keep_checkpoints", "--log_freq"):
        assert f"{flag} is 0; expected at least 1" in mistake(flag, "0")
    assert "test" in mistake("--config", "no-such-preset")
    for text, words in {
        "num_layer = 4": ["num_layer", "num_layers"],
        "num_layers = 'four'": ["num_layers", "'four'", "int"],
        "bias = 1": ["bias", "bool"],
        "num_layers = ": ["not TOML"],
    }.items():
        (tmp_path / "bad.toml").write_text(text)
        message = mistake("--config", str(tmp_path / "bad.toml"))
        assert "bad.toml" in message and all(word in message for word in words)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_presets_can_be_read_and_split_into_batches(preset):
    assert parse("--config", preset).grad_accum_steps(1) >= 1


def test_no_flag_is_a_prefix_of_one_of_torchruns():
    """torchrun would take it for its own and stop before the script starts."""
    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    ours = [f"--{name}" for name in [*FIELDS, "mixed_precision"]]
    for flag in ours + [flag.replace("_", "-") for flag in ours]:
        assert not [option for option in theirs if option.startswith(flag)], flag


def test_help_tells_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    told = capsys.readouterr().out
    assert all(f"--{name} " in told for name in FIELDS)
    assert all(f.metadata["help"] for f in FIELDS.values())


# ---------------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_takes_the_checkpoints_options():
    saved = dataclasses.asdict(parse("--embd_size", "96", "--max_lr", "5e-4", "--checkpoint_dir", "there", "--dry_run"))
    config, given_options = parse_args(["--resume", "--min_lr", "1e-5"])
    config, changes = resume_config(saved, config, given_options)
    assert (config.embd_size, config.max_lr, config.min_lr, config.resume) == (96, 5e-4, 1e-5, "latest")
    assert config.checkpoint_dir == "checkpoints" and not config.dry_run  # of this start alone
    assert changes == ["min_lr: 0.0001 -> 1e-05"]


def test_what_a_checkpoint_is_cannot_be_contradicted():
    saved = dataclasses.asdict(parse("--embd_size", "96"))
    config, given_options = parse_args(["--resume", "--embd_size", "192"])
    with pytest.raises(UserError, match="--embd_size is 192, but the checkpoint was trained with 96"):
        resume_config(saved, config, given_options)
    config, given_options = parse_args(["--resume", "--embd_size", "96"])
    assert resume_config(saved, config, given_options)[1] == []


def test_options_that_a_checkpoint_does_not_know_keep_their_values():
    config, given_options = parse_args(["--resume"])
    assert resume_config({"no_longer_there": 1}, config, given_options)[0] == config


# ---------------------------------------------------------------------------------------------------------------------


def test_micro_steps():
    assert [TrainConfig().grad_accum_steps(ranks) for ranks in (1, 2, 4, 8)] == [16, 8, 4, 2]


sizes = st.integers(1, 64)


@given(sizes, sizes, sizes, st.integers(1, 20000))
@settings(max_examples=200, deadline=None)
def test_the_batch_sizes_that_an_error_offers_work(ranks, rows, context, total):
    config = TrainConfig(total_batch_size=total, mini_batch_size=rows, context_length=context)
    try:
        assert config.grad_accum_steps(ranks) * ranks * rows * context == total
        return
    except UserError as error:
        message = str(error)
    offered = re.findall(r"--total_batch_size ([\d,]+)(?: or ([\d,]+))? would work", message)[0]
    for size in filter(None, offered):
        dataclasses.replace(config, total_batch_size=int(size.replace(",", ""))).grad_accum_steps(ranks)
    for size in re.findall(r"or --mini_batch_size (\d+)$", message):
        dataclasses.replace(config, mini_batch_size=int(size)).grad_accum_steps(ranks)
