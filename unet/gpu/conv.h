// conv.h - what all convolutions share.
#pragma once
#include "shared.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- ConvOut: results, 4 channels of a pixel at a time
// Where results are written, and what is added to them. Channels [0, Cout1) are written to part1, and the next Cout2
// channels to part2: two parts are the gradients of two concatenated inputs. In the forward pass the addend is
// conv_forward's `residual`. In the backward pass bias, emb and stats are null.
struct ConvOut {
    Grad part1, part2 = {};
    int Cout1, Cout2 = 0;
    int B;                       // how many images the results have
    const float* bias = nullptr; // (Cout1)
    const float* emb = nullptr;  // (B, emb_stride): the embedding; Cout1 columns are added to all pixels of an image
    int emb_stride = 0;          // floats from a row of emb to the next row
    double* stats = nullptr;     // (B, parts of an image, Cout1, 2): sums of the stored values, and of their squares
    int* parts = nullptr; // on the host: the launching function writes here how many parts of an image `stats` has
    ConvSkip skip = {};   // weight not null: the kernel also computes this skip connection, and adds it to the results
};

// The arguments of conv_halo, conv_gather, conv_tiles and conv_small. If BACKWARD, the input x1 is dout: then Cin1 is
// the layer's Cout, Cout is its number of input channels, and the output has the size of the layer's input.
struct ConvCall {
    ConvShape s;
    int B = 0, H = 0, W = 0;     // images, rows and columns of the output
    int Cin1 = 0, Cin2 = 0;      // channels of the inputs x1 and x2 (only 1x1 has x2)
    int Cout = 0;                // channels of the output
    const act* x1 = nullptr;     // (s.B, s.H, s.W, Cin1); if BACKWARD, dout: (s.B, s.out_H(), s.out_W(), Cin1)
    const act* x2 = nullptr;     // (s.B, s.H, s.W, Cin2)
    const act* weight = nullptr; // the layer's weights: (s.Cout, taps, s.C1 + s.C2)
    ConvOut out = {};
    // conv_halo and conv_gather set these before they launch their kernels:
    int tiles_h = 1, tiles_w = 0; // tiles of an image, down and across; in conv_gather an image has tiles_w tiles
    int channel_blocks = 0;       // thread blocks among which the output channels are divided
    int slices = 0;               // conv_halo: slices of the Cin1 channels
    int taps = 0;                 // conv_gather: taps of the filter
    int source_pixels = 0;        // conv_gather: pixels of an image of the input
    // (Cout), only in FP8: the sums of channel c are multiplied by factors[c]. This undoes the factors by which inputs
    // and weights were multiplied before they were rounded.
    const float* factors = nullptr;
};

// What one thread needs to know in order to store channels c .. c + 3 of image n.
template <class T> struct OutputLane {
    int pitch; // channels of a pixel in the tensor that is written (part1 or part2)
    int count; // how many channels are stored: 4, or fewer at the end of the tensor; 0: nothing is stored
    // Where channel c of the tensor's first pixel (in image 0) is written. Pixel p lies p * pitch elements further on.
    T* out;
    const T *add1, *add2; // the same places in the addends; null: no addend
    float shift[4];       // bias + embedding of image n, which is added to all of its pixels

    INLINE OutputLane(const ConvOut& o, int c, int n) {
        const bool second = c >= o.Cout1;
        const Grad& part = second ? o.part2 : o.part1;
        if (second) c -= o.Cout1;
        pitch = second ? o.Cout2 : o.Cout1;
        count = part.dx && n < o.B ? max(0, min(4, pitch - c)) : 0;
        out = (T*)part.dx + c;
        add1 = part.add1 ? (const T*)part.add1 + c : nullptr;
        add2 = part.add2 ? (const T*)part.add2 + c : nullptr;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            shift[k] = o.bias && k < count ? o.bias[c + k] : 0;
            if (o.emb && k < count) shift[k] += o.emb[(size_t)n * o.emb_stride + c + k];
        }
    }
};

