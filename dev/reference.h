// reference.h - every operation of the trainer as plain fp32 loops: the CPU build, the documentation, and the oracle of the CUDA kernels.
//
// Included by train_unet.cu behind the interface, which says what each function computes, its shapes, and what it overwrites.
// Sums that decide (group statistics, losses, norms) are accumulated in double. No result depends on the number of threads.
//
// Two small loops do all matrix work; the rest of the file feeds them pointers:
//   tile_multiply   acc[TM][TN] += A[m][k] * B[k][n]   TM row pointers: output pixels under one filter tap, or rows of a matrix
//   tile_outer      acc[TM][TN] += A[k][m] * B[k][n]   sums over pairs of pixels: weight gradients
// The accumulators nearly fill the vector registers (AVX-512: 16 of 32 with 8 x 32 floats, AVX2: 12 of 16 with 6 x 16; with 8 of 16 a product waits for
// the one before it, at half the speed), which is all it takes to run near the machine's peak.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// e^x to 2 ulp without a call, so that loops around it vectorise: 2^k * e^r with |r| <= ln(2)/2 and a polynomial (Cephes expf). NaN stays NaN.
static inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float kf =
        std::max(-126.0f, x * 1.44269504088896341f); // -126 if x is NaN, of which no whole number can be made
    const int k = (int)(kf + (kf < 0 ? -0.5f : 0.5f));
    const float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

template <> inline float sigmoid<float>(float z) { return 1.0f / (1.0f + fast_exp(-z)); }

#ifdef __AVX512F__
constexpr int TM = 8, TN = 32;
#else
constexpr int TM = 6, TN = 16;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// the two inner loops, and what they need

// acc (TM, TN) += rows a[m] (K long) times b (K, TN) with row pitch ldb.
static inline void tile_multiply(float (&acc)[TM][TN], const float* const (&a)[TM], const float* b, size_t ldb, int K) {
    for (int k = 0; k < K; k++, b += ldb) {
        for (int m = 0; m < TM; m++) {
            const float v = a[m][k];
#pragma omp simd
            for (int n = 0; n < TN; n++) acc[m][n] += v * b[n];
        }
    }
}

// acc (TM, TN) += sum over k of a[first[k]] (TM) times b[second[k]] (TN), rows with pitches lda and ldb.
struct RowPair {
    int first, second;
};
static inline void tile_outer(float (&acc)[TM][TN], const float* a, size_t lda, const float* b, size_t ldb,
                              const std::vector<RowPair>& pairs) {
    float sum[TM][TN]; // in registers: acc might be an element of an array
    memcpy(sum, acc, sizeof sum);
    for (const RowPair& pair : pairs) {
        const float *row_a = a + pair.first * lda, *row_b = b + pair.second * ldb;
        for (int m = 0; m < TM; m++) {
            const float v = row_a[m];
#pragma omp simd
            for (int n = 0; n < TN; n++) sum[m][n] += v * row_b[n];
        }
    }
    memcpy(acc, sum, sizeof sum);
}

// C (M, N) = A (M, K) * B (K, N), pitches lda, ldb, ldc; serial (callers are parallel over heads). B's pitch must leave TN readable columns.
static inline void matmul(float* C, size_t ldc, const float* A, size_t lda, const float* B, size_t ldb, int M, int N,
                          int K) {
    for (int m0 = 0; m0 < M; m0 += TM) {
        const float* rows[TM];
        for (int m = 0; m < TM; m++) rows[m] = A + std::min(m0 + m, M - 1) * lda;
        for (int n0 = 0; n0 < N; n0 += TN) {
            float acc[TM][TN] = {};
            tile_multiply(acc, rows, B + n0, ldb, K);
            for (int m = 0; m < TM && m0 + m < M; m++)
                for (int n = 0; n < TN && n0 + n < N; n++) C[(m0 + m) * ldc + n0 + n] = acc[m][n];
        }
    }
}

// out (cols, rows padded to pitch) = in (rows, cols)^T
static inline void transpose(float* out, size_t pitch, const float* in, size_t ld, int rows, int cols) {
    for (int c = 0; c < cols; c++) {
        for (int r = 0; r < rows; r++) out[c * pitch + r] = in[r * ld + c];
        for (size_t r = rows; r < pitch; r++) out[c * pitch + r] = 0;
    }
}

// Gradient of one element with its addends.
static inline float with_addends(const GradOf<float>& g, size_t i, float d) {
    return d + (g.add1 ? g.add1[i] : 0.0f) + (g.add2 ? g.add2[i] : 0.0f);
}

// out (n) = acc + a + b + c, where null pointers add nothing; the addends may be out itself.
static inline void store_row(float* out, const float (&acc)[TN], int n, const float* a, const float* b,
                             const float* c) {
    float row[TN];
    memcpy(row, acc, sizeof row);
    if (n < TN) {
        for (int i = 0; i < n; i++) out[i] = row[i] + (a ? a[i] : 0) + (b ? b[i] : 0) + (c ? c[i] : 0);
        return;
    }
    for (const float* add : {a, b, c}) {
        if (!add) continue;
#pragma omp simd
        for (int i = 0; i < TN; i++) row[i] += add[i];
    }
    memcpy(out, row, sizeof row);
}

// ---------------------------------------------------------------------------------------------------------------------
// statistics for group norm

