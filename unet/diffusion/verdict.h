// verdict.h - the learning rate, the verdict on a step, averages of the weights.
#pragma once
#include "../interface.h"

// =====================================================================================================================
// What a run holds and writes: trainer, log, checkpoints, resume, samples
// A run writes these files into its output folder (--output_dir):
//   index.html        a page that shows the run in a browser (unet/run/page.h)
//   log.csv           a row for each step
//   samples_STEP.png  a grid of samples, every --sample_interval steps
//   model_STEP.bin    a checkpoint, from which the run can be resumed, every --save_interval steps
//   ema_STEP.bin      two averages of the weights, every --ema_snapshots steps
//   best.bin          with --keep_best: the checkpoint that has the lowest validation loss
//   .lock             is locked until the run ends, so that no other run writes into the folder (lock_folder)
// At its end, a run that has done all its steps also writes a checkpoint, an ema_STEP.bin (unless --ema_snapshots is 0)
// and a grid (unless --sample_interval is 0). If a signal or unreadable data ends the run earlier, it writes the same
// files, but no grid. If there are several ranks, only rank 0 writes. A full disk does not end a run at once. Rows of
// the log and grids that could not be written are kept in memory, and the program tries to write them again later.
// Instead of a checkpoint or an ema_STEP.bin that could not be written, one of a later step is written.
//
// These functions do a run, in this order: train makes the Run, and begin_run fills its arrays by start_weights or
// restore. Then run_step ("A training step") is called again and again. It calls train_step. When something is due, run_step
// then calls collect_steps, which logs the steps that the device has done, and after that those of save_snapshot,
// save_checkpoint and save_grid that are due. At the end save_at_the_end is called, and then finish_complete or
// finish_stopped. Without a run, sample_and_stop draws images.

// ---------------------------------------------------------------------------------------------------------------------
// --- the learning rate, the verdict on a step, averages of the weights
// The functions of this part run on the device (a GPU, or the CPU), so that no step waits for the host.

// Returns the factor by which --lr is multiplied at a step. Steps are counted from 0. During the first warmup_steps
// steps the factor rises to 1. After them it stays 1, or falls to 0 linearly, or falls to 0 like a half wave of a
// cosine (--lr_schedule).
HD static inline double lr_factor(const AdamW& h, int64_t step) {
    double warm = 1; // the factor of the warm-up
    if (h.warmup_steps > 0) warm = fmin(1.0, (double)(step + 1) / h.warmup_steps);
    const double steps = fmax((double)(h.max_steps - h.warmup_steps), 1.0); // the number of steps after the warm-up
    const double progress = fmin(fmax((step - h.warmup_steps) / steps, 0.0), 1.0);
    switch (h.lr_schedule) {
    case LrSchedule::CONSTANT: return warm;
    case LrSchedule::LINEAR: return warm * (1 - progress);
    case LrSchedule::COSINE: return warm * 0.5 * (1 + cos(M_PI * progress));
    }
    ALL_CASES_RETURN
}

// A step's loss, or the norm of its gradient, is suspicious if it is not finite. After 100 healthy steps it is also
// suspicious if it is larger than twice the running mean plus ten standard deviations. In healthy training, losses and
// norms do not become so large. x: the loss or the norm. n: the number of healthy steps so far. mean, var: the running
// mean and variance of the same quantity, over about the latest 100 of these steps.
HD static inline bool suspicious(double x, double n, double mean, double var) {
    if (!(fabs(x) <= DBL_MAX)) return true;
    return n >= 100 && x > 2 * mean + 10 * sqrt(var);
}

// Updates a running mean and variance with the value x. The mean and the variance describe about the latest 1 / rate
// values.
HD static inline void running_moments(double* mean, double* var, double x, double rate) {
    const double d = x - *mean;
    *mean += rate * d;
    *var = (1 - rate) * (*var + rate * d * d);
}

// Returns whether a step is healthy: neither its loss nor its gradient's norm is suspicious. If it is healthy, the
// guard's means and variances are updated with this loss and this norm.
HD static inline bool healthy(Guard* g, double loss, double norm) {
    if (suspicious(loss, g->n, g->mean_loss, g->var_loss)) return false;
    if (suspicious(norm, g->n, g->mean_norm, g->var_norm)) return false;
    const double rate = fmax(1 / (g->n + 1), 0.01);
    running_moments(&g->mean_loss, &g->var_loss, loss, rate);
    running_moments(&g->mean_norm, &g->var_norm, norm, rate);
    g->n++;
    return true;
}

// Judges a step, after its state->grad_norm has been set. This function sets the losses, the learning rate and the
// counters of updates and of skipped steps in *state, and updates the guard. It sets state->ok to 1 if the step may
// change the weights, and otherwise to 0. losses: those of the whole batch. B: the size of the batch.
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

// Returns the share of the newest weights in an average of the weights: ema = ema + share (weights - ema). updates: the
// number of updates so far, including the newest one.
// With a rate of up to 1, the weights after update k count rate^(updates - k) times as much in the average as the
// newest weights. (So with a rate of 1, the weights after all updates count the same.) With a rate above 1, the weights
// after update k count about (k / updates)^rate times as much as the newest ones (Karras et al. 2024, eq. 2). The share
// at the first update is 1, so the initial weights don't count.
HD static inline float average_share(float rate, int64_t updates) {
    if (rate > 1) return (float)-expm1((rate + 1.0) * log1p(-1.0 / updates));
    if (rate == 1) return 1.0f / updates;
    const double sum = -expm1(updates * log((double)rate)); // (1 - rate) (1 + rate + ... + rate^(updates - 1))
    return (float)((1.0 - rate) / sum);
}

#ifdef __CUDACC__
// Factors that are the same for all parameters in an update. In their formulas, t is the number of updates, including
// this one (StepState::updates).
struct AdamWFactors {
    float clip;      // what the gradient is multiplied by, to limit its norm, as in torch's clip_grad_norm_
    float decay;     // 1 - lr weight_decay
    float step_size; // lr / (1 - beta1^t)
    float root;      // sqrt(1 - beta2^t)
    float lr;        // the learning rate of this step
    float share;     // the share of the newest weights in the first average (average_share)
};
INLINE AdamWFactors adamw_factors(const StepState* state, const AdamW& h) {
    double clip = 1;
    if (h.grad_clip > 0) clip = fmin(1.0, h.grad_clip / (state->grad_norm + 1e-6));
    const double correction1 = 1 - pow((double)h.beta1, (double)state->updates);
    const double correction2 = 1 - pow((double)h.beta2, (double)state->updates);
    const float decay = 1 - state->lr * h.weight_decay;
    const float step_size = (float)(state->lr / correction1);
    const float share = average_share(h.ema_rate, state->updates);
    return {(float)clip, decay, step_size, (float)sqrt(correction2), state->lr, share};
}
#endif
