"""Models of experts: the loss that keeps their load even is transformers', and training follows the experts of sampling."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from cached import sample
from fused_models import some_groups
from tiny_rewards import early_letters
from transformers import AutoConfig, AutoModelForCausalLM

import psigrad
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.models.experts import LoadBalancing, RouterRecorder, add_balance_loss, balance_of, replay_routers
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, Rows
from psigrad.language.recipes import online_settings
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.objective import Loss

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
FAMILIES = {
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
PARAMS = SamplingParams(max_tokens=8)


def some_network(name, tokenizer, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **{**SIZES, **FAMILIES.get(name, {}), **more})
    hf = AutoModelForCausalLM.from_config(config)
    for p in hf.parameters():
        torch.nn.init.normal_(p, std=0.3 if p.dim() > 1 else 1.0)
    return hf


def some_model(name, tokenizer, **more):
    model = prepare(some_network(name, tokenizer), tokenizer, **more)
    assert not model.why_padded, model.why_padded
    return model


def drawn(model):
    prompts = some_groups().prompts
    requests = [Request(tuple(p), (2 * i, 2 * i + 1)) for i, p in enumerate(prompts)]
    return prompts, sample(EmbeddedSampler(model), requests, PARAMS, None)


def groups_of(prompts, made, change=lambda text: text):
    experts = [(change(group[0].prompt_experts), [change(c.experts) for c in group]) for group in made]
    return Groups(prompts, [[c.ids for c in group] for group in made], experts=experts)


# The loss


def test_two_experts_and_three_tokens_by_hand():
    """Probabilities 3/4 and 1/4; two tokens take the first expert, one the second: f = (2/3, 1/3), P = (7/12, 5/12), and
    2 · (2/3 · 7/12 + 1/3 · 5/12) = 19/18.
    """
    balance = LoadBalancing(3.0, 1)
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0]]).log().requires_grad_()
    made, own = type("Made", (), {"router_logits": (logits,)}), Loss(torch.tensor(1.0), {"loss": torch.tensor(1.0)})
    balance.compute(made)
    loss = balance.add_to(own, 2)
    assert float(loss.value.detach()) == pytest.approx(1 + 3 * 19 / 18 / 2) == float(loss.terms["loss"])
    assert float(loss.terms["aux_loss"]) == pytest.approx(19 / 18 / 2)
    assert balance.add_to(own, 2) is own, "it is counted once"
    with torch.no_grad():
        balance.compute(made)
        assert balance.forward_arguments == {}
    assert balance.add_to(own, 2) is own and balance.forward_arguments == {"output_router_logits": True}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_of_a_packed_batch_it_is_that_of_transformers_padded_one(name, packed, tokenizer):
    model = some_model(name, tokenizer)
    own = copy.deepcopy(model.network)
    own.set_attn_implementation("eager")
    model.load_balancing = balance_of(model.network, 0.5)
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, 60, (n,), generator=draw).tolist() for n in (9, 4, 14)]
    rows = [row if packed else [*row, 0] for row in rows]

    def loss():
        logp = model.evaluate(Rows(rows, [[False] + [True] * (len(row) - 1) for row in rows]), packed=packed).logp
        return Loss(0.0 * logp.sum(), {})

    found = add_balance_loss(model, loss, 2)
    found.value.backward()
    # packed, a row's last token predicts nothing and is not computed
    read = [row[:-1] for row in rows] if packed else rows
    ids = torch.tensor([row + [7] * (max(map(len, read)) - len(row)) for row in read])
    mask = torch.arange(ids.shape[1])[None] < torch.tensor([len(row) for row in read])[:, None]
    theirs = own(ids, attention_mask=mask.long(), output_router_logits=True).aux_loss
    assert float(found.value.detach()) == pytest.approx(0.5 * float(theirs.detach()) / 2, rel=1e-5)
    assert float(found.terms["aux_loss"]) == pytest.approx(float(theirs.detach()) / 2, rel=1e-5)
    (0.5 * theirs / 2).backward()
    for (label, a), b in zip(model.network.named_parameters(), own.parameters(), strict=True):
        if b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6), label
    control = own(ids, attention_mask=torch.ones_like(mask).long(), output_router_logits=True).aux_loss
    assert float(control.detach()) != pytest.approx(float(theirs.detach()), rel=1e-5), "padding would count"


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_of_kept_activations_it_is_that_of_a_forward_pass(name, tokenizer):
    model = some_model(name, tokenizer)
    assert model.decoder is not None, model.why_unfused
    model.load_balancing, kept = balance_of(model.network, 50.0), ActivationCache(1e9)
    prompts = some_groups().prompts
    requests = [Request(tuple(p), (2 * i, 2 * i + 1)) for i, p in enumerate(prompts)]
    made = sample(EmbeddedSampler(model), requests, PARAMS, kept)
    groups, found = Groups(prompts, [[c.ids for c in group] for group in made]), []
    for cache in (kept, None):
        loss = add_balance_loss(model, lambda cache=cache: Loss(model.evaluate(groups, cache=cache).logp.sum(), {}), 1)
        gradients = torch.autograd.grad(loss.value, list(model.trainable().values()))
        found.append((float(loss.terms["aux_loss"]), torch.cat([g.flatten() for g in gradients])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert float((found[0][1] - found[1][1]).norm() / found[1][1].norm()) < 1e-5
    model.load_balancing = None
    alone = torch.autograd.grad(model.evaluate(groups).logp.sum(), list(model.trainable().values()))
    alone = torch.cat([g.flatten() for g in alone])
    assert float((alone - found[1][1]).norm() / found[1][1].norm()) > 1e-2, "the loss has a share in the gradient"


def test_whose_coefficient_counts(tokenizer):
    hf = some_network("mixtral", tokenizer, router_aux_loss_coef=0.02)
    assert balance_of(hf, None).coefficient == 0.02 and balance_of(hf, 0.5).coefficient == 0.5
    assert balance_of(hf, 0.0) is None
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=60, **SIZES))
    assert balance_of(dense, None) is None and balance_of(dense, 0.0) is None
    with pytest.raises(UserError, match=r"router_aux_loss_coef is 0\.1, but LlamaForCausalLM returns no router logits"):
        balance_of(dense, 0.1)


# The choice


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recorded_choice_is_the_one_that_training_makes_where_nothing_is_tied(name, tokenizer):
    model = some_model(name, tokenizer)
    prompts, before = drawn(model)
    replay_routers(model)
    _, made = drawn(model)
    assert [[c.ids for c in group] for group in made] == [[c.ids for c in group] for group in before]
    followed, own = (
        model.evaluate(groups) for groups in (groups_of(prompts, made), Groups(prompts, groups_of(prompts, made).completions))
    )
    assert torch.equal(followed.logp, own.logp)
    with model.router_recorder.record() as seen:
        model.evaluate(Groups(prompts, groups_of(prompts, made).completions))
    chosen = torch.stack([choice for _, choice in seen])
    assert torch.equal(chosen.sort(-1).values, model.router_recorder.read(groups_of(prompts, made), model.device).sort(-1).values)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_at_a_tie_training_follows_what_was_recorded(checkpointing, tokenizer):
    """A router of zeros finds all experts as good. That expert e + 1 is taken for e is the same as experts moved by one place."""
    model = some_model("mixtral", tokenizer, gradient_checkpointing=checkpointing)
    with torch.no_grad():
        for name, p in model.network.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p.zero_()
    replay_routers(model)
    prompts, made = drawn(model)
    moved = prepare(copy.deepcopy(model.network), tokenizer)
    with torch.no_grad():
        for name, p in moved.network.named_parameters():
            if ".experts." in name:
                p.copy_(p.roll(-1, 0))
    groups = groups_of(prompts, made)
    routing = model.router_recorder
    own_read, routing.read = routing.read, lambda *given: (own_read(*given) + 1) % 4
    ours, theirs = model.evaluate(groups).logp, moved.evaluate(replace(groups, experts=None)).logp
    assert torch.allclose(ours, theirs, atol=1e-5)
    ours.sum().backward()
    theirs.sum().backward()
    for (name, a), b in zip(model.network.named_parameters(), moved.network.parameters(), strict=True):
        if b.grad is not None and not name.endswith("mlp.gate.weight"):
            expected = b.grad.roll(1, 0) if ".experts." in name else b.grad
            assert torch.allclose(a.grad, expected, rtol=1e-3, atol=1e-4), name
    routing.read = own_read
    control = model.evaluate(groups).logp
    assert not torch.allclose(control, theirs, atol=1e-3), "left to itself it would take others"


def test_a_pass_without_gradient_leaves_a_recomputation_its_choice(tokenizer):
    """A reference by the same network, between a forward pass and its backward pass."""
    model = some_model("mixtral", tokenizer, gradient_checkpointing=True)
    replay_routers(model)
    prompts, made = drawn(model)
    groups = groups_of(prompts, made)
    gradients = []
    for between in (False, True):
        model.network.zero_grad()
        logp = model.evaluate(groups).logp
        if between:
            with torch.no_grad():
                model.evaluate(Groups([prompts[0]], [[(5, 6)]]))
        logp.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.network.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_what_cannot_be_followed_is_refused_by_name(tokenizer):
    dense = prepare(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=60, **SIZES)), tokenizer)
    with pytest.raises(UserError, match="transformers finds no router in LlamaForCausalLM"):
        replay_routers(dense)
    model = some_model("mixtral", tokenizer)
    model.why_padded = "it says so"
    with pytest.raises(UserError, match=r"needs packing, but this model pads sequences \(it says so\)"):
        replay_routers(model)
    model = some_model("mixtral", tokenizer)
    for module in model.network.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            made = (torch.ones(1, 4), torch.full((1, 2), 0.5), torch.tensor([[0, 1]]))
            module.forward = lambda x, made=made: tuple(part.expand(len(x), -1) for part in made)
    with pytest.raises(UserError, match=r"router_replay cannot set the experts that MixtralForCausalLM chooses"):
        replay_routers(model)
    assert model.router_recorder is None


# Whole runs

ROWS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(4) for b in range(4)]
SHORT = {
    "max_steps": 1,
    "save_steps": 0,
    "threads": 1,
    "progress": False,
    "report": False,
    "eval_prompts": 0,
    "learning_rate": 1e-3,
}


@pytest.fixture
def folder(tmp_path, tokenizer):
    some_network("mixtral", tokenizer, router_aux_loss_coef=0.02).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


def figures(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_adds_the_models_own_share_unless_it_is_told_another(folder, tmp_path):
    runs = {}
    for name, more in (("own", {}), ("none", {"output_router_logits": False})):
        psigrad.train("sft", model=folder, dataset=ROWS, output_dir=tmp_path / name, micro_batch_tokens=40, **SHORT, **more)
        runs[name] = figures(tmp_path / name)
    own, none = runs["own"][0], runs["none"][0]
    assert own["loss"] == pytest.approx(none["loss"] + 0.02 * own["aux_loss"], rel=1e-5)
    assert 2 <= own["aux_loss"] < 4 and "aux_loss" not in none
    assert own["grad_norm"] != none["grad_norm"]


def test_grpo_follows_the_experts_of_sampling(folder, tmp_path, monkeypatch):
    online = {"reward": early_letters, "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 4}
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    runs, followed, own_read = [], [], RouterRecorder.read

    def read(*given):
        followed.append(own_read(*given))
        return followed[-1]

    monkeypatch.setattr(RouterRecorder, "read", read)
    for replays in (True, False):
        out = tmp_path / str(replays)
        psigrad.train("grpo", model=folder, dataset=rows, output_dir=out, router_replay=replays, **SHORT, **online)
        runs.append(figures(out))
    assert runs[0] == runs[1], "no tie: what is recorded is what would be chosen"
    assert followed and all(choices is not None for choices in followed)
    assert "aux_loss" in runs[0][0]
    with pytest.raises(UserError, match="router_replay does not work with sampling"):
        psigrad.train(
            "grpo", model=folder, dataset=rows, output_dir=tmp_path / "x", router_replay=True, sampler="transformers",
            **SHORT, **online,
        )  # fmt: skip


ONLINE = OnlineConfig(reward=["length"], router_replay=True)
TOLD = {
    "pairs": (replace(ONLINE, algorithm="online_dpo", num_generations=2), "online_dpo, which trains on pairs"),
    "episodes": (replace(ONLINE, environment="m:Game"), "environments, tools or agents"),
    "tools": (replace(ONLINE, tools=["m:tool"]), "environments, tools or agents"),
    "sampler": (
        replace(ONLINE, sampling=replace(ONLINE.sampling, sampler="transformers")),
        "sampling.sampler=transformers",
    ),
    "fsdp": (
        replace(ONLINE, placement=replace(ONLINE.placement, strategy="fsdp")),
        "placement.strategy=fsdp",
    ),
    "cluster": (replace(ONLINE, placement=replace(ONLINE.placement, cluster="ray")), "placement.cluster"),
}


@pytest.mark.parametrize("case", TOLD)
def test_where_no_experts_are_recorded_replay_is_refused_by_name(case):
    config, why = TOLD[case]
    with pytest.raises(UserError, match=re.escape(f"router_replay does not work with {why}; remove router_replay.")):
        online_settings.check(config, online_settings.method(config))
    without = replace(config, router_replay=False)
    online_settings.check(without, online_settings.method(without))  # the control: nothing else is refused
