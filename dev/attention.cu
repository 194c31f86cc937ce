// attention.cu - softmax attention of every pixel to every pixel, per head, straight from the NHWC buffer that the qkv convolution wrote.
//
//   qkv (B, T, 3C): q, k, v of C = heads * d channels each; out (B, T, C); lse (B, heads, T) = log sum exp of the scores, kept for the backward pass
//   S = q k^T / sqrt(d),  P = softmax(S),  out = P v
//   dv = P^T dout,  dP = dout v^T,  dS = P (dP - rowsum(dout * out)),  dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d)
//   FLOPs    4 B T^2 C forward, 10 B T^2 C backward (S is computed again)
//   bytes    4 * 4 B T C forward if P never leaves the chip; P itself would be 4 B heads T^2: at T = 256 and d = 32
//            twice that to write, and twice to read
//
//   version 0   the definition: a row of scores, its softmax, the weighted sum of v; backward the same, keeping P
//   version 1   online softmax (Milakov & Gimelshein 2018): one pass over the keys with a running maximum and rescaled sums, so that
//               no row of scores is stored. What fused GPU kernels do, tile by tile
//   shipped     attention_forward, attention_backward: on a CPU matrix products per head, on a GPU one fused kernel each way
//
//   make -C dev attention && dev/attention       python dev/attention.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

static float dot(const float* a, const float* b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// P (T): row t of the softmax of one head, whose q, k, v start at qkv with rows of 3C; returns log sum exp.
static float softmax_row(float* P, const float* qkv, int t, int T, int C, int d) {
    const float scale = 1 / sqrtf((float)d);
    float top = -INFINITY, sum = 0;
    for (int s = 0; s < T; s++) {
        P[s] = scale * dot(qkv + (size_t)t * 3 * C, qkv + (size_t)s * 3 * C + C, d);
        top = std::max(top, P[s]);
    }
    for (int s = 0; s < T; s++) sum += P[s] = expf(P[s] - top);
    for (int s = 0; s < T; s++) P[s] /= sum;
    return top + logf(sum);
}

static void attention_forward_v0(float* out, float* lse, const float* qkv, int B, int T, int C, int heads) {
    const int d = C / heads;
    std::vector<float> P(T);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
            const float* q = qkv + (size_t)b * T * 3 * C + h * d;
            for (int t = 0; t < T; t++) {
                lse[((size_t)b * heads + h) * T + t] = softmax_row(P.data(), q, t, T, C, d);
                float* o = out + ((size_t)b * T + t) * C + h * d;
                for (int i = 0; i < d; i++) {
                    float sum = 0;
                    for (int s = 0; s < T; s++) sum += P[s] * q[(size_t)s * 3 * C + 2 * C + i];
                    o[i] = sum;
                }
            }
        }
}

static void attention_forward_v1(float* out, float* lse, const float* qkv, int B, int T, int C, int heads) {
    const int d = C / heads;
    const float scale = 1 / sqrtf((float)d);
    std::vector<float> o(d);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < T; t++) {
                const float* head = qkv + (size_t)b * T * 3 * C + h * d;
                float top = -INFINITY, sum = 0;
                std::fill(o.begin(), o.end(), 0.0f);
                for (int s = 0; s < T; s++) {
                    const float *k = head + (size_t)s * 3 * C + C, *v = k + C, score = scale * dot(head + (size_t)t * 3 * C, k, d);
                    const float new_top = std::max(top, score), rescale = expf(top - new_top), p = expf(score - new_top);
                    sum = sum * rescale + p; // everything so far was relative to the old maximum
                    for (int i = 0; i < d; i++) o[i] = o[i] * rescale + p * v[i];
                    top = new_top;
                }
                for (int i = 0; i < d; i++) out[((size_t)b * T + t) * C + h * d + i] = o[i] / sum;
                lse[((size_t)b * heads + h) * T + t] = top + logf(sum);
            }
}

