"""The fused decoder against transformers' own modules, which are its oracle and its fallback."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from fused_models import (
    CONFIGS,
    FORMS,
    HYBRIDS,
    assert_log_probs_and_gradients_are_transformers,
    both,
    made,
    made_anew,
    some_groups,
    some_rows,
)
from kernel_choices import multiply_bfloat16

from psigrad.kernels.build import library
from psigrad.kernels.kernels import Heads, Slots, Spans, kernels, table_sizes
from psigrad.language.models import scalar_model
from psigrad.language.models.fused import decoder
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(params=[*CONFIGS, *FORMS, *HYBRIDS])
def fused(request, tokenizer):
    model = made({**CONFIGS, **FORMS, **HYBRIDS}[request.param], tokenizer)
    assert model.decoder is not None, model.why_unfused
    return model


@pytest.mark.parametrize("inputs", [some_groups(), some_rows()], ids=["groups", "rows"])
def test_log_probs_and_every_gradient_equal_those_of_transformers(fused, inputs):
    assert_log_probs_and_gradients_are_transformers(fused, inputs)


@pytest.mark.parametrize("name", ["qwen3", "granite", "gemma3", "gemma4 of shared keys"])
def test_embeddings_whose_gradient_is_summed_apart_are_scaled_too(name, tokenizer, monkeypatch):
    model = made({**CONFIGS, **FORMS, **HYBRIDS}[name], tokenizer)
    right = model.evaluate(some_groups()).logp
    called = []
    look_up = lambda weight, ids, padding, sums: called.append(1) or torch.nn.functional.embedding(ids, weight)  # noqa: E731
    monkeypatch.setattr(decoder.gradients, "sums_for", lambda weight: object())
    monkeypatch.setattr(decoder.gradients, "embedding", look_up)
    assert torch.equal(model.evaluate(some_groups()).logp, right) and called


def test_the_sampler_draws_the_same_tokens(fused):
    requests = [Request(tuple(p), (3 * i, 3 * i + 1, 3 * i + 2)) for i, p in enumerate(some_groups().prompts)]
    sampler = EmbeddedSampler(fused, max_batch=5)
    ours, theirs = both(fused, lambda: sampler.sample(requests, SamplingParams(max_tokens=90)))
    for a, b in zip((c for group in ours for c in group), (c for group in theirs for c in group), strict=True):
        assert a.ids == b.ids
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=5e-5, rtol=0)


def test_a_scalar_model_is_fused_too(tokenizer):
    config = CONFIGS["qwen3"]
    config.vocab_size, config.num_labels = len(tokenizer), 1
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = scalar_model.prepare(AutoModelForSequenceClassification.from_config(config), tokenizer)
    assert model.decoder is not None
    ours, theirs = both(model, lambda: model.scores(some_groups()).detach())
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    assert model.frozen_copy().decoder is not None


@pytest.mark.parametrize("native", [False, True], ids=["multiplied in float32", "multiplied in bfloat16"])
@pytest.mark.parametrize("name", ["qwen3 of equal heads", *HYBRIDS])
def test_bfloat16_differs_from_transformers_by_its_own_rounding(name, tokenizer, native, monkeypatch):
    multiply_bfloat16(monkeypatch, native)
    config = copy.deepcopy({**CONFIGS, **HYBRIDS}[name])
    if getattr(config, "num_experts_per_tok", 0):
        config.num_experts_per_tok = 5  # all of them, or rounding would decide between two
    exact, model = made(config, tokenizer), made(config, tokenizer, torch.bfloat16)
    assert model.decoder is not None and model.decoder.dtype == (torch.bfloat16 if native else torch.float32)
    parameters = list(model.trainable().values())

    def run(model, parameters):
        logp = model.evaluate(some_groups()).logp
        return logp.detach(), torch.cat([g.float().flatten() for g in torch.autograd.grad(logp.sum(), parameters)])

    (ours, gradient), (theirs, their_gradient) = both(model, lambda: run(model, parameters))
    right, right_gradient = run(exact, list(exact.trainable().values()))
    assert float((ours - right).abs().max()) < 1.5 * float((theirs - right).abs().max()) + 0.02
    error = float((gradient - right_gradient).norm() / right_gradient.norm())
    assert error < 1.2 * float((their_gradient - right_gradient).norm() / right_gradient.norm()) + 0.005


@pytest.mark.parametrize("name", ["qwen3", *HYBRIDS])
def test_activation_checkpointing_gives_the_same_gradient_bit_for_bit(name, tokenizer):
    gradients, held = [], []
    for recompute in (False, True):
        model = made({**CONFIGS, **HYBRIDS}[name], tokenizer)
        model.decoder.recompute = recompute
        loss = model.evaluate(some_groups()).logp.sum()
        held.append(sum(x.numel() for x in saved_by(loss.grad_fn) if not isinstance(x, torch.nn.Parameter)))
        loss.backward()
        gradients.append([p.grad for p in model.trainable().values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert held[1] < 0.4 * held[0], "and holds on to less meanwhile"


def saved_by(node) -> list[torch.Tensor]:
    """What the layers of a graph hold for their backward passes."""
    found, nodes, seen = [], [node], set()
    while nodes:
        now = nodes.pop()
        if now is None or now in seen:
            continue
        seen.add(now)
        nodes += [before for before, _ in now.next_functions]
        if "_LayerFunction" in now.name():
            found += now.saved_tensors
    return found


def test_frozen_weights_receive_no_gradient(tokenizer):
    model = made(CONFIGS["llama"], tokenizer)
    kept = [p for name, p in model.network.named_parameters() if "layers.1.mlp" in name]
    for p in model.network.parameters():
        p.requires_grad_(any(p is k for k in kept))
    model.evaluate(some_groups()).logp.sum().backward()
    assert all(p.grad is not None for p in kept)
    assert all(p.grad is None for p in model.network.parameters() if not p.requires_grad)
    ours = [p.grad.clone() for p in kept]
    for p in kept:
        p.grad = None
    model.decoder = None
    model.evaluate(some_groups()).logp.sum().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-4) for a, p in zip(ours, kept, strict=True))


def test_what_is_not_finite_stays_so(tokenizer):
    model = made(CONFIGS["qwen3"], tokenizer)
    with torch.no_grad():
        model.network.model.layers[0].mlp.gate_proj.weight[3, 4] = torch.nan
    assert bool(model.evaluate(some_groups()).logp.isnan().any())


def test_results_do_not_depend_on_the_number_of_threads_but_for_rounding(fused):
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            logp = fused.evaluate(some_groups()).logp
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(logp.sum(), list(fused.trainable().values()))]))
    finally:
        torch.set_num_threads(threads)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5
    assert torch.equal(found[1], found[2])


def test_negative_control_a_decoder_that_computes_something_else_is_not_used(tokenizer, monkeypatch):
    def wrong(self, *arguments, **more):
        init(self, *arguments, **more)
        for layer in self.layers:
            layer.eps = 0.1

    init = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", wrong)
    model = made_anew(CONFIGS["qwen3"], tokenizer)
    assert model.decoder is None and "outputs differ by" in model.why_unfused


@pytest.fixture
def forgetful(monkeypatch):
    """What was compiled is looked for anew, now and after the test."""
    for cached in (library, kernels):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (library, kernels):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("PSIGRAD_NATIVE", "0", "PSIGRAD_NATIVE=0"), ("CXX", "/bin/false", "/bin/false"), ("CXX", "/nowhere/g++", "/nowhere/g++")],
)
def test_without_kernels_the_modules_do_the_work(name, value, reason, tokenizer, tmp_path, monkeypatch, forgetful):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    model = made_anew(CONFIGS["qwen3"], tokenizer)
    assert model.decoder is None and reason in model.why_unfused
    assert bool(model.evaluate(some_groups()).logp.isfinite().all())


@pytest.mark.slow
def test_the_kernels_are_compiled_once_and_kept(tmp_path, monkeypatch, forgetful):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not isinstance(library(), str)
    (made_once,) = (tmp_path / "psigrad" / "native").glob("*.so")
    before = made_once.stat().st_mtime_ns
    library.cache_clear()
    assert not isinstance(library(), str)
    assert [made_once] == list(made_once.parent.glob("*.so")) and made_once.stat().st_mtime_ns == before


@pytest.mark.parametrize("base", ["none", "bias", "residual"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 15, 16])
def test_a_product_of_few_rows_equals_one_in_float64(rows, base, monkeypatch):
    """On rows that lie apart, for widths that are no multiple of a register and heights that are none of a tile."""
    native = kernels()
    if rows < 16:
        monkeypatch.delattr(torch, "mm")  # the oracle is another function
        monkeypatch.delattr(torch, "addmm")
    for width, height in ((3, 1), (16, 4), (67, 50), (256, 7), (300, 1031)):
        x, weight = torch.randn(rows, width + 5)[:, :width], torch.randn(height, width)
        added = {"none": None, "bias": torch.randn(height), "residual": torch.randn(rows, height + 2)[:, :height]}[base]
        out = torch.full((rows, height + 3), 7.0)
        native.products.linear(x, weight, out[:, :height], added)
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        assert (out[:, :height] - expected).abs().max() < 1e-6 * width
        assert (out[:, height:] == 7).all()  # and touches nothing else


def test_a_row_of_a_product_does_not_depend_on_the_others():
    native = kernels()
    x, weight = torch.randn(15, 300), torch.randn(1031, 300)
    whole = native.products.linear(x, weight, torch.empty(15, 1031))
    for rows in range(1, 15):
        assert torch.equal(native.products.linear(x[:rows], weight, torch.empty(rows, 1031)), whole[:rows])


def test_a_product_that_the_kernel_cannot_compute_is_left_to_pytorch():
    native = kernels()
    x, weight = torch.randn(64, 4).t(), torch.randn(9, 64)  # not contiguous in its rows
    assert torch.allclose(native.products.linear(x, weight, torch.empty(4, 9)), x @ weight.t(), atol=1e-5)
    assert torch.allclose(native.products.linear(x, weight, torch.empty(4, 9), torch.ones(1, 9)), x @ weight.t() + 1, atol=1e-5)
    halves = x.bfloat16(), weight.bfloat16()
    assert torch.equal(native.products.linear(*halves, torch.empty(4, 9, dtype=torch.bfloat16)), halves[0] @ halves[1].t())
    with pytest.raises(RuntimeError):
        native.products.linear(torch.randn(4, 63), weight, torch.empty(4, 9))


def test_what_is_not_finite_stays_so_in_a_product():
    weight = torch.ones(5, 20)
    weight[2, 19], weight[3, 0] = torch.nan, torch.inf
    out = kernels().products.linear(torch.ones(2, 20), weight, torch.empty(2, 5))
    assert out[:, 2].isnan().all() and out[:, 3].isposinf().all() and (out[:, [0, 1, 4]] == 20).all()


def test_a_window_and_a_long_prefix_equal_a_direct_softmax():
    native = kernels()
    assert not isinstance(native, str), native
    heads = Heads(queries=2, keys=1, dim=20, eps=1e-6, scale=0.3)
    prefix, member = 61, 50
    torch.manual_seed(0)
    qkv = torch.randn(prefix + member, heads.row)
    rotated = qkv[:, : 3 * heads.dim].clone()
    for window in (0, 1, 17, 64):
        out, _ = native.attention(rotated, qkv, Spans([(0, prefix)], [[(prefix, member, prefix)]]), heads, window)
        q, k, v = rotated[:, : 2 * 20].view(-1, 2, 20), rotated[:, 40:], qkv[:, 60:]
        scores = torch.einsum("ihd,jd->hij", q, k) * heads.scale
        distance = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))[None]
        seen = (distance >= 0) & ((distance < window) | (window == 0))
        expected = torch.einsum("hij,jd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        assert torch.allclose(out, expected, atol=1e-5), window


def test_members_behind_parts_of_a_prefix_equal_a_direct_softmax():
    """The kernel takes them in an order of its own, the longest part first. Their gradients: `test_packed_forward`."""
    native = kernels()
    assert not isinstance(native, str), native
    heads = Heads(queries=2, keys=1, dim=20, eps=1e-6, scale=0.3)
    prefix, members = 61, [(61, 30, 20), (91, 5, 61), (96, 40, 1), (136, 3, 20)]
    torch.manual_seed(0)
    qkv = torch.randn(139, heads.row)
    position, owner, base = torch.arange(139), torch.full((139,), -1), torch.full((139,), 999)
    for n, (start, length, begin) in enumerate(members):
        at = slice(start, start + length)
        position[at], owner[at], base[at] = torch.arange(begin, begin + length), n, begin
    before = (owner[None] < 0) & (position[None] < base[:, None])
    for window in (0, 17):
        distance = position[:, None] - position[None]
        seen = (before | (owner[:, None] == owner[None])) & (distance >= 0) & ((distance < window) | (window == 0))
        out, _ = native.attention(qkv[:, :60].clone(), qkv, Spans([(0, prefix)], [members]), heads, window)
        q, k, v = qkv[:, :40].view(-1, 2, 20), qkv[:, 40:60], qkv[:, 60:]
        scores = torch.einsum("ihd,jd->hij", q, k) * heads.scale
        expected = torch.einsum("hij,jd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        assert torch.allclose(out, expected, atol=1e-5), window


def laid_out(rotated, qkv, starts, lengths, heads):
    """(keys, values) of each prompt as the kernel leaves them, in memory that held something else."""
    made = [tuple(torch.full((size,), 9.0) for size in table_sizes(length, heads)) for length in lengths.tolist()]
    to = torch.tensor([[x.data_ptr() for x in column] for column in zip(*made, strict=True)])
    kernels().prompt_tables(rotated, qkv, starts, lengths, heads, to)
    return made


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 16, 20, 64])
def test_prompts_are_laid_out_as_decoding_reads_them(dim, kind):
    """In blocks of 16 neighbours, and 0 where there is none."""
    heads = Heads(queries=4, keys=2, dim=dim, eps=1e-6, scale=0.3)
    qkv = torch.randn(70, heads.row).to(kind)
    rotated = torch.randn(70, 6 * dim).to(kind)
    starts, lengths = torch.tensor([40, 0, 17]), torch.tensor([30, 16, 1])
    wide = -(-dim // 16) * 16
    made = laid_out(rotated, qkv, starts, lengths, heads)
    for start, length, (keys, values) in zip(starts.tolist(), lengths.tolist(), made, strict=True):
        keys, values = keys.view(2, -(-length // 16), dim, 16), values.view(2, length, wide)
        expected = rotated[start : start + length, 4 * dim :].float().view(length, 2, dim).permute(1, 2, 0)
        flat = keys.transpose(1, 2).flatten(2)
        assert torch.equal(flat[:, :, :length], expected) and (flat[:, :, length:] == 0).all()
        own = qkv[start : start + length, 6 * dim :].float().view(length, 2, dim).transpose(0, 1)
        assert torch.equal(values[:, :, :dim], own) and (values[:, :, dim:] == 0).all()


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("dim, window", [(8, 0), (20, 0), (16, 9), (64, 30)])
def test_a_decoding_step_over_shared_prompts_equals_a_direct_softmax(prompt, dim, window):
    native = kernels()
    assert not isinstance(native, str), native
    heads, own, rows_there, layer = Heads(queries=4, keys=2, dim=dim, eps=1e-6, scale=0.3), 5, 3, 1
    torch.manual_seed(prompt)
    before = torch.randn(2, prompt, 2 * dim)  # keys and values of the prompt
    rows = torch.zeros(prompt, heads.row)
    rows[:, 4 * dim : 6 * dim], rows[:, 6 * dim :] = before
    whole = torch.zeros(1, dtype=torch.int64), torch.tensor([prompt])
    (tables,) = laid_out(rows[:, : 6 * dim].contiguous(), rows, *whole, heads)
    plain = torch.randn(2, 2, 5, 2, 16, dim)  # of two layers, with room for more than continue the prompt
    cache = plain.clone()
    cache[:, 0] = plain[:, 0].mT.reshape(cache[:, 0].shape)  # keys stand in blocks of sixteen
    others = cache[0].clone()
    qkv = torch.randn(rows_there, heads.row)
    rotated = qkv[:, : 6 * dim].clone()
    slots, places = torch.tensor([4, 0, 1]), torch.full((rows_there,), own)
    addresses = torch.tensor([[[0], [0]], [[x.data_ptr()] for x in tables]])
    given = Slots(
        cache,
        torch.tensor([x.data_ptr() for x in cache]),
        slots,
        places,
        addresses,
        torch.tensor([prompt]),
        torch.tensor([0, rows_there]),
    )
    out, _ = native.decode(rotated, qkv, given, layer, heads, window)
    assert torch.equal(cache[0], others)
    plain[layer, 0] = cache[layer, 0].reshape(5, 2, dim, 16).mT
    plain[layer, 1] = cache[layer, 1]
    for row, slot in enumerate(slots.tolist()):
        for head in range(4):
            rows = [
                torch.cat([before[i, :, head // 2 * dim : (head // 2 + 1) * dim], plain[layer, i, slot, head // 2, : own + 1]])
                for i in (0, 1)
            ]
            scores = rows[0] @ rotated[row, head * dim : (head + 1) * dim] * heads.scale
            if window:
                scores[: max(0, len(scores) - window)] = -torch.inf
            expected = scores.softmax(0) @ rows[1]
            assert torch.allclose(out[row, head * dim : (head + 1) * dim], expected, atol=1e-5)


def test_fewer_threads_than_asked_for_change_nothing():
    """Two are asked for, and one is there; the control asks for one."""
    program = (
        "import torch; torch.set_num_threads({}); from psigrad.kernels.kernels import kernels;"
        "torch.manual_seed(0);"
        "x, w, dy = torch.randn(500, 64), torch.randn(64), torch.randn(500, 64); dx = torch.zeros_like(x);"
        "said = kernels().gradients.rms_norm(dx, x, w, dy, 1e-6).sum().item()"
    )
    given = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    command = [sys.executable, "-c", program.format(2) + "; print(said)"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    here = {}
    with torch.random.fork_rng():
        exec(program.format(1), here)
    assert float(done.stdout) == pytest.approx(here["said"], rel=1e-4)
