#include "collectives.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace weft {
namespace {

// Up to here every rank sums everything itself: one turn instead of two.
constexpr uint64_t kAtOnceBytes = 32u << 10;
// A tensor in the arena is worth an extra turn from here on; all ranks see the same size, so they agree.
constexpr uint64_t kInPlaceBytes = 64u << 10;
constexpr uint64_t kAlign = 128;

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// FNV-1a over the regions' sizes: ranks that cut differently must not read one another's data.
uint64_t digest(const std::vector<uint64_t>& sizes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint64_t size : sizes) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((size >> shift) & 0xff)) * 0x100000001b3u;
  }
  return hash;
}

uint64_t total(const std::vector<uint64_t>& sizes) {
  uint64_t sum = 0;
  for (const uint64_t size : sizes) sum += size;
  return sum;
}

uint64_t longest(const std::vector<uint64_t>& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

uint64_t phases(uint64_t bytes, uint64_t piece) { return (bytes + piece - 1) / piece; }

// [start, start + length) of piece `index`, cut off at `bytes`.
uint64_t piece_length(uint64_t bytes, uint64_t piece, uint64_t index) {
  const uint64_t start = piece * index;
  return start >= bytes ? 0 : std::min(piece, bytes - start);
}

char* address(uint64_t at) { return reinterpret_cast<char*>(at); }

}  // namespace

void Member::run(const Call& call, bool is_background) {
  const auto patience = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(call.patience_seconds, 1e9)));
  turns_.begin(patience, is_background);
  if (num_ranks_ == 1) {
    run_alone(call);
    return;
  }
  probe_once(call);
  ++call_;
  switch (call.kind) {
    case Kind::kAllReduce: all_reduce(call); break;
    case Kind::kReduceScatter: reduce_scatter(call); break;
    case Kind::kAllGather: all_gather(call); break;
    case Kind::kAllToAll: all_to_all(call); break;
    case Kind::kBarrier:
      announce(call, Place::kElsewhere, nullptr);
      turns_.pass();
      compare();
      break;
  }
}

void Member::run_alone(const Call& call) {
  if (call.kind == Kind::kAllReduce && call.output != call.input) std::memmove(call.output, call.input, call.bytes);
  if (call.kind == Kind::kReduceScatter && call.output != address(call.send_at[0])) {
    std::memmove(call.output, address(call.send_at[0]), call.send_bytes[0]);
  }
  if (call.kind == Kind::kAllGather && address(call.receive_at[0]) != call.input) {
    std::memmove(address(call.receive_at[0]), call.input, call.receive_bytes[0]);
  }
  if (call.kind == Kind::kAllToAll) std::memmove(address(call.receive_at[0]), address(call.send_at[0]), call.send_bytes[0]);
}

// ── agreement ───────────────────────────────────────────────────────────────────────────────────────────────────────

void Member::announce(const Call& call, Place place, const std::vector<uint64_t>* table) {
  Notice& mine = segment_.control(rank_).notices[call_ & 1];
  mine.signature = {uint32_t(call.kind), 0, 0, 0, call.bytes, 0};
  if (call.kind == Kind::kAllReduce || call.kind == Kind::kReduceScatter) {
    mine.signature.dtype = uint32_t(call.dtype);
    mine.signature.op = uint32_t(call.op);
  }
  if (call.kind == Kind::kReduceScatter) {
    mine.signature.bytes = total(call.send_bytes);
    mine.signature.layout = digest(call.send_bytes);
  } else if (call.kind == Kind::kAllGather) {
    mine.signature.bytes = total(call.receive_bytes);
    mine.signature.layout = digest(call.receive_bytes);
  }
  mine.place = place;
  if (table != nullptr) std::copy(table->begin(), table->end(), mine.table);
}

