"""The table of a checkpoint folder, from the heads of its files or verified; averages of checkpoints."""

import errno
import io
import json
import os
import re
import shutil
import zipfile

import pytest
import torch
from conftest import run_content
from injected import fail_reads

from model import GPT, GPTConfig
from optim import state_shapes
from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.checkpoint.files import (
    ROLLING,
    Unreadable,
    aside,
    check_tensors,
    find_checkpoint,
    open_checkpoint,
    read_checkpoint,
)
from steadygpt.checkpoint.table import checkpoint_table, print_checkpoints


def write_checkpoint(folder, step: int, name: str, *other_names: str) -> None:
    """Write the checkpoint of a step under all these names, with a date that is older the later the step."""
    torch.save(run_content(step), folder / name)
    os.utime(folder / name, ns=(0, 10**18 - step * 10**9))
    for other in other_names:
        os.link(folder / name, folder / other)


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


def test_table_lists_each_file_the_newest_first_and_marks_corrupt_ones(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, f"rolling_step_{step:06d}.pt", f"epoch_{step // 10:05d}.pt")
    write_checkpoint(tmp_path, 40, "latest.pt", "epoch_00004.pt", "best_model.pt")
    os.link(tmp_path / "rolling_step_000030.pt", tmp_path / "latest_backup.pt")
    damage(tmp_path / "latest_backup.pt", "truncated")
    evaluations = {"20": {"val_loss": 3.5, "val_bpb": 1.25}, "30": {"val_loss": 3.0}, "40": {"hellaswag_acc": 0.25}}
    (tmp_path / "evaluations.json").write_text(json.dumps(evaluations))
    head, *lines, last = checkpoint_table(tmp_path)
    assert head.split() == ["file", "step", "epoch", "loss", "last", "val", "bits/byte", "size", "age", "state"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == [
        "latest.pt", "epoch_00004.pt", "best_model.pt", "latest_backup.pt",
        "rolling_step_000030.pt", "epoch_00003.pt", "rolling_step_000020.pt", "epoch_00002.pt",
        "rolling_step_000010.pt", "epoch_00001.pt",
    ]  # fmt: skip
    assert rows["latest.pt"].split()[1:6] == ["40", "4.00", "3.2500", "-", "-"]
    assert rows["epoch_00003.pt"].split()[1:6] == ["30", "3.00", "3.2500", "3.0000", "-"]
    assert rows["epoch_00002.pt"].split()[1:6] == ["20", "2.00", "3.2500", "3.5000", "1.2500"]
    assert rows["latest.pt"].endswith("complete")
    assert "corrupt" in rows["latest_backup.pt"]
    assert last == f"10 names in {tmp_path}"


def test_names_and_errors_in_the_table_cannot_control_the_terminal(tmp_path, capsys):
    (tmp_path / "rolling_step_\x1b[2J\n.pt").write_bytes(b"no checkpoint")
    print_checkpoints(tmp_path)
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row.startswith("rolling_step_\\x1b[2J\\n.pt ")
    with pytest.raises(UserError):
        open_checkpoint("average:1", tmp_path)
    assert "/rolling_step_\\x1b[2J\\n.pt: corrupt" in capsys.readouterr().err


def test_only_the_verbose_table_reads_and_verifies_tensors(tmp_path):
    write_checkpoint(tmp_path, 10, "latest.pt")
    damage(tmp_path / "latest.pt", "one bit")
    _, line, _ = checkpoint_table(tmp_path)
    assert line.split()[:2] == ["latest.pt", "10"] and line.endswith("  complete")
    _, line, _ = checkpoint_table(tmp_path, verbose=True)
    assert "  corrupt (checksum of record latest/data/0); " in line


def test_table_runs_no_code_of_a_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "latest.pt", "w") as archive:
        archive.writestr("archive/data.pkl", f"cos\nmkdir\n(S'{tmp_path}/made'\ntR.")
    _, line, _ = checkpoint_table(tmp_path)
    assert "  saved_at is None; expected a value; take another checkpoint, or " in line
    assert names(tmp_path) == ["latest.pt"]


