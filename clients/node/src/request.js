/**
 * From what a caller gives to what is sent.
 *
 * Bounds are the service's to check. Names and types are checked here, since protobuf's
 * encoder would drop an unknown name and bend a wrong type into some number. The names
 * are those of the protos, so that the reference and the service's errors fit as they are.
 */

import { invalid } from './errors.js';

const MAX_UINT32 = 2 ** 32 - 1;
const MAX_UINT64 = 2n ** 64n - 1n;

/** A checker of one field: (value, path) to what is sent; throws InvalidArgumentError. */
const ofType = (type, article = 'a') => (value, path) => {
  if (typeof value !== type) throw invalid(path, `${article} ${type}`, value);
  return value;
};
const text = ofType('string');
const flag = ofType('boolean');
const float = ofType('number');

const whole = (low, high) => (value, path) => {
  if (!Number.isInteger(value) || value < low || value > high) {
    throw invalid(path, `a whole number between ${low} and ${high}`, value);
  }
  return value;
};
const uint32 = whole(0, MAX_UINT32);
const int32 = whole(-(2 ** 31), 2 ** 31 - 1);

/** A number only while it is exact; a string goes on the wire, where no bit is lost. */
const uint64 = (value, path) => {
  const isExact =
    typeof value === 'bigint' ||
    Number.isSafeInteger(value) ||
    (typeof value === 'string' && /^\d{1,20}$/.test(value));
  if (!isExact || BigInt(value) < 0n || BigInt(value) > MAX_UINT64) {
    throw invalid(path, `a BigInt, safe integer or decimal string, 0 to ${MAX_UINT64}`, value);
  }
  return String(value);
};

const list = (item) => (value, path) => {
  if (!Array.isArray(value) && !(value instanceof Uint32Array)) {
    throw invalid(path, 'an array', value);
  }
  return Array.from(value, (each, index) => item(each, `${path}[${index}]`));
};

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);

/** The schema of a message; a field that is undefined or null is left unset. */
const message = (fields) => {
  const check = (value, path) => {
    if (!isObject(value)) throw invalid(path, 'an object', value);
    const prefix = path && `${path}.`;
    const built = {};
    for (const [name, given] of Object.entries(value)) {
      if (!Object.hasOwn(fields, name)) {
        throw invalid(prefix + name, `left out: there is only ${Object.keys(fields).join(', ')}`, given);
      }
      if (given !== undefined && given !== null) built[name] = fields[name](given, prefix + name);
    }
    return built;
  };
  return Object.assign(check, { fields });
};

const biases = (value, path) => {
  if (!isObject(value)) throw invalid(path, 'an object from token id to number', value);
  for (const [id, bias] of Object.entries(value)) {
    if (!/^\d{1,10}$/.test(id)) throw invalid(path, 'keyed by token ids', id);
    uint32(Number(id), `${path}[${id}]`);
    float(bias, `${path}[${id}]`);
  }
  return { ...value };
};

const stops = (value, path) => list(text)(typeof value === 'string' ? [value] : value, path);

export const ChatMessage = message({ role: text, content: text });

export const SamplingParams = message({
  temperature: float,
  top_k: uint32,
  top_p: float,
  min_p: float,
  repetition_penalty: float,
  presence_penalty: float,
  frequency_penalty: float,
  seed: uint64,
  logit_bias: biases,
  allowed_token_ids: list(uint32),
});

export const StoppingParams = message({
  max_tokens: uint32,
  min_tokens: uint32,
  stop: stops,
  include_stop: flag,
  stop_token_ids: list(uint32),
  ignore_eos: flag,
});

export const BeamSearch = message({ width: uint32, length_penalty: float, early_stopping: flag });

export const OutputOptions = message({
  omit_text: flag,
  logprobs: uint32,
  prompt_logprobs: uint32,
  echo: flag,
  keep_special_tokens: flag,
});

export const CacheOptions = message({ disable: flag, salt: text });

/** All but resume, which the client fills in by itself. */
export const GenerateRequest = message({
  request_id: text,
  model: text,
  text,
  tokens: list(uint32),
  chat: list(ChatMessage),
  sampling: SamplingParams,
  stopping: StoppingParams,
  n: uint32,
  best_of: uint32,
  beam: BeamSearch,
  output: OutputOptions,
  priority: int32,
  tenant: text,
  cache: CacheOptions,
});

/**
 * Build a GenerateRequest.
 *
 * @throws {InvalidArgumentError} naming the first field of a wrong name or type, or if not
 *   exactly one of text, tokens and chat is given.
 */
export function buildGenerate(given) {
  const request = GenerateRequest(given, '');
  const prompts = ['text', 'tokens', 'chat'].filter((name) => name in request);
  if (prompts.length !== 1) {
    throw invalid('prompt', 'exactly one of text, tokens and chat', prompts.join(' and ') || 'none');
  }
  if (request.tokens) request.tokens = { ids: request.tokens };
  if (request.chat) request.chat = { messages: request.chat };
  return request;
}

/** Build a TokenizeRequest from a text or chat messages. */
export function buildTokenize(input, model) {
  const named = { model: text(model, 'model') };
  if (typeof input === 'string') return { ...named, text: input };
  if (!Array.isArray(input)) throw invalid('input', 'a string or an array of messages', input);
  return { ...named, chat: { messages: list(ChatMessage)(input, 'chat.messages') } };
}

/** Build a DetokenizeRequest from token ids. */
export function buildDetokenize(tokenIds, keepSpecialTokens, model) {
  return {
    model: text(model, 'model'),
    token_ids: list(uint32)(tokenIds, 'token_ids'),
    keep_special_tokens: flag(keepSpecialTokens, 'keep_special_tokens'),
  };
}
