// bench_data FILE BATCH STEPS MS COLD HOW: how long the host waits for each of STEPS batches, while a device is busy MS with each step.
// HOW: ahead = load_batch, as it ships; asked = the images of a batch asked for when they are wanted; faults = from a memory map, page by page.
// COLD: 1 = the file's pages are dropped from memory first. Prints the milliseconds of each batch. bench_data.py compiles and runs it.
#define TRAIN_UNET_NO_MAIN
#include <sys/mman.h>

#include "../../train_unet.cu"

int main(int, char** argv) {
    const int B = atoi(argv[2]), steps = atoi(argv[3]);
    const double step_ms = atof(argv[4]);
    const std::string how = argv[6];
    Dataset data = open_dataset(argv[1]);
    Config config;
    Upload batch = make_upload(data.batch_bytes(B, config));
    config.batch_size = B, config.seed = 1;
    const auto* map = (const uint8_t*)mmap(nullptr, data.image_at(data.count), PROT_READ, MAP_SHARED, data.file, 0);
    if (argv[5][0] == '1') posix_fadvise(data.file, 0, 0, POSIX_FADV_DONTNEED);
    for (int64_t step = 0; step < steps; step++) {
        const double start = now();
        for (int b = 0; b < B && how != "ahead"; b++) {
            const int64_t g = step * B + b, i = permuted_index(1, g % data.count, g / data.count, data.count);
            if (how == "faults")
                memcpy(batch.host + b * data.image_bytes(), map + data.image_at(i), data.image_bytes());
            else posix_fadvise(data.file, (off_t)data.image_at(i), (off_t)data.image_bytes(), POSIX_FADV_WILLNEED);
        }
        if (how == "asked") data.asked = INT64_MAX; // load_batch asks for nothing more
        if (how != "faults" && !load_batch(&batch, &data, config, true, step * B, B)) die("%s", data.error.c_str());
        const double ms = (now() - start) * 1e3;
        printf("%.3f\n", ms);
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(std::max(0.0, step_ms - ms)));
    }
}
