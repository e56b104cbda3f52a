"""All errors that this library raises on purpose.

    ExtraBuffersError
    ├── ConfigurationError(ValueError)     an invalid argument
    │   ├── ArgumentError(TypeError)       the class has no such argument
    │   ├── UnknownMethodError             the compression method does not exist
    │   ├── LevelError                     the compression level is out of range
    │   └── OptionError                    the codec has no such option
    ├── ObservationError(ValueError)       an observation does not fit its space
    ├── CapacityError(ValueError)          a memory limit is reached
    ├── EmptyBufferError(ValueError)       the buffer has nothing to sample yet
    ├── CorruptDataError(ValueError)       stored bytes do not decode, or a file is damaged
    ├── FileFormatError(ValueError)        not a saved buffer, or saved by a newer version
    ├── SegmentError(ValueError)           a segment does not fit the buffer
    ├── SaveError(OSError)                 a file could not be written
    ├── EnvironmentMakeError(ValueError)   an environment cannot be created
    ├── WorkerError(RuntimeError)          a worker process has died
    ├── MismatchError(ValueError)          values differ from those of SB3's buffer
    └── MissingPackageError(ImportError)   an optional package is not installed

Each error also derives from the built-in exception that users would expect to catch.
"""

from __future__ import annotations


class ExtraBuffersError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigurationError(ExtraBuffersError, ValueError):
    """An argument has an invalid value."""


class ArgumentError(ConfigurationError, TypeError):
    """The class has no argument of that name."""


class UnknownMethodError(ConfigurationError):
    """The compression method does not exist, or its shorthand is malformed."""


class LevelError(ConfigurationError):
    """The compression level is outside the range of its method."""


class OptionError(ConfigurationError):
    """The codec has no option of that name."""


class ObservationError(ExtraBuffersError, ValueError):
    """An observation does not have the shape or dtype of its space."""


class CapacityError(ExtraBuffersError, ValueError):
    """The data does not fit into the memory that it may use."""


class EmptyBufferError(ExtraBuffersError, ValueError):
    """The buffer has nothing to sample yet."""


class CorruptDataError(ExtraBuffersError, ValueError):
    """Stored bytes do not decode to a frame, or a file is damaged."""


class FileFormatError(ExtraBuffersError, ValueError):
    """A file is not a saved buffer, or only a newer version of the library can read it."""


class SegmentError(ExtraBuffersError, ValueError):
    """A segment is for another kind of buffer, other spaces, or another number of environments."""


class SaveError(ExtraBuffersError, OSError):
    """A file could not be written. Its last complete save is still valid."""


class EnvironmentMakeError(ExtraBuffersError, ValueError):
    """The environment cannot be created."""


class WorkerError(ExtraBuffersError, RuntimeError):
    """A worker process ended before it returned its result."""


class MismatchError(ExtraBuffersError, ValueError):
    """A buffer returned other values than SB3's. This is a bug in this library."""


class MissingPackageError(ExtraBuffersError, ImportError):
    """A method or class needs an optional package that is not installed."""

    def __init__(self, what: str, package: str, extra: str = "") -> None:
        command = f'"sb3-extra-buffers[{extra}]"' if extra else package
        super().__init__(
            f"{what} needs the package {package!r}, which is not installed. Install it with: pip install {command}"
        )
        self.what = what
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str, str]]:
        return MissingPackageError, (self.what, self.package, self.extra)
