"""The commands that show, fill and check a mirror."""

import shutil
from pathlib import Path

import pytest
from conftest import metrics, run_here
from test_mirror import FLAGS, continue_elsewhere, machines, quick, upload_manager  # noqa: F401 (two are fixtures)

from steadygpt.base.options import UserError
from steadygpt.checkpoint.mirror import Mirror


def test_upload_manager(machines, store, capsys, workdir):  # noqa: F811
    url = f"{store.url}/run"
    run_here(*FLAGS, "--max_steps", "4")
    assert upload_manager.main(["upload-all", "--mirror", url]) == 0
    assert "uploaded step 4 as latest.pt, rolling_step_000004.pt, best_model.pt" in capsys.readouterr().out
    assert upload_manager.main(["upload-all", "--mirror", url]) == 0
    assert capsys.readouterr().out == f"{url} has the checkpoints of checkpoints\n"
    machines("second")
    assert upload_manager.main(["download", "best", "--mirror", url]) == 0
    assert Path("checkpoints/best_model.pt").read_bytes() == Path("../first/checkpoints/best_model.pt").read_bytes()
    with pytest.raises(UserError, match="exists; rename it"):
        upload_manager.main(["download", "best", "--mirror", url])
    with pytest.raises(UserError, match="no epoch_00009"):
        upload_manager.main(["download", "epoch_00009.pt", "--mirror", url])
    mirror = Mirror(url)
    latest = mirror.index().checkpoints["latest.pt"].file
    mirror.fs.pipe_file(f"{mirror.folder}/{latest}", b"half")
    capsys.readouterr()
    assert upload_manager.main(["list", "--mirror", url]) == 0
    assert capsys.readouterr().out.count("  missing or incomplete\n") == 3


def test_table_of_a_mirror_and_upload_all_to_the_one_of_the_run(workdir, capsys):
    url = f"file://{workdir}/there"
    run_here(*FLAGS, "--mirror", url, "--no-background-upload")
    tables = []
    for flags in ((), ("--mirror", url)):
        capsys.readouterr()
        assert run_here("--list_checkpoints", *flags) == 0
        tables.append(capsys.readouterr().out.splitlines())
    same = [(here.split()[:6], there.split()[:6]) for here, there in zip(tables[0][:-1], tables[1][:-1], strict=True)]
    assert len(same) == 8 and all(here == there for here, there in same)
    assert tables[1][1].endswith("complete") and tables[1][1].split()[5] == f"{metrics('logs', 'val_bpb')[8]:.4f}"
    shutil.rmtree("there")
    assert upload_manager.main(["upload-all"]) == 0
    assert "latest.pt, rolling_step_000008.pt" in capsys.readouterr().out
    assert upload_manager.main(["list"]) == upload_manager.main(["list", "checkpoints"]) == 0


def test_a_mirror_that_nothing_names_is_an_error(workdir):
    with pytest.raises(UserError, match=r"--mirror is missing, and checkpoints/run\.json names none"):
        upload_manager.main(["list"])


def test_a_folder_of_another_user_is_not_uploaded(workdir, tmp_path, monkeypatch):
    """Which logs belong to it is not known here."""
    run_here(*FLAGS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other user"))
    with pytest.raises(UserError, match=r"this user has not started this run\. Resume from it with --mirror file:"):
        upload_manager.main(["upload-all", "--mirror", f"file://{workdir}/there"])
    assert not Path("there").exists()


def test_only_a_download_takes_a_name(workdir):
    with pytest.raises(UserError, match="upload-all best: expected no name"):
        upload_manager.main(["upload-all", "best"])


def test_upload_all_does_not_replace_what_is_newer(machines, workdir):  # noqa: F811
    url = continue_elsewhere(workdir, machines)
    there = {path.name: path.read_bytes() for path in (workdir / "there").glob("*.*")}
    logs = (workdir / "there/logs/metrics.jsonl").read_bytes()
    machines("second")
    with pytest.raises(UserError, match="has a newer checkpoint than checkpoints, of step 6"):
        upload_manager.main(["upload-all", "--mirror", url])
    assert {path.name: path.read_bytes() for path in (workdir / "there").glob("*.*")} == there
    assert (workdir / "there/logs/metrics.jsonl").read_bytes() == logs
