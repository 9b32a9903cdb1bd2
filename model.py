"""GPT-2, GPT-NeoX, Llama, Qwen 3, NanoChat and LFM2: one pre-norm block whose parts are options, and the loss.

Module names are GPT-2's own (wte wpe h ln_1 attn.c_attn ...), so weights map one to one.
Shapes: B rows, T tokens, C = embd_size, V = vocab_size.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from steadygpt.base.options import OptionError, check_options, option
from steadygpt.machine.attention import OPERATORS, attention
from steadygpt.machine.loss import linear_losses, softcapped, token_losses

TABLES = ("wte.weight", "lm_head.weight")  # a row per token of the vocabulary, and rows of padding

# ---------------------------------------------------------------------------------------------------------------------
# activations and norms: their names are the choices of --activation and --norm


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GPT-2's approximation of GELU (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """Compute ReLU squared (So et al. 2021)."""
    x = F.relu(x)
    return x * x  # not x.square(), which autocast computes in fp32


def swiglu(x: Tensor) -> Tensor:
    """Compute SwiGLU (Shazeer 2020): SiLU of the first half of the features, times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Activation(NamedTuple):
    """The activation of an MLP, (..., matrices * F) -> (..., F)."""

    function: Callable[[Tensor], Tensor]
    matrices: int = 1  # stacked in the weight before it


ACTIVATIONS = {
    "gelu_tanh": Activation(gelu_tanh),
    "gelu": Activation(F.gelu),
    "relu2": Activation(relu2),
    "swiglu": Activation(swiglu, matrices=2),
}


class NormKind(NamedTuple):
    """The kind of norm that a model uses."""

    is_layernorm: bool = False  # LayerNorm, with a bias if the model has biases; otherwise RMSNorm
    has_weight: bool = True
    of_embedding: bool = False  # also normalizes the embedding


NORMS = {
    "layernorm": NormKind(is_layernorm=True),
    "rmsnorm": NormKind(),
    "rmsnorm_no_weight": NormKind(has_weight=False, of_embedding=True),
}

# ---------------------------------------------------------------------------------------------------------------------
# options

