// Attention over packed sequences that share prefixes, its gradient, and attention of a decoding step with a key-value cache.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace {

constexpr int64_t BLOCK = 24;  // the number of queries that are processed together
constexpr int64_t AHEAD = 2 * BLOCK;  // how many rows ahead keys and values are prefetched

// The sequences of a packed row in G groups. A group g has a prefix (start, length) and the members first[g] .. first[g + 1], which are
// (start, length, base) and continue the first `base` tokens of the prefix. They are sorted, the longest base first. A prefix attends to
// itself, and a member to the tokens that it continues and to itself. The column of a key in the scores is its position in the text.
struct Plan {
    const int64_t *prefixes, *members, *first;
    int64_t groups, heads, kv_heads, dim, window;
    float scale;
};

// The queries, the keys or the values in a table whose rows contain several of these side by side. `row` is the row stride.
template <class T>
struct Rows {
    T* at;
    int64_t row;
    T* head(int64_t r, int64_t h, int64_t dim) const { return at + r * row + h * dim; }
};

// A thread's memory, which is reused for each unit of work (a group and a key head). It holds the keys and values of the prefix and of the
// current member. Each unit resets the sums of gradients to 0 at its end.
struct Room {
    int64_t dim, wide, ld;
    std::vector<float> keys_t, values_t, keys, values, query, up, scores, slopes, dkeys, dvalues, out;
    Room(int64_t dim, int64_t columns, bool gradient) : dim(dim), wide(padded(dim)), ld(padded(columns)) {
        keys_t.assign(dim * ld, 0), values.assign(ld * wide, 0), query.assign(BLOCK * wide, 0);
        scores.resize(BLOCK * ld), out.resize(BLOCK * wide);
        if (!gradient) return;
        keys.assign(ld * wide, 0), values_t.assign(dim * ld, 0), up.assign(BLOCK * wide, 0), slopes.resize(BLOCK * ld);
        dkeys.assign(ld * wide, 0), dvalues.assign(ld * wide, 0);
    }
    template <class T>
    void enter(Rows<const T> k, Rows<const T> v, int64_t head, int64_t start, int64_t length, int64_t column, bool gradient) {
        copy(gradient ? keys.data() : nullptr, keys_t.data(), k, head, start, length, column);
        copy(values.data(), gradient ? values_t.data() : nullptr, v, head, start, length, column);
    }
    // Copies rows to `plain` [column, wide] and, transposed, to `transposed` [dim, column], unless these are null.
    template <class T>
    void copy(float* plain, float* transposed, Rows<const T> from, int64_t head, int64_t start, int64_t length, int64_t column) {
        over(length, [&](int64_t j, auto rows) {
            const T* first = from.head(start + j, head, dim);
            over(dim, [&](int64_t d, auto count) {
                vec square[WIDTH] = {};
                for (int64_t i = 0; i < rows; i++) square[i] = take(first + i * from.row + d, count);
                if (plain)
                    for (int64_t i = 0; i < rows; i++) give(plain + (column + j + i) * wide + d, count, square[i]);
                if (!transposed) return;
                turn(square);
                for (int64_t i = 0; i < count; i++) give(transposed + (d + i) * ld + column + j, rows, square[i]);
            });
        });
    }
};

// Returns the largest number of columns in any group: the length of a prefix, or of a member with the tokens that it continues.
int64_t longest(const Plan& p) {
    int64_t most = 0;
    for (int64_t g = 0; g < p.groups; g++) {
        int64_t own = 0;
        for (int64_t m = p.first[g]; m < p.first[g + 1]; m++) own = std::max(own, p.members[3 * m + 1] + p.members[3 * m + 2]);
        most = std::max({most, p.prefixes[2 * g + 1], own});
    }
    return most;
}

