// objectives.h - objectives beside DDPM (EDM, flow, consistency), losses by noise level, the bound.
#pragma once
#include "../trainer.h"

// =====================================================================================================================
// Diffusion: noise schedules, objectives, samplers
// docs/DIFFUSION.md explains the formulas of this section. The table of noise levels (ddpm_levels) is computed in
// double, as in guided-diffusion, and stored in fp32.
//
// For a sample with a given amount of noise, an objective defines four things, and a NoiseLevel holds their numbers:
//   what the network is shown       signal x_0 + sigma noise
//   what it is told                 t
//   what it should answer           target_x0 x_0 + target_noise noise
//   what its answer says about x_0  x0_x input + x0_out answer
// If the loss of a new objective is a weighted square of the answer's error, the objective is only a new way to fill
// NoiseLevels. Then the kernels and the samplers' steps need no change.
//
// To add an objective like edm or flow, change these places:
//
//   1. unet/flags.h, and the functions that read its rows:
//      a. The objective's word: add it at the end of the row of `objective`, because model files hold the word's place
//         in this row.
//      b. A row for each parameter of the objective, if there are any. If model files have to keep the parameter, the
//         row is SAVED(slot, ...) or FREE(slot, ...). Take an unused slot:
//         SLOT_UNUSED_TOO, or the first one after SLOT_VAL_CRC. In check_lists, let the range of unused slots begin
//         after it. Add the slot to is_of_objective (run/), too. Then a run that is resumed with another value of
//         the parameter does not compare its losses with those before. All slots that are still unused are in the part
//         of the header that only checkpoints fill, not files of weights alone. So samples of such a file would use the
//         flag's default. If samples need the parameter, make its slot an exception at three places: where model_header
//         and take_model_file test is_of_run, and in check_lists.
//      c. The rows OBJECTIVES(...). Such a row names the objectives for which the flags below it exist. For parameters
//         that only the new objective has, add a new row OBJECTIVES above their rows. If the new objective shares
//         parameters of edm (sigma_data, P_mean, P_std), add its word to OBJECTIVES(of_edm, "edm|ect"), and if it
//         shares those of flow (t_mean, t_std), to OBJECTIVES(of_flow, "flow"). If you forget this, nothing warns you:
//         slot_is_used is then false for these parameters, so model files do not get their values. Samples, and also
//         runs that are resumed, then use the flags' defaults.
//      d. If --objective ect may tune models of the new objective: add the objective's word to the row of `ect_frame`
//         and to the message in take_model_file. If a parameter only says which levels are drawn, take_model_file must
//         not take it from the file of the model that is tuned: add its slot where SLOT_P_MEAN is tested.
//   2. Frame (interface.h): its enumerator
//   3. this section. (When the enumerator is in Frame, the compiler warns that a case is missing in ask and in
//      has_steps_of_t. If the objective's word is missing in frame_of or sigma_draws, the program ends with an error
//      message when it runs.) Change or add:
//      a function with its formulas, beside edm_question. If it has a parameter of its own: a member of Objective, a
//      line in make_objective, and an argument of ask (so far, ask has only edm's parameter sigma_data);
//      its case in ask, and its word in frame_of;
//      whether log(sigma) or t is drawn in training, and how (sigma_draws; for another distribution also SigmaDraws
//      and draw_level);
//      which sigmas its samplers use (has_steps_of_t);
//      a weight of the loss, if it is not 1: a member of Question, which make_level and student_level use. If the
//      weight makes the gradients larger or smaller than those of a mean of squares, also change usual_gradient
//      ("The plan"). With --precision fp8, gradients are multiplied by a factor that is computed from its result
//   4. the PyTorch twin: what train_unet.py computes of it, and the objective's frame in common/flags.py
//
// To let the network predict another quantity, with the levels of ddpm, change the row of `predict` in unet/flags.h,
// and the function ddpm_level, here and in train_unet.py.
//
// For a loss that is not the weighted square of the answer's error, follow the example of ect, whose loss also needs
// the network's answer at a second noise level. Change unet/flags.h, Objective and make_objective (a parameter), and
// forward_and_loss ("A training step"; a branch that calls a new operation). Write the formula once for both builds, beside
// tuning_loss. Add the operation's prototype to interface.h, its loops to dev/reference.h, and its kernel beside
// loss_forward_backward ("Small operations").
//
// The functions, in the order in which they run: make_objective runs once. Then draw_level runs for each sample. It
// returns one of the levels that ddpm_levels has made, or calls ask or student_level. Samplers call level_at, which
// returns the level of any sigma.

