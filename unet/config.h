// config.h - flags, to Config; presets, help, what can work and what cannot.
#pragma once
#include "interface.h"

#ifdef __CUDACC__
// The presets that are used if the command line has no --preset (see apply_default_preset).
static const char* const PRESET_32 = "photos32";       // for images of 32x32, which those of DEFAULT_DATA are
static const char* const PRESET_FROM_32 = "quick64";   // for larger images, if their sides can be halved often enough
static const char* const PRESET_ELSE = "unet64";       // for all others
static const char* const PRESET_TO_SAMPLE = "quick64"; // --sample has no data: how to draw, and how many at a time
#else
static const char* const PRESET_32 = "quick32";
static const char* const PRESET_FROM_32 = "emoji64";
static const char* const PRESET_ELSE = "fashion32";
static const char* const PRESET_TO_SAMPLE = "quick32";
#endif

// Flags have guided-diffusion's names. The command line has priority over a preset.
// The main functions run in this order: parse_command_line, take_aliases, apply_preset, then take_model_file if there
// is a model file. Its values replace those of the preset, but not those of the command line. In a run, check_run and
// take_data_shape are next (run/settings.h). take_data_shape takes what is still open from the data, and calls
// check_model. With --sample there is no training data, and run_program calls check_model.

constexpr double BIG = 1e9;
struct Config;

// The commit of the sources from which this program was made. The Makefile defines it if they lie in a git checkout.
#ifndef TRAIN_UNET_COMMIT
#define TRAIN_UNET_COMMIT
#endif
#define AS_STRING(word) #word
#define STRING_OF(macro) AS_STRING(macro)
static const char PROGRAM_COMMIT[] = STRING_OF(TRAIN_UNET_COMMIT);

// One flag. Its values are from low to high if it is a number, and one of `choices`, "a|b", if it is a word.
struct Flag {
    const char* name;
    std::variant<int Config::*, int64_t Config::*, float Config::*, bool Config::*, std::string Config::*> member;
    int slot;               // its place in a model file's header (run/model_file.h); 0: none
    bool free;              // the command line may change a model file's value (take_from_file)
    const char* objectives; // the only objectives that use the flag, "a|b"; "": all objectives use it
    const char* heading;    // the heading above the flag in --help
    const char* help;
    double low = 0, high = 0;
    const char* choices = "";

    // The flag's value in this configuration; null if the flag's type is not T.
    template <class T, class C> auto* at(C& config) const {
        const auto* m = std::get_if<T Config::*>(&member);
        return m ? &(config.**m) : nullptr;
    }
};

// unet/flags.h fills these variables before main runs: each of its rows becomes the initialiser of a static member.
inline std::vector<Flag> FLAGS;
inline std::map<std::string, std::string> PRESETS; // the flags that each preset sets
inline const char* heading = "";                   // the heading of the rows that follow
inline const char* objectives = "";                // the objectives that use the rows that follow