// stats, in one part: per image and channel the sum and the sum of squares over the pixels of x (B, HW, C). Kept by channel, not by group: the groups of a
// concatenated tensor can straddle its two sources.
static inline void channel_stats(Stats* stats, const float* x, int B, int HW, int C) {
    stats->parts = 1;
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < B; b++)
        for (int c0 = 0; c0 < C; c0 += 32) {
            const int n = std::min(32, C - c0);
            double sum[32] = {}, square[32] = {};
            for (int p = 0; p < HW; p++) {
                const float* row = x + ((size_t)b * HW + p) * C + c0;
#pragma omp simd
                for (int c = 0; c < n; c++) {
                    const double v = row[c];
                    sum[c] += v;
                    square[c] += v * v;
                }
            }
            for (int c = 0; c < n; c++) {
                stats->sums[((size_t)b * C + c0 + c) * 2] = sum[c];
                stats->sums[((size_t)b * C + c0 + c) * 2 + 1] = square[c];
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// convolution, 1x1 and 3x3 (padding kernel / 2), stride 1 or 2, input optionally upsampled 2x (nearest) or in two parts (concatenated channels)

// Where every tap of every output pixel reads: (taps, Ho * Wo) indices of input pixels, -1 in the padding.
static inline std::vector<int> conv_sources(const ConvShape& s) {
    const int taps = s.kernel * s.kernel, Ho = s.out_H(), Wo = s.out_W();
    std::vector<int> table;
    for (int tap = 0; tap < taps; tap++)
        for (int p = 0; p < Ho * Wo; p++) {
            const int y = p / Wo * s.stride + tap / s.kernel - s.kernel / 2,
                      x = p % Wo * s.stride + tap % s.kernel - s.kernel / 2;
            const bool inside = y >= 0 && x >= 0 && y < s.H << s.upsample && x < s.W << s.upsample;
            table.push_back(inside ? (y >> s.upsample) * s.W + (x >> s.upsample) : -1);
        }
    return table;
}

// The same turned round: (parts, taps, H * W) indices of the output pixels whose tap reads this input pixel, -1 where there is none. An input
// pixel that is upsampled stands for 2 x 2 pixels: parts = 4.
static inline std::vector<int> conv_targets(const ConvShape& s) {
    const int taps = s.kernel * s.kernel, parts = 1 << 2 * s.upsample, HW = s.H * s.W, Wo = s.out_W();
    const std::vector<int> sources = conv_sources(s);
    std::vector<int> table((size_t)parts * taps * HW, -1);
    for (size_t i = 0; i < sources.size(); i++) {
        if (sources[i] < 0) continue;
        const int tap = (int)(i / (s.out_H() * Wo)), p = (int)(i % (s.out_H() * Wo));
        const int y = p / Wo * s.stride + tap / s.kernel - s.kernel / 2,
                  x = p % Wo * s.stride + tap % s.kernel - s.kernel / 2;
        const int part = s.upsample ? (y & 1) * 2 + (x & 1) : 0;
        table[((size_t)part * taps + tap) * HW + sources[i]] = p;
    }
    return table;
}

// weight (Cout, taps, Cin) -> (taps, Cin, Cout padded to TN): the order in which the forward pass streams it.
static inline std::vector<float> conv_weight_by_input(const float* weight, int Cout, int taps, int Cin) {
    const int pitch = round_up(Cout, TN);
    std::vector<float> wt((size_t)taps * Cin * pitch);
#pragma omp parallel for collapse(2) schedule(static)
    for (int tap = 0; tap < taps; tap++)
        for (int ci = 0; ci < Cin; ci++)
            for (int co = 0; co < Cout; co++)
                wt[((size_t)tap * Cin + ci) * pitch + co] = weight[((size_t)co * taps + tap) * Cin + ci];
    return wt;
}

static inline void conv_forward(float* out, Stats* stats, const float* x1, const float* x2, const float* weight,
                                const float* bias, const float* emb, int emb_stride, const float* residual, ConvShape s,
                                const ConvSkip&) {
    const int HW = s.H * s.W, HWo = s.out_H() * s.out_W(), taps = s.kernel * s.kernel, Cin = s.C1 + s.C2,
              pitch = round_up(s.Cout, TN);
    const std::vector<float> wt = conv_weight_by_input(weight, s.Cout, taps, Cin), zeros(std::max(s.C1, s.C2));
    const std::vector<int> sources = conv_sources(s);
    const int pixels = s.B * HWo,
              chunk = 8 * TM; // a chunk of pixels reuses the weights of an output tile while they are in cache
#pragma omp parallel for schedule(dynamic)
    for (int start = 0; start < pixels; start += chunk)
        for (int co = 0; co < s.Cout; co += TN)
            for (int p0 = start; p0 < std::min(start + chunk, pixels); p0 += TM) {
                float acc[TM][TN] = {};
                int pixel[TM], image[TM];
                for (int m = 0; m < TM; m++) {
                    const int p = std::min(p0 + m, pixels - 1);
                    image[m] = p / HWo;
                    pixel[m] = p % HWo;
                }
                for (int tap = 0; tap < taps; tap++) {
                    const float *rows1[TM], *rows2[TM];
                    for (int m = 0; m < TM; m++) {
                        const int source = sources[tap * HWo + pixel[m]];
                        const size_t p = (size_t)image[m] * HW + source;
                        rows1[m] = source < 0 ? zeros.data() : x1 + p * s.C1;
                        rows2[m] = source < 0 || !x2 ? zeros.data() : x2 + p * s.C2;
                    }
                    const float* wp = wt.data() + (size_t)tap * Cin * pitch + co;
                    tile_multiply(acc, rows1, wp, pitch, s.C1);
                    if (s.C2) tile_multiply(acc, rows2, wp + (size_t)s.C1 * pitch, pitch, s.C2);
                }
                for (int m = 0; m < TM && p0 + m < pixels; m++) {
                    const size_t o = (size_t)(p0 + m) * s.Cout + co;
                    const float* e = emb ? emb + (size_t)image[m] * emb_stride + co : nullptr;
                    store_row(out + o, acc[m], std::min(TN, s.Cout - co), bias + co, e,
                              residual ? residual + o : nullptr);
                }
            }
    if (stats) channel_stats(stats, out, s.B, HWo, s.Cout);
}

// Every input pixel gathers from the outputs that read it.
static inline void conv_backward_input(GradOf<float> dx1, GradOf<float> dx2, const float* dout, const float* weight,
                                       ConvShape s) {
    const int taps = s.kernel * s.kernel, Cin = s.C1 + s.C2, HW = s.H * s.W, HWo = s.out_H() * s.out_W(),
              pitch = round_up(Cin, TN);
    std::vector<float> wt((size_t)taps * s.Cout * pitch), zeros(s.Cout); // weight as (taps, Cout, Cin padded)
    const std::vector<int> targets = conv_targets(s);
    // Pixels of one tile should be read by the same taps, or most of its rows are zeros: with stride 2, those of equal parity.
    std::vector<int> order(HW);
    for (int p = 0; p < HW; p++) order[p] = p;
    auto parity = [&](int p) { return p / s.W % s.stride * s.stride + p % s.W % s.stride; };
    if (!s.upsample) std::stable_sort(order.begin(), order.end(), [&](int p, int q) { return parity(p) < parity(q); });
#pragma omp parallel for collapse(2) schedule(static)
    for (int tap = 0; tap < taps; tap++)
        for (int co = 0; co < s.Cout; co++)
            memcpy(&wt[((size_t)tap * s.Cout + co) * pitch], weight + ((size_t)co * taps + tap) * Cin,
                   Cin * sizeof(float));
    const int pixels = s.B * HW, chunk = 8 * TM;
#pragma omp parallel for schedule(dynamic)
    for (int start = 0; start < pixels; start += chunk)
        for (int ci = 0; ci < Cin; ci += TN)
            for (int p0 = start; p0 < std::min(start + chunk, pixels); p0 += TM) {
                float acc[TM][TN] = {};
                int pixel[TM], image[TM];
                for (int m = 0; m < TM; m++) {
                    const int p = std::min(p0 + m, pixels - 1);
                    image[m] = p / HW;
                    pixel[m] = order[p % HW];
                }
                for (int tap = 0; tap < taps << 2 * s.upsample; tap++) {
                    const float* rows[TM];
                    bool any = false;
                    for (int m = 0; m < TM; m++) {
                        const int target = targets[(size_t)tap * HW + pixel[m]];
                        rows[m] = target < 0 ? zeros.data() : dout + ((size_t)image[m] * HWo + target) * s.Cout;
                        any |= target >= 0;
                    }
                    if (any)
                        tile_multiply(acc, rows, wt.data() + (size_t)(tap % taps) * s.Cout * pitch + ci, pitch, s.Cout);
                }
                const GradOf<float>& g = ci < s.C1 ? dx1 : dx2; // C1 is a multiple of TN where there is a C2
                for (int m = 0; m < TM && p0 + m < pixels && g.dx; m++) {
                    const size_t p = (size_t)image[m] * HW + pixel[m];
                    const size_t i = ci < s.C1 ? p * s.C1 + ci : p * s.C2 + ci - s.C1;
                    store_row(g.dx + i, acc[m], std::min(TN, Cin - ci), g.add1 ? g.add1 + i : nullptr,
                              g.add2 ? g.add2 + i : nullptr, nullptr);
                }
            }
}

// demb (B, emb_stride), if wanted, = dout summed over the pixels of each image; dbias = that summed over the images.
static inline void bias_backward(float* dbias, float* demb, int emb_stride, const float* dout, int B, int HW, int C) {
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += 32) {
        const int n = std::min(32, C - c0);
        double total[32] = {};
        for (int b = 0; b < B; b++) {
            double sum[32] = {};
            for (int p = 0; p < HW; p++) {
                const float* row = dout + ((size_t)b * HW + p) * C + c0;
#pragma omp simd
                for (int c = 0; c < n; c++) sum[c] += row[c];
            }
            for (int c = 0; c < n; c++) {
                total[c] += sum[c];
                if (demb) demb[(size_t)b * emb_stride + c0 + c] = (float)sum[c];
            }
        }
        for (int c = 0; c < n; c++) dbias[c0 + c] = (float)total[c];
    }
}

// in (n, width) with its rows padded with zeros to a multiple of tile, or null if they are one already.
static inline std::vector<float> padded_rows(const float* in, size_t n, int width, int tile) {
    const int pitch = round_up(width, tile);
    std::vector<float> out(pitch == width ? 0 : n * pitch);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < (out.empty() ? 0 : n); i++) std::copy(in + i * width, in + (i + 1) * width, &out[i * pitch]);
    return out;
}

