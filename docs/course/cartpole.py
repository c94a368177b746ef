# %% [markdown]
# # 3 · From REINFORCE to PPO on CartPole
#
# A bandit has one step. Now the agent acts many times before we know the outcome, and its state is
# four real numbers, so a table is impossible. The policy is a small neural network, and the
# identity is the same,
#
#     ∇J = E[ Σ_t ∇log π(a_t|s_t)·Ψ_t ].
#
# This chapter goes from the simplest Ψ to PPO. Each step corrects one fault of the previous step.

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
# CartPole gives a reward of 1 for each step that the pole stays up, for 500 steps at most. A random
# policy lasts about 20 steps.
#
# ## Four forms of Ψ
#
# - **The return of the whole episode**, Ψ_t = R(τ). Each action is credited with all rewards of the
#   episode, even with those before it.
# - **The reward to go**, Ψ_t = G_t = Σ_{u≥t} γ^(u−t)·r_u. An action cannot change the past, so
#   the past is only noise.
# - **Minus the mean of the batch**, and in units of its standard deviation ("whitened"): a baseline
#   that costs nothing.
# - **Minus a value**, Ψ_t = G_t − V(s_t). V is a second network, the **critic**, that learns to
#   predict G_t. Chapter 2 shows why V may be subtracted.
#
# Each form is a `PolicyGradient` that differs in Ψ alone. All collect 8 episodes, take one gradient
# step, and discard the episodes.


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
# Leaving out past rewards helps most. The mean of the batch is a strong baseline, and costs
# nothing. The critic has to be learned first, from the same few episodes, and is no better here. A
# critic has another use.
#
# ## What a critic is for: GAE
#
# G_t is a sum of up to 500 rewards, and each depends on chance. With a critic we can use only the
# next few rewards, and V for the rest. With the TD residual δ_t = r_t + γ·V(s_{t+1}) − V(s_t)
# this is
#
#     Â_t = Σ_l (γλ)^l·δ_{t+l}      (generalised advantage estimation)
#
# The parameter λ sets how soon V is used. With λ = 0 it is used after one step: little variance,
# and all of the critic's error. With λ = 1 only the rewards count: Â_t = G_t − V(s_t). Here is
# one episode of 40 steps with a critic that is wrong, and an event that it did not foresee.

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
# With λ = 0 only the action at t = 25 is blamed. With λ = 1 all actions before it are blamed too,
# each a little less. If the cause was earlier, λ = 0 misses it; if the event was chance, λ = 1
# blames actions without fault. On CartPole about 0.95 is usual. For language models it is 1
# (chapter 6).
#
# ## Use the data more than once: PPO
#
# REINFORCE takes one step per batch, since its gradient is right only for the policy that collected
# the batch. For further steps we can correct with the **ratio** ρ = π(a|s) / π_old(a|s),
#
#     maximise E[ ρ_t·Â_t ],
#
# as long as the two policies are close. PPO keeps them close by a **clip**. It maximises
#
#     min( ρ·Â, clip(ρ, 1 − ε, 1 + ε)·Â ):
#
# once a good action is 1 + ε times as likely as before, this batch gives no further gain; the same
# holds once a bad action is 1 − ε times as likely.

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
# The clip is one-sided. A bad action that became *more* likely (A = −1, ρ = 1.3) still gets its
# full gradient: the clip only stops actions that have moved far enough in the right direction.
#
# Now the same 256 steps of experience per round for both: A2C makes one pass over them, PPO ten.

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
# Network, advantages and number of environment steps are the same. PPO learns more from each step.
#
# ## Where it fails
#
# Is the clip the reason, or are the ten passes? Remove the clip, and raise the learning rate to
# learn faster.

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
# Without the clip, twenty large steps on the same batch move the policy far from the one that
# collected the data, to where the data say nothing. The clip is no guarantee either; it only
# removes the gain of moving further. (TRPO does guarantee a bound on the KL; `psigrad.control` has
# it.)
#
# Note that these runs needed tens of thousands of steps of a simulator. A language model needs
# only itself and a reward.

# %% [markdown]
# ## Now on a language model
#
# A completion is an episode, and a token is an action. The objects are the same; only the numbers
# and the KL penalty differ. Compare the two PPOs:

