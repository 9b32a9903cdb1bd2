"""Options from flags and presets; test_refused.py has their errors."""

import ast
import dataclasses
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import REPO, refusal, run_here
from ground import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

import generate
import hellaswag_eval
import prepare_dataset
from model import GPT
from optim import OPTIMIZERS
from steadygpt.base.options import OTHER_TRAINERS, UserError, options_of
from steadygpt.config import FIELDS, FINEWEB_EDU_TOKENS, PRESETS, TrainConfig, parse_args
from steadygpt.machine.ranks import Ranks
from steadygpt.start.memory import estimate_memory


def parse(*argv: str) -> TrainConfig:
    return parse_args(list(argv))[0]


# What an H100 has needed with torch.compile, in benchmarks/RESULTS.md, and how close the estimate is.
MEASURED_GB = {"gpt2": (15.5, 0.01), "modern": (16.9, 0.01), "gpt2-1b": (24.5, 0.01), "small_32k": (5.23, 0.08)}


def test_estimated_memory_in_fp32_is_what_an_h100_has_needed():
    config = parse("--config", "gpt2", "--precision", "fp32")
    with torch.device("meta"):
        model = GPT(config.shape(50257), initialize=False)
    memory, _ = estimate_memory(config, model, Ranks(torch.device("cuda")))
    assert sum(memory.values()) / 1e9 == pytest.approx(28.4, rel=0.01)


@pytest.mark.pages
@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_parameters_and_memory_of_presets_are_correct(preset):
    """They assume GPT-2's vocabulary, bf16 and torch.compile, as on a GPU."""
    config, table = parse("--config", preset), (REPO / "docs/models.md").read_text()
    config.check_together()
    stated = re.search(
        rf"^\| `{preset}` \| ([\d,.]+) M \| ([\d.]+) GB \| (?:(\d+) GB|anything) \|$",
        table,
        re.MULTILINE,
    )
    with torch.device("meta"):
        model = GPT(config.shape(50257 if stated[3] else 257), initialize=False)
    memory, _ = estimate_memory(dataclasses.replace(config, precision="bf16"), model, Ranks(torch.device("cuda")))

    def rounded_like(number: float, text: str) -> str:
        return f"{number:,.{len(text.partition('.')[2])}f}"

    assert rounded_like(model.num_parameters() / 1e6, stated[1]) == stated[1]
    assert rounded_like(sum(memory.values()) / 1e9, stated[2]) == stated[2]
    if preset in MEASURED_GB:
        gb, within = MEASURED_GB[preset]
        assert sum(memory.values()) / 1e9 == pytest.approx(gb, rel=within)
    assert stated[3] is None or 1.1 * sum(memory.values()) / 1e9 < int(stated[3])
    description = tomllib.loads((PRESETS / f"{preset}.toml").read_text())["description"]
    assert f": {stated[1]} M parameters, context {config.context_length:,}, " in description
    assert stated[3] is None or description.endswith(f" a GPU of {stated[3]} GB")
    for processes in (1, 2, 4, 8) if stated[3] else (1,):
        assert config.with_tokens_of_step(processes).grad_accum_steps(processes)


def test_flags_override_the_preset_and_presets_what_they_include(tmp_path):
    mine = str(tmp_path / "mine.toml")
    Path(mine).write_text('config = "gpt2-xl"\nnum_layers = 4\nmax_lr = 1\nuse_tensorboard = true\n')
    config, given_options = parse_args(["--config", mine, "--num_layers", "6"])
    assert (config.num_layers, config.max_lr, config.use_tensorboard, config.embd_size) == (6, 1.0, True, 1600)
    assert (config.config, given_options["num_layers"]) == (mine, "flag")
    assert {given_options[name] for name in ("max_lr", "use_tensorboard", "embd_size")} == {"preset"}
    assert "dropout" not in given_options


@pytest.mark.parametrize(("words", "name", "value"), [
    ("--num-layers 3", "num_layers", 3), ("--max-lr=2e-3", "max_lr", 2e-3), ("--bias=Yes", "bias", True),
    ("--bias", "bias", True), ("--bias --seed 3", "bias", True), ("--mini_batch_size auto", "mini_batch_size", 0),
    ("--bias=off", "bias", False), ("--bias false", "bias", False), ("--bias=NO", "bias", False), ("", "bias", True),
    ("--mixed-precision no", "precision", "fp32"), ("--mixed_precision=fp16", "precision", "fp16"),
    ("--compile=False", "compile", "off"), ("--compile True", "compile", "on"), ("--compile auto", "compile", "auto"),
    ("--resume", "resume", "latest"), ("--resume --seed 3", "resume", "latest"), ("--resume best", "resume", "best"),
    ("--resume_from_checkpoint a.pt", "resume", "a.pt"), ("--resume-from-checkpoint=a.pt", "resume", "a.pt"),
    ("--checkpoint-dir=a-b", "checkpoint_dir", "a-b"), ("--data-dir c-d", "data_dir", "c-d"),
    ("--sample-prompt=--e-f=g-h", "sample_prompt", "--e-f=g-h"), ("--run_name a/b..c", "run_name", "a/b..c"),
    *((f"--{name}=0", name, 0) for name in (
        "checkpoint_freq", "checkpoint_minutes", "eval_freq", "hellaswag_freq", "sample_freq", "max_hours")),
])  # fmt: skip
def test_spellings_of_flags_and_values(words, name, value):
    assert getattr(parse(*words.split()), name) == value


