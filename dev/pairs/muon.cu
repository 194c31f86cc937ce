// muon.cu - --optimizer muon: the direction of the update of every matrix of weights, and the momentum that it is made of.
//
//   m = 0.95 m + 0.05 g,  X = 0.95 m + 0.05 g                   g: the clipped gradient, as in adamw.cu
//   X = X / |X|; five times: A = X X^T, X = a X + (b A + c A A) X     (X^T X and from the right, if X has more rows than columns)
//   directions = 0.2 sqrt(max(rows, columns)) X                 a, b, c = 3.4445, -4.7750, 2.0315: the singular values end near 1
//   params = params (1 - lr weight_decay) - lr directions       (adamw_update, which updates all other parameters as in adamw.cu)
//   FLOPs    5 (3 S S L + S S S) for a matrix whose sides are S <= L, since A and A A are symmetric; Hopper's 6 S S L + 14 S S S
//   bytes    30 n in bf16 (each iteration reads X twice and writes it once); compute-bound in large matrices
//
//   version 0   a matrix after the other, a dot product of floats for each element of each product: 16 launches a matrix, and small matrices fill no GPU
//   version 1   one launch computes a product of all matrices; operands are floats, which are rounded as they are loaded to registers: one load is on
//               its way while 32 numbers are multiplied. 2.7 ms of a step of quick64 on an H200, 81 ms of one of adm64
//   shipped     muon_momentum, orthogonalise: X, A and B are stored as bf16 (in fp32 as floats), cp.async copies them to a ring of three or four stages,
//               ldmatrix loads fragments; half of the symmetric results; tiles of 128 x 128 where there are enough. The directions lie in X's place
//   Hopper's    orthogonalise_by_wgmma: TMA and wgmma; four products with the long matrix, not ten, since iterations are computed from X X^T alone; fp16
//
//   make -C dev muon && dev/muon       python dev/pairs/muon.py [--bench]
#include "harness.h"

// A and B: (S, S). X and directions: the flat arrays. X is overwritten.
static void orthogonalise_v0(float* directions, float* X, float* A, float* B, MuonMatrix m) {
    const size_t S = m.short_side(), L = m.long_side(), n = S * L, columns = m.columns;
    const bool is_wide = m.rows <= m.columns;
    float *from = X + m.offset, *to = directions + m.offset;
    each(1, [=] HD(size_t) {
        double squares = 0;
        for (size_t i = 0; i < n; i++) squares += (double)from[i] * from[i];
        A[0] = squares < MUON_SMALLEST ? 0 : (float)(1 / sqrt(squares));
    });
    each(n, [=] HD(size_t i) { to[i] = from[i] * A[0]; });
    for (int iteration = 0; iteration < MUON_ITERATIONS; iteration++) {
        std::swap(from, to);
        // Row i and place k along it, of the matrix or, if it has more rows than columns, of its transpose
        auto at = [=] HD(size_t i, size_t k) { return is_wide ? i * columns + k : k * columns + i; };
        each(S * S, [=] HD(size_t e) {
            float sum = 0;
            for (size_t k = 0; k < L; k++) sum += from[at(e / S, k)] * from[at(e % S, k)];
            A[e] = sum;
        });
        each(S * S, [=] HD(size_t e) {
            float sum = 0;
            for (size_t k = 0; k < S; k++) sum += A[e / S * S + k] * A[k * S + e % S];
            B[e] = MUON_B * A[e] + MUON_C * sum;
        });
        each(n, [=] HD(size_t e) {
            const size_t i = e / L, k = e % L;
            float sum = 0;
            for (size_t j = 0; j < S; j++) sum += B[i * S + j] * from[at(j, k)];
            to[at(i, k)] = MUON_A * from[at(i, k)] + sum;
        });
    }
    const float* const last = to; // after an odd number of iterations this is X
    float* const result = directions + m.offset;
    each(n, [=] HD(size_t i) { result[i] = last[i] * muon_scale(m); });
}

