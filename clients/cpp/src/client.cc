#include "octavo/client.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "session.h"
#include "target.h"

namespace octavo {
namespace {

using std::chrono::milliseconds;
using SystemClock = std::chrono::system_clock;  // of gRPC's deadlines

constexpr milliseconds kTimer{50};  // gRPC's timer may fire so much before ours

Error cancelled() { return Error(grpc::StatusCode::CANCELLED, "the call was cancelled"); }

// Of a failed RPC: what says nothing of its cause may have been the deadline's doing.
bool is_vague(const Error& error) {
  switch (error.code()) {
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNAVAILABLE:
      return error.reason().empty();
    default:
      return error.code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  }
}

}  // namespace

struct Cancellation::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_cancelled = false;
  std::set<grpc::ClientContext*> contexts;  // of the RPCs under way
};

Cancellation::Cancellation() : state_(std::make_shared<State>()) {}

void Cancellation::cancel() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->is_cancelled = true;
  for (auto* context : state_->contexts) context->TryCancel();
  state_->changed.notify_all();
}

bool Cancellation::is_cancelled() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->is_cancelled;
}

// One call of the user's, over as many RPCs as it takes: its deadline and its cancellation.
class Client::Call {
 public:
  Call(const Client& client, const CallOptions& options, milliseconds default_timeout)
      : client_(client),
        timeout_(options.timeout.value_or(default_timeout)),
        deadline_(SystemClock::now() + timeout_),
        cancellation_(options.cancellation.value_or(Cancellation())) {
    if (timeout_.count() < 1) {
      throw invalid_argument("timeout", "at least 1 ms", std::to_string(timeout_.count()));
    }
  }

  bool is_cancelled() const { return cancellation_.is_cancelled(); }

  // Throws what a failed RPC means for the caller; returns it, if a retry may help.
  Error translate(const grpc::Status& status) const {
    if (is_cancelled()) throw cancelled();
    const Error error(status);
    const bool is_late = SystemClock::now() >= deadline_ - kTimer;
    if (error.code() == grpc::StatusCode::DEADLINE_EXCEEDED || (is_late && is_vague(error))) {
      throw Error(grpc::StatusCode::DEADLINE_EXCEEDED,
                  "the deadline of " + std::to_string(timeout_.count()) + " ms passed");
    }
    if (error.code() == grpc::StatusCode::UNIMPLEMENTED) {
      throw Error(error.code(), "the server at " + client_.address_ +
                                    " is no Octavo scheduler: " + status.error_message());
    }
    if (error.code() == grpc::StatusCode::UNAVAILABLE && error.reason().empty()) {
      return Error(error.code(), "no answer from " + client_.address_ + ": " +
                                     status.error_message());
    }
    return error;
  }

  // Waits before the next RPC. Throws the failure, if the wait would end after the deadline.
  void pause(milliseconds delay, const Error& failure) const {
    if (SystemClock::now() + delay >= deadline_) throw failure;
    auto& state = *cancellation_.state_;
    std::unique_lock<std::mutex> lock(state.mutex);
    if (state.changed.wait_for(lock, delay, [&] { return state.is_cancelled; })) throw cancelled();
  }

  // The context of one RPC; the call's cancellation reaches it as long as it lives.
  class Rpc {
   public:
    explicit Rpc(const Call& call) : state_(*call.cancellation_.state_) {
      context.set_deadline(call.deadline_);
      const std::string& key = call.client_.options_.api_key;
      if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
      const std::lock_guard<std::mutex> lock(state_.mutex);
      if (state_.is_cancelled) throw cancelled();
      state_.contexts.insert(&context);
    }
    ~Rpc() {
      const std::lock_guard<std::mutex> lock(state_.mutex);
      state_.contexts.erase(&context);
    }
    Rpc(const Rpc&) = delete;
    Rpc& operator=(const Rpc&) = delete;

    grpc::ClientContext context;

   private:
    Cancellation::State& state_;
  };

 private:
  const Client& client_;
  const milliseconds timeout_;
  const SystemClock::time_point deadline_;
  const Cancellation cancellation_;
};

