// muon.h - the optimiser Muon: directions for matrices of weights.
#pragma once
#include "diffusion/verdict.h"
#include "gpu/attention.h"
#include "gpu/conv.h"
#ifndef NO_HOPPER
#include "gpu/hopper/muon_wgmma.h"
#else
#include "gpu/no_hopper.h"
#endif
#include "trainer.h"

// Returns whether Muon updates a parameter if --optimizer is muon: every weight with at least two dimensions, except
// the first and the last convolution, and the embeddings of classes and numbers. AdamW updates all others.
static bool muon_updates(const Param& p) {
    const bool at_an_end = p.name == "input_blocks.0.0.weight" || p.name == "out.2.weight";
    const bool of_a_condition = p.name == "label_emb.weight" || p.name == "cond_emb.weight";
    return p.shape.size() >= 2 && !at_an_end && !of_a_condition;
}

// How many bytes Muon takes at most beside AdamW's arrays: two copies of the momentum, and five squares of each matrix.
static double muon_bytes(const UNet& net) {
    double numbers = 2 * net.flat_size;
    for (const Param& p : net.params) {
        const double rows = p.shape[0];
        const double short_side = std::min(rows, p.size / rows);
        if (muon_updates(p)) numbers += 5 * short_side * short_side;
    }
    return numbers * act_bytes();
}

// Sets tr->muon and tr->is_matrix.
static void make_muon(Trainer* tr) {
    MuonWork& muon = tr->muon;
    std::vector<uint8_t> is_matrix(tr->own.whole() / 64);
    for (const Param& p : tr->net.params) {
        if (!muon_updates(p)) continue;
        const int rows = p.shape[0];
        const MuonMatrix m{p.offset, rows, (int)(p.size / rows), muon.squares_size};
        if (m.rows % 32 || m.columns % 32 || m.offset % 64)
            die("internal error: %s can't be updated by Muon's kernels", p.name.c_str());
        std::fill_n(is_matrix.begin() + p.offset / 64, p.size / 64, 1);
        muon.squares_size += (size_t)m.short_side() * m.short_side();
        muon.matrices.push_back(m);
    }
    tr->is_matrix = device_copy(is_matrix);
    prepare_muon(&muon, tr->own.whole());
}

// --optimizer muon: Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) updates the matrices between
// hidden channels, and AdamW the other parameters. Let W be such a matrix, and G its gradient after clipping:
//
//   m = 0.95 m + 0.05 G                                       the momentum
//   X = 0.95 m + 0.05 G                                       Nesterov's momentum
//   W = (1 - lr weight_decay) W - lr scale orthogonal(X)      scale: muon_scale
//
// orthogonal(X) has the same singular vectors as X, but all its singular values are about 1. So a step changes W by
// about the same amount along each singular vector, also where the gradient is small. The singular values are not
// computed. Five times, X is replaced by an odd polynomial of itself. Together, these steps map values from 0.0015 to 1
// to values between 0.68 and 1.21.
//
//   X = X / |X|           |X|: the root of the sum of squares, so no singular value is above 1 (up to rounding).
//                         X = 0 if |X| < 1e-14
//   A = X X^T             (X^T X, if X has more rows than columns)
//   X = a X + (b A + c A A) X      (a X + X (b A + c A A), if X has more rows than columns)
//                         a, b, c: MUON_A, MUON_B, MUON_C
static void update_by_muon(Trainer* tr, const Update& update) {
    // A matrix may be cut by the borders of the ranks' slices. So each rank computes X for its slice, all ranks
    // exchange X, and each rank computes all directions. X, and later the directions, take the memory of tr->sum. The
    // gradients of other parameters stay there at the places of this rank's slice, for AdamW.
    muon_momentum(tr->sum, update, tr->state, tr->adamw, tr->own);
    if (world.size > 1) gather(tr->sum, nullptr, STRETCH * sizeof(float), tr->own, tr->own.n);
    orthogonalise(tr->sum, tr->muon, tr->state);
    mark({"AdamW, EMA"});
}
#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- muon: directions for matrices of weights
// Used when: --optimizer muon, after judge_step and before adamw_kernel. (On Hopper, except in fp32,
//   gpu/hopper/muon_wgmma.h has other kernels for all that follows the momentum.)
// How: The formulas, with X, A and B, stand above update_by_muon. A launch computes one product for all matrices of the
//   network, because a single matrix has too little work for a GPU. A block computes one tile of a result, of 128 x 128
//   or 64 x 64 elements. The operands pass through a ring of stages in shared memory, as in conv_gather, and by the
//   same functions. Where these speak of neighbouring channels, there are neighbouring numbers of a line here
//   (MuonOperand). In the iterations X, A and B are stored in the type of the activations, T. A and B are symmetric, so
//   only those of their tiles are computed that lie on the diagonal or above it.
// Costs: with S and L for a matrix's short and long side, about 16 S S L + 5 S S S operations on the tensor cores. With
//   floats there are three times as many.

