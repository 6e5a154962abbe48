/* Decode: one query token per sequence against its blocks, read where they stand.
 *
 * Work is cut into items of one sequence and at most some hundred positions, by length
 * alone, so a result depends neither on the threads nor on the rest of the batch. Within
 * an item, tiles of 64 positions; within a tile, KV head after KV head; the query heads
 * of a group share what is loaded. Softmax is online, in fp32 and base 2.
 * Sources: PagedAttention (Kwon et al., 2023), section 4.1; Flash-Decoding (Dao et al.,
 * 2023) for the split and its merge. */
#include "vectors.h"

enum { TILE = 32, MAX_ROWS = 4 };

/* Where the tokens of a tile are; past its last one, the last one again. */
typedef struct {
    const char *keys[TILE], *values[TILE];
    int count;
} tile;

/* Some query heads that share a KV head, and their running softmax. */
typedef struct {
    const float *query; /* [rows, PADDED(head_dim)], in pairs */
    float *sums;        /* as query: values so far, weighted */
    float *maxima, *weights;
} heads;

static void locate(const octavo_attention *call, int sequence, int begin, int end, tile *to) {
    const int32_t *table = call->tables + sequence * call->table_stride;
    const int64_t slot = (int64_t)call->num_kv_heads * call->head_dim;
    const size_t size = element_size(call->is_bf16);
    int position = begin, count = 0;
    to->count = end - begin;
    while (position < end) {
        const int64_t block = table[position / call->block_size];
        const char *keys = (const char *)call->keys + block * call->key_block_stride * size;
        const char *values = (const char *)call->values + block * call->value_block_stride * size;
        for (int offset = position % call->block_size;
             offset < call->block_size && position < end; offset++, position++, count++) {
            to->keys[count] = keys + offset * slot * size;
            to->values[count] = values + offset * slot * size;
        }
    }
    for (; count > 0 && count < TILE; count++) {
        to->keys[count] = to->keys[count - 1];
        to->values[count] = to->values[count - 1];
    }
}

/* Sums of eight vectors, in order. */
INLINE vf8 fold(vf v) {
#if LANES == 16
    vf8 half[2];
    memcpy(half, &v, sizeof half);
    return half[0] + half[1];
#else
    return v;
#endif
}

