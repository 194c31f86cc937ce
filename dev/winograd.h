// winograd.h - 3x3 convolutions on a CPU with fewer multiplications. reference.h includes it.
//
// Two neighbouring results y of a 3-tap convolution need four inputs d. As plain sums they take six multiplications:
//
//   y0 = d0 g0 + d1 g1 + d2 g2                   g: the three weights
//   y1 = d1 g0 + d2 g1 + d3 g2
//
// Winograd's form takes four. The sums of weights in it are made once, for all pixels:
//
//   m0 = (d0 - d2) g0                            y0 = m0 + m1 + m2
//   m1 = (d1 + d2) (g0 + g1 + g2) / 2            y1 = m1 - m2 - m3
//   m2 = (d2 - d1) (g0 - g1 + g2) / 2
//   m3 = (d1 - d3) g2
//
// As matrices: B^T holds the factors of d in m, G those of g in m, and A^T those of m in y.
//
// In two dimensions it is applied to the columns and to the rows. Then 2x2 output pixels take 16 multiplications for
// each input channel, in place of 36 (Lavin & Gray 2015, https://arxiv.org/abs/1509.09308, section 4.1). Here 2x2
// output pixels are called a tile of the image. A place is one of the 16 positions in a 4x4 array. Let d be the 4x4
// input pixels that a tile needs, g the 3x3 weights, y the tile's 2x2 output pixels, and let * multiply the numbers at
// the same place:
//
//   v = B^T d B          4x4, of each tile and input channel
//   u = G g G^T          4x4, of each input and output channel
//   m = v * u            4x4, of each tile and output channel: summed over the input channels
//   y = A^T m A          2x2, of each tile and output channel
//
// For each place, the sums are a product of matrices: m (tiles, Cout) is v (tiles, Cin) times u (Cin, Cout). These
// sixteen products are nearly all of the work.
//
// The gradients follow from these formulas. The input gradient is a convolution of dout with the weights turned by 180
// degrees, so it is computed by the same function. For the weight gradient, let dy be the gradient of a tile's 2x2
// output pixels. With v fixed each step from g to y is linear, and a gradient passes back through its transpose:
//
//   dm = A dy A^T        4x4, of each tile and output channel
//   du = v * dm          4x4, of each input and output channel: summed over the tiles
//   dg = G^T du G        3x3, of each input and output channel
//
// Results round differently from those of the plain form (convolve in reference.h). dev/pairs/conv3x3.py holds both
// forms to the same bounds: what does not fit here (see fits) takes the plain one.
namespace winograd {

constexpr int PLACES = 16;
constexpr float A[4][2] = {{1, 0}, {1, 1}, {1, -1}, {0, -1}};
constexpr float G[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
// A row of B^T adds two of four inputs, or subtracts them: d[first] + sign * d[second].
struct RowOfBT {
    int first, second;
    float sign;
};
constexpr RowOfBT BT[4] = {{0, 2, -1}, {1, 2, 1}, {2, 1, -1}, {1, 3, -1}};

// How many tiles a thread takes at a time. It is small, so that v and m of these tiles mostly stay in a core's caches.
// (TM and TN are in reference.h: the size of a tile of sums in registers.)
constexpr int CHUNK = 8 * TM;
// How many rows a place has in v and m. With CHUNK rows, the places would often lie a power of two bytes apart. Then
// all places of a tile would share a few sets of the nearest cache. So there is one row more, which nobody uses.
constexpr int ROWS = CHUNK + 1;

// Returns whether this form is used for a convolution. Tiles of 2x2 pixels need even sizes. With few channels the
// transforms would cost more than they save.
static inline bool fits(const ConvShape& s) {
    if (s.kernel != 3 || s.stride != 1 || s.upsample) return false;
    return s.H % 2 == 0 && s.W % 2 == 0 && s.C1 + s.C2 >= TN && s.Cout >= TN;
}

// The tiles of an image, and the pixels that they read and write.
struct Tiles {
    int image_tiles, image_pixels; // how many an image has
    // (image_tiles, 4, 4): the index of an input pixel within its image, or -1 if it lies outside of the image. The
    // 2x2 output pixels of a tile are in the middle: (1, 1), (1, 2), (2, 1), (2, 2).
    std::vector<int> sources;
    explicit Tiles(const ConvShape& s) {
        const int rows = s.H / 2, columns = s.W / 2;
        image_tiles = rows * columns;
        image_pixels = s.H * s.W;
        for (int tile = 0; tile < image_tiles; tile++)
            for (int place = 0; place < PLACES; place++) {
                const int h = tile / columns * 2 + place / 4 - 1;
                const int w = tile % columns * 2 + place % 4 - 1;
                const bool inside = h >= 0 && w >= 0 && h < s.H && w < s.W;
                sources.push_back(inside ? h * s.W + w : -1);
            }
    }
    // Returns the index of a pixel of a tile among the pixels of all images, or -1. tile: its index in all images.
    ptrdiff_t pixel(int tile, int row, int column) const {
        const int source = sources[(tile % image_tiles * 4 + row) * 4 + column];
        return source < 0 ? -1 : (ptrdiff_t)(tile / image_tiles) * image_pixels + source;
    }
};

// Pointers to the channels of a tile's 4x4 input pixels, in x (B, H, W, C). Those outside of the image are zeros.
struct TilePixels {
    const float* at[4][4];
    TilePixels(const Tiles& tiles, int tile, const float* x, int C, const float* zeros) {
        for (int row = 0; row < 4; row++)
            for (int column = 0; column < 4; column++) {
                const ptrdiff_t p = tiles.pixel(tile, row, column);
                at[row][column] = p < 0 ? zeros : x + p * C;
            }
    }
};

// v (C): B^T d B at one place, of the C channels of a tile's input pixels d
static inline void transform_inputs(float* v, int place, const TilePixels& d, int C) {
    const RowOfBT along_h = BT[place / 4];
    const RowOfBT along_w = BT[place % 4];
    const float* const d11 = d.at[along_h.first][along_w.first];
    const float* const d12 = d.at[along_h.first][along_w.second];
    const float* const d21 = d.at[along_h.second][along_w.first];
    const float* const d22 = d.at[along_h.second][along_w.second];
#pragma omp simd
    for (int c = 0; c < C; c++) {
        const float first = d11[c] + along_w.sign * d12[c];
        const float second = d21[c] + along_w.sign * d22[c];
        v[c] = first + along_h.sign * second;
    }
}

// dm (C): A dy A^T at one place, of the C channels of a tile. d: its pixels of dout, of which the four in the middle
// are dy.
static inline void transform_gradient(float* dm, int place, const TilePixels& d, int C) {
    const float* const along_h = A[place / 4];
    const float* const along_w = A[place % 4];
    const float* const dy00 = d.at[1][1];
    const float* const dy01 = d.at[1][2];
    const float* const dy10 = d.at[2][1];
    const float* const dy11 = d.at[2][2];
#pragma omp simd
    for (int c = 0; c < C; c++) {
        const float above = along_w[0] * dy00[c] + along_w[1] * dy01[c];
        const float below = along_w[0] * dy10[c] + along_w[1] * dy11[c];
        dm[c] = along_h[0] * above + along_h[1] * below;
    }
}

// u (PLACES, inputs, pitch) = G g G^T, of weights g (9, inputs, pitch). turned: their taps are taken from the last to
// the first.
static inline std::vector<float> transform_weights(const std::vector<float>& g, int inputs, int pitch, bool turned) {
    std::vector<float> u((size_t)PLACES * inputs * pitch);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < inputs; i++)
        for (int place = 0; place < PLACES; place++) {
            float* const sums = row_of(u.data(), (size_t)place * inputs + i, pitch);
            for (int tap = 0; tap < 9; tap++) {
                const float factor = G[place / 4][tap / 3] * G[place % 4][tap % 3];
                const float* const row = row_of(g.data(), (size_t)(turned ? 8 - tap : tap) * inputs + i, pitch);
#pragma omp simd
                for (int k = 0; k < pitch; k++) sums[k] += factor * row[k];
            }
        }
    return u;
}

// y (2, 2, TN) = A^T m A of TN channels. m: their values at place 0. The places lie `pitch` floats apart.
static inline void transform_outputs(float (&y)[2][2][TN], const float* m, size_t pitch) {
#pragma omp simd
    for (int k = 0; k < TN; k++) {
        float half[2][4]; // A^T m
        for (int j = 0; j < 4; j++) {
            const float m0 = m[j * pitch + k];
            const float m1 = m[(4 + j) * pitch + k];
            const float m2 = m[(8 + j) * pitch + k];
            const float m3 = m[(12 + j) * pitch + k];
            half[0][j] = m0 + m1 + m2;
            half[1][j] = m1 - m2 - m3;
        }
        for (int r = 0; r < 2; r++) {
            y[r][0][k] = half[r][0] + half[r][1] + half[r][2];
            y[r][1][k] = half[r][1] - half[r][2] - half[r][3];
        }
    }
}

// A convolution of [x1 | x2] (B, H, W, C1 + C2) with transformed weights u (transform_weights): calls
// store(pixel, co, sums) for each output pixel (its index in all images) and each TN output channels
// co ... co + TN - 1, of which the last ones may be beyond Cout.
template <class F>
static inline void convolve_transformed(const float* x1, const float* x2, const std::vector<float>& u,
                                        const ConvShape& s, F store) {
    const int Cin = s.C1 + s.C2;
    const int pitch = round_up(s.Cout, TN);
    const Tiles tiles(s);
    const int count = s.B * tiles.image_tiles;
    const std::vector<float> zeros(std::max(s.C1, s.C2)); // a pixel of the padding
#pragma omp parallel
    {
        std::vector<float> v((size_t)PLACES * ROWS * Cin);   // (PLACES, ROWS, Cin)
        std::vector<float> m((size_t)PLACES * ROWS * pitch); // (PLACES, ROWS, pitch)
#pragma omp for schedule(dynamic)
        for (int first = 0; first < count; first += CHUNK) {
            const int n = std::min(CHUNK, count - first);
            for (int t = 0; t < n; t++) {
                const TilePixels d1(tiles, first + t, x1, s.C1, zeros.data());
                const TilePixels d2(tiles, first + t, x2, s.C2, zeros.data());
                for (int place = 0; place < PLACES; place++) {
                    float* const row = row_of(v.data(), (size_t)place * ROWS + t, Cin);
                    transform_inputs(row, place, d1, s.C1);
                    if (s.C2) transform_inputs(row + s.C1, place, d2, s.C2);
                }
            }
            // Behind the last tile there are rows of an earlier chunk. What is computed from them is never read.
            for (int place = 0; place < PLACES; place++)
                for (int c = 0; c < pitch; c += TN)
                    for (int t = 0; t < n; t += TM) {
                        float acc[TM][TN] = {};
                        const float* rows[TM];
                        for (int i = 0; i < TM; i++) rows[i] = row_of(v.data(), (size_t)place * ROWS + t + i, Cin);
                        tile_multiply(acc, rows, row_of(u.data(), (size_t)place * Cin, pitch) + c, pitch, Cin);
                        for (int i = 0; i < TM; i++)
                            memcpy(row_of(m.data(), (size_t)place * ROWS + t + i, pitch) + c, acc[i], sizeof acc[i]);
                    }
            for (int t = 0; t < n; t++) {
                ptrdiff_t pixels[4];
                for (int i = 0; i < 4; i++) pixels[i] = tiles.pixel(first + t, 1 + i / 2, 1 + i % 2);
                for (int c = 0; c < s.Cout; c += TN) {
                    float y[2][2][TN];
                    transform_outputs(y, row_of(m.data(), t, pitch) + c, (size_t)ROWS * pitch);
                    for (int i = 0; i < 4; i++) store(pixels[i], c, y[i / 2][i % 2]);
                }
            }
        }
    }
}

// The same with weights (Cout, 9, C1 + C2).
template <class F>
static inline void convolve(const float* x1, const float* x2, const float* weight, const ConvShape& s, F store) {
    const int Cin = s.C1 + s.C2;
    const std::vector<float> g = conv_weight_by_input(weight, s.Cout, 9, Cin);
    convolve_transformed(x1, x2, transform_weights(g, Cin, round_up(s.Cout, TN), false), s, store);
}

// The input gradient from dout (B, H, W, Cout): calls store(pixel, ci, sums) for each input pixel (its index in all
// images) and each TN input channels ci ... ci + TN - 1, of which the last ones may be beyond Cin. It is the
// convolution of dout with the turned weights: the taps are taken from the last to the first, and input and output
// channels change places.
template <class F>
static inline void convolve_back(const float* dout, const float* weight, const ConvShape& s, F store) {
    const int Cin = s.C1 + s.C2;
    const std::vector<float> g = conv_weight_by_output(weight, s.Cout, 9, Cin);
    ConvShape back = s;
    back.C1 = s.Cout;
    back.C2 = 0;
    back.Cout = Cin;
    convolve_transformed(dout, nullptr, transform_weights(g, s.Cout, round_up(Cin, TN), true), back, store);
}

// dweight (Cout, 9, Cin) = G^T du G. du (parts, PLACES, outputs, inputs) is added up over the parts, in their order.
// outputs and inputs: Cout and Cin with padding.
static inline void fold_gradient(float* dweight, const std::vector<float>& du, int parts, int Cout, int Cin,
                                 int outputs, int inputs) {
#pragma omp parallel for schedule(static)
    for (int co = 0; co < Cout; co++) {
        std::vector<float> dg(9 * inputs); // (9, inputs)
        for (int place = 0; place < PLACES; place++) {
            std::vector<float> total(inputs);
            for (int part = 0; part < parts; part++) {
                const float* const row = row_of(du.data(), ((size_t)part * PLACES + place) * outputs + co, inputs);
                for (int ci = 0; ci < inputs; ci++) total[ci] += row[ci];
            }
            for (int tap = 0; tap < 9; tap++) {
                const float factor = G[place / 4][tap / 3] * G[place % 4][tap % 3];
                float* const row = row_of(dg.data(), tap, inputs);
                for (int ci = 0; ci < inputs; ci++) row[ci] += factor * total[ci];
            }
        }
        for (int tap = 0; tap < 9; tap++)
            std::copy_n(row_of(dg.data(), tap, inputs), Cin, row_of(dweight, (size_t)co * 9 + tap, Cin));
    }
}

// dweight (Cout, 9, Cin) from dout (B, H, W, Cout) and [x1 | x2] (B, H, W, C1 + C2). The work is cut
// into 16 pieces, each of one row of the 4x4 places and one part of the tiles: part p has the chunks p, p + PARTS and
// so on. The parts are added up in their order, so the result has the same bits with any number of threads.
static inline void backward_weight(float* dweight, const float* dout, const float* x1, const float* x2,
                                   const ConvShape& s) {
    constexpr int PARTS = 4;
    const int Cin = s.C1 + s.C2;
    const int inputs = round_up(Cin, TN);
    const int outputs = round_up(s.Cout, TM);
    const Tiles tiles(s);
    const int count = s.B * tiles.image_tiles;
    const std::vector<float> zeros(std::max(s.C1, s.C2)); // a pixel of the padding
    const size_t place_size = (size_t)outputs * inputs;
    std::vector<float> du(PARTS * PLACES * place_size); // (PARTS, PLACES, outputs, inputs): outputs are the rows
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int part = 0; part < PARTS; part++)
        for (int row = 0; row < 4; row++) {
            std::vector<float> v((size_t)4 * ROWS * inputs);   // (4, ROWS, inputs)
            std::vector<float> dm((size_t)4 * ROWS * outputs); // (4, ROWS, outputs)
            for (int first = part * CHUNK; first < count; first += PARTS * CHUNK) {
                const int n = std::min(CHUNK, count - first);
                for (int t = 0; t < n; t++) {
                    const TilePixels d1(tiles, first + t, x1, s.C1, zeros.data());
                    const TilePixels d2(tiles, first + t, x2, s.C2, zeros.data());
                    const TilePixels d(tiles, first + t, dout, s.Cout, nullptr);
                    for (int column = 0; column < 4; column++) {
                        const int place = row * 4 + column;
                        float* const v_row = row_of(v.data(), (size_t)column * ROWS + t, inputs);
                        transform_inputs(v_row, place, d1, s.C1);
                        if (s.C2) transform_inputs(v_row + s.C1, place, d2, s.C2);
                        transform_gradient(row_of(dm.data(), (size_t)column * ROWS + t, outputs), place, d, s.Cout);
                    }
                }
                for (int column = 0; column < 4; column++) {
                    float* const sums = du.data() + (part * PLACES + row * 4 + column) * place_size;
                    const float* const v_place = row_of(v.data(), (size_t)column * ROWS, inputs);
                    const float* const dm_place = row_of(dm.data(), (size_t)column * ROWS, outputs);
                    for (int co = 0; co < outputs; co += TM)
                        for (int ci = 0; ci < inputs; ci += TN) {
                            float acc[TM][TN] = {};
                            tile_outer(acc, dm_place + co, outputs, v_place + ci, inputs, n);
                            add_tile(row_of(sums, co, inputs) + ci, inputs, acc);
                        }
                }
            }
        }
    fold_gradient(dweight, du, PARTS, s.Cout, Cin, outputs, inputs);
}

} // namespace winograd
