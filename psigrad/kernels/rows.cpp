// Kernels that process each row separately: RMS norm, rotary embedding with the norm of queries and keys, gated activation, their gradients,
// and the sampling of a token.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace {

// Returns 1 / sqrt(mean(x^2) + eps) of n numbers.
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

// Computes the gradients of a norm from that of its output, dy. Calls put(i, count, gradient) for each piece of the gradient of x, and adds
// the gradient of the weight to dw.
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

// Adds each thread's sums `own` to dw. The threads add in the order of their numbers, so that the result does not depend on which thread is
// faster. Must be called in a parallel region.
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

// Computes out = x cos + (-x2, x1) sin for a head x with the halves x1 and x2. `read` returns the numbers of x.
template <class T, class Read>
void rotate(T* out, Read read, const float* cosine, const float* sine, int64_t half) {
    over(half, [&](int64_t i, auto count) {
        vec a = read(i, count), b = read(i + half, count);
        give(out + i, count, a * take(cosine + i, count) - b * take(sine + i, count));
        give(out + i + half, count, b * take(cosine + i + half, count) + a * take(sine + i + half, count));
    });
}

// Computes the gradient of the input of `rotate`, `out`, from that of its output, x. They may be the same memory.
template <class T, class U>
void rotate_back(T* out, const U* x, const float* cosine, const float* sine, int64_t half) {
    over(half, [&](int64_t i, auto count) {
        vec a = take(x + i, count), b = take(x + i + half, count);
        give(out + i, count, a * take(cosine + i, count) + b * take(sine + i + half, count));
        give(out + i + half, count, b * take(cosine + i + half, count) - a * take(sine + i, count));
    });
}

// The numbers of query heads and key heads in a row [q | k | v], the widths of a head, of a row and of the part of a head that is rotated. A
// norm is over one head, or if `wide` over all query heads or all key heads.
struct Heads {
    int64_t queries, keys, dim, row, turned, wide;
    float eps, offset;
};

template <class T>
void rotary_rows(T* out, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, const float* factors, int64_t rows, Heads s, int threads) {
    int64_t heads = s.queries + s.keys;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * s.row > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        float scale = 0;
        for (int64_t h = 0; h < heads; h++) {
            bool query = h < s.queries;
            int64_t place = query ? h : h - s.queries;
            const T *x = qkv + r * s.row + h * s.dim, *weight = query ? query_norm : key_norm;
            T* to = out + (r * heads + h) * s.dim;
            const float *c = cosine + r * s.turned, *d = sine + r * s.turned;
            float factor = query && factors ? factors[r] : 1.0f;
            auto turn = [=](auto read) {
                rotate(to, read, c, d, s.turned / 2);
                over(s.dim - s.turned, [=](int64_t i, auto count) { give(to + s.turned + i, count, read(s.turned + i, count)); });
            };
            if (weight) {
                if (!s.wide || !place) scale = inverse_rms(x, s.wide ? (query ? s.queries : s.keys) * s.dim : s.dim, s.eps);
                if (s.wide) weight += place * s.dim;
                turn([=](int64_t i, auto count) { return take(x + i, count) * scale * (take(weight + i, count) + s.offset) * factor; });
            } else {
                turn([=](int64_t i, auto count) { return take(x + i, count) * factor; });
            }
        }
    }
}

// Turns the gradient of rotated queries and keys into that of the projections [q | k | v], in place. Norm weights may be null.
template <class T>
void rotary_rows_gradient(T* gradient, float* dw, const T* qkv, const T* query_norm, const T* key_norm, const float* cosine, const float* sine, const float* factors, int64_t rows, Heads s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t heads = s.queries + s.keys, first = s.wide ? s.queries * s.dim : s.dim;
        std::vector<float> up(heads * s.dim), own(s.wide ? heads * s.dim : 2 * s.dim, 0.0f);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const float *c = cosine + r * s.turned, *d = sine + r * s.turned;
            for (int64_t h = 0; h < heads; h++) {
                T* at = gradient + r * s.row + h * s.dim;
                float *to = up.data() + h * s.dim, factor = h < s.queries && factors ? factors[r] : 1.0f;
                over(s.dim, [=](int64_t i, auto count) { give(to + i, count, take(at + i, count) * factor); });
                rotate_back(to, to, c, d, s.turned / 2);
            }
            for (int64_t h = 0, n; h < heads; h += n) {  // n heads have one norm
                bool query = h < s.queries;
                n = s.wide ? (query ? s.queries : s.keys) : 1;
                T* at = gradient + r * s.row + h * s.dim;
                const T* weight = query ? query_norm : key_norm;
                auto put = [=](int64_t i, auto count, vec x) { give(at + i, count, x); };
                const float* from = up.data() + h * s.dim;
                if (weight)
                    norm_gradient(own.data() + (query ? 0 : first), qkv + r * s.row + h * s.dim, weight, from, n * s.dim, s.eps, s.offset, put);
                else
                    over(n * s.dim, [=](int64_t i, auto count) { put(i, count, take(from + i, count)); });
            }
        }
        add_in_order(dw, own);
    }
}

