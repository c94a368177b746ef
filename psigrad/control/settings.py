"""The settings of control, on Gymnasium environments. The names are those of Stable-Baselines3 where they exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from psigrad.config.fields import LENGTH, LIVE, MAIN, STEPS, ReadBy, Unread
from psigrad.config.sections import Count, CountOrZero, Positive, PositiveOrZero, Run, Share

_NOT_DQN, _GRADIENTS = ReadBy(but=("dqn",)), ReadBy(but=("dqn", "trpo"))
Discount = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Network:
    """The small network of the policy, and its critics."""

    net_arch: Annotated[tuple[int, ...], MAIN] = (64, 64)
    """Widths of the hidden layers, for the policy and for each critic."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation function between the layers."""
    critic: Annotated[Literal["separate", "shared"], _NOT_DQN] = "separate"
    """separate: a critic has its own hidden layers; shared: it is a value head on the policy's layers."""
    n_critics: Annotated[Count, _NOT_DQN] = 1
    """Critics in the ensemble. The value is their mean, and each is trained independently."""
    cnn: Literal["auto", "nature", "small", "none"] = "auto"
    """Convolutions before the layers, shared by policy and critics, if an observation is an image: nature (Mnih et al. 2015; from
    36 × 36 pixels on), small (three layers of 2 × 2); auto: the one that fits; none: the pixels as plain numbers.
    """
    log_std_init: Annotated[float, _NOT_DQN] = 0.0
    """Logarithm of the initial standard deviation of continuous actions."""


@dataclass(frozen=True)
class Dqn:
    """The settings that only DQN reads."""

    buffer_size: Count = 100_000
    """Transitions kept for replay."""
    learning_starts: CountOrZero = 1_000
    """Transitions collected before the first update."""
    train_freq: Count = 4
    """Transitions between updates."""
    gradient_steps: int = 1
    """Minibatches per update; -1: one per transition collected since the last update."""
    target_update_interval: Count = 1_000
    """Transitions between two updates of the target network."""
    tau: Share = 1.0
    """Share τ of the learning network in the updated target network: τ · learning + (1 - τ) · target; 1 copies it."""
    double_q: bool = False
    """Use Double DQN: the learning network chooses the next action, and the target network gives its value."""
    exploration_fraction: Share = 0.1
    """Share of the run over which ε, the share of random actions, falls linearly."""
    exploration_initial_eps: Share = 1.0
    """Initial share ε of random actions."""
    exploration_final_eps: Share = 0.05
    """Final share ε of random actions."""


@dataclass(frozen=True)
class Trpo:
    """The settings that only TRPO reads."""

    max_kl: Positive = 0.01
    """Maximum mean KL(old‖new) of a step (Stable-Baselines3's target_kl)."""
    cg_max_steps: Count = 15
    """Iterations of the conjugate gradient method."""
    cg_damping: PositiveOrZero = 0.1
    """Number added to the diagonal of the Fisher matrix."""
    line_search_shrinking_factor: Share = 0.8
    """Factor by which each try of the line search shortens the step."""
    line_search_max_iter: Count = 10
    """Tries of the line search before the step is skipped."""
    n_critic_updates: Count = 10
    """Passes over the rollout to fit the critic."""


