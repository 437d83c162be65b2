/* Float32 attention of a few new tokens to a cache. Their keys and values are written to the cache first.

   qkv is [batch, count, heads + 2 * groups, width] and contains queries, keys and values. Queries and keys are rotated by
   turns [rows_of_turns, count, width], the cosine and sine of each adjacent pair. row_apart and head_apart are the strides of
   the caches. Token m of a row is written to slot lengths[row] + start + m. If mask is null, it attends to the slots up to
   this slot. Otherwise, it attends to the slots of all tokens, and mask [rows_of_mask, count, end] is added to the scores.
   rows_of_* are 1 or batch. width is a multiple of 16. Scores have a soft cap unless cap is 0. The result is attended
   [batch, count, heads, width]. */

#include "vectors.h"

static inline void turn(const float *from, const float *by, float *to, long width)
{
    for (long e = 0; e < width; e += 2) {
        to[e] = from[e] * by[e] - from[e + 1] * by[e + 1];
        to[e + 1] = from[e] * by[e + 1] + from[e + 1] * by[e];
    }
}

/* Apply the soft cap: cap * tanh(score / cap). */
static inline void soften(float *scores, long number, float cap)
{
    for (long s = 0; s < number && cap > 0; s += LANES) {
        const vector score = *(vector *)(scores + s);
        *(vector *)(scores + s) = cap - 2.0f * cap / (1.0f + exponential(2.0f / cap * score));
    }
}

#define MOST 4   /* tokens processed jointly, which share cached data */
#define SCORES (1 << 17) /* maximum number of scores on the stack, unless one query has more */
#define BLOCK 64 /* slots whose values stay in the CPU cache while each query reads them */

/* Compute the products of a query with LANES keys. */
static inline __attribute__((always_inline)) vector scored(const float *query, const float *keys, const long width)
{
    vector products[LANES];
#pragma GCC unroll 16
    for (int s = 0; s < LANES; s++) {
        products[s] = *(const vector *)query * *(const vector *)(keys + s * width);
#pragma GCC unroll 16
        for (long e = LANES; e < width; e += LANES)
            products[s] += *(const vector *)(query + e) * *(const vector *)(keys + s * width + e);
    }
    return totals(products);
}

/* Replace scores by their softmax. The mask is added to the first `seen` slots, and later slots become 0. */
static void shares(float *scores, const float *mask, long seen, long slots)
{
    vector most = (vector){0} - INFINITY, sums = {0};
    for (long s = 0; mask && s < seen; s++)
        scores[s] += mask[s];
    for (long s = seen; s < slots || s % LANES; s++)
        scores[s] = -INFINITY;
    for (long s = 0; s < slots; s += LANES)
        most = larger(most, *(vector *)(scores + s));
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    for (long s = 0; s < slots; s += LANES) {
        vector shifted = *(vector *)(scores + s) - largest;
        integers counts = shifted > -87.0f; /* smaller terms are below 2^-125 of the largest */
        *(vector *)(scores + s) = (vector)((integers)exponential(shifted) & counts);
        sums += *(vector *)(scores + s);
    }
    float scale = 1.0f / total(sums);
    for (long s = 0; s < slots; s += LANES)
        *(vector *)(scores + s) *= scale;
}

/* Add the values of the slots from..until-1, weighted by `by`, to the `vectors` vectors at `to`. */
static inline __attribute__((always_inline)) void add_values(
    const float *by, const float *values, float *to, long from, long until, long width, const int vectors)
{
    vector sums[2][4]; /* sums of even and odd slots, since additions to one sum have a latency of four cycles */
#pragma GCC unroll 4
    for (int e = 0; e < vectors; e++) {
        sums[0][e] = from ? *(vector *)(to + LANES * e) : (vector){0};
        sums[1][e] = (vector){0};
    }
    long s = from;
    for (; s + 1 < until; s += 2)
#pragma GCC unroll 4
        for (int e = 0; e < vectors; e++) {
            sums[0][e] += by[s] * *(const vector *)(values + s * width + LANES * e);
            sums[1][e] += by[s + 1] * *(const vector *)(values + (s + 1) * width + LANES * e);
        }
    if (s < until)
#pragma GCC unroll 4
        for (int e = 0; e < vectors; e++)
            sums[0][e] += by[s] * *(const vector *)(values + s * width + LANES * e);
#pragma GCC unroll 4
    for (int e = 0; e < vectors; e++)
        *(vector *)(to + LANES * e) = sums[0][e] + sums[1][e];
}

/* Compute attention for several tokens that share keys and values, with `each` queries per token. Without a mask, the last
   token attends to all slots, and every other token to one slot fewer than the next token. */