// How the work of a block is divided among its warps, in conv_halo and conv_gather. A block computes one tile: CHANNELS
// output channels for pixels of IMAGES images. A warp computes 64 pixels x WARP_CHANNELS channels. If images are small
// or few, such warps are too few to keep the GPU busy. Then a block has K_GROUPS sets of them. Each set (a K group)
// sums over its own part of the input channels, and the sums of all sets are added at the end.
//
//   warp of a block = pixel_warp + PIXEL_WARPS * (channel_warp + CHANNELS / WARP_CHANNELS * k_group)
template <int IMAGES_, int PIXEL_WARPS_, int CHANNELS_, int WARP_CHANNELS_, int K_GROUPS_> struct ProductTile {
    static constexpr int IMAGES = IMAGES_, PIXEL_WARPS = PIXEL_WARPS_, K_GROUPS = K_GROUPS_;
    static constexpr int CHANNELS = CHANNELS_, WARP_CHANNELS = WARP_CHANNELS_;
    static constexpr int POSITIONS = PIXEL_WARPS * (CHANNELS / WARP_CHANNELS); // warps of a K group
    static constexpr int THREADS = POSITIONS * K_GROUPS * 32;
    // LANES lanes of a warp store one pixel, 4 channels each. So a warp stores STEP pixels at once. A pixel has PITCH
    // floats in shared memory. 4 of them are unused, which avoids bank conflicts.
    static constexpr int LANES = WARP_CHANNELS / 4;
    static constexpr int STEP = 32 / LANES;
    static constexpr int PITCH = WARP_CHANNELS + 4;
    static constexpr int STAGED_BYTES = POSITIONS * K_GROUPS * 64 * PITCH * 4;
    static constexpr int STAT_ROWS = PIXEL_WARPS / IMAGES * K_GROUPS * STEP; // threads that sum one channel of an image
    // What a warp computes: which pixels and output channels of the tile, over which part of the input channels.
    static constexpr int pixel_warp(int warp) { return warp % PIXEL_WARPS; }
    static constexpr int channel_warp(int warp) { return warp / PIXEL_WARPS % (CHANNELS / WARP_CHANNELS); }
    static constexpr int k_group(int warp) { return warp / POSITIONS; }
};

// Stores what a lane has to store in one round of store_product: 4 channels of N pixels. The lane's pixel i becomes
// pixel index_of(i) of the output. If index_of(i) is -1, pixel i is not stored.
//   staged        the sums of the lane's first pixel, in fp32; those of K group g lie g * k_group_floats further on
//   addends       the values of l.add1 at these pixels, which were loaded earlier
//   sum, square   the stored (rounded) values are added to `sum`, and their squares to `square`
// An addend may be the output itself, so the compiler cannot move a load before a store. Therefore all loads of a batch
// of pixels stand before the batch's first store. So the loads are under way at the same time.
template <class Tile, bool BACKWARD, class T, int N>
INLINE void store_pixels(float4& sum, float4& square, const float* staged, int k_group_floats, const OutputLane<T>& l,
                         bool stats, const Four<T> (&addends)[N], auto index_of) {
    constexpr int AT_MOST = N % 8 ? 4 : 8;
    constexpr int BATCH = N < AT_MOST ? N : AT_MOST;     // pixels whose loads are started together
    constexpr int NEXT_PIXEL = Tile::STEP * Tile::PITCH; // floats from a pixel of the lane to the lane's next pixel
    static_assert(N % BATCH == 0, "all batches have the same number of pixels");
    if (l.count == 0) return;

    // Only the network's output, which is fp32, can have a number of channels that is not a multiple of 4. It has
    // neither addends nor statistics.
    if (std::is_same_v<T, float> && l.pitch % 4) {
        for (int i = 0; i < N; i++)
            UNROLL_FOR (int k = 0; k < 4; k++) {
                float v = l.shift[k];
                for (int g = 0; g < Tile::K_GROUPS; g++) v += staged[g * k_group_floats + i * NEXT_PIXEL + k];
                if (k < l.count && index_of(i) >= 0) l.out[(size_t)index_of(i) * l.pitch + k] = (T)v;
            }
        return;
    }

    UNROLL_FOR (int first = 0; first < N; first += BATCH) {
        float4 v[BATCH]; // v[k] belongs to pixel first + k: the sums of all K groups (forward: + bias + embedding)
        UNROLL_FOR (int k = 0; k < BATCH; k++) {
            v[k] = *(const float4*)(staged + (first + k) * NEXT_PIXEL);
            UNROLL_FOR (int g = 1; g < Tile::K_GROUPS; g++) {
                v[k] = v[k] + *(const float4*)(staged + g * k_group_floats + (first + k) * NEXT_PIXEL);
            }
            if (!BACKWARD) v[k] = v[k] + (const float4&)l.shift;
        }
        // Inside the loop, this test would keep the compiler from starting all pixels' store4 one after the other.
        if (l.add1)
            UNROLL_FOR (int k = 0; k < BATCH; k++)
                if (index_of(first + k) >= 0) v[k] = v[k] + to_floats<T>(addends[first + k]);
        if (BACKWARD && l.add2)
            UNROLL_FOR (int k = 0; k < BATCH; k++)
                if (index_of(first + k) >= 0) v[k] = v[k] + load4(l.add2 + (size_t)index_of(first + k) * l.pitch);
        UNROLL_FOR (int k = 0; k < BATCH; k++) // from here on, v is the stored (rounded) value; 0 if none is stored
            v[k] = index_of(first + k) >= 0 ? store4(l.out + (size_t)index_of(first + k) * l.pitch, v[k]) : float4{};
        if (!BACKWARD && stats)
            UNROLL_FOR (int k = 0; k < BATCH; k++) {
                sum = sum + v[k];
                square = square + v[k] * v[k];
            }
    }
}