// A thread owns a tile of TM output channels x TN input channels of a filter row's taps, and sums it image by image, so that fp32 sums stay short.
static inline void conv_backward_weight(float* dweight, float* dbias, float* demb, int emb_stride, const float* dout,
                                        const float* x1, const float* x2, ConvShape s) {
    const int taps = s.kernel * s.kernel, Cin = s.C1 + s.C2, HW = s.H * s.W, HWo = s.out_H() * s.out_W();
    const int tiles1 = (s.C1 + TN - 1) / TN, tiles = tiles1 + (s.C2 + TN - 1) / TN;
    const std::vector<int> sources = conv_sources(s);
    // (output, input) pixels by chunk of output pixels and tap: while a chunk's rows are in the nearest cache, all taps of a filter row read them
    constexpr int CHUNK = 256;
    std::vector<std::vector<RowPair>> pairs((size_t)(HWo + CHUNK - 1) / CHUNK * taps);
    for (int tap = 0; tap < taps; tap++)
        for (int p = 0; p < HWo; p++)
            if (sources[tap * HWo + p] >= 0)
                pairs[(size_t)p / CHUNK * taps + tap].push_back(RowPair{p, sources[tap * HWo + p]});
    // With AVX-512 only the network's first and last layer have channel counts that are no multiple of a tile.
    const std::vector<float> x1_padded = padded_rows(x1, (size_t)s.B * HW, s.C1, TN);
    const std::vector<float> dout_padded = padded_rows(dout, (size_t)s.B * HWo, s.Cout, TM);
    const float* x1_rows = x1_padded.empty() ? x1 : x1_padded.data();
    const float* dout_rows = dout_padded.empty() ? dout : dout_padded.data();
    const int x1_pitch = round_up(s.C1, TN), dout_pitch = round_up(s.Cout, TM);
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int co = 0; co < s.Cout; co += TM)
        for (int tile = 0; tile < tiles; tile++)
            for (int tap0 = 0; tap0 < taps; tap0 += s.kernel) {
                const bool first = tile < tiles1;
                const int ci = (first ? tile : tile - tiles1) * TN, C = first ? s.C1 : s.C2,
                          pitch = first ? x1_pitch : C;
                float* dw = dweight + ((size_t)co * taps + tap0) * Cin + (first ? 0 : s.C1) + ci;
                for (int b = 0; b < s.B; b++) {
                    float acc[3][TM][TN] = {};
                    const float* x = (first ? x1_rows : x2) + (size_t)b * HW * pitch + ci;
                    const float* d = dout_rows + (size_t)b * HWo * dout_pitch + co;
                    for (size_t chunk = tap0; chunk < pairs.size(); chunk += taps)
                        for (int k = 0; k < s.kernel; k++)
                            tile_outer(acc[k], d, dout_pitch, x, pitch, pairs[chunk + k]);
                    for (int m = 0; m < std::min(TM, s.Cout - co); m++)
                        for (int k = 0; k < s.kernel; k++)
                            for (int n = 0; n < std::min(TN, C - ci); n++) {
                                float* const to = &dw[((size_t)m * taps + k) * Cin + n];
                                *to = b > 0 ? *to + acc[k][m][n] : acc[k][m][n];
                            }
                }
            }
    bias_backward(dbias, demb, emb_stride, dout, s.B, HWo, s.Cout);
}

