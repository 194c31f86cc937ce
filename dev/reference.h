// reference.h - every operation of the trainer as plain fp32 loops.
//
// The file is three things at once. The CPU build is made of it. It documents what each operation computes. And it is
// the oracle: tests compare it with PyTorch, and the CUDA kernels with it.
// train_unet.cu includes it after the section "The interface", which says what each function overwrites.
//
// How arrays lie in memory: activations are (B, H, W, C), where PyTorch has (B, C, H, W). The loops mostly see a list
// of pixels, (B, HW, C) or (B * HW, C): the channels of a pixel are neighbours. A convolution's weight is
// (Cout, kernel, kernel, Cin); as the nine positions of a 3x3 kernel are called taps, also (Cout, taps, Cin).
// [x1 | x2] is torch.cat([x1, x2], dim=1), which is never made: loops read the two parts where they lie.
// A name that begins with d is a gradient: dout is the gradient of the loss with respect to out.
//
// Arguments come in one order: outputs, inputs, sizes. A backward function gets dout and, of the forward pass, what its
// formula needs; it overwrites dx, dweight and so on. GradOf is a place for dx with up to two addends: where a tensor
// has several readers, the first of them stores its gradient and the next ones add theirs.
//
// Sums that many values go into (group statistics, losses, norms) are accumulated in double. No result depends on the
// number of threads: every sum has one fixed order.
//
// Read the convolution last, since its loops are cut into tiles for speed. Most 3x3 convolutions take another form of
// it, with fewer multiplications, which has a file of its own (winograd.h). Two small loops do all the work of the
// plain form and of attention; the rest feeds them pointers:
//   tile_multiply   acc[TM][TN] += A[m][k] * B[k][n]   the sum runs over channels: forward, input gradients, matmul
//   tile_outer      acc[TM][TN] += A[k][m] * B[k][n]   the sum runs over pixels: weight gradients
// A tile of sums nearly fills the vector registers. AVX-512 has 32 of them, and 8 x 32 floats take 16; AVX2 has 16, and
// 6 x 16 floats take 12. With half as many sums every addition would wait for the one before it, at half the speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "../unet/diffusion/conditions.h"
#include "../unet/diffusion/samplers.h"
#include "../unet/diffusion/verdict.h"
#include "../unet/interface.h"

#ifdef __AVX512F__
constexpr int TM = 8, TN = 32;
#else
constexpr int TM = 6, TN = 16;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// small helpers

// e^x = 2^k e^r, where k is a whole number and |r| <= ln(2) / 2; e^r is a polynomial (Cephes' expf). It is right to
// 2 units in the last place. It calls no function, so loops around it are vectorised. NaN stays NaN.
static inline float fast_exp(float x) {
    constexpr float LOG2_E = 1.44269504088896341f;
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float powers = std::max(-126.0f, x * LOG2_E); // max turns NaN into -126: NaN cannot become a whole number
    const int k = (int)(powers + (powers < 0 ? -0.5f : 0.5f));
    // ln(2) in two parts: the first one has few bits, so that its product with k is exact.
    const float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (k + 127) << 23; // the exponent of a float: these are the bits of 2^k
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

template <> inline float sigmoid<float>(float z) { return 1.0f / (1.0f + fast_exp(-z)); }

// Row i of a matrix whose rows are `width` numbers long (or, with a padding, lie `width` numbers apart).
template <class T> static inline T* row_of(T* matrix, size_t i, size_t width) { return matrix + i * width; }

// The gradient of element i: d, and what other readers of the same tensor have found (see GradOf).
static inline float with_addends(const GradOf<float>& g, size_t i, float d) {
    const float add1 = g.add1 ? g.add1[i] : 0.0f;
    const float add2 = g.add2 ? g.add2[i] : 0.0f;
    return d + add1 + add2;
}

// ---------------------------------------------------------------------------------------------------------------------
// the two inner loops, and products of matrices
//
// Pitch: the distance from a row of a matrix to the next one, in floats. It is larger than the number of columns where
// a matrix is a part of a larger one (a head's q in qkv) or is padded (to whole tiles).

// acc (TM, TN) += A (TM, K) * B (K, TN). A is given as TM pointers to its rows, which may lie anywhere; B's rows lie
// b_pitch floats apart.
static inline void tile_multiply(float (&acc)[TM][TN],             // (TM, TN)
                                 const float* const (&a_rows)[TM], // A (TM, K)
                                 const float* b, size_t b_pitch,   // B (K, TN)
                                 int K) {
    for (int k = 0; k < K; k++) {
        for (int m = 0; m < TM; m++) {
            const float a = a_rows[m][k];
#pragma omp simd
            for (int n = 0; n < TN; n++) {
                acc[m][n] += a * b[n];
            }
        }
        b += b_pitch;
    }
}

// acc (TM, TN) += A^T (TM, rows) * B (rows, TN). The rows of A (rows, TM) lie a_pitch floats apart, and those of
// B b_pitch.
static inline void tile_outer(float (&acc)[TM][TN],           // (TM, TN)
                              const float* a, size_t a_pitch, // A (rows, TM)
                              const float* b, size_t b_pitch, // B (rows, TN)
                              int rows) {
    for (int r = 0; r < rows; r++) {
        for (int m = 0; m < TM; m++) {
#pragma omp simd
            for (int n = 0; n < TN; n++) {
                acc[m][n] += a[m] * b[n];
            }
        }
        a += a_pitch;
        b += b_pitch;
    }
}

// total (TM, TN) += acc. The rows of total lie `pitch` floats apart.
static inline void add_tile(float* total, size_t pitch, const float (&acc)[TM][TN]) {
    for (int m = 0; m < TM; m++) {
        float* row = row_of(total, m, pitch);
#pragma omp simd
        for (int n = 0; n < TN; n++) {
            row[n] += acc[m][n];
        }
    }
}

// C (M, N) = A (M, K) * B (K, N). One thread does it all, since attention runs many heads in parallel.
// B's rows must be padded to a multiple of TN: whole tiles are read.
static inline void matmul(float* C, size_t c_pitch,       // (M, N)
                          const float* A, size_t a_pitch, // (M, K)
                          const float* B, size_t b_pitch, // (K, N)
                          int M, int N, int K) {
    for (int m0 = 0; m0 < M; m0 += TM) {
        const int rows = std::min(TM, M - m0);
        const float* a_rows[TM];
        for (int m = 0; m < TM; m++) {
            a_rows[m] = row_of(A, m0 + std::min(m, rows - 1), a_pitch);
        }
        for (int n0 = 0; n0 < N; n0 += TN) {
            const int columns = std::min(TN, N - n0);
            float acc[TM][TN] = {};
            tile_multiply(acc, a_rows, B + n0, b_pitch, K);
            for (int m = 0; m < rows; m++) {
                float* c = row_of(C, m0 + m, c_pitch) + n0;
                if (columns == TN) memcpy(c, acc[m], sizeof acc[m]); // a constant size: a few instructions
                else std::copy_n(acc[m], columns, c);
            }
        }
    }
}

// out (columns, pitch) = in (rows, columns)^T. The rest of each row, up to pitch, is filled with zeros. A few rows are
// read at a time, so that they stay in the nearest cache until all of their columns are read.
static inline void transpose(float* out, size_t pitch, const float* in, size_t in_pitch, int rows, int columns) {
    constexpr int ROWS = 16;
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
        const int end = std::min(r0 + ROWS, rows);
        for (int c = 0; c < columns; c++)
            for (int r = r0; r < end; r++) out[c * pitch + r] = in[r * in_pitch + c];
    }
    for (int c = 0; c < columns; c++)
        for (size_t r = rows; r < pitch; r++) out[c * pitch + r] = 0;
}

