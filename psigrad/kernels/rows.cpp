// Row by row: RMS norm, rotary embedding with the norm of queries and keys, SwiGLU, each with its gradient; and the draw of a token.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace {

// 1 / sqrt(mean(x^2) + eps)
template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
    vec squares = {};
    over(n, [&](int64_t i, auto count) {
        vec a = take(x + i, count);
        squares += a * a;
    });
    return 1.0f / std::sqrt(total(squares) / n + eps);
}

template <class T>
void norm_rows(T* y, const T* x, const T* weight, int64_t rows, int64_t width, float eps, float offset, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const T* in = x + r * width;
        T* out = y + r * width;
        float scale = inverse_rms(in, width, eps);
        over(width, [&](int64_t i, auto count) { give(out + i, count, take(in + i, count) * scale * (take(weight + i, count) + offset)); });
    }
}

// put(i, count, gradient) for the input of a norm, piece by piece, from the gradient of its output; adds what the weight receives to dw.
template <class T, class U, class Put>
void norm_gradient(float* dw, const T* x, const T* weight, const U* dy, int64_t n, float eps, float offset, Put put) {
    vec squares = {}, dots = {};
    over(n, [&](int64_t i, auto count) {
        vec a = take(x + i, count);
        squares += a * a;
        dots += take(dy + i, count) * (take(weight + i, count) + offset) * a;
    });
    float scale = 1.0f / std::sqrt(total(squares) / n + eps), dot = total(dots) * scale * scale / n;
    over(n, [&](int64_t i, auto count) {
        vec a = take(x + i, count), d = take(dy + i, count);
        give(dw + i, count, take(dw + i, count) + d * a * scale);
        put(i, count, scale * (d * (take(weight + i, count) + offset) - a * dot));
    });
}

// Each thread's own sums to dw, in the order of the threads, so that they do not depend on who is first. In a parallel region.
void add_in_order(float* dw, const std::vector<float>& own) {
#pragma omp for ordered schedule(static, 1)
    for (int t = 0; t < omp_get_num_threads(); t++)
#pragma omp ordered
        for (size_t i = 0; i < own.size(); i++) dw[i] += own[i];
}

template <class T>
void norm_rows_gradient(T* dx, float* dw, const T* x, const T* weight, const T* dy, int64_t rows, int64_t width, float eps, float offset, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> own(width, 0.0f);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            T* out = dx + r * width;
            auto put = [&](int64_t i, auto count, vec gradient) { give(out + i, count, take(out + i, count) + gradient); };
            norm_gradient(own.data(), x + r * width, weight, dy + r * width, width, eps, offset, put);
        }
        add_in_order(dw, own);
    }
}

// out = x cos + (-x2, x1) sin for the halves x1, x2 of a head, which `read` gives.
template <class T, class Read>
void rotate(T* out, Read read, const float* cosine, const float* sine, int64_t half) {
    over(half, [&](int64_t i, auto count) {
        vec a = read(i, count), b = read(i + half, count);
        give(out + i, count, a * take(cosine + i, count) - b * take(sine + i, count));
        give(out + i + half, count, b * take(cosine + i + half, count) + a * take(sine + i + half, count));
    });
}

// From the gradient of what `rotate` gives to that of what it reads; `out` may be x.
template <class T, class U>
void rotate_back(T* out, const U* x, const float* cosine, const float* sine, int64_t half) {
    over(half, [&](int64_t i, auto count) {
        vec a = take(x + i, count), b = take(x + i + half, count);
        give(out + i, count, a * take(cosine + i, count) + b * take(sine + i + half, count));
        give(out + i + half, count, b * take(cosine + i + half, count) - a * take(sine + i, count));
    });
}

struct Heads {  // queries and keys of a row of [q | k | v], and the weights of their norms (null where there are none)
    int64_t queries, keys, dim, row;
    float eps;
};

template <class T>
void rotary_rows(T* out, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, int64_t rows, Heads s, int threads) {
    int64_t heads = s.queries + s.keys, half = s.dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * s.row > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const T *x = qkv + r * s.row + h * s.dim, *weight = h < s.queries ? query_norm : key_norm;
            T* to = out + (r * heads + h) * s.dim;
            const float *c = cosine + r * s.dim, *d = sine + r * s.dim;
            if (weight) {
                float scale = inverse_rms(x, s.dim, s.eps);
                rotate(to, [=](int64_t i, auto count) { return take(x + i, count) * scale * take(weight + i, count); }, c, d, half);
            } else {
                rotate(to, [=](int64_t i, auto count) { return take(x + i, count); }, c, d, half);
            }
        }
}

