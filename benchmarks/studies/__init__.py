"""Programs that each answer one question. Run one with ``python -m benchmarks.studies.NAME``."""
