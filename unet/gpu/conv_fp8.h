// conv_fp8.h - weight gradients in FP8 (sm_90a), and rounding.
#pragma once
#include "hopper/conv_weight_tma.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_fp8: weight gradients in FP8 (sm_90a)
// dweight[co, kh, kw, ci] = sum over pixels q of x: x[q, ci] * dout[q - (kh - 1, kw - 1), co]
//
// Used when: --precision fp8, for each 3x3 convolution that is computed in FP8. x is e4m3, and dout is e5m2.
// How: In FP8, wgmma accepts operands only if k runs along their rows (K_MAJOR), and here k counts pixels. In memory a
//   pixel's channels are neighbours. So both operands are transposed on their way to the tensor cores:
//     B = x      Some warps transpose x in registers, and write it to another ring of shared memory.
//     A = dout   The warps that multiply load dout with ldmatrix_trans, which moves pairs of channels. part_channels
//                separates the two. wgmma takes A from registers.
//   Of the three warpgroups that multiply, warpgroup kw computes the taps (0, kw), (1, kw), (2, kw):
//
//     D of warpgroup kw:    | kh = 0: 64 Cin | kh = 1: 64 Cin | kh = 2: 64 Cin |     x 64 Cout rows
//
// Costs: the products. Shared memory is busy nearly as long.

// A strip is 16 neighbouring pixels of x, transposed, with 64 channels: row r of the tile of x or, if tiles are 8
// wide, rows r and r + 1. Row 0 of the tile of x lies one image row above row 0 of the tile of dout. So for row r of
// dout, the taps kh = 0, 1, 2 read strips r, r + 1, r + 2. These are neighbours in memory: the thirds of one operand B.
// So the choice of strips shifts x by kh. The shift by kw is a shift of dout: each warpgroup loads pixels of dout
// that begin one column further to the left than those of the warpgroup before it. Therefore the tile of x has a
// border above and below, and the tile of dout has one to the left and to the right. A product sums over 32 pixels:
//
//     pixel tile               A: rows of dout, shifted by kw      B: strips of x, for kh = 0, 1, 2
//     16 wide   k = 0 .. 15    r                                   r        r + 1    r + 2
//               k = 16 .. 31   r + 1                               r + 1    r + 2    r + 3
//     8 wide    k = 0 .. 15    r, r + 1                            r        r + 1    r + 2
//               k = 16 .. 31   r + 2, r + 3                        r + 2    r + 3    r + 4
//
// Within 16 values of k the pixels have another order than in memory (transpose_16x4), the same in A and B.
template <int TILE_W_, int STAGES_X, int STAGES_DOUT, int STAGES_STRIPS> struct WeightTileFp8 {
    static constexpr bool IS_3X3 = true;
    static constexpr int WARPGROUPS = 3;
    static constexpr int ROWS = 1;
    static constexpr int DOUT_PARTS = 1;
    static constexpr int NEXT_TAP = 3; // the taps of the thirds of D: kw, kw + 3, kw + 6
    // A pixel tile. A product sums over 32 pixels, which are STEP_ROWS rows of the tile.
    static constexpr int TILE_H = 8;
    static constexpr int TILE_W = TILE_W_;
    static constexpr int PIXELS = TILE_H * TILE_W;
    static constexpr int STEPS = PIXELS / 32;
    static constexpr int STEP_ROWS = 32 / TILE_W;
    static_assert(TILE_W == 16 || TILE_W == 8, "a strip is one row of 16 pixels or two of 8");
    static_assert(STEPS % 2 == 0,
                  "multiply_tiles_fp8 has two sets of registers, which take turns also from tile to tile");
    // The warps: first those that multiply, then the one that loads, then those that transpose.
    static constexpr int LOADER = 12;
    static constexpr int TRANSPOSERS = 3;
    static constexpr int THREADS = (LOADER + 1 + TRANSPOSERS) * 32;
    // A warpgroup that multiplies computes the sums of dout, too.
    static constexpr int BIAS_WARPS = 0;
    static constexpr int PIXEL_BYTES = SLICE_CHANNELS * (int)bytes_of(Element::FP8);
    static constexpr int X_ROWS = TILE_H + 2;
    static constexpr int X_BYTES = X_ROWS * TILE_W * PIXEL_BYTES;
    static constexpr int PITCH = TILE_W + 2; // pixels of a row of dout, with its border
    static constexpr int DOUT_BYTES = TILE_H * PITCH * PIXEL_BYTES;
    // Transposed, 8 channels x 16 pixels form a matrix of 128 bytes, which wgmma reads without a swizzle. The gap of 16
    // bytes brings what eight lanes write at the same time into different banks.
    static constexpr int CHANNELS_8 = 128 + 16;
    static constexpr int STRIP = SLICE_CHANNELS / 8 * CHANNELS_8;
    static constexpr int STRIP_ROWS = 16 / TILE_W; // rows of x in a strip
    static constexpr int STRIPS = X_ROWS - (STRIP_ROWS - 1);
    // Behind the strips of stage 0 lies a matrix of ones (32 values of k, 8 columns), for SumsOfDout.
    static constexpr int ONES_AT = STRIPS * STRIP;
    static constexpr int ONES_BYTES = 32 * 8;
    static constexpr int X_STAGE = whole_swizzles(X_BYTES);
    static constexpr int DOUT_STAGE = whole_swizzles(DOUT_BYTES);
    static constexpr int STRIPS_STAGE = whole_swizzles(ONES_AT + ONES_BYTES);
    static constexpr int RING_X = STAGES_X;
    static constexpr int RING_DOUT = STAGES_DOUT;
    static constexpr int RING_STRIPS = STAGES_STRIPS;
    static_assert(RING_STRIPS >= 2, "a tile's strips are released when the next tile's have arrived");
    static constexpr int BARRIERS = 2 * (RING_X + RING_DOUT + RING_STRIPS);
    // Shared memory: | barriers | a ring of tiles of strips | a ring of tiles of x | a ring of tiles of dout |
    // The strips must not lie at the end: compute-sanitizer does not know that the thirds of B overlap, and expects
    // 6,144 bytes from B's beginning on.
    static constexpr int TILES_BYTES = RING_X * X_STAGE + RING_DOUT * DOUT_STAGE + RING_STRIPS * STRIPS_STAGE;
    static constexpr int SHARED_BYTES = TILES_BYTES + shared_beside(BARRIERS);
    static_assert(SHARED_BYTES <= hopper_shared(1), "a multiprocessor has room for one block");
    static_assert(TILES_BYTES >= 3 * 2 * 3 * BYTES_OF_64_ROWS, "put_dweight writes a block's sums over the tiles");
    // Returns the output channel, among the 16 of its warp, of row i (0 or 1) of a thread's D.
    static INLINE int row_channel(int lane, int i) { return lane / 4 * 2 + i; }
};

