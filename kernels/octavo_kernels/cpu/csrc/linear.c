/* x @ weight^T in fp32 or bf16, for the few to a few hundred rows of a step.
 *
 * A word is 32 bits: one input in fp32, two neighbouring ones in bf16. The weight is packed:
 * PAIR outputs of all inputs are one panel, word after word, so a panel is read once, from its
 * first byte to its last, while it meets every row of x. A tile of ROWS rows by PAIR outputs
 * stays in registers over all inputs. While one panel meets the rows, the next one is fetched,
 * spread evenly over them: memory never waits for arithmetic nor arithmetic for memory.
 *
 * An output is one sum in fp32 over the inputs in their order, however many rows there are and
 * whichever tile it falls in: a row is the same to the bit whatever rows stand beside it. In
 * bf16 it is rounded once, at the end; VDPBF16PS takes two inputs at once where the processor
 * has it, shifts and two multiplications do elsewhere. */
#include "vectors.h"

#if LANES == 16
enum { ROWS = 12 }; /* 24 of 32 registers */
#else
enum { ROWS = 6 }; /* 12 of 16 registers */
#endif

/* So many rows of a tile are reached from one pointer, by its distance to the next row: all
 * pointers then fit the integer registers. With one for each row the compiler keeps some in
 * vector registers, and fetching them from there takes turns with the products. */
enum { AHEAD = 3 };

typedef struct {
    const octavo_linear *call;
    void (*run)(const octavo_linear *call, int64_t panel, int64_t next);
    int64_t next, panels;
} panel_queue;

EXPORT int32_t octavo_panel_width(void) { return PAIR; }

EXPORT int32_t octavo_has_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* A weight as it is, and where it is packed to. */
typedef struct {
    const void *weight; /* [num_out, row_stride] */
    void *packed;       /* [panels, num_words, PAIR] words */
    int64_t row_stride, num_in, num_out;
    int32_t is_bf16, num_threads;
} octavo_packing;

typedef struct {
    const octavo_packing *call;
    int64_t next;
} packing_queue;

/* The words of a row are read where they stand, which may be anywhere. */
typedef uint32_t word_anywhere __attribute__((aligned(1), may_alias));
typedef float float_anywhere __attribute__((aligned(1), may_alias));

INLINE int64_t words_of(int is_bf16, int64_t num_in) { return is_bf16 ? num_in / 2 : num_in; }

static void pack_some(void *argument) {
    packing_queue *queue = argument;
    const octavo_packing *call = queue->call;
    const int64_t num_words = words_of(call->is_bf16, call->num_in);
    const int64_t stride = call->row_stride * (int64_t)element_size(call->is_bf16);
    for (;;) {
        int64_t panel = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        int64_t left = call->num_out - panel * PAIR;
        if (left <= 0)
            return;
        const char *from = (const char *)call->weight + panel * PAIR * stride;
        uint32_t *to = (uint32_t *)call->packed + panel * PAIR * num_words;
        for (int64_t word = 0; word < num_words; word++)
            for (int64_t out = 0; out < PAIR; out++)
                to[word * PAIR + out] =
                    out < left ? ((const word_anywhere *)(from + out * stride))[word] : 0;
    }
}

EXPORT void octavo_pack_linear(const octavo_packing *call) {
    packing_queue queue = {call, 0};
    run_parallel(pack_some, &queue, call->num_threads);
}

/* Rows of a weight as they were before it was packed. */
typedef struct {
    const void *weight;     /* [panels, num_words, PAIR] words */
    const int64_t *indices; /* [num_rows], each below num_out */
    void *out;              /* [num_rows, num_in] */
    int64_t num_rows, num_in;
    int32_t is_bf16, num_threads;
} octavo_unpacking;

typedef struct {
    const octavo_unpacking *call;
    int64_t next;
} unpacking_queue;