# %%
from psigrad.objective.catalog import PPO as language_ppo

for part in ("psi", "ratio", "surrogate", "aggregate", "kl", "critic"):
    here, there = getattr(presets.PPO, part), getattr(language_ppo, part)
    print(f"{part:10} {getattr(here, '__name__', here)}")
    if here != there:
        print(f"  language {there}")

# %% [markdown]
# For language models PPO has γ = 1 and λ = 1, since the reward comes once, at the end. A **KL
# penalty** keeps the policy near the model it started from.
#
# Let us watch the ratio. A small Qwen3 writes 64 completions of 6 tokens; token 0 is good. We make
# 12 passes over this one batch with PPO's ratio and clip. Ψ is chapter 2's leave-one-out
# advantage, so no critic is needed.

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
# On the first pass the ratio is exactly 1: the policy that learns is the one that sampled. This is
# what *on-policy* means, and a good test of any implementation. In later passes more and more
# tokens are clipped.
#
# ## The derivation: GAE and PPO's objective
#
# The advantage estimate that uses V after k steps is a sum of k TD residuals, in which all values but the
# first and the last cancel:
#
#     Â_t(k) = Σ_{l<k} γ^l·δ_{t+l} = Σ_{l<k} γ^l·r_{t+l} + γ^k·V(s_{t+k}) − V(s_t).
#
# GAE is the mean of these estimates with weights (1 − λ)·λ^(k−1). Each δ_{t+l} is in all estimates with k > l, whose
# weights sum to λ^l:
#
#     Â_t = (1 − λ)·Σ_k λ^(k−1)·Â_t(k) = Σ_l (γλ)^l·δ_{t+l}.
#
# Computed backwards from the end, this is one line of code: Â_t = δ_t + γλ·Â_{t+1}.
#
# PPO's ratio comes from importance sampling. For actions that π_old drew, E_old[ρ·f] = E[f], so
#
#     ∇E_old[ ρ_t·Â_t ] = E_old[ ρ_t·∇log π(a_t|s_t)·Â_t ],
#
# which at π = π_old is the policy gradient. The ratio does not correct for the *states*, which also come from π_old. This error is
# bounded by the distance of the two policies in each state (Kakade and Langford 2002; TRPO), and the clip is a cheap way to keep
# this distance small.
#
# ## In pseudocode
#
# ```text
# PPO
# repeat
#     play T steps with π_old ← π_θ; keep s_t, a_t, r_t, log π_old(a_t|s_t)
#     Â ← 0
#     for t from the last step to the first
#         δ ← r_t + γ V(s_{t+1}) − V(s_t)          (V = 0 after a step that ends the episode)
#         Â ← δ + γ λ Â;  Â_t ← Â;  G_t ← Â_t + V(s_t)
#     for a few epochs, for each minibatch
#         ρ ← exp( log π_θ(a|s) − log π_old(a|s) )
#         loss ← −mean min( ρ Â, clip(ρ, 1 − ε, 1 + ε) Â ) + c mean (V(s) − G)²
#         one step of Adam on it
# ```
#
# ## Read on
#
# - Schulman, Moritz, Levine, Jordan and Abbeel 2016, *GAE*, arXiv:1506.02438.
# - Schulman, Levine, Moritz, Jordan and Abbeel 2015, *TRPO*, arXiv:1502.05477: the bound that the clip replaces.
# - Schulman, Wolski, Dhariwal, Radford and Klimov 2017, *PPO*, arXiv:1707.06347.
# - Andrychowicz and others 2021, *What matters in on-policy RL?*, arXiv:2006.05990: 250,000 runs about the details.
#
# ## Exercises
#
# 1. Why does `REINFORCE_REWARD_TO_GO` differ from `REINFORCE_TOTAL_RETURN` on CartPole, and not for
#    a language model with a reward at the end and γ = 1? Check it on a `Batch`.
# 2. Which λ makes `gae` equal to `td_residual`? Check it.
# 3. The four corners: for A = ±1 and ρ = 0.7 or 1.3, say which have a gradient under `clip(0.2,
#    0.28)` before you compute it.

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# If the only reward is at the end, it comes after every step: G_t = R(τ) for all t.
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
# λ = 0: only the first residual counts.
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
