// attention_wgmma.h - attention by wgmma (sm_90a).
#pragma once
#include "../attention.h"
#include "hopper.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward_wgmma and attention_backward_wgmma (sm_90a)
// Used for bf16, heads of 32 or 64 channels, and T a multiple of 64. Backward: T = 64, or T is a multiple of 128 from
// 256 to 1024 and the GPU can run the cluster (attention_clusters). Otherwise attention_backward_kernel computes it.
// A warpgroup owns 64 rows of a head. The rows that these are combined with stream past: TMA copies them to shared
// memory, tile by tile. P (and for dk also dS) is computed in registers, from which the next product reads it as its
// operand A.
// Forward: warpgroups own queries, and keys and values stream past.
// Backward: warpgroups own keys, and queries stream past in chunks of 64. For T > 64 a cluster of blocks computes a
// head, and each block has 128 of the head's keys in shared memory. All blocks work on every chunk, one after the
// other. Each block adds its keys' part to the chunk's dq, and sends the dq so far, in fp32, into the next block's
// shared memory. The last block writes dq to global memory. Each block begins at a different chunk, so all blocks
// always have work. The parts of a chunk's dq are always added in the same order, so a run can be repeated with the
// same bits. The drawing shows a cluster in one step. (D is rowsum(dout * out), and `rows` are the SoftmaxRows of the
// chunk's queries.)
//
//         block 0: keys 0 ..       block 1: keys 128 ..     block 2: keys 256 ..        the block's shared memory
//       +---------------------+  +---------------------+  +---------------------+    +---------------------------+
//       | chunk i             |->| chunk i - 2         |->| chunk i - 4         |-+  | keys: k, v of two heads   |
//       | dk, dv of own keys  |  | dk, dv              |  | dk, dv              | |  | chunks: q, dout, rows     |
//       +---------------------+  +---------------------+  +---------------------+ |  | ds: dS^T of all own keys  |
//                  ^                 dq of a chunk                                |  | sums: dq that arrived     |
//                  +--------------------------------------------------------------+  | dots: -D of two heads     |
//                                                                                    +---------------------------+

struct AttentionTma : AttentionCall {
    // boxes of 64 rows of a head; dout only in the backward pass
    CUtensorMap qkv_rows, dout_rows;
    CUtensorMap keys; // qkv again, in boxes of AttentionForward::KEYS rows
};

// Blocks of the forward pass that registers and shared memory of a multiprocessor have room for.
constexpr int attention_wgmma_blocks(int warpgroups, int keys) {
    if (warpgroups == 1) return 4;
    return keys == 32 ? 3 : 2;
}

// A block of the forward pass. Each warpgroup works on 64 queries of a head. Keys and values are loaded KEYS at a time.
template <int DIM_, int WARPGROUPS_, int KEYS_, int CHUNKS_> struct AttentionForward {
    static constexpr int DIM = DIM_; // channels of a head
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int KEYS = KEYS_;
    // how many chunks of keys a head has, if all of them lie in shared memory at once; 0: they pass through a ring
    static constexpr int CHUNKS = CHUNKS_;
    static constexpr int STAGES = CHUNKS ? CHUNKS : 4; // of keys, and as many of values
    static constexpr int THREADS = 128 * WARPGROUPS;
    static constexpr int PER_SM = attention_wgmma_blocks(WARPGROUPS, KEYS);
    static constexpr int QUERY_BYTES = 64 * 2 * DIM; // a warpgroup's queries
    static constexpr int KEY_BYTES = KEYS * 2 * DIM; // a stage of keys or of values
    static constexpr int BARRIERS = WARPGROUPS + 4 * STAGES;
    static constexpr int TILES = WARPGROUPS * QUERY_BYTES + 2 * STAGES * KEY_BYTES;
    static constexpr int SHARED_BYTES = shared_beside(BARRIERS) + TILES;
};

// A block of the backward pass. WARPGROUPS warpgroups own 64 keys each, and one more computes the queries' gradients.
// With WARPGROUPS = 1 the block's keys are a whole head, so the block needs no cluster (ALONE).
template <int DIM_, int WARPGROUPS_> struct AttentionBackward {
    static constexpr int DIM = DIM_; // channels of a head
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr bool ALONE = WARPGROUPS == 1;
    static constexpr int KEYS = 64 * WARPGROUPS; // how many keys a block owns
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int PER_SM = ALONE ? 2 : 1;
    // Registers of a thread: DQ_REGISTERS in the warpgroup that computes dq, KEY_REGISTERS in those that own keys.
    static constexpr int DQ_REGISTERS = ALONE ? 80 : 136;
    static constexpr int KEY_REGISTERS = ALONE ? 176 : 184;
    // The rings that BackwardBlock describes: the number of stages, and the bytes of one. A tile is 64 rows of a head.
    static constexpr int BARRIERS = 32;
    static constexpr int TILE_BYTES = 64 * 2 * DIM;
    static constexpr int ROWS_BYTES = 64 * sizeof(SoftmaxRow);
    static constexpr int KEYS_BYTES = 2 * WARPGROUPS * TILE_BYTES; // k and v of the block's keys; there are two stages
    static constexpr int CHUNK_STAGES = ALONE ? 3 : 4;
    static constexpr int CHUNK_BYTES = 2 * TILE_BYTES + ROWS_BYTES; // q, dout and SoftmaxRows of a chunk
    static constexpr int CHUNK_PLACE = 2 * TILE_BYTES + 1024;       // rounded up to whole kilobytes
    static constexpr int DS_STAGES = 2;
    static constexpr int DS_BYTES = KEYS * SLICE_BYTES; // dS^T: KEYS rows of 64 queries
    static constexpr int SUM_STAGES = ALONE ? 0 : 3;
    static constexpr int SUM_BYTES = 64 * DIM * 4;        // dq of a chunk, in fp32
    static constexpr int DOT_BYTES = ALONE ? 1024 : 4096; // -D of a head's queries, in fp32; there are two stages
    static constexpr int TILES =
        2 * KEYS_BYTES + CHUNK_STAGES * CHUNK_PLACE + DS_STAGES * DS_BYTES + SUM_STAGES * SUM_BYTES + 2 * DOT_BYTES;
    static constexpr int SHARED_BYTES = shared_beside(BARRIERS) + TILES;
};

