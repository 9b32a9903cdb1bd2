"""HellaSwag speed beside build-nanogpt, in examples per second, and the share of equal predictions: GPT-2 124M.

    git clone https://github.com/karpathy/build-nanogpt
    python -m benchmarks.hellaswag_speed --build_nanogpt build-nanogpt --hellaswag_file hellaswag_val.jsonl

build-nanogpt's evaluate() runs in fp32 on our weights, exported; ours scores in bf16 and repeats close calls in fp32.
Our prediction is passed to evaluate() as the label, so the examples that it counts as correct are those on which both
agree. Needs transformers, requests, safetensors and tokenizers, or leaves build-nanogpt out. Without GPT-2's vocabulary
both sides get the same made-up tokens.
"""

import argparse
import contextlib
import dataclasses
import io
import re
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import tiktoken
import torch

from benchmarks.compare import figure, in_turn, load_module, ratio, report, write_json
from convert_hf import write_folder
from generate import load_model
from hellaswag_eval import ending_losses, tokenize
from model import GPT, GPTConfig
from steadygpt.cli import UserError
from steadygpt.device import autocast, choose_precision, evaluating
from steadygpt.distributed import joined
from steadygpt.tasks import Example, load_examples
from steadygpt.tokenizer import get_tokenizer


class MadeUpTokens:
    """A stand-in for GPT-2's vocabulary: about as many tokens per text, with ids from a hash."""

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(piece.encode()) % 50257 for piece in re.findall(r" ?\w{1,5}|\W", text)]

    encode_ordinary = encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build_nanogpt", type=Path, help="a checkout of build-nanogpt; without it, ours alone")
    parser.add_argument("--hellaswag_file", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=200, help="examples in each round")
    parser.add_argument("--precision", default="auto", help="of our side (default: auto, as in training)")
    parser.add_argument("--layers", type=int, default=12, help="fewer are for trying this command (default: 12)")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    examples, notes = load_examples("hellaswag", args.hellaswag_file), []
    try:
        tokenizer = get_tokenizer("gpt2")
    except UserError as error:
        tokenizer = MadeUpTokens()
        notes.append(f"made-up tokens of about the same number: {error}")
    tiktoken.get_encoding = lambda _: tokenizer  # the same vocabulary, without a download
    theirs = load_module(args.build_nanogpt / "hellaswag.py") if args.build_nanogpt else None
    torch.manual_seed(0)
    config = GPTConfig(num_layers=args.layers)
    checkpoint = {"model": GPT(config).state_dict(), "model_config": dataclasses.asdict(config), "tokenizer": "gpt2"}
    with tempfile.TemporaryDirectory() as temporary, joined("auto") as ranks:
        folder = Path(temporary) / "gpt2"
        if theirs:
            write_folder(checkpoint, folder)
        model = load_model(checkpoint).to(ranks.device)
        precision, _ = choose_precision(args.precision, ranks.device, model.config, model.config.context_length)
        agreed = [0, 0]
        chosen: list[Example] = []
        taken = 0

        def ours() -> float:
            nonlocal taken
            chosen[:] = examples[taken : taken + args.examples]
            taken += len(chosen)
            torch.set_float32_matmul_precision("highest")  # evaluate() of the other side allows TF32
            start = time.perf_counter()
            trees = tokenize(chosen, tokenizer, config.context_length)
            with autocast(ranks.device, precision):
                losses = ending_losses(model, trees, ranks)
            elapsed_s = time.perf_counter() - start
            lengths = np.array([tree.lengths for tree in trees])
            labels = (losses / lengths).argmin(1).tolist()
            chosen[:] = [example._replace(label=label) for example, label in zip(chosen, labels, strict=True)]
            return len(chosen) / elapsed_s

        def loop() -> float:
            began: list[float] = []

            def iterate(_split):
                began.append(time.perf_counter())  # the model is loaded by now
                for example in chosen:
                    yield {"ctx": example.context, "endings": example.endings, "label": example.label}

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
            ours()  # the first call chooses kernels and allocates memory
            figures = in_turn(
                {"SteadyGPT": ours} | ({"build-nanogpt": loop} if theirs else {}), args.rounds, "examples/s"
            )
    report(figures, "examples/s")
    if theirs:
        notes.append(f"equal predictions: {agreed[0]:,} of {agreed[1]:,} examples ({agreed[0] / agreed[1]:.2%})")
    print(*notes, sep="\n")
    found = {name: figure(speeds, "examples/s") for name, speeds in figures.items()}
    found["ratio"] = ratio(figures, "SteadyGPT", "build-nanogpt", "x build-nanogpt")
    write_json(args.json, found, notes)


if __name__ == "__main__":
    main()
