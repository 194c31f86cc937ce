// conditions.h - augmentation and what a model is conditioned on.
#pragma once
#include "../gpu/shared.h"
#include "objectives.h"

// --augment (Karras et al. 2022, appendix F.2; Karras et al. 2020, "Training Generative Adversarial Networks with
// Limited Data", appendix B): a training image is changed in up to six ways. Each change is drawn independently of the
// others. Its probability is p (--augment), with two exceptions: an image is flipped upside down with probability
// p / 2, and mirrored with probability 1 / 2, whatever p is. The network is told which changes were made. So it learns
// that changed images are of another kind. When samples are made, the network is told that there is no change, and so
// it makes images that look unchanged.
// A row of this list first describes a change. After the semicolon are the numbers that the network is told. These
// numbers are 0 if the image is not changed in this way. z and z' are standard normal numbers, drawn for each change:
//   mirrored, upside down   left and right are exchanged, top and bottom are exchanged; 1 for each of the two
//   scaled                  by 2^(0.2 z); z
//   turned                  by an angle; the angle's cosine - 1, its sine
//   stretched               by 2^(0.2 z) along an axis and by the inverse across it; z cos(axis), z sin(axis). `axis`
//                           is the angle of this axis: with probability 1/2 a random angle, else 0
//   shifted                 by an eighth of the image times (z, z'); z, z'

// A 2 x 2 matrix. It maps (x, y) to (xx x + xy y, yx x + yy y).
struct Matrix2 {
    double xx, xy, yx, yy;
};
HD static inline Matrix2 product(const Matrix2& a, const Matrix2& b) {
    return Matrix2{a.xx * b.xx + a.xy * b.yx, a.xx * b.xy + a.xy * b.yy, //
                   a.yx * b.xx + a.yy * b.yx, a.yx * b.xy + a.yy * b.yy};
}
HD static inline Matrix2 rotation(double angle) { return Matrix2{cos(angle), -sin(angle), sin(angle), cos(angle)}; }

// These two functions turn a random word into a number in [0, 1), and into an angle in [-pi, pi).
HD static inline double random_fraction(uint32_t word) { return word * 0x1p-32; }
HD static inline double random_angle(uint32_t word) { return (2 * random_fraction(word) - 1) * M_PI; }

// Draws the change of a sample's image, H x W. words: the sample's 16 random words.
HD static inline Augmentation draw_augmentation(double p, const Words words[4], int H, int W) {
    const uint32_t *const first = words[0].w, *const second = words[1].w, *const third = words[2].w;
    float z[4];
    normals(z, words[3]);
    const bool flip_x = first[0] & 1;
    const bool flip_y = (first[1] & 1) && random_fraction(first[2]) < p;
    const double size = random_fraction(first[3]) < p ? z[0] : 0;
    const double angle = random_fraction(second[0]) < p ? random_angle(second[1]) : 0;
    const double stretch = random_fraction(second[2]) < p ? z[1] : 0;
    const double axis = random_fraction(third[0]) < 0.5 ? random_angle(second[3]) : 0;
    const bool shifts = random_fraction(third[1]) < p;
    const double shift_x = shifts ? z[2] : 0;
    const double shift_y = shifts ? z[3] : 0;

    // For a pixel of the changed image, these steps find the place in the mirrored image that the pixel shows (see
    // Augmentation): shift back, stretch back, turn by `angle`, scale back. They are done in this order. The matrix m
    // does the last three of them together. x_1 and y_1 are what shifting back adds to the result.
    const double longer = exp2(0.2 * stretch);
    const Matrix2 along_axis{1 / longer, 0, 0, longer};
    const Matrix2 stretched = product(rotation(-axis), product(along_axis, rotation(axis)));
    const Matrix2 turned = product(rotation(angle), stretched);
    const double smaller = exp2(-0.2 * size);
    const Matrix2 m{smaller * turned.xx, smaller * turned.xy, smaller * turned.yx, smaller * turned.yy};
    const double right = shift_x * W / 8;
    const double down = shift_y * H / 8;
    return Augmentation{.told = {(float)flip_x, (float)flip_y, (float)size, //
                                 (float)(cos(angle) - 1), (float)sin(angle), (float)(stretch * cos(axis)),
                                 (float)(stretch * sin(axis)), (float)shift_x, (float)shift_y},
                        .flip_x = flip_x,
                        .flip_y = flip_y,
                        .x_x = m.xx,
                        .x_y = m.xy,
                        .x_1 = -(m.xx * right + m.xy * down),
                        .y_x = m.yx,
                        .y_y = m.yy,
                        .y_1 = -(m.yx * right + m.yy * down)};
}

