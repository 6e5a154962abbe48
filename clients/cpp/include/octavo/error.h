// What can go wrong when you talk to Octavo.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/support/status.h>

namespace octavo {

// One field out of bounds.
struct FieldViolation {
  std::string field;        // its path in the request, such as "sampling.temperature"
  std::string description;  // what it may be
};

// Everything that this client throws. `code` tells the kinds apart:
//   INVALID_ARGUMENT     a field is out of bounds; see field_violations
//   UNAUTHENTICATED      the API key is missing or unknown
//   PERMISSION_DENIED    the API key does not allow this
//   NOT_FOUND            the model is not the one served
//   ALREADY_EXISTS       request_id belongs to a live request
//   FAILED_PRECONDITION  the request is larger than the whole KV pool
//   RESOURCE_EXHAUSTED   the queue is full, or a limit is reached; see retry_delay
//   UNAVAILABLE          draining, no executor, or nothing answers at the target
//   DEADLINE_EXCEEDED    the deadline passed
//   CANCELLED            the caller cancelled
//   INTERNAL             the service failed, or broke its own contract
class Error : public std::runtime_error {
 public:
  Error(grpc::StatusCode code, const std::string& message);

  // Reads a status that is not OK, with its google.rpc details.
  explicit Error(const grpc::Status& status);

  grpc::StatusCode code() const { return code_; }
  // The service's constant for what is wrong, such as "QUEUE_FULL", or "".
  const std::string& reason() const { return reason_; }
  // The service's facts about it, by name.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::vector<FieldViolation>& field_violations() const { return field_violations_; }
  // When it is worth asking again; unset: not said.
  std::optional<std::chrono::milliseconds> retry_delay() const { return retry_delay_; }

 private:
  void read_details(const std::string& bytes);

  grpc::StatusCode code_;
  std::string reason_;
  std::map<std::string, std::string> metadata_;
  std::vector<FieldViolation> field_violations_;
  std::optional<std::chrono::milliseconds> retry_delay_;
};

// An INVALID_ARGUMENT of the client's own, in the form of the service's.
Error invalid_argument(const std::string& field, const std::string& bound,
                       const std::string& got);

}  // namespace octavo
