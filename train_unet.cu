// train_unet.cu - trains and samples diffusion UNets (guided-diffusion's models) in plain C++/CUDA, without a framework.
//
//   make train_unet && ./train_unet          trains on data/, writes pictures, a log and checkpoints into out/
//   ./train_unet --help                      every flag, with units and defaults
//
// Contents, in the order in which data meets them:
//    1. Types at the seam       what the operations are called with
//    2. Random numbers          Philox4x32-10: every draw is a pure function of (seed, purpose, step, sample)
//    3. Operations              the CPU's: dev/reference.h
//    4. Device memory
//    5. Errors and files        die, CRC-32, files that appear whole or not at all
//    6. Configuration           flags, presets, help, what can work and what can't
//    7. The network             build_unet: a list of layers from guided-diffusion's flags
//    8. The plan                who adds to whose gradient, who lives where in memory
//    9. Forward and backward    two walks over the list
//   10. Diffusion               noise schedules, objectives, samplers
//   11. Data                    memory-mapped .bin files, order of the images
//   12. Model files             .bin weights and checkpoints, initial weights
//   13. Pictures                PNG, grids, the loss curve
//   14. A training step
//   15. A run                   log, guard, checkpoints, resume
//   16. main
//
// Layouts: activations (B, H, W, C); convolution weights (Cout, kh, kw, Cin); files hold PyTorch's layouts.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

// =====================================================================================================================
// 1. Types at the seam: operations take pointers and these. B = images in the batch, C = channels, H, W = height and width.

#ifdef __CUDACC__
#define HD __host__ __device__ // what both sides compute
#else
#define HD
#endif

// A 1x1 or 3x3 convolution (padding kernel / 2) of an input (B, H, W, C1 + C2) in one or two parts; with upsample = 1 the input is read as if
// every pixel stood there 2 x 2 times (nearest neighbour).
struct ConvShape {
    int B, H, W, C1, C2, Cout, kernel, stride, upsample;
    bool fp32_in = false, fp32_out = false; // the network's own input and output stay fp32 where activations are bf16
    HD int out_H() const { return ((H << upsample) + stride - 1) / stride; }
    HD int out_W() const { return ((W << upsample) + stride - 1) / stride; }
};

// A group norm over (B, HW, C1 + C2) in one or two parts, with SiLU behind it or not.
struct NormShape {
    int B, HW, C1, C2, groups;
    bool silu;
    float eps;
};

// Images as the data file holds them: (B, C, H, W), bytes = 1 (uint8) or 4 (float32 in [-1, 1]).
struct ImageShape {
    int B, C, H, W, bytes;
};

// An element of an activation: float on a CPU; float or bf16 on a GPU, which its operations know, so that pointers are all the seam needs.
#ifdef __CUDACC__
typedef void act;
#else
typedef float act;
#endif

// Where a backward function writes the gradient of an input: dx = gradient + add1 + add2. An addend may be null, or dx itself. A null dx: not wanted.
template <class T> struct GradOf {
    T* dx = nullptr;
    const T* add1 = nullptr;
    const T* add2 = nullptr;
};
typedef GradOf<act> Grad;

// What a random draw depends on. step lies in device memory, so that a captured graph draws anew each time; sample0 is the first sample's index.
struct RandomKey {
    uint64_t seed;
    uint32_t purpose;
    const int64_t* step;
    int64_t sample0;
};

// Dropout with probability p; layer = index of the residual block. p = 0: none.
struct Dropout {
    float p = 0;
    uint64_t seed = 0;
    const int64_t* step = nullptr;
    int64_t sample0 = 0;
    uint32_t layer = 0;
};

// One step of a sampler: x0 = clip(x0_x x - x0_eps eps), then x = next_x0 x0 + next_x x + next_eps eps' + sigma z. See section 10.
struct SamplerStep {
    float t, x0_x, x0_eps, next_x0, next_x, next_eps, sigma;
};

// Optimiser settings that hold for the whole run. lr_schedule: 0 constant, 1 linear, 2 cosine; steps are counted in updates of the weights.
struct AdamW {
    float lr, weight_decay, beta1, beta2, eps, grad_clip, ema_rate;
    int lr_schedule;
    int64_t warmup_steps, max_steps;
};

// Running mean and variance of what a healthy step looks like.
struct Guard {
    double n, mean_loss, var_loss, mean_norm, var_norm;
};

// What changes from step to step; lives in device memory. loss_q, count_q: mean loss and number of samples by quarter of t.
struct StepState {
    int64_t step, updates, bad_total, bad_in_row;
    double loss, grad_norm, loss_q[4];
    int count_q[4];
    int ok;
    float lr;
    Guard guard;
};

// =====================================================================================================================
// 2. Random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = seed,
// counter = (block, sample, step, purpose). No state, so any step of any run can be reproduced alone, on any machine.

enum RandomPurpose : uint32_t {
    RANDOM_INIT,
    RANDOM_TIMESTEP,
    RANDOM_NOISE,
    RANDOM_FLIP,
    RANDOM_ORDER,
    RANDOM_DROPOUT, // | residual block << 8
    RANDOM_SAMPLE_START,
    RANDOM_SAMPLE_NOISE,
    RANDOM_VAL_TIMESTEP,
    RANDOM_VAL_NOISE
};

struct Words {
    uint32_t w[4];
};

HD static inline Words philox(uint64_t seed, uint32_t block, uint32_t sample, uint32_t step, uint32_t purpose) {
    uint32_t c0 = block, c1 = sample, c2 = step, c3 = purpose, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// Four standard normals from four words (Box & Muller 1958). u = ((word >> 9) + 0.5) / 2^23 is exact in fp32 and never 0 or 1, so that fp32 on a
// GPU and double on a CPU agree to 1e-6.
HD static inline void normals(float z[4], const Words& r) {
    for (int k = 0; k < 4; k += 2) {
#ifdef __CUDA_ARCH__
        const float u = ((r.w[k] >> 9) + 0.5f) * 0x1p-23f, v = ((r.w[k + 1] >> 9) + 0.5f) * 0x1p-23f, radius = sqrtf(-2 * logf(u));
        float sine, cosine;
        sincospif(2 * v, &sine, &cosine);
        z[k] = radius * cosine;
        z[k + 1] = radius * sine;
#else
        const double u = ((r.w[k] >> 9) + 0.5) * 0x1p-23, v = ((r.w[k + 1] >> 9) + 0.5) * 0x1p-23;
        const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * M_PI * v;
        z[k] = (float)(radius * std::cos(angle));
        z[k + 1] = (float)(radius * std::sin(angle));
#endif
    }
}

// A dropout word below this is dropped.
HD static inline uint32_t dropout_threshold(float p) {
    return (uint32_t)((double)p * 4294967296.0);
}

// The image at position pos of epoch's permutation of [0, n): a Feistel network over the next even number of bits, walked until it lands inside.
static inline int64_t permuted_index(uint64_t seed, int64_t pos, int64_t epoch, int64_t n) {
    int half = 1;
    while ((int64_t)1 << 2 * half < n) half++;
    const uint32_t mask = (1u << half) - 1;
    uint64_t x = (uint64_t)pos;
    do {
        uint32_t left = (uint32_t)(x >> half), right = (uint32_t)x & mask;
        for (uint32_t round = 0; round < 4; round++) {
            const uint32_t f = philox(seed, right, round, (uint32_t)epoch, RANDOM_ORDER).w[0] & mask, old = left;
            left = right;
            right = old ^ f;
        }
        x = (uint64_t)left << half | right;
    } while ((int64_t)x >= n);
    return (int64_t)x;
}

// =====================================================================================================================
// 3. Operations. First what both builds share.

HD static inline int round_up(int n, int multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// The learning rate of a step (0-based), as a factor of lr.
HD static inline double lr_factor(const AdamW& h, int64_t step) {
    const double warm = h.warmup_steps > 0 ? fmin(1.0, (double)(step + 1) / h.warmup_steps) : 1.0;
    const double progress = fmin(fmax((step - h.warmup_steps) / fmax((double)(h.max_steps - h.warmup_steps), 1.0), 0.0), 1.0);
    if (h.lr_schedule == 1) return warm * (1 - progress);
    if (h.lr_schedule == 2) return warm * 0.5 * (1 + cos(M_PI * progress));
    return warm;
}

// A value is suspicious when it is not finite or, once 100 steps are known, beyond twice the running mean plus ten standard deviations: a factor
// that training passes only when it breaks.
HD static inline bool suspicious(double x, double n, double mean, double var) {
    return !(fabs(x) <= DBL_MAX) || (n >= 100 && x > 2 * mean + 10 * sqrt(var));
}

HD static inline void running_moments(double* mean, double* var, double x, double rate) {
    const double d = x - *mean;
    *mean += rate * d;
    *var = (1 - rate) * (*var + rate * d * d);
}

// Closes a step: its loss (mean over the batch, and by quarter of t) and whether the weights may be touched. loss, t: (B), grad_norm is in state.
HD static inline void judge_batch(StepState* state, const double* loss, const float* t, AdamW h, int B, int diffusion_steps) {
    double total = 0, quarter[4] = {};
    int count[4] = {};
    for (int b = 0; b < B; b++) {
        const int q = (int)(4 * t[b] / diffusion_steps);
        total += loss[b];
        quarter[q] += loss[b];
        count[q]++;
    }
    state->loss = total / B;
    for (int q = 0; q < 4; q++) {
        state->loss_q[q] = count[q] ? quarter[q] / count[q] : 0;
        state->count_q[q] = count[q];
    }
    Guard& g = state->guard;
    state->ok = !suspicious(state->loss, g.n, g.mean_loss, g.var_loss) && !suspicious(state->grad_norm, g.n, g.mean_norm, g.var_norm);
    state->lr = (float)(h.lr * lr_factor(h, state->step));
    if (state->ok) {
        const double rate = fmax(1 / (g.n + 1), 0.01);
        running_moments(&g.mean_loss, &g.var_loss, state->loss, rate);
        running_moments(&g.mean_norm, &g.var_norm, state->grad_norm, rate);
        g.n++;
        state->updates++;
        state->bad_in_row = 0;
    } else {
        state->bad_total++;
        state->bad_in_row++;
    }
}

// The names used from here on (conv_forward, groupnorm_backward, ...) are the seam: everything below exists once.
#include "dev/reference.h"
using namespace reference;

// =====================================================================================================================
// 4. The device: memory, copies, repeated work. Two small versions of each function, then what both builds share.

static void die(const char* format, ...) __attribute__((format(printf, 1, 2), noreturn));

static size_t device_bytes = 0; // in use on the device, by our own count

#ifdef __CUDACC__
static void start_device(const std::string& precision) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || !count)
        die("this is the GPU build and there is no GPU that it can use (%s); make train_unet_cpu builds the program for this machine",
            cudaGetErrorString(error));
    CUDA_CHECK(cudaStreamCreate(&device.stream));
    CUDA_CHECK(cudaStreamCreateWithFlags(&device.copy_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaDeviceGetAttribute(&device.sms, cudaDevAttrMultiProcessorCount, 0));
    CUBLAS_CHECK(cublasCreate(&device.cublas));
    CUBLAS_CHECK(cublasSetStream(device.cublas, device.stream));
    constexpr size_t CUBLAS_WORKSPACE = 32 << 20; // its own, so that captured graphs never allocate
    void* workspace = nullptr;
    CUDA_CHECK(cudaMalloc(&workspace, CUBLAS_WORKSPACE));
    CUBLAS_CHECK(cublasSetWorkspace(device.cublas, workspace, CUBLAS_WORKSPACE));
    device.bf16 = precision != "fp32";
}

static size_t act_bytes() {
    return device.bf16 ? sizeof(bf16) : sizeof(float);
}

static void device_zero(void* p, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, device.stream));
}

static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        size_t available = 0, total = 0;
        cudaMemGetInfo(&available, &total);
        die("%.2f GiB of GPU memory could not be had (%.2f of %.2f GiB are free); a smaller --batch_size or a --microbatch needs less",
            bytes / 0x1p30, available / 0x1p30, total / 0x1p30);
    }
    device_zero(p, bytes);
    device_bytes += bytes;
    return p;
}

static void device_free(void* p) {
    CUDA_CHECK(cudaFree(p));
}

static size_t device_available() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

static void copy_to_device(void* to, const void* host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.stream));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
}

static void copy_to_host(void* host, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device.stream));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
}

// The convolutions' weights in the type of the activations: in fp32, the parameters themselves.
static act* make_copy(float* params, size_t n) {
    return device.bf16 ? device_alloc_bytes(n * sizeof(bf16)) : params;
}

// Work that is repeated with the same pointers: captured once, then replayed as one launch.
struct Graph {
    cudaGraphExec_t exec = nullptr;
};
template <class F> static void replay(Graph* g, F work) {
    if (!g->exec) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeRelaxed));
        work();
        CUDA_CHECK(cudaStreamEndCapture(device.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&g->exec, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(g->exec, device.stream));
}
static void free_graph(Graph* g) {
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    if (g->exec) CUDA_CHECK(cudaGraphExecDestroy(g->exec));
    g->exec = nullptr;
}

// A buffer that the host fills for the device on a stream of its own, while the device works on another one.
struct Upload {
    uint8_t *host, *device; // host: page-locked
    size_t bytes;
    cudaEvent_t sent, released;
};
static Upload make_upload(size_t bytes) {
    Upload u{nullptr, (uint8_t*)device_alloc_bytes(bytes), bytes, nullptr, nullptr};
    CUDA_CHECK(cudaMallocHost(&u.host, bytes));
    CUDA_CHECK(cudaEventCreateWithFlags(&u.sent, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&u.released, cudaEventDisableTiming));
    return u;
}
static void wait_for_host_side(Upload* u) {
    CUDA_CHECK(cudaEventSynchronize(u->sent));
} // until host may be written
static void send(Upload* u) {
    CUDA_CHECK(cudaStreamWaitEvent(device.copy_stream, u->released));
    CUDA_CHECK(cudaMemcpyAsync(u->device, u->host, u->bytes, cudaMemcpyHostToDevice, device.copy_stream));
    CUDA_CHECK(cudaEventRecord(u->sent, device.copy_stream));
    CUDA_CHECK(cudaStreamWaitEvent(device.stream, u->sent));
}
static void release(Upload* u) {
    CUDA_CHECK(cudaEventRecord(u->released, device.stream));
} // the work that reads it is on its way
static void free_upload(Upload* u) {
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    device_free(u->device);
    CUDA_CHECK(cudaFreeHost(u->host));
    CUDA_CHECK(cudaEventDestroy(u->sent));
    CUDA_CHECK(cudaEventDestroy(u->released));
}

constexpr int STEPS_AHEAD = 64; // steps that the host may be ahead of the log
#else
static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, bytes))
        die("%.2f GiB of memory could not be had; a smaller --batch_size or a --microbatch needs less", bytes / 0x1p30);
    memset(p, 0, bytes);
    device_bytes += bytes;
    return p;
}

static size_t device_available() {
    return SIZE_MAX; // the system says no when it must
}

static void device_free(void* p) {
    free(p);
}

static void copy_to_device(void* device, const void* host, size_t bytes) {
    memcpy(device, host, bytes);
}

static void copy_to_host(void* host, const void* device, size_t bytes) {
    memcpy(host, device, bytes);
}

static void device_zero(void* p, size_t bytes) {
    memset(p, 0, bytes);
}

// On a CPU the device is the host.
static void start_device(const std::string& precision) {
    if (precision == "bf16") die("--precision bf16: this is the CPU build, which computes in fp32; leave the flag out, or use fp32");
}

// Bytes of an activation's element.
static size_t act_bytes() {
    return sizeof(float);
}

// The convolutions' weights in the type of the activations: here the parameters themselves.
static act* make_copy(float* params, size_t) {
    return params;
}

// Work that is repeated with the same pointers: on a GPU a captured graph.
struct Graph {};
template <class F> static void replay(Graph*, F work) {
    work();
}
static void free_graph(Graph*) {}

// A buffer that the host fills for the device, while the device still works on another one.
struct Upload {
    uint8_t *host, *device;
    size_t bytes;
};
static Upload make_upload(size_t bytes) {
    uint8_t* p = (uint8_t*)device_alloc_bytes(bytes);
    return Upload{p, p, bytes};
}
static void wait_for_host_side(Upload*) {} // until host may be written
static void send(Upload*) {}               // host to device
static void release(Upload*) {}            // the work that reads device is on its way
static void free_upload(Upload* u) {
    device_free(u->device);
}

constexpr int STEPS_AHEAD = 1;
#endif

template <class T> static T* device_alloc(size_t count) {
    return (T*)device_alloc_bytes(std::max<size_t>(count, 1) * sizeof(T));
}

// p[n] of an activation or of a copy of the weights.
template <class A> static A* act_at(A* p, size_t n) {
    return p ? (A*)((char*)p + n * act_bytes()) : nullptr;
}

// =====================================================================================================================
// 5. Errors and files

// A mistake of the user or of the machine: one sentence, exit code 1.
static void die(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "train_unet: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

static std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
static std::string text(const char* format, ...) {
    va_list args;
    va_start(args, format);
    char buffer[2048];
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

// CRC-32 as zlib and PNG compute it (polynomial 0xEDB88320), eight bytes at a time ("slicing by 8"). Start with crc = 0, chain the calls.
static uint32_t crc32(uint32_t crc, const void* data, size_t n) {
    static const std::vector<uint32_t> table = [] {
        std::vector<uint32_t> t(8 * 256);
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
            t[i] = c;
        }
        for (size_t i = 256; i < t.size(); i++) t[i] = t[i - 256] >> 8 ^ t[t[i - 256] & 255];
        return t;
    }();
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7 * 256 + (low & 255)] ^ table[6 * 256 + (low >> 8 & 255)] ^ table[5 * 256 + (low >> 16 & 255)] ^ table[4 * 256 + (low >> 24)] ^
              table[3 * 256 + (high & 255)] ^ table[2 * 256 + (high >> 8 & 255)] ^ table[256 + (high >> 16 & 255)] ^ table[high >> 24];
    }
    for (; n > 0; n--, p++) crc = table[(crc ^ *p) & 255] ^ crc >> 8;
    return ~crc;
}

// A file that appears under its name whole or not at all: written beside it, fsynced, renamed.
struct AtomicFile {
    std::string path, temporary;
    FILE* file = nullptr;

