// One decoding step through all layers in one call. If Python calls the kernels of a small model one by one, a fifth of the time is spent
// waiting for Python.
#include <algorithm>
#include <vector>

#include "codes.h"

extern "C" {
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, float offset, int threads);
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, const float* factors, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, int64_t turned, int64_t wide, float eps, float offset, int threads);
void gated(int half, int gelu, void* out, const void* both, int64_t rows, int64_t width, int threads);
void add_rows(int half, void* out, const void* base, const void* x, int64_t rows, int64_t width, float factor, int threads);
void decode(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, void* keys, void* values, const int64_t* slots, const int64_t* places, int64_t capacity, const void* prompt_keys, const void* prompt_values, const int64_t* prompt_lengths, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads);
void multiply_packed(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_packed_bf16(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_codes(void* out, const void* x, const Codes* codes, const void* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void multiply_codes_bf16(void* out, const void* x, const Codes* codes, const void* base, int64_t m, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
}

namespace {

// The four groups of matrices of a layer: [q | k | v], attention's output, [gate | up], down.
enum { QKV, OUT, BOTH, DOWN, PRODUCTS };

// The weights of one layer: the norms of the inputs and of the outputs of attention and of the feed-forward layer and those of queries and
// keys (null if absent), the packed matrices, the bias of [q | k | v] (or null), the quantised matrices in place of packed ones (or null), the
// packed LoRA matrices A and s B of each group with their rank (0 without LoRA), and the window.
struct Weights {
    const void *norm, *feed_norm, *after, *feed_after, *query_norm, *key_norm;
    const void *panels[PRODUCTS], *bias;
    const Codes* codes[PRODUCTS];
    const void *down[PRODUCTS], *up[PRODUCTS];
    int64_t rank[PRODUCTS], window;
};

// The addresses of the results of a layer. The outputs of attention and of the feed-forward layer are there only if norms follow them.
enum { Y, QKV_ROWS, MIXED, NORMALISER, MIDDLE, GATE_UP, ATTENDED, FED };

// `residual` multiplies the outputs of attention and of the feed-forward layer.
struct Shape {
    int64_t width, inner, rank, heads, kv_heads, dim, turned, wide, gelu, results;
    float eps, head_eps, scale, offset, residual;
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
void pass(int half, const Weights* weights, char* const* made, int64_t layers, const char* x, char* room, const float* const* angles, const float* factors, const Caches& c, int64_t from, int64_t to, int64_t rows, const Shape& s, int threads) {
    int64_t queries = s.heads * s.dim, turning = (s.heads + s.kv_heads) * s.dim, row = turning + s.kv_heads * s.dim, size = half ? 2 : 4, count = to - from;
    int64_t table = c.slots_there * s.kv_heads * c.capacity * s.dim * size;
    // the first group of these rows, and the row at which each of their groups begins, counted from `from`
    int64_t group = std::upper_bound(c.first, c.first + c.groups + 1, from) - c.first - 1;
    std::vector<int64_t> first;
    for (int64_t g = group; g < c.groups && c.first[g] < to; g++) first.push_back(std::max(c.first[g], from) - from);
    int64_t groups = first.size();
    first.push_back(count);
    auto at = [=](char* table, int64_t wide) { return table + from * wide * size; };
    char *normed = at(room, s.width), *rotated = at(room + rows * s.width * size, turning), *active = at(room + rows * (s.width + turning) * size, s.inner);
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
    x += from * s.width * size, factors += factors ? from : 0;
    const void* const* prompts = c.prompts + group;
    auto norm = [=](void* out, const char* x, const void* weight) {
        if (weight) rms_norm(half, out, x, weight, count, s.width, s.eps, s.offset, threads);
        return weight ? (const char*)out : x;
    };
    // Computes out = base + the product, which is first normalised, with its own memory `plain`, or multiplied by the factor of residuals.
    auto join = [=](const Weights& w, int which, char* out, const char* x, const char* base, int64_t k, const void* after, char* plain) {
        if (!after && s.residual == 1.0f) return product(w, which, out, x, base, s.width, k, s.width);
        product(w, which, after ? plain : out, x, nullptr, s.width, k, 0);
        add_rows(half, out, base, norm(out, after ? plain : out, after), count, s.width, s.residual, threads);
    };
    for (int64_t i = 0; i < layers; i++, prompts += 2 * c.groups, made += s.results) {
        const Weights& w = weights[i];
        char *y = at(made[Y], s.width), *qkv = at(made[QKV_ROWS], row), *mixed = at(made[MIXED], queries), *middle = at(made[MIDDLE], s.width), *both = at(made[GATE_UP], 2 * s.inner);
        product(w, QKV, qkv, norm(normed, x, w.norm), w.bias, row, s.width, 0);
        rotary(half, rotated, qkv, w.query_norm, w.key_norm, angles[2 * i] + from * s.turned, angles[2 * i + 1] + from * s.turned, factors, count, s.heads, s.kv_heads, s.dim, row, s.turned, s.wide, s.head_eps, s.offset, threads);
        decode(half, mixed, (float*)made[NORMALISER] + from * s.heads, rotated, rotated + queries * size, qkv + turning * size, turning, turning, row, c.own[i], c.own[i] + table, c.slots + from, c.places + from, c.capacity, prompts, prompts + c.groups, c.prompt_lengths + group, first.data(), groups, s.heads, s.kv_heads, s.dim, w.window, s.scale, threads);
        join(w, OUT, middle, mixed, x, queries, w.after, w.after ? at(made[ATTENDED], s.width) : nullptr);
        product(w, BOTH, both, norm(normed, middle, w.feed_norm), nullptr, 2 * s.inner, s.width, 0);
        gated(half, s.gelu, active, both, count, s.inner, threads);
        join(w, DOWN, y, active, middle, s.inner, w.feed_after, w.feed_after ? at(made[FED], s.width) : nullptr);
        x = y;
    }
}

// The number of rows per thread from which each thread computes its rows through all layers by itself. No thread then waits for another or
// reads another's results. With fewer rows, reading the matrices takes most of the time, so each thread reads a part of every matrix.
constexpr int64_t ALONE = 48;

}  // namespace

extern "C" {

// Computes x[rows, width] through all layers. Each layer reads the result y of the previous one. `room` has width + (heads + kv_heads) dim +
// inner + rank numbers per row, where `rank` is the largest of any group of matrices. `angles` has the addresses of the cosines and of the sines of
// each layer. A row's results do not depend on other rows.
void decode_layers(int half, const void* weights, char* const* made, int64_t layers, const char* x, char* room, const float* const* angles, const float* factors, char* const* own, int64_t slots_there, int64_t capacity, const int64_t* slots, const int64_t* places, const void* const* prompts, const int64_t* prompt_lengths, const int64_t* first, int64_t groups, int64_t rows, const void* shape, int threads) {
    Caches c{own, slots_there, capacity, slots, places, prompts, prompt_lengths, first, groups};
    auto go = [&](int64_t from, int64_t to, int threads) { pass(half, (const Weights*)weights, made, layers, x, room, angles, factors, c, from, to, rows, *(const Shape*)shape, threads); };
    if (threads == 1 || rows < ALONE * threads) return go(0, rows, threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) go(rows * t / threads, rows * (t + 1) / threads, 1);
}
}
