# %% [markdown]
# # 1 · A grid world, and what a value is
#
# In reinforcement learning an **agent** sees a **state**, chooses an **action**, gets a **reward** and moves to the next
# state. It maximises the sum of rewards. This chapter computes what later ones estimate.

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
# *Markov*: only the current state matters.
#
# In our world a treasure pays +1 and a trap −1; either ends the episode. One move in ten slips sideways.

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
# The **value** V(s) is the expected return from s. A return is the first reward plus γ times the return from the next state,
# so values satisfy the **Bellman equation**
#
#     V(s) = Σ_a π(a|s)·( R(s, a) + γ·Σ_s' P(s'|s, a)·V(s') ).
#
# This equation is linear in V, so we can solve it.

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
# The mean of many returns, a **Monte Carlo** estimate of V, needs thousands of episodes for two digits.
#
# ## Which action is better than usual?
#
# Q(s, a) is the value of taking a first and following π afterwards. The **advantage**
#
#     A(s, a) = Q(s, a) − V(s)
#
# is how much better a is than π on average. Most of this course estimates it.

# %%
advantage = tabular.advantages(mdp, aimless)
for name, a in zip(tabular.ACTIONS, advantage[cell], strict=True):
    print(f"{name:>5}  {a:+.3f}")
average = (aimless * advantage).sum(axis=1)
print(f" mean  {np.abs(average).max():.0e} at most, over all states")

# %% [markdown]
# ## From values to the best policy
#
# - **Policy iteration** evaluates the policy, takes the best action in each state, and repeats.
# - **Value iteration** does both at once, in sweeps over all states: V(s) ← max_a ( R(s, a) + γ·Σ_s' P(s'|s, a)·V(s') ).


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
# The treasure's value spreads by one cell per sweep. The arrows are right long before the numbers: they depend only on the
# order of the actions' values.

# %%
best = tabular.solve(mdp)
loss = [np.abs(tabular.evaluate(mdp, s.policy) - best.value).max() for s in sweeps]
first = next(k for k, lost in enumerate(loss) if lost < 1e-9)
print(f"after sweep {first + 1} nothing is lost by following the arrows;")
print(
    f"the numbers are still wrong by {np.abs(sweeps[first].value - best.value).max():.3f}"
)

# %% [markdown]
# Each sweep multiplies the error by γ or less. Policy iteration needs fewer, costlier steps.

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
# We used P and R, which are rarely known. **Q-learning** needs neither: it tries actions, mostly those that look best, and
# corrects Q by what happens:
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
# Q-learning works, but its table has a row for each state, and there are far too many texts. So the next chapters change
# the policy itself, by gradients.

# %% [markdown]
# ## Now on a language model
#
# Writing text is a Markov decision process too. The state is the text so far, and an action appends a token. The policy is
# the model, here a small Qwen3 with random weights. The reward comes at the end, and γ = 1.
#
# With 4 letters and 3 tokens there are 85 states. The reward is 1 for strictly alphabetical order.

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
# V of a prefix is the probability that this model still gets the reward. PPO's critic learns this V (chapter 6).
#
# If V is exact and the next state is certain, the **TD residual** r + γ·V(s') − V(s) *is* the advantage.

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
# In "adb" the "a" was a good start, the "d" lost the reward, and then the "b" changed nothing.
#
# ## The derivation: why iteration finds the best policy
#
# Write B·V for the right side of value iteration's update. Two maxima differ by at most the largest difference of their
# arguments, so
#
#     |(B·V)(s) − (B·W)(s)| ≤ max_a γ·Σ_s' P(s'|s, a)·|V(s') − W(s')| ≤ γ·‖V − W‖,
#
# where ‖·‖ is the largest absolute entry. So there is only one fixed point V*, and value iteration converges to it:
#
#     ‖V_k − V*‖ ≤ γ^k·‖V_0 − V*‖.
#
# Each round of policy iteration improves V, unless V = V*. It ends, since there are finitely many policies.
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
# 2. Set γ to 0.5. Do the best policy and the values change?
# 3. Give a reward of 1/3 for each letter that comes later in the alphabet than the previous one; the first always counts.
#    What is V("")?

# %% [markdown]
# ### Answer 1

# %% tags=["hide-cell"]
# In the two cells to the left of the trap the arrows turn away. Above and below it they still
# pass it: a slip into the trap, one move in twenty, costs less than a detour. Set `slip` to 0.4
# and they turn away too.
moved = grid.moved((3, 4), (1, 5))
solution = tabular.solve(moved.mdp())
print(moved.render(solution.value, solution.policy))

# %% [markdown]
# ### Answer 2

# %% tags=["hide-cell"]
# Values shrink, since a treasure d steps away is worth about γᵈ. The order of the
# actions stays the same in nearly every cell.
impatient = tabular.solve(replace(grid, gamma=0.5).mdp())
print("V at (7, 0):", f"{best.value[56]:.4f} becomes {impatient.value[56]:.4f}")
print(
    "cells with another arrow:", int((impatient.policy != best.policy).sum()), "of 64"
)

# %% [markdown]
# ### Answer 3

# %% tags=["hide-cell"]
# Change the rewards and solve again. The probability of each state does not change.
dense = np.zeros((85, 4))
for prefix in prefixes:
    for action, letter in enumerate(letters if len(prefix) < 3 else ""):
        dense[number[prefix], action] = (prefix == "" or letter > prefix[-1]) / 3
paid = tabular.MDP(
    transitions, dense, 1.0, terminal=np.array([len(p) == 3 for p in prefixes])
)
print(f"V('') = {tabular.evaluate(paid, policy)[0]:.3f}")
