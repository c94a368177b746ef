// One decoding step through all layers in one call. If Python calls the kernels of a small model one by one, a fifth of the time is spent
// waiting for Python.
#include <algorithm>
#include <vector>

#include "codes.h"

extern "C" {
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, float offset, int threads);
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, float eps, int threads);
void swiglu(int half, void* out, const void* both, int64_t rows, int64_t width, int threads);
void decode(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, void* keys, void* values, const int64_t* slots, const int64_t* places, int64_t capacity, const void* prompt_keys, const void* prompt_values, const int64_t* prompt_lengths, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads);
void multiply_packed(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_packed_bf16(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_codes(void* out, const void* x, const Codes* codes, const void* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_codes_bf16(void* out, const void* x, const Codes* codes, const void* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
}

namespace {

// The four groups of matrices of a layer: [q | k | v], attention's output, [gate | up], down.
enum { QKV, OUT, BOTH, DOWN, PRODUCTS };

// The weights of one layer: the norms, the norms of queries and keys (or null), the packed matrices, the bias of [q | k | v] (or null), the
// quantised matrices in place of packed ones (or null), the packed LoRA matrices A and s B of each group with their rank (0 without LoRA), and
// the window.
struct Weights {
    const void *norm, *feed_norm, *query_norm, *key_norm;
    const void *panels[PRODUCTS], *bias;
    const Codes* codes[PRODUCTS];
    const void *down[PRODUCTS], *up[PRODUCTS];
    int64_t rank[PRODUCTS], window;
};

// The addresses of the results of a layer.
struct Made {
    char *y, *qkv, *mixed;
    float* normaliser;
    char *middle, *both;
};

struct Shape {
    int64_t width, inner, rank, heads, kv_heads, dim;
    float eps, head_eps, scale;
};

// The key-value cache: `own` has for each layer the keys and values [2, slots_there, kv_heads, capacity, dim] of the slots, and `prompts`
// [layers, 2, groups] the addresses of those of the prompts.
struct Caches {
    char* const* own;
    int64_t slots_there, capacity;
    const int64_t *slots, *places;
    const void* const* prompts;
    const int64_t *prompt_lengths, *first;
    int64_t groups;
};

// Computes the rows from .. to through all layers. `room` is temporary memory for all `rows` rows.
void pass(int half, const Weights* weights, const Made* made, int64_t layers, const char* x, char* room, const float* cosine, const float* sine, const Caches& c, int64_t from, int64_t to, int64_t rows, const Shape& s, int threads) {
    int64_t queries = s.heads * s.dim, turning = (s.heads + s.kv_heads) * s.dim, row = turning + s.kv_heads * s.dim, size = half ? 2 : 4, count = to - from;
    int64_t table = c.slots_there * s.kv_heads * c.capacity * s.dim * size;
    // the first group of these rows, and the row at which each of their groups begins, counted from `from`
    int64_t group = std::upper_bound(c.first, c.first + c.groups + 1, from) - c.first - 1;
    std::vector<int64_t> first;
    for (int64_t g = group; g < c.groups && c.first[g] < to; g++) first.push_back(std::max(c.first[g], from) - from);
    int64_t groups = first.size();
    first.push_back(count);
    auto at = [=](char* table, int64_t wide) { return table + from * wide * size; };
    char *normed = at(room, s.width), *rotated = at(room + rows * s.width * size, turning), *gated = at(room + rows * (s.width + turning) * size, s.inner);
    char* low = at(room + rows * (s.width + turning + s.inner) * size, s.rank);
    auto multiply = half ? multiply_packed_bf16 : multiply_packed;
    auto multiply_coded = half ? multiply_codes_bf16 : multiply_codes;
    auto product = [=](const Weights& w, int which, void* out, const void* x, const void* base, int64_t n, int64_t k, int64_t base_row) {
        const Codes* codes = w.codes[which];
        if (!codes) multiply(out, x, w.panels[which], base, count, n, k, n, k, base_row, threads);
        for (int64_t j = 0; codes && j < n; j += codes->rows, codes++)
            multiply_coded((char*)out + j * size, x, codes, base ? (const char*)base + j * size : nullptr, count, k, n, k, base_row, threads);
        int64_t rank = w.rank[which];
        if (!rank) return;
        multiply(low, x, w.down[which], nullptr, count, rank, k, rank, k, 0, threads);
        multiply(out, low, w.up[which], out, count, n, rank, n, rank, n, threads);
    };
    x += from * s.width * size, cosine += from * s.dim, sine += from * s.dim;
    const void* const* prompts = c.prompts + group;
    for (int64_t i = 0; i < layers; i++, prompts += 2 * c.groups) {
        const Weights& w = weights[i];
        char *y = at(made[i].y, s.width), *qkv = at(made[i].qkv, row), *mixed = at(made[i].mixed, queries), *middle = at(made[i].middle, s.width), *both = at(made[i].both, 2 * s.inner);
        rms_norm(half, normed, x, w.norm, count, s.width, s.eps, 0.0f, threads);
        product(w, QKV, qkv, normed, w.bias, row, s.width, 0);
        rotary(half, rotated, qkv, w.query_norm, w.key_norm, cosine, sine, count, s.heads, s.kv_heads, s.dim, row, s.head_eps, threads);
        decode(half, mixed, made[i].normaliser + from * s.heads, rotated, rotated + queries * size, qkv + turning * size, turning, turning, row, c.own[i], c.own[i] + table, c.slots + from, c.places + from, c.capacity, prompts, prompts + c.groups, c.prompt_lengths + group, first.data(), groups, s.heads, s.kv_heads, s.dim, w.window, s.scale, threads);
        product(w, OUT, middle, mixed, x, s.width, queries, s.width);
        rms_norm(half, normed, middle, w.feed_norm, count, s.width, s.eps, 0.0f, threads);
        product(w, BOTH, both, normed, nullptr, 2 * s.inner, s.width, 0);
        swiglu(half, gated, both, count, s.inner, threads);
        product(w, DOWN, y, gated, middle, s.width, s.inner, s.width);
        x = y;
    }
}

// The number of rows per thread from which each thread computes its rows through all layers by itself. No thread then waits for another or
// reads another's results. With fewer rows, reading the matrices takes most of the time, so each thread reads a part of every matrix.
constexpr int64_t ALONE = 48;

}  // namespace

extern "C" {

// Computes x[rows, width] through all layers. Each layer reads the result y of the previous one. `room` has width + (heads + kv_heads) dim +
// inner + rank numbers per row, where `rank` is the largest of any group of matrices. A row's results do not depend on other rows.
void decode_layers(int half, const void* weights, const void* made, int64_t layers, const char* x, char* room, const float* cosine, const float* sine, char* const* own, int64_t slots_there, int64_t capacity, const int64_t* slots, const int64_t* places, const void* const* prompts, const int64_t* prompt_lengths, const int64_t* first, int64_t groups, int64_t rows, int64_t width, int64_t inner, int64_t rank, int64_t heads, int64_t kv_heads, int64_t dim, float eps, float head_eps, float scale, int threads) {
    Caches c{own, slots_there, capacity, slots, places, prompts, prompt_lengths, first, groups};
    Shape s{width, inner, rank, heads, kv_heads, dim, eps, head_eps, scale};
    auto go = [&](int64_t from, int64_t to, int threads) { pass(half, (const Weights*)weights, (const Made*)made, layers, x, room, cosine, sine, c, from, to, rows, s, threads); };
    if (threads == 1 || rows < ALONE * threads) return go(0, rows, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) go(rows * t / threads, rows * (t + 1) / threads, 1);
}
}
