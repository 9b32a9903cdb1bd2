"""The table of a checkpoint folder, from the heads of its files or verified; averages of checkpoints."""

import json
import os
import zipfile

import pytest
import torch

from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.checkpoint.files import FORMAT_VERSION, ROLLING, open_checkpoint
from steadygpt.checkpoint.table import checkpoint_table


def content(step: int, **more) -> dict:
    """Return a checkpoint like those of train.py, with weights equal to the step."""
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "rows_consumed": 4 * step,
        "model": {"weight": torch.full((1000,), float(step))},
        "optimizer": {"state": {}, "param_groups": []},
        "model_config": {},
        "train_config": {},
        "tokenizer": "bytes",
        "loss": 3.25,
        "val_loss": None,
        "epoch": step / 10,
        **more,
    }


def write_checkpoint(folder, step: int, name: str, *other_names: str) -> None:
    """Write the checkpoint of a step under all these names; each step is a second younger than the step before."""
    torch.save(content(step), folder / name)
    os.utime(folder / name, ns=(0, 10**18 + step * 10**9))
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


def test_table_lists_each_file_in_the_documented_order_and_marks_corrupt_ones(tmp_path):
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
        "latest.pt", "latest_backup.pt",
        "rolling_step_000030.pt", "rolling_step_000020.pt", "rolling_step_000010.pt",
        "epoch_00004.pt", "epoch_00003.pt", "epoch_00002.pt", "epoch_00001.pt", "best_model.pt",
    ]  # fmt: skip
    assert rows["latest.pt"].split()[1:6] == ["40", "4.00", "3.2500", "-", "-"]
    assert rows["epoch_00003.pt"].split()[1:6] == ["30", "3.00", "3.2500", "3.0000", "-"]
    assert rows["epoch_00002.pt"].split()[1:6] == ["20", "2.00", "3.2500", "3.5000", "1.2500"]
    assert rows["latest.pt"].endswith("complete")
    assert "corrupt" in rows["latest_backup.pt"]
    assert last.startswith("10 names, 5 distinct files (the others are hard links) in ")


def test_only_the_verbose_table_reads_and_verifies_tensors(tmp_path):
    write_checkpoint(tmp_path, 10, "latest.pt")
    damage(tmp_path / "latest.pt", "one bit")
    _, line, _ = checkpoint_table(tmp_path)
    assert line.split()[:2] == ["latest.pt", "10"] and line.endswith("  complete")
    _, line, _ = checkpoint_table(tmp_path, verbose=True)
    assert line.endswith("  corrupt (checksum of record latest/data/0)")


def test_table_runs_no_code_of_a_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "latest.pt", "w") as archive:
        archive.writestr("archive/data.pkl", f"cos\nmkdir\n(S'{tmp_path}/made'\ntR.")
    _, line, _ = checkpoint_table(tmp_path)
    assert "  not a SteadyGPT checkpoint (expected format_version, int)" in line
    assert names(tmp_path) == ["latest.pt"]


@pytest.mark.parametrize("loss", ["low", -1e308, float("nan"), 10**400])
def test_table_names_a_number_that_cannot_be(tmp_path, loss):
    torch.save(content(10, loss=loss), tmp_path / "latest.pt")
    for verbose in (False, True):
        _, line, _ = checkpoint_table(tmp_path, verbose)
        assert "  the checkpoint's loss: the content is " in line


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        '{"10": {"val_loss": -1e308}}': "['10']['val_loss'] is -1e+308; expected 0 or more",
        '{"ten": {}}': "a key of the content is 'ten'; expected an integer",
        "[" * 99_999: "not JSON (",
    }.items(),
    ids=["negative", "key", "deep"],
)
def test_evaluations_that_do_not_fit_are_a_warning(tmp_path, text, problem):
    write_checkpoint(tmp_path, 10, "latest.pt")
    (tmp_path / "evaluations.json").write_text(text)
    warning, *lines = checkpoint_table(tmp_path)
    assert warning.startswith(f"warning: {tmp_path}/evaluations.json: {problem}")
    assert warning.endswith("; its validation losses are ignored") and len(lines) == 3


def test_table_skips_what_training_deletes_meanwhile(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path, step, f"rolling_step_{step:06d}.pt")
    table = checkpoint_table(tmp_path)
    lines = [next(table), next(table)]
    (tmp_path / "rolling_step_000010.pt").unlink()
    lines += table
    assert [line.split()[0] for line in lines[1:3]] == ["rolling_step_000020.pt", "1"]
    assert lines[2].startswith("1 name in ")


