// conv.h - what conv3x3.cu and conv1x1.cu share: reading a case, naive versions, the benchmark.
//
//   out[b,h,w,co] = bias[co] + emb[b,co] + residual[b,h,w,co]
//                   + sum over kh, kw, ci of x[b, h * stride + kh - pad, w * stride + kw - pad, ci] * weight[co,kh,kw,ci]
//
// x = [x1 | x2] are two tensors side by side in the channels, so that concatenation never happens; with upsample the pixel (y, x) of the input
// stands at (2y, 2x), (2y, 2x+1), (2y+1, 2x), (2y+1, 2x+1). emb and residual may be missing.
#pragma once
#include "cublas.h"

// The input pixel under tap (kh, kw) of output pixel (h, w), or -1 in the padding.
HD static int pixel_under(const ConvShape& s, int h, int w, int kh, int kw) {
    const int y = h * s.stride + kh - s.kernel / 2, x = w * s.stride + kw - s.kernel / 2;
    if (y < 0 || x < 0 || y >= s.H << s.upsample || x >= s.W << s.upsample) return -1;
    return (y >> s.upsample) * s.W + (x >> s.upsample);
}

// The two inputs as one.
struct ConvInput {
    Values x1, x2;
    ConvShape s;

    HD float at(int b, int pixel, int ci) const {
        const size_t p = (size_t)b * s.H * s.W + pixel;
        return ci < s.C1 ? x1[p * s.C1 + ci] : x2[p * s.C2 + ci - s.C1];
    }
};

// What is added to a sum: bias, embedding, residual. o: place of output (b, ..., co)
struct ConvAddends {
    const float *bias, *emb;
    int emb_stride;
    Values residual;

    HD float at(size_t o, int b, int co) const {
        return bias[co] + (emb ? emb[(size_t)b * emb_stride + co] : 0) + (residual.p ? residual[o] : 0);
    }
};

// Version 0: the definition, one output at a time.
static void conv_forward_v0(act* out, const act* x1, const act* x2, const act* weight, const float* bias,
                            const float* emb, int emb_stride, const act* residual, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel;
    const ConvInput x{values(x1, s.in), values(x2), s};
    const ConvAddends add{bias, emb, emb_stride, values(residual)};
    const Values w_ = values(weight), o = values(out, s.out);
    each((size_t)s.B * Ho * Wo * s.Cout, [=] HD(size_t i) {
        const int co = (int)(i % s.Cout), w = (int)(i / s.Cout % Wo), h = (int)(i / s.Cout / Wo % Ho),
                  b = (int)(i / s.Cout / Wo / Ho);
        float sum = add.at(i, b, co);
        for (int kh = 0; kh < k; kh++)
            for (int kw = 0; kw < k; kw++) {
                const int source = pixel_under(s, h, w, kh, kw);
                if (source < 0) continue; // padding
                for (int ci = 0; ci < Cin; ci++)
                    sum += x.at(b, source, ci) * w_[((size_t)(co * k + kh) * k + kw) * Cin + ci];
            }
        o.set(i, sum);
    });
}

