/* x @ weight^T in fp32, for the few to a few hundred rows of a step.
 *
 * The weight is packed: PAIR outputs of all inputs are one panel, input after input, so a
 * panel is read once, from its first byte to its last, while it meets every row of x. A tile
 * of ROWS rows by PAIR outputs stays in registers over all inputs. While one panel meets the
 * rows, the next one is fetched, spread evenly over them: memory never waits for arithmetic
 * nor arithmetic for memory.
 *
 * An output is one sum over the inputs in their order, however many rows there are and
 * whichever tile it falls in: a row is the same to the bit whatever rows stand beside it. */
#include "vectors.h"

#if LANES == 16
enum { ROWS = 12 }; /* 24 of 32 registers */
#else
enum { ROWS = 6 }; /* 12 of 16 registers */
#endif

typedef struct {
    const float *x;      /* [num_rows, x_stride] */
    const float *weight; /* [panels, num_in, PAIR] */
    const float *bias;   /* [panels, PAIR] or NULL */
    float *out;          /* [num_rows, num_out] */
    int64_t x_stride, num_rows, num_in, num_out;
    int32_t num_threads;
} octavo_linear;

typedef struct {
    const octavo_linear *call;
    int64_t next, panels, at_once;
} panel_queue;

EXPORT int32_t octavo_panel_width(void) { return PAIR; }

/* A weight as it is, and where it is packed to. */
typedef struct {
    const float *weight; /* [num_out, row_stride] */
    float *packed;       /* [panels, num_in, PAIR] */
    int64_t row_stride, num_in, num_out;
    int32_t num_threads;
} octavo_packing;

typedef struct {
    const octavo_packing *call;
    int64_t next;
} packing_queue;

static void pack_some(void *argument) {
    packing_queue *queue = argument;
    const octavo_packing *call = queue->call;
    for (;;) {
        int64_t panel = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        int64_t left = call->num_out - panel * PAIR;
        if (left <= 0)
            return;
        const float *from = call->weight + panel * PAIR * call->row_stride;
        float *to = call->packed + panel * PAIR * call->num_in;
        for (int64_t in = 0; in < call->num_in; in++)
            for (int64_t out = 0; out < PAIR; out++)
                to[in * PAIR + out] = out < left ? from[out * call->row_stride + in] : 0;
    }
}

EXPORT void octavo_pack_fp32(const octavo_packing *call) {
    packing_queue queue = {call, 0};
    run_parallel(pack_some, &queue, call->num_threads);
}

/* One panel by `num_rows` rows from `first` on, all outputs of which go to `out`. */
INLINE void tile(const octavo_linear *call, int num_rows, int64_t first, int64_t panel, float *out,
                 int64_t out_stride, const char *coming, int64_t coming_step) {
    const float *x = call->x + first * call->x_stride;
    const float *weight = call->weight + panel * call->num_in * PAIR;
    pair sums[ROWS];
    pair start = {{0}, {0}};
    if (call->bias)
        start = load_pair(call->bias + panel * PAIR, 0, PAIR);
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
        sums[row] = start;
    for (int64_t in = 0; in < call->num_in; in++) {
        vf a = load(weight), b = load(weight + LANES);
        weight += PAIR;
        __builtin_prefetch(coming, 0, 2);
        coming += coming_step;
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            vf factor = splat(x[row * call->x_stride + in]);
            sums[row].a += factor * a, sums[row].b += factor * b;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++) {
        store(out + row * out_stride, sums[row].a);
        store(out + row * out_stride + LANES, sums[row].b);
    }
}

/* A tile of a number of rows that is known when this is compiled. */
static void any_tile(const octavo_linear *call, int num_rows, int64_t first, int64_t panel,
                     float *out, int64_t out_stride, const char *coming, int64_t coming_step) {
#define TILE(rows)                                                                               \
    case rows:                                                                                   \
        tile(call, rows, first, panel, out, out_stride, coming, coming_step);                    \
        break;
    switch (num_rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if LANES == 16
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
#undef TILE
}

/* All rows of one panel. The last panel may have fewer outputs than PAIR. */
static void run_panel(const octavo_linear *call, int64_t panel) {
    int64_t column = panel * PAIR, num_columns = call->num_out - column;
    int64_t tiles = (call->num_rows + ROWS - 1) / ROWS;
    int64_t bytes = call->num_in * PAIR * (int64_t)sizeof(float);
    const char *coming = (const char *)call->weight + (panel + 1) * bytes;
    int64_t coming_step = (bytes / call->num_in + tiles - 1) / tiles;
    float whole[ROWS * PAIR];
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = t * call->num_rows / tiles;
        int num_rows = (int)((t + 1) * call->num_rows / tiles - first);
        float *out = call->out + first * call->num_out + column;
        const char *share = coming + t * coming_step * call->num_in;
        if (num_columns >= PAIR) {
            any_tile(call, num_rows, first, panel, out, call->num_out, share, coming_step);
            continue;
        }
        any_tile(call, num_rows, first, panel, whole, PAIR, share, coming_step);
        for (int row = 0; row < num_rows; row++)
            memcpy(out + row * call->num_out, whole + row * PAIR,
                   (size_t)num_columns * sizeof(float));
    }
}

static void work(void *argument) {
    panel_queue *queue = argument;
    for (;;) {
        int64_t panel = __atomic_fetch_add(&queue->next, queue->at_once, __ATOMIC_RELAXED);
        if (panel >= queue->panels)
            return;
        int64_t end = panel + queue->at_once;
        for (end = end < queue->panels ? end : queue->panels; panel < end; panel++)
            run_panel(queue->call, panel);
    }
}

/* Neighbouring panels go to one thread, in pieces small enough that a thread which another
 * process holds up does not hold up the rest. */
enum { PIECES_PER_THREAD = 8 };

EXPORT void octavo_linear_fp32(const octavo_linear *call) {
    if (!call->num_rows || !call->num_in)
        return;
    int64_t panels = (call->num_out + PAIR - 1) / PAIR;
    int64_t pieces = PIECES_PER_THREAD * (int64_t)call->num_threads;
    panel_queue queue = {call, 0, panels, (panels + pieces - 1) / pieces};
    run_parallel(work, &queue, call->num_threads);
}
