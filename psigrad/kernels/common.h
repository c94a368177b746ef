// Types, conversions and the small matrix product that all kernels share. Numbers are stored as float32 or bfloat16, and
// computed in float32.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// The number of floats in one vector register. Compilers keep a wider vector in memory instead.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t halves __attribute__((vector_size(WIDTH * 2)));
// The size of the blocks in the kernels' memory layouts, and the number of registers that hold one block.
constexpr int64_t LANES = 16;
constexpr int PARTS = LANES / WIDTH;
// The number of elements from which a kernel uses several threads. For fewer, waking the threads takes longer than the work.
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

inline vec widen(const float* from) { return *(const vec*)from; }
inline vec widen(const bfloat16* from) {
    halves bits;
    memcpy(&bits, from, sizeof(bits));
    return (vec)(__builtin_convertvector(bits, words) << 16);
}
inline void narrow(float* to, vec x) { *(vec*)to = x; }
inline void narrow(bfloat16* to, vec x) {  // round to the nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    __m256bh out = _mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    halves out = __builtin_convertvector(x == x ? rounded : words{} + 0x7fc0, halves);
#endif
    memcpy(to, &out, sizeof(out));
}

// Returns a mask: -1 where low <= lane < high, else 0.
inline ints lanes(int64_t low, int64_t high) {
    static const int32_t COUNT[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints lane;
    memcpy(&lane, COUNT, sizeof(lane));
    return (lane >= int32_t(low)) & (lane < int32_t(high));
}

// `take` loads `count` numbers into a vector, with 0 in the other lanes; `give` stores them. Masked instructions are used where the
// processor has them, because a width that is no multiple of WIDTH (such as heads of 40) has an incomplete vector in every row.
template <class T>
inline vec take(const T* from, int64_t count) {
    if (count == WIDTH) return widen(from);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) return (vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#elif defined(__AVX__)
    if constexpr (std::is_same_v<T, float>) return (vec)_mm256_maskload_ps(from, (__m256i)lanes(0, count));
#endif
    T room[WIDTH] = {};
    memcpy(room, from, count * sizeof(T));
    return widen(room);
}
template <class T>
inline void give(T* to, int64_t count, vec x) {
    if (count == WIDTH) return narrow(to, x);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) return _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
#elif defined(__AVX__)
    if constexpr (std::is_same_v<T, float>) return _mm256_maskstore_ps(to, (__m256i)lanes(0, count), (__m256)x);
#endif
    T room[WIDTH];
    narrow(room, x);
    memcpy(to, room, count * sizeof(T));
}

// Calls piece(i, count) for each vector of a row of n numbers. `count` is the constant WIDTH, except in a shorter last piece.
template <class Piece>
inline void over(int64_t n, Piece piece) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) piece(i, std::integral_constant<int64_t, WIDTH>{});
    if (i < n) piece(i, n - i);
}

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

inline vec spread(float x) { return x - vec{}; }

inline vec root(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (vec)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < WIDTH; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

inline float total(vec x) {
    float lanes[WIDTH], sum = 0;
    memcpy(lanes, &x, sizeof(x));
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < WIDTH; i++) sum += lanes[i];
    return sum;
}

// Returns exp(x) with a relative error of about 1e-7; NaN stays NaN. It is written for vectors: in a scalar version GCC computes
// the values out of bounds for all numbers too, and the denormal 1 / (1 + exp(88)) takes many times as long as other numbers.
inline vec exponential(vec x) {
    x = x < -87.0f ? spread(-87.0f) : x;
    x = x > 88.0f ? spread(88.0f) : x;
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

// Returns the inner product of a and b, n numbers each. n is a multiple of 16.
template <class T>
inline float inner(const float* a, const T* b, int64_t n) {
    vec part[2 * PARTS] = {};  // sixteen numbers and the next sixteen
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int j = 0; j < 2 * PARTS; j++) part[j] += *(const vec*)(a + i + j * WIDTH) * widen(b + i + j * WIDTH);
    if (i < n)
        for (int j = 0; j < PARTS; j++) part[j] += *(const vec*)(a + i + j * WIDTH) * widen(b + i + j * WIDTH);
    vec sum = part[0] + part[PARTS];
    for (int j = 1; j < PARTS; j++) sum += part[j] + part[j + PARTS];
    return total(sum);
}

