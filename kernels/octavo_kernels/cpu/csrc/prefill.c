/* Chunked prefill: causal attention of a chunk's queries to its prefix and itself.
 *
 * An item is a tile of queries and one KV head. Its rows are the queries of all heads
 * of the group, packed as fp32. For each tile of 64 keys, K (transposed) and V are
 * packed once, then six rows at a time go through score, softmax and sum while those
 * stay in the cache. Key tiles begin at multiples of 64, so how a prompt was cut into
 * chunks does not change a result. Positions outside the context, the window included,
 * are never read: their K and V are zeros.
 * Source: FlashAttention-2 (Dao, 2023). */
#include "vectors.h"

enum { KEYS = 64, ROWS = 6 };

typedef struct {
    float *query;  /* [rows, padded] */
    float *sums;   /* [rows, padded] */
    float *keys;   /* [padded, KEYS] */
    float *values; /* [KEYS, padded] */
    float *scores; /* [ROWS, KEYS] */
    float *maxima, *weights; /* [rows] */
} scratch;

/* c[ROWS, columns] = a[ROWS, depth] b[depth, columns], or added to c. */
static void multiply(
    int depth, int columns, const float *restrict a, int a_stride, const float *restrict b,
    int b_stride, float *restrict c, int c_stride, int add
) {
    for (int column = 0; column < columns; column += 2 * LANES) {
        vf left[ROWS], right[ROWS];
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++) {
            left[row] = add ? load(c + row * c_stride + column) : (vf){0};
            right[row] = add ? load(c + row * c_stride + column + LANES) : (vf){0};
        }
        for (int i = 0; i < depth; i++) {
            const vf b_left = load(b + i * b_stride + column);
            const vf b_right = load(b + i * b_stride + column + LANES);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; row++) {
                left[row] += a[row * a_stride + i] * b_left;
                right[row] += a[row * a_stride + i] * b_right;
            }
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++) {
            store(c + row * c_stride + column, left[row]);
            store(c + row * c_stride + column + LANES, right[row]);
        }
    }
}

