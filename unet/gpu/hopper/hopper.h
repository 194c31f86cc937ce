// hopper.h - TMA, mbarriers, clusters and wgmma (sm_90a).
#pragma once
#include "../shared.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- Hopper (sm_90a): TMA and what goes with it

// TMA, the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor"), moves a box of a tensor between global and
// shared memory. A tensor map (tensor_map) describes the tensor and the size of the box. a, b, c, d are the coordinates
// of the box's first element, the innermost dimension first (channel, column, row, image). Outside of the tensor,
// tma_load reads zeros and tma_store writes nothing. A load reports its bytes to an mbarrier. Before the load,
// mbarrier_expect must tell the mbarrier how many bytes will come.
INLINE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b, int c, int d = 0) {
    PTX("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3,%4,%5,%6}], [%2];",
        "r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d));
}
// Loads contiguous bytes, without a map. Addresses and sizes are multiples of 16 bytes.
INLINE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];", //
        "r"(to), "l"(from), "r"(bytes), "r"(barrier));
}
INLINE void tma_store(const CUtensorMap* map, uint32_t from, int a, int b, int c, int d = 0) {
    PTX("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];", //
        "l"(map), "r"(from), "r"(a), "r"(b), "r"(c), "r"(d));
}
INLINE void prefetch_tensor_map(const CUtensorMap* map) { PTX("prefetch.tensormap [%0];", "l"(map)); }
// Waits until this thread's tma_stores have read shared memory. After that, this memory may be written again.
INLINE void tma_stores_read() { PTX("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"); }
// TMA and wgmma access shared memory by another path than ordinary instructions (PTX ISA, "Async proxy"). After this
// fence, TMA and wgmma see what the thread has written to shared memory with ordinary stores.
INLINE void fence_async() { PTX("fence.proxy.async.shared::cta;"); }

// Named barriers (PTX ISA, "bar") with numbers 0 to 15: `threads` threads take part, and warps_arrive does not wait.
INLINE void warps_sync(int id, int threads) { PTX("bar.sync %0, %1;", "r"(id), "r"(threads)); }
INLINE void warps_arrive(int id, int threads) { PTX("bar.arrive %0, %1;", "r"(id), "r"(threads)); }

