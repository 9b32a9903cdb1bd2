"""Curves drawn with braille characters, each of which has 2 x 4 dots."""

from collections.abc import Sequence
from statistics import median

# The bits of a braille character's dots, from the top to the bottom of its left and its right column.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
Curve = Sequence[Sequence[float]]  # of points (step, value), in the order of the steps


class Chart:
    """Curves over steps, `width` x `height` characters large.

    cells: row -> characters with the index of the last curve that they belong to
    low, high, first, last: the values at the bottom and at the top, and the steps at the left and at the right
    """

    def __init__(self, curves: Sequence[Curve], width: int, height: int):
        steps = [point[0] for curve in curves if curve for point in (curve[0], curve[-1])]
        self.first, self.last = min(steps, default=0), max(steps, default=0)
        self.low, self.high = value_range(curves)
        self.cells = [[(" ", 0)] * width for _ in range(height)]
        bits = [[0] * width for _ in range(height)]
        rows, columns = 4 * height, 2 * width
        for number, curve in enumerate(curves):
            scaled = [
                (
                    (step - self.first) / max(1, self.last - self.first) * (columns - 1),
                    (self.high - value) / (self.high - self.low) * (rows - 1),
                )
                for step, value in curve
            ]
            for column, (top, bottom) in spans(scaled).items():
                for row in range(max(0, round(top)), min(rows - 1, round(bottom)) + 1):
                    y, x = row // 4, column // 2
                    bits[y][x] |= DOTS[column % 2][row % 4]
                    self.cells[y][x] = chr(0x2800 + bits[y][x]), number


def value_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the values at the bottom and at the top of a chart.

    The first losses and extreme spikes lie above the top, so that the rest of the curve is not flat.
    """
    values = [value for curve in curves for _, value in curve]
    if not values:
        return 0.0, 1.0
    low, middle = min(values), median(values)
    return low, max(min(max(values), middle + 3 * (middle - low)), low + 1e-3 * max(1.0, abs(low)))


def spans(points: Sequence[tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Return, for each column that the lines between points (x, y) pass, their lowest and their highest y."""
    found: dict[int, tuple[float, float]] = {}

    def widen(column: int, y: float) -> None:
        low, high = found.get(column, (y, y))
        found[column] = min(low, y), max(high, y)

    for (x, y), (next_x, next_y) in zip(points, points[1:] or points, strict=False):
        for column in range(round(x), round(next_x) + 1):
            for edge in (column - 0.5, column + 0.5):
                share = min(1.0, max(0.0, (edge - x) / (next_x - x))) if next_x > x else 1.0
                widen(column, y + share * (next_y - y))
    return found
