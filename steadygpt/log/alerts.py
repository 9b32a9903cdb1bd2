"""Alerts about a run to a chat or a phone: one JSON POST that Slack, Discord and ntfy understand."""

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

from steadygpt.base.retry import brief
from steadygpt.base.text import printable

REPEAT_S = 600.0  # between two alerts about the same event: a run may have many spikes in a row
TIMEOUT_S = 5.0  # of a server that does not respond
CLOSING_S = 10.0  # for the last alerts; a run that fails may send two
LONGEST_TEXT = 900  # characters of an alert: Discord takes 2,000, and ntfy 4,096 bytes
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "SteadyGPT",  # Discord refuses urllib's own name with status 403
    # ntfy shows this field of the JSON instead of all of it (docs.ntfy.sh/publish, "Inline templating").
    "X-Template": "yes",
    "X-Message": "{{.content}}",
}


class Alerts:
    """A thread that posts alerts, so that training never waits. Only the first failure is reported, to `warn`.

    The URL is a secret: only its server may be shown.
    """

    def __init__(self, url: str, run: str, warn: Callable[[str], object]):
        self.url = url
        self.server = urlsplit(url).netloc
        self.prefix = f"[{run} on {socket.gethostname()}]"
        self.warn = warn
        self.sent_at_s: dict[str, float] = {}  # by event
        self.messages: SimpleQueue[str | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._post_all, name="alerts", daemon=True)
        self.thread.start()

    def send(self, event: str, text: str) -> None:
        """Post an alert in the background, unless the same event was sent a short time ago (docs/monitoring.md)."""
        now_s = monotonic()
        if now_s - self.sent_at_s.get(event, -math.inf) < REPEAT_S:
            return
        self.sent_at_s[event] = now_s
        self.messages.put(printable(f"{self.prefix} {event}: {text}")[:LONGEST_TEXT])

    def close(self) -> None:
        """Give the last alerts CLOSING_S seconds to arrive."""
        self.messages.put(None)
        self.thread.join(CLOSING_S)

    def _post_all(self) -> None:
        has_failed = False
        for message in iter(self.messages.get, None):
            try:
                post(self.url, message)
            except Exception as error:  # a network or a server may fail in any way, which must not end the run
                if not has_failed:
                    self.warn(f"an alert did not reach {self.server}: {brief(error)}; training continues")
                has_failed = True


def post(url: str, message: str) -> None:
    """Post a message to Slack, Discord or ntfy. Raises: URLError, OSError."""
    # Discord and ntfy read `content`, Slack `text`. In Slack's markup <!channel> would notify everyone;
    # `allowed_mentions` turns off Discord's @everyone.
    body = {"content": message, "text": html.escape(message, quote=False), "allowed_mentions": {"parse": []}}
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        if response.url != url:  # urllib follows a redirect with a GET, without the message
            raise ConnectionError("the server redirects; use the URL that it redirects to")
