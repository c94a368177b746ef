"""The kernels for AMX: real instructions, computed by an emulator where the processor has none (`amx_emulator.cpp`).

Against float64, against the formula of Intel's manual to the last bit, and against one another: one row and many, one thread and
several, a matrix in panels, in codes and as it stands.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from amx import INSTRUCTIONS, Emulator
from cases import slow

from psigrad.kernels.build import bind
from psigrad.kernels.codes import code
from psigrad.kernels.kernels import _SIGNATURES, Kernels, kernels
from psigrad.kernels.processor import levels
from psigrad.kernels.products import PackedMatrix, Products

pytestmark = pytest.mark.needs("tiles")

# Rows, columns, depth: less than a tile, whole tiles, more by one row or pair or column, more than is taken at a time.
SHAPES = (
    *((1, 1, 2), (5, 16, 30), (16, 63, 32), (17, 64, 34), (31, 65, 64)),
    *((32, 130, 66), (33, 200, 1030), (70, 40, 1024), (100, 70, 18)),
)
NAMES = ("multiply_packed_bf16", "multiply_codes_bf16", "product_bf16", "instructions")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulator"))


def products_of(library: ctypes.CDLL) -> Products:
    """Which multiply by this library, and training's products too; panels and codes are the same for all."""
    native = kernels()
    assert isinstance(native, Kernels), native
    call = bind(library, {name: _SIGNATURES[name] for name in NAMES})
    made = Products(SimpleNamespace(**{**vars(native._call), **vars(call)}))
    made.bfloat16 = made.packs_bfloat16 = True
    return made


@pytest.fixture(scope="module")
def compiled(emulator, tmp_path_factory):
    """The folder of the library, and what multiplies by it."""
    folder = tmp_path_factory.mktemp("amx")
    return folder, products_of(emulator.kernels(folder, ["products_bf16.cpp"]))


@pytest.fixture
def products(compiled, emulator):
    before = torch.get_num_threads()
    yield compiled[1]
    torch.set_num_threads(before)
    assert not emulator.error
    assert not emulator.library.amx_held(), "tiles are given back"


def among_nan(rows: int, columns: int) -> torch.Tensor:
    """Random numbers, with NaN behind every row and behind the last."""
    whole = torch.full((rows + 1, columns + 6), torch.nan).bfloat16()
    whole[:rows, :columns] = torch.randn(rows, columns)
    return whole[:rows, :columns]


