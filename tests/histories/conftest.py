"""As in the tests of buffers on a device: Triton's interpreter where there is no GPU."""

from tests.gpu.conftest import _faster_interpreter  # noqa: F401
