"""Measure memory and speed of buffers on your own environment. The command line and the benchmarks use these modules.

Transitions of an environment (:mod:`.environments`) are collected once into a file (:mod:`.transitions`), played at
random or by a saved policy (:mod:`.policies`), so that every buffer (:mod:`.buffers`) stores the same data.
:mod:`.comparison` measures memory (:mod:`.memory`) in fresh processes (:mod:`.processes`) and time in one process,
and :mod:`.recommendation` picks a buffer. :mod:`.verification` compares values, :mod:`.training` whole trainings.
"""
