"""Alerts received by a real HTTP server on this machine."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from steadygpt import alerts
from steadygpt.alerts import Alerts, check_url, masked, one_line
from steadygpt.cli import UserError

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
        message = json.loads(body, parse_constant=pytest.fail) if body else {}  # NaN is no JSON
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
    monkeypatch.setattr(alerts, "FIRST_PAUSE_S", 0.05)
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


def closed_port() -> str:
    """Return the URL of a port of this machine where nothing answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}{SECRET}"


def texts(server: Webhook) -> list[str]:
    return [message["content"] for message in server.accepted]


def test_each_event_arrives_with_its_facts(webhook, warnings):
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    events = "started resumed finished stopped failed spike save_failed no_disk".split()
    for step, event in enumerate(events):
        sender.send(event, "as it happened", step=step, loss=2.5)
    sender.close()
    assert [message["event"] for message in webhook.accepted] == events
    assert [message["step"] for message in webhook.accepted] == list(range(len(events)))
    host = socket.gethostname()
    assert texts(webhook)[0] == f"[gpt2 on {host}] started: as it happened"
    assert webhook.accepted[0].items() >= {"run": "gpt2", "host": host, "loss": 2.5}.items()
    assert not warnings


def test_the_message_is_what_slack_discord_and_ntfy_document(webhook, warnings):
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send(
        "failed", "<!channel> @everyone\n\x1b[31mValueError: 1 < 2 & " + "x" * 9000 + "\ud800", loss=float("nan")
    )
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
    assert message["content"].isprintable()
    assert message["loss"] is None


