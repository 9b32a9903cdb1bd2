"""The table of a checkpoint folder, from the heads of its files or verified."""

import contextlib
import errno
import io
import os
import pickle
import re
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refusal, run_here
from ground import (
    alter,
    heads,
    latest,
    run_content,
    verified,
    write_checkpoint,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from injected import fail_reads

from model import GPT, GPTConfig
from optim import state_shapes
from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.checkpoint.files import (
    ROLLING,
    OtherVersion,
    Unreadable,
    check_tensors,
    find_checkpoint,
)
from steadygpt.monitor import table
from steadygpt.monitor.table import checkpoint_table, print_checkpoints


def damage(path, how: str) -> None:
    """Damage a file, but not the other names of the same file."""
    whole = bytearray(path.read_bytes())
    path.unlink()
    if how == "one bit":
        whole[len(whole) // 2] ^= 1
    contents = {"one bit": whole, "truncated": whole[:-100], "empty": b"", "zeros": bytes(len(whole))}
    path.write_bytes(contents[how])


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_that_was_compressed_is_refused(tmp_path):
    """Its records are mapped as they are in the file, so the weights would be other numbers."""
    write_checkpoint(tmp_path, 10, "saved.pt")
    with zipfile.ZipFile(tmp_path / "saved.pt") as saved, zipfile.ZipFile(tmp_path / "latest.pt", "w", 8) as again:
        for name in saved.namelist():
            again.writestr(name, saved.read(name))
    for read in (files.read_head, verified):
        with pytest.raises(UserError, match=r"(?i)latest\.pt: .*\bcompressed\b"):
            read(tmp_path / "latest.pt")


@pytest.mark.parametrize("year", [2106, 2108, 2500, 9999])
def test_a_run_whose_clock_is_centuries_ahead_is_listed_and_resumed(workdir, monkeypatch, year):
    real, ahead_s = time.time, (year - 2026) * 365.25 * 86400
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert run_here("--checkpoint_freq", "4") == 0
    monkeypatch.setattr(time, "time", real)  # it is set right
    _, *lines, _ = checkpoint_table(Path("checkpoints"))
    assert [line.split()[-1] for line in lines] == ["complete"] * 4
    assert run_here("--resume", "latest", "--max_steps", "10") == 0
    assert heads("checkpoints")[0] == ("latest.pt", 10)


def test_a_time_that_only_a_made_file_has_ends_no_run(workdir):
    assert run_here() == 0
    content = Path("checkpoints/latest.pt").read_bytes()
    for saved_at in (2.0**40, 2.0**40 + 1, 2.0**41):
        Path("checkpoints/latest.pt").write_bytes(content)
        alter("checkpoints/latest.pt", saved_at=saved_at)
        assert run_here("--resume", "latest", "--max_steps", "9") == 0


# ---------------------------------------------------------------------------------------------------------------------
# the table


def test_table_lists_each_file_the_newest_first_and_marks_corrupt_ones(tmp_path):
    scores = {20: {"val_loss": 3.5, "val_bpb": 1.25}, 30: {"val_loss": 3.0}}
    for step in (10, 20, 30):
        write_checkpoint(
            tmp_path, step, ROLLING.format(step), f"epoch_{step // 10:05d}.pt", scores=scores.get(step, {})
        )
    write_checkpoint(tmp_path, 40, "latest.pt", "epoch_00004.pt", "best_model.pt", scores={"val_loss": None})  # NaN
    os.link(tmp_path / ROLLING.format(30), tmp_path / "latest_backup.pt")
    damage(tmp_path / "latest_backup.pt", "truncated")
    head, *lines, last = checkpoint_table(tmp_path)
    assert head.split() == ["file", "step", "epoch", "loss", "val", "loss", "bits/byte", "size", "age", "state"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == [
        "latest.pt", "epoch_00004.pt", "best_model.pt", "latest_backup.pt",
        "rolling_step_000030.pt", "epoch_00003.pt", "rolling_step_000020.pt", "epoch_00002.pt",
        "rolling_step_000010.pt", "epoch_00001.pt",
    ]  # fmt: skip
    assert rows["latest.pt"].split()[1:6] == ["40", "4.00", "3.2500", "-", "-"]
    assert rows["epoch_00003.pt"].split()[1:6] == ["30", "3.00", "3.2500", "3.0000", "-"]
    assert rows["epoch_00002.pt"].split()[1:6] == ["20", "2.00", "3.2500", "3.5000", "1.2500"]
    assert rows["epoch_00001.pt"].split()[1:6] == ["10", "1.00", "3.2500", "-", "-"]
    assert rows["latest.pt"].endswith("complete")
    assert "corrupt" in rows["latest_backup.pt"]
    assert last == f"10 names in {tmp_path}"


def test_names_and_errors_in_the_table_cannot_control_the_terminal(tmp_path, capsys):
    (tmp_path / "rolling_step_\x1b[2J.pt").write_bytes(b"no checkpoint")
    print_checkpoints(tmp_path)
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row.startswith("rolling_step_\\x1b[2J.pt ")
    assert not list(files.intact_checkpoints(files.scan(tmp_path)))
    assert "/rolling_step_\\x1b[2J.pt: " in capsys.readouterr().err


def test_only_the_verbose_table_reads_and_verifies_tensors(tmp_path):
    write_checkpoint(tmp_path, 10, "latest.pt")
    damage(tmp_path / "latest.pt", "one bit")
    _, line, last = checkpoint_table(tmp_path)
    assert line.split()[:2] == ["latest.pt", "10"] and line.endswith("  complete")
    assert last == f"1 name in {tmp_path}"
    _, line, _ = checkpoint_table(tmp_path, verbose=True)
    assert re.search(r"  corrupt \(.*latest/data/0\)", line)


@pytest.mark.parametrize("loss", ["low", -1e308, float("nan"), 10**400])
def test_table_names_a_number_that_cannot_be(tmp_path, loss):
    write_checkpoint(tmp_path, 10, "latest.pt", loss=loss)
    for verbose in (False, True):
        _, line, _ = checkpoint_table(tmp_path, verbose)
        assert "`$.loss`" in line


def test_a_file_that_training_deletes_meanwhile_is_left_out_or_reported(tmp_path, monkeypatch):
    more = {
        "elapsed_s": 4.0,
        "tokenizer_json": "{}",
        "optimizer": {"weight": {"exp_avg": torch.zeros(1000)}},
    }
    write_checkpoint(tmp_path, 20, ROLLING.format(20), **more)
    write_checkpoint(tmp_path, 10, ROLLING.format(10))
    there = [*files.checkpoint_files(tmp_path), tmp_path / ROLLING.format(30)]
    monkeypatch.setattr(files, "checkpoint_files", lambda folder: there)
    printed = checkpoint_table(tmp_path, verbose=True)
    lines = [next(printed), next(printed)]  # the one of step 20 is verified
    for path in tmp_path.iterdir():
        path.unlink()
    later, last, _, name, *details, weights, optimizer = printed
    assert re.fullmatch(rf"{ROLLING.format(20)} .*  intact", lines[1])
    assert re.match(rf"(?i){ROLLING.format(10)} .*  no such file\b", later)
    assert last == f"2 names in {tmp_path}" and name == f"{tmp_path}/{ROLLING.format(20)}"
    text = " ".join(" ".join(details).split())
    assert "elapsed_s 4.0" in text and "step 20, rows_consumed 80, " in text
    assert "gpu_hour_cost 0.0, sharding ddp, " in text and "tokenizer_json" not in text
    assert " id 0000" in text
    assert (weights, optimizer) == ("          1 x weight (1000,)", "  optimizer  exp_avg")


def test_the_verbose_table_shows_the_content_of_the_newest_file_only(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, ROLLING.format(step))
    lines = [*checkpoint_table(tmp_path, verbose=True)]
    assert [line for line in lines if line.startswith(str(tmp_path))] == [f"{tmp_path}/{ROLLING.format(30)}"]


@pytest.fixture(scope="module")
def listed_folder(tmp_path_factory) -> Path:
    """Return a folder with long names, a long path and a damaged file."""
    folder = tmp_path_factory.mktemp("a-folder-with-a-name-of-more-than-forty-columns")
    write_checkpoint(
        folder, 123_456, ROLLING.format(123_456), "best_model.pt", scores={"val_loss": 3.5, "val_bpb": 1.25}
    )
    write_checkpoint(folder, 123_457, "latest.pt")
    damage(folder / "latest.pt", "truncated")
    return folder


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.integers(40, 200), verbose=st.booleans())
def test_no_line_of_the_table_is_longer_than_the_terminal(listed_folder, columns, verbose):
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(table, "columns_of", lambda stream: columns)
        print_checkpoints(listed_folder, verbose=verbose)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    missing = [title for title in table.EXPENDABLE if not re.search(rf"(?<!val )\b{title}\b", lines[0])]
    assert missing == [*table.EXPENDABLE[: len(missing)]] and (not missing or columns < 130)
    assert "file" in lines[0] and "state" in lines[0]
    assert ROLLING.format(123_456) in out.getvalue() and " corrupt" in out.getvalue()


def test_a_folder_without_checkpoints_names_the_subfolder_with_the_newest_ones(tmp_path):
    for look in (checkpoint_table, lambda folder: iter([find_checkpoint("latest", folder)])):
        with pytest.raises(UserError, match=f"^[^/]* {tmp_path}; [^/]*$"):
            next(look(tmp_path))
    for step, name in enumerate(("empty", "older", "newer")):
        (tmp_path / name).mkdir()
        if step:
            write_checkpoint(tmp_path / name, step, "latest.pt")
    with pytest.raises(UserError, match=f" {tmp_path}; .* {tmp_path}/newer$"):
        find_checkpoint("latest", tmp_path)  # which resumes no run that was not named
    assert [*checkpoint_table(tmp_path)][-1] == f"1 name in {tmp_path}/newer"


# ---------------------------------------------------------------------------------------------------------------------
# the order of files, and averages


def test_the_date_of_a_file_decides_nothing(tmp_path):
    """Copies have dates of their own."""
    for step in (20, 40, 60):
        write_checkpoint(tmp_path, step, ROLLING.format(step))  # later ones have older dates
    os.rename(tmp_path / ROLLING.format(40), tmp_path / "latest.pt")
    shutil.copy(tmp_path / "latest.pt", tmp_path / ROLLING.format(40))
    newest_first = [(ROLLING.format(60), 60), ("latest.pt", 40), (ROLLING.format(40), 40), (ROLLING.format(20), 20)]
    assert heads(tmp_path) == newest_first
    assert latest(tmp_path)["step"] == 60
    intact = [path.name for path, _ in files.intact_checkpoints(files.scan(tmp_path))]
    assert intact == [ROLLING.format(60), "latest.pt", ROLLING.format(20)]


def test_a_file_whose_head_cannot_be_read_comes_after_latest_and_before_all_others(tmp_path):
    for step, name in ((60, "latest.pt"), (40, ROLLING.format(40)), (20, ROLLING.format(20))):
        write_checkpoint(tmp_path, step, name)
    damage(tmp_path / ROLLING.format(20), "truncated")
    expected = ["latest.pt", ROLLING.format(20), ROLLING.format(40)]
    assert heads(tmp_path) == [("latest.pt", 60), (ROLLING.format(20), None), (ROLLING.format(40), 40)]
    damage(tmp_path / "latest.pt", "one bit")
    chosen = find_checkpoint("latest", tmp_path)
    assert chosen.checkpoint["step"] == 40
    assert [path.name for path in chosen.damaged] == expected[:2]
    assert [re.split(", |: ", line)[0] for line in chosen.damaged.values()] == [*map(str, chosen.damaged)]


@pytest.mark.parametrize("which", ["latest", "auto"])
@pytest.mark.parametrize("how", ["one bit", "truncated", "empty", "zeros"])
def test_a_folder_in_which_all_files_are_damaged_is_refused(tmp_path, which, how):
    there = ("latest.pt", ROLLING.format(10))
    for name in there:
        write_checkpoint(tmp_path, 10, name)
        damage(tmp_path / name, how)
    with refusal(f"{tmp_path}: ", *(f"{tmp_path}/{name}" for name in there)):
        find_checkpoint(which, tmp_path)


def test_the_new_name_of_a_damaged_file_is_no_checkpoint_and_replaces_no_earlier_one(tmp_path):
    for count in (1, 2):
        (tmp_path / "latest.pt").symlink_to("nowhere")
        (tmp_path / "latest.pt").rename(files.aside(tmp_path / "latest.pt"))
        assert len(names(tmp_path)) == count
        assert all(re.fullmatch(r"latest\.pt\.skipped-\d{8}-\d{6}-\d{6}", name) for name in names(tmp_path))
    assert files.checkpoint_files(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# files that cannot be read, that are damaged with a valid checksum, or that belong to another program or model


@pytest.mark.parametrize(("number", "end"), [(errno.EACCES, True), (errno.ESTALE, True), (errno.EIO, False)],
    ids=["list of contents, whose error zipfile hides", "the same on a network", "a record"],
)  # fmt: skip
def test_a_file_whose_reads_fail_is_not_corrupt_and_is_not_skipped(tmp_path, inject, number, end):
    write_checkpoint(tmp_path, 30, "latest.pt")
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    fail_reads("latest.pt", number, end, rank=0)
    for which in ("latest", "auto", str(tmp_path / "latest.pt")):
        with pytest.raises(Unreadable) as raised:
            find_checkpoint(which, tmp_path)
        assert re.match(rf"{tmp_path}/latest.pt: .* \({os.strerror(number)}\); ", str(raised.value))
    _, latest, backup, *_ = checkpoint_table(tmp_path, verbose=True)
    assert f" ({os.strerror(number)})" in latest and "corrupt" not in latest
    assert backup.endswith("intact")


def test_a_folder_in_the_place_of_a_checkpoint_is_not_skipped(tmp_path):
    (tmp_path / "latest.pt").mkdir()
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    for read in (verified, lambda path: find_checkpoint("latest", path.parent)):
        with pytest.raises(UserError, match=r"latest.pt: .* \(Is a directory\)"):
            read(tmp_path / "latest.pt")


def weight(bad: float) -> dict:
    """Return weights with a bad number."""
    return {"model": {"weight": torch.ones(1000).index_fill(0, torch.tensor(500), bad)}}


def state(kind: str, value: torch.Tensor | float) -> dict:
    """Return the state of an optimizer, or one with a bad number."""
    value = weight(value)["model"]["weight"] if isinstance(value, float) else value
    return {"optimizer": {"weight": {kind: value}}}


@pytest.mark.parametrize(("change", "problem"), [
    (weight(float("nan")), r"\(weight .*\bNaN\b"),
    (weight(float("inf")), r"\(weight .*\bNaN\b"),
    (weight(-float("inf")), r"\(weight .*\bNaN\b"),
    (state("exp_avg_sq", float("nan")), r"\(weight\.exp_avg_sq .*\bNaN\b"),
    (state("exp_avg_sq", float("inf")), r"\(weight\.exp_avg_sq .*\bNaN\b"),
    (state("exp_avg_sq", -1.0), r"\(weight\.exp_avg_sq .*\b(?i:negative)\b"),
    (state("step", torch.tensor(-1.0)), r"\(weight\.step .*\b(?i:negative)\b"),
    (state("exp_avg", torch.zeros(1000, device="meta")), r"\(weight\.exp_avg .*\bfp32\b"),
    (state("exp_avg", torch.zeros(1).expand(1000)), r"\(weight\.exp_avg .*\bfp32\b"),
    ({"model": {"weight": [1.0]}}, r"`Tensor`.*`list`.*`\$\.model\[\.\.\.\]`"),
    ({"optimizer": 3}, r"`object`.*`int`.*`\$\.optimizer`"),
    ({"optimizer": {"weight": torch.zeros(3)}}, "'Tensor' .* 'keys'"),
])  # fmt: skip
def test_a_file_with_tensors_that_no_run_has_is_skipped(tmp_path, change, problem):
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    write_checkpoint(tmp_path, 30, "latest.pt", **change)
    chosen = find_checkpoint("latest", tmp_path)
    [(path, line)] = chosen.damaged.items()
    assert (chosen.checkpoint["step"], path) == (20, tmp_path / "latest.pt")
    assert re.match(f"{path}, step 30: .*{problem}", line)


@pytest.mark.parametrize("rows", [0, 119, 121, 240])
def test_a_file_whose_rows_do_not_follow_from_its_steps_is_skipped(tmp_path, rows):
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    write_checkpoint(tmp_path, 30, "latest.pt", rows_consumed=rows)
    chosen = find_checkpoint("latest", tmp_path)
    assert chosen.checkpoint["step"] == 20
    assert re.search(rf"\brows_consumed .*\b{rows}\b.*\b120\b", chosen.damaged[tmp_path / "latest.pt"])


@pytest.mark.parametrize(("part", "option"), [
    ("model_config", {"activation": "silu"}), ("model_config", {"post_norm": True}), ("options", {"z_loss": 1e-4}),
    ("options", {"schedule": "linear"}), ("options", {"optimizer": "lion"}), ("model_config", {"num_heads": 7}),
])  # fmt: skip
def test_a_checkpoint_of_other_code_is_refused_and_not_skipped(tmp_path, part, option):
    """It is intact: after a change of branch, an older checkpoint would lose the steps since."""
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    write_checkpoint(tmp_path, 30, "latest.pt", **{part: run_content(30)[part] | option})
    for which in ("latest", "auto", str(tmp_path / "latest.pt")):
        with refusal("latest.pt: ", next(iter(option)), kind=OtherVersion):
            find_checkpoint(which, tmp_path)


class RunsCode:
    def __reduce__(self):
        return open, ("code-was-run", "w")


NOT_OURS, NO_ZIP, CODE = r"\bconvert_hf\.py\b", r"\(File is not a zip file\)", r"(?i:\bpickle\b)"
RUN = run_content(4)


@pytest.mark.parametrize(("file", "content", "problem"), [
    ("foreign.pt", {"weights": torch.zeros(3)}, NOT_OURS),
    ("lightning.pt", {"state_dict": RUN["model"], "epoch": 1}, NOT_OURS),
    ("weights.pt", RUN["model"], NOT_OURS),
    ("nanogpt.pt", {"model": RUN["model"], "model_args": {"n_layer": 2}}, NOT_OURS),
    ("newer.pt", RUN | {"format_version": 99}, r"format_version .*\b99\b.*\b7\b"),
    ("older.pt", RUN | {"format_version": 2}, r"format_version .*\b2\b.*\b7\b"),
    ("code.pt", RUN | {"scaler": RunsCode()}, CODE),
    ("zipped.pt", RunsCode(), CODE),
    ("pickle.pt", pickle.dumps(RunsCode()), NO_ZIP),
    ("llm.c.bin", np.array([20240326, 3], np.int32).tobytes(), r"\bllm\.c\b.*: python dev/"),
    ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", r"(?i:\bshape\b)"),
])  # fmt: skip
def test_a_file_of_another_program_is_refused_and_its_code_is_not_run(tmp_path, file, content, problem):
    if isinstance(content, bytes):
        Path(file).write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UserError, match=f"^{re.escape(file)}: .*{problem}"):
        find_checkpoint(file, tmp_path)
    assert names(tmp_path) == [file]


def test_table_runs_no_code_of_a_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "latest.pt", "w") as archive:
        archive.writestr("archive/data.pkl", f"cos\nmkdir\n(S'{tmp_path}/made'\ntR.")
        archive.writestr("archive/version", "3")
    _, line, _ = checkpoint_table(tmp_path)
    assert re.search(CODE, line)
    assert names(tmp_path) == ["latest.pt"]


SMALL = GPTConfig(vocab_size=257, num_layers=1, num_heads=2, embd_size=16, context_length=16)
MATRIX = "h.0.mlp.c_fc.weight"


def fitting(optimizer: str) -> tuple[dict, GPT, dict]:
    """Return a checkpoint, a model that it fits, and the shapes of the optimizer's state."""
    model, state = GPT(SMALL), {}
    kept = state_shapes(model.config, optimizer)
    for name, shape in kept.items():
        parameter, kind = name.rsplit(".", 1)
        state.setdefault(parameter, {})[kind] = torch.zeros(shape)
    return {"model": dict(model.state_dict()), "optimizer": state}, model, kept


@pytest.mark.parametrize(("optimizer", "kind", "change", "found"), [
    ("adamw", "exp_avg", lambda t: t[:, 1:], r"\(64, 15\) torch.float32\b.* \(64, 16\) torch.float32"),
    ("adamw", "exp_avg_sq", lambda t: t.flatten(), r"\(1024,\) torch.float32\b.* \(64, 16\)"),
    ("adamw", "exp_avg", lambda t: t.double(), r"\(64, 16\) torch.float64\b.* \(64, 16\) torch.float32"),
    ("adamw", "step", lambda t: torch.zeros(2), r"\(2,\) torch.float32\b.* \(\) torch.float32"),
    ("adamw", "exp_avg", None, r"\(64, 16\) torch.float32\b[^(]*$"),
    ("adamw", "max_exp_avg_sq", torch.zeros(3), r"\(3,\) torch.float32\b[^(]*$"),
    ("muon", "momentum_buffer", lambda t: t.T, r"\(16, 64\) torch.float32\b.* \(64, 16\)"),
    ("muon", "mean_squares", lambda t: t[1:], r"\(63,\) torch.float32\b.* \(64,\)"),
    ("muon", "exp_avg", torch.zeros(64, 16), r"\(64, 16\) torch.float32\b[^(]*$"),
    ("adamw", "", lambda t: t.to(torch.int8), r"\(64, 16\) torch.int8\b.* \(64, 16\) torch.float32"),
    ("adamw", "", lambda t: t.bfloat16(), r"\(64, 16\) torch.bfloat16\b.* \(64, 16\) torch.float32"),
    ("adamw", "", lambda t: t.to(torch.complex64), r"\(64, 16\) torch.complex64\b.* \(64, 16\) torch.float32"),
])  # fmt: skip
def test_tensors_must_have_the_shapes_and_the_dtype_of_the_model_and_of_the_optimizer(optimizer, kind, change, found):
    checkpoint, model, kept = fitting(optimizer)
    check_tensors(checkpoint, "latest.pt", model, kept)
    tensors, key = (checkpoint["optimizer"][MATRIX], kind) if kind else (checkpoint["model"], MATRIX)
    whole = tensors.pop(key, None)
    if change is not None:
        tensors[key] = change if whole is None else change(whole)
    name = re.escape(f"{MATRIX}.{kind}".rstrip("."))
    with pytest.raises(UserError, match=f"^latest.pt: {name} [^(]*{found}"):
        check_tensors(checkpoint, "latest.pt", model, kept)


def test_a_checkpoint_may_lack_all_optimizer_state_or_the_mean_squares():
    checkpoint, model, kept = fitting("muon")
    for state in checkpoint["optimizer"].values():
        state.pop("mean_squares", None)  # muon_beta2 was 0
    check_tensors(checkpoint, "latest.pt", model, kept)
    check_tensors(checkpoint | {"optimizer": {}}, "latest.pt", model, kept)  # before the first update
