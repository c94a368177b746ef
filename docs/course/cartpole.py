# %% [markdown]
# # 3 · From REINFORCE to PPO on CartPole
#
# An episode now has many actions, and the policy is a small neural network. Its gradient is that of chapter 2,
#
#     ∇J = E[ Σ_t ∇log π(a_t|s_t)·Ψ_t ].
#
# This chapter compares forms of Ψ, which says how good an action was.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from psigrad.control import Agent, evaluate_policy
from psigrad.control.methods import presets
from psigrad.objective import Batch, PolicyOutputs
from psigrad.objective.parts.advantage import gae, leave_one_out, reward_to_go, whitened
from psigrad.objective.parts.surrogate import clip, unclipped

# %% tags=["parameters"]
seeds = 3
steps = 40_000  # environment steps of each run

# %% [markdown]
# CartPole pays 1 for each step that the pole stays up, for at most 500 steps.
#
# ## Four forms of Ψ
#
# - **The return of the episode**, R(τ), sums all rewards.
# - **The reward to go**, G_t = Σ_{u≥t} γ^(u−t)·r_u, leaves out earlier rewards, which the action cannot change.
# - **The whitened reward to go** is G_t minus the batch's mean, divided by its standard deviation.
# - **The reward to go minus a value**, G_t − V(s_t), needs a second network, the **critic** V, which predicts G_t.


# %%
def curves(algorithm, **settings):
    """Returns over steps of the environment, for each seed, and the last agent."""
    grid, found = np.linspace(0, steps, 41), []
    for seed in range(seeds):
        seen = [(0, 20.0)]

        def note(agent, figures, seen=seen):
            if "rollout/ep_rew_mean" in figures:
                seen.append((figures["timesteps"], figures["rollout/ep_rew_mean"]))

        agent = Agent("CartPole-v1", algorithm=algorithm, seed=seed, **settings)
        agent.learn(steps, note)
        found.append(np.interp(grid, *zip(*seen, strict=True)))
    return grid, np.array(found), agent


def show(ax, results):
    for name, (grid, found, _) in results.items():
        (line,) = ax.plot(grid, np.median(found, axis=0), label=name)
        ax.fill_between(
            grid, found.min(0), found.max(0), alpha=0.2, lw=0, color=line.get_color()
        )
    ax.axhline(500, color="black", lw=1, ls=":")
    ax.set(xlabel="steps of the environment", ylabel="return")
    ax.legend()


same = {
    "tuned": False,
    "n_steps": 0,
    "n_envs": 8,
    "n_episodes": 1,
    "learning_rate": 1e-2,
}
to_go = presets.REINFORCE_REWARD_TO_GO
forms = {
    "R(τ)": curves(presets.REINFORCE_TOTAL_RETURN, **same),
    "G": curves(to_go, **same),
    "G, whitened": curves(replace(to_go, psi=whitened(reward_to_go(0.99))), **same),
    "G − V": curves(replace(presets.REINFORCE, psi=gae(0.99, 1.0)), **same),
}
fig, ax = plt.subplots()
show(ax, forms)
plt.show()
for name, (_, found, _) in forms.items():
    print(f"{name:13} mean return over the run {found.mean():5.0f}")

# %% [markdown]
# Leaving out earlier rewards helps most. Whitening helps too, and more than the critic.
#
# ## What a critic is for: GAE
#
# G_t sums many random rewards, so its variance is large. With a critic we can sum the next few rewards only, and use V
# for later ones. With the TD residual δ_t = r_t + γ·V(s_{t+1}) − V(s_t), generalised advantage estimation (GAE) is
#
#     Â_t = Σ_l (γλ)^l·δ_{t+l}.
#
# With λ = 0 the variance is small, but the critic's errors bias the estimate. With λ = 1 there is no such bias: Â_t = G_t
# − V(s_t).
#
# In the episode below each reward is 1, except for −8 at t = 25. The critic always predicts 12.

# %%
length = 40
mask = torch.ones(1, length, dtype=torch.bool)
reward = torch.ones(1, length)
reward[0, 25] = -8  # a surprise
episode = Batch(
    mask=mask,
    reward=reward,
    logp_old=torch.zeros(1, length),
    group=torch.zeros(1, dtype=torch.long),
    value=torch.full((1, length), 12.0),  # the critic says 12 everywhere
    last_value=torch.zeros(1),
)
fig, ax = plt.subplots()
for lam in (0.0, 0.9, 1.0):
    ax.plot(gae(0.95, lam)(episode)[0], label=f"λ = {lam:g}")
ax.axvline(25, color="black", lw=1, ls=":")
ax.set(
    xlabel="t", ylabel="advantage", title="Who is blamed for the surprise at t = 25?"
)
ax.legend()
plt.show()
difference = gae(0.95, 1.0)(episode) - (reward_to_go(0.95)(episode) - episode.value)
print(f"λ = 1 against G − V: {difference.abs().max():.0e}")