// out (rows, columns) = in (rows, columns) * factor
static inline void copy_rows(float* out, size_t out_pitch,     // (rows, columns)
                             const float* in, size_t in_pitch, // (rows, columns)
                             int rows, int columns, float factor) {
    for (int r = 0; r < rows; r++) {
        const float* in_row = row_of(in, r, in_pitch);
        float* out_row = row_of(out, r, out_pitch);
        for (int c = 0; c < columns; c++) {
            out_row[c] = in_row[c] * factor;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// statistics for group norm

// stats->sums (B, C, 2): for each image and channel of x (B, HW, C) the sum over the pixels, and the sum of squares.
// They are kept by channel and not by group: the groups of [x1 | x2] may have channels of both, and x1's statistics are
// taken before anybody knows what will be concatenated with it.
static inline void channel_stats(Stats* stats, const float* x, int B, int HW, int C) {
    constexpr int CHANNELS = 32; // at a time
    stats->parts = 1;
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < B; b++)
        for (int c0 = 0; c0 < C; c0 += CHANNELS) {
            const int n = std::min(CHANNELS, C - c0);
            const float* image = row_of(x, (size_t)b * HW, C) + c0;
            double sum[CHANNELS] = {}, square[CHANNELS] = {};
            for (int p = 0; p < HW; p++) {
                const float* pixel = row_of(image, p, C);
#pragma omp simd
                for (int c = 0; c < n; c++) {
                    const double v = pixel[c];
                    sum[c] += v;
                    square[c] += v * v;
                }
            }
            double* sums = row_of(stats->sums, (size_t)b * C + c0, 2);
            for (int c = 0; c < n; c++) {
                sums[2 * c] = sum[c];
                sums[2 * c + 1] = square[c];
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// convolution
//
// F.conv2d([x1 | x2], weight, bias, stride, padding=kernel // 2), kernel 1 or 3, stride 1 or 2. With upsample = 1 the
// input is F.interpolate(x, scale_factor=2, mode="nearest"), which is never made. As plain loops it is
//
//   for each image b, output pixel (ho, wo) and output channel co:
//     out[b][ho][wo][co] = bias[co]
//     for each tap (kh, kw) and input channel ci:
//       h = ho * stride + kh - kernel / 2,   w = wo * stride + kw - kernel / 2     (0 is added outside of the image)
//       out[b][ho][wo][co] += x[b][h][w][ci] * weight[co][kh][kw][ci]
//
// and the backward pass runs through the same (output pixel, tap) pairs:
//
//       dx[b][h][w][ci]          += dout[b][ho][wo][co] * weight[co][kh][kw][ci]
//       dweight[co][kh][kw][ci]  += dout[b][ho][wo][co] * x[b][h][w][ci]
//
// So the only geometry is which input pixel a tap of an output pixel reads. Tables hold it (conv_sources, and
// conv_targets for the other direction); given the table, each tap is a product of two matrices.

// The output pixel's tap stands at row h, column w of the (upsampled) input.
struct TapPosition {
    int h, w;
};
// Returns where the input pixel lies that a tap of an output pixel reads. It may lie outside of the image. The tap in
// the middle of the kernel reads the input pixel at (ho * stride, wo * stride).
static inline TapPosition tap_position(const ConvShape& s, int output_pixel, int tap) {
    const int ho = output_pixel / s.out_W();
    const int wo = output_pixel % s.out_W();
    const int kh = tap / s.kernel;
    const int kw = tap % s.kernel;
    const int padding = s.kernel / 2;
    return {ho * s.stride + kh - padding, wo * s.stride + kw - padding};
}

// (taps, Ho * Wo): the input pixel that each tap of each output pixel reads; -1 where that lies outside of the image.
static inline std::vector<int> conv_sources(const ConvShape& s) {
    const int taps = s.kernel * s.kernel;
    const int HWo = s.out_H() * s.out_W();
    const int scale = s.upsample ? 2 : 1;
    const int H = s.H * scale, W = s.W * scale; // what the taps see
    std::vector<int> sources;
    for (int tap = 0; tap < taps; tap++)
        for (int p = 0; p < HWo; p++) {
            const auto [h, w] = tap_position(s, p, tap);
            const bool inside = h >= 0 && w >= 0 && h < H && w < W;
            const int source = h / scale * s.W + w / scale;
            sources.push_back(inside ? source : -1);
        }
    return sources;
}

// (copies, taps, H * W): the output pixel whose tap reads this input pixel, -1 where there is none. For one tap there
// is at most one, but an upsampled input pixel stands for 2 x 2 copies of itself, each of which has its own.
static inline std::vector<int> conv_targets(const ConvShape& s) {
    const int taps = s.kernel * s.kernel;
    const int HW = s.H * s.W;
    const int HWo = s.out_H() * s.out_W();
    const int copies = s.upsample ? 4 : 1;
    const std::vector<int> sources = conv_sources(s);
    std::vector<int> targets((size_t)copies * taps * HW, -1);
    for (int tap = 0; tap < taps; tap++)
        for (int p = 0; p < HWo; p++) {
            const int source = sources[(size_t)tap * HWo + p];
            if (source < 0) continue;
            const auto [h, w] = tap_position(s, p, tap);
            const int copy = s.upsample ? h % 2 * 2 + w % 2 : 0;
            targets[((size_t)copy * taps + tap) * HW + source] = p;
        }
    return targets;
}

// TM pixels of B images: the rows of a tile of results. Behind the last pixel of all, the tile repeats it, so that
// loops need no bounds; `count` says how many of the TM are stored.
struct PixelTile {
    int image[TM], pixel[TM]; // pixel: its number within the image
    int count;
};
// Returns the tile that begins at pixel number `first`, counted over all images.
static inline PixelTile pixel_tile(int first, int B, int pixels_per_image) {
    const int pixels = B * pixels_per_image;
    PixelTile tile;
    tile.count = std::min(TM, pixels - first);
    for (int m = 0; m < TM; m++) {
        const int p = std::min(first + m, pixels - 1);
        tile.image[m] = p / pixels_per_image;
        tile.pixel[m] = p % pixels_per_image;
    }
    return tile;
}

// work(first pixel, first channel) for every tile of a result (pixels, channels). Eight tiles of pixels take turns with
// the same channels, so that these channels' weights are read from memory once and seven times from the cache.
template <class F> static inline void each_tile(int pixels, int channels, F work) {
    constexpr int CHUNK = 8 * TM;
#pragma omp parallel for schedule(dynamic)
    for (int chunk = 0; chunk < pixels; chunk += CHUNK) {
        const int end = std::min(chunk + CHUNK, pixels);
        for (int c = 0; c < channels; c += TN)
            for (int p = chunk; p < end; p += TM) work(p, c);
    }
}

// out[i] = sums[i] + a[i] + b[i] + c[i] for n elements. A null pointer adds nothing; an addend may be out itself.
static inline void store_row(float* out, const float (&sums)[TN], int n, // then what is added
                             const float* a, const float* b, const float* c) {
    float row[TN];
    const float* so_far = sums; // then row. A copy of sums into row at the beginning would cost time of its own.
    for (const float* addend : {a, b, c}) {
        if (!addend) continue;
        if (n == TN) {
#pragma omp simd
            for (int i = 0; i < TN; i++) row[i] = so_far[i] + addend[i];
        } else {
            for (int i = 0; i < n; i++) row[i] = so_far[i] + addend[i];
        }
        so_far = row;
    }
    if (n == TN) memcpy(out, so_far, sizeof row);
    else std::copy_n(so_far, n, out);
}

// weight (Cout, taps, Cin) in the order in which the forward pass reads it: (taps, Cin, Cout padded to TN).
static inline std::vector<float> conv_weight_by_input(const float* weight, int Cout, int taps, int Cin) {
    const int pitch = round_up(Cout, TN);
    std::vector<float> by_input((size_t)taps * Cin * pitch);
#pragma omp parallel for collapse(2) schedule(static)
    for (int tap = 0; tap < taps; tap++)
        for (int ci = 0; ci < Cin; ci++) {
            float* row = row_of(by_input.data(), (size_t)tap * Cin + ci, pitch);
            for (int co = 0; co < Cout; co++) {
                row[co] = weight[((size_t)co * taps + tap) * Cin + ci];
            }
        }
    return by_input;
}

// weight (Cout, taps, Cin) in the order in which the input gradient reads it: (taps, Cout, Cin padded to TN).
static inline std::vector<float> conv_weight_by_output(const float* weight, int Cout, int taps, int Cin) {
    const int pitch = round_up(Cin, TN);
    std::vector<float> by_output((size_t)taps * Cout * pitch);
#pragma omp parallel for collapse(2) schedule(static)
    for (int tap = 0; tap < taps; tap++)
        for (int co = 0; co < Cout; co++) {
            const float* row = row_of(weight, (size_t)co * taps + tap, Cin);
            std::copy_n(row, Cin, row_of(by_output.data(), (size_t)tap * Cout + co, pitch));
        }
    return by_output;
}

#include "winograd.h"

// The plain form of a convolution of [x1 | x2] (B, H, W, C1 + C2): calls store(pixel, co, sums) for each output pixel
// (its number in all images) and each TN output channels co ... co + TN - 1.
// A tile of results has TM output pixels and TN output channels. For each tap it is a product of two matrices:
//
//                                    TN output channels co ...
//                                  +------------------------+
//       Cin                    Cin | this tap's weights     |
//     +---------------------+      +------------------------+
//     | the input pixel     |      +------------------------+
//  TM | that each of the TM |   =  | acc: TM output pixels  |     added up over the taps
//     | pixels' tap reads   |      | x TN output channels   |
//     +---------------------+      +------------------------+
//
// The rows on the left lie where they lie in x1 and x2: only pointers to them are put together, once a tap.
template <class F>
static inline void convolve(const float* x1, const float* x2, // (B, H, W, C1), and (B, H, W, C2) or null
                            const float* weight,              // (Cout, taps, Cin)
                            const ConvShape& s, F store) {
    const int HW = s.H * s.W;
    const int HWo = s.out_H() * s.out_W();
    const int taps = s.kernel * s.kernel;
    const int Cin = s.C1 + s.C2;
    const int pitch = round_up(s.Cout, TN);
    const std::vector<float> by_input = conv_weight_by_input(weight, s.Cout, taps, Cin);
    const std::vector<float> zeros(std::max(s.C1, s.C2)); // a pixel of the padding
    const std::vector<int> sources = conv_sources(s);
    each_tile(s.B * HWo, s.Cout, [&](int first, int co) {
        const PixelTile tile = pixel_tile(first, s.B, HWo);
        float acc[TM][TN] = {};
        for (int tap = 0; tap < taps; tap++) {
            // The rows on the left: which input pixel each of the TM output pixels reads with this tap.
            const float *rows1[TM], *rows2[TM];
            for (int m = 0; m < TM; m++) {
                const int source = sources[tap * HWo + tile.pixel[m]];
                const size_t pixel = (size_t)tile.image[m] * HW + source;
                rows1[m] = source < 0 ? zeros.data() : row_of(x1, pixel, s.C1);
                rows2[m] = source < 0 || !x2 ? zeros.data() : row_of(x2, pixel, s.C2);
            }
            // This tap's weights, first those of x1's channels and then those of x2's.
            const float* w1 = row_of(by_input.data(), (size_t)tap * Cin, pitch) + co;
            const float* w2 = row_of(w1, s.C1, pitch);
            tile_multiply(acc, rows1, w1, pitch, s.C1);
            if (s.C2) tile_multiply(acc, rows2, w2, pitch, s.C2);
        }
        for (int m = 0; m < tile.count; m++) store(first + m, co, acc[m]);
    });
}

// out (B, Ho, Wo, Cout) = conv([x1 | x2]) + bias [+ emb (B, emb_stride), one row for an image] [+ residual, like out]
static inline void conv_forward_fp8(float* out, Stats* stats, const float* x1, const float* weight,
                                    const float* factors, const float* bias, const float* emb, int emb_stride,
                                    const float* residual, ConvShape s);
// As sums, with padding = kernel / 2, where pixels of x outside of the image count as 0:
//   out[b][ho][wo][co] = bias[co] + the sum over kh, kw, ci of x[b][h][w][ci] * weight[co][kh][kw][ci],
//   where h = ho * stride + kh - padding and w = wo * stride + kw - padding
static inline void conv_forward(float* out,                       // (B, Ho, Wo, Cout)
                                Stats* stats,                     // of out, or null
                                const float* x1, const float* x2, // (B, H, W, C1), and (B, H, W, C2) or null
                                const float* weight,              // (Cout, taps, Cin)
                                const float* bias,                // (Cout)
                                const float* emb, int emb_stride, // (B, emb_stride), or null
                                const float* residual,            // as out, or null
                                ConvShape s,                      //
                                const ConvSkip&,                  // which only a GPU fuses
                                const float* factors) {           // (Cout), of FP8
    if (s.in == Element::FP8)
        return conv_forward_fp8(out, stats, x1, weight, factors, bias, emb, emb_stride, residual, s);
    const int HWo = s.out_H() * s.out_W();
    // A pixel's results are stored with what is added to them: bias, its image's embedding, the residual.
    auto store = [&](size_t pixel, int co, const float(&sums)[TN]) {
        const int channels = std::min(TN, s.Cout - co);
        const size_t i = pixel * s.Cout + co;
        const float* image_emb = emb ? row_of(emb, pixel / HWo, emb_stride) + co : nullptr;
        const float* added = residual ? residual + i : nullptr;
        store_row(out + i, sums, channels, bias + co, image_emb, added);
    };
    if (winograd::fits(s)) winograd::convolve(x1, x2, weight, s, store);
    else convolve(x1, x2, weight, s, store);
    if (stats) channel_stats(stats, out, s.B, HWo, s.Cout);
}

// The same of one input in FP8, whose numbers are bytes: what they stand for is multiplied in fp32.
static inline void conv_forward_fp8(float* out, Stats* stats, const float* x1, const float* weight,
                                    const float* factors, const float* bias, const float* emb, int emb_stride,
                                    const float* residual, ConvShape s) {
    const uint8_t* x_bytes = (const uint8_t*)x1;
    const uint8_t* weight_bytes = (const uint8_t*)weight;
    std::vector<float> x((size_t)s.B * s.H * s.W * s.C1);
    for (size_t i = 0; i < x.size(); i++) x[i] = fp8_value(x_bytes[i]);
    const size_t inputs = (size_t)s.kernel * s.kernel * s.C1;
    std::vector<float> w(s.Cout * inputs);
    for (size_t i = 0; i < w.size(); i++) w[i] = fp8_value(weight_bytes[i]) * factors[i / inputs];
    s.in = Element::FP32;
    conv_forward(out, stats, x.data(), nullptr, w.data(), bias, emb, emb_stride, residual, s, {}, nullptr);
}

// The order in which tiles take an image's pixels. With stride 2 a tap reads pixels of one kind only, for instance
// those of even rows and odd columns. So pixels of a kind come together: then a tap reads all of a tile's pixels or
// none.
static inline std::vector<int> pixels_by_parity(const ConvShape& s) {
    std::vector<int> pixels(s.H * s.W);
    std::iota(pixels.begin(), pixels.end(), 0); // 0, 1, 2, ...
    auto parity = [&](int p) {
        const int h = p / s.W;
        const int w = p % s.W;
        return h % s.stride * s.stride + w % s.stride;
    };
    auto before = [&](int p, int q) { return parity(p) < parity(q); };
    if (!s.upsample) std::stable_sort(pixels.begin(), pixels.end(), before);
    return pixels;
}

// The plain form of the input gradient from dout (B, Ho, Wo, Cout): calls store(pixel, ci, sums) for each input pixel
// (its number in all images) and each TN input channels ci ... ci + TN - 1. A tile has TM input pixels and TN input
// channels. Each input pixel collects from the output pixels whose taps read it, so no two threads add to the same
// number.
template <class F>
static inline void convolve_back(const float* dout, const float* weight, const ConvShape& s, F store) {
    const int taps = s.kernel * s.kernel;
    const int Cin = s.C1 + s.C2;
    const int HW = s.H * s.W;
    const int HWo = s.out_H() * s.out_W();
    const int copies = s.upsample ? 4 : 1;
    const int pitch = round_up(Cin, TN);
    const std::vector<float> by_output = conv_weight_by_output(weight, s.Cout, taps, Cin);
    const std::vector<float> zeros(s.Cout); // the gradient of an output pixel that is not there
    const std::vector<int> targets = conv_targets(s);
    const std::vector<int> pixels = pixels_by_parity(s);
    each_tile(s.B * HW, Cin, [&](int first, int ci) {
        PixelTile tile = pixel_tile(first, s.B, HW);
        for (int& pixel : tile.pixel) pixel = pixels[pixel];
        float acc[TM][TN] = {};
        for (int copy_tap = 0; copy_tap < copies * taps; copy_tap++) {
            // Which output pixel reads each of the TM input pixels with this tap; often none does.
            const float* rows[TM];
            bool any = false;
            for (int m = 0; m < TM; m++) {
                const int target = targets[(size_t)copy_tap * HW + tile.pixel[m]];
                const size_t pixel = (size_t)tile.image[m] * HWo + target;
                rows[m] = target < 0 ? zeros.data() : row_of(dout, pixel, s.Cout);
                any |= target >= 0;
            }
            if (!any) continue;
            const int tap = copy_tap % taps;
            const float* w = row_of(by_output.data(), (size_t)tap * s.Cout, pitch) + ci;
            tile_multiply(acc, rows, w, pitch, s.Cout);
        }
        for (int m = 0; m < tile.count; m++) store((size_t)tile.image[m] * HW + tile.pixel[m], ci, acc[m]);
    });
}

// dx1 (B, H, W, C1), dx2 (B, H, W, C2) from dout (B, Ho, Wo, Cout)
static inline void conv_backward_input_fp8(GradOf<float> dx, const float* dout, const float* turned,
                                           const float* factors, ConvShape s);
// As sums: dx[b][h][w][ci] is the sum of dout[b][ho][wo][co] * weight[co][kh][kw][ci] over all output pixels and taps
// that read the input pixel (h, w), and over co.
static inline void conv_backward_input(GradOf<float> dx1, GradOf<float> dx2, // as x1 and x2
                                       const float* dout, const float* weight, ConvShape s, const float* factors) {
    if (s.out == Element::FP8_GRADIENT) return conv_backward_input_fp8(dx1, dout, weight, factors, s);
    // A pixel's gradient is stored, with what other readers of the same tensor have found.
    auto store = [&](size_t pixel, int ci, const float(&sums)[TN]) {
        // The TN channels all belong to x1 or all to x2: where there is an x2, C1 is a multiple of TN.
        const bool in_x1 = ci < s.C1;
        const GradOf<float>& g = in_x1 ? dx1 : dx2;
        if (!g.dx) return;
        const int C = in_x1 ? s.C1 : s.C2;
        const int c = in_x1 ? ci : ci - s.C1; // the first channel, within x1 or x2
        const size_t i = pixel * C + c;
        const float* add1 = g.add1 ? g.add1 + i : nullptr;
        const float* add2 = g.add2 ? g.add2 + i : nullptr;
        store_row(g.dx + i, sums, std::min(TN, C - c), add1, add2, nullptr);
    };
    if (winograd::fits(s)) winograd::convolve_back(dout, weight, s, store);
    else convolve_back(dout, weight, s, store);
}

// The same of one 3x3 convolution in FP8, whose numbers are bytes: what they stand for is multiplied in fp32. The
// weights are turned (see round_weights): (Cin, 8 - tap, Cout).
static inline void conv_backward_input_fp8(GradOf<float> dx, const float* dout, const float* turned,
                                           const float* factors, ConvShape s) {
    const uint8_t* const dout_bytes = (const uint8_t*)dout;
    const uint8_t* const turned_bytes = (const uint8_t*)turned;
    std::vector<float> d((size_t)s.B * s.H * s.W * s.Cout);
    for (size_t i = 0; i < d.size(); i++) d[i] = fp8_value(dout_bytes[i], E5M2);
    std::vector<float> w((size_t)s.Cout * 9 * s.C1);
    for (int ci = 0; ci < s.C1; ci++)
        for (int tap = 0; tap < 9; tap++)
            for (int co = 0; co < s.Cout; co++) {
                const uint8_t byte = turned_bytes[((size_t)ci * 9 + 8 - tap) * s.Cout + co];
                w[((size_t)co * 9 + tap) * s.C1 + ci] = fp8_value(byte) * factors[ci];
            }
    s.out = Element::FP32;
    conv_backward_input(dx, {}, d.data(), w.data(), s, nullptr);
}

// weights (Cout, 9, Cin), turned (Cin, 9, Cout) of each convolution, from copy (Cout, 9, Cin). With turned_alone there
// is no need of the former.
static inline void round_weights(uint8_t* weights, uint8_t* turned, const float* copy,
                                 const std::vector<WeightRounding>& works) {
    for (const WeightRounding& w : works) {
#pragma omp parallel for schedule(static)
        for (int co = 0; co < w.Cout; co++)
            for (int tap = 0; tap < 9; tap++)
                for (int ci = 0; ci < w.Cin; ci++) {
                    const size_t i = w.offset + ((size_t)co * 9 + tap) * w.Cin + ci;
                    const uint8_t rounded = fp8_bits(copy[i] * FP8_WEIGHT_FACTOR);
                    if (!w.turned_alone) weights[i] = rounded;
                    turned[w.offset + ((size_t)ci * 9 + 8 - tap) * w.Cout + co] = rounded;
                }
    }
}

// Multiplies the gradient of a convolution's output by a factor, and rounds it to FP8 (e5m2). With --precision fp8 the
// input and weight gradients are computed from the result.
static inline void round_gradient(Fp8Copy fp8, const float* dout, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) fp8.bytes[i] = fp8_bits(dout[i] * *fp8.factor, E5M2);
}

// The gradients of what is added to every pixel.
// dbias (C) = the sum of dout (B, HW, C) over images and pixels. demb (B, emb_stride), if it is not null, = the sum
// over the pixels of each image, since the image's row of emb was added to all of them.
static inline void bias_backward(float* dbias,                // (C)
                                 float* demb, int emb_stride, // (B, emb_stride), or null
                                 const float* dout, int B, int HW, int C) {
    constexpr int CHANNELS = 32; // at a time
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += CHANNELS) {
        const int n = std::min(CHANNELS, C - c0);
        double total[CHANNELS] = {};
        for (int b = 0; b < B; b++) {
            const float* image = row_of(dout, (size_t)b * HW, C) + c0;
            double sum[CHANNELS] = {};
            for (int p = 0; p < HW; p++) {
                const float* pixel = row_of(image, p, C);
#pragma omp simd
                for (int c = 0; c < n; c++) sum[c] += pixel[c];
            }
            for (int c = 0; c < n; c++) total[c] += sum[c];
            if (!demb) continue;
            float* demb_row = row_of(demb, b, emb_stride) + c0;
            for (int c = 0; c < n; c++) {
                demb_row[c] = (float)sum[c];
            }
        }
        for (int c = 0; c < n; c++) {
            dbias[c0 + c] = (float)total[c];
        }
    }
}

// read (taps, Cin): what the taps of an output pixel read of [x1 | x2], and zeros outside of the image.
// pixel: its number in all images. sources: see conv_sources.
static inline void copy_what_taps_read(float* read, int pixel, const float* x1, const float* x2,
                                       const std::vector<int>& sources, const ConvShape& s) {
    const int taps = s.kernel * s.kernel;
    const int HWo = s.out_H() * s.out_W();
    const size_t image = (size_t)(pixel / HWo) * s.H * s.W; // its first input pixel
    for (int tap = 0; tap < taps; tap++) {
        const int source = sources[tap * HWo + pixel % HWo];
        if (source < 0) {
            std::fill_n(read, s.C1 + s.C2, 0.0f);
        } else {
            std::copy_n(row_of(x1, image + source, s.C1), s.C1, read);
            if (s.C2) std::copy_n(row_of(x2, image + source, s.C2), s.C2, read + s.C1);
        }
        read += s.C1 + s.C2;
    }
}

// The plain form of the weight gradient: dweight (Cout, taps, Cin) from dout (B, Ho, Wo, Cout) and the input [x1 | x2]
// (B, H, W, Cin). It is a product of two matrices, whose sum runs over the output pixels of all images:
//
//                                    taps * Cin
//                                  +--------------------+
//                           pixels | what a pixel's     |
//              pixels              | taps read          |
//           +----------+           +--------------------+
//           |          |           +--------------------+
//      Cout | dout^T   |   =  Cout | dweight            |
//           +----------+           +--------------------+
//
// The matrix on the top has up to nine copies of each input pixel. So it is made for a chunk of pixels at a time, which
// stays in the nearest caches. The work is cut into pieces, each of one block of output channels and one part of the
// chunks: part p has the chunks p, p + parts and so on. The parts are added up in their order, so the result has the
// same bits with any number of threads. The fewer pixels there are, the fewer parts: each has sums of its own.
// An fp32 sum of fewer terms loses fewer bits. So registers add up at most 32 pixels, and in images of 16 to 32 pixels
// no more than one image has. Such sums are added up to a part's.
static inline void backward_weight(float* dweight, const float* dout, const float* x1, const float* x2,
                                   const ConvShape& s) {
    constexpr int CHUNK = 8 * TM; // output pixels
    constexpr int BLOCK = 8 * TM; // output channels
    const int HWo = s.out_H() * s.out_W();
    const int pixels = s.B * HWo;
    const int inputs = s.kernel * s.kernel * (s.C1 + s.C2);
    const int pitch = round_up(inputs, TN);
    const int outputs = round_up(s.Cout, TM);
    const int parts = std::clamp(pixels / 512, 1, 16);
    const int terms = std::clamp(HWo, 16, 32); // how many pixels are added up in registers
    const std::vector<int> sources = conv_sources(s);
    std::vector<float> sums((size_t)parts * outputs * pitch); // (parts, outputs, pitch)
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int part = 0; part < parts; part++)
        for (int co0 = 0; co0 < outputs; co0 += BLOCK) {
            const int end = std::min(co0 + BLOCK, outputs);
            const int channels = std::min(BLOCK, s.Cout - co0); // without padding
            std::vector<float> read((size_t)CHUNK * pitch);     // (CHUNK, pitch): its padding stays zero
            std::vector<float> d(CHUNK * BLOCK);                // (CHUNK, BLOCK): dout of the block's channels
            for (int first = part * CHUNK; first < pixels; first += parts * CHUNK) {
                const int n = std::min(CHUNK, pixels - first);
                for (int i = 0; i < n; i++) {
                    copy_what_taps_read(row_of(read.data(), i, pitch), first + i, x1, x2, sources, s);
                    std::copy_n(row_of(dout, first + i, s.Cout) + co0, channels, row_of(d.data(), i, BLOCK));
                }
                for (int ci = 0; ci < pitch; ci += TN)
                    for (int co = co0; co < end; co += TM) {
                        float* const total = row_of(sums.data(), (size_t)part * outputs + co, pitch) + ci;
                        for (int i = 0; i < n; i += terms) {
                            float acc[TM][TN] = {};
                            const float* const d_rows = row_of(d.data(), i, BLOCK) + (co - co0);
                            const float* const read_rows = row_of(read.data(), i, pitch) + ci;
                            tile_outer(acc, d_rows, BLOCK, read_rows, pitch, std::min(terms, n - i));
                            add_tile(total, pitch, acc);
                        }
                    }
            }
        }
#pragma omp parallel for schedule(static)
    for (int co = 0; co < s.Cout; co++) {
        float* dw = row_of(dweight, co, inputs);
        std::fill_n(dw, inputs, 0.0f);
        for (int part = 0; part < parts; part++) {
            const float* sum = row_of(sums.data(), (size_t)part * outputs + co, pitch);
            for (int i = 0; i < inputs; i++) dw[i] += sum[i];
        }
    }
}

// dweight (Cout, taps, Cin), dbias (Cout), demb from dout (B, Ho, Wo, Cout) and the input [x1 | x2] (B, H, W, Cin)
static inline void conv_backward_weight(float* dweight,                   // (Cout, taps, Cin)
                                        float* dbias,                     // (Cout)
                                        float* demb, int emb_stride,      // (B, emb_stride), or null
                                        const float* dout,                // (B, Ho, Wo, Cout)
                                        const float* x1, const float* x2, // (B, H, W, C1), (B, H, W, C2)
                                        ConvShape s) {
    if (winograd::fits(s)) winograd::backward_weight(dweight, dout, x1, x2, s);
    else backward_weight(dweight, dout, x1, x2, s);
    bias_backward(dbias, demb, emb_stride, dout, s.B, s.out_H() * s.out_W(), s.Cout);
}

// The same of one input in FP8: x and dout are bytes, what they stand for is multiplied in fp32.
static inline void conv_backward_weight_fp8(const WeightWork& w) {
    ConvShape s = w.shape;
    const uint8_t* x_bytes = (const uint8_t*)w.x1;
    const uint8_t* dout_bytes = (const uint8_t*)w.dout;
    std::vector<float> x((size_t)s.B * s.H * s.W * s.C1);
    for (size_t i = 0; i < x.size(); i++) x[i] = fp8_value(x_bytes[i]) / FP8_X_FACTOR;
    std::vector<float> dout((size_t)s.B * s.H * s.W * s.Cout);
    for (size_t i = 0; i < dout.size(); i++) dout[i] = fp8_value(dout_bytes[i], E5M2) / *w.dout_factor;
    s.in = Element::FP32;
    s.out = Element::FP32;
    conv_backward_weight(w.dweight, w.dbias, w.demb, w.emb_stride, dout.data(), x.data(), nullptr, s);
}

// A GPU computes several layers' weight gradients in one launch. Here they don't wait for each other: each fills all
// threads by itself (a load of 1).
static inline double conv_weight_load(const ConvShape&) { return 1; }
// Computes the weight gradients of several layers, one after the other:
//   dweight[co][kh][kw][ci] = the sum over b, ho, wo of dout[b][ho][wo][co] * (the x that conv_forward multiplies)
static inline void conv_backward_weights(const std::vector<WeightWork>& works, Stream* = MAIN_STREAM) {
    for (const WeightWork& w : works) {
        if (w.shape.in == Element::FP8) conv_backward_weight_fp8(w);
        else conv_backward_weight(w.dweight, w.dbias, w.demb, w.emb_stride, w.dout, w.x1, w.x2, w.shape);
    }
}
// Nor does anything else wait for the end of the backward pass.
static inline void finish_gradients() {}

// ---------------------------------------------------------------------------------------------------------------------
// linear: F.linear(x, weight, bias), which is a 1x1 convolution of an image of B pixels

// Returns the shape of that convolution: the rows of x are the pixels of one image, whose size is 1 x B.
static inline ConvShape linear_shape(int B, int Cin, int Cout) {
    const int images = 1;
    const int W = 1;
    const int C2 = 0;
    const int kernel = 1;
    const int stride = 1;
    const int upsample = 0;
    return {images, B, W, Cin, C2, Cout, kernel, stride, upsample};
}

// out (B, Cout) = x (B, Cin) weight^T (Cin, Cout) + bias (Cout)
static inline void linear_forward(float* out, const float* x, const float* weight, const float* bias, // as above
                                  int B, int Cin, int Cout, Stream* = MAIN_STREAM) {
    const ConvShape s = linear_shape(B, Cin, Cout);
    conv_forward(out, nullptr, x, nullptr, weight, bias, nullptr, 0, nullptr, s, {}, nullptr);
}

// dx = dout weight,   dweight = dout^T x,   dbias = the sum of dout over B
static inline void linear_backward(GradOf<float> dx, float* dweight, float* dbias,         // what is written
                                   const float* dout, const float* x, const float* weight, // what is read
                                   int B, int Cin, int Cout) {
    const ConvShape s = linear_shape(B, Cin, Cout);
    if (dx.dx) conv_backward_input(dx, GradOf<float>{}, dout, weight, s);
    conv_backward_weight(dweight, dbias, nullptr, 0, dout, x, nullptr, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// SiLU: out = x * sigmoid(x), F.silu

// out (n) from x (n)
static inline void silu_forward(float* out, const float* x, size_t n, Stream* = MAIN_STREAM) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        out[i] = Silu<float>::f(x[i]);
    }
}

// With s = sigmoid(x), whose derivative is s (1 - s):  dx = dout * (s + x s (1 - s)) = dout * s * (1 + x (1 - s))
static inline void silu_backward(GradOf<float> dx, const float* dout, const float* x, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float s = sigmoid<float>(x[i]);
        const float slope = 1 + x[i] * (1 - s); // of the derivative s * slope
        dx.dx[i] = with_addends(dx, i, dout[i] * s * slope);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// group norm of [x1 | x2], then a nonlinearity f and dropout
//
// With g the group that channel c belongs to, and the means over the pixels and channels of a group:
//   mean_g = mean(x),   rstd_g = 1 / sqrt(mean(x^2) - mean_g^2 + eps)                            (B, groups)
//   xhat   = (x - mean_g) * rstd_g
//   y      = xhat * weight_c + bias_c                                                           F.group_norm
//   z      = y * (1 + scale_bc) + shift_bc, or with no scale_shift z = y                        (B, C)
//   out    = dropout(f(z))                                                                      (B, HW, C)
// For one image and channel z is x * slope + offset: the loops compute these two first. They take NORM_CHANNELS
// channels at a time, whose slopes and offsets stay in registers; every channel count is a multiple of 32.

constexpr int NORM_CHANNELS = 32;

// What the passes of the norm read; for shapes see the interface.
struct NormInputs {
    const float *x1, *x2;
    const float *mean, *rstd;
    const float *weight, *bias;
    const float* scale_shift; // (B, ss_stride), or null: C scales, then C shifts
    int ss_stride;
    Dropout dropout;
    NormShape s;
    int C() const { return s.C1 + s.C2; }
    int channels_per_group() const { return C() / s.groups; }
    // The group of channel c of image b, in (B, groups)
    int group(int b, int c) const { return b * s.groups + c / channels_per_group(); }
    // The C scales of image b, or null
    const float* scales(int b) const { return scale_shift ? row_of(scale_shift, b, ss_stride) : nullptr; }
};

// Channels c0 ... c0 + NORM_CHANNELS - 1 of image b, which lie in x1 or in x2: first is where the first of them is, and
// pitch the distance from a pixel to the next.
struct ChannelBlock {
    const float* first;
    int pitch;
};
// Returns the channels from c0 on. c0 counts the channels of x1 first, and then those of x2.
static inline ChannelBlock channel_block(const NormInputs& in, int b, int c0) {
    const NormShape& s = in.s;
    if (c0 < s.C1) return {row_of(in.x1, (size_t)b * s.HW, s.C1) + c0, s.C1};
    return {row_of(in.x2, (size_t)b * s.HW, s.C2) + c0 - s.C1, s.C2};
}

// z = x * slope + offset, for NORM_CHANNELS channels of an image
struct AffineMap {
    float slope[NORM_CHANNELS], offset[NORM_CHANNELS];
};
// Returns the map of image b's channels from c0 on. Group norm computes y = (x - mean) * rstd * weight + bias, where
// mean and rstd are those of the channel's group. If the norm has a scale and a shift (of the embedding), then
// z = y * (1 + scale) + shift. So z is linear in x.
static inline AffineMap norm_map(const NormInputs& in, int b, int c0) {
    AffineMap map;
    const float* scales = in.scales(b);
    for (int i = 0; i < NORM_CHANNELS; i++) {
        const int c = c0 + i;
        const int g = in.group(b, c);
        const float a = in.rstd[g] * in.weight[c];
        const float scale = scales ? 1 + scales[c] : 1;
        const float y_offset = in.bias[c] - in.mean[g] * a; // y = x * a + y_offset
        map.slope[i] = a * scale;
        map.offset[i] = y_offset * scale + (scales ? scales[in.C() + c] : 0);
    }
    return map;
}

// values *= 0 with probability p, else 1 / (1 - p), for NORM_CHANNELS elements of sample b from element e on. A factor
// is a pure function of its place (word e % 4 of Philox quartet e / 4), so the backward pass draws the same ones again.
static inline void dropout_block(float* values, const Dropout& d, int b, size_t e) {
    const uint32_t threshold = dropout_threshold(d.p);
    const uint32_t purpose = RANDOM_DROPOUT | d.layer << 8;
    const uint32_t sample = (uint32_t)(d.sample0 + b);
    const uint32_t step = (uint32_t)*d.step;
    for (int i = 0; i < NORM_CHANNELS; i += 4) {
        const uint32_t quartet = (uint32_t)((e + i) / 4);
        const Words random = philox(d.seed, quartet, sample, step, purpose);
        for (int k = 0; k < 4; k++) {
            const bool dropped = random.w[k] < threshold;
            values[i + k] *= dropped ? 0.0f : 1.0f / (1.0f - d.p);
        }
    }
}

// mean, rstd (B, groups) from the channels' sums, which whoever wrote x1 and x2 has taken
static inline void norm_statistics(float* mean, float* rstd,                 // (B, groups)
                                   const Stats& stats1, const Stats& stats2, // of x1 and x2
                                   const NormShape& s) {
    const int per_group = (s.C1 + s.C2) / s.groups;
    for (int b = 0; b < s.B; b++)
        for (int g = 0; g < s.groups; g++) {
            double sum = 0;
            double square = 0;
            for (int c = g * per_group; c < (g + 1) * per_group; c++) {
                const double* sums;
                if (c < s.C1) sums = row_of(stats1.sums, (size_t)b * s.C1 + c, 2);
                else sums = row_of(stats2.sums, (size_t)b * s.C2 + c - s.C1, 2);
                sum += sums[0];
                square += sums[1];
            }
            const double n = (double)s.HW * per_group;
            const double m = sum / n;
            const double variance = std::max(square / n - m * m, 0.0);
            const int i = b * s.groups + g;
            mean[i] = (float)m;
            rstd[i] = (float)(1 / std::sqrt(variance + s.eps));
        }
}

// out (B, HW, C), mean and rstd (B, groups)
// The loop over a pixel's channels runs three times, over values that are still in the nearest cache: f and dropout
// each have a loop of their own, so that each is vectorised.
static inline void groupnorm_forward(float* out, float* mean, float* rstd,    // what is written
                                     const float* x1, Stats stats1,           // (B, HW, C1), and its sums
                                     const float* x2, Stats stats2,           // (B, HW, C2), and its sums
                                     const float* weight, const float* bias,  // (C)
                                     const float* scale_shift, int ss_stride, // (B, ss_stride), or null
                                     Dropout dropout, NormShape s,
                                     Fp8Copy fp8) { // if it is given, in place of out
    norm_statistics(mean, rstd, stats1, stats2, s);
    const NormInputs in{x1, x2, mean, rstd, weight, bias, scale_shift, ss_stride, dropout, s};
    const int C = in.C();
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += NORM_CHANNELS) {
            const ChannelBlock block = channel_block(in, b, c0);
            const AffineMap map = norm_map(in, b, c0);
            for (int p = 0; p < s.HW; p++) {
                // z = x * slope + offset; f(z); dropout
                const float* x = row_of(block.first, p, block.pitch);
                float unrounded[NORM_CHANNELS];
                const size_t first = ((size_t)b * s.HW + p) * C + c0;
                float* z = fp8.bytes ? unrounded : out + first;
#pragma omp simd
                for (int i = 0; i < NORM_CHANNELS; i++) {
                    z[i] = x[i] * map.slope[i] + map.offset[i];
                }
                with_nonlinearity<float>(s.nonlinearity, [&](auto nonlinearity) {
#pragma omp simd
                    for (int i = 0; i < NORM_CHANNELS; i++) {
                        z[i] = nonlinearity.f(z[i]);
                    }
                });
                if (dropout.p > 0) dropout_block(z, dropout, b, (size_t)p * C + c0);
                for (int i = 0; fp8.bytes && i < NORM_CHANNELS; i++)
                    fp8.bytes[first + i] = fp8_bits(z[i] * *fp8.factor);
            }
        }
}

// dz = dropout(dout * f'(z)), the gradient with respect to z, for NORM_CHANNELS channels of pixel p. f'(z) is made from
// x again: z itself was never stored.
static inline void norm_dz(float (&dz)[NORM_CHANNELS],        // (NORM_CHANNELS)
                           const float* dout, const float* x, // (B, HW, C), and x of this pixel from channel c0 on
                           const AffineMap& map, const NormInputs& in, int b, int p, int c0) {
    const float* d = row_of(dout, (size_t)b * in.s.HW + p, in.C()) + c0;
    if (in.s.nonlinearity == Nonlinearity::NONE) std::copy_n(d, NORM_CHANNELS, dz);
    with_nonlinearity<float>(in.s.nonlinearity, [&](auto nonlinearity) {
#pragma omp simd
        for (int i = 0; i < NORM_CHANNELS; i++) {
            dz[i] = d[i] * nonlinearity.df(x[i] * map.slope[i] + map.offset[i]);
        }
    });
    if (in.dropout.p > 0) dropout_block(dz, in.dropout, b, (size_t)p * in.C() + c0);
}

// Backward, first pass: sums (B, C, 2) over the pixels of each image, sum(dz) and sum(dz * xhat).
static inline void norm_backward_sums(double* sums, const float* dout, const NormInputs& in) {
    const NormShape& s = in.s;
    const int C = in.C();
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += NORM_CHANNELS) {
            const ChannelBlock block = channel_block(in, b, c0);
            const AffineMap map = norm_map(in, b, c0);
            float dz[NORM_CHANNELS];
            double sum[NORM_CHANNELS] = {}, product[NORM_CHANNELS] = {}; // of dz, and of dz * x
            for (int p = 0; p < s.HW; p++) {
                const float* x = row_of(block.first, p, block.pitch);
                norm_dz(dz, dout, x, map, in, b, p, c0);
#pragma omp simd
                for (int i = 0; i < NORM_CHANNELS; i++) {
                    sum[i] += dz[i];
                    product[i] += (double)dz[i] * x[i];
                }
            }
            // sum(dz xhat) = (sum(dz x) - mean sum(dz)) rstd
            for (int i = 0; i < NORM_CHANNELS; i++) {
                const int c = c0 + i;
                const int g = in.group(b, c);
                double* both = row_of(sums, (size_t)b * C + c, 2);
                both[0] = sum[i];
                both[1] = (product[i] - in.mean[g] * sum[i]) * in.rstd[g];
            }
        }
}

// Second pass, with the sums of the first one. By the chain rule through z = (xhat weight + bias) (1 + scale) + shift:
//   dweight_c = sum over b of (1 + scale) sum(dz xhat),     dbias_c  = sum over b of (1 + scale) sum(dz)
//   dscale_bc = weight sum(dz xhat) + bias sum(dz),         dshift_bc = sum(dz)
// and what the third pass needs, with w = weight (1 + scale) and means over a group:
//   group_means (B, groups, 2) = rstd mean(w dz), rstd mean(w dz xhat)
static inline void norm_backward_params(float* group_means,           // (B, groups, 2)
                                        float* dweight, float* dbias, // (C)
                                        float* dscale_shift,          // (B, ss_stride), or null
                                        const double* sums, const NormInputs& in) {
    const NormShape& s = in.s;
    const int C = in.C();
    const int groups = s.B * s.groups;
    std::vector<double> dw(C), db(C), totals((size_t)groups * 2);
    for (int b = 0; b < s.B; b++) {
        const float* scales = in.scales(b);
        for (int c = 0; c < C; c++) {
            const double* both = row_of(sums, (size_t)b * C + c, 2);
            const double sum_dz = both[0];
            const double sum_dz_xhat = both[1];
            const double scale = scales ? 1.0 + scales[c] : 1.0;
            // w dz and w dz xhat, summed over the group's channels
            double* total = &totals[(size_t)in.group(b, c) * 2];
            total[0] += in.weight[c] * scale * sum_dz;
            total[1] += in.weight[c] * scale * sum_dz_xhat;
            dw[c] += scale * sum_dz_xhat;
            db[c] += scale * sum_dz;
            if (!in.scale_shift) continue;
            float* dscales = row_of(dscale_shift, b, in.ss_stride);
            dscales[c] = (float)(in.weight[c] * sum_dz_xhat + in.bias[c] * sum_dz);
            dscales[C + c] = (float)sum_dz; // the shift's
        }
    }
    const double n = (double)s.HW * in.channels_per_group();
    for (int i = 0; i < groups * 2; i++) {
        group_means[i] = (float)(totals[i] / n * in.rstd[i / 2]);
    }
    for (int c = 0; c < C; c++) {
        dweight[c] = (float)dw[c];
        dbias[c] = (float)db[c];
    }
}

// Third pass: dx = rstd (w dz - mean(w dz) - xhat mean(w dz xhat)), w = weight (1 + scale), means over a group. Since
// xhat = (x - mean_g) rstd, and rstd w is the slope of the forward pass, it is dx = slope dz - x_factor x - constant.
static inline void norm_backward_input(GradOf<float> dx1, GradOf<float> dx2,           // as x1 and x2
                                       const Fp8Copy& dx1_fp8, const Fp8Copy& dx2_fp8, // the same, if it is not null
                                       const float* group_means, const float* dout, const NormInputs& in) {
    const NormShape& s = in.s;
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < in.C(); c0 += NORM_CHANNELS) {
            const bool in_x1 = c0 < s.C1;
            const GradOf<float>& g = in_x1 ? dx1 : dx2;
            const Fp8Copy& fp8 = in_x1 ? dx1_fp8 : dx2_fp8;
            if (!g.dx) continue;
            const ChannelBlock block = channel_block(in, b, c0);
            const AffineMap map = norm_map(in, b, c0);
            float dz[NORM_CHANNELS], x_factor[NORM_CHANNELS], constant[NORM_CHANNELS];
            for (int i = 0; i < NORM_CHANNELS; i++) {
                const int group = in.group(b, c0 + i);
                const float* means = row_of(group_means, group, 2);
                x_factor[i] = means[1] * in.rstd[group];
                constant[i] = means[0] - x_factor[i] * in.mean[group];
            }
            for (int p = 0; p < s.HW; p++) {
                const float* x = row_of(block.first, p, block.pitch);
                norm_dz(dz, dout, x, map, in, b, p, c0);
                const size_t first = x - (in_x1 ? in.x1 : in.x2); // dx is shaped like x
#pragma omp simd
                for (int i = 0; i < NORM_CHANNELS; i++) {
                    dz[i] = map.slope[i] * dz[i] - x_factor[i] * x[i] - constant[i];
                }
                for (int i = 0; i < NORM_CHANNELS; i++) {
                    g.dx[first + i] = with_addends(g, first + i, dz[i]);
                }
                for (int i = 0; fp8.bytes && i < NORM_CHANNELS; i++) {
                    fp8.bytes[first + i] = fp8_bits(g.dx[first + i] * *fp8.factor, E5M2);
                }
            }
        }
}

