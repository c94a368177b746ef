// Row by row: RMS norm, rotary embedding with the norm of queries and keys, SwiGLU, each with its gradient; and the draw of a token.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace {

float inverse_rms(const float* x, int64_t n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / n + eps);
}

template <class T>
void load(float* to, const T* from, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = get(from[i]);
}

template <class T>
void norm_rows(T* y, const T* x, const T* weight, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel num_threads(threads) if (rows * width > WORTH_SHARING)
    {
        std::vector<float> in(width), w(width);
        load(w.data(), weight, width);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            load(in.data(), x + r * width, width);
            float scale = inverse_rms(in.data(), width, eps);
            T* out = y + r * width;
            const float *a = in.data(), *b = w.data();
#pragma omp simd
            for (int64_t i = 0; i < width; i++) put(out[i], a[i] * scale * b[i]);
        }
    }
}

// The gradient of norm with respect to its input, [n], from that of its output; adds what the weight receives to dw.
void norm_gradient(float* dx, float* dw, const float* x, const float* w, const float* dy, int64_t n, float eps) {
    float scale = inverse_rms(x, n, eps), dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; i++) dot += dy[i] * w[i] * x[i];
    dot *= scale * scale / n;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        dw[i] += dy[i] * x[i] * scale;
        dx[i] = scale * (dy[i] * w[i] - x[i] * dot);
    }
}

template <class T>
void norm_rows_gradient(T* dx, float* dw, const T* x, const T* weight, const T* dy, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> in(width), w(width), up(width), down(width), own(width, 0.0f);
        load(w.data(), weight, width);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            load(in.data(), x + r * width, width);
            load(up.data(), dy + r * width, width);
            norm_gradient(down.data(), own.data(), in.data(), w.data(), up.data(), width, eps);
            T* out = dx + r * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) put(out[i], get(out[i]) + down[i]);
        }
        // in the order of the threads, so that the sum does not depend on who is first
#pragma omp for ordered schedule(static, 1)
        for (int t = 0; t < omp_get_num_threads(); t++)
#pragma omp ordered
            for (int64_t i = 0; i < width; i++) dw[i] += own[i];
    }
}

// out = x cos + (-x2, x1) sin for the halves x1, x2 of a head.
void rotate(float* out, const float* x, const float* cosine, const float* sine, int64_t dim) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
        out[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
    }
}

void rotate_back(float* out, const float* x, const float* cosine, const float* sine, int64_t dim) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cosine[i] + x[i + half] * sine[i + half];
        out[i + half] = x[i + half] * cosine[i + half] - x[i] * sine[i];
    }
}

struct Heads {  // queries and keys of a row of [q | k | v], and the weights of their norms (null where there are none)
    int64_t queries, keys, dim, row;
    float eps;
};

template <class T>
void rotary_rows(T* out, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, int64_t rows, Heads s, int threads) {
    int64_t heads = s.queries + s.keys;
#pragma omp parallel num_threads(threads) if (rows * s.row > WORTH_SHARING)
    {
        std::vector<float> x(s.dim), y(s.dim), w(2 * s.dim);
        if (query_norm) load(w.data(), query_norm, s.dim), load(w.data() + s.dim, key_norm, s.dim);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < heads; h++) {
                load(x.data(), qkv + r * s.row + h * s.dim, s.dim);
                if (query_norm) {
                    const float* weight = w.data() + (h < s.queries ? 0 : s.dim);
                    float scale = inverse_rms(x.data(), s.dim, s.eps);
                    for (int64_t i = 0; i < s.dim; i++) x[i] *= scale * weight[i];
                }
                rotate(y.data(), x.data(), cosine + r * s.dim, sine + r * s.dim, s.dim);
                T* to = out + (r * heads + h) * s.dim;
                for (int64_t i = 0; i < s.dim; i++) put(to[i], y[i]);
            }
    }
}

// d[q | k | v] in place: from the gradient of rotated queries and keys to that of the projections.
template <class T>
void rotary_rows_gradient(T* gradient, float* dw, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, int64_t rows, Heads s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> x(s.dim), up(s.dim), y(s.dim), w(2 * s.dim), own(2 * s.dim, 0.0f);
        if (query_norm) load(w.data(), query_norm, s.dim), load(w.data() + s.dim, key_norm, s.dim);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < s.queries + s.keys; h++) {
                T* at = gradient + r * s.row + h * s.dim;
                load(up.data(), at, s.dim);
                rotate_back(y.data(), up.data(), cosine + r * s.dim, sine + r * s.dim, s.dim);
                if (query_norm) {
                    int64_t which = h < s.queries ? 0 : s.dim;
                    load(x.data(), qkv + r * s.row + h * s.dim, s.dim);
                    up.swap(y);
                    norm_gradient(y.data(), own.data() + which, x.data(), w.data() + which, up.data(), s.dim, s.eps);
                }
                for (int64_t i = 0; i < s.dim; i++) put(at[i], y[i]);
            }
#pragma omp for ordered schedule(static, 1)
        for (int t = 0; t < omp_get_num_threads(); t++)
#pragma omp ordered
            for (int64_t i = 0; i < 2 * s.dim; i++) dw[i] += own[i];
    }
}

template <class T>
void gated_rows(T* out, const T* both, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width;
        T* to = out + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = get(gate[i]);
            put(to[i], g / (1.0f + exponential(-g)) * get(up[i]));
        }
    }
}

