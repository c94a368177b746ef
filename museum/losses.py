"""Exhibits of losses, advantages and updates of language models."""

from __future__ import annotations

import math
from types import SimpleNamespace

from museum.exhibit import Case, exhibit
from museum.worlds import BITS, LN2, A, B, C, D, E


@exhibit("huggingface/transformers#34191", "huggingface/trl#2175", "ml-explore/mlx-lm#1544")
def accumulated_tokens() -> Case:
    """With gradient accumulation, each micro-batch is averaged by itself, so tokens of short rows count more.

    The loss of an optimiser step is the mean over all its target tokens, however it is split. Row 1 trains one token, b (2 bits).
    Row 2 trains d d d (5 bits each). Loss: (2 + 15) / 4 = 4.25 bits.
    Gradient for the logit of b, where p_b = 1/4: Σ (p_b - [target is b]) / 4 = (4·1/4 - 1) / 4 = 0. For the logit of d, where
    p_d = 1/32: (4/32 - 3) / 4 = -0.71875.
    The mean of the rows' means gives (2 + 5) / 2 = 3.5 bits. The gradients are then ((1/4 - 1) + 1/4) / 2 = -0.25 for b and
    (1/32 + 1/32 - 1) / 2 = -0.46875 for d.
    """
    rows = [([A, B], [False, True]), ([A, D, D, D], [False, True, True, True])]
    return Case(SimpleNamespace(rows=rows), (4.25, 0.0, -0.71875), (3.5, -0.25, -0.46875))


@exhibit("huggingface/transformers#39241")
def evaluation_loss() -> Case:
    """The evaluation loss averages the means of batches, so it changes with the batch size.

    The rows are those of accumulated-tokens, one in a batch: right (2 + 15) / 4 = 4.25 bits, mean of means (2 + 5) / 2 = 3.5.
    """
    rows = [([A, B], [False, True]), ([A, D, D, D], [False, True, True, True])]
    return Case(SimpleNamespace(rows=rows), (4.25,), (3.5,))


@exhibit("huggingface/trl#5619", "huggingface/trl#6024")
def token_normaliser() -> Case:
    """A token-level policy loss divides each optimiser step's loss by the tokens of the whole generation batch.

    Eight completions of two tokens, four "a a" with advantage 0.5 and four "b b" with -0.5, are trained in two steps of four.
    Each step has 8 tokens. Summed over both steps, the gradient of the loss for the logit of a, where p_a = 1/2, is
    -Σ A_i Σ_t ([token is a] - p_a) / 8 = -(4·0.5·2·(1 - 1/2) - 4·0.5·2·(0 - 1/2)) / 8 = -4 / 8 = -0.5.
    A normaliser of all 16 tokens gives -0.25.
    """
    completions = [[A, A], [B, B]] * 4
    return Case(SimpleNamespace(completions=completions, rewards=[1.0, 0.0] * 4), (-0.5,), (-0.25,))


@exhibit("huggingface/trl#5902", "huggingface/trl#5775")
def unscored_reward() -> Case:
    """A completion that no reward function could score gets reward 0, and shifts the baseline of its group.

    Rewards 1, none, 0, 1: the mean of those that exist is 2/3, so the advantages (without a standard deviation) are 1/3, -2/3 and
    1/3, and the unscored completion trains nothing: 0. Counted as 0, the mean is 1/2: 1/2, -1/2, -1/2, 1/2.
    """
    x = SimpleNamespace(completions=[[A], [B], [C], [D]], rewards=[1.0, None, 0.0, 1.0])
    return Case(x, (1 / 3, 0.0, -2 / 3, 1 / 3), (0.5, -0.5, -0.5, 0.5))


@exhibit("verl-project/verl#4597")
def equal_rewards() -> Case:
    """Equal rewards of a group give advantages other than 0, because their mean in float32 is rounded.

    r_i - mean(r) is 0 if all r_i are equal: no signal. In float32 the mean of seven rewards 0.9 is one rounding step away from
    0.9, 6e-8. Divided by an equally small standard deviation plus 1e-6, this is 0.056. An advantage below 1e-3 counts as 0.
    """
    import torch

    reward = torch.full((7,), 0.9)
    wrong = (reward - reward.mean()) / (reward.std() + 1e-6)
    return Case(SimpleNamespace(completions=[[A]] * 7, rewards=[0.9] * 7), (0.0,) * 7, wrong.tolist(), 1e-3)


@exhibit("huggingface/trl#3029", "huggingface/trl#4159")
def temperature() -> Case:
    """Completions are sampled at a temperature, and their log-probs are computed without it.

    At temperature 1/2 the probability of a token is p² / Σ p². Here p = 2^-bits with bits 1 to 7 and 7, so
    Σ p² = 1/4 + 1/16 + … + 4^-7 + 4^-7 = (1 - 4^-7)/3 + 4^-7. For a: ln(4^-1 / Σ) = -0.287804; for c: ln(4^-3 / Σ) = -3.060393.
    Without the temperature: -ln 2 and -3 ln 2.
    """
    total = (1 - 4.0**-7) / 3 + 4.0**-7
    x = SimpleNamespace(prompt=[A], completion=[A, C], temperature=0.5)
    return Case(x, (math.log(4.0**-1 / total), math.log(4.0**-3 / total)), (-LN2, -3 * LN2))


