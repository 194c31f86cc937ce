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

// Losses and norms of gradients are compared by their logarithms, since they are spread over powers of ten.
HD static inline double guard_log(double x) { return log(fmax(x, 1e-30)); }

// Whether x is at least ten times, and ten standard deviations, above the running mean (x and both in logarithms).
HD static inline bool is_outlier(double x, double mean, double var) {
    return x - mean > fmax(log(10.0), 10 * sqrt(var));
}

// Updates a running mean and variance, which describe about the latest 1 / rate values.
HD static inline void running_moments(double* mean, double* var, double x, double rate) {
    const double d = x - *mean;
    *mean += rate * d;
    *var = (1 - rate) * (*var + rate * d * d);
}

// Whether a step's loss and gradient norm are finite and, with skip_outliers, no outliers (after 100 healthy steps).
// If so, the guard learns them. bad_in_row: how many steps have been skipped since the last healthy one. A run that
// breaks never becomes healthy again. So if this step is healthy, the skipped ones were rare but usual: the guard
// doubles its standard deviations, so that rare steps are not skipped for ever.
HD static inline bool healthy(Guard* g, double loss, double norm, int64_t bad_in_row, bool skip_outliers) {
    if (!(fabs(loss) <= DBL_MAX && fabs(norm) <= DBL_MAX)) return false;
    loss = guard_log(loss);
    norm = guard_log(norm);
    const bool judged = skip_outliers && g->n >= 100;
    if (judged && is_outlier(loss, g->mean_loss, g->var_loss)) return false;
    if (judged && is_outlier(norm, g->mean_norm, g->var_norm)) return false;
    if (bad_in_row > 0) {
        g->var_loss = fmin(4 * g->var_loss, 1e4);
        g->var_norm = fmin(4 * g->var_norm, 1e4);
    }
    const double rate = fmax(5 / (g->n + 5), 0.01); // the latest fifth of the steps, at most about 100
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
    state->ok = healthy(&state->guard, state->loss, state->grad_norm, state->bad_in_row, h.skip_outliers);
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
