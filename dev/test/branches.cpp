// Ranks that take different branches, which the program itself never should: each does what its words say, one after the other.
//   mpicxx -DUSE_MPI -x c++ ... branches.cpp && mpirun -n 1 ./branches question end : -n 1 ./branches exchange end
// question, answer: what hosts ask each other; exchange, sums: what devices send each other; slow: something that takes long; fail: a mistake
#define TRAIN_UNET_NO_MAIN
#include "../../train_unet.cu"

int main(int argc, char** argv) {
    find_ranks();
    take_num_gpus("1", 5, argv); // --rank_timeout 5
    join_devices(false);
    std::vector<float> own(4096), all(4096 * world.size);
    for (const std::string word : std::vector<std::string>(argv + 1, argv + argc)) {
        if (word == "question") any_rank("a question", 0);
        if (word == "answer") broadcast_host("an answer", "yes");
        if (word == "slow") sleep(8);
        if (word == "fail") die("a mistake");
        if (word == "exchange") {
            come_to("an exchange");
            all_gather(all.data(), own.data(), own.size() * sizeof(float), MAIN_STREAM);
        }
        if (word == "sums") {
            come_to("an exchange of sums");
            all_to_all(all.data(), all.data(), own.size() * sizeof(float), MAIN_STREAM);
        }
    }
    return 0;
}
