"""Attention, and the choice of its kernel."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

# PyTorch's operators: cuDNN's, FlashAttention and the memory-efficient one on GPUs, and FlashAttention on a CPU.
OPERATORS = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
]
SHORT_ROW = 512  # tokens; up to here attention_in_blocks is faster on a CPU
KERNELS = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention", SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.MATH: "separate products (slow)",
}  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v (Vaswani et al. 2017).

    Args:
        q: (B, num_heads, T, head_dim) queries of a whole row (causal) or of one token, which sees all keys.
        k, v: (B, num_kv_heads, S, head_dim), S = T for a whole row. Each head serves num_heads / num_kv_heads
            consecutive heads of q (Ainslie et al. 2023).
        mask: (B, 1, T, S) bool, the keys that each query sees; it replaces the causal mask.
        dropout: probability.
    """
    T = q.size(2)
    queries_per_key = q.size(1) // k.size(1)
    if queries_per_key > 1:
        k = k.repeat_interleave(queries_per_key, dim=1)
        v = v.repeat_interleave(queries_per_key, dim=1)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    if is_short_on_cpu(q):
        return attention_in_blocks(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, dropout_p=dropout)


def is_short_on_cpu(q: Tensor) -> bool:
    """Return whether attention_in_blocks() computes attention for these queries: short rows of bf16 on a CPU."""
    is_short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and 1 < q.size(2) <= SHORT_ROW
    if torch.compiler.is_compiling():  # the setting below would break the graph
        return is_short
    return is_short and torch.backends.cuda.math_sdp_enabled()  # this setting is for a CPU too, in spite of its name


def kernel_name(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, dropout: float) -> str:
    """Return which kernel computes attention in training, for queries of this shape; "" if unknown.

    PyTorch chooses by GPU and by the version of cuDNN. An older cuDNN of the system may hide the one that comes with
    PyTorch. Then PyTorch takes FlashAttention 2 without a warning.
    """
    if device.type not in ("cpu", "cuda"):
        return ""
    q = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    if is_short_on_cpu(q):
        return "blocks of queries"
    backend = SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=q.size(2) > 1))
    number = torch.backends.cudnn.version() if device.type == "cuda" else None
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else ""
    if backend == SDPBackend.CUDNN_ATTENTION:
        return f"cuDNN {version}"
    name = KERNELS.get(backend, "")
    if version:
        name += f" (cuDNN {version} not used)"
    return name


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, dropout: float, block: int = 128) -> Tensor:
    """Compute causal attention in blocks of queries: twice as fast as PyTorch's kernel for short bf16 rows on a CPU.

    Each block of queries is multiplied only with the keys up to the end of the block. The scores are rounded to bf16,
    so the mean error against fp32 is a third larger than with PyTorch's kernel.
    """
    outputs = []
    for start in range(0, q.size(2), block):
        end = min(start + block, q.size(2))
        scores = (q[:, :, start:end] * q.size(3) ** -0.5) @ k[:, :, :end].mT  # (B, num_heads, end - start, end)
        is_later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.float().masked_fill(is_later, -torch.inf).softmax(-1).type_as(v)
        outputs.append(F.dropout(weights, dropout) @ v[:, :, :end])
    return torch.cat(outputs, dim=2)
