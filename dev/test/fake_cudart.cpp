// A stand-in for CUDA's runtime library: the host code of the GPU build runs against a GPU that is described, not there. Kernels are not run. Every launch is
// checked against what the GPU has, and each kind of mistake is told in one line on stderr, with what was asked for and what is there. The Makefile links this
// file to the GPU build in the library's place (train_unet_launches), and test_launches.py describes GPUs.
//
// The description is the text file that FAKE_GPU names. Lines of a word and a number describe the GPU (struct Gpu); a line
//     kernel NAME REGISTERS BYTES
// tells, for each kernel in the code that this GPU runs, the registers of a thread and the static shared memory (what ptxas -v says). Limits that all GPUs share
// are constants below: CUDA C++ Programming Guide, "Compute Capabilities".
//
// With FAKE_FORGET=3 the third cudaStreamWaitEvent is not heard: what a program that forgot it would do.
//
// Calls fail as those of the system do in failing_calls.cpp, whose variables these are: with FAIL_CALL=cudaMalloc FAIL_AT=3 the third cudaMalloc fails. With
// FAIL_FOR above 1 so do all calls behind it, whatever their names, as after a kernel that crashed. FAIL_REPORT names a file for what failed, and the count.
//
// What was chosen can be read in the file that FAKE_LAUNCHES names, if any: a line for each launch, tensor map and allocation.
//
// Linked with emulator.cpp, to a binary that holds its code as PTX, it runs the kernels as well, but for those whose names begin with one
// of the words in FAKE_IDLE: a run whose network does nothing takes a tenth of the time.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

namespace {

struct Gpu {
    std::map<std::string, long> numbers{
        {"capability", 80},         // 10 major + minor
        {"code", 80},               // architecture that its code was compiled for; 0: the binary holds none for it
        {"count", 1},               // GPUs of this kind
        {"error", 0},               // what cudaGetDeviceCount returns
        {"driver", CUDART_VERSION}, // the CUDA version that its driver knows; 0: there is no driver
        {"multiprocessors", 108},   //
        {"shared", 167936},         // bytes of shared memory in a multiprocessor
        {"block_shared", 166912},   // the most that a block can have of it
        {"threads", 2048},          // in a multiprocessor
        {"blocks", 32},             // in a multiprocessor
        {"cluster_processors", 16}, // multiprocessors among which a cluster's blocks can lie
    };
    std::map<std::string, std::pair<int, int>> kernels;

