"""The interface of stores of observations on a torch device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.gpu_buffers.arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.kernels import FieldBatch, FieldRow
from sb3_extra_buffers.gpu_buffers.transfer import CPU, Places, torch_dtype
from sb3_extra_buffers.storage.compiled_gathering import Wanted
from sb3_extra_buffers.storage.digests import Digests
from sb3_extra_buffers.storage.observation_store import ObservationStore


class Step(NamedTuple):
    """Observations of all environments, ready to be written."""

    parts: Any
    """What ``checked_step`` of a store hands to its ``write_step``: tensors on the device, or arrays."""
    digests: list[Digests] | None


class DeviceStore(ObservationStore, ABC):
    """A store that returns observations as tensors on ``device``.

    :param budget: The memory limit that all stores of a buffer share.
    """

    def __init__(self, *, device: th.device, budget: HeapBudget, **kwargs: Any) -> None:
        self.device = device
        self.budget = budget
        super().__init__(**kwargs)

    @cached_property
    def _torch_dtype(self) -> th.dtype:
        return torch_dtype(self.dtype)

    @property
    @abstractmethod
    def gathers_fields(self) -> bool:
        """Whether the launch that gathers observations can gather fields as well."""

    @abstractmethod
    def to(self, device: th.device) -> None:
        """Move everything to another device."""

    @abstractmethod
    def checked_step(self, step: Sequence[Any], stream: th.cuda.Stream | None = None) -> Step:
        """Check the observations of a step, which may be tensors, and prepare them for :meth:`write_step`.

        :param stream: The CUDA stream that is going to read tensors.
        """

    @property
    def takes_fields(self) -> bool:
        """Whether the launch that stores a step can write its fields as well."""
        return False

    @abstractmethod
    def write_step(self, places: list[tuple[int, int]], step: Step, fields: FieldRow | None = None) -> None:
        """Store a step after :meth:`prepare` has made room. Doing it twice does no harm.

        :param places: The column and slot of each observation.
        :param fields: The fields of the step, if :attr:`takes_fields`.
        """

    @abstractmethod
    def read_tensors(
        self, columns: list[int], places: Places, fields: FieldBatch | None = None, as_stored: bool = False
    ) -> list[th.Tensor]:
        """The observations of each column at ``places``.

        :param fields: Fields to gather in the same launch, if :attr:`gathers_fields`.
        :param as_stored: In the dtype that they are stored in, before any normalization.
        """

    @abstractmethod
    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""

    @abstractmethod
    def check_device(self) -> None:
        """Check the tensors on the device, without sending or moving observations."""

    def read(self, wanted: Wanted, envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        return self._read(wanted, envs, as_stored=False)

    def read_stored(self, wanted: Wanted, envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        return self._read(wanted, envs, as_stored=True)

    def _read(self, wanted: Wanted, envs: Indices, as_stored: bool) -> list[npt.NDArray[Any]]:
        with self.lock.held:
            self._wait()
            columns = [column for column, _ in wanted]
            places = Places([slots for _, slots in wanted], envs, self.device)
            return [found.cpu().numpy() for found in self.read_tensors(columns, places, as_stored=as_stored)]

    def _wait(self) -> None:
        """Wait for all streams of the device: an access by index does not know which stream wrote last."""
        if self.device.type == "cuda":
            th.cuda.synchronize(self.device)

    def _can_stay(self, observations: Any) -> bool:
        """Whether observations can be stored without passing through the host."""
        return (
            isinstance(observations, th.Tensor)
            and observations.device == self.device
            and self.digests is None  # checksums are computed on the host
            and observations.shape == self._step_shape
            and self.stored_dtype == self.dtype
            and observations.dtype == self._torch_dtype
        )

    def _checked_arrays(self, step: Sequence[Any]) -> tuple[list[npt.NDArray[Any]], list[Digests] | None]:
        arrays = [self.checked(part.cpu() if isinstance(part, th.Tensor) else part) for part in step]
        return arrays, self._digests_of(arrays)

    def _outputs_of(
        self, columns: list[int], places: Places, stored: list[th.Tensor], as_stored: bool
    ) -> list[th.Tensor]:
        """Verify the checksums of stored values, if there are any, and convert the values to the output dtype."""
        if self.digests is not None:
            for i, (column, values) in enumerate(zip(columns, stored, strict=True)):
                self.digests.compare(column, places.host_slots(i), places.envs, values.cpu().numpy())
        return stored if as_stored else self._converted(stored)

    def _converted(self, stored: list[th.Tensor]) -> list[th.Tensor]:
        if self.stored_dtype != self.output_dtype:
            stored = [values.to(torch_dtype(self.dtype)).to(torch_dtype(self.output_dtype)) for values in stored]
        return stored if self.divisor == 1.0 else [values / self.divisor for values in stored]
