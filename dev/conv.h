// conv.h - what conv3x3.cu and conv1x1.cu share: reading a case, naive versions, the benchmark.
//
//   out[b,h,w,co] = bias[co] + emb[b,co] + residual[b,h,w,co]
//                   + sum over kh, kw, ci of x[b, h * stride + kh - pad, w * stride + kw - pad, ci] * weight[co,kh,kw,ci]
//
// x = [x1 | x2] are two tensors side by side in the channels, so that concatenation never happens; with upsample the pixel (y, x) of the input
// stands at (2y, 2x), (2y, 2x+1), (2y+1, 2x), (2y+1, 2x+1). emb and residual may be missing.
#pragma once
#include "harness.h"

// Inputs on the host, as the naive versions read them.
struct ConvInputs {
    const float *x1, *x2, *weight, *bias, *emb, *residual;
    int emb_stride;

    // x[b, y, x, ci] of the concatenated tensor
    float x(const ConvShape& s, int b, int source, int ci) const {
        const size_t pixel = (size_t)b * s.H * s.W + source;
        return ci < s.C1 ? x1[pixel * s.C1 + ci] : x2[pixel * s.C2 + ci - s.C1];
    }
};

// The input pixel under tap (kh, kw) of output pixel (h, w), or -1 in the padding.
static int pixel_under(const ConvShape& s, int h, int w, int kh, int kw) {
    const int y = h * s.stride + kh - s.kernel / 2, x = w * s.stride + kw - s.kernel / 2;
    if (y < 0 || x < 0 || y >= s.H << s.upsample || x >= s.W << s.upsample) return -1;
    return (y >> s.upsample) * s.W + (x >> s.upsample);
}

// Version 0: the definition, one output at a time.
static void conv_forward_v0(float* out, const ConvInputs& in, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < Ho; h++)
            for (int w = 0; w < Wo; w++)
                for (int co = 0; co < s.Cout; co++) {
                    const size_t o = (((size_t)b * Ho + h) * Wo + w) * s.Cout + co;
                    float sum = in.bias[co];
                    for (int kh = 0; kh < k; kh++)
                        for (int kw = 0; kw < k; kw++) {
                            const int source = pixel_under(s, h, w, kh, kw);
                            if (source < 0) continue; // padding
                            for (int ci = 0; ci < Cin; ci++) sum += in.x(s, b, source, ci) * in.weight[((co * k + kh) * k + kw) * Cin + ci];
                        }
                    if (in.emb) sum += in.emb[(size_t)b * in.emb_stride + co];
                    if (in.residual) sum += in.residual[o];
                    out[o] = sum;
                }
}

// Version 1: output channels innermost. weight_t (kh, kw, Cin, Cout) makes the innermost loop a multiply-add of whole vectors, and one load of x
// serves all output channels; but every multiply-add still loads and stores its sum. The shipped version keeps a tile of pixels x channels in
// registers.
static void conv_forward_v1(float* out, const ConvInputs& in, const float* weight_t, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < Ho; h++)
            for (int w = 0; w < Wo; w++) {
                float* o = out + (((size_t)b * Ho + h) * Wo + w) * s.Cout;
                for (int co = 0; co < s.Cout; co++)
                    o[co] = in.bias[co] + (in.emb ? in.emb[(size_t)b * in.emb_stride + co] : 0) + (in.residual ? in.residual[o - out + co] : 0);
                for (int tap = 0; tap < k * k; tap++) {
                    const int source = pixel_under(s, h, w, tap / k, tap % k);
                    if (source < 0) continue;
                    for (int ci = 0; ci < Cin; ci++) {
                        const float x = in.x(s, b, source, ci);
                        const float* row = weight_t + ((size_t)tap * Cin + ci) * s.Cout;
                        for (int co = 0; co < s.Cout; co++) o[co] += x * row[co];
                    }
                }
            }
}