_shape = partial(option, group="model", on_resume="never")
ATTENTION, CONVOLUTION = "AC"  # the letters of --layer_pattern
CONV_WIDTH = 3  # tokens that a short convolution sees, as in LFM2; with more, losses are no lower: docs/LOG.md


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The defaults are GPT-2 124M; configs/gpt-neox-1.2b.toml has GPT-NeoX's values.

    All fields but vocab_size, which comes from the data, are options of train.py: TrainConfig inherits them.
    """

    # fmt: off
    vocab_size: int = 50257
    num_layers: int = _shape(12, "number of transformer blocks", at_least=1, at_most=2**12)
    num_heads: int = _shape(12, "number of attention heads", at_least=1, at_most=2**24)
    num_kv_heads: int = _shape(0, "key and value heads, for grouped-query attention; 0 = num_heads", at_most=2**24)
    embd_size: int = _shape(768, "width of the residual stream", at_least=1, at_most=2**24)
    head_dim: int = _shape(0, "dimensions per head; 0 = embd_size / num_heads", at_most=2**24)
    context_length: int = _shape(1024, "tokens per row", at_least=1, at_most=2**24)
    intermediate_size: int = _shape(0, "width of the MLP; 0 = 4 * embd_size, or 8/3 if gated", at_most=2**24)
    bias: bool = _shape(True, "biases in linear layers and LayerNorms, as in GPT-2")
    norm: str = _shape("layernorm", "layernorm, as in GPT-2; rmsnorm, as in Llama; rmsnorm_no_weight, as in "
                       "NanoChat", choices=tuple(NORMS))
    norm_eps: float = _shape(1e-5, "epsilon of the norms", at_least=1e-20)
    qk_norm: bool = _shape(False, "apply RMSNorm to queries and keys, as in Qwen 3")
    attention_gate: bool = _shape(False, "a sigmoid gate for each head of attention, as in LFM3")
    layer_pattern: str = _shape("A", "kinds of the layers, repeated: A = attention; C = short convolution, as in "
                                "LFM2; CA = in turn")
    activation: str = _shape("gelu_tanh", "gelu_tanh, as in GPT-2; gelu, as in GPT-NeoX; relu2, as in NanoChat; "
                             "swiglu, as in Llama", choices=tuple(ACTIVATIONS))
    rotary_pct: float = _shape(0.0, "part of a head with rotary positions; 0 = learned ones, as in GPT-2", at_most=1)
    rotary_base: float = _shape(10000.0, "base of the rotary wavelengths", at_least=1, at_most=1e15)
    parallel_residual: bool = _shape(False, "attention and MLP read the same input, as in GPT-NeoX")
    tied_head: bool = _shape(True, "share the embedding table with the head, as in GPT-2")
    logit_softcap: float = _shape(0.0, "cap logits smoothly at this value; 15 in NanoChat; 0 = off")
    dropout: float = _shape(0.0, "dropout probability", at_most=0.99, on_resume="ask")
    # fmt: on

    def check_shape(self) -> None:
        """Check each field, and that the fields fit together."""
        check_options(self)
        if not 1 <= self.vocab_size <= 2**24:
            raise OptionError("vocab_size", f"{self.vocab_size:,}", f"1 to {2**24:,}")
        if not self.head_dim and self.embd_size % self.num_heads:
            raise OptionError("num_heads", self.num_heads, f"a divisor of embd_size, {self.embd_size}")
        shape = self.resolved()
        if shape.num_heads % shape.num_kv_heads:
            raise OptionError("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads, {self.num_heads}")
        if self.rotary_pct and (shape.rotary_dim % 2 or not shape.rotary_dim):
            found = f"{self.rotary_pct}, {shape.rotary_dim} of {shape.head_dim} dimensions per head"
            raise OptionError("rotary_pct", found, "an even number of dimensions: they rotate in pairs")
        if not self.layer_pattern or not set(self.layer_pattern) <= {ATTENTION, CONVOLUTION}:
            raise OptionError("layer_pattern", self.layer_pattern or "empty", "letters A and C, such as CA")

    def resolved(self) -> "GPTConfig":
        """Return this shape with derived values in place of zeros."""
        intermediate_size = 4 * self.embd_size
        if ACTIVATIONS[self.activation].matrices > 1:
            intermediate_size = math.ceil(self.embd_size / 3) * 8  # a multiple of 8
        return replace(
            self,
            head_dim=self.head_dim or self.embd_size // self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            intermediate_size=self.intermediate_size or intermediate_size,
            layer_pattern=(self.layer_pattern * self.num_layers)[: self.num_layers],
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: matrix products are fastest at multiples of 64."""
        return math.ceil(self.vocab_size / 64) * 64

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return int(self.resolved().head_dim * self.rotary_pct)

    def parts(self, name: str) -> tuple[int, ...]:
        """Return the rows of each matrix stacked in the weight of a block, by the weight's name."""
        shape = self.resolved()
        if "c_attn" in name:
            query_rows = shape.head_dim * shape.num_heads
            key_rows = shape.head_dim * shape.num_kv_heads  # and the same number of value rows
            return (query_rows, key_rows, key_rows)
        if "c_gate" in name:
            return (shape.num_heads,)
        if "c_in" in name:
            return (shape.embd_size,) * 3
        if "c_fc" in name:  # with SwiGLU, gate, then up
            return (shape.intermediate_size,) * ACTIVATIONS[self.activation].matrices
        return (self.embd_size,)


@dataclass(frozen=True)
class GPTOptions:
    """How training computes a model; its model_config has none of these. The weight of a loss term belongs here."""

    activation_checkpointing: bool = option(
        False, "recompute blocks in the backward pass: less memory, slower", "memory"
    )
    loss_chunk_size: int = option(0, "tokens per chunk of logits, to save memory; 0 = all at once", "memory")


# ---------------------------------------------------------------------------------------------------------------------
# blocks


