// bench.cu - how long the steps and forward passes of train_unet take, and where their time goes; all flags of train_unet hold, too.
//
//   dev/bench --bench 20 --preset unet64       20 times the milliseconds of a training step and of a forward pass, as one line of JSON
//   ... --precision fp8                        the milliseconds of a training step and of a forward pass in bf16 and in FP8, the latter with the memory of sampling
//   dev/bench --profile 20 --preset unet64     a table of where the time of a step and of a forward pass goes, by operation and shape
//
// Images and weights are made up (--init FILE: its model's shape). Without either flag it is train_unet itself, for test_launches.py, which wants one
// binary of all.    make -C dev bench; make bench and make profile use it
#define TRAIN_UNET_NO_MAIN
#include <sys/mman.h>

#include "../../train_unet.cu"
#include "timing.h"

// ---------------------------------------------------------------------------------------------------------------------
// Time

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static std::string quantiles(std::vector<double> ms) {
    std::sort(ms.begin(), ms.end());
    auto at = [&](double q) { return ms[(size_t)(q * (double)(ms.size() - 1) + 0.5)]; };
    return text("[%.4f, %.4f, %.4f]", at(0.5), at(0.1), at(0.9));
}

template <class F> static std::vector<double> time_work(int n, F work) {
    const int repeats = STEPS_AHEAD > 1 ? 10 : 1; // on a GPU, so many between two looks at the clock
    std::vector<double> ms;
    int64_t host, *probe = device_alloc<int64_t>(1);
    for (int i = -1; i < n; i++) { // the first turn warms up
        const double start = now();
        for (int k = 0; k < repeats; k++) work();
        copy_to_host(&host, probe, sizeof host); // waits for the device
        if (i >= 0) ms.push_back((now() - start) * 1e3 / repeats);
    }
    device_free(probe);
    return ms;
}

#ifdef __CUDACC__
// A moment in the device's work, also inside a captured graph (a node of its own).
struct Stamp {
    cudaEvent_t event = nullptr;
};
static void stamp(Stamp* s) {
    cudaStreamCaptureStatus capture;
    if (!s->event) CUDA_CHECK(cudaEventCreate(&s->event));
    CUDA_CHECK(cudaStreamIsCapturing(device.queue, &capture));
    CUDA_CHECK(cudaEventRecordWithFlags(s->event, device.queue,
                                        capture == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : 0));
}
static double microseconds(const Stamp& from, const Stamp& to) { // of work that is done
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, from.event, to.event));
    return ms * 1e3;
}

// No launch begins before the one before it has ended.
static void one_by_one(bool on) {
    allowed.early = allowed.batches = !on;
    device.side.queue = on ? device.queue : side_queue;
}
#else
struct Stamp {
    std::chrono::steady_clock::time_point time;
};
static void stamp(Stamp* s) { s->time = std::chrono::steady_clock::now(); }
static double microseconds(const Stamp& from, const Stamp& to) {
    return std::chrono::duration<double, std::micro>(to.time - from.time).count();
}
static void one_by_one(bool) {}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// What is timed

// Images that are made up, in a file without a name.
static Dataset make_images(const Config& c) {
    Dataset data;
    data.path = "the images of dev/bench";
    data.file = memfd_create("images", 0);
    data.count = 4 * c.batch_size;
    data.C = c.in_channels;
    data.H = c.H;
    data.W = c.W;
    data.classes = c.class_cond ? c.num_classes : 0;
    std::vector<uint8_t> images(data.image_at(data.count));
    for (size_t i = 0; i < images.size(); i++) images[i] = (uint8_t)(i * 2654435761u >> 13);
    if (data.file < 0 || write(data.file, images.data(), images.size()) != (ssize_t)images.size())
        die("%s: can't be kept in memory", data.path.c_str());
    return data;
}

static std::vector<float> bench_weights(const UNet& net) {
    std::vector<float> flat(net.flat_size, 1);
    float bound = 0;
    for (const Param& p : net.params) { // all random, as large as a run's first ones: zeros are quicker to multiply
        if (p.shape.size() > 1) bound = p.init == INIT_NORMAL ? 1 : 1 / std::sqrt((float)p.size / p.shape[0]);
        for (size_t e = p.offset; p.init != INIT_ONE && e < p.offset + p.size; e++) {
            const uint32_t once = (uint32_t)e * 2654435761u, twice = (once ^ once >> 15) * 2246822519u;
            flat[e] = (float)(int32_t)(twice ^ twice >> 13) * 0x1p-31f * bound;
        }
    }
    return flat;
}

