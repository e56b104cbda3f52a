"""On a device, too, one observation passes at most five files on its way in, and five on its way back."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.gpu_buffers.kernels import kernel_module
from sb3_extra_buffers.gpu_buffers.transfer import Staging
from tests.gpu.helpers import IMAGES, recorded, replay_pair
from tests.storage.test_way_of_an_observation import Trace, documented


@pytest.mark.usefixtures("kernels")
def test_five_files_there_and_five_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = replay_pair(IMAGES, device, compression_method="delta", frame_stack=4)
    adding, sampling = Trace(), Trace()
    with monkeypatch.context() as patch:
        adding.watch(patch, Staging, "send", "gpu_buffers/transfer.py")
        adding.watch(patch, kernel_module("append"), "append_observations", "gpu_buffers/kernels/append.py")
        for transition in recorded("channels first", 2)[:3]:
            ours.add(*transition)
    with monkeypatch.context() as patch:
        sampling.watch(patch, kernel_module("delta"), "gather_delta", "gpu_buffers/kernels/delta.py")
        np.random.seed(0)
        ours.sample(2)
    assert adding.files == documented("Adding on a GPU:")
    assert sampling.files == documented("Sampling on a GPU:")
    assert len(adding.files) <= 5
    assert len(sampling.files) <= 5