class KVCache:
    """What the layers remember of the tokens so far.

    Attention: keys and values, (B, num_kv_heads, max_length, head_dim) each. A short convolution: its last inputs,
    (B, CONV_WIDTH - 1, C).
    """

    def __init__(self, config: GPTConfig, max_length: int | None = None):
        self.max_length = config.context_length
        if max_length:
            self.max_length = min(max_length, config.context_length)
        self.length = 0
        self.layers: list[tuple[Tensor, ...]] = []  # allocated at the first use, which knows batch and dtype

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """Store keys and values of one layer, (B, num_kv_heads, T, head_dim), at (T,) positions; return the first ones.

        Args:
            seen: how many to return.
        """
        B, H, _, D = k.shape
        if layer == len(self.layers):  # zeros, because a mask hides unfilled places, but not a NaN
            self.layers.append((k.new_zeros(B, H, self.max_length, D), k.new_zeros(B, H, self.max_length, D)))
        keys, values = self.layers[layer]
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        return keys.narrow(2, 0, seen), values.narrow(2, 0, seen)

    def with_last_inputs(self, layer: int, x: Tensor, count: int) -> Tensor:
        """Return the last `count` inputs of a layer, zeros before the first token, and then x (B, T, C); keep the last.

        Returns: (B, count + T, C).
        """
        if layer == len(self.layers):
            self.layers.append((x.new_zeros(x.size(0), count, x.size(2)),))
        (last,) = self.layers[layer]
        x = torch.cat([last, x], dim=1)
        last.copy_(x[:, x.size(1) - count :])
        return x


class LayerArgs(NamedTuple):
    """The arguments of attention and of short convolutions that all blocks share."""

    positions: Tensor  # (T,) or (B, T)
    rotary: Tensor | None = None  # rows of rotary_table; None: learned positions
    cache: KVCache | None = None
    mask: Tensor | None = None  # (B, 1, T, S) bool


def rotary_table(config: GPTConfig, device: torch.device) -> Tensor:
    """Return cosine and sine of each position's rotations, (2, context_length, 1, rotary_dim / 2) fp32.

    Su et al. 2021, section 3.2.2.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, device=device).float() / config.rotary_dim
    positions = torch.arange(config.context_length, device=device)
    angles = (positions[:, None] / config.rotary_base**exponents).unsqueeze(-2)  # the same in each head
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + rotary_dim / 2]) of (B, T, num_heads, head_dim); other dimensions stay."""
    cos, sin = rotary
    half = cos.size(-1)
    first, second, rest = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).type_as(x)


