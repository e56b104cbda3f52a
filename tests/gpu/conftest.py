"""Devices to test on, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch as th

if not th.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

DEVICES = ["cpu", *(["cuda"] if th.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
