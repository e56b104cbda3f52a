"""Check that the histories find bugs: plant faults in a copy of the library, one at a time.

    python -m tests.histories.planted_faults [--only TEXT] [--processes 2] [--markdown docs/exactness.md]

The short histories of ``make test`` must find each fault, with one of the buffer classes that the fault lists.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.histories.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src", "sb3_extra_buffers")
TIMEOUT = 600
BEGIN, END = "<!-- planted faults: begin -->", "<!-- planted faults: end -->"


class Finding(NamedTuple):
    fault: Fault
    history: str | None
    """The history that found the fault, or ``None``."""
    error: str
    seconds: float


class Workshop:
    """A copy of the library to plant faults in. Its folder does not change, so numba can reuse its cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))

    def search(self, fault: Fault) -> Finding:
        """Plant a fault, run histories until one fails, and undo the fault."""
        path = self.folder / PACKAGE / fault.file
        path.write_text(fault.plant(path.read_text(encoding="utf-8")), encoding="utf-8")
        # The gather kernels call codec kernels, but numba only checks the timestamp of a function's own file.
        is_called_by_others = fault.file.startswith("codecs/") and fault.file.endswith("_kernels.py")
        cache = self.folder / (f"numba-{abs(hash(fault))}" if is_called_by_others else "numba")
        began = time.monotonic()
        try:
            history, error = self.run(fault.buffers, fault.kernels, cache, fault.segments)
        finally:
            # With its old timestamp, by which numba finds the compiled code.
            shutil.copy2(ROOT / PACKAGE / fault.file, path)
        return Finding(fault, history, error, time.monotonic() - began)

    def run(
        self, buffers: tuple[str, ...], kernels: bool = False, cache: Path | None = None, segments: bool = False
    ) -> tuple[str | None, str]:
        """Run the histories of ``buffers``. Return the one that failed and its error."""
        command = [sys.executable, "-m", "tests.histories.planted_faults", "--search", *buffers]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(cache or self.folder / "numba"),
            "OMP_WAIT_POLICY": "passive",
            **({"TRITON_INTERPRET": "1"} if kernels else {}),
        }
        try:
            done = subprocess.run(
                [*command, *(["--kernels"] if kernels else []), *(["--segments"] if segments else [])],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"A history was still running after {TIMEOUT} s: it hangs, or TIMEOUT is too low."
            ) from None
        if done.returncode == 0:
            return None, ""
        found = re.findall(r"^FOUND (.*) \| (.*)$", done.stdout, re.MULTILINE)
        if found:
            return found[-1]
        if done.returncode < 0:
            started = re.findall(r"^START (.*)$", done.stdout, re.MULTILINE) or ["the start"]
            return started[-1], f"the process was killed by signal {-done.returncode}"
        raise RuntimeError(f"The histories could not run:\n{done.stdout}\n{done.stderr}")


def search(buffers: list[str], kernels: bool, segments: bool) -> int:
    """Run the histories of ``make test`` until one fails, in a process that imports the library with the fault."""
    import torch as th

    import sb3_extra_buffers
    from tests.histories.running import HistoryError, run_history
    from tests.histories.short import kernel_histories, segment_histories, short_histories

    th.set_num_threads(1)
    if ROOT in Path(sb3_extra_buffers.__file__).parents:
        raise RuntimeError("This process imports the library itself, not the copy with a fault. Check PYTHONPATH.")
    names = [name for buffer in buffers for name in short_histories(buffer)]
    if kernels:
        names = [name for name in kernel_histories() if name.buffer in buffers]
    if segments:
        names = [name for buffer in buffers for name in segment_histories(buffer)]
    for name in names:
        print(f"START {name}", flush=True)
        try:
            run_history(name, path="kernels" if kernels else "segments" if segments else None)
        except HistoryError as error:
            first = str(error).partition(" at step")[0]
            print(f"FOUND {name} | {first}", flush=True)
            return 1
    return 0


def find_all(faults: list[Fault], processes: int) -> list[Finding]:
    """Search for each fault, several at a time."""
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        free: SimpleQueue[Workshop] = SimpleQueue()
        for number in range(processes):
            free.put(Workshop(Path(folder, str(number))))

        def find(fault: Fault) -> Finding:
            workshop = free.get()
            try:
                finding = workshop.search(fault)
            finally:
                free.put(workshop)
            by = f"found by {finding.history} ({finding.error})" if finding.history else "NOT FOUND"
            print(f"{finding.seconds:6.1f} s  {fault.name}: {by}", flush=True)
            return finding

        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(find, faults))


def table(findings: list[Finding]) -> str:
    rows = [
        f"| {fault.name} | `{fault.file}` | {history or '**nothing**'} | {error} | {seconds:.0f} |"
        for fault, history, error, seconds in findings
    ]
    return "\n".join(["| fault | file | found by | with | seconds |", "|---|---|---|---|---|", *rows])


def publish(path: Path, findings: list[Finding]) -> None:
    """Replace the table between the markers of a page."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no markers for the table: {BEGIN} and {END}.")
    found = sum(finding.history is not None for finding in findings)
    text = f"{found} of {len(findings)} are found.\n\n{table(findings)}"
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name or file contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s, one per core")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table into this page")
    parser.add_argument("--search", nargs="+", metavar="BUFFER", help=argparse.SUPPRESS)
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--segments", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.search:
        return search(given.search, given.kernels, given.segments)
    faults = [fault for fault in FAULTS if given.only in fault.name or given.only in fault.file]
    findings = find_all(faults, given.processes)
    missed = [finding.fault.name for finding in findings if finding.history is None]
    print(f"{len(findings) - len(missed)} of {len(findings)} found." + "".join(f"\nNot found: {m}" for m in missed))
    if given.markdown is not None:
        publish(given.markdown, findings)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
