// One request over as many calls as it takes: what to send, what to pass on, when to give up.
//
// No I/O in here. A stream that broke after tokens came is resumed: the next call brings the
// tokens received and the seed in use, and the service goes on after them.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "octavo/client.h"

namespace octavo {

// How long to wait after that many failures in a row. Jitter only ever lengthens the
// service's own delay, so that nobody comes back too early.
std::chrono::milliseconds backoff(const RetryPolicy& policy, int num_failures,
                                  std::optional<std::chrono::milliseconds> retry_delay);

// State of one request across calls.
//
// Invariant: the events passed on form one unbroken stream (a Started, deltas without a gap or
// a repeat, one Finished per choice, a Usage), however many calls it took.
class Session {
 public:
  using Events = std::vector<v1::GenerateResponse>;
  using Clock = std::chrono::steady_clock;

  Session(const v1::GenerateRequest& request, const RetryPolicy& policy);

  // What to send on the next call.
  v1::GenerateRequest next_request();

  // Takes in one response; returns the events to pass on.
  Events receive(const v1::GenerateResponse& response);

  // The call ended well; returns the last events. Throws INTERNAL if a choice has no end.
  Events finish();

  // The call failed. Returns how long to wait before the next one; unset: the answer is
  // complete anyway (only the usage was lost), end with finish. Throws the failure, if it is
  // not worth another call.
  std::optional<std::chrono::milliseconds> after_failure(const Error& failure,
                                                         Clock::time_point now);

 private:
  struct Choice {
    std::vector<std::uint32_t> token_ids;
    int echo_call = 0;  // number of the call that brought the echo; 0: none yet
    std::optional<v1::Finished> finished;
  };

  Events receive_delta(const v1::GenerateResponse& response);
  Events receive_finished(const v1::GenerateResponse& response);
  bool has_tokens() const;
  bool is_complete() const;
  v1::GenerateResponse own_usage() const;

  const v1::GenerateRequest request_;
  const RetryPolicy policy_;
  std::map<std::uint32_t, Choice> choices_;
  std::optional<v1::Started> started_;
  // An end by cancellation or error is held back until the call's status is known: a draining
  // service ends its choices so, and then says UNAVAILABLE.
  Events held_;
  bool is_usage_seen_ = false;
  int num_calls_ = 0;
  int num_failures_ = 0;
  std::optional<Clock::time_point> failing_since_;
};

}  // namespace octavo