class Linear(nn.Linear):
    """A linear layer without initialization: GPT sets its weights."""

    def reset_parameters(self) -> None:
        pass  # PyTorch's values would be overwritten, and computing them on the meta device takes seconds

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        # FSDP gathers weights in bf16, but an evaluation without autocast computes in fp32.
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            weight = weight.type_as(x)
            if bias is not None:
                bias = bias.type_as(x)
        return F.linear(x, weight, bias)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) of the last dimension, in the input's dtype.

    Both compute in fp32 at least.
    """

    def __init__(self, config: GPTConfig, size: int, is_layernorm: bool):
        super().__init__()
        self.shape = (size,)
        self.eps = config.norm_eps
        self.is_layernorm = is_layernorm
        self.weight = None
        self.bias = None
        if NORMS[config.norm].has_weight:
            self.weight = nn.Parameter(torch.empty(size))
        if is_layernorm and config.bias:
            self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if weight is not None:
            weight = weight.to(wide)  # from bf16 under FSDP
        if bias is not None:
            bias = bias.to(wide)
        if not self.is_layernorm:
            y = F.rms_norm(x.to(wide), self.shape, weight, self.eps)
        elif x.is_cpu:  # here layer_norm computes in fp32 without a copy of x
            y = F.layer_norm(x, self.shape, weight, bias, self.eps)
        else:
            y = F.layer_norm(x.to(wide), self.shape, weight, bias, self.eps)
        return y.type_as(x)


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query (with fewer heads of keys and values)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.split_sizes = config.parts("c_attn")
        self.c_attn = Linear(config.embd_size, sum(self.split_sizes), bias=config.bias)
        self.c_proj = Linear(self.split_sizes[0], config.embd_size, bias=config.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:  # always RMSNorm. Without weights, it commutes with the rotation.
            self.q_norm = Norm(config, config.head_dim, is_layernorm=False)
            self.k_norm = Norm(config, config.head_dim, is_layernorm=False)
        self.c_gate = None
        if config.attention_gate:
            self.c_gate = Linear(config.embd_size, config.num_heads, bias=config.bias)

    def forward(self, x: Tensor, args: LayerArgs) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).split(self.split_sizes, dim=-1)
        q = self.q_norm(q.view(B, T, -1, self.head_dim))  # (B, T, heads, head_dim)
        k = self.k_norm(k.view(B, T, -1, self.head_dim))
        v = v.view(B, T, -1, self.head_dim)
        if args.rotary is not None:
            q = rotate(q, args.rotary)
            k = rotate(k, args.rotary)
        q = q.transpose(1, 2)  # (B, heads, T, head_dim)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if args.cache is not None:  # T tokens are the whole prompt into an empty cache, or one token
            seen = args.cache.length + T
            if args.mask is not None:
                seen = args.mask.size(-1)
            k, v = args.cache.append(self.layer, args.positions, k, v, seen)
        dropout = self.dropout if self.training else 0.0
        y = attention(q, k, v, args.mask, dropout)
        y = y.transpose(1, 2)  # (B, T, heads, head_dim)
        if self.c_gate is not None:  # Qiu et al. 2025, a gate for each head
            y = y * self.c_gate(x).sigmoid().unsqueeze(-1)
        return F.dropout(self.c_proj(y.reshape(B, T, -1)), self.dropout, self.training)


class ShortConvolution(nn.Module):
    """LFM2's gated short convolution, in the place of attention: c * conv(b * u), where c_in computes b, c and u.

    A causal convolution of each feature over CONV_WIDTH tokens. It has no positions and no scores.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.dropout = config.dropout
        self.c_in = Linear(config.embd_size, 3 * config.embd_size, bias=config.bias)
        self.taps = nn.Parameter(torch.empty(CONV_WIDTH, config.embd_size))  # the last is of the token itself
        self.c_proj = Linear(config.embd_size, config.embd_size, bias=config.bias)

    def forward(self, x: Tensor, args: LayerArgs) -> Tensor:
        b, c, u = self.c_in(x).chunk(3, dim=-1)
        products = map(torch.mul, self.taps.type_as(u), self.windows(b * u, args))
        y = reduce(torch.add, products)  # on a CPU, conv1d takes up to twice as long
        return F.dropout(self.c_proj(c * y), self.dropout, self.training)

    def windows(self, x: Tensor, args: LayerArgs) -> list[Tensor]:
        """Return for each tap the tokens of x (B, T, C) that it multiplies, (B, T, C), zeros before the first token."""
        T = x.size(1)
        earlier = CONV_WIDTH - 1
        if args.cache is not None:
            x = args.cache.with_last_inputs(self.layer, x, earlier)
        elif args.mask is None:
            x = F.pad(x, (0, 0, earlier, 0))
        else:
            return [*(seen_before(x, back, args.positions, args.mask) for back in range(earlier, 0, -1)), x]
        return [x[:, start : start + T] for start in range(earlier + 1)]


