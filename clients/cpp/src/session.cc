#include "session.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace octavo {
namespace {

constexpr std::size_t kMaxRequestIdCharacters = 128;

double uniform(double low, double high) {
  thread_local std::mt19937 generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(low, high)(generator);
}

bool is_provisional(const v1::Finished& finished) {
  return finished.reason() == v1::FINISH_REASON_CANCELLED ||
         finished.reason() == v1::FINISH_REASON_ERROR;
}

}  // namespace

std::chrono::milliseconds backoff(const RetryPolicy& policy, int num_failures,
                                  std::optional<std::chrono::milliseconds> retry_delay) {
  double milliseconds = 0;
  if (retry_delay) {
    milliseconds = static_cast<double>(retry_delay->count()) * uniform(1.0, 1.25);
  } else {
    const double doubled = static_cast<double>(policy.initial_backoff.count()) *
                           std::pow(2.0, std::min(num_failures - 1, 32));
    const auto longest = static_cast<double>(policy.max_backoff.count());
    milliseconds = std::min(doubled, longest) * uniform(0.5, 1.0);
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(milliseconds)));
}

Session::Session(const v1::GenerateRequest& request, const RetryPolicy& policy)
    : request_(request), policy_(policy) {
  // What the caller brings to resume with was passed on by an earlier session.
  for (const auto& resumed : request.resume()) {
    auto& known = choices_[resumed.index()].token_ids;
    known.assign(resumed.token_ids().begin(), resumed.token_ids().end());
  }
}

v1::GenerateRequest Session::next_request() {
  ++num_calls_;
  held_.clear();
  if (num_calls_ == 1) return request_;
  v1::GenerateRequest request = request_;
  if (!request.request_id().empty()) {
    // The broken call may still be live at the service, under the old id.
    const std::string suffix = ".r" + std::to_string(num_calls_ - 1);
    request.set_request_id(
        request.request_id().substr(0, kMaxRequestIdCharacters - suffix.size()) + suffix);
  }
  if (started_) request.mutable_sampling()->set_seed(started_->seed());
  request.clear_resume();
  for (const auto& [index, choice] : choices_) {
    if (choice.token_ids.empty()) continue;
    auto* resumed = request.add_resume();
    resumed->set_index(index);
    resumed->mutable_token_ids()->Add(choice.token_ids.begin(), choice.token_ids.end());
  }
  return request;
}

Session::Events Session::receive(const v1::GenerateResponse& response) {
  switch (response.event_case()) {
    case v1::GenerateResponse::kStarted:
      if (started_) return {};
      started_ = response.started();
      return {response};
    case v1::GenerateResponse::kDelta:
      return receive_delta(response);
    case v1::GenerateResponse::kFinished:
      return receive_finished(response);
    case v1::GenerateResponse::kUsage:
      held_.push_back(response);
      return {};
    default:  // a kind that this client does not know yet
      return {};
  }
}

Session::Events Session::receive_delta(const v1::GenerateResponse& response) {
  const auto& delta = response.delta();
  Choice& choice = choices_[delta.index()];
  if (choice.finished) return {};
  if (delta.is_prompt()) {
    if (choice.echo_call == 0) choice.echo_call = num_calls_;
    return choice.echo_call == num_calls_ ? Events{response} : Events{};
  }
  if (delta.token_ids().empty() && delta.text().empty()) return {};
  choice.token_ids.insert(choice.token_ids.end(), delta.token_ids().begin(),
                          delta.token_ids().end());
  num_failures_ = 0;
  failing_since_.reset();
  return {response};
}

Session::Events Session::receive_finished(const v1::GenerateResponse& response) {
  Choice& choice = choices_[response.finished().index()];
  if (choice.finished) return {};
  if (is_provisional(response.finished())) {
    held_.push_back(response);
    return {};
  }
  choice.finished = response.finished();
  return {response};
}

Session::Events Session::finish() {
  Events events;
  events.swap(held_);
  for (const auto& event : events) {
    if (event.has_finished()) choices_[event.finished().index()].finished = event.finished();
    is_usage_seen_ |= event.has_usage();
  }
  if (!started_ || !is_complete()) {
    throw Error(grpc::StatusCode::INTERNAL,
                "the service ended the stream before every choice was finished");
  }
  if (!is_usage_seen_) events.push_back(own_usage());
  return events;
}

std::optional<std::chrono::milliseconds> Session::after_failure(const Error& failure,
                                                                Clock::time_point now) {
  // A cancel of our own never gets here: the service's side went away in mid-call.
  const bool is_break = failure.code() == grpc::StatusCode::UNAVAILABLE ||
                        failure.code() == grpc::StatusCode::CANCELLED;
  if (is_break && is_complete()) return std::nullopt;
  if (!is_break && failure.code() != grpc::StatusCode::RESOURCE_EXHAUSTED) throw failure;
  ++num_failures_;
  const auto delay = backoff(policy_, num_failures_, failure.retry_delay());
  if (has_tokens()) {
    if (!failing_since_) failing_since_ = now;
    if (now + delay - *failing_since_ > policy_.resume) throw failure;
  } else if (num_calls_ >= policy_.max_attempts) {
    throw failure;
  }
  return delay;
}

bool Session::has_tokens() const {
  return std::any_of(choices_.begin(), choices_.end(),
                     [](const auto& entry) { return !entry.second.token_ids.empty(); });
}

bool Session::is_complete() const {
  const auto ended = std::count_if(choices_.begin(), choices_.end(), [](const auto& entry) {
    return entry.second.finished.has_value();
  });
  return ended >= static_cast<std::ptrdiff_t>(std::max(request_.n(), 1u));
}

// A usage for a stream that lost the service's; its times are not known.
v1::GenerateResponse Session::own_usage() const {
  v1::GenerateResponse event;
  std::uint32_t num_tokens = 0;
  for (const auto& entry : choices_) {
    if (entry.second.finished) num_tokens += entry.second.finished->num_tokens();
  }
  event.mutable_usage()->set_num_prompt_tokens(started_->num_prompt_tokens());
  event.mutable_usage()->set_num_completion_tokens(num_tokens);
  return event;
}

}  // namespace octavo
