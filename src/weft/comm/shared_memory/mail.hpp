// Messages from one rank to one other: a ring of bytes for each ordered pair of ranks.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace weft {

constexpr int kAnySource = -1;
constexpr uint64_t kNotKnown = ~uint64_t{0};

// What became of a message.
struct Delivery {
  Failure failure;
  int source = -1;
  uint64_t done_ns = 0;     // by the steady clock
  uint64_t sent_bytes = kNotKnown;  // where the sizes differ: what the other rank sent
};

// One rank's side of all channels.
//
// A send is done when its bytes are in the ring, where the target finds them whenever it asks for them; what does not
// fit waits until the target has read.  Messages of one rank to one other are received in the order in which they were
// sent, by tag: whoever asks for a later tag first has those before it put aside.  A message that nobody has asked for
// stays in the ring, so that a rank which sends too early is held up and not the other's memory filled.
//
// Whoever waits moves what can be moved, of all messages; while nobody waits and something is under way, a thread does.
// One at a time holds the lock, for one piece of each channel.  They sleep on this rank's bell, which the others ring.
//
// Memory order.  `written` and `read` are stored with release and loaded with acquire: on x86-64 plain moves, on arm64
// stlr and ldar.  So whoever sees `written` sees the bytes before it; and the source's stores into a part of the ring
// come after its acquire of the `read` by which the target released that part.  Sleeping is Dekker's handshake twice:
// bell and sleepers (the ringer adds to `count`, then looks at `sleepers`; the sleeper adds to `sleepers`, then looks
// at `count`), and `wants_room` and `read` (the source sets it and then looks at `read`; the target stores `read` and
// then takes it back).  All of these are sequentially consistent, so that one of the two sees the other.
class Mail {
 public:
  Mail(Segment segment, int rank, int num_local_ranks);
  ~Mail() { leave(); }

  // Both return the message's number, from 1; 0 once this rank has left.  The memory must stay until it is done.
  uint64_t send(int target, uint32_t tag, const char* from, uint64_t bytes);
  uint64_t receive(int source, uint32_t tag, char* to, uint64_t bytes);  // `source` may be kAnySource
  Delivery wait(uint64_t ticket, double patience_seconds);               // forgets the message once it is done
  bool is_done(uint64_t ticket);                                         // also where it cannot be any more
  void forget(uint64_t ticket);                                          // of one that nobody will wait for
  void leave();

 private:
  struct Outgoing {
    uint64_t ticket;
    uint32_t tag;
    const char* from;
    uint64_t bytes;
    uint64_t given = 0;
    bool is_open = false;  // its header is in the ring
  };
  struct Posted {
    uint64_t ticket;
    uint32_t tag;
    char* to;
    uint64_t bytes;
  };
  struct Aside {
    uint32_t tag;
    std::vector<char> bytes;
  };
  struct Outbox {
    std::deque<Outgoing> waiting;
    uint64_t written = 0;
    bool is_backed = false;  // its ring has memory
  };
  struct Inbox {
    std::deque<Posted> posted;
    std::deque<Aside> aside;
    uint64_t read = 0;
    bool is_open = false;  // a message is being read
    uint32_t tag = 0;
    uint64_t bytes = 0, taken = 0;
    std::optional<Posted> asked;  // else it is put aside, at the end of `aside`
  };
  class Entry;

  uint64_t submit(std::unique_lock<std::mutex>& lock);
  void finish(uint64_t ticket, int source);
  void move(std::unique_lock<std::mutex>& lock, bool is_thread);
  bool move_pieces();
  bool push(int target);
  bool pull(int source);
  void open(int source);
  void close(int source);
  bool is_asked(int source) const { return !inboxes_[source].posted.empty() || !from_anywhere_.empty(); }
  std::optional<Posted> take_posted(int source, uint32_t tag, uint64_t bytes);
  bool take_aside(int source, const Posted& posted);
  void check_size(const Posted& posted, int source, uint64_t bytes);
  void back(int target);
  void look_around(int peer, bool is_late);
  [[noreturn]] void fail(Trouble trouble, int culprit);
  void ring(int rank) const;
  void nap(std::unique_lock<std::mutex>& lock, uint32_t seen, Clock::time_point limit, bool may_spin);
  uint32_t bell() const { return segment_.control(rank_).bell.count.load(std::memory_order_seq_cst); }
  void work();

  Segment segment_;
  const int rank_;
  const int num_ranks_;
  const bool may_spin_;
  std::mutex mutex_;
  std::atomic<int> at_the_door_{0};  // threads that want the lock, for which the one that moves makes way
  std::condition_variable for_thread_;
  std::condition_variable for_leaver_;
  std::vector<Outbox> outboxes_;
  std::vector<Inbox> inboxes_;
  std::deque<Posted> from_anywhere_;
  std::map<uint64_t, int> pending_;        // the peer of each message under way
  std::map<uint64_t, Delivery> delivered_;  // until they are waited for
  uint64_t submitted_ = 0;
  uint64_t sent_bytes_ = kNotKnown;  // of the message that did not fit
  int num_waiting_ = 0;
  bool has_failed_ = false;  // this rank knows that the group has
  bool is_stopping_ = false;
  bool has_left_ = false;
  std::thread thread_;
};

}  // namespace weft