// Updates the momentum of this rank's part of Muon's matrices, and computes Nesterov's momentum, X, which may be the
// same array as u.sum. A thread takes four neighbouring floats at a time (a quad). i: a quad of the slice. k: the same
// quad in the flat arrays.
static __global__ void __launch_bounds__(256)
    muon_momentum_kernel(float* X, const __grid_constant__ Update u, const StepState* state, AdamW h, Slice own) {
    await_previous_kernel();
    if (!state->ok) return;
    __shared__ float shared_clip; // only one thread computes it
    if (threadIdx.x == 0) shared_clip = (float)clip_factor(state, h);
    __syncthreads();
    const float clip = shared_clip;
    auto four = [](float v) { return make_float4(v, v, v, v); };
    auto mix = [&](float4 m, float4 g) { return m * four(MUON_MOMENTUM) + g * four(1 - MUON_MOMENTUM); };
    float4* const ms = (float4*)u.m;
    const size_t stride = (size_t)gridDim.x * 256;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < own.owned() / 4; i += stride) {
        const size_t k = own.flat(4 * i) / 4;
        if (4 * k >= own.n) break;          // only padding follows after the last parameter
        if (!u.is_matrix[k / 16]) continue; // AdamW updates this quad. (is_matrix has a byte for each 16 quads.)
        const float4 g = ((const float4*)u.sum)[k] * four(clip);
        const float4 m = mix(ms[i], g);
        ms[i] = m;
        ((float4*)X)[k] = mix(m, g); // Nesterov: as if the same gradient came once more
    }
}
static void muon_momentum(float* X, const Update& u, const StepState* state, AdamW h, Slice own) {
    const int blocks = (int)std::min<size_t>(blocks_for(own.owned() / 4), 8 * gpu.sms);
    launch(muon_momentum_kernel, blocks, 256, 0, X, u, state, h, own);
}

// Which of an iteration's products a launch computes.
enum class MuonProduct {
    GRAM,       // the Gram matrix A = X X^T, or X^T X if X has more rows than columns
    POLYNOMIAL, // B = b A + c A A
    NEXT        // the next X: a X + B X, or a X + X B if X has more rows than columns
};

// Copies Muon's matrices from X, a flat array of floats, to Y, a flat array of T. grid: the tiles of the matrices. If A
// is not null, each matrix is divided by |X|: A contains the Gram matrices, and the trace of a Gram matrix is |X|^2.
template <class T>
static __global__ void __launch_bounds__(256)
    muon_copy_kernel(T* Y, const float* X, const T* A, const MuonMatrix* matrices, MuonTiles tiles,
                     const StepState* state) {
    await_previous_kernel();
    if (!state->ok) return;
    const MuonTile tile = tiles.list[blockIdx.x];
    const MuonMatrix m = matrices[tile.matrix];
    __shared__ float factor;
    if (threadIdx.x == 0) factor = 1;
    if (A && threadIdx.x < 32) { // one warp adds up the trace
        const T* const gram = A + m.square_offset;
        const size_t S = m.short_side();
        double trace = 0;
        for (size_t i = threadIdx.x; i < S; i += 32) trace += (float)gram[i * S + i];
        trace = warp_sum(trace);
        const bool is_zero = trace < MUON_SMALLEST; // then the direction is 0
        if (threadIdx.x == 0) factor = is_zero ? 0 : (float)(1 / sqrt(trace));
    }
    __syncthreads();
    const float4 factors = make_float4(factor, factor, factor, factor);
    const int quads = tiles.tile_size / 4; // how many quads (4 neighbouring numbers) a row of the tile has
    for (int i = threadIdx.x; i < tiles.tile_size * quads; i += 256) {
        const int row = tile.row + i / quads;
        const int column = tile.column + i % quads * 4;
        if (row >= m.rows || column >= m.columns) continue;
        const size_t at = m.offset + (size_t)row * m.columns + column;
        store4(Y + at, load4(X + at) * factors);
    }
}

