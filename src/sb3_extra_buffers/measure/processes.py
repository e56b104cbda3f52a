"""Run a function in a fresh process, which ends when this one ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import cloudpickle
from tqdm import tqdm

from sb3_extra_buffers.errors import WorkerError

P = ParamSpec("P")
T = TypeVar("T")


def run_in_fresh_process(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func`` in a new interpreter and return its result. Arguments and result must be picklable.

    :raises WorkerError: if the process dies, for instance because memory runs out.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _child_main; _child_main()"
    # In its own session, the process does not get the terminal's Ctrl-C. This process kills it instead.
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # Pickled twice: the process can read the bytes, and start to watch its parent, before it imports func.
            pickle.dump(cloudpickle.dumps((func, args, kwargs)), process.stdin)
            process.stdin.flush()
            succeeded, outcome = pickle.load(process.stdout)
            process.wait()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise WorkerError(_describe_exit(process.wait())) from None
        finally:
            process.kill()  # after an interruption; otherwise it has ended already
    if not succeeded:
        error, where = outcome
        raise error from WorkerError(f"Raised in the measuring process:\n{where}")
    return cast(T, outcome)


def _child_main() -> None:
    """What the new process runs: read a function and its arguments, call it, and send its result to the parent."""
    # The original standard output carries only the result. What the function prints goes to standard error.
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        try:
            work = pickle.load(sys.stdin.buffer)
        except EOFError:  # the parent was interrupted
            os._exit(1)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        # tqdm's default lock is a system semaphore, which outlives a killed process.
        tqdm.set_lock(threading.RLock())
        try:
            func, args, kwargs = pickle.loads(work)
            outcome = True, func(*args, **kwargs)
        except Exception as error:
            outcome = False, (_picklable(error), traceback.format_exc())
        cloudpickle.dump(outcome, results)


def _exit_with_parent() -> None:
    os.read(0, 1)  # returns when the parent ends, which closes the pipe
    os._exit(1)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__}: {error}")
    return error


def _describe_exit(exit_code: int) -> str:
    if exit_code == -getattr(signal, "SIGKILL", 9):
        return "The measuring process was killed, probably because memory ran out: use fewer steps."
    return f"The measuring process ended with exit code {exit_code}. Its output above may say why."
