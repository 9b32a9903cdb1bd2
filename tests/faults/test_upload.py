"""Uploads to an object store: kill -9 at any instant of an upload, after which the machine is lost."""

import os
import random
import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import folders
from harness import Run, assert_equals_reference
from test_mirror import check_checkpoints

from steadygpt.mirror.store import Mirror

FLAGS = ("--max_steps", "60", "--checkpoint_freq", "2", "--dropout", "0.1")
BYTES_PER_S = 600_000  # so that an upload of a checkpoint takes a third of a second


def use_store(variables: dict[str, str], rank: int) -> None:
    os.environ.update(variables)


@pytest.mark.storm
@pytest.mark.parametrize("kills", [20])
def test_kill_during_uploads_loses_only_what_is_not_uploaded(workdir, s3, kills, record_property):
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    start = partial(Run, faults=[partial(use_store, variables)])
    assert start(*FLAGS, *folders("reference")).wait() == [0]
    rng, number, killed, within = random.Random(kills), 0, 0, 0
    s3.fail("PUT .*/step_", times=-1, bytes_per_s=BYTES_PER_S)
    while killed < kills:
        name, url = f"run{number}", f"{s3.url}/run{number}"
        # Every other run waits for each upload, so that its uploads are far apart.
        waits = ("--no-background-upload",) if killed % 2 else ()
        run = start(*FLAGS, *folders(name), "--resume", "auto", "--mirror", url, *waits)
        for _ in range(rng.randint(1, 4)):
            while run.is_alive() and not s3.receiving.startswith(f"PUT /{s3.bucket}/{name}/step_"):
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.5))
        within += "/step_" in s3.receiving
        run.kill()
        text, mirror = run.text(), Mirror(url)
        there = mirror.index().checkpoints
        check_checkpoints(mirror, workdir)
        if "finished after" in text:
            assert_equals_reference(name)
            number += 1
            continue
        killed += 1
        reported = [int(step) for step in re.findall(r"^uploaded step (\d+) as", text, re.MULTILINE)]
        assert not reported or there["latest.pt"].step >= reported[-1]
        shutil.rmtree(name)  # the machine is lost
    s3.faults.clear()
    last = start(*FLAGS, *folders(name), "--resume", "auto", "--mirror", url)
    assert last.wait() == [0], last.text()
    assert_equals_reference(name)
    assert Path(name, "latest.pt").exists()
    record_property("kills", killed)
    record_property("in the transfer of a checkpoint", within)