def test_every_switch_can_be_turned_off_in_every_spelling():
    switches = [name for name, f in FIELDS.items() if f.type is bool]
    for spelling in ("--no_{0}", "--no-{1}", "--no-{0}", "--{1}=False", "--{0}=off"):
        off = [spelling.format(name, name.replace("_", "-")) for name in switches]
        config = parse("--resume", *(f"--{name}" for name in switches), *off)
        assert not [name for name in switches if getattr(config, name)], spelling


def test_suggested_options_exist():
    of_commands = prepare_dataset.PrepareOptions, generate.GenerateOptions, hellaswag_eval.EvaluationOptions
    commands = {kind.__name__: kind for kind in (TrainConfig, *of_commands)}
    options = {command: {*options_of(kind)} for command, kind in commands.items()}
    elsewhere = tomllib.loads(OTHER_TRAINERS.read_text())
    assert elsewhere.keys() == commands.keys()
    allowed = {*options["TrainConfig"], *options["PrepareOptions"], "nproc_per_node"}  # the last one is torchrun's
    for command, suggestions in elsewhere.items():
        for suggestion, theirs in suggestions.items():
            assert not options[command] & {*theirs}
            assert {*re.findall(r"--(\w+)", suggestion)} - {"flag"} <= options[command] | allowed, suggestion


# Flags of other trainers -> what the error must name.
OTHERS = {
    "max_position_embeddings": "--context_length", "rotary_emb_base": "--rotary_base", "drop_last": "epoch",
    "num_eigenstates": "GPT", "chunk_size": "GPT", "use_gradient_checkpointing": "--activation_",
    "pct_start": "--schedule cosine", "fp8": "--precision bf16", "use_fp8": "--precision bf16", "amp": "--precision",
    "tf32": "--precision fp32", "cudnn_benchmark": "cuDNN", "cudnn_deterministic": "--deterministic",
    "streaming": "prepare_", "ds_config": "--sharding fsdp", "deepspeed_config": "--sharding fsdp",
    "use_8bit_optim": "--sharding fsdp",
    "bucket_name": "--mirror", "pretokenized": "--data_dir", "subset_size": "--max_files", "n_layers": "--num_layers",
    "dim": "--embd_size", "d_ff": "--intermediate_size", "benchmark": "--dry_run", "vocab_size": "tokenizer",
    "compile_model": "--compile", "use_flash_attn": "PyTorch", "min_learning_rate": "--min_lr",
    "checkpoint_every_n_files": "--checkpoint_minutes", "mode": "--config", "hidden_dropout": "--dropout",
    "master_port": "torchrun", "wandb_entity": "WANDB_ENTITY", "global_batch_size": "--total_batch_size",
}  # fmt: skip


@pytest.mark.parametrize("flag", OTHERS)
def test_flags_of_other_trainers_have_an_answer(flag):
    with refusal(f"'--{flag}'", OTHERS[flag]) as refused:
        parse_args([f"--{flag.replace('_', '-')}", "1"])
    assert "--help" not in str(refused.value)


def test_a_plan_without_data_assumes_an_epoch_of_fineweb_edu():
    tokens, context, shard = 9_853_989_344, 1024, 10**8  # the tokens of build-nanogpt's shards
    rows = tokens // shard * ((shard - 1) // context) + (tokens % shard - 1) // context
    steps = math.ceil(rows * context / TrainConfig().total_batch_size)
    assert steps * TrainConfig().total_batch_size == FINEWEB_EDU_TOKENS