// dx1 (B, HW, C1), dx2 (B, HW, C2), dweight and dbias (C), dscale_shift (B, ss_stride) from dout (B, HW, C)
// Each pass needs sums that the one before it has finished: over an image's pixels, then over a group's channels.
static inline void groupnorm_backward(GradOf<float> dx1, GradOf<float> dx2,              // what is written
                                      float* dweight, float* dbias, float* dscale_shift, //
                                      const float* dout,                                 // what is read
                                      const float* x1, const float* x2,                  //
                                      const float* mean, const float* rstd,              //
                                      const float* weight, const float* bias,            //
                                      const float* scale_shift, int ss_stride,           //
                                      Dropout dropout, NormShape s, Fp8Copy dx1_fp8, Fp8Copy dx2_fp8) {
    const NormInputs in{x1, x2, mean, rstd, weight, bias, scale_shift, ss_stride, dropout, s};
    std::vector<double> sums((size_t)s.B * in.C() * 2);
    std::vector<float> group_means((size_t)s.B * s.groups * 2);
    norm_backward_sums(sums.data(), dout, in);
    norm_backward_params(group_means.data(), dweight, dbias, dscale_shift, sums.data(), in);
    norm_backward_input(dx1, dx2, dx1_fp8, dx2_fp8, group_means.data(), dout, in);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention, F.scaled_dot_product_attention for each image and head
//
// q, k, v (T, d): T tokens (pixels), d channels of a head. All heads' lie in qkv (B, T, 3C), C = heads * d.
//   S = q k^T / sqrt(d)       (T, T)  row t: how well token t's query fits every key
//   P = softmax(S, dim=-1)    (T, T)
//   out = P v                 (T, d)
// P is not kept between the passes. The backward pass makes it again: a GPU from the SoftmaxRow of each row, which the
// forward pass wrote; the CPU from q and k alone.

// P (T, pitch) of one head. Two roundings would hurt where scores are large, and are avoided: the difference of two
// scores is taken before their factor 1 / sqrt(d) (a score of 10^6 is rounded by 0.06), and a row is divided by the sum
// of the very numbers that it holds. So every row adds up to 1, and equal scores get equal parts.
static inline void attention_probabilities(float* P, size_t pitch,         // (T, pitch)
                                           const float* q, size_t q_pitch, // (T, d)
                                           const float* kT,                // (d, pitch): k^T
                                           int T, int d) {
    const float scale = 1 / std::sqrt((float)d);
    matmul(P, pitch, q, q_pitch, kT, pitch, T, T, d);
    for (int t = 0; t < T; t++) {
        float* row = row_of(P, t, pitch);
        const float top = *std::max_element(row, row + T);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int s = 0; s < T; s++) {
            row[s] = fast_exp((row[s] - top) * scale);
            sum += row[s];
        }
        const float part = 1 / sum;
        for (int s = 0; s < T; s++) row[s] *= part;
    }
}

