// unet.cu - the whole model, forward and backward: the list of layers that build_unet makes of the flags, its memory plan, and the two walks over it.
//
//   x (B, H, W, in_channels), t (B), labels (B) -> out (B, H, W, out_channels); dout -> the gradient of every parameter
//   Parameters come and go by their state_dict names in PyTorch's layout, so the permutations at the file boundary are checked as well.
//   FLOPs    2 * net.flops B forward, twice that backward; unet64: 12.9 GFLOP an image
//   All activations lie in one arena whose buffers are reused; it is poisoned with NaN first, so that nothing can be read before it is written.
//
//   shipped     build_unet, plan_memory, unet_forward, unet_backward
//
//   make -C dev unet && dev/unet       python dev/pairs/unet.py [--bench]
#include "harness.h"

// A network with random parameters in device memory, ready to run.
struct Model {
    UNet net;
    float *params, *grads;
    act* copy;
    Dropout dropout;

    Weights weights() const { return Weights{params, copy}; }
};

static Model make_model(Memory& memory, const Config& config, int B, const std::vector<float>& params,
                        const Dropout& dropout, bool training) {
    Model m{build_unet(config), nullptr, nullptr, nullptr, dropout};
    plan_memory(&m.net, B, training);
    m.params = memory.upload(params.data(), params.size());
    m.copy = make_copy(m.params, params.size());
    cast_params((act*)m.copy, m.params, params.size());
    m.grads = memory.poisoned<float>(params.size());
    memory.blocks.push_back(m.net.arena);
    if ((void*)m.copy != (void*)m.params) memory.blocks.push_back(m.copy);
    const std::vector<char> poison(m.net.arena_bytes, (char)0xFF);
    copy_to_device(m.net.arena, poison.data(), poison.size());
    return m;
}

static Config parse_config(const std::string& line) {
    std::vector<std::string> words{"unet"};
    std::istringstream stream(line);
    for (std::string word; stream >> word;) words.push_back(word);
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    Config config;
    parse_command_line(&config, (int)argv.size(), argv.data());
    const std::string problem = check_model(&config);
    if (!problem.empty()) die("%s", problem.c_str());
    return config;
}

// No layer of the forward pass, nor two that are computed together, writes where it reads.
static void check_plan(const UNet& net) {
    auto overlap = [&](int read, int written) {
        const Buffer &r = net.buffers[read], &w = net.buffers[written];
        return read != written && r.offset < w.offset + w.bytes * net.B && w.offset < r.offset + r.bytes * net.B;
    };
    for (const Layer& l : net.layers) {
        std::vector<int> reads; // buffers
        for (const Layer* k : {&l, l.skip < 0 ? &l : &net.layers[l.skip]})
            for (int x : {k->x1, k->x2, k->residual, k->emb})
                if (x >= 0)
                    reads.insert(reads.end(),
                                 {net.tensors[x].buffer, k->kind == &GROUPNORM ? net.tensors[x].stats : -1});
        for (int r : reads)
            for (int w : {net.tensors[l.out].buffer, net.tensors[l.out].stats, l.saved})
                if (r >= 0 && w >= 0 && net.buffers[r].last_use >= 0 && net.buffers[w].last_use >= 0 && overlap(r, w))
                    die("%s (plan for %s): written where it reads", l.name.c_str(),
                        net.layers.back().dout < 0 ? "sampling" : "training");
    }
}

static void check(Arrays& io) {
    const Config config = parse_config(io.string("flags"));
    const int B = io.dim("x", 0);
    const int64_t step = io.integer("step");
    const Dropout dropout{config.dropout, (uint64_t)config.seed, io.memory.upload(&step, 1), io.integer("sample0"), 0};
    UNet shapes = build_unet(config);
    std::vector<float> params(shapes.flat_size);
    for (const Param& p : shapes.params) permute_param(config, p, &params[p.offset], io.host(p.name), false);

    const size_t n_in = (size_t)B * config.H * config.W * config.in_channels,
                 n_out = (size_t)B * config.H * config.W * config.out_channels();
    auto forward = [&](Model& m, float* out) {
        UNet* net = &m.net;
        check_plan(*net);
        copy_to_device(tensor_data<float>(net, net->input), io.host("x"), n_in * sizeof(float));
        net->t = io.input<float>("t");
        net->labels = io.input<int>("labels");
        if (config.cond_dim) net->values = io.input<float>("values");
        if (config.cond_channels) net->cond = io.input<float>("cond");
        unet_forward(net, m.weights(), m.dropout, B);
        copy_to_host(out, tensor_data<float>(net, net->output), n_out * sizeof(float));
    };
    Model sampling = make_model(io.memory, config, B, params, dropout, false),
          m = make_model(io.memory, config, B, params, dropout, true);
    float* out = io.host_output("out", {B, config.H, config.W, config.out_channels()});
    std::vector<float> sampled(n_out);
    forward(sampling, sampled.data());
    forward(m, out);
    if (memcmp(sampled.data(), out, n_out * sizeof(float)))
        die("the plan for sampling leads to another output than that for training");
    UNet* net = &m.net;
    copy_to_device(output_gradient(net), io.host("dout"), n_out * sizeof(float));
    unet_backward(net, m.weights(), m.grads, m.dropout, B); // they are written where NaN was

    std::vector<float> grads = download(m.grads, params.size());
    for (const Param& p : net->params)
        permute_param(config, p, io.host_output("d" + p.name, p.shape), &grads[p.offset], true);
}

static void bench() {
    for (const BenchModel& model : bench_models()) {
        const Config& config = model.net.config;
        const int B = model.B;
        BenchArrays a(1e9); // far more than a cache holds: one copy
        std::vector<float> params = random_values(model.net.flat_size), t(B);
        for (float& p : params) p *= 0.05f;
        for (int b = 0; b < B; b++) t[b] = (float)(b * 997 % 1000);
        Model m = make_model(a.memory, config, B, params, Dropout{}, true);
        UNet* net = &m.net;
        const std::vector<int> labels(B);
        net->t = a.memory.upload(t.data(), t.size());
        net->labels = a.memory.upload(labels.data(), labels.size());
        const int64_t zero = 0;
        const RandomKey key{0, RANDOM_NOISE, a.memory.upload(&zero, 1), 0};
        const int image = config.H * config.W * config.in_channels;
        const std::string shape =
            text("B=%d H=%d W=%d in=%d channels=%d", B, config.H, config.W, config.in_channels, config.num_channels);
        auto forward = [&](int) {
            draw_normals(tensor_data<float>(net, net->input), B, image, key); // each time: its place is used again
            unet_forward(net, m.weights(), m.dropout, B);
        };
        bench_row(shape, "forward", Work{net->flops * B, 0}, a, forward);
        bench_row(shape, "both", Work{3 * net->flops * B, 0}, a, [&](int k) {
            forward(k);
            draw_normals(output_gradient(net), B, image, key);
            unet_backward(net, m.weights(), m.grads, m.dropout, B);
        });
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