// After the first turn of a call.  The ranks' turns are counted alike, whatever they call, so that what one finds here
// is what the other posted for the same call.
void Member::compare() {
  const Signature& mine = notice(rank_).signature;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!(notice(rank).signature == mine)) turns_.fail(Trouble::kMismatch, rank);
  }
}

Member::Mode Member::mode() const {
  bool any_in_arena = false, any_elsewhere = false;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    any_in_arena |= notice(rank).place == Place::kArena;
    any_elsewhere |= notice(rank).place == Place::kElsewhere;
  }
  if (!any_elsewhere) return Mode::kInPlace;
  return any_in_arena ? Mode::kRestart : Mode::kStaged;  // those in the arena have staged nothing yet
}

uint64_t Member::offset_in_arena(const void* at, uint64_t bytes) const {
  if (!segment_.arena_holds(rank_, at, bytes)) return 0;
  return static_cast<uint64_t>(static_cast<const char*>(at) - segment_.base());
}

// Rank `rank`'s share of `bytes`, cut at multiples of 128 bytes.
Member::Part Member::part(uint64_t bytes, int rank, uint64_t element) const {
  const uint64_t share = round_up((bytes + num_ranks_ - 1) / num_ranks_, std::max(kAlign, element));
  return {std::min(bytes, share * rank), std::min(bytes, share * (rank + 1))};
}

// ── all-reduce ──────────────────────────────────────────────────────────────────────────────────────────────────────

void Member::all_reduce(const Call& call) {
  if (call.bytes <= kAtOnceBytes) {
    all_reduce_at_once(call);
    return;
  }
  const uint64_t offset = call.input == call.output ? offset_in_arena(call.input, call.bytes) : 0;
  const bool is_in_arena = call.bytes >= kInPlaceBytes && offset != 0;
  const std::vector<uint64_t> table{offset};
  announce(call, is_in_arena ? Place::kArena : Place::kElsewhere, &table);
  if (!is_in_arena) {
    all_reduce_staged(call, 0);
    return;
  }
  turns_.pass();
  compare();
  if (mode() == Mode::kInPlace) {
    all_reduce_in_place(call);
  } else {
    all_reduce_staged(call, 1);
  }
}

// Everybody copies in and sums all; the order of the sum is that of the ranks, so the result is the same everywhere.
void Member::all_reduce_at_once(const Call& call) {
  announce(call, Place::kElsewhere, nullptr);
  copy(mine(), call.input, call.bytes, false);
  turns_.pass();
  compare();
  std::array<const void*, kMaxRanks> from;
  for (int rank = 0; rank < num_ranks_; ++rank) from[rank] = theirs(rank);
  void* to = call.output;
  reduce(call.dtype, call.op, &to, 1, from.data(), num_ranks_, call.bytes / element_bytes(call.dtype));
}

// Each rank sums its share of everybody's tensor and writes the sum into all of them: nobody else touches that share.
void Member::all_reduce_in_place(const Call& call) {
  ++in_place_calls_;
  const Part share = part(call.bytes, rank_, element_bytes(call.dtype));
  std::array<const void*, kMaxRanks> from;
  std::array<void*, kMaxRanks> to;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    to[rank] = segment_.base() + notice(rank).table[0] + share.start;
    from[rank] = to[rank];
  }
  const uint64_t count = (share.stop - share.start) / element_bytes(call.dtype);
  reduce(call.dtype, call.op, to.data(), num_ranks_, from.data(), num_ranks_, count);
  turns_.pass();
}

