// conv_any.h - convolutions of any kernel size and stride, and the first and the last layer.
#pragma once
#include "conv.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_gather: any kernel size and stride, any GPU
// Used when: the filter is 1x1 or the stride is 2, and Hopper's kernels can't be used.
// How: A block computes PIXELS neighbouring pixels of one image (counted row by row) for CHANNELS channels. A step is
//   one slice of the input channels under one tap. For a step the block copies (cp.async) the input pixels that its
//   output pixels read under this tap. It also copies the tap's weights for this slice:
//
//     a stage of shared memory; STAGES of them are a ring
//     +------------------------+----------------------+
//     | PIXELS rows            | weights of the tap   |    A slice is 128 bytes of a pixel: 64 channels of bf16, or 32
//     | of 128 bytes           | x CHANNELS x slice   |    of floats. A second input's slices come after the first's.
//     +------------------------+----------------------+
//
//   A warp computes 64 of the pixels x WARP_CHANNELS of the channels.
// Costs: For every CHANNELS output channels, the input is read once for every tap, mostly from the L2 cache.

// The offset of a tap. Forward: output pixel (h, w) reads the input's pixel (h * stride + dy, w * stride + dx).
// BACKWARD: input pixel (h, w) is read by the output pixel (y, x) for which y * stride = h + dy and x * stride =
// w + dx, if there is such an output pixel.
struct TapOffset {
    int dy, dx;
};
template <bool BACKWARD> INLINE TapOffset tap_offset(const ConvShape& s, int tap) {
    const int dy = tap / s.kernel - s.kernel / 2;
    const int dx = tap % s.kernel - s.kernel / 2;
    if (BACKWARD) return {-dy, -dx};
    return {dy, dx};
}
// Finds the pixel that a kernel reads under one tap for one pixel of its result. Forward, the kernel reads the layer's
// input, and its result is the layer's output. BACKWARD, it reads dout, and its result is the input's gradient. The
// result's pixel comes i pixels after (h, w), counted row by row. Returns the index of the pixel within its image, or
// -1 if there is no such pixel. W_inverse is 1 / the width of the result. The product with it, rounded down, is the
// exact quotient: the numbers are small, and 0.5 is added before.
template <bool BACKWARD>
INLINE int source_pixel(const ConvShape& s, float W_inverse, int h, int w, int i, TapOffset offset) {
    const int rows_down = (int)((w + i + 0.5f) * W_inverse);
    h += rows_down;
    w += i - rows_down * (BACKWARD ? s.W : s.out_W());
    const int y = (BACKWARD ? h : h * s.stride) + offset.dy;
    const int x = (BACKWARD ? w : w * s.stride) + offset.dx;
    // BACKWARD with stride 2: there is an output pixel only if y and x are even. It is (y / 2, x / 2).
    const int odd = s.stride - 1;
    const int halve = BACKWARD ? odd : 0;
    const int rows = BACKWARD ? s.out_H() : s.H;
    const int columns = BACKWARD ? s.out_W() : s.W;
    const bool inside = y >= 0 && x >= 0 && y < rows << halve && x < columns << halve;
    const bool is_pixel = inside && !(BACKWARD && (y | x) & odd);
    return is_pixel ? (y >> halve) * columns + (x >> halve) : -1;
}

template <class T_, int PIXEL_WARPS_, int CHANNELS_, int WARP_CHANNELS_, int STAGES_>
struct GatherTile : ProductTile<1, PIXEL_WARPS_, CHANNELS_, WARP_CHANNELS_, 1> {
    typedef T_ T;
    static constexpr int PIXELS = PIXEL_WARPS_ * 64;
    static constexpr int STAGES = STAGES_;
    static constexpr int PIXEL_BYTES = 128;               // bytes of a pixel in shared memory
    static constexpr int SLICE = PIXEL_BYTES / sizeof(T); // channels of a slice
    static constexpr int WEIGHTS_AT = PIXELS * PIXEL_BYTES;
    static constexpr int STAGE_BYTES = WEIGHTS_AT + CHANNELS_ * PIXEL_BYTES;
    // How many blocks shall fit on a multiprocessor. This limits the registers of a thread.
    static constexpr int PER_SM_OF_64_CHANNELS = (PARTS<T> == 1 ? 6 : 4) / PIXEL_WARPS_;
    static constexpr int PER_SM = CHANNELS_ == 128 ? 2 : PER_SM_OF_64_CHANNELS;
};