// The ratio of a noise level is the coefficient of the noise divided by the coefficient of x_0. A sigma that draw_level
// draws is such a ratio. So is each sigma between --sigma_max and --sigma_min.
// A Question is what the network is asked at a given ratio. Each member means what the member of the same name means in
// NoiseLevel. So the member `sigma` is the coefficient of the noise alone, and the ratio is sigma / signal. The members
// are double, because ect subtracts nearly equal numbers from each other (student_level). In fp32 the differences would
// have few correct digits.
struct Question {
    double t;
    double signal, sigma;
    double x0_x, x0_out;
    double target_x0, target_noise;
};

// EDM (Karras et al. 2022, table 1). The paper's sigma is the argument `ratio`. The network F sees c_in (x_0 + sigma
// noise) and is told log(sigma) / 4. The image is then D = c_skip (x_0 + sigma noise) + c_out F. The network's input is
// already multiplied by c_in, so x0_x = c_skip / c_in. The loss is lambda (D - x_0)^2 with lambda = 1 / c_out^2. That
// equals the squared error of the network's answer F, whose target is (x_0 - c_skip (x_0 + sigma noise)) / c_out.
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
// x_0 = x_t - t answer. The coefficient of the noise is t, so the ratio is t / (1 - t). The network is told 1000 t.
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

// Returns what the network is shown, told and asked (a Question) if noise and x_0 are mixed in this ratio, by the
// formulas of `frame`: EDM or flow. It is never called for ddpm, whose levels are made by ddpm_level.
HD static inline Question ask(Frame frame, double ratio, double sigma_data) {
    switch (frame) {
    case Frame::DDPM: break;
    case Frame::EDM: return edm_question(ratio, sigma_data);
    case Frame::FLOW: return flow_question(ratio);
    }
    // This is never reached. If a mistake in the program led here, the loss would be NaN, and the training step would
    // report it.
    return Question{NAN, NAN, NAN, NAN, NAN, NAN, NAN};
}

// Returns a model's Frame: the formulas for what the network is shown, told and asked. --objective names them. For ect,
// which works with the formulas of edm or flow, --ect_frame names them.
static Frame frame_of(const Config& c) {
    const char* flag = c.objective == "ect" ? "ect_frame" : "objective";
    return meaning<Frame>(flag, c.frame(), {{"ddpm", Frame::DDPM}, {"edm", Frame::EDM}, {"flow", Frame::FLOW}});
}

// Returns how sigma is drawn in training. (For ddpm nothing reads the result: ddpm draws a timestep, and looks up its
// level in a table.)
static SigmaDraws sigma_draws(const Config& c) {
    const SigmaDraws table{}, edm{c.P_mean, c.P_std, false}, flow{c.t_mean, c.t_std, c.t_std == 0};
    return meaning<SigmaDraws>("objective", c.objective, {{"ddpm", table}, {"edm", edm}, {"flow", flow}, {"ect", edm}});
}

// Returns whether euler, heun and dpmpp_2m take equal steps of t = sigma / (1 + sigma) with a model of this frame.
// Otherwise their sigmas are Karras's schedule. (For other samplers, sampler_sigmas does not use the result.)
static bool has_steps_of_t(Frame frame) {
    switch (frame) {
    case Frame::DDPM: return false;
    case Frame::EDM: return false;
    case Frame::FLOW: return true;
    }
    ALL_CASES_RETURN
}

// Consistency tuning (Geng et al. 2024, "Consistency Models Made Easy"). A student and a teacher, which are the same
// network, see the same image with the same noise: the student at sigma = t, the teacher at a smaller sigma r. (t and r
// are the paper's letters. Both are ratios, as the argument of `ask` is. This t is not what the network is told.) The
// answer of each is turned into an image:
//   x0_x input + x0_out answer = (x0_x signal) x_0 + (x0_x sigma) noise + x0_out answer
// The student's image should equal the teacher's image. So the target of the student's answer is a weighted sum of x_0,
// noise and the teacher's answer. At r = 0 the teacher's image is x_0 itself, and the target is as in edm or flow.