// Role: load.
template <class T> INLINE void load_tiles_fp8(const WeightBlock<T>& work, auto& xs, auto& douts) {
    const ConvWeightTma& maps = work.maps;
    TileWalk tile(work.p.tiles_h, work.p.tiles_w, work.first, 1, work.end);
    await_previous_kernel();
    for (; tile; tile.next()) {
        const int h = tile.h * T::TILE_H;
        const int w = tile.w * T::TILE_W;
        const Stage x = xs.acquire();
        mbarrier_expect(x.full, T::X_BYTES);
        tma_load(x.address, &maps.x.map1, x.full, work.ci_tile * SLICE_CHANNELS, w, h - 1, tile.n);
        const Stage dout = douts.acquire();
        mbarrier_expect(dout.full, T::DOUT_BYTES);
        tma_load(dout.address, &maps.dout, dout.full, work.co_tile * SLICE_CHANNELS, w - 1, h, tile.n);
    }
}

// Transposes 16 pixels x 4 channels. Byte c of w[i] is channel c of pixel i or, if swapped is 1, of pixel i ^ 1.
// Afterwards word t of v[c] holds channel c of the pixels 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. ldmatrix_trans gives lane
// 4 g + t the same pixels of dout.
INLINE void transpose_16x4(uint32_t (&v)[4][4], const uint32_t (&w)[16], int swapped) {
    // From two neighbouring pixels, __byte_perm selects one channel of both, then the next channel of both.
    const uint32_t channels_01 = swapped ? 0x1504 : 0x5140;
    const uint32_t channels_23 = swapped ? 0x3726 : 0x7362;
    UNROLL_FOR (int t = 0; t < 4; t++) {
        const uint32_t a01 = __byte_perm(w[2 * t], w[2 * t + 1], channels_01);
        const uint32_t a23 = __byte_perm(w[2 * t], w[2 * t + 1], channels_23);
        const uint32_t b01 = __byte_perm(w[8 + 2 * t], w[9 + 2 * t], channels_01);
        const uint32_t b23 = __byte_perm(w[8 + 2 * t], w[9 + 2 * t], channels_23);
        v[0][t] = __byte_perm(a01, b01, 0x5410);
        v[1][t] = __byte_perm(a01, b01, 0x7632);
        v[2][t] = __byte_perm(a23, b23, 0x5410);
        v[3][t] = __byte_perm(a23, b23, 0x7632);
    }
}
// Role: transpose x. Lanes 0-15 of a warp make one strip, lanes 16-31 the next one; a lane transposes 4 channels. The
// two halves of a warp read pixels in different orders, so that they read from different banks.
template <class T> INLINE void transpose_tiles(const WeightBlock<T>& work, auto& xs, auto& strips, int warp) {
    const int lane = threadIdx.x & 31;
    const int half = lane >> 4;
    const int quad = lane & 15; // the lane's channels are 4 quad .. 4 quad + 3
    // The 16 pixels of a strip follow each other in memory, also if they are two rows of the tile, because x has no
    // border to the left and to the right. As its i-th pixel, a lane reads pixel i ^ half. `from` lies in pixel `half`
    // of strip 0. So bit 6 of the address is `half`, and the XOR with i % 2 * PIXEL_BYTES flips it if i is odd.
    // The XOR with i / 2 % 4 * 16 is TMA's swizzle of rows of 64 bytes (box_place): bits 4-5 of an address are XORed
    // with bits 7-8. Here bits 7-8 are i / 2 % 4, because strips begin at multiples of 512 bytes.
    const int from = quad * 4 + half * T::PIXEL_BYTES;
    const int to = quad / 2 * T::CHANNELS_8 + quad % 2 * 64;
    for (int t = work.first; t < work.end; t++) {
        const uint32_t x = xs.arrived() + from;
        const Stage stage = strips.acquire();
        for (int strip = 2 * warp + half; strip < T::STRIPS; strip += 2 * T::TRANSPOSERS) {
            uint32_t w[16];
            UNROLL_FOR (int i = 0; i < 16; i++) {
                const uint32_t pixel = x ^ (i % 2 * T::PIXEL_BYTES | i / 2 % 4 * 16);
                w[i] = load_shared_word(pixel + (strip * T::TILE_W + i / 2 * 2) * T::PIXEL_BYTES);
            }
            uint32_t v[4][4];
            transpose_16x4(v, w, half);
            UNROLL_FOR (int j = 0; j < 4; j++) {
                const uint32_t channel = stage.address + strip * T::STRIP + to + j * 16;
                store_shared(channel, make_uint4(v[j][0], v[j][1], v[j][2], v[j][3]));
            }
        }
        warp_stored(stage.full);
        xs.release(lane == 0);
    }
}