// out (B, T, C) from qkv (B, T, 3C). A thread takes a head of an image from beginning to end, in memory of its own,
// where rows are padded to whole tiles: T_pad columns instead of T, d_pad instead of d. k is needed as k^T.
static inline void attention_forward(float* out, SoftmaxRow*, const float* qkv, int B, int T, int C, int heads) {
    const int d = C / heads;
    const int T_pad = round_up(T, TN);
    const int d_pad = round_up(d, TN);
    const size_t pitch = 3 * (size_t)C; // from a token to the next in qkv
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
            std::vector<float> kT((size_t)d * T_pad), v_rows((size_t)T * d_pad);
            std::vector<float> P((size_t)T * T_pad);
            const float* q = row_of(qkv, (size_t)b * T, pitch) + h * d;
            const float* k = q + C;
            const float* v = q + 2 * C;
            float* o = row_of(out, (size_t)b * T, C) + h * d;
            transpose(kT.data(), T_pad, k, pitch, T, d);
            copy_rows(v_rows.data(), d_pad, v, pitch, T, d, 1);
            attention_probabilities(P.data(), T_pad, q, pitch, kT.data(), T, d);
            matmul(o, C, P.data(), T_pad, v_rows.data(), d_pad, T, d, T);
        }
}

//   dv = P^T dout                       dP = dout v^T
//   dS = P * (dP - D),  D_t = the sum over a row of dP * P
// (In exact numbers D is also the sum over the d channels of dout * out, which the GPU's kernels use. Here it is made
// of the same rounded dP from which it is subtracted. So if one P of a row is 1, and all others are 0, then dS is 0.)
//   dq = dS k / sqrt(d)                 dk = dS^T q / sqrt(d)
// The right factor of each product is copied into `rows` first, padded and multiplied by its factor.
static inline void attention_backward(float* dqkv,                         // (B, T, 3C)
                                      const float* dout, const float* qkv, // (B, T, C), (B, T, 3C)
                                      const float*, const SoftmaxRow*,     // only the GPU's kernels read these
                                      int B, int T, int C, int heads) {
    const int d = C / heads;
    const int T_pad = round_up(T, TN);
    const int d_pad = round_up(d, TN);
    const size_t pitch = 3 * (size_t)C;
    const float scale = 1 / std::sqrt((float)d);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
            std::vector<float> kT((size_t)d * T_pad), vT((size_t)d * T_pad);
            std::vector<float> P((size_t)T * T_pad), dS((size_t)T * T_pad);
            std::vector<float> transposed((size_t)T * T_pad); // of P, then of dS
            std::vector<float> rows((size_t)T * d_pad); // dout, k or q of this head, as the right factor of a product
            const size_t token0 = (size_t)b * T;
            const float* q = row_of(qkv, token0, pitch) + h * d;
            const float* k = q + C;
            const float* v = q + 2 * C;
            float* dq = row_of(dqkv, token0, pitch) + h * d;
            float* dk = dq + C;
            float* dv = dq + 2 * C;
            const float* d_o = row_of(dout, token0, C) + h * d;

            // P, as in the forward pass
            transpose(kT.data(), T_pad, k, pitch, T, d);
            transpose(vT.data(), T_pad, v, pitch, T, d);
            attention_probabilities(P.data(), T_pad, q, pitch, kT.data(), T, d);

            // dv = P^T dout
            transpose(transposed.data(), T_pad, P.data(), T_pad, T, T);
            copy_rows(rows.data(), d_pad, d_o, C, T, d, 1);
            matmul(dv, pitch, transposed.data(), T_pad, rows.data(), d_pad, T, d, T);

            // dP = dout v^T, and dS = P * (dP - D) in its place
            std::vector<float>& dP = dS;
            matmul(dP.data(), T_pad, d_o, C, vT.data(), T_pad, T, T, d);
            for (int t = 0; t < T; t++) {
                const float* P_row = row_of(P.data(), t, T_pad);
                float* dS_row = row_of(dS.data(), t, T_pad);
                double D = 0; // of this row
                for (int s = 0; s < T; s++) {
                    D += (double)dS_row[s] * P_row[s]; // dS_row still holds dP
                }
                for (int s = 0; s < T; s++) {
                    dS_row[s] = P_row[s] * (dS_row[s] - (float)D);
                }
            }

            // dq = dS k / sqrt(d)
            copy_rows(rows.data(), d_pad, k, pitch, T, d, scale);
            matmul(dq, pitch, dS.data(), T_pad, rows.data(), d_pad, T, d, T);

            // dk = dS^T q / sqrt(d)
            transpose(transposed.data(), T_pad, dS.data(), T_pad, T, T);
            copy_rows(rows.data(), d_pad, q, pitch, T, d, scale);
            matmul(dk, pitch, transposed.data(), T_pad, rows.data(), d_pad, T, d, T);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// resampling without parameters. H, W are those of the forward pass's input, in the backward functions, too.

// out (B, H / 2, W / 2, C) = F.avg_pool2d(x, 2)
static inline void downsample_forward(float* out, Stats* stats, const float* x, int B, int H, int W, int C) {
    const int Ho = H / 2;
    const int Wo = W / 2;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * Ho * Wo; p++) {
        const int b = p / (Ho * Wo);
        const int ho = p / Wo % Ho;
        const int wo = p % Wo;
        const size_t top_left = ((size_t)b * H + 2 * ho) * W + 2 * wo;
        const float* x00 = row_of(x, top_left, C);
        const float* x01 = x00 + C;
        const float* x10 = x00 + (size_t)W * C;
        const float* x11 = x10 + C;
        float* o = row_of(out, p, C);
        for (int c = 0; c < C; c++) {
            o[c] = 0.25f * (x00[c] + x01[c] + x10[c] + x11[c]);
        }
    }
    if (stats) channel_stats(stats, out, B, Ho * Wo, C);
}

