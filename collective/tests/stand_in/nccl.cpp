// A library with NCCL's and RCCL's table for ranks that are threads of one process, on devices whose memory is the host's and whose
// queues are empty when a library is called. What NCCL does not allow, it answers with an error: transfers that are not in a group,
// a member that is used while it is in progress or after its end, parts whose ends differ in size. Its own sums go round from rank
// to rank, each owner's from itself on: an order that no tree has.
//
// Where devices have queues that run by themselves (WITH_HIP), it waits for the queue that it is called for.
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#ifdef WITH_HIP
extern "C" unsigned hipStreamSynchronize(void* queue);
#else
static unsigned hipStreamSynchronize(void*) { return 0; }
#endif

namespace {

enum Answer { Success = 0, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5, InProgress = 7 };

using Mail = std::deque<std::vector<char>>;

struct Group {
    int ranks = 0;
    std::set<int> joined;
    std::map<std::pair<int, int>, Mail> mail;
};

struct Receive {
    int from;
    void* to;
    size_t bytes;
    // Adds to what is there, in the order of the calls, instead of writing.
    bool adds;
};

struct Member {
    std::shared_ptr<Group> group;
    int rank = 0;
    std::vector<Receive> waiting;
    int failed = Success;
};

struct Id {
    char bytes[128];
};

// As NCCL 2.18 has it.
struct Config {
    size_t bytes;
    unsigned magic, version;
    int blocking, cluster_size, least_blocks, most_blocks;
    const char* network;
    int shares_when_split;
};

std::mutex lock;
std::map<std::string, std::weak_ptr<Group>> groups;
std::set<Member*> members;

thread_local int depth = 0;
thread_local std::set<Member*> of_group;

// Takes what has come, in the order in which it was asked for.
int progress(Member& member) {
    if (member.failed) return member.failed;
    if (int(member.group->joined.size()) < member.group->ranks) return InProgress;
    std::vector<Receive> still;
    std::set<int> behind;
    bool adds_later = false;
    for (const Receive& receive : member.waiting) {
        Mail& mail = member.group->mail[{receive.from, member.rank}];
        if (behind.count(receive.from) || mail.empty() || (receive.adds && adds_later)) {
            behind.insert(receive.from);
            adds_later = adds_later || receive.adds;
            still.push_back(receive);
            continue;
        }
        if (mail.front().size() != receive.bytes) return member.failed = InvalidArgument;
        if (receive.adds) {
            const float* terms = reinterpret_cast<const float*>(mail.front().data());
            float* sums = static_cast<float*>(receive.to);
            for (size_t i = 0; i < receive.bytes / sizeof(float); i++) sums[i] += terms[i];
        } else {
            std::memcpy(receive.to, mail.front().data(), receive.bytes);
        }
        mail.pop_front();
    }
    member.waiting = still;
    return still.empty() ? Success : InProgress;
}

Member* known(void* raw) {
    auto found = members.find(static_cast<Member*>(raw));
    return found == members.end() ? nullptr : *found;
}

int end(void* raw) {
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (!member) return InvalidArgument;
    members.erase(member);
    delete member;
    return Success;
}

// Checks the member that every call takes.
int check(Member* member, bool is_known_type) {
    if (!member || !is_known_type) return InvalidArgument;
    return of_group.count(member) || progress(*member) == Success ? Success : InvalidUsage;
}

// Checks the member and the peer of a transfer.
int check_transfer(Member* member, int type, int peer) {
    if (!member || peer < 0 || peer >= member->group->ranks || peer == member->rank) return InvalidArgument;
    if (depth == 0) return InvalidUsage;
    return check(member, type == 1);
}

void send(Member& member, int peer, const char* from, size_t bytes) {
    member.group->mail[{member.rank, peer}].emplace_back(from, from + bytes);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
    *version = 21803;
    return Success;
}

int ncclGetUniqueId(Id* id) {
    std::random_device random;
    std::memset(id->bytes, 0, sizeof id->bytes);
    std::snprintf(id->bytes, sizeof id->bytes, "stand-in %08x%08x", random(), random());
    return Success;
}

int ncclCommInitRankConfig(void** out, int ranks, Id id, int rank, Config* config) {
    if (!config || config->magic != 0xcafebeefu || config->bytes != sizeof(Config)) return InvalidArgument;
    if (config->version < 21800 || config->blocking != 0) return InvalidArgument;
    if (config->cluster_size != INT_MIN || config->shares_when_split != INT_MIN) return InvalidArgument;
    if (rank < 0 || rank >= ranks) return InvalidArgument;
    std::lock_guard<std::mutex> held(lock);
    auto& place = groups[std::string(id.bytes, sizeof id.bytes)];
    auto group = place.lock();
    if (!group) place = group = std::make_shared<Group>();
    if (group->ranks == 0) group->ranks = ranks;
    if (group->ranks != ranks || !group->joined.insert(rank).second) return InvalidUsage;
    Member* member = new Member;
    member->group = group;
    member->rank = rank;
    members.insert(member);
    *out = member;
    return InProgress;
}

int ncclCommDestroy(void* raw) {
    {
        std::lock_guard<std::mutex> held(lock);
        Member* member = known(raw);
        if (!member || progress(*member) != Success) return InvalidArgument;
    }
    return end(raw);
}
int ncclCommAbort(void* raw) { return end(raw); }

int ncclCommGetAsyncError(void* raw, int* state) {
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (!member) return InvalidArgument;
    *state = progress(*member);
    return Success;
}

int ncclGroupStart() {
    depth++;
    return Success;
}

int ncclGroupEnd() {
    if (depth == 0) return InvalidUsage;
    depth--;
    of_group.clear();
    return InProgress;
}

int ncclSend(const void* from, size_t bytes, int type, int peer, void* raw, void* queue) {
    if (hipStreamSynchronize(queue)) return InternalError;
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (int wrong = check_transfer(member, type, peer)) return wrong;
    of_group.insert(member);
    send(*member, peer, static_cast<const char*>(from), bytes);
    return Success;
}

int ncclRecv(void* to, size_t bytes, int type, int peer, void* raw, void* queue) {
    if (hipStreamSynchronize(queue)) return InternalError;
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (int wrong = check_transfer(member, type, peer)) return wrong;
    of_group.insert(member);
    member->waiting.push_back({peer, to, bytes, false});
    return Success;
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, void* raw, void* queue) {
    if (hipStreamSynchronize(queue)) return InternalError;
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (int wrong = check(member, type == 7 && operation == 0)) return wrong;
    const char* parts = static_cast<const char*>(from);
    int rank = member->rank, ranks = member->group->ranks;
    size_t bytes = count * sizeof(float);
    std::memcpy(to, parts + rank * bytes, bytes);
    for (int turn = 1; turn < ranks; turn++) {
        int peer = (rank + turn) % ranks;
        send(*member, peer, parts + peer * bytes, bytes);
        member->waiting.push_back({peer, to, bytes, true});
    }
    return InProgress;
}

int ncclAllGather(const void* from, void* to, size_t count, int type, void* raw, void* queue) {
    if (hipStreamSynchronize(queue)) return InternalError;
    std::lock_guard<std::mutex> held(lock);
    Member* member = known(raw);
    if (int wrong = check(member, type == 7)) return wrong;
    const char* own = static_cast<const char*>(from);
    char* parts = static_cast<char*>(to);
    int rank = member->rank, ranks = member->group->ranks;
    size_t bytes = count * sizeof(float);
    std::memcpy(parts + rank * bytes, own, bytes);
    for (int peer = 0; peer < ranks; peer++) {
        if (peer == rank) continue;
        send(*member, peer, own, bytes);
        member->waiting.push_back({peer, parts + peer * bytes, bytes, false});
    }
    return InProgress;
}

const char* ncclGetErrorString(int answer) {
    switch (answer) {
        case Success: return "no error";
        case InvalidArgument: return "invalid argument";
        case InvalidUsage: return "invalid usage";
        case InProgress: return "in progress";
        default: return "internal error";
    }
}
}
