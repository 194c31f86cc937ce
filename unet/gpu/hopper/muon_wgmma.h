// muon_wgmma.h - --optimizer muon: the directions of all matrices by wgmma (sm_90a).
#pragma once
#include "hopper.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- muon_wgmma: directions for matrices of weights (sm_90a)
// Used when: --optimizer muon, in bf16 or FP8, on a Hopper GPU. (muon.h asks hopper_muon first.)
// How: Let S be a matrix's short side, and L its long one. The formulas above update_by_muon have ten products with the
//   long matrix X (S, L), two in each iteration. Here there are only four, because iterations can be computed from the
//   square R = X X^T alone. Each iteration multiplies X by a polynomial of R:
//
//     X' = P X        R' = P R P        P = a I + Z,   Z = b R + c R R
//
//   All these squares are polynomials of the first R. So they are symmetric, and their order in a product does not
//   matter. The product of all P so far is kept as q I + T, because q, which is a, a a, ..., would take most bits of the
//   numbers on the diagonal. But R has the squares of X's singular values, and what rounding adds to a small one grows
//   with each iteration. So after two iterations X is computed, and R anew, for the other three:
//
//     X0 = X / |X|      R = X0 X0^T      2 iterations of R and T      X1 = (q I + T) X0
//                       R = X1 X1^T      3 iterations of R and T      direction = scale (q I + T) X1
//
//   This is Gram Newton-Schulz (https://dao-ailab.github.io/blog/2026/gram-newton-schulz). X and all squares are stored
//   in fp16, whose 11 bits suffice. Its range does, too: |X| is 1 at first, and elements below 2^-14, which lose bits,
//   are small beside the root mean square 1 / sqrt(S L). A square that is the right operand is read as it is, and not as
//   its transpose. Up to rounding both are the same, but with the transpose the error of the result was seven times as
//   large.
//   A launch computes one product for all matrices, one tile of 128 x 128 elements in a block. Two blocks share a
//   multiprocessor, so that one of them multiplies while the other one begins or ends.
// Costs: 6 S S L + 14 S S S operations on the tensor cores.

// A row of a box is 64 numbers of fp16, 128 bytes. (hopper.h calls so many bytes of a pixel a slice.)
constexpr int MUON_BOX = 64;                           // rows and columns of a box of TMA
constexpr int MUON_BOX_BYTES = MUON_BOX * SLICE_BYTES; // 128 bytes in a row
constexpr int MUON_STAGE_BYTES = 4 * MUON_BOX_BYTES;   // two boxes of each operand, or four of an addend
constexpr int MUON_STAGES = 3;                         // so that two blocks fit on a multiprocessor
constexpr int MUON_WGMMA_TILE = 2 * MUON_BOX;          // rows and columns of a block's tile
constexpr int MUON_WGMMA_THREADS = 2 * 128 + 32;       // two warpgroups multiply, and a warp loads
constexpr int MUON_WGMMA_BARRIERS = 2 * MUON_STAGES;
constexpr int MUON_WGMMA_SHARED = MUON_STAGES * MUON_STAGE_BYTES + shared_beside(MUON_WGMMA_BARRIERS);
static_assert(MUON_WGMMA_SHARED <= hopper_shared(2) && MUON_STAGES >= 3, "load_muon needs three stages");

// Arrays of fp16 that hold one matrix for each of Muon's matrices. X0 and X1 are (S, L): if a matrix has more rows than
// columns, they hold its transpose. The others are (S, S). W is P R, on the way to the next R. T and T2 take turns,
// because a product cannot overwrite a factor. DIRECTIONS is no such array: the last product writes floats to
// Trainer::sum.
enum class MuonArray { X0, X1, R, W, Z, T, T2, COUNT, DIRECTIONS = COUNT };
static bool is_long(MuonArray a) { return a <= MuonArray::X1; }

// A tile of a result, with its matrix, so that a block knows all of it after one load.
struct MuonWgmmaTile {
    MuonMatrix m;
    int matrix, row, column; // as in MuonTile
};
struct MuonWgmmaTiles {
    const MuonWgmmaTile* list;
    int count;
};