// In most tiles, TMA and wgmma swizzle rows of 128 bytes, in groups of 8 rows. In a convolution, a row holds one slice
// of a pixel (64 channels in bf16, 128 in FP8), or as many weights of one tap. If a row runs along k, one wgmma
// instruction multiplies 32 bytes of it: 16 bf16 or 32 FP8 numbers.
constexpr int SLICE_CHANNELS = 64;
constexpr int SLICE_BYTES = SLICE_CHANNELS * (int)bytes_of(Element::BF16);
constexpr int slice_channels(Element e) { return SLICE_BYTES / (int)bytes_of(e); }
constexpr int SWIZZLE_BYTES = 8 * SLICE_BYTES; // the swizzle's period; a tile must begin at a multiple of this
static_assert(SLICE_BYTES == 128, "the widest row that TMA and wgmma swizzle");
constexpr int BYTES_OF_64_ROWS = SLICE_CHANNELS * SLICE_BYTES; // such as a tap's bf16 weights, 64 x 64 channels
constexpr int whole_swizzles(int bytes) { return (bytes + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES; }

// The reverse of ldmatrix and ldmatrix_trans: they store four 8x8 matrices.
INLINE void stmatrix(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}
INLINE void stmatrix_trans(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}

// Rounds an address up to a multiple of 1024 bytes, where swizzled tiles must begin.
INLINE uint32_t kilobyte_aligned(const void* shared) {
    uint32_t base = (shared_address(shared) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
    // This hides from the compiler how base is computed. Otherwise the compiler computes it again and again.
    asm volatile("mov.b32 %0, %0;" : "+r"(base));
    return base;
}
// Tells the compiler that v is the same in all lanes of a warp. So descriptors that are computed from it (Operand) stay
// in uniform registers, where wgmma needs them.
INLINE uint32_t uniform(uint32_t v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// The driver's function that makes tensor maps. As it is found at run time, the program need not be linked with -lcuda.
typedef decltype(&cuTensorMapEncodeTiled) EncodeTensorMap;
static EncodeTensorMap find_encode_tensor_map() {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &result));
#endif
    if (!f) die("this GPU's driver is too old for the program (it lacks cuTensorMapEncodeTiled); CUDA 12's has it");
    return (EncodeTensorMap)f;
}

// TMA only copies numbers, so only their size matters.
static CUtensorMapDataType tma_type(Element element) {
    if (bytes_of(element) == 4) return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    if (bytes_of(element) == 2) return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}
static CUtensorMapSwizzle tma_swizzle(size_t row_bytes) {
    if (row_bytes == SLICE_BYTES) return CU_TENSOR_MAP_SWIZZLE_128B;
    if (row_bytes == SLICE_BYTES / 2) return CU_TENSOR_MAP_SWIZZLE_64B;
    die("internal error: a box of TMA has rows of 128 or 64 bytes, not %zu", row_bytes);
}

// Describes a dense tensor to TMA: its sizes and those of a box, the innermost dimension first. Dimensions that are
// left out are 1. The rows of a box are 128 or 64 bytes wide. If p is null, the map is empty.
static CUtensorMap tensor_map(const void* p, const int64_t (&dims)[4], const int (&box)[4],
                              Element element = Element::BF16) {
    static const EncodeTensorMap encode = find_encode_tensor_map();
    CUtensorMap map = {};
    if (!p) return map;
    cuuint64_t size[4];
    // pitch[i]: bytes from an element to the next one along dimension i + 1 (the driver does not read the last one)
    cuuint64_t pitch[4];
    cuuint64_t bytes = bytes_of(element);
    cuuint32_t boxes[4], steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) {
        size[i] = (cuuint64_t)std::max<int64_t>(1, dims[i]);
        boxes[i] = (cuuint32_t)std::max(1, box[i]);
        bytes *= size[i];
        pitch[i] = bytes;
    }
    const auto swizzle = tma_swizzle(box[0] * bytes_of(element));
    const auto outside = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE; // outside of the tensor, TMA reads zeros
    const CUresult error = encode(&map, tma_type(element), 4, (void*)p, size, pitch, boxes, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, outside);
    if (error != CUDA_SUCCESS) die("internal error: cuTensorMapEncodeTiled returned %d", (int)error);
    return map;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- building blocks of Hopper's kernels (sm_90a)
// The threads of such a kernel have roles, such as loading or multiplying. Roles exchange data through rings of stages
// in shared memory (Pipeline). The structs below hold only numbers, and their functions are inlined, so they stay in
// registers. Code that took the address of such a struct would put it into local memory, which is slower.

// Dynamic shared memory of a block if a multiprocessor runs `blocks` of them; 128 bytes are for __shared__ variables.
constexpr int hopper_shared(int blocks) { return H200.shared_for(blocks, 128); }
// Bytes that a kernel needs beside its tiles: 8 for each mbarrier, and 1 KB because tiles begin at a multiple of 1 KB.
constexpr int shared_beside(int barriers) { return barriers * 8 + SWIZZLE_BYTES; }

// Divides dynamic shared memory into mbarriers and tiles. The members are the addresses of the next free ones.
struct SharedMemory {
    uint32_t barriers_at, tiles_at;
    INLINE explicit SharedMemory(int barriers) {
        extern __shared__ __align__(16) unsigned char dynamic[];
        barriers_at = shared_address(dynamic);
        tiles_at = uniform(kilobyte_aligned(dynamic + barriers * 8));
    }
};

// A ring of stages in shared memory: some threads fill the stages, and other threads read them.
//
//        acquire, tma_load                        arrived, read, release
//   the thread that loads  --->  stage 0  --->  readers
//                                stage 1
//                                stage 2            each stage has two mbarriers:
//                                ... and back         full:   its tile has arrived
//                                to stage 0           empty:  all readers have released it
//
//   phases of stage 0's barriers:
//     full    | loads | tile 0 is there ......... | loads | tile 3 is there ...
//     empty   | (free at first)  | readers | free         | readers | free
//
// Invariant: all roles use the stages in the same order, and a stage is filled again only after it has been released
// `readers` times. Each role has its own copy of the struct, with its own place in the ring; only the stages and their
// barriers are shared.
//   readers = 0     a stage has no empty barrier: it is filled only once (`kept`), or the caller knows that the next
//                   stage is free (it calls `next` in place of `acquire`)
//   writers > 1     several warps fill a stage with ordinary stores: acquire, store, warp_stored
//   BYTES = 0       the ring has barriers, but no memory: the data lies elsewhere
//
// Two rules for all roles (dev/test/test_pipelines.py simulates the kernels, with and without violations):
//
// 1. If two warpgroups take turns with a ring, each waits at a full barrier of its own (OWNERS = 2). A waiting thread
//    cannot distinguish phase 1 from phase 3, because it only sees the parity. So it must wait for every phase of its
//    barrier. With a common barrier it would take the other warpgroup's tile for its own:
//
//      stage 0 is filled for   warpgroup 0   warpgroup 1   warpgroup 0   when warpgroup 0's second wait (parity 1) ends
//      one barrier: phase      0             1             2             at warpgroup 1's tile: wrong
//      a barrier each: phase   0             0             1             at its own second tile
//
// 2. A thread that fills two rings must not load too far ahead in one of them. Suppose that it waits for a stage of the
//    first ring that becomes free only after some product, and that it has not yet loaded that product's operand into
//    the second ring. Then it waits for itself, for ever. So it loads both operands in the order in which the products
//    need them.
struct Stage {
    uint32_t address, full;
};
// All threads of a warp call this when they have filled their part of a stage with ordinary stores. The fence is needed
// if TMA or wgmma reads the stage. One thread arrives for the whole warp.
INLINE void warp_stored(uint32_t full) {
    fence_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(full);
}
// BYTES: the size of a stage. OWNERS: how many full barriers each stage has (rule 1).
template <int BYTES, int OWNERS = 1> struct Pipeline {
    static_assert(BYTES % SWIZZLE_BYTES == 0, "a tile must begin at a whole kilobyte");
    uint32_t stages_at, full_at, empty_at; // addresses of stage 0 and of its barriers
    int size, readers, writers;            // number of stages; arrivals that free a stage; arrivals that fill it
    int place = 0;                         // the next stage to fill or to wait for
    int done = 0;                          // the stage that this reader releases next
    // The parity to wait for at the full barrier of stage `place`, if OWNERS = 1. For any OWNERS, phase ^ 1 is the
    // parity for its empty barrier. In the first round that wait returns at once, since the stage is free: a new
    // barrier behaves as if a phase of parity 1 had already ended.
    uint32_t phase = 0;
    uint32_t phases = 0; // OWNERS = 2: bit i is the parity to wait for at the own full barrier of stage i

    INLINE Pipeline(SharedMemory& shared, int n, int readers, int writers = 1) : readers(readers), writers(writers) {
        auto take = [](uint32_t& next, int n, int bytes) { // returns where n * bytes bytes begin
            next += n * bytes;
            return next - n * bytes;
        };
        size = n;
        stages_at = take(shared.tiles_at, n, BYTES);
        full_at = take(shared.barriers_at, n, 8 * OWNERS);
        empty_at = take(shared.barriers_at, readers ? n : 0, 8);
    }
    INLINE void init() const { // called by one thread
        for (int i = 0; i < size; i++) {
            UNROLL_FOR (int owner = 0; owner < OWNERS; owner++) {
                mbarrier_init(stage(i, owner).full, writers);
            }
            if (readers) mbarrier_init(empty(i), readers);
        }
    }
    INLINE Stage stage(int i, int owner = 0) const {
        const int of_owner = OWNERS == 2 ? 8 * owner : 0;
        return {stages_at + i * BYTES, full_at + 8 * OWNERS * i + of_owner};
    }
    INLINE uint32_t empty(int i) const { return empty_at + 8 * i; }

    // Waits until the next stage is free, to fill it. owner: the warpgroup that will read it, if OWNERS = 2.
    INLINE Stage acquire(int owner = 0) {
        mbarrier_wait(empty(place), phase ^ 1);
        return next(owner);
    }
    // Moves on by one stage without waiting. A thread that fills stages calls this if it knows that the stage is free.
    INLINE Stage next(int owner = 0) {
        const Stage s = stage(place, owner);
        if (++place == size) {
            place = 0;
            phase ^= 1;
        }
        return s;
    }
    // For a reader: waits until the next stage is full, and returns its address.
    INLINE uint32_t arrived(int owner = 0) {
        const int i = place;
        mbarrier_wait(stage(i, owner).full, OWNERS == 2 ? phases >> i & 1 : phase);
        if (OWNERS == 2) phases ^= 1u << i;
        return next().address;
    }
    // Stage i, which is filled only once. wait: whether to wait until it is full, as is necessary the first time.
    INLINE uint32_t kept(int i, bool wait) const {
        if (wait) mbarrier_wait(stage(i).full, 0);
        return stage(i).address;
    }
    // Releases the stages in the order in which they arrived. All threads of a reader (a warpgroup or a warp) call
    // this, because each has its own `done`. Only the thread whose `speaks` is true arrives at the empty barrier.
    INLINE void release(bool speaks = (threadIdx.x & 127) == 0) {
        const int i = hand_over();
        if (speaks) free(i);
    }
    // A reader calls this in place of release if another role will `free` the stage later. Returns the stage's number.
    INLINE int hand_over() {
        const int i = done;
        if (++done == size) done = 0;
        return i;
    }
    INLINE void free(int i) const { mbarrier_arrive(empty(i)); }
    // Moves on by n stages without waiting, for example past the other warpgroup's stages.
    INLINE void pass_over(int n) {
        for (place += n; place >= size; place -= size) phase ^= 1;
        done = place;
    }
};
// The ring through which results leave conv_tiles_kernel. It has no memory: a warpgroup writes its results over stage i
// of the ring of pixels, and calls warp_stored with its own full barrier of stage i in Results (OWNERS = 2). The warp
// that stores waits there, stores the results, and frees stage i of the ring of pixels.
typedef Pipeline<0, 2> Results;

// One thread calls init_barriers. All threads of the block call ready, and may use the barriers after that.
template <class... Pipelines> INLINE void init_barriers(const Pipelines&... pipelines) {
    (pipelines.init(), ..., mbarriers_ready());
}
template <class... Pipelines> INLINE void ready(const Pipelines&... pipelines) {
    if (threadIdx.x == 0) init_barriers(pipelines...);
    __syncthreads();
}

// Walks over the tiles `first`, `first + step`, ... below `end`. n is the tile's image; h and w are its row and column
// among the image's tiles. next() needs only additions: divisions would be most of the loading thread's work.
struct TileWalk : Origin {
    Origin d;                   // how far a step leads: in images, and in rows and columns of tiles
    int tiles_h, tiles_w, left; // left: tiles that are left, including the current one
    INLINE TileWalk(int tiles_h, int tiles_w, int first, int step, int end) : tiles_h(tiles_h), tiles_w(tiles_w) {
        (Origin&)* this = tile_origin(first, tiles_h, tiles_w, 1, 1);
        d = tile_origin(step, tiles_h, tiles_w, 1, 1);
        left = max(0, ceil_div(end - first, step));
    }
    INLINE explicit operator bool() const { return left > 0; }
    INLINE void next() {
        left--;
        n += d.n;
        h += d.h;
        w += d.w;
        if (w >= tiles_w) {
            w -= tiles_w;
            h++;
        }
        if (h >= tiles_h) {
            h -= tiles_h;
            n++;
        }
    }
};

// Where piece `piece` (16 bytes) of row `row` lies in a box of TMA, in bytes from the box's beginning. A row has
// CHANNELS bf16. The swizzle XORs bits 4-6 of an element's address with bits 7-9 if rows have 128 bytes, or bits 4-5
// with bits 7-8 if rows have 64 bytes.
template <int CHANNELS> INLINE uint32_t box_place(int row, int piece) {
    if (CHANNELS == SLICE_CHANNELS) return row * SLICE_BYTES + ((piece ^ (row & 7)) << 4);
    return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- wgmma: how a warpgroup multiplies (sm_90a)
// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"): a warpgroup, 4 warps, computes
// D (64, N) += A (64, 16) * B (16, N) in the background. B is in shared memory. A is there, too, or in registers: then
// each warp holds 16 rows of A, as in the argument `a` of mma_bf16. Each thread holds N / 2 elements of D, float
// d[N / 2]:
//
//   thread t of the 128:   r = t / 32 * 16 + t % 32 / 4,   c = 8 j + t % 4 * 2          for j = 0 ... N / 8 - 1
//   d[4 j] = D(r, c)       d[4 j + 1] = D(r, c + 1)        d[4 j + 2] = D(r + 8, c)     d[4 j + 3] = D(r + 8, c + 1)
//
// K_MAJOR: the operand's rows in memory run along k. MN_MAJOR: they run along m (D's rows) or n (D's columns).
// The order of calls: wgmma_fence; Wgmma<N>::add, which starts a product, one or more times; wgmma_commit, which makes
// these products a group; multiplied<PENDING>(d), which waits until at most the newest PENDING groups still run.
enum { K_MAJOR = 0, MN_MAJOR = 1 };

// Makes a group's products wait until earlier instructions have written the registers of D and A.
INLINE void wgmma_fence() { PTX("wgmma.fence.sync.aligned;"); }
INLINE void wgmma_commit() { PTX("wgmma.commit_group.sync.aligned;"); }
template <int N> INLINE void wgmma_wait() { // waits until all groups except the latest N are done
    PTX("wgmma.wait_group.sync.aligned %0;", "n"(N));
}
// The compiler does not know for which registers a wait is. The empty asm claims to change the accumulators, so the
// compiler reads them only after it.
template <int N> INLINE void accumulators_ready(float (&acc)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(acc[i])::"memory");
    }
}
// Waits until all groups except the newest PENDING are done. Then their sums d may be read.
template <int PENDING, class... Sums> INLINE void multiplied(Sums&... d) {
    wgmma_wait<PENDING>();
    (accumulators_ready(d), ...);
}