#ifdef __CUDACC__
// Version 1: a block of 256 threads has 64 output pixels x 64 channels, a thread 4 x 4 of them, in registers. The sum runs over all (tap, channel), 16 at
// a time: 16 x 64 inputs (gathered from under the tap; the patches exist nowhere else) and 16 x 64 weights go to shared memory, where each is read by 16
// threads.
static __global__ void __launch_bounds__(256)
    conv_forward_v1_kernel(Values out, ConvInput x, Values weight, ConvAddends add) {
    __shared__ float inputs[16][64 + 1], weights[16][64 + 1]; // + 1: the threads that fill a column hit different banks
    const ConvShape& s = x.s;
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, K = s.kernel * s.kernel * Cin, pixels = s.B * Ho * Wo;
    const int p0 = blockIdx.x * 64, c0 = blockIdx.y * 64, row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
        for (int i = threadIdx.x; i < 16 * 64; i += 256) { // neighbouring threads, neighbouring channels
            const int k = k0 + i % 16, p = p0 + i / 16, co = c0 + i / 16, tap = k / Cin;
            const int source =
                k < K && p < pixels ? pixel_under(s, p / Wo % Ho, p % Wo, tap / s.kernel, tap % s.kernel) : -1;
            inputs[i % 16][i / 16] = source < 0 ? 0 : x.at(p / Wo / Ho, source, k - tap * Cin);
            weights[i % 16][i / 16] = k < K && co < s.Cout ? weight[(size_t)co * K + k] : 0;
        }
        __syncthreads();
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) acc[i][j] += inputs[k][row + i] * weights[k][column + j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int p = p0 + row + i, co = c0 + column + j;
            const size_t o = (size_t)p * s.Cout + co;
            if (p < pixels && co < s.Cout) out.set(o, acc[i][j] + add.at(o, p / Wo / Ho, co));
        }
}

static void conv_forward_v1(act* out, const act* x1, const act* x2, const act* weight, const float* bias,
                            const float* emb, int emb_stride, const act* residual, ConvShape s) {
    const dim3 grid(ceil_div(s.B * s.out_H() * s.out_W(), 64), ceil_div(s.Cout, 64));
    conv_forward_v1_kernel<<<grid, 256, 0, device.queue>>>(values(out, s.out),
                                                           ConvInput{values(x1, s.in), values(x2), s}, values(weight),
                                                           ConvAddends{bias, emb, emb_stride, values(residual)});
    CUDA_CHECK(cudaGetLastError());
}
#else
// Version 1: output channels innermost. weight_t (kh, kw, Cin, Cout) makes the innermost loop a multiply-add of whole vectors, and one load of x
// serves all output channels; but every multiply-add still loads and stores its sum. The shipped version keeps a tile of pixels x channels in
// registers.
static void conv_forward_v1(float* out, const float* x1, const float* x2, const float* weight, const float* bias,
                            const float* emb, int emb_stride, const float* residual, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel, K = k * k * Cin;
    const ConvInput input{values(x1), values(x2), s};
    const ConvAddends add{bias, emb, emb_stride, values(residual)};
    std::vector<float> weight_t((size_t)K * s.Cout);
    for (int co = 0; co < s.Cout; co++)
        for (int i = 0; i < K; i++) weight_t[(size_t)i * s.Cout + co] = weight[(size_t)co * K + i];
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < Ho; h++)
            for (int w = 0; w < Wo; w++) {
                const size_t first = (((size_t)b * Ho + h) * Wo + w) * s.Cout;
                float* o = out + first;
                for (int co = 0; co < s.Cout; co++) o[co] = add.at(first + co, b, co);
                for (int tap = 0; tap < k * k; tap++) {
                    const int source = pixel_under(s, h, w, tap / k, tap % k);
                    if (source < 0) continue;
                    for (int ci = 0; ci < Cin; ci++) {
                        const float x = input.at(b, source, ci);
                        const float* row = &weight_t[((size_t)tap * Cin + ci) * s.Cout];
                        for (int co = 0; co < s.Cout; co++) o[co] += x * row[co];
                    }
                }
            }
}
#endif

