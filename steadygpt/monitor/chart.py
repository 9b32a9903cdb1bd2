"""Curves drawn with braille characters, each of which has 2 x 4 dots."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import median

# The bits of a braille character's dots, from the top to the bottom of its left and its right column.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
Curve = list[tuple[int, float]]  # points (step, value) in the order of the steps


class Chart:
    """Curves over steps, `width` x `height` characters large.

    cells: row -> characters with the index of the last curve that they belong to
    low, high, first, last: the values at the bottom and at the top, and the steps at the left and at the right
    """

    def __init__(self, curves: Sequence[Curve], width: int, height: int):
        steps = [step for curve in curves for step, _ in curve]
        self.first, self.last = min(steps, default=0), max(steps, default=0)
        self.low, self.high = value_range(curves)
        self.cells = [[(" ", 0)] * width for _ in range(height)]
        rows, columns = 4 * height, 2 * width
        for number, curve in enumerate(curves):
            dots = [
                (
                    (step - self.first) / max(1, self.last - self.first) * (columns - 1),
                    max(-1.0, (self.high - value) / (self.high - self.low) * (rows - 1)),
                )
                for step, value in curve
            ]
            for (x, y), (next_x, next_y) in pairwise(dots[:1] + dots):
                count = max(1, ceil(abs(next_x - x)), ceil(abs(next_y - y)))  # of dots from one point to the next
                for i in range(count + 1):
                    self._draw(round(x + (next_x - x) * i / count), round(y + (next_y - y) * i / count), number)

    def _draw(self, column: int, row: int, number: int) -> None:
        if row >= 0:
            before = ord(self.cells[row // 4][column // 2][0])
            bits = DOTS[column % 2][row % 4] | (before if before >= 0x2800 else 0x2800)
            self.cells[row // 4][column // 2] = chr(bits), number


def value_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the values at the bottom and at the top of a chart.

    The first losses and extreme spikes lie above the top, so that the rest of the curve is not flat.
    """
    values = [value for curve in curves for _, value in curve]
    if not values:
        return 0.0, 1.0
    low, middle = min(values), median(values)
    return low, max(min(max(values), middle + 3 * (middle - low)), low + 1e-3 * max(1.0, abs(low)))
