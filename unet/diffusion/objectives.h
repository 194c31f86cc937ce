// objectives.h - objectives beside DDPM (EDM, flow, consistency), losses by noise level, the bound.
#pragma once
#include "../gpu/shared.h"
#include "../trainer.h"

// docs/DIFFUSION.md explains the formulas. For a given amount of noise, an objective defines:
//   what the network is shown       signal x_0 + sigma noise
//   what it is told                 t
//   what it should answer           target_x0 x_0 + target_noise noise
//   what its answer says about x_0  x0_x input + x0_out answer
// If the loss is a weighted square of the answer's error, kernels and samplers know nothing else of an objective.

// What the network is asked at a given ratio: the coefficient of the noise divided by that of x_0. Each sigma that
// draw_level draws is such a ratio. The members mean what they mean in NoiseLevel: `sigma` is the coefficient of the
// noise alone, and the ratio is sigma / signal. They are double, because ect subtracts nearly equal numbers
// (student_level).
struct Question {
    double t;
    double signal, sigma;
    double x0_x, x0_out;
    double target_x0, target_noise;
};

// EDM (Karras et al. 2022, table 1). The paper's sigma is the argument `ratio`. The network F sees c_in (x_0 + sigma
// noise) and is told log(sigma) / 4. The image is then D = c_skip (x_0 + sigma noise) + c_out F. The network's input is
// already multiplied by c_in, so x0_x = c_skip / c_in. The loss lambda (D - x_0)^2 with lambda = 1 / c_out^2 is the
// squared error of F, whose target is (x_0 - c_skip (x_0 + sigma noise)) / c_out.
HD static inline Question edm_question(double ratio, double sigma_data) {
    const double total = sqrt(ratio * ratio + sigma_data * sigma_data);
    const double c_in = 1 / total;
    const double c_skip_over_c_in = sigma_data * sigma_data / total;
    const double c_out = ratio * sigma_data / total;
    const double target_x0 = ratio / (sigma_data * total); // (1 - c_skip) / c_out
    const double target_noise = -sigma_data / total;       // -c_skip ratio / c_out
    return Question{
        .t = log(ratio) / 4,
        .signal = c_in,
        .sigma = c_in * ratio,
        .x0_x = c_skip_over_c_in,
        .x0_out = c_out,
        .target_x0 = target_x0,
        .target_noise = target_noise,
    };
}

// Rectified flow (Liu et al. 2022): x_t = (1 - t) x_0 + t noise. The answer should be noise - x_0, and so
// x_0 = x_t - t answer. The ratio is t / (1 - t). The network is told 1000 t.
HD static inline Question flow_question(double ratio) {
    const double t = ratio / (1 + ratio);
    return Question{
        .t = 1000 * t,
        .signal = 1 - t,
        .sigma = t,
        .x0_x = 1,
        .x0_out = -t,
        .target_x0 = -1,
        .target_noise = 1,
    };
}

// What the network is shown, told and asked at this ratio. Never called for ddpm, whose levels are made by ddpm_level.
HD static inline Question ask(Frame frame, double ratio, double sigma_data) {
    switch (frame) {
    case Frame::DDPM: break;
    case Frame::EDM: return edm_question(ratio, sigma_data);
    case Frame::FLOW: return flow_question(ratio);
    }
    return Question{NAN, NAN, NAN, NAN, NAN, NAN, NAN};
}

// A model's Frame. ect works with the formulas of edm or flow (--ect_frame).
static Frame frame_of(const Config& c) {
    const char* flag = c.objective == "ect" ? "ect_frame" : "objective";
    return meaning<Frame>(flag, c.frame(), {{"ddpm", Frame::DDPM}, {"edm", Frame::EDM}, {"flow", Frame::FLOW}});
}

