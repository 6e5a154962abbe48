/* The flat ABI between ops.py and the C kernels, and what the kernels share.
 *
 * Every struct here is mirrored field by field by a ctypes.Structure in library.py.
 * Strides and offsets count elements, not bytes. */
#ifndef OCTAVO_H
#define OCTAVO_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Rows of fp32 scratch are this far apart at least: room for a vector pair of any width. */
#define PADDED(head_dim) (((head_dim) + 31) / 32 * 32)

enum { OK = 0, NO_MEMORY = 1, MAX_HEAD_DIM = 256 };

/* One layer's attention, decode or prefill. Tensors as in reference.py; the last
 * dimension of query and out, and the last three of a cache, are contiguous. */
typedef struct {
    const void *query, *keys, *values;
    void *out;
    int64_t query_token_stride, query_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t key_block_stride, value_block_stride;
    const int32_t *tables; /* [num_seqs, table_stride] */
    int64_t table_stride;
    const int32_t *context_lens; /* [num_seqs] */
    const int32_t *query_starts; /* [num_seqs + 1], prefill only */
    /* Decode: [num_items, 4] sequence, first and last + 1 position, partial or -1.
     * Prefill: [num_items, 2] sequence, first query of the tile. */
    const int32_t *items;
    /* Decode only: scratch of the sequences that several items share. */
    const int32_t *first_partial; /* [num_seqs + 1] */
    int32_t *pending;             /* [num_seqs] partials to come, num_parts times each */
    float *partials;              /* [num_partials, num_heads, PADDED(head_dim) + 2] */
    int32_t num_items, num_parts; /* a part is a share of the KV heads, decode only */
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t is_bf16, num_threads;
    int32_t tile_queries;   /* prefill only */
    int32_t sliding_window; /* 0: none */
    float scale, softcap;   /* softcap 0: none */
} octavo_attention;

/* Rows of x and y in, rows of x or out changed; strides in elements. `width` is a row's
 * elements, or for octavo_rotate a head's, of which a row has `num_heads`. */
typedef struct {
    void *x;
    const void *y, *weight;
    void *out;
    int64_t x_stride, y_stride, out_stride;
    int64_t num_rows, width, num_heads;
    float epsilon;
    int32_t is_bf16, num_threads;
} octavo_rows;

/* One product; see linear.c. Elements are of 4 bytes, or of 2 if is_bf16. If is_gated, the
 * first half of its outputs are gates, and silu(gate) * the other half is what goes to `out`. */
typedef struct {
    const void *x;      /* [num_rows, x_stride] */
    const void *weight; /* [panels, num_words, PAIR] words */
    const float *bias;  /* [panels, PAIR] or NULL */
    void *out;          /* [num_rows, num_out], or half of it */
    int64_t x_stride, num_rows, num_in, num_out; /* a whole PAIR in each half, if is_gated */
    int32_t is_bf16, num_threads, is_gated;
} octavo_linear;

/* New K/V on their way to the pool. */
typedef struct {
    const void *source;
    void *cache;
    int64_t token_stride, head_stride, block_stride;
} octavo_write;

typedef struct {
    octavo_write keys, values;
    const int64_t *slots; /* [num_tokens]; a negative one is skipped */
    int64_t num_tokens, block_size, num_kv_heads, head_dim, element_bytes, num_threads;
} octavo_writes;

/* The threads are those of the OpenMP runtime that torch has loaded already: its entry
 * point is called as a compiler would call it, and resolved when this library is
 * loaded. So no second runtime comes into the process, whoever compiles this. */
void GOMP_parallel(void (*body)(void *), void *argument, unsigned num_threads, unsigned flags);

/* How many threads work on something of this size: what is smaller than `least` is done
 * sooner than a second thread wakes. */
INLINE int threads_for(int64_t size, int64_t least, int num_threads) {
    return size >= least ? num_threads : 1;
}

INLINE void run_parallel(void (*body)(void *), void *argument, int num_threads) {
    if (num_threads > 1)
        GOMP_parallel(body, argument, (unsigned)num_threads, 0);
    else
        body(argument);
}

EXPORT void octavo_rms_norm(const octavo_rows *rows);
EXPORT void octavo_silu_mul(const octavo_rows *rows);
EXPORT void octavo_rotate(const octavo_rows *rows);
EXPORT void octavo_add(const octavo_rows *rows);
EXPORT void octavo_multiply(const octavo_linear *call);
EXPORT int octavo_decode(const octavo_attention *call);
EXPORT int octavo_prefill(const octavo_attention *call);
EXPORT void octavo_reshape_and_cache(const octavo_writes *writes);

/* What one token, or row, of these is: for a call that does several things to each. */
void octavo_rotate_row(const octavo_rows *rows, int64_t row);
void octavo_write_token(const octavo_writes *writes, int64_t token);

/* Items handed to whichever thread is free; `status` is the first failure. */
typedef struct {
    const octavo_attention *attention;
    int32_t next, status;
} work_queue;

INLINE int32_t take(work_queue *queue) {
    return __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
}

/* Work on a queue of decode's or prefill's items until it is empty. */
void octavo_decode_items(work_queue *queue);
void octavo_prefill_items(work_queue *queue);

INLINE void *scratch_floats(work_queue *queue, size_t count) {
    void *scratch = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (!scratch)
        __atomic_store_n(&queue->status, NO_MEMORY, __ATOMIC_RELAXED);
    return scratch;
}

#endif
