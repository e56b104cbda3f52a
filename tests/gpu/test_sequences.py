"""Sequences on a device: the same batches as from the buffers in host memory, and nothing waits for the device."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers import compressed, gpu_buffers
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.gpu_buffers import GpuSequenceReplayBuffer
from tests.environments import SpaceEnv
from tests.gpu.helpers import IMAGES, SPACES
from tests.gpu.test_atomic import check_ctrl_c
from tests.gpu.test_same_batches import waiting_is_an_error
from tests.transitions import Transition, assert_same, copied, play, sample_both

N_ENVS, SLOTS = 2, 12
SMALL: dict[str, spaces.Space] = {
    "images": spaces.Box(0, 255, (2, 4, 3), np.uint8),
    "float32": SPACES["float32"],
    "uint16": spaces.Box(0, 65535, (3,), np.uint16),
}
SMALL["Dict"] = spaces.Dict(dict(SMALL))
LATENTS = {"state": (2, 3), "flag": ((), "bool"), "code": ((2,), "uint16")}
ENDS = ["pad", "stop", "cross"]


def pair(space: spaces.Space, device: str, slots: int = SLOTS, kind: str = "Sequence", **options: Any) -> list[Any]:
    """A buffer in host memory and one on the device."""
    kind = f"Dict{kind}" if isinstance(space, spaces.Dict) else kind
    classes = getattr(compressed, f"Compressed{kind}ReplayBuffer"), getattr(gpu_buffers, f"Gpu{kind}ReplayBuffer")
    arguments = {"length": 3, "burn_in": 1, "bootstrap_steps": 1, "latents": LATENTS, **options}
    on_device = {key: arguments.pop(key) for key in ("buffer_device",) if key in arguments}
    host, ours = (
        cls(slots * N_ENVS, space, spaces.Discrete(5), device, N_ENVS, **arguments, **more)
        for cls, more in zip(classes, ({}, on_device), strict=True)
    )
    return [host, ours]


def latents_for(number: int, shape: tuple[int, ...] = (N_ENVS,)) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "state": rng.normal(size=(*shape, 2, 3)).astype(np.float32),
        "flag": rng.random(shape) < 0.5,
        "code": rng.integers(0, 65536, (*shape, 2)).astype(np.uint16),
    }


def tensors(values: Any, device: str) -> Any:
    if isinstance(values, dict):
        return {key: tensors(part, device) for key, part in values.items()}
    return th.tensor(values, device=device)


def on_device(step: Transition, device: str) -> Transition:
    timeouts = np.array([info.get("TimeLimit.truncated", False) for info in step.infos])
    return Transition(
        *(tensors(part, device) for part in step[:-1]),
        {"TimeLimit.truncated": tensors(timeouts, device)},  # type: ignore[arg-type]  # for device environments
    )


def fill(buffers: list[Any], n_steps: int, device: str, from_device: Any = lambda number: False, seed: int = 0) -> None:
    host, ours = buffers
    for number, step in enumerate(itertools.islice(play(host.observation_space, N_ENVS, seed), n_steps)):
        latents = latents_for(number) if number % 4 else {"state": latents_for(number)["state"]}
        host.add(*copied(step), latents=latents)
        if from_device(number):
            ours.add(*on_device(step, device), latents=tensors(latents, device))
        else:
            ours.add(*copied(step), latents=latents)


def compare(buffers: list[Any], batch_size: int = 5, env: Any = None) -> None:
    host, ours = buffers
    assert ours.n_sequences == host.n_sequences
    sample_both(host, ours, batch_size, seed=0, env=env)
    assert_same(ours.episode_steps, host.episode_steps)
    for name in host.latents:
        assert_same(getattr(ours, f"latent_{name}").cpu().numpy(), getattr(host, f"latent_{name}"))
    ours.check()


@pytest.mark.usefixtures("either_way")
class TestSameBatches:
    @pytest.mark.parametrize("at_episode_end", ENDS)
    @pytest.mark.parametrize("space", SMALL)
    def test_from_the_host(self, space: str, at_episode_end: str, device: str) -> None:
        options = {"include_next_observations": at_episode_end == "stop", "time_first": at_episode_end == "cross"}
        buffers = pair(SMALL[space], device, at_episode_end=at_episode_end, **options)
        for seed in range(2):
            fill(buffers, 9, device, seed=seed)  # a gap, and more steps than the buffer holds
            compare(buffers)

    @pytest.mark.parametrize("space", ["images", "Dict"])
    def test_from_the_device(self, space: str, device: str) -> None:
        buffers = pair(SMALL[space], device)
        fill(buffers, 18, device, from_device=lambda number: number % 5 < 3)
        compare(buffers)

    @pytest.mark.parametrize("method", ["delta", "rle", "zstd", "none"])
    def test_methods(self, method: str, device: str) -> None:
        buffers = pair(SMALL["images"], device, compression_method=method, frame_stack=2)
        fill(buffers, 18, device)
        compare(buffers)

    def test_by_priority(self, device: str) -> None:
        buffers = pair(SMALL["images"], device, kind="PrioritizedSequence")
        for seed in range(2):
            fill(buffers, 9, device, seed=seed)
            errors = np.linspace(-1, 2, 20).reshape(4, 5)
            for buffer in buffers:
                np.random.seed(1)
                batch = buffer.sample(4)
                buffer.update_priorities(batch.sequences, th.tensor(errors, device=device), batch.mask)
            compare(buffers)

    def test_normalized(self, device: str) -> None:
        env = VecNormalize(DummyVecEnv([lambda: SpaceEnv(SMALL["float32"])]), clip_reward=0.5)
        env.obs_rms.mean, env.obs_rms.var = np.arange(5) / 3, np.arange(1, 6) / 7
        env.ret_rms.var = np.array(3.0)
        buffers = pair(SMALL["float32"], device, include_next_observations=True)
        fill(buffers, 9, device)
        compare(buffers, env=env)

    def test_of_another_device_than_the_batches(self, device: str) -> None:
        buffers = pair(SMALL["images"], device, buffer_device="cpu")
        fill(buffers, 18, device)
        compare(buffers)


class TestLatents:
    @pytest.mark.parametrize("source", ["host", "device"])
    def test_updates(self, source: str, device: str) -> None:
        """Steps that come several times, that were overwritten meanwhile, and padding."""
        buffers = pair(SMALL["float32"], device)
        fill(buffers, 10, device)
        batches = []
        for buffer in buffers:
            np.random.seed(0)
            batches.append(buffer.sample(30))
        fill(buffers, 5, device, seed=3)
        values = latents_for(9, batches[0].positions.shape)
        for buffer, batch in zip(buffers, batches, strict=True):
            given = tensors(values, device) if source == "device" else values
            buffer.update_latents(batch.positions, given)
            buffer.update_latents(batch.positions[:, 2:], {"state": 2 * given["state"][:, 2:]})
        compare(buffers)

    def test_the_state_that_a_network_computes(self, device: str) -> None:
        _, ours = buffers = pair(SMALL["float32"], device)
        fill(buffers, 10, device)
        batch = ours.sample(4)
        state = batch.latents["state"].clone().requires_grad_() + 1
        ours.update_latents(th.tensor(batch.positions, device=device), {"state": state})
        again = ours._sequences_at(*np.divmod(np.arange(4), N_ENVS), None)
        assert not again.latents["state"].requires_grad
        assert ours.latent_state.device.type == th.device(device).type
        assert ours.device_bytes >= sum(getattr(ours, f"latent_{name}").nbytes for name in LATENTS)

    @pytest.mark.parametrize("source", ["host", "device"])
    def test_that_do_not_fit(self, source: str, device: str) -> None:
        _, ours = buffers = pair(SMALL["float32"], device)
        fill(buffers, 6, device)
        step = next(play(SMALL["float32"], N_ENVS))
        wrong: Any = {"state": np.zeros((N_ENVS, 3, 2), np.float32)}
        with pytest.raises(ValueError, match=r"\(2, 2, 3\).*\(2, 3, 2\)|\(2,3,2\).*\(2,2,3\)"):
            ours.add(*step, latents=tensors(wrong, device) if source == "device" else wrong)
        with pytest.raises(ConfigurationError, match=r"must have the shape \(4, 5, 2, 3\), not \(4, 5\)"):
            ours.update_latents(ours.sample(4).positions, {"state": th.zeros((4, 5), device=device)})
        compare(buffers)


@pytest.mark.usefixtures("either_way")
class TestElsewhere:
    """Files, pickles and copies, and buffers that move."""

    @pytest.mark.parametrize("how", ["file", "pickle", "copy", "there and back"])
    def test_the_same(self, how: str, device: str, tmp_path: Path) -> None:
        host, ours = pair(SMALL["Dict"], device)
        fill([host, ours], 16, device)
        if how == "file":
            ours.save(tmp_path / "buffer")
            ours = gpu_buffers.GpuDictSequenceReplayBuffer.load(tmp_path / "buffer", device)
        elif how == "there and back":
            ours.to("cpu")
            assert ours.latent_state.device.type == "cpu"
            ours.sample(1)
            ours.to(device)
        else:
            ours = pickle.loads(pickle.dumps(ours)) if how == "pickle" else copy.deepcopy(ours)
        compare([host, ours])
        fill([host, ours], 3, device, seed=1)
        compare([host, ours])
        assert ours.latent_state.device.type == th.device(device).type


@pytest.mark.usefixtures("either_way")
class TestGaps:
    @pytest.mark.parametrize("written", ["observations", "next_observations"])
    @pytest.mark.parametrize("space", ["images", "float32"])
    def test_nothing_continues_what_was_written_by_index(self, space: str, written: str, device: str) -> None:
        """A step begins with what was sent to the device last, or with what the step before led to until then."""
        buffers = pair(SMALL[space], device, compression_method="delta" if space == "images" else "none")
        steps = list(itertools.islice(play(SMALL[space], N_ENVS, episode_end=0, surprise=0), 7))
        for buffer in buffers:
            for step in steps[:6]:
                buffer.add(*copied(step))
            if written == "observations":
                buffer.observations[2] = steps[1].obs
                buffer.add(*copied(steps[1]))
            else:
                buffer.next_observations[5] = steps[1].obs
                buffer.add(*copied(steps[6]))
        assert buffers[0].episode_steps[6].tolist() == [0, 0]
        compare(buffers)

    @pytest.mark.parametrize("space", ["images", "float32"])
    def test_nothing_continues_what_was_cleared(self, space: str, device: str) -> None:
        buffers = pair(SMALL[space], device, compression_method="delta" if space == "images" else "none")
        steps = list(itertools.islice(play(SMALL[space], N_ENVS, episode_end=0, surprise=0), 12))
        for number, step in enumerate(steps):
            for buffer in buffers:
                if number == 5:
                    buffer.reset()
                buffer.add(*copied(step))
        compare(buffers)

    @pytest.mark.parametrize("space", ["images", "float32"])
    def test_a_step_that_is_stored_again_after_an_error(self, space: str, device: str, monkeypatch: Any) -> None:
        """Nothing happens in it, so its observation is what was sent to the device last."""
        buffers = pair(SMALL[space], device, compression_method="delta" if space == "images" else "none")
        fill(buffers, 6, device)
        step = next(play(SMALL[space], N_ENVS, seed=5))
        step = step._replace(next_obs=step.obs)
        buffers[0].add(*copied(step))
        fields = buffers[1]._fields

        def fail_once(*args: Any, **options: Any) -> None:
            monkeypatch.delattr(fields, "write")
            raise RuntimeError("cut short")

        monkeypatch.setattr(fields, "write", fail_once)
        with pytest.raises(RuntimeError, match="cut short"):
            buffers[1].add(*copied(step))
        assert buffers[1].pos == 7
        assert buffers[1].episode_steps[6].tolist() == [0, 0]
        compare(buffers)


def test_inference_mode(device: str) -> None:
    with th.inference_mode():
        buffers = pair(SMALL["Dict"], device)
        fill(buffers, 9, device, from_device=lambda number: number % 2)
        batch = buffers[1].sample(4)
    buffers[1].update_latents(batch.positions, {"state": batch.latents["state"]})
    compare(buffers)
    buffers[1].sample(4).latents["state"].add_(1)
    fill(buffers, 9, device, seed=1)
    compare(buffers)


@pytest.mark.parametrize("source", ["host", "device"])
def test_ctrl_c_at_any_line_of_add_and_sample(source: str, either_way: str, device: str) -> None:
    if (either_way, device) == ("kernels", "cpu"):
        pytest.skip("takes minutes in Triton's interpreter")
    space = spaces.Box(0, 255, (4, 6, 6), np.uint8)
    buffers = pair(space, device, slots=24, compression_method="delta", frame_stack=4)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 9, size=(2, 4, 6, 6), dtype=np.uint8)
    check_ctrl_c(*buffers, frames, rng, device if source == "device" else "host", 300)
    compare(buffers)


@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("space", [IMAGES, SMALL["Dict"]], ids=["images", "Dict"])
def test_nothing_waits_for_the_device_cuda(space: spaces.Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a step that continues the one before, nor a batch, nor latents that are written back."""
    from sb3_extra_buffers.gpu_buffers import frame_store

    monkeypatch.setattr(frame_store, "_RING_FRAMES", 500)  # a full ring is waited for
    buffers = pair(space, "cuda", slots=200, frame_stack="auto")
    fill(buffers, 150, "cuda")
    compare(buffers)  # compiles
    ours = buffers[1]
    steps = list(itertools.islice(play(space, N_ENVS, seed=1, episode_end=0, surprise=0), 20))
    ours.add(*copied(steps[0]))
    given = tensors(latents_for(0), "cuda")
    values = tensors(latents_for(1, (8, 5)), "cuda")
    batch = ours.sample(8)
    th.cuda.synchronize()
    with waiting_is_an_error():
        for step in steps[1:]:
            ours.add(*step, latents=given)
            batch = ours.sample(8)
            ours.update_latents(batch.positions, values)
    ours.check()


def test_names_of_options_are_shown() -> None:
    with pytest.raises(TypeError, match="Did you mean 'burn_in'"):
        GpuSequenceReplayBuffer(50, IMAGES, spaces.Discrete(2), "cpu", length=3, burnin=3)
