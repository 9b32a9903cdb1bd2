"""Work that ranks do again names a chip that computes wrongly. Other runs keep their bits: faults/test_equal.py."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import FSDP
from harness import Run, folders
from injected import flip_gradient

from steadygpt.machine.audit import TRIALS, Audits
from steadygpt.machine.digests import Corrupted
from steadygpt.machine.ranks import Ranks

FLAGS = ("--audit_steps", "2", "--max_steps", "8", "--checkpoint_freq", "3", "--steps_per_epoch", "99")
AGAIN, NEIGHBOUR = "when computed again", "than on the next rank"


@pytest.mark.parametrize(("ranks", "wrong", "times", "found", "recipe"), [
    # A micro-step of an audit, before steps 0, 2, ...: own, own again, that of the next rank; then those of two steps.
    pytest.param(1, 0, {7}, f"step 2: rank 0: another result for the same micro-batch {AGAIN}", (), id="once"),
    pytest.param(3, 1, None, f"step 0: rank 1: another result for the same micro-batch {NEIGHBOUR}", (), id="always"),
    pytest.param(2, 1, None, f"step 0: rank 0 and 1: another result for the same micro-batch {NEIGHBOUR}", (),
                 id="always, of two", marks=pytest.mark.storm),
    pytest.param(4, 3, {2}, f"step 0: rank 0 and 3: another result for the same micro-batch {NEIGHBOUR}", (),
                 id="once, for the neighbour", marks=pytest.mark.storm),
    pytest.param(2, 0, {1}, f"step 0: rank 0 and 1: another result for the same micro-batch {AGAIN}", FSDP,
                 id="once, fsdp", marks=pytest.mark.storm),
])  # fmt: skip
def test_a_chip_that_computes_wrongly_is_named(workdir, ranks, wrong, times, found, recipe):
    size = 64 if ranks == 1 else 32 * ranks
    flags = (*FLAGS, *recipe, "--total_batch_size", str(size), *folders("run"))
    run = Run(*flags, ranks=ranks, faults=[partial(flip_gradient, wrong, times)])
    assert set(run.wait()) == {1}, run.text()
    since = "Saves" if "step 0" in found else "Saves after step 0"
    assert f"\nwarning: {found}; a memory or a chip is wrong. {since} may hold its errors; resume" in run.text()
    assert "Traceback" not in run.text()
    assert json.loads(Path("run/ckpt/status.json").read_text())["status"] == "failed"


def test_where_bits_may_differ_the_first_audits_set_a_bound():
    audits, norms = Audits(Ranks(torch.device("cpu")), is_exact=False, is_sharded=False), torch.ones(9).double()
    said = [audits.compare(n, norms, norms * (1 + 1e-5 * n), norms) for n in range(TRIALS)]
    assert said == ["", "", "audit 3: results may differ by 0.0002 (relative), 10 times what they did so far"]
    assert audits.compare(4, norms, norms * (1 + 1.9e-4), norms * (1 - 1.9e-4)) == ""
    infinite = norms * torch.inf  # a gradient that overflows in fp16
    assert audits.compare(5, infinite, infinite, infinite) == ""
    small = torch.tensor([65536.0] + 8 * [1.0]).double()  # the others, beside a loss scale
    with pytest.raises(Corrupted, match=r"rank 0: .* when computed again") as refused:
        audits.compare(6, small, small * torch.tensor([1] + 8 * [1 + 2.5e-4]), small)
    assert "Saves after step 5 may hold its errors; resume from one before them" in refused.value.advice


@pytest.mark.parametrize("wrong", [1.1, torch.nan])
def test_a_chip_that_is_wrong_from_the_start_sets_no_bound(wrong):
    audits, norms = Audits(Ranks(torch.device("cpu")), is_exact=False, is_sharded=False), torch.ones(9).double()
    with pytest.raises(Corrupted, match="when computed again"):
        audits.compare(0, norms, norms * wrong, norms)
