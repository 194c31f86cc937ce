// cpu.h - the CPU as the device; its operations are in dev/reference.h.
#pragma once
#include "config.h"

#ifndef __CUDACC__

#include "../dev/reference.h"

// The rest of the interface. Many functions do nothing: the device's memory is the host's, a function returns only when
// its work is done, and operations allocate the memory that they need.
static bool conv_takes_skip(const ConvShape&, const ConvShape&) { return false; }
static size_t conv_workspace(ConvShape) { return 0; }
static size_t conv_detour_bytes(const ConvShape&) { return 0; }
static size_t groupnorm_backward_workspace(const NormShape&) { return 0; }
static size_t norm_sums_bytes(const NormShape&) { return 0; }
static size_t attention_backward_workspace(int, int, int, int) { return 0; }
static size_t linear_backward_workspace(int, int, int) { return 0; }
static size_t loss_workspace(int) { return 0; }
static void reserve(const Workspace&, bool) {}
static int max_stat_parts(int, int) { return 1; }

Stream* const MAIN_STREAM = nullptr; // a CPU has only this stream

// Aligned to whole cache lines and vectors.
static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, bytes))
        die("%.2f GiB of memory could not be had; a smaller --batch_size or a --microbatch needs less", bytes / 0x1p30);
    memset(p, 0, bytes);
    device_bytes += bytes;
    return p;
}

// Returns the number in a file of the system, behind a word if there is one; `otherwise` if there is no such number.
static double number_in(const std::string& path, const std::string& word, double otherwise) {
    std::ifstream file(path);
    double number = 0;
    std::string name;
    if (word.empty()) return file >> number ? number : otherwise;
    while (file >> name)
        if (name == word && file >> number) return number;
    return otherwise;
}

// Returns how many bytes this process may still take: what the system has free, or less if its control group, or one
// that this group lies in, has a limit. Pages of files count as free, since the system drops them when it needs room.
static size_t device_available() {
    double least = number_in("/proc/meminfo", "MemAvailable:", 0x1p50 / 1024) * 1024; // the file counts in KiB
    const auto obey = [&](const std::string& group, const char* limit, const char* used, const std::string& total) {
        const double files = number_in(group + "/memory.stat", total + "inactive_file", 0) +
                             number_in(group + "/memory.stat", total + "active_file", 0);
        const double most = number_in(group + "/" + limit, "", 0x1p60);
        least = std::min(least, most - number_in(group + "/" + used, "", 0) + files);
    };
    std::ifstream groups("/proc/self/cgroup"); // lines such as 0::/user.slice, or in version 1 4:memory:/user.slice
    for (std::string line; std::getline(groups, line);) {
        const std::string controller = line.substr(line.find(':') + 1);
        std::string group = controller.substr(controller.find(':') + 1);
        for (bool more = true; more; group = group.substr(0, group.rfind('/'))) {
            more = group.size() > 1;
            const std::string end = more ? group : "";
            if (controller.starts_with(":")) obey("/sys/fs/cgroup" + end, "memory.max", "memory.current", "");
            if (controller.starts_with("memory:"))
                obey("/sys/fs/cgroup/memory" + end, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_");
        }
    }
    return (size_t)std::max(least, 0.0);
}
[[maybe_unused]] static void device_free(void* p) { free(p); }
static void copy_to_device(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
static void copy_to_host(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }

template <class F> static void run_beside(int, F work) { work(MAIN_STREAM); }
static void wait_for_side(int) {}

static int count_gpus() {
    die("--num_gpus: this is the CPU build; for several processes, make train_unet_mpi; mpirun -n 2 ./train_unet_mpi");
}

static void start_device(const std::string& precision, int number) {
    if (number) die("--device %d: this is the CPU build; leave the flag out, or make train_unet_cuda", number);
    act_element = element_named(precision, Element::FP32);
    if (act_element != Element::FP32)
        die("--precision %s (--use_fp16 True): the CPU build computes in fp32; use --precision auto",
            name_of(act_element));
}

static std::string device_name() { return text("the CPU, %ld threads", sysconf(_SC_NPROCESSORS_ONLN)); }

template <class F> static void replay(Graph*, F work) { work(); }
static void free_graph(Graph*) {}

// The two buffers of an Upload, the host's and the device's, are the same memory.
static Upload make_upload(size_t bytes) {
    uint8_t* p = (uint8_t*)device_alloc_bytes(bytes);
    return Upload{p, p, bytes, nullptr, nullptr};
}
static void wait_for_host_side(Upload*) {}
static void send(Upload*) {}
static void release(Upload*) {}
#endif
