"""Long histories: random but seeded programs that run on SB3's buffers and on ours, and compare everything read.

* ``worlds``, ``real_games``: observations that are hard on a buffer, and real games
* ``plans``: the buffer, method, options and world of a history, all drawn from its name
* ``models``: SB3's buffers, and plain reference implementations where SB3 has none
* ``history``, ``replay_history``, ``rollout_history``, ``sequence_history``, ``segment_history``: the operations on
  both buffers, and the comparison
* ``surroundings``: smaller constants, so that rare events become frequent, and device code on a CPU
* ``visits``: counters of these rare events
* ``short``: the histories of ``make test``
* ``soak``: minutes to hours of histories, in several processes
* ``planted_faults``, ``faults``: bugs planted in a copy of the library, which the histories must find
"""