// Each of the four pixels gets a quarter of their mean's gradient.
static inline void downsample_backward(GradOf<float> dx, const float* dout, int B, int H, int W, int C) {
    const int Ho = H / 2;
    const int Wo = W / 2;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * H * W; p++) {
        const int b = p / (H * W);
        const int ho = p / W % H / 2;
        const int wo = p % W / 2;
        const bool inside = ho < Ho && wo < Wo; // the forward pass did not read an odd last row or column
        const size_t pooled = ((size_t)b * Ho + ho) * Wo + wo;
        const float* d = row_of(dout, pooled, C);
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)p * C + c;
            dx.dx[i] = with_addends(dx, i, inside ? 0.25f * d[c] : 0.0f);
        }
    }
}

// out (B, 2H, 2W, C) = F.interpolate(x, scale_factor=2, mode="nearest")
static inline void upsample_forward(float* out, Stats* stats, const float* x, int B, int H, int W, int C) {
    const int Ho = 2 * H;
    const int Wo = 2 * W;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * Ho * Wo; p++) {
        const int b = p / (Ho * Wo);
        const int ho = p / Wo % Ho;
        const int wo = p % Wo;
        const size_t source = ((size_t)b * H + ho / 2) * W + wo / 2;
        std::copy_n(row_of(x, source, C), C, row_of(out, p, C));
    }
    if (stats) channel_stats(stats, out, B, Ho * Wo, C);
}

