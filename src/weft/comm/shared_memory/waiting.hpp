// How ranks wait for one another: turns, futexes, deadlines, and what happens when somebody does not come.
#pragma once

#include <chrono>
#include <exception>

#include "segment.hpp"

namespace weft {

using Clock = std::chrono::steady_clock;

struct Failure {
  Trouble trouble = Trouble::kNone;
  int culprit = -1;   // rank of the group that died, left, came late or called something else
  int reporter = -1;  // rank that noticed
};

class Failed : public std::exception {
 public:
  explicit Failed(Failure failure) : failure(failure) {}
  const Failure failure;
};

uint64_t process_start_time(uint32_t pid);  // 0: there is no such process, or it is a zombie
bool has_died(const RankControl& control);

// A caller that waits has nothing better to do with its core; the communication thread takes it from the computation.
constexpr std::chrono::microseconds kSpinOfCaller{60};
constexpr std::chrono::microseconds kSpinOfBackground{4};
// Before it sleeps, a caller lets whoever wants its core go first: among ranks that share cores the one it waits for,
// within microseconds.  Where that takes long it was somebody else, who was given a whole turn of the scheduler; a
// sleeper that is woken goes before such neighbours, so that the next waits sleep at once.
constexpr int kYields = 16;
constexpr std::chrono::microseconds kLongYield{500};
constexpr int kWaitsAfterLongYield = 1000;
constexpr std::chrono::milliseconds kNap{50};    // longest sleep before a look at the abort word
constexpr std::chrono::milliseconds kLook{200};  // between two looks at the peers' processes

bool may_spin(int num_local_ranks);  // else a rank that spins would keep the one it waits for from its core
void relax();                        // in a loop that spins
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, Clock::duration most);
void futex_wake_all(std::atomic<uint32_t>& word);
Clock::time_point deadline_after(double patience_seconds);

// One rank's side of the turns.
//
// A rank works in phases.  In phase T (after it has seen every rank's turn T - 1, before it publishes turn T) it writes
// its own bank T % 2 and reads what the others published with turn T - 1, that is their banks (T - 1) % 2.  Bank T % 2
// is written again in phase T + 2, which begins when all have published turn T + 1 and so have ended phase T + 1, the
// one in which they read it.  This holds from call to call: a call's last phase ends with the next call's first turn.
//
// Memory order.  A turn is published by a sequentially consistent exchange, which releases all stores before it, and
// seen by an acquiring load: on x86-64 a locked xchg and a plain load, on arm64 swpal (or ldaxr/stlxr) and ldar.  So
// whoever sees turn T sees the bank's content.  The way back, reading bank T before overwriting it in phase T + 2, is
// the same pair: the reader's loads come before its release of T + 1, the writer's stores after its acquire of it.
// Non-temporal stores are not ordered by a release on x86-64; `publish` puts an sfence before it where they were used.
// Sleeping is Dekker's handshake: the sleeper adds to `sleepers` and then looks at `count` (the kernel compares once
// more, under the futex's lock), the publisher exchanges `count` and then looks at `sleepers`; all four are
// sequentially consistent, so that at least one of the two sees the other.
class Turns {
 public:
  Turns(Segment segment, int rank, int num_local_ranks);

  void begin(Clock::duration patience, bool is_background);  // of a call: starts its deadline
  void publish();  // this rank's phase is over
  void wait();     // for the same turn of all others; throws Failed
  void pass() {
    publish();
    wait();
  }
  uint32_t next() const { return turn_ + 1; }  // the turn that ends the phase that is under way
  uint32_t last() const { return turn_; }

  void fail(Trouble trouble, int culprit);  // tells everybody, and throws
  void check() const;                       // throws when the group has failed
  static void tell(Segment segment, Trouble trouble, int reporter, int culprit);  // the first one stays
  static Failure read(Segment segment);

 private:
  void wait_for(int peer);
  bool give_way();  // false where it does not pay
  void sleep_on(int peer, uint32_t seen);
  void look_around(int peer);

  Segment segment_;
  int rank_;
  uint32_t turn_;
  bool may_spin_;
  Clock::duration spin_{};
  int yields_ = 0;   // in one wait
  int crowded_ = 0;  // waits, or pauses of a spin, for which nobody is let go first
  Clock::time_point deadline_{};
  Clock::time_point next_look_{};
};

}  // namespace weft
