"""The tests over every Python that is installed here, and with the oldest dependencies: `pip install nox && nox`."""

import re

import nox

nox.options.reuse_existing_virtualenvs = True
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
EXTRAS = "fast,atari,contrib,minari,video,plots,dev"


@nox.session(python=PYTHONS)
def test(session: nox.Session) -> None:
    """All tests, with the pinned versions that this Python has."""
    session.install("--constraint", "constraints.txt", "--editable", f".[{EXTRAS}]")
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """All tests, with the oldest version that is allowed of each dependency."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    wanted = project["dependencies"] + [
        line for name in ("isal", "lz4", "numba", "zstd") for line in project["optional-dependencies"][name]
    ]
    oldest = [re.sub(r"([\w-]+)>=([\w.]+).*", r"\1==\2", line) for line in wanted]
    session.install("--editable", ".[contrib,atari,dev]", *oldest)
    session.run("pytest", "-n", "auto", *session.posargs)
