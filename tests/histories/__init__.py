"""Long histories: random but seeded programs, run on SB3's buffers and on ours, with everything read compared.

* ``worlds``: observations that are hard on a buffer, and real games
* ``plans``: which buffer, method, options and world a history has; all follow from its name
* ``models``: SB3's buffers, and plain references where SB3 has none
* ``replay_history``, ``rollout_history``: what is done to both, and the comparison
* ``surroundings``: smaller constants, so that rare events become frequent, and ways to the device's code on a CPU
* ``visits``: counts these events
* ``soak``: minutes to hours of it, in several processes
"""
