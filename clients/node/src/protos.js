/** The wire's types, read once from the .proto files of this package. */

import { fileURLToPath } from 'node:url';

import { loadPackageDefinition } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROTO_DIR = fileURLToPath(new URL('../proto/', import.meta.url));

/** How messages look as objects: the protos' own names, whole uint64 as strings. */
export const LOADER_OPTIONS = {
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
};

export const definitions = loadSync(
  ['octavo/v1/inference.proto', 'octavo/client/details.proto'],
  { ...LOADER_OPTIONS, includeDirs: [PROTO_DIR] },
);

export const { InferenceService } = loadPackageDefinition(definitions).octavo.v1;

/**
 * Parse one message.
 *
 * @param {string} name full name of its type.
 * @param {Buffer} bytes
 * @throws {Error} if the bytes are no such message.
 */
export function decode(name, bytes) {
  return definitions[name].deserialize(bytes);
}
