#include "waiting.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {
namespace {

using std::chrono::microseconds;

bool is_reached(uint32_t count, uint32_t wanted) { return static_cast<int32_t>(count - wanted) >= 0; }  // it wraps

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

bool may_spin(int num_local_ranks) { return num_local_ranks <= usable_cores(); }

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The words are shared between processes, so the private (and cheaper) futex operations would not do.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, Clock::duration most) {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
  timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Clock::time_point deadline_after(double patience_seconds) {
  const auto patience = std::chrono::duration<double>(std::min(patience_seconds, 1e9));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
}

bool has_died(const RankControl& control) {
  const uint64_t started = process_start_time(control.pid.load(std::memory_order_acquire));
  return started != control.start_time.load(std::memory_order_acquire);
}

uint64_t process_start_time(uint32_t pid) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%u/stat", pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[1024];
  const ssize_t length = read(file, text, sizeof(text) - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = '\0';
  // The name, in parentheses, may itself hold spaces and parentheses: fields are counted from the last one.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == '\0' || at[2] == 'Z' || at[2] == 'X') return 0;
  at += 2;
  for (int field = 3; field < 22; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return 0;
    ++at;
  }
  return std::strtoull(at, nullptr, 10);
}

Turns::Turns(Segment segment, int rank, int num_local_ranks)
    : segment_(segment),
      rank_(rank),
      turn_(segment.control(rank).turn.count.load(std::memory_order_relaxed)),
      may_spin_(may_spin(num_local_ranks)) {}

void Turns::begin(Clock::duration patience, bool is_background) {
  const auto now = Clock::now();
  deadline_ = patience > Clock::time_point::max() - now ? Clock::time_point::max() : now + patience;
  next_look_ = now + kNap;
  spin_ = !may_spin_ ? Clock::duration::zero() : is_background ? Clock::duration(kSpinOfBackground) : kSpinOfCaller;
  yields_ = is_background ? 0 : kYields;
  check();
}

void Turns::publish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
  Turn& mine = segment_.control(rank_).turn;
  mine.count.exchange(++turn_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(mine.count);
}

void Turns::wait() {
  const int num_ranks = segment_.num_ranks();
  for (int step = 1; step < num_ranks; ++step) wait_for((rank_ + step) % num_ranks);
}

void Turns::wait_for(int peer) {
  std::atomic<uint32_t>& count = segment_.control(peer).turn.count;
  if (is_reached(count.load(std::memory_order_acquire), turn_)) return;
  if (spin_ > Clock::duration::zero()) {
    const auto until = Clock::now() + spin_;
    do {
      for (int i = 0; i < 32; ++i) {
        if (is_reached(count.load(std::memory_order_acquire), turn_)) return;
        relax();
      }
      if (yields_ > 0) give_way();
    } while (Clock::now() < until);
  }
  for (int round = 0; round < yields_ && give_way(); ++round) {
    if (is_reached(count.load(std::memory_order_acquire), turn_)) return;
  }
  for (;;) {
    const uint32_t seen = count.load(std::memory_order_seq_cst);
    if (is_reached(seen, turn_)) return;
    check();
    look_around(peer);
    sleep_on(peer, seen);
  }
}

bool Turns::give_way() {
  if (crowded_ > 0) {
    --crowded_;
    return false;
  }
  const auto before = Clock::now();
  sched_yield();
  if (Clock::now() - before > kLongYield) crowded_ = kWaitsAfterLongYield;
  return true;
}

void Turns::sleep_on(int peer, uint32_t seen) {
  Turn& theirs = segment_.control(peer).turn;
  theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (theirs.count.load(std::memory_order_seq_cst) == seen) {
    const auto left = std::max(deadline_ - Clock::now(), Clock::duration(microseconds(1)));
    futex_wait(theirs.count, seen, std::min<Clock::duration>(kNap, left));
  }
  theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// In a blocked wait: is the peer late, gone, or dead?  Any dead rank ends the group, since whoever is waited for may
// itself be waiting for it.
void Turns::look_around(int peer) {
  const auto now = Clock::now();
  const auto is_late = [&](int rank) {
    return !is_reached(segment_.control(rank).turn.count.load(std::memory_order_acquire), turn_);
  };
  if (now >= next_look_) {
    next_look_ = now + kLook;
    for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
      if (rank == rank_ || !is_late(rank)) continue;
      const RankControl& control = segment_.control(rank);
      // It may have published and left between the two loads above.
      if (control.has_left.load(std::memory_order_acquire) != 0 && is_late(rank)) fail(Trouble::kLeft, rank);
      if (has_died(control) && is_late(rank)) fail(Trouble::kDied, rank);
    }
  }
  if (now >= deadline_ && is_late(peer)) fail(Trouble::kDeadline, peer);
}

void Turns::tell(Segment segment, Trouble trouble, int reporter, int culprit) {
  const uint64_t word = uint64_t(trouble) << 32 | uint64_t(reporter & 0xffff) << 16 | uint64_t(culprit & 0xffff);
  uint64_t none = 0;
  segment.header().trouble.compare_exchange_strong(none, word, std::memory_order_seq_cst);
  for (int rank = 0; rank < segment.num_ranks(); ++rank) {
    futex_wake_all(segment.control(rank).turn.count);
    futex_wake_all(segment.control(rank).bell.count);
  }
}

Failure Turns::read(Segment segment) {
  const uint64_t word = segment.header().trouble.load(std::memory_order_acquire);
  const auto rank_of = [](uint64_t part) { return (part & 0xffff) == 0xffff ? -1 : static_cast<int>(part & 0xffff); };
  return {static_cast<Trouble>(word >> 32), rank_of(word), rank_of(word >> 16)};
}

void Turns::fail(Trouble trouble, int culprit) {
  tell(segment_, trouble, rank_, culprit);
  throw Failed(read(segment_));
}

void Turns::check() const {
  const Failure failure = read(segment_);
  if (failure.trouble != Trouble::kNone) throw Failed(failure);
}

}  // namespace weft
