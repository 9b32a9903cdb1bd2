"""Messages about a run to a chat or a phone: JSON to a webhook of Slack, Discord, ntfy or a program of yours."""

import html
import json
import math
import socket
import threading
import urllib.request
from collections import Counter, deque
from collections.abc import Callable
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit

from steadygpt.cli import UserError
from steadygpt.retry import SILENCE_S, asked_pause_s, brief, passing_cause

WAITING = 64  # messages at most; the oldest are dropped
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
        self.waiting: deque[dict[str, Any]] = deque()
        self.sent_at_s: dict[str, float] = {}  # by event
        self.held_back: Counter[str] = Counter()  # by event, since its last message
        self.lost = 0  # since the last message that was delivered
        self.end_s = math.inf  # when close() stops waiting
        self.is_failing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self.thread.start()

    def send(self, event: str, text: str, **facts) -> None:
        """Queue a message and return at once.

        Args:
            event: started, resumed, finished, stopped, failed, spike, bad steps, save failed or no disk. Of one event,
                at most one message is sent in ten minutes; the next one says how many were held back.
            facts: further fields of the JSON, such as step.
        """
        with self.changed:
            now_s = monotonic()
            if now_s - self.sent_at_s.get(event, -math.inf) < REPEAT_S:
                self.held_back[event] += 1
                return
            self.sent_at_s[event] = now_s
            more = self.held_back.pop(event, 0)
            line = one_line(f"[{self.run} on {self.host}] {event}: {text}")
            line += f" (and {more} more since the last message)" if more else ""
            self.waiting.append({**facts, "event": event, "run": self.run, "host": self.host, "content": line})
            if len(self.waiting) > WAITING:
                self.waiting.popleft()
                self.lost += 1
            self.changed.notify()

    def close(self, wait_s: float = 5.0) -> None:
        """Wait until everything is sent, at most `wait_s` seconds, and end."""
        with self.changed:
            self.end_s = monotonic() + wait_s
            self.changed.notify()
        self.thread.join(wait_s)
        if self.thread.is_alive() or self.lost:
            self.warn(f"not all alerts were delivered to {masked(self.url)}")

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.end_s < math.inf)
                if not self.waiting:
                    return
                message = self.waiting.popleft()
                lost = self.lost
            is_delivered = self._deliver(message, lost)
            with self.changed:
                self.lost += -lost if is_delivered else 1

    def _deliver(self, message: dict[str, Any], lost: int) -> bool:
        """Post a message, and retry while that may help; return whether it was delivered."""
        give_up_s, pause_s = monotonic() + GIVE_UP_S, FIRST_PAUSE_S
        while True:
            try:
                request = urllib.request.Request(self.url, payload(message, lost), HEADERS)
                self.opener.open(request, timeout=SILENCE_S).close()
            except Exception as error:
                cause = passing_cause(error)
                self._warn_once(cause or error)
                if cause is None or not self._pause(max(pause_s, asked_pause_s(cause)), give_up_s):
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.is_failing = False
                return True

    def _pause(self, pause_s: float, give_up_s: float) -> bool:
        """Wait before another attempt, until close() at most; return whether there is time for one."""
        with self.changed:
            end_s = self.end_s
            if monotonic() + pause_s > min(give_up_s, end_s):
                return False
            self.changed.wait_for(lambda: self.end_s != end_s, pause_s)
            return True

    def _warn_once(self, error: BaseException) -> None:
        """Warn about the first failure after a delivery; not after close(), when the log is closed too."""
        if not self.is_failing and monotonic() < self.end_s:
            self.is_failing = True
            self.warn(f"alerts are not delivered to {masked(self.url)}: {reason_of(error)}; training continues")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTPError, because urllib would follow it with a GET, without the message."""

    def redirect_request(self, *_):
        return None


def payload(message: dict[str, Any], lost: int = 0) -> bytes:
    """Return the JSON of a message: `content` for Discord and ntfy, `text` for Slack, and the other fields.

    Args:
        lost: messages that were not delivered before this one.
    """
    line = message["content"] + (f" ({lost} earlier alerts were lost)" if lost else "")
    # JSON has no NaN.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in message.items()}
    # Slack's markup: <!channel> would notify everyone. Discord's is turned off by allowed_mentions.
    texts = {"content": line, "text": html.escape(line, quote=False), "allowed_mentions": {"parse": []}}
    return json.dumps(plain | texts, default=str).encode()


def one_line(text: str) -> str:
    """Return text as one printable line of at most LONGEST_TEXT characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= LONGEST_TEXT else line[: LONGEST_TEXT - 4] + " ..."


def reason_of(error: BaseException) -> str:
    """Return why a message was not delivered; of a redirect, the server it leads to."""
    if isinstance(error, HTTPError) and 300 <= error.code < 400:
        return f"{brief(error)}, to {masked(urljoin(error.geturl(), error.headers.get('Location', '')))}"
    return brief(error)


def masked(url: str) -> str:
    """Return the scheme and the server of a URL; whoever knows the rest can send messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def check_url(url: str) -> None:
    """Check the URL of --alert_url.

    Raises: UserError, which does not repeat the URL.
    """
    expected = "expected http:// or https://, a server and a path. Copy the URL of the webhook again"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (checks it)
    except ValueError:  # its text repeats parts of the URL
        raise UserError(f"--alert_url: not a URL; {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--alert_url: not the URL of a webhook; found scheme {parts.scheme!r}; {expected}")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise UserError(f"--alert_url: found a space or a special character in the URL; {expected}")
    if parts.username is not None:
        raise UserError("--alert_url: found a user name in the URL; expected none. ntfy takes ?auth=... instead")