// Returns a b + c, rounded once if the processor can. It is explicit because compilers fuse the two operations in tiles of two rows
// but not in tiles of one row, so that results would differ.
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

// The size of a tile of sums, as large as the registers allow: 24 of 32 with AVX-512, 12 of 16 with AVX2, 8 of 16 with SSE.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 4;
#elif defined(__AVX__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 1;
#else
constexpr int TILE_ROWS = 2, TILE_COLUMNS = 1;
#endif

// A packed matrix is stored in panels of PANEL interleaved rows, as wide as a tile of sums.
constexpr int64_t PANEL = LANES * TILE_COLUMNS;
// The most rows that a thread processes at a time in a product of any matrices. They are half a MiB, and fit into a cache with a panel.
constexpr int64_t BLOCK_ROWS = 512;

// GCC keeps a tile in registers if it knows the strides. Without inlining it compiles a loop for every case of strides, in which the sums
// are stored in every iteration.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// C[M, 16 NR] (+)= A[M, K] B[K, 16 NR]. A has any strides; the rows of B and C are contiguous.
template <int MR, int NR, class B>
ALWAYS_INLINE void tile(int64_t k, const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    constexpr int N = NR * PARTS;
    vec sum[MR][N];
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) sum[i][j] = add ? *(const vec*)(c + i * c_row + j * WIDTH) : vec{};
    for (int64_t p = 0; p < k; p++) {
        vec row[N];
        for (int j = 0; j < N; j++) row[j] = widen(b + p * b_row + j * WIDTH);
        for (int i = 0; i < MR; i++) {
            vec x = spread(a[i * a_row + p * a_col]);
            for (int j = 0; j < N; j++) sum[i][j] = multiply_add(x, row[j], sum[i][j]);
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < N; j++) *(vec*)(c + i * c_row + j * WIDTH) = sum[i][j];
}

// Computes the last m < TILE_ROWS rows as one tile.
template <int NR, int MR = TILE_ROWS - 1, class B>
ALWAYS_INLINE void last_tile(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    if (m == MR) return tile<MR, NR>(k, a, a_row, a_col, b, b_row, c, c_row, add);
    if constexpr (MR > 1) last_tile<NR, MR - 1>(m, k, a, a_row, a_col, b, b_row, c, c_row, add);
}

template <int NR, class B>
ALWAYS_INLINE void column_tiles(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS) tile<TILE_ROWS, NR>(k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
    last_tile<NR>(m - i, k, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, add);
}

// C[M, N] (+)= A[M, K] B[K, N]. N is a multiple of 16.
template <class B>
inline void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    int64_t j = 0;
    if constexpr (TILE_COLUMNS >= 4)
        for (; j + 64 <= n; j += 64) column_tiles<4>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
    if constexpr (TILE_COLUMNS >= 2)
        for (; j + 32 <= n; j += 32) column_tiles<2>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
    for (; j < n; j += LANES) column_tiles<1>(m, k, a, a_row, a_col, b + j, b_row, c + j, c_row, add);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has __builtin_shufflevector only from version 12 on
#define PICK(a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})
#endif

template <int HALF, int... LANE>
inline void swap_halves(vec& a, vec& b, std::integer_sequence<int, LANE...>) {
    vec first = PICK(a, b, (LANE & HALF ? WIDTH + LANE - HALF : LANE)...);
    b = PICK(a, b, (LANE & HALF ? WIDTH + LANE : LANE + HALF)...);
    a = first;
}

// Transposes a square of WIDTH vectors in place.
template <int HALF = WIDTH / 2>
inline void turn(vec* a) {
    for (int i = 0; i < WIDTH; i++)
        if (!(i & HALF)) swap_halves<HALF>(a[i], a[i + HALF], std::make_integer_sequence<int, WIDTH>{});
    if constexpr (HALF > 1) turn<HALF / 2>(a);
}

// Runs `call` with T as the type of the stored numbers: bfloat16 if `half`, else float.
#define BOTH(half, call)    \
    if (half) {             \
        using T = bfloat16; \
        call;               \
    } else {                \
        using T = float;    \
        call;               \
    }
