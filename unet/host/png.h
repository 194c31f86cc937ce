// png.h - PNG files (PNG specification, third edition), and grids of images as PNG files. Needs files.h.
// A PNG file is 8 bytes that say that it is one, a chunk with its size, a chunk with its pixels, a chunk that ends it.
// The pixels are a zlib stream (RFC 1950) of what DEFLATE (RFC 1951) makes shorter, in the simplest form that still
// gives small files.
#pragma once

#include <climits>
#include <cmath>

#include "files.h"

// ---------------------------------------------------------------------------------------------------------------------
// --- DEFLATE

// Bytes to which bits are appended. A byte is filled from its lowest bit on.
struct BitString {
    std::string bytes;
    uint32_t byte = 0; // the one that is not full yet
    int filled = 0;    // how many of its bits are there

    void put_bit(uint32_t bit) {
        byte |= bit << filled;
        if (++filled < 8) return;
        bytes += (char)byte;
        byte = 0;
        filled = 0;
    }
    // A number, its lowest bit first.
    void put(uint32_t value, int bits) {
        for (int k = 0; k < bits; k++) put_bit(value >> k & 1);
    }
    // A Huffman code, its highest bit first.
    void put_code(uint32_t code, int bits) {
        for (int k = bits - 1; k >= 0; k--) put_bit(code >> k & 1);
    }
    void fill_byte() {
        while (filled) put_bit(0);
    }
};

// A symbol of RFC 1951, section 3.2.6, with its fixed code: a byte (0 to 255), the end of the block (256), or a length.
static void put_symbol(BitString* out, uint32_t symbol) {
    if (symbol < 144) out->put_code(symbol + 48, 8);
    else if (symbol < 256) out->put_code(symbol + 256, 9);
    else if (symbol < 280) out->put_code(symbol - 256, 7);
    else out->put_code(symbol - 88, 8);
}

// A length or a distance is a code for its leading bits, and its other bits as they are ("extra bits", section 3.2.5).
// There are 2^k codes for each number of extra bits.
struct LeadingBits {
    uint32_t code;
    int extra; // how many bits follow as they are
};
static LeadingBits leading_bits(uint32_t value, int k) {
    int extra = 0;
    while (value >> extra >= 2u << k) extra++;
    return {((uint32_t)extra << k) + (value >> extra), extra};
}

// "Copy `length` bytes that lie `distance` bytes back." Length codes are symbols; distance codes have 5 bits each.
static void put_copy(BitString* out, uint32_t length, uint32_t distance) {
    const LeadingBits l = leading_bits(length - 3, 2);
    put_symbol(out, 257 + l.code);
    out->put(length - 3, l.extra);
    const LeadingBits d = leading_bits(distance - 1, 1);
    out->put_code(d.code, 5);
    out->put(distance - 1, d.extra);
}

