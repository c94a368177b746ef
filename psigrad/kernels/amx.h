// Products of bfloat16 matrices by Intel's AMX. One instruction multiplies a tile of 16 rows with 16 pairs each by a tile of 16 pairs in 16
// columns. It sums the products of the first and of the second elements of the pairs separately, with one rounding per product, and then
// adds both sums to the tile. Denormal inputs and sums count as 0 ("Intel 64 and IA-32 Architectures Software Developer's Manual",
// TDPBF16PS).
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "common.h"

// The numbers of rows, of columns and of pairs of a tile.
constexpr int64_t EDGE = 16;

// Returns true if Linux lets this process use tiles. A process must request them, because they add 8 KiB to the state of each thread.
static bool tiles_granted() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// The tile registers of a thread, which are released at the end. Registers 0 to 3 hold sums: two by two tiles if there are more than 16
// rows, else one by four. Register 4 holds A's upper 16 rows, 5 its lower rows, and 6, 7 and, if it is free, 5 the panel.
class Tiles {
  public:
    // The most rows in one call of `multiply`.
    static constexpr int64_t ROWS = 2 * EDGE;

    ~Tiles() {
        if (shaped) _tile_release();
    }

    // sums[m, PANEL] (+)= a[m, 2 pairs] panel[pairs, PANEL]. `a` has any strides, in numbers, between its rows and between its pairs. Memory
    // outside the m rows and the pairs is not read, because it may be NaN, and NaN times 0 is NaN.
    void multiply(int64_t m, float* sums, const bfloat16* a, int64_t a_row, int64_t a_pair, const uint32_t* panel, int64_t pairs, bool add) {
        static_assert(PANEL == 4 * EDGE, "four tiles stand side by side");
        alignas(64) uint32_t some[ROWS * EDGE], last[EDGE * PANEL];
        const bool two = m > EDGE;
        const int64_t whole = pairs / EDGE * EDGE;
        shape(m);
        if (whole < pairs) {
            std::copy_n(panel + whole * PANEL, (pairs - whole) * PANEL, last);
            std::fill(last + (pairs - whole) * PANEL, last + EDGE * PANEL, 0);
        }
        for (int64_t c = 0; c < PANEL; c += two ? 2 * EDGE : 4 * EDGE) {
            float *to = sums + c, *rest = to + (two ? EDGE * PANEL : 2 * EDGE);
            begin(to, rest, add);
            for (int64_t p = 0; p < pairs; p += EDGE) {
                const bfloat16* from = a + p * a_pair;
                int64_t apart = a_row;
                if (p == whole || a_pair != 2) {
                    gather(some, m, from, a_row, a_pair, std::min(EDGE, pairs - p));
                    from = (const bfloat16*)some, apart = 2 * EDGE;
                }
                step(two, from, apart, p < whole ? panel + p * PANEL + c : last + c);
            }
            _tile_stored(0, to, ACROSS);
            _tile_stored(1, to + EDGE, ACROSS);
            _tile_stored(2, rest, ACROSS);
            _tile_stored(3, rest + EDGE, ACROSS);
        }
    }

  private:
    static constexpr int64_t ACROSS = PANEL * 4;  // the row stride of sums and of a panel, in bytes
    int64_t shaped = 0;

    // Makes the compiler write pending stores to memory. GCC does not know that the intrinsic that loads a tile reads memory.
    static void settle() { asm volatile("" ::: "memory"); }

    // Configures the tile registers for m rows.
    void shape(int64_t m) {
        if (m == shaped) return;
        const int64_t upper = std::min(m, EDGE), lower = m > EDGE ? m - EDGE : upper;
        const int64_t rows[8] = {upper, upper, lower, lower, upper, m > EDGE ? lower : EDGE, EDGE, EDGE};
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int t = 0; t < 8; t++) config.bytes[t] = 4 * EDGE, config.rows[t] = rows[t];
        settle();
        _tile_loadconfig(&config);
        shaped = m;
    }

    // Copies m rows of `count` pairs of `a` to `to` [m, 16], with 0 in the remaining columns.
    static void gather(uint32_t* to, int64_t m, const bfloat16* a, int64_t a_row, int64_t a_pair, int64_t count) {
        std::fill_n(to, m * EDGE, 0);
        for (int64_t i = 0; i < m; i++)
            for (int64_t p = 0; p < count; p++) memcpy(to + i * EDGE + p, a + i * a_row + p * a_pair, sizeof(*to));
    }

    static void begin(const float* to, const float* rest, bool add) {
        settle();
        if (add) {
            _tile_loadd(0, to, ACROSS);
            _tile_loadd(1, to + EDGE, ACROSS);
            _tile_loadd(2, rest, ACROSS);
            _tile_loadd(3, rest + EDGE, ACROSS);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    // Multiplies sixteen pairs of each row of A by those of the panel, and adds the products to the sums. `apart` is A's row stride.
    static void step(bool two, const bfloat16* a, int64_t apart, const uint32_t* b) {
        settle();
        _tile_loadd(4, a, 2 * apart);
        _tile_loadd(6, b, ACROSS);
        _tile_loadd(7, b + EDGE, ACROSS);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, a + EDGE * apart, 2 * apart);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_loadd(5, b + 2 * EDGE, ACROSS);
            _tile_loadd(6, b + 3 * EDGE, ACROSS);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
};
