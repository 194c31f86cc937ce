// cublas.h - NVIDIA's own matrix products, for a column in the tables of linear.cu and conv1x1.cu. The trainer is not linked with them.
//
// It is the best of what cuBLASLt offers for a shape, each of its first eight proposals timed. What is not a product has no part in its time: sums for a
// group norm and for a bias's gradient, residuals; biases are added in its epilogue.
#pragma once
#include "harness.h"

#ifdef CUBLASLT
#include <cublasLt.h>

// Where compute-sanitizer looks, it is to look at our kernels alone.
static bool cublas_is_checked() { return !getenv("NO_CUBLAS"); }

static void cublas_check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) die("cuBLASLt: %s fails (%s)", what, cublasLtGetStatusString(status));
}

// A matrix of rows that lie `stride` elements apart; transposed: its columns do.
struct CublasMatrix {
    Element element;
    int stride;
    bool transposed = false;

    cudaDataType_t type() const { return element == Element::BF16 ? CUDA_R_16BF : CUDA_R_32F; }
};

// out (M, N) = a (M, K) b (K, N) + bias (N) [+ out]. cuBLAS counts by columns: to it this is out^T = b^T a^T.
struct CublasProduct {
    static constexpr size_t WORKSPACE = 64 << 20;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t first, second, result;
    cublasLtMatmulHeuristicResult_t ways[8];
    int count = 0, chosen = 0; // ways
    const float beta;

    CublasProduct(int M, int N, int K, CublasMatrix a, CublasMatrix b, CublasMatrix out, bool bias, bool adds = false)
        : beta(adds) {
        auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
            cublas_check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value),
                         "setting an attribute");
        };
        auto layout = [](cublasLtMatrixLayout_t* l, CublasMatrix m, int rows,
                         int columns) { // of a matrix as it is stored, by columns
            if (m.transposed) std::swap(rows, columns);
            cublas_check(cublasLtMatrixLayoutCreate(l, m.type(), columns, rows, m.stride), "describing a matrix");
        };
        cublas_check(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
        set(CUBLASLT_MATMUL_DESC_TRANSA, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        layout(&first, b, K, N);
        layout(&second, a, M, K);
        layout(&result, out, M, N);
        cublasLtMatmulPreference_t preference;
        cublas_check(cublasLtMatmulPreferenceCreate(&preference), "asking");
        const size_t most = WORKSPACE;
        const uint32_t alignment = 64; // of the second half of a weight's columns
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
        for (auto pointer : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            cublasLtMatmulPreferenceSetAttribute(preference, pointer, &alignment, sizeof alignment);
        cublasLtMatmulAlgoGetHeuristic(handle(), product, first, second, result, result, preference, 8, ways, &count);
        if (count == 0) die("cuBLASLt knows no way to multiply %dx%d and %dx%d", M, K, K, N);
        cublasLtMatmulPreferenceDestroy(preference);
    }
    CublasProduct(const CublasProduct&) = delete;
    ~CublasProduct() {
        cublasLtMatmulDescDestroy(product);
        for (auto l : {first, second, result}) cublasLtMatrixLayoutDestroy(l);
    }

    void operator()(void* out, const void* a, const void* b, const void* bias = nullptr) const {
        if (bias) cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        const float one = 1;
        cublas_check(cublasLtMatmul(handle(), product, &one, b, first, a, second, &beta, out, result, out, result,
                                    &ways[chosen].algo, workspace(), WORKSPACE, device.queue),
                     "a product");
    }
    // Chooses the fastest way; what is in out is lost.
    void tune(void* out, const void* a, const void* b, const void* bias = nullptr) {
        double least = INFINITY;
        int best = 0;
        for (chosen = 0; chosen < count; chosen++) {
            const double us = median_microseconds(1, [&](int) { (*this)(out, a, b, bias); });
            if (us < least) least = us, best = chosen;
        }
        chosen = best;
    }

    static cublasLtHandle_t handle() {
        static cublasLtHandle_t h = [] {
            cublasLtHandle_t made;
            cublas_check(cublasLtCreate(&made), "starting");
            return made;
        }();
        return h;
    }
    static void* workspace() {
        static void* const memory = device_alloc<char>(WORKSPACE);
        return memory;
    }
};
#endif
