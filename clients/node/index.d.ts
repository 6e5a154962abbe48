/**
 * Client of the Octavo LLM server.
 *
 * Fields of requests and events have the names of the wire (`max_tokens`): units, defaults
 * and bounds are those of docs/reference.md. Options of this client itself have JavaScript's
 * (`timeoutMs`). A field that is undefined is left to the service's default.
 */

/** One turn of a conversation. */
export interface ChatMessage {
  /** Such as "system", "user" or "assistant". */
  role: string;
  content: string;
}

/** How the next token is drawn. What is left out is the model's own default. */
export interface SamplingParams {
  /** Divides the logits; 0: greedy. */
  temperature?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  /** 64 bits: a number only while it is a safe integer; else a BigInt or a decimal string. */
  seed?: bigint | number | string;
  /** From token id to what is added to its logit. */
  logit_bias?: Record<number, number>;
  allowed_token_ids?: readonly number[];
}

/** When a choice ends. */
export interface StoppingParams {
  /** Left out: to the end of the context. */
  max_tokens?: number;
  min_tokens?: number;
  /** The text ends before the first of them. */
  stop?: string | readonly string[];
  include_stop?: boolean;
  stop_token_ids?: readonly number[];
  ignore_eos?: boolean;
}

/** Beam search instead of sampling. */
export interface BeamSearch {
  width: number;
  length_penalty?: number;
  early_stopping?: boolean;
}

/** What the stream carries. */
export interface OutputOptions {
  omit_text?: boolean;
  /** How many of the likeliest tokens to report besides the chosen one. */
  logprobs?: number;
  prompt_logprobs?: number;
  echo?: boolean;
  keep_special_tokens?: boolean;
}

/** Steers the prefix cache for one request. */
export interface CacheOptions {
  disable?: boolean;
  salt?: string;
}

/** Options of every call. */
export interface CallOptions {
  /** Aborting it cancels the call and frees its blocks; the call throws the signal's reason. */
  signal?: AbortSignal;
  /** Deadline in milliseconds over all retries, above 0 and at most 2,000,000,000. */
  timeoutMs?: number;
}

/** What to generate, apart from the prompt. */
export interface GenerateOptions extends CallOptions {
  request_id?: string;
  model?: string;
  sampling?: SamplingParams;
  stopping?: StoppingParams;
  n?: number;
  best_of?: number;
  beam?: BeamSearch;
  output?: OutputOptions;
  priority?: number;
  tenant?: string;
  cache?: CacheOptions;
}

/** Exactly one prompt: text to continue, token ids to continue, or a chat to answer. */
export type Prompt =
  | { text: string; tokens?: undefined; chat?: undefined }
  | { tokens: readonly number[] | Uint32Array; text?: undefined; chat?: undefined }
  | { chat: readonly ChatMessage[]; text?: undefined; tokens?: undefined };

export type GenerateParams = GenerateOptions & Prompt;

/** A token with the natural logarithm of its probability. */
export interface TokenLogprob {
  token_id: number;
  logprob: number;
}

/** The log-probabilities of one position. */
export interface PositionLogprobs {
  /** Null at the first position of a prompt, which has none. */
  chosen: TokenLogprob | null;
  /** The likeliest first. */
  top: TokenLogprob[];
}

/** The request was accepted: first event, once. */
export interface Started {
  type: 'started';
  request_id: string;
  model: string;
  num_prompt_tokens: number;
  /** Send it again, with the same parameters, for the same tokens. */
  seed: bigint;
  max_tokens: number;
}

/** More of one choice. Texts of one choice concatenate to its final text. */
export interface Delta {
  type: 'delta';
  index: number;
  text: string;
  token_ids: number[];
  /** One per token id, if asked for. */
  logprobs: PositionLogprobs[];
  /** This delta echoes the prompt. */
  is_prompt: boolean;
}

export type FinishReason = 'stop' | 'length' | 'cancelled' | 'error';

/** One choice ended. */
export interface Finished {
  type: 'finished';
  index: number;
  reason: FinishReason;
  num_tokens: number;
  /** The stop string that matched. */
  stop: string | null;
  /** The stop token that matched. */
  stop_token_id: number | null;
  cumulative_logprob: number | null;
  /** For people, with reason "error". */
  error: string;
}

/** Sums a request up: last event, once. */
export interface Usage {
  type: 'usage';
  num_prompt_tokens: number;
  num_completion_tokens: number;
  cached_prompt_tokens: number;
  num_preemptions: number;
  queue_seconds: number;
  first_token_seconds: number;
  total_seconds: number;
}

export type Event = Started | Delta | Finished | Usage;

/** One whole continuation; the prompt_ parts are there if echo or prompt_logprobs asked. */
export interface Choice {
  index: number;
  text: string;
  token_ids: number[];
  logprobs: PositionLogprobs[];
  finish_reason: FinishReason;
  stop: string | null;
  stop_token_id: number | null;
  cumulative_logprob: number | null;
  error: string;
  prompt_text: string;
  prompt_token_ids: number[];
  prompt_logprobs: PositionLogprobs[];
}

