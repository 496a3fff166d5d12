// A group's queue of calls: one at a time, in the order in which they were made, on whichever thread is at hand.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "collectives.hpp"
#include "mail.hpp"

namespace weft {

// A call that nobody waits for yet is carried out by the communication thread, so that it overlaps with what its caller
// computes.  A caller that waits carries calls out itself as long as the thread has not begun them: a small collective
// then costs no switch between threads.  Either way one thread at a time does so, from the front of the queue.
class Engine {
 public:
  Engine(Segment segment, int rank, int num_local_ranks);
  ~Engine();

  uint64_t submit(Call call, bool is_background);  // returns the call's number, from 1
  // Blocks until call `ticket` is done; returns what went wrong with the group at or before it.
  Failure wait(uint64_t ticket, double patience_seconds);
  uint64_t completed() const { return completed_.load(std::memory_order_acquire); }
  // When a call was done, in nanoseconds of the steady clock; 0 where it is not yet, or others have overwritten it.
  uint64_t done_ns(uint64_t ticket);
  void abort(Trouble trouble, int culprit);
  Signature announced(int of_rank);  // nothing once this rank has left
  // Stops the thread; calls that have not begun fail.  Afterwards nothing here touches the segment, which may be
  // unmapped; the engine itself must live as long as somebody might still call it.
  void leave();

  Segment segment;
  const int rank;
  Member member;
  Mail mail;  // messages between two ranks, which have an order of their own

 private:
  struct Entry {
    uint64_t ticket;
    Call call;
  };

  Failure wait_holding(std::unique_lock<std::mutex>& lock, uint64_t ticket, Clock::time_point limit);
  void work();
  void carry_out_front(std::unique_lock<std::mutex>& lock, bool is_background);

  std::mutex mutex_;
  std::condition_variable for_thread_;
  std::condition_variable for_waiters_;
  std::deque<Entry> queue_;
  uint64_t submitted_ = 0;
  uint64_t wanted_ = 0;  // up to this ticket the thread need not be asked
  std::atomic<uint64_t> completed_{0};
  std::array<std::pair<uint64_t, uint64_t>, 256> done_{};  // ticket and time of the last calls, by ticket
  uint64_t first_failed_ = 0;
  Failure failure_;
  bool is_busy_ = false;
  int num_waiting_ = 0;  // threads inside `wait`
  bool is_stopping_ = false;
  bool has_left_ = false;
  std::thread thread_;  // started by the first call that nobody waits for
};

}  // namespace weft