// A pixel's gradient is the sum of its four copies'.
static inline void upsample_backward(GradOf<float> dx, const float* dout, int B, int H, int W, int C) {
    const int Ho = 2 * H;
    const int Wo = 2 * W;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * H * W; p++) {
        const int b = p / (H * W);
        const int h = p / W % H;
        const int w = p % W;
        const size_t top_left = ((size_t)b * Ho + 2 * h) * Wo + 2 * w;
        const float* d00 = row_of(dout, top_left, C);
        const float* d01 = d00 + C;
        const float* d10 = d00 + (size_t)Wo * C;
        const float* d11 = d10 + C;
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)p * C + c;
            dx.dx[i] = with_addends(dx, i, d00[c] + d01[c] + d10[c] + d11[c]);
        }
    }
}

// F.pixel_unshuffle: squares of p x p pixels become channels (place_in_patches says which).
static inline void to_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    for (size_t i = 0; i < n; i++) {
        out[place_in_patches(i, H, W, C, p)] = x[i];
    }
}

// F.pixel_shuffle: back to pixels
static inline void from_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    for (size_t i = 0; i < n; i++) {
        out[i] = x[place_in_patches(i, H, W, C, p)];
    }
}

// out (B, HW, C + K) = [x | cond]: a pixel has the channels of x (B, HW, C) and behind them those of cond (B, HW, K).
static inline void join_channels(float* out, const float* x, const float* cond, int B, int HW, int C, int K) {
    for (size_t pixel = 0; pixel < (size_t)B * HW; pixel++) {
        float* const joined = out + pixel * (C + K);
        std::copy_n(x + pixel * C, C, joined);
        std::copy_n(cond + pixel * K, K, joined + C);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// embeddings: how the network is told t and the class. Both become a row of C numbers for each sample.

// out (B, dim) = [cos(t f_i), sin(t f_i)] with f_i = max_period^(-i / half), half = dim / 2 (guided-diffusion's nn.py)
static inline void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period,
                                              Stream* = MAIN_STREAM) {
    const int half = dim / 2;
    const double log_period = std::log((double)max_period);
    for (int b = 0; b < B; b++) {
        float* cosines = row_of(out, b, dim);
        float* sines = cosines + half;
        for (int i = 0; i < half; i++) {
            const float f = (float)std::exp(-log_period * i / half); // PyTorch keeps it in fp32
            const double angle = (double)t[b] * f;
            cosines[i] = (float)std::cos(angle);
            sines[i] = (float)std::sin(angle);
        }
    }
}

// out (B, C) = x (B, C) + F.embedding(labels (B), table (rows, C))
static inline void label_embedding_forward(float* out, const float* x,            // (B, C)
                                           const float* table, const int* labels, // (rows, C), (B)
                                           int B, int C, Stream* = MAIN_STREAM) {
    for (int b = 0; b < B; b++) {
        const float* label_row = row_of(table, labels[b], C);
        const float* x_row = row_of(x, b, C);
        float* out_row = row_of(out, b, C);
        for (int c = 0; c < C; c++) {
            out_row[c] = x_row[c] + label_row[c];
        }
    }
}

// dx = dout; a row of dtable is the sum of dout over the samples that have its label.
static inline void label_embedding_backward(GradOf<float> dx, float* dtable,      // (B, C), (rows, C)
                                            const float* dout, const int* labels, // (B, C), (B)
                                            int B, int rows, int C) {
    std::fill_n(dtable, (size_t)rows * C, 0.0f);
    for (int b = 0; b < B; b++) {
        float* label_row = row_of(dtable, labels[b], C);
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)b * C + c;
            dx.dx[i] = with_addends(dx, i, dout[i]);
            label_row[c] += dout[i];
        }
    }
}

// out (B, C) = x + values (B, K) weight (C, K)^T: a linear layer without a bias, added to x
static inline void values_embedding_forward(float* out, const float* x, const float* weight, const float* values, int B,
                                            int K, int C, Stream* = MAIN_STREAM) {
    for (int b = 0; b < B; b++) {
        const float* values_row = row_of(values, b, K);
        for (int c = 0; c < C; c++) {
            const float* weight_row = row_of(weight, c, K);
            float sum = 0;
            for (int k = 0; k < K; k++) sum += values_row[k] * weight_row[k];
            const size_t i = (size_t)b * C + c;
            out[i] = x[i] + sum;
        }
    }
}

// dx = dout; dweight (C, K) = dout^T values. The values are given, so they have no gradient.
static inline void values_embedding_backward(GradOf<float> dx, float* dweight, const float* dout, const float* values,
                                             int B, int K, int C) {
    std::fill_n(dweight, (size_t)C * K, 0.0f);
    for (int b = 0; b < B; b++) {
        const float* values_row = row_of(values, b, K);
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)b * C + c;
            dx.dx[i] = with_addends(dx, i, dout[i]);
            float* weight_row = row_of(dweight, c, K);
            for (int k = 0; k < K; k++) weight_row[k] += dout[i] * values_row[k];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// diffusion. train_unet.cu has the formulas of levels, losses and samplers ("Diffusion"); these loops apply them.

// Four random words for sample b: a pure function of the key and of the numbers of quartet and sample ("Random
// numbers").
static inline Words random_words(const RandomKey& key, int quartet, int b) {
    const uint32_t sample = (uint32_t)(key.sample0 + b);
    const uint32_t step = (uint32_t)*key.step;
    return philox(key.seed, (uint32_t)quartet, sample, step, key.purpose);
}

// levels, t, quarters (B): a random noise level for each sample, and of it what the network is told, and its quarter
static inline void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key) {
    for (int b = 0; b < B; b++) {
        levels[b] = draw_level(o, random_words(key, 0, b));
        t[b] = levels[b].t;
        quarters[b] = levels[b].quarter;
    }
}

// teachers, t (B): the levels of the same samples' teachers, from the same random words (--objective ect)
static inline void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key) {
    for (int b = 0; b < B; b++) {
        teachers[b] = draw_teacher(o, random_words(key, 0, b));
        t[b] = teachers[b].t;
    }
}

// out (B, C, H, W): images, each changed as a random Augmentation says; told (B, stride): its numbers
static inline void augment_images(float* out, Augmentation* drawn, float* canvas, float* told, int stride,
                                  const void* images, float p, RandomKey key, int B, int C, int H, int W, int bytes) {
    const int fine_H = fine_size(H);
    const int fine_W = fine_size(W);
#pragma omp parallel for schedule(dynamic)
    for (int b = 0; b < B; b++) {
        Words words[4];
        for (int k = 0; k < 4; k++) words[k] = random_words(key, k, b);
        drawn[b] = draw_augmentation(p, words, H, W);
        std::copy_n(drawn[b].told, AUGMENT_NUMBERS, row_of(told, b, stride));
        const size_t fine = (size_t)fine_H * fine_W;
        const size_t first = (size_t)b * C;
        for (int y = 0; y < fine_H; y++) {
            for (int x = 0; x < fine_W; x++) {
                const CanvasPlace place = canvas_place(drawn[b], y, x, H, W);
                for (size_t plane = first; plane < first + C; plane++) {
                    const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
                    canvas[plane * fine + y * fine_W + x] = canvas_value(place, channel, bytes, W);
                }
            }
        }
        for (size_t plane = first; plane < first + C; plane++)
            for (int y = 0; y < H; y++)
                for (int x = 0; x < W; x++) out[(plane * H + y) * W + x] = halved(canvas + plane * fine, y, x, W);
    }
}

// rms_losses (T), from history (T, HISTORY + 1); a step that was not ok is not remembered
static inline void update_rms_losses(double* rms_losses, float* history,           // (T), (T, HISTORY + 1)
                                     const NoiseLevel* levels, const double* loss, // (B)
                                     const StepState* state, int T, int B) {
    const int samples = state->ok ? B : 0;
    for (int t = 0; t < T; t++) {
        float* row = row_of(history, t, HISTORY + 1);
        rms_losses[t] = remember_losses(row, t, levels, loss, samples);
    }
}

