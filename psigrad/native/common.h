// Types, conversions and the small matrix product that all kernels share. Arithmetic is float32 whatever is stored.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Numbers of one register. A wider vector would work too, but compilers then keep it in memory.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
// Numbers that stand together in what is laid out for the kernels, and the registers that they take.
constexpr int64_t LANES = 16;
constexpr int PARTS = LANES / WIDTH;
// Numbers from which on it pays to wake other threads: they may be asleep, or another program's.
constexpr int64_t WORTH_SHARING = 1 << 13;

struct bfloat16 {
    uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void put(float& to, float x) { to = x; }
inline void put(bfloat16& to, float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = x != x ? 0x7fc0 : uint16_t(rounded);
}

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// exp to about 1e-7 of its value, vectorised by the compiler; NaN stays NaN.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

// The inner product of n floats, n a multiple of 16.
inline float inner(const float* a, const float* b, int64_t n) {
    vec part[2 * PARTS] = {};  // sixteen numbers and the next sixteen
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int j = 0; j < 2 * PARTS; j++) part[j] += *(const vec*)(a + i + j * WIDTH) * *(const vec*)(b + i + j * WIDTH);
    if (i < n)
        for (int j = 0; j < PARTS; j++) part[j] += *(const vec*)(a + i + j * WIDTH) * *(const vec*)(b + i + j * WIDTH);
    float lanes[LANES], sum = 0;
    for (int j = 0; j < PARTS; j++) *(vec*)(lanes + j * WIDTH) = part[j] + part[j + PARTS];
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

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

inline vec spread(float x) { return x - vec{}; }

// The largest tile of sums that the registers hold: 24 of 32 with AVX-512, 12 of 16 with AVX2, 8 of 16 with SSE.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 4;
#elif defined(__AVX__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 1;
#else
constexpr int TILE_ROWS = 2, TILE_COLUMNS = 1;
#endif

// Where it knows the strides GCC keeps a tile in registers; a function for any strides it gives a loop for each case of them, and its
// sums are stored in every round.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// C[M, 16 NR] (+)= A[M, K] B[K, 16 NR]: A by any strides, B and C by rows.
template <int MR, int NR>
ALWAYS_INLINE void tile(int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    constexpr int N = NR * PARTS;
    vec sum[MR][N];
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) sum[i][j] = add ? *(const vec*)(c + i * c_row + j * WIDTH) : vec{};
    for (int64_t p = 0; p < k; p++) {
        vec row[N];
        for (int j = 0; j < N; j++) row[j] = *(const vec*)(b + p * b_row + j * WIDTH);
        for (int i = 0; i < MR; i++) {
            vec x = spread(a[i * a_row + p * a_col]);
            for (int j = 0; j < N; j++) sum[i][j] = multiply_add(x, row[j], sum[i][j]);
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) *(vec*)(c + i * c_row + j * WIDTH) = sum[i][j];
}

// The last m < TILE_ROWS rows as one tile.
template <int NR, int MR = TILE_ROWS - 1>
ALWAYS_INLINE void last_tile(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    if (m == MR) return tile<MR, NR>(k, a, a_row, a_col, b, b_row, c, c_row, add);
    if constexpr (MR > 1) last_tile<NR, MR - 1>(m, k, a, a_row, a_col, b, b_row, c, c_row, add);
}

template <int NR>
ALWAYS_INLINE void column_tiles(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS) tile<TILE_ROWS, NR>(k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
    last_tile<NR>(m - i, k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
}

// C[M, N] (+)= A[M, K] B[K, N], N a multiple of 16.
inline void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    int64_t j = 0;
    if constexpr (TILE_COLUMNS >= 4)
        for (; j + 64 <= n; j += 64) column_tiles<4>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
    if constexpr (TILE_COLUMNS >= 2)
        for (; j + 32 <= n; j += 32) column_tiles<2>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
    for (; j < n; j += LANES) column_tiles<1>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
}

// Runs a call with T as the stored type.
#define BOTH(half, call)    \
    if (half) {             \
        using T = bfloat16; \
        call;               \
    } else {                \
        using T = float;    \
        call;               \
    }
