// ranks.h - between ranks, from device to device.
#pragma once
#include "shared.h"

// =====================================================================================================================
// Between ranks: from device to device
// A rank is a process with a device of its own (unet/host/ranks.h). A build has one of three ways to exchange data
// between devices:
//   USE_NCCL   GPUs: NCCL or, if GPUs of one machine can access each other's memory, direct copies (world.direct)
//   USE_MPI    CPUs: MPI
//   neither    one process, which has nothing to exchange

// Returns what this build lacks to run on several ranks, as a sentence for the user, or null.
static const char* ranks_need() {
#if defined(USE_NCCL) || defined(USE_MPI)
    return nullptr;
#elif defined(__CUDACC__)
    return "this program was built without NCCL, which several GPUs need: install libnccl-dev, or pip install "
           "nvidia-nccl-cu12 into .venv, and make -B train_unet";
#else
    return "this is the CPU build for one process; make train_unet_mpi builds it for several: mpirun -n 2 "
           "./train_unet_mpi";
#endif
}
#ifdef USE_NCCL
// The program never destroys NCCL's handle, because that would wait for the graphs in which NCCL's calls were recorded.
static ncclComm_t communicator = nullptr;

static void leave_devices() {} // nothing to do before a process ends

static std::string nccl_error(ncclResult_t error) {
    return text("NCCL: %s (%s)", ncclGetErrorString(error), ncclGetLastError(communicator));
}
static void nccl_check(ncclResult_t error) {
    if (error != ncclSuccess) die("%s", nccl_error(error).c_str());
}

// Returns the error of a call that NCCL is still working on, or "". The watch (unet/host/ranks.h) calls it.
static std::string device_trouble() {
    ncclResult_t error = ncclSuccess;
    if (communicator) ncclCommGetAsyncError(communicator, &error);
    return error == ncclSuccess || error == ncclInProgress ? "" : nccl_error(error);
}

// Ranks on one machine can open memory for each other (CUDA's interprocess communication). Then the GPUs' copy engines
// can copy there while kernels run, and kernels can write their results directly to the other GPUs. (NCCL copies with
// kernels of its own, which would take multiprocessors from the other kernels.)
struct Opened {
    size_t bytes;
    std::vector<char*> at; // for each rank r: the address, in this process, of rank r's region of memory
};
static std::vector<Opened> opened;
static Stream sender;        // the stream that copies to other ranks
static bool sending = false; // true: copies have begun, and end_exchange must make the main stream wait for them
// An array in the memory of this rank. meetings[r] is the number of meetings (meet_kernel) that rank r has reached,
// which rank r itself writes there. meetings[NEAR] is the number that this rank has reached.
static unsigned* meetings;

// p points into memory of this rank. Returns the address of the same place in rank r's memory, or null if p is not in
// opened memory. A negative offset becomes, as a size_t, larger than any region.
static void* at_rank(void* p, int r) {
    for (const Opened& o : opened) {
        const size_t offset = (char*)p - o.at[world.rank];
        if (offset < o.bytes) return o.at[r] + offset;
    }
    return nullptr;
}

// Allocates memory. If world.direct is true, all ranks call this together, and all can write to this memory. If a rank
// can't open another rank's memory, world.direct becomes false, and all ranks use NCCL from then on. But if an earlier
// call has already opened memory, the program ends.
static void* open_alloc(size_t bytes) {
    if (!world.direct) return device_alloc_bytes(bytes);
    bytes = std::max<size_t>(bytes, 2 << 20); // a smaller region could share a page with memory that must not be opened
    char* const own = (char*)device_alloc_bytes(bytes);
    std::vector<char*> at(world.size, own);
    cudaIpcMemHandle_t handle = {};
    cudaError_t error = cudaIpcGetMemHandle(&handle, own);
    CUDA_CHECK(cudaStreamSynchronize(device.queue)); // wait until the new memory is filled with zeros
    const std::vector<cudaIpcMemHandle_t> handles = gather_host("opening memory for others", handle);
    for (int r = 0; r < world.size && !error; r++) {
        if (r == world.rank) continue;
        error = cudaIpcOpenMemHandle((void**)&at[r], handles[r], cudaIpcMemLazyEnablePeerAccess);
    }
    cudaGetLastError(); // clears CUDA's last error, because this function handles it
    world.direct = !any_rank("opening others' memory", error != cudaSuccess);
    if (world.direct) opened.push_back({bytes, at});
    else if (!opened.empty())
        die("GPUs can't open more memory for each other (%s); --exchange nccl does without", cudaGetErrorString(error));
    return own;
}

