"""Tests of steadygpt/prepare/workers.py."""

import errno
import operator
import os
import signal
from functools import partial
from itertools import count

import pytest
from conftest import refusal

from steadygpt.prepare.workers import RUN_AHEAD, map_in_order


def test_results_come_in_order_and_only_a_few_items_are_in_memory_at_once():
    begun = count()
    results = map_in_order(operator.neg, (next(begun) for _ in range(10_000)), num_workers=2)
    for number in range(200):
        assert next(results) == (number, -number)
        ahead = next(begun) - number
        begun = count(ahead + number)
        assert ahead <= 2 + RUN_AHEAD + 1
    results.close()


def test_a_killed_worker_is_one_line():
    with refusal(" 2 ", "--num_workers"):
        list(map_in_order(os._exit, [1], 2))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_dev_shm_is_named(monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", fail)
    with refusal(f"/dev/shm: {os.strerror(number)}", "--shm-size=1g", "--num_workers 1"):
        list(map_in_order(operator.neg, [1], 2))
    assert list(map_in_order(operator.neg, [1], 1)) == [(1, -1)]


def test_workers_work_at_the_same_time(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    meet = [partial(pipe.write_text, "met"), pipe.read_text]  # each waits for the other
    assert [result for _, result in map_in_order(operator.call, meet, 2)] == [3, "met"]


def test_workers_leave_ctrl_c_to_the_main_process_from_their_start():
    [(_, blocked)] = map_in_order(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()], 2)
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