// The changed image is made at twice the resolution, so that turning the image neither blurs it nor makes its edges
// jagged. There are three steps:
//   1. The wavelet filter sym6 doubles the size of the image.
//   2. A second image of about the doubled size is made: the canvas. For each pixel of the canvas, the change (an
//      Augmentation) determines a place in the doubled image. There the doubled image is read, and interpolated
//      linearly between its pixels.
//   3. The same filter halves the size of the canvas. The result is the changed image.
// If nothing is to be changed, these steps return the image as it was. Steps 1 and 2 together are one sum over the
// pixels around a place, so the doubled image is never stored. The canvas is stored. At each edge it has a margin of 6
// of its own pixels, which the filter of step 3 needs. If step 1 needs pixels outside the image, it takes them from the
// image's reflection at that edge (see `mirrored`).
constexpr int FILTER = 12; // the number of sym6's coefficients, which are called taps
// A value of the doubled image, interpolated along a row, depends on this number of pixels of the image's row.
constexpr int AROUND = 7;
HD static inline int fine_size(int size) { return 2 * (size + FILTER / 2); } // how many rows (columns) the canvas has

// Returns tap k of sym6 (Daubechies 1992, "Ten Lectures on Wavelets"); 0 if k is not from 0 to 11. All taps add up to
// sqrt(2). Those with even k add up to half of that, and so do those with odd k.
HD static inline float sym6(int k) {
    const float taps[FILTER] = {0.015404109327027373f, 0.0034907120842174702f, -0.11799011114819057f,
                                -0.048311742585633f,   0.4910559419267466f,    0.787641141030194f,
                                0.3379294217276218f,   -0.07263752278646252f,  -0.021060292512300564f,
                                0.04472490177066578f,  0.0017677118642428036f, -0.007800708325034148f};
    return k >= 0 && k < FILTER ? taps[k] : 0.0f;
}

// Returns which of a row's `size` pixels lies at place n, if mirror images continue the row at both ends (the pixel at
// an end is not repeated). flip: the row itself is mirrored, too.
HD static inline int mirrored(int n, int size, bool flip) {
    if (n < 0 || n >= size) {
        const int period = 2 * size - 2;
        n %= period;
        if (n < 0) n += period;
        if (n >= size) n = period - n;
    }
    return flip ? size - 1 - n : n;
}

// The value at place u of a doubled row (or column) is a weighted sum of these pixels of the image's row (or column).
struct Around {
    int pixel[AROUND];
    float weight[AROUND];
};
HD static inline Around pixels_around(double u, int size, bool flip) {
    const double below = floor(u);
    const int i = (int)below;
    const float fraction = (float)(u - below);
    const int first = (i - 5) >> 1; // (i - 5) / 2, rounded down even if it is negative
    const bool odd = (i - 5) & 1;
    Around a;
    for (int j = 0; j < AROUND; j++) {
        // Value i of the doubled row contains pixel first + j times the tap `here`. Value i + 1 contains the same pixel
        // times the tap `next`. The result is interpolated between these two values.
        const float here = odd ? sym6(11 - 2 * j) : sym6(10 - 2 * j);
        const float next = odd ? sym6(12 - 2 * j) : sym6(11 - 2 * j);
        a.weight[j] = (1 - fraction) * here + fraction * next;
        a.pixel[j] = mirrored(first + j, size, flip);
    }
    return a;
}