// These macros turn the rows of unet/flags.h into members of Config. FLAG(int, sample, 0, "draw ...") makes
//   int sample = 0;                                 a member of Config
//   static inline const bool sample_row = (...);    another member, whose initialiser adds the row to FLAGS
// Static members are initialised in the order of the file, so heading and objectives have been set by the rows above.
#define STATIC_MEMBER(...) static inline const __VA_ARGS__
#define FLAG_ROW(slot, free, type, name, value, ...) \
    type name = value;                               \
    STATIC_MEMBER(bool name##_row =                  \
                      (FLAGS.push_back({#name, &Config::name, slot, free, objectives, heading, __VA_ARGS__}), true))
#define FLAG(...) FLAG_ROW(0, false, __VA_ARGS__)
#define SAVED(slot, ...) FLAG_ROW(slot, false, __VA_ARGS__)
#define FREE(slot, ...) FLAG_ROW(slot, true, __VA_ARGS__)
#define WORDS(choices) 0, 0, choices
#define HEADING(name, title) STATIC_MEMBER(char* const name##_flags = heading = title)
#define OBJECTIVES(name, words) STATIC_MEMBER(char* const name = objectives = words)
#define TEXT(name, words) STATIC_MEMBER(std::string name = words)
#define PRESET_TEXT(flags, ...) std::string(flags) __VA_OPT__(+" " + __VA_ARGS__)
#define PRESETS_SHARE(name, ...) STATIC_MEMBER(std::string name = PRESET_TEXT(__VA_ARGS__))
#define PRESET(name, ...) STATIC_MEMBER(bool name##_preset = PRESETS.emplace(#name, PRESET_TEXT(__VA_ARGS__)).second)

struct Config {
    using string = std::string;
    using pixels = string; // the size of an image: 64, or 48x64 (height x width)
    using ints = string;   // numbers with commas between them
    using floats = string;
    using names = string;
#include "flags.h"

    // Computed from flags that are text (parse_model, check_model, check_run). The comment names the flag.
    int H = 64, W = 64;                           // image_size
    std::vector<float> mult;                      // channel_mult
    std::vector<float> attention_heights;         // attention_resolutions
    std::vector<float> emas;                      // ema_rate
    std::vector<float> class_list;                // classes: their numbers
    std::vector<float> value_rows;                // values: rows of cond_dim numbers
    PictureKind picture_kind = PictureKind::FILE; // cond
    int picture_factor = 0;                       // cond: the K of lowres:K, which shrinks images to height / K

    std::vector<string> class_names; // of the model's classes, by their numbers, from its file or the data; or empty

    // The names of the flags that the command line, a model file or the preset has set: the first of these decides.
    std::set<string> on_command_line, by_file, by_preset;
    bool default_preset = false; // the program has chosen the preset, not the user
    bool data_decides = false;   // --init: images and classes are the data's, and not the model file's (adapt_to_data)
    bool given(const string& flag) const { return on_command_line.contains(flag); }
    bool fixed(const string& flag) const { return given(flag) || by_file.contains(flag); } // a preset can't change it
    bool chosen(const string& flag) const { return fixed(flag) || by_preset.contains(flag); }

    // A factor such as 1.6666666 stands for 5/3, and 1.6666666 * 96 is slightly less than 160. So the product is
    // rounded.
    int channels(size_t level) const { return (int)std::lround((double)mult[level] * num_channels); }
    // Whether some block can hear the embedding, which tells of t, class and numbers. Where it is only added, a norm of
    // 32 groups follows, and takes it away again if a group is one channel.
    bool can_hear() const {
        bool is_wide = false;
        for (size_t level = 0; level < mult.size(); level++) is_wide = is_wide || channels(level) > 32;
        return use_scale_shift_norm || is_wide;
    }
    int out_channels() const { return learn_sigma ? 2 * in_channels : in_channels; }
    int patch() const { return std::max(patch_size, 1); }
    int height(size_t level) const { return H / patch() >> level; } // each level after the first halves the height
    bool has_attention(size_t level) const { return std::ranges::count(attention_heights, height(level)) > 0; }

    // images that a process computes at a time in training
    int micro() const { return microbatch > 0 ? microbatch : batch_size / world.size; }
    bool null_class() const { return class_cond && class_dropout > 0; } // the class table's last row means "no class"
    bool learned_variance() const { return learn_sigma && (vlb_weight > 0 || use_kl); }
    bool guided() const { return guidance_scale != 1; } // some of the sampler's steps may be guided (device_step)
    int most_bad_steps() const { return max_bad_steps ? max_bad_steps : Config{}.max_bad_steps; } // in a row
    bool muon() const { return optimizer == "muon"; }
    // the numbers that the network is told of an image: its own, and those of its augmentation
    int num_values() const { return cond_dim + (augment > 0 ? AUGMENT_NUMBERS : 0); }
    bool can_be_guided() const { return (class_dropout > 0 && (class_cond || cond_dim > 0)) || cond_dropout > 0; }
    // whether the sampler's steps lie at timesteps of the model
    bool goes_by_timesteps() const { return sampler == "ddpm" || sampler == "ddim"; }
    bool can_churn() const { return sampler == "euler" || sampler == "heun"; }
    int seen_channels() const { return in_channels + cond_channels; } // channels of an image and its picture
    // the objective whose formulas the noise levels follow (see Frame)
    const string& frame() const { return objective == "ect" ? ect_frame : objective; }
    int64_t ect_stage() const { return ect_d > 0 ? ect_d : (max_steps + 7) / 8; } // steps of a stage of ect
    int64_t last_ect_stage() const { return (max_steps - 1) / ect_stage(); } // the stage of the last step, from 0 on
    bool changes_images() const { return !start_from.empty() || !inpaint.empty(); }
};

// Slots of a model file that are not for flags: from the first of each pair to the second (run/model_file.h). From 128
// on the header holds paths.
constexpr int OTHER_SLOTS[][2] = {{1, 7}, {22, 39}, {62, 67}, {79, 79}, {81, 105}, {113, 113}, {117, 119}};

// Whether every slot belongs to one flag alone. This reads unet/flags.h again, and only the slot of each row.
constexpr bool slots_are_unique() {
    bool taken[128] = {}, unique = true;
    auto take = [&](int slot) {
        unique = unique && slot >= 0 && slot < 128 && !taken[slot];
        if (unique && slot) taken[slot] = true; // 0: the flag has no slot
    };
    for (const auto& [first, last] : OTHER_SLOTS)
        for (int slot = first; slot <= last; slot++) take(slot);
#undef STATIC_MEMBER
#undef FLAG_ROW
#define STATIC_MEMBER(...)
#define FLAG_ROW(slot, ...) take(slot)
#include "flags.h"
#undef STATIC_MEMBER
#undef FLAG_ROW
    return unique;
}
static_assert(slots_are_unique(), "unet/flags.h: two flags have the same slot, or a flag has one of OTHER_SLOTS");

// Without --preset, if the data has at least this many images, and the chosen preset sets --min_snr_gamma, the flag
// becomes 5 (apply_default_preset).
constexpr int64_t MANY_IMAGES = 5000;
constexpr int MORE_EMAS = 7; // the most averages of the weights besides the first one
// From so many epochs on, a line says that samples will be copies, and how many steps would make FEW_EPOCHS. Of 2,026
// emoji 4 % of the samples were copies after 118 epochs, 31 % after 237 and 82 % after 474.
constexpr int64_t MANY_EPOCHS = 200;
constexpr int64_t FEW_EPOCHS = 120;
// --objective ect: the largest q^a that is allowed. If it were much larger, the sigmas of student and teacher would be
// equal when they are rounded to fp32.
constexpr double LARGEST_GAP_DIVISOR = 1e6;

// The averages of --ema_snapshots weigh the parameters after update k about proportionally to a power of k (Karras et
// al. 2024, appendix C). These are the two exponents. train_unet.py --ema_sigma_rel later computes averages with other
// exponents from their snapshots. Config::emas contains the two exponents, too.
constexpr float POWER_EMAS[2] = {16.97f, 6.94f};

static const Flag* find_flag(const std::string& name) {
    const auto f = std::ranges::find(FLAGS, name, &Flag::name);
    return f == FLAGS.end() ? nullptr : &*f;
}

// The words that a flag may be set to; empty if its value is not a word.
static std::vector<std::string> choices(const Flag& f) {
    const bool is_bool = std::holds_alternative<bool Config::*>(f.member);
    std::istringstream list(is_bool ? "False|True" : f.choices);
    std::vector<std::string> words;
    for (std::string word; std::getline(list, word, '|');) words.push_back(word);
    return words;
}

// Ends the program at a place that does not know a word of unet/flags.h.
[[noreturn]] static void unknown_word(const char* flag, const std::string& word) {
    die("--%s %s: a part of this program does not know that word yet; choose another one", flag, word.c_str());
}

// What a flag's word means in one place of the program. pairs: (word, meaning).
template <class T>
static T meaning(const char* flag, const std::string& word, std::initializer_list<std::pair<const char*, T>> pairs) {
    for (const auto& [known, meant] : pairs)
        if (word == known) return meant;
    unknown_word(flag, word);
}

// The element of activations that --precision names. With auto and fp8 it is `usual`, because only some tensors are
// FP8.
static Element element_named(const std::string& precision, Element usual) {
    if (precision == "auto" || precision == "fp8") return usual;
    for (const Element element : ACTIVATION_ELEMENTS)
        if (precision == name_of(element)) return element;
    unknown_word("precision", precision);
}

static const char* precision_of_use_fp16(bool use_fp16) { return use_fp16 ? "bf16" : "fp32"; }

// These functions set a flag from a text. They return "" or, if the text is wrong, what the value must be.
static std::string set_value(bool* flag, const Flag&, const std::string& value) {
    const bool yes = value == "True" || value == "true" || value == "1";
    const bool no =
        value == "False" || value == "false" || value == "0"; // guided-diffusion's commands use all of these
    *flag = yes;
    return yes || no ? "" : "True or False";
}

static std::string set_value(std::string* flag, const Flag& f, const std::string& value) {
    *flag = value;
    const bool any_text = !*f.choices;
    return any_text || std::ranges::count(choices(f), value) ? "" : text("one of %s", f.choices);
}

// strtod and strtof also read hexadecimal numbers, and Python's float does not.
static bool is_hexadecimal(const std::string& value) { return value.find_first_of("xX") != std::string::npos; }

static std::string set_value(float* flag, const Flag& f, const std::string& value) {
    char* end = nullptr;
    errno = 0;
    *flag = (float)strtod(value.c_str(), &end);
    const bool is_number = !value.empty() && !*end && errno != ERANGE && !is_hexadecimal(value);
    // Model files hold this value in fp32. The limits are rounded in the same way, so that a value that equals a limit
    // is in range. NaN is not in range.
    const bool in_range = *flag >= (float)f.low && *flag <= (float)f.high;
    return is_number && in_range ? "" : text("a number from %g to %g", f.low, f.high);
}

template <class Int> static std::string set_value(Int* flag, const Flag& f, const std::string& value) {
    char* end = nullptr;
    errno = 0;
    const long long number = strtoll(value.c_str(), &end, 10);
    *flag = (Int)number;
    const bool is_number = !value.empty() && !*end && !errno;
    const bool in_range = number >= f.low && number <= f.high;
    return is_number && in_range ? "" : text("a whole number from %.0f to %.0f", f.low, f.high);
}

// Sets a flag from a text, or ends the program. where: "FILE: " if the text comes from a file of that name, else "".
static void set_flag(Config* c, const Flag& f, const std::string& value, const std::string& where = "") {
    auto set = [&](auto member) { return set_value(&(c->*member), f, value); };
    const std::string expected = std::visit(set, f.member);
    if (!expected.empty()) die("%s--%s %s: must be %s", where.c_str(), f.name, value.c_str(), expected.c_str());
}

// A number as text, with no more digits than are needed to read the same number.
static std::string shortest(float number) {
    std::string value;
    for (int digits = 6; digits <= 9; digits++) {
        value = text("%.*g", digits, number);
        if (strtof(value.c_str(), nullptr) == number) break;
    }
    return value;
}

static std::string size_text(int H, int W) { return H == W ? std::to_string(H) : text("%dx%d", H, W); }

static std::string flag_value(const Config& c, const Flag& f) {
    if (const int* n = f.at<int>(c)) return std::to_string(*n);
    if (const int64_t* n = f.at<int64_t>(c)) return std::to_string(*n);
    if (const float* real = f.at<float>(c)) return shortest(*real);
    if (const bool* yes = f.at<bool>(c)) return *yes ? "True" : "False";
    return *f.at<std::string>(c);
}

// Returns "--image_size 7: " and the reason why.
static std::string wrong(Config* c, const char* name, const std::string& why) {
    const std::string value = flag_value(*c, *find_flag(name));
    return std::string("--") + name + (value.empty() ? "" : " ") + value + ": " + why;
}

// The flags of a preset that would undo or forbid what the command line or a model file asks for.
static std::set<std::string> left_out_of_preset(const Config& c) {
    std::set<std::string> names;
    if (c.fixed("num_heads")) names.insert("num_head_channels"); // num_head_channels would have priority over num_heads
    if (c.objective != "ddpm") names.insert({"predict", "min_snr_gamma", "learn_sigma"});
    // The preset's min_snr_gamma suits the preset's own --predict, and with --use_kl it is not allowed.
    if (c.fixed("predict") || c.use_kl) names.insert("min_snr_gamma");
    // The preset's churn and guidance suit the preset's sampler, and samples that are made of noise alone.
    if (c.given("sampler") || c.changes_images()) names.insert({"S_churn", "guidance_scale"});
    if (c.objective == "ect") names.insert("sampler");
    if (c.sampler == "consistency") names.insert({"timestep_respacing", "S_churn", "guidance_scale"});
    if (c.given("guidance_scale")) names.insert({"guidance_min", "guidance_max"}); // they suit the preset's scale
    // Without classes, or without steps that leave them out, there is nothing to be guided by.
    if (c.fixed("class_cond") && !c.class_cond) names.insert({"class_dropout", "guidance_scale"});
    if (c.fixed("class_dropout") && !c.class_dropout) names.insert("guidance_scale");
    return names;
}

// Sets the flags of a text: --name value --name value. Flags that the command line or a model file has set stay as they
// are, and so do those of left_out_of_preset and those in `without`.
static void apply_flags(Config* c, const std::string& flags, std::set<std::string> without = {}) {
    without.merge(left_out_of_preset(*c));
    std::istringstream words(flags);
    for (std::string flag, value; words >> flag >> value;) {
        const std::string name = flag.substr(2);
        if (c->fixed(name) || without.contains(name)) continue;
        set_flag(c, *find_flag(name), value);
        c->by_preset.insert(name);
    }
}

static void apply_preset(Config* c, const std::string& preset) { apply_flags(c, PRESETS.at(preset)); }

// A flag's line of --help. In brackets: its default and, if the default preset sets the flag, its value there.
static std::string help_line(const Flag& f, const Config& defaults, const Config& preset) {
    const std::string choices = *f.choices ? text(" (%s)", f.choices) : "";
    std::string value = flag_value(defaults, f);
    if (value.empty()) value = "\"\"";
    if (preset.chosen(f.name)) value += text("; %s: ", PRESET_32) + flag_value(preset, f);
    return text("  --%-25s %s%s [%s]\n", f.name, f.help, choices.c_str(), value.c_str());
}

// --help: the flags that people use first; all: every flag and preset.
static void print_help(bool all) {
    Config defaults, preset;
    apply_preset(&preset, PRESET_32);
    const std::string first = " " + Config::FIRST_FLAGS + " ";
    printf("train_unet: trains a diffusion UNet, and samples from it.\n\n"
           "  ./train_unet                              train the default preset into out/\n"
           "  ./train_unet --data_dir PICTURES          on your own pictures (prepare_data.py makes the data file)\n"
           "  ./train_unet --resume_checkpoint latest   continue the run in out/\n"
           "  ./train_unet --sample 36 --init out/model_0000400.bin --output samples.png\n"
           "  ./train_unet --help all                   all %zu flags, and what each preset sets\n\n"
           "In brackets: the default, and what preset %s has, which holds without --preset or data of your own.\n",
           FLAGS.size(), PRESET_32);
    const char* last_heading = "";
    for (const Flag& f : FLAGS) {
        if (!all && first.find(text(" %s ", f.name)) == std::string::npos) continue;
        if (f.heading != last_heading) printf("\n%s\n", f.heading);
        last_heading = f.heading;
        printf("%s", help_line(f, defaults, preset).c_str());
    }
    if (!all) return;
    printf("\nPresets: without --preset, and for your own images of 32x32, %s; for larger ones %s (from 128x128 on "
           "with --patch_size 4),\nfor images that are smaller, or whose sides can't be halved so often, %s; if the "
           "images have labels, also\n%s (where the preset says nothing else);\nfrom %ld images on --min_snr_gamma 5 "
           "(where the preset sets it)\n",
           PRESET_32, PRESET_FROM_32, PRESET_ELSE, Config::OF_LABELS.c_str(), (long)MANY_IMAGES);
    for (const auto& [name, settings] : PRESETS) printf("  %-13s %s\n", name.c_str(), settings.c_str());
}

// What to do instead of using a flag that this program does not have.
static std::string instead_of(const std::string& name) {
    auto is = [&](std::initializer_list<const char*> names) { return std::ranges::count(names, name) > 0; };
    // Flags of guided-diffusion and of dev/bench.
    if (is({"model_path", "use_ddim"}))
        return "python generate.py takes it; here it is --sample N --init FILE --sampler";
    if (is({"base_samples"})) return "here it is --sample N --cond_file, a data file of the small images";
    if (is({"iterations", "anneal_lr"}) || name.starts_with("classifier_"))
        return "there are no classifiers here; train with --class_dropout 0.1 and sample with --guidance_scale";
    if (is({"bench", "profile"})) return "make -C dev bench makes dev/bench, which takes it and times this program";

    std::string nearest, letters = name;
    std::erase_if(letters, [](char letter) { return letter == '_' || letter == '-'; });
    size_t most = 2; // how many letters at the start of a flag's name are those of this one
    for (const Flag& f : FLAGS) {
        std::string others = f.name;
        std::erase(others, '_');
        const size_t same = std::ranges::mismatch(letters, others).in1 - letters.begin();
        if (same <= most) continue;
        most = same;
        nearest = text("; did you mean --%s?", f.name);
    }
    return "there is no such flag" + nearest + "; --help all lists those there are";
}

// Reads the command line: --name value or --name=value.
static void parse_command_line(Config* c, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--help" || arg == "-h") {
            print_help(i + 1 < argc && std::string(argv[i + 1]) == "all");
            exit(0);
        }
        if (arg == "--version") {
            printf("train_unet %s%s%s\n", Config::VERSION.c_str(), *PROGRAM_COMMIT ? ", commit " : "", PROGRAM_COMMIT);
            exit(0);
        }
        if (!arg.starts_with("--"))
            die("%s: is no flag; they look like --batch_size 16; --help all lists them", argv[i]);
        const size_t equals = std::min(arg.find('='), arg.size()); // where the name ends
        const std::string name = arg.substr(2, equals - 2);        // without the two dashes
        const Flag* f = find_flag(name);
        if (!f) die("--%s: %s", name.c_str(), instead_of(name).c_str());
        if (c->given(name)) die("--%s: is given twice; once is enough", name.c_str());

        // Without a "=", the value is the next argument, which must not be a flag.
        const bool value_follows = equals == arg.size();
        if (value_follows) i++;
        const bool is_missing = i == argc || (value_follows && std::string(argv[i]).starts_with("--"));
        if (is_missing) die("--%s: its value is missing", name.c_str());
        std::string value = value_follows ? argv[i] : arg.substr(equals + 1);
        if (name == "microbatch" && value == "-1") value = "0"; // guided-diffusion's word for "all at once"
        set_flag(c, *f, value);
        c->on_command_line.insert(name);
    }
}

// Some of guided-diffusion's flags say what our flags say by other names: --predict_xstart True is our --predict x0. If
// ours is given, too, its value must be the same.
static void take_aliases(Config* c) {
    auto take = [&](const char* alias, const char* name, const std::string& value) {
        const std::string before = flag_value(*c, *find_flag(name));
        const std::string alias_value = flag_value(*c, *find_flag(alias));
        if (c->given(name) && before != value)
            die("--%s %s: means --%s %s, and --%s is %s; leave one of them out", alias, alias_value.c_str(), name,
                value.c_str(), name, before.c_str());
        set_flag(c, *find_flag(name), value);
        c->on_command_line.insert(name);
    };
    // In guided-diffusion, the learning rate falls over lr_anneal_steps steps, without a warm-up, and then the run
    // stops. With 0 it stays constant, and such a run has no end. Here --max_steps keeps its value then.
    const int64_t steps = c->lr_anneal_steps;
    // In guided-diffusion, upsamplers to 512 x 512 have another channel_mult than other models of 512 x 512.
    const int large = c->large_size;
    const int small = c->small_size;
    if (!large != !small) die("--large_size %d, --small_size %d: an upsampler needs both", large, small);
    if (small && large % small) die("--small_size %d: must divide --large_size %d", small, large);
    if (large) take("large_size", "image_size", std::to_string(large));
    if (large == 512 && !c->given("channel_mult")) take("large_size", "channel_mult", "1,1,2,2,4,4");
    if (small) take("small_size", "cond", text("lowres:%d", large / small));
    if (c->predict_xstart) take("predict_xstart", "predict", "x0");
    if (c->given("use_fp16")) take("use_fp16", "precision", precision_of_use_fp16(c->use_fp16));
    if (c->given("lr_anneal_steps")) take("lr_anneal_steps", "lr_schedule", steps ? "linear" : "constant");
    if (steps) take("lr_anneal_steps", "max_steps", std::to_string(steps));
    if (steps && !c->given("warmup_steps")) take("lr_anneal_steps", "warmup_steps", "0");
    if (c->given("fp16_scale_growth")) printf("--fp16_scale_growth: bf16 has no loss scale that could grow\n");
}

// guided-diffusion's flag --rescale_learned_sigmas sets --vlb_weight here: True 1e-3, False 1 / diffusion_steps. So
// --diffusion_steps must be final. If a preset gives the flag, a vlb_weight of the command line or a model file stays.
static void take_rescale_learned_sigmas(Config* c) {
    const bool given = c->given("rescale_learned_sigmas");
    if (given && c->given("vlb_weight"))
        die("--rescale_learned_sigmas: sets --vlb_weight, which is given too; leave one of them out");
    const bool preset_asks = !c->fixed("vlb_weight") && c->chosen("rescale_learned_sigmas");
    if (given || preset_asks) c->vlb_weight = c->rescale_learned_sigmas ? 1e-3f : 1.0f / (float)c->diffusion_steps;
}

// Reads numbers with commas between them. Returns false if there is anything else in the text.
static bool parse_list(const std::string& list, std::vector<float>* numbers) {
    numbers->clear();
    if (is_hexadecimal(list)) return false;
    const char* p = list.c_str();
    while (*p) {
        char* end = nullptr;
        const float number = strtof(p, &end);
        numbers->push_back(number);
        if (end == p || !std::isfinite(number)) return false;
        const bool more_follows = *end == ',' && end[1];
        if (*end && !more_follows) return false;
        p = end + more_follows;
    }
    return true;
}

// The functions up to check_model parse or check flags. Each returns "", or one sentence that says why the flags are
// wrong.

static std::string parse_image_size(Config* c) {
    int n = 0; // characters that were read; %5d reads at most 5 digits, which fit into an int
    const int sides = sscanf(c->image_size.c_str(), "%5d%nx%5d%n", &c->H, &n, &c->W, &n);
    if (sides == 1) c->W = c->H;
    const bool is_size = sides >= 1 && !c->image_size[n];
    const bool in_range = c->H >= 4 && c->W >= 4 && c->H <= 4096 && c->W <= 4096;
    if (is_size && in_range) return "";
    return wrong(c, "image_size", "must be a number of pixels from 4 to 4096, or HxW");
}

// The channels of a picture that --cond makes.
static int made_channels(const Config& c) {
    if (c.picture_kind == PictureKind::GRAY) return 1;
    return c.in_channels + (c.picture_kind == PictureKind::MASK);
}

// Parses --cond. Without --cond_channels, it also sets the number of the pictures' channels.
static std::string parse_cond(Config* c) {
    c->picture_kind = PictureKind::FILE;
    c->picture_factor = 0;
    if (c->cond.empty()) return "";
    const size_t colon = std::min(c->cond.find(':'), c->cond.size());
    const std::string kind = c->cond.substr(0, colon);
    const std::string behind = c->cond.substr(colon);
    const auto row = std::ranges::find(PICTURE_WORDS, kind, &PictureWord::word);
    const bool is_word = row != std::end(PICTURE_WORDS) && !kind.empty();
    if (is_word) c->picture_kind = row->kind;
    // lowres is followed by a colon and a number of up to five digits. The other words stand alone.
    const bool is_lowres = c->picture_kind == PictureKind::LOWRES;
    const bool is_short = behind.size() >= 2 && behind.size() <= 6;
    const bool is_number = is_short && behind.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!is_word || (is_lowres ? !is_number : !behind.empty()))
        return wrong(c, "cond", "must be lowres:4 (or another factor), gray or mask");
    const int K = is_lowres ? std::stoi(behind.substr(1)) : 0;
    if (is_lowres && (K < 2 || c->H % K || c->W % K))
        return wrong(c, "cond",
                     text("the factor must be at least 2 and divide the height and width of %dx%d", c->H, c->W));
    c->picture_factor = K;
    if (c->picture_kind == PictureKind::GRAY && c->in_channels != 3)
        return wrong(c, "cond", text("makes images of 3 channels grey, and these have %d", c->in_channels));
    if (!c->given("cond_channels")) c->cond_channels = made_channels(*c);
    if (c->cond_channels != made_channels(*c))
        return wrong(c, "cond_channels", text("--cond %s makes pictures of %d", c->cond.c_str(), made_channels(*c)));
    return "";
}

// --channel_mult: a level has its number times --num_channels channels. Group norm has 32 groups, so every level needs
// a multiple of 32. Without the flag, the numbers are guided-diffusion's for images of this height.
static std::string parse_channel_mult(Config* c) {
    static const std::map<int, const char*> DEFAULTS = {
        {512, "0.5,1,1,2,2,4,4"}, {256, "1,1,2,2,4,4"}, {128, "1,1,2,3,4"}, {64, "1,2,3,4"}};
    if (c->channel_mult.empty() && DEFAULTS.contains(c->H)) c->channel_mult = DEFAULTS.at(c->H);
    const bool is_list = parse_list(c->channel_mult, &c->mult);
    const size_t levels = c->mult.size();
    if (!is_list || levels < 1 || levels > 8)
        return wrong(c, "channel_mult", "must be 1 to 8 numbers with commas, such as 1,2,2");
    const int F = c->num_channels;
    if (F % 32) return wrong(c, "num_channels", text("must be a multiple of 32 (group norm); %d is", round_up(F, 32)));
    for (size_t level = 0; level < levels; level++) {
        const float m = c->mult[level];
        const bool in_range = m > 0 && m <= 64; // false for NaN
        const bool works = in_range && c->channels(level) >= 32 && c->channels(level) % 32 == 0;
        if (!works)
            return wrong(c, "channel_mult", text("%g * num_channels %d is not a positive multiple of 32", m, F));
    }
    return "";
}

// Checks that the image's height and width can be divided often enough. First each patch becomes a pixel. Then each
// level after the first one halves the resolution.
static std::string check_divisions(Config* c) {
    const int p = c->patch();
    const int patch_channels = c->seen_channels() * p * p;
    if (patch_channels > 64)
        return wrong(c, "patch_size", text("makes %d channels of a patch, of at most 64", patch_channels));
    const int levels = (int)c->mult.size();
    const int depth = p << (levels - 1); // the side of a square that becomes one pixel of the lowest level
    if (c->H % depth == 0 && c->W % depth == 0) return "";
    const int H = std::max(c->H / depth, 1) * depth;
    const int W = std::max(c->W / depth, 1) * depth;
    return wrong(c, "image_size",
                 text("must be a multiple of %d, as %d levels halve it%s; use %dx%d or fewer channel_mult", depth,
                      levels, p > 1 ? " in patches" : "", H, W));
}

// Each number of --attention_resolutions must be the height of a level. Otherwise a typing error would silently give a
// model without attention.
static std::string parse_attention_resolutions(Config* c) {
    const bool is_list = parse_list(c->attention_resolutions, &c->attention_heights);
    if (!is_list || c->attention_heights.size() > 8)
        return wrong(c, "attention_resolutions", "must be up to 8 image heights with commas, such as 16,8");
    std::string heights; // of all levels, for the message
    std::set<float> occur;
    for (size_t level = 0; level < c->mult.size(); level++) {
        heights += text("%s %d", level ? "," : "", c->height(level));
        occur.insert((float)c->height(level));
    }
    for (float height : c->attention_heights)
        if (!occur.contains(height))
            return wrong(c, "attention_resolutions",
                         text("%g never occurs; the heights of this model are", height) + heights);
    return "";
}

static std::string parse_model(Config* c) {
    for (auto parse :
         {parse_image_size, parse_cond, parse_channel_mult, check_divisions, parse_attention_resolutions}) {
        const std::string error = parse(c);
        if (!error.empty()) return error;
    }
    return "";
}

// If no cell of a table's first line looks like a number, the line holds the columns' names.
static bool looks_like_number(std::string cell) {
    cell.erase(0, cell.find_first_not_of(' '));
    if (!cell.empty() && strchr("0123456789+-.", cell[0])) return true;
    for (char& letter : cell) letter = (char)tolower(letter);
    return cell == "inf" || cell == "infinity" || cell == "nan";
}

// The cells of a line of a table. A cell in quotes may hold commas, and two quotes in it stand for one.
static std::vector<std::string> cells_of(const std::string& line) {
    std::vector<std::string> cells(1);
    bool in_quotes = false;
    for (size_t i = 0; i < line.size(); i++) {
        std::string& cell = cells.back();
        const bool is_quote = line[i] == '"';
        if (is_quote && in_quotes && line[i + 1] == '"') cell += line[i++];
        else if (is_quote && (in_quotes || cell.empty())) in_quotes = !in_quotes;
        else if (line[i] == ',' && !in_quotes) cells.emplace_back();
        else cell += line[i];
    }
    return cells;
}

// Reads the rows of --values F.csv. As in prepare_data.py --values, the first line may hold the columns' names, and the
// first column the images' names, which are no numbers. Both are skipped.
static std::string read_value_table(Config* c) {
    const size_t K = c->cond_dim;
    std::error_code ignored;
    if (std::filesystem::is_fifo(c->values, ignored))
        return "is a pipe; it must be a file"; // the opening would wait until another program writes to the pipe
    std::ifstream file(c->values);
    if (!file) return text("can't be opened (%s)", strerror(errno));
    std::string all{std::istreambuf_iterator<char>(file), {}};
    if (all.find('\0') != std::string::npos) return "holds a byte 0, as no table in UTF-8 does; save it as CSV, UTF-8";
    if (all.starts_with("\xEF\xBB\xBF")) all.erase(0, 3); // the mark of UTF-8, as Excel writes it
    // A line ends with \n, \r\n or \r.
    for (size_t at = 0; (at = all.find('\r', at)) != std::string::npos;)
        all.replace(at, all.compare(at, 2, "\r\n") ? 1 : 2, "\n");
    std::istringstream lines(all);
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        if (line.empty()) continue;
        std::vector<std::string> cells = cells_of(line);
        std::vector<float> row;
        const bool begins_with_name = !parse_list(cells[0], &row) || row.size() != 1;
        if (cells.size() == K + 1 && begins_with_name) cells.erase(cells.begin()); // the image's name
        row.clear();
        for (const std::string& cell : cells) {
            std::vector<float> numbers; // of this cell
            if (parse_list(cell, &numbers) && numbers.size() == 1) row.push_back(numbers[0]);
        }
        const bool fits = cells.size() == K && row.size() == K;
        if (!fits && (number > 1 || std::ranges::any_of(cells, looks_like_number)))
            return text("line %d must hold %zu numbers with commas", number, K);
        if (fits) c->value_rows.insert(c->value_rows.end(), row.begin(), row.end());
    }
    return c->value_rows.empty() ? text("has no row of %zu numbers with commas", K) : "";
}