@exhibit("huggingface/trl#6800", "OpenRLHF/OpenRLHF#217")
def left_padding() -> Case:
    """Left padding shifts the positions of a model with absolute positions, so its log-probs depend on the batch.

    The log-prob of a completion is a function of its own prompt alone. The value is the largest difference between the log-probs
    in a batch with a longer prompt and those of the row alone: 0. The faulty value is that of the same GPT-2 with every position
    shifted by the padding.
    """
    import torch

    from museum.worlds import random_model

    x = SimpleNamespace(prompts=[[B], [A, C, A, D, A]], completion=[A, B])
    row, model = torch.tensor([x.prompts[0] + x.completion]), random_model("gpt2")
    both = [torch.log_softmax(model(row, position_ids=torch.arange(3)[None] + by).logits, -1)[0, :2] for by in (0, 4)]
    at = torch.tensor(x.completion)[:, None]
    return Case(x, (0.0,), (float((both[1] - both[0]).gather(1, at).abs().max().detach()),))


@exhibit("OpenRLHF/OpenRLHF#1309", "huggingface/trl#4637")
def kl_gradient() -> Case:
    """The KL term's value is unbiased, but its gradient is wrong: differentiating k3 gives the gradient of the forward KL.

    Policy π is uniform over 8 tokens; the reference has ρ = 2^-bits. Every token is sampled once, so means over samples are exact
    expectations. The gradient of KL(π‖ρ) for the logit of v is π_v (ln(π_v/ρ_v) - KL), with ln(π_v/ρ_v) = (bits_v - 3) ln 2.
    Σ (bits - 3) = 11, so KL = 11/8 ln 2. For a (1 bit): 1/8 (-2 - 11/8) ln 2 = -27/64 ln 2 = -0.292421; for e (6 bits):
    1/8 (3 - 11/8) ln 2 = 0.140795. The gradient of k3 = ρ/π - 1 - ln(ρ/π) has the expectation π_v - ρ_v: -3/8 and 7/64.
    """
    x = SimpleNamespace(prompt=[A], reference=[-LN2 * bits for bits in BITS], at=(A, E))
    return Case(x, (-27 / 64 * LN2, 13 / 64 * LN2), (1 / 8 - 1 / 2, 1 / 8 - 1 / 64))


@exhibit("huggingface/transformers#35352", "EleutherAI/gpt-neox#1285")
def reward_at_end() -> Case:
    """With <eos> as the padding token, a reward model reads a text's score one token before its end.

    The score of a text is read at its last token, <eos>, which scores 4 here. Chosen "a <eos>", rejected "b b <eos>": both 4, so
    the loss -ln σ(4 - 4) is ln 2. One token earlier a scores 1 and b scores 2: -ln σ(-1) = 1.313262.
    """
    return Case(SimpleNamespace(prompt=[A], chosen=[A], rejected=[B, B]), (LN2,), (math.log1p(math.e),))


@exhibit("vllm-project/speculators#765")
def bfloat16_updates() -> Case:
    """Weights kept in bfloat16 do not move: each update is smaller than half the distance to the next number.

    Twelve steps of AdamW with learning rate 1e-3 and a gradient of constant sign move a weight of 1 by about 12·1e-3 in float32.
    Just below 1, numbers in bfloat16 are 2^-8 = 0.0039 apart, just above 2^-7: an update of 0.001 is rounded away each time. The
    value is the distance moved, as bfloat16 shows it: 0.012 within half a step of 2^-7. The faulty one is 0.
    """
    return Case(SimpleNamespace(rows=[([A, B], [False, True])], steps=12, rate=1e-3), (0.012,), (0.0,), 2.0**-8 + 1e-3)


@exhibit("vllm-project/speculators#1027", "huggingface/accelerate#4071", psigrad_too=True)
def resumed_run() -> Case:
    """A run that is stopped and resumed changes: it draws other dropout masks, or reads other rows.

    Six steps over three rows with dropout are run twice: without a stop, and with a stop after four (in the second epoch).
    The largest difference of the final weights is 0. Adam moves each weight by about its rate, 0.01, in a step, so two steps with
    other masks or rows end about as far apart.
    """
    rows = [([A, B, C, D], [False, True, True, True]), ([A, E, E], [False, True, True]), ([B, D], [False, True])]
    return Case(SimpleNamespace(rows=rows, rate=0.01, steps=6, stop=4), (0.0,), (0.01,), 1e-7)