// The weights of a stage: one tap. Forward: a row is an output channel, and its chunks are the channels of the slice.
// BACKWARD: a row is a channel of dout, and its chunks are the channels of the input's gradient.
template <class Tile, bool BACKWARD> struct GatherWeights {
    typedef typename Tile::T T;
    static constexpr int ROWS = BACKWARD ? Tile::SLICE : Tile::CHANNELS;
    static constexpr int ROW_BYTES = BACKWARD ? Tile::CHANNELS * sizeof(T) : Tile::PIXEL_BYTES;
    static constexpr int CHUNKS = ROW_BYTES / sizeof(T) / 8;
    static constexpr int ROWS_AT_ONCE = Tile::THREADS / CHUNKS; // rows that all threads together copy at a time
    static constexpr int COPIES = ROWS / ROWS_AT_ONCE;          // how many chunks each thread copies for a stage
    static_assert(ROWS_AT_ONCE % 8 == 0, "all rows of a thread have the same swizzle key");

    // place: the address of this thread's first chunk in stage 0. stage: the distance from stage 0 to the stage, in
    // bytes. k0: the slice's first channel in its input, which has C channels. weight_k0: the same in the weights.
    static INLINE void copy(const ConvCall& p, uint32_t place, uint32_t stage, int c0, int tap, int k0, int weight_k0,
                            int C) {
        const int chunk = (int)threadIdx.x % CHUNKS;
        const int row = (int)threadIdx.x / CHUNKS;
        const T* const weight = (const T*)p.weight;
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const int r = row + i * ROWS_AT_ONCE;
            const int c = c0 + (BACKWARD ? chunk * 8 : r); // channel of the output (BACKWARD: of dx)
            const int k = BACKWARD ? r : chunk * 8;        // channel, in the slice, of the input (BACKWARD: of dout)
            const bool valid = c < p.Cout && k0 + k < C;   // if false, the copy writes zeros
            const uint32_t index = BACKWARD ? ((weight_k0 + k) * p.taps + tap) * p.Cout + c
                                            : (c * p.taps + tap) * (p.Cin1 + p.Cin2) + weight_k0 + k;
            const int offset = stage + i * ROWS_AT_ONCE * ROW_BYTES;
            copy_channels(place, offset, weight + (valid ? index : 0), valid);
        }
    }
    // Returns the place, in a stage's weights, of the row that this lane gives to ldmatrix, for the first 16 k and the
    // 16 channels from first_channel on. Its matrices are (channels 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15,
    // 8-15).
    static INLINE uint32_t lane_place(int first_channel) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_c = lane >> 3 & 1;
        const int upper_k = lane >> 4;
        if (BACKWARD) {
            const int k = upper_k * 8 + row_of_matrix;
            return k * ROW_BYTES + chunk_place<T>(first_channel / 8 + upper_c, row_of_matrix);
        }
        const int c = first_channel + upper_c * 8 + row_of_matrix;
        return c * ROW_BYTES + chunk_place<T>(upper_k, row_of_matrix);
    }
    // Loads one fragment: the warp's m-th group of 16 output channels (BACKWARD: of dx), and the slice's k-th group of
    // 16 input channels (BACKWARD: of dout). lane: the address of this lane's row if m and k were 0.
    static INLINE void load(FragmentA<T>& a, uint32_t lane, int m, int k) {
        if (BACKWARD) load_fragment<T, true>(a, channels_on<T>(lane, 16 * m), k * 16 * ROW_BYTES);
        else load_fragment<T, false>(a, channels_on<T>(lane, 16 * k), m * 16 * ROW_BYTES);
    }
};