// An operand has `rows` rows of K numbers. The product sums over k, the index within a row. In memory the operand
// consists of lines, which begin `pitch` numbers apart.
//   not TRANSPOSED   a line holds one row: its values for k = 0, 1, 2, ...
//   TRANSPOSED       a line holds the values of all rows for one k: of rows 0, 1, 2, ...
template <class T_, bool TRANSPOSED_> struct MuonOperand {
    typedef T_ T;
    static constexpr bool TRANSPOSED = TRANSPOSED_;
    const T* p;
    int rows, K, pitch;
};

// A block has this many threads, 2 x 2 warps.
constexpr int MUON_THREADS = 128;
// In shared memory, a line has this many numbers: one row for 64 values of k or, if TRANSPOSED, 64 rows for one k.
constexpr int MUON_LINE = 64;

// A tile of a result has 64 N rows and 64 N columns. For it, slices of the operands, 64 N rows x 64 k, pass through a
// ring of stages. A slice consists of 64 N lines. If TRANSPOSED and N = 2, the first 64 lines hold the first 64 rows.
//
//     a stage:   | left operand: 64 N lines | right operand: 64 N lines |
template <class T, int N> struct MuonRing {
    static constexpr int LINE_BYTES = MUON_LINE * sizeof(T);
    static constexpr int SLICE_BYTES = 64 * N * LINE_BYTES;
    static constexpr int STAGE_BYTES = 2 * SLICE_BYTES;
    static constexpr bool IS_SMALL = STAGE_BYTES <= 16 * 1024; // bf16 with N = 1
    static constexpr int STAGES = IS_SMALL ? 4 : 3;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    // How many blocks shall fit on a multiprocessor of Hopper. This limits the registers of a thread.
    static constexpr int PER_SM = IS_SMALL ? 3 : 2;
    static_assert(SHARED_BYTES <= RTX_30.shared_per_block, "the least that a GPU of sm_80 or later has");
};

