// groupnorm.cu - group norm over one or two tensors side by side, with what follows it: scale and shift from the embedding, SiLU, dropout.
//
//   xhat = (x - mean_g) * rstd_g        mean and variance over the pixels of one image and the C / groups channels of group g
//   z    = xhat * weight + bias         or, with use_scale_shift_norm, (xhat * weight + bias) * (1 + scale) + shift
//   out  = dropout(silu(z))             each of the two where wanted
//   x1 (B, HW, C1), x2 (B, HW, C2), weight, bias (C), scale_shift (B, stride): scale in [0, C), shift in [C, 2C)
//   The sums for mean and variance (stats, per image and channel) come from whoever wrote x: one pass over x less.
//   bytes    4 * 2 B HW C forward (read x, write out), 4 * 5 backward (x and dout twice, write dx); FLOPs do not matter
//
//   version 0   the definition: a pass for the mean, a pass for the variance around it, a pass for the output; backward by the chain rule
//   version 1   one pass for both sums, var = E[x^2] - E[x]^2: half of the reads. In double, because the difference cancels when |mean| >> std
//   shipped     groupnorm_forward: the whole norm is one multiply-add per element, out = silu(x * a + b), a and b folded per image and channel;
//               groupnorm_backward: one pass for the sums of dz and dz * xhat, one for dx
//
//   make -C dev groupnorm && dev/groupnorm       python dev/groupnorm.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

// Inputs on the host, as the naive versions read them.
struct NormInputs {
    const float *x1, *x2, *weight, *bias, *scale_shift;
    int ss_stride;

    float x(const NormShape& s, size_t pixel, int c) const { return c < s.C1 ? x1[pixel * s.C1 + c] : x2[pixel * s.C2 + c - s.C1]; }
    float scale(const NormShape&, int b, int c) const { return scale_shift ? 1 + scale_shift[(size_t)b * ss_stride + c] : 1; }
    float shift(const NormShape& s, int b, int c) const { return scale_shift ? scale_shift[(size_t)b * ss_stride + s.C1 + s.C2 + c] : 0; }
};

// out for one group whose mean and rstd are known
static void norm_group(float* out, const NormInputs& in, int b, int first, int last, double mean, double rstd, const NormShape& s) {
    const int C = s.C1 + s.C2;
    for (int p = 0; p < s.HW; p++)
        for (int c = first; c < last; c++) {
            const size_t pixel = (size_t)b * s.HW + p;
            const float xhat = (float)((in.x(s, pixel, c) - mean) * rstd);
            const float z = (xhat * in.weight[c] + in.bias[c]) * in.scale(s, b, c) + in.shift(s, b, c);
            out[pixel * C + c] = s.silu ? z / (1 + expf(-z)) : z;
        }
}

static void groupnorm_forward_v0(float* out, const NormInputs& in, NormShape s) {
    const int Cg = (s.C1 + s.C2) / s.groups;
    const double n = (double)s.HW * Cg;
    for (int b = 0; b < s.B; b++)
        for (int first = 0; first < s.C1 + s.C2; first += Cg) {
            double sum = 0, square = 0;
            for (int p = 0; p < s.HW; p++)
                for (int c = first; c < first + Cg; c++) sum += in.x(s, (size_t)b * s.HW + p, c);
            const double mean = sum / n;
            for (int p = 0; p < s.HW; p++)
                for (int c = first; c < first + Cg; c++) square += pow(in.x(s, (size_t)b * s.HW + p, c) - mean, 2);
            norm_group(out, in, b, first, first + Cg, mean, 1 / sqrt(square / n + s.eps), s);
        }
}

static void groupnorm_forward_v1(float* out, const NormInputs& in, NormShape s) {
    const int Cg = (s.C1 + s.C2) / s.groups;
    const double n = (double)s.HW * Cg;
    for (int b = 0; b < s.B; b++)
        for (int first = 0; first < s.C1 + s.C2; first += Cg) {
            double sum = 0, square = 0;
            for (int p = 0; p < s.HW; p++)
                for (int c = first; c < first + Cg; c++) {
                    const double x = in.x(s, (size_t)b * s.HW + p, c);
                    sum += x;
                    square += x * x;
                }
            const double mean = sum / n;
            norm_group(out, in, b, first, first + Cg, mean, 1 / sqrt(square / n - mean * mean + s.eps), s);
        }
}

