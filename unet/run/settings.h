// settings.h - what the command line leaves open comes from presets, model files and the data.
#pragma once
#include "model_file.h"
#include "prepare.h"

// =====================================================================================================================
// Settings: what the command line leaves open
// Each setting comes from the first of these that has a value for it:
//     1. the command line
//     2. a model file: with --init the settings of the model, with --resume_checkpoint also those of the run
//     3. the preset; without --preset, the one for the size of the images
//     4. the flag's default; for the images' size and channels, and the number of classes, the data
// A setting on the command line must agree with the model file, unless it may change from run to run. With --init, what
// images and classes there are comes from the data, and not from the model file (adapt_to_data). complete_config
// calls the functions below in the order of this list. For a run, check_run and take_data_shape follow.

// Sets a flag to the value in a model file. If the command line gives the flag, too, the two must be the same, unless
// the flag may change from run to run. Slots after SLOT_STEP hold settings of the run, which may change, except the
// optimiser, to which the file's moments belong, and the part of the images that is held out, which no step of the run
// may train on. Of the model's settings only FREE flags (unet/flags.h) may change.
static void take_from_file(Config* c, const std::string& path, const std::string& name, const std::string& value) {
    const Flag& f = *find_flag(name);
    const bool given = c->given(name);
    const bool is_fixed = f.slot == SLOT_OPTIMIZER || f.slot == SLOT_VAL_FRACTION;
    const bool may_change = (f.slot > SLOT_STEP && !is_fixed) || f.free;
    if (given && may_change) return;
    c->by_file.insert(name);
    const std::string wanted = flag_value(*c, f);
    set_flag(c, f, value, path + ": ");
    const std::string there = flag_value(*c, f);
    const std::string made = there.empty() ? "without it" : "with " + there;
    const bool is_of_data = name == "image_size" || name == "in_channels" || name == "num_classes";
    if (given && is_of_data && c->data_decides) return set_flag(c, f, wanted);
    if (given && !same_value(name, there, wanted))
        die("--%s %s: %s was made %s; leave the flag out, or start without that file", f.name, wanted.c_str(),
            path.c_str(), made.c_str());
}

// Returns the paths of --data_file and --cond_file that a checkpoint holds, or "". They share 512 bytes, with a byte 0
// between them.
static std::pair<std::string, std::string> kept_paths(const ModelFile& model) {
    const std::string kept((const char*)&model.header.slot[SLOT_PATH], 512);
    const std::string data_file = kept.substr(0, kept.find('\0'));
    const std::string rest = kept.substr(std::min<size_t>(data_file.size() + 1, 512));
    return {data_file, rest.substr(0, rest.find('\0'))};
}

// Sets flags that a resumed run takes from its checkpoint. A model file of --init does not set these flags.
static void take_run_of_file(Config* c, const ModelFile& model) {
    std::string rates;
    for (int k = 0; k < model.emas(); k++) {
        if (k) rates += ",";
        rates += text("%.9g", model.ema_rate(k));
    }
    if (!c->given("ema_rate")) take_from_file(c, model.path, "ema_rate", rates);
    // With the same seed the resumed run makes the same draws as a run without a pause.
    const int64_t seed = model.header.get<int64_t>(SLOT_SEED);
    take_from_file(c, model.path, "seed", std::to_string(seed));
    const auto [data_file, cond_file] = kept_paths(model);
    std::error_code none;
    const bool names_data = c->given("data_file") || c->given("data_dir");
    if (!names_data && !std::filesystem::is_regular_file(data_file, none))
        die("%s: was trained on %s, which is no file here; name its data by --data_file or --data_dir",
            model.path.c_str(), data_file.c_str());
    if (!names_data) take_from_file(c, model.path, "data_file", data_file);
    if (!cond_file.empty() && !c->given("cond_file")) take_from_file(c, model.path, "cond_file", cond_file);
}