// How sigma is drawn in training. (ddpm draws a timestep instead.)
static SigmaDraws sigma_draws(const Config& c) {
    const SigmaDraws table{}, edm{c.P_mean, c.P_std, false}, flow{c.t_mean, c.t_std, c.t_std == 0};
    return meaning<SigmaDraws>("objective", c.objective, {{"ddpm", table}, {"edm", edm}, {"flow", flow}, {"ect", edm}});
}

// Whether euler, heun and dpmpp_2m take equal steps of t = sigma / (1 + sigma). Otherwise their sigmas are Karras's
// schedule.
static bool has_steps_of_t(Frame frame) {
    switch (frame) {
    case Frame::DDPM: return false;
    case Frame::EDM: return false;
    case Frame::FLOW: return true;
    }
    ALL_CASES_RETURN
}

// Consistency tuning (Geng et al. 2024, "Consistency Models Made Easy"). A student and a teacher, which are the same
// network, see the same image with the same noise: the student at sigma = t, the teacher at a smaller sigma r. (These
// are the paper's letters, and ratios. This t is not what the network is told.) The answer of each is turned into an
// image:
//   x0_x input + x0_out answer = (x0_x signal) x_0 + (x0_x sigma) noise + x0_out answer
// The student's image should equal the teacher's. So the target of the student's answer is a weighted sum of x_0, noise
// and the teacher's answer. At r = 0 the teacher's image is x_0 itself.

// The teacher's sigma r (Geng et al. 2024, section 3): r / t = 1 - n(t) / q^a with n(t) = 1 + k sigmoid(-b t), but at
// least 0. a begins at 1 and grows by 1 every d steps. Then q^a grows, so r approaches t.
HD static inline double teacher_sigma(const Tuning& tuning, double t) {
    const double a = 1 + (double)(*tuning.step / tuning.d);
    const double n = 1 + tuning.k / (1 + exp(tuning.b * t));
    return fmax(t * (1 - n / pow((double)tuning.q, a)), 0.0);
}

HD static inline double tuning_weight(const Objective& o, double t, double r) {
    switch (o.tuning.weight) {
    case TuningWeight::GAP: return 1 / (t - r);
    case TuningWeight::SNR: return 1 / (t * t) + 1 / ((double)o.sigma_data * o.sigma_data);
    }
    ALL_CASES_RETURN
}

HD static inline NoiseLevel student_level(const Objective& o, double t) {
    const double r = teacher_sigma(o.tuning, t);
    const Question nobody{.t = 0, .signal = 1, .sigma = 0, .x0_x = 1, .x0_out = 0, .target_x0 = 0, .target_noise = 0};
    // At r = 0 there is no teacher. `nobody` stands for one whose image is x_0 itself.
    const Question teacher = r > 0 ? ask(o.frame, r, o.sigma_data) : nobody;
    Question student = ask(o.frame, t, o.sigma_data);
    const double x0 = teacher.x0_x * teacher.signal - student.x0_x * student.signal;
    const double noise = teacher.x0_x * teacher.sigma - student.x0_x * student.sigma;
    student.target_x0 = x0 / student.x0_out;
    student.target_noise = noise / student.x0_out;
    NoiseLevel level = make_level(student);
    level.target_teacher = (float)(teacher.x0_out / student.x0_out);
    level.weight = (float)tuning_weight(o, t, r);
    return level;
}

// The level at which a sample's teacher is asked. At r = 0 its answer is not used. But the network computes an answer
// for every sample, so it is shown the student's input.
HD static inline NoiseLevel teacher_level(const Objective& o, double t) {
    const double r = teacher_sigma(o.tuning, t);
    Question teacher = ask(o.frame, r > 0 ? r : t, o.sigma_data);
    teacher.target_x0 = 0; // a teacher is not trained
    teacher.target_noise = 0;
    return make_level(teacher);
}

