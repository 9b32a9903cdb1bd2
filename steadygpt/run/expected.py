"""What to expect of a run: the law that extrapolates losses, its file, and the warning outside the band."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.base.typed import read_json
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.run.starts import difference

# ---------------------------------------------------------------------------------------------------------------------
# the law


class Points(NamedTuple):
    """Losses of runs, all at the same part of their way, each (n,) float64."""

    sizes: np.ndarray  # N: FLOPs per token / 6, about the parameters without the input's embedding
    tokens: np.ndarray  # D, of the whole run
    losses: np.ndarray

    def of(self, chosen: np.ndarray) -> "Points":
        return Points(*(values[chosen] for values in self))


Law = Callable[[float | np.ndarray, float | np.ndarray], np.ndarray]  # N, D -> loss
EXPONENTS = np.geomspace(0.1, 1.5, 16)
A, B = (grid.reshape(-1, 1) for grid in np.meshgrid(EXPONENTS, EXPONENTS))  # (256, 1)
TERMS = [[0, 1, 2], [1, 2], [0, 1], [0, 2], [0]]  # the law's, of which none is negative
USUAL, PRIOR = 0.35, 1e-4  # exponent of both terms, and the weight of its squared distance in logarithms
OF_SIZE, OF_TOKENS = 1, 4  # powers of N and D in the weight of a run: the nearest ones to the target count most
FLOOR = 0.015  # standard deviation of a loss's logarithm: seeds, and the choice of validation rows
OF_EXTRAPOLATION = 0.1  # of the same unit: how much extrapolation an unseen one, as wrong as it is long, stands for
NINETY = 1.645  # standard deviations


def fitted(points: Points) -> Law:
    """Fit L(N, D) = E + A / N^a + B / D^b (Hoffmann et al. 2022, approach 3) to the logarithms of losses.

    The exponents are searched on a grid, and for each pair the rest is a linear problem, so no start can miss the
    best fit (Besiroglu et al. 2024). Small ladders do not determine the exponents; a weak prior does.
    """
    n, d = points.sizes.max(), points.tokens.max()

    def terms(sizes: float | np.ndarray, tokens: float | np.ndarray, a=A, b=B) -> np.ndarray:  # (256, n, 3)
        of_size, of_tokens = np.broadcast_arrays((np.atleast_1d(sizes) / n) ** -a, (np.atleast_1d(tokens) / d) ** -b)
        return np.stack([np.ones_like(of_size), of_size, of_tokens], -1)

    # A small difference of logarithms is that of the losses, divided by the loss.
    weights = np.sqrt((points.sizes / n) ** OF_SIZE * (points.tokens / d) ** OF_TOKENS) / points.losses
    x, y = terms(points.sizes, points.tokens) * weights[:, None], points.losses * weights
    prior = PRIOR * (np.log(A / USUAL) ** 2 + np.log(B / USUAL) ** 2)[:, 0]
    best: tuple[float, Any] = math.inf, None
    for chosen in TERMS:
        part = x[..., chosen]
        gram = part.swapaxes(1, 2) @ part
        gram += 1e-10 * np.trace(gram, axis1=1, axis2=2)[:, None, None] * np.eye(len(chosen))
        found = np.linalg.solve(gram, part.swapaxes(1, 2) @ y[:, None])
        cost = ((part @ found)[..., 0] - y) ** 2 @ np.ones_like(y) + prior
        cost[(found < 0).any((1, 2))] = math.inf
        if (least := float(cost.min())) < best[0]:
            i = cost.argmin()
            best = least, (A[i], B[i], chosen, found[i, :, 0])
    a, b, chosen, found = best[1]
    return lambda sizes, tokens: terms(sizes, tokens, a, b)[..., chosen] @ found


def extrapolated(points: Points, size: float, tokens: float) -> tuple[float, float]:
    """Return the loss of the law, and how far it is from the widest of the longest runs, in logarithms."""
    longest = points.of(points.tokens == points.tokens.max())
    loss = float(fitted(points)(size, tokens)[0])
    return loss, abs(math.log(longest.losses[longest.sizes.argmax()] / loss))


def predicted(points: Points, size: float, tokens: float) -> tuple[float, float]:
    """Return the loss of a run, and the standard deviation of its logarithm.

    The error is taken to be a part of the extrapolation: as large a part as in predicting the ladder's wider models
    from its narrower ones and, if the run is longer than the ladder, its longest runs from its shorter ones.
    """
    loss, distance = extrapolated(points, size, tokens)
    sizes, longest = np.unique(points.sizes), points.tokens.max()
    tests = [(points.sizes < held_out, held_out) for held_out in sizes[2:]]
    if tokens > 1.01 * longest:
        tests += [(points.tokens < longest, held_out) for held_out in sizes[-2:]]
    wrong = far = OF_EXTRAPOLATION**2
    for used, held_out in tests:
        is_it = (points.sizes == held_out) & (points.tokens == longest)
        if np.count_nonzero(used) > 2 and is_it.any():
            found, so_far = extrapolated(points.of(used), held_out, longest)
            wrong, far = wrong + math.log(found / points.losses[is_it][0]) ** 2, far + so_far**2
    return loss, math.sqrt(FLOOR**2 + wrong / far * distance**2)


# ---------------------------------------------------------------------------------------------------------------------
# the file, and the run beside it

# What a loss depends on, besides the data: another seed, precision or machine changes it less than the band is wide.
COMPARED = [n for n, f in FIELDS.items() if f.metadata["group"] == "model" or f.metadata["on_resume"] == "ask"]
COMPARED += ["vocab_size", "max_steps", "optimizer", "tokenizer"]
TOLERANCE = 2  # times as far from the expected loss as the end of its interval: still no alarm
IN_A_ROW = 2  # validations outside
ADVICE = "write it again with predict.py, or add --expect= to do without"
Positive = Annotated[float, 1e-9]


def compared(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a settled run that a prediction holds for."""
    return {name: getattr(config, name) for name in COMPARED}


