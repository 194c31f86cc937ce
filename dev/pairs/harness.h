// harness.h - what the pairs of the workshop share: files of named arrays, outputs poisoned with NaN, timing, benchmark tables, main.
//
//   ./NAME file_in file_out    check: reads arrays, runs the operation forward and backward, writes what came out (NAME.py does this); more files may follow
//   ./NAME [fp32|bf16]         benchmark over the real shapes of the models: unet64 at batch 32 (on a CPU also fashion32 at batch 16; beside cuBLASLt,
//                              see cublas.h, all presets)
//
// A pair includes this file, which brings train_unet.cu. It never assumes that the device is the host, nor that an activation's element is a float: what
// operations see comes from Arrays::activation, gradient (act*) and input, output, updated (float*, ...), which are device memory.
// Naive versions of which the two builds have the same are written once: each(n, f) calls f(i) for i < n, in a loop over threads on a CPU, as one thread
// of the GPU for each i in the other build, which is what a naive kernel is; and Values is an activation, read and written element by element.
// A file of arrays is a row of records: one line "name type dim dim ...\n", then the raw bytes. Types: f4 f8 i4 i8 u1, as numpy calls them, and
// b2 for bf16, in which a GPU build returns what it stored so: the Python half allows for that rounding.
#pragma once
#define TRAIN_UNET_NO_MAIN
#include <functional>
#include <memory>
#include <type_traits>

#include "../../train_unet.cu"
#include "../benchmarks/timing.h"