@pytest.mark.parametrize("loss", ["low", -1e308, float("nan"), 10**400])
def test_table_names_a_number_that_cannot_be(tmp_path, loss):
    torch.save(run_content(10, loss=loss), tmp_path / "latest.pt")
    for verbose in (False, True):
        _, line, _ = checkpoint_table(tmp_path, verbose)
        assert "  loss is " in line


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        '{"10": {"val_loss": -1e308}}': "['10']['val_loss'] is -1e+308; expected 0 or more",
        '{"ten": {}}': "a key of the content is 'ten'; expected an integer",
        "[" * 99_999: "not JSON (",
    }.items(),
    ids=["negative", "key", "deep"],
)
def test_evaluations_that_do_not_fit_are_a_warning(tmp_path, capsys, text, problem):
    write_checkpoint(tmp_path, 10, "latest.pt")
    (tmp_path / "evaluations.json").write_text(text)
    assert len([*checkpoint_table(tmp_path)]) == 3
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {tmp_path}/evaluations.json: {problem}")
    assert warning.endswith("; its validation losses are ignored\n")


def test_a_file_that_training_deletes_meanwhile_is_left_out(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 10, "latest.pt")
    gone = tmp_path / ROLLING.format(20)
    monkeypatch.setattr(files, "checkpoint_files", lambda folder: [folder / "latest.pt", gone])
    _, line, last = checkpoint_table(tmp_path)
    assert line.split()[0] == "latest.pt" and last.startswith("1 name in ")


def test_a_name_that_training_deletes_while_others_are_verified_is_reported(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path, step, f"rolling_step_{step:06d}.pt")
    table = checkpoint_table(tmp_path, verbose=True)
    lines = [next(table), next(table)]
    (tmp_path / "rolling_step_000010.pt").unlink()
    lines += table
    assert lines[1].startswith("rolling_step_000020.pt") and lines[1].endswith("  intact")
    assert lines[2].startswith("rolling_step_000010.pt") and "  no such checkpoint; " in lines[2]


def test_details_of_a_file_that_training_deletes_meanwhile_are_those_of_its_line(tmp_path):
    more = {"lr": 0.002, "elapsed_s": 4.0, "optimizer": {"weight": {"exp_avg": torch.zeros(1000)}}}
    torch.save(run_content(10, **more), tmp_path / "rolling_step_000010.pt")
    table = checkpoint_table(tmp_path, verbose=True)
    lines = [next(table), next(table)]
    (tmp_path / "rolling_step_000010.pt").unlink()
    _, _, name, *others, weights, moments = table
    assert lines[1].startswith("rolling_step_000010.pt") and name == f"{tmp_path}/rolling_step_000010.pt"
    text = " ".join(" ".join(others).split())
    for part in (
        "lr 0.002, epoch 1.0, ",
        "step 10, rows_consumed 40, ",
        "last start id 0000",
        "system_metrics_s 10.0, sharding ddp, ",
    ):
        assert part in text
    assert (weights, moments) == ("          1 x weight (1000,)", "          1 x weight.exp_avg (1000,)")


def test_table_shows_the_last_validation_of_a_step_without_one_of_its_own(tmp_path):
    torch.save(run_content(25, val_loss=3.5), tmp_path / "latest.pt")
    (tmp_path / "evaluations.json").write_text('{"20": {"val_loss": 3.5, "val_bpb": 1.25}, "10": {"val_loss": 4}}')
    _, line, _ = checkpoint_table(tmp_path)
    assert line.split()[:6] == ["latest.pt", "25", "2.50", "3.2500", "3.5000", "-"]


