# %% [markdown]
# # 1 · A grid world, and what a value is
#
# In reinforcement learning an **agent** sees a **state**, chooses an **action**, gets a **reward** and moves to the next
# state. In a world as small as this one we can compute exactly what later chapters estimate.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import psigrad.tabular as tabular
from psigrad.tabular import GridWorld

# %% tags=["parameters"]
episodes = 4000  # the size of this chapter

# %% [markdown]
# ## A Markov decision process
#
# A Markov decision process has states S, actions A, and
#
# - P(s'|s, a), the probability of the next state;
# - R(s, a), the expected reward;
# - γ, the discount: a reward one step later counts γ times as much.
#
# In our grid world a treasure (+) pays +1 and a trap (-) pays −1. Both end the episode. One move in ten slips sideways.

# %%
grid = GridWorld(slip=0.1, gamma=0.9)
mdp = grid.mdp()
print(grid.to_text())
print(mdp.n_states, "states,", mdp.n_actions, "actions:", *tabular.ACTIONS)

# %% [markdown]
# ## What a policy is worth
#
# A **policy** π(a|s) gives each action a probability. The **return** of an episode is the discounted sum of its rewards,
#
#     G = r₀ + γ·r₁ + γ²·r₂ + …
#
# The **value** V(s) is the expected return from s. It satisfies the **Bellman equation**
#
#     V(s) = Σ_a π(a|s)·( R(s, a) + γ·Σ_s' P(s'|s, a)·V(s') ).
#
# This equation is linear in V, so we can solve it, here for a policy that moves at random:

# %%
aimless = tabular.uniform_policy(mdp)
value = tabular.evaluate(mdp, aimless)

cell = grid.state((2, 6))
from_there = replace(grid, start=(2, 6)).mdp()
paths = tabular.sample_paths(from_there, aimless, episodes, seed=0)
returns = paths.rewards @ grid.gamma ** np.arange(paths.rewards.shape[1])
mean, error_of_mean = returns.mean(), returns.std() / len(returns) ** 0.5
value_of_cell = value[cell]
print(f"V at (2, 6) by the Bellman equation: {value_of_cell:.3f}")
print(f"mean of {episodes} returns: {mean:.3f} ± {1.96 * error_of_mean:.3f}")

# %% [markdown]
# The mean of 4,000 returns, a **Monte Carlo** estimate of V, is still uncertain by about 0.02.
#
# ## Which action is better than usual?
#
# Q(s, a) is the value of taking a first and following π afterwards. The **advantage**
#
#     A(s, a) = Q(s, a) − V(s)
#
# says how much better a is than π on average.

# %%
advantage = tabular.advantages(mdp, aimless)
for name, a in zip(tabular.ACTIONS, advantage[cell], strict=True):
    print(f"{name:>5}  {a:+.3f}")
average = (aimless * advantage).sum(axis=1)
print(f" mean  {np.abs(average).max():.0e} at most, over all states")

# %% [markdown]
# ## From values to the best policy
#
# - **Policy iteration** evaluates a policy, takes the best action in each state as the new policy, and repeats.
# - **Value iteration** sweeps over all states, again and again: V(s) ← max_a ( R(s, a) + γ·Σ_s' P(s'|s, a)·V(s') ).


# %%
def draw(ax, grid, value, policy, title):
    colour = value.copy()
    for place, prize in grid.prizes.items():
        colour[grid.state(place)] = prize
    ax.imshow(
        colour.reshape(grid.rows, grid.columns), cmap="RdYlGn", vmin=-1.3, vmax=1.3
    )
    for state in np.flatnonzero(np.abs(value) > 1e-9):
        row, column = grid.cell(state)
        ax.text(column, row, tabular.ARROWS[policy[state]], ha="center", va="center")
    ax.set(title=title, xticks=[], yticks=[])


sweeps = list(tabular.value_iteration(mdp))
fig, axes = plt.subplots(1, 4, figsize=(7.2, 2.1))
for ax, k in zip(axes, (1, 3, 6, len(sweeps)), strict=True):
    draw(ax, grid, sweeps[k - 1].value, sweeps[k - 1].policy, f"after sweep {k}")
plt.show()

# %% [markdown]
# The treasure's value spreads by one cell per sweep. The best actions (arrows) are found long before the values are
# exact:

