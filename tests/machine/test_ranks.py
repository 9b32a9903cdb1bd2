"""Ranks: what they agree on, how they leave, and FSDP's shards."""

import math
import os
import signal
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import FSDP, in_ranks, write_data
from ground import agree, batches_of, built, model_of, take_step

from model import GPT, GPTConfig
from steadygpt.base.options import RankError
from steadygpt.checkpoint.files import BEST
from steadygpt.config import TrainConfig
from steadygpt.inference.scoring import Question, score
from steadygpt.machine.host import process_age_s
from steadygpt.machine.parallel import HostCopy, fill, settle_buckets, shard_model
from steadygpt.machine.ranks import Ranks, Request, Requests, Stopped, joined, launched_as
from steadygpt.run import saving
from steadygpt.run.saving import save, save_if_due

SMALL = GPTConfig(vocab_size=257, num_layers=4, num_heads=2, embd_size=16, context_length=16)


def sharded(ranks: Ranks, shards: int, precision: str = "fp32", recompute: bool = False) -> GPT:
    """Return SMALL with the initial weights of seed 0."""
    with torch.device("meta"):
        model = GPT(SMALL, TrainConfig(activation_checkpointing=recompute), initialize=False)
    shard_model(model, model.h, ranks, shards, precision)
    torch.manual_seed(0)
    fill(model, model.initial_weight, ranks)
    model.fill_rotary(ranks.device)
    return model


