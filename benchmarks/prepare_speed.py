"""Preparing speed, in tokens per second: prepare_dataset.py with two workers beside one process of encode_ordinary.

    python -m benchmarks.prepare_speed [--megabytes 200]

The text is Python's standard library, repeated. Our side is the whole command: start-up, reading, tokenizing, checksums
and writing the shards. The other side is a loop over the same documents in memory, which only tokenizes.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import REPO, benchmark_parser, compare
from steadygpt.data.sources import find_files

LOOP = """
import json, time, numpy as np
from steadygpt.data.tokenizer import get_tokenizer
tokenizer = get_tokenizer("gpt2").encoding
tokenizer.encode_ordinary("warm up")
documents = [json.loads(line)["text"] for line in open({file!r}, encoding="utf-8")]
start = time.perf_counter()
count = sum(len(np.array(tokenizer.encode_ordinary(text), np.uint16)) + 1 for text in documents)
print(count / (time.perf_counter() - start))
"""


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="of text")
    args = parser.parse_args()
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in find_files("stdlib")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        written = 0
        with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
            for text in itertools.cycle(texts):
                written += file.write(json.dumps({"text": text}) + "\n")
                if written > args.megabytes * 1e6:
                    break

        def ours() -> float:
            out = folder / f"shards-{time.monotonic_ns()}"
            command = [sys.executable, str(REPO / "prepare_dataset.py"), "--source", str(folder / "text.jsonl")]
            start = time.perf_counter()
            subprocess.run([*command, "--out", str(out), "--num_workers", "2"], check=True, capture_output=True)
            elapsed_s = time.perf_counter() - start
            return json.loads((out / "manifest.json").read_text())["tokens"] / elapsed_s

        def loop() -> float:
            program = LOOP.format(file=str(folder / "text.jsonl"))
            command = [sys.executable, "-c", program]
            return float(subprocess.run(command, cwd=REPO, check=True, capture_output=True).stdout)

        print(f"{written / 1e6:.0f} MB of Python's standard library, 2 workers")
        compare({"SteadyGPT": ours, "encode_ordinary": loop}, "tokens/s", args)


if __name__ == "__main__":
    main()