# %%
best = tabular.solve(mdp)
loss = [np.abs(tabular.evaluate(mdp, s.policy) - best.value).max() for s in sweeps]
first = next(k for k, lost in enumerate(loss) if lost < 1e-9)
print(f"after sweep {first + 1} nothing is lost by following the arrows;")
print(
    f"the numbers are still wrong by {np.abs(sweeps[first].value - best.value).max():.3f}"
)

# %% [markdown]
# Each sweep multiplies the error by γ or less. Policy iteration needs fewer rounds, but each one costs more.

# %%
error = [np.abs(sweep.value - best.value).max() for sweep in sweeps]
rounds = [s for s in tabular.policy_iteration(mdp) if s.step == "evaluate"]
error_of_rounds = [np.abs(sweep.value - best.value).max() for sweep in rounds]
count = np.arange(1, len(sweeps) + 1)
bound = np.abs(best.value).max() * mdp.gamma**count

fig, ax = plt.subplots()
ax.semilogy(count, error, label="value iteration")
ax.semilogy(count[: len(rounds)], error_of_rounds, "o-", label="policy iteration")
ax.semilogy(count, bound, "--", color="grey", label="the bound, γᵏ·max|V*|")
ax.set(xlabel="sweep, or round", ylabel="largest error of V", ylim=(1e-12, 2))
ax.legend()
plt.show()
gap = np.abs(rounds[-1].value - sweeps[-1].value).max()
print(
    f"{len(rounds)} rounds of policy iteration, {len(sweeps)} sweeps of value iteration:"
)
print(f"the same values, up to {gap:.0e}")

# %% [markdown]
# ## Where it fails
#
# We used P and R, which are rarely known. **Q-learning** needs neither: after each action it updates Q with a step size
# α,
#
#     Q(s, a) ← Q(s, a) + α·( r + γ·max_a' Q(s', a') − Q(s, a) )

# %%
step_size = tabular.inverse_visits(0.6)
distance = []
for lesson in tabular.q_learning(mdp, episodes, alpha=step_size, epsilon=0.3, seed=0):
    wrong_by = np.abs(lesson.q.max(axis=1) - best.value)[~mdp.is_terminal]
    distance.append(wrong_by.mean())

fig, ax = plt.subplots()
ax.loglog(range(1, len(distance) + 1), distance)
ax.set(
    xlabel="episodes", ylabel="mean error of max Q", title="Q-learning, without a model"
)
plt.show()
print(f"mean error after {episodes} episodes: {distance[-1]:.3f}")

# %% [markdown]
# But the table of Q needs a row for each state, and a language model has a state for each possible text. So the next
# chapters train the policy itself, by gradients.

# %% [markdown]
# ## Now on a language model
#
# Writing text is a Markov decision process too: the state is the text so far, and an action appends a token. The policy
# here is a small Qwen3 with random weights.
#
# It writes three letters, each from a to d, and gets a reward of 1 if they are in strict alphabetical order. Here γ = 1.

# %%
from itertools import product

import torch

from psigrad.language.models import tiny

letters = "abcd"
start_token = len(letters)
model = tiny.model("qwen3", len(letters) + 1, hidden=32, layers=1, seed=3)

prefixes = ["".join(p) for n in range(4) for p in product(letters, repeat=n)]
number = {prefix: i for i, prefix in enumerate(prefixes)}
transitions = np.zeros((4, 85, 85))
rewards = np.zeros((85, 4))
for prefix in prefixes:
    for action, letter in enumerate(letters if len(prefix) < 3 else ""):
        text = prefix + letter
        transitions[action, number[prefix], number[text]] = 1.0
        if len(text) == 3 and text[0] < text[1] < text[2]:
            rewards[number[prefix], action] = 1.0
writing = tabular.MDP(
    transitions, rewards, 1.0, terminal=np.array([len(p) == 3 for p in prefixes])
)


def next_token(prefix):
    """The model's probabilities, at a low temperature, so that it prefers something."""
    tokens = torch.tensor([[start_token, *map(letters.index, prefix)]])
    with torch.no_grad():
        logits = model(tokens).logits[0, -1, :4]
    return torch.softmax(logits / 0.3, 0).double().numpy()


policy = np.array([next_token(prefix) for prefix in prefixes])
policy /= policy.sum(axis=1, keepdims=True)
value = tabular.evaluate(writing, policy)
for prefix in ("", "a", "ab", "b", "d"):
    print(f"V({prefix!r:>4}) = {value[number[prefix]]:.3f}")

