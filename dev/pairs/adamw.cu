// adamw.cu - the end of a training step: the gradient's norm, the verdict on the step, and one pass that does clipping, AdamW and EMA.
//
//   g = grads * min(1, grad_clip / (norm + 1e-6))                       norm over all parameters, as torch's clip_grad_norm_
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   params = params (1 - lr weight_decay) - lr / (1 - beta1^k) * m / (sqrt(v) / sqrt(1 - beta2^k) + eps)        k = updates so far
//   ema = ema + average_share (params - ema); averages of further rates in passes of their own (ema_update)
//   A step whose loss or norm is not finite or far outside its running spread (judge_step) changes nothing but the count of steps.
//   bytes    4 n for the norm, 36 n for the update (five arrays read, four written); 1.1 M parameters: 40 MB, 20.5 M: 740 MB. Memory-bound.
//
//   version 0   one pass per line of the formula, as an optimizer built from tensor operations runs it: 92 n bytes, six launches (H200, 20.5 M: 484 us)
//   shipped     sum_gradients, judge_step, adamw_update; what changes from step to step lies in device memory (StepState)
//
//   make -C dev adamw && dev/adamw       python dev/pairs/adamw.py [--bench]
#include "harness.h"

static void adamw_update_v0(float* params, float* ema, float* m, float* v, float* grads, double norm, float lr,
                            int64_t updates, AdamW h, size_t n) {
    const float scale = h.grad_clip > 0 ? (float)std::min(1.0, h.grad_clip / (norm + 1e-6)) : 1.0f;
    const float correction1 = (float)(1 - pow(h.beta1, (double)updates)),
                correction2 = (float)(1 - pow(h.beta2, (double)updates));
    each(n, [=] HD(size_t i) { grads[i] *= scale; });
    each(n, [=] HD(size_t i) { m[i] = h.beta1 * m[i] + (1 - h.beta1) * grads[i]; });
    each(n, [=] HD(size_t i) { v[i] = h.beta2 * v[i] + (1 - h.beta2) * grads[i] * grads[i]; });
    each(n, [=] HD(size_t i) { params[i] *= 1 - lr * h.weight_decay; });
    each(n, [=] HD(size_t i) { params[i] -= lr * (m[i] / correction1) / (sqrtf(v[i] / correction2) + h.eps); });
    const float share = average_share(h.ema_rate, updates);
    each(n, [=] HD(size_t i) { ema[i] += share * (params[i] - ema[i]); });
}

static AdamW adamw_settings(const Arrays& io) {
    auto real = [&](const char* name) { return (float)io.real(name); };
    return AdamW{real("lr"),
                 real("weight_decay"),
                 real("beta1"),
                 real("beta2"),
                 real("eps"),
                 real("grad_clip"),
                 real("ema_rate"),
                 (LrSchedule)io.integer("lr_schedule"),
                 io.integer("warmup_steps"),
                 io.integer("max_steps"),
                 true};
}

