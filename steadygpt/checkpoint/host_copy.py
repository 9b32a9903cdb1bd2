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
    """Set each parameter of the bare model on every rank to `weight(name)`, which rank 0 calls in their order."""
    for name, parameter in model.named_parameters():
        _send(weight(name) if ranks.is_main else None, parameter.detach(), ranks)


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict, ranks: Ranks) -> None:
    """Load a checkpoint's "optimizer", needed on rank 0 only; options such as weight decay keep their values."""
    shapes = ranks.broadcast({name: {kind: t.shape for kind, t in kept.items()} for name, kept in saved.items()})
    for name, parameter in model.named_parameters():
        for kind, shape in shapes.get(name, {}).items():
            # A moment is sharded like its parameter; the number of steps is a scalar.
            like = parameter.detach() if shape == parameter.shape else torch.empty(shape, device=parameter.device)
            target = optimizer.state[parameter][kind] = torch.empty_like(like, dtype=torch.float32)
            _send(saved[name][kind] if ranks.is_main else None, target, ranks)


def _send(whole: Tensor | None, target: Tensor, ranks: Ranks) -> None:
    """Copy rank 0's whole tensor, or each rank's shard of it, into `target` on every rank."""
    if whole is None:
        whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
    elif ranks.world_size > 1:
        whole = whole.to(ranks.device, target.dtype).contiguous()  # a broadcast sends memory as it lies
    if ranks.world_size > 1:
        dist.broadcast(whole, src=0)
    target, whole = own_part(target, whole)
    target.copy_(whole)


class HostCopy:
    """Copies weights and optimizer state to rank 0's host memory while the device continues.

    The host memory is kept: a copy is valid until the next one begins. On CUDA it is page-locked, and the copy runs on
    a stream of its own, beside the next step. That step must call wait_before_update() before its update.
    """

    def __init__(self, ranks: Ranks):
        self.ranks, self.buffers = ranks, dict[tuple[str, str], Tensor]()
        self.stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self.copied: torch.cuda.Event | None = None  # ends the copy

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        """Start to copy the state of the bare model and its optimizer. All ranks call this, because FSDP gathers.

        Returns: on rank 0 {"model": ..., "optimizer": ...} by parameter name, once wait() has returned.
        """
        if reshard := getattr(model, "reshard", None):  # FSDP's root is still gathered after an evaluation
            reshard()
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # for the last update
        names = {parameter: name for name, parameter in model.named_parameters()}
        weights = {p: self._copy(name, "weight", p.detach()) for p, name in names.items()}
        state = {
            name: {kind: self._copy(name, kind, tensor) for kind, tensor in optimizer.state[p].items()}
            for p, name in names.items()
            if optimizer.state.get(p)
        }
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # for the tensors that were gathered
            self.copied = self.stream.record_event()
            if reshard:  # the next step waits for the gathered tensors anyway; so the pause is measured
                self.wait()
        every_name = model.named_parameters(remove_duplicate=False)  # a tied head is one tensor under two names
        return {"model": {name: weights[parameter] for name, parameter in every_name}, "optimizer": state}

    def wait(self) -> None:
        """Wait until the copy is whole."""
        if self.copied:
            self.copied.synchronize()

    def _copy(self, name: str, kind: str, tensor: Tensor) -> Tensor | None:
        whole, cuda = full_tensor(tensor), self.stream is not None
        if not self.ranks.is_main:
            return None
        if (name, kind) not in self.buffers:
            self.buffers[name, kind] = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=cuda)
        # A gathered tensor is copied on the current stream, so that the next gather can reuse its memory at once.
        with torch.cuda.stream(self.stream if whole is tensor else None):  # None: the current stream
            return self.buffers[name, kind].copy_(whole, non_blocking=cuda)

    def wait_before_update(self) -> None:
        """Let the device, not the host, wait for the copy in flight: updates change what it reads."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