// Returns the teacher's sigma r for a student's sigma t (Geng et al. 2024, section 3): r / t = 1 - n(t) / q^a, where
// n(t) = 1 + k sigmoid(-b t). (q, k, b and d are --ect_q, --ect_k, --ect_b and --ect_d.) If this r is negative, 0 is
// returned. a begins at 1 and grows by 1 every d steps. Then q^a grows, so r approaches t.
HD static inline double teacher_sigma(const Tuning& tuning, double t) {
    const double a = 1 + (double)(*tuning.step / tuning.d);
    const double n = 1 + tuning.k / (1 + exp(tuning.b * t));
    return fmax(t * (1 - n / pow((double)tuning.q, a)), 0.0);
}

// Returns the weight of a sample's loss, if the student's sigma is t and the teacher's sigma is r.
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
    // At r = 0 there is no teacher. `nobody` stands for a teacher whose image is x_0 itself.
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

// Returns the level at which a sample's teacher is asked. If the teacher's sigma r is 0, the teacher's answer is not
// used. But the network computes an answer for every sample of a batch. So in this case the network is shown the
// student's input.
HD static inline NoiseLevel teacher_level(const Objective& o, double t) {
    const double r = teacher_sigma(o.tuning, t);
    Question teacher = ask(o.frame, r > 0 ? r : t, o.sigma_data);
    teacher.target_x0 = 0; // a teacher is not trained, so it has no target
    teacher.target_noise = 0;
    return make_level(teacher);
}

// Makes the objective that the model is trained on. The variational bound is a sum over all T timesteps. Only one
// timestep is drawn for a sample, so the sample's term is multiplied by T. In guided-diffusion the unit of the bound is
// the bit, so the bound is divided by log 2.
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

// ---------------------------------------------------------------------------------------------------------------------
// --- the level of a training sample, drawn, and its share of the loss
// These functions compute how noisy a sample of training or validation is, how --augment changes its image, what
// picture --cond makes of the image, and what the sample's loss consists of. Each works on one sample, one timestep or
// one value. The CPU (dev/reference.h) calls them in loops, and the GPU's kernels call them in each thread.

// --schedule_sampler loss-second-moment (Nichol & Dhariwal 2021, section 3.3): apart from a small share that is the
// same for all t (EVEN_SHARE), the probability of drawing t is proportional to the root mean square of the latest
// HISTORY (10) losses of samples with this t. A sample's loss is then multiplied by `importance`, which is 1 / (T times
// the probability of the sample's t). So the expected loss is the same as with uniform t.
constexpr double EVEN_SHARE = 0.001; // this share of the probability is divided equally among all t

// Stores the losses of those samples of a batch whose timestep is t. row: the floats that are kept for t: its latest
// HISTORY losses, oldest first, and then the number of losses. loss: the losses of all samples of the batch. They have
// been multiplied by `importance`, so each is divided by `importance` before it is stored. Returns the root mean square
// of the row's losses, or -1 while the row has fewer than HISTORY losses.
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

// Draws t for --schedule_sampler loss-second-moment, and returns its level. u: a random number in [0, 1). The interval
// [0, 1) is divided into one part for each t. The length of the part is the probability of this t. The drawn t is the
// one whose part contains u. While some t has fewer than HISTORY losses, all t have the same probability. (Then
// o.rms_losses[t] is -1 for such a t. Before the first step of a new run it is 0 for all t.)
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

// Draws sigma from a log-normal distribution, for edm, for ect, and for flow if --t_std is not 0. Sigma is computed
// from a standard normal number, which is written to *normal. From that number quarter_of_normal finds in which quarter
// of the levels sigma lies.
HD static inline double draw_sigma(const Objective& o, const Words& words, float* normal) {
    float z[4];
    normals(z, words);
    *normal = z[0];
    return exp(o.draws.P_mean + (double)o.draws.P_std * z[0]);
}

// Returns in which quarter of the standard normal distribution z lies: 0 to 3.
HD static inline int quarter_of_normal(float z) {
    constexpr float UPPER = 0.67448975f; // a quarter of the distribution lies above it
    if (z < 0) return z >= -UPPER;
    return 2 + (z >= UPPER);
}