def test_a_folder_without_checkpoints_names_the_subfolder_with_the_newest_ones(tmp_path):
    with pytest.raises(UserError, match=f"^no checkpoints in {tmp_path}; try another --checkpoint_dir$"):
        next(checkpoint_table(tmp_path))
    for step, name in enumerate(("empty", "older", "newer")):
        (tmp_path / name).mkdir()
        if step:
            write_checkpoint(tmp_path / name, step, "latest.pt")
    with pytest.raises(UserError, match=f"; try --checkpoint_dir {tmp_path}/newer$"):
        next(checkpoint_table(tmp_path))


def test_the_date_of_a_file_decides_nothing(tmp_path):
    """Copies have dates of their own."""
    for step in (20, 40, 60):
        write_checkpoint(tmp_path, step, ROLLING.format(step))  # later ones have older dates
    os.rename(tmp_path / ROLLING.format(40), tmp_path / "latest.pt")
    shutil.copy(tmp_path / "latest.pt", tmp_path / ROLLING.format(40))
    assert [(file.path.name, file.head.step) for file in files.scan(tmp_path)] == [
        (ROLLING.format(60), 60), ("latest.pt", 40), (ROLLING.format(40), 40), (ROLLING.format(20), 20)
    ]  # fmt: skip
    assert find_checkpoint("latest", tmp_path).checkpoint["step"] == 60
    assert [path.name for path, _ in files.intact_checkpoints(files.scan(tmp_path))] == [
        ROLLING.format(60), "latest.pt", ROLLING.format(20)
    ]  # fmt: skip


def test_a_file_whose_head_cannot_be_read_comes_after_latest_and_before_all_others(tmp_path):
    for step, name in ((60, "latest.pt"), (40, ROLLING.format(40)), (20, ROLLING.format(20))):
        write_checkpoint(tmp_path, step, name)
    damage(tmp_path / ROLLING.format(20), "truncated")
    expected = ["latest.pt", ROLLING.format(20), ROLLING.format(40)]
    assert [file.path.name for file in files.scan(tmp_path)] == expected
    damage(tmp_path / "latest.pt", "one bit")
    found = find_checkpoint("latest", tmp_path)
    assert found.checkpoint["step"] == 40
    assert [re.split(", |: ", line)[0] for line in found.damaged.values()] == [
        f"{tmp_path}/latest.pt", f"{tmp_path}/{ROLLING.format(20)}"
    ]  # fmt: skip


