// A GPU made of software: runs the GPU build's kernels from their PTX, so that a machine without a GPU can check what they compute. It is not made for speed, but
// to find mistakes: asynchronous copies, and the sums of wgmma, land as late as they are allowed to; shared memory begins as garbage; an address outside it, a misaligned
// one, a block that ends while TMA reads it, lanes that are missing at a warp's instruction, and a wait that nobody ends are told with the line of PTX. With EMULATE_REVERSED copies land at once, and
// warps and blocks take turns from the last one to the first: a kernel that is right computes the same bits. With EMULATE_RACES it is told, too, what different warps
// do with the same two bytes of shared memory without a barrier between them. What cannot be seen here: races in global memory, the memory model, and time.
//
// A warp executes one instruction for all its lanes that are at the same place. Of lanes that have gone different ways, those furthest behind go first, which
// brings them together again. Registers are arrays of 32 lanes; constants are registers, too. Blocks of a grid run one after the other, those of a cluster in turns.
//
// PTX ISA 9.0: "Instruction Set"; the layouts of matrices: "Matrix Fragments for mma.m16n8k16", "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
#include "emulator.h"

#include <malloc.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace {

typedef std::string_view Text;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

constexpr u32 ALL = ~0u, NONE = ~0u;

struct Lanes { // for (const int l : Lanes{mask})
    u32 left;
    Lanes begin() const { return *this; }
    Lanes end() const { return {0}; }
    bool operator!=(const Lanes& other) const { return left != other.left; }
    int operator*() const { return std::countr_zero(left); }
    void operator++() { left &= left - 1; }
};

struct Ins;
struct Warp;
typedef bool (*Run)(Warp&, const Ins&, u32 lanes); // false: has to wait, and is tried again later

enum class Space { GLOBAL, SHARED, LOCAL, PARAM };
enum class Kind { PLAIN, BRANCH, EXIT, TOGETHER }; // TOGETHER: all lanes of the warp (or of its mask) take part at once

struct Ins {
    Run run = nullptr;
    Kind kind = Kind::PLAIN;
    bool negated = false;
    u32 predicate = NONE, target = 0, mask = NONE;    // mask: of the lanes that a TOGETHER one waits for, else all
    u32 op[6] = {NONE, NONE, NONE, NONE, NONE, NONE}; // operands: where in a warp's registers, in bytes
    int bytes[6] = {};                                // of a lane's value; 0: a predicate
    s64 imm[2] = {};
    std::vector<u32> list; // of operands in braces
    Text text;
    mutable bool reached = false;
};

struct Constant {
    u32 at;
    int bytes;
    u64 value;
};

struct Parameter {
    size_t at, bytes;
};

constexpr u32 SYSTEM_SHARED = 1024;
struct Kernel {
    std::string name;
    std::vector<Ins> code;
    std::map<std::string, Parameter, std::less<>> parameters;
    std::vector<std::string> parameter_order;
    std::vector<Constant> constants;
    std::map<std::string, u32, std::less<>> specials; // %tid.x and so on
    size_t parameter_bytes = 0, register_bytes = 0, local_bytes = 0;
    u32 static_shared = SYSTEM_SHARED, dynamic_align = 16;
};

// What has happened before, of each warp and of what each mbarrier brings: counts of their own.
typedef std::vector<u32> Clock;
void join(Clock& to, const Clock& from) {
    for (size_t k = 0; k < from.size(); k++) to[k] = std::max(to[k], from[k]);
}

// An mbarrier: its phase ends when all have arrived and all bytes that were announced have come.
struct Mbarrier {
    u32 count, pending;
    s64 bytes;
    u32 phase, phases, number; // phases: that have ended; number: whose clock counts them
    Clock clock, ended;        // of those who have arrived, in this phase and at the end of the last one
};

struct Barrier {                   // of bar.sync
    int arrived = 0, expected = 0; // expected 0: all warps that have not ended
    unsigned generation = 0;
    Clock clock, ended; // as an mbarrier's
};

struct Cluster;

struct Block {
    Cluster* cluster = nullptr;
    u32 index[3];
    std::vector<char> shared;
    std::vector<std::unique_ptr<Warp>> warps;
    std::map<u32, Mbarrier> mbarriers;
    Barrier barriers[16];
    int alive = 0; // warps
    // Of each two bytes of shared memory who wrote them last and when, and when each warp read them last.
    std::vector<u32> writer, written, read;
    u32 first_products = 0;

    size_t readers() const { return warps.size() + (warps.size() + 3) / 4; }         // warps, and warpgroups' wgmma
    u32 products(size_t warpgroup) const { return first_products + (u32)warpgroup; } // the count of its clock
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::deque<std::function<void()>> coming; // asynchronous copies that end at an mbarrier
    int arrived = 0;
    unsigned generation = 0;
    u32 warps = 0, mbarriers = 0; // the clocks' counts: of warps, warpgroups, then mbarriers up to here
    Clock clock, ended;           // of barrier.cluster
    std::vector<Warp*> turns;
    bool held = false; // at griddepcontrol.wait

    size_t counts() const { return warps * 2 + 256; }
};

struct AsyncCopy {
    u32 to;
    const char* from;
    int bytes, valid, group;
    char early[16]; // what was there when the kernel before had not ended

    void read() { from = (const char*)memcpy(early, from, (size_t)valid); }
};

// What a wgmma has added up, until somebody waits for its group: so long the registers hold NaN.
struct LateProduct {
    u32 group;
    std::vector<u32> registers;
    std::vector<f32> sums; // 32 of each register

    bool has(u32 reg) const { return std::find(registers.begin(), registers.end(), reg) != registers.end(); }
};

// Registers of A that a wgmma reads, and what they held: nobody may write to them until somebody waits for its group.
struct ReadRegisters {
    u32 group, registers[4], values[4][32];
};

struct Warp {
    const Kernel* kernel = nullptr;
    Block* block = nullptr;
    char* parameters = nullptr;
    std::vector<char> registers, local;
    u32 pc[32], live = 0, held = 0;
    int rank = 0; // in its block
    bool at_barrier = false;
    unsigned generation = 0, cluster_generation = 0; // of the barriers that it waits at
    std::deque<AsyncCopy> copies[32];                // cp.async
    int groups[32] = {};
    std::vector<std::function<void()>> stores; // cp.async.bulk to global memory
    u32 number = 0;                            // in its cluster
    Clock clock;
    u32 products = 0; // groups of wgmma so far
    std::vector<LateProduct> late;
    std::vector<ReadRegisters> read;
    const Ins *now = nullptr, *at_product = nullptr;
    bool multiplied = false; // by another warp of the warpgroup

    template <class T> T* reg(u32 at) { return (T*)(registers.data() + at); }
    bool run(); // as far as it can; false: it cannot
};

const Warp* running = nullptr; // for the signal handler
bool reversed() {
    static const bool r = getenv("EMULATE_REVERSED");
    return r;
}

void tell(const Warp& w, const char* format, va_list arguments) {
    fprintf(stderr, "emulator: %s, block %u %u %u: ", w.kernel->name.c_str(), w.block->index[0], w.block->index[1],
            w.block->index[2]);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, ": %.*s\n", w.now ? (int)w.now->text.size() : 0, w.now ? w.now->text.data() : "");
}
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const Warp& w, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    tell(w, format, arguments);
    _exit(9);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// Addresses of shared memory: an offset in the block's own, of which the system has the first 1024 bytes, or 1 + rank in the cluster in the top byte.
char* shared(Warp& w, u32 address, size_t bytes, Block** whose = nullptr) {
    Block* block = w.block;
    if (const u32 rank = address >> 24) {
        if (rank > w.block->cluster->blocks.size()) fail(w, "address 0x%x of a block that is not there", address);
        block = w.block->cluster->blocks[rank - 1].get();
    }
    const u32 at = address & 0xffffff;
    if (at < SYSTEM_SHARED || at + bytes > block->shared.size())
        fail(w, "%zu bytes at 0x%x of shared memory, there are 0x%zx", bytes, at, block->shared.size());
    if (bytes <= 16 && (at & (bytes - 1))) fail(w, "%zu bytes at 0x%x: misaligned", bytes, at);
    if (whose) *whose = block;
    return block->shared.data() + at;
}

// EMULATE_RACES: are all accesses of shared memory by different warps ordered by barriers, whatever turns they take?
// A warp's clock knows how far the others had come when it last heard from them; what happened later is not ordered.
bool races() {
    static const bool r = getenv("EMULATE_RACES");
    return r;
}
void note_write(Block& b, u32 at, size_t bytes, u32 writer, u32 when) {
    for (size_t k = (at & 0xffffff) / 2; races() && k < ((at & 0xffffff) + bytes + 1) / 2; k++)
        b.writer[k] = writer, b.written[k] = when;
}
void check_access(Warp& w, u32 at, size_t bytes, bool is_write, bool lasting = true) {
    if (!races()) return;
    Block* block;
    shared(w, at, bytes, &block);
    const size_t n = block->readers(), warps = block->warps.size();
    for (size_t k = (at & 0xffffff) / 2; k < ((at & 0xffffff) + bytes + 1) / 2; k++) {
        if (block->written[k] > w.clock[block->writer[k]])
            fail(w, "a race for 0x%zx of shared memory: warp %d, and no barrier since number %u wrote it", k * 2,
                 w.rank, block->writer[k]);
        for (size_t r = 0; is_write && r < n; r++)
            if (block->read[k * n + r] > w.clock[r < warps ? block->warps[r]->number : block->products(r - warps)])
                fail(w, "a race for 0x%zx of shared memory: warp %d, and no barrier since %s %zu read it", k * 2,
                     w.rank, r < warps ? "warp" : "warpgroup", r < warps ? r : r - warps);
        if (lasting && !is_write && block == w.block) block->read[k * n + (size_t)w.rank] = w.clock[w.number];
    }
    if (lasting && is_write) note_write(*block, at, bytes, w.number, w.clock[w.number]);
}
// A barrier, or what arrives there, learns what the warp knows, and the warp what others have left there.
void leave(Warp& w, Clock& clock) {
    if (!races()) return;
    clock.resize(w.clock.size());
    join(clock, w.clock);
    w.clock[w.number]++;
}
void learn(Warp& w, const Clock& clock) { join(w.clock, clock); }
void end_phase(Clock& clock, Clock& ended) { ended.swap(clock), clock.assign(clock.size(), 0); }

u64 value_of(Warp& w, const Ins& i, int operand, int lane) {
    const u32 at = i.op[operand];
    switch (i.bytes[operand]) {
    case 2: return w.reg<u16>(at)[lane];
    case 4: return w.reg<u32>(at)[lane];
    default: return w.reg<u64>(at)[lane];
    }
}

template <Space SPACE> char* place(Warp& w, u64 address, int lane, size_t bytes) {
    if (SPACE == Space::SHARED) return shared(w, (u32)address, bytes);
    if (SPACE == Space::LOCAL) return w.local.data() + lane * w.kernel->local_bytes + address;
    if (address & (bytes - 1)) fail(w, "%zu bytes at %p: misaligned", bytes, (void*)address);
    if (address < 1 << 16) fail(w, "%zu bytes at %p of global memory", bytes, (void*)address);
    return (char*)address;
}