// Sets the flags that a header holds as lists or in two slots.
static void take_parsed_flags(Config* c, const ModelFile& model) {
    const Header& h = model.header;
    const int levels = h.slot[SLOT_LEVELS];
    const int resolutions = h.slot[SLOT_RESOLUTIONS];
    std::string mult;
    for (int i = 0; i < levels; i++) {
        if (i) mult += ",";
        mult += text("%.9g", h.get<float>(SLOT_MULT + i));
    }
    std::string heights;
    for (int i = 0; i < resolutions; i++) {
        if (i) heights += ",";
        heights += text("%d", h.slot[SLOT_ATTENTION + i]);
    }
    const int height = h.slot[SLOT_HEIGHT];
    const int width = h.slot[SLOT_WIDTH];
    check_field(model.path, "height", height, 4, 4096);
    take_from_file(c, model.path, "image_size", size_text(height, width));
    take_from_file(c, model.path, "channel_mult", mult);
    take_from_file(c, model.path, "attention_resolutions", heights);
    // --cond says how the pictures are made. Its two slots hold the kind, and the factor K of lowres:K (otherwise 0).
    check_field(model.path, "cond", h.slot[SLOT_COND], 0, std::size(PICTURE_WORDS) - 1);
    const int factor = h.slot[SLOT_COND + 1];
    const std::string kind = PICTURE_WORDS[h.slot[SLOT_COND]].word;
    take_from_file(c, model.path, "cond", kind + (factor ? text(":%d", factor) : ""));
}

// Takes the settings in the model file. resume: the file is a checkpoint whose run goes on; then those of the run, too.
static void take_model_file(Config* c, const ModelFile& model, bool resume) {
    const std::string& path = model.path;
    const Header& h = model.header;
    if (resume && !model.has(HAS_EMA | HAS_TRAINING))
        die("%s: holds weights only, no moments to resume from; --init starts a new run from it", path.c_str());
    // --objective ect tunes a model that was trained with another objective, here the one in the file.
    const bool is_tuned = !resume && c->given("objective") && c->objective == "ect" && !is_ect(h);
    if (is_tuned && objective_of(h) == "ddpm")
        die("--objective ect: tunes models of --objective edm and flow, and %s was made with ddpm", path.c_str());

    c->data_decides = !resume && !c->sample;
    c->class_names = model.class_names;
    take_parsed_flags(c, model);
    if (is_tuned) take_from_file(c, path, "ect_frame", header_value(*c, h, *find_flag("objective")));
    for (const Flag& f : FLAGS) {
        const bool is_of_run = f.slot > SLOT_STEP;
        if (!f.slot || (is_of_run && !resume)) continue;
        // Tuning has its own objective and its own noise levels, so these flags are not taken from the file.
        const bool tuning_has_it = f.slot == SLOT_OBJECTIVE || f.slot == SLOT_P_MEAN || f.slot == SLOT_P_STD;
        if (is_tuned && tuning_has_it) continue;
        if (f.slot == SLOT_PRECISION && c->sample) continue; // samples need not have the precision of the training
        if (slot_is_used(h, f)) take_from_file(c, path, f.name, header_value(*c, h, f));
        else check_unused(h, f.slot, f.slot + 1, path, "");
    }
    if (resume) take_run_of_file(c, model);
}

// Sets the defaults for --objective ect and --sampler consistency. They are the values that Geng et al. 2024 use.
static void take_ect_defaults(Config* c) {
    const bool ect = c->objective == "ect";
    if (ect && !c->given("sampler")) c->sampler = "consistency";
    if (c->sampler == "consistency" && !c->given("timestep_respacing")) c->timestep_respacing = "2";
    if (ect && !c->fixed("P_mean")) c->P_mean = -1.1f;
    if (ect && !c->fixed("P_std")) c->P_std = 2;
}