// Processes a group for one key head: the prefix, and then each member. Calls `enter` with the keys of a sequence, then
// run(head, start, base, first, count) for each block of its queries, and `done` for keys that no later query attends to.
template <class Enter, class Run, class Done>
void walk(const Plan& p, int64_t g, int64_t kv, Enter enter, Run run, Done done) {
    int64_t share = p.heads / p.kv_heads, prefix = p.prefixes[2 * g + 1];
    auto blocks = [&](int64_t start, int64_t length, int64_t base) {
        for (int64_t h = kv * share; h < (kv + 1) * share; h++)
            for (int64_t i = 0; i < length; i += BLOCK) run(h, start, base, i, std::min(BLOCK, length - i));
    };
    enter(p.prefixes[2 * g], prefix, 0);
    blocks(p.prefixes[2 * g], prefix, 0);
    for (int64_t m = p.first[g]; m < p.first[g + 1]; m++) {
        int64_t start = p.members[3 * m], length = p.members[3 * m + 1], base = p.members[3 * m + 2];
        // this member's keys overwrite the prefix's columns from `base` on, which no later member attends to
        if (base < prefix) done(p.prefixes[2 * g] + base, prefix - base, base);
        prefix = std::min(prefix, base);
        enter(start, length, base);
        blocks(start, length, base);
        done(start, length, base);
    }
    done(p.prefixes[2 * g], prefix, 0);
}

template <class T>
void block_of(float* to, Rows<const T> from, int64_t start, int64_t count, int64_t head, int64_t dim, int64_t wide, float scale) {
    for (int64_t i = 0; i < count; i++) {
        const T* x = from.head(start + i, head, dim);
        over(dim, [=](int64_t d, auto n) { give(to + i * wide + d, n, take(x + d, n) * scale); });
    }
}

// Prefetches a row that is needed soon. The processor does not predict this itself, because the rows of a head are not contiguous, and those
// of a slot are too few.
template <class T>
void fetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// Replaces s[low .. high) by exp(s - top), and returns the sum. The other numbers in the first and last vector become 0. The size of s must
// be a multiple of 16.
float exponentials(float* s, int64_t low, int64_t high, float top) {
    vec sum = {};
    for (int64_t j = low / WIDTH * WIDTH; j < high; j += WIDTH) {
        vec x = exponential(*(const vec*)(s + j) - top);
        if (j < low || j + WIDTH > high) x = lanes(low - j, high - j) ? x : vec{};
        *(vec*)(s + j) = x;
        sum += x;
    }
    return total(sum);
}

int64_t lowest(const Plan& p, int64_t column) { return p.window > 0 ? std::max<int64_t>(0, column - p.window + 1) : 0; }

template <class T>
void forward(T* out, float* normaliser, Rows<const T> q, Rows<const T> k, Rows<const T> v, const Plan& p, int threads) {
    int64_t columns = longest(p);
#pragma omp parallel num_threads(threads)
    {
        Room room(p.dim, columns, false);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < p.groups * p.kv_heads; unit++) {
            int64_t g = unit / p.kv_heads, kv = unit % p.kv_heads;
            auto enter = [&](int64_t start, int64_t length, int64_t column) { room.enter(k, v, kv, start, length, column, false); };
            auto run = [&](int64_t h, int64_t start, int64_t base, int64_t first, int64_t count) {
                int64_t columns = base + first + count;
                block_of(room.query.data(), q, start + first, count, h, p.dim, room.wide, p.scale);
                multiply(count, padded(columns), p.dim, room.query.data(), room.wide, 1, room.keys_t.data(), room.ld, room.scores.data(), room.ld, false);
                float sums[BLOCK];
                for (int64_t i = 0; i < count; i++) {
                    float* s = room.scores.data() + i * room.ld;
                    int64_t row = start + first + i, end = base + first + i + 1, low = lowest(p, end - 1);
                    fetch(q.head(row + BLOCK, h, p.dim), p.dim), fetch(k.head(row + AHEAD, kv, p.dim), p.dim), fetch(v.head(row + AHEAD, kv, p.dim), p.dim);
                    float top = s[low];
#pragma omp simd reduction(max : top)
                    for (int64_t j = low; j < end; j++) top = s[j] > top ? s[j] : top;
                    float sum = exponentials(s, low, end, top);
                    std::fill(s, s + low, 0.0f), std::fill(s + end, s + columns, 0.0f);
                    sums[i] = 1.0f / sum;
                    normaliser[row * p.heads + h] = top + std::log(sum);
                }
                multiply(count, room.wide, columns, room.scores.data(), room.ld, 1, room.values.data(), room.wide, room.out.data(), room.wide, false);
                for (int64_t i = 0; i < count; i++) {
                    T* to = out + ((start + first + i) * p.heads + h) * p.dim;
                    over(p.dim, [&](int64_t d, auto n) { give(to + d, n, take(room.out.data() + i * room.wide + d, n) * sums[i]); });
                }
            };
            walk(p, g, kv, enter, run, [](int64_t, int64_t, int64_t) {});
        }
    }
}