// A value of the canvas is a weighted sum of the image's values in these rows and columns. The weight of a value is the
// product of the weight of its row and the weight of its column. All channels have the same weights.
struct CanvasPlace {
    Around rows, columns;
};
// Returns the CanvasPlace of the canvas's value at row `fine_y` and column `fine_x`.
HD static inline CanvasPlace canvas_place(const Augmentation& a, int fine_y, int fine_x, int H, int W) {
    // (x, y): the place in the changed image, in pixels from the centre. (from_x, from_y): the place in the mirrored
    // image that is shown there. The last two lines convert that place to rows and columns of the doubled image.
    const double x = (fine_x - W - 5) / 2.0;
    const double y = (fine_y - H - 5) / 2.0;
    const double from_x = a.x_x * x + a.x_y * y + a.x_1;
    const double from_y = a.y_x * x + a.y_y * y + a.y_1;
    return CanvasPlace{.rows = pixels_around(2 * from_y + H - 1, H, a.flip_y),
                       .columns = pixels_around(2 * from_x + W - 1, W, a.flip_x)};
}

// Returns the canvas's value at a place. channel: one channel of the image, (H, W); bytes: the size of a value, 1 or 4.
HD static inline float canvas_value(const CanvasPlace& place, const void* channel, int bytes, int W) {
    float sum = 0;
    for (int i = 0; i < AROUND; i++) {
        const size_t row = (size_t)place.rows.pixel[i] * W;
        float of_row = 0;
        for (int j = 0; j < AROUND; j++) {
            const size_t at = row + place.columns.pixel[j];
            const float value = bytes == 1 ? ((const uint8_t*)channel)[at] : ((const float*)channel)[at];
            of_row += place.columns.weight[j] * value;
        }
        sum += place.rows.weight[i] * of_row;
    }
    // A byte stands for byte / 127.5 - 1. The weights of the 7 rows add up to sqrt(2) / 2 (sym6), and so do those of
    // the 7 columns. So the 49 products of weights add up to 1 / 2, and the -1 becomes -0.5. (In `halved` the 144
    // products of taps add up to 2, so the changed image is as bright as the original one.)
    return bytes == 1 ? sum / 127.5f - 0.5f : sum;
}

// Returns one channel of the changed image's pixel (y, x). canvas: this channel of the canvas.
HD static inline float halved(const float* canvas, int y, int x, int W) {
    float sum = 0;
    for (int i = 0; i < FILTER; i++) {
        const float* const row = canvas + (size_t)(2 * y + 1 + i) * fine_size(W) + 2 * x + 1;
        float of_row = 0;
        for (int j = 0; j < FILTER; j++) of_row += sym6(j) * row[j];
        sum += sym6(i) * of_row;
    }
    return sum;
}

// --- pictures that are made of images (--cond)

// A channel that is W wide is divided into squares of factor x factor pixels. Returns the mean of square (y, x). flip:
// x is counted from the right edge.
HD static inline float square_mean(const void* channel, int bytes, int y, int x, int factor, int W, bool flip) {
    float sum = 0;
    for (int i = 0; i < factor; i++)
        for (int j = 0; j < factor; j++) {
            const int column = x * factor + j;
            const size_t row = (size_t)(y * factor + i) * W;
            sum += image_value(channel, bytes, row + (flip ? W - 1 - column : column));
        }
    return sum / (float)(factor * factor);
}

// In training with --cond lowres, noise is added to the small pictures. Its standard deviation is --cond_noise times a
// factor, which is drawn uniformly from [0, 1) for each picture. (Ho et al. 2021, "Cascaded Diffusion Models": a
// network that was trained on coarse pictures with different amounts of noise is not disturbed by the errors of a
// sampled coarse picture.)
// NOISE_STRENGTH is the number of the quartet of random words that this factor is drawn from. The noise itself uses
// quartets with lower numbers.
constexpr uint32_t NOISE_STRENGTH = 0xFFFFFFFF;
HD static inline float noise_strength(const Words& words) { return (words.w[0] >> 8) * 0x1p-24f; }

// Value i of an enlarged row (or column) is interpolated between two values of the small row, number `first` and number
// `second`. As in PyTorch's F.interpolate(mode="bilinear", align_corners=False), a pixel's place is that of its centre.
// place_in_small finds these two. Its `size` is how many values the small row has.
struct Between {
    int first, second;
    float fraction; // the weight of the second value; the weight of the first is 1 - fraction
};
HD static inline Between place_in_small(int i, int factor, int size) {
    const float centre = ((float)i + 0.5f) / (float)factor - 0.5f;
    const float place = centre < 0 ? 0 : centre;
    const int first = (int)place;
    const int second = first + 1 < size ? first + 1 : first;
    return Between{first, second, place - (float)first};
}

