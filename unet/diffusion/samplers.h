// samplers.h - from noise to images: ddpm, ddim, euler, heun, dpmpp_2m, consistency.
#pragma once
#include "../gpu/shared.h"
#include "objectives.h"

// A sampler makes an image out of noise in steps. All samplers work on x = x_0 + sigma noise, whatever the model was
// trained on. (A model of T timesteps is shown x_t = signal x. Then sigma^2 = (1 - alpha_bar) / alpha_bar.) From step
// to step sigma falls (with --inpaint it also rises again), and at the end it is 0. In each step the network's answer
// is turned into x0, its estimate of x_0. Papers write D(x; sigma) for x0. The slope of the ODE that takes noise away
// is
//
//   dx / dsigma = (x - x0) / sigma                                     (Karras et al. 2022, eq. 1 and 3)
//
// A step is one Move, or (heun) two. Each sampler has a function for the coefficients of a Move, from x with sigma s to
// x' with sigma n. m is an image that the sampler remembers, and z is new noise:
//
//   x' = (.x) x + (.x0) x0 + (.m) m + (.noise) z           m' = (.m_x) x + (.m_x0) x0
//
// m stays as it is if .m_x and .m_x0 are 0. One kernel (sampler_step) computes the moves of all samplers.
struct Move {
    double sigma;             // s, the sigma of x
    double x, x0;             // coefficients of x'
    double m = 0, noise = 0;  // coefficients of x', too
    double m_x = 0, m_x0 = 0; // coefficients of m'
    double learned_low = 0;   // if the network chooses the noise's standard deviation: the smallest; else 0
    double learned_high = 0;  // the largest
    double known_until = -1;  // with --inpaint, in a step's last move: n, for keep_known (see device_step); else -1
};

// Euler's method: x' = x + (n - s) (x - x0) / s, written as a weighted mean of x and x0. If s is much larger than n,
// the two terms of the formula are large numbers that nearly cancel.
static Move euler_step(double s, double n) { return Move{.sigma = s, .x = n / s, .x0 = 1 - n / s}; }

// The standard deviation of q(x_n | x_s, x_0): x_s is the image with noise of sigma s, and x_n has the smaller sigma n.
// (In Ho et al. 2020, eq. 7, they are x_t and x_(t-1), each multiplied by the signal of its timestep.)
static double posterior_deviation(double s, double n) { return n * std::sqrt(s * s - n * n) / s; }

// DDIM (Song et al. 2021, eq. 12 and 16). With eta = 0 it is Euler's method. With eta > 0 a step goes to a sigma below
// n, and new noise raises the sigma to n again.
static Move ddim_step(double s, double n, double eta) {
    const double noise = eta * posterior_deviation(s, n);
    Move move = euler_step(s, std::sqrt(n * n - noise * noise));
    move.noise = noise;
    return move;
}

// DDPM (Ho et al. 2020, eq. 6 and 7): x' is the mean of q(x_n | x_s, x_0) plus noise. Euler's step from s to the sigma
// n^2 / s leads to this mean. The variance of the noise is one of two fixed values (section 3.2; --sigma_small), or the
// network chooses one between them (Nichol & Dhariwal 2021, eq. 15). The last step adds no noise.
static Move ddpm_step(const Config& c, double s, double n) {
    const double small = posterior_deviation(s, n);
    double large = 0;
    if (n > 0) large = std::sqrt((s * s - n * n) * (1 + n * n) / (1 + s * s));
    Move move = euler_step(s, n * n / s);
    move.noise = c.sigma_small ? small : large;
    if (c.learned_variance() && n > 0) {
        move.learned_low = small;
        move.learned_high = large;
    }
    return move;
}

// Heun's method (Karras et al. 2022, algorithm 1) uses the mean of the slopes at both ends of the step. So a step is
// two moves. The first is Euler's step from x to y, and x0 is remembered. Then the network is asked about y, and y0 is
// its estimate of x_0:
//   x' = x + (n - s) ((x - x0) / s + (y - y0) / n) / 2     (the mean of the two slopes)
//      = y + (n - s) ((y - y0) / n - (x - x0) / s) / 2     (because y = x + (n - s) (x - x0) / s)
//      = y + (n - s) / (2 n) (x0 - y0)                     (because y lies on the line from x to x0)
// A step to n = 0 is Euler's step alone.
static void add_heun_step(std::vector<Move>* moves, double s, double n) {
    Move to_y = euler_step(s, n);
    if (n > 0) to_y.m_x0 = 1;
    moves->push_back(to_y);
    if (n == 0) return;
    const double half_step = (n - s) / (2 * n);
    moves->push_back(Move{.sigma = n, .x = 1, .x0 = -half_step, .m = half_step});
}

