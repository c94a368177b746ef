"""An episode as an animated picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

from psigrad import seeds
from psigrad.control.environments.vector import MOST_STEPS, Environments, Serial, single
from psigrad.control.methods.trainer import Trainer
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError

# A GIF shows no more than 50 pictures a second, and a page wants no more than a megabyte.
_MOST_FRAMES, _WIDTH = 250, 300


def record(trainer: Trainer, path: Path) -> Path:
    """One episode of the policy's likeliest actions as a GIF, cut where an evaluated one is."""
    env = _drawn(trainer.config)
    (first, *rest), stride = _frames(env, trainer)
    fps = env.metadata.get("render_fps") or 30
    first.save(path, save_all=True, append_images=rest, duration=max(20, round(1000 * stride / fps)), loop=0, optimize=True)
    return path


def check(config: ControlConfig) -> None:
    """Raises `UserError` where the environment draws no pictures: before the training, whose end would come too late."""
    env = _drawn(config)
    try:
        env.reset(seed=0)
        _picture(env)
    except Exception as error:
        raise _undrawable(config, error) from error
    finally:
        env.close()


def _drawn(config: ControlConfig) -> gym.Env[Any, Any]:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are drawn in memory; a machine may have no screen
    if not isinstance(config.env, str):
        raise UserError("A video needs the environment's id; this one was given as an object.")
    try:
        return single(config.env, config.wrappers, render_mode="rgb_array", **config.env_kwargs)
    except Exception as error:
        raise _undrawable(config, error) from error


def _undrawable(config: ControlConfig, error: Exception) -> UserError:
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return UserError(
        f"{config.env} cannot be drawn: {message}. A video needs an environment that takes render_mode='rgb_array' and whose "
        "render() returns pixels; Gymnasium's own need: pip install 'psigrad[control]'. Or leave video out."
    )


def _frames(env: gym.Env[object, object], trainer: Trainer) -> tuple[list[Image.Image], int]:
    """Pictures of an episode, and how many steps lie between two: twice as many whenever there are too many pictures."""
    envs, see = Environments(Serial([env])), trainer.collector.normalizer.see
    observation = envs.reset(seeds.derive(trainer.config.run.seed, "film"))
    frames, stride = [_picture(env)], 1
    for t in range(1, trainer.config.eval_max_steps or MOST_STEPS):
        step = envs.step(trainer.network.act(see(observation)))
        if (step.terminated | step.truncated)[0]:
            break
        if t % stride == 0:
            frames.append(_picture(env))
        if len(frames) > _MOST_FRAMES:
            frames, stride = frames[::2], 2 * stride
        observation = step.observation
    return frames, stride


def _picture(env: gym.Env[object, object]) -> Image.Image:
    picture = Image.fromarray(np.asarray(env.render()))
    return picture.resize((_WIDTH, round(picture.height * _WIDTH / picture.width))).quantize(64)
