// groupnorm.cu - group norm over one or two tensors side by side, with what follows it: scale and shift from the embedding, SiLU, dropout.
//
//   xhat = (x - mean_g) * rstd_g        mean and variance over the pixels of one image and the C / groups channels of group g
//   z    = xhat * weight + bias         or, with use_scale_shift_norm, (xhat * weight + bias) * (1 + scale) + shift
//   out  = dropout(silu(z))             each of the two where wanted
//   x1 (B, HW, C1), x2 (B, HW, C2), weight, bias (C), scale_shift (B, stride): scale in [0, C), shift in [C, 2C)
//   The sums for mean and variance (stats, per image and channel) come from whoever wrote x: one pass over x less.
//   bytes    4 * 2 B HW C forward (read x, write out), 4 * 3 backward (x, dout, dx), or 4 * 5 in two passes; FLOPs do not matter
//
//   version 0   the definition: a pass for the mean, a pass for the variance around it, a pass for the output. On a GPU a thread has a group: B * 32
//               threads, which do not fill a GPU, and neighbours read addresses far apart. Backward by the chain rule: sums, a thread for each image and
//               channel; then dx, a thread per element, which adds up its group's sums (H200, 64 channels at 64x64, batch 32, bf16: 6.2 ms, backward 3.7 ms)
//   version 1   one pass for both sums, var = E[x^2] - E[x]^2: a third of the reads less. In double, because the difference cancels when
//               |mean| >> std. On a GPU a block of 256 threads has a group, and adds up in shared memory; the output is written in the same launch
//               (0.13 ms: with 2 channels to a group neighbouring threads still read addresses apart)
//   shipped     groupnorm_forward: the whole norm is one multiply-add per element, out = silu(x * a + b), a and b folded per image and channel, in
//               one pass, since the sums come with x; groupnorm_backward: one pass for the sums of dz and dz * x, one for dx, or both in one where an
//               image fits on the chip
//
//   make -C dev groupnorm && dev/groupnorm       python dev/pairs/groupnorm.py [--bench]
#include "harness.h"

// What the naive versions read, element by element.
struct NormInputs {
    Values x1, x2;
    const float *weight, *bias, *scale_shift;
    int ss_stride;
    NormShape s;

    HD int C() const { return s.C1 + s.C2; }
    HD int Cg() const { return C() / s.groups; }
    HD float x(int b, int p, int c) const {
        const size_t pixel = (size_t)b * s.HW + p;
        return c < s.C1 ? x1[pixel * s.C1 + c] : x2[pixel * s.C2 + c - s.C1];
    }
    HD float scale(int b, int c) const { return scale_shift ? 1 + scale_shift[(size_t)b * ss_stride + c] : 1; }
    HD float shift(int b, int c) const { return scale_shift ? scale_shift[(size_t)b * ss_stride + C() + c] : 0; }
    HD float z(int b, int c, float xhat) const { return (xhat * weight[c] + bias[c]) * scale(b, c) + shift(b, c); }
    HD float out(int b, int p, int c, double mean, double rstd) const {
        const float v = z(b, c, (float)((x(b, p, c) - mean) * rstd));
        return s.nonlinearity == Nonlinearity::SILU ? v / (1 + expf(-v)) : v;
    }
};

static void groupnorm_forward_v0(act* out, const NormInputs& in) {
    const Values o = values(out);
    each((size_t)in.s.B * in.s.groups, [=] HD(size_t i) {
        const int b = (int)i / in.s.groups, HW = in.s.HW, Cg = in.Cg(), first = (int)i % in.s.groups * Cg;
        double sum = 0, square = 0;
        for (int p = 0; p < HW; p++)
            for (int c = first; c < first + Cg; c++) sum += in.x(b, p, c);
        const double mean = sum / ((double)HW * Cg);
        for (int p = 0; p < HW; p++)
            for (int c = first; c < first + Cg; c++) square += (in.x(b, p, c) - mean) * (in.x(b, p, c) - mean);
        const double rstd = 1 / sqrt(square / ((double)HW * Cg) + in.s.eps);
        for (int p = 0; p < HW; p++)
            for (int c = first; c < first + Cg; c++)
                o.set(((size_t)b * HW + p) * in.C() + c, in.out(b, p, c, mean, rstd));
    });
}