static inline __attribute__((always_inline)) void attend_together(
    const float *queries, const float *keys, const float *values, const float *mask, float *attended, const long slots,
    const long width, const int tokens, const int each, const long end, const long token, const float cap)
{
    const long padded = (slots + LANES - 1) / LANES * LANES, fitting = SCORES / padded;
    const int number = tokens * each, most = fitting < 1 ? 1 : fitting < number ? fitting : number;
    float scores[most * padded], last[LANES * width]; /* keys of the last slots, which do not fill a vector */
    for (long e = 0; e < LANES * width; e++)
        last[e] = e < slots % LANES * width ? keys[slots / LANES * LANES * width + e] : 0;
    for (int first = 0; first < number; first += most) {
        const int stop = first + most < number ? first + most : number;
        for (long s = 0; s < slots; s += LANES)
            for (int q = first; q < stop; q++) {
                vector found = scored(queries + q * width, s + LANES > slots ? last : keys + s * width, width);
                *(vector *)(scores + (q - first) * padded + s) = found;
            }
        soften(scores, (stop - first) * padded, cap);
        for (int q = first; q < stop; q++) {
            const long seen = mask ? slots : slots - tokens + 1 + q / each;
            shares(scores + (q - first) * padded, mask ? mask + q / each * end : 0, seen, slots);
        }
        for (long from = 0; from < slots; from += BLOCK)
            for (int q = first; q < stop; q++) {
                const long until = from + BLOCK < slots ? from + BLOCK : slots;
                float *to = attended + q / each * token + q % each * width;
                long e = 0;
                for (; e + 4 * LANES <= width; e += 4 * LANES)
                    add_values(scores + (q - first) * padded, values + e, to + e, from, until, width, 4);
                for (; e < width; e += LANES)
                    add_values(scores + (q - first) * padded, values + e, to + e, from, until, width, 1);
            }
    }
}

#define SIDE (2 * LANES) /* queries processed jointly, one per lane */
#define TILE 128         /* slots whose scores stay in the CPU cache */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8 /* rows whose sums take 16 of 32 registers */
#else
#define ROWS 4 /* 8 of 16 registers */
#endif