// Hopper's part of MuonWork. All pointers are to the GPU's memory.
struct HopperMuon {
    MuonWgmmaTiles grams, squares; // tiles of results (S, S): of X X^T, and of products of squares
    MuonWgmmaTiles longs;          // tiles of results (S, L)
    const int* first_tile;         // (matrices): where a matrix's tiles begin in `longs`
    double* sums;                  // for each tile of `longs`: the sum of the squares of X's elements
    __half* X0;                    // MuonArray::X0; a matrix begins at m.offset
    const CUtensorMap* maps;       // (MuonArray::COUNT, matrices); a box has 64 x 64 elements
    int matrices;
    const CUtensorMap* map(MuonArray a) const { return maps + (int)a * matrices; }
};

// Two numbers of fp16 in a register.
INLINE uint32_t pack_half(float low, float high) {
    const __half2 r = __floats2half2_rn(low, high);
    return *(const uint32_t*)&r;
}
INLINE float2 unpack_half(uint32_t v) { return __half22float2(*(const __half2*)&v); }

// A quad is four neighbours of a row in the flat array of floats, where the matrix is (m.rows, m.columns). A tile's row
// and column count in X0, which is (S, L). So they change places if the matrix is tall.
// Thread i of a block takes quads i, i + 1024, ... Neighbouring threads read neighbouring quads of a row or, if the
// matrix is tall, quads of neighbouring rows. So they write neighbours of X0 in both cases.
struct MuonQuad {
    int row, column; // of the first of the four
    INLINE MuonQuad(const MuonWgmmaTile& tile, int i) {
        constexpr int QUADS = MUON_WGMMA_TILE / 4;
        const bool is_tall = tile.m.rows > tile.m.columns;
        row = is_tall ? tile.column + i % MUON_WGMMA_TILE : tile.row + i / QUADS;
        column = is_tall ? tile.row + i / MUON_WGMMA_TILE * 4 : tile.column + i % QUADS * 4;
    }
    INLINE bool is_inside(const MuonMatrix& m) const { return row < m.rows && column < m.columns; }
    INLINE size_t at(const MuonMatrix& m) const { return m.offset + (size_t)row * m.columns + column; }
};
constexpr int MUON_TILE_QUADS = MUON_WGMMA_TILE * MUON_WGMMA_TILE / 4;