// One side of a product, left or right: which parts of the operand's slices this thread copies, and which addresses it
// gives to ldmatrix. Each thread copies one chunk (8 numbers) of one of LINES_AT_ONCE lines at a time. Fragments of the
// left operand are mma's A, and those of the right one are its B.
template <class Operand, int N, bool IS_LEFT> struct MuonSide {
    typedef typename Operand::T T;
    static constexpr bool TRANSPOSED = Operand::TRANSPOSED;
    static constexpr int LINE_BYTES = MuonRing<T, N>::LINE_BYTES;
    static constexpr int LINES_AT_ONCE = MUON_THREADS / (MUON_LINE / 8); // 16
    const Operand& operand;
    const int first_row; // the first row of the operand that this block multiplies
    const uint32_t base; // the address of the slice in stage 0
    // The address that this lane gives to ldmatrix for the warp's first fragment in stage 0
    const uint32_t lane_address;
    // This thread copies chunk copied_chunk of every LINES_AT_ONCE-th line, from line copied_line on.
    const int copied_chunk = (int)threadIdx.x % 8;
    const int copied_line = (int)threadIdx.x / 8;
    // Where this thread's first chunk is copied to in stage 0. All its lines have the same swizzle key.
    const uint32_t copied_to = base + copied_line * LINE_BYTES + chunk_place<T>(copied_chunk, copied_line & 7);

    // warp_row: where the rows that this warp multiplies begin, counted from first_row
    INLINE MuonSide(const Operand& operand, int first_row, int warp_row, uint32_t base)
        : operand(operand), first_row(first_row), base(base), lane_address(base + lane_offset(warp_row)) {}

    // Returns lane_address - base. ldmatrix loads four matrices of 8 x 8 numbers: two neighbouring chunks of lines 0-7,
    // and the same two of lines 8-15. mma needs them in one order for the left operand, and in another order for the
    // right one. If TRANSPOSED, the two orders are exchanged:
    //
    //                                           matrix 0     matrix 1     matrix 2     matrix 3
    //   left not TRANSPOSED, right TRANSPOSED   lines 0-7    lines 8-15   lines 0-7    lines 8-15
    //                                           chunk        chunk        next chunk   next chunk
    //   right not TRANSPOSED, left TRANSPOSED   lines 0-7    lines 0-7    lines 8-15   lines 8-15
    //                                           chunk        next chunk   chunk        next chunk
    static INLINE uint32_t lane_offset(int warp_row) {
        const int lane = threadIdx.x % 32;
        const int matrix = lane / 8; // the matrix that this lane gives an address of
        constexpr bool NEXT_MATRIX_IS_BELOW = IS_LEFT != TRANSPOSED;
        const int line = lane % 8 + 8 * (NEXT_MATRIX_IS_BELOW ? matrix % 2 : matrix / 2);
        const int next_chunk = NEXT_MATRIX_IS_BELOW ? matrix / 2 : matrix % 2;
        // The warp's rows begin at line first_line and chunk first_chunk of the slice. If TRANSPOSED, a line holds 64
        // rows for one k. So a group of 64 rows takes 64 lines, and each chunk holds the numbers of 8 rows.
        const int first_line = TRANSPOSED ? warp_row / MUON_LINE * MUON_LINE : warp_row;
        const int first_chunk = TRANSPOSED ? warp_row % MUON_LINE / 8 : 0;
        return (first_line + line) * LINE_BYTES + chunk_place<T>(first_chunk + next_chunk, line & 7);
    }
    // Starts the copies of the slice that begins at k. What lies outside of the operand becomes zeros.
    INLINE void copy(uint32_t stage_offset, int k) const {
        UNROLL_FOR (int i = 0; i < 4 * N; i++) {
            // row and of_k belong to the first number of the chunk that is copied in round i. If TRANSPOSED, the first
            // TIMES rounds copy the lines of the first 64 rows, and the next TIMES rounds those of the next 64 rows.
            constexpr int TIMES = MUON_LINE / LINES_AT_ONCE;
            const int row =
                first_row + (TRANSPOSED ? i / TIMES * MUON_LINE + 8 * copied_chunk : copied_line + LINES_AT_ONCE * i);
            const int of_k = k + (TRANSPOSED ? copied_line + i % TIMES * LINES_AT_ONCE : 8 * copied_chunk);
            const bool is_inside = row < operand.rows && of_k < operand.K;
            const size_t line = TRANSPOSED ? of_k : row;
            const size_t at = line * operand.pitch + (TRANSPOSED ? row : of_k);
            const T* const from = operand.p + (is_inside ? at : 0);
            copy_channels(copied_to + stage_offset, i * LINES_AT_ONCE * LINE_BYTES, from, is_inside);
        }
    }
    // Returns a function for take_apart_copies. It calls f(address) for each chunk that this thread copies.
    INLINE auto own_chunks(uint32_t stage_offset) const {
        return places<4 * N, LINES_AT_ONCE * LINE_BYTES>(copied_to + stage_offset);
    }

    // Loads the warp's fragments for k ... k + 15 of a slice. A fragment A has 16 rows, and a fragment B has 8.
    template <int F, int R> INLINE void load(uint32_t (&fragments)[F][R], uint32_t stage_offset, int k) const {
        constexpr int AT_ONCE = IS_LEFT ? 1 : 2; // one ldmatrix loads 16 rows: one fragment A, or two fragments B
        UNROLL_FOR (int i = 0; i < F; i += AT_ONCE) {
            const int row = 16 * i / AT_ONCE;
            const uint32_t from = channels_on<T>(lane_address + stage_offset, TRANSPOSED ? row : k);
            const int offset = (TRANSPOSED ? k : row) * LINE_BYTES;
            if constexpr (IS_LEFT) load_fragment<T, TRANSPOSED>(fragments[i], from, offset);
            else load_fragments<T, TRANSPOSED>(fragments[i], fragments[i + 1], from, offset);
        }
    }
};

