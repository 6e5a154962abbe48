/* The largest element of each row, and where it stands: the first of several; of a row with a
 * NaN, the first of those. */
#include "vectors.h"

typedef struct {
    const void *x;   /* [num_rows, stride] */
    int64_t *places; /* [num_rows] */
    int64_t stride, num_rows, width; /* width at least 1 */
    int32_t is_bf16, num_threads;
} octavo_largest_call;

typedef struct {
    const octavo_largest_call *call;
    int64_t next;
} row_queue;

enum { BLOCK = 16 * PAIR, LEAST_PARALLEL_ELEMENTS = 1 << 14 };

INLINE float element(const char *row, int64_t place, int is_bf16) {
    if (!is_bf16)
        return ((const float *)row)[place];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[place] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int any(vi mask) {
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++)
        bits |= mask[i];
    return bits != 0;
}

/* The first place from `begin` to `end` that holds `wanted`, or NaN if that is NaN; -1: none. */
INLINE int64_t find(const char *row, int64_t begin, int64_t end, float wanted, int is_bf16) {
    for (int64_t i = begin; i < end; i++) {
        float value = element(row, i, is_bf16);
        if (value == wanted || (wanted != wanted && value != value))
            return i;
    }
    return -1;
}

INLINE int64_t largest_of_row(const char *row, int64_t width, int is_bf16) {
    const int64_t whole = width / BLOCK * BLOCK;
    const size_t step = PAIR * element_size(is_bf16);
    vf most = splat(-INFINITY);
    vi broken = {0};
    for (int64_t i = 0; i < whole; i += PAIR) {
        pair value = load_pair(row + i / PAIR * (int64_t)step, is_bf16, PAIR);
        most = larger(value.a, most), most = larger(value.b, most);
        broken |= (value.a != value.a) | (value.b != value.b);
    }
    float top = any(broken) ? NAN : largest(most);
    for (int64_t i = whole; i < width && top == top; i++) {
        float value = element(row, i, is_bf16);
        top = value > top || value != value ? value : top;
    }
    for (int64_t begin = 0; begin < whole; begin += BLOCK) {
        vi found = {0};
        for (int64_t i = begin; i < begin + BLOCK; i += PAIR) {
            pair value = load_pair(row + i / PAIR * (int64_t)step, is_bf16, PAIR);
            found |= (value.a == top) | (value.b == top);
            if (top != top)
                found |= (value.a != value.a) | (value.b != value.b);
        }
        if (any(found))
            return find(row, begin, begin + BLOCK, top, is_bf16);
    }
    return find(row, whole, width, top, is_bf16);
}

static void work(void *argument) {
    row_queue *queue = argument;
    const octavo_largest_call *call = queue->call;
    int64_t row;
    while ((row = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < call->num_rows) {
        const char *x = (const char *)call->x
            + row * call->stride * (int64_t)element_size(call->is_bf16);
        call->places[row] = call->is_bf16 ? largest_of_row(x, call->width, 1)
                                          : largest_of_row(x, call->width, 0);
    }
}

EXPORT void octavo_largest(const octavo_largest_call *call) {
    row_queue queue = {call, 0};
    const int64_t elements = call->num_rows * call->width;
    run_parallel(work, &queue, threads_for(elements, LEAST_PARALLEL_ELEMENTS, call->num_threads));
}