// Version 0 of the input gradient: each input asks which outputs read it. Output (h, w) read pixel (y, x) under tap (kh, kw) if
// h * stride + kh - pad = y, so h = (y + pad - kh) / stride if that is whole; of an upsampled pixel there are four.
static void conv_backward_input_v0(Grad dx1, Grad dx2, const act* dout, const act* weight, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel, copies = 1 << s.upsample;
    const Values d = values(dout, s.out), w_ = values(weight);
    for (int part = 0; part < 2; part++) {
        const Grad& g = part ? dx2 : dx1;
        const int C = part ? s.C2 : s.C1, c0 = part ? s.C1 : 0;
        const Values dx = values(g.dx, s.in), add1 = values(g.add1, s.in), add2 = values(g.add2, s.in);
        each((size_t)s.B * s.H * s.W * C, [=] HD(size_t i) {
            const int ci = c0 + (int)(i % C), x = (int)(i / C % s.W), y = (int)(i / C / s.W % s.H),
                      b = (int)(i / C / s.W / s.H);
            float sum = (add1.p ? add1[i] : 0) + (add2.p ? add2[i] : 0);
            for (int yy = y * copies; yy < (y + 1) * copies; yy++)
                for (int xx = x * copies; xx < (x + 1) * copies; xx++)
                    for (int tap = 0; tap < k * k; tap++) {
                        const int h = yy + k / 2 - tap / k, w = xx + k / 2 - tap % k;
                        if (h < 0 || w < 0 || h % s.stride || w % s.stride || h / s.stride >= Ho || w / s.stride >= Wo)
                            continue;
                        const size_t o = (((size_t)b * Ho + h / s.stride) * Wo + w / s.stride) * s.Cout;
                        for (int co = 0; co < s.Cout; co++)
                            sum += d[o + co] * w_[((size_t)co * k * k + tap) * Cin + ci];
                    }
            dx.set(i, sum);
        });
    }
}

// Version 0 of the weight gradient: each weight sums over all pixels of all images.
static void conv_backward_weight_v0(float* dweight, float* dbias, float* demb, int emb_stride, const act* dout,
                                    const act* x1, const act* x2, ConvShape s) {
    const int Ho = s.out_H(), Wo = s.out_W(), Cin = s.C1 + s.C2, k = s.kernel;
    const ConvInput x{values(x1, s.in), values(x2), s};
    const Values d = values(dout, s.out);
    each((size_t)s.Cout * k * k * Cin, [=] HD(size_t i) {
        const int ci = (int)(i % Cin), tap = (int)(i / Cin % (k * k)), co = (int)(i / Cin / (k * k));
        float sum = dweight[i];
        for (int p = 0; p < s.B * Ho * Wo; p++) {
            const int source = pixel_under(s, p / Wo % Ho, p % Wo, tap / k, tap % k);
            if (source >= 0) sum += d[(size_t)p * s.Cout + co] * x.at(p / Wo / Ho, source, ci);
        }
        dweight[i] = sum;
    });
    each(s.Cout, [=] HD(size_t co) {
        float sum = dbias[co];
        for (int p = 0; p < s.B * Ho * Wo; p++) sum += d[(size_t)p * s.Cout + co];
        dbias[co] = sum;
    });
    if (!demb) return;
    each((size_t)s.B * s.Cout, [=] HD(size_t i) {
        const size_t b = i / s.Cout, co = i % s.Cout;
        float sum = 0;
        for (int p = 0; p < Ho * Wo; p++) sum += d[(b * Ho * Wo + p) * s.Cout + co];
        demb[b * emb_stride + co] = sum;
    });
}

#ifdef CUBLASLT
// A 1x1 convolution as matrix products over pixels, one for each of its inputs.
struct CublasConv {
    struct Part {
        CublasProduct forward, dx, dweight;
        int c0; // its first channel
    };
    std::vector<std::unique_ptr<Part>> parts;