// In lane 4 g + t each register of `pixels` holds channels 2 g and 2 g + 1 of one pixel and of the next pixel.
// Registers 0 and 1 belong to k = 0 .. 15, registers 2 and 3 to k = 16 .. 31. The function makes wgmma's operand A of
// them: a[0] and a[2] hold channel 2 g, and a[1] and a[3] hold channel 2 g + 1.
INLINE void part_channels(uint32_t (&a)[4], const uint32_t (&pixels)[4]) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
        a[2 * i] = __byte_perm(pixels[2 * i], pixels[2 * i + 1], 0x6420);
        a[2 * i + 1] = __byte_perm(pixels[2 * i], pixels[2 * i + 1], 0x7531);
    }
}

// The sums of 64 channels of dout, for the bias gradient. wgmma computes them, too: D[64 Cout][8] += dout * ones. All
// columns of D are the same. So four neighbouring lanes hold the same sums of channels c and c + 1, and the first of
// these lanes writes them.
template <class T> struct SumsOfDout {
    const WeightBlock<T>& work;
    const float unscale; // 1 / the factor of dout: the sums are multiplied by it
    const int c = work.co_tile * SLICE_CHANNELS + threadIdx.x / 32 % 4 * 16 + T::row_channel(threadIdx.x % 32, 0);
    const int image_tiles = work.p.pixel_tiles / work.p.bias_images;
    int n = work.first / image_tiles;
    int left = (n + 1) * image_tiles - work.first; // how many pixel tiles of image n remain
    float d[4] = {};
    float total[2] = {};

    // Called when all products of a pixel tile have been started. At the end of an image, or of the block's range, this
    // function waits for the products and stores the image's sums.
    INLINE void end_tile(bool last) {
        left--;
        if (left > 0 && !last) return;
        multiplied<0>(d);
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const float sum = d[2 * i] * unscale;
            total[i] += sum;
            if (threadIdx.x % 4 == 0) work.put_image_sum(n, c + i, sum);
        }
        UNROLL_FOR (float& v : d) v = 0;
        n++;
        left = image_tiles;
    }
    INLINE void put_total() const {
        UNROLL_FOR (int i = 0; i < 2; i++)
            if (threadIdx.x % 4 == 0 && c + i < work.p.shape.Cout) work.p.dbias[c + i] = total[i];
    }
};
struct NoSums { // warpgroups that do not sum dout have it in place of a SumsOfDout
    INLINE void end_tile(bool) const {}
};