// Nothing is left to the end of the backward pass.
static inline void finish_gradients() {}

// ---------------------------------------------------------------------------------------------------------------------
// linear: a 1x1 convolution of one pixel

static inline ConvShape linear_shape(int B, int Cin, int Cout) { return ConvShape{B, 1, 1, Cin, 0, Cout, 1, 1, 0}; }

// Here they do not wait for each other.
static inline double conv_weight_load(const ConvShape&) { return 1; }
static inline void conv_backward_weights(const std::vector<WeightWork>& works, Lane* = MAIN_LANE) {
    for (const WeightWork& w : works)
        conv_backward_weight(w.dweight, w.dbias, w.demb, w.emb_stride, w.dout, w.x1, w.x2, w.shape);
}

static inline void linear_forward(float* out, const float* x, const float* weight, const float* bias, int B, int Cin,
                                  int Cout, Lane* = MAIN_LANE) {
    conv_forward(out, nullptr, x, nullptr, weight, bias, nullptr, 0, nullptr, linear_shape(B, Cin, Cout));
}

static inline void linear_backward(GradOf<float> dx, float* dweight, float* dbias, const float* dout, const float* x,
                                   const float* weight, int B, int Cin, int Cout) {
    if (dx.dx) conv_backward_input(dx, GradOf<float>{}, dout, weight, linear_shape(B, Cin, Cout));
    conv_backward_weight(dweight, dbias, nullptr, 0, dout, x, nullptr, linear_shape(B, Cin, Cout));
}

// ---------------------------------------------------------------------------------------------------------------------
// SiLU: x * sigmoid(x)

static inline void silu_forward(float* out, const float* x, size_t n, Lane* = MAIN_LANE) {
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = Silu<float>::f(x[i]);
}

static inline void silu_backward(GradOf<float> dx, const float* dout, const float* x, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float s = sigmoid<float>(x[i]);
        dx.dx[i] = with_addends(dx, i, dout[i] * s * (1 + x[i] * (1 - s)));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// group norm over [x1 | x2] [with scale-shift from the embedding] [+ activation f] [+ dropout]:
//   xhat = (x - mean_g) * rstd_g,  z = (xhat * weight + bias) * (1 + scale) + shift,  out = dropout(f(z))
// All loops take NB channels at a time (every channel count is a multiple of 32), whose coefficients then stay in registers.

constexpr int NB = 32;

// The NB channels c, c + 1, ... of the norm, which lie in one of the two sources: x with a pitch of C.
struct NormBlock {
    const float* x;
    int C, c;
};
static inline NormBlock norm_block(const float* x1, const float* x2, int b, int c, const NormShape& s) {
    if (c < s.C1) return NormBlock{x1 + (size_t)b * s.HW * s.C1 + c, s.C1, c};
    return NormBlock{x2 + (size_t)b * s.HW * s.C2 + c - s.C1, s.C2, c};
}

// The affine map that the whole norm is for image b and these channels: z = x * scale + shift.
static inline void norm_coefficients(float* scale, float* shift, const float* mean, const float* rstd,
                                     const float* weight, const float* bias, const float* scale_shift, int ss_stride,
                                     int b, int c0, const NormShape& s) {
    const int C = s.C1 + s.C2;
    const float* const ss = scale_shift ? scale_shift + (size_t)b * ss_stride : nullptr;
    for (int c = c0; c < c0 + NB; c++) {
        const int g = b * s.groups + c / (C / s.groups);
        const float a = rstd[g] * weight[c], film = ss ? 1 + ss[c] : 1;
        scale[c - c0] = a * film;
        shift[c - c0] = (bias[c] - mean[g] * a) * film + (ss ? ss[C + c] : 0);
    }
}

// values *= dropout's factors, 0 or 1 / (1 - p), of elements e, e + 1, ... of sample b.
static inline void dropout_block(float* values, const Dropout& d, int b, size_t e) {
    const uint32_t threshold = dropout_threshold(d.p);
    for (int c = 0; c < NB; c += 4) {
        const Words r = philox(d.seed, (uint32_t)((e + c) / 4), (uint32_t)(d.sample0 + b), (uint32_t)*d.step,
                               RANDOM_DROPOUT | d.layer << 8);
        for (int k = 0; k < 4; k++) values[c + k] *= r.w[k] < threshold ? 0.0f : 1.0f / (1.0f - d.p);
    }
}

static inline void groupnorm_forward(float* out, float* mean, float* rstd, const float* x1, Stats stats1,
                                     const float* x2, Stats stats2, const float* weight, const float* bias,
                                     const float* scale_shift, int ss_stride, Dropout dropout, NormShape s) {
    const int C = s.C1 + s.C2, Cg = C / s.groups;
    for (int i = 0; i < s.B * s.groups; i++) {
        const int b = i / s.groups, g = i % s.groups;
        double sum = 0, square = 0;
        for (int c = g * Cg; c < (g + 1) * Cg; c++) {
            const double* q =
                c < s.C1 ? stats1.sums + ((size_t)b * s.C1 + c) * 2 : stats2.sums + ((size_t)b * s.C2 + c - s.C1) * 2;
            sum += q[0];
            square += q[1];
        }
        const double n = (double)s.HW * Cg, m = sum / n;
        mean[i] = (float)m;
        rstd[i] = (float)(1 / std::sqrt(std::max(square / n - m * m, 0.0) + s.eps));
    }
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += NB) {
            const NormBlock in = norm_block(x1, x2, b, c0, s);
            float scale[NB], shift[NB];
            norm_coefficients(scale, shift, mean, rstd, weight, bias, scale_shift, ss_stride, b, c0, s);
            for (int p = 0; p < s.HW; p++) {
                const float* x = in.x + (size_t)p * in.C;
                float* o = out + ((size_t)b * s.HW + p) * C + c0;
#pragma omp simd
                for (int c = 0; c < NB; c++) o[c] = x[c] * scale[c] + shift[c];
                with_activation<float>(s.activation, [&](auto act) {
#pragma omp simd
                    for (int c = 0; c < NB; c++) o[c] = act.f(o[c]);
                });
                if (dropout.p > 0) dropout_block(o, dropout, b, (size_t)p * C + c0);
            }
        }
}