// The variational bound is a sum over all T timesteps, of which one is drawn for a sample. So its term is multiplied by
// T. As in guided-diffusion, the unit is the bit, so it is divided by log 2.
static Objective make_objective(const Config& c) {
    const float bits = (float)(c.diffusion_steps / std::log(2.0));
    Objective o{};
    o.frame = frame_of(c);
    o.levels = o.frame == Frame::DDPM ? device_copy(ddpm_levels(c)) : nullptr;
    o.steps = c.diffusion_steps;
    o.draws = sigma_draws(c);
    o.sigma_data = c.sigma_data;
    o.mse = c.use_kl ? 0 : 1;
    if (c.use_kl) o.bound = bits;
    else if (c.learned_variance()) o.bound = bits * c.vlb_weight;
    if (c.objective != "ect") return o;
    const TuningWeight weight =
        meaning<TuningWeight>("ect_weight", c.ect_weight, {{"gap", TuningWeight::GAP}, {"snr", TuningWeight::SNR}});
    o.tuning = Tuning{c.ect_q, c.ect_k, c.ect_b, c.ect_c, c.ect_stage(), weight};
    return o;
}

// --- the level of a training sample, drawn, and its share of the loss
// Each function works on one sample, one timestep or one value. dev/reference.h calls them in loops, and kernels call
// them in each thread.

// --schedule_sampler loss-second-moment (Nichol & Dhariwal 2021, section 3.3): the probability of drawing t is
// proportional to the root mean square of the latest HISTORY losses of t, apart from a small share. A loss is then
// multiplied by `importance`, 1 / (T times the probability of t). So the expected loss is the same as with uniform t.
constexpr double EVEN_SHARE = 0.001; // this share of the probability is divided equally among all t

// Stores the losses of those samples of a batch whose timestep is t, without `importance`. row: the latest HISTORY
// losses of t, oldest first, and then their number. Returns their root mean square, or -1 while there are fewer than
// HISTORY.
HD static inline double remember_losses(float* row, int t, const NoiseLevel* levels, const double* loss, int B) {
    for (int b = 0; b < B; b++) {
        if (levels[b].index != t) continue;
        const int n = (int)row[HISTORY];
        for (int k = 1; k < HISTORY && n == HISTORY; k++) row[k - 1] = row[k]; // a full row drops its oldest loss
        row[n < HISTORY ? n : HISTORY - 1] = (float)fmin(loss[b] / levels[b].importance, FLT_MAX);
        row[HISTORY] = (float)(n < HISTORY ? n + 1 : n);
    }
    double sum = 0;
    for (int k = 0; k < HISTORY; k++) sum += (double)row[k] * row[k];
    return row[HISTORY] < HISTORY ? -1 : sqrt(sum / HISTORY);
}

// Draws t for --schedule_sampler loss-second-moment, and returns its level. [0, 1) is divided into one part for each t,
// as long as its probability. u, a random number in [0, 1), lies in the part of the drawn t. While some t has fewer
// than HISTORY losses, all t have the same probability.
HD static inline NoiseLevel draw_weighted_level(const Objective& o, double u) {
    double sum = 0, least = 0;
    for (int t = 0; t < o.steps; t++) {
        sum += o.rms_losses[t];
        least = fmin(least, o.rms_losses[t]);
    }
    if (least < 0 || !(sum > 0)) return o.levels[(int)(u * o.steps)];
    const double even = EVEN_SHARE / o.steps, rest = (1 - EVEN_SHARE) / sum;
    int t = -1;
    double p = 0;     // the probability of t
    double below = 0; // the sum of the probabilities of all timesteps up to t: the end of the part of t
    do {
        t++;
        p = o.rms_losses[t] * rest + even;
        below += p;
    } while (below <= u && t + 1 < o.steps);
    NoiseLevel level = o.levels[t];
    level.importance = (float)(1 / (o.steps * p));
    level.weight *= level.importance;
    return level;
}

// Draws sigma from a log-normal distribution. *normal: the standard normal number that it is computed from.
HD static inline double draw_sigma(const Objective& o, const Words& words, float* normal) {
    float z[4];
    normals(z, words);
    *normal = z[0];
    return exp(o.draws.P_mean + (double)o.draws.P_std * z[0]);
}

