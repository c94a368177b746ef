"""The small models, tokenizers and environments of the exhibits, chosen so that every value can be worked out by hand.

The unigram model gives each token the same probability in every context, a power of 1/2. A token's loss is therefore a whole
number of bits: a 1, b 2, c 3, <eos> 4, d 5, e 6, and 7 for <bos> and <pad>.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

WORDS = ("<pad>", "<eos>", "<bos>", "a", "b", "c", "d", "e")
PAD, EOS, BOS, A, B, C, D, E = range(8)
BITS = (7, 4, 7, 1, 2, 3, 5, 6)
LN2 = math.log(2)
PLAIN = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
_LLAMA = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "num_experts": 0}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen3_next": {**_LLAMA, **_LINEAR, **_LAYERS, "hidden_size": 16, "num_key_value_heads": 2, "head_dim": 8},
}


def _config(kind: str, **settings: Any) -> Any:
    import transformers

    special = {"vocab_size": 8, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    return transformers.AutoConfig.for_model(kind, **special, **_SIZES[kind], **settings)


def unigram(head: str = "lm_head", uniform: bool = False) -> Any:
    """Return a Llama whose layers add nothing, so that its logits of a token are -bits·ln 2 (0 for each if `uniform`).

    Its hidden state is √8 times the unit vector of the current token. With head "score" it is a reward model whose score of a
    text is the bits of the token where it is read.
    """
    import torch
    import transformers

    made = transformers.LlamaForCausalLM if head == "lm_head" else transformers.LlamaForSequenceClassification
    model: Any = made(_config("llama", rms_norm_eps=1e-12, tie_word_embeddings=False, num_labels=1))
    bits = torch.tensor([0.0] * 8 if uniform else BITS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(8))
        if head == "lm_head":
            model.lm_head.weight.copy_((-LN2 * bits / math.sqrt(8))[:, None].expand(8, 8))
        else:
            model.score.weight.copy_(bits[None] / math.sqrt(8))
    return model


def logit_gradient(weight_gradient: Any) -> list[float]:
    """Return each logit's gradient, summed over positions, from the unigram's head: hidden states are √8 times a unit vector."""
    found: list[float] = (weight_gradient.sum(1) / math.sqrt(8)).tolist()
    return found


def random_model(kind: str) -> Any:
    """Return a model of random weights: "llama", "gpt2", which has absolute positions, or "qwen3_next", which has a state."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(_config(kind, initializer_range=0.5)).eval()


def words(template: str | None = PLAIN, *, adds_bos: bool = False, pad: str = "<pad>") -> Any:
    """Return a tokenizer of whole words. With `adds_bos` it puts <bos> before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<bos>", pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def merging() -> Any:
    """Return a tokenizer of letters in which "b" and "c" merge to a token, so that "ab" + "c" is not "abc"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*WORDS, "bc"))}
    made = Tokenizer(models.BPE(vocabulary, [("b", "c")]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


class Steps(gym.Env[Any, Any]):
    """An environment that counts its steps and cuts each episode after `limit` of them, with reward 1 a step.

    It returns one and the same array each time, as simulators do.
    """

    def __init__(self, limit: int, space: gym.Space[Any] | None = None, actions: gym.Space[Any] | None = None) -> None:
        self.limit, self.received, self.steps = limit, list[Any](), 0
        self.observation_space = space or gym.spaces.Box(0, 100, (1,), np.float32)
        self.action_space = actions or gym.spaces.Discrete(2)
        self._seen: Any = np.zeros_like(self.observation_space.sample())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start to count at 0."""
        self._seen[:] = 0
        self.steps = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count a step."""
        self.received.append(action)
        self.steps += 1
        self._seen[:] = self.steps
        return self._seen, 1.0, False, self.steps >= self.limit, {}
