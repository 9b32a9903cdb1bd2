"""Digests of bits: of parts, of replicas, and of what is copied, saved and loaded."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import FSDP, MODERN, folders, load, run_here
from harness import Run, assert_equals_reference, run_to_end
from hypothesis import given
from hypothesis import strategies as st
from injected import check_replicas_every, flip_bit

from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.checkpoint.host_copy import HostCopy
from steadygpt.machine import digests
from steadygpt.machine.digests import check_digests, combined, digest, in_minority
from steadygpt.run import capture

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50)
FLAGS = tuple("--total_batch_size 256 --max_steps 12 --checkpoint_freq 5 --steps_per_epoch 99".split())


def numbers(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


@given(BITS, st.data())
def test_digests_of_parts_add_up_in_any_order(bits, data):
    cut = data.draw(st.integers(0, len(bits)))
    parts = numbers(bits[cut:]), numbers(bits[:cut])
    assert int(digest(numbers(bits))) == int(sum(digest(part) for part in parts))


@given(st.dictionaries(st.text(max_size=9), st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6), st.data())
def test_the_digest_of_all_tensors_depends_on_each(digests_of_tensors, data):
    name = data.draw(st.sampled_from(sorted(digests_of_tensors)))
    other = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda number: number != digests_of_tensors[name]))
    assert combined(digests_of_tensors | {name: other}) != combined(digests_of_tensors)
    assert combined({key: value for key, value in digests_of_tensors.items() if key != name}) != combined(
        digests_of_tensors
    )


def test_each_weight_and_each_state_of_a_checkpoint_is_checked(workdir):
    """A changed bit of any tensor that a checkpoint names is found when it is read."""
    assert run_here("--max_steps", "3", *MODERN) == 0
    checkpoint = load("checkpoints/latest.pt")
    tensors = files.named_tensors(checkpoint)
    assert set(tensors) == set(checkpoint["digests"])
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(torch.int32).view(-1)[-1] ^= 1
        with pytest.raises(UserError, match=rf"^{re.escape(name)} is not what it was"):
            check_digests({**tensors, name: changed}, checkpoint["digests"])


@given(BITS, st.data())
def test_a_number_that_changes_always_shows(bits, data):
    place = data.draw(st.integers(0, len(bits) - 1))
    other = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda number: number != bits[place]))
    assert digest(numbers(bits)) != digest(numbers([*bits[:place], other, *bits[place + 1 :]]))


def test_a_large_tensor_is_read_in_parts(monkeypatch):
    tensor = torch.randn(1000)
    whole = digest(tensor)
    monkeypatch.setattr(digests, "BLOCK_NUMBERS", 64)
    assert digest(tensor) == digest(tensor.view(10, 100).mT) == whole


@pytest.mark.parametrize(("of_replicas", "odd"), [
    ([5], [0]), ([5, 5], [0, 0]), ([5, 6], [1, 1]), ([5, 5, 6], [0, 0, 1]), ([6, 5, 5, 5], [1, 0, 0, 0]),
    ([5, 5, 6, 6], [1, 1, 1, 1]), ([4, 5, 6], [1, 1, 1]),
])  # fmt: skip
def test_the_replicas_that_are_not_as_most_are_named(of_replicas, odd):
    assert in_minority(torch.tensor(of_replicas)).tolist() == [bool(number) for number in odd]


# ---------------------------------------------------------------------------------------------------------------------
# runs in which a bit flips


@pytest.mark.parametrize(("ranks", "where", "named", "recipe"), [
    pytest.param(3, (1, "wte.weight", ""), "rank 1: wte.weight", (), id="weight"),
    pytest.param(2, (1, "h.1.mlp.c_fc.bias", "exp_avg_sq"), "rank 0 and 1: h.1.mlp.c_fc.bias.exp_avg_sq", (),
                 id="moment", marks=pytest.mark.storm),
    pytest.param(3, (0, "h.0.attn.c_attn.weight", "momentum_buffer"), "rank 0: h.0.attn.c_attn.weight.momentum_buffer",
                 MODERN, id="momentum", marks=pytest.mark.storm),
    pytest.param(4, (3, "h.0.ln_1.weight", ""), "rank 1 and 3: h.0.ln_1.weight", (*FSDP, "--shard_size", "2"),
                 id="hybrid", marks=pytest.mark.storm),
])  # fmt: skip
def test_a_flipped_bit_of_a_replica_is_named_and_not_saved(workdir, ranks, where, named, recipe):
    """The checks are before steps 6 and 8, and the bit flips after step 7."""
    flags = (*FLAGS, *recipe, "--total_batch_size", str(64 * ranks), *folders("run"))
    run = Run(*flags, ranks=ranks, faults=[partial(check_replicas_every, 2), partial(flip_bit, 7, *where)])
    assert set(run.wait()) == {1}, run.text()
    assert f"\nwarning: step 8: {named} not as on other ranks; a memory" in run.text()
    assert "Traceback" not in run.text()
    assert load("run/latest.pt")["step"] < 8
    assert json.loads(Path("run/status.json").read_text())["status"] == "failed"
    run_to_end(*flags, "--resume", "latest", ranks=ranks)
    if ranks != 3:  # of three numbers, the sum depends on their order, which DDP chooses
        run_to_end(*flags, *folders("reference"), ranks=ranks)
        assert_equals_reference("run")


# ---------------------------------------------------------------------------------------------------------------------
# copies and files


def test_a_checkpoint_has_the_digests_of_what_the_device_had(workdir):
    assert run_here(*FLAGS, *folders("one")) == 0
    run_to_end(*FLAGS, *FSDP, *folders("fsdp"), ranks=2)
    for place in ("one", "fsdp"):
        saved = load(f"{place}/latest.pt")
        tensors = files.named_tensors(saved)
        assert tensors.keys() - saved["digests"].keys() == {"lm_head.weight"}  # the same tensor as wte.weight
        assert all(int(digest(tensors[name])) == number for name, number in saved["digests"].items())


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_bit_that_changed_in_a_file_with_valid_checksums_is_found(workdir, capsys, kind):
    assert run_here(*FLAGS) == 0
    saved = load("checkpoints/latest.pt")
    tensor = saved["model"]["wte.weight"] if kind == "model" else saved["optimizer"]["wte.weight"]["exp_avg"]
    tensor.view(torch.int32)[7, 0] ^= 1 << 22
    torch.save(saved, "checkpoints/latest.pt")
    capsys.readouterr()
    assert run_here("--resume", "latest", *FLAGS, "--max_steps", "14") == 0
    said = capsys.readouterr().out
    name = "wte.weight" + ".exp_avg" * (kind == "optimizer")
    assert f"latest.pt, step 12: corrupt ({name} is not what it was in training" in said
    assert "resumed      from checkpoints/rolling_step_000010.pt at step 10" in said


def test_a_copy_to_the_host_that_differs_is_not_saved(workdir, monkeypatch, capsys):
    copy = HostCopy._copy

    def flipping(self, name, kind, tensor):
        found = copy(self, name, kind, tensor)
        if name == "wte.weight":
            found.view(torch.int32).view(-1)[0] ^= 1
        return found

    monkeypatch.setattr(HostCopy, "_copy", flipping)
    assert run_here(*FLAGS) == 1
    assert "step 5 was not saved: wte.weight is not what it was in training" in capsys.readouterr().err
    assert not Path("checkpoints/latest.pt").exists()


def test_a_weight_that_changes_on_its_way_to_the_device_is_refused(workdir, monkeypatch):
    assert run_here(*FLAGS) == 0
    fill = capture.fill

    def flipping(model, weight, ranks):
        fill(model, weight, ranks)
        model.wte.weight.detach().view(torch.int32)[0] ^= 1

    monkeypatch.setattr(capture, "fill", flipping)
    with pytest.raises(UserError, match=r"latest\.pt: wte\.weight changed on the way to (cpu|cuda:0); its memory or"):
        run_here("--resume", "latest", *FLAGS, "--max_steps", "14")