/* Compute to[row] (+)= the sum over i of w[i] * x[row][i], for vectors w[i] of SIDE numbers and scalars x[row][i]. */
static inline __attribute__((always_inline)) void sums_of(
    const float *w, const float *x, long row_apart, long step_apart, long steps, float *to, const int rows, const int add)
{
    vector sums[2][ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++)
            sums[side][row] = add ? *(vector *)(to + row * SIDE + side * LANES) : (vector){0};
    for (long i = 0; i < steps; i++) {
        const vector left = *(const vector *)(w + i * SIDE), right = *(const vector *)(w + i * SIDE + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const float by = x[row * row_apart + i * step_apart];
            sums[0][row] += left * by;
            sums[1][row] += right * by;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++)
            *(vector *)(to + row * SIDE + side * LANES) = sums[side][row];
}

/* Replace the scores of a tile by their exponentials, and rescale earlier sums to the new maximum (online softmax). */
static void add_tile(float *scores, long slots, float *read, long width, float *largest, float *sums)
{
    for (int side = 0; side < SIDE; side += LANES) {
        vector most = *(vector *)(largest + side), sum = {0};
        for (long s = 0; s < slots; s++)
            most = larger(most, *(vector *)(scores + s * SIDE + side));
        const vector scale = exponential(*(vector *)(largest + side) - most); /* initial sums are 0 and stay 0 */
        *(vector *)(largest + side) = most;
        for (long s = 0; s < slots; s++) {
            const vector shifted = *(vector *)(scores + s * SIDE + side) - most;
            const integers counts = shifted > -87.0f;
            *(vector *)(scores + s * SIDE + side) = (vector)((integers)exponential(shifted) & counts);
            sum += *(vector *)(scores + s * SIDE + side);
        }
        *(vector *)(sums + side) = *(vector *)(sums + side) * scale + sum;
        for (long e = 0; e < width; e++)
            *(vector *)(read + e * SIDE + side) *= scale;
    }
}

/* Compute attention for SIDE queries [width][SIDE] that share keys and values. Query q attends to the first sees[q] slots,
   and sees is non-decreasing. */
static void attend_side_by_side(
    const float *queries, const float *keys, const float *values, const long *sees, float *read, long width, float cap)
{
    float scores[TILE * SIDE], largest[SIDE], sums[SIDE];
    for (int q = 0; q < SIDE; q++)
        largest[q] = -1e30f, sums[q] = 0;
    for (long e = 0; e < width * SIDE; e++)
        read[e] = 0;
    for (long from = 0; from < sees[SIDE - 1]; from += TILE) {
        const long slots = sees[SIDE - 1] - from < TILE ? sees[SIDE - 1] - from : TILE;
        const float *key = keys + from * width, *value = values + from * width;
        long s = 0;
        for (; s + ROWS <= slots; s += ROWS)
            sums_of(queries, key + s * width, width, 1, width, scores + s * SIDE, ROWS, 0);
        for (; s < slots; s++)
            sums_of(queries, key + s * width, width, 1, width, scores + s * SIDE, 1, 0);
        soften(scores, slots * SIDE, cap);
        for (s = sees[0] > from ? sees[0] - from : 0; s < slots; s++)
            for (int q = 0; q < SIDE && sees[q] <= from + s; q++)
                scores[s * SIDE + q] = -INFINITY;
        add_tile(scores, slots, read, width, largest, sums);
        for (long e = 0; e < width; e += ROWS)
            sums_of(scores, value + e, 1, width, slots, read + e * SIDE, ROWS, 1);
    }
    for (long e = 0; e < width; e++)
        for (int side = 0; side < SIDE; side += LANES)
            *(vector *)(read + e * SIDE + side) /= *(vector *)(sums + side);
}

void attend(
    const float *qkv, const float *turns, const float *mask, float *keys, float *values, const long *lengths,
    float *attended, long rows_of_turns, long rows_of_mask, long row_apart, long head_apart, int batch, int count,
    int heads, int groups, int width, int start, int end, int threads, float cap)
{
    const long token = (long)(heads + 2 * groups) * width;
    const float scale = 1.0f / sqrtf((float)width);
    const int shared = batch * groups * count / (2 * threads); /* tokens that can be processed jointly */
    const int tokens = shared < 1 ? 1 : shared < MOST ? shared : MOST, parts = (count + tokens - 1) / tokens;
    const int each = heads / groups, blocks = mask || count * each < SIDE ? 0 : (count * each + SIDE - 1) / SIDE;
    const int few = blocks ? 0 : batch * parts * groups; /* tasks of attend_together */
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int task = 0; task < batch * count * groups; task++) {
            const int row = task / (count * groups), m = task / groups % count, group = task % groups;
            const float *given = qkv + ((long)row * count + m) * token;
            const float *by = turns + ((rows_of_turns > 1 ? row : 0) * (long)count + m) * width;
            const long at = row * row_apart + group * head_apart + (lengths[row] + start + m) * width;
            turn(given + (heads + group) * (long)width, by, keys + at, width);
            for (int e = 0; e < width; e++)
                values[at + e] = given[(heads + groups + group) * (long)width + e];
        }
#pragma omp for schedule(static, 1)
        for (int task = 0; task < batch * blocks * groups; task++) {
            const int row = task / (blocks * groups), group = task / blocks % groups, first = task % blocks * SIDE;
            const long at = row * row_apart + group * head_apart;
            float queries[width * SIDE], read[width * SIDE], turned[width];
            long sees[SIDE];
            for (int q = 0; q < SIDE; q++) { /* the last token pads the block */
                const int token_of = first + q < count * each ? (first + q) / each : count - 1;
                const float *by = turns + ((rows_of_turns > 1 ? row : 0) * (long)count + token_of) * width;
                const float *given = qkv + ((long)row * count + token_of) * token + (group * each + (first + q) % each) * width;
                turn(given, by, turned, width);
                for (int e = 0; e < width; e++)
                    queries[e * SIDE + q] = turned[e] * scale;
                sees[q] = lengths[row] + start + token_of + 1;
            }
            attend_side_by_side(queries, keys + at, values + at, sees, read, width, cap);
            for (int q = first; q < first + SIDE && q < count * each; q++) {
                float *to = attended + (((long)row * count + q / each) * heads + group * each + q % each) * width;
                for (int e = 0; e < width; e++)
                    to[e] = read[e * SIDE + q - first];
            }
        }
#pragma omp for schedule(static)
        for (int task = 0; task < few; task++) {
            const int row = task / (parts * groups), group = task / parts % groups, m = task % parts * tokens;
            const int some = count - m < tokens ? count - m : tokens;
            const long at = row * row_apart + group * head_apart, slots = lengths[row] + start + (mask ? count : m + some);
            const float *added = mask ? mask + ((rows_of_mask > 1 ? row : 0) * (long)count + m) * end : 0;
            float *to = attended + ((long)row * count + m) * heads * width + group * each * width;
            float queries[some * each * width];
            for (int q = 0; q < some * each; q++) {
                const float *by = turns + ((rows_of_turns > 1 ? row : 0) * (long)count + m + q / each) * width;
                const float *given = qkv + ((long)row * count + m + q / each) * token + (group * each + q % each) * width;
                turn(given, by, queries + q * width, width);
            }
            for (int e = 0; e < some * each * width; e++)
                queries[e] *= scale;
#define ATTEND(width) \
    attend_together(queries, keys + at, values + at, added, to, slots, width, some, each, end, (long)heads * width, cap)
            if (width == 64) /* constants, so that loops can be unrolled */
                ATTEND(64);
            else if (width == 128)
                ATTEND(128);
            else
                ATTEND(width);
        }
    }
}
