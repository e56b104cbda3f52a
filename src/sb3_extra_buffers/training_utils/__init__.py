"""Helpers for training: Atari environments (:mod:`.atari`), evaluation (:mod:`.eval_model`), filling a buffer before
training (:mod:`.buffer_warmup`), logging its cost (:mod:`.callbacks`), checkpoints of a model and its buffer
(:mod:`.checkpoints`), and buffers in the RL Zoo (:mod:`.rl_zoo`). Environments that run on a GPU (:mod:`.device_env`),
and loops for them (:mod:`.device_loop`).
"""