// A gate g is multiplied by sigmoid(z): z = g in SiLU, and z = 2 sqrt(2 / pi) (g + 0.044715 g^3) in GELU's form with tanh.
template <bool GELU>
vec exponent(vec g) {
    return GELU ? g * (1.5957691216f + 0.0713548163f * g * g) : g;
}

template <bool GELU, class T>
void gated_rows(T* out, const T* both, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width;
        T* to = out + r * width;
        over(width, [=](int64_t i, auto count) {
            vec g = take(gate + i, count);
            give(to + i, count, g / (1.0f + exponential(-exponent<GELU>(g))) * take(up + i, count));
        });
    }
}

template <bool GELU, class T>
void gated_rows_gradient(T* gradient, T* out, const T* both, const T* dy, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = both + r * 2 * width, *up = gate + width, *down = dy + r * width;
        T *to = out + r * width, *dgate = gradient + r * 2 * width, *dup = dgate + width;
        over(width, [=](int64_t i, auto count) {
            vec g = take(gate + i, count), u = take(up + i, count), d = take(down + i, count);
            vec sigmoid = 1.0f / (1.0f + exponential(-exponent<GELU>(g))), active = g * sigmoid, bend = active * (1.0f - sigmoid);
            if (GELU) bend *= 1.5957691216f + 0.2140644488f * g * g;
            give(to + i, count, active * u);
            give(dup + i, count, d * active);
            give(dgate + i, count, d * u * (sigmoid + bend));
        });
    }
}

template <class T>
void sum_rows(T* out, const T* base, const T* x, int64_t rows, int64_t width, float factor, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const T *in = x + r * width, *other = base + r * width;
        T* to = out + r * width;
        over(width, [=](int64_t i, auto count) { give(to + i, count, take(other + i, count) + factor * take(in + i, count)); });
    }
}

// The number of neighbours in a row whose exponentials are summed together. Only the stretch with the sampled token is searched one by one.
constexpr int64_t STRETCH = 1024;

// Computes to[n] = exp(factor (x - top)), with 0 for results up to exp(-87), and returns their sum. `top` is subtracted before the
// multiplication: the difference of two rounded products may not be 0 for the largest number, and a large factor would magnify it.
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

// The largest number of a stretch, and the sum of the exponentials that `weigh` computes with it.
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