    explicit CublasConv(const ConvShape& s) {
        const int pixels = s.B * s.H * s.W, Cin = s.C1 + s.C2;
        for (const auto& [C, c0] : {std::pair(s.C1, 0), std::pair(s.C2, s.C1)})
            if (C)
                parts.emplace_back(new Part{
                    {pixels,
                     s.Cout,
                     C,
                     {act_element, C},
                     {act_element, Cin, true},
                     {act_element, s.Cout},
                     c0 == 0,
                     c0 > 0},
                    {pixels, C, s.Cout, {act_element, s.Cout}, {act_element, Cin}, {act_element, C}, false},
                    {s.Cout, C, pixels, {act_element, s.Cout, true}, {act_element, C}, {Element::FP32, Cin}, false},
                    c0,
                });
    }
    static const void* from(const act* weight, int c0) { return (const char*)weight + (size_t)c0 * act_bytes(); }
    // For each part: run(product, what it writes and reads)
    template <class F> void forward(F run, act* out, const act* x1, const act* x2, const act* weight, const act* bias) {
        for (auto& p : parts) run(p->forward, out, p->c0 ? x2 : x1, from(weight, p->c0), p->c0 ? nullptr : bias);
    }
    template <class F> void dx(F run, act* dx1, act* dx2, const act* dout, const act* weight) {
        for (auto& p : parts) run(p->dx, p->c0 ? dx2 : dx1, dout, from(weight, p->c0), nullptr);
    }
    template <class F> void dweight(F run, float* dweight, const act* dout, const act* x1, const act* x2) {
        for (auto& p : parts) run(p->dweight, dweight + p->c0, dout, p->c0 ? x2 : x1, nullptr);
    }
    static void once(CublasProduct& product, void* out, const void* a, const void* b, const void* bias) {
        product(out, a, b, bias);
    }
    static void tune(CublasProduct& product, void* out, const void* a, const void* b, const void* bias) {
        product.tune(out, a, b, bias);
    }
};
#endif

// The bytes of an array of numbers that FP8 has.
static const act* fp8_input(Arrays& io, const char* name, const Fp8Format& format = E4M3) {
    std::vector<uint8_t> bytes(count_of(io.get(name, "f4").dims));
    for (size_t i = 0; i < bytes.size(); i++) {
        bytes[i] = fp8_bits(io.host(name)[i], format);
        if (fp8_value(bytes[i], format) != io.host(name)[i]) die("%s: holds a number that FP8 does not have", name);
    }
    return (const act*)io.memory.upload(bytes.data(), bytes.size());
}

// The input gradient of a convolution in FP8: fp8_dout is e5m2, and the weights are turned (Cin, 8 - tap, Cout).
static void conv_check_fp8_gradient(Arrays& io) {
    const ConvShape s{.B = io.dim("fp8_dout", 0),
                      .H = io.dim("fp8_dout", 1),
                      .W = io.dim("fp8_dout", 2),
                      .C1 = io.dim("fp8_turned", 0),
                      .C2 = 0,
                      .Cout = io.dim("fp8_dout", 3),
                      .kernel = 3,
                      .stride = 1,
                      .upsample = 0,
                      .out = Element::FP8_GRADIENT};
    const act *dout = fp8_input(io, "fp8_dout", E5M2), *turned = fp8_input(io, "fp8_turned");
    const Grad dx{io.activation_output("dx", {s.B, s.H, s.W, s.C1})};
    conv_backward_input(dx, Grad{}, dout, turned, s, io.input<float>("fp8_factors"));
}

// A convolution whose input and weights are FP8 (arrays of numbers that FP8 has), with or without a skip connection.
static void conv_check_fp8(Arrays& io) {
    const ConvShape s{.B = io.dim("fp8_x", 0),
                      .H = io.dim("fp8_x", 1),
                      .W = io.dim("fp8_x", 2),
                      .C1 = io.dim("fp8_x", 3),
                      .C2 = 0,
                      .Cout = io.dim("fp8_weight", 0),
                      .kernel = 3,
                      .stride = 1,
                      .upsample = 0,
                      .in = Element::FP8};
    const bool has_emb = io.has("fp8_emb");
    const float* emb = has_emb ? io.input<float>("fp8_emb") + 64 : nullptr;
    const act* residual = io.activation("fp8_residual");
    ConvSkip skip = {};
    if (io.has("fp8_skip_x")) {
        ConvShape shape = s;
        shape.in = act_element;
        shape.kernel = 1;
        shape.C1 = io.dim("fp8_skip_x", 3);
        skip = {io.activation("fp8_skip_x"),      nullptr,  io.activation("fp8_skip_weight"),
                io.input<float>("fp8_skip_bias"), shape.C1, 0};
        if (!conv_takes_skip(s, shape)) { // as in a network, a layer of its own
            act* out = io.memory.poisoned_activation((size_t)s.B * s.H * s.W * s.Cout);
            conv_forward(out, nullptr, skip.x1, nullptr, skip.weight, skip.bias, nullptr, 0, nullptr, shape);
            residual = out;
            skip = {};
        }
        io.takes(skip.weight ? "skip" : "residual");
    }
    conv_forward(io.activation_output("out", {s.B, s.H, s.W, s.Cout}), io.stats("stats", s.B, s.H, s.W, s.Cout),
                 fp8_input(io, "fp8_x"), nullptr, fp8_input(io, "fp8_weight"), io.input<float>("fp8_bias"), emb,
                 io.dim("fp8_emb", 1), residual, s, skip, io.input<float>("fp8_factors"));
}

