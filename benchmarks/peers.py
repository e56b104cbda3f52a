"""Virtual environments for the libraries that are compared with this one.

Each has only the packages of ``benchmarks/requirements/NAME.txt``. NumPy, torch, SB3 and the rest come from the
environment that runs the suite, through a ``.pth`` file, so that tables compare buffers and not builds of torch. Python
does not follow further ``.pth`` files there, such as that of an editable install of this library: it stays invisible.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks import CACHE

REQUIREMENTS = Path(__file__).parent / "requirements"


class MissingPeerError(RuntimeError):
    """A library that was asked for cannot be measured."""


def python_for(name: str | None) -> Path:
    """The interpreter of an environment, or for ``None`` that of this process."""
    if name is None:
        return Path(sys.executable)
    folder = CACHE / "peers" / name
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def prepare(name: str) -> None:
    """Create an environment, unless it exists and was created for the same requirements and interpreter."""
    python = python_for(name)
    folder = python.parent.parent
    stamp = folder / "made-from"
    requirements = REQUIREMENTS / f"{name}.txt"
    packages = sysconfig.get_paths()["purelib"]
    wanted = hashlib.sha256(f"{packages} {sys.version} {requirements.read_text()}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return
    print(f"Creating the virtual environment for {requirements.name} in {folder}", file=sys.stderr)
    venv.create(folder, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--requirement", str(requirements)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingPeerError(
            f"pip could not install {requirements}:\n{done.stderr.strip()}\n"
            f"Make that possible, or choose other libraries with --subjects."
        )
    site_packages = next(folder.glob("[Ll]ib/**/site-packages"))
    (site_packages / "shared.pth").write_text(f"{packages}\n")
    stamp.write_text(wanted)
