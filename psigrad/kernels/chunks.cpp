// Recurrent layers over whole sequences, in chunks of tokens, with their gradients: the gated delta rule (Yang, Kautz & Hatamizadeh 2024,
// arXiv:2412.06464) and Mamba-2 (Dao & Gu 2024, arXiv:2405.21060). For each token S <- e^g S, S <- S + k u^T and o = S^T q, where u is
// beta (v - S^T k), or in Mamba-2 beta v. Within a chunk, the vectors u are the solution of a triangular system, and everything else is
// matrix products.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

constexpr int64_t CHUNK = 32;
typedef std::vector<float> floats;

// C[m, n] (+)= A[m, k] B[k, n], and the same for a transposed A[k, m]. n is a multiple of 16. They are not inlined, because each has 4 KB of
// code.
__attribute__((noinline)) void times(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    multiply(m, n, k, a, a_row, 1, b, b_row, c, c_row, add);
}
__attribute__((noinline)) void turned_times(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    multiply(m, n, k, a, 1, a_col, b, b_row, c, c_row, add);
}

// Transposes `from` [rows, columns] to `to` [columns, rows], padded with zeros. The row strides are from_row and to_row. `columns` is a
// multiple of 16.
void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
    for (int64_t i = 0; i < padded(rows); i += WIDTH)
        for (int64_t j = 0; j < columns; j += WIDTH) {
            vec square[WIDTH] = {};
            for (int64_t r = 0; r < WIDTH && i + r < rows; r++) square[r] = widen(from + (i + r) * from_row + j);
            turn(square);
            for (int64_t r = 0; r < WIDTH; r++) narrow(to + (j + r) * to_row + i, square[r]);
        }
}

// add_scaled computes to += x y, and scale computes to *= x, for n numbers. n is a multiple of 16.
void add_scaled(float* to, float x, const float* y, int64_t n) {
    for (int64_t j = 0; j < n; j += WIDTH) narrow(to + j, multiply_add(spread(x), widen(y + j), widen(to + j)));
}
void scale(float* to, float x, int64_t n) {
    for (int64_t j = 0; j < n; j += WIDTH) narrow(to + j, widen(to + j) * x);
}

// The inputs: queries and keys [tokens, key_heads, width], and values [tokens, heads, values], with their row strides.
template <class T>
struct Inputs {
    const T *q, *k, *v;
    int64_t q_row, k_row, v_row;
    const float *g, *beta;  // [tokens, heads]
};

// The sizes of a layer. With `delta` it is the gated delta rule: queries and keys are normalised, and states are [width, values]. Otherwise
// it is Mamba-2, whose states are [values, width].
struct Shape {
    int64_t heads, key_heads, width, values, delta;
    int64_t state() const { return width * values; }
};

// A thread's computation of one segment of tokens (start, length) for one key head, with its memory.
template <class T>
struct Scan {
    const Inputs<T>& in;
    const Shape& s;
    int64_t wide, tall, start = 0, length = 0, n = 0;
    floats query, key, q_norms, k_norms, state, slope, flipped, keys_t, u_t, kk, qk, decay, system, of_scores, of_system;
    floats u, seen, du, o, dout, scaled, room, starts, dquery, dkey;
    float gamma[CHUNK], beta[CHUNK], dlog[CHUNK], dbeta[CHUNK];

    Scan(const Inputs<T>& in, const Shape& s) : in(in), s(s), wide(padded(s.width)), tall(padded(s.values)) {
        for (floats* x : {&state, &slope, &flipped}) x->assign(wide * tall, 0);
        for (floats* x : {&kk, &qk, &decay, &system, &of_scores, &of_system}) x->assign(CHUNK * CHUNK, 0);
        for (floats* x : {&du, &o, &dout, &scaled}) x->assign(CHUNK * tall, 0);
        keys_t.assign(wide * CHUNK, 0), u_t.assign(tall * CHUNK, 0), room.assign(CHUNK * wide, 0);
    }