#ifdef __CUDACC__ // of one layer; the program's are of several at once
static void conv_backward_weight(float* dweight, float* dbias, float* demb, int emb_stride, const act* dout,
                                 const act* x1, const act* x2, ConvShape s) {
    conv_backward_weights({{dweight, dbias, demb, emb_stride, dout, x1, x2, s}}, MAIN_STREAM);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// device memory

// bf16 is the upper half of a float, rounded to nearest, ties to even.
static uint16_t bf16_bits(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return 0xFFFF; // NaN stays NaN
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// Activations and convolution weights are act*: float or bf16, as act_element says.
static void act_to_device(act* device, const float* values, size_t n) {
    if (act_element == Element::FP32) {
        copy_to_device(device, values, n * sizeof(float));
        return;
    }
    std::vector<uint16_t> halves(n);
    for (size_t i = 0; i < n; i++) halves[i] = bf16_bits(values[i]);
    copy_to_device(device, halves.data(), n * sizeof(uint16_t));
}

// Blocks of device memory that go when their owner goes.
struct Memory {
    std::vector<void*> blocks;

    Memory() = default;
    Memory(const Memory&) = delete;
    ~Memory() {
        for (void* p : blocks) device_free(p);
    }
    // Every bit set: NaN in every floating-point format, -1 in every integer.
    void* poisoned_bytes(size_t n) {
        void* p = device_alloc<char>(n);
        blocks.push_back(p);
#ifdef __CUDACC__
        CUDA_CHECK(cudaMemsetAsync(p, 0xFF, n, device.queue));
#else
        memset(p, 0xFF, n);
#endif
        return p;
    }
    template <class T> T* poisoned(size_t n) { return (T*)poisoned_bytes(n * sizeof(T)); }
    act* poisoned_activation(size_t n) { return (act*)poisoned_bytes(n * act_bytes()); }

    template <class T> T* upload(const T* host, size_t n) {
        T* p = poisoned<T>(n);
        copy_to_device(p, host, n * sizeof(T));
        return p;
    }
    act* upload_activation(const float* host, size_t n) {
        act* p = poisoned_activation(n);
        act_to_device(p, host, n);
        return p;
    }
};

// Elements of a tensor, whichever type they have. (A type test for each element: naive versions can afford it.)
struct Values {
    act* p;
    Element element;

    HD float operator[](size_t i) const {
#ifdef __CUDACC__
        if (element == Element::BF16) return __bfloat162float(((const bf16*)p)[i]);
#endif
        return ((const float*)p)[i];
    }
    HD void set(size_t i, float v) const {
#ifdef __CUDACC__
        if (element == Element::BF16) ((bf16*)p)[i] = __float2bfloat16(v);
        else
#endif
            ((float*)p)[i] = v;
    }
};

static Values values(const act* p, Element element = act_element) { return Values{const_cast<act*>(p), element}; }

#ifndef __CUDACC__ // there the program has it
// f(i) for every i < n, in any order: f = [=] HD(size_t i) {...}
template <class F> static void each(size_t n, F f) {
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) f(i);
}
#endif

// Room for the Stats of a tensor (B, H, W, C).
static Stats poisoned_stats(Memory& memory, int B, int H, int W, int C) {
    return Stats{memory.poisoned<double>((size_t)B * max_stat_parts(H, W) * C * 2), 0};
}

template <class T> static std::vector<T> download(const T* device, size_t n) {
    std::vector<T> host(n);
    copy_to_host(host.data(), device, n * sizeof(T));
    return host;
}

// ---------------------------------------------------------------------------------------------------------------------
// files of named arrays

using Dims = std::vector<int>;

static size_t count_of(const Dims& dims) {
    size_t n = 1;
    for (int d : dims) n *= (size_t)d;
    return n;
}

template <class T> static const char* file_type() {
    if (std::is_same<T, double>::value) return "f8";
    if (std::is_same<T, int>::value) return "i4";
    if (std::is_same<T, int64_t>::value) return "i8";
    if (std::is_same<T, uint8_t>::value) return "u1";
    return "f4";
}

struct Arrays {
    struct Array {
        std::string type;
        Dims dims;
        std::vector<char> bytes;
    };
    std::map<std::string, Array> in;
    std::vector<std::pair<std::string, std::function<Array()>>> out; // called when the operation is done
    std::vector<std::vector<float>*> host_blocks;
    std::vector<std::unique_ptr<Stats>> stats_blocks;
    Memory memory;

    Arrays() = default;
    Arrays(const Arrays&) = delete;
    ~Arrays() {
        for (auto* block : host_blocks) delete block;
    }

    // --- what the file says
    bool has(const std::string& name) const { return in.count(name) > 0; }
    const Array& get(const std::string& name, const char* type) const {
        if (!has(name)) die("%s: is not in the file of inputs", name.c_str());
        const Array& a = in.at(name);
        if (a.type != type) die("%s: is %s in the file of inputs, expected %s", name.c_str(), a.type.c_str(), type);
        return a;
    }
    int dim(const std::string& name, int axis) const {
        return has(name) ? in.at(name).dims.at((size_t)axis) : 0;
    } // 0: no such array
    int64_t integer(const std::string& name) const { return *(const int64_t*)get(name, "i8").bytes.data(); }
    double real(const std::string& name) const { return *(const double*)get(name, "f8").bytes.data(); }
    std::string string(const std::string& name) const {
        const Array& a = get(name, "u1");
        return std::string(a.bytes.begin(), a.bytes.end());
    }

    // Called with the way that a plan chose for a case: one that is there for another way (in bf16, on Hopper) would leave that one unchecked.
    void takes(const std::string& way) const {
        if (has("takes") && act_element != Element::FP32 && string("takes") != way)
            die("a case that is there for %s takes %s", string("takes").c_str(), way.c_str());
    }

    // --- for the operations: device memory; null where the file has no such array.
    act* activation(const std::string& name, Element element = act_element) {
        if (!has(name) || element == Element::FP32) return input<float>(name);
        const size_t n = count_of(in.at(name).dims);
        for (size_t i = 0; i < n; i++) {
            const uint32_t bits = (uint32_t)bf16_bits(host(name)[i]) << 16;
            if (memcmp(&bits, host(name) + i, 4))
                die("%s: is not exact in bf16; the Python half must have it among its activations", name.c_str());
        }
        return memory.upload_activation(host(name), n);
    }
    act* activation_output(const std::string& name, const Dims& dims, Element element = act_element) {
        if (element == Element::FP32) return output<float>(name, dims);
        return save_activation(name, memory.poisoned_activation(count_of(dims)), dims);
    }
    // Where a backward function leaves the gradient of an activation. An array of this name in the file is an addend and lies in place, as the
    // trainer has it; name + "_add" is a second one.
    Grad gradient(const std::string& name, const Dims& dims, Element element = act_element,
                  const std::string& version = "") {
        act* dx;
        if (!has(name)) dx = activation_output(name + version, dims, element);
        else if (element == Element::FP32) dx = updated<float>(name + version, name);
        else dx = save_activation(name + version, activation(name), dims);
        return Grad{dx, has(name) ? dx : nullptr, activation(name + "_add", element)};
    }
    GradOf<float> plain_gradient(const std::string& name, const Dims& dims, const std::string& version = "") {
        const Grad g = gradient(name, dims, Element::FP32, version);
        return GradOf<float>{(float*)g.dx, (const float*)g.add1, (const float*)g.add2};
    }
    template <class T> T* input(const std::string& name) {
        if (!has(name)) return nullptr;
        const Array& a = get(name, file_type<T>());
        return memory.upload((const T*)a.bytes.data(), count_of(a.dims));
    }
    template <class T> T* output(const std::string& name, const Dims& dims) {
        return save_plain(name, memory.poisoned<T>(count_of(dims)), dims);
    }
    // An output that starts as the input array `start`, of which a part is written, or to which is added.
    template <class T> T* updated(const std::string& name, const std::string& start) {
        return save_plain(name, input<T>(start), get(start, file_type<T>()).dims);
    }
    // The gradient of parameter `of`, which naive versions add to zeros.
    float* parameter_gradient(const std::string& of, const std::string& version = "") {
        const Dims& dims = get(of, "f4").dims;
        float* p = output<float>("d" + of + version, dims);
        const std::vector<float> zeros(count_of(dims));
        if (!version.empty()) copy_to_device(p, zeros.data(), zeros.size() * sizeof(float));
        return p;
    }
    // Stats of a tensor (B, H, W, C), its parts added up: written as two arrays (B, C), because sums of squares would hide errors in sums. version: ".v0", ...
    Stats* stats(const std::string& name, int B, int H, int W, int C, const std::string& version = "") {
        Stats* const stats = new Stats(poisoned_stats(memory, B, H, W, C));
        stats_blocks.emplace_back(stats);
        for (int k = 0; k < 2; k++)
            out.push_back({name + (k ? "_square" : "_sum") + version, [=] {
                               const std::vector<double> both = download(stats->sums, (size_t)B * stats->parts * C * 2);
                               std::vector<double> one((size_t)B * C, 0);
                               for (size_t i = 0; i < both.size() / 2; i++)
                                   one[i / C / stats->parts * C + i % C] += both[2 * i + k];
                               return packed(one, {B, C});
                           }});
        return stats;
    }

    // --- host memory
    const float* host(const std::string& name) const {
        return has(name) ? (const float*)get(name, "f4").bytes.data() : nullptr;
    }
    float* host_output(const std::string& name, const Dims& dims) {
        auto* block = new std::vector<float>(count_of(dims));
        host_blocks.push_back(block);
        memset(block->data(), 0xFF, block->size() * sizeof(float));
        out.push_back({name, [=] { return packed(*block, dims); }});
        return block->data();
    }

    // --- files
    template <class T> static Array packed(const std::vector<T>& values, const Dims& dims) {
        return Array{file_type<T>(), dims,
                     std::vector<char>((const char*)values.data(), (const char*)(values.data() + values.size()))};
    }
    template <class T> T* save_plain(const std::string& name, T* device, const Dims& dims) {
        out.push_back({name, [=] { return packed(download(device, count_of(dims)), dims); }});
        return device;
    }
    act* save_activation(const std::string& name, act* device, const Dims& dims) {
        if (act_element == Element::FP32) return save_plain(name, (float*)device, dims);
        out.push_back({name, [=] {
                           Array a = packed(download((const uint16_t*)device, count_of(dims)), dims);
                           a.type = "b2";
                           return a;
                       }});
        return device;
    }
    void load(const char* path) {
        FILE* f = fopen(path, "rb");
        if (!f) die("%s: can't be opened (%s)", path, strerror(errno));
        char name[64], type[4], line[256];
        while (fgets(line, sizeof line, f)) {
            int at = 0, more = 0, d = 0;
            if (sscanf(line, "%63s %3s%n", name, type, &at) != 2) die("%s: is not a file of arrays", path);
            Array a{type, {}, {}};
            for (; sscanf(line + at, "%d%n", &d, &more) == 1; at += more) a.dims.push_back(d);
            a.bytes.resize(count_of(a.dims) * (size_t)(type[1] - '0'));
            if (fread(a.bytes.data(), 1, a.bytes.size(), f) != a.bytes.size()) die("%s: ends inside %s", path, name);
            in[name] = a;
        }
        fclose(f);
    }
    void save(const char* path) const {
        FILE* f = fopen(path, "wb");
        if (!f) die("%s: can't be written (%s)", path, strerror(errno));
        for (const auto& [name, fetch] : out) {
            const Array a = fetch();
            fprintf(f, "%s %s", name.c_str(), a.type.c_str());
            for (int d : a.dims) fprintf(f, " %d", d);
            fputc('\n', f);
            fwrite(a.bytes.data(), 1, a.bytes.size(), f);
        }
        if (fclose(f)) die("%s: writing failed (%s)", path, strerror(errno));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// benchmark

// What an operation cannot do without: floating-point operations, and bytes read and written. fp32: its arithmetic is fp32 in every build.
struct Work {
    double flop, bytes;
    bool fp32 = false;

    double floor_us() const {
        return 1e6 * std::max(flop / (fp32 || act_element == Element::FP32 ? CEILING_FP32 : CEILING_BF16),
                              bytes / CEILING_BYTES);
    }
};

// Uniform in [-1, 1).
static std::vector<float> random_values(size_t n) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i += 4) {
        const Words r = philox(1, (uint32_t)(i / 4), 0, 0, 0);
        for (size_t k = i; k < std::min(i + 4, n); k++) values[k] = (int32_t)r.w[k - i] * 0x1p-31f;
    }
    return values;
}

static float* random_floats(Memory& memory, size_t n) {
    static std::vector<float> same; // for all arrays: making them takes longer than timing what reads them
    if (same.size() < n) same = random_values(n);
    return memory.upload(same.data(), n);
}

static act* random_activation(Memory& memory, size_t n) {
    float* fp32 = random_floats(memory, n);
    if (act_element == Element::FP32) return fp32;
    act* p = memory.poisoned_activation(n);
    cast_params(p, fp32, n);
    device_free(fp32);
    memory.blocks.erase(std::find(memory.blocks.begin(), memory.blocks.end(), (void*)fp32));
    return p;
}

// Copies of an array that take turns from launch to launch.
template <class T> struct Copies {
    std::vector<T*> p;
    T* operator[](int k) const { return p[k % p.size()]; }
};

// The arrays of a benchmark, in as many copies as make them larger than twice a GPU's L2 cache: otherwise an operation would find there what its last
// repeat left. (In training the operation before leaves it there, as far as it fits.)
struct BenchArrays {
    Memory memory;
    int copies = 1;

    // bytes: of one copy of all arrays together
    explicit BenchArrays(double bytes) {
#ifdef __CUDACC__
        int l2 = 0;
        CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
        copies = (int)std::min(std::max(ceil(2 * l2 / bytes), 1.0), 64.0);
#else
        (void)bytes;
#endif
    }
    template <class F> auto copy(F make) {
        Copies<std::remove_pointer_t<decltype(make())>> c;
        for (int k = 0; k < copies; k++) c.p.push_back(make());
        return c;
    }
    auto activation(size_t n, Element element = act_element) {
        return copy([&]() -> act* {
            return element == Element::FP32 ? random_floats(memory, n) : random_activation(memory, n);
        });
    }
    auto floats(size_t n) {
        return copy([&] { return random_floats(memory, n); });
    }
};

#ifdef __CUDACC__
// Median microseconds of one of the launches in a graph of many, which is replayed. run(k): launch number k
template <class F> static double median_microseconds(int copies, F run) {
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    auto time = [&](auto work) {
        float ms = 0;
        CUDA_CHECK(cudaEventRecord(start, device.queue));
        work();
        CUDA_CHECK(cudaEventRecord(end, device.queue));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
        return 1e3 * ms;
    };
    auto one = [&] {
        run(0);
        finish_gradients();
    };
    one();
    const double once = time(one);
    if (once > 1e4) return once; // a naive version; the caches and the launch do not matter
    const int launches = round_up((int)std::min(std::max(1000 / once, 1.0), 300.0), copies);
    Graph graph;
    auto all = [&] {
        replay(&graph, [&] {
            for (int k = 0; k < launches; k++) run(k);
            finish_gradients();
        });
    };
    all();
    std::vector<double> us;
    for (int i = 0; i < 7; i++) us.push_back(time(all) / launches);
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    free_graph(&graph);
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return us[us.size() / 2];
}
#else
template <class F> static double median_microseconds(int, F run) {
    run(0); // caches, pages
    std::vector<double> us;
    for (double total = 0; us.size() < 3 || (us.size() < 100 && total < 1e5); total += us.back()) {
        const auto start = std::chrono::steady_clock::now();
        run(0);
        us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    }
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2];
}
#endif