// Ends the program if the images of a data file do not fit the model. flag: what names the file; cond_flag: what names
// the images' pictures. where: what messages begin with.
static void check_data(const Config& c, const Dataset& d, const char* flag, const char* cond_flag,
                       const std::string& where) {
    auto refuse_unless = [&](bool ok, const std::string& why) {
        if (!ok) refuse(where + "--" + flag + " " + d.path + ": " + why);
    };
    refuse_unless(d.H == c.H && d.W == c.W,
                  text("its images are %dx%d and the model's %dx%d; prepare_data.py --image_size makes them fit", d.H,
                       d.W, c.H, c.W));
    refuse_unless(d.C == c.in_channels,
                  text("its images have %d channels and the model takes %d; prepare_data.py --channels makes them fit",
                       d.C, c.in_channels));
    const std::string numbers = d.K ? text("has %d numbers an image", d.K) : "has no numbers";
    refuse_unless(!c.cond_dim || d.K == c.cond_dim,
                  numbers + text(", and the model takes --cond_dim %d; prepare_data.py --values TABLE puts those of a "
                                 "table into it",
                                 c.cond_dim));
    const bool needs_pictures = c.cond_channels && c.picture_kind == PictureKind::FILE;
    refuse_unless(d.cond || !needs_pictures,
                  text("--cond_channels %d needs --%s, a picture for each of the images", c.cond_channels, cond_flag));
    refuse_unless(!d.cond || d.cond->C == c.cond_channels,
                  text("its pictures have %d channels and the model takes --cond_channels %d", d.cond ? d.cond->C : 0,
                       c.cond_channels));
    if (!c.class_cond) return;
    refuse_unless(d.classes <= c.num_classes,
                  text("has labels of %d classes, and the model takes --num_classes %d", d.classes, c.num_classes));
    // If the model comes from a file, it has classes, and --class_cond False would be refused.
    const std::string or_else = where.empty() ? "use --class_cond False" : "start without that file";
    refuse_unless(!d.labels.empty(), "has no labels, and --class_cond True needs them; make it from a folder with one "
                                     "sub-folder a class, or " +
                                         or_else);
}

// A new run whose network can't hear what it is told: ends the program if the user asked for classes or numbers, else
// prints a line.
static void check_hearing(const Config& c) {
    if (c.can_hear()) return;
    const bool asked = (c.given("class_cond") && c.class_cond) || (c.given("cond_dim") && c.cond_dim);
    const std::string what = c.given("cond_dim") && c.cond_dim ? "cond_dim" : "class_cond";
    const std::string why =
        "with 32 channels at all levels, norms take away what blocks are told (t, classes, numbers); "
        "use --use_scale_shift_norm True, or more channels";
    if (asked) refuse("--" + what + ": would have no effect: " + why);
    printf("--num_channels %d: %s\n", c.num_channels, why.c_str());
}

// --init: a run that starts from a model file may have images of another size, other channels and other classes. Takes
// them from the data, unless the command line says them. If the model has all of the data's classes, it keeps its own.
static void adapt_to_data(Config* c, Dataset* data, const ModelFile& model) {
    const Header& h = model.header;
    if (!c->given("image_size")) c->image_size = size_text(data->H, data->W);
    if (!c->given("in_channels")) c->in_channels = data->C;
    parse_image_size(c);
    // Attention stays at the same levels, whose heights grow with the images.
    std::string heights;
    for (int i = 0; i < h.slot[SLOT_RESOLUTIONS]; i++)
        heights += text("%s%ld", i ? "," : "", (int64_t)h.slot[SLOT_ATTENTION + i] * c->H / h.slot[SLOT_HEIGHT]);
    c->attention_resolutions = heights;
    if (!c->class_cond) return;
    const bool knows_all = !std::ranges::count(class_rows(model, *data, data->classes), -1);
    if (knows_all) take_class_names(data, model.class_names, model.path);
    else if (!c->given("num_classes")) c->num_classes = data->classes;
}

// Without a model file: takes the size, channels and classes of the images, and the channels of the pictures, from the
// data, unless they are set. Then checks that the data fits the model. where: what messages begin with; "FILE: " if
// there is a model file, otherwise "". Labels get the numbers of the model's classes.
static void take_data_shape(Config* c, Dataset* data, const ModelFile& model, const std::string& where) {
    if (c->data_decides) adapt_to_data(c, data, model);
    else if (c->class_cond) take_class_names(data, model.class_names, model.path);
    const Dataset& d = *data;
    c->class_names = d.class_names;
    if (where.empty()) {
        if (!c->given("image_size")) c->image_size = size_text(d.H, d.W);
        // If the preset's attention resolutions are impossible for this size, there is attention at the lowest level
        // instead.
        if (!c->given("attention_resolutions") && !parse_model(c).empty() && !c->mult.empty())
            c->attention_resolutions = text("%d", c->height(c->mult.size() - 1));
        if (!c->given("in_channels")) c->in_channels = d.C;
        if (!c->given("cond_channels") && d.cond) c->cond_channels = d.cond->C;
        if (!c->chosen("num_classes")) c->num_classes = d.classes;
    }
    // If the images and the model differ in size, an error about another flag is most often a result of this, and the
    // next check names the two sizes instead.
    const std::string error = check_model(c);
    const bool fits = d.H == c->H && d.W == c->W;
    if (!error.empty() && (fits || error.starts_with("--image_size"))) refuse(where + error);
    check_data(*c, d, "data_file", "cond_file", where);
    if (where.empty()) check_hearing(*c);
}