// The weight gradient of a convolution in FP8: fp8_x is e4m3, fp8_dout is e5m2.
static void conv_check_fp8_weights(Arrays& io) {
    const ConvShape s{.B = io.dim("fp8_x", 0),
                      .H = io.dim("fp8_x", 1),
                      .W = io.dim("fp8_x", 2),
                      .C1 = io.dim("fp8_x", 3),
                      .C2 = 0,
                      .Cout = io.dim("fp8_dout", 3),
                      .kernel = 3,
                      .stride = 1,
                      .upsample = 0,
                      .in = Element::FP8,
                      .out = Element::FP8_GRADIENT};
    WeightWork w = {};
    w.shape = s;
    w.dout_factor = io.input<float>("dout_factor");
    w.x1 = fp8_input(io, "fp8_x");
    w.dout = fp8_input(io, "fp8_dout", E5M2);
    w.dweight = io.output<float>("dweight", {s.Cout, 3, 3, s.C1});
    w.dbias = io.output<float>("dbias", {s.Cout});
    if (io.has("demb_start")) {
        w.demb = io.updated<float>("demb", "demb_start") + io.integer("emb_offset");
        w.emb_stride = io.dim("demb_start", 1);
    }
#ifdef __CUDACC__
    io.takes(plan_weight(s).splits > 1 ? "partials" : "one range");
#endif
    conv_backward_weights({w}, MAIN_STREAM);
}

