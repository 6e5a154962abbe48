// Streams a text to the terminal:
//
//   octavo-generate [--target HOST:PORT] [--max-tokens N] [--temperature X] [--seed N]
//                   [--stop TEXT] [--ca-file FILE] PROMPT
//
// OCTAVO_API_KEY is sent, if it is set. Ctrl-C cancels, and frees the request's blocks.
// Exits with 0 at the end of the text, 1 after an error, 2 for bad arguments, 130 for Ctrl-C.

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "octavo/client.h"

namespace {

constexpr char kUsage[] =
    "usage: octavo-generate [--target HOST:PORT] [--max-tokens N] [--temperature X]\n"
    "                       [--seed N] [--stop TEXT] [--ca-file FILE] PROMPT\n";

struct Arguments {
  std::string target = "127.0.0.1:50051";
  octavo::ClientOptions client;
  octavo::v1::GenerateRequest request;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!(content << file.rdbuf())) throw std::runtime_error("cannot read " + path);
  return content.str();
}

// Throws std::invalid_argument or std::out_of_range if the text is no number.
template <typename Number, typename Parse>
Number number(const std::string& text, Parse parse) {
  std::size_t num_read = 0;
  const Number value = parse(text, &num_read);
  if (num_read != text.size() || text[0] == '-') throw std::invalid_argument(text);
  return value;
}

std::uint64_t whole(const std::string& text) {
  return number<std::uint64_t>(
      text, [](const std::string& digits, std::size_t* end) { return std::stoull(digits, end); });
}

float decimal(const std::string& text) {
  return number<float>(
      text, [](const std::string& digits, std::size_t* end) { return std::stof(digits, end); });
}

void set(Arguments& arguments, const std::string& flag, const std::string& value) {
  auto& request = arguments.request;
  if (flag == "--target") {
    arguments.target = value;
  } else if (flag == "--max-tokens") {
    const std::uint64_t max_tokens = whole(value);
    if (max_tokens > UINT32_MAX) throw std::out_of_range(value);
    request.mutable_stopping()->set_max_tokens(static_cast<std::uint32_t>(max_tokens));
  } else if (flag == "--temperature") {
    request.mutable_sampling()->set_temperature(decimal(value));
  } else if (flag == "--seed") {
    request.mutable_sampling()->set_seed(whole(value));
  } else if (flag == "--stop") {
    request.mutable_stopping()->add_stop(value);
  } else if (flag == "--ca-file") {
    arguments.client.tls = octavo::TlsOptions{};
    arguments.client.tls->ca = read_file(value);
  } else {
    throw std::invalid_argument("no such flag");
  }
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  arguments.request.mutable_stopping()->set_max_tokens(128);
  if (const char* key = std::getenv("OCTAVO_API_KEY")) arguments.client.api_key = key;
  int at = 1;
  for (; at + 1 < argc && std::string(argv[at]).rfind("--", 0) == 0; at += 2) {
    try {
      set(arguments, argv[at], argv[at + 1]);
    } catch (const std::logic_error&) {  // of the standard library's parsers
      std::cerr << "octavo-generate: bad value or flag: " << argv[at] << ' ' << argv[at + 1]
                << '\n' << kUsage;
      std::exit(2);
    }
  }
  if (at + 1 != argc) {
    std::cerr << kUsage;
    std::exit(2);
  }
  arguments.request.set_text(argv[at]);
  return arguments;
}

// A signal is taken by a thread that waits for it: a handler may not lock.
void cancel_on_interrupt(const octavo::Cancellation& cancellation) {
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  std::thread([cancellation, interrupt] {
    int signal = 0;
    sigwait(&interrupt, &signal);
    cancellation.cancel();
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const octavo::Cancellation cancellation;
  cancel_on_interrupt(cancellation);
  try {
    const Arguments arguments = parse(argc, argv);
    octavo::Client client(arguments.target, arguments.client);
    const auto show = [](const octavo::v1::GenerateResponse& event) {
      if (event.has_delta()) std::cout << event.delta().text() << std::flush;
      return true;
    };
    octavo::CallOptions call;
    call.cancellation = cancellation;
    client.generate(arguments.request, show, call);
    std::cout << '\n';
    return 0;
  } catch (const std::exception& error) {
    std::cout << std::endl;
    std::cerr << "octavo-generate: " << error.what() << '\n';
    return cancellation.is_cancelled() ? 130 : 1;
  }
}