INLINE vf8 halves(vf8 a, vf8 b) {
    return SHUFFLE8(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE8(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE vf8 quarters(vf8 a, vf8 b) {
    return SHUFFLE8(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE8(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

INLINE vf8 eighths(vf8 a, vf8 b) {
    return SHUFFLE8(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE8(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

INLINE vf8 sums_of_8(const vf v[8]) {
    vf8 a = halves(fold(v[0]), fold(v[4])), b = halves(fold(v[1]), fold(v[5]));
    vf8 c = halves(fold(v[2]), fold(v[6])), d = halves(fold(v[3]), fold(v[7]));
    return eighths(quarters(a, b), quarters(c, d));
}

/* Sums of four vectors, twice. */
INLINE vf8 sums_of_4(const vf v[4]) {
    vf8 a = quarters(fold(v[0]), fold(v[1])), b = quarters(fold(v[2]), fold(v[3]));
    vf8 c = eighths(a, b);
    return c + SHUFFLE8(c, c, 4, 5, 6, 7, 0, 1, 2, 3);
}

INLINE void multiply_pair(
    int rows, int tokens, const float *query, int padded, const char *const *keys,
    size_t offset, int element, int count, int is_bf16, vf *dots
) {
    vf a[MAX_ROWS], b[MAX_ROWS];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        a[row] = load(query + row * padded + element);
        b[row] = load(query + row * padded + element + LANES);
    }
#pragma GCC unroll 8
    for (int token = 0; token < tokens; token++) {
        const pair key = load_pair(
            keys[token] + offset + element * element_size(is_bf16), is_bf16, count
        );
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            vf dot = dots[row * tokens + token];
            dots[row * tokens + token] = dot + a[row] * key.a + b[row] * key.b;
        }
    }
}

/* Ask for the cache lines of a row's next `bytes`; an address need not be valid. */
INLINE void prefetch(const char *from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(from + line);
}

/* The same, for later: into the second level. */
INLINE void prefetch_early(const char *from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(from + line, 0, 2);
}

/* scores[row][token] of a whole tile, eight dot products at a time, or of three rows
 * twelve. While K is read, V is fetched, and the next tile's K from afar. */
INLINE void score(
    int rows, int is_bf16, const octavo_attention *call, const tile *of, const tile *next,
    size_t offset, const float *query, float scores[MAX_ROWS][TILE]
) {
    const size_t row_bytes = call->head_dim * element_size(is_bf16);
    const int tokens = rows == 1 ? 8 : rows == 4 ? 2 : 4, padded = PADDED(call->head_dim);
    for (int token = 0; token < of->count; token += tokens) {
        vf dots[12] = {{0}};
        const char *const *keys = of->keys + token;
        for (int i = 0; i < tokens; i++) {
            prefetch(of->values[token + i] + offset, row_bytes);
            prefetch_early(next->keys[token + i] + offset, row_bytes);
        }
        int element = 0;
        for (; element + PAIR <= call->head_dim; element += PAIR)
            multiply_pair(rows, tokens, query, padded, keys, offset, element, PAIR, is_bf16, dots);
        if (LANES == 16 && element < call->head_dim)
            multiply_pair(rows, tokens, query, padded, keys, offset, element, LANES, is_bf16, dots);
        const vf8 first = sums_of_8(dots);
        for (int row = 0; row < (rows == 3 ? 2 : rows); row++)
            memcpy(&scores[row][token], (const float *)&first + row * tokens, 4 * (size_t)tokens);
        if (rows == 3) {
            const vf8 second = sums_of_4(dots + 8);
            memcpy(&scores[2][token], &second, 16);
        }
    }
}

/* Turn a row of scores to weights; returns the factor on what was summed before. */
INLINE float weigh(float *scores, int count, float softcap, float *maximum, float *weight) {
    const int end = (count + LANES - 1) / LANES * LANES;
    for (int i = count; i < end; i++)
        scores[i] = -INFINITY;
    vf most = splat(*maximum);
    for (int i = 0; i < end; i += LANES) {
        if (softcap > 0) {
            store(scores + i, cap(load(scores + i), softcap));
            for (int lane = count; lane < i + LANES; lane++)
                scores[lane] = -INFINITY;
        }
        most = larger(load(scores + i), most);
    }
    const float top = largest(most);
    vf total = {0};
    for (int i = 0; i < end; i += LANES) {
        const vf part = exp2_negative(load(scores + i) - top);
        store(scores + i, part);
        total += part;
    }
    const float factor = exp2_negative(splat(*maximum - top))[0];
    *maximum = top;
    *weight = *weight * factor + sum(total);
    return factor;
}

/* sums[row][element ...] of a whole tile. While V is read, the next tile's V is fetched. */
INLINE void add_pairs(
    int rows, int pairs, int count, int is_bf16, const tile *of, const tile *next, size_t offset,
    int element, const float scores[MAX_ROWS][TILE], const float *factors, float *sums, int padded
) {
    vf total[MAX_ROWS * 8];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * pairs; i++)
            total[row * 2 * pairs + i] =
                load(sums + row * padded + element + i * LANES) * factors[row];
    for (int token = 0; token < of->count; token++) {
        const size_t at = element * element_size(is_bf16);
        const char *value = of->values[token] + offset + at;
        prefetch_early(next->values[token] + offset + at, pairs * count * element_size(is_bf16));
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++) {
            const pair part = load_pair(value + i * PAIR * element_size(is_bf16), is_bf16, count);
            vf *to = total + 2 * i;
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                to[row * 2 * pairs] += scores[row][token] * part.a;
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                to[row * 2 * pairs + 1] += scores[row][token] * part.b;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * pairs; i++)
            store(sums + row * padded + element + i * LANES, total[row * 2 * pairs + i]);
}

/* One tile and `rows` query heads; rows and is_bf16 are constants to the compiler. */
INLINE void attend_rows(
    int rows, int is_bf16, const octavo_attention *call, const tile *of, const tile *next,
    size_t offset, heads group
) {
    float scores[MAX_ROWS][TILE] __attribute__((aligned(64)));
    float factors[MAX_ROWS];
    const int padded = PADDED(call->head_dim);
    score(rows, is_bf16, call, of, next, offset, group.query, scores);
    for (int row = 0; row < rows; row++)
        factors[row] = weigh(
            scores[row], of->count, call->softcap, group.maxima + row, group.weights + row
        );
    const int pairs = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    int element = 0;
    for (; element + pairs * PAIR <= call->head_dim; element += pairs * PAIR)
        add_pairs(
            rows, pairs, PAIR, is_bf16, of, next, offset, element, scores, factors, group.sums,
            padded
        );
    for (; pairs > 1 && element + PAIR <= call->head_dim; element += PAIR)
        add_pairs(
            rows, 1, PAIR, is_bf16, of, next, offset, element, scores, factors, group.sums, padded
        );
    if (LANES == 16 && element < call->head_dim)
        add_pairs(
            rows, 1, LANES, is_bf16, of, next, offset, element, scores, factors, group.sums, padded
        );
}

#define ATTEND_ROWS(rows, is_bf16)                                                            \
    static void attend_##rows##_##is_bf16(                                                    \
        const octavo_attention *call, const tile *of, const tile *next, size_t offset,        \
        heads group                                                                           \
    ) {                                                                                       \
        attend_rows(rows, is_bf16, call, of, next, offset, group);                            \
    }
ATTEND_ROWS(1, 0)
ATTEND_ROWS(2, 0)
ATTEND_ROWS(3, 0)
ATTEND_ROWS(4, 0)
ATTEND_ROWS(1, 1)
ATTEND_ROWS(2, 1)
ATTEND_ROWS(3, 1)
ATTEND_ROWS(4, 1)

typedef void attend_function(
    const octavo_attention *, const tile *, const tile *, size_t, heads
);
static attend_function *const ATTEND[2][MAX_ROWS] = {
    {attend_1_0, attend_2_0, attend_3_0, attend_4_0},
    {attend_1_1, attend_2_1, attend_3_1, attend_4_1},
};

/* How many heads to take next: threes keep the most in sixteen registers. */
static int next_rows(int left) { return left % 4 == 0 ? 4 : left < 3 ? left : 3; }

static void attend_group(
    const octavo_attention *call, const tile *of, const tile *next, int kv_head, float *state
) {
    const int group = call->num_heads / call->num_kv_heads, padded = PADDED(call->head_dim);
    const size_t row_bytes = call->head_dim * element_size(call->is_bf16);
    const int num_heads = call->num_heads;
    for (int row = 0, rows; row < group; row += rows) {
        const int head = kv_head * group + row;
        rows = next_rows(group - row);
        const heads some = {
            state + (size_t)(num_heads + head) * padded,
            state + (size_t)head * padded,
            state + (size_t)2 * num_heads * padded + head,
            state + (size_t)2 * num_heads * padded + num_heads + head,
        };
        ATTEND[call->is_bf16][rows - 1](call, of, next, kv_head * row_bytes, some);
    }
}

static void pack_query(const octavo_attention *call, int sequence, int head, float *to) {
    const char *from = (const char *)call->query
        + (sequence * call->query_token_stride + head * call->query_head_stride)
            * element_size(call->is_bf16);
    const float factor = query_factor(call);
    int element = 0;
    for (; element + PAIR <= call->head_dim; element += PAIR) {
        const pair part =
            load_pair(from + element * element_size(call->is_bf16), call->is_bf16, PAIR);
        store(to + element, part.a * factor);
        store(to + element + LANES, part.b * factor);
    }
    if (LANES == 16 && element < call->head_dim) {
        const pair part =
            load_pair(from + element * element_size(call->is_bf16), call->is_bf16, LANES);
        store(to + element, part.a * factor);
        store(to + element + LANES, part.b * factor);
    }
}

static void write_out(
    const octavo_attention *call, int sequence, int head, const float *sums, float factor
) {
    char *to = (char *)call->out
        + (sequence * call->out_token_stride + head * call->out_head_stride)
            * element_size(call->is_bf16);
    int element = 0;
    for (; element + PAIR <= call->head_dim; element += PAIR) {
        const pair part = {load(sums + element) * factor, load(sums + element + LANES) * factor};
        store_pair(to + element * element_size(call->is_bf16), call->is_bf16, PAIR, part);
    }
    if (LANES == 16 && element < call->head_dim) {
        const pair part = {load(sums + element) * factor, load(sums + element + LANES) * factor};
        store_pair(to + element * element_size(call->is_bf16), call->is_bf16, LANES, part);
    }
}

/* Put the partials of a sequence together, in order; `sums` is [PADDED(head_dim)]. */
static void merge(const octavo_attention *call, int sequence, float *sums) {
    const int begin = call->first_partial[sequence], end = call->first_partial[sequence + 1];
    const int num_heads = call->num_heads, padded = PADDED(call->head_dim);
    const size_t stride = (size_t)num_heads * (padded + 2);
    for (int head = 0; head < num_heads; head++) {
        const float *first = call->partials + begin * stride;
        const float *maxima = first + (size_t)num_heads * padded + head;
        float top = -INFINITY, weight = 0;
        for (int i = 0; i < end - begin; i++)
            top = maxima[i * stride] > top ? maxima[i * stride] : top;
        memset(sums, 0, sizeof(float) * (size_t)padded);
        for (int i = 0; i < end - begin; i++) {
            const float factor = exp2_negative(splat(maxima[i * stride] - top))[0];
            const float *part = first + i * stride + (size_t)head * padded;
            weight += factor * maxima[i * stride + num_heads];
            for (int element = 0; element < padded; element += LANES)
                store(sums + element, load(sums + element) + load(part + element) * factor);
        }
        write_out(call, sequence, head, sums, 1 / weight);
    }
}

static void locate_from(const octavo_attention *call, const int32_t *item, int begin, tile *to) {
    locate(call, item[0], begin, begin + TILE < item[2] ? begin + TILE : item[2], to);
}

/* One item and a share of the KV heads; its last tile fetches the first of the `coming` item.
 * `state`: sums [num_heads, padded], query alike,
 * maxima [num_heads], weights [num_heads], room for a merge [padded]. */
static void attend_item(
    const octavo_attention *call, const int32_t *item, const int32_t *coming, int part, float *state
) {
    const int sequence = item[0], begin = item[1], end = item[2], partial = item[3];
    const int group = call->num_heads / call->num_kv_heads, padded = PADDED(call->head_dim);
    const int kv_begin = part * call->num_kv_heads / call->num_parts;
    const int kv_end = (part + 1) * call->num_kv_heads / call->num_parts;
    const int head_begin = kv_begin * group, head_end = kv_end * group;
    const size_t all = (size_t)call->num_heads * padded;
    float *maxima = state + 2 * all, *weights = maxima + call->num_heads;

    for (int head = head_begin; head < head_end; head++) {
        pack_query(call, sequence, head, state + all + (size_t)head * padded);
        maxima[head] = -INFINITY;
        weights[head] = 0;
    }
    memset(
        state + (size_t)head_begin * padded, 0,
        sizeof(float) * (size_t)(head_end - head_begin) * padded
    );
    tile tiles[2] = {0};
    locate_from(call, item, begin, tiles);
    for (int position = begin, i = 0; position < end; position += TILE, i ^= 1) {
        tile *const here = tiles + i, *const next = tiles + (i ^ 1);
        if (position + TILE < end)
            locate_from(call, item, position + TILE, next);
        else
            locate_from(call, coming, coming[1], next);
        for (int kv_head = kv_begin; kv_head < kv_end; kv_head++)
            attend_group(call, here, next, kv_head, state);
    }
    if (partial < 0) {
        for (int head = head_begin; head < head_end; head++) {
            const float factor = begin < end ? 1 / weights[head] : 0;
            write_out(call, sequence, head, state + (size_t)head * padded, factor);
        }
        return;
    }
    float *to = call->partials + (size_t)partial * call->num_heads * (padded + 2);
    const size_t num = sizeof(float) * (size_t)(head_end - head_begin);
    memcpy(to + (size_t)head_begin * padded, state + (size_t)head_begin * padded, num * padded);
    memcpy(to + all + head_begin, maxima + head_begin, num);
    memcpy(to + all + call->num_heads + head_begin, weights + head_begin, num);
    if (__atomic_sub_fetch(call->pending + sequence, 1, __ATOMIC_ACQ_REL) == 0) {
        const int count = call->first_partial[sequence + 1] - call->first_partial[sequence];
        call->pending[sequence] = count * call->num_parts; /* for the next layer */
        merge(call, sequence, weights + call->num_heads);
    }
}

void octavo_decode_items(work_queue *queue) {
    const octavo_attention *call = queue->attention;
    const size_t padded = PADDED(call->head_dim);
    float *state = scratch_floats(queue, call->num_heads * (2 * padded + 2) + padded);
    if (!state)
        return;
    const int32_t count = call->num_items * call->num_parts;
    for (int32_t i = take(queue), next; i < count; i = next) {
        next = take(queue);
        const int32_t coming = next < count ? next : i;
        attend_item(
            call, call->items + 4 * (i / call->num_parts), call->items + 4 * (coming / call->num_parts),
            i % call->num_parts, state
        );
    }
    free(state);
}

static void decode_body(void *argument) { octavo_decode_items(argument); }

/* Returns OK or NO_MEMORY. An item without positions makes its row zeros. */
EXPORT int octavo_decode(const octavo_attention *call) {
    work_queue queue = {call, 0, OK};
    run_parallel(decode_body, &queue, call->num_threads);
    return queue.status;
}
