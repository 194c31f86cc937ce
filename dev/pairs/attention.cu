// attention.cu - softmax attention of every pixel to every pixel, per head, straight from the NHWC buffer that the qkv convolution wrote.
//
//   qkv (B, T, 3C): q, k, v of C = heads * d channels each; out (B, T, C)
//   S = q k^T / sqrt(d),  P = softmax(S),  out = P v
//   dv = P^T dout,  dP = dout v^T,  dS = P (dP - rowsum(dout * out)),  dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d)
//   FLOPs    4 B T^2 C forward, 10 B T^2 C backward (S is computed again)
//   bytes    4 * 4 B T C forward if P never leaves the chip; P itself would be 4 B heads T^2: at T = 256 and d = 32
//            twice that to write, and twice to read
//
//   version 0   the definition, with P (B, heads, T, T) in memory: scores, then a softmax for each row, then the weighted sums of v; backward P again, dP,
//               dS, then the sums. Three passes over what is T / d times as large as q; on a GPU a thread per element of each (H200, T = 256, 6 heads of
//               32, batch 32: 2.4 ms, backward 5 ms)
//   version 1   online softmax (Milakov & Gimelshein 2018): one pass over the keys with a running maximum and rescaled sums, so that no row of scores is
//               stored. On a GPU a thread has a query, and its q and out in registers; keys and values come from the caches again for each query (0.6 ms)
//   shipped     attention_forward, attention_backward: on a CPU matrix products per head, on a GPU one fused kernel each way, in which a block of queries
//               shares each tile of keys and values in shared memory, and (bf16) tensor cores multiply
//
//   make -C dev attention && dev/attention       python dev/pairs/attention.py [--bench]
#include "harness.h"

// qkv (B, T, 3C), head by head
struct Heads {
    Values qkv;
    int T, C, heads, d;
    float scale;

    HD size_t at(int which, int b, int h, int t) const {
        return ((size_t)b * T + t) * 3 * C + which * C + h * d;
    } // which: 0 q, 1 k, 2 v
    HD size_t at_out(int b, int h, int t) const { return ((size_t)b * T + t) * C + h * d; }
    HD float score(int b, int h, int t, int s) const {
        const size_t q = at(0, b, h, t), k = at(1, b, h, s);
        float sum = 0;
        for (int i = 0; i < d; i++) sum += qkv[q + i] * qkv[k + i];
        return scale * sum;
    }
};

static Heads heads_of(const act* qkv, int T, int C, int heads) {
    return Heads{values(qkv), T, C, heads, C / heads, 1 / sqrtf((float)(C / heads))};
}

// P (B, heads, T, T)
static void attention_forward_v0(act* out, float* P, const act* qkv, int B, int T, int C, int heads) {
    const Heads a = heads_of(qkv, T, C, heads);
    const Values o = values(out);
    const size_t rows = (size_t)B * heads * T;
    each(rows * T, [=] HD(size_t i) {
        const int s = (int)(i % T), t = (int)(i / T % T), h = (int)(i / T / T % heads), b = (int)(i / T / T / heads);
        P[i] = a.score(b, h, t, s);
    });
    each(rows, [=] HD(size_t i) {
        float *row = P + i * T, top = -INFINITY, sum = 0;
        for (int s = 0; s < T; s++) top = fmaxf(top, row[s]);
        for (int s = 0; s < T; s++) sum += row[s] = expf(row[s] - top);
        for (int s = 0; s < T; s++) row[s] /= sum;
    });
    each((size_t)B * T * C, [=] HD(size_t i) {
        const int c = (int)(i % C), t = (int)(i / C % T), b = (int)(i / C / T), h = c / a.d;
        const float* row = P + (((size_t)b * heads + h) * T + t) * T;
        float sum = 0;
        for (int s = 0; s < T; s++) sum += row[s] * a.qkv[a.at(2, b, h, s) + c - h * a.d];
        o.set(i, sum);
    });
}

// D: d or more, known to the compiler, which can thus keep arrays in registers; 64 at most
template <int D> static void attention_forward_v1_up_to(act* out, const act* qkv, int B, int T, int C, int heads) {
    const Heads a = heads_of(qkv, T, C, heads);
    const Values to = values(out);
    each((size_t)B * heads * T, [=] HD(size_t i) {
        const int t = (int)(i % T), h = (int)(i / T % heads), b = (int)(i / T / heads);
        float q[D], o[D], top = -INFINITY, sum = 0;
        for (int j = 0; j < D; j++) {
            q[j] = j < a.d ? a.scale * a.qkv[a.at(0, b, h, t) + j] : 0;
            o[j] = 0;
        }
        for (int s = 0; s < T; s++) {
            const size_t k = a.at(1, b, h, s), v = a.at(2, b, h, s);
            float score = 0;
            for (int j = 0; j < D; j++)
                if (j < a.d) score += q[j] * a.qkv[k + j];
            const float new_top = fmaxf(top, score), rescale = expf(top - new_top), p = expf(score - new_top);
            sum = sum * rescale + p; // everything so far was relative to the old maximum
            for (int j = 0; j < D; j++)
                if (j < a.d) o[j] = o[j] * rescale + p * a.qkv[v + j];
            top = new_top;
        }
        for (int j = 0; j < D; j++)
            if (j < a.d) to.set(a.at_out(b, h, t) + j, o[j] / sum);
    });
}

