"""The predicted losses of a run: their file, and the warning when validations leave the band around them."""

import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.base.typed import read_json
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.run.launches import difference

# The options that decide a loss, besides the data. The seed, precision and machine are not among them, because they
# change a loss by less than the width of the band.
COMPARED = [name for name, f in FIELDS.items() if f.metadata["group"] == "model" or f.metadata["on_resume"] == "ask"]
COMPARED += ["vocab_size", "max_steps", "optimizer", "tokenizer"]
BAND = 0.2  # a validation may differ this much from the predicted loss; benchmarks/RESULTS.md has the false alarms
LOSSES = (1e-9, 1e9)  # the smallest and the largest loss that a prediction may have
IN_A_ROW = 2  # validations outside the band before the warning
ADVICE = "write it again with predict.py, or add --expect= to train without it"


def compared_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that decide the losses of a run, whose configuration is settled."""
    return {name: getattr(config, name) for name in COMPARED}


class Prediction(NamedTuple):
    """The content of prediction.json."""

    options: dict[str, Any]  # see compared_options()
    curve: list[tuple[Annotated[int, 1], Annotated[float, *LOSSES]]]  # step, ascending, and validation loss


class Expected:
    """The band around the predicted losses, and how many validations in a row were outside of it."""

    def __init__(self, prediction: Prediction):
        steps, losses = zip(*prediction.curve, strict=True)
        self.first_step = steps[0]
        self.log_steps = np.log(steps)  # (n,)
        self.log_losses = np.log(losses)  # (n,)
        self.outside_in_a_row = 0

    @classmethod
    def load(cls, config: TrainConfig) -> "Expected":
        """Read the file of --expect, for a run whose configuration is settled.

        Raises: UserError if the file cannot be read, or is for a run with other options.
        """
        file = Path(config.expect)
        try:
            prediction = read_json(file, Prediction, ADVICE)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); {ADVICE}") from None
        changes = difference(prediction.options, compared_options(config))
        if changes:
            raise UserError(f"{file}: is for another run ({changes:.200}); {ADVICE}")
        steps = [step for step, _ in prediction.curve]
        if not steps or steps != sorted(set(steps)):
            raise UserError(f"{file}: curve has steps {steps!s:.80}; expected ascending ones; {ADVICE}")
        return cls(prediction)

    def compare(self, step: int, loss: float) -> tuple[dict[str, float], str]:
        """Return the band at a step, and a warning if this is the second validation in a row outside of the band.

        Before the first predicted step there is no band: it is {}. The warning is not repeated until a validation was
        inside the band again.
        """
        if step < self.first_step:
            return {}, ""
        predicted = math.exp(np.interp(math.log(step), self.log_steps, self.log_losses))
        low = (1 - BAND) * predicted
        high = (1 + BAND) * predicted
        if low <= loss <= high:
            self.outside_in_a_row = 0
        else:
            self.outside_in_a_row += 1
        warning = ""
        if self.outside_in_a_row == IN_A_ROW:
            warning = (
                f"step {step}: validation loss {loss:.4f}, expected {low:.4f} to {high:.4f}, for the second time in a "
                "row; compare data, learning rates and code with those of the narrower runs"
            )
        return {"expected_low": low, "expected_high": high}, warning
