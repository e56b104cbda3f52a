"""Experience memory for Stable-Baselines3 that holds observations compressed."""

__version__ = "1.0.0.dev0"
