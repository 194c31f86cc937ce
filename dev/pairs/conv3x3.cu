// conv3x3.cu - 3x3 convolution, padding 1, stride 1 or 2, over one or two tensors, read upsampled or not, with what follows it in the
// network: bias, timestep embedding, residual, and the next group norm's sums.
//
//   x1 (B, H, W, C1), x2 (B, H, W, C2), weight (Cout, 3, 3, C1 + C2), bias (Cout), emb (B, stride), residual, out (B, Ho, Wo, Cout)
//   FLOPs    18 B Ho Wo Cin Cout forward, and as many for each of the two gradients: 80 to 90 % of a training step
//   bytes    4 (B H W Cin + B Ho Wo Cout + 9 Cin Cout); unet64 at batch 32, 64 -> 64 at 64x64: 67 MB for 9.7 GFLOP, so arithmetic is the limit.
//            Three input or output channels (first and last layer) turn that round.
//
// version 0      the definition, an output (or a gradient) at a time: seven loops, one product per load, a chain of dependent additions. On a GPU a
//                thread has an output: neighbours read the same inputs, but weights 9 Cin apart, and everything comes from the caches time and again.
//                H200, 64 -> 64 at 64x64, batch 32: 20 ms forward, 6 ms for the input's gradient (neighbours read weights side by side), 70 ms for the
//                weights' (36,864 threads, each with a sum over 131,072 pixels)
// version 1      CPU: output channels innermost, weights turned to (3, 3, Cin, Cout), so that the compiler vectorises it; no backward
//                GPU: tiles of 64 pixels x 64 channels: what goes to shared memory is read 16 times there instead of from L1 and L2. 1.0 ms
// shipped        CPU: a tile of pixels x output channels stays in registers while all taps and channels stream by; with stride 1, even sizes and
//                many channels Winograd's form (winograd.h), with 4/9 of the multiplications: percents of a CPU's peak count those of the plain form
//                GPU: the same idea with tensor cores (in fp32: three products of halves), input tiles that all nine taps read in place, and loads that
//                run ahead. conv_backward_input gathers (each input pixel asks which outputs read it), conv_backward_weight sums over pixels, so
//                that no two threads add to one number
//
//   make -C dev conv3x3 && dev/conv3x3       python dev/pairs/conv3x3.py [--bench]
#include "conv.h"

int main(int argc, char** argv) {
    return pair_main(argc, argv, conv_check, [] { conv_bench(3); });
}