    Gpu() {
        const char* path = getenv("FAKE_GPU");
        std::ifstream file(path ? path : "");
        if (!file) fprintf(stderr, "fake GPU: FAKE_GPU must name a description\n"), exit(9);
        std::string word, name;
        while (file >> word)
            if (word == "kernel") file >> name, file >> kernels[name].first >> kernels[name].second;
            else if (numbers.count(word)) file >> numbers[word];
            else fprintf(stderr, "fake GPU: %s: what is %s?\n", path, word.c_str()), exit(9);
    }
    long operator[](const char* name) const { return numbers.at(name); }
};
const Gpu& gpu() { // at its first use: kernels are registered before static objects are made
    static const Gpu g;
    return g;
}

constexpr long MAX_THREADS = 1024, REGISTERS = 65536, SHARED_UNASKED = 48 * 1024, SHARED_RESERVED = 1024,
               MAX_CLUSTER = 8;

#pragma weak emulate
#pragma weak emulate_beginning
#pragma weak emulated_launch
#pragma weak emulated_parameters
#pragma weak emulated_tensor_map

struct Kernel {
    std::string name, mangled;
    const char* ptx;       // of its module, where kernels are emulated
    int registers, shared; // of a thread; static, of a block
    long dynamic_shared;   // what a launch may ask for
    bool known;            // in the code for this GPU
};
std::map<const void*, Kernel>& kernels() {
    static std::map<const void*, Kernel> k;
    return k;
}

long launches = 0, waits = 0; // waits: of a stream for an event
std::set<const Kernel*> launched;
std::set<std::string> told;
int current = 0; // cudaSetDevice

long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

// A line of the file of choices.
__attribute__((format(printf, 1, 2))) void record(const char* format, ...) {
    static FILE* const file = getenv("FAKE_LAUNCHES") ? fopen(getenv("FAKE_LAUNCHES"), "w") : nullptr;
    if (!file) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
}

// One line for each kernel and kind of mistake: the first one.
__attribute__((format(printf, 3, 4))) void complain(const Kernel& k, const std::string& what, const char* format, ...) {
    if (!told.insert(k.name + what).second) return;
    char text[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "fake GPU: %s: %s: %s\n", k.name.c_str(), what.c_str(), text);
}

// Blocks of a launch that a multiprocessor holds at once.
long blocks_at_once(const Kernel& k, long threads, long shared) {
    const long warps = round_up(threads, 32) / 32, registers = round_up(warps, 4) * round_up(32 * k.registers, 256);
    long blocks = std::min({gpu()["blocks"], gpu()["threads"] / (warps * 32),
                            gpu()["shared"] / (round_up(shared, 128) + SHARED_RESERVED)});
    return registers ? std::min(blocks, REGISTERS / registers) : blocks;
}

// Clusters of so many blocks that the GPU holds at once.
long clusters_at_once(const Kernel& k, long cluster, long threads, long shared) {
    const long group = gpu()["cluster_processors"];
    return gpu()["multiprocessors"] / group * (group * blocks_at_once(k, threads, shared) / cluster);
}

// What streams are told to do happens at once or, with FAKE_LATE, as late as CUDA allows: when somebody waits for it. FAKE_LATE=others: other streams' work comes after
// all of the main one's that does not wait for it; FAKE_LATE=main: the other way round. And a kernel that may overlap the one before it begins even before that one.
// Who does not wait for what he needs computes other bits then.
const char* late() {
    static const char* const which = getenv("FAKE_LATE");
    return which;
}
struct Moment { // in a stream
    cudaStream_t stream;
    long number; // of what was asked for until then
};
struct Work { // one of these
    cudaStream_t stream = nullptr;
    std::function<void()> run = nullptr;
    std::function<std::shared_ptr<EmulatedLaunch>()> kernel = nullptr;
    cudaEvent_t record = nullptr, wait = nullptr;

    bool early = false;                              // of a kernel: it may overlap the one before it
    std::shared_ptr<EmulatedLaunch> begun = nullptr; // and has done so
    Moment until{};                                  // of a wait
};
class Streams {
    struct Queue {
        std::deque<Work> work;
        long done = 0;
        long asked() const { return done + (long)work.size(); }
    };
    std::map<cudaStream_t, Queue> queues;
    std::map<cudaEvent_t, Moment> events;

    void do_next(Queue& q) {
        const Work w = std::move(q.work.front());
        q.work.pop_front();
        q.done++;
        if (w.wait) return finish(w.until);
        if (w.run) return w.run();
        const auto launch = w.begun ? w.begun : w.kernel();
        if (!q.work.empty() && q.work.front().early) {
            q.work.front().begun = q.work.front().kernel();
            emulate_beginning(q.work.front().begun.get(), *launch);
        }
        emulate(launch.get());
    }

