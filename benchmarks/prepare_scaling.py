"""How many cores prepare_dataset.py keeps busy.

    python -m benchmarks.prepare_scaling --source 'data/*.parquet' [--workers 2,16,64] [--seconds 10]

All workers wait for the main process, which finds the chunks, collects the ids, writes the shards and hashes them. So
the processor time of a worker for each token, divided by that of the main process, bounds the workers that are of use.

For each number of workers the real main process is given workers that sleep as long as they would work, and return as
many ids. That takes few cores, and shows the speed of a machine with as many cores as workers. Up to the number of
cores here, real workers run as well. The start of the workers is not counted.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import prepare_dataset
from benchmarks.compare import in_turn, median_text
from prepare_dataset import Batch, Encoded, Encoder, gather_batches
from steadygpt.chunks import Position
from steadygpt.sources import Source, find_source
from steadygpt.workers import map_in_order, usable_cores

SHARD_SIZE = 100_000_000  # tokens, as by default


@dataclass(frozen=True)
class Sleeper:
    """Takes as long as an Encoder, without a processor."""

    s_per_byte: float
    tokens_per_byte: float

    def __call__(self, batch: Batch) -> Encoded:
        num_bytes = sum(chunk.num_bytes for chunk in batch)
        time.sleep(num_bytes * self.s_per_byte)
        return Encoded(np.ones(int(num_bytes * self.tokens_per_byte), np.uint16), len(batch), 0, [])


def endless(source: Source) -> Iterator[Batch]:
    """Read the source again and again."""
    while True:
        yield from gather_batches(source.chunks("text", Position()))


def measure(source: Source, work: Callable[[Batch], Encoded], num_workers: int, seconds: float) -> tuple[float, float]:
    """Write shards for some seconds; return tokens per second, and the main process's processor seconds per token."""
    begun: list[tuple[float, float]] = []
    counted = [0]

    def timed(results: Iterator[tuple[Batch, Encoded]]) -> Iterator[tuple[Batch, Encoded]]:
        for number, (batch, encoded) in enumerate(results):
            if number == 3 * num_workers:  # all workers have started
                begun.append((time.perf_counter(), time.process_time()))
            counted[0] += len(encoded.ids) * bool(begun)
            yield batch, encoded
            if begun and time.perf_counter() - begun[0][0] > seconds:
                return

    manifest = {
        "name": "text",
        "vocab_size": 50257,
        "shard_size": SHARD_SIZE,
        "val_tokens": 0,
        "tokens": 0,
    }
    manifest |= {"shards": [], "documents": 0, "repaired": 0, "skipped": {}, "next": {"skip_tokens": 0}}
    with tempfile.TemporaryDirectory() as folder:
        results = map_in_order(work, endless(source), num_workers)
        written = timed(results)
        prepare_dataset.write_shards(written, Path(folder), manifest, lambda file: remove_old(Path(folder)))
        wall_s, main_s = (
            now - then for now, then in zip((time.perf_counter(), time.process_time()), begun[0], strict=True)
        )
        results.close()
    return counted[0] / wall_s, main_s / counted[0]


def remove_old(folder: Path) -> None:
    """Keep the disk from filling: remove all shards but the newest."""
    for path in sorted(folder.glob("*.npy"))[:-1]:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", required=True, help="files, as for prepare_dataset.py")
    parser.add_argument("--workers", default="2,16,64")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    source = find_source(args.source)
    encoder = Encoder("gpt2", "text")
    encoder(next(endless(source)))  # loads the tokenizer
    num_tokens = num_bytes = 0
    start_s = time.process_time()
    for batch in itertools.islice(endless(source), 40):
        num_tokens += len(encoder(batch).ids)
        num_bytes += sum(chunk.num_bytes for chunk in batch)
    worker_s = (time.process_time() - start_s) / num_tokens
    print(f"a worker takes {worker_s * 1e9:.0f} ns of processor time for each token")
    sleeper = Sleeper(worker_s * num_tokens / num_bytes, num_tokens / num_bytes)
    sides, main_s = {}, defaultdict(list)
    for num_workers in map(int, args.workers.split(",")):
        for kind, work in (("working", encoder), ("sleeping", sleeper)):
            if kind == "working" and num_workers > usable_cores():
                continue

            def side(name=f"{num_workers} {kind}", work=work, num_workers=num_workers) -> float:
                speed, for_each = measure(source, work, num_workers, args.seconds)
                main_s[name].append(for_each)
                return speed

            sides[f"{num_workers} {kind}"] = side
    figures = in_turn(sides, args.rounds, "tokens/s")
    for name, speeds in figures.items():
        speed, for_each = statistics.median(speeds), statistics.median(main_s[name])
        print(
            f"{name}: {median_text(speeds, 'tokens/s')}, {speed * worker_s:.1f} workers busy; main process "
            f"{for_each * 1e9:.1f} ns a token, 1/{worker_s / for_each:.0f} of a worker's; "
            f"10 B tokens in {1e10 / speed / 60:.0f} min"
        )


if __name__ == "__main__":
    main()
