"""Messages about a run to a chat or a phone: JSON to a webhook of Slack, Discord, ntfy or a program of yours."""

import html
import json
import math
import socket
import threading
import urllib.request
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from urllib.parse import urlsplit

from steadygpt.base.retry import SILENCE_S, brief
from steadygpt.base.text import printable

REPEAT_S = 600.0  # between two messages about the same event
PAUSES_S = (0, 1, 10, 60)  # before each attempt to deliver a message
LONGEST_TEXT = 900  # characters of a message: Discord takes 2,000, and ntfy 4,096 bytes
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "SteadyGPT",  # Discord refuses urllib's own name with status 403
    # ntfy shows this field of the JSON in place of all of it (docs.ntfy.sh, "Message templating"); others ignore it.
    "X-Template": "yes",
    "X-Message": "{{.content}}",
}


class Alerts:
    """A queue of messages and the thread that sends them, and calls `warn` with one line for each outage.

    The URL is a secret: only its server may be shown.
    """

    def __init__(self, url: str, run: str, warn: Callable[[str], object]):
        self.url, self.server, self.run, self.warn = url, urlsplit(url).netloc, run, warn
        self.host = socket.gethostname()
        self.sent_at_s: dict[str, float] = {}  # by event
        self.closing = threading.Event()
        self.waiting: SimpleQueue[bytes | None] = SimpleQueue()  # short, because events are not repeated at once
        self.thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self.thread.start()

    def send(self, event: str, text: str, step: int = 0, max_steps: int = 0) -> None:
        """Queue a message and return at once; of one event (docs/alerts.md), at most one is sent in ten minutes."""
        now_s = monotonic()
        if now_s - self.sent_at_s.get(event, -math.inf) < REPEAT_S:
            return
        self.sent_at_s[event] = now_s
        line = printable(" ".join(f"[{self.run} on {self.host}] {event}: {text}".split()))[:LONGEST_TEXT]
        message = {"event": event, "step": step, "max_steps": max_steps, "run": self.run, "host": self.host}
        # `content` is for Discord and ntfy, `text` for Slack. In its markup <!channel> would notify everyone; Discord's
        # is turned off by allowed_mentions.
        message |= {"content": line, "text": html.escape(line, quote=False), "allowed_mentions": {"parse": []}}
        self.waiting.put(json.dumps(message).encode())

    def close(self, wait_s: float = 5.0) -> None:
        """Wait until everything is sent, at most `wait_s` seconds, and end."""
        self.waiting.put(None)
        self.closing.set()
        self.thread.join(wait_s)
        if self.thread.is_alive():
            self.warn(f"some alerts were not delivered to {self.server}: no answer yet")

    def _work(self) -> None:
        opener, is_failing = urllib.request.build_opener(_NoRedirects), False
        for body in iter(self.waiting.get, None):
            for pause_s in PAUSES_S:
                self.closing.wait(pause_s)  # while the run ends, attempts follow one another at once
                try:
                    opener.open(urllib.request.Request(self.url, body, HEADERS), timeout=SILENCE_S).close()
                    is_failing = False
                    break
                except Exception as error:
                    if not is_failing:
                        self.warn(f"alerts to {self.server} fail: {brief(error)}; training continues")
                    is_failing = True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError, because urllib would follow it with a GET, without the message."""

    def redirect_request(self, *_):
        return None
