// Products of float32 matrices: `few_rows` multiplies a few rows by a matrix, which is read once at the speed of memory; `multiply_packed` and
// `multiply_codes` multiply any number of rows by a packed or quantised matrix, in decoding; `product` multiplies any matrices, in training.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "codes.h"

namespace {

// The sizes of a tile of sums in registers: ROWS rows of x times COLUMNS rows of the matrix. Each sum is a vector of WIDTH.
constexpr int COLUMNS = 4;
constexpr int ROWS = WIDTH == 8 ? 2 : 4;  // AVX2 has sixteen registers
static_assert(ROWS * COLUMNS % WIDTH == 0, "fold() makes one vector of WIDTH");

template <int HALF, int... LANE>
inline vec fold_pair(vec a, vec b, std::integer_sequence<int, LANE...>) {
    return PICK(a, b, (LANE & HALF ? WIDTH + LANE - HALF : LANE)...) + PICK(a, b, (LANE & HALF ? WIDTH + LANE : LANE + HALF)...);
}

// Sets element i of a[0] to the sum of the lanes of a[i]. This takes 15 additions of vectors for 16 sums; one by one they would take 64.
template <int HALF = WIDTH / 2>
inline void fold(vec* a) {
    for (int i = 0; i < HALF; i++) a[i] = fold_pair<HALF>(a[i], a[i + HALF], std::make_integer_sequence<int, WIDTH>{});
    if constexpr (HALF > 1) fold<HALF / 2>(a);
}

// out[MR, NR] = x[MR, k] w[NR, k]^T + base. The numbers at the distance `ahead` from w are needed next and are prefetched, because the
// processor does not predict a jump to another row.
template <int MR, int NR>
inline void tile_of_dots(int64_t k, const float* x, int64_t x_row, const float* w, int64_t ahead, const float* base, int64_t base_row, float* out, int64_t out_row) {
    vec sum[ROWS * COLUMNS] = {};
    int64_t whole = k / WIDTH * WIDTH;
    for (int64_t p = 0; p < whole; p += WIDTH) {
        vec row[NR];
        for (int j = 0; j < NR; j++) {
            row[j] = *(const vec*)(w + j * k + p);
            if (ahead) __builtin_prefetch(w + j * k + p + ahead);
        }
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < NR; j++) sum[i * COLUMNS + j] = multiply_add(*(const vec*)(x + i * x_row + p), row[j], sum[i * COLUMNS + j]);
    }
    if (whole < k)
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < NR; j++) sum[i * COLUMNS + j] = multiply_add(take(x + i * x_row + whole, k - whole), take(w + j * k + whole, k - whole), sum[i * COLUMNS + j]);
    float total[ROWS * COLUMNS];
    for (int i = 0; i < MR * COLUMNS; i += WIDTH) {
        fold(sum + i);
        *(vec*)(total + i) = sum[i];
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NR; j++) out[i * out_row + j] = total[i * COLUMNS + j] + (base ? base[i * base_row + j] : 0);
}

template <int NR>
inline void column_of_dots(int64_t m, int64_t k, const float* x, int64_t x_row, const float* w, int64_t ahead, const float* base, int64_t base_row, float* out, int64_t out_row) {
    for (int64_t i = 0; i < m; i += ROWS, ahead = 0) {
        const float *a = x + i * x_row, *from = base ? base + i * base_row : nullptr;
        float* to = out + i * out_row;
        switch (m - i) {
            case 1: tile_of_dots<1, NR>(k, a, x_row, w, ahead, from, base_row, to, out_row); break;
            case 2: tile_of_dots<2, NR>(k, a, x_row, w, ahead, from, base_row, to, out_row); break;
            case 3: tile_of_dots<ROWS < 3 ? ROWS : 3, NR>(k, a, x_row, w, ahead, from, base_row, to, out_row); break;
            default: tile_of_dots<ROWS, NR>(k, a, x_row, w, ahead, from, base_row, to, out_row);
        }
    }
}

// The number of columns of a panel that are processed at a time. They are 64 KiB, which stay in a cache while all rows of x read them.
constexpr int64_t DEPTH = (1 << 14) / PANEL;
// The number of rows of x that are multiplied by all panels before the next rows. With 256 numbers each they are 400 KB.
constexpr int64_t NEAR_ROWS = 64 * TILE_ROWS;