  public:
    void add(Work w) {
        Queue& q = queues[w.stream];
        const auto event = events.find(w.wait);
        if (w.record) return (void)(events[w.record] = {w.stream, q.asked()});
        if (w.wait && event == events.end()) return; // nothing has been recorded
        if (w.wait) w.until = event->second;
        q.work.push_back(std::move(w));
        if (!late()) do_next(q);
    }
    void finish(const Moment& m) {
        for (Queue& q = queues[m.stream]; q.done < m.number;) do_next(q);
    }
    void finish(cudaStream_t s) {
        for (auto& [other, q] : queues)
            if (late() && !strcmp(late(), "main") && other != s) finish(Moment{other, q.asked()});
        finish(Moment{s, queues[s].asked()});
    }
    void finish(cudaEvent_t e) {
        if (events.count(e)) finish(events[e]);
    }
    bool finish() { // all; false: there was nothing
        bool any = false;
        for (auto& [stream, q] : queues) any |= !q.work.empty(), finish(stream);
        return any;
    }
} device;

std::map<cudaEvent_t, Moment> recorded;                      // of all records
std::map<std::pair<cudaStream_t, cudaStream_t>, long> heard; // the latest of a stream that another one has waited for

struct Captured { // a graph
    cudaStream_t stream;
    std::vector<Work> work;
};
std::shared_ptr<Captured> capture; // under way

void act(Work w) { capture ? capture->work.push_back(std::move(w)) : device.add(std::move(w)); }

void launch_graph(const Captured& graph) {
    Streams streams;
    for (const Work& w : graph.work) streams.add(w);
    streams.finish(graph.stream);
    if (streams.finish()) fprintf(stderr, "fake GPU: graph: nobody waits for some of its work\n");
}

void run_kernel(const Kernel& k, dim3 grid, dim3 block, size_t dynamic, long cluster, void** arguments,
                cudaStream_t stream, bool early) {
    EmulatedParameter parameters[64];
    const int n = emulated_parameters(k.ptx, k.mangled.c_str(), parameters, 64);
    const size_t bytes = n ? parameters[n - 1].at + parameters[n - 1].bytes : 0;
    const std::shared_ptr<char> copy((char*)aligned_alloc(64, bytes / 64 * 64 + 64), free); // tensor maps ask for 64
    for (int p = 0; p < n; p++) memcpy(copy.get() + parameters[p].at, arguments[p], parameters[p].bytes);
    const auto kernel = [=, &k] {
        return emulated_launch(k.ptx, k.mangled.c_str(), grid, block, dynamic, cluster, copy);
    };
    act({.stream = stream, .kernel = kernel, .early = early});
}

bool is_idle(const Kernel& k) {
    static const char* const given = getenv("FAKE_IDLE");
    std::istringstream words(given ? given : "");
    for (std::string word; words >> word;)
        if (k.name.compare(0, word.size(), word) == 0) return true;
    return false;
}

cudaError_t check_launch(const void* function, dim3 grid, dim3 block, size_t dynamic, long cluster, void** arguments,
                         cudaStream_t stream, bool early = false) {
    const Kernel& k = kernels()[function];
    const bool naive = k.name.find("_v0") != std::string::npos || k.name.find("_v1") != std::string::npos;
    if (emulate && !is_idle(k) && !(naive && grid.x > 32))
        run_kernel(k, grid, block, dynamic, cluster, arguments, stream, early);
    const long threads = (long)block.x * block.y * block.z, shared = k.shared + (long)dynamic,
               largest = gpu()["block_shared"];
    const long registers = round_up(round_up(threads, 32) / 32, 4) * round_up(32 * k.registers, 256);
    launches++;
    launched.insert(&k);
    record("%s grid %u %u %u block %u %u %u shared %zu cluster %ld\n", k.name.c_str(), grid.x, grid.y, grid.z, block.x,
           block.y, block.z, dynamic, cluster);
    if (!k.known) complain(k, "code", "this GPU's code has no such kernel");
    if (threads < 1 || threads > MAX_THREADS || block.z > 64)
        complain(k, "threads", "a block of %u x %u x %u, at most %ld", block.x, block.y, block.z, MAX_THREADS);
    if (registers > REGISTERS)
        complain(k, "registers", "%ld for a block of %ld threads, there are %ld", registers, threads, REGISTERS);
    if (shared > largest)
        complain(k, "shared memory", "%ld bytes for a block (%d of them static), there are %ld", shared, k.shared,
                 largest);
    else if ((long)dynamic > k.dynamic_shared)
        complain(k, "attribute", "%zu bytes of dynamic shared memory, allowed by cudaFuncSetAttribute are %ld", dynamic,
                 k.dynamic_shared);
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        complain(k, "grid", "%u x %u x %u blocks, at least 1 and at most 2^31 - 1 x 65535 x 65535", grid.x, grid.y,
                 grid.z);
    if (cluster == 1) return cudaSuccess;
    if (gpu()["capability"] < 90) complain(k, "cluster", "%ld blocks, capability 9.0 and later have clusters", cluster);
    if (cluster < 1 || cluster > MAX_CLUSTER) complain(k, "cluster", "%ld blocks, at most %ld", cluster, MAX_CLUSTER);
    else if (grid.x % cluster) complain(k, "cluster", "%ld blocks do not divide a grid of %u", cluster, grid.x);
    else if (clusters_at_once(k, cluster, threads, shared) < 1)
        complain(k, "cluster", "%ld blocks of %ld bytes fit nowhere", cluster, shared);
    return cudaSuccess;
}

bool is_early(const cudaLaunchConfig_t* config) {
    bool early = false;
    for (unsigned i = 0; i < config->numAttrs; i++)
        early |= config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization;
    return early;
}

// A kernel that loads weights before it waits for the kernel before it may not overlap one that writes weights.
void check_overlap(const cudaLaunchConfig_t* config, const void* function) {
    static std::map<cudaStream_t, std::string> before;
    const std::string &name = kernels()[function].name, previous = std::exchange(before[config->stream], name);
    bool early = false, writer = false;
    for (const char* reader : {"conv_tiles_kernel", "conv_small_kernel", "linear_forward_kernel"})
        early |= name.find(reader) == 0;
    for (const char* one : {"conv_few_rows", "adamw_kernel", "cast_params"}) writer |= previous.find(one) == 0;
    if (is_early(config) && early && writer)
        complain(kernels()[function], "overlap", "loads weights while %s may still write them", previous.c_str());
}

long cluster_size(const cudaLaunchConfig_t* config) {
    long size = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (const auto& a = config->attrs[i]; a.id == cudaLaunchAttributeClusterDimension)
            size = (long)a.val.clusterDim.x * a.val.clusterDim.y * a.val.clusterDim.z;
    return size;
}

// What FAIL_CALL, FAIL_AT, FAIL_FOR and FAIL_REPORT say.
class Failures {
    std::mutex mutex; // calls may come from several threads
    long count = 0;   // of the wanted calls
    bool failed = false, for_ever = false;
    FILE* report = nullptr;

