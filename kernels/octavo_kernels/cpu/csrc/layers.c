/* What a decoder layer does between its matrix products, row by row: one pass over memory
 * where a chain of torch operators makes six. fp32 inside, whatever the rows hold. */
#include "vectors.h"

typedef struct {
    const octavo_rows *rows;
    void (*one)(const octavo_rows *, int64_t row);
    int64_t next;
} row_queue;

enum { ROWS_AT_ONCE = 4, LEAST_PARALLEL_ELEMENTS = 1 << 14 };

static void work(void *argument) {
    row_queue *queue = argument;
    int64_t num_rows = queue->rows->num_rows;
    for (;;) {
        int64_t begin = __atomic_fetch_add(&queue->next, ROWS_AT_ONCE, __ATOMIC_RELAXED);
        if (begin >= num_rows)
            return;
        int64_t end = begin + ROWS_AT_ONCE < num_rows ? begin + ROWS_AT_ONCE : num_rows;
        for (int64_t row = begin; row < end; row++)
            queue->one(queue->rows, row);
    }
}

static void for_each_row(const octavo_rows *rows, void (*one)(const octavo_rows *, int64_t)) {
    row_queue queue = {rows, one, 0};
    int64_t heads = rows->num_heads > 1 ? rows->num_heads : 1;
    int64_t elements = rows->num_rows * rows->width * heads;
    run_parallel(work, &queue, threads_for(elements, LEAST_PARALLEL_ELEMENTS, rows->num_threads));
}

INLINE char *at(const void *base, int64_t element, int is_bf16) {
    return (char *)base + element * (int64_t)element_size(is_bf16);
}

/* x += delta, then out = x / rms(x) * weight. */
INLINE void norm_row(const octavo_rows *rows, int64_t row, int is_bf16) {
    char *x = at(rows->x, row * rows->x_stride, is_bf16);
    char *out = at(rows->out, row * rows->out_stride, is_bf16);
    const char *delta = rows->y ? at(rows->y, row * rows->y_stride, is_bf16) : NULL;
    size_t step = PAIR * element_size(is_bf16);
    vf squares = {0};
    for (int64_t i = 0, place = 0; i < rows->width; i += PAIR, place += step) {
        pair value = load_pair(x + place, is_bf16, PAIR);
        if (delta) {
            pair more = load_pair(delta + place, is_bf16, PAIR);
            value.a += more.a, value.b += more.b;
            store_pair(x + place, is_bf16, PAIR, value);
            value = load_pair(x + place, is_bf16, PAIR); /* as it was rounded */
        }
        squares += value.a * value.a + value.b * value.b;
    }
    float factor = 1.0f / sqrtf(sum(squares) / (float)rows->width + rows->epsilon);
    const char *weight = rows->weight;
    for (int64_t i = 0, place = 0; i < rows->width; i += PAIR, place += step) {
        pair value = load_pair(x + place, is_bf16, PAIR);
        pair scale = load_pair(weight + place, is_bf16, PAIR);
        value.a *= factor * scale.a, value.b *= factor * scale.b;
        store_pair(out + place, is_bf16, PAIR, value);
    }
}

static void norm_row_fp32(const octavo_rows *rows, int64_t row) { norm_row(rows, row, 0); }
static void norm_row_bf16(const octavo_rows *rows, int64_t row) { norm_row(rows, row, 1); }

EXPORT void octavo_rms_norm(const octavo_rows *rows) {
    for_each_row(rows, rows->is_bf16 ? norm_row_bf16 : norm_row_fp32);
}

/* x += y. */
INLINE void add_row(const octavo_rows *rows, int64_t row, int is_bf16) {
    char *x = at(rows->x, row * rows->x_stride, is_bf16);
    const char *y = at(rows->y, row * rows->y_stride, is_bf16);
    size_t step = PAIR * element_size(is_bf16);
    for (int64_t i = 0; i < rows->width; i += PAIR, x += step, y += step) {
        pair value = load_pair(x, is_bf16, PAIR), more = load_pair(y, is_bf16, PAIR);
        value.a += more.a, value.b += more.b;
        store_pair(x, is_bf16, PAIR, value);
    }
}

static void add_row_fp32(const octavo_rows *rows, int64_t row) { add_row(rows, row, 0); }
static void add_row_bf16(const octavo_rows *rows, int64_t row) { add_row(rows, row, 1); }

EXPORT void octavo_add(const octavo_rows *rows) {
    for_each_row(rows, rows->is_bf16 ? add_row_bf16 : add_row_fp32);
}

/* out = silu(x) * y. */
INLINE void silu_row(const octavo_rows *rows, int64_t row, int is_bf16) {
    silu_mul(
        is_bf16, rows->width, at(rows->x, row * rows->x_stride, is_bf16),
        at(rows->y, row * rows->y_stride, is_bf16), at(rows->out, row * rows->out_stride, is_bf16)
    );
}

static void silu_row_fp32(const octavo_rows *rows, int64_t row) { silu_row(rows, row, 0); }
static void silu_row_bf16(const octavo_rows *rows, int64_t row) { silu_row(rows, row, 1); }

EXPORT void octavo_silu_mul(const octavo_rows *rows) {
    for_each_row(rows, rows->is_bf16 ? silu_row_bf16 : silu_row_fp32);
}

/* Rotate each head of x in place: its halves (a, b) become (a cos - b sin, b cos + a sin).
 * A row of y is the position's cosines, then its sines, half a head of each. */
INLINE void rotate_row(const octavo_rows *rows, int64_t row, int is_bf16) {
    int64_t half = rows->width / 2;
    const char *table = at(rows->y, row * rows->y_stride, is_bf16);
    size_t step = PAIR * element_size(is_bf16), offset = (size_t)half * element_size(is_bf16);
    for (int64_t head = 0; head < rows->num_heads; head++) {
        char *first = at(rows->x, row * rows->x_stride + head * rows->width, is_bf16);
        for (size_t place = 0; place < offset; place += step) {
            pair a = load_pair(first + place, is_bf16, PAIR);
            pair b = load_pair(first + offset + place, is_bf16, PAIR);
            pair cosine = load_pair(table + place, is_bf16, PAIR);
            pair sine = load_pair(table + offset + place, is_bf16, PAIR);
            pair left = {a.a * cosine.a - b.a * sine.a, a.b * cosine.b - b.b * sine.b};
            pair right = {b.a * cosine.a + a.a * sine.a, b.b * cosine.b + a.b * sine.b};
            store_pair(first + place, is_bf16, PAIR, left);
            store_pair(first + offset + place, is_bf16, PAIR, right);
        }
    }
}

void octavo_rotate_row(const octavo_rows *rows, int64_t row) {
    if (rows->is_bf16)
        rotate_row(rows, row, 1);
    else
        rotate_row(rows, row, 0);
}

EXPORT void octavo_rotate(const octavo_rows *rows) { for_each_row(rows, octavo_rotate_row); }