template <class T>
void gated_rows_gradient(T* gradient, T* out, const T* both, const T* dy, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width, *down = dy + r * width;
        T *to = out + r * width, *dgate = gradient + r * 2 * width, *dup = dgate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = get(gate[i]), u = get(up[i]), d = get(down[i]);
            float sigmoid = 1.0f / (1.0f + exponential(-g)), silu = g * sigmoid;
            put(to[i], silu * u);
            put(dup[i], d * silu);
            put(dgate[i], d * u * (sigmoid + silu * (1.0f - sigmoid)));
        }
    }
}

// Numbers that are summed together in a draw; only where the draw falls are they looked at one by one.
constexpr int64_t STRETCH = 1024;

// to[n] = exp(factor (x - top)), 0 from exp(-87) on downwards, and their sum. The difference first: that of two rounded products need not
// be 0 for the largest, and a large factor would make much of it.
template <class T>
double weigh(float* to, const T* x, int64_t n, float factor, float top) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float z = (get(x[i]) - top) * factor;
        to[i] = exponential(z) * float(z > -87.0f);  // NaN stays NaN
    }
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += to[i];
    return sum;
}

template <class T>
void draw_rows(int64_t* ids, float* logp, const T* logits, const double* u, int64_t rows, int64_t width, float factor, int threads) {
#pragma omp parallel num_threads(threads) if (rows * width > WORTH_SHARING)
    {
        std::vector<double> ends((width + STRETCH - 1) / STRETCH);
        float weights[STRETCH];
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T* x = logits + r * width;
            float top = get(x[0]);
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < width; i++) top = get(x[i]) > top ? get(x[i]) : top;
            double total = 0;
            for (size_t b = 0; b < ends.size(); b++) {
                int64_t start = b * STRETCH;
                ends[b] = total += weigh(weights, x + start, std::min(STRETCH, width - start), factor, top);
            }
            // the first stretch that ends above the target; rounding may leave none, then the last that adds anything
            double target = u[r] * total;
            size_t b = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
            if (b == ends.size()) b = std::lower_bound(ends.begin(), ends.end(), total) - ends.begin();
            if (b == ends.size()) b = 0;  // NaN: the log-prob will say so
            int64_t start = b * STRETCH, n = std::min(STRETCH, width - start), found = 0;
            double sum = b ? ends[b - 1] : 0;
            weigh(weights, x + start, n, factor, top);
            for (int64_t i = 0; i < n && !(sum > target); i++) {
                if (weights[i] > 0) found = i;
                sum += weights[i];
            }
            ids[r] = start + found;
            logp[r] = float((get(x[ids[r]]) - top) * factor - std::log(total));
        }
    }
}

}  // namespace

extern "C" {

// out[i] = row rows[i] of a table of `bytes` a row that lies in slabs of `slab` rows.
void gather(char* out, const char* const* slabs, const int64_t* rows, int64_t count, int64_t slab, int64_t bytes, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * bytes > 4 * WORTH_SHARING)
    for (int64_t i = 0; i < count; i++) std::memcpy(out + i * bytes, slabs[rows[i] / slab] + rows[i] % slab * bytes, bytes);
}

// y[rows, width] = x / rms(x) * weight
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, int threads) {
    BOTH(half, norm_rows((T*)y, (const T*)x, (const T*)weight, rows, width, eps, threads))
}

// dx += the gradient of x; dw (float) += that of the weight
void rms_norm_gradient(int half, void* dx, float* dw, const void* x, const void* weight, const void* dy, int64_t rows, int64_t width, float eps, int threads) {
    BOTH(half, norm_rows_gradient((T*)dx, dw, (const T*)x, (const T*)weight, (const T*)dy, rows, width, eps, threads))
}

// out[rows, queries + keys, dim]: normalised and rotated queries and keys of qkv[rows, row]
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, float eps, int threads) {
    Heads s{queries, keys, dim, row, eps};
    BOTH(half, rotary_rows((T*)out, (const T*)qkv, (const T*)query_norm, (const T*)key_norm, cosine, sine, rows, s, threads))
}

// gradient[rows, row] in place; dw (float) [2, dim] += what the norms' weights receive
void rotary_gradient(int half, void* gradient, float* dw, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, float eps, int threads) {
    Heads s{queries, keys, dim, row, eps};
    BOTH(half, rotary_rows_gradient((T*)gradient, dw, (const T*)qkv, (const T*)query_norm, (const T*)key_norm, cosine, sine, rows, s, threads))
}

// out[rows, width] = silu(gate) up, of both[rows, gate | up]
void swiglu(int half, void* out, const void* both, int64_t rows, int64_t width, int threads) {
    BOTH(half, gated_rows((T*)out, (const T*)both, rows, width, threads))
}

// gradient[rows, gate | up], and out once more
void swiglu_gradient(int half, void* gradient, void* out, const void* both, const void* dy, int64_t rows, int64_t width, int threads) {
    BOTH(half, gated_rows_gradient((T*)gradient, (T*)out, (const T*)both, (const T*)dy, rows, width, threads))
}

// A column of each row of logits[rows, width], drawn with probability softmax(factor logits): the first whose cumulative probability
// exceeds u; and the log of its probability.
void draw(int half, int64_t* ids, float* logp, const void* logits, const double* u, int64_t rows, int64_t width, float factor, int threads) {
    BOTH(half, draw_rows(ids, logp, (const T*)logits, u, rows, width, factor, threads));
}
}
