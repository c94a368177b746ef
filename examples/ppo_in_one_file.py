"""PPO in one file, with only torch, transformers and gymnasium. The same PPO learns CartPole and trains a language model.

    python examples/ppo_in_one_file.py cartpole [TIMESTEPS]
    python examples/ppo_in_one_file.py MODEL PROMPTS.jsonl [STEPS]

MODEL is a folder or hub name. Each line of PROMPTS.jsonl has a "prompt" and an "answer". The reward is 1 if the completion equals
the answer. The settings are those of `psigrad control ppo --env CartPole-v1` and of `psigrad ppo` with `critic_shared=true`.
`tests/language/training/test_ppo_one_file.py` checks that psigrad computes the same advantages, loss and gradient.

In a state s_t the policy pi takes an action a_t (a push of the cart, or a token) and gets a reward r_t. The critic V predicts the
sum of the future rewards. For a batch of such steps (Schulman et al. 2017, arXiv:1707.06347; 2016, arXiv:1506.02438):

    delta_t = r_t + gamma V(s_t+1) - V(s_t)                 V is 0 after the end
    A_t     = delta_t + gamma lambda A_t+1                  the advantage (GAE)
    R_t     = A_t + V_old(s_t)                              the critic's target
    N_t     = (A_t - mean A) / (std A + 1e-8)               the normalised advantage, used in the policy's loss
    rho_t   = exp(log pi(a_t|s_t) - log pi_old(a_t|s_t))    policy and critic when the batch was collected
    loss    = mean_t [ - min(rho_t N_t, clip(rho_t, 1 - eps, 1 + eps) N_t)
                       + c/2 max((V - R_t)^2, (clip(V, V_old - eps_V, V_old + eps_V) - R_t)^2) ]
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Settings:
    gamma: float  # discount per step
    lam: float  # lambda: 0 uses one reward and then the critic, 1 only rewards
    value_weight: float  # c
    value_clip: float | None  # eps_V; None: the critic's loss is c/2 (V - R)^2
    epochs: int  # passes over each batch
    learning_rate: float  # initial; decays linearly to 0
    max_grad_norm: float
    clip: float = 0.2  # eps; on CartPole it decays to 0 too


CARTPOLE = Settings(0.98, 0.8, value_weight=1.0, value_clip=None, epochs=20, learning_rate=1e-3, max_grad_norm=0.5)
# The learning rate 1e-6 suits models with billions of weights. Smaller models learn faster at 1e-5 to 1e-3.
LANGUAGE = Settings(1.0, 1.0, value_weight=0.1, value_clip=0.2, epochs=4, learning_rate=1e-6, max_grad_norm=1.0)

ENVS, STEPS_PER_ENV = 8, 32  # CartPole: copies of the environment, and steps of each per batch
PROMPTS_PER_STEP, MAX_NEW_TOKENS = 16, 256  # language model: one completion for each prompt
BETA = 0.05  # language model: weight of the KL penalty towards the initial model


# PPO itself. A batch has N rows of T steps. A step may be an environment step or a token.


@dataclass(frozen=True)
class Batch:
    mask: Tensor  # [N, T] True for the policy's steps, False for prompts and padding
    logp_old: Tensor  # [N, T] log pi_old
    value_old: Tensor  # [N, T] V_old
    advantage: Tensor  # [N, T] with mean 0 and standard deviation 1 over the masked-in steps
    returns: Tensor  # [N, T] R


def gae(reward: Tensor, value: Tensor, value_after: Tensor, last: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantage of every step [N, T]. `value_after` is V of the next state, 0 if that state is terminal. `last` marks
    the last step of each trajectory, where the sum starts again.
    """
    delta = reward + gamma * value_after - value
    advantage, ahead = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        ahead = delta[:, t] + gamma * lam * torch.where(last[:, t], 0.0, ahead)
        advantage[:, t] = ahead
    return advantage


def make_batch(
    mask: Tensor, logp: Tensor, reward: Tensor, value: Tensor, value_after: Tensor, last: Tensor, settings: Settings
) -> Batch:
    """Compute the batch's training data once, before its updates. The tensors carry no gradient."""
    advantage = gae(reward, value, value_after, last, settings.gamma, settings.lam)
    chosen = advantage[mask]
    normal = (advantage - chosen.mean()) / (chosen.std() + 1e-8)
    return Batch(mask, logp, value, normal, advantage + value)


