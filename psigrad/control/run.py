"""A complete run of control, from settings to a policy on disk: collect and learn, evaluate, save."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

from psigrad import extras, seeds
from psigrad.compiled import kernels
from psigrad.control import builder
from psigrad.control.environments import vector
from psigrad.control.environments.collector import ActionLog, Played, play
from psigrad.control.environments.vector import MOST_STEPS, Environments, Serial, single
from psigrad.control.methods.trainer import Trainer, generator
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.intervals import unbounded_interval
from psigrad.paths import kept_folder
from psigrad.records import checkpoint, pins, report, run_folder
from psigrad.runs import session
from psigrad.runs.cycle import Loop, cycle
from psigrad.runs.journal import Journal
from psigrad.runs.machine import pins_of, versions
from psigrad.runs.result import Result
from psigrad.runs.survival import convert_exits
from psigrad.step import Clock, Outcome, RunState

_EVALUATED_AT_ONCE = 16  # environments of an evaluation
LESS_MEMORY = "Start again with a smaller n_envs or n_steps, or for DQN a smaller buffer_size."


@dataclass(frozen=True)
class LineState(RunState):
    """The state of a run of control. `step` counts environment steps, and `turns` lines of metrics.

    The rest of the state is in the trainer.
    """

    lines: int = 0

    @property
    def turns(self) -> int:
        """The number of lines of metrics so far."""
        return self.lines


def run(config: ControlConfig) -> Result:
    """Train a policy on `config.env` with `config.algorithm`, and write the run folder with metrics, checkpoints and report.

    Resume from the newest checkpoint of the run folder, if there is one. Raises `UserError` on invalid settings or data.
    """
    if config.run.max_steps or config.run.num_train_epochs != 1:
        raise UserError("Control counts steps of the environment: set total_timesteps in place of max_steps or num_train_epochs.")
    with convert_exits(), kept_folder():
        trainer = builder.build(config)
        envs = evaluation_environments(config) if config.eval_episodes else None
    try:
        if config.video:
            check_video(config)
        with session.open_run(config, "control") as journal:
            if (done := session.load_finished(config, journal, users_code(config))) is not None:
                return done
            state = begin(trainer, journal)
            train(trainer, state, envs, journal)
            model = journal.folder.save_model(lambda folder: builder.save_policy(folder, trainer))
            if config.video:
                record_video(trainer, journal.folder.path / run_folder.VIDEO)
            session.note_end(journal)
            written = report.write([journal.folder.path]) if config.run.report else None
            before, after = session.evaluations(journal.folder.path)
            return Result(journal.folder.path, model, written, before, after)
    finally:
        trainer.collector.envs.close()
        if envs is not None:
            envs.close()


def begin(trainer: Trainer, journal: Journal) -> LineState:
    """Return the state to start from: a new one, or that of the newest checkpoint, which is also loaded into the trainer."""
    config, path = trainer.config.run, session.newest_checkpoint(journal)
    journal.callbacks.set_model(trainer.network)
    trainer.collector.resumable = True
    pinned = collect_pins(trainer.config)
    if path is None:
        session.note_start(config, journal, None, 0, pinned)
        trainer.restart()
        return LineState(evaluated=True)
    session.check_pins(config, journal, checkpoint.read_manifest(path), pinned)
    numbers = trainer.restore(path)
    session.note_start(config, journal, path, trainer.timesteps, pinned)
    with Clock(journal.watch)("time/replay"):
        replayed = trainer.go_on(path, numbers)
    if replayed is None:
        journal.log("episodes_restarted", "The states of the environments could not be restored, so new episodes start.")
    else:
        journal.folder.event("replayed", steps=replayed)
    return LineState(
        step=trainer.timesteps,
        lines=trainer.lines,
        evaluated=True,
        changes=numbers.get("changes", {}),
        callbacks=numbers.get("callbacks", {}),
        ended=numbers.get("ended", False) and not config.extend,
    )


def train(trainer: Trainer, state: LineState, envs: Environments | None, journal: Journal) -> LineState:
    """Train from `state` to the last step, with evaluations on `envs`. Each cycle trains for one line of metrics."""
    config = trainer.config
    meta = {"kind": "control", **versions(), **collect_pins(config)}

    def step(state: LineState) -> Outcome[LineState]:
        _adopt(trainer, state.changes)
        before, clock = trainer.timesteps, Clock(journal.watch)
        with clock("time/update"):
            figures = trainer.train_interval()
        seconds = clock.read()
        ended, every = trainer.timesteps >= config.total_timesteps, config.run.save_steps
        if ended or (every and trainer.lines % every == 0) or len(trainer.collector.log) > ActionLog.MOST:
            trainer.restart()
        after = replace(state, step=trainer.timesteps, lines=trainer.lines)
        summary = f"return {figures.get('rollout/ep_rew_mean', float('nan')):.1f}"
        return Outcome(after, figures, timings=seconds, tokens=trainer.timesteps - before, summary=summary)

    def save(state: LineState) -> None:
        extra = {"changes": state.changes, "callbacks": state.callbacks, "ended": state.ended}
        session.save_checkpoint(journal, trainer.begun.timesteps, lambda folder: trainer.save(folder, **extra), config.run, meta)

    def judge(state: LineState) -> None:
        if envs is not None:
            with Clock(journal.watch)("time/eval"):
                evaluate(trainer, envs, journal)

    eval_steps = config.eval_steps if envs is not None else 0
    moved = lambda: trainer.moves - trainer.begun.moves  # noqa: E731
    loop = Loop("steps", config.total_timesteps, step, judge, save, moved, eval_steps, LESS_MEMORY)
    return cycle(loop, state, config.run, journal)


def _adopt(trainer: Trainer, changes: Mapping[str, Any]) -> None:
    """Apply settings that a callback has changed to the trainer and its optimiser."""
    own = {name: value for name, value in changes.items() if "." not in name}
    if own:
        trainer.config = replace(trainer.config, **own)
        trainer.optimizer.optim = replace(trainer.optimizer.optim, max_grad_norm=trainer.config.max_grad_norm)


def collect_pins(config: ControlConfig) -> dict[str, str]:
    """Return the pins of a run of control: the user's code and the machine."""
    return {**users_code(config), **pins_of(config.run, kernels())}