// DPM-Solver++(2M) (Lu et al. 2022, algorithm 2; the paper's lambda is -log(sigma)): Euler's step with an x0 that is
// extrapolated from this step's x0 and that of the step before, which began at sigma_before (0: there is none).
static Move dpmpp_2m_step(double sigma_before, double s, double n) {
    Move move = euler_step(s, n);
    if (n == 0) return move;
    move.m_x0 = 1;
    if (sigma_before == 0) return move;
    const double r = std::log(sigma_before / s) / std::log(s / n);
    const double of_x0 = move.x0;
    move.x0 = of_x0 * (1 + 1 / (2 * r));
    move.m = -of_x0 / (2 * r);
    return move;
}

// Song et al. 2023, "Consistency Models", algorithm 1: the next x is x0 plus new noise of sigma n.
static Move consistency_step(double s, double n) { return Move{.sigma = s, .x = 0, .x0 = 1, .noise = n}; }

// --S_churn (Karras et al. 2022, algorithm 2): before a step of euler or heun, noise is added, which multiplies sigma
// by 1 + gamma. N: the number of steps.
static double churn_gamma(const Config& c, double sigma, int N) {
    const bool churns = sigma >= c.S_min && sigma <= c.S_max;
    return churns ? std::min((double)c.S_churn / N, std::sqrt(2.0) - 1) : 0;
}

// --timestep_respacing ddimN: the N timesteps 0, stride, 2 stride and so on below T.
static std::vector<int> strided_timesteps(int T, const std::string& respacing) {
    const int wanted = std::clamp(atoi(&respacing[strlen("ddim")]), 2, T);
    const int stride = (T + wanted - 1) / wanted;
    std::vector<int> steps;
    for (int t = 0; t < T; t += stride) steps.push_back(t);
    must(respacing == "ddim" + std::to_string(steps.size()), "--timestep_respacing " + respacing,
         text("no whole stride makes so many of the %d steps; ddim25 or 25 may", T));
    return steps;
}

// The timesteps of a sampler in ascending order, as guided-diffusion's space_timesteps. respacing:
//   ""            all timesteps
//   "ddimN"       N timesteps at equal distances, from 0 on
//   "n1,n2,..."   [0, T) is divided into parts, whose lengths differ by 1 at most; n1 timesteps are kept in the first
//                 part, n2 in the second, etc. If n1 is alone and 1, it is the last one, whose noise is the start's
static std::vector<int> space_timesteps(int T, const std::string& respacing) {
    if (respacing.starts_with("ddim")) return strided_timesteps(T, respacing);
    const std::string flag = "--timestep_respacing " + respacing;
    std::vector<float> counts{(float)T};
    const bool is_list = respacing.empty() || parse_list(respacing, &counts);
    must(is_list && counts.size() <= (size_t)T, flag,
         "must be a number of steps, ddim and a number, or numbers with commas");

    const int parts = (int)counts.size();
    const int least = parts == 1; // the smallest count that is allowed
    std::vector<int> steps;
    int start = 0; // where the part begins
    for (int i = 0; i < parts; i++) {
        const bool one_more = i < T % parts;
        const int size = T / parts + one_more;
        const float count = counts[i];
        must(count >= least && count <= size && count == std::floor(count), flag,
             text("can't take %.9g of %d steps; use %d to %d", count, size, least, size));
        // Spread evenly, from the first step of this part to its last one.
        const double stride = count <= 1 ? 1 : (size - 1) / (count - 1.0);
        double position = parts == 1 && count == 1 ? size - 1 : 0;
        for (int k = 0; k < count; k++) {
            steps.push_back(start + (int)std::nearbyint(position));
            position += stride;
        }
        start += size;
    }
    must(!steps.empty(), flag, "keeps no step");
    return steps;
}

// Sigma number i of the N sigmas of Karras's schedule (Karras et al. 2022, eq. 5), which fall from high to low.
static double karras_sigma(const Config& c, double high, double low, int i, int N) {
    if (N > 1 && i == N - 1) return low; // with a small rho, the formula's rounding errors could make this sigma 0
    const double start = std::pow(high, 1.0 / c.rho);
    const double end = std::pow(low, 1.0 / c.rho);
    const double fraction = N > 1 ? (double)i / (N - 1) : 0;
    return std::pow(start + fraction * (end - start), c.rho);
}

