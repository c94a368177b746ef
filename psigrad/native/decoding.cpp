// One step of decoding through all layers, as one call: called one by one from Python, the kernels of a small model wait for it a
// fifth of the time.
#include "common.h"

extern "C" {
void rms_norm(int half, void* y, const void* x, const void* weight, int64_t rows, int64_t width, float eps, int threads);
void rotary(int half, void* out, const void* qkv, const void* query_norm, const void* key_norm, const float* cosine, const float* sine, int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t row, float eps, int threads);
void swiglu(int half, void* out, const void* both, int64_t rows, int64_t width, int threads);
void decode(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, void* keys, void* values, const int64_t* places, int64_t capacity, const void* prompt_keys, const void* prompt_values, const int64_t* prompt_lengths, const int64_t* members, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads);
void through_panels(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
void through_half_panels(void* out, const void* x, const void* panels, const void* base, int64_t m, int64_t n, int64_t k, int64_t out_row, int64_t x_row, int64_t base_row, int threads);
}

namespace {

// Of a layer: its norms, those of the heads (or null), its turned matrices, its cache, and what it makes of every row.
struct Layer {
    const void *norm, *feed_norm, *query_norm, *key_norm;
    const void *qkv_panels, *out_panels, *both_panels, *down_panels;
    void *keys, *values;
    const void *prompt_keys, *prompt_values;
    int64_t capacity, window;
    void *y, *qkv, *mixed;
    float* normaliser;
    void *middle, *both;
};

}  // namespace

extern "C" {

// x[rows, width] through the layers, each of which reads the y of the one before. normed[rows, width], rotated[rows, heads + kv_heads,
// dim] and gated[rows, inner] are room that all of them use.
void decode_layers(int half, const void* table, int64_t count, const void* x, void* normed, char* rotated, void* gated, const float* cosine, const float* sine, const int64_t* places, const int64_t* prompt_lengths, const int64_t* members, const int64_t* first, int64_t groups, int64_t rows, int64_t width, int64_t inner, int64_t heads, int64_t kv_heads, int64_t dim, float eps, float head_eps, float scale, int threads) {
    int64_t queries = heads * dim, turning = (heads + kv_heads) * dim, row = turning + kv_heads * dim, size = half ? 2 : 4;
    auto product = [=](void* out, const void* x, const void* panels, const void* base, int64_t n, int64_t k) {
        (half ? through_half_panels : through_panels)(out, x, panels, base, rows, n, k, n, k, n, threads);
    };
    for (const Layer* l = (const Layer*)table; l < (const Layer*)table + count; x = l->y, l++) {
        rms_norm(half, normed, x, l->norm, rows, width, eps, threads);
        product(l->qkv, normed, l->qkv_panels, nullptr, row, width);
        rotary(half, rotated, l->qkv, l->query_norm, l->key_norm, cosine, sine, rows, heads, kv_heads, dim, row, head_eps, threads);
        const char *keys = rotated + queries * size, *values = (const char*)l->qkv + turning * size;
        decode(half, l->mixed, l->normaliser, rotated, keys, values, turning, turning, row, l->keys, l->values, places, l->capacity, l->prompt_keys, l->prompt_values, prompt_lengths, members, first, groups, heads, kv_heads, dim, l->window, scale, threads);
        product(l->middle, l->mixed, l->out_panels, x, width, queries);
        rms_norm(half, normed, l->middle, l->feed_norm, rows, width, eps, threads);
        product(l->both, normed, l->both_panels, nullptr, 2 * inner, width);
        swiglu(half, gated, l->both, rows, inner, threads);
        product(l->y, gated, l->down_panels, l->middle, width, inner);
    }
}
}
