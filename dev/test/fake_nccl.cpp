// A stand-in for NCCL, beside fake_cudart.cpp: ranks are processes of one machine, and what they send are files in a folder of theirs, below TMPDIR.
// As there, FAIL_CALL=ncclSend FAIL_AT=3 makes the third ncclSend fail.
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

struct ncclComm {
    std::string folder;
    int size, rank;
    std::map<std::pair<int, int>, long> sent; // how many messages, by whom and to whom

    // Of the next message.
    std::string path(int from, int to) {
        const long number = sent[{from, to}]++;
        return folder + "/" + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(number);
    }
};

namespace {

// A message appears whole, and nobody waits for who takes it.
void send_now(ncclComm* comm, int to, const void* from, size_t bytes) {
    const std::string path = comm->path(comm->rank, to), begun = path + ".begun";
    FILE* const file = fopen(begun.c_str(), "wb");
    if (!file || fwrite(from, 1, bytes, file) != bytes || fclose(file) || rename(begun.c_str(), path.c_str()))
        fprintf(stderr, "fake NCCL: %s can't be written\n", path.c_str());
}

std::atomic<bool> is_broken = false; // for good, by an error that ncclCommGetAsyncError tells of

// Waits for ever for a rank that is gone, as NCCL does.
void receive_now(ncclComm* comm, int from, void* to, size_t bytes) {
    const std::string path = comm->path(from, comm->rank);
    FILE* file;
    while (is_broken || !(file = fopen(path.c_str(), "rb"))) usleep(200);
    if (fread(to, 1, bytes, file) != bytes) fprintf(stderr, "fake NCCL: %s is too short\n", path.c_str());
    fclose(file);
    unlink(path.c_str());
}

// Calls of a group begin where it ends.
bool grouped = false;
std::vector<std::pair<cudaStream_t, std::function<void()>>> group;
void add(cudaStream_t stream, std::function<void()> work) {
    if (grouped) group.emplace_back(stream, std::move(work));
    else fake_work(stream, std::move(work));
}

size_t size_of(ncclDataType_t type) {
    if (type == ncclInt8) return 1;
    fprintf(stderr, "fake NCCL: of data types it knows ncclInt8\n");
    exit(9);
}

} // namespace

#define MAY_FAIL \
    if (fake_failure(__func__)) return ncclSystemError

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    MAY_FAIL;
    const std::string name = std::filesystem::temp_directory_path() / "fake_nccl.XXXXXX";
    *id = {};
    if (name.size() >= sizeof id->internal || !mkdtemp(strcpy(id->internal, name.c_str()))) return ncclSystemError;
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    MAY_FAIL;
    *comm = new ncclComm{id.internal, size, rank, {}};
    return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
    MAY_FAIL;
    grouped = true;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    MAY_FAIL;
    grouped = false;
    for (auto& [stream, work] : std::exchange(group, {})) fake_work(stream, std::move(work));
    return ncclSuccess;
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream) {
    MAY_FAIL;
    const size_t bytes = count * size_of(type);
    add(stream, [=] { send_now(comm, to, from, bytes); });
    return ncclSuccess;
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
    MAY_FAIL;
    const size_t bytes = count * size_of(type);
    add(stream, [=] { receive_now(comm, from, to, bytes); });
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* own, void* all, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    MAY_FAIL;
    const size_t bytes = count * size_of(type);
    add(stream, [=] {
        memmove((char*)all + comm->rank * bytes, own, bytes);
        for (int r = 0; r < comm->size; r++)
            if (r != comm->rank) send_now(comm, r, (char*)all + comm->rank * bytes, bytes);
        for (int r = 0; r < comm->size; r++)
            if (r != comm->rank) receive_now(comm, r, (char*)all + r * bytes, bytes);
    });
    return ncclSuccess;
}
// A failure: something has gone wrong that another call began, and nothing comes any more.
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    if (fake_failure(__func__)) is_broken = true;
    *error = is_broken ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error that the test asked for"; }
const char* ncclGetLastError(ncclComm_t) { return "nothing more is known"; }

} // extern "C"
