// What a user or an attacker may hand to train_unet, by libFuzzer with AddressSanitizer and UBSan: `make fuzz`, or
//   FUZZ_TARGET=model clang++ ... && ./fuzz corpus      the target is one of
//   model   model files, sampled from and resumed: headers, and whole files with arrays of the size that their model has
//   data    data files
//   log     log.csv of the folder that a run resumes in, and the loss curve drawn of it
//   flags   command lines
// Magic numbers, sizes and checksums are put right after each mutation (unless the first byte says not to), so that mutations reach what lies beyond
// them. `die` throws instead of ending the process; what the program leaves to the end of the process is freed after each input.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <vector>

struct Exit {
    int code;
};
static std::set<void*> blocks;
static std::set<int> descriptors;
static size_t block_bytes = 0;

static int fuzz_memalign(void** p, size_t align, size_t n) {
    if ((block_bytes += n) > (size_t)256 << 20) return ENOMEM; // a small machine
    const int error = posix_memalign(p, align, n);
    if (!error) blocks.insert(*p);
    return error;
}
static void fuzz_free(void* p) {
    blocks.erase(p);
    free(p);
}
static int fuzz_open(const char* name, int how, int mode = 0) {
    const int fd = open(name, how, mode);
    if (fd >= 0) descriptors.insert(fd);
    return fd;
}
static int fuzz_close(int fd) {
    descriptors.erase(fd);
    return close(fd);
}
#define open fuzz_open
#define close fuzz_close
#define exit(code) \
    throw Exit { code }
#define posix_memalign fuzz_memalign
#define free fuzz_free
#define TRAIN_UNET_NO_MAIN
#include "../../train_unet.cu"
#undef open
#undef close
#undef exit
#undef posix_memalign
#undef free

static int file = -1;            // in memory; the program reads it by this path
static std::string path, folder; // folder: of a run's log

static void write_file(const std::vector<uint8_t>& bytes) {
    if (ftruncate(file, 0) || pwrite(file, bytes.data(), bytes.size(), 0) != (ssize_t)bytes.size()) abort();
}

static void put_crc(std::vector<uint8_t>* bytes, int slot, size_t from) {
    memset(&(*bytes)[slot * 4], 0, 4);
    const uint32_t crc = crc32(0, bytes->data() + from, bytes->size() - from);
    memcpy(&(*bytes)[slot * 4], &crc, 4);
}

// A file of this size: 1024 bytes of header, then the rest of the input over and over.
static std::vector<uint8_t> file_of(const Header& h, const uint8_t* body, size_t n, size_t size) {
    std::vector<uint8_t> bytes(size);
    memcpy(bytes.data(), h.slot, std::min<size_t>(size, 1024));
    if (n && size > 1024) memcpy(&bytes[1024], body, std::min(n, size - 1024));
    for (size_t have = n; n && 1024 + have < size; have *= 2)
        memcpy(&bytes[1024 + have], &bytes[1024], std::min(have, size - 1024 - have));
    return bytes;
}

// Sizes, labels (most of them) and checksums put right if it is to be so.
static std::vector<uint8_t> data_file(Header h, const uint8_t* body, size_t n, bool right) {
    const bool ours = h.slot[0] != UNET_CU_DATA_MAGIC;
    if (!right) return file_of(h, body, n, 1024 + n);
    if (ours) h.slot[0] = DATA_MAGIC, h.slot[1] = h.slot[1] == 1 ? 1 : 2;
    const int32_t* s = h.slot + (ours ? 2 : 1);
    const bool table = ours && h.slot[1] == 2, labels = ours && h.slot[6];
    const double image = (double)s[1] * s[2] * s[3] * (ours ? h.slot[7] : 4), all_images = image * s[0];
    const double values = ours ? 4.0 * s[0] * h.slot[10] + h.slot[11] : 0; // numbers of the images, and their names
    const bool small = s[0] >= 0 && image >= 0 && values >= 0 && all_images + 8.0 * s[0] + values < 1 << 20;
    if (!small) return file_of(h, body, n, 1024 + n);
    const size_t count = (size_t)s[0], behind = 1024 + (size_t)all_images;
    std::vector<uint8_t> all = file_of(h, body, n, behind + 4 * count * (labels + table) + (size_t)values);
    auto put = [&](size_t at, uint32_t v) { memcpy(&all[at], &v, 4); };
    for (size_t i = 0; labels && h.slot[6] > 0 && i < count; i++)
        if (all[behind + 4 * i] < 0xF0) put(behind + 4 * i, (uint32_t)(i % (size_t)h.slot[6]));
    for (size_t i = 0; table && i < count; i++)
        put(behind + 4 * (labels * count + i) + (size_t)values,
            crc32(0, &all[1024] + i * (size_t)image, (size_t)image));
    const size_t from = table ? behind : 1024;
    put(36, crc32(0, all.data() + from, all.size() - from));
    put(32, 0);
    put(32, crc32(0, all.data(), 1024));
    return all;
}

