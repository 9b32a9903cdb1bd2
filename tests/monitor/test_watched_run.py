"""What a real run tells while it trains: alerts, and the load of the machine."""

import json
from pathlib import Path

import torch
from conftest import run_here, scalars
from test_alerts import SECRET, webhook  # noqa: F401 (a fixture)

import train
from steadygpt.log.metrics import read_status


def test_run_sends_alerts_and_keeps_their_url_secret(workdir, webhook, capsys, monkeypatch):  # noqa: F811
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def nan_from_the_third_step(*arguments):
        calls.append(clip(*arguments))
        return torch.tensor(float("nan")) if len(calls) >= 3 else calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(train.nn.utils, "clip_grad_norm_", nan_from_the_third_step)
        assert run_here("--alert_url", webhook.url, "--use_tensorboard") == 1
    assert run_here("--alert_url", webhook.url, "--resume", "latest", "--use_tensorboard") == 0
    events = [(message["event"], message["step"]) for message in webhook.accepted]
    assert events == [
        ("started", 0), ("bad steps", 3), ("failed", 2), ("resumed", 2), ("resume differs", 3), ("finished", 8)
    ]  # fmt: skip
    texts = [message["content"].partition("] ")[2] for message in webhook.accepted]
    assert texts[1].startswith("bad steps: step 2: loss 5.")
    assert texts[2].startswith("failed: at step 2 of 8 (5 consecutive steps with a non-finite loss or gradient)")
    assert texts[4].startswith("resume differs: resumed at step 2: repeated step 2 has grad_norm 1.")
    assert texts[5].startswith("finished: at step 8 of 8 | time ") and " | saves " in texts[5]
    written = b"".join(path.read_bytes() for path in workdir.rglob("*") if path.is_file())
    out, err = capsys.readouterr()
    assert SECRET not in out + err and SECRET.encode() not in written


def test_webhook_that_is_down_does_not_disturb_the_run(workdir, webhook, capsys):  # noqa: F811
    webhook.answers = [(404, {})] * 99
    assert run_here("--alert_url", webhook.url) == 0
    assert capsys.readouterr().err.count("alerts to 127.0.0.1:") == 1


def test_load_of_the_machine_is_recorded_beside_the_step(workdir):
    run_here("--system_metrics_s", "0.01", "--max_steps", "20", "--use_tensorboard")
    records = [json.loads(line) for line in (workdir / "logs/metrics.jsonl").read_text().splitlines()]
    loads = [record for record in records if "disk_free_gb" in record]
    assert loads and all(0 <= record["step"] <= 20 and "loss" not in record for record in loads)
    assert loads[-1].keys() >= {"cpu_percent", "ram_gb", "ram_total_gb"}
    shown = read_status(workdir / "checkpoints")["load"].items()  # for the monitor
    assert any(load.items() >= shown for load in loads)
    (folder,) = (workdir / "runs").iterdir()
    assert "system/cpu_percent" in scalars(folder)


def test_status_has_the_last_scores_also_after_a_resume(workdir):
    def scores() -> tuple[float, float]:
        status = read_status(Path("checkpoints"))
        return status["val_loss"], status["val_bpb"]

    assert run_here("--eval_freq", "4", "--max_steps", "8") == 0
    evaluations = json.loads(Path("checkpoints/evaluations.json").read_text())
    assert scores() == (evaluations["8"]["val_loss"], evaluations["8"]["val_bpb"])
    before = scores()
    assert run_here("--resume", "--eval_freq", "0", "--max_steps", "9") == 0
    assert scores() == before