static Trainer make_bench_trainer(const Config& c) {
    const Dataset data = make_images(c);
    Trainer tr = make_trainer(c, data);
    const std::vector<float> flat = bench_weights(tr.net);
    copy_to_device(tr.params, flat.data(), flat.size() * sizeof(float));
    cast_params(tr.copy, tr.params, tr.net.flat_size);
    tr.net.t = tr.t;
    tr.net.labels = (int*)(tr.batch[0].device + data.labels_at(c.batch_size / world.size));
    tr.net.values = (float*)(tr.batch[0].device + data.values_at(c.batch_size / world.size));
    return tr;
}

static void forward_pass(Trainer* tr, Graph* graph) {
    replay(graph, [&] {
        unet_forward(&tr->net, Weights{tr->params, tr->copy, tr->fp8}, Dropout{}, tr->net.B);
        mark({""});
    });
}

static void bench(const Config& c, int n) {
    Trainer tr = make_bench_trainer(c);
    int64_t step = 0;
    Graph forward;
    const std::string steps = quantiles(time_work(n, [&] { train_step(&tr, step++); }));
    const double gibibytes = device_bytes / 0x1p30;
    const std::string passes = quantiles(time_work(n, [&] { forward_pass(&tr, &forward); }));
    printf(
        "{\"program\": \"train_unet\", \"model\": \"%s\", \"gpus\": %d, \"batch\": %d, \"precision\": \"%s\", \"step_ms\": %s, "
        "\"forward_ms\": %s, \"memory_gib\": %.3f}\n",
        c.preset.c_str(), world.size, c.batch_size, name_of(act_element), steps.c_str(), passes.c_str(), gibibytes);
}

// The milliseconds of a forward pass of a network that only draws samples.
static std::string time_sampling(Config c, const char* precision, int n) {
    c.precision = precision;
    UNet net = build_unet(c);
    plan_memory(&net, c.micro(), false);
    net.t = device_alloc<float>(net.B);
    net.labels = device_alloc<int>(net.B);
    net.values = device_alloc<float>((size_t)net.B * c.num_values());
    net.cond = device_alloc<float>((size_t)net.B * c.H * c.W * c.cond_channels);
    const std::vector<float> flat = bench_weights(net);
    float* const params = device_copy(flat);
    act* const copy = make_copy(params, net.flat_size);
    cast_params(copy, params, net.flat_size);
    const Weights weights{params, copy, make_fp8_weights(net, flat)};
    Graph graph;
    return quantiles(time_work(n, [&] { replay(&graph, [&] { unet_forward(&net, weights, Dropout{}, net.B); }); }));
}

// The milliseconds of a training step, whose largest arrays are given back.
static std::string time_training(Config c, const char* precision, int n, double* gibibytes) {
    c.precision = precision;
    const size_t before = device_bytes;
    Trainer tr = make_bench_trainer(c);
    int64_t step = 0;
    const std::string ms = quantiles(time_work(n, [&] { train_step(&tr, step++); }));
    *gibibytes = (device_bytes - before) / 0x1p30;
    for (Graph& g : tr.graph) free_graph(&g);
    for (void* p : {(void*)tr.net.arena, (void*)tr.m, (void*)tr.v}) device_free(p);
    return ms;
}

static void bench_fp8(const Config& c, int n) {
    const char* const usual = name_of(act_element);
    double usual_gibibytes, gibibytes;
    const std::string usual_step = time_training(c, usual, n, &usual_gibibytes);
    const std::string step = time_training(c, "fp8", n, &gibibytes);
    const size_t before = device_bytes;
    const std::string usual_pass = time_sampling(c, usual, n);
    const size_t between = device_bytes;
    const std::string pass = time_sampling(c, "fp8", n);
    printf("{\"program\": \"train_unet\", \"model\": \"%s\", \"gpus\": %d, \"batch\": %d, \"precision\": \"fp8\", "
           "\"step_%s_ms\": %s, \"step_ms\": %s, \"training_%s_gib\": %.3f, \"training_gib\": %.3f, "
           "\"forward_%s_ms\": %s, \"forward_ms\": %s, \"memory_%s_gib\": %.3f, \"memory_gib\": %.3f}\n",
           c.preset.c_str(), world.size, c.batch_size, usual, usual_step.c_str(), step.c_str(), usual, usual_gibibytes,
           gibibytes, usual, usual_pass.c_str(), pass.c_str(), usual, (between - before) / 0x1p30,
           (device_bytes - between) / 0x1p30);
}

// ---------------------------------------------------------------------------------------------------------------------
// What an operation costs at least

