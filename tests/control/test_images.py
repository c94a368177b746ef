"""Convolutions in front of the network: against PyTorch's own layers, and learning on a world that is an image."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from psigrad.control import DQN, PPO, TRPO, builder, evaluate_policy
from psigrad.control.environments import spaces as meanings
from psigrad.control.environments import vector
from psigrad.control.environments.vector import Serial
from psigrad.control.networks import networks
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.convolutions import LAYERS, ConvolvedMLP, Image, layers_for
from psigrad.control.networks.distributions import Categorical
from psigrad.errors import UserError

PIXELS = Image(3, 7, 6, channels_last=True, bytes=True)
CHANNELS_FIRST = Image(3, 7, 6, channels_last=False, bytes=True)


def towers(image=PIXELS, extra=0, activation="tanh"):
    made = ConvolvedMLP(image, LAYERS["small"], (5,), (3, 1), activation, extra).double()
    made.initialise(0, [1.0, 1.0])
    return made


def images(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 7, 6, 3), np.uint8))


def by_modules(made, x_MHWC):
    """The same by `nn.Conv2d` and `nn.Linear`."""
    named = made.named()
    h = x_MHWC.permute(0, 3, 1, 2).double() / 255
    for i, layer in enumerate(LAYERS["small"]):
        module = nn.Conv2d(h.shape[1], layer.channels, layer.kernel, layer.stride).double()
        module.load_state_dict({"weight": named[f"cnn.{i}.weight"], "bias": named[f"cnn.{i}.bias"]})
        h = torch.relu(module(h))
    h = h.flatten(1)
    outs = []
    for k in range(2):
        inner = torch.tanh(nn.functional.linear(h, named[f"{k}.0.weight"], named[f"{k}.0.bias"]))
        outs.append(nn.functional.linear(inner, named[f"{k}.1.weight"], named[f"{k}.1.bias"]))
    return outs


def test_features_are_those_of_pytorchs_modules_whichever_way_the_channels_lie():
    made, x = towers(), images(4)
    policy, value = by_modules(made, x)
    for found in (made(x.flatten(1)), made.plain(x.flatten(1)), made.record(x.flatten(1)).output):
        torch.testing.assert_close(found[0], policy)
        torch.testing.assert_close(found[1, :, :1], value)
    first = towers(CHANNELS_FIRST)
    first.load_state_dict(made.state_dict())
    torch.testing.assert_close(first(x.permute(0, 3, 1, 2).flatten(1)), made(x.flatten(1)))
    assert not torch.allclose(first(x.flatten(1)), made(x.flatten(1)))  # rows taken for channels


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("together", [3, 100])
def test_the_gradient_is_autograds_for_all_states_and_for_the_first_ones(extra, together, monkeypatch):
    monkeypatch.setattr(networks, "_GROUPS", together)
    made, x = towers(extra=extra), images(8).flatten(1)
    for states in (8, 5):
        weight = torch.randn(2, states, 3).double()
        made.flat.grad = None
        (made.plain(x[:states]) * weight).sum().backward()
        torch.testing.assert_close(made.record(x).backward(weight), made.flat.grad)
        assert made.flat.grad[-made.front - extra : len(made.flat) - extra].abs().max() > 0


def test_bytes_and_their_fractions_are_one_image_and_acting_sees_what_training_sees():
    network = ActorCritic(126, Categorical(3), (5,), image=PIXELS)
    network.initialise(0)
    x = images(4).flatten(1)
    torch.testing.assert_close(network(x).policy, network(x.float() / 255).policy)
    with torch.no_grad():
        network.flat[: len(network.flat) // 4] *= 50  # a policy that prefers something
    assert network.act(x.numpy()).tolist() == network(x).policy.argmax(-1).tolist()


def test_weights_come_back_from_the_disk(tmp_path):
    one, other = (ActorCritic(126, Categorical(3), (5,), image=PIXELS) for _ in range(2))
    one.initialise(3)
    one.save(tmp_path)
    other.load(tmp_path)
    x = images(4).flatten(1)
    assert torch.equal(one(x).policy, other(x).policy) and torch.equal(one(x).values, other(x).values)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 8, 12), (12, 8, 8, True)),  # chess and the like: more planes than squares in a row
        ((12, 8, 8), (12, 8, 8, False)),
        ((7, 6, 3), (3, 7, 6, True)),
        ((3, 7, 6), (3, 7, 6, False)),
        ((4, 40, 30, 3), (12, 40, 30, True)),
        ((4, 1, 84, 84), (4, 84, 84, False)),
    ],
)
def test_which_dimension_has_the_channels_and_frames_are_channels_too(shape, expected):
    space = spaces.Box(0, 255, shape, np.uint8)
    found = meanings.image(space)
    assert found == Image(*expected, True)
    seen = np.stack([space.sample() for _ in range(2)])
    size, flat = meanings.observations(space)
    parts = [seen] if len(shape) == 3 else [seen[:, k] for k in range(shape[0])]  # frames one behind the other
    wanted = np.concatenate(parts, -1 if found.channels_last else 1)
    assert size == wanted[0].size and flat(seen).dtype == np.uint8
    np.testing.assert_array_equal(flat(seen).reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("kind", "image", "expected"),
    [
        ("auto", Image(4, 84, 84, False, True), LAYERS["nature"]),
        ("auto", PIXELS, LAYERS["small"]),
        ("none", PIXELS, ()),
        ("auto", None, ()),
    ],
)
def test_the_layers_fit_the_image(kind, image, expected):
    assert layers_for(kind, image) == expected


@pytest.mark.parametrize(("kind", "image", "words"), [("nature", PIXELS, "7 × 6"), ("small", None, "are not images")])
def test_layers_that_do_not_fit_are_refused(kind, image, words):
    with pytest.raises(UserError, match=words):
        layers_for(kind, image)


class Corner(gym.Env):
    """A dot on 5 × 5 pixels that has to walk into the marked corner, whichever of the four it is, within 12 steps.

    An optimal walk from anywhere takes at most 8 steps and earns 1 less a twentieth for each.
    """

    observation_space = spaces.Box(0, 255, (5, 5, 2), np.uint8)
    action_space = spaces.Discrete(4)
    metadata = {"render_modes": []}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = tuple(int(x) for x in self.np_random.choice([0, 4], 2))
        self.at, self.taken = self.goal, 0
        while self.at == self.goal:
            self.at = tuple(int(x) for x in self.np_random.integers(0, 5, 2))
        self.best = 1 - 0.05 * sum(abs(a - b) for a, b in zip(self.at, self.goal, strict=True))
        return self._features(), {}

    def step(self, action):
        move = [(-1, 0), (1, 0), (0, -1), (0, 1)][int(action)]
        self.at = tuple(int(np.clip(a + m, 0, 4)) for a, m in zip(self.at, move, strict=True))
        self.taken += 1
        there = self.at == self.goal
        return self._features(), float(there) - 0.05, there, self.taken == 12, {}

    def _features(self):
        picture = np.zeros((5, 5, 2), np.uint8)
        picture[(*self.at, 0)], picture[(*self.goal, 1)] = 255, 255
        return picture


def optimum():
    env = Corner()
    env.reset(seed=0)
    return np.mean([(env.reset()[0], env.best)[1] for _ in range(4000)])


@pytest.mark.slow
def test_ppo_finds_the_marked_corner_by_looking():
    """Its heart: test_a_policy_learns_from_an_image_and_a_flag_together."""
    agent = PPO(
        "CnnPolicy",
        Corner,
        n_envs=8,
        n_steps=64,
        batch_size=128,
        n_epochs=4,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [64]},
    )
    before, _ = evaluate_policy(agent, n_eval_episodes=200)
    agent.learn(16_000)
    after, _ = evaluate_policy(agent, n_eval_episodes=200)
    assert before < 0 and after > optimum() - 0.08


@pytest.mark.long
def test_dqn_keeps_bytes_and_learns_from_them():
    settings = {"buffer_size": 5000, "learning_starts": 200, "train_freq": 16, "gradient_steps": 8, "target_update_interval": 200}
    agent = DQN("CnnPolicy", Corner, n_envs=4, batch_size=64, learning_rate=1e-3, gamma=0.9, exploration_fraction=0.5, **settings)
    assert agent._trainer.replay._data["observation"].dtype == np.uint8
    agent.learn(12_000)
    after, _ = evaluate_policy(agent, n_eval_episodes=200)
    assert after > optimum() - 0.15


def test_trpo_and_a_normaliser_take_images_too():
    agent = TRPO(Corner, n_envs=4, n_steps=64, batch_size=64, normalize_observations=True).learn(1024)
    before = agent.get_env().reset(seed=0)[0]
    assert agent.predict(before)[0].shape == (4,)


def test_trpos_critic_is_fitted_without_the_convolutions_that_the_policy_sees_through():
    made = builder.build(builder.settings("trpo", Corner, {"tuned": False, "n_envs": 2, "n_steps": 16, "learning_rate": 1e-2}))
    made.restart()
    seen, fit = [], made._fit_critic
    policy = lambda whole: made.network(whole.observation).policy  # noqa: E731

    def watched(algorithm, whole, minibatches):
        before = made.network.flat.detach().clone(), policy(whole)
        seen.append((fit(algorithm, whole, minibatches), before[0], before[1], policy(whole)))
        return seen[-1][0]

    made._fit_critic = watched
    made.iterate()
    ((_, weights, then, now),) = seen
    assert torch.equal(then, now) and not torch.equal(weights, made.network.flat), "the critic's own layers have moved"


def test_a_wrapper_is_put_around_each_copy_and_bad_ones_are_named():
    envs = vector.make("CartPole-v1", 16, wrappers=("gymnasium.wrappers:FlattenObservation",))
    assert isinstance(envs.env, Serial) and type(envs.env.envs[0]).__name__ == "FlattenObservation"
    with pytest.raises(UserError, match="expected an environment of Gymnasium"):
        vector.make("CartPole-v1", 1, wrappers=("builtins:id",))
    with pytest.raises(UserError, match="wrap your environment object"):
        vector.make(Corner, 1, wrappers=("gymnasium.wrappers:FlattenObservation",))


def test_stable_baselines3s_way_of_naming_a_policy_is_the_same_agent(capsys):
    torch.manual_seed(0)
    kinds = {"net_arch": [16], "activation_fn": nn.ReLU}
    theirs = PPO("MlpPolicy", "CartPole-v1", n_steps=32, n_envs=2, verbose=1, policy_kwargs=kinds, device="cpu")
    ours = PPO("CartPole-v1", n_steps=32, n_envs=2, net_arch=(16,), activation="relu")
    assert theirs.settings == ours.settings
    theirs.learn(64)
    assert "total_timesteps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        (("CnnPolicy", "CartPole-v1"), {}, "needs images"),
        (("MultiInput", "CartPole-v1"), {}, "Two environments"),
        (("LstmPolicy", "CartPole-v1"), {}, "MlpPolicy or CnnPolicy or MultiInputPolicy"),
        (("MlpPolicy",), {}, "needs an environment"),
        (("CartPole-v1", "Acrobot-v1"), {}, "Two environments"),
        (("MlpPolicy", "CartPole-v1"), {"policy_kwargs": {"ortho_init": False}}, "ortho_init=False"),
        (("MlpPolicy", "CartPole-v1"), {"policy_kwargs": {"net_arch": {"pi": [8], "vf": [9]}}}, "same for policy and critic"),
        (("MlpPolicy", "CartPole-v1"), {"device": "cuda"}, "runs on the CPU"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(given, named, words):
    with pytest.raises(UserError, match=words):
        PPO(*given, **named)


def test_environments_are_exchanged_for_others_with_the_same_spaces_only():
    agent = PPO(Corner, n_envs=2, n_steps=16).learn(32)
    first, weights = agent.get_env(), agent._trainer.network.flat.clone()
    agent.set_env(Corner)
    assert agent.get_env() is not first and torch.equal(agent._trainer.network.flat, weights)
    observation = np.stack([Corner().reset(seed=i)[0] for i in range(5)])
    actions, state = agent.predict(observation, deterministic=True)
    singles = [int(agent.predict(one, deterministic=True)[0]) for one in observation]
    assert actions.tolist() == singles and state is None
    agent.learn(32)
    assert agent.num_timesteps == 64
    with pytest.raises(UserError, match="which this policy was made for"):
        agent.set_env("CartPole-v1")


class Sign(gym.Env):
    """One step: the action must name the flag and the picture's bright side. Who sees one alone is right half the time."""

    observation_space = gym.spaces.Dict(
        {
            "flag": gym.spaces.Discrete(2),
            "picture": gym.spaces.Box(0, 255, (6, 6, 1), np.uint8),
            "wind": gym.spaces.Box(-1, 1, (2,)),
        }
    )
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.flag, self.side = (int(x) for x in self.np_random.integers(0, 2, 2))
        picture = np.zeros((6, 6, 1), np.uint8)
        picture[:, 3 * self.side : 3 * self.side + 3] = 255
        return {"flag": self.flag, "picture": picture, "wind": np.zeros(2, np.float32)}, {}

    def step(self, action):
        right = float(action == 2 * self.flag + self.side)
        return self.reset()[0], right, True, False, {}


