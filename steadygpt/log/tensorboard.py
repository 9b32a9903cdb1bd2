"""TensorBoard: curves, samples and histograms of a run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from steadygpt.base.options import shown_options
from steadygpt.config import TrainConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"  # in the run's folder
EVENTS = "events.out.tfevents.*"
HISTOGRAM_VALUES = 2**14  # of each tensor; the histogram of all its values looks the same, at a thousand times the cost


def open_writer(folder: Path, start_step: int) -> "SummaryWriter":
    """Open an event file whose name sorts after those of earlier launches.

    TensorBoard reads event files in the order of their names, and in a wrong order an older file would hide a newer
    one. A name begins with the second of the launch; host, process and a count follow, which may sort in the wrong
    order ("9" after "10"). So a launch in the same second as the previous one may have to wait for the next second.
    """
    from torch.utils.tensorboard import SummaryWriter

    while True:
        before = {*folder.glob(EVENTS)}
        writer = SummaryWriter(str(folder), purge_step=start_step)
        [own] = {*folder.glob(EVENTS)} - before
        same_second = [path.name for path in before if path.suffixes[:3] == own.suffixes[:3]]
        if own.name > max(same_second, default=""):
            return writer
        writer.close()
        own.unlink()
        time.sleep(0.1)


class TensorBoard:
    """Writes the events of a run, and hides what an interrupted run logged from `start_step` on.

    Its methods raise OSError from the first failed write on, such as on a full disk.
    """

    def __init__(self, config: TrainConfig, start_step: int):
        from torch.utils.tensorboard.summary import hparams

        self.writer = open_writer(Path(config.checkpoint_dir, FOLDER), start_step)
        self.flush, self.close = self.writer.flush, self.writer.close
        options = {name: value for name, value in shown_options(config).items() if value != ""}
        for summary in hparams(options, {"eval/val_loss": None, "train/loss": None}):
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch's stubs say None

    def curves(self, step: int, numbers: Mapping[str, float], group: str) -> None:
        """Add a point to each metric's curve; TensorBoard shows the curves of a group together."""
        for name, value in numbers.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def text(self, step: int, text: str) -> None:
        self.writer.add_text("sample", f"```\n{text}\n```", step)

    def histograms(self, step: int, model: nn.Module) -> None:
        """Add histograms of parameters and gradients, of at most HISTOGRAM_VALUES values each."""
        for name, parameter in model.named_parameters():
            # TensorBoard sorts by tag: the curves of eval, system and train come before these.
            for kind, tensor in (("weights", parameter.detach()), ("weights_grad", parameter.grad)):
                if tensor is None:
                    continue
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP: this rank's shard
                values = local.flatten()[:: max(1, local.numel() // HISTOGRAM_VALUES)]
                values = values[values.isfinite()]  # a skipped step may leave NaN in the gradients
                if values.numel():
                    self.writer.add_histogram(f"{kind}/{name}", values.float(), step, bins=64)