// The sigma before each of a sampler's N steps, and 0 at the end. known: the sigmas of the T timesteps.
//   ddpm, ddim    the sigmas of the timesteps that --timestep_respacing keeps
//   consistency   Karras's schedule from sigma_max to mid_t. (Geng et al. 2024 take two steps, at 80 and 0.821.)
//   others        Karras's schedule from sigma_max to sigma_min. For a model of flow instead: equal steps of
//                 t = sigma / (1 + sigma), from sigma_max to 0
static std::vector<double> sampler_sigmas(const Config& c, const std::vector<double>& known) {
    const std::vector<int> kept = space_timesteps(c.diffusion_steps, c.timestep_respacing);
    const int N = (int)kept.size();
    std::vector<double> sigmas;
    if (c.goes_by_timesteps()) {
        for (int i = N - 1; i >= 0; i--) sigmas.push_back(known[kept[i]]);
        sigmas.push_back(0);
        return sigmas;
    }
    const Frame frame = frame_of(c);
    const bool consistency = c.sampler == "consistency";
    const bool steps_of_t = has_steps_of_t(frame) && !consistency;
    double high = c.sigma_max;
    double low = consistency ? c.mid_t : c.sigma_min;
    if (frame == Frame::DDPM) { // such a model is only trained on sigmas between those of its first and last timestep
        high = std::min(high, known.back());
        low = std::max(low, known.front());
        if (low > high)
            die("--sigma_min %g, --sigma_max %g: there is no sigma between them that this model knows: %.3g to %.3g",
                c.sigma_min, c.sigma_max, known.front(), known.back());
    }
    for (int i = 0; i < N; i++) {
        const double t = high / (1 + high) * (1 - (double)i / N);
        sigmas.push_back(steps_of_t ? t / (1 - t) : karras_sigma(c, high, low, i, N));
    }
    sigmas.push_back(0);
    return sigmas;
}

// The order in which a sampler takes its N steps. With --inpaint (Lugmayr et al. 2022, "RePaint"), after every
// --jump_length steps it goes back by as many, until it has taken them --jump_n_sample times. The last step is taken
// once, and so are the first (N - 1) % jump_length. With N = 8, jump_length = 3 and jump_n_sample = 2, the order is:
//   0, 1 2 3, 1 2 3, 4 5 6, 4 5 6, 7
static std::vector<int> step_order(const Config& c, int N) {
    // For each level of noise, how many times to go back from it. Level 0 is the least noise, and -1 is no noise.
    std::map<int, int> again;
    if (!c.inpaint.empty())
        for (int level = 0; level < N - c.jump_length; level += c.jump_length) again[level] = c.jump_n_sample - 1;
    std::vector<int> order;
    for (int level = N - 1; level >= 0; level--) {
        order.push_back(N - 1 - level);
        int& left = again[level - 1]; // from level - 1, where this step ends
        if (left > 0) level += c.jump_length;
        left--;
    }
    return order;
}

// --start_from takes only the last steps (Meng et al. 2022, "SDEdit").
static int first_step(const Config& c, int N) {
    if (c.start_from.empty()) return 0;
    const int steps = (int)std::lround((double)c.strength * N);
    return N - std::max(1, steps);
}

struct Route {
    double start = 0; // without --start_from: the first x is start z + churn z' (z, z': standard normal numbers)
    double churn = 0;
    std::vector<Move> moves;
    int64_t first_move = 0; // the first move of the step that first_step returns
};

// Adds the moves of a step from sigma s to sigma n. before: the sigma at which the step before this one began; 0 at the
// first step and after a jump back (--inpaint).
static void add_step(std::vector<Move>* moves, const Config& c, double before, double s, double n) {
    if (c.sampler == "ddpm") moves->push_back(ddpm_step(c, s, n));
    else if (c.sampler == "ddim") moves->push_back(ddim_step(s, n, c.eta));
    else if (c.sampler == "euler") moves->push_back(euler_step(s, n));
    else if (c.sampler == "heun") add_heun_step(moves, s, n);
    else if (c.sampler == "dpmpp_2m") moves->push_back(dpmpp_2m_step(before, s, n));
    else if (c.sampler == "consistency") moves->push_back(consistency_step(s, n));
    else unknown_word("sampler", c.sampler);
    if (!c.inpaint.empty()) moves->back().known_until = n;
}

static Route plan_route(const Config& c, const std::vector<double>& sigmas) {
    const int N = (int)sigmas.size() - 1;
    // Samplers that go by timesteps begin with an x_t of variance 1, as in guided-diffusion. x_t is signal times x, so
    // the variance of x is 1 / signal^2 = 1 + sigma^2.
    const bool variance_1 = c.goes_by_timesteps();
    Route route;
    route.start = variance_1 ? std::sqrt(1 + sigmas[0] * sigmas[0]) : sigmas[0];
    const int first = first_step(c, N);
    int last = -1; // the step before
    for (int i : step_order(c, N)) {
        double s = sigmas[i];
        if (i == first && i > last) route.first_move = (int64_t)route.moves.size();
        if (c.can_churn()) {
            const double gamma = churn_gamma(c, s, N);
            // This is S_noise sqrt(s'^2 - s^2) with s' = s (1 + gamma), without the rounding errors of a difference.
            const double noise = s * std::sqrt(gamma * (2 + gamma)) * c.S_noise;
            if (route.moves.empty()) route.churn = noise;
            else route.moves.back().noise = noise; // the noise is added at the end of the step before
            s *= 1 + gamma;
        }
        const bool follows = i == last + 1 && i > first;
        const double before = follows ? sigmas[i - 1] : 0;
        add_step(&route.moves, c, before, s, sigmas[i + 1]);
        last = i;
    }
    return route;
}