    explicit AtomicFile(const std::string& path) : path(path), temporary(path + ".tmp" + std::to_string(getpid())) {
        file = fopen(temporary.c_str(), "wb");
        if (!file) die("%s: can't be written (%s); choose a folder that exists and is yours", path.c_str(), strerror(errno));
    }
    void write(const void* data, size_t n) {
        if (fwrite(data, 1, n, file) != n) fail();
    }
    void write_at(long offset, const void* data, size_t n) {
        if (fseek(file, offset, SEEK_SET)) fail();
        write(data, n);
    }
    void commit() {
        if (fflush(file) || fsync(fileno(file))) fail();
        FILE* f = file;
        file = nullptr;
        if (fclose(f) || rename(temporary.c_str(), path.c_str())) fail();
        const std::string folder = std::filesystem::path(path).parent_path().string();
        const int fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
        if (fd >= 0) fsync(fd), close(fd); // the new name, too, must survive a power cut
    }
    void fail() {
        const int error = errno;
        if (file) fclose(file);
        unlink(temporary.c_str());
        die("%s: writing failed (%s); what was there before is untouched", path.c_str(), strerror(error));
    }
};

// A file mapped into memory, read-only: the kernel loads what is touched, so that it may be larger than memory.
struct MappedFile {
    std::string path;
    const uint8_t* data = nullptr;
    size_t size = 0;

    void map(const std::string& name, const char* hint) {
        path = name;
        const int fd = open(name.c_str(), O_RDONLY | O_NONBLOCK); // of a pipe, not to wait for its other end
        if (fd < 0) die("%s: can't be opened (%s); %s", name.c_str(), strerror(errno), hint);
        struct stat st;
        if (fstat(fd, &st) || !S_ISREG(st.st_mode)) die("%s: is not a file; %s", name.c_str(), hint);
        size = (size_t)st.st_size;
        if (size < 1024) die("%s: is only %zu bytes long, shorter than a header (1024 bytes); %s", name.c_str(), size, hint);
        void* p = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) die("%s: can't be mapped (%s)", name.c_str(), strerror(errno));
        data = (const uint8_t*)p;
        close(fd);
    }
    void unmap() {
        if (data) munmap((void*)data, size);
        data = nullptr;
    }
};

// Headers are 256 little-endian int32; 64-bit values and floats lie in them as their bits.
struct Header {
    int32_t slot[256] = {};

    int64_t wide(int i) const { return (int64_t)((uint64_t)(uint32_t)slot[i] | (uint64_t)(uint32_t)slot[i + 1] << 32); }
    void set_wide(int i, int64_t v) {
        slot[i] = (int32_t)(uint32_t)v;
        slot[i + 1] = (int32_t)(uint32_t)((uint64_t)v >> 32);
    }
    float real(int i) const {
        float v;
        memcpy(&v, &slot[i], 4);
        return v;
    }
    void set_real(int i, float v) { memcpy(&slot[i], &v, 4); }
};

static bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0;
}

// =====================================================================================================================
// 6. Configuration. Flags carry guided-diffusion's names; a preset is a list of them; whatever the command line says wins.

struct Config {
    // the model (saved with the weights)
    std::string image_size = "64";
    int H = 64, W = 64; // image_size, parsed
    int in_channels = 3, num_channels = 64, num_res_blocks = 2;
    std::string channel_mult, attention_resolutions = "16,8";
    std::vector<float> mult;           // channel_mult, parsed
    std::vector<int> attention_levels; // downsampling factors at which attention_resolutions occur
    int num_heads = 4, num_head_channels = -1, num_heads_upsample = -1;
    float dropout = 0;
    bool class_cond = false, learn_sigma = false, use_scale_shift_norm = false, resblock_updown = false, conv_resample = true;
    bool use_new_attention_order = true;
    int num_classes = 0, max_period = 10000;
    // diffusion and sampling
    int diffusion_steps = 1000;
    std::string noise_schedule = "linear", sampler = "ddim", timestep_respacing = "50";
    float eta = 0;
    bool clip_denoised = true;
    // training
    int64_t max_steps = 1000, warmup_steps = 0, seed = 0;
    int batch_size = 16, microbatch = 0, max_bad_steps = 10;
    float lr = 1e-3f, weight_decay = 0, adam_beta1 = 0.9f, adam_beta2 = 0.999f, adam_eps = 1e-8f, grad_clip = 1, ema_rate = 0.995f;
    std::string lr_schedule = "constant";
    // data and files
    std::string precision = "auto";
    std::string preset, data_file, val_data_file, init, resume_checkpoint, output_dir = "out", output = "samples.png";
    bool random_flip = false, use_ema = true;
    int val_interval = 100, save_interval = 500, keep_checkpoints = 3, sample_interval = 250, num_samples = 36, log_interval = 10;
    int sample = 0, bench = 0;

    int out_channels() const { return learn_sigma ? 2 * in_channels : in_channels; }
    int micro() const { return microbatch > 0 ? microbatch : batch_size; }
};

enum FlagKind { FLAG_INT, FLAG_LONG, FLAG_REAL, FLAG_BOOL, FLAG_TEXT };

// One flag: where its value lives, what it may be (low..high for numbers, "a|b" for words), and what --help says.
struct Flag {
    const char* name;
    FlagKind kind;
    void* value;
    const char* help;
    double low = 0, high = 0;
    const char* choices = nullptr;
    const char* group = nullptr; // set on the first flag of a group
    bool given = false;          // on the command line
    bool preset = false;         // by the preset
};

struct Flags {
    std::vector<Flag> list;

    Flag* find(const std::string& name) {
        for (Flag& f : list)
            if (name == f.name) return &f;
        return nullptr;
    }
    bool given(const std::string& name) { return find(name)->given; }
    bool chosen(const std::string& name) { return find(name)->given || find(name)->preset; }
};

static Flags config_flags(Config* c) {
    const double BIG = 1e9;
    Flags flags;
    flags.list = {
        {"preset", FLAG_TEXT, &c->preset, "a set of flags to start from; any other flag overrides it", 0, 0, "fashion32|unet64|adm64", "Start"},
        {"sample", FLAG_INT, &c->sample, "draw this many images from --init FILE into --output, and stop", 0, 1e8},
        {"bench", FLAG_INT, &c->bench, "time so many steps and forward passes on made-up images, print a line of JSON, and stop", 0, 1e6},
        {"precision", FLAG_TEXT, &c->precision, "of activations: fp32 (exact) or bf16; auto: bf16 on a GPU", 0, 0, "auto|fp32|bf16"},
        {"image_size", FLAG_TEXT, &c->image_size, "pixels: 64, or HxW such as 48x64 (default: the data file's)", 0, 0, nullptr, "Model"},
        {"in_channels", FLAG_INT, &c->in_channels, "channels of an image (default: the data file's)", 1, 64},
        {"num_channels", FLAG_INT, &c->num_channels, "channels of the first level, a multiple of 32", 32, 8192},
        {"num_res_blocks", FLAG_INT, &c->num_res_blocks, "residual blocks per level", 1, 32},
        {"channel_mult", FLAG_TEXT, &c->channel_mult, "channels of each level, as multiples of num_channels"},
        {"attention_resolutions", FLAG_TEXT, &c->attention_resolutions, "image heights at which there is attention; may be empty"},
        {"num_heads", FLAG_INT, &c->num_heads, "attention heads", 1, 1024},
        {"num_head_channels", FLAG_INT, &c->num_head_channels, "channels per head instead of num_heads; -1: use num_heads", -1, 8192},
        {"num_heads_upsample", FLAG_INT, &c->num_heads_upsample, "heads in the upward half; -1: num_heads", -1, 1024},
        {"dropout", FLAG_REAL, &c->dropout, "probability", 0, 0.99},
        {"class_cond", FLAG_BOOL, &c->class_cond, "condition on the labels of the data"},
        {"num_classes", FLAG_INT, &c->num_classes, "classes (default: the data file's)", 0, 1e6},
        {"learn_sigma", FLAG_BOOL, &c->learn_sigma, "twice the output channels, for a learned variance"},
        {"use_scale_shift_norm", FLAG_BOOL, &c->use_scale_shift_norm, "the embedding scales and shifts the second norm of a block"},
        {"resblock_updown", FLAG_BOOL, &c->resblock_updown, "residual blocks change the resolution"},
        {"conv_resample", FLAG_BOOL, &c->conv_resample, "convolutions change the resolution (False: average pool and nearest, as unet.cu)"},
        {"use_new_attention_order", FLAG_BOOL, &c->use_new_attention_order, "how files order qkv's rows: q, k, v, then heads"},
        {"max_period", FLAG_INT, &c->max_period, "slowest period of the timestep embedding, in steps", 1, 1e8},
        {"diffusion_steps", FLAG_INT, &c->diffusion_steps, "T, steps of the forward process", 2, 100000, nullptr, "Diffusion"},
        {"noise_schedule", FLAG_TEXT, &c->noise_schedule, "how beta grows with t", 0, 0, "linear|cosine"},
        {"sampler", FLAG_TEXT, &c->sampler, "for the grids and --sample", 0, 0, "ddim|ddpm"},
        {"timestep_respacing", FLAG_TEXT, &c->timestep_respacing, "the sampler's steps: 50, ddim25, or 10,15,20 for equal parts of T; empty: all"},
        {"eta", FLAG_REAL, &c->eta, "ddim's noise: 0 deterministic, 1 as ddpm", 0, 1},
        {"clip_denoised", FLAG_BOOL, &c->clip_denoised, "clip the predicted x_0 to [-1, 1] while sampling"},
        {"max_steps", FLAG_LONG, &c->max_steps, "training steps in all", 1, 2e9, nullptr, "Training"},
        {"batch_size", FLAG_INT, &c->batch_size, "images per step", 1, 1e6},
        {"microbatch", FLAG_INT, &c->microbatch, "images at a time, gradients added up to batch_size; 0: all at once", 0, 1e6},
        {"lr", FLAG_REAL, &c->lr, "learning rate", 0, 100},
        {"lr_schedule", FLAG_TEXT, &c->lr_schedule, "after the warmup, to 0 at max_steps or not at all", 0, 0, "constant|linear|cosine"},
        {"warmup_steps", FLAG_LONG, &c->warmup_steps, "steps over which lr rises from 0", 0, BIG},
        {"weight_decay", FLAG_REAL, &c->weight_decay, "AdamW's, per unit of lr", 0, 100},
        {"adam_beta1", FLAG_REAL, &c->adam_beta1, "decay of the first moment", 0, 0.999999},
        {"adam_beta2", FLAG_REAL, &c->adam_beta2, "decay of the second moment", 0, 0.999999},
        {"adam_eps", FLAG_REAL, &c->adam_eps, "added to the root of the second moment", 1e-30, 1},
        {"grad_clip", FLAG_REAL, &c->grad_clip, "largest global norm of the gradient; 0: no clipping", 0, 1e30},
        {"ema_rate", FLAG_REAL, &c->ema_rate, "decay of the averaged weights, which the pictures use", 0, 1},
        {"max_bad_steps", FLAG_INT, &c->max_bad_steps, "stop after so many skipped steps in a row", 1, BIG},
        {"seed", FLAG_LONG, &c->seed, "of everything random", 0, 9e15},
        {"data_file", FLAG_TEXT, &c->data_file, "images, from prepare_data.py", 0, 0, nullptr, "Data and files"},
        {"random_flip", FLAG_BOOL, &c->random_flip, "mirror half of the images"},
        {"val_data_file", FLAG_TEXT, &c->val_data_file, "images whose loss is logged but not trained on (the first 512)"},
        {"val_interval", FLAG_INT, &c->val_interval, "steps between two validation losses", 1, BIG},
        {"init", FLAG_TEXT, &c->init, "start from the weights of this .bin file, whose model flags then hold"},
        {"resume_checkpoint", FLAG_TEXT, &c->resume_checkpoint, "continue the run of this checkpoint, or of the latest one in output_dir: latest"},
        {"output_dir", FLAG_TEXT, &c->output_dir, "folder for the log, pictures and checkpoints"},
        {"output", FLAG_TEXT, &c->output, "--sample's file: .png (one grid) or .bin (float images)"},
        {"use_ema", FLAG_BOOL, &c->use_ema, "--sample draws from the averaged weights if the file has them"},
        {"save_interval", FLAG_INT, &c->save_interval, "steps between two checkpoints", 1, BIG},
        {"keep_checkpoints", FLAG_INT, &c->keep_checkpoints, "checkpoints kept, the newest; 0: all", 0, BIG},
        {"sample_interval", FLAG_INT, &c->sample_interval, "steps between two grids of samples; 0: none", 0, BIG},
        {"num_samples", FLAG_INT, &c->num_samples, "images in a grid", 1, 4096},
        {"log_interval", FLAG_INT, &c->log_interval, "steps between two lines on the screen", 1, BIG},
    };
    return flags;
}

// What presets set; what they leave out keeps its default.
static const std::map<std::string, const char*> PRESETS = {
    // clothing in a few minutes on two CPU cores
    {"fashion32",
     "--image_size 32 --in_channels 1 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 1 --attention_resolutions 8 --num_head_channels 32 "
     "--noise_schedule cosine --eta 1 --batch_size 16 --lr 2e-3 --warmup_steps 100 --lr_schedule linear --adam_beta2 0.99 --max_steps 1000 "
     "--ema_rate 0.98 --data_file data/fashion32.bin --sample_interval 250 --save_interval 500 --log_interval 10"},
    // unet.cu's model; emoji in a few minutes on an H200
    {"unet64",
     "--image_size 64 --in_channels 3 --num_channels 64 --channel_mult 1,2,3,4 --num_res_blocks 2 --attention_resolutions 16,8 "
     "--num_head_channels 32 --conv_resample False --noise_schedule cosine --eta 1 --timestep_respacing 100 --batch_size 32 --lr 4e-4 "
     "--warmup_steps 500 --lr_schedule cosine --adam_beta2 0.99 --max_steps 25000 --ema_rate 0.999 --data_file data/emoji64.bin "
     "--sample_interval 2500 --save_interval 5000 --log_interval 50"},
    // guided-diffusion's ImageNet 64x64
    {"adm64",
     "--image_size 64 --in_channels 3 --num_channels 192 --channel_mult 1,2,3,4 --num_res_blocks 3 --attention_resolutions 32,16,8 "
     "--num_head_channels 64 --use_scale_shift_norm True --resblock_updown True --learn_sigma True --class_cond True --num_classes 1000 "
     "--dropout 0.1 --noise_schedule cosine --batch_size 32 --lr 1e-4 --max_steps 540000 --ema_rate 0.9999 --data_file data/imagenet64.bin "
     "--sample_interval 5000 --save_interval 5000 --log_interval 50"}};

// The words that a flag may be.
static std::vector<std::string> choices(const Flag& f) {
    std::vector<std::string> words{""};
    for (const char* p = f.choices; *p; p++) {
        if (*p == '|') words.push_back("");
        else words.back() += *p;
    }
    return words;
}

// Sets a flag from its text; dies naming where it came from ("FILE: ", or nothing for the command line), the flag, the value and what would work.
static void set_flag(Flag* f, const std::string& value, const std::string& where = "") {
    const char *s = value.c_str(), *at = where.c_str();
    char* end = nullptr;
    errno = 0;
    if (f->kind == FLAG_BOOL) {
        const bool yes = value == "True" || value == "true" || value == "1", no = value == "False" || value == "false" || value == "0";
        if (!yes && !no) die("%s--%s %s: must be True or False", at, f->name, s);
        *(bool*)f->value = yes;
    } else if (f->kind == FLAG_TEXT) {
        const std::vector<std::string> words = f->choices ? choices(*f) : std::vector<std::string>{value};
        if (!std::count(words.begin(), words.end(), value)) die("%s--%s %s: must be one of %s", at, f->name, s, f->choices);
        *(std::string*)f->value = value;
    } else if (f->kind == FLAG_REAL) {
        const double v = strtod(s, &end);
        if (value.empty() || *end || errno == ERANGE || !((float)v >= (float)f->low && (float)v <= (float)f->high)) // as files hold it
            die("%s--%s %s: must be a number from %g to %g", at, f->name, s, f->low, f->high);
        *(float*)f->value = (float)v;
    } else {
        const long long v = strtoll(s, &end, 10);
        if (value.empty() || *end || errno || v < f->low || v > f->high)
            die("%s--%s %s: must be a whole number from %.0f to %.0f", at, f->name, s, f->low, f->high);
        if (f->kind == FLAG_INT) *(int*)f->value = (int)v;
        if (f->kind == FLAG_LONG) *(int64_t*)f->value = v;
    }
}

static std::string flag_value(const Flag& f) {
    switch (f.kind) {
    case FLAG_INT: return std::to_string(*(int*)f.value);
    case FLAG_LONG: return std::to_string(*(int64_t*)f.value);
    case FLAG_REAL: return text("%g", *(float*)f.value);
    case FLAG_BOOL: return *(bool*)f.value ? "True" : "False";
    default: return *(std::string*)f.value;
    }
}

static void apply_preset(Flags* flags, const std::string& name) {
    std::istringstream words(PRESETS.at(name));
    std::string flag, value;
    while (words >> flag >> value) {
        Flag* f = flags->find(flag.substr(2));
        f->preset = true;
        if (!f->given) set_flag(f, value);
    }
}

static void print_help(const Flags& flags) {
    printf(
        "train_unet: trains a diffusion UNet, and samples from it.\n\n"
        "  ./train_unet                                  train the default preset into out/\n"
        "  ./train_unet --data_file my.bin               on your own pictures (python prepare_data.py makes my.bin)\n"
        "  ./train_unet --resume_checkpoint latest       continue the run in out/\n"
        "  ./train_unet --sample 36 --init out/model_0001000.bin --output samples.png\n");
    for (const Flag& f : flags.list) {
        if (f.group) printf("\n%s\n", f.group);
        std::string value = flag_value(f), help = f.help;
        if (f.choices) help += text(" (%s)", f.choices);
        printf("  --%-25s %s%s\n", f.name, help.c_str(), value.empty() || value == "0" ? "" : text(" [%s]", value.c_str()).c_str());
    }
    printf("\nPresets\n");
    for (const auto& [name, settings] : PRESETS) printf("  %-10s %s\n", name.c_str(), settings);
}