static std::string parse_values(Config* c) {
    c->value_rows.clear();
    const int K = c->cond_dim;
    if (K > 0 && c->sample && c->values.empty())
        return wrong(c, "values",
                     text("must be the %d numbers of the images, such as 0.3,1, or a .csv file of them", K));
    if (c->values.empty()) return "";
    if (K == 0) return wrong(c, "values", "this model is not conditioned on numbers (--cond_dim)");
    if (c->values.ends_with(".csv")) {
        const std::string error = read_value_table(c);
        return error.empty() ? "" : wrong(c, "values", error);
    }
    const bool fits = parse_list(c->values, &c->value_rows) && (int)c->value_rows.size() == K;
    return fits ? "" : wrong(c, "values", text("must be %d numbers with commas, or a .csv file of rows of them", K));
}

// --classes: numbers, or names of the model's classes.
static std::string parse_classes(Config* c) {
    c->class_list.clear();
    if (c->classes.empty()) return "";
    if (!c->class_cond) return wrong(c, "classes", "this model is not conditioned on classes");
    std::string known;
    for (const std::string& name : c->class_names) known += (known.empty() ? "" : ", ") + name;
    std::istringstream words(c->classes + ","); // so that a comma at the end is followed by an empty word
    for (std::string word; std::getline(words, word, ',');) {
        std::vector<float> number;
        const auto named = std::ranges::find(c->class_names, word);
        const bool is_number = parse_list(word, &number) && !number.empty();
        if (!is_number && named == c->class_names.end())
            return "--classes " + word + ": is none of this model's classes (" +
                   (known.empty() ? "they have no names; use their numbers" : known) + ")";
        const float k = is_number ? number[0] : (float)(named - c->class_names.begin());
        if (k != std::floor(k) || k < 0 || k >= (float)c->num_classes)
            return wrong(c, "classes", text("%g is not one of the classes 0 to %d", k, c->num_classes - 1));
        c->class_list.push_back(k);
    }
    return "";
}