// dz (NB): dout from element e of image b on, taken back through dropout and the activation.
static inline void norm_dz(float (&dz)[NB], const float* dout, const float* x, const float (&scale)[NB],
                           const float (&shift)[NB], const Dropout& dropout, int b, size_t e, const NormShape& s) {
    std::copy_n(dout + (size_t)b * s.HW * (s.C1 + s.C2) + e, NB, dz);
    with_activation<float>(s.activation, [&](auto act) {
#pragma omp simd
        for (int c = 0; c < NB; c++) dz[c] *= act.df(x[c] * scale[c] + shift[c]);
    });
    if (dropout.p > 0) dropout_block(dz, dropout, b, e);
}

// First pass of the backward: sums (B, C, 2) over the pixels of each image: dz, dz * xhat.
static inline void norm_backward_sums(double* sums, const float* dout, const float* x1, const float* x2,
                                      const float* mean, const float* rstd, const float* weight, const float* bias,
                                      const float* scale_shift, int ss_stride, const Dropout& dropout,
                                      const NormShape& s) {
    const int C = s.C1 + s.C2;
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += NB) {
            const NormBlock in = norm_block(x1, x2, b, c0, s);
            float scale[NB], shift[NB], dz[NB];
            double sum[NB] = {}, product[NB] = {};
            norm_coefficients(scale, shift, mean, rstd, weight, bias, scale_shift, ss_stride, b, c0, s);
            for (int p = 0; p < s.HW; p++) {
                const float* x = in.x + (size_t)p * in.C;
                norm_dz(dz, dout, x, scale, shift, dropout, b, (size_t)p * C + c0, s);
#pragma omp simd
                for (int c = 0; c < NB; c++) {
                    sum[c] += dz[c];
                    product[c] += (double)dz[c] * x[c];
                }
            }
            for (int c = 0; c < NB; c++) {
                const int g = b * s.groups + (c0 + c) / (C / s.groups);
                sums[((size_t)b * C + c0 + c) * 2] = sum[c];
                sums[((size_t)b * C + c0 + c) * 2 + 1] = (product[c] - mean[g] * sum[c]) * rstd[g];
            }
        }
}

// Second pass: gradients of the parameters and of scale_shift; group_means (B, groups, 2) = rstd times the means over a group of g dz and
// g dz xhat, g = weight * (1 + scale).
static inline void norm_backward_params(float* group_means, float* dweight, float* dbias, float* dscale_shift,
                                        const double* sums, const float* rstd, const float* weight, const float* bias,
                                        const float* scale_shift, int ss_stride, const NormShape& s) {
    const int C = s.C1 + s.C2, Cg = C / s.groups;
    std::vector<double> dw(C), db(C), means((size_t)s.B * s.groups * 2);
    for (int b = 0; b < s.B; b++)
        for (int c = 0; c < C; c++) {
            const double* sum = sums + ((size_t)b * C + c) * 2;
            const double film = scale_shift ? 1.0 + scale_shift[(size_t)b * ss_stride + c] : 1.0;
            double* mean = &means[((size_t)b * s.groups + c / Cg) * 2];
            mean[0] += weight[c] * film * sum[0];
            mean[1] += weight[c] * film * sum[1];
            dw[c] += film * sum[1];
            db[c] += film * sum[0];
            if (!scale_shift) continue;
            dscale_shift[(size_t)b * ss_stride + c] = (float)(weight[c] * sum[1] + bias[c] * sum[0]);
            dscale_shift[(size_t)b * ss_stride + C + c] = (float)sum[0];
        }
    for (int i = 0; i < s.B * s.groups * 2; i++) group_means[i] = (float)(means[i] / ((double)s.HW * Cg) * rstd[i / 2]);
    for (int c = 0; c < C; c++) {
        dweight[c] = (float)dw[c];
        dbias[c] = (float)db[c];
    }
}

// dx = rstd * (g dz - mean(g dz) - xhat * mean(g dz xhat)), g = weight * (1 + scale), means over a group
static inline void groupnorm_backward(GradOf<float> dx1, GradOf<float> dx2, float* dweight, float* dbias,
                                      float* dscale_shift, const float* dout, const float* x1, const float* x2,
                                      const float* mean, const float* rstd, const float* weight, const float* bias,
                                      const float* scale_shift, int ss_stride, Dropout dropout, NormShape s) {
    const int C = s.C1 + s.C2, Cg = C / s.groups;
    std::vector<double> sums((size_t)s.B * C * 2);
    std::vector<float> group_means((size_t)s.B * s.groups * 2);
    norm_backward_sums(sums.data(), dout, x1, x2, mean, rstd, weight, bias, scale_shift, ss_stride, dropout, s);
    norm_backward_params(group_means.data(), dweight, dbias, dscale_shift, sums.data(), rstd, weight, bias, scale_shift,
                         ss_stride, s);
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += NB) {
            const NormBlock in = norm_block(x1, x2, b, c0, s);
            const GradOf<float>& g = c0 < s.C1 ? dx1 : dx2;
            if (!g.dx) continue;
            float scale[NB], shift[NB], dz[NB], slope[NB], level[NB]; // dx = scale dz - slope x - level
            norm_coefficients(scale, shift, mean, rstd, weight, bias, scale_shift, ss_stride, b, c0, s);
            for (int c = 0; c < NB; c++) {
                const int i = b * s.groups + (c0 + c) / Cg;
                slope[c] = group_means[2 * i + 1] * rstd[i];
                level[c] = group_means[2 * i] - slope[c] * mean[i];
            }
            for (int p = 0; p < s.HW; p++) {
                const float* x = in.x + (size_t)p * in.C;
                norm_dz(dz, dout, x, scale, shift, dropout, b, (size_t)p * C + c0, s);
                const size_t i = x - (c0 < s.C1 ? x1 : x2);
#pragma omp simd
                for (int c = 0; c < NB; c++) dz[c] = scale[c] * dz[c] - slope[c] * x[c] - level[c];
                for (int c = 0; c < NB; c++) g.dx[i + c] = with_addends(g, i + c, dz[c]);
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// attention: S = q k^T / sqrt(d), P = softmax(S), out = P v. A GPU's backward pass makes P from SoftmaxRow again, a CPU's from q and k.

// P (T, pitch): the softmax of one head. A row is divided by the sum of the very numbers that it holds, and the difference of two scores comes before
// their factor, which would round large ones (10^6 by 0.06): so rows add up to 1 and equal scores have equal parts, however large they are.
static inline void attention_probabilities(float* P, size_t pitch, const float* q, const float* kT, size_t ld, int T,
                                           int d) {
    const float scale = 1 / std::sqrt((float)d);
    matmul(P, pitch, q, ld, kT, pitch, T, T, d);
    for (int t = 0; t < T; t++) {
        float* row = P + t * pitch;
        const float top = *std::max_element(row, row + T);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int s = 0; s < T; s++) sum += row[s] = fast_exp((row[s] - top) * scale);
        const float part = 1 / sum;
        for (int s = 0; s < T; s++) row[s] *= part;
    }
}

static inline void attention_forward(float* out, SoftmaxRow*, const float* qkv, int B, int T, int C, int heads) {
    const int d = C / heads, pitch = round_up(T, TN), dp = round_up(d, TN);
    const size_t ld = 3 * (size_t)C;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
            std::vector<float> kT((size_t)d * pitch), v((size_t)T * dp), P((size_t)T * pitch);
            const float* q = qkv + (size_t)b * T * ld + h * d;
            transpose(kT.data(), pitch, q + C, ld, T, d);
            for (int t = 0; t < T; t++) std::copy(q + 2 * C + t * ld, q + 2 * C + t * ld + d, &v[(size_t)t * dp]);
            attention_probabilities(P.data(), pitch, q, kT.data(), ld, T, d);
            matmul(out + (size_t)b * T * C + h * d, C, P.data(), pitch, v.data(), dp, T, d, T);
        }
}