# %% [markdown]
# With λ = 0 only the action at t = 25 is blamed. With λ = 1 all earlier actions are blamed too. At the end all lines
# fall, because the critic still expects 12.
#
# ## Use the data more than once: PPO
#
# REINFORCE's gradient is right only for the policy π_old that collected the batch. PPO takes several steps on each batch.
# It multiplies Â by the **ratio** ρ = π(a|s)/π_old(a|s), and a **clip** keeps π near π_old. PPO maximises
#
#     min( ρ·Â, clip(ρ, 1 − ε, 1 + ε)·Â ).
#
# For a good action this is constant above ρ = 1 + ε. For a bad action it is constant below ρ = 1 − ε.

# %%
log_ratio = torch.linspace(-1.2, 0.8, 400)
fig, axes = plt.subplots(1, 2, sharex=True)
for ax, sign in zip(axes, (1.0, -1.0), strict=True):
    advantage = torch.full_like(log_ratio, sign)
    for name, surrogate in (("unclipped", unclipped), ("clip(0.2)", clip(0.2, 0.2))):
        gain = -surrogate(log_ratio, log_ratio, advantage)
        ax.plot(log_ratio.exp(), gain, "--" if name == "unclipped" else "-", label=name)
    ax.set(xlabel="ratio ρ", title=f"what is maximised, A = {sign:+g}")
    ax.legend()
plt.show()

passes = {}
for sign in (1.0, -1.0):
    for ratio in (0.7, 1.0, 1.3):
        moved = torch.tensor([ratio]).log().requires_grad_()
        clip(0.2, 0.2)(moved, moved, torch.tensor([sign])).sum().backward()
        passes[sign, ratio] = bool(moved.grad != 0)
        print(
            f"A = {sign:+g}, ρ = {ratio}: gradient {'yes' if passes[sign, ratio] else 'no'}"
        )

# %% [markdown]
# A2C makes one pass over each batch of 256 steps, and PPO makes ten:

# %%
rounds = {"tuned": False, "n_envs": 8, "n_steps": 32, "batch_size": 0, "gamma": 0.98}
rounds |= {"gae_lambda": 0.95, "learning_rate": 1e-3, "log_interval": 4}
results = {
    "A2C, 1 pass": curves(presets.A2C, **rounds),
    "PPO, 10 passes": curves(presets.PPO, n_epochs=10, **rounds),
}
fig, ax = plt.subplots()
show(ax, results)
plt.show()
mean, _ = evaluate_policy(results["PPO, 10 passes"][2], n_eval_episodes=50)
print(f"PPO's last agent, 50 new episodes, most probable actions: {mean:.0f} of 500")

# %% [markdown]
# PPO learns more from the same number of steps.
#
# ## Where it fails
#
# Does PPO need the clip? Here it makes twenty passes with a larger learning rate:

# %%
hurry = rounds | {"learning_rate": 1e-2, "n_epochs": 20}
results_of_hurry = {
    "with the clip": curves(presets.PPO, **hurry),
    "without": curves(replace(presets.PPO, surrogate=unclipped), **hurry),
}
fig, ax = plt.subplots()
show(ax, results_of_hurry)
plt.show()
for name, (_, found, _) in results_of_hurry.items():
    print(f"{name:14} mean return of the last quarter {found[:, -10:].mean():5.0f}")

# %% [markdown]
# Without the clip the policy moves so far that the batch no longer describes it. The clip is no guarantee either: it
# stops gradients, but does not move the policy back.

# %% [markdown]
# ## Now on a language model
#
# A completion is an episode, and a token is an action. Here are PPO's parts for CartPole and, where they differ, for
# language models:

# %%
from psigrad.objective.catalog import PPO as language_ppo

for part in ("psi", "ratio", "surrogate", "aggregate", "kl", "critic"):
    here, there = getattr(presets.PPO, part), getattr(language_ppo, part)
    print(f"{part:10} {getattr(here, '__name__', here)}")
    if here != there:
        print(f"  language {there}")

# %% [markdown]
# The **KL penalty** keeps the policy near the initial model.
#
# Now a small Qwen3 is rewarded for each token 0. PPO makes 12 passes over 64 completions, here without a critic.

# %%
from psigrad.language.models import tiny


