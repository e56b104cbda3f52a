"""Collectors on another host, whose network fails for some seconds.

    python -m tests.soak.namespaces [--steps 6000] [--stall 6]

Two network namespaces, joined by a pair of virtual devices, are two hosts with a node of Ray each. The learner is on
the first, all collectors on the second. In the middle, the link is down for some seconds. Checked: the learner goes on,
no step is missing or wrong, and it never holds more than a bounded number of steps. Needs root and `ip`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.soak.collectors import N_ENVS, SEGMENT_STEPS, CountingEnv, check_losses

HOSTS, ADDRESSES, PORT = ("sb3x-learner", "sb3x-collect"), ("10.213.0.1", "10.213.0.2"), 6399
N, AHEAD = 2, 2


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def make_hosts() -> None:
    for number, host in enumerate(HOSTS):
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
        if number == 0:
            ip("link", "add", "sb3x0", "netns", host, "type", "veth", "peer", "name", "sb3x1")
        else:
            ip("link", "set", "sb3x1", "netns", host)
    for number, host in enumerate(HOSTS):
        ip("-n", host, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"sb3x{number}")
        ip("-n", host, "link", "set", f"sb3x{number}", "up")
        ip("-n", host, "route", "add", "default", "via", ADDRESSES[1 - number])  # Ray looks which device leads outside


def remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def reason_to_skip() -> str | None:
    """Why this machine cannot run this, or nothing."""
    if shutil.which("ip") is None:
        return "there is no program 'ip': install iproute2"
    remove_hosts()
    try:
        make_hosts()
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        remove_hosts()
    return None


def learn(steps: int, stall: float, folder: Path) -> None:
    """The learner, in the first namespace."""
    import torch as th
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    from sb3_extra_buffers.distributed import distributed

    th.set_num_threads(1)

    class Stall(BaseCallback):
        """Takes the link down once, and back up from another process: this one goes on until it has no steps left."""

        most = 0
        longest = 0.0
        last = time.monotonic()

        def _on_step(self) -> bool:
            now = time.monotonic()
            self.longest, self.last = max(self.longest, now - self.last), now
            if self.num_timesteps >= steps // 2 and stall and not hasattr(self, "upper"):
                ip("link", "set", "sb3x0", "down")
                self.upper = subprocess.Popen(["sh", "-c", f"sleep {stall}; ip link set sb3x0 up"])
                self.last, self.longest = time.monotonic(), 0.0
            intake: Any = self.model._intake  # type: ignore[attr-defined]
            self.most = max(self.most, intake.n_waiting)
            return True

    with tempfile.TemporaryDirectory() as elsewhere:
        env = CountingEnv(Path(elsewhere))
        model = distributed(DQN)(
            "MlpPolicy", env, device="cpu", seed=0, learning_starts=100, buffer_size=200_000, batch_size=8,
            learning_rate=0.0, policy_kwargs={"net_arch": [8]}, ray={"address": f"{ADDRESSES[0]}:{PORT}"},
            collectors={
                "n": N, "envs": N_ENVS, "segment_steps": SEGMENT_STEPS, "ahead": AHEAD,
                "make_env": partial(CountingEnv, folder), "actor_options": {"num_cpus": 1},
            },
        )  # fmt: skip
    callback, began = Stall(), time.monotonic()
    model.learn(steps, callback=callback)
    statistics = model.collector_statistics
    assert model.num_timesteps >= steps
    assert callback.most <= N * AHEAD * SEGMENT_STEPS, f"{callback.most} steps were waiting"
    model.replay_buffer.check()
    parts = model.replay_buffer.parts
    running = {
        int(number) for part in parts if part.pos for number in np.asarray(part.observations)[part.pos - 1, :, 0]
    }
    lost = check_losses(parts, folder, running, AHEAD)
    print(
        f"{model.num_timesteps:,} steps in {time.monotonic() - began:.0f} s across two hosts, one of them cut off for "
        f"{stall:g} s: the learner stood still for {callback.longest:.1f} s, at most {callback.most} steps of each of "
        f"{N_ENVS} environments waited, {statistics.n_deaths} restarts, {lost} steps lost"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--stall", type=float, default=6.0, help="seconds; 0 for none")
    parser.add_argument("--learner", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.learner is not None:
        learn(given.steps, given.stall, given.learner)
        return 0
    if (reason := reason_to_skip()) is not None:
        print(f"Skipped: {reason}")
        return 0
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    # A cluster of Ray asks everybody for a token. Proxies are for the outside.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    nodes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_hosts()
            for number, host in enumerate(HOSTS):
                role = (
                    ["--head", f"--port={PORT}", "--include-dashboard=false"]
                    if number == 0
                    else [f"--address={ADDRESSES[0]}:{PORT}"]
                )
                options = [*role, f"--node-ip-address={ADDRESSES[number]}", f"--num-cpus={number * N}"]
                log = (Path(folder) / f"{host}.log").open("wb")
                command = ["ip", "netns", "exec", host, *ray, *options]
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
                while "Ray runtime started" not in (text := (Path(folder) / f"{host}.log").read_text()):
                    time.sleep(1)
                    if nodes[-1].poll() is not None:
                        print(text)
                        return 1
            counts = Path(folder) / "counts"
            counts.mkdir()
            arguments = [f"--steps={given.steps}", f"--stall={given.stall}", f"--learner={counts}"]
            learner = [sys.executable, "-m", "tests.soak.namespaces", *arguments]
            return subprocess.run(
                ["ip", "netns", "exec", HOSTS[0], *learner], timeout=240, check=False, env=environment
            ).returncode
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(30)
            remove_hosts()


if __name__ == "__main__":
    sys.exit(main())
