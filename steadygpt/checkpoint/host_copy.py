"""Weights and optimizer state between the ranks' devices and rank 0's host memory.

A parameter may be whole, replicated by DDP, or a DTensor that FSDP shards over the ranks. On the host it is always
whole, so a checkpoint does not depend on how it was trained.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

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
    kinds = ranks.broadcast({name: {kind: t.shape for kind, t in state.items()} for name, state in saved.items()})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups, state = optimizer.state_dict()["param_groups"], defaultdict[int, dict[str, Tensor]](dict)
    for index, parameter in enumerate(_parameters(optimizer)):
        name = names[id(parameter)]
        for kind, shape in kinds.get(name, {}).items():
            # A moment is sharded like its parameter; the number of steps is a scalar.
            like = parameter.detach() if shape == parameter.shape else torch.empty(shape, device=parameter.device)
            state[index][kind] = torch.empty_like(like, dtype=torch.float32)
            _send(saved[name][kind] if ranks.is_main else None, state[index][kind], ranks)
    if state:  # otherwise the checkpoint is older than the first step
        optimizer.load_state_dict({"state": state, "param_groups": groups})


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

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: dict[tuple[str, str], Tensor] = {}

    def start(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
    ) -> tuple[dict, torch.cuda.Event | None]:
        """Start to copy the state of the bare model and its optimizer. All ranks call this, because FSDP gathers.

        Returns: {"model": ..., "optimizer": ...} keyed by parameter name, empty on ranks other than 0; and a CUDA event
            to be synchronized before it is read, None where the copy is complete already.
        """
        if reshard := getattr(model, "reshard", None):  # FSDP's root is still gathered after an evaluation
            reshard()
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # for the last update
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        weights = {id(p): self._copy(name, "weight", p.detach(), ranks) for name, p in model.named_parameters()}
        state = {
            names[id(p)]: {
                kind: self._copy(names[id(p)], kind, tensor, ranks) for kind, tensor in optimizer.state[p].items()
            }
            for p in _parameters(optimizer)
            if optimizer.state.get(p)
        }
        copied = None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # for the tensors that were gathered
            copied = self.stream.record_event()
            if reshard:  # the next step waits for the gathered tensors anyway; so the pause is measured
                copied.synchronize()
        if not ranks.is_main:
            return {"model": {}, "optimizer": {}}, None
        every_name = model.named_parameters(remove_duplicate=False)  # a tied head is one tensor under two names
        return {
            "model": {name: weights[id(parameter)] for name, parameter in every_name},
            "optimizer": state,
        }, copied

    def _copy(self, name: str, kind: str, tensor: Tensor, ranks: Ranks) -> Tensor | None:
        whole = full_tensor(tensor)
        if not ranks.is_main:
            return None
        cuda = self.stream is not None
        if (name, kind) not in self.buffers:
            self.buffers[name, kind] = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=cuda)
        # A gathered tensor is copied on the current stream, so that the next gather can reuse its memory at once.
        with torch.cuda.stream(self.stream if whole is tensor else None):  # None: the current stream
            return self.buffers[name, kind].copy_(whole, non_blocking=cuda)

    def wait_before_update(self) -> None:
        """Let the device, not the host, wait for the copy in flight: updates change what it reads."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