// Adds to `sums` this warp's part of a tile of left right^T: 32 N x 32 N elements. Element (i, j) of the tile is the
// sum over k of left(i, k) right(j, k). row and column: where the tile begins in the result. A kernel must call this
// only once, because at the end some warps may still read the stages.
template <class T, int N, class Left, class Right>
INLINE void muon_multiply(float (&sums)[2 * N][4 * N][4], const Left& left, const Right& right, int row, int column) {
    using Ring = MuonRing<T, N>;
    // 256 is a multiple of LINE_BYTES, so each line begins at a multiple of its length. channels_on needs this.
    extern __shared__ __align__(256) unsigned char stages[];
    const uint32_t base = shared_address(stages);
    const int warp = threadIdx.x / 32;
    const MuonSide<Left, N, true> left_side(left, row, warp / 2 * 32 * N, base);
    const MuonSide<Right, N, false> right_side(right, column, warp % 2 * 32 * N, base + Ring::SLICE_BYTES);
    const int slices = ceil_div(left.K, MUON_LINE);
    // Returns how many bytes behind stage 0 the stage of a slice begins.
    auto stage_offset = [](int slice) { return (uint32_t)slice % Ring::STAGES * Ring::STAGE_BYTES; };
    auto copy_slice = [&](int slice) {
        if (slice < slices) {
            left_side.copy(stage_offset(slice), slice * MUON_LINE);
            right_side.copy(stage_offset(slice), slice * MUON_LINE);
        }
        copies_committed(); // also if nothing was copied: copies_arrived counts these calls
    };
    for (int slice = 0; slice < Ring::STAGES - 1; slice++) copy_slice(slice);
    // With floats, take_apart_copies sets these factors, which undo the scaling of the operands.
    float left_scale = 1;
    float right_scale = 1;
    for (int slice = 0; slice < slices; slice++) {
        const uint32_t stage = stage_offset(slice);
        copies_arrived<Ring::STAGES - 2>();
        take_apart_copies<T, MUON_THREADS / 32>(left_scale, left_side.own_chunks(stage), //
                                                right_scale, right_side.own_chunks(stage));
        __syncthreads(); // all threads' copies of this slice have arrived, and all have finished the previous slice
        copy_slice(slice + Ring::STAGES - 1);
        UNROLL_FOR (int k = 0; k < MUON_LINE; k += 16) {
            FragmentA<T> left_fragments[2 * N];
            FragmentB<T> right_fragments[4 * N];
            left_side.load(left_fragments, stage, k);
            right_side.load(right_fragments, stage, k);
            // Counted from sums[0], sums[i][j] is fragment number 4 N i + j. So a_step is 4 N, and b_step is 1.
            multiply<T, 2 * N, 4 * N>(sums[0], 4 * N, 1, left_fragments, right_fragments, left_scale * right_scale);
        }
    }
}

// Where X lies. In muon.X, a flat array of T, a matrix begins at number m.offset (`spread` is 1). In Trainer::sum, a
// flat array of floats, it begins at the address of float number m.offset. Counted in numbers of T, this is number
// spread * m.offset, where spread is sizeof(float) / sizeof(T).
template <class T> struct MuonX {
    T* p;
    int spread;
    INLINE T* matrix(const MuonMatrix& m) const { return p + spread * m.offset; }
};
// What an iteration reads (X) and writes (A, B, and `next`). The last one writes its result to `next` as floats.
template <class T> struct MuonIteration {
    MuonX<T> X, next;
    T *A, *B;
    bool is_last;
};

// Stores an element of a symmetric matrix (S, S) at both of its places.
template <class T> INLINE void store_symmetric(T* matrix, int S, int row, int column, float v) {
    matrix[(size_t)row * S + column] = (T)v;
    matrix[(size_t)column * S + row] = (T)v;
}

