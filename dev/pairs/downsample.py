"""Checks downsample.cu, odd heights and widths included."""

import torch.nn.functional as F
from harness import main
from resample import resample_pair

PAIR = resample_pair("downsample", lambda x: F.avg_pool2d(x, 2))

if __name__ == "__main__":
    main(PAIR)
