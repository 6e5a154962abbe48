/* fp32 vectors of the machine's width, in the vector extensions of GCC and clang.
 *
 * bf16 is widened sixteen (or thirty-two) elements at a time without moving any between
 * lanes: the low half of every 32-bit word becomes one vector, the high half another.
 * A "pair" is thus the even and the odd elements of a bf16 row, and simply two
 * neighbouring vectors of an fp32 row; whoever packs and unpacks uses the same order. */
#ifndef OCTAVO_VECTORS_H
#define OCTAVO_VECTORS_H

#include "octavo.h"

#include <math.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#define PAIR (2 * LANES)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf8 __attribute__((vector_size(32)));
typedef int32_t vi8 __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (vi8){__VA_ARGS__})
#endif

/* The same anywhere in memory. A memcpy would say so too, but GCC 12 takes some of those
 * through the stack, in halves. */
typedef vf vf_anywhere __attribute__((aligned(1), may_alias));
typedef vu vu_anywhere __attribute__((aligned(1), may_alias));

INLINE vf load(const void *from) { return *(const vf_anywhere *)from; }

INLINE void store(void *to, vf vector) { *(vf_anywhere *)to = vector; }

INLINE vf splat(float value) { return value - (vf){0}; }

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* Lane i of the result is lane i ^ n of the vector. */
#ifdef __clang__
#define LANES_OF(vector, ...) __builtin_shufflevector(vector, vector, __VA_ARGS__)
#else
#define LANES_OF(vector, ...) __builtin_shuffle(vector, (vi){__VA_ARGS__})
#endif
#define EIGHT(from, n)                                                                        \
    (from) ^ (n), ((from) + 1) ^ (n), ((from) + 2) ^ (n), ((from) + 3) ^ (n),                 \
        ((from) + 4) ^ (n), ((from) + 5) ^ (n), ((from) + 6) ^ (n), ((from) + 7) ^ (n)
#if LANES == 16
#define SWAPPED(vector, n) LANES_OF(vector, EIGHT(0, n), EIGHT(8, n))
#else
#define SWAPPED(vector, n) LANES_OF(vector, EIGHT(0, n))
#endif

INLINE float largest(vf vector) {
#if LANES == 16
    vector = larger(vector, SWAPPED(vector, 8));
#endif
    vector = larger(vector, SWAPPED(vector, 4));
    vector = larger(vector, SWAPPED(vector, 2));
    return larger(vector, SWAPPED(vector, 1))[0];
}

/* Always in the same order. */
INLINE float sum(vf vector) {
#if LANES == 16
    vector += SWAPPED(vector, 8);
#endif
    vector += SWAPPED(vector, 4);
    vector += SWAPPED(vector, 2);
    return (vector + SWAPPED(vector, 1))[0];
}

typedef struct {
    vf a, b;
} pair;

INLINE size_t element_size(int is_bf16) { return is_bf16 ? 2 : 4; }

/* PAIR elements, or the first `count` of them (a constant) and zeros. */
INLINE pair load_pair(const void *from, int is_bf16, int count) {
    if (!is_bf16)
        return (pair){load(from), count == PAIR ? load((const float *)from + LANES) : (vf){0}};
    vu words = {0};
    if (count == PAIR)
        words = *(const vu_anywhere *)from;
    else
        memcpy(&words, from, (size_t)count * 2);
    return (pair){(vf)(words << 16), (vf)(words & 0xffff0000u)};
}

/* To the nearest bf16, in the upper half of each word; NaN stays NaN. */
INLINE vu round_bf16(vf vector) {
    vu bits = (vu)vector;
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    vu is_number = (vu)(vector == vector);
    return (rounded & is_number) | (0x7fc00000u & ~is_number);
}