struct OpCost {
    std::string name;
    double bytes, flops; // every input read once, every output written once; 2 for a multiply-add
    bool matrix = false; // flops that tensor cores could do
    bool fp8 = false;    // ... in FP8
};

static OpCost layer_cost(const UNet& net, const Operation& op) {
    const Layer& l = *op.layer;
    const LayerKind& kind = *l.kind;
    const Pass pass = op.pass;
    const int B = net.B;
    const Tensor none{}, &x1 = l.x1 < 0 ? none : net.tensors[l.x1], &x2 = l.x2 < 0 ? none : net.tensors[l.x2],
                         &out = net.tensors[l.out];
    auto buffer_bytes = [&](int buffer) { return buffer < 0 ? 0.0 : (double)net.buffers[buffer].bytes * B; };
    auto tensor_bytes = [&](int tensor) { return tensor < 0 ? 0.0 : buffer_bytes(net.tensors[tensor].buffer); };
    auto addends = [&](const GradPlan& g) {
        return buffer_bytes(g.d) + buffer_bytes(g.add1) + buffer_bytes(g.add2) + buffer_bytes(g.fp8);
    };
    const bool fp8 = net.config.precision == "fp8";
    // A tensor that is written in FP8 takes a byte for each number, also if its buffer has room for bf16 (plan_fp8).
    auto read_bytes = [&](int tensor) {
        if (tensor < 0 || !fp8 || !net.tensors[tensor].fp8) return tensor_bytes(tensor);
        const Tensor& t = net.tensors[tensor];
        return (double)B * t.H * t.W * t.C;
    };
    const double in = read_bytes(l.x1) + read_bytes(l.x2), grads = addends(l.d1) + addends(l.d2);
    const double weights = l.weight < 0 ? 0 : (double)net.params[l.weight].size, T = (double)out.H * out.W,
                 pixels = B * T;
    OpCost cost{kind.name, in + read_bytes(l.out), 0};
    if (pass != FORWARD) cost.bytes = (kind.backward_reads & LayerKind::INPUT ? in : 0) + buffer_bytes(l.dout) + grads;
    if (pass != FORWARD && kind.backward_reads & LayerKind::OUTPUT) cost.bytes += tensor_bytes(l.out);
    if (l.kind == &LINEAR) {
        cost.flops = 2.0 * B * x1.C * out.C * (pass == FORWARD ? 1 : l.d1.d < 0 ? 1 : 2);
        cost.bytes += (double)x1.C * out.C * (sizeof(float) + (pass == FORWARD ? 0 : sizeof(float)));
    } else if (l.kind == &CONV) {
        const double w = weights * (pass == BACKWARD_WEIGHT ? sizeof(float) : act_bytes());
        cost.flops = 2 * pixels * weights;
        cost.matrix = true;
        cost.bytes = pass == FORWARD ? cost.bytes + tensor_bytes(l.residual)
                                     : buffer_bytes(l.dout) + (pass == BACKWARD ? grads : in);
        cost.bytes += w;
        cost.fp8 = pass == BACKWARD ? l.fp8_gradient : l.fp8;
        if (cost.fp8 && pass == FORWARD) cost.bytes -= w / 2;
        // The gradient dout is read in FP8. Where no norm has written it so, round_gradient does, before the weight gradient.
        if (cost.fp8 && pass != FORWARD) cost.bytes -= buffer_bytes(l.dout) / 2;
        if (pass == BACKWARD_WEIGHT && l.rounds_dout) cost.bytes += buffer_bytes(l.dout_fp8) * 3;
        cost.name +=
            text("%dx%d", l.kernel, l.kernel) + (l.stride > 1 ? " stride 2" : "") + (l.upsample ? " upsampled" : "");
    } else if (l.kind == &ATTENTION) {
        cost.flops = (pass == FORWARD ? 4 : 10) * pixels * T * out.C; // 2 or 5 products of T x T x C
        cost.matrix = true;
        cost.name += text(" %d heads", l.heads);
    }
    if (cost.fp8) cost.name += " fp8";
    cost.name += text(" %d%s->%d", x1.C, l.x2 < 0 ? "" : text("+%d", x2.C).c_str(), out.C);
    if (out.H > 1) cost.name += text(" @%dx%d", out.H, out.W);
    if (pass == FORWARD && l.skip >= 0) {
        const OpCost k = layer_cost(net, {.layer = &net.layers[l.skip]});
        cost.name += " + skip" + k.name.substr(k.name.find(' '));
        cost.flops += k.flops, cost.bytes += k.bytes - tensor_bytes(net.layers[l.skip].out);
    }
    if (pass != FORWARD)
        cost.name += l.kind != &CONV ? ", backward" : pass == BACKWARD ? ", input gradient" : ", weight gradient";
    return cost;
}

