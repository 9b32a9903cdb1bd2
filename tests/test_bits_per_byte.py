"""Bits per byte of a validation. test_mixture.py tests where a run records them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_shard
from ground import built, model_of, settled, validate, validation_rows_of
from torch.nn import functional as F

from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer

TEXTS = ["The sky above the port", "was the colour of television, tuned to a dead channel: é, 你好.", "end"] * 9


def run_on(tokens: list[int], tokenizer: str):
    """Return a run with initial weights whose validation shard has these tokens, without a manifest."""
    for split in ("train", "val"):
        write_shard(Path(f"any_{split}_000000.npy"), np.array(tokens, np.uint16))
    run = built("--data_dir", ".", "--tokenizer", tokenizer, "--eval_freq", "1")
    # The last row of these shards is alone in its micro-batch of two, so the second row there must not count.
    assert settled(run).mini_batch_size == 2 and len(validation_rows_of(run)) % 2 == 1
    return run


def targets_of(run) -> torch.Tensor:
    """Return the targets of a validation, in order."""
    return torch.from_numpy(validation_rows_of(run)[:, 1:].astype(np.int64)).flatten()


def test_of_a_uniform_prediction_they_are_log2_of_the_vocabulary_for_each_token():
    tokenizer = load_tokenizer(TokenizerRecord("gpt2"))
    run = run_on([id for text in TEXTS for id in (tokenizer.document_id, *tokenizer.encode(text))][:180], "gpt2")
    with torch.no_grad():
        model_of(run).lm_head.weight.zero_()
    scored = [id for id in targets_of(run).tolist() if id != tokenizer.document_id]
    size = len(tokenizer.encoding.decode_bytes(scored))
    assert len(scored) < size / 2
    found = validate(run, tokenizer="gpt2")
    assert found["val_bpb"] == pytest.approx(math.log2(50257) * len(scored) / size, rel=1e-6)
    assert found["val_loss"] == pytest.approx(math.log(50257), rel=1e-6)


def test_separators_count_in_the_loss_only():
    tokens = [id for word in " ".join(TEXTS).split() for id in (256, *word.encode())][:500]
    run = run_on(tokens, "bytes")
    with torch.no_grad():
        model_of(run).wte.weight.mul_(30)  # so that losses differ
        inputs = torch.tensor(tokens)[: len(targets_of(run))].view(-1, settled(run).context_length)
        losses = F.cross_entropy(model_of(run)(inputs).flatten(0, 1), targets_of(run), reduction="none").double()
    of_all, of_text = losses.mean().item(), losses[targets_of(run) != 256].mean().item()
    assert of_text != pytest.approx(of_all, rel=0.01)
    found = validate(run, tokenizer="bytes")
    assert found["val_loss"] == pytest.approx(of_all, rel=1e-5)
    assert found["val_bpb"] == pytest.approx(of_text / math.log(2), rel=1e-5)


def test_a_part_of_the_split_is_spread_over_it():
    run = run_on(list("".join(TEXTS).encode())[:500], "bytes")
    rows = torch.from_numpy(validation_rows_of(run))
    with torch.no_grad():
        model_of(run).wte.weight.mul_(30)  # so that losses differ
        losses = F.cross_entropy(model_of(run)(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none").mean(dim=1)
    assert len(rows) == 31
    expected = losses[[0, 6, 12, 18, 24]].mean().item()
    assert expected != pytest.approx(losses[:5].mean().item(), rel=0.005)
    found = validate(run, eval_tokens=5 * settled(run).context_length)
    assert found["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_of_bytes_they_are_the_loss_in_bits_and_without_bytes_they_are_left_out():
    run = run_on(list("".join(TEXTS).encode())[:500], "bytes")
    found = validate(run, tokenizer="bytes")
    assert found["val_bpb"] == pytest.approx(found["val_loss"] / math.log(2), rel=1e-6)
    assert validate(run) == {"val_loss": found["val_loss"]}
    run = run_on([256] * 500, "bytes")
    assert validate(run, tokenizer="bytes").keys() == {"val_loss"}
