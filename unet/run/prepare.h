// prepare.h - --data_dir: a data file of the pictures in a folder.
#pragma once
#include "../trainer.h"

// --- a folder of pictures: its data file lies beside it, PICTURES_64x64x3.bin beside PICTURES

// Returns the data file of the pictures in --data_dir, of the model's size and C channels.
static std::string data_file_beside(const Config& c, int C) {
    std::string path = c.data_dir;
    while (path.ends_with('/')) path.pop_back();
    const std::string name = std::filesystem::path(path).filename().string();
    // A folder such as "." has no name to which the ending could be added, so its real name is looked up.
    const bool is_relative = name.empty() || name == "." || name == "..";
    std::error_code none;
    if (is_relative) path = std::filesystem::canonical(c.data_dir, none).string();
    if (path.empty() || path == "/")
        die("--data_dir %s: has no folder in which its data file could lie; name another", c.data_dir.c_str());
    return path + text("_%dx%dx%d.bin", c.H, c.W, C);
}

// A moment as the system has it, as one number.
static int64_t nanoseconds(const struct timespec& time) { return time.tv_sec * 1000000000LL + time.tv_nsec; }

// Adds a line to *list for every file in root + below: its name, size and times. seen: the folders that were
// looked at already, to which a link may lead again. As in common/pictures.py, hidden files are left out, and folders
// of runs, whose grids are no pictures.
static void list_files(const std::string& root, const std::string& below, std::set<std::pair<dev_t, ino_t>>* seen,
                       std::string* list) {
    const Folder folder = open_folder(root + below);
    struct stat st;
    const bool is_new = !fstat(folder.descriptor, &st) && seen->insert({st.st_dev, st.st_ino}).second;
    int none = 0;
    std::vector<std::string> names = is_new ? names_in(folder, &none) : std::vector<std::string>{};
    std::ranges::sort(names);
    const bool is_of_run = folder.has("log.csv") || folder.has(".lock");
    for (const std::string& name : names) {
        const bool is_there = !fstatat(folder.descriptor, name.c_str(), &st, 0); // false: a link to nothing
        if (name.starts_with(".") || is_of_run || !is_there) continue;
        if (!S_ISDIR(st.st_mode))
            *list += below + "/" + name + text("\n%ld %ld ", (long)st.st_size, (long)nanoseconds(st.st_mtim)) +
                     text("%ld\n", (long)nanoseconds(st.st_ctim));
        else list_files(root, below + "/" + name, seen, list);
    }
    if (folder.descriptor >= 0) close(folder.descriptor);
}

// A checksum of which files a folder of pictures holds, how large they are, and when they were changed or moved.
static uint32_t checksum_of_folder(const std::string& folder) {
    std::set<std::pair<dev_t, ino_t>> seen;
    std::string list;
    list_files(folder, "", &seen, &list);
    return crc32(0, list.data(), list.size());
}

// Returns the checksum of a file with as many channels as the user or a model file says.
static uint32_t with_channels(uint32_t checksum, int C) { return crc32(checksum, &C, sizeof C); }

// Returns how many channels the data file has that was made of the pictures in --data_dir as they are now; 0: there is
// no such file. A file that --data_dir has not made ends the program, since it would be replaced. checksum: that of the
// folder. If the user or a model file says how many channels images have, a file may also have been made with that
// number. Otherwise the pictures say it (prepare_data.py), whatever the preset.
static int channels_prepared(const Config& c, uint32_t checksum) {
    const bool fixed = c.fixed("in_channels");
    for (const int C : {1, 3}) {
        const std::string path = data_file_beside(c, C);
        if ((fixed && C != c.in_channels) || !exists(path)) continue;
        InputFile file;
        file.open(path, "--data_dir would replace it: move it away");
        close(file.file);
        const bool is_data = file.header.slot[SLOT_MAGIC] == DATA_MAGIC;
        const uint32_t made_of = is_data ? file.header.get<uint32_t>(DATA_SLOT_FOLDER) : 0;
        must(made_of, path,
             "is no file that --data_dir made, and it would be replaced: move it away, or name it as --data_file");
        if (made_of == checksum || (fixed && made_of == with_channels(checksum, C))) return C;
    }
    return 0;
}