    static long number(const char* name) { return getenv(name) ? atol(getenv(name)) : 0; }

  public:
    Failures() {
        if (const char* path = getenv("FAIL_REPORT")) report = fopen(path, "w");
        for_ever = number("FAIL_FOR") > 1;
    }
    ~Failures() {
        if (report) fprintf(report, "count %ld\n", count);
    }
    // Counts a call. Whether it fails.
    bool take(const char* name) {
        static const char* const wanted = getenv("FAIL_CALL");
        static const long first = number("FAIL_AT");
        if (!wanted) return false;
        const std::lock_guard lock(mutex);
        const bool now = !strcmp(name, wanted) && ++count == first;
        if (!now && !(failed && for_ever)) return false;
        if (now && report) fprintf(report, "failed %ld %s\n", count, name);
        if (report) fflush(report);
        failed = true;
        return true;
    }
};

struct Summary {
    ~Summary() { fprintf(stderr, "fake GPU %d: %ld launches of %zu kernels\n", current, launches, launched.size()); }
} summary;

// Memory that is there when it is touched. Much is never touched: kernels don't run, so that large copies need not be made either.
// Behind an array lie bytes of NaN, which show where they are read, and then a page that nobody may touch.
struct Allocation {
    char* pages;
    size_t page_bytes, bytes;
};
std::map<void*, Allocation> allocations; // by where the arrays begin
constexpr size_t PAGE = 4096;
constexpr unsigned char BEHIND = 0xFF;

size_t behind(size_t bytes) { return round_up(bytes, 256) - bytes; } // an array begins at a multiple of 256 bytes

void check_behind(void* p) {
    const size_t bytes = allocations.at(p).bytes;
    const auto* const end = (unsigned char*)p + bytes;
    if (std::all_of(end, end + behind(bytes), [](unsigned char c) { return c == BEHIND; })) return;
    fprintf(stderr, "fake GPU: an array of %zu bytes: something was written behind it\n", bytes);
    _exit(9);
}
void check_all_behind() {
    for (const auto& entry : allocations) check_behind(entry.first);
}
cudaError_t give_memory(void** p, size_t bytes) {
    [[maybe_unused]] static const int at_the_end = atexit(check_all_behind);
    const size_t whole = bytes + behind(bytes), pages = round_up(whole, PAGE) + PAGE;
    char* const m =
        (char*)mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED || mprotect(m + pages - PAGE, PAGE, PROT_NONE)) return cudaErrorMemoryAllocation;
    *p = m + pages - PAGE - whole;
    memset((char*)*p + bytes, BEHIND, behind(bytes));
    allocations[*p] = {m, pages, bytes};
    return cudaSuccess;
}
cudaError_t take_memory(void* p) {
    if (!p) return cudaSuccess;
    check_behind(p);
    munmap(allocations.at(p).pages, allocations.at(p).page_bytes);
    allocations.erase(p);
    return cudaSuccess;
}
constexpr size_t LARGE = 1 << 20;
bool wanted(size_t bytes) { return emulate || bytes < LARGE; }