// One line of the table. shape is "key=value key=value ...": NAME.py --bench reads it and times PyTorch on the same shape. cublas: see cublas.h
template <class F>
static void bench_row(const std::string& shape, const char* pass, const Work& work, const BenchArrays& arrays, F run,
                      const std::function<void(int)>& cublas = nullptr) {
    const double us = median_microseconds(arrays.copies, run);
    printf("%-52s  %-12s %10.1f us", shape.c_str(), pass, us);
#ifdef __CUDACC__
    if (work.flop > 0) printf(" %8.2f TFLOP/s", work.flop / us * 1e-6);
    else printf("%17s", "");
    if (work.bytes > 0) printf(" %8.1f GB/s", work.bytes / us * 1e-3);
    else printf("%14s", "");
    printf(" %6.1f %%", 100 * work.floor_us() / us);
#else
    if (work.flop > 0) printf(" %8.2f GFLOP/s", work.flop / us * 1e-3);
    else printf(" %8.2f GB/s", work.bytes / us * 1e-3);
#endif
    if (cublas) {
        const double theirs = median_microseconds(arrays.copies, cublas);
        printf("   cuBLASLt %8.1f us  x%.2f", theirs, theirs / us);
    }
    printf("\n");
    fflush(stdout);
}

// A layer of a model that is trained in earnest, as the trainer's own list has it.
struct ModelLayer {
    UNet* net;
    const Layer* layer;
    int B;
    Walk walk{.net = net, .B = B};