template <class T>
void backward(Rows<T> dq, Rows<T> dk, Rows<T> dv, const T* dout, const T* out, const float* normaliser, Rows<const T> q, Rows<const T> k, Rows<const T> v, const Plan& p, int threads) {
    Rows<const T> dy{dout, p.heads * p.dim}, y{out, p.heads * p.dim};
    int64_t columns = longest(p);
#pragma omp parallel num_threads(threads)
    {
        Room room(p.dim, columns, true);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < p.groups * p.kv_heads; unit++) {
            int64_t g = unit / p.kv_heads, kv = unit % p.kv_heads;
            auto enter = [&](int64_t start, int64_t length, int64_t column) { room.enter(k, v, kv, start, length, column, true); };
            auto run = [&](int64_t h, int64_t start, int64_t base, int64_t first, int64_t count) {
                int64_t columns = base + first + count;
                float *s = room.scores.data(), *ds = room.slopes.data();
                block_of(room.query.data(), q, start + first, count, h, p.dim, room.wide, p.scale);
                block_of(room.up.data(), dy, start + first, count, h, p.dim, room.wide, 1.0f);
                multiply(count, padded(columns), p.dim, room.query.data(), room.wide, 1, room.keys_t.data(), room.ld, s, room.ld, false);
                multiply(count, padded(columns), p.dim, room.up.data(), room.wide, 1, room.values_t.data(), room.ld, ds, room.ld, false);
                for (int64_t i = 0; i < count; i++, s += room.ld, ds += room.ld) {
                    int64_t row = start + first + i, end = base + first + i + 1, low = lowest(p, end - 1);
                    const T* o = y.head(row, h, p.dim);
                    const float* u = room.up.data() + i * room.wide;
                    fetch(q.head(row + BLOCK, h, p.dim), p.dim), fetch(dy.head(row + BLOCK, h, p.dim), p.dim), fetch(y.head(row + BLOCK, h, p.dim), p.dim);
                    fetch(k.head(row + AHEAD, kv, p.dim), p.dim), fetch(v.head(row + AHEAD, kv, p.dim), p.dim);
                    vec dots = {};
                    over(p.dim, [&](int64_t d, auto n) { dots += take(u + d, n) * take(o + d, n); });
                    exponentials(s, low, end, normaliser[row * p.heads + h]);
                    float dot = total(dots);
#pragma omp simd
                    for (int64_t j = low; j < end; j++) ds[j] = s[j] * (ds[j] - dot);
                    std::fill(s, s + low, 0.0f), std::fill(s + end, s + columns, 0.0f);
                    std::fill(ds, ds + low, 0.0f), std::fill(ds + end, ds + columns, 0.0f);
                }
                s = room.scores.data(), ds = room.slopes.data();
                multiply(columns, room.wide, count, s, 1, room.ld, room.up.data(), room.wide, room.dvalues.data(), room.wide, true);
                multiply(columns, room.wide, count, ds, 1, room.ld, room.query.data(), room.wide, room.dkeys.data(), room.wide, true);
                multiply(count, room.wide, columns, ds, room.ld, 1, room.keys.data(), room.wide, room.out.data(), room.wide, false);
                for (int64_t i = 0; i < count; i++) {
                    T* to = dq.head(start + first + i, h, p.dim);
                    over(p.dim, [&](int64_t d, auto n) { give(to + d, n, take(room.out.data() + i * room.wide + d, n) * p.scale); });
                }
            };
            auto done = [&](int64_t start, int64_t length, int64_t column) {
                for (int64_t j = 0; j < length; j++) {
                    T *to_key = dk.head(start + j, kv, p.dim), *to_value = dv.head(start + j, kv, p.dim);
                    float *a = room.dkeys.data() + (column + j) * room.wide, *b = room.dvalues.data() + (column + j) * room.wide;
                    over(p.dim, [=](int64_t d, auto n) { give(to_key + d, n, take(a + d, n)), give(to_value + d, n, take(b + d, n)); });
                    std::fill_n(a, p.dim, 0.0f), std::fill_n(b, p.dim, 0.0f);
                }
            };
            walk(p, g, kv, enter, run, done);
        }
    }
}