// Rows of one head (DIM elements each) in shared memory, as an operand. at(2) begins 16 columns further on, and
// at(2 DIM) 16 rows further on.
template <int DIM> INLINE Operand head_rows(uint32_t address) {
    constexpr uint32_t SWIZZLE = DIM == 64 ? 1 : 2; // in a descriptor, 1 is a swizzle of 128 bytes, 2 of 64 bytes
    return {Operand::rows(address, 8).low, DIM | SWIZZLE << 30};
}
// Each of these functions starts products, as one group of wgmma. b lies in shared memory.
//   multiply_abt   d += a b^T; a lies in shared memory
//   multiply_ab    d += a b, or with K_MAJOR d += a b^T; a lies in registers. With ADD = 0 the product overwrites d.
//   multiply_atb   d += a^T b; a lies in shared memory, in rows of 64 elements
template <int DIM, int M> INLINE void multiply_abt(float (&d)[M], const Operand& a, const Operand& b) {
    using Product = Wgmma<2 * M>;
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
        Product::template add<K_MAJOR, K_MAJOR>(d, a.at(2 * k), b.at(2 * k));
    }
    wgmma_commit();
}
template <int MAJOR = MN_MAJOR, int ADD = 1, int M, int K>
INLINE void multiply_ab(float (&d)[M], const uint32_t (&a)[K][4], const Operand& b) {
    using Product = Wgmma<2 * M>;
    constexpr int STEP = MAJOR == K_MAJOR ? 2 : 4 * M; // distance to the next 16 values of k, in units of 16 bytes
    wgmma_fence();
    Product::template add<MAJOR, ADD>(d, a[0], b.at(0));
    UNROLL_FOR (int k = 1; k < K; k++) {
        Product::template add<MAJOR>(d, a[k], b.at(STEP * k));
    }
    wgmma_commit();
}
template <int K, int M> INLINE void multiply_atb(float (&d)[M], const Operand& a, const Operand& b) {
    using Product = Wgmma<2 * M>;
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < K; k++) {
        Product::template add<MN_MAJOR, MN_MAJOR>(d, a.at(128 * k), b.at(4 * M * k));
    }
    wgmma_commit();
}
template <int M> INLINE void clear(float (&d)[M]) {
    UNROLL_FOR (int i = 0; i < M; i++) {
        d[i] = 0;
    }
    accumulators_ready(d);
}
// Rounds 16 columns of a result to an A fragment of the next product. No thread needs another thread's numbers: in
// registers, wgmma's result and its A operand have the same layout.
INLINE void pack_fragment(uint32_t (&a)[4], const float* d) {
    UNROLL_FOR (int i = 0; i < 4; i++) {
        a[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
    }
}
// Stores this warp's 16 rows of a result, times each row's factor. They are first written to shared memory (`rows`, 64
// rows of a head), so that a thread can store 16 bytes at a time. pitch: elements from a row of `to` to the next one.
template <int M>
INLINE void store_head(bf16* to, int pitch, uint32_t rows, const float (&d)[M], const float (&factor)[2]) {
    constexpr int CHANNELS = 2 * M;
    constexpr int PIECES = CHANNELS / 8; // of a row
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 % 4 * 16; // this warp's first row
    __syncwarp();
    UNROLL_FOR (int j = 0; j < M / 8; j++) { // 16 columns at a time
        uint32_t v[4];
        // Rows 0 - 7 have factor[0], and rows 8 - 15 have factor[1].
        UNROLL_FOR (int i = 0; i < 4; i++) {
            const float low = d[8 * j + 2 * i] * factor[i % 2];
            const float high = d[8 * j + 2 * i + 1] * factor[i % 2];
            v[i] = pack_bf16(low, high);
        }
        stmatrix(rows + box_place<CHANNELS>(first + lane % 16, 2 * j + lane / 16), v);
    }
    __syncwarp();
    UNROLL_FOR (int i = 0; i < M / 8; i++) {
        const int r = first + (i * 32 + lane) / PIECES;
        const int piece = lane % PIECES;
        const uint32_t from = rows + box_place<CHANNELS>(r, piece);
        store_whole(to + (size_t)r * pitch + 8 * piece, load_shared(from));
    }
}
// uniform tells the compiler that a whole warp has the same number.
INLINE int this_warpgroup() { return uniform(threadIdx.x / 128); }

// The softmax of a thread's two rows (the second one is 8 rows below the first) over chunks of N scores:
//   P = e^((S - top) / sqrt(d))      sum += rowsum(P)
// FlashAttention raises `top` for each higher score, so that P is at most 1. Here `top` is the highest score of the
// first chunk, so P may be larger than 1. bf16 has the range of fp32, so rounding does not overflow. Only if a sum
// grows beyond 2^60, `top` is raised and the sums are rescaled.
// Four neighbouring lanes share a row, and each of them holds two of every 8 columns. s[4 j] and s[4 j + 1] belong to
// the first row, s[4 j + 2] and s[4 j + 3] to the second one.
template <int N> struct Softmax {
    float scale;           // log2(e) / sqrt(d)
    float top[2];          // what is subtracted from a row's scores
    float sum[2] = {0, 0}; // of P over this thread's columns

    INLINE Softmax(const float (&s)[N / 2], float scale) : scale(scale) { highest(top, s); }

    // the highest score of each row
    INLINE static void highest(float (&result)[2], const float (&s)[N / 2]) {
        result[0] = s[0];
        result[1] = s[2];
        UNROLL_FOR (int i = 0; i < N / 2; i++) {
            const int row = i / 2 % 2;
            result[row] = fmaxf(result[row], s[i]);
        }
        UNROLL_FOR (float& v : result) {
            const float over_lanes = lane_max<1, 2>(v);
            v = over_lanes;
        }
    }
    // Writes P of the scores s to p as A fragments, and adds it to sum.
    INLINE void exponentials(uint32_t (&p)[N / 16][4], const float (&s)[N / 2]) {
        UNROLL_FOR (int j = 0; j < N / 4; j++) {
            const int row = j % 2;
            const float a = exp2_fast((s[2 * j] - top[row]) * scale);
            const float b = exp2_fast((s[2 * j + 1] - top[row]) * scale);
            sum[row] += a + b;
            p[j / 4][j % 4] = pack_bf16(a, b);
        }
    }
    // P of a chunk. o holds the sums of P v over the earlier chunks. If `top` is raised, o is rescaled, and P is
    // computed again. In the first chunk this is never necessary, because no score is higher than `top`.
    template <int M>
    INLINE void add(uint32_t (&p)[N / 16][4], const float (&s)[N / 2], float (&o)[M], bool is_first_chunk) {
        const float before[2] = {sum[0], sum[1]};
        exponentials(p, s);
        if (is_first_chunk || !__any_sync(0xFFFFFFFFu, !(fmaxf(sum[0], sum[1]) < 0x1p60f))) return;
        float new_top[2], shrink[2];
        highest(new_top, s);
        UNROLL_FOR (int r = 0; r < 2; r++) {
            new_top[r] = fmaxf(new_top[r], top[r]);
            shrink[r] = exp2_fast((top[r] - new_top[r]) * scale);
            top[r] = new_top[r];
            sum[r] = before[r] * shrink[r];
        }
        UNROLL_FOR (int i = 0; i < M; i++) {
            o[i] *= shrink[i / 2 % 2];
        }
        exponentials(p, s);
    }
};

// out = softmax(q k^T / sqrt(d)) v. grid (B * heads * T / (64 WARPGROUPS)): a block works on 64 WARPGROUPS queries of
// one head. In turn i a warpgroup computes the softmax of chunk i of the keys. Then it computes two products at the
// same time: out += P v of chunk i, and the scores of chunk i + 1. After that, if the stages are rings (CHUNKS is 0),
// the first thread loads a chunk into the stage of chunk i - 1. For the stage of chunk i it would have to wait for the
// other warpgroup.
// The compiler overlaps products of wgmma only on two conditions. First, the wait for each product must be in the same
// turn of the loop as the product. Second, between fence and wait no other instruction may touch the product's
// registers. Otherwise no products overlap at all, and ptxas prints a warning (C7510 to C7520).
template <class T>
static __global__ void __launch_bounds__(T::THREADS, T::PER_SM) // T: an AttentionForward
    attention_forward_wgmma_kernel(const __grid_constant__ AttentionTma p) {
#if __CUDA_ARCH__ == 900
    constexpr int DIM = T::DIM;
    constexpr int KEYS = T::KEYS;
    SharedMemory shared(T::BARRIERS);
    Pipeline<T::QUERY_BYTES> queries(shared, T::WARPGROUPS, 0);
    const int readers = T::CHUNKS ? 0 : T::WARPGROUPS;
    Pipeline<T::KEY_BYTES> keys(shared, T::STAGES, readers), values(shared, T::STAGES, readers);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.qkv_rows);
        prefetch_tensor_map(&p.keys);
    }
    ready(queries, keys, values);
    const int warpgroup = T::WARPGROUPS == 1 ? 0 : this_warpgroup();
    const int lane = threadIdx.x % 32;
    const int chunks = T::CHUNKS ? T::CHUNKS : p.T / KEYS;
    const HeadTile tile{p, 64 * T::WARPGROUPS};
    await_previous_kernel();
    // The first thread both reads and fills the two rings. So it needs a second position in each ring.
    auto keys_to_load = keys;
    auto values_to_load = values;
    auto load = [&](Stage to, const CUtensorMap* map, int bytes, int part, int row) {
        mbarrier_expect(to.full, bytes);
        tma_load(to.address, map, to.full, part * p.C + tile.h * DIM, row, tile.b);
    };
    auto load_chunk = [&](int i) {
        const Stage key_stage = T::CHUNKS ? keys_to_load.next() : keys_to_load.acquire();
        load(key_stage, &p.keys, T::KEY_BYTES, K_PART, i * KEYS);
        const Stage value_stage = T::CHUNKS ? values_to_load.next() : values_to_load.acquire();
        load(value_stage, &p.keys, T::KEY_BYTES, V_PART, i * KEYS);
    };
    if (threadIdx.x == 0)
        NO_UNROLL_FOR (int i = 0; i < max(T::WARPGROUPS, min(T::STAGES, chunks)); i++) {
            if (i < T::WARPGROUPS) load(queries.stage(i), &p.qkv_rows, T::QUERY_BYTES, Q_PART, tile.row0 + 64 * i);
            if (i < chunks) load_chunk(i);
        }
    __syncwarp();

    uint32_t q[DIM / 16][4]; // this warp's 16 queries, as A fragments
    uint32_t probabilities[KEYS / 16][4];
    const uint32_t own_queries = queries.kept(warpgroup, true);
    const int query = threadIdx.x / 32 % 4 * 16 + lane % 16; // the row whose address this lane gives to ldmatrix
    UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
        ldmatrix(q[k], q[k] + 2, own_queries + box_place<DIM>(query, 2 * k + lane / 16));
    }
    float s[KEYS / 2] = {}; // the scores of a chunk
    float o[DIM / 2] = {};  // the sums of P v
    uint32_t next = keys.arrived();
    accumulators_ready(s);
    multiply_ab<K_MAJOR, 0>(s, q, head_rows<DIM>(next));
    multiplied<0>(s);
    Softmax<KEYS> softmax(s, LOG2E * rsqrtf((float)DIM));
