// Steps of AdamW on bfloat16 weights with float32 masters, with 8-bit moments or without masters, and the norm of their gradients.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

// The number of elements that a thread processes at a time. Their sums are added in order, so that the total does not depend on threads.
constexpr int64_t PIECE = 1 << 14;

double squares(const bfloat16* x, int64_t count) {
    double sum = 0;
    constexpr int64_t SHORT = 64 * WIDTH;  // so few that a float32 sum is exact enough
    for (int64_t start = 0; start < count; start += SHORT) {
        vec part = {};
        over(std::min(SHORT, count - start), [&](int64_t i, auto lanes) {
            vec v = take(x + start + i, lanes);
            part += v * v;
        });
        sum += total(part);
    }
    return sum;
}

// The number of neighbours whose moments share a scale.
constexpr int64_t BLOCK = 256;
static_assert(PIECE % BLOCK == 0);
// Magnitudes from 2^-24 to 1 are divided into cells with the same upper 16 bits. A cell contains at most one middle of two levels.
constexpr int32_t LOWEST = 103 << 7, CELLS = (24 << 7) + 1;

// An 8-bit code of numbers between -1 and 1: the levels, the middles between them followed by infinity, and for each cell the first level to
// which its numbers can be rounded. `places` has the cells of positive numbers, and then those of negative numbers.
struct Code {
    const float *levels, *middles;
    const uint8_t* places;
};

inline void decoded(float* to, const uint8_t* codes, float scale, const Code& code, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = code.levels[codes[i]] * scale;
}

// Rounds each number to the nearest level, and returns the scale.
inline float encoded(uint8_t* codes, const float* x, const Code& code, int64_t count) {
    float most = 0;
    for (int64_t i = 0; i < count; i++) most = std::max(most, std::fabs(x[i]));
    for (int64_t i = 0; i < count; i++) {
        float y = most > 0 ? x[i] / most : 0;
        uint32_t bits;
        memcpy(&bits, &y, 4);
        int32_t cell = std::clamp(int32_t(bits >> 16 & 0x7fff) - LOWEST, 0, CELLS - 1);
        uint8_t place = code.places[(bits >> 31) * CELLS + cell];
        codes[i] = place + (y > code.middles[place]);
    }
    return most;
}

// Returns 32 pseudorandom bits from a counter (Wellons 2018, lowbias32).
inline words mixed(words x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

inline words counted(uint32_t first) {
    words lane = {};
    for (int i = 0; i < WIDTH; i++) lane[i] = first + i;
    return lane;
}

// Rounds the magnitude of x up to a bfloat16 number if its lower 16 bits plus `draw` reach 2^16, and else down.
inline void round_up_from(bfloat16* to, int64_t count, vec x, words draw) {
    halves out = __builtin_convertvector(((words)x + draw) >> 16, halves);
    memcpy(to, &out, count * sizeof(bfloat16));
}

// The rounding of `dither` in low_memory.py: the draw of a number depends on its index alone.
inline void dithered(bfloat16* to, int64_t count, vec x, uint32_t index) {
    constexpr uint32_t RATIO = 0x9e3779b9;
    round_up_from(to, count, x, counted(0) * RATIO + index * RATIO >> 16);
}

}  // namespace

