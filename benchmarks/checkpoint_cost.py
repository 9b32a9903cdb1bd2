"""Cost of a checkpoint: the extra time of 20 steps after a save, beside a blocking torch.save in place.

    python -m benchmarks.checkpoint_cost [--rows 1] [--rounds 5]

GPT-2 124M with AdamW: 1.5 GB a checkpoint. Ours copies the state, then writes it durably in the background while
training continues; its cost is the copy and the time that the writer takes from the steps. The other side is torch.save
to the same file each time, as nanoGPT does.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.compare import in_turn, median_text, synchronize
from config import TrainConfig
from model import GPT, GPTConfig
from steadygpt.checkpoint import Captured
from steadygpt.device import autocast, native_precision
from steadygpt.distributed import Ranks, joined
from steadygpt.optim import make_optimizer
from steadygpt.saves import CheckpointWriter
from steadygpt.state import HostCopy

STEPS = 20


def gpt2_step(rows: int, device: torch.device, host_copy: HostCopy):
    """Return GPT-2 124M, its optimizer, and a function that takes a step on `rows` rows of 256 tokens."""
    model = GPT(GPTConfig(context_length=256)).to(device)
    optimizer = make_optimizer(model, TrainConfig(max_lr=1e-4), Ranks(device))
    tokens = torch.randint(0, 50257, (rows, 257), device=device)
    precision = native_precision(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, precision):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        host_copy.wait_before_update()
        optimizer.step()

    return model, optimizer, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1, help="rows of 256 tokens in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="a folder on the disk to measure (default: a temporary folder)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary, joined("auto") as ranks:
        folder = Path(temporary)
        host_copy = HostCopy(ranks.device)
        model, optimizer, step = gpt2_step(args.rows, ranks.device, host_copy)
        writer = CheckpointWriter(folder, keep=1)
        returned: dict[str, list[float]] = {"SteadyGPT": [], "torch.save": []}
        durable: list[float] = []

        def seconds(name: str, save) -> float:
            """Time a save and the steps after it."""
            synchronize(ranks.device)
            start = time.perf_counter()
            if save:
                save()
                returned[name].append(time.perf_counter() - start)
            for _ in range(STEPS):
                step()
            synchronize(ranks.device)
            elapsed_s = time.perf_counter() - start
            writer.wait()
            return elapsed_s

        def save_ours() -> None:
            start = time.perf_counter()
            writer.wait()  # as in training: the copy reuses the memory that the writer reads
            tensors, copied = host_copy.start(model, optimizer, ranks)
            writer.save(Captured({"step": len(returned["SteadyGPT"]), **tensors}, copied), [])
            writer.in_flight.add_done_callback(lambda _: durable.append(time.perf_counter() - start))

        def save_in_place() -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ckpt.pt")

        for warm_up in (step, step, save_ours, writer.wait, save_in_place):
            warm_up()
        sides = {"no save": None, "SteadyGPT": save_ours, "torch.save": save_in_place}
        timed = {name: lambda name=name, save=save: seconds(name, save) for name, save in sides.items()}
        figures = in_turn(timed, args.rounds, f"s for {STEPS} steps")
        size = (folder / "latest.pt").stat().st_size
    extra = {
        name: [after - plain for after, plain in zip(figures[name], figures["no save"], strict=True)]
        for name in returned
    }
    print(f"{size / 1e9:.2f} GB, steps of {statistics.median(figures['no save']) / STEPS:.2f} s, {ranks.device}")
    print(f"durable after: {median_text(durable[1:], 's')}")
    for what, measured in (("extra wall-clock", extra), ("until the call returns", returned)):
        for name, found in measured.items():
            print(f"{what}, {name}: {median_text(found, 's')}")
        share = statistics.median(measured["SteadyGPT"]) / statistics.median(measured["torch.save"])
        print(f"{what}, SteadyGPT / torch.save: {share:.0%}")


if __name__ == "__main__":
    main()
