"""What a buffer costs on data of one's own: the command line and the benchmarks measure with these.

An environment (:mod:`.environments`) is played (:mod:`.playing`) and the play kept in a file (:mod:`.play_file`), so
that every buffer is given the same. Memory (:mod:`.memory`) is measured in fresh processes (:mod:`.processes`), time
with the buffers (:mod:`.subjects`) taking turns (:mod:`.timing`). :mod:`.comparison` puts it together, and
:mod:`.recommendation` draws the conclusion.
"""