// The command line: --name value or --name=value. Presets and files fill in what it leaves open.
static void parse_command_line(Flags* flags, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--help" || arg == "-h") {
            print_help(*flags);
            exit(0);
        }
        if (arg.rfind("--", 0)) die("%s: is not a flag; flags look like --batch_size 16, and --help lists them", argv[i]);
        const size_t equals = arg.find('=');
        const std::string name = arg.substr(2, equals == std::string::npos ? std::string::npos : equals - 2);
        Flag* f = flags->find(name);
        if (!f) die("--%s: there is no such flag; --help lists those there are", name.c_str());
        if (f->given) die("--%s: is given twice; once is enough", name.c_str());
        if (equals == std::string::npos && i + 1 >= argc) die("--%s: its value is missing", name.c_str());
        set_flag(f, equals == std::string::npos ? argv[++i] : arg.substr(equals + 1));
        f->given = true;
    }
}

// "1,2,3,4" -> numbers. Returns false if there is anything else in it.
static bool parse_list(const std::string& s, std::vector<float>* out) {
    out->clear();
    const char* p = s.c_str();
    while (*p) {
        char* end = nullptr;
        const float v = strtof(p, &end);
        if (end == p || !std::isfinite(v) || (*end && (*end != ',' || !end[1]))) return false;
        out->push_back(v);
        p = *end ? end + 1 : end;
    }
    return true;
}

// image_size, channel_mult and attention_resolutions, parsed. Returns a sentence about what cannot work, or "".
static std::string parse_model(Config* c) {
    int n = 0, m = 0;
    if (sscanf(c->image_size.c_str(), "%5dx%5d%n", &c->H, &c->W, &n) != 2 || n != (int)c->image_size.size()) { // 5 digits: no overflow
        if (sscanf(c->image_size.c_str(), "%5d%n", &c->H, &m) != 1 || m != (int)c->image_size.size()) c->H = 0;
        c->W = c->H;
    }
    if (c->H < 4 || c->W < 4 || c->H > 4096 || c->W > 4096)
        return text("--image_size %s: must be a number of pixels from 4 to 4096, or HxW", c->image_size.c_str());
    if (c->channel_mult.empty()) { // guided-diffusion's defaults
        c->channel_mult = c->H == 512 ? "0.5,1,1,2,2,4,4" : c->H == 256 ? "1,1,2,2,4,4" : c->H == 128 ? "1,1,2,3,4" : c->H == 64 ? "1,2,3,4" : "";
        if (c->channel_mult.empty()) return text("--channel_mult: must be given for --image_size %s, for example 1,2,2", c->image_size.c_str());
    }
    if (!parse_list(c->channel_mult, &c->mult) || c->mult.empty() || c->mult.size() > 8)
        return text("--channel_mult %s: must be 1 to 8 numbers with commas, such as 1,2,3,4", c->channel_mult.c_str());
    const int depth = 1 << (c->mult.size() - 1);
    if (c->H % depth || c->W % depth)
        return text("--image_size %s: %zu levels halve it %zu times, so it must be a multiple of %d; use %dx%d or fewer channel_mult",
                    c->image_size.c_str(), c->mult.size(), c->mult.size() - 1, depth, std::max(c->H / depth, 1) * depth,
                    std::max(c->W / depth, 1) * depth);
    std::vector<float> resolutions;
    if (!parse_list(c->attention_resolutions, &resolutions) || resolutions.size() > 8)
        return text("--attention_resolutions %s: must be up to 8 image heights with commas, such as 16,8", c->attention_resolutions.c_str());
    c->attention_levels.clear();
    for (float r : resolutions) {
        const int levels = (int)c->mult.size();
        int level = 0;
        while (level < levels && r * (1 << level) != c->H) level++;
        if (level == levels) {
            std::string heights = std::to_string(c->H);
            for (int l = 1; l < levels; l++) heights += text(", %g", (double)c->H / (1 << l));
            return text("--attention_resolutions %s: %g never occurs; the heights of this model are %s", c->attention_resolutions.c_str(), r,
                        heights.c_str());
        }
        c->attention_levels.push_back(1 << level);
    }
    return "";
}

// Everything about the model that cannot work, in one sentence with what would; "" if all is well.
static std::string check_model(Config* c) {
    const std::string error = parse_model(c);
    if (!error.empty()) return error;
    if (c->num_channels % 32)
        return text("--num_channels %d: must be a multiple of 32 (group norm has 32 groups), such as %d", c->num_channels,
                    round_up(c->num_channels, 32));
    for (float m : c->mult) {
        const int ch = (int)(m * c->num_channels);
        if (!(m > 0) || m > 64 || ch % 32 || ch < 32)
            return text("--channel_mult %s: %g * num_channels %d is not a positive multiple of 32", c->channel_mult.c_str(), m, c->num_channels);
    }
    const int middle = (int)(c->mult.back() * c->num_channels);
    auto head_error = [&](int ch) -> std::string {
        if (c->num_head_channels == 0 || (c->num_head_channels > 0 && ch % c->num_head_channels))
            return text("--num_head_channels %d: must divide the %d channels where there is attention; 32 does", c->num_head_channels, ch);
        const int up = c->num_heads_upsample == -1 ? c->num_heads : c->num_heads_upsample;
        if (c->num_head_channels < 0 && ch % c->num_heads)
            return text("--num_heads %d: must divide the %d channels where there is attention", c->num_heads, ch);
        if (c->num_head_channels < 0 && (up < 1 || ch % up))
            return text("--num_heads_upsample %d: must be -1 or divide the %d channels where there is attention", up, ch);
        return "";
    };
    std::string bad = head_error(middle);
    for (size_t l = 0; l < c->mult.size() && bad.empty(); l++)
        if (std::count(c->attention_levels.begin(), c->attention_levels.end(), 1 << l)) bad = head_error((int)(c->mult[l] * c->num_channels));
    if (!bad.empty()) return bad;
    if (c->noise_schedule == "linear" && c->diffusion_steps <= 20)
        return text("--diffusion_steps %d: must be above 20 with --noise_schedule linear, whose last beta would reach 1", c->diffusion_steps);
    if (c->class_cond && c->num_classes < 1)
        return "--num_classes 0: must say how many classes --class_cond True conditions on; the data file has none";
    return "";
}

// Settings of the run that cannot work together. where: "FILE: " if some of them come from one.
static void check_run(const Config& c, const std::string& where) {
    if (c.microbatch > c.batch_size || c.batch_size % c.micro())
        die("%s--microbatch %d: must divide --batch_size %d", where.c_str(), c.microbatch, c.batch_size);
    if (c.output_dir.empty()) die("--output_dir: must name a folder");
    if (c.data_file.size() > 511)
        die("--data_file %s: is longer than the 511 bytes that a checkpoint keeps; use a shorter path", c.data_file.c_str());
}

// =====================================================================================================================
// 7. The network is a list. build_unet walks the architecture once, exactly as guided-diffusion's UNetModel does, and appends parameters (in
// state_dict order) and layers (in the order of the forward pass). Another configuration is another list, not other code.

enum ParamLayout { PLAIN, CONV_OIHW, QKV_ROWS }; // what files do differently: see section 12
enum ParamInit { INIT_UNIFORM, INIT_NORMAL, INIT_ONE, INIT_ZERO };

// A parameter: shape as in PyTorch; offset in the flat arrays (parameters, gradients, moments, EMA), in floats.
struct Param {
    std::string name;
    std::vector<int> shape;
    size_t size, offset;
    ParamLayout layout;
    ParamInit init;
    int fan_in, heads; // fan_in: for INIT_UNIFORM; heads: for QKV_ROWS
};

// An activation (B, H, W, C). buffer, stats: indices into UNet::buffers (stats: channel_stats, where a group norm reads the tensor).
struct Tensor {
    int H, W, C;
    int buffer, stats = -1;
    bool needs_grad = true;
};

// The gradient of one input of a layer, as buffers: d = gradient + add1 + add2.
struct GradPlan {
    int d = -1, add1 = -1, add2 = -1;
};

enum LayerKind { TIMESTEP_EMBEDDING, LINEAR, SILU, LABEL_EMBEDDING, CONV, GROUPNORM, ATTENTION, DOWNSAMPLE, UPSAMPLE };

// One operation of the seam. Tensors, parameters and buffers are indices, -1 where there is none.
struct Layer {
    LayerKind kind;
    std::string name;
    int x1 = -1, x2 = -1, residual = -1, out = -1;
    int emb = -1, emb_offset = 0; // columns of the embedding projections that this layer reads
    int weight = -1, bias = -1;
    int kernel = 1, stride = 1, upsample = 0; // CONV
    bool silu = false;                        // GROUPNORM
    int dropout_block = -1;                   // GROUPNORM: index of the residual block whose dropout follows
    int heads = 0;                            // ATTENTION
    int saved = -1;                           // buffer kept for the backward pass: mean and rstd, or lse
    int dout = -1, demb = -1;                 // section 8: gradient buffers
    GradPlan d1, d2;
};

// A piece of device memory: bytes for one sample, and the first and last time at which it is in use (section 8).
struct Buffer {
    size_t bytes;
    int first = -1, last = -1;
    size_t offset = 0;
};

struct UNet {
    Config config;
    std::vector<Param> params;
    std::vector<Tensor> tensors;
    std::vector<Layer> layers;
    std::vector<Buffer> buffers;
    size_t num_params = 0, flat_size = 0; // parameters; floats in a flat array (with padding)
    int input = -1, emb = -1, output = -1;
    double flops = 0; // of one image's forward pass, 2 for a multiply-add
    // set by plan_memory
    int B = 0;
    bool training = false;
    size_t arena_bytes = 0;
    char* arena = nullptr;
    // set by the caller before a forward pass, in device memory: (B) each
    float* t = nullptr;
    int* labels = nullptr;
};

static int add_buffer(UNet* net, size_t bytes) {
    net->buffers.push_back(Buffer{bytes});
    return (int)net->buffers.size() - 1;
}

// fp32: whatever the activations are; the embeddings, and the network's input and output.
static int add_tensor(UNet* net, int H, int W, int C, bool fp32) {
    net->tensors.push_back(Tensor{H, W, C, add_buffer(net, (size_t)H * W * C * (fp32 ? sizeof(float) : act_bytes()))});
    return (int)net->tensors.size() - 1;
}

static int add_param(UNet* net, const std::string& name, std::vector<int> shape, ParamInit init, int fan_in = 0, ParamLayout layout = PLAIN,
                     int heads = 0) {
    size_t size = 1;
    for (int n : shape) size *= n;
    net->params.push_back(Param{name, shape, size, 0, layout, init, fan_in, heads});
    net->num_params += size;
    return (int)net->params.size() - 1;
}

// Weight and bias, in this order; returns the weight's index, the bias follows it.
static int add_conv_params(UNet* net, const std::string& name, int Cin, int Cout, int kernel, bool zero = false) {
    const ParamInit init = zero ? INIT_ZERO : INIT_UNIFORM;
    const int w = add_param(net, name + ".weight", {Cout, Cin, kernel, kernel}, init, Cin * kernel * kernel, CONV_OIHW);
    add_param(net, name + ".bias", {Cout}, init, Cin * kernel * kernel);
    return w;
}

static int add_linear_params(UNet* net, const std::string& name, int Cin, int Cout) {
    const int w = add_param(net, name + ".weight", {Cout, Cin}, INIT_UNIFORM, Cin);
    add_param(net, name + ".bias", {Cout}, INIT_UNIFORM, Cin);
    return w;
}

static int add_norm_params(UNet* net, const std::string& name, int C) {
    const int w = add_param(net, name + ".weight", {C}, INIT_ONE);
    add_param(net, name + ".bias", {C}, INIT_ZERO);
    return w;
}

// Appends a layer that writes a new tensor (H, W, C).
static Layer* add_layer(UNet* net, LayerKind kind, const std::string& name, int x1, int x2, int weight, int H, int W, int C, bool fp32 = false) {
    Layer l{};
    l.kind = kind;
    l.name = name;
    l.x1 = x1;
    l.x2 = x2;
    l.weight = weight;
    l.bias = weight < 0 || kind == LABEL_EMBEDDING ? -1 : weight + 1;
    l.out = add_tensor(net, H, W, C, fp32);
    net->layers.push_back(l);
    return &net->layers.back();
}

static int channels(const UNet* net, int x1, int x2) {
    return net->tensors[x1].C + (x2 < 0 ? 0 : net->tensors[x2].C);
}

static Layer* add_conv(UNet* net, const std::string& name, int x1, int x2, int weight, int Cout, int kernel, int stride = 1, int upsample = 0) {
    const Tensor x = net->tensors[x1];
    const ConvShape s{1, x.H, x.W, channels(net, x1, x2), 0, Cout, kernel, stride, upsample};
    net->flops += 2.0 * s.out_H() * s.out_W() * Cout * s.C1 * kernel * kernel;
    Layer* l = add_layer(net, CONV, name, x1, x2, weight, s.out_H(), s.out_W(), Cout);
    l->kernel = kernel;
    l->stride = stride;
    l->upsample = upsample;
    return l;
}

static Layer* add_linear(UNet* net, const std::string& name, int x, int weight, int Cout) {
    net->flops += 2.0 * net->tensors[x].C * Cout;
    return add_layer(net, LINEAR, name, x, -1, weight, 1, 1, Cout, true);
}

// Group norm over [x1 | x2]; its inputs get statistics from whoever writes them.
static Layer* add_norm(UNet* net, const std::string& name, int x1, int x2, int weight, bool silu) {
    for (int x : {x1, x2})
        if (x >= 0 && net->tensors[x].stats < 0) net->tensors[x].stats = add_buffer(net, (size_t)net->tensors[x].C * 2 * sizeof(double));
    const Tensor x = net->tensors[x1];
    Layer* l = add_layer(net, GROUPNORM, name, x1, x2, weight, x.H, x.W, channels(net, x1, x2));
    l->silu = silu;
    l->saved = add_buffer(net, 2 * 32 * sizeof(float));
    return l;
}

// DOWNSAMPLE or UPSAMPLE: average pool or nearest neighbour, without parameters.
static int add_resample(UNet* net, LayerKind kind, const std::string& name, int x) {
    const Tensor t = net->tensors[x];
    const bool up = kind == UPSAMPLE;
    return add_layer(net, kind, name, x, -1, -1, up ? 2 * t.H : t.H / 2, up ? 2 * t.W : t.W / 2, t.C)->out;
}

enum Resample { SAME, UP, DOWN };

// ResBlock: norm, SiLU, [resample,] conv + embedding, norm, SiLU, dropout, conv + skip. [x1 | x2] is the input. Returns the output tensor.
// index counts residual blocks in the order of the forward pass; emb_columns counts the columns of the embedding projections.
static int add_resblock(UNet* net, const std::string& name, int x1, int x2, int Cout, Resample resample, int* index, int* emb_columns) {
    const Config& c = net->config;
    const int Cin = channels(net, x1, x2), E = 4 * c.num_channels, Ce = c.use_scale_shift_norm ? 2 * Cout : Cout;
    const int norm1 = add_norm_params(net, name + ".in_layers.0", Cin);
    const int conv1 = add_conv_params(net, name + ".in_layers.2", Cin, Cout, 3);
    add_linear_params(net, name + ".emb_layers.1", E, Ce); // used by the one layer that does all blocks' projections
    const int norm2 = add_norm_params(net, name + ".out_layers.0", Cout);
    const int conv2 = add_conv_params(net, name + ".out_layers.3", Cout, Cout, 3, true);
    const int skip = Cin == Cout ? -1 : add_conv_params(net, name + ".skip_connection", Cin, Cout, 1);

    int h = add_norm(net, name + ".in_layers.0", x1, x2, norm1, true)->out;
    if (resample == DOWN) {
        h = add_resample(net, DOWNSAMPLE, name + ".h_upd", h);
        x1 = add_resample(net, DOWNSAMPLE, name + ".x_upd", x1);
    } else if (resample == UP) {
        x1 = add_resample(net, UPSAMPLE, name + ".x_upd", x1); // h is upsampled where the convolution reads it
    }
    Layer* l = add_conv(net, name + ".in_layers.2", h, -1, conv1, Cout, 3, 1, resample == UP);
    if (!c.use_scale_shift_norm) l->emb = net->emb, l->emb_offset = *emb_columns;
    l = add_norm(net, name + ".out_layers.0", l->out, -1, norm2, true);
    if (c.use_scale_shift_norm) l->emb = net->emb, l->emb_offset = *emb_columns;
    l->dropout_block = (*index)++;
    *emb_columns += Ce;
    h = l->out;
    const int shortcut = skip < 0 ? x1 : add_conv(net, name + ".skip_connection", x1, x2, skip, Cout, 1)->out;
    l = add_conv(net, name + ".out_layers.3", h, -1, conv2, Cout, 3);
    l->residual = shortcut;
    return l->out;
}

// AttentionBlock: norm, qkv, attention over all pixels, projection + skip.
static int add_attention_block(UNet* net, const std::string& name, int x, int num_heads) {
    const Config& c = net->config;
    const Tensor t = net->tensors[x];
    const int heads = c.num_head_channels > 0 ? t.C / c.num_head_channels : num_heads, T = t.H * t.W;
    const int norm = add_norm_params(net, name + ".norm", t.C);
    const int qkv = add_param(net, name + ".qkv.weight", {3 * t.C, t.C, 1}, INIT_UNIFORM, t.C, QKV_ROWS, heads);
    add_param(net, name + ".qkv.bias", {3 * t.C}, INIT_UNIFORM, t.C, QKV_ROWS, heads);
    const int proj = add_param(net, name + ".proj_out.weight", {t.C, t.C, 1}, INIT_ZERO, t.C);
    add_param(net, name + ".proj_out.bias", {t.C}, INIT_ZERO, t.C);

    const int h = add_norm(net, name + ".norm", x, -1, norm, false)->out;
    const int q = add_conv(net, name + ".qkv", h, -1, qkv, 3 * t.C, 1)->out;
    Layer* l = add_layer(net, ATTENTION, name + ".attention", q, -1, -1, t.H, t.W, t.C);
    l->heads = heads;
    l->saved = add_buffer(net, (size_t)heads * T * sizeof(float));
    net->flops += 4.0 * T * T * t.C;
    l = add_conv(net, name + ".proj_out", l->out, -1, proj, t.C, 1);
    l->residual = x;
    return l->out;
}

