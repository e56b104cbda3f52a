"""Compare memory and read time of a rollout buffer under every compression method, on the same game.

Like example_eval_memory_saving.py, but for rollout buffers. Latency is the time to read all data once, in batches of
64.
"""

from __future__ import annotations

from collections.abc import Sequence

from example_eval_memory_saving import compare, memory_arguments


def main(argv: Sequence[str] | None = None) -> None:
    print(compare("Rollout", memory_arguments(__doc__).parse_args(argv)))


if __name__ == "__main__":
    main()
