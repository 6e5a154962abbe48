/* Chunked prefill: causal attention of a chunk's queries to its prefix and itself.
 *
 * An item is a tile of queries and one KV head. Its rows are the queries of all heads of the
 * group. A word is 32 bits: one element in fp32, two neighbouring ones in bf16; products are
 * of words, their sums fp32. For each tile of 64 keys, K (transposed, word by word) and V (in
 * bf16 two keys to a word) are packed once, then six rows at a time go through score, softmax
 * and sum while those stay in the cache; softmax is fp32, its weights are rounded to bf16
 * where V is bf16. Key tiles begin at multiples of 64, so how a prompt was cut into chunks
 * does not change a result. Positions outside the context, the window included, are never
 * read: their K and V are zeros.
 * Source: FlashAttention-2 (Dao, 2023). */
#include "vectors.h"

enum { KEYS = 64, ROWS = 6 };

typedef struct {
    float *query;  /* [rows, padded] room for as many words */
    float *sums;   /* [rows, padded] */
    float *keys;   /* [words of a head, KEYS] words */
    float *values; /* [KEYS, padded] room; keys, or pairs of keys, by elements */
    float *scores; /* [ROWS, KEYS], then their weights, in words */
    float *maxima, *weights; /* [rows] */
} scratch;

/* Elements of a word. */
INLINE int per_word(int is_bf16) { return is_bf16 ? 2 : 1; }

/* c[ROWS, columns] = factor * a[ROWS, depth] b[depth, columns], or c plus the product. */
INLINE void multiply_words(
    int is_bf16, int depth, int columns, const float *restrict a, int a_stride,
    const float *restrict b, int b_stride, float *restrict c, int c_stride, int add, float factor
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
                const vf word = splat(a[row * a_stride + i]);
                left[row] = add_products(is_bf16, left[row], b_left, word);
                right[row] = add_products(is_bf16, right[row], b_right, word);
            }
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++) {
            store(c + row * c_stride + column, add ? left[row] : left[row] * factor);
            store(c + row * c_stride + column + LANES, add ? right[row] : right[row] * factor);
        }
    }
}

