// Runs Intel's AMX instructions on a processor that has none: each raises SIGILL, whose handler decodes and computes it.
//
// By the "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, for LDTILECFG, TILERELEASE, TILEZERO, TILELOADD,
// TILESTORED and TDPBF16PS, in 64 bits. What a processor would refuse is noted in `amx_error`. Compile it without -ffast-math.
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

extern "C" {
const char* amx_error = nullptr;
// How often each was computed, in the order above.
unsigned long amx_counts[6];
// Whether Linux refuses tiles.
int amx_refused;
long amx_syscall(long number, ...);
// Whether this thread holds tiles that were emulated.
int amx_held();
}

namespace {

enum { LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS };
constexpr int TILES = 8;
struct State {
    bool configured;
    int rows[TILES], bytes[TILES];
    uint8_t data[TILES][16][64];
};
thread_local State state;
struct sigaction before;

void refuse(const char* why) {
    if (!amx_error) amx_error = why;
}

struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

void load_config(const void* from) {
    Config config;
    memcpy(&config, from, sizeof(config));
    memset(&state, 0, sizeof(state));
    if (config.palette != 1 || config.start) refuse("LDTILECFG: a palette that is not 1, or a first row that is not 0");
    for (uint8_t byte : config.reserved)
        if (byte) refuse("LDTILECFG: a reserved byte is not 0");
    for (int t = 0; t < 16; t++) {
        if (t >= TILES && (config.rows[t] || config.bytes[t])) refuse("LDTILECFG: there are eight tiles");
        if (config.rows[t] > 16 || config.bytes[t] > 64 || !config.rows[t] != !config.bytes[t]) refuse("LDTILECFG: no tile has this shape");
        if (t < TILES) state.rows[t] = config.rows[t], state.bytes[t] = config.bytes[t];
    }
    state.configured = true;
}

bool there(int tile) {
    bool well = tile < TILES && state.configured && state.rows[tile];
    if (!well) refuse("a tile that is not configured");
    return well;
}

float wide(const uint8_t* from) {
    uint32_t bits = uint32_t(from[0] | from[1] << 8) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// tile c += a b. Not part of the handler, so that no arithmetic goes before it has set how denormals are treated.
__attribute__((noinline)) void multiply(int c, int a, int b) {
    if (!there(c) || !there(a) || !there(b)) return;
    if (c == a || c == b || a == b) return refuse("TDPBF16PS: a tile twice");
    int pairs = state.bytes[a] / 4, columns = state.bytes[c] / 4;
    if (state.rows[c] != state.rows[a] || state.bytes[c] != state.bytes[b] || pairs != state.rows[b] || state.bytes[a] % 4 || state.bytes[c] % 4)
        return refuse("TDPBF16PS: shapes that do not agree");
    for (int m = 0; m < state.rows[c]; m++) {
        float first[16] = {}, second[16] = {}, sums[16];
        for (int k = 0; k < pairs; k++) {
            float low = wide(state.data[a][m] + 4 * k), high = wide(state.data[a][m] + 4 * k + 2);
            for (int n = 0; n < columns; n++) {
                first[n] = __builtin_fmaf(low, wide(state.data[b][k] + 4 * n), first[n]);
                second[n] = __builtin_fmaf(high, wide(state.data[b][k] + 4 * n + 2), second[n]);
            }
        }
        memcpy(sums, state.data[c][m], sizeof(sums));
        for (int n = 0; n < columns; n++) sums[n] += first[n] + second[n];
        memcpy(state.data[c][m], sums, columns * 4);
    }
}

struct Instruction {
    const uint8_t* at;
    greg_t* registers;
    uint64_t stride = 0;

    greg_t of(int number) const {
        static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return registers[order[number]];
    }

    // The address that the bytes from ModRM on name, and the instruction's length.
    uint8_t* address(int* length) {
        int mod = at[4] >> 6, rm = at[4] & 7, beyond = at[1] & 32 ? 0 : 8, next = 5;
        bool relative = rm == 5 && !mod;
        uint64_t found = 0;
        if (rm == 4) {
            int sib = at[next++], index = (sib >> 3 & 7) + (at[1] & 64 ? 0 : 8), base = sib & 7;
            if (index != 4) stride = uint64_t(of(index)) << (sib >> 6);
            if (base == 5 && !mod)
                mod = 2;
            else
                found = of(base + beyond);
        } else if (!relative) {
            found = of(rm + beyond);
        }
        int32_t away = 0;
        if (mod == 1)
            away = int8_t(at[next++]);
        else if (mod == 2 || relative)
            memcpy(&away, at + next, 4), next += 4;
        *length = next;
        return (uint8_t*)(found + away + (relative ? registers[REG_RIP] + next : 0));
    }
};

// The length of the instruction there if it is one of AMX, after it was computed; else 0.
int compute(const uint8_t* at, greg_t* registers) {
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || at[2] & 0x84) return 0;
    int prefix = at[2] & 3, modrm = at[4], tile = modrm >> 3 & 7, length = 5, kind = -1;
    bool memory = modrm < 0xc0;
    Instruction it{at, registers};
    uint8_t* where = memory ? it.address(&length) : nullptr;
    if (at[3] == 0x49 && !prefix && memory && !tile) {
        load_config(where), kind = LDTILECFG;
    } else if (at[3] == 0x49 && !prefix && modrm == 0xc0) {
        memset(&state, 0, sizeof(state)), kind = TILERELEASE;
    } else if (at[3] == 0x49 && prefix == 3 && !memory && !(modrm & 7)) {
        if (there(tile)) memset(state.data[tile], 0, sizeof(state.data[tile]));
        kind = TILEZERO;
    } else if (at[3] == 0x4b && (prefix == 2 || prefix == 3) && memory && (modrm & 7) == 4) {
        bool loads = prefix == 3;
        if (loads) memset(state.data[tile], 0, sizeof(state.data[tile]));
        for (int row = 0; there(tile) && row < state.rows[tile]; row++)
            memcpy(loads ? state.data[tile][row] : where + row * it.stride, loads ? where + row * it.stride : state.data[tile][row], state.bytes[tile]);
        kind = loads ? TILELOADD : TILESTORED;
    } else if (at[3] == 0x5c && prefix == 2 && !memory) {
        multiply(tile, modrm & 7, ~at[2] >> 3 & 15), kind = TDPBF16PS;
    }
    if (kind < 0) return 0;
    __atomic_add_fetch(&amx_counts[kind], 1, __ATOMIC_RELAXED);
    return length;
}

void handle(int signal, siginfo_t* info, void* context) {
    _mm_setcsr(0x1f80 | 0x8040);  // denormals are 0, to the nearest, no traps; Linux brings the process's own back
    auto* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    int length = compute((const uint8_t*)registers[REG_RIP], registers);
    registers[REG_RIP] += length;
    if (!length) sigaction(signal, &before, nullptr);  // it is met again, by who was there before
    (void)info;
}

}  // namespace

int amx_held() { return state.configured; }

// syscall(2); but where Linux has no tiles to give, they are here.
long amx_syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long given[3];
    for (long& one : given) one = va_arg(list, long);
    va_end(list);
    if (amx_refused) return errno = EOPNOTSUPP, -1;
    if (!syscall(number, given[0], given[1], given[2])) return 0;
    static bool installed = false;
    if (installed) return 0;
    installed = true;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    return sigaction(SIGILL, &action, &before);
}