// Adds up the squares of each tile of Nesterov's momentum, a flat array of floats.
static __global__ void __launch_bounds__(1024)
    muon_squares_kernel(double* sums, const float* momentum, const MuonWgmmaTile* tiles, const StepState* state) {
    const MuonWgmmaTile tile = tiles[blockIdx.x];
    const MuonMatrix& m = tile.m;
    await_previous_kernel();
    if (!state->ok) return;
    double sum = 0;
    UNROLL_FOR (int k = 0; k < MUON_TILE_QUADS; k += 1024) {
        const MuonQuad quad(tile, k + threadIdx.x);
        if (!quad.is_inside(m)) continue;
        const float4 v = load4(momentum + quad.at(m));
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
// X0 = momentum / |momentum|, or 0 if the momentum is 0 up to rounding.
static __global__ void __launch_bounds__(1024)
    muon_divide_kernel(__half* X0, const float* momentum, const double* sums, const int* first_tile,
                       const MuonWgmmaTile* tiles, const StepState* state) {
    const MuonWgmmaTile tile = tiles[blockIdx.x];
    const MuonMatrix& m = tile.m;
    await_previous_kernel();
    if (!state->ok) return;
    double sum = 0;
    const int of_matrix = ceil_div(m.rows, MUON_WGMMA_TILE) * ceil_div(m.columns, MUON_WGMMA_TILE);
    for (int i = threadIdx.x; i < of_matrix; i += 1024) sum += sums[first_tile[tile.matrix] + i];
    __shared__ float shared_factor;
    sum = block_sum(sum);
    if (threadIdx.x == 0) shared_factor = sum < MUON_SMALLEST ? 0 : (float)(1 / sqrt(sum));
    __syncthreads();
    const float factor = shared_factor;
    const bool is_tall = m.rows > m.columns;
    UNROLL_FOR (int k = 0; k < MUON_TILE_QUADS; k += 1024) {
        const MuonQuad quad(tile, k + threadIdx.x);
        if (!quad.is_inside(m)) continue;
        const float4 v = load4(momentum + quad.at(m)) * make_float4(factor, factor, factor, factor);
        if (is_tall) {
            __half* const to = X0 + m.offset + (size_t)quad.column * m.rows + quad.row;
            to[0] = __float2half_rn(v.x);
            to[m.rows] = __float2half_rn(v.y);
            to[2 * m.rows] = __float2half_rn(v.z);
            to[3 * m.rows] = __float2half_rn(v.w);
        } else {
            const uint2 four{pack_half(v.x, v.y), pack_half(v.z, v.w)};
            *(uint2*)(X0 + quad.at(m)) = four;
        }
    }
}

// wgmma in fp16: D (64, N) += A (64, 16) B (16, N). A is K_MAJOR.
template <int N, int B_MAJOR> INLINE void wgmma_half(float (&d)[N / 2], uint64_t a, uint64_t b) {
    static_assert(N == 128 || N == 64);
    if constexpr (N == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, 1, 1, 1, 0, %66;"
                     : SUMS_64
                     : "l"(a), "l"(b), "n"(B_MAJOR));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, 1, 1, 1, 0, %34;"
                     : SIXTEEN(0), SIXTEEN(16)
                     : "l"(a), "l"(b), "n"(B_MAJOR));
}

// A product of all matrices: out = scale (left right + factor1 addend1 + factor2 addend2), or with GRAM scale left left^T.
// The pointers to maps are to
// the first matrix's. An addend that is null is left out. If `out` is null, the results are the directions: they are
// multiplied by muon_scale, too, and stored as floats.
struct MuonSum {
    const CUtensorMap *left, *right, *addend1, *addend2, *out;
    float scale, factor1, factor2;
    bool is_long; // whether the result is (S, L), and not (S, S)
    float* directions;
};

// Role: load. The slices of 64 k of both operands pass through the ring first, and then the addends.
//
//     a stage:   a slice      | left: 2 boxes of 64 rows | right: 2 boxes of 64 columns |
//                an addend    | its rows 0-63: 2 boxes   | its rows 64-127: 2 boxes     |
//
// multiply_muon releases a slice when the products of the next one have been started and its own are done. So while the
// last slice is multiplied only its stage is taken, and the two others are free for the addends. No stage is released
// after that. Boxes that lie outside of the result are not loaded. A tile on the diagonal of X X^T has only one operand.
// (Of R R it has two: rows of R on the left, and columns on the right.)
template <bool GRAM>
INLINE void load_muon(const MuonSum& p, const MuonWgmmaTile& tile, int rows, int columns, int K, bool left_is_right,
                      auto& stages) {
    const int down = tile.row + MUON_BOX < rows ? 2 : 1; // boxes of the tile that are inside
    const int across = tile.column + MUON_BOX < columns ? 2 : 1;
    for (int k = 0; k < K; k += MUON_BOX) {
        const Stage to = stages.acquire();
        mbarrier_expect(to.full, (down + (left_is_right ? 0 : across)) * MUON_BOX_BYTES);
        for (int i = 0; i < down; i++)
            tma_load(to.address + i * MUON_BOX_BYTES, p.left + tile.matrix, to.full, k, tile.row + i * MUON_BOX, 0);
        for (int j = 0; !left_is_right && j < across; j++) {
            const int column = tile.column + j * MUON_BOX;
            tma_load(to.address + (2 + j) * MUON_BOX_BYTES, p.right + tile.matrix, to.full, GRAM ? k : column,
                     GRAM ? column : k, 0);
        }
    }
    for (const CUtensorMap* addend : {p.addend1, p.addend2}) {
        if (!addend) continue;
        const Stage to = stages.acquire();
        mbarrier_expect(to.full, down * across * MUON_BOX_BYTES);
        for (int i = 0; i < down; i++)
            for (int j = 0; j < across; j++)
                tma_load(to.address + (2 * i + j) * MUON_BOX_BYTES, addend + tile.matrix, to.full,
                         tile.column + j * MUON_BOX, tile.row + i * MUON_BOX, 0);
    }
}

// Role: multiply. d (64, N) += this warpgroup's 64 rows of left x N columns of right.
template <bool GRAM, int N>
INLINE void multiply_muon(float (&d)[N / 2], int K, int wg, bool left_is_right, auto& stages) {
    // With GRAM, a column of X^T is a row of X, which runs along k. Otherwise a row of a box has 64 columns for one k.
    constexpr int B_MAJOR = GRAM ? K_MAJOR : MN_MAJOR;
    constexpr int B_STEP = GRAM ? 2 : 128; // from 16 values of k to the next 16, in units of 16 bytes
    for (int k = 0; k < K; k += MUON_BOX) {
        const uint32_t stage = stages.arrived();
        const Operand a = Operand::rows(stage + wg * MUON_BOX_BYTES, 8);
        const Operand b = Operand::rows(stage + (left_is_right ? 0 : 2 * MUON_BOX_BYTES), 8, MUON_BOX);
        wgmma_fence();
        UNROLL_FOR (int i = 0; i < 4; i++) wgmma_half<N, B_MAJOR>(d, a.at(2 * i), b.at(B_STEP * i));
        wgmma_commit();
        wgmma_wait<1>();
        if (k) stages.release(); // the slice before this one
    }
    multiplied<0>(d);
}

template <bool GRAM> // whether the product is X X^T, and not left right
static __global__ void __launch_bounds__(MUON_WGMMA_THREADS, 2)
    muon_wgmma_kernel(const __grid_constant__ MuonSum p, const MuonWgmmaTile* tiles, const StepState* state) {
#if __CUDA_ARCH__ == 900
    const MuonWgmmaTile tile = tiles[blockIdx.x];
    const MuonMatrix& m = tile.m;
    const int rows = m.short_side();
    const int columns = p.is_long ? m.long_side() : rows;
    const int K = GRAM ? m.long_side() : rows;
    const bool left_is_right = GRAM && tile.row == tile.column;
    SharedMemory shared(MUON_WGMMA_BARRIERS);
    Pipeline<MUON_STAGE_BYTES> stages(shared, MUON_STAGES, 2);
    if (threadIdx.x == 0) init_barriers(stages);
    if (threadIdx.x == 2 * 128) {
        prefetch_tensor_map(p.left + tile.matrix);
        prefetch_tensor_map(p.right + tile.matrix);
    }
    __syncthreads();
    await_previous_kernel();

    const int wg = uniform(threadIdx.x / 128);
    if (wg == 2) {
        if (threadIdx.x % 32 == 0) load_muon<GRAM>(p, tile, rows, columns, K, left_is_right, stages);
        return;
    }
    const int warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32;
    const int row = tile.row + wg * MUON_BOX; // the first row of this warpgroup
    const bool is_inside = row < rows;
    const bool both_halves = tile.column + MUON_BOX < columns;
    // Where group j of 8 columns of this warp's 16 rows lies in four boxes, for ldmatrix and stmatrix: rows 0-7 and 8-15
    // of group j, then of group j + 1. A lane gives the address of one row of these matrices.
    auto place = [&](uint32_t boxes, int j) {
        const uint32_t in_box = box_place<SLICE_CHANNELS>(warp * 16 + lane % 16, j % 8 + lane / 16);
        return boxes + (2 * wg + j / 8) * MUON_BOX_BYTES + in_box;
    };
    float d[64] = {};
    if (!is_inside) { // frees each stage when it is full, and tells the other warpgroup that it reads none
        const int filled = ceil_div(K, MUON_BOX) + (p.addend1 ? 1 : 0) + (p.addend2 ? 1 : 0);
        for (int i = 0; i < filled; i++) {
            stages.arrived();
            stages.release();
        }
        warps_arrive(1, 256);
        return;
    }
    if (both_halves) {
        multiply_muon<GRAM, 128>(d, K, wg, left_is_right, stages);
    } else {
        multiply_muon<GRAM, 64>((float(&)[32])d, K, wg, left_is_right, stages);
    }
    auto add = [&](float factor) {
        const uint32_t boxes = stages.arrived();
        UNROLL_FOR (int j = 0; j < 16; j += 2) {
            if (j >= 8 && !both_halves) continue;
            uint32_t v[4];
            ldmatrix(v, v + 2, place(boxes, j));
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const float2 two = unpack_half(v[i]);
                d[4 * j + 2 * i] += factor * two.x;
                d[4 * j + 2 * i + 1] += factor * two.y;
            }
        }
    };
    if (p.addend1) add(p.factor1);
    if (p.addend2) add(p.factor2);
    // This is asked only here, because the products need not wait for the answer. And all loads have arrived now, so the
    // block may end.
    if (!state->ok) return;

    if (!GRAM && !p.out) { // the last product
        const float scale = p.scale * muon_scale(m);
        const bool is_tall = m.rows > m.columns;
        float* const to = p.directions + m.offset;
        UNROLL_FOR (int i = 0; i < 64; i += 2) {
            const int r = row + warp * 16 + lane / 4 + i / 2 % 2 * 8;
            const int c = tile.column + i / 4 * 8 + lane % 4 * 2;
            if (r >= rows || c >= columns) continue;
            if (is_tall) {
                to[(size_t)c * rows + r] = scale * d[i];
                to[(size_t)(c + 1) * rows + r] = scale * d[i + 1];
            } else {
                store_two(to + (size_t)r * columns + c, scale * d[i], scale * d[i + 1]);
            }
        }
        return;
    }
    // Stores the results.
    warps_sync(1, 256); // no warpgroup reads stages any more, so results may overwrite them
    // A square is symmetric, and only its tiles on the diagonal and above it are computed. The others are transposed
    // copies: the matrices that stmatrix_trans stores lie in other places.
    const uint32_t results = stages.stage(0).address;
    const uint32_t mirrored = results + MUON_STAGE_BYTES;
    const bool is_mirrored = !p.is_long && tile.row != tile.column;
    UNROLL_FOR (int j = 0; j < 16; j += 2) {
        uint32_t v[4];
        UNROLL_FOR (int i = 0; i < 4; i++) {
            const float* const two = d + 4 * j + 2 * i;
            v[i] = pack_half(p.scale * two[0], p.scale * two[1]);
        }
        stmatrix(place(results, j), v);
        if (!is_mirrored) continue;
        const int column = (j + lane / 16) % 8 * 8 + lane % 8; // of the result, and a row of the mirrored box
        const uint32_t in_box = box_place<SLICE_CHANNELS>(column, 2 * warp + lane / 8 % 2);
        stmatrix_trans(mirrored + (2 * wg + j / 8) * MUON_BOX_BYTES + in_box, v);
    }
    fence_async();
    warps_sync(2 + wg, 128);
    if (threadIdx.x % 128) return;
    for (int j = 0; j < (both_halves ? 2 : 1); j++) {
        const int box = (2 * wg + j) * MUON_BOX_BYTES;
        const int column = tile.column + j * MUON_BOX;
        tma_store(p.out + tile.matrix, results + box, column, row, 0);
        if (is_mirrored) tma_store(p.out + tile.matrix, mirrored + box, row, column, 0);
    }
    tma_stores_read();
#endif
}

