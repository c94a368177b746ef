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

inline vec look_up(const float* levels, words codes) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(levels));
#elif defined(__AVX2__)
    return (vec)_mm256_i32gather_ps(levels, (__m256i)codes, 4);
#else
    vec out;
    for (int i = 0; i < WIDTH; i++) out[i] = levels[codes[i]];
    return out;
#endif
}

// The levels of neighbours in WIDTH rows.
template <int BITS>
inline void both_levels(vec& first, vec& second, const uint8_t* codes, const float* levels) {
    if constexpr (BITS == 4) {
        bytes given;
        memcpy(&given, codes, sizeof(given));
        words wide = __builtin_convertvector(given, words);
        first = look_up(levels, wide & 15), second = look_up(levels, wide >> 4);
    } else {
        halves given;
        memcpy(&given, codes, sizeof(given));
        words wide = __builtin_convertvector(given, words);
        first = __builtin_convertvector((ints)(wide << 24) >> 24, vec), second = __builtin_convertvector((ints)(wide << 16) >> 24, vec);
    }
}

inline words bits_of(vec x) {
    bfloat16 room[WIDTH];
    narrow(room, x);
    halves out;
    memcpy(&out, room, sizeof(out));
    return __builtin_convertvector(out, words);
}

// Columns from .. from + depth of `count` rows from `row` on: as floats [depth, count], or as pairs of bfloat16 [depth / 2, count]. `from`
// begins a block, and the rows are of one panel.
template <bool HALF, int BITS>
inline void unpacked(void* to, const Codes& m, int64_t k, int64_t row, int64_t count, int64_t from, int64_t depth) {
    int64_t panel = row / WIDE, inner = row % WIDE;
    for (int64_t start = from; start < from + depth; start += m.block) {
        int64_t end = std::min(start + m.block, from + depth), place = (panel * (k / m.block) + start / m.block) * WIDE + inner;
        for (int64_t c = 0; c < count; c += WIDTH) {
            vec scale = widen(m.scales + place + c), offset = m.offsets ? widen(m.offsets + place + c) : vec{};
            for (int64_t p = start; p < end; p += 2) {
                vec first, second;
                both_levels<BITS>(first, second, m.codes + ((panel * (k / 2) + p / 2) * WIDE + inner + c) * (BITS / 4), m.levels);
                first = multiply_add(first, scale, offset), second = multiply_add(second, scale, offset);
                if constexpr (HALF) {
                    words both = bits_of(first) | bits_of(second) << 16;
                    memcpy((uint32_t*)to + (p - from) / 2 * count + c, &both, sizeof(both));
                } else {
                    narrow((float*)to + (p - from) * count + c, first), narrow((float*)to + (p - from + 1) * count + c, second);
                }
            }
        }
    }
}
template <bool HALF>
inline void unpacked(void* to, const Codes& m, int64_t k, int64_t row, int64_t count, int64_t from, int64_t depth) {
    m.bits == 4 ? unpacked<HALF, 4>(to, m, k, row, count, from, depth) : unpacked<HALF, 8>(to, m, k, row, count, from, depth);
}