def test_an_average_is_the_mean_of_the_newest_rolling_checkpoints(tmp_path, capsys):
    generator, weights = torch.Generator().manual_seed(0), {}
    for step in (10, 20, 30, 40):
        weights[step] = torch.randn(100, generator=generator) * 10 ** (step / 10)
        model = {"wte.weight": weights[step], "lm_head.weight": weights[step]}
        torch.save(run_content(step, model=model, model_config={"tied_head": True}), tmp_path / ROLLING.format(step))
        os.utime(tmp_path / ROLLING.format(step), ns=(0, 10**18 - step))  # as copies have it
    write_checkpoint(tmp_path, 50, "latest.pt")
    path, found = open_checkpoint("average:3", tmp_path)
    assert str(path) == f"{tmp_path}/average:3"
    expected = (weights[20].double() + weights[30].double() + weights[40].double()) / 3
    assert torch.equal(found["model"]["wte.weight"], expected.float())
    assert found["model"]["lm_head.weight"] is found["model"]["wte.weight"]
    assert found["step"] == 40 and not found["optimizer"] and not found["starts"]
    assert capsys.readouterr().err == ""

    damage(tmp_path / ROLLING.format(30), "one bit")
    _, found = open_checkpoint("average:3", tmp_path)
    expected = (weights[10].double() + weights[20].double() + weights[40].double()) / 3
    assert torch.equal(found["model"]["wte.weight"], expected.float())
    assert "rolling_step_000030.pt: corrupt" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"average:4: found 3 intact rolling checkpoints .*, expected 4; "):
        open_checkpoint("average:4", tmp_path)
    with pytest.raises(UserError, match="found 0 intact"):
        open_checkpoint("average:4", tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------------------------------------
# files that cannot be read, that are damaged with a valid checksum, or that belong to another model


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("end", [True, False], ids=["list of contents, whose error zipfile hides", "a record"])
def test_a_file_whose_reads_fail_is_not_corrupt_and_is_not_skipped(tmp_path, monkeypatch, number, end):
    write_checkpoint(tmp_path, 30, "latest.pt")
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    monkeypatch.setattr(io, "open", io.open)  # so that it is restored
    fail_reads("latest.pt", number, end, rank=0)
    for which in ("latest", "auto", str(tmp_path / "latest.pt")):
        with pytest.raises(Unreadable) as raised:
            find_checkpoint(which, tmp_path)
        assert str(raised.value) == (
            f"{tmp_path}/latest.pt: cannot be read ({os.strerror(number)}); fix the disk or the permissions, or give "
            "an older file"
        )
    _, latest, backup, *_ = checkpoint_table(tmp_path, verbose=True)
    assert f"cannot be read ({os.strerror(number)})" in latest and "corrupt" not in latest
    assert backup.endswith("intact")


def test_a_folder_in_place_of_a_file_is_not_skipped(tmp_path):
    (tmp_path / "latest.pt").mkdir()
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    with pytest.raises(Unreadable, match=r"latest.pt: cannot be read \(Is a directory\)"):
        find_checkpoint("latest", tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["weight", "weight.exp_avg_sq"])
def test_a_file_with_a_number_that_is_not_finite_is_corrupt(tmp_path, name, bad):
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    state = {"weight": {"step": torch.tensor(30.0), "exp_avg_sq": torch.ones(1000)}}
    checkpoint = run_content(30, optimizer=state)
    files.named_tensors(checkpoint)[name][500] = bad
    torch.save(checkpoint, tmp_path / "latest.pt")
    found = find_checkpoint("latest", tmp_path)
    assert found.checkpoint["step"] == 20
    line = f"{tmp_path}/latest.pt, step 30: corrupt ({name} has a NaN or an infinite number)"
    assert found.damaged == {tmp_path / "latest.pt": line}


@pytest.mark.parametrize(("change", "found"), [
    ({"model": {"weight": [1.0]}}, r"\['weight'\] is a list; expected Tensor"),
    ({"optimizer": 3}, r"optimizer is 3; expected an object"),
    ({"optimizer": {"weight": torch.zeros(3)}}, r"\['weight'\] is a Tensor; expected an object"),
])  # fmt: skip
def test_a_file_with_something_else_in_place_of_tensors_is_refused(tmp_path, change, found):
    torch.save(run_content(30) | change, tmp_path / "latest.pt")
    with pytest.raises(UserError, match=found):
        read_checkpoint(tmp_path / "latest.pt")


def test_the_new_name_of_a_damaged_file_is_no_checkpoint_and_replaces_no_earlier_one(tmp_path):
    for count in (1, 2):
        (tmp_path / "latest.pt").symlink_to("nowhere")
        (tmp_path / "latest.pt").rename(aside(tmp_path / "latest.pt"))
        assert len(names(tmp_path)) == count
        assert all(re.fullmatch(r"latest\.pt\.skipped-\d{8}-\d{6}-\d{6}", name) for name in names(tmp_path))
    assert files.checkpoint_files(tmp_path) == []


SMALL = GPTConfig(vocab_size=257, num_layers=1, num_heads=2, embd_size=16, context_length=16)
MATRIX = "h.0.mlp.c_fc.weight"


def fitting(model: GPT, optimizer: str) -> dict:
    """Return a checkpoint that fits a model."""
    state: dict = {}
    for name, shape in state_shapes(model.config, optimizer).items():
        parameter, kind = name.rsplit(".", 1)
        state.setdefault(parameter, {})[kind] = torch.zeros(shape)
    return {"model": dict(model.state_dict()), "optimizer": state}


@pytest.mark.parametrize(("optimizer", "kind", "change", "found"), [
    ("adamw", "exp_avg", lambda t: t[:, 1:], r"\(64, 15\) torch.float32; expected \(64, 16\) torch.float32"),
    ("adamw", "exp_avg_sq", lambda t: t.flatten(), r"\(1024,\) torch.float32; expected \(64, 16\)"),
    ("adamw", "exp_avg", lambda t: t.double(), r"\(64, 16\) torch.float64; expected \(64, 16\) torch.float32"),
    ("adamw", "step", lambda t: torch.zeros(2), r"\(2,\) torch.float32; expected \(\) torch.float32"),
    ("adamw", "exp_avg", None, r"missing; expected \(64, 16\)"),
    ("adamw", "max_exp_avg_sq", torch.zeros(3), r"\(3,\) torch.float32; expected no such tensor"),
    ("muon", "momentum_buffer", lambda t: t.T, r"\(16, 64\) torch.float32; expected \(64, 16\)"),
    ("muon", "mean_squares", lambda t: t[1:], r"\(63,\) torch.float32; expected \(64,\)"),
    ("muon", "exp_avg", torch.zeros(64, 16), r"\(64, 16\) torch.float32; expected no such tensor"),
])  # fmt: skip
def test_optimizer_state_must_have_the_shapes_and_the_dtype_of_the_optimizer(optimizer, kind, change, found):
    model = GPT(SMALL)
    checkpoint, kept = fitting(model, optimizer), state_shapes(model.config, optimizer)
    check_tensors(checkpoint, "latest.pt", model, kept)
    state = checkpoint["optimizer"][MATRIX]
    whole = state.pop(kind, None)
    if change is not None:
        state[kind] = change if whole is None else change(whole)
    with pytest.raises(UserError, match=f"^latest.pt: {re.escape(MATRIX)}.{kind} is {found}.*. Try another"):
        check_tensors(checkpoint, "latest.pt", model, kept)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bfloat16])