def whole() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def batch(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------------------------------------------------------
# leaving


def test_an_ignored_signal_stays_ignored_until_a_run_listens():
    """multinode.sh ignores SIGUSR1, which slurm.sh sends again and again until the run stops and saves."""
    found = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, Requests.SIGNALS)}
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        Requests.raise_until_listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        requests = Requests(Ranks(torch.device("cpu")), 0)
        requests.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Stopped, match="SIGUSR1"):
            requests.agree()
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def test_an_exception_does_not_wait_for_the_other_ranks(monkeypatch):
    """NCCL's destroy_process_group waits for all ranks, of which one may wait for this one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: time.sleep(60))
    started_s = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError), joined("cpu"):
        raise torch.OutOfMemoryError("no memory")
    assert time.monotonic() - started_s < 5


def check_on_rank(check) -> None:
    with joined("cpu") as ranks:
        check(ranks)


def a_stop_on_one_rank_stops_all_after_its_step(folder: str, ranks: Ranks) -> None:
    run = built("--data_dir", folder, ranks=ranks)
    with closing(batches_of(run)) as batches:
        agree(run)
        run.requests.step_s = 0.1
        take_step(run, batches)
        if ranks.rank == 1:
            run.requests.ask("SIGTERM")
        agree(run)  # the ranks have exchanged their requests in the step before
        take_step(run, batches)
    with pytest.raises(Stopped) as stopped:
        agree(run)
    assert stopped.value.reason == "SIGTERM"


def a_stop_within_a_slow_step_stops_all_in_the_same_micro_step(folder: str, ranks: Ranks) -> None:
    """The first step of a launch may take long too, because it compiles."""
    for slow_step in (0, 1):
        run = built("--data_dir", folder, "--total_batch_size", "512", ranks=ranks)  # 8 micro-steps
        with closing(batches_of(run)) as batches:
            for step in range(slow_step):
                take_step(run, batches)
                run.state.step = step + 1
                run.requests.step_s = Requests.LONG_S + 1 if ranks.rank == 1 else 0.1  # the slowest rank counts
            if slow_step:
                take_step(run, batches)  # which tells the other ranks how long the step before took
            before = [parameter.clone() for parameter in model_of(run).parameters()]
            micro_steps: list[int] = []

            def next_batch(run=run, batches=batches, micro_steps=micro_steps):
                micro_steps.append(len(micro_steps))
                if len(micro_steps) == 3 and ranks.rank == 1:
                    run.requests.ask("SIGINT")
                return batches.next()

            with pytest.raises(Stopped, match="SIGINT"):
                take_step(run, SimpleNamespace(next=next_batch))
        assert ranks.gather(len(micro_steps)) == [3, 3]
        assert all(map(torch.equal, before, model_of(run).parameters()))  # the step has changed nothing


def a_fast_step_exchanges_requests_once(folder: str, ranks: Ranks) -> None:
    run = built("--data_dir", folder, "--total_batch_size", "512", ranks=ranks)
    run.requests.agreed = Request(step_s=0.1)
    exchanges = []
    exchange = Ranks.max_of

    def counted_exchange(self, numbers):
        exchanges.append(1)
        return exchange(self, numbers)

    Ranks.max_of = counted_exchange
    with closing(batches_of(run)) as batches:
        take_step(run, batches)
    assert not exchanges  # besides the one with the numbers of the step


def a_timed_save_is_agreed_within_a_step_and_made_once(folder: str, ranks: Ranks) -> None:
    """Only rank 0 has the clock and the writer; all ranks take part in the copy at the same step."""
    run = built("--data_dir", folder, ranks=ranks)
    due = iter([False, True, True, False, False])
    if ranks.is_main:
        run.writer = SimpleNamespace(
            reason_to_stop=lambda: "", is_due=lambda: next(due), start=lambda *_: None, wait=lambda **_: True,
            note_pause=lambda _: None,
        )  # fmt: skip
        run.log.size_of = lambda name: 0
    agreed = []
    with closing(batches_of(run)) as batches:
        for step in range(1, 6):
            run.requests.step_s = 0.1
            take_step(run, batches)
            run.state.step = step
            agreed.append(agree(run))
            if agreed[-1]:
                save(run, [])
    assert ranks.gather(agreed) == [[False, False, True, False, False]] * 2


def a_best_model_that_rank_0_knows_is_saved_by_all(folder: str, ranks: Ranks) -> None:
    """The copy of a save is a collective, so that both ranks must have the same names."""
    run = built("--data_dir", folder, "--eval_freq", "2", ranks=ranks)
    run.writer = SimpleNamespace(is_best=lambda *_: True) if ranks.is_main else None
    run.state.scores = {"val_loss": 1.0}
    run.state.validated_on = run.validated_on
    saves = []
    saving.save = lambda run, names: saves.append(names)
    save_if_due(run, False)
    assert ranks.gather(saves) == [[[BEST]]] * 2


@pytest.mark.parametrize("behaviour", [
    a_best_model_that_rank_0_knows_is_saved_by_all,
    a_stop_on_one_rank_stops_all_after_its_step, a_stop_within_a_slow_step_stops_all_in_the_same_micro_step,
    a_fast_step_exchanges_requests_once, a_timed_save_is_agreed_within_a_step_and_made_once,
], ids=lambda function: function.__name__)  # fmt: skip
def test_requests_of_one_of_two_ranks(tmp_path, behaviour):
    in_ranks(2, check_on_rank, partial(behaviour, str(write_data(tmp_path / "data"))))


def test_of_several_reasons_the_first_one_counts():
    requests = Requests(Ranks(torch.device("cpu")), max_hours=0)
    requests.ask("saves failed")
    requests.ask("SIGTERM")
    with pytest.raises(Stopped, match="saves failed"):
        requests.agree()
    assert not requests.take_interrupt()  # no signal
    requests.ask("SIGTERM")
    assert requests.take_interrupt()
    requests.agree()


# ---------------------------------------------------------------------------------------------------------------------
# DDP


def gradients_stay_in_the_buckets(folder: str, ranks: Ranks) -> None:
    run, found = built("--data_dir", folder, "--mini_batch_size", "1", ranks=ranks), []
    loader = batches_of(run)

    def next_batch():
        gradients = [p.grad for p in model_of(run).parameters() if p.grad is not None]
        found.append({gradient.untyped_storage().data_ptr() for gradient in gradients})
        return loader.next()

    for _ in range(4):
        take_step(run, SimpleNamespace(next=next_batch))
    loader.close()
    # One bucket, already in the first micro-step; DDP arranges it anew in the second step.
    assert [len(storages) for storages in found] == [1] * 8
    assert found[0] == found[1]
    assert found[4] == found[5] == found[6] == found[7]
    assert model_of(run, wrapped=True).bucket_bytes_cap == 100 * 2**20  # torch.compile cuts its graphs at the buckets


def test_gradients_stay_in_the_buckets_of_ddp(tmp_path):
    """Else they would take 4 bytes a parameter beside them."""
    in_ranks(2, check_on_rank, partial(gradients_stay_in_the_buckets, str(write_data(tmp_path / "data"))))


def gradients_are_summed_once_a_step(folder: str, ranks: Ranks) -> None:
    run = built("--data_dir", folder, "--mini_batch_size", "1", ranks=ranks)  # two micro-steps
    buckets = []

    def hook(_, bucket):
        buckets.append(bucket.index())
        sums = dist.all_reduce(bucket.buffer().div_(ranks.world_size), async_op=True).get_future()
        return sums.then(lambda future: future.value()[0])

    model_of(run, wrapped=True).register_comm_hook(None, hook)
    with closing(batches_of(run)) as batches:
        for _ in range(2):
            take_step(run, batches)
    assert buckets == [0, 0]


def shards_of_gradients_are_summed_once_a_step(folder: str, ranks: Ranks) -> None:
    run = built("--data_dir", folder, "--mini_batch_size", "1", *FSDP, ranks=ranks)
    sums = []
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # torch 2.11
    reduce_scatter = getattr(dist, name)

    def counted(*args, **options):
        sums.append(1)
        return reduce_scatter(*args, **options)

    setattr(dist, name, counted)
    with closing(batches_of(run)) as batches:
        take_step(run, batches)
    assert len(sums) == 3  # two blocks and the rest


@pytest.mark.parametrize("check", [gradients_are_summed_once_a_step, shards_of_gradients_are_summed_once_a_step])
def test_gradients_are_summed_over_the_ranks_once_a_step(tmp_path, check):
    """More often, they would be right too, but slower."""
    in_ranks(2, check_on_rank, partial(check, str(write_data(tmp_path / "data"))))


# ---------------------------------------------------------------------------------------------------------------------
# FSDP


def copies_after_an_evaluation_have_the_weights_of_a_whole_model(shards: int, ranks: Ranks) -> None:
    model = sharded(ranks, shards)
    assert len(model.h[0].mlp.c_fc.weight.to_local()) <= math.ceil(64 / shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(*batch())["loss"].mean().backward()
    optimizer.step()
    with torch.no_grad():  # an evaluation just before a save
        model.eval()(*batch())
    content = HostCopy(ranks).copy(model, optimizer)
    assert content["optimizer"].keys() == dict(model.named_parameters()).keys()
    expected = whole().state_dict()
    assert list(content["model"]) == list(expected)
    if ranks.is_main:  # the others only help to gather
        assert all(torch.equal(tensor, expected[name]) for name, tensor in content["model"].items())


@pytest.mark.parametrize(("processes", "shards"), [(2, 2), (4, 2), pytest.param(3, 3, marks=pytest.mark.storm)])
def test_a_sharded_model_has_the_weights_of_a_whole_one_also_after_an_evaluation(processes, shards):
    in_ranks(processes, check_on_rank, partial(copies_after_an_evaluation_have_the_weights_of_a_whole_model, shards))


def blocks_and_the_residual_stream_are_in_bf16_and_gradients_in_fp32(ranks: Ranks) -> None:
    model, seen = sharded(ranks, 2, "bf16"), {}

    def look(mlp, inputs, output) -> None:
        seen.update(block=mlp.c_fc.weight.dtype, root=model.wte.weight.dtype)

    model.h[1].mlp.register_forward_hook(look)
    model.h[1].register_forward_hook(lambda *args: seen.update(residual=args[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())["loss"].mean()
        expected = whole()(*batch())["loss"].mean()
    loss.backward()
    assert seen == {"block": torch.bfloat16, "root": torch.float32, "residual": torch.bfloat16}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert abs(loss.item() - expected.item()) < 1e-3


def a_rank_without_a_batch_helps_to_gather_the_weights(ranks: Ranks) -> None:
    questions = [Question([np.array([1, 2, 3, n]) for n in (4, 5)], [1, 1], 0)] * 3  # one batch
    found = score(sharded(ranks, 2), questions, ranks)
    assert abs(found - score(whole(), questions, ranks)).max() < 1e-5


@pytest.mark.parametrize("behaviour", [
    blocks_and_the_residual_stream_are_in_bf16_and_gradients_in_fp32,
    a_rank_without_a_batch_helps_to_gather_the_weights,
], ids=lambda function: function.__name__)  # fmt: skip
def test_on_two_ranks(behaviour):
    in_ranks(2, check_on_rank, behaviour)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, (0, 1)), ({"WORLD_SIZE": "1"}, (0, 1)),  # some images set it
    (TORCHRUN, (1, 2)), (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),  # srun torchrun ...
    ({"RANK": "1"}, r" RANK=1;.*\btorchrun\b"),
    ({"WORLD_SIZE": "2"}, " WORLD_SIZE=2;"), ({"WORLD_SIZE": "0"}, " WORLD_SIZE=0;"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, " RANK=0 WORLD_SIZE=2;"),
    ({"RANK": "", "WORLD_SIZE": ""}, " RANK= WORLD_SIZE=;"), ({"LOCAL_RANK": ""}, " LOCAL_RANK=;"),
    ({"SLURM_STEP_NUM_TASKS": "2"}, r"\bsrun\b.*\b2\b.*\btorchrun\b"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, r"\bmpirun\b.*\b4\b.*\btorchrun\b"),
], ids=str)  # fmt: skip
def test_the_environment_is_torchruns_or_a_mistake_of_one_line(monkeypatch, environment, expected):
    for name in (*TORCHRUN, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert launched_as() == expected
    else:
        with pytest.raises(RankError, match=expected) as raised:
            launched_as()
        assert "\n" not in str(raised.value)


def test_max_hours_count_from_the_start_of_the_process():
    """A job's time limit does so too; importing and opening the data take minutes where disks are slow."""
    alone, age_h = Ranks(torch.device("cpu")), process_age_s() / 3600
    Requests(alone, max_hours=age_h + 1).agree()
    with pytest.raises(Stopped, match="max_hours"):
        Requests(alone, max_hours=age_h / 2).agree()


def test_a_model_without_ddp_has_no_buckets_to_settle():
    model = torch.nn.Linear(2, 2)
    settle_buckets(model, torch.device("cpu"), (1, 2), torch.no_grad())
    assert model.weight.grad is None
