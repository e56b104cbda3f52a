"""Measure memory and speed of buffers on your own environment, as the command line and the benchmarks do.

Transitions of an environment (:mod:`.environments`), with actions from a random or saved policy (:mod:`.policies`), are
written to a file once (:mod:`.transitions`), so that every buffer (:mod:`.buffers`) stores the same data.
:mod:`.comparison` measures memory (:mod:`.memory`) in fresh processes (:mod:`.processes`), and time in one process.
:mod:`.recommendation` picks a buffer. :mod:`.verification` compares stored values, :mod:`.training` trained networks.
"""