// d[q | k | v] in place: from the gradient of rotated queries and keys to that of the projections.
template <class T>
void rotary_rows_gradient(T* gradient, float* dw, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, int64_t rows, Heads s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> up(s.dim), own(2 * s.dim, 0.0f);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < s.queries + s.keys; h++) {
                T* at = gradient + r * s.row + h * s.dim;
                const T* weight = h < s.queries ? query_norm : key_norm;
                const float *c = cosine + r * s.dim, *d = sine + r * s.dim;
                if (weight) {
                    rotate_back(up.data(), at, c, d, s.dim / 2);
                    float* receives = own.data() + (h < s.queries ? 0 : s.dim);
                    norm_gradient(receives, qkv + r * s.row + h * s.dim, weight, up.data(), s.dim, s.eps, 0.0f, [=](int64_t i, auto count, vec x) { give(at + i, count, x); });
                } else {
                    rotate_back(at, at, c, d, s.dim / 2);
                }
            }
        add_in_order(dw, own);
    }
}

template <class T>
void gated_rows(T* out, const T* both, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width;
        T* to = out + r * width;
        over(width, [=](int64_t i, auto count) {
            vec g = take(gate + i, count);
            give(to + i, count, g / (1.0f + exponential(-g)) * take(up + i, count));
        });
    }
}

template <class T>
void gated_rows_gradient(T* gradient, T* out, const T* both, const T* dy, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width, *down = dy + r * width;
        T *to = out + r * width, *dgate = gradient + r * 2 * width, *dup = dgate + width;
        over(width, [=](int64_t i, auto count) {
            vec g = take(gate + i, count), u = take(up + i, count), d = take(down + i, count);
            vec sigmoid = 1.0f / (1.0f + exponential(-g)), silu = g * sigmoid;
            give(to + i, count, silu * u);
            give(dup + i, count, d * silu);
            give(dgate + i, count, d * u * (sigmoid + silu * (1.0f - sigmoid)));
        });
    }
}

// Numbers of a row that are summed together; only where a draw falls are they looked at one by one.
constexpr int64_t STRETCH = 1024;

// to[n] = exp(factor (x - top)), 0 from exp(-87) on downwards, and their sum. The difference first: that of two rounded products need not
// be 0 for the largest, and a large factor would make much of it.
template <class T>
double weigh(float* to, const T* x, int64_t n, float factor, float top) {
    over(n, [=](int64_t i, auto count) {
        vec z = (take(x + i, count) - top) * factor;
        give(to + i, count, z <= -87.0f ? vec{} : exponential(z));  // NaN stays NaN
    });
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += to[i];
    return sum;
}

// The largest of a stretch, and the sum of what `weigh` makes of it.
struct Sum {
    double sum;
    float top;
};
template <class T>
Sum sum_up(float* room, const T* x, int64_t n, float factor) {
    float top = get(x[0]);
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) top = get(x[i]) > top ? get(x[i]) : top;
    return {top == -INFINITY ? 0 : weigh(room, x, n, factor, top), top};
}

// The largest of a row of stretches; ends[n] become the sums up to there, by it. A row's log-probs come of these sums in this order
// alone, in sampling as in training.
float put_together(double* ends, const Sum* stretches, int64_t n, float factor) {
    float top = stretches[0].top;
    for (int64_t b = 0; b < n; b++) top = stretches[b].top > top ? stretches[b].top : top;
    double total = 0;
    for (int64_t b = 0; b < n; b++) {
        bool none = stretches[b].sum == 0;  // of a row of -inf the largest is no number to subtract
        ends[b] = total += none ? 0 : stretches[b].sum * std::exp(double((stretches[b].top - top) * factor));
    }
    return top;
}

float log_share(float x, float top, float factor, double total) { return float((x - top) * factor - std::log(total)); }

template <class T>
void draw_rows(int64_t* ids, float* logp, const T* logits, const double* u, int64_t rows, int64_t width, float factor, int threads) {
#pragma omp parallel num_threads(threads) if (rows * width > WORTH_SHARING)
    {
        std::vector<double> ends((width + STRETCH - 1) / STRETCH);
        std::vector<Sum> sums(ends.size());
        float weights[STRETCH];
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T* x = logits + r * width;
            for (size_t b = 0; b < ends.size(); b++) sums[b] = sum_up(weights, x + b * STRETCH, std::min<int64_t>(STRETCH, width - b * STRETCH), factor);
            float top = put_together(ends.data(), sums.data(), ends.size(), factor);
            // the first stretch that ends above the target; rounding may leave none, then the last that adds anything
            double total = ends.back(), target = u[r] * total;
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
            logp[r] = log_share(get(x[ids[r]]), top, factor, total);
        }
    }
}