// Returns the largest number in a row of n stretches, and sets ends[n] to the cumulative sums of the exponentials relative to it. Sampling
// and training compute log-probs from these sums in the same order, so that both get the same bits.
float put_together(double* ends, const Sum* stretches, int64_t n, float factor) {
    float top = stretches[0].top;
    for (int64_t b = 0; b < n; b++) top = stretches[b].top > top ? stretches[b].top : top;
    double total = 0;
    for (int64_t b = 0; b < n; b++) {
        bool none = stretches[b].sum == 0;  // if all logits are -inf, so is the largest, which cannot be subtracted
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
            // Find the first stretch whose cumulative sum exceeds the target. If rounding leaves none, take the last one that is not 0.
            double total = ends.back(), target = u[r] * total;
            size_t b = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
            if (b == ends.size()) b = std::lower_bound(ends.begin(), ends.end(), total) - ends.begin();
            if (b == ends.size()) b = 0;  // a logit is NaN, and so will be the log-prob
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

// Gathers rows of tables, which are stored in slabs of `slab` rows. For each table, out[count, bytes] receives the rows with the indices
// `rows`.
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

// Copies bytes[i] bytes from from[i] to to[i]. All threads share each table, because the kernel clears new memory in the thread that first
// writes to it.
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

// dx += the gradient of x; dw (float) += the gradient of the weight
void rms_norm_gradient(int half, void* dx, float* dw, const void* x, const void* weight, const void* dy, int64_t rows, int64_t width, float eps, float offset, int threads) {
    BOTH(half, norm_rows_gradient((T*)dx, dw, (const T*)x, (const T*)weight, (const T*)dy, rows, width, eps, offset, threads))
}

// out[rows, queries + keys, dim] = the queries and keys in qkv[rows, row], normalised and then rotated; queries also times factors[rows]
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, const float* factors, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, int64_t turned, int64_t wide, float eps, float offset, int threads) {
    Heads s{queries, keys, dim, row, turned, wide, eps, offset};
    BOTH(half, rotary_rows((T*)out, (const T*)qkv, (const T*)query_norm, (const T*)key_norm, cosine, sine, factors, rows, s, threads))
}

// Turns gradient[rows, row] of the rotated queries and keys into that of qkv, in place; dw (float) += the gradients of the norms' weights.
void rotary_gradient(int half, void* gradient, float* dw, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, const float* factors, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, int64_t turned, int64_t wide, float eps, float offset, int threads) {
    Heads s{queries, keys, dim, row, turned, wide, eps, offset};
    BOTH(half, rotary_rows_gradient((T*)gradient, dw, (const T*)qkv, (const T*)query_norm, (const T*)key_norm, cosine, sine, factors, rows, s, threads))
}

// out[rows, width] = act(gate) up, for both[rows, gate | up]. `act` is SiLU, or GELU's form with tanh.
void gated(int half, int gelu, void* out, const void* both, int64_t rows, int64_t width, int threads) {
    if (gelu) BOTH(half, gated_rows<true>((T*)out, (const T*)both, rows, width, threads))
    else BOTH(half, gated_rows<false>((T*)out, (const T*)both, rows, width, threads))
}

// Computes gradient[rows, gate | up], and `out` of `gated` again. These may be the memory of `both` and of dy.
void gated_gradient(int half, int gelu, void* gradient, void* out, const void* both, const void* dy, int64_t rows, int64_t width, int threads) {
    if (gelu) BOTH(half, gated_rows_gradient<true>((T*)gradient, (T*)out, (const T*)both, (const T*)dy, rows, width, threads))
    else BOTH(half, gated_rows_gradient<false>((T*)gradient, (T*)out, (const T*)both, (const T*)dy, rows, width, threads))
}

// out[rows, width] = base + factor x. `out` may be the memory of x.
void add_rows(int half, void* out, const void* base, const void* x, int64_t rows, int64_t width, float factor, int threads) {
    BOTH(half, sum_rows((T*)out, (const T*)base, (const T*)x, rows, width, factor, threads))
}

// Samples a column of each row of logits[rows, width] by the probabilities softmax(factor logits): the first column whose cumulative
// probability exceeds u. `logp` receives the log of its probability.
void draw(int half, int64_t* ids, float* logp, const void* logits, const double* u, int64_t rows, int64_t width, float factor, int threads) {
    BOTH(half, draw_rows(ids, logp, (const T*)logits, u, rows, width, factor, threads));
}

// Computes the sums over every 1024 neighbours of logits[rows, width], whose row stride is `row`. The row stride of `sums` is `apart`, in
// units of one sum of 16 bytes.
void sums_of_stretches(int half, void* sums, const void* logits, int64_t rows, int64_t width, int64_t row, int64_t apart, float factor, int threads) {
    BOTH(half, sum_stretches((Sum*)sums, (const T*)logits, rows, width, row, apart, factor, threads));
}

// Replaces the logits in logp[rows] by their log-probs, with the same bits as `draw`. `sums` has `stretches` sums of each row.
void log_probs(float* logp, const void* sums, int64_t rows, int64_t stretches, float factor, int threads) {
    std::vector<double> ends(stretches);
    for (int64_t r = 0; r < rows; r++) {
        float top = put_together(ends.data(), (const Sum*)sums + r * stretches, stretches, factor);
        logp[r] = log_share(logp[r], top, factor, ends.back());
    }
}
}