static std::vector<float> transposed_weight(const float* weight, ConvShape s) {
    const int taps = s.kernel * s.kernel, Cin = s.C1 + s.C2;
    std::vector<float> t((size_t)taps * Cin * s.Cout);
    for (int co = 0; co < s.Cout; co++)
        for (int i = 0; i < taps * Cin; i++) t[(size_t)i * s.Cout + co] = weight[(size_t)co * taps * Cin + i];
    return t;
}

// Version 0 backward: the same loops. Every product x * weight that went into out[o] sends dout[o] * weight to x and dout[o] * x to weight.
static void conv_backward_v0(float* dx1, float* dx2, float* dweight, float* dbias, const float* dout, const ConvInputs& in, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel;
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < Ho; h++)
            for (int w = 0; w < Wo; w++)
                for (int co = 0; co < s.Cout; co++) {
                    const float d = dout[(((size_t)b * Ho + h) * Wo + w) * s.Cout + co];
                    dbias[co] += d;
                    for (int kh = 0; kh < k; kh++)
                        for (int kw = 0; kw < k; kw++) {
                            const int source = pixel_under(s, h, w, kh, kw);
                            if (source < 0) continue;
                            const size_t pixel = (size_t)b * s.H * s.W + source, row = ((size_t)(co * k + kh) * k + kw) * Cin;
                            for (int ci = 0; ci < Cin; ci++) {
                                (ci < s.C1 ? dx1[pixel * s.C1 + ci] : dx2[pixel * s.C2 + ci - s.C1]) += d * in.weight[row + ci];
                                dweight[row + ci] += d * in.x(s, b, source, ci);
                            }
                        }
                }
}

// What a gradient starts from when it is summed up in place: its addends.
static float* start_gradient(Arrays& io, const std::string& name, const std::string& version, const Dims& dims) {
    float* dx = io.host_output(name + version, dims);
    for (size_t i = 0; i < count_of(dims); i++)
        dx[i] = (io.has(name) ? io.host(name)[i] : 0) + (io.has(name + "_add") ? io.host(name + "_add")[i] : 0);
    return dx;
}

static void conv_check(Arrays& io) {
    ConvShape s{io.dim("x1", 0),     io.dim("x1", 1),           io.dim("x1", 2),
                io.dim("x1", 3),     io.dim("x2", 3),           io.dim("weight", 0),
                io.dim("weight", 1), (int)io.integer("stride"), (int)io.integer("upsample")};
    s.fp32_in = s.C1 % 32 != 0; // the first layer and the last: 1 to 8 channels
    s.fp32_out = s.Cout % 32 != 0;
    const Dims out_dims{s.B, s.out_H(), s.out_W(), s.Cout}, x1_dims{s.B, s.H, s.W, s.C1}, x2_dims{s.B, s.H, s.W, s.C2};
    const int emb_stride = io.dim("emb", 1), emb_offset = io.has("emb") ? (int)io.integer("emb_offset") : 0;

    // the shipped version
    const act *x1 = io.activation("x1", s.fp32_in), *x2 = io.activation("x2"), *weight = io.activation("weight"),
              *dout = io.activation("dout", s.fp32_out);
    const float* emb = io.has("emb") ? io.input<float>("emb") + emb_offset : nullptr;
    float* demb = io.has("emb") ? io.updated<float>("demb", "demb_start") + emb_offset : nullptr;
    conv_forward(io.activation_output("out", out_dims, s.fp32_out), io.stats("stats", s.B, s.Cout), x1, x2, weight, io.input<float>("bias"), emb,
                 emb_stride, io.activation("residual"), s);
    conv_backward_weight(io.updated<float>("dweight", "dweight"), io.updated<float>("dbias", "dbias"), demb, emb_stride, dout, x1, x2, s);
    conv_backward_input(io.gradient("dx1", x1_dims, s.fp32_in), s.C2 ? io.gradient("dx2", x2_dims) : Grad{}, dout, weight, s);

    // the naive ones
    const ConvInputs in{io.host("x1"),       io.host("x2"), io.host("weight"), io.host("bias"), emb ? io.host("emb") + emb_offset : nullptr,
                        io.host("residual"), emb_stride};
    conv_forward_v0(io.host_output("out.v0", out_dims), in, s);
    conv_forward_v1(io.host_output("out.v1", out_dims), in, transposed_weight(in.weight, s).data(), s);
    float *dx1 = start_gradient(io, "dx1", ".v0", x1_dims), *dx2 = s.C2 ? start_gradient(io, "dx2", ".v0", x2_dims) : nullptr;
    conv_backward_v0(dx1, dx2, io.host_updated("dweight.v0", "dweight"), io.host_updated("dbias.v0", "dbias"), io.host("dout"), in, s);
}

