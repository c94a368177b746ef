"""The kernels' products of any two matrices, against float64 and against PyTorch."""

from __future__ import annotations

import pytest
import torch
from fused_models import CONFIGS, adapted, made, some_groups
from kernel_choices import own_products, pretend_processor

from psigrad.kernels import processor
from psigrad.kernels.kernels import kernels, multiply
from psigrad.kernels.products import Products
from psigrad.language.models.packing import pack

pytestmark = pytest.mark.needs("compiler")

KINDS = [torch.float32, torch.bfloat16]
# Rows, depth, columns: less than a tile or a register, no multiple of one, more than is taken at a time, nothing at all.
SHAPES = (
    *((1, 1, 1), (5, 3, 2), (6, 16, 64), (7, 300, 65), (100, 257, 130)),
    *((1100, 40, 70), (37, 1030, 256), (0, 4, 4), (4, 0, 70)),
)


@pytest.fixture
def products(monkeypatch) -> Products:
    """Which compute all that they can, on whatever processor."""
    return own_products(monkeypatch)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def apart(rows: int, columns: int, kind: torch.dtype, more: int = 3) -> torch.Tensor:
    """Of random numbers, rows that do not follow one another in memory."""
    return torch.randn(rows, columns + more).to(kind)[:, :columns]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("base", ["none", "bias", "rows", "itself"])
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_a_product_equals_one_in_float64(products, monkeypatch, two_threads, transposed, base, threads, kind):
    """To what float32 loses in a sum; and in bfloat16 half a unit in the last place, as the whole is rounded once."""
    torch.set_num_threads(threads)
    for name in ("mm", "addmm"):
        monkeypatch.delattr(torch, name)  # the oracle is another function
    for m, k, n in SHAPES:
        a = apart(k, m, kind).t() if "a" in transposed else apart(m, k, kind)
        b = apart(n, k, kind).t() if "b" in transposed else apart(k, n, kind)
        whole = torch.full((m, n + 3), 7.0, dtype=kind)
        out = whole[:, :n]
        added = {"none": None, "bias": torch.randn(n).to(kind), "rows": apart(m, n, kind), "itself": out}[base]
        expected = a.double() @ b.double() + (0 if added is None else added.double())
        assert products.of(a, b, out, added) is out
        bound = 1e-6 * (k + 1) + (expected.abs() * 2**-8 if kind == torch.bfloat16 else 0)
        assert ((out - expected).abs() < bound).all()
        assert (whole[:, n:] == 7).all()  # and touches nothing else
        assert base == "itself" or ((products.of(a, b, base=added) - expected).abs() < bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_depends_neither_on_the_threads_nor_on_other_rows_and_columns(products, two_threads, kind):
    a, b = torch.randn(700, 600).to(kind), torch.randn(600, 330).to(kind)
    whole = products.of(a, b)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(products.of(a, b), whole)
        assert torch.equal(products.of(a.t().contiguous().t(), b.t().contiguous().t()), whole)
        for rows, columns in ((1, 330), (13, 64), (699, 1), (350, 100)):
            assert torch.equal(products.of(a[:rows], b[:, :columns]), whole[:rows, :columns])
    assert not torch.equal(products.of(a[:, :599], b[:599]), whole)  # equal() would see a difference


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_has_the_numbers_that_decoding_reads_from_panels(products, kind):
    x, weight = torch.randn(40, 600).to(kind), torch.randn(331, 600).to(kind)
    packed_weights = products.multiply_packed(x, products.pack(weight), torch.empty(40, 331, dtype=kind))
    assert torch.equal(products.of(x, weight.t()), packed_weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_so(products, kind, transposed):
    a, b = torch.ones(9, 21, dtype=kind), torch.ones(21, 70, dtype=kind)
    b[20, 5], a[4, 2] = torch.nan, torch.inf
    out = products.of(a.t().contiguous().t(), b.t().contiguous().t()) if transposed else products.of(a, b)
    assert out[:, 5].isnan().all()
    assert out[4, :5].isinf().all()
    assert out.isfinite().sum() == 8 * 69


def test_pytorch_computes_the_rest_and_refuses_what_does_not_fit(products):
    for kind in (torch.float64, torch.float16):
        a, b = torch.randn(9, 20, dtype=kind), torch.randn(20, 7, dtype=kind)
        assert torch.equal(products.of(a, b), a @ b)
        assert torch.equal(products.of(a, b, base=b[0]), torch.addmm(b[0], a, b))
    checkered = torch.randn(18, 40)[::2, ::2]
    assert torch.allclose(products.of(checkered, torch.ones(20, 7)), checkered @ torch.ones(20, 7), atol=1e-5)
    with pytest.raises(RuntimeError):
        products.of(torch.randn(9, 20), torch.randn(19, 7))
    with pytest.raises(RuntimeError):
        products.of(torch.randn(9, 20), torch.randn(20, 7), base=torch.randn(3, 5))


def test_there_are_products_without_kernels(monkeypatch):
    monkeypatch.setattr("psigrad.kernels.kernels.kernels", lambda: "none here")
    a, b, out = torch.randn(9, 20), torch.randn(20, 7), torch.ones(9, 7)
    assert multiply(a, b, out, base=out) is out
    assert torch.allclose(out, a @ b + 1, atol=1e-5)
    assert torch.equal(multiply(a, b), a @ b)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "adapted"])
