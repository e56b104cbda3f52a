"""Around training, a module for each: environments (:mod:`.atari`, :mod:`.vizdoom`), evaluation (:mod:`.eval_model`),
buffers filled ahead (:mod:`.buffer_warmup`), what a buffer costs while a model learns (:mod:`.callbacks`), and
checkpoints of a model with its buffer (:mod:`.checkpoints`).
"""
