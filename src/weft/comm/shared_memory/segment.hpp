// What the ranks of one group share: one mapping that holds a page of control words per rank, two banks of staging
// memory per rank, an arena per rank for tensors that are reduced where they lie, and a ring of bytes for the messages
// of every rank to every other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weft {

constexpr uint64_t kMagic = 0x5765667453686d31;  // "WeftShm1"
constexpr int kMaxRanks = 128;
constexpr size_t kPage = 4096;
constexpr size_t kLine = 128;  // two lines: processors fetch them in pairs
constexpr size_t kBankBytes = size_t{4} << 20;  // room for the largest slot; only what is used gets memory

enum class Kind : uint32_t { kAllReduce = 0, kReduceScatter, kAllGather, kAllToAll, kBarrier };

enum class Trouble : uint32_t { kNone = 0, kDied, kDeadline, kAborted, kMismatch, kLeft, kClosed };

// Where a rank's tensor lies: in its arena, where the others may read (or, all-reduce, write) it; in its own memory; or
// nowhere, since the others need nothing of it.
enum class Place : uint64_t { kElsewhere = 0, kArena, kNowhere };

// Which call a rank makes; compared before anybody touches anybody else's data.
struct Signature {
  uint32_t kind;
  uint32_t dtype;
  uint32_t op;
  uint32_t reserved;
  uint64_t bytes;
  uint64_t layout;  // digest of the regions' sizes

  bool operator==(const Signature& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && bytes == other.bytes &&
           layout == other.layout;
  }
};

// Written by its rank before the first turn of call k, read by the others after it, written again for call k + 2.
// Before call k + 2 begins its rank has seen every other rank's first turn of call k + 1, and so the end of reading.
struct Notice {
  Signature signature;
  Place place;
  uint64_t table[kMaxRanks];  // offsets in the segment, or bytes sent to each rank
};

struct alignas(kLine) Turn {
  std::atomic<uint32_t> count;     // turns that this rank has published; also what the others sleep on
  std::atomic<uint32_t> sleepers;  // how many sleep on `count`
};

// Rung by the others when there is something new in a channel of this rank's; its threads sleep on it.
struct alignas(kLine) Bell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;
};

constexpr uint64_t kRingBytes = uint64_t{1} << 20;  // of messages that nobody has asked for yet; memory where used

// From one rank to one other: a stream of messages, each a header and its bytes, in a ring (see mail.hpp).
struct alignas(kPage) Channel {
  alignas(kLine) std::atomic<uint64_t> written;     // bytes since the beginning; by the source
  alignas(kLine) std::atomic<uint64_t> read;        // likewise; by the target
  alignas(kLine) std::atomic<uint32_t> wants_room;  // the source is to be told when something has been read
  alignas(kPage) char ring[kRingBytes];
};

struct alignas(kPage) RankControl {
  Turn turn;
  Bell bell;
  alignas(kLine) std::atomic<uint32_t> pid;
  std::atomic<uint32_t> has_left;
  std::atomic<uint64_t> start_time;  // of the process, in clock ticks since boot: process ids are used again
  alignas(kLine) double probe_seconds[16];
  alignas(kLine) Notice notices[2];
};
static_assert(sizeof(RankControl) == kPage, "one page per rank");
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock in one process");

struct alignas(kPage) Header {
  uint64_t magic;
  uint64_t nonce[2];
  uint32_t num_ranks;
  uint32_t reserved;
  uint64_t arena_bytes;
  alignas(kLine) std::atomic<uint64_t> trouble;  // 0, else Trouble << 32 | reporter << 16 | culprit; the first one stays
};
static_assert(sizeof(Header) == kPage, "one page");

// A rank's view of the mapping; owns nothing.
class Segment {
 public:
  Segment() = default;
  explicit Segment(char* base) : base_(base) {}

  static size_t size(int num_ranks, size_t arena_bytes) {
    return kPage + num_ranks * (kPage + 2 * kBankBytes + arena_bytes + num_ranks * sizeof(Channel));
  }

  char* base() const { return base_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  int num_ranks() const { return static_cast<int>(header().num_ranks); }
  RankControl& control(int rank) const { return *reinterpret_cast<RankControl*>(base_ + kPage + rank * kPage); }
  // The bank that `rank` writes before it publishes `turn`.
  char* bank(int rank, uint32_t turn) const { return banks() + (2 * size_t(rank) + (turn & 1)) * kBankBytes; }
  char* arena(int rank) const { return banks() + num_ranks() * 2 * kBankBytes + rank * header().arena_bytes; }

  Channel& channel(int source, int target) const {
    char* channels = arena(num_ranks());
    return *reinterpret_cast<Channel*>(channels + (size_t(source) * num_ranks() + target) * sizeof(Channel));
  }

  bool arena_holds(int rank, const void* at, size_t bytes) const {
    const char* from = static_cast<const char*>(at);
    const char* arena_start = arena(rank);
    return from >= arena_start && from + bytes <= arena_start + header().arena_bytes;
  }

 private:
  char* banks() const { return base_ + kPage + num_ranks() * kPage; }
  char* base_ = nullptr;
};

}  // namespace weft