#ifdef __CUDACC__
// The sum of v over the 256 threads of a block, in all of them.
static __device__ double sum_of_256(double v) {
    __shared__ double sums[256];
    __syncthreads(); // whoever reads the last sum still does
    sums[threadIdx.x] = v;
    for (int half = 128; half; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

static __global__ void __launch_bounds__(256) groupnorm_forward_v1_kernel(Values out, NormInputs in) {
    const int b = blockIdx.x / in.s.groups, Cg = in.Cg(), first = blockIdx.x % in.s.groups * Cg, n = in.s.HW * Cg;
    double sum = 0, square = 0;
    for (int i = threadIdx.x; i < n; i += 256) { // neighbouring threads, neighbouring channels
        const double x = in.x(b, i / Cg, first + i % Cg);
        sum += x;
        square += x * x;
    }
    const double mean = sum_of_256(sum) / n, rstd = 1 / sqrt(sum_of_256(square) / n - mean * mean + in.s.eps);
    for (int i = threadIdx.x; i < n; i += 256)
        out.set(((size_t)b * in.s.HW + i / Cg) * in.C() + first + i % Cg,
                in.out(b, i / Cg, first + i % Cg, mean, rstd));
}

static void groupnorm_forward_v1(act* out, const NormInputs& in) {
    groupnorm_forward_v1_kernel<<<in.s.B * in.s.groups, 256, 0, device.queue>>>(values(out), in);
    CUDA_CHECK(cudaGetLastError());
}
#else
static void groupnorm_forward_v1(float* out, const NormInputs& in) {
    const int HW = in.s.HW, Cg = in.Cg();
    const double n = (double)HW * Cg;
    for (int b = 0; b < in.s.B; b++)
        for (int first = 0; first < in.C(); first += Cg) {
            double sum = 0, square = 0;
            for (int p = 0; p < HW; p++)
                for (int c = first; c < first + Cg; c++) {
                    const double x = in.x(b, p, c);
                    sum += x;
                    square += x * x;
                }
            const double mean = sum / n, rstd = 1 / sqrt(square / n - mean * mean + in.s.eps);
            for (int p = 0; p < HW; p++)
                for (int c = first; c < first + Cg; c++)
                    out[((size_t)b * HW + p) * in.C() + c] = in.out(b, p, c, mean, rstd);
        }
}
#endif

// The chain rule. The mean and the variance depend on every x of the group, which makes the two averages in dx. sums (B, C, 2): scratch
static void groupnorm_backward_v0(Grad dx1, Grad dx2, float* dweight, float* dbias, float* dscale_shift,
                                  const act* dout, const NormInputs& in, const float* mean, const float* rstd,
                                  double* sums) {
    const NormShape s = in.s;
    const int C = in.C(), Cg = in.Cg();
    const Values d = values(dout);
    auto xhat_and_dz = [=] HD(int b, int p, int c, float* xhat) {
        const int g = b * s.groups + c / Cg;
        *xhat = (in.x(b, p, c) - mean[g]) * rstd[g];
        const float z = in.z(b, c, *xhat), sg = 1 / (1 + expf(-z));
        return d[((size_t)b * s.HW + p) * C + c] * (s.nonlinearity == Nonlinearity::SILU ? sg * (1 + z * (1 - sg)) : 1);
    };
    each((size_t)s.B * C, [=] HD(size_t i) { // sums over the pixels of dz and dz * xhat
        const int b = (int)i / C, c = (int)i % C;
        double sum = 0, product = 0;
        float xhat;
        for (int p = 0; p < s.HW; p++) {
            const float dz = xhat_and_dz(b, p, c, &xhat);
            sum += dz;
            product += (double)dz * xhat;
        }
        sums[2 * i] = sum;
        sums[2 * i + 1] = product;
        if (!dscale_shift) return;
        dscale_shift[(size_t)b * in.ss_stride + c] = (float)(product * in.weight[c] + sum * in.bias[c]);
        dscale_shift[(size_t)b * in.ss_stride + C + c] = (float)sum;
    });
    each(C, [=] HD(size_t c) {
        double sum = 0, product = 0;
        for (int b = 0; b < s.B; b++) {
            sum += sums[2 * ((size_t)b * C + c)] * in.scale(b, (int)c);
            product += sums[2 * ((size_t)b * C + c) + 1] * in.scale(b, (int)c);
        }
        dbias[c] += (float)sum;
        dweight[c] += (float)product;
    });
    const Values to[2] = {values(dx1.dx), values(dx2.dx)}, add[2] = {values(dx1.add1), values(dx1.add2)};
    each((size_t)s.B * s.HW * C, [=] HD(size_t i) {
        const int c = (int)(i % C), p = (int)(i / C % s.HW), b = (int)(i / C / s.HW), first = c / Cg * Cg;
        double mean_d = 0, mean_dx = 0; // over the group: dxhat, dxhat * xhat
        for (int k = first; k < first + Cg; k++) {
            const double slope = in.scale(b, k) * in.weight[k] / ((double)s.HW * Cg);
            mean_d += slope * sums[2 * ((size_t)b * C + k)];
            mean_dx += slope * sums[2 * ((size_t)b * C + k) + 1];
        }
        float xhat;
        const float dxhat = xhat_and_dz(b, p, c, &xhat) * in.scale(b, c) * in.weight[c];
        const float dx = (float)(rstd[b * s.groups + c / Cg] * (dxhat - mean_d - xhat * mean_dx));
        const size_t pixel = (size_t)b * s.HW + p, at = c < s.C1 ? pixel * s.C1 + c : pixel * s.C2 + c - s.C1;
        if (c < s.C1) to[0].set(at, dx + (add[0].p ? add[0][at] : 0) + (add[1].p ? add[1][at] : 0));
        else to[1].set(at, dx);
    });
}

static void check(Arrays& io) {
    const NormShape s{io.dim("x1", 0),
                      io.dim("x1", 1) * io.dim("x1", 2),
                      io.dim("x1", 3),
                      io.dim("x2", 3),
                      32,
                      (Nonlinearity)io.integer("silu"),
                      1e-5f};
    const int C = s.C1 + s.C2, H = io.dim("x1", 1), W = io.dim("x1", 2), ss_stride = io.dim("scale_shift", 1);
    const int ss_offset = ss_stride ? (int)io.integer("ss_offset") : 0;
    const Dims out_dims{s.B, H, W, C}, x1_dims{s.B, H, W, s.C1}, x2_dims{s.B, H, W, s.C2};
    const int64_t step = io.integer("step");
    const Dropout dropout{(float)io.real("p"), (uint64_t)io.integer("seed"), io.memory.upload(&step, 1),
                          io.integer("sample0"), (uint32_t)io.integer("layer")};

    // the shipped version
    const act *x1 = io.activation("x1"), *x2 = io.activation("x2"), *dout = io.activation("dout");
    const float *weight = io.input<float>("weight"), *bias = io.input<float>("bias");
    const float* ss = ss_stride ? io.input<float>("scale_shift") + ss_offset : nullptr;
    float* dss = ss_stride ? io.updated<float>("dscale_shift", "dscale_shift_start") + ss_offset : nullptr;
    float *mean = io.output<float>("mean", {s.B, s.groups}), *rstd = io.output<float>("rstd", {s.B, s.groups});
#ifdef __CUDACC__
    const int chunks = plan_norm_whole(s, io.has("dx1")).chunks;
    if (gpu.clusters) io.takes(chunks ? text("clusters of %d", chunks) : "two passes");
#endif
    groupnorm_forward(io.activation_output("out", out_dims), mean, rstd, x1, Stats{io.input<double>("stats_x1"), 1}, x2,
                      Stats{io.input<double>("stats_x2"), 1}, weight, bias, ss, ss_stride, dropout, s);
    // An output in FP8, whose numbers are divided by the factor again.
    auto fp8_output = [&](const char* name, const Dims& dims, const Fp8Format& format) {
        const float factor = (float)io.real("factor");
        const size_t n = count_of(dims);
        uint8_t* const bytes = io.memory.poisoned<uint8_t>(n);
        io.out.push_back({name, [=] {
                              std::vector<float> values;
                              for (const uint8_t b : download(bytes, n))
                                  values.push_back(fp8_value(b, format) / factor);
                              return Arrays::packed(values, dims);
                          }});
        return Fp8Copy{bytes, io.memory.upload(&factor, 1)};
    };
    const bool fp8 = io.has("factor");
    if (fp8) // once more, in FP8
        groupnorm_forward(nullptr, mean, rstd, x1, Stats{io.input<double>("stats_x1"), 1}, x2,
                          Stats{io.input<double>("stats_x2"), 1}, weight, bias, ss, ss_stride, dropout, s,
                          fp8_output("fp8", out_dims, E4M3));
    do_nothing(); // as in a network, the kernel just before the backward pass is another one
    const Grad dx1 = io.gradient("dx1", x1_dims), dx2 = s.C2 ? io.gradient("dx2", x2_dims) : Grad{};
    // Where there are two inputs, only the first one's gradient is written in FP8, too.
    groupnorm_backward(dx1, dx2, io.parameter_gradient("weight"), io.parameter_gradient("bias"), dss, dout, x1, x2,
                       mean, rstd, weight, bias, ss, ss_stride, dropout, s,
                       fp8 ? fp8_output("dx1_fp8", x1_dims, E5M2) : Fp8Copy{});

    // the naive ones, which know no dropout
    if (dropout.p > 0) return;
    const NormInputs in{values(x1), values(x2), weight, bias, ss, ss_stride, s};
    groupnorm_forward_v0(io.activation_output("out.v0", out_dims), in);
    groupnorm_forward_v1(io.activation_output("out.v1", out_dims), in);
    groupnorm_backward_v0(io.gradient("dx1", x1_dims, act_element, ".v0"),
                          s.C2 ? io.gradient("dx2", x2_dims, act_element, ".v0") : Grad{},
                          io.parameter_gradient("weight", ".v0"), io.parameter_gradient("bias", ".v0"),
                          ss ? io.updated<float>("dscale_shift.v0", "dscale_shift_start") + ss_offset : nullptr, dout,
                          in, mean, rstd, io.memory.poisoned<double>((size_t)s.B * C * 2));
}

static void bench() {
    auto shape_of = [](const ModelLayer& m) { return m.args().norm(); };
    auto describe = [&](const ModelLayer& m) {
        const NormShape s = shape_of(m);
        return text("B=%d HW=%d C1=%d C2=%d silu=%d", s.B, s.HW, s.C1, s.C2, (int)s.nonlinearity);
    };
    for_each_shape(GROUPNORM, describe, [&](const ModelLayer& m, const std::string& shape) {
        const NormShape s = shape_of(m);
        const int C = s.C1 + s.C2;
        const size_t n1 = (size_t)s.B * s.HW * s.C1, n2 = (size_t)s.B * s.HW * s.C2, n = n1 + n2;
        const Work forward_work{0, 2.0 * n * act_bytes()}, backward_work{0, 3.0 * n * act_bytes()};
        BenchArrays a(backward_work.bytes);
        const auto x1 = a.activation(n1), x2 = a.activation(n2), out = a.activation(n), dx1 = a.activation(n1),
                   dx2 = a.activation(n2);
        const float *weight = random_floats(a.memory, C), *bias = random_floats(a.memory, C);
        float *dweight = random_floats(a.memory, C), *dbias = random_floats(a.memory, C);
        float *mean = a.memory.poisoned<float>(s.B * s.groups), *rstd = a.memory.poisoned<float>(s.B * s.groups);
        const std::vector<double> sums((size_t)s.B * C * 2,
                                       s.HW / 3.0); // plausible: a third is the mean square of [-1, 1)
        const Stats stats{a.memory.upload(sums.data(), sums.size()), 1};
        double* scratch = a.memory.upload(sums.data(), sums.size());
        auto in = [&](int k) { return NormInputs{values(x1[k]), values(x2[k]), weight, bias, nullptr, 0, s}; };
        auto grad = [](act* dx) { return Grad{dx, nullptr, nullptr}; };
        auto second = [&](const auto& array, int k) { return s.C2 ? array[k] : nullptr; };

#ifdef __CUDACC__
        const bool naive = !s.C2;
#else
        const bool naive = n < 1 << 19;
#endif
        if (naive) bench_row(shape, "forward.v0", forward_work, a, [&](int k) { groupnorm_forward_v0(out[k], in(k)); });
        if (naive) bench_row(shape, "forward.v1", forward_work, a, [&](int k) { groupnorm_forward_v1(out[k], in(k)); });
        bench_row(shape, "forward", forward_work, a, [&](int k) {
            groupnorm_forward(out[k], mean, rstd, x1[k], stats, second(x2, k), stats, weight, bias, nullptr, 0,
                              Dropout{}, s);
        });
        if (naive)
            bench_row(shape, "backward.v0", backward_work, a, [&](int k) {
                groupnorm_backward_v0(grad(dx1[k]), grad(second(dx2, k)), dweight, dbias, nullptr, out[k], in(k), mean,
                                      rstd, scratch);
            });
        bench_row(shape, "backward", backward_work, a, [&](int k) {
            groupnorm_backward(grad(dx1[k]), grad(second(dx2, k)), dweight, dbias, nullptr, out[k], x1[k],
                               second(x2, k), mean, rstd, weight, bias, nullptr, 0, Dropout{}, s);
        });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
