// blocks.cu - train_unet.cu's building blocks for Hopper alone: tiles come by TMA, two warpgroups add up their pieces, put the sums together where
// the last piece was, and warps of their own store them; every ring, every number of tiles and pieces. test_blocks.py runs it, also under compute-sanitizer.
#define TRAIN_UNET_NO_MAIN
#include "../../train_unet.cu"

constexpr int VALUES = 256; // of a piece: 1 KB

struct Tiles {
    const float* in; // (tiles, pieces, VALUES)
    float* out;      // (tiles, VALUES): sums over the pieces
    int tiles_h, tiles_w, tiles, pieces, ring;
};

// OWNERS = 2: the warpgroups take turns with tiles, as in conv_tiles with resident weights; 1: a stage has a piece for each.
template <int OWNERS> static __global__ void __launch_bounds__(384, 1) blocks_kernel(const Tiles p) {
#if __CUDA_ARCH__ == 900
    constexpr int UNIT = OWNERS == 2 ? 1 : 2;
    SharedMemory shared(128);
    Pipeline<UNIT * 1024, OWNERS> pieces(shared, p.ring, UNIT);
    Results results(shared, p.ring, 0, 4);
    ready(pieces, results);
    const int warp = uniform(threadIdx.x >> 5), warpgroup = warp >> 2;
    auto walk = [&](int g, int step) {
        const int first = OWNERS == 2 ? blockIdx.x + g * gridDim.x : 2 * blockIdx.x + g;
        return TileWalk(p.tiles_h, p.tiles_w, first, step * gridDim.x, ceil_div(p.tiles, UNIT) * UNIT);
    };
    auto number = [&](const TileWalk& t) { return (t.n * p.tiles_h + t.h) * p.tiles_w + t.w; };
    auto half = [&](int g) { return OWNERS == 2 ? 0 : g * 1024; };
    const int others = OWNERS == 2 ? p.pieces : 0;

    if (warp == 8) {
        if (threadIdx.x & 31) return;
        TileWalk tile[2] = {walk(0, UNIT), walk(1, UNIT)};
        for (int owner = 0; tile[0]; tile[0].next(), tile[1].next(), owner ^= 1)
            for (int i = 0; i < p.pieces; i++) {
                const Stage to = pieces.acquire(owner);
                mbarrier_expect(to.full, UNIT * 1024);
                for (int g = 0; g < UNIT; g++) { // a partner may lie outside: then the first tile's again
                    const int t = min(number(tile[g]), p.tiles - 1);
                    bulk_load(to.address + g * 1024, p.in + ((size_t)t * p.pieces + i) * VALUES, 1024, to.full);
                }
            }
        return;
    }
    if (warp > 8) { // stores
        const int g = warp - 9;
        if (g > 1) return;
        results.pass_over(g * others + p.pieces - 1);
        for (TileWalk tile = walk(g, 2); tile; tile.next(), results.pass_over(others + p.pieces - 1)) {
            results.arrived(g);
            const int stage = results.hand_over(), lane = threadIdx.x & 31;
            for (int i = lane * 4; number(tile) < p.tiles && i < VALUES; i += 128) {
                float v[4];
                unpack<float>(v, load_shared(pieces.stage(stage).address + half(g) + i * 4));
                for (int k = 0; k < 4; k++) p.out[(size_t)number(tile) * VALUES + i + k] = v[k];
            }
            __syncwarp();
            if (lane == 0) pieces.free(stage);
        }
        return;
    }
    const int own = half(warpgroup) + (threadIdx.x & 127) * 8; // a thread: two values
    pieces.pass_over(warpgroup * others);
    const Turn<OWNERS == 2> turn(warpgroup);
    for (TileWalk tile = walk(warpgroup, 2); tile; tile.next()) {
        float2 sum = make_float2(0, 0);
        uint32_t at = 0;
        turn.wait();
        for (int i = 0; i < p.pieces; i++) {
            at = pieces.arrived(warpgroup) + own;
            float2 v;
            asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
            sum.x += v.x, sum.y += v.y;
            warps_sync(2 + warpgroup, 128); // all have read it
            if (i + 1 < p.pieces) pieces.release();
        }
        turn.pass();
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(sum.x), "f"(sum.y) : "memory");
        warp_stored(results.stage(pieces.hand_over(), warpgroup).full);
        pieces.pass_over(others);
    }
#endif
}

template <int OWNERS> static int check(int images, int tiles_h, int tiles_w, int pieces, int ring, int blocks) {
    const int tiles = images * tiles_h * tiles_w, bytes = 1024 + 128 * 8 + ring * 2048;
    std::vector<float> in((size_t)tiles * pieces * VALUES), out((size_t)tiles * VALUES);
    for (size_t i = 0; i < in.size(); i++) in[i] = (float)(i * 2654435761u % 1021); // sums are exact
    float *x, *y;
    CUDA_CHECK(cudaMalloc(&x, in.size() * sizeof(float)));
    CUDA_CHECK(cudaMalloc(&y, out.size() * sizeof(float)));
    CUDA_CHECK(cudaMemcpy(x, in.data(), in.size() * sizeof(float), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaFuncSetAttribute(blocks_kernel<OWNERS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    blocks_kernel<OWNERS><<<blocks, 384, bytes>>>(Tiles{x, y, tiles_h, tiles_w, tiles, pieces, ring});
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(out.data(), y, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(y));
    int wrong = 0;
    for (size_t i = 0; i < out.size(); i++) {
        float sum = 0;
        for (int k = 0; k < pieces; k++) sum += in[(i / VALUES * pieces + k) * VALUES + i % VALUES];
        wrong += out[i] != sum;
    }
    if (wrong)
        printf("OWNERS %d, %d x %d x %d tiles, %d pieces, ring %d, %d blocks: %d wrong\n", OWNERS, images, tiles_h,
               tiles_w, pieces, ring, blocks, wrong);
    return wrong;
}

int main() {
    int wrong = 0;
    for (int pieces : {1, 2, 5})
        for (int ring : {2, 3, 7})
            for (int blocks : {1, 3}) {
                wrong += check<1>(2, 3, 5, pieces, ring, blocks) + check<2>(2, 3, 5, pieces, ring, blocks);
                wrong += check<1>(1, 1, 1, pieces, ring, blocks) + check<2>(1, 1, 1, pieces, ring, blocks);
            }
    return wrong > 0;
}
