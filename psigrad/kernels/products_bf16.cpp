// Products of bfloat16 matrices, which multiply pairs of numbers and sum in float32: with a packed or quantised matrix, and of any matrices.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "codes.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include "amx.h"
#define TILES
#endif

namespace {

// Returns two neighbours of a row as one word.
inline uint32_t pair(const bfloat16* from) {
    uint32_t word;
    memcpy(&word, from, sizeof(word));
    return word;
}

// Returns sum + the product of the lower halves of a and b + the product of their upper halves.
inline vec add_products(vec sum, words a, words b) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return multiply_add((vec)(a & 0xffff0000u), (vec)(b & 0xffff0000u), multiply_add((vec)(a << 16), (vec)(b << 16), sum));
#endif
}

// sums[MR, PANEL] (+)= a[MR, 2 pairs] panel[pairs, PANEL]. `a` has any strides, in numbers, between its rows and between its pairs.
template <int MR>
ALWAYS_INLINE void half_tile(float* sums, const bfloat16* a, int64_t a_row, int64_t a_pair, const uint32_t* panel, int64_t pairs, bool add) {
    constexpr int N = TILE_COLUMNS * PARTS;
    vec sum[MR][N];
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) sum[i][j] = add ? *(const vec*)(sums + i * PANEL + j * WIDTH) : vec{};
    for (int64_t p = 0; p < pairs; p++, panel += PANEL) {
        words row[N];
        for (int j = 0; j < N; j++) memcpy(&row[j], panel + j * WIDTH, sizeof(words));
        for (int i = 0; i < MR; i++) {
            words both = pair(a + i * a_row + p * a_pair) + words{};
            for (int j = 0; j < N; j++) sum[i][j] = add_products(sum[i][j], both, row[j]);
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) *(vec*)(sums + i * PANEL + j * WIDTH) = sum[i][j];
}

template <int MR = TILE_ROWS>
ALWAYS_INLINE void tile_of(int64_t m, float* sums, const bfloat16* a, int64_t a_row, int64_t a_pair, const uint32_t* panel, int64_t pairs, bool add) {
    if (m == MR) return half_tile<MR>(sums, a, a_row, a_pair, panel, pairs, add);
    if constexpr (MR > 1) tile_of<MR - 1>(m, sums, a, a_row, a_pair, panel, pairs, add);
}

// A thread's multiplication of blocks of at most ROWS rows, by AMX tiles or by vectors if Linux does not allow tiles. Rows are divided over
// threads in multiples of GRAIN.
struct Multiplier {
#if defined(TILES)
    static constexpr int64_t ROWS = Tiles::ROWS, GRAIN = EDGE;
    Tiles tiles;
#else
    static constexpr int64_t ROWS = TILE_ROWS, GRAIN = TILE_ROWS;
#endif
    // sums[m, PANEL] (+)= a[m, 2 pairs] panel[pairs, PANEL], with the strides of `half_tile`
    ALWAYS_INLINE void operator()(int64_t m, float* sums, const bfloat16* a, int64_t a_row, int64_t a_pair, const uint32_t* panel, int64_t pairs, bool add) {
#if defined(TILES)
        if (tiles_granted()) return tiles.multiply(m, sums, a, a_row, a_pair, panel, pairs, add);
#endif
        for (int64_t top = 0; top < m; top += TILE_ROWS)
            tile_of(std::min<int64_t>(TILE_ROWS, m - top), sums + top * PANEL, a + top * a_row, a_row, a_pair, panel, pairs, add);
    }
};
constexpr int64_t ROWS = Multiplier::ROWS, GRAIN = Multiplier::GRAIN;

// to[count] = sums[count] + from[count], rounded to bfloat16; a null `from` adds nothing
inline void rounded(bfloat16* to, const float* sums, const bfloat16* from, int64_t count) {
    over(count, [&](int64_t c, auto lanes) {
        vec sum = take(sums + c, lanes);
        give(to + c, lanes, from ? sum + take(from + c, lanes) : sum);
    });
}

// Joins two rows of `count` numbers to words: to[i] = low[i] | high[i] << 16. A null `high` counts as 0.
inline void interleaved(uint32_t* to, const bfloat16* low, const bfloat16* high, int64_t count) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        halves a, b = {};
        memcpy(&a, low + i, sizeof(a));
        if (high) memcpy(&b, high + i, sizeof(b));
        words both = __builtin_convertvector(a, words) | __builtin_convertvector(b, words) << 16;
        memcpy(to + i, &both, sizeof(both));
    }
    for (; i < count; i++) to[i] = low[i].bits | (high ? uint32_t(high[i].bits) << 16 : 0);
}