// An operand in shared memory, as wgmma's descriptor (PTX ISA, "Matrix descriptor"). rows() makes it from rows of 128
// bytes (64 bf16 or 128 FP8), which are swizzled in groups of 8. Such a group is 1 KB, and begins at a multiple of
// 1 KB. The descriptor holds addresses and distances in units of 16 bytes:
//   low     start address | "leading" distance << 16
//   high    "stride" distance | 1 << 30 (swizzle of 128 bytes)
//   K_MAJOR    a row holds 64 values of k, for one m or n. The "stride" distance leads from a group of 8 rows to the
//              next group. The next 16 values of k begin 32 bytes further on.
//   MN_MAJOR   a row holds 64 values of m or n, for one k. The "stride" distance leads from a group of 8 rows to the
//              next group. The "leading" distance leads from 64 values of m or n to the next 64.
// FP8 operands are always K_MAJOR. A row holds 128 values of k, and 32 bytes are 32 values of k. In rows(), `pitch`
// (the "stride" distance) and `leading` are in rows of 128 bytes.
struct Operand {
    uint32_t low, high;
    // & 0x3FFFF: in a cluster, higher bits of an address are the block's number. The descriptor has no room for them.
    static INLINE Operand rows(uint32_t address, int pitch, int leading = 0) {
        return {(address & 0x3FFFF) >> 4 | leading * 8 << 16, pitch * 8 | 1u << 30};
    }
    // A K_MAJOR operand that is not swizzled: matrices of 8 rows x 16 bytes. In bytes, `along_k` (the "leading"
    // distance) leads to the next matrix along k, and `along_rows` ("stride") to the matrix of the next 8 rows.
    static INLINE Operand matrices(uint32_t address, int along_k, int along_rows) {
        return {(address & 0x3FFFF) >> 4 | along_k / 16 << 16, (uint32_t)along_rows / 16};
    }
    INLINE uint64_t at(int offset) const { return (uint64_t)high << 32 | (low + offset); } // offset: 16-byte units
};