// One product of an iteration, for all matrices. grid: the tiles of the results.
template <class T, int N, MuonProduct PRODUCT>
static __global__ void __launch_bounds__(MUON_THREADS, (MuonRing<T, N>::PER_SM))
    muon_kernel(MuonIteration<T> work, const MuonMatrix* matrices, const MuonTile* tiles, const StepState* state) {
    await_previous_kernel();
    if (!state->ok) return;
    const MuonTile tile = tiles[blockIdx.x];
    const MuonMatrix m = matrices[tile.matrix];
    const int S = m.short_side();
    const bool is_wide = m.rows <= m.columns;
    const T* const X = work.X.matrix(m);
    T* const next = work.next.matrix(m);
    T* const A = work.A + m.square_offset;
    T* const B = work.B + m.square_offset;

    // muon_multiply computes left right^T, and X_columns is X^T. So if X_columns is the right operand, the product is
    // left X. A and B are symmetric, so each of them is its own transpose. The products are:
    //
    //                  X is wide           X is tall
    //   GRAM           X X^T               X^T X
    //   POLYNOMIAL     A A                 A A
    //   NEXT           B X                 X B
    const MuonOperand<T, false> X_rows{X, m.rows, m.columns, m.columns};
    const MuonOperand<T, true> X_columns{X, m.columns, m.rows, m.columns};
    const MuonOperand<T, false> A_rows{A, S, S, S};
    const MuonOperand<T, false> B_rows{B, S, S, S};
    float sums[2 * N][4 * N][4] = {};
    auto add_product = [&](const auto& left, const auto& right) {
        muon_multiply<T, N>(sums, left, right, tile.row, tile.column);
    };
    if constexpr (PRODUCT == MuonProduct::GRAM) {
        if (is_wide) add_product(X_rows, X_rows);
        else add_product(X_columns, X_columns);
    }
    if constexpr (PRODUCT == MuonProduct::POLYNOMIAL) add_product(A_rows, A_rows);
    if constexpr (PRODUCT == MuonProduct::NEXT) {
        if (is_wide) add_product(B_rows, X_columns);
        else add_product(X_rows, B_rows);
    }

    const int rows = PRODUCT == MuonProduct::NEXT ? m.rows : S;
    const int columns = PRODUCT == MuonProduct::NEXT ? m.columns : S;
    // Computes two neighbouring elements of a row of the result from their sums x and y, and stores them.
    auto put_two = [&](int row, int column, float x, float y) {
        if (row >= rows || column >= columns) return;
        const size_t at = (size_t)row * columns + column;
        if constexpr (PRODUCT == MuonProduct::NEXT) {
            const float2 old = load_two(X + at);
            x += MUON_A * old.x;
            y += MUON_A * old.y;
            const float scale = muon_scale(m);
            // The last iteration's `next` is Trainer::sum, which takes floats.
            if (work.is_last) store_two((float*)next + at, scale * x, scale * y);
            else store_two(next + at, x, y);
            return;
        }
        if constexpr (PRODUCT == MuonProduct::POLYNOMIAL) {
            const float2 of_A = load_two(A + at);
            x = MUON_B * of_A.x + MUON_C * x;
            y = MUON_B * of_A.y + MUON_C * y;
        }
        // Of a symmetric result, only the elements on the diagonal and above it are stored, each at both of its places.
        T* const square = PRODUCT == MuonProduct::GRAM ? A : B;
        if (row <= column) store_symmetric(square, S, row, column, x);
        if (row <= column + 1) store_symmetric(square, S, row, column + 1, y);
    };
    // gpu/shared.h draws which elements of a fragment a lane holds.
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_row = tile.row + warp / 2 * 32 * N + lane / 4;
    const int first_column = tile.column + warp % 2 * 32 * N + lane % 4 * 2;
    UNROLL_FOR (int i = 0; i < 2 * N; i++)
        UNROLL_FOR (int j = 0; j < 4 * N; j++) {
            const float* const d = sums[i][j];
            const int row = first_row + 16 * i;
            const int column = first_column + 8 * j;
            put_two(row, column, d[0], d[1]);
            put_two(row + 8, column, d[2], d[3]);
        }
}

