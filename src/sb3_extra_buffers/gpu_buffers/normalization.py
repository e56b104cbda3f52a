"""``VecNormalize`` for tensors: the same operations in the same precision as SB3's, so the results are identical."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.gpu_buffers.transfer import upload


def normalize_obs(observations: Any, env: VecNormalize | None) -> Any:
    """Normalize a tensor or a dict of tensors as ``env.normalize_obs`` does."""
    if env is None or not env.norm_obs:
        return observations
    if _is_customized(env, "normalize_obs") or _is_customized(env, "_normalize_obs") or _lacks_float64(observations):
        return _on_host(env.normalize_obs, observations)
    if not isinstance(observations, dict):
        statistics: Any = env.obs_rms
        return _normalize(observations, statistics, env)
    keys = env.norm_obs_keys or []
    return {
        key: _normalize(tensor, env.obs_rms[key], env) if key in keys else tensor
        for key, tensor in observations.items()
    }


def normalize_reward(rewards: th.Tensor, env: VecNormalize | None) -> th.Tensor:
    """Normalize rewards as ``env.normalize_reward`` does."""
    if env is None or not env.norm_reward:
        return rewards
    if _is_customized(env, "normalize_reward") or _lacks_float64(rewards):
        return _on_host(env.normalize_reward, rewards).to(th.float32)  # type: ignore[no-any-return]
    # NumPy 2 divides a float32 array by a float64 scalar in float64, NumPy 1 in float32.
    scale = np.sqrt(env.ret_rms.var + env.epsilon)
    wide = np.result_type(np.float32, scale) == np.float64
    scaled = (rewards.to(th.float64) if wide else rewards) / float(scale)
    return scaled.clamp(-env.clip_reward, env.clip_reward).to(th.float32)


def _normalize(values: th.Tensor, statistics: RunningMeanStd, env: VecNormalize) -> th.Tensor:
    mean, deviation = np.asarray(statistics.mean), np.sqrt(statistics.var + env.epsilon)
    moments = upload(np.stack([mean, np.asarray(deviation)]).astype(np.float64), values.device)
    normalized = (values.to(th.float64) - moments[0]) / moments[1]
    return normalized.clamp(-env.clip_obs, env.clip_obs).to(th.float32)


def _is_customized(env: VecNormalize, method: str) -> bool:
    """Whether a subclass of ``VecNormalize`` overrides a method."""
    return getattr(type(env), method) is not getattr(VecNormalize, method)


def _lacks_float64(values: Any) -> bool:
    tensor = next(iter(values.values())) if isinstance(values, dict) else values
    return bool(tensor.device.type == "mps")


def _on_host(function: Any, values: Any) -> Any:
    if isinstance(values, dict):
        found = function({key: tensor.cpu().numpy() for key, tensor in values.items()})
        return {key: upload(np.asarray(array), values[key].device) for key, array in found.items()}
    return upload(np.asarray(function(values.cpu().numpy())), values.device)
