#include "mail.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "signals.hpp"

namespace weft {
namespace {

constexpr uint64_t kPiece = 128u << 10;  // moved at a time, so that the other side can begin
constexpr int kPasses = 8;               // a ring's worth: the most that whoever sends or asks does itself
constexpr uint64_t kUnit = 16;           // positions in a ring are multiples of it: a header never wraps

struct Letter {
  uint64_t bytes;
  uint32_t tag;
  uint32_t reserved;
};
static_assert(sizeof(Letter) == kUnit && kRingBytes % kUnit == 0 && kPiece % kUnit == 0);

uint64_t padded(uint64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

void copy_into(Channel& channel, uint64_t position, const char* from, uint64_t bytes) {
  const uint64_t start = position % kRingBytes, first = std::min(bytes, kRingBytes - start);
  std::memcpy(channel.ring + start, from, first);
  std::memcpy(channel.ring, from + first, bytes - first);
}

void copy_out_of(const Channel& channel, uint64_t position, char* to, uint64_t bytes) {
  const uint64_t start = position % kRingBytes, first = std::min(bytes, kRingBytes - start);
  std::memcpy(to, channel.ring + start, first);
  std::memcpy(to + first, channel.ring, bytes - first);
}

}  // namespace

// The lock, for which the thread that moves messages makes way.
class Mail::Entry : public std::unique_lock<std::mutex> {
 public:
  explicit Entry(Mail& mail) : std::unique_lock<std::mutex>(mail.mutex_, std::defer_lock) {
    mail.at_the_door_.fetch_add(1, std::memory_order_relaxed);
    lock();
    mail.at_the_door_.fetch_sub(1, std::memory_order_relaxed);
  }
};

Mail::Mail(Segment segment, int rank, int num_local_ranks)
    : segment_(segment),
      rank_(rank),
      num_ranks_(segment.num_ranks()),
      may_spin_(weft::may_spin(num_local_ranks)),
      outboxes_(num_ranks_),
      inboxes_(num_ranks_) {}

// ── what is asked for ───────────────────────────────────────────────────────────────────────────────────────────────

uint64_t Mail::send(int target, uint32_t tag, const char* from, uint64_t bytes) {
  Entry lock(*this);
  if (is_stopping_) return 0;
  const uint64_t ticket = ++submitted_;
  pending_[ticket] = target;
  outboxes_[target].waiting.push_back({ticket, tag, from, bytes});
  return submit(lock);
}

uint64_t Mail::receive(int source, uint32_t tag, char* to, uint64_t bytes) {
  Entry lock(*this);
  if (is_stopping_) return 0;
  const Posted posted{++submitted_, tag, to, bytes};
  pending_[posted.ticket] = source;
  try {
    const int first = source == kAnySource ? 0 : source, last = source == kAnySource ? num_ranks_ - 1 : source;
    for (int rank = first; rank <= last; ++rank) {
      if (take_aside(rank, posted)) return posted.ticket;
    }
  } catch (const Failed&) {
    has_failed_ = true;  // whoever waits is told
    return posted.ticket;
  }
  (source == kAnySource ? from_anywhere_ : inboxes_[source].posted).push_back(posted);
  return submit(lock);
}

// Moves what a ring holds at once; the rest is the thread's, or that of whoever waits.
uint64_t Mail::submit(std::unique_lock<std::mutex>& lock) {
  const uint64_t ticket = submitted_;
  try {
    for (int pass = 0; pass < kPasses && pending_.count(ticket) != 0 && move_pieces(); ++pass) {
    }
  } catch (const Failed&) {
    has_failed_ = true;
  }
  if (pending_.empty() || num_waiting_ > 0 || has_failed_) return ticket;
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
      // No thread to be had (a limit on processes): whoever waits moves everything.
    }
  }
  lock.unlock();
  for_thread_.notify_one();
  return ticket;
}

