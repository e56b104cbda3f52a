"""Subjects in processes of their own, failures included."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import __main__ as suite
from benchmarks import peers
from benchmarks.plan import FULL, QUICK, Data, choose
from benchmarks.results import Figure
from benchmarks.sections import replay
from benchmarks.streams import Stream
from benchmarks.workers import Worker, WorkerError, Workers

STREAM = Stream("noise", steps=20, n_envs=2, recorded_steps=20, recorded_envs=2)


def test_a_subject_that_fails_does_not_stop_the_others() -> None:
    with Workers(["sb3", "ours:no-such-method"], "test") as workers:
        workers.at_once("make", stream=asdict(STREAM))
        assert "ours:no-such-method: make failed: " in workers.failures["ours:no-such-method"]
        assert "no-such-method" in workers.failures["ours:no-such-method"].partition("failed: ")[2]
        filled = workers.in_turn(2, "fill", steps=10)
        assert list(filled) == ["sb3"]
        assert len(workers.in_turn(3, "sample", batch_size=4, times=2)["sb3"]) == 3


def test_a_process_that_dies_is_an_error_that_says_when() -> None:
    worker = Worker("sb3")
    try:
        worker.process.kill()
        with pytest.raises(WorkerError, match=r"sb3: the process ended \(-9\) while load_library"):
            worker.ask("load_library")
    finally:
        worker.close()
    assert not Path(worker.scratch.name).exists()


def test_memory_is_what_it_is_known_to_be() -> None:
    data = Data("Noise", 1_205, ("sb3", "ours:none"), n_envs=2)
    table = replay.measure(replace(QUICK, data={"noise": data}, fill_rounds=8, sample_rounds=2), "noise")
    memory, payload = table.cell("sb3", replay.BYTES), table.cell("ours:none", replay.PAYLOAD)
    assert not table.failures
    assert isinstance(memory, Figure)
    assert isinstance(payload, Figure)
    assert payload.median == pytest.approx(4 * 84 * 84, rel=0.01)
    assert memory.median == pytest.approx(2 * 4 * 84 * 84, rel=0.1)  # huge pages are coarse
    assert not any("never stored" in note for note in table.notes)


def test_a_peer_that_cannot_be_installed_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others.txt").write_text("no-such-package-at-all==1.0\n")
    monkeypatch.setattr(peers, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(peers.MissingPeerError, match=r"(?s)others\.txt.*no-such-package-at-all.*--subjects"):
        suite.check_libraries(["cpprb"])


def test_a_peer_that_cannot_be_imported_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others.txt").write_text("")
    monkeypatch.setattr(peers, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    with pytest.raises(peers.MissingPeerError, match=r"(?s)cpprb: load_library failed: .*--subjects sb3"):
        suite.check_libraries(["sb3", "cpprb"])


def test_an_unknown_library_ends_the_command_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks", "--subjects", "sb4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: unknown library 'sb4' in 'sb4'; known are sb3, ours, older, cpprb, torchrl"
    ]


def test_libraries_stand_for_their_subjects_and_methods_for_themselves() -> None:
    plan = choose(FULL, ["mspacman"], ["sb3", "torchrl", "ours:rle"])
    assert plan.data["mspacman"].subjects == (
        "sb3",
        "torchrl:tensor",
        "torchrl:memmap",
        "torchrl:compressed",
        "ours:rle",
    )
    assert plan.rollout_subjects == ("sb3", "ours:rle")


def test_a_run_resumes_only_what_was_measured_in_the_same_way(tmp_path: Path) -> None:
    measured: list[str] = []

    def part(name: str) -> suite.Table:
        measured.append(name)
        if name == "two" and len(measured) < 3:
            raise KeyboardInterrupt
        return suite.Table(name, name, [])

    parts = {name: lambda name=name: part(name) for name in ("one", "two")}
    for fingerprint in ("a", "b"):
        measured.clear()
        with pytest.raises(KeyboardInterrupt):
            suite.measure(parts, tmp_path, {"run": fingerprint}, resume=True)
        assert measured == ["one", "two"]
    suite.measure(parts, tmp_path, {"run": "b"}, resume=True)
    assert measured == ["one", "two", "two"]