// Role: multiply. D[64 Cout][192] = dout (64 Cout, pixels) * x (pixels, 3 x 64 Cin), for the taps of column kw. A
// warp's rows of A are 16 output channels: row g is channel 2 g, row g + 8 is channel 2 g + 1.
// A step's products are one group of wgmma. Invariant: a set of registers for A is loaded only after the group that
// read it is done. Two sets take turns, so the group that reads the other set may still run.
template <class T, class Sums>
INLINE void multiply_tiles_fp8(const WeightBlock<T>& work, auto& douts, auto& strips, int kw, float (&d)[96],
                               Sums& sums) {
    constexpr bool SUMS = !std::is_same_v<Sums, NoSums>;
    const int lane = threadIdx.x & 31;
    const int piece = threadIdx.x / 32 % 4; // which 16 bytes of a pixel hold the warp's 16 channels
    // The lane passes the address of row lane % 8 of matrix lane / 8 to ldmatrix_trans. Each matrix is eight
    // neighbouring pixels x 16 channels. Matrices 0 and 1 are k = 0 .. 15, and matrices 2 and 3 are k = 16 .. 31.
    const int row = T::TILE_W == 16 ? lane / 16 : lane / 8;
    const int column = (T::TILE_W == 16 ? lane & 8 : 0) + lane % 8 + 2 - kw;
    int at[T::STEPS];
    UNROLL_FOR (int s = 0; s < T::STEPS; s++) {
        at[s] = box_place<SLICE_CHANNELS / 2>((row + s * T::STEP_ROWS) * T::PITCH + column, piece);
    }
    const Operand ones = Operand::matrices(strips.stage(0).address + T::ONES_AT, 128, 128);
    uint32_t a[2][4];
    for (int t = work.first; t < work.end; t++) {
        const uint32_t dout = douts.arrived();
        const Operand b = Operand::matrices(strips.arrived(), T::STRIP_ROWS * T::STRIP, T::CHANNELS_8);
        UNROLL_FOR (int s = 0; s < T::STEPS; s++) {
            wgmma_wait<1>();
            uint32_t pixels[4];
            ldmatrix_trans(pixels, pixels + 2, dout + at[s]);
            part_channels(a[s % 2], pixels);
            // At step 1 only step 0 of this tile may still run, so all products of the tile before are done.
            if (s == 1 && t > work.first) strips.release();
            // This warp has loaded all that it needs of dout's tile, so it releases the stage before the products end.
            if (s == T::STEPS - 1) {
                __syncwarp();
                douts.release(lane == 0);
            }
            wgmma_fence();
            WgmmaFp8<192, Element::FP8_GRADIENT, Element::FP8>::add(d, a[s % 2],
                                                                    b.at(s * T::STEP_ROWS * T::STRIP / 16));
            if constexpr (SUMS) WgmmaFp8<8, Element::FP8_GRADIENT, Element::FP8>::add(sums.d, a[s % 2], ones.at(0));
            wgmma_commit();
        }
        sums.end_tile(t + 1 == work.end);
    }
    multiplied<0>(d);
}

