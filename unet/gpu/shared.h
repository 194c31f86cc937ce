// shared.h - what kernels of any GPU share.
#pragma once
#include "../interface.h"

#ifdef __CUDACC__ // the GPU
// =====================================================================================================================
// The GPU: what all kernels share

// An array lies in registers only if the compiler knows every index into it. So loops over such arrays are unrolled.
#define UNROLL_FOR _Pragma("unroll") for
#define UNROLL_4_FOR _Pragma("unroll 4") for
#define UNROLL_8_FOR _Pragma("unroll 8") for
#define NO_UNROLL_FOR _Pragma("unroll 1") for // for loops that would need too many registers if they were unrolled
#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "code for compute capability 9.0 is compiled for sm_90a, which has wgmma: -gencode arch=compute_90a,code=sm_90a"
#endif

// The properties of a GPU on which the choice of a kernel may depend.
struct Gpu {
    int sms;                             // the number of multiprocessors
    int shared_per_sm, shared_per_block; // bytes of shared memory of a multiprocessor, and the limit of one block
    bool overlap;                        // this GPU runs code of sm_90 or later, so launches may overlap (launch_on)
    bool clusters;                       // this GPU runs code of sm_90 or later, and allowed.clusters is true
    bool wgmma;                          // this GPU runs code of sm_90a (wgmma and TMA), and allowed.hopper is true

    // shared_for returns how many bytes of dynamic shared memory a block can have if a multiprocessor runs `blocks`
    // blocks. blocks_of returns how many blocks with `bytes` bytes of it fit on a multiprocessor. In addition, every
    // block needs 1 KB, which CUDA reserves, and `statics` bytes for its __shared__ variables.
    constexpr int shared_for(int blocks, int statics = 0) const {
        return std::min(shared_per_sm / blocks - 1024, shared_per_block) - statics;
    }
    constexpr int blocks_of(int bytes, int statics = 0) const { return shared_per_sm / (bytes + statics + 1024); }
};
// The sizes of the kernels' tiles are chosen for these two GPUs. Kernels without wgmma run on any GPU of sm_80 or
// later, and no such GPU has less shared memory than an RTX 30.
constexpr Gpu RTX_30{82, 100 * 1024, 99 * 1024, false, false, false};
constexpr Gpu H200{132, 228 * 1024, 227 * 1024, true, true, true};
static Gpu gpu; // the GPU of this process; start_device fills it in
#ifdef NO_HOPPER
constexpr bool BUILT_WITH_HOPPER = false;
#else
constexpr bool BUILT_WITH_HOPPER = true;
#endif

// A CUDA stream (queue) and its workspace. Each operation may overwrite the whole workspace. What an operation leaves
// there is lost when the next operation runs.
struct Stream {
    cudaStream_t queue = nullptr;
    char* workspace = nullptr;
    size_t workspace_bytes = 0;
    // If joined is true, launch_on starts the next kernel only when all work before it in the queue has ended.
    // launch_on then sets joined to false again.
    bool joined = false;
};

// The main stream. It also holds a side stream, whose kernels run at the same time (run_beside).
struct Device : Stream {
    Stream side;
    cudaStream_t copy_stream = nullptr; // a queue for copies from the host (send); copies need no workspace
    char* norm_sums = nullptr;          // for each group norm, every image's part of dbias and dweight (NormSums)
    size_t norm_sums_bytes = 0;
};
static Device device;
Stream* const MAIN_STREAM = &device;

#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        const cudaError_t error_ = (call);                                                                             \
        if (error_ != cudaSuccess) die("CUDA: %s (%s:%d: %s)", cudaGetErrorString(error_), __FILE__, __LINE__, #call); \
    } while (0)

