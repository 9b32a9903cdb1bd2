"""Mixtures of sources: the order of their rows, phases, and runs whose mixture changes."""

import hashlib
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, refusal, scalars, write_data
from ground import asked_in, evaluations, launches, metrics, next_phase, phase_in, rows_given_in, sources_in
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from dataloader import Mixture, Order, RowStream
from steadygpt.base import durable
from steadygpt.config import TrainConfig, parse_args
from steadygpt.data import shards
from steadygpt.data.order import BLOCK_ROWS, Phase, shares_of, shares_of_block
from steadygpt.data.shards import Shard

weights = st.lists(st.fractions(Fraction(1, 20), 20), min_size=1, max_size=5)
rows = st.integers(0, 3 * BLOCK_ROWS)


class Numbers(Shard):
    """A shard in memory with the tokens from `first` on."""

    def __init__(self, first: int, num_tokens: int):
        super().__init__(Path("memory"), np.dtype("<u4"), 0, num_tokens)
        object.__setattr__(self, "array", first + np.arange(num_tokens))

    def tokens(self):
        return self.array

    def check_unchanged(self):
        pass


def stream_of(source: int, num_rows: int = 700) -> RowStream:
    """Return a source of two shards, with rows of one token: row r of source s has the token 1000 * s + r."""
    first, second = num_rows // 2, num_rows - num_rows // 2
    shards = [Numbers(1000 * source, first + 1), Numbers(1000 * source + first, second + 1)]
    return RowStream(shards, 1, Order(seed=7, shuffle_shards=True, shuffle_rows=True))


def mixture_of(shares: dict[str, int], number=0, first_row=0, given=None, seed=7) -> Mixture:
    """Return a mixture of the sources "0", "1", ..."""
    streams = {name: stream_of(int(name)) for name in shares}
    return Mixture(streams, Phase(number, first_row, shares, given or {}), seed)


def shares_by_name(parts: list[Fraction]) -> dict[str, int]:
    return shares_of_block({str(i): weight for i, weight in enumerate(parts)})


