"""Experience memory for Stable-Baselines3 that holds observations compressed."""

import logging

__version__ = "1.0.0.dev0"

# Silent unless the program that uses the library asks for its messages.
logging.getLogger(__name__).addHandler(logging.NullHandler())