// Returns the Python that runs prepare_data.py: that of .venv in the program's folder, which `make python` makes, or
// python3.
static std::string preparing_python(const std::string& own_folder) {
    const std::string own = own_folder + "/.venv/bin/python";
    return exists(own) ? own : "python3";
}

// Returns the words of the command that makes a data file of --data_dir. program: the path of prepare_data.py.
static std::vector<std::string> prepare_command(const Config& c, const std::string& python,
                                                const std::string& program) {
    std::vector<std::string> words = {python, program, "--data_dir", c.data_dir, "--image_size", size_text(c.H, c.W)};
    if (c.fixed("in_channels")) words.insert(words.end(), {"--channels", std::to_string(c.in_channels)});
    return words;
}

// Makes the data file of the pictures in --data_dir, unless it is there. Returns how many channels it has.
static int prepare_folder(const Config& c) {
    const std::string flag = "--data_dir " + c.data_dir;
    struct stat st;
    if (stat(c.data_dir.c_str(), &st)) die("%s: can't be read (%s)", flag.c_str(), strerror(errno));
    must(S_ISDIR(st.st_mode), flag,
         "is no folder; --data_file takes a data file, and prepare_data.py --zip makes one of a zip");
    must(!c.fixed("in_channels") || c.in_channels == 1 || c.in_channels == 3, flag,
         text("pictures have 1 channel or 3, and the model takes %d", c.in_channels));
    std::error_code none;
    must(!std::filesystem::equivalent(c.data_dir, c.output_dir, none), flag,
         "is --output_dir, too, and the run's grids are no pictures to train on; choose another --output_dir");
    const uint32_t checksum = checksum_of_folder(c.data_dir);
    if (const int there = channels_prepared(c, checksum)) {
        print_line(data_file_beside(c, there) + ": is up to date with " + c.data_dir);
        return there;
    }

    // prepare_data.py lies beside this program.
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
    const std::string own_folder = self.parent_path().string();
    const std::string python = preparing_python(own_folder);
    const std::string program = own_folder + "/prepare_data.py";
    std::string by_hand;
    for (const std::string& word : prepare_command(c, "python3", "prepare_data.py")) {
        by_hand += by_hand.empty() ? "`" : " ";
        by_hand += shell_word(word);
    }
    by_hand += "` where it is, and name the file that it writes as --data_file";
    must(exists(program), flag, program + " is not there, which prepares it; run " + by_hand);
    // The folder's checksum was computed before the file is made. So if a picture is changed meanwhile, the next run
    // makes the file again.
    std::vector<std::string> command = prepare_command(c, python, program);
    const uint32_t kept = c.fixed("in_channels") ? with_channels(checksum, c.in_channels) : checksum;
    command.insert(command.end(), {"--folder_checksum", std::to_string(kept)});
    const int code = run_child(command);
    const std::string why = python == "python3" ? "there is no python3 in PATH" : python + " can't be run";
    must(code != CANT_RUN, flag, why + ", which prepares it; run " + by_hand);
    must(code == 0, flag, "was not prepared, for the reason above; once that is mended, run this again");
    const int channels = channels_prepared(c, checksum);
    must(channels, flag, program + " is of another version than this program, and has not made its data file");
    print_line(data_file_beside(c, channels) + ": prepared from " + c.data_dir);
    return channels;
}

// With --data_dir: sets --data_file to the file that is made of this folder of pictures. Rank 0 makes it, and the other
// ranks wait. where: what an error message begins with.
static void take_data_dir(Config* c, const std::string& where) {
    if (c->data_dir.empty()) return;
    // parse_model computes the size that the pictures get. Only an error in --image_size matters here.
    const std::string error = parse_model(c);
    if (error.starts_with("--image_size")) refuse(where + error);
    const int channels = world.rank ? 0 : prepare_folder(*c);
    const std::string found = broadcast_host("the preparation of --data_dir", std::to_string(channels));
    // From here on, the settings are as if the user had given --data_file and not --data_dir.
    c->data_file = data_file_beside(*c, std::stoi(found));
    c->on_command_line.insert("data_file");
    c->data_dir = "";
    c->on_command_line.erase("data_dir");
}
