"""Tests of steadygpt/base/progress.py: lines in a log file, a moving line on a terminal of any size."""

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.base import progress
from steadygpt.base.progress import ProgressBar, say
from steadygpt.base.text import columns_of


def test_in_a_log_file_each_state_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    with ProgressBar(desc="working", total=2e9, initial=1e9, unit="B") as bar:
        bar.set_postfix_str("3.00M tokens/s", refresh=False)
        bar.update(5e8)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("working: 75%, 1.50G of 2.00G, 00:00 elapsed, 00:00 remaining, ")
    assert lines[0].endswith("B/s, 3.00M tokens/s")


def test_counts_are_whole_numbers_and_slow_rates_are_times_of_one(capsys):
    with ProgressBar(desc="scoring", total=66, unit="step") as bar:
        bar.start_t -= 132
        bar.update(66)
    [line] = {*capsys.readouterr().err.splitlines()}
    assert line.startswith("scoring: 100%, 66 of 66, ") and line.endswith("s/step")


def test_in_a_log_file_lines_are_30_seconds_apart(capsys):
    with ProgressBar(desc="working", total=100, unit="B") as bar:
        for _ in range(100):
            time.sleep(0.005)
            bar.update()
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first and the last


def test_a_delay_hides_quick_work_and_nothing_is_shown_of_none(capsys):
    for number, options in ((3, {"delay": 3}), (0, {})):
        assert [*ProgressBar(iterable=range(number), total=number, desc="working", unit="B", **options)] == [
            *range(number)
        ]
    assert capsys.readouterr().err == ""


def test_names_of_files_cannot_control_the_terminal(capsys):
    say("a\x1b[2J\n: corrupt")
    with ProgressBar(desc="b\x1b[2J\n", total=1, unit="B") as bar:
        bar.update()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "a\\x1b[2J\\n: corrupt" and second.startswith("b\\x1b[2J\\n: 100%")


def states_on_a_terminal(columns: int, desc: str, total: int | None) -> list[str]:
    """Return what a bar shows one after the other on a terminal of this width."""
    main_end, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(other_end, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        assert columns_of(terminal) == (columns or 80)
        patch.setattr(sys, "stderr", terminal)
        with ProgressBar(desc=desc, total=total, unit="B") as bar:
            for _ in range(10):
                bar.set_postfix_str("3.00M tokens/s", refresh=False)
                bar.update(100)
    text = b""
    with suppress(OSError):  # the other end is closed, and all is read
        while part := os.read(main_end, 10**6):
            text += part
    os.close(main_end)
    return [state for state in text.decode().replace("\n", "").split("\r") if state]


@settings(max_examples=30)
@given(
    columns=st.sampled_from([0]) | st.integers(40, 200),
    desc=st.text("abc ", min_size=1, max_size=60),
    total=st.sampled_from([None, 1000]),
)
def test_on_a_terminal_no_state_of_a_bar_is_longer_than_its_width(columns, desc, total):
    lengths = {*map(len, states_on_a_terminal(columns, desc, total))}
    assert max(lengths) <= (columns or 80)
    if total:  # the bar fills the line
        assert lengths == {columns - 1 if columns else 80}


def test_a_file_and_a_pipe_have_no_width(tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert columns_of(file) == columns_of(io.StringIO()) == float("inf")
