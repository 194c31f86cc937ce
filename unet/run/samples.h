// samples.h - samples, without a run.
#pragma once
#include "../diffusion/pictures.h"
#include "../fp8.h"
#include "../host/png.h"
#include "checkpoint.h"

// ---------------------------------------------------------------------------------------------------------------------
// --- samples, without a run

// Returns the number of the array that --sample draws with: the average whose rate is --ema_rate or, without this flag,
// the first one; the weights (0) if there is none, or with --use_ema False.
static int array_to_sample(const Config& c, const ModelFile& m) {
    if (!c.use_ema || !m.emas()) return 0;
    std::string rates; // the averages' rates, for the message below
    for (int k = 0; k < m.emas(); k++) {
        // The rates are compared in fp32, as files hold them.
        const float rate = m.ema_rate(k);
        if (!c.given("ema_rate") || rate == (float)atof(c.ema_rate.c_str())) return m.ema_array(k);
        rates += text(" %g", rate);
    }
    die("--ema_rate %s: %s holds averages of the rates%s", c.ema_rate.c_str(), m.path.c_str(), rates.c_str());
}

// Opens the folder of --output. Checks, before samples are drawn, that the file can be written later, and that it
// replaces no file that must stay.
static Folder open_output(const Config& c, const std::string& resume) {
    // Every message begins with the flag.
    auto refuse_unless = [&](bool ok, const std::string& why) {
        if (!ok) refuse("--output " + c.output + ": " + why);
    };
    const bool has_ending = c.output.ends_with(".png") || c.output.ends_with(".bin");
    refuse_unless(has_ending && c.output.size() > 4, "must end in .png (one grid) or .bin (float images)");
    // The folder is opened now and used until the end, even if somebody renames it meanwhile.
    const std::filesystem::path path = c.output;
    const std::string name = path.filename().string();
    const Folder folder = open_folder(path.parent_path().string());
    refuse_unless(folder.descriptor >= 0,
                  text("its folder can't be opened (%s); name one that is there", strerror(folder.error)));

    refuse_unless(!is_name_of_run(folder, name), NAME_OF_RUN);

    // A file of this name may be replaced only if it is a regular file, is not read, and holds older samples.
    struct stat target;
    const bool is_there = !fstatat(folder.descriptor, name.c_str(), &target, 0);
    if (is_there) {
        refuse_unless(!S_ISDIR(target.st_mode), "is a folder; name a file");
        refuse_unless(S_ISREG(target.st_mode), "is there and is no usual file; choose another name");
        for (const std::string& file :
             {c.init, resume, c.data_file, c.start_from, c.inpaint, c.mask, c.values, c.cond_file}) {
            struct stat input;
            if (file.empty() || stat(file.c_str(), &input)) continue;
            // Two names may belong to the same file.
            const bool same = input.st_dev == target.st_dev && input.st_ino == target.st_ino;
            refuse_unless(!same, "would replace " + file + ", which is read; choose another name");
        }
        refuse_unless(may_be_replaced(folder, name),
                      "is there and holds no samples of this program; choose another name, or move it away");
    }
    // Can a file be made in the folder?
    AtomicFile probe(folder, name);
    refuse_unless(!probe.error, probe.failure);
    probe.discard();
    return folder;
}

// Returns the labels of the images that are changed, or whose pictures the samples are conditioned on. A file without
// labels of the model's classes says nothing of the class: then the samples have none (num_classes), if the model has
// learned that. Returns nothing if the samples take classes in turns.
static std::vector<int> labels_of_given(const Config& c, const ModelFile& model) {
    const std::string file = c.changes_images() ? c.start_from + c.inpaint : c.cond_file; // one of the two is empty
    if (!c.class_cond || !c.class_list.empty() || file.empty()) return {};
    Dataset d = open_dataset(file);
    if (d.classes) take_class_names(&d, model.class_names, model.path);
    if (d.classes == c.num_classes) return d.labels;
    if (c.null_class()) return {c.num_classes};
    printf("%s: has no labels of the model's %d classes, so it takes them in turns; --classes says what is right\n",
           file.c_str(), c.num_classes);
    return {};
}

// Returns the content of a data file of float images. images: (count, H, W, C); in the file they are (count, C, H, W).
// Their labels are the classes in which they were drawn. Images that were drawn without a class have none.
static std::string samples_as_data_file(const std::vector<float>& images, int count, const Config& c,
                                        const Sampler& sampler) {
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    std::string data;
    for (int i = 0; i < count; i++)
        for (int channel = 0; channel < C; channel++)
            for (int p = 0; p < HW; p++) {
                const size_t pixel = (size_t)i * HW + p; // the pixel's number among all images' pixels
                const float* const value = &images[pixel * C + channel];
                data.append((const char*)value, sizeof(float));
            }
    std::vector<int> labels;
    for (int i = 0; i < count && c.class_cond; i++) labels.push_back(class_of_image(c, sampler, i));
    const bool has_labels = c.class_cond && !std::ranges::count(labels, c.num_classes);
    const std::string names = has_labels ? class_names_block(c.class_names) : "";
    if (has_labels) data.append((const char*)labels.data(), labels.size() * sizeof(int));
    data += names;
    const int data_crc = (int)crc32(0, data.data(), data.size());
    Header h;
    h.slot[SLOT_MAGIC] = DATA_MAGIC;
    h.slot[SLOT_VERSION] = 1;
    h.slot[DATA_SLOT_COUNT] = count;
    h.slot[DATA_SLOT_CHANNELS] = C;
    h.slot[DATA_SLOT_HEIGHT] = c.H;
    h.slot[DATA_SLOT_WIDTH] = c.W;
    h.slot[DATA_SLOT_CLASSES] = has_labels ? c.num_classes : 0;
    h.slot[DATA_SLOT_CLASS_NAMES] = (int)names.size();
    h.slot[DATA_SLOT_BYTES] = sizeof(float);
    h.slot[DATA_SLOT_BODY_CRC] = data_crc;
    h.slot[DATA_SLOT_KIND] = SAMPLES;
    h.slot[DATA_SLOT_HEADER_CRC] = (int)crc32(0, h.slot, 1024); // computed while this slot is 0
    return std::string((const char*)h.slot, 1024) + data;
}