// out (B, per_sample) = scale * z [+ out], with z standard normal: element e of a sample is number e % 4 of the four
// that Philox quartet e / 4 gives.
static inline void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale = 1, bool add = false) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        float* sample = row_of(out, b, per_sample);
        for (int e = 0; e < per_sample; e += 4) {
            float z[4];
            normals(z, random_words(key, e / 4, b));
            for (int k = 0; k < 4 && e + k < per_sample; k++) {
                const float before = add ? sample[e + k] : 0;
                sample[e + k] = scale * z[k] + before;
            }
        }
    }
}

// Whether sample b's image, and so its picture, is mirrored: one random bit decides.
static inline bool picture_is_mirrored(const PictureDraws& draws, int b) {
    return draws.random_flip && (random_words(of_purpose(draws.key, RANDOM_FLIP), 0, b).w[0] & 1);
}
// Whether sample b's picture is left out (--cond_dropout): its random word is below the threshold.
static inline bool picture_is_left_out(const PictureDraws& draws, int b) {
    const RandomKey key = of_purpose(draws.key, RANDOM_COND_DROPOUT);
    return random_words(key, 0, b).w[0] < dropout_threshold(draws.dropout);
}

// cond (B, H, W, K): pictures (B, K, H, W), mirrored where their images are. One that is left out is zeros.
static inline void take_pictures(float* cond, const void* pictures, PictureDraws draws, int B, int K, int H, int W,
                                 int bytes) {
    for (int b = 0; b < B; b++) {
        const bool flip = picture_is_mirrored(draws, b);
        const bool left_out = picture_is_left_out(draws, b);
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++)
                for (int k = 0; k < K; k++) {
                    const int w_in = flip ? W - 1 - w : w;
                    const size_t in = (((size_t)b * K + k) * H + h) * W + w_in;
                    const size_t i = (((size_t)b * H + h) * W + w) * K + k;
                    cond[i] = left_out ? 0 : image_value(pictures, bytes, in);
                }
    }
}

// small (B, H / factor, W / factor, C): means of squares of the images (B, C, H, W), and noise. Number e of a picture
// takes normal e % 4 of Philox quartet e / 4; the noise's strength is quartet NOISE_STRENGTH's.
static inline void shrink_images(float* small, const void* images, int factor, PictureDraws draws, int B, int C, int H,
                                 int W, int bytes) {
    const int small_w = W / factor;
    const int n = H / factor * small_w * C;
    const RandomKey noise_key = of_purpose(draws.key, RANDOM_COND_NOISE);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const bool flip = picture_is_mirrored(draws, b);
        const float strength = draws.noise * noise_strength(random_words(noise_key, NOISE_STRENGTH, b));
        for (int e = 0; e < n; e++) {
            float z[4] = {};
            if (strength > 0) normals(z, random_words(noise_key, e / 4, b));
            const size_t plane = (size_t)b * C + e % C;
            const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
            const float mean = square_mean(channel, bytes, e / C / small_w, e / C % small_w, factor, W, flip);
            small[(size_t)b * n + e] = mean + strength * z[e % 4];
        }
    }
}

// cond (B, H, W, C): the small pictures (B, H / factor, W / factor, C), enlarged
static inline void enlarge_pictures(float* cond, const float* small, int factor, PictureDraws draws, int B, int C,
                                    int H, int W) {
    const int n = H * W * C;
    const int small_h = H / factor;
    const int small_w = W / factor;
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const bool left_out = picture_is_left_out(draws, b);
        const float* const picture = small + (size_t)b * small_h * small_w * C;
        for (int e = 0; e < n; e++) {
            const float value = enlarged(picture, e / C / W, e / C % W, e % C, factor, C, small_h, small_w);
            cond[(size_t)b * n + e] = left_out ? 0 : value;
        }
    }
}

// cond (B, H, W, 1): images (B, 3, H, W) in grey
static inline void grey_images(float* cond, const void* images, PictureDraws draws, int B, int H, int W, int bytes) {
    for (int b = 0; b < B; b++) {
        const bool flip = picture_is_mirrored(draws, b);
        const bool left_out = picture_is_left_out(draws, b);
        for (int p = 0; p < H * W; p++) {
            const int from = flip ? p / W * W + W - 1 - p % W : p;
            const float value = grey_value(images, bytes, (size_t)b * 3 * H * W + from, H * W);
            cond[(size_t)b * H * W + p] = left_out ? 0 : value;
        }
    }
}

// cond (B, H, W, C + 1): images (B, C, H, W) with holes, and where these are
static inline void mask_images(float* cond, const void* images, PictureDraws draws, int B, int C, int H, int W,
                               int bytes) {
    const RandomKey key = of_purpose(draws.key, RANDOM_MASK);
    for (int b = 0; b < B; b++) {
        const bool flip = picture_is_mirrored(draws, b);
        const bool left_out = picture_is_left_out(draws, b);
        Words words[2 * HOLES];
        for (int k = 0; k < 2 * HOLES; k++) words[k] = random_words(key, k, b);
        const Holes holes = draw_holes(words, H, W);
        for (int p = 0; p < H * W; p++) {
            float* const pixel = cond + ((size_t)b * H * W + p) * (C + 1);
            const bool hidden = is_in_hole(holes, p / W, p % W);
            const int from = flip ? p / W * W + W - 1 - p % W : p;
            for (int c = 0; c < C; c++) {
                const size_t plane = (size_t)b * C + c;
                const float value = image_value(images, bytes, plane * H * W + from);
                pixel[c] = hidden || left_out ? 0 : value;
            }
            pixel[C] = left_out ? 0 : mask_value(hidden);
        }
    }
}

// x_t = signal x_0 + sigma noise,   target = target_x0 x_0 + target_noise noise [+ target_teacher teacher]
// images is (B, C, H, W), bytes or floats; x_t, target and teacher are (B, H, W, C). A flip mirrors an image.
static inline void q_sample_forward(float* x_t, float* target,                // (B, H, W, C)
                                    const NoiseLevel* levels,                 // (B)
                                    const float* teacher, const void* images, // (B, H, W, C), (B, C, H, W)
                                    bool random_flip, RandomKey noise_key, RandomKey flip_key, int B, int C, int H,
                                    int W, int bytes) {
    draw_normals(target, B, H * W * C, noise_key); // target holds the noise first
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const bool flip = random_flip && (random_words(flip_key, 0, b).w[0] & 1);
        const NoiseLevel& l = levels[b];
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++)
                for (int c = 0; c < C; c++) {
                    const int w_in = flip ? W - 1 - w : w;
                    const size_t in = (((size_t)b * C + c) * H + h) * W + w_in;
                    const size_t i = (((size_t)b * H + h) * W + w) * C + c;
                    const float x0 = image_value(images, bytes, in);
                    const float noise = target[i];
                    x_t[i] = l.signal * x0 + l.sigma * noise;
                    target[i] = l.target_x0 * x0 + l.target_noise * noise;
                    if (teacher) target[i] += l.target_teacher * teacher[i];
                }
    }
}

// loss (B) = the mean over a sample's elements of mse (out - target)^2 + bound * the variational bound's term
// dout (B, HW, Cout) = the gradient of factor * sum(loss). With Cout = 2 C the second C outputs say the variance.
static inline void loss_forward_backward(double* loss, float* dout, // (B), (B, HW, Cout)
                                         const float* out,          // (B, HW, Cout)
                                         const float* target,       // (B, HW, C)
                                         const float* x,            // (B, HW, C): the network's input
                                         const NoiseLevel* levels,  // (B)
                                         const Objective& o, float factor, int B, int HW, int C, int Cout) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const NoiseLevel& l = levels[b];
        const float mse = o.mse * l.weight;
        const float bound = o.bound * l.importance;
        const float slope = factor / ((float)HW * C);
        double sum = 0;
        for (int p = 0; p < HW; p++) {
            const size_t pixel = (size_t)b * HW + p;
            const float* o_row = row_of(out, pixel, Cout);
            const float* target_row = row_of(target, pixel, C);
            const float* x_row = row_of(x, pixel, C);
            float* d_row = row_of(dout, pixel, Cout);
            std::fill_n(d_row, Cout, 0.0f);
            for (int c = 0; c < C; c++) {
                // The squared error, and its derivative by the output
                const float d = o_row[c] - target_row[c];
                sum += (double)mse * d * d;
                d_row[c] = 2 * d * mse * slope;
                if (!(o.bound > 0)) continue;
                // The term of the variational bound, and its derivatives by both outputs
                const float v = Cout > C ? o_row[C + c] : 0;
                const float x0 = l.x0_x * x_row[c] + l.x0_out * target_row[c];
                const BoundTerm term = bound_term(l, d, v, x0);
                sum += (double)bound * term.value;
                // Beside a squared error the bound trains the variance alone (Nichol & Dhariwal 2021, eq. 16).
                if (o.mse == 0) d_row[c] = slope * bound * term.d_mean;
                if (Cout > C) d_row[C + c] = slope * bound * term.d_variance;
            }
        }
        loss[b] = sum / ((double)HW * C);
    }
}

