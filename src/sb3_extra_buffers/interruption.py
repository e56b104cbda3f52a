"""Delay Ctrl-C while a buffer changes."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

try:  # the module ``signal`` wraps these functions, and converts their arguments and results to enums, which is slow
    from _signal import getsignal as _get_handler  # type: ignore[import-not-found]  # it has no type stubs
    from _signal import signal as _set_handler
except ImportError:
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler


class uninterrupted:  # noqa: N801  # reads like a function, as contextlib's own do
    """``with uninterrupted():`` delays Ctrl-C until the end of the block. Blocks may be nested.

    It costs a microsecond. In threads other than the main one it does nothing: Python runs signal handlers in the main
    thread only.
    """

    __slots__ = ("_handler", "_waiting")

    def __init__(self) -> None:
        self._handler: Any = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._waiting = number, frame

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _get_handler(signal.SIGINT)
        if callable(handler) and type(handler) is not uninterrupted:
            try:
                _set_handler(signal.SIGINT, self)
                self._handler = handler
            except BaseException:  # from the handler of another signal, for instance at a time limit
                _set_handler(signal.SIGINT, handler)
                raise

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is not None:
            self._handler = None
            _set_handler(signal.SIGINT, handler)
            if self._waiting is not None:
                handler(*self._waiting)
