"""Faults of the buffers on a GPU."""

from __future__ import annotations

from tests.histories.faults.fault import DEVICE, Fault

KERNELS = "gpu_buffers/kernels/"

DEVICE_FAULTS = [
    Fault(
        "on the device: batches are read from tensors that were outgrown",
        "gpu_buffers/frame_store.py",
        "if known is None or not all(map(is_, known[0], sources)):",
        "if known is None:",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "on the device: a lane's frames are released too early",
        "gpu_buffers/frame_store.py",
        "super().release(np.minimum(oldest, self.heads - self.layout.stack))",
        "super().release(np.minimum(oldest + 3, self.heads - self.layout.stack))",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "on the device: records are entered one place too far",
        "gpu_buffers/frame_store.py",
        "self.index.write(lanes, numbers, starts, lengths, references)",
        "self.index.write(lanes, numbers + 1, starts, lengths, references)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton: the last byte of a frame is not stored",
        KERNELS + "gather.py",
        "tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES))",
        "tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES - 1))",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, fields: a time limit counts as an end",
        KERNELS + "gather.py",
        "tl.store(dones + row, done * (1 - timeout))",
        "tl.store(dones + row, done)",
        DEVICE[:1],
        kernels=True,
    ),
    Fault(
        "Triton, delta: a change of the last word is left out",
        KERNELS + "delta.py",
        "mask &= place < n_words",
        "mask &= place < n_words - 1",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, rle: values are read one byte too far",
        KERNELS + "rle.py",
        "value = load_integer(heap, values_at + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)",
        "value = load_integer(heap, values_at + 1 + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, append: the last byte of a frame is not stored",
        KERNELS + "append.py",
        "tl.store(ring + target + at, values, mask=at < SIZE)",
        "tl.store(ring + target + at, values, mask=at < SIZE - 1)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, delta: a word is stored without its last byte",
        KERNELS + "delta.py",
        "store_integer(heap, words_at + 4 * rank, value, emitted, 4)",
        "store_integer(heap, words_at + 4 * rank, value, emitted, 3)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, rle: the last run is one element short",
        KERNELS + "rle.py",
        "size = ((n_elements - last - 1) % LONGEST + 1).to(tl.int64)",
        "size = ((n_elements - last - 1) % LONGEST).to(tl.int64)",
        DEVICE[:2],
        kernels=True,
    ),
]
