"""Test every installed Python, the oldest supported dependencies, and the package as users get it.

Run `pip install nox && nox`. Pythons that are not installed are skipped. `nox --list` shows the sessions.
"""

import re
import shutil
import tarfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"  # uv is much faster, if it is installed
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["test", "oldest", "package", "sdist"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs")]
TESTED = "fast,atari,vizdoom,video,contrib,minari,lerobot,plots,ray,docs,dev"
PINNED = ("--constraint", str(Path("constraints.txt").resolve()))
DIST = Path("dist")
# Like `make test`: the other tests are slow, or need their own environments.
SELECTED = ("-m", "not slow", "--ignore", "tests/neighbours")
# The test processes share the cores, so torch's threads must not spin while they wait.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@nox.session(python=PYTHONS)
def test(session: nox.Session) -> None:
    """Run all tests with the pinned versions for this Python."""
    session.install(*PINNED, "--editable", f".[{TESTED}]")
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """Run all tests with the oldest supported version of each dependency."""
    wanted = PROJECT["dependencies"] + [
        line for name in ("isal", "lz4", "numba", "zstd") for line in PROJECT["optional-dependencies"][name]
    ]
    oldest = [re.sub(r"([\w-]+)>=([\w.]+).*", r"\1==\2", line) for line in wanted]
    session.install("--editable", ".[contrib,atari,vizdoom,video,ray,dev]", *oldest)
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the source distribution for PyPI in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install("build", "twine", "readme_renderer[md]")
    session.run("python", "-m", "build", silent=True)
    session.run("twine", "check", "--strict", *map(str, DIST.iterdir()))


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("extra", ["", *EXTRAS], ids=["plain", *EXTRAS])
def package(session: nox.Session, extra: str) -> None:
    """Install the wheel with one extra in a clean environment. Try imports, the command line and a short training."""
    wheel = next(DIST.glob("*.whl")).resolve()
    script = Path("scripts/try_package.py").resolve()
    session.install(*PINNED, f"sb3-extra-buffers[{extra}] @ {wheel.as_uri()}" if extra else str(wheel))
    session.chdir(session.create_tmp())
    session.run("python", str(script), extra, env={"OMP_NUM_THREADS": "1"})


@nox.session(requires=["build"])
def sdist(session: nox.Session) -> None:
    """Run the tests in an unpacked source distribution. `nox --session sdist -- tests/codecs` runs some of them."""
    with tarfile.open(next(DIST.glob("*.tar.gz"))) as archive:
        archive.extractall(session.create_tmp(), filter="data")
        folder = Path(session.create_tmp(), archive.getnames()[0].partition("/")[0])
    session.chdir(folder)
    session.install(*PINNED, "--editable", f".[{TESTED}]")
    session.run("pytest", "-n", "auto", *SELECTED, *session.posargs, env=PASSIVE)