// Copies `count` rows of w [count, k], whose row stride is w_row, to a panel [k, PANEL].
inline void panel_of(float* to, const float* w, int64_t count, int64_t k, int64_t w_row) {
    for (int64_t c = 0; c < PANEL; c += WIDTH) {
        int64_t p = 0;
        for (; p + WIDTH <= k && c + WIDTH <= count; p += WIDTH) {
            vec square[WIDTH];
            for (int i = 0; i < WIDTH; i++) square[i] = *(const vec*)(w + (c + i) * w_row + p);
            turn(square);
            for (int i = 0; i < WIDTH; i++) *(vec*)(to + (p + i) * PANEL + c) = square[i];
        }
        for (; p < k; p++)
            for (int64_t i = c; i < c + WIDTH; i++) to[p * PANEL + i] = i < count ? w[i * w_row + p] : 0;
    }
}

// Copies `count` columns of b [k, count], whose row stride is b_row, to a panel [k, PANEL].
inline void panel_beside(float* to, const float* b, int64_t count, int64_t k, int64_t b_row) {
    for (int64_t p = 0; p < k; p++, b += b_row, to += PANEL) {
        if (count == PANEL) {  // a call of memcpy would take longer than the copy
            for (int64_t c = 0; c < PANEL; c += WIDTH) *(vec*)(to + c) = *(const vec*)(b + c);
            continue;
        }
        memcpy(to, b, count * sizeof(float));
        std::fill(to + count, to + PANEL, 0.0f);
    }
}

// Copies the transpose of a [k, rows] tile by tile, each [k, TILE_ROWS], so that the numbers that a tile reads together are contiguous.
inline void tiles_of(float* to, const float* a, int64_t rows, int64_t k, int64_t a_col) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS, to += TILE_ROWS * k) {
        int64_t count = std::min<int64_t>(TILE_ROWS, rows - i);
        const float* from = a + i;
        for (int64_t p = 0; p < k; p++) {
            if (count == TILE_ROWS)
                memcpy(to + p * TILE_ROWS, from + p * a_col, TILE_ROWS * sizeof(float));
            else
                for (int64_t r = 0; r < count; r++) to[p * TILE_ROWS + r] = from[p * a_col + r];
        }
    }
}

// C[m, PANEL] (+)= A[m, k] panel[k, PANEL]. A has contiguous rows, or with `tiles` the layout of `tiles_of`.
inline void through(int64_t m, int64_t k, const float* a, int64_t a_row, bool tiles, const float* panel, float* c, int64_t c_row, bool add) {
    if (!tiles) return column_tiles<TILE_COLUMNS>(m, k, a, a_row, 1, panel, PANEL, c, c_row, add);
    int64_t i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS) tile<TILE_ROWS, TILE_COLUMNS>(k, a + i * k, 1, TILE_ROWS, panel, PANEL, c + i * c_row, c_row, add);
    last_tile<TILE_COLUMNS>(m - i, k, a + i * k, 1, TILE_ROWS, panel, PANEL, c + i * c_row, c_row, add);
}

// out[m, count] = x[m, k] panel[k, count] + base for the last panel of a matrix, of which only `count` columns are not padding.
inline void part_of_panel(float* out, const float* x, const float* panel, const float* base, int64_t m, int64_t count, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row) {
    float room[TILE_ROWS * PANEL] = {};
    for (int64_t i = 0; i < m; i += TILE_ROWS) {
        int64_t rows = std::min<int64_t>(TILE_ROWS, m - i);
        if (base)
            for (int64_t r = 0; r < rows; r++) std::copy_n(base + (i + r) * base_row, count, room + r * PANEL);
        column_tiles<TILE_COLUMNS>(rows, k, x + i * x_row, x_row, 1, panel, PANEL, room, PANEL, base);
        for (int64_t r = 0; r < rows; r++) std::copy_n(room + r * PANEL, count, out + (i + r) * out_row);
    }
}

inline void whole_panel(float* out, const float* x, const float* panel, const float* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row) {
    if (base)
        for (int64_t i = 0; i < m; i++) std::copy_n(base + i * base_row, PANEL, out + i * out_row);
    for (int64_t p = 0; p < k; p += DEPTH)
        column_tiles<TILE_COLUMNS>(m, std::min(DEPTH, k - p), x + p, x_row, 1, panel + p * PANEL, PANEL, out, out_row, base || p > 0);
}

}  // namespace