#pragma unroll(T::CHUNKS ? T::CHUNKS : 1)
    for (int i = 0; i < chunks; i++) {
        softmax.add(probabilities, s, o, i == 0);
        const Operand v = head_rows<DIM>(values.arrived());
        if (i + 1 < chunks) next = keys.arrived();
        accumulators_ready(o);
        accumulators_ready(s);
        multiply_ab(o, probabilities, v);
        // If CHUNKS is 0, the last turn computes scores that nobody uses. If a branch skipped them, the compiler would
        // not overlap the products. If CHUNKS is not 0, the loop is unrolled, and no branch is left.
        if (!T::CHUNKS || i + 1 < chunks) {
            multiply_ab<K_MAJOR, 0>(s, q, head_rows<DIM>(next));
        }
        multiplied<0>(o, s);
        if (T::CHUNKS) continue;
        keys.release();
        values.release();
        if (threadIdx.x == 0 && i > 0 && i - 1 + T::STAGES < chunks) load_chunk(i - 1 + T::STAGES);
        __syncwarp();
    }
    // Four lanes share a row. Each of them has a part of the row's sum of P, and some columns of the row's out.
    const float total[2] = {lane_sum<1, 2>(softmax.sum[0]), lane_sum<1, 2>(softmax.sum[1])};
    const int row = tile.row0 + 64 * warpgroup;
    bf16* const to = (bf16*)p.to + ((size_t)tile.b * p.T + row) * p.C + tile.h * DIM;
    store_head(to, p.C, own_queries, o, {reciprocal_fast(total[0]), reciprocal_fast(total[1])});
    SoftmaxRow* const rows = p.rows + (size_t)tile.index * p.T + row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    UNROLL_FOR (int r = 0; r < 2; r++)
        if (lane % 4 == 0) rows[8 * r] = SoftmaxRow{softmax.top[r], log2f(total[r])};
