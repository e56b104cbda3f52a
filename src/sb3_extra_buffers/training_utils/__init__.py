"""Around training, a module for each: environments (:mod:`.atari`, :mod:`.vizdoom`), evaluation (:mod:`.eval_model`),
buffers filled ahead (:mod:`.buffer_warmup`), and what a buffer costs while a model learns (:mod:`.callbacks`).
"""
