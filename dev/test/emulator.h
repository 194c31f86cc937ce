// What fake_cudart.cpp asks of emulator.cpp, where it is linked.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <functional>
#include <memory>

// Bytes of a kernel's parameters, and where each of them begins (-1 behind the last one). ptx: the module's text, ending in 0.
struct EmulatedParameter {
    size_t at, bytes;
};
int emulated_parameters(const char* ptx, const char* kernel, EmulatedParameter* parameters, int most);
// A launch that was asked for. parameters: as laid out by emulated_parameters.
struct EmulatedLaunch;
std::shared_ptr<EmulatedLaunch> emulated_launch(const char* ptx, const char* kernel, dim3 grid, dim3 block,
                                                size_t shared, long cluster, std::shared_ptr<char> parameters);
// Runs all blocks of a launch, or what is left of them.
void emulate(EmulatedLaunch* launch);
// Before that: all blocks until they wait for the kernel before it (griddepcontrol.wait), as far as that one lets others in before it ends.
void emulate_beginning(EmulatedLaunch* launch, const EmulatedLaunch& before);
CUresult emulated_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* memory,
                             const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                             const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// What fake_cudart.cpp has for fake_nccl.cpp.
bool fake_failure(const char* call);                             // counts a call; whether it shall fail
void fake_work(cudaStream_t stream, std::function<void()> work); // the next thing that a stream does