// The number of columns of A that are processed at a time. A panel of this depth is 64 KiB.
constexpr int64_t DEPTH = (1 << 15) / PANEL;
// The number of columns of the sums that a thread computes at a time. With BLOCK_ROWS rows they are 1 MiB.
constexpr int64_t BLOCK_COLUMNS = 512 / PANEL * PANEL;

// A part of A in the layout that tiles read, [pairs, stride] words. The stride is an odd number of cache lines, so that neighbouring rows are
// in different sets of the cache.
struct Packed {
    int64_t stride;
    std::vector<uint32_t> words;

    explicit Packed(int64_t rows) : stride((rows + 31) / 32 * 32 + 16), words(stride * (DEPTH / 2)) {}
    // Copies a[rows, depth]. One of its strides is 1.
    void fill(const bfloat16* a, int64_t rows, int64_t depth, int64_t a_row, int64_t a_col) {
        for (int64_t p = 0; p < depth; p += 2) {
            uint32_t* to = words.data() + p / 2 * stride;
            const bfloat16* low = a + p * a_col;
            if (a_row == 1)
                interleaved(to, low, p + 1 < depth ? low + a_col : nullptr, rows);
            else
                for (int64_t i = 0; i < rows; i++) interleaved(to + i, low + i * a_row, p + 1 < depth ? low + i * a_row + a_col : nullptr, 1);
        }
    }
};

// Copies `count` columns of b[depth, count] to a panel. One of b's strides is 1.
inline void panel_of(uint32_t* to, const bfloat16* b, int64_t count, int64_t depth, int64_t b_row, int64_t b_col) {
    for (int64_t p = 0; p < depth; p += 2, to += PANEL) {
        if (b_col == 1) {
            interleaved(to, b + p * b_row, p + 1 < depth ? b + (p + 1) * b_row : nullptr, count);
            std::fill(to + count, to + PANEL, 0);
            continue;
        }
        if (p % (2 * WIDTH) == 0)  // transpose squares of words, each of which is a pair
            for (int64_t c = 0; p + 2 * WIDTH <= depth && c + WIDTH <= count; c += WIDTH) {
                vec square[WIDTH];
                for (int i = 0; i < WIDTH; i++) memcpy(&square[i], b + (c + i) * b_col + p, sizeof(vec));
                turn(square);
                for (int i = 0; i < WIDTH; i++) memcpy(to + i * PANEL + c, &square[i], sizeof(vec));
            }
        bool whole = p / (2 * WIDTH) * (2 * WIDTH) + 2 * WIDTH <= depth;
        for (int64_t c = whole ? count / WIDTH * WIDTH : 0; c < PANEL; c++) to[c] = c >= count ? 0 : p + 1 < depth ? pair(b + c * b_col + p) : b[c * b_col + p].bits;
    }
}

}  // namespace

extern "C" {

// Computes the product of `multiply_packed` in bfloat16. k is even, and `pack_matrix` has packed the matrix as one with k / 2 words per row.
// The sum, with base, is rounded once. A row's results do not depend on the number of rows.
void multiply_packed_bf16(bfloat16* out, const bfloat16* x, const uint32_t* panels, const bfloat16* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    int64_t wide = (n + PANEL - 1) / PANEL, tall = (m + GRAIN - 1) / GRAIN;
    int64_t shares = std::max<int64_t>(1, std::min(tall, (4 * threads + wide - 1) / wide));
    int64_t share = (tall + shares - 1) / shares * GRAIN;
#pragma omp parallel num_threads(threads) if (m * n * k > WORTH_SHARING)
    {
        Multiplier multiply;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t i = 0; i < m; i += share)
            for (int64_t j = 0; j < n; j += PANEL) {
                int64_t end = std::min(i + share, m), count = std::min(PANEL, n - j);
                for (int64_t top = i; top < end; top += ROWS) {
                    float sums[ROWS * PANEL];
                    int64_t rows = std::min<int64_t>(ROWS, end - top);
                    multiply(rows, sums, x + top * x_row, x_row, 2, panels + j * (k / 2), k / 2, false);
                    for (int64_t r = 0; r < rows; r++) rounded(out + (top + r) * out_row + j, sums + r * PANEL, base ? base + (top + r) * base_row + j : nullptr, count);
                }
            }
    }
}

