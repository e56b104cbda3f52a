"""Memory of processes, measured as the command line measures it."""

from sb3_extra_buffers.measure.memory import peak_rss as peak_rss
from sb3_extra_buffers.measure.memory import rss as rss
from sb3_extra_buffers.measure.memory import settled_rss as settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process as run_in_fresh_process