// All shapes of this kernel size in the models; the naive versions on small ones alone, where they end in a moment.
static void conv_bench(int kernel) {
    auto shape_of = [](const ModelLayer& m) { return conv_shape(m.net, *m.layer, m.B); };
    auto describe = [&](const ModelLayer& m) {
        const ConvShape s = shape_of(m);
        if (s.kernel != kernel) return std::string();
        return text("B=%d H=%d W=%d C1=%d C2=%d Cout=%d stride=%d up=%d", s.B, s.H, s.W, s.C1, s.C2, s.Cout, s.stride, s.upsample);
    };
    for_each_shape(CONV, describe, [&](const ModelLayer& m, const std::string& shape) {
        const ConvShape s = shape_of(m);
        Memory memory;
        const size_t n1 = (size_t)s.B * s.H * s.W * s.C1, n2 = (size_t)s.B * s.H * s.W * s.C2, no = (size_t)s.B * s.out_H() * s.out_W() * s.Cout;
        const size_t nw = (size_t)s.Cout * kernel * kernel * (s.C1 + s.C2);
        const act *x1 = s.fp32_in ? random_floats(memory, n1) : random_activation(memory, n1), *x2 = s.C2 ? random_activation(memory, n2) : nullptr;
        const act* dout = s.fp32_out ? random_floats(memory, no) : random_activation(memory, no);
        const act* weight = random_activation(memory, nw);
        const float* bias = random_floats(memory, s.Cout);
        act *out = memory.poisoned<float>(no), *dx1 = memory.poisoned<float>(n1), *dx2 = s.C2 ? memory.poisoned_activation(n2) : nullptr;
        float *dweight = random_floats(memory, nw), *dbias = random_floats(memory, s.Cout);
        double* stats = memory.poisoned<double>((size_t)s.B * s.Cout * 2);
        const double flop = 2.0 * no * kernel * kernel * (s.C1 + s.C2);

        if (flop < 2e8) {
            const std::vector<float> h1 = random_values(n1), h2 = random_values(n2), hw = random_values(nw), hb = random_values(s.Cout),
                                     ht = transposed_weight(hw.data(), s);
            std::vector<float> host_out(no);
            const ConvInputs in{h1.data(), h2.data(), hw.data(), hb.data(), nullptr, nullptr, 0};
            bench_row(shape, "forward.v0", flop, 0, [&] { conv_forward_v0(host_out.data(), in, s); });
            bench_row(shape, "forward.v1", flop, 0, [&] { conv_forward_v1(host_out.data(), in, ht.data(), s); });
        }
        bench_row(shape, "forward", flop, 0, [&] { conv_forward(out, stats, x1, x2, weight, bias, nullptr, 0, nullptr, s); });
        bench_row(shape, "dx", flop, 0, [&] { conv_backward_input(Grad{dx1, nullptr, nullptr}, Grad{dx2, nullptr, nullptr}, dout, weight, s); });
        bench_row(shape, "dweight", flop, 0, [&] { conv_backward_weight(dweight, dbias, nullptr, 0, dout, x1, x2, s); });
    });
}
