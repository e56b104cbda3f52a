"""``python -m sb3_extra_buffers``: the command line."""

from sb3_extra_buffers.cli import main

if __name__ == "__main__":
    main()