// The timestep's (and the label's) way to the residual blocks: sinusoids, two linear layers, and one projection for all blocks at once.
// Returns the index of the projection layer, whose width is known when all blocks are.
static int add_embedding(UNet* net) {
    const Config& c = net->config;
    const int E = 4 * c.num_channels;
    const int first = add_linear_params(net, "time_embed.0", c.num_channels, E), second = add_linear_params(net, "time_embed.2", E, E);
    int h = add_layer(net, TIMESTEP_EMBEDDING, "timestep_embedding", -1, -1, -1, 1, 1, c.num_channels, true)->out;
    net->tensors[h].needs_grad = false;
    h = add_linear(net, "time_embed.0", h, first, E)->out;
    h = add_layer(net, SILU, "time_embed.1", h, -1, -1, 1, 1, E, true)->out;
    h = add_linear(net, "time_embed.2", h, second, E)->out;
    if (c.class_cond) {
        const int table = add_param(net, "label_emb.weight", {c.num_classes, E}, INIT_NORMAL);
        h = add_layer(net, LABEL_EMBEDDING, "label_emb", h, -1, table, 1, 1, E, true)->out;
    }
    h = add_layer(net, SILU, "emb_layers.0", h, -1, -1, 1, 1, E, true)->out;
    net->emb = add_layer(net, LINEAR, "emb_layers.1", h, -1, -1, 1, 1, 1, true)->out;
    return (int)net->layers.size() - 1;
}

// The encoder: at each level residual blocks (and attention), then half the resolution. Every tensor in skips is read again by the decoder.
static int add_input_blocks(UNet* net, std::vector<int>* skips, int* index, int* emb_columns) {
    const Config& c = net->config;
    int block = 0, ds = 1;
    int ch = (int)(c.mult[0] * c.num_channels);
    const int first = add_conv_params(net, "input_blocks.0.0", c.in_channels, ch, 3);
    int h = add_conv(net, "input_blocks.0.0", net->input, -1, first, ch, 3)->out;
    skips->push_back(h);
    for (size_t level = 0; level < c.mult.size(); level++) {
        ch = (int)(c.mult[level] * c.num_channels);
        for (int i = 0; i < c.num_res_blocks; i++) {
            const std::string name = "input_blocks." + std::to_string(++block);
            h = add_resblock(net, name + ".0", h, -1, ch, SAME, index, emb_columns);
            if (std::count(c.attention_levels.begin(), c.attention_levels.end(), ds)) h = add_attention_block(net, name + ".1", h, c.num_heads);
            skips->push_back(h);
        }
        if (level + 1 == c.mult.size()) break;
        const std::string name = "input_blocks." + std::to_string(++block) + ".0";
        if (c.resblock_updown) h = add_resblock(net, name, h, -1, ch, DOWN, index, emb_columns);
        else if (c.conv_resample) h = add_conv(net, name + ".op", h, -1, add_conv_params(net, name + ".op", ch, ch, 3), ch, 3, 2)->out;
        else h = add_resample(net, DOWNSAMPLE, name + ".op", h);
        skips->push_back(h);
        ds *= 2;
    }
    return h;
}

// The decoder: the encoder's tensors come back in reverse, concatenated to the running one.
static int add_output_blocks(UNet* net, int h, std::vector<int>* skips, int* index, int* emb_columns) {
    const Config& c = net->config;
    const int heads = c.num_heads_upsample == -1 ? c.num_heads : c.num_heads_upsample;
    int block = 0, ds = 1 << (c.mult.size() - 1);
    for (int level = (int)c.mult.size() - 1; level >= 0; level--) {
        const int ch = (int)(c.mult[level] * c.num_channels);
        for (int i = 0; i <= c.num_res_blocks; i++, block++) {
            const std::string name = "output_blocks." + std::to_string(block) + ".";
            int part = 0;
            h = add_resblock(net, name + std::to_string(part++), h, skips->back(), ch, SAME, index, emb_columns);
            skips->pop_back();
            if (std::count(c.attention_levels.begin(), c.attention_levels.end(), ds))
                h = add_attention_block(net, name + std::to_string(part++), h, heads);
            if (level == 0 || i < c.num_res_blocks) continue;
            const std::string up = name + std::to_string(part);
            if (c.resblock_updown) h = add_resblock(net, up, h, -1, ch, UP, index, emb_columns);
            else if (c.conv_resample) h = add_conv(net, up + ".conv", h, -1, add_conv_params(net, up + ".conv", ch, ch, 3), ch, 3, 1, 1)->out;
            else h = add_resample(net, UPSAMPLE, up, h);
            ds /= 2;
        }
    }
    return h;
}

// Where each parameter lies in the flat arrays: first the embedding projections' weights of all blocks, then their biases, so that they are one
// matrix; then the rest. Every other parameter starts at a multiple of 64 floats.
static void place_params(UNet* net) {
    const std::string weight = ".emb_layers.1.weight", bias = ".emb_layers.1.bias";
    auto ends_with = [](const std::string& s, const std::string& end) {
        return s.size() >= end.size() && !s.compare(s.size() - end.size(), end.size(), end);
    };
    size_t offset = 0;
    for (const std::string& kind : {weight, bias}) {
        for (Param& p : net->params)
            if (ends_with(p.name, kind)) p.offset = offset, offset += p.size;
        offset = (offset + 63) / 64 * 64;
    }
    for (Param& p : net->params)
        if (!ends_with(p.name, weight) && !ends_with(p.name, bias)) p.offset = offset, offset = (offset + p.size + 63) / 64 * 64;
    net->flat_size = offset;
}

// The network of a configuration that check_model accepts.
static UNet build_unet(const Config& config) {
    UNet net;
    net.config = config;
    int index = 0, emb_columns = 0;
    const int projection = add_embedding(&net);
    net.input = add_tensor(&net, config.H, config.W, config.in_channels, true);
    net.tensors[net.input].needs_grad = false;
    std::vector<int> skips;
    int h = add_input_blocks(&net, &skips, &index, &emb_columns);
    h = add_resblock(&net, "middle_block.0", h, -1, net.tensors[h].C, SAME, &index, &emb_columns);
    h = add_attention_block(&net, "middle_block.1", h, config.num_heads);
    h = add_resblock(&net, "middle_block.2", h, -1, net.tensors[h].C, SAME, &index, &emb_columns);
    h = add_output_blocks(&net, h, &skips, &index, &emb_columns);
    const int norm = add_norm_params(&net, "out.0", net.tensors[h].C);
    const int conv = add_conv_params(&net, "out.2", net.tensors[h].C, config.out_channels(), 3, true);
    h = add_norm(&net, "out.0", h, -1, norm, true)->out;
    net.output = add_conv(&net, "out.2", h, -1, conv, config.out_channels(), 3)->out;
    net.buffers[net.tensors[net.output].buffer].bytes = (size_t)config.H * config.W * config.out_channels() * sizeof(float);

    place_params(&net);
    Layer& l = net.layers[projection]; // now its width is known: rows of all blocks, at the start of the flat arrays
    for (size_t i = 0; i < net.params.size() && l.weight < 0; i++)
        if (net.params[i].offset == 0) l.weight = (int)i, l.bias = (int)i + 1;
    Tensor& emb = net.tensors[net.emb];
    emb.C = emb_columns;
    net.buffers[emb.buffer].bytes = emb_columns * sizeof(float);
    net.flops += 2.0 * net.tensors[l.x1].C * emb_columns;
    return net;
}

// =====================================================================================================================
// 8. The plan: what the backward pass adds where, when each buffer is in use, and so where it can lie. Time: 0 = the batch is drawn,
// 1 + i = layer i forward, L + 1 = the loss, 2 L + 1 - i = layer i backward.

// A tensor's gradient is the sum of its readers' contributions, visited from the last to the first. A residual's contribution is the gradient of
// the sum itself, so it is passed on, not copied; the next reader that computes something adds what is waiting. Nothing is zeroed first.
static void plan_gradients(UNet* net) {
    std::vector<std::vector<int>> waiting(net->tensors.size());
    auto contribute = [&](int x) { // the next contribution to tensor x: in place on a buffer that waits, or in a new one
        GradPlan g;
        if (x < 0 || !net->tensors[x].needs_grad) return g;
        std::vector<int>& w = waiting[x];
        if (w.size() > 2) die("internal error: %zu gradients wait for one tensor", w.size());
        if (w.empty()) w.push_back(add_buffer(net, net->buffers[net->tensors[x].buffer].bytes));
        else g.add1 = w[0];
        if (w.size() == 2) g.add2 = w[1];
        g.d = w[0];
        w.resize(1);
        return g;
    };
    waiting[net->output] = {add_buffer(net, net->buffers[net->tensors[net->output].buffer].bytes)};
    for (size_t i = net->layers.size(); i-- > 0;) {
        Layer& l = net->layers[i];
        if (waiting[l.out].empty()) continue; // the sinusoids
        if (waiting[l.out].size() != 1) die("internal error: the gradient of %s is not complete", l.name.c_str());
        l.dout = waiting[l.out][0];
        if (l.residual >= 0) waiting[l.residual].push_back(l.dout);
        if (l.emb >= 0) { // each reader of the embedding projections fills its own columns of their gradient
            if (waiting[l.emb].empty()) contribute(l.emb);
            l.demb = waiting[l.emb][0];
        }
        l.d1 = contribute(l.x1);
        l.d2 = contribute(l.x2);
    }
}

static void use(UNet* net, int buffer, int time) {
    if (buffer < 0) return;
    Buffer& b = net->buffers[buffer];
    b.first = b.first < 0 ? time : std::min(b.first, time);
    b.last = std::max(b.last, time);
}

static void use_tensor(UNet* net, int tensor, int time, bool with_stats) {
    if (tensor < 0) return;
    use(net, net->tensors[tensor].buffer, time);
    if (with_stats) use(net, net->tensors[tensor].stats, time);
}

static void plan_lifetimes(UNet* net) {
    const int L = (int)net->layers.size();
    for (int time : {0, L + 1}) { // the sampler works on input and output
        use_tensor(net, net->input, time, false);
        if (time) use_tensor(net, net->output, time, false);
    }
    for (int i = 0; i < L; i++) {
        const Layer& l = net->layers[i];
        for (int x : {l.x1, l.x2}) use_tensor(net, x, 1 + i, l.kind == GROUPNORM);
        for (int x : {l.residual, l.emb}) use_tensor(net, x, 1 + i, false);
        use_tensor(net, l.out, 1 + i, true);
        use(net, l.saved, 1 + i);
        if (!net->training || l.dout < 0) continue;
        const int back = 2 * L + 1 - i;
        if (l.kind != LABEL_EMBEDDING && l.kind != DOWNSAMPLE && l.kind != UPSAMPLE)
            for (int x : {l.x1, l.x2}) use_tensor(net, x, back, false);
        if (l.kind == GROUPNORM) use_tensor(net, l.emb, back, false);
        if (l.kind == ATTENTION) use_tensor(net, l.out, back, false);
        for (int b : {l.saved, l.dout, l.demb, l.d1.d, l.d1.add1, l.d1.add2, l.d2.d, l.d2.add1, l.d2.add2}) use(net, b, back);
        if (l.out == net->output) use(net, l.dout, L + 1);
    }
}

// Offsets of all buffers for batches of B: largest first, each at the lowest place that is free during its whole life.
static void place_buffers(UNet* net, int B) {
    std::vector<int> order, placed;
    for (size_t i = 0; i < net->buffers.size(); i++)
        if (net->buffers[i].first >= 0) order.push_back((int)i);
    auto bytes = [&](int i) { return (net->buffers[i].bytes * B + 255) / 256 * 256; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return bytes(a) > bytes(b); });
    net->arena_bytes = 0;
    for (int i : order) {
        Buffer& b = net->buffers[i];
        std::vector<std::pair<size_t, size_t>> taken;
        for (int j : placed) {
            const Buffer& o = net->buffers[j];
            if (o.first <= b.last && b.first <= o.last) taken.push_back({o.offset, o.offset + bytes(j)});
        }
        std::sort(taken.begin(), taken.end());
        b.offset = 0;
        for (const auto& [from, to] : taken) {
            if (b.offset + bytes(i) <= from) break;
            b.offset = std::max(b.offset, to);
        }
        net->arena_bytes = std::max(net->arena_bytes, b.offset + bytes(i));
        if (net->arena_bytes > (size_t)1 << 46)
            die("more than %d TiB of memory would be needed; a smaller --batch_size or a --microbatch needs less", 64);
        placed.push_back(i);
    }
}

static ConvShape conv_shape(const UNet* net, const Layer& l, int B) {
    const Tensor& x = net->tensors[l.x1];
    return ConvShape{B,
                     x.H,
                     x.W,
                     x.C,
                     l.x2 < 0 ? 0 : net->tensors[l.x2].C,
                     net->tensors[l.out].C,
                     l.kernel,
                     l.stride,
                     l.upsample,
                     l.x1 == net->input,
                     l.out == net->output};
}

static NormShape norm_shape(const UNet* net, const Layer& l, int B) {
    const Tensor& x = net->tensors[l.x1];
    return NormShape{B, x.H * x.W, x.C, l.x2 < 0 ? 0 : net->tensors[l.x2].C, 32, l.silu, 1e-5f};
}

#ifdef __CUDACC__
// Scratch memory for the operation that needs most of it; they take turns.
static void reserve_workspace(const UNet* net) {
    size_t bytes = std::max(gradient_norm_workspace(), mse_workspace(net->B));
    for (const Layer& l : net->layers) {
        const Tensor x = l.x1 < 0 ? Tensor{} : net->tensors[l.x1];
        if (l.kind == LINEAR) bytes = std::max(bytes, linear_backward_workspace(net->B, x.C, net->tensors[l.out].C));
        if (l.kind == CONV) bytes = std::max(bytes, conv_workspace(conv_shape(net, l, net->B)));
        if (l.kind == GROUPNORM) bytes = std::max(bytes, groupnorm_backward_workspace(norm_shape(net, l, net->B)));
        if (l.kind == ATTENTION) bytes = std::max(bytes, attention_backward_workspace(net->B, x.H * x.W, l.heads));
    }
    if (bytes <= device.workspace_bytes) return;
    if (device.workspace) device_free(device.workspace);
    device.workspace = device_alloc<char>(bytes);
    device.workspace_bytes = bytes;
}
#else
static void reserve_workspace(const UNet*) {} // operations on a CPU take what they need
#endif

// Gives the network its device memory for batches of up to B; training: with a backward pass. Says which batch would fit if this one doesn't.
static void plan_memory(UNet* net, int B, bool training) {
    if ((double)B * net->config.H * net->config.W > INT_MAX)
        die("--batch_size %d: so many images of %s at a time are more than 2^31 pixels; a smaller --microbatch (or --batch_size) works", B,
            net->config.image_size.c_str());
    net->B = B;
    net->training = training;
    if (training) plan_gradients(net);
    plan_lifetimes(net);
    place_buffers(net, B);
    const size_t available = device_available(),
                 weights = net->flat_size * (training ? 5 * sizeof(float) + 2 * act_bytes() : sizeof(float) + act_bytes());
    if (net->arena_bytes + weights > available) {
        const double needed = (double)(net->arena_bytes + weights) / 0x1p30;
        int fits = B;
        do place_buffers(net, fits /= 2);
        while (fits && net->arena_bytes + weights > available);
        if (!fits)
            die("this model needs %.2f GiB of GPU memory and %.2f GiB are free: it does not fit, whatever the batch", needed,
                (double)available / 0x1p30);
        die("a batch of %d needs %.2f GiB of GPU memory and %.2f GiB are free; %s %d fits", B, needed, (double)available / 0x1p30,
            training ? "--microbatch" : "--batch_size", fits);
    }
    net->arena = device_alloc<char>(net->arena_bytes);
    reserve_workspace(net);
}

// =====================================================================================================================
// 9. Forward and backward

template <class T = act> static T* buffer_data(const UNet* net, int buffer) {
    return buffer < 0 ? nullptr : (T*)(net->arena + net->buffers[buffer].offset);
}

template <class T = act> static T* tensor_data(const UNet* net, int tensor) {
    return tensor < 0 ? nullptr : buffer_data<T>(net, net->tensors[tensor].buffer);
}

static double* tensor_stats(const UNet* net, int tensor) {
    return tensor < 0 ? nullptr : buffer_data<double>(net, net->tensors[tensor].stats);
}

static Grad grad_data(const UNet* net, const GradPlan& g) {
    return Grad{buffer_data(net, g.d), buffer_data(net, g.add1), buffer_data(net, g.add2)};
}

static GradOf<float> fp32_grad(const Grad& g) {
    return GradOf<float>{(float*)g.dx, (const float*)g.add1, (const float*)g.add2};
}

static Dropout layer_dropout(const Layer& l, Dropout dropout) {
    if (l.dropout_block < 0) dropout.p = 0;
    dropout.layer = (uint32_t)l.dropout_block;
    return dropout;
}

// Parameters of a network: fp32, and the convolutions' weights once more in the type of the activations.
struct Weights {
    const float* fp32;
    const act* copy;
};

// net's output (B, H, W, out_channels) from its input tensor (B, H, W, in_channels), net->t (B) and, if class_cond, net->labels (B).
static void unet_forward(UNet* net, Weights weights, Dropout dropout, int B) {
    auto param = [&](int i) { return i < 0 ? nullptr : weights.fp32 + net->params[i].offset; };
    const int emb_stride = net->tensors[net->emb].C;
    for (const Layer& l : net->layers) {
        const Tensor x = l.x1 < 0 ? Tensor{} : net->tensors[l.x1];
        const int Cout = net->tensors[l.out].C;
        const act *x1 = tensor_data(net, l.x1), *x2 = tensor_data(net, l.x2);
        act* out = tensor_data(net, l.out);
        const float *v = (const float*)x1, *weight = param(l.weight), *bias = param(l.bias); // v, o: where x1 and out are fp32 embeddings
        float *o = (float*)out, *saved = buffer_data<float>(net, l.saved);
        const float* emb = l.emb < 0 ? nullptr : tensor_data<float>(net, l.emb) + l.emb_offset;
        double* stats = tensor_stats(net, l.out);
        switch (l.kind) {
        case TIMESTEP_EMBEDDING: timestep_embedding_forward(o, net->t, B, Cout, net->config.max_period); break;
        case LINEAR: linear_forward(o, v, weight, bias, B, x.C, Cout); break;
        case SILU: silu_forward(o, v, (size_t)B * x.C); break;
        case LABEL_EMBEDDING: label_embedding_forward(o, v, weight, net->labels, B, x.C); break;
        case CONV:
            conv_forward(out, stats, x1, x2, act_at(weights.copy, net->params[l.weight].offset), bias, emb, emb_stride, tensor_data(net, l.residual),
                         conv_shape(net, l, B));
            break;
        case GROUPNORM:
            groupnorm_forward(out, saved, saved + B * 32, x1, tensor_stats(net, l.x1), x2, tensor_stats(net, l.x2), weight, bias, emb, emb_stride,
                              layer_dropout(l, dropout), norm_shape(net, l, B));
            break;
        case ATTENTION: attention_forward(out, saved, x1, B, x.H * x.W, Cout, l.heads); break;
        case DOWNSAMPLE: downsample_forward(out, stats, x1, B, x.H, x.W, x.C); break;
        case UPSAMPLE: upsample_forward(out, stats, x1, B, x.H, x.W, x.C); break;
        }
    }
}

