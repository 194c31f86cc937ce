// device.h - which GPU a process uses, and for which architecture its code was compiled.
#pragma once
#include "shared.h"

#ifdef __CUDACC__ // the GPU

// code_version asks for which architecture this kernel, like all of this binary, was compiled.
static __global__ void nothing_kernel() { await_previous_kernel(); }

static cudaDeviceProp properties; // the properties of this process's GPU, as CUDA reports them
static int count_gpus() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

static int choose_device(int number) {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    CUDA_CHECK(cudaDriverGetVersion(&driver)); // sets driver to 0 if no driver is installed
    if (error == cudaErrorInsufficientDriver && driver)
        die("this GPU's driver is too old for the program: it knows CUDA %d.%d, and the program was built with %d.%d; "
            "update the driver, or build with a CUDA toolkit that is no newer than it (make -B train_unet "
            "NVCC=/path/to/nvcc); make train_unet_cpu needs neither",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (error != cudaSuccess || !count)
        die("this is the GPU build and there is no GPU that it can use (%s); make train_unet_cpu needs none",
            cudaGetErrorString(error));
    if (world.size > 1 && count == 1) number = 0; // some launchers show each process only its own GPU
    else if (world.size > 1) number += world.local_rank;
    if (world.size > 1 && number >= count)
        die("process %d of this machine finds %d GPUs; start one for each", world.local_rank + 1, count);
    if (number >= count)
        die("--device %d: the program can use %d GPUs, from 0 on (CUDA_VISIBLE_DEVICES, if set, says which)", number,
            count);
    return number;
}

// of the code that the GPU runs, such as 80; it stays 80 where a driver translates the code for a newer GPU
static int code_version(int number) {
    cudaFuncAttributes code;
    const cudaError_t found = cudaFuncGetAttributes(&code, nothing_kernel);
    if (found != cudaSuccess && properties.major < 8)
        die("GPU %d has compute capability %d.%d, and the GPU build needs 8.0 or later (A100, RTX 30); make "
            "train_unet_cpu builds the program for the processor",
            number, properties.major, properties.minor);
    if (found != cudaSuccess)
        die("this binary holds no code for GPU %d, of compute capability %d.%d (%s); make -B train_unet builds it for "
            "the GPUs of this machine",
            number, properties.major, properties.minor, cudaGetErrorString(found));
    return code.ptxVersion;
}
#endif