// The level of any sigma. known: the sigmas of the T timesteps. A model of ddpm is told a t between two of its
// timesteps, interpolated linearly in log(sigma).
static NoiseLevel level_at(const Config& c, const std::vector<double>& known, double sigma) {
    const Frame frame = frame_of(c);
    if (frame != Frame::DDPM) return make_level(ask(frame, sigma, c.sigma_data));
    // known[i] <= sigma < known[i + 1]. If sigma is below or above all of known, these are the first two or the last
    // two.
    const size_t last = known.size() - 1;
    const auto above = std::upper_bound(known.begin() + 1, known.begin() + last, sigma);
    const size_t i = (size_t)(above - known.begin()) - 1;
    const double fraction = std::log(sigma / known[i]) / std::log(known[i + 1] / known[i]);
    const double t = (double)i + fraction;
    const double alpha_bar = 1 / (1 + sigma * sigma);
    return ddpm_level(c, alpha_bar, std::min(std::max(t, 0.0), (double)last));
}

// A step of the device reads and writes the network's input u = signal x. known: the sigmas of the T timesteps. then:
// the sigma of the next move; 0 after the last move.
static SamplerStep device_step(const Config& c, const std::vector<double>& known, const Move& move, double then) {
    auto signal_at = [&](double sigma) { return sigma > 0 ? level_at(c, known, sigma).signal : 1.0; };
    const NoiseLevel level = level_at(c, known, move.sigma);
    const bool keeps_known = move.known_until >= 0;
    const double end = keeps_known ? move.known_until : then; // the sigma of x'
    const double next = signal_at(end);
    // Guidance acts only at some sigmas (Kynkaanniemi et al. 2024). At higher sigmas it would make the images less
    // varied, and at lower ones it would change nothing that can be seen.
    const bool is_guided = move.sigma >= c.guidance_min && move.sigma <= c.guidance_max;
    SamplerStep step{};
    step.t = level.t;
    step.guidance = is_guided ? c.guidance_scale : 1;
    step.x0_x = level.x0_x;
    step.x0_out = level.x0_out;
    // The coefficients of u' and m' follow from the formulas of a Move: x = u / signal, and u' = next x'.
    step.next_x = (float)(next * move.x / level.signal);
    step.next_x0 = (float)(next * move.x0);
    step.next_m = (float)(next * move.m);
    step.sigma = (float)(next * move.noise);
    step.m_x = (float)(move.m_x / level.signal);
    step.m_x0 = (float)move.m_x0;
    if (move.learned_low > 0) {
        step.log_sigma = (float)std::log(next * move.learned_low);
        step.range = (float)std::log(move.learned_high / move.learned_low);
    }
    // keep_known replaces the known part of x by the given image plus noise of sigma `end`. If an earlier step comes
    // next, it adds noise to all of x.
    if (keeps_known) {
        const double back = signal_at(then);
        const double added = std::sqrt(std::max(then * then - end * end, 0.0));
        step.known_x = (float)next;
        step.known_sigma = (float)(next * end);
        step.back_x = (float)(back / next);
        step.back_sigma = (float)(back * added);
    }
    return step;
}

// A Route in the form that the device uses. Each Move is a step of its own.
struct SamplerPlan {
    // the network's first input: image * (the image of --start_from) + start * normals + churn * other normals
    float image, start, churn;
    int64_t begin; // the step that sampling begins with
    std::vector<SamplerStep> steps;
};

static SamplerPlan plan_sampler(const Config& c) {
    std::vector<double> known;
    for (double alpha_bar : alpha_bars(c)) known.push_back(std::sqrt((1 - alpha_bar) / alpha_bar));
    const std::vector<double> sigmas = sampler_sigmas(c, known);
    const Route route = plan_route(c, sigmas);
    const std::vector<Move>& moves = route.moves;
    SamplerPlan plan{};
    plan.begin = route.first_move;

    // With --start_from the first x is the given image plus noise of the first move's sigma.
    const double from = moves[plan.begin].sigma;
    const double signal = level_at(c, known, from).signal;
    const bool starts_from_image = !c.start_from.empty();
    plan.image = starts_from_image ? (float)signal : 0;
    plan.start = (float)(signal * (starts_from_image ? from : route.start));
    plan.churn = (float)(signal * route.churn);
    for (size_t i = 0; i < moves.size(); i++) {
        const bool is_last = i + 1 == moves.size();
        const double then = is_last ? 0 : moves[i + 1].sigma;
        plan.steps.push_back(device_step(c, known, moves[i], then));
    }
    return plan;
}