static void attention_backward_v0(float* dqkv, const float* dout, const float* qkv, int B, int T, int C, int heads) {
    const int d = C / heads;
    const float scale = 1 / sqrtf((float)d);
    std::vector<float> P(T), dP(T);
    std::fill(dqkv, dqkv + (size_t)B * T * 3 * C, 0.0f);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < T; t++) {
                const size_t base = (size_t)b * T * 3 * C + h * d, row = base + (size_t)t * 3 * C;
                const float* g = dout + ((size_t)b * T + t) * C + h * d;
                softmax_row(P.data(), qkv + base, t, T, C, d);
                float mean = 0; // of dP under P: the softmax's rows sum to one, so a common part of dP has no effect
                for (int s = 0; s < T; s++) {
                    dP[s] = dot(g, qkv + base + (size_t)s * 3 * C + 2 * C, d);
                    mean += P[s] * dP[s];
                }
                for (int s = 0; s < T; s++) {
                    const size_t other = base + (size_t)s * 3 * C;
                    const float dS = P[s] * (dP[s] - mean) * scale;
                    for (int i = 0; i < d; i++) {
                        dqkv[row + i] += dS * qkv[other + C + i];
                        dqkv[other + C + i] += dS * qkv[row + i];
                        dqkv[other + 2 * C + i] += P[s] * g[i];
                    }
                }
            }
}

static void check(Arrays& io) {
    const int B = io.dim("qkv", 0), T = io.dim("qkv", 1), C = io.dim("qkv", 2) / 3, heads = (int)io.integer("heads");
    const act *qkv = io.activation("qkv"), *dout = io.activation("dout");
    act* out = io.activation_output("out", {B, T, C});
    float* lse = io.output<float>("lse", {B, heads, T});
    attention_forward(out, lse, qkv, B, T, C, heads);
    attention_backward(io.activation_output("dqkv", {B, T, 3 * C}), dout, qkv, out, lse, B, T, C, heads);

    attention_forward_v0(io.host_output("out.v0", {B, T, C}), io.host_output("lse.v0", {B, heads, T}), io.host("qkv"), B, T, C, heads);
    attention_forward_v1(io.host_output("out.v1", {B, T, C}), io.host_output("lse.v1", {B, heads, T}), io.host("qkv"), B, T, C, heads);
    attention_backward_v0(io.host_output("dqkv.v0", {B, T, 3 * C}), io.host("dout"), io.host("qkv"), B, T, C, heads);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& out = m.tensor(m.layer->out);
        return text("B=%d T=%d C=%d heads=%d", m.B, out.H * out.W, out.C, m.layer->heads);
    };
    for_each_shape(ATTENTION, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& o = m.tensor(m.layer->out);
        const int B = m.B, T = o.H * o.W, C = o.C, heads = m.layer->heads;
        const size_t n = (size_t)B * T * C;
        Memory memory;
        const act *qkv = random_activation(memory, 3 * n), *dout = random_activation(memory, n);
        act *out = memory.poisoned_activation(n), *dqkv = memory.poisoned_activation(3 * n);
        float* lse = memory.poisoned<float>((size_t)B * heads * T);
        const double flop = 4.0 * n * T;
        if (flop < 2e8) {
            const std::vector<float> h = random_values(3 * n);
            std::vector<float> host_out(n), host_lse((size_t)B * heads * T);
            bench_row(shape, "forward.v0", flop, 0, [&] { attention_forward_v0(host_out.data(), host_lse.data(), h.data(), B, T, C, heads); });
            bench_row(shape, "forward.v1", flop, 0, [&] { attention_forward_v1(host_out.data(), host_lse.data(), h.data(), B, T, C, heads); });
        }
        bench_row(shape, "forward", flop, 0, [&] { attention_forward(out, lse, qkv, B, T, C, heads); });
        bench_row(shape, "backward", 2.5 * flop, 0, [&] { attention_backward(dqkv, dout, qkv, out, lse, B, T, C, heads); });
    });
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
