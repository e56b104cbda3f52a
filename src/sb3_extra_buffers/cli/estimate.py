"""``estimate``: check whether a buffer fits in memory."""

from __future__ import annotations

import json
from contextlib import closing

import click

from sb3_extra_buffers.cli.common import Play, algo_option, env_options, table


@click.command()
@env_options(steps=4_096)
@algo_option("dqn or sac, depending on the action space; otherwise ppo")
@click.option(
    "--buffer-size",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    help="Buffer size in transitions, over all environments.",
)
@click.option("--method", default="auto", show_default=True, help="Compression method, as for bench --methods.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def estimate(play: Play, algo: str | None, buffer_size: int, method: str, as_json: bool) -> None:
    """Estimate whether a buffer fits in memory.

    Plays the environment with random actions and stores the transitions in our buffer. Its memory is extrapolated to
    --buffer-size and compared with SB3's buffer and with the available memory.
    """
    from sb3_extra_buffers.measure.buffers import SB3, Task, buffer_arguments
    from sb3_extra_buffers.measure.comparison import Memory, fill
    from sb3_extra_buffers.measure.environments import describe
    from sb3_extra_buffers.measure.memory import available_memory
    from sb3_extra_buffers.measure.recommendation import buffer_kind, choose_algorithm
    from sb3_extra_buffers.storage.usage import readable

    buffer_arguments(method)  # raises for an invalid method before the environment is played
    with closing(play.make_env()) as env:
        kind = buffer_kind(choose_algorithm(env.action_space, algo))
        task = Task(kind, env.observation_space, env.action_space, play.n_envs)
        memory = Memory(method, fill(task, task.make(method, buffer_size), play.transitions(env), play.steps))
    available, sb3, ours = available_memory(), task.sb3_bytes(buffer_size), memory.for_buffer_of(buffer_size)
    if as_json:
        found = {"buffer_size": buffer_size, "available_bytes": available, "sb3_bytes": sb3, "bytes": round(ours)}
        click.echo(json.dumps(found | {"method": memory.codec, "settled": not memory.hint}, indent=1))
        return
    source = "extrapolated" if buffer_size > memory.transitions else "measured"
    rows = [
        (f"SB3 {task.class_name(SB3)}", readable(sb3), "computed", _fits(sb3, available)),
        (f"{task.class_name(method)}, {memory.codec}", readable(ours), source, _fits(ours, available)),
    ]
    click.echo(f"{play.env_id}: observations {describe(task.observation_space)}, {buffer_size:,} transitions\n")
    click.echo(table(("buffer", "memory", "", f"fits in {readable(available)} of available memory"), rows, left=4))
    smaller = f"{sb3 / ours:,.1f}x smaller than SB3's buffer."
    larger = f"{ours / sb3:,.1f}x larger than SB3's buffer: use SB3's."
    measured = f"Measured on {memory.transitions:,} transitions of a random policy."
    click.echo(f"\n{measured} {smaller if ours < sb3 else larger}")
    if memory.hint:
        click.echo(memory.hint)


def _fits(size: float, available: int) -> str:
    share = size / max(available, 1)
    return f"yes, uses {share:.1%} of it" if share <= 1 else f"no, needs {share:.1f}x as much"
