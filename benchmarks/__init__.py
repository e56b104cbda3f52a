"""Measurements of speed and memory, on recordings of real environments.

``python -m benchmarks`` is the suite (:mod:`benchmarks.__main__`):

- :mod:`benchmarks.plan` says what is measured, :mod:`benchmarks.sections` how;
- :mod:`benchmarks.subjects` has an adapter for each library, :mod:`benchmarks.peers` makes their environments;
- :mod:`benchmarks.workers` starts a process per subject, and :mod:`benchmarks.worker` is what runs in it;
- :mod:`benchmarks.recordings` plays and records :mod:`benchmarks.environments`, :mod:`benchmarks.playback` repeats it;
- :mod:`benchmarks.results`, :mod:`benchmarks.report` and :mod:`benchmarks.plots` are about what comes out.

:mod:`benchmarks.studies` has programs that answer single questions.
"""

from pathlib import Path

CACHE = Path(__file__).parent / ".cache"
"""Recordings and virtual environments, which are made on demand."""
