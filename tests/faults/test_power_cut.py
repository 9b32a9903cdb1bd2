"""A simulated power cut at every system call of every save: the last reported save, or a newer one, is on the disk."""

from itertools import product
from pathlib import Path

from harness import folders, run_to_end
from injected import record_save_calls

FLAGS = ("--max_steps", "12", "--checkpoint_freq", "2", "--keep_checkpoints", "2", "--steps_per_epoch", "4")


def saves_of_a_run() -> dict[int, list[list[str]]]:
    """Return save -> its system calls, each as name and files."""
    run_to_end(*FLAGS, *folders("run"), faults=[record_save_calls])
    saves = {}
    for line in Path("calls.txt").read_text().splitlines():
        save, *call = line.split()
        if save != "0":
            saves.setdefault(int(save), []).append(call)
    return saves


def names_after(names: dict[str, int], calls) -> dict[str, int]:
    """Return the folder (name -> number of the save that wrote the file) after some calls."""
    names = dict(names)
    for name, *files in calls:
        if name == "create":
            names[files[0]] = files[1]
        elif files[0] in names:
            content = names[files[0]] if name == "link" else names.pop(files[0])
            if name != "unlink":
                names[files[1]] = content
    return names


def test_a_power_cut_loses_no_reported_save(workdir, record_property):
    """Simulate a disk that keeps fsynced files and any subset of the name changes since the folder's last fsync."""
    saves = saves_of_a_run()
    durable_names: dict[str, int] = {}
    pending, durable_files, reported, states = [], set(), 0, 0
    for save, calls in saves.items():
        for name, *files in calls:
            if name == "write":
                pending.append(("create", files[0], save))
            elif name == "fsync" and files[0] != "ckpt":
                durable_files.add(save)
            elif name == "fsync":
                durable_names, pending, reported = names_after(durable_names, pending), [], save
            else:
                pending.append((name, *files))
            assert len(pending) < 16  # a larger number means that an fsync of the folder is missing
            for kept in product([False, True], repeat=len(pending)):
                found = names_after(durable_names, [call for call, keep in zip(pending, kept, strict=True) if keep])
                readable = [save for name, save in found.items() if not name.startswith(".") and save in durable_files]
                assert max(readable, default=0) >= reported, (save, name, files, kept)
                states += 1
    assert reported == len(saves) == 6
    assert states > 1000
    record_property("states of the disk", f"{states:,}")