// Returns the path of the checkpoint that --resume_checkpoint means, or "" if the run is new. A folder that does not
// exist counts as an empty one.
static std::string resume_path(const Config& c, const Folder& output) {
    const std::string& wanted = c.resume_checkpoint;
    if (wanted != "latest" && wanted != "auto") return wanted;
    const auto found = output.list();
    if (!found.empty()) return output.name(found.rbegin()->second);
    if (wanted == "auto") return "";
    die("--resume_checkpoint latest: %s holds no checkpoint; leave the flag out to start a run there%s",
        c.output_dir.c_str(), output.has("log.csv") ? ", once its log.csv is moved away" : "");
}

// Checks that the counters of a checkpoint agree with each other, and that the run goes on with its data unless
// --data_file or --cond_file names other data.
static void check_resume(const Config& c, const ModelFile& m, const Dataset& d) {
    const StepState s = m.state();
    const Guard& g = s.guard;
    // Every step was either an update or skipped. The guard's n counts updates since it was last started anew.
    const int most_steps = std::min(2000000000, m.header.slot[SLOT_MAX_STEPS]);
    const bool steps_add_up = s.step <= most_steps && s.updates >= 0 && s.updates + s.bad_total == s.step;
    const bool skips_fit = s.bad_in_row >= 0 && s.bad_in_row <= s.bad_total;
    const bool is_finite = std::isfinite(g.mean_loss + g.mean_norm + g.var_loss + g.var_norm);
    const bool counts_updates = g.n >= 0 && g.n <= (double)s.updates && g.n == std::floor(g.n);
    const bool guard_works = counts_updates && is_finite && g.var_loss >= 0 && g.var_norm >= 0;
    if (!steps_add_up || !skips_fit || !guard_works)
        die("%s: its header is damaged (step %ld of at most %d, %ld updates, %ld skipped steps, %ld of them at last, "
            "and their running means contradict each other): use an earlier checkpoint",
            m.path.c_str(), s.step, most_steps, s.updates, s.bad_total, s.bad_in_row);
    // header_crc depends on the data file's whole content. For files of unet.cu it is 0.
    const bool same_count = m.header.get<int64_t>(SLOT_IMAGES) == d.count;
    const bool same_content = m.header.get<uint32_t>(SLOT_DATA_CRC) == d.header_crc;
    if (!(same_count && same_content) && !c.given("data_file"))
        die("%s: is not the data that %s was trained on; name it with --data_file, or name this one to go on with it",
            c.data_file.c_str(), m.path.c_str());
    const bool same_pictures = !d.cond || m.header.get<uint32_t>(SLOT_COND_CRC) == d.cond->header_crc;
    if (!same_pictures && !c.given("cond_file"))
        die("%s: does not hold the pictures that %s was trained with; name them with --cond_file, or name this file to "
            "go on with it",
            c.cond_file.c_str(), m.path.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// --- presets, and all settings together

// Applies a preset, but with this patch_size if the preset sets one, and with C channels, because the preset may be for
// grey images.
static void apply_with_patch(Config* c, const char* preset, int patch, int C, std::set<std::string> without = {}) {
    c->preset = preset;
    apply_flags(c, PRESETS.at(preset), without);
    if (c->by_preset.contains("patch_size")) c->patch_size = patch;
    if (!c->fixed("in_channels")) c->in_channels = C;
}

// Returns whether a preset suits the images: whether its network can halve their sides often enough. c: what the
// command line says.
static bool preset_fits(Config c, const char* preset, int patch, const Dataset& d) {
    apply_with_patch(&c, preset, patch, d.C);
    c.image_size = size_text(d.H, d.W);
    // The pictures of --cond_file have not been read yet. They are assumed to have as many channels as the images.
    if (!c.cond_file.empty() && !c.given("cond_channels")) c.cond_channels = d.C;
    // The attention's resolutions are no reason to refuse the preset, since take_data_shape makes them fit.
    if (!c.given("attention_resolutions")) c.attention_resolutions = "";
    return parse_model(&c).empty();
}

// Without --preset: applies the preset for the size of the images. From 32x32 pixels on it is one that learns quickly
// (docs/LEARNT.md, "Own pictures of other sizes"). If its network sees squares of pixels as one, they have 4x4 pixels
// from 128x128 on, else 2x2. All other images get PRESET_ELSE. typed: what the command line says. d: the data, which
// are none if samples are drawn.
static void apply_default_preset(Config* c, const Config& typed, const Dataset& d) {
    c->default_preset = true;
    if (!d.size) {
        c->preset = PRESET_TO_SAMPLE;
        apply_flags(c, Config::OF_LABELS);
        return apply_preset(c, c->preset);
    }
    const char* const quick = d.H == 32 && d.W == 32 ? PRESET_32 : PRESET_FROM_32;
    const char* preset = PRESET_ELSE;
    int patch = 0;
    for (const auto& [squares, from] : {std::pair{2, 32}, std::pair{4, 128}}) {
        if (std::min(d.H, d.W) < from || !preset_fits(typed, quick, squares, d)) continue;
        preset = quick;
        patch = squares;
    }
    // Images with labels are learned as classes. The preset comes second, because it may set another guidance_scale.
    std::set<std::string> without;
    if (d.labels.empty()) without = {"class_cond", "class_dropout", "guidance_scale"};
    else apply_flags(c, Config::OF_LABELS);
    apply_with_patch(c, preset, patch, d.C, without);
    // Few images are learned by heart, and samples look best if low noise levels have little weight in the loss. Of
    // many images, low noise levels need more weight (docs/LEARNT.md, "Photographs").
    if (c->by_preset.contains("min_snr_gamma") && d.count >= MANY_IMAGES) c->min_snr_gamma = 5;
}

// Finds the preset of a run that is resumed without --preset, for flags that a checkpoint does not hold, such as
// --log_interval. (What of these was on the run's command line must be given again.) Of an unknown preset c->preset
// stays empty.
static void take_preset_of_run(Config* c, const ModelFile& model) {
    const uint32_t checksum = model.header.get<uint32_t>(SLOT_PRESET);
    for (const auto& [preset, settings] : PRESETS)
        for (const bool is_default : {false, true}) {
            if (preset_checksum(preset, is_default) != checksum) continue;
            c->preset = preset;
            c->default_preset = is_default;
        }
}

// --num_gpus: if several GPUs are to be used and no launcher has started a process for each, this process starts them
// and waits until they have ended. value: a number, or "all". patience: --rank_timeout.
static void take_num_gpus(const std::string& value, int patience, char** argv) {
    ranks.patience = patience;
    // For "all", number is 0.
    const int number = atoi(value.c_str());
    const bool is_number = number >= 1 && std::to_string(number) == value;
    if (value != "all" && !is_number) die("--num_gpus %s: must be a number from 1 on, or all", value.c_str());
    if (world.size > 1 && number > 1 && number != world.size)
        die("--num_gpus %d: a launcher has started %d processes; leave the flag out", number, world.size);
    if (world.size > 1 || number == 1) return;
    // There is only this process. If it is to use more than one GPU, it becomes the launcher.
    const int gpus = count_gpus();
    const int count = value == "all" ? gpus : number;
    if (count > gpus) die("--num_gpus %d: the program can use %d here", count, gpus);
    if (count <= 1) return;
    if (ranks_need()) die("--num_gpus %d: %s", count, ranks_need());
    // start_ranks does not return. It ends this process when all ranks have ended.
    start_ranks(count, argv);
}

// Ends the program if two flags are given that contradict each other.
static void check_contradictions(const Config& c) {
    const bool names_checkpoint = !c.resume_checkpoint.empty() && c.resume_checkpoint != "auto";
    if (!c.init.empty() && names_checkpoint)
        die("--init and --resume_checkpoint: a run starts from one of them; leave the other out");
    if (c.given("data_file") && c.given("data_dir"))
        die("--data_file and --data_dir: a run trains on one of them; leave the other out");
    if (c.given("sample") && !c.sample) die("--sample 0: draws nothing; leave the flag out to train");
    const std::pair<const char*, const std::string&> paths[] = {
        {"data_dir", c.data_dir}, {"data_file", c.data_file}, {"init", c.init}};
    for (const auto& [name, path] : paths)
        if (c.given(name) && path.empty()) die("--%s: is empty; give a path, or leave the flag out", name);
}

// Sets the flags that the command line leaves open, except those that take_data_shape takes from the data. Makes the
// data file of --data_dir, and opens the data file if the choice of a preset needs it. resume: the model file is a
// checkpoint whose run goes on. where: what messages about the model file's settings begin with.
static void complete_config(Config* c, const ModelFile& model, bool resume, const std::string& where, Dataset* data) {
    const Config typed = *c;
    if (model.size) take_model_file(c, model, resume);
    take_ect_defaults(c);
    if (resume && c->preset.empty()) take_preset_of_run(c, model);
    if (c->default_preset) apply_flags(c, Config::OF_LABELS); // as apply_default_preset has done
    if (!c->preset.empty()) apply_preset(c, c->preset);
    if (!c->sample) take_data_dir(c, where);
    if (c->preset.empty()) {
        if (c->data_file.empty()) c->data_file = Config::DEFAULT_DATA;
        if (!c->sample || c->given("data_file")) *data = open_dataset(c->data_file);
        apply_default_preset(c, typed, *data);
    }
    take_rescale_learned_sigmas(c);
    // A preset may ask for more sampling steps than the diffusion has. Then sampling uses all steps of the diffusion.
    const bool too_many = atoi(c->timestep_respacing.c_str()) > c->diffusion_steps;
    if (too_many && !c->given("timestep_respacing")) c->timestep_respacing = "";
}

// ---------------------------------------------------------------------------------------------------------------------
// --- what ranks must have in common

// Returns a line of text about an input file. The header holds a checksum of the rest, which is verified when the file
// is read. (Of data files of unet.cu, which have none, only the shapes are compared.)
static std::string describe_input(const std::string& name, const std::string& path) {
    if (path.empty()) return "no " + name + "\n";
    InputFile file;
    file.open(path, "every rank reads it, at the same path unless its own command line names another");
    close(file.file);
    const uint32_t checksum = crc32(0, file.header.slot, 1024);
    return text("a %s of %zu bytes and checksum %08x\n", name.c_str(), file.size, checksum);
}

// Ends the program before work begins if ranks run different programs, read different input files, or have different
// flags: they would compute different things, or wait for each other for ever.
static void compare_ranks(const Config& c, const std::string& weights) {
    if (world.size < 2) return;
    std::ifstream self("/proc/self/exe", std::ios::binary);
    const std::string program{std::istreambuf_iterator<char>(self), {}};
    std::string mine = text("a program of checksum %08x\n", crc32(0, program.data(), program.size()));
    mine += describe_input("file of weights (--init, --resume_checkpoint)", weights);
    mine += text("--values of checksum %08x\n", crc32(0, c.value_rows.data(), c.value_rows.size() * sizeof(float)));
    // Of input files the content is compared, not the path. Each machine has its own devices and folders, and only rank
    // 0 writes. Lines above are about --init and --values.
    const std::set<std::string> inputs = {"cond_file", "start_from", "inpaint", "mask"};
    const std::set<std::string> inputs_of_runs = {"data_file", "val_data_file", "val_cond_file"};
    const std::set<std::string> may_differ = {"device", "output", "output_dir", "init", "values"};
    std::string files, flags; // files come first, because other flags may depend on whether there are any
    for (const Flag& f : FLAGS) {
        const std::string name = f.name;
        std::string value = flag_value(c, f);
        const bool is_of_run = inputs_of_runs.contains(name);
        if (inputs.contains(name) || (is_of_run && !c.sample)) files += describe_input("--" + name, value);
        if (inputs.contains(name) || is_of_run || may_differ.contains(name)) continue;
        const bool names_file = !value.empty() && value != "latest" && value != "auto";
        if (name == "resume_checkpoint" && names_file) value = "FILE"; // a line above is about the file
        flags += text("--%s %s\n", f.name, value.c_str());
    }
    must_agree("the comparison of flags and files", mine + files + flags);
}
