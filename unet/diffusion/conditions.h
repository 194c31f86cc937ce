// conditions.h - augmentation and what a model is conditioned on.
#pragma once
#include "../gpu/shared.h"
#include "objectives.h"

// --augment (Karras et al. 2022, appendix F.2; Karras et al. 2020, "Training Generative Adversarial Networks with
// Limited Data", appendix B): a training image is changed in up to six ways, each drawn independently with probability
// p. (Upside down: p / 2. Mirrored: always 1 / 2.) The network is told which changes were made. For samples it is told
// that there is no change. A row is a change and, after the semicolon, the numbers that the network is told. They are 0
// if the image is not changed in this way. z and z' are standard normal numbers:
//   mirrored, upside down   left and right, top and bottom are exchanged; 1 for each of the two
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

// A random word becomes a number in [0, 1), or an angle in [-pi, pi).
HD static inline double random_fraction(uint32_t word) { return word * 0x1p-32; }
HD static inline double random_angle(uint32_t word) { return (2 * random_fraction(word) - 1) * M_PI; }

// Draws the change of a sample's image, H x W, from its 16 random words.
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

    // These steps find the place in the mirrored image that a pixel of the changed image shows: shift back, stretch
    // back, turn by `angle`, scale back. The matrix m does the last three. x_1 and y_1 are what shifting back adds to
    // the result.
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

// The changed image is made at twice the resolution, so that turning it neither blurs it nor makes its edges jagged:
//   1. The wavelet filter sym6 doubles the size of the image.
//   2. The canvas, of about the doubled size: each of its pixels reads a place in the doubled image, by linear
//      interpolation.
//   3. The same filter halves the size of the canvas.
// Without a change, the result is the image as it was. Steps 1 and 2 together are one sum over the pixels around a
// place, so the doubled image is never stored. The canvas has a margin of 6 of its own pixels, which the filter of step
// 3 needs.
constexpr int FILTER = 12; // sym6's coefficients, which are called taps
constexpr int AROUND = 7;  // pixels of a row that an interpolated value of the doubled row depends on
HD static inline int fine_size(int size) { return 2 * (size + FILTER / 2); } // of the canvas

// Tap k of sym6 (Daubechies 1992, "Ten Lectures on Wavelets"), or 0. All taps add up to sqrt(2), those with even k and
// those with odd k to half of that.
HD static inline float sym6(int k) {
    const float taps[FILTER] = {0.015404109327027373f, 0.0034907120842174702f, -0.11799011114819057f,
                                -0.048311742585633f,   0.4910559419267466f,    0.787641141030194f,
                                0.3379294217276218f,   -0.07263752278646252f,  -0.021060292512300564f,
                                0.04472490177066578f,  0.0017677118642428036f, -0.007800708325034148f};
    return k >= 0 && k < FILTER ? taps[k] : 0.0f;
}

// Which of a row's `size` pixels lies at place n, if mirror images continue the row at both ends (the pixel at an end
// is not repeated). flip: the row itself is mirrored, too.
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
        // Value i of the doubled row contains pixel first + j times the tap `here`, and value i + 1 contains it times
        // `next`. The result is interpolated between these two values.
        const float here = odd ? sym6(11 - 2 * j) : sym6(10 - 2 * j);
        const float next = odd ? sym6(12 - 2 * j) : sym6(11 - 2 * j);
        a.weight[j] = (1 - fraction) * here + fraction * next;
        a.pixel[j] = mirrored(first + j, size, flip);
    }
    return a;
}

// A value of the canvas is a weighted sum of the image's values in these rows and columns. A value's weight is that of
// its row times that of its column.
struct CanvasPlace {
    Around rows, columns;
};
HD static inline CanvasPlace canvas_place(const Augmentation& a, int fine_y, int fine_x, int H, int W) {
    // (x, y): the place in the changed image, in pixels from the centre. (from_x, from_y): the place in the mirrored
    // image. The last two lines convert it to rows and columns of the doubled image.
    const double x = (fine_x - W - 5) / 2.0;
    const double y = (fine_y - H - 5) / 2.0;
    const double from_x = a.x_x * x + a.x_y * y + a.x_1;
    const double from_y = a.y_x * x + a.y_y * y + a.y_1;
    return CanvasPlace{.rows = pixels_around(2 * from_y + H - 1, H, a.flip_y),
                       .columns = pixels_around(2 * from_x + W - 1, W, a.flip_x)};
}

// The canvas's value at a place. channel: one channel of the image, (H, W); bytes: the size of a value, 1 or 4.
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
    // the 7 columns. So the 49 products of weights add up to 1 / 2, and the -1 becomes -0.5. (`halved` doubles this
    // again.)
    return bytes == 1 ? sum / 127.5f - 0.5f : sum;
}

