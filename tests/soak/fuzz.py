"""Changes saved files so that all their checksums stay right, loads them, and reads everything in them.

    python -m tests.soak.fuzz --mutations 2000 --seed 0

Loading and reading must end in an error of this library, or give a buffer that can be read and added to. It must not
crash, hang, or ask for much memory: compiled code trusts its indices. Each file is tried in a process of its own kind,
with a limit of memory, so that all that can be told.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
import xxhash

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import ExtraBuffersError
from sb3_extra_buffers.persistence.container import BLOCK_BYTES, HEADER, MAGIC, Container, write
from tests.persistence.buffers import N_ENVS, RGB, SLOTS, add, draw, goal_env, make, steps_for

_AT_ONCE = 40
_SECONDS = 60
_MEMORY = 2 << 30
_ODD_NUMBERS = (-1, 0, 1, 2, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1)
_ODD_VALUES = (None, True, "", "delta", "zstd/3", [], {}, [[]], 1.5, -1.0, 1e300, {"$dtype": "<f8"}, {"$tuple": []})

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("CompressedReplayBuffer", {"compression_method": "none"}),
    "delta": ("CompressedReplayBuffer", {"compression_method": "delta", "frame_stack": 4}),
    "rle": ("CompressedReplayBuffer", {"compression_method": "rle"}),
    "rle-jit": ("CompressedReplayBuffer", {"compression_method": "rle-jit"}),
    "gzip": ("CompressedReplayBuffer", {"compression_method": "gzip1"}),
    "igzip": ("CompressedReplayBuffer", {"compression_method": "igzip1"}),
    "lz4-frame": ("CompressedReplayBuffer", {"compression_method": "lz4-frame/1"}),
    "lz4-block": ("CompressedReplayBuffer", {"compression_method": "lz4-block/1"}),
    "zstd": ("CompressedReplayBuffer", {"compression_method": "zstd/3"}),
    "zstd-dict": (
        "CompressedReplayBuffer",
        {"compression_method": "zstd-dict/3", "compression_kwargs": {"frames_per_record": 4}},
    ),
    "indexed": (
        "CompressedReplayBuffer",
        {"space": RGB, "frame_stack": 4, "compression_method": "delta", "compression_kwargs": {"indexed_colour": True}},
    ),
    "dict": ("CompressedDictReplayBuffer", {}),
    "prioritized": ("CompressedPrioritizedReplayBuffer", {"compression_method": "delta"}),
    "n-step": ("CompressedNStepReplayBuffer", {"compression_method": "delta", "n_steps": 3}),
    "her": ("CompressedHerReplayBuffer", {"compression_method": "none"}),
    "rollout": ("CompressedRolloutBuffer", {"compression_method": "delta"}),
    "recurrent": ("CompressedRecurrentRolloutBuffer", {"compression_method": "rle"}),
    "maskable": ("CompressedMaskableRolloutBuffer", {"compression_method": "zstd-dict/3"}),
    "device": ("GpuReplayBuffer", {"compression_method": "delta"}),
}


class FuzzError(AssertionError):
    """A file did something else than load or be refused."""


class Sample(NamedTuple):
    """A file as it was saved, taken apart, and a step that can be added to what is in it."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    step: Any


def sample(kind: str, path: Path) -> Sample:
    name, arguments = KINDS[kind]
    buffer = make(name, **arguments)
    transitions = steps_for(buffer, 2 * SLOTS + 9)
    for number, transition in enumerate(transitions):
        add(buffer, transition, number)
    buffer.save(path)
    with Container.open(path) as file:
        return Sample(file.meta, {name: file.read(name).copy() for name in file.arrays}, transitions[-1])


def mutated(original: Sample, chosen: random.Random) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """Another file, and what is different."""
    meta, arrays = copy.deepcopy(original.meta), dict(original.arrays)
    ways = [_change_value, _change_array, _change_array, _change_record, _change_shape]
    changes = [chosen.choice(ways)(meta, arrays, chosen) for _ in range(chosen.choice([1, 1, 1, 2, 5]))]
    return meta, arrays, "; ".join(changes)


def _change_value(meta: dict[str, Any], arrays: dict[str, np.ndarray], chosen: random.Random) -> str:
    way = chosen.choice(_leaves(meta))
    node: Any = meta
    for key in way[:-1]:
        node = node[key]
    old = node[way[-1]]
    if type(old) is int and chosen.random() < 0.7:
        new: Any = old + chosen.choice([-1, 1, 7, -7, 1000]) if chosen.random() < 0.5 else chosen.choice(_ODD_NUMBERS)
    else:
        new = copy.deepcopy(chosen.choice(_ODD_VALUES))
    node[way[-1]] = new
    return f"{'/'.join(map(str, way))}: {old!r:.40} -> {new!r}"