// One slice (128 bytes) of each pixel of a tile, in rows of PITCH pixels, with the border that a 3x3 filter reads
// (drawn in conv_tiles.h). Eight neighbouring pixels are a group of the operand's rows, and the next group lies PITCH
// pixels further on. All nine taps read this memory, from different start addresses. PITCH = 8: 1x1, without a border.
template <int PITCH> struct Halo {
    Operand tap0;
    INLINE explicit Halo(uint32_t address) : tap0(Operand::rows(address, PITCH)) {}
    // Tap (kh, kw) = (tap / 3, tap % 3) begins kh * PITCH + kw = kh * (PITCH - 3) + tap pixels after tap 0. A pixel is
    // 8 units of 16 bytes. For tap < 9, tap * 11 >> 5 is tap / 3 rounded down.
    INLINE Operand shifted(int tap) const {
        const int pixels = PITCH == 8 ? 0 : (tap * 11 >> 5) * (PITCH - 3) + tap;
        return {tap0.low + pixels * 8, tap0.high};
    }
};

// An asm statement names every register, so each N needs a text of its own, which WGMMA_FP8 and WGMMA make. Their
// parameters after N are numbers of the asm's operands (%0, %1, ...): D for D's registers, OP1 ... OP7 for what follows
// them. The last parameter is D's registers as C++ operands.
//   A in shared memory   OP1, OP2: descriptors of A and B; OP3, OP4 (WGMMA): their majors
//   A in registers       OP1 - OP4: A's registers; OP5: B's descriptor; OP6, OP7 (WGMMA): B's major, and ADD
// In the instruction, "1, 1, 1" means: add to D, do not negate A, do not negate B.
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D48 D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define D64 D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define D80 D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define D96 D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D112 D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define D128 D112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_64 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define SUMS_96 SUMS_64, SIXTEEN(64), SIXTEEN(80)

