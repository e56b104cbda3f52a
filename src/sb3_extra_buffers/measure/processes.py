"""Run a function in a fresh process, which never outlives this one."""

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
    """Call ``func`` in a new interpreter and return its result; arguments and result must be picklable."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _work; _work()"
    # In its own process group, the process does not get the terminal's Ctrl-C. This process kills it instead.
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
            # Pickled twice: the process can read the bytes, and watch this one, before it imports what func needs.
            pickle.dump(cloudpickle.dumps((func, args, kwargs)), process.stdin)
            process.stdin.flush()
            succeeded, outcome = pickle.load(process.stdout)
            process.wait()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise WorkerError(_how_it_ended(process.wait())) from None
        finally:
            process.kill()  # does nothing if it has ended, as it has unless this process is interrupted
    if not succeeded:
        error, where = outcome
        raise error from WorkerError(f"In the process that measures:\n{where}")
    return cast(T, outcome)


def _work() -> None:
    # Standard output carries the result. What the function prints must not get into it.
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        try:
            work = pickle.load(sys.stdin.buffer)
        except EOFError:  # the parent was interrupted
            os._exit(1)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        # tqdm's own lock is a semaphore of the system, which outlives a process that is killed.
        tqdm.set_lock(threading.RLock())
        try:
            func, args, kwargs = pickle.loads(work)
            outcome = True, func(*args, **kwargs)
        except Exception as error:
            outcome = False, (_picklable(error), traceback.format_exc())
        cloudpickle.dump(outcome, results)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the pipe closes: nothing more is ever sent
    os._exit(1)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__}: {error}")
    return error


def _how_it_ended(exit_code: int) -> str:
    if exit_code == -getattr(signal, "SIGKILL", 9):
        return "The process that measures was killed. The system does that when memory runs out: use fewer steps."
    return f"The process that measures ended with exit code {exit_code}. What it printed above may say why."