// Computes the product of `multiply_packed_bf16` with a quantised matrix.
void multiply_codes_bf16(bfloat16* out, const bfloat16* x, const Codes* codes, const bfloat16* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    int64_t n = codes->rows, wide = (n + PANEL - 1) / PANEL, tall = (m + GRAIN - 1) / GRAIN;
    int64_t shares = std::max<int64_t>(1, std::min(tall, threads / std::max<int64_t>(1, wide))), share = (tall + shares - 1) / shares * GRAIN;
#pragma omp parallel num_threads(threads) if (m * n * k > WORTH_SHARING)
    {
        Multiplier multiply;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t i = 0; i < m; i += share)
            for (int64_t j = 0; j < n; j += PANEL) {
                static thread_local std::vector<float> sums;
                static thread_local std::vector<uint32_t> panel(DEPTH / 2 * PANEL);
                int64_t rows = std::min(share, m - i);
                sums.resize(std::max<int64_t>(sums.size(), share * PANEL));
                for (int64_t p = 0; p < k; p += DEPTH) {
                    int64_t depth = std::min(DEPTH, k - p);
                    unpacked<true, PANEL>(panel.data(), *codes, k, j, p, depth);
                    for (int64_t top = 0; top < rows; top += ROWS)
                        multiply(std::min<int64_t>(ROWS, rows - top), sums.data() + top * PANEL, x + (i + top) * x_row + p, x_row, 2, panel.data(), depth / 2, p > 0);
                }
                for (int64_t r = 0; r < rows; r++) rounded(out + (i + r) * out_row + j, sums.data() + r * PANEL, base ? base + (i + r) * base_row + j : nullptr, std::min(PANEL, n - j));
            }
    }
}

// Computes `product` in bfloat16. The sum, with c or base, is rounded once.
void product_bf16(bfloat16* c, const bfloat16* a, const bfloat16* b, const bfloat16* base, int64_t m, int64_t n, int64_t k, int64_t c_row, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int64_t base_row, int add, int threads) {
    int64_t tall = std::max<int64_t>(1, (m + GRAIN - 1) / GRAIN), down = std::max<int64_t>(1, (m + BLOCK_ROWS - 1) / BLOCK_ROWS);
    int64_t columns = std::min(BLOCK_COLUMNS, std::max<int64_t>(1, (n + PANEL - 1) / PANEL) * PANEL);
    if (tall >= 8 * threads)
        down = (down + threads - 1) / threads * threads;
    else
        columns = std::min(columns, std::max<int64_t>(1, (n + PANEL * threads - 1) / (PANEL * threads)) * PANEL);
    int64_t share = (tall + down - 1) / down * GRAIN;
    bool packs = a_col != 1 || k % 2;
    if (add) base = c, base_row = c_row;
#pragma omp parallel num_threads(threads) if (m * n * k > WORTH_SHARING)
    {
        Multiplier multiply;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t i = 0; i < m; i += share)
            for (int64_t left = 0; left < n; left += columns) {
                int64_t rows = std::min(share, m - i), tiled = (rows + GRAIN - 1) / GRAIN * GRAIN, right = std::min(n, left + columns);
                static thread_local std::vector<float> sums;
                static thread_local std::vector<uint32_t> panel(DEPTH / 2 * PANEL);
                static thread_local Packed packed(BLOCK_ROWS + GRAIN);
                sums.resize(std::max<int64_t>(sums.size(), tiled * columns));
                for (int64_t p = 0; p < k || p == 0; p += DEPTH) {
                    int64_t depth = std::min(DEPTH, k - p), pairs = (depth + 1) / 2;
                    if (packs) packed.fill(a + i * a_row + p * a_col, rows, depth, a_row, a_col);
                    for (int64_t j = left; j < right; j += PANEL) {
                        panel_of(panel.data(), b + p * b_row + j * b_col, std::min(PANEL, n - j), depth, b_row, b_col);
                        float* at = sums.data() + (j - left) * tiled;  // sums are stored panel by panel
                        for (int64_t top = 0; top < rows; top += ROWS) {
                            int64_t count = std::min<int64_t>(ROWS, rows - top);
                            if (packs)
                                multiply(count, at + top * PANEL, (const bfloat16*)(packed.words.data() + top), 2, 2 * packed.stride, panel.data(), pairs, p > 0);
                            else
                                multiply(count, at + top * PANEL, a + (i + top) * a_row + p, a_row, 2, panel.data(), pairs, p > 0);
                        }
                        if (p + DEPTH < k) continue;
                        for (int64_t r = 0; r < rows; r++) rounded(c + (i + r) * c_row + j, at + r * PANEL, base ? base + (i + r) * base_row + j : nullptr, std::min(PANEL, n - j));
                    }
                }
            }
    }
}

// Writes the name of the instructions that multiply float32 numbers, or bfloat16 numbers if `half`, in at most 64 characters.
void instructions(int half, char* name) {
#if defined(__AVX512F__)
    const char* found = "AVX-512";
#elif defined(__AVX2__)
    const char* found = "AVX2";
#elif defined(__ARM_NEON)
    const char* found = "NEON";
#else
    const char* found = "vectors of the compiler's choice";
#endif
#if defined(__AVX512BF16__)
    if (half) found = "AVX-512 bfloat16";
#endif
#if defined(TILES)
    if (half) found = tiles_granted() ? "AMX tiles" : "AVX-512 bfloat16 (Linux refused AMX tiles)";
#endif
    strcpy(name, found);
}
}