// Connects the ranks' GPUs by NCCL. If `direct` is true, all ranks are on one machine, and there are at most NEAR (8)
// ranks, then the ranks also open memory for each other.
static void join_devices(bool direct) {
    if (world.size < 2) return;
    setenv("NCCL_NVLS_ENABLE", "0", 0); // no NVLink multicast, unless the user has set the variable
    ncclUniqueId id;
    if (!world.rank) nccl_check(ncclGetUniqueId(&id));
    memcpy(&id, broadcast_host("the start of NCCL", {(const char*)&id, sizeof id}).data(), sizeof id);
    nccl_check(ncclCommInitRank(&communicator, world.size, id, world.rank));
    world.direct = direct && world.size <= NEAR && on_one_machine();
    meetings = (unsigned*)open_alloc((NEAR + 1) * sizeof(unsigned));
    CUDA_CHECK(cudaStreamCreateWithFlags(&sender.queue, cudaStreamNonBlocking));
    printf("exchange: %s\n", world.direct ? "the GPUs write into each other's memory" : "by NCCL");
}

// Each rank waits here until all ranks have reached this meeting. Thread 0 counts the meeting. Each other thread is
// responsible for one other rank: it writes the number to that rank's memory, and waits until that rank has written the
// same number (or a larger one) here. The first fence makes all earlier writes of this rank visible before the number.
// After the second fence this rank sees the earlier writes of the other ranks. The numbers may overflow, because only
// the sign of their difference matters.
static __global__ void meet_kernel(const __grid_constant__ Everywhere<unsigned> meetings, int rank) {
    await_previous_kernel();
    volatile unsigned* const own = meetings.at[0];
    const unsigned turn = own[NEAR] + 1;
    const int k = threadIdx.x;
    const int r = k <= rank ? k - 1 : k; // whose array meetings.at[k] is; meetings.at[0] is this rank's array
    __syncwarp();
    if (k == 0) own[NEAR] = turn;
    if (k == 0 || k >= meetings.ranks) return;
    __threadfence_system();
    ((volatile unsigned*)meetings.at[k])[rank] = turn;
    while ((int)(own[r] - turn) < 0) {}
    __threadfence_system();
}

static void meet() {
    if (world.direct) launch(meet_kernel, 1, 32, 0, everywhere(meetings), world.rank);
}

// All NCCL calls between begin_exchange and end_exchange become one launch. After direct copies, end_exchange makes the
// main stream wait until the copies of all ranks have arrived.
static void begin_exchange() { nccl_check(ncclGroupStart()); }
static void end_exchange() {
    nccl_check(ncclGroupEnd());
    if (!sending) return;
    sending = false;
    follow(MAIN_STREAM, sender);
    meet();
}

// For each other rank r: copies `bytes` bytes from the address part(r) to part number world.rank of rank r's receiving
// array. `to` is this rank's own receiving array. The copies begin when all work that `stream` has now is done.
template <class F> static void send_directly(void* to, size_t bytes, const Stream& stream, F part) {
    follow(&sender, stream);
    for (int k = 1; k < world.size; k++) {
        // every rank begins with a different receiver, so that several ranks do not send to the same rank at once
        const int r = (world.rank + k) % world.size;
        char* const there = (char*)at_rank(to, r) + world.rank * bytes;
        CUDA_CHECK(cudaMemcpyAsync(there, part(r), bytes, cudaMemcpyDeviceToDevice, sender.queue));
    }
    sending = true;
}

