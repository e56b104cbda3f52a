"""The interface of stores of observations on a torch device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.gpu_buffers.arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.kernels import FieldBatch
from sb3_extra_buffers.gpu_buffers.transfer import CPU, pinned, to_device, torch_dtype
from sb3_extra_buffers.storage.digests import Digests, digests_of
from sb3_extra_buffers.storage.observation_store import ObservationStore


class Step(NamedTuple):
    """Observations of all environments, ready to be written."""

    parts: list[Any]
    """One for each column: arrays on the host, or tensors on the device as the store wants them."""
    digests: list[Digests] | None


class Places:
    """Slots and environments of a batch.

    :param slots: For each column to be read, the slots.
    """

    def __init__(self, slots: list[Indices], envs: Indices, device: th.device) -> None:
        self.slots = slots
        self.envs = envs
        numbers = pinned((len(slots) + 1, len(envs)), th.int64, device)
        array = numbers.numpy()
        for row, values in enumerate((*slots, envs)):
            array[row] = values
        self.tensor = to_device(numbers, device)
        """The same on the device, ``int64``: the slots for each column, and the environments."""

    def __len__(self) -> int:
        return len(self.envs)


class DeviceStore(ObservationStore, ABC):
    """A store that returns observations as tensors on ``device``."""

    def __init__(self, *, device: th.device, budget: HeapBudget, **kwargs: Any) -> None:
        self.device = device
        self.budget = budget
        super().__init__(**kwargs)

    @property
    @abstractmethod
    def gathers_fields(self) -> bool:
        """Whether one kernel gathers observations and fields."""

    @abstractmethod
    def to(self, device: th.device) -> None:
        """Move everything to another device."""

    @abstractmethod
    def checked_step(self, step: Sequence[Any]) -> Step:
        """The observations of a step, which may be tensors, or an error."""

    @abstractmethod
    def make_room(self, step: Step, slot: int) -> None:
        """Make room for a step in ``slot``. Everything that can fail happens here, before anything is stored."""

    @abstractmethod
    def write_step(self, places: list[tuple[int, int]], step: Step) -> None:
        """Store a step, for which there is room, in columns and slots. Doing it twice does no harm."""

    @abstractmethod
    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        """The observations of each column at ``places``.

        :param fields: Fields to be gathered in the same launch, where :attr:`gathers_fields` says that this can be.
        """

    @abstractmethod
    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""

    @abstractmethod
    def check_device(self) -> None:
        """Check what is on the device, as a part of ``check()``."""

    @property
    def device_bytes(self) -> int:
        """Memory on the device, whether used or not."""
        return sum(tensor.nbytes for tensor in self.device_tensors())

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        places = Places([slots for _, slots in wanted], envs, self.device)
        with self.lock.held:
            return [found.cpu().numpy() for found in self.read_tensors([column for column, _ in wanted], places)]

    def _can_stay(self, observations: Any) -> bool:
        """Whether observations can be stored without passing through the host."""
        return (
            isinstance(observations, th.Tensor)
            and observations.device == self.device
            and self.digests is None  # checksums are made on the host
            and observations.shape == self._step_shape
            and self.stored_dtype == self.dtype
            and observations.dtype == torch_dtype(self.dtype)
        )

    def _checked_arrays(self, step: Sequence[Any]) -> tuple[list[npt.NDArray[Any]], list[Digests] | None]:
        arrays = [self.checked(part.cpu() if isinstance(part, th.Tensor) else part) for part in step]
        return arrays, None if self.digests is None else [digests_of(array) for array in arrays]

    def _outputs_of(self, columns: list[int], places: Places, stored: list[th.Tensor]) -> list[th.Tensor]:
        """Compare stored values with their checksums, if there are any, and convert them to the output dtype."""
        if self.digests is not None:
            for column, slots, values in zip(columns, places.slots, stored, strict=True):
                self.digests.compare(column, slots, places.envs, values.cpu().numpy())
        return self._converted(stored)

    def _converted(self, stored: list[th.Tensor]) -> list[th.Tensor]:
        if self.stored_dtype != self.output_dtype:
            stored = [values.to(torch_dtype(self.dtype)).to(torch_dtype(self.output_dtype)) for values in stored]
        return stored if self.divisor == 1.0 else [values / self.divisor for values in stored]