// In which quarter of the standard normal distribution z lies: 0 to 3.
HD static inline int quarter_of_normal(float z) {
    constexpr float UPPER = 0.67448975f; // a quarter of the distribution lies above it
    if (z < 0) return z >= -UPPER;
    return 2 + (z >= UPPER);
}

// The level of a sample's teacher. words: the random words that the student's level was drawn from.
HD static inline NoiseLevel draw_teacher(const Objective& o, const Words& words) {
    float z;
    return teacher_level(o, draw_sigma(o, words, &z));
}

// The loss of ect (Geng et al. 2024): weight (sqrt(D + c^2) - c), where D is the sum of (x0_out (out - target))^2, the
// squared differences between the student's image and the teacher's. The loss's derivative with respect to `out` is
// slope (out - target).
struct TuningLoss {
    double value, slope;
};
HD static inline TuningLoss tuning_loss(const NoiseLevel& level, double D, double c) {
    if (D == 0) return TuningLoss{0, 0};
    const double root = sqrt(D + c * c);
    // This equals weight (root - c). If D is small, root - c would lose most of its digits.
    const double value = level.weight * D / (root + c);
    return TuningLoss{value, level.weight * level.x0_out * (double)level.x0_out / root};
}

// The variational bound has a term for each value of an image, in nats. d = output - target is the error of the output
// that predicts the mean, and v the output that predicts the variance. d_mean and d_variance are the derivatives with
// respect to d and v. The variance is exp(log_var + u) with u = log_ratio + range (v + 1) / 2. For v from -1 to 1 it
// lies between two fixed ones, `small` and beta in ddpm_levels (Nichol & Dhariwal 2021, eq. 15). The term is:
//   t > 0   the KL divergence of two normal distributions, whose means differ by sqrt(kl exp(log_var)) d
//   t = 0   minus the log of the probability of the true value, which is one of the 256 values of a byte
struct BoundTerm {
    float value, d_mean, d_variance;
};

// guided-diffusion's approximation of the probability that a standard normal number is below z, and its derivative.
HD static inline double normal_cdf(double z, double* density) {
    constexpr double ROOT_2_OVER_PI = 0.7978845608028654;
    const double t = tanh(ROOT_2_OVER_PI * (z + 0.044715 * z * z * z));
    *density = 0.5 * (1 - t * t) * ROOT_2_OVER_PI * (1 + 3 * 0.044715 * z * z);
    return 0.5 * (1 + t);
}

HD static inline BoundTerm bound_term(const NoiseLevel& level, float d, float v, float x0) {
    const float slope = 0.5f * level.range; // du / dv
    const float u = level.log_ratio + slope * (v + 1);
    if (!level.t_is_0) {
        // The term is (exp(-u) - 1 + u + exp(-u) kl d^2) / 2. For high t, u is very small, and exp(-u) - 1 + u is about
        // u^2 / 2. In fp32 it would lose most of its digits.
        const double less = expm1(-(double)u); // exp(-u) - 1
        const double pull = (1 + less) * level.kl * d;
        const double value = 0.5 * (less + u + pull * d);
        const double d_variance = 0.5 * slope * (-less - pull * d);
        return BoundTerm{(float)value, (float)pull, (float)d_variance};
    }
    // The 256 values of x_0 lie 2 / 255 apart. So a value stands for x_0 - 1 / 255 to x_0 + 1 / 255. Both ends (low,
    // high) are measured from the mean, in units of the standard deviation. The mean is x0_x input + x0_out output, and
    // the true x_0 is x0_x input + x0_out target. So x_0 - mean = -x0_out d.
    const double centered = -(double)level.x0_out * d;
    const double inverse = exp(-0.5 * ((double)level.log_var + u)); // 1 / the standard deviation
    const double high = inverse * (centered + 1.0 / 255);
    const double low = inverse * (centered - 1.0 / 255);
    double dense_high, dense_low;
    const double below_high = normal_cdf(high, &dense_high);
    const double below_low = normal_cdf(low, &dense_low);
    double p = below_high - below_low;
    if (x0 > 0.999f) { // the value 255 also stands for all that is larger
        p = 1 - below_low;
        dense_high = 0;
    }
    if (x0 < -0.999f) { // the value 0 also stands for all that is smaller
        p = below_high;
        dense_low = 0;
    }
    if (p < 1e-12) return BoundTerm{27.631021f, 0, 0}; // -log(1e-12), as guided-diffusion limits it
    // high and low contain the factor exp(-u / 2), so their derivatives with respect to u are -1 / 2 times high and
    // low.
    const double d_mean = (dense_high - dense_low) * inverse * level.x0_out / p;
    const double d_variance = (dense_high * high - dense_low * low) * 0.5 * slope / p;
    return BoundTerm{(float)-log(p), (float)d_mean, (float)d_variance};
}