// The tiles of all results of a launch. Of squares only those on the diagonal or above it are listed. The longest sums
// come first, so that at the end of the launch no block is left alone with one. Of results (S, L), tiles that share
// columns of X are neighbours.
static std::vector<MuonWgmmaTile> muon_wgmma_tiles(const std::vector<MuonMatrix>& matrices, bool of_squares,
                                                   bool sums_over_L) {
    std::vector<MuonWgmmaTile> list;
    for (int i = 0; i < (int)matrices.size(); i++) {
        const MuonMatrix& m = matrices[i];
        const int rows = m.short_side();
        const int columns = of_squares ? rows : m.long_side();
        for (int column = 0; column < columns; column += MUON_WGMMA_TILE)
            for (int row = 0; row < (of_squares ? column + 1 : rows); row += MUON_WGMMA_TILE)
                list.push_back({m, i, row, column});
    }
    auto sum_length = [&](const MuonWgmmaTile& t) { return sums_over_L ? t.m.long_side() : t.m.short_side(); };
    std::ranges::stable_sort(list, std::greater(), sum_length);
    return list;
}

// Returns whether this GPU computes with this page's kernels.
static bool hopper_muon() { return gpu.wgmma && act_element != Element::FP32; }

// Makes muon->hopper.
static void prepare_hopper_muon(MuonWork* muon, size_t flat_size) {
    const std::vector<MuonMatrix>& matrices = muon->matrices;
    const std::vector<MuonWgmmaTile> longs = muon_wgmma_tiles(matrices, false, false);
    std::vector<int> first_tile(matrices.size());
    for (int i = (int)longs.size(); i-- > 0;) first_tile[longs[i].matrix] = i;
    std::vector<CUtensorMap> maps;
    __half* X0 = nullptr;
    for (MuonArray array = MuonArray::X0; array < MuonArray::COUNT; array = (MuonArray)((int)array + 1)) {
        const bool has_L = is_long(array);
        __half* const p = device_alloc<__half>(has_L ? flat_size : muon->squares_size);
        if (array == MuonArray::X0) X0 = p;
        for (const MuonMatrix& m : matrices) {
            const int S = m.short_side();
            maps.push_back(tensor_map(p + (has_L ? m.offset : m.square_offset), {has_L ? m.long_side() : S, S},
                                      {MUON_BOX, MUON_BOX}));
        }
    }
    auto on_device = [](const std::vector<MuonWgmmaTile>& list) {
        return MuonWgmmaTiles{device_copy(list), (int)list.size()};
    };
    muon->hopper = new HopperMuon{.grams = on_device(muon_wgmma_tiles(matrices, true, true)),
                                  .squares = on_device(muon_wgmma_tiles(matrices, true, false)),
                                  .longs = on_device(longs),
                                  .first_tile = device_copy(first_tile),
                                  .sums = device_alloc<double>(longs.size()),
                                  .X0 = X0,
                                  .maps = device_copy(maps),
                                  .matrices = (int)matrices.size()};
}

