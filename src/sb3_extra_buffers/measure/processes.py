"""Work in a process of its own, which ends when its parent does, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import ParamSpec, TypeVar, cast

from tqdm import tqdm

from sb3_extra_buffers.errors import WorkerError

P = ParamSpec("P")
T = TypeVar("T")


def run_in_fresh_process(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func`` in a new interpreter and return its result; arguments and result must be picklable."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # Pickled here, so that the new process watches its parent before it imports what func needs.
    work = pickle.dumps((func, args, kwargs))
    process = context.Process(target=_work, args=(sender, work))
    try:
        with _interrupts_held_back():
            process.start()
        sender.close()
        succeeded, outcome = receiver.recv()
        process.join()
    except EOFError:
        process.join()
        raise WorkerError(_how_it_ended(process.exitcode)) from None
    finally:
        receiver.close()
        if process.is_alive():  # which it is only if this process is interrupted
            process.kill()
            process.join()
    if not succeeded:
        error, where = outcome
        raise error from WorkerError(f"In the process that measures:\n{where}")
    return cast(T, outcome)


def _work(sender: Connection, work: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system's, which outlives a process that is killed
    try:
        func, args, kwargs = pickle.loads(work)
        outcome = True, func(*args, **kwargs)
    except Exception as error:
        outcome = False, (_picklable(error), traceback.format_exc())
    sender.send(outcome)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Be interrupted before or after what is done in here, not in the middle of it.

    A process that is started in here never sees Ctrl-C, which a terminal sends to all: its parent ends it.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # it comes with the first process, and would let interrupts through again
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which is inherited
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code == -getattr(signal, "SIGKILL", 9):
        return "The process that measures was killed, as the system does when memory runs out. Ask for fewer steps."
    return f"The process that measures ended with exit code {exit_code}; what it printed above may say why."