// Returns the level of a sample's teacher. words: the random words that the student's level was drawn from.
HD static inline NoiseLevel draw_teacher(const Objective& o, const Words& words) {
    float z;
    return teacher_level(o, draw_sigma(o, words, &z));
}

// A data file stores a value of an image as uint8_t (1 byte) or as a float in [-1, 1] (4 bytes). image_value returns
// value i of images, in [-1, 1]. canvas_value reads such values itself, without image_value. So a third type of values
// would have to be added to knows_image_values, image_value and canvas_value.
static bool knows_image_values(int bytes) { return bytes == 1 || bytes == 4; }
HD static inline float image_value(const void* images, int bytes, size_t i) {
    if (bytes == 1) return ((const uint8_t*)images)[i] / 127.5f - 1.0f;
    return ((const float*)images)[i];
}

// With --objective ect (Geng et al. 2024) the loss of a sample is weight (sqrt(D + c^2) - c): a weight times the
// pseudo-Huber distance between the student's image and the teacher's image. D is the sum of the squares of the
// differences between the two images. Each difference is x0_out (out - target), where `out` is a value of the student's
// answer. The derivative of the loss with respect to `out` is slope (out - target).
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

// The variational bound is a sum that has a term for each value of an image. A BoundTerm holds such a term, in nats,
// and its derivatives with respect to d (d_mean) and v (d_variance). d = output - target is the error of an output that
// predicts the mean. v is the output that predicts the variance of the same value. (The network's answer has C channels
// for the means. With --learn_sigma, C more channels hold v. Without it, v and range are 0.) The network's variance is
// exp(log_var + u) with u = log_ratio + range (v + 1) / 2. If this variance is learned and v lies between -1 and 1, the
// variance lies between two fixed ones, `small` and beta in ddpm_levels (Nichol & Dhariwal 2021, eq. 15). The term is:
//   t > 0   the KL divergence of two normal distributions, whose means differ by sqrt(kl exp(log_var)) d
//   t = 0   minus the log of the probability that the network's distribution gives to the true value, which is one of
//           the 256 values of a byte
struct BoundTerm {
    float value, d_mean, d_variance;
};

// Returns guided-diffusion's approximation of the probability that a standard normal number is below z. Writes the
// derivative of this probability with respect to z to *density.
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
        // The term is (exp(-u) - 1 + u + exp(-u) kl d^2) / 2. For high t, u is very small, and exp(-u) - 1 + u is only
        // about u^2 / 2. In fp32 this small sum would lose most of its digits, so it is computed in double.
        const double less = expm1(-(double)u); // exp(-u) - 1
        const double pull = (1 + less) * level.kl * d;
        const double value = 0.5 * (less + u + pull * d);
        const double d_variance = 0.5 * slope * (-less - pull * d);
        return BoundTerm{(float)value, (float)pull, (float)d_variance};
    }
    // The 256 values of x_0 lie 2 / 255 apart. So a value stands for the interval from x_0 - 1 / 255 to x_0 + 1 / 255.
    // Its probability is normal_cdf at the interval's upper end (high) minus normal_cdf at its lower end (low). Both
    // ends are measured from the mean, in units of the standard deviation. The mean is the network's estimate of x_0,
    // x0_x input + x0_out output. The true x_0 is x0_x input + x0_out target. So x_0 - mean = -x0_out d.
    const double centered = -(double)level.x0_out * d;
    const double inverse = exp(-0.5 * ((double)level.log_var + u)); // 1 / the standard deviation
    const double high = inverse * (centered + 1.0 / 255);
    const double low = inverse * (centered - 1.0 / 255);
    double dense_high, dense_low; // the density at the two ends
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
    // Both ends of the interval (high, low) contain the factor exp(-u / 2). So the derivative of an end with respect to
    // u is -1 / 2 times that end.
    const double d_mean = (dense_high - dense_low) * inverse * level.x0_out / p;
    const double d_variance = (dense_high * high - dense_low * low) * 0.5 * slope / p;
    return BoundTerm{(float)-log(p), (float)d_mean, (float)d_variance};
}