// Roles: warps 0 .. 11 multiply, warp 12 loads, warps 13 .. 15 transpose x. The warpgroup of the middle column (kw = 1)
// also sums dout, since it reads dout without a shift.
template <class T> // T: a WeightTileFp8
static __global__ void __launch_bounds__(T::THREADS, 1) conv_weight_fp8_kernel(const __grid_constant__ TmaBatch b) {
#if __CUDA_ARCH__ == 900
    const WeightBlock<T> work(b.work_of_this_block());
    SharedMemory shared(T::BARRIERS);
    Pipeline<T::STRIPS_STAGE> strips(shared, T::RING_STRIPS, T::WARPGROUPS, T::TRANSPOSERS);
    Pipeline<T::X_STAGE> xs(shared, T::RING_X, T::TRANSPOSERS);
    Pipeline<T::DOUT_STAGE> douts(shared, T::RING_DOUT, 4 * T::WARPGROUPS);
    const int warp = threadIdx.x >> 5;
    if (threadIdx.x == T::LOADER * 32) {
        prefetch_tensor_map(&work.maps.x.map1);
        prefetch_tensor_map(&work.maps.dout);
    }
    if (threadIdx.x < T::ONES_BYTES / 16) {
        constexpr uint32_t FOUR_ONES = 0x38383838; // in e4m3 the byte 0x38 is 1
        store_shared(strips.stage(0).address + T::ONES_AT + threadIdx.x * 16,
                     make_uint4(FOUR_ONES, FOUR_ONES, FOUR_ONES, FOUR_ONES));
        fence_async();
    }
    ready(xs, douts, strips);

    // The warpgroup that loads and transposes gives registers to those that multiply.
    if (warp >= T::LOADER) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp > T::LOADER) {
            // These warps need not wait for the previous kernel. They call this so that the next kernel can start
            // early: it starts when all threads have called it or have ended.
            await_previous_kernel();
            transpose_tiles<T>(work, xs, strips, warp - T::LOADER - 1);
        } else if ((threadIdx.x & 31) == 0) {
            load_tiles_fp8<T>(work, xs, douts);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    await_previous_kernel();
    const int kw = uniform(warp / 4);
    const float unscale = 1 / *work.p.dout_factor;
    float acc[96] = {};
    if (kw == 1 && work.sums_bias) {
        SumsOfDout<T> sums{work, unscale};
        multiply_tiles_fp8<T>(work, douts, strips, kw, acc, sums);
        if (work.final) sums.put_total();
    } else {
        NoSums sums;
        multiply_tiles_fp8<T>(work, douts, strips, kw, acc, sums);
    }
    UNROLL_FOR (float& v : acc) v *= unscale / FP8_X_FACTOR;
    if (!work.final) return put_partial<T>(work, kw, work.co_tile, acc);
    // After this barrier no warp reads the tiles any more, so put_dweight may overwrite them.
    warps_sync(2, 128 * T::WARPGROUPS);
    put_dweight<T>(work, kw, work.co_tile, acc, strips.stage(0).address + kw * 2 * 3 * BYTES_OF_64_ROWS);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// --- FP8 in training: weights and gradients are rounded
// Used when: round_weights runs at the beginning of each step. round_gradient runs before a convolution's gradients are
//   computed, if no group norm's kernel has written dout in FP8 (plan_fp8_gradients).
// How: A block of round_weights_kernel rounds a tile of 64 output channels x 64 input channels of one tap. It writes
//   the tile to `weights`, in the order of the bf16 weights, and, through shared memory, to `turned`, where input and
//   output channels have changed places.
// Costs: for each weight, 2 bytes are read, and 2 are written (1 with turned_alone).

constexpr int ROUNDING_TILE = 64;
constexpr int MAX_ROUNDINGS = 96; // how many layers one launch rounds at most; adm64 has 69 layers to round
// The convolutions whose weights one launch rounds; each of them is called a work. As a parameter of the kernel, the
// list need not be copied to the device's memory. Block i rounds tile i, counted over all works.
struct RoundingList {
    struct Work : WeightRounding {
        int first_tile; // the number of the work's first tile
        HD int tiles_in() const { return (Cin + ROUNDING_TILE - 1) / ROUNDING_TILE; }
        HD int tiles_out() const { return (Cout + ROUNDING_TILE - 1) / ROUNDING_TILE; }
        int tiles() const { return tiles_out() * 9 * tiles_in(); }
    } works[MAX_ROUNDINGS];
    int count = 0;
    int tiles = 0; // how many tiles all works have
};

// `list` is a __grid_constant__. Without this the compiler would copy it to local memory, because an index into
// list.works is only known at run time.
static __global__ void __launch_bounds__(256) round_weights_kernel(uint8_t* weights, uint8_t* turned, // flat arrays
                                                                   const bf16* copy,                  // a flat array
                                                                   const __grid_constant__ RoundingList list) {
    constexpr int TILE = ROUNDING_TILE;
    constexpr int PITCH = TILE + 8;
    __shared__ __align__(8) uint8_t tile[TILE][PITCH]; // (output channel, input channel)
    // A binary search finds the work to which this block's tile belongs.
    int low = 0;
    for (int end = list.count; end - low > 1;) {
        const int middle = (low + end) / 2;
        if ((int)blockIdx.x < list.works[middle].first_tile) end = middle;
        else low = middle;
    }
    const RoundingList::Work& work = list.works[low];
    // The tile's number within the work is made of (tile of output channels, tap, tile of input channels).
    const int index = blockIdx.x - work.first_tile;
    const int ci0 = index % work.tiles_in() * TILE;
    const int tap = index / work.tiles_in() % 9;
    const int co0 = index / work.tiles_in() / 9 * TILE;
    await_previous_kernel();

    // A thread rounds the weights of 8 neighbouring input channels, for each of two output channels. Here all numbers
    // of channels are multiples of 32, so either all of the 8 channels exist, or none of them.
    const int column = threadIdx.x % 8 * 8;
    UNROLL_FOR (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 8 + i * 32;
        const int co = co0 + row;
        const int ci = ci0 + column;
        if (co >= work.Cout || ci >= work.Cin) continue;
        const size_t at = work.offset + ((size_t)co * 9 + tap) * work.Cin + ci;
        float v[8];
        unpack<bf16>(v, load16(copy + at));
        const uint2 rounded = scaled_to_fp8(v, FP8_WEIGHT_FACTOR);
        if (!work.turned_alone) store_whole(weights + at, rounded);
        *(uint2*)&tile[row][column] = rounded;
    }
    // Every thread must come to this barrier, so the loop above uses continue and not return.
    __syncthreads();
    // A thread writes the weights of 16 neighbouring output channels, for one input channel.
    const int ci = ci0 + (int)threadIdx.x / 4;
    const int co = co0 + (int)threadIdx.x % 4 * 16;
    if (ci >= work.Cin || co >= work.Cout) return;
    uint32_t words[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        // A word holds four output channels, the first of them in its lowest byte.
        words[i] = 0;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            words[i] |= (uint32_t)tile[co - co0 + 4 * i + k][ci - ci0] << 8 * k;
        }
    }
    // An input gradient is a convolution of dout with each 3x3 filter turned by 180 degrees. So tap becomes 8 - tap.
    store_whole(turned + work.offset + ((size_t)ci * 9 + 8 - tap) * work.Cout + co,
                make_uint4(words[0], words[1], words[2], words[3]));
}

