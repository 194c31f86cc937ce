// pictures.h - pictures that a model is conditioned on.
#pragma once
#include "conditions.h"

// Which image of a file of `count` is number i of `shown` that are spread evenly over it, as it may be sorted by class.
static int64_t spread(int64_t i, int64_t shown, int64_t count) { return i * count / shown; }

// The first images of a data file, or images spread evenly over it, at most `most` of them, as (count, H, W, C) in
// [-1, 1]. A mask's only channel is repeated C times. flag: the flag that names the file.
static std::vector<float> some_images(Dataset d, const char* flag, int C, int most, bool spreads) {
    const int HW = d.H * d.W;
    const int count = (int)std::min<int64_t>(d.count, most);
    std::vector<uint8_t> image(d.image_bytes()); // (C, H, W), as the file has it
    std::vector<float> images;
    for (int k = 0; k < count; k++) {
        const int64_t i = spreads ? spread(k, count, d.count) : k;
        if (!read_image(&d, i, image.data())) refuse(d.error);
        for (int element = 0; element < HW * C; element++) { // as (H, W, C)
            const int pixel = element / C;
            const int channel = element % C % d.C;
            const int source = channel * HW + pixel;
            const float value = image_value(image.data(), d.bytes, source);
            images.push_back(value);
            if (!std::isfinite(value))
                die("--%s %s: image %ld holds a value that is not finite; make the file again", flag, d.path.c_str(),
                    d.in_file(i));
        }
    }
    return images;
}

// Opens a file, checks the size of its images, and returns c.sample of them at most. channels: those of the file. C:
// those of the result.
static std::vector<float> read_images(const Config& c, const char* flag, const std::string& path, int channels, int C) {
    const Dataset d = open_dataset(path);
    const bool fits = d.C == channels && d.H == c.H && d.W == c.W;
    if (!fits)
        die("--%s %s: its images are %dx%dx%d and must be %dx%dx%d; "
            "prepare_data.py --image_size and --channels make them fit",
            flag, path.c_str(), d.H, d.W, d.C, c.H, c.W, channels);
    return some_images(d, flag, C, c.sample, false);
}

// --- pictures that samples are conditioned on

// Enlarges a small picture (H / factor, W / factor, C) to (H, W, C).
static std::vector<float> enlarged_picture(const Config& c, const float* small) {
    const int C = c.in_channels;
    const int factor = c.picture_factor;
    std::vector<float> picture((size_t)c.H * c.W * C);
    for (int e = 0; e < c.H * c.W * C; e++)
        picture[e] = enlarged(small, e / C / c.W, e / C % c.W, e % C, factor, C, c.H / factor, c.W / factor);
    return picture;
}

// The picture (H, W, cond_channels) that --cond makes of the image (C, H, W) of sample `number`. Nothing is random in
// it but the holes, which are drawn if mask (H, W) is null.
static std::vector<float> made_picture(const Config& c, const uint8_t* image, int bytes, int64_t number,
                                       const float* mask) {
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    std::vector<float> picture;
    if (c.picture_kind == PictureKind::LOWRES) {
        const int factor = c.picture_factor;
        const int w = c.W / factor;
        std::vector<float> small;
        for (int e = 0; e < HW / factor / factor * C; e++) {
            const uint8_t* const channel = image + (size_t)(e % C) * HW * bytes;
            small.push_back(square_mean(channel, bytes, e / C / w, e / C % w, factor, c.W, false));
        }
        return enlarged_picture(c, small.data());
    }
    if (c.picture_kind == PictureKind::GRAY) {
        for (int p = 0; p < HW; p++) picture.push_back(grey_value(image, bytes, p, HW));
        return picture;
    }
    // The draws don't depend on the training step (it is always 0 here), so a run that is resumed shows the same holes
    // in its grids as before.
    Words words[2 * HOLES];
    for (int k = 0; k < 2 * HOLES; k++) words[k] = philox((uint64_t)c.seed, k, (uint32_t)number, 0, RANDOM_MASK);
    const Holes holes = draw_holes(words, c.H, c.W);
    for (int p = 0; p < HW; p++) {
        const bool hidden = mask ? mask[p] > 0 : is_in_hole(holes, p / c.W, p % c.W);
        for (int channel = 0; channel < C; channel++) {
            const float value = image_value(image, bytes, (size_t)channel * HW + p);
            picture.push_back(hidden ? 0 : value);
        }
        picture.push_back(mask_value(hidden));
    }
    return picture;
}

