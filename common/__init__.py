"""What the Python programs share. Arrows go one way: a module imports only modules that stand above it here, and no program.

    program          one sentence for a mistake, Ctrl-C, missing packages, the screen      needs Python alone
    files            files that appear whole or not at all, what may be replaced           needs Python alone
    flags            flags and presets (unet/flags.h, which the C++ program reads, too)         needs Python alone
    data_files       images and labels to train on                                         needs numpy
    pictures         from picture files to arrays                                          needs Pillow, too
    config           from flags to a configuration that can work                           from here on: PyTorch
    random_numbers   counter-based draws, as in the C++ program
    conditions       pictures as a condition that are made of the images
    augment          changes of training images, of which the network is told
    model            the network, its parameters, initial weights
    model_files      weights and checkpoints: .bin, .pt, .safetensors
    diffusers_files  the same in folders of Hugging Face's diffusers; autoencoders
    patch_pipeline   what such a folder draws models of patches with; imported by diffusers alone
    formats          any of these: read, convert, average after the run
    samples          grids and pictures of what was drawn
    judge            how good samples are: features, distances
    log              what a run of train_unet.py starts from, and its log
    likelihood       bits per dimension of images by a model (--nll)
    api              load() and what sample() says, for people who know PyTorch

Then come the programs: prepare_data.py; train_unet.py, which is what generate.py samples with.
"""