template <class T>
void sum_stretches(Sum* sums, const T* logits, int64_t rows, int64_t width, int64_t row, int64_t apart, float factor, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        float room[STRETCH];
        for (int64_t i = 0; i < width; i += STRETCH) sums[r * apart + i / STRETCH] = sum_up(room, logits + r * row + i, std::min(STRETCH, width - i), factor);
    }
}

}  // namespace

extern "C" {

// Rows out of tables that stand in slabs of `slab` rows each: out[count, bytes] = those at the places `rows` of one table.
struct Gathering {
    char* out;
    const char* const* slabs;
    const int64_t* rows;
    int64_t count, bytes;
};
void gather(const Gathering* wanted, int64_t tables, int64_t slab, int threads) {
    int64_t all = 0;
    for (int64_t t = 0; t < tables; t++) all += wanted[t].count * wanted[t].bytes;
#pragma omp parallel num_threads(threads) if (all > 4 * WORTH_SHARING)
    for (int64_t t = 0; t < tables; t++) {
        Gathering g = wanted[t];
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < g.count; i++) std::memcpy(g.out + i * g.bytes, g.slabs[g.rows[i] / slab] + g.rows[i] % slab * g.bytes, g.bytes);
    }
}

// to[i] = from[i], bytes[i] each. New memory is cleared by the thread that first writes to it, so every table is shared.
void copies(char* const* to, const char* const* from, const int64_t* bytes, int64_t tables, int threads) {
    constexpr int64_t PIECE = 1 << 15;
    int64_t most = tables ? *std::max_element(bytes, bytes + tables) : 0;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (tables * most > 4 * WORTH_SHARING)
    for (int64_t start = 0; start < most; start += PIECE)
        for (int64_t i = 0; i < tables; i++)
            if (start < bytes[i]) std::memcpy(to[i] + start, from[i] + start, std::min(PIECE, bytes[i] - start));
}

// y[rows, width] = x / rms(x) * (weight + offset)
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, float offset, int threads) {
    BOTH(half, norm_rows((T*)y, (const T*)x, (const T*)weight, rows, width, eps, offset, threads))
}

// dx += the gradient of x; dw (float) += that of the weight
void rms_norm_gradient(int half, void* dx, float* dw, const void* x, const void* weight, const void* dy, int64_t rows, int64_t width, float eps, float offset, int threads) {
    BOTH(half, norm_rows_gradient((T*)dx, dw, (const T*)x, (const T*)weight, (const T*)dy, rows, width, eps, offset, threads))
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

// gradient[rows, gate | up], and out once more; they may be both and dy themselves
void swiglu_gradient(int half, void* gradient, void* out, const void* both, const void* dy, int64_t rows, int64_t width, int threads) {
    BOTH(half, gated_rows_gradient((T*)gradient, (T*)out, (const T*)both, (const T*)dy, rows, width, threads))
}

// A column of each row of logits[rows, width], drawn with probability softmax(factor logits): the first whose cumulative probability
// exceeds u; and the log of its probability.
void draw(int half, int64_t* ids, float* logp, const void* logits, const double* u, int64_t rows, int64_t width, float factor, int threads) {
    BOTH(half, draw_rows(ids, logp, (const T*)logits, u, rows, width, factor, threads));
}

// sums[rows] of every 1024 of logits[rows, width], which lie `row` apart; `apart` sums lie between two rows of sums, of 16 bytes each.
void sums_of_stretches(int half, void* sums, const void* logits, int64_t rows, int64_t width, int64_t row, int64_t apart, float factor, int threads) {
    BOTH(half, sum_stretches((Sum*)sums, (const T*)logits, rows, width, row, apart, factor, threads));
}

// logp[rows] <- of logits in logp, the log-probs as `draw` has them of rows that `stretches` sums are of.
void log_probs(float* logp, const void* sums, int64_t rows, int64_t stretches, float factor, int threads) {
    std::vector<double> ends(stretches);
    for (int64_t r = 0; r < rows; r++) {
        float top = put_together(ends.data(), (const Sum*)sums + r * stretches, stretches, factor);
        logp[r] = log_share(logp[r], top, factor, ends.back());
    }
}
}
