// A depthwise convolution along packed sequences, optionally followed by SiLU, and its gradient.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

constexpr int64_t BLOCK = 128;  // the number of channels that a thread processes at a time in the backward pass

// The arguments of a convolution. For a token, tap number `tap` reads the row windows[token * taps + tap] of x[rows, channels], or zeros if
// that is -1. `weight` is [taps, channels].
template <class T>
struct Convolution {
    const T* x;
    int64_t row;
    const float *weight, *bias;
    const int64_t* windows;
    int64_t tokens, taps, channels, silu;

    template <class Count>
    vec sum(int64_t token, int64_t c, Count count) const {
        vec made = bias ? take(bias + c, count) : vec{};
        for (int64_t k = 0; k < taps; k++)
            if (int64_t from = windows[token * taps + k]; from >= 0) made = multiply_add(take(weight + k * channels + c, count), take(x + from * row + c, count), made);
        return made;
    }
};

template <class T>
void forward(T* out, const Convolution<T>& how, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (how.tokens * how.channels > WORTH_SHARING)
    for (int64_t i = 0; i < how.tokens; i++)
        over(how.channels, [&](int64_t c, auto count) {
            vec made = how.sum(i, c, count);
            give(out + i * how.channels + c, count, how.silu ? made / (exponential(-made) + 1.0f) : made);
        });
}

template <class T>
void backward(T* dx, float* dweight, float* dbias, const T* dout, int64_t rows, const Convolution<T>& how, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> sums(rows * BLOCK);
#pragma omp for schedule(dynamic)
        for (int64_t begin = 0; begin < how.channels; begin += BLOCK) {
            int64_t width = std::min(BLOCK, how.channels - begin);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t i = 0; i < how.tokens; i++)
                over(width, [&](int64_t j, auto count) {
                    int64_t c = begin + j;
                    vec d = take(dout + i * how.channels + c, count);
                    if (how.silu) {
                        vec made = how.sum(i, c, count), share = 1.0f / (exponential(-made) + 1.0f);
                        d *= share * (made * (1.0f - share) + 1.0f);
                    }
                    if (dbias) give(dbias + c, count, take(dbias + c, count) + d);
                    for (int64_t k = 0; k < how.taps; k++) {
                        int64_t from = how.windows[i * how.taps + k];
                        if (from < 0) continue;
                        float *to = &sums[from * BLOCK + j], *of_weight = dweight + k * how.channels + c;
                        give(to, count, multiply_add(d, take(how.weight + k * how.channels + c, count), take(to, count)));
                        give(of_weight, count, multiply_add(d, take(how.x + from * how.row + c, count), take(of_weight, count)));
                    }
                });
            for (int64_t r = 0; r < rows; r++)
                over(width, [&](int64_t j, auto count) { give(dx + r * how.channels + begin + j, count, take(&sums[r * BLOCK + j], count)); });
        }
    }
}

}  // namespace

extern "C" {

void convolve(int half, void* out, const void* x, int64_t row, const float* weight, const float* bias, const int64_t* windows, int64_t tokens, int64_t taps, int64_t channels, int64_t silu, int threads) {
    BOTH(half, forward((T*)out, Convolution<T>{(const T*)x, row, weight, bias, windows, tokens, taps, channels, silu}, threads));
}

// Writes the gradient of x to dx[rows, channels], and adds the gradients of weight and bias to dweight and dbias.
void convolve_gradient(int half, void* dx, float* dweight, float* dbias, const void* dout, int64_t rows, const void* x, int64_t row, const float* weight, const float* bias, const int64_t* windows, int64_t tokens, int64_t taps, int64_t channels, int64_t silu, int threads) {
    BOTH(half, backward((T*)dx, dweight, dbias, (const T*)dout, rows, Convolution<T>{(const T*)x, row, weight, bias, windows, tokens, taps, channels, silu}, threads));
}
}