def test_details_of_a_file_that_training_deletes_meanwhile_are_those_of_its_line(tmp_path):
    config, more = {"context_length": 8}, {"saved_at": 0.0, "train_config": {"max_steps": 40}}
    more |= {"elapsed_s": 4.0, "peak_memory_bytes": 2 * 10**9}
    more["optimizer"] = {"param_groups": [{"lr": 0.002}, {"lr": 0.002}, {"lr": 0.04}]}
    torch.save(content(10, model_config=config, **more), tmp_path / "rolling_step_000010.pt")
    table = checkpoint_table(tmp_path, verbose=True)
    lines = [next(table), next(table)]
    (tmp_path / "rolling_step_000010.pt").unlink()
    _, _, name, progress, speed, *others = table
    assert lines[1].startswith("rolling_step_000010.pt") and name == f"{tmp_path}/rolling_step_000010.pt"
    assert progress == "  progress   step 10, epoch 1.00, 320 tokens seen, 4 s of training"
    assert speed == "  speed      2.5 steps/s, 80 tokens/s with evaluations, peak memory 2 GB on rank 0"
    assert "  optimizer   of 0 tensors, last learning rate 0.002, 0.04" in others
    assert "  options    max_steps 40" in others and others[-1].endswith("1 x weight (1000,) float32")


def test_a_save_does_not_mind_a_checkpoint_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 10, "latest.pt")
    gone = tmp_path / ROLLING.format(20)
    monkeypatch.setattr(files, "checkpoint_files", lambda folder: [folder / "latest.pt", gone])
    assert files.newest_ns(tmp_path) == (tmp_path / "latest.pt").stat().st_mtime_ns


def test_table_shows_the_last_validation_of_a_step_without_one_of_its_own(tmp_path):
    torch.save(content(25, val_loss=3.5), tmp_path / "latest.pt")
    (tmp_path / "evaluations.json").write_text('{"20": {"val_loss": 3.5, "val_bpb": 1.25}, "10": {"val_loss": 4}}')
    _, line, _ = checkpoint_table(tmp_path)
    assert line.split()[:6] == ["latest.pt", "25", "2.50", "3.2500", "3.5000", "1.2500"]


def test_a_folder_without_checkpoints_names_the_subfolder_with_the_newest_ones(tmp_path):
    with pytest.raises(UserError, match=f"^no checkpoints in {tmp_path}; try another --checkpoint_dir$"):
        next(checkpoint_table(tmp_path))
    for number, name in enumerate(("older", "newer", "empty")):
        (tmp_path / name).mkdir()
        if name != "empty":
            write_checkpoint(tmp_path / name, 10, "latest.pt")
            os.utime(tmp_path / name / "latest.pt", ns=(0, number))
    with pytest.raises(UserError, match=f"; try --checkpoint_dir {tmp_path}/newer$"):
        next(checkpoint_table(tmp_path))


def test_an_average_is_the_mean_of_the_newest_rolling_checkpoints(tmp_path, capsys):
    generator, weights = torch.Generator().manual_seed(0), {}
    for step in (10, 20, 30, 40):
        weights[step] = torch.randn(100, generator=generator) * 10 ** (step / 10)
        model = {"wte.weight": weights[step], "lm_head.weight": weights[step]}
        torch.save(content(step, model=model, model_config={"tied_head": True}), tmp_path / ROLLING.format(step))
        os.utime(tmp_path / ROLLING.format(step), ns=(0, step))
    write_checkpoint(tmp_path, 50, "latest.pt")
    path, found = open_checkpoint("average:3", tmp_path)
    assert str(path) == f"{tmp_path}/average:3"
    expected = (weights[20].double() + weights[30].double() + weights[40].double()) / 3
    assert torch.equal(found["model"]["wte.weight"], expected.float())
    assert found["model"]["lm_head.weight"] is found["model"]["wte.weight"]
    assert found["step"] == 40 and not found["optimizer"] and not found["train_config"]
    assert "averaging 3 checkpoints, of steps 20 to 40" in capsys.readouterr().err

    damage(tmp_path / ROLLING.format(30), "one bit")
    _, found = open_checkpoint("average:3", tmp_path)
    expected = (weights[10].double() + weights[20].double() + weights[40].double()) / 3
    assert torch.equal(found["model"]["wte.weight"], expected.float())
    assert "rolling_step_000030.pt: corrupt" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"average:4: found 3 intact rolling checkpoints .*, expected 4; "):
        open_checkpoint("average:4", tmp_path)
    with pytest.raises(UserError, match="found 0 intact"):
        open_checkpoint("average:4", tmp_path / "elsewhere")
