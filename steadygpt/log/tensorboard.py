"""TensorBoard: curves, samples and histograms of a run."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from steadygpt.base.options import shown_options
from steadygpt.config import TrainConfig

HISTOGRAM_VALUES = 2**14  # of each tensor: looks the same as all of its values at a thousandth of the cost
GROUPS = {
    "train": ("lr", "grad_norm", "loss_z"), "run": ("cost", "epoch"),
    "speed": ("tokens_per_second", "steps_per_second", "step_ms", "mfu"),
}  # fmt: skip
TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names}
TAGS |= {"loss": "loss/train", "val_loss": "loss/val", "val_bpb": "loss/val_bpb", "memory_gb": "memory/gb"}


def tag_of(name: str) -> str:
    """Return the tag of a metric; scores of a task are grouped by the task, and what is left is the machine's load."""
    kind, slash, of_set = name.partition("/")  # of one of several validation sets or sources
    task, accuracy, norm = name.partition("_acc")
    if kind in TAGS:
        return TAGS[kind] + slash + of_set
    return f"{task}/acc{norm}" if accuracy else f"system/{name}"


class TensorBoard:
    """Writes the events of a run. Its methods raise OSError when the disk is full.

    Args:
        start_step: hides what an interrupted run logged from this step on.
    """

    def __init__(self, config: TrainConfig, start_step: int):
        self.config = config
        self._open(start_step)

    def _open(self, start_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = Path(self.config.tensorboard_dir, self.config.run_name)
        self.writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=start_step)
        options = {name: value for name, value in shown_options(self.config).items() if value != ""}
        for summary in hparams(options, {"loss/val": None, "loss/train": None}):
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch's stubs say None

    def _call(self, method: str, *args, **options) -> None:
        """Call a method of the writer. It does not recover from a failed write, so flush() opens a new one."""
        try:
            if self.writer:
                getattr(self.writer, method)(*args, **options)
        except OSError:
            self.writer = None
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a point to each metric's curve."""
        for name, value in metrics.items():
            self._call("add_scalar", tag_of(name), value, step)

    def text(self, step: int, text: str) -> None:
        self._call("add_text", "sample", f"```\n{text}\n```", step)

    def histograms(self, step: int, model: nn.Module) -> None:
        """Add histograms of parameters and gradients, of at most HISTOGRAM_VALUES values each."""
        for name, parameter in model.named_parameters():
            for kind, tensor in (("parameters", parameter.detach()), ("parameters_grad", parameter.grad)):
                if tensor is None:
                    continue
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP: this rank's shard
                values = local.flatten()[:: max(1, local.numel() // HISTOGRAM_VALUES)]
                values = values[values.isfinite()]  # a skipped step may leave NaN in the gradients
                if values.numel():
                    self._call("add_histogram", f"{kind}/{name}", values.float(), step, bins=64)

    def flush(self) -> None:
        """Write what is buffered, with a new writer after a failure."""
        if self.writer:
            self._call("flush")
        else:
            self._open(None)

    def close(self) -> None:
        self._call("close")