#endif
}

// A block of the backward pass. It owns KEYS keys of a head. All blocks of a cluster work on the same head, one step
// for each chunk of 64 queries, and then on the cluster's next head. The blocks work on a chunk one after the other,
// each of them WARPGROUPS steps after the block before it. The last block of the cluster is the one before block 0.
//
//   warpgroups 0 ... WARPGROUPS - 1   key_gradients(warpgroup): dk and dv of 64 keys
//   the last warpgroup                query_gradients: dq, and -D; its first thread loads keys and chunks
//
//   ring     filled by                                    read by
//   keys     TMA, a head at a time                        all warps
//   chunks   TMA, a chunk at a time                       key_gradients
//   ds       key_gradients: dS^T of a chunk               query_gradients
//   sums     the block before: a chunk's dq so far        query_gradients
//   dots     query_gradients of all blocks: -D            key_gradients
//
// The blocks of a cluster send `sums` and `dots` to each other. In these two rings, the receiving block waits at its
// own `full` barriers, at which the sent bytes are counted (store_to_block). The sending block waits at its own `empty`
// barriers, at which the receiving block arrives (arrive_at_block). A role that both fills a ring and frees its stages
// needs two positions in it: keys_to_load, sums_to_send and dots_to_send hold the positions for filling.
template <class T> struct BackwardBlock {
    static constexpr int DIM = T::DIM;
    static constexpr int WARPGROUPS = T::WARPGROUPS;
    typedef uint4 Dots[2][DIM / 16]; // half a row of dout, and half a row of out

    const AttentionTma& p;
    int blocks = T::ALONE ? 1 : p.T / T::KEYS;             // blocks of the cluster
    int cluster_rank = T::ALONE ? 0 : blockIdx.x % blocks; // this block's number in the cluster
    int first_head = blockIdx.x / blocks;
    int head_stride = gridDim.x / blocks; // clusters; each of them computes every head_stride-th head
    int steps = blocks * WARPGROUPS;      // of a head
    int lane = threadIdx.x % 32;
    int thread = threadIdx.x % 128;
    float scale = rsqrtf((float)DIM);
    SharedMemory shared{T::BARRIERS};
    Pipeline<T::KEYS_BYTES> keys{shared, 2, 4 * WARPGROUPS + 4};
    Pipeline<T::KEYS_BYTES> keys_to_load = keys;
    Pipeline<T::CHUNK_PLACE> chunks{shared, T::CHUNK_STAGES, 0};
    Pipeline<T::DS_BYTES> ds{shared, T::DS_STAGES, 4, 4 * WARPGROUPS};
    Pipeline<T::SUM_BYTES> sums{shared, T::SUM_STAGES, 4};
    Pipeline<T::SUM_BYTES> sums_to_send = sums;
    Pipeline<T::DOT_BYTES> dots{shared, 2, blocks, T::ALONE ? 4 : 1};
    Pipeline<T::DOT_BYTES> dots_to_send = dots;
    int load_head = first_head; // of the chunk that is loaded next
    int load_step = 0;

    INLINE explicit BackwardBlock(const AttentionTma& p) : p(p) {}
    INLINE void init() const { // is called by one thread
        prefetch_tensor_map(&p.qkv_rows);
        prefetch_tensor_map(&p.dout_rows);
        init_barriers(keys, chunks, ds, sums, dots);
        for (int i = 0; i < T::SUM_STAGES; i++) mbarrier_expect(sums.stage(i).full, T::SUM_BYTES);
        for (int i = 0; i < 2 && !T::ALONE; i++) mbarrier_expect(dots.stage(i).full, 4 * p.T);
    }
    // Where a row of a head begins in a matrix (B, T, parts * C). parts: 3 for qkv and dqkv, 1 for out and dout.
    INLINE size_t element(int head, int row, int parts) const {
        const size_t pixel = (size_t)(head / p.heads) * p.T + row;
        return pixel * parts * p.C + head % p.heads * DIM;
    }
    // The first query of this block's chunk in a step. In step i, block 0 works on chunk i. Block r > 0 works on the
    // chunk that lies WARPGROUPS chunks before that of block r - 1. (The chunk before chunk 0 is the last one.)
    INLINE int chunk_row(int step) const {
        const int before = WARPGROUPS * cluster_rank;
        return (step - before + (step < before ? steps : 0)) * 64;
    }

    INLINE void load_keys(int head) {
        if (head >= p.all_heads) return;
        const Stage to = keys_to_load.acquire();
        const int image = head / p.heads;
        const int c = head % p.heads * DIM;
        mbarrier_expect(to.full, T::KEYS_BYTES);
        for (int i = 0; i < 2 * WARPGROUPS; i++) {
            const int part = K_PART + i / WARPGROUPS;
            const int row = cluster_rank * T::KEYS + i % WARPGROUPS * 64;
            tma_load(to.address + i * T::TILE_BYTES, &p.qkv_rows, to.full, part * p.C + c, row, image);
        }
    }
    // Loads the next chunk, without a wait for its stage. This stage holds the chunk before the one whose dS has just
    // arrived, and key_gradients finishes all products of a chunk before it writes dS of the next one.
    INLINE void load_chunk() {
        if (load_head >= p.all_heads) return;
        const Stage to = chunks.next();
        const int image = load_head / p.heads;
        const int c = load_head % p.heads * DIM;
        const int row = chunk_row(load_step);
        mbarrier_expect(to.full, T::CHUNK_BYTES);
        tma_load(to.address, &p.qkv_rows, to.full, c, row, image);
        tma_load(to.address + T::TILE_BYTES, &p.dout_rows, to.full, c, row, image);
        const SoftmaxRow* const rows = p.rows + (size_t)load_head * p.T + row;
        bulk_load(to.address + 2 * T::TILE_BYTES, rows, T::ROWS_BYTES, to.full);
        load_step++;
        if (load_step == steps) {
            load_step = 0;
            load_head += head_stride;
        }
    }
    // -D of 64 queries (a tile); D = rowsum(dout * out). Each block computes -D of its share of a head's queries, and
    // sends it to all blocks of the cluster. Two neighbouring threads work on each row.
    INLINE void load_dots(Dots& d, int head, int tile) const {
        const int row = cluster_rank * T::KEYS + tile * 64 + thread / 2;
        const size_t i = element(head, row, 1) + thread % 2 * (DIM / 2);
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            d[0][k] = load16((const bf16*)p.dout + i + 8 * k);
        }
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            d[1][k] = load16((const bf16*)p.out + i + 8 * k);
        }
    }
    // Four neighbouring lanes compute -D of two rows. Lane i of them sends both values to blocks i and i + 4.
    INLINE void send_dots(const Dots& d, int tile) {
        float sum = 0;
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            float x[8], y[8];
            unpack<bf16>(x, d[0][k]);
            unpack<bf16>(y, d[1][k]);
            UNROLL_FOR (int e = 0; e < 8; e++) {
                sum += x[e] * y[e];
            }
        }
        const float own = -lane_sum<1>(sum);
        const float other = __shfl_xor_sync(0xFFFFFFFFu, own, 2);
        const float2 two = lane & 2 ? make_float2(other, own) : make_float2(own, other);
        const int row = cluster_rank * T::KEYS + tile * 64 + thread / 4 * 2;
        if (tile == 0) dots_to_send.acquire();
        // -D lies at the same place in the shared memory of all blocks
        const auto [stage, full] = dots.stage(dots_to_send.done);
        const uint32_t to = stage + 4 * row;
        // ALONE: there is no other block, so -D is stored in the ordinary way, and each warp arrives at the barrier.
        if (T::ALONE && lane % 4 == 0) PTX("st.shared.v2.f32 [%0], {%1,%2};", "r"(to), "f"(two.x), "f"(two.y));
        if (T::ALONE) warp_stored(full);
        for (int r = threadIdx.x % 4; !T::ALONE && r < blocks; r += 4) {
            store_to_block(at_block(to, r), at_block(full, r), two);
        }
        __syncwarp();
        if (tile + 1 == WARPGROUPS) dots_to_send.hand_over();
    }
    // Waits until the next stage of `sums` or `dots` is full. One thread (`speaks`) tells the stage's barrier how many
    // bytes will be sent into it next time.
    INLINE uint32_t received(auto& pipeline, int bytes, bool speaks) {
        const int i = pipeline.place;
        const uint32_t address = pipeline.arrived();
        if (speaks) mbarrier_expect(pipeline.stage(i).full, bytes);
        __syncwarp();
        return address;
    }

    // Role: the queries' gradients. The warpgroup's first thread also loads keys and chunks. In each step:
    //   1. dq = the sum that the block before has sent, or 0 if no block has begun dq of this chunk.
    //   2. dq += dS k of this block's keys (dS^T arrives in `ds`). Meanwhile the load of a later chunk is started.
    //   3. dq is sent to the next block. If this is the last block for this chunk, it is stored to global memory.
    // In some steps a part of -D of the next head is computed, too.
    INLINE void query_gradients() {
        const int before = (cluster_rank ? cluster_rank : blocks) - 1;
        const int next = cluster_rank + 1 == blocks ? 0 : cluster_rank + 1;
        if (thread == 0)
            NO_UNROLL_FOR (int i = 0; i < T::CHUNK_STAGES - 1; i++) {
                load_chunk();
            }
        __syncwarp();
        NO_UNROLL_FOR (int tile = 0; tile < WARPGROUPS; tile++) {
            Dots dot;
            load_dots(dot, first_head, tile);
            send_dots(dot, tile);
        }
        NO_UNROLL_FOR (int head = first_head; head < p.all_heads; head += head_stride) {
            const uint32_t own_keys = keys.arrived();
            NO_UNROLL_FOR (int i = 0; i < steps; i++) {
                const bool begun = !T::ALONE && i >= WARPGROUPS;       // the block before sends the chunk's dq so far
                const bool ends = T::ALONE || i >= steps - WARPGROUPS; // no other block adds to the chunk's dq
                const int tile = i - max(steps / 2 - 1, 0);            // the tile of the next head whose -D is computed
                const bool dots_now = tile >= 0 && tile < WARPGROUPS && head + head_stride < p.all_heads;
                Dots dot = {};
                // The rows of dout and out for -D are loaded while the block computes the products of this step. (A
                // block that is ALONE has too few registers to keep them.)
                if (dots_now) load_dots(dot, head + head_stride, tile);
                if (dots_now && T::ALONE) send_dots(dot, tile);
                float dq[DIM / 2] = {};
                if (begun) {
                    const uint32_t from = received(sums, T::SUM_BYTES, thread == 0) + thread * 16;
                    UNROLL_FOR (int j = 0; j < DIM / 8; j++) {
                        unpack<float>((float(&)[4])dq[4 * j], load_shared(from + j * 2048));
                    }
                }
                const uint32_t buffer = ds.arrived(); // dS^T: a row of 64 queries for each key
                __syncwarp();
                accumulators_ready(dq);
                multiply_atb<T::KEYS / 16>(dq, Operand::rows(uniform(buffer), 8), head_rows<DIM>(uniform(own_keys)));
                if (thread == 0) {
                    load_chunk();
                    if (i == 0) load_keys(head + head_stride);
                }
                __syncwarp();
                multiplied<0>(dq);
                if (begun) {
                    const int stage = sums.hand_over();
                    if (lane == 0) arrive_at_block(at_block(sums.empty(stage), before));
                }
                if (ends) {
                    warps_sync(1 + WARPGROUPS, 128); // all warps have read dS, so store_head may write over it
                    bf16* const to = (bf16*)p.to + element(head, chunk_row(i), 3);
                    store_head(to, 3 * p.C, buffer, dq, {scale, scale});
                    __syncwarp();
                }
                ds.release(lane == 0);
                if (!ends) {
                    const Stage outgoing = sums_to_send.acquire();
                    const uint32_t to = at_block(outgoing.address + thread * 16, next);
                    const uint32_t full = at_block(outgoing.full, next);
                    UNROLL_FOR (int j = 0; j < DIM / 2; j += 4) {
                        store_to_block(to + j * 512, full, (float4&)dq[j]);
                    }
                }
                if (dots_now && !T::ALONE) send_dots(dot, tile);
            }
            // All dS of this head have arrived, so key_gradients has read -D, and the stage of `dots` is free. Each of
            // the first `blocks` threads tells this to one of the blocks, which have all sent parts of -D.
            const int stage = dots.hand_over();
            if (thread < blocks) {
                if (T::ALONE) dots.free(stage);
                else arrive_at_block(at_block(dots.empty(stage), thread));
            }
            keys.release(lane == 0);
        }
    }

    // Role: dk and dv of a warpgroup's 64 keys. The scores are transposed: keys are rows, and queries are columns. So
    // P^T and dS^T lie in registers as A operands do, for the products dv = P^T dout and dk = dS^T q. In each step:
    //   1. The product v dout^T is started. It is added to -D, so its result is dP^T - D.
    //   2. Meanwhile P^T is computed from S^T of this chunk. Then dv += P^T dout.
    //   3. dS^T = P^T (dP^T - D), element by element. dS^T is also written to `ds`.
    //   4. S^T = k q^T is computed for the next chunk, and at the same time dk += dS^T q for this chunk.
    INLINE void key_gradients(int warpgroup) {
        float s[32], dp[32]; // s: S^T, then P^T; dp: dP^T - D, then dS^T. Each is 64 keys x 64 queries
        float dk[DIM / 2], dv[DIM / 2];
        uint32_t p_fragments[4][4], ds_fragments[4][4];
        auto probability = [&](float s, const float* r) { return exp2_fast((s - r[0]) * (scale * LOG2E) - r[1]); };
        uint32_t own_keys = keys.arrived() + warpgroup * T::TILE_BYTES;
        uint32_t chunk = chunks.arrived();
        clear(s);
        multiply_abt<DIM>(s, head_rows<DIM>(own_keys), head_rows<DIM>(chunk));
        multiplied<0>(s);
        NO_UNROLL_FOR (int head = first_head; head < p.all_heads; head += head_stride) {
            const uint32_t own_values = own_keys + WARPGROUPS * T::TILE_BYTES;
            const uint32_t minus_D = received(dots, 4 * p.T, !T::ALONE && threadIdx.x == 0) + lane % 4 * 8;
            clear(dk);
            clear(dv);
            NO_UNROLL_FOR (int i = 0; i < steps; i++) {
                const Operand q = head_rows<DIM>(chunk);
                const Operand dout = head_rows<DIM>(chunk + T::TILE_BYTES);
                UNROLL_FOR (int j = 0; j < 8; j++) { // this thread holds two of every 8 columns (queries)
                    const auto [even, odd] = load_shared_2(minus_D + chunk_row(i) * 4 + 32 * j);
                    dp[4 * j] = dp[4 * j + 2] = even;
                    dp[4 * j + 1] = dp[4 * j + 3] = odd;
                }
                accumulators_ready(dp);
                multiply_abt<DIM>(dp, head_rows<DIM>(own_values), dout);
                UNROLL_FOR (int j = 0; j < 8; j++) {
                    float rows[4]; // the SoftmaxRows of two queries: top, log_sum, top, log_sum
                    unpack<float>(rows, load_shared(chunk + 2 * T::TILE_BYTES + lane % 4 * 16 + 64 * j));
                    UNROLL_FOR (int e = 4 * j; e < 4 * j + 4; e++) {
                        s[e] = probability(s[e], rows + e % 2 * 2);
                    }
                }
                UNROLL_FOR (int j = 0; j < 4; j++) {
                    pack_fragment(p_fragments[j], s + 8 * j);
                }
                multiply_ab(dv, p_fragments, dout);
                multiplied<1>(dp);
                const Stage kept = ds.acquire();
                UNROLL_FOR (int j = 0; j < 4; j++) {
                    UNROLL_FOR (int e = 8 * j; e < 8 * j + 8; e++) {
                        dp[e] *= s[e];
                    }
                    pack_fragment(ds_fragments[j], dp + 8 * j);
                    const uint32_t place = box_place<64>(threadIdx.x / 32 * 16 + lane % 16, 2 * j + lane / 16);
                    stmatrix(kept.address + place, ds_fragments[j]);
                }
                warp_stored(kept.full);
                const bool last = i + 1 == steps;
                const bool none = last && head + head_stride >= p.all_heads; // there is no next chunk
                if (last && !none) own_keys = keys.arrived() + warpgroup * T::TILE_BYTES;
                if (!none) chunk = chunks.arrived();
                clear(s);
                // The last scores are not used. If a branch skipped them, the compiler would not overlap the products.
                multiply_abt<DIM>(s, head_rows<DIM>(own_keys), head_rows<DIM>(chunk));
                multiply_ab(dk, ds_fragments, q);
                multiplied<0>(dk, dv, s);
            }
            // dk and dv are first written over v in shared memory. After this barrier no warp of this warpgroup reads v
            // any more.
            warps_sync(1 + warpgroup, 128);
            bf16* const to = (bf16*)p.to + element(head, cluster_rank * T::KEYS + warpgroup * 64, 3);
            store_head(to + p.C, 3 * p.C, own_values, dk, {scale, scale});
            store_head(to + 2 * p.C, 3 * p.C, own_values, dv, {1, 1});
            fence_async();
            __syncwarp();
            keys.release(lane == 0);
        }
    }
};

