// What Python calls, by way of ctypes: plain C types only.  ctypes gives up Python's lock for the time of each call.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <new>

#include "engine.hpp"

#ifndef WEFT_DIGEST
#define WEFT_DIGEST "unknown"
#endif

using namespace weft;

extern "C" {

struct WeftCall {
  uint32_t kind;
  uint32_t dtype;
  uint32_t op;
  uint32_t is_background;
  const void* input;
  void* output;
  uint64_t bytes;
  double patience_seconds;
  const uint64_t* send_at;
  const uint64_t* send_bytes;
  const uint64_t* receive_at;
  const uint64_t* receive_bytes;
};

struct WeftFailure {
  int32_t trouble;
  int32_t culprit;
  int32_t reporter;
};

const char* weft_digest() { return WEFT_DIGEST; }
const char* weft_kernel_variant() { return kernel_variant(); }
uint64_t weft_segment_bytes(int num_ranks, uint64_t arena_bytes) { return Segment::size(num_ranks, arena_bytes); }
int weft_is_defined(uint32_t dtype, uint32_t op) { return is_defined(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op)); }

// By rank 0, on zeroed memory, before anybody else looks at it.
void weft_prepare(void* base, int num_ranks, uint64_t arena_bytes) {
  Header& header = Segment(static_cast<char*>(base)).header();
  header.magic = kMagic;
  header.num_ranks = static_cast<uint32_t>(num_ranks);
  header.arena_bytes = arena_bytes;
}

// Where a rank's arena begins, counted from the mapping's start.
uint64_t weft_arena_offset(void* base, int rank) {
  const Segment segment(static_cast<char*>(base));
  return static_cast<uint64_t>(segment.arena(rank) - segment.base());
}

// nullptr: the memory was not prepared for this group.  Says whose process the rank is; the others may look for it once
// all have called this (the caller sees to that).
void* weft_open(void* base, int rank, int num_ranks, int num_local_ranks) {
  const Segment segment(static_cast<char*>(base));
  if (segment.header().magic != kMagic || segment.num_ranks() != num_ranks || num_ranks > kMaxRanks) return nullptr;
  RankControl& control = segment.control(rank);
  const auto pid = static_cast<uint32_t>(getpid());
  control.start_time.store(process_start_time(pid), std::memory_order_release);
  control.pid.store(pid, std::memory_order_release);
  return new (std::nothrow) Engine(segment, rank, num_local_ranks);
}

void weft_close(void* engine) { delete static_cast<Engine*>(engine); }
void weft_leave(void* engine) { static_cast<Engine*>(engine)->leave(); }
uint64_t weft_completed(void* engine) { return static_cast<Engine*>(engine)->completed(); }
uint64_t weft_done_ns(void* engine, uint64_t ticket) { return static_cast<Engine*>(engine)->done_ns(ticket); }
uint64_t weft_in_place_calls(void* engine) { return static_cast<Engine*>(engine)->member.in_place_calls(); }
void weft_abort(void* engine) { static_cast<Engine*>(engine)->abort(Trouble::kAborted, static_cast<Engine*>(engine)->rank); }

uint64_t weft_submit(void* engine, const WeftCall* given) {
  Engine& self = *static_cast<Engine*>(engine);
  const int num_ranks = self.segment.num_ranks();
  const auto list = [&](const uint64_t* values) {
    return values == nullptr ? std::vector<uint64_t>() : std::vector<uint64_t>(values, values + num_ranks);
  };
  Call call;
  call.kind = static_cast<Kind>(given->kind);
  call.dtype = static_cast<Dtype>(given->dtype);
  call.op = static_cast<ReduceOp>(given->op);
  call.input = static_cast<const char*>(given->input);
  call.output = static_cast<char*>(given->output);
  call.bytes = given->bytes;
  call.patience_seconds = given->patience_seconds;
  call.send_at = list(given->send_at);
  call.send_bytes = list(given->send_bytes);
  call.receive_at = list(given->receive_at);
  call.receive_bytes = list(given->receive_bytes);
  return self.submit(std::move(call), given->is_background != 0);
}

int weft_wait(void* engine, uint64_t ticket, double patience_seconds, WeftFailure* failure) {
  const Failure found = static_cast<Engine*>(engine)->wait(ticket, patience_seconds);
  *failure = {static_cast<int32_t>(found.trouble), found.culprit, found.reporter};
  return found.trouble == Trouble::kNone ? 0 : 1;
}

int weft_all_reduce(void* engine, const void* input, void* output, uint64_t bytes, uint32_t dtype, uint32_t op,
                    double patience_seconds, WeftFailure* failure) {
  Engine& self = *static_cast<Engine*>(engine);
  Call call;
  call.kind = Kind::kAllReduce;
  call.dtype = static_cast<Dtype>(dtype);
  call.op = static_cast<ReduceOp>(op);
  call.input = static_cast<const char*>(input);
  call.output = static_cast<char*>(output);
  call.bytes = bytes;
  call.patience_seconds = patience_seconds;
  return weft_wait(engine, self.submit(std::move(call), false), patience_seconds, failure);
}

struct WeftDelivery {
  WeftFailure failure;
  int32_t source;
  uint64_t done_ns;
  uint64_t sent_bytes;
};

// Both return the message's number, or 0 once this rank has left; -1 is any source.
uint64_t weft_send(void* engine, int target, uint32_t tag, const void* from, uint64_t bytes) {
  return static_cast<Engine*>(engine)->mail.send(target, tag, static_cast<const char*>(from), bytes);
}

uint64_t weft_receive(void* engine, int source, uint32_t tag, void* to, uint64_t bytes) {
  return static_cast<Engine*>(engine)->mail.receive(source, tag, static_cast<char*>(to), bytes);
}

int weft_wait_for_message(void* engine, uint64_t ticket, double patience_seconds, WeftDelivery* told) {
  const Delivery found = static_cast<Engine*>(engine)->mail.wait(ticket, patience_seconds);
  const Failure& failure = found.failure;
  *told = {{static_cast<int32_t>(failure.trouble), failure.culprit, failure.reporter},
           found.source, found.done_ns, found.sent_bytes};
  return failure.trouble == Trouble::kNone ? 0 : 1;
}

int weft_is_message_done(void* engine, uint64_t ticket) { return static_cast<Engine*>(engine)->mail.is_done(ticket); }
void weft_forget_message(void* engine, uint64_t ticket) { static_cast<Engine*>(engine)->mail.forget(ticket); }

// Kind, dtype, op, bytes and layout of the call that a rank has announced, as numbers; for messages.
void weft_announced(void* engine, int rank, uint64_t numbers[5]) {
  const Signature found = static_cast<Engine*>(engine)->announced(rank);
  numbers[0] = found.kind;
  numbers[1] = found.dtype;
  numbers[2] = found.op;
  numbers[3] = found.bytes;
  numbers[4] = found.layout;
}

// Slot bytes, and whether copies in are streamed; as measured, where the group has had a large call.
void weft_manner(void* engine, uint64_t numbers[2]) {
  const Manner& manner = static_cast<Engine*>(engine)->member.manner;
  numbers[0] = manner.slot_bytes;
  numbers[1] = manner.streams_in;
}

// Every rank must set the same slot, between two calls.
void weft_set_manner(void* engine, uint64_t slot_bytes, int streams_in) {
  static_cast<Engine*>(engine)->member.set_manner({static_cast<uint32_t>(slot_bytes), streams_in != 0});
}

}  // extern "C"