namespace {

// A stream's reader, ended in whatever way its block is left.
class Reader {
 public:
  Reader(grpc::ClientContext& context,
         std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader)
      : context_(context), reader_(std::move(reader)) {}
  ~Reader() {
    if (is_finished_) return;
    context_.TryCancel();
    v1::GenerateResponse rest;
    while (reader_->Read(&rest)) {
    }
    reader_->Finish();
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  bool read(v1::GenerateResponse* response) { return reader_->Read(response); }
  grpc::Status finish() {
    is_finished_ = true;
    return reader_->Finish();
  }

 private:
  grpc::ClientContext& context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  bool is_finished_ = false;
};

bool pass_on(const Session::Events& events, const Client::OnEvent& on_event) {
  return std::all_of(events.begin(), events.end(), on_event);
}

}  // namespace

Client::Client(const std::string& target, ClientOptions options) : options_(std::move(options)) {
  const Target parsed = parse_target(target);
  check_options(parsed, options_);
  address_ = parsed.address;
  stub_ = v1::InferenceService::NewStub(open_channel(parsed, options_));
}

Client::~Client() = default;

bool Client::generate(const v1::GenerateRequest& request, const OnEvent& on_event,
                      const CallOptions& options) {
  const Call call(*this, options, options_.timeout);
  Session session(request, options_.retry);
  for (;;) {
    grpc::Status status;
    {
      Call::Rpc rpc(call);
      Reader reader(rpc.context, stub_->Generate(&rpc.context, session.next_request()));
      v1::GenerateResponse response;
      while (reader.read(&response)) {
        if (call.is_cancelled()) throw cancelled();
        if (!pass_on(session.receive(response), on_event)) return false;
      }
      status = reader.finish();
    }
    if (status.ok()) return pass_on(session.finish(), on_event);
    const Error failure = call.translate(status);
    const auto delay = session.after_failure(failure, Session::Clock::now());
    if (!delay) return pass_on(session.finish(), on_event);
    call.pause(*delay, failure);
  }
}

Completion Client::complete(const v1::GenerateRequest& request, const CallOptions& options) {
  Completion completion;
  std::map<std::uint32_t, Choice> choices;
  const auto collect = [&](const v1::GenerateResponse& event) {
    if (event.has_started()) completion.started = event.started();
    if (event.has_usage()) completion.usage = event.usage();
    if (event.has_finished()) choices[event.finished().index()].finished = event.finished();
    if (event.has_delta() && !event.delta().is_prompt()) {
      const auto& delta = event.delta();
      Choice& choice = choices[delta.index()];
      choice.text += delta.text();
      choice.token_ids.insert(choice.token_ids.end(), delta.token_ids().begin(),
                              delta.token_ids().end());
      choice.logprobs.insert(choice.logprobs.end(), delta.logprobs().begin(),
                             delta.logprobs().end());
    }
    return true;
  };
  generate(request, collect, options);
  for (auto& entry : choices) completion.choices.push_back(std::move(entry.second));
  return completion;
}

template <typename Request, typename Response>
Response Client::unary(grpc::Status (v1::InferenceService::Stub::*method)(grpc::ClientContext*,
                                                                          const Request&,
                                                                          Response*),
                       const Request& request, const CallOptions& options) {
  const Call call(*this, options, options_.unary_timeout);
  for (int attempt = 1;; ++attempt) {
    Response response;
    grpc::Status status;
    {
      Call::Rpc rpc(call);
      status = (stub_.get()->*method)(&rpc.context, request, &response);
    }
    if (status.ok()) return response;
    const Error failure = call.translate(status);
    const bool is_passing = failure.code() == grpc::StatusCode::UNAVAILABLE ||
                            failure.code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    if (!is_passing || attempt >= options_.retry.max_attempts) throw failure;
    call.pause(backoff(options_.retry, attempt, failure.retry_delay()), failure);
  }
}

std::vector<std::uint32_t> Client::tokenize(const std::string& text, const CallOptions& options) {
  v1::TokenizeRequest request;
  request.set_text(text);
  const auto response = unary(&v1::InferenceService::Stub::Tokenize, request, options);
  return {response.token_ids().begin(), response.token_ids().end()};
}

std::string Client::detokenize(const std::vector<std::uint32_t>& token_ids,
                               const CallOptions& options) {
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
  return unary(&v1::InferenceService::Stub::Detokenize, request, options).text();
}

v1::GetModelResponse Client::get_model(const CallOptions& options) {
  return unary(&v1::InferenceService::Stub::GetModel, v1::GetModelRequest(), options);
}

}  // namespace octavo