Delivery Mail::wait(uint64_t ticket, double patience_seconds) {
  const auto limit = deadline_after(patience_seconds);
  auto next_look = Clock::now() + kNap;
  Entry lock(*this);
  ++num_waiting_;
  Delivery told;
  try {
    for (;;) {
      if (pending_.count(ticket) == 0) break;
      if (is_stopping_) throw Failed({Trouble::kClosed, rank_, rank_});
      const uint32_t seen = bell();
      move(lock, false);
      const auto found = pending_.find(ticket);
      if (found == pending_.end() || is_stopping_) continue;
      const Failure failure = Turns::read(segment_);
      if (failure.trouble != Trouble::kNone) throw Failed(failure);
      const auto now = Clock::now();
      const bool is_late = now >= limit;
      if (is_late || now >= next_look) {
        next_look = now + kLook;
        look_around(found->second, is_late);
      }
      nap(lock, seen, limit, may_spin_);
    }
    const auto done = delivered_.find(ticket);
    if (done != delivered_.end()) {
      told = done->second;
      delivered_.erase(done);
    }
  } catch (const Failed& failed) {
    told.failure = failed.failure;
    told.sent_bytes = sent_bytes_;
    has_failed_ = true;
  } catch (...) {  // no memory for what must be put aside: the others must not wait for this rank
    Turns::tell(segment_, Trouble::kAborted, rank_, rank_);
    told.failure = {Trouble::kAborted, rank_, rank_};
    has_failed_ = true;
  }
  --num_waiting_;
  if (is_stopping_) {
    for_leaver_.notify_all();
  } else if (num_waiting_ == 0 && !pending_.empty()) {
    for_thread_.notify_one();
  }
  return told;
}

bool Mail::is_done(uint64_t ticket) {
  Entry lock(*this);
  if (is_stopping_) return true;
  try {
    move_pieces();
  } catch (const Failed&) {
    has_failed_ = true;
  }
  return pending_.count(ticket) == 0 || Turns::read(segment_).trouble != Trouble::kNone;
}

void Mail::forget(uint64_t ticket) {
  Entry lock(*this);
  delivered_.erase(ticket);
}

void Mail::leave() {
  {
    Entry lock(*this);
    if (is_stopping_) {  // somebody else is at it: be through when that one is
      for_leaver_.wait(lock, [this] { return has_left_; });
      return;
    }
    is_stopping_ = true;
  }
  for_thread_.notify_all();
  futex_wake_all(segment_.control(rank_).bell.count);
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  for_leaver_.wait(lock, [this] { return num_waiting_ == 0; });
  has_left_ = true;
  for_leaver_.notify_all();
}

// ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// Until nothing moves any more, letting in whoever wants to send or receive meanwhile; the thread makes way for those
// who wait.
void Mail::move(std::unique_lock<std::mutex>& lock, bool is_thread) {
  while (!(is_thread && num_waiting_ > 0) && move_pieces()) {
    if (at_the_door_.load(std::memory_order_relaxed) == 0) continue;
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
    if (is_stopping_) return;
  }
}

// A piece of each channel that can move; false where none can.
bool Mail::move_pieces() {
  if (pending_.empty() || has_failed_) return false;  // of a group that has failed no tensor is touched any more
  bool has_moved = false;
  for (int step = 0; step < num_ranks_; ++step) {
    const int peer = (rank_ + step) % num_ranks_;
    has_moved |= push(peer);
    has_moved |= pull(peer);
  }
  return has_moved;
}

bool Mail::push(int target) {
  Outbox& box = outboxes_[target];
  if (box.waiting.empty()) return false;
  if (!box.is_backed) back(target);
  Channel& channel = segment_.channel(rank_, target);
  Outgoing& letter = box.waiting.front();
  uint64_t room = kRingBytes - (box.written - channel.read.load(std::memory_order_acquire));
  if (room == 0) {
    channel.wants_room.store(1, std::memory_order_seq_cst);
    room = kRingBytes - (box.written - channel.read.load(std::memory_order_seq_cst));
    if (room == 0) return false;  // the target rings when it has read
  }
  if (!letter.is_open) {
    const Letter header{letter.bytes, letter.tag, 0};
    copy_into(channel, box.written, reinterpret_cast<const char*>(&header), kUnit);
    box.written += kUnit;
    room -= kUnit;
    letter.is_open = true;
  }
  const uint64_t size = std::min({letter.bytes - letter.given, room, kPiece});
  copy_into(channel, box.written, letter.from + letter.given, size);
  box.written += padded(size);
  letter.given += size;
  channel.written.store(box.written, std::memory_order_release);
  const bool is_whole = letter.given == letter.bytes;
  if (is_whole) {
    const uint64_t ticket = letter.ticket;
    box.waiting.pop_front();
    finish(ticket, rank_);
  }
  ring(target);
  return true;
}

