"""Helpers for training.

* :mod:`.atari`: Atari environments
* :mod:`.eval_model`: evaluate a model
* :mod:`.buffer_warmup`: fill a buffer before training
* :mod:`.callbacks`: log the memory of a buffer
* :mod:`.checkpoints`: save and resume a model together with its buffer
* :mod:`.rl_zoo`: buffer classes in the RL Zoo
* :mod:`.device_env`, :mod:`.device_loop`: environments that run on a GPU, and training loops for them
"""
