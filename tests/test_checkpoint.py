"""The files of a checkpoint folder: their order, and the table that verifies them."""

import os

import pytest
import torch

from steadygpt.checkpoint import FORMAT_VERSION, Found, checkpoint_files, find_checkpoint
from steadygpt.cli import UserError
from steadygpt.table import checkpoint_table


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


def test_files_are_listed_in_the_documented_order(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, f"rolling_step_{step:06d}.pt", f"epoch_{step:05d}.pt")
    write_checkpoint(tmp_path, 4, "latest.pt", "epoch_00004.pt", "best_model.pt")
    os.link(tmp_path / "rolling_step_000003.pt", tmp_path / "latest_backup.pt")
    assert [file.name for file in checkpoint_files(tmp_path)] == [
        "latest.pt", "latest_backup.pt",
        "rolling_step_000003.pt", "rolling_step_000002.pt", "rolling_step_000001.pt",
        "epoch_00004.pt", "epoch_00003.pt", "epoch_00002.pt", "epoch_00001.pt", "best_model.pt",
    ]  # fmt: skip


def test_table_lists_each_file_and_marks_corrupt_ones(tmp_path):
    write_checkpoint(tmp_path, 40, "latest_backup.pt", "rolling_step_000040.pt")
    write_checkpoint(tmp_path, 50, "latest.pt", "rolling_step_000050.pt", "epoch_00005.pt")
    damage(tmp_path / "latest_backup.pt", "truncated")
    table = list(checkpoint_table(tmp_path))
    assert table[0].split() == ["file", "step", "epoch", "loss", "val", "loss", "size", "age", "state"]
    rows = {line.split()[0]: line for line in table[1:-1]}
    assert list(rows) == [
        "latest.pt", "latest_backup.pt", "rolling_step_000050.pt", "rolling_step_000040.pt", "epoch_00005.pt",
    ]  # fmt: skip
    assert rows["latest.pt"].split()[1:5] == ["50", "5.00", "3.2500", "-"]
    assert rows["latest.pt"].endswith("intact")
    assert "corrupt" in rows["latest_backup.pt"]
    assert table[-1].startswith("5 names of 3 files")


def test_error_for_an_empty_folder_suggests_checkpoint_dir(tmp_path):
    with pytest.raises(UserError, match="--checkpoint_dir"):
        list(checkpoint_table(tmp_path))
    with pytest.raises(UserError, match="--checkpoint_dir"):
        find_checkpoint("latest", tmp_path)
    assert find_checkpoint("auto", tmp_path) == Found()
