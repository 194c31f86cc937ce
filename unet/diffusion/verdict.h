// verdict.h - the learning rate, the verdict on a step, averages of the weights.
#pragma once
#include "../interface.h"

// These functions run on the device (a GPU, or the CPU), so that no step waits for the host.

// The factor by which --lr is multiplied at a step, counted from 0. During the first warmup_steps steps it rises to 1.
// Then it stays 1, or falls to 0 linearly, or like a half wave of a cosine (--lr_schedule).
HD static inline double lr_factor(const AdamW& h, int64_t step) {
    double warm = 1;
    if (h.warmup_steps > 0) warm = fmin(1.0, (double)(step + 1) / h.warmup_steps);
    const double steps = fmax((double)(h.max_steps - h.warmup_steps), 1.0); // steps after the warm-up
    const double progress = fmin(fmax((step - h.warmup_steps) / steps, 0.0), 1.0);
    switch (h.lr_schedule) {
    case LrSchedule::CONSTANT: return warm;
    case LrSchedule::LINEAR: return warm * (1 - progress);
    case LrSchedule::COSINE: return warm * 0.5 * (1 + cos(M_PI * progress));
    }
    ALL_CASES_RETURN
}

// x, the loss or the norm of a gradient, is suspicious if it is not finite. After 100 healthy steps it is also
// suspicious if it is larger than twice the running mean plus ten standard deviations. In healthy training it does not
// become so large.
HD static inline bool suspicious(double x, double n, double mean, double var) {
    if (!(fabs(x) <= DBL_MAX)) return true;
    return n >= 100 && x > 2 * mean + 10 * sqrt(var);
}

// Updates a running mean and variance, which describe about the latest 1 / rate values.
HD static inline void running_moments(double* mean, double* var, double x, double rate) {
    const double d = x - *mean;
    *mean += rate * d;
    *var = (1 - rate) * (*var + rate * d * d);
}

// Whether neither the loss nor the gradient's norm is suspicious. If so, the guard is updated with them.
HD static inline bool healthy(Guard* g, double loss, double norm) {
    if (suspicious(loss, g->n, g->mean_loss, g->var_loss)) return false;
    if (suspicious(norm, g->n, g->mean_norm, g->var_norm)) return false;
    const double rate = fmax(1 / (g->n + 1), 0.01);
    running_moments(&g->mean_loss, &g->var_loss, loss, rate);
    running_moments(&g->mean_norm, &g->var_norm, norm, rate);
    g->n++;
    return true;
}

// Judges a step, after its state->grad_norm has been set: sets the losses, the learning rate and the counters of
// *state, and updates the guard. state->ok becomes 1 if the step may change the weights. losses: those of the whole
// batch, of size B.
HD static inline void judge_batch(StepState* state, const LossSums& losses, AdamW h, int B) {
    state->loss = (losses.sum[0] + losses.sum[1] + losses.sum[2] + losses.sum[3]) / B;
    for (int q = 0; q < 4; q++) {
        state->loss_q[q] = losses.count[q] ? losses.sum[q] / losses.count[q] : 0;
        state->count_q[q] = losses.count[q];
    }
    state->ok = healthy(&state->guard, state->loss, state->grad_norm);
    state->lr = (float)(h.lr * lr_factor(h, state->step));
    state->updates += state->ok;
    state->bad_total += !state->ok;
    state->bad_in_row = state->ok ? 0 : state->bad_in_row + 1;
}

// The share of the newest weights in an average of the weights: ema = ema + share (weights - ema). With a rate of up to
// 1, the weights after update k count rate^(updates - k) times as much as the newest. With a rate above 1, they count
// about (k / updates)^rate times as much (Karras et al. 2024, eq. 2). At the first update the share is 1, so the
// initial weights don't count.
HD static inline float average_share(float rate, int64_t updates) {
    if (rate > 1) return (float)-expm1((rate + 1.0) * log1p(-1.0 / updates));
    if (rate == 1) return 1.0f / updates;
    const double sum = -expm1(updates * log((double)rate)); // (1 - rate) (1 + rate + ... + rate^(updates - 1))
    return (float)((1.0 - rate) / sum);
}

// What the gradient is multiplied by, to limit its norm, as in torch's clip_grad_norm_.
HD static inline double clip_factor(const StepState* state, const AdamW& h) {
    return h.grad_clip > 0 ? fmin(1.0, h.grad_clip / (state->grad_norm + 1e-6)) : 1;
}