// Makes the list of the tiles of all results of a launch. of_squares: the results are (short_side, short_side),
// otherwise (rows, columns). Squares are symmetric, so only their tiles on the diagonal and above it are listed. Large
// tiles read the operands less often, but there must be at least two for each multiprocessor of Hopper.
static MuonTiles muon_tiles(const MuonWork& muon, bool of_squares) {
    auto cut = [&](int size) {
        std::vector<MuonTile> list;
        for (int i = 0; i < (int)muon.matrices.size(); i++) {
            const MuonMatrix& m = muon.matrices[i];
            const int rows = of_squares ? m.short_side() : m.rows;
            const int columns = of_squares ? m.short_side() : m.columns;
            for (int row = 0; row < rows; row += size)
                for (int column = of_squares ? row : 0; column < columns; column += size)
                    list.push_back({i, row, column});
        }
        return list;
    };
    int size = 128;
    std::vector<MuonTile> list = cut(size);
    // Smaller tiles are used if there are too few large ones, and always with floats, whose stages would take 192 KB.
    if (act_parts() > 1 || (int)list.size() < 2 * gpu.sms) {
        size = 64;
        list = cut(size);
    }
    // Tiles with the longest sums come first, so that at the end of the launch no block is left alone with a long sum.
    // Squares are sorted for the Gram matrix, whose sums are longer than those of A A.
    auto sum_length = [&](const MuonTile& t) {
        const MuonMatrix& m = muon.matrices[t.matrix];
        return of_squares ? m.long_side() : m.short_side();
    };
    std::ranges::stable_sort(list, std::greater(), sum_length);
    return {device_copy(list), (int)list.size(), size};
}
static void prepare_muon(MuonWork* muon, size_t flat_size) {
    if (hopper_muon()) return prepare_hopper_muon(muon, flat_size);
    muon->on_device = device_copy(muon->matrices);
    muon->square_tiles = muon_tiles(*muon, true);
    muon->tiles = muon_tiles(*muon, false);
    auto allocate = [](size_t n) { return (act*)device_alloc_bytes(n * act_bytes()); };
    muon->X = allocate(flat_size);
    muon->A = allocate(muon->squares_size);
    muon->B = allocate(muon->squares_size);
}

template <class T, MuonProduct PRODUCT>
static void launch_muon(const MuonIteration<T>& work, const MuonWork& muon, const StepState* state) {
    const MuonTiles& tiles = PRODUCT == MuonProduct::NEXT ? muon.tiles : muon.square_tiles;
    auto run = [&](auto kernel, int shared_bytes) {
        launch(kernel, tiles.count, MUON_THREADS, shared_bytes, work, muon.on_device, tiles.list, state);
    };
    if constexpr (PARTS<T> == 1)
        if (tiles.tile_size == 128) return run(muon_kernel<T, 2, PRODUCT>, MuonRing<T, 2>::SHARED_BYTES);
    run(muon_kernel<T, 1, PRODUCT>, MuonRing<T, 1>::SHARED_BYTES);
}

// Replaces Nesterov's momentum in X, a flat array of floats, by the directions of all of Muon's matrices. |X|^2 is the
// trace of X X^T, for which muon_kernel needs X in type T. So the array X is first copied to muon.X undivided, and then
// once more, divided by |X|. Iterations 0, 2 and 4 write to the array X, and iterations 1 and 3 to muon.X.
static void orthogonalise(float* X, const MuonWork& muon, const StepState* state) {
    if (hopper_muon()) return orthogonalise_by_wgmma(X, muon, state);
    static_assert(MUON_ITERATIONS % 2, "odd, so that the last iteration writes to the array X");
    with_act([&]<class T>(T) {
        const MuonX<T> copied{(T*)muon.X, 1};
        const MuonX<T> in_floats{(T*)X, sizeof(float) / sizeof(T)};
        MuonIteration<T> work{.X = copied, .next = in_floats, .A = (T*)muon.A, .B = (T*)muon.B, .is_last = false};
        auto copy = [&](const T* A) {
            launch(muon_copy_kernel<T>, muon.tiles.count, 256, 0, copied.p, X, A, muon.on_device, muon.tiles, state);
        };
        copy(nullptr);
        launch_muon<T, MuonProduct::GRAM>(work, muon, state);
        copy(work.A);
        for (int i = 0; i < MUON_ITERATIONS; i++) {
            work.is_last = i == MUON_ITERATIONS - 1;
            launch_muon<T, MuonProduct::GRAM>(work, muon, state);
            launch_muon<T, MuonProduct::POLYNOMIAL>(work, muon, state);
            launch_muon<T, MuonProduct::NEXT>(work, muon, state);
            std::swap(work.X, work.next);
        }
    });
}
#endif