class Prediction(NamedTuple):
    """The content of prediction.json."""

    options: dict[str, Any]  # see compared()
    curve: list[tuple[Annotated[int, 1], Positive, Positive, Positive]]  # step, ascending; loss, ends of its interval


class Expected:
    """The band of a run's validation losses, and how many of the last ones are outside."""

    def __init__(self, prediction: Prediction):
        self.steps, *self.columns = np.log(np.array(prediction.curve, float)).T  # (n,) each
        self.outside = 0

    @classmethod
    def load(cls, config: TrainConfig) -> "Expected":
        """Read --expect of a settled run.

        Raises: UserError if it is unreadable, or for a run with other options.
        """
        file = Path(config.expect)
        try:
            found = read_json(file, Prediction, ADVICE)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); {ADVICE}") from None
        if differs := difference(found.options, compared(config)):
            raise UserError(f"{file}: is for another run ({differs:.200}); {ADVICE}")
        steps = [0, *(step for step, *_ in found.curve)]
        if (
            not found.curve
            or steps != sorted({*steps})
            or any(not low <= of <= high for _, of, low, high in found.curve)
        ):
            raise UserError(f"{file}: curve has no ascending steps, or a loss outside its interval; {ADVICE}")
        return cls(found)

    def compare(self, step: int, loss: float) -> tuple[dict[str, float], str]:
        """Return the band at a step, {} before the first one, and a warning if this validation begins to be outside.

        The warning comes once, with the second validation in a row.
        """
        if math.log(max(1, step)) < self.steps[0]:
            return {}, ""
        middle, low, high = (float(np.interp(math.log(step), self.steps, column)) for column in self.columns)
        low, high = (math.exp(middle + TOLERANCE * (end - middle)) for end in (low, high))
        self.outside = 0 if low <= loss <= high else self.outside + 1
        warning = (
            f"step {step}: validation loss {loss:.4f}, expected {low:.4f} to {high:.4f}, for the second time in a row; "
            "compare data, learning rates and code with those of the ladder"
        )
        return {"expected_low": low, "expected_high": high}, warning * (self.outside == IN_A_ROW)
