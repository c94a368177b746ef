// AdamW's step of bfloat16 weights through their float32 masters, and the norm of their gradients.
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
}