def test_a_slow_server_does_not_hold_the_run_up(webhook, warnings):
    webhook.delay_s = 1.0
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    start = time.monotonic()
    for event in ("started", "spike", "finished"):
        sender.send(event, "at once")
    assert time.monotonic() - start < 0.1
    start = time.monotonic()
    sender.close(wait_s=0.3)
    assert time.monotonic() - start < 0.6
    assert warnings == [f"not all alerts were delivered to {masked(webhook.url)}"]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_an_answer_that_may_change_is_retried(webhook, warnings, status):
    webhook.answers = [(status, {}), (status, {})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("started", "now")
    sender.close()
    assert len(webhook.requests) == 3 and len(webhook.accepted) == 1
    times = [at for at, *_ in webhook.requests]
    assert times[1] - times[0] >= 0.05 and times[2] - times[1] >= 0.1  # the pauses grow


def test_the_server_says_when_to_retry(webhook, warnings):
    webhook.answers = [(429, {"Retry-After": "1"})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("started", "now")
    while not webhook.accepted:
        time.sleep(0.01)
    assert webhook.requests[1][0] - webhook.requests[0][0] >= 1.0
    sender.close()


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_refusal_is_not_retried_and_reported_once(webhook, warnings, status):
    webhook.answers = [(status, {}), (status, {})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    for event in ("started", "spike", "finished"):
        sender.send(event, "now")
    sender.close()
    assert len(webhook.requests) == 3
    assert len(warnings) == 1 and f"HTTP {status}" in warnings[0]
    assert texts(webhook)[0].endswith("finished: now (2 earlier alerts were lost)")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_reported_instead_of_losing_the_message(webhook, warnings, status):
    webhook.answers = [(status, {"Location": "https://ntfy.example/secret"})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("started", "now")
    sender.close()
    assert [method for _, method, *_ in webhook.requests] == ["POST"]
    assert f"HTTP {status}" in warnings[0] and "to https://ntfy.example;" in warnings[0]
    assert "secret" not in "".join(warnings)


def test_an_outage_is_reported_once_and_without_the_secret(monkeypatch, webhook, warnings):
    monkeypatch.setattr(alerts, "GIVE_UP_S", 0.2)
    sender = Alerts(closed_port(), "gpt2", warnings.append)
    for event in ("started", "spike", "finished"):
        sender.send(event, "now")
    sender.close()
    assert len(warnings) == 2
    assert "Connection refused" in warnings[0] and "training continues" in warnings[0]
    assert "secret" not in "".join(warnings)


def test_each_outage_is_reported(webhook, warnings):
    webhook.answers = [(500, {}), (200, {}), (500, {})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("started", "now")
    sender.send("finished", "now")
    sender.close()
    assert len(warnings) == 2 and len(webhook.accepted) == 2


def test_closing_cuts_a_long_pause_short(monkeypatch, webhook, warnings):
    monkeypatch.setattr(alerts, "FIRST_PAUSE_S", 60.0)
    webhook.answers = [(500, {})]
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("finished", "now")
    while not webhook.requests:
        time.sleep(0.01)
    time.sleep(0.1)  # now it pauses
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 1.0
    assert len(webhook.accepted) == 1


def test_closing_ends_in_time_when_the_server_is_down(warnings):
    sender = Alerts(closed_port(), "gpt2", warnings.append)
    sender.send("finished", "now")
    start = time.monotonic()
    sender.close(wait_s=0.5)
    assert time.monotonic() - start < 0.8
    assert "not all alerts were delivered" in warnings[-1]


def test_the_oldest_messages_are_dropped_and_counted(monkeypatch, webhook, warnings):
    monkeypatch.setattr(alerts, "WAITING", 3)
    webhook.delay_s = 0.3
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("first", "is being sent")
    while not webhook.requests:
        time.sleep(0.01)
    webhook.delay_s = 0.0
    for number in range(5):
        sender.send(f"event{number}", "now")
    sender.close()
    assert [message["event"] for message in webhook.accepted] == ["first", "event2", "event3", "event4"]
    assert texts(webhook)[1].endswith("event2: now (2 earlier alerts were lost)")
    assert texts(webhook)[2].endswith("event3: now")
    assert not warnings


def test_a_repeated_event_is_held_back_and_counted(monkeypatch, webhook, warnings):
    monkeypatch.setattr(alerts, "REPEAT_S", 0.3)
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    for step in range(13):
        sender.send("spike", f"loss 9 at step {step}")
    sender.send("save failed", "the disk is full")
    time.sleep(0.4)
    sender.send("spike", "loss 9 at step 99")
    sender.close()
    assert [text.partition("] ")[2] for text in texts(webhook)] == [
        "spike: loss 9 at step 0",
        "save failed: the disk is full",
        "spike: loss 9 at step 99 (and 12 more since the last message)",
    ]


def test_facts_that_are_no_json_do_not_end_the_thread(webhook, warnings):
    endless = []
    endless.append(endless)
    sender = Alerts(webhook.url, "gpt2", warnings.append)
    sender.send("spike", "now", losses=endless)
    sender.send("finished", "now", folder=tuple, loss=float("inf"))
    sender.close()
    assert len(warnings) == 1 and "Circular reference" in warnings[0]
    assert webhook.accepted[0]["folder"] == "<class 'tuple'>"


@pytest.mark.parametrize(
    "url",
    [
        "ntfy.sh/secret",
        "ftp://ntfy.sh/secret",
        "https:///secret",
        "https://ntfy.sh:secret/topic",
        "https://ntfy.sh/sec ret",
        "https://ntfy.sh/secret\n",
        "https://ntfy.sh/sécret",
        "https://me:secret@ntfy.sh/topic",
        "https://[ntfy.sh/secret",
    ],
)
def test_a_url_that_is_no_webhook_is_refused_without_repeating_it(url):
    with pytest.raises(UserError, match=r"^--alert_url: ") as raised:
        check_url(url)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["https://hooks.slack.com/services/T/B/x", "http://[::1]:8080/", "https://ntfy.sh/t?a=b"]
)
def test_the_url_of_a_webhook_is_accepted(url):
    check_url(url)


def test_only_the_server_of_a_url_is_shown():
    assert masked("https://hooks.slack.com/services/T0/B0/secret") == "https://hooks.slack.com"
    assert masked("http://localhost:8080/topic?auth=secret") == "http://localhost:8080"


def test_text_of_an_exception_becomes_one_printable_line():
    assert one_line("CUDA error:\n  \x1b[2Jout of memory\t!") == "CUDA error: \ufffd[2Jout of memory !"
    assert len(one_line("x" * 5000)) == alerts.LONGEST_TEXT


def test_a_proxy_of_the_environment_is_used(monkeypatch, webhook, warnings):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{webhook.server_port}")
    monkeypatch.setenv("no_proxy", "")
    sender = Alerts("http://webhook.invalid/topic", "gpt2", warnings.append)
    sender.send("started", "now")
    sender.close()
    assert len(webhook.accepted) == 1