// Streams and events are names only.
template <class T> cudaError_t give_name(T* handle) {
    *handle = (T) new char;
    return cudaSuccess;
}

struct LaunchConfig { // of kernel<<<...>>>, between the two calls that nvcc makes of it
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed;

// cuTensorMapEncodeTiled
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* memory, const cuuint64_t* size,
                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step, CUtensorMapInterleave inter,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (fake_failure("cuTensorMapEncodeTiled")) return CUDA_ERROR_UNKNOWN;
    record("tensor map");
    for (cuuint32_t i = 0; i < rank; i++) record(" %u of %lu", box[i], (unsigned long)size[i]);
    record("\n");
    return emulate
               ? emulated_tensor_map(map, type, rank, memory, size, stride, box, step, inter, swizzle, promotion, fill)
               : CUDA_SUCCESS;
}

// The text of the module in a binary that was made with --no-compress, for this GPU's code.
const char* find_ptx(const void* wrapper) {
    struct Header {
        uint32_t magic;
        uint16_t version, header_bytes;
        uint64_t bytes;
    };
    const Header* const h = ((const Header* const*)wrapper)[1];
    const std::string target = ".target sm_" + std::to_string(gpu()["code"]);
    const char *const begin = (const char*)h, *const end = begin + h->header_bytes + h->bytes;
    for (const char* at = begin; (at = (const char*)memmem(at, (size_t)(end - at), ".version ", 9)); at++)
        if (const char* t = strstr(at, ".target"); t && !strncmp(t, target.c_str(), target.size())) return at;
    fprintf(stderr, "fake GPU: no PTX with %s in this binary\n", target.c_str()), exit(9);
}

// The call that stands at the head of every function of CUDA's that may fail.
#define MAY_FAIL(ERROR) \
    if (fake_failure(__func__)) return ERROR

} // namespace

bool fake_failure(const char* name) {
    static Failures failures;
    return failures.take(name);
}
void fake_work(cudaStream_t stream, std::function<void()> work) { act({.stream = stream, .run = std::move(work)}); }