// The trainer of a network that has these parameters alone, one after the other, as far as Muon knows it.
static Trainer muon_trainer(const std::vector<Param>& params, int ranks = 1) {
    Trainer tr{};
    tr.net.params = params;
    tr.own = slice_of(params.back().offset + params.back().size, 0, ranks);
    make_muon(&tr);
    return tr;
}

// The matrices of the file, each behind a gap of parameters that AdamW updates; another gap is the end.
static Trainer trainer_of(const Arrays& io, int ranks = 1) {
    auto numbers = [&](const char* name) { return (const int*)io.get(name, "i4").bytes.data(); };
    const int *rows = numbers("rows"), *columns = numbers("columns"), *gaps = numbers("gaps");
    std::vector<Param> params;
    auto add = [&](const char* name, const std::vector<int>& shape) {
        const size_t offset = params.empty() ? 0 : params.back().offset + params.back().size;
        params.push_back(Param{name, shape, count_of(shape), offset, INIT_ZERO, 0});
    };
    for (int i = 0; i < io.dim("rows", 0); i++) {
        if (gaps[i]) add("bias", {gaps[i]});
        add("weight", {rows[i], columns[i]});
    }
    add("out.2.weight", {gaps[io.dim("rows", 0)] / 4, 4}); // a matrix, but of the last convolution
    return muon_trainer(params, ranks);
}

// How many of the floats have other bits, of those outside of Muon's matrices or of all.
static double changed(const std::vector<float>& before, const std::vector<float>& after,
                      const std::vector<uint8_t>* is_matrix = nullptr) {
    double count = 0;
    for (size_t i = 0; i < before.size(); i++)
        if (!is_matrix || !(*is_matrix)[i / 64]) count += memcmp(&before[i], &after[i], sizeof(float)) != 0;
    return count;
}

static void save_numbers(Arrays& io, const char* name, const std::vector<double>& values) {
    io.out.push_back({name, [=] { return Arrays::packed(values, {(int)values.size()}); }});
}

// All matrices of the file at once. Gaps are NaN in X, and must stay so; an ok that is 0 leaves all as it is.
static void check_directions(Arrays& io) {
    const Trainer tr = trainer_of(io);
    const size_t whole = tr.own.whole();
    std::vector<float> start(whole, NAN);
    memcpy(start.data(), io.host("X"), io.dim("X", 0) * sizeof(float));
    const std::vector<uint8_t> is_matrix = download(tr.is_matrix, whole / 64);
    float* X = io.memory.upload(start.data(), whole);
    StepState state{};
    StepState* device_state = io.memory.upload(&state, 1);
    orthogonalise(X, tr.muon, device_state);
    const double in_bad_step = changed(start, download(X, whole));

    state.ok = 1;
    copy_to_device(device_state, &state, sizeof state);
    orthogonalise(X, tr.muon, device_state);
    save_numbers(io, "changed", {in_bad_step, changed(start, download(X, whole), &is_matrix)});

    float *X0 = io.memory.upload(start.data(), whole), *directions0 = io.memory.poisoned<float>(whole);
    for (size_t i = 0; i < tr.muon.matrices.size(); i++) {
        const MuonMatrix& m = tr.muon.matrices[i];
        const size_t square = (size_t)m.short_side() * m.short_side();
        io.save_plain(text("direction%zu", i), X + m.offset, {m.rows, m.columns});
        if (act_element != Element::FP32) continue; // version 0 is the same in bf16, but the reference is not
        orthogonalise_v0(directions0, X0, io.memory.poisoned<float>(square), io.memory.poisoned<float>(square), m);
        io.save_plain(text("direction%zu.v0", i), directions0 + m.offset, {m.rows, m.columns});
    }
}