// Phases:
//   1. The copies for the first STAGES - 1 steps are started.
//   2. For each step: wait for its operands, start the copies for a later step, multiply.
//   3. store_product makes results of the sums, and stores them.
template <class Tile, bool BACKWARD>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) conv_gather_kernel(const ConvCall p) {
    typedef typename Tile::T T;
    typedef GatherWeights<Tile, BACKWARD> Weights;
    constexpr int PIXELS = Tile::PIXELS;
    constexpr int STAGES = Tile::STAGES;
    constexpr int SLICE = Tile::SLICE;
    constexpr int PIXEL_BYTES = Tile::PIXEL_BYTES;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int tid = threadIdx.x;

    // The block's tile: channels from c0 on, pixels from tile * PIXELS on, of image n.
    const int c0 = blockIdx.x % p.channel_blocks * Tile::CHANNELS;
    const int tile = blockIdx.x / p.channel_blocks % p.tiles_w;
    const int n = blockIdx.x / p.channel_blocks / p.tiles_w;
    const int slices1 = ceil_div(p.Cin1, SLICE);
    const int slices = slices1 + ceil_div(p.Cin2, SLICE);
    const int steps = slices * p.taps;

    // A thread copies the same chunk of every PIXELS_AT_ONCE-th pixel, and of every ROWS_AT_ONCE-th row of weights.
    // Both numbers are multiples of 8. So all pixels (rows) that a thread copies have the same swizzle key.
    constexpr int CHUNKS = SLICE / 8;
    constexpr int PIXELS_AT_ONCE = Tile::THREADS / CHUNKS;
    constexpr int COPIES = PIXELS / PIXELS_AT_ONCE;
    const int chunk = tid % CHUNKS;
    const int row = tid / CHUNKS;
    const int w_chunk = tid % Weights::CHUNKS;
    const int w_row = tid / Weights::CHUNKS;
    const uint32_t own_pixels = base + row * PIXEL_BYTES + chunk_place<T>(chunk, row & 7);
    const uint32_t own_weights =
        base + Tile::WEIGHTS_AT + w_row * Weights::ROW_BYTES + chunk_place<T>(w_chunk, w_row & 7);
    const bool direct = p.taps == 1 && p.s.stride == 1; // each output pixel reads the input pixel with the same index

    int source[COPIES]; // the pixels that this thread copies for this tap, as indices within the image; -1: zeros
    int tap = -1;
    int slice = 0;
    auto start_tap = [&] {
        tap++;
        const TapOffset offset = tap_offset<BACKWARD>(p.s, tap);
        const int h0 = tile * PIXELS / p.W;
        const int w0 = tile * PIXELS - h0 * p.W;
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const int k = row + i * PIXELS_AT_ONCE; // pixel of the tile
            const int pixel = tile * PIXELS + k;    // pixel of the image
            source[i] = direct ? pixel : source_pixel<BACKWARD>(p.s, 1.0f / p.W, h0, w0, k, offset);
            if (pixel >= p.H * p.W) source[i] = -1;
        }
    };
    auto copy_step = [&](int step) { // must be called for step 0, 1, 2, ... in order: it counts `tap` and `slice` up
        const uint32_t stage = (uint32_t)step % STAGES * Tile::STAGE_BYTES;
        if (slice == 0) start_tap();
        const bool second = slice >= slices1;                      // a slice of the second input
        const int k0 = (second ? slice - slices1 : slice) * SLICE; // the slice's first channel in its input
        const int weight_k0 = (second ? p.Cin1 : 0) + k0;          // the same channel in the weights
        const int C = second ? p.Cin2 : p.Cin1;

        const int c = k0 + chunk * 8;
        const bool chunk_inside = c < C;
        const T* const input = (const T*)(second ? p.x2 : p.x1);
        const T* const x = input + (chunk_inside ? c : 0);
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const bool valid = chunk_inside && source[i] >= 0; // if false, the copy writes zeros
            const uint32_t pixel = valid ? n * p.source_pixels + source[i] : 0;
            copy_channels(own_pixels, stage + i * PIXELS_AT_ONCE * PIXEL_BYTES, pixel_of(x, pixel, C), valid);
        }
        Weights::copy(p, own_weights, stage, c0, tap, k0, weight_k0, C);
        if (++slice == slices) slice = 0;
    };
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy_step(step);
        copies_committed();
    }

    // The addresses, in stage 0, of the rows that this lane gives to ldmatrix. For two fragments of pixels, the
    // matrices are (pixels 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const int lane = tid & 31;
    const int warp = tid >> 5;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int row_of_matrix = lane & 7;
    const int upper_k = lane >> 3 & 1;
    const int next_8 = lane >> 4;
    const int lane_pixel = pixel_warp * 64 + next_8 * 8 + row_of_matrix;
    uint32_t lane_pixels = base + lane_pixel * PIXEL_BYTES + chunk_place<T>(upper_k, row_of_matrix);
    const int first_channel = Tile::channel_warp(warp) * Tile::WARP_CHANNELS;
    uint32_t lane_weights = base + Tile::WEIGHTS_AT + Weights::lane_place(first_channel);
    // Without this line the compiler would compute lane_pixels and lane_weights again in every step.
    asm volatile("" : "+r"(lane_pixels), "+r"(lane_weights));

    constexpr int M = Tile::WARP_CHANNELS / 16;
    float acc[8][M][4] = {}; // acc[r][m]: the sums of pixels 8r .. 8r + 7 x channels 16m .. 16m + 15 of the warp
    float pixel_scale = 1, weight_scale = 1;
    for (int step = 0; step < steps; step++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = (uint32_t)step % STAGES * Tile::STAGE_BYTES;
        take_apart_copies<T, Tile::THREADS / 32>(
            pixel_scale, places<COPIES, PIXELS_AT_ONCE * PIXEL_BYTES>(own_pixels + stage), weight_scale,
            places<Weights::COPIES, Weights::ROWS_AT_ONCE * Weights::ROW_BYTES>(own_weights + stage));
        __syncthreads(); // all threads' copies for this step have arrived, and all have finished the previous step
        if (step + STAGES - 1 < steps) copy_step(step + STAGES - 1);
        copies_committed();
        UNROLL_FOR (int k = 0; k < SLICE / 16; k++) {
            FragmentA<T> a[M];
            FragmentB<T> b[8];
            UNROLL_FOR (int r = 0; r < 8; r += 2)
                load_fragments<T, false>(b[r], b[r + 1], channels_on<T>(lane_pixels + stage, 16 * k),
                                         r * 8 * PIXEL_BYTES);
            UNROLL_FOR (int m = 0; m < M; m++) Weights::load(a[m], lane_weights + stage, m, k);
            multiply<T, M, 8>(acc[0], 1, M, a, b, pixel_scale * weight_scale);
        }
    }

    // The sums are stored in two rounds if shared memory is too small for all of them.
    constexpr int ROUNDS = Tile::STAGED_BYTES > STAGES * Tile::STAGE_BYTES ? 2 : 1;
    auto output_pixel = [&](int k) { // index of the warp's k-th pixel in the output; -1: outside the image
        const int pixel = tile * PIXELS + pixel_warp * 64 + k;
        return pixel < p.H * p.W ? n * p.H * p.W + pixel : -1;
    };
    store_product<Tile, T, ROUNDS, BACKWARD>(acc, shared, p.out, n, c0, tile, p.tiles_w, output_pixel);
}

