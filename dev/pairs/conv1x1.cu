// conv1x1.cu - 1x1 convolution: a matrix product over pixels. Skip connections (over two tensors), attention's qkv and its projection with residual.
//
//   x1 (B, H, W, C1), x2 (B, H, W, C2), weight (Cout, 1, 1, C1 + C2), bias (Cout), residual, out (B, H, W, Cout)
//   FLOPs    2 B H W Cin Cout forward, and as many for each of the two gradients
//   bytes    4 (B H W (Cin + Cout) + Cin Cout); 192 -> 64 at 64x64, batch 32: 134 MB for 3.2 GFLOP.
//            A GPU with 4 TB/s and 800 TFLOP/s waits for memory here.
//
//   version 0   a dot product per output, forward and backward
//   version 1   CPU: output channels innermost, so that it vectorises; GPU: tiles of 64 pixels x 64 channels through shared memory
//               (H200, 192 -> 192 at 16x16, batch 32: version 0 1.3 ms, version 1 0.08 ms)
//   shipped     conv_forward with kernel = 1: the tiles of the 3x3 convolution with a single tap
//   cublas      (GPU) cuBLASLt's products, one for each of the two tensors, in a column of their own: see cublas.h
//
//   make -C dev conv1x1 && dev/conv1x1       python dev/pairs/conv1x1.py [--bench]
#include "conv.h"

int main(int argc, char** argv) {
    return pair_main(argc, argv, conv_check, [] { conv_bench(1); });
}