// take_data_shape checks the pictures of a training run against its data.
static std::string check_pictures(Config* c) {
    const bool has_file = !c->cond_file.empty();
    if (has_file && !c->cond_channels)
        return wrong(c, "cond_file", "this model is not conditioned on pictures (--cond_channels)");
    if (c->cond_dropout > 0 && !c->cond_channels)
        return wrong(c, "cond_dropout", "has nothing to leave out without --cond_channels");
    if (c->cond_channels && c->sample && !has_file)
        return wrong(c, "cond_file",
                     text("must name the pictures of %d channels that the model is conditioned on", c->cond_channels));
    const bool makes_them = c->picture_kind != PictureKind::FILE;
    if (makes_them && has_file && !c->sample)
        return wrong(c, "cond_file", "is not read in training, where --cond makes the pictures of the images");
    if (c->cond_noise > 0 && c->picture_kind != PictureKind::LOWRES)
        return wrong(c, "cond_noise", "is for --cond lowres, whose coarse pictures it is added to");
    if (!c->val_cond_file.empty() && c->val_data_file.empty())
        return wrong(c, "val_cond_file", "needs --val_data_file, the images that these pictures belong to");
    return "";
}

// Checks the flags of the model and of its samples.
static std::string check_model(Config* c) {
    std::string error = parse_model(c);
    if (error.empty()) error = parse_values(c);
    if (error.empty()) error = check_pictures(c);
    if (!error.empty()) return error;
    // note_unless stores a message if ok is false. The first message stays.
    auto note_unless = [&](bool ok, const char* name, const std::string& why) {
        if (!ok && error.empty()) error = wrong(c, name, why);
    };

    // Where there is attention, the heads share a level's channels equally. --num_head_channels has priority over
    // --num_heads. In the second half of the network --num_heads_upsample replaces --num_heads.
    const int per_head = c->num_head_channels;
    const int up = c->num_heads_upsample;
    const size_t lowest = c->mult.size() - 1; // middle_block has this level's channels, and always has attention
    for (size_t level = 0; level <= lowest; level++) {
        if (!c->has_attention(level) && level < lowest) continue;
        const int ch = c->channels(level);
        const std::string divide = text("divide the %d channels where there is attention", ch);
        const bool counts_heads = per_head < 0;
        const bool head_fits = per_head && ch % per_head == 0;
        const bool up_fits = up == -1 || (up > 0 && ch % up == 0);
        note_unless(counts_heads || head_fits, "num_head_channels", "must " + divide + "; 32 does");
        note_unless(!counts_heads || ch % c->num_heads == 0, "num_heads", "must " + divide);
        note_unless(!counts_heads || up_fits, "num_heads_upsample", "must be -1 or " + divide);
    }

    // With T diffusion steps, the linear schedule's last beta is 20 / T. It must be below 1.
    note_unless(c->noise_schedule != "linear" || c->diffusion_steps > 20, "diffusion_steps",
                "must be above 20 with --noise_schedule linear, whose last beta would reach 1");
    note_unless(!c->class_cond || c->num_classes > 0, "num_classes",
                "must be given for --class_cond True: the data has none; or use --class_cond False");
    note_unless(c->class_cond || c->cond_dim || !c->class_dropout, "class_dropout",
                "has nothing to leave out without --class_cond True or --cond_dim");
    // Only --objective ddpm uses these flags. A user who sets one of them expects that it does something.
    Config plain;
    for (auto name : {"predict", "learn_sigma", "schedule_sampler", "use_kl", "min_snr_gamma", "rescale_timesteps"}) {
        const Flag& f = *find_flag(name);
        const bool is_default = flag_value(*c, f) == flag_value(plain, f);
        note_unless(
            c->objective == "ddpm" || is_default, name,
            "is for --objective ddpm; " + c->objective + " has a prediction, a weighting and noise levels of its own");
    }
    note_unless(!c->augment || !c->random_flip, "random_flip", "is a part of --augment, which tells the network of it");
    note_unless(!c->use_kl || !c->min_snr_gamma, "min_snr_gamma", "weighs an error that --use_kl True leaves out");

    if (error.empty()) error = parse_classes(c);
    note_unless(!c->guided() || c->can_be_guided(), "guidance_scale",
                "needs a model of --class_cond True (or --cond_dim) and --class_dropout 0.1, or of --cond_dropout 0.1");
    note_unless(c->guidance_min <= c->guidance_max, "guidance_min",
                text("must not be above --guidance_max %g", c->guidance_max));
    note_unless(c->sigma_min < c->sigma_max, "sigma_min", text("must be below --sigma_max %g", c->sigma_max));
    note_unless(c->sampler != "consistency" || c->mid_t < c->sigma_max, "mid_t",
                text("must be below --sigma_max %g", c->sigma_max));
    const bool changes_images = c->changes_images();
    const bool inpaints = !c->inpaint.empty();
    note_unless(c->start_from.empty() || !inpaints, "start_from", "can't be done beside --inpaint");
    const bool takes_mask = c->sample && c->picture_kind == PictureKind::MASK;
    note_unless(!inpaints || !c->mask.empty(), "mask", "is needed by --inpaint: where to paint anew");
    note_unless(inpaints || takes_mask || c->mask.empty(), "mask",
                "needs --inpaint, or a model of --cond mask: where to paint anew");
    note_unless(!changes_images || c->sample, inpaints ? "inpaint" : "start_from", "is for --sample");
    note_unless(!changes_images || !c->S_churn, "S_churn", "is for images that are made of noise alone");
    note_unless(!c->S_churn || c->can_churn(), "S_churn", "is for --sampler euler and heun");
    return error;
}

