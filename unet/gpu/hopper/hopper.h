// hopper.h - TMA, mbarriers, clusters and wgmma (sm_90a).
#pragma once
#include "../shared.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- Hopper (sm_90a): TMA and what goes with it

// TMA, the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor"), moves a box of a tensor between global and
// shared memory. One thread starts the move, and the hardware computes all addresses. A tensor map (made by tensor_map)
// describes the tensor and the size of the box. a, b, c, d are the coordinates of the box's first element; a belongs to
// the innermost dimension. For an activation, a to d are channel, column, row and image. Where a box lies outside of
// the tensor, tma_load reads zeros, and tma_store writes nothing. A load reports its bytes to an mbarrier when they
// have arrived. Before the load, mbarrier_expect must tell this mbarrier how many bytes will come.
INLINE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b, int c, int d = 0) {
    PTX("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3,%4,%5,%6}], [%2];",
        "r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d));
}
// Loads contiguous bytes in the same way, without a map. Addresses and sizes are multiples of 16 bytes.
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

// Named barriers (PTX ISA, "bar"). A block has 16 of these barriers, with the numbers (id) 0 to 15. `threads` threads
// take part in a barrier. warps_sync arrives at the barrier and waits; warps_arrive only arrives.
INLINE void warps_sync(int id, int threads) { PTX("bar.sync %0, %1;", "r"(id), "r"(threads)); }
INLINE void warps_arrive(int id, int threads) { PTX("bar.arrive %0, %1;", "r"(id), "r"(threads)); }

// Sizes that Hopper's kernels have in common. In most tiles, TMA and wgmma swizzle rows of 128 bytes, in groups of 8
// rows. (Some boxes have rows of 64 bytes: see tma_swizzle.) In a convolution, a row of 128 bytes holds one slice of a
// pixel (64 channels in bf16, 128 channels in FP8: slice_channels), or as many weights of one tap that are neighbours
// in memory. (Section 20 explains slices.) If a row runs along k, one wgmma instruction multiplies 32 bytes of it,
// which are 16 bf16 or 32 FP8 numbers.
constexpr int SLICE_CHANNELS = 64;
constexpr int SLICE_BYTES = SLICE_CHANNELS * (int)bytes_of(Element::BF16);
constexpr int slice_channels(Element e) { return SLICE_BYTES / (int)bytes_of(e); }
constexpr int SWIZZLE_BYTES = 8 * SLICE_BYTES; // the swizzle's period; a tile must begin at a multiple of this
static_assert(SLICE_BYTES == 128, "the widest row that TMA and wgmma swizzle");
constexpr int BYTES_OF_64_ROWS =
    SLICE_CHANNELS * SLICE_BYTES; // for example one tap's bf16 weights for 64 input and 64 output channels
constexpr int whole_swizzles(int bytes) { return (bytes + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES; }

// stmatrix and stmatrix_trans are the reverse of ldmatrix and ldmatrix_trans. They store four 8x8 matrices from
// registers to shared memory.
INLINE void stmatrix(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}
INLINE void stmatrix_trans(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}

// Returns the address of `shared`, rounded up to a multiple of 1024 bytes, because swizzled tiles must begin at such a
// multiple.
INLINE uint32_t kilobyte_aligned(const void* shared) {
    uint32_t base = (shared_address(shared) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
    // This hides from the compiler how base is computed. Otherwise the compiler would compute base again and again in
    // the main loops.
    asm volatile("mov.b32 %0, %0;" : "+r"(base));
    return base;
}
// Returns v, which must be the same in all lanes of a warp. The compiler knows that the result of this function is the
// same in all lanes. So wgmma's descriptors (see Operand), if they are computed from the result, stay in uniform
// registers, where wgmma needs them.
INLINE uint32_t uniform(uint32_t v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// EncodeTensorMap is the type of the driver's function that makes tensor maps. find_encode_tensor_map finds this
// function at run time, so that the program need not be linked with -lcuda.
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

// Returns a type of numbers that have the size of this element. TMA only copies them, so their format does not matter.
static CUtensorMapDataType tma_type(Element element) {
    if (bytes_of(element) == 4) return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    if (bytes_of(element) == 2) return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}
// Returns the swizzle for rows of row_bytes bytes in shared memory.
static CUtensorMapSwizzle tma_swizzle(size_t row_bytes) {
    if (row_bytes == SLICE_BYTES) return CU_TENSOR_MAP_SWIZZLE_128B;
    if (row_bytes == SLICE_BYTES / 2) return CU_TENSOR_MAP_SWIZZLE_64B;
    die("internal error: a box of TMA has rows of 128 or 64 bytes, not %zu", row_bytes);
}

// Describes a dense tensor to TMA. dims: the sizes of the tensor, the innermost dimension first. box: the sizes of a
// box, which TMA moves at once. Dimensions that are left out are 1. The rows of a box are 128 or 64 bytes wide. In
// shared memory the rows are swizzled, in a way that depends on this width. If p is null, there is no tensor, and the
// function returns an empty map.
static CUtensorMap tensor_map(const void* p, const int64_t (&dims)[4], const int (&box)[4],
                              Element element = Element::BF16) {
    static const EncodeTensorMap encode = find_encode_tensor_map();
    CUtensorMap map = {};
    if (!p) return map;
    cuuint64_t size[4];
    // pitch[i] is the number of bytes from an element to the next one along dimension i + 1. The driver reads pitch[0]
    // to pitch[2].
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
// Such a kernel's threads have a few roles, each of which is a loop over tiles. In most kernels one thread loads, and
// one or more warpgroups multiply and finish their tiles. Some kernels have further roles, such as warps that store
// results, add up sums, or transpose an operand. Roles exchange data through rings of stages in shared memory
// (Pipeline). The structs below hold only numbers (addresses in shared memory, counters, sums), and all their functions
// are inlined. So the compiler keeps the structs in registers. If some code took the address of such a struct, the
// struct would lie in local memory, which is slower.

// Returns how many bytes of dynamic shared memory each block can have if a multiprocessor runs `blocks` of them. In
// addition, a kernel's __shared__ variables may have 128 bytes.
constexpr int hopper_shared(int blocks) { return H200.shared_for(blocks, 128); }
// Returns how many bytes of shared memory a kernel needs in addition to its tiles. They are 8 for each mbarrier, and
// 1 KB for the gap before the tiles, which begin at a multiple of 1 KB.
constexpr int shared_beside(int barriers) { return barriers * 8 + SWIZZLE_BYTES; }

// Divides a block's dynamic shared memory: first the room for `barriers` mbarriers, then tiles. Because of the swizzle,
// the size of a tile is a multiple of 1 KB, and so is its address. The members are the addresses of the next free
// barrier and of the next free tile.
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
//   readers = 0     no stage has an empty barrier: either each stage is filled only once (readers call `kept`), or the
//                   caller knows that the next stage is free (it calls `next` in place of `acquire`)
//   writers > 1     several warps fill a stage with ordinary stores: acquire, store, warp_stored
//   BYTES = 0       the ring has barriers, but no memory: the data lies elsewhere
//
// The roles must follow two rules. Each rule was violated once, which caused a bug. dev/test/test_pipelines.py
// simulates the roles of every kernel on the CPU. It also simulates violations of the rules, which must fail.
//
// 1. If two warpgroups take turns with a ring, each waits at a full barrier of its own (OWNERS = 2). A waiting thread
//    cannot distinguish phase 1 from phase 3, because it only sees the parity. So it must wait for every phase of its
//    barrier. If both used the same barrier, phases would end while the stage belongs to the other warpgroup. Then a
//    warpgroup would read the other warpgroup's tile in place of its own:
//
//      stage 0 is filled for   warpgroup 0   warpgroup 1   warpgroup 0   when warpgroup 0's second wait (parity 1) ends
//      one barrier: phase      0             1             2             at warpgroup 1's tile: wrong
//      a barrier each: phase   0             0             1             at its own second tile
//
// 2. A thread that fills two rings must not load too far ahead in one of them. Suppose that the thread waits (in
//    acquire) for a stage of the first ring, and that this stage becomes free only after some product. Suppose also
//    that the thread has not yet loaded that product's other operand into the second ring. Then the thread waits for
//    itself, for ever. So it loads both operands in the order in which the products need them.
struct Stage {
    uint32_t address, full; // the addresses of the stage's memory and of its full barrier
};
// All threads of a warp call this when they have filled a stage, or their part of it, with ordinary stores. First comes
// a fence, which is needed if TMA or wgmma reads the stage. Then one thread arrives at `full`, the stage's full
// barrier, for the whole warp.
INLINE void warp_stored(uint32_t full) {
    fence_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(full);
}
// BYTES: the size of a stage. OWNERS: how many full barriers each stage has (see rule 1).
template <int BYTES, int OWNERS = 1> struct Pipeline {
    static_assert(BYTES % SWIZZLE_BYTES == 0, "a tile must begin at a whole kilobyte");
    uint32_t stages_at, full_at, empty_at; // addresses of stage 0 and its barriers; a stage has OWNERS full barriers
    int size, readers, writers;            // number of stages; how many arrivals at an empty barrier tell that a stage
                                           // is free; how many arrivals at a full barrier tell that a stage is full
    int place = 0;                         // the next stage: the loading role fills it, a reader waits for it
    int done = 0;                          // the stage that this reader releases next
    uint32_t phase = 0;  // OWNERS = 1: the parity to wait for at the full barrier of stage `place`. For any OWNERS, the
                         // parity to wait for at this stage's empty barrier is phase ^ 1. In the first round the wait
                         // at an empty barrier returns at once, because the stage is free: a new barrier behaves as if
                         // a phase of parity 1 had already ended.
    uint32_t phases = 0; // OWNERS = 2: bit i is the parity to wait for at this warpgroup's own full barrier of stage i

    INLINE Pipeline(SharedMemory& shared, int n, int readers, int writers = 1) : readers(readers), writers(writers) {
        auto take = [](uint32_t& next, int n, int bytes) { // takes n * bytes bytes, and returns their address
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

    // For a thread that fills stages: waits until the next stage is free, and returns this stage. owner: the number of
    // the warpgroup that will read the stage, if OWNERS = 2.
    INLINE Stage acquire(int owner = 0) {
        mbarrier_wait(empty(place), phase ^ 1);
        return next(owner);
    }
    // Returns the next stage without waiting, and moves on by one stage. A thread that fills stages calls this if it
    // knows that the stage is free.
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
    // Returns the address of stage i, which is filled only once. wait: whether to wait until the stage is full. This is
    // necessary only the first time.
    INLINE uint32_t kept(int i, bool wait) const {
        if (wait) mbarrier_wait(stage(i).full, 0);
        return stage(i).address;
    }
    // For a reader: releases a stage. Stages are released in the order in which they arrived. All threads that count as
    // one reader together (a warpgroup or a warp) call release, because each of them has its own `done`. But only one
    // of them arrives at the empty barrier: the thread whose argument `speaks` is true.
    INLINE void release(bool speaks = (threadIdx.x & 127) == 0) {
        const int i = hand_over();
        if (speaks) free(i);
    }
    // A reader calls this in place of release if another role will free the stage later (by calling `free`). Returns
    // the number of the stage.
    INLINE int hand_over() {
        const int i = done;
        if (++done == size) done = 0;
        return i;
    }
    INLINE void free(int i) const { mbarrier_arrive(empty(i)); }
    // Moves on by n stages without waiting, for example past stages that belong to the other warpgroup.
    INLINE void pass_over(int n) {
        for (place += n; place >= size; place -= size) phase ^= 1;
        done = place;
    }
};
// Results is the ring through which results leave conv_tiles_kernel. It has barriers, but no memory. Another ring of
// the kernel holds the input pixels. When a warpgroup no longer needs the pixels in a stage of that ring, it writes its
// results there. It does not release such a stage itself. Instead, it calls warp_stored with a full barrier of Results:
// if the results lie in stage i of the ring of pixels, with the full barrier that this warpgroup has in stage i of
// Results (OWNERS = 2). The warp that stores this warpgroup's results waits at this barrier, stores the results, and
// frees stage i in the ring of pixels.
typedef Pipeline<0, 2> Results;

// init_barriers and ready both initialise the barriers of several pipelines. One thread calls init_barriers. All
// threads of the block call ready, and may use the barriers after that.
template <class... Pipelines> INLINE void init_barriers(const Pipelines&... pipelines) {
    (pipelines.init(), ..., mbarriers_ready());
}
template <class... Pipelines> INLINE void ready(const Pipelines&... pipelines) {
    if (threadIdx.x == 0) init_barriers(pipelines...);
    __syncthreads();
}

// Walks over the tiles with the numbers `first`, `first + step`, `first + 2 * step`, ... below `end`. n is the image of
// the current tile. h and w are the tile's row and column among the tiles of this image. next() needs only additions,
// because divisions would be most of the loading thread's work.
struct TileWalk : Origin {
    Origin d;                   // how far a step leads: in images, and in rows and columns of tiles
    int tiles_h, tiles_w, left; // left: how many tiles are left, including the current one
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
        if (w >= tiles_w) { // carry over into the next row, and from there into the next image
            w -= tiles_w;
            h++;
        }
        if (h >= tiles_h) {
            h -= tiles_h;
            n++;
        }
    }
};

// A box is what one TMA instruction copies. box_place returns where piece `piece` (16 bytes) of row `row` lies in a box
// in shared memory, in bytes from the beginning of the box. A row of the box has 2 CHANNELS bytes (CHANNELS bf16). TMA
// swizzles the rows: it XORs some bits of an element's address with higher bits of the same address. If rows have 128
// bytes, it XORs bits 4-6 with bits 7-9. If rows have 64 bytes, it XORs bits 4-5 with bits 7-8.
template <int CHANNELS> INLINE uint32_t box_place(int row, int piece) {
    if (CHANNELS == SLICE_CHANNELS) return row * SLICE_BYTES + ((piece ^ (row & 7)) << 4);
    return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- wgmma: how a warpgroup multiplies (sm_90a)
// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"): a warpgroup, 4 warps, computes
// D (64, N) += A (64, 16) * B (16, N) in the background. B is in shared memory. A is in shared memory, too, or in
// registers. If A is in registers, each warp holds 16 rows of A, in the same registers as the argument `a` of mma_bf16
// (above). D is in registers: each thread holds N / 2 elements of D, float d[N / 2].
//
//   thread t of the 128:   r = t / 32 * 16 + t % 32 / 4,   c = 8 j + t % 4 * 2          for j = 0 ... N / 8 - 1
//   d[4 j] = D(r, c)       d[4 j + 1] = D(r, c + 1)        d[4 j + 2] = D(r + 8, c)     d[4 j + 3] = D(r + 8, c + 1)
//
// So a thread holds elements of two rows, r and r + 8, and of two columns in each group of 8 columns.
// K_MAJOR: the operand's rows in memory run along k. MN_MAJOR: they run along m (D's rows) or n (D's columns).
// ADD = 0: the product replaces D, so D = A * B. (Only the function `add` that takes A in registers has this argument.)
// The order of calls: wgmma_fence; Wgmma<N>::add, one or more times, which start the products; wgmma_commit, which
// makes these products a group; multiplied<PENDING>(d), which waits until at most the newest PENDING groups still run.
// Then d may be read.
enum { K_MAJOR = 0, MN_MAJOR = 1 };

// Must be called before the first product of a group. It makes the products wait until earlier instructions have
// written the registers of D and of A.
INLINE void wgmma_fence() { PTX("wgmma.fence.sync.aligned;"); }
INLINE void wgmma_commit() { PTX("wgmma.commit_group.sync.aligned;"); }
template <int N> INLINE void wgmma_wait() { // waits until all groups except the latest N are done
    PTX("wgmma.wait_group.sync.aligned %0;", "n"(N));
}
// The compiler does not know which registers a wait is for, and might read accumulators before the wait. The empty asm
// statement here claims to change the accumulators. So the compiler reads them only after this statement.
template <int N> INLINE void accumulators_ready(float (&acc)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(acc[i])::"memory");
    }
}
// Waits until all groups of products except the latest PENDING are done. Afterwards the program may read the sums d
// that these groups have computed.
template <int PENDING, class... Sums> INLINE void multiplied(Sums&... d) {
    wgmma_wait<PENDING>();
    (accumulators_ready(d), ...);
}

// An operand in shared memory, in the form of wgmma's descriptors (PTX ISA, "Matrix descriptor"). An operand made by
// rows() consists of rows of 128 bytes, which are 64 bf16 or 128 FP8 numbers. (The table below gives the numbers for
// bf16. FP8 operands are always K_MAJOR; their rows hold 128 values of k, and a step of 32 bytes is 32 values of k.)
// The rows are swizzled in groups of 8. Such a group is 1 KB, and begins at a multiple of 1 KB. The descriptor holds
// addresses and distances in units of 16 bytes:
//   low     start address | "leading" distance << 16
//   high    "stride" distance | 1 << 30 (swizzle of 128 bytes)
//   K_MAJOR    a row holds 64 values of k, for one m or n. The "stride" distance leads from a group of 8 rows to the
//              next group. The next 16 values of k begin 32 bytes further on.
//   MN_MAJOR   a row holds 64 values of m or n, for one k. The "stride" distance leads from a group of 8 rows to the
//              next group. The "leading" distance leads from 64 values of m or n to the next 64.
// The arguments `pitch` (the "stride" distance) and `leading` of rows() are not in units of 16 bytes, but in rows of
// 128 bytes.
struct Operand {
    uint32_t low, high;
    // & 0x3FFFF: in a cluster the higher bits of an address are the block's number in the cluster. The descriptor has
    // no room for them.
    static INLINE Operand rows(uint32_t address, int pitch, int leading = 0) {
        return {(address & 0x3FFFF) >> 4 | leading * 8 << 16, pitch * 8 | 1u << 30};
    }
    // An operand that is not swizzled, and K_MAJOR. It consists of small matrices of 8 rows x 16 bytes, each of which
    // is 128 bytes of shared memory. `along_k` is the distance from a matrix to the next one along k (the descriptor's
    // "leading" distance), and `along_rows` the distance to the matrix of the next 8 rows ("stride"), both in bytes.
    static INLINE Operand matrices(uint32_t address, int along_k, int along_rows) {
        return {(address & 0x3FFFF) >> 4 | along_k / 16 << 16, (uint32_t)along_rows / 16};
    }
    INLINE uint64_t at(int offset) const { return (uint64_t)high << 32 | (low + offset); } // offset: 16-byte units
};

// The pixels of a tile in shared memory: one slice (128 bytes) of each pixel, in rows of PITCH pixels. The pixels
// include the border that a 3x3 filter reads ("Convolution" draws a halo and its taps). A warpgroup multiplies 8 pixels of
// each of several rows. These 8 pixels are a group of 8 rows of the operand, and the next group lies PITCH pixels
// further on. The nine taps read the same memory. Only the addresses at which their operands begin are different. (They
// need not be multiples of 1 KB. "Hopper's convolutions", in "Convolution", says why.) PITCH = 8 is for 1x1 convolutions,
// which have no border and only one tap.
template <int PITCH> struct Halo {
    Operand tap0;
    INLINE explicit Halo(uint32_t address) : tap0(Operand::rows(address, PITCH)) {}
    // Tap (kh, kw) = (tap / 3, tap % 3) begins kh * PITCH + kw = kh * (PITCH - 3) + tap pixels after tap 0. A pixel has
    // 128 bytes, which are 8 units of 16 bytes. For tap < 9, tap * 11 >> 5 is tap / 3 rounded down.
    INLINE Operand shifted(int tap) const {
        const int pixels = PITCH == 8 ? 0 : (tap * 11 >> 5) * (PITCH - 3) + tap;
        return {tap0.low + pixels * 8, tap0.high};
    }
};

// An asm statement names every register, so each N needs a text of its own, which the macros WGMMA_FP8 and WGMMA make.
// Their parameters after N are numbers of the asm's operands (%0, %1, ...), except the last parameter:
//   D              D's registers
//   OP1 ... OP7    the operands that follow D's registers. What they are depends on where A is:
//
//                    A in shared memory   OP1 and OP2: the descriptors of A and B;
//                                         OP3 and OP4, in WGMMA: their majors (K_MAJOR or MN_MAJOR)
//                    A in registers       OP1 to OP4: the four registers of A;
//                                         OP5: the descriptor of B; OP6 and OP7, in WGMMA: B's major, and ADD
//                                         (0: D = A * B in place of D += A * B)
//
//   ...            the same registers of D, as C++ operands of the asm: "+f"(d[0]), "+f"(d[1]), ...
// In the instruction, "1, 1, 1" means: add to D, do not negate A, do not negate B. (With ADD, a predicate stands in
// place of the first 1.)
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

// WgmmaFp8 multiplies FP8: D (64, N) += A (64, 32) * B (32, N). A and B are K_MAJOR; in FP8, wgmma does not
// accept MN_MAJOR operands. B is in shared memory. A is there, too, or in registers. If it is in registers, each warp
// holds 16 rows of A, and lane 4 g + t of the warp holds parts of rows g and g + 8, four values of k in a register:
//
//   a[0]   row g,      k = 4 t .. 4 t + 3            a[2]   row g,      k = 16 + 4 t .. 16 + 4 t + 3
//   a[1]   row g + 8,  k = 4 t .. 4 t + 3            a[3]   row g + 8,  k = 16 + 4 t .. 16 + 4 t + 3
//
// In a forward convolution, both operands are e4m3: weights and activations. For an input gradient, one operand holds
// weights (e4m3) and the other one gradients (e5m2). The gradients are B in conv_tiles (e4m3.e5m2), and A in conv_small
// (e5m2.e4m3). For a weight gradient, A holds gradients and B activations (e5m2.e4m3).
// In all FP8 products the tensor cores keep only 14 bits of a sum. This is enough here, because at most a few hundred
// wgmma instructions add to the same sum (docs/LEARNT.md, MAX_FP8_PRODUCTS).
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

// Wgmma multiplies bf16: D (64, N) += A (64, 16) * B (16, N). If A is in registers, the predicate p stands in place of
// the first 1 of "1, 1, 1". IF_NOT_0 sets p to true if ADD is not 0.
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

// A warpgroup's sums for N pixels and for OUT_SLICES slices of 64 output channels. (Here output channels are those of
// the result. If the result is an input gradient, they are the convolution's input channels.) wgmma computes the sums
// as a matrix: each row is an output channel, and each column is a pixel. multiply starts products, which run in the
// background. Invariant: nobody reads d between multiply and wait.
template <int OUT_SLICES, int N> struct Accumulators {
    float d[OUT_SLICES][N / 2];
    // The sums begin with the bias. A thread holds the sums of two channels of each slice b. d[b][k] belongs to the
    // first of these channels if k >> 1 & 1 is 0, and to the second one if it is 1.
    INLINE explicit Accumulators(const float (&bias)[OUT_SLICES][2]) {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = bias[b][k >> 1 & 1];
            }
    }
    // The sums begin with 0. This is used for FP8, where the sums are scaled before the bias is added.
    INLINE Accumulators() {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = 0;
            }
    }
    // Starts the products of weights and pixels, as one group: STEPS products for each slice of output channels. Each
    // product sums over 16 input channels. weights: the address of the weights, which are 64 rows of 128 bytes for each
    // slice of output channels. TRANSPOSED: a row of the weights belongs to an input channel of the product, not to an
    // output channel. This is so for the input gradient, because its input channels are the convolution's output
    // channels.
    template <int STEPS, bool TRANSPOSED> INLINE void multiply(uint32_t weights, Operand pixels) {
        constexpr int A_MAJOR = TRANSPOSED ? MN_MAJOR : K_MAJOR;
        // A_STEP is the distance from the weights of 16 input channels to those of the next 16, in units of 16 bytes.
        // If TRANSPOSED, it is 16 rows of 128 bytes. Otherwise it is 16 channels within a row, which are 32 bytes. (A
        // slice of output channels, b, has 64 rows of 128 bytes, which are 512 such units.)
        constexpr int A_STEP = TRANSPOSED ? 128 : 2;
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
                Wgmma<N>::template add<A_MAJOR, K_MAJOR>(d[b], a.at(k * A_STEP + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    // Does the same as multiply in FP8. Here each product sums over 32 input channels, not 16. PIXELS: the
    // element type of the pixels.
    template <int STEPS, Element PIXELS> INLINE void multiply_fp8(uint32_t weights, Operand pixels) {
        using Product = WgmmaFp8<N, Element::FP8, PIXELS>;
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++) Product::add(d[b], a.at(k * 2 + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    // This is used for FP8, to undo the factors that operands were multiplied by before they were rounded. It
    // multiplies the sums of the thread's two channels of slice b by factors[0] and factors[1], and then adds v (such
    // as the bias).
    INLINE void scale(int b, const float (&factors)[2], const float (&v)[2]) {
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            d[b][k] = fmaf(d[b][k], factors[k >> 1 & 1], v[k >> 1 & 1]);
        }
    }
    // Adds v[0] and v[1], such as the embedding, to the sums of the thread's two channels of slice b, at all pixels.
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
// Warpgroup w waits at named barrier 4 + w. The wait ends when the other warpgroup calls pass. Invariant: each
// warpgroup waits once and passes once for each of its tiles, and the two warpgroups compute tiles in turns. So no
// warpgroup waits for one that has no tile left. If TAKE_TURNS is false, wait and pass do nothing.
template <bool TAKE_TURNS> struct Turn {
    int warpgroup;
    INLINE explicit Turn(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == 1) pass(); // so that warpgroup 0 begins: its first wait ends at once
    }
    INLINE void wait() const {
        if (TAKE_TURNS) warps_sync(4 + warpgroup, 256);
    }
    INLINE void pass() const {
        if (TAKE_TURNS) warps_arrive(4 + (warpgroup ^ 1), 256);
    }
};
#endif
