"""Cost of a checkpoint: the extra time of the steps after a save, beside a blocking torch.save in place.

    python -m benchmarks.checkpoint_cost                                                    # 20 steps of 1 x 256 tokens
    python -m benchmarks.checkpoint_cost --rows 16 --context 1024 --micro_steps 32 --steps 5                  # on a GPU

GPT-2 124M with AdamW, not compiled: 1.5 GB a checkpoint. Ours copies the state, then writes it durably in the
background while training continues; its cost is the copy and the time that the writer takes from the steps. The other
side is torch.save to the same file each time, as nanoGPT does.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.compare import benchmark_parser, compare, median_text, summary, synchronize, write_json
from model import GPT, GPTConfig
from optim import make_optimizer
from steadygpt.base.durable import lock_folder
from steadygpt.checkpoint.writer import CheckpointWriter
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import autocast, choose_precision
from steadygpt.machine.parallel import HostCopy
from steadygpt.machine.ranks import Ranks, joined
from steadygpt.start.find import IN_USE


class Training:
    """GPT-2 124M, its optimizer and steps on the same random tokens."""

    def __init__(self, rows: int, context: int, micro_steps: int, layers: int, device: torch.device):
        self.model = GPT(GPTConfig(context_length=context, num_layers=layers)).to(device)
        self.optimizer = make_optimizer(self.model, TrainConfig(max_lr=1e-4), Ranks(device))
        self.host_copy = HostCopy(Ranks(device))
        self.tokens = torch.randint(0, 50257, (rows, context + 1), device=device)
        self.micro_steps = micro_steps
        self.device = device

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_steps):
            with autocast(self.device, choose_precision("auto", self.device)):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])["loss"]
            loss.mean().backward()
        self.optimizer.step()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-step (default: 1)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a row (default: 256)")
    parser.add_argument("--micro_steps", type=int, default=1, help="of a step (default: 1)")
    parser.add_argument("--steps", type=int, default=20, help="timed with each save (default: 20)")
    parser.add_argument("--layers", type=int, default=12, help="fewer are for trying this command (default: 12)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary, joined("auto") as ranks, ExitStack() as stack:
        folder = Path(temporary)
        training = Training(args.rows, args.context, args.micro_steps, args.layers, ranks.device)
        config = TrainConfig(checkpoint_dir=temporary)
        log = RunLog(config, ranks)
        log.say = lambda text, stream=None: None  # else the writer reports each save
        lock = stack.enter_context(lock_folder(folder, IN_USE))
        writer = CheckpointWriter(config, lock, log)
        paused: dict[str, list[float]] = {"SteadyGPT": [], "torch.save": []}
        durable: list[float] = []

        def seconds(name: str, save: Callable[[], None] | None) -> float:
            """Time a save and the steps after it."""
            synchronize(ranks.device)
            start = time.perf_counter()
            if save:
                save()
                paused[name].append(time.perf_counter() - start)
            for _ in range(args.steps):
                training.step()
            synchronize(ranks.device)
            elapsed_s = time.perf_counter() - start
            writer.wait()
            return elapsed_s

        def save_ours() -> None:
            start = time.perf_counter()
            writer.wait()  # as in training: the copy reuses the memory that the writer reads
            step = len(paused["SteadyGPT"])
            tensors = training.host_copy.copy(training.model, training.optimizer)
            writer.start({"step": step, **tensors}, [])
            writer.job.add_done_callback(lambda _: durable.append(time.perf_counter() - start))

        def save_in_place() -> None:
            content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(content, folder / "ckpt.pt")

        for warm_up in (training.step, training.step, save_ours, writer.wait, save_in_place):
            warm_up()
        sides = {"no save": None, "SteadyGPT": save_ours, "torch.save": save_in_place}
        timed = {name: lambda name=name, save=save: seconds(name, save) for name, save in sides.items()}
        figures = compare(timed, f"s for {args.steps} steps", args)
        size = (folder / "latest.pt").stat().st_size
    plain = figures["no save"]
    step_s = statistics.median(plain) / args.steps
    print(f"{size / 1e9:.2f} GB, steps of {step_s:.2f} s, {ranks.device}")
    print(f"durable after: {median_text(durable[1:], 's')}")
    extra = {}
    for name in paused:
        extra[name] = [with_s - without_s for with_s, without_s in zip(figures[name], plain, strict=True)]
    for quantity, measured in (("extra time", extra), ("until the call returns", paused)):
        for name, seconds_of_rounds in measured.items():
            print(f"{quantity}, {name}: {median_text(seconds_of_rounds, 's')}")
        # The medians are divided, because the extra time of a single round can be below zero.
        share = statistics.median(measured["SteadyGPT"]) / statistics.median(measured["torch.save"])
        print(f"{quantity}, SteadyGPT / torch.save: {share:.0%}")
    steps = [extra_s / step_s for extra_s in extra["SteadyGPT"]]
    summaries = {"extra time": summary(steps, "steps per checkpoint"), "pause": summary(paused["SteadyGPT"], "s")}
    write_json(args.json, summaries)


if __name__ == "__main__":
    main()
