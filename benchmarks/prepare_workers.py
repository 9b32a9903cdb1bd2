"""How busy many workers are kept: the main process of prepare_dataset.py beside workers that only wait.

    python -m benchmarks.prepare_workers [--workers 64] [--megabytes 10000]

A worker waits as long as GPT-2's tokenizer takes on one core, 69 ms for a megabyte, and returns as many ids as it would
find, so the machine does not need as many cores. The main process cuts a file, sends units, receives ids and writes
shards with their checksums, as in a preparation.
"""

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from prepare_dataset import Encoded, Manifest, write_shards
from steadygpt.data.documents import Part
from steadygpt.data.sources import Source
from steadygpt.data.workers import map_in_order

SECONDS_PER_MB = 0.069
BYTES_PER_TOKEN = 4.4


def wait(unit: list[Part]) -> Encoded:
    num_bytes = sum(part.num_bytes for part in unit)
    time.sleep(num_bytes / 1e6 * SECONDS_PER_MB)
    ids = np.zeros(int(num_bytes / BYTES_PER_TOKEN), np.uint16)
    return Encoded(ids, [0] * len(unit), [[]] * len(unit), text_bytes=num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=10_000, help="of text")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    # In memory, because no disk of a laptop writes what 64 workers give.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        folder = Path(temporary)
        with open(folder / "text.jsonl", "wb") as file:
            file.write(b" " * 2**13)  # looked at, to refuse what is no text
            file.truncate(args.megabytes * 10**6)  # the rest without content, which nothing reads
        source = Source("text", [folder / "text.jsonl"])
        total_mb, waits_for = source.sizes[0] / 1e6, 32 * args.workers  # units, until all workers have started
        for number in range(args.rounds):
            out = folder / f"out{number}"
            out.mkdir()
            manifest = Manifest(
                source="text", name="text", tokenizer="gpt2", shard_size=10**8, val_tokens=None, val_bytes=10**7,
                text_field="text", commit="", files="", vocab_size=50257, dtype="uint16",
            )  # fmt: skip
            units = map_in_order(wait, source.units("text", 0), args.workers)
            before_mb = sum(part.num_bytes for unit, _ in islice(units, waits_for) for part in unit) / 1e6
            start_s, cpu_s = time.perf_counter(), time.process_time()
            write_shards(units, out, manifest, bool)
            elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
            megabytes = total_mb - before_mb
            busy = megabytes * SECONDS_PER_MB / args.workers / elapsed_s
            print(
                f"{args.workers} workers, {megabytes:,.0f} MB: {elapsed_s:.2f} s, workers {busy:.1%} busy, "
                f"main process {1000 * cpu_s / megabytes:.2f} ms/MB",
                flush=True,
            )
            for path in out.iterdir():
                path.unlink()


if __name__ == "__main__":
    main()