def many_passes(surrogate, count=12):
    model = tiny.model("qwen3", 9, hidden=32, layers=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = replace(
        language_ppo, psi=leave_one_out, critic=None, kl=None, surrogate=surrogate
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((64, 1), 8)
    with torch.no_grad():
        for _ in range(6):
            weights = model(tokens).logits[:, -1, :8].softmax(1)
            new = torch.multinomial(weights, 1, generator=generator)
            tokens = torch.cat([tokens, new], 1)

    def log_probs():
        logits = model(tokens[:, :-1]).logits[..., :8]
        return logits.log_softmax(2).gather(2, tokens[:, 1:, None])[..., 0]

    reward = torch.zeros(64, 6)
    reward[:, -1] = (tokens[:, 1:] == 0).float().mean(1)
    mask, group = (
        torch.ones_like(reward, dtype=torch.bool),
        torch.zeros(64, dtype=torch.long),
    )
    batch = Batch(mask=mask, reward=reward, logp_old=log_probs(), group=group)
    prepared = method.prepare(batch, method.initial_state())
    far, clipped = [], []
    for _ in range(count):
        logp = log_probs()
        loss = method.loss(prepared, PolicyOutputs(logp), method.totals(prepared), {})
        far.append(float((logp - batch.logp_old).abs().max().detach()))
        clipped.append(float(loss.terms.get("clip_ratio/region_mean", 0.0)))
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
    return far, clipped


fig, axes = plt.subplots(1, 2)
held, clipped = many_passes(clip(0.2, 0.2))
free, _ = many_passes(unclipped)
axes[0].plot(free, "--", label="unclipped")
axes[0].plot(held, label="clip(0.2)")
axes[0].set(xlabel="pass", title="largest |log ρ| of a token")
axes[0].legend()
axes[1].plot(clipped)
axes[1].set(xlabel="pass", title="share of tokens without gradient")
plt.show()
print(f"first pass: |log ρ| = {held[0]:.0e}, {clipped[0]:.0%} clipped")

# %% [markdown]
# On the first pass (*on-policy*) all ratios are 1. Later more and more tokens are clipped.
#
# ## The derivation: GAE and PPO's objective
#
# The estimate with V after k steps is a sum of k TD residuals, because the values at the steps in between cancel:
#
#     Â_t(k) = Σ_{l<k} γ^l·δ_{t+l} = Σ_{l<k} γ^l·r_{t+l} + γ^k·V(s_{t+k}) − V(s_t).
#
# GAE weights these estimates by (1 − λ)·λ^(k−1). Those that contain δ_{t+l} have k > l, and their weights sum to λ^l:
#
#     Â_t = (1 − λ)·Σ_k λ^(k−1)·Â_t(k) = Σ_l (γλ)^l·δ_{t+l}.
#
# PPO's ratio comes from importance sampling, E_old[ρ·f] = E[f]:
#
#     ∇E_old[ ρ_t·Â_t ] = E_old[ ρ_t·∇log π(a_t|s_t)·Â_t ].
#
# At π = π_old this is the policy gradient. Further away it is not, because the *states* still come from π_old.
#
# ## In pseudocode
#
# ```text
# repeat
#     play T steps with π_old ← π_θ
#     Â ← 0
#     for t from the last step to the first
#         δ ← r_t + γ V(s_{t+1}) − V(s_t)    (V = 0 after the end)
#         Â ← δ + γ λ Â;  Â_t ← Â;  G_t ← Â_t + V(s_t)
#     for a few epochs, for each minibatch
#         ρ ← π_θ(a|s) / π_old(a|s)
#         loss ← −mean min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â) + c mean (V(s) − G)²
#         one step of Adam
# ```
#
# ## Read on
#
# - Schulman and others 2016, *GAE*, arXiv:1506.02438.
# - Schulman and others 2015, *TRPO*, arXiv:1502.05477.
# - Schulman and others 2017, *PPO*, arXiv:1707.06347.
#
# ## Exercises
#
# 1. Why is G_t = R(τ) for a language model (reward at the end, γ = 1), but not on CartPole? Check it on a `Batch`.
# 2. For which λ does `gae` equal `td_residual`? Check it.
# 3. For A = ±1 and ρ = 0.7 or 1.3, which cases have a gradient under `clip(0.2, 0.28)`?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# The only reward is at the end, so it comes after every step: G_t = R(τ) for all t.
from psigrad.objective import terminal
from psigrad.objective.parts.advantage import total_return

three = torch.ones(1, 3, dtype=torch.bool)
outcome = replace(
    episode,
    mask=three,
    reward=terminal(torch.tensor([5.0]), three),
    logp_old=torch.zeros(1, 3),
    value=None,
)
print(total_return()(outcome).tolist(), reward_to_go()(outcome).tolist())
print(total_return()(episode)[0, :3].tolist(), reward_to_go()(episode)[0, :3].tolist())

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# For λ = 0, where only the first residual counts.
from psigrad.objective.parts.advantage import td_residual

print(bool((gae(0.95, 0.0)(episode) == td_residual(0.95)(episode)).all()))

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# A = +1 has no gradient above 1.28, and A = −1 none below 0.8. So (+1, 1.3) and (−1, 0.7) have
# none.
for sign in (1.0, -1.0):
    for ratio in (0.7, 1.3):
        moved = torch.tensor([ratio]).log().requires_grad_()
        clip(0.2, 0.28)(moved, moved, torch.tensor([sign])).sum().backward()
        print(f"A = {sign:+g}, ρ = {ratio}: gradient {float(moved.grad):+.2f}")
