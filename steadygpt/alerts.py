"""Messages about a run to a chat or a phone: JSON to a webhook of Slack, Discord, ntfy or a program of yours."""

import html
import json
import math
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from steadygpt.cli import UserError
from steadygpt.retry import SILENCE_S, asked_pause_s, brief, passing_cause

WAITING = 64  # messages at most; more are dropped
REPEAT_S = 600.0  # between two messages about the same event
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
GIVE_UP_S = 180.0  # after the first attempt of a message
LONGEST_TEXT = 900  # characters of a message: Discord takes 2,000, and ntfy 4,096 bytes
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "SteadyGPT",  # Discord refuses urllib's own name with status 403
    # ntfy shows this field of the JSON in place of all of it (docs.ntfy.sh, "Message templating"); others ignore it.
    "X-Template": "yes",
    "X-Message": "{{.content}}",
}


class Alerts:
    """A queue of messages and the thread that sends them. No failure of a message reaches the run.

    Args:
        url: of the webhook, which check_url() accepts. It is a secret: only masked() may be shown.
        run: the run's name.
        warn: is called in the thread with one line for each outage.
    """

    def __init__(self, url: str, run: str, warn: Callable[[str], object]):
        self.url, self.run, self.warn = url, run, warn
        self.host = socket.gethostname()
        self.opener = urllib.request.build_opener(_NoRedirects)
        self.waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.sent_at_s: dict[str, float] = {}  # by event
        self.held_back: Counter[str] = Counter()  # by event, since its last message
        self.lost = 0  # since the last message that was delivered
        self.problem = ""  # why the last attempt failed
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self.thread.start()

    def send(self, event: str, text: str, **facts) -> None:
        """Queue a message and return at once.

        Args:
            event: started, resumed, finished, stopped, failed, spike, bad steps, save failed or no disk. Of one event,
                at most one message is sent in ten minutes; the next one says how many were held back.
            facts: further fields of the JSON, such as step.
        """
        now_s = monotonic()
        if now_s - self.sent_at_s.get(event, -math.inf) < REPEAT_S:
            self.held_back[event] += 1
            return
        self.sent_at_s[event] = now_s
        more = self.held_back.pop(event, 0)
        line = one_line(f"[{self.run} on {self.host}] {event}: {text}")
        line += f" (and {more} more since the last message)" if more else ""
        if self.waiting.qsize() >= WAITING:
            self.lost += 1
        else:
            self.waiting.put({**facts, "event": event, "run": self.run, "host": self.host, "content": line})

    def close(self, wait_s: float = 5.0) -> None:
        """Wait until everything is sent, at most `wait_s` seconds, and end."""
        self.waiting.put(None)
        self.closing.set()
        self.thread.join(wait_s)
        if self.thread.is_alive() or self.lost:
            self.warn(f"not all alerts were delivered to {masked(self.url)}: {self.problem or 'no answer yet'}")

    def _work(self) -> None:
        for message in iter(self.waiting.get, None):
            lost = self.lost
            is_delivered = self._deliver(payload(message, lost))
            self.lost += -lost if is_delivered else 1

    def _deliver(self, body: bytes) -> bool:
        """Post a message, and retry while that may help; return whether it was delivered."""
        give_up_s, pause_s = monotonic() + GIVE_UP_S, FIRST_PAUSE_S
        while True:
            try:
                self.opener.open(urllib.request.Request(self.url, body, HEADERS), timeout=SILENCE_S).close()
            except Exception as error:
                cause = passing_cause(error)
                reason = brief(cause or error)
                if not self.problem and not self.closing.is_set():  # otherwise close() warns
                    self.warn(f"alerts are not delivered to {masked(self.url)}: {reason}; training continues")
                self.problem = reason
                if cause is None:
                    return False
                asked_s = max(pause_s, asked_pause_s(cause))
                if monotonic() + asked_s > give_up_s:
                    return False
                (sleep if self.closing.is_set() else self.closing.wait)(asked_s)  # close() cuts a pause short
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.problem = ""
                return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError, because urllib would follow it with a GET, without the message."""

    def redirect_request(self, *_):
        return None


def payload(message: dict[str, Any], lost: int) -> bytes:
    """Return the JSON of a message: `content` for Discord and ntfy, `text` for Slack, and the other fields.

    Args:
        lost: messages that were not delivered before this one.
    """
    line = message["content"] + (f" ({lost} earlier alerts were lost)" if lost else "")
    # Slack's markup: <!channel> would notify everyone. Discord's is turned off by allowed_mentions.
    texts = {"content": line, "text": html.escape(line, quote=False), "allowed_mentions": {"parse": []}}
    return json.dumps(message | texts).encode()


def one_line(text: str) -> str:
    """Return text as one printable line of at most LONGEST_TEXT characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= LONGEST_TEXT else line[: LONGEST_TEXT - 4] + " ..."


def masked(url: str) -> str:
    """Return the scheme and the server of a URL; whoever knows the rest can send messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def check_url(url: str) -> None:
    """Check the URL of --alert_url.

    Raises: UserError, which does not repeat the URL.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (checks it)
        is_plain = url.isascii() and url.isprintable() and " " not in url and parts.username is None
        is_webhook = is_plain and parts.scheme in ("http", "https") and parts.hostname
    except ValueError:  # its text repeats parts of the URL
        is_webhook = False
    if not is_webhook:
        raise UserError(
            "--alert_url: not the URL of a webhook; expected http:// or https://, a server and a path, without a user "
            "name (ntfy takes ?auth=... instead). Copy the URL of the webhook again"
        )