    // Copies the queries and keys of a segment. For the gated delta rule, normalises them and divides queries by sqrt(width).
    void enter(const int64_t* segment, int64_t key_head) {
        start = segment[0], length = segment[1];
        query.assign(length * wide, 0), key.assign(length * wide, 0), q_norms.assign(length, 1), k_norms.assign(length, 1);
        auto copy = [&](const T* from, float* to, float& norm, float factor) {
            vec squares = {};
            over(s.width, [&](int64_t j, auto count) {
                vec x = take(from + j, count);
                squares += x * x, give(to + j, count, x);
            });
            if (!s.delta) return;
            norm = 1.0f / std::sqrt(total(squares) + 1e-6f);
            scale(to, norm * factor, wide);
        };
        for (int64_t i = 0; i < length; i++) {
            copy(in.q + (start + i) * in.q_row + key_head * s.width, query.data() + i * wide, q_norms[i], root_width());
            copy(in.k + (start + i) * in.k_row + key_head * s.width, key.data() + i * wide, k_norms[i], 1.0f);
        }
        u.resize((length + CHUNK) * tall), seen.resize((length + CHUNK) * tall);
    }
    float root_width() const { return s.delta ? 1.0f / std::sqrt((float)s.width) : 1.0f; }

    // `load` reads the state of one head, or zeros if `from` is null. `each` calls use(index in this object, index in memory) for all numbers
    // of a state.
    void load(floats& to, const float* from) {
        if (!from) return std::fill(to.begin(), to.end(), 0.0f);
        each([&](int64_t here, int64_t there) { to[here] = from[there]; });
    }
    template <class Use>
    void each(Use use) {
        for (int64_t c = 0; c < s.width; c++)
            for (int64_t j = 0; j < s.values; j++) use(c * tall + j, s.delta ? c * s.values + j : j * s.width + c);
    }