    const Tensor& tensor(int i) const { return net->tensors[i]; }
    LayerArgs args() const { return layer_args(walk, *layer); }
};

struct BenchModel {
    UNet net;
    int B;
};

// Built anew for each precision: a tensor knows its element.
static std::vector<BenchModel> bench_models() {
    std::vector<BenchModel> models;
#ifdef CUBLASLT
    std::vector<const char*> presets; // all
    for (const auto& preset : PRESETS) presets.push_back(preset.first.c_str());
#elif defined(__CUDACC__)
    const std::vector<const char*> presets = {"unet64"};
#else
    const std::vector<const char*> presets = {"fashion32", "unet64"};
#endif
    for (const char* preset : presets) {
        Config config;
        apply_preset(&config, preset);
        config.preset = preset;
        const std::string problem = check_model(&config);
        if (!problem.empty()) die("%s", problem.c_str());
        models.push_back(BenchModel{build_unet(config), config.batch_size});
    }
    return models;
}

// Calls run(layer, shape) once for every shape that layers of this kind have in those models. shape = describe(layer); "": leave it out.
template <class D, class F> static void for_each_shape(const LayerKind& kind, D describe, F run) {
    std::set<std::string> seen;
    const std::vector<BenchModel> models = bench_models();
    for (const BenchModel& model : models)
        for (const Layer& layer : model.net.layers) {
            if (layer.kind != &kind) continue;
            const ModelLayer m{const_cast<UNet*>(&model.net), &layer, model.B};
            const std::string shape = describe(m);
            if (!shape.empty() && seen.insert(shape).second) run(m, shape);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// main

// Starts the device. What operations need for scratch, plan_memory reserves for a network; here an amount that no operation exceeds.
static void start_pair(const std::string& precision, size_t workspace_bytes) {
    start_device(precision, 0);
    reserve(Workspace{.main = workspace_bytes, .sums = workspace_bytes / 8}, true);
}

static void print_table(void (*bench)()) {
#ifdef __CUDACC__
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    printf("%s, %s; %%: the least time that %s measured ceilings allow (%.0f TFLOP/s, %.2f TB/s), of the time taken\n",
           properties.name, name_of(act_element), strstr(properties.name, "H200") ? "its" : "an H200's",
           (act_element == Element::BF16 ? CEILING_BF16 : CEILING_FP32) * 1e-12, CEILING_BYTES * 1e-12);
#endif
    bench();
}

static int pair_main(int argc, char** argv, void (*check)(Arrays&), void (*bench)()) {
    leave_out();
    if ((argc > 2 && argc % 2 == 0) || (argc == 2 && strcmp(argv[1], "fp32") && strcmp(argv[1], "bf16"))) {
        fprintf(
            stderr,
            "usage: %s [fp32|bf16]         benchmark\n       %s file_in file_out ...    check, for the Python half of the pair\n",
            argv[0], argv[0]);
        return 1;
    }
    if (argc <= 2) {
        start_pair(argc == 2 ? argv[1] : "auto", (size_t)1 << 30);
        print_table(bench);
#ifdef __CUDACC__
        if (argc == 1) { // the exact mode as well
            act_element = Element::FP32;
            print_table(bench);
        }
#endif
        return 0;
    }
    for (int i = 1; i < argc; i += 2) {
        Arrays arrays;
        arrays.load(argv[i]);
        start_pair(arrays.string("precision"), (size_t)1 << 28);
#ifdef __CUDACC__
        if (arrays.has("sms"))
            gpu.sms =
                (int)arrays.integer("sms"); // for the plans: few multiprocessors make a small case as large as any
        if (arrays.has("block_shared")) gpu.shared_per_block = (int)arrays.integer("block_shared");
#endif
        check(arrays);
        finish_gradients();
        arrays.save(argv[i + 1]);
    }
    return 0;
}