// The pictures (count, H, W, cond_channels) that --cond makes of the images that some_images returns. masks: any number
// of masks (H, W), used in turns, or none: then the holes are random.
static std::vector<float> made_pictures(const Config& c, Dataset d, int most, const std::vector<float>& masks,
                                        bool spreads) {
    std::vector<float> pictures;
    // A vector of floats, so that its memory is aligned even for an image of floats.
    std::vector<float> image(d.image_bytes() / sizeof(float) + 1);
    uint8_t* const bytes = (uint8_t*)image.data();
    const int count = (int)std::min<int64_t>(d.count, most);
    for (int k = 0; k < count; k++) {
        const int64_t i = spreads ? spread(k, count, d.count) : k;
        if (!read_image(&d, i, bytes)) refuse(d.error);
        const size_t position = (size_t)k * c.H * c.W;
        const float* const mask = masks.empty() ? nullptr : &masks[position % masks.size()];
        const std::vector<float> picture = made_picture(c, bytes, d.bytes, k, mask);
        if (!all_finite(picture.data(), picture.size()))
            refuse(d.path + text(": image %ld holds a value that is not finite; make the file again", d.in_file(i)));
        pictures.insert(pictures.end(), picture.begin(), picture.end());
    }
    return pictures;
}

// The end of an error message: which other pictures --cond accepts.
static std::string other_pictures(const Config& c) {
    const int factor = c.picture_factor;
    if (c.picture_kind == PictureKind::LOWRES)
        return text(", or small ones of %dx%dx%d", c.H / factor, c.W / factor, c.in_channels);
    return c.picture_kind == PictureKind::GRAY ? ", or grey ones" : "";
}

// The pictures (count, H, W, cond_channels) for --sample, from --cond_file. With --cond they are made of the file's
// images, or the file already holds small or grey ones.
static std::vector<float> sample_pictures(const Config& c) {
    const int K = c.cond_channels;
    if (c.picture_kind == PictureKind::FILE) return read_images(c, "cond_file", c.cond_file, K, K);
    const Dataset d = open_dataset(c.cond_file);
    const bool full_size = d.H == c.H && d.W == c.W;
    if (full_size && d.C == c.in_channels) {
        const bool has_mask = c.picture_kind == PictureKind::MASK && !c.mask.empty();
        const std::vector<float> masks = has_mask ? read_images(c, "mask", c.mask, 1, 1) : std::vector<float>();
        return made_pictures(c, d, c.sample, masks, false);
    }
    if (c.picture_kind == PictureKind::GRAY && full_size && d.C == 1)
        return some_images(d, "cond_file", 1, c.sample, false);
    const int factor = std::max(c.picture_factor, 1);
    const bool is_small = d.H == c.H / factor && d.W == c.W / factor && d.C == c.in_channels;
    if (c.picture_kind != PictureKind::LOWRES || !is_small)
        die("--cond_file %s: its pictures are %dx%dx%d, and --cond %s takes images of %dx%dx%d%s", c.cond_file.c_str(),
            d.H, d.W, d.C, c.cond.c_str(), c.H, c.W, c.in_channels, other_pictures(c).c_str());
    const std::vector<float> small = some_images(d, "cond_file", d.C, c.sample, false);
    const size_t size = (size_t)d.H * d.W * d.C;
    std::vector<float> pictures;
    for (size_t at = 0; at < small.size(); at += size) {
        const std::vector<float> picture = enlarged_picture(c, &small[at]);
        pictures.insert(pictures.end(), picture.begin(), picture.end());
    }
    return pictures;
}