static void multiply(
    int is_bf16, int depth, int columns, const float *a, int a_stride, const float *b,
    int b_stride, float *c, int c_stride, int add, float factor
) {
    if (is_bf16)
        multiply_words(1, depth, columns, a, a_stride, b, b_stride, c, c_stride, add, factor);
    else
        multiply_words(0, depth, columns, a, a_stride, b, b_stride, c, c_stride, add, factor);
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

/* Elements of two rows, side by side in words. */
static void pair_up(
    uint32_t *restrict to, const uint16_t *restrict low, const uint16_t *restrict high, int count
) {
    for (int i = 0; i < count; i++)
        to[i] = (uint32_t)low[i] | (uint32_t)high[i] << 16;
}

/* Where one position's K or V stands. */
INLINE const char *row_at(
    const octavo_attention *call, const void *cache, int64_t block_stride, const int32_t *table,
    int position, int kv_head
) {
    const int64_t row =
        (int64_t)(position % call->block_size) * call->num_kv_heads + kv_head;
    const int64_t place = table[position / call->block_size] * block_stride + row * call->head_dim;
    return (const char *)cache + place * (int64_t)element_size(call->is_bf16);
}

/* Pack the K and V of positions [begin, end), which lie in the tile that begins at
 * `origin`; the rest of the tile is zeros. Uses `values` for K before V goes there. */
static void pack_tile(
    const octavo_attention *call, int sequence, int kv_head, int origin, int begin, int end,
    const scratch *to
) {
    const int32_t *table = call->tables + sequence * call->table_stride;
    const int head_dim = call->head_dim, padded = PADDED(head_dim), per = per_word(call->is_bf16);
    const size_t row_bytes = (size_t)head_dim * element_size(call->is_bf16);
    for (int key = 0; key < KEYS; key++) {
        const int position = origin + key;
        float *at = to->values + key * padded;
        if (position < begin || position >= end)
            memset(at, 0, row_bytes);
        else
            memcpy(
                at, row_at(call, call->keys, call->key_block_stride, table, position, kv_head),
                row_bytes
            );
    }
    for (int word = 0; word < head_dim / per; word += 8)
        for (int key = 0; key < KEYS; key += 8)
            transpose_8(
                to->keys + word * KEYS + key, KEYS, to->values + key * padded + word, padded
            );
    static const uint16_t nothing[2 * PADDED(MAX_HEAD_DIM)];
    for (int key = 0; key < KEYS; key += per) {
        float *at = to->values + key / per * padded;
        const char *rows[2];
        for (int i = 0; i < per; i++) {
            const int position = origin + key + i;
            rows[i] = position < begin || position >= end
                ? (const char *)nothing
                : row_at(call, call->values, call->value_block_stride, table, position, kv_head);
        }
        if (call->is_bf16)
            pair_up((uint32_t *)at, (const uint16_t *)rows[0], (const uint16_t *)rows[1], head_dim);
        else
            memcpy(at, rows[0], row_bytes);
        memset(at + head_dim, 0, sizeof(float) * (size_t)(padded - head_dim));
    }
}

/* Scores outside [low, high) are none. */
INLINE void mask_row(float *scores, int columns, int low, int high) {
    vi place;
    for (int i = 0; i < LANES; i++)
        place[i] = i;
    for (int i = 0; i < columns; i += LANES, place += LANES)
        store(
            scores + i,
            choose((place >= low) & (place < high), load(scores + i), splat(-INFINITY))
        );
}

/* Softmax of one row of scores, `columns` of them, of which [low, high) may be seen. */
static void weigh_row(
    const octavo_attention *call, float *scores, int columns, int low, int high, float *maximum,
    float *weight, float *sums
) {
    if (low >= high) {
        memset(scores, 0, sizeof(float) * (size_t)columns);
        return;
    }
    if (call->softcap > 0)
        for (int i = 0; i < columns; i += LANES)
            store(scores + i, cap(load(scores + i), call->softcap));
    if (low > 0 || high < columns)
        mask_row(scores, columns, low, high);
    vf most = splat(*maximum);
    for (int i = 0; i < columns; i += LANES)
        most = larger(load(scores + i), most);
    const float top = largest(most);
    vf total = {0};
    for (int i = 0; i < columns; i += LANES) {
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

/* To bf16, in place: two to a word. */
INLINE void round_row(float *weights, int columns) {
    for (int i = 0; i < columns; i += PAIR)
        store_bf16((uint16_t *)weights + i, load(weights + i), load(weights + i + LANES));
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
    const int seen = clamp((last + 1 < end ? last + 1 : end) - origin, 0, KEYS);
    if (seen == 0 || first - window + 1 >= origin + KEYS)
        return;
    const int columns = (seen + PAIR - 1) / PAIR * PAIR;
    float *sums = with->sums + (size_t)row * padded;
    const int is_bf16 = call->is_bf16, per = per_word(is_bf16);
    multiply(
        is_bf16, head_dim / per, columns, with->query + (size_t)row * padded, padded, with->keys,
        KEYS, with->scores, KEYS, 0, query_factor(call)
    );
    for (int i = 0; i < ROWS; i++) {
        const int position = first_position + (row + i) / group;
        weigh_row(
            call, with->scores + i * KEYS, columns, clamp(position - window + 1 - origin, 0, KEYS),
            clamp((position + 1 < end ? position + 1 : end) - origin, 0, KEYS),
            with->maxima + row + i, with->weights + row + i, sums + i * padded
        );
        if (is_bf16)
            round_row(with->scores + i * KEYS, columns);
    }
    multiply(
        is_bf16, (seen + per - 1) / per, (head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES),
        with->scores, KEYS, with->values, padded, sums, padded, 1, 1
    );
}

static void pack_queries(
    const octavo_attention *call, int token, int head, int group, int num_rows, const scratch *to
) {
    const int padded = PADDED(call->head_dim);
    const size_t size = element_size(call->is_bf16);
    for (int row = 0; row < num_rows; row++) {
        const int64_t place = (token + row / group) * call->query_token_stride
            + (head + row % group) * call->query_head_stride;
        memcpy(
            to->query + (size_t)row * padded, (const char *)call->query + place * (int64_t)size,
            (size_t)call->head_dim * size
        );
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
        uint16_t rounded[PAIR];
        for (int i = 0; i < head_dim; i += PAIR) { /* of which the last may be half a pair */
            store_bf16(rounded, load(sums + i) * factor, load(sums + i + LANES) * factor);
            memcpy(to + i, rounded, 2 * (size_t)(head_dim - i < PAIR ? head_dim - i : PAIR));
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

void octavo_prefill_items(work_queue *queue) {
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

static void prefill_body(void *argument) { octavo_prefill_items(argument); }

/* Returns OK or NO_MEMORY. */
EXPORT int octavo_prefill(const octavo_attention *call) {
    work_queue queue = {call, 0, OK};
    run_parallel(prefill_body, &queue, call->num_threads);
    return queue.status;
}