// A sampler's memory. (device): in device memory. B: the samples in the network's batch, two for an image with
// guidance.
struct Sampler {
    SamplerPlan plan;
    SamplerStep* steps; // (device) the plan's steps
    Denoising denoising;
    float* all; // (device) the images of all ranks' batches, in the order of the ranks; null: there is one rank
    int64_t* k; // (device) the number of the sampler's next step
    // (device) the numbers 0 and 1: the steps of the two draws of the first x, of noise and of churn
    int64_t *zero, *one;
    float* t;                      // (device) (B): what the network is told of the noise
    int* labels;                   // (device) (B): the classes
    std::vector<int> own_labels;   // those of the given images or pictures, used in turns; empty: see class_of_image
    float* values;                 // (device) (B, num_values); null: the network reads no numbers
    std::vector<float> value_rows; // rows of cond_dim numbers, used in turns
    float* cond;                   // (device) a batch's pictures (B, H, W, cond_channels); null: there are none
    std::vector<float> pictures;   // (count, H, W, cond_channels), used in turns
    std::vector<float> truth;      // the data's images that the pictures belong to; grids show them, too
    // --start_from or --inpaint: the given images (count, H, W, C), and the masks of --inpaint, used in turns
    std::vector<float> images, masks;
    float *known, *mask; // (device) with --inpaint: the images and masks of a batch (B, H, W, C)
};

// Says in a line what makes samples worse than they could be, and may not be what the user meant.
static void print_doubts(const Config& c) {
    const int first = space_timesteps(c.diffusion_steps, c.timestep_respacing).back();
    const int last = c.diffusion_steps - 1;
    if (c.goes_by_timesteps() && c.start_from.empty() && first < last)
        printf("--timestep_respacing %s: its first step is at timestep %d, but the noise at the start is that of %d; a "
               "number alone, such as 50, begins there\n",
               c.timestep_respacing.c_str(), first, last);
    if (c.sampler == "consistency" && c.objective != "ect")
        printf("--sampler consistency: is for models that --objective ect has tuned for it; this one was not, and its "
               "images are blurred\n");
}

// B: how many samples the network can compute at a time. With guidance, these are B / 2 images, each of them twice.
static Sampler make_sampler(const Config& c, int B) {
    Sampler s{};
    s.plan = plan_sampler(c);
    if (c.sample || c.sample_interval) print_doubts(c);
    const size_t n = (size_t)c.H * c.W * c.in_channels; // values of an image
    s.steps = device_copy(s.plan.steps);
    s.k = device_alloc<int64_t>(1);
    s.zero = device_alloc<int64_t>(1);
    s.one = device_copy(std::vector<int64_t>{1});
    s.t = device_alloc<float>(B);
    s.labels = device_alloc<int>(B);
    if (c.num_values() > 0) s.values = device_alloc<float>((size_t)B * c.num_values());
    s.value_rows = c.value_rows;
    if (c.cond_channels > 0) s.cond = device_alloc<float>((size_t)B * c.H * c.W * c.cond_channels);
    if (world.size > 1) s.all = device_alloc<float>(world.size * B * n);
    // --dynamic_threshold q: x0 is limited to the ceil(q n)-th smallest |x0| of an image's n values, or to 1 if 1 is
    // larger. rank is its place in ascending order, counted from 0. Without the flag, q is 0 and the rank is -1.
    const int rank = (int)std::ceil(c.dynamic_threshold * (double)n) - 1;
    bool remembers = false; // whether some step writes m
    for (const SamplerStep& step : s.plan.steps) remembers = remembers || step.m_x != 0 || step.m_x0 != 0;
    s.denoising.limit = c.clip_denoised || rank >= 0;
    s.denoising.guided = c.guided();
    s.denoising.rank = rank;
    s.denoising.threshold = device_alloc<float>(B);
    s.denoising.m = remembers ? device_alloc<float>(B * n) : nullptr;
    return s;
}

// The class of image number i of a seed. The classes of --classes, the given images' own, or all, are used in turns.
static int class_of_image(const Config& c, const Sampler& s, int64_t i) {
    if (!c.class_cond) return 0;
    if (!c.class_list.empty()) return (int)c.class_list[i % c.class_list.size()];
    return s.own_labels.empty() ? (int)(i % c.num_classes) : s.own_labels[i % s.own_labels.size()];
}

