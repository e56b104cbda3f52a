"""Measurements of speed and memory, on recordings of real environments."""