// FP8: D (64, N) += A (64, 32) * B (32, N). A and B are K_MAJOR: wgmma accepts no other FP8 operands. If A is in
// registers, each warp holds 16 rows of it. Lane 4 g + t holds parts of rows g and g + 8, four values of k in a
// register:
//
//   a[0]   row g,      k = 4 t .. 4 t + 3            a[2]   row g,      k = 16 + 4 t .. 16 + 4 t + 3
//   a[1]   row g + 8,  k = 4 t .. 4 t + 3            a[3]   row g + 8,  k = 16 + 4 t .. 16 + 4 t + 3
//
// Weights and activations are e4m3, gradients are e5m2. The tensor cores keep only 14 bits of an FP8 sum. This is
// enough here, because few wgmma instructions add to the same sum (MAX_FP8_PRODUCTS).
template <int N, Element A, Element B> struct WgmmaFp8;
#define WGMMA_FP8_OF(N, A_ELEMENT, B_ELEMENT, TYPES, D, OP1, OP2, OP3, OP4, OP5, ...)                              \
    template <> struct WgmmaFp8<N, Element::A_ELEMENT, Element::B_ELEMENT> {                                       \
        INLINE static void add(float (&d)[N / 2], uint64_t a, uint64_t b) {                                        \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" D "}, " OP1 ", " OP2         \
                         ", 1, 1, 1;"                                                                              \
                         : __VA_ARGS__                                                                             \
                         : "l"(a), "l"(b));                                                                        \
        }                                                                                                          \
        INLINE static void add(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                            \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" D "}, {" OP1 "," OP2 "," OP3 \
                         "," OP4 "}, " OP5 ", 1, 1, 1;"                                                            \
                         : __VA_ARGS__                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
        }                                                                                                          \
    };