// The buffer in which the loss leaves its gradient with respect to the output.
static float* output_gradient(UNet* net) {
    return buffer_data<float>(net, net->layers.back().dout);
}

// grads += gradients of the parameters, from output_gradient and what the forward pass of the same B left in memory.
static void unet_backward(UNet* net, Weights weights, float* grads, Dropout dropout, int B) {
    const int emb_stride = net->tensors[net->emb].C;
    for (size_t i = net->layers.size(); i-- > 0;) {
        const Layer& l = net->layers[i];
        if (l.dout < 0) continue;
        const Tensor x = net->tensors[l.x1];
        const int Cout = net->tensors[l.out].C;
        const act *dout = buffer_data(net, l.dout), *x1 = tensor_data(net, l.x1), *x2 = tensor_data(net, l.x2);
        const size_t at_weight = l.weight < 0 ? 0 : net->params[l.weight].offset, at_bias = l.bias < 0 ? 0 : net->params[l.bias].offset;
        const float *weight = weights.fp32 + at_weight, *bias = weights.fp32 + at_bias, *saved = buffer_data<float>(net, l.saved);
        const float *v = (const float*)x1, *dv = (const float*)dout;
        float *dweight = grads + at_weight, *dbias = grads + at_bias;
        float* demb = l.demb < 0 ? nullptr : buffer_data<float>(net, l.demb) + l.emb_offset;
        const Grad d1 = grad_data(net, l.d1), d2 = grad_data(net, l.d2);
        switch (l.kind) {
        case TIMESTEP_EMBEDDING: break;
        case LINEAR: linear_backward(fp32_grad(d1), dweight, dbias, dv, v, weight, B, x.C, Cout); break;
        case SILU: silu_backward(fp32_grad(d1), dv, v, (size_t)B * x.C); break;
        case LABEL_EMBEDDING: label_embedding_backward(fp32_grad(d1), dweight, dv, net->labels, B, x.C); break;
        case CONV:
            conv_backward_weight(dweight, dbias, demb, emb_stride, dout, x1, x2, conv_shape(net, l, B));
            if (d1.dx || d2.dx) conv_backward_input(d1, d2, dout, act_at(weights.copy, at_weight), conv_shape(net, l, B));
            break;
        case GROUPNORM:
            groupnorm_backward(d1, d2, dweight, dbias, demb, dout, x1, x2, saved, saved + B * 32, weight, bias,
                               l.emb < 0 ? nullptr : tensor_data<float>(net, l.emb) + l.emb_offset, emb_stride, layer_dropout(l, dropout),
                               norm_shape(net, l, B));
            break;
        case ATTENTION: attention_backward(d1.dx, dout, x1, tensor_data(net, l.out), saved, B, x.H * x.W, Cout, l.heads); break;
        case DOWNSAMPLE: downsample_backward(d1, dout, B, x.H, x.W, x.C); break;
        case UPSAMPLE: upsample_backward(d1, dout, B, x.H, x.W, x.C); break;
        }
    }
}

// =====================================================================================================================
// 10. Diffusion. Tables are computed in double, as guided-diffusion does, and used in fp32.

// alpha_bar (T): the product of 1 - beta up to each t.
static std::vector<double> alpha_bars(const Config& c) {
    const int T = c.diffusion_steps;
    std::vector<double> result(T);
    auto cosine = [](double t) { return std::pow(std::cos((t + 0.008) / 1.008 * M_PI / 2), 2); }; // Nichol & Dhariwal 2021, eq. 17
    double product = 1;
    for (int t = 0; t < T; t++) {
        const double scale = 1000.0 / T, low = 1e-4 * scale, high = 0.02 * scale; // Ho et al. 2020, for any T
        const double beta =
            c.noise_schedule == "linear" ? low + (high - low) * t / (T - 1) : std::min(1 - cosine((t + 1.0) / T) / cosine((double)t / T), 0.999);
        product *= 1 - beta;
        result[t] = product;
    }
    return result;
}

// What the model is trained on, in one place: x_t = signal[t] x_0 + sigma[t] noise, and the model predicts the noise.
struct Diffusion {
    float *signal, *sigma; // (T), device
};

static Diffusion make_diffusion(const Config& c) {
    std::vector<float> signal, sigma;
    for (double a : alpha_bars(c)) {
        signal.push_back((float)std::sqrt(a));
        sigma.push_back((float)std::sqrt(1 - a));
    }
    Diffusion d{device_alloc<float>(signal.size()), device_alloc<float>(sigma.size())};
    copy_to_device(d.signal, signal.data(), signal.size() * sizeof(float));
    copy_to_device(d.sigma, sigma.data(), sigma.size() * sizeof(float));
    return d;
}

// The timesteps a sampler visits, ascending (guided-diffusion's space_timesteps): "" all, "ddimN" every (T / N)-th, "n1,n2,..." so many in each
// equal part of [0, T).
static std::vector<int> space_timesteps(int T, const std::string& respacing) {
    std::set<int> steps;
    std::vector<float> counts{(float)T};
    if (respacing.rfind("ddim", 0) == 0) {
        const std::string number = respacing.substr(4);
        const bool digits = number.size() < 7 && number.find_first_not_of("0123456789") == std::string::npos;
        const int want = digits ? atoi(number.c_str()) : 0;
        for (int stride = 1; stride < T && steps.empty(); stride++)
            if ((T + stride - 1) / stride == want)
                for (int t = 0; t < T; t += stride) steps.insert(t);
        if (steps.empty()) die("--timestep_respacing %s: no whole stride makes so many of the %d steps; ddim25 or 25 may", respacing.c_str(), T);
        return std::vector<int>(steps.begin(), steps.end());
    }
    if (!respacing.empty() && (!parse_list(respacing, &counts) || counts.size() > (size_t)T))
        die("--timestep_respacing %s: must be a number of steps, ddim and a number, or numbers with commas", respacing.c_str());
    int start = 0;
    for (size_t i = 0; i < counts.size(); i++) {
        const int parts = (int)counts.size(), size = T / parts + ((int)i < T % parts), count = (int)counts[i];
        if (count != counts[i] || count < 1 || count > size)
            die("--timestep_respacing %s: a part of %d steps can keep from 1 to %d of them", respacing.c_str(), size, size);
        const double stride = count <= 1 ? 1 : (double)(size - 1) / (count - 1);
        double at = 0;
        for (int k = 0; k < count; k++, at += stride) steps.insert(start + (int)std::nearbyint(at));
        start += size;
    }
    return std::vector<int>(steps.begin(), steps.end());
}

// The samplers: each is a row of coefficients per step, from the last t to the first (a = alpha_bar[t], b = alpha_bar of the next lower t kept).
// x0 = (x - sqrt(1 - a) eps) / sqrt(a) always; then
//   ddpm   the mean of q(x_b | x_a, x0) and the larger of the two fixed variances, beta (Ho et al. 2020, eq. 7 and section 3.2)
//   ddim   sqrt(b) x0 + sqrt(1 - b - s^2) eps + s z   (Song et al. 2021, eq. 12 and 16, s scaled by eta)
static std::vector<SamplerStep> sampler_steps(const Config& c) {
    const std::vector<double> alpha_bar = alpha_bars(c);
    const std::vector<int> kept = space_timesteps(c.diffusion_steps, c.timestep_respacing);
    std::vector<SamplerStep> steps;
    for (size_t i = kept.size(); i-- > 0;) {
        const double a = alpha_bar[kept[i]], b = i ? alpha_bar[kept[i - 1]] : 1, beta = 1 - a / b;
        SamplerStep s{};
        s.t = (float)kept[i];
        s.x0_x = (float)std::sqrt(1 / a);
        s.x0_eps = (float)std::sqrt(1 / a - 1);
        if (c.sampler == "ddpm") {
            s.next_x0 = (float)(beta * std::sqrt(b) / (1 - a));
            s.next_x = (float)((1 - b) * std::sqrt(a / b) / (1 - a));
            s.sigma = i ? (float)std::sqrt(beta) : 0.0f;
        } else {
            const double sigma = c.eta * std::sqrt((1 - b) / (1 - a)) * std::sqrt(beta);
            s.next_x0 = (float)std::sqrt(b);
            s.next_eps = (float)std::sqrt(std::max(1 - b - sigma * sigma, 0.0));
            s.sigma = i ? (float)sigma : 0.0f;
        }
        steps.push_back(s);
    }
    return steps;
}

// A sampler's device memory, for any number of images.
struct Sampler {
    int count;          // steps
    SamplerStep* steps; // (count), device
    int64_t *k, *zero;  // the step it is at; 0
    float* t;           // (B)
    int* labels;        // (B)
};

static Sampler make_sampler(const Config& c, int B) {
    const std::vector<SamplerStep> steps = sampler_steps(c);
    Sampler s{(int)steps.size(),        device_alloc<SamplerStep>(steps.size()),
              device_alloc<int64_t>(1), device_alloc<int64_t>(1),
              device_alloc<float>(B),   device_alloc<int>(B)};
    copy_to_device(s.steps, steps.data(), steps.size() * sizeof(SamplerStep));
    return s;
}

// Images first .. first + B - 1 of a seed, left in net's input tensor (B, H, W, C): the same images whatever B is. The loop stays on the device.
static void sample_batch(UNet* net, Weights weights, Sampler* s, int64_t first, int B) {
    const Config& c = net->config;
    float* x = tensor_data<float>(net, net->input);
    std::vector<int> labels(B);
    for (int b = 0; b < B; b++) labels[b] = c.class_cond ? (int)((first + b) % c.num_classes) : 0;
    copy_to_device(s->labels, labels.data(), B * sizeof(int));
    device_zero(s->k, sizeof(int64_t));
    net->t = s->t;
    net->labels = s->labels;
    draw_normals(x, B, c.H * c.W * c.in_channels, RandomKey{(uint64_t)c.seed, RANDOM_SAMPLE_START, s->zero, first});
    Graph graph;
    for (int k = 0; k < s->count; k++)
        replay(&graph, [&] {
            sampler_timesteps(s->t, s->steps, s->k, B);
            unet_forward(net, weights, Dropout{}, B);
            sampler_step(x, tensor_data<float>(net, net->output), s->steps, c.clip_denoised,
                         RandomKey{(uint64_t)c.seed, RANDOM_SAMPLE_NOISE, s->k, first}, B, c.H * c.W, c.in_channels, c.out_channels());
            next_step(s->k);
        });
    free_graph(&graph);
}

// n images (n, H, W, C) in [-1, 1] on the host, in batches of up to net->B.
static std::vector<float> sample_images(UNet* net, Weights weights, Sampler* s, int n) {
    const Config& c = net->config;
    const size_t size = (size_t)c.H * c.W * c.in_channels;
    std::vector<float> images(n * size);
    for (int i = 0; i < n; i += net->B) {
        const int B = std::min(net->B, n - i);
        sample_batch(net, weights, s, i, B);
        copy_to_host(&images[i * size], tensor_data(net, net->input), B * size * sizeof(float));
    }
    return images;
}

// =====================================================================================================================
// 11. Data: a .bin file of images (N, C, H, W), uint8 or float32, and labels (N), mapped into memory. unet.cu's files are read too.

constexpr int DATA_MAGIC = 20261120, UNET_CU_DATA_MAGIC = 20240620;

struct Dataset {
    MappedFile file;
    int64_t count = 0;
    int C = 0, H = 0, W = 0, classes = 0, bytes = 1; // bytes of a value
    uint32_t header_crc = 0;                         // names the file's content
    const uint8_t* images = nullptr;
    const uint8_t* labels = nullptr; // int32, perhaps at an odd address

    int label(int64_t i) const {
        int32_t v;
        memcpy(&v, labels + i * sizeof v, sizeof v);
        return v;
    }
    size_t image_bytes() const { return (size_t)C * H * W * bytes; }
    size_t labels_at(int B) const { return (B * image_bytes() + 3) / 4 * 4; } // in a batch, behind its images
};

static Dataset open_dataset(const std::string& path) {
    const char* hint = "prepare_data.py makes such files, and make unpacks those in data/";
    Dataset d;
    d.file.map(path, hint);
    Header h;
    memcpy(h.slot, d.file.data, sizeof h.slot);
    const int* s = h.slot;
    const bool ours = s[0] == DATA_MAGIC;
    if (!ours && s[0] != UNET_CU_DATA_MAGIC) die("%s: is not a data file (it starts with %d, not %d); %s", path.c_str(), s[0], DATA_MAGIC, hint);
    if (ours && s[1] != 1)
        die("%s: is a data file of version %d and this program reads version 1; make it again with prepare_data.py", path.c_str(), s[1]);
    d.count = s[ours ? 2 : 1];
    d.C = s[ours ? 3 : 2];
    d.H = s[ours ? 4 : 3];
    d.W = s[ours ? 5 : 4];
    d.classes = ours ? s[6] : 0;
    d.bytes = ours ? s[7] : 4;
    if (d.count < 1 || d.C < 1 || d.C > 64 || d.H < 1 || d.H > 4096 || d.W < 1 || d.W > 4096 || d.classes < 0 || (d.bytes != 1 && d.bytes != 4))
        die("%s: its header is damaged (%ld images of %d x %d x %d, %d classes, %d bytes a value); %s", path.c_str(), (long)d.count, d.C, d.H, d.W,
            d.classes, d.bytes, hint);
    const size_t images = d.image_bytes() * d.count, size = 1024 + images + (d.classes ? d.count * sizeof(int32_t) : 0);
    if (size != d.file.size)
        die("%s: is %zu bytes long, but its header speaks of %zu; it was cut short or damaged: make it again", path.c_str(), d.file.size, size);
    d.header_crc = ours ? (uint32_t)s[8] : 0;
    for (int i = ours ? 10 : 256; i < 256; i++)
        if (s[i]) die("%s: its header is damaged (field %d holds %d, which means nothing); %s", path.c_str(), i, s[i], hint);
    h.slot[8] = 0;
    if (ours && crc32(0, h.slot, 1024) != d.header_crc) die("%s: its header's checksum is wrong, so it was damaged; make it again", path.c_str());
    // The images are checked too, where that takes seconds at most; a larger file is only mapped.
    if (ours && size <= (size_t)4 << 30 && crc32(0, d.file.data + 1024, size - 1024) != (uint32_t)s[9])
        die("%s: its checksum is wrong, so it was damaged; make it again", path.c_str());
    d.images = d.file.data + 1024;
    if (d.classes) d.labels = d.images + images;
    for (int64_t i = 0; d.labels && i < d.count; i++)
        if (d.label(i) < 0 || d.label(i) >= d.classes)
            die("%s: image %ld has label %d of %d classes; make the file again", path.c_str(), (long)i, d.label(i), d.classes);
    return d;
}

// The images (B, C, H, W) and after them the labels (B) of positions first .. first + B - 1 of the endless shuffled stream or, unshuffled, of the
// file, for the device.
static void load_batch(Upload* batch, const Dataset& d, uint64_t seed, bool shuffled, int64_t first, int B) {
    wait_for_host_side(batch);
    int* labels = (int*)(batch->host + d.labels_at(B));
    for (int b = 0; b < B; b++) {
        const int64_t g = first + b, i = shuffled ? permuted_index(seed, g % d.count, g / d.count, d.count) : g;
        memcpy(batch->host + b * d.image_bytes(), d.images + i * d.image_bytes(), d.image_bytes());
        labels[b] = d.labels ? d.label(i) : 0;
    }
    send(batch);
}

// =====================================================================================================================
// 12. Model files: a header, then fp32 tensors in state_dict order and PyTorch's layout: weights [, EMA] [, first moments, second moments].

constexpr int MODEL_MAGIC = 20261121, UNET_CU_MODEL_MAGIC = 12345678, HAS_EMA = 1, HAS_TRAINING = 2;
constexpr int SLOT_CONTENTS = 2, SLOT_CRC = 3, SLOT_PARAMS = 4, SLOT_STEP = 64, SLOT_SEED = 66, SLOT_UPDATES = 81, SLOT_BAD = 82, SLOT_IMAGES = 84,
              SLOT_DATA_CRC = 86, SLOT_GUARD = 88, SLOT_PATH = 128;

// Flags that have a slot of their own. A word of choices is stored as its number.
struct FlagSlot {
    int slot;
    const char* flag;
};
static const FlagSlot MODEL_SLOTS[] = {{8, "in_channels"},
                                       {9, "num_channels"},
                                       {10, "num_res_blocks"},
                                       {11, "num_heads"},
                                       {12, "num_head_channels"},
                                       {13, "num_heads_upsample"},
                                       {14, "class_cond"},
                                       {15, "num_classes"},
                                       {16, "learn_sigma"},
                                       {17, "use_scale_shift_norm"},
                                       {18, "resblock_updown"},
                                       {19, "conv_resample"},
                                       {20, "use_new_attention_order"},
                                       {21, "dropout"},
                                       {40, "max_period"},
                                       {41, "diffusion_steps"},
                                       {42, "noise_schedule"}};
static const FlagSlot TRAINING_SLOTS[] = {{68, "batch_size"},  {69, "microbatch"}, {70, "max_steps"},  {71, "lr"},        {72, "weight_decay"},
                                          {73, "adam_beta1"},  {74, "adam_beta2"}, {75, "adam_eps"},   {76, "grad_clip"}, {77, "warmup_steps"},
                                          {78, "lr_schedule"}, {79, "ema_rate"},   {80, "random_flip"}};