def test_no_flag_is_a_prefix_of_a_torchrun_flag():
    """torchrun would read such a flag as an abbreviation of its own and fail before the script starts."""
    torchrun_flags = [option for action in get_args_parser()._actions for option in action.option_strings]
    names = [name for field, f in FIELDS.items() for name in (field, *f.metadata["aliases"])]
    our_flags = [f"--{name}" if len(name) > 1 else f"-{name}" for name in names]
    assert "--nproc-per-node" in torchrun_flags
    assert "--run-path" in torchrun_flags
    for flag in our_flags + [flag.replace("_", "-") for flag in our_flags]:
        assert not [option for option in torchrun_flags if option.startswith(flag)], flag
        launched = get_args_parser().parse_args(["--standalone", "train.py", flag, "x"])
        assert launched.training_script_args == [flag, "x"]


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = capsys.readouterr().out
    listed = text[text.index("\nmodel:") :]  # below the usage
    assert re.findall(r"^  --(\w+)", listed, re.MULTILINE) == list(FIELDS)
    assert all(f.metadata["text"] for f in FIELDS.values())
    assert "--total_batch_size INT" in listed
    words = " ".join(listed.split())
    assert "tokens per step, over all ranks (default: 524288, on resume: ask)" in words
    assert "steps between log lines (default: 1)" in words
    assert "(default: on)" in words
    assert all(f"\n{f.metadata['group']}:" in text for f in FIELDS.values())


def test_micro_steps_are_those_of_each_rank():
    config = parse("--mini_batch_size", "4", "--context_length", "2048", "--micro_steps", "8")
    tokens = [config.with_tokens_of_step(ranks).total_batch_size for ranks in (1, 2, 8)]
    assert tokens == [65536, 131072, 524288]
    assert [config.with_tokens_of_step(ranks).grad_accum_steps(ranks) for ranks in (1, 2, 8)] == [8, 8, 8]
    assert TrainConfig().with_tokens_of_step(8) == TrainConfig()


def test_total_batch_size_and_micro_steps_override_each_other(tmp_path):
    production = parse("--config", "production", "--total_batch_size", "131072")
    assert (production.micro_steps, production.total_batch_size) == (0, 131072)
    config, given_options = parse_args(["--config", "quickstart", "--micro_steps", "2"])
    assert config.with_tokens_of_step(1).total_batch_size == 2 * 8 * 256
    assert "total_batch_size" not in given_options
    (tmp_path / "mine.toml").write_text('config = "production"\ntotal_batch_size = 131072\n')
    assert parse("--config", str(tmp_path / "mine.toml")).micro_steps == 0


sizes = st.integers(1, 64)


@given(sizes, sizes, sizes, sizes, st.just(0) | sizes)
@settings(max_examples=50)
def test_rows_split_a_step_evenly_or_the_suggested_sizes_do(ranks, rows, context, rows_of_step, rest):
    unit = ranks * context
    total = unit * rows_of_step + rest
    config = TrainConfig(total_batch_size=total, mini_batch_size=rows, context_length=context)
    try:
        even = config.with_even_rows(ranks)
        assert even.grad_accum_steps(ranks) * even.mini_batch_size * unit == total
        assert not [more for more in range(even.mini_batch_size + 1, rows + 1) if total % (more * unit) == 0]
    except UserError as error:
        offered = total // unit * unit + unit
        assert total % unit and f" {offered:,}" in str(error)
        dataclasses.replace(config, total_batch_size=offered).with_even_rows(ranks)
        if total % context == 0:
            config.with_even_rows(int(re.findall(r"\d+", str(error))[-1]))  # on so many processes


OF_STEPS = ("activation", "norm", "optimizer", "schedule", "sharding", "precision", "compile")


@pytest.mark.parametrize("name", OF_STEPS)
def test_a_choice_that_is_only_half_added_trains_nothing(workdir, monkeypatch, name):
    """Everything that a step depends on: what is not implemented ends the command, instead of training otherwise."""
    metadata = FIELDS[name].metadata
    monkeypatch.setattr(FIELDS[name], "metadata", {**metadata, "choices": (*metadata["choices"], "new")})
    with pytest.raises((KeyError, ValueError), match="new"):
        run_here(f"--{name}", "new")
    assert not Path("checkpoints/metrics.jsonl").exists() or not metrics("checkpoints", "loss")


def test_each_option_is_read_somewhere():
    """An option without code would be ignored in silence."""
    read = set()
    for file in (*REPO.glob("*.py"), *REPO.glob("steadygpt/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert set(FIELDS) <= read


def test_each_optimizer_has_its_function():
    assert tuple(OPTIMIZERS) == FIELDS["optimizer"].metadata["choices"]


def test_the_rows_of_a_huge_step_are_found_at_once():
    config = TrainConfig(total_batch_size=2**40, context_length=1)
    assert config.possible_rows(1) == [2**n for n in range(41)]
    with refusal("--total_batch_size ", " 1,125,899,906,842,624;", " 1,099,511,627,776"):
        TrainConfig(total_batch_size=2**50)
