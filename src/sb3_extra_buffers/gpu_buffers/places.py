"""The numbers that a sample sends to the device: where its observations are."""

from __future__ import annotations

import functools

import torch as th

from sb3_extra_buffers.codecs.base import Indices

_MOST_KEPT = 8


class _Host:
    """Host memory for the numbers of a batch. For a GPU it is pinned, and kernels read it where it is."""

    def __init__(self, shape: tuple[int, int], device: th.device) -> None:
        self.tensor = th.empty(shape, dtype=th.int64, pin_memory=device.type == "cuda")
        self.array = self.tensor.numpy()
        self.last_use = th.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_free(self) -> bool:
        """Whether all that was to read it has been done."""
        return self.last_use is None or self.last_use.query()  # type: ignore[no-untyped-call]


_free: dict[tuple[th.device, tuple[int, int]], list[_Host]] = {}


class Places:
    """Slots and environments of a batch, known to both sides.

    :param slots: For each column to be read, the slots.
    :param more: Numbers that travel along.
    """

    def __init__(self, slots: list[Indices], envs: Indices, device: th.device, more: tuple[Indices, ...] = ()) -> None:
        self.slots = slots
        self.envs = envs
        self.device = device
        shape = (len(slots) + 1 + len(more), len(envs))
        kept = _free.get((device, shape))
        self._host = kept.pop(0) if kept and kept[0].is_free else _Host(shape, device)
        array = self._host.array
        for row, numbers in enumerate((*slots, envs, *more)):
            array[row] = numbers

    def __len__(self) -> int:
        return len(self.envs)

    @functools.cached_property
    def tensor(self) -> th.Tensor:
        """On the device, ``int64``: the slots of each column, the environments, and what there is more."""
        return self._host.tensor.to(self.device, non_blocking=True)

    @property
    def for_kernels(self) -> th.Tensor:
        """The same for kernels, which need not wait for a copy."""
        return self._host.tensor

    @property
    def env_tensor(self) -> th.Tensor:
        return self.tensor[len(self.slots)]

    def done(self) -> None:
        """All work that reads the numbers has been given to the device."""
        host = self._host
        if host.last_use is None:
            return
        host.last_use.record()
        kept = _free.setdefault((self.device, tuple(host.tensor.shape)), [])  # type: ignore[arg-type]  # two numbers
        if len(kept) < _MOST_KEPT:
            kept.append(host)
