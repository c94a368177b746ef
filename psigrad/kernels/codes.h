// Matrices in codes of 4 or 8 bits, and their numbers as the products read them.
#pragma once
#include <algorithm>

#include "common.h"

// Rows of a matrix whose codes stand side by side.
constexpr int64_t WIDE = 64;
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));

// A matrix of `rows` rows, in panels of WIDE: number x = level * scale + offset. Neighbours in a row stand together, two of 4 bits in a byte,
// the first below, or two of 8 in two bytes. Each `block` of a row has a scale, and an offset where there are any; 8 bits are levels
// themselves.
struct Codes {
    const uint8_t* codes;
    const float *scales, *offsets, *levels;
    int64_t rows, block, bits;
};

// Sixteen levels, in a register where it holds them all.
struct Levels {
    const float* table;
#if defined(__AVX512F__)
    __m512 all;
    explicit Levels(const float* table) : table(table), all(_mm512_loadu_ps(table)) {}
    vec operator[](words codes) const { return (vec)_mm512_permutexvar_ps((__m512i)codes, all); }
#elif defined(__AVX2__)
    explicit Levels(const float* table) : table(table) {}
    vec operator[](words codes) const { return (vec)_mm256_i32gather_ps(table, (__m256i)codes, 4); }
#else
    explicit Levels(const float* table) : table(table) {}
    vec operator[](words codes) const {
        vec out;
        for (int i = 0; i < WIDTH; i++) out[i] = table[codes[i]];
        return out;
    }
#endif
};

// The levels of neighbours in WIDTH rows.
template <int BITS>
inline void both_levels(vec& first, vec& second, const uint8_t* codes, const Levels& levels) {
    if constexpr (BITS == 4) {
        bytes given;
        memcpy(&given, codes, sizeof(given));
        words wide = __builtin_convertvector(given, words);
        first = levels[wide & 15], second = levels[wide >> 4];
    } else {
        halves given;
        memcpy(&given, codes, sizeof(given));
        words wide = __builtin_convertvector(given, words);
        first = __builtin_convertvector((ints)(wide << 24) >> 24, vec), second = __builtin_convertvector((ints)(wide << 16) >> 24, vec);
    }
}

// Both rounded to bfloat16, side by side in a word.
inline words paired(vec first, vec second) {
#if defined(__AVX512BF16__)
    static const uint16_t TURNS[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (words)_mm512_permutexvar_epi16(_mm512_loadu_si512(TURNS), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    bfloat16 room[2][WIDTH];
    narrow(room[0], first), narrow(room[1], second);
    halves low, high;
    memcpy(&low, room[0], sizeof(low)), memcpy(&high, room[1], sizeof(high));
    return __builtin_convertvector(low, words) | __builtin_convertvector(high, words) << 16;
#endif
}

// Columns from .. from + depth of COUNT rows from `row` on: as floats [depth, COUNT], or as pairs of bfloat16 [depth / 2, COUNT]. `from`
// begins a block, and the rows are of one panel.
template <bool HALF, int64_t COUNT, int BITS>
inline void unpacked(void* to, const Codes& m, int64_t k, int64_t row, int64_t from, int64_t depth) {
    constexpr int64_t N = COUNT / WIDTH;
    int64_t panel = row / WIDE, inner = row % WIDE;
    Levels levels(m.levels);
    for (int64_t start = from; start < from + depth; start += m.block) {
        int64_t end = std::min(start + m.block, from + depth), place = (panel * (k / m.block) + start / m.block) * WIDE + inner;
        vec scale[N], offset[N];
        for (int64_t j = 0; j < N; j++) scale[j] = widen(m.scales + place + j * WIDTH), offset[j] = m.offsets ? widen(m.offsets + place + j * WIDTH) : vec{};
        const uint8_t* codes = m.codes + ((panel * (k / 2) + start / 2) * WIDE + inner) * (BITS / 4);
        for (int64_t p = start - from; p < end - from; p += 2, codes += WIDE * (BITS / 4))
            for (int64_t j = 0; j < N; j++) {
                vec first, second;
                both_levels<BITS>(first, second, codes + j * WIDTH * (BITS / 4), levels);
                first = multiply_add(first, scale[j], offset[j]), second = multiply_add(second, scale[j], offset[j]);
                if constexpr (HALF) {
                    words both = paired(first, second);
                    memcpy((uint32_t*)to + p / 2 * COUNT + j * WIDTH, &both, sizeof(both));
                } else {
                    narrow((float*)to + p * COUNT + j * WIDTH, first), narrow((float*)to + (p + 1) * COUNT + j * WIDTH, second);
                }
            }
    }
}
template <bool HALF, int64_t COUNT>
inline void unpacked(void* to, const Codes& m, int64_t k, int64_t row, int64_t from, int64_t depth) {
    m.bits == 4 ? unpacked<HALF, COUNT, 4>(to, m, k, row, from, depth) : unpacked<HALF, COUNT, 8>(to, m, k, row, from, depth);
}