static void conv_check(Arrays& io) {
    if (io.has("fp8_x") && io.has("fp8_dout")) return conv_check_fp8_weights(io);
    if (io.has("fp8_x")) return conv_check_fp8(io);
    if (io.has("fp8_dout")) return conv_check_fp8_gradient(io);
    ConvShape s{io.dim("x1", 0),     io.dim("x1", 1),           io.dim("x1", 2),
                io.dim("x1", 3),     io.dim("x2", 3),           io.dim("weight", 0),
                io.dim("weight", 1), (int)io.integer("stride"), (int)io.integer("upsample")};
    const bool first = s.C1 % 32, last = s.Cout % 32; // the network's first layer and its last: 1 to 8 channels
    if (first) s.in = Element::FP32;
    if (last) s.out = Element::FP32;
    const Dims out_dims{s.B, s.out_H(), s.out_W(), s.Cout}, x1_dims{s.B, s.H, s.W, s.C1}, x2_dims{s.B, s.H, s.W, s.C2};
    const int emb_stride = io.dim("emb", 1), emb_offset = io.has("emb") ? (int)io.integer("emb_offset") : 0;
    const act *x1 = io.activation("x1", s.in), *x2 = io.activation("x2"), *weight = io.activation("weight"),
              *dout = io.activation("dout", s.out), *residual = io.activation("residual");
    const float *bias = io.input<float>("bias"), *emb = io.has("emb") ? io.input<float>("emb") + emb_offset : nullptr;
    auto output = [&](const char* version) {
        return io.activation_output(std::string("out") + version, out_dims, s.out);
    };
    auto gradient_of_emb = [&](const char* name) {
        return io.has("emb") ? io.updated<float>(name, "demb_start") + emb_offset : nullptr;
    };

#ifdef __CUDACC__
    if (conv_is_wgmma(s))
        io.takes(
            text("%d warpgroups, %s", plan_weight(s).warpgroups, plan_weight(s).splits > 1 ? "partials" : "one range"));
#endif
    conv_forward(output(""), last ? nullptr : io.stats("stats", s.B, s.out_H(), s.out_W(), s.Cout), x1, x2, weight,
                 bias, emb, emb_stride, residual, s);
    conv_backward_weight(io.parameter_gradient("weight"), io.parameter_gradient("bias"), gradient_of_emb("demb"),
                         emb_stride, dout, x1, x2, s);
#ifdef __CUDACC__ // nobody needs the gradient of the images, and so no kernel makes it
    const bool naive = first;
#else
    const bool naive = false;
#endif
    const Grad dx1 = io.gradient("dx1", x1_dims, s.in), dx2 = s.C2 ? io.gradient("dx2", x2_dims) : Grad{};
    if (naive) conv_backward_input_v0(dx1, dx2, dout, weight, s);
    else conv_backward_input(dx1, dx2, dout, weight, s);

    conv_forward_v0(output(".v0"), x1, x2, weight, bias, emb, emb_stride, residual, s);
    conv_forward_v1(output(".v1"), x1, x2, weight, bias, emb, emb_stride, residual, s);
    conv_backward_weight_v0(io.parameter_gradient("weight", ".v0"), io.parameter_gradient("bias", ".v0"),
                            gradient_of_emb("demb.v0"), emb_stride, dout, x1, x2, s);
    conv_backward_input_v0(io.gradient("dx1", x1_dims, s.in, ".v0"),
                           s.C2 ? io.gradient("dx2", x2_dims, act_element, ".v0") : Grad{}, dout, weight, s);
#ifdef CUBLASLT
    if (s.kernel > 1 || !cublas_is_checked()) return;
    CublasConv cublas(s);
    if (!residual) cublas.forward(CublasConv::once, output(".cublas"), x1, x2, weight, io.activation("bias"));
    cublas.dweight(CublasConv::once, io.parameter_gradient("weight", ".cublas"), dout, x1, x2);
    if (!io.has("dx1")) {
        act* const dx2 = s.C2 ? io.activation_output("dx2.cublas", x2_dims) : nullptr;
        cublas.dx(CublasConv::once, io.activation_output("dx1.cublas", x1_dims), dx2, dout, weight);
    }
#endif
}