// The next two functions use direct copies if the receiving array is memory that the ranks have opened, otherwise NCCL.
// A direct all_gather copies only to other ranks, so this rank's own array must already lie in its place in `all`.
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream* stream) {
    auto part = [&](int r) { return (const char*)sendbuf + r * bytes; };
    if (at_rank(recvbuf, 0)) return send_directly(recvbuf, bytes, *stream, part);
    for (int r = 0; r < world.size; r++) {
        if (r == world.rank) continue;
        nccl_check(ncclSend(part(r), bytes, ncclInt8, r, communicator, stream->queue));
        nccl_check(ncclRecv((char*)recvbuf + r * bytes, bytes, ncclInt8, r, communicator, stream->queue));
    }
    stream->joined = true; // NCCL may add more than a kernel to the stream, so the next kernel must not overlap it
}

static void all_gather(void* all, const void* own, size_t bytes, Stream* stream) {
    if (at_rank(all, 0)) return send_directly(all, bytes, *stream, [&](int) { return own; });
    nccl_check(ncclAllGather(own, all, bytes, ncclInt8, communicator, stream->queue));
    stream->joined = true;
}
#else // without NCCL: no rank can access another rank's memory
// The exchange is complete when a call of MPI returns. So the next three functions have nothing to do.
static void begin_exchange() {}
static void end_exchange() {}
static void meet() {}
static void* open_alloc(size_t bytes) { return device_alloc_bytes(bytes); }
static void* at_rank(void*, int) { return nullptr; }
static std::string device_trouble() { return ""; }
#ifdef USE_MPI
// Starts MPI. Only the thread that calls this function calls MPI later (MPI_THREAD_FUNNELED).
static void join_devices(bool) {
    if (world.size < 2) return;
    any_rank("the start of MPI", false); // waits for all ranks; if one has ended, the watch names it and ends the run
    int level, size;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != world.size)
        die("MPI knows of %d processes, and its launcher of %d; the CPU build is started by mpirun", size, world.size);
}

static void leave_devices() {
    int joined = 0;
    MPI_Initialized(&joined);
    if (joined) MPI_Finalize();
}

// Ends the run if a call of MPI has failed. If the reason is that another rank has ended, the watch (unet/host/ranks.h)
// tells the user so, and ends the program first.
static void mpi_check(int error) {
    if (error == MPI_SUCCESS) return;
    sleep(3); // if a rank has ended, the watch ends the program during this time
    char why[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, why, &length);
    die("MPI: %s", why);
}

// MPI wants lengths and places as numbers of floats. A rank does not send its own part to itself.
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream*) {
    const int floats = (int)(bytes / sizeof(float)); // floats of a part
    std::vector<int> count(world.size, floats);
    std::vector<int> first(world.size); // the first float of each part
    for (int r = 0; r < world.size; r++) first[r] = r * floats;
    count[world.rank] = 0;
    mpi_check(MPI_Alltoallv(sendbuf, count.data(), first.data(), MPI_FLOAT, //
                            recvbuf, count.data(), first.data(), MPI_FLOAT, MPI_COMM_WORLD));
}

static void all_gather(void* all, const void* own, size_t bytes, Stream*) {
    const int n = (int)(bytes / sizeof(float));
    const bool in_place = own == (char*)all + world.rank * bytes;
    mpi_check(MPI_Allgather(in_place ? MPI_IN_PLACE : own, n, MPI_FLOAT, all, n, MPI_FLOAT, MPI_COMM_WORLD));
}
#else // one process: there is nothing to send
static void join_devices(bool) {}
static void leave_devices() {}
static void all_to_all(void*, const void*, size_t, Stream*) {}
static void all_gather(void*, const void*, size_t, Stream*) {}
#endif
#endif
