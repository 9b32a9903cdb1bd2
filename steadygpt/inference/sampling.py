"""Sampling of text from a model."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from model import GPT, KVCache
from steadygpt.base.progress import ProgressBar
from steadygpt.data.tokenizer import Tokenizer
from steadygpt.machine.device import CapturedGraph, any_length, evaluating
from steadygpt.machine.parallel import is_sharded


def generate(
    model: GPT,
    idx: Tensor,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Continue each row of idx (B, T) int64 by max_tokens sampled ids; return (B, T + max_tokens) int64.

    If a row is longer than context_length, the model sees only its last context_length tokens.

    Args:
        temperature: 0 takes the most likely token.
        top_k, top_p: see sample.
        generator: on idx's device; if it is not None, it is the only source of randomness.
        vocab_size: ids from vocab_size on are never sampled, because the tokenizer cannot decode them.
        progress: show a progress bar, unless sampling is quick.
    """
    context = model.config.context_length
    cache = KVCache(model.config, idx.size(1) + max_tokens)
    step = None
    with evaluating(model), any_length():
        for _ in ProgressBar(
            iterable=range(max_tokens), total=max_tokens, desc="sampling", unit="token", delay=3, disable=not progress
        ):
            # Beyond the context every token has moved to another position, so the cache is no longer valid.
            fits = idx.size(1) <= context
            if fits and cache.length and can_capture(model):
                step = step or captured_step(model, cache, idx[:, -1:])
                logits = step(idx[:, -1:])
            elif fits:
                logits = model(idx[:, cache.length :], cache=cache)
            else:
                logits = model(idx[:, -context:])
            token = sample(logits[:, -1, :vocab_size].float(), temperature, top_k, top_p, generator)
            idx = torch.cat([idx, token], dim=1)
    return idx


def can_capture(model: GPT) -> bool:
    """Return whether a CUDA graph can compute a token: on a GPU, and not with FSDP, which transfers weights."""
    return model.wte.weight.is_cuda and not is_sharded(model.wte.weight)


def captured_step(model: GPT, cache: KVCache, like: Tensor) -> Callable[[Tensor], Tensor]:
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

    replay = CapturedGraph(step, like.device)

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
            arXiv 1904.09751), among the top_k, as in transformers.
    """
    if temperature < 1e-6:  # dividing by a smaller number overflows
        return logits.argmax(-1, keepdim=True)
    # Diverging weights give NaN or infinite logits, and sampling from them must not end a run.
    logits = (logits / temperature).nan_to_num(nan=0.0, neginf=-torch.inf)
    if top_k:
        logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
    if top_p < 1:
        probs, ids = logits.softmax(-1).sort(descending=True)
        probs[probs.cumsum(-1) - probs >= top_p] = 0  # the ids before reach top_p
        return ids.gather(-1, torch.multinomial(probs, 1, generator=generator))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def prompt_ids(tokenizer: Tokenizer, prompt: str, raw: bool = False) -> list[int]:
    """Return the ids of a prompt, after the document token, with which documents of the data also begin.

    Args:
        raw: encode the names of special tokens as ordinary text.
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
    """Sample `count` continuations of a prompt; return each with the prompt.

    Args:
        prompt: see prompt_ids.
        max_tokens: most tokens after the prompt.
        generator: on the model's device; the only source of randomness.
        ends: ids that end a text, as the document token does.
        stop: end the sampled text before this text.
        sampling: temperature, top_k, top_p and progress of generate.
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