// A small picture (h, w, C) is enlarged to (factor h, factor w, C). Returns the value of the enlarged picture's pixel
// (y, x) in channel c.
HD static inline float enlarged(const float* small, int y, int x, int c, int factor, int C, int h, int w) {
    const Between row = place_in_small(y, factor, h);
    const Between column = place_in_small(x, factor, w);
    const float* const upper = small + (size_t)row.first * w * C + c;
    const float* const lower = small + (size_t)row.second * w * C + c;
    const float above = (1 - column.fraction) * upper[column.first * C] + column.fraction * upper[column.second * C];
    const float below = (1 - column.fraction) * lower[column.first * C] + column.fraction * lower[column.second * C];
    return (1 - row.fraction) * above + row.fraction * below;
}

// Returns a pixel's grey value (ITU-R BT.601). i: the index of the pixel's red value in images. The green value lies HW
// values after it, and the blue value 2 HW values after it.
HD static inline float grey_value(const void* images, int bytes, size_t i, int HW) {
    const float red = image_value(images, bytes, i);
    const float green = image_value(images, bytes, i + HW);
    const float blue = image_value(images, bytes, i + 2 * (size_t)HW);
    return 0.299f * red + 0.587f * green + 0.114f * blue;
}

// --cond mask leaves out the pixels of an image that lie in its holes. There are up to four holes. A hole is a
// rectangle, or a stroke between two points. All is computed in integers, so that every device leaves out the same
// pixels.
constexpr int HOLES = 4;
struct Hole {
    bool is_there, is_stroke;
    int y0, x0, y1, x1; // the two ends of a stroke, or two opposite corners of a rectangle
    int radius;         // the radius of a stroke, in pixels
};
struct Holes {
    Hole hole[HOLES];
};

// Turns a random word into an integer from 0 to size - 1.
HD static inline int random_below(uint32_t word, int size) { return (int)((uint64_t)word * size >> 32); }

// Draws the holes of a sample. words: the sample's random words, eight for each hole. The first hole is always there.
HD static inline Holes draw_holes(const Words words[2 * HOLES], int H, int W) {
    Holes holes;
    for (int k = 0; k < HOLES; k++) {
        const uint32_t* const how = words[2 * k].w;
        const uint32_t* const where = words[2 * k + 1].w;
        Hole& hole = holes.hole[k];
        hole.is_there = k == 0 || (how[0] & 1);
        hole.is_stroke = how[1] & 1;
        hole.y0 = random_below(where[0], H);
        hole.x0 = random_below(where[1], W);
        hole.y1 = random_below(where[2], H);
        hole.x1 = random_below(where[3], W);
        hole.radius = 1 + random_below(how[2], (H < W ? H : W) / 8 + 1);
    }
    return holes;
}

// Returns whether the distance of (y, x) from the line between a stroke's two ends is at most the stroke's radius.
HD static inline bool is_in_stroke(const Hole& s, int y, int x) {
    const int64_t along_y = s.y1 - s.y0, along_x = s.x1 - s.x0;
    const int64_t from_y = y - s.y0, from_x = x - s.x0;
    const int64_t length2 = along_y * along_y + along_x * along_x;
    const int64_t radius2 = (int64_t)s.radius * s.radius;
    const int64_t ahead = from_y * along_y + from_x * along_x; // distance along the line, times the line's length
    if (ahead <= 0) return from_y * from_y + from_x * from_x <= radius2;
    if (ahead < length2) {
        const int64_t beside = from_y * along_x - from_x * along_y; // distance from the line, times the line's length
        return beside * beside <= radius2 * length2;
    }
    const int64_t behind_y = y - s.y1, behind_x = x - s.x1;
    return behind_y * behind_y + behind_x * behind_x <= radius2;
}