#define WGMMA_FP8(N, D, OP1, OP2, OP3, OP4, OP5, ...)                                        \
    WGMMA_FP8_OF(N, FP8, FP8, "e4m3.e4m3", D, OP1, OP2, OP3, OP4, OP5, __VA_ARGS__)          \
    WGMMA_FP8_OF(N, FP8, FP8_GRADIENT, "e4m3.e5m2", D, OP1, OP2, OP3, OP4, OP5, __VA_ARGS__) \
    WGMMA_FP8_OF(N, FP8_GRADIENT, FP8, "e5m2.e4m3", D, OP1, OP2, OP3, OP4, OP5, __VA_ARGS__)
WGMMA_FP8(8, "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", FOUR(0))
WGMMA_FP8(32, D16, "%16", "%17", "%18", "%19", "%20", SIXTEEN(0))
WGMMA_FP8(64, D32, "%32", "%33", "%34", "%35", "%36", SIXTEEN(0), SIXTEEN(16))
WGMMA_FP8(128, D64, "%64", "%65", "%66", "%67", "%68", SUMS_64)
WGMMA_FP8(192, D96, "%96", "%97", "%98", "%99", "%100", SUMS_96)
WGMMA_FP8(256, D128, "%128", "%129", "%130", "%131", "%132", SUMS_96, SIXTEEN(96), SIXTEEN(112))

// bf16: D (64, N) += A (64, 16) * B (16, N). With ADD = 0 (only if A is in registers) the product replaces D: a
// predicate p, set by IF_NOT_0, stands in place of the first 1 of "1, 1, 1".
template <int N> struct Wgmma;
#define PRODUCT_64(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
#define IF_NOT_0(OP) "{.reg .pred p; setp.ne.b32 p, " OP ", 0; "
#define WGMMA(N, D, OP1, OP2, OP3, OP4, OP5, OP6, OP7, ...)                                                       \
    template <> struct Wgmma<N> {                                                                                 \
        typedef float Sums[N / 2];                                                                                \
        template <int A_MAJOR, int B_MAJOR> INLINE static void add(Sums& d, uint64_t a, uint64_t b) {             \
            asm volatile(PRODUCT_64(N) "{" D "}, " OP1 ", " OP2 ", 1, 1, 1, " OP3 ", " OP4 ";"                    \
                         : __VA_ARGS__                                                                            \
                         : "l"(a), "l"(b), "n"(A_MAJOR), "n"(B_MAJOR));                                           \
        }                                                                                                         \
        template <int B_MAJOR, int ADD = 1> INLINE static void add(Sums& d, const uint32_t (&a)[4], uint64_t b) { \
            asm volatile(IF_NOT_0(OP7) PRODUCT_64(N) "{" D "}, {" OP1 "," OP2 "," OP3 "," OP4 "}, " OP5           \
                                                     ", p, 1, 1, " OP6 ";}"                                       \
                         : __VA_ARGS__                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_MAJOR), "n"(ADD));           \
        }                                                                                                         \
    };