// dv = P^T dout,  dP = dout v^T,  dS = P (dP - rowsum(dout * out)),  dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d)
static inline void attention_backward(float* dqkv, const float* dout, const float* qkv, const float* out,
                                      const SoftmaxRow*, int B, int T, int C, int heads) {
    const int d = C / heads, pitch = round_up(T, TN), dp = round_up(d, TN);
    const size_t ld = 3 * (size_t)C;
    const float scale = 1 / std::sqrt((float)d);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
            std::vector<float> kT((size_t)d * pitch), vT(kT), rows((size_t)T * dp), P((size_t)T * pitch), dS(P),
                turned(P);
            const size_t head = (size_t)b * T * C + h * d;
            const float *q = qkv + (size_t)b * T * ld + h * d, *o = out + head, *go = dout + head;
            float* dq = dqkv + (size_t)b * T * ld + h * d;
            auto dense = [&](const float* m, size_t from, float factor) { // (T, d), of rows this far apart, as (T, dp)
                for (int t = 0; t < T; t++)
                    for (int c = 0; c < d; c++) rows[(size_t)t * dp + c] = m[t * from + c] * factor;
            };
            transpose(kT.data(), pitch, q + C, ld, T, d);
            transpose(vT.data(), pitch, q + 2 * C, ld, T, d);
            attention_probabilities(P.data(), pitch, q, kT.data(), ld, T, d);
            transpose(turned.data(), pitch, P.data(), pitch, T, T);
            dense(go, C, 1);
            matmul(dq + 2 * C, ld, turned.data(), pitch, rows.data(), dp, T, d, T); // dv
            matmul(dS.data(), pitch, go, C, vT.data(), pitch, T, T, d);             // dP
            for (int t = 0; t < T; t++) {
                double dot = 0;
                for (int c = 0; c < d; c++) dot += (double)go[(size_t)t * C + c] * o[(size_t)t * C + c];
                for (int s = 0; s < T; s++) dS[t * pitch + s] = P[t * pitch + s] * (dS[t * pitch + s] - (float)dot);
            }
            dense(q + C, ld, scale);
            matmul(dq, ld, dS.data(), pitch, rows.data(), dp, T, d, T); // dq
            transpose(turned.data(), pitch, dS.data(), pitch, T, T);
            dense(q, ld, scale);
            matmul(dq + C, ld, turned.data(), pitch, rows.data(), dp, T, d, T); // dk
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// resampling without parameters: average pool 2x2, nearest neighbour 2x; H, W are those of the input of the forward pass

static inline void downsample_forward(float* out, Stats* stats, const float* x, int B, int H, int W, int C) {
    const int Ho = H / 2, Wo = W / 2;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * Ho * Wo; p++) {
        const int b = p / (Ho * Wo), h = p / Wo % Ho, w = p % Wo;
        const float *r0 = x + (((size_t)b * H + 2 * h) * W + 2 * w) * C, *r1 = r0 + (size_t)W * C;
        for (int c = 0; c < C; c++) out[(size_t)p * C + c] = 0.25f * (r0[c] + r0[C + c] + r1[c] + r1[C + c]);
    }
    if (stats) channel_stats(stats, out, B, Ho * Wo, C);
}

static inline void downsample_backward(GradOf<float> dx, const float* dout, int B, int H, int W, int C) {
    const int Ho = H / 2, Wo = W / 2;
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * H * W; p++) {
        const int b = p / (H * W), h = p / W % H / 2, w = p % W / 2;
        const bool inside = h < Ho && w < Wo; // an odd last row or column was not pooled
        const float* d = dout + (((size_t)b * Ho + h) * Wo + w) * C;
        for (int c = 0; c < C; c++)
            dx.dx[(size_t)p * C + c] = with_addends(dx, (size_t)p * C + c, inside ? 0.25f * d[c] : 0.0f);
    }
}

static inline void upsample_forward(float* out, Stats* stats, const float* x, int B, int H, int W, int C) {
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * 2 * H * 2 * W; p++) {
        const int b = p / (4 * H * W), h = p / (2 * W) % (2 * H) / 2, w = p % (2 * W) / 2;
        memcpy(out + (size_t)p * C, x + (((size_t)b * H + h) * W + w) * C, C * sizeof(float));
    }
    if (stats) channel_stats(stats, out, B, 4 * H * W, C);
}

static inline void upsample_backward(GradOf<float> dx, const float* dout, int B, int H, int W, int C) {
#pragma omp parallel for schedule(static)
    for (int p = 0; p < B * H * W; p++) {
        const int b = p / (H * W), h = p / W % H, w = p % W;
        const float *r0 = dout + (((size_t)b * 2 * H + 2 * h) * 2 * W + 2 * w) * C, *r1 = r0 + (size_t)2 * W * C;
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)p * C + c;
            dx.dx[i] = with_addends(dx, i, r0[c] + r0[C + c] + r1[c] + r1[C + c]);
        }
    }
}

