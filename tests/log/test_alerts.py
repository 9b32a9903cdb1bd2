"""Alerts received by a real HTTP server on this machine."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import run_here

import train
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.log import alerts
from steadygpt.log.alerts import Alerts

SECRET = "/services/T0/B0/secret"


class Webhook(ThreadingHTTPServer):
    """A server that answers with `answers` in turn, then with 200, and keeps what it received."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Receive)
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.requests: list[tuple[float, str, dict, dict]] = []  # time, method, headers, JSON
        self.accepted: list[dict] = []
        self.delay_s = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}{SECRET}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Receive(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        message = json.loads(body) if body else {}
        self.server.requests.append((time.monotonic(), self.command, dict(self.headers), message))
        time.sleep(self.server.delay_s)
        status, headers = self.server.answers.pop(0) if self.server.answers else (200, {})
        if status == 200:
            self.server.accepted.append(message)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(alerts, "PAUSES_S", (0, 0.05, 0.1, 0.2))
    monkeypatch.setattr(alerts, "SILENCE_S", 2)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def webhook():
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


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def texts(server: Webhook) -> list[str]:
    return [message["content"].partition("] ")[2] for message in server.accepted]


def test_each_event_arrives_with_its_facts(webhook, sender, warnings):
    events = "started resumed finished stopped failed spike save_failed no_disk".split()
    for step, event in enumerate(events):
        sender.send(event, "as it happened", step=step)
    sender.close()
    assert [(message["event"], message["step"]) for message in webhook.accepted] == [
        (event, step) for step, event in enumerate(events)
    ]
    host = socket.gethostname()
    assert webhook.accepted[0]["content"] == f"[gpt2 on {host}] started: as it happened"
    assert webhook.accepted[0].items() >= {"run": "gpt2", "host": host}.items()
    assert not warnings


def test_the_message_is_what_slack_discord_and_ntfy_document(webhook, sender):
    sender.send("failed", "<!channel> @everyone\n\x1b[31mValueError: 1 < 2 & " + "x" * 9000 + "\ud800")
    sender.close()
    _, method, headers, message = webhook.requests[0]
    assert method == "POST" and headers["Content-Type"] == "application/json"
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
    assert "@everyone \\x1b[31mValueError" in message["content"] and message["content"].isprintable()


def test_a_slow_server_does_not_hold_the_run_up(webhook, sender, warnings):
    webhook.delay_s = 1.0
    start = time.monotonic()
    for event in ("started", "spike", "finished"):
        sender.send(event, "at once")
    assert time.monotonic() - start < 0.1
    start = time.monotonic()
    sender.close(wait_s=0.3)
    assert time.monotonic() - start < 0.6
    assert warnings == [f"some alerts were not delivered to 127.0.0.1:{webhook.server_port}: no answer yet"]


OUTAGES = {  # answers, before the server answers with 200; what arrives; the number of requests and of warnings
    "a short outage is retried": ([503, 503], ["started", "spike", "finished"], 5, 1),
    "each outage is reported": ([429, 429, 200, 429], ["started", "spike", "finished"], 6, 2),
    "a refusal is reported once": ([404] * 8, ["finished"], 9, 1),
    "a redirect is reported once and not followed": ([301] * 8, ["finished"], 9, 1),
}


@pytest.mark.parametrize("case", OUTAGES)
def test_an_outage_delays_messages_or_loses_them(case, webhook, sender, warnings):
    answers, arrive, requests, outages = OUTAGES[case]
    webhook.answers = [(status, {"Location": webhook.url}) for status in answers]
    for event in ("started", "spike", "finished"):
        sender.send(event, "now")
    wait_for(lambda: len(webhook.accepted) == len(arrive))
    sender.close()
    assert texts(webhook) == [f"{event}: now" for event in arrive]
    assert [method for _, method, *_ in webhook.requests] == ["POST"] * requests
    times = [at for at, *_ in webhook.requests]
    assert times[1] - times[0] >= 0.05 and times[2] - times[1] >= 0.1
    assert len(warnings) == outages
    assert f"HTTP {answers[0]}" in warnings[0] and "training continues" in warnings[0]


def test_each_outage_is_reported_once_and_without_the_secret(monkeypatch, warnings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing answers there
        sender = Alerts(f"http://127.0.0.1:{free.getsockname()[1]}{SECRET}", "gpt2", warnings.append)
        for event in ("started", "spike", "finished"):
            sender.send(event, "now")
        wait_for(lambda: warnings)
        sender.close()
    [warning] = warnings
    assert warning.startswith("alerts to 127.0.0.1:") and "Connection refused" in warning and "secret" not in warning


def test_closing_cuts_long_pauses_short(monkeypatch, webhook, sender, warnings):
    monkeypatch.setattr(alerts, "PAUSES_S", (0, 60, 60))
    webhook.answers = [(500, {}), (500, {}), (500, {})]
    for event in ("spike", "finished"):
        sender.send(event, "now")
    wait_for(lambda: warnings)  # now it pauses
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 1.0
    assert texts(webhook) == ["finished: now"]


def test_an_event_is_not_repeated_at_once(monkeypatch, webhook, sender):
    monkeypatch.setattr(alerts, "REPEAT_S", 0.3)
    for step in range(13):
        sender.send("spike", f"loss 9 at step {step}")
    sender.send("save failed", "the disk is full")
    time.sleep(0.4)
    sender.send("spike", "loss 9 at step 99")
    sender.close()
    assert texts(webhook) == ["spike: loss 9 at step 0", "save failed: the disk is full", "spike: loss 9 at step 99"]


@pytest.mark.parametrize("url", [
    "ntfy.sh/secret", "ftp://ntfy.sh/secret", "https:///secret", "https://ntfy.sh:secret/topic",
    "https://ntfy.sh/sec ret", "https://ntfy.sh/secret\n", "https://ntfy.sh/sécret", "https://me:secret@ntfy.sh/topic",
    "https://[ntfy.sh/secret",
])  # fmt: skip
def test_a_url_that_is_no_webhook_is_refused_without_repeating_it(url):
    with pytest.raises(UserError, match=r"^--alert_url is not the URL of a webhook") as raised:
        TrainConfig(alert_url=url)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_the_url_of_a_webhook_is_accepted():
    for url in ("https://hooks.slack.com/services/T0/B0/x", "http://[::1]:8080/", "http://localhost:80/topic?auth=x"):
        TrainConfig(alert_url=url)


def test_a_proxy_of_the_environment_is_used(monkeypatch, webhook, warnings):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{webhook.server_port}")
    monkeypatch.setenv("no_proxy", "")
    sender = Alerts("http://webhook.invalid/topic", "gpt2", warnings.append)
    sender.send("started", "now")
    sender.close()
    assert len(webhook.accepted) == 1


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


def test_run_sends_alerts_and_keeps_their_url_secret(workdir, webhook, capsys, monkeypatch):
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


def test_webhook_that_is_down_does_not_disturb_the_run(workdir, webhook, capsys):
    webhook.answers = [(404, {})] * 99
    assert run_here("--alert_url", webhook.url) == 0
    assert capsys.readouterr().err.count("alerts to 127.0.0.1:") == 1