// Returns the sentence of --sample after a signal, when `drawn` images are kept in the file of --output. Images made of
// noise alone depend on nothing but the noise's seed and their number, so another seed draws others.
static std::string how_to_draw_the_rest(const Config& c, int drawn) {
    const std::string kept = text("interrupted: %d of %d images are drawn", drawn, c.sample);
    if (!drawn) return kept + ", so nothing is written";
    const std::string end = kept + ", and kept in " + c.output + "; the same command with ";
    const bool takes_turns = c.changes_images() || c.cond_channels || c.value_rows.size() > (size_t)c.cond_dim;
    if (takes_turns) return end + "another --output draws all";
    const int64_t seed = c.noise_seed >= 0 ? c.noise_seed : c.seed;
    const std::string other = c.output.substr(0, c.output.size() - 4) + "_rest" + c.output.substr(c.output.size() - 4);
    return end + text("--sample %d --noise_seed %ld --output ", c.sample - drawn, seed + 1) + shell_word(other) +
           " draws as many as are missing";
}

// --sample N: draws N images with the weights of a model file, and writes them into the file of --output: a PNG with a
// grid, or a data file of float images. folder: the folder of this file. After a signal, those that are drawn are
// written. Returns the exit code.
static int sample_and_stop(const Config& c, const Folder& folder, const ModelFile& model) {
    UNet net = build_unet(c);
    check_size(model, net);
    // Each rank draws a share. In guided steps the network computes each image twice, so a batch needs twice the
    // memory.
    const int share = (c.sample + world.size - 1) / world.size; // rounded up
    const int batch_images = std::min(share, c.batch_size);
    plan_memory(&net, batch_images * (c.guided() ? 2 : 1), false);
    const int array = array_to_sample(c, model);
    const std::vector<float> flat = read_array(model, net, array);
    float* params = device_copy(flat);
    const Fp8Weights fp8 = make_fp8_weights(net, flat);

    Sampler sampler = make_sampler(c, net.B);
    const int C = c.in_channels;
    sampler.own_labels = labels_of_given(c, model);
    if (c.cond_channels) sampler.pictures = sample_pictures(c);
    if (!c.start_from.empty()) sampler.images = read_images(c, "start_from", c.start_from, C, C);
    if (!c.inpaint.empty()) {
        // The device holds the images and masks of one batch at a time.
        sampler.images = read_images(c, "inpaint", c.inpaint, C, C);
        sampler.masks = read_images(c, "mask", c.mask, 1, C);
        const size_t batch_values = (size_t)net.B * c.H * c.W * C;
        sampler.known = device_alloc<float>(batch_values);
        sampler.mask = device_alloc<float>(batch_values);
    }

    // With bf16, convolutions read this copy of the weights.
    listen_to_signals();
    const double start = now();
    act* copy = make_copy(params, net.flat_size);
    cast_params(copy, params, net.flat_size);
    const std::vector<float> images = sample_images(&net, Weights{params, copy, fp8}, &sampler, c.sample);
    const double seconds = now() - start;

    const int stop = any_rank("the end of the samples", stop_signal);
    const int code = stop ? 128 + stop : 0; // as a shell has it
    stop_signal = 0;                        // the next signal ends a wait for a full disk (while_full)
    // Rank 0 has all images and writes them. After a signal they are fewer than c.sample.
    if (world.rank) return code;
    const int drawn = (int)(images.size() / ((size_t)c.H * c.W * C));
    if (!drawn) tell(how_to_draw_the_rest(c, 0));
    if (!drawn) return code;
    must(all_finite(images.data(), images.size()), c.output,
         "not written, because the samples are not finite; the weights in " + model.path + " are broken");
    const bool as_png = c.output.ends_with(".png");
    std::string content;
    if (as_png) content = grid_png(images, drawn, c.H, c.W, C, value_captions(c, sampler, drawn));
    else content = samples_as_data_file(images, drawn, c, sampler);
    const std::string name = std::filesystem::path(c.output).filename().string();
    const std::string failure = try_write_file(folder, name, content);
    must(failure.empty(), c.output, failure);
    // From plan.begin on, plan.steps has an entry for each call of the network for an image.
    const int evaluations = (int)(sampler.plan.steps.size() - sampler.plan.begin);
    // The message names churn and guidance, which a preset may have set.
    std::string how = c.sampler;
    if (c.can_churn() && c.S_churn > 0) how += text(", churn %g", c.S_churn);
    if (c.guided()) how += text(", guidance %g", c.guidance_scale);
    const bool has_end = c.guidance_max < BIG;
    if (c.guided() && has_end) how += text(" where sigma is %g to %g", c.guidance_min, c.guidance_max);
    else if (c.guided() && c.guidance_min > 0) how += text(" where sigma is at least %g", c.guidance_min);
    tell(text("%d images with %s, %d evaluations each, ", drawn, how.c_str(), evaluations) +
         text("in %.2f s (%.1f images/s): ", seconds, drawn / seconds) + c.output);
    if (drawn < c.sample) tell(how_to_draw_the_rest(c, drawn));
    return code;
}