static inline void to_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    for (size_t i = 0; i < (size_t)B * H * W * C; i++) out[place_in_patches(i, H, W, C, p)] = x[i];
}

static inline void from_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    for (size_t i = 0; i < (size_t)B * H * W * C; i++) out[i] = x[place_in_patches(i, H, W, C, p)];
}

// ---------------------------------------------------------------------------------------------------------------------
// embeddings

// guided-diffusion's timestep_embedding
static inline void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period,
                                              Lane* = MAIN_LANE) {
    const int half = dim / 2;
    for (int b = 0; b < B; b++)
        for (int i = 0; i < half; i++) {
            const double angle = (double)t[b] * (float)std::exp(-std::log((double)max_period) * i / half);
            out[(size_t)b * dim + i] = (float)std::cos(angle);
            out[(size_t)b * dim + half + i] = (float)std::sin(angle);
        }
}

static inline void label_embedding_forward(float* out, const float* x, const float* table, const int* labels, int B,
                                           int C, Lane* = MAIN_LANE) {
    for (int b = 0; b < B; b++)
        for (int c = 0; c < C; c++) out[(size_t)b * C + c] = x[(size_t)b * C + c] + table[(size_t)labels[b] * C + c];
}

static inline void label_embedding_backward(GradOf<float> dx, float* dtable, const float* dout, const int* labels,
                                            int B, int rows, int C) {
    std::fill(dtable, dtable + (size_t)rows * C, 0.0f);
    for (int b = 0; b < B; b++)
        for (int c = 0; c < C; c++) {
            const size_t i = (size_t)b * C + c;
            dx.dx[i] = with_addends(dx, i, dout[i]);
            dtable[(size_t)labels[b] * C + c] += dout[i];
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// diffusion

static inline Words random_words(const RandomKey& key, int block, int b) {
    return philox(key.seed, (uint32_t)block, (uint32_t)(key.sample0 + b), (uint32_t)*key.step, key.purpose);
}

static inline void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key) {
    for (int b = 0; b < B; b++) {
        levels[b] = draw_level(o, random_words(key, 0, b));
        t[b] = levels[b].t;
        quarters[b] = levels[b].quarter;
    }
}

static inline void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key) {
    for (int b = 0; b < B; b++) {
        teachers[b] = draw_teacher(o, random_words(key, 0, b));
        t[b] = teachers[b].t;
    }
}

static inline void update_weights(double* weights, float* history, const NoiseLevel* levels, const double* loss,
                                  const StepState* state, int T, int B) {
    for (int t = 0; t < T; t++)
        weights[t] = remember_losses(history + (size_t)t * (HISTORY + 1), t, levels, loss, state->ok ? B : 0);
}

// Element e of a sample is word e % 4 of Philox block e / 4.
static inline void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale = 1, bool add = false) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++)
        for (int e = 0; e < per_sample; e += 4) {
            float z[4];
            normals(z, random_words(key, e / 4, b));
            for (int k = 0; k < 4 && e + k < per_sample; k++) {
                float& v = out[(size_t)b * per_sample + e + k];
                v = scale * z[k] + (add ? v : 0);
            }
        }
}

static inline void q_sample_forward(float* x_t, float* target, const NoiseLevel* levels, const float* teacher,
                                    const void* images, bool random_flip, RandomKey noise_key, RandomKey flip_key,
                                    int B, int C, int H, int W, int bytes) {
    draw_normals(target, B, H * W * C, noise_key);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const bool flip = random_flip && (random_words(flip_key, 0, b).w[0] & 1);
        const NoiseLevel& l = levels[b];
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++)
                for (int c = 0; c < C; c++) {
                    const size_t in = (((size_t)b * C + c) * H + h) * W + (flip ? W - 1 - w : w);
                    const size_t i = (((size_t)b * H + h) * W + w) * C + c;
                    const uint8_t* const whole = (const uint8_t*)images;
                    const float x0 = bytes == 1 ? whole[in] / 127.5f - 1.0f : ((const float*)images)[in];
                    const float noise = target[i];
                    x_t[i] = l.signal * x0 + l.sigma * noise;
                    target[i] = l.target_x0 * x0 + l.target_noise * noise;
                    if (teacher) target[i] += l.target_teacher * teacher[i];
                }
    }
}

static inline void loss_forward_backward(double* loss, float* dout, const float* out, const float* target,
                                         const float* x, const NoiseLevel* levels, const Objective& o, float factor,
                                         int B, int HW, int C, int Cout) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const NoiseLevel& l = levels[b];
        const float mse = o.mse * l.weight, bound = o.bound * l.importance, slope = factor / ((float)HW * C);
        double sum = 0;
        for (int p = 0; p < HW; p++) {
            const size_t i = ((size_t)b * HW + p) * Cout, j = ((size_t)b * HW + p) * C;
            for (int c = 0; c < Cout; c++) dout[i + c] = 0;
            for (int c = 0; c < C; c++) {
                const float d = out[i + c] - target[j + c];
                sum += (double)mse * d * d;
                dout[i + c] = 2 * d * mse * slope;
                if (!(o.bound > 0)) continue;
                const BoundTerm term =
                    bound_term(l, d, Cout > C ? out[i + C + c] : 0, l.x0_x * x[j + c] + l.x0_out * target[j + c]);
                sum += (double)bound * term.value;
                // else the bound leaves the mean alone (eq. 16 of Nichol & Dhariwal)
                if (o.mse == 0) dout[i + c] = slope * bound * term.d_mean;
                if (Cout > C) dout[i + C + c] = slope * bound * term.d_variance;
            }
        }
        loss[b] = sum / ((double)HW * C);
    }
}

static inline void tuning_loss_forward_backward(double* loss, float* dout, const float* out, const float* target,
                                                const NoiseLevel* levels, float c, float factor, int B, int n) {
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        const size_t first = (size_t)b * n;
        double distance = 0;
        for (size_t i = first; i < first + n; i++) {
            const float d = levels[b].x0_out * (out[i] - target[i]);
            distance += (double)d * d;
        }
        const TuningLoss l = tuning_loss(levels[b], distance, c);
        loss[b] = l.value;
        const float slope = (float)(factor * l.slope);
        for (size_t i = first; i < first + n; i++) dout[i] = slope * (out[i] - target[i]);
    }
}