// The key-value cache. A slot has the keys [kv_heads, blocks of 16, dim, 16] and values [kv_heads, capacity, dim] of a completion. The keys
// of a group's prompt are in the same blocks, and its values are [kv_heads, length, dim padded to a multiple of 16]. Both are read in order.
template <class T>
struct Cache {
    T *keys, *values;
    const int64_t *slots, *places;  // [rows] the slot of each row, and the position of its token in the slot
    int64_t capacity;
    const float *const *prompt_keys, *const *prompt_values;
    const int64_t *prompt_lengths, *first;  // rows first[g] .. first[g + 1] continue prompt g
    int64_t groups;
};

// Copies the keys and values of prompts into the layout of `Cache`. Prompt g has lengths[g] rows of k and v from starts[g].
template <class T>
void tables(float* const* keys, float* const* values, Rows<const T> k, Rows<const T> v, const int64_t* starts, const int64_t* lengths, int64_t prompts, int64_t kv_heads, int64_t dim, int threads) {
    int64_t wide = padded(dim);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (prompts * kv_heads > 1)
    for (int64_t g = 0; g < prompts; g++)
        for (int64_t kv = 0; kv < kv_heads; kv++) {
            int64_t length = lengths[g], all = padded(length);
            float *to = keys[g] + kv * all * dim, *row = values[g] + kv * length * wide;
            for (int64_t j = 0; j < all; j++) {
                float* at = to + j / LANES * LANES * dim + j % LANES;
                const T* from = j < length ? k.head(starts[g] + j, kv, dim) : nullptr;
                for (int64_t d = 0; d < dim; d++) at[d * LANES] = from ? get(from[d]) : 0.0f;
            }
            for (int64_t j = 0; j < length; j++, row += wide) {
                const T* from = v.head(starts[g] + j, kv, dim);
                over(dim, [=](int64_t d, auto n) { give(row + d, n, take(from + d, n)); });
                std::fill(row + dim, row + wide, 0.0f);
            }
        }
}

// Calls use(rows, row) with `count` rows whose width is a multiple of 16, as the products need. `row` is the row stride. If `dim` is no such
// multiple, the rows are first copied to `room` and padded with 0.
template <class T, class Use>
inline void with_rows(const T* rows, int64_t count, int64_t dim, std::vector<float>& room, Use use) {
    int64_t wide = padded(dim);
    if (dim == wide) return use(rows, dim);
    room.assign(count * wide, 0.0f);
    for (int64_t j = 0; j < count; j++)
        over(dim, [&](int64_t d, auto n) { give(room.data() + j * wide + d, n, take(rows + j * dim + d, n)); });
    use((const float*)room.data(), wide);
}

