// One step of decoding through all layers, as one call: called one by one from Python, the kernels of a small model wait for it a
// fifth of the time.
#include "common.h"

extern "C" {
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, int threads);
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, float eps, int threads);
void swiglu(int half, void* out, const void* both, int64_t rows, int64_t width, int threads);
void decode(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, void* keys, void* values, const int64_t* slots, const int64_t* places, int64_t capacity, const void* prompt_keys, const void* prompt_values, const int64_t* prompt_lengths, const int64_t* members, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads);
void through_panels(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void through_half_panels(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
}

namespace {

// Of a layer: its norms, those of the heads (or null), its turned matrices, its window.
struct Weights {
    const void *norm, *feed_norm, *query_norm, *key_norm;
    const void *qkv_panels, *out_panels, *both_panels, *down_panels;
    int64_t window;
};

// What a layer makes of every row.
struct Made {
    void *y, *qkv, *mixed;
    float* normaliser;
    void *middle, *both;
};

}  // namespace

extern "C" {

// x[rows, width] through the layers, each of which reads the y of the one before. own[layers, keys and values, slots_there, kv_heads,
// capacity, dim] and prompts[layers, keys and values, groups] are the cache. room is for what no one reads afterwards, of every row
// width + (heads + kv_heads) dim + inner numbers.
void decode_layers(int half, const void* weights, const void* made, int64_t layers, const void* x, char* room, const float* cosine, const float* sine, char* own, int64_t slots_there, int64_t capacity, const int64_t* slots, const int64_t* places, const void* const* prompts, const int64_t* prompt_lengths, const int64_t* members, const int64_t* first, int64_t groups, int64_t rows, int64_t width, int64_t inner, int64_t heads, int64_t kv_heads, int64_t dim, float eps, float head_eps, float scale, int threads) {
    int64_t queries = heads * dim, turning = (heads + kv_heads) * dim, row = turning + kv_heads * dim, size = half ? 2 : 4;
    int64_t table = slots_there * kv_heads * capacity * dim * size;
    char *normed = room, *rotated = normed + rows * width * size, *gated = rotated + rows * turning * size;
    auto product = [=](void* out, const void* x, const void* panels, const void* base, int64_t n, int64_t k) {
        (half ? through_half_panels : through_panels)(out, x, panels, base, rows, n, k, n, k, n, threads);
    };
    for (int64_t i = 0; i < layers; i++, own += 2 * table, prompts += 2 * groups) {
        const Weights& w = ((const Weights*)weights)[i];
        const Made& m = ((const Made*)made)[i];
        rms_norm(half, normed, x, w.norm, rows, width, eps, threads);
        product(m.qkv, normed, w.qkv_panels, nullptr, row, width);
        rotary(half, rotated, m.qkv, w.query_norm, w.key_norm, cosine, sine, rows, heads, kv_heads, dim, row, head_eps, threads);
        const char *keys = rotated + queries * size, *values = (const char*)m.qkv + turning * size;
        decode(half, m.mixed, m.normaliser, rotated, keys, values, turning, turning, row, own, own + table, slots, places, capacity, prompts, prompts + groups, prompt_lengths, members, first, groups, heads, kv_heads, dim, w.window, scale, threads);
        product(m.middle, m.mixed, w.out_panels, x, width, queries);
        rms_norm(half, normed, m.middle, w.feed_norm, rows, width, eps, threads);
        product(m.both, normed, w.both_panels, nullptr, 2 * inner, width);
        swiglu(half, gated, m.both, rows, inner, threads);
        product(m.y, gated, w.down_panels, m.middle, width, inner);
        x = m.y;
    }
}
}