// Parses --ema_rate, and adds the averages of --ema_snapshots. where: what an error message begins with if the rates
// come from a file: "FILE: ".
static void parse_ema_rate(Config* c, const std::string& where) {
    // A rate is from 0 to 1. A number above 1 is one of POWER_EMAS, from a checkpoint, and never the first in the list.
    bool works = parse_list(c->ema_rate, &c->emas) && !c->emas.empty();
    for (size_t k = 0; k < c->emas.size(); k++) {
        const float rate = c->emas[k];
        const bool is_power = k > 0 && std::ranges::count(POWER_EMAS, rate);
        works = works && rate >= 0 && (rate <= 1 || is_power);
    }
    for (float power : POWER_EMAS) {
        const bool is_there = std::ranges::count(c->emas, power);
        if (c->ema_snapshots && !is_there) c->emas.push_back(power);
    }
    if (works && c->emas.size() <= 1 + MORE_EMAS) return;
    const int most = 1 + MORE_EMAS - (c->ema_snapshots ? 2 : 0);
    const char* const beside = c->ema_snapshots ? ", beside the two of --ema_snapshots" : "";
    refuse((c->given("ema_rate") ? "" : where) +
           wrong(c, "ema_rate", text("must be a number from 0 to 1, or up to %d of them with commas%s", most, beside)));
}

