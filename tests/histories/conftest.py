"""Use Triton's interpreter if there is no GPU, as the tests of GPU buffers do."""

from tests.gpu.conftest import _faster_interpreter  # noqa: F401