// Several steps, each with gradients and losses from the file.
static void check(Arrays& io) {
    const int steps = io.dim("grads", 0), n = io.dim("grads", 1), B = io.dim("losses", 1);
    const AdamW h = adamw_settings(io);
    StepState state{};
    state.step = io.integer("step");
    state.updates = io.integer("updates");
    memcpy(&state.guard, io.get("guard", "f8").bytes.data(), sizeof(Guard));
    StepState* device_state = io.memory.upload(&state, 1);
    float *params = io.updated<float>("params_out", "params"), *ema = io.updated<float>("ema_out", "ema");
    float *m = io.updated<float>("m_out", "m"), *v = io.updated<float>("v_out", "v"),
          *grads = io.memory.poisoned<float>(n);
    float* ema2 = io.updated<float>("ema2_out", "ema");
    act* copy = make_copy(params, n); // the convolutions' weights in the type of the activations
    io.save_activation("copy", copy, {n});
    const size_t stretches = (n + STRETCH - 1) / STRETCH;
    const Slice all = slice_of(n);
    double *loss = io.memory.poisoned<double>(B), *squares = io.memory.poisoned<double>(stretches);
    const float* const t = io.host("t");
    std::vector<int> quarter(B); // of the diffusion's 1,000 timesteps
    for (int b = 0; b < B; b++) quarter[b] = (int)(4 * t[b] / 1000);
    const int* quarters = io.memory.upload(quarter.data(), B);
    float *params0 = io.updated<float>("params_out.v0", "params"), *ema0 = io.updated<float>("ema_out.v0", "ema");
    float *m0 = io.updated<float>("m_out.v0", "m"), *v0 = io.updated<float>("v_out.v0", "v"),
          *grads0 = io.memory.poisoned<float>(n);

    std::vector<double> verdicts, norms, rates, losses;
    for (int s = 0; s < steps; s++) {
        for (float* g : {grads, grads0}) copy_to_device(g, io.host("grads") + (size_t)s * n, n * sizeof(float));
        copy_to_device(loss, (const double*)io.get("losses", "f8").bytes.data() + s * B, B * sizeof(double));
        sum_gradients(grads, {{squares}}, RankGradients{grads, nullptr, all}, false);
        judge_step(device_state, squares, stretches, loss, quarters, h, B);
        adamw_update({{{params}}, {{copy}}, all.n, ema, m, v, grads, nullptr}, device_state, h, all);
        ema_update(ema2, params, device_state, (float)io.real("ema_rate2"), all);
        next_step(&device_state->step);

        state = download(device_state, 1)[0];
        verdicts.push_back(state.ok);
        rates.push_back(state.lr);
        if (!state.ok) continue;
        norms.push_back(state.grad_norm);
        losses.insert(losses.end(), {state.loss, state.loss_q[0], state.loss_q[1], state.loss_q[2], state.loss_q[3]});
        adamw_update_v0(params0, ema0, m0, v0, grads0, state.grad_norm, state.lr, state.updates, h, n);
    }
    auto save = [&](const char* name, const std::vector<double>& values) {
        io.out.push_back({name, [=] { return Arrays::packed(values, {(int)values.size()}); }});
    };
    save("verdicts", verdicts);
    save("rates", rates);
    save("norms", norms);
    save("mean_losses", losses);
    save("guard_losses", {state.guard.mean_loss, state.guard.var_loss});
    save("guard_norms", {state.guard.mean_norm, state.guard.var_norm});
    save("counts",
         {(double)state.step, (double)state.updates, (double)state.bad_total, (double)state.bad_in_row, state.guard.n});
}

static void bench() {
    for (const BenchModel& model : bench_models()) {
        const size_t n = model.net.flat_size;
        const std::string shape = text("n=%zu", n);
        const AdamW h{1e-4f, 0, 0.9f, 0.999f, 1e-8f, 1, 0.999f, LrSchedule::CONSTANT, 0, 1000, true};
        StepState state{};
        state.ok = 1;
        state.lr = h.lr;
        state.grad_norm = 10;
        state.updates = 5;
        const Work norm_work{0, 4.0 * n}, update_work{0, 36.0 * n}, ema_work{0, 12.0 * n};
        BenchArrays a(update_work.bytes);
        StepState* device_state = a.memory.upload(&state, 1);
        const auto params = a.floats(n), ema = a.floats(n), m = a.floats(n), grads = a.floats(n);
        const std::vector<float> half(n, 0.5f);
        float* v = a.memory.upload(half.data(), n);
        act* copy = make_copy(params[0], n);
        double* squares = device_alloc<double>(n / STRETCH + 1);
        const Slice all = slice_of(n);
        bench_row(shape, "norm", norm_work, a, [&](int k) {
            sum_gradients(grads[k], {{squares}}, RankGradients{grads[k], nullptr, all}, false);
        });
        bench_row(shape, "update.v0", update_work, a,
                  [&](int k) { adamw_update_v0(params[k], ema[k], m[k], v, grads[k], 10, h.lr, 5, h, n); });
        bench_row(shape, "update", update_work, a, [&](int k) {
            adamw_update({{{params[k]}}, {{copy}}, n, ema[k], m[k], v, grads[k], nullptr}, device_state, h, all);
        });
        bench_row(shape, "ema", ema_work, a,
                  [&](int k) { ema_update(ema[k], params[k], device_state, h.ema_rate, all); });
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
