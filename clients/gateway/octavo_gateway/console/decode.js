// From the lines of /console/watch to what the page shows. No DOM in here.

export const FREE = 0,
  CACHED = 1,
  REFERENCED = 2,
  FENCED = 3;
export const KIND_NAMES = ['free', 'cached', 'referenced', 'fenced'];
const isLittleEndian = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// 32-bit numbers, little-endian whatever machine this is.
export function numbersOf(base64) {
  const bytes = bytesOf(base64);
  if (bytes.length % 4 !== 0) throw new Error('a packed array has a broken length');
  if (isLittleEndian) return new Uint32Array(bytes.buffer);
  const view = new DataView(bytes.buffer);
  return Uint32Array.from({ length: bytes.length / 4 }, (_, i) => view.getUint32(4 * i, true));
}

// Reads the lines of one watch. A line leaves out the blocks of an executor on which nothing
// changed, so it has to remember those of the line before.
export class Frames {
  #blocks = new Map(); // by executor's address

  decode(frame) {
    const before = this.#blocks;
    this.#blocks = new Map();
    const executors = frame.executors.map((executor) => {
      const {
        kinds: packedKinds,
        ref_counts: packedCounts,
        tables: packedTables,
        ...rest
      } = executor;
      let blocks = before.get(executor.address);
      if (packedKinds !== undefined) {
        blocks = { kinds: bytesOf(packedKinds), refCounts: bytesOf(packedCounts) };
      }
      if (blocks === undefined) throw new Error('the first line has no blocks');
      if (blocks.kinds.length !== blocks.refCounts.length)
        throw new Error('half of the blocks are missing');
      this.#blocks.set(executor.address, blocks);
      const sequences = withTables(executor.sequences, numbersOf(packedTables));
      return { ...rest, ...blocks, sequences, owners: ownersOf(sequences, blocks.kinds.length) };
    });
    return { ...frame, executors };
  }
}

function withTables(sequences, tables) {
  let begin = 0;
  const cut = sequences.map((sequence) => {
    const end = begin + sequence.num_blocks;
    const table = tables.subarray(begin, end);
    if (table.length !== sequence.num_blocks) throw new Error('a block table is cut off');
    begin = end;
    return { ...sequence, key: keyOf(sequence.request_id, sequence.sample_index), table };
  });
  if (begin !== tables.length) throw new Error('there are more blocks than tables');
  return cut;
}

export function keyOf(requestId, sampleIndex) {
  return `${requestId}/${sampleIndex}`;
}

// For each block the index of the first sequence that has it in its table; -1 if none has.
export function ownersOf(sequences, numBlocks) {
  const owners = new Int32Array(numBlocks).fill(-1);
  sequences.forEach((sequence, index) => {
    for (const block of sequence.table) {
      if (block < numBlocks && owners[block] < 0) owners[block] = index;
    }
  });
  return owners;
}

// Everybody who has a block: [{sequence, logical}], the place in the table being logical.
export function chainOf(executor, block) {
  const chain = [];
  for (const sequence of executor.sequences) {
    const logical = sequence.table.indexOf(block);
    if (logical >= 0) chain.push({ sequence, logical });
  }
  return chain;
}

// Which blocks the steps of a frame made or moved.
export function movesOf(steps) {
  const moves = new Map();
  for (const step of steps) {
    for (const block of step.swapped_out_blocks) moves.set(block, 'out');
    for (const block of step.swapped_in_blocks) moves.set(block, 'in');
    for (const block of step.copied_blocks) moves.set(block, 'copy');
  }
  return moves;
}