// A pipeline of three stages with one turn between two phases.  In phase t a rank copies the others' shares of piece t
// into its bank, sums its own share of piece t - 1 (its own tensor, the others' banks) into its bank and its tensor, and
// copies the others' sums of piece t - 2 out of their banks.  A bank holds a part per rank; the own part, which nobody
// needs to be sent, holds the sum.
//
//   phase     0        1        2        3
//   in      piece 0  piece 1  piece 2
//   sum              piece 0  piece 1  piece 2
//   out                       piece 0  piece 1  …
//
// `turns_passed` is 1 where this call's first turn has passed already: all begin with piece 0 again then.
void Member::all_reduce_staged(const Call& call, uint64_t turns_passed) {
  const uint64_t element = element_bytes(call.dtype);
  const uint64_t piece = std::max<uint64_t>(manner.slot_bytes / num_ranks_ / kAlign, 1) * kAlign * num_ranks_;
  const uint64_t part_bytes = piece / num_ranks_;
  const uint64_t num_pieces = phases(call.bytes, piece);
  bool is_compared = turns_passed > 0;
  std::array<const void*, kMaxRanks> from;
  for (uint64_t phase = 0; phase < num_pieces + 2; ++phase) {
    char* bank = mine();
    if (phase < num_pieces) {
      const uint64_t length = piece_length(call.bytes, piece, phase);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        const Part share = part(length, rank, element);
        if (rank == rank_) continue;
        copy_in(bank + rank * part_bytes, call.input + phase * piece + share.start, share.stop - share.start);
      }
    }
    if (phase >= 1 && phase - 1 < num_pieces) {
      const uint64_t length = piece_length(call.bytes, piece, phase - 1);
      const Part share = part(length, rank_, element);
      const uint64_t at = (phase - 1) * piece + share.start;
      for (int rank = 0; rank < num_ranks_; ++rank) from[rank] = theirs(rank) + rank_ * part_bytes;
      from[rank_] = call.input + at;
      void* sum = bank + rank_ * part_bytes;
      const uint64_t size = share.stop - share.start;
      reduce(call.dtype, call.op, &sum, 1, from.data(), num_ranks_, size / element);
      copy(call.output + at, sum, size, false);
    }
    if (phase >= 2) {
      const uint64_t length = piece_length(call.bytes, piece, phase - 2);
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;  // everybody begins at another, so that banks are not crowded
        const Part share = part(length, rank, element);
        copy(call.output + (phase - 2) * piece + share.start, theirs(rank) + rank * part_bytes,
             share.stop - share.start, false);
      }
    }
    if (phase == num_pieces + 1) break;  // what the others published is read before this rank's next turn
    turns_.pass();
    if (!is_compared) {
      compare();
      is_compared = true;
      if (mode() == Mode::kRestart) {
        all_reduce_staged(call, 1);
        return;
      }
    }
  }
}

// ── reduce-scatter ──────────────────────────────────────────────────────────────────────────────────────────────────

void Member::reduce_scatter(const Call& call) {
  const uint64_t element = element_bytes(call.dtype);
  std::vector<uint64_t> table(num_ranks_, 0);
  Place place = total(call.send_bytes) >= kInPlaceBytes ? Place::kNowhere : Place::kElsewhere;
  for (int rank = 0; rank < num_ranks_ && place != Place::kElsewhere; ++rank) {
    if (rank == rank_ || call.send_bytes[rank] == 0) continue;
    table[rank] = offset_in_arena(address(call.send_at[rank]), call.send_bytes[rank]);
    place = table[rank] != 0 ? Place::kArena : Place::kElsewhere;
  }
  announce(call, place, &table);

  const uint64_t owners = std::count_if(call.send_bytes.begin(), call.send_bytes.end(), [](uint64_t b) { return b; });
  const uint64_t piece = std::max<uint64_t>(manner.slot_bytes / std::max<uint64_t>(owners, 1) / kAlign, 1) * kAlign;
  std::vector<uint64_t> slot(num_ranks_, 0);  // of each owner in a bank
  for (int rank = 1; rank < num_ranks_; ++rank) slot[rank] = slot[rank - 1] + (call.send_bytes[rank - 1] ? piece : 0);
  const uint64_t num_pieces = std::max<uint64_t>(phases(longest(call.send_bytes), piece), 1);
  const uint64_t own_bytes = call.send_bytes[rank_];
  const char* own = address(call.send_at[rank_]);
  std::array<const void*, kMaxRanks> from;
  const auto sum = [&](uint64_t start, uint64_t size) {
    from[rank_] = own + start;
    void* to = call.output + start;
    reduce(call.dtype, call.op, &to, 1, from.data(), num_ranks_, size / element);
  };

  bool is_compared = false, stages = place == Place::kElsewhere;
  for (uint64_t phase = 0; phase <= num_pieces; ++phase) {
    if (stages && phase < num_pieces) {
      char* bank = mine();
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;
        const uint64_t size = piece_length(call.send_bytes[rank], piece, phase);
        copy_in(bank + slot[rank], address(call.send_at[rank]) + phase * piece, size);
      }
    }
    if (phase >= 1) {
      for (int rank = 0; rank < num_ranks_; ++rank) from[rank] = theirs(rank) + slot[rank_];
      sum((phase - 1) * piece, piece_length(own_bytes, piece, phase - 1));
    }
    if (phase == num_pieces) break;
    turns_.pass();
    if (is_compared) continue;
    is_compared = true;
    compare();
    const Mode found = mode();
    if (found == Mode::kInPlace) {
      ++in_place_calls_;
      for (int rank = 0; rank < num_ranks_; ++rank) from[rank] = segment_.base() + notice(rank).table[rank_];
      sum(0, own_bytes);
      turns_.pass();  // nobody may change its tensor before all have read it
      return;
    }
    if (found == Mode::kRestart) {
      stages = true;
      phase = uint64_t(-1);  // the first one comes again
    }
  }
}

// ── all-gather ──────────────────────────────────────────────────────────────────────────────────────────────────────

void Member::all_gather(const Call& call) {
  const uint64_t own_bytes = call.receive_bytes[rank_];
  const uint64_t whole = total(call.receive_bytes);
  const uint64_t offset = offset_in_arena(call.input, own_bytes);
  Place place = offset != 0 ? Place::kArena : Place::kElsewhere;
  if (own_bytes == 0) place = Place::kNowhere;
  if (whole < kInPlaceBytes) place = Place::kElsewhere;
  const std::vector<uint64_t> table{offset};
  announce(call, place, &table);
  const uint64_t piece = manner.slot_bytes;
  const uint64_t num_pieces = std::max<uint64_t>(phases(longest(call.receive_bytes), piece), 1);
  char* own = address(call.receive_at[rank_]);
  const auto receive = [&](int rank, const char* from, uint64_t start, uint64_t size) {
    copy(address(call.receive_at[rank]) + start, from, size, false);
  };

  bool is_compared = false, stages = place == Place::kElsewhere;
  for (uint64_t phase = 0; phase <= num_pieces; ++phase) {
    if (stages && phase < num_pieces) {
      copy_in(mine(), call.input + phase * piece, piece_length(own_bytes, piece, phase));
    }
    if (phase >= 1) {
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;
        const uint64_t size = piece_length(call.receive_bytes[rank], piece, phase - 1);
        receive(rank, theirs(rank), (phase - 1) * piece, size);
      }
    }
    if (phase == num_pieces) break;
    turns_.pass();
    if (is_compared) continue;
    is_compared = true;
    compare();
    const Mode found = mode();
    if (found == Mode::kInPlace) {
      ++in_place_calls_;
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;
        receive(rank, segment_.base() + notice(rank).table[0], 0, call.receive_bytes[rank]);
      }
      turns_.pass();
      break;
    }
    if (found == Mode::kRestart) {
      stages = true;
      phase = uint64_t(-1);  // the first one comes again
    }
  }
  if (own != call.input) std::memmove(own, call.input, own_bytes);
}

// ── all-to-all ──────────────────────────────────────────────────────────────────────────────────────────────────────

// The number of phases is known to everybody after the first: until then nobody knows what the others send.
void Member::all_to_all(const Call& call) {
  announce(call, Place::kElsewhere, &call.send_bytes);
  const uint64_t piece = std::max<uint64_t>(manner.slot_bytes / num_ranks_ / kAlign, 1) * kAlign;
  uint64_t num_pieces = 1;
  for (uint64_t phase = 0; phase <= num_pieces; ++phase) {
    if (phase < num_pieces) {
      char* bank = mine();
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;
        const uint64_t size = piece_length(call.send_bytes[rank], piece, phase);
        copy_in(bank + rank * piece, address(call.send_at[rank]) + phase * piece, size);
      }
    }
    if (phase >= 1) {
      for (int step = 1; step < num_ranks_; ++step) {
        const int rank = (rank_ + step) % num_ranks_;
        const uint64_t size = piece_length(call.receive_bytes[rank], piece, phase - 1);
        copy(address(call.receive_at[rank]) + (phase - 1) * piece, theirs(rank) + rank_ * piece, size, false);
      }
    }
    if (phase == num_pieces) break;
    turns_.pass();
    if (phase > 0) continue;
    compare();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (notice(rank).table[rank_] != call.receive_bytes[rank]) turns_.fail(Trouble::kMismatch, rank);
      for (int to = 0; to < num_ranks_; ++to) {
        if (to != rank) num_pieces = std::max(num_pieces, phases(notice(rank).table[to], piece));
      }
    }
  }
  std::memmove(address(call.receive_at[rank_]), address(call.send_at[rank_]), call.send_bytes[rank_]);
}

// ── the manner of copying ───────────────────────────────────────────────────────────────────────────────────────────

// Before the first call that is large enough to care.  All ranks see the same size first and all the same measurements
// afterwards, so all choose alike.  A call of another size than the others' is found by the comparison of the calls:
// the probe's own calls are of another kind or size.
void Member::probe_once(const Call& call) {
  const uint64_t whole = call.kind == Kind::kAllReduce       ? call.bytes
                         : call.kind == Kind::kReduceScatter ? total(call.send_bytes)
                         : call.kind == Kind::kAllGather     ? total(call.receive_bytes)
                                                             : 0;
  if (is_probed_ || whole < (uint64_t{4} << 20)) return;
  is_probed_ = true;
  constexpr std::array<Manner, 6> kChoices{
      {{256u << 10, false}, {512u << 10, false}, {1u << 20, false}, {256u << 10, true}, {512u << 10, true}, {1u << 20, true}}};
  static_assert(kChoices.size() <= 16, "room in RankControl");
  const size_t scratch_bytes = size_t{4} << 20;
  std::vector<char> scratch(scratch_bytes);
  for (size_t choice = 0; choice < kChoices.size(); ++choice) {
    manner = kChoices[choice];
    segment_.control(rank_).probe_seconds[choice] = probe_seconds(scratch.data(), scratch_bytes);
  }
  turns_.pass();
  size_t best = 0;
  double best_seconds = 0;
  for (size_t choice = 0; choice < kChoices.size(); ++choice) {
    double slowest = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      slowest = std::max(slowest, segment_.control(rank).probe_seconds[choice]);
    }
    if (choice == 0 || slowest < best_seconds) best = choice, best_seconds = slowest;
  }
  manner = kChoices[best];
  turns_.pass();
}

// The faster of two all-reduces; the first also gives the banks their memory.
double Member::probe_seconds(char* scratch, size_t bytes) {
  Call call;
  call.kind = Kind::kAllReduce;
  call.dtype = Dtype::kF32;
  call.input = call.output = scratch;
  call.bytes = bytes;
  double fastest = 0;
  for (int round = 0; round < 3; ++round) {
    const auto start = Clock::now();
    ++call_;
    all_reduce(call);
    const std::chrono::duration<double> seconds = Clock::now() - start;
    if (round == 0 || seconds.count() < fastest) fastest = seconds.count();
  }
  return fastest;
}

}  // namespace weft
