"""A column of a store as a tensor: whatever is done to it has the same result as with a plain tensor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.observation_tensor import ObservationTensor, TensorColumns, decode, deferred_decoding

SHAPE = (2, 12, 10)
N_SLOTS, N_ENVS = 20, 3


def columns_and_plain(lead: tuple[int, ...], method: str = "delta", dtype: str = "uint8") -> tuple[TensorColumns, list]:
    config = StorageConfig.from_arguments(method, None, None, None, "auto")
    store = ObservationStore(N_SLOTS, N_ENVS, SHAPE, np.dtype(dtype), config, n_columns=2)
    columns = TensorColumns(store)
    tensors = [columns.column(number, lead) for number in (0, 1)]
    plain = [th.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    rng = np.random.default_rng(0)
    for ours, theirs in zip(tensors, plain, strict=True):
        values = frames(rng, theirs.shape, theirs.dtype)
        ours[:] = values
        theirs[:] = values
    return columns, list(zip(tensors, plain, strict=True))


def frames(rng: np.random.Generator, shape: tuple[int, ...], dtype: th.dtype) -> th.Tensor:
    """Few different values, so that frames are often shared."""
    return th.from_numpy(rng.integers(0, 2, shape)).to(dtype) * 7


READS: list[Callable[[th.Tensor], object]] = [
    lambda t: t[3],
    lambda t: t[-2:],
    lambda t: t[1:15:3],
    lambda t: t[[4, 2, 2]],
    lambda t: t[th.tensor([5, -1])],
    lambda t: t[th.tensor([[0, 1], [2, 3]])],
    lambda t: t[th.arange(len(t)) % 3 == 1],
    lambda t: t[...],
    lambda t: t[None],
    lambda t: t[:, 1],
    lambda t: t[..., 4],
    lambda t: t[2:9, ..., ::2],
    lambda t: t[4:8][th.tensor([1, 3])],
    lambda t: t.unsqueeze(1)[7],
    lambda t: t.flatten(1),
    lambda t: t.reshape(2, -1, *SHAPE),
    lambda t: t.transpose(-1, -2)[3],
    lambda t: t.select(-4, 2) if t.ndim == 4 else t.select(-4, 1),
    lambda t: t.unbind(0)[5],
    lambda t: t.split(6)[2],
    lambda t: t.split(1, -1)[3],
    lambda t: t.expand(2, *t.shape)[1, 4],
    lambda t: t.clone(),
    lambda t: t + 1,
    lambda t: t.sum(),
    lambda t: th.cat([t[:2], t[5:6]]),
    lambda t: th.stack(list(t.unbind(0))),
    lambda t: t.float().mean(0),
    lambda t: t == t.clone(),
    lambda t: t.gather(0, th.zeros((1, *t.shape[1:]), dtype=th.int64)),
]


@pytest.mark.parametrize("lead", [(N_SLOTS * N_ENVS,), (N_SLOTS, N_ENVS), (57,)], ids=str)
@pytest.mark.parametrize("i", range(len(READS)))
def test_reading_is_as_with_a_plain_tensor(lead: tuple[int, ...], i: int) -> None:
    if lead == (57,) and i == 15:
        pytest.skip("an odd number of rows")
    _, tensors = columns_and_plain(lead)
    for ours, theirs in tensors:
        found, expected = READS[i](ours), READS[i](theirs)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert th.equal(found.clone(), expected)


def write(t: th.Tensor, kind: int, rng: np.random.Generator) -> None:
    n = len(t)
    rows = th.from_numpy(rng.permutation(n)[: rng.integers(1, 12)])
    first = int(rng.integers(0, n - 5))
    if kind == 0:
        t[int(rows[0])] = frames(rng, t.shape[1:], t.dtype)
    elif kind == 1:
        t[rows] = frames(rng, (len(rows), *t.shape[1:]), t.dtype)
    elif kind == 2:
        t[first : first + 4] = frames(rng, (4, *t.shape[1:]), t.dtype)
    elif kind == 3:
        t[first : first + 5, ..., 3] = 9
    elif kind == 4:
        t[th.from_numpy(rng.integers(0, 4, n) == 0)] = 5
    elif kind == 5:
        t[first : first + 3].zero_()
    elif kind == 6:
        t[first].add_(1)
    elif kind == 7:
        th.stack([t[0].clone(), t[1].clone()], out=t[first : first + 2])
    elif kind == 8:
        t.index_put_((rows,), th.ones((), dtype=t.dtype).expand(len(rows), *t.shape[1:]), accumulate=True)
    else:
        th._foreach_copy_([t[first], t[first + 1]], [t[first + 2].clone(), t[first + 3].clone()])


@pytest.mark.parametrize("lead", [(N_SLOTS * N_ENVS,), (N_SLOTS, N_ENVS)], ids=str)
@pytest.mark.parametrize(("method", "dtype"), [("delta", "uint8"), ("auto", "uint8"), ("none", "float32")])
def test_long_histories_of_writes(lead: tuple[int, ...], method: str, dtype: str) -> None:
    columns, tensors = columns_and_plain(lead, method, dtype)
    rng = np.random.default_rng(1)
    for _ in range(150):
        number, kind, seed = rng.integers(2), int(rng.integers(10)), int(rng.integers(1 << 30))
        for tensor in tensors[number]:
            write(tensor, kind, np.random.default_rng(seed))
        for ours, theirs in tensors:
            assert th.equal(ours.clone(), theirs), kind
    columns.store.check()


def test_columns_that_are_written_together_share_frames() -> None:
    sizes = []
    rng = np.random.default_rng(2)
    observations = th.from_numpy(rng.integers(0, 256, (N_SLOTS + 1, *SHAPE), dtype=np.uint8))
    for together in (True, False):
        config = StorageConfig.from_arguments("none", None, None, None, None)
        columns = TensorColumns(ObservationStore(N_SLOTS, 1, SHAPE, np.dtype(np.uint8), config, n_columns=2))
        tensors = [columns.column(number, (N_SLOTS,)) for number in (0, 1)]
        if together:
            with columns.together():
                tensors[0][:], tensors[1][:] = observations[:-1], observations[1:]
        else:
            tensors[0][:], tensors[1][:] = observations[:-1], observations[1:]
        assert th.equal(tensors[0].clone(), observations[:-1])
        assert th.equal(tensors[1].clone(), observations[1:])
        sizes.append(int(columns.store.frames.heads[0]))
    assert sizes == [N_SLOTS + 1, 2 * N_SLOTS]


def test_next_observations_of_several_steps_later_share_frames_with_each_other() -> None:
    """With n-step returns, writing row by row would share nothing."""
    rng = np.random.default_rng(3)
    single = rng.integers(0, 256, (60, 12, 10), dtype=np.uint8)
    stacks = th.from_numpy(np.stack([single[:-1], single[1:]], axis=1))
    config = StorageConfig.from_arguments("none", None, None, None, 2)
    columns = TensorColumns(ObservationStore(50, 1, SHAPE, np.dtype(np.uint8), config, n_columns=2))
    tensors = [columns.column(number, (50,)) for number in (0, 1)]
    with columns.together():
        tensors[0][:], tensors[1][:] = stacks[:50], stacks[5:55]
    assert th.equal(tensors[0].clone(), stacks[:50])
    assert th.equal(tensors[1].clone(), stacks[5:55])
    assert columns.store.frames.heads[0] == 51 + 51


def test_two_columns_are_decoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, tensors = columns_and_plain((N_SLOTS * N_ENVS,))
    calls = []
    fill = columns.store.fill
    monkeypatch.setattr(columns.store, "fill", lambda wanted, *rest: (calls.append(len(wanted)), fill(wanted, *rest)))
    rows = th.tensor([8, 3, 59])
    with deferred_decoding():
        chosen = [ours[rows] for ours, _ in tensors]
    assert all(isinstance(part, ObservationTensor) for part in chosen)
    for found, (_, theirs) in zip(decode(chosen), tensors, strict=True):
        assert th.equal(found, theirs[rows])
    assert calls == [2]


def test_an_error_while_writing_together_changes_nothing() -> None:
    columns, ((ours, theirs), _) = columns_and_plain((N_SLOTS * N_ENVS,))

    def write_what_does_not_fit() -> None:
        with columns.together():
            ours[:5] = 1
            ours[:5] = th.zeros(4, *SHAPE)

    with pytest.raises(RuntimeError):
        write_what_does_not_fit()
    assert th.equal(ours.clone(), theirs)
    ours[:5] = 1
    assert (ours[:5] == 1).all()


def test_copies_and_pickles_have_a_store_of_their_own() -> None:
    _, pairs = columns_and_plain((N_SLOTS, N_ENVS))
    tensors = [ours for ours, _ in pairs]
    for copied in (copy.deepcopy(tensors), pickle.loads(pickle.dumps(tensors))):
        assert copied[0]._columns is copied[1]._columns  # one store for both, as before
        for twin, (ours, theirs) in zip(copied, pairs, strict=True):
            assert isinstance(twin, ObservationTensor)
            twin[0] = 77
            assert (twin[0] == 77).all()
            assert th.equal(ours.clone(), theirs)
            assert th.equal(twin[1:].clone(), theirs[1:])


def test_numpy() -> None:
    _, ((ours, theirs), _) = columns_and_plain((N_SLOTS, N_ENVS))
    np.testing.assert_array_equal(ours[3:5].numpy(), theirs[3:5].numpy())
    np.testing.assert_array_equal(np.asarray(ours[3]), theirs[3].numpy())
    np.testing.assert_array_equal(np.array(ours[3], dtype=np.float32), theirs[3].numpy())
    with pytest.raises(ValueError, match="copy"):
        ours[3].__array__(copy=False)
    assert ours[0, 0, 0, 0].tolist() == theirs[0, 0, 0, 0].tolist()
    assert "ObservationTensor(shape=(20, 3, 2, 12, 10), dtype=torch.uint8" in repr(ours)


def test_numpy_decodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, ((ours, _), _) = columns_and_plain((N_SLOTS, N_ENVS))
    calls, fill = [], columns.store.fill
    monkeypatch.setattr(columns.store, "fill", lambda wanted, *rest: (calls.append(len(wanted)), fill(wanted, *rest)))
    np.asarray(ours)
    assert calls == [1]


def test_the_last_value_for_a_row_counts() -> None:
    _, ((ours, theirs), _) = columns_and_plain((N_SLOTS * N_ENVS,))
    values = (
        frames(np.random.default_rng(4), (3, *SHAPE), th.uint8)
        + th.tensor([1, 2, 3], dtype=th.uint8)[:, None, None, None]
    )
    ours[th.tensor([3, 3, 4])] = values  # as many rows as there are environments, but not one of each
    theirs[3], theirs[4] = values[1], values[2]
    assert th.equal(ours.clone(), theirs)
