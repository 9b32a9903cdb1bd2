"""Weights and optimizer state between the ranks' devices and rank 0's host memory.

A parameter may be whole, replicated by DDP, or a DTensor that FSDP shards over the ranks. On the host it is always
whole, so a checkpoint does not depend on how it was trained.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygpt.machine.parallel import full_tensor, own_part
from steadygpt.machine.ranks import Ranks


def fill(model: nn.Module, weight: Callable[[str], Tensor], ranks: Ranks) -> None:
    """Set each parameter of the bare model, in their order, to weight(name), which only rank 0 calls."""
    for name, parameter in model.named_parameters():
        _copy_from_main(weight(name) if ranks.is_main else None, parameter.detach(), ranks)


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict, ranks: Ranks) -> None:
    """Load the optimizer state of a checkpoint; options such as weight decay keep their values.

    Args:
        saved: the checkpoint's "optimizer", needed on rank 0 only.
    """
    saved_shapes = {}
    for name, state in saved.items():
        saved_shapes[name] = {kind: tensor.shape for kind, tensor in state.items()}
    shapes = ranks.broadcast(saved_shapes)
    for name, parameter in model.named_parameters():
        for kind, shape in shapes.get(name, {}).items():
            # A moment is sharded like its parameter; the number of steps is a scalar.
            like = parameter.detach() if shape == parameter.shape else torch.empty(shape, device=parameter.device)
            target = torch.empty_like(like, dtype=torch.float32)
            optimizer.state[parameter][kind] = target
            _copy_from_main(saved[name][kind] if ranks.is_main else None, target, ranks)


def _copy_from_main(source: Tensor | None, target: Tensor, ranks: Ranks) -> None:
    """Copy rank 0's `source` into `target` on every rank, or each rank's shard of it.

    Args:
        source: a whole tensor; None on ranks other than 0, which receive it.
    """
    if source is None:
        whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
    elif ranks.world_size > 1:
        whole = source.to(ranks.device, target.dtype).contiguous()  # a broadcast sends memory as it is laid out
    else:
        whole = source
    if ranks.world_size > 1:
        dist.broadcast(whole, src=0)
    own_target, own_source = own_part(target, whole)
    own_target.copy_(own_source)


class HostCopy:
    """Copies weights and optimizer state to rank 0's host memory.

    Each copy reuses the host memory, which is page-locked on CUDA. So a copy is valid until the next one begins.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        """Copy the state of the bare model and its optimizer. All ranks call this, because FSDP gathers.

        Returns: {"model": ..., "optimizer": ...} by parameter name, whose tensors are None on ranks other than 0.
        """
        reshard = getattr(model, "reshard", None)
        if reshard:  # after an evaluation, the weights of FSDP's root are still gathered
            reshard()
        weights: dict[nn.Parameter, Tensor | None] = {}
        state: dict[str, dict[str, Tensor | None]] = {}
        for name, parameter in model.named_parameters():
            weights[parameter] = self._copy(name, "weight", parameter.detach())
            kinds = optimizer.state.get(parameter)
            if kinds:
                state[name] = {kind: self._copy(name, kind, tensor) for kind, tensor in kinds.items()}
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        every_name = model.named_parameters(remove_duplicate=False)  # a tied head is one tensor under two names
        return {"model": {name: weights[parameter] for name, parameter in every_name}, "optimizer": state}

    def _copy(self, name: str, kind: str, tensor: Tensor) -> Tensor | None:
        whole = full_tensor(tensor)
        if not self.ranks.is_main:
            return None
        on_cuda = self.ranks.device.type == "cuda"
        if (name, kind) not in self.buffers:
            self.buffers[name, kind] = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=on_cuda)
        return self.buffers[name, kind].copy_(whole, non_blocking=on_cuda)