#ifdef __CUDACC__
// --objective ect. The random words are those of draw_levels, so the student's sigma is drawn again.
static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_teacher(o, random_words(key, 0, (int)b));
        teachers[b] = l;
        t[b] = l.t;
    });
}

// --schedule_sampler loss-second-moment draws those t more often whose latest losses were large. Row t of `history`
// holds the losses of this t, in the order of the batch. rms_losses[t] is their root mean square, or -1 while there are
// fewer than HISTORY. All ranks compute the same rows.
static void update_rms_losses(double* rms_losses, float* history, const NoiseLevel* levels, const double* loss,
                              const StepState* state, int T, int B) {
    each(T, [=] __device__(size_t t) {
        float* const of_t = history + t * (HISTORY + 1);
        const int samples = state->ok ? B : 0; // the losses of a skipped step are not remembered
        rms_losses[t] = remember_losses(of_t, (int)t, levels, loss, samples);
    });
}

// The loss of consistency tuning is a function of an image's squared distance |x0_out (out - target)|^2 (tuning_loss).
// So its gradient is slope * (out - target), with one slope for each image. There are three launches: the squared
// distances (here), then the losses and the slopes, then the gradients.
// grid (LOSS_PARTS, B). sums (B, LOSS_PARTS): each block's part of an image's squared distance
static __global__ void __launch_bounds__(1024, SUM_BLOCKS)
    tuning_distance_kernel(double* sums, const float* out, const float* target, const NoiseLevel* levels, int n) {
    const size_t first = (size_t)blockIdx.y * n;
    const float x0_out = levels[blockIdx.y].x0_out;
    double sum = 0;
    for (int i = blockIdx.x * 1024 + threadIdx.x; i < n; i += LOSS_PARTS * 1024) {
        const float d = x0_out * (out[first + i] - target[first + i]);
        sum += (double)d * d;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.y * LOSS_PARTS + blockIdx.x] = sum;
}

static void tuning_loss_forward_backward(double* loss, float* dout, const float* out, const float* target,
                                         const NoiseLevel* levels, float c, float factor, int B, int n) {
    double* const sums = (double*)device.workspace;
    double* const slopes = sums + (size_t)B * LOSS_PARTS;
    launch_behind(tuning_distance_kernel, dim3(LOSS_PARTS, B), 1024, 0, sums, out, target, levels, n);
    each(B, [=] __device__(size_t b) {
        double distance = 0;
        for (int k = 0; k < LOSS_PARTS; k++) distance += sums[b * LOSS_PARTS + k];
        const TuningLoss l = tuning_loss(levels[b], distance, c);
        loss[b] = l.value;
        slopes[b] = factor * l.slope;
    });
    each((size_t)B * n, [=] __device__(size_t i) {
        const float slope = (float)slopes[i / n];
        dout[i] = slope * (out[i] - target[i]);
    });
}
#endif