static void put_slot(Header* h, int slot, const Flag& f) {
    switch (f.kind) {
    case FLAG_INT: h->slot[slot] = *(int*)f.value; break;
    case FLAG_LONG: h->slot[slot] = (int32_t) * (int64_t*)f.value; break;
    case FLAG_BOOL: h->slot[slot] = *(bool*)f.value; break;
    case FLAG_REAL: h->set_real(slot, *(float*)f.value); break;
    case FLAG_TEXT: {
        const std::vector<std::string> words = choices(f);
        h->slot[slot] = (int)(std::find(words.begin(), words.end(), *(std::string*)f.value) - words.begin());
    }
    }
}

static std::string slot_value(const Header& h, int slot, const Flag& f) {
    if (f.kind == FLAG_REAL) return text("%.9g", h.real(slot));
    if (f.kind == FLAG_BOOL) return h.slot[slot] == 1 ? "True" : h.slot[slot] == 0 ? "False" : std::to_string(h.slot[slot]);
    if (f.kind != FLAG_TEXT) return std::to_string(h.slot[slot]);
    const std::vector<std::string> words = choices(f);
    return h.slot[slot] >= 0 && h.slot[slot] < (int)words.size() ? words[h.slot[slot]] : std::to_string(h.slot[slot]);
}

// The configuration as header slots (section "Model .bin" of dev/README.md lists them).
static Header model_header(Config config) {
    Flags flags = config_flags(&config);
    Header h;
    h.slot[0] = MODEL_MAGIC;
    h.slot[1] = 1;
    h.slot[6] = config.H;
    h.slot[7] = config.W;
    for (const FlagSlot& s : MODEL_SLOTS) put_slot(&h, s.slot, *flags.find(s.flag));
    if (!config.class_cond) h.slot[15] = 0;
    h.slot[22] = (int)config.mult.size();
    for (size_t i = 0; i < config.mult.size(); i++) h.set_real(23 + (int)i, config.mult[i]);
    h.slot[31] = (int)config.attention_levels.size();
    for (size_t i = 0; i < config.attention_levels.size(); i++) h.slot[32 + i] = config.H / config.attention_levels[i];
    return h;
}

// Whether two values of a flag mean the same: 64 and 64x64, 1,2 and 1,2.0, 8,16 and 16,8.
static bool same_value(const std::string& name, std::string a, std::string b) {
    if (name != "image_size" && name != "channel_mult" && name != "attention_resolutions") return a == b;
    std::replace(a.begin(), a.end(), 'x', ',');
    std::replace(b.begin(), b.end(), 'x', ',');
    std::vector<float> x, y;
    if (!parse_list(a, &x) || !parse_list(b, &y)) return a == b;
    if (name == "image_size" && x.size() == 1) x.push_back(x[0]);
    if (name == "image_size" && y.size() == 1) y.push_back(y[0]);
    if (name == "attention_resolutions") std::sort(x.begin(), x.end()), std::sort(y.begin(), y.end());
    return x == y;
}

// Takes one flag from a file, unless the command line gave it; a model flag that the command line gave must then agree.
static void take_flag(Flags* flags, const std::string& path, const char* name, const std::string& value, bool must_agree) {
    Flag* f = flags->find(name);
    const std::string wanted = flag_value(*f);
    if (f->given && !must_agree) return;
    set_flag(f, value, path + ": ");
    if (f->given && !same_value(name, flag_value(*f), wanted))
        die("--%s %s: %s was made with %s; leave the flag out, or start without that file", name, wanted.c_str(), path.c_str(),
            flag_value(*f).c_str());
}

// The model's flags out of a header, ours or unet.cu's.
static void take_model_flags(Flags* flags, const Header& h, const std::string& path) {
    if (h.slot[0] == UNET_CU_MODEL_MAGIC) {
        const std::pair<const char*, std::string> fixed[] = {{"image_size", text("%dx%d", h.slot[5], h.slot[6])},
                                                             {"in_channels", std::to_string(h.slot[2])},
                                                             {"num_channels", std::to_string(h.slot[3])},
                                                             {"max_period", std::to_string(h.slot[7])},
                                                             {"channel_mult", "1,2,3,4"},
                                                             {"num_res_blocks", "2"},
                                                             {"attention_resolutions", text("%d,%d", h.slot[5] / 4, h.slot[5] / 8)},
                                                             {"num_head_channels", "32"},
                                                             {"conv_resample", "False"},
                                                             {"class_cond", "False"},
                                                             {"learn_sigma", h.slot[4] == 2 * (int64_t)h.slot[2] ? "True" : "False"},
                                                             {"use_scale_shift_norm", "False"},
                                                             {"resblock_updown", "False"},
                                                             {"use_new_attention_order", "True"}};
        for (const auto& [name, value] : fixed) take_flag(flags, path, name, value, true);
        return;
    }
    const std::string size = h.slot[6] == h.slot[7] ? std::to_string(h.slot[6]) : text("%dx%d", h.slot[6], h.slot[7]);
    std::string mult, resolutions;
    if (h.slot[22] < 1 || h.slot[22] > 8 || h.slot[31] < 0 || h.slot[31] > 8)
        die("%s: its header is damaged (%d levels, %d attention resolutions)", path.c_str(), h.slot[22], h.slot[31]);
    for (int i = 0; i < h.slot[22]; i++) mult += text("%s%.9g", i ? "," : "", h.real(23 + i));
    for (int i = 0; i < h.slot[31]; i++) resolutions += text("%s%d", i ? "," : "", h.slot[32 + i]);
    take_flag(flags, path, "image_size", size, true);
    take_flag(flags, path, "channel_mult", mult, true);
    take_flag(flags, path, "attention_resolutions", resolutions, true);
    for (const FlagSlot& s : MODEL_SLOTS) take_flag(flags, path, s.flag, slot_value(h, s.slot, *flags->find(s.flag)), strcmp(s.flag, "dropout") != 0);
}

// A model file, mapped and checked; its arrays are read once the network is built.
struct ModelFile {
    MappedFile file;
    Header header;
    bool has(int what) const { return header.slot[0] == MODEL_MAGIC && (header.slot[SLOT_CONTENTS] & what) == what; }
};

static ModelFile open_model(const std::string& path) {
    ModelFile m;
    m.file.map(path, "checkpoints are called model_STEP.bin");
    memcpy(m.header.slot, m.file.data, 1024);
    const int* s = m.header.slot;
    if (s[0] == UNET_CU_MODEL_MAGIC) return m; // has no checks of its own; its size is checked when it is read
    if (s[0] != MODEL_MAGIC)
        die("%s: is not a model file (it starts with %d, not %d); python train_unet.py --convert makes one from .pt and .safetensors", path.c_str(),
            s[0], MODEL_MAGIC);
    if (s[1] != 1) die("%s: is a model file of version %d and this program reads version 1", path.c_str(), s[1]);
    const int64_t n = m.header.wide(SLOT_PARAMS);
    const int contents = s[SLOT_CONTENTS], arrays = 1 + (contents & HAS_EMA ? 1 : 0) + (contents & HAS_TRAINING ? 2 : 0);
    if (contents < 0 || contents > 3 || n < 1 || n > (int64_t)1 << 40)
        die("%s: its header is damaged (contents %d, %ld parameters)", path.c_str(), contents, (long)n);
    if (m.file.size != 1024 + (size_t)arrays * n * sizeof(float))
        die("%s: is %zu bytes long, but its header speaks of %zu; it was cut short or damaged: use an earlier checkpoint", path.c_str(), m.file.size,
            1024 + (size_t)arrays * n * sizeof(float));
    auto unused = [&](int from, int to) {
        for (int i = from; i < to; i++)
            if (s[i]) die("%s: its header is damaged (field %d holds %d, which means nothing): use an earlier checkpoint", path.c_str(), i, s[i]);
    };
    Header zeroed = m.header;
    zeroed.slot[SLOT_CRC] = 0;
    if (crc32(crc32(0, zeroed.slot, 1024), m.file.data + 1024, m.file.size - 1024) != (uint32_t)s[SLOT_CRC])
        die("%s: its checksum is wrong, so it was damaged: use an earlier checkpoint", path.c_str());
    unused(23 + std::min(std::max(s[22], 0), 8), 31);
    unused(32 + std::min(std::max(s[31], 0), 8), 40);
    unused(43, 64);
    unused(contents & HAS_TRAINING ? 87 : 68, contents & HAS_TRAINING ? 88 : 256);
    unused(98, 128);
    return m;
}

// One parameter between our layout and PyTorch's: OIHW against OHWI, and qkv's rows, which are [q k v][head][d] here and [head][q k v][d] in files
// with the old attention order. This is the only place where the two differ.
static void permute_param(const Config& c, const Param& p, float* ours, float* theirs, bool to_file) {
    auto move = [&](size_t i, size_t j, size_t n) {
        to_file ? memcpy(theirs + j, ours + i, n * sizeof(float)) : memcpy(ours + i, theirs + j, n * sizeof(float));
    };
    if (p.layout == CONV_OIHW) {
        const int O = p.shape[0], I = p.shape[1], K = p.shape[2] * p.shape[3];
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i++)
                for (int k = 0; k < K; k++) move(((size_t)o * K + k) * I + i, ((size_t)o * I + i) * K + k, 1);
    } else if (p.layout == QKV_ROWS && !c.use_new_attention_order) {
        const int C = p.shape[0] / 3, d = C / p.heads;
        const size_t row = p.size / p.shape[0];
        for (int part = 0; part < 3; part++)
            for (int head = 0; head < p.heads; head++) move(((size_t)part * C + head * d) * row, ((size_t)head * 3 * d + part * d) * row, d * row);
    } else {
        move(0, 0, p.size);
    }
}

// Whether a model file holds this network's weights, before memory is asked for.
static void check_size(const ModelFile& m, const UNet& net) {
    const size_t n = net.num_params, bytes = 1024 + n * sizeof(float);
    const int* s = m.header.slot;
    const bool ours = s[0] == MODEL_MAGIC, longer = s[8] || s[9]; // what follows unet.cu's weights
    if (ours ? m.header.wide(SLOT_PARAMS) != (int64_t)n
             : m.file.size < bytes || (m.file.size > bytes && !longer) || s[4] != net.config.out_channels())
        die("%s: does not hold the %zu parameters of its model", m.file.path.c_str(), n);
}

// The k-th array of a model file into flat device memory.
static void read_array(const ModelFile& m, const UNet& net, int k, float* device) {
    std::vector<float> flat(net.flat_size);
    const float* in = (const float*)(m.file.data + 1024) + k * net.num_params;
    for (const Param& p : net.params) {
        permute_param(net.config, p, &flat[p.offset], const_cast<float*>(in), false);
        in += p.size;
    }
    copy_to_device(device, flat.data(), flat.size() * sizeof(float));
}

// Writes a model file from flat device arrays, in the order of the format.
static void write_model(const std::string& path, const UNet& net, Header header, const std::vector<const float*>& arrays) {
    header.set_wide(SLOT_PARAMS, (int64_t)net.num_params);
    header.slot[SLOT_CRC] = 0;
    AtomicFile file(path);
    file.write(header.slot, 1024);
    uint32_t crc = crc32(0, header.slot, 1024);
    std::vector<float> flat(net.flat_size), out;
    for (const float* device : arrays) {
        copy_to_host(flat.data(), device, flat.size() * sizeof(float));
        for (const Param& p : net.params) {
            out.resize(p.size);
            permute_param(net.config, p, &flat[p.offset], out.data(), true);
            crc = crc32(crc, out.data(), p.size * sizeof(float));
            file.write(out.data(), p.size * sizeof(float));
        }
    }
    header.slot[SLOT_CRC] = (int32_t)crc;
    file.write_at(SLOT_CRC * 4, &header.slot[SLOT_CRC], 4);
    file.commit();
}

// Whether device memory holds numbers only.
static bool all_finite(const float* device, size_t n) {
    std::vector<float> host(n);
    copy_to_host(host.data(), device, n * sizeof(float));
    return std::all_of(host.begin(), host.end(), [](float v) { return std::isfinite(v); });
}

// The initial weights, distributed as guided-diffusion's modules initialise them: uniform in +-1/sqrt(fan_in) (PyTorch's default for convolutions
// and linears, weights and biases alike), standard normal class embeddings, norms 1 and 0, and zero in the last layer of every block.
static void init_params(const UNet& net, float* device) {
    std::vector<float> flat(net.flat_size), value;
    for (size_t k = 0; k < net.params.size(); k++) {
        const Param& p = net.params[k];
        const float bound = p.fan_in ? (float)(1 / std::sqrt((double)p.fan_in)) : 0;
        value.assign(p.size, p.init == INIT_ONE ? 1.0f : 0.0f);
        if (p.init == INIT_UNIFORM || p.init == INIT_NORMAL)
            for (size_t e = 0; e < p.size; e += 4) { // e counts in PyTorch's layout, so that train_unet.py draws the same weights
                const Words r = philox((uint64_t)net.config.seed, (uint32_t)(e / 4), (uint32_t)k, 0, RANDOM_INIT);
                float z[4];
                normals(z, r);
                for (size_t i = 0; i < 4 && e + i < p.size; i++)
                    value[e + i] = p.init == INIT_NORMAL ? z[i] : (2 * ((r.w[i] >> 8) * 0x1p-24f) - 1) * bound;
            }
        permute_param(net.config, p, &flat[p.offset], value.data(), false);
    }
    copy_to_device(device, flat.data(), flat.size() * sizeof(float));
}

// =====================================================================================================================
// 13. Pictures: PNG files, grids of images, the loss curve

// pixels (H, W, C), C = 1 (grey) or 3 (RGB). The zlib stream inside consists of stored blocks: nothing is compressed, so there is nothing to get wrong.
static void write_png(const std::string& path, const std::vector<uint8_t>& pixels, int W, int H, int C) {
    std::string raw, zlib = "\x78\x01";
    for (int h = 0; h < H; h++) {
        raw += '\0'; // filter: none
        raw.append((const char*)&pixels[(size_t)h * W * C], (size_t)W * C);
    }
    uint32_t a = 1, b = 0; // Adler-32 (RFC 1950)
    for (unsigned char byte : raw) {
        a = (a + byte) % 65521;
        b = (b + a) % 65521;
    }
    for (size_t i = 0; i < raw.size(); i += 65535) { // RFC 1951, section 3.2.4
        const size_t n = std::min<size_t>(65535, raw.size() - i);
        const uint8_t head[5] = {(uint8_t)(i + n == raw.size()), (uint8_t)n, (uint8_t)(n >> 8), (uint8_t)~n, (uint8_t)(~n >> 8)};
        zlib.append((const char*)head, 5).append(raw, i, n);
    }
    auto big_endian = [](uint32_t v) { return std::string{(char)(v >> 24), (char)(v >> 16), (char)(v >> 8), (char)v}; };
    zlib += big_endian(b << 16 | a);
    if (zlib.size() > INT_MAX) die("%s: so many images don't fit into a PNG; a .bin holds any number", path.c_str());
    AtomicFile file(path);
    auto chunk = [&](const std::string& type, const std::string& data) {
        const std::string body = type + data, all = big_endian((uint32_t)data.size()) + body + big_endian(crc32(0, body.data(), body.size()));
        file.write(all.data(), all.size());
    };
    file.write("\x89PNG\r\n\x1a\n", 8);
    chunk("IHDR", big_endian(W) + big_endian(H) + std::string{8, (char)(C == 3 ? 2 : 0), 0, 0, 0}); // 8 bits a sample
    chunk("IDAT", zlib);
    chunk("IEND", "");
    file.commit();
}

// images (n, H, W, C) in [-1, 1] as one picture, small ones enlarged. Images of 3 channels are RGB; of any others, the first is shown in grey.
static void write_grid(const std::string& path, const std::vector<float>& images, int n, int H, int W, int C) {
    const int columns = (int)std::ceil(std::sqrt((double)n)), rows = (n + columns - 1) / columns, gap = 2, zoom = std::max(1, 64 / std::max(H, W));
    const int channels = C == 3 ? 3 : 1, cell_h = H * zoom + gap, cell_w = W * zoom + gap, height = rows * cell_h + gap,
              width = columns * cell_w + gap;
    std::vector<uint8_t> pixels((size_t)height * width * channels, 255);
    for (int i = 0; i < n; i++)
        for (int h = 0; h < H * zoom; h++)
            for (int w = 0; w < W * zoom; w++)
                for (int c = 0; c < channels; c++) {
                    const float v = (images[(((size_t)i * H + h / zoom) * W + w / zoom) * C + c] + 1) * 127.5f;
                    const size_t y = gap + i / columns * cell_h + h, x = gap + i % columns * cell_w + w;
                    pixels[(y * width + x) * channels + c] = (uint8_t)std::lround(std::min(std::max(v, 0.0f), 255.0f));
                }
    write_png(path, pixels, width, height, channels);
}

// A canvas for the loss curve.
struct Canvas {
    int W, H;
    std::vector<uint8_t> pixels;
    Canvas(int W, int H) : W(W), H(H), pixels((size_t)W * H * 3, 255) {}

    void fill(int x0, int y0, int x1, int y1, uint32_t rgb) {
        for (int y = std::max(y0, 0); y < std::min(y1, H); y++)
            for (int x = std::max(x0, 0); x < std::min(x1, W); x++)
                for (int c = 0; c < 3; c++) pixels[((size_t)y * W + x) * 3 + c] = (uint8_t)(rgb >> (16 - 8 * c));
    }
    // Text in a 3 x 5 font, three times enlarged; a glyph is five octal digits, one a row.
    void write(int x, int y, const std::string& s) {
        static const std::map<char, int> font = {{'0', 075557}, {'1', 026227}, {'2', 071747}, {'3', 071717}, {'4', 055711}, {'5', 074717},
                                                 {'6', 074757}, {'7', 071222}, {'8', 075757}, {'9', 075717}, {'.', 000002}, {'-', 000700},
                                                 {'a', 025755}, {'e', 025743}, {'k', 045655}, {'l', 062227}, {'o', 007557}, {'p', 075744},
                                                 {'s', 034216}, {'t', 027223}, {'v', 055552}};
        for (char ch : s) {
            const auto glyph = font.find(ch);
            for (int bit = 0; glyph != font.end() && bit < 15; bit++)
                if (glyph->second >> (14 - bit) & 1) fill(x + bit % 3 * 3, y + bit / 3 * 3, x + bit % 3 * 3 + 3, y + bit / 3 * 3 + 3, 0x444444);
            x += 12;
        }
    }
};