// All shapes of this kernel size in the models; the naive versions on one of each image size or, on a CPU, where they end in a moment.
static void conv_bench(int kernel) {
    auto shape_of = [](const ModelLayer& m) { return m.args().conv(); };
    auto describe = [&](const ModelLayer& m) {
        const ConvShape s = shape_of(m);
        if (s.kernel != kernel) return std::string();
        return text("B=%d H=%d W=%d C1=%d C2=%d Cout=%d stride=%d up=%d", s.B, s.H, s.W, s.C1, s.C2, s.Cout, s.stride,
                    s.upsample);
    };
    for_each_shape(CONV, describe, [&](const ModelLayer& m, const std::string& shape) {
        const ConvShape s = shape_of(m);
        const size_t n1 = (size_t)s.B * s.H * s.W * s.C1, n2 = (size_t)s.B * s.H * s.W * s.C2,
                     no = (size_t)s.B * s.out_H() * s.out_W() * s.Cout;
        const size_t nw = (size_t)s.Cout * kernel * kernel * (s.C1 + s.C2);
        const double flop = 2.0 * no * kernel * kernel * (s.C1 + s.C2);
        const double bytes = 1.0 * n1 * bytes_of(s.in) + n2 * act_bytes() + no * bytes_of(s.out);
        const Work work{flop, bytes + nw * act_bytes()}, weight_work{flop, bytes + 4.0 * nw}; // dweight is fp32
        BenchArrays a(work.bytes);
        const auto x1 = a.activation(n1, s.in), x2 = a.activation(n2), out = a.activation(no, s.out),
                   weight = a.activation(nw);
        const auto bias = a.floats(s.Cout), dweight = a.floats(nw), dbias = a.floats(s.Cout);
        Stats stats = poisoned_stats(a.memory, s.B, s.out_H(), s.out_W(), s.Cout);
        auto part2 = [&](int k) { return s.C2 ? x2[k] : nullptr; };
        auto grad2 = [&](int k) { return Grad{part2(k), nullptr, nullptr}; };

#ifdef __CUDACC__
        const bool naive = s.C1 == s.Cout && !s.C2 && s.stride == 1 && m.net->config.preset == "unet64";
#else
        const bool naive = flop < 2e8;
#endif
        auto forward_v0 = [&](int k) {
            conv_forward_v0(out[k], x1[k], part2(k), weight[k], bias[k], nullptr, 0, nullptr, s);
        };
        auto forward_v1 = [&](int k) {
            conv_forward_v1(out[k], x1[k], part2(k), weight[k], bias[k], nullptr, 0, nullptr, s);
        };
        auto forward = [&](int k) {
            conv_forward(out[k], &stats, x1[k], part2(k), weight[k], bias[k], nullptr, 0, nullptr, s);
        };
        // gradients: dout lies in out's place, dx in x's
        auto dx_v0 = [&](int k) {
            conv_backward_input_v0(Grad{x1[k], nullptr, nullptr}, grad2(k), out[k], weight[k], s);
        };
        auto dx = [&](int k) { conv_backward_input(Grad{x1[k], nullptr, nullptr}, grad2(k), out[k], weight[k], s); };
        auto dweight_v0 = [&](int k) {
            conv_backward_weight_v0(dweight[k], dbias[k], nullptr, 0, out[k], x1[k], part2(k), s);
        };
        auto dweight_ = [&](int k) {
            conv_backward_weight(dweight[k], dbias[k], nullptr, 0, out[k], x1[k], part2(k), s);
        };
        std::function<void(int)> cublas_forward, cublas_dx,
            cublas_dweight; // of 1x1 convolutions, where this build has cuBLASLt
#ifdef CUBLASLT
        CublasConv cublas(s);
        const auto act_bias = a.activation(s.Cout);
        if (kernel == 1) {
            cublas.forward(CublasConv::tune, out[0], x1[0], part2(0), weight[0], act_bias[0]);
            cublas.dx(CublasConv::tune, x1[0], part2(0), out[0], weight[0]);
            cublas.dweight(CublasConv::tune, dweight[0], out[0], x1[0], part2(0));
            cublas_forward = [&](int k) {
                cublas.forward(CublasConv::once, out[k], x1[k], part2(k), weight[k], act_bias[k]);
            };
            cublas_dx = [&](int k) { cublas.dx(CublasConv::once, x1[k], part2(k), out[k], weight[k]); };
            cublas_dweight = [&](int k) { cublas.dweight(CublasConv::once, dweight[k], out[k], x1[k], part2(k)); };
        }
#endif
        if (naive) bench_row(shape, "forward.v0", work, a, forward_v0);
        if (naive) bench_row(shape, "forward.v1", work, a, forward_v1);
        bench_row(shape, "forward", work, a, forward, cublas_forward);
        if (naive) bench_row(shape, "dx.v0", work, a, dx_v0);
        if (s.C1 % 32 == 0) bench_row(shape, "dx", work, a, dx, cublas_dx); // nobody wants the gradient of the images
        if (naive) bench_row(shape, "dweight.v0", weight_work, a, dweight_v0);
        bench_row(shape, "dweight", weight_work, a, dweight_, cublas_dweight);
    });
}