    // Computes what the forward and the backward pass of the tokens first .. first + n both need: the decays between tokens, the products of
    // keys, and the triangular system of the u.
    void prepare(int64_t head, int64_t first) {
        n = std::min(CHUNK, length - first);
        float log[CHUNK], sum = 0;
        for (int64_t i = 0; i < CHUNK; i++) {
            int64_t at = (start + first + i) * s.heads + head;
            if (i < n) sum += in.g[at];
            log[i] = sum, beta[i] = i < n ? in.beta[at] : 0.0f;
        }
        for (int64_t i = 0; i < CHUNK; i += WIDTH) narrow(gamma + i, exponential(widen(log + i)));
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < CHUNK; j += WIDTH) {
                vec ratio = exponential(spread(log[i]) - widen(log + j));
                narrow(&decay[i * CHUNK + j], j + WIDTH <= i + 1 ? ratio : lanes(0, i + 1 - j) ? ratio : vec{});
            }
        const float* k = key.data() + first * wide;
        transpose(k, wide, n, wide, keys_t.data(), CHUNK);
        if (!s.delta) return;
        times(n, padded(n), wide, k, wide, keys_t.data(), CHUNK, kk.data(), CHUNK, false);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < i; j++) system[i * CHUNK + j] = -beta[i] * decay[i * CHUNK + j] * kk[i * CHUNK + j];
    }
    void score(int64_t first) { times(n, padded(n), wide, query.data() + first * wide, wide, keys_t.data(), CHUNK, qk.data(), CHUNK, false); }
    void weigh_scores() {
        for (int64_t i = 0; i < n * CHUNK; i += WIDTH) narrow(&of_scores[i], widen(&decay[i]) * widen(&qk[i]));
    }
    const T* value(int64_t head, int64_t i) const { return in.v + (start + i) * in.v_row + head * s.values; }

    // Solves the system for the u of a chunk, updates the state, and writes the outputs to out[tokens, heads, values] unless it is null.
    void forward(int64_t head, int64_t first, float* out) {
        prepare(head, first);
        const float *k = key.data() + first * wide, *S = state.data();
        float *x = u.data() + first * tall, *read = seen.data() + first * tall;
        std::fill(x, x + n * tall, 0.0f);
        for (int64_t i = 0; i < n; i++)
            over(s.values, [&](int64_t j, auto count) { give(x + i * tall + j, count, take(value(head, first + i) + j, count) * beta[i]); });
        if (s.delta) {
            times(n, tall, wide, k, wide, S, tall, read, tall, false);
            for (int64_t i = 0; i < n; i++) {
                add_scaled(x + i * tall, -beta[i] * gamma[i], read + i * tall, tall);
                if (i) times(1, tall, i, &system[i * CHUNK], CHUNK, x, tall, x + i * tall, tall, true);
            }
        }
        if (out) {
            score(first), weigh_scores();
            times(n, tall, wide, query.data() + first * wide, wide, S, tall, o.data(), tall, false);
            for (int64_t i = 0; i < n; i++) scale(&o[i * tall], gamma[i], tall);
            times(n, tall, n, of_scores.data(), CHUNK, x, tall, o.data(), tall, true);
            for (int64_t i = 0; i < n; i++) {
                float* to = out + ((start + first + i) * s.heads + head) * s.values;
                over(s.values, [&](int64_t j, auto count) { give(to + j, count, take(&o[i * tall + j], count)); });
            }
        }
        scale(state.data(), gamma[n - 1], wide * tall);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < tall; j += WIDTH) narrow(&scaled[i * tall + j], widen(x + i * tall + j) * decay[(n - 1) * CHUNK + i]);
        turned_times(wide, tall, n, k, wide, scaled.data(), tall, state.data(), tall, true);
    }

    // Computes the gradients of a chunk's inputs, and of the state before the chunk, which replaces `slope`. Given are the gradient of the
    // outputs, and that of the state after the chunk in `slope`.
    void backward(int64_t head, int64_t first, const float* given, float* dv, float* dg, float* db) {
        prepare(head, first), score(first), weigh_scores();
        const float *q = query.data() + first * wide, *k = key.data() + first * wide, *S = &starts[first / CHUNK * wide * tall];
        const float *x = u.data() + first * tall, *read = seen.data() + first * tall, *last = &decay[(n - 1) * CHUNK];
        float *dq = dquery.data() + first * wide, *dk = dkey.data() + first * wide;
        std::fill(dlog, dlog + CHUNK, 0.0f), std::fill(dbeta, dbeta + CHUNK, 0.0f);
        for (int64_t i = 0; i < n; i++)
            over(s.values, [&](int64_t j, auto count) { give(&dout[i * tall + j], count, take(given + ((start + first + i) * s.heads + head) * s.values + j, count)); });

        // the gradient through the state after the chunk: gamma S + sum of decay k u^T
        times(n, tall, wide, k, wide, slope.data(), tall, du.data(), tall, false);
        for (int64_t i = 0; i < n; i++) scale(&du[i * tall], last[i], tall);
        transpose(slope.data(), tall, wide, tall, flipped.data(), wide);
        times(n, wide, tall, x, tall, flipped.data(), wide, room.data(), wide, false);
        dlog[n - 1] += gamma[n - 1] * inner(slope.data(), S, wide * tall);
        for (int64_t i = 0; i < n; i++) {
            float change = last[i] * inner(k + i * wide, &room[i * wide], wide);
            dlog[n - 1] += change, dlog[i] -= change;
            add_scaled(dk + i * wide, last[i], &room[i * wide], wide);
        }

        // the gradient through the outputs, gamma S^T q + scores u, and through the system of the u
        turned_times(n, tall, n, of_scores.data(), CHUNK, dout.data(), tall, du.data(), tall, true);
        if (s.delta)
            for (int64_t i = n - 2; i >= 0; i--) turned_times(1, tall, n - 1 - i, &system[(i + 1) * CHUNK + i], CHUNK, &du[(i + 1) * tall], tall, &du[i * tall], tall, true);
        transpose(x, tall, n, tall, u_t.data(), CHUNK);
        times(n, padded(n), tall, dout.data(), tall, u_t.data(), CHUNK, of_scores.data(), CHUNK, false);
        if (s.delta) times(n, padded(n), tall, du.data(), tall, u_t.data(), CHUNK, of_system.data(), CHUNK, false);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < CHUNK; j++) {
                int64_t at = i * CHUNK + j;
                of_scores[at] = j <= i ? of_scores[at] * decay[at] : 0.0f;
                float change = j <= i ? of_scores[at] * qk[at] : 0.0f;
                if (s.delta) {
                    float y = j < i ? -of_system[at] * decay[at] : 0.0f;
                    if (j < i) dbeta[i] += y * kk[at], change += y * beta[i] * kk[at];
                    of_system[at] = y * beta[i];
                }
                dlog[i] += change, dlog[j] -= change;
            }
        }
        times(n, wide, n, of_scores.data(), CHUNK, k, wide, dq, wide, true);
        turned_times(n, wide, n, of_scores.data(), CHUNK, q, wide, dk, wide, true);
        transpose(S, tall, wide, tall, flipped.data(), wide);
        times(n, wide, tall, dout.data(), tall, flipped.data(), wide, room.data(), wide, false);
        for (int64_t i = 0; i < n; i++) {
            dlog[i] += gamma[i] * inner(q + i * wide, &room[i * wide], wide);
            add_scaled(dq + i * wide, gamma[i], &room[i * wide], wide);
            scale(&dout[i * tall], gamma[i], tall);
        }
        scale(slope.data(), gamma[n - 1], wide * tall);
        turned_times(wide, tall, n, q, wide, dout.data(), tall, slope.data(), tall, true);

        // the gradient through the right-hand side of the system, beta (v - gamma S^T k)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = (start + first + i) * s.heads + head;
            vec sums = {};
            over(s.values, [&](int64_t j, auto count) {
                vec d = take(&du[i * tall + j], count);
                sums += d * take(value(head, first + i) + j, count);
                give(dv + at * s.values + j, count, d * beta[i]);
            });
            dbeta[i] += total(sums);
            if (!s.delta) continue;
            float kept = inner(&du[i * tall], read + i * tall, tall) * gamma[i];
            dbeta[i] -= kept, dlog[i] -= beta[i] * kept;
            scale(&du[i * tall], -beta[i] * gamma[i], tall);
        }
        if (s.delta) {
            times(n, wide, tall, du.data(), tall, flipped.data(), wide, dk, wide, true);
            times(n, wide, n, of_system.data(), CHUNK, k, wide, dk, wide, true);
            turned_times(n, wide, n, of_system.data(), CHUNK, k, wide, dk, wide, true);
            turned_times(wide, tall, n, k, wide, du.data(), tall, slope.data(), tall, true);
        }
        float sum = 0;
        for (int64_t i = n - 1; i >= 0; i--) {
            int64_t at = (start + first + i) * s.heads + head;
            dg[at] = sum += dlog[i], db[at] = dbeta[i];
        }
    }

    // Runs the forward pass of one head again to get the state before each chunk, and then the backward pass from the last chunk to the first.
    void back(int64_t head, const float* begin, const float* given, float* dv, float* dg, float* db) {
        int64_t size = wide * tall;
        starts.resize((length + CHUNK - 1) / CHUNK * size);
        load(state, begin);
        for (int64_t first = 0; first < length; first += CHUNK) {
            std::copy(state.begin(), state.end(), starts.begin() + first / CHUNK * size);
            forward(head, first, nullptr);
        }
        for (int64_t first = (length + CHUNK - 1) / CHUNK * CHUNK - CHUNK; first >= 0; first -= CHUNK) backward(head, first, given, dv, dg, db);
    }

    // Writes the gradients of queries or keys before their normalisation to `to`, from those after it, `d`.
    void leave(const floats& d, const floats& normed, const floats& norms, float factor, float* to, int64_t key_head) {
        for (int64_t i = 0; i < length; i++) {
            const float *from = &d[i * wide], *x = &normed[i * wide];
            float dot = s.delta ? inner(from, x, wide) / (factor * factor) : 0.0f, norm = norms[i] * factor;
            float* row = to + ((start + i) * s.key_heads + key_head) * s.width;
            over(s.width, [&](int64_t j, auto count) { give(row + j, count, (take(from + j, count) - take(x + j, count) * dot) * norm); });
        }
    }
};