def loss_of(batch: Batch, logp: Tensor, value: Tensor, settings: Settings) -> Tensor:
    """Return the loss of policy and critic. `logp` and `value` [N, T] are their current outputs for the batch."""
    ratio = torch.exp(logp - batch.logp_old)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    policy_loss = -torch.min(ratio * batch.advantage, clipped * batch.advantage)
    error = (value - batch.returns) ** 2
    if settings.value_clip is not None:
        near = batch.value_old + (value - batch.value_old).clamp(-settings.value_clip, settings.value_clip)
        error = torch.max(error, (near - batch.returns) ** 2)
    return (policy_loss + settings.value_weight * error / 2)[batch.mask].mean()


def update(
    batch: Batch, evaluate: Callable[[], tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, settings: Settings
) -> None:
    """Make several passes over the batch, one optimiser step each. `evaluate` returns the current log pi and V of its steps."""
    (group,) = optimizer.param_groups
    group["lr"] = settings.learning_rate
    for _ in range(settings.epochs):
        optimizer.zero_grad()
        loss_of(batch, *evaluate(), settings).backward()
        nn.utils.clip_grad_norm_(group["params"], settings.max_grad_norm)
        optimizer.step()


# CartPole: a row is one copy of the environment, a step is a push of the cart.


class ActorCritic(nn.Module):
    """Two small networks: the policy gives the probabilities of the actions, the critic the value of the state."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.policy = self._network(observations, actions, gain=0.01)  # initially all actions are about equally likely
        self.critic = self._network(observations, 1, gain=1.0)

    @staticmethod
    def _network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
        layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
        for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def value(self, observation: Tensor) -> Tensor:
        return self.critic(observation)[..., 0]

    def evaluate(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return Categorical(logits=self.policy(observation)).log_prob(action), self.value(observation)


def train_cartpole(timesteps: int = 100_000, seed: int = 0) -> list[float]:
    """Train a policy from scratch. Return the return of every episode, in the order in which they ended."""
    torch.manual_seed(seed)
    network = ActorCritic(observations=4, actions=2)
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    envs = [gym.make("CartPole-v1") for _ in range(ENVS)]
    now = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    running, returns, shape = [0.0] * ENVS, [], (ENVS, STEPS_PER_ENV)

    for done in range(shape[0] * shape[1], timesteps + 1, shape[0] * shape[1]):
        seen, after = torch.zeros(*shape, 4), torch.zeros(*shape, 4)
        action, reward = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        terminated, last = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for t in range(STEPS_PER_ENV):
            seen[:, t] = torch.stack([torch.from_numpy(x) for x in now])
            with torch.no_grad():
                action[:, t] = Categorical(logits=network.policy(seen[:, t])).sample()
            for i, env in enumerate(envs):
                now[i], gain, fell, timed_out, _ = env.step(int(action[i, t]))
                after[i, t], reward[i, t], terminated[i, t] = torch.from_numpy(now[i]), gain, fell
                last[i, t] = fell or timed_out or t == STEPS_PER_ENV - 1
                running[i] += gain
                if fell or timed_out:
                    returns.append(running[i])
                    running[i], (now[i], _) = 0.0, env.reset()
        with torch.no_grad():
            logp, value = network.evaluate(seen, action)
            value_after = torch.where(terminated, 0.0, network.value(after))  # not 0 after a time limit: the task goes on
        left = 1 - done / timesteps
        settings = replace(CARTPOLE, learning_rate=CARTPOLE.learning_rate * left, clip=CARTPOLE.clip * left)
        batch = make_batch(torch.ones_like(last), logp, reward, value, value_after, last, settings)
        update(batch, lambda seen=seen, action=action: network.evaluate(seen, action), optimizer, settings)
        if returns and done % 2048 == 0:
            print(f"timestep {done:6d}  return {sum(returns[-100:]) / len(returns[-100:]):.1f}")
    return returns


# A language model: a row is a prompt with its completion, a step is a token.


def evaluate_text(model, value_head: nn.Linear, prompts: list[list[int]], completions: list[list[int]]):
    """Return log pi and V of every token but the first of each row [N, T], and the mask of the completions' tokens."""
    rows = [p + c for p, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    place = torch.arange(width)
    begin, end = torch.tensor([[len(p)] for p in prompts]), torch.tensor([[len(row)] for row in rows])
    out = model(input_ids=ids, attention_mask=(place < end).long(), output_hidden_states=True)
    logp = out.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # the logits at a token predict the next one
    return logp, value_head(out.hidden_states[-1][:, :-1])[..., 0], ((begin <= place) & (place < end))[:, 1:]


def text_batch(logp: Tensor, logp_ref: Tensor, value: Tensor, mask: Tensor, scores: Tensor, settings: Settings) -> Batch:
    """Return the batch. The reward of a completion's last token contains its score [N], even if the length limit cut it.
    Every token's reward contains the KL penalty, -BETA times its log-ratio to the initial model.
    """
    last = mask & ~nn.functional.pad(mask[:, 1:], (0, 1))
    reward = torch.where(last, scores[:, None], 0.0) - BETA * (logp - logp_ref)
    value_after = torch.where(last, 0.0, nn.functional.pad(value[:, 1:], (0, 1)))
    return make_batch(mask, logp, reward, value, value_after, last, settings)


@torch.no_grad()
def sample(model, prompts: list[list[int]], eos: int) -> list[list[int]]:
    """Sample one completion of each prompt, cut after its first EOS. The EOS is kept, since the policy chose it."""
    width = max(map(len, prompts))
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
    real = torch.arange(width) >= torch.tensor([[width - len(p)] for p in prompts])
    draw = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ends = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": eos, "pad_token_id": eos}
    rows = model.generate(ids, attention_mask=real.long(), **draw, **ends)[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def train_language_model(
    model, eos: int, prompts: list[list[int]], score: Callable[[int, list[int]], float], steps: int, settings: Settings = LANGUAGE
) -> list[float]:
    """Train `model` in place, and return the mean score of each step. `score(n, completion)` scores a completion of prompt n."""
    model.eval()  # dropout would make the ratio differ from 1
    reference = copy.deepcopy(model).requires_grad_(False)
    value_head = nn.Linear(model.get_output_embeddings().in_features, 1).to(model.dtype)  # a critic on the model's layers
    nn.init.zeros_(value_head.weight)
    nn.init.zeros_(value_head.bias)
    optimizer = torch.optim.AdamW([*model.parameters(), *value_head.parameters()], weight_decay=0.0)
    rng, means = random.Random(0), []
    for step in range(steps):
        numbers = rng.sample(range(len(prompts)), min(PROMPTS_PER_STEP, len(prompts)))
        asked = [prompts[n] for n in numbers]
        completions = sample(model, asked, eos)
        scores = torch.tensor([score(n, c) for n, c in zip(numbers, completions, strict=True)])
        with torch.no_grad():
            logp, value, mask = evaluate_text(model, value_head, asked, completions)
            logp_ref, _, _ = evaluate_text(reference, value_head, asked, completions)
        now = replace(settings, learning_rate=settings.learning_rate * (1 - step / steps))
        batch = text_batch(logp, logp_ref, value, mask, scores, now)
        update(batch, lambda a=asked, c=completions: evaluate_text(model, value_head, a, c)[:2], optimizer, now)
        means.append(float(scores.mean()))
        print(f"step {step + 1:4d}  reward {means[-1]:.3f}  length {int(mask.sum()) / len(asked):.1f}")
    return means


def main(path: str, prompts_file: str, steps: int) -> None:
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with open(prompts_file) as lines:
        rows = [json.loads(line) for line in lines]

    def score(number: int, completion: list[int]) -> float:
        return float(tokenizer.decode(completion, skip_special_tokens=True).strip() == rows[number]["answer"])

    train_language_model(model, tokenizer.eos_token_id, [tokenizer(row["prompt"]).input_ids for row in rows], score, steps)
    model.save_pretrained("ppo_model")
    tokenizer.save_pretrained("ppo_model")


if __name__ == "__main__":
    if sys.argv[1:2] == ["cartpole"]:
        train_cartpole(*map(int, sys.argv[2:3]))
    elif len(sys.argv) < 3:
        sys.exit(__doc__)
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 100)