# %% [markdown]
# V of a text is the probability that the model completes it in alphabetical order. PPO's critic learns this V (chapter
# 6).
#
# The action determines the next state here. So with the exact V, the **TD residual** r + γ·V(s') − V(s) equals the
# advantage:

# %%
from psigrad.objective import Batch, terminal
from psigrad.objective.parts.advantage import td_residual

texts = ["abd", "adb", "bcd"]
states = [[number[text[:t]] for t in range(3)] for text in texts]
actions = [[letters.index(letter) for letter in text] for text in texts]
mask = torch.ones(3, 3, dtype=torch.bool)
batch = Batch(
    mask=mask,
    reward=terminal(torch.tensor([1.0, 0.0, 1.0]), mask),
    logp_old=torch.tensor(np.log(policy[states, actions])),
    group=torch.zeros(3, dtype=torch.long),
    value=torch.tensor(value[states]),
    last_value=torch.zeros(3),
)
estimated = td_residual(1.0)(batch).numpy()
exact = tabular.advantages(writing, policy)[states, actions]
for text, row in zip(texts, estimated, strict=True):
    print(
        text,
        "  ".join(f"{letter}: {a:+.3f}" for letter, a in zip(text, row, strict=True)),
    )
print(f"largest difference from A = Q − V: {np.abs(estimated - exact).max():.0e}")

# %% [markdown]
# In "adb" the "a" was a good start, the "d" lost the reward, and the "b" changed nothing.
#
# ## The derivation: why iteration finds the best policy
#
# Let B·V be the values after one sweep of value iteration from V. Two maxima differ by at most the largest difference of
# their arguments. Therefore
#
#     |(B·V)(s) − (B·W)(s)| ≤ max_a γ·Σ_s' P(s'|s, a)·|V(s') − W(s')| ≤ γ·‖V − W‖,
#
# where ‖·‖ is the largest absolute entry. So there is only one fixed point V*, and value iteration converges to it.
#
# ## In pseudocode
#
# ```text
# value iteration                               Q-learning
# V ← 0                                         Q ← 0
# repeat, for each state s                      repeat, in the current state s
#     for each action a                             a ← argmax Q(s,·), or with probability ε any action
#         Q(s,a) ← R(s,a) + γ Σ P(s'|s,a) V(s')     do a; see r and s'
#     V(s) ← max Q(s,·)                             Q(s,a) ← Q(s,a) + α (r + γ max Q(s',·) − Q(s,a))
# π(s) ← argmax Q(s,·)
# ```
#
# ## Read on
#
# - Sutton and Barto 2018, *Reinforcement Learning: An Introduction*, chapters 3, 4 and 6.
# - Puterman 1994, *Markov Decision Processes*, chapter 6.
# - Watkins and Dayan 1992, *Q-learning*, Machine Learning 8.
#
# ## Exercises
#
# 1. Move the trap to (1, 5), next to the treasure. How do the arrows around it change, and why?
# 2. Set γ to 0.5. How do the values and the arrows change?
# 3. Pay 1/3 for the first letter, and 1/3 for each letter that is later in the alphabet than the one before it. What is
#    V("")?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# To the left of the trap the two arrows turn away from it. The arrows above and below still
# pass it, because a slip into the trap (one move in twenty) costs less than a detour. With
# `slip` = 0.4 they turn away too.
moved = grid.moved((3, 4), (1, 5))
solution = tabular.solve(moved.mdp())
print(moved.render(solution.value, solution.policy))

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# The values shrink, since a treasure d steps away is worth about γᵈ. Only three arrows change.
impatient = tabular.solve(replace(grid, gamma=0.5).mdp())
print("V at (7, 0):", f"{best.value[56]:.4f} becomes {impatient.value[56]:.4f}")
print(
    "cells with another arrow:", int((impatient.policy != best.policy).sum()), "of 64"
)

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# Only the rewards change, so solve again with the new ones.
dense = np.zeros((85, 4))
for prefix in prefixes:
    for action, letter in enumerate(letters if len(prefix) < 3 else ""):
        dense[number[prefix], action] = (prefix == "" or letter > prefix[-1]) / 3
paid = tabular.MDP(
    transitions, dense, 1.0, terminal=np.array([len(p) == 3 for p in prefixes])
)
print(f"V('') = {tabular.evaluate(paid, policy)[0]:.3f}")
