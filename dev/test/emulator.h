// What fake_cudart.cpp asks of emulator.cpp, where it is linked.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

// Bytes of a kernel's parameters, and where each of them begins (-1 behind the last one). ptx: the module's text, ending in 0.
struct EmulatedParameter {
    size_t at, bytes;
};
int emulated_parameters(const char* ptx, const char* kernel, EmulatedParameter* parameters, int most);
// Runs all blocks of a launch. parameters: as laid out by emulated_parameters.
void emulate(const char* ptx, const char* kernel, dim3 grid, dim3 block, size_t shared, long cluster, char* parameters);
CUresult emulated_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* memory,
                             const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                             const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
