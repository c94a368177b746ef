// AdamW's step of bfloat16 weights through their float32 masters, with moments of 8 bits or without masters, and the norm of their
// gradients.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

// Numbers of a tensor that a thread takes at a time. Sums over them are added up in their order, whoever made them.
constexpr int64_t PIECE = 1 << 14;

double squares(const bfloat16* x, int64_t count) {
    double sum = 0;
    constexpr int64_t SHORT = 64 * WIDTH;  // so few that float32 adds them up well
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

// Neighbours whose moments share a scale.
constexpr int64_t BLOCK = 256;
static_assert(PIECE % BLOCK == 0);
// Magnitudes from 2^-24 to 1 in cells of their upper 16 bits: no cell has more than one middle of two levels.
constexpr int32_t LOWEST = 103 << 7, CELLS = (24 << 7) + 1;

// Numbers between -1 and 1 in 8 bits: the levels, the middles between neighbours with infinity behind them, and the first level that a
// number of each cell may have, of positive ones and then of negative ones.
struct Code {
    const float *levels, *middles;
    const uint8_t* places;
};

inline void decoded(float* to, const uint8_t* codes, float scale, const Code& code, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = code.levels[codes[i]] * scale;
}

// Each to the nearest level; returns the scale.
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

// Thirty-two bits from a counter (Wellons 2018, lowbias32).
inline words mixed(words x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// To one of the two neighbours, to either as often as the mean demands.
inline void rounded_by_chance(bfloat16* to, int64_t count, vec x, uint32_t index, uint32_t seed) {
    words lane = {};
    for (int i = 0; i < WIDTH; i++) lane[i] = index + i;
    halves out = __builtin_convertvector(((words)x + (mixed(lane ^ seed) & 0xffff)) >> 16, halves);
    memcpy(to, &out, count * sizeof(bfloat16));
}

}  // namespace

extern "C" {

// The sum of the squares of tensors of `counts` numbers.
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
    int64_t count;
};
// Of a weight: 1 - learning rate · weight decay, learning rate / (1 - beta1^step), 1 / sqrt(1 - beta2^step).
struct Factors {
    float keep, rate, correction;
};

// One step of each weight, along its gradient times `scale`; `new1` is 1 - beta1, `new2` 1 - beta2, whose difference from 1 float32 would
// round.
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
                give(w.first + i, lanes, m), give(w.second + i, lanes, v), give(w.master + i, lanes, x), give(w.stored + i, lanes, x);
            });
    }
}

// A weight stepped in little memory: float32 in `master`, bfloat16 in `stored`, or both; without a master `stored` is rounded by chance.
// The gradient is float32, or bfloat16 where `half`; moments are float32, or codes with the scales of their blocks.
struct Frugal {
    float* master;
    bfloat16* stored;
    const void* gradient;
    void *first, *second;
    float *first_scales, *second_scales;
    int64_t count, half, seed;
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
                if (w.master && w.stored) give(w.stored + at, lanes, x);
                if (!w.master) rounded_by_chance(w.stored + at, lanes, x, uint32_t(at), uint32_t(w.seed));
            });
            if (w.first_scales) {
                w.first_scales[block] = encoded((uint8_t*)w.first + start, first, codes[0], count);
                w.second_scales[block] = encoded((uint8_t*)w.second + start, second, codes[1], count);
            }
        }
    }
}
}
