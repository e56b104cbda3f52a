"""Helpers for training: environments (:mod:`.atari`, :mod:`.vizdoom`), evaluation (:mod:`.eval_model`), filling a
buffer before training (:mod:`.buffer_warmup`), logging its cost (:mod:`.callbacks`), and checkpoints of a model and
its buffer (:mod:`.checkpoints`).
"""