HD static inline bool is_in_hole(const Holes& holes, int y, int x) {
    bool inside = false;
    for (const Hole& hole : holes.hole) {
        const bool between_y = (y >= hole.y0 && y <= hole.y1) || (y >= hole.y1 && y <= hole.y0);
        const bool between_x = (x >= hole.x0 && x <= hole.x1) || (x >= hole.x1 && x <= hole.x0);
        const bool in_this = hole.is_stroke ? is_in_stroke(hole, y, x) : between_y && between_x;
        inside = inside || (hole.is_there && in_this);
    }
    return inside;
}

// Returns the value of a pixel in the mask's channel. As in a mask's file, the mask is white where the network has to
// paint.
HD static inline float mask_value(bool hidden) { return hidden ? 1.0f : -1.0f; }
#ifdef __CUDACC__ // the GPU

// Changes the images as --augment asks, in three launches. The canvas is the changed image at twice the resolution,
// with a margin (see the comment above FILTER).
//   1. Each thread draws the change of one sample.
//   2. Each thread computes one place of the canvas, in all channels.
//   3. Each thread computes one value of the result from the canvas.
static void augment_images(float* out, Augmentation* drawn, float* canvas, float* told, int stride, const void* images,
                           float p, RandomKey key, int B, int C, int H, int W, int bytes) {
    each(B, [=] __device__(size_t b) {
        Words words[4];
        for (int k = 0; k < 4; k++) {
            words[k] = random_words(key, k, (int)b);
        }
        drawn[b] = draw_augmentation(p, words, H, W);
        // Copies the numbers that tell the network what the change was.
        for (int k = 0; k < AUGMENT_NUMBERS; k++) {
            told[b * stride + k] = drawn[b].told[k];
        }
    });
    // A plane is one channel of one image. It has `fine` values in the canvas, and H W values in images and out.
    const size_t fine = (size_t)fine_size(H) * fine_size(W);
    each((size_t)B * fine, [=] __device__(size_t i) {
        const size_t b = i / fine;
        const int at = (int)(i % fine);
        const CanvasPlace place = canvas_place(drawn[b], at / fine_size(W), at % fine_size(W), H, W);
        for (size_t plane = b * C; plane < (b + 1) * C; plane++) {
            const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
            canvas[plane * fine + at] = canvas_value(place, channel, bytes, W);
        }
    });
    each((size_t)B * C * H * W, [=] __device__(size_t i) {
        const size_t plane = i / ((size_t)H * W);
        const int y = (int)(i / W % H);
        const int x = (int)(i % W);
        out[i] = halved(canvas + plane * fine, y, x, W);
    });
}

// picture_is_mirrored returns whether the picture of sample b is mirrored (--random_flip). A picture is mirrored if its
// image is mirrored, because both use the same random draw. picture_is_left_out returns whether the picture of sample b
// is replaced by zeros (--cond_dropout).
INLINE bool picture_is_mirrored(const PictureDraws& draws, int b) {
    return draws.random_flip && (random_words(of_purpose(draws.key, RANDOM_FLIP), 0, b).w[0] & 1);
}
INLINE bool picture_is_left_out(const PictureDraws& draws, int b) {
    const uint32_t threshold = dropout_threshold(draws.dropout);
    const RandomKey key = of_purpose(draws.key, RANDOM_COND_DROPOUT);
    return threshold > 0 && random_words(key, 0, b).w[0] < threshold;
}

// The functions from here to mask_images make the pictures of a batch, which the network reads as its condition. Each
// thread writes one element of the result. mask_images is an exception: there each thread writes all channels of a
// pixel.
static void take_pictures(float* cond, const void* pictures, PictureDraws draws, int B, int K, int H, int W,
                          int bytes) {
    // The result is (B, H, W, K), so its element i is channel k of a pixel. The data file's pictures are (B, K, H, W).
    each((size_t)B * H * W * K, [=] __device__(size_t i) {
        const int k = (int)(i % K);
        const int w = (int)(i / K % W);
        const int h = (int)(i / K / W % H);
        const int b = (int)(i / K / W / H);
        const int column = picture_is_mirrored(draws, b) ? W - 1 - w : w;
        const size_t place = (((size_t)b * K + k) * H + h) * W + column;
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : image_value(pictures, bytes, place);
    });
}

