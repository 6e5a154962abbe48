/** How to reach a service: the forms of an address, credentials and channel options. */

import { credentials } from '@grpc/grpc-js';

import { invalid } from './errors.js';

const FORMS = 'HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT';
const NATIVE = /^(dns|unix|ipv4|ipv6|xds):/; // gRPC's own forms
const HOST_AND_PORT = /^(\[[0-9a-fA-F:.%]+\]|[^\s:/@?#[\]]+):(\d{1,5})$/;
const LOOPBACK = /^(127(\.\d{1,3}){3}|localhost|\[::1\]):\d+$/;

/**
 * Read a target.
 *
 * @returns {{address: string, tls?: boolean, isLocal: boolean}} address in gRPC's own form;
 *   tls: undefined if the target does not say; isLocal: nobody else hears what is sent.
 * @throws {InvalidArgumentError} if there is no host or no port.
 */
export function parseTarget(target) {
  if (typeof target !== 'string') throw invalid('target', FORMS, target);
  if (NATIVE.test(target)) {
    return { address: target, isLocal: target.startsWith('unix:') };
  }
  const [, scheme, rest] = /^(?:(grpcs?):\/\/)?(.*?)\/?$/.exec(target) ?? [];
  const [, , port] = HOST_AND_PORT.exec(rest ?? '') ?? [];
  if (!port || Number(port) < 1 || Number(port) > 65535) throw invalid('target', FORMS, target);
  const tls = scheme === undefined ? undefined : scheme === 'grpcs';
  return { address: rest, tls, isLocal: LOOPBACK.test(rest) };
}

/**
 * Make channel credentials.
 *
 * @param {object | true | undefined} tls PEM parts {ca, cert, key}; true: the system's roots.
 * @throws {InvalidArgumentError} if a certificate lacks its key, or a part is unknown or
 *   cannot be read.
 */
export function channelCredentials(tls) {
  if (!tls) return credentials.createInsecure();
  if (tls !== true && typeof tls !== 'object') throw invalid('tls', 'true or an object', tls);
  const { ca = null, cert = null, key = null, serverName: _, ...rest } = tls === true ? {} : tls;
  const [unknown] = Object.keys(rest);
  if (unknown) throw invalid(`tls.${unknown}`, 'left out: there is only ca, cert, key, serverName', unknown);
  if (cert && !key) throw invalid('tls.key', 'given with tls.cert', key);
  if (key && !cert) throw invalid('tls.cert', 'given with tls.key', cert);
  const parts = [pem('ca', ca), pem('key', key), pem('cert', cert)];
  try {
    return credentials.createSsl(...parts);
  } catch (error) {
    throw invalid('tls', 'PEM that can be read, with the key of its certificate', error.message);
  }
}

function pem(name, value) {
  if (value === null || Buffer.isBuffer(value)) return value;
  if (typeof value !== 'string') throw invalid(`tls.${name}`, 'PEM, as a string or Buffer', value);
  return Buffer.from(value);
}

/** Options of the channel to a parsed target. */
export function channelOptions({ isLocal }, tls) {
  const options = {
    'grpc.primary_user_agent': 'octavo-node/0.1.0',
    // This client retries and resumes; gRPC's own retries would multiply that.
    'grpc.enable_retries': 0,
    // A reconnect should wait for our own back-off only, not for gRPC's second one.
    'grpc.initial_reconnect_backoff_ms': 100,
    'grpc.max_reconnect_backoff_ms': 2_000,
    // Connections are this client's own: another's wait for its next attempt is not shared.
    'grpc.use_local_subchannel_pool': 1,
    // A peer that vanished without a word (a cut network) is noticed.
    'grpc.keepalive_time_ms': 10_000,
    'grpc.keepalive_timeout_ms': 5_000,
    // Prompts of any length, and deltas with every log-probability, fit.
    'grpc.max_receive_message_length': -1,
    'grpc.max_send_message_length': -1,
    // Replicas behind one name share the load, and a dead one is left out.
    'grpc.service_config': '{"loadBalancingConfig":[{"round_robin":{}}]}',
  };
  // An http_proxy in the environment cannot reach this machine's loopback.
  if (isLocal) options['grpc.enable_http_proxy'] = 0;
  if (tls?.serverName !== undefined) {
    options['grpc.ssl_target_name_override'] = tls.serverName;
    options['grpc.default_authority'] = tls.serverName;
  }
  return options;
}
