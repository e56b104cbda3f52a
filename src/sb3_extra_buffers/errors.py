"""Every error that this library raises on purpose.

    ExtraBuffersError
    ├── ConfigurationError(ValueError)     an argument that cannot work
    │   ├── ArgumentError(TypeError)       an argument that the class does not have
    │   ├── UnknownMethodError             no such compression method
    │   ├── LevelError                     a compression level out of range
    │   └── OptionError                    an option that the codec does not have
    ├── ObservationError(ValueError)       an observation that does not fit its space
    ├── CapacityError(ValueError)          no room left in memory of a fixed size
    ├── EmptyBufferError(ValueError)       nothing to sample yet
    ├── CorruptDataError(ValueError)       stored bytes that do not decode, a damaged file
    ├── FileFormatError(ValueError)        not a saved buffer, or one of a newer library
    ├── SegmentError(ValueError)           a segment for another kind of buffer
    ├── SaveError(OSError)                 a file could not be written
    ├── EnvironmentMakeError(ValueError)   an environment that cannot be made
    ├── WorkerError(RuntimeError)          a measuring process has died
    ├── MismatchError(ValueError)          other values than those of SB3's buffer
    └── MissingPackageError(ImportError)   an optional package is not installed

Each also derives from the built-in exception that users would expect to catch.
"""

from __future__ import annotations


class ExtraBuffersError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigurationError(ExtraBuffersError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentError(ConfigurationError, TypeError):
    """The class has no argument of that name."""


class UnknownMethodError(ConfigurationError):
    """The compression method does not exist, or its shorthand is malformed."""


class LevelError(ConfigurationError):
    """The compression level is outside the range of its method."""


class OptionError(ConfigurationError):
    """The codec has no option of that name."""


class ObservationError(ExtraBuffersError, ValueError):
    """An observation does not have the shape or dtype that its space promises."""


class CapacityError(ExtraBuffersError, ValueError):
    """Memory of a size that the user has fixed is full."""


class EmptyBufferError(ExtraBuffersError, ValueError):
    """There is nothing to sample yet."""


class CorruptDataError(ExtraBuffersError, ValueError):
    """Stored bytes do not decode to a frame, or a file is damaged."""


class FileFormatError(ExtraBuffersError, ValueError):
    """A file is not a saved buffer, or only a newer version of the library can read it."""


class SegmentError(ExtraBuffersError, ValueError):
    """A segment is for another kind of buffer, other spaces, or another number of environments."""


class SaveError(ExtraBuffersError, OSError):
    """A file could not be written. Its last complete save is still valid."""


class EnvironmentMakeError(ExtraBuffersError, ValueError):
    """No environment can be made of that name."""


class WorkerError(ExtraBuffersError, RuntimeError):
    """A measuring process ended before it had a result."""


class MismatchError(ExtraBuffersError, ValueError):
    """A buffer returned other values than SB3's, which is a bug of this library."""


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