// One channel of the changed image's pixel (y, x). canvas: this channel of the canvas.
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

// The mean of square (y, x) of factor x factor pixels of a channel. flip: x is counted from the right edge.
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

// Noise on the small pictures of --cond lowres has a standard deviation of --cond_noise times a factor, drawn uniformly
// from [0, 1) for each picture. So the network is not disturbed by the errors of a sampled coarse picture (Ho et al.
// 2021, "Cascaded Diffusion Models"). NOISE_STRENGTH is the factor's quartet. The noise itself uses lower ones.
constexpr uint32_t NOISE_STRENGTH = 0xFFFFFFFF;
HD static inline float noise_strength(const Words& words) { return (words.w[0] >> 8) * 0x1p-24f; }

// Value i of an enlarged row (or column) is interpolated between two of the `size` values of the small row. As in
// PyTorch's F.interpolate(mode="bilinear", align_corners=False), a pixel's place is that of its centre.
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

// A small picture (h, w, C) is enlarged to (factor h, factor w, C). Returns pixel (y, x) in channel c.
HD static inline float enlarged(const float* small, int y, int x, int c, int factor, int C, int h, int w) {
    const Between row = place_in_small(y, factor, h);
    const Between column = place_in_small(x, factor, w);
    const float* const upper = small + (size_t)row.first * w * C + c;
    const float* const lower = small + (size_t)row.second * w * C + c;
    const float above = (1 - column.fraction) * upper[column.first * C] + column.fraction * upper[column.second * C];
    const float below = (1 - column.fraction) * lower[column.first * C] + column.fraction * lower[column.second * C];
    return (1 - row.fraction) * above + row.fraction * below;
}

// A pixel's grey value (ITU-R BT.601). i: the index of its red value. Green lies HW values after it, and blue 2 HW.
HD static inline float grey_value(const void* images, int bytes, size_t i, int HW) {
    const float red = image_value(images, bytes, i);
    const float green = image_value(images, bytes, i + HW);
    const float blue = image_value(images, bytes, i + 2 * (size_t)HW);
    return 0.299f * red + 0.587f * green + 0.114f * blue;
}

// --cond mask leaves out the pixels in up to four holes, which are rectangles, or strokes between two points. All is
// computed in integers, so that every device leaves out the same pixels.
constexpr int HOLES = 4;
struct Hole {
    bool is_there, is_stroke;
    int y0, x0, y1, x1; // the two ends of a stroke, or two opposite corners of a rectangle
    int radius;         // the radius of a stroke, in pixels
};
struct Holes {
    Hole hole[HOLES];
};

HD static inline int random_below(uint32_t word, int size) { return (int)((uint64_t)word * size >> 32); }

// Draws the holes of a sample from its random words, eight for each hole. The first hole is always there.
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

// Whether the distance of (y, x) from the line between a stroke's two ends is at most the stroke's radius.
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

// As in a mask's file, the mask is white where the network has to paint.
HD static inline float mask_value(bool hidden) { return hidden ? 1.0f : -1.0f; }
#ifdef __CUDACC__ // the GPU

// Three launches: a thread for each sample's change, for each place of the canvas, and for each value of the result.
static void augment_images(float* out, Augmentation* drawn, float* canvas, float* told, int stride, const void* images,
                           float p, RandomKey key, int B, int C, int H, int W, int bytes) {
    each(B, [=] __device__(size_t b) {
        Words words[4];
        for (int k = 0; k < 4; k++) {
            words[k] = random_words(key, k, (int)b);
        }
        drawn[b] = draw_augmentation(p, words, H, W);
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

// Whether the picture of sample b is mirrored. It uses the same random draw as its image.
INLINE bool picture_is_mirrored(const PictureDraws& draws, int b) {
    return draws.random_flip && (random_words(of_purpose(draws.key, RANDOM_FLIP), 0, b).w[0] & 1);
}
INLINE bool picture_is_left_out(const PictureDraws& draws, int b) {
    const uint32_t threshold = dropout_threshold(draws.dropout);
    const RandomKey key = of_purpose(draws.key, RANDOM_COND_DROPOUT);
    return threshold > 0 && random_words(key, 0, b).w[0] < threshold;
}

static void take_pictures(float* cond, const void* pictures, PictureDraws draws, int B, int K, int H, int W,
                          int bytes) {
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

// A thread computes element e of one picture. Of the four normal numbers of quartet e / 4, it uses number e % 4 as
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

// shrink_images has already mirrored the small pictures of mirrored images.
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

// `from` is the pixel of the image that pixel p of the picture shows. If the image is mirrored, it is that of the same
// row whose distance from the right edge is p's from the left edge.
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

// All threads of a sample draw the same holes. The holes are placed in the image as the network sees it, mirrored or
// not, so they are not mirrored themselves. A picture that is left out is 0 in all channels, the mask included.
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
