// Matrices that are quantised to codes of 4 or 8 bits, and their dequantisation for the matrix products.
#pragma once
#include <algorithm>

#include "common.h"

// The number of rows whose codes are interleaved in memory (a panel).
constexpr int64_t WIDE = 64;
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));

// A quantised matrix of `rows` rows, in panels of WIDE rows. A number is level * scale + offset. Two neighbours of a row are stored
// together: 4-bit codes in one byte, the first in the lower half, and 8-bit codes in two bytes. Each `block` numbers of a row have a scale,
// and an offset unless `offsets` is null. The level of a 4-bit code is in `levels`; that of an 8-bit code is the code itself.
struct Codes {
    const uint8_t* codes;
    const float *scales, *offsets, *levels;
    int64_t rows, block, bits;
};

// A table of sixteen levels, in a register if one register holds all of them.
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

// Reads the levels of two neighbours, `first` and `second`, in each of WIDTH rows.
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

// Returns both numbers rounded to bfloat16, in the lower and the upper half of a word.
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

// Dequantises the columns from .. from + depth of COUNT rows, the first of which is `row`. Writes floats [depth, COUNT], or if HALF
// pairs of bfloat16 [depth / 2, COUNT]. `from` must be the start of a block, and the rows must be in one panel.
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