// The segments of a packed row: (start, length, row of the state before it or -1, row of the state after it or -1). The segments of tree t are
// first[t] .. first[t + 1]. Each follows the segment that it continues.
struct Trees {
    const int64_t *segments, *first;
    int64_t count;
};

template <class T>
void run(float* out, float* states, const Inputs<T>& in, const Trees& trees, const Shape& s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Scan<T> scan(in, s);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < trees.count * s.heads; unit++) {
            int64_t head = unit % s.heads, tree = unit / s.heads;
            for (int64_t i = trees.first[tree]; i < trees.first[tree + 1]; i++) {
                const int64_t* segment = trees.segments + 4 * i;
                scan.enter(segment, head / (s.heads / s.key_heads));
                scan.load(scan.state, segment[2] < 0 ? nullptr : states + (segment[2] * s.heads + head) * s.state());
                for (int64_t first = 0; first < scan.length; first += CHUNK) scan.forward(head, first, out);
                if (segment[3] < 0) continue;
                float* to = states + (segment[3] * s.heads + head) * s.state();
                scan.each([&](int64_t here, int64_t there) { to[there] = scan.state[here]; });
            }
        }
    }
}

// Runs the backward pass. The heads of each key head are divided into `parts`, which different threads can compute. Each part has its own
// tensors of gradients of queries and keys, which the caller sums.
template <class T>
void run_back(float* dq, float* dk, float* dv, float* dg, float* db, float* slopes, const float* dout, const float* states, const Inputs<T>& in, const Trees& trees, const Shape& s, int64_t parts, int64_t tokens, int threads) {
    int64_t share = s.heads / s.key_heads / parts, size = tokens * s.key_heads * s.width;
#pragma omp parallel num_threads(threads)
    {
        Scan<T> scan(in, s);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < trees.count * s.key_heads * parts; unit++) {
            int64_t part = unit % parts, key_head = unit / parts % s.key_heads, tree = unit / parts / s.key_heads;
            for (int64_t i = trees.first[tree + 1] - 1; i >= trees.first[tree]; i--) {
                const int64_t* segment = trees.segments + 4 * i;
                scan.enter(segment, key_head);
                scan.dquery.assign(scan.length * scan.wide, 0), scan.dkey.assign(scan.length * scan.wide, 0);
                for (int64_t head = (key_head * parts + part) * share, end = head + share; head < end; head++) {
                    scan.load(scan.slope, segment[3] < 0 ? nullptr : slopes + (segment[3] * s.heads + head) * s.state());
                    int64_t before = (segment[2] * s.heads + head) * s.state();
                    scan.back(head, segment[2] < 0 ? nullptr : states + before, dout, dv, dg, db);
                    if (segment[2] >= 0) scan.each([&](int64_t here, int64_t there) { slopes[before + there] += scan.slope[here]; });
                }
                scan.leave(scan.dquery, scan.query, scan.q_norms, scan.root_width(), dq + part * size, key_head);
                scan.leave(scan.dkey, scan.key, scan.k_norms, 1.0f, dk + part * size, key_head);
            }
        }
    }
}

}  // namespace

extern "C" {

void scan_chunks(int half, float* out, float* states, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, const float* g, const float* beta, const int64_t* segments, const int64_t* first, int64_t trees, int64_t heads, int64_t key_heads, int64_t width, int64_t values, int64_t delta, int threads) {
    BOTH(half, run(out, states, Inputs<T>{(const T*)q, (const T*)k, (const T*)v, q_row, k_row, v_row, g, beta}, {segments, first, trees}, {heads, key_heads, width, values, delta}, threads));
}

// Adds the gradients of the states to `slopes`, and overwrites the tensors of all other gradients.
void scan_chunks_gradient(int half, float* dq, float* dk, float* dv, float* dg, float* db, float* slopes, const float* dout, const float* states, int64_t parts, int64_t tokens, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, const float* g, const float* beta, const int64_t* segments, const int64_t* first, int64_t trees, int64_t heads, int64_t key_heads, int64_t width, int64_t values, int64_t delta, int threads) {
    BOTH(half, run_back(dq, dk, dv, dg, db, slopes, dout, states, Inputs<T>{(const T*)q, (const T*)k, (const T*)v, q_row, k_row, v_row, g, beta}, {segments, first, trees}, {heads, key_heads, width, values, delta}, parts, tokens, threads));
}
}