static OpCost operation_cost(const Trainer& tr, const Operation& op) {
    if (op.layer) return layer_cost(tr.net, op);
    const Config& c = tr.net.config;
    const std::string name = op.name;
    const double pixels = (double)tr.net.B * c.H * c.W, n = (double)tr.net.flat_size,
                 copy = tr.copy == (act*)tr.params ? 0 : act_bytes();
    if (name == "draw t, noise; q_sample") return {name, pixels * (tr.data.C * tr.data.bytes + 8.0 * c.in_channels), 0};
    if (name == "loss and its gradient") return {name, pixels * 4 * (c.in_channels + 2 * c.out_channels()), 0};
    const double microbatches =
        (double)c.batch_size / c.micro(); // all but the first are added: both read, the sum written
    if (name == "gradient norm") return {name, n * sizeof(float) * (3 - 2 / microbatches), 0}; // per microbatch
    if (name == "AdamW, EMA") return {name, n * (9 * sizeof(float) + copy), 0}; // five arrays in, four and the copy out
    if (name == "Muon") {
        OpCost cost{name, n * 4 * sizeof(float), 0}; // the gradient and the momentum in, the momentum and X out
        for (const MuonMatrix& m : tr.muon.matrices) {
            const double S = m.short_side(), L = m.long_side();
            cost.flops += 6 * S * S * L + 14 * S * S * S; // by the fewest products (gpu/hopper/muon_wgmma.h)
        }
        cost.matrix = true;
        return cost;
    }
    return {name, 0, 0};
}

// ---------------------------------------------------------------------------------------------------------------------
// The profile: a stamp before every operation; what lies between two stamps is the time of the first one's operation.

struct Profile {
    const Trainer* trainer;
    std::vector<OpCost> ops = {};
    std::vector<Stamp> stamps = {}; // of ops
    size_t at = 0;                  // the next mark
};
static Profile* profile = nullptr;

static void add_mark(const Operation& op) {
    Profile& p = *profile;
    if (p.at == p.ops.size()) p.ops.push_back(operation_cost(*p.trainer, op)), p.stamps.push_back(Stamp{});
    stamp(&p.stamps[p.at++]);
}

// Microseconds of each operation of p, n times.
template <class Work> static std::vector<std::vector<double>> time_operations(Profile* p, int n, Work work) {
    const auto quiet = mark;
    std::vector<std::vector<double>> times;
    int64_t host, *probe = device_alloc<int64_t>(1);
    profile = p;
    for (int i = -1; i < n; i++) {
        mark = add_mark;
        p->at = 0;
        work();
        mark = quiet;
        work(); // training steps have two graphs that take turns: the other one
        copy_to_host(&host, probe, sizeof host);
        times.resize(p->ops.size());
        for (size_t k = 0; i >= 0 && k + 1 < p->ops.size(); k++)
            times[k].push_back(microseconds(p->stamps[k], p->stamps[k + 1]));
    }
    device_free(probe);
    return times;
}

struct Row {
    OpCost op;
    int count = 0;
    double us = 0, floor = 0;
};

static void print_rows(std::vector<Row> rows, double whole, double floor) {
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.us - a.floor > b.us - b.floor; });
    printf("%8s %8s %8s %6s %5s %8s %7s %8s  operation\n", "gap, us", "us", "floor", "share", "count", "TFLOP/s",
           "TB/s", "ceiling");
    printf("%8.1f %8.1f %8.1f\n", whole - floor, whole, floor);
    for (const Row& r : rows)
        printf("%8.1f %8.1f %8.1f %5.1f%% %5d %8.2f %7.3f %7.0f%%  %s\n", r.us - r.floor, r.us, r.floor,
               100 * r.us / whole, r.count, r.op.flops / r.us * 1e-6, r.op.bytes / r.us * 1e-6, 100 * r.floor / r.us,
               r.op.name.c_str());
}

// Microseconds of an empty launch.
static double launch_time(int n) {
    Graph chain;
    constexpr int CHAIN = 100;
    auto launch_nothing = [] {
        for (int i = 0; i < CHAIN; i++) do_nothing();
    };
    const double us = median(time_work(n, [&] { replay(&chain, launch_nothing); })) * 1e3 / CHAIN;
    free_graph(&chain);
    return us;
}

