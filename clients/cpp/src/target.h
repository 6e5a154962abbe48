// How to reach a service: the forms of an address, and the channel to it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/channel.h>

#include "octavo/client.h"

namespace octavo {

struct Target {
  std::string address;      // in gRPC's own form
  std::optional<bool> tls;  // unset: the target does not say
  bool is_local = false;    // nobody else hears what is sent
};

// Throws Error, INVALID_ARGUMENT, if there is no host or no port.
Target parse_target(const std::string& target);

// Throws Error, INVALID_ARGUMENT, naming the option that does not fit.
void check_options(const Target& target, const ClientOptions& options);

std::shared_ptr<grpc::Channel> open_channel(const Target& target, const ClientOptions& options);

}  // namespace octavo