// A decoding step of one group for one key head. The queries of all rows of the group read the prompt's keys and values together. Every sum
// has the same numbers in the same order as in `forward`, so that the results have the same bits.
template <class T>
struct Step {
    const Plan& p;
    const Cache<T>& c;
    int64_t wide = padded(p.dim), share = p.heads / p.kv_heads, ld = 0;
    std::vector<float> queries, scores, sums, scales, room;

    void run(T* out, float* normaliser, Rows<const T> q, Rows<const T> k, Rows<const T> v, int64_t g, int64_t kv) {
        int64_t start = c.first[g], count = c.first[g + 1] - start, prompt = c.prompt_lengths[g], all = count * share;
        int64_t longest = 0;
        for (int64_t m = 0; m < count; m++) longest = std::max(longest, c.places[start + m] + 1);
        ld = padded(prompt + padded(longest));
        queries.assign(all * wide, 0.0f), scores.resize(all * ld), sums.resize(all * wide), scales.resize(all);
        for (int64_t m = 0; m < count; m++)
            for (int64_t h = 0; h < share; h++) block_of(queries.data() + (m * share + h) * wide, q, start + m, 1, kv * share + h, p.dim, wide, p.scale);
        int64_t blocks = padded(prompt) / LANES;
        const float* keys = c.prompt_keys[g] + kv * blocks * p.dim * LANES;
        for (int64_t b = 0; b < blocks; b++) multiply(all, LANES, p.dim, queries.data(), wide, 1, keys + b * p.dim * LANES, LANES, scores.data() + b * LANES, ld, false);
        for (int64_t m = 0; m < count; m++) own_scores(k, v, start + m, m, kv, prompt);
        for (int64_t m = 0; m < count; m++)
            for (int64_t h = 0; h < share; h++)
                normaliser[(start + m) * p.heads + kv * share + h] = weigh(scores.data() + (m * share + h) * ld, prompt + c.places[start + m] + 1, scales[m * share + h]);
        multiply(all, wide, prompt, scores.data(), ld, 1, c.prompt_values[g] + kv * prompt * wide, wide, sums.data(), wide, false);
        for (int64_t m = 0; m < count; m++) {
            int64_t length = c.places[start + m] + 1;
            with_rows(c.values + own(start + m, kv), length, p.dim, room, [&](auto* values, int64_t apart) {
                multiply(share, wide, length, scores.data() + m * share * ld + prompt, ld, 1, values, apart, sums.data() + m * share * wide, wide, true);
            });
            for (int64_t h = 0; h < share; h++) {
                T* to = out + ((start + m) * p.heads + kv * share + h) * p.dim;
                over(p.dim, [&](int64_t d, auto n) { give(to + d, n, take(sums.data() + (m * share + h) * wide + d, n) * scales[m * share + h]); });
            }
        }
    }

    // Returns the index at which the keys and values of a row's slot begin.
    int64_t own(int64_t row, int64_t kv) const { return (c.slots[row] * p.kv_heads + kv) * c.capacity * p.dim; }

    void own_scores(Rows<const T> k, Rows<const T> v, int64_t row, int64_t m, int64_t kv, int64_t prompt) {
        int64_t start = own(row, kv), last = c.places[row];
        T* to = c.keys + start + last / LANES * LANES * p.dim + last % LANES;
        const T* from = k.head(row, kv, p.dim);
        for (int64_t d = 0; d < p.dim; d++) to[d * LANES] = from[d];
        std::copy_n(v.head(row, kv, p.dim), p.dim, c.values + start + last * p.dim);
        for (int64_t j = 0; j <= last; j += LANES) {
            for (int64_t i = j; i <= std::min(last, j + LANES - 1); i++) {
                fetch(c.values + start + i * p.dim, p.dim);
                fetch(c.keys + start + (c.capacity * p.kv_heads + i) * p.dim, p.dim);
            }
            multiply(share, LANES, p.dim, queries.data() + m * share * wide, wide, 1, c.keys + start + j * p.dim, LANES, scores.data() + m * share * ld + prompt + j, ld, false);
        }
    }