def seen_before(x: Tensor, back: int, positions: Tensor, mask: Tensor) -> Tensor:
    """Return for each token of x (B, T, C) the one it sees `back` positions before it, zeros where there is none.

    Args:
        positions: (T,) or (B, T).
        mask: (B, 1, T, T) bool, which tokens (columns) each token (row) sees.
    """
    positions = positions.expand(x.shape[:2])
    is_wanted = mask[:, 0] & (positions[:, :, None] - positions[:, None, :] == back)  # (B, T, T), one a row at most
    places = is_wanted.int().argmax(2, keepdim=True)  # (B, T, 1)
    return x.gather(1, places.expand_as(x)) * is_wanted.any(2, keepdim=True)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.activation = ACTIVATIONS[config.activation].function
        self.c_fc = Linear(config.embd_size, sum(config.parts("c_fc")), bias=config.bias)
        self.c_proj = Linear(config.intermediate_size, config.embd_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(self.activation(self.c_fc(x)))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Attention, or a short convolution in its place, and MLP, each added to the residual stream.

    With `recompute`, backward recomputes them, except for the output of the attention kernel, which is kept if there
    is no dropout.
    """

    def __init__(self, config: GPTConfig, layer: int, recompute: bool = False):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.recompute = recompute
        self.dropout = config.dropout
        self.ln_1 = Norm(config, config.embd_size, NORMS[config.norm].is_layernorm)
        self.has_attention = config.layer_pattern[layer] == ATTENTION
        if self.has_attention:
            self.attn = Attention(config, layer)
        else:
            self.conv = ShortConvolution(config, layer)
        self.ln_2 = Norm(config, config.embd_size, NORMS[config.norm].is_layernorm)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, args: LayerArgs) -> Tensor:
        if not (self.recompute and self.training):
            return self._compute(x, args)
        # Checkpoint here, not around the block: otherwise torch.compile runs blocks eagerly under FSDP (torch 2.13).
        contexts: Callable = partial(create_selective_checkpoint_contexts, OPERATORS)  # keep outputs of attention
        if self.dropout:  # attention must redraw its random numbers, or later dropout masks would differ
            contexts = noop_context_fn
        return checkpoint(self._compute, x, args, use_reentrant=False, context_fn=contexts)

    def _compute(self, x: Tensor, args: LayerArgs) -> Tensor:
        operator = self.attn if self.has_attention else self.conv
        mixed = x + operator(self.ln_1(x), args)
        if self.parallel_residual:
            return mixed + self.mlp(self.ln_2(x))
        return mixed + self.mlp(self.ln_2(mixed))


# ---------------------------------------------------------------------------------------------------------------------
# the model


class GPT(nn.Module):
    """The language model. Padding ids are never predicted: their logits are -inf.

    Args:
        options: how training computes the model; loss_terms() reads the weights of terms from self.options.
        initialize: False leaves the weights undefined, for a caller that sets them.
    """

    def __init__(self, config: GPTConfig, options: GPTOptions = GPTOptions(), initialize: bool = True):
        super().__init__()
        self.config = config
        config = config.resolved()
        self.options = options
        self.loss_chunk_size = options.loss_chunk_size
        self.loss_terms_of_full_chunk = self.loss_terms
        rows = config.padded_vocab_size
        # Given a weight, nn.Embedding does not initialize one.
        self.wte = nn.Embedding(rows, config.embd_size, _weight=torch.empty(rows, config.embd_size))
        self.wpe = None
        if not config.rotary_dim:
            rows = config.context_length
            self.wpe = nn.Embedding(rows, config.embd_size, _weight=torch.empty(rows, config.embd_size))
        self.register_buffer("rotary", None, persistent=False)
        self.fill_rotary(torch.get_default_device())
        self.ln_0: nn.Module = nn.Identity()
        if NORMS[config.norm].of_embedding:  # as in NanoChat; this norm has no weights
            self.ln_0 = Norm(config, config.embd_size, is_layernorm=False)
        self.h = nn.ModuleList(
            Block(config, layer, options.activation_checkpointing) for layer in range(config.num_layers)
        )
        self.ln_f = Norm(config, config.embd_size, NORMS[config.norm].is_layernorm)
        self.lm_head = Linear(config.embd_size, config.padded_vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.wte.weight
        if initialize:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(self.initial_weight(name))

    def initial_weight(self, name: str) -> Tensor:
        """Draw the initial value of a parameter in fp32, on the CPU, so that a seed gives the same model on any device.

        GPT-2 (Radford et al. 2019, section 2.3): N(0, 0.02), and residual projections scaled by 1/sqrt(N), where
        N = 2 * num_layers counts the additions to the residual stream. An untied head is zero, so all tokens are
        equally likely at the start (Yang et al. 2022, appendix D.2).
        """
        weight = torch.empty(self.get_parameter(name).shape, device="cpu")
        if name.endswith("taps"):  # PyTorch's values for a convolution
            bound = CONV_WIDTH**-0.5
            return weight.uniform_(-bound, bound)
        if weight.dim() < 2:
            is_bias = name.endswith(".bias")
            return weight.fill_(0 if is_bias else 1)
        if name == "lm_head.weight":
            return weight.zero_()
        std = 0.02
        if name.endswith("c_proj.weight"):
            std /= math.sqrt(2 * self.config.num_layers)
        weight.normal_(std=std)
        if name in TABLES:
            weight[self.config.vocab_size :] = 0  # padding gets no gradient, so it stays zero
        return weight

    def fill_rotary(self, device: torch.device) -> None:
        """Compute the rotary table once, because compiled code would recompute it in every layer."""
        if self.config.rotary_dim:
            self.rotary = rotary_table(self.config, device)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return logits, or with targets the terms of the loss by name.

        Args:
            idx: (B, T) int64 token ids, T at most context_length (with a cache: minus the tokens already in it).
            targets: (B, T) int64 token ids to predict.
            cache: is extended by these tokens; then only the last token's logits are returned.
            positions: (B, T) int64, or (T,) with a cache, each below context_length; T may then be larger. Default:
                0, 1, 2, ... after the tokens in the cache.
            mask: (B, 1, T, T) bool, which tokens (columns) each token (row) sees; with a cache (1, 1, T, S), over the
                first S places of the cache. Default: causal.

        Returns:
            (B, T, padded_vocab_size) logits, -inf in the padding, with a cache only those of the last token; with
            targets, loss_terms(), each (B * T,) fp32.
        """
        x = self._hidden(idx, cache, positions, mask)
        if targets is None:
            if cache is not None:
                x = x[:, -1:]
            logits = self._logits(x)
            logits[..., self.config.vocab_size :] = -torch.inf
            return logits
        x = x.flatten(0, 1)  # (B * T, C)
        targets = targets.flatten()
        if 0 < self.loss_chunk_size < len(x):
            return self._loss_terms_in_chunks(x, targets)
        return self.loss_terms(x, targets)

    def _hidden(self, idx: Tensor, cache: KVCache | None, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the output of the last block, (B, T, C)."""
        T = idx.size(1)
        if positions is None:
            start = 0 if cache is None else cache.length
            assert start + T <= self.config.context_length, f"{start} + {T} tokens > {self.config.context_length}"
            positions = torch.arange(start, start + T, device=idx.device)
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary[:, positions]  # (2, T or B, T, 1, rotary_dim / 2)
        x = F.dropout(self.ln_0(x), self.config.dropout, self.training)
        args = LayerArgs(positions, rotary, cache, mask)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # and so the residual stream; in fp16, its largest values could overflow
        for block in self.h:
            x = block(x, args)
        if cache is not None:
            cache.length += T
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., padded_vocab_size) of (..., C); the padding is not masked yet."""
        return softcapped(self.lm_head(self.ln_f(x)), self.config.logit_softcap)

    def loss_terms(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the terms of the loss by name; training minimizes the sum of their means over the tokens.

        Each term is logged under its name, and its mean over a validation set as val_NAME. "loss" is the cross-entropy
        in nats, the only term that --spike_z, best_model.pt and bits per byte depend on.

        Args:
            x: (N, C), the output of the last block for N tokens: all of a micro-batch, or a chunk of them.
            targets: (N,) int64.

        Returns: (N,) fp32 for each term.
        """
        # If another term needs the logits: logits = self._logits(x); token_losses(logits, targets, config.vocab_size).
        config = self.config
        weight = self.lm_head.weight
        return {"loss": linear_losses(self.ln_f(x), weight, targets, config.vocab_size, config.logit_softcap)}

    def _loss_terms_in_chunks(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return loss_terms(), with logits in memory for loss_chunk_size tokens at a time; backward recomputes them.

        Not compiled as a whole: in one graph, the logits of all chunks would be in memory at once (torch 2.13).
        """
        size = self.loss_chunk_size
        chunks = []
        for x_chunk, targets_chunk in zip(x.split(size), targets.split(size), strict=True):
            compute = self.loss_terms
            if len(x_chunk) == size:
                compute = self.loss_terms_of_full_chunk
            terms = checkpoint(compute, x_chunk, targets_chunk, use_reentrant=False, preserve_rng_state=False)
            chunks.append(terms)
        return {name: torch.cat([terms[name] for terms in chunks]) for name in chunks[0]}

    def answer_scores(self, idx: Tensor, targets: Tensor, is_target: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of each scored target, and its logit's lead over all other tokens.

        Args:
            idx, targets: (B, T) int64.
            is_target: (B, T) bool, which targets are scored: N of them.
            positions, mask: as in forward().

        Returns: (N, 2) fp32, in row-major order: the cross-entropy in nats, and the logit minus the largest other one.
        """
        x = self._hidden(idx, None, positions, mask)[is_target]
        targets = targets[is_target]
        size = self.loss_chunk_size or max(1, len(x))
        scores = []
        for x_chunk, targets_chunk in zip(x.split(size), targets.split(size), strict=True):
            logits = self._logits(x_chunk)
            losses = token_losses(logits, targets_chunk, self.config.vocab_size)
            logits = logits[:, : self.config.vocab_size]
            at_targets = targets_chunk[:, None]
            largest_others = logits.scatter(1, at_targets, -torch.inf).amax(1)
            leads = logits.gather(1, at_targets)[:, 0].float() - largest_others.float()
            scores.append(torch.stack([losses, leads], dim=1))
        return torch.cat(scores)

    def compiled(self) -> nn.Module:
        """Return this model compiled; full chunks of the loss, which have one shape, are compiled separately."""
        # torch.compile warns of in-place operations in recomputed blocks; ours have none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        self.loss_terms_of_full_chunk = torch.compile(self.loss_terms)
        # Not a decorator: each command would then import the compiler, which takes two seconds.
        self._loss_terms_in_chunks = torch.compiler.disable(self._loss_terms_in_chunks)  # type: ignore[method-assign]
        return torch.compile(self)  # type: ignore[return-value]  # a module; torch's stubs say a function

    def num_parameters(self, with_tables: bool = True) -> int:
        """Return the number of parameters; a tied head counts once, and padding rows do not count.

        Args:
            with_tables: False leaves out embeddings that are only looked up.
        """
        config = self.config
        padding = (config.padded_vocab_size - config.vocab_size) * config.embd_size
        total = 0
        for role, parameters in self.parameters_by_role().items():
            for name, parameter in parameters.items():
                if with_tables or role != "embedding" or parameter is self.lm_head.weight:
                    total += parameter.numel()
                    if name in TABLES:
                        total -= padding
        return total

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward per token: 6N + 12*L*C*T (Chowdhery et al. 2022, appendix B).

        L are the layers with attention.
        """
        shape = self.config.resolved()
        width = shape.num_heads * shape.head_dim
        attention = 12 * shape.layer_pattern.count(ATTENTION) * width * shape.context_length
        return 6 * self.num_parameters(with_tables=False) + attention

    def parameters_by_role(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return parameters by role, then name: "embedding", "matrix" (linear), "head" (unless tied) and "vector"."""
        roles: dict[str, dict[str, nn.Parameter]] = {"embedding": {}, "matrix": {}, "head": {}, "vector": {}}
        for name, parameter in self.named_parameters():
            module = self.get_submodule(name.rpartition(".")[0])
            if parameter.dim() < 2 or isinstance(module, ShortConvolution):  # whose taps are a vector for each token
                role = "vector"
            elif isinstance(module, nn.Embedding):
                role = "embedding"
            elif isinstance(module, nn.Linear):
                role = "head" if module is self.lm_head else "matrix"
            else:
                raise TypeError(f"{name}: which optimizer updates the parameters of a {type(module).__name__}?")
            roles[role][name] = parameter
        return roles


def sketch_of(config: GPTConfig) -> GPT:
    """Return a model on the meta device: its weights have names and shapes, but no memory."""
    with torch.device("meta"):
        return GPT(config, initialize=False)