static void fuzz_data(const Header& h, const uint8_t* body, size_t n, bool right) {
    write_file(data_file(h, body, n, right));
    Dataset d = open_dataset(path);
    Config c, batches;
    batches.batch_size = 3, batches.class_dropout = 0.5f, batches.num_classes = 2;
    batches.cond_dim = d.K;
    open_pictures(&d, "cond_file", path); // each image is conditioned on itself
    batches.cond_channels = d.C;
    if (d.image_bytes() < 1 << 16) {
        Upload batch = make_upload(d.batch_bytes(3, batches));
        for (int64_t first : {(int64_t)0, (int64_t)7, (int64_t)1 << 33})
            load_batch(&batch, &d, batches, true, first, 3);
        device_free(batch.device);
    }
    c.channel_mult = "1";
    c.data_file = path;
    c.cond_file = path;
    take_data_shape(&c, &d, ModelFile(), "");
}

// Of one input in sixteen a whole file, with arrays, which takes a hundred times as long as its header alone.
static void fuzz_model(Header h, const uint8_t* body, size_t n, bool right) {
    Config c;
    auto take = [&](const ModelFile& m) { // as main does
        c = Config();
        apply_preset(&c, "fashion32");
        const bool resume = m.has(HAS_TRAINING | HAS_EMA);
        check_lists(m); // as open_model does
        take_model_file(&c, m, resume);
        take_rescale_learned_sigmas(&c);
        const std::string error = check_model(&c);
        if (!error.empty()) die("%s", error.c_str());
        check_run(&c, "");
        Dataset d;
        d.count = m.header.get<int64_t>(SLOT_IMAGES);
        d.header_crc = (uint32_t)m.header.slot[SLOT_DATA_CRC];
        if (resume) check_resume(c, m, d);
        return c.num_channels * c.mult.back() <= 128 &&
               c.mult.size() * c.num_res_blocks <= 8; // small enough to go on with
    };
    ModelFile m;
    if (right) h.slot[0] = MODEL_MAGIC, h.slot[1] = 1;
    m.header = h;
    m.header.slot[SLOT_EMAS] = std::clamp(h.slot[SLOT_EMAS], 0, MORE_EMAS); // which open_model checks
    m.path = path;
    const bool small = !right || take(m);
    const size_t count = right ? build_unet(c).num_params : n / 4;
    if (!small) return;
    if (crc32(0, h.slot, 1024) & 15 || count > 1 << 20) return;
    const int arrays = 1 + m.emas() + (h.slot[SLOT_CONTENTS] & HAS_TRAINING ? 2 : 0);
    if (right) h.set(SLOT_PARAMS, count);
    std::vector<uint8_t> all = file_of(h, body, n, 1024 + (right ? (arrays * count + m.history()) * 4 : n));
    if (right) put_crc(&all, SLOT_CRC, 0);
    write_file(all);
    m = open_model(path);
    if (!take(m)) return;
    UNet net = build_unet(c);
    check_size(m, net);
    float* params = device_alloc<float>(net.flat_size);
    for (int k = 0; k < arrays; k++) copy_slice(params, read_array(m, net, k), slice_of(net.flat_size));
    c.timestep_respacing = "1";
    if (c.diffusion_steps > 1000 || net.flops > 3e6 || !check_model(&c).empty()) return;
    make_objective(c);
    plan_memory(&net, c.guided() ? 2 : 1, false);
    Sampler sampler = make_sampler(c, net.B);
    sampler.pictures.assign((size_t)c.H * c.W * c.cond_channels, 0.25f); // of one image
    sample_images(&net, Weights{params, (act*)params}, &sampler, 1);
}