bool Mail::pull(int source) {
  Inbox& box = inboxes_[source];
  if (!box.is_open && !is_asked(source)) return false;
  Channel& channel = segment_.channel(source, rank_);
  uint64_t there = channel.written.load(std::memory_order_acquire) - box.read;
  if (there == 0) return false;
  if (!box.is_open) {
    open(source);
    there -= kUnit;
  }
  const uint64_t size = std::min({box.bytes - box.taken, there, kPiece});
  char* to = box.asked ? box.asked->to : box.aside.back().bytes.data();
  copy_out_of(channel, box.read, to + box.taken, size);
  box.read += padded(size);
  box.taken += size;
  channel.read.store(box.read, std::memory_order_seq_cst);
  if (channel.wants_room.load(std::memory_order_seq_cst) != 0 &&
      channel.wants_room.exchange(0, std::memory_order_seq_cst) != 0) {
    ring(source);
  }
  if (box.taken == box.bytes) close(source);
  return true;
}

// Reads the header of the next message, and finds where it is to go.
void Mail::open(int source) {
  Inbox& box = inboxes_[source];
  Letter header;
  copy_out_of(segment_.channel(source, rank_), box.read, reinterpret_cast<char*>(&header), kUnit);
  box.asked = take_posted(source, header.tag, header.bytes);
  if (!box.asked) box.aside.push_back({header.tag, std::vector<char>(header.bytes)});
  box.read += kUnit;
  box.tag = header.tag;
  box.bytes = header.bytes;
  box.taken = 0;
  box.is_open = true;
}

void Mail::close(int source) {
  Inbox& box = inboxes_[source];
  box.is_open = false;
  if (box.asked) {
    finish(box.asked->ticket, source);
    box.asked.reset();
    return;
  }
  // It may have been asked for while it came.
  const auto posted = take_posted(source, box.tag, box.bytes);
  if (posted) take_aside(source, *posted);
}

// The oldest receive that fits; those from anywhere among them.
std::optional<Mail::Posted> Mail::take_posted(int source, uint32_t tag, uint64_t bytes) {
  const auto with_tag = [&](std::deque<Posted>& list) {
    return std::find_if(list.begin(), list.end(), [&](const Posted& posted) { return posted.tag == tag; });
  };
  std::deque<Posted>& own = inboxes_[source].posted;
  const auto here = with_tag(own), anywhere = with_tag(from_anywhere_);
  const bool has_own = here != own.end(), has_any = anywhere != from_anywhere_.end();
  if (!has_own && !has_any) return std::nullopt;
  const bool is_own = has_own && (!has_any || here->ticket < anywhere->ticket);
  const Posted found = is_own ? *here : *anywhere;
  check_size(found, source, bytes);
  if (is_own) {
    own.erase(here);
  } else {
    from_anywhere_.erase(anywhere);
  }
  return found;
}

// Gives a receive the oldest message of its tag that was put aside and is whole.
bool Mail::take_aside(int source, const Posted& posted) {
  Inbox& box = inboxes_[source];
  const auto whole = box.is_open && !box.asked ? box.aside.end() - 1 : box.aside.end();
  const auto found =
      std::find_if(box.aside.begin(), whole, [&](const Aside& aside) { return aside.tag == posted.tag; });
  if (found == whole) return false;
  check_size(posted, source, found->bytes.size());
  std::memcpy(posted.to, found->bytes.data(), posted.bytes);
  box.aside.erase(found);
  finish(posted.ticket, source);
  return true;
}

