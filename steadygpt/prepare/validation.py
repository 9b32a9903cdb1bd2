"""The choice of the pieces of text that validate a model instead of training it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from steadygpt.base.typed import Count


@dataclass
class ValidationSample:
    """A fair sample of a stream of pieces of text: the size of a piece does not decide whether it is chosen.

    The probability that a piece is chosen is the share, plus the number of bytes that the sample lacks divided by the
    size of the largest piece so far. It does not depend on the piece itself, and changes slowly from one piece to the
    next, so the sizes in the sample are distributed as in the stream, in any order. The size of the sample differs from
    its share of the bytes by at most the largest piece so far.
    """

    share: Annotated[float, Meta(ge=0, le=1)]  # of the bytes of all pieces
    pieces: Count = 0  # so far, chosen or not
    largest: Count = 0  # size of the largest of these pieces
    num_bytes: Count = 0  # of these pieces
    chosen_bytes: Count = 0

    def choose(self, sizes: Sequence[int]) -> list[bool]:
        """Return for each of the next pieces whether it is chosen; the same pieces give the same choice.

        Args:
            sizes: of the pieces, in bytes.
        """
        draws = random.Random(self.pieces)  # a resumed preparation draws the same numbers
        chosen = []
        for size in sizes:
            lacking = self.share * (self.num_bytes + self.largest) - self.chosen_bytes
            is_chosen = draws.random() * self.largest < lacking
            chosen.append(is_chosen)
            self.pieces += 1
            self.largest = max(self.largest, size)
            self.num_bytes += size
            self.chosen_bytes += size * is_chosen
        return chosen