// Several steps of all parameters, each with gradients, losses and directions from the file, as update_slice takes them: X lies in the gradients' place,
// and then the directions.
// With several ranks, a part of m, v and ema for each, here on one device.
static void check_steps(Arrays& io) {
    const int steps = io.dim("grads", 0), n = io.dim("grads", 1), B = io.dim("losses", 1);
    const int ranks = (int)io.integer("ranks");
    const Trainer tr = trainer_of(io, ranks);
    const size_t whole = tr.own.whole();
    auto real = [&](const char* name) { return (float)io.real(name); };
    AdamW h{};
    h.lr = real("lr");
    h.weight_decay = real("weight_decay");
    h.beta1 = real("beta1");
    h.beta2 = real("beta2");
    h.eps = real("eps");
    h.grad_clip = real("grad_clip");
    h.ema_rate = real("ema_rate");
    h.max_steps = 100;
    StepState state{};
    state.updates = io.integer("updates");
    StepState* device_state = io.memory.upload(&state, 1);
    auto padded = [&](const float* values) {
        std::vector<float> flat(whole);
        memcpy(flat.data(), values, n * sizeof(float));
        return flat;
    };
    float* params = io.memory.upload(padded(io.host("params")).data(), whole);
    act* copy = make_copy(params, whole);
    io.save_activation("copy", copy, {n});
    float* grads = io.memory.poisoned<float>(whole);
    const std::vector<uint8_t> is_matrix = download(tr.is_matrix, whole / 64);
    struct Part {
        Slice own;
        float* arrays[3]; // ema, m, v
    };
    const char* const names[] = {"ema", "m", "v"};
    std::vector<Part> parts;
    for (int r = 0; r < ranks; r++) {
        Part part{tr.own, {}};
        part.own.rank = r;
        for (int k = 0; k < 3; k++) {
            std::vector<float> flat = padded(io.host(names[k])), mine(part.own.owned());
            for (size_t i = 0; i < mine.size(); i++) mine[i] = flat[part.own.flat(i)];
            part.arrays[k] = io.memory.upload(mine.data(), mine.size());
        }
        parts.push_back(part);
    }
    auto flat_of = [&](int k) { // an array of all ranks' parts
        std::vector<float> flat(whole);
        for (const Part& part : parts) {
            const std::vector<float> mine = download(part.arrays[k], part.own.owned());
            for (size_t i = 0; i < mine.size(); i++) flat[part.own.flat(i)] = mine[i];
        }
        return flat;
    };
    auto everything = [&] {
        std::vector<float> all = download(params, whole);
        const std::vector<float> more[] = {download(grads, whole), flat_of(0), flat_of(1), flat_of(2)};
        for (const auto& one : more) all.insert(all.end(), one.begin(), one.end());
        return all;
    };

    const size_t stretches = (n + STRETCH - 1) / STRETCH;
    const Slice all = slice_of(n);
    double *loss = io.memory.poisoned<double>(B), *squares = io.memory.poisoned<double>(stretches);
    const std::vector<int> quarter(B);
    const int* quarters = io.memory.upload(quarter.data(), B);
    float* const momenta = io.host_output("momenta", {steps, n});
    std::vector<double> verdicts;
    double in_bad_steps = 0, in_gaps = 0;
    for (int s = 0; s < steps; s++) {
        const std::vector<float> gradient = padded(io.host("grads") + (size_t)s * n);
        copy_to_device(grads, gradient.data(), whole * sizeof(float));
        copy_to_device(loss, (const double*)io.get("losses", "f8").bytes.data() + s * B, B * sizeof(double));
        const std::vector<float> before = everything();
        sum_gradients(grads, {{squares}}, RankGradients{grads, nullptr, all}, false);
        judge_step(device_state, squares, stretches, loss, quarters, h, B);
        auto each_rank = [&](const std::function<void(const Update&, const Slice&)>& f) {
            for (const Part& p : parts) {
                const auto& [ema, m, v] = p.arrays;
                f({{{params}}, {{copy}}, all.n, ema, m, v, grads, tr.is_matrix}, p.own);
            }
        };
        each_rank([&](const Update& u, const Slice& own) { muon_momentum(grads, u, device_state, h, own); });
        std::vector<float> X = download(grads, whole);
        const bool ok = download(device_state, 1)[0].ok;
        for (int i = 0; i < n; i++) momenta[(size_t)s * n + i] = ok && is_matrix[i / 64] ? X[i] : 0;
        in_gaps += changed(gradient, X, &is_matrix);
        if (ok) { // as if orthogonalise had made the file's directions of X
            for (int i = 0; i < n; i++)
                if (is_matrix[i / 64]) X[i] = io.host("directions")[(size_t)s * n + i];
            copy_to_device(grads, X.data(), whole * sizeof(float));
        }
        each_rank([&](const Update& u, const Slice& own) { adamw_update(u, device_state, h, own); });
        next_step(&device_state->step);
        verdicts.push_back(ok);
        if (!ok) in_bad_steps += changed(before, everything());
    }
    save_numbers(io, "verdicts", verdicts);
    save_numbers(io, "changed", {in_bad_steps, in_gaps});
    io.save_plain("params_out", params, {n});
    for (int k = 0; k < 3; k++)
        memcpy(io.host_output(text("%s_out", names[k]), {n}), flat_of(k).data(), n * sizeof(float));
}