def users_code(config: ControlConfig) -> dict[str, str]:
    """Return the hashes of the user's code for the environment and the algorithm."""
    algorithm = builder.resolve(config)
    parts = [] if algorithm is None else [algorithm, *(getattr(algorithm, f.name) for f in fields(algorithm))]
    around = [imported_callable(name, "wrapper") for name in config.wrappers]
    found = {"environment": pins.hash_code(vector.source(config.env), *around), "algorithm": pins.hash_code(*parts)}
    return {name: digest for name, digest in found.items() if digest is not None}


def evaluation_environments(config: ControlConfig) -> Environments:
    """Make the environments for evaluation. Raises `UserError` for an environment object, which cannot be copied."""
    if not isinstance(config.env, str) and not callable(config.env):
        raise UserError("An environment object cannot be copied for evaluation; give its id or a function, or eval_episodes=0.")
    count = min(config.eval_episodes, _EVALUATED_AT_ONCE if isinstance(config.env, str) else config.n_envs)
    limit = config.eval_max_steps
    return vector.make(config.env, count, config.vectorization, config.wrappers, limit, **config.env_kwargs)


def evaluate(trainer: Trainer, envs: Environments, journal: Journal) -> None:
    """Play complete episodes, and log their mean return with a 95 % interval, and each episode."""
    config, step = trainer.config, trainer.timesteps
    seed = seeds.derive(config.run.seed, "evaluation", trainer.lines)
    returns, lengths, cut = play_episodes(trainer, envs, config.eval_episodes, seed, config.deterministic_eval)
    figures = summary(returns, lengths)
    if envs.cut_at or cut:
        figures["episodes/cut"] = float(cut)
    journal.metrics(step, {f"eval/{name}": value for name, value in figures.items()})
    journal.rollouts(
        [
            {"step": step, "kind": "episode", "episode": i, "reward": reward, "length": length}
            for i, (reward, length) in enumerate(zip(returns, lengths, strict=True))
        ]
    )


def play_episodes(trainer: Trainer, envs: Environments, episodes: int, seed: int, deterministic: bool) -> Played:
    """Play `episodes` complete episodes with the policy, and return their returns and lengths."""
    act = trainer.network.actor(None if deterministic else generator(seed), envs.count)
    return play(envs, act, episodes, seed, trainer.collector.normalizer.see)


def summary(returns: list[float], lengths: list[int]) -> dict[str, float]:
    """Return metrics: the mean return, its standard deviation over episodes, and the mean length.

    If the returns are not all equal, the metrics include a 95 % interval of the mean return.
    """
    low, high = unbounded_interval(returns)
    return {
        "return/mean": float(np.mean(returns)),
        **({} if math.isnan(low) else {"return/low": low, "return/high": high}),
        "return/std": float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0,
        "length/mean": float(np.mean(lengths)),
        "episodes": len(returns),
    }


# A GIF shows at most 50 frames a second, and the file for a page should stay below a megabyte.
_MOST_FRAMES, _WIDTH = 250, 300


def record_video(trainer: Trainer, path: Path) -> Path:
    """Record an episode with the policy's most likely actions as a GIF, cut at the limit of evaluated episodes."""
    env = _open_drawn(trainer.config)
    (first, *rest), stride = _frames(env, trainer)
    fps = env.metadata.get("render_fps") or 30
    first.save(path, save_all=True, append_images=rest, duration=max(20, round(1000 * stride / fps)), loop=0, optimize=True)
    return path


def check_video(config: ControlConfig) -> None:
    """Raise `UserError` if the environment cannot draw frames. This is called before training, not only when recording."""
    env = _open_drawn(config)
    try:
        env.reset(seed=0)
        _picture(env)
    except Exception as error:
        raise _undrawable(config, error) from error
    finally:
        env.close()


def _open_drawn(config: ControlConfig) -> gym.Env[Any, Any]:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # a machine may have no screen
    if not isinstance(config.env, str):
        raise UserError("A video needs an environment's id, but env is an object; give its id, or remove video.")
    try:
        return single(config.env, config.wrappers, render_mode="rgb_array", **config.env_kwargs)
    except Exception as error:
        raise _undrawable(config, error) from error


def _undrawable(config: ControlConfig, error: Exception) -> UserError:
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return UserError(
        f"{config.env} cannot be drawn: {message}. A video needs an environment that takes render_mode='rgb_array' and whose "
        f"render() returns pixels. For those of Gymnasium run `{extras.install_command('control')}`, or remove video."
    )


def _frames(env: gym.Env[object, object], trainer: Trainer) -> tuple[list[Image.Image], int]:
    """Return (frames of an episode, number of steps per frame). If there are too many frames, every second one is dropped."""
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
