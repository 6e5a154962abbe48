// Client of the Octavo LLM server: blocking calls with deadlines, retries, cancelling, and
// streams that go on by themselves when the server they came from dies.
//
// Requests and responses are the protobuf messages of octavo.v1; docs/reference.md has every
// field's unit, default and bounds.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "octavo/error.h"
#include "octavo/v1/inference.grpc.pb.h"

namespace octavo {

// PEM texts, not file names.
struct TlsOptions {
  std::string ca;           // roots to trust; empty: the system's
  std::string certificate;  // the client's own, with its key: mutual TLS
  std::string key;
  std::string server_name;  // that the server's certificate must have, if not the target's host
};

// Bounds of retrying. Only what the service did not run, or can resume, is retried.
struct RetryPolicy {
  int max_attempts = 5;  // calls in all before the first token came; 1 turns retrying off
  // How long a stream that broke after tokens came may go without progress; 0: no resuming.
  std::chrono::milliseconds resume{60'000};
  std::chrono::milliseconds initial_backoff{100};  // doubles each time
  std::chrono::milliseconds max_backoff{5'000};    // unless the service names a longer one
};

struct ClientOptions {
  std::string api_key;              // sent as "authorization: Bearer KEY"
  bool allow_insecure_key = false;  // without TLS to others than loopback
  std::optional<TlsOptions> tls;    // unset: as the target says (grpcs://)
  std::chrono::milliseconds timeout{600'000};       // deadline of generate and complete
  std::chrono::milliseconds unary_timeout{30'000};  // of all other calls
  RetryPolicy retry;
};

// Stops calls from another thread, or from a signal handler's thread. Copies share one state;
// once cancelled it stays so. May be used for several calls.
class Cancellation {
 public:
  Cancellation();
  void cancel() const;
  bool is_cancelled() const;

 private:
  friend class Client;
  struct State;
  std::shared_ptr<State> state_;
};

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;  // over all retries; unset: the client's
  std::optional<Cancellation> cancellation;
};

// One whole continuation.
struct Choice {
  std::string text;
  std::vector<std::uint32_t> token_ids;
  std::vector<v1::PositionLogprobs> logprobs;
  v1::Finished finished;
};

// A whole answer.
struct Completion {
  v1::Started started;
  std::vector<Choice> choices;
  v1::Usage usage;

  // Text of the first choice.
  const std::string& text() const { return choices.at(0).text; }
};

// Talks to a scheduler. All methods block, and may be called from several threads at once.
// Every method throws Error, and nothing else unless on_event does.
class Client {
 public:
  // Takes one event; false stops the stream, and frees the request's blocks.
  using OnEvent = std::function<bool(const v1::GenerateResponse&)>;

  // target: HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT (TLS) or gRPC's own forms.
  explicit Client(const std::string& target, ClientOptions options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Generates, and gives on_event the events as they come: one Started, deltas, one Finished
  // per choice, one Usage. Returns whether the stream came to its end.
  bool generate(const v1::GenerateRequest& request, const OnEvent& on_event,
                const CallOptions& call = {});

  // Generates, and returns the whole answer. An echoed prompt is left out.
  Completion complete(const v1::GenerateRequest& request, const CallOptions& call = {});

  // The token ids that generate would use for a text.
  std::vector<std::uint32_t> tokenize(const std::string& text, const CallOptions& call = {});
  // The text of token ids.
  std::string detokenize(const std::vector<std::uint32_t>& token_ids,
                         const CallOptions& call = {});
  // Describes the model that is served.
  v1::GetModelResponse get_model(const CallOptions& call = {});

 private:
  class Call;
  template <typename Request, typename Response>
  Response unary(grpc::Status (v1::InferenceService::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                 const Request& request, const CallOptions& call);

  std::string address_;
  ClientOptions options_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

}  // namespace octavo