static void round_weights(uint8_t* weights, uint8_t* turned, const act* copy,
                          const std::vector<WeightRounding>& works) {
    // act_has_wgmma is true only if activations are bf16. So copy holds bf16, which the kernel expects.
    if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
    RoundingList list;
    for (const WeightRounding& w : works) {
        list.works[list.count] = {w, list.tiles};
        list.tiles += list.works[list.count].tiles();
        list.count++;
        if (list.count < MAX_ROUNDINGS && &w != &works.back()) continue;
        launch(round_weights_kernel, list.tiles, 256, 0, weights, turned, copy, list);
        list = {};
    }
}

// Rounds the n numbers of the gradient dout to FP8. n must be a multiple of 16.
static void round_gradient(Fp8Copy fp8, const act* dout, size_t n) {
    each(n / 16, [=] __device__(size_t i) {
        uint2 rounded[2];
        UNROLL_FOR (int k = 0; k < 2; k++) {
            float v[8];
            unpack<bf16>(v, load16((const bf16*)dout + i * 16 + k * 8));
            rounded[k] = scaled_to_fp8<Element::FP8_GRADIENT>(v, *fp8.factor);
        }
        store_whole(fp8.bytes + i * 16, make_uint4(rounded[0].x, rounded[0].y, rounded[1].x, rounded[1].y));
    });
}
#endif