def packed_before_nan(products: Products, weight: torch.Tensor) -> PackedMatrix:
    """Packed, with NaN behind the last panel."""
    packed = products.pack(weight)
    used = -(-len(weight) // 64) * 64 * weight.shape[1]
    whole = torch.full((used + 4096,), torch.nan).bfloat16()
    whole[:used] = packed.panels[:used]
    return PackedMatrix(whole, packed.shape)


def wrong(products: Products, base: str, threads: int) -> list[tuple[int, int, int]]:
    """The shapes of which a number is further from float64's than half a unit in the last place, and what a float32 sum loses."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    found = []
    for m, n, k in SHAPES:
        x, weight = among_nan(m, k), torch.randn(n, k).bfloat16()
        added = {"none": None, "bias": torch.randn(n).bfloat16(), "rows": among_nan(m, n)}[base]
        whole = torch.full((m, n + 3), 7.0, dtype=torch.bfloat16)
        products.multiply_packed(x, packed_before_nan(products, weight), whole[:, :n], added)
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        near = ((whole[:, :n] - expected).abs() < 1e-6 * (k + 1) + expected.abs() * 2**-8).all()
        if not (near and (whole[:, n:] == 7).all()):
            found.append((m, n, k))
    return found


@pytest.mark.parametrize(("base", "threads"), [("none", 1), ("bias", 2), ("rows", 3)])
def test_a_product_equals_one_in_float64(products, base, threads):
    assert not wrong(products, base, threads)


@pytest.mark.parametrize(
    ("right", "fault", "only_in"),
    [
        ("PANEL, last + EDGE * PANEL, 0)", "PANEL, last + EDGE * PANEL, 0x7fc07fc0)", lambda m, n, k: k % 32),
        *slow(
            ("std::fill_n(to, m * EDGE, 0)", "std::fill_n(to, m * EDGE, 0x7fc07fc0)", lambda m, n, k: k % 32),
            ("_tile_dpbf16ps(3, 5, 7)", "_tile_zero(3)", lambda m, n, k: m > 16 and n > 16),
            ("b + 2 * EDGE", "b + EDGE", lambda m, n, k: n > 32),
        ),
    ],
    ids=["tail of the panel", "tail of the rows", "fourth block of sums", "third columns"],
)
def test_negative_control_a_fault_is_noticed(emulator, tmp_path, right, fault, only_in):
    faulty = wrong(products_of(emulator.kernels(tmp_path, ["products_bf16.cpp"], (right, fault))), "none", 1)
    assert faulty and all(only_in(*shape) for shape in faulty), faulty


def test_the_instructions_of_the_manual_are_in_the_library_and_were_computed(compiled, products, emulator):
    """Where the processor has them they are not emulated."""
    said = subprocess.run(["objdump", "-d", compiled[0] / "kernels.so"], check=True, capture_output=True, text=True).stdout
    assert {name for name in INSTRUCTIONS if f"{name} " in said or f"{name}\n" in said} == set(INSTRUCTIONS)
    before = emulator.computed
    assert not wrong(products, "none", 1)
    emulated = {name for name, count in emulator.computed.items() if count > before[name]}
    assert emulated == (set() if "x86-64-v4-amx" in levels() else set(INSTRUCTIONS))
    assert products.instructions(torch.bfloat16) == "AMX tiles"
    assert products.instructions(torch.float32) == "AVX-512"


def cancelling(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a weight whose products would be 0: what float32 makes of them tells in which order they were summed."""

    def huge(rows: int) -> torch.Tensor:
        return torch.randn(rows, k // 2).sign() * torch.tensor([1.0, 2.0**14])[torch.randint(0, 2, (rows, k // 2))]

    x, (upper, half) = among_nan(m, k), (huge(n), huge(m))
    x[:, : k // 2], x[:, k // 2 :] = half, half.flip(1)
    return x, torch.cat([upper, -upper.flip(1)], dim=1).bfloat16()


def by_the_manual(x: torch.Tensor, weight: torch.Tensor, apart: bool = True) -> torch.Tensor:
    """x · weightᵀ as TDPBF16PS sums it: 16 pairs at a time, the first and the second of each `apart`. Products of bfloat16
    numbers are exact in float32, so that a multiplication and an addition are one that is rounded once.
    """
    short = -x.shape[1] % 32
    x, weight = (torch.nn.functional.pad(t.float(), (0, short)) for t in (x, weight))
    sums = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], 32):
        parts = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for p in range(start, start + 32):
            parts[p % 2 if apart else 0] += x[:, p, None] * weight[:, p]
        sums += parts[0] + parts[1]
    return sums.bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_is_that_of_the_manuals_formula(products, shape):
    m, n, k = shape
    x, weight = cancelling(m, n, k)
    found = products.multiply_packed(x, packed_before_nan(products, weight), torch.empty(m, n, dtype=torch.bfloat16))
    assert torch.equal(found, by_the_manual(x, weight))
    assert k == 2 or not torch.equal(found, by_the_manual(x, weight, apart=False)), "equal() would see another order"


def test_a_row_depends_neither_on_the_threads_nor_on_other_rows(products):
    x, weight = among_nan(140, 1100), torch.randn(300, 1100).bfloat16()
    packed = products.pack(weight)

    def through(rows: torch.Tensor) -> torch.Tensor:
        return products.multiply_packed(rows, packed, torch.empty(len(rows), 300, dtype=torch.bfloat16))

    torch.set_num_threads(1)
    whole = through(x)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        for start, end in ((0, 140), (3, 4), (7, 23), (0, 33), (90, 140)):
            assert torch.equal(through(x[start:end]), whole[start:end]), (threads, start, end)
        assert torch.equal(products.of(x, weight.t()), whole)
        assert torch.equal(products.of(x.t().contiguous().t(), weight.t().contiguous()), whole)
        assert torch.equal(products.of(x[:17], weight.t()[:, :70]), whole[:17, :70])


@pytest.mark.parametrize(("kind", "widths"), [("nf4", (64, 192, 1088)), ("int8", (32, 96, 1056))])
def test_a_matrix_in_codes_gives_what_its_numbers_give_in_panels(products, kind, widths):
    for width in widths:
        matrix, x = code(torch.randn(150, width), kind), among_nan(75, width)
        unpacked = products.unpack(matrix, torch.bfloat16)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (1, 16, 21, 32, 75):
                bias, out = torch.randn(150).bfloat16(), torch.empty(2, rows, 150, dtype=torch.bfloat16)
                products.multiply_codes(x[:rows], [matrix], out[0], bias)
                products.multiply_packed(x[:rows], products.pack(unpacked), out[1], bias)
                assert torch.equal(*out), (width, rows)


def test_products_of_odd_depth_and_of_none(products):
    for m, n, k in ((5, 70, 1), (40, 65, 257), (33, 20, 1031), (4, 70, 0)):
        a, b = among_nan(m, k), among_nan(n, k).t()
        for left in (a, a.t().contiguous().t()):
            expected = a.double() @ b.double()
            assert ((products.of(left, b) - expected).abs() <= 1e-6 * (k + 1) + expected.abs() * 2**-8).all()


def test_what_is_not_finite_stays_in_its_row_and_column(products):
    x, weight = torch.ones(37, 66).bfloat16(), torch.ones(70, 66).bfloat16()
    weight[5, 65], x[20, 2] = torch.nan, torch.inf
    out = products.multiply_packed(x, products.pack(weight), torch.empty(37, 70).bfloat16())
    assert out[:, 5].isnan().all() and out[20, :5].isinf().all() and out.isfinite().sum() == 36 * 69


def test_what_is_denormal_counts_as_nothing(products):
    """As by AVX-512's products of bfloat16 numbers, and unlike float32's."""
    x, weight = torch.full((20, 32), 1e-39).bfloat16(), torch.ones(70, 32).bfloat16()
    assert x.any() and (x.float() @ weight.float().t()).all()
    for each in (products, kernels().products):
        assert not each.multiply_packed(x, products.pack(weight), torch.ones(20, 70).bfloat16()).any()


def test_where_linux_refuses_tiles_vectors_multiply(compiled, emulator, tmp_path):
    shutil.copy(compiled[0] / "kernels.so", tmp_path / "again.so")
    emulator.refuse(True)
    try:
        refused = products_of(ctypes.CDLL(str(tmp_path / "again.so")))
        assert refused.instructions(torch.bfloat16) == "AVX-512 bfloat16 (Linux refused AMX tiles)"
    finally:
        emulator.refuse(False)
    x, weight = among_nan(70, 1030), torch.randn(130, 1030).bfloat16()
    before, out = emulator.computed, [torch.empty(70, 130, dtype=torch.bfloat16) for _ in range(3)]
    for given, to in zip((refused, kernels().products, compiled[1]), out, strict=True):
        given.multiply_packed(x, refused.pack(weight), to)
        if given is refused:
            assert emulator.computed == before
    assert torch.equal(out[0], refused.of(x, weight.t()))
    # on a processor with AMX the kernels' own sums are those of tiles
    assert torch.equal(out[0], out[1]) is ("x86-64-v4-amx" not in levels()) and not torch.equal(out[0], out[2])