// The numbers (--cond_dim) of image number i.
static std::span<const float> values_of_image(const Config& c, const Sampler& s, int64_t i) {
    const size_t K = c.cond_dim;
    return std::span(s.value_rows).subspan(i * K % s.value_rows.size(), K);
}

// These functions write the conditions of B images, from number `first` on. With guidance the batch holds every image
// twice (copies = 2). For the second copy, what was sometimes left out in training is left out.

static void put_labels(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    std::vector<int> labels(B * copies);
    for (int i = 0; i < B * copies; i++) {
        const bool left_out = i >= B && c.null_class();
        labels[i] = left_out ? c.num_classes : class_of_image(c, *s, first + i % B); // num_classes: no class
    }
    copy_to_device(s->labels, labels.data(), labels.size() * sizeof(int));
}

// A row is cond_dim numbers and then, with --augment, zeros: a sampled image is not changed.
static void put_values(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    const size_t row_size = c.num_values();
    std::vector<float> values(B * copies * row_size);
    for (int i = 0; i < B * copies && c.cond_dim > 0; i++) {
        const bool left_out = i >= B && c.class_dropout > 0; // then the image's numbers are zeros
        if (!left_out) std::ranges::copy(values_of_image(c, *s, first + i % B), values.begin() + i * row_size);
    }
    copy_to_device(s->values, values.data(), values.size() * sizeof(float));
}

static void put_pictures(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    const size_t n = (size_t)c.H * c.W * c.cond_channels;
    const std::vector<float> nothing(n);
    for (int i = 0; i < B * copies; i++) {
        const bool left_out = i >= B && c.cond_dropout > 0;
        const float* const picture = &s->pictures[(first + i % B) * n % s->pictures.size()];
        copy_to_device(s->cond + i * n, left_out ? nothing.data() : picture, n * sizeof(float));
    }
}

// --start_from or --inpaint: writes plan.image times a batch's given images to the network's input x (copies * B, n).
// With --inpaint, plan.image is 0, and the given images and masks are copied to where keep_known reads them.
static void put_given_images(float* x, Sampler* s, int64_t first, int B, int copies, int n) {
    const size_t bytes = n * sizeof(float);
    for (int b = 0; b < B; b++) {
        const size_t position = (size_t)(first + b) * n;
        const float* const given = &s->images[position % s->images.size()];
        if (s->known) {
            const float* const mask = &s->masks[position % s->masks.size()];
            copy_to_device(s->known + (size_t)b * n, given, bytes);
            copy_to_device(s->mask + (size_t)b * n, mask, bytes);
        }
        std::vector<float> image(given, given + n);
        for (float& v : image) v *= s->plan.image;
        for (int copy = 0; copy < copies; copy++) {
            const size_t sample = (size_t)copy * B + b;
            copy_to_device(x + sample * n, image.data(), bytes);
        }
    }
}

// Samples B images of a seed, from number `first` on, into net's input tensor (with guidance, twice). The noise of an
// image does not depend on B. tell: shows the progress, and is called after each step with B times the share of the
// steps that are done. After a signal (stop_signal) the images are unfinished.
static void sample_batch(UNet* net, Weights weights, Sampler* s, int64_t first, int B, auto tell) {
    const Config& c = net->config;
    const int HW = c.H * c.W;
    const int n = HW * c.in_channels;
    const int copies = c.guided() ? 2 : 1;
    const uint64_t seed = (uint64_t)(c.noise_seed >= 0 ? c.noise_seed : c.seed);
    float* const x = tensor_data<float>(net, net->input);
    float* const out = tensor_data<float>(net, net->output);

    put_labels(c, s, first, B, copies);
    if (c.num_values() > 0) put_values(c, s, first, B, copies);
    if (c.cond_channels > 0) put_pictures(c, s, first, B, copies);
    net->t = s->t;
    net->labels = s->labels;
    net->values = s->values;
    net->cond = s->cond;
    if (!s->images.empty()) put_given_images(x, s, first, B, copies, n);
    auto key = [&](uint32_t purpose, const int64_t* step) { return RandomKey{seed, purpose, step, first}; };
    const bool adds = !s->images.empty(); // the noise is added to the given images in x
    for (int copy = 0; copy < copies; copy++) {
        float* const images = x + (size_t)copy * B * n;
        draw_normals(images, B, n, key(RANDOM_SAMPLE_START, s->zero), s->plan.start, adds);
        if (s->plan.churn > 0) draw_normals(images, B, n, key(RANDOM_SAMPLE_START, s->one), s->plan.churn, true);
    }

    // The device counts the steps in s->k, so that a recorded graph can be repeated: one for steps that are guided, and
    // one for all others.
    copy_to_device(s->k, &s->plan.begin, sizeof(int64_t));
    Graph graphs[2];
    const int64_t steps = (int64_t)s->plan.steps.size() - s->plan.begin;
    for (int64_t k = 0; k < steps && !stop_signal; k++) {
        const bool is_guided = s->plan.steps[s->plan.begin + k].guidance != 1;
        replay(&graphs[is_guided], [&] {
            const int answers = is_guided ? 2 * B : B;
            sampler_timesteps(s->t, s->steps, s->k, answers);
            unet_forward(net, weights, Dropout{}, answers);
            const RandomKey noise = key(RANDOM_SAMPLE_NOISE, s->k);
            sampler_step(x, out, s->steps, s->denoising, noise, B, HW, c.in_channels, c.out_channels());
            const RandomKey known_noise = key(RANDOM_KNOWN_NOISE, s->k);
            if (s->known) keep_known(x, s->known, s->mask, s->steps, known_noise, c.guided(), B, n);
            next_step(s->k);
        });
        // The host may be far ahead of the GPU. On a terminal it waits at every 16th step, so that the progress shown
        // is true.
        int64_t reached;
        const bool waits = k % 16 == 15 && terminal_columns();
        if (waits) copy_to_host(&reached, s->k, sizeof reached);
        tell(B * (k + 1.0) / (double)steps);
    }
    for (Graph& graph : graphs) free_graph(&graph);
}