struct LossPoint {
    double step, loss, val; // val: NaN where there is none
};

// Light: every step's loss; dark: its running mean; orange: validation. The loss axis is logarithmic.
static void write_loss_curve(const std::string& path, const std::vector<LossPoint>& points) {
    Canvas canvas(960, 540);
    const int left = 90, right = 940, top = 30, bottom = 480;
    double low = INFINITY, high = 0;
    for (const LossPoint& p : points)
        for (double v : {p.loss, p.val})
            if (std::isfinite(v) && v > 0) low = std::min(low, v), high = std::max(high, v);
    if (!(high > 0)) return;
    low *= 0.9, high *= 1.1;
    const double last = std::max(points.back().step, 1.0);
    auto px = [&](double step) { return left + (int)((right - left) * step / last); };
    auto py = [&](double v) { return bottom - (int)((bottom - top) * std::log(std::min(std::max(v, low), high) / low) / std::log(high / low)); };
    for (double decade = 1e-6; decade < 1e6; decade *= 10)
        for (double m : {1.0, 2.0, 5.0})
            if (m * decade > low && m * decade < high) {
                canvas.fill(left, py(m * decade), right, py(m * decade) + 1, 0xDDDDDD);
                canvas.write(8, py(m * decade) - 7, text("%.4g", m * decade));
            }
    for (int k = 0; k <= 4; k++) {
        const double step = last * k / 4;
        canvas.fill(px(step), top, px(step) + 1, bottom, 0xEEEEEE);
        canvas.write(px(step) - (k ? 40 : 0), bottom + 12, last >= 40000 ? text("%.0fk", step / 1000) : text("%.0f", step));
    }
    canvas.write(8, 6, "loss");
    canvas.write(right - 60, bottom + 36, "step");
    for (const LossPoint& p : points)
        if (std::isfinite(p.loss)) canvas.fill(px(p.step), py(p.loss) - 1, px(p.step) + 2, py(p.loss) + 1, 0xA8C8E8);
    double mean = 0, n = 0;
    int previous = 0;
    for (const LossPoint& p : points) {
        if (!std::isfinite(p.loss)) continue;
        mean += (p.loss - mean) * std::max(1 / ++n, 0.01);
        const int y = py(mean), from = n == 1 ? y : previous;
        canvas.fill(px(p.step) - 1, std::min(y, from) - 1, px(p.step) + 1, std::max(y, from) + 1, 0x1F4E8C);
        previous = y;
    }
    for (const LossPoint& p : points)
        if (std::isfinite(p.val)) canvas.fill(px(p.step) - 3, py(p.val) - 3, px(p.step) + 3, py(p.val) + 3, 0xE07020);
    write_png(path, canvas.pixels, canvas.W, canvas.H, 3);
}

// =====================================================================================================================
// 14. A training step: draw, diffuse, forward, loss, backward, judge, update

// A whole step is one graph: whatever changes from step to step lies in device memory. Two batches take turns, so that one is copied while the
// other is trained on.
struct Trainer {
    UNet net;
    Dataset data;
    Diffusion diffusion;
    AdamW adamw;
    float *params, *grads, *ema, *m, *v; // flat, device
    act *copy, *ema_copy;                // see Weights
    StepState *state, *records;          // device; records (RECORDS): the latest steps, for the log
    Upload batch[2];                     // images (B, C, H, W), then labels (B)
    Graph graph[2];
    float *noise, *t; // (micro, H, W, C), (B)
    double* loss;     // (B)
};
constexpr int RECORDS = 128;

static size_t batch_bytes(const Dataset& d, int B) {
    return d.labels_at(B) + B * sizeof(int);
}

static Trainer make_trainer(const Config& c, const Dataset& data) {
    Trainer tr{};
    tr.net = build_unet(c);
    tr.data = data;
    plan_memory(&tr.net, c.micro(), true);
    tr.diffusion = make_diffusion(c);
    const int schedule = c.lr_schedule == "constant" ? 0 : c.lr_schedule == "linear" ? 1 : 2;
    tr.adamw = AdamW{c.lr, c.weight_decay, c.adam_beta1, c.adam_beta2, c.adam_eps, c.grad_clip, c.ema_rate, schedule, c.warmup_steps, c.max_steps};
    for (float** array : {&tr.params, &tr.grads, &tr.ema, &tr.m, &tr.v}) *array = device_alloc<float>(tr.net.flat_size);
    tr.copy = make_copy(tr.params, tr.net.flat_size);
    tr.ema_copy = make_copy(tr.ema, tr.net.flat_size);
    tr.state = device_alloc<StepState>(1);
    tr.records = device_alloc<StepState>(RECORDS);
    for (Upload& batch : tr.batch) batch = make_upload(batch_bytes(data, c.batch_size));
    tr.noise = device_alloc<float>((size_t)c.micro() * c.H * c.W * c.in_channels);
    tr.t = device_alloc<float>(c.batch_size);
    tr.loss = device_alloc<double>(c.batch_size);
    return tr;
}

// Forward and backward of samples first .. first + B - 1 of the step's batch; gradients are added to grads.
static void train_microbatch(Trainer* tr, const Upload& batch, int first, int B) {
    const Config& c = tr->net.config;
    const Dataset& d = tr->data;
    const uint64_t seed = (uint64_t)c.seed;
    auto key = [&](uint32_t purpose) { return RandomKey{seed, purpose, &tr->state->step, first}; };
    const Dropout dropout{c.dropout, seed, &tr->state->step, first, 0};
    const Weights weights{tr->params, tr->copy};
    UNet* net = &tr->net;
    net->t = tr->t + first;
    net->labels = (int*)(batch.device + d.labels_at(c.batch_size)) + first;
    draw_timesteps(net->t, B, c.diffusion_steps, key(RANDOM_TIMESTEP));
    q_sample_forward(tensor_data<float>(net, net->input), tr->noise, net->t, batch.device + first * d.image_bytes(), tr->diffusion.signal,
                     tr->diffusion.sigma, c.random_flip, key(RANDOM_NOISE), key(RANDOM_FLIP), ImageShape{B, d.C, d.H, d.W, d.bytes});
    unet_forward(net, weights, dropout, B);
    mse_forward_backward(tr->loss + first, output_gradient(net), tensor_data<float>(net, net->output), tr->noise, 1.0f / c.batch_size, B, c.H * c.W,
                         c.in_channels, c.out_channels());
    unet_backward(net, weights, tr->grads, dropout, B);
}

// Puts one step of training on its way. step: how many went before it, which is what state->step will be.
static void train_step(Trainer* tr, int64_t step) {
    const Config& c = tr->net.config;
    Upload* batch = &tr->batch[step % 2];
    load_batch(batch, tr->data, (uint64_t)c.seed, true, step * c.batch_size, c.batch_size);
    replay(&tr->graph[step % 2], [&] {
        for (int first = 0; first < c.batch_size; first += c.micro()) train_microbatch(tr, *batch, first, c.micro());
        gradient_norm(tr->state, tr->grads, tr->net.flat_size);
        judge_step(tr->state, tr->loss, tr->t, tr->adamw, c.batch_size, c.diffusion_steps);
        adamw_update(tr->params, tr->copy, tr->ema, tr->m, tr->v, tr->grads, tr->state, tr->adamw, tr->net.flat_size);
        next_step(&tr->state->step);
        record_step(tr->records, tr->state, RECORDS);
    });
    release(batch);
}

// Mean loss of the first images of a data set, with t and noise that depend on the image alone, so that the curve is smooth.
static double validation_loss(Trainer* tr, const Dataset& val) {
    const Config& c = tr->net.config;
    const int count = (int)std::min<int64_t>(val.count, 512);
    UNet* net = &tr->net;
    std::vector<double> losses(count);
    int64_t* zero = device_alloc<int64_t>(1);
    double* loss = device_alloc<double>(net->B);
    Upload batch = make_upload(batch_bytes(val, net->B));
    net->t = tr->t;
    for (int i = 0; i < count; i += net->B) {
        const int B = std::min(net->B, count - i);
        auto key = [&](uint32_t purpose) { return RandomKey{(uint64_t)c.seed, purpose, zero, i}; };
        load_batch(&batch, val, 0, false, i, B);
        net->labels = (int*)(batch.device + val.labels_at(B));
        draw_timesteps(net->t, B, c.diffusion_steps, key(RANDOM_VAL_TIMESTEP));
        q_sample_forward(tensor_data<float>(net, net->input), tr->noise, net->t, batch.device, tr->diffusion.signal, tr->diffusion.sigma, false,
                         key(RANDOM_VAL_NOISE), key(RANDOM_FLIP), ImageShape{B, val.C, val.H, val.W, val.bytes});
        unet_forward(net, Weights{tr->params, tr->copy}, Dropout{}, B);
        mse_forward_backward(loss, output_gradient(net), tensor_data<float>(net, net->output), tr->noise, 1, B, c.H * c.W, c.in_channels,
                             c.out_channels());
        copy_to_host(&losses[i], loss, B * sizeof(double));
        release(&batch);
    }
    device_free(zero);
    device_free(loss);
    free_upload(&batch);
    double sum = 0;
    for (double l : losses) sum += l;
    return sum / count;
}

// =====================================================================================================================
// 15. A run: an output folder with log.csv, samples_STEP.png, loss.png and model_STEP.bin

static volatile sig_atomic_t stop_signal = 0;
static void on_signal(int signal) {
    stop_signal = signal;
}
// What ends a run after the step in hand: Ctrl-C, kill, a terminal that goes away, a reader that does (./train_unet | head).
static const std::map<int, const char*> STOP_SIGNALS = {{SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}, {SIGPIPE, "SIGPIPE"}};

struct Run {
    Config config;
    Trainer trainer;
    Dataset val;
    Sampler sampler;
    StepState state{}; // the host's copy
    std::vector<LossPoint> history;
    FILE* log = nullptr;
    bool terminal = false, line_open = false;
    double seconds = 0, clock = 0; // spent in steps since the start of this process; when the steps that are on their way began
    int64_t first_step = 0, issued = 0, saved = 0, saved_updates = 0; // saved: what the newest checkpoint holds
    bool save_due = false;                                            // a checkpoint was due at a step that was bad
};

static std::string run_path(const Config& c, const char* format, int64_t step) {
    char name[64];
    snprintf(name, sizeof name, format, (long)step);
    return c.output_dir + "/" + name;
}

