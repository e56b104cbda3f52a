"""Run the test suites of SB3 and sb3-contrib with compressed buffers instead of their own.

    make sb3-suites                                          # in its own environment
    python scripts/sb3_suites.py                             # pip downloads the sources of the installed versions
    python scripts/sb3_suites.py --sb3 PATH --contrib PATH   # folders that contain tests/
    python scripts/sb3_suites.py -k test_her                 # some of the tests

Failed tests run again with the original buffers. The script prints a table and the failures. The exit status is 1 if a
test fails only with our buffers and the reason is not documented. Other options are passed to pytest, such as -n 2.

This file is also the pytest plugin that replaces the classes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from xml.etree import ElementTree

DOCUMENTED = {"tests/test_buffers.py::test_custom_rollout_buffer"}  # expects AssertionError for a wrong space
"""Tests that fail with our buffers because of a difference that docs/exactness.md describes."""

REPLACEMENTS = {
    "stable_baselines3.common.buffers": {
        "ReplayBuffer": "CompressedReplayBuffer",
        "DictReplayBuffer": "CompressedDictReplayBuffer",
        "NStepReplayBuffer": "CompressedNStepReplayBuffer",
        "RolloutBuffer": "CompressedRolloutBuffer",
        "DictRolloutBuffer": "CompressedDictRolloutBuffer",
    },
    "stable_baselines3.her.her_replay_buffer": {"HerReplayBuffer": "CompressedHerReplayBuffer"},
    "sb3_contrib.common.maskable.buffers": {
        "MaskableRolloutBuffer": "CompressedMaskableRolloutBuffer",
        "MaskableDictRolloutBuffer": "CompressedMaskableDictRolloutBuffer",
    },
    "sb3_contrib.common.recurrent.buffers": {
        "RecurrentRolloutBuffer": "CompressedRecurrentRolloutBuffer",
        "RecurrentDictRolloutBuffer": "CompressedRecurrentDictRolloutBuffer",
    },
}
"""Module → original class → our class."""

Outcomes = dict[str, tuple[str, str]]
"""Test → its status (passed, skipped or failed) and the error message."""


def pytest_configure() -> None:
    """Replace the classes before pytest imports the first test."""
    if os.environ["SB3_SUITES_BUFFERS"] == "ours":
        exchange_classes()


def exchange_classes() -> None:
    """Replace the buffer classes in all modules of SB3 and sb3-contrib by ours."""
    ours = importlib.import_module("sb3_extra_buffers.compressed")
    importlib.import_module("sb3_contrib")  # imports all algorithms; later imports get our classes
    by_class = {
        getattr(importlib.import_module(module), theirs): getattr(ours, name)
        for module, names in REPLACEMENTS.items()
        for theirs, name in names.items()
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("stable_baselines3", "sb3_contrib"):
            continue
        if name in REPLACEMENTS:
            # Our classes derive from the classes of this module, whose methods look each other up by name. So the
            # original module stays unchanged, and later imports get a copy with our classes.
            original, module = module, types.ModuleType(name)
            vars(module).update(vars(original))
            parent, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[parent], last, module)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in by_class:
                setattr(module, attribute, by_class[value])


def download(package: str, folder: Path) -> Path:
    """Download and unpack the source distribution of the installed version of ``package``."""
    version = importlib.metadata.version(package)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
    (archive,) = folder.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run_suite(source: Path, buffers: str, arguments: list[str]) -> Outcomes:
    """Run the tests under ``source`` and return their outcomes. ``buffers`` is ``"theirs"`` or ``"ours"``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            "OMP_NUM_THREADS": "1",  # the networks are tiny, and pytest -n already uses all cores
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SB3_SUITES_BUFFERS": buffers,
            "SDL_VIDEODRIVER": "dummy",  # environments may render
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, f"--junit-xml={report}", *arguments]
        subprocess.run(command, cwd=source, env=environment, check=False)
        return {node_id(case): outcome_of(case) for case in ElementTree.parse(report).iter("testcase")}


def node_id(case: ElementTree.Element) -> str:
    if not case.get("classname"):  # a test module that failed to import
        return f"{case.get('name', '').replace('.', '/')}.py"
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    for element in case:
        if element.tag in ("failure", "error", "skipped"):
            message = " ".join((element.get("message") or "").split())
            return "skipped" if element.tag == "skipped" else "failed", message
    return "passed", ""


def compare(source: Path, arguments: list[str]) -> tuple[str, list[str], bool]:
    """Return a table row, the failures with their reasons, and whether no failure is due to our buffers."""
    ours = run_suite(source, "ours", ["tests", *arguments])
    failed = [test for test, (status, _) in ours.items() if status == "failed"]
    theirs = run_suite(source, "theirs", failed) if failed else {}
    reasons = {test: "documented" if test in DOCUMENTED else "our buffers" for test in failed}
    reasons |= {test: "also with their buffers" for test in failed if theirs[test][0] == "failed"}
    statuses = [status for status, _ in ours.values()]
    counts = [statuses.count(status) for status in ("passed", "skipped", "failed")]
    counts += [
        list(reasons.values()).count(reason) for reason in ("also with their buffers", "documented", "our buffers")
    ]
    failures = [f"{reasons[test]}: {test}\n    {ours[test][1][:300]}" for test in failed]
    return "".join(f"{count:>9}" for count in counts), failures, bool(ours) and "our buffers" not in reasons.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sb3", type=Path, help="folder with SB3's sources")
    parser.add_argument("--contrib", type=Path, help="folder with sb3-contrib's sources")
    parser.add_argument("--output", type=Path, help="also write the table and the failures to this file")
    arguments, for_pytest = parser.parse_known_args()
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("stable-baselines3", "sb3-contrib", "torch", "numpy")
    ]
    lines = [", ".join([*versions, f"Python {platform.python_version()}"]), ""]
    lines.append(f"{'':20}{'':>27}  of which fail")
    lines.append(f"{'suite':20}{'passed':>9}{'skipped':>9}{'failed':>9}{'anyway':>9}{'known':>9}{'by ours':>9}")
    all_failures, success = [], True
    with tempfile.TemporaryDirectory() as folder:
        for package, source in ("stable-baselines3", arguments.sb3), ("sb3-contrib", arguments.contrib):
            numbers, failures, is_explained = compare((source or download(package, Path(folder))).resolve(), for_pytest)
            lines.append(f"{package:20}{numbers}")
            all_failures += failures
            success &= is_explained
    lines += ["", *(all_failures or ["No failures."])]
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(not success)


if __name__ == "__main__":
    main()
