#include "engine.hpp"

#include <system_error>

#include "signals.hpp"

namespace weft {

namespace {

// The call's own deadline names who has not come; a waiter's is for when even that does not end the call.
constexpr auto kGrace = std::chrono::seconds(1);

}  // namespace

Engine::Engine(Segment shared, int own_rank, int num_local_ranks)
    : segment(shared), rank(own_rank), member(shared, own_rank, num_local_ranks), mail(shared, own_rank, num_local_ranks) {}

Engine::~Engine() { leave(); }

uint64_t Engine::submit(Call call, bool is_background) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t ticket = ++submitted_;
  queue_.push_back({ticket, std::move(call)});
  if (!is_background || is_stopping_) return ticket;
  wanted_ = ticket;
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
      // No thread to be had (a limit on processes): whoever waits carries the call out.
    }
  }
  lock.unlock();
  for_thread_.notify_one();
  return ticket;
}

Failure Engine::wait(uint64_t ticket, double patience_seconds) {
  const auto limit = deadline_after(patience_seconds);
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_waiting_;
  const Failure found = wait_holding(lock, ticket, limit);
  if (--num_waiting_ == 0 && is_stopping_) for_waiters_.notify_all();
  return found;
}

Failure Engine::wait_holding(std::unique_lock<std::mutex>& lock, uint64_t ticket, Clock::time_point limit) {
  bool came_late = false;  // other calls had to be carried out first
  while (completed_.load(std::memory_order_relaxed) < ticket) {
    if (is_stopping_) return {Trouble::kClosed, rank, rank};
    if (!is_busy_) {
      Entry& front = queue_.front();
      if (front.ticket == ticket) {  // the patience of other calls is their own waiters' business
        // Behind others it has the same grace as where the thread carries them out: else it would fail at once.
        const auto end = came_late ? limit + kGrace : limit;
        const double left = std::chrono::duration<double>(end - Clock::now()).count();
        front.call.patience_seconds = std::min(front.call.patience_seconds, std::max(left, 0.0));
      }
      came_late = true;
      carry_out_front(lock, false);
    } else if (for_waiters_.wait_until(lock, limit + kGrace) == std::cv_status::timeout &&
               Clock::now() >= limit + kGrace && !is_stopping_) {
      Turns::tell(segment, Trouble::kDeadline, rank, -1);  // the call under way must not go on behind the caller's back
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
  } catch (...) {  // no memory for a buffer: the others must not wait for this rank
    failure = {Trouble::kAborted, rank, rank};
    Turns::tell(segment, Trouble::kAborted, rank, rank);
  }
  lock.lock();
  is_busy_ = false;
  if (failure.trouble != Trouble::kNone && first_failed_ == 0) {
    first_failed_ = entry.ticket;
    failure_ = failure;
  }
  const auto now = Clock::now().time_since_epoch();
  done_[entry.ticket % done_.size()] = {
      entry.ticket, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()};
  completed_.store(entry.ticket, std::memory_order_release);
  for_waiters_.notify_all();
  // A caller may have carried out the call before those for which the thread was asked.
  if (!is_background && !queue_.empty()) for_thread_.notify_one();
}

uint64_t Engine::done_ns(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto [kept, at] = done_[ticket % done_.size()];
  return kept == ticket ? at : 0;
}

void Engine::abort(Trouble trouble, int culprit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!is_stopping_) Turns::tell(segment, trouble, rank, culprit);
}

Signature Engine::announced(int of_rank) {
  std::unique_lock<std::mutex> lock(mutex_);
  return is_stopping_ ? Signature{} : member.announced(of_rank);
}

void Engine::leave() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_stopping_) {  // somebody else is at it: be through when that one is
      for_waiters_.wait(lock, [this] { return has_left_; });
      return;
    }
    is_stopping_ = true;
    // Whoever leaves in the middle of a call leaves the others, and its own thread, without its end.
    if (is_busy_ || !queue_.empty()) Turns::tell(segment, Trouble::kLeft, rank, rank);
    segment.control(rank).has_left.store(1, std::memory_order_release);
  }
  mail.leave();
  for_thread_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  for_waiters_.notify_all();
  for_waiters_.wait(lock, [this] { return !is_busy_ && num_waiting_ == 0; });
  has_left_ = true;
  for_waiters_.notify_all();
}

}  // namespace weft
