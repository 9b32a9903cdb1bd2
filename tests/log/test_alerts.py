"""Alerts received by a real HTTP server on this machine."""

import itertools
import json
import re
import socket
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import REPO, run_here
from ground import acting_here, change_grad_norm
from injected import bad_numbers, fail_save, signal_at

from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.log import alerts
from steadygpt.log.alerts import Alerts
from steadygpt.run import step as steps

SECRET = "/services/T0/B0/secret"


class Webhook(ThreadingHTTPServer):
    """A server that keeps the POST requests that it gets, and answers each after `delay_s` with `status`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Receive)
        self.requests: list[tuple[dict, dict]] = []  # headers, JSON
        self.status, self.delay_s = 200, 0.0
        self.server = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.server}{SECRET}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def texts(self) -> list[str]:
        """Return the messages that were posted, without the run and the host."""
        return [message["content"].partition("] ")[2] for _, message in self.requests]


class Receive(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((dict(self.headers), json.loads(body)))
        time.sleep(self.server.delay_s)
        self.answer(self.server.status)

    def do_GET(self):
        self.answer(200)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Location", "/elsewhere")  # of a redirect
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def webhook(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Webhook()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def sender(webhook, warnings):
    return Alerts(webhook.url, "gpt2", warnings.append)


def test_each_event_is_one_message_with_the_run_and_its_host(webhook, sender, warnings):
    for event in ("started", "spike", "save failed", "finished"):
        sender.send(event, "as it happened")
    sender.close()
    assert [message["content"] for _, message in webhook.requests] == [
        f"[gpt2 on {socket.gethostname()}] {event}: as it happened"
        for event in ("started", "spike", "save failed", "finished")
    ]
    assert not warnings


def test_the_message_is_what_slack_discord_and_ntfy_document(webhook, sender):
    sender.send("failed", "<!channel> @everyone\n\x1b[31mValueError: 1 < 2 & " + "x" * 9000 + "\ud800")
    sender.close()
    [(headers, message)] = webhook.requests
    assert headers["Content-Type"] == "application/json"
    # Slack: `text` with &, < and > escaped, so that <!channel> notifies nobody.
    assert "&lt;!channel&gt; @everyone" in message["text"] and "1 &lt; 2 &amp; x" in message["text"]
    assert "<" not in message["text"]
    # Discord: at most 2,000 characters of `content`, no mentions, and not urllib's User-Agent, which it refuses.
    assert "<!channel> @everyone" in message["content"] and len(message["content"]) <= 2000
    assert message["allowed_mentions"] == {"parse": []}
    assert headers["User-Agent"] == "SteadyGPT"
    # ntfy: a template that takes `content`, of at most 4,096 bytes.
    assert headers["X-Template"] == "yes" and headers["X-Message"] == "{{.content}}"
    assert len(message["content"].encode()) <= 4096
    assert r"@everyone\n\x1b[31mValueError" in message["content"] and message["content"].isprintable()


def test_a_server_that_does_not_respond_delays_neither_the_run_nor_its_end(monkeypatch, webhook, sender, warnings):
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(alerts, "CLOSING_S", 0.6)
    webhook.delay_s = 2.0
    start = time.monotonic()
    for event in ("started", "spike", "finished"):
        sender.send(event, "now")
    assert time.monotonic() - start < 0.2
    sender.close()
    assert time.monotonic() - start < 1.2
    assert warnings == [f"an alert did not reach {webhook.server}: TimeoutError: timed out; training continues"]


def test_the_end_of_a_run_waits_for_its_last_alert(webhook, sender, warnings):
    webhook.delay_s = 0.3
    for event in ("bad steps", "failed"):
        sender.send(event, "now")
    sender.close()
    assert webhook.texts() == ["bad steps: now", "failed: now"] and not sender.thread.is_alive() and not warnings


@pytest.mark.parametrize(("status", "reason"), [
    (404, "HTTP 404 Not Found"),
    (301, "ConnectionError: .*(?i:redirect)"),
    (307, "HTTP 307 Temporary Redirect"),
])  # fmt: skip
def test_a_refusal_is_reported_once_and_later_alerts_are_sent(status, reason, webhook, sender, warnings):
    webhook.status = status
    for event in ("started", "spike", "finished"):
        sender.send(event, "now")
    sender.close()
    assert webhook.texts() == ["started: now", "spike: now", "finished: now"]
    [warning] = warnings
    assert re.search(f" {webhook.server}: {reason}", warning)


def test_a_server_that_is_down_is_reported_once_and_without_the_secret(monkeypatch, warnings):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing answers there
        sender = Alerts(f"http://127.0.0.1:{free.getsockname()[1]}{SECRET}", "gpt2", warnings.append)
        for event in ("started", "spike", "finished"):
            sender.send(event, "now")
        sender.close()
    [warning] = warnings
    assert warning.startswith("an alert did not reach 127.0.0.1:") and "Connection refused" in warning
    assert "secret" not in warning


def test_an_event_is_not_repeated_at_once(monkeypatch, webhook, sender):
    monkeypatch.setattr(alerts, "REPEAT_S", 0.3)
    for step in range(13):
        sender.send("spike", f"loss 9 at step {step}")
    sender.send("save failed", "the disk is full")
    time.sleep(0.4)
    sender.send("spike", "loss 9 at step 99")
    sender.close()
    assert webhook.texts() == ["spike: loss 9 at step 0", "save failed: the disk is full", "spike: loss 9 at step 99"]


def test_a_proxy_of_the_environment_is_used(monkeypatch, webhook, warnings):
    monkeypatch.setenv("http_proxy", f"http://{webhook.server}")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(urllib.request, "_opener", None)  # which has read the environment already
    sender = Alerts("http://webhook.invalid/topic", "gpt2", warnings.append)
    sender.send("started", "now")
    sender.close()
    assert webhook.texts() == ["started: now"] and not warnings


@pytest.mark.parametrize("url", [
    "ntfy.sh/secret", "ftp://ntfy.sh/secret", "https:///secret", "https://ntfy.sh:secret/topic",
    "https://ntfy.sh/sec ret", "https://ntfy.sh/secret\n", "https://ntfy.sh/sécret", "https://me:secret@ntfy.sh/topic",
    "https://[ntfy.sh/secret",
])  # fmt: skip
def test_a_url_that_is_no_webhook_is_refused_without_repeating_it(url):
    with pytest.raises(UserError, match=r"^--alert_url .*\bhttps://") as raised:
        TrainConfig(alert_url=url)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_the_url_of_a_webhook_is_accepted():
    for url in ("https://hooks.slack.com/services/T0/B0/x", "http://[::1]:8080/", "http://localhost:80/topic?auth=x"):
        TrainConfig(alert_url=url)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


def nan_norms_from_step_2(rank: int) -> None:
    steps = itertools.count()
    change_grad_norm(lambda norm: norm if next(steps) < 2 else torch.tensor(float("nan")))


def test_run_sends_alerts_and_keeps_their_url_secret(workdir, webhook, capsys):
    with acting_here(nan_norms_from_step_2):
        assert run_here("--alert_url", webhook.url, "--use_tensorboard") == 1
    assert run_here("--alert_url", webhook.url, "--resume", "latest", "--use_tensorboard") == 0
    started, bad_steps, failed, resumed, finished = webhook.texts()
    assert started == "started: at step 0 of 8"
    assert bad_steps.startswith("bad steps: step 2: loss 5.")
    assert failed.startswith("failed: at step 2 of 8 (5 consecutive steps with a non-finite loss or gradient)")
    assert resumed == "resumed: at step 2 of 8"
    assert finished.startswith("finished: at step 8 of 8 | time ") and " | saves " in finished
    written = b"".join(path.read_bytes() for path in workdir.rglob("*") if path.is_file())
    out, err = capsys.readouterr()
    assert SECRET not in out + err and SECRET.encode() not in written


def test_webhook_that_is_down_does_not_disturb_the_run(workdir, webhook, capsys):
    webhook.status = 404
    assert run_here("--alert_url", webhook.url) == 0
    assert capsys.readouterr().err.count("an alert did not reach 127.0.0.1:") == 1


# ---------------------------------------------------------------------------------------------------------------------
# each event of docs/monitoring.md


def losses_that_are_logged_wrongly(monkeypatch) -> None:
    log = Path("checkpoints/metrics.jsonl")
    log.write_text(re.sub(r'"loss": [\d.]+', '"loss": 9.5', log.read_text()))


def short_windows(monkeypatch) -> None:
    monkeypatch.setattr(steps, "SPIKE_WINDOW", 4)


# event -> flags of the run; faults in it; a change before it; whether another run of 8 steps precedes it
EVENTS = {
    "started": ((), (), None, False),
    "finished": ((), (), None, False),
    "resumed": (("--resume", "latest", "--max_steps", "9"), (), None, True),
    "stopped": ((), (partial(signal_at, 2),), None, False),
    "failed": (("--max_bad_steps", "2"), (partial(bad_numbers, range(2, 9), "nan loss", 0),), None, False),
    "bad steps": ((), (partial(bad_numbers, [3], "nan loss", 0),), None, False),
    "spike": ((), (partial(bad_numbers, [6], "large loss", 0),), short_windows, False),
    "save failed": ((), (partial(fail_save, 0, OSError(28, "No space left on device")),), None, False),
    "resume differs": (("--resume", "checkpoints/rolling_step_000002.pt"), (), losses_that_are_logged_wrongly, True),
}


def test_each_documented_event_has_a_run_here():
    section = (REPO / "docs/monitoring.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[a-z ]+` ?)+) \|", section, re.MULTILINE)
    assert set(re.findall("`([a-z ]+)`", " ".join(rows))) == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_arrives(workdir, monkeypatch, webhook, event):
    flags, faults, change, is_second = EVENTS[event]
    if is_second:
        assert run_here("--eval_freq", "4", "--checkpoint_freq", "2") == 0
    with monkeypatch.context() as patched, acting_here(*faults):
        if change:
            change(patched)
        run_here("--alert_url", webhook.url, *flags)
    assert event in [text.partition(":")[0] for text in webhook.texts()]
