"""GPT-2 and GPT-NeoX by hand: one pre-LN block, learned or rotary positions, chunked loss, KV-cached generation.

Module names are GPT-2's own (wte wpe h ln_1 attn.c_attn ...), so weights map one to one.
Shapes: B rows, T tokens, C = embd_size, V = vocab_size.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steadygpt.cli import UserError

IGNORED_TARGET = -1  # a target that counts for nothing
Rotary = tuple[Tensor, Tensor] | None  # cosine and sine of rotary_angles; None: learned positions


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; the defaults are GPT-2 124M, configs/gpt-neox-1.2b.toml has those of GPT-NeoX."""

    vocab_size: int = 50257
    context_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    embd_size: int = 768
    intermediate_size: int = 0  # width inside the MLP; 0: 4 * embd_size
    dropout: float = 0.0
    bias: bool = True
    layer_norm_eps: float = 1e-5
    gelu: str = "tanh"  # or "exact"
    rotary_pct: float = 0.0  # share of each head's dimensions that rotate with the position; 0: learned positions
    rotary_base: float = 10000.0
    parallel_residual: bool = False  # attention and MLP read the same input
    tied_head: bool = True  # the head is the embedding table

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: matrix products like multiples of 64."""
        return math.ceil(self.vocab_size / 64) * 64

    @property
    def head_dim(self) -> int:
        return self.embd_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_pct)

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or 4 * self.embd_size


class KVCache:
    """Keys and values of the tokens a batch has seen, (num_layers, 2, B, num_heads, max_length, head_dim)."""

    def __init__(self, config: GPTConfig, max_length: int | None = None):
        self.num_layers = config.num_layers
        self.max_length = min(max_length or config.context_length, config.context_length)
        self.length = 0
        self.kv: Tensor | None = None  # allocated by the first append, which knows batch, device and dtype

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, num_heads, T, head_dim) keys and values of one layer; return all there are."""
        B, H, T, D = k.shape
        if self.kv is None:
            self.kv = k.new_empty(self.num_layers, 2, B, H, self.max_length, D)
        end = self.length + T
        self.kv[layer, 0, :, :, self.length : end] = k
        self.kv[layer, 1, :, :, self.length : end] = v
        return self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]