INLINE void store_pair(void *to, int is_bf16, int count, pair value) {
    if (is_bf16) {
        vu words = (round_bf16(value.a) >> 16) | (round_bf16(value.b) & 0xffff0000u);
        memcpy(to, &words, (size_t)count * 2);
    } else {
        store(to, value.a);
        if (count == PAIR)
            store((float *)to + LANES, value.b);
    }
}

/* sum + the products of each lane's inputs: one of fp32, or the two bf16 of a word. VDPBF16PS
 * where the processor has it, else shifts and two multiplications. */
INLINE vf add_products(int is_bf16, vf sum, vf left, vf right) {
    if (!is_bf16)
        return sum + left * right;
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
#else
    sum += (vf)((vu)left << 16) * (vf)((vu)right << 16);
    return sum + (vf)((vu)left & 0xffff0000u) * (vf)((vu)right & 0xffff0000u);
#endif
}

/* Two vectors as PAIR neighbouring bf16. */
INLINE void store_bf16(void *to, vf a, vf b) {
#ifdef __AVX512BF16__
    __m512bh rounded = _mm512_cvtne2ps_pbh(b, a);
    memcpy(to, &rounded, sizeof rounded);
#else
    vu words[2] = {round_bf16(a) >> 16, round_bf16(b) >> 16};
    uint16_t rounded[PAIR];
    for (int i = 0; i < PAIR; i++)
        rounded[i] = (uint16_t)words[i / LANES][i % LANES];
    memcpy(to, rounded, sizeof rounded);
#endif
}

/* 2^x for x <= 0, 0 below 2^-126; relative error at most 1.2e-7, from a polynomial of
 * degree 6 (2e-9) and its rounding. NaN stays NaN. */
INLINE vf exp2_negative(vf x) {
    const float shifter = 0x1.8p23f; /* adding it rounds to an integer in the low bits */
    vi underflow = x < -126.0f;
    vf shifted = x + shifter;
    vf f = x - (shifted - shifter);
    vf p = splat(0.0001535336063f);
    p = p * f + 0.001339887487f;
    p = p * f + 0.009618437366f;
    p = p * f + 0.0555033247f;
    p = p * f + 0.2402264791f;
    p = p * f + 0.6931472029f;
    p = p * f + 1.0f;
    vi power = ((vi)shifted << 23) + (vi)p; /* adds the integer to p's exponent */
    return choose(x != x, x, (vf)(~underflow & power));
}

#define LOG2_E 1.44269504088896341f

INLINE vf silu(vf x) {
    vi negative = x < 0.0f;
    vf e = exp2_negative(choose(negative, x, -x) * LOG2_E);
    return x * choose(negative, e, splat(1)) / (1.0f + e);
}

/* out = silu(gates) * ups, `width` elements. */
INLINE void silu_mul(
    int is_bf16, int64_t width, const char *gates, const char *ups, char *out
) {
    size_t step = PAIR * element_size(is_bf16);
    for (int64_t i = 0, place = 0; i < width; i += PAIR, place += step) {
        pair gate = load_pair(gates + place, is_bf16, PAIR);
        pair up = load_pair(ups + place, is_bf16, PAIR);
        gate.a = silu(gate.a) * up.a, gate.b = silu(gate.b) * up.b;
        store_pair(out + place, is_bf16, PAIR, gate);
    }
}

/* softcap * tanh(x) in units of log2, for x = score / softcap. */
INLINE vf cap(vf x, float softcap) {
    vi sign = (vi)x & (int32_t)0x80000000;
    vf magnitude = (vf)((vi)x ^ sign);
    vf e = exp2_negative(magnitude * (-2 * LOG2_E));
    vf tanh_magnitude = (1.0f - e) / (1.0f + e);
    return (vf)((vi)tanh_magnitude | sign) * (softcap * LOG2_E);
}

/* The factor on the query that makes a score what softmax, or `cap`, wants of it. */
INLINE float query_factor(const octavo_attention *call) {
    return call->softcap > 0 ? call->scale / call->softcap : call->scale * LOG2_E;
}

#endif