extern "C" {

// out[m, n] = x[m, k] weight[n, k]^T + base. The row strides of out, x and base are out_row, x_row and base_row. With a base_row of 0 all
// rows have the same base, and a null base adds nothing. A row's results do not depend on the number of rows.
void few_rows(float* out, const float* x, const float* weight, const float* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    int64_t whole = n / COLUMNS * COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static) if (n * k > WORTH_SHARING)
    for (int64_t j = 0; j < whole; j += COLUMNS)
        column_of_dots<COLUMNS>(m, k, x, x_row, weight + j * k, COLUMNS * k, base ? base + j : nullptr, base_row, out + j, out_row);
    for (int64_t j = whole; j < n; j++)
        column_of_dots<1>(m, k, x, x_row, weight + j * k, 0, base ? base + j : nullptr, base_row, out + j, out_row);
}

// Packs weight[n, k] to to[panels, k, PANEL].
void pack_matrix(float* to, const float* weight, int64_t n, int64_t k, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * k > WORTH_SHARING)
    for (int64_t j = 0; j < n; j += PANEL) panel_of(to + j * k, weight + j * k, std::min(PANEL, n - j), k, k);
}

// Computes the product of `few_rows` for any number of rows and a packed matrix. A row's results do not depend on the number of rows.
void multiply_packed(float* out, const float* x, const float* panels, const float* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    // Divide the rows into shares, if there are too few panels to occupy all threads, or more rows than fit into a cache.
    int64_t wide = (n + PANEL - 1) / PANEL, tall = (m + TILE_ROWS - 1) / TILE_ROWS;
    int64_t shares = std::max({int64_t(1), (m + NEAR_ROWS - 1) / NEAR_ROWS, std::min(tall, (4 * threads + wide - 1) / wide)});
    int64_t share = (tall + shares - 1) / shares * TILE_ROWS;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (m * n * k > WORTH_SHARING)
    for (int64_t i = 0; i < m; i += share)
        for (int64_t j = 0; j < n; j += PANEL) {
            int64_t rows = std::min(share, m - i);
            const float* from = base ? base + i * base_row + j : nullptr;
            if (j + PANEL <= n)
                whole_panel(out + i * out_row + j, x + i * x_row, panels + j * k, from, rows, k, out_row, x_row, base_row);
            else
                part_of_panel(out + i * out_row + j, x + i * x_row, panels + j * k, from, rows, n - j, k, out_row, x_row, base_row);
        }
}

// to[rows, k] = the dequantised numbers of a matrix
void unpack_codes(int half, void* to, const Codes* codes, int64_t k, int threads) {
    const Codes& m = *codes;
#pragma omp parallel for num_threads(threads) schedule(static) if (m.rows * k > WORTH_SHARING)
    for (int64_t row = 0; row < m.rows; row += WIDE) {
        float room[WIDE * WIDE];
        int64_t wide = half ? k / 2 : k, rows = std::min(WIDE, m.rows - row);
        for (int64_t p = 0; p < k; p += WIDE) {
            int64_t span = std::min(WIDE, k - p), depth = half ? span / 2 : span;  // k is a multiple of 32
            half ? unpacked<true, WIDE>(room, m, k, row, p, span) : unpacked<false, WIDE>(room, m, k, row, p, span);
            for (int64_t c = 0; c < rows; c += WIDTH)
                for (int64_t q = 0; q < depth; q += WIDTH) {
                    vec square[WIDTH];
                    for (int i = 0; i < WIDTH; i++) square[i] = *(const vec*)(room + (q + i) * WIDE + c);
                    turn(square);
                    for (int64_t i = 0; i < std::min<int64_t>(WIDTH, rows - c); i++) *(vec*)((float*)to + (row + c + i) * wide + (half ? p / 2 : p) + q) = square[i];
                }
        }
    }
}

