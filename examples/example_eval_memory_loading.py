"""Read the same game from a rollout buffer with every compression method, and compare memory and time.

Like example_eval_memory_saving.py, but for rollout buffers, and latency is the time to read everything once, in batches
of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

from example_eval_memory_saving import compare, memory_arguments


def main(argv: Sequence[str] | None = None) -> None:
    print(compare("Rollout", memory_arguments(__doc__).parse_args(argv)))


if __name__ == "__main__":
    main()
