"""Preparing speed, in MB of text per second: prepare_dataset.py with two workers beside a loop of encode_ordinary.

    python -m benchmarks.prepare_speed [--megabytes 200] [--before CHECKOUT]
    python -m benchmarks.prepare_speed --before CHECKOUT --format parquet --workers 1    # only the two checkouts

The text is Python's standard library, repeated. Our sides are the whole command: start-up, reading, tokenizing,
checksums and writing the shards, with GPT-2's tokenizer and with one of as many tokens that is trained on this text
before the first round, and with GPT-2's in a checkout of another commit. The loop is one process with GPT-2's tokenizer
and the documents in memory; it only tokenizes.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

from benchmarks.compare import REPO, benchmark_parser, compare
from steadygpt.prepare.source_files import local_files

LOOP = """
import json, time, numpy as np
from steadygpt.data.tokenizer import load_tokenizer, TokenizerRecord
tokenizer = load_tokenizer(TokenizerRecord("gpt2")).encoding
tokenizer.encode_ordinary("warm up")
documents = [json.loads(line)["text"] for line in open({file!r}, encoding="utf-8")]
start = time.perf_counter()
for text in documents:
    np.array(tokenizer.encode_ordinary(text), np.uint16)
print(time.perf_counter() - start)
"""


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="of text")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, to compare with")
    parser.add_argument(
        "--format", choices=("jsonl", "jsonl.gz", "parquet"), help="of the text; compares checkouts only"
    )
    parser.add_argument("--tokenizer", default="gpt2", help="with --format (default: gpt2)")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    files, _ = local_files("stdlib")
    texts = [Path(file.path).read_text(encoding="utf-8", errors="replace") for file in files]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        written = 0
        with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
            for text in itertools.cycle(texts):
                written += file.write(json.dumps({"text": text}) + "\n")
                if written > args.megabytes * 1e6:
                    break

        source = folder / f"text.{args.format or 'jsonl'}"
        if args.format == "jsonl.gz":
            subprocess.run(["gzip", "-k", str(folder / "text.jsonl")], check=True)
        if args.format == "parquet":
            lines = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()
            table = pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})
            pyarrow.parquet.write_table(table, source, row_group_size=1000)

        def prepare(tokenizer: str, repo: Path = REPO) -> Path:
            out = folder / f"shards-{time.monotonic_ns()}"
            command = [sys.executable, str(repo / "prepare_dataset.py"), "--source", str(source), "--out", str(out)]
            command += ["--tokenizer", tokenizer, "--num_workers", str(args.workers)]
            subprocess.run(command, check=True, capture_output=True)
            return out

        def ours(tokenizer: str, repo: Path = REPO) -> float:
            start = time.perf_counter()
            prepare(tokenizer, repo)
            return written / 1e6 / (time.perf_counter() - start)

        def loop() -> float:
            program = LOOP.format(file=str(folder / "text.jsonl"))
            command = [sys.executable, "-c", program]
            return written / 1e6 / float(subprocess.run(command, cwd=REPO, check=True, capture_output=True).stdout)

        setting = f"{written / 1e6:.0f} MB of Python's standard library, {args.workers} workers"
        if args.format:
            print(f"{setting}, {args.format}, {args.tokenizer}")
            sides = {"now": lambda: ours(args.tokenizer), "before": lambda: ours(args.tokenizer, args.before)}
            compare(sides, "MB/s", args)
            return
        print(f"{setting}; training a tokenizer ...")
        trained = prepare("bpe:50257") / "tokenizer.json"
        sides = {"GPT-2's tokenizer": lambda: ours("gpt2"), "a trained one": lambda: ours(str(trained))}
        if args.before:
            sides["before"] = lambda: ours("gpt2", args.before)
        compare({**sides, "encode_ordinary": loop}, "MB/s", args)


if __name__ == "__main__":
    main()
