"""Text that a checkpoint continues.

python generate.py --prompt "Hello, I'm a language model," --num_seq 4
python generate.py --prompt_file prompt.txt                     # - reads standard input
python generate.py checkpoints/best_model.pt --prompt "def " --max_tokens 200 --temperature 0.8 --top_k 50
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import open_checkpoint
from steadygpt.convert.weights import CheckpointOptions, load_model
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.evaluation.sample import sample_texts
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
    seed: int = option(1337, "seed of the sampling", at_most=2**63 - 1)


def read_prompt(path: str) -> str:
    """Return the text of a file, or of standard input if the path is "-", without its last line break."""
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise UserError(
            f"--prompt_file {path}: {error.strerror}; expected a text file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file {path}: not UTF-8 at byte {error.start:,}; convert it to UTF-8") from error
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
        _, checkpoint = open_checkpoint(options.checkpoint, Path(options.checkpoint_dir))
        model = load_model(checkpoint).to(ranks.device)
        tokenizer = load_tokenizer(TokenizerRecord.of(checkpoint))
        context, tokens = model.config.context_length, 1 + len(tokenizer.encode(prompt))
        if tokens > context:
            print(f"warning: the prompt has {tokens:,} tokens; the model sees the last {context:,}", file=sys.stderr)
        generator = torch.Generator(ranks.device).manual_seed(options.seed)
        how = {"temperature": options.temperature, "top_k": options.top_k}
        sizes = options.num_seq, model.config.embd_size, model.config.mlp_size
        precision, _ = choose_precision(options.precision, ranks.device, *sizes)
        with autocast(ranks.device, precision):
            texts = sample_texts(model, tokenizer, prompt, options.max_tokens, generator, options.num_seq, **how)
        for number, text in enumerate(texts, start=1):
            if options.num_seq > 1:
                print(f"--- {number} of {options.num_seq}")
            print(printable(text, keep="\n\t") if sys.stdout.isatty() else text)  # in a pipe it stays exact
    return 0


if __name__ == "__main__":
    run_cli(main)