def test_gradients_are_the_same_by_whichever_products(kind, tokenizer, monkeypatch):
    """Negative control: with a part of the product left out they are not."""
    model = adapted(CONFIGS["qwen2"], tokenizer) if kind == "adapted" else made(CONFIGS[kind], tokenizer)
    products = model.decoder.native.products

    def gradient() -> torch.Tensor:
        forward = pack(some_groups())
        hidden = model.forward(forward.input_ids, forward.position_ids, forward.layout)
        found = torch.autograd.grad(hidden.sin().sum(), list(model.trainable().values()), allow_unused=True)
        return torch.cat([g.flatten() for g in found if g is not None])

    found = {}
    for own in (True, False):
        monkeypatch.setattr(products, "float32", own)
        found[own] = gradient()
    scale = found[False].norm()
    assert scale > 0
    assert (found[True] - found[False]).norm() < 1e-5 * scale
    whole = Products.of

    def without_the_last(self, a, b, out=None, base=None):
        return whole(self, a[:, :-1], b[:-1], out, base)

    monkeypatch.setattr(Products, "of", without_the_last)
    assert (gradient() - found[False]).norm() > 1e-3 * scale


@pytest.mark.needs("linux")
def test_the_kernels_are_those_of_the_best_level(request):
    """Of a forced level too; otherwise the tests on lower tiers would prove nothing about them."""
    emulated = request.config.pluginmanager.has_plugin("amx")
    best = {"x86-64-v3": ("AVX2", "AVX2"), "x86-64-v4": ("AVX-512", "AVX-512"), "armv8-a": ("NEON", "NEON")}
    best |= {"x86-64-v4-bf16": ("AVX-512", "AVX-512 bfloat16"), "x86-64-v4-amx": ("AVX-512", "AMX tiles")}
    names = tuple(kernels().products.instructions(dtype) for dtype in (torch.float32, torch.bfloat16))
    assert names == best["x86-64-v4-amx" if emulated else processor.levels()[0]]


@pytest.mark.parametrize(
    ("lines", "half", "trains", "packs"),
    [
        (("vendor_id: AuthenticAMD", "flags : avx2 avx512f avx512_bf16"), True, (True, True), True),
        (("vendor_id: AuthenticAMD", "flags : avx2"), False, (True, False), False),
        (("vendor_id: GenuineIntel", "flags : avx2 avx512f avx512_bf16"), False, (False, True), True),
        (("vendor_id: GenuineIntel", "flags : avx512f avx512_bf16 amx_bf16"), True, (False, False), True),
        ((), False, (False, False), False),
    ],
)
def test_the_processor_decides(lines, half, trains, packs, monkeypatch):
    """In which type layers are computed, which of training's products are the kernels', and whether bfloat16 is packed."""
    pretend_processor(monkeypatch, *lines)
    products = Products(None)
    assert processor.fast_bfloat16() is half
    assert (products.float32, products.bfloat16) == trains
    assert products.can_pack(torch.ones(3, 4).bfloat16()) is packs
    assert processor.identity()
