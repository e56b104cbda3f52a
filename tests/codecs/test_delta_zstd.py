"""``delta-zstd``: dictionaries come and go while records that need them stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs import delta_zstd, libzstd
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.pickling import unpickled

pytest.importorskip("zstandard", exc_type=ImportError)
FRAME = FrameSpec(600, np.dtype(np.uint8), row_bytes=30)
N_LANES = 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dictionaries that are renewed all the time."""
    for name, value in {"_DICTIONARY_BYTES": 2048, "_FIRST_BYTES": 512, "_SAMPLE_BYTES": 256}.items():
        monkeypatch.setattr(delta_zstd, name, value)
    monkeypatch.setattr(delta_zstd, "_BASELINE_RECORDS", 4)
    monkeypatch.setattr(delta_zstd, "_RENEWAL_FACTOR", 0.1)


class Played:
    """A few objects that move, with another texture every now and then."""

    def __init__(self, codec: Any, seed: int = 0) -> None:
        self.codec, self.random = codec, np.random.default_rng(seed)
        self.screens = self.random.integers(0, 256, (N_LANES, FRAME.nbytes), dtype=np.uint8)

    def records(self) -> Bytes:
        frames = np.empty((N_LANES, self.codec.frames_per_record, FRAME.nbytes), dtype=np.uint8)
        for frame in frames.swapaxes(0, 1):
            places = self.random.integers(0, FRAME.nbytes - 9, 4)
            for place in places:
                self.screens[:, place : place + 9] = np.arange(9) * self.random.integers(1, 28)
            if self.random.random() < 0.02:
                self.screens[self.random.integers(N_LANES)] = self.random.integers(0, 256, FRAME.nbytes)
            frame[:] = self.screens
        return frames.reshape(N_LANES, -1)


def decoded(codec: Any, record: Bytes, reference: int) -> Bytes:
    out = np.empty((1, codec.record_bytes), dtype=np.uint8)
    codec.decode(record, np.zeros(1, np.int64), np.array([len(record)]), np.array([reference]), out)
    return out[0]