// A tile lies within one image, so that all its pixels have the same embedding and belong to the same statistics.
template <class Tile, bool BACKWARD> static void conv_gather(const ConvCall& c) {
    ConvCall p = c;
    p.tiles_w = ceil_div(p.H * p.W, Tile::PIXELS);
    p.channel_blocks = ceil_div(p.Cout, Tile::CHANNELS);
    p.source_pixels = BACKWARD ? p.s.out_H() * p.s.out_W() : p.s.H * p.s.W;
    p.taps = p.s.kernel * p.s.kernel;
    if (p.out.parts) *p.out.parts = p.tiles_w;
    launch_behind(conv_gather_kernel<Tile, BACKWARD>, p.B * p.tiles_w * p.channel_blocks, Tile::THREADS,
                  Tile::STAGES * Tile::STAGE_BYTES, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_few: the first and the last layer
// Used when: the convolution is 3x3 with stride 1, and its input or its output has only a few channels (F), which are
//   fp32: images, predictions, and their gradients.
// How: The F channels of a pixel are too few for a slice. So for each pixel a row is written that holds the 9 F values
//   under the filter's taps. It is padded to R values, a multiple of 32. Then a 1x1 convolution of these rows (B, H, W,
//   R) computes one of the products below. C is the number of channels at the layer's other end.
//     first layer, forward             weights (C, 9 F) x rows of the input
//     last layer's input gradient      transposed weights (C, 9 F) x rows of the output's gradient
//     first layer's weight gradient    dout^T x rows of the input: (C, R)
//     last layer's weight gradient     (rows of the output's gradient)^T x the layer's input: (R, C)
//   If activations are bf16, the rows are bf16, too. A bf16 has too few bits for an fp32 value v, so v becomes two
//   numbers: upper = bf16(v) and lower = bf16(v - upper). Their sum has a relative error of 2^-17 at most. A row of
//   weights then holds the same weights twice.
//
//     a row of a pixel, R values     bf16:  | 9 F upper parts, 0 ... | 9 F lower parts, 0 ... |
//                                    fp32:  | 9 F values, 0 ... |
//     value tap * F + f is channel f of the pixel under the tap; 0 outside the image
// Costs: the rows are written and read. In bf16, those of an RGB image have as many bytes as 64 channels.

// Returns the index, in the layer's own weights, of weight k = tap * F + f of channel c. The last layer's rows hold
// values of dout. Under tap t of a pixel lies the output pixel that reads this pixel under tap 8 - t.
INLINE size_t few_weight_at(const ConvFew& p, int c, int k) {
    if (!p.is_last_layer) return (size_t)c * 9 * p.F + k;
    const size_t f = k % p.F;
    const size_t tap = k / p.F;
    return (f * 9 + 8 - tap) * p.C + c;
}

// Writes the rows of all pixels and, if there are weights, the rows of the weights. A thread writes V values of a row,
// from value V threadIdx.x on, for many pixels. threadIdx.y is its pixel among those that the block writes at once. If
// values have two parts, the lower parts go to the same place in the row's second half.
template <class T> static __global__ void conv_few_rows(const ConvFew p) {
    constexpr int V = VEC<T>;
    const int first = threadIdx.x * V;
    const int part_width = p.R / p.parts;
    int tap[V];      // the tap of each of the V values; if it is 9 or more, 0 is written
    int distance[V]; // in x, in floats: from the pixel's own first channel to the value under the tap
    int t = first / p.F;
    int f = first % p.F;
    UNROLL_FOR (int j = 0; j < V; j++) {
        const int down = t / 3 - 1;
        tap[j] = t;
        distance[j] = (down * p.W + t % 3 - 1) * p.F + f;
        if (++f == p.F) {
            f = 0;
            t++;
        }
    }
    await_previous_kernel();
    for (int pixel = blockIdx.x * blockDim.y + threadIdx.y; pixel < p.B * p.H * p.W; pixel += gridDim.x * blockDim.y) {
        const uint32_t W = p.W;
        const uint32_t H = p.H;
        const uint32_t line = pixel / W;
        const uint32_t h = line % H;
        const uint32_t w = pixel - line * W;
        // `inside` holds one bit for each tap: 1 if the tap's pixel lies inside the image.
        const uint32_t columns = (w > 0) + 2 + 4 * (w + 1 < W);
        const uint32_t upper_row = h > 0 ? columns : 0;
        const uint32_t upper_and_middle = upper_row + (columns << 3);
        const uint32_t inside = upper_and_middle + (h + 1 < H ? columns << 6 : 0);
        float v[V];
        UNROLL_FOR (int j = 0; j < V; j++) {
            v[j] = inside >> tap[j] & 1 ? p.x[(uint32_t)pixel * p.F + distance[j]] : 0;
        }
        T* const row = (T*)p.rows + (size_t)pixel * p.R + first;
        *(uint4*)row = pack<T>(v);
        if constexpr (ElementOf<T>::FEW_PARTS == 2) {
            UNROLL_FOR (int j = 0; j < V; j++) v[j] -= (float)(T)v[j];
            *(uint4*)(row + part_width) = pack<T>(v);
        }
    }
    if (!p.weight) return;
    const int threads = gridDim.x * blockDim.x * blockDim.y;
    const int thread = (blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    for (int i = thread; i < p.C * p.R; i += threads) {
        const int k = i % part_width;
        ((T*)p.weight_rows)[i] = k < 9 * p.F ? ((const T*)p.weight)[few_weight_at(p, i / p.R, k)] : (T)0.0f;
    }
}

// Computes the layer's weight gradient from `product` and, for the last layer, its bias gradient from `bias`. If values
// have two parts, each gradient is the sum of two elements: one of upper parts, the other one of lower parts. A thread
// computes weight k of channel c. Neighbouring threads read neighbouring elements of the product.
static __global__ void conv_few_gradient(const ConvFew p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int K = 9 * p.F;
    const int c = p.is_last_layer ? i % p.C : i / K;
    const int k = p.is_last_layer ? i / p.C : i % K;
    const int part_width = p.R / 2; // with two parts: the distance in a row from an upper part to its lower part
    await_previous_kernel();
    if (p.is_last_layer && i < p.F) {
        // Under tap 4 lies the pixel itself. So element 4 F + i is the sum of dout's channel i over all pixels.
        const float* const sum = p.bias + 4 * p.F + i;
        p.dbias[i] = p.parts == 2 ? sum[0] + sum[part_width] : sum[0];
    }
    if (i >= p.C * K) return;
    const float* const sum = p.is_last_layer ? p.product + (size_t)k * p.C + c : p.product + (size_t)c * p.R + k;
    float gradient = sum[0];
    if (p.parts == 2) gradient += sum[p.is_last_layer ? (size_t)part_width * p.C : part_width];
    p.dweight[few_weight_at(p, c, k)] = gradient;
}

// Sets all members of a ConvFew except x, weight, dweight and dbias. The rows lie at the beginning of `memory`.
static ConvFew plan_few(const ConvShape& s, char* memory) {
    if (s.kernel != 3 || s.stride != 1 || s.upsample || s.C2)
        die("a convolution of %d to %d channels must be 3x3, stride 1, of one input", s.C1, s.Cout);
    ConvFew p = {};
    p.B = s.B;
    p.H = s.H;
    p.W = s.W;
    p.is_last_layer = conv_is_last(s);
    p.F = p.is_last_layer ? s.Cout : s.C1;
    p.C = p.is_last_layer ? s.C1 : s.Cout;
    p.parts = with_act([]<class T>(T) { return ElementOf<T>::FEW_PARTS; });
    p.R = round_up(p.parts * 9 * p.F, 32);
    p.rows = memory;
    p.weight_rows = memory + (size_t)p.B * p.H * p.W * p.R * act_bytes();
    p.product = (float*)p.weight_rows; // at the address of weight_rows, since no call needs both
    p.bias = p.product + (size_t)p.C * p.R;
    return p;
}
// Returns the 1x1 convolution that replaces the layer. For the weight gradient of the last layer, the rows are the
// gradient of its output. Otherwise they are its input.
static ConvShape few_shape(const ConvShape& s, bool weight_gradient = false) {
    const ConvFew p = plan_few(s, nullptr);
    const bool to_rows = p.is_last_layer && weight_gradient;
    const int Cin = to_rows ? p.C : p.R;
    const int Cout = to_rows ? p.R : p.C;
    return ConvShape{p.B, p.H, p.W, Cin, 0, Cout, 1, 1, 0};
}
// Returns how many bytes plan_few's `memory` needs. The rows of the weights never take more bytes than the product.
static size_t few_bytes(const ConvShape& s) {
    const ConvFew p = plan_few(s, nullptr);
    const size_t floats = (size_t)(p.bias - (float*)nullptr) + p.R;
    return floats * sizeof(float) / 256 * 256 + 256;
}
// Writes the rows of the pixels of x and, if weight is not null, the rows of the weights.
static ConvFew make_few_rows(const ConvShape& s, const act* x, const act* weight, char* memory,
                             Stream* stream = MAIN_STREAM) {
    ConvFew p = plan_few(s, memory);
    p.x = (const float*)x;
    p.weight = weight;
    const int pieces = p.R / p.parts / act_vec(); // 16-byte pieces of one part of a row; a thread writes one piece
    const int pixels = std::max(1, 256 / pieces); // how many pixels a block writes at once
    const int blocks = std::min(ceil_div(p.B * p.H * p.W, pixels), 5 * gpu.sms); // at most 5 for each multiprocessor
    auto* const kernel = with_act([]<class T>(T) { return conv_few_rows<T>; });
    launch_on(stream, 1, kernel, blocks, dim3(pieces, pixels), 0, p);
    // The next kernel is a convolution whose weights are the rows that this kernel writes. Hopper's convolutions load
    // weights before they wait for the end of the previous kernel. So the next kernel must not overlap this one.
    stream->joined |= weight != nullptr;
    return p;
}

// conv_weight_gather: any kernel size and stride, without upsampling. A block computes N x N tiles of 64 x 64 weights,
// of one tap. Each of its 2 x 2 warps computes 2 N x 4 N fragments. Tiles of 64 pixels pass through a ring of stages:
//
//     a stage:   | x: 64 pixels of 64 N channels, as the tap reads them | dout: 64 pixels of 64 N channels |
template <class T, int N> constexpr int WEIGHT_GATHER_STAGE = 2 * 64 * N * 64 * sizeof(T); // bytes of a stage
template <class T, int N> constexpr int WEIGHT_GATHER_STAGES = N == 2 ? 2 : 4 / PARTS<T>;

// What one thread copies of each pixel tile: the same chunk of every PIXELS_AT_ONCE-th pixel, of x and of dout.
template <class T, int N> struct WeightGatherCopies {
    static constexpr int CHUNKS = 8 * N;                   // chunks of a pixel, which has 64 N channels here
    static constexpr int PIXEL_BYTES = 64 * N * sizeof(T); // bytes of a pixel
    static constexpr int PIXELS_AT_ONCE = 128 / CHUNKS;    // pixels that all 128 threads together copy at a time
    static constexpr int COPIES = 64 / PIXELS_AT_ONCE;
    const ConvWeight& p;
    const uint32_t base; // the address where shared memory begins
    const int tap;
    const int co_tile, ci_tile; // the block's first tile of output channels and of input channels
    const int first;            // the block's first pixel tile
    const int chunk = (int)threadIdx.x % CHUNKS;
    // Of a tile's pixels, the first that this thread copies, in x and in dout.
    const int row = (int)threadIdx.x / CHUNKS;
    const int Wo = p.shape.out_W();
    const int HWo = p.shape.out_H() * Wo;
    const int t = ci_tile + chunk * 8 / 64; // the tile of input channels that this thread's chunk belongs to
    const bool second = t >= p.tiles1;      // does this tile belong to the second input?
    const int ci = (second ? t - p.tiles1 : t) * 64 + chunk * 8 % 64;
    const int co = co_tile * 64 + chunk * 8;
    const int C = second ? p.shape.C2 : p.shape.C1;
    const bool x_in = t < p.channel_tiles && ci < C;
    const bool dout_in = co < p.shape.Cout;
    const bool direct = p.shape.kernel == 1 && p.shape.stride == 1; // output pixel i reads input pixel i
    const act* const input = second && x_in ? p.x2 : p.x1;
    const T* const x = (const T*)input + (x_in ? ci : 0);
    const T* const dout = (const T*)p.dout + (dout_in ? co : 0);
    const float Wo_inverse = 1.0f / Wo;
    const TapOffset offset = tap_offset<false>(p.shape, tap);
    // The address that this thread's first chunk is written to, in stage 0. PIXELS_AT_ONCE is a multiple of 8, so all
    // rows that this thread copies have the same swizzle key.
    const uint32_t place = base + row * PIXEL_BYTES + chunk_place<T>(chunk, row & 7);
    int n = first / p.tiles_w;             // the image of the pixel tile that is copied next
    int p0 = (first - n * p.tiles_w) * 64; // the tile's first pixel in this image

    INLINE uint32_t stage(int pixel_tile) const {
        return (uint32_t)(pixel_tile - first) % WEIGHT_GATHER_STAGES<T, N> * WEIGHT_GATHER_STAGE<T, N>;
    }
    // The pixel tiles `first`, `first` + 1, ... must be passed in this order, because each call moves n and p0 on.
    INLINE void copy_tile(int pixel_tile) {
        const uint32_t stage = this->stage(pixel_tile);
        const int h0 = direct ? 0 : p0 / Wo;
        const int w0 = p0 - h0 * Wo;
        UNROLL_FOR (int k = 0; k < 64; k += PIXELS_AT_ONCE) {
            const int i = row + k;
            const int pixel = p0 + i;
            int source = -1;
            if (pixel < HWo) source = direct ? pixel : source_pixel<false>(p.shape, Wo_inverse, h0, w0, i, offset);
            const bool x_valid = x_in && source >= 0; // if false, the copy writes zeros
            const bool dout_valid = dout_in && pixel < HWo;
            const uint32_t x_pixel = x_valid ? n * p.shape.H * p.shape.W + source : 0;
            const uint32_t dout_pixel = dout_valid ? n * HWo + pixel : 0;
            copy_channels(place, stage + k * PIXEL_BYTES, pixel_of(x, x_pixel, C), x_valid);
            copy_channels(place, stage + (64 + k) * PIXEL_BYTES, pixel_of(dout, dout_pixel, p.shape.Cout), dout_valid);
        }
        p0 += 64;
        if (p0 < HWo) return;
        p0 = 0;
        n++;
    }
    // Returns a function for take_apart_copies: it calls f(address) for each chunk that this thread copies.
    INLINE auto own_places(uint32_t stage, int first_row) const {
        return places<COPIES, PIXELS_AT_ONCE * PIXEL_BYTES>(place + stage + first_row * PIXEL_BYTES);
    }
};

// A block has the same phases as in conv_weight_halo_kernel.
template <class T, int N, int WORKS>
static __global__ void __launch_bounds__(128, 4 - N)
    conv_weight_gather_kernel(const __grid_constant__ WeightBatch<ConvWeight, WORKS> batch) {
    using Copies = WeightGatherCopies<T, N>;
    constexpr int PIXEL_BYTES = Copies::PIXEL_BYTES;
    constexpr int M = 2 * N;
    constexpr int STAGES = WEIGHT_GATHER_STAGES<T, N>;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int co_warp = warp & 1;
    const int ci_warp = warp >> 1 & 1;

    // Which tap and which tiles of weights the block computes, over pixel tiles first .. end - 1. Blocks with
    // neighbouring numbers have the same range and tap, so they find its pixels in the L2 cache.
    const auto [p, block] = batch.work_of_this_block();
    const int co_tiles = p.tiles / p.channel_tiles;
    const int ci_blocks = ceil_div(p.channel_tiles, N);
    const int blocks = ci_blocks * ceil_div(co_tiles, N);
    const int tap = block / blocks % p.taps;
    const int split = block / blocks / p.taps;
    const int co_tile = block % blocks / ci_blocks * N;
    const int ci_tile = block % ci_blocks * N;
    const int first = first_pixel_tile(p, split);
    const int end = first_pixel_tile(p, split + 1);
    Copies copies{p, base, tap, co_tile, ci_tile, first};
    for (int k = 0; k < STAGES - 1; k++) {
        if (first + k < end) copies.copy_tile(first + k);
        copies_committed();
    }

    // Each lane gives ldmatrix the address of one pixel of one matrix. The four matrices are (pixels, channels):
    // Of x:    (pixels 0-7, ci 0-7), (8-15, ci 0-7), (0-7, ci 8-15), (8-15, ci 8-15).
    // Of dout: (pixels 0-7, co 0-7), (0-7, co 8-15), (8-15, co 0-7), (8-15, co 8-15).
    const int row_of_matrix = lane & 7;
    const int low = lane >> 3 & 1;
    const int high = lane >> 4;
    uint32_t lane_x =
        base + (low * 8 + row_of_matrix) * PIXEL_BYTES + chunk_place<T>(ci_warp * 4 * N + high, row_of_matrix);
    uint32_t lane_dout =
        base + (64 + high * 8 + row_of_matrix) * PIXEL_BYTES + chunk_place<T>(co_warp * 4 * N + low, row_of_matrix);
    // Without this line the compiler would compute lane_x and lane_dout again for every tile.
    asm volatile("" : "+r"(lane_x), "+r"(lane_dout));

    // acc[i][j]: the sums of the warp's i-th group of 16 output channels and its j-th group of 8 input channels
    float acc[M][2 * M][4] = {};
    float x_scale = 1, dout_scale = 1;
    const bool sums_bias = ci_tile == 0 && ci_warp == 0 && tap == 0;
    BiasSum<T, M> bias{p, sums_bias, split, co_tile * 64 + co_warp * 32 * N, first};
    for (int pixel_tile = first; pixel_tile < end; pixel_tile++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = copies.stage(pixel_tile);
        take_apart_copies<T, 4>(x_scale, copies.own_places(stage, 0), dout_scale, copies.own_places(stage, 64));
        __syncthreads(); // all threads' copies for this tile have arrived, and all have finished the previous tile
        if (pixel_tile + STAGES - 1 < end) copies.copy_tile(pixel_tile + STAGES - 1);
        copies_committed();
        bias.next_tile();
        UNROLL_FOR (int k = 0; k < 64 * PIXEL_BYTES; k += 16 * PIXEL_BYTES) { // 16 pixels at a time
            FragmentA<T> a[M];
            FragmentB<T> b[2 * M];
            load_dout<T>(a, lane_dout + stage + k);
            load_x<T>(b, lane_x + stage + k);
            bias.add(a, dout_scale);
            multiply<T, M, 2 * M>(acc[0], 2 * M, 1, a, b, x_scale * dout_scale);
        }
    }
    copies_arrived<0>();
    bias.put();
    put_weights(p, split, [&](auto put) {
        // For weight_place, a tile of 64 x 64 weights belongs to four warps, but here a warp may compute a whole tile.
        // The fragment lies in a square of 32 x 32 weights: the block's a-th along Cout, and the b-th along Cin.
        UNROLL_FOR (int f = 0; f < 2 * M * M; f++) {
            const int i = f / (2 * M);
            const int j = f % (2 * M);
            const int a = co_warp * N + i / 2;
            const int b = ci_warp * N + j / 4;
            const int own_co = co_tile + a / 2;
            const int own_ci = ci_tile + b / 2;
            if (own_co >= co_tiles || own_ci >= p.channel_tiles) continue;
            const int tile = own_co * p.channel_tiles + own_ci;
            const int warp_of_tile = a % 2 + b % 2 * 2;
            const int fragment = i % 2 * 4 + j % 4;
            const float* v = acc[i][j];
            put(tile, tap, (warp_of_tile * 8 + fragment) * 32 + lane, make_float4(v[0], v[1], v[2], v[3]));
        }
    });
}
#endif
