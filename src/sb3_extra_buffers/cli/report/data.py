"""The report for other programs."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.report import Report


def write_json(path: Path, report: Report) -> None:
    path.write_text(json.dumps(as_data(report), indent=1) + "\n", encoding="utf-8")


def as_data(report: Report) -> dict[str, Any]:
    comparison, recommendation = report.comparison, report.recommendation
    return {
        "environment": report.env_id,
        "player": report.player,
        "steps": comparison.play.steps,
        "n_envs": comparison.play.n_envs,
        "buffer_size": comparison.buffer_size,
        "batch_size": comparison.batch_size,
        "extrapolated": comparison.is_extrapolated,
        "results": [
            {
                "method": result.subject,
                "codec": result.memory.method,
                "transitions": result.memory.transitions,
                "measured_bytes": result.memory.measured,
                "bytes_per_transition": result.memory.bytes_per_transition,
                "buffer_bytes": result.buffer_bytes,
                "add_microseconds": result.add,
                "sample_microseconds": result.sample,
            }
            for result in comparison.results
        ],
        "recommended": {
            "method": recommendation.result.subject,
            "reason": recommendation.reason,
            "code": recommendation.code,
        },
        "versions": {
            "python": platform.python_version(),
            "sb3-extra-buffers": __version__,
            **{name: version(name) for name in ("stable-baselines3", "torch", "numpy", "gymnasium")},
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }
