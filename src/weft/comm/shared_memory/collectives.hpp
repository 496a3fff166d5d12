// The collectives of one rank over a segment, each as a sequence of phases (see waiting.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "waiting.hpp"

namespace weft {

// One rank's part in a collective.  `send_*` and `receive_*` have an entry per rank of the group: addresses in this
// process, and bytes.
struct Call {
  Kind kind = Kind::kBarrier;
  Dtype dtype = Dtype::kU8;
  ReduceOp op = ReduceOp::kSum;
  const char* input = nullptr;  // all-reduce: the tensor; all-gather: this rank's part
  char* output = nullptr;       // all-reduce: the result (may be `input`); reduce-scatter: this rank's part of the sum
  uint64_t bytes = 0;           // all-reduce: of the tensor
  std::vector<uint64_t> send_at, send_bytes;        // reduce-scatter: what each rank owns; all-to-all: what it gets
  std::vector<uint64_t> receive_at, receive_bytes;  // all-gather, all-to-all: what comes from each rank
  double patience_seconds = 600.0;
};

// How a rank copies into its banks: measured once per group (see `Member::probe_once`).  Slots that stay in the cache
// that the ranks share are best; where they share none, stores past the cache spare the fetching of the other's lines.
struct Manner {
  uint32_t slot_bytes = 1u << 20;
  bool streams_in = false;
};

class Member {
 public:
  Member(Segment segment, int rank, int num_local_ranks)
      : segment_(segment), rank_(rank), num_ranks_(segment.num_ranks()), turns_(segment, rank, num_local_ranks) {}

  // Carries out one call with the others; throws Failed.  One thread at a time.
  void run(const Call& call, bool is_background);

  Signature announced(int rank) const { return notice(rank).signature; }  // of the call under way, or the last one
  void set_manner(Manner given) {
    manner = given;
    is_probed_ = true;
  }

  Manner manner;  // the slot must agree between the ranks
  uint64_t in_place_calls() const { return in_place_calls_; }

 private:
  struct Part {
    uint64_t start, stop;
  };
  enum class Mode { kStaged, kInPlace, kRestart };

  void run_alone(const Call& call);
  void all_reduce(const Call& call);
  void all_reduce_at_once(const Call& call);
  void all_reduce_in_place(const Call& call);
  void all_reduce_staged(const Call& call, uint64_t turns_passed);
  void reduce_scatter(const Call& call);
  void all_gather(const Call& call);
  void all_to_all(const Call& call);
  void probe_once(const Call& call);
  double probe_seconds(char* scratch, size_t bytes);

  void announce(const Call& call, Place place, const std::vector<uint64_t>* table);
  void compare();
  Mode mode() const;
  const Notice& notice(int rank) const { return segment_.control(rank).notices[call_ & 1]; }
  uint64_t offset_in_arena(const void* at, uint64_t bytes) const;
  Part part(uint64_t bytes, int rank, uint64_t element) const;

  char* mine() const { return segment_.bank(rank_, turns_.next()); }          // to be written in this phase
  const char* theirs(int rank) const { return segment_.bank(rank, turns_.last()); }  // published with the last turn
  void copy_in(char* to, const char* from, uint64_t bytes) const { copy(to, from, bytes, manner.streams_in); }

  Segment segment_;
  int rank_;
  int num_ranks_;
  Turns turns_;
  uint64_t call_ = 0;
  uint64_t in_place_calls_ = 0;
  bool is_probed_ = false;
};

}  // namespace weft
