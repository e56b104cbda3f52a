"""What all stores of observations on a torch device have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch as th

from sb3_extra_buffers.gpu_buffers.device_arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, torch_dtype
from sb3_extra_buffers.storage.observation_store import ObservationStore

Observations = npt.NDArray[Any] | th.Tensor


class DeviceStore(ObservationStore, ABC):
    """A store of observations. Observations leave them as tensors on ``device``."""

    def __init__(self, *, device: th.device, budget: HeapBudget, **kwargs: Any) -> None:
        self.device = device
        self.budget = budget
        self.gathers_fields = False
        """Whether a Triton kernel gathers observations, which can bring the fields along."""
        super().__init__(**kwargs)

    @property
    def _plain_output(self) -> bool:
        """Whether values leave as they are stored."""
        return self.stored_dtype == self.output_dtype and self.divisor == 1.0

    @property
    @abstractmethod
    def takes_tensors(self) -> bool:
        """Whether observations that are tensors on :attr:`device` are stored without passing through the host."""

    @abstractmethod
    def to(self, device: th.device) -> None:
        """Move everything to another device."""

    @abstractmethod
    def make_room(self, step: Sequence[Observations]) -> None:
        """For the observations of a step. All that can fail happens here, before anything is stored."""

    @abstractmethod
    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        """The observations of each column at ``places``.

        :param fields: Fields to be gathered in the same launch, where :attr:`gathers_fields` says that this can be.
        """

    @property
    @abstractmethod
    def has_changed(self) -> bool:
        """Whether there is something to :meth:`flush`."""

    @abstractmethod
    def flush(self, outbox: Outbox) -> None:
        """Bring the device up to date, without waiting for it."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Memory on the device, whether used or not."""

    @abstractmethod
    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""

    @abstractmethod
    def check_device(self) -> None:
        """The part of ``check()`` that concerns what is on the device."""

    def checked_step(self, step: Sequence[Any]) -> list[Observations]:
        """The observations of a step, ready to be written: all on the host, or all on the device."""
        # Checksums are made on the host.
        if self.takes_tensors and self.digests is None and all(map(self._can_stay, step)):
            return list(step)
        return [self.checked(part.cpu() if isinstance(part, th.Tensor) else part) for part in step]

    def write_step(self, places: list[tuple[int, int]], step: Sequence[Observations]) -> None:
        """Store observations, for which there is room, in columns and slots."""
        for (column, slot), observations in zip(places, step, strict=True):
            self.write(column, slot, observations)  # type: ignore[arg-type]  # those who take tensors say so

    def _can_stay(self, observations: Any) -> bool:
        """Whether observations can be stored as they are, where they are."""
        return (
            isinstance(observations, th.Tensor)
            and observations.device == self.device
            and observations.shape == (self.n_envs, *self.shape)
            and self.stored_dtype == self.dtype
            and observations.dtype == torch_dtype(self.dtype)
        )

    def _verified(self, columns: list[int], places: Places, stored: list[th.Tensor]) -> list[th.Tensor]:
        """Stored values that were read, compared with their digests where there are any."""
        if self.digests is not None:
            for column, slots, values in zip(columns, places.slots, stored, strict=True):
                self.digests.compare(column, slots, places.envs, values.cpu().numpy())
        return stored

    def _as_output(self, stored: th.Tensor) -> th.Tensor:
        """Stored values as a user wants them."""
        if self.stored_dtype != self.output_dtype:
            stored = stored.to(torch_dtype(self.dtype)).to(torch_dtype(self.output_dtype))
        return stored if self.divisor == 1.0 else stored / self.divisor