WGMMA(32, D16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", SIXTEEN(0))
WGMMA(64, D32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", SIXTEEN(0), SIXTEEN(16))
WGMMA(128, D64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", SUMS_64)
WGMMA(192, D96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", SUMS_96)
WGMMA(256, D128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", SUMS_96, SIXTEEN(96), SIXTEEN(112))

// A warpgroup's sums for N pixels and OUT_SLICES slices of 64 output channels of the result. In wgmma's D, a row is an
// output channel, and a column is a pixel. Invariant: nobody reads d between multiply and wait.
template <int OUT_SLICES, int N> struct Accumulators {
    float d[OUT_SLICES][N / 2];
    // The sums begin with the bias. A thread holds two channels of each slice b: d[b][k] belongs to the first of them
    // if k >> 1 & 1 is 0, and to the second if it is 1.
    INLINE explicit Accumulators(const float (&bias)[OUT_SLICES][2]) {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = bias[b][k >> 1 & 1];
            }
    }
    // FP8: the sums begin with 0, because they are scaled before the bias is added.
    INLINE Accumulators() {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = 0;
            }
    }
    // Starts STEPS products for each slice of output channels, as one group. Each product sums over 16 input channels.
    // weights: the address of 64 rows of 128 bytes for each slice. TRANSPOSED (input gradient): a row of the weights
    // belongs to an input channel of the product, not to an output channel.
    template <int STEPS, bool TRANSPOSED> INLINE void multiply(uint32_t weights, Operand pixels) {
        constexpr int A_MAJOR = TRANSPOSED ? MN_MAJOR : K_MAJOR;
        // from the weights of 16 input channels to the next 16, in units of 16 bytes (a slice b has 512 units)
        constexpr int A_STEP = TRANSPOSED ? 128 : 2;
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
                Wgmma<N>::template add<A_MAJOR, K_MAJOR>(d[b], a.at(k * A_STEP + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    template <int STEPS, Element PIXELS> INLINE void multiply_fp8(uint32_t weights, Operand pixels) {
        using Product = WgmmaFp8<N, Element::FP8, PIXELS>;
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++) Product::add(d[b], a.at(k * 2 + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    // FP8: multiplies the sums of the thread's two channels of slice b by two factors, which undoes the operands'
    // factors, and then adds v.
    INLINE void scale(int b, const float (&factors)[2], const float (&v)[2]) {
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            d[b][k] = fmaf(d[b][k], factors[k >> 1 & 1], v[k >> 1 & 1]);
        }
    }
    INLINE void add(int b, const float (&v)[2]) {
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            d[b][k] += v[k >> 1 & 1];
        }
    }
    INLINE void wait() {
        wgmma_wait<0>();
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++) accumulators_ready(d[b]);
    }
};

// Two warpgroups take turns with the tensor cores: one of them finishes its tile while the other one multiplies.
//
//   warpgroup 0    | multiply | pass, finish | wait | multiply | ...
//   warpgroup 1    | wait     | multiply     | pass, finish    | ...
//
// Warpgroup w waits at named barrier 4 + w until the other one calls pass. Invariant: each warpgroup waits once and
// passes once for each of its tiles, and the two compute tiles in turns. So none waits for one that has no tile left.
template <bool TAKE_TURNS> struct Turn {
    int warpgroup;
    INLINE explicit Turn(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == 1) pass(); // so that warpgroup 0 begins
    }
    INLINE void wait() const {
        if (TAKE_TURNS) warps_sync(4 + warpgroup, 256);
    }
    INLINE void pass() const {
        if (TAKE_TURNS) warps_arrive(4 + (warpgroup ^ 1), 256);
    }
};
#endif