def inputs_of(mixture: Mixture, start: int, count: int) -> list[int]:
    return mixture.read(start, count)[:, 0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# the order


@given(weights)
@settings(max_examples=50)
def test_shares_are_the_weights_to_less_than_a_row_and_fill_a_block(parts):
    shares = shares_by_name(parts)
    assert sum(shares.values()) == BLOCK_ROWS
    assert all(abs(shares[str(i)] - BLOCK_ROWS * part / sum(parts)) < 1 for i, part in enumerate(parts))


def test_a_source_without_a_row_in_a_block_and_a_repeated_one_are_refused():
    sources = {name: ("data", name) for name in ("web", "math", "code")}

    def shares(web: str, math: str, code: str) -> dict[str, int]:
        return shares_of(sources, dict(zip(sources, map(Fraction, (web, math, code)), strict=True)))

    with refusal("--mix: ", " math ", " 1,", " 4,096;", " 19.6"):
        shares("50000", "1", "30011")
    assert shares("50000", "19.6", "30011")["math"] == 1
    with refusal("--mix: ", " math ", " 19.5,", " 4,096;", " 19.6"):
        shares("50000", "19.5", "30011")
    assert shares_of({"a": ("", "a"), "b": ("", "b")}, {"a": Fraction(1), "b": Fraction(999)})["a"] == 4
    with refusal("--mix: ", " web ", " copy "):
        shares_of({"web": ("data/a", "1f"), "copy": ("data/b", "1f")}, {"web": Fraction(1), "copy": Fraction(2)})


@given(weights, st.lists(st.integers(1, 900), min_size=1, max_size=8), rows)
@settings(max_examples=10)
def test_rows_do_not_depend_on_how_many_are_read_at_once(parts, counts, start):
    mixture, at_once = mixture_of(shares_by_name(parts)), mixture_of(shares_by_name(parts))
    expected, position, found = inputs_of(at_once, start, sum(counts)), start, []
    for count in counts:
        found += inputs_of(mixture, position, count)
        position += count
    assert found == expected


@given(weights)
@settings(max_examples=10)
def test_each_source_gives_its_own_stream_whatever_the_others(parts):
    shares = shares_by_name(parts)
    found = np.array(inputs_of(mixture_of(shares), 0, 2 * BLOCK_ROWS))
    for name, share in shares.items():
        of_source = found[found // 1000 == int(name)]
        assert len(of_source) == 2 * share
        assert of_source.tolist() == stream_of(int(name)).read(0, 2 * share)[:, 0].tolist()
        whole = of_source[: len(of_source) // 700 * 700].reshape(-1, 700)
        assert (np.sort(whole, axis=1) == 1000 * int(name) + np.arange(700)).all()  # each row once in each epoch


def test_neither_the_place_in_the_list_nor_the_name_matters():
    def order_of(config: TrainConfig) -> list[int]:
        identities = {"web": "1f", "code": "0a", "one": "1f", "two": "0a"}
        weights = {identities[name]: weight for name, (_, weight) in config.sources().items()}
        return inputs_of(
            Mixture({"1f": stream_of(1), "0a": stream_of(0)}, Phase(0, 0, shares_of_block(weights), {}), 7), 0, 500
        )

    first = order_of(TrainConfig(mix="data/web:7,data/code:2"))
    assert order_of(TrainConfig(mix="two=data/code:4,one=data/web:14")) == first
    assert order_of(TrainConfig(mix="data/web:7,data/code:3")) != first


def test_the_order_never_changes():
    mixture = mixture_of({"0": 2867, "1": 819, "2": 410}, number=2, first_row=1234, given={"0": 11, "2": 5, "9": 3})
    found = np.array(inputs_of(mixture, 1234, 10_000), "<i8")
    expected = "b0a87692ec6696cfe869645256de0388b8987b7ec862022d7795fd66d4f9088e"
    assert hashlib.sha256(found.tobytes()).hexdigest() == expected


# ---------------------------------------------------------------------------------------------------------------------
# phases


@given(st.lists(st.tuples(weights, st.integers(0, 6000)), min_size=2, max_size=4))
@settings(max_examples=10)
def test_a_change_at_any_row_leaves_each_source_a_prefix_of_its_own_stream(phases):
    phase, row, found = None, 0, []
    for parts, count in phases:
        shares = shares_by_name(parts)
        phase = next_phase(phase, row, shares)
        found += inputs_of(Mixture({name: stream_of(int(name)) for name in shares}, phase, 7), row, count)
        row += count
    tokens = np.array(found, int)
    for name, number in phase.rows_used_at(row, 7).items():
        of_source = tokens[tokens // 1000 == int(name)].tolist()
        assert of_source == stream_of(int(name)).read(0, number)[:, 0].tolist()


def test_a_phase_begins_where_the_mixture_changes():
    found, phase = [], None
    for row, shares in enumerate(({"a": 4096}, {"a": 4096}, {"a": 1, "b": 4095}, {"b": 4095, "a": 1}, {"a": 4096})):
        phase = next_phase(phase, 10 * row, shares)
        found.append((phase.number, phase.first_row))
    assert found == [(0, 0), (0, 0), (1, 20), (1, 20), (2, 40)]


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.fixture
def sources(workdir) -> Path:
    """A working directory with data/web, data/code and data/math."""
    for seed, name in enumerate(("web", "code", "math"), start=1):
        write_data(Path("data", name), num_tokens=(200, 600 + 100 * seed, 500), seed=seed)
    return workdir


LATEST = "checkpoints/latest.pt"
MIX, OTHER = ("--mix", "data/web:7,data/code:3"), ("--mix", "data/code:1,data/math:1")


def run_mixed(*flags: str) -> int:
    """Run train.main with a tiny model, and without --data_dir."""
    return train.main([*TINY, *flags])


def refused(flags: Sequence[str], *facts: str) -> None:
    with refusal(*facts):
        run_mixed(*flags)


def test_a_mixture_changes_only_on_request_and_each_source_continues(sources, capsys):
    assert run_mixed(*MIX, "--max_steps", "4") == 0
    web, code = (identity for _, identity in sources_in(LATEST).values())
    there = (" web 70.0% (data/web, SHA-256 ", " code 30.0% (data/code, SHA-256 ")
    refused([*OTHER, "--resume", "latest"], " code 50.0% (data/code, SHA-256 ", *there, "--allow_changes")
    assert run_mixed(*OTHER, "--resume", "latest", "--allow_changes", "--max_steps", "6") == 0
    assert "changed      mix: 'data/web:7,data/code:3' -> 'data/code:1,data/math:1'\n" in capsys.readouterr().out
    second_phase = phase_in(LATEST)
    assert run_mixed("--resume", "latest", "--max_steps", "8") == 0  # the mixture is that of the checkpoint
    assert [launch["first_step"] for launch in launches("checkpoints")] == [0, 4, 6]
    assert [*sources_in(LATEST)] == ["code", "math"]
    phase = phase_in(LATEST)
    assert (phase.number, phase.first_row) == (1, 16)
    assert phase.rows_used_before[web] + phase.rows_used_before[code] == 16
    assert phase == second_phase  # web is dropped, and kept in mind
    assert asked_in(LATEST)["max_steps"] == 8


def test_a_run_of_a_folder_goes_on_with_a_mixture_that_an_older_checkpoint_forgets(sources):
    assert run_mixed("--data_dir", "data/web", "--max_steps", "4", "--checkpoint_freq", "4") == 0
    [(_, web)] = sources_in(LATEST).values()
    assert run_mixed(*MIX, "--resume", "latest", "--allow_changes", "--max_steps", "8") == 0
    assert [*sources_in(LATEST)] == ["web", "code"]
    assert sources_in(LATEST)["web"][1] == web and rows_given_in(LATEST)[web] == 16
    assert run_mixed("--resume", "checkpoints/rolling_step_000004.pt", "--max_steps", "8") == 0
    assert ([*sources_in(LATEST)], phase_in(LATEST).number) == (["web"], 0)


def test_other_data_in_the_folder_of_a_run_is_told(sources, capsys):
    """Without --allow_changes it is refused: test_refused.py."""
    assert run_mixed("--data_dir", "data/web", "--max_steps", "4") == 0
    shutil.rmtree("data/web")
    write_data(Path("data/web"), seed=9)
    assert run_mixed("--resume", "latest", "--max_steps", "8", "--max_lr", "1e-4", "--allow_changes") == 0
    what = r"changed      training data: web 100.0% .*SHA-256 (\w+)\.\.\.\) -> web .*SHA-256 (\w+)"
    told = re.search(what, capsys.readouterr().out)
    assert told and told[1] != told[2]


def test_data_that_moved_is_the_same_data(sources):
    assert run_mixed(*MIX, "--max_steps", "4", "--eval_freq", "4") == 0
    Path("data/web").rename("elsewhere")
    refused(["--resume", "latest", "--max_steps", "8"], "data/web: ", "--mix")
    moved = ("--mix", "elsewhere:7,data/code:3", "--resume", "latest")
    assert run_mixed(*moved, "--max_steps", "8", "--eval_freq", "4") == 0
    assert [folder for folder, _ in sources_in(LATEST).values()] == ["elsewhere", "data/code"]
    assert {"val_loss/elsewhere", "val_loss/code"} <= evaluations("checkpoints")[8].keys()


def test_the_plan_shows_each_source(sources, capsys):
    assert run_mixed("--mix", "data/web:3,code=data/code:1", "--max_steps", "400", "--dry_run") == 0
    plan = capsys.readouterr().out
    assert "data         web, 75.0% of the rows: 1,200 training tokens in 2 shards of data/web; 16." in plan
    assert " epochs by the end -- MORE THAN 4, of little benefit\n" in plan
    assert "data         code, 25.0% of the rows: 1,300 training tokens in 2 shards of data/code; " in plan


@pytest.mark.parametrize(("flags", "facts"), [
    (["--mix", "data/web:0"], ("--mix ", "'data/web:0'", "'0'", " 0.25")),
    (["--mix", "data/web:-1"], ("--mix ", "'data/web:-1'", "'-1'", " 0.25")),
    (["--mix", "data/web:nan"], ("--mix ", "'data/web:nan'", "'nan'", " 0.25")),
    (["--mix", "data/web,other/web"], ("--mix ", " web;", " NAME=FOLDER")),
    (["--mix", "a b=data/web"], ("--mix ", "'a b=data/web'", " [NAME=]FOLDER[:WEIGHT]", " a_b=data/web")),
    (["--mix", "=data/web"], ("--mix ", "'=data/web'", " [NAME=]FOLDER[:WEIGHT]", " web=data/web")),
    (["--mix", ","], ("--mix ", "','")),
    (["--mix", ""], ("--mix ",)),
    (["--val", ""], ("--val ",)),
    ([*MIX, "--max_steps", "0"], ("--max_steps",)),
    (["--data_dir", "data", *MIX], ("--data_dir ", "--mix ")),
    (["--mix", "data/code,data/gpt2"], ("data/gpt2: ", " gpt2,", " data/code ", " bytes;")),
])  # fmt: skip
def test_data_that_is_no_mixture_is_refused(sources, flags, facts):
    write_data(Path("data/gpt2"), tokenizer="gpt2", vocab_size=50257)
    refused(flags, *facts)


def test_a_folder_takes_the_place_of_the_mixture_of_a_preset(workdir):
    Path("mixed.toml").write_text('mix = "data/web:7,data/code:3"\n')
    config, _ = parse_args(["--config", "mixed.toml"])
    assert config.sources() == {"web": ("data/web", 7), "code": ("data/code", 3)}
    config, _ = parse_args(["--config", "mixed.toml", "--data_dir", "data"])
    assert [folder for folder, _ in config.sources().values()] == ["data"]


# ---------------------------------------------------------------------------------------------------------------------
# validation sets


def test_epochs_and_validation_sets_are_shown_by_name_and_the_first_set_decides(sources, capsys):
    assert run_mixed(*MIX, "--eval_freq", "4", "--use_tensorboard") == 0
    points = scalars("checkpoints/tensorboard")
    assert list(metrics("checkpoints", "epoch/web")) == [4, 8]
    assert points["eval/epoch/code"] == pytest.approx(metrics("checkpoints", "epoch/code"))
    assert not list(Path("checkpoints").glob("epoch_*"))
    stored = evaluations("checkpoints")[8]
    web, code = stored["val_loss/web"], stored["val_loss/code"]
    assert stored["val_loss"] == web != code
    assert stored["val_bpb"] == stored["val_bpb/web"] == metrics("checkpoints", "val_bpb")[8]
    val_losses = metrics("checkpoints", "val_loss/web")
    assert points["eval/val_loss"] == points["eval/val_loss/web"] == pytest.approx(val_losses)
    assert points["eval/val_bpb/code"] == pytest.approx(metrics("checkpoints", "val_bpb/code"))
    shown = capsys.readouterr().out.replace(" (best so far)", "")
    assert f"web: val loss {web:.4f}, {stored['val_bpb']:.4f} bits per byte | code: val loss {code:.4f}" in shown
    assert f"\nvalidation   web {web:.4f}, code {code:.4f}\n" in shown


def test_the_first_set_of_val_decides(sources):
    assert run_mixed(*MIX, "--max_steps", "4", "--eval_freq", "4", "--val", "math=data/math,web=data/web") == 0
    scores = evaluations("checkpoints")[4]
    assert scores["val_loss"] == scores["val_loss/math"] != scores["val_loss/web"]


def test_evaluating_reads_no_training_shards(sources, monkeypatch):
    assert run_mixed("--data_dir", "data/web", "--eval_freq", "4") == 0
    shutil.copytree("data/web", "moved", copy_function=shutil.copy)  # with new dates
    read = []
    monkeypatch.setattr(shards, "sha256_of", lambda path: read.append(path.name) or durable.sha256_of(path))
    assert run_mixed("--eval_only", "--data_dir", "moved", "--eval_freq", "4") == 0
    assert {name.split("_")[1] for name in read} == {"val"}
