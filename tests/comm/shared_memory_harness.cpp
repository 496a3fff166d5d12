// Threads as ranks over one mapping, so that the thread sanitizer sees every access of every rank.
// Prints "ok" and ends with 0 when all results are right; the sanitizer ends it otherwise.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine.hpp"

using namespace weft;

namespace {

constexpr size_t kArena = size_t{8} << 20;
constexpr int kUnderWay = 4;  // calls at a time, each with a quarter of the arena

void expect(bool is_right, const char* what, int rank) {
  if (is_right) return;
  std::fprintf(stderr, "rank %d: %s is wrong\n", rank, what);
  std::abort();
}

Segment make_segment(int num_ranks) {
  const size_t size = Segment::size(num_ranks, kArena);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  Segment segment(static_cast<char*>(memory));
  segment.header().magic = kMagic;
  segment.header().num_ranks = static_cast<uint32_t>(num_ranks);
  segment.header().arena_bytes = kArena;
  for (int rank = 0; rank < num_ranks; ++rank) {
    segment.control(rank).pid.store(static_cast<uint32_t>(getpid()));
    segment.control(rank).start_time.store(process_start_time(static_cast<uint32_t>(getpid())));
  }
  return segment;
}

float value(int rank, size_t at, int call) { return static_cast<float>((rank + 1) * 7 % 5 + int(at % 11) + call % 3); }

float sum(int num_ranks, size_t at, int call) {
  float total = 0;
  for (int rank = 0; rank < num_ranks; ++rank) total += value(rank, at, call);
  return total;
}

uint64_t at(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// A call of random kind and size, the same on every rank; checked as soon as it is waited for.
class Trial {
 public:
  Trial(Engine& engine, int num_ranks, int call, uint32_t seed, bool is_background)
      : engine_(engine), num_ranks_(num_ranks), call_(call) {
    std::mt19937 random(seed);
    const int kind = random() % 5;
    const size_t sizes[] = {0, 1, 17, 1000, 40'000, 300'000};
    count_ = sizes[random() % 6];
    // All, none, or some of the ranks: where some do, those begin again and copy.
    const auto manner = random() % 3;
    const bool is_in_arena = manner == 0 || (manner == 1 && engine.rank % 2 == 0);
    for (int rank = 0; rank <= num_ranks_; ++rank) cuts_.push_back(count_ * rank * rank / (num_ranks_ * num_ranks_));
    given_.resize(count_);
    result_.resize(count_);
    const size_t place = kArena / kUnderWay * (call % kUnderWay);
    data_ = is_in_arena ? reinterpret_cast<float*>(engine.segment.arena(engine.rank) + place) : given_.data();
    for (size_t i = 0; i < count_; ++i) data_[i] = value(engine.rank, i, call);
    Call made;
    made.kind = static_cast<Kind>(kind);
    made.dtype = Dtype::kF32;
    made.patience_seconds = 60;
    kind_ = made.kind;
    fill(made);
    ticket_ = engine.submit(made, is_background);
  }

  void finish() {
    const Failure failure = engine_.wait(ticket_, 60);
    expect(failure.trouble == Trouble::kNone, "the outcome", engine_.rank);
    for (size_t i = 0; i < count_; ++i) check(i);
  }

 private:
  void fill(Call& made) {
    const int rank = engine_.rank;
    const auto regions = [&](float* base, std::vector<uint64_t>& where, std::vector<uint64_t>& bytes) {
      for (int other = 0; other < num_ranks_; ++other) {
        where.push_back(at(base + cuts_[other]));
        bytes.push_back((cuts_[other + 1] - cuts_[other]) * sizeof(float));
      }
    };
    if (kind_ == Kind::kAllReduce) {
      made.input = reinterpret_cast<const char*>(data_);
      made.output = reinterpret_cast<char*>(data_);
      made.bytes = count_ * sizeof(float);
    } else if (kind_ == Kind::kReduceScatter) {
      regions(data_, made.send_at, made.send_bytes);
      made.output = reinterpret_cast<char*>(result_.data() + cuts_[rank]);
    } else if (kind_ == Kind::kAllGather) {
      made.input = reinterpret_cast<const char*>(data_ + cuts_[rank]);
      regions(result_.data(), made.receive_at, made.receive_bytes);
    } else if (kind_ == Kind::kAllToAll) {
      const size_t share = count_ / num_ranks_;
      for (int other = 0; other < num_ranks_; ++other) {
        made.send_at.push_back(at(data_ + other * share));
        made.send_bytes.push_back(share * sizeof(float));
        made.receive_at.push_back(at(result_.data() + other * share));
        made.receive_bytes.push_back(share * sizeof(float));
      }
    }
  }

  void check(size_t i) const {
    const int rank = engine_.rank;
    if (kind_ == Kind::kAllReduce) {
      expect(data_[i] == sum(num_ranks_, i, call_), "all-reduce", rank);
    } else if (kind_ == Kind::kReduceScatter && i >= cuts_[rank] && i < cuts_[rank + 1]) {
      expect(result_[i] == sum(num_ranks_, i, call_), "reduce-scatter", rank);
    } else if (kind_ == Kind::kAllGather) {
      int owner = 0;
      while (i >= cuts_[owner + 1]) ++owner;
      expect(result_[i] == value(owner, i, call_), "all-gather", rank);
    } else if (kind_ == Kind::kAllToAll) {
      const size_t share = count_ / num_ranks_;
      if (share == 0 || i >= share * num_ranks_) return;
      expect(result_[i] == value(static_cast<int>(i / share), rank * share + i % share, call_), "all-to-all", rank);
    }
  }

  Engine& engine_;
  int num_ranks_;
  int call_;
  Kind kind_;
  size_t count_;
  uint64_t ticket_;
  std::vector<size_t> cuts_;
  std::vector<float> given_, result_;
  float* data_;
};

// Calls of all kinds, some waited for at once, some left to the communication threads.
void mixed_calls(Segment segment, int rank, int num_ranks, int num_calls) {
  Engine engine(segment, rank, num_ranks);
  std::vector<std::unique_ptr<Trial>> waiting;
  for (int call = 0; call < num_calls; ++call) {
    const bool is_background = call % 3 != 0;
    waiting.push_back(std::make_unique<Trial>(engine, num_ranks, call, 1000u + call, is_background));
    if (call % kUnderWay != kUnderWay - 1) continue;
    for (auto& trial : waiting) trial->finish();
    waiting.clear();
  }
  for (auto& trial : waiting) trial->finish();
}

// Messages of every size and of three tags between all pairs, while collectives go on; asked for before or after they
// are sent, waited for by two threads or left to the communication thread.
void messages(Segment segment, int rank, int num_ranks, int num_rounds) {
  Engine engine(segment, rank, num_ranks);
  const size_t sizes[] = {0, 1, 1000, 40'000, 700'000};
  for (int round = 0; round < num_rounds; ++round) {
    std::mt19937 random(77u + round);
    std::vector<std::vector<float>> kept;
    std::vector<uint64_t> sends, receives;
    std::vector<int> sources;
    kept.reserve(size_t(4) * num_ranks);
    for (int source = 0; source < num_ranks; ++source) {
      for (int target = 0; target < num_ranks; ++target) {
        const size_t count = sizes[random() % 5];
        const uint32_t tag = random() % 3;
        if (source == rank) {
          kept.emplace_back(count);
          for (size_t i = 0; i < count; ++i) kept.back()[i] = value(source, i, target + round);
          sends.push_back(engine.mail.send(target, tag, reinterpret_cast<char*>(kept.back().data()), count * 4));
        }
        if (target == rank) {
          kept.emplace_back(count, -1.0f);
          sources.push_back(static_cast<int>(kept.size()) - 1);
          receives.push_back(engine.mail.receive(source, tag, reinterpret_cast<char*>(kept.back().data()), count * 4));
        }
      }
    }
    Trial beside(engine, num_ranks, round, 500u + round, true);
    std::thread other([&] {
      for (const uint64_t ticket : sends) {
        expect(engine.mail.wait(ticket, 60).failure.trouble == Trouble::kNone, "a send", rank);
      }
    });
    for (int source = num_ranks - 1; source >= 0; --source) {
      while (round % 2 == 0 && !engine.mail.is_done(receives[source])) std::this_thread::yield();
      const Delivery told = engine.mail.wait(receives[source], 60);
      expect(told.failure.trouble == Trouble::kNone && told.source == source, "a receive", rank);
      const auto& found = kept[sources[source]];
      for (size_t i = 0; i < found.size(); ++i) expect(found[i] == value(source, i, rank + round), "a message", rank);
    }
    beside.finish();
    other.join();
  }
}

// Everybody waits for a message of the last rank, which leaves or aborts.
void broken_message(Segment segment, int rank, int num_ranks, Trouble trouble) {
  Engine engine(segment, rank, num_ranks);
  if (rank == num_ranks - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (trouble == Trouble::kAborted) engine.abort(trouble, rank);
    return;
  }
  float tensor[10];
  const uint64_t ticket = engine.mail.receive(num_ranks - 1, 0, reinterpret_cast<char*>(tensor), sizeof(tensor));
  expect(engine.mail.wait(ticket, 60).failure.trouble == trouble, "the trouble of a message", rank);
}

// One large call, before which the ranks measure how to copy.
void large_call(Segment segment, int rank, int num_ranks) {
  Engine engine(segment, rank, num_ranks);
  std::vector<float> tensor((size_t{5} << 20) / sizeof(float));
  for (size_t i = 0; i < tensor.size(); ++i) tensor[i] = value(rank, i, 0);
  Call call;
  call.kind = Kind::kAllReduce;
  call.dtype = Dtype::kF32;
  call.input = reinterpret_cast<const char*>(tensor.data());
  call.output = reinterpret_cast<char*>(tensor.data());
  call.bytes = tensor.size() * sizeof(float);
  expect(engine.wait(engine.submit(call, true), 60).trouble == Trouble::kNone, "the outcome", rank);
  for (size_t i = 0; i < tensor.size(); ++i) expect(tensor[i] == sum(num_ranks, i, 0), "the large sum", rank);
}

// The last rank makes no second call: it leaves, aborts, or calls something else; nobody else may wait for ever.
void broken_call(Segment segment, int rank, int num_ranks, Trouble trouble) {
  Engine engine(segment, rank, num_ranks);
  Call barrier;
  barrier.patience_seconds = trouble == Trouble::kDeadline ? 0.3 : 60;
  expect(engine.wait(engine.submit(barrier, false), 60).trouble == Trouble::kNone, "the first barrier", rank);
  if (rank == num_ranks - 1 && trouble != Trouble::kMismatch) {
    if (trouble == Trouble::kLeft) engine.leave();
    if (trouble == Trouble::kAborted) engine.abort(trouble, rank);
    if (trouble == Trouble::kDeadline) std::this_thread::sleep_for(std::chrono::milliseconds(800));
    return;
  }
  Call second = barrier;
  std::vector<float> tensor(100);
  if (rank == num_ranks - 1) {
    second.kind = Kind::kAllReduce;
    second.input = reinterpret_cast<const char*>(tensor.data());
    second.output = reinterpret_cast<char*>(tensor.data());
    second.bytes = 400;
  }
  const Failure failure = engine.wait(engine.submit(second, rank % 2 == 0), 60);
  expect(failure.trouble == trouble, "the trouble", rank);
  expect(engine.wait(engine.submit(barrier, false), 60).trouble == trouble, "the trouble of a later call", rank);
}

template <typename Body>
void as_ranks(int num_ranks, Body body) {
  const Segment segment = make_segment(num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back([=] { body(segment, rank); });
  for (auto& thread : ranks) thread.join();
  munmap(segment.base(), Segment::size(num_ranks, kArena));
}

}  // namespace

int main(int count, char** arguments) {
  const int num_calls = count > 1 ? std::atoi(arguments[1]) : 60;
  for (const int num_ranks : {2, 3, 4}) {
    as_ranks(num_ranks, [=](Segment segment, int rank) { mixed_calls(segment, rank, num_ranks, num_calls); });
  }
  for (const int num_ranks : {2, 3}) {
    as_ranks(num_ranks, [=](Segment segment, int rank) { messages(segment, rank, num_ranks, num_calls / 6); });
  }
  for (const Trouble trouble : {Trouble::kLeft, Trouble::kAborted}) {
    as_ranks(3, [=](Segment segment, int rank) { broken_message(segment, rank, 3, trouble); });
  }
  as_ranks(2, [](Segment segment, int rank) { large_call(segment, rank, 2); });
  for (const Trouble trouble : {Trouble::kLeft, Trouble::kAborted, Trouble::kDeadline, Trouble::kMismatch}) {
    as_ranks(3, [=](Segment segment, int rank) { broken_call(segment, rank, 3, trouble); });
  }
  std::puts("ok");
  return 0;
}