def test_weights_must_be_fp32(dtype):
    model = GPT(SMALL)
    checkpoint = fitting(model, "adamw")
    checkpoint["model"][MATRIX] = checkpoint["model"][MATRIX].to(dtype)
    with pytest.raises(UserError, match=rf"is \(64, 16\) {dtype}; expected \(64, 16\) torch.float32"):
        check_tensors(checkpoint, "latest.pt", model, state_shapes(model.config, "adamw"))


def test_a_checkpoint_may_lack_all_optimizer_state_or_the_mean_squares():
    model = GPT(SMALL)
    checkpoint, kept = fitting(model, "muon"), state_shapes(model.config, "muon")
    for state in checkpoint["optimizer"].values():
        state.pop("mean_squares", None)  # muon_beta2 was 0
    check_tensors(checkpoint, "latest.pt", model, kept)
    check_tensors(checkpoint | {"optimizer": {}}, "latest.pt", model, kept)  # before the first update


@pytest.mark.parametrize(("kind", "bad"), [
    ("exp_avg_sq", torch.full((1000,), -1.0)),
    ("step", torch.tensor(-1.0)),
    ("exp_avg", torch.zeros(1000, device="meta")),
    ("exp_avg", torch.zeros(1).expand(1000)),
])  # fmt: skip
def test_state_that_no_optimizer_has_is_corrupt_and_skipped(tmp_path, kind, bad):
    write_checkpoint(tmp_path, 20, "latest_backup.pt")
    torch.save(run_content(30, optimizer={"weight": {kind: bad}}), tmp_path / "latest.pt")
    found = find_checkpoint("latest", tmp_path)
    assert found.checkpoint["step"] == 20
    assert f"latest.pt, step 30: corrupt (weight.{kind} " in found.damaged[tmp_path / "latest.pt"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "latest.pt")
    for read in (lambda: read_checkpoint(tmp_path / "latest.pt"), lambda: find_checkpoint("latest", tmp_path)):
        with pytest.raises(UserError, match="a pipe or a device; expected a file"):
            read()