static inline void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B) {
    for (int b = 0; b < B; b++) t[b] = steps[*k].t;
}

static inline void sampler_step(float* x, const float* out, const SamplerStep* steps, const Denoising& d, RandomKey key,
                                int B, int HW, int C, int Cout) {
    const SamplerStep s = steps[*key.step];
    const int n = HW * C;
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        std::vector<float> x0(n), sorted;
        for (int e = 0; e < n; e++) {
            const size_t at = ((size_t)b * HW + e / C) * Cout + e % C;
            float answer = out[at];
            if (d.guided) {
                const float unconditional = out[at + (size_t)B * HW * Cout];
                answer = unconditional + d.guidance * (answer - unconditional);
            }
            x0[e] = s.x0_x * x[(size_t)b * n + e] + s.x0_out * answer;
        }
        float limit = 1;
        if (d.rank >= 0) {
            for (float v : x0) sorted.push_back(std::isnan(v) ? INFINITY : std::fabs(v));
            std::nth_element(sorted.begin(), sorted.begin() + d.rank, sorted.end());
            limit = std::max(sorted[d.rank], 1.0f);
        }
        for (int e = 0; e < n; e++) {
            const size_t i = (size_t)b * n + e;
            if (d.limit) x0[e] = (x0[e] < -limit ? -limit : x0[e] > limit ? limit : x0[e]) / limit; // NaN stays NaN
            float next = s.next_x * x[i] + s.next_x0 * x0[e];
            if (s.next_m != 0) next += s.next_m * d.m[i];
            if (s.m_x != 0 || s.m_x0 != 0) d.m[i] = s.m_x * x[i] + s.m_x0 * x0[e];
            x[i] = next;
        }
        for (int e = 0; e < n && s.sigma > 0; e += 4) {
            float z[4];
            normals(z, random_words(key, e / 4, b));
            for (int k = 0; k < 4 && e + k < n; k++) {
                const float v = s.range > 0 ? out[((size_t)b * HW + (e + k) / C) * Cout + C + (e + k) % C] : 0;
                x[(size_t)b * n + e + k] +=
                    z[k] * (s.range > 0 ? std::exp(s.log_sigma + s.range * 0.5f * (v + 1)) : s.sigma);
            }
        }
        if (d.guided) std::copy_n(x + (size_t)b * n, n, x + (size_t)(B + b) * n);
    }
}

static inline void keep_known(float* x, const float* image, const float* mask, const SamplerStep* steps, RandomKey key,
                              bool guided, int B, int n) {
    const SamplerStep s = steps[*key.step];
    const RandomKey back_key{key.seed, RANDOM_BACK_NOISE, key.step, key.sample0};
    for (int b = 0; b < B && s.known_x != 0; b++)
        for (int e = 0; e < n; e += 4) {
            float known[4], back[4];
            normals(known, random_words(key, e / 4, b));
            normals(back, random_words(back_key, e / 4, b));
            for (int k = 0; k < 4 && e + k < n; k++) {
                const size_t i = (size_t)b * n + e + k;
                x[i] = s.back_x * (mask[i] > 0 ? x[i] : s.known_x * image[i] + s.known_sigma * known[k]) +
                       s.back_sigma * back[k];
                if (guided) x[i + (size_t)B * n] = x[i];
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// optimiser

static inline void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < grads.slice.owned(); i += PIECE) {
        const size_t at = grads.slice.flat(i), n = grads.slice.n, count = at < n ? std::min(n - at, PIECE) : 0;
        float piece[PIECE]; // sum may be where the own gradients are
        std::copy_n((add ? sum : grads.of(0)) + at, count, piece);
        for (int r = !add; r < grads.slice.ranks; r++) {
            const float* more = grads.of(r) + at;
#pragma omp simd
            for (size_t i = 0; i < count; i++) piece[i] += more[i];
        }
        std::copy_n(piece, count, sum + at);
        double total = 0;
#pragma omp simd reduction(+ : total)
        for (size_t i = 0; i < count; i++) total += (double)piece[i] * piece[i];
        squares.at[0][at / PIECE] = total;
    }
}

static inline void judge_step(StepState* state, const double* squares, size_t pieces, const double* loss,
                              const int* quarters, AdamW h, int B) {
    double total = 0;
    for (size_t k = 0; k < pieces; k++) total += squares[k];
    state->grad_norm = std::sqrt(total);
    LossSums losses{};
    for (int b = 0; b < B; b++) add_loss(&losses, loss[b], quarters[b]);
    judge_batch(state, losses, h, B);
}

static inline void next_step(int64_t* step) { ++*step; }

static inline void record_step(StepState* records, const StepState* state, int count) {
    records[(state->step - 1) % count] = *state;
}

// The convolutions' weights in the type of the activations; in fp32 they are the parameters themselves.
static inline void cast_params(float*, const float*, size_t) {}

static inline void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own) { // the copy: see Weights
    if (!state->ok) return;
    // Clipping as torch's clip_grad_norm_
    const double clip = h.grad_clip > 0 ? std::min(1.0, h.grad_clip / (state->grad_norm + 1e-6)) : 1.0;
    const float scale = (float)clip, decay = 1 - state->lr * h.weight_decay;
    const float step_size = (float)(state->lr / (1 - std::pow((double)h.beta1, (double)state->updates)));
    const float root = (float)std::sqrt(1 - std::pow((double)h.beta2, (double)state->updates));
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < own.owned(); at += PIECE) {
        const size_t flat = own.flat(at), end = flat < own.n ? at + std::min(own.n - flat, PIECE) : at;
        float *const params = u.params.at[0] + flat - at, *const ema = u.ema, *const m = u.m, *const v = u.v;
        const float* const grads = u.sum + flat - at;
#pragma omp simd
        for (size_t i = at; i < end; i++) {
            const float g = grads[i] * scale;
            m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
            v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
            params[i] = params[i] * decay - step_size * m[i] / (std::sqrt(v[i]) / root + h.eps);
            ema[i] = h.ema_rate * ema[i] + (1 - h.ema_rate) * params[i];
        }
    }
}

static inline void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    if (!state->ok) return;
    const float step = power_step(rate, state->updates);
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < own.owned(); i++)
        if (const size_t k = own.flat(i); k < own.n) ema[i] = ema_step(ema[i], params[k], rate, step);
}
