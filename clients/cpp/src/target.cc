#include "target.h"

#include <cctype>
#include <regex>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

namespace octavo {
namespace {

void check_at_least(const std::string& field, std::chrono::milliseconds value, int low) {
  if (value.count() < low) {
    throw invalid_argument(field, "at least " + std::to_string(low) + " ms",
                           std::to_string(value.count()));
  }
}

bool is_printable(const std::string& text) {
  for (const unsigned char letter : text) {
    if (letter <= ' ' || letter > '~') return false;
  }
  return true;
}

}  // namespace

Target parse_target(const std::string& target) {
  static const std::regex own_form("^(dns|unix|ipv4|ipv6|xds):.*");
  static const std::regex form("^(?:(grpcs?)://)?((\\[[0-9a-fA-F:.%]+\\]|[^\\s:/@?#]+):(\\d{1,5}))/?$");
  static const std::regex loopback("^(127(\\.\\d{1,3}){3}|localhost|\\[::1\\])$");
  if (std::regex_match(target, own_form)) return {target, std::nullopt, target.rfind("unix:", 0) == 0};
  std::smatch parts;
  const bool has_form = std::regex_match(target, parts, form);
  const int port = has_form ? std::stoi(parts[4]) : 0;
  if (port < 1 || port > 65535) {
    throw invalid_argument("target", "HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT",
                           '"' + target + '"');
  }
  const std::string host = parts[3];
  std::optional<bool> tls;
  if (parts[1].matched) tls = parts[1] == "grpcs";
  return {parts[2], tls, std::regex_match(host, loopback)};
}

void check_options(const Target& target, const ClientOptions& options) {
  if (options.tls && target.tls == false) {
    throw invalid_argument("tls", "left out with a target grpc://, which says that there is none",
                           "both");
  }
  const TlsOptions tls = options.tls.value_or(TlsOptions{});
  if (tls.certificate.empty() != tls.key.empty()) {
    throw invalid_argument(tls.key.empty() ? "tls.key" : "tls.certificate",
                           "given with the other of the two", "nothing");
  }
  if (!is_printable(options.api_key)) {
    throw invalid_argument("api_key", "printable ASCII without blanks", "something else");
  }
  const bool is_safe = options.tls || target.tls.value_or(false) || target.is_local;
  if (!options.api_key.empty() && !is_safe && !options.allow_insecure_key) {
    throw invalid_argument("api_key", "sent with tls, or with allow_insecure_key", "neither");
  }
  check_at_least("timeout", options.timeout, 1);
  check_at_least("unary_timeout", options.unary_timeout, 1);
  if (options.retry.max_attempts < 1) {
    throw invalid_argument("retry.max_attempts", "at least 1",
                           std::to_string(options.retry.max_attempts));
  }
  check_at_least("retry.resume", options.retry.resume, 0);
  check_at_least("retry.initial_backoff", options.retry.initial_backoff, 1);
  check_at_least("retry.max_backoff", options.retry.max_backoff,
                 static_cast<int>(options.retry.initial_backoff.count()));
}

std::shared_ptr<grpc::Channel> open_channel(const Target& target, const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix("octavo-cpp/0.1.0");
  // This client retries and resumes; gRPC's own retries would multiply that.
  arguments.SetInt("grpc.enable_retries", 0);
  // A reconnect should wait for our own back-off only, not for gRPC's second one.
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 2'000);
  // Connections are this client's own: another's wait for its next attempt is not shared.
  arguments.SetInt("grpc.use_local_subchannel_pool", 1);
  // A peer that vanished without a word is missed after 15 s; some versions of gRPC look at
  // one of these timeouts, some at the other.
  arguments.SetInt("grpc.keepalive_time_ms", 10'000);
  arguments.SetInt("grpc.keepalive_timeout_ms", 5'000);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 5'000);
  // Prompts of any length, and deltas with every log-probability, fit.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Replicas behind one name share the load, and a dead one is left out.
  arguments.SetServiceConfigJSON(R"({"loadBalancingConfig":[{"round_robin":{}}]})");
  // An http_proxy in the environment cannot reach this machine's loopback.
  if (target.is_local) arguments.SetInt("grpc.enable_http_proxy", 0);
  if (!options.tls && !target.tls.value_or(false)) {
    return grpc::CreateCustomChannel(target.address, grpc::InsecureChannelCredentials(), arguments);
  }
  const TlsOptions tls = options.tls.value_or(TlsOptions{});
  if (!tls.server_name.empty()) arguments.SetSslTargetNameOverride(tls.server_name);
  return grpc::CreateCustomChannel(
      target.address, grpc::SslCredentials({tls.ca, tls.key, tls.certificate}), arguments);
}

}  // namespace octavo
