"""Names of rl-zoo3's command line, for control: `other_names` takes them up."""

from __future__ import annotations

from typing import Any

# The same setting under another name.
SAME = {
    "algo": "algorithm",
    "n_timesteps": "total_timesteps",
    "n_eval_episodes": "eval_episodes",
    "num_threads": "run.threads",
}
# Values that mean something of ours.
VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "policy": {
        "MlpPolicy": {},
        "MultiInputPolicy": {},
        "CnnPolicy": {"network.net_arch": (512,), "network.activation": "relu", "network.critic": "shared"},
    },
    "use_sde": {False: {}},
}
# Another setting, or one that counts otherwise: what to write.
INSTEAD = {
    "policy": "the network of control is net_arch, activation, critic and cnn, and a language model is model",
    **dict.fromkeys(("use_sde", "sde_sample_freq"), "there is no gSDE; the first deviation of real actions is log_std_init"),
    **dict.fromkeys(("hyperparams", "hyperparameters"), "hyperparameters are settings one by one, as learning_rate=1e-3"),
    "eval_freq": "evaluation is asked for by eval_steps",
    "save_freq": "checkpoints are asked for by save_steps and save_minutes",
    "track": "trackers are report_to=wandb, tensorboard or trackio",
    "vec_env": "how copies of an environment are stepped is vectorization=serial, sync or async",
}