// --objective ect: checks that q^a never exceeds LARGEST_GAP_DIVISOR during the run. a is the number of the stage, from
// 1 on. So in the last stage it is the number of all stages.
static void check_ect_stages(Config* c, const std::string& where) {
    if (c->objective != "ect") return;
    const int64_t most = (int64_t)(std::log(LARGEST_GAP_DIVISOR) / std::log((double)c->ect_q)); // the largest a
    const int64_t stages = (c->max_steps + c->ect_stage() - 1) / c->ect_stage();                // rounded up
    if (stages <= most) return;
    const int64_t enough = (c->max_steps + most - 1) / std::max<int64_t>(most, 1);
    refuse(where + wrong(c, "ect_d",
                         text("makes a grow to %ld, and --ect_q %g^a must stay below %g; %ld is enough", stages,
                              c->ect_q, LARGEST_GAP_DIVISOR, enough)));
}

// The ranks share a batch, and each computes its share in microbatches, which must divide it.
static void check_microbatch(Config* c, const std::string& where) {
    const int B = c->batch_size;
    const int N = world.size;
    if (B % N) {
        const int nearest = std::max(1, (B + (N - 1) / 2) / N) * N; // the nearest multiple of N
        die("%s--batch_size %d: is shared by %d processes, so it must be a multiple of that; %d is one", where.c_str(),
            B, N, nearest);
    }
    const int share = B / N;
    const int wanted = c->microbatch;
    if (wanted > share || share % c->micro()) {
        int nearest = std::min(wanted, share);
        while (share % nearest) nearest--;
        die("%s--microbatch %d: must divide the %d images of a process, of --batch_size %d; %d does", where.c_str(),
            wanted, share, B, nearest);
    }
    // With several ranks, a microbatch of 0 is replaced by the share. So a checkpoint holds this number, and a run that
    // is resumed with another number of ranks keeps its bits.
    if (N > 1) c->microbatch = c->micro();
}