def _leaves(tree: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    below = [leaf for key, value in items for leaf in _leaves(value, (*way, key))]
    return below or [way]


def _change_array(meta: dict[str, Any], arrays: dict[str, np.ndarray], chosen: random.Random) -> str:
    """Numbers of an index, and of any other array."""
    name = chosen.choice([name for name in arrays if arrays[name].size and not name.endswith("arena/bytes")])
    array = arrays[name] = arrays[name].copy()
    flat = array.reshape(-1)
    places = [chosen.randrange(flat.size) for _ in range(chosen.choice([1, 1, 3, flat.size]))]
    how = chosen.choice(["odd", "near", "shuffle", "noise", "swap"])
    if how == "noise" or array.dtype.kind in "bf":
        for place in places:
            flat[place : place + 1].view(np.uint8)[:] = list(chosen.randbytes(array.itemsize))
            if array.dtype.kind == "b":
                flat[place] = bool(flat[place : place + 1].view(np.uint8)[0] % 2)
    elif how == "odd":
        flat[places] = np.array(chosen.choice(_ODD_NUMBERS) % 2**64, dtype=np.uint64).astype(array.dtype)
    elif how == "near":
        flat[places] += np.array(chosen.choice([1, 2, 3, 250]), dtype=np.int64).astype(array.dtype)
    elif how == "shuffle":
        np.random.default_rng(chosen.getrandbits(32)).shuffle(flat)
    else:
        flat[places] = flat[chosen.randrange(flat.size)]
    return f"{name}: {how} at {len(places)} places"


def _change_record(meta: dict[str, Any], arrays: dict[str, np.ndarray], chosen: random.Random) -> str:
    """Bytes of records, which kernels decode, among them the head of one."""
    names = [name for name in arrays if name.endswith("arena/bytes") and arrays[name].size]
    if not names:
        return "nothing"
    name = chosen.choice(names)
    data = arrays[name] = arrays[name].copy()
    starts = arrays.get(name.replace("arena/bytes", "starts"))
    for _ in range(chosen.choice([1, 4, 100])):
        at = chosen.randrange(data.size)
        if starts is not None and starts.size and chosen.random() < 0.7:
            at = int(starts.reshape(-1)[chosen.randrange(starts.size)]) + chosen.randrange(24)
        length = chosen.choice([1, 1, 2, 4, 8])
        data[at : at + length] = chosen.choice([0, 1, 127, 128, 255, chosen.randrange(256)])
    return f"{name}: bytes"


def _change_shape(meta: dict[str, Any], arrays: dict[str, np.ndarray], chosen: random.Random) -> str:
    name = chosen.choice(list(arrays))
    array = arrays[name]
    how = chosen.choice(["gone", "shorter", "longer", "other dtype", "flat"])
    if how == "gone":
        del arrays[name]
    elif how == "shorter" and array.ndim:
        arrays[name] = array[: chosen.randrange(len(array) + 1)]
    elif how == "longer" and array.ndim:
        arrays[name] = np.concatenate([array, array])
    elif how == "other dtype":
        arrays[name] = array.astype(chosen.choice(["u1", "i4", "u8", "f4", "f8"]))
    else:
        arrays[name] = array.reshape(-1)
    return f"{name}: {how}"


def forge_manifest(path: Path, chosen: random.Random) -> str:
    """Change where a file says that its blocks are, and how large its arrays are, with right checksums."""
    with Container.open(path) as file:
        manifest, end = json.loads(file.text), file.end
    name = chosen.choice(list(manifest["arrays"]))
    entry = manifest["arrays"][name]
    how = chosen.choice(["huge", "block", "swapped", "blocks", "overlong"])
    if how == "huge":  # of zeros, which take no room
        entry["shape"] = [chosen.choice([1 << 20, 1 << 28, 1 << 40, 1 << 62]), *entry["shape"][1:]]
        nbytes = math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
        entry["blocks"] = [None] * (-(-nbytes // BLOCK_BYTES) if nbytes < 1 << 34 else 1)
    elif how == "block" and entry["blocks"] and entry["blocks"][0]:
        entry["blocks"][0][0] = chosen.choice([*_ODD_NUMBERS, end, end - 1, end - 64, 127, 128, 192])
    elif how == "swapped":
        other = chosen.choice(list(manifest["arrays"].values()))
        entry["blocks"], other["blocks"] = other["blocks"], entry["blocks"]
    elif how == "blocks":
        entry["blocks"] = chosen.choice([None, [], [None], [[]], [[0, ""]], [[128, 5]], [["128", ""]], {}])
    else:
        entry[chosen.choice(["dtype", "shape", "blocks"])] = chosen.choice(
            [*_ODD_VALUES, "|O8", "<f16", [1] * 40, [-1]]
        )
    text = json.dumps(manifest).encode()
    header = HEADER.pack(MAGIC, 1, 0, 9, end, len(text), xxhash.xxh3_128_digest(text))
    with path.open("r+b") as file:
        file.write(header + xxhash.xxh3_128_digest(header))
        file.seek(end)
        file.write(text)
    return f"manifest, {name}: {how}"


def try_file(path: Path, step: Any, mmap: bool, env: Any) -> str:
    """Load a file and use all that is in it. Returns what came of it."""
    try:
        buffer: Any = BaseCompressedBuffer.load(path, "cpu", mmap=mmap, env=env)
    except ExtraBuffersError:
        return "refused"
    try:
        read_all(buffer)
        draw(buffer, 0)
        for number in range(SLOTS // 2):
            add(buffer, step, number)
        read_all(buffer)
        draw(buffer, 1)
    except ExtraBuffersError:
        return "found when read"
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        # The environments of this buffer are others than those of the step.
        if buffer.n_envs != N_ENVS or "shape" in str(error) or "broadcast" in str(error):
            return "of another kind"
        raise
    return "read"


def _env(kind: str) -> Any:
    return goal_env() if kind == "her" else None


def read_all(buffer: Any) -> None:
    slots = np.arange(min(buffer.buffer_size, 10 * SLOTS))
    for store in buffer._stores.values():
        for lane in range(min(buffer.n_envs, 4)):
            columns = range(len(store.ends)) if hasattr(store, "ends") else [0]
            store.read([(column, slots) for column in columns], np.full(len(slots), lane))


def run(kind: str, mutations: int, seed: int, folder: Path, report: Callable[[str], object] = str) -> dict[str, int]:
    """Try files of one kind. Each of them comes from the seed and its number."""
    th.set_num_threads(1)  # others would not survive the fork
    folder.mkdir(parents=True, exist_ok=True)
    original = sample(kind, folder / "original")
    try_file(folder / "original", original.step, False, _env(kind))  # has everything imported and compiled
    outcomes: dict[str, int] = {}
    for first in range(0, mutations, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, mutations))
        for outcome in _in_a_fork(kind, numbers, seed, folder, original):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        report(f"{kind}: {outcomes}")
    return outcomes


def _in_a_fork(kind: str, numbers: range, seed: int, folder: Path, original: Sample) -> list[str]:
    log = folder / "log"
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _try_numbers(kind, numbers, seed, folder, original, log)
            status = 0
        except BaseException:
            with log.open("a") as file:
                file.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    if status != 0:
        how = lines[-1].get("error") or f"ended by {signal.Signals(-status).name if status < 0 else status}"
        tried = next(line for line in reversed(lines) if "number" in line)
        raise FuzzError(f"{kind}, seed {seed}, file {tried['number']} ({tried['change']}), kept in {folder}: {how}")
    return [line["outcome"] for line in lines if "outcome" in line]


def _try_numbers(kind: str, numbers: range, seed: int, folder: Path, original: Sample, log: Path) -> None:
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # nobody waits for these files
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Of addresses, not of memory: what a file claims and nobody touches costs nothing.
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY, resource.RLIM_INFINITY))
    with log.open("a", buffering=1) as file:
        for number in numbers:
            chosen = random.Random(f"{kind} {seed} {number}")
            path = folder / "changed"
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            if chosen.random() < 0.15:
                shutil.copy(folder / "original", path)
                change = forge_manifest(path, chosen)
            else:
                meta, arrays, change = mutated(original, chosen)
                write(path, meta, arrays)
            file.write(json.dumps({"number": number, "change": change}) + "\n")
            signal.alarm(_SECONDS)
            outcome = try_file(path, original.step, chosen.random() < 0.3, _env(kind))
            signal.alarm(0)
            file.write(json.dumps({"outcome": outcome}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000, help="for each kind of buffer")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kind", choices=sorted(KINDS), action="append")
    arguments = parser.parse_args()
    sys.stdout.write(f"seed {arguments.seed}\n")
    failures = []
    for kind in arguments.kind or KINDS:
        folder = Path(tempfile.mkdtemp(prefix="fuzzed-"))

        def report(line: str) -> None:
            sys.stdout.write(f"\r\x1b[K{line}" if sys.stdout.isatty() else "")
            sys.stdout.flush()

        try:
            outcomes = run(kind, arguments.mutations, arguments.seed, folder, report)
        except FuzzError as error:
            failures.append(str(error))
            sys.stdout.write(f"\n{error}\n")
            continue
        sys.stdout.write(f"{kind}: {outcomes}\n")
        shutil.rmtree(folder)
    sys.exit(len(failures))


if __name__ == "__main__":
    main()
