// Forward and backward pass of small ReLU networks, and Adam's step on their weights. The networks of psigrad.control are so small that
// calling PyTorch for an operation takes longer than the operation.
#include <algorithm>
#include <vector>

#include "common.h"

extern "C" void product(float* c, const float* a, const float* b, const float* base, int64_t m, int64_t n, int64_t k, int64_t c_row, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int64_t base_row, int add, int threads);

extern "C" {

// Computes K networks ("towers") with `layers` layers for x [rows, in]. sizes[layers + 1] are the widths of the input and of each layer.
// `flat` has the weights [K, in, out] and biases [K, out] of each layer. The outputs [K, rows, out] of each layer are written to `hs`. A ReLU
// follows every layer but the last.
void relu_towers(float* hs, const float* flat, const float* x, const int64_t* sizes, int64_t layers, int64_t towers, int64_t rows, int threads) {
    const float* before = nullptr;
    for (int64_t i = 0; i < layers; i++) {
        int64_t in = sizes[i], out = sizes[i + 1];
        const float *weight = flat, *bias = flat + towers * in * out;
        for (int64_t k = 0; k < towers; k++) {
            const float* from = before ? before + k * rows * in : x;
            product(hs + k * rows * out, from, weight + k * in * out, bias + k * out, rows, out, in, out, in, 1, out, 1, 0, 0, threads);
        }
        int64_t count = towers * rows * out;
        if (i + 1 < layers)
            over(count, [=](int64_t j, auto lanes) {
                vec h = take(hs + j, lanes);
                give(hs + j, lanes, h > 0 ? h : vec{});
            });
        flat = bias + towers * out, before = hs, hs += count;
    }
}

// Computes the gradient of the weights `flat`. `given` [K, states, out] is the gradient of the last layer's outputs for the first `states`
// rows of x.
void relu_towers_gradient(float* grads, const float* flat, const float* x, const float* hs, const float* given, const int64_t* sizes, int64_t layers, int64_t towers, int64_t rows, int64_t states, int threads) {
    std::vector<int64_t> at(layers + 1), layer(layers + 1);  // the indices at which a layer's weights and outputs begin
    int64_t widest = 0;
    for (int64_t i = 0; i < layers; i++) {
        at[i + 1] = at[i] + towers * (sizes[i] + 1) * sizes[i + 1];
        layer[i + 1] = layer[i] + towers * rows * sizes[i + 1];
        widest = std::max(widest, sizes[i]);
    }
    static thread_local std::vector<float> room;
    room.resize(std::max<int64_t>(room.size(), 2 * states * widest));
    for (int64_t k = 0; k < towers; k++) {
        const float* d = given + k * states * sizes[layers];
        for (int64_t i = layers - 1; i >= 0; i--) {
            int64_t in = sizes[i], out = sizes[i + 1];
            const float* h = i ? hs + layer[i - 1] + k * rows * in : x;
            float *weight = grads + at[i] + k * in * out, *bias = grads + at[i] + towers * in * out + k * out;
            product(weight, h, d, nullptr, in, out, states, out, 1, in, out, 1, 0, 0, threads);
            std::fill(bias, bias + out, 0.f);
            for (int64_t s = 0; s < states; s++)
                over(out, [=](int64_t j, auto lanes) { give(bias + j, lanes, take(bias + j, lanes) + take(d + s * out + j, lanes)); });
            if (!i) break;
            float* back = room.data() + (i % 2) * states * widest;
            product(back, d, flat + at[i] + k * in * out, nullptr, states, in, out, in, out, 1, 1, out, 0, 0, threads);
            over(states * in, [=](int64_t j, auto lanes) {
                vec kept = take(h + j, lanes), slope = take(back + j, lanes);
                give(back + j, lanes, kept > 0 ? slope : vec{});
            });
            d = back;
        }
    }
}

// Takes a step of Adam with the gradient times `scale`: updates the moments m and v, then w -= rate · m / (sqrt(v · correction + tiny) + eps).
// new1 is 1 - beta1, and new2 is 1 - beta2.
void adam(float* w, const float* gradient, float* first, float* second, int64_t count, float new1, float beta2, float new2, float rate, float correction, float tiny, float eps, float scale) {
    over(count, [=](int64_t i, auto lanes) {
        vec g = take(gradient + i, lanes) * scale, m = take(first + i, lanes), v = take(second + i, lanes);
        m += (g - m) * new1;
        v = v * beta2 + g * g * new2;
        vec x = take(w + i, lanes) - m * rate / (root(v * correction + tiny) + eps);
        give(first + i, lanes, m), give(second + i, lanes, v), give(w + i, lanes, x);
    });
}
}
