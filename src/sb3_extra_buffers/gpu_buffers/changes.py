"""Which slots one side knows, and the other does not yet."""

from __future__ import annotations


class Changes:
    """Slots that were written since the last look: the ones from ``first`` to ``first + count - 1``, round the end."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.first = 0
        self.count = 0

    def note(self, slot: int) -> None:
        if self.count == 0:
            self.first, self.count = slot, 1
        elif slot == (self.first + self.count) % self.n_slots:
            self.count = min(self.count + 1, self.n_slots)
        elif (slot - self.first) % self.n_slots >= self.count:
            self.note_all()

    def note_all(self) -> None:
        self.first, self.count = 0, self.n_slots

    def slices(self) -> list[slice]:
        """The slots as one or two slices."""
        first, end = self.first, self.first + self.count
        if end <= self.n_slots:
            return [slice(first, end)] if end > first else []
        if end - first >= self.n_slots:
            return [slice(0, self.n_slots)]
        return [slice(first, self.n_slots), slice(0, end - self.n_slots)]

    def forget(self) -> None:
        """The other side knows all of them now."""
        self.count = 0