extern "C" {

// *out = the sum of the squares of all elements of some tensors, which have `counts` elements
void squared_norm(double* out, const bfloat16* const* tensors, const int64_t* counts, int64_t number, int threads) {
    double sum = 0;
    std::vector<double> parts;
    for (int64_t t = 0; t < number; t++) {
        parts.assign((counts[t] + PIECE - 1) / PIECE, 0);
#pragma omp parallel for num_threads(threads) schedule(static) if (counts[t] > WORTH_SHARING)
        for (int64_t i = 0; i < counts[t]; i += PIECE) parts[i / PIECE] = squares(tensors[t] + i, std::min(PIECE, counts[t] - i));
        for (double part : parts) sum += part;
    }
    *out = sum;
}

struct Weight {
    float* master;
    bfloat16* stored;
    const bfloat16* gradient;
    float *first, *second;
    int64_t count, index;
};
// The factors of a weight: 1 - learning rate · weight decay, learning rate / (1 - beta1^step), 1 / sqrt(1 - beta2^step).
struct Factors {
    float keep, rate, correction;
};

// Takes a step on each weight, with its gradient times `scale`. `new1` is 1 - beta1 and `new2` is 1 - beta2. They are arguments because
// float32 would round the differences.
void adamw_bf16(const Weight* weights, const Factors* factors, int64_t number, float new1, float beta2, float new2, float eps, float scale, int threads) {
    int64_t all = 0;
    for (int64_t t = 0; t < number; t++) all += weights[t].count;
#pragma omp parallel num_threads(threads) if (all > WORTH_SHARING)
    for (int64_t t = 0; t < number; t++) {
        Weight w = weights[t];
        Factors f = factors[t];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < w.count; start += PIECE)
            over(std::min(PIECE, w.count - start), [=](int64_t i, auto lanes) {
                i += start;
                vec g = take(w.gradient + i, lanes) * scale, m = take(w.first + i, lanes), v = take(w.second + i, lanes);
                m += (g - m) * new1;
                v = v * beta2 + g * g * new2;
                vec x = take(w.master + i, lanes) * f.keep - m * f.rate / (root(v) * f.correction + eps);
                give(w.first + i, lanes, m), give(w.second + i, lanes, v), give(w.master + i, lanes, x);
                dithered(w.stored + i, lanes, x, uint32_t(w.index + i));
            });
    }
}

// stored = master, rounded by `dithered`, where `index` is that of the first number
void round_bf16(bfloat16* stored, const float* master, int64_t count, int64_t index, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count > WORTH_SHARING)
    for (int64_t start = 0; start < count; start += PIECE)
        over(std::min(PIECE, count - start), [=](int64_t i, auto lanes) {
            i += start;
            dithered(stored + i, lanes, take(master + i, lanes), uint32_t(index + i));
        });
}

// A weight with less memory: float32 in `master`, bfloat16 in `stored`, or both. Without a master, `stored` is rounded at random. The
// gradient is bfloat16 if `half`, else float32. The moments are float32, or codes with the scales of their blocks.
struct Frugal {
    float* master;
    bfloat16* stored;
    const void* gradient;
    void *first, *second;
    float *first_scales, *second_scales;
    int64_t count, half, seed, index;
};

void adamw_frugal(const Frugal* weights, const Factors* factors, int64_t number, const Code* codes, float new1, float beta2, float new2, float eps, float scale, int threads) {
    int64_t all = 0;
    for (int64_t t = 0; t < number; t++) all += weights[t].count;
#pragma omp parallel num_threads(threads) if (all > WORTH_SHARING)
    for (int64_t t = 0; t < number; t++) {
        Frugal w = weights[t];
        Factors f = factors[t];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < w.count; start += BLOCK) {
            int64_t count = std::min(BLOCK, w.count - start), block = start / BLOCK;
            float room[2][BLOCK], *first = (float*)w.first + start, *second = (float*)w.second + start;
            if (w.first_scales) {
                first = room[0], second = room[1];
                decoded(first, (uint8_t*)w.first + start, w.first_scales[block], codes[0], count);
                decoded(second, (uint8_t*)w.second + start, w.second_scales[block], codes[1], count);
            }
            over(count, [&](int64_t i, auto lanes) {
                int64_t at = start + i;
                vec g = (w.half ? take((const bfloat16*)w.gradient + at, lanes) : take((const float*)w.gradient + at, lanes)) * scale;
                vec m = take(first + i, lanes), v = take(second + i, lanes);
                m += (g - m) * new1;
                v = v * beta2 + g * g * new2;
                vec x = w.master ? take(w.master + at, lanes) : take(w.stored + at, lanes);
                x = x * f.keep - m * f.rate / (root(v) * f.correction + eps);
                give(first + i, lanes, m), give(second + i, lanes, v);
                if (w.master) give(w.master + at, lanes, x);
                if (w.master && w.stored) dithered(w.stored + at, lanes, x, uint32_t(w.index + at));
                if (!w.master) round_up_from(w.stored + at, lanes, x, mixed(counted(uint32_t(at)) ^ uint32_t(w.seed)) & 0xffff);
            });
            if (w.first_scales) {
                w.first_scales[block] = encoded((uint8_t*)w.first + start, first, codes[0], count);
                w.second_scales[block] = encoded((uint8_t*)w.second + start, second, codes[1], count);
            }
        }
    }
}
}