// For each image and channel, STAT_ROWS threads have written their sums to shared memory, as (IMAGES, STAT_ROWS,
// CHANNELS, 2). This function adds them up in double, and writes the totals to o.stats.
template <class Tile>
INLINE void store_tile_stats(const float* shared, const ConvOut& o, int n0, int c0, int tile, int tiles) {
    constexpr int CHANNELS = Tile::CHANNELS;
    constexpr int ROWS = Tile::STAT_ROWS;
    for (int i = threadIdx.x; i < Tile::IMAGES * CHANNELS * 2; i += Tile::THREADS) {
        const int image = i / (CHANNELS * 2);
        const int n = n0 + image;
        const int c = c0 + i / 2 % CHANNELS;
        if (n >= o.B || c >= o.Cout1) continue;
        double total = 0;
        for (int r = 0; r < ROWS; r++) total += shared[(image * ROWS + r) * CHANNELS * 2 + i % (CHANNELS * 2)];
        o.stats[(((size_t)n * tiles + tile) * o.Cout1 + c) * 2 + i % 2] = total;
    }
}

// The end of conv_halo and conv_gather: stores the sums of each warp. acc[r][m] is a fragment of 8 pixels x 16
// channels. A thread holds channels c and c + 8 of two neighbouring pixels, but neighbouring channels are to be stored
// together. So the sums are written to shared memory and read again. This takes two rounds if shared memory has no room
// for all sums. (q is lane % 4.)
//
//   acc of a thread: 2 pixels x channels c, c + 8    ->    staged: 64 / ROUNDS pixels    ->    a lane stores 4 channels
//   (g = lane / 4: c = g, pixels 2q, 2q + 1)               of PITCH floats each                of every STEP-th pixel
//
//   n0, c0        the tile's first image and first channel
//   tile, tiles   the number of the tile within its image, and how many tiles an image has
//   pixel         pixel(k) returns the index in the output of the k-th of the warp's 64 pixels; -1: outside the image
template <class Tile, class TO, int ROUNDS, bool BACKWARD, int M>
INLINE void store_product(const float (&acc)[8][M][4], unsigned char* shared, const ConvOut& o, int n0, int c0,
                          int tile, int tiles, auto pixel) {
    constexpr int ROUND_PIXELS = 64 / ROUNDS;                                    // pixels of a warp in a round
    constexpr int N = ROUND_PIXELS / Tile::K_GROUPS / Tile::STEP;                // pixels that a lane stores in a round
    constexpr int WARP_FLOATS = ROUND_PIXELS * Tile::PITCH;                      // a warp's part of shared memory
    constexpr int K_GROUP_FLOATS = Tile::POSITIONS * ROUND_PIXELS * Tile::PITCH; // a K group's part of shared memory
    constexpr int IMAGE_WARPS = Tile::PIXEL_WARPS / Tile::IMAGES;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int k_group = Tile::k_group(warp);
    const int image = pixel_warp / IMAGE_WARPS;

    // In each round this lane stores the four channels from `channel` on, of N pixels: `first`, `first` + STEP, `first`
    // + 2 STEP and so on. The pixels of a round are divided among the K groups.
    const int row = lane / Tile::LANES;
    const int first = k_group * (N * Tile::STEP) + row;
    const int lane_channel = lane % Tile::LANES * 4;
    const int channel = Tile::channel_warp(warp) * Tile::WARP_CHANNELS + lane_channel;
    OutputLane<TO> l(o, c0 + channel, n0 + image);
    if (row >= Tile::STEP) l.count = 0; // if LANES does not divide 32, some lanes have no work

    float* const staged = (float*)shared + warp % Tile::POSITIONS * WARP_FLOATS;
    float4 sum = {};
    float4 square = {};
    copies_arrived<0>();
    __syncthreads(); // all threads have read the operands; now the sums are written to the same memory
    UNROLL_FOR (int round = 0; round < ROUNDS; round++) {
        auto index_of = [&](int i) { return pixel(round * ROUND_PIXELS + first + i * Tile::STEP); };
        Four<TO> addends[N];
        if (l.count && l.add1)
            UNROLL_FOR (int i = 0; i < N; i++)
                if (index_of(i) >= 0) addends[i] = *(const Four<TO>*)(l.add1 + (size_t)index_of(i) * l.pitch);

        // d[0] and d[1] are channel g of pixels 2q and 2q + 1, and d[2] and d[3] are channel g + 8 of the same pixels.
        if (round) __syncthreads();
        float* const fragments = staged + k_group * K_GROUP_FLOATS + lane % 4 * 2 * Tile::PITCH + lane / 4;
        UNROLL_FOR (int r = 0; r < 8 / ROUNDS; r++)
            UNROLL_FOR (int m = 0; m < M; m++) {
                const float* d = acc[round * (8 / ROUNDS) + r][m];
                float* const place = fragments + r * 8 * Tile::PITCH + m * 16;
                place[0] = d[0];
                place[Tile::PITCH] = d[1];
                place[8] = d[2];
                place[Tile::PITCH + 8] = d[3];
            }
        if (Tile::K_GROUPS > 1) __syncthreads();
        else __syncwarp();
        store_pixels<Tile, BACKWARD>(sum, square, staged + first * Tile::PITCH + lane_channel, K_GROUP_FLOATS, l,
                                     o.stats, addends, index_of);
    }
    if (!o.stats) return;
    __syncthreads(); // all threads have read what was staged; now the threads' sums are written to the same memory
    if (row < Tile::STEP) {
        const int stat_row = (pixel_warp % IMAGE_WARPS * Tile::K_GROUPS + k_group) * Tile::STEP + row;
        const int pair = (image * Tile::STAT_ROWS + stat_row) * Tile::CHANNELS + channel;
        float4* const pairs = (float4*)shared + pair / 2;
        pairs[0] = make_float4(sum.x, square.x, sum.y, square.y);
        pairs[1] = make_float4(sum.z, square.z, sum.w, square.w);
    }
    __syncthreads();
    store_tile_stats<Tile>((const float*)shared, o, n0, c0, tile, tiles);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- operands of the portable kernels: bf16, or floats as two fp16 parts
// The portable kernels and muon_kernel multiply with mma.sync. The same code serves bf16 and floats. (In the last line
// of the table, high and low are parts of A, and high' and low' are parts of B.)
//
//                               bf16         float
//   a chunk of 8 channels       16 bytes     32 bytes: two pieces of 4 floats, as they were copied. After
//   in shared memory                         take_apart_places: a piece of 8 high parts and a piece of 8 low parts
//   registers of a fragment A   4            8: first the registers of the high parts, then those of the low parts
//   registers of a fragment B   2            4: in the same order
//   take_apart_copies           nothing      turns floats into high and low parts, all scaled by a power of two
//   multiply                    one mma      three: low x high', high x low', high x high'
template <class T> using FragmentA = uint32_t[4 * PARTS<T>]; // 16 rows x 16 k
template <class T> using FragmentB = uint32_t[2 * PARTS<T>]; // 16 k x 8 columns

// Returns where a chunk lies in a swizzled row of shared memory, in bytes from the row's beginning. key: the
// swizzle_key of the row. With floats the second piece of the chunk lies at this place ^ 16.
template <class T> INLINE uint32_t chunk_place(int chunk, int key) { return (chunk * PARTS<T> ^ key) << 4; }

// Returns the place that lies `channels` channels after `place` in the same row. XOR finds it, whatever the key is:
// (chunk ^ key) ^ step = (chunk ^ step) ^ key. Two conditions must hold:
//   1. The row begins at a multiple of its length, and the step is shorter than this length. (If the row is longer than
//      128 bytes, 128 bytes are enough in both cases.)
//   2. In binary, the step (channels / 8 chunks) has ones only where the number of the chunk at `place` has zeros. Then
//      chunk ^ step = chunk + step.
template <class T> INLINE uint32_t channels_on(uint32_t place, int channels) {
    return place ^ channels * (int)sizeof(T);
}

// Loads a fragment A by ldmatrix. place + offset: the address of the row that this lane gives to ldmatrix. A row in
// shared memory holds numbers of one row of A or, if TRANSPOSED, numbers of one k.
template <class T, bool TRANSPOSED> INLINE void load_fragment(FragmentA<T>& a, uint32_t place, int offset = 0) {
    UNROLL_FOR (int part = 0; part < PARTS<T>; part++) {
        const uint32_t from = (place ^ part * 16) + offset;
        uint32_t* const registers = a + 4 * part;
        if (TRANSPOSED) ldmatrix_trans(registers, registers + 2, from);
        else ldmatrix(registers, registers + 2, from);
    }
}
// Loads two fragments B at once. A row in shared memory holds numbers of one column of B or, if TRANSPOSED, of one k.
template <class T, bool TRANSPOSED>
INLINE void load_fragments(FragmentB<T>& b0, FragmentB<T>& b1, uint32_t place, int offset = 0) {
    UNROLL_FOR (int part = 0; part < PARTS<T>; part++) {
        const uint32_t from = (place ^ part * 16) + offset;
        if (TRANSPOSED) ldmatrix_trans(b0 + 2 * part, b1 + 2 * part, from);
        else ldmatrix(b0 + 2 * part, b1 + 2 * part, from);
    }
}

// Splits the floats of operands A and B that this thread has copied to shared memory. (For bf16 it does nothing.)
// each_a(f) calls f(address) for each chunk of A that this thread has copied, and each_b(f) does the same for B. All
// threads of the block must call it, because it contains a barrier. a_scale and b_scale become the factors that undo
// the scaling. If a_is_new is false, A was split earlier, and a_scale stays as it is.
template <class T, int WARPS, class A, class B>
INLINE void take_apart_copies(float& a_scale, A each_a, float& b_scale, B each_b, bool a_is_new = true) {
    if constexpr (PARTS<T> == 2) {
        __shared__ uint32_t tops[2][WARPS]; // the largest magnitude that each warp has found, in A and in B
        if (a_is_new) find_top(tops[0], each_a);
        find_top(tops[1], each_b);
        __syncthreads();
        if (a_is_new) a_scale = take_apart_places(tops[0], each_a);
        b_scale = take_apart_places(tops[1], each_b);
    }
}

// Returns a function for take_apart_copies. It calls f(address) for N addresses, which lie PITCH bytes apart.
template <int N, int PITCH> INLINE auto places(uint32_t first) {
    return [=](auto f) {
        UNROLL_FOR (int i = 0; i < N; i++) f(first + i * PITCH);
    };
}

struct ConvFew {
    const float* x;     // (B, H, W, F): the first layer's input, or the gradient of the last layer's output
    const void* weight; // first layer: (C, 9, F); last layer: (F, 9, C); null: no rows of weights are made
    void* rows;         // (B, H, W, R): the rows that are made of x
    void* weight_rows;  // (C, R): the rows that are made of weight
    int B, H, W;
    int F;              // the number of channels of the first layer's input, or of the last layer's output
    int C;              // the number of channels of the first layer's output, or of the last layer's input
    int R;              // the number of values of a row
    int parts;          // the number of parts that a value is split into (FEW_PARTS of its type); 1: it is not split
    bool is_last_layer; // true: the network's last layer; false: its first
    // The gradients of the 1x1 convolution, from which conv_few_gradient makes those of the layer. product is (C, R)
    // for the first layer, (R, C) for the last layer. bias (R) is the sum of all pixels' rows, for the last layer.
    float *product, *bias;
    float *dweight, *dbias; // the layer's gradients, which conv_few_gradient writes (dbias: only the last layer's)
};

static bool conv_is_first(const ConvShape& s) { return (s.in != act_element && !is_fp8(s.in)) || s.C1 % 32; }
static bool conv_is_last(const ConvShape& s) { return (s.out != act_element && !is_fp8(s.out)) || s.Cout % 32; }
static bool conv_is_few(const ConvShape& s) { return conv_is_first(s) || conv_is_last(s); }

// The arguments of the kernels for a layer's weight gradient. In the code `split` is the number of a range of pixels.
struct ConvWeight : WeightWork {
    float4* partial; // (splits, tiles, taps, 1024): 64 x 64 weights are 1024 float4, in the order of weight_place
    // (splits + B, Cout). Row s + n holds the sum of dout over the pixels that are both in range s and in image n. Each
    // pair (s, n) has a row of its own: in the order of the pixels, s + n grows from each pair to the next.
    float* bias_partial;
    int bias_images;        // B; or 1 if all images are treated as one (on Hopper, if demb is not needed)
    int taps;               // taps of the filter
    int tiles1;             // tiles of 64 channels of x1
    int channel_tiles;      // tiles of 64 channels of x1 and of x2 together
    int tiles;              // tiles of 64 x 64 weights: channel_tiles x co_tiles
    int tiles_h, tiles_w;   // pixel tiles of an image, down and across
    int pixel_tiles;        // pixel tiles of all images
    int splits;             // ranges of pixel tiles
    int warpgroups;         // warpgroups of a block of conv_weight_tma or conv_weight_fp8
    int block_co, block_ci; // how many tiles of output channels and of input channels a block computes
    int co_tiles;           // tiles of 64 channels of Cout
    int input_groups;       // on Hopper: the channel_tiles form this many groups, of at most block_ci tiles each
};

// Layers are collected until their weight gradients together take this many cycles (25 us), for portable kernels six
// times as many. Then conv_weight_batch computes them together.
constexpr double WEIGHT_LAUNCH_CYCLES = 44000;
// A launch for weight gradients on Hopper may write at most this many partials of 16 KB (64 x 64 weights): nine by one
// block on each of an H200's multiprocessors. The limit is four times as high in FP8 and for the portable kernels.
constexpr int MAX_WEIGHT_PARTIALS = 1200;
// In FP8 the tensor cores keep only 14 bits of a sum, and what they cut off grows with the sum. So at most this many
// products (of 32 pixels each) are added to one sum. conv_weight_sum adds up these partials in fp32.
constexpr int MAX_FP8_PRODUCTS = 512;

constexpr int WEIGHT_BATCH = 8;          // how many layers' weight gradients one launch computes at most
template <class Work> struct WorkBlock { // a thread block's work, and the block's number among the blocks of this work
    const Work& work;
    int block;
};
// What one launch computes: the weight gradients of n layers. The blocks from first_block[i] on compute work[i], up to
// the next work's first block.
template <class Work, int WORKS = WEIGHT_BATCH> struct WeightBatch {
    Work work[WORKS];
    int first_block[WORKS], n;
    INLINE WorkBlock<Work> work_of_this_block() const {
        int i = 0;
        while (WORKS > 1 && i + 1 < n && (int)blockIdx.x >= first_block[i + 1]) i++;
        return {work[i], (int)blockIdx.x - first_block[i]};
    }
};

// Returns the first pixel tile of range `split`.
INLINE int first_pixel_tile(const ConvWeight& p, int split) { return (int)((int64_t)p.pixel_tiles * split / p.splits); }

// Where a thread's four values of a fragment go in dweight. v.x and v.y are the gradients of weights (co, ci) and (co,
// ci + 1). v.z and v.w are those of (co2, ci) and (co2, ci + 1), where co2 is co + 8 (in FP8 co + 1). `row` is the
// address for v.x, and `row2` that for v.z. A pointer is null if its weights lie beyond the last channel.
struct WeightPlace {
    float2 *row, *row2;
    INLINE void set(float4 v) const {
        if (row) *row = make_float2(v.x, v.y);
        if (row2) *row2 = make_float2(v.z, v.w);
    }
};
// Returns the WeightPlace of the i-th float4 of a tile of 64 x 64 weights. 4 warps have 2 x 4 fragments each: i = (warp
// * 8 + fragment) * 32 + lane < 1024.
INLINE WeightPlace weight_place(const ConvWeight& p, int tile, int tap, int i) {
    const int lane = i % 32;
    const int fragment = i / 32 % 8;
    const int warp = i / 256;
    const int co_tile = tile / p.channel_tiles;
    const int t = tile % p.channel_tiles;
    const bool second = t >= p.tiles1; // a tile of the second input's channels
    const int ci_tile = second ? t - p.tiles1 : t;
    // In FP8 a thread's two rows are neighbours (WeightTileFp8::row_channel).
    const bool pairs = is_fp8(p.shape.in);
    const int co = warp % 2 * 32 + fragment / 4 * 16 + lane / 4 * (pairs ? 2 : 1) + co_tile * 64;
    const int co2 = co + (pairs ? 1 : 8);
    const int ci = warp / 2 * 32 + fragment % 4 * 8 + lane % 4 * 2 + ci_tile * 64;
    const int Cin = p.shape.C1 + p.shape.C2;
    const bool inside = ci < (second ? p.shape.C2 : p.shape.C1);
    float* const row = p.dweight + ((size_t)co * p.taps + tap) * Cin + (second ? p.shape.C1 : 0) + ci;
    float* const row2 = row + (size_t)(co2 - co) * p.taps * Cin;
    return WeightPlace{inside && co < p.shape.Cout ? (float2*)row : nullptr,
                       inside && co2 < p.shape.Cout ? (float2*)row2 : nullptr};
}

// The end of a portable kernel for weight gradients. It stores a thread's fragments in dweight or, if there are several
// ranges of pixels, in the partials. each(put) calls put(tile, tap, i, v) for each of the fragments; weight_place
// explains i. There are two versions of put, so that the choice is made only once, outside the loop over the fragments.
template <class Each> INLINE void put_weights(const ConvWeight& p, int split, Each each) {
    if (p.splits == 1) each([&](int tile, int tap, int i, float4 v) { weight_place(p, tile, tap, i).set(v); });
    else
        each([&](int tile, int tap, int i, float4 v) {
            const size_t tile_and_tap = ((size_t)split * p.tiles + tile) * p.taps + tap;
            store_whole(p.partial + tile_and_tap * 1024 + i, v);
        });
}

// conv_weight_sum adds up the partials of several layers. For each layer, the first blocks add up the partials of the
// bias. If there are several ranges, further blocks add up those of the weights. Such a block has 8 rows of 32 threads,
// and a thread sums one float4 over ranges. If there are more than 8 ranges, `groups` rows sum the same 32 float4: each
// of them adds up every `groups`-th range. Then the sums of these rows are added up.
HD static inline int weight_sum_groups(int splits) {
    if (splits > 32) return 8;
    if (splits > 16) return 4;
    return splits > 8 ? 2 : 1;
}
HD static inline int bias_sum_blocks(int Cout) { return ceil_div(Cout, 8); }

// Writes dweight. block: this block's number among the blocks that sum a layer's weights.
INLINE void sum_weights(const ConvWeight& p, int block) {
    __shared__ float4 rows[8][32];
    const int x = threadIdx.x;
    const int y = threadIdx.y;
    const int groups = weight_sum_groups(p.splits);
    const int group = y % groups;
    const int n = p.tiles * p.taps * 1024; // the number of float4 in the partials of a range
    const int i = (block * (8 / groups) + y / groups) * 32 + x;
    const WeightPlace to = weight_place(p, i / 1024 / p.taps, i / 1024 % p.taps, i % 1024);
    float4 sum = {};
    await_previous_kernel();
    UNROLL_8_FOR (int s = to.row ? group : p.splits; s < p.splits; s += groups) {
        sum = sum + p.partial[(size_t)s * n + i];
    }
    if (groups > 1) {
        rows[y][x] = sum;
        __syncthreads();
        if (group) return;
        for (int k = 1; k < groups; k++) sum = sum + rows[y + k][x];
    }
    to.set(sum);
}
// Writes dbias and demb, unless their pointers are null. A block computes 8 channels, with 32 threads for each channel.
// Each of these adds up some of the images or, if all images are treated as one, some of the ranges.
INLINE void sum_biases(const ConvWeight& p, int block) {
    __shared__ double totals[32][8];
    const int x = threadIdx.x;
    const int c = block * 8 + x % 8;
    const int row = threadIdx.y * 4 + x / 8;
    const int Cout = p.shape.Cout;
    const int image_tiles = p.pixel_tiles / p.bias_images;
    auto split_of = [&](int tile) { // returns the range that contains this pixel tile
        return (int)(((size_t)tile * p.splits + p.splits - 1) / p.pixel_tiles); // the product may need 64 bits
    };
    await_previous_kernel();
    double total = 0;
    if (p.bias_images == 1 && !p.demb) {
        UNROLL_4_FOR (int s = row; s < p.splits && c < Cout; s += 32) total += p.bias_partial[(size_t)s * Cout + c];
    } else
        for (int n = row; n < p.bias_images && c < Cout; n += 32) {
            const int first = split_of(n * image_tiles);
            const int last = split_of((n + 1) * image_tiles - 1);
            double sum = 0;
            UNROLL_4_FOR (int s = first; s <= last; s++) sum += p.bias_partial[(size_t)(s + n) * Cout + c];
            if (p.demb) p.demb[(size_t)n * p.emb_stride + c] = (float)sum;
            total += sum;
        }
    totals[row][x % 8] = total;
    __syncthreads();
    if (row || c >= Cout) return;
    for (int k = 1; k < 32; k++) total += totals[k][x];
    if (p.dbias) p.dbias[c] = (float)total;
}
static __global__ void __launch_bounds__(256) conv_weight_sum(const __grid_constant__ WeightBatch<ConvWeight> batch) {
    const auto [p, block] = batch.work_of_this_block();
    const int bias_blocks = bias_sum_blocks(p.shape.Cout);
    if (block >= bias_blocks) sum_weights(p, block - bias_blocks);
    else sum_biases(p, block);
}

// The bias gradient's partials: the sums of dout over the pixels of the block's range, for each image by itself. A warp
// sums the 16 M channels from co on. It has loaded dout as fragments anyway. So the sums are a product of fragments,
// too: dout^T times a matrix of ones.
template <class T, int M> struct BiasSum {
    const ConvWeight& p;
    bool sums_bias; // false: another warp, of this or another block, sums these channels, and this warp does nothing
    int split, co;
    int first;                                // the block's first pixel tile
    int per_image = p.tiles_h * p.tiles_w;    // pixel tiles of an image
    int image = first / per_image;            // the image that is being summed
    int left = per_image - first % per_image; // how many pixel tiles of this image still follow
    float acc[M][4] = {};

    // Called before each pixel tile. At the first tile of a new image, it stores the sums of the previous image.
    INLINE void next_tile() {
        if (left == 0) {
            put();
            image++;
            left = per_image;
        }
        left--;
    }
    INLINE void put() { // stores the sums of `image`, and sets them to 0
        if (!sums_bias) return;
        UNROLL_FOR (int i = 0; i < 2 * M; i++) { // all 8 columns of the product are equal, so column 0 is stored
            const int c = co + i * 8 + threadIdx.x % 32 / 4;
            if (threadIdx.x % 4 == 0 && c < p.shape.Cout)
                p.bias_partial[(size_t)(split + image) * p.shape.Cout + c] = acc[i / 2][i % 2 * 2];
        }
        UNROLL_FOR (int i = 0; i < 4 * M; i++) {
            acc[i / 4][i % 4] = 0;
        }
    }
    INLINE void add(const FragmentA<T> (&dout)[M], float scale) { // adds 16 pixels of dout to the sums
        FragmentB<T> ones[1] = {};
        ones[0][0] = ElementOf<T>::TWO_ONES; // for floats: the high parts are 1, and the low parts are 0
        ones[0][1] = ElementOf<T>::TWO_ONES;
        if (sums_bias) multiply<T, M, 1>(acc, 1, 0, dout, ones, scale);
    }
};

// Both operands lie in shared memory as (pixels, channels). The product sums over pixels, so pixels are its k, and
// ldmatrix has to transpose the operands. place: the row that this lane gives to ldmatrix for the first fragment.
template <class T, int M> INLINE void load_dout(FragmentA<T> (&a)[M], uint32_t place) {
    UNROLL_FOR (int i = 0; i < M; i++) {
        load_fragment<T, true>(a[i], channels_on<T>(place, 16 * i));
    }
}
template <class T, int N> INLINE void load_x(FragmentB<T> (&b)[N], uint32_t place) {
    UNROLL_FOR (int j = 0; j < N; j += 2) {
        load_fragments<T, true>(b[j], b[j + 1], channels_on<T>(place, 8 * j));
    }
}

static bool conv_is_halo(const ConvShape& s) { return s.kernel == 3 && s.stride == 1; }

// Returns whether Hopper's kernels can compute this convolution. If so, conv_weight_tma or, in FP8, conv_weight_fp8
// always computes its weight gradient.
static bool conv_is_wgmma(const ConvShape& s) {
    return act_has_wgmma() && s.stride == 1 && !s.upsample && !conv_is_few(s);
}

// Returns how many tiles cover the output if a tile has `rows` x `columns` pixels of each of `images` images.
static int count_tiles(const ConvCall& c, int images, int rows, int columns) {
    const int tiles_of_image = ceil_div(c.H, rows) * ceil_div(c.W, columns);
    return ceil_div(c.B, images) * tiles_of_image;
}

// What a launch for weight gradients costs, in cycles as measured on an H200 while all blocks were at work.
struct WeightCosts {
    int slots;          // how many blocks the GPU runs at once
    int tile;           // cycles that a block takes for one pixel tile
    int filter;         // among how many blocks the taps of a filter are divided
    int beside;         // cycles of a block, in addition to its tiles, if the block writes partials
    int beside_dweight; // cycles of a block, in addition to its tiles, if the block writes dweight itself
    int sums;           // cycles of the second kernel, conv_weight_sum, in addition to PARTIAL_CYCLES for each partial
    int most_partials = MAX_WEIGHT_PARTIALS; // how many partials a plan may have at most
};

// Works of one kind share a launch. NARROW: images of at most 8 pixels across. WIDE: a block computes 2 x 2 tiles.
enum WeightKind { TMA_1X1, TMA_3X3, TMA_3X3_NARROW, FP8_3X3, FP8_3X3_NARROW, HALO_3X3, GATHER, GATHER_WIDE };

typedef std::vector<ConvWeight> WeightPlans;
// Launches a kernel once for all works. work_of(p) returns the arguments that the kernel receives for work p, and
// blocks_of(p) the number of blocks that compute it.
template <class Work, int WORKS>
static void launch_weights(void (*kernel)(WeightBatch<Work, WORKS>), const WeightPlans& works, Stream* stream,
                           dim3 threads, int bytes, auto work_of, auto blocks_of) {
    WeightBatch<Work, WORKS> batch = {};
    int blocks = 0;
    for (const ConvWeight& p : works) {
        batch.work[batch.n] = work_of(p);
        batch.first_block[batch.n] = blocks;
        batch.n++;
        blocks += (int)blocks_of(p);
    }
    if (blocks) launch_on(stream, 1, kernel, blocks, threads, bytes, batch);
}
#endif