// loss (B) and dout of the pseudo-Huber distance between images, of n values each (--objective ect; tuning_loss)
static inline void tuning_loss_forward_backward(double* loss, float* dout,             // (B), (B, n)
                                                const float* out, const float* target, // (B, n)
                                                const NoiseLevel* levels,              // (B)
                                                float c, float factor, int B, int n) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const float* o_row = row_of(out, b, n);
        const float* target_row = row_of(target, b, n);
        float* d_row = row_of(dout, b, n);
        double distance = 0; // squared
        for (int i = 0; i < n; i++) {
            const float d = levels[b].x0_out * (o_row[i] - target_row[i]);
            distance += (double)d * d;
        }
        const TuningLoss l = tuning_loss(levels[b], distance, c);
        loss[b] = l.value;
        const float slope = (float)(factor * l.slope);
        for (int i = 0; i < n; i++) {
            d_row[i] = slope * (o_row[i] - target_row[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// a sampler's step

// t (B): what the network is told in step *k of the sampler, the same for all samples
static inline void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B) {
    for (int b = 0; b < B; b++) {
        t[b] = steps[*k].t;
    }
}

// x0 (n): the image that the network's answer for sample b means. x is the sample's input (n = HW * C); out is of the
// whole batch, (B or 2 B, HW, Cout). In a guided step its second half has the answers without a class, and the
// difference of the two is exaggerated (Ho & Salimans 2022).
static inline std::vector<float> predicted_x0(const float* x, const float* out, const SamplerStep& s, //
                                              int b, int B, int HW, int C, int Cout) {
    const bool guided = s.guidance != 1;
    std::vector<float> x0(HW * C);
    for (int p = 0; p < HW; p++) {
        const float* o_row = row_of(out, (size_t)b * HW + p, Cout);
        const float* unguided_row = guided ? row_of(o_row, (size_t)B * HW, Cout) : nullptr;
        for (int c = 0; c < C; c++) {
            float answer = o_row[c];
            if (guided) answer = unguided_row[c] + s.guidance * (answer - unguided_row[c]);
            const int i = p * C + c;
            x0[i] = s.x0_x * x[i] + s.x0_out * answer;
        }
    }
    return x0;
}

// The bound for |x0|: 1, or with dynamic thresholding (Imagen, Saharia et al. 2022) the rank-th smallest |x0| of the
// image where that is larger.
static inline float x0_limit(const std::vector<float>& x0, int rank) {
    if (rank < 0) return 1;
    std::vector<float> magnitudes;
    for (float v : x0) {
        const float magnitude = std::isnan(v) ? INFINITY : std::fabs(v);
        magnitudes.push_back(magnitude);
    }
    std::nth_element(magnitudes.begin(), magnitudes.begin() + rank, magnitudes.end());
    return std::max(magnitudes[rank], 1.0f);
}

// From [-limit, limit] to [-1, 1]. NaN stays NaN, which std::clamp would not promise.
static inline float limited(float x0, float limit) {
    if (x0 < -limit) return -limit / limit;
    if (x0 > limit) return limit / limit;
    return x0 / limit;
}

// x += sigma z for sample b. A learned sigma lies between two bounds, and the second C outputs say where.
static inline void add_step_noise(float* x, const float* out, // (HW, C) of sample b; (B, HW, Cout)
                                  const SamplerStep& s, RandomKey key, int b, int HW, int C, int Cout) {
    for (int e = 0; e < HW * C; e += 4) {
        float z[4];
        normals(z, random_words(key, e / 4, b));
        for (int k = 0; k < 4 && e + k < HW * C; k++) {
            const int p = (e + k) / C;
            const int c = (e + k) % C;
            float sigma = s.sigma;
            if (s.range > 0) {
                const float v = row_of(out, (size_t)b * HW + p, Cout)[C + c];
                sigma = std::exp(s.log_sigma + s.range * 0.5f * (v + 1));
            }
            x[e + k] += z[k] * sigma;
        }
    }
}

// A step of a sampler, in place: x ((guided ? 2 : 1) B, HW, C), where with guidance the second half is a copy.
static inline void sampler_step(float* x, const float* out, // as above; (B or 2 B, HW, Cout)
                                const SamplerStep* steps, const Denoising& d, RandomKey key, int B, int HW, int C,
                                int Cout) {
    const SamplerStep s = steps[*key.step];
    const int n = HW * C;
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        float* sample = row_of(x, b, n);
        float* memory = d.m ? row_of(d.m, b, n) : nullptr; // what a multistep sampler keeps of the step before
        std::vector<float> x0 = predicted_x0(sample, out, s, b, B, HW, C, Cout);
        const float limit = x0_limit(x0, d.rank);
        for (int e = 0; e < n; e++) {
            // x' and m', as struct SamplerStep has them
            if (d.limit) x0[e] = limited(x0[e], limit);
            float next = s.next_x * sample[e] + s.next_x0 * x0[e];
            if (s.next_m != 0) next += s.next_m * memory[e];
            if (s.m_x != 0 || s.m_x0 != 0) memory[e] = s.m_x * sample[e] + s.m_x0 * x0[e];
            sample[e] = next;
        }
        if (s.sigma > 0) add_step_noise(sample, out, s, key, b, HW, C, Cout);
        if (d.guided) std::copy_n(sample, n, row_of(x, B + b, n));
    }
}

// Inpainting. Where mask (B, n) is 0, x becomes the given image with the noise of this step. Where the sampler then
// goes back some steps (RePaint, Lugmayr et al. 2022), noise is added: x' = back_x x + back_sigma z. Otherwise back_x
// is 1 and back_sigma is 0.
static inline void keep_known(float* x, const float* image, const float* mask, // (B or 2 B, n), (B, n), (B, n)
                              const SamplerStep* steps, RandomKey key, bool guided, int B, int n) {
    const SamplerStep s = steps[*key.step];
    if (s.known_x == 0) return;
    const RandomKey back_key{key.seed, RANDOM_BACK_NOISE, key.step, key.sample0};
    for (int b = 0; b < B; b++)
        for (int e = 0; e < n; e += 4) {
            float z_known[4], z_back[4];
            normals(z_known, random_words(key, e / 4, b));
            normals(z_back, random_words(back_key, e / 4, b));
            // Four normals are drawn at a time; the last four may be more than are left.
            for (int k = 0; k < 4 && e + k < n; k++) {
                const size_t i = (size_t)b * n + e + k;
                const float known = s.known_x * image[i] + s.known_sigma * z_known[k];
                const float now = mask[i] > 0 ? x[i] : known;
                x[i] = s.back_x * now + s.back_sigma * z_back[k];
                if (guided) x[i + (size_t)B * n] = x[i];
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// the optimiser
//
// Its arrays are flat: the parameters of every layer, one behind the other. A rank (one process of several) updates its
// own slice of them, struct Slice, in stretches of STRETCH floats. With one rank the slice is everything, and there is
// one array of gradients. Sums are taken stretch by stretch, so that they do not depend on who owns which stretch.

// sum (flat) = [sum +] the ranks' gradients, always added in the order of the ranks.
// squares (stretches) = the sum of squares of each stretch of that, in double: the parts of the gradient's norm.
static inline void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add) {
    const Slice& slice = grads.slice;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < slice.owned(); i += STRETCH) {
        const size_t first = slice.flat(i); // may lie in the padding behind the last parameter
        const size_t count = first < slice.n ? std::min(slice.n - first, STRETCH) : 0;
        float stretch[STRETCH]; // a copy: sum may lie where this rank's own gradients are
        std::copy_n((add ? sum : grads.of(0)) + first, count, stretch);
        for (int r = add ? 0 : 1; r < slice.ranks; r++) {
            const float* more = grads.of(r) + first;
#pragma omp simd
            for (size_t k = 0; k < count; k++) stretch[k] += more[k];
        }
        std::copy_n(stretch, count, sum + first);
        double total = 0;
#pragma omp simd reduction(+ : total)
        for (size_t k = 0; k < count; k++) {
            total += (double)stretch[k] * stretch[k];
        }
        squares.at[0][first / STRETCH] = total;
    }
}

// state->grad_norm = sqrt(sum of squares), torch.nn.utils.clip_grad_norm_'s norm. With it and the batch's losses,
// judge_batch decides whether the step is ok; a step that is not changes no parameter.
static inline void judge_step(StepState* state, const double* squares, size_t stretches, const double* loss,
                              const int* quarters, AdamW h, int B) {
    double total = 0;
    for (size_t k = 0; k < stretches; k++) total += squares[k];
    state->grad_norm = std::sqrt(total);
    LossSums losses{};
    for (int b = 0; b < B; b++) {
        add_loss(&losses, loss[b], quarters[b]);
    }
    judge_batch(state, losses, h, B);
}

// The program calls it behind everything that draws random numbers for this step.
static inline void next_step(int64_t* step) { ++*step; }

// records (count) is a ring, which the host reads for the log some steps later.
static inline void record_step(StepState* records, const StepState* state, int count) {
    records[(state->step - 1) % count] = *state;
}

// A GPU's bf16 copy of the weights is written here. In fp32 the copy is the parameters themselves.
static inline void cast_params(float*, const float*, size_t) {}

// --optimizer muon, before adamw_update (update_by_muon in train_unet.cu has the formulas). The momentum of this rank's
// part of the matrices, and Nesterov's momentum X, a flat array.
static inline void muon_momentum(float* X, const Update& u, const StepState* state, AdamW h, Slice own) {
    if (!state->ok) return;
    double clip = 1;
    if (h.grad_clip > 0) clip = std::min(1.0, h.grad_clip / (state->grad_norm + 1e-6));
    const float scale = (float)clip;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < own.owned(); first += 64) { // the elements of a matrix lie in whole groups of 64
        const size_t flat = own.flat(first);
        if (flat >= own.n || !u.is_matrix[flat / 64]) continue;
        for (size_t i = 0; i < 64; i++) {
            const float g = u.sum[flat + i] * scale;
            float& m = u.m[first + i];
            m = MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g;
            X[flat + i] = MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g;
        }
    }
}

// Replaces a matrix by the orthogonal matrix near to it, times scale. It has `rows` rows of `columns` numbers. Both
// numbers are multiples of TN. A matrix that is wider than high is transposed first, so that X^T X is as small as it
// can be.
static inline void orthogonalise_matrix(float* matrix, int rows, int columns, float scale) {
    const bool is_high = rows >= columns;
    const int L = std::max(rows, columns);
    const int S = std::min(rows, columns);
    std::vector<float> X((size_t)L * S), X_turned((size_t)S * L), XB((size_t)L * S), A((size_t)S * S), B((size_t)S * S);
    if (is_high) std::copy_n(matrix, X.size(), X.data());
    else transpose(X.data(), S, matrix, L, S, L);
    double squares = 0;
    for (float x : X) squares += (double)x * x;
    const float inverse_norm = squares < MUON_SMALLEST ? 0 : (float)(1 / std::sqrt(squares));
    for (float& x : X) x *= inverse_norm;
    for (int iteration = 0; iteration < MUON_ITERATIONS; iteration++) {
        transpose(X_turned.data(), L, X.data(), S, L, S);
        matmul(A.data(), S, X_turned.data(), L, X.data(), S, S, S, L); // A = X^T X
        matmul(B.data(), S, A.data(), S, A.data(), S, S, S, S);        // B = b A + c A A
        for (size_t i = 0; i < B.size(); i++) B[i] = MUON_B * A[i] + MUON_C * B[i];
        matmul(XB.data(), S, X.data(), S, B.data(), S, L, S, S); // X = a X + X B
        for (size_t i = 0; i < X.size(); i++) X[i] = MUON_A * X[i] + XB[i];
    }
    for (float& x : X) x *= scale;
    if (is_high) std::copy_n(X.data(), X.size(), matrix);
    else transpose(matrix, L, X.data(), S, L, S);
}
static inline void prepare_muon(MuonWork*, size_t) {} // a CPU allocates for each matrix what it needs
static inline void orthogonalise(float* X, const MuonWork& muon, const StepState* state) {
    if (!state->ok) return;
    static_assert(32 % TN == 0, "sides of matrices are multiples of 32");
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < muon.matrices.size(); i++) {
        const MuonMatrix& m = muon.matrices[i];
        orthogonalise_matrix(X + m.offset, m.rows, m.columns, muon_scale(m));
    }
}

// torch.optim.AdamW behind torch.nn.utils.clip_grad_norm_, with g the clipped gradient:
//   m = beta1 m + (1 - beta1) g,                  v = beta2 v + (1 - beta2) g^2
//   m_hat = m / (1 - beta1^t),                    v_hat = v / (1 - beta2^t)         t: the number of updates
//   p = p - lr weight_decay p - lr m_hat / (sqrt(v_hat) + eps)
//   ema = ema + share (p - ema)                                                     share: average_share
static inline void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own) {
    if (!state->ok) return;
    const double t = (double)state->updates;
    double clip = 1;
    if (h.grad_clip > 0) clip = std::min(1.0, h.grad_clip / (state->grad_norm + 1e-6));
    // What does not depend on the parameter: the factor of clipping, and the corrections of m_hat and v_hat.
    const double correction1 = 1 - std::pow((double)h.beta1, t);
    const double correction2 = 1 - std::pow((double)h.beta2, t);
    const float scale = (float)clip;
    const float decay = 1 - state->lr * h.weight_decay;
    const float step_size = (float)(state->lr / correction1);
    const float root = (float)std::sqrt(correction2);
    const float share = average_share(h.ema_rate, state->updates);
    const size_t piece = u.is_matrix ? 64 : STRETCH; // of floats that are all updated in the same way
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < own.owned(); first += piece) {
        const size_t flat = own.flat(first); // ema, m and v hold the slice alone, the other arrays everything
        const size_t count = flat < own.n ? std::min(own.n - flat, piece) : 0;
        float* const params = u.params.at[0] + flat;
        float* const ema = u.ema + first;
        float* const m = u.m + first;
        float* const v = u.v + first;
        const float* const grads = u.sum + flat;
        if (u.is_matrix && count && u.is_matrix[flat / 64]) { // this piece belongs to a matrix that Muon updates
            for (size_t i = 0; i < count; i++) {
                params[i] = params[i] * decay - state->lr * grads[i]; // a direction: see Update
                ema[i] += share * (params[i] - ema[i]);
            }
            continue;
        }
#pragma omp simd
        for (size_t i = 0; i < count; i++) {
            const float g = grads[i] * scale;
            m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
            v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            const float denominator = std::sqrt(v[i]) / root + h.eps; // sqrt(v_hat) + eps
            params[i] = params[i] * decay - step_size * m[i] / denominator;
            ema[i] += share * (params[i] - ema[i]);
        }
    }
}

// Further averages of the parameters (--ema_rate with several rates, post-hoc EMA)
static inline void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    if (!state->ok) return;
    const float share = average_share(rate, state->updates);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < own.owned(); i++) {
        const size_t k = own.flat(i);
        if (k < own.n) ema[i] += share * (params[k] - ema[i]);
    }
}
