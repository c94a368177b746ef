"""The closed-form network against PyTorch's own, and the acting numpy twin against both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from psigrad.control.networks import networks
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.distributions import Categorical, MultiCategorical, Noise, Normal
from psigrad.control.networks.networks import StackedMLP


def towers(activation: str, extra: int = 0) -> StackedMLP:
    made = StackedMLP(5, (7, 6), (3, 1, 1), activation, extra).double()
    made.initialise(0, [1.0, 1.0, 1.0])
    return made


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_each_tower_is_a_stack_of_linear_layers(activation):
    made, x = towers(activation), torch.randn(11, 5, dtype=torch.double)
    named, act = made.named(), nn.Tanh() if activation == "tanh" else nn.ReLU()
    for k, outputs in enumerate(made.outputs):
        h = x
        for i in range(3):
            h = nn.functional.linear(h, named[f"{k}.{i}.weight"], named[f"{k}.{i}.bias"])
            h = h if i == 2 else act(h)
        torch.testing.assert_close(made(x)[k, :, :outputs], h)
        torch.testing.assert_close(made.plain(x)[k, :, :outputs], h)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("extra", "together", "states"), [(0, 100, 11), (2, 100, 11), (0, 4, 6), (0, 100, 6)])
def test_the_closed_gradient_of_the_first_states_is_autograds(activation, extra, together, states, monkeypatch):
    monkeypatch.setattr(networks, "_GROUPS", together)
    made, x, weight = towers(activation, extra), torch.randn(11, 5).double(), torch.randn(3, states, 3).double()
    (made.plain(x[:states]) * weight).sum().backward()
    torch.testing.assert_close(made.record(x).backward(weight), made.flat.grad)


def test_negative_control_the_gradient_of_another_activation_is_not_it():
    made, x, weight = towers("tanh"), torch.randn(11, 5).double(), torch.randn(3, 11, 3).double()
    (made.plain(x) * weight).sum().backward()
    made.activation = "relu"
    assert not torch.allclose(made.record(x).backward(weight), made.flat.grad)


KINDS = {
    "separate": {},
    "shared": {"critic": "shared"},
    "ensemble": {"n_critics": 3},
    "shared ensemble": {"critic": "shared", "n_critics": 3},
    "of actions": {"of_actions": True},
    "shared of actions": {"critic": "shared", "of_actions": True, "n_critics": 2},
    "without critic": {"n_critics": 0},
}


SEVERAL = MultiCategorical((3, 4))
PAIRS = [(kind, Categorical(3)) for kind in KINDS]
PAIRS += [(kind, distribution) for distribution in (Normal(2), SEVERAL) for kind in KINDS if "actions" not in kind]


def pairs_of(count):
    """Actions [M, 2] of `SEVERAL`."""
    return torch.stack([torch.arange(count) % 3, torch.arange(count) % 4], 1)


@pytest.mark.parametrize(("kind", "distribution"), PAIRS, ids=[f"{k}-{type(d).__name__}" for k, d in PAIRS])
def test_a_loss_of_any_outputs_has_autograds_gradient(kind, distribution):
    network = ActorCritic(4, distribution, (8,), **KINDS[kind])
    network.towers.double()
    network.initialise(0, log_std=-0.3)
    x = torch.randn(9, 4).double()

    def loss(out):
        by_kind = {Categorical: torch.arange(9) % 3, Normal: torch.ones(9, 2).double(), MultiCategorical: pairs_of(9)}
        actions = by_kind[type(distribution)]
        total = distribution.log_prob(out.policy, out.rest, actions).sum() + distribution.entropy(out.policy, out.rest).mean()
        return total if out.values is None else total + (out.values**2).sum()

    recorded = network.record(x)
    found = recorded.backward(loss(recorded.output)).clone()
    loss(network.plain(x)).backward()
    torch.testing.assert_close(found, network.flat.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_have_their_shapes_and_starts(kind):
    options = KINDS[kind]
    network = ActorCritic(4, Categorical(3), (32, 32), **options)
    network.initialise(0)
    out = network(torch.randn(6, 4))
    critics = options.get("n_critics", 1)
    wanted = None if not critics else (critics, 6, 3) if options.get("of_actions") else (critics, 6)
    assert (None if out.values is None else tuple(out.values.shape)) == wanted
    # a policy that is nearly the same everywhere, values that are not nearly zero
    assert (torch.softmax(out.policy, -1) - 1 / 3).abs().max() < 0.02
    assert out.values is None or out.values.abs().max() > 0.05


def test_acting_with_numpy_is_the_networks_policy(tmp_path):
    network = ActorCritic(4, Categorical(3), (16,))
    network.initialise(3)
    with torch.no_grad():
        network.flat.add_(torch.randn(len(network.flat)), alpha=0.3)
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_array_equal(network.act(x), network(torch.from_numpy(x)).policy.argmax(1).numpy())
    with torch.no_grad():
        network.flat.mul_(-1)  # in place, as optimisers change it: acting must follow
    np.testing.assert_array_equal(network.act(x), network(torch.from_numpy(x)).policy.argmax(1).numpy())
    network.save(tmp_path)
    other = ActorCritic(4, Categorical(3), (16,))
    other.load(tmp_path)
    torch.testing.assert_close(other(torch.from_numpy(x)).policy, network(torch.from_numpy(x)).policy, rtol=0, atol=0)


@pytest.mark.parametrize("distribution", [Categorical(3), Normal(2), SEVERAL])
def test_noise_goes_on_from_block_to_block(distribution):
    noise = Noise(distribution, np.random.default_rng(0), 4)
    found = np.array([noise.step().copy() for _ in range(100)])
    whole = distribution.noise(np.random.default_rng(0), (100, 4))
    np.testing.assert_array_equal(found, whole)  # blocks of 32: no step's noise is used twice, none is lost


def test_actions_are_drawn_with_their_probabilities():
    policy, rng = Categorical(3), np.random.default_rng(0)
    logits = np.log(np.array([[0.2, 0.5, 0.3]], np.float32)) + 7
    drawn = policy.sample(np.repeat(logits, 60_000, 0), np.zeros(0), policy.noise(rng, (60_000,)))
    np.testing.assert_allclose(np.bincount(drawn) / 60_000, [0.2, 0.5, 0.3], atol=0.01)  # 5 standard errors
    assert np.isfinite(policy.noise(rng, (1000,))).all()
    pairs = np.log(np.array([[0.2, 0.5, 0.3, 0.1, 0.2, 0.3, 0.4]], np.float32))
    several = SEVERAL.sample(np.repeat(pairs, 60_000, 0), np.zeros(0), SEVERAL.noise(rng, (60_000,)))
    joint = np.bincount(several[:, 0] * 4 + several[:, 1], minlength=12).reshape(3, 4) / 60_000
    np.testing.assert_allclose(joint, np.outer([0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4]), atol=0.01)
    means, spread = np.tile(np.float32([[1, -2]]), (60_000, 1)), np.log(np.float32([0.5, 2]))
    normal = Normal(2).sample(means, spread, Normal(2).noise(rng, (60_000,)))
    np.testing.assert_allclose(normal.mean(0), [1, -2], atol=0.05)
    np.testing.assert_allclose(normal.std(0), [0.5, 2], rtol=0.02)


def test_distributions_agree_with_torch():
    out, other = torch.randn(7, 3).double(), torch.randn(7, 3).double()
    rest, other_rest = torch.randn(3).double() / 3, torch.randn(3).double() / 3
    ours, actions = Categorical(3), torch.arange(7) % 3
    theirs, theirs2 = torch.distributions.Categorical(logits=out), torch.distributions.Categorical(logits=other)
    torch.testing.assert_close(ours.log_prob(out, rest, actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(out, rest), theirs.entropy())
    torch.testing.assert_close(ours.kl(out, rest, other, rest), torch.distributions.kl_divergence(theirs, theirs2))
    wide, wide2, chosen = torch.randn(7, 7).double(), torch.randn(7, 7).double(), pairs_of(7)
    parts, parts2 = ([torch.distributions.Categorical(logits=x) for x in (w[:, :3], w[:, 3:])] for w in (wide, wide2))
    logp = sum(part.log_prob(a) for part, a in zip(parts, chosen.T, strict=True))
    torch.testing.assert_close(SEVERAL.log_prob(wide, rest, chosen), logp)
    torch.testing.assert_close(SEVERAL.entropy(wide, rest), sum(part.entropy() for part in parts))
    kl = sum(torch.distributions.kl_divergence(p, q) for p, q in zip(parts, parts2, strict=True))
    torch.testing.assert_close(SEVERAL.kl(wide, rest, wide2, rest), kl)
    normal, real = Normal(3), torch.randn(7, 3).double()
    a = torch.distributions.Independent(torch.distributions.Normal(out, rest.exp()), 1)
    b = torch.distributions.Independent(torch.distributions.Normal(other, other_rest.exp()), 1)
    torch.testing.assert_close(normal.log_prob(out, rest, real), a.log_prob(real))
    torch.testing.assert_close(normal.entropy(out, rest), a.entropy())
    torch.testing.assert_close(normal.kl(out, rest, other, other_rest), torch.distributions.kl_divergence(a, b))


@pytest.mark.parametrize("distribution", [Categorical(3), Normal(2), SEVERAL], ids=["discrete", "continuous", "several"])
@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("d_entropy", [0.0, -0.3])
def test_the_closed_form_down_to_log_probs_and_entropies_equals_autograd(distribution, critic, d_entropy):
    network = ActorCritic(4, distribution, (8, 8), critic=critic)
    network.initialise(0, log_std=-0.4)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        network.flat.add_(0.3 * torch.randn(network.flat.shape, generator=g))
    observations, steps = torch.randn(9, 4, generator=g), 7  # two states more than actions: those behind the last step
    by_kind = {
        Categorical: torch.arange(steps) % 3,
        Normal: torch.randn(steps, 2, generator=g),
        MultiCategorical: pairs_of(steps),
    }
    actions = by_kind[type(distribution)]
    d_logp, d_values = torch.randn(steps, generator=g), torch.randn(1, steps, generator=g)
    out = network.plain(observations)
    logp = distribution.log_prob(out.policy[:steps], out.rest, actions)
    entropy = distribution.entropy(out.policy[:steps], out.rest)
    whole = (logp * d_logp).sum() + d_entropy * entropy.sum() + (out.values[:, :steps] * d_values).sum()
    (expected,) = torch.autograd.grad(whole, network.flat)
    found = network.record_closed(observations).backward_closed(actions, d_logp, d_entropy, d_values)
    assert torch.allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("hidden", "outputs", "states"), [((256, 256), (2,), 64), ((7, 6), (3, 1, 1), 11), ((), (2, 2), 5), ((33,), (1,), 1)]
)
def test_the_kernels_of_relu_towers_compute_what_pytorch_does(hidden, outputs, states, monkeypatch):
    made = StackedMLP(5, hidden, outputs, "relu", extra=2)
    made.initialise(0, [1.0] * len(outputs))
    x = torch.randn(states, 5)
    found = {}
    for name in ("kernels", "PyTorch"):
        if name == "PyTorch":
            monkeypatch.setattr(networks, "kernels", lambda: "off")
        recording = made.record(x)
        few = made.record(x).backward(torch.ones(len(outputs), max(1, states // 2), max(outputs)))[:-2].clone()
        weight = torch.arange(recording.output.numel(), dtype=torch.float32).view_as(recording.output) / recording.output.numel()
        found[name] = (type(recording).__name__, recording.output, recording.backward(weight)[:-2].clone(), few)
    assert found["kernels"][0] != found["PyTorch"][0]
    for ours, theirs in zip(found["kernels"][1:], found["PyTorch"][1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_negative_control_kernels_given_another_observation_differ():
    made = StackedMLP(5, (7, 6), (3, 1, 1), "relu")
    made.initialise(0, [1.0, 1.0, 1.0])
    x, weight = torch.randn(11, 5), torch.randn(3, 11, 3)
    recording = made.record(x)
    right = recording.backward(weight).clone()
    x[3] += 1  # the recording reads the observations again
    assert not torch.allclose(recording.backward(weight), right)