/** A whole answer. */
export interface Completion {
  request_id: string;
  model: string;
  seed: bigint;
  choices: Choice[];
  usage: Omit<Usage, 'type'>;
  /** Text of the first choice. */
  text: string;
}

/** The model that is served. */
export interface Model {
  model: string;
  fingerprint: string;
  max_model_len: number;
  vocab_size: number;
  eos_token_ids: number[];
  has_chat_template: boolean;
  kv_capacity_tokens: number;
  dtype: string;
}

/** PEM parts, as strings or Buffers. */
export interface TlsOptions {
  /** Roots to trust; left out: the system's. */
  ca?: string | Buffer;
  /** The client's certificate, with its key: mutual TLS. */
  cert?: string | Buffer;
  key?: string | Buffer;
  /** Name that the server's certificate must have, if it is not the target's host. */
  serverName?: string;
}

/** Bounds of retrying. Only what the service did not run, or can resume, is retried. */
export interface RetryOptions {
  /** Calls in all before the first token came [5]; 1 turns retrying off. */
  maxAttempts?: number;
  /** How long a stream that broke after tokens came may go without progress [60000]; 0: off. */
  resumeMs?: number;
  /** Wait before the first retry [100]; it doubles each time. */
  initialBackoffMs?: number;
  /** Longest wait [5000], unless the service names a longer one. */
  maxBackoffMs?: number;
}

export interface ClientOptions {
  /** Sent as `authorization: Bearer KEY`; needs tls, unless the target is loopback. */
  apiKey?: string;
  /** Send the key without TLS, where something else protects the way. */
  allowInsecureKey?: boolean;
  /** True: TLS with the system's roots, as the target grpcs://HOST:PORT. */
  tls?: boolean | TlsOptions;
  /** Deadline of generate, complete and chat [600000]. */
  timeoutMs?: number;
  /** Deadline of all other calls [30000]. */
  unaryTimeoutMs?: number;
  retry?: RetryOptions;
}

/**
 * Talks to a scheduler.
 *
 * Every call has a deadline that spans its retries. Calls that the service did not run are
 * retried; streams that break are resumed, without a gap or a repeat. Every method throws an
 * OctavoError, or the reason of the caller's AbortSignal.
 */
export class OctavoClient {
  /**
   * @param target HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT (TLS) or gRPC's own forms,
   *   such as dns:///NAME:PORT for a set of replicas.
   */
  constructor(target: string, options?: ClientOptions);

  /** Generate, and iterate over the events as they come. Leaving the loop cancels the call. */
  generate(params: GenerateParams): AsyncGenerator<Event, void, undefined>;
  /** Generate, and return the whole answer. */
  complete(params: GenerateParams): Promise<Completion>;
  /** Answer a conversation, and return the whole answer. */
  chat(messages: readonly ChatMessage[], params?: GenerateOptions): Promise<Completion>;
  /** Return the token ids that generate would use for a text or a chat. */
  tokenize(
    input: string | readonly ChatMessage[],
    options?: CallOptions & { model?: string },
  ): Promise<number[]>;
  /** Return the text of token ids. */
  detokenize(
    tokenIds: readonly number[] | Uint32Array,
    options?: CallOptions & { keep_special_tokens?: boolean; model?: string },
  ): Promise<string>;
  /** Describe the model that is served. */
  getModel(options?: CallOptions & { model?: string }): Promise<Model>;
  /** Cancel what still runs, and hang up. */
  close(): void;
}

export interface FieldViolation {
  /** Path in the request, such as "sampling.temperature". */
  field: string;
  /** What the field may be. */
  description: string;
}

/** Base of everything that this client throws, except an AbortSignal's own reason. */
export class OctavoError extends Error {
  /** Name of the gRPC status, such as "UNAVAILABLE". */
  readonly code: string;
  /** The service's constant for what is wrong, such as "QUEUE_FULL", or "". */
  readonly reason: string;
  /** The service's facts about it. */
  readonly metadata: Record<string, string>;
  readonly fieldViolations: FieldViolation[];
  /** Milliseconds until it is worth asking again; null: not said. */
  readonly retryDelayMs: number | null;
}

/** A field of the request is out of bounds. */
export class InvalidArgumentError extends OctavoError {
  /** Path of the first bad field, or "". */
  readonly field: string;
}
/** The API key is missing or unknown. */
export class UnauthenticatedError extends OctavoError {}
/** The API key does not allow this. */
export class PermissionDeniedError extends OctavoError {}
/** The model asked for is not the one served. */
export class NotFoundError extends OctavoError {}
/** A live request already has this request_id. */
export class AlreadyExistsError extends OctavoError {}
/** The request needs more KV blocks than the whole pool has: waiting won't help. */
export class NeverFitsError extends OctavoError {}
/** The queue is full, or a limit is reached. */
export class OverloadedError extends OctavoError {}
/** The service drains, has no executor, or went away. */
export class UnavailableError extends OctavoError {}
/** Nothing answers at the target. */
export class ConnectionFailedError extends UnavailableError {}
/** The deadline passed before the answer was complete. */
export class DeadlineExceededError extends OctavoError {}
/** The client was closed. */
export class CancelledError extends OctavoError {}
/** The service failed, or broke its own contract. */
export class InternalError extends OctavoError {}
