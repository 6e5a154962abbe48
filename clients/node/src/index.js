export { OctavoClient } from './client.js';
export {
  AlreadyExistsError,
  CancelledError,
  ConnectionFailedError,
  DeadlineExceededError,
  InternalError,
  InvalidArgumentError,
  NeverFitsError,
  NotFoundError,
  OctavoError,
  OverloadedError,
  PermissionDeniedError,
  UnauthenticatedError,
  UnavailableError,
} from './errors.js';
