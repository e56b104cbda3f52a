"""Training with these buffers is training with SB3's, to the last bit, and survives saving and loading."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch as th
from stable_baselines3 import DQN, PPO

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from tests.environments import SpaceEnv
from tests.gpu.helpers import IMAGES, SPACES

EXAMPLES = Path(__file__).parents[2] / "examples"


def weights(model: Any) -> list[th.Tensor]:
    return [tensor.cpu() for tensor in model.policy.state_dict().values()]


def trained(algorithm: Any, space: Any, **options: Any) -> Any:
    model = algorithm("MlpPolicy", SpaceEnv(space), seed=0, device="cpu", **options)
    return model.learn(160)


@pytest.mark.parametrize("space", [IMAGES, SPACES["float32"]], ids=["image", "vector"])
class TestSameWeights:
    def test_dqn(self, space: Any) -> None:
        options = {"learning_starts": 40, "buffer_size": 100, "batch_size": 16}
        plain = trained(DQN, space, **options)
        ours = trained(DQN, space, replay_buffer_class=GpuReplayBuffer, **options)
        assert all(map(th.equal, weights(plain), weights(ours)))

    def test_ppo(self, space: Any) -> None:
        options = {"n_steps": 40, "batch_size": 20, "n_epochs": 2}
        plain = trained(PPO, space, **options)
        ours = trained(PPO, space, rollout_buffer_class=GpuRolloutBuffer, **options)
        assert all(map(th.equal, weights(plain), weights(ours)))


def test_a_model_and_its_buffer_are_saved_and_loaded(tmp_path: Path, device: str) -> None:
    model = trained(DQN, IMAGES, learning_starts=40, buffer_size=100, replay_buffer_class=GpuReplayBuffer)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    again = DQN.load(tmp_path / "model", env=SpaceEnv(IMAGES), device=device)
    again.load_replay_buffer(tmp_path / "buffer")
    assert again.replay_buffer.size() == 100
    again.learn(60, reset_num_timesteps=False)
    assert again.replay_buffer.buffer_device.type == device


@pytest.mark.parametrize("kind", ["replay", "rollout"])
def test_examples(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("ale_py", "cv2", "imageio_ffmpeg"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    common = ["--n-envs", "1", "--device", "cpu", "--steps", "40"]
    size = ["--buffer-size", "150"] if kind == "replay" else []
    importlib.import_module(f"example_train_gpu_{kind}").main([*common, *size, "--eval-every", "0"])
    assert "times smaller" in capsys.readouterr().out
    importlib.import_module(f"example_watch_gpu_{kind}").main(common)
    assert "1 episode, mean return" in capsys.readouterr().out
