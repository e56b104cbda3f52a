"""``estimate``: whether a buffer fits this machine."""

from __future__ import annotations

import json

import click

from sb3_extra_buffers.cli.common import collected_transitions, env_options, table


@click.command()
@env_options(steps=1_000)
@click.option("--method", default="auto", show_default=True, help="Compression method, as for bench.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def estimate(
    env_id: str,
    n_envs: int,
    frame_stack: int | None,
    seed: int,
    buffer_size: int,
    steps: int,
    method: str,
    as_json: bool,
) -> None:
    """Estimate whether a buffer fits this machine.

    The size of SB3's buffer is computed. Ours is measured on a few transitions and extrapolated.
    """
    from sb3_extra_buffers.measure.buffers import SB3, buffer_arguments, sb3_bytes
    from sb3_extra_buffers.measure.comparison import measure_memory
    from sb3_extra_buffers.measure.environments import describe
    from sb3_extra_buffers.measure.memory import available_memory
    from sb3_extra_buffers.measure.processes import run_in_fresh_process
    from sb3_extra_buffers.storage.usage import readable

    buffer_arguments(method)
    with collected_transitions(env_id, n_envs, frame_stack, seed, steps) as data:
        memory = run_in_fresh_process(measure_memory, method, data, buffer_size)
    available = available_memory()
    sb3 = sb3_bytes(buffer_size, data.observation_space, data.action_space)
    ours = memory.for_buffer_of(buffer_size)
    if as_json:
        found = {"buffer_size": buffer_size, "available_bytes": available, "sb3_bytes": sb3, "bytes": round(ours)}
        click.echo(json.dumps(found | {"method": memory.codec}, indent=1))
        return
    source = "extrapolated" if buffer_size > memory.transitions else "measured"
    rows = [
        (name, readable(size), known, _fits(size, available))
        for name, size, known in ((SB3, sb3, "computed"), (memory.codec, ours, source))
    ]
    ratio = (
        f"{sb3 / ours:,.1f}x smaller than SB3's buffer."
        if ours < sb3
        else (f"{ours / sb3:,.1f}x larger than SB3's buffer: use SB3's.")
    )
    click.echo(f"{env_id}, observations {describe(data.observation_space)}, {buffer_size:,} transitions\n")
    click.echo(table(("", "memory", "", "fits this machine"), rows, left=4))
    click.echo(
        f"\n{readable(available)} are available. Measured on {memory.transitions:,} transitions of a random policy."
    )
    click.echo(ratio)


def _fits(size: float, available: int) -> str:
    share = size / max(available, 1)
    return f"yes, {share:.1%} of the available memory" if share <= 1 else f"no, {share:.1f}x the available memory"
