"""Numbers for the labels of requests, by which the eviction policy keeps statistics. A label is made of hints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenlake.hints import Hints

Label = tuple[int, str, str]
"""The label of a request, from its hints: (outlook, category, stop reason). The eviction policy keeps statistics by
label."""
UNLABELLED = 0
"""The number of requests without hints, and of those for whose label there is no room."""
_NO_LABEL: Label = (0, "", "")


class Labels:
    """Numbers for the labels of requests, in the order in which they first came. At most `most`; two places are kept
    for the bare outlooks, so that a category without room still counts by its outlook."""

    def __init__(self, most: int, labels: Sequence[Label] = (_NO_LABEL,)) -> None:
        """`labels`: the labels of another instance, in order of their numbers. Raises ValueError for a list that no
        instance has."""
        self._most = most
        self._numbers = dict(zip(labels, range(len(labels)), strict=True))
        if len(labels) > most or self._numbers.get(_NO_LABEL) != UNLABELLED:
            raise ValueError(f"statistics of re-use with {len(labels)} labels, which begin with {labels[:1]}")
        if len(self._numbers) < len(labels):
            raise ValueError("statistics of re-use with a label twice")
        for label in labels:
            Hints(*label)

    def number(self, hints: Hints) -> int:
        """Returns the number of the label of a request with these hints. A label is (outlook, category, stop reason). A
        new one gets a new number while there is room, otherwise the number of the label that has its outlook and
        neither category nor stop reason."""
        label = (hints.outlook, hints.category, hints.stop_reason)
        number = self._numbers.get(label)
        if number is None:
            named = bool(hints.category or hints.stop_reason)
            if len(self._numbers) >= self._most - 2 * named:
                return self.number(Hints(hints.outlook)) if named else UNLABELLED
            number = self._numbers[label] = len(self._numbers)
        return number

    def matched(self, others: Labels) -> list[tuple[int, int]]:
        """Returns (number in this table, number in `others`) for each label of `others` that this table has or has room
        to add."""
        for label in others:
            self.number(Hints(*label))
        return [(self._numbers[label], there) for there, label in enumerate(others) if label in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Label]:
        """In order of their numbers."""
        return iter(self._numbers)