// Samples n images. Rank 0 returns them (n, H, W, C), and other ranks an empty vector. In each round of the loop, every
// rank samples at most one batch. After a signal (stop_signal) there are fewer: those of the batches before it.
static std::vector<float> sample_images(UNet* net, Weights weights, Sampler* s, int n) {
    const Config& c = net->config;
    const size_t size = (size_t)c.H * c.W * c.in_channels; // values of an image
    const int N = world.size;
    const int room = c.guided() ? net->B / 2 : net->B;
    const int share = (n + N - 1) / N;
    const int most = std::min(room, share); // the largest number of images in a rank's batch
    std::vector<float> images(world.rank ? 0 : n * size);
    float* const own = tensor_data<float>(net, net->input);
    const double start = now();
    double told = start;
    auto tell = [&](double done) { // shows the progress: on a terminal twice a second, elsewhere every ten seconds
        const double pause = terminal_columns() ? 0.5 : 10;
        if (now() - told < pause) return;
        told = now();
        const std::string left = duration((told - start) * (n / done - 1));
        show_status(text("sampling: %.0f %%, %s left", 100 * done / n, left.c_str()));
    };
    for (int i = 0; i < n; i += most * N) {
        const int first = i + most * world.rank;
        const int B = std::min(most, n - first); // below 1 if no image is left for this rank
        if (B > 0) sample_batch(net, weights, s, first, B, [&](double done) { tell(i + done * N); });
        if (N > 1) all_gather(s->all, own, most * size * sizeof(float), MAIN_STREAM);
        const float* const made = N > 1 ? s->all : own;
        if (any_rank("a batch of samples", stop_signal)) { // all ranks leave the loop together, without this batch
            images.resize(world.rank ? 0 : i * size);
            break;
        }
        const int count = std::min(most * N, n - i);
        if (!world.rank) copy_to_host(&images[i * size], made, count * size * sizeof(float));
    }
    const bool terminal = terminal_columns() > 0;
    if (told > start && (terminal || !stop_signal)) // progress was shown
        show_status(terminal ? "" : "sampling: 100 %, took " + duration(now() - start));
    return images;
}
#ifdef __CUDACC__ // the GPU

static void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B) {
    each(B, [=] __device__(size_t b) {
        const SamplerStep& s = steps[*k];
        t[b] = s.t;
    });
}

// x is (B, HW, C), with n elements for each image. The pixels of out, the network's answer, have Cout channels. In a
// guided step, the second half of out's batch holds the answers without the condition.
struct SamplerView {
    const float *x, *out;
    int B, n, C, Cout;

    // the index of element e of image b in out
    INLINE size_t place(int b, int e) const {
        const int p = e / C;
        return ((size_t)b * (n / C) + p) * Cout + e - p * C;
    }
    INLINE float predicted_x0(const SamplerStep& s, int b, int e) const {
        const size_t i = place(b, e);
        float answer = out[i];
        if (s.guidance != 1) {
            const float unconditional = out[i + (size_t)B * (n / C) * Cout];
            answer = unconditional + s.guidance * (answer - unconditional);
        }
        return s.x0_x * x[(size_t)b * n + e] + s.x0_out * answer;
    }
};