// Steps of the checkpoints in a folder, ascending.
static std::vector<int64_t> list_checkpoints(const std::string& folder) {
    std::vector<int64_t> steps;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
        long step;
        const std::string name = entry.path().filename().string();
        if (sscanf(name.c_str(), "model_%18ld.bin", &step) == 1 && name == text("model_%07ld.bin", step)) steps.push_back(step);
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Ends a redrawn status line before anything else is printed.
static void end_line(Run* run) {
    if (run->line_open) printf("\n");
    run->line_open = false;
}

static const char* LOG_HEADER = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss";

// Opens log.csv. On a resume, rows beyond the checkpoint's step go (those steps are about to be done again), and the rest feeds the loss curve.
static void open_log(Run* run) {
    const std::string path = run->config.output_dir + "/log.csv";
    std::string kept = std::string(LOG_HEADER) + "\n";
    if (FILE* old = fopen(path.c_str(), "r")) {
        char row[1024];
        while (fgets(row, sizeof row, old)) {
            LossPoint p{0, NAN, NAN};
            if (sscanf(row, "%lf,%lf", &p.step, &p.loss) < 1 || p.step > (double)run->first_step || !strchr(row, '\n')) continue;
            const char* val = strrchr(row, ',');
            if (val && val[1] != '\n') p.val = atof(val + 1);
            run->history.push_back(p);
            kept += row;
        }
        fclose(old);
    }
    AtomicFile file(path);
    file.write(kept.data(), kept.size());
    file.commit();
    run->log = fopen(path.c_str(), "a");
    if (!run->log) die("%s: can't be opened (%s)", path.c_str(), strerror(errno));
}

static void log_step(Run* run, double ms, double val) {
    const StepState& s = run->state;
    fprintf(run->log, "%ld,%.9g,%.9g,%.9g,%.3f", (long)s.step, s.loss, s.lr, s.grad_norm, ms);
    for (int q = 0; q < 4; q++) s.count_q[q] ? fprintf(run->log, ",%.9g", s.loss_q[q]) : fprintf(run->log, ",");
    std::isnan(val) ? fprintf(run->log, ",\n") : fprintf(run->log, ",%.9g\n", val);
    run->history.push_back(LossPoint{(double)s.step, s.loss, val});
}

static void print_step(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    const double per_step = run->seconds / (double)(s.step - run->first_step), eta = per_step * (double)(c.max_steps - s.step);
    std::string line = text("step %ld/%ld | loss %.4f (mean %.4f) | lr %.2e | norm %.3f | %.1f ms | %.1f images/s | %.0f GFLOP/s | ETA %d:%02d:%02d",
                            (long)s.step, (long)c.max_steps, s.loss, s.guard.mean_loss, s.lr, s.grad_norm, per_step * 1e3, c.batch_size / per_step,
                            3 * run->trainer.net.flops * c.batch_size / per_step / 1e9, (int)(eta / 3600), (int)(eta / 60) % 60, (int)eta % 60);
    const double val = run->history.back().val;
    if (!std::isnan(val)) line += text(" | val %.4f", val);
    if (s.bad_total) line += text(" | skipped %ld", (long)s.bad_total);
    if (run->terminal) printf("\r\033[K%s", line.c_str());
    else printf("%s\n", line.c_str());
    run->line_open = run->terminal;
    fflush(stdout);
}

static void save_checkpoint(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    const Trainer& tr = run->trainer;
    Header h = model_header(c);
    Config copy = c;
    Flags flags = config_flags(&copy);
    for (const FlagSlot& slot : TRAINING_SLOTS) put_slot(&h, slot.slot, *flags.find(slot.flag));
    h.slot[SLOT_CONTENTS] = HAS_EMA | HAS_TRAINING;
    h.set_wide(SLOT_STEP, s.step);
    h.set_wide(SLOT_SEED, c.seed);
    h.slot[SLOT_UPDATES] = (int)s.updates;
    h.slot[SLOT_BAD] = (int)s.bad_total;
    h.slot[SLOT_BAD + 1] = (int)s.bad_in_row;
    h.set_wide(SLOT_IMAGES, tr.data.count);
    h.slot[SLOT_DATA_CRC] = (int32_t)tr.data.header_crc;
    memcpy(&h.slot[SLOT_GUARD], &s.guard, sizeof s.guard);
    memcpy(&h.slot[SLOT_PATH], c.data_file.data(), c.data_file.size());
    fflush(run->log);
    write_model(run_path(c, "model_%07ld.bin", s.step), tr.net, h, {tr.params, tr.ema, tr.m, tr.v});
    run->saved = s.step;
    run->saved_updates = s.updates;
    run->save_due = false;
    if (s.bad_in_row) return; // what this run will come to is open: no older checkpoint makes room for it
    std::vector<int64_t> steps = list_checkpoints(c.output_dir);
    for (size_t i = 0; c.keep_checkpoints && i + c.keep_checkpoints < steps.size(); i++) unlink(run_path(c, "model_%07ld.bin", steps[i]).c_str());
}

// A grid from the averaged weights and the same noise each time, so that one sees it grow; and the loss curve.
static void save_pictures(Run* run) {
    const Config& c = run->config;
    if (c.sample_interval) {
        Trainer& tr = run->trainer;
        cast_params(tr.ema_copy, tr.ema, tr.net.flat_size);
        const std::vector<float> images = sample_images(&tr.net, Weights{tr.ema, tr.ema_copy}, &run->sampler, c.num_samples);
        write_grid(run_path(c, "samples_%07ld.png", run->state.step), images, c.num_samples, c.H, c.W, c.in_channels);
    }
    write_loss_curve(c.output_dir + "/loss.png", run->history);
}

// Names a step that was skipped, and ends the run after too many in a row.
static void report_bad_step(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    end_line(run);
    printf(
        "step %ld: loss %g (mean %g), gradient norm %g (mean %g): not finite or far outside its spread, so this step is skipped (%ld in a row, %ld in all)\n",
        (long)s.step, s.loss, s.guard.mean_loss, s.grad_norm, s.guard.mean_norm, (long)s.bad_in_row, (long)s.bad_total);
    if (s.bad_in_row < c.max_bad_steps) return;
    fflush(run->log);
    const std::vector<int64_t> steps = list_checkpoints(c.output_dir);
    const std::string last =
        steps.empty() ? "no checkpoint was written yet" : "the last good checkpoint is " + run_path(c, "model_%07ld.bin", steps.back());
    die("stopped at step %ld: %d steps in a row had to be skipped; %s; a lower --lr or a --warmup_steps may help", (long)s.step, c.max_bad_steps,
        last.c_str());
}

// Brings back weights, moments, EMA, counters and the guard.
static void restore(Run* run, const ModelFile& m) {
    Trainer& tr = run->trainer;
    StepState& s = run->state;
    read_array(m, tr.net, 0, tr.params);
    read_array(m, tr.net, 1, tr.ema);
    read_array(m, tr.net, 2, tr.m);
    read_array(m, tr.net, 3, tr.v);
    s.step = m.header.wide(SLOT_STEP);
    s.updates = m.header.slot[SLOT_UPDATES];
    s.bad_total = m.header.slot[SLOT_BAD];
    s.bad_in_row = m.header.slot[SLOT_BAD + 1];
    memcpy(&s.guard, &m.header.slot[SLOT_GUARD], sizeof s.guard);
    cast_params(tr.copy, tr.params, tr.net.flat_size);
    run->first_step = run->issued = run->saved = s.step;
    run->saved_updates = s.updates;
    copy_to_device(tr.state, &s, sizeof s);
    printf("resumed from %s: step %ld of %ld, %ld updates, seed %ld\n", m.file.path.c_str(), (long)s.step, (long)run->config.max_steps,
           (long)s.updates, (long)run->config.seed);
}

// An output folder holds one run. A new run needs a folder without one; a resumed run needs its own folder, or an empty one.
static void check_output_dir(const Config& c, const std::string& resume, int64_t resume_step) {
    const std::vector<int64_t> steps = list_checkpoints(c.output_dir);
    const bool used = !steps.empty() || exists(c.output_dir + "/log.csv");
    if (used && resume.empty())
        die("%s: already holds a run%s; continue it with --resume_checkpoint latest, or choose another --output_dir", c.output_dir.c_str(),
            steps.empty() ? "" : text(" (up to step %ld)", (long)steps.back()).c_str());
    std::error_code error;
    const bool own = std::filesystem::equivalent(std::filesystem::path(resume).parent_path() / ".", c.output_dir + "/.", error);
    if (used && !resume.empty() && !own)
        die("%s: already holds a run, but %s is not part of it; choose another --output_dir", c.output_dir.c_str(), resume.c_str());
    if (!resume.empty() && !steps.empty() && steps.back() > resume_step)
        die("%s: holds a later checkpoint (step %ld) than %s; resume that one (latest), or choose another --output_dir", c.output_dir.c_str(),
            (long)steps.back(), resume.c_str());
}

static void make_output_dir(const Config& c) {
    std::error_code error;
    std::filesystem::create_directories(c.output_dir, error);
    if (error || access(c.output_dir.c_str(), W_OK))
        die("--output_dir %s: can't be written to (%s); choose another", c.output_dir.c_str(), error ? error.message().c_str() : strerror(errno));
}

static double gib(double bytes) {
    return bytes / 0x1p30;
}

static void print_start(const Config& c, const Flags& flags, const UNet& net, const Dataset& data) {
    printf("preset %s: %s", c.preset.c_str(), PRESETS.at(c.preset));
    bool any = false;
    for (const Flag& f : flags.list)
        if (f.given) printf("%s --%s %s", any ? "" : "\nflags:", f.name, flag_value(f).c_str()), any = true;
    printf("\nmodel: %dx%dx%d, %.2f M parameters, %zu layers, %.3f GFLOP forward an image\n", c.H, c.W, c.in_channels, net.num_params / 1e6,
           net.layers.size(), net.flops / 1e9);
    printf("memory: %.2f GiB weights, gradients, EMA and moments; %.2f GiB activations for %d images at a time\n",
           gib(5.0 * net.flat_size * sizeof(float)), gib((double)net.arena_bytes), net.B);
    printf("data: %s, %ld images, %ld steps of %d an epoch; output: %s/\n", c.data_file.c_str(), (long)data.count,
           (long)((data.count + c.batch_size - 1) / c.batch_size), c.batch_size, c.output_dir.c_str());
    fflush(stdout);
}

// Waits for the steps that are on their way and logs them, the last one with a validation loss if wanted.
static void collect_steps(Run* run, bool validate) {
    StepState records[RECORDS];
    const int64_t logged = run->state.step;
    copy_to_host(records, run->trainer.records, sizeof records);
    const double elapsed = now() - run->clock, val = validate ? validation_loss(&run->trainer, run->val) : NAN;
    run->seconds += elapsed;
    for (int64_t step = logged; step < run->issued; step++) {
        run->state = records[step % RECORDS];
        log_step(run, elapsed * 1e3 / (double)(run->issued - logged), step + 1 == run->issued ? val : NAN);
        if (!run->state.ok) report_bad_step(run);
    }
    run->clock = now();
}

// One turn of the loop: a step, and when something is due after it, its log row and that.
static void run_step(Run* run) {
    const Config& c = run->config;
    train_step(&run->trainer, run->issued++);
    const int64_t step = run->issued;
    const bool last = step >= c.max_steps || stop_signal;
    const bool show = step % c.log_interval == 0 || last, save = step % c.save_interval == 0 || last || run->save_due;
    const bool validate = run->val.count && (step % c.val_interval == 0 || last);
    const bool draw = c.sample_interval && step % c.sample_interval == 0 && !last;
    if (!show && !save && !validate && !draw && step - run->state.step < STEPS_AHEAD) return;
    collect_steps(run, validate);
    if (show || validate) print_step(run);
    run->save_due = save;
    if (run->state.bad_in_row) return; // weights that may be broken replace no checkpoint
    if (save) save_checkpoint(run);
    if (draw) save_pictures(run);
    run->clock = now(); // what was done in between is not part of a step
}

static void train(const Config& c, const Flags& flags, const Dataset& data, const std::string& resume, const ModelFile& start) {
    Run run;
    run.config = c;
    run.terminal = isatty(1);
    check_output_dir(c, resume, resume.empty() ? 0 : start.header.wide(SLOT_STEP));
    if (!c.val_data_file.empty()) run.val = open_dataset(c.val_data_file);
    if (run.val.count && (run.val.C != data.C || run.val.H != data.H || run.val.W != data.W))
        die("--val_data_file %s: its images are %dx%dx%d, the training data's %dx%dx%d", c.val_data_file.c_str(), run.val.H, run.val.W, run.val.C,
            data.H, data.W, data.C);
    if (run.val.count && c.class_cond && (!run.val.labels || run.val.classes > c.num_classes))
        die("--val_data_file %s: has %d classes and the model %d; it must be labelled as the training data is", c.val_data_file.c_str(),
            run.val.classes, c.num_classes);
    if (start.file.data) check_size(start, build_unet(c));
    run.trainer = make_trainer(c, data);
    run.sampler = make_sampler(c, run.trainer.net.B);
    print_start(c, flags, run.trainer.net, data);
    Trainer& tr = run.trainer;
    if (!resume.empty()) {
        restore(&run, start);
    } else {
        if (start.file.data) read_array(start, tr.net, start.has(HAS_EMA) && c.use_ema ? 1 : 0, tr.params);
        else init_params(tr.net, tr.params);
        std::vector<float> flat(tr.net.flat_size);
        copy_to_host(flat.data(), tr.params, flat.size() * sizeof(float));
        copy_to_device(tr.ema, flat.data(), flat.size() * sizeof(float));
        cast_params(tr.copy, tr.params, tr.net.flat_size);
    }
    if (run.state.step >= c.max_steps) {
        printf("nothing to do: step %ld of %ld is reached; a larger --max_steps goes on\n", (long)run.state.step, (long)c.max_steps);
        return;
    }
    make_output_dir(c);
    open_log(&run);
    for (const auto& [number, name] : STOP_SIGNALS)
        if (signal(number, on_signal) == SIG_IGN && number == SIGHUP) signal(number, SIG_IGN); // nohup
    run.clock = now();
    while (run.issued < c.max_steps && !stop_signal) run_step(&run);
    if (run.state.step < run.issued) collect_steps(&run, false); // a signal came after the last look at it
    const bool fresh = run.saved < run.state.step && run.saved_updates < run.state.updates;
    if (fresh && all_finite(tr.params, tr.net.flat_size)) save_checkpoint(&run);
    end_line(&run);
    fclose(run.log);
    if (stop_signal) {
        printf("stopped by %s after step %ld; %s%ld; --resume_checkpoint latest goes on from there\n", STOP_SIGNALS.at((int)stop_signal),
               (long)run.state.step, run.saved ? "saved is step " : "no good step was there to save: ", (long)run.saved);
        write_loss_curve(c.output_dir + "/loss.png", run.history);
    } else {
        save_pictures(&run);
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        printf("done: %ld steps, %.1f ms a step, peak memory %.0f MiB; see %s/\n", (long)run.state.step,
               run.seconds / (double)(run.state.step - run.first_step) * 1e3, usage.ru_maxrss / 1024.0, c.output_dir.c_str());
    }
}

// --sample N: N images from a model file into one PNG, or a .bin data file of float images.
static void sample_and_stop(const Config& c, const ModelFile& model) {
    const bool png = c.output.size() > 4 && c.output.compare(c.output.size() - 4, 4, ".png") == 0;
    const bool bin = c.output.size() > 4 && c.output.compare(c.output.size() - 4, 4, ".bin") == 0;
    if (!png && !bin) die("--output %s: must end in .png (one grid) or .bin (float images)", c.output.c_str());
    UNet net = build_unet(c);
    check_size(model, net);
    plan_memory(&net, std::min(c.sample, c.batch_size), false);
    float* params = device_alloc<float>(net.flat_size);
    read_array(model, net, model.has(HAS_EMA) && c.use_ema ? 1 : 0, params);
    if (!all_finite(params, net.flat_size))
        die("%s: its weights are not finite, so there is nothing to sample; use an earlier checkpoint", model.file.path.c_str());
    Sampler sampler = make_sampler(c, net.B);
    const double start = now();
    act* copy = make_copy(params, net.flat_size);
    cast_params(copy, params, net.flat_size);
    const std::vector<float> images = sample_images(&net, Weights{params, copy}, &sampler, c.sample);
    const double seconds = now() - start;
    if (!std::all_of(images.begin(), images.end(), [](float v) { return std::isfinite(v); }))
        die("%s: not written, because the samples are not finite; the weights in %s are broken", c.output.c_str(), model.file.path.c_str());
    if (png) {
        write_grid(c.output, images, c.sample, c.H, c.W, c.in_channels);
    } else {
        std::vector<float> planes(images.size());
        const int HW = c.H * c.W, C = c.in_channels;
        for (int i = 0; i < c.sample; i++)
            for (int p = 0; p < HW; p++)
                for (int k = 0; k < C; k++) planes[((size_t)i * C + k) * HW + p] = images[((size_t)i * HW + p) * C + k];
        Header h;
        const int slots[10] = {DATA_MAGIC, 1, c.sample, C, c.H, c.W, 0, 4, 0, (int)crc32(0, planes.data(), planes.size() * sizeof(float))};
        std::copy(slots, slots + 10, h.slot);
        h.slot[8] = (int)crc32(0, h.slot, 1024);
        AtomicFile file(c.output);
        file.write(h.slot, 1024);
        file.write(planes.data(), planes.size() * sizeof(float));
        file.commit();
    }
    printf("%d images with %s, %d steps, in %.2f s (%.1f images/s): %s\n", c.sample, c.sampler.c_str(), sampler.count, seconds, c.sample / seconds,
           c.output.c_str());
}

// --bench N: N times the milliseconds of a training step and of a forward pass, as one line of JSON. The images are made up.
static std::string quantiles(std::vector<double> ms) {
    std::sort(ms.begin(), ms.end());
    auto at = [&](double q) { return ms[(size_t)(q * (double)(ms.size() - 1) + 0.5)]; };
    return text("[%.4f, %.4f, %.4f]", at(0.5), at(0.1), at(0.9));
}

template <class F> static std::string time_work(int n, F work) {
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
    return quantiles(ms);
}

static void bench(const Config& c) {
    Dataset data;
    data.count = 4 * c.batch_size;
    data.C = c.in_channels;
    data.H = c.H;
    data.W = c.W;
    data.classes = c.class_cond ? c.num_classes : 0;
    std::vector<uint8_t> images(data.count * data.image_bytes());
    std::vector<int32_t> labels(data.count, 0);
    for (size_t i = 0; i < images.size(); i++) images[i] = (uint8_t)(i * 2654435761u >> 13);
    data.images = images.data();
    data.labels = (const uint8_t*)labels.data();
    Trainer tr = make_trainer(c, data);
    for (Param& p : tr.net.params)
        if (p.init == INIT_ZERO && p.fan_in) p.init = INIT_UNIFORM; // zeros are quicker to multiply than weights
    init_params(tr.net, tr.params);
    cast_params(tr.copy, tr.params, tr.net.flat_size);
    int64_t step = 0;
    Graph forward;
    const std::string steps = time_work(c.bench, [&] { train_step(&tr, step++); });
    const double gibibytes = device_bytes / 0x1p30;
    tr.net.t = tr.t;
    tr.net.labels = (int*)(tr.batch[0].device + data.labels_at(c.batch_size));
    const std::string passes = time_work(c.bench, [&] {
        replay(&forward, [&] { unet_forward(&tr.net, Weights{tr.params, tr.copy}, Dropout{}, c.micro()); });
    });
    printf(
        "{\"program\": \"train_unet\", \"model\": \"%s\", \"batch\": %d, \"precision\": \"%s\", \"step_ms\": %s, \"forward_ms\": %s, \"memory_gib\": %.3f}\n",
        c.preset.c_str(), c.batch_size, act_bytes() == 2 ? "bf16" : "fp32", steps.c_str(), passes.c_str(), gibibytes);
}

// =====================================================================================================================
// 16. main

// What the command line leaves open comes, in this order, from the preset, the model file, and the data file.
static void take_model_file(Flags* flags, const ModelFile& model, bool resume) {
    const std::string& path = model.file.path;
    take_model_flags(flags, model.header, path);
    if (!resume) return;
    for (const FlagSlot& s : TRAINING_SLOTS) take_flag(flags, path, s.flag, slot_value(model.header, s.slot, *flags->find(s.flag)), false);
    take_flag(flags, path, "seed", std::to_string(model.header.wide(SLOT_SEED)), true);
    char data_file[513] = {};
    memcpy(data_file, &model.header.slot[SLOT_PATH], 512);
    if (data_file[0]) take_flag(flags, path, "data_file", data_file, false);
}

// Images' size, channels and classes, where no flag or file says otherwise. where: "FILE: " if a model file does, or "".
static void take_data_shape(Config* c, Flags* flags, const Dataset& d, const std::string& where) {
    if (where.empty()) {
        if (!flags->given("image_size")) {
            c->image_size = d.H == d.W ? std::to_string(d.H) : text("%dx%d", d.H, d.W);
            if (!flags->given("attention_resolutions") && !parse_model(c).empty()) c->attention_resolutions = text("%d", d.H >> (c->mult.size() - 1));
        }
        if (!flags->given("in_channels")) c->in_channels = d.C;
        if (!flags->chosen("num_classes")) c->num_classes = d.classes;
    }
    const std::string error = check_model(c);
    if (!error.empty()) die("%s%s", where.c_str(), error.c_str());
    if (d.H != c->H || d.W != c->W)
        die("%s--data_file %s: its images are %dx%d and the model's %dx%d; prepare_data.py --image_size makes them fit", where.c_str(),
            c->data_file.c_str(), d.H, d.W, c->H, c->W);
    if (d.C != c->in_channels)
        die("%s--data_file %s: its images have %d channels and the model takes %d; prepare_data.py --channels makes them fit", where.c_str(),
            c->data_file.c_str(), d.C, c->in_channels);
    if (c->class_cond && d.classes > c->num_classes)
        die("%s--num_classes %d: %s has labels of %d classes", where.c_str(), c->num_classes, c->data_file.c_str(), d.classes);
    if (c->class_cond && !d.labels)
        die("%s--class_cond True: %s has no labels; make it from a folder with one sub-folder a class", where.c_str(), c->data_file.c_str());
}

// The checkpoint that --resume_checkpoint means.
static std::string resume_path(const Config& c) {
    if (c.resume_checkpoint != "latest") return c.resume_checkpoint;
    const std::vector<int64_t> steps = list_checkpoints(c.output_dir);
    if (steps.empty()) die("--resume_checkpoint latest: %s holds no checkpoint; leave the flag out to start a run there", c.output_dir.c_str());
    return run_path(c, "model_%07ld.bin", steps.back());
}

static void check_resume(const Config& c, const Flags& flags, const ModelFile& m, const Dataset& d) {
    if (!m.has(HAS_EMA | HAS_TRAINING))
        die("%s: holds weights only, no moments to resume from; --init starts a new run from it", m.file.path.c_str());
    const int64_t step = m.header.wide(SLOT_STEP);
    const int updates = m.header.slot[SLOT_UPDATES], bad = m.header.slot[SLOT_BAD], in_row = m.header.slot[SLOT_BAD + 1];
    Guard guard;
    memcpy(&guard, &m.header.slot[SLOT_GUARD], sizeof guard);
    if (step < 0 || step > 2000000000 || updates < 0 || bad < 0 || updates + (int64_t)bad != step || in_row < 0 || in_row > bad ||
        !(guard.n == updates) || !std::isfinite(guard.mean_loss + guard.mean_norm) || !(guard.var_loss >= 0 && guard.var_norm >= 0) ||
        std::isinf(guard.var_loss + guard.var_norm) || step > m.header.slot[70])
        die("%s: its header is damaged (step %ld, %d updates, %d skipped, %d in a row): use an earlier checkpoint", m.file.path.c_str(), (long)step,
            updates, bad, in_row);
    const bool same = m.header.wide(SLOT_IMAGES) == d.count && (uint32_t)m.header.slot[SLOT_DATA_CRC] == d.header_crc;
    if (!same && !const_cast<Flags&>(flags).given("data_file"))
        die("%s: is not the data that %s was trained on; name it with --data_file, or name this one to go on with it", c.data_file.c_str(),
            m.file.path.c_str());
}

#ifndef TRAIN_UNET_NO_MAIN
static int run_program(int argc, char** argv) {
    Config c;
    Flags flags = config_flags(&c);
    parse_command_line(&flags, argc, argv);
    if (!c.init.empty() && !c.resume_checkpoint.empty()) die("--init and --resume_checkpoint: a run starts from one of them; leave the other out");
    const std::string resume = c.resume_checkpoint.empty() ? "" : resume_path(c);
    ModelFile model;
    if (!resume.empty() || !c.init.empty()) model = open_model(resume.empty() ? c.init : resume);
    if (c.preset.empty()) {
        c.preset = "fashion32";
        if (flags.given("data_file") && open_dataset(c.data_file).H == 64) c.preset = "unet64";
    }
    apply_preset(&flags, c.preset);
    if (model.file.data) take_model_file(&flags, model, !resume.empty());
    const std::string where = model.file.data ? model.file.path + ": " : "";
    start_device(c.precision);
    if (c.sample) {
        if (!model.file.data) die("--sample %d: needs --init FILE, a model to sample from", c.sample);
        const std::string error = check_model(&c);
        if (!error.empty()) die("%s: %s", model.file.path.c_str(), error.c_str());
        sample_and_stop(c, model);
        return 0;
    }
    check_run(c, where);
    if (c.bench) {
        const std::string error = check_model(&c);
        if (!error.empty()) die("%s", error.c_str());
        bench(c);
        return 0;
    }
    const Dataset data = open_dataset(c.data_file);
    take_data_shape(&c, &flags, data, where);
    if (!resume.empty()) check_resume(c, flags, model, data);
    train(c, flags, data, resume, model);
    return 0;
}

int main(int argc, char** argv) {
    try {
        return run_program(argc, argv);
    } catch (const std::bad_alloc&) {
        die("there is not enough memory; fewer images at a time (--batch_size, --microbatch, --sample) need less");
    } catch (const std::length_error&) {
        die("there is not enough memory; fewer images at a time (--batch_size, --microbatch, --sample) need less");
    }
}
#endif