    // Replaces scores by their exponentials, and returns their log-sum-exp. The exponentials times `scale` sum to 1.
    float weigh(float* s, int64_t length, float& scale) const {
        int64_t low = lowest(p, length - 1);
        float top = s[low];
#pragma omp simd reduction(max : top)
        for (int64_t j = low; j < length; j++) top = s[j] > top ? s[j] : top;
        float sum = exponentials(s, low, length, top);
        std::fill(s, s + low, 0.0f);
        scale = 1.0f / sum;
        return top + std::log(sum);
    }
};

template <class T>
void one_step(T* out, float* normaliser, Rows<const T> q, Rows<const T> k, Rows<const T> v, const Cache<T>& c, const Plan& p, int threads) {
#pragma omp parallel num_threads(threads) if (c.groups * p.kv_heads > 1)
    {
        Step<T> step{p, c};
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < c.groups * p.kv_heads; unit++) step.run(out, normaliser, q, k, v, unit / p.kv_heads, unit % p.kv_heads);
    }
}

}  // namespace

extern "C" {

// Computes the output out[S, heads, dim] and normaliser[S, heads], the log-sum-exp of the scaled scores. q, k and v have these row strides.
void attention(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, const int64_t* prefixes, const int64_t* members, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads) {
    Plan p{prefixes, members, first, groups, heads, kv_heads, dim, window, scale};
    BOTH(half, forward<T>((T*)out, normaliser, {(const T*)q, q_row}, {(const T*)k, k_row}, {(const T*)v, v_row}, p, threads))
}

// gradient[S, row] = the gradient of [q | k | v]
void attention_gradient(int half, void* gradient, int64_t row, const void* dout, const void* out, const float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, const int64_t* prefixes, const int64_t* members, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads) {
    Plan p{prefixes, members, first, groups, heads, kv_heads, dim, window, scale};
    BOTH(half, backward<T>({(T*)gradient, row}, {(T*)gradient + heads * dim, row}, {(T*)gradient + (heads + kv_heads) * dim, row}, (const T*)dout, (const T*)out, normaliser, {(const T*)q, q_row}, {(const T*)k, k_row}, {(const T*)v, v_row}, p, threads))
}

// Writes the keys and values of prompts in the layout that `decode` reads. Prompt g has lengths[g] rows from starts[g].
void prompt_tables(int half, void* keys, void* values, const void* k, const void* v, int64_t k_row, int64_t v_row, const int64_t* starts, const int64_t* lengths, int64_t prompts, int64_t kv_heads, int64_t dim, int threads) {
    BOTH(half, tables<T>((float* const*)keys, (float* const*)values, {(const T*)k, k_row}, {(const T*)v, v_row}, starts, lengths, prompts, kv_heads, dim, threads))
}

// Computes out[rows, heads, dim] and normaliser[rows, heads] for one new token in each of some slots, and appends the token's key and value
// to the slot (see `Cache`). `capacity` must be a multiple of 16.
void decode(int half, void* out, float* normaliser, const void* q, const void* k, const void* v, int64_t q_row, int64_t k_row, int64_t v_row, void* keys, void* values, const int64_t* slots, const int64_t* places, int64_t capacity, const void* prompt_keys, const void* prompt_values, const int64_t* prompt_lengths, const int64_t* first, int64_t groups, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads) {
    Plan p{nullptr, nullptr, nullptr, 0, heads, kv_heads, dim, window, scale};
    BOTH(half, one_step<T>((T*)out, normaliser, {(const T*)q, q_row}, {(const T*)k, k_row}, {(const T*)v, v_row}, {(T*)keys, (T*)values, slots, places, capacity, (const float* const*)prompt_keys, (const float* const*)prompt_values, prompt_lengths, first, groups}, p, threads))
}
}