// Dynamic thresholding: d.threshold[b] is the |x0| with rank d.rank (0: the smallest) of image b. A block works on one
// image. Floats that are not negative have the same order as their bits, read as integers. So four passes find the
// threshold 8 bits at a time, beginning with the highest. A pass looks only at the |x0| that begin with the bits found
// so far, and counts each of the 256 values of the next 8 bits.
static __global__ void __launch_bounds__(1024)
    sampler_threshold_kernel(SamplerView view, const SamplerStep* steps, Denoising d, const int64_t* k) {
    __shared__ int count[256];
    __shared__ int left;       // the rank among the numbers that begin with the bits found so far
    __shared__ uint32_t found; // the bits found so far
    const SamplerStep s = steps[*k];
    const int n = view.n;
    if (threadIdx.x == 0) {
        found = 0;
        left = d.rank;
    }
    for (int shift = 24; shift >= 0; shift -= 8) { // this pass finds bits shift ... shift + 7
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = found;
        for (int e = threadIdx.x; e < n; e += 1024) {
            const float x0 = view.predicted_x0(s, blockIdx.x, e);
            const uint32_t bits = __float_as_uint(fabsf(x0));
            if (shift == 24 || bits >> (shift + 8) == known) atomicAdd(&count[bits >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) { // subtract the counts of smaller values from the rank
            int bin = 0;
            while (left >= count[bin]) {
                left -= count[bin];
                bin++;
            }
            found = known << 8 | bin;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) d.threshold[blockIdx.x] = __uint_as_float(found);
}

// Limits x0 to [-limit, limit], and scales it to [-1, 1]. NaN stays NaN.
INLINE float limited(float x0, float limit) {
    if (x0 < -limit) x0 = -limit;
    else if (x0 > limit) x0 = limit;
    return x0 / limit;
}

// A thread computes four elements by the formulas of SamplerStep. With guidance, the new x is also written to the
// second half of the batch.
static void sampler_step(float* x, const float* out, const SamplerStep* steps, const Denoising& denoising,
                         RandomKey key, int B, int HW, int C, int Cout) {
    const int n = HW * C;
    const SamplerView view{x, out, B, n, C, Cout};
    if (denoising.rank >= 0) launch_behind(sampler_threshold_kernel, B, 1024, 0, view, steps, denoising, key.step);
    each_quad(B, n, [=, d = denoising] __device__(int b, int e) {
        const SamplerStep s = steps[*key.step];
        // With dynamic thresholding (Imagen, Saharia et al. 2022), an image with larger |x0| has a larger limit, but
        // none below 1.
        const float limit = d.rank < 0 ? 1.0f : fmaxf(d.threshold[b], 1.0f);
        float z[4] = {};
        if (s.sigma > 0) normals(z, random_words(key, e / 4, b));
        for (int k = 0; k < 4 && e + k < n; k++) {
            const size_t i = (size_t)b * n + e + k;
            const float v = x[i];
            float x0 = view.predicted_x0(s, b, e + k);
            if (d.limit) x0 = limited(x0, limit);
            float sigma = s.sigma;
            // If sigma is learned, the second half of the answer's channels says where log(sigma) lies: from -1 (least)
            // to 1.
            if (s.range > 0 && s.sigma > 0) {
                const float variance = out[view.place(b, e + k) + C];
                sigma = expf(s.log_sigma + s.range * 0.5f * (variance + 1));
            }
            float next = s.next_x * v + s.next_x0 * x0 + sigma * z[k];
            // m is read before it is overwritten. If no step writes it, d.m is null.
            if (s.next_m != 0) next += s.next_m * d.m[i];
            if (s.m_x != 0 || s.m_x0 != 0) d.m[i] = s.m_x * v + s.m_x0 * x0;
            x[i] = next;
            if (d.guided) x[i + (size_t)B * n] = next;
        }
    });
}

// Inpainting. Where the mask is not above 0, x is replaced by the known image, mixed with as much noise as x has after
// this step. In heun's first move known_x is 0, and nothing happens. If the sampler then goes back to an earlier step,
// noise is added to all of x, so that the known and the new part can be made to fit together (RePaint, Lugmayr et al.
// 2022).
static void keep_known(float* x, const float* image, const float* mask, const SamplerStep* steps, RandomKey key,
                       bool guided, int B, int n) {
    each_quad(B, n, [=] __device__(int b, int e) {
        const SamplerStep s = steps[*key.step];
        if (s.known_x == 0) return;
        const RandomKey back_key{key.seed, RANDOM_BACK_NOISE, key.step, key.sample0};
        float known[4], back[4];
        normals(known, random_words(key, e / 4, b));
        normals(back, random_words(back_key, e / 4, b));
        for (int k = 0; k < 4 && e + k < n; k++) {
            const size_t i = (size_t)b * n + e + k;
            const float noised = s.known_x * image[i] + s.known_sigma * known[k];
            const float now = mask[i] > 0 ? x[i] : noised;
            x[i] = s.back_x * now + s.back_sigma * back[k];
            if (guided) x[i + (size_t)B * n] = x[i];
        }
    });
}
#endif
