// Does one thing with the client and prints what came, a line each; tests/clients compares.
//
//   octavo-driver TARGET COMMAND [ARGUMENT…]
//
// OCTAVO_API_KEY is sent; OCTAVO_CA_FILE, OCTAVO_CERT_FILE and OCTAVO_KEY_FILE turn TLS on.

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "octavo/client.h"

namespace {

using Arguments = std::vector<std::string>;
using octavo::v1::GenerateRequest;
using octavo::v1::GenerateResponse;

// So that an answer of several lines is one line of output.
std::string quoted(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    if (letter == '\\') {
      out += "\\\\";
    } else if (letter == '\n') {
      out += "\\n";
    } else {
      out += letter;
    }
  }
  return out;
}

template <typename Numbers>
void print(const std::string& name, const Numbers& numbers) {
  std::cout << name;
  for (const auto number : numbers) std::cout << ' ' << number;
  std::cout << '\n';
}

GenerateRequest greedy(const std::string& prompt, unsigned max_tokens) {
  GenerateRequest request;
  request.set_text(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// stream PROMPT MAX_TOKENS: the text of a greedy stream, and how many deltas it came in.
void stream(octavo::Client& client, const Arguments& arguments) {
  std::string text;
  int num_deltas = 0;
  std::string order;
  client.generate(greedy(arguments[0], std::stoul(arguments[1])),
                  [&](const GenerateResponse& event) {
                    text += event.delta().text();
                    num_deltas += event.has_delta();
                    if (!event.has_delta()) order += std::to_string(event.event_case());
                    return true;
                  });
  std::cout << "text " << quoted(text) << "\ndeltas " << num_deltas << "\norder " << order << '\n';
}

// seeded PROMPT MAX_TOKENS SEED: the tokens of two choices.
void seeded(octavo::Client& client, const Arguments& arguments) {
  GenerateRequest request;
  request.set_text(arguments[0]);
  request.set_n(2);
  request.set_request_id("cpp-seeded");
  request.mutable_sampling()->set_temperature(0.9f);
  request.mutable_sampling()->set_top_p(0.95f);
  request.mutable_sampling()->set_seed(std::stoull(arguments[2]));
  request.mutable_stopping()->set_max_tokens(std::stoul(arguments[1]));
  request.mutable_stopping()->set_ignore_eos(true);
  const octavo::Completion completion = client.complete(request);
  for (const auto& choice : completion.choices) print("choice", choice.token_ids);
  std::cout << "seed " << completion.started.seed() << "\ncompletion_tokens "
            << completion.usage.num_completion_tokens() << '\n';
}

// stop PROMPT STOP: the text up to a stop string.
void stop(octavo::Client& client, const Arguments& arguments) {
  GenerateRequest request = greedy(arguments[0], 48);
  request.mutable_stopping()->add_stop(arguments[1]);
  const octavo::Completion completion = client.complete(request);
  std::cout << "text " << quoted(completion.text()) << "\nstop "
            << quoted(completion.choices[0].finished.stop()) << '\n';
}

// unary TEXT: its tokens, and their text.
void unary(octavo::Client& client, const Arguments& arguments) {
  const auto ids = client.tokenize(arguments[0]);
  print("tokens", ids);
  std::cout << "text " << quoted(client.detokenize(ids)) << '\n';
}

// model: its name, and how many tokens it knows.
void model(octavo::Client& client, const Arguments&) {
  const auto model = client.get_model();
  std::cout << "model " << model.model() << "\nvocab_size " << model.vocab_size() << '\n';
}

// temperature VALUE: a request that may be refused.
void temperature(octavo::Client& client, const Arguments& arguments) {
  GenerateRequest request = greedy("a", 2);
  request.mutable_sampling()->set_temperature(std::stof(arguments[0]));
  client.complete(request);
}

// leave WAY: ends an endless stream after three deltas and stays, until a line comes in.
void leave(octavo::Client& client, const Arguments& arguments) {
  const octavo::Cancellation cancellation;
  octavo::CallOptions call;
  call.cancellation = cancellation;
  int num_deltas = 0;
  std::thread canceller;
  const auto on_event = [&](const GenerateResponse& event) {
    num_deltas += event.has_delta();
    if (num_deltas < 3 || canceller.joinable()) return true;
    if (arguments[0] == "return") return false;
    if (arguments[0] == "throw") throw std::runtime_error("the reader broke");
    canceller = std::thread([&] { cancellation.cancel(); });
    return true;
  };
  std::string end;
  try {
    end = client.generate(greedy("Endless:", 2000), on_event, call) ? "done" : "left";
  } catch (const octavo::Error& error) {
    end = error.code() == grpc::StatusCode::CANCELLED ? "cancelled" : error.what();
  } catch (const std::runtime_error& error) {
    end = error.what();
  }
  if (canceller.joinable()) canceller.join();
  std::cout << "end " << end << std::endl;
  std::string line;
  std::getline(std::cin, line);
}

// deadline MILLISECONDS: an endless stream with a deadline.
void deadline(octavo::Client& client, const Arguments& arguments) {
  octavo::CallOptions call;
  call.timeout = std::chrono::milliseconds(std::stoi(arguments[0]));
  client.complete(greedy("Endless:", 2000), call);
}

// The content of the file that a variable names; empty: the variable is not set.
std::string read_named(const char* variable) {
  const char* path = std::getenv(variable);
  if (path == nullptr) return "";
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

octavo::ClientOptions options_of_environment() {
  octavo::ClientOptions options;
  options.retry.initial_backoff = std::chrono::milliseconds(20);
  if (const char* key = std::getenv("OCTAVO_API_KEY")) options.api_key = key;
  octavo::TlsOptions tls;
  tls.ca = read_named("OCTAVO_CA_FILE");
  tls.certificate = read_named("OCTAVO_CERT_FILE");
  tls.key = read_named("OCTAVO_KEY_FILE");
  if (!tls.ca.empty() || !tls.certificate.empty() || !tls.key.empty()) options.tls = tls;
  return options;
}

void report(const octavo::Error& error) {
  std::cout << "error " << error.code() << "\nmessage " << quoted(error.what()) << "\nreason "
            << error.reason() << '\n';
  for (const auto& violation : error.field_violations()) {
    std::cout << "field " << violation.field << "\ndescription " << violation.description << '\n';
  }
  if (error.retry_delay()) std::cout << "retry_delay_ms " << error.retry_delay()->count() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)(octavo::Client&, const Arguments&)> commands = {
      {"stream", stream}, {"seeded", seeded},           {"stop", stop},   {"unary", unary},
      {"model", model},   {"temperature", temperature}, {"leave", leave}, {"deadline", deadline},
  };
  const Arguments arguments(argv + 1, argv + argc);
  try {
    octavo::Client client(arguments.at(0), options_of_environment());
    commands.at(arguments.at(1))(client, Arguments(arguments.begin() + 2, arguments.end()));
  } catch (const octavo::Error& error) {
    report(error);
  }
  return 0;
}
