// The product of a few rows with a matrix, which is read once, as fast as memory delivers it: one step of decoding.
#include <omp.h>

#include <utility>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "common.h"

namespace {

// ROWS of x meet COLUMNS rows of the matrix in registers: a tile of sums, each a vector of WIDTH.
constexpr int COLUMNS = 4;
constexpr int ROWS = WIDTH == 8 ? 2 : 4;  // AVX2 has sixteen registers
static_assert(ROWS * COLUMNS % WIDTH == 0, "fold() makes one vector of WIDTH");

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has clang's from version 12 on
typedef int32_t order __attribute__((vector_size(WIDTH * 4)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, order{__VA_ARGS__})
#endif

// a b + c, rounded once where the processor can. Left to itself a compiler does so in tiles of two rows and not in those of one.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

template <int HALF, int... LANE>
inline vec fold_pair(vec a, vec b, std::integer_sequence<int, LANE...>) {
    return PICK(a, b, (LANE & HALF ? WIDTH + LANE - HALF : LANE)...) + PICK(a, b, (LANE & HALF ? WIDTH + LANE : LANE + HALF)...);
}

// Element i of a[0] becomes the sum of the lanes of a[i]: 15 additions of vectors for 16 sums, where one by one takes 64.
template <int HALF = WIDTH / 2>
inline void fold(vec* a) {
    for (int i = 0; i < HALF; i++) a[i] = fold_pair<HALF>(a[i], a[i + HALF], std::make_integer_sequence<int, WIDTH>{});
    if constexpr (HALF > 1) fold<HALF / 2>(a);
}

// The first n of a vector, 0 after them.
inline vec load_part(const float* from, int64_t n) {
    vec part = {};
    memcpy(&part, from, n * sizeof(float));
    return part;
}

// out[MR, NR] = x[MR, k] w[NR, k]^T + base. What is `ahead` of w will be wanted next: the processor foresees no jump to another row.
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
            for (int j = 0; j < NR; j++) sum[i * COLUMNS + j] = multiply_add(load_part(x + i * x_row + whole, k - whole), load_part(w + j * k + whole, k - whole), sum[i * COLUMNS + j]);
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

}  // namespace

extern "C" {

// out[m, n] = x[m, k] weight[n, k]^T + base: rows of out, x and base lie out_row, x_row and base_row apart; a base_row of 0 gives all
// rows the same, no base adds nothing. A row's numbers do not depend on how many others there are.
void few_rows(float* out, const float* x, const float* weight, const float* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads) {
    int64_t whole = n / COLUMNS * COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static) if (n * k > WORTH_SHARING)
    for (int64_t j = 0; j < whole; j += COLUMNS)
        column_of_dots<COLUMNS>(m, k, x, x_row, weight + j * k, COLUMNS * k, base ? base + j : nullptr, base_row, out + j, out_row);
    for (int64_t j = whole; j < n; j++)
        column_of_dots<1>(m, k, x, x_row, weight + j * k, 0, base ? base + j : nullptr, base_row, out + j, out_row);
}
}