// grid: clusters of T / KEYS blocks, as many as can run at the same time, but not more than there are heads.
template <class T>
static __global__ void __launch_bounds__(T::THREADS, T::PER_SM) // T: an AttentionBackward
    attention_backward_wgmma_kernel(const __grid_constant__ AttentionTma p) {
#if __CUDA_ARCH__ == 900
    BackwardBlock<T> block(p);
    if (threadIdx.x == 0) block.init();
    cluster_sync();
    const int role = block.first_head < p.all_heads ? this_warpgroup() : -1; // -1: this cluster has no head
    // The keys are a part of qkv. The previous kernel has not written qkv: it was written in the forward pass or, with
    // --use_checkpoint, when the layers were computed again. So this load need not wait for the previous kernel.
    if (role == T::WARPGROUPS && block.thread == 0) block.load_keys(block.first_head);
    await_previous_kernel();
    if (role == T::WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::DQ_REGISTERS));
        block.query_gradients();
    } else if (role >= 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::KEY_REGISTERS));
        block.key_gradients(role);
    }
    cluster_sync(); // no block may end while another one still writes into its shared memory
#endif
}

static AttentionTma attention_tma(const AttentionCall& a, int keys) {
    // of a matrix (B, T, parts * C), for boxes of n rows of one head
    auto rows = [&](const act* x, int parts, int n) {
        const int channels = parts * a.C;
        return tensor_map(x, {channels, a.T, a.B}, {a.d, n});
    };
    return {a, rows(a.qkv, 3, 64), rows(a.dout, 1, 64), rows(a.qkv, 3, keys)};
}
template <class Tile> static void launch_attention_forward_wgmma(const AttentionCall& a) {
    const int grid = a.all_heads * (a.T / 64 / Tile::WARPGROUPS);
    auto kernel = attention_forward_wgmma_kernel<Tile>;
    launch(kernel, grid, Tile::THREADS, Tile::SHARED_BYTES, attention_tma(a, Tile::KEYS));
}
// How many clusters can run on the GPU at the same time, for heads of T rows. With a part of a GPU (NVIDIA's MIG,
// Multi-Instance GPU) it may be 0.
template <class Tile> static int attention_clusters(int T) {
    const unsigned blocks = T / Tile::KEYS;
    auto kernel = attention_backward_wgmma_kernel<Tile>;
    cudaLaunchAttribute size{cudaLaunchAttributeClusterDimension, {}, {.clusterDim = {blocks, 1, 1}}};
    const cudaLaunchConfig_t config{dim3(blocks), Tile::THREADS, Tile::SHARED_BYTES, device.queue, &size, 1};
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES));
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    return clusters;
}
template <class Tile> static void launch_attention_backward_wgmma(const AttentionCall& a) {
    const int cluster = a.T / Tile::KEYS;
    const int clusters = std::min(a.all_heads, attention_clusters<Tile>(a.T));
    auto kernel = attention_backward_wgmma_kernel<Tile>;
    const AttentionTma tma = attention_tma(a, 64);
    launch_on(MAIN_STREAM, cluster, kernel, cluster * clusters, Tile::THREADS, Tile::SHARED_BYTES, tma);
}

