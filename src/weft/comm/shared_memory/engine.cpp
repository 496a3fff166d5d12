#include "engine.hpp"

#include <pthread.h>
#include <signal.h>

namespace weft {

Engine::Engine(Segment shared, int own_rank, int num_local_ranks)
    : segment(shared), rank(own_rank), member(shared, own_rank, num_local_ranks) {}

Engine::~Engine() { leave(); }

uint64_t Engine::submit(Call call, bool is_background) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t ticket = ++submitted_;
  queue_.push_back({ticket, std::move(call)});
  if (!is_background || is_stopping_) return ticket;
  wanted_ = ticket;
  if (!thread_.joinable()) {
    // Signals are for the threads of Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  lock.unlock();
  for_thread_.notify_one();
  return ticket;
}

Failure Engine::wait(uint64_t ticket, double patience_seconds) {
  const auto limit = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(std::min(patience_seconds, 1e9)));
  std::unique_lock<std::mutex> lock(mutex_);
  while (completed_.load(std::memory_order_relaxed) < ticket) {
    if (is_stopping_) return {Trouble::kClosed, rank, rank};
    if (!is_busy_) {
      const double left = std::chrono::duration<double>(limit - Clock::now()).count();
      Call& front = queue_.front().call;
      front.patience_seconds = std::min(front.patience_seconds, std::max(left, 0.0));
      carry_out_front(lock, false);
    } else if (for_waiters_.wait_until(lock, limit) == std::cv_status::timeout && Clock::now() >= limit) {
      return {Trouble::kDeadline, -1, rank};
    }
  }
  return first_failed_ != 0 && ticket >= first_failed_ ? failure_ : Failure{};
}

void Engine::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    for_thread_.wait(lock, [this] {
      return is_stopping_ || (!is_busy_ && !queue_.empty() && queue_.front().ticket <= wanted_);
    });
    if (is_stopping_) return;
    carry_out_front(lock, true);
  }
}

void Engine::carry_out_front(std::unique_lock<std::mutex>& lock, bool is_background) {
  Entry entry = std::move(queue_.front());
  queue_.pop_front();
  is_busy_ = true;
  lock.unlock();
  Failure failure;
  try {
    member.run(entry.call, is_background);
  } catch (const Failed& failed) {
    failure = failed.failure;
  }
  lock.lock();
  is_busy_ = false;
  if (failure.trouble != Trouble::kNone && first_failed_ == 0) {
    first_failed_ = entry.ticket;
    failure_ = failure;
  }
  completed_.store(entry.ticket, std::memory_order_release);
  for_waiters_.notify_all();
  // A caller may have carried out the call before those for which the thread was asked.
  if (!is_background && !queue_.empty()) for_thread_.notify_one();
}

void Engine::abort(Trouble trouble, int culprit) { Turns::tell(segment, trouble, rank, culprit); }

void Engine::leave() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_stopping_) return;
    is_stopping_ = true;
    // Whoever leaves in the middle of a call leaves the others, and its own thread, without its end.
    if (is_busy_ || !queue_.empty()) Turns::tell(segment, Trouble::kLeft, rank, rank);
  }
  segment.control(rank).has_left.store(1, std::memory_order_release);
  for_thread_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  for_waiters_.notify_all();
  for_waiters_.wait(lock, [this] { return !is_busy_; });
}

}  // namespace weft
