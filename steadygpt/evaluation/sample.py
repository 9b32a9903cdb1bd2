"""Text from a model: KV cache and sampling."""

import torch
from torch import Tensor

from model import GPT, KVCache
from steadygpt.data.tokenizer import Tokenizer
from steadygpt.machine.device import any_length, evaluating


def generate(
    model: GPT,
    idx: Tensor,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Continue each row of idx (B, T) int64 by max_tokens sampled ids; return (B, T + max_tokens) int64.

    Beyond context_length tokens the model sees the last context_length of them.

    Args:
        temperature: 0 takes the most likely token.
        generator: on idx's device; the only source of randomness if given.
        vocab_size: ids from here on are never sampled: the tokenizer cannot decode them.
    """
    context, cache = model.config.context_length, KVCache(model.config, idx.size(1) + max_tokens)
    with evaluating(model), any_length():
        for _ in range(max_tokens):
            # Beyond the context every token has moved to another position, so the cache is no longer valid.
            fits = idx.size(1) <= context
            logits = model(idx[:, cache.length :], cache=cache) if fits else model(idx[:, -context:])
            token = sample(logits[:, -1, :vocab_size].float(), temperature, top_k, generator)
            idx = torch.cat([idx, token], dim=1)
    return idx


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one id per row of (B, V) logits; return (B, 1) int64."""
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def sample_texts(
    model: GPT, tokenizer: Tokenizer, prompt: str, max_tokens: int, generator: torch.Generator, count: int = 1, **how
) -> list[str]:
    """Return `count` texts that begin a document with `prompt` and end with the document or after max_tokens.

    Args:
        generator: on the model's device; the only source of randomness.
        how: temperature and top_k of generate.
    """
    start = [tokenizer.document_id, *tokenizer.encode(prompt)]  # as every document of the data begins
    idx = torch.tensor([start] * count, device=generator.device)
    found = generate(model, idx, max_tokens, generator=generator, vocab_size=tokenizer.n_vocab, **how)[:, 1:].tolist()
    return [tokenizer.decode(ids[: (*ids, start[0]).index(start[0])]) for ids in found]  # up to the next document