static void fuzz_log(const uint8_t* bytes, size_t n) {
    Run run;
    run.config.output_dir = folder;
    run.first_step = n ? bytes[0] * 1000 : 0;
    FILE* f = fopen((folder + "/log.csv").c_str(), "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) abort();
    open_log(&run);
    close(run.log_file);
}

// Words end in a newline or a zero.
static void fuzz_flags(const uint8_t* bytes, size_t n) {
    std::vector<std::string> words{"train_unet", ""};
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] && bytes[i] != '\n') words.back() += (char)bytes[i];
        else words.push_back("");
    }
    words.pop_back();
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    Config c;
    parse_command_line(&c, (int)argv.size(), argv.data());
    take_aliases(&c);
    apply_preset(&c, c.preset.empty() ? "fashion32" : c.preset);
    take_rescale_learned_sigmas(&c);
    check_run(&c, "");
    const std::string error = check_model(&c);
    if (!error.empty()) die("%s", error.c_str());
    if (c.diffusion_steps <= 1000) plan_sampler(c);
    model_header(c, 0, 0);
    if (c.num_channels <= 256 && c.num_res_blocks <= 4) build_unet(c);
}

// What mutations start from: a file each in the corpus folder.
static void write_seeds(const std::string& target, const std::string& corpus) {
    int count = 0;
    auto seed = [&](const std::string& bytes) {
        FILE* f = fopen((corpus + "/seed" + std::to_string(count++)).c_str(), "wb");
        if (!f || fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || fclose(f)) abort();
    };
    const std::string body("\0\0\x80\x3c\0\0\0\xbd\x12\x34\x56\x3d", 12); // small floats
    const char* models[] = {"",
                            "--objective edm",
                            "--objective flow",
                            "--learn_sigma True --predict v --min_snr_gamma 5",
                            "--use_scale_shift_norm True --resblock_updown True",
                            "--class_cond True --num_classes 3 --class_dropout 0.1",
                            "--cond_dim 3 --class_dropout 0.1 --augment 0.12 --objective edm",
                            "--cond_channels 2 --cond_dropout 0.1",
                            "--cond lowres:2 --cond_noise 0.2 --objective edm",
                            "--cond gray --in_channels 3 --class_cond True --num_classes 3",
                            "--cond mask --cond_dim 2 --learn_sigma True",
                            "--channel_mult 1,1 --attention_resolutions 2 --conv_resample False",
                            "--num_head_channels -1 --num_heads 2 --use_new_attention_order False"};
    for (const char* more : models) {
        Config c;
        std::istringstream words(
            std::string(
                "--image_size 4 --in_channels 1 --num_channels 32 --channel_mult 1 --num_res_blocks 1 --attention_resolutions 4 ") +
            more);
        std::string name, value, line;
        while (words >> name >> value)
            set_flag(&c, *find_flag(name.substr(2)), value), line += name + "\n" + value + "\n";
        if (!check_model(&c).empty()) abort();
        if (target == "flags") seed(line);
        if (target != "model") continue;
        Header h = model_header(c, HAS_EMA | HAS_TRAINING, 5);
        const Header weights = model_header(c, 0, 0);
        seed('\1' + std::string((char*)weights.slot, 1024) + body);
        const Guard guard{5, 0.5, 0.1, 0.5, 0.1};
        memcpy(&h.slot[SLOT_GUARD], &guard, sizeof guard);
        h.slot[SLOT_GUARD_KIND] = 1;
        h.slot[SLOT_UPDATES] = 5;
        strcpy((char*)&h.slot[SLOT_PATH], "data/fashion32.bin");
        if (c.cond_channels) h.slot[SLOT_COND_CRC] = 0x1234;
        seed('\1' + std::string((char*)h.slot, 1024) + body);
    }
    if (target == "data") {
        for (int kind = 0; kind < 8; kind++) {
            const int version = 1 + kind % 2, classes = kind & 2 ? 3 : 0, bytes = kind & 4 ? 4 : 1;
            Header h;
            const int32_t slots[8] = {DATA_MAGIC, version, 5, 1, 8, 8, classes, bytes};
            memcpy(h.slot, slots, sizeof slots);
            seed('\1' + std::string((char*)h.slot, 1024) + body);
            h.slot[DATA_SLOT_VALUES] = 2;
            h.slot[DATA_SLOT_NAMES] = 12;
            seed('\1' + std::string((char*)h.slot, 1024) + body);
        }
        Header h;
        const int32_t slots[5] = {UNET_CU_DATA_MAGIC, 5, 1, 8, 8};
        memcpy(h.slot, slots, sizeof slots);
        seed('\1' + std::string((char*)h.slot, 1024) + body);
    }
    if (target == "log") {
        seed("\1step,loss,lr\n1,0.5,0.001,1.5,4.2,0.5,,0.25,0.75,\n2,0.25,0.001,1,4,,,,,0.3\n");
        seed("\xff"
             "step,loss,lr\n1,nan,0.001,inf,4.2,0.5,,0.25,0.75,\n250000,1e-300,0.001,1,4,,,,,1e300\n3,0.1");
    }
    if (target == "flags")
        for (const auto& [name, settings] : PRESETS) {
            std::string line = std::string("--preset ") + name + " " + settings;
            std::replace(line.begin(), line.end(), ' ', '\n');
            seed(line + "\n");
        }
    Config c;
    for (const Flag& f : FLAGS)
        if (target == "flags") seed(text("--%s=%s\n", f.name, flag_value(c, f).c_str()));
}