INLINE float bf16_to_float(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static void widen(float *restrict to, const void *restrict from, int is_bf16, int count) {
    if (!is_bf16) {
        memcpy(to, from, sizeof(float) * (size_t)count);
        return;
    }
    const uint16_t *bits = from;
    for (int i = 0; i < count; i++)
        to[i] = bf16_to_float(bits[i]);
}

/* to[8 columns, 8 rows] from [8 rows, 8 columns]. */
static void transpose_8(float *to, int to_stride, const float *from, int from_stride) {
    vf8 a[8], b[8];
    for (int i = 0; i < 8; i++)
        memcpy(a + i, from + i * from_stride, sizeof a[i]);
    for (int i = 0; i < 8; i += 2) {
        b[i] = SHUFFLE8(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = SHUFFLE8(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = SHUFFLE8(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2 * j + 1] = SHUFFLE8(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        const vf8 low = SHUFFLE8(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        const vf8 high = SHUFFLE8(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        memcpy(to + i * to_stride, &low, sizeof low);
        memcpy(to + (i + 4) * to_stride, &high, sizeof high);
    }
}

/* Pack the K and V of positions [begin, end), which lie in the tile that begins at
 * `origin`; the rest of the tile is zeros. Uses `values` for K before V goes there. */
static void pack_tile(
    const octavo_attention *call, int sequence, int kv_head, int origin, int begin, int end,
    const scratch *to
) {
    const int32_t *table = call->tables + sequence * call->table_stride;
    const int head_dim = call->head_dim, padded = PADDED(head_dim), size = call->block_size;
    const size_t bytes = element_size(call->is_bf16);
    for (int pass = 0; pass < 2; pass++) {
        const char *cache = pass ? call->values : call->keys;
        const int64_t stride = pass ? call->value_block_stride : call->key_block_stride;
        memset(to->values, 0, sizeof(float) * (size_t)(begin - origin) * padded);
        memset(
            to->values + (end - origin) * padded, 0,
            sizeof(float) * (size_t)(origin + KEYS - end) * padded
        );
        for (int position = begin; position < end; position++) {
            const int64_t row = (int64_t)(position % size) * call->num_kv_heads + kv_head;
            const int64_t place = table[position / size] * stride + row * head_dim;
            float *at = to->values + (position - origin) * padded;
            widen(at, cache + place * (int64_t)bytes, call->is_bf16, head_dim);
            memset(at + head_dim, 0, sizeof(float) * (size_t)(padded - head_dim));
        }
        if (pass == 0)
            for (int element = 0; element < head_dim; element += 8)
                for (int key = 0; key < KEYS; key += 8)
                    transpose_8(
                        to->keys + element * KEYS + key, KEYS,
                        to->values + key * padded + element, padded
                    );
    }
}

/* Softmax of one row of scores, of which [low, high) may be seen. */
static void weigh_row(
    const octavo_attention *call, float *scores, int low, int high, float *maximum, float *weight,
    float *sums
) {
    if (low >= high) {
        memset(scores, 0, sizeof(float) * KEYS);
        return;
    }
    if (call->softcap > 0)
        for (int i = 0; i < KEYS; i += LANES)
            store(scores + i, cap(load(scores + i), call->softcap));
    for (int i = 0; i < low; i++)
        scores[i] = -INFINITY;
    for (int i = high; i < KEYS; i++)
        scores[i] = -INFINITY;
    vf most = splat(*maximum);
    for (int i = 0; i < KEYS; i += LANES)
        most = larger(load(scores + i), most);
    const float top = largest(most);
    vf total = {0};
    for (int i = 0; i < KEYS; i += LANES) {
        const vf part = exp2_negative(load(scores + i) - top);
        store(scores + i, part);
        total += part;
    }
    if (top > *maximum) {
        const float factor = exp2_negative(splat(*maximum - top))[0];
        for (int element = 0; element < call->head_dim; element += LANES)
            store(sums + element, load(sums + element) * factor);
        *weight *= factor;
        *maximum = top;
    }
    *weight += sum(total);
}

INLINE int clamp(int value, int least, int most) {
    return value < least ? least : value > most ? most : value;
}

/* Attend rows [row, row + ROWS) to a packed tile; a row's query is at
 * `first_position + row / group`. */
static void attend_panel(
    const octavo_attention *call, const scratch *with, int row, int group, int first_position,
    int origin, int end
) {
    const int head_dim = call->head_dim, padded = PADDED(head_dim);
    const int window = call->sliding_window > 0 ? call->sliding_window : INT32_MAX / 2;
    const int last = first_position + (row + ROWS - 1) / group;
    const int first = first_position + row / group;
    const int columns = clamp((last + 1 < end ? last + 1 : end) - origin, 0, KEYS);
    if (columns == 0 || first - window + 1 >= origin + KEYS)
        return;
    float *sums = with->sums + (size_t)row * padded;
    multiply(
        head_dim, (columns + 2 * LANES - 1) / (2 * LANES) * (2 * LANES),
        with->query + (size_t)row * padded, padded, with->keys, KEYS, with->scores, KEYS, 0
    );
    for (int i = 0; i < ROWS; i++) {
        const int position = first_position + (row + i) / group;
        weigh_row(
            call, with->scores + i * KEYS, clamp(position - window + 1 - origin, 0, KEYS),
            clamp((position + 1 < end ? position + 1 : end) - origin, 0, KEYS),
            with->maxima + row + i, with->weights + row + i, sums + i * padded
        );
    }
    multiply(
        columns, (head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), with->scores, KEYS,
        with->values, padded, sums, padded, 1
    );
}

static void pack_queries(
    const octavo_attention *call, int token, int head, int group, int num_rows, const scratch *to
) {
    const int head_dim = call->head_dim, padded = PADDED(head_dim);
    const size_t bytes = element_size(call->is_bf16);
    const float factor = query_factor(call);
    for (int row = 0; row < num_rows; row++) {
        float *at = to->query + (size_t)row * padded;
        const int64_t place = (token + row / group) * call->query_token_stride
            + (head + row % group) * call->query_head_stride;
        widen(at, (const char *)call->query + place * (int64_t)bytes, call->is_bf16, head_dim);
        for (int i = 0; i < head_dim; i++)
            at[i] *= factor;
    }
    const int all = (num_rows + ROWS - 1) / ROWS * ROWS;
    memset(
        to->query + (size_t)num_rows * padded, 0, sizeof(float) * (size_t)(all - num_rows) * padded
    );
    memset(to->sums, 0, sizeof(float) * (size_t)all * padded);
    memset(to->weights, 0, sizeof(float) * (size_t)all);
    for (int row = 0; row < all; row++)
        to->maxima[row] = -INFINITY;
}

static void write_rows(
    const octavo_attention *call, int token, int head, int group, int num_rows,
    const scratch *from
) {
    const int head_dim = call->head_dim, padded = PADDED(head_dim);
    for (int row = 0; row < num_rows; row++) {
        const float *sums = from->sums + (size_t)row * padded;
        const float factor = 1 / from->weights[row];
        const int64_t place = (token + row / group) * call->out_token_stride
            + (head + row % group) * call->out_head_stride;
        if (!call->is_bf16) {
            float *to = (float *)call->out + place;
            for (int i = 0; i < head_dim; i++)
                to[i] = sums[i] * factor;
            continue;
        }
        uint16_t *to = (uint16_t *)call->out + place;
        for (int i = 0; i < head_dim; i += LANES) {
            const vu bits = round_bf16(load(sums + i) * factor) >> 16;
            for (int lane = 0; lane < LANES; lane++)
                to[i + lane] = (uint16_t)bits[lane];
        }
    }
}

static void attend_tile(
    const octavo_attention *call, const int32_t *item, int kv_head, const scratch *with
) {
    const int sequence = item[0], query = item[1];
    const int token = call->query_starts[sequence] + query;
    const int num_queries = call->query_starts[sequence + 1] - call->query_starts[sequence];
    const int context = call->context_lens[sequence];
    const int here = clamp(num_queries - query, 0, call->tile_queries);
    const int group = call->num_heads / call->num_kv_heads;
    const int first_position = context - num_queries + query, end = first_position + here;
    const int oldest = first_position + 1 - call->sliding_window;
    const int begin = call->sliding_window > 0 && oldest > 0 ? oldest : 0;

    pack_queries(call, token, kv_head * group, group, here * group, with);
    for (int origin = begin / KEYS * KEYS; origin < end; origin += KEYS) {
        pack_tile(
            call, sequence, kv_head, origin, origin > begin ? origin : begin,
            origin + KEYS < end ? origin + KEYS : end, with
        );
        for (int row = 0; row < here * group; row += ROWS)
            attend_panel(call, with, row, group, first_position, origin, end);
    }
    write_rows(call, token, kv_head * group, group, here * group, with);
}

static void prefill_body(void *argument) {
    work_queue *queue = argument;
    const octavo_attention *call = queue->attention;
    const size_t padded = PADDED(call->head_dim);
    const size_t group = (size_t)(call->num_heads / call->num_kv_heads);
    const size_t rows = (group * (size_t)call->tile_queries + ROWS - 1) / ROWS * ROWS;
    float *floats =
        scratch_floats(queue, (2 * rows + 2 * KEYS) * padded + ROWS * KEYS + 2 * rows);
    if (!floats)
        return;
    scratch with;
    with.query = floats;
    with.sums = with.query + rows * padded;
    with.keys = with.sums + rows * padded;
    with.values = with.keys + KEYS * padded;
    with.scores = with.values + KEYS * padded;
    with.maxima = with.scores + ROWS * KEYS;
    with.weights = with.maxima + rows;
    for (int32_t i; (i = take(queue)) < call->num_items * call->num_kv_heads;)
        attend_tile(
            call, call->items + 2 * (i / call->num_kv_heads), i % call->num_kv_heads, &with
        );
    free(floats);
}

/* Returns OK or NO_MEMORY. */
EXPORT int octavo_prefill(const octavo_attention *call) {
    work_queue queue = {call, 0, OK};
    run_parallel(prefill_body, &queue, call->num_threads);
    return queue.status;
}