// Where the time of work goes, by operation and shape; medians of n runs. floor: what the operation's bytes and FLOPs take at timing.h's ceilings.
// Operations are timed one at a time, without what otherwise runs beside or together with them. A mark in a graph costs time itself; the same is taken
// off each, so that the times, which include the launches, add up to what the work takes one by one without marks.
template <class Work>
static void print_profile(const char* title, int n, const Trainer& tr, std::vector<Graph*> graphs, Work work) {
    auto recapture = [&](bool alone) {
        for (Graph* g : graphs) free_graph(g);
        one_by_one(alone);
    };
    const double overlapped = median(time_work(n, work)) * 1e3;
    const size_t launches = graphs[0]->nodes;
    recapture(true);
    const double alone = median(time_work(n, work)) * 1e3;
    recapture(true);
    Profile marks{&tr};
    const std::vector<std::vector<double>> times = time_operations(&marks, n, work);
    recapture(false);
    const size_t ops = marks.ops.size() - 1;
    double marked = 0, floor = 0;
    for (size_t k = 0; k < ops; k++) marked += median(times[k]);
    const double mark_cost = launches ? (marked - alone) / (double)ops : 0,
                 whole = launches ? alone : marked; // a CPU's are free
    std::map<std::string, Row> by_name;
    for (size_t k = 0; k < ops; k++) {
        OpCost op = marks.ops[k];
        double peak = op.matrix && act_element == Element::BF16 ? CEILING_BF16 : CEILING_FP32;
        if (op.fp8) peak *= 2;
        Row& row = by_name[op.name];
        if (CEILING_BYTES > 0) row.floor += std::max(op.bytes / CEILING_BYTES, op.flops / peak) * 1e6;
        row.us += median(times[k]) - mark_cost;
        if (row.count++) op.bytes += row.op.bytes, op.flops += row.op.flops;
        row.op = op;
    }
    std::vector<Row> rows;
    for (const auto& entry : by_name) rows.push_back(entry.second), floor += entry.second.floor;
    const double launch = launch_time(n);
    printf(
        "%s: %.0f us, or %.0f one operation at a time; %zu operations in %zu launches (empty ones: %.2f us each, %.0f us in all)\n",
        title, overlapped, whole, ops, launches, launch, launch * (double)launches);
    print_rows(rows, whole, floor);
}

static void print_profiles(const Config& c, int n) {
    Trainer tr = make_bench_trainer(c);
    int64_t step = 0;
    Graph forward;
    const char* const precision = c.precision == "fp8" ? "fp8" : name_of(act_element);
    printf("%s, batch %d, %s\n", c.preset.c_str(), c.batch_size, precision);
    print_profile("a training step", n, tr, {&tr.graph[0], &tr.graph[1]}, [&] { train_step(&tr, step++); });
    print_profile("a forward pass", n, tr, {&forward}, [&] { forward_pass(&tr, &forward); });
}

// Takes --bench N or --profile N out of the command line; 0: it is not there.
static int take_count(std::vector<char*>* words, const char* flag) {
    const auto found =
        std::find_if(words->begin(), words->end(), [&](const char* word) { return !strcmp(word, flag); });
    if (found == words->end()) return 0;
    const int n = found + 1 == words->end() ? 0 : atoi(found[1]);
    if (n < 1) die("%s: needs a number, such as %s 20", flag, flag);
    words->erase(found, found + 2);
    return n;
}

int main(int argc, char** argv) {
    leave_out();
    std::vector<char*> words(argv, argv + argc);
    const int steps = take_count(&words, "--bench"), profiles = take_count(&words, "--profile");
    if (!steps && !profiles) return run_program(argc, argv);
    start_process(argv);
    find_ranks();
    Config c;
    parse_command_line(&c, (int)words.size(), words.data());
    take_aliases(&c);
    take_num_gpus(c.num_gpus, c.rank_timeout, argv);
    if (c.preset.empty()) c.preset = PRESET_ELSE; // fashion32 or unet64, which all earlier figures are of
    apply_preset(&c, c.preset);
    if (!c.init.empty()) take_model_file(&c, open_model(c.init), false);
    if (c.class_cond && !c.num_classes) c.num_classes = 10; // a run takes their number from its data
    start_device(c.precision, c.device);
    join_devices(c.exchange == "auto");
    check_run(&c, "");
    const std::string error = check_model(&c);
    if (!error.empty()) die("%s", error.c_str());
    const bool fp8 = c.precision == "fp8";
    if (fp8 && steps) bench_fp8(c, steps);
    else if (steps) bench(c, steps);
    if (profiles) print_profiles(c, profiles);
}