static std::string target = "model";
constexpr double LONGEST =
    2; // seconds of a processor's time for an input; the sanitizers make all several times slower

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    if (getenv("FUZZ_TARGET")) target = getenv("FUZZ_TARGET");
    file = memfd_create("fuzz", 0);
    path = "/proc/self/fd/" + std::to_string(file);
    folder = "/dev/shm/fuzz." + std::to_string(getpid());
    std::filesystem::create_directories(folder);
    atexit([] { std::filesystem::remove_all(folder); });
    const char* corpus = (*argv)[*argc - 1];
    if (std::filesystem::is_directory(corpus) && std::filesystem::is_empty(corpus)) write_seeds(target, corpus);
    return 0;
}

// Of this process, in seconds: a busy machine does not make it longer, as it does the time that libFuzzer measures.
static double processor_time() { return (double)clock() / CLOCKS_PER_SEC; }

[[noreturn]] __attribute__((noinline)) static void reading_took_too_long() { abort(); } // libFuzzer says where

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t n) {
    const double begun = processor_time();
    Header h;
    memcpy(h.slot, n ? bytes + 1 : bytes, std::min<size_t>(n ? n - 1 : 0, 1024));
    const uint8_t* body = bytes + std::min<size_t>(n, 1025);
    const size_t rest = n - std::min<size_t>(n, 1025);
    try {
        if (target == "model") fuzz_model(h, body, rest, n && bytes[0]);
        else if (target == "data") fuzz_data(h, body, rest, n && bytes[0]);
        else if (target == "log") fuzz_log(bytes, n);
        else if (target == "flags") fuzz_flags(bytes, n);
        else abort();
    } catch (Exit) {}
    for (void* p : blocks) free(p);
    for (int fd : descriptors) close(fd);
    descriptors.clear();
    blocks.clear();
    block_bytes = 0;
    if (processor_time() - begun > LONGEST) reading_took_too_long();
    return 0;
}
