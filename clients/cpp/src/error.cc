#include "octavo/error.h"

#include "octavo/client/details.pb.h"

namespace octavo {
namespace {

// Whether a packed detail is of a type of google.rpc, whatever host its URL names.
bool is_kind(const google::protobuf::Any& packed, const std::string& name) {
  const std::string suffix = "/google.rpc." + name;
  const std::string& url = packed.type_url();
  return url.size() >= suffix.size() &&
         url.compare(url.size() - suffix.size(), suffix.size(), suffix) == 0;
}

}  // namespace

Error::Error(grpc::StatusCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

Error::Error(const grpc::Status& status)
    : std::runtime_error(status.error_message()), code_(status.error_code()) {
  read_details(status.error_details());
}

// What cannot be read counts as none: a proxy's garbage must not hide the status itself.
void Error::read_details(const std::string& bytes) {
  client::Status status;
  if (bytes.empty() || !status.ParseFromString(bytes)) return;
  for (const auto& packed : status.details()) {
    client::ErrorInfo info;
    client::BadRequest bad;
    client::RetryInfo retry;
    if (is_kind(packed, "ErrorInfo") && info.ParseFromString(packed.value())) {
      reason_ = info.reason();
      for (const auto& fact : info.metadata()) metadata_[fact.first] = fact.second;
    } else if (is_kind(packed, "BadRequest") && bad.ParseFromString(packed.value())) {
      for (const auto& violation : bad.field_violations()) {
        field_violations_.push_back({violation.field(), violation.description()});
      }
    } else if (is_kind(packed, "RetryInfo") && retry.ParseFromString(packed.value())) {
      retry_delay_ = std::chrono::milliseconds(retry.retry_delay().seconds() * 1000 +
                                               retry.retry_delay().nanos() / 1'000'000);
    }
  }
}

Error invalid_argument(const std::string& field, const std::string& bound,
                       const std::string& got) {
  client::BadRequest bad;
  auto* violation = bad.add_field_violations();
  violation->set_field(field);
  violation->set_description("must be " + bound);
  client::Status details;
  auto* packed = details.add_details();
  packed->set_type_url("type.googleapis.com/google.rpc.BadRequest");
  packed->set_value(bad.SerializeAsString());
  const std::string message = field + " must be " + bound + ", got " + got;
  return Error(
      grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, message, details.SerializeAsString()));
}

}  // namespace octavo
