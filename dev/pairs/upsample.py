"""Checks upsample.cu."""

import torch.nn.functional as F
from harness import main
from resample import resample_pair

PAIR = resample_pair("upsample", lambda x: F.interpolate(x, scale_factor=2, mode="nearest"))

if __name__ == "__main__":
    main(PAIR)