// Ends the program if settings of the run cannot work together. where: what an error message begins with: "FILE: " if
// some settings come from a file, else "".
static void check_run(Config* c, const std::string& where) {
    parse_ema_rate(c, where);
    check_ect_stages(c, where);
    check_microbatch(c, where);
    if (c->output_dir.empty()) die("--output_dir: must name a folder");
    const bool has_val_file = !c->val_data_file.empty();
    const std::string drawn = text("--val_fraction %g holds out validation images, too; ", c->val_fraction);
    if (c->val_fraction > 0 && has_val_file) refuse(wrong(c, "val_data_file", drawn + "leave one of the two out"));
    if (c->keep_best && c->val_fraction == 0 && !has_val_file)
        refuse(wrong(c, "keep_best", "needs --val_data_file or --val_fraction, to tell which checkpoint is the best"));
    // A checkpoint keeps the paths of --data_file and --cond_file in 512 bytes, each with a byte 0 behind it.
    if (c->data_file.size() > 511)
        refuse(wrong(c, "data_file", "is longer than the 511 bytes that a checkpoint keeps; use a shorter path"));
    if (!c->cond_file.empty() && c->data_file.size() + c->cond_file.size() > 510)
        refuse(wrong(c, "cond_file",
                     "and --data_file are longer than the 510 bytes that a checkpoint keeps; use shorter paths"));
}
