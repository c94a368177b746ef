// Decoding steps of recurrent layers: one token of each sequence, by the gated delta rule or Mamba-2. States are updated in place. All
// numbers are float32.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

float inverse_norm(const float* x, int64_t n) {
    vec squares = {};
    over(n, [&](int64_t i, auto count) {
        vec a = take(x + i, count);
        squares += a * a;
    });
    return 1.0f / std::sqrt(total(squares) + 1e-6f);
}

}  // namespace

extern "C" {

// Computes for each row and head: S *= exp(g); S += k (beta (v - k^T S))^T; out = q^T S. The kernel normalises queries and keys
// [rows, key_heads, width], and divides queries by sqrt(width). S is state[slots, heads, width, values] at the row's slot: slots[row], or `row`
// without `slots`. g is [rows, heads], or with `channels` [rows, heads, width].
void delta_step(float* out, float* state, const float* q, const float* k, const float* v, const float* g, const float* beta, const int64_t* slots, int64_t rows, int64_t heads, int64_t key_heads, int64_t width, int64_t values, int64_t channels, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> key(width), query(width), keep(width), change(padded(values));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * heads; i++) {
            int64_t row = i / heads, from = (row * key_heads + i % heads / (heads / key_heads)) * width;
            const float *q_in = q + from, *k_in = k + from, *v_in = v + i * values;
            float scale_q = inverse_norm(q_in, width) / std::sqrt((float)width), scale_k = inverse_norm(k_in, width);
            float *S = state + ((slots ? slots[row] : row) * heads + i % heads) * width * values, *o = out + i * values, *d = change.data();
            for (int64_t c = 0; c < width; c++) {
                query[c] = q_in[c] * scale_q, key[c] = k_in[c] * scale_k;
                keep[c] = channels || !c ? std::exp(g[channels ? i * width + c : i]) : keep[0];
            }
            std::fill(change.begin(), change.end(), 0.0f);
            for (int64_t c = 0; c < width; c++) {
                vec weight = spread(key[c] * keep[c]);
                over(values, [&](int64_t j, auto count) { give(d + j, count, multiply_add(weight, take(S + c * values + j, count), take(d + j, count))); });
            }
            over(values, [&](int64_t j, auto count) { give(d + j, count, (take(v_in + j, count) - take(d + j, count)) * beta[i]); });
            std::fill(o, o + values, 0.0f);
            for (int64_t c = 0; c < width; c++) {
                vec kept = spread(keep[c]), weight = spread(key[c]), asked = spread(query[c]);
                over(values, [&](int64_t j, auto count) {
                    vec now = multiply_add(weight, take(d + j, count), take(S + c * values + j, count) * kept);
                    give(S + c * values + j, count, now);
                    give(o + j, count, multiply_add(asked, now, take(o + j, count)));
                });
            }
        }
    }
}

// Computes for each row and head: S *= exp(dt A); S += dt x B^T; out = S C. S is state[slots, heads, width, states], at the row's slot as
// above. x is [rows, heads, width], dt is [rows, heads], and B and C are [rows, groups, states].
void mamba2_step(float* out, float* state, const float* x, const float* dt, const float* A, const float* B, const float* C, const int64_t* slots, int64_t rows, int64_t heads, int64_t groups, int64_t width, int64_t states, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < rows * heads; i++) {
        int64_t head = i % heads, row = i / heads, state_of = (slots ? slots[row] : row) * heads + head, from = (row * groups + head / (heads / groups)) * states;
        vec keep = spread(std::exp(dt[i] * A[head]));
        for (int64_t p = 0; p < width; p++) {
            float* S = state + (state_of * width + p) * states;
            vec more = spread(dt[i] * x[i * width + p]), sum = {};
            over(states, [&](int64_t j, auto count) {
                vec now = multiply_add(more, take(B + from + j, count), take(S + j, count) * keep);
                give(S + j, count, now);
                sum += now * take(C + from + j, count);
            });
            out[i * width + p] = total(sum);
        }
    }
}
}