def rotary_angles(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotations at positions (..., T), each (..., 1, T, rotary_dim / 2) fp32.

    Su et al. 2021, section 3.2.2.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, device=positions.device).float() / config.rotary_dim
    angles = (positions[..., None] / config.rotary_base**exponents).unsqueeze(-3)  # the same in each head
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (x[i], x[i + rotary_dim / 2]) of (B, num_heads, T, head_dim); further dimensions stay."""
    cos, sin = rotary
    half = cos.size(-1)
    first, second, rest = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).type_as(x)


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int = 128) -> Tensor:
    """What F.scaled_dot_product_attention(is_causal=True) computes, at twice its speed for short rows of bf16 on a CPU.

    The scores are rounded to bf16: the mean error against fp32 is a third above that of the other's.
    Each block of queries multiplies with the keys up to its end only: above the diagonal blocks nothing is computed.
    """
    parts = []
    for start in range(0, q.size(2), block):
        end = min(start + block, q.size(2))
        scores = (q[:, :, start:end] * q.size(3) ** -0.5) @ k[:, :, :end].mT  # (B, num_heads, end - start, end)
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.float().masked_fill(later, -torch.inf).softmax(-1).type_as(v)
        parts.append(F.dropout(weights, dropout) @ v[:, :, :end])
    return torch.cat(parts, dim=2)


class Linear(nn.Linear):
    """Its weights are GPT's to initialize: PyTorch's own would cost as much again, for nothing."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """As Linear."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.num_heads, self.dropout = layer, config.num_heads, config.dropout
        self.c_attn = Linear(config.embd_size, 3 * config.embd_size, bias=config.bias)
        self.c_proj = Linear(config.embd_size, config.embd_size, bias=config.bias)

    def forward(self, x: Tensor, rotary: Rotary, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, num_heads, T, head_dim)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        # With a cache, T is the whole prompt (nothing cached yet: causal) or one token (which sees everything).
        dropout = self.dropout if self.training else 0.0
        if mask is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        elif q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < T <= 512:
            y = attention_in_blocks(q, k, v, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.approximate = {"tanh": "tanh", "exact": "none"}[config.gelu]
        self.c_fc = Linear(config.embd_size, config.mlp_size, bias=config.bias)
        self.c_proj = Linear(config.mlp_size, config.embd_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.ln_1 = nn.LayerNorm(config.embd_size, config.layer_norm_eps, bias=config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.embd_size, config.layer_norm_eps, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        attended = x + self.attn(self.ln_1(x), rotary, cache, mask)
        return attended + self.mlp(self.ln_2(x if self.parallel_residual else attended))


class GPT(nn.Module):
    """The language model. Logits are for the true vocabulary: padding rows are never predicted or sampled.

    Args:
        initialize: False leaves the weights undefined, for weights that are to be loaded.
    """

    def __init__(self, config: GPTConfig, initialize: bool = True):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # recompute each block in backward: less memory, a third more time
        self.loss_chunk_size = 0  # tokens whose logits exist at once in training; 0: all
        self.wte = Embedding(config.padded_vocab_size, config.embd_size)
        self.wpe = None if config.rotary_dim else Embedding(config.context_length, config.embd_size)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.embd_size, config.layer_norm_eps, bias=config.bias)
        self.lm_head = Linear(config.embd_size, config.padded_vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.wte.weight
        if initialize:
            self._init_weights()

    @classmethod
    def from_checkpoint(cls, checkpoint: dict) -> "GPT":
        """The model of a SteadyGPT checkpoint, on the CPU.

        Raises: UserError when the checkpoint's parts do not fit each other.
        """
        try:
            model = cls(GPTConfig(**checkpoint["model_config"]), initialize=False)
            model.load_state_dict(checkpoint["model"])
        except (TypeError, RuntimeError) as error:
            raise UserError(f"not a model of this version: {' '.join(str(error).split())[:200]}") from error
        return model

    def _init_weights(self) -> None:
        # GPT-2 (Radford et al. 2019, section 2.3): N(0, 0.02), and residual projections scaled by 1/sqrt(N), where
        # N = 2 * num_layers counts what is added to the residual stream.
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.num_layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)  # LayerNorm's weights are already ones
        with torch.no_grad():  # padding rows get no gradient: zero they stay
            self.wte.weight[self.config.vocab_size :] = 0
            self.lm_head.weight[self.config.vocab_size :] = 0

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with targets the cross-entropy in nats.

        Args:
            idx: (B, T) int64 token ids, T at most context_length (with a cache: minus the tokens already in it).
            targets: (B, T) int64; IGNORED_TARGET counts for nothing.
            reduction: "mean" or "sum" for a scalar, "none" for one loss per target that counts, in row-major
                order, with logits computed only there.
            cache: extended by these tokens; then only the last token's logits are returned.
            positions: (B, T) int64, each below context_length; T may then be more. Default: 0, 1, 2, ...
            mask: (B, 1, T, T) bool, which tokens (columns) each token (row) sees. Default: itself and those before it.

        Returns:
            (B, T, V) logits, (B, 1, V) with a cache, or the fp32 loss.
        """
        T, start = idx.size(1), cache.length if cache is not None else 0
        if positions is None:
            assert start + T <= self.config.context_length, f"{start} + {T} tokens > {self.config.context_length}"
            positions = torch.arange(start, start + T, device=idx.device)
        x, rotary = self.wte(idx), None  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            rotary = rotary_angles(self.config, positions)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, rotary, cache, mask, use_reentrant=False)
            else:
                x = block(x, rotary, cache, mask)
        if cache is not None:
            cache.length += T
            x = x[:, -1:]
        if targets is None:
            return self._logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
        counts = targets != IGNORED_TARGET
        if reduction == "none":
            x, targets = x[counts], targets[counts]
        losses = self._chunked_losses if 0 < self.loss_chunk_size < len(x) else self._losses
        losses = losses(x, targets, "none" if reduction == "none" else "sum")
        return losses / counts.sum() if reduction == "mean" else losses

    def _logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(x))[..., : self.config.vocab_size]

    def _losses(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Cross-entropy of (N, C) and (N,)."""
        logits = self._logits(x).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction=reduction)

    def _chunked_losses(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """The same with the logits of loss_chunk_size tokens at a time, thrown away and computed again in backward."""
        parts = [
            checkpoint(self._losses, *chunk, reduction, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(x.split(self.loss_chunk_size), targets.split(self.loss_chunk_size), strict=True)
        ]
        return torch.cat(parts) if reduction == "none" else torch.stack(parts).sum()

    def compiled(self) -> nn.Module:
        """This model through torch.compile, but for the loss in chunks.

        In one graph with the rest, the logits of all chunks stand in memory after all (torch 2.13).
        """
        self._chunked_losses = torch.compiler.disable(self._chunked_losses)
        return torch.compile(self)

    def num_parameters(self) -> int:
        """Parameters of the model proper: a tied head once, padding rows not at all."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.embd_size
        return sum(parameter.numel() for parameter in self.parameters()) - padding * (2 - self.config.tied_head)

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token: 6N + 12*L*C*T (PaLM, Chowdhery et al. 2022, appendix B)."""
        N = self.num_parameters()  # that multiply: looking up a table costs nothing
        if self.wpe is not None:
            N -= self.wpe.weight.numel()
        if not self.config.tied_head:
            N -= self.config.vocab_size * self.config.embd_size
        return 6 * N + 12 * self.config.num_layers * self.config.embd_size * self.config.context_length

    def optimizer_groups(self, weight_decay: float) -> list[dict]:
        """Parameter groups for AdamW: matrices and embeddings decay, biases and LayerNorms do not."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    def generate(
        self,
        idx: Tensor,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row of idx (B, T) by max_tokens sampled ids; returns (B, T + max_tokens) int64.

        Past context_length tokens the model sees the last context_length of them. Temperature 0 takes the likeliest
        token. Randomness comes from `generator` (on idx's device) alone where one is given.
        """
        cache = KVCache(self.config, idx.size(1) + max_tokens)
        with evaluating(self):
            for _ in range(max_tokens):
                if idx.size(1) <= self.config.context_length:
                    logits = self(idx[:, cache.length :], cache=cache)
                else:  # each token moves to another position, so nothing cached stays true
                    logits = self(idx[:, -self.config.context_length :])
                token = sample(logits[:, -1].float(), temperature, top_k, generator)
                idx = torch.cat([idx, token], dim=1)
        return idx


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one id per row of (B, V) logits; returns (B, 1) int64."""
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -torch.inf
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@contextmanager
def evaluating(model: nn.Module):
    """No dropout and no gradients inside; the model's mode afterwards is what it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