// The chain rule, group by group. The mean and the variance depend on every x of the group, which makes the two averages in dx.
static void groupnorm_backward_v0(float* dx1, float* dx2, float* dweight, float* dbias, float* dscale_shift, const float* dout, const NormInputs& in,
                                  const float* mean, const float* rstd, NormShape s) {
    const int C = s.C1 + s.C2, Cg = C / s.groups;
    auto xhat_dz = [&](int b, int p, int c, float* xhat, float* dz) {
        const size_t pixel = (size_t)b * s.HW + p;
        const int g = b * s.groups + c / Cg;
        *xhat = (in.x(s, pixel, c) - mean[g]) * rstd[g];
        const float z = (*xhat * in.weight[c] + in.bias[c]) * in.scale(s, b, c) + in.shift(s, b, c), sg = 1 / (1 + expf(-z));
        *dz = dout[pixel * C + c] * (s.silu ? sg * (1 + z * (1 - sg)) : 1);
    };
    for (int b = 0; b < s.B; b++)
        for (int c0 = 0; c0 < C; c0 += Cg) {
            double mean_d = 0, mean_dx = 0; // over the group: dxhat, dxhat * xhat
            float xhat, dz;
            for (int c = c0; c < c0 + Cg; c++) {
                double sum_dz = 0, sum_dzx = 0;
                for (int p = 0; p < s.HW; p++) {
                    xhat_dz(b, p, c, &xhat, &dz);
                    sum_dz += dz;
                    sum_dzx += (double)dz * xhat;
                }
                dbias[c] += (float)(sum_dz * in.scale(s, b, c));
                dweight[c] += (float)(sum_dzx * in.scale(s, b, c));
                if (dscale_shift) dscale_shift[(size_t)b * in.ss_stride + c] = (float)(sum_dzx * in.weight[c] + sum_dz * in.bias[c]);
                if (dscale_shift) dscale_shift[(size_t)b * in.ss_stride + C + c] = (float)sum_dz;
                mean_d += sum_dz * in.scale(s, b, c) * in.weight[c] / ((double)s.HW * Cg);
                mean_dx += sum_dzx * in.scale(s, b, c) * in.weight[c] / ((double)s.HW * Cg);
            }
            for (int p = 0; p < s.HW; p++)
                for (int c = c0; c < c0 + Cg; c++) {
                    xhat_dz(b, p, c, &xhat, &dz);
                    const size_t pixel = (size_t)b * s.HW + p;
                    const double dxhat = dz * in.scale(s, b, c) * in.weight[c];
                    (c < s.C1 ? dx1[pixel * s.C1 + c] : dx2[pixel * s.C2 + c - s.C1]) =
                        (float)(rstd[b * s.groups + c / Cg] * (dxhat - mean_d - xhat * mean_dx));
                }
        }
}

