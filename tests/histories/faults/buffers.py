"""Faults of the buffer classes and of saving."""

from __future__ import annotations

from tests.histories.faults.fault import Fault

BUFFER_FAULTS = [
    Fault(
        "the largest number is never drawn",
        "compressed/drawing_kernels.py",
        "while found > highest:",
        "while found >= highest:",
    ),
    Fault(
        "a time limit is not stored",
        "compressed/replay_buffer.py",
        "timeouts = [info.get(_TIMEOUT, False) for info in of_envs]",
        "timeouts = [info.get(_TIMEOUT, False) and env == 0 for env, info in enumerate(of_envs)]",
    ),
    Fault(
        "a batch counts a time limit as the end of the task",
        "compressed/packed_fields.py",
        "np.array([0, 1, 0, 0], dtype=np.float32)",
        "np.array([0, 1, 0, 1], dtype=np.float32)",
    ),
    Fault(
        "whoever asks for timeouts gets dones",
        "compressed/packed_fields.py",
        '_BITS = {"dones": 0, "timeouts": 1}',
        '_BITS = {"dones": 0, "timeouts": 0}',
    ),
    Fault(
        "actions that do not fit into a byte are cut off",
        "compressed/packed_fields.py",
        "return bytes(action.ravel().tolist())",
        "return action.astype(np.uint8).tobytes()",
    ),
    Fault(
        "the second save leaves the old header",
        "persistence/container.py",
        "    file.write(_header(offset, manifest, generation + 1))",
        "    file.write(_header(offset, manifest, generation + 1) if before is None else b'')",
    ),
    Fault(
        "a full buffer does not say so",
        "compressed/replay_buffer.py",
        "            self.full = True\n            self.pos = 0",
        "            self.pos = 0",
    ),
    Fault(
        "the next observation of the last slot goes past the end",
        "compressed/replay_buffer.py",
        "following = (0, (last_slots + 1) % self.buffer_size) if self.optimize_memory_usage",
        "following = (0, np.minimum(last_slots + 1, self.buffer_size - 1)) if self.optimize_memory_usage",
    ),
    Fault(
        "an n-step return goes on past the newest transition",
        "compressed/nstep_buffer.py",
        "is_last = (window[0] == (self.pos - 1) % self.buffer_size)",
        "is_last = (window[0] == (self.pos - 2) % self.buffer_size)",
        ("CompressedNStepReplayBuffer",),
    ),
    Fault(
        "a sum of priorities leaves out its last child",
        "compressed/sum_tree_kernels.py",
        "            for child in range(FAN_OUT):\n                total += nodes[first + child]",
        "            for child in range(FAN_OUT - 1):\n                total += nodes[first + child]",
        ("CompressedPrioritizedReplayBuffer",),
    ),
    Fault(
        "a reset buffer remembers where the last episode began",
        "compressed/her_buffer.py",
        "            self.ep_length[:] = 0\n            self._current_ep_start[:] = 0",
        "            self.ep_length[:] = 0",
        ("CompressedHerReplayBuffer",),
    ),
]
