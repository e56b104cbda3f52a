"""Measure speed and memory of replay and rollout buffers, on recordings of real environments.

``python -m benchmarks`` runs the suite (:mod:`benchmarks.__main__`). A *subject* is a buffer under test.

- :mod:`benchmarks.plan` defines what is measured, and :mod:`benchmarks.sections` how;
- :mod:`benchmarks.subjects` has an adapter for each library, and :mod:`benchmarks.peers` creates virtual environments
  for the other libraries;
- :mod:`benchmarks.workers` starts one process per subject, which runs :mod:`benchmarks.worker`;
- :mod:`benchmarks.recorder` plays and records :mod:`benchmarks.environments`, :mod:`benchmarks.recordings` loads the
  recordings, and :mod:`benchmarks.playback` plays them back;
- :mod:`benchmarks.results`, :mod:`benchmarks.report` and :mod:`benchmarks.plots` turn measurements into tables,
  Markdown and pictures.

:mod:`benchmarks.studies` has programs that each answer one question.
"""

from pathlib import Path

CACHE = Path(__file__).parent / ".cache"
"""Folder for recordings and virtual environments. Both are created on demand."""
