// conv3x3.cu - 3x3 convolution, padding 1, stride 1 or 2, over one or two tensors, read upsampled or not, with what follows it in the
// network: bias, timestep embedding, residual, and the next group norm's sums.
//
//   x1 (B, H, W, C1), x2 (B, H, W, C2), weight (Cout, 3, 3, C1 + C2), bias (Cout), emb (B, stride), residual, out (B, Ho, Wo, Cout)
//   FLOPs    18 B Ho Wo Cin Cout forward, and as many for each of the two gradients: 80 to 90 % of a training step
//   bytes    4 (B H W Cin + B Ho Wo Cout + 9 Cin Cout); unet64 at batch 32, 64 -> 64 at 64x64: 67 MB for 9.7 GFLOP, so arithmetic is the limit.
//            Three input or output channels (first and last layer) turn that round.
//
// forward
//   version 0   the definition: seven loops, one output at a time; one product per load, and a chain of dependent additions
//   version 1   output channels innermost, weights turned to (3, 3, Cin, Cout): the compiler vectorises it
//   shipped     conv_forward: a tile of pixels x output channels stays in registers while all taps and channels stream by
// backward
//   version 0   the same seven loops, scattering
//   shipped     conv_backward_input gathers (each input pixel asks which outputs read it), conv_backward_weight sums over pixels, so that no two
//               threads add to one number
//
//   make -C dev conv3x3 && dev/conv3x3       python dev/conv3x3.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "conv.h"

int main(int argc, char** argv) {
    return pair_main(argc, argv, conv_check, [] { conv_bench(3); });
}
