"""HellaSwag speed beside build-nanogpt, in examples per second, and the share of equal predictions: GPT-2 124M.

    git clone https://github.com/karpathy/build-nanogpt
    python -m benchmarks.hellaswag_speed --build_nanogpt build-nanogpt --hellaswag_file hellaswag_val.jsonl

build-nanogpt's evaluate() runs in fp32 on our weights, exported; ours scores in bf16 and repeats close calls in fp32.
Our prediction is passed to evaluate() as the label, so the examples that it counts as correct are those on which both
agree. Needs transformers, requests, safetensors and tokenizers.
"""

import argparse
import contextlib
import dataclasses
import io
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken
import torch

from benchmarks.compare import in_turn, load_module, report
from convert_hf import write_folder
from generate import load_model
from hellaswag_eval import ending_losses, load_examples, tokenize
from model import GPT, GPTConfig
from steadygpt.device import autocast, choose_precision, evaluating
from steadygpt.distributed import joined
from steadygpt.tokenizer import get_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build_nanogpt", type=Path, required=True, help="a checkout of build-nanogpt")
    parser.add_argument("--hellaswag_file", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=200, help="examples in each round")
    parser.add_argument("--precision", default="auto", help="of our side (default: auto, as in training)")
    args = parser.parse_args()
    examples, tokenizer = load_examples(args.hellaswag_file), get_tokenizer("gpt2")
    tiktoken.get_encoding = get_tokenizer  # the same vocabulary, without a download
    theirs = load_module(args.build_nanogpt / "hellaswag.py")
    torch.manual_seed(0)
    config = GPTConfig()
    checkpoint = {"model": GPT(config).state_dict(), "model_config": dataclasses.asdict(config), "tokenizer": "gpt2"}
    with tempfile.TemporaryDirectory() as temporary, joined("auto") as ranks:
        folder = Path(temporary) / "gpt2"
        write_folder(checkpoint, folder)
        model = load_model(checkpoint).to(ranks.device)
        agreed = [0, 0]
        chosen: list[dict] = []

        def ours() -> float:
            first = agreed[1]
            chosen[:] = examples[first : first + args.examples]
            start = time.perf_counter()
            trees = tokenize(chosen, tokenizer, config.context_length)
            with autocast(ranks.device, choose_precision(args.precision, ranks.device)):
                losses = ending_losses(model, trees, ranks)
            elapsed_s = time.perf_counter() - start
            lengths = np.array([tree.lengths for tree in trees])
            for example, label in zip(chosen, (losses / lengths).argmin(1).tolist(), strict=True):
                example["label"] = label
            return len(chosen) / elapsed_s

        def loop() -> float:
            began: list[float] = []

            def iterate(_split):
                began.append(time.perf_counter())  # the model is loaded by now
                yield from chosen

            theirs.iterate_examples = iterate
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                theirs.evaluate(str(folder), str(ranks.device))
            elapsed_s = time.perf_counter() - began[0]
            last = [line for line in printed.getvalue().splitlines() if " acc_norm: " in line][-1]
            agreed[0] += int(last.split("acc_norm: ")[1].split("/")[0])
            agreed[1] += len(chosen)
            return len(chosen) / elapsed_s

        with evaluating(model):
            figures = in_turn({"SteadyGPT": ours, "build-nanogpt": loop}, args.rounds, "examples/s")
    report(figures, "examples/s")
    print(f"equal predictions: {agreed[0]:,} of {agreed[1]:,} examples ({agreed[0] / agreed[1]:.2%})")


if __name__ == "__main__":
    main()