extern "C" {

// ----- what nvcc's code calls
void** __cudaRegisterFatBinary(void* wrapper) {
    static void* handle;
    handle = emulate ? (void*)find_ptx(wrapper) : nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void** module, const char* function, char*, const char* mangled, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
    int status = 0;
    char* const plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string name = status ? mangled : plain;
    free(plain);
    if (name.compare(0, 5, "void ") == 0)
        name = name.substr(5); // of templates: the type of the result, and at the end the parameters'
    if (name.compare(0, 12, "each_kernel<") == 0)
        name = name.substr(name.find("::") + 2); // a lambda, named after the function that it stands in
    int depth = 0;
    size_t end = 0;
    for (; end < name.size() && (depth || name[end] != '('); end++) depth += (name[end] == '<') - (name[end] == '>');
    const auto code = gpu().kernels.find(mangled);
    const bool known = code != gpu().kernels.end();
    const int shared = known ? code->second.second : 0, registers = known ? code->second.first : 0;
    kernels()[function] = Kernel{name.substr(0, end),     mangled,         (const char*)*module, registers, shared,
                                 SHARED_UNASKED - shared, known || emulate};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t*)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    MAY_FAIL(cudaErrorUnknown);
    return check_launch((const void*)kernel, grid, block, shared, 1, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) { // before CUDA 13
    MAY_FAIL(cudaErrorUnknown);
    return check_launch(function, grid, block, shared, 1, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void** arguments) {
    MAY_FAIL(cudaErrorUnknown);
    check_overlap(c, function);
    return check_launch(function, c->gridDim, c->blockDim, c->dynamicSmemBytes, cluster_size(c), arguments, c->stream,
                        is_early(c));
}

// ----- kernels
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* function) {
    MAY_FAIL(cudaErrorUnknown);
    if (!gpu()["code"]) return cudaErrorNoKernelImageForDevice;
    const Kernel& k = kernels()[function];
    *a = {};
    a->numRegs = k.registers, a->sharedSizeBytes = (size_t)k.shared, a->maxThreadsPerBlock = MAX_THREADS;
    a->ptxVersion = a->binaryVersion = (int)gpu()["code"];
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    MAY_FAIL(cudaErrorUnknown);
    Kernel& k = kernels()[function];
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    k.dynamic_shared = value;
    const long largest = gpu()["block_shared"];
    if (k.shared + value > largest)
        complain(k, "shared memory", "%d bytes for a block (%d of them static), there are %ld", k.shared + value,
                 k.shared, largest);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* n, const void* function, const cudaLaunchConfig_t* c) {
    MAY_FAIL(cudaErrorUnknown);
    const Kernel& k = kernels()[function];
    *n = (int)clusters_at_once(k, cluster_size(c), (long)c->blockDim.x * c->blockDim.y * c->blockDim.z,
                               k.shared + (long)c->dynamicSmemBytes);
    return cudaSuccess;
}

// ----- the GPU
cudaError_t cudaGetDeviceCount(int* n) {
    MAY_FAIL(cudaErrorUnknown);
    *n = gpu()["error"] ? 0 : (int)gpu()["count"];
    return (cudaError_t)gpu()["error"];
}
cudaError_t cudaDriverGetVersion(int* version) {
    MAY_FAIL(cudaErrorUnknown);
    *version = (int)gpu()["driver"];
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
    MAY_FAIL(cudaErrorUnknown);
    current = number;
    return number < gpu()["count"] ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDevice(int* number) {
    MAY_FAIL(cudaErrorUnknown);
    *number = current;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    MAY_FAIL(cudaErrorUnknown);
    *value = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    MAY_FAIL(cudaErrorUnknown);
    *properties = cudaDeviceProp{};
    strcpy(properties->name, "a described GPU");
    properties->major = (int)gpu()["capability"] / 10, properties->minor = (int)gpu()["capability"] % 10;
    properties->multiProcessorCount = (int)gpu()["multiprocessors"];
    properties->sharedMemPerMultiprocessor = (size_t)gpu()["shared"];
    properties->sharedMemPerBlockOptin = (size_t)gpu()["block_shared"];
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
    MAY_FAIL(cudaErrorUnknown);
    *f = (void*)encode;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
    MAY_FAIL(cudaErrorUnknown);
    *low = 0, *high = -5;
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorNoKernelImageForDevice ? "no kernel image is available for execution on the device"
                                                    : "an error that the test asked for";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

// ----- memory
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    MAY_FAIL(cudaErrorUnknown);
    *available = *total = (size_t)1 << 40;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** p, size_t bytes) {
    MAY_FAIL(cudaErrorMemoryAllocation);
    record("cudaMalloc %zu\n", bytes);
    return give_memory(p, bytes);
}
cudaError_t cudaFree(void* p) {
    MAY_FAIL(cudaErrorUnknown);
    device.finish();
    return take_memory(p);
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    MAY_FAIL(cudaErrorMemoryAllocation);
    return give_memory(p, bytes);
}
cudaError_t cudaFreeHost(void* p) {
    MAY_FAIL(cudaErrorUnknown);
    return take_memory(p);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    MAY_FAIL(cudaErrorUnknown);
    if (wanted(bytes)) act({.stream = stream, .run = [=] { memcpy(to, from, bytes); }});
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    MAY_FAIL(cudaErrorUnknown);
    if (wanted(bytes)) act({.stream = stream, .run = [=] { memset(p, value, bytes); }});
    return cudaSuccess;
}

// ----- streams, events, graphs
#define SUCCEEDS(function, ...)         \
    cudaError_t function(__VA_ARGS__) { \
        MAY_FAIL(cudaErrorUnknown);     \
        return cudaSuccess;             \
    }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    MAY_FAIL(cudaErrorUnknown);
    return give_name(s);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
    MAY_FAIL(cudaErrorUnknown);
    return give_name(s);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    MAY_FAIL(cudaErrorUnknown);
    device.finish(s);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    MAY_FAIL(cudaErrorUnknown);
    static const char* const forget = getenv("FAKE_FORGET");
    if (++waits != (forget ? atol(forget) : 0)) act({.stream = s, .wait = e});
    const Moment& m = recorded[e];
    const bool again = m.number <= heard[{s, m.stream}] || m.stream == s;
    heard[{s, m.stream}] = std::max(heard[{s, m.stream}], m.number);
    if (emulate) record("wait %ld%s\n", waits, again ? " again" : "");
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    MAY_FAIL(cudaErrorUnknown);
    capture = std::make_shared<Captured>(Captured{s, {}});
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* g) {
    MAY_FAIL(cudaErrorUnknown);
    *g = (cudaGraph_t) new std::shared_ptr<Captured>(std::exchange(capture, nullptr));
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    MAY_FAIL(cudaErrorUnknown);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
    MAY_FAIL(cudaErrorUnknown);
    return give_name(e);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    MAY_FAIL(cudaErrorUnknown);
    return give_name(e);
}
SUCCEEDS(cudaEventDestroy, cudaEvent_t)
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    MAY_FAIL(cudaErrorUnknown);
    act({.stream = s, .record = e});
    static long number = 0;
    recorded[e] = {s, ++number};
    return cudaSuccess;
}
SUCCEEDS(cudaEventRecordWithFlags, cudaEvent_t, cudaStream_t, unsigned) // dev/bench's clock
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    MAY_FAIL(cudaErrorUnknown);
    device.finish(e);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
    MAY_FAIL(cudaErrorUnknown);
    *ms = 1;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
    MAY_FAIL(cudaErrorUnknown);
    *e = (cudaGraphExec_t)g;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
    MAY_FAIL(cudaErrorUnknown);
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    MAY_FAIL(cudaErrorUnknown);
    act({.stream = s, .run = [graph = *(std::shared_ptr<Captured>*)e] { launch_graph(*graph); }});
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    MAY_FAIL(cudaErrorUnknown);
    delete (std::shared_ptr<Captured>*)e;
    return cudaSuccess;
}
SUCCEEDS(cudaGraphDestroy, cudaGraph_t)
// Ranks do not open memory for each other here: they have NCCL.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }

} // extern "C"