// Replaces Nesterov's momentum in X, a flat array of floats, by the directions of all of Muon's matrices.
static void orthogonalise_by_wgmma(float* X, const MuonWork& muon, const StepState* state) {
    using enum MuonArray;
    const HopperMuon& h = *muon.hopper;
    struct Addend {
        MuonArray array;
        float factor;
    };
    // out = scale left right + the addends. (MuonSum's scale stands before its sum, so the addends are divided by it.)
    auto multiply = [&](MuonArray left, MuonArray right, MuonArray out, std::vector<Addend> addends, float scale = 1) {
        const bool is_gram = is_long(left);
        MuonSum p = {};
        p.left = h.map(left);
        p.right = h.map(right);
        p.out = out == DIRECTIONS ? nullptr : h.map(out);
        p.scale = scale;
        p.is_long = is_long(right) && !is_gram;
        p.directions = X;
        if (addends.size() > 0) p.addend1 = h.map(addends[0].array), p.factor1 = addends[0].factor / scale;
        if (addends.size() > 1) p.addend2 = h.map(addends[1].array), p.factor2 = addends[1].factor / scale;
        const MuonWgmmaTiles& tiles = p.is_long ? h.longs : is_gram ? h.grams : h.squares;
        launch(is_gram ? muon_wgmma_kernel<true> : muon_wgmma_kernel<false>, tiles.count, MUON_WGMMA_THREADS,
               MUON_WGMMA_SHARED, p, tiles.list, state);
    };
    // Replaces x by the result of n iterations.
    auto iterate = [&](MuonArray x, MuonArray out, int n) {
        multiply(x, x, R, {});
        MuonArray total = T; // the product of all polynomials so far is q I + total
        float q = 1;
        for (int i = 0; i < n; i++) {
            const MuonArray z = i == 0 ? T : Z;
            multiply(R, R, z, {{R, MUON_B}}, MUON_C);
            if (i > 0) { // (q I + T) (a I + Z) = q a I + (T Z + a T + q Z)
                const MuonArray next = total == T ? T2 : T;
                multiply(total, z, next, {{total, MUON_A}, {z, q}});
                total = next;
            }
            q *= MUON_A;
            if (i == n - 1) break;
            multiply(z, R, W, {{R, MUON_A}}); // W = P R
            multiply(W, z, R, {{W, MUON_A}}); // R = W P
        }
        multiply(total, x, out, {{x, q}});
    };
    launch(muon_squares_kernel, h.longs.count, 1024, 0, h.sums, X, h.longs.list, state);
    launch(muon_divide_kernel, h.longs.count, 1024, 0, h.X0, X, h.sums, h.first_tile, h.longs.list, state);
    iterate(X0, X1, 2);
    iterate(X1, DIRECTIONS, MUON_ITERATIONS - 2);
}
#endif
