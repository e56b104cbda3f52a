"""``zoo``: run scripts of the RL Zoo with buffer classes named in the hyperparameters."""

from __future__ import annotations

import sys
from typing import Any

import click


# All arguments after the name of the script are passed on to the script.
@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.argument("script", type=click.Choice(["train", "enjoy"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def zoo(script: str, arguments: tuple[str, ...]) -> None:
    """Run the RL Zoo with our buffers.

    Runs the train or enjoy script of the RL Zoo with its own ARGUMENTS. Hyperparameters may name buffer classes:
    "replay_buffer_class: sb3_extra_buffers.CompressedReplayBuffer". The same works for "rollout_buffer_class".
    """
    from importlib import import_module

    from sb3_extra_buffers.training_utils.rl_zoo import BufferExperimentManager

    module: Any = import_module(f"rl_zoo3.{script}")
    module.ExperimentManager = BufferExperimentManager
    sys.argv = [f"{sys.argv[0]} zoo {script}", *arguments]  # the Zoo parses sys.argv
    getattr(module, script)()