// Computes the product of `multiply_packed` with a quantised matrix.
void multiply_codes(float* out, const float* x, const Codes* codes, const float* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    int64_t n = codes->rows, wide = (n + PANEL - 1) / PANEL, tall = (m + TILE_ROWS - 1) / TILE_ROWS;
    int64_t shares = std::max<int64_t>(1, std::min(tall, threads / std::max<int64_t>(1, wide))), share = (tall + shares - 1) / shares * TILE_ROWS;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (m * n * k > WORTH_SHARING)
    for (int64_t i = 0; i < m; i += share)
        for (int64_t j = 0; j < n; j += PANEL) {
            static thread_local std::vector<float> room;
            int64_t rows = std::min(share, m - i), count = std::min(PANEL, n - j);
            room.resize(std::max<int64_t>(room.size(), (DEPTH + rows) * PANEL));
            float *panel = room.data(), *sums = panel + DEPTH * PANEL;
            if (base)
                for (int64_t r = 0; r < rows; r++) std::copy_n(base + (i + r) * base_row + j, count, sums + r * PANEL);
            for (int64_t p = 0; p < k; p += DEPTH) {
                int64_t depth = std::min(DEPTH, k - p);
                unpacked<false, PANEL>(panel, *codes, k, j, p, depth);
                column_tiles<TILE_COLUMNS>(rows, depth, x + i * x_row + p, x_row, 1, panel, PANEL, sums, PANEL, base || p > 0);
            }
            for (int64_t r = 0; r < rows; r++) std::copy_n(sums + r * PANEL, count, out + (i + r) * out_row + j);
        }
}

// c[m, n] = a[m, k] b[k, n] + base, or with `add` c += a b. One of the two strides of a is 1, and one of those of b. The row strides of c and
// base are c_row and base_row; with a base_row of 0 all rows have the same base. A result does not depend on the number of threads, nor on
// the number of rows and columns.
void product(float* c, const float* a, const float* b, const float* base, int64_t m, int64_t n, int64_t k, int64_t c_row, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int64_t base_row, int add, int threads) {
    int64_t tall = (m + TILE_ROWS - 1) / TILE_ROWS, wide = (n + PANEL - 1) / PANEL;
    // Divide the rows over the threads, which gives more equal shares than the few panels. If there are few rows too, divide the panels.
    int64_t down = std::max<int64_t>(1, (m + BLOCK_ROWS - 1) / BLOCK_ROWS), across = 1;
    if (tall >= 8 * threads)
        down = (down + threads - 1) / threads * threads;
    else
        across = std::max<int64_t>(1, std::min<int64_t>(wide, threads));
    int64_t share = std::max<int64_t>(1, (tall + down - 1) / down) * TILE_ROWS, panels = std::max<int64_t>(1, (wide + across - 1) / across);
    bool tiles = a_col != 1;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (m * n * k > WORTH_SHARING)
    for (int64_t i = 0; i < m; i += share)
        for (int64_t from = 0; from < wide; from += panels) {
            static thread_local std::vector<float> room;
            int64_t rows = std::min(share, m - i);
            int64_t padded_rows = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
            room.resize(std::max<int64_t>(room.size(), DEPTH * (PANEL + padded_rows) + padded_rows * PANEL));
            float *panel = room.data(), *sums = panel + DEPTH * PANEL, *packed = sums + padded_rows * PANEL;
            for (int64_t p = 0; p < k || p == 0; p += DEPTH) {
                int64_t depth = std::min(DEPTH, k - p);
                if (tiles) tiles_of(packed, a + i + p * a_col, rows, depth, a_col);
                const float* left = tiles ? packed : a + i * a_row + p;
                for (int64_t j = from * PANEL; j < std::min(n, (from + panels) * PANEL); j += PANEL) {
                    int64_t count = std::min(PANEL, n - j);
                    if (b_col == 1)
                        panel_beside(panel, b + p * b_row + j, count, depth, b_row);
                    else
                        panel_of(panel, b + j * b_col + p, count, depth, b_col);
                    float *to = c + i * c_row + j, *at = count == PANEL ? to : sums;
                    int64_t at_row = count == PANEL ? c_row : PANEL;
                    bool more = add || base || p > 0;
                    const float* before = p == 0 && base ? base + i * base_row + j : to;
                    if (more && before != at)
                        for (int64_t r = 0; r < rows; r++) std::copy_n(before + r * (before == to ? c_row : base_row), count, at + r * at_row);
                    through(rows, depth, left, a_row, tiles, panel, at, at_row, more);
                    if (at != to)
                        for (int64_t r = 0; r < rows; r++) std::copy_n(sums + r * PANEL, count, to + r * c_row);
                }
            }
        }
}
}