static void check(Arrays& io) {
    const NormShape s{io.dim("x1", 0), io.dim("x1", 1) * io.dim("x1", 2), io.dim("x1", 3), io.dim("x2", 3), 32, io.integer("silu") != 0, 1e-5f};
    const int C = s.C1 + s.C2, H = io.dim("x1", 1), W = io.dim("x1", 2), ss_stride = io.dim("scale_shift", 1);
    const int ss_offset = ss_stride ? (int)io.integer("ss_offset") : 0;
    const Dims out_dims{s.B, H, W, C}, x1_dims{s.B, H, W, s.C1}, x2_dims{s.B, H, W, s.C2};
    const int64_t step = io.integer("step");
    const Dropout dropout{(float)io.real("p"), (uint64_t)io.integer("seed"), io.memory.upload(&step, 1), io.integer("sample0"),
                          (uint32_t)io.integer("layer")};

    // the shipped version
    const act *x1 = io.activation("x1"), *x2 = io.activation("x2"), *dout = io.activation("dout");
    const float *weight = io.input<float>("weight"), *bias = io.input<float>("bias");
    const float* ss = ss_stride ? io.input<float>("scale_shift") + ss_offset : nullptr;
    float* dss = ss_stride ? io.updated<float>("dscale_shift", "dscale_shift_start") + ss_offset : nullptr;
    float *mean = io.output<float>("mean", {s.B, s.groups}), *rstd = io.output<float>("rstd", {s.B, s.groups});
    groupnorm_forward(io.activation_output("out", out_dims), mean, rstd, x1, io.input<double>("stats1"), x2, io.input<double>("stats2"), weight, bias,
                      ss, ss_stride, dropout, s);
    groupnorm_backward(io.gradient("dx1", x1_dims), s.C2 ? io.gradient("dx2", x2_dims) : Grad{}, io.updated<float>("dweight", "dweight"),
                       io.updated<float>("dbias", "dbias"), dss, dout, x1, x2, mean, rstd, weight, bias, ss, ss_stride, dropout, s);

    // the naive ones, which know neither dropout nor addends
    if (dropout.p > 0) return;
    const NormInputs in{io.host("x1"), io.host("x2"), io.host("weight"), io.host("bias"), ss ? io.host("scale_shift") + ss_offset : nullptr,
                        ss_stride};
    groupnorm_forward_v0(io.host_output("out.v0", out_dims), in, s);
    groupnorm_forward_v1(io.host_output("out.v1", out_dims), in, s);
    if (io.has("dx1")) return;
    groupnorm_backward_v0(io.host_output("dx1.v0", x1_dims), s.C2 ? io.host_output("dx2.v0", x2_dims) : nullptr,
                          io.host_updated("dweight.v0", "dweight"), io.host_updated("dbias.v0", "dbias"),
                          ss ? io.host_updated("dscale_shift.v0", "dscale_shift_start") + ss_offset : nullptr, io.host("dout"), in,
                          download(mean, (size_t)s.B * s.groups).data(), download(rstd, (size_t)s.B * s.groups).data(), s);
}

static void bench() {
    auto shape_of = [](const ModelLayer& m) { return norm_shape(m.net, *m.layer, m.B); };
    auto describe = [&](const ModelLayer& m) {
        const NormShape s = shape_of(m);
        return text("B=%d HW=%d C1=%d C2=%d silu=%d", s.B, s.HW, s.C1, s.C2, s.silu);
    };
    for_each_shape(GROUPNORM, describe, [&](const ModelLayer& m, const std::string& shape) {
        const NormShape s = shape_of(m);
        const int C = s.C1 + s.C2;
        const size_t n1 = (size_t)s.B * s.HW * s.C1, n2 = (size_t)s.B * s.HW * s.C2, n = n1 + n2;
        Memory memory;
        const act *x1 = random_activation(memory, n1), *x2 = s.C2 ? random_activation(memory, n2) : nullptr, *dout = random_activation(memory, n);
        act *out = memory.poisoned_activation(n), *dx1 = memory.poisoned_activation(n1), *dx2 = s.C2 ? memory.poisoned_activation(n2) : nullptr;
        const float *weight = random_floats(memory, C), *bias = random_floats(memory, C);
        float *dweight = random_floats(memory, C), *dbias = random_floats(memory, C);
        float *mean = memory.poisoned<float>(s.B * s.groups), *rstd = memory.poisoned<float>(s.B * s.groups);
        const std::vector<double> sums((size_t)s.B * C * 2, s.HW / 3.0); // plausible: a third is the mean square of [-1, 1)
        const double* stats = memory.upload(sums.data(), sums.size());

        if (n < 1 << 19) {
            const std::vector<float> h1 = random_values(n1), h2 = random_values(n2), hw = random_values(C);
            std::vector<float> host_out(n);
            const NormInputs in{h1.data(), h2.data(), hw.data(), hw.data(), nullptr, 0};
            bench_row(shape, "forward.v0", 0, 2.0 * n * sizeof(float), [&] { groupnorm_forward_v0(host_out.data(), in, s); });
            bench_row(shape, "forward.v1", 0, 2.0 * n * sizeof(float), [&] { groupnorm_forward_v1(host_out.data(), in, s); });
        }
        bench_row(shape, "forward", 0, 2.0 * n * act_bytes(),
                  [&] { groupnorm_forward(out, mean, rstd, x1, stats, x2, stats, weight, bias, nullptr, 0, Dropout{}, s); });
        bench_row(shape, "backward", 0, 5.0 * n * act_bytes(), [&] {
            groupnorm_backward(Grad{dx1, nullptr, nullptr}, Grad{dx2, nullptr, nullptr}, dweight, dbias, nullptr, dout, x1, x2, mean, rstd, weight,
                               bias, nullptr, 0, Dropout{}, s);
        });
    });
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