// Launches Hopper's kernels for bf16, heads of DIM = 32 or 64 channels, and T a multiple of 64. Returns false if the
// portable kernel must compute the backward pass, because neither a block nor a cluster can compute such a head.
template <int DIM> static bool launch_attention_wgmma(const AttentionCall& a) {
    using Alone = AttentionBackward<DIM, 1>;
    using Cluster = AttentionBackward<DIM, 2>;
    const bool back = a.dout;
    const bool fits_block = a.T == 64;
    const bool fits_cluster = gpu.clusters && a.T % 128 == 0 && a.T >= 256 && a.T <= 1024;
    const bool alone = back && fits_block && attention_clusters<Alone>(a.T);
    const bool cluster = back && fits_cluster && attention_clusters<Cluster>(a.T);
    // AttentionForward<channels of a head, warpgroups, keys of a chunk, chunks of a head (0: any number)>
    using Forward64 = AttentionForward<DIM, 1, 64, 1>;
    using Forward256 = AttentionForward<DIM, 2, DIM, 256 / DIM>;
    using ForwardRing2 = AttentionForward<DIM, 2, 64, 0>;
    using ForwardRing1 = AttentionForward<DIM, 1, 64, 0>;
    if (back && !alone && !cluster) return false;
    const Way<AttentionCall> ways[] = {
        {alone, launch_attention_backward_wgmma<Alone>},
        {cluster, launch_attention_backward_wgmma<Cluster>},
        {a.T == 64, launch_attention_forward_wgmma<Forward64>},
        {a.T == 256, launch_attention_forward_wgmma<Forward256>},
        {a.T % 128 == 0, launch_attention_forward_wgmma<ForwardRing2>},
        {true, launch_attention_forward_wgmma<ForwardRing1>},
    };
    decide(a, ways);
    return true;
}

// Computes attention by Hopper's kernels, if they know such heads. Returns whether they do.
static bool hopper_attention(const AttentionCall& a) {
    if (!act_has_wgmma() || a.T % 64) return false;
    if (a.d == 32) return launch_attention_wgmma<32>(a);
    if (a.d == 64) return launch_attention_wgmma<64>(a);
    return false;
}
#endif