static void check(Arrays& io) { io.has("grads") ? check_steps(io) : check_directions(io); }

// The matrices of one shape together, then all of the network.
static void bench_directions(const std::string& shape, const std::vector<Param>& params, bool naive) {
    const Trainer tr = muon_trainer(params);
    const size_t n = tr.own.whole();
    Work work{0, 0};
    for (const MuonMatrix& m : tr.muon.matrices) {
        const double S = m.short_side(), L = m.long_side();
        work.flop += MUON_ITERATIONS * (3 * S * S * L + S * S * S);
        work.bytes += MUON_ITERATIONS * 3 * act_bytes() * S * L;
    }
    StepState state{};
    state.ok = 1;
    BenchArrays a(4.0 * n);
    StepState* device_state = a.memory.upload(&state, 1);
    const auto X = a.floats(n);
    if (naive) {
        const size_t square = (size_t)tr.muon.matrices[0].short_side() * tr.muon.matrices[0].short_side();
        float *A = a.memory.poisoned<float>(square), *B = a.memory.poisoned<float>(square);
        float* directions = a.memory.poisoned<float>(n);
        bench_row(shape, "muon.v0", work, a, [&](int k) {
            for (const MuonMatrix& m : tr.muon.matrices) orthogonalise_v0(directions, X[k], A, B, m);
        });
    }
    bench_row(shape, "muon", work, a, [&](int k) { orthogonalise(X[k], tr.muon, device_state); });
}

static void bench() {
    Config config;
    apply_preset(&config, "quick64");
    config.preset = "quick64";
    const std::string problem = check_model(&config);
    if (!problem.empty()) die("%s", problem.c_str());
    const UNet net = build_unet(config);
    std::map<std::pair<int, int>, std::vector<Param>> by_shape; // rows, columns
    std::vector<Param> all;
    auto add = [](std::vector<Param>& list, Param p) {
        p.offset = list.empty() ? 0 : list.back().offset + list.back().size;
        list.push_back(p);
    };
    for (const Param& p : net.params) {
        if (!muon_updates(p)) continue;
        add(by_shape[{p.shape[0], (int)(p.size / p.shape[0])}], p);
        add(all, p);
    }
    for (const auto& [shape, params] : by_shape) {
        const auto [rows, columns] = shape;
        const bool naive = (double)rows * columns * std::min(rows, columns) * params.size() < 2e7; // others take long
        bench_directions(text("rows=%d columns=%d count=%zu", rows, columns, params.size()), params, naive);
    }
    bench_directions(text("matrices=%zu", all.size()), all, false);
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