static void attention_forward_v1(act* out, const act* qkv, int B, int T, int C, int heads) {
    (C / heads > 32 ? attention_forward_v1_up_to<64> : attention_forward_v1_up_to<32>)(out, qkv, B, T, C, heads);
}

// P (B, heads, T, T) as the forward pass left it; dS the same size, scratch
static void attention_backward_v0(act* dqkv, const float* P, float* dS, const act* dout, const act* qkv, int B, int T,
                                  int C, int heads) {
    const Heads a = heads_of(qkv, T, C, heads);
    const Values dx = values(dqkv), g = values(dout);
    const size_t rows = (size_t)B * heads * T;
    each(rows * T, [=] HD(size_t i) {
        const int s = (int)(i % T), t = (int)(i / T % T), h = (int)(i / T / T % heads), b = (int)(i / T / T / heads);
        float dP = 0;
        for (int j = 0; j < a.d; j++) dP += g[a.at_out(b, h, t) + j] * a.qkv[a.at(2, b, h, s) + j];
        dS[i] = dP;
    });
    each(rows, [=] HD(size_t i) {
        const float* row = P + i * T;
        float *d_row = dS + i * T,
              mean = 0; // of dP under P: the softmax's rows sum to one, so a common part of dP has no effect
        for (int s = 0; s < T; s++) mean += row[s] * d_row[s];
        for (int s = 0; s < T; s++) d_row[s] = row[s] * (d_row[s] - mean) * a.scale;
    });
    each((size_t)B * T * C, [=] HD(size_t i) {
        const int c = (int)(i % C), t = (int)(i / C % T), b = (int)(i / C / T), h = c / a.d, j = c - h * a.d;
        const size_t head = ((size_t)b * heads + h) * T * T;
        float dq = 0, dk = 0, dv = 0;
        for (int s = 0; s < T; s++) {
            dq += dS[head + (size_t)t * T + s] * a.qkv[a.at(1, b, h, s) + j];
            dk += dS[head + (size_t)s * T + t] * a.qkv[a.at(0, b, h, s) + j];
            dv += P[head + (size_t)s * T + t] * g[a.at_out(b, h, s) + j];
        }
        dx.set(a.at(0, b, h, t) + j, dq);
        dx.set(a.at(1, b, h, t) + j, dk);
        dx.set(a.at(2, b, h, t) + j, dv);
    });
}

static void check(Arrays& io) {
    const int B = io.dim("qkv", 0), T = io.dim("qkv", 1), C = io.dim("qkv", 2) / 3, heads = (int)io.integer("heads");
    const act *qkv = io.activation("qkv"), *dout = io.activation("dout");
    act* out = io.activation_output("out", {B, T, C});
    SoftmaxRow* rows = io.memory.poisoned<SoftmaxRow>((size_t)B * heads * T);
    attention_forward(out, rows, qkv, B, T, C, heads);
    attention_backward(io.activation_output("dqkv", {B, T, 3 * C}), dout, qkv, out, rows, B, T, C, heads);

    const size_t n = (size_t)B * heads * T * T;
    float *P = io.memory.poisoned<float>(n), *dS = io.memory.poisoned<float>(n);
    attention_forward_v0(io.activation_output("out.v0", {B, T, C}), P, qkv, B, T, C, heads);
    attention_backward_v0(io.activation_output("dqkv.v0", {B, T, 3 * C}), P, dS, dout, qkv, B, T, C, heads);
    if (C / heads > 64) return;
    attention_forward_v1(io.activation_output("out.v1", {B, T, C}), qkv, B, T, C, heads);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& out = m.tensor(m.layer->out);
        return text("B=%d T=%d C=%d heads=%d", m.B, out.H * out.W, out.C, m.layer->heads);
    };
    for_each_shape(ATTENTION, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& o = m.tensor(m.layer->out);
        const int B = m.B, T = o.H * o.W, C = o.C, heads = m.layer->heads;
        const size_t n = (size_t)B * T * C, scores = (size_t)B * heads * T * T;
        const Work forward_work{4.0 * n * T, 4.0 * n * act_bytes()}, backward_work{10.0 * n * T, 8.0 * n * act_bytes()};
        BenchArrays a(backward_work.bytes);
        const auto qkv = a.activation(3 * n), dout = a.activation(n), out = a.activation(n), dqkv = a.activation(3 * n);
        SoftmaxRow* rows = a.memory.poisoned<SoftmaxRow>((size_t)B * heads * T);
        float *P = random_floats(a.memory, scores), *dS = random_floats(a.memory, scores);
#ifdef __CUDACC__
        const bool naive = true;
#else
        const bool naive = forward_work.flop < 2e8;
#endif
        if (naive)
            bench_row(shape, "forward.v0", forward_work, a,
                      [&](int k) { attention_forward_v0(out[k], P, qkv[k], B, T, C, heads); });
        if (naive)
            bench_row(shape, "forward.v1", forward_work, a,
                      [&](int k) { attention_forward_v1(out[k], qkv[k], B, T, C, heads); });
        bench_row(shape, "forward", forward_work, a,
                  [&](int k) { attention_forward(out[k], rows, qkv[k], B, T, C, heads); });
        if (naive)
            bench_row(shape, "backward.v0", backward_work, a,
                      [&](int k) { attention_backward_v0(dqkv[k], P, dS, dout[k], qkv[k], B, T, C, heads); });
        bench_row(shape, "backward", backward_work, a,
                  [&](int k) { attention_backward(dqkv[k], dout[k], qkv[k], out[k], rows, B, T, C, heads); });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
