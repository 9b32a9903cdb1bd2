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

from steadygpt.base.retry import LONGEST_PAUSE_S, SILENCE_S, asked_pause_s, brief, passing_cause
from steadygpt.base.text import printable

REPEAT_S = 600.0  # between two messages about the same event
FIRST_PAUSE_S = 1.0  # between attempts
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
        url: of the webhook, as TrainConfig checks it. It is a secret: only its server may be shown.
        warn: is called in the thread with one line for each outage.
    """

    def __init__(self, url: str, run: str, warn: Callable[[str], object]):
        self.url, self.server, self.run, self.warn = url, urlsplit(url).netloc, run, warn
        self.host = socket.gethostname()
        self.opener = urllib.request.build_opener(_NoRedirects)
        self.sent_at_s: dict[str, float] = {}  # by event
        self.problem = ""  # why the last attempt failed
        self.closing = threading.Event()
        self.waiting: SimpleQueue[bytes | None] = SimpleQueue()  # short, because events are not repeated at once
        self.thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self.thread.start()

    def send(self, event: str, text: str, step: int = 0, max_steps: int = 0) -> None:
        """Queue a message and return at once.

        Args:
            event: started, resumed, finished, stopped, failed, spike, bad steps, save failed or resume
                differs. Of one event, at most one message is sent in ten minutes.
        """
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
        if self.thread.is_alive() or self.problem:
            self.warn(f"some alerts were not delivered to {self.server}: {self.problem or 'no answer yet'}")

    def _work(self) -> None:
        for body in iter(self.waiting.get, None):
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        """Post a message, and retry while that may help; while the run ends, there is one attempt."""
        give_up_s, pause_s = monotonic() + GIVE_UP_S, FIRST_PAUSE_S
        while True:
            is_last = self.closing.is_set()
            try:
                self.opener.open(urllib.request.Request(self.url, body, HEADERS), timeout=SILENCE_S).close()
                self.problem = ""
                return
            except Exception as error:
                cause = passing_cause(error)
                reason = brief(cause or error)
                if not self.problem and not is_last:  # otherwise close() warns
                    self.warn(f"alerts to {self.server} fail: {reason}; training continues")
                self.problem = reason
                wait_s = max(pause_s, asked_pause_s(cause)) if cause else math.inf
                if is_last or monotonic() + wait_s > give_up_s:
                    return
                self.closing.wait(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError, because urllib would follow it with a GET, without the message."""

    def redirect_request(self, *_):
        return None