@pytest.mark.usefixtures("small")
def test_records_keep_their_dictionaries() -> None:
    codec: Any = create_codec("delta-zstd", FRAME, frames_per_record=4)
    game, kept = Played(codec, seed=1), []
    most_dictionaries = 0
    for step in range(150):
        records = game.records()
        if step % 20 == 19:
            records[step // 20 % N_LANES, : FRAME.nbytes] = 0  # no reason for a new reference, not even now
        encoded = codec.encode(records, np.arange(N_LANES))
        parts = np.split(encoded.data, np.cumsum(encoded.lengths)[:-1])
        kept += list(zip(parts, encoded.references.tolist(), records, strict=True))
        gone, kept = kept[:-60], kept[-60:]
        codec.release(np.array([reference for _, reference, _ in gone], dtype=np.int64))
        codec.check(np.array([reference for _, reference, _ in kept]))
        most_dictionaries = max(most_dictionaries, len({id(one) for one in codec._dictionaries.values()}))
        for part, reference, record in kept[:: 7 if step % 10 else 1]:
            np.testing.assert_array_equal(decoded(codec, part, reference), record)
    assert codec._n_made > 4
    assert most_dictionaries > 2, "never were several in use"


@pytest.mark.usefixtures("small")
def test_a_new_dictionary_before_a_frame_of_zeros() -> None:
    """The lane keeps its reference, which stands for the dictionary before."""
    codec: Any = create_codec("delta-zstd", FRAME, frames_per_record=4)
    game = Played(codec)
    while not (codec._n_made and codec._is_due):
        codec.encode(game.records(), np.arange(N_LANES))
    before = codec._current.copy()
    records = game.records()
    records[1, : FRAME.nbytes] = 0
    encoded = codec.encode(records, np.arange(N_LANES))
    assert (codec._current == before).tolist() == [False, True, False]
    for part, reference, record in zip(
        np.split(encoded.data, np.cumsum(encoded.lengths)[:-1]), encoded.references.tolist(), records, strict=True
    ):
        np.testing.assert_array_equal(decoded(codec, part, reference), record)


@pytest.mark.usefixtures("small")
def test_untrusted_states_are_errors() -> None:
    codec: Any = create_codec("delta-zstd", FRAME, frames_per_record=4)
    game = Played(codec)
    while codec._n_made < 2:
        codec.encode(game.records(), np.arange(N_LANES))
    state: Any = codec.state()
    create_codec("delta-zstd", FRAME, frames_per_record=4).restore(unpickled(state))
    wrong: dict[str, Any] = {
        "dictionary_numbers": state["dictionary_numbers"] + 99,
        "recent_lengths": state["recent_lengths"][:-1],
        "dictionaries": {},
    }
    if libzstd.decompress_function():
        broken = state["dictionaries"]["0"].copy()
        broken[4:60] ^= 0xFF  # its entropy tables
        wrong["dictionaries "] = {**state["dictionaries"], "0": broken}
    for name, value in wrong.items():
        with pytest.raises(CorruptDataError, match=name.strip()):
            create_codec("delta-zstd", FRAME, frames_per_record=4).restore(unpickled({**state, name.strip(): value}))
    for content in (codec.reference_content(1)[:-1].copy(), np.zeros(10, dtype=np.uint8)):
        if len(content) > FRAME.nbytes:
            content[FRAME.nbytes + 4 : FRAME.nbytes + 60] ^= 0xFF
            if not libzstd.decompress_function():
                continue
        with pytest.raises(CorruptDataError):
            codec.import_reference(content)


@pytest.mark.parametrize("method", ["delta-zstd", "zstd-dict"])
def test_add_does_not_wait_long_for_a_dictionary(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entropy tables are made from a few records, whatever their size."""
    frame, made = FrameSpec(84 * 84 * 3, np.dtype(np.uint8)), []
    make = libzstd.make_dictionary

    def watched(content: bytes, samples: list[bytes]) -> bytes:
        made.append((len(content), sum(map(len, samples)), max(map(len, samples))))
        return make(content, samples)

    monkeypatch.setattr(libzstd, "make_dictionary", watched)
    codec = create_codec(method, frame, frames_per_record=8)
    random = np.random.default_rng(0)
    screen = random.integers(0, 256, frame.nbytes, dtype=np.uint8)
    for _ in range(60):
        frames = []
        for _ in range(8):
            place = random.integers(0, frame.nbytes - 3000)
            screen[place : place + 3000] = random.integers(0, 256, 3000)
            frames.append(screen.copy())
        codec.encode(np.concatenate(frames)[None], np.zeros(1, dtype=np.int64))
    assert made
    for content, samples, largest in made:
        assert content <= 1 << 20
        assert samples <= (1 << 17) + largest


@pytest.mark.usefixtures("small")
def test_a_codec_without_its_encoder_still_encodes() -> None:
    codec: Any = create_codec("delta-zstd", FRAME, frames_per_record=4)
    game, lanes = Played(codec), np.arange(N_LANES)
    for step in range(60):
        if step in (20, 40):
            assert codec._dictionary.content
            codec.free_encoder()
        records = game.records()
        data, lengths, references = codec.encode(records, lanes)
        for record, row, reference in zip(np.split(data, np.cumsum(lengths)[:-1]), records, references, strict=True):
            assert np.array_equal(decoded(codec, record, int(reference)), row)


@pytest.mark.usefixtures("small")
def test_the_encoder_can_be_freed_when_a_dictionary_is_due() -> None:
    codec: Any = create_codec("delta-zstd", FRAME, frames_per_record=4)
    game, lanes = Played(codec), np.arange(N_LANES)
    while not codec._is_due:
        codec.encode(game.records(), lanes)
    codec.free_encoder()
    records = game.records()
    data, lengths, references = codec.encode(records, lanes)
    for record, row, reference in zip(np.split(data, np.cumsum(lengths)[:-1]), records, references, strict=True):
        assert np.array_equal(decoded(codec, record, int(reference)), row)


@pytest.mark.parametrize("n_changed", [100, 3000])
def test_records_are_in_a_dictionary_or_samples_for_its_tables_but_never_both(
    n_changed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a single record is large enough to make tables of."""
    made, make = [], libzstd.make_dictionary
    monkeypatch.setattr(libzstd, "make_dictionary", lambda *given: made.append(given) or make(*given))
    frame, random = FrameSpec(5000, np.dtype(np.uint8)), np.random.default_rng(0)
    codec: Any = create_codec("delta-zstd", frame)
    frames = np.zeros((8, frame.nbytes), dtype=np.uint8)
    while len(made) < 2:
        frames[:, random.permutation(frame.nbytes)[:n_changed]] = random.integers(0, 256, (8, n_changed))
        codec.encode(frames.reshape(1, -1), np.zeros(1, dtype=np.int64))
    for content, samples in made:
        assert len(set(samples)) == len(samples)
        assert not any(sample in content for sample in samples)