// Records the event *moment: it happens when all work that is in the stream now is done. The first call makes it.
static void record(cudaEvent_t* moment, cudaStream_t queue) {
    if (!*moment) CUDA_CHECK(cudaEventCreateWithFlags(moment, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(*moment, queue));
}
// Makes all later work of the stream wait for an event, or for all work that is in the stream `other` now.
static void follow(Stream* stream, cudaEvent_t moment) {
    CUDA_CHECK(cudaStreamWaitEvent(stream->queue, moment));
    stream->joined = true;
}
static void follow(Stream* stream, const Stream& other) {
    static cudaEvent_t moment = nullptr;
    record(&moment, other.queue);
    follow(stream, moment);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Launches, which may overlap
// Launches a kernel that may overlap the kernel before it (programmatic dependent launch, sm_90 and later; CUDA C++
// Programming Guide, "Programmatic Dependent Launch and Synchronization"):
//
//   kernel A   |---- blocks run ----------|
//   kernel B        |-- prepares --|waits |---- blocks run ----|
//                                         ^ await_previous_kernel returns
//
// B's blocks start as soon as each block of A has called await_previous_kernel or has ended. So A may still be running
// when B starts. Therefore B calls await_previous_kernel before it reads what A writes, and before it writes to global
// memory. Before this call, B may read what kernels before A wrote: A's own call has waited for them.
// cluster: how many neighbouring blocks can access each other's shared memory (1: no cluster).
template <class... Parameters, class... Arguments>
static void launch_on(Stream* stream, int cluster, void (*kernel)(Parameters...), dim3 grid, dim3 threads,
                      size_t shared_bytes, Arguments... arguments) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{grid, threads, shared_bytes, stream->queue, attributes, 0};
    if (gpu.overlap && allowed.early && !stream->joined) {
        cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
        dimension.id = cudaLaunchAttributeClusterDimension;
        dimension.val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    stream->joined = false;
    if (shared_bytes)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}
// Launches on the main stream, without a cluster: launch(kernel, grid, threads, shared bytes, arguments ...).
template <class... Rest> static void launch(Rest... rest) { launch_on(MAIN_STREAM, 1, rest...); }

// Launches a kernel that does not call await_previous_kernel. It starts when all work before it has ended.
template <class... Rest> static void launch_behind(Rest... rest) {
    device.joined = true;
    launch(rest...);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Decisions: what kernels are chosen with
// A row of a decision table. decide calls `launch` of the first row whose condition `when` holds.
template <class Call> struct Way {
    bool when;
    void (*launch)(const Call&);
};
template <class Call, int N> static void decide(const Call& call, const Way<Call> (&table)[N]) {
    const auto* const way = std::ranges::find(table, true, &Way<Call>::when);
    // Only in conv_product's table can this happen. All other tables end with a row whose condition is always true.
    if (way == std::end(table))
        die("internal error: no kernel for this convolution with --precision %s", name_of(act_element));
    way->launch(call);
}

// Returns f(T()), where T is the C++ type of act_element. Activations are passed as act*, which is void*, so T must be
// chosen at run time. f is a lambda with a template parameter T.
template <class F> static auto with_act(F f) {
    switch (act_element) {
    case Element::FP32: return f(float());
    case Element::BF16: return f(bf16());
    case Element::FP8:
    case Element::FP8_GRADIENT: break; // act_element is never FP8
    }
    ALL_CASES_RETURN
}

// Returns whether Hopper's kernels, which multiply by wgmma, can be used for the activations.
static bool act_has_wgmma() { return gpu.wgmma && act_element == Element::BF16; }

// `best` is the first candidate with the lowest cost.
template <class T> struct Cheapest {
    T best = {};
    double cost = INFINITY;
    void consider(double c, const T& candidate) {
        if (c < cost) {
            cost = c;
            best = candidate;
        }
    }
};
#ifdef __CUDA_ARCH__
constexpr int ARCH = __CUDA_ARCH__; // what this code is compiled for: 900 is compute capability 9.0
#else
constexpr int ARCH = 0; // this code is compiled for the host
#endif
// Whether this code can use clusters, and launches that overlap.
constexpr bool CLUSTERS = ARCH >= 900;

// ---------------------------------------------------------------------------------------------------------------------
// --- Single instructions: shared memory, mbarriers, clusters
// The instructions are described in NVIDIA's manual "PTX ISA", chapter "Instruction Set". Addresses of shared memory
// are 32 bits wide here (shared_address). INLINE functions are not static, because the compiler would warn about static
// functions that a build does not use.

// PTX(...) is an instruction without results. Because of volatile and "memory", the compiler moves no other memory
// access and no barrier past this instruction.
#define PTX(TEXT, ...) asm volatile(TEXT ::__VA_ARGS__ : "memory")

// Waits until the kernels before this one have ended and their writes can be seen. After that, it lets the next kernel
// start. The order matters. Suppose that kernels A, B, C follow each other, and B lets C start while A still runs. Then
// C might miss what A writes, because C may read it before C's own wait (launch_on).
INLINE void await_previous_kernel() {
    if (CLUSTERS) PTX("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;");
}

INLINE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// These loads are volatile, so that the compiler does not move them past a barrier.
INLINE float load_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
INLINE float2 load_shared_2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}
INLINE uint32_t load_shared_word(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
INLINE uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
INLINE void store_shared(uint32_t to, uint4 v) {
    PTX("st.shared.v4.b32 [%0], {%1,%2,%3,%4};", "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// --- mbarriers (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier")
// An mbarrier is a counter of 8 bytes in shared memory. It goes through phases 0, 1, 2, ... A phase ends when
// `arrivals` threads have arrived, and all bytes that were announced (mbarrier_expect) have been written by TMA or
// st.async. A thread that waits for a phase gives only the phase's parity. So it must wait for a phase before the next
// phase ends. If it came later, it would wait for the second phase after its own, which has the same parity.
INLINE void mbarrier_init(uint32_t barrier, int arrivals) {
    PTX("mbarrier.init.shared::cta.b64 [%0], %1;", "r"(barrier), "r"(arrivals));
}
INLINE void mbarrier_expect(uint32_t barrier, int bytes) { // arrives, and announces that `bytes` bytes will come
    PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "r"(barrier), "r"(bytes));
}
INLINE void mbarrier_arrive(uint32_t barrier) { PTX("mbarrier.arrive.shared::cta.b64 _, [%0];", "r"(barrier)); }
INLINE void mbarrier_wait(uint32_t barrier, uint32_t parity) { // waits until the phase of this parity has ended
    PTX("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }",
        "r"(barrier), "r"(parity));
}
// Must be called after mbarrier_init. It makes the barriers visible to TMA and to the other blocks of the cluster.
INLINE void mbarriers_ready() { PTX("fence.mbarrier_init.release.cluster;"); }

// --- clusters of blocks (PTX ISA, "barrier.cluster", "mapa", "st.async")
// This barrier for all threads of a cluster has two halves. A block can do something else between them. cluster_arrive
// makes only the initial state of mbarriers visible to the other blocks, and no other writes.
INLINE void cluster_arrive() { PTX("fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"); }
INLINE void cluster_wait() { PTX("barrier.cluster.wait.acquire.aligned;"); }
// The whole barrier: everything that was written before it is visible to all threads of the cluster.
INLINE void cluster_sync() { PTX("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"); }
// Returns the address, in the cluster's block `rank`, that corresponds to address p of this block.
INLINE uint32_t at_block(uint32_t p, int rank) {
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(p) : "r"(rank));
    return p;
}
// Writes 8 or 16 bytes, in the background, to an address that at_block returned. `barrier` is an mbarrier of the same
// block, which counts these bytes.
INLINE void store_to_block(uint32_t p, uint32_t barrier, float2 v) {
    PTX("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];", //
        "r"(p), "f"(v.x), "f"(v.y), "r"(barrier));
}
INLINE void store_to_block(uint32_t p, uint32_t barrier, float4 v) {
    PTX("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];", //
        "r"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier));
}
// Tells another block that a stage of its ring (Pipeline) is free again. The other block does not read this thread's
// earlier writes, so .relaxed is enough. With .release, the compiler would insert a slow fence.
INLINE void arrive_at_block(uint32_t barrier) {
    PTX("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];", "r"(barrier));
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Activations: pieces of 16 bytes
// A piece is 16 bytes: VEC<T> neighbouring channels of a pixel, 8 bf16 or 4 floats. Most GPUs load no more than that by
// one instruction. Activations have a multiple of 32 channels, so a pixel is a whole number of pieces. Kernels unpack a
// piece to floats, compute with the floats, and round each result once, when they pack it.
template <class T> constexpr int VEC = 16 / sizeof(T);
static int act_vec() { return 16 / (int)act_bytes(); }

INLINE uint4 load16(const void* p) { return *(const uint4*)p; }

// Unpacks the two bf16 in v. A bf16 is the upper 16 bits of a float, so a shift or a mask is enough.
INLINE float2 unpack_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
// The reverse of unpack_bf16. Floats are rounded to the nearest bf16, ties to even.
INLINE uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
    return *(const uint32_t*)&r;
}

// unpack makes floats of a piece. pack is its reverse.
template <class T> INLINE void unpack(float (&v)[VEC<T>], uint4 r) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE void unpack<float>(float (&v)[4], uint4 r) {
    v[0] = __uint_as_float(r.x);
    v[1] = __uint_as_float(r.y);
    v[2] = __uint_as_float(r.z);
    v[3] = __uint_as_float(r.w);
}
template <> INLINE void unpack<bf16>(float (&v)[8], uint4 r) {
    const uint32_t pairs[4] = {r.x, r.y, r.z, r.w};
    UNROLL_FOR (int i = 0; i < 4; i++) {
        v[2 * i] = unpack_bf16(pairs[i]).x;
        v[2 * i + 1] = unpack_bf16(pairs[i]).y;
    }
}
template <class T> INLINE uint4 pack(const float (&v)[VEC<T>]) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE uint4 pack<float>(const float (&v)[4]) {
    uint4 r;
    r.x = __float_as_uint(v[0]);
    r.y = __float_as_uint(v[1]);
    r.z = __float_as_uint(v[2]);
    r.w = __float_as_uint(v[3]);
    return r;
}
template <> INLINE uint4 pack<bf16>(const float (&v)[8]) {
    uint4 r;
    r.x = pack_bf16(v[0], v[1]);
    r.y = pack_bf16(v[2], v[3]);
    r.z = pack_bf16(v[4], v[5]);
    r.w = pack_bf16(v[6], v[7]);
    return r;
}

// Four<T> is four elements as they lie in memory (8 or 16 bytes), for loops over four channels at a time.
template <class T> struct FourOf;
template <> struct FourOf<float> { typedef float4 Type; };
template <> struct FourOf<bf16> { typedef uint2 Type; };
template <class T> using Four = typename FourOf<T>::Type;

template <class T> INLINE float4 to_floats(Four<T> v) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE float4 to_floats<float>(float4 v) { return v; }
template <> INLINE float4 to_floats<bf16>(uint2 v) {
    const float2 low = unpack_bf16(v.x);
    const float2 high = unpack_bf16(v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
template <class T> INLINE Four<T> from_floats(float4 v) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE float4 from_floats<float>(float4 v) { return v; }
template <> INLINE uint2 from_floats<bf16>(float4 v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }
INLINE void store_two(bf16* to, float a, float b) { *(uint32_t*)to = pack_bf16(a, b); }
INLINE void store_two(float* to, float a, float b) { *(float2*)to = make_float2(a, b); }
INLINE float2 load_two(const bf16* p) { return unpack_bf16(*(const uint32_t*)p); }
INLINE float2 load_two(const float* p) { return *(const float2*)p; }
template <class T> INLINE float4 load4(const T* p) { return to_floats<T>(*(const Four<T>*)p); }

INLINE void add_bf16(float* sum, uint32_t v) {
    sum[0] += unpack_bf16(v).x;
    sum[1] += unpack_bf16(v).y;
}
template <class T> INLINE void add_piece(float (&sum)[VEC<T>], uint4 piece) {
    float v[VEC<T>];
    unpack<T>(v, piece);
    UNROLL_FOR (int i = 0; i < VEC<T>; i++) {
        sum[i] += v[i];
    }
}

INLINE float4 operator+(float4 a, float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
    return a;
}
INLINE float4 operator*(float4 a, float4 b) {
    a.x *= b.x;
    a.y *= b.y;
    a.z *= b.z;
    a.w *= b.w;
    return a;
}

// Converts 4 or 8 floats to FP8 (e4m3) or FP8_GRADIENT (e5m2), and rounds them as fp8_bits does. Needs sm_90 or later.
template <Element TO = Element::FP8> INLINE uint32_t pack_fp8(float a, float b, float c, float d) {
    static_assert(is_fp8(TO));
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (TO == Element::FP8) {
        asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
            "mov.b32 %0, {low, high};}"
            : "=r"(r)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    } else {
        asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; "
            "mov.b32 %0, {low, high};}"
            : "=r"(r)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    }
#endif
    return r;
}
template <Element TO = Element::FP8> INLINE uint2 pack_fp8(const float (&v)[8]) {
    return make_uint2(pack_fp8<TO>(v[0], v[1], v[2], v[3]), pack_fp8<TO>(v[4], v[5], v[6], v[7]));
}
template <Element TO = Element::FP8> INLINE uint2 scaled_to_fp8(const float (&v)[8], float factor) {
    float scaled[8];
    UNROLL_FOR (int i = 0; i < 8; i++) scaled[i] = v[i] * factor;
    return pack_fp8<TO>(scaled);
}

// Writes 8 or 16 bytes by one instruction. The compiler may split an ordinary store into two. Then each of them would
// write only half of every 32-byte sector, which takes longer.
INLINE void store_whole(void* p, uint4 v) {
    PTX("st.global.v4.b32 [%0], {%1,%2,%3,%4};", "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
INLINE void store_whole(void* p, uint2 v) { PTX("st.global.v2.b32 [%0], {%1,%2};", "l"(p), "r"(v.x), "r"(v.y)); }
INLINE void store_whole(void* p, float4 v) {
    PTX("st.global.v4.f32 [%0], {%1,%2,%3,%4};", "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
// Stores v, rounded to T, and returns the rounded values. A group norm's statistics are computed from them, because the
// group norm will read the rounded values, too.
template <class T> INLINE float4 store4(T* p, float4 v) {
    const Four<T> four = from_floats<T>(v);
    store_whole(p, four);
    return to_floats<T>(four);
}

// Converts a Grad, whose pointers are act* (void*), to a GradOf<T> with pointers of type T*.
template <class T> static GradOf<T> typed(const Grad& g) { return {(T*)g.dx, (const T*)g.add1, (const T*)g.add2}; }

// Adds the gradient's addends to v, and stores the sum as the piece of g.dx that begins at element i.
template <class T> INLINE void store_gradient(const GradOf<T>& g, size_t i, float (&v)[VEC<T>]) {
    UNROLL_FOR (int k = 0; k < 2; k++) {
        const T* add = k ? g.add2 : g.add1;
        if (add) add_piece<T>(v, load16(add + i));
    }
    *(uint4*)(g.dx + i) = pack<T>(v);
}

// Where a kernel writes a gradient: in type T and, unless fp8.bytes is null, also in FP8 (e5m2), multiplied by
// `factor`. v is rounded to T before it is rounded to FP8. So the FP8 numbers are those that round_gradient would make.
template <class T> struct Fp8GradOf : GradOf<T> { Fp8Copy fp8; };
template <class T> INLINE void store_gradient_fp8(const Fp8GradOf<T>& g, size_t i, float (&v)[VEC<T>], float factor) {
    if (!g.fp8.bytes) return;
    unpack<T>(v, pack<T>(v));
    store_whole(g.fp8.bytes + i, scaled_to_fp8<Element::FP8_GRADIENT>(v, factor));
}

// The hardware's approximations of 2^x and 1 / x. Their errors are one or two units in the last place.
INLINE float exp2_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
INLINE float reciprocal_fast(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// Returns 1 / (1 + e^-z). The argument u is z * Z_FACTOR<T>. For bf16, u = -z log2(e), so e^-z is 2^u, one instruction.
// Its relative error, about 1e-6 at |z| = 10, is far below bf16's own, 4e-3. For fp32, u is z.
template <class T> INLINE float sigmoid(float u) {
    const float e_to_minus_z = ElementOf<T>::FAST_EXP ? exp2_fast(u) : expf(-u);
    return reciprocal_fast(1.0f + e_to_minus_z);
}

HD static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The first pixel of a tile: image n, row h, column w. An image is cut into tiles_h x tiles_w tiles of rows x columns
// pixels. If images are small, a tile takes its pixels from `images` images, the first of which is n.
struct Origin {
    int n, h, w;
};
INLINE Origin tile_origin(int tile, int tiles_h, int tiles_w, int rows, int columns, int images = 1) {
    Origin o;
    o.n = tile / tiles_w / tiles_h * images;
    o.h = tile / tiles_w % tiles_h * rows;
    o.w = tile % tiles_w * columns;
    return o;
}

// --- copies from global to shared memory in the background (cp.async, sm_80; PTX ISA, "Asynchronous Copy: non-bulk")
// A thread starts copies, and closes a group of them (copies_committed). Later it waits until all groups except the
// latest PENDING have arrived (copies_arrived). Groups arrive in the order in which they were closed. A thread waits
// only for its own copies; for the copies of other threads, a __syncthreads must follow. If `valid` is false, the copy
// writes zeros and reads nothing.
INLINE void copies_committed() { PTX("cp.async.commit_group;"); }
template <int PENDING> INLINE void copies_arrived() { PTX("cp.async.wait_group %0;", "n"(PENDING)); }

INLINE void copy_async_16(void* to, const void* from, bool valid = true) {
    PTX("cp.async.cg.shared.global [%0], [%1], 16, %2;", "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
}
// Copies a piece of a row. The neighbouring pieces will be read soon, so the L2 cache fetches 128 bytes at once.
// `wanted` is a predicate, not a branch. So the compiler can place such copies between the products of a loop.
INLINE void copy_async_row_if(bool wanted, uint32_t to, const void* from, bool valid) {
    PTX("{.reg .pred wanted; setp.ne.b32 wanted, %0, 0; "
        "@wanted cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;}",
        "r"((int)wanted), "r"(to), "l"(from), "r"(valid ? 16 : 0));
}
// Copies 8 channels to the address `to` + `offset` in shared memory: one piece of bf16, or two pieces of floats. Rows
// are swizzled, so the second piece's address is `to` with bit 4 toggled. `offset` must not change bit 4.
template <class T> INLINE void copy_channels(uint32_t to, int offset, const T* from, bool valid, bool wanted = true) {
    static_assert(VEC<T> <= 8, "8 channels must fill at least one piece");
    UNROLL_FOR (int j = 0; j < 8 / VEC<T>; j++) {
        const uint32_t piece = (to ^ (j * 16)) + offset;
        copy_async_row_if(wanted, piece, from + j * VEC<T>, valid);
    }
}
// Returns the address of a pixel of x, which has C channels. Written like this, the computation is one instruction.
template <class T> INLINE const T* pixel_of(const T* x, uint32_t pixel, int C) {
    const uint32_t pixel_bytes = C * (int)sizeof(T);
    return (const T*)((const char*)x + (size_t)pixel * pixel_bytes);
}
// Copies 4 or 8 bytes through the L1 cache (.ca), because .cg can copy nothing but 16 bytes.
template <int BYTES> INLINE void copy_async(void* to, const void* from, bool valid = true) {
    PTX("cp.async.ca.shared.global [%0], [%1], %2, %3;", "r"(shared_address(to)), "l"(from), "n"(BYTES),
        "r"(valid ? BYTES : 0));
}
// Returns the cache policy for data that is read for the last time: the L2 cache drops it before all other data.
INLINE uint64_t last_read() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
INLINE void copy_async_16(void* to, const void* from, uint64_t policy) {
    PTX("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;", "r"(shared_address(to)), "l"(from),
        "l"(policy));
}

// --- sums over threads, all in a fixed order, so that results are the same in every run

// Returns the sum over this lane and those lanes of its warp whose numbers differ from its own only in the bits BITS.
// For example, lane_sum<1, 2> adds the values of each four neighbouring lanes, and all four receive the sum. `lanes` is
// a mask of all lanes that call the function. (The `, ...` repeats the statement for each of BITS.)
template <int... BITS, class T> INLINE T lane_sum(T v, unsigned lanes = 0xFFFFFFFFu) {
    ((v += __shfl_xor_sync(lanes, v, BITS)), ...);
    return v;
}
template <class T> INLINE T warp_sum(T v) { return lane_sum<16, 8, 4, 2, 1>(v); }
template <int... BITS> INLINE float lane_max(float v) {
    ((v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, BITS))), ...);
    return v;
}

// Adds the values of two lanes whose numbers differ by `offset`, and leaves half of the sums in each lane. Before, v
// holds 2 HALF values. Afterwards its first HALF elements are sums: those of the first HALF values in the lower lane,
// and those of the last HALF values in the upper lane. Returns whether this lane is the upper lane. Calls with HALF =
// 4, 2, 1 add up 8 values over 8 lanes with 7 exchanges. Calling lane_sum for each value would take 24.
template <int HALF, int N> INLINE bool halve(float (&v)[N], int offset) {
    const bool upper = threadIdx.x & offset;
    UNROLL_FOR (int i = 0; i < HALF; i++) {
        const float keep = upper ? v[i + HALF] : v[i];
        const float give = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, offset);
    }
    return upper;
}

// Computes two sums for each channel, over a block's threads, such as the sums of x and of x^2. The threads are
// arranged in rows of `columns` threads. All threads of a column hold values of the same V neighbouring channels:
//
//                column 0        column 1
//   row 0    [   thread 0        thread 1   ]      a thread brings first[V] and second[V], in fp32
//   row 1    [   thread 2        thread 3   ]
//   ...
//   result(k, column, sum) is called once for every column, channel i of the V channels, and array (first, second):
//     k      2 i for first, 2 i + 1 for second
//     sum    the sum over the column's threads, in double
//
// THREADS, V and columns are powers of 2. `shared` is an array of at least 2 V (THREADS + columns) floats.
template <int THREADS, int V, class F>
INLINE void fold_columns(float* shared, int columns, const float (&first)[V], const float (&second)[V], F result) {
    // shared[k * pitch + t] is thread t's value for the sum number k. The padding of `columns` floats shifts sum k + 1
    // to other banks, so that fewer of a warp's reads below meet in one bank.
    const int pitch = THREADS + columns;
    UNROLL_FOR (int i = 0; i < V; i++) {
        shared[2 * i * pitch + threadIdx.x] = first[i];
        shared[(2 * i + 1) * pitch + threadIdx.x] = second[i];
    }
    __syncthreads();
    const int lanes = THREADS / (2 * V * columns); // how many threads add up one sum together
    const int i = threadIdx.x / lanes;             // the index of the sum that this thread helps to add up
    const int lane = threadIdx.x % lanes;
    const int k = i / columns;
    const int column = i % columns;
    double total = 0;
    UNROLL_8_FOR (int t = lane * columns + column; t < THREADS; t += lanes * columns) {
        total += shared[k * (THREADS + columns) + t];
    }
    for (int o = lanes / 2; o; o /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFFu, total, o);
    }
    if (lane == 0) result(k, column, total);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- each_kernel: a thread for an element
// Small operations are written as a lambda f(i), which each(n, f) runs for every i < n, in blocks of 256 threads.
static int blocks_for(size_t n) { return (int)std::max<size_t>((n + 255) / 256, 1); }

template <class F> static __global__ void __launch_bounds__(256) each_kernel(size_t n, F f) {
    await_previous_kernel();
    if (const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n) f(i);
}
template <class F> static void each_on(Stream* stream, size_t n, F f) {
    launch_on(stream, 1, each_kernel<F>, blocks_for(n), 256, 0, n, f);
}
template <class F> static void each(size_t n, F f) { each_on(MAIN_STREAM, n, f); }

// ---------------------------------------------------------------------------------------------------------------------
// --- Tensor cores by mma.sync (sm_80 and later): ldmatrix, mma_bf16; floats as two fp16 numbers
// The 32 lanes of a warp multiply together: d (16, 8) += a (16, 16) * b (16, 8). The matrices lie in the registers of
// the lanes, as fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). With g = lane / 4
// and q = lane % 4, a lane holds:
//
//             columns k                         n                              columns n
//             2q, 2q+1  2q+8, 2q+9          k   g                              2q, 2q+1
//   row g   [    a[0]      a[2]   ]   2q, 2q+1 [ b[0] ]             row g    [ d[0] d[1] ]
//   row g+8 [    a[1]      a[3]   ]   2q+8, +9 [ b[1] ]             row g+8  [ d[2] d[3] ]
//
// Each register of a and b holds two elements that are neighbours along k. So two neighbouring tiles of a result d,
// packed to bf16, can be used as a fragment a of another product. Attention does this with its probabilities.

// ldmatrix loads four 8x8 matrices of 16-bit elements from shared memory: one fragment a or two fragments b. Lanes 8i
// ... 8i + 7 pass the addresses of matrix i's rows. Lane l receives two elements of each matrix: elements 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4. ldmatrix_trans transposes each matrix.
#define LDMATRIX(NAME, TRANSPOSED)                                                                 \
    INLINE void NAME(uint32_t* v, uint32_t* w, uint32_t address) {                                 \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANSPOSED ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(v[0]), "=r"(v[1]), "=r"(w[0]), "=r"(w[1])                              \
                     : "r"(address));                                                              \
    }
LDMATRIX(ldmatrix, "")
LDMATRIX(ldmatrix_trans, ".trans")

#define MMA(NAME, TYPES)                                                                  \
    INLINE void NAME(float(&d)[4], const uint32_t* a, const uint32_t* b) {                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES                           \
                     " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }
MMA(mma_bf16, "f32.bf16.bf16.f32")
MMA(mma_fp16, "f32.f16.f16.f32")

// This is how floats are multiplied on the tensor cores. (As TF32, a float would keep only 11 of its 24 bits.) A float
// is scaled by a power of two and split into the sum of two fp16 numbers of 11 bits each, high + low. The relative
// error is at most 2^-22. A product is then the sum of three products of fp16: high high' + high low' + low high'. A
// fragment of floats has twice as many registers as one of bf16: all high parts, then all low parts. fp16 has a small
// range of exponents. So numbers that are split together are multiplied by a scale, which depends on the largest of
// them. Numbers that are smaller than the largest one by a factor of 2^17 or more lose bits.
// PARTS: how many numbers an element is split into.
template <class T> constexpr int PARTS = ElementOf<T>::PARTS;
static int act_parts() {
    return with_act([]<class T>(T) { return PARTS<T>; });
}

// For types that are not split: mma computes d += a b, and pack_pair packs two neighbours along k into one register.
template <class T> INLINE void mma(float (&d)[4], const uint32_t* a, const uint32_t* b) {
    static_assert(ElementOf<T>::ELEMENT == Element::BF16, "another type needs its instruction here");
    mma_bf16(d, a, b);
}
template <class T> INLINE uint32_t pack_pair(float low, float high) {
    static_assert(ElementOf<T>::ELEMENT == Element::BF16, "another type needs its conversion here");
    return pack_bf16(low, high);
}
// The power of two by which numbers are multiplied before they are split.
struct PartScale {
    // The exponent of the largest magnitude, as a float stores it, but at least 15, so that undo() is not 0.
    uint32_t exponent;
    INLINE explicit PartScale(uint32_t top) : exponent(max(top >> 23, 15)) {}      // top: the largest magnitude's bits
    INLINE float apply() const { return __uint_as_float((268 - exponent) << 23); } // brings top to 2^14 ... 2^15
    INLINE float undo() const { return __uint_as_float((exponent - 14) << 23); }   // 1 / apply()
};
// Splits v * scale and w * scale into two high parts and two low parts.
INLINE void take_apart_pair(float v, float w, float scale, uint32_t& high, uint32_t& low) {
    const __half2 h = __floats2half2_rn(v * scale, w * scale);
    const __half2 l = __floats2half2_rn(v * scale - __low2float(h), w * scale - __high2float(h));
    high = *(const uint32_t*)&h;
    low = *(const uint32_t*)&l;
}

// Splits N fragments of floats, which are in a warp's registers. Before, each pair of registers holds two neighbours
// along k. Afterwards the first half of a fragment's registers holds high parts, and the second half low parts. The 16
// values of k may have any order that is the same in a and in b. Returns the factor that undoes the scale.
template <class T, int N, int R> INLINE float take_apart_fragments(uint32_t (&x)[N][R]) {
    if (PARTS<T> == 1) return 1;
    float top = 0;
    UNROLL_FOR (const auto& fragment : x)
        UNROLL_FOR (uint32_t v : fragment) top = fmaxf(top, fabsf(__uint_as_float(v)));
    const PartScale scale(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(top)));
    UNROLL_FOR (auto& v : x) {
        uint32_t low[R / 2];
        UNROLL_FOR (int i = 0; i < R; i += 2)
            take_apart_pair(__uint_as_float(v[i]), __uint_as_float(v[i + 1]), scale.apply(), v[i / 2], low[i / 2]);
        UNROLL_FOR (int i = 0; i < R / 2; i++) {
            v[R / 2 + i] = low[i];
        }
    }
    return scale.undo();
}

// Convolutions and muon_kernel split floats in shared memory, because each number is used in several fragments. A place
// holds 8 floats: one piece at an address, and one piece at this address with bit 4 toggled. After the split, the first
// piece holds the high parts, and the second piece the low parts. places(f) calls f(address) for each place that this
// thread has copied. In find_top each warp writes the largest magnitude of its floats into `tops`. After a
// __syncthreads, take_apart_places splits the floats, and returns the factor that undoes the scale.
INLINE void load_place(float (&v)[8], uint32_t at) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
        unpack<float>((float(&)[4])v[4 * i], load_shared(at ^ (i * 16)));
    }
}
template <int WARPS, class Places> INLINE void find_top(uint32_t (&tops)[WARPS], Places places) {
    float top = 0, v[8];
    places([&](uint32_t at) {
        load_place(v, at);
        UNROLL_FOR (float x : v) top = fmaxf(top, fabsf(x));
    });
    // Floats that are not negative have the same order as their bits.
    const uint32_t warp_top = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(top));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = warp_top;
}
template <int WARPS, class Places> INLINE float take_apart_places(uint32_t (&tops)[WARPS], Places places) {
    uint32_t top = 0, parts[2][4];
    UNROLL_FOR (uint32_t t : tops) top = max(top, t);
    const PartScale scale(top);
    places([&](uint32_t at) {
        float v[8];
        load_place(v, at);
        UNROLL_FOR (int i = 0; i < 4; i++) {
            take_apart_pair(v[2 * i], v[2 * i + 1], scale.apply(), parts[0][i], parts[1][i]);
        }
        UNROLL_FOR (int i = 0; i < 2; i++) {
            store_shared(at ^ (i * 16), (const uint4&)parts[i]);
        }
    });
    return scale.undo();
}

// Multiplies each of NA fragments a by each of NB fragments b: d[m * a_step + n * b_step] += a[m] * b[n]. Each product
// sums over 16 values of k. scale: for floats, the factor that undoes the scales of both operands. Tensor cores
// truncate when they add. So for floats they add up only three products over 16 values of k, and the fp32 units, which
// round, add this sum to d. The three products wait for each other, because they add to the same registers. So up to
// four tiles take turns, which hides the latency.
template <class T, int NA, int NB>
INLINE void multiply(float (*d)[4], int a_step, int b_step, const uint32_t (*a)[4 * PARTS<T>],
                     const uint32_t (*b)[2 * PARTS<T>], float scale) {
    constexpr int N = NA * NB; // how many tiles the result has
    constexpr int AT_ONCE = PARTS<T> == 1 ? 1 : std::min(N, 4);
    auto at = [&](int i) -> float(&)[4] { return d[i % NA * a_step + i / NA * b_step]; };
    static_assert(N % AT_ONCE == 0, "the tiles take turns in whole groups");
    UNROLL_FOR (int first = 0; first < N; first += AT_ONCE) {
        if constexpr (PARTS<T> == 1) mma<T>(at(first), a[first % NA], b[first / NA]);
        else {
            float sum[AT_ONCE][4] = {};
            // low high', high low', high high': the two small products first
            UNROLL_FOR (int product = 0; product < 3; product++)
                UNROLL_FOR (int i = 0; i < AT_ONCE; i++)
                    mma_fp16(sum[i], a[(first + i) % NA] + 4 * (product == 0),
                             b[(first + i) / NA] + 2 * (product == 1));
            UNROLL_FOR (int i = 0; i < 4 * AT_ONCE; i++) {
                at(first + i / 4)[i % 4] += sum[i / 4][i % 4] * scale;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Swizzle: how rows lie in shared memory
// ldmatrix reads a piece of 16 bytes from each of 8 neighbouring rows at once. Shared memory has 32 banks of 4 bytes,
// so 8 pieces can be read at once if they lie in 8 different groups of 4 banks. With rows of 128 bytes, piece c of all
// rows would lie in the same group. So piece c of row r is stored at place c ^ swizzle_key(r) of the row. With 8 pieces
// to a row (or a multiple of 8) the key is r % 8:
//
//   place    0 1 2 3 4 5 6 7
//   row 0    0 1 2 3 4 5 6 7      the piece that lies there. Piece 0 of rows 0, 1, 2, ... lies at
//   row 1    1 0 3 2 5 4 7 6      places 0, 1, 2, ...: each in a group of banks of its own.
//   row 2    2 3 0 1 6 7 4 5
//
// With 4 pieces to a row (64 bytes), two rows fill the 32 banks together, and the key is r / 2 % 4. With 2 pieces the
// key is r / 4 % 2. With an odd number of pieces it is 0, because the rows begin at different banks anyway.
template <int PIECES> INLINE int swizzle_key(int row) {
    // 2^BITS is the largest power of 2 that divides PIECES, but at most 8.
    constexpr int BITS = std::min(3, std::countr_zero((unsigned)PIECES));
    return (row >> (3 - BITS)) & ((1 << BITS) - 1);
}

// The reverse of PICK. It writes x (B, ceil(H / 2), ceil(W / 2), C) to the even rows and columns of out (B, H, W, C),
// and zeros elsewhere. If x is the output's gradient of a convolution with stride 2, out is that with stride 1.
static void spread(act* out, const act* x, int B, int H, int W, int C, Stream* stream = MAIN_STREAM) {
    const int pieces = C / act_vec();
    const uint4* from = (const uint4*)x;
    uint4* to = (uint4*)out;
    each_on(stream, (size_t)B * H * W * pieces, [=] __device__(size_t i) {
        const size_t pixel = i / pieces;
        const int w = pixel % W;
        const int h = pixel / W % H;
        const size_t b = pixel / W / H;
        const size_t p = (b * ((H + 1) / 2) + h / 2) * ((W + 1) / 2) + w / 2; // the pixel of x at this place
        const bool odd = (h | w) & 1;
        to[i] = odd ? make_uint4(0, 0, 0, 0) : from[p * pieces + i % pieces];
    });
}

// Returns four random words for sample b, which depend only on the key, on `quartet` and on b. The key includes the
// step. key.sample0 + b is the sample's number in the step's whole batch. So a draw does not depend on the rank or the
// microbatch that the sample belongs to.
INLINE Words random_words(const RandomKey& key, uint32_t quartet, int b) {
    return philox(key.seed, quartet, (uint32_t)(key.sample0 + b), (uint32_t)*key.step, key.purpose);
}

// Calls f(b, e) for elements e ... e + 3 (a quad) of image b, which has n elements. f draws the quad's random words
// from quartet e / 4. Each image begins with a new quad, so f has to check where the last one ends.
template <class F> struct Quads {
    F f;
    int n;
    __device__ void operator()(size_t i) const {
        const size_t quads = (n + 3) / 4; // how many quads of elements an image has
        const int b = (int)(i / quads);
        const int e = (int)(i % quads) * 4;
        f(b, e);
    }
};
template <class F> static void each_quad(int B, int n, F f) {
    const size_t quads = (size_t)B * ((n + 3) / 4);
    each(quads, Quads<F>{f, n});
}

constexpr int LOSS_PARTS = 4; // how many blocks share an image in loss_kernel and tuning_distance_kernel

// How many blocks of 1,024 threads should run on a multiprocessor. With two blocks, one of them can load while the
// other one waits at a barrier. GPUs of compute capability 8.6, 8.9 and 12.0 can run only 1,536 threads.
constexpr int SUM_BLOCKS = ARCH == 800 || ARCH == 900 || ARCH == 1000 ? 2 : 1;

// Adds up the values v of a block's 1024 threads. Only the threads of the first warp receive the result. The order is
// fixed, so that a repeated run has the same losses and norms, bit by bit.
INLINE double block_sum(double v) {
    __shared__ double sums[32]; // one sum of each warp
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x < 32 ? sums[threadIdx.x] : 0);
}
#endif