def test_an_image_beside_other_parts_is_seen_as_one_and_the_others_join_its_features(tmp_path):
    envs = vector.make(Sign, 3)
    seen = torch.from_numpy(envs.reset(0))
    assert (envs.image_at, seen.shape[1]) == (2, 2 + 36 + 2) and set(seen[:, 2:38].unique().tolist()) == {0.0, 1.0}
    towers = ConvolvedMLP(envs.image, LAYERS["small"], (8,), (2, 1), "relu", at=2, beside=4)
    towers.initialise(0, [1.0, 1.0])
    alone = ConvolvedMLP(envs.image, LAYERS["small"], (8,), (2, 1), "relu")
    for (weight, bias), (own, shift) in zip(alone.kernels(alone.flat.data), towers.kernels(towers.flat.data), strict=True):
        weight.copy_(own), bias.copy_(shift)
    features = alone.seen(seen[:, 2:38], alone.flat)
    assert torch.equal(towers.seen(seen, towers.flat), torch.cat([features, seen[:, :2], seen[:, 38:]], 1))
    out = towers.plain(seen)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((out * slope).sum(), towers.flat)
    torch.testing.assert_close(towers.record(seen).backward(slope), expected, atol=1e-5, rtol=1e-4)


def test_a_policy_learns_from_an_image_and_a_flag_together(tmp_path):
    agent = PPO("MultiInputPolicy", Sign, learning_rate=3e-3, n_epochs=4, batch_size=128, n_envs=8, n_steps=64)
    assert evaluate_policy(agent, n_eval_episodes=200)[0] < 0.6
    agent.learn(8_000)
    assert evaluate_policy(agent, n_eval_episodes=200)[0] > 0.95
    again = PPO.load(agent.save(tmp_path / "saved"))
    one = Sign().reset(seed=3)[0]
    assert again.predict(one, deterministic=True) == agent.predict(one, deterministic=True)
    DQN(Sign, n_envs=1, batch_size=8, learning_starts=10).learn(64)


def test_two_images_are_refused():
    class Two(Sign):
        observation_space = gym.spaces.Dict({name: gym.spaces.Box(0, 255, (6, 6, 1), np.uint8) for name in "ab"})

    with pytest.raises(UserError, match=r"several images.*FilterObservation"):
        PPO(Two)
