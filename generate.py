"""Sampling of text from a checkpoint.

python generate.py --prompt "Hello, I'm a language model," --num_seq 4
python generate.py --prompt_file prompt.txt                     # - reads standard input
python generate.py checkpoints/best_model.pt --prompt "def " --max_tokens 200 --temperature 0.8 --top_k 50
"""

import steadygpt.launch  # noqa: F401  # before all others

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from model import GPT, KVCache
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import encoding_of, printable
from steadygpt.convert.weights import CheckpointOptions, end_ids, load_model, open_weights
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.machine.device import Recorded, any_length, autocast, choose_precision, evaluating
from steadygpt.machine.parallel import is_sharded
from steadygpt.machine.ranks import joined


def generate(
    model: GPT,
    idx: Tensor,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Continue each row of idx (B, T) int64 by max_tokens sampled ids; return (B, T + max_tokens) int64.

    If a row is longer than context_length, the model sees only its last context_length tokens.

    Args:
        temperature: 0 takes the most likely token.
        top_k, top_p: see sample.
        generator: on idx's device; if it is not None, it is the only source of randomness.
        vocab_size: ids from vocab_size on are never sampled, because the tokenizer cannot decode them.
    """
    context = model.config.context_length
    cache = KVCache(model.config, idx.size(1) + max_tokens)
    step = None
    with evaluating(model), any_length():
        for _ in range(max_tokens):
            # Beyond the context every token has moved to another position, so the cache is no longer valid.
            fits = idx.size(1) <= context
            if fits and cache.length and can_record(model):
                step = step or recorded_step(model, cache, idx[:, -1:])
                logits = step(idx[:, -1:])
            elif fits:
                logits = model(idx[:, cache.length :], cache=cache)
            else:
                logits = model(idx[:, -context:])
            token = sample(logits[:, -1, :vocab_size].float(), temperature, top_k, top_p, generator)
            idx = torch.cat([idx, token], dim=1)
    return idx


def can_record(model: GPT) -> bool:
    """Return whether a CUDA graph can compute a token: on a GPU, and not with FSDP, which transfers weights."""
    return model.wte.weight.is_cuda and not is_sharded(model.wte.weight)


def recorded_step(model: GPT, cache: KVCache, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from each row's next token (B, 1) to logits, which a GPU launches as one graph.

    A graph repeats its work at the same addresses. So attention sees the whole cache, with a mask over the part that
    is not filled yet, and the position is a tensor.
    """
    token = torch.empty_like(like)
    position = torch.tensor([cache.length], device=like.device)
    cache_positions = torch.arange(cache.max_length, device=like.device).view(1, 1, 1, -1)

    def step() -> Tensor:
        logits = model(token, cache=cache, positions=position, mask=cache_positions <= position)
        position.add_(1)
        return logits

    replay = Recorded(step, like.device)

    def next_logits(last_token: Tensor) -> Tensor:
        token.copy_(last_token)
        return replay()

    return next_logits


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row of (B, V) logits; return (B, 1) int64.

    Args:
        top_k: the number of most likely ids to draw from; 0 or None takes all.
        top_p: draw from the fewest most likely ids with at least this probability together (nucleus sampling,
            arXiv 1904.09751); of those of top_k, as in transformers.
    """
    if temperature < 1e-6:  # dividing by a smaller number overflows
        return logits.argmax(-1, keepdim=True)
    # Diverging weights give NaN or infinite logits, and sampling from them must not end a run.
    logits = (logits / temperature).nan_to_num(nan=0.0, neginf=-torch.inf)
    if top_k:
        logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
    if top_p < 1:
        probs, ids = logits.softmax(-1).sort(descending=True)
        probs[probs.cumsum(-1) - probs >= top_p] = 0  # those before suffice
        return ids.gather(-1, torch.multinomial(probs, 1, generator=generator))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def prompt_ids(tokenizer: Tokenizer, prompt: str, raw: bool = False) -> list[int]:
    """Return the ids of a prompt, after the document token, with which documents of the data also begin.

    Args:
        raw: take the text of special tokens as ordinary text.
    """
    ids = tokenizer.encode(prompt) if raw else tokenizer.encode_prompt(prompt)
    document_id = tokenizer.document_id
    return ids if ids[:1] == [document_id] else [document_id, *ids]


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_tokens: int,
    generator: torch.Generator,
    count: int = 1,
    ends: Iterable[int] = (),
    stop: str = "",
    **sampling,
) -> list[str]:
    """Sample `count` texts, each of a document that begins with the prompt.

    Args:
        prompt: see prompt_ids.
        max_tokens: most tokens after the prompt.
        generator: on the model's device; the only source of randomness.
        ends: ids that end a text, as the document token does.
        stop: a text that ends the sampled text, which leaves it out.
        sampling: temperature, top_k and top_p of generate.
    """
    idx = torch.tensor([prompt] * count, device=generator.device)
    idx = generate(model, idx, max_tokens, generator=generator, vocab_size=tokenizer.n_vocab, **sampling)
    ends = {*ends, tokenizer.document_id}
    shown_prompt = [*prompt[1:]]  # without the document token
    prompt_length = len(tokenizer.decode(shown_prompt))
    texts = []
    for ids in idx[:, len(prompt) :].tolist():
        text = tokenizer.decode(shown_prompt + list(takewhile(lambda i: i not in ends, ids)))
        if stop:
            text = text[:prompt_length] + text[prompt_length:].partition(stop)[0]
        texts.append(text)
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# the command


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
                model, tokenizer, ids, options.max_tokens, generator, options.num_seq, ends, options.stop, **sampling
            )
        for number, text in enumerate(texts, start=1):
            if options.num_seq > 1:
                print(f"--- {number} of {options.num_seq}")
            print(printable(text, keep="\n\t") if sys.stdout.isatty() else text)  # a pipe gets the exact text
    return 0


if __name__ == "__main__":
    run_cli(main)