// Makes the small pictures of --cond lowres, with noise if draws.noise is not 0. `small` is (B, H / factor, W / factor,
// C). A thread computes element e of one picture. Of the four normal numbers of quartet e / 4, it uses number e % 4 as
// noise. So four neighbouring threads compute the same quartet.
static void shrink_images(float* small, const void* images, int factor, PictureDraws draws, int B, int C, int H, int W,
                          int bytes) {
    const int small_w = W / factor;
    const int n = H / factor * small_w * C;
    const RandomKey noise_key = of_purpose(draws.key, RANDOM_COND_NOISE);
    each((size_t)B * n, [=] __device__(size_t i) {
        const int b = (int)(i / n);
        const int e = (int)(i % n);
        const size_t plane = (size_t)b * C + e % C;
        const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
        const bool flip = picture_is_mirrored(draws, b);
        float value = square_mean(channel, bytes, e / C / small_w, e / C % small_w, factor, W, flip);
        if (draws.noise > 0) {
            float z[4];
            normals(z, random_words(noise_key, e / 4, b));
            value += draws.noise * noise_strength(random_words(noise_key, NOISE_STRENGTH, b)) * z[e % 4];
        }
        small[i] = value;
    });
}

// Enlarges the small pictures of --cond lowres. shrink_images has already mirrored the small pictures of mirrored
// images, so there is nothing to mirror here.
static void enlarge_pictures(float* cond, const float* small, int factor, PictureDraws draws, int B, int C, int H,
                             int W) {
    const int n = H * W * C;
    const int small_h = H / factor;
    const int small_w = W / factor;
    each((size_t)B * n, [=] __device__(size_t i) {
        const int b = (int)(i / n);
        const int e = (int)(i % n);
        const float* const picture = small + (size_t)b * small_h * small_w * C;
        const float value = enlarged(picture, e / C / W, e / C % W, e % C, factor, C, small_h, small_w);
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : value;
    });
}

// Makes the grey pictures of --cond gray. `cond` is (B, HW). Images have three channels: parse_cond refuses others.
// `from` is the pixel of the image that pixel p of the picture shows. It is p itself or, if the image is mirrored, the
// pixel of the same row whose distance from the right edge is p's distance from the left edge.
static void grey_images(float* cond, const void* images, PictureDraws draws, int B, int H, int W, int bytes) {
    const int HW = H * W;
    each((size_t)B * HW, [=] __device__(size_t i) {
        const int b = (int)(i / HW);
        const int p = (int)(i % HW);
        const int from = picture_is_mirrored(draws, b) ? p / W * W + W - 1 - p % W : p;
        const float value = grey_value(images, bytes, (size_t)b * 3 * HW + from, HW);
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : value;
    });
}

// Makes the pictures of --cond mask. `cond` is (B, HW, C + 1): the image, which is 0 in the holes, and then the mask.
// All threads of a sample draw the same holes. The holes are placed in the image as the network sees it, which may be
// mirrored already. So the holes themselves are not mirrored. A picture that is left out is 0 in all channels, the mask
// included. In all other pictures, the mask is 1 (a hole) or -1 (known).
static void mask_images(float* cond, const void* images, PictureDraws draws, int B, int C, int H, int W, int bytes) {
    const int HW = H * W;
    const RandomKey key = of_purpose(draws.key, RANDOM_MASK);
    each((size_t)B * HW, [=] __device__(size_t i) {
        const int b = (int)(i / HW);
        const int p = (int)(i % HW);
        const bool left_out = picture_is_left_out(draws, b);
        Words words[2 * HOLES];
        for (int k = 0; k < 2 * HOLES; k++) {
            words[k] = random_words(key, k, b);
        }
        const bool hidden = is_in_hole(draw_holes(words, H, W), p / W, p % W);
        const int from = picture_is_mirrored(draws, b) ? p / W * W + W - 1 - p % W : p;
        float* const pixel = cond + i * (C + 1);
        for (int c = 0; c < C; c++) {
            const size_t plane = (size_t)b * C + c;
            pixel[c] = hidden || left_out ? 0.0f : image_value(images, bytes, plane * HW + from);
        }
        pixel[C] = left_out ? 0.0f : mask_value(hidden);
    });
}
#endif
