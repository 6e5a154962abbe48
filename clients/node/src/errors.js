/**
 * What can go wrong when you talk to Octavo.
 *
 * OctavoError
 * ├── InvalidArgumentError     a field is out of bounds; carries fieldViolations
 * ├── UnauthenticatedError     the API key is missing or unknown
 * ├── PermissionDeniedError    the API key does not allow this
 * ├── NotFoundError            the model is not the one served
 * ├── AlreadyExistsError       request_id belongs to a live request
 * ├── NeverFitsError           the request is larger than the whole KV pool
 * ├── OverloadedError          the queue is full, or a limit is reached; carries retryDelayMs
 * ├── UnavailableError         draining, or no executor
 * │   └── ConnectionFailedError    nothing answers at the target
 * ├── DeadlineExceededError    the deadline passed
 * ├── CancelledError           the client was closed
 * └── InternalError            the service failed, or broke its own contract
 */

import { status } from '@grpc/grpc-js';

import { decode } from './protos.js';

/** Base of everything that this client throws, except an AbortSignal's own reason. */
export class OctavoError extends Error {
  /**
   * @param {string} message for people.
   * @param {object} facts
   * @param {string} facts.code name of the gRPC status, such as "UNAVAILABLE".
   * @param {string} [facts.reason] the service's constant for what is wrong, or "".
   * @param {Record<string, string>} [facts.metadata] the service's facts about it.
   * @param {{field: string, description: string}[]} [facts.fieldViolations]
   * @param {number | null} [facts.retryDelayMs] when it is worth asking again.
   * @param {unknown} [facts.cause] the gRPC error behind it.
   */
  constructor(message, facts) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.code = facts.code;
    this.reason = facts.reason ?? '';
    this.metadata = facts.metadata ?? {};
    this.fieldViolations = facts.fieldViolations ?? [];
    this.retryDelayMs = facts.retryDelayMs ?? null;
  }
}

export class InvalidArgumentError extends OctavoError {
  /** Path of the first bad field, such as "sampling.temperature", or "". */
  get field() {
    return this.fieldViolations[0]?.field ?? '';
  }
}
export class UnauthenticatedError extends OctavoError {}
export class PermissionDeniedError extends OctavoError {}
export class NotFoundError extends OctavoError {}
export class AlreadyExistsError extends OctavoError {}
export class NeverFitsError extends OctavoError {}
export class OverloadedError extends OctavoError {}
export class UnavailableError extends OctavoError {}
export class ConnectionFailedError extends UnavailableError {}
export class DeadlineExceededError extends OctavoError {}
export class CancelledError extends OctavoError {}
export class InternalError extends OctavoError {}

const BY_CODE = {
  INVALID_ARGUMENT: InvalidArgumentError,
  OUT_OF_RANGE: InvalidArgumentError,
  UNAUTHENTICATED: UnauthenticatedError,
  PERMISSION_DENIED: PermissionDeniedError,
  NOT_FOUND: NotFoundError,
  ALREADY_EXISTS: AlreadyExistsError,
  FAILED_PRECONDITION: NeverFitsError,
  RESOURCE_EXHAUSTED: OverloadedError,
  UNAVAILABLE: UnavailableError,
  DEADLINE_EXCEEDED: DeadlineExceededError,
  CANCELLED: CancelledError,
};

// grpc-js tells these from other failures by their text only.
const CONNECT_PHRASES = ['No connection established', 'Name resolution failed'];
const CUT_PHRASE = 'Call ended without gRPC status';

/** A value of the caller's that cannot be sent: the same error as the service's own. */
export function invalid(field, bound, value) {
  const description = `must be ${bound}`;
  return new InvalidArgumentError(`${field} ${description}, got ${shown(value)}`, {
    code: 'INVALID_ARGUMENT',
    fieldViolations: [{ field, description }],
  });
}

/** The error for a deadline that cut a call short, in our own words: gRPC's vary. */
export function deadlinePassed(timeoutMs, cause) {
  return new DeadlineExceededError(`the deadline of ${timeoutMs} ms passed`, {
    code: 'DEADLINE_EXCEEDED',
    cause,
  });
}

/**
 * Turn a failed call into an OctavoError, with what its details say.
 *
 * @param {import('@grpc/grpc-js').ServiceError} failure
 * @param {string} target whom the call went to.
 */
export function fromFailure(failure, target) {
  const details = readDetails(failure.metadata);
  let code = status[failure.code] ?? 'UNKNOWN';
  let message = failure.details || failure.message || code;
  if (code === 'INTERNAL' && message.includes(CUT_PHRASE)) {
    code = 'UNAVAILABLE'; // the connection went away under the call
  }
  let Kind = BY_CODE[code] ?? InternalError;
  if (code === 'UNAVAILABLE' && CONNECT_PHRASES.some((phrase) => message.includes(phrase))) {
    Kind = ConnectionFailedError;
    message = `nothing answers at ${target}: ${message}`;
  } else if (code === 'UNIMPLEMENTED') {
    message = `the server at ${target} is no Octavo scheduler: ${message}`;
  }
  return new Kind(message, { ...details, code, cause: failure });
}

/** Read the first detail of each known kind; what cannot be read counts as none. */
function readDetails(metadata) {
  const found = {};
  const [bytes] = metadata?.get('grpc-status-details-bin') ?? [];
  if (!bytes) return found;
  try {
    for (const { type_url: url, value } of decode('octavo.client.Status', bytes).details) {
      if (url.endsWith('/google.rpc.ErrorInfo')) {
        const info = decode('octavo.client.ErrorInfo', value);
        found.reason ??= info.reason;
        found.metadata ??= info.metadata;
      } else if (url.endsWith('/google.rpc.BadRequest')) {
        found.fieldViolations ??= decode('octavo.client.BadRequest', value).field_violations;
      } else if (url.endsWith('/google.rpc.RetryInfo')) {
        const { retry_delay: delay } = decode('octavo.client.RetryInfo', value);
        if (delay) found.retryDelayMs ??= Number(delay.seconds) * 1000 + delay.nanos / 1e6;
      }
    }
  } catch {
    // A proxy's garbage must not hide the status itself.
  }
  return found;
}

function shown(value) {
  const text = typeof value === 'string' ? JSON.stringify(value) : String(value);
  return text.length > 80 ? `${text.slice(0, 80)}…` : text;
}