@dataclass(frozen=True)
class ControlConfig:
    """Train an agent on a Gymnasium environment by a policy gradient (PPO, A2C, REINFORCE), TRPO or DQN."""

    algorithm: Annotated[Any, MAIN] = "ppo"
    """ppo, ppo_penalty, a2c, td_actor_critic, q_actor_critic, advantage_actor_critic, trpo, dqn, reinforce, reinforce_batch_mean,
    reinforce_reward_to_go or reinforce_total_return. Or {preset: ppo, part: value, …}; in Python also a PolicyGradient."""
    env: Annotated[Any, MAIN] = "CartPole-v1"
    """Id of a Gymnasium environment, or a custom module:Class or file.py:Class. From Python also a vector environment, or a
    function that makes an environment."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    wrappers: tuple[str, ...] = ()
    """Wrappers of each environment, the first one innermost: module:Class or file.py:Class, called with the environment."""
    vectorization: Literal["auto", "serial", "sync", "async", "vector_entry_point"] = "auto"
    """Method that steps the n_envs copies. serial: a plain loop; sync, async, vector_entry_point: Gymnasium's methods; auto:
    vector_entry_point with 8 or more copies, if the environment has one and there are no wrappers; otherwise serial."""
    total_timesteps: Annotated[Count, LENGTH, MAIN] = 100_000
    """Steps of the run, summed over the copies of the environment."""
    n_envs: Annotated[Count, MAIN] = 8
    """Copies of the environment that are stepped together. With `tuned`, the default depends on algorithm and environment."""
    n_steps: Annotated[CountOrZero, MAIN, _NOT_DQN] = 32
    """Steps per rollout (the data between two updates) in each copy of the environment; 0: complete episodes."""
    n_episodes: Annotated[Count, _NOT_DQN] = 1
    """With n_steps 0: episodes of each copy of the environment per rollout."""
    batch_size: Annotated[CountOrZero, MAIN] = 0
    """Steps per minibatch (transitions for DQN); 0: the full rollout."""
    n_epochs: Annotated[Count, MAIN, _GRADIENTS] = 1
    """Passes over a rollout."""
    gamma: Annotated[Discount, MAIN] = 0.99
    """Discount γ per step."""
    gae_lambda: Annotated[Discount | None, _NOT_DQN] = None
    """λ of generalised advantage estimation, in methods that use it; null: the preset's."""
    normalize_advantage: Annotated[Literal[True, False, "minibatch"] | None, _NOT_DQN] = None
    """Whiten advantages (mean 0, standard deviation 1) over the rollout, or over each minibatch as in Stable-Baselines3; null: as
    in the preset."""
    clip_range: Annotated[PositiveOrZero | None, MAIN, _GRADIENTS] = None
    """Distance ε from 1 at which PPO clips the ratio; null: the preset's."""
    clip_range_schedule: Annotated[Literal["constant", "linear"], _GRADIENTS] = "constant"
    """Schedule of clip_range; linear: it falls to 0 over the run."""
    ent_coef: Annotated[PositiveOrZero | None, MAIN, _GRADIENTS] = None
    """Weight of the entropy bonus; null: the preset's."""
    vf_coef: Annotated[PositiveOrZero | None, _NOT_DQN] = None
    """Weight of the critic's mean squared error; null: the preset's."""
    target_kl: Annotated[Positive | None, LIVE, _GRADIENTS] = None
    """Stop the passes over a rollout once the KL(old‖new) of a minibatch is above 1.5 times this; null: never."""
    learning_rate: Annotated[PositiveOrZero, MAIN, LIVE] = 3e-4
    """Initial learning rate."""
    lr_scheduler_type: Literal["constant", "linear"] = "constant"
    """Schedule of the learning rate; linear: it falls to 0 over the run."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Optimiser: Adam, or RMSprop as in A3C (smoothing 0.99)."""
    adam_epsilon: Positive = 1e-5
    """Number that Adam or RMSprop adds to the root of the mean squared gradient."""
    max_grad_norm: Annotated[PositiveOrZero, LIVE] = 0.5
    """Clip the gradient's norm to this; 0: never."""
    network: Network = field(default_factory=Network)
    dqn: Annotated[Dqn, ReadBy("dqn")] = field(default_factory=Dqn)
    trpo: Annotated[Trpo, ReadBy("trpo")] = field(default_factory=Trpo)
    normalize_observations: Annotated[bool, MAIN] = False
    """Normalise observations to running mean 0 and standard deviation 1."""
    normalize_rewards: Annotated[bool, MAIN] = False
    """Divide rewards by the running standard deviation of the discounted return."""
    log_interval: Count = 1
    """Rollouts (for DQN: rounds of train_freq transitions) per line of metrics.jsonl. Checkpoints and evaluations happen only
    after a line."""
    eval_episodes: Annotated[CountOrZero, MAIN] = 100
    """Episodes per evaluation; 0: no evaluation."""
    eval_steps: Annotated[CountOrZero, STEPS, LIVE] = 0
    """Number of lines of metrics.jsonl between evaluations; 0: only at the end."""
    eval_max_steps: CountOrZero = 0
    """Steps after which an evaluated episode is cut, with a warning; 0: 30,000 if the environment declares no limit."""
    deterministic_eval: bool = True
    """Evaluate with the most likely actions; false: with sampled ones."""
    video: Annotated[bool, MAIN] = False
    """Record an episode of the trained policy as episode.gif."""
    tuned: Annotated[bool, MAIN] = True
    """Replace the defaults of other settings by those tuned for the algorithm and, if there are any, for the environment."""
    run: Annotated[Run, Unread("max_memory", "async_save", "max_steps", "num_train_epochs")] = field(
        default_factory=lambda: Run(threads=1)
    )