// zlib's checksum: the sum of all bytes, plus 1, and the sum of these sums, each modulo the largest prime below 2^16.
static uint32_t adler32(const std::string& bytes) {
    uint32_t a = 1, b = 0;
    for (const uint8_t byte : bytes) {
        a = (a + byte) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

// A number of four bytes, the highest one first, as PNG and zlib have it.
static std::string big_endian(uint32_t v) { return {(char)(v >> 24), (char)(v >> 16), (char)(v >> 8), (char)v}; }

// A zlib stream of these bytes: one block with fixed codes. At every byte, the latest place of the same four bytes is
// looked up by their hash, and what is the same there is copied.
static std::string deflate(const std::string& raw) {
    constexpr size_t LONGEST = 257, FARTHEST = 32768;
    std::vector<size_t> latest(1 << 15, 0); // the place of four bytes, by their hash
    BitString out{"\x78\x01"};              // zlib's head: DEFLATE, compressed fast
    out.put(3, 3);                          // the block's head: it is the last one (1 bit), with fixed codes (2 bits)
    for (size_t i = 0; i < raw.size();) {
        uint32_t four = 0;
        memcpy(&four, &raw[i], std::min<size_t>(4, raw.size() - i));
        const size_t from = std::exchange(latest[four * 2654435761u >> 17], i);
        size_t length = 0;
        const bool reaches = from < i && i - from <= FARTHEST;
        while (reaches && length < LONGEST && i + length < raw.size() && raw[from + length] == raw[i + length])
            length++;
        if (length < 4) {
            put_symbol(&out, (uint8_t)raw[i]);
            i++;
            continue;
        }
        put_copy(&out, (uint32_t)length, (uint32_t)(i - from));
        i += length;
    }
    put_symbol(&out, 256);
    out.fill_byte();
    return out.bytes + big_endian(adler32(raw));
}

// ---------------------------------------------------------------------------------------------------------------------
// --- PNG

// Of the left, the upper and the upper left neighbour the one that is nearest to left + up - corner (PNG, section 9.4).
static int paeth(int left, int up, int corner) {
    const int to_left = abs(up - corner);
    const int to_up = abs(left - corner);
    const int to_corner = abs(left + up - 2 * corner);
    if (to_left <= to_up && to_left <= to_corner) return left;
    return to_up <= to_corner ? up : corner;
}

// The pixels (H, W, C), a row at a time: the number of its filter, 4 for Paeth's, then each byte less what the filter
// expects there. So pictures become many small numbers.
static std::string filtered_rows(const std::vector<uint8_t>& pixels, int W, int H, int C) {
    std::string raw;
    const int row = W * C;
    for (int h = 0; h < H; h++) {
        raw += '\4';
        for (int i = 0; i < row; i++) {
            const uint8_t* p = &pixels[(size_t)h * row + i];
            const int left = i < C ? 0 : p[-C];
            const int up = h ? p[-row] : 0;
            const int corner = i < C || !h ? 0 : p[-row - C];
            raw += (char)(*p - paeth(left, up, corner));
        }
    }
    return raw;
}

constexpr size_t LONGEST_CHUNK = 1 << 30;

// A chunk: how many bytes it holds, its type, these bytes, and the checksum of type and bytes.
static std::string png_chunk(const std::string& type, const std::string& data) {
    const std::string body = type + data;
    return big_endian((uint32_t)data.size()) + body + big_endian(crc32(0, body.data(), body.size()));
}

// A text chunk that says who made the file: --output replaces no other PNG.
static const std::string PNG_MARK = png_chunk("tEXt", std::string("Software") + '\0' + "train_unet");

// A PNG file of pixels (H, W, C), C = 1 (grey) or 3 (RGB). A chunk holds less than 2^31 bytes, so the stream of a large
// picture takes several.
static std::string png_file(const std::vector<uint8_t>& pixels, int W, int H, int C) {
    const std::string zlib = deflate(filtered_rows(pixels, W, H, C));
    const char colour_type = C == 3 ? 2 : 0;
    // Bits a colour, the type, then the only compression and the only set of filters that PNG has; not interlaced.
    const std::string rest{8, colour_type, 0, 0, 0};
    std::string file = "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", big_endian(W) + big_endian(H) + rest);
    file += PNG_MARK;
    for (size_t at = 0; at < zlib.size(); at += LONGEST_CHUNK)
        file += png_chunk("IDAT", zlib.substr(at, LONGEST_CHUNK));
    return file + png_chunk("IEND", "");
}

// ---------------------------------------------------------------------------------------------------------------------
// --- grids

// Characters of 3 x 5 pixels, enough to write numbers. An octal digit is a row, from the top; its highest bit is left.
constexpr int LETTER_W = 3, LETTER_H = 5;
struct Letter {
    char character;
    int rows;
};
constexpr Letter LETTERS[] = {{'0', 075557}, {'1', 026227}, {'2', 071747}, {'3', 071717}, {'4', 055711},
                              {'5', 074717}, {'6', 074757}, {'7', 071111}, {'8', 075757}, {'9', 075717},
                              {'-', 000700}, {'+', 002720}, {'.', 000002}, {'e', 035743}};

// Writes a caption in black into pixels (.., width, C), from (top, left) on, as far as `room` pixels reach.
static void draw_caption(std::vector<uint8_t>* pixels, size_t width, int C, int top, int left, int room,
                         const std::string& caption) {
    const int most = room / (LETTER_W + 1); // a column of pixels is left free between two characters
    for (int i = 0; i < std::min(most, (int)caption.size()); i++) {
        int rows = 0; // a character that is not in the table, such as the space, is blank
        for (const Letter& letter : LETTERS)
            if (letter.character == caption[i]) rows = letter.rows;
        for (int y = 0; y < LETTER_H; y++)
            for (int x = 0; x < LETTER_W; x++) {
                const int bit = (LETTER_H - 1 - y) * LETTER_W + LETTER_W - 1 - x;
                const size_t column = left + i * (LETTER_W + 1) + x;
                if (rows >> bit & 1) std::fill_n(pixels->begin() + ((top + y) * width + column) * C, C, 0);
            }
    }
}

// A value in [-1, 1] as a picture holds it, from 0 to 255.
static uint8_t pixel_level(float v) { return (uint8_t)std::lround(std::min(std::max((v + 1) * 127.5f, 0.0f), 255.0f)); }

// How many images of n stand side by side in a grid, which is about as wide as high. parts: see grid_png.
static int grid_columns(int n, int parts) { return (int)std::ceil(std::sqrt((double)n / parts)); }

// A PNG file of n images (H, W, C) in [-1, 1] in a square grid, small ones enlarged. Unless C is 3, it shows their
// first channel in grey. captions: what stands below each image, in numbers; or empty. parts: how many pictures lie
// side by side in an image, each W / parts wide.
static std::string grid_png(const std::vector<float>& images, int n, int H, int W, int C,
                            const std::vector<std::string>& captions = {}, int parts = 1) {
    const int columns = grid_columns(n, parts);
    const int rows = (n + columns - 1) / columns;
    const int gap = 2; // white pixels around each image
    const int zoom = std::max(1, 64 / std::max(H, W / parts));
    const int caption_h = captions.empty() ? 0 : LETTER_H + gap;
    const int cell_h = H * zoom + gap + caption_h;
    const int cell_w = W * zoom + gap;
    const int channels = C == 3 ? 3 : 1;
    const int height = rows * cell_h + gap;
    const int width = columns * cell_w + gap;
    std::vector<uint8_t> pixels((size_t)height * width * channels, 255);
    for (int i = 0; i < n; i++) {
        const float* image = &images[(size_t)i * H * W * C];
        const size_t top = gap + i / columns * cell_h;
        const size_t left = gap + i % columns * cell_w;
        for (int h = 0; h < H * zoom; h++)
            for (int w = 0; w < W * zoom; w++)
                for (int c = 0; c < channels; c++) {
                    const float v = image[((size_t)(h / zoom) * W + w / zoom) * C + c];
                    pixels[((top + h) * width + left + w) * channels + c] = pixel_level(v);
                }
        if (captions.empty()) continue;
        const int below = (int)top + H * zoom + gap;
        draw_caption(&pixels, width, channels, below, (int)left, W * zoom, captions[i]);
    }
    return png_file(pixels, width, height, channels);
}