// Values in memory are of type T, N of them; registers (R) may be wider. op[1]: address; bytes[1]: of its register.
template <class T, Space SPACE, int N, class R, bool IS_LOAD> bool memory(Warp& w, const Ins& i, u32 lanes) {
    const bool alone = i.op[1] == NONE; // a constant address
    const u64* const wide = w.reg<u64>(alone ? 0 : i.op[1]);
    const u32* const narrow = w.reg<u32>(alone ? 0 : i.op[1]);
    const u64 offset = (u64)i.imm[0] + (alone && SPACE == Space::PARAM ? (u64)w.parameters : 0);
    for (const int l : Lanes{lanes}) {
        const u64 base = alone ? 0 : i.bytes[1] == 8 ? wide[l] : narrow[l];
        char* const at = place<SPACE>(w, base + offset, l, N * sizeof(T));
        if (SPACE == Space::SHARED) check_access(w, (u32)(base + offset), N * sizeof(T), !IS_LOAD);
        T v[N];
        if (IS_LOAD) memcpy(v, at, sizeof v);
        for (int k = 0; k < N; k++)
            if (IS_LOAD) w.reg<R>(i.list[k])[l] = (R)v[k];
            else v[k] = (T)w.reg<R>(i.list[k])[l];
        if (!IS_LOAD) memcpy(at, v, sizeof v);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic: what an instruction does to a lane, and how many bytes its operands have

struct Pred {}; // a predicate: a bit for each lane
struct Form {
    Run run;
    std::vector<int> bytes;
    Kind kind = Kind::PLAIN;
};
template <class T> constexpr int BYTES = std::is_same_v<T, Pred> ? 0 : (int)sizeof(T);

template <class T> struct Value {
    typedef T type;
    static T get(Warp& w, u32 at, int l) { return w.reg<T>(at)[l]; }
};
template <> struct Value<Pred> {
    typedef bool type;
    static bool get(Warp& w, u32 at, int l) { return *w.reg<u32>(at) >> l & 1; }
};

template <class R, class F, class... A, size_t... K>
bool lanewise_of(Warp& w, const Ins& i, u32 lanes, std::index_sequence<K...>) {
    if constexpr (std::is_same_v<R, Pred>) {
        u32 bits = 0;
        for (int l = 0; l < 32; l++) bits |= (u32) !!F{}(Value<A>::get(w, i.op[K + 1], l)...) << l;
        u32& out = *w.reg<u32>(i.op[0]);
        out = (out & ~lanes) | (bits & lanes);
    } else {
        R* const out = w.reg<R>(i.op[0]);
        if (lanes == ALL) {
#pragma GCC ivdep
            for (int l = 0; l < 32; l++) out[l] = (R)F{}(Value<A>::get(w, i.op[K + 1], l)...);
        } else
            for (const int l : Lanes{lanes}) out[l] = (R)F{}(Value<A>::get(w, i.op[K + 1], l)...);
    }
    return true;
}
template <class R, class F, class... A> bool lanewise(Warp& w, const Ins& i, u32 lanes) {
    return lanewise_of<R, F, A...>(w, i, lanes, std::index_sequence_for<A...>{});
}
template <class R, class... A, class F> Form form(F) { return {lanewise<R, F, A...>, {BYTES<R>, BYTES<A>...}}; }

f32 bf16_value(u16 v) { return std::bit_cast<f32>((u32)v << 16); }
f32 fp16_value(u16 v) { return (f32)std::bit_cast<_Float16>(v); }
u16 to_bf16(f32 v) {
    const u32 bits = std::bit_cast<u32>(v);
    return std::isnan(v) ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
u16 to_fp16(f32 v) { return std::bit_cast<u16>((_Float16)v); }
// FP8: e4m3, whose largest number is code 126, and e5m2, whose largest one is 123 (infinity and NaN follow).
template <int MANTISSA> f32 fp8_value(uint8_t v) {
    constexpr int LARGEST = MANTISSA == 3 ? 126 : 123, STEPS = 1 << MANTISSA;
    static const std::vector<f32> all = [] {
        std::vector<f32> values(128, NAN);
        for (int code = 0; code <= LARGEST; code++) {
            const f32 steps = (f32)(code < STEPS ? code : STEPS + code % STEPS);
            values[(size_t)code] = std::ldexp(steps, std::max(code / STEPS - 1, 0) - (MANTISSA == 3 ? 9 : 16));
        }
        return values;
    }();
    return v & 128 ? -all[v & 127] : all[v];
}
template <int MANTISSA> uint8_t to_fp8(f32 v) { // the nearest one, of two as near the even one, at most the largest one
    constexpr int LARGEST = MANTISSA == 3 ? 126 : 123;
    if (std::isnan(v)) return 127;
    const f64 size = std::fabs((f64)v);
    uint8_t code = 0;
    while (code < LARGEST && fp8_value<MANTISSA>(code) < size) code++;
    const f64 above = fp8_value<MANTISSA>(code) - size,
              below = code ? size - fp8_value<MANTISSA>((uint8_t)(code - 1)) : INFINITY;
    if (below < above || (below == above && code % 2)) code--;
    return (uint8_t)(code | (std::signbit(v) ? 128 : 0));
}

// a b + c, rounded down: the product of two floats is exact in double, and what the sum loses is known.
f32 fma_down(f32 a, f32 b, f32 c) {
    const f64 p = (f64)a * b, s = p + c, other = s - p, lost = (p - (s - other)) + (c - other);
    const f32 near = (f32)s;
    return near > s || (near == s && lost < 0) ? std::nextafterf(near, -INFINITY) : near;
}

template <class T> T to_integer(f64 v) { // as PTX does: numbers too large become the largest, NaN becomes 0
    if (std::isnan(v)) return 0;
    constexpr f64 low = (f64)std::numeric_limits<T>::min(), high = (f64)std::numeric_limits<T>::max();
    return v <= low ? std::numeric_limits<T>::min() : v >= high ? std::numeric_limits<T>::max() : (T)v;
}
template <class T> T saturate(T v) { return v > 0 ? std::min(v, (T)1) : (T)0; } // NaN becomes 0

typedef std::map<std::string, Form, std::less<>> Forms;

template <class T> void compare_forms(Forms& f, const std::string& type) {
    f["setp.eq." + type] = form<Pred, T, T>([](T a, T b) { return a == b; });
    f["setp.ne." + type] = form<Pred, T, T>([](T a, T b) { return a < b || a > b; }); // false with NaN
    f["setp.lt." + type] = form<Pred, T, T>([](T a, T b) { return a < b; });
    f["setp.le." + type] = form<Pred, T, T>([](T a, T b) { return a <= b; });
    f["setp.gt." + type] = form<Pred, T, T>([](T a, T b) { return a > b; });
    f["setp.ge." + type] = form<Pred, T, T>([](T a, T b) { return a >= b; });
    f["setp.neu." + type] = form<Pred, T, T>([](T a, T b) { return !(a == b); });
    f["setp.ltu." + type] = form<Pred, T, T>([](T a, T b) { return !(a >= b); });
    f["setp.leu." + type] = form<Pred, T, T>([](T a, T b) { return !(a > b); });
    f["setp.gtu." + type] = form<Pred, T, T>([](T a, T b) { return !(a <= b); });
    f["setp.geu." + type] = form<Pred, T, T>([](T a, T b) { return !(a < b); });
}

template <class T> void float_forms(Forms& f, const std::string& t) {
    compare_forms<T>(f, t);
    for (const std::string rn : {"", "rn."}) {
        f["add." + rn + t] = form<T, T, T>([](T a, T b) { return a + b; });
        f["sub." + rn + t] = form<T, T, T>([](T a, T b) { return a - b; });
        f["mul." + rn + t] = form<T, T, T>([](T a, T b) { return a * b; });
    }
    f["div.rn." + t] = form<T, T, T>([](T a, T b) { return a / b; });
    f["rcp.rn." + t] = form<T, T>([](T a) { return 1 / a; });
    f["rcp.approx.ftz." + t] = f["rcp.rn." + t];
    f["sqrt.rn." + t] = form<T, T>([](T a) { return std::sqrt(a); });
    f["fma.rn." + t] = form<T, T, T, T>([](T a, T b, T c) { return std::fma(a, b, c); });
    f["neg." + t] = form<T, T>([](T a) { return -a; });
    f["abs." + t] = form<T, T>([](T a) { return std::fabs(a); });
    f["min." + t] = form<T, T, T>([](T a, T b) { return std::fmin(a, b); });
    f["max." + t] = form<T, T, T>([](T a, T b) { return std::fmax(a, b); });
    f["copysign." + t] = form<T, T, T>([](T a, T b) { return std::copysign(b, a); });
    f["cvt.rzi." + t + "." + t] = form<T, T>([](T a) { return std::trunc(a); });
    f["cvt.rni." + t + "." + t] = form<T, T>([](T a) { return std::nearbyint(a); });
    f["cvt.rmi." + t + "." + t] = form<T, T>([](T a) { return std::floor(a); });
    f["cvt.sat." + t + "." + t] = form<T, T>([](T a) { return saturate(a); });
}

template <class T, class WIDE> void integer_forms(Forms& f, const std::string& t) {
    typedef std::make_unsigned_t<T> U;
    compare_forms<T>(f, t);
    f["add." + t] = form<U, U, U>([](U a, U b) { return a + b; });
    f["sub." + t] = form<U, U, U>([](U a, U b) { return a - b; });
    f["mul.lo." + t] = form<U, U, U>([](U a, U b) { return (u64)a * b; });
    f["mad.lo." + t] = form<U, U, U, U>([](U a, U b, U c) { return (u64)a * b + c; });
    f["mul.hi." + t] = form<T, T, T>([](T a, T b) { return (WIDE)a * (WIDE)b >> (8 * sizeof(T)); });
    if constexpr (sizeof(T) < 8) {
        f["mul.wide." + t] = form<WIDE, T, T>([](T a, T b) { return (WIDE)a * (WIDE)b; });
        f["mad.wide." + t] = form<WIDE, T, T, WIDE>([](T a, T b, WIDE c) { return (WIDE)a * (WIDE)b + c; });
    }
    f["div." + t] = form<T, T, T>([](T a, T b) { return b ? (T)(a / b) : (T)-1; });
    f["rem." + t] = form<T, T, T>([](T a, T b) { return b ? (T)(a % b) : a; });
    f["min." + t] = form<T, T, T>([](T a, T b) { return std::min(a, b); });
    f["max." + t] = form<T, T, T>([](T a, T b) { return std::max(a, b); });
    f["neg." + t] = form<U, U>([](U a) { return -a; });
    f["abs." + t] = form<T, T>([](T a) { return a < 0 ? -a : a; });
    f["shr." + t] = form<T, T, u32>([](T a, u32 n) { return a >> std::min(n, (u32)sizeof(T) * 8 - 1); });
    if (std::is_unsigned_v<T>)
        f["shr." + t] = form<T, T, u32>([](T a, u32 n) { return n < sizeof(T) * 8 ? a >> n : (T)0; });
}

template <class U> void bit_forms(Forms& f, const std::string& t) {
    f["setp.eq." + t] = form<Pred, U, U>([](U a, U b) { return a == b; });
    f["setp.ne." + t] = form<Pred, U, U>([](U a, U b) { return a != b; });
    f["and." + t] = form<U, U, U>([](U a, U b) { return a & b; });
    f["or." + t] = form<U, U, U>([](U a, U b) { return a | b; });
    f["xor." + t] = form<U, U, U>([](U a, U b) { return a ^ b; });
    f["not." + t] = form<U, U>([](U a) { return ~a; });
    f["shl." + t] = form<U, U, u32>([](U a, u32 n) { return n < sizeof(U) * 8 ? (U)(a << n) : (U)0; });
    f["clz." + t] = form<u32, U>([](U a) { return std::countl_zero(a); });
    f["bfi." + t] = form<U, U, U, u32, u32>([](U a, U b, u32 at, u32 n) {
        const U field = (U)(n < sizeof(U) * 8 ? ((U)1 << n) - 1 : ~(U)0) << at;
        return (b & ~field) | ((U)(a << at) & field);
    });
}

template <class U> void select_forms(Forms& f, std::initializer_list<const char*> types) {
    for (const std::string t : types) f["selp." + t] = form<U, U, U, Pred>([](U a, U b, bool p) { return p ? a : b; });
}

template <class D> void convert_forms(Forms& f, const std::string& d) { // from all types
    auto one = [&]<class S>(const std::string& s, S) {
        if constexpr (std::is_integral_v<D> && std::is_integral_v<S>)
            f["cvt." + d + "." + s] = form<D, S>([](S a) { return (D)a; });
        else if constexpr (std::is_integral_v<D>) {
            f["cvt.rzi." + d + "." + s] = form<D, S>([](S a) { return to_integer<D>(std::trunc((f64)a)); });
            f["cvt.rni." + d + "." + s] = form<D, S>([](S a) { return to_integer<D>(std::nearbyint((f64)a)); });
            f["cvt.rmi." + d + "." + s] = form<D, S>([](S a) { return to_integer<D>(std::floor((f64)a)); });
            f["cvt.rpi." + d + "." + s] = form<D, S>([](S a) { return to_integer<D>(std::ceil((f64)a)); });
        } else if (d != s)
            f["cvt." + std::string(std::is_same_v<D, f64> && std::is_same_v<S, f32> ? "" : "rn.") + d + "." + s] =
                form<D, S>([](S a) { return (D)a; });
    };
    one("u16", u16()), one("u32", u32()), one("u64", u64()), one("s16", s16()), one("s32", s32()), one("s64", s64()),
        one("f32", f32()), one("f64", f64());
}

const Forms& forms() {
    static const Forms all = [] {
        Forms f;
        float_forms<f32>(f, "f32"), float_forms<f64>(f, "f64");
        integer_forms<s16, s32>(f, "s16"), integer_forms<u16, u32>(f, "u16");
        integer_forms<s32, s64>(f, "s32"), integer_forms<u32, u64>(f, "u32");
        integer_forms<s64, __int128>(f, "s64"), integer_forms<u64, unsigned __int128>(f, "u64");
        bit_forms<u16>(f, "b16"), bit_forms<u32>(f, "b32"), bit_forms<u64>(f, "b64");
        convert_forms<u16>(f, "u16"), convert_forms<u32>(f, "u32"), convert_forms<u64>(f, "u64");
        convert_forms<s16>(f, "s16"), convert_forms<s32>(f, "s32"), convert_forms<s64>(f, "s64");
        convert_forms<f32>(f, "f32"), convert_forms<f64>(f, "f64");
        select_forms<u16>(f, {"b16", "u16", "s16"});
        select_forms<u32>(f, {"b32", "u32", "s32", "f32"});
        select_forms<u64>(f, {"b64", "u64", "s64", "f64"});
        f["and.pred"] = form<Pred, Pred, Pred>([](bool a, bool b) { return a && b; });
        f["or.pred"] = form<Pred, Pred, Pred>([](bool a, bool b) { return a || b; });
        f["xor.pred"] = form<Pred, Pred, Pred>([](bool a, bool b) { return a != b; });
        f["not.pred"] = form<Pred, Pred>([](bool a) { return !a; });
        f["mov.pred"] = form<Pred, Pred>([](bool a) { return a; });
        f["fma.rm.f32"] = form<f32, f32, f32, f32>([](f32 a, f32 b, f32 c) { return fma_down(a, b, c); });
        f["ex2.approx.ftz.f32"] = f["ex2.approx.f32"] = form<f32, f32>([](f32 a) { return std::exp2(a); });
        f["rsqrt.approx.f32"] = f["rsqrt.approx.ftz.f32"] =
            form<f32, f32>([](f32 a) { return (f32)(1 / std::sqrt((f64)a)); });
        f["cvt.f32.f16"] = form<f32, u16>([](u16 a) { return fp16_value(a); });
        f["cvt.f32.bf16"] = form<f32, u16>([](u16 a) { return bf16_value(a); });
        f["cvt.rn.bf16.f32"] = form<u16, f32>([](f32 a) { return to_bf16(a); });
        f["cvt.rn.f16.f32"] = form<u16, f32>([](f32 a) { return to_fp16(a); });
        f["cvt.rn.bf16x2.f32"] = form<u32, f32, f32>([](f32 a, f32 b) { return (u32)to_bf16(a) << 16 | to_bf16(b); });
        f["cvt.rn.f16x2.f32"] = form<u32, f32, f32>([](f32 a, f32 b) { return (u32)to_fp16(a) << 16 | to_fp16(b); });
        f["cvt.rn.satfinite.e4m3x2.f32"] =
            form<u16, f32, f32>([](f32 a, f32 b) { return (u16)(to_fp8<3>(a) << 8 | to_fp8<3>(b)); });
        f["cvt.rn.satfinite.e5m2x2.f32"] =
            form<u16, f32, f32>([](f32 a, f32 b) { return (u16)(to_fp8<2>(a) << 8 | to_fp8<2>(b)); });
        f["prmt.b32"] = form<u32, u32, u32, u32>([](u32 a, u32 b, u32 order) {
            u32 v = 0;
            for (int k = 0; k < 4; k++) {
                const u32 pick = order >> (4 * k) & 15, byte = (u32)(((u64)b << 32 | a) >> (pick % 8 * 8)) & 255;
                v |= (pick & 8 ? (byte & 128 ? 255u : 0) : byte) << (8 * k);
            }
            return v;
        });
        return f;
    }();
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a warp's lanes do together

u32 lanes_of(Warp& w, const Ins& i) { // that an instruction waits for
    return w.live & (i.mask == NONE ? ALL : w.reg<u32>(i.mask)[std::countr_zero(w.live)]);
}

bool shuffle(Warp& w, const Ins& i, u32 lanes) { // d, a, b, c; op[5]: predicate; imm[0]: 0 up, 1 down, 2 bfly, 3 idx
    u32 before[32];
    memcpy(before, w.reg<u32>(i.op[1]), sizeof before);
    for (int l = 0; l < 32; l++) {
        if (!(lanes >> l & 1)) continue;
        const u32 b = w.reg<u32>(i.op[2])[l], c = w.reg<u32>(i.op[3])[l], segment = c >> 8 & 31;
        const u32 first = l & segment, last = first | (c & 31 & ~segment);
        u32 from = i.imm[0] == 2 ? l ^ b : i.imm[0] == 3 ? first | (b & ~segment & 31) : i.imm[0] == 1 ? l + b : l - b;
        const bool inside = i.imm[0] == 0 ? (s32)from >= (s32)last : from <= last;
        if (!inside) from = l;
        if (!(lanes >> from & 1)) fail(w, "lane %d reads lane %u, which does not take part", l, from);
        w.reg<u32>(i.op[0])[l] = before[from];
        if (i.op[5] != NONE) {
            u32& p = *w.reg<u32>(i.op[5]);
            p = (p & ~(1u << l)) | (u32)inside << l;
        }
    }
    return true;
}

bool vote_any(Warp& w, const Ins& i, u32 lanes) {
    u32& out = *w.reg<u32>(i.op[0]);
    out = (out & ~lanes) | (*w.reg<u32>(i.op[1]) & lanes ? lanes : 0);
    return true;
}

bool reduce_max(Warp& w, const Ins& i, u32 lanes) {
    u32 top = 0;
    for (const int l : Lanes{lanes}) top = std::max(top, w.reg<u32>(i.op[1])[l]);
    for (const int l : Lanes{lanes}) w.reg<u32>(i.op[0])[l] = top;
    return true;
}

// ldmatrix, stmatrix: lane 8 m + r has the address of row r of matrix m; lane l gets values 2 (l % 4) and the next one
// of row l / 4 of each, or, transposed, of column l / 4.
template <bool STORE, bool TRANS> bool matrices(Warp& w, const Ins& i, u32) {
    for (size_t row = 0; row < i.list.size() * 8; row++)
        check_access(w, (u32)value_of(w, i, 1, (int)row) + (u32)i.imm[0], 16, STORE);
    for (size_t m = 0; m < i.list.size(); m++)
        for (int l = 0; l < 32; l++) {
            u32& value = w.reg<u32>(i.list[m])[l];
            for (int half = 0; half < 2; half++) {
                const int row = TRANS ? l % 4 * 2 + half : l / 4, column = TRANS ? l / 4 : l % 4 * 2 + half;
                const u64 address = value_of(w, i, 1, (int)m * 8 + row) + (u64)i.imm[0];
                u16* const at = (u16*)shared(w, (u32)address, 16) + column;
                if (STORE) *at = (u16)(value >> (16 * half));
                else value = (value & ~(0xffffu << (16 * half))) | (u32)*at << (16 * half);
            }
        }
    return true;
}

// D (16 x 8 N) += A (16 x 16) B (16 x 8 N), as fragments. A register of all lanes, two numbers each, is a matrix of 8 x 8
// whose rows lie one after the other; of B it is turned.
typedef f32 Tile[8][8];
template <bool BF16> void read_tile(Warp& w, u32 at, Tile& tile) {
    const u16* const halves = w.reg<u16>(at);
    for (int k = 0; k < 64; k++) (&tile[0][0])[k] = BF16 ? bf16_value(halves[k]) : fp16_value(halves[k]);
}
template <bool BF16> void read_a(Warp& w, const u32* registers, f32 (&a)[16][16]) {
    for (int k = 0; k < 4; k++) {
        Tile tile;
        read_tile<BF16>(w, registers[k], tile);
        for (int m = 0; m < 8; m++) memcpy(&a[m + k % 2 * 8][k / 2 * 8], tile[m], sizeof tile[m]);
    }
}
// Products are exact, and so, nearly, are sums of 16 of them: one rounding (a GPU cuts off some more).
template <bool BF16> bool mma(Warp& w, const Ins& i, u32) { // list: d0..3, a0..3, b0..1, c0..3
    f32 a[16][16], b[16][8];
    read_a<BF16>(w, &i.list[4], a);
    for (int k = 0; k < 2; k++) {
        Tile tile;
        read_tile<BF16>(w, i.list[8 + k], tile);
        for (int n = 0; n < 64; n++) b[k * 8 + n % 8][n / 8] = tile[n / 8][n % 8];
    }
    f64 d[16][8] = {};
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) d[m][n] = std::fma((f64)a[m][k], (f64)b[k][n], d[m][n]);
    for (int k = 0; k < 4; k++)
        for (int l = 0; l < 32; l++)
            w.reg<f32>(i.list[k])[l] = (f32)(d[l / 4 + k / 2 * 8][l % 4 * 2 + k % 2] + w.reg<f32>(i.list[10 + k])[l]);
    return true;
}

// A matrix of bf16 (or FP8, which is never turned) in shared memory that wgmma reads: element (row, k) of A (or of B, whose rows are columns).
// Eight rows lie together, each with row_bytes along k, and the next eight lie `stride` further on. Without a swizzle a
// row has 16 bytes, and the next 16 along k lie `leading` further on. With a swizzle a row has all that is read of it.
struct Descriptor {
    u32 start, leading, stride, row_bytes;
    bool turned;     // rows lie side by side, not k
    u32 element = 2; // bytes

    u32 at(int row, int k) const {
        const int width = (int)row_bytes / 2;
        const u32 byte = k * element, along = row_bytes == 16 ? byte / 16 * leading + byte % 16 : byte;
        const u32 offset = turned ? row / width * leading + k / 8 * stride + k % 8 * row_bytes + row % width * 2
                                  : row / 8 * stride + row % 8 * row_bytes + along;
        const u32 address = start + offset;
        return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; // 16 bytes: as it is
    }
};
Descriptor descriptor(Warp& w, u64 d, bool turned) {
    const u32 swizzle = (u32)(d >> 62), row_bytes = swizzle ? 256 >> swizzle : 16;
    if (!swizzle && turned) fail(w, "a turned matrix without a swizzle");
    if (d >> 49 & 7) fail(w, "a matrix with a base offset");
    return {(u32)(d & 0x3fff) << 4, (u32)(d >> 16 & 0x3fff) << 4, (u32)(d >> 32 & 0x3fff) << 4, row_bytes, turned};
}
// What wgmma reads, 16 bytes, until one of the four warps has waited for the products of this group.
void reads(Warp& w, u32 at) {
    check_access(w, at, 16, false, false);
    Block& b = *w.block;
    for (size_t k = at / 2; races() && k < at / 2 + 8; k++)
        b.read[k * b.readers() + b.warps.size() + (size_t)w.rank / 4] = w.products + 1;
}
// The sums of products that arrived(product) arrive.
template <class F> void arrive_late(Warp& w, F arrived) {
    std::erase_if(w.late, [&](const LateProduct& p) {
        if (!arrived(p)) return false;
        for (size_t v = 0; v < p.registers.size(); v++)
            memcpy(w.reg<f32>(p.registers[v]), &p.sums[v * 32], 32 * sizeof(f32));
        return true;
    });
}
void hold_back(Warp& w, const Ins& i, int values) {
    LateProduct p{w.products + 1, {i.list.begin(), i.list.begin() + values}, {}};
    for (const u32 reg : p.registers) {
        f32* const sums = w.reg<f32>(reg);
        p.sums.insert(p.sums.end(), sums, sums + 32);
        std::fill_n(sums, 32, NAN);
    }
    w.late.push_back(std::move(p));
}
// D (16, columns) [+]= A (16, K) B (K, columns), for a warp's 16 of wgmma's 64 rows.
template <int K> void add_product(Warp& w, const Ins& i, const f32 (&a)[16][K], const f32 (&b)[K][256]) {
    const int columns = (int)i.imm[0], values = columns / 2;
    static f32 d[16][256];
    for (int m = 0; m < 16; m++) {
        std::fill_n(d[m], columns, 0.f);
        for (int k = 0; k < K; k++)
            for (int n = 0; n < columns; n++) d[m][n] += a[m][k] * b[k][n];
    }
    const bool add = *w.reg<u32>(i.op[0]) & 1;
    for (int v = 0; v < values; v++)
        for (int l = 0; l < 32; l++) {
            f32& out = w.reg<f32>(i.list[v])[l];
            out = (add ? out : 0) + d[l / 4 + v / 2 % 2 * 8][v / 4 * 8 + l % 4 * 2 + v % 2];
        }
    if (!reversed()) hold_back(w, i, values);
}
// A of FP8 in registers. A register of all lanes, four numbers each, is a matrix of 8 x 16 whose rows lie one after the
// other.
template <int MANTISSA> void read_a_fp8(Warp& w, const u32* registers, f32 (&a)[16][32]) {
    for (int k = 0; k < 4; k++)
        for (int n = 0; n < 128; n++)
            a[n / 16 + k % 2 * 8][n % 16 + k / 2 * 16] = fp8_value<MANTISSA>(w.reg<uint8_t>(registers[k])[n]);
}
// A warp's 16 of wgmma's 64 rows in FP8; imm: bits 3 and 4 say that A, or B, is e5m2. The tensor cores keep fewer bits of the sums than this.
void quarter_fp8(Warp& w, const Ins& i) {
    const int columns = (int)i.imm[0], values = columns / 2;
    arrive_late(w, [&](const LateProduct& p) { return p.has(i.list[0]); });
    static f32 a[16][32], b[32][256];
    auto value = [&](const Descriptor& of, int row, int k, bool e5m2) {
        const uint8_t byte = *(uint8_t*)shared(w, of.at(row, k), 1);
        return e5m2 ? fp8_value<2>(byte) : fp8_value<3>(byte);
    };
    if (i.op[1] == NONE) (i.imm[1] & 8 ? read_a_fp8<2> : read_a_fp8<3>)(w, &i.list[values], a);
    else {
        Descriptor from = descriptor(w, w.reg<u64>(i.op[1])[0], false);
        from.element = 1;
        for (int m = 0; m < 16; m++) {
            for (int k = 0; k < 32; k += 16) reads(w, from.at(w.rank % 4 * 16 + m, k));
            for (int k = 0; k < 32; k++) a[m][k] = value(from, w.rank % 4 * 16 + m, k, i.imm[1] & 8);
        }
    }
    Descriptor to = descriptor(w, w.reg<u64>(i.op[2])[0], false);
    to.element = 1;
    for (int n = 0; n < columns; n++) {
        for (int k = 0; k < 32; k += 16) reads(w, to.at(n, k));
        for (int k = 0; k < 32; k++) b[k][n] = value(to, n, k, i.imm[1] & 16);
    }
    add_product(w, i, a, b);
}
// A warp's 16 of wgmma's 64 rows. op: scale of D, A's descriptor (or list: 4 registers), B's; imm: bits A turned, B turned, FP8, and 32 for fp16.
void quarter(Warp& w, const Ins& i) {
    if (i.imm[1] & 4) return quarter_fp8(w, i);
    const int columns = (int)i.imm[0], values = columns / 2;
    arrive_late(
        w, [&](const LateProduct& p) { return p.has(i.list[0]); }); // one product may add to what another one adds to
    f32 a[16][16];
    static f32 b[16][256];
    const bool is_fp16 = i.imm[1] & 32;
    auto value = [&](const Descriptor& of, int row, int k) {
        const u16 bits = *(u16*)shared(w, of.at(row, k), 2);
        return is_fp16 ? fp16_value(bits) : bf16_value(bits);
    };
    if (i.op[1] == NONE) (is_fp16 ? read_a<false> : read_a<true>)(w, &i.list[values], a);
    else {
        const Descriptor from = descriptor(w, w.reg<u64>(i.op[1])[0], i.imm[1] & 1);
        for (int m = 0; m < 16; m += from.turned ? 8 : 1)
            for (int k = 0; k < 16; k += from.turned ? 1 : 8) reads(w, from.at(w.rank % 4 * 16 + m, k));
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++) a[m][k] = value(from, w.rank % 4 * 16 + m, k);
    }
    const Descriptor from = descriptor(w, w.reg<u64>(i.op[2])[0], i.imm[1] & 2);
    for (int n = 0; n < columns; n += from.turned ? 8 : 1)
        for (int k = 0; k < 16; k += from.turned ? 1 : 8) reads(w, from.at(n, k));
    for (int n = 0; n < columns; n++)
        for (int k = 0; k < 16; k++) b[k][n] = value(from, n, k);
    add_product(w, i, a, b);
}
void keep_a(Warp& w, const u32* registers) {
    ReadRegisters& r = w.read.emplace_back();
    r.group = w.products + 1;
    for (int k = 0; k < 4; k++) memcpy(r.values[k], w.reg<u32>(r.registers[k] = registers[k]), sizeof r.values[k]);
}
// The four warps of a warpgroup multiply as one: none goes on, and frees what was read, before the others are here.
bool wgmma(Warp& w, const Ins& i, u32) {
    const int first = w.rank / 4 * 4;
    if (std::exchange(w.multiplied, false)) return true;
    w.at_product = &i;
    for (int r = first; r < first + 4; r++)
        if (w.block->warps[r]->at_product != &i) return false;
    for (int r = first; r < first + 4; r++) {
        Warp& other = *w.block->warps[r];
        if (i.op[1] == NONE) keep_a(other, &i.list[i.imm[0] / 2]);
        quarter(other, i);
        other.at_product = nullptr, other.multiplied = &other != &w;
    }
    return true;
}

bool wgmma_commit(Warp& w, const Ins&, u32) { return w.products++, true; }
bool wgmma_wait(Warp& w, const Ins& i, u32) { // all groups but the last imm[0]
    const s32 ended = std::max((s32)w.products - (s32)i.imm[0], 0);
    if (races()) w.clock[w.block->products(w.rank / 4)] = ended;
    arrive_late(w, [&](const LateProduct& p) { return (s32)p.group <= ended; });
    std::erase_if(w.read, [&](const ReadRegisters& r) {
        for (int k = 0; k < 4; k++)
            if (memcmp(w.reg<u32>(r.registers[k]), r.values[k], sizeof r.values[k]))
                fail(w, "register %d of A was written before a wait for the product that reads it", k);
        return (s32)r.group <= ended;
    });
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting: barriers, mbarriers, asynchronous copies

void check_barriers(Block& b) {
    for (Barrier& bar : b.barriers)
        if (bar.arrived && bar.arrived >= (bar.expected ? bar.expected : b.alive * 32)) {
            bar.arrived = bar.expected = 0;
            bar.generation++;
            end_phase(bar.clock, bar.ended);
        }
}
template <bool WAIT> bool barrier(Warp& w, const Ins& i, u32) { // op: number, threads
    const u32 lane = std::countr_zero(w.live), number = w.reg<u32>(i.op[0])[lane];
    if (number > 15) fail(w, "barrier %u", number);
    Barrier& bar = w.block->barriers[number];
    if (w.at_barrier) {
        if (bar.generation == w.generation) return false;
        w.at_barrier = false;
        return learn(w, bar.ended), true;
    }
    const int expected = i.op[1] == NONE ? 0 : (int)w.reg<u32>(i.op[1])[lane];
    if (bar.arrived && bar.expected != expected) fail(w, "%d threads, others said %d", expected, bar.expected);
    bar.expected = expected, bar.arrived += 32;
    w.generation = bar.generation, w.at_barrier = WAIT;
    leave(w, bar.clock);
    check_barriers(*w.block);
    if (WAIT && bar.generation == w.generation) return false;
    if (WAIT) learn(w, bar.ended);
    w.at_barrier = false;
    return true;
}

bool nothing(Warp&, const Ins&, u32) { return true; }
bool await_previous(Warp& w, const Ins&, u32) { return !w.block->cluster->held; }

bool cluster_arrive(Warp& w, const Ins&, u32) {
    Cluster& c = *w.block->cluster;
    w.cluster_generation = c.generation;
    leave(w, c.clock);
    if (++c.arrived == (int)c.warps) {
        c.arrived = 0, c.generation++;
        end_phase(c.clock, c.ended);
    }
    return true;
}
bool cluster_wait(Warp& w, const Ins&, u32) {
    if (w.block->cluster->generation == w.cluster_generation) return false;
    return learn(w, w.block->cluster->ended), true;
}

void check_phase(Mbarrier& m) {
    if (m.pending || m.bytes) return;
    m.phase ^= 1, m.pending = m.count, m.phases++;
    end_phase(m.clock, m.ended);
    if (races()) m.ended[m.number] = m.phases;
}
Mbarrier& mbarrier(Warp& w, u32 address) {
    Block* block;
    shared(w, address, 8, &block);
    const auto found = block->mbarriers.find(address & 0xffffff);
    if (found == block->mbarriers.end()) fail(w, "no mbarrier at 0x%x", address);
    return found->second;
}
void brought(Warp& w, u32 to, size_t bytes, u32 mbarrier_at) { // by the phase that is under way
    Block* block;
    shared(w, to, bytes, &block);
    const Mbarrier& m = mbarrier(w, mbarrier_at);
    note_write(*block, to, bytes, m.number, m.phases + 1);
}
void landed(Warp& w, u32 address, size_t bytes) {
    Mbarrier& m = mbarrier(w, address);
    m.bytes -= (s64)bytes;
    check_phase(m);
}
bool mbarrier_init(Warp& w, const Ins& i, u32 lanes) {
    for (const int l : Lanes{lanes}) {
        const u32 address = (u32)value_of(w, i, 0, l) + (u32)i.imm[0], count = w.reg<u32>(i.op[1])[l];
        shared(w, address, 8);
        const u32 number = w.block->cluster->mbarriers++;
        if (number >= w.clock.size()) fail(w, "more mbarriers than the emulator counts");
        w.block->mbarriers[address] = {count, count, 0, 0, 0, number, Clock(w.clock.size()), {}};
    }
    return true;
}
bool mbarrier_arrive(Warp& w, const Ins& i, u32 lanes) { // op[1], if any: bytes to expect
    for (const int l : Lanes{lanes}) {
        Mbarrier& m = mbarrier(w, (u32)value_of(w, i, 0, l) + (u32)i.imm[0]);
        if (i.op[1] != NONE) m.bytes += w.reg<u32>(i.op[1])[l];
        if (!m.pending) fail(w, "more arrivals than the %u that the mbarrier counts", m.count);
        m.pending--;
        leave(w, m.clock);
        check_phase(m);
    }
    return true;
}
bool mbarrier_try_wait(Warp& w, const Ins& i, u32 lanes) { // until the phase of this parity has ended
    for (const int l : Lanes{lanes}) {
        Mbarrier& m = mbarrier(w, (u32)value_of(w, i, 1, l) + (u32)i.imm[0]);
        if (m.phase == (w.reg<u32>(i.op[2])[l] & 1)) return false;
        learn(w, m.ended);
    }
    *w.reg<u32>(i.op[0]) |= lanes;
    return true;
}

void come(Warp& w, std::function<void()> copy) { // an asynchronous copy: now, or when everybody waits
    if (!reversed()) w.block->cluster->coming.push_back(std::move(copy));
    else copy();
}

void do_copy(Warp& w, const AsyncCopy& c) {
    check_access(w, c.to, (size_t)c.bytes, true);
    char* const to = shared(w, c.to, (size_t)c.bytes);
    memcpy(to, c.from, (size_t)c.valid);
    memset(to + c.valid, 0, (size_t)(c.bytes - c.valid));
}
bool copy_async(Warp& w, const Ins& i, u32 lanes) { // op: to, from, bytes that are valid; imm: offsets
    for (const int l : Lanes{lanes}) {
        const int bytes = i.bytes[3];
        AsyncCopy c{(u32)value_of(w, i, 0, l) + (u32)i.imm[0],
                    (char*)value_of(w, i, 1, l) + i.imm[1],
                    bytes,
                    i.op[2] == NONE ? bytes : (int)w.reg<u32>(i.op[2])[l],
                    w.groups[l],
                    {}};
        shared(w, c.to, (size_t)bytes);
        check_access(w, c.to, (size_t)bytes, true, false);
        if ((u64)c.from % bytes) fail(w, "%d bytes at %p: misaligned", bytes, c.from);
        if (c.valid) {
            volatile char touched = *c.from;
            (void)touched;
        }
        if (!reversed()) w.copies[l].push_back(c);
        else do_copy(w, c);
    }
    return true;
}
bool copy_commit(Warp& w, const Ins&, u32 lanes) {
    for (int l = 0; l < 32; l++) w.groups[l] += lanes >> l & 1;
    return true;
}
bool copy_wait(Warp& w, const Ins& i, u32 lanes) {
    for (int l = 0; l < 32; l++)
        while ((lanes >> l & 1) && !w.copies[l].empty() && w.copies[l].front().group < w.groups[l] - i.imm[0])
            do_copy(w, w.copies[l].front()), w.copies[l].pop_front();
    return true;
}

// cp.async.bulk: op: to, from, bytes, mbarrier
bool bulk_load(Warp& w, const Ins& i, u32 lanes) {
    for (const int l : Lanes{lanes}) {
        const u32 to = w.reg<u32>(i.op[0])[l], bytes = w.reg<u32>(i.op[2])[l], at = w.reg<u32>(i.op[3])[l];
        const char* const from = (char*)w.reg<u64>(i.op[1])[l];
        if (to % 16 || bytes % 16 || (u64)from % 16) fail(w, "%u bytes from %p to 0x%x: misaligned", bytes, from, to);
        check_access(w, to, bytes, true, false);
        come(w, [&w, to, from, bytes, at] {
            memcpy(shared(w, to, bytes), from, bytes);
            brought(w, to, bytes, at);
            landed(w, at, bytes);
        });
    }
    return true;
}

struct TensorMap { // what lies in a CUtensorMap
    char* memory;
    u64 stride[5]; // bytes; [0]: of an element
    u32 size[5], box[5], rank, row_bytes;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// All elements of a box: f(place in shared memory, place in the tensor or null outside it).
void each_of_box(const TensorMap& map, const s32* start, u32 at, const std::function<void(u32, char*)>& f) {
    u32 k[5] = {};
    for (u32 linear = at;;) {
        char* from = map.memory;
        for (u32 r = 0; r < map.rank; r++) {
            const s64 x = (s64)start[r] + k[r];
            from = from && x >= 0 && x < map.size[r] ? from + x * (s64)map.stride[r] : nullptr;
        }
        f(map.row_bytes ? linear ^ (linear >> 7 & (map.row_bytes / 16 - 1)) << 4 : linear, from);
        linear += (u32)map.stride[0];
        u32 r = 0;
        while (r < map.rank && ++k[r] == map.box[r]) k[r++] = 0;
        if (r == map.rank) return;
    }
}
// op: place in shared memory, tensor map, mbarrier; list: coordinates
template <bool STORE> bool tensor_copy(Warp& w, const Ins& i, u32 lanes) {
    for (const int l : Lanes{lanes}) {
        const TensorMap map = *(const TensorMap*)w.reg<u64>(i.op[1])[l];
        const u32 at = w.reg<u32>(i.op[0])[l], end = STORE ? 0 : w.reg<u32>(i.op[2])[l];
        std::vector<s32> start;
        u32 bytes = (u32)map.stride[0];
        for (u32 r = 0; r < map.rank; r++) start.push_back((s32)w.reg<u32>(i.list[r])[l]), bytes *= map.box[r];
        if (i.list.size() != map.rank) fail(w, "the tensor map has %u dimensions", map.rank);
        if (at % 128 || at < SYSTEM_SHARED || (at & 0xffffff) + bytes > w.block->shared.size())
            fail(w, "a box of %u bytes at 0x%x of 0x%zx", bytes, at, w.block->shared.size());
        auto copy = [&w, map, at, end, start, bytes] {
            const int element = (int)map.stride[0];
            each_of_box(map, start.data(), at, [&](u32 to, char* from) {
                char* const here = shared(w, to, (size_t)element);
                if (STORE) check_access(w, to, (size_t)element, false);
                else brought(w, to, (size_t)element, end);
                if (STORE) from ? (void)memcpy(from, here, (size_t)element) : (void)0;
                else from ? (void)memcpy(here, from, (size_t)element) : (void)memset(here, 0, (size_t)element);
            });
            if (!STORE) landed(w, end, bytes);
        };
        each_of_box(map, start.data(), at, [&](u32 to, char*) { check_access(w, to, map.stride[0], !STORE, false); });
        if (!STORE) come(w, copy);
        else if (!reversed()) w.stores.push_back(copy);
        else copy();
    }
    return true;
}
bool stores_wait(Warp& w, const Ins&, u32) {
    for (auto& s : w.stores) s();
    w.stores.clear();
    return true;
}

bool store_async(Warp& w, const Ins& i, u32 lanes) { // op: to, mbarrier; list: values of 4 bytes
    for (const int l : Lanes{lanes}) {
        const u32 to = w.reg<u32>(i.op[0])[l], end = w.reg<u32>(i.op[1])[l];
        std::vector<u32> values;
        for (u32 r : i.list) values.push_back(w.reg<u32>(r)[l]);
        shared(w, to, values.size() * 4);
        check_access(w, to, values.size() * 4, true, false);
        come(w, [&w, to, end, values] {
            memcpy(shared(w, to, values.size() * 4), values.data(), values.size() * 4);
            brought(w, to, values.size() * 4, end);
            landed(w, end, values.size() * 4);
        });
    }
    return true;
}

bool map_to_rank(Warp& w, const Ins& i, u32 lanes) {
    for (const int l : Lanes{lanes})
        w.reg<u32>(i.op[0])[l] = (w.reg<u32>(i.op[1])[l] & 0xffffff) | (w.reg<u32>(i.op[2])[l] + 1) << 24;
    return true;
}

bool atomic_add(Warp& w, const Ins& i, u32 lanes) { // op: old value, place, addend
    for (const int l : Lanes{lanes}) {
        u32* const at = (u32*)shared(w, (u32)(value_of(w, i, 1, l) + (u64)i.imm[0]), 4);
        w.reg<u32>(i.op[0])[l] = *at;
        *at += w.reg<u32>(i.op[2])[l];
    }
    return true;
}

// libdevice's functions: their text is in the module, but nothing here needs to know how they do it.
bool call_pow(Warp& w, const Ins& i, u32 lanes) {
    for (const int l : Lanes{lanes}) {
        char* const local = w.local.data() + l * w.kernel->local_bytes;
        f64 a, b;
        memcpy(&a, local + i.list[1], 8), memcpy(&b, local + i.list[2], 8);
        const f64 result = std::pow(std::fabs(a), b);
        memcpy(local + i.list[0], &result, 8);
    }
    return true;
}
bool narrow(Warp& w, const Ins& i, u32) {
    for (int l = 0; l < 32; l++)
        if (i.bytes[0] == 2) w.reg<u16>(i.op[0])[l] = (u16)value_of(w, i, 1, l);
        else w.reg<u32>(i.op[0])[l] = (u32)value_of(w, i, 1, l);
    return true;
}
bool unknown(Warp& w, const Ins&, u32) { fail(w, "the emulator does not know this instruction"); }

// moves between a register and its parts in braces; imm[0]: bytes of a part
template <bool PACK> bool parts(Warp& w, const Ins& i, u32 lanes) {
    const int bytes = (int)i.imm[0];
    for (const int l : Lanes{lanes}) {
        u64 whole = PACK ? 0 : value_of(w, i, 0, l);
        for (size_t k = 0; k < i.list.size(); k++)
            if (PACK)
                whole |= (bytes == 2 ? (u64)w.reg<u16>(i.list[k])[l] : w.reg<u32>(i.list[k])[l]) << (8 * bytes * k);
            else if (bytes == 2) w.reg<u16>(i.list[k])[l] = (u16)(whole >> (16 * k));
            else w.reg<u32>(i.list[k])[l] = (u32)(whole >> (32 * k));
        if (PACK && i.bytes[0] == 4) w.reg<u32>(i.op[0])[l] = (u32)whole;
        else if (PACK) w.reg<u64>(i.op[0])[l] = whole;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// From PTX to instructions

Text trim(Text t) {
    while (!t.empty() && isspace((unsigned char)t.front())) t.remove_prefix(1);
    while (!t.empty() && isspace((unsigned char)t.back())) t.remove_suffix(1);
    return t;
}
bool begins(Text t, Text with) { return t.substr(0, with.size()) == with; }
// Parts between commas (or another separator) that stand in no brackets.
std::vector<Text> split(Text t, char by = ',') {
    std::vector<Text> parts;
    int depth = 0;
    size_t start = 0;
    for (size_t k = 0; k <= t.size(); k++) {
        if (k < t.size())
            depth += (t[k] == '{' || t[k] == '[' || t[k] == '(') - (t[k] == '}' || t[k] == ']' || t[k] == ')');
        if (k == t.size() || (t[k] == by && depth == 0)) {
            if (const Text part = trim(t.substr(start, k - start)); !part.empty()) parts.push_back(part);
            start = k + 1;
        }
    }
    return parts;
}
int type_bytes(Text type) { // "f32": 4, "pred": 0
    if (type == "pred") return 0;
    if (type == "bf16") return 2;
    return atoi(std::string(type.substr(1)).c_str()) / 8;
}
Text last_type(Text mnemonic) { return mnemonic.substr(mnemonic.rfind('.') + 1); }

struct Variable { // of shared memory or a module's data: where
    size_t bytes = 0, align = 1;
    std::vector<u64> values; // of a byte each
};
Variable variable(Text declaration, std::string* name) { // ".align 4 .b8 name[8] = {...}"
    Variable v;
    int element = 1;
    for (Text rest = trim(declaration); begins(rest, ".");) {
        const size_t end = rest.find_first_of(" \t");
        const Text word = rest.substr(1, end - 1);
        rest = trim(rest.substr(end));
        if (word == "align") v.align = (size_t)atoi(rest.data()), rest = trim(rest.substr(rest.find_first_of(" \t")));
        else element = std::max(type_bytes(word), 1);
        declaration = rest;
    }
    const size_t end = declaration.find_first_of("[ =;");
    *name = declaration.substr(0, end);
    const size_t bracket = declaration.find('[');
    v.bytes = (size_t)element * (bracket == Text::npos ? 1 : strtoull(declaration.data() + bracket + 1, nullptr, 10));
    if (const size_t brace = declaration.find('{'); brace != Text::npos)
        for (const Text value : split(declaration.substr(brace + 1, declaration.find('}') - brace - 1)))
            v.values.push_back(strtoull(value.data(), nullptr, 0));
    return v;
}

size_t block_end(Text ptx, size_t brace) { // where the brace is that closes this one
    for (int depth = 0;; brace++)
        if ((depth += (ptx[brace] == '{') - (ptx[brace] == '}')) == 0) return brace;
}

struct Module {
    std::map<std::string, std::pair<Text, Text>, std::less<>> kernels; // parameters, body
    std::map<std::string, Variable, std::less<>> shared, dynamic;
    std::map<std::string, std::vector<char>, std::less<>> data;
    std::map<std::string, Kernel, std::less<>> decoded;

    explicit Module(Text ptx) {
        for (size_t at = 0, end; at < ptx.size(); at = end + 1) {
            end = std::min(ptx.find('\n', at), ptx.size());
            const Text line = ptx.substr(at, end - at);
            const size_t entry = line.find(".entry ");
            std::string name;
            if (entry != Text::npos) {
                const size_t open = ptx.find('(', at), close = ptx.find(')', open), body = ptx.find('{', close);
                end = block_end(ptx, body);
                const Text kernel = trim(ptx.substr(at + entry + 7, open - at - entry - 7));
                kernels[std::string(kernel)] = {ptx.substr(open + 1, close - open - 1),
                                                ptx.substr(body + 1, end - body - 1)};
            } else if (begins(line, ".func")) { // a declaration, or with a body, which is skipped
                const size_t semicolon = ptx.find(';', at), body = ptx.find('{', at);
                end = semicolon < body ? semicolon : block_end(ptx, body);
            } else if (begins(line, ".shared")) {
                const Variable v = variable(line.substr(7), &name);
                shared[name] = v;
            } else if (begins(line, ".extern .shared")) {
                const Variable v = variable(line.substr(15), &name);
                dynamic[name] = v;
            } else if (begins(line, ".global") || begins(line, ".const")) {
                const Variable v = variable(line.substr(line.find(' ')), &name);
                std::vector<char>& bytes = data[name];
                bytes.assign(v.bytes + 16, 0);
                for (size_t k = 0; k < v.values.size() && k < v.bytes; k++) bytes[k] = (char)v.values[k];
            }
        }
    }
    const Kernel& kernel(const std::string& name);
};

size_t aligned(size_t at, size_t to) { return (at + to - 1) / to * to; }

struct Decoder {
    struct Register {
        u32 at;
        int bytes;
    };
    struct Scope {
        std::map<std::string, Register, std::less<>> registers;
        std::map<std::string, u32, std::less<>> labels;
        std::shared_ptr<Scope> outside;
    };
    struct Jump {
        size_t ins;
        Text label;
        std::shared_ptr<Scope> scope;
    };
    Module& module;
    Kernel& k;
    Decoder(Module& m, Kernel& kernel) : module(m), k(kernel) {}
    std::shared_ptr<Scope> scope = std::make_shared<Scope>();
    std::vector<Jump> jumps;
    std::map<std::string, u32, std::less<>> shared_at, local_at;
    std::map<std::pair<int, u64>, u32> known_constants;

    [[noreturn]] void complain(Text what, Text text) {
        fprintf(stderr, "emulator: %s: %.*s: %.*s\n", k.name.c_str(), (int)what.size(), what.data(), (int)text.size(),
                text.data());
        _exit(9);
    }
    u32 allocate(int bytes) {
        const size_t at = k.register_bytes;
        k.register_bytes += bytes == 0 ? 4 : (size_t)bytes * 32;
        k.register_bytes = aligned(k.register_bytes, 64);
        return (u32)at;
    }
    u32 constant(u64 value, int bytes) {
        const auto [found, added] = known_constants.insert({{bytes, value}, 0});
        if (added) {
            found->second = allocate(bytes);
            k.constants.push_back({found->second, bytes, value});
        }
        return found->second;
    }
    const Register* find(Text name) {
        for (Scope* s = scope.get(); s; s = s->outside.get())
            if (const auto r = s->registers.find(name); r != s->registers.end()) return &r->second;
        return nullptr;
    }
    void declare(Text declaration) { // "f32 %f<20>", "pred p", "b32 low,high"
        const size_t space = declaration.find_first_of(" \t");
        const int bytes = type_bytes(declaration.substr(0, space));
        for (const Text name : split(declaration.substr(space)))
            if (const size_t angle = name.find('<'); angle != Text::npos) {
                const int n = atoi(name.data() + angle + 1);
                for (int j = 1; j < n; j++)
                    scope->registers[std::string(name.substr(0, angle)) + std::to_string(j)] = {allocate(bytes), bytes};
            } else scope->registers[std::string(name)] = {allocate(bytes), bytes};
    }

    bool number(Text t, int bytes, u64* value) {
        if (t.empty()) return false;
        if (begins(t, "0f")) return *value = strtoull(std::string(t.substr(2)).c_str(), nullptr, 16), true;
        if (begins(t, "0d")) return *value = strtoull(std::string(t.substr(2)).c_str(), nullptr, 16), true;
        if (!isdigit((unsigned char)t[0]) && t[0] != '-') return false;
        if (t.find('.') != Text::npos) {
            const f64 v = strtod(std::string(t).c_str(), nullptr);
            return *value = bytes == 4 ? std::bit_cast<u32>((f32)v) : std::bit_cast<u64>(v), true;
        }
        return *value = t[0] == '-' ? (u64)strtoll(std::string(t).c_str(), nullptr, 0)
                                    : strtoull(std::string(t).c_str(), nullptr, 0),
               true;
    }
    // The place of a name in its space, or nothing.
    bool symbol(Text t, u64* value) {
        if (const auto s = shared_at.find(t); s != shared_at.end()) return *value = s->second, true;
        if (const auto l = local_at.find(t); l != local_at.end()) return *value = l->second, true;
        if (const auto d = module.data.find(t); d != module.data.end()) return *value = (u64)d->second.data(), true;
        return false;
    }
    // A register or a number of so many bytes a lane; 0: a predicate.
    u32 operand(Text t, int bytes, Text statement) {
        if (const Register* r = find(t)) {
            if (r->bytes != bytes) complain("an operand's size is another", statement);
            return r->at;
        }
        if (begins(t, "%")) { // %tid.x
            auto [found, added] = k.specials.insert({std::string(t), 0});
            if (added) found->second = allocate(4);
            return found->second;
        }
        u64 value;
        if (!number(t, bytes, &value) && !symbol(t, &value)) complain("an operand is not known", statement);
        return constant(bytes == 0 ? (value ? ALL : 0) : value, bytes);
    }
    u32 low_part(Text t, int bytes, Text statement) { // conversions may read a part of a wider register
        if (const Register* r = find(t); r && r->bytes > bytes) {
            Ins i;
            i.run = narrow, i.text = statement;
            i.op[0] = allocate(bytes), i.bytes[0] = bytes, i.op[1] = r->at, i.bytes[1] = r->bytes;
            k.code.push_back(i);
            return i.op[0];
        }
        return operand(t, bytes, statement);
    }
    int bytes_of(Text t) {
        const Register* r = find(t);
        return r ? r->bytes : 4;
    }
    // "[base + offset]": the register, its size, the offset. A parameter's name is its place among them.
    void address(Ins& i, int operand_number, int imm, Text t, Text statement) {
        if (t.empty() || t[0] != '[') complain("no address", statement);
        t = trim(t.substr(1, t.find(']') - 1));
        const size_t plus = t.find('+');
        const Text base = trim(t.substr(0, plus));
        if (plus != Text::npos) i.imm[imm] = atoll(std::string(t.substr(plus + 1)).c_str());
        u64 value;
        if (const Register* r = find(base)) i.op[operand_number] = r->at, i.bytes[operand_number] = r->bytes;
        else if (const auto p = k.parameters.find(base); p != k.parameters.end()) i.imm[imm] += (s64)p->second.at;
        else if (symbol(base, &value) || number(base, 8, &value)) i.imm[imm] += (s64)value;
        else complain("an address is not known", statement);
    }
    std::vector<Text> braces(Text t) { return split(t[0] == '{' ? t.substr(1, t.find('}') - 1) : t); }

    void decode(Text statement);
    void decode_operands(Ins& i, Text mnemonic, const std::vector<Text>& o, Text statement);
    void decode_body(Text body);
};

template <class T, int N, class R> Run memory_run(bool is_load, Space s) {
    switch (s) {
    case Space::GLOBAL: return is_load ? memory<T, Space::GLOBAL, N, R, true> : memory<T, Space::GLOBAL, N, R, false>;
    case Space::SHARED: return is_load ? memory<T, Space::SHARED, N, R, true> : memory<T, Space::SHARED, N, R, false>;
    case Space::LOCAL: return is_load ? memory<T, Space::LOCAL, N, R, true> : memory<T, Space::LOCAL, N, R, false>;
    default: return memory<T, Space::PARAM, N, R, true>;
    }
}
template <class T, class R> Run memory_run(bool is_load, Space s, size_t n) {
    return n == 1   ? memory_run<T, 1, R>(is_load, s)
           : n == 2 ? memory_run<T, 2, R>(is_load, s)
                    : memory_run<T, 4, R>(is_load, s);
}
template <class T> Run memory_run(bool is_load, Space s, size_t n, int register_bytes) {
    if constexpr (sizeof(T) <= 2)
        if (register_bytes == 2) return memory_run<T, u16>(is_load, s, n);
    if constexpr (sizeof(T) <= 4)
        if (register_bytes == 4) return memory_run<T, u32>(is_load, s, n);
    return memory_run<T, u64>(is_load, s, n);
}
Run memory_run(Text type, bool is_load, Space s, size_t n, int register_bytes) {
    if (type == "s8") return memory_run<int8_t>(is_load, s, n, register_bytes);
    if (type == "s16") return memory_run<s16>(is_load, s, n, register_bytes);
    if (type == "s32") return memory_run<s32>(is_load, s, n, register_bytes);
    switch (type_bytes(type)) {
    case 1: return memory_run<uint8_t>(is_load, s, n, register_bytes);
    case 2: return memory_run<u16>(is_load, s, n, register_bytes);
    case 4: return memory_run<u32>(is_load, s, n, register_bytes);
    default: return memory_run<u64>(is_load, s, n, register_bytes);
    }
}

void Decoder::decode_operands(Ins& i, Text m, const std::vector<Text>& o, Text statement) {
    const auto list = [&](Text t, int bytes) {
        for (const Text part : braces(t)) i.list.push_back(operand(part, bytes, statement));
    };
    const auto together = [&](Run run) { i.run = run, i.kind = Kind::TOGETHER; };
    const auto contains = [&](Text part) { return m.find(part) != Text::npos; };
    // --- arithmetic
    if (const auto f = forms().find(m); f != forms().end()) {
        if (o.size() != f->second.bytes.size()) complain("the number of operands is another", statement);
        i.run = f->second.run;
        for (size_t n = 0; n < o.size(); n++)
            i.op[n] = n == 1 && begins(m, "cvt.") ? low_part(o[n], f->second.bytes[n], statement)
                                                  : operand(o[n], f->second.bytes[n], statement);
        return;
    }
    if (begins(m, "mov.") || begins(m, "cvta.")) {
        if (o[0][0] == '{' || o[1][0] == '{') {
            const bool pack = o[1][0] == '{';
            const std::vector<Text> few = braces(o[pack]);
            i.bytes[0] = type_bytes(last_type(m)), i.imm[0] = i.bytes[0] / (int)few.size();
            list(o[pack], (int)i.imm[0]);
            i.op[0] = operand(o[!pack], i.bytes[0], statement);
            i.run = pack ? parts<true> : parts<false>;
            return;
        }
        const int bytes = bytes_of(o[0]);
        i.run = bytes == 2   ? lanewise<u16, decltype([](u16 a) { return a; }), u16>
                : bytes == 4 ? lanewise<u32, decltype([](u32 a) { return a; }), u32>
                             : lanewise<u64, decltype([](u64 a) { return a; }), u64>;
        i.op[0] = operand(o[0], bytes, statement);
        if (const auto p = k.parameters.find(o[1]); p != k.parameters.end()) { // its address, which each launch knows
            auto [found, added] = k.specials.insert({"parameter " + std::to_string(p->second.at), 0});
            if (added) found->second = allocate(8);
            i.op[1] = found->second;
        } else i.op[1] = operand(o[1], bytes, statement);
        return;
    }
    // --- memory
    if (begins(m, "ld.") || (begins(m, "st.") && !contains("st.async"))) {
        const bool is_load = m[0] == 'l';
        const Text a = o[is_load ? 1 : 0], v = o[is_load ? 0 : 1], base = a.substr(1, a.find_first_of("+]") - 1);
        Space space = contains(".shared")  ? Space::SHARED
                      : contains(".local") ? Space::LOCAL
                      : contains(".param") ? Space::PARAM
                                           : Space::GLOBAL;
        if (!contains(".global") && space == Space::GLOBAL) complain("a generic address", statement);
        if (local_at.count(std::string(base))) space = Space::LOCAL; // a call's parameters
        const Text first = braces(v)[0];
        i.bytes[0] = find(first) ? bytes_of(first) : std::max(type_bytes(last_type(m)), 2);
        list(v, i.bytes[0]);
        address(i, 1, 0, a, statement);
        i.run = memory_run(last_type(m), is_load, space, i.list.size(), i.bytes[0]);
        return;
    }
    if (m == "atom.shared.add.u32") {
        i.op[0] = operand(o[0], 4, statement), i.op[2] = operand(o[2], 4, statement);
        i.run = atomic_add;
        return address(i, 1, 0, o[1], statement);
    }
    // --- lanes together
    if (begins(m, "shfl.sync.")) {
        together(shuffle);
        i.imm[0] = contains(".up.") ? 0 : contains(".down.") ? 1 : contains(".bfly.") ? 2 : 3;
        const std::vector<Text> d = split(o[0], '|');
        i.op[0] = operand(d[0], 4, statement);
        if (d.size() > 1) i.op[5] = operand(d[1], 0, statement);
        for (int n = 1; n < 4; n++) i.op[n] = operand(o[n], 4, statement);
        i.mask = operand(o[4], 4, statement);
        return;
    }
    if (m == "vote.sync.any.pred") {
        together(vote_any);
        i.op[0] = operand(o[0], 0, statement), i.op[1] = operand(o[1], 0, statement),
        i.mask = operand(o[2], 4, statement);
        return;
    }
    if (m == "redux.sync.max.u32") {
        together(reduce_max);
        i.op[0] = operand(o[0], 4, statement), i.op[1] = operand(o[1], 4, statement),
        i.mask = operand(o[2], 4, statement);
        return;
    }
    if (m == "bar.warp.sync") {
        together(nothing);
        i.mask = operand(o[0], 4, statement);
        return;
    }
    if (begins(m, "ldmatrix.") || begins(m, "stmatrix.")) {
        const bool trans = contains(".trans"), is_store = m[0] == 's';
        together(is_store ? (trans ? matrices<true, true> : matrices<true, false>)
                 : trans  ? matrices<false, true>
                          : matrices<false, false>);
        list(o[is_store], 4);
        return address(i, 1, 0, o[!is_store], statement);
    }
    if (begins(m, "mma.sync.aligned.m16n8k16.row.col.f32.")) {
        together(contains(".bf16") ? mma<true> : mma<false>);
        for (const Text t : o) list(t, 4);
        return;
    }
    if (begins(m, "wgmma.commit_group")) return together(wgmma_commit);
    if (begins(m, "wgmma.wait_group")) return (void)(together(wgmma_wait), i.imm[0] = atoi(std::string(o[0]).c_str()));
    if (begins(m, "wgmma.mma_async")) { // D, A, B, scale of D, scales of A and B (1), turned or not
        together(wgmma);
        i.imm[0] = atoi(std::string(m.substr(m.find(".m64n") + 5)).c_str());
        list(o[0], 4);
        const bool registers = o[1][0] == '{';
        if (registers) list(o[1], 4);
        else i.op[1] = operand(o[1], 8, statement);
        i.op[2] = operand(o[2], 8, statement), i.op[0] = operand(o[3], 0, statement);
        if (o[4] != "1" || o[5] != "1") complain("a scale that is not 1", statement);
        const bool e5m2_a = contains(".e5m2.e4m3"), e5m2_b = contains(".e4m3.e5m2");
        if (e5m2_a || e5m2_b || contains(".e4m3.e4m3")) // FP8: never turned
            return (void)(i.imm[1] = 4 | e5m2_a << 3 | e5m2_b << 4);
        i.imm[1] = (registers ? (o[6] == "1") * 2 : (o[6] == "1") + (o[7] == "1") * 2) | contains(".f16.f16") * 32;
        return;
    }
    // --- waiting
    if (begins(m, "bar.sync") || begins(m, "bar.arrive")) {
        together(m == "bar.sync" ? barrier<true> : barrier<false>);
        for (size_t n = 0; n < o.size(); n++) i.op[n] = operand(o[n], 4, statement);
        return;
    }
    if (begins(m, "barrier.cluster.arrive")) return together(cluster_arrive);
    if (begins(m, "barrier.cluster.wait")) return together(cluster_wait);
    if (begins(m, "mbarrier.init")) {
        i.run = mbarrier_init, i.op[1] = operand(o[1], 4, statement);
        return address(i, 0, 0, o[0], statement);
    }
    if (begins(m, "mbarrier.arrive")) { // _, [address](, bytes)
        i.run = mbarrier_arrive;
        if (o.size() > 2) i.op[1] = operand(o[2], 4, statement);
        return address(i, 0, 0, o[1], statement);
    }
    if (begins(m, "mbarrier.try_wait.parity")) {
        i.run = mbarrier_try_wait, i.op[0] = operand(o[0], 0, statement), i.op[2] = operand(o[2], 4, statement);
        return address(i, 1, 0, o[1], statement);
    }
    if (begins(m, "mapa.")) {
        i.run = map_to_rank;
        for (int n = 0; n < 3; n++) i.op[n] = operand(o[n], 4, statement);
        return;
    }
    const auto inside = [&](Text t) { return trim(t.substr(1, t.find(']') - 1)); };
    if (begins(m, "st.async")) { // [to], {values}, [mbarrier]
        i.run = store_async, i.op[0] = operand(inside(o[0]), 4, statement),
        i.op[1] = operand(inside(o[2]), 4, statement);
        return list(o[1], 4);
    }
    // --- asynchronous copies
    if (m == "cp.async.commit_group") return (void)(i.run = copy_commit);
    if (m == "cp.async.wait_group") return (void)(i.run = copy_wait, i.imm[0] = atoi(std::string(o[0]).c_str()));
    if (begins(m, "cp.async.c")) { // [to], [from], bytes(, valid bytes | policy)
        i.run = copy_async, i.bytes[3] = atoi(std::string(o[2]).c_str());
        if (o.size() > 3 && bytes_of(o[3]) == 4) i.op[2] = operand(o[3], 4, statement);
        address(i, 0, 0, o[0], statement);
        return address(i, 1, 1, o[1], statement);
    }
    if (m == "cp.async.bulk.commit_group") return (void)(i.run = nothing);
    if (begins(m, "cp.async.bulk.wait_group")) return (void)(i.run = stores_wait);
    if (begins(m, "cp.async.bulk.tensor")) { // [to], [map, {...}], [mbarrier], or [map, {...}], [from]
        const bool is_store = contains(".global.shared");
        const std::vector<Text> t = split(trim(o[!is_store].substr(1, o[!is_store].rfind(']') - 1)));
        i.run = is_store ? tensor_copy<true> : tensor_copy<false>;
        i.op[0] = operand(inside(o[is_store]), 4, statement), i.op[1] = operand(t[0], 8, statement);
        if (!is_store) i.op[2] = operand(inside(o[2]), 4, statement);
        return list(t[1], 4);
    }
    if (begins(m, "cp.async.bulk.shared")) {
        i.run = bulk_load, i.op[0] = operand(inside(o[0]), 4, statement), i.op[1] = operand(inside(o[1]), 8, statement);
        i.op[2] = operand(o[2], 4, statement), i.op[3] = operand(inside(o[3]), 4, statement);
        return;
    }
    if (m == "griddepcontrol.wait") return (void)(i.run = await_previous);
    // --- what changes no result
    for (const char* n : {"fence.", "griddepcontrol.", "setmaxnreg.", "prefetch", "createpolicy.", "wgmma.fence"})
        if (begins(m, n)) return (void)(i.run = nothing);
    i.run = unknown;
}

void Decoder::decode(Text statement) {
    Text t = statement;
    Ins i;
    i.text = statement;
    if (t[0] == '@') {
        i.negated = t[1] == '!';
        const size_t end = t.find_first_of(" \t");
        i.predicate = operand(t.substr(1 + i.negated, end - 1 - i.negated), 0, statement);
        t = trim(t.substr(end));
    }
    const size_t end = std::min(t.find_first_of(" \t\n"), t.size());
    const Text mnemonic = t.substr(0, end);
    if (mnemonic == "bra" || mnemonic == "bra.uni") {
        i.kind = Kind::BRANCH;
        jumps.push_back({k.code.size(), trim(t.substr(end)), scope});
    } else if (mnemonic == "ret" || mnemonic == "exit") i.kind = Kind::EXIT;
    else if (begins(mnemonic, "call")) { // (result), function, (parameters)
        const std::vector<Text> o = split(t.substr(end));
        i.run = o[1] == "__internal_accurate_pow" ? call_pow : unknown;
        for (const Text part : {o[0], o[2]})
            for (const Text p : split(part.substr(1, part.find(')') - 1))) i.list.push_back(local_at.find(p)->second);
    } else decode_operands(i, mnemonic, split(t.substr(end)), statement);
    k.code.push_back(std::move(i));
}

void Decoder::decode_body(Text body) {
    for (size_t at = 0; at < body.size();) {
        const char c = body[at];
        if (isspace((unsigned char)c) || c == ';') at++;
        else if (begins(body.substr(at), "//")) at = std::min(body.find('\n', at), body.size());
        else if (c == '{') {
            auto inner = std::make_shared<Scope>();
            inner->outside = scope, scope = inner, at++;
        } else if (c == '}') scope = scope->outside, at++;
        else {
            size_t end = at; // of a statement, or of a label
            while (body[end] != ';' && body[end] != ':' && !(begins(body.substr(end), "//"))) end++;
            while (body[end] == ':' && body[end + 1] == ':') { // part of a name
                end += 2;
                while (body[end] != ';' && body[end] != ':') end++;
            }
            Text statement = trim(body.substr(at, end - at));
            if (body[end] == ':') scope->labels[std::string(statement)] = (u32)k.code.size();
            else if (begins(statement, ".reg")) declare(trim(statement.substr(4)).substr(1));
            else if (statement[0] != '.') decode(statement);
            else if (begins(statement, ".local") || begins(statement, ".param")) {
                std::string name;
                const Variable v = variable(statement.substr(6), &name);
                k.local_bytes = aligned(k.local_bytes, 16);
                local_at[name] = (u32)k.local_bytes, k.local_bytes += v.bytes;
            }
            at = end + 1;
        }
    }
    for (const Jump& j : jumps) {
        bool found = false;
        for (Scope* s = j.scope.get(); s && !found; s = s->outside.get())
            if (const auto label = s->labels.find(j.label); label != s->labels.end())
                k.code[j.ins].target = label->second, found = true;
        if (!found) complain("a label is missing", j.label);
    }
    Ins end;
    end.kind = Kind::EXIT;
    k.code.push_back(end);
}

const Kernel& Module::kernel(const std::string& name) {
    if (const auto k = decoded.find(name); k != decoded.end()) return k->second;
    const auto text = kernels.find(name);
    if (text == kernels.end()) fprintf(stderr, "emulator: no kernel %s in the module\n", name.c_str()), _exit(9);
    Kernel& k = decoded[name];
    k.name = name;
    for (const Text p : split(text->second.first)) { // ".param .u64 name"
        std::string parameter;
        Variable v = variable(p.substr(6), &parameter);
        if (v.align == 1) v.align = v.bytes;
        k.parameter_bytes = aligned(k.parameter_bytes, v.align);
        k.parameters[parameter] = {k.parameter_bytes, v.bytes};
        k.parameter_order.push_back(parameter);
        k.parameter_bytes += v.bytes;
    }
    Decoder d(*this, k);
    const Text body = text->second.second;
    const auto place_shared = [&](const std::string& n, const Variable& v) {
        k.static_shared = (u32)aligned(k.static_shared, v.align);
        d.shared_at[n] = k.static_shared, k.static_shared += (u32)v.bytes;
    };
    for (size_t at = 0; (at = body.find(".shared .align", at)) != Text::npos; at++) {
        std::string n;
        const Variable v = variable(body.substr(at + 7, body.find(';', at) - at - 7), &n);
        place_shared(n, v);
    }
    for (const auto& [n, v] : shared)
        if (body.find(n) != Text::npos) place_shared(n, v);
    for (const auto& [n, v] : dynamic) k.dynamic_align = (u32)std::max<size_t>(k.dynamic_align, v.align);
    k.static_shared = (u32)aligned(k.static_shared, k.dynamic_align);
    for (const auto& [n, v] : dynamic) d.shared_at[n] = k.static_shared;
    d.decode_body(body);
    return k;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running

bool Warp::run() {
    bool moved = false;
    while (live) {
        u32 here = ALL, next = ALL, group = 0; // those furthest behind, and where the others wait for them
        for (const int l : Lanes{live & ~held}) here = std::min(here, pc[l]);
        if (here == ALL) fail(*this, "lanes 0x%08x wait here for others, which have ended or wait elsewhere", held);
        for (const int l : Lanes{live})
            if (pc[l] == here) group |= 1u << l;
            else if (pc[l] > here) next = std::min(next, pc[l]);
        held &= ~group;
        const auto stay = [&] {
            for (const int l : Lanes{group}) pc[l] = here;
        };
        for (bool together = true; together;) {
            const Ins& i = kernel->code[here];
            now = &i;
            i.reached = true;
            u32 lanes = group, after = here + 1;
            if (i.predicate != NONE) lanes &= i.negated ? ~*reg<u32>(i.predicate) : *reg<u32>(i.predicate);
            if (i.kind == Kind::EXIT) {
                live &= ~lanes, group &= ~lanes;
                if (!live) {
                    block->alive--;
                    check_barriers(*block);
                    return true;
                }
            } else if (i.kind == Kind::BRANCH) {
                if (lanes == group) after = i.target, together = !held;
                else if (lanes) { // they part
                    for (const int l : Lanes{group}) pc[l] = lanes >> l & 1 ? i.target : after;
                    group = 0;
                }
            } else if (i.kind == Kind::TOGETHER && lanes && lanes_of(*this, i) & ~lanes) { // until the others are here
                held |= group, after = here, together = false;
            } else if (lanes && !i.run(*this, i, lanes)) return stay(), moved;
            moved |= after != here;
            here = after;
            together &= here < next && group;
        }
        stay();
    }
    return moved;
}

void begin_block(const Kernel& k, Block& b, dim3 grid, dim3 threads, size_t dynamic, char* parameters, u64 number) {
    b.index[0] = (u32)(number % grid.x), b.index[1] = (u32)(number / grid.x % grid.y),
    b.index[2] = (u32)(number / grid.x / grid.y);
    b.shared.assign(k.static_shared + dynamic, (char)0xff); // NaN
    b.mbarriers.clear();
    for (Barrier& bar : b.barriers) bar = {};
    const u32 n = threads.x * threads.y * threads.z;
    b.alive = (int)(n + 31) / 32;
    if (races()) {
        b.writer.assign(b.shared.size() / 2 + 1, 0), b.written.assign(b.shared.size() / 2 + 1, 0);
        b.read.assign((b.shared.size() / 2 + 1) * (size_t)(b.alive + (b.alive + 3) / 4), 0);
    }
    const bool fresh = b.warps.empty();
    for (int r = 0; r < b.alive; r++) {
        if (fresh) b.warps.push_back(std::make_unique<Warp>());
        Warp& w = *b.warps[r];
        w.kernel = &k, w.block = &b, w.parameters = parameters, w.rank = r;
        w.live = n - r * 32 >= 32 ? ALL : (1u << (n - r * 32)) - 1, w.held = 0, w.at_barrier = w.multiplied = false,
        w.at_product = nullptr;
        std::fill_n(w.pc, 32, 0);
        std::fill_n(w.groups, 32, 0);
        for (auto& c : w.copies) c.clear();
        w.stores.clear(), w.late.clear(), w.read.clear(), w.products = 0;
        if (fresh) {
            w.registers.assign(k.register_bytes, (char)0xff);
            w.local.assign(32 * k.local_bytes + 16, (char)0xff);
            for (const Constant& c : k.constants)
                if (c.bytes == 0) *w.reg<u32>(c.at) = (u32)c.value;
                else
                    for (int l = 0; l < 32; l++)
                        memcpy(w.registers.data() + c.at + l * c.bytes, &c.value, (size_t)c.bytes);
        }
        for (const auto& [name, at] : k.specials)
            for (int l = 0; l < 32; l++) {
                const u32 t = r * 32 + l, axis = name.back() - 'x';
                const u32 tid[3] = {t % threads.x, t / threads.x % threads.y, t / threads.x / threads.y};
                const u32 sizes[3] = {threads.x, threads.y, threads.z}, blocks[3] = {grid.x, grid.y, grid.z};
                if (begins(name, "parameter ")) w.reg<u64>(at)[l] = (u64)(parameters + atoll(name.c_str() + 10));
                else if (begins(name, "%tid.")) w.reg<u32>(at)[l] = tid[axis];
                else if (begins(name, "%ntid.")) w.reg<u32>(at)[l] = sizes[axis];
                else if (begins(name, "%ctaid.")) w.reg<u32>(at)[l] = b.index[axis];
                else if (begins(name, "%nctaid.")) w.reg<u32>(at)[l] = blocks[axis];
                else fail(w, "%s is not known", name.c_str());
            }
    }
}

std::map<const char*, std::unique_ptr<Module>>& modules() {
    static auto& m = *new std::map<const char*, std::unique_ptr<Module>>;
    return m;
}
// EMULATE_COVERAGE names a file: a line for each kernel that ran, with where in the text of its module its instructions begin; - before those that were not reached.
void write_coverage() {
    FILE* const file = fopen(getenv("EMULATE_COVERAGE"), "w");
    for (const auto& [ptx, module] : modules())
        for (const auto& [name, kernel] : module->decoded) {
            fprintf(file, "%s", name.c_str());
            for (const Ins& i : kernel.code)
                if (!i.text.empty()) fprintf(file, " %s%td", i.reached ? "" : "-", i.text.data() - ptx);
            fprintf(file, "\n");
        }
    fclose(file);
}
Module& module_of(const char* ptx) {
    if (modules().empty() && getenv("EMULATE_COVERAGE")) atexit(write_coverage);
    auto& m = modules()[ptx];
    if (!m) m = std::make_unique<Module>(Text(ptx));
    return *m;
}

__attribute__((format(printf, 2, 3))) void say(const Warp& w, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    tell(w, format, arguments);
    va_end(arguments);
}
void tell_where(int) {
    if (running) fail(*running, "an address outside all memory");
    _exit(9);
}

} // namespace

int emulated_parameters(const char* ptx, const char* kernel, EmulatedParameter* parameters, int most) {
    const Kernel& k = module_of(ptx).kernel(kernel);
    int n = 0;
    for (const std::string& p : k.parameter_order)
        if (n < most) parameters[n++] = {k.parameters.find(p)->second.at, k.parameters.find(p)->second.bytes};
    return n;
}

struct EmulatedLaunch {
    const Kernel& kernel;
    dim3 grid, threads;
    size_t dynamic;
    u64 cluster; // blocks
    std::shared_ptr<char> parameters;
    std::map<u64, std::unique_ptr<Cluster>> begun; // by their first block

    u64 blocks() const { return (u64)grid.x * grid.y * grid.z; }
    u64 first(u64 done) const { return reversed() ? blocks() - cluster - done : done; }
};

namespace {

void begin_cluster(const EmulatedLaunch& launch, Cluster& c, u64 first) {
    while (c.blocks.size() < launch.cluster) c.blocks.push_back(std::make_unique<Block>());
    for (u64 r = 0; r < launch.cluster; r++) {
        c.blocks[r]->cluster = &c;
        begin_block(launch.kernel, *c.blocks[r], launch.grid, launch.threads, launch.dynamic, launch.parameters.get(),
                    first + r);
    }
    c.arrived = 0;
    c.turns.clear();
    for (auto& b : c.blocks)
        for (auto& w : b->warps) w->number = (u32)c.turns.size(), c.turns.push_back(w.get());
    c.warps = c.mbarriers = (u32)c.turns.size();
    for (auto& b : c.blocks) b->first_products = std::exchange(c.mbarriers, c.mbarriers + (u32)b->warps.size());
    c.clock.assign(c.counts(), 0), c.ended.assign(c.counts(), 0);
    for (Warp* w : c.turns) w->clock.assign(c.counts(), 0), w->clock[w->number] = 1;
    if (reversed()) std::reverse(c.turns.begin(), c.turns.end());
}

// To the end, or to where all wait for the kernel before.
void run_cluster(Cluster& c) {
    for (bool alive = true; alive;) {
        bool moved = false;
        alive = false;
        for (Warp* w : c.turns)
            if (w->live) {
                running = w;
                moved |= w->run();
                alive |= w->live != 0;
            }
        if (moved || !alive) continue;
        if (c.coming.empty() && c.held) return;
        if (c.coming.empty()) {
            for (Warp* w : c.turns)
                if (w->live) say(*w, "everybody waits, warp %d here", w->rank);
            _exit(9);
        }
        const auto copy = std::move(c.coming.front());
        c.coming.pop_front();
        copy();
    }
    for (auto& copy : c.coming) copy();
    c.coming.clear();
    for (Warp* w : c.turns)
        if (!w->stores.empty()) {
            say(*w, "warp %d ends, and a copy still reads its block's shared memory", w->rank);
            _exit(9);
        }
}

} // namespace

std::shared_ptr<EmulatedLaunch> emulated_launch(const char* ptx, const char* name, dim3 grid, dim3 threads,
                                                size_t dynamic, long cluster, std::shared_ptr<char> parameters) {
    const Kernel& k = module_of(ptx).kernel(name);
    return std::shared_ptr<EmulatedLaunch>(
        new EmulatedLaunch{k, grid, threads, dynamic, (u64)cluster, std::move(parameters), {}});
}

void emulate_beginning(EmulatedLaunch* launch, const EmulatedLaunch& before) {
    constexpr size_t MOST_BYTES = (size_t)1 << 30; // of all registers, which are kept until the rest is run
    const auto lets_in = [](const Ins& i) { return i.text == "griddepcontrol.launch_dependents"; };
    if (!std::any_of(before.kernel.code.begin(), before.kernel.code.end(), lets_in)) return;
    const u64 warps = ((u64)launch->threads.x * launch->threads.y * launch->threads.z + 31) / 32;
    if (launch->blocks() * warps * launch->kernel.register_bytes > MOST_BYTES) return;
    for (u64 done = 0; done < launch->blocks(); done += launch->cluster) {
        auto& c = launch->begun[launch->first(done)];
        c = std::make_unique<Cluster>();
        begin_cluster(*launch, *c, launch->first(done));
        c->held = true;
        run_cluster(*c);
        for (Warp* w : c->turns)
            for (auto& copies : w->copies)
                for (AsyncCopy& copy : copies) copy.read();
    }
    running = nullptr;
}

void emulate(EmulatedLaunch* launch) {
    signal(SIGSEGV, tell_where), signal(SIGBUS, tell_where);
    mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30); // registers are megabytes: keep them
    Cluster fresh;
    for (u64 done = 0; done < launch->blocks(); done += launch->cluster) {
        const u64 first = launch->first(done);
        const auto begun = launch->begun.find(first);
        if (begun == launch->begun.end()) {
            begin_cluster(*launch, fresh, first);
            run_cluster(fresh);
        } else {
            begun->second->held = false;
            run_cluster(*begun->second);
            launch->begun.erase(begun);
        }
    }
    running = nullptr;
}

CUresult emulated_tensor_map(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* memory,
                             const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                             const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    TensorMap map = {};
    map.memory = (char*)memory, map.rank = rank;
    switch (type) { // the bytes of an element; the types that tma_type returns
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: map.stride[0] = 1; break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16: map.stride[0] = 2; break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32: map.stride[0] = 4; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    map.row_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                    : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                    : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                           : 0;
    for (cuuint32_t r = 0; r < rank; r++) {
        map.size[r] = (u32)size[r], map.box[r] = box[r];
        if (r) map.stride[r] = stride[r - 1];
        if (step[r] != 1) return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy((void*)to, &map, sizeof map);
    return CUDA_SUCCESS;
}