void Mail::check_size(const Posted& posted, int source, uint64_t bytes) {
  if (posted.bytes == bytes) return;
  sent_bytes_ = bytes;
  fail(Trouble::kMismatch, source);
}

void Mail::finish(uint64_t ticket, int source) {
  pending_.erase(ticket);
  Delivery& told = delivered_[ticket];
  told.source = source;
  told.done_ns = now_ns();
}

// Asks for the memory of a ring: a later write that found none would end the process (SIGBUS).
void Mail::back(int target) {
  constexpr int kPopulateWrite = 23;  // of madvise, since Linux 5.14; older headers have no name for it
  Channel& channel = segment_.channel(rank_, target);
  if (madvise(&channel, sizeof(Channel), kPopulateWrite) != 0 && errno != EINVAL) fail(Trouble::kAborted, rank_);
  outboxes_[target].is_backed = true;
}

// ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// Is the peer late, gone, or dead?  Called after what it sent has been received.
void Mail::look_around(int peer, bool is_late) {
  int gone = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_ || (peer != kAnySource && rank != peer)) continue;
    const RankControl& control = segment_.control(rank);
    const bool has_left = control.has_left.load(std::memory_order_acquire) != 0;
    const bool is_dead = !has_left && has_died(control);
    if (!has_left && !is_dead) continue;
    // It may have sent and gone between the last look at its channel and now.
    if (segment_.channel(rank, rank_).written.load(std::memory_order_acquire) != inboxes_[rank].read &&
        is_asked(rank)) {
      continue;
    }
    if (is_dead) fail(Trouble::kDied, rank);
    if (++gone == (peer == kAnySource ? num_ranks_ - 1 : 1)) fail(Trouble::kLeft, rank);
  }
  if (is_late) fail(Trouble::kDeadline, peer);
}

void Mail::fail(Trouble trouble, int culprit) {
  Turns::tell(segment_, trouble, rank_, culprit);
  throw Failed(Turns::read(segment_));
}

void Mail::ring(int rank) const {
  Bell& bell = segment_.control(rank).bell;
  bell.count.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell.count);
}

// Sleeps, without the lock, until the bell is rung again.
void Mail::nap(std::unique_lock<std::mutex>& lock, uint32_t seen, Clock::time_point limit, bool may_spin) {
  lock.unlock();
  Bell& own = segment_.control(rank_).bell;
  if (may_spin) {
    const auto until = Clock::now() + kSpinOfCaller;
    do {
      for (int i = 0; i < 32 && own.count.load(std::memory_order_acquire) == seen; ++i) relax();
    } while (own.count.load(std::memory_order_acquire) == seen && Clock::now() < until);
  }
  own.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (own.count.load(std::memory_order_seq_cst) == seen) {
    const auto left = std::max(limit - Clock::now(), Clock::duration(std::chrono::microseconds(1)));
    futex_wait(own.count, seen, std::min<Clock::duration>(kNap, left));
  }
  own.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  at_the_door_.fetch_add(1, std::memory_order_relaxed);
  lock.lock();
  at_the_door_.fetch_sub(1, std::memory_order_relaxed);
}

// The thread: moves what is under way while nobody waits.  It tells nobody of trouble: whoever waits finds it, too.
void Mail::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    for_thread_.wait(lock, [this] {
      return is_stopping_ || (!pending_.empty() && num_waiting_ == 0 && !has_failed_);
    });
    if (is_stopping_) return;
    const uint32_t seen = bell();
    try {
      move(lock, true);
    } catch (const Failed&) {
      has_failed_ = true;
    } catch (...) {  // no memory for what must be put aside: the others must not wait for this rank
      Turns::tell(segment_, Trouble::kAborted, rank_, rank_);
      has_failed_ = true;
    }
    if (Turns::read(segment_).trouble != Trouble::kNone) has_failed_ = true;
    // With something left to move because somebody waits, it is back when nobody does.
    const bool is_through = num_waiting_ == 0 && !pending_.empty();
    if (is_through && !is_stopping_ && !has_failed_) nap(lock, seen, Clock::time_point::max(), false);
  }
}

}  // namespace weft