static void unpack_some(void *argument) {
    unpacking_queue *queue = argument;
    const octavo_unpacking *call = queue->call;
    const int64_t num_words = words_of(call->is_bf16, call->num_in);
    int64_t row;
    while ((row = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < call->num_rows) {
        const int64_t index = call->indices[row];
        const uint32_t *from =
            (const uint32_t *)call->weight + index / PAIR * PAIR * num_words + index % PAIR;
        word_anywhere *to = (word_anywhere *)call->out + row * num_words;
        for (int64_t word = 0; word < num_words; word++)
            to[word] = from[word * PAIR];
    }
}

enum { LEAST_PARALLEL_ROWS = 4 };

EXPORT void octavo_unpack_rows(const octavo_unpacking *call) {
    unpacking_queue queue = {call, 0};
    run_parallel(
        unpack_some, &queue, threads_for(call->num_rows, LEAST_PARALLEL_ROWS, call->num_threads)
    );
}

/* Rows that meet a panel together, and what is fetched of a coming panel meanwhile. */
typedef struct {
    int64_t first;
    int num_rows;
    const char *coming;
    int64_t coming_step;
} share;

INLINE int64_t panels_of(int64_t num_out) { return (num_out + PAIR - 1) / PAIR; }

INLINE int64_t shares_of(const octavo_linear *call) { return (call->num_rows + ROWS - 1) / ROWS; }

/* One of the shares that all rows and the panel `next` are divided into. */
INLINE share share_of(const octavo_linear *call, int64_t index, int64_t next) {
    const int64_t count = shares_of(call), num_words = words_of(call->is_bf16, call->num_in);
    const int64_t word_bytes = PAIR * (int64_t)sizeof(float);
    const int64_t step = (word_bytes + count - 1) / count;
    const int64_t first = index * call->num_rows / count;
    return (share){
        first, (int)((index + 1) * call->num_rows / count - first),
        (const char *)call->weight + (next * word_bytes + index * step) * num_words, step,
    };
}

/* A share's rows by one panel, all outputs of which go to `out`. */
INLINE void tile(int is_bf16, int num_rows, const octavo_linear *call, const share *rows,
                 int64_t panel, char *out, int64_t out_stride) {
    const int64_t size = (int64_t)element_size(is_bf16);
    const int64_t num_words = words_of(is_bf16, call->num_in);
    int64_t x_stride = call->x_stride * size;
    const char *coming = rows->coming, *x[ROWS / AHEAD];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS / AHEAD; i++)
        x[i] = (const char *)call->x + (rows->first + AHEAD * i) * x_stride;
    const float *weight = (const float *)call->weight + panel * num_words * PAIR;
    pair sums[ROWS];
    pair start = {{0}, {0}};
    if (call->bias)
        start = load_pair(call->bias + panel * PAIR, 0, PAIR);
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
        sums[row] = start;
    for (int64_t word = 0; word < num_words; word++) {
        vf a = load(weight), b = load(weight + LANES);
        weight += PAIR;
        __builtin_prefetch(coming, 0, 2);
        coming += rows->coming_step;
        __asm__("" : "+r"(x_stride)); /* sums with it are made here, not kept: see AHEAD */
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            const char *at = x[row / AHEAD] + row % AHEAD * x_stride;
            vf factor = splat(*(const float_anywhere *)at);
            sums[row].a = add_products(is_bf16, sums[row].a, a, factor);
            sums[row].b = add_products(is_bf16, sums[row].b, b, factor);
        }
#pragma GCC unroll 4
        for (int i = 0; i < ROWS / AHEAD; i++)
            x[i] += sizeof(float);
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
        if (is_bf16) {
            store_bf16(out + row * out_stride * size, sums[row].a, sums[row].b);
        } else {
            store(out + row * out_stride * size, sums[row].a);
            store(out + row * out_stride * size + sizeof(vf), sums[row].b);
        }
}

/* A tile of a dtype and a number of rows that are known when this is compiled. */
static void any_tile(
    const octavo_linear *call, share rows, int64_t panel, char *out, int64_t out_stride
) {
#define TILE(count)                                                                              \
    case count:                                                                                  \
        if (call->is_bf16)                                                                       \
            tile(1, count, call, &rows, panel, out, out_stride);                                 \
        else                                                                                     \
            tile(0, count, call, &rows, panel, out, out_stride);                                 \
        break;
    switch (rows.num_rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if LANES == 16
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
#undef TILE
}

/* Room for a tile's outputs. */
typedef char outputs[ROWS * PAIR * sizeof(float)];

/* All rows of one panel, while `next` is fetched. The last panel may have fewer outputs than
 * PAIR. */
static void run_panel(const octavo_linear *call, int64_t panel, int64_t next) {
    const int64_t column = panel * PAIR, num_columns = call->num_out - column;
    const int64_t size = (int64_t)element_size(call->is_bf16), stride = call->num_out * size;
    outputs whole;
    for (int64_t i = 0; i < shares_of(call); i++) {
        const share rows = share_of(call, i, next);
        char *out = (char *)call->out + rows.first * stride + column * size;
        if (num_columns >= PAIR) {
            any_tile(call, rows, panel, out, call->num_out);
            continue;
        }
        any_tile(call, rows, panel, whole, PAIR);
        for (int row = 0; row < rows.num_rows; row++)
            memcpy(out + row * stride, whole + row * PAIR * size, (size_t)(num_columns * size));
    }
}

/* All rows of one panel of gates and its panel of ups, tile by tile, while `next` and its are
 * fetched. What silu takes was rounded to the dtype, as it would be in memory. */
static void run_gated(const octavo_linear *call, int64_t panel, int64_t next) {
    const int64_t half = call->num_out / 2, ups = panels_of(half);
    const int64_t size = (int64_t)element_size(call->is_bf16);
    outputs gate, up;
    for (int64_t i = 0; i < shares_of(call); i++) {
        const share rows = share_of(call, i, next);
        any_tile(call, rows, panel, gate, PAIR);
        any_tile(call, share_of(call, i, next + ups), panel + ups, up, PAIR);
        char *out = (char *)call->out + (rows.first * half + panel * PAIR) * size;
        for (int64_t row = 0; row < rows.num_rows; row++)
            silu_mul(
                call->is_bf16, PAIR, gate + row * PAIR * size, up + row * PAIR * size,
                out + row * half * size
            );
    }
}

/* Each thread knows the panel that it works on next, and fetches that one. */
static void work(void *argument) {
    panel_queue *queue = argument;
    int64_t panel = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
    while (panel < queue->panels) {
        int64_t next = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        queue->run(queue->call, panel, next);
        panel = next;
    }
}

enum { LEAST_PARALLEL_PRODUCTS = 1 << 16 };

EXPORT void octavo_multiply(const octavo_linear *call) {
    if (!call->num_rows || !call->num_in)
        return;
    int64_t products = call->num_rows * call->num_in * call->num_out;
    panel_queue queue = {call, run_panel, 0, panels_of(call->num_out)};
    if (call->is_gated)
        queue.run = run_gated, queue.panels /= 2;
    run_parallel(
        work, &queue, threads_for(products, LEAST_PARALLEL_PRODUCTS, call->num_threads)
    );
}
