"""``zoo``: the RL Zoo's own scripts, whose hyperparameters may name buffer classes."""

from __future__ import annotations

import sys
from typing import Any

import click


# Everything after the name of the script belongs to the script.
@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.argument("script", type=click.Choice(["train", "enjoy"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def zoo(script: str, arguments: tuple[str, ...]) -> None:
    """Run a script of the RL Zoo with its own ARGUMENTS.

    It does what "python -m rl_zoo3.train" does, and accepts classes by name in the hyperparameters:
    "replay_buffer_class: sb3_extra_buffers.CompressedReplayBuffer", and "rollout_buffer_class" likewise.
    """
    from importlib import import_module

    from sb3_extra_buffers.training_utils.rl_zoo import BufferExperimentManager

    module: Any = import_module(f"rl_zoo3.{script}")
    module.ExperimentManager = BufferExperimentManager
    sys.argv = [f"{sys.argv[0]} zoo {script}", *arguments]  # which the Zoo parses
    getattr(module, script)()
