"""The tests over every Python that is installed here, with the oldest dependencies, and of the package as users get it.

`pip install nox && nox`. A Python that is not installed is skipped. `nox --list` shows the sessions.
"""

import re
import shutil
import tarfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"  # uv, where it is installed: much faster
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["test", "oldest", "package", "sdist"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs")]
TESTED = "fast,atari,vizdoom,video,contrib,minari,lerobot,plots,ray,docs,dev"
PINNED = ("--constraint", str(Path("constraints.txt").resolve()))
DIST = Path("dist")
# As `make test` does: the rest takes long, or needs environments of its own.
SELECTED = ("-m", "not slow", "--ignore", "tests/neighbours")
# Processes share the cores: torch's threads must not keep them busy while they wait.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@nox.session(python=PYTHONS)
def test(session: nox.Session) -> None:
    """All tests, with the pinned versions that this Python has."""
    session.install(*PINNED, "--editable", f".[{TESTED}]")
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """All tests, with the oldest version that is allowed of each dependency."""
    wanted = PROJECT["dependencies"] + [
        line for name in ("isal", "lz4", "numba", "zstd") for line in PROJECT["optional-dependencies"][name]
    ]
    oldest = [re.sub(r"([\w-]+)>=([\w.]+).*", r"\1==\2", line) for line in wanted]
    session.install("--editable", ".[contrib,atari,vizdoom,video,ray,dev]", *oldest)
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and source distribution, as PyPI gets them, in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install("build", "twine", "readme_renderer[md]")
    session.run("python", "-m", "build", silent=True)
    session.run("twine", "check", "--strict", *map(str, DIST.iterdir()))


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("extra", ["", *EXTRAS], ids=["plain", *EXTRAS])
def package(session: nox.Session, extra: str) -> None:
    """The wheel in a clean environment, with one extra: import, command line, a short training."""
    wheel = next(DIST.glob("*.whl")).resolve()
    script = Path("scripts/try_package.py").resolve()
    session.install(*PINNED, f"sb3-extra-buffers[{extra}] @ {wheel.as_uri()}" if extra else str(wheel))
    session.chdir(session.create_tmp())
    session.run("python", str(script), extra, env={"OMP_NUM_THREADS": "1"})


@nox.session(requires=["build"])
def sdist(session: nox.Session) -> None:
    """The tests, in an unpacked source distribution: `nox --session sdist -- tests/codecs` runs some."""
    with tarfile.open(next(DIST.glob("*.tar.gz"))) as archive:
        archive.extractall(session.create_tmp(), filter="data")
        folder = Path(session.create_tmp(), archive.getnames()[0].partition("/")[0])
    session.chdir(folder)
    session.install(*PINNED, "--editable", f".[{TESTED}]")
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)
