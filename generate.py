"""Sampling of text from a checkpoint.

python generate.py --prompt "Hello, I'm a language model," --num_seq 4
python generate.py --prompt_file prompt.txt                     # - reads standard input
python generate.py checkpoints/best_model.pt --prompt "def " --max_tokens 200 --temperature 0.8 --top_k 50
"""

import steadygpt.preflight  # noqa: F401  # before all others

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import encoding_of, printable
from steadygpt.convert.weights import CheckpointOptions, end_ids, load_model, open_weights
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.inference.sampling import prompt_ids, sample_texts
from steadygpt.machine.device import autocast, choose_precision
from steadygpt.machine.ranks import joined


@dataclass(frozen=True)
class GenerateOptions(CheckpointOptions):
    prompt: str = option("", "prompt, the text to continue (default: the start of a document)")
    prompt_file: str = option("", "read the prompt from a file, without its last line break; -: standard input")
    num_seq: int = option(1, "number of texts to sample", at_least=1, at_most=10_000)
    max_tokens: int = option(200, "tokens to add to each text", at_least=1)
    temperature: float = option(0.8, "sampling temperature; 0 = always the most likely token")
    top_k: int = option(50, "sample from the k most likely tokens; 0 = from all")
    top_p: float = option(
        1.0, "sample from the fewest most likely tokens with this probability together", at_least=1e-6, at_most=1
    )
    stop: str = option("", "end a text before this text")
    raw: bool = option(False, "read the names of special tokens in the prompt as ordinary text")
    seed: int = option(1337, "seed of the sampling", at_most=2**63 - 1)


def read_prompt(path: str) -> str:
    """Return the text of a file, or of standard input if the path is "-", without its last line break."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode(encoding_of(data))
    except OSError as error:
        raise UserError(
            f"--prompt_file {path}: {error.strerror}; expected a text file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt_file {path}: not {error.encoding.upper()} at byte {error.start:,}; convert it to UTF-8"
        ) from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError(f"--prompt_file {path}: empty; expected text to continue")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(GenerateOptions, argv, "Sample text from a checkpoint.")
    if options.prompt and options.prompt_file:
        raise UserError("--prompt and --prompt_file both give the text to continue; give one of them")
    prompt = read_prompt(options.prompt_file) if options.prompt_file else options.prompt
    with joined(options.device) as ranks:
        _, checkpoint = open_weights(options.checkpoint, Path(options.checkpoint_dir))
        model = load_model(checkpoint).to(ranks.device)
        record = TokenizerRecord.of(checkpoint)
        tokenizer = load_tokenizer(record)
        context = model.config.context_length
        ids = prompt_ids(tokenizer, prompt, options.raw)
        if len(ids) > context:
            print(f"warning: the prompt has {len(ids):,} tokens; the model sees the last {context:,}", file=sys.stderr)
        generator = torch.Generator(ranks.device).manual_seed(options.seed)
        sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        ends = end_ids(record, model.config.vocab_size)
        with autocast(ranks.device, choose_precision(options.precision, ranks.device)):
            texts = sample_texts(
                model,
                tokenizer,
                ids,
                options.max_tokens,
                generator,
                options.num_seq,
                ends,
                options.stop,
                progress=True,
                **sampling,
            )
        for number, text in enumerate(texts, start=1):
            if options.num_seq > 1:
                print(f"--- {number} of {options.num_seq}")
            print(printable(text, keep="\n\t") if sys.stdout.isatty() else text)  # a pipe gets the exact text
    return 0


if __name__ == "__main__":
    run_cli(main)
